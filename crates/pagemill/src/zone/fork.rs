//! After a fork (C4.4): the child has its own copy of the arena and goes on with it.
//!
//! The other threads of the parent are not in the child; they stopped wherever they were. What they own stays handed
//! out, and so does what they had in their hands on its way between a list, the zone and a caller: it is as if they had
//! been a moment further, or less far. What is free is on a list or has its bit in the zone, and that is all the child
//! believes: it puts what lists hold into the zone, counts the pageblocks again by their bits, and corrects the statistics.
//!
//! The child's memory is a copy of one moment: the system protects every page from writing before it lets go of the process,
//! so that the child has all that a thread wrote up to some point, and nothing after that (`tests/fork.rs` looks at it). So no bit
//! is set, and nothing lies on a list, that belongs to somebody.
//!
//! What a lock guards that a child goes on with (a pool's reserve, say) is not recounted: it is changed in sections that a
//! fork waits for ([`no_fork`](crate::process::no_fork)), so that the child finds the lock free and what it guards whole.
//!
//! # Order of locks
//! The registry, then sections. A fork waits for its turn at the registry while sections come and go, since the registry's
//! holder may be on the way into one; then it holds new sections back, and waits for those under way. They end: nobody asks for
//! the registry in a section.
//!
//! Memory that both processes see (a memfd's, or what was brought and is shared) stays the parent's: the child retires it.
use super::body::Zone;
use super::states::FULL;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::Pfn;
use pagemill_os::List;

impl Zone {
    /// Returns whether no handle and no page of it is left.
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
            // Whatever is free there the parent hands out.
            self.retired.store(true, Relaxed);
            self.shared.waits.zone_was_retired();
        }
        self.settle_lists();
        false
    }

    /// In the child of a fork, once it has read what was used: from now on it shares its notes with its own children alone. An
    /// attacker in it could else clear notes that its parent's later children read, and these would hand out pages that are owned.
    /// If the system has no memory for others, it has none, and its children look at everything.
    pub(crate) fn keep_own_notes(&self) {
        // SAFETY: this process has this thread alone; and if it fails nobody touches the notes any more, as the zone is told.
        let parted = self.used.as_ref().map(|used| unsafe { used.part_from_parent() });
        if let Some(Err(_)) = parted {
            self.buddy.forget_use();
        }
    }
}
