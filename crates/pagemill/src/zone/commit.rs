//! The part of a zone's memory that the system has committed: committing it ahead, giving it back, and asking how much it is.
use super::body::Zone;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{FrameState, Order, PAGE_SIZE, Pfn};
use pagemill_os::Batch;

impl Zone {
    /// Has the system commit `n` neighbouring blocks from `first` on, in one call. Returns how many it committed, from the first on;
    /// all if it cannot commit memory ahead.
    #[cold]
    pub(crate) fn populate(&self, first: Pfn, n: usize, order: Order) -> usize {
        let start = self.addr_of(first) - self.base;
        if self.commit(start, n * order.bytes()) {
            return n;
        }
        // In pieces, to learn how far it comes.
        let step = (Batch::CAPACITY * PAGE_SIZE).max(order.bytes());
        let is_uncommitted = |at: &usize| !self.commit(start + at, step.min(n * order.bytes() - at));
        (0..n * order.bytes()).step_by(step).find(is_uncommitted).map_or(n, |at| at / order.bytes())
    }

    /// Has the system commit a range, and the whole 2 MiB pages that the range touches. False: it has no memory for it.
    pub(crate) fn commit(&self, offset: usize, len: usize) -> bool {
        let whole = |page: usize| {
            let (start, end) = (offset / page * page, (offset + len).next_multiple_of(page));
            (start, end.min(self.memory.bytes()) - start)
        };
        let mut claim = None;
        if let Some(limit) = &self.shared.limit {
            // The system may take 2 MiB where 4 KiB are asked for.
            let (start, len) = whole(pagemill_os::HUGE_PAGE_SIZE);
            let missing = || len - self.memory.resident(start, len).unwrap_or(0);
            claim = limit.claim(len).or_else(|| limit.claim(missing()));
            if claim.is_none() {
                return false;
            }
        }
        let (start, len) = whole(self.memory.page_bytes());
        let committed = self.memory.populate(start, len);
        drop(claim);
        // Memory of a device, and any memory before Linux 5.14, is committed at the first access.
        committed.is_ok() || committed.is_err_and(pagemill_os::Errno::is_unsupported)
    }

    /// Has the system take back the memory of `n` neighbouring frames that have no owner. They are zero afterwards, as if they had
    /// never been handed out. False: the system refuses.
    pub(crate) fn release(&self, first: Pfn, n: usize) -> bool {
        let offset = self.addr_of(first) - self.base;
        // Behind the last frame, the rest of the system's last page belongs to no frame.
        let end = offset + n * PAGE_SIZE;
        let end = if end == self.bytes() { self.memory.bytes() } else { end };
        // SAFETY: the caller took the frames out of the zone: nobody has one of them.
        if unsafe { self.memory.release(offset, end - offset) }.is_err() {
            return false;
        }
        self.has_given_back.store(true, Relaxed);
        self.mark(first, n, if self.is_zeroed() { FrameState::FRESH } else { FrameState::SAFE });
        true
    }

    /// How many of `n` neighbouring frames the system has committed; all if it does not say.
    pub(crate) fn resident(&self, first: Pfn, n: usize) -> usize {
        let resident = self.memory.resident(self.addr_of(first) - self.base, n * PAGE_SIZE);
        resident.map_or(n, |bytes| bytes / PAGE_SIZE)
    }

    /// Bytes that the system has not committed yet.
    pub(crate) fn uncommitted(&self) -> usize {
        self.bytes() - self.memory.resident(0, self.memory.bytes()).unwrap_or(0).min(self.bytes())
    }
}
