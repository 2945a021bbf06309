//! Waiting for memory: first come first served, with a deadline and a way to cancel.
//!
//! A request that may wait and finds nothing takes a seat at the end of a queue. The one at its head alone tries, again
//! whenever something came back; when it is served, or gives up, the next one is woken. While anybody waits, the
//! per-CPU lists take nothing: what is freed goes to the zone, where the head finds it. Bulk requests that may wait take
//! nothing past those who do.
//!
//! Whoever frees may be a signal handler, so telling the head takes no lock for certain: it tries the queue's, and if it
//! is held, its holder looks at the number of frees again when it lets go.
//!
//! # Invariants
//! - W1 A seat is in the queue from `take_seat` until its owner leaves, whatever ends the wait.
//! - W2 The head is woken after every free that began when it was the head, and when it becomes the head.
use crate::sync::{
    AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Mutex, MutexGuard, Thread, current, fence, generation, no_fork,
    park, park_timeout,
};
use core::fmt;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Ends the waits of requests that were given it, from another thread: at shutdown, say. Cheap to clone.
///
/// ```
/// use pagemill::{Allocator, Bulk, Cancel, Page};
/// let cancel = Cancel::new();
/// cancel.cancel();
/// let allocator = Allocator::builder().pages(1).build()?;
/// let (mut first, mut second): ([Option<Page>; 1], [Option<Page>; 1]) = ([None], [None]);
/// allocator.alloc_pages_bulk_array(Bulk::exact(1), &mut first)?;
/// // Without it this request would wait a minute for `first`.
/// let request = Bulk::exact(1).deadline(std::time::Duration::from_secs(60)).cancel(&cancel);
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
    /// One that nobody has cancelled yet.
    pub fn new() -> Self {
        Self::default()
    }
    /// Ends the waits that are under way, and all that would begin. They come back short.
    pub fn cancel(&self) {
        // Release pairs with the Acquire in `is_cancelled`.
        self.0.is_cancelled.store(true, Release);
        self.change(|waiting| waiting.iter().for_each(Thread::unpark));
    }
    /// Was it?
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
    /// So that no fork meets it locked.
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

#[derive(Debug, Default)]
struct Queue {
    seats: Mutex<VecDeque<Arc<Seat>>>,
}

/// Those who wait for one allocator's memory.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    /// Null until somebody waits; made anew in the child of a fork, where nobody does.
    queue: AtomicPtr<Queue>,
    /// Seats taken. Not 0: lists take nothing.
    waiting: AtomicUsize,
    /// Times that something was given back while somebody waited.
    frees: AtomicU64,
    /// For statistics: waits that ended, and how long they were.
    pub(crate) ended: AtomicU64,
    pub(crate) waited_us: AtomicU64,
    pub(crate) longest_us: AtomicU64,
}

/// The head looks again after so long, for what reached a list just before the lists were shut.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

impl Waits {
    /// Does somebody wait?
    #[inline]
    pub(crate) fn is_awaited(&self) -> bool {
        self.waiting.load(Relaxed) != 0
    }
    pub(crate) fn len(&self) -> usize {
        self.waiting.load(Relaxed)
    }

    /// Something came back.
    #[cold]
    pub(crate) fn note_free(&self) {
        // Release pairs with the Acquire in `release`: a head that is woken for this free finds what was freed.
        self.frees.fetch_add(1, Release);
        // SeqCst pairs with the fence in `release`: either this finds the lock free, or its holder sees the new number.
        fence(SeqCst);
        self.wake_head();
    }

    /// Wakes the head, unless somebody holds the queue, who will.
    fn wake_head(&self) {
        // SAFETY: null, or a box's that goes with `self`.
        let Some(queue) = (unsafe { self.queue.load(Acquire).as_ref() }) else { return };
        match queue.seats.try_lock() {
            Ok(seats) => self.release(queue, seats),
            Err(TryLockError::Poisoned(seats)) => self.release(queue, seats.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
    }

    /// Wakes the head and lets go of the queue; again if something came back meanwhile.
    fn release<'q>(&self, queue: &'q Queue, mut seats: MutexGuard<'q, VecDeque<Arc<Seat>>>) {
        loop {
            // Acquire pairs with the Release in `note_free`.
            let before = self.frees.load(Acquire);
            if let Some(head) = seats.front() {
                // Release pairs with the Acquire in `wait`.
                head.is_head.store(true, Release);
                head.thread.unpark();
            }
            drop(seats);
            // SeqCst as in `note_free`.
            fence(SeqCst);
            if self.frees.load(Relaxed) == before {
                return;
            }
            match queue.seats.try_lock() {
                Ok(again) => seats = again,
                Err(TryLockError::Poisoned(again)) => seats = again.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            }
        }
    }

    fn queue(&self) -> &Queue {
        let queue = self.queue.load(Acquire);
        if queue.is_null() {
            let fresh = Box::into_raw(Box::default());
            // Its Release and Acquire pair with each other and with the other loads of it: whoever loses uses the winner's.
            if let Err(theirs) = self.queue.compare_exchange(queue, fresh, SeqCst, Acquire) {
                // SAFETY: made above, and nobody saw it.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: as below.
                return unsafe { &*theirs };
            }
            // SAFETY: as below.
            return unsafe { &*fresh };
        }
        // SAFETY: a box's that goes with `self`, or that the child of a fork has forgotten.
        unsafe { &*queue }
    }

    /// Waits for its turn, then tries until `attempt` brings something, `patience` ends, or `attempt` has failed `turns`
    /// times, once for every time that something came back or [`LOOK_AGAIN`] passed; or its turn has not come while so many
    /// of the latter passed.
    pub(crate) fn wait<T>(
        &self,
        patience: &Patience<'_>,
        turns: Option<u32>,
        mut attempt: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let start = Instant::now();
        // Who tries a bounded number of times waits no longer than that in line: the head may never give up, and wait for
        // just those pages that the ones behind it have.
        let in_line_until = turns.map(|turns| start + LOOK_AGAIN * turns);
        let queue = self.queue();
        let seat = Arc::new(Seat { thread: current(), is_head: AtomicBool::new(false) });
        patience.cancel.inspect(|cancel| cancel.enter());
        let mut seats = queue.seats.lock().unwrap_or_else(PoisonError::into_inner);
        seats.push_back(seat.clone());
        // Whoever sees the number sees a seat for each: those who come later sit behind. SeqCst: lists take nothing from
        // now on, and frees are noted, before this one tries.
        self.waiting.fetch_add(1, SeqCst);
        let leave = Leave { waits: self, queue, seat: &seat, generation: generation(), patience, start };
        self.release(queue, seats);
        let mut turn = 0;
        let got = loop {
            if patience.is_over() {
                break None;
            }
            if seat.is_head.load(Acquire) {
                if let Some(got) = attempt() {
                    break Some(got);
                }
                turn += 1;
                if turns.is_some_and(|turns| turn >= turns) {
                    break None;
                }
            } else if in_line_until.is_some_and(|end| Instant::now() >= end) {
                break None;
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

    /// In the child of a fork nobody waits, and whoever held the queue is not there. Goes before everything else there.
    pub(crate) fn forget_after_fork(&self) {
        self.queue.store(core::ptr::null_mut(), Relaxed);
        self.waiting.store(0, Relaxed);
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        let queue = self.queue.load(Relaxed);
        if !queue.is_null() {
            // SAFETY: a box's, and nobody waits or frees any more.
            drop(unsafe { Box::from_raw(queue) });
        }
    }
}

/// Gives a seat up, however the wait ends; also if an attempt unwinds.
struct Leave<'w> {
    waits: &'w Waits,
    queue: &'w Queue,
    seat: &'w Arc<Seat>,
    generation: u64,
    patience: &'w Patience<'w>,
    start: Instant,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        // If an attempt forked, nobody waits in the child, this one neither: see `forget_after_fork`.
        if self.generation == generation() {
            let mut seats = self.queue.seats.lock().unwrap_or_else(PoisonError::into_inner);
            seats.retain(|seat| !Arc::ptr_eq(seat, self.seat));
            self.waits.waiting.fetch_sub(1, SeqCst);
            self.waits.release(self.queue, seats);
        }
        self.patience.cancel.inspect(|cancel| cancel.leave());
        self.waits.ended.fetch_add(1, Relaxed);
        let waited_us = self.start.elapsed().as_micros() as u64;
        self.waits.waited_us.fetch_add(waited_us, Relaxed);
        self.waits.longest_us.fetch_max(waited_us, Relaxed);
    }
}
