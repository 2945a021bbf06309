//! dma_pool (C6): blocks with device addresses, their bounds, growth, misuse, what a device may do to them, and many threads.
use crate::common::{Rng, allocators, fake_cpu, go_to, in_child, one_cpu, panics, slots};
use pagemill::{
    Allocator, Device, DeviceAddr, DeviceError, DeviceMap, DmaBlock, DmaPool, Error, Gfp, Identity, InFlight, Mapped,
    Memory, MisuseKind, ZoneKind,
};
use proptest::prelude::*;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Barrier, Mutex};

/// What a device was told: an arena, where it is to the device, and whether it was mapped or unmapped.
type Log = Arc<Mutex<Vec<(Range<usize>, Mapped, bool)>>>;

/// A device that sees memory where a function says, and notes what it is told.
struct Fake<F>(F, Log);

impl<F: Fn(&Range<usize>) -> Mapped + Send + Sync> DeviceMap for Fake<F> {
    unsafe fn map(&self, memory: Range<usize>) -> Result<Mapped, DeviceError> {
        let mapped = (self.0)(&memory);
        self.1.lock().unwrap().push((memory, mapped.clone(), true));
        Ok(mapped)
    }
    fn unmap(&self, memory: Range<usize>, mapped: &Mapped) {
        let mut log = self.1.lock().unwrap();
        assert!(log.contains(&(memory.clone(), mapped.clone(), true)), "{memory:x?} was mapped otherwise");
        log.push((memory, mapped.clone(), false));
    }
}

fn is_unmapped(log: &Log) -> bool {
    log.lock().unwrap().iter().any(|(.., is_mapped)| !is_mapped)
}

/// A device that sees each arena a fixed distance away.
fn window(log: &Log) -> impl DeviceMap + use<> {
    Fake(|memory: &Range<usize>| Mapped::Linear(DeviceAddr::new(memory.start as u64 + WINDOW)), log.clone())
}
const WINDOW: u64 = 1 << 50;

/// A device that sees the pages of an arena in the opposite order.
fn backwards() -> impl DeviceMap {
    let says = |memory: &Range<usize>| {
        let pages = memory.len() / 4096;
        Mapped::Pages((0..pages).map(|page| DeviceAddr::new(((pages - page) * 4096) as u64)).collect())
    };
    Fake(says, Log::default())
}

fn allocator(pages: usize) -> Allocator {
    Allocator::builder().pages(pages).build().unwrap()
}

fn addr(block: &DmaBlock) -> usize {
    block.as_ptr().addr()
}

#[test]
fn each_arena_is_mapped_once_and_unmapped_with_the_last_handle() {
    let log = Log::default();
    let allocator = allocator(512);
    let device = Device::new(&allocator, window(&log)).unwrap();
    let pool = DmaPool::create("first", &device, 64, 0, 0).unwrap();
    let other = DmaPool::create("second", &device, 4096, 0, 0).unwrap();
    let block = pool.alloc(Gfp::KERNEL).unwrap();
    let page = other.alloc(Gfp::KERNEL).unwrap();
    for (pool, block) in [(&pool, &block), (&other, &page)] {
        assert_eq!(pool.device_addr(block).get(), addr(block) as u64 + WINDOW);
        assert_eq!(device.address_of(addr(block) + 63).unwrap(), pool.device_addr(block).offset(63));
    }
    assert_eq!(log.lock().unwrap().len(), 1);

    // One that is added later: when a page of it is met.
    let more = allocator.add_memory(Memory::anonymous(512)).unwrap();
    let range = allocator.arenas().into_iter().find(|arena| arena.id == more).unwrap().range;
    assert_eq!(device.address_of(range.start).unwrap().get(), range.start as u64 + WINDOW);
    device.address_of(range.end - 1).unwrap();
    assert_eq!(log.lock().unwrap().len(), 2);
    let outside = std::ptr::from_ref(&log).addr();
    assert_eq!(device.address_of(outside), Err(DeviceError::NotHere { addr: outside }));

    pool.free(block).unwrap();
    other.free(page).unwrap();
    drop(device);
    pool.destroy().unwrap();
    assert_eq!(log.lock().unwrap().len(), 2, "a pool still uses it");
    other.destroy().unwrap();
    let told = log.lock().unwrap().clone();
    assert_eq!(told[2..], [0, 1].map(|at: usize| (told[at].0.clone(), told[at].1.clone(), false)));
}

#[test]
fn new_blocks_ascend_and_the_last_one_freed_is_reused_first() {
    let device = Device::new(&allocator(1024), Identity).unwrap();
    for (size, boundary) in [(16, 0), (64, 64), (200, 1024), (512, 0), (4096, 0), (12288, 16384)] {
        let pool = DmaPool::create("ascending", &device, size, 0, boundary).unwrap();
        let first = pool.alloc(Gfp::KERNEL).unwrap();
        let blocks = pool.stats().blocks;
        let mut all = vec![first];
        all.extend((1..blocks).map(|_| pool.alloc(Gfp::KERNEL).unwrap()));
        assert_eq!(pool.stats().blocks, blocks, "no unit was added");
        assert!(all.is_sorted_by_key(addr), "{size} one by one");
        all.drain(..).rev().for_each(|block| pool.free(block).unwrap());

        let mut slots = slots(blocks);
        assert_eq!(pool.alloc_bulk(Gfp::KERNEL, &mut slots).unwrap(), blocks);
        assert!(slots.iter().flatten().is_sorted_by_key(addr), "{size} in bulk");
        assert_eq!(pool.free_bulk(&mut slots), blocks);
        let again = pool.alloc(Gfp::KERNEL).unwrap();
        let next = pool.alloc(Gfp::KERNEL).unwrap();
        assert!(addr(&again) < addr(&next), "freed in bulk, they come back in order");
        let hot = addr(&again);
        pool.free(again).unwrap();
        let again = pool.alloc(Gfp::KERNEL).unwrap();
        assert_eq!(addr(&again), hot, "the one that went last is the warmest");
        pool.free(again).unwrap();
        pool.free(next).unwrap();
        pool.destroy().unwrap();
    }
}

#[test]
fn impossible_block_sizes_are_refused_with_a_reason() {
    let device = Device::new(&allocator(64), Identity).unwrap();
    let refused = |size, align, boundary| DmaPool::create("x", &device, size, align, boundary).unwrap_err().to_string();
    assert_eq!(refused(0, 0, 0), "blocks of 0 bytes are not possible: a block has 1 to 1073741824 bytes");
    assert_eq!(
        refused(usize::MAX, 0, 0),
        format!("blocks of {} bytes are not possible: a block has 1 to 1073741824 bytes", usize::MAX)
    );
    assert!(refused(64, 48, 0).starts_with("an alignment of 48 is not possible: it must be a power of two"));
    assert!(refused(64, 1 << 40, 0).starts_with("an alignment of 1099511627776"));
    assert!(refused(64, 0, 100).starts_with("a boundary of 100 is not possible for blocks of 64 bytes"));
    assert!(refused(100, 64, 64).starts_with("a boundary of 64 is not possible for blocks of 128 bytes"));
    let scattered = Device::new(&allocator(64), backwards()).unwrap();
    let refused = DmaPool::create("x", &scattered, 8192, 0, 0).unwrap_err();
    assert_eq!(refused, DeviceError::Scattered { size: 8192 });
}

#[test]
fn scattered_pages_have_a_device_address_for_each_byte() {
    let allocator = allocator(64);
    let start = allocator.arenas()[0].range.start;
    let device = Device::new(&allocator, backwards()).unwrap();
    let pool = DmaPool::create("pages apart", &device, 48, 0, 0).unwrap();
    let mut blocks = slots(600);
    pool.alloc_bulk(Gfp::KERNEL, &mut blocks).unwrap();
    for block in blocks.iter().flatten() {
        let (page, offset) = ((addr(block) - start) / 4096, addr(block) % 4096);
        assert_eq!(pool.device_addr(block).get(), ((64 - page) * 4096 + offset) as u64);
    }
    pool.free_bulk(&mut blocks);
}

#[test]
fn misaligned_device_addresses_are_refused() {
    let allocator = allocator(64);
    let askew = Fake(|_: &Range<usize>| Mapped::Linear(DeviceAddr::new(0x1_0100)), Log::default());
    let device = Device::new(&allocator, askew).unwrap();
    let pool = DmaPool::create("aligned", &device, 512, 512, 0).unwrap();
    assert!(matches!(pool.alloc(Gfp::KERNEL), Err(DeviceError::Unaligned { align: 4096, .. })));
    drop((pool, device));
    allocator.close().unwrap(); // the page went back
}

#[test]
fn impossible_device_maps_are_refused_and_unmapped() {
    let pages = |count: u64| Mapped::Pages((1..=count).map(|page| DeviceAddr::new(page << 12)).collect());
    let last_page = DeviceAddr::new(u64::MAX << 12);
    let log = Log::default();
    let new = |says: &Mapped| {
        let (allocator, says) = (allocator(64), says.clone());
        let device = Device::new(&allocator, Fake(move |_: &Range<usize>| says.clone(), log.clone()));
        // The last byte of all, which none may have told of.
        device.map(|device| device.address_of(allocator.arenas()[0].range.end - 1).map(DeviceAddr::get))
    };
    for (says, words) in [
        (pages(63), "the device's map gave 63 addresses for 64 pages; it must give one for each"),
        (pages(0), "the device's map gave 0 addresses for 64 pages"),
        (pages(65), "the device's map gave 65 addresses for 64 pages"),
        (Mapped::Linear(last_page), "262144 bytes at 0xfffffffffffff000 reach beyond the last address"),
        (Mapped::Pages([DeviceAddr::new(!0 - 4094); 64].into()), "4096 bytes at 0xfffffffffffff001 reach beyond"),
    ] {
        let why = new(&says).unwrap_err();
        assert!(why.to_string().contains(words), "{why}");
        let (mapped, unmapped): (Vec<_>, Vec<_>) =
            log.lock().unwrap().drain(..).partition(|(.., is_mapped)| *is_mapped);
        assert_eq!((mapped.len(), unmapped.len()), (1, 1), "what is refused is unmapped");
    }
    // The last address is one.
    assert_eq!(new(&Mapped::Linear(DeviceAddr::new(u64::MAX - (64 << 12) + 1))).unwrap(), Ok(u64::MAX));
    assert_eq!(new(&Mapped::Pages([last_page; 64].into())).unwrap(), Ok(u64::MAX));
}

#[test]
fn an_offset_beyond_the_last_device_address_panics() {
    let last = DeviceAddr::new(u64::MAX - 8);
    assert_eq!(last.offset(8).get(), u64::MAX);
    let why = catch_unwind(|| last.offset(9)).unwrap_err();
    let why = why.downcast_ref::<&str>().copied().unwrap_or_default();
    assert!(why.contains("beyond the last address of a device"), "{why}");
}

#[test]
fn an_exhausted_pool_takes_blocks_of_other_cpus_before_it_fails() {
    let device = Device::new(&allocator(4), Identity).unwrap();
    let pool = DmaPool::create("small", &device, 256, 0, 0).unwrap();
    let mut blocks = slots(64);
    pool.alloc_bulk(Gfp::KERNEL, &mut blocks).unwrap();
    let refused = pool.alloc(Gfp::KERNEL).unwrap_err();
    assert!(matches!(refused, DeviceError::Memory(Error::Exhausted(_))), "{refused}");
    // All or none.
    pool.free(blocks[3].take().unwrap()).unwrap();
    pool.free(blocks[60].take().unwrap()).unwrap();
    let mut more = [const { None }; 3];
    assert!(pool.alloc_bulk(Gfp::KERNEL, &mut more).is_err() && more.iter().all(Option::is_none));
    assert_eq!(pool.stats().in_use, 62);
    assert_eq!(pool.alloc_bulk(Gfp::KERNEL, &mut blocks).unwrap(), 2);
    assert_eq!(pool.free_bulk(&mut blocks), 64);
    pool.destroy().unwrap();

    // On CPU 0 of two, the blocks are on its list; then this thread is on the other one.
    let elsewhere = Allocator::builder().pages(1).cpus(2, fake_cpu).build().unwrap();
    let device = Device::new(&elsewhere, Identity).unwrap();
    let pool = DmaPool::create("elsewhere", &device, 256, 0, 0).unwrap();
    pool.free(pool.alloc(Gfp::KERNEL).unwrap()).unwrap();
    go_to(1);
    let mut blocks = [const { None }; 16];
    assert_eq!(pool.alloc_bulk(Gfp::KERNEL, &mut blocks).unwrap(), 16);
    assert_eq!(pool.free_bulk(&mut blocks), 16);
}

/// A shrinker that panics in the middle of a request for more than there is.
#[test]
fn a_request_that_unwinds_gives_its_blocks_back() {
    let allocator = allocator(512);
    let _registered = allocator.register_shrinker(panics());
    let pool = DmaPool::create("unwound", &Device::new(&allocator, Identity).unwrap(), 1024, 0, 0).unwrap();
    let mut blocks = slots(10_000);
    let ask = AssertUnwindSafe(|| pool.alloc_bulk(Gfp::KERNEL, &mut blocks));
    assert!(catch_unwind(ask).is_err());
    assert_eq!((blocks.iter().flatten().count(), pool.stats().in_use), (0, 0));
    pool.destroy().unwrap();
}

/// A device that sees the first arena in one piece, and of later ones the middle pages of each four in the opposite order.
#[test]
fn a_block_of_scattered_pages_is_refused() {
    let first = Mutex::new(None);
    let says = move |memory: &Range<usize>| {
        if first.lock().unwrap().get_or_insert(memory.start) == &memory.start {
            return Mapped::Linear(DeviceAddr::new(memory.start as u64));
        }
        let place = |page: usize| [0, 2, 1, 3][page % 4] + page / 4 * 4;
        let pages = (0..memory.len() / 4096).map(|page| DeviceAddr::new((memory.start + place(page) * 4096) as u64));
        Mapped::Pages(pages.collect())
    };
    let allocator = allocator(512);
    let device = Device::new(&allocator, Fake(says, Log::default())).unwrap();
    let pool = DmaPool::create("four pages", &device, 4 * 4096, 0, 0).unwrap();
    allocator.add_memory(Memory::anonymous(512)).unwrap();
    let mut blocks = Vec::new();
    let refused = loop {
        match pool.alloc(Gfp::NOWAIT) {
            Ok(block) => blocks.push(Some(block)),
            Err(why) => break why,
        }
    };
    assert_eq!(refused, DeviceError::Scattered { size: 4 * 4096 });
    pool.free_bulk(&mut blocks);
    pool.destroy().unwrap();
}

#[test]
fn misuse_of_blocks_is_reported_and_changes_nothing() {
    let allocator = allocator(64);
    let device = Device::new(&allocator, Identity).unwrap();
    let pool = DmaPool::create("one", &device, 64, 0, 0).unwrap();
    let other = DmaPool::create("other", &device, 64, 0, 0).unwrap();
    let block = pool.alloc(Gfp::KERNEL).unwrap();
    let owned = pool.alloc(Gfp::KERNEL).unwrap();
    let foreign = other.alloc(Gfp::KERNEL).unwrap();
    let ptr = pool.into_raw(block);
    assert_eq!(pool.free(foreign).unwrap_err().kind, MisuseKind::Foreign);
    assert_eq!(other.stats().in_use, 0, "a block that another pool refuses goes back to its own");
    let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
    // SAFETY: misuse, on purpose: each is refused.
    unsafe {
        for free in [|pool: &DmaPool, at| pool.free_raw(at), |pool: &DmaPool, at| pool.from_raw(at).map(drop)] {
            assert_eq!(free(&pool, page.as_ptr().cast_mut()).unwrap_err().kind, MisuseKind::Foreign);
            assert_eq!(free(&pool, std::ptr::null_mut()).unwrap_err().kind, MisuseKind::Foreign);
            assert_eq!(free(&pool, ptr.wrapping_add(1)).unwrap_err().kind, MisuseKind::Inside);
            assert_eq!(free(&other, ptr).unwrap_err().kind, MisuseKind::Foreign);
            assert_eq!(free(&pool, ptr.wrapping_add(640)).unwrap_err().kind, MisuseKind::DoubleFree);
            assert_eq!(free(&pool, owned.as_ptr()).unwrap_err().kind, MisuseKind::DoubleFree, "a handle has it");
        }
    }
    assert_eq!((pool.stats().misused, other.stats().misused, pool.stats().in_use), (11, 2, 2));
    // SAFETY: the block was given up, once; then misuse, on purpose.
    let again = unsafe {
        let block = pool.from_raw(ptr).unwrap();
        assert_eq!(pool.from_raw(ptr).unwrap_err().kind, MisuseKind::DoubleFree);
        pool.free_raw(pool.into_raw(block)).unwrap();
        pool.free_raw(ptr)
    };
    assert_eq!(again.unwrap_err().kind, MisuseKind::DoubleFree);
    pool.free(owned).unwrap();
    assert_eq!((pool.stats().misused, pool.stats().in_use), (13, 0));
    pool.destroy().unwrap();
    other.destroy().unwrap();
}

#[test]
fn a_dropped_block_goes_back_to_its_pool() {
    let device = Device::new(&allocator(64), Identity).unwrap();
    let pool = DmaPool::create("dropped", &device, 96, 0, 0).unwrap();
    let other = DmaPool::create_poisoned("poisoned", &device, 96, 0, 0).unwrap();
    let block = pool.alloc(Gfp::KERNEL).unwrap();
    let ptr = block.as_ptr();
    drop(block);
    let block = pool.alloc(Gfp::KERNEL).unwrap();
    assert_eq!(block.as_ptr(), ptr, "the one that went last is the warmest");
    let mut slots = slots(700);
    pool.alloc_bulk(Gfp::KERNEL, &mut slots).unwrap();
    slots.push(other.alloc(Gfp::KERNEL).ok());
    std::thread::spawn(|| drop(slots)).join().unwrap();
    assert_eq!((pool.stats().in_use, other.stats().in_use), (1, 0));
    drop(block);
    pool.destroy().unwrap();
    other.destroy().unwrap();
}

/// Sixteen times as many as the arena has room for.
#[test]
fn blocks_dropped_by_early_returns_do_not_use_up_an_arena() {
    let allocator = allocator(64);
    let device = Device::new(&allocator, Identity).unwrap();
    let pool = DmaPool::create("early", &device, 64, 0, 0).unwrap();
    let command = |n: usize| -> Result<(), DeviceError> {
        let _command = pool.zalloc(Gfp::NOWAIT)?;
        let mut more = slots(n % 32);
        pool.alloc_bulk(Gfp::NOWAIT, &mut more)?;
        device.address_of(1)?; // Refused: the blocks are dropped.
        unreachable!("no arena is at address 1");
    };
    for n in 0..65_536 {
        assert_eq!(command(n), Err(DeviceError::NotHere { addr: 1 }));
    }
    let stats = pool.stats();
    assert_eq!((stats.in_use, stats.blocks <= 128), (0, true), "{} blocks", stats.blocks);
    pool.destroy().unwrap();
    assert_eq!(allocator.validate().unwrap().handed_out, 0);
}

#[test]
fn a_block_in_flight_is_not_handed_out_again() {
    own_process!(); // It counts what the process leaks.
    let device = Device::new(&allocator(1), Identity).unwrap();
    let pool = DmaPool::create("in flight", &device, 2048, 0, 0).unwrap();
    let [block, other] = [(); 2].map(|()| pool.alloc(Gfp::NOWAIT).unwrap());
    let place = addr(&block);
    let flying = InFlight::new(block);
    assert!(pool.alloc(Gfp::NOWAIT).is_err(), "the pool has two blocks");
    // SAFETY: no device has it.
    drop(unsafe { flying.done() });
    let block = pool.alloc(Gfp::NOWAIT).unwrap();
    assert_eq!(addr(&block), place);
    // A command that returns early, with blocks that a device may still write to.
    let leaked = InFlight::leaked();
    drop(InFlight::new([Some(block), Some(other)]));
    assert!(pool.alloc(Gfp::NOWAIT).is_err());
    assert_eq!((InFlight::leaked() - leaked, pool.stats().in_use), (1, 2));
    assert_eq!(pool.destroy().unwrap_err().out, 2);
}

/// Whichever comes first: the pool is gone, or it stays with a block that was out.
#[test]
fn blocks_and_their_pool_may_be_dropped_at_once() {
    let allocator = allocator(2048); // Enough if each pool stays.
    let device = Device::new(&allocator, Identity).unwrap();
    for round in 0..200 {
        let pool = DmaPool::create("going", &device, 64, 0, 0).unwrap();
        let mut slots = slots(300);
        pool.alloc_bulk(Gfp::KERNEL, &mut slots).unwrap();
        let kept = (round % 10 == 0).then(|| slots.pop());
        let start = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                drop(slots);
            });
            start.wait();
            drop(pool);
        });
        if let Some(Some(Some(block))) = &kept {
            // SAFETY: the block is ours still, and its page was not given back.
            unsafe { block.as_ptr().write_bytes(0x5a, 64) };
        }
    }
}

#[test]
fn a_pool_with_blocks_out_stays_mapped() {
    let log = Log::default();
    let allocator = allocator(64);
    let device = Device::new(&allocator, window(&log)).unwrap();
    let pool = DmaPool::create("leaks", &device, 128, 0, 0).unwrap();
    let block = pool.alloc(Gfp::KERNEL).unwrap();
    let refused = pool.destroy().unwrap_err();
    assert_eq!(refused.to_string(), "the pool leaks still has 1 block handed out; free it first");
    drop((refused, device));
    assert!(!is_unmapped(&log));
    // SAFETY: the block is ours still, and its page was not given back.
    unsafe { block.as_ptr().write_bytes(0x5a, 128) };
    assert_eq!(allocator.close().unwrap_err().pages_out.get(), 1);
}

#[test]
fn a_device_that_scribbles_over_freed_blocks_changes_nothing() {
    let device = Device::new(&allocator(256), Identity).unwrap();
    let pool = DmaPool::create("scribbled", &device, 16, 0, 0).unwrap();
    let mut blocks = slots(1000);
    pool.alloc_bulk(Gfp::KERNEL, &mut blocks).unwrap();
    let mut places: Vec<_> = blocks.iter().flatten().map(addr).collect();
    for round in 0..20u8 {
        pool.free_bulk(&mut blocks);
        for &place in &places {
            // SAFETY: mapped memory that nobody has; what a device would do that was not told in time.
            unsafe { std::ptr::with_exposed_provenance_mut::<u8>(place).write_bytes(0xf0 | round, 16) };
        }
        assert_eq!(pool.alloc_bulk(Gfp::KERNEL, &mut blocks).unwrap(), 1000);
        let mut found: Vec<_> = blocks.iter().flatten().map(addr).collect();
        found.sort_unstable();
        assert!(found.windows(2).all(|two| two[1] - two[0] >= 16), "no block twice");
        places = found;
    }
    assert_eq!((pool.stats().misused, pool.stats().in_use), (0, 1000));
    pool.free_bulk(&mut blocks);
}

#[test]
fn zalloc_zeroes_and_poison_detects_late_writes() {
    let device = Device::new(&allocator(64), Identity).unwrap();
    for is_poisoned in [false, true] {
        let make = if is_poisoned { DmaPool::create_poisoned } else { DmaPool::create };
        let pool = make("contents", &device, 96, 0, 0).unwrap();
        // SAFETY: the block is the caller's.
        let bytes = |block: &DmaBlock| unsafe { std::slice::from_raw_parts(block.as_ptr(), 96).to_vec() };
        let block = pool.alloc(Gfp::KERNEL).unwrap();
        // SAFETY: the block is ours.
        unsafe { block.as_ptr().write_bytes(0xff, 96) };
        let ptr = block.as_ptr();
        pool.free(block).unwrap();
        let block = pool.zalloc(Gfp::KERNEL).unwrap();
        assert_eq!((block.as_ptr(), bytes(&block)), (ptr, vec![0; 96]));
        pool.free(block).unwrap();
        // SAFETY: mapped memory; the last byte of a freed block.
        unsafe { ptr.add(95).write(1) };
        let block = pool.alloc(Gfp::KERNEL).unwrap();
        assert_eq!(pool.stats().misused, u64::from(is_poisoned));
        assert!(!is_poisoned || bytes(&block) == vec![0xa9; 96]);
        pool.free(block).unwrap();
        pool.destroy().unwrap();
    }
}

#[test]
fn zeroed_blocks_in_bulk_are_zero() {
    let device = Device::new(&allocator(64), Identity).unwrap();
    let pool = DmaPool::create("zero", &device, 64, 0, 0).unwrap();
    let mut slots: [Option<DmaBlock>; 8] = [const { None }; 8];
    for gfp in [Gfp::KERNEL, Gfp::KERNEL | Gfp::ZERO] {
        assert_eq!(pool.alloc_bulk(gfp, &mut slots), Ok(8));
        for block in slots.iter().flatten() {
            // SAFETY: the block is the caller's.
            let bytes = unsafe { std::slice::from_raw_parts_mut(block.as_ptr(), 64) };
            assert!(!gfp.contains(Gfp::ZERO) || *bytes == [0; 64]);
            bytes.fill(0xff);
        }
        assert_eq!(pool.free_bulk(&mut slots), 8);
    }
}

#[test]
fn blocks_have_at_most_eight_bytes_of_overhead() {
    let device = Device::new(&allocator(4096), Identity).unwrap();
    for (size, count) in [(16, 8192), (64, 8192), (256, 8192), (1024, 2048), (4096, 1024)] {
        let pool = DmaPool::create("memory", &device, size, 0, 0).unwrap();
        let mut blocks: Vec<_> = (0..count).map(|_| pool.alloc(Gfp::KERNEL).ok()).collect();
        pool.free_bulk(&mut blocks);
        let more = pool.stats().bytes_a_block() - size as f64;
        assert!((0.0..=8.0).contains(&more), "{size}: {more}");
    }
}

#[test]
fn a_forked_child_cannot_use_its_parents_pool() {
    own_process!();
    let log = Log::default();
    let device = Device::new(&allocator(64), window(&log)).unwrap();
    let pool = DmaPool::create("parent's", &device, 64, 0, 0).unwrap();
    let [block, kept] = [(); 2].map(|()| pool.alloc(Gfp::KERNEL).unwrap());
    // With blocks out that pool keeps its device. Nothing keeps this one.
    let other_log = Log::default();
    let other = Device::new(&allocator(64), window(&other_log)).unwrap();
    let mut parents = Some((pool, device, other, block, Some(kept)));
    in_child("has its parent's pool", || {
        let (pool, device, other, block, mut kept) = parents.take().unwrap();
        assert_eq!(pool.alloc(Gfp::KERNEL).unwrap_err(), DeviceError::Forked);
        assert!(pool.alloc_bulk(Gfp::KERNEL, &mut [const { None }; 4]).is_err());
        assert_eq!(device.address_of(addr(&block)), Err(DeviceError::Forked));
        assert_eq!((pool.free_bulk(std::slice::from_mut(&mut kept)), kept.is_some()), (0, true));
        assert!(pool.free(block).is_err());
        drop((kept, pool, device, other));
        assert!(!is_unmapped(&log) && !is_unmapped(&other_log));
    });
    let (pool, _device, other, block, mut kept) = parents.unwrap();
    drop(other);
    assert!(is_unmapped(&other_log), "the parent unmaps what it mapped");
    pool.free(block).unwrap();
    assert_eq!(pool.free_bulk(std::slice::from_mut(&mut kept)), 1);
    pool.destroy().unwrap();
}

#[test]
fn threads_that_free_each_others_blocks_share_none() {
    const SIZE: usize = 32;
    for allocator in allocators(512) {
        let device = Device::new(&allocator, Identity).unwrap();
        let pool = DmaPool::create("shared", &device, SIZE, 0, 0).unwrap();
        let given: Mutex<Vec<DmaBlock>> = Mutex::default();
        let start = Barrier::new(4);
        let stamp = |block: &DmaBlock, stamp: u64| {
            // SAFETY: the block is this thread's.
            unsafe { block.as_ptr().cast::<u64>().write(stamp) }
        };
        let check = |block: &DmaBlock, stamp: u64| {
            // SAFETY: the block is this thread's.
            assert_eq!(unsafe { block.as_ptr().cast::<u64>().read() }, stamp, "somebody else had it too");
        };
        std::thread::scope(|scope| {
            for thread in 1..=4u64 {
                let (pool, given, start) = (&pool, &given, &start);
                scope.spawn(move || {
                    start.wait();
                    let mut slots = [const { None }; 100];
                    let mut random = Rng::new(thread);
                    for round in 0..2000 {
                        let mine = thread << 32 | round;
                        let count = 1 + random.below(slots.len());
                        if round % 3 == 0 {
                            pool.alloc_bulk(Gfp::KERNEL, &mut slots[..count]).unwrap();
                        } else {
                            slots[..count].iter_mut().for_each(|slot| *slot = Some(pool.alloc(Gfp::KERNEL).unwrap()));
                        }
                        slots.iter().flatten().for_each(|block| stamp(block, mine));
                        std::hint::black_box(&slots);
                        slots.iter().flatten().for_each(|block| check(block, mine));
                        // Some go back by way of another thread.
                        if let Ok(mut given) = given.try_lock() {
                            let half = given.len() / 2;
                            let others = given.split_off(half);
                            given.extend(slots[..count / 2].iter_mut().filter_map(Option::take));
                            drop(given);
                            for (nth, block) in others.into_iter().enumerate() {
                                match nth % 4 {
                                    0 => drop(block),
                                    // SAFETY: the block is this thread's, and is given up.
                                    1 if round % 64 == 0 => unsafe { pool.free_raw(pool.into_raw(block)) }.unwrap(),
                                    _ => pool.free(block).unwrap(),
                                }
                            }
                        }
                        if round % 2 == 0 {
                            pool.free_bulk(&mut slots);
                        } else {
                            slots.iter_mut().filter_map(Option::take).for_each(|block| pool.free(block).unwrap());
                        }
                    }
                });
            }
        });
        given.into_inner().unwrap().into_iter().for_each(|block| pool.free(block).unwrap());
        let stats = pool.stats();
        assert_eq!((stats.in_use, stats.misused), (0, 0), "{}", allocator.backend());
        pool.destroy().unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    /// Whatever is asked for in whatever order: blocks are apart, aligned here and at the device, and cross no boundary.
    #[test]
    fn blocks_are_apart_aligned_and_cross_no_boundary(
        size in 1usize..6000, align in 0u32..10, boundary in prop::option::of(9u32..16),
        steps in prop::collection::vec((0usize..4, 0usize..150), 1..40),
    ) {
        let (align, boundary) = (1usize << align, boundary.map_or(0, |log2| 1usize << log2));
        let device = Device::new(&allocator(2048), window(&Log::default())).unwrap();
        let Ok(pool) = DmaPool::create("any", &device, size, align, boundary) else {
            prop_assert!(boundary != 0 && boundary < size.max(16).next_multiple_of(align));
            return Ok(());
        };
        let mut slots: Vec<Option<DmaBlock>> = (0..150).map(|_| None).collect();
        let mut out = 0;
        for (what, many) in steps {
            match what {
                0 => out += pool.alloc_bulk(Gfp::KERNEL, &mut slots[..many]).unwrap(),
                1 => out -= pool.free_bulk(&mut slots[many..]),
                2 => for slot in slots.iter_mut().filter(|slot| slot.is_none()).take(many / 16) {
                    *slot = Some(pool.alloc(Gfp::KERNEL).unwrap());
                    out += 1;
                },
                _ => for slot in slots.iter_mut().rev().filter(|slot| slot.is_some()).take(many / 16) {
                    pool.free(slot.take().unwrap()).unwrap();
                    out -= 1;
                },
            }
            prop_assert_eq!(pool.stats().in_use, out);
            let mut places: Vec<_> = slots.iter().flatten().map(addr).collect();
            places.sort_unstable();
            prop_assert!(places.windows(2).all(|two| two[1] - two[0] >= pool.size()));
            for block in slots.iter().flatten() {
                let there = pool.device_addr(block).get() as usize;
                prop_assert_eq!(there, addr(block) + WINDOW as usize);
                prop_assert!(there.is_multiple_of(align));
                prop_assert!(boundary == 0 || there / boundary == (there + size - 1) / boundary);
            }
        }
        pool.free_bulk(&mut slots);
        pool.destroy().unwrap();
    }
}

#[test]
fn a_pool_grows_in_the_zone_that_the_flags_name() {
    let builder = Allocator::builder().memory(Memory::anonymous(2048)).memory(Memory::anonymous(512).dma32());
    let allocator = builder.build().unwrap();
    let low = allocator.arenas().into_iter().find(|arena| arena.kind == ZoneKind::Dma32).unwrap().range;
    let pool = DmaPool::create("low", &Device::new(&allocator, Identity).unwrap(), 1024, 1024, 0).unwrap();
    let blocks: Vec<DmaBlock> = (0..100).map(|_| pool.alloc(Gfp::KERNEL | Gfp::DMA32).unwrap()).collect();
    assert!(blocks.iter().all(|block| low.contains(&addr(block))));
}

#[test]
fn a_pool_that_must_grow_refuses_contradictory_flags() {
    let pool = DmaPool::create("flags", &Device::new(&allocator(64), Identity).unwrap(), 64, 64, 0).unwrap();
    for gfp in [Gfp::NOWAIT | Gfp::NOFAIL, Gfp::KERNEL | Gfp::ATOMIC] {
        let refused = [pool.alloc(gfp).map(drop), pool.alloc_bulk(gfp, &mut slots::<DmaBlock>(4)).map(drop)];
        for refused in refused {
            assert!(matches!(refused, Err(DeviceError::Memory(Error::Invalid(_)))), "{gfp:?}: {refused:?}");
        }
    }
}

/// A page of a KV cache: 266 pages. As a block of a power of two pages it would use 52 % of the arena.
#[test]
fn blocks_of_an_odd_number_of_pages_use_98_percent_of_an_arena() {
    for (size, pages) in [(1_089_536, 40 * 266 + 30), (12_288, 4096), (20_000, 4096)] {
        let allocator = Allocator::builder().pages(pages).build().unwrap();
        let device = Device::new(&allocator, Identity).unwrap();
        let pool = DmaPool::create("kv", &device, size, 256, 0).unwrap();
        let mut blocks: Vec<Option<DmaBlock>> = Vec::new();
        while let Ok(block) = pool.alloc(Gfp::KERNEL) {
            assert!(pool.device_addr(&block).get().is_multiple_of(256));
            // SAFETY: the test owns the block, and no device uses it.
            unsafe { block.as_ptr().write_bytes(blocks.len() as u8, size) };
            blocks.push(Some(block));
        }
        let used = blocks.len() * size;
        assert!(used * 100 >= pages * 4096 * if size == 20_000 { 97 } else { 98 }, "{used} of {pages} pages");
        assert_eq!((pool.stats().in_use, pool.stats().pages), (blocks.len(), blocks.len() * size.div_ceil(4096)));
        for (nth, block) in blocks.iter().flatten().enumerate() {
            // SAFETY: as above.
            let bytes = unsafe { std::slice::from_raw_parts(block.as_ptr(), size) };
            assert!(bytes.iter().all(|&byte| byte == nth as u8), "block {nth} was written to by another one's owner");
        }
        // In any form, and by pointers to their first byte alone.
        let raw = pool.into_raw(blocks.swap_remove(7).unwrap());
        // SAFETY: the test owns the block; all calls but one are deliberate misuse.
        unsafe {
            assert!(pool.free_raw(raw.wrapping_add(4096)).is_err());
            pool.free_raw(raw).unwrap();
            assert!(pool.free_raw(raw).is_err());
        }
        drop(blocks.pop());
        assert_eq!(pool.free_bulk(&mut blocks), blocks.len());
        assert_eq!(pool.stats().in_use, 0);
        pool.destroy().unwrap();
        drop(device);
        allocator.drain();
        assert_eq!(allocator.validate().unwrap().free, pages);
    }
}

/// A reader that has the pool for a moment must not be the one that frees it, after `destroy` has returned.
#[test]
fn a_destroyed_pools_pages_are_back_while_others_read_its_statistics() {
    let allocator = one_cpu(Memory::anonymous(64));
    let device = Device::new(&allocator, Identity).unwrap();
    let shown = Mutex::new(None::<pagemill::WeakDmaPool>);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let relaxed = std::sync::atomic::Ordering::Relaxed;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(relaxed) {
                let weak = shown.lock().unwrap().clone();
                // Until it is gone.
                while weak.as_ref().is_some_and(|weak| weak.stats().is_some()) {}
            }
        });
        for round in 0..2000 {
            let pool = DmaPool::create("short-lived", &device, 256, 256, 0).unwrap();
            *shown.lock().unwrap() = Some(pool.downgrade());
            drop(pool.alloc(Gfp::KERNEL).unwrap());
            pool.destroy().unwrap();
            if allocator.validate().unwrap().handed_out != 0 {
                is_over.store(true, relaxed);
                panic!("round {round}: pages are out");
            }
        }
        is_over.store(true, relaxed);
    });
}
