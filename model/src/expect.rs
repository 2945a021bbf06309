//! The reference model of what is free: for each pageblock, how many of its frames nobody has, and whose kind it is.
//!
//! It knows nothing of lists: what they hold is free, and a request that may wait drains them before it gives up. So
//! such a request finds a number that follows from the frames that are out alone:
//!
//! - one page, or a number that must be reached: whatever is free (the single path takes from any pageblock);
//! - up to n pages: what pageblocks of its own mobility and unused ones have, and one more (C3.6);
//! - n blocks of order k: as many as there are aligned runs of free frames.
//!
//! Where a pageblock's mobility cannot be told from outside, the number lies between two bounds.
use crate::Ledger;
use pagemill::{Gfp, Mobility, Order};

/// Frames of a pageblock.
const PAGEBLOCK: usize = 1 << Order::PAGEBLOCK.get();

/// How much a request has to find.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bounds {
    /// At least.
    pub low: usize,
    /// At most.
    pub high: usize,
}

impl Bounds {
    #[cfg(test)]
    fn exactly(n: usize) -> Self {
        Self { low: n, high: n }
    }
    /// Between nothing and `n`: where others work too, or the request may not drain the lists.
    pub fn up_to(n: usize) -> Self {
        Self { low: 0, high: n }
    }
    /// Is `n` within?
    pub fn admit(self, n: usize) -> bool {
        (self.low..=self.high).contains(&n)
    }
}

#[derive(Clone, Copy, Debug)]
struct Pageblock {
    free: usize,
    frames: usize,
    /// While frames of it are out, and if it can be told.
    mobility: Option<Mobility>,
}

/// See the [module](self).
#[derive(Clone, Debug)]
pub struct Expect {
    blocks: Vec<Pageblock>,
    free: usize,
}

impl Expect {
    /// All of `frames` frames are free.
    pub fn new(frames: usize) -> Self {
        let block = |first: usize| {
            let frames = (frames - first).min(PAGEBLOCK);
            Pageblock { free: frames, frames, mobility: None }
        };
        Self { blocks: (0..frames).step_by(PAGEBLOCK).map(block).collect(), free: frames }
    }

    /// Frames that nobody has.
    pub fn free(&self) -> usize {
        self.free
    }

    /// The mobility of the pageblock of a frame that is out, if it can be told.
    pub fn mobility_of(&self, frame: usize) -> Option<Mobility> {
        self.blocks[frame / PAGEBLOCK].mobility
    }

    /// A block was handed out. `mobility` is that of its pageblock, if the request tells it.
    ///
    /// # Errors
    /// The mobility that its pageblock has, if that is another one.
    pub fn take(&mut self, frame: usize, order: Order, mobility: Option<Mobility>) -> Result<(), Mobility> {
        let mut left = order.pages().get();
        self.free -= left;
        for block in &mut self.blocks[frame / PAGEBLOCK..] {
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
    pub fn give(&mut self, frame: usize, order: Order) {
        let mut left = order.pages().get();
        self.free += left;
        for block in &mut self.blocks[frame / PAGEBLOCK..] {
            let n = left.min(PAGEBLOCK);
            (block.free, left) = (block.free + n, left - n);
            if left == 0 {
                break;
            }
        }
    }

    /// What a request for `missing` more blocks, of which it must have `needed`, finds if nobody else works with the
    /// allocator.
    pub fn bounds(&self, ledger: &Ledger, gfp: Gfp, order: Order, missing: usize, needed: usize) -> Bounds {
        let all = self.blocks_of(ledger, order, |_| true);
        // What its own mobility has, and of others one, or as many as it must have (C3.6).
        let found = |own: usize| all.min(needed.max(own + 1)).min(missing);
        let of_mobility = |can_be: fn(Option<Mobility>, Mobility) -> bool| {
            let is_own = |block: &Pageblock| block.free == block.frames || can_be(block.mobility, gfp.mobility());
            found(self.blocks_of(ledger, order, is_own))
        };
        let high = of_mobility(|mobility, wanted| mobility.is_none_or(|known| known == wanted));
        if !gfp.may_wait() {
            return Bounds::up_to(high);
        }
        Bounds { low: of_mobility(|mobility, wanted| mobility == Some(wanted)), high }
    }

    /// Aligned runs of 2^order free frames in the pageblocks that are asked for.
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
        for (i, owner) in ledger.owners().enumerate() {
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
    fn a_bulk_request_leaves_other_mobilities_alone_but_for_one_page() {
        let allocator = pagemill::Allocator::builder().pages(600).build().unwrap();
        let (ledger, mut expect) = (Ledger::new(&allocator), Expect::new(600));
        let (unmovable, movable) = (Gfp::KERNEL, Gfp::KERNEL | Gfp::MOVABLE);
        assert_eq!(expect.bounds(&ledger, movable, Order::ZERO, 999, 0), Bounds::exactly(600));
        ledger.take(ledger.addr_of(512), Order::ZERO, 1).unwrap();
        assert_eq!(expect.take(512, Order::ZERO, Some(Mobility::Unmovable)), Ok(()));
        assert_eq!(expect.bounds(&ledger, unmovable, Order::ZERO, 999, 0), Bounds::exactly(599));
        assert_eq!(expect.bounds(&ledger, movable, Order::ZERO, 999, 0), Bounds::exactly(513));
        assert_eq!(expect.bounds(&ledger, movable, Order::ZERO, 999, 520), Bounds::exactly(520));
        let three = Order::new(3).unwrap();
        assert_eq!(expect.bounds(&ledger, movable, three, 999, 0), Bounds::exactly(65));
        assert_eq!(expect.take(513, Order::ZERO, Some(Mobility::Movable)), Err(Mobility::Unmovable));
    }

    #[test]
    fn runs_are_counted_aligned() {
        let allocator = pagemill::Allocator::builder().pages(600).build().unwrap();
        let (ledger, mut expect) = (Ledger::new(&allocator), Expect::new(600));
        let runs = |expect: &Expect, order| expect.blocks_of(&ledger, order, |_| true);
        let three = Order::new(3).unwrap();
        assert_eq!((runs(&expect, Order::PAGEBLOCK), runs(&expect, three)), (1, 75));
        ledger.take(ledger.addr_of(7), Order::ZERO, 1).unwrap();
        expect.take(7, Order::ZERO, None).unwrap();
        assert_eq!((runs(&expect, three), runs(&expect, Order::PAGEBLOCK)), (74, 0));
    }
}
