//! Every interleaving, by loom, of requests that wait for memory, frees and cancels: a request that can be served is woken, in
//! order of arrival within its line, and whatever other lines do. `pagemill` itself is not built for loom, so this test
//! includes the source file of the queue, and that of shutting lists. The model of the queue in `pagemill`, by shuttle, has
//! more threads; loom explores weakly ordered memory as well.
//!
//! Parking never times out here: if a request were found only because the head of its line looks again after a while, it would
//! hang, and loom would report that.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release -p pagemill-os --test tests loom_waits
//! ```
#[expect(dead_code, unreachable_pub, reason = "it is another crate's, and not all of it is tried here")]
#[path = "../../pagemill/src/wait.rs"]
mod wait;

#[path = "../../pagemill/src/shutting.rs"]
mod shutting;

pub(crate) mod sync {
    use loom::sync::Arc;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, fence};
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};

    /// A thread's token, of which `unpark` leaves one and `park` takes one. Not loom's own: loom 0.7 lets a thread that is
    /// unparked while it waits for a mutex go on without the mutex, and panics.
    #[derive(Clone, Debug, Default)]
    pub(crate) struct Thread(Arc<(Mutex<bool>, Condvar)>);

    loom::thread_local! {
        static HERE: Thread = Thread::default();
    }

    impl Thread {
        pub(crate) fn unpark(&self) {
            *self.0.0.lock().unwrap() = true;
            self.0.1.notify_one();
        }
    }
    pub(crate) fn current() -> Thread {
        HERE.with(Thread::clone)
    }
    pub(crate) fn park() {
        let Thread(its) = current();
        let mut token = its.0.lock().unwrap();
        while !*token {
            token = its.1.wait(token).unwrap();
        }
        *token = false;
    }
    pub(crate) fn park_timeout(_: std::time::Duration) {
        park();
    }
    /// No thread forks here.
    pub(crate) fn no_fork() {}
    pub(crate) use loom::cell::UnsafeCell;
    pub(crate) fn let_others_on(_turn: u32) {
        loom::thread::yield_now();
    }
    pub(crate) struct Stamp;
    impl Stamp {
        pub(crate) fn here() -> Self {
            Self
        }
        pub(crate) fn is_inherited(&self) -> bool {
            false
        }
    }
}

use loom::model::Builder;
use loom::sync::Arc;
use loom::thread;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use sync::{AtomicBool, AtomicUsize};
use wait::{Cancel, Patience, Waits};

/// Memory with no free frame at first, and the requests that wait for it.
#[derive(Default)]
struct Memory {
    free: AtomicUsize,
    /// One line for each number of frames that is lacking.
    waits: Waits<usize>,
    served: AtomicUsize,
}

impl Memory {
    /// Takes one frame, and returns how many requests were served before; `None` if `cancel` came first.
    fn take(&self, cancel: Option<&Cancel>) -> Option<usize> {
        self.take_all(1, cancel)
    }
    fn take_all(&self, n: usize, cancel: Option<&Cancel>) -> Option<usize> {
        self.waits.wait(n, &Patience { deadline: None, cancel }, None, |_| {
            let lower = |free: usize| free.checked_sub(n);
            self.free.fetch_update(AcqRel, Acquire, lower).ok()?;
            Some(self.served.fetch_add(1, Relaxed))
        })
    }
    /// Frees a frame, as a free does while requests wait.
    fn give(&self) {
        self.free.fetch_add(1, AcqRel);
        self.waits.note_freed(&|lack| self.free.load(Relaxed) >= lack);
    }
    /// Waits until `n` requests wait.
    fn await_waiters(&self, n: usize) {
        while self.waits.len() < n {
            thread::yield_now();
        }
    }
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

/// A thread that takes one frame, with `n` requests ahead of it.
fn waiter(memory: &Arc<Memory>, n: usize) -> thread::JoinHandle<Option<usize>> {
    let its = Arc::clone(memory);
    let waiter = thread::spawn(move || its.take(None));
    memory.await_waiters(n + 1);
    waiter
}

#[test]
fn a_waiting_request_is_woken_by_a_free() {
    check(|| {
        let memory = Arc::new(Memory::default());
        let its = Arc::clone(&memory);
        let waiter = thread::spawn(move || its.take(None));
        // Before, while or after the request joins its line.
        memory.give();
        assert_eq!(waiter.join().unwrap(), Some(0));
        assert_eq!(memory.waits.len(), 0);
    });
}

#[test]
fn two_are_served_in_order_of_arrival() {
    check(|| {
        let memory = Arc::new(Memory::default());
        let first = waiter(&memory, 0);
        let second = waiter(&memory, 1);
        memory.give();
        memory.give();
        assert_eq!((first.join().unwrap(), second.join().unwrap()), (Some(0), Some(1)));
    });
}

#[test]
fn two_concurrent_frees_serve_the_waiter_and_lose_nothing() {
    check(|| {
        let memory = Arc::new(Memory::default());
        let first = waiter(&memory, 0);
        let its = Arc::clone(&memory);
        let giver = thread::spawn(move || its.give());
        memory.give();
        assert_eq!(first.join().unwrap(), Some(0));
        giver.join().unwrap();
        // The second frame is there without a wake-up.
        assert_eq!(memory.take(None), Some(1));
    });
}

#[test]
fn a_cancelled_wait_returns() {
    check(|| {
        let memory = Arc::new(Memory::default());
        let cancel = Cancel::new();
        let (its, token) = (Arc::clone(&memory), cancel.clone());
        let waiter = thread::spawn(move || its.take(Some(&token)));
        cancel.cancel();
        assert_eq!(waiter.join().unwrap(), None);
        assert_eq!(memory.waits.len(), 0);
    });
}

#[test]
fn a_head_cancelled_during_a_free_wakes_the_next() {
    check(|| {
        let memory = Arc::new(Memory::default());
        let cancel = Cancel::new();
        let (its, token) = (Arc::clone(&memory), cancel.clone());
        let head = thread::spawn(move || its.take(Some(&token)));
        memory.await_waiters(1);
        let next = waiter(&memory, 1);
        memory.give();
        cancel.cancel();
        if head.join().unwrap().is_some() {
            memory.give();
        }
        assert!(next.join().unwrap().is_some());
        assert_eq!(memory.waits.len(), 0);
    });
}

#[test]
fn two_frees_that_are_enough_together_wake_a_request_for_two() {
    check(|| {
        let memory = Arc::new(Memory::default());
        let its = Arc::clone(&memory);
        let waiter = thread::spawn(move || its.take_all(2, None));
        let its = Arc::clone(&memory);
        let giver = thread::spawn(move || its.give());
        memory.give();
        giver.join().unwrap();
        assert_eq!(waiter.join().unwrap(), Some(0));
    });
}

#[test]
fn a_request_that_is_never_served_does_not_block_another_line() {
    check(|| {
        let memory = Arc::new(Memory::default());
        let cancel = Cancel::new();
        let (its, token) = (Arc::clone(&memory), cancel.clone());
        let never = thread::spawn(move || its.take_all(9, Some(&token)));
        memory.await_waiters(1);
        let its = Arc::clone(&memory);
        let other = thread::spawn(move || its.take(None));
        memory.give();
        assert_eq!(other.join().unwrap(), Some(0));
        cancel.cancel();
        assert_eq!(never.join().unwrap(), None);
    });
}

#[test]
fn a_cancel_forgets_a_request_that_stopped_waiting() {
    check(|| {
        let memory = Arc::new(Memory::default());
        let cancel = Cancel::new();
        let (its, token) = (Arc::clone(&memory), cancel.clone());
        let waiter = thread::spawn(move || its.take(Some(&token)));
        memory.give();
        assert_eq!(waiter.join().unwrap(), Some(0));
        assert_eq!(cancel.waiting(), 0);
    });
}

/// Lists, and the reasons to shut them.
#[derive(Default)]
struct Lists {
    waiting: AtomicUsize,
    is_low: AtomicBool,
    limit: AtomicUsize,
}

impl Lists {
    fn has_reason(&self) -> bool {
        self.is_low.load(Relaxed) || self.waiting.load(Relaxed) != 0
    }
    fn settle(&self) {
        shutting::settle(|| self.has_reason(), |is_open| self.limit.store(usize::from(is_open), Relaxed));
    }
    /// A request that waits, and stops waiting.
    fn wait(&self) {
        self.waiting.fetch_add(1, SeqCst);
        self.settle();
        self.waiting.fetch_sub(1, SeqCst);
        self.settle();
    }
    /// A thread that adds memory.
    fn tell_who_waits(&self) {
        if self.waiting.load(Relaxed) != 0 {
            self.settle();
        }
    }
    fn fall_below_low(&self) {
        if !self.is_low.swap(true, Relaxed) {
            self.settle();
        }
    }
    fn rise_above_high(&self) {
        if self.is_low.load(Relaxed) {
            self.is_low.store(false, Relaxed);
            self.settle();
        }
    }
}

/// Runs both threads at once, and checks the lists afterwards.
fn lists_meet(threads: [fn(&Lists); 2]) {
    check(move || {
        let lists = Arc::new(Lists { limit: AtomicUsize::new(1), ..Lists::default() });
        let its = Arc::clone(&lists);
        let other = thread::spawn(move || threads[0](&its));
        threads[1](&lists);
        other.join().unwrap();
        match lists.has_reason() {
            true => assert_eq!(lists.limit.load(SeqCst), 0, "the lists are open"),
            false => assert_eq!(lists.limit.load(SeqCst), 1, "the lists are shut without a reason"),
        }
    });
}

#[test]
fn lists_are_open_after_two_waits() {
    lists_meet([Lists::wait, Lists::wait]);
}

#[test]
fn lists_are_open_after_memory_is_added_while_a_wait_ends() {
    lists_meet([Lists::tell_who_waits, Lists::wait]);
}

#[test]
fn lists_are_open_or_shut_as_the_zone_is_above_or_below_its_marks() {
    lists_meet([Lists::fall_below_low, Lists::rise_above_high]);
    lists_meet([Lists::fall_below_low, |lists| (lists.rise_above_high(), lists.fall_below_low()).0]);
}

/// A request waits while two others, whose waits have ended, open the lists.
#[test]
fn lists_stay_shut_while_there_is_a_reason() {
    check(|| {
        let lists = Arc::new(Lists::default());
        let openers: Vec<_> = (0..2)
            .map(|_| {
                let lists = Arc::clone(&lists);
                thread::spawn(move || lists.settle())
            })
            .collect();
        lists.waiting.fetch_add(1, SeqCst);
        lists.settle();
        openers.into_iter().for_each(|opener| opener.join().unwrap());
        assert_eq!(lists.limit.load(SeqCst), 0, "the lists are open");
    });
}
