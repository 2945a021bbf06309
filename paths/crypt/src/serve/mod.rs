//! Serving a volume to NBD clients: how bytes move between sockets and a disk, through pages of the allocator.
//!
//! ```text
//!  client ──socket──> connection ──borrowed pages──> path: encrypt ──pages of the pool──> disk
//!                         ^                             decrypt <──borrowed pages────────── disk
//!                         └── outbox <──answers, pages────┘
//! ```
//!
//! From the outside in: `Server` accepts clients and hands each to a `worker`, a thread with an epoll instance and a
//! disk engine of its own. A `connection` is one client's state; it feeds [`crate::nbd`], receives bytes by `socket`,
//! with `tls` or without, and sends them by `outbox`. [`DataPath`] encrypts and decrypts between the buffers of
//! [`Memory`]; `disk` and `ring` read and write them. With a page cache (`cached`), reads are served from it. What is
//! under the volume (`behind`) is a file, or an export of another server, `far`, with threads of its own.
//!
//! A server may have several volumes. Each worker has an engine for each of them, a client has one volume, and all share
//! the memory.
//!
//! `crew` has threads that help with long reads, `syncs` lets one sync run at a time, and `requests` has the requests
//! under way. A mount, which is no NBD client, uses `calls`. `tally` and `health` count and log what happens, `figures`
//! shows the counts.
//!
//! Locks: a worker holds no lock while it waits, except inside the pool, whose rules are in `memory`. A caller of
//! [`VolumeFile`] holds that file's sector lock while it waits for the pool and the disk; neither takes that lock.
mod behind;
mod buffer;
mod cached;
mod calls;
mod connection;
mod crew;
mod disk;
mod far;
mod figures;
#[cfg(test)]
mod fixture;
mod health;
mod memory;
mod outbox;
mod path;
mod requests;
mod ring;
mod server;
mod socket;
mod syncs;
mod tally;
mod tls;
mod worker;

use std::io;
use std::sync::{Arc, Mutex, OnceLock};

pub use behind::Behind;
pub use buffer::Buffer;
pub use calls::VolumeFile;
pub use connection::TimeLimits;
pub use disk::{Disk, Way};
#[cfg(fuzzing)]
pub(crate) use far::check_far_end;
pub use far::{Far, FarOptions};
pub(crate) use far::{is_same_far, is_uri};
pub use memory::{Memory, MemoryStats, Patience};
pub use path::DataPath;
pub use server::{Listener, Options, Server};
pub use tls::{Pem, TlsServer};

use crate::nbd::Config;

/// The state that all workers share.
struct Shared {
    /// One for each export of `config`, in their order. All have the same memory.
    volumes: Vec<Served>,
    config: Arc<Config>,
    tls: Option<TlsServer>,
    limits: TimeLimits,
    may_discard: bool,
    figures: figures::Figures,
    /// The error that stopped a worker.
    failure: Mutex<Option<io::Error>>,
}

/// A volume that is served.
struct Served {
    path: DataPath,
    /// Plain pages, if the server keeps any. Each connection has an opener of its own.
    cached: OnceLock<pagemill::CachedFile>,
}

impl Shared {
    /// The first volume, for what concerns the memory of all.
    fn path(&self) -> &DataPath {
        &self.volumes[0].path
    }
}
