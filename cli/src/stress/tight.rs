//! `pagemill stress --tight`: the arena has nine tenths of what is wanted of it, all the time.
//!
//! Workers ask in every form, with all flags, with deadlines and tokens that somebody cancels, and keep what they get
//! until they have their share; all shares together are more than there is. Some of it goes into two caches, which are
//! shrinkers. Acquisitions fail on purpose. Another thread drains lists, reclaims, cancels, gives memory back, and
//! looks whether a zone ever falls below what `ATOMIC` must leave. In the end every frame is accounted for, and what
//! was never met is not called tried.
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use pagemill::{
    Allocator, Block, BlockList, Bulk, Cancel, CpuId, Faults, Gfp, Memory, Order, Page, PageList, Run, Shortfall,
    Shrink, Shrinker, ShrinkerDoes, Watermarks, Why,
};
use pagemill_model::{Breach, Ledger, Rng, Tag};

use super::found::Found;
use super::{Plan, threads};
use crate::failure::Failure;

/// What was counted, by name. The names are part of the program's interface.
pub(super) type Counts = BTreeMap<&'static str, u64>;

/// Arenas, in pages.
const SIZES: [usize; 3] = [1_500, 20_011, 5_000];
/// How often an acquisition fails on purpose.
const FAULTS: f64 = 0.02;
/// How long everybody keeps nothing, now and then.
const CALM: Duration = Duration::from_millis(2);
/// What has to have happened in a run that is long enough to say so.
pub(super) const MUST: [&str; 11] = [
    "waits",
    "deadlines",
    "cancelled",
    "below_mark",
    "exhausted",
    "reclaim_direct",
    "reclaimed",
    "faults",
    "drains",
    "given_back",
    "exact_refused",
];

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A block, and whose it is in the ledger.
struct Held {
    block: Block,
    tag: Tag,
}

/// Pages that can be done without: given back when memory is short.
struct Cache {
    ledger: Arc<Ledger>,
    found: Arc<Found>,
    kept: Mutex<Vec<Held>>,
    does: ShrinkerDoes,
}

impl Cache {
    fn give(&self, held: Held) -> usize {
        let pages = held.block.order().pages().get();
        if let Err(breach) = self.ledger.give(held.block.addr(), held.block.order(), held.tag) {
            self.found.note(breach);
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

/// One round: an allocator, and everything that works with it.
pub(super) struct Tight {
    pub(super) allocator: Allocator,
    ledger: Arc<Ledger>,
    found: Arc<Found>,
    caches: [Arc<Cache>; 2],
    /// What each worker waits with, just now.
    cancels: Vec<Mutex<Cancel>>,
    counts: Mutex<Counts>,
    /// What requests may not take: what `ATOMIC` must leave.
    floor: u64,
    /// Pages that one worker has at most.
    share: usize,
    /// Somebody may ask and never give up.
    has_stubborn: bool,
    seed: u64,
    /// Everybody lets go of what they have: otherwise no pageblock is ever free to go back.
    is_calm: AtomicBool,
    is_over: AtomicBool,
}

impl Tight {
    pub(super) fn new(plan: &Plan, round: usize, seed: u64) -> Result<Arc<Self>, Failure> {
        let pages = plan.pages.unwrap_or(SIZES[round % SIZES.len()]);
        let marks = Watermarks::above(pages as u32 / 32);
        let builder = Allocator::builder()
            .memory(Memory::anonymous(pages).watermarks(marks))
            .huge_pages(false)
            .background_reclaim(round % 2 == 1)
            .faults(plan.faults()?.unwrap_or_else(|| Faults::with_probability(FAULTS, seed)));
        let builder = plan.backend.iter().fold(builder, |builder, &backend| builder.backend(backend));
        let next = "choose another --backend or fewer --pages";
        let allocator = builder.build().map_err(|error| Failure::new("can't make an allocator", error).next(next))?;
        let (ledger, found) = (Arc::new(Ledger::new(&allocator)), Arc::new(Found::new()));
        let caches = [ShrinkerDoes::Nothing, ShrinkerDoes::Io].map(|does| {
            let (ledger, found) = (Arc::clone(&ledger), Arc::clone(&found));
            Arc::new(Cache { ledger, found, kept: Mutex::default(), does })
        });
        Ok(Arc::new(Self {
            allocator,
            ledger,
            found,
            caches,
            cancels: (0..plan.threads).map(|_| Mutex::default()).collect(),
            counts: Mutex::default(),
            floor: u64::from(marks.min - marks.min / 2),
            share: (pages * 10 / 9).div_ceil(plan.threads as usize),
            // One of several alone: the others go on freeing. Faults of the user's choice may never end.
            has_stubborn: plan.threads > 1 && plan.fail.is_none(),
            seed,
            is_calm: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
        }))
    }

    fn is_over(&self) -> bool {
        // Acquire pairs with the Release in `fail` and `run`.
        self.is_over.load(Acquire) || self.found.first().is_some()
    }

    /// Runs until `end`, gives everything back and looks at every frame.
    pub(super) fn run(self: &Arc<Self>, end: Instant) -> Result<Counts, String> {
        let registered = self.caches.each_ref().map(|cache| self.allocator.register_shrinker(cache.clone()));
        let mut threads = vec![self.spawn("disturb", disturb)?];
        for place in 0..self.cancels.len() {
            threads.push(self.spawn("worker", move |round| Worker::new(round, place).live())?);
        }
        while !self.is_over() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.is_over.store(true, Release);
        threads::end(threads, &self.found)?;
        drop(registered);
        self.empty_caches();
        self.found.first().map_or(Ok(()), Err)?;
        self.account()
    }

    fn empty_caches(&self) {
        for cache in &self.caches {
            let left: Vec<Held> = lock(&cache.kept).drain(..).collect();
            left.into_iter().for_each(|held| _ = cache.give(held));
        }
    }

    /// Gives memory back to the system while the first requests after a calm come for it. Returns the pages.
    fn give_back(&self) -> u64 {
        self.is_calm.store(true, Relaxed);
        std::thread::sleep(CALM);
        self.empty_caches();
        self.allocator.drain();
        self.is_calm.store(false, Relaxed);
        self.allocator.give_back().get() as u64
    }

    fn spawn(
        self: &Arc<Self>,
        name: &str,
        body: impl FnOnce(&Self) -> Result<(), String> + Send + 'static,
    ) -> Result<JoinHandle<()>, String> {
        let round = Arc::clone(self);
        let work = move || body(&round).unwrap_or_else(|what| round.found.say(what));
        Builder::new().name(name.into()).spawn(work).map_err(|error| format!("no thread could be started: {error}"))
    }

    /// Every frame is free, once; what was handed out came back; nobody waits.
    fn account(&self) -> Result<Counts, String> {
        if let Some(frame) = self.ledger.owners().position(|owner| owner != 0) {
            return Err(format!("frame {frame} lost: nobody gave it back"));
        }
        let lost = |misfit| format!("a frame is lost or owned twice: {misfit}");
        let census = self.allocator.validate().map_err(lost)?;
        let stats = self.allocator.stats();
        let wrong = [
            ("quarantined", stats.quarantined, 0),
            ("refused", stats.misused, 0),
            ("pages out", census.handed_out as u64, 0),
            ("pages that came back", stats.freed, stats.allocated),
            ("requests that wait", stats.waiting, 0),
        ];
        if let Some((what, is, must)) = wrong.into_iter().find(|(_, is, must)| is != must) {
            return Err(format!("at the end: {what}: {is}, not {must}"));
        }
        let mut counts = lock(&self.counts).clone();
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
        Ok(counts)
    }
}

/// What else happens, until the round is over.
fn disturb(round: &Tight) -> Result<(), String> {
    let mut rng = Rng::new(round.seed ^ 0xd4a1);
    let (allocator, mut counts) = (&round.allocator, Counts::new());
    while !round.is_over() {
        let free = allocator.stats().free;
        if free < round.floor {
            return Err(format!("{free} pages are free: below {}, which nobody may take", round.floor));
        }
        *counts.entry("looks_at_the_mark").or_default() += 1;
        match rng.below(16) {
            0 if rng.below(8) == 0 => *counts.entry("given_back").or_default() += round.give_back(),
            0..2 => *counts.entry("reclaim_steps").or_default() += u64::from(allocator.reclaim_step().get() > 0),
            2..6 => {
                lock(&round.cancels[rng.below(round.cancels.len())]).cancel();
                *counts.entry("cancels").or_default() += 1;
            }
            6 => {
                allocator.drain();
                *counts.entry("drains").or_default() += 1;
            }
            _ => {
                let cpu = CpuId::new(rng.below(allocator.cpus()) as u32);
                allocator.drain_cpu(cpu).map_err(|error| format!("a drain failed: {error}"))?;
                *counts.entry("drains").or_default() += 1;
            }
        }
        std::thread::sleep(Duration::from_micros(rng.below(800) as u64));
    }
    add(&mut lock(&round.counts), &counts);
    Ok(())
}

/// Adds counts to others.
pub(super) fn add(sum: &mut Counts, more: &Counts) {
    more.iter().for_each(|(name, n)| *sum.entry(name).or_default() += n);
}

/// Who asks.
struct Worker<'r> {
    round: &'r Tight,
    place: usize,
    rng: Rng,
    held: Vec<Held>,
    /// Pages in `held`.
    pages: usize,
    made: u32,
    counts: Counts,
}

impl<'r> Worker<'r> {
    fn new(round: &'r Tight, place: usize) -> Self {
        let rng = Rng::new(round.seed ^ (place as u64 + 1) << 32);
        Self { round, place, rng, held: Vec::new(), pages: 0, made: 0, counts: Counts::new() }
    }

    fn count(&mut self, name: &'static str) {
        *self.counts.entry(name).or_default() += 1;
    }

    fn live(mut self) -> Result<(), String> {
        while !self.round.is_over() {
            if self.round.is_calm.load(Relaxed) {
                self.let_go(usize::MAX).map_err(|breach| breach.to_string())?;
                std::thread::yield_now();
            } else {
                self.turn().map_err(|breach| breach.to_string())?;
            }
        }
        self.let_go(usize::MAX).map_err(|breach| breach.to_string())?;
        add(&mut lock(&self.round.counts), &self.counts);
        Ok(())
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

    /// Frees `n` blocks, or all.
    fn let_go(&mut self, n: usize) -> Result<(), Breach> {
        for _ in 0..n.min(self.held.len()) {
            let Held { block, tag } = self.pick();
            self.round.ledger.give(block.addr(), block.order(), tag)?;
        }
        Ok(())
    }

    /// Puts `n` blocks where shrinkers find them.
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
        if gfp.contains(Gfp::ZERO) {
            self.round.ledger.look_zero(block.addr(), block.order())?;
        }
        self.round.ledger.take(block.addr(), block.order(), tag)?;
        self.pages += block.order().pages().get();
        self.held.push(Held { block, tag });
        Ok(())
    }

    fn single(&mut self, gfp: Gfp) -> Result<(), Breach> {
        self.count("single");
        let is_stubborn = self.place == 0 && self.round.has_stubborn && self.rng.below(8) == 0;
        let gfp = if is_stubborn { Gfp::KERNEL | Gfp::NOFAIL } else { gfp };
        match self.round.allocator.alloc_page(gfp) {
            Ok(page) => self.hold(page.into(), gfp),
            Err(_) if is_stubborn => {
                self.round.found.say("a request with NOFAIL gave up".into());
                Ok(())
            }
            Err(_) => {
                self.count("exhausted");
                Ok(())
            }
        }
    }

    /// A request's number, how many of it must come, when it ends and what cancels it.
    fn request(&mut self, gfp: Gfp, may_insist: bool) -> (usize, usize, Option<Duration>, Cancel, Gfp) {
        let most = [8, 64, 200, 900][self.rng.below(4)];
        let n = 1 + self.rng.below(most);
        let least = [0, 0, n / 2, n][self.rng.below(4)] * usize::from(may_insist);
        let deadline = [None, Some(0), Some(2), Some(12)][self.rng.below(4)].map(Duration::from_millis);
        let cancel = Cancel::new();
        *lock(&self.round.cancels[self.place]) = cancel.clone();
        (n, least, deadline, cancel, gfp)
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
        self.count("array");
        let (n, least, deadline, cancel, gfp) = self.request(gfp, true);
        let mut slots: Vec<Option<Page>> = (0..n).map(|_| None).collect();
        let bulk = bulk(Bulk::at_least(least, n), deadline, &cancel).gfp(gfp);
        match self.round.allocator.alloc_pages_bulk_array(bulk, &mut slots) {
            Ok(filled) => self.ended(filled.shortfall),
            Err(_) => self.count("exact_refused"),
        }
        slots.into_iter().flatten().try_for_each(|page| self.hold(page.into(), gfp))
    }

    fn list(&mut self, gfp: Gfp) -> Result<(), Breach> {
        self.count("list");
        let (n, least, deadline, cancel, gfp) = self.request(gfp, true);
        let mut list = PageList::new();
        match self
            .round
            .allocator
            .alloc_pages_bulk_list(bulk(Bulk::at_least(least, n), deadline, &cancel).gfp(gfp), &mut list)
        {
            Ok(delivered) => self.ended(delivered.shortfall),
            Err(_) => self.count("exact_refused"),
        }
        std::iter::from_fn(|| list.pop()).try_for_each(|page| self.hold(page.into(), gfp))
    }

    fn callback(&mut self, gfp: Gfp) -> Result<(), Breach> {
        self.count("callback");
        let (n, _, deadline, cancel, gfp) = self.request(gfp, false);
        let mut pages: Vec<Page> = Vec::new();
        let bulk = bulk(Bulk::up_to(n), deadline, &cancel).gfp(gfp);
        if let Ok(delivered) = self.round.allocator.alloc_pages_bulk_callback(bulk, |page| pages.push(page)) {
            self.ended(delivered.shortfall);
        }
        pages.into_iter().try_for_each(|page| self.hold(page.into(), gfp))
    }

    fn runs(&mut self, gfp: Gfp) -> Result<(), Breach> {
        self.count("runs");
        let (n, least, deadline, cancel, gfp) = self.request(gfp, true);
        let mut runs: Vec<Run<Page>> = Vec::new();
        match self
            .round
            .allocator
            .alloc_pages_bulk_runs(bulk(Bulk::at_least(least, n), deadline, &cancel).gfp(gfp), &mut runs)
        {
            Ok(delivered) => self.ended(delivered.shortfall),
            Err(_) => self.count("exact_refused"),
        }
        runs.into_iter().flat_map(Run::into_pages).try_for_each(|page| self.hold(page.into(), gfp))
    }

    fn blocks(&mut self, gfp: Gfp) -> Result<(), Breach> {
        self.count("blocks");
        let (n, _, deadline, cancel, gfp) = self.request(gfp, false);
        let Ok(order) = Order::new(1 + self.rng.below(4) as u8) else { return Ok(()) };
        let mut list = BlockList::new();
        let bulk = bulk(Bulk::up_to(n.div_ceil(16)), deadline, &cancel).gfp(gfp).order(order);
        if let Ok(delivered) = self.round.allocator.alloc_pages_bulk_list(bulk, &mut list) {
            self.ended(delivered.shortfall);
        }
        std::iter::from_fn(|| list.pop()).try_for_each(|block| self.hold(block, gfp))
    }
}

fn bulk<'c, N, T>(bulk: Bulk<'c, N, T>, deadline: Option<Duration>, cancel: &'c Cancel) -> Bulk<'c, N, T> {
    let bulk = bulk.cancel(cancel);
    deadline.map_or(bulk, |after| bulk.timeout(after))
}
