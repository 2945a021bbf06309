//! dma_pool (C6): blocks with device addresses, their bounds, growth, misuse, what a device may do to them, and many threads.
use pagemill::{
    Allocator, Backend, Device, DeviceAddr, DeviceError, DeviceMap, DmaBlock, DmaPool, Error, Gfp, Identity, Mapped,
    Memory, MisuseKind, Shrink, Shrinker,
};
use proptest::prelude::*;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier, Mutex};

/// A device that sees each arena a fixed distance away, and what it was told.
#[derive(Clone, Default)]
struct Window(Arc<Mutex<Vec<Told>>>);
/// An arena, and whether it was mapped or unmapped.
type Told = (Range<usize>, bool);
const WINDOW: u64 = 1 << 50;

impl DeviceMap for Window {
    unsafe fn map(&self, memory: Range<usize>) -> Result<Mapped, DeviceError> {
        let addr = DeviceAddr::new(memory.start as u64 + WINDOW);
        self.0.lock().unwrap().push((memory, true));
        Ok(Mapped::Linear(addr))
    }
    fn unmap(&self, memory: Range<usize>, mapped: &Mapped) {
        assert_eq!(*mapped, Mapped::Linear(DeviceAddr::new(memory.start as u64 + WINDOW)));
        self.0.lock().unwrap().push((memory, false));
    }
}

/// A device that sees the pages of an arena in the opposite order.
struct Backwards;
impl DeviceMap for Backwards {
    unsafe fn map(&self, memory: Range<usize>) -> Result<Mapped, DeviceError> {
        let pages = memory.len() / 4096;
        Ok(Mapped::Pages((0..pages).map(|page| DeviceAddr::new(((pages - page) * 4096) as u64)).collect()))
    }
    fn unmap(&self, _memory: Range<usize>, _mapped: &Mapped) {}
}

fn allocator(pages: usize) -> Allocator {
    Allocator::builder().pages(pages).build().unwrap()
}

fn addr(block: &DmaBlock) -> usize {
    block.as_ptr().addr()
}

#[test]
fn each_arena_is_mapped_once_and_unmapped_with_the_last_handle() {
    let window = Window::default();
    let allocator = allocator(512);
    let device = Device::new(&allocator, window.clone()).unwrap();
    let pool = DmaPool::create("first", &device, 64, 0, 0).unwrap();
    let other = DmaPool::create("second", &device, 4096, 0, 0).unwrap();
    let block = pool.alloc(Gfp::KERNEL).unwrap();
    let page = other.alloc(Gfp::KERNEL).unwrap();
    for (pool, block) in [(&pool, &block), (&other, &page)] {
        assert_eq!(pool.device_addr(block).get(), addr(block) as u64 + WINDOW);
        assert_eq!(device.address_of(addr(block) + 63).unwrap(), pool.device_addr(block).offset(63));
    }
    assert_eq!(window.0.lock().unwrap().len(), 1);

    // One that is added later: when a page of it is met.
    let more = allocator.add_memory(Memory::anonymous(512)).unwrap();
    let range = allocator.arenas().into_iter().find(|arena| arena.id == more).unwrap().range;
    assert_eq!(device.address_of(range.start).unwrap().get(), range.start as u64 + WINDOW);
    device.address_of(range.end - 1).unwrap();
    assert_eq!(window.0.lock().unwrap().len(), 2);
    let outside = std::ptr::from_ref(&window).addr();
    assert_eq!(device.address_of(outside), Err(DeviceError::NotHere { addr: outside }));

    pool.free(block).unwrap();
    other.free(page).unwrap();
    drop(device);
    pool.destroy().unwrap();
    assert_eq!(window.0.lock().unwrap().len(), 2, "a pool still uses it");
    other.destroy().unwrap();
    let told = window.0.lock().unwrap().clone();
    assert_eq!(told[2..], [(told[0].0.clone(), false), (told[1].0.clone(), false)]);
}

#[test]
fn blocks_of_a_new_page_come_in_ascending_order_and_those_that_went_last_first() {
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

        let mut slots: Vec<_> = (0..blocks).map(|_| None).collect();
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
fn what_no_block_can_be_is_refused_in_words() {
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
    let scattered = Device::new(&allocator(64), Backwards).unwrap();
    let refused = DmaPool::create("x", &scattered, 8192, 0, 0).unwrap_err();
    assert_eq!(refused, DeviceError::Scattered { size: 8192 });
}

#[test]
fn a_device_that_sees_each_page_elsewhere_has_an_address_for_each_byte() {
    let allocator = allocator(64);
    let start = allocator.arenas()[0].range.start;
    let device = Device::new(&allocator, Backwards).unwrap();
    let pool = DmaPool::create("pages apart", &device, 48, 0, 0).unwrap();
    let mut blocks: Vec<_> = (0..600).map(|_| None).collect();
    pool.alloc_bulk(Gfp::KERNEL, &mut blocks).unwrap();
    for block in blocks.iter().flatten() {
        let (page, offset) = ((addr(block) - start) / 4096, addr(block) % 4096);
        assert_eq!(pool.device_addr(block).get(), ((64 - page) * 4096 + offset) as u64);
    }
    pool.free_bulk(&mut blocks);
}

#[test]
fn a_device_whose_addresses_are_less_aligned_is_refused() {
    struct Askew;
    impl DeviceMap for Askew {
        unsafe fn map(&self, _: Range<usize>) -> Result<Mapped, DeviceError> {
            Ok(Mapped::Linear(DeviceAddr::new(0x1_0100)))
        }
        fn unmap(&self, _: Range<usize>, _: &Mapped) {}
    }
    let allocator = allocator(64);
    let device = Device::new(&allocator, Askew).unwrap();
    let pool = DmaPool::create("aligned", &device, 512, 512, 0).unwrap();
    assert!(matches!(pool.alloc(Gfp::KERNEL), Err(DeviceError::Unaligned { align: 4096, .. })));
    drop((pool, device));
    allocator.close().unwrap(); // the page went back
}

#[test]
fn a_map_that_gives_impossible_addresses_is_refused_in_words_and_unmapped() {
    /// Says this of every arena.
    struct Says(Mapped, Arc<AtomicUsize>);
    impl DeviceMap for Says {
        unsafe fn map(&self, _: Range<usize>) -> Result<Mapped, DeviceError> {
            self.1.fetch_add(1, Relaxed);
            Ok(self.0.clone())
        }
        fn unmap(&self, _: Range<usize>, mapped: &Mapped) {
            assert_eq!(*mapped, self.0);
            self.1.fetch_sub(1, Relaxed);
        }
    }
    let pages = |count: u64| Mapped::Pages((1..=count).map(|page| DeviceAddr::new(page << 12)).collect());
    let last_page = DeviceAddr::new(u64::MAX << 12);
    let mapped = Arc::new(AtomicUsize::new(0));
    let new = |says: &Mapped| {
        let allocator = allocator(64);
        let device = Device::new(&allocator, Says(says.clone(), mapped.clone()));
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
        assert_eq!(mapped.load(Relaxed), 0, "what is refused is unmapped");
    }
    // The last address is one.
    assert_eq!(new(&Mapped::Linear(DeviceAddr::new(u64::MAX - (64 << 12) + 1))).unwrap(), Ok(u64::MAX));
    assert_eq!(new(&Mapped::Pages([last_page; 64].into())).unwrap(), Ok(u64::MAX));
}

#[test]
fn an_offset_beyond_the_last_device_address_panics_in_words() {
    let last = DeviceAddr::new(u64::MAX - 8);
    assert_eq!(last.offset(8).get(), u64::MAX);
    let why = catch_unwind(|| last.offset(9)).unwrap_err();
    let why = why.downcast_ref::<&str>().copied().unwrap_or_default();
    assert!(why.contains("beyond the last address of a device"), "{why}");
}

#[test]
fn memory_that_is_out_is_an_error_and_what_other_cpus_have_is_found_first() {
    let device = Device::new(&allocator(4), Identity).unwrap();
    let pool = DmaPool::create("small", &device, 256, 0, 0).unwrap();
    let mut blocks: Vec<_> = (0..64).map(|_| None).collect();
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
    static CPU: AtomicUsize = AtomicUsize::new(0);
    let elsewhere = Allocator::builder().pages(1).cpus(2, || CPU.load(Relaxed)).build().unwrap();
    let device = Device::new(&elsewhere, Identity).unwrap();
    let pool = DmaPool::create("elsewhere", &device, 256, 0, 0).unwrap();
    pool.free(pool.alloc(Gfp::KERNEL).unwrap()).unwrap();
    CPU.store(1, Relaxed);
    let mut blocks = [const { None }; 16];
    assert_eq!(pool.alloc_bulk(Gfp::KERNEL, &mut blocks).unwrap(), 16);
    assert_eq!(pool.free_bulk(&mut blocks), 16);
}

/// A shrinker that panics in the middle of a request for more than there is.
#[test]
fn a_request_that_unwinds_gives_its_blocks_back() {
    struct Panics;
    impl Shrinker for Panics {
        fn shrink(&self, _: Shrink) -> usize {
            panic!("a shrinker that panics on purpose")
        }
    }
    let allocator = allocator(512);
    let _registered = allocator.register_shrinker(Arc::new(Panics));
    let pool = DmaPool::create("unwound", &Device::new(&allocator, Identity).unwrap(), 1024, 0, 0).unwrap();
    let mut blocks: Vec<_> = (0..10_000).map(|_| None).collect();
    let ask = AssertUnwindSafe(|| pool.alloc_bulk(Gfp::KERNEL, &mut blocks));
    assert!(catch_unwind(ask).is_err());
    assert_eq!((blocks.iter().flatten().count(), pool.stats().in_use), (0, 0));
    pool.destroy().unwrap();
}

/// A device that sees the first arena in one piece, and of later ones the middle pages of each four in the opposite order.
#[test]
fn a_block_of_several_pages_that_are_elsewhere_is_refused() {
    struct Shuffling(AtomicUsize);
    impl DeviceMap for Shuffling {
        unsafe fn map(&self, memory: Range<usize>) -> Result<Mapped, DeviceError> {
            if self.0.fetch_add(1, Relaxed) == 0 {
                return Ok(Mapped::Linear(DeviceAddr::new(memory.start as u64)));
            }
            let place = |page: usize| [0, 2, 1, 3][page % 4] + page / 4 * 4;
            let pages =
                (0..memory.len() / 4096).map(|page| DeviceAddr::new((memory.start + place(page) * 4096) as u64));
            Ok(Mapped::Pages(pages.collect()))
        }
        fn unmap(&self, _memory: Range<usize>, _mapped: &Mapped) {}
    }
    let allocator = allocator(512);
    let device = Device::new(&allocator, Shuffling(AtomicUsize::new(0))).unwrap();
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
fn misuse_is_told_and_changes_nothing() {
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
fn a_block_that_is_dropped_goes_back_to_its_pool() {
    let device = Device::new(&allocator(64), Identity).unwrap();
    let pool = DmaPool::create("dropped", &device, 96, 0, 0).unwrap();
    let other = DmaPool::create_poisoned("poisoned", &device, 96, 0, 0).unwrap();
    let block = pool.alloc(Gfp::KERNEL).unwrap();
    let ptr = block.as_ptr();
    drop(block);
    let block = pool.alloc(Gfp::KERNEL).unwrap();
    assert_eq!(block.as_ptr(), ptr, "the one that went last is the warmest");
    let mut slots: Vec<_> = (0..700).map(|_| None).collect();
    pool.alloc_bulk(Gfp::KERNEL, &mut slots).unwrap();
    slots.push(other.alloc(Gfp::KERNEL).ok());
    std::thread::spawn(|| drop(slots)).join().unwrap();
    assert_eq!((pool.stats().in_use, other.stats().in_use), (1, 0));
    drop(block);
    pool.destroy().unwrap();
    other.destroy().unwrap();
}

/// Whichever comes first: the pool is gone, or it stays with a block that was out.
#[test]
fn blocks_are_dropped_while_their_pool_is() {
    let allocator = allocator(2048); // Enough if each pool stays.
    let device = Device::new(&allocator, Identity).unwrap();
    for round in 0..200 {
        let pool = DmaPool::create("going", &device, 64, 0, 0).unwrap();
        let mut slots: Vec<_> = (0..300).map(|_| None).collect();
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
    let window = Window::default();
    let allocator = allocator(64);
    let device = Device::new(&allocator, window.clone()).unwrap();
    let pool = DmaPool::create("leaks", &device, 128, 0, 0).unwrap();
    let block = pool.alloc(Gfp::KERNEL).unwrap();
    let refused = pool.destroy().unwrap_err();
    assert_eq!(refused.to_string(), "the pool leaks still has 1 block handed out; free it first");
    drop((refused, device));
    assert_eq!(window.0.lock().unwrap().iter().filter(|(_, is_mapped)| !is_mapped).count(), 0);
    // SAFETY: the block is ours still, and its page was not given back.
    unsafe { block.as_ptr().write_bytes(0x5a, 128) };
    assert_eq!(allocator.close().unwrap_err().pages_out.get(), 1);
}

#[test]
fn a_device_that_scribbles_over_freed_blocks_changes_nothing() {
    let device = Device::new(&allocator(256), Identity).unwrap();
    let pool = DmaPool::create("scribbled", &device, 16, 0, 0).unwrap();
    let mut blocks: Vec<_> = (0..1000).map(|_| None).collect();
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
fn zeroed_blocks_are_zero_and_poison_tells_who_wrote_late() {
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
fn blocks_take_at_most_eight_bytes_more_than_their_size() {
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
fn the_child_of_a_fork_gets_no_block_of_the_parents() {
    own_process!();
    let window = Window::default();
    let device = Device::new(&allocator(64), window.clone()).unwrap();
    let pool = DmaPool::create("parent's", &device, 64, 0, 0).unwrap();
    let block = pool.alloc(Gfp::KERNEL).unwrap();
    let mut kept = Some(pool.alloc(Gfp::KERNEL).unwrap());
    // With blocks out that pool keeps its device. Nothing keeps this one.
    let other_window = Window::default();
    let other = Device::new(&allocator(64), other_window.clone()).unwrap();
    let is_unmapped = |window: &Window| window.0.lock().unwrap().iter().any(|(_, is_mapped)| !is_mapped);
    // SAFETY: the child calls what may be called in the child of a program with threads: it allocates by Pagemill alone.
    match unsafe { libc::fork() } {
        0 => {
            let mut slots = [const { None }; 4];
            let is_refused = pool.alloc(Gfp::KERNEL).is_err_and(|error| error == DeviceError::Forked)
                && pool.alloc_bulk(Gfp::KERNEL, &mut slots).is_err()
                && device.address_of(addr(&block)) == Err(DeviceError::Forked)
                && pool.free_bulk(std::slice::from_mut(&mut kept)) == 0
                && kept.is_some()
                && pool.free(block).is_err();
            drop(kept);
            drop((pool, device, other));
            let is_unmapped = is_unmapped(&window) || is_unmapped(&other_window);
            // SAFETY: ends the child without what the parent's exit runs.
            unsafe { libc::_exit(if is_refused && !is_unmapped { 0 } else { 1 }) }
        }
        child => {
            let mut status = 0;
            // SAFETY: the child made above.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0);
        }
    }
    drop(other);
    assert!(is_unmapped(&other_window), "the parent unmaps what it mapped");
    pool.free(block).unwrap();
    assert_eq!(pool.free_bulk(std::slice::from_mut(&mut kept)), 1);
    pool.destroy().unwrap();
}

#[test]
fn many_threads_take_and_return_each_others_blocks_and_each_has_one_owner() {
    const SIZE: usize = 32;
    for backend in [Backend::Portable, Backend::Rseq] {
        let Ok(allocator) = Allocator::builder().pages(512).backend(backend).build() else {
            assert!(pagemill::self_test().is_err());
            continue;
        };
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
                    let mut dice = thread;
                    for round in 0..2000 {
                        let mine = thread << 32 | round;
                        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let count = 1 + (dice >> 33) as usize % slots.len();
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
        assert_eq!((stats.in_use, stats.misused), (0, 0), "{backend}");
        pool.destroy().unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    /// Whatever is asked for in whatever order: blocks are apart, aligned here and at the device, and cross no boundary.
    #[test]
    fn any_order_of_requests_keeps_blocks_apart(
        size in 1usize..6000, align in 0u32..10, boundary in prop::option::of(9u32..16),
        steps in prop::collection::vec((0usize..4, 0usize..150), 1..40),
    ) {
        let (align, boundary) = (1usize << align, boundary.map_or(0, |log2| 1usize << log2));
        let device = Device::new(&allocator(2048), Window::default()).unwrap();
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
