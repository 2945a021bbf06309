//! The portable backend in small arenas, for miri: no undefined behaviour, no data race, no leak.
//!
//! ```text
//! MIRIFLAGS="-Zmiri-permissive-provenance" cargo +nightly miri test -p pagemill --test tests
//! ```
//!
//! The flag only silences warnings: a page's handle is its address, so provenance is exposed, on purpose. The tests also
//! run without miri.
use pagemill::{
    Allocator, Backend, Block, BlockList, Bulk, CpuId, Gfp, Order, Page, PageList, Run, free_pages_bulk,
    free_pages_bulk_runs, free_raw,
};
use pagemill::{MisuseKind, free_pages_bulk_raw};
use std::cell::Cell;
use std::sync::mpsc::channel;

fn allocator(pages: usize) -> Allocator {
    Allocator::builder().pages(pages).backend(Backend::Portable).huge_pages(false).build().unwrap()
}

fn close(allocator: Allocator) {
    assert_eq!(allocator.validate().unwrap().handed_out, 0);
    let stats = allocator.stats();
    assert_eq!((stats.allocated, stats.quarantined), (stats.freed, 0));
    allocator.close().unwrap();
}

fn empty<T>(n: usize) -> Vec<Option<T>> {
    (0..n).map(|_| None).collect()
}

#[test]
fn a_used_page_is_zeroed_again_and_a_raw_one_is_kept() {
    let allocator = allocator(70);
    let mut zero = allocator.alloc_page(Gfp::KERNEL | Gfp::ZERO).unwrap();
    assert!(zero.iter().all(|&byte| byte == 0));
    zero.fill(7);
    let addr = zero.addr();
    zero.free().unwrap();
    let mut again = allocator.alloc_page(Gfp::ATOMIC | Gfp::ZERO).unwrap();
    assert_eq!((again.addr(), again[4095]), (addr, 0), "a page that was used is zeroed again");
    again[0] = 1;
    let raw = again.into_raw();
    // SAFETY: the page is the test's own, and was given up a line above.
    let back = unsafe { Page::from_raw(raw) }.unwrap();
    assert_eq!(back[0], 1);
    drop(back);
    close(allocator);
}

#[test]
fn runs_of_any_number_come_and_go() {
    let allocator = allocator(140);
    let mut runs: Vec<Run<Page>> = [2, 3, 65, 70].map(|n| allocator.alloc_contig(Gfp::KERNEL, n).unwrap()).into();
    assert!(allocator.alloc_contig(Gfp::KERNEL, 2).is_err());
    runs.iter_mut().for_each(|run| run.as_mut_bytes()[4095] = run.len() as u8);
    assert!(runs.iter().all(|run| run.as_bytes()[4095] == run.len() as u8));
    let mut pages = runs.swap_remove(2).into_pages();
    let first = pages.next().unwrap();
    drop(pages);
    assert_eq!(free_pages_bulk_runs(&mut runs), 75);
    let rest = allocator.alloc_contig(Gfp::KERNEL | Gfp::ZERO, 70).unwrap();
    assert!(rest.as_bytes().iter().step_by(4095).all(|&byte| byte == 0));
    drop((first, rest));
    close(allocator);
}

#[test]
fn every_form_fills_holes_and_comes_short() {
    let allocator = allocator(100);
    let mut slots = empty::<Page>(40);
    slots[3] = allocator.alloc_page(Gfp::KERNEL).ok();
    slots[39] = allocator.alloc_page(Gfp::KERNEL | Gfp::MOVABLE).ok();
    let filled = allocator.alloc_pages_bulk_array(Bulk::up_to(40), &mut slots).unwrap();
    assert_eq!((filled.added, filled.occupied, filled.first_hole), (38, 40, 40));
    slots.iter_mut().flatten().for_each(|page| page[17] = 1);
    slots[5] = None;
    assert_eq!(free_pages_bulk(&mut slots), 39);

    let mut list = PageList::new();
    assert_eq!(allocator.alloc_pages_bulk_list(Bulk::up_to(33), &mut list).unwrap().blocks, 33);
    let mut other = PageList::new();
    allocator.alloc_pages_bulk_list(Bulk::exact(20), &mut other).unwrap();
    list.append(&mut other).unwrap();
    list.push(other.pop().or_else(|| allocator.alloc_page(Gfp::KERNEL).ok()).unwrap()).unwrap();
    assert!(allocator.alloc_pages_bulk_list(Bulk::exact(60), &mut list).is_err());
    assert_eq!(list.by_ref().take(10).inspect(|page| assert_eq!(page.len(), 4096)).count(), 10);
    assert_eq!(list.clear(), 44);

    let mut runs = Vec::<Run<Page>>::new();
    assert_eq!(allocator.alloc_pages_bulk_runs(Bulk::up_to(300), &mut runs).unwrap().blocks, 100);
    runs.iter_mut().for_each(|run| run.as_mut_bytes().fill(3));
    let pages = runs.pop().unwrap().into_pages();
    drop(pages.skip(1));
    drop(runs);

    let mut kept = Vec::new();
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        allocator.alloc_pages_bulk_callback(Bulk::up_to(30), |page: Page| {
            kept.push(page);
            assert!(kept.len() < 12, "enough");
        })
    }));
    assert!(unwound.is_err());
    drop(kept);
    close(allocator);
}

#[test]
fn blocks_are_split_and_freed_in_bulk() {
    let allocator = allocator(1024);
    for of in [1u8, 3, 6, 7, 9, 10] {
        let order = Order::new(of).unwrap();
        let mut block = allocator.alloc_pages(Gfp::KERNEL, order).unwrap();
        let last = block.len() - 1;
        (block[0], block[last]) = (1, 2);
        let mut pages = block.split();
        assert_eq!(pages.next().map(|page| page[0]), Some(1));
        drop(pages);
    }
    let order = Order::new(2).unwrap();
    let mut slots = empty::<Block>(6);
    assert_eq!(allocator.alloc_pages_bulk_array(Bulk::exact(6).order(order), &mut slots).unwrap().added, 6);
    assert_eq!(free_pages_bulk(&mut slots), 6);
    let mut list = BlockList::new();
    assert_eq!(allocator.alloc_pages_bulk_list(Bulk::up_to(5).order(order), &mut list).unwrap().blocks, 5);
    let (raw, of) = list.pop().unwrap().into_raw();
    // SAFETY: the block is the test's own.
    assert_eq!(unsafe { free_raw(raw, of) }, Ok(()));
    drop(list);
    close(allocator);
}

#[test]
fn double_and_foreign_frees_in_bulk_change_nothing() {
    let allocator = allocator(64);
    let mut slots = empty::<Page>(20);
    allocator.alloc_pages_bulk_array(Bulk::exact(20), &mut slots).unwrap();
    let mut raw: Vec<*mut u8> = slots.into_iter().flatten().map(|page| page.into_raw()).collect();
    raw.push(raw[4]);
    let mut local = [0u8; 16];
    raw.push(local.as_mut_ptr());
    // SAFETY: the pages are the test's own; the last two are misuse, on purpose.
    let (freed, misuse) = unsafe { free_pages_bulk_raw(&mut raw, Order::ZERO) }.unwrap_err();
    assert_eq!((freed, misuse.kind), (20, MisuseKind::DoubleFree));
    let stats = allocator.stats();
    assert_eq!((stats.misused, stats.freed), (1, 20));
    close(allocator);
}

thread_local! {
    static CPU: Cell<usize> = const { Cell::new(0) };
}

#[test]
fn threads_on_three_cpus_free_each_others_pages() {
    let allocator = Allocator::builder().pages(200).cpus(3, || CPU.get()).build().unwrap();
    let turns = if cfg!(miri) { 12 } else { 2000 };
    std::thread::scope(|scope| {
        let (send, receive) = channel::<PageList>();
        for cpu in 0..2 {
            let (allocator, send) = (&allocator, send.clone());
            scope.spawn(move || {
                for turn in 0..turns {
                    CPU.set(cpu + turn % 2);
                    let mut list = PageList::new();
                    allocator.alloc_pages_bulk_list(Bulk::up_to(turn % 9 + 1), &mut list).unwrap();
                    let mut page = allocator.alloc_page(Gfp::NOWAIT).ok();
                    page.iter_mut().for_each(|page| page[0] = 1);
                    send.send(list).unwrap();
                }
            });
        }
        drop(send);
        CPU.set(2);
        for (n, list) in receive.into_iter().enumerate() {
            if n % 5 == 0 {
                allocator.drain_cpu(CpuId::new(n as u32 % 3)).unwrap();
            }
            list.for_each(|mut page| page[4095] = 2);
        }
    });
    close(allocator);
}

/// A list that is freed looks at the links of frames beside its own: are they in order? Those may be another thread's, who
/// links them just then.
#[test]
fn two_threads_link_and_free_interleaved_pages() {
    let allocator = allocator(200);
    // Every second page; and two of every four, so that a list begins with neighbours.
    for group in [1, 2] {
        let mut pages: Vec<Page> = (0..160).map(|_| allocator.alloc_page(Gfp::KERNEL).unwrap()).collect();
        pages.sort_unstable_by_key(Page::addr);
        let mut lists = [PageList::new(), PageList::new()];
        for (i, page) in pages.into_iter().enumerate() {
            lists[i / group % 2].push(page).unwrap();
        }
        std::thread::scope(|scope| {
            for mut list in lists {
                scope.spawn(move || {
                    let rest: Vec<Page> = list.by_ref().skip(30).collect();
                    let mut other = PageList::new();
                    rest.into_iter().for_each(|page| other.push(page).unwrap());
                    assert_eq!(other.clear(), 50);
                });
            }
        });
    }
    close(allocator);
}

/// C10.2 is for rest, but may be asked at any time: it looks at what others write, and says so if that fits nowhere.
#[test]
fn validate_races_with_allocation() {
    let allocator = allocator(200);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for turn in 0..if cfg!(miri) { 2 } else { 2000 } {
                let mut list = PageList::new();
                allocator.alloc_pages_bulk_list(Bulk::up_to(40 + turn % 30), &mut list).unwrap();
                drop(allocator.alloc_pages(Gfp::KERNEL, Order::new(3).unwrap()));
                drop(list);
                drop(allocator.alloc_page(Gfp::KERNEL));
            }
        });
        for _ in 0..if cfg!(miri) { 6 } else { 2000 } {
            if let Ok(census) = allocator.validate() {
                assert_eq!(census.managed, 200);
            }
        }
    });
    close(allocator);
}

/// One thread frees an allocator's last pages while another closes it, and others come and go in the registry.
#[test]
fn allocators_close_while_others_allocate() {
    let other = allocator(16);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..if cfg!(miri) { 2 } else { 300 } {
                let short = allocator(8);
                let page = short.alloc_page(Gfp::KERNEL).unwrap();
                let refused = short.close().unwrap_err();
                drop(page);
                refused.allocator.close().unwrap();
            }
        });
        for _ in 0..if cfg!(miri) { 15 } else { 3000 } {
            drop(other.alloc_page(Gfp::KERNEL).unwrap());
        }
    });
    close(other);
}
