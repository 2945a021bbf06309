//! Every interleaving, by loom, of threads that take a lock, of a fork that takes it, too, and of sections and a fork: no two
//! threads hold the lock, no thread sleeps while the lock is free, and each thread overtakes a fork once at most.
//!
//! Here a thread that is not woken sleeps for ever, and loom reports it.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release -p pagemill-os --test tests loom_locks
//! ```
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use pagemill_core::Lock;
use pagemill_os::{ForkLock, SLEEP, Sections};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// Data that is written under the lock and read in sections: loom fails if two accesses overlap, or one does not see the other.
struct Guarded(UnsafeCell<u32>);

// SAFETY: loom watches each access.
unsafe impl Sync for Guarded {}
// SAFETY: a number.
unsafe impl Send for Guarded {}

impl Guarded {
    fn new() -> Self {
        Self(UnsafeCell::new(0))
    }
    fn change(&self) {
        // SAFETY: loom fails if another thread accesses it.
        self.0.with_mut(|value| unsafe { *value += 1 });
    }
    fn look(&self) -> u32 {
        // SAFETY: loom fails if another thread changes it.
        self.0.with(|value| unsafe { *value })
    }
}

fn explore<M: Send + Sync + 'static>(
    preemptions: usize,
    make: fn() -> M,
    threads: &'static [fn(&M)],
    at_end: impl Fn(&M) + Send + Sync + 'static,
) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(move || {
        let model = Arc::new(make());
        let others: Vec<_> = threads[1..]
            .iter()
            .map(|run| {
                let model = Arc::clone(&model);
                thread::spawn(move || run(&model))
            })
            .collect();
        threads[0](&model);
        others.into_iter().for_each(|thread| thread.join().unwrap());
        at_end(&model);
    });
}

struct Plain {
    lock: Lock,
    guarded: Guarded,
}

impl Plain {
    fn new() -> Self {
        Self { lock: Lock::new(), guarded: Guarded::new() }
    }
    fn change(&self) {
        self.lock.take(SLEEP);
        self.guarded.change();
        self.lock.release(SLEEP);
    }
    /// Does what a signal handler does.
    fn try_to_change(&self) {
        if self.lock.try_take() {
            self.guarded.change();
            self.lock.release(SLEEP);
        }
    }
}

#[test]
fn three_threads_take_a_lock() {
    explore(3, Plain::new, &[Plain::change, Plain::change, Plain::change], |model| {
        assert_eq!(model.guarded.look(), 3);
        assert!(model.lock.try_take());
    });
}

#[test]
fn a_lock_is_taken_again_and_again() {
    let twice = |model: &Plain| {
        model.change();
        model.change();
    };
    explore(3, Plain::new, Vec::leak(vec![twice, Plain::change, Plain::try_to_change]), |model| {
        assert!((3..=4).contains(&model.guarded.look()));
        assert!(model.lock.try_take());
    });
}

/// The registry, its readers' sections, and a fork.
struct Forking {
    registry: ForkLock,
    sections: Sections,
    guarded: Guarded,
    forked: AtomicBool,
}

impl Forking {
    fn new() -> Self {
        Self {
            registry: ForkLock::new(),
            sections: Sections::new(),
            guarded: Guarded::new(),
            forked: AtomicBool::new(false),
        }
    }
    fn fork(&self) {
        self.registry.take_for_fork();
        self.sections.hold_back();
        self.guarded.change();
        self.forked.store(true, SeqCst);
        self.sections.let_in();
        self.registry.release();
    }
    fn section(&self) {
        self.sections.enter();
        self.guarded.look();
        self.sections.leave();
    }
    /// The registry's holder enters a section.
    fn section_in_registry(&self) {
        self.registry.take();
        self.section();
        self.registry.release();
    }
    /// Takes the registry after a fork, if one waits.
    fn behind_a_fork(&self) {
        for _ in 0..2 {
            let is_behind = self.registry.is_awaited_by_fork();
            self.registry.take();
            assert!(!is_behind || self.forked.load(SeqCst), "a thread that arrived later overtook a fork");
            self.registry.release();
        }
    }
    fn at_end(&self) {
        assert!(self.registry.try_take() && self.sections.try_enter());
        assert!(self.guarded.look() > 0);
    }
}

#[test]
fn a_fork_meets_sections_and_a_holder_on_its_way_into_one() {
    explore(3, Forking::new, &[Forking::fork, Forking::section, Forking::section_in_registry], Forking::at_end);
}

#[test]
fn two_forks_meet_a_section() {
    explore(3, Forking::new, &[Forking::fork, Forking::section, Forking::fork], Forking::at_end);
}

#[test]
fn a_fork_is_not_overtaken_by_later_threads() {
    explore(3, Forking::new, &[Forking::fork, Forking::behind_a_fork, Forking::behind_a_fork], Forking::at_end);
}

/// A section that does not wait, such as giving memory back, either begins or is held back.
#[test]
fn try_enter_never_overlaps_a_thread_that_holds_sections_back() {
    fn tried(model: &Forking) {
        if model.sections.try_enter() {
            model.guarded.look();
            model.sections.leave();
        }
    }
    explore(3, Forking::new, &[Forking::fork, tried, tried], Forking::at_end);
}
