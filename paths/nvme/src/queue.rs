//! A queue of a drive, for one thread.
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::mem;
use std::os::fd::BorrowedFd;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use crate::Error;
use crate::drive::{Core, NAP};
use crate::future::Pending;
use crate::lane::{Answer, To, command};
use crate::memory::{Buffer, Want};
use crate::request::{Done, Refused, Request};

/// A pair of queues of a [`Drive`](crate::Drive). One thread uses it; it can be moved to another.
///
/// Requests are submitted and polled ([`submit`](Self::submit), [`poll`](Self::poll), [`wait`](Self::wait)), run one at
/// a time ([`run`](Self::run)), or awaited ([`start`](Self::start)), and these may be mixed. Requests under way have no
/// order among themselves.
///
/// Time-outs and the controller's health are looked after in `poll` and `wait`: a program that has requests out calls
/// one of them at least a few times in a second. A reset on one thread holds up the queues of the others until it is
/// over, and their interrupted requests are tried again.
///
/// A queue that is dropped while requests are out gives its pair back to the drive, which has the buffers until the
/// requests are finished; nobody learns how they ended.
///
/// ```
/// use pagemill::{Allocator, Memory};
/// use pagemill_nvme::{Dma, Drive, Fake, Request, Settings};
/// use std::time::Duration;
/// let dma = Dma::new(&Allocator::builder().memory(Memory::anonymous(4096)).build()?);
/// let drive = Drive::on_fake(&dma, &Fake::new(1000), Settings { queues: 2, ..Settings::default() })?;
/// let queues = [drive.queue()?, drive.queue()?];
/// std::thread::scope(|scope| {
///     for queue in queues {
///         let drive = &drive;
///         scope.spawn(move || {
///             for tag in 0..8 {
///                 queue.submit(Request::read(tag, drive.buffer(512).unwrap()), tag).unwrap();
///             }
///             let mut done = Vec::new();
///             while queue.out() > 0 {
///                 queue.wait(Duration::from_secs(1), &mut done).unwrap();
///             }
///             assert!(done.len() == 8 && done.iter().all(|done| done.result.is_ok()));
///         });
///     }
/// });
/// drive.shut_down()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Queue {
    core: Arc<Core>,
    /// The pairs that it has: one, or all for a program that drives all from one thread.
    lanes: Vec<usize>,
    vectors: Vec<u16>,
    /// The lane for the next request.
    turn: Cell<usize>,
    /// Finished requests until a reset that was asked for.
    until_reset: Cell<u64>,
    /// When the controller's health is looked at next, if nothing comes back.
    next_look: Cell<Duration>,
    /// Futures that found no room.
    waiting: RefCell<Vec<Arc<Mutex<Answer>>>>,
    /// The most that was out when one of them found none.
    crowd: Cell<usize>,
}

impl Queue {
    /// A queue of these lanes, which nobody else has.
    pub(crate) fn new(core: Arc<Core>, lanes: Vec<usize>) -> Self {
        let vectors = lanes.iter().filter_map(|&at| core.vector(at)).collect();
        let until_reset = Cell::new(core.settings.reset_every.unwrap_or(u64::MAX));
        let (turn, next_look) = (Cell::new(0), Cell::new(Duration::ZERO));
        Self { core, lanes, vectors, turn, until_reset, next_look, waiting: RefCell::default(), crowd: Cell::new(0) }
    }

    /// Requests under way, and finished ones whose slots an Abort still names.
    #[must_use]
    pub fn out(&self) -> usize {
        self.lanes.iter().map(|&at| self.core.lane(at).out()).sum()
    }
    /// Whether another request can be submitted. A reset by another queue's thread may fill the queue before that, with
    /// requests that are tried again: then [`submit`](Self::submit) says [`Error::Busy`].
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.lanes.iter().any(|&at| self.core.lane(at).has_room())
    }

    fn want(&self) -> Want {
        if self.out() > 0 { Want::Soon } else { Want::Now }
    }

    /// Memory for `len` bytes, or fewer if memory is short. `None` if there is none until requests of this queue come
    /// back. The contents are whatever the pages had before.
    ///
    /// # Errors
    /// `len` is 0 or not whole blocks. Or there is not enough for a single request, and none will come back.
    pub fn buffer(&self, len: usize) -> Result<Option<Buffer>, Error> {
        self.core.buffer(len, self.want())
    }

    /// Submits a request. The controller sees it at the next [`ring`](Self::ring), [`poll`](Self::poll) or
    /// [`wait`](Self::wait); several then cost one write to a register. `tag` comes back with it.
    ///
    /// # Errors
    /// [`Refused`] has the request. [`Error::Busy`]: the queue is full, or memory is short until requests come back.
    /// [`Error::Request`]: the drive has no such blocks, cannot do this, or the buffer is not of its [`Dma`](crate::Dma).
    /// [`Error::Stopped`]: the drive was stopped.
    #[expect(clippy::result_large_err, reason = "the request comes back by value, as it came")]
    pub fn submit(&self, request: Request, tag: u64) -> Result<(), Refused> {
        self.hand_in(request, To::Poll(tag))
    }

    #[expect(clippy::result_large_err, reason = "as in `submit`")]
    pub(crate) fn hand_in(&self, request: Request, to: To) -> Result<(), Refused> {
        let core = &*self.core;
        if let Err(error) = core.check(&request).and_then(|()| core.is_open()) {
            return Err(Refused { request, error });
        }
        let full = Error::Busy("the queue is full");
        let (want, count) = (self.want(), self.lanes.len());
        let mut turns = (0..count).map(|nth| (self.turn.get() + nth) % count);
        let Some(at) = turns.find(|&at| core.lane(self.lanes[at]).has_room()) else {
            return Err(Refused { request, error: full });
        };
        // Without a lock: it may call shrinkers, which are the caller's code.
        let (command, lists) = match command(core, &request, want) {
            Ok(made) => made,
            Err(error) => return Err(Refused { request, error }),
        };
        let mut lane = core.lane(self.lanes[at]);
        // Looked at under the lock: a drive that stops ends the requests of a lane under the same lock.
        let error = match core.is_open() {
            Ok(()) if lane.has_room() => {
                self.turn.set((at + 1) % count);
                lane.take(core, request, to, command, lists);
                return Ok(());
            }
            // A reset by another thread has left its requests to be tried again.
            Ok(()) => full,
            Err(error) => error,
        };
        drop(lane);
        core.memory().unlist(lists);
        Err(Refused { request, error })
    }

    /// Tells the controller about submitted requests.
    pub fn ring(&self) {
        self.lanes.iter().for_each(|&at| self.core.lane(at).ring(&self.core));
    }

    /// Adds the requests that have come back to `done`, and says how many. It does not wait, and wakes futures.
    ///
    /// # Errors
    /// The drive failed for good, and was stopped: all requests that were out are in `done`, with errors. Or it was
    /// stopped before, and nothing is left to come back.
    pub fn poll(&self, done: &mut Vec<Done>) -> Result<usize, Error> {
        let rounded = self.round();
        let before = done.len();
        for &at in &self.lanes {
            done.extend(self.core.lane(at).done.drain(..));
        }
        match rounded {
            // What was finished is handed out first; the next call has nothing but the error.
            Err(Error::Stopped(_)) if done.len() > before => {}
            other => _ = other?,
        }
        Ok(done.len() - before)
    }

    /// One round: how many requests it finished, those of futures among them.
    pub(crate) fn round(&self) -> Result<usize, Error> {
        let landed = self.try_round();
        // Another queue's thread may have ended requests of this one, and the answer to an Abort frees a slot.
        let has_waiting = !self.waiting.borrow().is_empty();
        if has_waiting && (!matches!(landed, Ok(0)) || self.out() < self.crowd.get()) {
            self.crowd.set(0);
            for answer in self.waiting.take() {
                let waker = {
                    let mut answer = answer.lock().unwrap_or_else(PoisonError::into_inner);
                    answer.is_waiting = false;
                    answer.waker.take()
                };
                waker.into_iter().for_each(Waker::wake);
            }
        }
        landed
    }

    fn try_round(&self) -> Result<usize, Error> {
        let core = &*self.core;
        if self.until_reset.get() == 0 {
            self.until_reset.set(core.settings.reset_every.unwrap_or(u64::MAX));
            core.reset_as_asked()?;
        }
        let landed = core.round(&self.lanes)?;
        // Counts finished requests. Counting submitted ones could reset it for ever without progress.
        self.until_reset.set(self.until_reset.get().saturating_sub(landed as u64));
        Ok(landed)
    }

    /// Waits until a request comes back, at most for `limit`, and adds all that have to `done`. With nothing out it
    /// returns at once.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    pub fn wait(&self, limit: Duration, done: &mut Vec<Done>) -> Result<usize, Error> {
        let begin = self.core.now();
        loop {
            let got = self.poll(done)?;
            let left = limit.saturating_sub(self.core.now().saturating_sub(begin));
            if got > 0 || left.is_zero() || self.out() == 0 {
                return Ok(got);
            }
            self.idle(left)?;
        }
    }

    /// Nothing came back: waits for an interrupt, if there are some, and looks at the controller's health now and then.
    fn idle(&self, limit: Duration) -> Result<(), Error> {
        let core = &*self.core;
        if self.vectors.is_empty() {
            std::hint::spin_loop();
        } else {
            core.sleep(&self.lanes, &self.vectors, limit)?;
        }
        let now = core.now();
        if now >= self.next_look.get() {
            self.next_look.set(now + NAP);
            core.look_at_condition()?;
        }
        Ok(())
    }

    /// Runs one request, and waits for it. Others of this queue go on meanwhile.
    ///
    /// ```
    /// # use pagemill::{Allocator, Memory};
    /// # use pagemill_nvme::{BlockRange, Dma, Drive, Fake, Request, Settings};
    /// # let dma = Dma::new(&Allocator::builder().memory(Memory::anonymous(4096)).build()?);
    /// # let drive = Drive::on_fake(&dma, &Fake::new(1000), Settings::default())?;
    /// let queue = drive.queue()?;
    /// queue.run(Request::write_zeroes(BlockRange { lba: 0, blocks: 100 })).ok()?;
    /// queue.run(Request::deallocate(vec![BlockRange { lba: 100, blocks: 50 }])).ok()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn run(&self, request: Request) -> Done {
        self.block_on(self.start(request))
    }

    /// Reads `len` bytes, whole blocks, from block `lba` on, and waits for them.
    ///
    /// ```
    /// # use pagemill::{Allocator, Memory};
    /// # use pagemill_nvme::{Dma, Drive, Fake, Settings};
    /// # let dma = Dma::new(&Allocator::builder().memory(Memory::anonymous(4096)).build()?);
    /// # let drive = Drive::on_fake(&dma, &Fake::new(1000), Settings::default())?;
    /// let queue = drive.queue()?;
    /// let mut buffer = drive.buffer(512)?;
    /// buffer.copy_from(&[7; 512]);
    /// queue.write(3, buffer)?;
    /// queue.flush()?;
    /// assert_eq!(queue.read(3, 512)?.to_vec(), [7; 512]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// How it failed.
    pub fn read(&self, lba: u64, len: usize) -> Result<Buffer, Error> {
        let buffer = self.core.whole_buffer(len)?;
        with_buffer(self.run(Request::read(lba, buffer)))
    }

    /// Writes a buffer to the blocks from `lba` on, waits for it, and returns the buffer.
    ///
    /// # Errors
    /// How it failed. The blocks have their old or their new contents then.
    pub fn write(&self, lba: u64, buffer: Buffer) -> Result<Buffer, Error> {
        with_buffer(self.run(Request::write(lba, buffer)))
    }

    /// Puts all written data on the medium whose requests have come back, and waits for that.
    ///
    /// # Errors
    /// How it failed.
    pub fn flush(&self) -> Result<(), Error> {
        self.run(Request::flush()).result
    }

    /// A request as a future. It is submitted at its first poll. No runtime is needed: whoever polls the future, or
    /// calls [`poll`](Self::poll) of the queue, makes progress, and the future's waker is called when it is finished.
    /// A future that is dropped leaves its request to the drive, which finishes it.
    ///
    /// ```
    /// # use pagemill::{Allocator, Memory};
    /// # use pagemill_nvme::{Dma, Drive, Fake, Request, Settings};
    /// # let dma = Dma::new(&Allocator::builder().memory(Memory::anonymous(4096)).build()?);
    /// # let drive = Drive::on_fake(&dma, &Fake::new(1000), Settings::default())?;
    /// let queue = drive.queue()?;
    /// let copied = queue.block_on(async {
    ///     let read = queue.start(Request::read(0, drive.buffer(4096)?)).await.ok()?;
    ///     let buffer = read.into_buffer().unwrap();
    ///     queue.start(Request::write(8, buffer).durable()).await.ok()
    /// })?;
    /// assert_eq!(copied.lba(), 8);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn start(&self, request: Request) -> Pending<'_> {
        Pending::new(self, request)
    }

    /// Runs a future of this queue's requests on this thread, until it is ready.
    ///
    /// It polls the future again whenever something may have come back, so futures that wait for something else are
    /// polled too, at least ten times in a second.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let woken = Arc::new(Woken(AtomicBool::new(false)));
        let waker = Waker::from(Arc::clone(&woken));
        let (mut future, mut context) = (pin!(future), Context::from_waker(&waker));
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return output;
            }
            // Acquire and Release: what was done before the wake is seen by the next poll.
            if woken.0.swap(false, Ordering::Acquire) {
                continue;
            }
            // An error ends the requests, so the next poll of their futures has it.
            let _ = self.idle(NAP);
        }
    }

    /// The future of this answer is woken when there may be room. It is in the list once, however often it is polled.
    pub(crate) fn wait_for_room(&self, answer: &Arc<Mutex<Answer>>) {
        let was_waiting = mem::replace(&mut answer.lock().unwrap_or_else(PoisonError::into_inner).is_waiting, true);
        if !was_waiting {
            self.waiting.borrow_mut().push(Arc::clone(answer));
        }
        // At least 1: what was out may have come back just now, by another thread.
        self.crowd.set(self.crowd.get().max(self.out()).max(1));
    }

    /// The descriptor that becomes readable when requests come back, for an event loop. `None` without interrupts.
    ///
    /// When it is readable, call [`quiet`](Self::quiet) first and [`poll`](Self::poll) then, so that no completion is
    /// missed. Poll now and then in any case, for time-outs.
    ///
    /// ```
    /// # use pagemill::{Allocator, Memory};
    /// # use pagemill_nvme::{Dma, Drive, Fake, Settings};
    /// # let dma = Dma::new(&Allocator::builder().memory(Memory::anonymous(4096)).build()?);
    /// # let drive = Drive::on_fake(&dma, &Fake::new(1000), Settings::default())?;
    /// let queue = drive.queue()?;
    /// assert!(queue.event().is_none(), "the drive in memory has no interrupts");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn event(&self) -> Option<BorrowedFd<'_>> {
        self.core.bus.event(*self.vectors.first()?)
    }

    /// Makes [`event`](Self::event) unreadable until more requests come back.
    ///
    /// # Errors
    /// What the system said.
    pub fn quiet(&self) -> Result<(), Error> {
        self.vectors.iter().try_for_each(|&vector| self.core.bus.quiet(vector))
    }

    #[cfg(test)]
    pub(crate) fn looks(&self) -> usize {
        self.lanes.iter().map(|&at| self.core.lane(at).pair.looks).sum()
    }
}

/// The waker of [`Queue::block_on`].
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

fn with_buffer(done: Done) -> Result<Buffer, Error> {
    let request = done.ok()?;
    // A request that succeeded has its buffer: only one that could not be stopped comes back without.
    request.into_buffer().ok_or_else(|| Error::Stopped("the buffer is still the controller's".to_owned()))
}

impl Drop for Queue {
    fn drop(&mut self) {
        for &at in &self.lanes {
            let done = self.core.lane(at).abandon();
            drop(done);
        }
    }
}
