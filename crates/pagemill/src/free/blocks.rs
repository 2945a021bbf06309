//! Blocks of one order above 0, collected on their way back to the zone: those of one word of bits go with one operation, and what
//! counts them is written once for all (C3.11).
use super::{Collect, finish};
use crate::arena::Arena;
use crate::handle::{addr_of_word, order_of_word};
use crate::registry;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Giving, Order, PAGE_SIZE, Pfn};

/// Blocks of one arena and order that are on their way back. Whole pageblocks go one by one.
pub(crate) struct Blocks<const RAW: bool> {
    arena: &'static Arena,
    order: Order,
    blocks: usize,
    giving: Giving<'static, 'static, 32>,
}

impl<const RAW: bool> Blocks<RAW> {
    /// Of the arena that this address is in. None for an order that is not collected.
    #[inline]
    pub(crate) fn new(addr: usize, order: Order) -> Option<Self> {
        if order == Order::ZERO || order >= Order::PAGEBLOCK {
            return None;
        }
        let (arena, _) = registry::by_address(addr)?;
        Some(Self { arena, order, blocks: 0, giving: arena.inner().zone.giving() })
    }

    /// Takes the block at an address, if it is one of this arena and order that is out.
    #[inline]
    pub(super) fn give_at(&mut self, addr: usize) -> bool {
        addr.is_multiple_of(PAGE_SIZE) && self.arena.contains(addr) && self.give(self.arena.pfn_of(addr))
    }

    /// Completes it. Those may be the allocator's last frames: nothing of it is touched after that. Returns how many blocks there were.
    pub(crate) fn end(&mut self) -> usize {
        let blocks = self.blocks;
        if blocks > 0 {
            let inner = self.arena.inner();
            let stats = inner.stats_here();
            stats.blocks_in.fetch_add(blocks as u64, Relaxed);
            stats.block_pages_in.fetch_add(blocks as u64 * u64::from(self.order.frames()), Relaxed);
            finish(inner, &mut self.giving);
        }
        blocks
    }
}

impl<const RAW: bool> Collect for Blocks<RAW> {
    #[inline]
    fn give(&mut self, pfn: u32) -> bool {
        let is_out =
            if RAW { self.arena.take_up(pfn, self.order, false) } else { self.arena.take_back_block(pfn, self.order) };
        if is_out.is_ok() {
            self.giving.give_run(Pfn::new(pfn), self.order.frames() as usize);
            self.blocks += 1;
        }
        is_out.is_ok()
    }
}

/// Frees the blocks of one order behind `words[at..]` and empties their slots, up to the first that is not of the first one's arena and
/// order, or not out, where it leaves `at`. Returns how many. Handles' words say their order, raw pointers none.
#[inline(never)]
pub(super) fn return_blocks<const RAW: bool>(words: &mut [usize], at: &mut usize, order: Order) -> usize {
    let addr_of = |word| if RAW { word } else { addr_of_word(word) };
    let Some(mut blocks) = Blocks::<RAW>::new(addr_of(words[*at]), order) else { return 0 };
    while let Some(word) = words.get_mut(*at) {
        if *word != 0 {
            if !(RAW || order_of_word(*word) == order) || !blocks.give_at(addr_of(*word)) {
                break;
            }
            *word = 0;
        }
        *at += 1;
    }
    blocks.end()
}
