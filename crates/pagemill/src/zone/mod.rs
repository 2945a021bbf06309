//! A zone: memory that Pagemill owns, the numbers of its frames, what is known of each, the buddy that says which are free, and the
//! per-CPU lists above that.
//!
//! It stands below the registry and the requests: `alloc/` decides which zone a request goes to, the zone hands out frames of its
//! own. The state table (a byte a frame) is written where a block becomes a raw pointer, and where it comes back. A zone knows
//! nothing above it; what all zones of an allocator share is in [`Shared`](crate::shared::Shared).
//!
//! | file | |
//! |---|---|
//! | `body.rs` | what a zone has, where its frames are, how it begins and ends |
//! | `states.rs` | the state of each frame, and the checks of C2.4 |
//! | `links.rs` | the links of lists of pages |
//! | `pcp.rs` | one page and batches, from the CPU's list and back to it; refills, overflows, drains, when lists are shut |
//! | `take.rs` | from the buddy: frames past the lists, blocks, what is put aside |
//! | `free.rs` | to the buddy, and what follows: claims, waits, the zone's end |
//! | `claimed.rs` | what is kept for the request that claims it |
//! | `idle.rs`, `commit.rs`, `pins.rs` | what the system has of its memory, gives, and takes back |
//! | `fork.rs` | in the child of a fork |
mod body;
mod claimed;
mod commit;
mod drain;
mod fork;
mod free;
mod idle;
mod links;
mod pageblock_frames;
mod pcp;
mod pins;
mod refill;
mod states;
mod take;

pub(crate) use body::{Body, Parts, Zone};
pub(crate) use free::finish_with;
pub(crate) use pageblock_frames::PageblockFrames;
pub(crate) use pins::Pinned;
pub(crate) use states::FULL;
