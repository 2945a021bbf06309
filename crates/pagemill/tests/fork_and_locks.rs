//! C4.4: locks that a child must find free, whichever thread held them at the fork; what the child must still know; and that it
//! is refused where it cannot know enough.

use crate::common::{
    Cache, Calls, Over, PATIENCE, all_without_waiting, allocators, arena, bulk, end_if_it_hangs, fork, in_child, until,
    wait_for,
};
use pagemill::{
    Allocator, Backend, Block, Bulk, Cancel, Gfp, Memory, Order, Page, PageList, Watermarks, free_pages_bulk,
    free_pages_bulk_raw, free_raw,
};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

fn portable(pages: usize) -> Allocator {
    arena(pages).backend(Backend::Portable).build().unwrap()
}

/// Makes an allocator, uses it, and ends it.
fn make_one(pages: usize) {
    let allocator = portable(pages);
    let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
    assert!(allocator.arenas()[0].range.contains(&page.addr()));
    drop(page);
    allocator.close().unwrap();
}

/// A thread holds the registry while it makes or ends an allocator, and while it forks. A child that finds it held waits for
/// ever, and so does a parent that is not let go of it: all of this happens in a child, whose time is limited.
#[test]
fn parent_and_child_build_allocators_across_forks() {
    own_process!();
    in_child("makes allocators while it forks", || {
        let kept = portable(1024);
        let mut page = kept.alloc_page(Gfp::KERNEL).unwrap();
        page[0] = 7;
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _over = Over(&is_over);
            for pages in [64, 3000] {
                let is_over = &is_over;
                scope.spawn(move || {
                    while !is_over.load(SeqCst) {
                        make_one(pages);
                    }
                });
            }
            for _ in 0..60 {
                in_child("makes an allocator", || {
                    make_one(600);
                    assert_eq!(page[0], 7);
                    let other = kept.alloc_page(Gfp::KERNEL).unwrap();
                    assert_ne!(other.addr(), page.addr(), "a page is owned twice");
                    drop(other);
                    kept.drain();
                    assert_eq!(kept.validate().unwrap().handed_out, 1);
                });
                make_one(600);
            }
        });
        drop(page);
        kept.close().unwrap();
    });
}

/// A fork that waits for the registry stands in line: each thread that makes allocators overtakes it once, and not again and again.
#[test]
fn threads_that_build_allocators_do_not_starve_a_fork() {
    own_process!();
    const THREADS: usize = 8;
    let (made, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let mut overtakings: Vec<i32> = std::thread::scope(|scope| {
        let _over = Over(&is_over);
        for _ in 0..THREADS {
            scope.spawn(|| {
                while !is_over.load(SeqCst) {
                    make_one(64);
                    made.fetch_add(1, SeqCst);
                }
            });
        }
        let overtaken = || {
            let before = made.load(SeqCst);
            let child = fork();
            if child == 0 {
                // It has the number of the moment at which the fork had its turn.
                let overtaken = made.load(SeqCst) - before;
                // SAFETY: ends the process.
                unsafe { libc::_exit(overtaken.min(255) as i32) };
            }
            let status = wait_for(child);
            assert!(libc::WIFEXITED(status), "the child ended with {status:#x}");
            libc::WEXITSTATUS(status)
        };
        (0..21).map(|_| overtaken()).collect()
    });
    overtakings.sort_unstable();
    // Not the worst: between the count and the fork this thread may lose its CPU.
    assert!(overtakings[10] <= 2 * THREADS as i32, "allocators that others made while it waited: {overtakings:?}");
}

fn cache(pages: impl IntoIterator<Item = Page>) -> Arc<Cache> {
    Arc::new(Cache::of(pages))
}

/// Shrinkers come and go, requests ask them, and tokens are told, as the process forks: the child does the same.
#[test]
fn a_child_reclaims_after_a_fork_during_shrinker_registration() {
    own_process!();
    in_child("forks while others reclaim", || {
        let allocator = portable(64);
        let kept = cache(Vec::new());
        let _registered = allocator.register_shrinker(kept.clone());
        let cancel = Cancel::new();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _over = Over(&is_over);
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_over.load(SeqCst) {
                        drop(allocator.register_shrinker(cache(Vec::new())));
                        let request = Bulk::up_to(99).timeout(Duration::ZERO).cancel(&cancel);
                        allocator.alloc_pages_bulk_list(request, &mut PageList::new()).unwrap();
                        let request = Bulk::up_to(99).gfp(Gfp::KERNEL | Gfp::NORETRY);
                        allocator.alloc_pages_bulk_list(request, &mut PageList::new()).unwrap();
                        allocator.notes();
                    }
                });
            }
            for _ in 0..150 {
                in_child("reclaims", || {
                    let mut one = [const { None::<Page> }; 1];
                    let given = cache(bulk(&allocator, Bulk::up_to(64).gfp(Gfp::NOWAIT)).0);
                    let registered = allocator.register_shrinker(given.clone());
                    if given.len() > 0 {
                        allocator.alloc_pages_bulk_array(Bulk::exact(1), &mut one).unwrap();
                        assert_eq!(given.len(), 0, "the child's shrinker was not asked");
                    }
                    drop(registered);
                    assert_eq!(allocator.notes(), []);
                    cancel.cancel();
                    free_pages_bulk(&mut one);
                });
            }
        });
    });
}

/// A shrinker forks in the middle of a wait, and both go on with the request that it was asked for.
#[test]
fn a_wait_goes_on_in_a_child_forked_by_a_shrinker() {
    own_process!();
    in_child("splits", || {
        let allocator = portable(64);
        let mut pages = all_without_waiting(&allocator, Gfp::NOWAIT);
        let child = Arc::new(AtomicI32::new(0));
        let forked = child.clone();
        let registered = allocator.register_shrinker(Calls::new(move |call, _| {
            if call == 4 {
                let pid = fork();
                if pid == 0 {
                    end_if_it_hangs();
                }
                forked.store(pid, SeqCst);
            }
            0
        }));
        assert!(allocator.alloc_page(Gfp::KERNEL).is_err());
        drop(registered);
        assert_eq!(allocator.stats().waiting, 0, "in the one or the other");
        drop(pages.pop());
        assert_eq!(allocator.stats().listed, 1, "a list that is shut though nobody waits");
        // And others wait in line in both.
        let request = Bulk::exact(2).timeout(Duration::from_millis(20));
        assert!(allocator.alloc_pages_bulk_list(request, &mut PageList::new()).is_err());
        assert_eq!(allocator.stats().waiting, 0);
        let child = child.load(SeqCst);
        assert!(child == 0 || wait_for(child) == 0, "the child of the two");
    });
}

/// The thread that reclaims is not in the child; the first request below the low mark that may wait starts it again.
#[test]
fn background_reclaim_starts_again_in_a_child() {
    own_process!();
    let memory = Memory::anonymous(1000).watermarks(Watermarks::above(100));
    let allocator = Allocator::builder().memory(memory).background_reclaim(true).build().unwrap();
    let until_free = |pages: u64, what: &str| {
        until(what, || {
            allocator.drain();
            allocator.stats().free >= pages
        });
    };
    let look = |what: &str| {
        // The request for nearly all of it may wake the thread already.
        let before = allocator.stats().reclaim_background;
        let (all, shortfall) = bulk(&allocator, Bulk::up_to(875).gfp(Gfp::NOWAIT));
        assert_eq!((all.len(), shortfall), (875, None), "{what}");
        let registered = allocator.register_shrinker(cache(all));
        let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
        until_free(150, &format!("{what}: background reclaim"));
        let stats = allocator.stats();
        assert!(stats.reclaim_background > before && stats.reclaim_direct == 0, "{what}: {stats:?}");
        drop((page, registered));
        // The thread may have the cache in its hand yet, for the round that it is in.
        until_free(1000, &format!("{what}: what the cache had"));
    };
    look("the parent");
    for _ in 0..5 {
        in_child("has its own thread", || {
            look("the child");
            in_child("has one again", || look("the grandchild"));
            look("the child, again");
        });
    }
    look("the parent, again");
    allocator.close().unwrap();
}

/// The parent never reclaimed: its shrinker is the child's too.
#[test]
fn background_reclaim_in_a_child_calls_shrinkers_that_its_parent_registered() {
    own_process!();
    let memory = Memory::anonymous(1024).watermarks(Watermarks::above(64));
    let allocator = Allocator::builder().memory(memory).background_reclaim(true).build().unwrap();
    let cache = cache([]);
    let _registered = allocator.register_shrinker(cache.clone());
    in_child("has its own thread", || {
        let mut pages = all_without_waiting(&allocator, Gfp::NOWAIT);
        pages.truncate(pages.len() - 8); // Between min and low.
        let before = cache.calls();
        cache.extend(pages);
        // A request that gets a page does not reclaim, but wakes the thread that does.
        until("background reclaim", || {
            drop(allocator.alloc_page(Gfp::KERNEL | Gfp::NORETRY));
            allocator.stats().reclaim_background > 0 && cache.calls() > before
        });
        assert_eq!(allocator.stats().reclaim_direct, 0);
    });
}

/// Blocks above a pageblock are searched for with a lock held, most of the time here, and in vain.
#[test]
fn a_child_gets_large_blocks_after_a_fork_during_a_search() {
    own_process!();
    const PAGEBLOCKS: usize = 512;
    let (order9, order10) = (Order::PAGEBLOCK, Order::new(10).unwrap());
    let allocator = portable(PAGEBLOCKS * order9.pages().get());
    let start = allocator.arenas()[0].range.start;
    // Of the pageblocks every second one is free, so that there is no two of them together.
    let blocks: Vec<Block> = (0..PAGEBLOCKS).map(|_| allocator.alloc_pages(Gfp::KERNEL, order9).unwrap()).collect();
    let (mut kept, free): (Vec<Block>, Vec<Block>) =
        blocks.into_iter().partition(|block| (block.addr() - start) / order9.bytes() % 2 == 1);
    drop(free);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _over = Over(&is_over);
        scope.spawn(|| {
            while !is_over.load(SeqCst) {
                assert!(allocator.alloc_pages(Gfp::NOWAIT, order10).is_err());
            }
        });
        for _ in 0..20 {
            in_child("wants a large block", || {
                assert!(allocator.alloc_pages(Gfp::KERNEL, order10).is_err());
                let last = kept.pop().unwrap();
                let two = last.addr() - order9.bytes();
                drop(last);
                let large = allocator.alloc_pages(Gfp::KERNEL, order10).unwrap();
                assert_eq!(large.addr(), two, "the only two pageblocks together");
            });
        }
    });
    drop(kept);
    allocator.close().unwrap();
}

/// All pages that are to be had.
fn take_all(allocator: &Allocator) -> Vec<Page> {
    bulk(allocator, Bulk::up_to(allocator.managed_pages().get())).0
}

/// Has frames put in quarantine by `allocator`, as many as `wanted` at least: two threads free a page at the same moment, which
/// is misuse. False: no two frees met.
fn quarantine(allocator: &Allocator, wanted: u64) -> bool {
    let free = |addr: usize, later: usize| {
        (0..later).for_each(|_| std::hint::spin_loop());
        // SAFETY: misuse on purpose; nobody uses the page.
        let _ = unsafe { free_raw(std::ptr::with_exposed_provenance_mut(addr), Order::ZERO) };
    };
    // The page that both free now: 0 when the other has seen it. And how often the other has freed one.
    let (page, freed, limit) = (AtomicUsize::new(0), AtomicUsize::new(0), Instant::now() + PATIENCE);
    // Where there are fewer CPUs than threads, a waiting thread yields.
    let wait_until = |is_so: &dyn Fn() -> bool| {
        let mut spins = 0;
        while !is_so() {
            spins += 1;
            if spins % 1000 == 0 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    };
    const OVER: usize = 1;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for turn in 0.. {
                wait_until(&|| page.load(SeqCst) != 0);
                match page.swap(0, SeqCst) {
                    OVER => return,
                    addr => free(addr, turn / 40 % 40),
                }
                freed.store(turn + 1, SeqCst);
            }
        });
        let is_done = (0..).find_map(|turn| {
            let addr = allocator.alloc_page(Gfp::KERNEL).unwrap().into_raw().expose_provenance();
            page.store(addr, SeqCst);
            wait_until(&|| page.load(SeqCst) == 0);
            free(addr, turn % 40);
            wait_until(&|| freed.load(SeqCst) > turn);
            // Both copies are on a list now, or one; the second to be handed out as a raw pointer is put in quarantine.
            let pages = std::iter::from_fn(|| allocator.alloc_page(Gfp::KERNEL).ok());
            let mut raw: Vec<*mut u8> = pages.map(Page::into_raw).collect();
            // SAFETY: all that there is, each once. One that was put in quarantine meanwhile is refused.
            let _ = unsafe { free_pages_bulk_raw(&mut raw, Order::ZERO) };
            let is_done = allocator.stats().quarantined >= wanted;
            (is_done || Instant::now() > limit).then_some(is_done)
        });
        page.store(OVER, SeqCst);
        is_done == Some(true)
    })
}

#[test]
fn quarantined_frames_stay_quarantined_in_a_child() {
    own_process!();
    const PAGES: usize = 256;
    for allocator in allocators(PAGES) {
        if !quarantine(&allocator, 3) {
            eprintln!("skipped: two threads never freed a page at the same moment");
            continue;
        }
        let own = allocator.alloc_page(Gfp::KERNEL).unwrap();
        let aside = allocator.stats().quarantined as usize;
        let had: HashSet<usize> = take_all(&allocator).iter().map(Page::addr).collect();
        let look = || {
            assert_eq!(
                (allocator.stats().quarantined as usize, allocator.validate().unwrap().quarantined),
                (aside, aside)
            );
            let all = take_all(&allocator);
            assert_eq!(all.len(), PAGES - aside - 1, "with {aside} put in quarantine and one out");
            assert!(
                all.iter().all(|page| had.contains(&page.addr())),
                "a page that was put in quarantine was handed out"
            );
            drop(all);
            assert_eq!((allocator.stats().quarantined as usize, allocator.validate().unwrap().handed_out), (aside, 1));
        };
        look();
        in_child("counts what is in quarantine", || {
            look();
            in_child("counts it once more", look);
        });
        drop(own);
    }
}
