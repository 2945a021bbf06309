//! An NFSv3 server (RFC 1813) in a process. Its threads fill arrays of pages in bulk, as Linux's `sunrpc` does.
//!
//! A request's way, from the outside in:
//! 1. `server` accepts connections and has a few threads wait for what is readable. A thread reads one record
//!    (`record`, RFC 5531): the head first, so that a WRITE's bytes begin at a page of the thread's array (`pages`).
//! 2. `call` is the request as the programs see it: who asks, which procedure, its arguments.
//! 3. `mount` and `procedures` answer it. `args` reads arguments without trust in lengths.
//! 4. `export` finds the file of a handle, and names within the exported tree; nothing else. `handles` makes and checks
//!    handles, `credentials` has a thread act as the caller.
//! 5. `data` reads and writes files through a page cache. What was written unstably is made durable by COMMIT.
mod args;
mod call;
mod credentials;
mod data;
mod export;
mod handles;
mod mount;
mod pages;
mod procedures;
mod record;
mod server;
