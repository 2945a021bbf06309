//! What everything that hunts for bugs has in common: one alphabet of operations, one reference model.
//!
//! An [`Op`] is one thing that a program may do with an allocator. It is decoded from a few numbers ([`Raw`]), so that
//! a property test, a fuzzer and a random generator speak the same language. A [`World`] does an `Op` with a real
//! allocator and compares what came back with what had to come back:
//!
//! - **Who owns what**: the [`Ledger`] has a tag for each frame, and the pages themselves carry stamps. A frame that is
//!   handed out while somebody has it, or that somebody else wrote to, is seen at the next look. Many worlds in many
//!   threads share one ledger.
//! - **How much must come back**: the [`Expect`] model knows which frames are out, and from that how many pages or
//!   blocks a request has to find. It is exact where one world has the allocator to itself.
//!
//! What is not checked here: which frames come, and in which order.
#![warn(missing_docs)]

mod array;
mod expect;
mod forms;
mod free;
mod invalid;
mod ledger;
mod misuse;
mod op;
mod rng;
mod unit;
mod world;

pub use expect::{Bounds, Expect};
pub use ledger::{Breach, Fault, Ledger, Tag};
pub use op::{Ask, Holes, Op, Raw, Wrong};
pub use rng::Rng;
pub use unit::Holding;
pub use world::{Cpus, Failure, World, fake_cpu, set_fake_cpu};
