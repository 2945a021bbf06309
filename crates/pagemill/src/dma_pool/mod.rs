//! A pool of small blocks with an address for a device (the kernel's `dma_pool`).
//!
//! # The way of a request
//! Pages come from the page allocator, one *unit* of one or a few pages at a time, and stay until the pool is destroyed
//! (C6.3). A request usually takes a block from this CPU's list, and a free returns it to the list of the CPU that
//! frees. Batches move between the lists and one stack that all CPUs share (C6.2). A program holds a block as one word:
//! its address and the pool's number. Lists and the stack hold a block's 32-bit number, which is computed from the word
//! (`block.rs`).
//!
//! None of this is stored in the blocks: a device that writes to a freed block corrupts no list (C6.4).
//!
//! # Invariants
//! - D1 A block's number is in one place: on one CPU's list, on the stack, or in the hand of one call. If the block is
//!   out, its number is nowhere.
//! - D2 A block that was handed over as a pointer has the state `RAW` until it returns. The threads that hand it over
//!   and return it write the state, without a lock. If two threads return a block at once, its number is in two places;
//!   a request that finds the number while the block is out as a pointer discards it. Handles cannot be returned twice.
//!   Their blocks have a state only if all states are kept: in debug builds and with the feature `full-states`.
//! - D3 Units are only added.
//! - D4 The lists of a poisoned pool are empty and accept nothing, and so are those of a parent's pool in a forked
//!   child. So each call takes the slow path, which handles these cases.
//! - D5 A pool exists as long as a block of it is out: its number leads to it, and no call is inside it when it is
//!   freed (`numbers.rs`).
//!
//! # Locks
//! First that of the device's list of pools; then the lock of the pool's number, which dropping a block reads; then the stack's, which is held only to move
//! numbers. No page is requested and no list is touched under the stack's lock.
//!
//! The decisions, with figures: `docs/adr/0026-the-dma-pool.md`.
use crate::build_error::BuildError;
use crate::device::{Device, DeviceAddr, DeviceError, PoolLine};
use crate::handle::{Block, Page};
use crate::misuse::{misuse, report};
use crate::process::Stamp;
use crate::run::Run;
use core::fmt;
use core::mem::ManuallyDrop;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use pagemill_core::{CpuId, Gfp, Misuse, MisuseKind, Mobility};
use pagemill_os::{Batch, PerCpu};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

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

/// The list of each CPU that is used. Blocks have no mobility.
const LIST: Mobility = Mobility::Unmovable;

/// The most blocks on a list; for large blocks fewer, down to [`LIST_MIN`], so that they take at most one MiB. Half of
/// a list moves to or from the stack at once. One round of the lock takes some 40 ns, which is 0.2 ns for each of 256
/// blocks; a list of 512 numbers is 2 KiB and stays in the first-level cache.
const LIST_MAX: usize = 512;
const LIST_MIN: usize = 256;

/// The bytes of a poisoned block while it is free and when it is handed out: the kernel's `POOL_POISON_FREED` and
/// `POOL_POISON_ALLOCATED`.
const POISON_FREE: u8 = 0xa7;
const POISON_OUT: u8 = 0xa9;

/// A pool of blocks of one size, each with a device address. Any thread may allocate and free; a signal handler may
/// not.
///
/// If a pool is dropped with blocks out, its pages stay for ever, mapped for the device, and
/// [`on_misuse`](crate::on_misuse) is told; [`destroy`](Self::destroy) returns the number of blocks instead. In a
/// forked child, a pool is still the parent's: it hands out nothing there, and its statistics show no blocks.
///
/// ```
/// use pagemill::{Allocator, Device, DmaPool, Gfp, Identity};
/// let allocator = Allocator::builder().pages(1024).build()?;
/// let device = Device::new(&allocator, Identity)?;
/// // Lists of page addresses for a drive: 256 bytes each, and none crosses a page.
/// let pool = DmaPool::create("prp list 256", &device, 256, 256, 4096)?;
/// let mut lists = [const { None }; 64];
/// assert_eq!(pool.alloc_bulk(Gfp::KERNEL, &mut lists)?, 64);
/// assert!(lists.iter().flatten().all(|list| pool.device_addr(list).get().is_multiple_of(256)));
/// assert_eq!(pool.free_bulk(&mut lists), 64);
/// pool.destroy().unwrap();
/// # Ok::<(), pagemill::DeviceError>(())
/// ```
pub struct DmaPool(ManuallyDrop<Arc<Pool>>);

/// The pool behind its handle. A device's list of pools refers to it too.
pub(crate) struct Pool {
    lists: PerCpu,
    words: Words,
    /// Whether a block was ever handed over as a pointer. Only then may a request find a block that it must not hand
    /// out (D2).
    has_raw: AtomicBool,
    shape: Shape,
    number: Number,
    /// The process that it was made in.
    stamp: Stamp,
    is_poisoned: bool,
    /// The most blocks on a list.
    limit: usize,
    misused: AtomicU64,
    name: String,
    /// Declared before the tables, so that it is dropped first.
    shared: Mutex<FreeBlocks>,
    tables: Tables,
    /// Declared last, so that it is dropped last: that may unmap the memory.
    device: Device,
}

/// What the lock guards.
struct FreeBlocks {
    /// The numbers of free blocks are `stack[..free]`. The rest is garbage.
    stack: Stack,
    free: usize,
    /// The largest value that `free` had.
    free_max: usize,
    /// The number of all blocks.
    blocks: usize,
    units: Vec<Block>,
    /// The units of a pool whose [`Shape`] is of runs.
    runs: Vec<Run<Page>>,
}

#[cold]
#[inline(never)]
fn not_of(name: &str) -> ! {
    panic!("the block does not belong to the pool {name}")
}

/// The range from the first byte of the device's memory to the last.
fn memory_of(device: &Device) -> Range<usize> {
    let arenas = device.allocator().arenas();
    let start = arenas.iter().map(|arena| arena.range.start).min().unwrap_or(0);
    start..arenas.iter().map(|arena| arena.range.end).max().unwrap_or(start)
}

/// Does not stop at the first word that is not empty: that would take longer.
#[inline(always)]
fn are_empty(words: &[u64]) -> bool {
    words.iter().fold(0, |all, word| all | word) == 0
}

impl DmaPool {
    /// Creates a pool of blocks of `size` bytes. Their addresses are multiples of `align` (0 for any), and no block
    /// crosses a multiple of `boundary` (0 for no boundary). A size is at least 16 bytes, and is rounded up to a
    /// multiple of the alignment. A block of up to a page always lies in one page. A larger one has as many pages as it
    /// needs, or the next power of two if it has a boundary or must be aligned to more than a page. The pool has no blocks
    /// at first.
    ///
    /// # Errors
    /// [`DeviceError`]'s `Size`, `Align`, `Boundary` and `Scattered` for impossible blocks; `Memory` if the system has
    /// no address space for the pool's tables. [`DeviceError::Forked`].
    pub fn create(
        name: &str,
        device: &Device,
        size: usize,
        align: usize,
        boundary: usize,
    ) -> Result<Self, DeviceError> {
        Self::new(name, device, Shape::new(size, align, boundary, device.is_linear())?, false, memory_of(device))
    }

    /// The same, for finding code that writes to freed blocks. Freed blocks are filled with a pattern, which is checked
    /// when they are handed out again. A write is reported to [`on_misuse`](crate::on_misuse) and counted.
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
    /// // SAFETY: the memory is mapped. This plays a device that does not know that the block was freed.
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

    /// A pool whose blocks usually lie in `memory`.
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
        // Room for all memory of the allocator, and as much again if it grows. Numbers of 31 bits are the limit; the
        // last of them means no block.
        let units = (2 * allocator.managed_pages().get() / shape.pages_least).clamp(64, ((1 << 31) - 1) >> shape.shift);
        let (tables, stack) = Tables::new(units, &shape)?;
        let shared = FreeBlocks { stack, free: 0, free_max: 0, blocks: 0, units: Vec::new(), runs: Vec::new() };
        let number = Number::take()?;
        let pool = Arc::new(Pool {
            lists: allocator.zones().first().lists().another_shut().map_err(BuildError::from)?,
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
        numbers::enter(&pool.number, pool.clone());
        let pool = Self(ManuallyDrop::new(pool));
        device.enter(Box::new(pool.downgrade()));
        Ok(pool)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }
    /// The size of a block in bytes.
    pub fn size(&self) -> usize {
        self.0.shape.size
    }

    /// The device's address of a block's first byte.
    ///
    /// # Panics
    /// If the block belongs to another pool.
    #[inline]
    pub fn device_addr(&self, block: &DmaBlock) -> DeviceAddr {
        let pool = &**self.0;
        let is_ours = pool.words.is_ours(block.word());
        match pool.tables.device_addr_at(addr_of_word(block.word())) {
            Some(addr) if is_ours => addr,
            _ => not_of(&pool.name),
        }
    }

    /// Allocates one block. Its contents are unspecified, unless `gfp` has [`Gfp::ZERO`]. The other flags matter only
    /// when the pool has no free block and grows.
    ///
    /// # Errors
    /// If the pool has no free block and must grow: [`DeviceError::Memory`] with the page allocator's error, or the
    /// device's error if it cannot map the page. [`DeviceError::Forked`].
    #[inline(always)]
    pub fn alloc(&self, gfp: Gfp) -> Result<DmaBlock, DeviceError> {
        let pool = &**self.0;
        // It stays a number, in a register, until the end: a block that goes through memory would be waited for.
        let number = match pool.pop() {
            Some(number) => number,
            None => pool.pop_slow(gfp)?,
        };
        let word = pool.word(number);
        if gfp.contains(Gfp::ZERO) {
            pool.zero_block(word);
        }
        // SAFETY: the block was just taken from the pool, so this call is its only owner.
        Ok(unsafe { DmaBlock::from_word(word) })
    }

    /// Allocates one block of zeros.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn zalloc(&self, gfp: Gfp) -> Result<DmaBlock, DeviceError> {
        self.alloc(gfp | Gfp::ZERO)
    }

    /// Fills all empty slots, or none. Returns their number. Blocks of one unit come in ascending order.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc). The slots are unchanged in this case.
    pub fn alloc_bulk(&self, gfp: Gfp, slots: &mut [Option<DmaBlock>]) -> Result<usize, DeviceError> {
        let (pool, words) = (&**self.0, words_of(slots));
        let n = words.len();
        let mut batch = Batch::new();
        // The usual case: all slots are empty, and no more than one section delivers.
        if !gfp.contains(Gfp::ZERO) && (1..=Batch::CAPACITY).contains(&n) && !pool.is_looking() && are_empty(words) {
            pool.lists.pop_n(LIST, n, &mut batch);
            if batch.is_empty() {
                pool.restock(n, &mut batch);
            }
            if batch.len() == n {
                if pool.words.fill(words, batch.as_slice()) & FAR == 0 {
                    return Ok(n);
                }
                words.fill(0); // Some blocks are far.
            }
        }
        pool.alloc_bulk_slow(gfp, words, &batch)
    }

    /// Frees a block.
    ///
    /// # Errors
    /// [`Misuse`]: the block is another pool's, to which it returns, or this is a forked child. This pool, or the
    /// parent's, is unchanged.
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

    /// Frees the blocks in the slots and empties the slots. Returns the number of blocks freed. A block of another pool
    /// stays in its slot, and is reported to [`on_misuse`](crate::on_misuse).
    pub fn free_bulk(&self, slots: &mut [Option<DmaBlock>]) -> usize {
        let pool = &**self.0;
        let mut freed = 0;
        // From the last chunk to the first, so that the first block is on top of the list.
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

    /// Gives up ownership of a block and returns a pointer, for C or for a device's queue. [`from_raw`](Self::from_raw)
    /// takes ownership again, and [`free_raw`](Self::free_raw) frees the block.
    ///
    /// # Panics
    /// If the block belongs to another pool.
    ///
    /// ```
    /// use pagemill::{Allocator, Device, DmaPool, Gfp, Identity};
    /// let device = Device::new(&Allocator::builder().pages(64).build()?, Identity)?;
    /// let pool = DmaPool::create("as pointers", &device, 48, 0, 0)?;
    /// let block = pool.into_raw(pool.alloc(Gfp::KERNEL)?);
    /// // SAFETY: this code owns the block. The second call is deliberate misuse.
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
            pool.has_raw.store(true, Relaxed); // Stored once only: every call reads this cache line.
        }
        let is_ours = pool.tables.change(pool.place_of(block.word()), OF_HANDLE, RAW);
        assert!(is_ours, "{block:?} has a handle, and a state that contradicts it");
        core::ptr::with_exposed_provenance_mut(addr_of_word(block.into_word()))
    }

    /// Takes ownership of a block again that was handed over as a pointer.
    ///
    /// # Errors
    /// [`Misuse`], which says what is wrong with the address. Nothing was changed in this case.
    ///
    /// # Safety
    /// The caller owns the block: the pointer came from [`into_raw`](Self::into_raw), and is used once.
    pub unsafe fn from_raw(&self, addr: *mut u8) -> Result<DmaBlock, Misuse> {
        self.0.take_raw(addr.addr(), OF_HANDLE)?;
        // SAFETY: the block belongs to the pool and was out as a pointer, and the caller gives up that pointer.
        Ok(unsafe { DmaBlock::from_word(self.0.words.at(addr.addr())) })
    }

    /// Frees a block that was handed over as a pointer.
    ///
    /// # Errors
    /// [`Misuse`], which says what is wrong with the address. Nothing was changed in this case.
    ///
    /// # Safety
    /// The caller owns the block, and neither the caller nor the device uses it any more.
    ///
    /// ```
    /// use pagemill::{Allocator, Device, DmaPool, Gfp, Identity};
    /// let device = Device::new(&Allocator::builder().pages(64).build()?, Identity)?;
    /// let pool = DmaPool::create("by address", &device, 48, 0, 0)?;
    /// let block = pool.into_raw(pool.alloc(Gfp::KERNEL)?);
    /// // SAFETY: this code owns the block. The first and the last call are deliberate misuse.
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

    /// Returns the pool's statistics.
    pub fn stats(&self) -> DmaPoolStats {
        self.0.stats()
    }

    /// Returns a reference that does not keep the pool, for code that shows its statistics.
    pub fn downgrade(&self) -> WeakDmaPool {
        WeakDmaPool(Arc::downgrade(&self.0), self.0.number.get())
    }

    /// Frees the pool's pages to the allocator. Their arena stays mapped for the device, which must not use them any
    /// more.
    ///
    /// # Errors
    /// [`BlocksOut`] if blocks are out; it contains the pool.
    pub fn destroy(self) -> Result<(), BlocksOut> {
        match self.0.stats().in_use {
            0 => Ok(()),
            out => Err(BlocksOut { pool: self, out }),
        }
    }
}

/// The error of [`DmaPool::destroy`]: blocks are still handed out.
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
#[derive(thiserror::Error)]
#[error("the pool {} still has {out} block{} handed out; free {} first", pool.name(),
    if *out == 1 { "" } else { "s" }, if *out == 1 { "it" } else { "them" })]
#[non_exhaustive]
pub struct BlocksOut {
    /// The pool, unchanged. If it is dropped with blocks out, its pages stay for ever, mapped for the device.
    pub pool: DmaPool,
    /// The number of blocks that are out.
    pub out: usize,
}

/// The sentence, as `Display`, for a `main` that returns this error.
impl fmt::Debug for BlocksOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A reference to a pool that does not keep it. A pool that was dropped with blocks out is still there: its blocks are.
///
/// ```
/// use pagemill::{Allocator, Device, DmaPool, Gfp, Identity};
/// let device = Device::new(&Allocator::builder().pages(64).build()?, Identity)?;
/// let pool = DmaPool::create("prp", &device, 256, 256, 0)?;
/// let weak = pool.downgrade();
/// let block = pool.alloc(Gfp::KERNEL)?;
/// assert_eq!(weak.stats().unwrap().in_use, 1);
/// drop(block);
/// pool.destroy().unwrap();
/// assert!(weak.stats().is_none());
/// # Ok::<(), pagemill::DeviceError>(())
/// ```
///
/// Reading its statistics does not delay the end of the pool's pages: when [`DmaPool::destroy`] has returned, they are back.
#[derive(Clone)]
pub struct WeakDmaPool(Weak<Pool>, u16);

impl WeakDmaPool {
    /// Returns the pool's statistics, unless the pool is gone. In a forked child, a pool of its parent shows no blocks.
    pub fn stats(&self) -> Option<DmaPoolStats> {
        numbers::with(self.1, || Some(self.0.upgrade()?.stats()))
    }
    /// Whether the pool is gone.
    pub fn is_gone(&self) -> bool {
        self.0.strong_count() == 0
    }
}

impl fmt::Debug for WeakDmaPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.stats().fmt(f)
    }
}

impl Drop for DmaPool {
    fn drop(&mut self) {
        if self.0.stamp.is_inherited() {
            return; // The parent's; who held a lock of it is not here.
        }
        // SAFETY: only `drop` takes it, once, and nothing uses it afterwards.
        let pool = unsafe { ManuallyDrop::take(&mut self.0) };
        let mut entered = numbers::hold(&pool.number);
        let out = pool.stats().in_use;
        if out == 0 {
            drop(entered.as_mut().and_then(|entered| entered.take()));
            return;
        }
        drop(entered); // Its blocks still find it, and it keeps their pages for ever.
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

impl PoolLine for WeakDmaPool {
    fn line(&self) -> Option<String> {
        self.stats().map(|stats| stats.to_string())
    }
    fn is_gone(&self) -> bool {
        self.is_gone()
    }
}

impl Pool {
    /// The word of the block with this number.
    #[inline(always)]
    fn word(&self, number: u32) -> u64 {
        if number & FAR == 0 { self.words.word(number) } else { self.far_word(number) }
    }

    #[cold]
    #[inline(never)]
    fn far_word(&self, number: u32) -> u64 {
        self.words.at(self.tables.addr_of(&self.shape, number & !FAR))
    }

    /// The number of the block with this word; none if it is another pool's.
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

    /// The place of an existing block.
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

    /// Whether the states of blocks are checked before they are handed out.
    #[inline(always)]
    fn is_looking(&self) -> bool {
        FULL || self.has_raw.load(Relaxed)
    }

    /// Checks a block in this call's hand, and marks it if all states are kept. False: the block has an owner, because
    /// it was freed twice (D2); the number is discarded.
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
    fn zero_block(&self, word: u64) {
        // SAFETY: the block is in this call's hand, so nothing else uses it.
        unsafe { core::ptr::with_exposed_provenance_mut::<u8>(addr_of_word(word)).write_bytes(0, self.shape.size) };
    }

    /// Changes the state of a block that is out as a pointer. Returns its place.
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
        let shared = self.lock();
        shared.units.first().map(Block::addr).or(shared.runs.first().map(Run::addr)).unwrap_or(0)
    }

    fn lock(&self) -> MutexGuard<'_, FreeBlocks> {
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
        let of_blocks: usize = shared.units.iter().map(|unit| unit.order().frames() as usize).sum();
        let pages = of_blocks + shared.runs.iter().map(Run::len).sum::<usize>();
        let of_units =
            shared.unit_count() * size_of::<tables::Unit>() + size_of_val(&*shared.units) + size_of_val(&*shared.runs);
        // 128 bytes: two cache lines, for a list's head and for what its sections may write beyond its end.
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
