//! Owned handles: whoever has one has the memory, and nobody else does. One word each, with no null value, so that
//! `Option` of one is a word with null empty, as the array form wants it.
use crate::free::{free_page, free_word, free_words, give_away, take_up};
use crate::registry;
use crate::word::{addr_of_word, order_of_word};
use core::fmt;
use core::mem::ManuallyDrop;
use core::num::NonZeroUsize;
use core::ops::{Deref, DerefMut};
use pagemill_core::{Misuse, Order, PAGE_SIZE, Pfn};

pub(crate) mod sealed {
    /// The word behind a handle.
    pub trait Word: Sized {
        /// A handle of its word.
        ///
        /// # Safety
        /// The word is that of a block that is handed out and that nobody else has.
        unsafe fn from_word(word: usize) -> Self;
        /// The word of a handle, which is given up.
        fn into_word(self) -> usize;
        /// The same, and it is kept.
        fn word(&self) -> usize;
        /// What it holds.
        fn bytes_mut(&mut self) -> &mut [u8];
    }
}

/// What a request can be served with: [`Page`]s, or [`Block`]s of an order.
///
/// ```
/// fn takes<T: pagemill::Owned>() {}
/// takes::<pagemill::Page>();
/// takes::<pagemill::Block>();
/// ```
pub trait Owned: sealed::Word + Send + 'static {}
impl Owned for Page {}
impl Owned for Block {}

/// The words behind an array's slots: 0 is empty.
pub(crate) fn slots_as_words<T: Owned>(slots: &mut [Option<T>]) -> &mut [usize] {
    const { assert!(size_of::<Option<T>>() == size_of::<usize>() && align_of::<Option<T>>() == align_of::<usize>()) };
    // SAFETY: Page and Block, the only types that are Owned, are transparent over NonZeroUsize, whose Option is a
    // usize with 0 for None. Callers write 0 or words of blocks that nobody else has.
    unsafe { core::slice::from_raw_parts_mut(slots.as_mut_ptr().cast(), slots.len()) }
}

/// One page of 4096 bytes. Freed when dropped.
///
/// Its contents are unspecified unless it was asked for with `ZERO`; they are whatever its last owner left, so hand a
/// page to somebody who must not see that only after writing it.
///
/// ```
/// use pagemill::{Allocator, Gfp};
/// let mut page = Allocator::global().alloc_page(Gfp::KERNEL | Gfp::ZERO)?;
/// page[0] = 1;
/// assert_eq!((page.len(), page[4095], page.addr() % 4096), (4096, 0, 0));
/// # Ok::<(), pagemill::Error>(())
/// ```
#[repr(transparent)]
pub struct Page(NonZeroUsize);

/// 2^order contiguous pages, aligned to their size. Freed when dropped.
///
/// ```
/// use pagemill::{Allocator, Gfp, Order};
/// let block = Allocator::global().alloc_pages(Gfp::KERNEL, Order::new(3)?)?;
/// assert_eq!((block.len(), block.addr() % (8 * 4096)), (8 * 4096, 0));
/// let pages: Vec<_> = block.split().collect();
/// assert_eq!(pages.len(), 8); // each freed on its own
/// # Ok::<(), pagemill::Error>(())
/// ```
#[repr(transparent)]
pub struct Block(NonZeroUsize);

impl sealed::Word for Page {
    #[inline]
    unsafe fn from_word(word: usize) -> Self {
        debug_assert!(word != 0 && word.is_multiple_of(PAGE_SIZE));
        // SAFETY: an address of an arena, which is not null.
        Self(unsafe { NonZeroUsize::new_unchecked(word) })
    }
    #[inline]
    fn into_word(self) -> usize {
        ManuallyDrop::new(self).0.get()
    }
    fn word(&self) -> usize {
        self.0.get()
    }
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut **self
    }
}
impl sealed::Word for Block {
    #[inline]
    unsafe fn from_word(word: usize) -> Self {
        debug_assert!(addr_of_word(word) != 0);
        // SAFETY: an address of an arena with an order; not null.
        Self(unsafe { NonZeroUsize::new_unchecked(word) })
    }
    #[inline]
    fn into_word(self) -> usize {
        ManuallyDrop::new(self).0.get()
    }
    fn word(&self) -> usize {
        self.0.get()
    }
    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
}

macro_rules! handle {
    ($name:ident, $what:literal, $free:path) => {
        impl $name {
            /// Its address.
            #[inline]
            pub fn addr(&self) -> usize {
                addr_of_word(self.0.get())
            }
            /// Its first byte.
            #[inline]
            pub fn as_ptr(&self) -> *const u8 {
                core::ptr::with_exposed_provenance(self.addr())
            }
            /// Its first byte, to be written.
            #[inline]
            pub fn as_mut_ptr(&mut self) -> *mut u8 {
                core::ptr::with_exposed_provenance_mut(self.addr())
            }
            /// The number of its first frame.
            ///
            /// # Panics
            /// If no allocator has its address, which takes a [`from_raw`](Self::from_raw) of something else.
            pub fn pfn(&self) -> Pfn {
                let addr = self.addr();
                match registry::by_address(addr) {
                    Some((_, pfn)) => pfn,
                    None => panic!(concat!("a ", $what, " at {:#x} outside of every arena"), addr),
                }
            }
            /// Frees it. A handle is the proof that it may be freed; where unsafe code made one of something else, that is said
            /// if no arena has the address, if the zone has the block already, and, with full states, always. Dropping does
            /// the same, and reports misuse to [`on_misuse`](crate::on_misuse) alone.
            ///
            /// # Errors
            /// [`Misuse`]; nothing was changed.
            #[inline]
            pub fn free(self) -> Result<(), Misuse> {
                $free(ManuallyDrop::new(self).0.get())
            }
        }

        impl Drop for $name {
            #[inline]
            fn drop(&mut self) {
                // Misuse is reported on its way; there is nobody here to tell.
                let _ = $free(self.0.get());
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($what, " of order {} at {:#x}"), order_of_word(self.0.get()).get(), self.addr())
            }
        }
    };
}
handle!(Page, "page", free_page);
handle!(Block, "block", free_word);

impl Page {
    /// Gives up ownership; [`from_raw`](Self::from_raw) or [`free_raw`](crate::free_raw) takes it up again.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Order, free_raw};
    /// let ptr = Allocator::global().alloc_page(Gfp::KERNEL)?.into_raw();
    /// // SAFETY: the page is ours, and nothing looks at it from here on.
    /// unsafe { free_raw(ptr, Order::ZERO) }.unwrap();
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline]
    pub fn into_raw(self) -> *mut u8 {
        let addr = ManuallyDrop::new(self).0.get();
        give_away(addr, Order::ZERO);
        core::ptr::with_exposed_provenance_mut(addr)
    }
    /// Takes up ownership again.
    ///
    /// # Errors
    /// [`Misuse`]: it is no page that was given up; nothing was changed.
    ///
    /// # Safety
    /// `ptr` came from [`into_raw`](Self::into_raw) (or is a page that Pagemill handed out in C), and nobody else uses it. A
    /// second call for it is refused, as long as the page has not been given up again.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, MisuseKind, Page};
    /// let ptr = Allocator::global().alloc_page(Gfp::KERNEL)?.into_raw();
    /// // SAFETY: the page is ours; the second call is misuse, on purpose.
    /// let (page, second) = unsafe { (Page::from_raw(ptr)?, Page::from_raw(ptr)) };
    /// assert_eq!((page.addr(), second.unwrap_err().kind), (ptr.addr(), MisuseKind::DoubleFree));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline]
    pub unsafe fn from_raw(ptr: *mut u8) -> Result<Self, Misuse> {
        take_up(ptr.addr(), Order::ZERO)?;
        // SAFETY: no page is at address 0.
        Ok(Self(unsafe { NonZeroUsize::new_unchecked(ptr.expose_provenance()) }))
    }
}

impl Deref for Page {
    type Target = [u8; PAGE_SIZE];
    #[inline]
    fn deref(&self) -> &Self::Target {
        // SAFETY: the handle owns the page; mapped memory is initialised.
        unsafe { &*self.as_ptr().cast() }
    }
}
impl DerefMut for Page {
    #[inline]
    fn deref_mut(&mut self) -> &mut Self::Target {
        // SAFETY: as in `deref`, and the handle is borrowed exclusively.
        unsafe { &mut *self.as_mut_ptr().cast() }
    }
}

impl Block {
    /// Its order.
    #[inline]
    pub fn order(&self) -> Order {
        order_of_word(self.0.get())
    }
    /// Turns it into its pages, each of which is freed on its own from then on. Those that the iterator still has
    /// when it is dropped are freed in bulk.
    pub fn split(self) -> Pages {
        let (addr, order) = (self.addr(), self.order());
        core::mem::forget(self);
        crate::free::split(addr, order);
        Pages { next: addr, end: addr + order.bytes() }
    }
    /// Gives up ownership; [`from_raw`](Self::from_raw) or [`free_raw`](crate::free_raw) takes it up again.
    pub fn into_raw(self) -> (*mut u8, Order) {
        let word = ManuallyDrop::new(self).0.get();
        let (addr, order) = (addr_of_word(word), order_of_word(word));
        give_away(addr, order);
        (core::ptr::with_exposed_provenance_mut(addr), order)
    }
    /// Takes up ownership again.
    ///
    /// # Errors
    /// [`Misuse`]: it is no block of this order that was given up; nothing was changed.
    ///
    /// # Safety
    /// Both came from [`into_raw`](Self::into_raw), and nobody else uses the block.
    pub unsafe fn from_raw(ptr: *mut u8, order: Order) -> Result<Self, Misuse> {
        take_up(ptr.addr(), order)?;
        // SAFETY: no block is at address 0.
        Ok(Self(unsafe { NonZeroUsize::new_unchecked(ptr.expose_provenance() | usize::from(order.get())) }))
    }
}

impl From<Page> for Block {
    /// A page is a block of order 0.
    fn from(page: Page) -> Self {
        Self(ManuallyDrop::new(page).0)
    }
}

impl Deref for Block {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the handle owns the block, which has that size; mapped memory is initialised.
        unsafe { core::slice::from_raw_parts(self.as_ptr(), self.order().bytes()) }
    }
}
impl DerefMut for Block {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and the handle is borrowed exclusively.
        unsafe { core::slice::from_raw_parts_mut(self.as_mut_ptr(), self.order().bytes()) }
    }
}

/// The pages of a block that was [split](Block::split), or of a [run](crate::Run).
///
/// ```
/// use pagemill::{Allocator, Gfp, Order};
/// let block = Allocator::global().alloc_pages(Gfp::KERNEL, Order::new(1)?)?;
/// let mut pages = block.split();
/// let first = pages.next().unwrap();
/// drop(pages); // frees the other one
/// assert_eq!(first.len(), 4096);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Debug)]
pub struct Pages {
    pub(crate) next: usize,
    pub(crate) end: usize,
}

impl Iterator for Pages {
    type Item = Page;
    #[inline]
    fn next(&mut self) -> Option<Page> {
        if self.next == self.end {
            return None;
        }
        let addr = self.next;
        self.next += PAGE_SIZE;
        // SAFETY: the iterator owns the pages from `next` to `end`, and gives this one away.
        Some(unsafe { sealed::Word::from_word(addr) })
    }
    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = (self.end - self.next) / PAGE_SIZE;
        (left, Some(left))
    }
}
impl ExactSizeIterator for Pages {}

impl Drop for Pages {
    #[inline]
    fn drop(&mut self) {
        if self.next == self.end {
            return;
        }
        crate::free::free_run(self.next, (self.end - self.next) / PAGE_SIZE, Order::ZERO);
    }
}

/// Frees what an array holds, whoever handed it out, and empties its slots (C3.10). Returns how many blocks that
/// were; empty slots cost little.
///
/// ```
/// use pagemill::{Allocator, Bulk, free_pages_bulk, Page};
/// let mut slots: [Option<Page>; 8] = [const { None }; 8];
/// Allocator::global().alloc_pages_bulk_array(Bulk::up_to(8), &mut slots)?;
/// assert_eq!(free_pages_bulk(&mut slots), 8);
/// assert!(slots.iter().all(Option::is_none));
/// # Ok::<(), pagemill::Error>(())
/// ```
#[inline(always)]
pub fn free_pages_bulk<T: Owned>(slots: &mut [Option<T>]) -> usize {
    // What is refused is reported on its way; owned handles cannot be.
    free_words(slots_as_words(slots), &mut None)
}
