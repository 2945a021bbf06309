//! Serving a volume to NBD clients: the way of bytes between sockets and a disk, through pages of the allocator.
//!
//! ```text
//!  client ──socket──> connection ──borrowed pages──> path: encrypt ──pages of the pool──> disk
//!                         ^                             decrypt <──borrowed pages────────── disk
//!                         └── outbox <──answers, pages────┘
//! ```
//!
//! From the outside in: `Server` accepts clients and hands each to a `worker`, a thread with an epoll and a way to the
//! disk of its own. A `connection` is one client's state; it feeds [`crate::nbd`] and moves bytes by `socket`, with `tls` or without, and `outbox`.
//! [`DataPath`] encrypts and decrypts between the buffers of [`Memory`]; `disk` and `ring` read and write them.
//!
//! `crew` are threads that help with long reads, `syncs` lets one sync at a time begin, and `requests` is what is under way. What is no NBD client, a mount, asks
//! by `calls`.
//!
//! Locks: a worker holds none while it waits, but in the pool, whose own rules are in `memory`. A caller of [`VolumeFile`]
//! holds that file's sectors while it waits for the pool and the disk; neither asks for them.
mod buffer;
mod calls;
mod connection;
mod crew;
mod disk;
#[cfg(test)]
mod fixture;
mod memory;
mod outbox;
mod path;
mod requests;
mod ring;
mod server;
mod socket;
mod syncs;
mod tls;
mod worker;

use std::io;
use std::sync::{Arc, Mutex};

pub use buffer::Buffer;
pub use calls::VolumeFile;
pub use connection::TimeLimits;
pub use disk::{Disk, Way};
pub use memory::{Memory, MemoryStats, Patience};
pub use path::DataPath;
pub use server::{Listener, Options, Server};
pub use tls::{Pem, TlsServer};

use crate::nbd::Config;

/// What all workers share.
struct Shared {
    path: DataPath,
    config: Arc<Config>,
    tls: Option<TlsServer>,
    limits: TimeLimits,
    may_discard: bool,
    /// What has stopped a worker.
    failure: Mutex<Option<io::Error>>,
}
