//! Ways of filling the slots of an array with pages: the rows of the tables `holes`, `mixed` and `page-pool`. The array belongs to
//! the program. A [`Stock`] fills its holes, and frees the pages of some of its slots.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use pagemill::{Allocator, Bulk, Gfp, Page, PageList, free_pages_bulk};

use crate::rows::one_by_one::OnePage;
use crate::rows::region::Region;

/// A page as the rows outside Pagemill hold it: its address.
pub(crate) type Addr = NonZeroUsize;

/// One way of filling slots with pages, and of freeing the pages of slots.
pub(crate) trait Stock {
    /// What its user holds of a page.
    type Page: Send + 'static;

    /// Fills every hole of `slots`. False if there were too few pages.
    fn fill(&mut self, slots: &mut [Option<Self::Page>]) -> bool;

    /// Frees the pages of all `slots`, and leaves holes.
    fn free(&mut self, slots: &mut [Option<Self::Page>]);

    /// Does, untimed, the work that a floor leaves out.
    fn settle(&mut self, _slots: &mut [Option<Self::Page>]) {}

    /// A page's address.
    fn at(page: &Self::Page) -> usize;

    /// The allocator from whose lists the pages come: [`crate::subject::Arrange::arrange`].
    fn allocator(&self) -> Option<&Allocator> {
        None
    }
}

/// Pagemill's array form.
pub(crate) struct InBulk(pub(crate) Allocator);

impl Stock for InBulk {
    type Page = Page;

    #[inline]
    fn fill(&mut self, slots: &mut [Option<Page>]) -> bool {
        let n = slots.len();
        self.0.alloc_pages_bulk_array(Bulk::up_to(n), slots).is_ok_and(|filled| filled.first_hole == n)
    }

    #[inline]
    fn free(&mut self, slots: &mut [Option<Page>]) {
        free_pages_bulk(slots);
    }

    fn at(page: &Page) -> usize {
        page.addr()
    }

    fn allocator(&self) -> Option<&Allocator> {
        Some(&self.0)
    }
}

/// Pagemill, one call a page.
pub(crate) struct Singly(pub(crate) Allocator);

impl Stock for Singly {
    type Page = Page;

    #[inline]
    fn fill(&mut self, slots: &mut [Option<Page>]) -> bool {
        for slot in slots.iter_mut().filter(|slot| slot.is_none()) {
            *slot = self.0.alloc_page(Gfp::KERNEL).ok();
            if slot.is_none() {
                return false;
            }
        }
        true
    }

    #[inline]
    fn free(&mut self, slots: &mut [Option<Page>]) {
        slots.fill_with(|| None);
    }

    fn at(page: &Page) -> usize {
        page.addr()
    }

    fn allocator(&self) -> Option<&Allocator> {
        Some(&self.0)
    }
}

/// Pagemill's list form: pages are allocated onto the list, and freed by it.
pub(crate) struct Listed {
    pub(crate) allocator: Allocator,
    pub(crate) list: PageList,
}

impl Stock for Listed {
    type Page = Page;

    #[inline]
    fn fill(&mut self, slots: &mut [Option<Page>]) -> bool {
        let holes = slots.iter().filter(|slot| slot.is_none()).count();
        let delivered = self.allocator.alloc_pages_bulk_list(Bulk::up_to(holes), &mut self.list);
        slots.iter_mut().filter(|slot| slot.is_none()).for_each(|slot| *slot = self.list.pop());
        delivered.is_ok_and(|delivered| delivered.blocks == holes)
    }

    #[inline]
    fn free(&mut self, slots: &mut [Option<Page>]) {
        self.list.extend(slots.iter_mut().filter_map(Option::take));
        self.list.clear();
    }

    fn at(page: &Page) -> usize {
        page.addr()
    }

    fn allocator(&self) -> Option<&Allocator> {
        Some(&self.allocator)
    }
}

/// A floor: a `Vec` of addresses as a stack.
pub(crate) struct Stack {
    free: Vec<Option<Addr>>,
    _region: Region,
}

impl Stack {
    pub(crate) fn new(region: Region) -> Self {
        Stack { free: region.words().map(Addr::new).collect(), _region: region }
    }
}

impl Stock for Stack {
    type Page = Addr;

    #[inline]
    fn fill(&mut self, slots: &mut [Option<Addr>]) -> bool {
        fill_from(&mut self.free, slots)
    }

    #[inline]
    fn free(&mut self, slots: &mut [Option<Addr>]) {
        self.free.extend_from_slice(slots);
        slots.fill(None);
    }

    fn at(page: &Addr) -> usize {
        page.get()
    }
}

#[inline]
fn fill_from(free: &mut Vec<Option<Addr>>, slots: &mut [Option<Addr>]) -> bool {
    for slot in slots.iter_mut().filter(|slot| slot.is_none()) {
        let Some(page) = free.pop() else { return false };
        *slot = page;
    }
    true
}

/// A floor: copies the addresses of the pages that leave, and as many addresses back. It neither finds nor fills the
/// holes; that is done untimed.
pub(crate) struct Copying {
    left: Vec<Option<Addr>>,
    copied: Vec<Option<Addr>>,
    _region: Region,
}

impl Copying {
    pub(crate) fn new(region: Region, slots: usize) -> Self {
        let left = region.words().take(slots).map(Addr::new).collect();
        Copying { left, copied: Vec::with_capacity(slots), _region: region }
    }
}

impl Stock for Copying {
    type Page = Addr;

    #[inline]
    fn fill(&mut self, _slots: &mut [Option<Addr>]) -> bool {
        self.copied.extend_from_slice(&self.left);
        true
    }

    #[inline]
    fn free(&mut self, slots: &mut [Option<Addr>]) {
        self.left.extend_from_slice(slots);
        slots.fill(None);
    }

    fn settle(&mut self, slots: &mut [Option<Addr>]) {
        self.left.clear();
        let holes = slots.iter_mut().filter(|slot| slot.is_none());
        holes.zip(self.copied.drain(..)).for_each(|(slot, page)| *slot = page);
    }

    fn at(page: &Addr) -> usize {
        page.get()
    }
}

/// A `Vec` in a mutex, which is locked once a call.
#[derive(Clone)]
pub(crate) struct Locked {
    free: Arc<Mutex<Vec<Option<Addr>>>>,
    _region: Arc<Region>,
}

impl Locked {
    pub(crate) fn new(region: Region) -> Self {
        let free = region.words().map(Addr::new).collect();
        Locked { free: Arc::new(Mutex::new(free)), _region: Arc::new(region) }
    }
}

impl Stock for Locked {
    type Page = Addr;

    #[inline]
    fn fill(&mut self, slots: &mut [Option<Addr>]) -> bool {
        fill_from(&mut self.free.lock().unwrap_or_else(PoisonError::into_inner), slots)
    }

    #[inline]
    fn free(&mut self, slots: &mut [Option<Addr>]) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(slots);
        slots.fill(None);
    }

    fn at(page: &Addr) -> usize {
        page.get()
    }
}

/// An allocator of single pages, one call a page.
pub(crate) struct EachOf<A>(pub(crate) A);

impl<A: OnePage> Stock for EachOf<A> {
    type Page = Addr;

    #[inline]
    fn fill(&mut self, slots: &mut [Option<Addr>]) -> bool {
        for slot in slots.iter_mut().filter(|slot| slot.is_none()) {
            *slot = Addr::new(self.0.get());
            if slot.is_none() {
                return false;
            }
        }
        true
    }

    #[inline]
    fn free(&mut self, slots: &mut [Option<Addr>]) {
        for page in slots.iter_mut().filter_map(Option::take) {
            self.0.put_back(page.get());
        }
    }

    fn at(page: &Addr) -> usize {
        page.get()
    }
}
