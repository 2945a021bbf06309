//! What all hunters for bugs share: one alphabet of operations, one reference model.
//!
//! An [`Op`] is one thing that a program may do with an allocator. It is decoded from a few numbers ([`Raw`]), so that a property
//! test, a fuzzer and a random generator use the same operations. A [`World`] applies an `Op` to a real allocator and compares the
//! result with what it must be:
//!
//! - **Owners**: the [`Ledger`] has a tag for each frame, and the pages themselves carry stamps. The next look at a frame shows if
//!   it was handed out while it had an owner, or if another owner wrote to it. Many worlds in many threads share one ledger.
//! - **How much a request must get, and from where**: the model knows which frames are out, of which pageblocks and zones. From
//!   that and from the request's flags, nodes and policy it works out how many pages or blocks the request must find, in which
//!   zone, and why not more. The answer is exact if one world has a machine to itself, the lists were drained and all pages have
//!   one mobility; else it is an interval. With acquisitions that fail on purpose, the interval begins at nothing.
//! - **Counters**: pages out, hits and misses of nodes, waits, refusals.
//!
//! A [`Machine`] is decoded in the same way: nodes, distances, CPUs, pieces of memory and their marks.
//!
//! The model does not check which frames of a zone a request gets, in which order, or how long waits last.
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
