//! What everything that hunts for bugs has in common: one alphabet of operations, one reference model.
//!
//! An [`Op`] is one thing that a program may do with an allocator. It is decoded from a few numbers ([`Raw`]), so that
//! a property test, a fuzzer and a random generator speak the same language. A [`World`] does an `Op` with a real
//! allocator and compares what came back with what had to come back:
//!
//! - **Who owns what**: the [`Ledger`] has a tag for each frame, and the pages themselves carry stamps. A frame that is
//!   handed out while somebody has it, or that somebody else wrote to, is seen at the next look. Many worlds in many
//!   threads share one ledger.
//! - **How much must come back, and from where**: the model knows which frames are out, of which pageblocks and zones,
//!   and from that and the request's flags, nodes and policy how many pages or blocks it has to find, of which zone, and
//!   why not more. That is exact where one world has a machine to itself, the lists were drained and all pages are of one
//!   mobility; else it is an interval. Acquisitions that fail on purpose make it one that begins at nothing.
//! - **What is counted**: pages out, hits and misses of nodes, waits, refusals.
//!
//! A [`Machine`] is decoded likewise: nodes, distances, CPUs, pieces of memory and their marks.
//!
//! What is not checked here: which frames of a zone come, and in which order; how long waits last.
#![warn(missing_docs)]

mod array;
mod asked;
mod expect;
mod forms;
mod free;
mod invalid;
mod ledger;
mod machine;
mod misuse;
mod op;
mod plan;
mod pressure;
mod request;
mod rng;
mod unit;
mod world;

pub use ledger::{Breach, Fault, Ledger, Tag};
pub use machine::{Built, Failing, Machine, Piece};
pub use op::{Ask, Holes, Op, Raw, Wrong};
pub use request::{Ends, How, Place, Request};
pub use rng::Rng;
pub use unit::Holding;
pub use world::{Cpus, Failure, World, fake_cpu, set_fake_cpu};
