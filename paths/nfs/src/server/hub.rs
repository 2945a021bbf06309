//! What all threads of a server share.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use pagemill::Cancel;

use super::Settings;
use super::counters::Counters;
use super::poller::Poller;
use super::room::Room;
use super::table::Table;

/// Silence is measured in ticks, of which `stalled_after` has so many. Nobody reads a clock for it but the thread that accepts.
pub(super) const TICKS: u32 = 4;

pub(super) struct Hub {
    pub(super) poller: Arc<Poller>,
    pub(super) table: Table,
    pub(super) room: Arc<Room>,
    pub(super) counters: Counters,
    pub(super) settings: Settings,
    /// Ends waits for memory.
    pub(super) stop: Cancel,
    pub(super) tick: AtomicU64,
}

impl Hub {
    /// The tick at which a connection that is heard of now has been silent for too long.
    pub(super) fn stalls_at(&self) -> u64 {
        // The tick of now began a while ago.
        self.tick.load(Relaxed) + u64::from(TICKS) + 1
    }
}
