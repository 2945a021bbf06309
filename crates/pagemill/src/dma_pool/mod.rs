//! A pool of small blocks that a device finds at an address of its own (the kernel's `dma_pool`).
//!
//! Pages come from the page allocator, a *unit* of one or a few at a time, and stay until the pool is destroyed (C6.3). A
//! block's number is its unit's, then its place there. Numbers are what moves: between the CPUs' lists, which a block comes
//! from and goes back to as a rule, and one stack that all CPUs share, a batch at a time (C6.2).
//!
//! Nothing of this lies in the blocks: a device that writes to one after it was freed writes to nobody's list (C6.4).
//!
//! # Invariants
//! - D1 A block's number is in one place: on one CPU's list, on the stack, in the hand of one call, or, the block being out,
//!   nowhere.
//! - D2 A block's state says that it is out from its hand-out to its return. It is written by whoever does either, without a
//!   lock: if two return a block at once, its number is in two places, and whoever finds it second, still out, forgets it.
//! - D3 Units are only added.
//! - D4 The lists of a poisoned pool, and those of a parent in the child of its fork, hold nothing and take nothing, so that
//!   each call goes the slow way, where that is seen to.
//!
//! # Locks
//! The stack's alone, held to move numbers. No page is asked for and no list is touched while it is.
//!
//! The choices, with figures: `docs/adr/0026-the-dma-pool.md`.
use crate::device::{Device, DeviceAddr, DeviceError};
use crate::fork::generation;
use crate::handle::Block;
use crate::misuse::{misuse, report};
use crate::registry;
use core::fmt;
use core::mem::ManuallyDrop;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use pagemill_core::{CpuId, Gfp, Misuse, MisuseKind, Mobility};
use pagemill_sys::{Batch, PerCpu};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

mod shape;
mod slow;
mod stats;
mod tables;

use shape::Shape;
pub use stats::{BlocksOut, DmaPoolStats};
use tables::{Stack, Tables};

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

/// Numbers of pools, of which a block's tag has 32 bits.
static POOLS: AtomicU64 = AtomicU64::new(0);

/// Another one: never one that a pool had before, whose blocks would pass for the new one's.
fn next_number(pools: &AtomicU64) -> Result<u32, DeviceError> {
    u32::try_from(pools.fetch_add(1, Relaxed)).map_err(|_| DeviceError::Unavailable {
        what: "this process has made 2^32 pools, and has numbers for no more".to_owned(),
        next: "keep pools and use them again",
    })
}

/// A block of a [`DmaPool`]. It goes back by [`DmaPool::free`]; one that is dropped instead counts as out for ever.
///
/// ```
/// use pagemill::{Allocator, Device, DmaPool, Gfp, Identity};
/// let device = Device::new(&Allocator::builder().pages(64).build()?, Identity)?;
/// let pool = DmaPool::create("descriptors", &device, 32, 32, 0)?;
/// let block = pool.zalloc(Gfp::KERNEL)?;
/// // SAFETY: the block is ours, of 32 bytes, and no device was told of it yet.
/// unsafe { block.as_ptr().cast::<u64>().write(0x1234) };
/// assert_eq!(pool.device_addr(&block).get(), block.as_ptr() as u64); // what `Identity` makes it
/// # pool.free(block).unwrap();
/// # Ok::<(), pagemill::DeviceError>(())
/// ```
#[derive(Debug)]
pub struct DmaBlock {
    addr: NonNull<u8>,
    /// The pool's number, then the block's in it.
    tag: u64,
}

// SAFETY: whoever has it has the block's memory, as with a box; what is shared of it gives an address and no more.
unsafe impl Send for DmaBlock {}
// SAFETY: as for Send.
unsafe impl Sync for DmaBlock {}

impl DmaBlock {
    /// Its first byte.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.addr.as_ptr()
    }
}

/// Blocks of one size with a device address each. Any thread may take and return them; not a signal handler.
///
/// A pool that is dropped with blocks out leaves its pages as they are, mapped for the device, and says so to
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
    shape: Shape,
    /// The process that it is of.
    generation: u64,
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

/// Without leaving off at the first that is not, which would take longer.
#[inline(always)]
fn are_empty(slots: &[Option<DmaBlock>]) -> bool {
    slots.iter().fold(0, |addrs, slot| addrs | slot.as_ref().map_or(0, |block| block.as_ptr().addr())) == 0
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
        Self::new(name, device, Shape::new(size, align, boundary, device.is_linear())?, false)
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
        Self::new(name, device, Shape::new(size, align, boundary, device.is_linear())?, true)
    }

    fn new(name: &str, device: &Device, shape: Shape, is_poisoned: bool) -> Result<Self, DeviceError> {
        if device.is_of_parent() {
            return Err(DeviceError::Forked);
        }
        let allocator = device.allocator();
        // All that the allocator has, and as much again if it grows; less where numbers of 32 bits end.
        let units =
            ((2 * allocator.managed_pages().get()) >> shape.order_least.get()).clamp(64, (1 << 31) >> shape.shift);
        let (tables, stack) = Tables::new(units, &shape, next_number(&POOLS)?)?;
        let shared = Shared { stack, free: 0, free_max: 0, blocks: 0, units: Vec::new() };
        let pool = Arc::new(Pool {
            lists: allocator.nodes().first().lists.another_shut()?,
            generation: generation(),
            is_poisoned,
            limit: ((1 << 20) / shape.size).clamp(LIST_MIN, LIST_MAX),
            misused: AtomicU64::new(0),
            name: name.to_owned(),
            shared: Mutex::new(shared),
            shape,
            tables,
            device: device.clone(),
        });
        device.enter(Arc::downgrade(&pool));
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
        let find = self.0.tables.find;
        match find.number(block.tag) {
            // SAFETY: the pool's tag: it made the block.
            Some(number) => unsafe { find.place(number) }.device_addr,
            None => not_of(&self.0.name),
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
        if gfp.contains(Gfp::ZERO) {
            pool.zero(number);
        }
        // SAFETY: it was just taken from the pool.
        Ok(unsafe { pool.tables.find.block(number) })
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
        let pool = &**self.0;
        let (find, n) = (pool.tables.find, slots.len());
        // Neighbours into empty slots, as a rule: those that went together come together.
        if !gfp.contains(Gfp::ZERO)
            && (1..=Batch::CAPACITY).contains(&n)
            && are_empty(slots)
            && let Some(first) = pool.pop_run(n)
        {
            // SAFETY: just taken from the pool.
            if unsafe { find.hand_out_run(first, n) } {
                // SAFETY: as above.
                unsafe { find.fill(slots, first + n as u32) };
                return Ok(n);
            }
            pool.sort_out(first, n);
        }
        pool.alloc_bulk_slow(gfp, slots)
    }

    /// Returns a block.
    ///
    /// # Errors
    /// [`Misuse`]: it is another pool's, or free already, or this is the child of a fork. Nothing was changed then (of the
    /// parent's).
    #[inline(always)]
    pub fn free(&self, block: DmaBlock) -> Result<(), Misuse> {
        let pool = &**self.0;
        let Some(number) = pool.take_back(&block) else { return Err(pool.refuse(&block)) };
        if pool.lists.push(LIST, number) { Ok(()) } else { pool.overflow(number) }
    }

    /// Returns what the slots hold and empties them; returns how many blocks that were. Another pool's stays in its
    /// slot; that, and a block that is free already, is told to [`on_misuse`](crate::on_misuse).
    pub fn free_bulk(&self, slots: &mut [Option<DmaBlock>]) -> usize {
        let pool = &**self.0;
        let find = pool.tables.find;
        let mut freed = 0;
        // From the last part to the first, so that the first is on top.
        for slots in slots.rchunks_mut(Batch::CAPACITY) {
            if let Some(first) = find.run_in(slots)
                // SAFETY: the pool's tags: it made the blocks.
                && unsafe { find.take_back_run(first, slots.len()) }
                && (pool.lists.push_run(LIST, first, slots.len()) || pool.overflow_run(first, slots.len()))
            {
                slots.iter_mut().for_each(|slot| *slot = None);
                freed += slots.len();
            } else {
                freed += pool.free_each(slots);
            }
        }
        freed
    }

    /// Returns a block by its address alone; the way for C.
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
    /// let block = pool.alloc(Gfp::KERNEL)?.as_ptr();
    /// // SAFETY: the block is ours; the other two are misuse, on purpose.
    /// unsafe {
    ///     assert!(pool.free_raw(block.wrapping_add(8)).is_err());
    ///     pool.free_raw(block).unwrap();
    ///     assert!(pool.free_raw(block).unwrap_err().to_string().ends_with("is free already"));
    /// }
    /// # Ok::<(), pagemill::DeviceError>(())
    /// ```
    pub unsafe fn free_raw(&self, addr: *mut u8) -> Result<(), Misuse> {
        match self.0.number_at(addr.addr()) {
            // SAFETY: of a block that there is, and that is the caller's.
            Ok(number) => self.free(unsafe { self.0.tables.find.block(number) }),
            Err(kind) => Err(self.0.report(misuse(kind, addr.addr()))),
        }
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

/// Pools that were dropped with blocks out.
static LEFT: Mutex<Vec<Arc<Pool>>> = Mutex::new(Vec::new());

impl Drop for DmaPool {
    fn drop(&mut self) {
        if self.0.generation != generation() {
            return; // The parent's; who held a lock of it is not here.
        }
        let out = self.0.stats().in_use;
        // SAFETY: once, here; not used after.
        let pool = unsafe { ManuallyDrop::take(&mut self.0) };
        if out > 0 {
            pool.report(misuse(MisuseKind::PoolInUse { out }, pool.first_addr()));
            LEFT.lock().unwrap_or_else(PoisonError::into_inner).push(pool);
        }
    }
}

impl fmt::Debug for DmaPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.stats().fmt(f)
    }
}

impl Pool {
    /// Takes a block from this CPU's list and marks it as out.
    #[inline(always)]
    fn pop(&self) -> Option<u32> {
        let number = self.lists.pop(LIST)?;
        if self.hand_out(number) { Some(number) } else { None }
    }

    /// Takes neighbours from this CPU's list; the lowest number of them.
    #[inline(always)]
    fn pop_run(&self, n: usize) -> Option<u32> {
        let popped = self.lists.pop_run(LIST, n);
        if popped.is_none() && self.restock() { self.lists.pop_run(LIST, n) } else { popped }
    }

    /// Marks a number that is in this call's hand as out. False: it is out already, since somebody freed it twice (D2).
    #[inline(always)]
    fn hand_out(&self, number: u32) -> bool {
        // SAFETY: numbers in hand are the pool's.
        let is_free = unsafe { self.tables.find.hand_out(number) };
        if !is_free {
            self.found_out(number);
        }
        is_free
    }

    #[cold]
    fn found_out(&self, number: u32) {
        // SAFETY: numbers in hand are the pool's.
        let block = unsafe { self.tables.find.block(number) };
        self.report(misuse(MisuseKind::FreedTwice, block.as_ptr().addr()));
    }

    #[cold]
    fn zero(&self, number: u32) {
        // SAFETY: the block is in this call's hand.
        unsafe { self.tables.find.block(number).as_ptr().write_bytes(0, self.shape.size) };
    }

    /// Marks a block that comes back as free; none if it is not this pool's, or not out.
    #[inline(always)]
    fn take_back(&self, block: &DmaBlock) -> Option<u32> {
        let number = self.tables.find.number(block.tag)?;
        // SAFETY: the pool's tag: it made the block.
        if unsafe { self.tables.find.take_back(number) } { Some(number) } else { None }
    }

    /// Why a block was not taken back.
    #[cold]
    fn refuse(&self, block: &DmaBlock) -> Misuse {
        let addr = block.as_ptr().addr();
        let kind = match self.number_at(addr) {
            Ok(_) => MisuseKind::DoubleFree,
            Err(kind) => kind,
        };
        self.report(misuse(kind, addr))
    }

    #[cold]
    fn report(&self, misuse: Misuse) -> Misuse {
        self.misused.fetch_add(1, Relaxed);
        report(misuse)
    }

    /// The number of the block at this address.
    fn number_at(&self, addr: usize) -> Result<u32, MisuseKind> {
        if self.generation != generation() {
            return Err(MisuseKind::Foreign);
        }
        let (arena, pfn) = registry::by_address(addr).ok_or(MisuseKind::Foreign)?;
        // Whatever that says of a page that is not this pool's: it is not where that unit is.
        let unit = arena.link(pfn).load(Relaxed);
        let units = self.lock();
        let entered = (self.tables.units_max - 1).checked_sub(unit as usize).ok_or(MisuseKind::Foreign)?;
        let pages = units.units.get(entered).ok_or(MisuseKind::Foreign)?;
        let offset = addr.wrapping_sub(pages.addr());
        if offset >= pages.order().bytes() {
            return Err(MisuseKind::Foreign);
        }
        match self.shape.place_of(offset) {
            Some(place) => Ok(unit << self.shape.shift | place as u32),
            None => Err(MisuseKind::Inside),
        }
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
        if self.generation != generation() {
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
        DmaPoolStats {
            in_use: shared.blocks.saturating_sub(shared.free + on_lists),
            blocks: shared.blocks,
            pages,
            metadata: of_units + of_lists + shared.blocks + 4 * shared.free_max + 4 * self.shape.offsets.len(),
            ..none
        }
    }
}
