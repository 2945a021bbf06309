//! An NVMe driver in a process, over VFIO. Its lists of pages come from a `DmaPool`.
//!
//! A request's way, from the outside in:
//! 1. [`commands`] has the program's subcommands. `pci` finds the named drive, and `bind` binds it to `vfio-pci`, if
//!    nobody uses it.
//! 2. `vfio` opens it: registers, interrupts, and the IOMMU that protects other memory from it. The other modules see
//!    it as a `bus`, which tests replace by one in memory (`fake`).
//! 3. `transfer` and `bench` make requests. A request's data is on the pages of one bulk call, anywhere in memory
//!    (`memory`).
//! 4. `drive` executes them: it makes lists of their pages (`prp`) and puts a command (`spec`) into one of several
//!    queues (`queue`; `order` knows the oldest command). It returns finished requests with their `status`. It aborts
//!    commands that take too long, and resets a controller that does not answer.
//! 5. `controller` starts, queries and stops the controller. Memory that the controller knows is not freed while it
//!    could still write there.
//!
//! A controller is not trusted: its descriptions (`identify`) and its completions are checked, and the IOMMU stops
//! writes to other memory. Not supported: metadata and protection of blocks, controllers whose smallest pages are
//! larger than 4 KiB, zoned and key-value namespaces, namespace management, fabrics.
mod bench;
mod bind;
mod bus;
pub mod commands;
mod controller;
mod drive;
mod error;
#[cfg(test)]
mod fake;
mod histogram;
mod identify;
mod memory;
mod order;
mod pci;
mod prp;
mod queue;
mod spec;
mod status;
mod transfer;
mod vfio;

pub use error::Error;
pub use pci::Address;
pub use status::Status;
