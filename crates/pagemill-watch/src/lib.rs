//! What a running process shows of its allocators to those who watch it from outside.
//!
//! A [`Snapshot`] is what one allocator's counters say at one moment, read without a lock (C3.13). [`FIGURES`] is the
//! one list of what can be told of it: name, help, kind, and how it is read. Everything that leaves the process comes
//! out of that list: Prometheus text ([`prometheus`]), JSON and the socket that serves both ([`StatsServer`], which
//! `pagemill top` asks), the `metrics` facade (feature `metrics`). A counter that is added to Pagemill's table is in all
//! of them, and in the table of `pagemill top`.
//!
//! All of it reads by `pagemill`'s public interface. Nothing here stands on a request's way: who does not look pays
//! nothing.
//!
//! ```
//! let path = std::env::temp_dir().join(format!("pagemill-front-{}", std::process::id()));
//! let _server = pagemill_watch::serve_stats(&path)?; // and then: pagemill top PATH
//! # Ok::<(), std::io::Error>(())
//! ```
#![warn(missing_docs)]
#![forbid(unsafe_code)]

mod connection;
#[cfg(feature = "metrics")]
mod facade;
mod figures;
mod json;
mod server;
mod socket_file;
mod text;

#[cfg(feature = "metrics")]
pub use facade::{describe_metrics, record_metrics};
pub use figures::{FIGURES, Figure, FigureKind, Sample, Snapshot};
pub use server::{StatsServer, serve_stats};
pub use text::prometheus;
