//! Many pages of several kinds, of two arenas and of two mobilities, freed at once in any order: all go back, each to its
//! own (C2.3, C3.10).

use crate::common::{Rng, arena, backends, one_cpu, slots};
use pagemill::{Allocator, Bulk, Gfp, Memory, Page, PageList, free_pages_bulk};

/// Pages of each kind.
const EACH: usize = 1500;

fn pages(allocator: &Allocator, gfp: Gfp) -> Vec<Page> {
    let mut slots = slots(EACH);
    allocator.alloc_pages_bulk_array(Bulk::exact(EACH).gfp(gfp), &mut slots).unwrap();
    slots.into_iter().flatten().collect()
}

fn shuffle<T>(all: &mut [T]) {
    let mut rng = Rng::new(1);
    (1..all.len()).rev().for_each(|at| all.swap(at, rng.below(at + 1)));
}

/// One kind after the other, `run` pages at a time; none for all of them shuffled.
fn mixed(kinds: Vec<Vec<Page>>, run: Option<usize>) -> Vec<Page> {
    let Some(run) = run else {
        let mut all: Vec<Page> = kinds.into_iter().flatten().collect();
        shuffle(&mut all);
        return all;
    };
    let (mut kinds, mut all): (Vec<_>, Vec<_>) = (kinds.into_iter().map(Vec::into_iter).collect(), Vec::new());
    while kinds.iter().any(|kind| kind.len() > 0) {
        kinds.iter_mut().for_each(|kind| all.extend(kind.by_ref().take(run)));
    }
    all
}

type Way = fn(Vec<Page>);

/// The ways to free them.
const WAYS: [(&str, Way); 3] = [
    ("an array", |pages| {
        let (count, mut slots) = (pages.len(), pages.into_iter().map(Some).collect::<Vec<_>>());
        assert_eq!(free_pages_bulk(&mut slots), count);
        assert!(slots.iter().all(Option::is_none));
    }),
    ("an array with holes", |pages| {
        let count = pages.len();
        let mut slots: Vec<Option<Page>> = pages
            .into_iter()
            .enumerate()
            .flat_map(|(at, page)| [Some(page), None].into_iter().take(1 + at % 2))
            .collect();
        assert_eq!(free_pages_bulk(&mut slots), count);
        assert!(slots.iter().all(Option::is_none));
    }),
    ("a list", |pages| {
        let (count, mut list) = (pages.len(), PageList::new());
        pages.into_iter().for_each(|page| list.push(page).unwrap());
        assert_eq!((list.clear(), list.len()), (count, 0));
    }),
];

#[test]
fn mixed_pages_go_back_to_their_own_allocators() {
    for backend in backends() {
        let both = [(); 2].map(|()| arena(4096).backend(backend).build().unwrap());
        for (name, free) in WAYS {
            for run in [Some(1), Some(2), Some(63), Some(64), Some(65), Some(600), None] {
                let kinds =
                    both.each_ref().map(|of| [Gfp::KERNEL, Gfp::KERNEL | Gfp::MOVABLE].map(|gfp| pages(of, gfp)));
                let before = both.each_ref().map(|of| of.stats());
                free(mixed(kinds.into_iter().flatten().collect(), run));
                for (of, before) in both.iter().zip(before) {
                    assert_eq!(of.stats().freed - before.freed, 2 * EACH as u64, "{backend:?}, {name}, {run:?}");
                    of.drain();
                    let census = of.validate().unwrap();
                    assert_eq!((census.free, census.quarantined), (4096, 0), "{backend:?}, {name}, {run:?}");
                    assert_eq!(of.stats().misused, 0);
                }
            }
        }
        both.into_iter().for_each(|of| of.close().unwrap());
    }
}

/// Tables for many pages are made for many: alternating mobilities go by the lists, however many pages there are. A build without
/// states does not know the mobility of a page, and so has one kind.
#[test]
fn alternating_mobilities_do_not_bypass_the_lists() {
    let allocator = one_cpu(Memory::anonymous(4096));
    for (name, free) in WAYS {
        let past = |run| {
            let kinds = [Gfp::KERNEL, Gfp::KERNEL | Gfp::MOVABLE].map(|gfp| pages(&allocator, gfp));
            let before = allocator.stats().direct_in;
            free(mixed(kinds.into(), run));
            allocator.stats().direct_in - before
        };
        let (in_turns, in_halves) = (past(Some(1)), past(Some(EACH)));
        assert!(in_turns < EACH as u64 / 4, "{name}: {in_turns} pages went past the lists");
        assert!(in_halves > EACH as u64, "{name}: {in_halves} pages went past the lists");
    }
}
