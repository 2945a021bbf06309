//! A drive driven from a process: an NVMe driver over VFIO, whose lists of pages come from a `DmaPool`.
//!
//! A request's way, from the outside in:
//! 1. [`commands`] are the program's subcommands; `pci` finds the drive that was named, and `bind` gives it to `vfio-pci`, if
//!    nobody uses it.
//! 2. `vfio` opens it: registers, interrupts, and the IOMMU that keeps it from memory that is not its own. To the rest it is a
//!    `bus`, which tests have in memory (`fake`).
//! 3. `transfer` and `bench` make requests: data on pages of one bulk call each, wherever they are (`memory`).
//! 4. `drive` takes them: lists of their pages (`prp`), a command (`spec`) in one of several queues (`queue`, and `order` for
//!    which command is the oldest). It brings back what is done, with its `status` in words; what takes too long is aborted, and what does not answer is reset.
//! 5. `controller` starts, asks and stops it. Nothing that it was told of is freed while it could still write there.
//!
//! A controller is not trusted: what it says of itself (`identify`) and of its commands is checked before it is believed, and what
//! it writes elsewhere the IOMMU stops. What is not done: metadata and protection of blocks, controllers whose pages are larger
//! than 4 KiB, zoned namespaces and those of keys and values, namespaces that are managed, fabrics.
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
