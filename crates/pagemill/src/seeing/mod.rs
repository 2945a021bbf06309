//! What a running process shows of its allocators to those who watch it from outside.
//!
//! A [`Snapshot`] is what one allocator's counters say at one moment, read without a lock (C3.13). [`FIGURES`] is the
//! one list of what can be told of it: name, help, kind, and how it is read. Everything that leaves the process comes
//! out of that list: Prometheus text ([`prometheus`]), JSON and the socket that serves both (`StatsServer`, feature
//! `top`), the `metrics` facade (feature `metrics`). A figure that is added to the list is in all of them, and in the
//! table of `pagemill top`.
//!
//! Nothing here stands on a request's way: who does not look pays nothing.
mod figures;
mod text;

#[cfg(feature = "top")]
mod connection;
#[cfg(feature = "metrics")]
mod facade;
#[cfg(feature = "top")]
mod json;
#[cfg(feature = "top")]
mod server;
#[cfg(feature = "top")]
mod socket_file;

#[cfg(feature = "metrics")]
pub use facade::{describe_metrics, record_metrics};
pub use figures::{FIGURES, Figure, FigureKind, Sample, Snapshot};
#[cfg(feature = "top")]
pub use server::{StatsServer, serve_stats};
pub use text::prometheus;
