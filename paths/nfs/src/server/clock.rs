//! How long a connection may be silent, in ticks. The thread that accepts is the only one that reads a clock for it.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A connection has stalled after so many ticks.
pub(super) const TICKS: u32 = 4;

#[derive(Default)]
pub(super) struct Clock(AtomicU64);

impl Clock {
    /// Sets the tick. Returns whether it is another one.
    pub(super) fn set(&self, tick: u64) -> bool {
        self.0.swap(tick, Relaxed) != tick
    }
    /// The tick at which a connection that is heard of now has been silent for too long.
    pub(super) fn stalls_at(&self) -> u64 {
        // The tick of now began a while ago.
        self.0.load(Relaxed) + u64::from(TICKS) + 1
    }
}
