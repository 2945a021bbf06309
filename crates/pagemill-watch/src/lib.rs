//! Shows a running process's allocators to programs outside of it.
//!
//! A [`Snapshot`] holds one allocator's counters at one moment, read without a lock (C3.13). [`FIGURES`] is the one list of the
//! values in it: name, help, kind, and how each is read. All output is generated from that list: Prometheus text
//! ([`prometheus`]), JSON, the socket that serves both ([`StatsServer`], which `pagemill top` asks, or Prometheus by HTTP), and the
//! `metrics` facade (feature `metrics`). A counter that is added to Pagemill's table appears in all of them, and in the table of
//! `pagemill top`. Circulating pages belong to no allocator that is shown: all page pools of the process are
//! among its figures by themselves, under the names that [`PagePool::named`](pagemill::PagePool::named) gives them. So are
//! all page caches, under the names that [`PageCacheBuilder::named`](pagemill::PageCacheBuilder::named) gives them.
//!
//! The crate uses only `pagemill`'s public interface, and none of it runs during a request: a program that is not watched pays
//! nothing.
//!
//! ```
//! let path = std::env::temp_dir().join(format!("pagemill-front-{}", std::process::id()));
//! let _server = pagemill_watch::serve_stats(&path)?; // and then: pagemill top PATH
//! # Ok::<(), std::io::Error>(())
//! ```
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs)]
#![forbid(unsafe_code)]

mod connection;
#[cfg(feature = "metrics")]
mod facade;
mod figures;
mod http;
mod json;
mod server;
mod socket_file;
mod text;

#[cfg(feature = "metrics")]
pub use facade::{describe_metrics, record_metrics};
pub use figures::{FIGURES, Figure, FigureKind, Sample, Snapshot};
pub use server::{StatsServer, serve_stats};
pub use text::prometheus;
