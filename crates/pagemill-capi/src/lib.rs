//! Pagemill for C and C++: the functions of `pagemill.h`, which is generated from this crate (`cargo xtask header`).
//!
//! Each function turns C's arguments into a request of `pagemill`, and its result into an error's number. Nothing else happens
//! here: policy, waiting and checks of pointers are the library's.
//!
//! # Invariants
//! - What a C program holds of a page is a raw pointer: the page's state says so, and each free demands it (C2.4). So a pointer is
//!   believed only if Pagemill handed it out and nobody has freed it.
//! - What it holds of anything else is a handle (`handle.rs`), which is checked, and whose memory is never unmapped.
//! - A structure that may grow begins with its size (`sized.rs`). Numbers that C passes for an enumeration are checked before they
//!   are believed.
//! - No panic crosses into C. An `extern "C"` function that panics ends the process with the panic's message: only a broken
//!   invariant of Pagemill's own does, after which no page can be trusted.
//! - The way of a single page allocates nothing and takes no lock.
#![expect(clippy::missing_safety_doc, reason = "the comments are those of pagemill.h: they say what a C caller owes")]

mod allocator;
mod bulk;
mod device;
mod dma_pool;
mod error;
mod gfp;
mod handle;
mod list;
mod mempool;
mod page;
mod page_pool;
mod shrinker;
mod sized;
mod stats;
mod text;

pub use allocator::*;
pub use bulk::*;
pub use device::*;
pub use dma_pool::*;
pub use error::{Error, pagemill_strerror};
pub use gfp::*;
pub use list::*;
pub use mempool::*;
pub use page::*;
pub use page_pool::*;
pub use shrinker::*;
pub use stats::*;
