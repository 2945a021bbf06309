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
//! The request of a thread sleeps in [`Waits::wait`]. The request of a [task](Task) returns to its executor between
//! attempts (`tasks.rs`). Both hold a [`Place`], and stand in the same lines.
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
//! # Late tasks
//! A task that was woken may not be polled for long: its executor may be busy, or the program polls another future
//! first. While the task is [late](Task::is_late) it keeps its place, and the request behind it is a head too. So no
//! request waits for ever behind tasks that are not polled: when a head becomes late, the tasks behind it are woken, and
//! those that do not answer become late together. Once the task is polled again, it alone is the head: the
//! request behind it waits for its turn. A claim that this request has begun ends if it makes no attempts (`claim.rs`).
//!
//! # Invariants
//! - W1 A seat is in its line from the moment that it is taken until its owner leaves, however the wait ends.
//! - W2 A head is woken when it becomes one, and after every free that began while it was a head and that may be enough
//!   for it.
//! - W3 Whenever the lines are unlocked, the first request of each line is a head, and so is each request with only late
//!   tasks before it. No other one is: a task that is polled again has the lines looked at.
//!
//! # Locks
//! The lock of the lines is the only one here, and nothing else is locked while it is held. A signal handler may free,
//! and must not wait for a lock. So a free only tries the lock; if it is held, the holder does the waking. Every holder
//! therefore unlocks through [`Lines::release`]: it compares the number of frees with the number that heads were told
//! of, and checks again after it has unlocked.
use crate::sync::{
    AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Mutex, MutexGuard, Stamp, Thread, current, fence, no_fork, park,
    park_timeout,
};
use core::fmt;
use core::mem::ManuallyDrop;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError, TryLockError, Weak};
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
    waiting: Mutex<Vec<Arc<Seat>>>,
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
        self.change(|waiting| waiting.iter().for_each(|seat| seat.wake()));
    }
    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.is_cancelled.load(Acquire)
    }
    fn enter(&self, seat: &Arc<Seat>) {
        self.change(|waiting| waiting.push(seat.clone()));
    }
    fn leave(&self, seat: &Arc<Seat>) {
        let at = |waiting: &Vec<Arc<Seat>>| waiting.iter().position(|other| Arc::ptr_eq(other, seat));
        let left = self.change(|waiting| at(waiting).map(|at| waiting.swap_remove(at)));
        drop(left); // Not under the lock.
    }
    /// The number of requests that wait with it.
    #[cfg(loom)]
    pub(crate) fn waiting(&self) -> usize {
        self.change(|waiting| waiting.len())
    }
    /// Changes the list of waiting requests, in a section that no fork interrupts.
    fn change<T>(&self, change: impl FnOnce(&mut Vec<Arc<Seat>>) -> T) -> T {
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

/// A task of an executor that waits in a line.
pub(crate) trait Task: fmt::Debug + Send + Sync {
    /// Has the task polled soon. A signal handler may call this, with the lines locked: it waits for no lock and calls no
    /// code of the program's.
    fn notify(self: Arc<Self>);
    /// Whether the task was woken long ago and was not polled since.
    fn is_late(&self) -> bool;
}

/// Who waits.
#[derive(Debug)]
pub(crate) enum Who {
    Thread(Thread),
    Task(Arc<dyn Task>),
}

#[derive(Debug)]
struct Seat {
    who: Who,
    is_head: AtomicBool,
}

impl Seat {
    fn wake(&self) {
        match &self.who {
            Who::Thread(thread) => thread.unpark(),
            Who::Task(task) => Arc::clone(task).notify(),
        }
    }
    fn is_of_task(&self) -> bool {
        matches!(self.who, Who::Task(_))
    }
    fn is_late(&self) -> bool {
        matches!(&self.who, Who::Task(task) if task.is_late())
    }
}

/// Requests that lack the same, in the order in which they came; at least one.
#[derive(Debug)]
struct Line<K> {
    kind: K,
    seats: VecDeque<Arc<Seat>>,
    /// The number of seats that are of tasks.
    tasks: usize,
}

#[derive(Debug)]
struct Lines<K> {
    lines: Mutex<Vec<Line<K>>>,
    /// The number of frees while a request waited.
    frees: AtomicU64,
    /// How many of those frees the heads were told of. Changed only while the lines are locked.
    told: AtomicU64,
}

/// The lines, for code that knows nothing of their kinds.
pub(crate) trait Look: Send + Sync {
    /// Says who leads and wakes heads, as every holder of the lines does: a task that has become late makes the next
    /// request a head, and one that is polled again is the only head.
    fn look(&self);
    /// The same, and wakes all tasks behind heads that are late.
    fn look_for_late(&self);
}

impl<K: Kind> Look for Lines<K> {
    fn look(&self) {
        self.release(self.lock(), None);
    }
    fn look_for_late(&self) {
        let held = self.lock();
        for line in held.iter().filter(|line| line.seats[0].is_late()) {
            line.seats.iter().filter(|seat| seat.is_of_task() && !seat.is_late()).for_each(|seat| seat.wake());
        }
        self.release(held, None);
    }
}

/// What a request lacks.
pub(crate) trait Kind: Copy + PartialEq + Send + 'static {}
impl<K: Copy + PartialEq + Send + 'static> Kind for K {}

type Held<'q, K> = MutexGuard<'q, Vec<Line<K>>>;
/// A free: the number of frees before it, and a function that says whether there may be enough for a kind now.
type Free<'f, K> = (u64, &'f dyn Fn(K) -> bool);

/// The requests that wait for one allocator's memory or for one pool's elements.
#[derive(Debug)]
pub(crate) struct Waits<K = ()> {
    /// From an [`Arc`]; null until a request waits. A forked child makes new ones, since no thread waits in it.
    lines: AtomicPtr<Lines<K>>,
    /// The number of seats taken. While it is not 0, per-CPU lists stay shut.
    waiting: AtomicUsize,
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
            served: zero(),
            ended: zero(),
            waited_us: zero(),
            longest_us: zero(),
        }
    }
}

/// The interval of a head's own attempts, for pages that reached a list just before the lists were shut.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// A head may claim memory after so many requests were served past it. This is more than the threads of a program
/// request at the same moment, and few enough to be served well within [`LOOK_AGAIN`].
const OVERTAKINGS: u64 = 64;

impl<K: Kind> Waits<K> {
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
        self.look_at(|lines| lines.iter().any(|line| line.kind == kind))
    }
    /// The sum of what tasks lack; `lacks` says it for a kind and a number of tasks. Late tasks at the head of a line do not
    /// count: memory that is reclaimed for them may be taken by nobody.
    pub(crate) fn lacked_by_tasks(&self, lacks: impl Fn(K, usize) -> usize) -> usize {
        let are_late = |line: &Line<K>| line.seats.iter().take_while(|seat| seat.is_late()).count();
        let of_line = |line: &Line<K>| match line.tasks - are_late(line) {
            0 => 0,
            tasks => lacks(line.kind, tasks),
        };
        self.look_at(|lines| lines.iter().map(of_line).sum())
    }
    fn look_at<T: Default>(&self, look: impl FnOnce(&[Line<K>]) -> T) -> T {
        match self.made() {
            Some(lines) if self.is_awaited() => {
                let held = lines.lock();
                let seen = look(&held);
                lines.release(held, None);
                seen
            }
            _ => T::default(),
        }
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
        // SeqCst pairs with the fence in `release`: either this finds the lines, or the request that makes them finds
        // what was freed, since it tries after it has released them.
        fence(SeqCst);
        let Some(lines) = self.made() else { return };
        // Release pairs with the Acquire in `release`: a head that is woken for this free finds what was freed.
        let before = lines.frees.fetch_add(1, Release);
        // SeqCst pairs with the fence in `release`: either this finds the lock free, or its holder sees the new number.
        fence(SeqCst);
        match lines.lines.try_lock() {
            Ok(held) => lines.release(held, Some((before, is_hopeful))),
            Err(TryLockError::Poisoned(held)) => lines.release(held.into_inner(), Some((before, is_hopeful))),
            Err(TryLockError::WouldBlock) => {}
        }
    }

    /// The lines, if they were made.
    fn made(&self) -> Option<&Lines<K>> {
        // SAFETY: null, or from the `Arc` made in `lines`, which is given up only when `self` is dropped. A forked child
        // sets null, and keeps the parent's lines for ever.
        unsafe { self.lines.load(Acquire).as_ref() }
    }

    fn lines(&self) -> &Lines<K> {
        if let Some(lines) = self.made() {
            return lines;
        }
        let zero = || AtomicU64::new(0);
        let fresh = Arc::into_raw(Arc::new(Lines { lines: Mutex::new(Vec::new()), frees: zero(), told: zero() }));
        // The exchange's Release pairs with the Acquire of every load: the loser of a race uses the winner's lines.
        match self.lines.compare_exchange(core::ptr::null_mut(), fresh.cast_mut(), SeqCst, Acquire) {
            // SAFETY: as in `made`.
            Ok(_) => unsafe { &*fresh },
            Err(theirs) => {
                // SAFETY: made above, and the exchange failed, so no other thread saw it.
                drop(unsafe { Arc::from_raw(fresh) });
                // SAFETY: as in `made`.
                unsafe { &*theirs }
            }
        }
    }

    /// The lines, for a task that is about to line up.
    pub(crate) fn to_look(&self) -> Weak<dyn Look> {
        self.lines();
        let lines: *const Lines<K> = self.lines.load(Acquire);
        // SAFETY: it is the pointer that `Arc::into_raw` returned in `lines`, which was called just now; a reference made
        // from it would not do. That `Arc` exists as long as `self` (see `made`). `ManuallyDrop` leaves its count as it
        // was.
        let lines = ManuallyDrop::new(unsafe { Arc::from_raw(lines) });
        Arc::downgrade(&*lines) as Weak<dyn Look>
    }

    /// Takes a seat at the end of the line of its kind.
    pub(crate) fn enter<'w>(&'w self, kind: K, who: Who, cancel: Option<&'w Cancel>) -> Place<'w, K> {
        let (start, lines) = (Instant::now(), self.lines());
        let seat = Arc::new(Seat { who, is_head: AtomicBool::new(false) });
        cancel.inspect(|cancel| cancel.enter(&seat));
        let mut held = lines.lock();
        let at = held.iter().position(|line| line.kind == kind).unwrap_or_else(|| {
            held.push(Line { kind, seats: VecDeque::new(), tasks: 0 });
            held.len() - 1
        });
        held[at].tasks += usize::from(seat.is_of_task());
        held[at].seats.push_back(seat.clone());
        // Counted with the lines locked: a thread that reads the number and then locks the lines finds all these seats.
        // SeqCst: from now on lists stay shut and frees are noted, before this request makes its first attempt.
        self.waiting.fetch_add(1, SeqCst);
        let place = Place { waits: self, lines, seat, kind, stamp: Stamp::here(), cancel, start, overtaken_from: None };
        lines.release(held, None);
        place
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
        let mut place = self.enter(kind, Who::Thread(current()), patience.cancel);
        // A request with a bounded number of attempts waits behind others no longer than those attempts would take: the
        // head may never give up, and may lack exactly the pages that the threads behind it hold.
        let in_line_until = turns.map(|turns| place.start + LOOK_AGAIN * turns);
        let mut turn = 0;
        loop {
            if patience.is_over() {
                return None;
            }
            if place.is_head() {
                if let Some(got) = place.attempt(&mut attempt) {
                    return Some(got);
                }
                turn += 1;
                if turns.is_some_and(|turns| turn >= turns) {
                    return None;
                }
            } else if in_line_until.is_some_and(|end| Instant::now() >= end) {
                // The head may be busy in a shrinker while its memory was freed.
                return attempt(false);
            }
            let is_head = place.is_head();
            let ends = [patience.deadline, in_line_until.filter(|_| !is_head)];
            let end = ends.into_iter().flatten().min();
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            match (is_head, left) {
                (true, left) => park_timeout(left.unwrap_or(LOOK_AGAIN).min(LOOK_AGAIN)),
                (false, Some(left)) => park_timeout(left),
                (false, None) => park(),
            }
        }
    }

    /// Ends all waits without a word, when no handle of the allocator is left. The places that are still taken are those
    /// of futures that were leaked: nobody drops or polls them any more. From here on no free asks for their kinds.
    pub(crate) fn forget_leaked(&self) {
        if let Some(lines) = self.made().filter(|_| self.is_awaited()) {
            let mut held = lines.lock();
            let leaked = core::mem::take(&mut *held);
            self.waiting.store(0, Relaxed);
            lines.release(held, None);
            drop(leaked); // Not under the lock. The wakers are the futures': they stay.
        }
    }

    /// In a forked child: no thread waits, and the thread that held the lock does not exist. The child calls this
    /// before anything else.
    pub(crate) fn forget_after_fork(&self) {
        self.lines.store(core::ptr::null_mut(), Relaxed);
        self.waiting.store(0, Relaxed);
    }
}

impl<K: Kind> Lines<K> {
    fn lock(&self) -> Held<'_, K> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Unlocks the lines. Before that, it wakes requests that have just become a head, and heads for which something
    /// was freed since they were last told. Afterwards it checks whether something was freed meanwhile, and begins
    /// again. `own` is the caller's free, if it made one. If that free is the only new one, heads for which it is too
    /// little sleep on. If another thread also freed, without getting the lock, all heads are woken.
    fn release<'q>(&'q self, mut held: Held<'q, K>, own: Option<Free<'_, K>>) {
        loop {
            // Acquire pairs with the Release in `note_freed`.
            let frees = self.frees.load(Acquire);
            let told = self.told.load(Relaxed);
            self.told.store(frees, Relaxed);
            let is_own_alone = own.is_some_and(|(before, _)| told == before && frees == before.wrapping_add(1));
            for line in held.iter() {
                let is_due = match own {
                    Some((_, is_hopeful)) if is_own_alone => is_hopeful(line.kind),
                    _ => told != frees,
                };
                let mut leads = true;
                for seat in &line.seats {
                    if !leads {
                        // A head until now, since a task before it was late. Heads are the first of their line, so no
                        // other one is left after a seat that was none.
                        if !seat.is_head.swap(false, Release) {
                            break;
                        }
                        continue;
                    }
                    // Release pairs with the Acquire in `Place::is_head`.
                    if !seat.is_head.swap(true, Release) || is_due {
                        seat.wake();
                    }
                    leads = seat.is_late();
                }
            }
            drop(held);
            // SeqCst as in `note_freed`.
            fence(SeqCst);
            if self.frees.load(Relaxed) == frees {
                return;
            }
            match self.lines.try_lock() {
                Ok(again) => held = again,
                Err(TryLockError::Poisoned(again)) => held = again.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            }
        }
    }
}

impl<K> Drop for Waits<K> {
    fn drop(&mut self) {
        let lines = self.lines.load(Relaxed);
        if !lines.is_null() {
            // SAFETY: from the `Arc` made in `lines`; `self` is dropped, so no thread waits or frees through it.
            drop(unsafe { Arc::from_raw(lines) });
        }
    }
}

/// A request's place in a line. Dropping it gives up the seat, however the wait ends: also if an attempt unwinds.
pub(crate) struct Place<'w, K: Kind> {
    waits: &'w Waits<K>,
    lines: &'w Lines<K>,
    seat: Arc<Seat>,
    kind: K,
    stamp: Stamp,
    cancel: Option<&'w Cancel>,
    start: Instant,
    /// The number of requests that had been served when it became a head.
    overtaken_from: Option<u64>,
}

impl<K: Kind> Place<'_, K> {
    pub(crate) fn is_head(&self) -> bool {
        // Acquire pairs with the Release in `release`.
        self.seat.is_head.load(Acquire)
    }
    /// Whether it was taken before this process was forked: the child has forgotten it.
    pub(crate) fn is_inherited(&self) -> bool {
        self.stamp.is_inherited()
    }
    /// Looks again at who leads: see [`Look::look`].
    pub(crate) fn look(&self) {
        self.lines.look();
    }
    /// One attempt of a head. `attempt` is told whether the request was overtaken often.
    pub(crate) fn attempt<T>(&mut self, attempt: impl FnOnce(bool) -> Option<T>) -> Option<T> {
        let served = self.waits.served.load(Relaxed);
        let overtakings = served.wrapping_sub(*self.overtaken_from.get_or_insert(served));
        attempt(overtakings >= OVERTAKINGS)
    }
}

impl<K: Kind> Drop for Place<'_, K> {
    fn drop(&mut self) {
        // If an attempt forked, the child has forgotten all seats, this one included: see `forget_after_fork`.
        if !self.is_inherited() {
            let mut held = self.lines.lock();
            if let Some(at) = held.iter().position(|line| line.kind == self.kind) {
                let line = &mut held[at];
                let place = line.seats.iter().position(|seat| Arc::ptr_eq(seat, &self.seat));
                place.map(|place| line.seats.remove(place));
                line.tasks -= usize::from(self.seat.is_of_task());
                if line.seats.is_empty() {
                    held.remove(at);
                }
            }
            self.waits.waiting.fetch_sub(1, SeqCst);
            self.lines.release(held, None);
        }
        self.cancel.inspect(|cancel| cancel.leave(&self.seat));
        self.waits.ended.fetch_add(1, Relaxed);
        let waited_us = self.start.elapsed().as_micros() as u64;
        self.waits.waited_us.fetch_add(waited_us, Relaxed);
        self.waits.longest_us.fetch_max(waited_us, Relaxed);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    /// A task that is late when the test says so.
    #[derive(Debug, Default)]
    struct Idle(AtomicBool);

    impl Task for Idle {
        fn notify(self: Arc<Self>) {}
        fn is_late(&self) -> bool {
            self.0.load(Relaxed)
        }
    }

    #[test]
    fn a_late_task_leads_alone_once_it_is_polled_again() {
        let waits = Waits::<usize>::default();
        let tasks = [(); 4].map(|()| Arc::new(Idle::default()));
        let places = tasks.each_ref().map(|task| waits.enter(1, Who::Task(task.clone()), None));
        let is_late = |late: [bool; 4]| {
            tasks.iter().zip(late).for_each(|(task, is_late)| task.0.store(is_late, Relaxed));
            places[0].look();
            places.each_ref().map(Place::is_head)
        };
        assert_eq!(is_late([false; 4]), [true, false, false, false]);
        assert_eq!(is_late([true, true, false, false]), [true, true, true, false]);
        assert_eq!(is_late([true, false, false, false]), [true, true, false, false]);
        assert_eq!(is_late([true, true, true, false]), [true; 4]);
        assert_eq!(is_late([false, true, true, false]), [true, false, false, false]);
    }

    #[test]
    fn late_tasks_before_all_others_lack_nothing() {
        let waits = Waits::<usize>::default();
        let tasks = [(); 3].map(|()| Arc::new(Idle::default()));
        let _places = tasks.each_ref().map(|task| waits.enter(2, Who::Task(task.clone()), None));
        let lacked = |late: [bool; 3]| {
            tasks.iter().zip(late).for_each(|(task, is_late)| task.0.store(is_late, Relaxed));
            waits.lacked_by_tasks(|kind, tasks| kind * tasks)
        };
        assert_eq!(lacked([false; 3]), 6);
        assert_eq!(lacked([true, false, true]), 4);
        assert_eq!(lacked([true; 3]), 0);
    }
}

/// Tests the lines under a model checker, with memory that is only a number: run them with `--cfg shuttle`. No wait
/// times out there, so a lost wake-up, or a line that holds up another, is a deadlock that shuttle reports.
#[cfg(all(test, shuttle))]
pub(crate) mod shuttle_lines {
    use super::*;
    use shuttle::sync::atomic::AtomicUsize;
    use shuttle::sync::{Arc, Mutex};
    use shuttle::thread;

    #[derive(Default)]
    pub(crate) struct World {
        free: AtomicUsize,
        pub(crate) waits: Waits<usize>,
        /// The numbers of the requests served so far, of those that wait for the same.
        pub(crate) served: Mutex<Vec<usize>>,
    }

    impl World {
        pub(crate) fn new(free: usize) -> Arc<Self> {
            Arc::new(Self { free: AtomicUsize::new(free), ..Self::default() })
        }
        pub(crate) fn take(&self, n: usize) -> Option<()> {
            self.free.fetch_update(SeqCst, SeqCst, |free| free.checked_sub(n)).ok().map(|_| ())
        }
        pub(crate) fn alloc(&self, n: usize, patience: &Patience<'_>) -> Option<()> {
            if !self.waits.has(n) && self.take(n).is_some() {
                return Some(());
            }
            self.waits.wait(n, patience, None, |_| self.take(n))
        }
        pub(crate) fn free(&self, n: usize) {
            self.free.fetch_add(n, SeqCst);
            if self.waits.is_awaited() {
                self.waits.note_freed(&|kind| self.free.load(SeqCst) >= kind);
            }
        }
        pub(crate) fn at_rest(&self, free: usize) {
            assert_eq!((self.free.load(SeqCst), self.waits.len()), (free, 0));
        }
    }

    fn check(model: impl Fn() + Send + Sync + 'static) {
        check_schedules(20_000, model);
    }

    /// So many schedules, or as many as the variable names.
    pub(crate) fn check_schedules(usual: usize, model: impl Fn() + Send + Sync + 'static) {
        let asked = std::env::var("PAGEMILL_SCHEDULES").ok();
        let schedules = asked.map_or(usual, |n| n.parse().expect("PAGEMILL_SCHEDULES is a number"));
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
