//! A zone: memory that Pagemill owns, the numbers and states of its frames, the buddy that says which frames are free, and the per-CPU
//! lists above the buddy.
//!
//! A zone stands below the registry and the requests. `zones.rs` and `walk.rs` choose the zone for a request; the zone hands out
//! frames of its own and takes them back. A zone knows nothing above it; what all zones of an allocator share is in
//! [`Shared`](crate::shared::Shared).
//!
//! | file | content |
//! |---|---|
//! | `body.rs` | the fields of a zone, the addresses of its frames, its begin and its end |
//! | `states.rs` | the state of each frame, and the checks of C2.4 |
//! | `links.rs` | the links of lists of pages |
//! | `pcp.rs` | one page and batches, from this CPU's list and back to it; when lists are shut |
//! | `refill.rs` | this CPU's list is empty: frames from a depot or from the buddy |
//! | `drain.rs` | this CPU's list is full: pages to a depot or to the buddy; drains of any CPU's lists |
//! | `take.rs` | frames past the lists, blocks, quarantine |
//! | `pageblock_frames.rs` | the frames that a large request has in hand |
//! | `free.rs` | frames back to the buddy, and what follows: claims, waits, the zone's end |
//! | `claimed.rs` | frames that are kept for the request that claims them |
//! | `idle.rs`, `commit.rs`, `pins.rs` | memory that the system commits, takes back, or must not take back |
//! | `counts.rs` | pages handed out and freed, summed over CPUs and lists |
//! | `fork.rs` | the zone in the child of a fork |
mod body;
mod claimed;
mod commit;
mod counts;
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
