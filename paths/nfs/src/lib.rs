//! An NFSv3 server (RFC 1813) on the page cache.
//!
//! The way of a request:
//! 1. [`commands`] has the program's subcommand: it opens the directory, builds the memory, and starts the server.
//! 2. `server` accepts connections and receives requests (`record`), the bytes of a WRITE in pages of the service thread's
//!    array (`pages`), which the thread fills again before its next request.
//! 3. `service` chooses the program: `mount` gives the handle of the tree's root, `nfs` has the procedures.
//! 4. A procedure opens the file of a handle (`handles`, `export`) and acts as the user of the request (`credentials`). What
//!    it answers with comes from the file system, or from `data`.
//! 5. `data` keeps the contents of files in a `PageCache`. A WRITE's pages move into it, and a READ is answered with pages
//!    that it lends. The server sends these without a copy of its own.
//!
//! Invariants stand where they are kept: S in `server`, W in its `crew`, R in its `room`, N in its `input`, A in `pages`, D in
//! `data`, E in `export`, C in `credentials`.
//!
//! Not supported: locks (NLM), UDP, Kerberos, other file systems below the exported directory.
mod call;
pub mod commands;
mod credentials;
mod data;
mod error;
mod export;
#[cfg(fuzzing)]
pub mod fuzzing;
mod handles;
mod mount;
mod nfs;
pub mod pages;
mod portmap;
mod record;
mod reply_cache;
mod server;
mod service;
mod status;
mod sync;
mod syscalls;
mod xdr;

pub use error::Error;
