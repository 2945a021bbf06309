//! After a fork (C4.4): the child has its own copy of each zone and goes on with it.
//!
//! The other threads of the parent do not exist in the child; they stopped at any point. Their pages stay handed out, and so do frames
//! that they were moving between a list, the buddy and a caller: as if they had been a moment further, or less far. A free frame is
//! on a list or has its bit in the buddy, and the child trusts nothing else: it moves the lists' frames into the buddy, counts the
//! pageblocks again by their bits, and corrects the statistics.
//!
//! The child's memory is a copy of one moment. The system protects every page from writing before it lets the process go on, so the
//! child has all that a thread wrote up to some point and nothing after it (`tests/fork.rs` checks this). So no frame with an owner
//! has its bit set or stands on a list.
//!
//! State that a lock guards (a pool's reserve, for example) is not recounted. It is changed in sections that a fork waits for
//! ([`no_fork`](crate::process::no_fork)), so that the child finds the lock free and the state whole.
//!
//! # Order of locks
//! The registry, then sections. A fork waits for its turn at the registry while sections come and go, since the registry's holder may
//! be about to enter one. Then it holds new sections back and waits for those under way. They end, because no section asks for the
//! registry.
//!
//! Memory that both processes see (a memfd, or brought memory that is shared) stays the parent's: the child retires it.
use super::body::Zone;
use super::states::FULL;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::Pfn;
use pagemill_os::List;

impl Zone {
    /// Returns whether no handle and no page of the zone is left.
    pub(crate) fn recover(&self) -> bool {
        for list in self.lists.lists() {
            self.buddy.unbind(&list.bound);
        }
        let mut block_end = Pfn::new(0);
        self.buddy.recover(self.lists.lists().flat_map(List::frames).map(Pfn::new), |first, n| {
            if FULL {
                let is_free = |pfn| self.buddy.is_free(pfn);
                self.settle_states(first, n as u32, &mut block_end, is_free);
            }
        });
        self.lists.empty_after_fork();
        self.count_stranded();
        self.keep_own_notes();
        self.pins.forget_after_fork();
        self.opening.forget_after_fork();
        self.shared.waits.forget_after_fork();
        self.shared.claims.forget_after_fork();
        self.claimed.store(0, Relaxed);
        self.shared.limit.iter().for_each(|limit| limit.forget_claims());
        if self.is_ownerless.load(Relaxed) {
            return self.buddy.close(self.quarantined.load(Relaxed) as usize);
        }
        if self.is_inherited() {
            // The parent hands out its free frames.
            self.retired.store(true, Relaxed);
            self.shared.waits.zone_was_retired();
        }
        self.settle_lists();
        false
    }

    /// Gives the child of a fork notes of its own, once it has read the parent's: from now on it shares its notes with its own children
    /// alone. Otherwise an attacker in the child could clear notes that the parent's later children read, and these would hand out
    /// pages that have an owner. If the system has no memory for notes, the child has none, and its children look at everything.
    pub(crate) fn keep_own_notes(&self) {
        // SAFETY: this process has this thread alone; and if it fails nobody touches the notes any more, as the zone is told.
        let parted = self.used.as_ref().map(|used| unsafe { used.part_from_parent() });
        if let Some(Err(_)) = parted {
            self.buddy.forget_use();
        }
    }
}
