//! Waiting for an allocator's memory or for a pool's elements, with a deadline and a way to cancel.
//!
//! It is the last step of the slow path, after reclaim (`slow.rs`), and of a pool's request (`mempool/`).
//!
//! # Where a request waits
//! A request that may wait and found too little takes a seat at the end of the line of its kind. Requests are of one
//! kind if they lack the same (`Lack` in `shared.rs`, C3.20). A pool has one kind, and so one line (C5.3). Only the
//! first request of each line, its head, makes attempts; all others sleep. So a line keeps its order, and no line holds
//! up another.
//!
//! # What wakes it
//! A free wakes the heads for which it may be enough ([`Waits::note_freed`]). A request that leaves its line, served or
//! not, wakes the next one. While a request waits for memory, the per-CPU lists accept no freed pages
//! (`Zones::wait_in_line`): each page goes to the zone, and that free wakes heads. In addition, a head makes an attempt
//! every [`LOOK_AGAIN`], for a page that reached a list just before the lists were shut.
//!
//! # Overtaking
//! A line that cannot be served lets other lines pass. When [`OVERTAKINGS`] requests were served since a request became
//! a head, its attempts learn that it was overtaken. A request for memory then claims some (`claim.rs`).
//!
//! # Invariants
//! - W1 A seat is in its line from the moment that it is taken until its owner leaves, however the wait ends.
//! - W2 A head is woken when it becomes one, and after every free that began while it was a head and that may be enough
//!   for it.
//!
//! # Locks
//! The lock of the lines is the only one here, and nothing else is locked while it is held. A signal handler may free,
//! and must not wait for a lock. So a free only tries the lock; if it is held, the holder does the waking. Every holder
//! therefore unlocks through [`Waits::release`]: it compares the number of frees with the number that heads were told
//! of, and checks again after it has unlocked.
use crate::sync::{
    AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Mutex, MutexGuard, Stamp, Thread, current, fence, no_fork, park,
    park_timeout,
};
use core::fmt;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Ends the waits of the requests that were given it, from another thread: at shutdown, for example. Cheap to clone.
///
/// ```
/// use pagemill::{Allocator, Bulk, Cancel, Page};
/// let cancel = Cancel::new();
/// cancel.cancel();
/// let allocator = Allocator::builder().pages(1).build()?;
/// let (mut first, mut second): ([Option<Page>; 1], [Option<Page>; 1]) = ([None], [None]);
/// allocator.alloc_pages_bulk_array(Bulk::exact(1), &mut first)?;
/// // Without the cancel, this request would wait a minute for `first`.
/// let request = Bulk::exact(1).timeout(std::time::Duration::from_secs(60)).cancel(&cancel);
/// assert!(allocator.alloc_pages_bulk_array(request, &mut second).is_err());
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct Cancel(Arc<CancelState>);

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cancel").field("is_cancelled", &self.is_cancelled()).finish()
    }
}

#[derive(Debug, Default)]
struct CancelState {
    is_cancelled: AtomicBool,
    waiting: Mutex<Vec<Thread>>,
}

impl Cancel {
    /// A `Cancel` that is not cancelled yet.
    pub fn new() -> Self {
        Self::default()
    }
    /// Ends the waits that are under way, and all later ones as they begin. Their requests deliver what they have, or
    /// fail.
    pub fn cancel(&self) {
        // Release pairs with the Acquire in `is_cancelled`.
        self.0.is_cancelled.store(true, Release);
        self.change(|waiting| waiting.iter().for_each(Thread::unpark));
    }
    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.is_cancelled.load(Acquire)
    }
    fn enter(&self) {
        self.change(|waiting| waiting.push(current()));
    }
    fn leave(&self) {
        let me = current().id();
        self.change(|waiting| waiting.iter().position(|thread| thread.id() == me).map(|at| waiting.swap_remove(at)));
    }
    /// The number of threads that wait with it.
    #[cfg(loom)]
    pub(crate) fn waiting(&self) -> usize {
        self.change(|waiting| waiting.len())
    }
    /// Changes the list of waiting threads, in a section that no fork interrupts.
    fn change<T>(&self, change: impl FnOnce(&mut Vec<Thread>) -> T) -> T {
        let _held = no_fork();
        change(&mut self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// How long a request may wait.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Patience<'c> {
    pub(crate) deadline: Option<Instant>,
    pub(crate) cancel: Option<&'c Cancel>,
}

impl Patience<'_> {
    pub(crate) fn is_over(&self) -> bool {
        self.cancel.is_some_and(Cancel::is_cancelled)
            || self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }
}

#[derive(Debug)]
struct Seat {
    thread: Thread,
    is_head: AtomicBool,
}

/// Requests that lack the same, in the order in which they came; at least one.
#[derive(Debug)]
struct Line<K> {
    kind: K,
    seats: VecDeque<Arc<Seat>>,
}

#[derive(Debug)]
struct Lines<K> {
    lines: Mutex<Vec<Line<K>>>,
}

type Held<'q, K> = MutexGuard<'q, Vec<Line<K>>>;
/// A free: the number of frees before it, and a function that says whether there may be enough for a kind now.
type Free<'f, K> = (u64, &'f dyn Fn(K) -> bool);

/// The requests that wait for one allocator's memory or for one pool's elements.
#[derive(Debug)]
pub(crate) struct Waits<K = ()> {
    /// Null until a request waits. A forked child makes new ones, since no thread waits in it.
    lines: AtomicPtr<Lines<K>>,
    /// The number of seats taken. While it is not 0, per-CPU lists stay shut.
    waiting: AtomicUsize,
    /// The number of frees while a request waited.
    frees: AtomicU64,
    /// How many of those frees the heads were told of. Changed only while the lines are locked.
    told: AtomicU64,
    /// Requests that were served while others waited.
    served: AtomicU64,
    /// Statistics: waits that ended, their total and their longest time.
    pub(crate) ended: AtomicU64,
    pub(crate) waited_us: AtomicU64,
    pub(crate) longest_us: AtomicU64,
}

impl<K> Default for Waits<K> {
    fn default() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            lines: AtomicPtr::new(core::ptr::null_mut()),
            waiting: AtomicUsize::new(0),
            frees: zero(),
            told: zero(),
            served: zero(),
            ended: zero(),
            waited_us: zero(),
            longest_us: zero(),
        }
    }
}

/// The interval of a head's own attempts, for pages that reached a list just before the lists were shut.
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// A head may claim memory after so many requests were served past it. This is more than the threads of a program
/// request at the same moment, and few enough to be served well within [`LOOK_AGAIN`].
const OVERTAKINGS: u64 = 64;

impl<K: Copy + PartialEq> Waits<K> {
    /// Whether a request waits.
    #[inline]
    pub(crate) fn is_awaited(&self) -> bool {
        self.waiting.load(Relaxed) != 0
    }
    pub(crate) fn len(&self) -> usize {
        self.waiting.load(Relaxed)
    }
    /// Whether a request of this kind waits. A new request of that kind that may wait lines up behind it before it
    /// tries.
    pub(crate) fn has(&self, kind: K) -> bool {
        self.is_awaited()
            && self.made().is_some_and(|lines| {
                let held = lines.lines.lock().unwrap_or_else(PoisonError::into_inner);
                let is_there = held.iter().any(|line| line.kind == kind);
                self.release(lines, held, None);
                is_there
            })
    }
    /// Counts a request that was served while others wait.
    pub(crate) fn note_served(&self) {
        self.served.fetch_add(1, Relaxed);
    }

    /// Something was freed: wakes the heads of the kinds for which `is_hopeful` says that there may be enough now. A
    /// signal handler may call this. `is_hopeful` is called with the lines locked, possibly in a signal handler too.
    #[cold]
    #[inline(never)]
    pub(crate) fn note_freed(&self, is_hopeful: &dyn Fn(K) -> bool) {
        // Release pairs with the Acquire in `release`: a head that is woken for this free finds what was freed.
        let before = self.frees.fetch_add(1, Release);
        // SeqCst pairs with the fence in `release`: either this finds the lock free, or its holder sees the new number.
        fence(SeqCst);
        let Some(lines) = self.made() else { return };
        match lines.lines.try_lock() {
            Ok(held) => self.release(lines, held, Some((before, is_hopeful))),
            Err(TryLockError::Poisoned(held)) => self.release(lines, held.into_inner(), Some((before, is_hopeful))),
            Err(TryLockError::WouldBlock) => {}
        }
    }

    /// Unlocks the lines. Before that, it wakes requests that have just become a head, and heads for which something
    /// was freed since they were last told. Afterwards it checks whether something was freed meanwhile, and begins
    /// again. `own` is the caller's free, if it made one. If that free is the only new one, heads for which it is too
    /// little sleep on. If another thread also freed, without getting the lock, all heads are woken.
    fn release<'q>(&self, lines: &'q Lines<K>, mut held: Held<'q, K>, own: Option<Free<'_, K>>) {
        loop {
            // Acquire pairs with the Release in `note_freed`.
            let frees = self.frees.load(Acquire);
            let told = self.told.load(Relaxed);
            self.told.store(frees, Relaxed);
            let is_own_alone = own.is_some_and(|(before, _)| told == before && frees == before.wrapping_add(1));
            for line in held.iter() {
                let Some(head) = line.seats.front() else { continue };
                let is_due = match own {
                    Some((_, is_hopeful)) if is_own_alone => is_hopeful(line.kind),
                    _ => told != frees,
                };
                // Release pairs with the Acquire in `wait`.
                if !head.is_head.swap(true, Release) || is_due {
                    head.thread.unpark();
                }
            }
            drop(held);
            // SeqCst as in `note_freed`.
            fence(SeqCst);
            if self.frees.load(Relaxed) == frees {
                return;
            }
            match lines.lines.try_lock() {
                Ok(again) => held = again,
                Err(TryLockError::Poisoned(again)) => held = again.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            }
        }
    }

    /// The lines, if they were made.
    fn made(&self) -> Option<&Lines<K>> {
        // SAFETY: null, or from the box made in `lines`, which is freed only when `self` is dropped. A forked child
        // sets null.
        unsafe { self.lines.load(Acquire).as_ref() }
    }

    fn lines(&self) -> &Lines<K> {
        if let Some(lines) = self.made() {
            return lines;
        }
        let fresh = Box::into_raw(Box::new(Lines { lines: Mutex::new(Vec::new()) }));
        // The exchange's Release pairs with the Acquire of every load: the loser of a race uses the winner's lines.
        match self.lines.compare_exchange(core::ptr::null_mut(), fresh, SeqCst, Acquire) {
            // SAFETY: as in `made`.
            Ok(_) => unsafe { &*fresh },
            Err(theirs) => {
                // SAFETY: made above, and the exchange failed, so no other thread saw it.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: as in `made`.
                unsafe { &*theirs }
            }
        }
    }

    /// Waits for its turn in the line of its kind. Then calls `attempt` whenever something was freed or [`LOOK_AGAIN`]
    /// passed, until it returns something or `patience` ends. With `turns`, the wait also ends once `attempt` has
    /// failed that many times, or once the request has stood behind others for that many times [`LOOK_AGAIN`].
    /// `attempt` is told whether the request was overtaken often.
    pub(crate) fn wait<T>(
        &self,
        kind: K,
        patience: &Patience<'_>,
        turns: Option<u32>,
        mut attempt: impl FnMut(bool) -> Option<T>,
    ) -> Option<T> {
        let start = Instant::now();
        // A request with a bounded number of attempts waits behind others no longer than those attempts would take: the
        // head may never give up, and may lack exactly the pages that the threads behind it hold.
        let in_line_until = turns.map(|turns| start + LOOK_AGAIN * turns);
        let lines = self.lines();
        let seat = Arc::new(Seat { thread: current(), is_head: AtomicBool::new(false) });
        patience.cancel.inspect(|cancel| cancel.enter());
        let mut held = lines.lines.lock().unwrap_or_else(PoisonError::into_inner);
        match held.iter_mut().find(|line| line.kind == kind) {
            Some(line) => line.seats.push_back(seat.clone()),
            None => held.push(Line { kind, seats: VecDeque::from([seat.clone()]) }),
        }
        // Counted with the lines locked: a thread that reads the number and then locks the lines finds all these seats.
        // SeqCst: from now on lists stay shut and frees are noted, before this request makes its first attempt.
        self.waiting.fetch_add(1, SeqCst);
        let leave = Leave { waits: self, lines, seat: &seat, kind, stamp: Stamp::here(), patience, start };
        self.release(lines, held, None);
        let (mut turn, mut overtaken_from) = (0, None);
        let got = loop {
            if patience.is_over() {
                break None;
            }
            if seat.is_head.load(Acquire) {
                let served = self.served.load(Relaxed);
                let overtakings = served.wrapping_sub(*overtaken_from.get_or_insert(served));
                if let Some(got) = attempt(overtakings >= OVERTAKINGS) {
                    break Some(got);
                }
                turn += 1;
                if turns.is_some_and(|turns| turn >= turns) {
                    break None;
                }
            } else if in_line_until.is_some_and(|end| Instant::now() >= end) {
                // The head may be busy in a shrinker while its memory was freed.
                break attempt(false);
            }
            let is_head = seat.is_head.load(Acquire);
            let ends = [patience.deadline, in_line_until.filter(|_| !is_head)];
            let end = ends.into_iter().flatten().min();
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            match (is_head, left) {
                (true, left) => park_timeout(left.unwrap_or(LOOK_AGAIN).min(LOOK_AGAIN)),
                (false, Some(left)) => park_timeout(left),
                (false, None) => park(),
            }
        };
        drop(leave);
        got
    }

    /// In a forked child: no thread waits, and the thread that held the lock does not exist. The child calls this
    /// before anything else.
    pub(crate) fn forget_after_fork(&self) {
        self.lines.store(core::ptr::null_mut(), Relaxed);
        self.waiting.store(0, Relaxed);
    }
}

impl<K> Drop for Waits<K> {
    fn drop(&mut self) {
        let lines = self.lines.load(Relaxed);
        if !lines.is_null() {
            // SAFETY: from the box made in `lines`; `self` is dropped, so no thread waits or frees through it.
            drop(unsafe { Box::from_raw(lines) });
        }
    }
}

/// Gives up a seat when the wait ends, also if an attempt unwinds.
struct Leave<'w, K: Copy + PartialEq> {
    waits: &'w Waits<K>,
    lines: &'w Lines<K>,
    seat: &'w Arc<Seat>,
    kind: K,
    stamp: Stamp,
    patience: &'w Patience<'w>,
    start: Instant,
}

impl<K: Copy + PartialEq> Drop for Leave<'_, K> {
    fn drop(&mut self) {
        // If an attempt forked, the child has forgotten all seats, this one included: see `forget_after_fork`.
        if !self.stamp.is_inherited() {
            let mut held = self.lines.lines.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(at) = held.iter().position(|line| line.kind == self.kind) {
                held[at].seats.retain(|seat| !Arc::ptr_eq(seat, self.seat));
                if held[at].seats.is_empty() {
                    held.remove(at);
                }
            }
            self.waits.waiting.fetch_sub(1, SeqCst);
            self.waits.release(self.lines, held, None);
        }
        self.patience.cancel.inspect(|cancel| cancel.leave());
        self.waits.ended.fetch_add(1, Relaxed);
        let waited_us = self.start.elapsed().as_micros() as u64;
        self.waits.waited_us.fetch_add(waited_us, Relaxed);
        self.waits.longest_us.fetch_max(waited_us, Relaxed);
    }
}

/// Tests the lines under a model checker, with memory that is only a number: run them with `--cfg shuttle`. No wait
/// times out there, so a lost wake-up, or a line that holds up another, is a deadlock that shuttle reports.
#[cfg(all(test, shuttle))]
mod shuttle_lines {
    use super::*;
    use shuttle::sync::atomic::AtomicUsize;
    use shuttle::sync::{Arc, Mutex};
    use shuttle::thread;

    #[derive(Default)]
    struct World {
        free: AtomicUsize,
        waits: Waits<usize>,
        /// The numbers of the threads served so far, of those that wait for the same.
        served: Mutex<Vec<usize>>,
    }

    impl World {
        fn new(free: usize) -> Arc<Self> {
            Arc::new(Self { free: AtomicUsize::new(free), ..Self::default() })
        }
        fn take(&self, n: usize) -> Option<()> {
            self.free.fetch_update(SeqCst, SeqCst, |free| free.checked_sub(n)).ok().map(|_| ())
        }
        fn alloc(&self, n: usize, patience: &Patience<'_>) -> Option<()> {
            if !self.waits.has(n) && self.take(n).is_some() {
                return Some(());
            }
            self.waits.wait(n, patience, None, |_| self.take(n))
        }
        fn free(&self, n: usize) {
            self.free.fetch_add(n, SeqCst);
            if self.waits.is_awaited() {
                self.waits.note_freed(&|kind| self.free.load(SeqCst) >= kind);
            }
        }
        fn at_rest(&self, free: usize) {
            assert_eq!((self.free.load(SeqCst), self.waits.len()), (free, 0));
        }
    }

    fn check(model: impl Fn() + Send + Sync + 'static) {
        let asked = std::env::var("PAGEMILL_SCHEDULES").ok();
        let schedules = asked.map_or(20_000, |n| n.parse().expect("PAGEMILL_SCHEDULES is a number"));
        let model = std::sync::Arc::new(model);
        let random = model.clone();
        shuttle::check_random(move || random(), schedules);
        shuttle::check_pct(move || model(), schedules, 3);
    }

    #[test]
    fn every_waiting_request_is_served() {
        check(|| {
            let world = World::new(3);
            let threads: Vec<_> = [[1, 3], [2, 2], [3, 1]]
                .into_iter()
                .map(|wants| {
                    let world = world.clone();
                    thread::spawn(move || {
                        for n in wants {
                            world.alloc(n, &Patience::default()).unwrap();
                            world.free(n);
                        }
                    })
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            world.at_rest(3);
        });
    }

    /// Nothing serves the first request, until it is cancelled. All others are served before that.
    #[test]
    fn a_line_that_cannot_be_served_holds_up_no_other() {
        check(|| {
            let world = World::new(2);
            let cancel = Cancel::new();
            let stuck = {
                let (world, cancel) = (world.clone(), cancel.clone());
                thread::spawn(move || {
                    let patience = Patience { deadline: None, cancel: Some(&cancel) };
                    assert!(world.alloc(9, &patience).is_none());
                })
            };
            let others: Vec<_> = [1, 2, 2]
                .into_iter()
                .map(|n| {
                    let world = world.clone();
                    thread::spawn(move || {
                        world.alloc(n, &Patience::default()).unwrap();
                        world.free(n);
                    })
                })
                .collect();
            others.into_iter().for_each(|thread| thread.join().unwrap());
            cancel.cancel();
            stuck.join().unwrap();
            world.at_rest(2);
        });
    }

    #[test]
    fn a_look_at_the_lines_loses_no_wake_up() {
        check(|| {
            let world = World::new(0);
            let other = world.clone();
            let waiter = thread::spawn(move || other.alloc(1, &Patience::default()).unwrap());
            let other = world.clone();
            let looker = thread::spawn(move || other.waits.has(1));
            world.free(1);
            waiter.join().unwrap();
            looker.join().unwrap();
            world.at_rest(0);
        });
    }

    #[test]
    fn a_line_keeps_its_order() {
        check(|| {
            let world = World::new(0);
            let threads: Vec<_> = (0..3)
                .map(|number| {
                    let waiting = world.waits.len();
                    let other = world.clone();
                    let thread = thread::spawn(move || {
                        let served = |_| other.take(1).inspect(|()| other.served.lock().unwrap().push(number));
                        other.waits.wait(1, &Patience::default(), None, served).unwrap();
                    });
                    while world.waits.len() == waiting {
                        thread::yield_now();
                    }
                    thread
                })
                .collect();
            world.free(1);
            world.free(2);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!(*world.served.lock().unwrap(), [0, 1, 2]);
        });
    }
}
