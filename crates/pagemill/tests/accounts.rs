//! A request with an account is charged for what was delivered and no more, however the request ends (C3.4).

use crate::common::{EXACT_FORMS, FORMS, Form, assert_all_back, backends, one_cpu, panics, slots};
use pagemill::{
    Account, Allocator, Block, BlockList, Bulk, Error, Gfp, InvalidRequest, Memory, Order, Page, PageCount, PageList,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

const PAGES: usize = 2048;

fn allocator() -> Allocator {
    one_cpu(Memory::anonymous(PAGES))
}

fn rich() -> Account {
    Account::new(PageCount::new(1 << 20))
}

fn charged(account: &Account) -> usize {
    account.charged().get()
}

#[test]
fn a_request_with_an_account_is_charged_for_what_it_gets() {
    let allocator = allocator();
    for gfp in [Gfp::KERNEL, Gfp::KERNEL | Gfp::ACCOUNT] {
        let account = Account::new(PageCount::new(70));
        let request = |n| Bulk::up_to(n).gfp(gfp).account(&account);
        let mut list = PageList::new();
        drop(allocator.alloc_page(gfp.kind()).unwrap()); // The list has pages.
        for (n, paid) in [(1, 1), (10, 11), (20, 31)] {
            allocator.alloc_pages_bulk_list(request(n), &mut list).unwrap();
            assert_eq!(charged(&account), paid);
        }
        let delivered = allocator.alloc_pages_bulk_list(request(64), &mut list).unwrap();
        assert_eq!((delivered.blocks, charged(&account)), (39, 70));
        // A request that must get pages and cannot pay for them gets none.
        let must = Bulk::exact(1).gfp(gfp).account(&account);
        assert!(allocator.alloc_pages_bulk_list(must, &mut list).is_err());
        assert_eq!(charged(&account), 70);
    }
    // A request that says to charge an account, and names none.
    let none = Error::Invalid(InvalidRequest::NoAccount);
    assert_eq!(allocator.alloc_page(Gfp::KERNEL | Gfp::ACCOUNT).unwrap_err(), none);
    assert_eq!(allocator.alloc_pages(Gfp::NOWAIT | Gfp::ACCOUNT, Order::PAGEBLOCK).unwrap_err(), none);
    let bulk = Bulk::up_to(2).gfp(Gfp::KERNEL | Gfp::ACCOUNT);
    assert_eq!(allocator.alloc_pages_bulk_list(bulk, &mut PageList::new()).unwrap_err(), none);
}

/// Charges requests for `n` pages in one form to accounts for none, for one too few, for enough and for more. `short` is how
/// many come where one is missing.
fn charges_each<N>(allocator: &Allocator, what: &str, form: Form<N>, request: Bulk<'_, N>, n: usize, short: usize) {
    let got = |request: Bulk<'_, N>| form(allocator, request, n).map_or(0, |(pages, _)| pages.len());
    assert_eq!(got(request), n, "{what}"); // The list has pages.
    for (limit, gets) in [(0, 0), (n - 1, short), (n, n), (1 << 20, n)] {
        let account = Account::new(PageCount::new(limit));
        let charges = (got(request.account(&account)), charged(&account));
        assert_eq!(charges, (gets, gets), "{what} of {n} pages, an account for {limit}");
    }
}

/// Whatever serves the request: lists that have pages, and the zone; on the true CPUs.
#[test]
fn every_form_charges_the_account_for_every_size() {
    for backend in backends() {
        let allocator = Allocator::builder().memory(Memory::anonymous(4 * PAGES)).backend(backend).build().unwrap();
        for n in 1..=130 {
            for (name, form) in FORMS {
                charges_each(&allocator, &format!("{backend:?}, {name}"), form, Bulk::up_to(n), n, n - 1);
            }
            for (name, form) in EXACT_FORMS {
                charges_each(&allocator, &format!("{backend:?}, {name}, exactly"), form, Bulk::exact(n), n, 0);
            }
        }
    }
}

#[test]
fn a_callback_that_unwinds_is_charged_for_the_pages_it_got() {
    let allocator = allocator();
    // A run of pages, single ones, what was committed, more than one batch, and blocks.
    let mut spread = PageList::new();
    allocator.alloc_pages_bulk_list(Bulk::exact(512), &mut spread).unwrap();
    let kept: Vec<Page> = spread.enumerate().filter_map(|(at, page)| (at % 2 == 0).then_some(page)).collect();
    for stop_at in [1, 3, 64, 65, 100] {
        for request in [Bulk::up_to(200), Bulk::up_to(200).populated(), Bulk::up_to(1000)] {
            let (account, mut got) = (rich(), Vec::new());
            let unwound = catch_unwind(AssertUnwindSafe(|| {
                allocator.alloc_pages_bulk_callback(request.account(&account), |page: Page| {
                    got.push(page);
                    assert!(got.len() < stop_at, "a callback that panics on purpose");
                })
            }));
            assert!(unwound.is_err());
            assert_eq!(charged(&account), stop_at, "{request:?}");
        }
    }
    let (account, mut got) = (rich(), Vec::new());
    let request = Bulk::up_to(8).order(Order::new(2).unwrap()).account(&account);
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        allocator.alloc_pages_bulk_callback(request, |block: Block| {
            got.push(block);
            assert!(got.len() < 3, "a callback that panics on purpose");
        })
    }));
    assert!(unwound.is_err());
    assert_eq!(charged(&account), 3 * 4);
    drop((kept, got));
    assert_all_back(&allocator);
}

#[test]
fn a_request_that_unwinds_changes_neither_array_nor_account() {
    let allocator = allocator();
    let _registered = allocator.register_shrinker(panics());
    let account = rich();
    // All there is comes first, then a shrinker is asked for the rest.
    let request = Bulk::exact(PAGES + 100).account(&account);
    let unwinds = |ask: &mut dyn FnMut()| {
        assert!(catch_unwind(AssertUnwindSafe(ask)).is_err());
        assert_eq!(charged(&account), 0);
        allocator.drain();
        allocator.validate().unwrap().free
    };
    let mut slots = slots::<Page>(PAGES + 100);
    slots[7] = Some(allocator.alloc_page(Gfp::NOWAIT).unwrap());
    let own = slots[7].as_ref().map(Page::addr);
    assert_eq!(unwinds(&mut || _ = allocator.alloc_pages_bulk_array(request, &mut slots)), PAGES - 1);
    assert!(slots.iter().enumerate().all(|(at, slot)| slot.as_ref().map(Page::addr) == own.filter(|_| at == 7)));
    slots[7] = None;
    let mut list = PageList::new();
    assert_eq!(unwinds(&mut || _ = allocator.alloc_pages_bulk_list(request, &mut list)), PAGES);
    let mut blocks = BlockList::new();
    let request = Bulk::exact(PAGES + 100).account(&account).populated();
    assert_eq!(unwinds(&mut || _ = allocator.alloc_pages_bulk_list(request, &mut blocks)), PAGES);
    assert!(list.is_empty() && blocks.is_empty());
}
