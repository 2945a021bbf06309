//! Pages that circulate: the cache, the ring, fragments, and the end of a pool with pages out (C7).
use crate::common::{Rng, all, allocator, allocators, assert_all_back, in_child, one_cpu};
use pagemill::{
    Allocator, Block, Bulk, Ending, Error, Exact, Gfp, InvalidRequest, Memory, MisuseKind, NodeId, Order, Page,
    PagePool, PagePoolInfo, PagePoolStats, PageSource, PoolPage, Source, Why, free_pages_bulk_raw, free_raw,
    page_pools,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};

const CACHE: usize = 128;
const REFILL: usize = 64;

fn take<S: Source>(pool: &mut PagePool<S>, n: usize) -> Vec<Option<PoolPage<S>>> {
    let mut slots: Vec<_> = (0..n).map(|_| None).collect();
    assert_eq!(pool.alloc_bulk(Gfp::NOWAIT, &mut slots).unwrap(), n);
    slots
}

#[test]
fn an_empty_cache_is_filled_by_one_bulk_request() {
    for allocator in allocators(1024) {
        let mut pool = PagePool::pages(&allocator);
        let calls = |of: &Allocator| of.stats().bulk_alloc.iter().sum::<u64>();
        let before = calls(&allocator);
        let pages = take(&mut pool, REFILL);
        assert_eq!(calls(&allocator), before + 1);
        let more = take(&mut pool, 1);
        let stats = pool.stats();
        assert_eq!((stats.slow, stats.fast, stats.empty, stats.refill), (2, REFILL as u64 - 1, 2, 0));
        assert_eq!(stats.in_flight, REFILL + 1);
        drop((pages, more));
        drop(pool);
        assert_all_back(&allocator);
    }
}

#[test]
fn a_request_goes_on_with_whatever_came() {
    let allocator = one_cpu(Memory::anonymous(100));
    let mut pool = PagePool::pages(&allocator);
    let pages = take(&mut pool, 100);
    let Err(Error::Exhausted(none)) = pool.alloc(Gfp::NOWAIT) else { panic!("there are 100 pages") };
    assert_eq!((none.wanted, none.got, none.why), (1, 0, Why::Exhausted));
    assert_eq!(pool.stats().slow, 3);
    assert_eq!(pool.alloc_bulk(Gfp::NOWAIT, &mut [None, None]).unwrap_err(), none.into());
    drop(pages);
    assert_eq!(take(&mut pool, 100).len(), 100);
}

#[test]
fn pages_that_are_dropped_come_back_by_the_ring() {
    let allocator = allocator(1024);
    let mut pool = PagePool::pages(&allocator);
    let mut pages = take(&mut pool, REFILL);
    let mut addrs: Vec<usize> = pages.iter().flatten().map(|page| page.addr()).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            drop(pages.pop());
            assert_eq!(PoolPage::put_bulk(&mut pages), REFILL - 1);
        });
    });
    assert_eq!((pool.stats().ring, pool.in_flight()), (REFILL as u64, 0));
    let again = take(&mut pool, REFILL);
    let mut others: Vec<usize> = again.iter().flatten().map(|page| page.addr()).collect();
    addrs.sort_unstable();
    others.sort_unstable();
    assert_eq!(addrs, others, "the same pages circulate");
    let stats = pool.stats();
    assert_eq!((stats.refill, stats.slow, stats.empty), (1, 1, 1));
}

#[test]
fn a_full_cache_and_a_full_ring_let_pages_go() {
    let allocator = one_cpu(Memory::anonymous(1024));
    let mut pool = PagePool::with_ring(PageSource::pages(&allocator), 16).unwrap();
    let mut pages = take(&mut pool, CACHE + 20);
    assert_eq!(pool.put_bulk(&mut pages), CACHE + 20);
    let stats = pool.stats();
    // What was in the cache already counts towards its 128.
    let in_cache = (3 * REFILL - (CACHE + 20)) as u64;
    assert_eq!((stats.cached, stats.cache_full), (CACHE as u64 - in_cache, 20 + in_cache));
    assert_eq!((stats.ring, stats.ring_full, stats.in_flight), (16, 4 + in_cache, 0));
    let page = take(&mut pool, 1).pop().flatten().unwrap();
    pool.put(page);
    assert_eq!(pool.stats().cached, stats.cached + 1);
    // The pool has 128 and 16 pages, all others are the allocator's.
    assert_eq!(all(&allocator, Gfp::NOWAIT).len(), 1024 - CACHE - 16);
    drop(pool);
    assert_all_back(&allocator);
}

#[test]
fn a_page_that_is_released_is_an_ordinary_one() {
    let allocator = one_cpu(Memory::anonymous(256));
    let mut pool = PagePool::pages(&allocator);
    let page = PoolPage::release(pool.alloc(Gfp::NOWAIT).unwrap());
    assert_eq!(pool.in_flight(), 0);
    drop(pool);
    let stats = allocator.stats();
    assert_eq!(stats.allocated - stats.freed, 1);
    drop(page);
    assert_all_back(&allocator);
}

#[test]
fn a_pool_that_ended_takes_its_pages_back_one_by_one() {
    let allocator = one_cpu(Memory::anonymous(256));
    let mut pool = PagePool::pages(&allocator);
    let mut pages = take(&mut pool, 10);
    pages[9].as_mut().unwrap()[0] = 9;
    let ending: Ending = pool.destroy();
    assert_eq!(ending.in_flight(), 10);
    assert_eq!(
        ending.to_string(),
        format!("10 pages are still out, {} s after the pool's end", ending.age().as_secs())
    );
    assert_eq!(all(&allocator, Gfp::NOWAIT).len(), 246, "the cache's went back");
    drop(pages.remove(0));
    assert_eq!(ending.in_flight(), 9);
    assert_eq!(all(&allocator, Gfp::NOWAIT).len(), 247, "it is not recycled");
    assert_eq!(PoolPage::put_bulk(&mut pages[..8]), 8);
    let last = PoolPage::release(pages[8].take().unwrap());
    assert_eq!((ending.in_flight(), last[0]), (0, 9));
    drop((ending, last));
    assert_all_back(&allocator);
}

/// Numbers; the even ones are on node 0, the odd ones on node 1.
struct Numbers {
    left: Mutex<Vec<u32>>,
    freed: AtomicUsize,
    /// What `fill` says, and how many it fills in fact.
    says: Option<(usize, usize)>,
}

impl Numbers {
    fn new(n: u32) -> Self {
        Self { left: Mutex::new((0..n).rev().collect()), freed: AtomicUsize::new(0), says: None }
    }
}

impl Source for Numbers {
    type Item = u32;
    fn alloc(&self, _: Bulk<'_, Exact, u32>) -> Result<Option<u32>, Error> {
        Ok(self.left.lock().unwrap().pop())
    }
    fn free(&self, number: u32) {
        self.freed.fetch_add(1, SeqCst);
        self.left.lock().unwrap().push(number);
    }
    fn fill(&self, request: Bulk<'_, Exact, u32>, slots: &mut [Option<u32>]) -> Result<usize, Error> {
        let (said, fills) = self.says.unwrap_or((slots.len(), slots.len()));
        for slot in slots.iter_mut().take(fills) {
            *slot = self.alloc(request)?;
        }
        Ok(said)
    }
    fn node_of(&self, number: &u32) -> Option<NodeId> {
        NodeId::new(*number as usize % 2)
    }
}

#[test]
fn pages_of_another_node_go_back_to_the_source() {
    let mut pool = PagePool::new(Numbers::new(64)).on_node(NodeId::new(1).unwrap());
    let pages = take(&mut pool, 64);
    drop(pages);
    let again = take(&mut pool, 32);
    assert!(again.iter().flatten().all(|number| **number % 2 == 1));
    let stats = pool.stats();
    assert_eq!((stats.waive, stats.refill, stats.ring, stats.slow), (32, 1, 64, 1));
    assert_eq!((pool.source().freed.load(SeqCst), pool.in_flight()), (32, 32));
}

#[test]
fn a_source_that_lies_loses_nothing() {
    for (said, fills) in [(64, 3), (0, 5), (2, 64), (64, 0)] {
        let mut pool = PagePool::new(Numbers { says: Some((said, fills)), ..Numbers::new(64) });
        let mut pages: Vec<_> = (0..fills).map(|_| pool.alloc(Gfp::NOWAIT).unwrap()).collect();
        assert_eq!(pool.in_flight(), fills);
        let one_more = pool.alloc(Gfp::NOWAIT);
        assert_eq!(one_more.is_ok(), fills > 0 && fills < 64, "{said}, {fills}");
        pages.extend(one_more);
        drop(pages);
        assert_eq!(pool.in_flight(), 0);
    }
}

/// Says that it filled every slot, and leaves every other one empty.
struct Holes(Arc<Numbers>);

impl Source for Holes {
    type Item = u32;
    fn alloc(&self, request: Bulk<'_, Exact, u32>) -> Result<Option<u32>, Error> {
        self.0.alloc(request)
    }
    fn free(&self, number: u32) {
        self.0.free(number);
    }
    fn fill(&self, request: Bulk<'_, Exact, u32>, slots: &mut [Option<u32>]) -> Result<usize, Error> {
        for slot in slots.iter_mut().skip(1).step_by(2) {
            *slot = self.alloc(request)?;
        }
        Ok(slots.len())
    }
}

#[test]
fn a_source_that_leaves_holes_loses_nothing_and_keeps_nothing_alive() {
    for taken in [1, 16, 31, 32, 33, 40] {
        let numbers = Arc::new(Numbers::new(1000));
        let mut pool = PagePool::new(Holes(Arc::clone(&numbers)));
        let mut pages: Vec<_> = (0..taken).map(|_| pool.alloc(Gfp::NOWAIT).unwrap()).collect();
        let mut seen: Vec<u32> = pages.iter().map(|page| **page).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), taken);
        pool.put(pages.pop().unwrap());
        let ending = pool.destroy();
        assert_eq!(ending.in_flight(), taken - 1);
        drop(pages);
        assert_eq!(ending.in_flight(), 0);
        assert_eq!(numbers.left.lock().unwrap().len(), 1000);
        assert_eq!(Arc::strong_count(&numbers), 1, "the pool's source is gone");
    }
}

#[test]
fn holes_cost_the_caller_no_slot_and_count_nowhere() {
    let mut pool = PagePool::new(Holes(Arc::new(Numbers::new(1000))));
    let first = pool.alloc(Gfp::NOWAIT).unwrap();
    assert_eq!((pool.stats().fast, pool.in_flight()), (0, 1));
    let mut slots = [const { None }; 1];
    assert_eq!(pool.alloc_bulk(Gfp::NOWAIT, &mut slots).unwrap(), 1);
    let mut more = [const { None }; 60];
    assert_eq!(pool.alloc_bulk(Gfp::NOWAIT, &mut more).unwrap(), 60);
    assert!(more.iter().all(Option::is_some));
    // 62 taken, of which one was for the first refill and one for the second, which began at the 33rd.
    assert_eq!((pool.stats().fast, pool.stats().slow, pool.in_flight()), (60, 2, 62));
    assert_eq!(pool.put_bulk(&mut more) + pool.put_bulk(&mut slots), 61);
    drop(first);
    assert_eq!(pool.in_flight(), 0);
}

#[test]
fn a_source_that_unwinds_in_fill_has_its_items_dropped() {
    struct Counted(Arc<AtomicUsize>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, SeqCst);
        }
    }
    struct Unwinds(Arc<AtomicUsize>);
    impl Source for Unwinds {
        type Item = Counted;
        fn alloc(&self, _: Bulk<'_, Exact, Counted>) -> Result<Option<Counted>, Error> {
            unreachable!("it is asked for many")
        }
        fn free(&self, item: Counted) {
            drop(item);
        }
        fn fill(&self, _: Bulk<'_, Exact, Counted>, slots: &mut [Option<Counted>]) -> Result<usize, Error> {
            slots[..10].fill_with(|| Some(Counted(Arc::clone(&self.0))));
            panic!("a source that panics on purpose");
        }
    }
    let dropped = Arc::new(AtomicUsize::new(0));
    let mut pool = PagePool::new(Unwinds(Arc::clone(&dropped)));
    assert!(catch_unwind(AssertUnwindSafe(|| pool.alloc(Gfp::NOWAIT).map(drop))).is_err());
    assert_eq!((dropped.load(SeqCst), pool.in_flight()), (10, 0));
}

/// Panics once, as an item goes back.
struct PanicsOnce(Numbers, AtomicUsize);

impl Source for PanicsOnce {
    type Item = u32;
    fn alloc(&self, request: Bulk<'_, Exact, u32>) -> Result<Option<u32>, Error> {
        self.0.alloc(request)
    }
    fn free(&self, number: u32) {
        self.0.free(number);
        assert_ne!(self.1.fetch_add(1, SeqCst), 0, "a source that panics on purpose");
    }
    fn fill(&self, request: Bulk<'_, Exact, u32>, slots: &mut [Option<u32>]) -> Result<usize, Error> {
        slots[0] = self.alloc(request)?;
        Ok(1)
    }
    fn node_of(&self, number: &u32) -> Option<NodeId> {
        self.0.node_of(number)
    }
}

#[test]
fn a_source_that_unwinds_as_pages_go_back_stops_no_figures_and_no_end() {
    let named = |name: &str| page_pools().into_iter().find(|pool| pool.name == name);
    let mut pool = PagePool::new(PanicsOnce(Numbers::new(64), AtomicUsize::new(0)));
    pool = pool.on_node(NodeId::new(1).unwrap()).named("waives");
    drop(take(&mut pool, 64));
    assert!(catch_unwind(AssertUnwindSafe(|| pool.alloc(Gfp::NOWAIT).map(drop))).is_err());
    assert_eq!((pool.stats().waive, pool.in_flight()), (32, 0));
    drop(pool);
    assert!(named("waives").is_none(), "it has ended");

    let mut pool = PagePool::new(PanicsOnce(Numbers::new(640), AtomicUsize::new(0))).named("ends");
    let mut pages = take(&mut pool, 640);
    let last = pages.pop().flatten().unwrap();
    drop(pages);
    assert!(catch_unwind(AssertUnwindSafe(|| drop(pool))).is_err());
    let seen = named("ends").unwrap();
    assert_eq!((seen.stats.in_flight, seen.ended.is_some()), (1, true));
    drop(last);
    assert!(named("ends").is_none(), "nothing is left of it");
}

/// Leaves in the slots what it should end.
struct Leaves;

impl Source for Leaves {
    type Item = u32;
    fn alloc(&self, _: Bulk<'_, Exact, u32>) -> Result<Option<u32>, Error> {
        Ok(Some(0))
    }
    fn free(&self, _: u32) {}
    fn free_bulk(&self, _: &mut [Option<u32>]) {}
}

#[test]
fn a_source_that_leaves_items_in_their_slots_has_each_counted_once() {
    let mut pool = PagePool::new(Leaves);
    let mut pages = take(&mut pool, 65);
    assert_eq!(pool.put_bulk(&mut pages[..2]), 2);
    // The cache has 65, more than go back at once.
    let ending = pool.destroy();
    assert_eq!(ending.in_flight(), 63);
    drop(pages);
    assert_eq!(ending.in_flight(), 0);
}

#[test]
fn a_source_that_unwinds_loses_nothing() {
    struct Unwinds(Numbers);
    impl Source for Unwinds {
        type Item = u32;
        fn alloc(&self, request: Bulk<'_, Exact, u32>) -> Result<Option<u32>, Error> {
            self.0.alloc(request)
        }
        fn free(&self, number: u32) {
            self.0.free(number);
        }
        fn node_of(&self, number: &u32) -> Option<NodeId> {
            assert_ne!(*number, 40, "a source that panics on purpose");
            NodeId::new(0)
        }
    }
    let mut pool = PagePool::new(Unwinds(Numbers::new(64))).on_node(NodeId::ZERO);
    drop(take(&mut pool, 64));
    assert!(catch_unwind(AssertUnwindSafe(|| pool.alloc(Gfp::NOWAIT))).is_err());
    assert_eq!((pool.source().0.freed.load(SeqCst), pool.in_flight()), (64, 0));
    assert_eq!(take(&mut pool, 64).len(), 64);
    assert_eq!((pool.stats().slow, pool.stats().fast), (2, 126));
}

/// Has no more than its pool has; while it is asked, another thread returns a page to the ring.
struct Dry {
    left: Mutex<Vec<u32>>,
    /// How many it was asked for.
    asked: Mutex<Vec<usize>>,
    calls: Mutex<mpsc::Sender<()>>,
    returned: Mutex<mpsc::Receiver<()>>,
}

impl Source for Dry {
    type Item = u32;
    fn alloc(&self, _: Bulk<'_, Exact, u32>) -> Result<Option<u32>, Error> {
        unreachable!("it is asked for many")
    }
    fn free(&self, number: u32) {
        self.left.lock().unwrap().push(number);
    }
    fn fill(&self, _: Bulk<'_, Exact, u32>, slots: &mut [Option<u32>]) -> Result<usize, Error> {
        self.asked.lock().unwrap().push(slots.len());
        if let Some(number) = self.left.lock().unwrap().pop() {
            slots[0] = Some(number);
            return Ok(1);
        }
        self.calls.lock().unwrap().send(()).unwrap();
        self.returned.lock().unwrap().recv().unwrap();
        Ok(0)
    }
}

#[test]
fn a_page_that_comes_back_while_the_source_is_asked_serves_the_request() {
    let ((calls, called), (returns, returned)) = (mpsc::channel(), mpsc::channel());
    let source = Dry {
        left: Mutex::new(vec![7]),
        asked: Mutex::default(),
        calls: Mutex::new(calls),
        returned: Mutex::new(returned),
    };
    let mut pool = PagePool::new(source);
    let page = pool.alloc(Gfp::NOWAIT).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            called.recv().unwrap();
            drop(page);
            returns.send(()).unwrap();
        });
        assert_eq!(*pool.alloc(Gfp::NOWAIT).unwrap(), 7);
    });
    assert_eq!(*pool.source().asked.lock().unwrap(), [REFILL, REFILL]);
}

/// Without an end, a request of the source would wait for pages that are in the ring.
#[test]
fn a_request_that_may_not_fail_is_served_by_pages_that_come_back() {
    let allocator = one_cpu(Memory::anonymous(100));
    let mut pool = PagePool::pages(&allocator);
    let pages = take(&mut pool, 100);
    std::thread::scope(|scope| {
        scope.spawn(move || drop(pages));
        assert!(pool.alloc(Gfp::KERNEL | Gfp::NOFAIL).is_ok());
    });
}

#[test]
fn a_page_is_zeroed_if_the_request_says_so() {
    let allocator = one_cpu(Memory::anonymous(100));
    let mut pool = PagePool::pages(&allocator);
    let mut page = pool.alloc(Gfp::NOWAIT).unwrap();
    page.fill(1);
    pool.put(page);
    let page = pool.alloc(Gfp::NOWAIT | Gfp::ZERO).unwrap();
    assert!(page.iter().all(|byte| *byte == 0));
}

#[test]
fn a_page_goes_back_to_its_own_pool() {
    let allocator = allocator(1024);
    let (mut one, mut other) = (PagePool::pages(&allocator), PagePool::pages(&allocator));
    let (page, own) = (one.alloc(Gfp::NOWAIT).unwrap(), other.alloc(Gfp::NOWAIT).unwrap());
    other.put(page);
    let mut mixed = [Some(own), one.alloc(Gfp::NOWAIT).ok(), other.alloc(Gfp::NOWAIT).ok()];
    assert_eq!(PoolPage::put_bulk(&mut mixed), 3);
    let figures = |of: &PagePool| (of.stats().ring, of.stats().cached, of.in_flight());
    assert_eq!((figures(&one), figures(&other)), ((2, 0, 0), (2, 0, 0)));
}

#[test]
fn fragments_are_apart_and_their_page_comes_back_with_the_last() {
    let allocator = one_cpu(Memory::anonymous(256));
    let mut pool = PagePool::pages(&allocator);
    let mut frags: Vec<_> = [1, 64, 65, 3000, 800].map(|bytes| pool.alloc_frag(Gfp::NOWAIT, bytes).unwrap()).into();
    let at: Vec<usize> = frags.iter().map(|frag| frag.addr() - frags[0].addr()).collect();
    assert_eq!(at, [0, 64, 128, 256, 3264]);
    assert_eq!(pool.in_flight(), 1);
    frags.push(pool.alloc_frag(Gfp::NOWAIT, 4096).unwrap());
    assert_eq!((pool.in_flight(), pool.stats().released_refcnt), (2, 1), "the first page is out with its fragments");
    for (number, frag) in frags.iter_mut().enumerate() {
        frag.fill(number as u8);
    }
    assert!(frags.iter().enumerate().all(|(number, frag)| frag.iter().all(|byte| *byte == number as u8)));
    let whole = frags.pop().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| frags.truncate(1));
    });
    assert_eq!((pool.in_flight(), pool.stats().ring), (2, 0));
    frags.clear();
    assert_eq!((pool.in_flight(), pool.stats().ring), (1, 1));
    drop(pool);
    assert_eq!(whole[4095], 5, "a fragment outlives the pool");
    drop(whole);
    assert_all_back(&allocator);
}

#[test]
fn a_page_without_fragments_goes_to_the_cache_when_the_next_is_begun() {
    let allocator = one_cpu(Memory::anonymous(256));
    let mut pool = PagePool::pages(&allocator);
    for _ in 0..10 {
        drop(pool.alloc_frag(Gfp::NOWAIT, 3000).unwrap());
    }
    let stats = pool.stats();
    assert_eq!((stats.cached, stats.released_refcnt, stats.slow, stats.in_flight), (9, 0, 1, 1));
    for bytes in [0, 4097] {
        let refused = pool.alloc_frag(Gfp::NOWAIT, bytes).unwrap_err();
        assert_eq!(refused, InvalidRequest::FragmentSize { bytes, max: 4096 }.into());
    }
}

/// Says that its blocks have four pages, and makes blocks of one.
struct Small(Allocator);

impl Source for Small {
    type Item = Block;
    fn alloc(&self, _: Bulk<'_, Exact, Block>) -> Result<Option<Block>, Error> {
        Ok(Some(self.0.alloc_pages(Gfp::NOWAIT, Order::ZERO)?))
    }
    fn free(&self, block: Block) {
        drop(block);
    }
    fn order(&self) -> Order {
        Order::new(2).unwrap()
    }
}

#[test]
fn a_fragment_is_no_longer_than_the_block_that_came() {
    let mut pool = PagePool::new(Small(allocator(256)));
    let refused = pool.alloc_frag(Gfp::NOWAIT, 5000).unwrap_err();
    assert_eq!(refused, InvalidRequest::FragmentSize { bytes: 5000, max: 4096 }.into());
    assert_eq!(pool.alloc_frag(Gfp::NOWAIT, 4096).unwrap().len(), 4096);
}

#[test]
fn blocks_circulate_too() {
    let allocator = allocator(1024);
    let mut pool = PagePool::blocks(&allocator, Order::new(2).unwrap());
    let blocks = take(&mut pool, 10);
    assert!(blocks.iter().flatten().all(|block| block.len() == 16384));
    drop(blocks);
    let frag = pool.alloc_frag(Gfp::NOWAIT, 16384).unwrap();
    assert_eq!((frag.len(), pool.stats().slow, pool.stats().slow_high_order), (16384, 1, 1));
    drop((frag, pool));
    assert_all_back(&allocator);
}

#[test]
fn a_ring_has_1_to_32768_slots() {
    for slots in [0, 32769, usize::MAX] {
        let refused = PagePool::with_ring(Numbers::new(1), slots).unwrap_err();
        assert_eq!(refused, InvalidRequest::RingSize { slots, max: 32768 }.into());
    }
    let mut pool = PagePool::with_ring(Numbers::new(200), 33).unwrap();
    drop(take(&mut pool, 200));
    assert_eq!((pool.stats().ring, pool.stats().ring_full), (64, 136), "rounded up to a power of two");
}

#[test]
fn a_child_continues_with_its_copy_of_a_pool() {
    own_process!();
    let allocator = allocator(256);
    let mut pool = PagePool::pages(&allocator);
    let mut pages = take(&mut pool, 10);
    drop(pages.pop());
    let mut both = Some((pool, pages));
    let go_on = |(mut pool, pages): (PagePool, Vec<_>)| {
        assert_eq!(pool.in_flight(), 9);
        drop(pages);
        assert_eq!(take(&mut pool, 70).len(), 70);
        drop(pool);
        assert_all_back(&allocator);
    };
    in_child("uses its parent's pool", || go_on(both.take().unwrap()));
    go_on(both.take().unwrap());
}

/// Each page has one owner: it says so in its first word, from when it is taken to when it is returned.
#[test]
fn nothing_is_lost_or_handed_out_twice_while_threads_return_pages() {
    const THREADS: usize = 3;
    const ROUNDS: usize = 30;
    const PAGES: usize = 2000;
    let owner = |page: &PoolPage| -> &'static AtomicU64 {
        // SAFETY: the page's memory outlives the test's threads, and is written through this atomic alone.
        unsafe { &*page.as_ptr().cast::<AtomicU64>() }
    };
    for allocator in allocators(1024) {
        let mut rng = Rng::new(3);
        for round in 0..ROUNDS {
            let slots = [4, 64, 1024][round % 3];
            let mut pool = PagePool::with_ring(PageSource::pages(&allocator), slots).unwrap();
            std::thread::scope(|scope| {
                let threads = [(); THREADS].map(|()| {
                    let (sender, receiver) = mpsc::channel::<(u64, Option<PoolPage>)>();
                    scope.spawn(move || {
                        let mut held = Vec::new();
                        for (number, page) in receiver {
                            let page = page.unwrap();
                            assert_eq!(owner(&page).swap(0, SeqCst), number, "its owner changed");
                            match number % 8 {
                                0 => drop(page),
                                1 => drop(PoolPage::release(page)),
                                _ => held.push(Some(page)),
                            }
                            if held.len() as u64 > number % 100 {
                                PoolPage::put_bulk(&mut held);
                                held.clear();
                            }
                        }
                    });
                    sender
                });
                let mut sent = 0;
                while sent < PAGES {
                    let Ok(page) = pool.alloc(Gfp::NOWAIT) else {
                        std::thread::yield_now();
                        continue;
                    };
                    sent += 1;
                    let number = (round * PAGES + sent) as u64;
                    assert_eq!(owner(&page).swap(number, SeqCst), 0, "somebody else has it");
                    match rng.next() >> 61 {
                        0 => {
                            owner(&page).store(0, SeqCst);
                            pool.put(page);
                        }
                        _ => threads[sent % THREADS].send((number, Some(page))).unwrap(),
                    }
                }
                // It ends while pages are on their way.
                if round % 2 == 0 {
                    drop(pool);
                } else {
                    drop(pool.destroy());
                }
            });
            assert_all_back(&allocator);
        }
    }
}

/// The pages that are out of an allocator at rest, some of whose pages were misused.
fn handed_out(allocator: &Allocator) -> usize {
    allocator.validate().unwrap().handed_out
}

#[test]
fn a_raw_page_goes_back_to_its_own_pool_once() {
    let allocator = allocator(1024);
    for order in [0, 3].map(|order| Order::new(order).unwrap()) {
        let (mut pool, other) = (PagePool::blocks(&allocator, order), PagePool::blocks(&allocator, order));
        let ordinary = allocator.alloc_pages(Gfp::KERNEL, order).unwrap().into_raw().0;
        let page = PoolPage::into_raw(pool.alloc(Gfp::NOWAIT).unwrap());
        assert_eq!(pool.in_flight(), 1);
        // SAFETY: this test owns both blocks. Most calls are deliberate misuse.
        unsafe {
            let kind = |refused: Result<(), pagemill::Misuse>| refused.unwrap_err().kind;
            assert_eq!(kind(free_raw(page, order)), MisuseKind::DoubleFree);
            assert_eq!(free_pages_bulk_raw(&mut [page], order).unwrap_err().1.kind, MisuseKind::DoubleFree);
            assert_eq!(kind(Block::from_raw(page, order).map(drop)), MisuseKind::DoubleFree);
            assert_eq!(kind(other.home().from_raw(page).map(drop)), MisuseKind::Foreign);
            assert_eq!(kind(pool.home().from_raw(ordinary).map(drop)), MisuseKind::Foreign);
            assert_eq!(kind(pool.home().from_raw(page.wrapping_add(64)).map(drop)), MisuseKind::Unaligned);
            if order > Order::ZERO {
                assert_eq!(kind(pool.home().from_raw(page.wrapping_add(4096)).map(drop)), MisuseKind::Inside);
            }
            let taken = pool.home().from_raw(page).unwrap();
            assert_eq!((taken.order(), taken.addr()), (order, page.addr()));
            assert_eq!(kind(pool.home().from_raw(page).map(drop)), MisuseKind::DoubleFree);
            drop(taken);
            assert_eq!(kind(pool.home().from_raw(page).map(drop)), MisuseKind::DoubleFree);
            free_raw(ordinary, order).unwrap();
            assert_eq!(kind(pool.home().from_raw(ordinary).map(drop)), MisuseKind::DoubleFree);
        }
        assert_eq!((pool.in_flight(), pool.stats().ring), (0, 1));
        drop((pool, other));
        assert_eq!(handed_out(&allocator), 0);
    }
}

/// The pool counts its pages, so a page that came back twice would end it too early.
#[test]
fn of_two_threads_that_return_a_raw_page_one_is_refused() {
    let allocator = allocator(1024);
    let mut pool = PagePool::pages(&allocator);
    let home = pool.home();
    for _ in 0..200 {
        let mut pages = take(&mut pool, REFILL);
        let addrs: Vec<usize> = pages
            .iter_mut()
            .filter_map(Option::take)
            .map(|page| PoolPage::into_raw(page).expose_provenance())
            .collect();
        let give_back = || {
            let page = |&addr| std::ptr::with_exposed_provenance_mut(addr);
            // SAFETY: each page is this test's, and goes back once; the other call is refused.
            addrs.iter().map(page).filter(|&page| unsafe { home.from_raw(page) }.is_ok()).count()
        };
        let (one, other) = std::thread::scope(|scope| {
            let other = scope.spawn(give_back);
            (give_back(), other.join().unwrap())
        });
        assert_eq!((one + other, pool.in_flight()), (REFILL, 0));
    }
    drop(pool);
    assert_eq!((handed_out(&allocator), allocator.stats().misused), (0, 200 * REFILL as u64));
}

#[test]
fn a_raw_page_goes_back_after_the_end_of_its_pool() {
    let allocator = allocator(256);
    let mut pool = PagePool::pages(&allocator);
    let (home, page) = (pool.home(), PoolPage::into_raw(pool.alloc(Gfp::NOWAIT).unwrap()).expose_provenance());
    let ending = pool.destroy();
    assert_eq!((ending.in_flight(), ending.stats().in_flight, ending.stats().slow), (1, 1, 1));
    let page = move || std::ptr::with_exposed_provenance_mut(page);
    // SAFETY: the page is this test's; the second call is deliberate misuse.
    std::thread::spawn(move || drop(unsafe { home.from_raw(page()) }.unwrap())).join().unwrap();
    // SAFETY: as above.
    assert!(unsafe { home.from_raw(page()) }.is_err());
    assert_eq!((ending.in_flight(), ending.stats().in_flight), (0, 0));
    assert_eq!((handed_out(&allocator), allocator.stats().misused), (0, 1));
}

#[test]
fn handles_and_pools_are_send() {
    fn is_send<T: Send>() {}
    fn is_sync<T: Sync>() {}
    is_send::<(PagePool, PoolPage, Ending, pagemill::Frag)>();
    is_sync::<(PoolPage, Ending, pagemill::Frag)>();
    assert_eq!(PagePoolStats::default().in_flight, 0);
}

/// The pools of this name, as an observer sees them.
fn seen(name: &str) -> Vec<PagePoolInfo> {
    page_pools().into_iter().filter(|pool| pool.name == name).collect()
}

#[test]
fn an_observer_sees_a_pool_until_its_last_page_is_back() {
    let allocator = one_cpu(Memory::anonymous(256));
    let name = "seen \"until\" its\nlast page";
    let mut pool = PagePool::pages(&allocator).named(name).named("too late");
    assert_eq!((seen(name)[0].stats, seen(name)[0].ended), (PagePoolStats::default(), None));
    let mut pages = take(&mut pool, 70);
    // As its cache was empty for the second time, after 64 pages, it took one of the next 64.
    assert_eq!((seen(name)[0].stats.slow, seen(name)[0].stats.fast, seen(name)[0].stats.in_flight), (2, 63, 65));
    drop(pages.split_off(60));
    let stats = pool.stats();
    assert_eq!((stats.fast, stats.ring, stats.in_flight), (68, 10, 60));
    assert_eq!(seen(name)[0].stats, stats, "the consumer's figures are those that it read last");
    drop(pages.split_off(50));
    assert_eq!((seen(name)[0].stats.ring, seen(name)[0].stats.in_flight), (20, 50), "what others do is seen at once");
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(seen(name).len(), 1));
    });

    let ending = pool.destroy();
    let after = &seen(name)[0];
    assert_eq!((after.stats.in_flight, after.stats.fast, after.stats.slow), (50, 68, 2));
    let (age, later) = (after.ended.unwrap(), seen(name)[0].ended.unwrap());
    assert!(age <= later && later <= ending.age(), "{age:?}, {later:?}, {:?}", ending.age());
    drop(pages.split_off(1));
    assert_eq!((seen(name)[0].stats.in_flight, seen(name)[0].stats.ring), (1, 20));
    drop(pages);
    assert_eq!(seen(name), [], "though somebody has its ending");
    drop(ending);
    assert_all_back(&allocator);
}

#[test]
fn pools_are_seen_in_order_and_have_numbers_of_their_own() {
    let allocator = allocator(256);
    let many: Vec<_> = (0..20).map(|_| PagePool::pages(&allocator).named("one of many")).collect();
    let ids = |of: &[PagePoolInfo]| of.iter().map(|pool| pool.id).collect::<Vec<_>>();
    let all = ids(&seen("one of many"));
    assert!(all.len() == 20 && all.is_sorted_by(|one, next| one < next), "{all:?}");
    let half: Vec<_> = many.into_iter().skip(10).collect();
    let rest = seen("one of many");
    assert_eq!(ids(&rest), all[10..]);
    assert_eq!(rest.len(), half.len());
}

#[test]
fn a_child_sees_its_copies_of_pools_though_others_look_as_it_is_forked() {
    own_process!();
    let allocator = allocator(256);
    let mut pool = PagePool::pages(&allocator).named("copied");
    let page = pool.alloc(Gfp::NOWAIT).unwrap();
    let is_done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while is_done.load(SeqCst) == 0 {
                assert_eq!(seen("copied").len(), 1);
                drop(PagePool::pages(&allocator));
            }
        });
        for _ in 0..20 {
            in_child("looks at its copies", || assert_eq!(seen("copied")[0].stats.in_flight, 1));
        }
        is_done.store(1, SeqCst);
    });
    drop((page, pool));
}

/// Pages of two pools and holes, in any order and number.
#[test]
fn bulk_forms_fill_holes_alone_and_return_each_page_to_its_pool() {
    let allocator = allocator(2048);
    let mut rng = Rng::new(7);
    for round in 0..200 {
        let mut pools = [1, 1].map(|_| PagePool::with_ring(PageSource::pages(&allocator), 32).unwrap());
        let mut slots: Vec<Option<PoolPage>> = (0..round).map(|_| None).collect();
        let mut counts = [0; 3];
        for slot in &mut slots {
            let of = [0, 0, 0, 1, 2][rng.next() as usize % 5];
            counts[of] += 1;
            *slot = pools.get_mut(of).map(|pool| pool.alloc(Gfp::NOWAIT).unwrap());
        }
        let addrs =
            |of: &[Option<PoolPage>]| of.iter().map(|slot| slot.as_ref().map(|page| page.addr())).collect::<Vec<_>>();
        let before = addrs(&slots);
        let gfp = [Gfp::NOWAIT, Gfp::NOWAIT | Gfp::ZERO][round % 2];
        assert_eq!(pools[1].alloc_bulk(gfp, &mut slots).unwrap(), counts[2]);
        let mut after = addrs(&slots);
        assert!(before.iter().zip(&after).all(|(before, after)| before.is_none() || before == after));
        after.sort_unstable();
        assert!(after.windows(2).all(|two| two[0] < two[1]) && after.first() != Some(&None), "each has an owner");
        assert_eq!(pools.each_ref().map(PagePool::in_flight), [counts[0], counts[1] + counts[2]]);
        // Some holes again.
        let dropped = slots.iter_mut().filter(|_| rng.next().is_multiple_of(4)).filter_map(Option::take).count();
        let returned = if round % 3 == 0 { PoolPage::put_bulk(&mut slots) } else { pools[0].put_bulk(&mut slots) };
        assert_eq!((returned, slots.iter().flatten().count()), (round - dropped, 0));
        let stats = pools.each_ref().map(PagePool::stats);
        assert_eq!(stats.map(|stats| stats.in_flight), [0, 0]);
        let ways: u64 = stats.iter().map(|stats| stats.cached + stats.ring + stats.ring_full).sum();
        assert_eq!(ways, round as u64, "each came back once: {stats:?}");
        drop(pools);
        assert_all_back(&allocator);
    }
}

/// The page that fragments are cut from goes to no source that may unwind before the ring has ended.
#[test]
fn a_pool_that_ends_with_a_cut_page_and_no_room_ends_whole() {
    struct Panics(Arc<AtomicUsize>, PageSource<Page>);
    impl Source for Panics {
        type Item = Page;
        fn alloc(&self, request: Bulk<'_, Exact, Page>) -> Result<Option<Page>, Error> {
            self.1.alloc(request)
        }
        fn free(&self, page: Page) {
            drop(page);
        }
        fn free_bulk(&self, slots: &mut [Option<Page>]) {
            slots.fill_with(|| None);
            let calls = self.0.fetch_add(1, SeqCst);
            assert_ne!(calls, 0, "a source that panics on purpose");
        }
    }
    let allocator = Allocator::builder().pages(512).build().unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let mut pool = PagePool::with_ring(Panics(Arc::clone(&calls), PageSource::pages(&allocator)), 1).unwrap();
    let mut pages: Vec<_> = (0..129).map(|_| pool.alloc(Gfp::NOWAIT).unwrap()).collect();
    drop(pool.alloc_frag(Gfp::NOWAIT, 64).unwrap());
    // One fills the ring, and others the cache, which has 62 of 192.
    drop(pages.pop());
    pages.drain(..66).for_each(|page| pool.put(page));
    assert_eq!((calls.load(SeqCst), pool.stats().ring, pool.stats().cache_full), (0, 1, 0));
    assert!(catch_unwind(AssertUnwindSafe(|| drop(pool))).is_err());
    drop(pages);
    assert_all_back(&allocator);
}
