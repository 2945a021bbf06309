//! The ordinary round: workers, signals, drains and forks.
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pagemill::{Allocator, Backend, Builder};
use pagemill_model::{Holding, Rng, World};

use super::common::{Common, Counts, Kind, add, lock};
use super::report::Tally;
use super::signals::{self, KEPT, Target};
use super::{Plan, disturb, worker};
use crate::failure::Failure;

/// Arenas, in pages: always exhausted; room for a block of 1 GiB and more; between. None ends with a pageblock.
const SIZES: [usize; 3] = [3_001, 600_077, 20_011];
/// The time between two forks.
const FORK_EVERY: Duration = Duration::from_millis(250);
/// Workers' numbers as owners go up to this. The forked child's and the handlers' are higher.
const OWNERS: u32 = 4000;

/// See the [module](self).
pub(super) struct Round {
    pub(super) common: Common,
    ops: Mutex<Counts>,
    pub(super) signals: AtomicU64,
    pub(super) handler_pages: AtomicU64,
    /// Holdings of workers that have exited.
    pool: Mutex<Vec<Holding>>,
    /// Addresses of the pages that signal handlers keep.
    pub(super) kept: [AtomicUsize; KEPT],
    /// The workers' thread numbers; 0 where there is no worker at the moment.
    pub(super) tids: Vec<AtomicI32>,
}

impl Kind for Round {
    fn must(plan: &Plan) -> &'static [&'static str] {
        if plan.backend == Some(Backend::Rseq) { &["restarts"] } else { &[] }
    }

    fn begin(plan: &Plan, number: usize, seed: u64) -> Result<Arc<Self>, Failure> {
        // Without huge pages: with them, stamping the ends of a block would commit 2 MiB at each.
        let builder = Allocator::builder().pages(plan.pages(number, SIZES)).huge_pages(false);
        let allocator = plan.build(plan.faults()?.into_iter().fold(builder, Builder::faults))?;
        Ok(Arc::new(Self {
            common: Common::new(allocator, seed),
            ops: Mutex::default(),
            signals: AtomicU64::new(0),
            handler_pages: AtomicU64::new(0),
            pool: Mutex::default(),
            kept: [const { AtomicUsize::new(0) }; KEPT],
            tids: (0..plan.threads).map(|_| AtomicI32::new(0)).collect(),
        }))
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn run(self: &Arc<Self>, end: Instant) -> Result<Tally, String> {
        let (migrations, restarts) = (worker::MIGRATIONS.load(Relaxed), pagemill::restarts());
        let target = Target::new(self);
        let result = self.work(end);
        drop(target);
        result?;
        self.give_everything_back()?;
        let stats = self.common.account()?;
        let mut counts = self.common.counts();
        counts.extend([
            ("pages", stats.allocated),
            ("signals", self.signals.load(Relaxed)),
            ("handler_pages", self.handler_pages.load(Relaxed)),
            ("migrations", worker::MIGRATIONS.load(Relaxed) - migrations),
            ("faults", stats.faults),
            ("restarts", pagemill::restarts() - restarts),
        ]);
        Ok(Tally { ops: lock(&self.ops).clone(), counts })
    }
}

impl Round {
    /// Adds the operations of one worker.
    pub(super) fn add_ops(&self, ops: &Counts) {
        add(&mut lock(&self.ops), ops);
    }

    /// Calls `work` with the holdings of workers that have exited.
    pub(super) fn with_pool(&self, work: impl FnOnce(&mut Vec<Holding>)) {
        work(&mut lock(&self.pool));
    }

    fn work(self: &Arc<Self>, end: Instant) -> Result<(), String> {
        let mut rng = Rng::new(self.common.seed);
        let helpers = vec![self.spawn("signals", signals::send)?, self.spawn("drains", disturb::drain)?];
        let mut workers: Vec<JoinHandle<()>> = Vec::new();
        let (mut who, mut next_fork) = (0, Instant::now() + FORK_EVERY / 2);
        while !self.common.is_over() && Instant::now() < end {
            // Start the workers, and replace those that have exited.
            for place in 0..self.tids.len() {
                if workers.get(place).is_some_and(|worker| !worker.is_finished()) {
                    continue;
                }
                who = who % OWNERS + 1;
                let (number, seed) = (who, rng.next());
                let worker = self.spawn("worker", move |round| worker::live(round, place, number, seed))?;
                if place == workers.len() {
                    workers.push(worker);
                } else {
                    self.common.join(vec![std::mem::replace(&mut workers[place], worker)])?;
                }
            }
            if Instant::now() >= next_fork {
                disturb::fork(self, &mut rng).unwrap_or_else(|failure| self.common.fail_with(failure));
                next_fork = Instant::now() + FORK_EVERY;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.common.end();
        self.common.join(helpers)?;
        self.common.join(workers)?;
        self.common.verdict()
    }

    /// Frees what exited workers and handlers hold.
    fn give_everything_back(&self) -> Result<(), String> {
        signals::release_all(self).map_err(|breach| breach.to_string())?;
        let Common { allocator, ledger, .. } = &self.common;
        let mut world = World::shared(allocator.clone(), Arc::clone(ledger), 1, usize::MAX, |_| {});
        self.with_pool(|pool| world.take_over(std::mem::take(pool)));
        world.finish().map_err(|failure| failure.to_string())
    }
}
