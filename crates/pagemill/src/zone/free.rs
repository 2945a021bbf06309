//! Frames go back to the buddy. What follows: claims are counted, waiting requests are woken, and a zone without a handle whose last
//! page came back ends.
use super::body::Zone;
use core::borrow::BorrowMut;
use core::ptr;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Given, Giving, Misuse, MisuseKind, Order, Pfn, WordTable};

/// Completes a free to the buddy, and wakes requests that wait for it. These may be the allocator's last pages: afterwards nothing of
/// the allocator is touched but its [waits](crate::shared::MemoryWaits), unless there was misuse. The zone ends if no handle is left.
pub(crate) fn finish<const N: usize, T: BorrowMut<WordTable<N>>>(zone: &Zone, giving: &mut Giving<'_, '_, N, T>) {
    finish_with(zone, giving, |_| ());
}

/// The same; `count` is told what came back, while no other thread can end the zone. Returns the misuse if another thread freed some
/// of it at the same moment.
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
    /// Headers are never freed: see `body.rs`.
    fn for_ever(&self) -> &'static Self {
        // SAFETY: the registry makes zones, in boxes that it keeps for ever.
        unsafe { &*ptr::from_ref(self) }
    }

    /// Returns frames to the buddy whose states say free. Out of line, so that no caller has its tables on the stack twice.
    #[inline(never)]
    pub(crate) fn give_to_zone(&self, pfns: &[Pfn]) {
        let mut giving = Giving::to(&self.buddy);
        giving.give_slice(pfns);
        finish(self, &mut giving);
    }

    /// Returns `n` neighbouring pages whose states say free, past the lists.
    pub(crate) fn give_run(&self, first: Pfn, n: usize) {
        let mut giving = Giving::to(&self.buddy);
        giving.give_run(first, n);
        finish_with(self, &mut giving, |given| {
            self.stats_here().direct_in.fetch_add(given.frames as u64, Relaxed);
        });
    }

    /// Returns a block above order 0 whose states say free.
    ///
    /// # Errors
    /// Another thread freed it at the same moment.
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
                // Nothing of the zone is touched from here on.
                if is_complete {
                    come_home(self.for_ever());
                }
                Ok(())
            }
            Err(kind) => {
                // The other thread has counted it.
                stats.blocks_in.fetch_sub(1, Relaxed);
                stats.block_pages_in.fetch_sub(frames, Relaxed);
                Err(kind)
            }
        }
    }
}
