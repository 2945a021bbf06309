//! A world: one user of an allocator, with its holdings and its next operations.
use crate::asked::{Asked, Counts};
use crate::expect::Expect;
use crate::ledger::{Breach, Fault, Ledger, Tag};
use crate::machine::{Built, Failing, Piece};
use crate::op::Op;
use crate::plan::{Zone, Zones};
use crate::pressure::Caching;
use crate::request::Request;
use crate::unit::{Hand, Holding, Runs, Unit};
use core::cell::Cell;
use core::fmt;
use pagemill::{Allocator, Block, Gfp, Mobility, NodeId, NodeMask, Order, Page, Policy, Watermarks};
use std::sync::Arc;

/// Moves a thread to another CPU: a test sets a number, stress asks the system.
pub type Cpus = fn(usize);

thread_local! {
    static FAKE_CPU: Cell<usize> = const { Cell::new(0) };
}

/// The CPU on which this thread pretends to run; for [`pagemill::Builder::cpus`].
pub fn fake_cpu() -> usize {
    FAKE_CPU.get()
}
/// Makes this thread pretend to run on CPU `cpu`.
pub fn set_fake_cpu(cpu: usize) {
    FAKE_CPU.set(cpu);
}

/// A result is not what it must be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure(String);

impl Failure {
    /// A failure with this description.
    pub fn new(what: impl Into<String>) -> Self {
        Self(what.into())
    }
}
impl From<Breach> for Failure {
    fn from(breach: Breach) -> Self {
        Self(breach.to_string())
    }
}
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
impl core::error::Error for Failure {}

/// Fails unless a condition holds.
macro_rules! demand {
    ($holds:expr, $($what:tt)+) => {
        if !$holds {
            return Err($crate::world::Failure::new(format!($($what)+)));
        }
    };
}
pub(crate) use demand;

/// The bits of a tag that count allocations; the bits above are the owner's number.
const COUNT_BITS: u32 = 20;

/// See the [module](self).
#[derive(Debug)]
pub struct World {
    pub(crate) allocator: Allocator,
    pub(crate) ledger: Arc<Ledger>,
    who: u32,
    count: u32,
    /// Holdings by order.
    held: [Vec<Holding>; ORDERS],
    pub(crate) pages: Hand<Page>,
    pub(crate) blocks: Hand<Block>,
    pub(crate) page_runs: Runs<Page>,
    pub(crate) block_runs: Runs<Block>,
    /// The number of frames that it holds, and the most that it may hold.
    out: usize,
    most: usize,
    /// The model of what must come back, if no other thread uses the allocator.
    pub(crate) zones: Option<Zones>,
    /// The machine of which the allocator was made, if it has several zones.
    pub(crate) machine: Option<Built>,
    /// Whether acquisitions fail on purpose.
    pub(crate) is_failing: bool,
    pub(crate) asked: Option<Asked>,
    pub(crate) counts: Counts,
    pub(crate) cache: Caching,
    move_to: Cpus,
    /// The CPU on which it runs.
    pub(crate) here: fn() -> usize,
    /// Blocks that must have been refused so far.
    pub(crate) misused: u64,
    /// Pages that must have been handed out so far, including those that were freed at once.
    steals: u64,
}

fn is_pages(request: &Request) -> bool {
    request.order == Order::ZERO
}

const ORDERS: usize = Order::MAX.get() as usize + 1;

impl World {
    /// A world that has the allocator to itself: every result is predicted.
    pub fn alone(allocator: Allocator, move_to: Cpus) -> Self {
        let ledger = Arc::new(Ledger::new(&allocator));
        let pages = ledger.frames();
        let piece = Piece { node: NodeId::ZERO, is_dma32: false, marks: Watermarks::NONE, pages };
        let zone = Zone { piece, expect: Expect::new(0..pages), is_retired: false, is_brought: false };
        let distances = vec![vec![10]];
        let (allowed, policy) = (NodeMask::ALL, Policy::Local);
        let zones = Zones { zones: vec![zone], distances, allowed, policy, turn: Some(NodeId::ZERO) };
        Self { zones: Some(zones), ..Self::shared(allocator, ledger, 1, usize::MAX, move_to) }
    }

    /// A world that has a whole machine to itself, and closes it at the end. `here` returns the CPU on which it runs.
    pub fn over(built: Built, move_to: Cpus, here: fn() -> usize) -> Self {
        let ledger = Arc::new(Ledger::over(&built.ranges));
        let machine = &built.machine;
        let mut first = 0;
        let zone = |&piece: &Piece| {
            let numbers = first..first + piece.pages;
            first = numbers.end;
            Zone { piece, expect: Expect::new(numbers), is_retired: false, is_brought: built.ranges.len() > 1 }
        };
        let zones = Zones {
            zones: machine.pieces.iter().map(zone).collect(),
            distances: machine.distances.clone(),
            allowed: NodeMask::ALL,
            policy: machine.policy,
            turn: Some(NodeId::ZERO),
        };
        let is_failing = machine.failing != Failing::Never;
        let world = Self::shared(built.allocator.clone(), ledger, 1, usize::MAX, move_to);
        Self { zones: Some(zones), machine: Some(built), is_failing, here, ..world }
    }

    /// A world beside others on the same allocator and ledger. `who` is its number, from 1 to 4095; it holds at most about `most`
    /// frames.
    pub fn shared(allocator: Allocator, ledger: Arc<Ledger>, who: u32, most: usize, move_to: Cpus) -> Self {
        assert!((1..1 << (32 - COUNT_BITS)).contains(&who), "world {who} has no tags");
        Self {
            allocator,
            ledger,
            who,
            count: 0,
            held: [const { Vec::new() }; ORDERS],
            pages: Hand::default(),
            blocks: Hand::default(),
            page_runs: Runs::default(),
            block_runs: Runs::default(),
            out: 0,
            most,
            zones: None,
            machine: None,
            is_failing: false,
            asked: None,
            counts: Counts::default(),
            cache: Caching::default(),
            move_to,
            here: || 0,
            misused: 0,
            steals: 0,
        }
    }

    /// The number of frames that it holds.
    pub fn out(&self) -> usize {
        self.out
    }
    /// Its ledger.
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// Applies one operation and checks the result.
    ///
    /// # Errors
    /// The result is not what it must be.
    pub fn apply(&mut self, op: Op) -> Result<(), Failure> {
        if self.zones.is_some() {
            self.steals = self.allocator.stats().steals;
        } else if self.out > self.most {
            self.free_most()?;
        }
        match op {
            Op::One { request } => self.one(request)?,
            Op::Split { which, keep } => self.split(which, keep)?,
            Op::Array { request, holes } if is_pages(&request) => self.array::<Page>(request, holes)?,
            Op::Array { request, holes } => self.array::<Block>(request, holes)?,
            Op::List { request } if is_pages(&request) => self.list::<Page>(request)?,
            Op::List { request } => self.list::<Block>(request)?,
            Op::ListPop { order: Order::ZERO, n } => self.list_pop::<Page>(n)?,
            Op::ListPop { n, .. } => self.list_pop::<Block>(n)?,
            Op::ListPush { order: Order::ZERO, n } => self.list_push::<Page>(Order::ZERO, n, false)?,
            Op::ListPush { order, n } => self.list_push::<Block>(order, n, false)?,
            Op::ListAppend { order: Order::ZERO, n } => self.list_push::<Page>(Order::ZERO, n, true)?,
            Op::ListAppend { order, n } => self.list_push::<Block>(order, n, true)?,
            Op::ListFree { order: Order::ZERO, is_drop } => self.list_free::<Page>(is_drop)?,
            Op::ListFree { is_drop, .. } => self.list_free::<Block>(is_drop)?,
            Op::Callback { request, unwind, nested } if is_pages(&request) => {
                self.callback::<Page>(request, unwind, nested)?
            }
            Op::Callback { request, unwind, nested } => self.callback::<Block>(request, unwind, nested)?,
            Op::Runs { request } if is_pages(&request) => self.runs::<Page>(request)?,
            Op::Runs { request } => self.runs::<Block>(request)?,
            Op::Contig { gfp, n } => self.contig(gfp, n)?,
            Op::RunSplit { which, keep } => self.run_split(which, keep)?,
            Op::RunFree { which } => self.run_free(which)?,
            Op::Free { which, is_drop } => self.free_one(which, is_drop)?,
            Op::FreeArray { order: Order::ZERO, n, holes } => self.free_array::<Page>(Order::ZERO, n, holes)?,
            Op::FreeArray { order, n, holes } => self.free_array::<Block>(order, n, holes)?,
            Op::FreeRaw { which } => self.free_raw(which)?,
            Op::FreeArrayRaw { order, n, holes } => self.free_array_raw(order, n, holes)?,
            Op::FreeOldest { n } => self.free_oldest(n)?,
            Op::Misuse { wrong, which, order } => self.misuse(wrong, which, order)?,
            Op::Invalid { which } => self.invalid(which)?,
            Op::Drain => drop(self.allocator.drain()),
            Op::DrainCpu { cpu } => self.drain_cpu(cpu)?,
            Op::MoveTo { cpu } => (self.move_to)(cpu),
            Op::Cache { which, n } => self.put_in_cache(which, n),
            Op::Uncache => self.uncache(),
            Op::ReclaimStep => self.reclaim_step()?,
            Op::GiveBack => self.give_back()?,
            Op::Allow { nodes } => self.allow(nodes)?,
            Op::AddMemory { which } => self.add_memory(which)?,
            Op::Retire { which } => self.retire(which)?,
            Op::Check => self.check()?,
        }
        self.check_sums()?;
        self.check_counts()
    }

    fn drain_cpu(&mut self, cpu: usize) -> Result<(), Failure> {
        let cpu = pagemill::CpuId::new((cpu % self.allocator.cpus()) as u32);
        let drained = self.allocator.drain_cpu(cpu);
        demand!(drained.is_ok(), "draining {cpu:?} fails: {drained:?}");
        Ok(())
    }

    // ── holdings ────────────────────────────────────────────────────────────────────────────────────────────────

    pub(crate) fn next_tag(&mut self) -> Tag {
        self.count = (self.count + 1) % (1 << COUNT_BITS);
        self.who << COUNT_BITS | self.count
    }

    /// The mobility of the pageblocks of this operation's blocks, if it is known. Pages come from pageblocks of their own mobility
    /// unless one was taken from another; whole pageblocks get the mobility with which they were requested.
    pub(crate) fn told(&self, gfp: Gfp, order: Order) -> Option<Mobility> {
        let is_own = match order {
            Order::ZERO => self.zones.is_some() && self.allocator.stats().steals == self.steals,
            _ => order >= Order::PAGEBLOCK,
        };
        is_own.then_some(gfp.mobility())
    }

    /// Records that a block was handed out.
    pub(crate) fn take(
        &mut self,
        addr: usize,
        order: Order,
        gfp: Gfp,
        tag: Tag,
        told: Option<Mobility>,
    ) -> Result<(), Failure> {
        if gfp.contains(Gfp::ZERO) {
            self.ledger.look_zero(addr, order)?;
        }
        self.ledger.take(addr, order, tag)?;
        self.out += order.pages().get();
        let frame = self.ledger.frame_of(addr);
        let Some((at, zone)) = self.zones.as_mut().and_then(|zones| zones.at(frame)) else { return Ok(()) };
        if let Err(known) = zone.expect.take(frame, order, told) {
            return Err(Failure::new(format!("frame {frame} was taken for {told:?} from a pageblock of {known:?}")));
        }
        if let Some(asked) = &mut self.asked {
            let (node, is_dma32) = (zone.piece.node, zone.piece.is_dma32);
            demand!(asked.plan.may_have[at], "{:?} got a page of {node}, DMA32: {is_dma32}", asked.request);
            asked.got[at] += 1;
        }
        Ok(())
    }

    /// Records that a block is about to be freed.
    pub(crate) fn give(&mut self, addr: usize, order: Order, tag: Tag) -> Result<(), Failure> {
        self.ledger.give(addr, order, tag)?;
        self.came_back(addr, order);
        Ok(())
    }
    /// Records that a block was freed; the ledger knows already.
    pub(crate) fn came_back(&mut self, addr: usize, order: Order) {
        self.out -= order.pages().get();
        let frame = self.ledger.frame_of(addr);
        if let Some((_, zone)) = self.zones.as_mut().and_then(|zones| zones.at(frame)) {
            zone.expect.give(frame, order);
        }
    }

    /// Takes a new block and holds it.
    pub(crate) fn hold_new(&mut self, block: Block, gfp: Gfp, told: Option<Mobility>) -> Result<(), Failure> {
        let tag = self.next_tag();
        self.take(block.addr(), block.order(), gfp, tag, told)?;
        self.hold(block, tag);
        Ok(())
    }

    pub(crate) fn hold(&mut self, block: Block, tag: Tag) {
        self.held[usize::from(block.order().get())].push(Holding { block, tag });
    }

    /// The newest held block of this order.
    pub(crate) fn pick<T: Unit>(&mut self, order: Order) -> Option<(T, Tag)> {
        let Holding { block, tag } = self.held[usize::from(order.get())].pop()?;
        Some((T::from_block(block), tag))
    }

    /// Any held block.
    pub(crate) fn pick_any(&mut self, which: usize) -> Option<Holding> {
        let order = (0..ORDERS).map(|i| (which + i) % ORDERS).find(|&order| !self.held[order].is_empty())?;
        let held = &mut self.held[order];
        Some(held.swap_remove(which / ORDERS % held.len()))
    }

    /// The order of which it holds most blocks, and their number.
    pub(crate) fn held_most(&mut self) -> Option<&mut Vec<Holding>> {
        self.held.iter_mut().max_by_key(|held| held.len()).filter(|held| !held.is_empty())
    }

    /// Hands its single holdings over to another world; the ledger keeps their tags.
    pub fn hand_over(&mut self) -> Vec<Holding> {
        let all: Vec<Holding> = self.held.iter_mut().flat_map(|held| held.drain(..)).collect();
        self.out -= all.iter().map(|holding| holding.block.order().pages().get()).sum::<usize>();
        all
    }
    /// Takes over the holdings of another world.
    pub fn take_over(&mut self, holdings: Vec<Holding>) {
        for Holding { block, tag } in holdings {
            self.out += block.order().pages().get();
            self.hold(block, tag);
        }
    }

    // ── checks ──────────────────────────────────────────────────────────────────────────────────────────────────

    /// After each operation of a world alone: pages handed out less pages returned are the pages out, and the refusals are those
    /// that were due.
    fn check_sums(&self) -> Result<(), Failure> {
        let Some(zones) = &self.zones else { return Ok(()) };
        // The free frames of a retired arena count for no one.
        let frames: usize = zones.in_use().map(|zone| zone.piece.pages).sum();
        let out_in_use: usize = zones.in_use().map(|zone| zone.expect.out()).sum();
        let stats = self.allocator.stats();
        let out = stats.allocated.wrapping_sub(stats.freed);
        demand!(out == self.out as u64, "{out} pages are out by the statistics, {} by the model", self.out);
        demand!(stats.quarantined == 0, "a frame owned twice: {} are in quarantine", stats.quarantined);
        demand!(stats.misused == self.misused, "{} blocks were refused, not {}", stats.misused, self.misused);
        let here = stats.free + stats.listed + out_in_use as u64;
        demand!(here == frames as u64, "{here} frames of {frames} are somewhere");
        Ok(())
    }

    /// Checks everything that it holds; alone, also the whole allocator.
    fn check(&self) -> Result<(), Failure> {
        for Holding { block, tag } in self.held.iter().flatten() {
            self.ledger.look(block.addr(), block.order(), *tag)?;
        }
        if self.zones.is_some() {
            let census = self.allocator.validate().map_err(|misfit| Failure::new(misfit.to_string()))?;
            let out = self.ledger.owners().filter(|&owner| owner != 0).count();
            demand!(
                census.handed_out == self.out && out == self.out,
                "the census has {} pages out, the ledger {out}, the model {}",
                census.handed_out,
                self.out
            );
        }
        Ok(())
    }

    /// Frees everything and, alone, checks the allocator a last time.
    ///
    /// # Errors
    /// As [`apply`](Self::apply).
    pub fn finish(mut self) -> Result<(), Failure> {
        self.uncache();
        self.free_all()?;
        demand!(self.out == 0, "{} pages are lost by the model itself", self.out);
        self.check()?;
        self.check_sums()?;
        let machine = self.machine.take();
        drop(self);
        let closed = machine.map_or(Ok(()), Built::close);
        closed.map_err(|still_out| Failure::new(still_out.to_string()))
    }

    /// The failure when a block that its owner freed was refused.
    pub(crate) fn refused(&self, addr: usize) -> Failure {
        Breach { frame: self.ledger.frame_of(addr), addr, fault: Fault::Refused }.into()
    }
}
