//! Back to the buddy, and what follows: frames that are claimed are counted, requests that wait are woken, and a zone whose last
//! page this was goes home.
use super::body::Zone;
use core::borrow::BorrowMut;
use core::ptr;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Given, Giving, Misuse, MisuseKind, Order, Pfn, WordTable};

/// Completes what goes to the zone, and wakes requests that wait for it. Those may be the allocator's last pages: nothing of it
/// is touched afterwards but its [waits](crate::shared::MemoryWaits), and for misuse. If no handle is left either, the zone ends.
pub(crate) fn finish<const N: usize, T: BorrowMut<WordTable<N>>>(zone: &Zone, giving: &mut Giving<'_, '_, N, T>) {
    finish_with(zone, giving, |_| ());
}

/// The same; `count` is told what came back while nobody else ends the zone. Returns what is wrong, if somebody else freed some of it at
/// the same moment.
pub(crate) fn finish_with<const N: usize, T: BorrowMut<WordTable<N>>>(
    zone: &Zone,
    giving: &mut Giving<'_, '_, N, T>,
    count: impl FnOnce(&Given),
) -> Option<Misuse> {
    let (waits, come_home) = (zone.shared.waits, zone.come_home);
    zone.claim_freed(|| giving.frames());
    let given = giving.finish_with(count);
    let misuse = if given.doubles > 0 { zone.note_doubles(given) } else { None };
    waits.note_memory();
    if given.is_complete {
        come_home(zone.for_ever());
    }
    misuse
}

impl Zone {
    /// Headers are never freed (see the module `zone`).
    fn for_ever(&self) -> &'static Self {
        // SAFETY: the registry makes zones, in boxes that it keeps for ever.
        unsafe { &*ptr::from_ref(self) }
    }

    /// Returns frames whose states say free to the zone. Out of line, that no caller has its tables on the stack twice.
    #[inline(never)]
    pub(crate) fn give_to_zone(&self, pfns: &[Pfn]) {
        let mut giving = Giving::to(&self.buddy);
        giving.give_slice(pfns);
        finish(self, &mut giving);
    }

    /// A block above order 0 comes back whose states say so already.
    ///
    /// # Errors
    /// Somebody else freed it at the same moment.
    pub(crate) fn free_block(&self, pfn: Pfn, order: Order) -> Result<(), MisuseKind> {
        let frames = u64::from(order.frames());
        let stats = self.stats_here();
        stats.blocks_in.fetch_add(1, Relaxed);
        stats.block_pages_in.fetch_add(frames, Relaxed);
        let (waits, come_home) = (self.shared.waits, self.come_home);
        self.claim_freed(|| frames as usize);
        let freed = self.buddy.free_block(pfn, order);
        waits.note_memory();
        match freed {
            Ok(is_complete) => {
                // Nothing of it is looked at from here on.
                if is_complete {
                    come_home(self.for_ever());
                }
                Ok(())
            }
            Err(kind) => {
                // The other one has counted it.
                stats.blocks_in.fetch_sub(1, Relaxed);
                stats.block_pages_in.fetch_sub(frames, Relaxed);
                Err(kind)
            }
        }
    }
}
