//! An NVMe driver in a process, over VFIO. Its lists of pages come from a `DmaPool`.
//!
//! A program opens a [`Drive`] over a [`Dma`], takes a [`Queue`] for each thread, and submits [`Request`]s with
//! [`Buffer`]s; [`Fake`] is a drive for its tests.
//!
//! A request's way, from the outside in:
//! 1. [`commands`] has the program's subcommands. `pci` finds the named drive, and `bind` binds it to `vfio-pci`, if
//!    nobody uses it.
//! 2. `vfio` opens it: registers, interrupts, and the IOMMU that protects other memory from it. The other modules see
//!    it as a `bus`, which tests replace by one in memory (`fake`). Several drives share one mapping (`dma`).
//! 3. `transfer` and `bench` make requests, as programs do. A request's data is on the pages of one bulk call, anywhere
//!    in memory (`memory`).
//! 4. `queue` takes them from one thread, and `future` awaits them. A `lane` makes lists of their pages (`prp`) and
//!    puts a command (`spec`) into its `pair` of queues (`order` knows the oldest command, `doorbells` tell the
//!    controller, in the order that `barriers` keep). It returns finished requests with their `status`.
//! 5. `drive` has all lanes: it aborts commands that take too long, and resets a controller that does not answer.
//! 6. `controller` starts, queries and stops the controller. Memory that the controller knows is not freed while it
//!    could still write there.
//!
//! A controller is not trusted: its descriptions (`identify`) and its completions are checked, and the IOMMU stops
//! writes to other memory. Not supported: metadata and protection of blocks, controllers whose smallest pages are
//! larger than 4 KiB, zoned and key-value namespaces, namespace management, fabrics.
mod barriers;
mod bench;
mod bind;
mod bus;
pub mod commands;
mod controller;
mod dma;
mod doorbells;
mod drive;
mod error;
mod fake;
mod future;
mod histogram;
mod identify;
mod lane;
mod logs;
mod memory;
mod order;
mod pair;
mod pci;
mod prp;
mod queue;
mod request;
mod spec;
mod status;
mod transfer;
mod vfio;

/// The atomics of `barriers`, which a model replaces.
use std::sync::atomic as sync;

pub use dma::Dma;
pub use drive::{Counts, Drive, Settings};
pub use error::Error;
pub use fake::Fake;
pub use future::Pending;
pub use identify::{ControllerInfo, NamespaceInfo};
pub use logs::{ErrorEntry, Health, Warning};
pub use memory::Buffer;
pub use pci::Address;
pub use queue::Queue;
pub use request::{BlockRange, Done, Op, Refused, Request};
pub use status::Status;

/// The guide's program runs as it stands.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/nvme.md")]
struct Guide;
