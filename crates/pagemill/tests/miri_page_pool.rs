//! A pool of pages that circulate, on the portable backend, for miri: no undefined behaviour, no data race, no leak. See
//! `miri_portable`.
use pagemill::{Allocator, Backend, Gfp, PagePool, PageSource, PoolPage, page_pools};

fn allocator(pages: usize) -> Allocator {
    Allocator::builder().pages(pages).backend(Backend::Portable).huge_pages(false).build().unwrap()
}

/// The last page is returned by a thread that may still be in the ring as the pool ends, and somebody looks.
#[test]
fn threads_return_pages_while_the_pool_ends() {
    let allocator = allocator(32);
    for destroy in [false, true] {
        let mut pool = PagePool::with_ring(PageSource::pages(&allocator), 4).unwrap();
        let mut pages = [const { None::<PoolPage> }; 8];
        assert_eq!(pool.alloc_bulk(Gfp::NOWAIT, &mut pages).unwrap(), 8);
        pages.iter_mut().flatten().for_each(|page| page[0] = 1);
        std::thread::scope(|scope| {
            for part in pages.chunks_mut(4) {
                scope.spawn(|| {
                    drop(part[0].take());
                    assert_eq!(PoolPage::put_bulk(part), 3);
                });
            }
            scope.spawn(|| page_pools().iter().map(|pool| pool.stats.in_flight).sum::<usize>());
            if destroy {
                drop(pool.destroy());
            } else {
                drop(pool);
            }
        });
    }
    allocator.close().unwrap();
}

#[test]
fn fragments_are_written_on_several_threads() {
    let allocator = allocator(16);
    let mut pool = PagePool::pages(&allocator);
    let frags: Vec<_> = (0..5).map(|_| pool.alloc_frag(Gfp::NOWAIT, 1000).unwrap()).collect();
    std::thread::scope(|scope| {
        for mut frag in frags {
            scope.spawn(move || frag[..8].fill(1));
        }
        let page = pool.alloc(Gfp::NOWAIT).unwrap();
        pool.put(page);
        drop(PoolPage::release(pool.alloc(Gfp::NOWAIT).unwrap()));
        drop(pool);
    });
    allocator.close().unwrap();
}
