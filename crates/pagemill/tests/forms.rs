//! The four bulk forms, on both backends: counts, holes, limits, nothing leaked.

use crate::common::{
    FORMS, allocators, arena, array, assert_distinct, close_all_back, map, one_cpu, slots, system_page, take,
};
use pagemill::{
    Allocator, Block, BlockList, BuildError, Bulk, Error, Exhausted, Faults, Filled, Gfp, Invalid, InvalidRequest,
    Memory, Order, PAGE_SIZE, Page, PageList, Run, Shortfall, Why, free_pages_bulk, free_pages_bulk_raw,
    free_pages_bulk_runs, free_raw,
};
use std::collections::HashSet;
use std::mem::MaybeUninit;

/// A pointer that is no allocator's.
fn somebodys() -> *mut u8 {
    static ODD: u8 = 0;
    (&raw const ODD).cast_mut()
}

#[test]
fn holes_in_an_array_are_filled_in_one_call() {
    for pattern in ["PPP....PPP", "....PPPP", "P.P.P.P.", "PPPP", "........", ".", "P", "PPPPPPPPP.", ".PPPPPPPPP"] {
        for allocator in allocators(64) {
            let mut slots = slots::<Page>(pattern.len());
            let occupied = pattern.bytes().filter(|&byte| byte == b'P').count();
            for (slot, _) in slots.iter_mut().zip(pattern.bytes()).filter(|(_, byte)| *byte == b'P') {
                *slot = Some(allocator.alloc_page(Gfp::KERNEL).unwrap());
            }
            let before: Vec<_> = slots.iter().map(|slot| slot.as_ref().map(Page::addr)).collect();
            let n = pattern.len();
            let filled = allocator.alloc_pages_bulk_array(Bulk::up_to(n), &mut slots).unwrap();
            assert_eq!(
                filled,
                Filled { added: n - occupied, occupied: n, first_hole: n, shortfall: None },
                "{pattern}"
            );
            for (slot, before) in slots.iter().zip(before).filter(|(_, before)| before.is_some()) {
                assert_eq!(slot.as_ref().map(Page::addr), before, "{pattern}: an occupied slot was changed");
            }
            assert_distinct(slots.iter().flatten());
            assert_eq!(free_pages_bulk(&mut slots), n);
            close_all_back(allocator);
        }
    }
}

#[test]
fn an_array_short_by_one_page_keeps_its_last_hole() {
    // Ten slots, three of them occupied, in an arena that is one page short of filling the rest.
    for hole in 0..10 {
        for allocator in allocators(9) {
            let mut slots = slots::<Page>(10);
            for i in (1..4).map(|i| (hole + i) % 10) {
                slots[i] = Some(allocator.alloc_page(Gfp::KERNEL).unwrap());
            }
            let filled = allocator.alloc_pages_bulk_array(Bulk::up_to(10), &mut slots).unwrap();
            // Holes are filled in ascending order, so the last one stays.
            let last_hole = (0..10).rev().find(|i| !(1..4).any(|step| (hole + step) % 10 == *i)).unwrap();
            let shortfall = Some(Shortfall { missing: 1, why: Why::Exhausted });
            assert_eq!(filled, Filled { added: 6, occupied: 9, first_hole: last_hole, shortfall });
            assert!(slots[last_hole].is_none());
            free_pages_bulk(&mut slots);
            close_all_back(allocator);
        }
    }
}

#[test]
fn requests_beyond_the_arena_get_all_it_has() {
    for allocator in allocators(100) {
        for (name, form) in FORMS {
            for most in [101, 300, 5000] {
                let (pages, shortfall) = form(&allocator, Bulk::up_to(most), most).unwrap();
                assert_eq!(pages.len(), 100, "{name} of {most}");
                assert_eq!(shortfall, Some(Shortfall { missing: most - 100, why: Why::Exhausted }), "{name} of {most}");
                assert_distinct(&pages);
            }
        }
        close_all_back(allocator);
    }
}

#[test]
fn empty_requests_and_full_arrays_change_nothing() {
    own_process!();
    for allocator in allocators(16) {
        let mut slots = slots::<Page>(4);
        let nothing = Filled { added: 0, occupied: 0, first_hole: 0, shortfall: None };
        assert_eq!(allocator.alloc_pages_bulk_array(Bulk::up_to(0), &mut slots).unwrap(), nothing);
        assert_eq!(allocator.alloc_pages_bulk_list(Bulk::up_to(0), &mut PageList::new()).unwrap().blocks, 0);
        allocator.alloc_pages_bulk_array(Bulk::up_to(4), &mut slots).unwrap();
        let before = allocator.stats();
        let full = allocator.alloc_pages_bulk_array(Bulk::exact(4), &mut slots).unwrap();
        assert_eq!((full.added, full.occupied, full.first_hole), (0, 4, 4));
        assert_eq!(allocator.stats(), before);
        // An invalid request is refused, whether or not a slot is empty.
        for n in 1..=4 {
            let refused = allocator.alloc_pages_bulk_array(Bulk::up_to(n).gfp(Gfp::NOWAIT | Gfp::NOFAIL), &mut slots);
            assert!(
                matches!(refused, Err(Error::Invalid(InvalidRequest::Invalid(Invalid::GfpConflict(..))))),
                "{n}: {refused:?}"
            );
        }
        free_pages_bulk(&mut slots);
        close_all_back(allocator);
    }
}

#[test]
fn slots_beyond_the_count_are_not_touched() {
    /// An array whose n slots end at the end of a page that is followed by one that cannot be read.
    struct Guarded(*mut u8, usize);
    impl Guarded {
        fn new() -> Self {
            let page = system_page();
            let base = map(2 * page, page);
            // SAFETY: the second page of a mapping that nobody uses yet.
            assert_eq!(unsafe { libc::mprotect(base.add(page).cast(), page, libc::PROT_NONE) }, 0);
            Self(base, page)
        }
        fn slots(&mut self, n: usize) -> &mut [Option<Page>] {
            // SAFETY: the last n words of the readable page; zero is an empty slot.
            unsafe { std::slice::from_raw_parts_mut(self.0.add(self.1 - 8 * n).cast(), n) }
        }
    }
    for allocator in allocators(1024) {
        let mut guarded = Guarded::new();
        for n in [1, 2, 7, 8, 9, 63, 64, 65, 300] {
            let slots = guarded.slots(n);
            assert_eq!(allocator.alloc_pages_bulk_array(Bulk::up_to(n), slots).unwrap().occupied, n);
            // All full, with the unreadable page right behind.
            assert_eq!(allocator.alloc_pages_bulk_array(Bulk::up_to(n), slots).unwrap().added, 0);
            assert_eq!(free_pages_bulk(slots), n);
        }
        let mut slots = slots::<Page>(8);
        allocator.alloc_pages_bulk_array(Bulk::up_to(5), &mut slots).unwrap();
        assert!(slots[..5].iter().all(Option::is_some) && slots[5..].iter().all(Option::is_none));
        drop(slots);
        close_all_back(allocator);
    }
}

#[test]
fn refused_exact_requests_change_nothing() {
    for allocator in allocators(20) {
        let mut slots = slots::<Page>(30);
        slots[3] = Some(allocator.alloc_page(Gfp::KERNEL).unwrap());
        let kept = slots[3].as_ref().unwrap().addr();
        let error = allocator.alloc_pages_bulk_array(Bulk::exact(30), &mut slots).unwrap_err();
        assert_eq!(error, Error::Invalid(InvalidRequest::MoreThanManaged { blocks: 29, order: 0, most: 20 }));
        let error = allocator.alloc_pages_bulk_array(Bulk::exact(21), &mut slots).unwrap_err();
        assert_eq!(error, Error::Exhausted(Exhausted { wanted: 21, got: 20, order: 0, why: Why::Exhausted }));
        assert_eq!(slots.iter().flatten().map(Page::addr).collect::<Vec<_>>(), [kept]);
        assert_eq!(allocator.validate().unwrap().handed_out, 1);

        let mut list = PageList::new();
        list.push(slots[3].take().unwrap()).unwrap();
        assert!(allocator.alloc_pages_bulk_list(Bulk::exact(20), &mut list).is_err());
        assert_eq!(list.len(), 1);
        assert_eq!(allocator.alloc_pages_bulk_list(Bulk::at_least(19, 100), &mut list).unwrap().blocks, 19);
        let mut runs = Vec::<Run<Page>>::new();
        assert!(allocator.alloc_pages_bulk_runs(Bulk::at_least(1, 2), &mut runs).is_err());
        assert!(runs.is_empty());
        drop(list);
        assert_eq!(allocator.alloc_pages_bulk_array(Bulk::at_least(20, 30), &mut slots).unwrap().occupied, 20);
        drop(slots);
        close_all_back(allocator);
    }
}

#[test]
fn lists_can_be_appended_iterated_and_cleared() {
    for allocator in allocators(4096) {
        for n in [1, 2, 8, 9, 64, 65, 200, 1000] {
            let mut list = PageList::new();
            list.push(allocator.alloc_page(Gfp::KERNEL).unwrap()).unwrap();
            let first = allocator.alloc_pages_bulk_list(Bulk::up_to(n), &mut list).unwrap().blocks;
            let mut other = PageList::new();
            let second = allocator.alloc_pages_bulk_list(Bulk::up_to(n), &mut other).unwrap().blocks;
            list.append(&mut other).unwrap();
            assert_eq!((first, second, list.len(), other.len()), (n, n, 2 * n + 1, 0));
            let pages: Vec<Page> = list.by_ref().take(n).collect();
            assert_distinct(&pages);
            assert_eq!(list.len(), n + 1);
            assert_eq!(list.clear(), n + 1);
        }
        close_all_back(allocator);
    }
}

#[test]
fn neighbouring_pages_are_merged_into_runs() {
    for allocator in allocators(4096) {
        let mut runs = Vec::<Run<Page>>::new();
        assert_eq!(allocator.alloc_pages_bulk_runs(Bulk::up_to(2048), &mut runs).unwrap().blocks, 2048);
        // A fresh arena is contiguous: four pageblocks.
        assert!(runs.len() <= 4, "{} runs of a fresh arena", runs.len());
        for run in &mut runs {
            run.as_mut_bytes().fill(1);
        }
        let run = runs.pop().unwrap();
        let n = run.len();
        assert_eq!(run.into_pages().inspect(|page| assert_eq!(page[0], 1)).count(), n);
        drop(runs);
        close_all_back(allocator);
    }
}

#[test]
fn only_null_slots_of_a_raw_array_are_filled() {
    for allocator in allocators(1024) {
        drop(allocator.alloc_page(Gfp::KERNEL).unwrap()); // The list has pages.
        for n in [1, 2, 3, 7, 8, 9, 31, 32, 63, 64, 65, 130] {
            // Empty, with others among them, and full; twice, since the first pages were never handed out before.
            for kept in [0, 0, 1, n / 2, n] {
                let mut slots = vec![std::ptr::null_mut(); n + 1];
                slots[..n].rotate_left(kept);
                slots[..kept].fill(somebodys());
                let filled = allocator.alloc_pages_bulk_array_raw(Bulk::up_to(n), &mut slots).unwrap();
                assert_eq!(filled, Filled { added: n - kept, occupied: n, first_hole: n, shortfall: None });
                assert!(slots[..kept].iter().all(|&slot| slot == somebodys()) && slots[n].is_null());
                let fresh = &mut slots[kept..n];
                let addrs: HashSet<usize> = fresh.iter().map(|page| page.addr()).collect();
                assert!(addrs.len() == n - kept && addrs.iter().all(|addr| addr.is_multiple_of(PAGE_SIZE)));
                // SAFETY: they are ours, and each is freed once: the second call is misuse, on purpose.
                unsafe {
                    let again = fresh.first().copied();
                    assert_eq!(free_pages_bulk_raw(fresh, Order::ZERO), Ok(n - kept), "{n} slots, {kept} kept");
                    again.inspect(|&page| _ = free_raw(page, Order::ZERO).unwrap_err());
                }
                assert!(slots[kept..n].iter().all(|slot| slot.is_null()));
            }
        }
    }
}

#[test]
fn scattered_null_slots_of_a_raw_array_are_filled() {
    for allocator in allocators(4096) {
        drop(allocator.alloc_page(Gfp::KERNEL).unwrap()); // The list has pages.
        for n in [2, 9, 64, 65, 200, 1024, 1030] {
            for every in [2, 3, 40] {
                let is_hole = |i: usize| i % every == 1;
                let before: Vec<_> =
                    (0..n).map(|i| if is_hole(i) { std::ptr::null_mut() } else { somebodys() }).collect();
                let holes = (0..n).filter(|&i| is_hole(i)).count();
                let mut slots = before.clone();
                let filled = allocator.alloc_pages_bulk_array_raw(Bulk::exact(n), &mut slots).unwrap();
                assert_eq!(filled, Filled { added: holes, occupied: n, first_hole: n, shortfall: None });
                assert!((0..n).all(|i| is_hole(i) || slots[i] == somebodys()));
                let mut pages: Vec<_> = (0..n).filter(|&i| is_hole(i)).map(|i| slots[i]).collect();
                assert_eq!(pages.iter().collect::<HashSet<_>>().len(), holes);
                // SAFETY: they are ours.
                let freed = unsafe { free_pages_bulk_raw(&mut pages, Order::ZERO) };
                assert_eq!(freed, Ok(holes), "{n} slots, each {every}.");
            }
        }
        close_all_back(allocator);
    }
}

#[test]
fn raw_arrays_and_handle_arrays_are_refused_alike() {
    for allocator in allocators(64) {
        let rest = array(&allocator, 60);
        let refused = |n: usize, least: usize, full: usize, gfp: Gfp| {
            let (mut pages, mut raw) = (slots(8), vec![std::ptr::null_mut(); 8]);
            pages[..full].iter_mut().for_each(|slot| *slot = Some(allocator.alloc_page(Gfp::KERNEL).unwrap()));
            let of_handles =
                allocator.alloc_pages_bulk_array(Bulk::at_least(least, n).gfp(gfp), &mut pages).unwrap_err();
            // As many pages are free for the other form.
            raw[..full].fill(somebodys());
            let of_raw = allocator.alloc_pages_bulk_array_raw(Bulk::at_least(least, n).gfp(gfp), &mut raw).unwrap_err();
            assert_eq!(of_handles, of_raw, "{n}, {least}, {full}");
            assert_eq!(raw.iter().filter(|slot| slot.is_null()).count(), 8 - full);
            of_raw.to_string()
        };
        assert!(refused(8, 9, 1, Gfp::NOWAIT).contains("at least 9 blocks cannot have a maximum of 8"));
        assert!(refused(usize::MAX, 1, 0, Gfp::NOWAIT).contains(&usize::MAX.to_string()));
        assert!(refused(9, 0, 1, Gfp::NOWAIT).contains('9'));
        refused(8, 8, 0, Gfp::NOWAIT);
        drop(rest);
    }
}

#[test]
fn a_short_raw_array_reports_the_counts_of_its_request() {
    for allocator in allocators(64) {
        let rest = array(&allocator, 64);
        let mut slots = [std::ptr::null_mut(); 8];
        slots[..3].fill(somebodys());
        let error =
            allocator.alloc_pages_bulk_array_raw(Bulk::at_least(5, 8).gfp(Gfp::NOWAIT), &mut slots).unwrap_err();
        assert!(matches!(error, Error::Exhausted(Exhausted { wanted: 5, got: 3, .. })), "{error}");
        drop(rest);
    }
}

#[test]
fn a_raw_array_is_filled_whole_or_left_unchanged() {
    let order = Order::new(3).unwrap();
    for allocator in allocators(64) {
        let mut slots = [std::ptr::null_mut(); 10];
        slots[4] = somebodys();
        let before = slots;
        // Eight blocks there are, and nine are missing.
        let error = allocator.alloc_pages_bulk_array_raw(Bulk::exact(10).order(order), &mut slots).unwrap_err();
        assert!(
            matches!(error, Error::Invalid(InvalidRequest::MoreThanManaged { .. }) | Error::Exhausted(_)),
            "{error}"
        );
        assert_eq!(slots, before);
        let error = allocator.alloc_pages_bulk_array_raw(Bulk::up_to(11), &mut slots).unwrap_err();
        assert!(matches!(error, Error::Invalid(InvalidRequest::ArrayTooShort { slots: 10, count: 11 })), "{error}");
        let filled = allocator.alloc_pages_bulk_array_raw(Bulk::at_least(9, 10).order(order), &mut slots).unwrap();
        assert_eq!((filled.added, filled.occupied, filled.first_hole), (8, 9, 9));
        assert_eq!(filled.shortfall.unwrap().missing, 1);
        slots[4] = std::ptr::null_mut();
        // SAFETY: they are ours.
        unsafe {
            assert_eq!(free_pages_bulk_raw(&mut slots, Order::ZERO).unwrap_err().0, 0, "of another order");
            assert_eq!(free_pages_bulk_raw(&mut slots, order), Ok(8));
        }
    }
}

#[test]
fn a_fresh_raw_array_is_filled_whatever_it_held() {
    for allocator in allocators(1 << 13) {
        for order in [0, 3].map(|order| Order::new(order).unwrap()) {
            for n in [0, 1, 2, 63, 64, 65, 500] {
                let garbage = core::ptr::without_provenance_mut::<u8>(0x123);
                let mut slots = vec![MaybeUninit::new(garbage); n + 1];
                let request = Bulk::exact(n).order(order);
                let filled = allocator.alloc_pages_bulk_array_raw_fresh(request, &mut slots).unwrap();
                assert_eq!((filled.added, filled.occupied, filled.first_hole, filled.shortfall), (n, n, n, None));
                // SAFETY: all were initialised at first.
                let mut slots: Vec<_> = slots.iter().map(|slot| unsafe { slot.assume_init() }).collect();
                assert_eq!(slots.pop(), Some(garbage), "the slot beyond {n}");
                // SAFETY: the blocks are this test's, and nothing uses them.
                assert_eq!(unsafe { free_pages_bulk_raw(&mut slots, order) }, Ok(n), "{n} of {order:?}");
            }
        }
        // Slots that get no page are null, also if the request is refused.
        let mut slots = vec![MaybeUninit::new(core::ptr::without_provenance_mut::<u8>(0x123)); (1 << 13) + 1];
        let many = slots.len();
        assert!(allocator.alloc_pages_bulk_array_raw_fresh(Bulk::exact(many), &mut slots).is_err());
        // SAFETY: all were initialised at first.
        assert!(slots.iter().all(|slot| unsafe { slot.assume_init() }.is_null()));
        allocator.drain();
        let filled = allocator.alloc_pages_bulk_array_raw_fresh(Bulk::up_to(many), &mut slots).unwrap();
        assert_eq!((filled.added, filled.first_hole), (many - 1, many - 1));
        // SAFETY: as above.
        let mut slots: Vec<_> = slots.iter().map(|slot| unsafe { slot.assume_init() }).collect();
        // SAFETY: the pages are this test's, and nothing uses them.
        assert_eq!(unsafe { free_pages_bulk_raw(&mut slots, Order::ZERO) }, Ok(many - 1));
        assert!(allocator.alloc_pages_bulk_array_raw_fresh(Bulk::up_to(2), &mut [MaybeUninit::uninit()]).is_err());
    }
}

#[test]
fn a_fresh_array_grows_by_the_pages_delivered() {
    for allocator in allocators(1024) {
        let mut slots: Vec<Option<Page>> = vec![None];
        // Twice, since the first pages were never handed out before; and a part of a batch, a batch, and more than one.
        for n in [1, 2, 40, 64, 65, 300, 1, 2, 40, 64, 65, 300] {
            let before = slots.len();
            let delivered = allocator.alloc_pages_bulk_array_fresh(Bulk::exact(n), &mut slots).unwrap();
            assert_eq!((delivered.blocks, delivered.shortfall, slots.len()), (n, None, before + n));
            if n == 300 {
                assert!(slots[0].is_none() && slots[1..].iter().all(Option::is_some));
                assert_distinct(slots.iter().flatten());
                assert_eq!(free_pages_bulk(&mut slots), 1 + 2 + 40 + 64 + 65 + 300);
                slots.truncate(1);
            }
        }
        // More than the allocator has: nothing, or all pages; also for a count that no array could hold.
        for most in [1025, Bulk::COUNT_MAX] {
            assert!(allocator.alloc_pages_bulk_array_fresh(Bulk::at_least(1025, most), &mut slots).is_err());
            assert_eq!(slots.len(), 1);
            let delivered = allocator.alloc_pages_bulk_array_fresh(Bulk::up_to(most), &mut slots).unwrap();
            assert_eq!((delivered.blocks, slots.len()), (1024, 1025));
            assert_eq!(delivered.shortfall.unwrap().missing, most - 1024);
            assert!(allocator.alloc_pages_bulk_array_fresh(Bulk::exact(2), &mut slots).is_err());
            assert_eq!((slots.len(), free_pages_bulk(&mut slots)), (1025, 1024));
            slots.truncate(1);
        }
        let mut blocks: Vec<Option<Block>> = Vec::new();
        let request = Bulk::up_to(70).order(Order::new(2).unwrap());
        assert_eq!(allocator.alloc_pages_bulk_array_fresh(request, &mut blocks).unwrap().blocks, 70);
        assert!(blocks.iter().flatten().all(|block| block.len() == 4 * PAGE_SIZE));
        drop(blocks);
        close_all_back(allocator);
    }
}

#[test]
fn runs_of_any_length_are_freed_in_bulk() {
    for allocator in allocators(1024) {
        let mut runs: Vec<Run<Page>> = Vec::new();
        let taken = Bulk::exact(300);
        allocator.alloc_pages_bulk_runs(taken, &mut runs).unwrap();
        // Each second page alone, so that runs of one page and of many take turns.
        let (kept, freed): (Vec<Page>, Vec<Page>) =
            take(&allocator, 200).into_iter().partition(|page| page.addr() & PAGE_SIZE == 0);
        drop(freed);
        allocator.alloc_pages_bulk_runs(Bulk::exact(100), &mut runs).unwrap();
        let pages: usize = runs.iter().map(Run::len).sum();
        assert_eq!((pages, free_pages_bulk_runs(&mut runs), runs.len()), (400, 400, 0));
        assert_eq!(free_pages_bulk_runs(&mut runs), 0);
        drop(kept);
        close_all_back(allocator);
        let allocator = arena(1024).build().unwrap();
        let mut blocks: Vec<Run<Block>> = Vec::new();
        allocator.alloc_pages_bulk_runs(Bulk::exact(5).order(Order::new(2).unwrap()), &mut blocks).unwrap();
        assert_eq!(free_pages_bulk_runs(&mut blocks), 5);
        close_all_back(allocator);
    }
}

/// An array with blocks of several orders, pages and holes, of two allocators, in no order.
#[test]
fn blocks_of_mixed_orders_are_freed_in_bulk() {
    for (one, other) in allocators(8192).into_iter().zip(allocators(8192)) {
        let mut slots: Vec<Option<Block>> = Vec::new();
        for (i, order) in [1, 6, 0, 3, 8, 1, 1, 7, 9, 6, 6, 0, 0, 2, 10].into_iter().cycle().take(60).enumerate() {
            let from = if i % 7 < 4 { &one } else { &other };
            slots.push(from.alloc_pages(Gfp::NOWAIT, Order::new(order).unwrap()).ok());
            slots.push(None);
        }
        let blocks = slots.iter().flatten().count();
        assert!(blocks > 40);
        (0..slots.len()).for_each(|i| slots.swap(i, i * 31 % 120));
        assert_eq!(free_pages_bulk(&mut slots), blocks);
        assert!(slots.iter().all(Option::is_none));
        let kept = one.alloc_page(Gfp::KERNEL).unwrap();
        for order in 1..=8 {
            let order = Order::new(order).unwrap();
            let mut list = BlockList::new();
            let taken = one.alloc_pages_bulk_list(Bulk::up_to(70).order(order), &mut list).unwrap().blocks;
            assert!(taken >= 28 && list.len() == taken); // What 8192 frames have, but for those on lists.
            assert_eq!(list.clear(), taken);
            let mut raw = vec![std::ptr::null_mut(); taken];
            one.alloc_pages_bulk_array_raw(Bulk::exact(taken).order(order), &mut raw).unwrap();
            // The second one stands there twice, and the last one is a handle's: neither is freed, and both slots stay.
            raw.push(raw[1]);
            raw.push(kept.as_ptr().cast_mut());
            // SAFETY: they are ours, but for the two that are misuse, on purpose.
            let (freed, _) = unsafe { free_pages_bulk_raw(&mut raw, order) }.unwrap_err();
            let left: Vec<usize> = (0..raw.len()).filter(|&i| !raw[i].is_null()).collect();
            assert_eq!((freed, left), (taken, vec![taken, taken + 1]), "{order:?}");
        }
        drop(kept);
        let stats = one.stats();
        assert_eq!((stats.allocated, stats.misused), (stats.freed, 16));
        assert_eq!(one.validate().unwrap().handed_out, 0);
        close_all_back(other);
    }
}

#[test]
fn a_callback_may_allocate_and_unwind() {
    for allocator in allocators(4096) {
        let mut extra = Vec::new();
        let each = |page: Page| extra.push((page, allocator.alloc_page(Gfp::KERNEL).unwrap()));
        let delivered = allocator.alloc_pages_bulk_callback(Bulk::up_to(100), each).unwrap();
        assert_eq!((delivered.blocks, extra.len()), (100, 100));
        drop(extra);
        // From the list, and past it, where more is in hand than the callback has seen.
        for (most, enough) in [(100, 37), (2000, 700), (2000, 1024), (2000, 2000)] {
            let mut given = 0;
            let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                allocator.alloc_pages_bulk_callback(Bulk::up_to(most), |page: Page| {
                    given += 1;
                    assert!(given < enough, "enough");
                    drop(page);
                })
            }));
            assert!(unwound.is_err());
            assert_eq!(allocator.validate().unwrap().handed_out, 0);
        }
        close_all_back(allocator);
    }
}

#[test]
fn every_form_delivers_blocks_of_every_order() {
    for allocator in allocators(4 << 18) {
        for order in (0..=18).map(|order| Order::new(order).unwrap()) {
            let n = if order.get() > 12 { 2 } else { 5 };
            let request = Bulk::up_to(n).order(order);
            let mut slots = slots::<Block>(n);
            assert_eq!(allocator.alloc_pages_bulk_array(request, &mut slots).unwrap().occupied, n, "order {order:?}");
            assert!(slots.iter().flatten().all(|block| block.order() == order && block.addr() % order.bytes() == 0));
            assert_eq!(free_pages_bulk(&mut slots), n);
            let mut list = BlockList::new();
            assert_eq!(allocator.alloc_pages_bulk_list(request, &mut list).unwrap().blocks, n);
            assert!(list.pop().is_some_and(|block| block.order() == order));
            drop(list);
            let mut runs = Vec::<Run<Block>>::new();
            assert_eq!(allocator.alloc_pages_bulk_runs(request, &mut runs).unwrap().blocks, n);
            assert_eq!(runs.iter().map(Run::bytes).sum::<usize>(), n * order.bytes());
            drop(runs);
            let mut blocks = Vec::<Block>::new();
            assert_eq!(allocator.alloc_pages_bulk_callback(request, |block| blocks.push(block)).unwrap().blocks, n);
            // Split, every page is freed on its own, in any order.
            let mut pages: Vec<Page> = blocks.pop().unwrap().split().collect();
            assert_eq!(pages.len(), order.pages().get());
            while let Some(page) = (!pages.is_empty()).then(|| pages.swap_remove(pages.len() / 2)) {
                drop(page);
            }
            drop(blocks);
            allocator.drain();
            assert_eq!(allocator.validate().unwrap().free, 4 << 18, "order {order:?}");
        }
        assert_eq!(allocator.buddyinfo().free_blocks(Order::MAX), 4);
        close_all_back(allocator);
    }
}

#[test]
fn pages_of_a_split_pageblock_keep_its_mobility() {
    // One CPU, so that the page that was freed last is the one that comes next.
    let allocator = one_cpu(Memory::anonymous(1024));
    let block = allocator.alloc_pages(Gfp::KERNEL | Gfp::MOVABLE, Order::PAGEBLOCK).unwrap();
    let mut pages: Vec<Page> = block.split().collect();
    let freed = pages.swap_remove(77);
    let addr = freed.addr();
    drop(freed);
    let unmovable = allocator.alloc_page(Gfp::KERNEL).unwrap();
    let movable = allocator.alloc_page(Gfp::KERNEL | Gfp::MOVABLE).unwrap();
    assert_eq!(movable.addr(), addr);
    drop((unmovable, movable, pages));
    close_all_back(allocator);
}

#[test]
fn impossible_requests_are_refused() {
    for allocator in allocators(16) {
        let mut slots = slots::<Page>(4);
        let mut list = PageList::new();
        let too_many = Bulk::up_to(usize::MAX);
        let refused = Error::Invalid(InvalidRequest::CountTooLarge { count: usize::MAX, max: i32::MAX as usize });
        assert_eq!(allocator.alloc_pages_bulk_array(too_many, &mut slots).unwrap_err(), refused);
        assert_eq!(allocator.alloc_pages_bulk_list(too_many, &mut list).unwrap_err(), refused);
        assert_eq!(allocator.alloc_pages_bulk_callback(too_many, drop::<Page>).unwrap_err(), refused);
        assert!(matches!(
            allocator.alloc_pages_bulk_array(Bulk::up_to(5), &mut slots),
            Err(Error::Invalid(InvalidRequest::ArrayTooShort { slots: 4, count: 5 }))
        ));
        assert!(matches!(
            allocator.alloc_pages_bulk_list(Bulk::at_least(5, 4), &mut list),
            Err(Error::Invalid(InvalidRequest::AtLeastAboveUpTo { at_least: 5, up_to: 4 }))
        ));
        assert!(matches!(
            allocator.alloc_page(Gfp::NOWAIT | Gfp::NOFAIL),
            Err(Error::Invalid(InvalidRequest::Invalid(Invalid::GfpConflict(..))))
        ));
        assert!(matches!(
            allocator.alloc_page(Gfp::KERNEL | Gfp::DMA32),
            Err(Error::Invalid(InvalidRequest::GfpUnsupported(_)))
        ));
        assert!(slots.iter().all(Option::is_none) && list.is_empty());
        assert_eq!(allocator.stats().allocated, 0);
        close_all_back(allocator);
    }
    assert!(matches!(Allocator::builder().pages(0).build(), Err(BuildError::ArenaSize { pages: 0, .. })));
    assert!(Allocator::builder().pages(usize::MAX).build().is_err());
    assert!(Allocator::builder().cpus(0, || 0).pages(4).build().is_err());
    assert_eq!(Order::new(31).unwrap_err(), Invalid::OrderTooLarge { order: 31 });
}

#[test]
fn injected_faults_are_reported_as_faults() {
    let faults = Faults::after(1).only(Gfp::NOWAIT);
    let allocator = arena(512).faults(faults).build().unwrap();
    let mut list = PageList::new();
    let request = Bulk::up_to(512).gfp(Gfp::NOWAIT);
    let first = allocator.alloc_pages_bulk_list(request, &mut list).unwrap();
    let missing = 512 - first.blocks;
    assert!(first.blocks > 0);
    assert_eq!(first.shortfall, Some(Shortfall { missing, why: Why::Fault }));
    // Other kinds of request get the rest. When nothing is left, that is the reason given.
    assert_eq!(allocator.alloc_pages_bulk_list(Bulk::up_to(missing), &mut list).unwrap().shortfall, None);
    let refused = |gfp| allocator.alloc_page(gfp).unwrap_err();
    let exhausted = Error::Exhausted(Exhausted { wanted: 1, got: 0, order: 0, why: Why::Exhausted });
    assert_eq!((refused(Gfp::NOWAIT), refused(Gfp::KERNEL)), (exhausted, exhausted));
}

/// Runs are served from a list whose frames follow each other: small arrays that were taken and freed do not end that.
#[test]
fn small_arrays_leave_the_list_in_order() {
    let allocator = one_cpu(Memory::anonymous(4096));
    let mut array: [Option<Page>; 64] = [const { None }; 64];
    allocator.alloc_pages_bulk_array(Bulk::exact(64), &mut array).unwrap();
    free_pages_bulk(&mut array);
    for n in 1..=8 {
        allocator.alloc_pages_bulk_array(Bulk::exact(n), &mut array).unwrap();
        let addrs: Vec<_> = array[..n].iter().flatten().map(Page::addr).collect();
        assert!(addrs.windows(2).all(|pair| pair[0] + PAGE_SIZE == pair[1]), "{n}: {addrs:x?}");
        free_pages_bulk(&mut array);
        let mut runs: Vec<Run<Page>> = Vec::new();
        allocator.alloc_pages_bulk_runs(Bulk::exact(48), &mut runs).unwrap();
        assert_eq!(runs.len(), 1, "after an array of {n}");
    }
}

/// The histogram of bulk calls, as the exponents of the sizes that occurred.
fn sizes(calls: &[u64; 32]) -> Vec<usize> {
    (0..32).filter(|&log2| calls[log2] > 0).collect()
}

#[test]
fn a_bulk_call_counts_its_blocks_whatever_their_order() {
    for (order, is_freed_in_bulk) in [(0, true), (1, true), (6, true), (9, false)] {
        let order = Order::new(order).unwrap();
        for allocator in allocators(12 << order.get()) {
            let mut blocks: [Option<Block>; 10] = [const { None }; 10];
            allocator.alloc_pages_bulk_array(Bulk::exact(10).order(order), &mut blocks).unwrap();
            let stats = allocator.stats();
            assert_eq!((sizes(&stats.bulk_alloc), stats.allocated), (vec![3], 10 << order.get()), "{order:?}");
            assert_eq!(free_pages_bulk(&mut blocks), 10);
            let stats = allocator.stats();
            let freed = if is_freed_in_bulk { vec![3] } else { vec![] };
            assert_eq!((sizes(&stats.bulk_free), stats.freed), (freed, 10 << order.get()), "{order:?}");
            let one = allocator.alloc_pages(Gfp::KERNEL, order).unwrap();
            drop(one);
            assert_eq!(sizes(&allocator.stats().bulk_alloc), [3], "one block is no bulk call");
        }
    }
}
