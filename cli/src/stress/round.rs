//! One round: an allocator, everything that works with it, and the account at the end.
use std::collections::BTreeMap;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use pagemill::Allocator;
use pagemill_model::{Breach, Holding, Ledger, Rng, World};

use super::disturb;
use super::found::Found;
use super::report::Tally;
use super::signals::{self, KEPT, Target};
use super::{threads, worker};

/// Between two forks.
const FORK_EVERY: Duration = Duration::from_millis(250);
/// Numbers of owners below the forked child's and the handlers'.
const OWNERS: u32 = 4000;

/// What is counted while a round runs.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) signals: AtomicU64,
    pub(super) handler_pages: AtomicU64,
    pub(super) drains: AtomicU64,
    pub(super) forks: AtomicU64,
    pub(super) exits: AtomicU64,
    ops: Mutex<BTreeMap<&'static str, u64>>,
}

impl Counts {
    /// Adds what one worker did.
    pub(super) fn add(&self, ops: &BTreeMap<&'static str, u64>) {
        let mut all = self.ops.lock().unwrap_or_else(PoisonError::into_inner);
        ops.iter().for_each(|(name, n)| *all.entry(name).or_default() += n);
    }
}

/// See the [module](self).
pub(super) struct Round {
    pub(super) allocator: Allocator,
    pub(super) ledger: Arc<Ledger>,
    pub(super) seed: u64,
    pub(super) counts: Counts,
    /// What exited workers held.
    pool: Mutex<Vec<Holding>>,
    /// What signal handlers hold: addresses.
    pub(super) kept: [AtomicUsize; KEPT],
    /// The workers' thread numbers, 0 where there is none just now.
    pub(super) tids: Vec<AtomicI32>,
    is_over: AtomicBool,
    found: Found,
}

type Threads = Vec<JoinHandle<()>>;

impl Round {
    pub(super) fn new(allocator: Allocator, seed: u64, threads: u32) -> Arc<Self> {
        let ledger = Arc::new(Ledger::new(&allocator));
        Arc::new(Self {
            allocator,
            ledger,
            seed,
            counts: Counts::default(),
            pool: Mutex::new(Vec::new()),
            kept: [const { AtomicUsize::new(0) }; KEPT],
            tids: (0..threads).map(|_| AtomicI32::new(0)).collect(),
            is_over: AtomicBool::new(false),
            found: Found::new(),
        })
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Acquire)
    }
    /// Ends the round with a breach. Also in a signal handler.
    pub(super) fn fail(&self, breach: Breach) {
        self.found.note(breach);
        self.is_over.store(true, Release);
    }
    /// Ends the round with what somebody says. Not in a signal handler.
    pub(super) fn fail_with(&self, what: String) {
        self.found.say(what);
        self.is_over.store(true, Release);
    }

    /// Does something with what exited workers held.
    pub(super) fn with_pool(&self, work: impl FnOnce(&mut Vec<Holding>)) {
        work(&mut self.pool.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Runs until `end`, gives everything back and looks at every frame.
    pub(super) fn run(self: &Arc<Self>, end: Instant) -> Result<Tally, String> {
        let migrations = worker::MIGRATIONS.load(Relaxed);
        let target = Target::new(self);
        let result = self.work(end);
        drop(target);
        result?;
        self.give_everything_back()?;
        let mut tally = self.account()?;
        tally.migrations = worker::MIGRATIONS.load(Relaxed) - migrations;
        Ok(tally)
    }

    /// What the allocator itself found, if `what` does not say so: where a frame has two owners, whatever they do with
    /// it comes out wrong, and that may be seen first.
    pub(super) fn beside(&self, what: &str) -> String {
        let stats = self.allocator.stats();
        match stats.quarantined + stats.misused {
            found if found > 0 && !what.contains("owned twice") => format!(", and {found} times a frame owned twice"),
            _ => String::new(),
        }
    }

    fn work(self: &Arc<Self>, end: Instant) -> Result<(), String> {
        let mut rng = Rng::new(self.seed);
        let helpers = vec![self.spawn("signals", signals::send)?, self.spawn("drains", disturb::drain)?];
        let mut workers = Threads::new();
        let (mut who, mut next_fork) = (0, Instant::now() + FORK_EVERY / 2);
        while !self.is_over() && Instant::now() < end {
            // Whoever has exited is replaced; at first, nobody is there.
            for place in 0..self.tids.len() {
                if workers.get(place).is_some_and(|worker| !worker.is_finished()) {
                    continue;
                }
                who = who % OWNERS + 1;
                let (number, seed) = (who, rng.next());
                let worker = self.spawn("worker", move |round| worker::live(round, place, number, seed))?;
                if place == workers.len() {
                    workers.push(worker);
                } else if std::mem::replace(&mut workers[place], worker).join().is_err() {
                    self.fail_with("a thread panicked".into());
                }
            }
            if Instant::now() >= next_fork {
                disturb::fork(self, &mut rng).unwrap_or_else(|failure| self.fail_with(failure));
                next_fork = Instant::now() + FORK_EVERY;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.is_over.store(true, Release);
        threads::end(helpers, &self.found)?;
        threads::end(workers, &self.found)?;
        self.found.first().map_or(Ok(()), Err)
    }

    fn spawn(
        self: &Arc<Self>,
        name: &str,
        body: impl FnOnce(&Self) + Send + 'static,
    ) -> Result<JoinHandle<()>, String> {
        let round = Arc::clone(self);
        let thread = Builder::new().name(name.into()).spawn(move || body(&round));
        thread.map_err(|error| format!("no thread could be started: {error}"))
    }

    /// What exited workers and handlers held.
    fn give_everything_back(&self) -> Result<(), String> {
        signals::release_all(self).map_err(|breach| breach.to_string())?;
        let mut world = World::shared(self.allocator.clone(), Arc::clone(&self.ledger), 1, usize::MAX, |_| {});
        self.with_pool(|pool| world.take_over(std::mem::take(pool)));
        world.finish().map_err(|failure| failure.to_string())
    }

    /// Every frame is somewhere, once; what was handed out came back; nothing was refused.
    fn account(&self) -> Result<Tally, String> {
        if let Some(frame) = self.ledger.owners().position(|owner| owner != 0) {
            let tag = self.ledger.owner_of(self.ledger.addr_of(frame));
            return Err(format!("frame {frame} lost: {tag:#x} has it, and nobody gave it back"));
        }
        let lost = |misfit| format!("a frame is lost or owned twice: {misfit}");
        let census = self.allocator.validate().map_err(lost)?;
        let stats = self.allocator.stats();
        if census.quarantined != 0 || stats.quarantined != 0 || stats.misused != 0 {
            let (aside, refused) = (stats.quarantined, stats.misused);
            return Err(format!("frames owned twice: {aside} are in quarantine, {refused} were refused"));
        }
        if census.handed_out != 0 || stats.allocated != stats.freed {
            let (out, freed) = (stats.allocated, stats.freed);
            return Err(format!("{} frames lost: {out} pages were handed out, {freed} came back", census.handed_out));
        }
        let counts = &self.counts;
        Ok(Tally {
            rounds: 1,
            ops: counts.ops.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            pages: stats.allocated,
            signals: counts.signals.load(Relaxed),
            handler_pages: counts.handler_pages.load(Relaxed),
            drains: counts.drains.load(Relaxed),
            forks: counts.forks.load(Relaxed),
            exits: counts.exits.load(Relaxed),
            faults: stats.faults,
            ..Tally::default()
        })
    }
}
