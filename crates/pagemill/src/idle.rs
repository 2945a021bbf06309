//! The age at which free memory goes back to the system. `zone/idle.rs` gives it back.
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use pagemill_core::{Tick, Unused};
use std::time::{Duration, Instant};

/// An age is measured in this many parts, so memory goes back at most an eighth of the age late.
const PARTS: u16 = 8;

/// The age at which free memory goes back.
#[derive(Debug)]
pub(crate) struct Idle {
    part: Duration,
    born: Instant,
    /// One more than the number of the last part in which a call asked.
    looked: AtomicU64,
}

impl Idle {
    pub(crate) fn new(age: Duration) -> Self {
        let part = (age / u32::from(PARTS)).max(Duration::from_nanos(1));
        Self { part, born: Instant::now(), looked: AtomicU64::new(0) }
    }

    /// Which pageblocks are due; none if a call asked in this part already.
    pub(crate) fn due(&self, now: Instant) -> Option<Unused> {
        let part = (now.saturating_duration_since(self.born).as_nanos() / self.part.as_nanos()) as u64;
        // Due: found free in some part, and free during all parts after it up to now.
        let due = Unused::Since { now: Tick::new(part), ticks: PARTS + 1 };
        (self.looked.fetch_max(part + 1, Relaxed) <= part).then_some(due)
    }
}
