//! Pools of blocks on the portable backend, for miri: no undefined behaviour, no data race, no leak. See `miri_portable`.
use pagemill::{Allocator, Backend, Device, DmaPool, Gfp, Identity};

#[test]
fn blocks_are_freed_singly_in_bulk_and_by_address() {
    let allocator = Allocator::builder().pages(24).backend(Backend::Portable).huge_pages(false).build().unwrap();
    let device = Device::new(&allocator, Identity).unwrap();
    for (make, size, boundary) in [
        (DmaPool::create as fn(_, &_, _, _, _) -> _, 24, 256),
        (DmaPool::create, 4096, 0),
        (DmaPool::create_poisoned, 700, 0),
    ] {
        let pool: DmaPool = make("miri", &device, size, 8, boundary).unwrap();
        let mut slots: Vec<_> = (0..12).map(|_| None).collect();
        slots[5] = Some(pool.zalloc(Gfp::KERNEL).unwrap());
        assert_eq!(pool.alloc_bulk(Gfp::KERNEL, &mut slots).unwrap(), 11);
        for block in slots.iter().flatten() {
            // SAFETY: the block is ours.
            unsafe { block.as_ptr().write_bytes(0x5a, size) };
            assert_eq!(pool.device_addr(block).get(), block.as_ptr().addr() as u64);
        }
        let block = slots[7].take().unwrap();
        // SAFETY: the block was given up, once.
        unsafe { pool.free_raw(pool.into_raw(block)) }.unwrap();
        pool.free(slots[2].take().unwrap()).unwrap();
        assert_eq!(pool.free_bulk(&mut slots), 10);
        // All of them in a row, and back.
        assert_eq!(pool.alloc_bulk(Gfp::KERNEL, &mut slots[..8]).unwrap(), 8);
        assert_eq!(pool.free_bulk(&mut slots[..8]), 8);
        pool.destroy().unwrap();
    }
    drop(device);
    allocator.close().unwrap();
}

#[test]
fn threads_share_a_pool() {
    let allocator = Allocator::builder().pages(8).backend(Backend::Portable).huge_pages(false).build().unwrap();
    let device = Device::new(&allocator, Identity).unwrap();
    let pool = DmaPool::create("miri", &device, 64, 0, 0).unwrap();
    let given = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut slots = [const { None }; 8];
                pool.alloc_bulk(Gfp::KERNEL, &mut slots).unwrap();
                for block in slots.iter().flatten() {
                    // SAFETY: the block is this thread's.
                    unsafe { block.as_ptr().write(1) };
                }
                given.lock().unwrap().extend(slots.iter_mut().filter_map(Option::take));
            });
        }
    });
    // Some go back by themselves, in another thread, while others are taken.
    let given = given.into_inner().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| drop(given));
        pool.free(pool.alloc(Gfp::KERNEL).unwrap()).unwrap();
    });
    pool.destroy().unwrap();
}
