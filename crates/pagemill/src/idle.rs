//! After how long free memory goes back to the system (`zone/idle.rs` gives it).
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use pagemill_core::{Tick, Unused};
use std::time::{Duration, Instant};

/// Ages are told in this many parts: what goes back is an eighth older than was said at most.
const PARTS: u16 = 8;

/// After how long free memory goes back.
#[derive(Debug)]
pub(crate) struct Idle {
    part: Duration,
    born: Instant,
    /// The number of the part in which somebody looked last.
    looked: AtomicU64,
}

impl Idle {
    pub(crate) fn new(age: Duration) -> Self {
        let part = (age / u32::from(PARTS)).max(Duration::from_nanos(1));
        Self { part, born: Instant::now(), looked: AtomicU64::new(0) }
    }

    /// Which pageblocks are due; none if that was looked at in this part already.
    pub(crate) fn due(&self, now: Instant) -> Option<Unused> {
        let part = (now.saturating_duration_since(self.born).as_nanos() / self.part.as_nanos()) as u64;
        // Seen in some part, and free for all of those after that one up to this.
        let due = Unused::Since { now: Tick::new(part), ticks: PARTS + 1 };
        (self.looked.fetch_max(part + 1, Relaxed) <= part).then_some(due)
    }
}
