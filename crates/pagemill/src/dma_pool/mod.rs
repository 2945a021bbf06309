//! A pool of small blocks that a device finds at an address of its own (the kernel's `dma_pool`).
//!
//! Pages come from the page allocator, a *unit* of one or a few at a time, and stay until the pool is destroyed (C6.3). A
//! program has a block as one word, its address and the pool's number; what moves is a number of 32 bits, which is computed
//! from the word (`block.rs`): between the CPUs' lists, which a block comes from and goes back to as a rule, and one stack that
//! all CPUs share, a batch at a time (C6.2).
//!
//! Nothing of this lies in the blocks: a device that writes to one after it was freed writes to nobody's list (C6.4).
//!
//! # Invariants
//! - D1 A block's number is in one place: on one CPU's list, on the stack, in the hand of one call, or, the block being out,
//!   nowhere.
//! - D2 A block that was handed over as a pointer has the state `RAW` until it comes back. It is written by whoever does either,
//!   without a lock: if two return a block at once, its number is in two places, and a request that finds it while it is out as
//!   a pointer forgets it. Handles cannot come back twice; their blocks have a state where all are kept, in debug builds and with the
//!   feature `full-states`.
//! - D3 Units are only added.
//! - D4 The lists of a poisoned pool, and those of a parent in the child of its fork, hold nothing and take nothing, so that
//!   each call goes the slow way, where that is seen to.
//! - D5 A pool is there as long as a block of it is out: its number leads to it, and no call is in it when it goes (`numbers.rs`).
//!
//! # Locks
//! The number's, which a drop of a block reads, then the stack's, held to move numbers. No page is asked for and no list is
//! touched while the stack's is.
//!
//! The choices, with figures: `docs/adr/0026-the-dma-pool.md`.
use crate::build_error::BuildError;
use crate::device::{Device, DeviceAddr, DeviceError};
use crate::handle::Block;
use crate::misuse::{misuse, report};
use crate::process::Stamp;
use core::fmt;
use core::mem::ManuallyDrop;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use pagemill_core::{CpuId, Gfp, Misuse, MisuseKind, Mobility};
use pagemill_os::{Batch, PerCpu};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

mod block;
mod numbers;
mod shape;
mod slow;
mod stats;
mod tables;
mod vectors;

pub use block::DmaBlock;
use block::{FAR, Words, addr_of_word, words_of};
use numbers::Number;
use shape::Shape;
pub use stats::DmaPoolStats;
use tables::{FULL, OF_HANDLE, RAW, SAFE, Stack, Tables};

/// The one list of each CPU's that is used: blocks have no mobility.
const LIST: Mobility = Mobility::Unmovable;

/// A list holds so many blocks; fewer, down to [`LIST_MIN`], so that they are no more than a MiB. Half of them go to the stack and
/// come from there at once. A round of the lock, some 40 ns, is 0.2 ns for each of 256 blocks; a list of 512 is 2 KiB, which stays in
/// the first cache.
const LIST_MAX: usize = 512;
const LIST_MIN: usize = 256;

/// What a poisoned block holds while it is free, and when it is handed out: the kernel's `POOL_POISON_FREED` and
/// `POOL_POISON_ALLOCATED`.
const POISON_FREE: u8 = 0xa7;
const POISON_OUT: u8 = 0xa9;

/// Blocks of one size with a device address each. Any thread may take and return them; not a signal handler.
///
/// A pool that is dropped with blocks out leaves its pages as they are for ever, mapped for the device, and says so to
/// [`on_misuse`](crate::on_misuse); [`destroy`](Self::destroy) tells how many. In the child of a fork it is the parent's: it
/// hands out nothing there, and has nothing by its statistics.
///
/// ```
/// use pagemill::{Allocator, Device, DmaPool, Gfp, Identity};
/// let allocator = Allocator::builder().pages(1024).build()?;
/// let device = Device::new(&allocator, Identity)?;
/// // Lists of page addresses for a drive: 256 bytes each, none across a page.
/// let pool = DmaPool::create("prp list 256", &device, 256, 256, 4096)?;
/// let mut lists = [const { None }; 64];
/// assert_eq!(pool.alloc_bulk(Gfp::KERNEL, &mut lists)?, 64);
/// assert!(lists.iter().flatten().all(|list| pool.device_addr(list).get().is_multiple_of(256)));
/// assert_eq!(pool.free_bulk(&mut lists), 64);
/// pool.destroy().unwrap();
/// # Ok::<(), pagemill::DeviceError>(())
/// ```
pub struct DmaPool(ManuallyDrop<Arc<Pool>>);

/// What the pool's handle leads to; a device's listing of its pools does too.
pub(crate) struct Pool {
    lists: PerCpu,
    words: Words,
    /// Was a block ever handed over as a pointer? Only then is there one that a request must not hand out (D2).
    has_raw: AtomicBool,
    shape: Shape,
    number: Number,
    /// The process that it is of.
    stamp: Stamp,
    is_poisoned: bool,
    /// How many blocks a list holds.
    limit: usize,
    misused: AtomicU64,
    name: String,
    /// Goes before the tables.
    shared: Mutex<Shared>,
    tables: Tables,
    /// Goes last: it unmaps.
    device: Device,
}

/// What the lock guards.
struct Shared {
    /// Free blocks in `stack[..free]`; garbage above.
    stack: Stack,
    free: usize,
    /// The most that `free` was.
    free_max: usize,
    /// All blocks.
    blocks: usize,
    units: Vec<Block>,
}

#[cold]
#[inline(never)]
fn not_of(name: &str) -> ! {
    panic!("the block is not of the pool {name}")
}

/// From the first byte of the device's memory to the last.
fn memory_of(device: &Device) -> Range<usize> {
    let arenas = device.allocator().arenas();
    let start = arenas.iter().map(|arena| arena.range.start).min().unwrap_or(0);
    start..arenas.iter().map(|arena| arena.range.end).max().unwrap_or(start)
}

/// Without leaving off at the first that is not, which would take longer.
#[inline(always)]
fn are_empty(words: &[u64]) -> bool {
    words.iter().fold(0, |all, word| all | word) == 0
}

impl DmaPool {
    /// A pool of blocks of `size` bytes, at addresses that are multiples of `align` (0 for any), none across a multiple of
    /// `boundary` (0 for no such bounds). A size is at least 16, and a multiple of the alignment. A block of up to a page lies
    /// in one page in any case. The pool begins without any block.
    ///
    /// # Errors
    /// [`DeviceError`]'s `Size`, `Align`, `Boundary` and `Scattered` for what no block can be; `Memory` if the system has no
    /// address space for the pool's tables. [`DeviceError::Forked`].
    pub fn create(
        name: &str,
        device: &Device,
        size: usize,
        align: usize,
        boundary: usize,
    ) -> Result<Self, DeviceError> {
        Self::new(name, device, Shape::new(size, align, boundary, device.is_linear())?, false, memory_of(device))
    }

    /// The same, for finding who writes to blocks that it has freed: they are filled as they come back, and looked at as they
    /// are handed out again. What was written is told to [`on_misuse`](crate::on_misuse) and counted.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    ///
    /// ```
    /// use pagemill::{Allocator, Device, DmaPool, Gfp, Identity};
    /// let device = Device::new(&Allocator::builder().pages(64).build()?, Identity)?;
    /// let pool = DmaPool::create_poisoned("looked after", &device, 64, 0, 0)?;
    /// let block = pool.alloc(Gfp::KERNEL)?;
    /// let stale = block.as_ptr();
    /// pool.free(block).unwrap();
    /// // SAFETY: mapped memory; as a device would that was told of the block and not that it is gone.
    /// unsafe { stale.write(0) };
    /// let again = pool.alloc(Gfp::KERNEL)?;
    /// assert_eq!((again.as_ptr(), pool.stats().misused), (stale, 1));
    /// # pool.free(again).unwrap();
    /// # Ok::<(), pagemill::DeviceError>(())
    /// ```
    pub fn create_poisoned(
        name: &str,
        device: &Device,
        size: usize,
        align: usize,
        boundary: usize,
    ) -> Result<Self, DeviceError> {
        Self::new(name, device, Shape::new(size, align, boundary, device.is_linear())?, true, memory_of(device))
    }

    /// One whose blocks lie in `memory`, as a rule.
    fn new(
        name: &str,
        device: &Device,
        shape: Shape,
        is_poisoned: bool,
        memory: Range<usize>,
    ) -> Result<Self, DeviceError> {
        if device.is_inherited() {
            return Err(DeviceError::Forked);
        }
        let allocator = device.allocator();
        // All that the allocator has, and as much again if it grows; less where numbers of 31 bits end (the last one of them means no block).
        let units = ((2 * allocator.managed_pages().get()) >> shape.order_least.get())
            .clamp(64, ((1 << 31) - 1) >> shape.shift);
        let (tables, stack) = Tables::new(units, &shape)?;
        let shared = Shared { stack, free: 0, free_max: 0, blocks: 0, units: Vec::new() };
        let number = Number::take()?;
        let pool = Arc::new(Pool {
            lists: allocator.zones().first().lists.another_shut().map_err(BuildError::from)?,
            words: Words::new(number.get(), shape.grain, memory),
            has_raw: AtomicBool::new(false),
            number,
            stamp: Stamp::here(),
            is_poisoned,
            limit: ((1 << 20) / shape.size).clamp(LIST_MIN, LIST_MAX),
            misused: AtomicU64::new(0),
            name: name.to_owned(),
            shared: Mutex::new(shared),
            shape,
            tables,
            device: device.clone(),
        });
        device.enter(Arc::downgrade(&(pool.clone() as Arc<_>)));
        numbers::enter(&pool.number, pool.clone());
        Ok(Self(ManuallyDrop::new(pool)))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }
    /// A block's bytes.
    pub fn size(&self) -> usize {
        self.0.shape.size
    }

    /// Where the device finds a block's first byte.
    ///
    /// # Panics
    /// If the block is another pool's.
    #[inline]
    pub fn device_addr(&self, block: &DmaBlock) -> DeviceAddr {
        let pool = &**self.0;
        let is_ours = pool.words.is_ours(block.word());
        match pool.tables.device_addr_at(addr_of_word(block.word())) {
            Some(addr) if is_ours => addr,
            _ => not_of(&pool.name),
        }
    }

    /// One block. Its contents are unspecified, unless `gfp` has [`Gfp::ZERO`].
    ///
    /// # Errors
    /// Where the pool has none free and has to grow: [`DeviceError::Memory`] with the page allocator's, the device's if it
    /// cannot map the page. [`DeviceError::Forked`].
    #[inline(always)]
    pub fn alloc(&self, gfp: Gfp) -> Result<DmaBlock, DeviceError> {
        let pool = &**self.0;
        // A number until the end, in a register: a block that goes through memory is waited for.
        let number = match pool.pop() {
            Some(number) => number,
            None => pool.pop_slow(gfp)?,
        };
        let word = pool.word(number);
        if gfp.contains(Gfp::ZERO) {
            pool.zero(word);
        }
        // SAFETY: it was just taken from the pool.
        Ok(unsafe { DmaBlock::from_word(word) })
    }

    /// One block of zeros.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn zalloc(&self, gfp: Gfp) -> Result<DmaBlock, DeviceError> {
        self.alloc(gfp | Gfp::ZERO)
    }

    /// Fills the empty slots, all of them or none; returns how many those were. Blocks of one unit come in ascending order.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc); the slots are as they were then.
    pub fn alloc_bulk(&self, gfp: Gfp, slots: &mut [Option<DmaBlock>]) -> Result<usize, DeviceError> {
        let (pool, words) = (&**self.0, words_of(slots));
        let n = words.len();
        let mut batch = Batch::new();
        // Empty slots, as a rule, no more than a section brings.
        if !gfp.contains(Gfp::ZERO) && (1..=Batch::CAPACITY).contains(&n) && !pool.is_looking() && are_empty(words) {
            pool.lists.pop_n(LIST, n, &mut batch);
            if batch.is_empty() {
                pool.restock(n, &mut batch);
            }
            if batch.len() == n {
                if pool.words.fill(words, batch.as_slice()) & FAR == 0 {
                    return Ok(n);
                }
                words.fill(0); // Some are far.
            }
        }
        pool.alloc_bulk_slow(gfp, words, &batch)
    }

    /// Returns a block.
    ///
    /// # Errors
    /// [`Misuse`]: it is another pool's, to which it goes back, or this is the child of a fork. Nothing was changed then (of the
    /// parent's).
    #[inline(always)]
    pub fn free(&self, block: DmaBlock) -> Result<(), Misuse> {
        let pool = &**self.0;
        match pool.words.near(block.word()) {
            Some(number) if !FULL && pool.lists.push(LIST, number) => {
                block.into_word();
                Ok(())
            }
            _ => pool.free_slow(block),
        }
    }

    /// Returns what the slots hold and empties them; returns how many blocks that were. Another pool's stays in its
    /// slot, and is told to [`on_misuse`](crate::on_misuse).
    pub fn free_bulk(&self, slots: &mut [Option<DmaBlock>]) -> usize {
        let pool = &**self.0;
        let mut freed = 0;
        // From the last part to the first, so that the first is on top.
        for words in words_of(slots).rchunks_mut(Batch::CAPACITY) {
            let mut batch = Batch::new();
            let grains = pool.words.numbers(words, &mut batch);
            if FULL || grains >= u64::from(FAR) {
                freed += pool.free_each(words);
                continue;
            }
            if pool.lists.push_n(LIST, &batch, 0..batch.len()) || pool.overflow(&batch) {
                words.fill(0);
                freed += batch.len();
            } else {
                freed += pool.free_each(words);
            }
        }
        freed
    }

    /// Hands a block over as a pointer, for C or for a device's queue; [`from_raw`](Self::from_raw) or
    /// [`free_raw`](Self::free_raw) takes it up again.
    ///
    /// # Panics
    /// If the block is another pool's.
    ///
    /// ```
    /// use pagemill::{Allocator, Device, DmaPool, Gfp, Identity};
    /// let device = Device::new(&Allocator::builder().pages(64).build()?, Identity)?;
    /// let pool = DmaPool::create("as pointers", &device, 48, 0, 0)?;
    /// let block = pool.into_raw(pool.alloc(Gfp::KERNEL)?);
    /// // SAFETY: the block is ours; the second is misuse, on purpose.
    /// let (block, twice) = unsafe { (pool.from_raw(block).unwrap(), pool.from_raw(block)) };
    /// assert!(twice.is_err());
    /// pool.free(block).unwrap();
    /// # Ok::<(), pagemill::DeviceError>(())
    /// ```
    pub fn into_raw(&self, block: DmaBlock) -> *mut u8 {
        let pool = &**self.0;
        if !pool.words.is_ours(block.word()) {
            not_of(&pool.name);
        }
        if !pool.has_raw.load(Relaxed) {
            pool.has_raw.store(true, Relaxed); // Once, since every call reads what lies beside it.
        }
        let is_ours = pool.tables.change(pool.place_of(block.word()), OF_HANDLE, RAW);
        assert!(is_ours, "{block:?} has a handle and not its state");
        core::ptr::with_exposed_provenance_mut(addr_of_word(block.into_word()))
    }

    /// Takes up a block again that was handed over as a pointer.
    ///
    /// # Errors
    /// [`Misuse`], saying what is wrong with the address; nothing was changed then.
    ///
    /// # Safety
    /// The caller owns the block: it came from [`into_raw`](Self::into_raw), once.
    pub unsafe fn from_raw(&self, addr: *mut u8) -> Result<DmaBlock, Misuse> {
        self.0.take_raw(addr.addr(), OF_HANDLE)?;
        // SAFETY: a block of the pool's that was out as a pointer, which the caller gave up.
        Ok(unsafe { DmaBlock::from_word(self.0.words.at(addr.addr())) })
    }

    /// Returns a block that was handed over as a pointer.
    ///
    /// # Errors
    /// [`Misuse`], saying what is wrong with the address; nothing was changed then.
    ///
    /// # Safety
    /// The caller owns the block, and neither it nor the device uses it any more.
    ///
    /// ```
    /// use pagemill::{Allocator, Device, DmaPool, Gfp, Identity};
    /// let device = Device::new(&Allocator::builder().pages(64).build()?, Identity)?;
    /// let pool = DmaPool::create("by address", &device, 48, 0, 0)?;
    /// let block = pool.into_raw(pool.alloc(Gfp::KERNEL)?);
    /// // SAFETY: the block is ours; the other two are misuse, on purpose.
    /// unsafe {
    ///     assert!(pool.free_raw(block.wrapping_add(8)).is_err());
    ///     pool.free_raw(block).unwrap();
    ///     assert!(pool.free_raw(block).unwrap_err().to_string().ends_with("is free, or a handle has it"));
    /// }
    /// # Ok::<(), pagemill::DeviceError>(())
    /// ```
    pub unsafe fn free_raw(&self, addr: *mut u8) -> Result<(), Misuse> {
        let place = self.0.take_raw(addr.addr(), SAFE)?;
        let number = self.0.words.near(self.0.words.at(addr.addr())).unwrap_or(FAR | place);
        self.0.give_back(number);
        Ok(())
    }

    /// What it has.
    pub fn stats(&self) -> DmaPoolStats {
        self.0.stats()
    }

    /// Gives its pages back to the allocator. Their arena stays mapped for the device, which must be done with them.
    ///
    /// # Errors
    /// [`BlocksOut`] if blocks are out; the pool comes back with it.
    pub fn destroy(self) -> Result<(), BlocksOut> {
        match self.0.stats().in_use {
            0 => Ok(()),
            out => Err(BlocksOut { pool: self, out }),
        }
    }
}

/// [`DmaPool::destroy`] was refused: blocks are out.
///
/// ```
/// use pagemill::{Allocator, Device, DmaPool, Gfp, Identity};
/// let device = Device::new(&Allocator::builder().pages(64).build()?, Identity)?;
/// let pool = DmaPool::create("prp", &device, 256, 256, 0)?;
/// let block = pool.alloc(Gfp::KERNEL)?;
/// let refused = pool.destroy().unwrap_err();
/// assert_eq!(refused.to_string(), "the pool prp still has 1 block handed out; free it first");
/// refused.pool.free(block).unwrap();
/// refused.pool.destroy().unwrap();
/// # Ok::<(), pagemill::DeviceError>(())
/// ```
pub struct BlocksOut {
    /// The pool, as it was. If it is dropped with blocks out, its pages stay as they are, mapped for the device.
    pub pool: DmaPool,
    /// How many blocks are out.
    pub out: usize,
}

impl fmt::Display for BlocksOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (plural, them) = if self.out == 1 { ("", "it") } else { ("s", "them") };
        write!(f, "the pool {} still has {} block{plural} handed out; free {them} first", self.pool.name(), self.out)
    }
}
impl fmt::Debug for BlocksOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
impl core::error::Error for BlocksOut {}

impl Drop for DmaPool {
    fn drop(&mut self) {
        if self.0.stamp.is_inherited() {
            return; // The parent's; who held a lock of it is not here.
        }
        // SAFETY: once, here; not used after.
        let pool = unsafe { ManuallyDrop::take(&mut self.0) };
        let mut entered = numbers::hold(&pool.number);
        let out = pool.stats().in_use;
        if out == 0 {
            drop(entered.as_mut().and_then(|entered| entered.take()));
            return;
        }
        drop(entered); // It is found by its blocks, and leads to their pages, for ever.
        pool.report(misuse(MisuseKind::PoolInUse { out }, pool.first_addr()));
    }
}

impl fmt::Debug for DmaPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.stats().fmt(f)
    }
}

impl numbers::TakesBack for Pool {
    fn take_back(&self, word: u64) {
        let _ = self.free_word(word);
    }
}

/// As a device lists it.
impl fmt::Display for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.stats().fmt(f)
    }
}

impl Pool {
    /// The word of a block, by its number.
    #[inline(always)]
    fn word(&self, number: u32) -> u64 {
        if number & FAR == 0 { self.words.word(number) } else { self.far_word(number) }
    }

    #[cold]
    #[inline(never)]
    fn far_word(&self, number: u32) -> u64 {
        self.words.at(self.tables.addr_of(&self.shape, number & !FAR))
    }

    /// The number of a block, by its word, if it is the pool's.
    #[inline(always)]
    fn number(&self, word: u64) -> Option<u32> {
        match self.words.near(word) {
            None => self.far_number(word),
            near => near,
        }
    }

    #[cold]
    #[inline(never)]
    fn far_number(&self, word: u64) -> Option<u32> {
        if !self.words.is_ours(word) {
            return None;
        }
        Some(FAR | self.place_of(word))
    }

    /// The place of a block that there is.
    #[inline]
    fn place_of(&self, word: u64) -> u32 {
        match self.tables.place_at(&self.shape, addr_of_word(word)) {
            Ok(place) => place,
            Err(_) => self.nowhere(word),
        }
    }

    #[cold]
    #[inline(never)]
    fn nowhere(&self, word: u64) -> ! {
        panic!("the block {word:#x} of the pool {} lies in no unit", self.name)
    }
}

impl Pool {
    /// Takes a block from this CPU's list.
    #[inline(always)]
    fn pop(&self) -> Option<u32> {
        let number = self.lists.pop(LIST)?;
        if self.is_looking() && !self.hand_out(number) { None } else { Some(number) }
    }

    /// Is what is about to be handed out looked at?
    #[inline(always)]
    fn is_looking(&self) -> bool {
        FULL || self.has_raw.load(Relaxed)
    }

    /// Looks at a block in this call's hand, and marks it where all states are kept. False: it has an owner already, since
    /// somebody freed it twice (D2); it is forgotten.
    #[inline]
    fn hand_out(&self, number: u32) -> bool {
        let word = self.word(number);
        let is_free = self.tables.hand_out(self.place_of(word));
        if !is_free {
            self.found_out(word);
        }
        is_free
    }

    #[cold]
    fn found_out(&self, word: u64) {
        self.report(misuse(MisuseKind::FreedTwice, addr_of_word(word)));
    }

    #[cold]
    fn zero(&self, word: u64) {
        // SAFETY: the block is in this call's hand.
        unsafe { core::ptr::with_exposed_provenance_mut::<u8>(addr_of_word(word)).write_bytes(0, self.shape.size) };
    }

    /// A block that is out as a pointer gets this state instead; its place.
    fn take_raw(&self, addr: usize, to: u8) -> Result<u32, Misuse> {
        let found = match self.stamp.is_inherited() {
            false => self.tables.place_at(&self.shape, addr),
            true => Err(MisuseKind::Foreign),
        };
        match found {
            Ok(place) if self.tables.change(place, RAW, to) => Ok(place),
            Ok(_) => Err(self.report(misuse(MisuseKind::DoubleFree, addr))),
            Err(kind) => Err(self.report(misuse(kind, addr))),
        }
    }

    #[cold]
    fn report(&self, misuse: Misuse) -> Misuse {
        self.misused.fetch_add(1, Relaxed);
        report(misuse)
    }

    fn first_addr(&self) -> usize {
        self.lock().units.first().map_or(0, Block::addr)
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn stats(&self) -> DmaPoolStats {
        let none = DmaPoolStats {
            name: self.name.clone(),
            in_use: 0,
            blocks: 0,
            size: self.shape.size,
            pages: 0,
            metadata: 0,
            misused: self.misused.load(Relaxed),
        };
        if self.stamp.is_inherited() {
            return none; // Who held the lock is not here.
        }
        let lists = (0..self.lists.cpus()).map(|cpu| &self.lists.cpu(CpuId::new(cpu as u32)).lists[LIST.index()]);
        let (mut on_lists, mut opened) = (0, 0);
        for list in lists {
            on_lists += list.len();
            opened += usize::from(list.policy().limit != 0);
        }
        let shared = self.lock();
        let pages = shared.units.iter().map(|unit| unit.order().frames() as usize).sum();
        let of_units = shared.units.len() * (size_of::<tables::Unit>() + size_of::<Block>());
        // Two lines for a list's head and what its sections may write beyond its end.
        let of_lists = opened * (128 + 4 * self.limit);
        let of_states = if self.is_looking() { shared.blocks } else { 0 };
        DmaPoolStats {
            in_use: shared.blocks.saturating_sub(shared.free + on_lists),
            blocks: shared.blocks,
            pages,
            metadata: of_units + of_lists + of_states + 4 * shared.free_max,
            ..none
        }
    }
}
