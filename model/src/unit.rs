//! Pages and blocks as one trait, so that each form is written once for both; and the holdings of a world.
use crate::ledger::Tag;
use crate::world::World;
use pagemill::{Block, Bulk, List, Order, Owned, Page, Run};
use std::collections::VecDeque;

/// A block with an owner, and its tag in the ledger. It may go from one world to another.
#[derive(Debug)]
pub struct Holding {
    pub(crate) block: Block,
    pub(crate) tag: Tag,
}

/// The list in hand, and the blocks that must be on it, head first.
#[derive(Debug)]
pub(crate) struct Hand<T: Unit> {
    pub(crate) list: List<T>,
    pub(crate) items: VecDeque<(usize, Tag)>,
}

/// Runs in hand, each with its tag and order.
#[derive(Debug)]
pub(crate) struct Runs<T: Unit> {
    pub(crate) runs: Vec<Run<T>>,
    pub(crate) tags: Vec<(Tag, Order)>,
}

impl<T: Unit> Default for Hand<T> {
    fn default() -> Self {
        Self { list: List::new(), items: VecDeque::new() }
    }
}
impl<T: Unit> Default for Runs<T> {
    fn default() -> Self {
        Self { runs: Vec::new(), tags: Vec::new() }
    }
}

/// [`Page`] or [`Block`].
pub(crate) trait Unit: Owned + Sized {
    /// A request for units of this order; pages are of order 0.
    fn of_order<N>(bulk: Bulk<'_, N, Self>, order: Order) -> Bulk<'_, N, Self>;
    fn from_block(block: Block) -> Self;
    fn into_block(self) -> Block;
    fn addr(&self) -> usize;
    fn hand(world: &mut World) -> &mut Hand<Self>;
    fn runs(world: &mut World) -> &mut Runs<Self>;
}

impl Unit for Page {
    fn of_order<N>(bulk: Bulk<'_, N, Self>, order: Order) -> Bulk<'_, N, Self> {
        debug_assert_eq!(order, Order::ZERO);
        bulk
    }
    fn from_block(block: Block) -> Self {
        let (ptr, order) = block.into_raw();
        debug_assert_eq!(order, Order::ZERO);
        // SAFETY: the block was a page, which was turned into this address just now.
        unsafe { Self::from_raw(ptr) }.expect("it was given up just now")
    }
    fn into_block(self) -> Block {
        self.into()
    }
    fn addr(&self) -> usize {
        Self::addr(self)
    }
    fn hand(world: &mut World) -> &mut Hand<Self> {
        &mut world.pages
    }
    fn runs(world: &mut World) -> &mut Runs<Self> {
        &mut world.page_runs
    }
}

impl Unit for Block {
    fn of_order<N>(bulk: Bulk<'_, N, Self>, order: Order) -> Bulk<'_, N, Self> {
        bulk.order(order)
    }
    fn from_block(block: Block) -> Self {
        block
    }
    fn into_block(self) -> Block {
        self
    }
    fn addr(&self) -> usize {
        Self::addr(self)
    }
    fn hand(world: &mut World) -> &mut Hand<Self> {
        &mut world.blocks
    }
    fn runs(world: &mut World) -> &mut Runs<Self> {
        &mut world.block_runs
    }
}
