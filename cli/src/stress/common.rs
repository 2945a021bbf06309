//! What every round has: an allocator, the ledger of its frames, counts, and the first fault that was found.
use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use pagemill::{Allocator, Stats};
use pagemill_model::{Breach, Ledger};

use super::Plan;
use super::report::Tally;
use crate::failure::Failure;

/// Counts by name. The names are part of the program's interface.
pub(super) type Counts = BTreeMap<&'static str, u64>;

/// Adds counts to others.
pub(super) fn add(sum: &mut Counts, more: &Counts) {
    more.iter().for_each(|(name, n)| *sum.entry(name).or_default() += n);
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A kind of round: the ordinary one, or the tight one.
pub(super) trait Kind: Sized + Send + Sync + 'static {
    /// The counts that a long enough run must have.
    fn must(plan: &Plan) -> &'static [&'static str];
    /// Makes round `number` of a run, with an allocator of its own.
    fn begin(plan: &Plan, number: usize, seed: u64) -> Result<Arc<Self>, Failure>;
    fn common(&self) -> &Common;
    /// Runs until `end`, gives everything back and checks every frame.
    fn run(self: &Arc<Self>, end: Instant) -> Result<Tally, String>;

    /// Starts a thread that works for the round. An error of its body ends the round.
    fn spawn(
        self: &Arc<Self>,
        name: &str,
        body: impl FnOnce(&Self) -> Result<(), String> + Send + 'static,
    ) -> Result<JoinHandle<()>, String> {
        let round = Arc::clone(self);
        let work = move || body(&round).unwrap_or_else(|what| round.common().fail_with(what));
        Builder::new().name(name.into()).spawn(work).map_err(|error| format!("no thread could be started: {error}"))
    }
}

/// Threads that have not ended this long after the round hang. A busy machine may delay them for minutes.
const HANG: Duration = Duration::from_secs(600);

/// The states of `Common::state`.
const NOTHING: u32 = 0;
const WRITING: u32 = 1;
const FOUND: u32 = 2;

/// See the [module](self).
pub(super) struct Common {
    pub(super) allocator: Allocator,
    pub(super) ledger: Arc<Ledger>,
    pub(super) seed: u64,
    counts: Mutex<Counts>,
    is_over: AtomicBool,
    /// Whether `breach` has been written.
    state: AtomicU32,
    /// The first breach that a thread, a signal handler or the allocator's hook found.
    breach: UnsafeCell<Option<Breach>>,
    /// The first message of a thread.
    said: Mutex<Option<String>>,
}

// SAFETY: `breach` is written once, by the thread that moved `state` from NOTHING to WRITING, and read only after FOUND.
unsafe impl Sync for Common {}

impl Common {
    pub(super) fn new(allocator: Allocator, seed: u64) -> Self {
        Self {
            ledger: Arc::new(Ledger::new(&allocator)),
            allocator,
            seed,
            counts: Mutex::default(),
            is_over: AtomicBool::new(false),
            state: AtomicU32::new(NOTHING),
            breach: UnsafeCell::new(None),
            said: Mutex::default(),
        }
    }

    pub(super) fn is_over(&self) -> bool {
        // Acquire pairs with the Release in `end`.
        self.is_over.load(Acquire)
    }

    pub(super) fn end(&self) {
        self.is_over.store(true, Release);
    }

    /// Ends the round with a breach. Takes no lock, so that signal handlers may call it.
    pub(super) fn fail(&self, breach: Breach) {
        if self.state.compare_exchange(NOTHING, WRITING, Relaxed, Relaxed).is_ok() {
            // SAFETY: only one thread gets here, and no thread reads before FOUND.
            unsafe { *self.breach.get() = Some(breach) };
            // Release pairs with the Acquire in `verdict`.
            self.state.store(FOUND, Release);
        }
        self.end();
    }

    /// Ends the round with a message. Takes a lock, so signal handlers must not call it.
    pub(super) fn fail_with(&self, what: String) {
        lock(&self.said).get_or_insert(what);
        self.end();
    }

    /// The first fault that was found, if any, as an error.
    pub(super) fn verdict(&self) -> Result<(), String> {
        // Acquire pairs with the Release in `fail`.
        if self.state.load(Acquire) == FOUND {
            // SAFETY: it was written before FOUND, and is never written again.
            return unsafe { *self.breach.get() }.map_or(Ok(()), |breach| Err(breach.to_string()));
        }
        lock(&self.said).clone().map_or(Ok(()), Err)
    }

    /// What the allocator itself found, unless `what` says so: when a frame has two owners, other checks may see the consequences
    /// first.
    pub(super) fn beside(&self, what: &str) -> String {
        let stats = self.allocator.stats();
        match stats.quarantined + stats.misused {
            found if found > 0 && !what.contains("owned twice") => format!(", and {found} times a frame owned twice"),
            _ => String::new(),
        }
    }

    pub(super) fn count(&self, name: &'static str) {
        *lock(&self.counts).entry(name).or_default() += 1;
    }

    /// Adds what one thread has counted.
    pub(super) fn add(&self, counts: &Counts) {
        add(&mut lock(&self.counts), counts);
    }

    /// What was counted in this round, without what the allocator counts.
    pub(super) fn counts(&self) -> Counts {
        lock(&self.counts).clone()
    }

    /// Waits for the round's threads. A thread that panicked has found a fault.
    pub(super) fn join(&self, threads: Vec<JoinHandle<()>>) -> Result<(), String> {
        let limit = Instant::now() + HANG;
        for thread in threads {
            while !thread.is_finished() {
                if Instant::now() > limit {
                    let why = self.verdict().err().unwrap_or_else(|| "nothing else was found".into());
                    return Err(format!("a thread hangs since {} s; {why}", HANG.as_secs()));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            if thread.join().is_err() {
                self.fail_with("a thread panicked".into());
            }
        }
        Ok(())
    }

    /// Checks that every frame is free, that every page came back, and that no request was refused or still waits.
    pub(super) fn account(&self) -> Result<Stats, String> {
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
        match stats.waiting {
            0 => Ok(stats),
            waiting => Err(format!("{waiting} requests still wait")),
        }
    }
}
