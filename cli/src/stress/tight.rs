//! `pagemill stress --tight`: the workers always want more pages than the arena has, which is nine tenths of their shares.
//!
//! Workers request pages in every form, with all flags, with deadlines and with tokens that get cancelled. A worker keeps its pages
//! until it has its share. Some pages go into two caches, which are shrinkers. Acquisitions fail on purpose. Another thread drains
//! lists, reclaims, cancels, gives memory back, and checks that the free pages never fall below the number that `ATOMIC` must
//! leave. At the end every frame is accounted for. If an event on the list [`MUST`] has not occurred, the run proves too little.
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pagemill::{
    Allocator, Block, BlockList, Bulk, Cancel, Error, Faults, Gfp, Memory, Order, Page, PageList, Run, Shortfall,
    Shrink, Shrinker, ShrinkerDoes, Watermarks, Why,
};
use pagemill_model::{Breach, Rng, Tag};

use super::Plan;
use super::common::{Common, Counts, Kind, lock};
use super::disturb::drain_some;
use super::report::Tally;
use crate::failure::Failure;

/// Arenas, in pages.
const SIZES: [usize; 3] = [1_500, 20_011, 5_000];
/// How often an acquisition fails on purpose.
const FAULTS: f64 = 0.02;
/// How long a calm lasts, in which all workers free their pages.
const CALM: Duration = Duration::from_millis(2);
/// Events that a long enough run must have counted.
#[rustfmt::skip] // Two lines are easier to read than eleven.
const MUST: [&str; 11] = [
    "waits", "deadlines", "cancelled", "below_mark", "exhausted", "reclaim_direct", "reclaimed", "faults", "drains",
    "given_back", "exact_refused",
];

/// A block, and its owner's tag in the ledger.
struct Held {
    block: Block,
    tag: Tag,
}

/// Pages that are given back when memory is short.
struct Cache {
    common: Arc<Common>,
    kept: Mutex<Vec<Held>>,
    does: ShrinkerDoes,
}

impl Cache {
    fn give(&self, held: Held) -> usize {
        let pages = held.block.order().pages().get();
        if let Err(breach) = self.common.ledger.give(held.block.addr(), held.block.order(), held.tag) {
            self.common.fail(breach);
        }
        pages
    }
}

impl Shrinker for Cache {
    fn shrink(&self, wanted: Shrink) -> usize {
        let mut pages = 0;
        while pages < wanted.pages {
            let Some(held) = lock(&self.kept).pop() else { break };
            pages += self.give(held);
        }
        pages
    }
    fn does(&self) -> ShrinkerDoes {
        self.does
    }
}

/// A round with too little memory.
pub(super) struct Tight {
    common: Arc<Common>,
    caches: [Arc<Cache>; 2],
    /// The token of each worker's current request.
    cancels: Vec<Mutex<Cancel>>,
    /// Free pages that even `ATOMIC` must leave.
    floor: u64,
    /// The most pages that one worker has.
    share: usize,
    /// One worker may make requests that never give up.
    has_stubborn: bool,
    /// All workers free their pages: otherwise no pageblock would ever be free to go back.
    is_calm: AtomicBool,
}

impl Kind for Tight {
    fn must(_: &Plan) -> &'static [&'static str] {
        &MUST
    }

    fn begin(plan: &Plan, number: usize, seed: u64) -> Result<Arc<Self>, Failure> {
        let pages = plan.pages(number, SIZES);
        let marks = Watermarks::above(pages as u32 / 32);
        let builder = Allocator::builder()
            .memory(Memory::anonymous(pages).watermarks(marks))
            .huge_pages(false)
            .background_reclaim(number % 2 == 1)
            .faults(plan.faults()?.unwrap_or_else(|| Faults::with_probability(FAULTS, seed)));
        let allocator = plan.build(builder)?;
        let common = Arc::new(Common::new(allocator, seed));
        let caches = [ShrinkerDoes::Nothing, ShrinkerDoes::Io]
            .map(|does| Arc::new(Cache { common: Arc::clone(&common), kept: Mutex::default(), does }));
        Ok(Arc::new(Self {
            common,
            caches,
            cancels: (0..plan.threads).map(|_| Mutex::default()).collect(),
            floor: u64::from(marks.min - marks.min / 2),
            share: (pages * 10 / 9).div_ceil(plan.threads as usize),
            // The other workers must go on freeing, and faults of the user's choice may never end.
            has_stubborn: plan.threads > 1 && plan.fail.is_none(),
            is_calm: AtomicBool::new(false),
        }))
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn run(self: &Arc<Self>, end: Instant) -> Result<Tally, String> {
        let common = &self.common;
        let registered = self.caches.each_ref().map(|cache| common.allocator.register_shrinker(cache.clone()));
        let mut threads = vec![self.spawn("disturb", disturb)?];
        for place in 0..self.cancels.len() {
            threads.push(self.spawn("worker", move |round| Worker::new(round, place).live())?);
        }
        while !common.is_over() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        common.end();
        common.join(threads)?;
        drop(registered);
        self.empty_caches();
        common.verdict()?;
        let stats = common.account()?;
        let mut counts = common.counts();
        counts.extend([
            ("pages", stats.allocated),
            ("waits", stats.waits),
            ("waited_ms", stats.waited_us / 1000),
            ("reclaim_direct", stats.reclaim_direct),
            ("reclaim_background", stats.reclaim_background),
            ("reclaimed", stats.reclaimed),
            ("faults", stats.faults),
            ("fallbacks", stats.fallbacks),
        ]);
        Ok(Tally { ops: Counts::new(), counts })
    }
}

impl Tight {
    fn empty_caches(&self) {
        for cache in &self.caches {
            let left: Vec<Held> = lock(&cache.kept).drain(..).collect();
            left.into_iter().for_each(|held| _ = cache.give(held));
        }
    }

    /// Gives memory back to the system after a calm, while workers request memory again. Returns the pages.
    fn give_back(&self) -> u64 {
        self.is_calm.store(true, Relaxed);
        std::thread::sleep(CALM);
        self.empty_caches();
        self.common.allocator.drain();
        self.is_calm.store(false, Relaxed);
        self.common.allocator.give_back().get() as u64
    }
}

/// Disturbs the workers until the round is over.
fn disturb(round: &Tight) -> Result<(), String> {
    let mut rng = Rng::new(round.common.seed ^ 0xd4a1);
    let (allocator, mut counts) = (&round.common.allocator, Counts::new());
    while !round.common.is_over() {
        let free = allocator.stats().free;
        if free < round.floor {
            return Err(format!("{free} pages are free: fewer than {}, which no request may take", round.floor));
        }
        *counts.entry("looks_at_the_mark").or_default() += 1;
        match rng.below(16) {
            0 if rng.below(8) == 0 => *counts.entry("given_back").or_default() += round.give_back(),
            0..2 => *counts.entry("reclaim_steps").or_default() += u64::from(allocator.reclaim_step().get() > 0),
            2..6 => {
                lock(&round.cancels[rng.below(round.cancels.len())]).cancel();
                *counts.entry("cancels").or_default() += 1;
            }
            _ => {
                drain_some(allocator, &mut rng, 10)?;
                *counts.entry("drains").or_default() += 1;
            }
        }
        std::thread::sleep(Duration::from_micros(rng.below(800) as u64));
    }
    round.common.add(&counts);
    Ok(())
}

/// A thread that requests and frees pages.
struct Worker<'r> {
    round: &'r Tight,
    place: usize,
    rng: Rng,
    held: Vec<Held>,
    /// Pages in `held`.
    pages: usize,
    /// Blocks held so far, to number tags.
    made: u32,
    counts: Counts,
}

impl<'r> Worker<'r> {
    fn new(round: &'r Tight, place: usize) -> Self {
        let rng = Rng::new(round.common.seed ^ (place as u64 + 1) << 32);
        Self { round, place, rng, held: Vec::new(), pages: 0, made: 0, counts: Counts::new() }
    }

    fn count(&mut self, name: &'static str) {
        *self.counts.entry(name).or_default() += 1;
    }

    fn live(mut self) -> Result<(), String> {
        self.work().map_err(|breach| breach.to_string())?;
        self.round.common.add(&self.counts);
        Ok(())
    }

    fn work(&mut self) -> Result<(), Breach> {
        while !self.round.common.is_over() {
            if self.round.is_calm.load(Relaxed) {
                self.let_go(usize::MAX)?;
                std::thread::yield_now();
            } else {
                self.turn()?;
            }
        }
        self.let_go(usize::MAX)
    }

    fn turn(&mut self) -> Result<(), Breach> {
        if self.pages >= self.round.share {
            let some = 1 + self.rng.below(self.held.len());
            return if self.rng.below(3) == 0 { self.cache(some) } else { self.let_go(some) };
        }
        let gfp = self.gfp();
        match self.rng.below(8) {
            0..2 => self.single(gfp),
            2 => self.array(gfp),
            3 => self.list(gfp),
            4 => self.callback(gfp),
            5 => self.runs(gfp),
            6 => self.blocks(gfp),
            _ => {
                let some = self.rng.below(30);
                self.let_go(some)
            }
        }
    }

    fn gfp(&mut self) -> Gfp {
        let base = [
            Gfp::KERNEL,
            Gfp::KERNEL,
            Gfp::NOIO,
            Gfp::NOFS,
            Gfp::NOWAIT,
            Gfp::ATOMIC,
            Gfp::KERNEL | Gfp::NORETRY,
            Gfp::KERNEL | Gfp::RETRY_MAYFAIL,
        ];
        let beside = [Gfp::NOWAIT, Gfp::NOWAIT, Gfp::MOVABLE, Gfp::RECLAIMABLE, Gfp::ZERO, Gfp::NOWARN];
        base[self.rng.below(base.len())] | beside[self.rng.below(beside.len())]
    }

    /// Frees `n` blocks, or all if there are fewer.
    fn let_go(&mut self, n: usize) -> Result<(), Breach> {
        for _ in 0..n.min(self.held.len()) {
            let Held { block, tag } = self.pick();
            self.round.common.ledger.give(block.addr(), block.order(), tag)?;
        }
        Ok(())
    }

    /// Puts `n` blocks into a cache.
    fn cache(&mut self, n: usize) -> Result<(), Breach> {
        let cache = &self.round.caches[self.rng.below(2)];
        for _ in 0..n {
            let held = self.pick();
            lock(&cache.kept).push(held);
        }
        self.count("cached");
        Ok(())
    }

    fn pick(&mut self) -> Held {
        let held = self.held.swap_remove(self.rng.below(self.held.len()));
        self.pages -= held.block.order().pages().get();
        held
    }

    fn hold(&mut self, block: Block, gfp: Gfp) -> Result<(), Breach> {
        self.made = (self.made + 1) & 0xf_ffff;
        let tag = (self.place as u32 + 1) << 20 | self.made;
        let ledger = &self.round.common.ledger;
        if gfp.contains(Gfp::ZERO) {
            ledger.look_zero(block.addr(), block.order())?;
        }
        ledger.take(block.addr(), block.order(), tag)?;
        self.pages += block.order().pages().get();
        self.held.push(Held { block, tag });
        Ok(())
    }

    fn single(&mut self, gfp: Gfp) -> Result<(), Breach> {
        self.count("single");
        let is_stubborn = self.place == 0 && self.round.has_stubborn && self.rng.below(8) == 0;
        let gfp = if is_stubborn { Gfp::KERNEL | Gfp::NOFAIL } else { gfp };
        match self.round.common.allocator.alloc_page(gfp) {
            Ok(page) => return self.hold(page.into(), gfp),
            Err(_) if is_stubborn => self.round.common.fail_with("a request with NOFAIL gave up".into()),
            Err(_) => self.count("exhausted"),
        }
        Ok(())
    }

    /// Makes a random bulk request by the form `take`, which puts its blocks into the vector, and holds them. `ask` makes it of a
    /// least number of blocks, 0 for most requests, and of the number wanted.
    fn bulk<N, T>(
        &mut self,
        form: &'static str,
        gfp: Gfp,
        order: Order,
        ask: impl FnOnce(usize, usize) -> Bulk<'static, N, T>,
        take: impl FnOnce(&Allocator, usize, Bulk<'_, N, T>, &mut Vec<Block>) -> Result<Option<Shortfall>, Error>,
    ) -> Result<(), Breach> {
        self.count(form);
        let most = [8, 64, 200, 900][self.rng.below(4)];
        let n = (1 + self.rng.below(most)).div_ceil(order.pages().get());
        let least = [0, 0, n / 2, n][self.rng.below(4)];
        let deadline = [None, Some(0), Some(2), Some(12)][self.rng.below(4)].map(Duration::from_millis);
        let cancel = Cancel::new();
        *lock(&self.round.cancels[self.place]) = cancel.clone();
        let bulk = ask(least, n).cancel(&cancel).gfp(gfp);
        let bulk = deadline.iter().fold(bulk, |bulk, &after| bulk.timeout(after));
        let mut blocks = Vec::new();
        match take(&self.round.common.allocator, n, bulk, &mut blocks) {
            Ok(shortfall) => self.ended(shortfall),
            Err(_) if least > 0 => self.count("exact_refused"),
            Err(_) => {}
        }
        blocks.into_iter().try_for_each(|block| self.hold(block, gfp))
    }

    /// Counts how a request ended.
    fn ended(&mut self, shortfall: Option<Shortfall>) {
        let name = match shortfall {
            None => return,
            Some(Shortfall { why: Why::Cancelled, .. }) => "cancelled",
            Some(Shortfall { why: Why::TimedOut, .. }) => "deadlines",
            Some(Shortfall { why: Why::BelowMark, .. }) => "below_mark",
            Some(Shortfall { why: Why::Exhausted, .. }) => "exhausted",
            Some(_) => "other_shortfalls",
        };
        self.count(name);
    }

    fn array(&mut self, gfp: Gfp) -> Result<(), Breach> {
        self.bulk("array", gfp, Order::ZERO, Bulk::at_least, |allocator, n, bulk, blocks| {
            let mut slots: Vec<Option<Page>> = (0..n).map(|_| None).collect();
            let filled = allocator.alloc_pages_bulk_array(bulk, &mut slots);
            blocks.extend(slots.into_iter().flatten().map(Block::from));
            Ok(filled?.shortfall)
        })
    }

    fn list(&mut self, gfp: Gfp) -> Result<(), Breach> {
        self.bulk("list", gfp, Order::ZERO, Bulk::at_least, |allocator, _, bulk, blocks| {
            let mut list = PageList::new();
            let delivered = allocator.alloc_pages_bulk_list(bulk, &mut list);
            blocks.extend(list.map(Block::from));
            Ok(delivered?.shortfall)
        })
    }

    fn callback(&mut self, gfp: Gfp) -> Result<(), Breach> {
        self.bulk(
            "callback",
            gfp,
            Order::ZERO,
            |_, n| Bulk::up_to(n),
            |allocator, _, bulk, blocks| {
                Ok(allocator.alloc_pages_bulk_callback(bulk, |page: Page| blocks.push(page.into()))?.shortfall)
            },
        )
    }

    fn runs(&mut self, gfp: Gfp) -> Result<(), Breach> {
        self.bulk("runs", gfp, Order::ZERO, Bulk::at_least, |allocator, _, bulk, blocks| {
            let mut runs: Vec<Run<Page>> = Vec::new();
            let delivered = allocator.alloc_pages_bulk_runs(bulk, &mut runs);
            blocks.extend(runs.into_iter().flat_map(Run::into_pages).map(Block::from));
            Ok(delivered?.shortfall)
        })
    }

    fn blocks(&mut self, gfp: Gfp) -> Result<(), Breach> {
        let Ok(order) = Order::new(1 + self.rng.below(4) as u8) else { return Ok(()) };
        self.bulk(
            "blocks",
            gfp,
            order,
            |_, n| Bulk::up_to(n).order(order),
            |allocator, _, bulk, blocks| {
                let mut list = BlockList::new();
                let delivered = allocator.alloc_pages_bulk_list(bulk, &mut list);
                blocks.extend(list);
                Ok(delivered?.shortfall)
            },
        )
    }
}
