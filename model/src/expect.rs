//! The reference model of the free frames of one arena: for each pageblock, the number of its frames that have no owner, and its
//! mobility.
//!
//! It knows nothing of lists: frames on lists count as free. If the mobility of a pageblock is not known from outside, the number
//! of free frames of a mobility lies between two bounds. [`crate::plan`] works out what a request gets of them.
use crate::Ledger;
use core::ops::Range;
use pagemill::{Gfp, Mobility, Order};

/// Frames of a pageblock.
const PAGEBLOCK: usize = 1 << Order::PAGEBLOCK.get();

/// A number that is known to lie between two bounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Bounds {
    /// At least.
    pub(crate) low: usize,
    /// At most.
    pub(crate) high: usize,
}

impl Bounds {
    /// Between nothing and `n`: for allocators that others use too.
    pub(crate) fn up_to(n: usize) -> Self {
        Self { low: 0, high: n }
    }
    /// Whether `n` lies between the bounds.
    pub(crate) fn admit(self, n: usize) -> bool {
        (self.low..=self.high).contains(&n)
    }
}

#[derive(Clone, Copy, Debug)]
struct Pageblock {
    free: usize,
    frames: usize,
    /// Its mobility, if it is known and frames of the pageblock are out.
    mobility: Option<Mobility>,
}

/// See the [module](self).
#[derive(Clone, Debug)]
pub(crate) struct Expect {
    blocks: Vec<Pageblock>,
    /// The numbers of its frames in the ledger.
    numbers: Range<usize>,
    free: usize,
}

impl Expect {
    /// All of these frames are free.
    pub(crate) fn new(numbers: Range<usize>) -> Self {
        let frames = numbers.len();
        let block = |first: usize| {
            let frames = (frames - first).min(PAGEBLOCK);
            Pageblock { free: frames, frames, mobility: None }
        };
        Self { blocks: (0..frames).step_by(PAGEBLOCK).map(block).collect(), numbers, free: frames }
    }

    /// Frames without an owner.
    pub(crate) fn free(&self) -> usize {
        self.free
    }
    /// Frames with an owner.
    pub(crate) fn out(&self) -> usize {
        self.numbers.len() - self.free
    }
    /// Whether this frame is of the arena.
    pub(crate) fn has(&self, frame: usize) -> bool {
        self.numbers.contains(&frame)
    }
    /// The mobility of the pageblock of a frame that is out, if it is known.
    pub(crate) fn mobility_of(&self, frame: usize) -> Option<Mobility> {
        self.blocks[(frame - self.numbers.start) / PAGEBLOCK].mobility
    }

    fn blocks_from(&mut self, frame: usize) -> &mut [Pageblock] {
        &mut self.blocks[(frame - self.numbers.start) / PAGEBLOCK..]
    }

    /// A block was handed out. `mobility` is that of its pageblock, if the request determines it.
    ///
    /// # Errors
    /// The known mobility of its pageblock, if it differs.
    pub(crate) fn take(&mut self, frame: usize, order: Order, mobility: Option<Mobility>) -> Result<(), Mobility> {
        let mut left = order.pages().get();
        self.free -= left;
        for block in self.blocks_from(frame) {
            if block.free == block.frames {
                block.mobility = None;
            }
            match (block.mobility, mobility) {
                (Some(known), Some(told)) if known != told => return Err(known),
                (None, told) => block.mobility = told,
                _ => {}
            }
            let n = left.min(PAGEBLOCK);
            (block.free, left) = (block.free - n, left - n);
            if left == 0 {
                break;
            }
        }
        Ok(())
    }

    /// A block came back.
    pub(crate) fn give(&mut self, frame: usize, order: Order) {
        let mut left = order.pages().get();
        self.free += left;
        for block in self.blocks_from(frame) {
            let n = left.min(PAGEBLOCK);
            (block.free, left) = (block.free + n, left - n);
            if left == 0 {
                break;
            }
        }
    }

    /// Blocks of `order` in pageblocks of the flags' mobility, and in unused ones. While lists hold frames, a pageblock without
    /// owners may be in use.
    pub(crate) fn own(&self, ledger: &Ledger, gfp: Gfp, order: Order, is_listed: bool) -> Bounds {
        let is_unused = |block: &Pageblock| block.free == block.frames;
        let low = |block: &Pageblock| match is_unused(block) {
            true => !is_listed,
            false => block.mobility == Some(gfp.mobility()),
        };
        let high = |block: &Pageblock| is_unused(block) || block.mobility.is_none_or(|known| known == gfp.mobility());
        Bounds { low: self.blocks_of(ledger, order, low), high: self.blocks_of(ledger, order, high) }
    }
    /// Blocks of `order` in any pageblock.
    pub(crate) fn any(&self, ledger: &Ledger, order: Order) -> usize {
        self.blocks_of(ledger, order, |_| true)
    }

    /// Aligned runs of 2^order free frames in the chosen pageblocks.
    fn blocks_of(&self, ledger: &Ledger, order: Order, is_asked: impl Fn(&Pageblock) -> bool) -> usize {
        let frames = order.pages().get();
        if order == Order::ZERO {
            return self.blocks.iter().filter(|block| is_asked(block)).map(|block| block.free).sum();
        }
        if order >= Order::PAGEBLOCK {
            let is_unused = |block: &Pageblock| block.free == PAGEBLOCK;
            return self.blocks.chunks_exact(frames / PAGEBLOCK).filter(|blocks| blocks.iter().all(is_unused)).count();
        }
        let (mut runs, mut free) = (0, 0);
        for (i, owner) in ledger.owners_in(self.numbers.clone()).enumerate() {
            if i.is_multiple_of(frames) {
                free = 0;
            }
            free += usize::from(owner == 0);
            runs += usize::from(free == frames && is_asked(&self.blocks[i / PAGEBLOCK]));
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_counted_aligned() {
        let allocator = pagemill::Allocator::builder().pages(600).build().unwrap();
        let (ledger, mut expect) = (Ledger::new(&allocator), Expect::new(0..600));
        let three = Order::new(3).unwrap();
        let runs = |expect: &Expect, order| expect.any(&ledger, order);
        assert_eq!((runs(&expect, Order::PAGEBLOCK), runs(&expect, three)), (1, 75));
        ledger.take(ledger.addr_of(7), Order::ZERO, 1).unwrap();
        expect.take(7, Order::ZERO, None).unwrap();
        assert_eq!((runs(&expect, three), runs(&expect, Order::PAGEBLOCK)), (74, 0));
    }

    #[test]
    fn a_pageblock_in_use_has_one_mobility() {
        let allocator = pagemill::Allocator::builder().pages(600).build().unwrap();
        let (ledger, mut expect) = (Ledger::new(&allocator), Expect::new(0..600));
        let own = |expect: &Expect, gfp| expect.own(&ledger, gfp, Order::ZERO, false);
        assert_eq!(expect.take(512, Order::ZERO, Some(Mobility::Unmovable)), Ok(()));
        assert_eq!(own(&expect, Gfp::KERNEL), Bounds { low: 599, high: 599 });
        assert_eq!(own(&expect, Gfp::MOVABLE), Bounds { low: 512, high: 512 });
        assert_eq!(expect.take(513, Order::ZERO, Some(Mobility::Movable)), Err(Mobility::Unmovable));
    }
}
