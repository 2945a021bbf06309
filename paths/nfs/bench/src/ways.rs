//! The ways to refill an array.
//!
//! [`ServerArray`] is the server's own. The others keep their slots in a vector, and are told which slice a request used, so
//! that no row pays for finding out.

use std::ops::Range;
use std::sync::Arc;

use pagemill::{Allocator, Bulk, Cancel, Gfp, Page, PageList};
use pagemill_nfs::pages::{PageArray, PageCounters, SLOTS};

pub(crate) const ARRAY: &str = "array-slice";
pub(crate) const WHOLE: &str = "array-whole";
pub(crate) const LIST: &str = "list";
pub(crate) const SINGLE: &str = "one-by-one";
pub(crate) const STOPS: &str = "array-stops";

/// An array of [`SLOTS`] slots, and a way to refill it.
pub(crate) trait Array {
    /// Makes an array, filled.
    fn new(allocator: &Allocator) -> Self;

    /// The slots of a slice, which a request uses.
    fn slots(&mut self, slice: Range<usize>) -> &mut [Option<Page>];

    /// Fills the holes of the slice as far as it can.
    fn refill(&mut self, allocator: &Allocator, slice: Range<usize>);
}

/// The server's: the array form, on the slice that was handed out.
pub(crate) struct ServerArray {
    array: PageArray,
    stop: Cancel,
}

impl Array for ServerArray {
    fn new(allocator: &Allocator) -> Self {
        let array = PageArray::new(allocator, Arc::new(PageCounters::default()));
        let mut new = ServerArray { array, stop: Cancel::new() };
        new.refill(allocator, 0..SLOTS);
        new
    }
    fn slots(&mut self, slice: Range<usize>) -> &mut [Option<Page>] {
        self.array.slots(slice)
    }
    #[inline]
    fn refill(&mut self, _: &Allocator, _: Range<usize>) {
        // Nobody stops it. A hole that stayed would be noticed.
        let _ = self.array.refill(&self.stop);
    }
}

/// A way to refill the slots of an array that begin at the slice, with the length of the slice.
pub(crate) trait Way {
    /// Whether it looks at the whole array instead.
    const IS_WHOLE: bool = false;

    fn fill(allocator: &Allocator, slots: &mut [Option<Page>]);
}

/// An array that is refilled in a way.
pub(crate) struct Plain<W> {
    slots: Vec<Option<Page>>,
    way: std::marker::PhantomData<W>,
}

impl<W: Way> Array for Plain<W> {
    fn new(allocator: &Allocator) -> Self {
        let mut new = Plain { slots: (0..SLOTS).map(|_| None).collect(), way: std::marker::PhantomData };
        new.refill(allocator, 0..SLOTS);
        new
    }
    fn slots(&mut self, slice: Range<usize>) -> &mut [Option<Page>] {
        &mut self.slots[slice]
    }
    #[inline]
    fn refill(&mut self, allocator: &Allocator, slice: Range<usize>) {
        W::fill(allocator, &mut self.slots[if W::IS_WHOLE { 0..SLOTS } else { slice }]);
    }
}

/// The array form, on all slots.
pub(crate) struct Whole;

impl Way for Whole {
    const IS_WHOLE: bool = true;

    fn fill(allocator: &Allocator, slots: &mut [Option<Page>]) {
        let _ = allocator.alloc_pages_bulk_array(Bulk::up_to(slots.len()), slots);
    }
}

/// The list form: counts the holes, gets a list of as many pages, and moves them into the holes.
pub(crate) struct List;

impl Way for List {
    fn fill(allocator: &Allocator, slots: &mut [Option<Page>]) {
        let (missing, mut pages) = (slots.iter().filter(|slot| slot.is_none()).count(), PageList::new());
        let _ = allocator.alloc_pages_bulk_list(Bulk::up_to(missing), &mut pages);
        slots.iter_mut().filter(|slot| slot.is_none()).for_each(|slot| *slot = pages.pop());
    }
}

/// A call for each hole.
pub(crate) struct Single;

impl Way for Single {
    fn fill(allocator: &Allocator, slots: &mut [Option<Page>]) {
        slots.iter_mut().filter(|slot| slot.is_none()).for_each(|slot| *slot = allocator.alloc_page(Gfp::KERNEL).ok());
    }
}

/// An array form that comes back at the end of the first hole, as that of 2021 (v5) did: it fills empty neighbours, and stops
/// at the first slot that is full. The other holes are filled by a call for each.
pub(crate) struct Stops;

impl Way for Stops {
    fn fill(allocator: &Allocator, slots: &mut [Option<Page>]) {
        let Some(from) = slots.iter().position(Option::is_none) else { return };
        let empty = slots[from..].iter().position(Option::is_some).unwrap_or(slots.len() - from);
        let _ = allocator.alloc_pages_bulk_array(Bulk::up_to(empty), &mut slots[from..from + empty]);
        Single::fill(allocator, &mut slots[from + empty..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemill::Memory;

    /// The slots that are empty after a refill of a slice in an array with holes inside of it and outside.
    fn left<A: Array>() -> Vec<usize> {
        let allocator = Allocator::builder().memory(Memory::anonymous(4096)).build().unwrap();
        let mut array = A::new(&allocator);
        assert!(array.slots(0..SLOTS).iter().all(Option::is_some));
        array.refill(&allocator, 0..SLOTS);
        // The server's array is told of the slice, and has no way to make a hole outside of it.
        for at in [10, 11, 30, 49] {
            array.slots(10..50)[at - 10] = None;
        }
        array.refill(&allocator, 10..50);
        let slots = array.slots(0..SLOTS);
        let distinct: std::collections::BTreeSet<usize> = slots.iter().flatten().map(|page| page.addr()).collect();
        assert_eq!(distinct.len(), slots.iter().flatten().count());
        (0..SLOTS).filter(|&at| slots[at].is_none()).collect()
    }

    #[test]
    fn every_way_fills_all_holes_of_the_slice() {
        let none: [usize; 0] = [];
        assert_eq!(left::<ServerArray>(), none);
        assert_eq!(left::<Plain<Whole>>(), none);
        assert_eq!(left::<Plain<List>>(), none);
        assert_eq!(left::<Plain<Single>>(), none);
        assert_eq!(left::<Plain<Stops>>(), none);
    }

    #[test]
    fn the_way_that_stops_makes_a_bulk_call_for_the_first_hole_alone() {
        let allocator = Allocator::builder().memory(Memory::anonymous(4096)).cpus(1, || 0).build().unwrap();
        let mut array = Plain::<Stops>::new(&allocator);
        let bulk_calls = || allocator.stats().bulk_alloc.iter().sum::<u64>();
        let mut calls_for = |holes: &[usize]| {
            let before = bulk_calls();
            holes.iter().for_each(|&at| array.slots(0..SLOTS)[at] = None);
            array.refill(&allocator, 0..SLOTS);
            bulk_calls() - before
        };
        assert_eq!(calls_for(&[0, 1, 2, 3]), 1);
        assert_eq!(calls_for(&[5, 6, 9, 10, 20]), 1);
        assert_eq!(calls_for(&[0, 4, 8]), 0, "one page is no bulk call");
    }
}
