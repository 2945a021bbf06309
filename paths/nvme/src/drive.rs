//! A drive: a namespace of a controller, and the queues by which threads use it.
//!
//! Each [`Queue`] has a lane (`lane.rs`), behind a lock that its thread takes for each step; nobody else wants it but
//! for a reset. What concerns the whole controller (admin commands, Aborts, resets, the end) is behind the lock
//! `control`.
//!
//! Locks: `control`, then lanes in ascending order. No code of the caller's runs under one: wakers are collected and
//! called afterwards.
//!
//! A command that takes too long is aborted; other commands go on meanwhile. The controller is reset, and its queues
//! are made again, if the command or the Abort has not come back after the same time again, if the controller reports a
//! failure, or if somebody else has reset it. A reset has all lanes: their requests are tried again, which is allowed
//! for requests of whole blocks. After [`ATTEMPTS`] they fail. Each pair knows its oldest command, so looking for late
//! commands takes constant time.
//!
//! A drive that fails for good is stopped, and all its requests come back with an error (I1 of `lane.rs`). If it cannot
//! be stopped, their memory is leaked.
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::task::Waker;
use std::time::Duration;

use pagemill::Page;

use crate::Error;
use crate::bus::Bus;
use crate::controller::{Condition, Controller};
use crate::dma::{Dma, Mapped};
use crate::doorbells::Doorbells;
use crate::fake::Fake;
use crate::identify::{ControllerInfo, NamespaceInfo};
use crate::lane::Lane;
use crate::logs;
use crate::memory::{Buffer, Memory, Want};
use crate::pair::Pair;
use crate::pci::{Address, Function, System};
use crate::queue::Queue;
use crate::request::{BlockRange, MOST_BLOCKS, MOST_RANGES, Op, Request};
use crate::vfio::VfioDevice;

/// Bytes of the largest command if the drive has no limit.
const MOST_BYTES: u64 = 4 << 20;
/// How often a request is tried.
pub(crate) const ATTEMPTS: u32 = 4;
/// The longest sleep before the clock is checked.
pub(crate) const NAP: Duration = Duration::from_millis(100);
/// Messages that are kept for the user.
const MOST_SAID: usize = 256;

/// The settings of a drive.
///
/// ```
/// use pagemill_nvme::Settings;
/// let settings = Settings { queues: 4, is_polled: true, ..Settings::default() };
/// assert_eq!((settings.depth, settings.namespace), (32, 1));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Pairs of queues.
    pub queues: u16,
    /// Requests in each at a time.
    pub depth: u16,
    /// How long a command may take before it is aborted.
    pub timeout: Duration,
    /// The namespace's number.
    pub namespace: u32,
    /// No interrupts: a thread that waits looks for completions all the time.
    pub is_polled: bool,
    /// Doorbells are in memory if the controller can read them there, as emulated ones do.
    pub has_shadows: bool,
    /// The controller is reset after each so many finished requests, to test that nothing is lost.
    pub reset_every: Option<u64>,
}

impl Default for Settings {
    /// A queue of 32 requests, 10 s, the namespace 1, interrupts.
    fn default() -> Self {
        let timeout = Duration::from_secs(10);
        Self { queues: 1, depth: 32, timeout, namespace: 1, is_polled: false, has_shadows: true, reset_every: None }
    }
}

/// Counts of what happened.
///
/// ```
/// assert_eq!(pagemill_nvme::Counts::default().resets, 0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    /// Commands that were submitted, with those that were tried again.
    pub commands: u64,
    /// Commands that were tried again.
    pub retries: u64,
    /// Commands that took too long.
    pub aborts: u64,
    /// Resets of the controller.
    pub resets: u64,
    /// Completions with an impossible head of the submission queue. Nothing depends on the head.
    pub wrong_heads: u64,
}

impl Counts {
    fn plus(self, other: Self) -> Self {
        Self {
            commands: self.commands + other.commands,
            retries: self.retries + other.retries,
            aborts: self.aborts + other.aborts,
            resets: self.resets + other.resets,
            wrong_heads: self.wrong_heads + other.wrong_heads,
        }
    }
}

/// A namespace of an NVMe controller that this process drives.
///
/// It hands out [queues](Self::queue), one for each thread. A clone is the same drive; opening a drive that is open is
/// refused. Several drives may be open, each with its own queues, over one [`Dma`].
///
/// When the drive and all its queues are dropped, the controller is shut down in order, so that its write cache is on
/// the medium. [`shut_down`](Self::shut_down) does so at once, waits for requests, and says if it failed.
///
/// ```no_run
/// use pagemill::Allocator;
/// use pagemill_nvme::{Dma, Drive, Settings};
/// let dma = Dma::new(&Allocator::builder().pages(16 << 10).build()?);
/// let drive = Drive::open(&dma, "0000:01:00.0".parse()?, Settings { queues: 2, ..Settings::default() })?;
/// println!("{}: {} bytes", drive.info().model, drive.namespace().bytes());
/// let first_block = drive.queue()?.read(0, drive.namespace().block_size as usize)?;
/// println!("{:x?}", first_block.to_vec());
/// drive.shut_down()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Drive {
    core: Arc<Core>,
}

/// What concerns the whole controller.
struct Control {
    controller: Controller,
    resets: u64,
    aborts: u64,
}

/// What a drive and its queues share.
///
/// The fields are dropped in this order: the controller and the lanes, which give memory back to the allocator, then
/// the access to the device, then the mapping of the allocator, if no other drive has it.
pub(crate) struct Core {
    control: Mutex<Control>,
    lanes: Box<[Mutex<Lane>]>,
    /// A reset is about to take all lanes. Their threads wait for it, instead of taking the locks again and again.
    is_halting: AtomicBool,
    /// Aborts are out.
    is_aborting: AtomicBool,
    /// It takes no more requests: it is about to be shut down, or was.
    is_closing: AtomicBool,
    /// Why it failed for good.
    failed: OnceLock<String>,
    said: Mutex<VecDeque<String>>,
    pub(crate) settings: Settings,
    pub(crate) doorbells: Doorbells,
    pub(crate) info: ControllerInfo,
    pub(crate) namespace: NamespaceInfo,
    pub(crate) bus: Arc<dyn Bus>,
    mapped: Arc<Mapped>,
}

impl Drive {
    /// Opens the drive at a PCI address, which is bound to `vfio-pci` (`pagemill nvme bind`), and starts its controller.
    ///
    /// # Errors
    /// Why this machine, the kernel or the controller refuses; [`Error::next_step`] says what to do.
    pub fn open(dma: &Dma, address: Address, settings: Settings) -> Result<Self, Error> {
        let system = System::this();
        let function = Function::open(&system, address)?;
        let mapped = dma.attach(&system, &function)?;
        let vectors = if settings.is_polled { 0 } else { settings.queues.saturating_add(1) };
        let bus = VfioDevice::open(mapped.container()?, &function, vectors)?;
        let controller = Controller::new(Arc::new(bus), mapped.memory(), settings.timeout)?;
        // A clone: if this fails, the mapping outlives the controller.
        Self::start(controller, Arc::clone(&mapped), settings)
    }

    /// A drive in this process's memory, for tests of programs.
    ///
    /// # Errors
    /// As [`open`](Self::open): settings that the controller does not support, too little memory, or a drive that is open.
    pub fn on_fake(dma: &Dma, fake: &Fake, settings: Settings) -> Result<Self, Error> {
        let bus = fake.open()?;
        let mapped = dma.attach_fake(fake)?;
        let controller = Controller::new(bus, mapped.memory(), settings.timeout)?;
        Self::start(controller, Arc::clone(&mapped), settings)
    }

    /// Starts the controller and gives it its queues.
    fn start(mut controller: Controller, mapped: Arc<Mapped>, settings: Settings) -> Result<Self, Error> {
        controller.start()?;
        let info = controller.info()?;
        let id = settings.namespace;
        let namespace = controller.namespace(id)?.ok_or_else(|| {
            Error::Request(format!("there is no namespace {id}: `pagemill nvme identify` lists those there are"))
        })?;
        namespace.check_plain(&info)?;
        let most = controller.longest_queue() - 1;
        if settings.depth == 0 || settings.depth > most {
            let why = format!("a depth of {}: this controller's queues hold {most}", settings.depth);
            return Err(Error::Request(why));
        }
        if settings.queues == 0 {
            return Err(Error::Request("0 queues: one is the least".to_owned()));
        }
        let pairs = (1..=settings.queues).map(|id| Pair::new(mapped.memory(), id, settings.depth + 1));
        let lanes = pairs.map(|pair| Ok(Mutex::new(Lane::new(pair?)))).collect::<Result<_, Error>>()?;
        let stride = controller.stride();
        let doorbells = match info.has_shadow_doorbells && settings.has_shadows {
            true => Doorbells::shadowed(stride, mapped.memory())?,
            false => Doorbells::registers(stride),
        };
        let core = Core {
            doorbells,
            bus: Arc::clone(&controller.bus),
            control: Mutex::new(Control { controller, resets: 0, aborts: 0 }),
            lanes,
            is_halting: AtomicBool::new(false),
            is_aborting: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
            failed: OnceLock::new(),
            said: Mutex::default(),
            settings,
            info,
            namespace,
            mapped,
        };
        core.make_queues(&mut core.control(), &core.all_lanes())?;
        Ok(Self { core: Arc::new(core) })
    }

    /// A queue that no other thread has. There are [`Settings::queues`] of them; one that is dropped can be had again.
    ///
    /// # Errors
    /// All are taken, or the drive was stopped.
    pub fn queue(&self) -> Result<Queue, Error> {
        self.core.is_open()?;
        for at in 0..self.core.lanes.len() {
            let mut lane = self.core.lane(at);
            if !lane.is_taken {
                lane.is_taken = true;
                drop(lane);
                return Ok(Queue::new(Arc::clone(&self.core), vec![at]));
            }
        }
        let count = self.core.lanes.len();
        Err(Error::Request(format!("all {count} queues are taken: open the drive with more, or drop one")))
    }

    /// All queues as one, for a program that uses them from one thread. None is taken yet.
    pub(crate) fn all(&self) -> Queue {
        let all = 0..self.core.lanes.len();
        all.clone().for_each(|at| self.core.lane(at).is_taken = true);
        Queue::new(Arc::clone(&self.core), all.collect())
    }

    /// What the controller says of itself.
    #[must_use]
    pub fn info(&self) -> &ControllerInfo {
        &self.core.info
    }
    /// What the controller says of the namespace.
    #[must_use]
    pub fn namespace(&self) -> &NamespaceInfo {
        &self.core.namespace
    }
    /// Counts of what happened, over all queues.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.core.counts()
    }
    /// The drive's health log. It is read at once, beside requests, and waited for: at most for [`Settings::timeout`].
    ///
    /// # Errors
    /// The controller refused, does not answer, or was stopped.
    pub fn health(&self) -> Result<logs::Health, Error> {
        let mut control = self.core.control();
        self.core.is_open()?;
        control.controller.health_log()
    }

    /// The latest errors of the drive, the newest first: at most `most`, 64, and as many as its log has.
    ///
    /// # Errors
    /// As [`health`](Self::health).
    pub fn errors(&self, most: u16) -> Result<Vec<logs::ErrorEntry>, Error> {
        let mut control = self.core.control();
        self.core.is_open()?;
        control.controller.error_log(most.min(self.core.info.error_entries))
    }

    /// The messages since the last call, a line each: what was tried again, aborted, reset. The oldest go if there are
    /// more than 256.
    #[must_use]
    pub fn said(&self) -> Vec<String> {
        self.core.said.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect()
    }
    /// Time since some moment, by the clock that times requests.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.core.now()
    }
    /// Bytes that one command may move.
    #[must_use]
    pub fn max_transfer(&self) -> usize {
        self.core.max_transfer()
    }
    /// The most blocks of one command that moves no data: zeros, or one range that is deallocated.
    pub(crate) fn most_blocks(&self, op: Op) -> u64 {
        let info = &self.core.info;
        match op {
            Op::WriteZeroes => self.core.max_zeroes(),
            _ => {
                let range = info.deallocate_range_blocks.map_or(u32::MAX.into(), u64::from);
                range.min(info.deallocate_blocks.unwrap_or(u64::MAX))
            }
        }
    }
    pub(crate) fn pools(&self) -> String {
        self.core.memory().pools()
    }

    /// Memory for the data of a request, on any thread. The contents are whatever the pages had before.
    ///
    /// # Errors
    /// [`Error::Request`] or [`Error::Exhausted`]: there is not so much memory.
    pub fn buffer(&self, len: usize) -> Result<Buffer, Error> {
        self.core.whole_buffer(len)
    }

    /// A buffer of the program's own pages, which keep their contents. They are of the [`Dma`]'s allocator.
    ///
    /// ```
    /// # use pagemill::{Allocator, Gfp, Memory};
    /// # use pagemill_nvme::{Dma, Drive, Fake, Settings};
    /// let allocator = Allocator::builder().memory(Memory::anonymous(4096)).build()?;
    /// # let drive = Drive::on_fake(&Dma::new(&allocator), &Fake::new(1000), Settings::default())?;
    /// let mut page = allocator.alloc_page(Gfp::KERNEL)?;
    /// page[..4096].fill(7);
    /// drive.queue()?.write(0, drive.buffer_of(vec![page])?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// There are no pages, or one is of another allocator.
    pub fn buffer_of(&self, pages: Vec<Page>) -> Result<Buffer, Error> {
        self.core.memory().buffer_of(pages)
    }

    /// Waits for the requests that are out, on all threads, and shuts the controller down in order: its queues are
    /// deleted, and its write cache is on the medium. From the call on, queues accept no more requests; what comes back
    /// meanwhile is had by their next polls.
    ///
    /// # Errors
    /// The controller does not stop in order, or the drive was stopped before.
    pub fn shut_down(&self) -> Result<Counts, Error> {
        let core = &*self.core;
        // Relaxed: lanes look at it under their locks, which this thread takes for each round.
        if core.is_closing.swap(true, Relaxed) || core.failed.get().is_some() {
            return Err(core.stopped());
        }
        let all: Vec<_> = (0..core.lanes.len()).collect();
        while all.iter().any(|&at| core.lane(at).out() > 0) {
            match core.round(&all) {
                Ok(0) => core.idle()?,
                Ok(_) => {}
                // Another thread has taken the last one.
                Err(Error::Stopped(_)) if core.failed.get().is_none() => {}
                Err(error) => return Err(error),
            }
        }
        core.halt()?;
        if core.failed.get().is_some() {
            return Err(core.stopped());
        }
        Ok(core.counts())
    }
}

impl Core {
    fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub(crate) fn lane(&self, at: usize) -> MutexGuard<'_, Lane> {
        // Relaxed: it is a hint, against starving the thread that resets.
        if self.is_halting.load(Relaxed) {
            drop(self.control());
        }
        self.lanes[at].lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// All lanes. The caller has `control`, or nobody else has the core.
    fn all_lanes(&self) -> Vec<MutexGuard<'_, Lane>> {
        self.is_halting.store(true, Relaxed);
        let lanes = self.lanes.iter().map(|lane| lane.lock().unwrap_or_else(PoisonError::into_inner)).collect();
        self.is_halting.store(false, Relaxed);
        lanes
    }
    pub(crate) fn memory(&self) -> &Memory {
        self.mapped.memory()
    }
    pub(crate) fn now(&self) -> Duration {
        self.bus.now()
    }
    pub(crate) fn say(&self, what: String) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.len() == MOST_SAID {
            said.pop_front();
        }
        said.push_back(what);
    }
    /// What a request does, for a message.
    pub(crate) fn what(&self, request: &Request) -> String {
        request.what(self.namespace.block_size)
    }
    pub(crate) fn is_open(&self) -> Result<(), Error> {
        let is_open = !self.is_closing.load(Relaxed) && self.failed.get().is_none();
        if is_open { Ok(()) } else { Err(self.stopped()) }
    }
    fn stopped(&self) -> Error {
        Error::Stopped(self.failed.get().cloned().unwrap_or_else(|| "it was shut down".to_owned()))
    }
    fn counts(&self) -> Counts {
        let lanes = (0..self.lanes.len()).map(|at| self.lane(at).counts);
        let sum = lanes.fold(Counts::default(), Counts::plus);
        let control = self.control();
        sum.plus(Counts { resets: control.resets, aborts: control.aborts, ..Counts::default() })
    }

    /// The most blocks that one command fills with zeros.
    pub(crate) fn max_zeroes(&self) -> u64 {
        let limit = self.info.zeroes_bytes.map_or(MOST_BLOCKS, |bytes| bytes / u64::from(self.namespace.block_size));
        limit.clamp(1, MOST_BLOCKS)
    }
    /// The most ranges that one command deallocates.
    pub(crate) fn max_ranges(&self) -> usize {
        self.info.deallocate_ranges.map_or(MOST_RANGES, usize::from).min(MOST_RANGES)
    }

    pub(crate) fn max_transfer(&self) -> usize {
        let by_blocks = MOST_BLOCKS * u64::from(self.namespace.block_size);
        // At least one block: `check_plain` has checked that.
        self.info.max_transfer.unwrap_or(MOST_BYTES).min(by_blocks).min(1 << 30) as usize
    }

    pub(crate) fn buffer(&self, len: usize, want: Want) -> Result<Option<Buffer>, Error> {
        let block = self.namespace.block_size as usize;
        if len == 0 || !len.is_multiple_of(block) {
            return Err(Error::Request(format!("{len} bytes: the drive has blocks of {block} bytes")));
        }
        match self.memory().buffer(len, block, want)? {
            None if want == Want::Now => Err(self.memory().nothing_left(len)),
            buffer => Ok(buffer),
        }
    }
    pub(crate) fn whole_buffer(&self, len: usize) -> Result<Buffer, Error> {
        match self.buffer(len, Want::Now)? {
            Some(buffer) if buffer.len() == len => Ok(buffer),
            _ => Err(self.memory().nothing_left(len)),
        }
    }

    /// Whether the drive can do a request.
    pub(crate) fn check(&self, request: &Request) -> Result<(), Error> {
        let refuse = |why: String| Err(Error::Request(format!("{}: {why}", self.what(request))));
        let NamespaceInfo { id, blocks: there, block_size, .. } = self.namespace;
        let is_inside = |lba: u64, blocks: u64| lba.checked_add(blocks).is_some_and(|end| end <= there);
        match (request.op, &request.buffer) {
            (Op::Flush, _) => return Ok(()),
            (Op::Read | Op::Write, Some(buffer)) => {
                if !self.memory().is_of(buffer) {
                    return refuse("the buffer is another drive's, which has other addresses for it".to_owned());
                }
                if !buffer.len().is_multiple_of(block_size as usize) || buffer.len() > self.max_transfer() {
                    let (len, most) = (buffer.len(), self.max_transfer());
                    return refuse(format!("{len} bytes: take a multiple of {block_size}, up to {most}"));
                }
            }
            (Op::Read | Op::Write, None) => return refuse("there is no buffer".to_owned()),
            (Op::WriteZeroes, _) => {
                if !self.info.has_write_zeroes {
                    return Err(Error::Unsupported("the controller has no command to write zeros".to_owned()));
                }
                let most = self.max_zeroes();
                if request.blocks == 0 || request.blocks > most {
                    return refuse(format!("one command takes 1 to {most} blocks"));
                }
            }
            (Op::Deallocate, _) => {
                if !self.info.has_deallocate {
                    return Err(Error::Unsupported("the controller has no command to deallocate blocks".to_owned()));
                }
                let most = self.max_ranges();
                let blocks = self.info.deallocate_range_blocks.unwrap_or(u32::MAX);
                let all = self.info.deallocate_blocks.unwrap_or(u64::MAX);
                let fits = |range: &BlockRange| (1..=u64::from(blocks)).contains(&range.blocks);
                if request.ranges.is_empty()
                    || request.ranges.len() > most
                    || !request.ranges.iter().all(fits)
                    || request.ranges.iter().map(|range| range.blocks).sum::<u64>() > all
                {
                    let each = format!("1 to {most} ranges of 1 to {blocks} blocks");
                    return refuse(format!("one command takes {each}, {all} in all"));
                }
                if let Some(range) = request.ranges.iter().find(|range| !is_inside(range.lba, range.blocks)) {
                    let BlockRange { lba, blocks } = range;
                    return refuse(format!("{blocks} blocks from {lba} on: namespace {id} has {there}"));
                }
                return Ok(());
            }
        }
        let blocks = request.count(block_size);
        if !is_inside(request.lba, blocks) {
            return refuse(format!("namespace {id} has {there}"));
        }
        Ok(())
    }

    /// The number of the interrupt of a lane; the admin queue has 0, and all are shared if there are too few.
    pub(crate) fn vector(&self, at: usize) -> Option<u16> {
        let vectors = self.bus.vectors();
        (vectors > 0).then(|| (at as u16 + 1) % vectors)
    }

    fn make_queues(&self, control: &mut Control, lanes: &[MutexGuard<'_, Lane>]) -> Result<(), Error> {
        let controller = &mut control.controller;
        let wanted = self.settings.queues;
        let granted = controller.grant(wanted)?.min(controller.doorbells());
        if granted < wanted {
            return Err(Error::Request(format!("{wanted} queues: this controller grants {granted}")));
        }
        if let Some(shadows) = self.doorbells.shadows() {
            controller.shadow(shadows)?;
        }
        for (at, lane) in lanes.iter().enumerate() {
            controller.create(&lane.pair, self.vector(at))?;
        }
        Ok(())
    }

    /// One round over lanes of one thread: what was queued goes out, what has come back is finished, what is late is
    /// aborted. Says how many requests are finished.
    ///
    /// # Errors
    /// The drive failed for good: it has been stopped, and its requests are finished. Or it was stopped before, and
    /// nothing is out.
    pub(crate) fn round(&self, lanes: &[usize]) -> Result<usize, Error> {
        let mut wakers = Vec::new();
        let landed = self.try_round(lanes, &mut wakers);
        wakers.into_iter().for_each(Waker::wake);
        landed.inspect_err(|error| self.fail(error))
    }

    fn try_round(&self, lanes: &[usize], wakers: &mut Vec<Waker>) -> Result<usize, Error> {
        // Relaxed: a late look costs a round, no more.
        let is_aborting = self.is_aborting.load(Relaxed);
        if is_aborting {
            self.release_answered()?;
        }
        let (now, mut landed, mut out, mut is_late) = (self.now(), 0, 0, is_aborting);
        for &at in lanes {
            let mut lane = self.lane(at);
            if lane.out() > 0 {
                lane.ring(self);
                landed += lane.reap(self, wakers)?;
                is_late |= lane.pair.oldest().is_some_and(|(_, flight)| flight.due <= now);
                out += lane.out();
            }
        }
        // Also if requests have come back: a lost command has to be found while others go on.
        if is_late {
            landed += self.look_at_the_clock(lanes, wakers)?;
        }
        if landed == 0 && out == 0 {
            self.is_open()?;
        }
        Ok(landed)
    }

    /// Slots of commands whose Aborts were answered can be used again.
    fn release_answered(&self) -> Result<(), Error> {
        let mut control = self.control();
        for (queue, id) in control.controller.answered()? {
            self.lane(usize::from(queue) - 1).pair.release(id);
        }
        self.is_aborting.store(control.controller.is_aborting(), Relaxed);
        Ok(())
    }

    /// Nothing came back while it is shut down.
    fn idle(&self) -> Result<(), Error> {
        self.look_at_condition()?;
        std::thread::yield_now();
        Ok(())
    }

    /// Sleeps until an interrupt comes, or the next command will be late, at most for `limit`.
    pub(crate) fn sleep(&self, lanes: &[usize], vectors: &[u16], limit: Duration) -> Result<(), Error> {
        let dues = lanes.iter().filter_map(|&at| Some(self.lane(at).pair.oldest()?.1.due));
        let next = dues.min().unwrap_or(Duration::MAX).saturating_sub(self.now());
        // Another thread may take an interrupt that is shared.
        let is_shared = usize::from(self.bus.vectors()) <= self.lanes.len();
        let most = if is_shared && lanes.len() < self.lanes.len() { Duration::from_millis(1) } else { NAP };
        let waited = self.bus.wait(vectors, next.max(Duration::from_millis(1)).min(most).min(limit));
        waited.inspect_err(|error| self.fail(error))
    }

    /// Resets the controller if it has failed, or if somebody else has reset it.
    pub(crate) fn look_at_condition(&self) -> Result<(), Error> {
        let mut control = match self.control.try_lock() {
            Ok(control) => control,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Another thread is at it.
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        if !control.controller.may_be_running() {
            return Ok(()); // It was stopped, for good.
        }
        let mut wakers = Vec::new();
        let looked = match control.controller.condition() {
            Ok(Condition::Well) => Ok(()),
            Ok(condition) => self.restart(&mut control, condition.said(), Some(&mut wakers)),
            Err(error) => Err(error),
        };
        drop(control);
        wakers.into_iter().for_each(Waker::wake);
        looked.inspect_err(|error| self.fail(error))
    }

    /// Has commands aborted that take too long. All are given the same time, so each pair's oldest is its first to be
    /// due. Says whether requests may have failed (1).
    fn look_at_the_clock(&self, lanes: &[usize], wakers: &mut Vec<Waker>) -> Result<usize, Error> {
        let mut control = self.control();
        let (now, timeout) = (self.now(), self.settings.timeout);
        let seconds = timeout.as_secs_f64();
        if control.controller.aborting_since().is_some_and(|since| now.saturating_sub(since) >= timeout) {
            let why = format!("no answer to an Abort within {seconds} s");
            self.restart(&mut control, &why, Some(wakers))?;
            return Ok(1);
        }
        for &at in lanes {
            let mut lane = self.lane(at);
            let id = lane.pair.id();
            while let Some((command, flight)) = lane.pair.oldest()
                && flight.due <= now
            {
                if flight.is_aborted {
                    drop(lane);
                    self.restart(&mut control, "a command came back neither by itself nor by an Abort", Some(wakers))?;
                    return Ok(1);
                }
                // With as many Aborts out as the controller takes, this one's turn comes when another is answered.
                if !control.controller.abort(id, command, self.info.aborts) {
                    if control.controller.aborting_since().is_some() {
                        break;
                    }
                    drop(lane);
                    self.restart(&mut control, "a command is late, and there is no room for an Abort", Some(wakers))?;
                    return Ok(1);
                }
                flight.is_aborted = true;
                flight.due = now.saturating_add(timeout);
                lane.pair.keep(command);
                control.aborts += 1;
                self.is_aborting.store(true, Relaxed);
                self.say(format!("command {command} of queue {id} took longer than {seconds} s: aborting it"));
            }
        }
        Ok(0)
    }

    /// A reset that the settings ask for, to test that nothing is lost.
    pub(crate) fn reset_as_asked(&self) -> Result<(), Error> {
        let mut control = self.control();
        if self.is_open().is_err() {
            return Ok(());
        }
        // An answer shows that it has fetched all commands. QEMU (7.2) would continue to fetch from queues that a
        // reset has just freed, and crash.
        let reset = control.controller.info().and_then(|_| self.restart(&mut control, "a reset was asked for", None));
        drop(control);
        reset.inspect_err(|error| self.fail(error))
    }

    /// Resets the controller. What was out is to be tried again. If the reset has a cause in the controller, what was
    /// tried too often has failed, and `wakers` gets those that wait for it.
    fn restart(&self, control: &mut Control, why: &str, wakers: Option<&mut Vec<Waker>>) -> Result<(), Error> {
        let mut lanes = self.all_lanes();
        let out: usize = lanes.iter().map(|lane| lane.commands()).sum();
        self.say(format!("{why}: resetting the controller, with {out} requests to be tried again"));
        control.resets += 1;
        // From here on it has forgotten what was out; until then what was out is in the pairs.
        control.controller.start()?;
        self.is_aborting.store(false, Relaxed);
        lanes.iter_mut().for_each(|lane| lane.interrupt());
        // What is tried again was cut for the blocks that there were: with larger ones the drive would go past its lists.
        let (info, namespace) = (control.controller.info()?, control.controller.namespace(self.namespace.id)?);
        let is_same = info.serial == self.info.serial && info.max_transfer == self.info.max_transfer;
        if !is_same || namespace != Some(self.namespace) {
            return Err(Error::Broken("the drive is another one since the reset".to_owned()));
        }
        self.make_queues(control, &lanes)?;
        if let Some(wakers) = wakers {
            lanes.iter_mut().for_each(|lane| lane.give_up(self, wakers));
        }
        Ok(())
    }

    /// Stops the drive for good. All that is out has failed.
    fn fail(&self, error: &Error) {
        if matches!(error, Error::Stopped(_)) {
            return;
        }
        let why = error.to_string();
        _ = self.failed.set(why.clone());
        let mut wakers = Vec::new();
        let mut control = self.control();
        let is_stopped = control.controller.stop();
        self.all_lanes().iter_mut().for_each(|lane| lane.end(self, &why, is_stopped, &mut wakers));
        drop(control);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Shuts the controller down in order, with nothing out.
    fn halt(&self) -> Result<(), Error> {
        let mut control = self.control();
        let queues = 1..=self.settings.queues;
        control.controller.shut_down(queues, self.info.shutdown_limit())
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // Whatever led here is what is told; an order to shut down is tried nevertheless.
        _ = self.halt();
        let is_stopped = self.control().controller.stop();
        let mut wakers = Vec::new();
        self.all_lanes().iter_mut().for_each(|lane| lane.end(self, "it was closed", is_stopped, &mut wakers));
        wakers.into_iter().for_each(Waker::wake);
        if !is_stopped {
            self.doorbells.leak();
        }
    }
}

#[cfg(test)]
mod tests;
