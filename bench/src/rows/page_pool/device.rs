//! 64 single pages against one block of 64 pages, each with the address that a device uses. Drivers ask for such blocks
//! to have fewer pieces to map. [`Maps`] are three ways of mapping. Pages of the allocator are mapped each time that
//! they are taken; pages of a pool keep their address.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use pagemill::{
    Allocator, Block, Bulk, Device, DeviceAddr, DeviceError, DeviceMap, Error, Exact, Gfp, Identity, Mapped, Order,
    Owned, Page, PagePool, PoolPage, free_pages_bulk,
};

use crate::rows::dma::{BlockRow, Shape, Source};
use crate::rows::page_pool::{BULK, allocator_for, refused};
use crate::rows::region::Region;
use crate::rows::{Kind, Unavailable};
use crate::subject::PAGE_BYTES;

/// The rows: pages, and a block of as many, from the allocator and from a pool.
pub(crate) const PAGES: &str = "pages-64";
pub(crate) const BLOCK: &str = "block-order-6";
pub(crate) const POOL_PAGES: &str = "pool-pages-64";
pub(crate) const POOL_BLOCK: &str = "pool-block-order-6";

/// How memory gets its device address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mapping {
    /// The arena was mapped as a whole: an address is looked up.
    Once,
    /// A piece gets entries in a [`Table`].
    Table,
    /// A piece is [`Pinned`] by a system call.
    Pinned,
}

/// The rows of a mapping on that backend, and the shape for which each is opened.
pub(crate) fn rows(backend: &'static str, mapping: Mapping) -> [(BlockRow, Shape); 4] {
    match mapping {
        Mapping::Once => rows_over(backend, |allocator| Device::new(allocator, Identity).map_err(refused)),
        Mapping::Table => rows_over(backend, |_| Ok(Table::default())),
        Mapping::Pinned => rows_over(backend, |_| Pinned::new()),
    }
}

fn rows_over<M: Maps>(
    backend: &'static str,
    map: impl Fn(&Allocator) -> Result<M, Unavailable> + Copy + 'static,
) -> [(BlockRow, Shape); 4] {
    let ready = move || {
        let allocator = allocator_for(backend, 4 * BULK)?;
        let map = Arc::new(map(&allocator)?);
        Ok::<_, Unavailable>((allocator, map))
    };
    let pages = Shape { bytes: PAGE_BYTES, blocks: BULK };
    let block = Shape { bytes: BULK * PAGE_BYTES, blocks: 1 };
    let row = |row: BlockRow, shape| (row.on(backend), shape);
    [
        row(BlockRow::of_source(PAGES, Kind::Ours, move |_| Ok(Anew::<Page, M>::new(ready()?))), pages),
        row(BlockRow::of_source(BLOCK, Kind::Ours, move |_| Ok(Anew::<Block, M>::new(ready()?))), block),
        row(BlockRow::of_source(POOL_PAGES, Kind::Ours, move |_| Ok(Kept::<Page, M>::new(ready()?))), pages),
        row(BlockRow::of_source(POOL_BLOCK, Kind::Ours, move |_| Ok(Kept::<Block, M>::new(ready()?))), block),
    ]
}

/// Gives a piece of memory an address for the device, and takes it away.
trait Maps: Send + Sync + 'static {
    fn map(&self, memory: Range<usize>) -> Option<DeviceAddr>;
    fn unmap(&self, memory: Range<usize>, at: DeviceAddr);
    /// Where in the process the device gets to by this address.
    fn reaches(&self, at: DeviceAddr) -> u64;
}

impl Maps for Device {
    #[inline]
    fn map(&self, memory: Range<usize>) -> Option<DeviceAddr> {
        self.address_of(memory.start).ok()
    }

    /// It stays mapped, as its arena does.
    #[inline]
    fn unmap(&self, _: Range<usize>, _: DeviceAddr) {}

    fn reaches(&self, at: DeviceAddr) -> u64 {
        at.get()
    }
}

/// A map that is asked for each piece, where a [`Device`] asks it for each arena.
trait MapsPieces: DeviceMap + 'static {
    fn reaches(&self, at: DeviceAddr) -> u64;
}

impl<M: MapsPieces> Maps for M {
    #[inline]
    fn map(&self, memory: Range<usize>) -> Option<DeviceAddr> {
        // SAFETY: whole pages, which stay mapped in the process until `unmap`: the page or block is held until then.
        match unsafe { DeviceMap::map(self, memory) } {
            Ok(Mapped::Linear(at)) => Some(at),
            _ => None,
        }
    }

    #[inline]
    fn unmap(&self, memory: Range<usize>, at: DeviceAddr) {
        DeviceMap::unmap(self, memory, &Mapped::Linear(at));
    }

    fn reaches(&self, at: DeviceAddr) -> u64 {
        MapsPieces::reaches(self, at)
    }
}

/// What a driver of an IOMMU does at least: a range of the device's addresses for each piece, from a stack of free ones
/// of its size, and an entry for each of its pages in a table; all under a lock. It has no device whose own cache of
/// entries would have to be emptied.
#[derive(Default)]
struct Table(Mutex<Entries>);

#[derive(Default)]
struct Entries {
    /// The address in the process of each page of the device's addresses; 0 where there is none.
    pages: Vec<u64>,
    /// The first page of free ranges of 2^n pages.
    free: [Vec<usize>; 7],
}

impl DeviceMap for Table {
    unsafe fn map(&self, memory: Range<usize>) -> Result<Mapped, DeviceError> {
        let pages = memory.len() / PAGE_BYTES;
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let first = entries.free[pages.trailing_zeros() as usize].pop().unwrap_or(entries.pages.len());
        if first == entries.pages.len() {
            entries.pages.resize(first + pages, 0);
        }
        let of_process = memory.step_by(PAGE_BYTES).map(|addr| addr as u64);
        entries.pages[first..first + pages].iter_mut().zip(of_process).for_each(|(entry, addr)| *entry = addr);
        Ok(Mapped::Linear(DeviceAddr::new((first * PAGE_BYTES) as u64)))
    }

    fn unmap(&self, memory: Range<usize>, mapped: &Mapped) {
        let Mapped::Linear(at) = mapped else { return };
        let (first, pages) = (at.get() as usize / PAGE_BYTES, memory.len() / PAGE_BYTES);
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.pages[first..first + pages].fill(0);
        entries.free[pages.trailing_zeros() as usize].push(first);
    }
}

impl MapsPieces for Table {
    fn reaches(&self, at: DeviceAddr) -> u64 {
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.pages[at.get() as usize / PAGE_BYTES]
    }
}

/// Pins each piece in memory by `mlock`, and lets go of it by `munlock`, as the system pins memory that a device may
/// write to. The device's addresses are the process's.
struct Pinned;

impl Pinned {
    /// Fails where this process may not pin as much as the rows do.
    fn new() -> Result<Self, Unavailable> {
        let region = Region::new(8 * BULK)?;
        let (start, len) = (region.base(), 8 * BULK * PAGE_BYTES);
        // SAFETY: maps nothing that was mapped there; the region is its own, and its mapping ends the lock.
        match unsafe { libc::mlock(start as *const libc::c_void, len) } {
            0 => Ok(Self),
            _ => Err(Unavailable(format!("mlock of {len} bytes: {}", std::io::Error::last_os_error()))),
        }
    }
}

impl DeviceMap for Pinned {
    unsafe fn map(&self, memory: Range<usize>) -> Result<Mapped, DeviceError> {
        // SAFETY: pinning changes no contents; the memory is mapped, as the caller promises.
        match unsafe { libc::mlock(memory.start as *const libc::c_void, memory.len()) } {
            0 => Ok(Mapped::Linear(DeviceAddr::new(memory.start as u64))),
            _ => Err(DeviceError::System {
                what: "mlock",
                errno: std::io::Error::last_os_error().raw_os_error().unwrap_or_default(),
                next: "raise RLIMIT_MEMLOCK",
            }),
        }
    }

    fn unmap(&self, memory: Range<usize>, _: &Mapped) {
        // SAFETY: as in `map`.
        let rc = unsafe { libc::munlock(memory.start as *const libc::c_void, memory.len()) };
        debug_assert_eq!(rc, 0, "munlock of memory that was locked");
    }
}

impl MapsPieces for Pinned {
    fn reaches(&self, at: DeviceAddr) -> u64 {
        at.get()
    }
}

/// A page or a block.
trait Piece: Owned {
    /// Fills all slots. False if there were too few.
    fn fill(allocator: &Allocator, slots: &mut [Option<Self>]) -> bool
    where
        Self: Sized;
    fn memory(&self) -> Range<usize>;
}

impl Piece for Page {
    #[inline]
    fn fill(allocator: &Allocator, slots: &mut [Option<Self>]) -> bool {
        allocator
            .alloc_pages_bulk_array(Bulk::up_to(slots.len()), slots)
            .is_ok_and(|filled| filled.added == slots.len())
    }

    #[inline]
    fn memory(&self) -> Range<usize> {
        self.addr()..self.addr() + PAGE_BYTES
    }
}

impl Piece for Block {
    #[inline]
    fn fill(allocator: &Allocator, slots: &mut [Option<Self>]) -> bool {
        let Ok(order) = Order::new(BULK.trailing_zeros() as u8) else { return false };
        slots.iter_mut().all(|slot| {
            *slot = allocator.alloc_pages(Gfp::KERNEL, order).ok();
            slot.is_some()
        })
    }

    #[inline]
    fn memory(&self) -> Range<usize> {
        self.addr()..self.addr() + BULK * PAGE_BYTES
    }
}

/// A piece and its address for the device.
struct Known<P> {
    piece: P,
    at: DeviceAddr,
}

fn start(memory: &Range<usize>) -> NonNull<u8> {
    NonNull::new(memory.start as *mut u8).expect("a page is somewhere")
}

/// Takes pieces from the allocator and maps them; unmaps them and gives them back.
struct Anew<P, M> {
    allocator: Allocator,
    map: Arc<M>,
    pieces: Vec<Option<P>>,
}

impl<P: Piece, M: Maps> Anew<P, M> {
    fn new((allocator, map): (Allocator, Arc<M>)) -> Self {
        Self { allocator, map, pieces: std::iter::repeat_with(|| None).take(BULK).collect() }
    }
}

impl<P: Piece, M: Maps> Source for Anew<P, M> {
    type Block = Known<P>;

    #[inline]
    fn fill(&mut self, slots: &mut [Option<Known<P>>]) -> bool {
        let pieces = &mut self.pieces[..slots.len()];
        let is_complete = P::fill(&self.allocator, pieces);
        for (slot, piece) in slots.iter_mut().zip(pieces.iter_mut().filter_map(Option::take)) {
            *slot = self.map.map(piece.memory()).map(|at| Known { piece, at });
        }
        is_complete && slots.iter().all(Option::is_some)
    }

    #[inline]
    fn empty(&mut self, slots: &mut [Option<Known<P>>]) {
        let pieces = &mut self.pieces[..slots.len()];
        for (slot, place) in slots.iter_mut().zip(pieces.iter_mut()) {
            if let Some(Known { piece, at }) = slot.take() {
                self.map.unmap(piece.memory(), at);
                *place = Some(piece);
            }
        }
        free_pages_bulk(pieces);
    }

    fn at(known: &Known<P>) -> NonNull<u8> {
        start(&known.piece.memory())
    }

    fn device(&self, known: &Known<P>) -> Option<u64> {
        Some(self.map.reaches(known.at))
    }
}

/// Makes the elements of a pool: a piece is mapped before it enters the pool, and unmapped when it has left it.
struct MappedSource<P, M> {
    allocator: Allocator,
    map: Arc<M>,
    piece: PhantomData<fn() -> P>,
}

impl<P: Piece, M: Maps> pagemill::Source for MappedSource<P, M> {
    type Item = Known<P>;

    fn alloc(&self, _: Bulk<'_, Exact, Known<P>>) -> Result<Option<Known<P>>, Error> {
        let mut slot = [None];
        P::fill(&self.allocator, &mut slot);
        let [piece] = slot;
        Ok(piece.and_then(|piece: P| self.map.map(piece.memory()).map(|at| Known { piece, at })))
    }

    /// A pool asks for 64, whatever their size. So many blocks would be more than a process may pin, so it gets one.
    fn fill(&self, request: Bulk<'_, Exact, Known<P>>, slots: &mut [Option<Known<P>>]) -> Result<usize, Error> {
        let Some(slot) = slots.iter_mut().find(|slot| slot.is_none()) else { return Ok(0) };
        *slot = self.alloc(request)?;
        Ok(usize::from(slot.is_some()))
    }

    fn free(&self, Known { piece, at }: Known<P>) {
        self.map.unmap(piece.memory(), at);
        drop(piece);
    }
}

/// Takes pieces from a pool, in which they keep their address.
struct Kept<P: Piece, M: Maps> {
    pool: PagePool<MappedSource<P, M>>,
    map: Arc<M>,
}

impl<P: Piece, M: Maps> Kept<P, M> {
    fn new((allocator, map): (Allocator, Arc<M>)) -> Self {
        let source = MappedSource { allocator, map: Arc::clone(&map), piece: PhantomData };
        Self { pool: PagePool::new(source), map }
    }
}

impl<P: Piece, M: Maps> Source for Kept<P, M> {
    type Block = PoolPage<MappedSource<P, M>>;

    #[inline]
    fn fill(&mut self, slots: &mut [Option<Self::Block>]) -> bool {
        self.pool.alloc_bulk(Gfp::NOWAIT, slots).is_ok_and(|filled| filled == slots.len())
    }

    #[inline]
    fn empty(&mut self, slots: &mut [Option<Self::Block>]) {
        self.pool.put_bulk(slots);
    }

    fn at(known: &Self::Block) -> NonNull<u8> {
        start(&known.piece.memory())
    }

    fn device(&self, known: &Self::Block) -> Option<u64> {
        Some(self.map.reaches(known.at))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    /// Checks also that the device's address of each piece leads to it.
    #[test]
    fn every_row_has_pieces_at_the_device_addresses_that_it_tells() {
        for mapping in [Mapping::Once, Mapping::Table, Mapping::Pinned] {
            for (row, shape) in rows("portable", mapping) {
                let mut lane = match (row.open)(shape) {
                    Ok(lane) => lane,
                    Err(reason) => {
                        println!("skipped {} {mapping:?}: {reason}", row.name);
                        continue;
                    }
                };
                for _ in 0..2 {
                    lane.verify().unwrap_or_else(|flaw| panic!("{} {mapping:?}: {flaw}", row.name));
                    lane.shuffled_rounds(3, &mut fastrand::Rng::with_seed(7)).unwrap();
                }
            }
        }
    }

    #[test]
    fn pieces_of_the_allocator_are_mapped_each_time_and_those_of_a_pool_once() {
        let ready = || (allocator_for("portable", BULK).unwrap(), Arc::new(Counted::default()));
        let mut slots: Vec<_> = std::iter::repeat_with(|| None).take(BULK).collect();
        let mut anew = Anew::<Page, Counted>::new(ready());
        for turn in 1..=3 {
            assert!(anew.fill(&mut slots));
            assert_eq!(anew.map.counts(), (turn * BULK, (turn - 1) * BULK));
            anew.empty(&mut slots);
        }
        let mut slots: Vec<_> = std::iter::repeat_with(|| None).take(BULK).collect();
        let mut kept = Kept::<Page, Counted>::new(ready());
        for _ in 0..3 {
            assert!(kept.fill(&mut slots));
            kept.empty(&mut slots);
            assert_eq!(kept.map.counts(), (BULK, 0));
        }
        let Kept { pool, map } = kept;
        drop(pool);
        assert_eq!(map.counts(), (BULK, BULK), "pages that leave the pool are unmapped");
    }

    #[derive(Default)]
    struct Counted([AtomicUsize; 2]);

    impl Counted {
        fn counts(&self) -> (usize, usize) {
            (self.0[0].load(Relaxed), self.0[1].load(Relaxed))
        }
    }

    impl Maps for Counted {
        fn map(&self, memory: Range<usize>) -> Option<DeviceAddr> {
            self.0[0].fetch_add(1, Relaxed);
            Some(DeviceAddr::new(memory.start as u64))
        }
        fn unmap(&self, _: Range<usize>, _: DeviceAddr) {
            self.0[1].fetch_add(1, Relaxed);
        }
        fn reaches(&self, at: DeviceAddr) -> u64 {
            at.get()
        }
    }
}
