//! Waiting for memory without a thread: the request of a task returns to its executor between attempts (C3.18).
//!
//! A task takes a seat in the same lines as threads (`wait.rs`), through [`InLine`], which the futures of an allocator
//! and of a pool poll. A poll makes at most one attempt. It calls no shrinker, and waits for nothing but short locks.
//!
//! # Who calls wakers
//! A free may run in a signal handler (C2.5), where no waker may be called, and no code can tell such a free from
//! another one. So a free only marks the task as due: it pushes the task's [`Waiter`] on a stack without a lock, and
//! unparks the one thread of the process that calls wakers. The first request that has to wait in a future starts that
//! thread, and so does the first one in the child of a fork. If the system refuses a thread, the future asks its
//! executor to be polled again at once.
//!
//! The thread knows each task that was due: a task is due when it becomes the head of its line. Every [`LOOK_AGAIN`] the
//! thread wakes all tasks that it knows, as the head that is a thread looks again. A task that was not polled for
//! [`LATE`] such intervals in a row, although it was woken, is late. When a head becomes late, all tasks behind it are
//! due, so that those that nobody polls become late together. The thread forgets a task that is late, and one whose poll
//! finds it behind others.
//!
//! # Invariants
//! - T1 A waiter that is due is on the stack, or its notifier is about to push it, or the thread has taken it from there and
//!   has not yet looked for its waker.
//! - T2 A poll stores the waker before it looks whether the task is a head. So the thread finds the waker, or the poll
//!   finds what the task was woken for.
//! - T3 A poll notes that it was made before it looks whether the task is late, and the thread makes a task late before it
//!   looks for such a note. So a task that is polled does not stay late.
//! - T4 A head that is not late is due, or the thread knows it. So the head of each line becomes late unless it is polled.
//!
//! # Forks
//! The child inherits the stack, and cancel tokens with waiters of its parent. Their wakers may need locks that other
//! threads of the parent held. So the thread forgets inherited waiters: it neither calls nor drops their wakers.
//!
//! # Locks
//! The lock of the waker is the only one. It is held for one move, in a section that no fork interrupts. Wakers are
//! called, cloned and dropped without any lock held.
use crate::process::AtomicStamp;
use crate::sync::{
    AtomicBool, AtomicPtr, Mutex, Stamp, Thread as Sleeper, current, fence, no_fork, park, park_timeout, survive,
};
use crate::wait::{Cancel, Kind, LOOK_AGAIN, Look, Place, Task, Waits, Who};
use core::mem::{self, ManuallyDrop};
use core::ptr;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use core::task::{Context, Poll, Waker};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Instant;

/// A task is late after so many intervals without a poll, [`LOOK_AGAIN`] each: a second.
const LATE: u32 = 100;

/// A task that waits, as frees and the waking thread see it.
#[derive(Debug)]
struct Waiter {
    /// Empty while the task is to be polled: it was woken since its last poll.
    waker: Mutex<Option<Waker>>,
    is_due: AtomicBool,
    /// The waiter below this one on the stack of those that are due.
    next: AtomicPtr<Self>,
    /// Whether the waking thread knows it.
    is_known: AtomicBool,
    /// Whether it was polled since the thread last looked.
    is_polled: AtomicBool,
    /// Whether a poll found it behind others after it was last due.
    is_behind: AtomicBool,
    is_late: AtomicBool,
    lines: Weak<dyn Look>,
    /// A forked child calls no waker of its parent's.
    stamp: Stamp,
}

impl Waiter {
    fn new(lines: Weak<dyn Look>) -> Arc<Self> {
        let no = || AtomicBool::new(false);
        let (waker, next) = (Mutex::new(None), AtomicPtr::new(ptr::null_mut()));
        let (is_due, is_known, is_polled, is_behind, is_late) = (no(), no(), no(), no(), no());
        Arc::new(Self { waker, is_due, next, is_known, is_polled, is_behind, is_late, lines, stamp: Stamp::here() })
    }

    /// Stores the waker of a poll. Returns whether the task was late until now.
    fn note_poll(&self, waker: Waker) -> bool {
        drop(self.replace(Some(waker)));
        // SeqCst, both: T3.
        self.is_polled.store(true, SeqCst);
        self.is_late.swap(false, SeqCst)
    }

    /// A poll found the task behind others, unless `is_head` says now that it leads.
    fn note_behind(self: &Arc<Self>, is_head: impl FnOnce() -> bool) {
        // AcqRel: if this comes after the thread's store in `wake_due`, `is_head` sees what the task was due for.
        self.is_behind.swap(true, AcqRel);
        if is_head() {
            self.is_behind.store(false, Relaxed);
            Arc::clone(self).notify(); // The thread may have forgotten it (T4).
        }
    }

    /// Changes the waker. Returns the one before.
    fn replace(&self, waker: Option<Waker>) -> Option<Waker> {
        let _held = no_fork();
        mem::replace(&mut self.waker.lock().unwrap_or_else(PoisonError::into_inner), waker)
    }

    /// Calls the waker, if the task was polled since the last call. Returns whether it was.
    fn wake(&self) -> bool {
        let waker = self.replace(None);
        let is_there = waker.is_some();
        survive(|| waker.map(Waker::wake));
        is_there
    }
}

impl Task for Waiter {
    fn notify(self: Arc<Self>) {
        // AcqRel, here and in `wake_due`: what came before this call happened before that wake-up, also if this call
        // finds the task due.
        if self.is_due.swap(true, AcqRel) {
            return;
        }
        // The stack owns it from here on.
        let this = ManuallyDrop::new(self);
        let entry = Arc::as_ptr(&this).cast_mut();
        let mut top = WAKING.due.load(Relaxed);
        loop {
            this.next.store(top, Relaxed);
            // Release pairs with the Acquire in `wake_due`.
            match WAKING.due.compare_exchange_weak(top, entry, Release, Relaxed) {
                Ok(_) => break,
                Err(now) => top = now,
            }
        }
        // SeqCst pairs with the fence in `run`: either this finds the thread, or the thread finds the task.
        fence(SeqCst);
        // SAFETY: null, or from a box that is never freed. Acquire pairs with the Release in `run`.
        if let Some(thread) = unsafe { WAKING.thread.load(Acquire).as_ref() } {
            thread.unpark();
        }
    }

    fn is_late(&self) -> bool {
        self.is_late.load(Relaxed)
    }
}

/// The thread that calls wakers, and its work.
struct Waking {
    /// The waiters that are due, linked by `next`. Each is an [`Arc`] that the stack owns.
    due: AtomicPtr<Waiter>,
    /// Null until the thread runs. A forked child sets its own.
    thread: AtomicPtr<Sleeper>,
}

#[cfg(not(shuttle))]
static WAKING: Waking = Waking::new();
#[cfg(shuttle)]
shuttle::lazy_static! { static ref WAKING: Waking = Waking::new(); }

/// A waiter that the thread knows.
struct Known {
    waiter: Weak<Waiter>,
    /// How many times in a row it could not be woken and had not been polled.
    unanswered: u32,
}

impl Waking {
    const fn new() -> Self {
        Self { due: AtomicPtr::new(ptr::null_mut()), thread: AtomicPtr::new(ptr::null_mut()) }
    }

    /// The thread's work.
    fn run(&self, is_over: impl Fn() -> bool) {
        // Release pairs with the Acquire in `notify`.
        self.thread.store(Box::into_raw(Box::new(current())), Release);
        // SeqCst pairs with the fence in `notify`.
        fence(SeqCst);
        let (mut known, mut looked) = (Vec::new(), Instant::now());
        while !is_over() {
            self.wake_due(&mut known);
            let since = looked.elapsed();
            if known.is_empty() {
                park();
                looked = Instant::now();
            } else if since < LOOK_AGAIN || cfg!(shuttle) {
                park_timeout(LOOK_AGAIN.saturating_sub(since));
            } else {
                Self::look_again(&mut known);
                looked = Instant::now();
            }
        }
    }

    fn wake_due(&self, known: &mut Vec<Known>) {
        // Acquire pairs with the Release in `notify`.
        let mut next = self.due.swap(ptr::null_mut(), Acquire);
        while !next.is_null() {
            // SAFETY: `notify` pushed it and left its `Arc` to the stack, which the swap emptied: it is taken once.
            let waiter = unsafe { Arc::from_raw(next) };
            // Before the task may be due again, which sets another one.
            next = waiter.next.load(Relaxed);
            if waiter.stamp.is_inherited() {
                mem::forget(waiter); // To drop its waker is to call the program's code, too.
                continue;
            }
            waiter.is_due.swap(false, AcqRel);
            // Release pairs with the AcqRel in `note_behind`.
            waiter.is_behind.store(false, Release);
            waiter.wake();
            // A late one is due again once it is polled (T4).
            if !waiter.is_late() && !waiter.is_known.swap(true, Relaxed) {
                known.push(Known { waiter: Arc::downgrade(&waiter), unanswered: 0 });
            }
        }
    }

    /// Wakes every task that it knows and that still waits.
    fn look_again(known: &mut Vec<Known>) {
        let here = Stamp::here();
        let mut late: Vec<Weak<dyn Look>> = Vec::new();
        known.retain_mut(|known| {
            let Some(waiter) = known.waiter.upgrade() else { return false };
            if waiter.stamp.is_inherited() {
                mem::forget(waiter); // A waker forked, and this is the child: see `wake_due`.
                return false;
            }
            // A task that is polled all the time may have been woken just now, by a free: no waker is there then.
            let was_polled = waiter.is_polled.swap(false, SeqCst);
            let is_forgotten = was_polled && waiter.is_behind.load(Relaxed);
            if !is_forgotten {
                known.unanswered = if waiter.wake() | was_polled { 0 } else { known.unanswered + 1 };
                if known.unanswered < LATE {
                    return true;
                }
                // SeqCst, both: T3.
                waiter.is_late.store(true, SeqCst);
                if waiter.is_polled.load(SeqCst) {
                    waiter.is_late.store(false, SeqCst);
                    known.unanswered = 0;
                }
                // In both cases: a thread that released the lines meanwhile may have seen the task late.
                if !late.iter().any(|lines| lines.ptr_eq(&waiter.lines)) {
                    late.push(waiter.lines.clone());
                }
                if known.unanswered == 0 {
                    return true;
                }
            }
            waiter.is_known.store(false, Relaxed);
            false
        });
        // In the child of a waker that forked, the lines are the parent's, and another thread may have had them.
        if !here.is_inherited() {
            late.iter().filter_map(Weak::upgrade).for_each(|lines| lines.look_for_late());
        }
    }
}

/// Starts the thread that calls wakers, if this process has none. Returns whether it has one.
fn start() -> bool {
    static STARTED: AtomicStamp = AtomicStamp::never();
    static STARTING: std::sync::Mutex<()> = std::sync::Mutex::new(());
    // A model runs the thread's work itself.
    if cfg!(shuttle) || !STARTED.is_inherited() {
        return true;
    }
    let _no_fork = no_fork();
    let _starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    if STARTED.is_inherited() && pagemill_os::Thread::spawn(c"pagemill-wakers", || WAKING.run(|| false)).is_ok() {
        STARTED.renew();
    }
    !STARTED.is_inherited()
}

/// The wait of a task. Dropping it leaves the line.
pub(crate) struct InLine<'w, K: Kind> {
    waits: &'w Waits<K>,
    kind: K,
    cancel: Option<&'w Cancel>,
    /// From the first poll on.
    place: Option<(Place<'w, K>, Arc<Waiter>)>,
}

impl<'w, K: Kind> InLine<'w, K> {
    pub(crate) fn new(waits: &'w Waits<K>, kind: K, cancel: Option<&'w Cancel>) -> Self {
        Self { waits, kind, cancel, place: None }
    }

    /// Makes an attempt if the task is a head. Ready with what the attempt brings, or with `None` once the request is
    /// cancelled. `attempt` is told whether the request was overtaken often.
    pub(crate) fn poll<T>(
        &mut self,
        context: &Context<'_>,
        attempt: impl FnOnce(bool) -> Option<T>,
    ) -> Poll<Option<T>> {
        if self.place.as_ref().is_some_and(|(place, _)| place.is_inherited()) {
            self.leave(); // In a forked child it lines up again.
        }
        if self.place.is_none() && self.cancel.is_some_and(Cancel::is_cancelled) {
            return Poll::Ready(None);
        }
        // Before it takes a place: somebody must take it from the stack, also if it is served at once.
        let is_woken = start();
        let (place, waiter) = self.place.get_or_insert_with(|| {
            let waiter = Waiter::new(self.waits.to_look());
            (self.waits.enter(self.kind, Who::Task(waiter.clone()), self.cancel), waiter)
        });
        if waiter.note_poll(context.waker().clone()) {
            place.look(); // It leads its line again, and requests behind it do not.
            Arc::clone(waiter).notify(); // T4
        }
        if self.cancel.is_some_and(Cancel::is_cancelled) {
            self.leave();
            return Poll::Ready(None);
        }
        if !place.is_head() {
            waiter.note_behind(|| place.is_head());
        } else if let Some(got) = place.attempt(attempt) {
            self.leave();
            return Poll::Ready(Some(got));
        }
        if !is_woken {
            context.waker().wake_by_ref();
        }
        Poll::Pending
    }

    fn leave(&mut self) {
        if let Some((place, waiter)) = self.place.take() {
            drop(place);
            let waker = waiter.replace(None);
            if waiter.stamp.is_inherited() {
                mem::forget(waker); // See `wake_due`.
            }
        }
    }
}

impl<K: Kind> Drop for InLine<'_, K> {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use crate::sync::AtomicUsize;

    /// Counts how often a task became late and had the lines looked at.
    #[derive(Default)]
    struct Looks(AtomicUsize);

    impl Look for Looks {
        fn look(&self) {
            self.0.fetch_add(1, SeqCst);
        }
        fn look_for_late(&self) {
            self.look();
        }
    }

    /// A free may wake a polled task just before the thread looks: then the thread finds no waker.
    #[test]
    fn a_task_is_late_only_if_it_is_not_polled() {
        let looks = Arc::new(Looks::default());
        let lines: Weak<Looks> = Arc::downgrade(&looks);
        let waiter = Waiter::new(lines);
        let mut known = vec![Known { waiter: Arc::downgrade(&waiter), unanswered: 0 }];
        for _ in 0..2 * LATE {
            assert!(!waiter.note_poll(Waker::noop().clone()));
            waiter.wake();
            Waking::look_again(&mut known);
        }
        assert_eq!((waiter.is_late(), looks.0.load(SeqCst)), (false, 0));
        for _ in 0..2 * LATE {
            Waking::look_again(&mut known);
        }
        assert_eq!((waiter.is_late(), looks.0.load(SeqCst)), (true, 1));
        assert!(waiter.note_poll(Waker::noop().clone()), "the poll of a late task looks at the lines");
        assert!(!waiter.is_late());
        drop(waiter);
        Waking::look_again(&mut known);
        assert!(known.is_empty());
    }

    /// Each of them is before the request that is polled. If each became late only once it led, it would wait for as many seconds.
    #[test]
    fn tasks_that_are_not_polled_become_late_together() {
        let waits = Waits::<usize>::default();
        let tasks = [(); 8].map(|()| Waiter::new(waits.to_look()));
        let _places = tasks.each_ref().map(|task| waits.enter(1, Who::Task(task.clone()), None));
        for task in &tasks {
            assert!(!task.note_poll(Waker::noop().clone()));
        }
        let mut known = Vec::new();
        let rounds = (1..).find(|_| {
            WAKING.wake_due(&mut known);
            (0..=LATE).for_each(|_| Waking::look_again(&mut known));
            tasks.iter().all(|task| task.is_late())
        });
        assert_eq!(rounds, Some(2), "the head becomes late, then all others");
        assert!(known.is_empty(), "nothing is left to look at until one is polled");
    }

    #[test]
    fn a_request_that_is_cancelled_already_leaves_nothing_behind() {
        let waits = Waits::<usize>::default();
        let cancel = Cancel::new();
        cancel.cancel();
        let context = Context::from_waker(Waker::noop());
        let mut cancelled = InLine::new(&waits, 1, Some(&cancel));
        assert_eq!(cancelled.poll(&context, |_| Some(())), Poll::Ready(None));
        assert!(WAKING.due.load(SeqCst).is_null(), "it was due although it had been cancelled");
    }

    /// The thread that calls wakers must not end.
    #[test]
    fn a_waker_may_panic_with_what_panics_when_it_is_dropped() {
        struct Panics;
        impl Drop for Panics {
            fn drop(&mut self) {
                panic!("a payload that panics on purpose");
            }
        }
        impl std::task::Wake for Panics {
            fn wake(self: Arc<Self>) {
                // Kept, since its drop panics too.
                static KEPT: std::sync::OnceLock<Arc<Panics>> = std::sync::OnceLock::new();
                assert!(KEPT.set(self).is_ok());
                std::panic::resume_unwind(Box::new(Panics));
            }
        }
        let no_lines: Weak<Looks> = Weak::new();
        let waiter = Waiter::new(no_lines);
        waiter.note_poll(Arc::new(Panics).into());
        assert!(waiter.wake());
    }

    #[test]
    fn what_a_panic_brings_may_panic_with_the_like_for_ever() {
        static DROPS: AtomicUsize = AtomicUsize::new(0);
        struct Endless;
        impl Drop for Endless {
            fn drop(&mut self) {
                assert!(DROPS.fetch_add(1, SeqCst) < 1000, "it is dropped for ever");
                std::panic::resume_unwind(Box::new(Endless));
            }
        }
        assert_eq!(survive(|| std::panic::resume_unwind(Box::new(Endless))), None::<()>);
        assert_eq!(DROPS.load(SeqCst), 1);
    }
}

/// Tests tasks in lines under a model checker, together with the thread that wakes them, threads that wait, and frees: run
/// them with `--cfg shuttle`. No wait times out there, so a lost wake-up is a deadlock that shuttle reports.
#[cfg(all(test, shuttle))]
mod shuttle_tasks {
    use super::*;
    use crate::wait::Patience;
    use crate::wait::shuttle_lines::{World, check_schedules};
    use core::future::poll_fn;
    use shuttle::future::{JoinHandle, block_on, spawn};
    use shuttle::sync::Arc;
    use shuttle::thread;

    impl World {
        async fn await_pages(&self, n: usize, cancel: Option<&Cancel>) -> Option<()> {
            let mut line = InLine::new(&self.waits, n, cancel);
            poll_fn(|context| line.poll(context, |_| self.take(n))).await
        }
    }

    /// A model in which the waking thread runs. A schedule takes several times as long as one without tasks.
    fn check_tasks(model: impl Fn() + Send + Sync + 'static) {
        check_schedules(5_000, move || {
            let is_over = Arc::new(AtomicBool::new(false));
            let ends = is_over.clone();
            let waking = thread::spawn(move || WAKING.run(|| ends.load(SeqCst)));
            model();
            is_over.store(true, SeqCst);
            waking.thread().unpark();
            waking.join().unwrap();
        });
    }

    /// A task that takes `n`, and frees it if it got it.
    fn borrows(world: &Arc<World>, n: usize, cancel: Option<&Cancel>) -> JoinHandle<bool> {
        let (world, cancel) = (world.clone(), cancel.cloned());
        spawn(async move {
            let got = world.await_pages(n, cancel.as_ref()).await;
            got.inspect(|()| world.free(n)).is_some()
        })
    }

    fn until_waiting(world: &World, n: usize) {
        while world.waits.len() < n {
            thread::yield_now();
        }
    }

    #[test]
    fn a_free_wakes_the_only_task() {
        check_tasks(|| {
            let world = World::new(0);
            let task = borrows(&world, 1, None);
            world.free(1);
            assert!(block_on(task).unwrap());
            world.at_rest(1);
        });
    }

    #[test]
    fn every_task_that_waits_is_served() {
        check_tasks(|| {
            let world = World::new(0);
            let tasks = [1, 2, 1].map(|n| borrows(&world, n, None));
            let other = world.clone();
            let frees = thread::spawn(move || other.free(1));
            world.free(1);
            frees.join().unwrap();
            tasks.into_iter().for_each(|task| assert!(block_on(task).unwrap()));
            world.at_rest(2);
        });
    }

    #[test]
    fn tasks_and_threads_in_one_line_are_served_in_order() {
        check_tasks(|| {
            let world = World::new(0);
            let served = |world: &World, number| world.take(1).inspect(|()| world.served.lock().unwrap().push(number));
            let task = |number| {
                let world = world.clone();
                spawn(async move {
                    let mut line = InLine::new(&world.waits, 1, None);
                    poll_fn(|context| line.poll(context, |_| served(&world, number))).await.unwrap();
                })
            };
            let first = task(0);
            until_waiting(&world, 1);
            let other = world.clone();
            let second = thread::spawn(move || {
                other.waits.wait(1, &Patience::default(), None, |_| served(&other, 1)).unwrap();
            });
            until_waiting(&world, 2);
            let third = task(2);
            until_waiting(&world, 3);
            world.free(1);
            world.free(2);
            block_on(first).unwrap();
            second.join().unwrap();
            block_on(third).unwrap();
            assert_eq!(*world.served.lock().unwrap(), [0, 1, 2]);
            world.at_rest(0);
        });
    }

    /// One page comes, before, while or after the first task is dropped.
    #[test]
    fn a_dropped_task_loses_nothing_and_wakes_the_next() {
        check_tasks(|| {
            let world = World::new(0);
            let dropped = borrows(&world, 1, None);
            let next = borrows(&world, 1, None);
            let other = world.clone();
            let thread = thread::spawn(move || other.alloc(1, &Patience::default()).map(|()| other.free(1)).unwrap());
            let other = world.clone();
            let frees = thread::spawn(move || other.free(1));
            dropped.abort();
            assert!(block_on(next).unwrap());
            thread.join().unwrap();
            frees.join().unwrap();
            let _ = block_on(dropped);
            world.at_rest(1);
        });
    }

    /// Nothing serves the first task, nor the one behind it.
    #[test]
    fn a_cancel_ends_the_waits_of_tasks() {
        check_tasks(|| {
            let (world, cancel) = (World::new(0), Cancel::new());
            let stuck = [9, 9].map(|n| borrows(&world, n, Some(&cancel)));
            let next = borrows(&world, 1, None);
            world.free(1);
            cancel.cancel();
            stuck.into_iter().for_each(|task| assert!(!block_on(task).unwrap()));
            assert!(block_on(next).unwrap());
            world.at_rest(1);
        });
    }
}
