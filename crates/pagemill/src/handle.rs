//! Owned handles: a handle owns its memory, and each page has one owner at most.
//!
//! A request ends with a handle, and freeing begins with one. A handle is one word that is never 0: an address, with
//! the order in its low bits (`word.rs`). So an `Option` of a handle is one word too, 0 if empty, as the array form
//! needs it.
//!
//! # Invariant
//! The word of a handle is that of a block that is handed out, and no other handle has it.
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
        /// Makes a handle from its word.
        ///
        /// # Safety
        /// The word is that of a block that is handed out and that has no other owner.
        unsafe fn from_word(word: usize) -> Self;
        /// Consumes the handle and returns its word.
        fn into_word(self) -> usize;
        /// The handle's word; the handle keeps its block.
        fn word(&self) -> usize;
        /// The memory that it owns.
        fn bytes_mut(&mut self) -> &mut [u8];
    }
}

/// The types that a request can deliver: [`Page`]s, or [`Block`]s of an order.
///
/// ```
/// fn takes<T: pagemill::Owned>() {}
/// takes::<pagemill::Page>();
/// takes::<pagemill::Block>();
/// ```
pub trait Owned: sealed::Word + Send + 'static {}
impl Owned for Page {}
impl Owned for Block {}

/// The words behind an array's slots: 0 is an empty slot.
pub(crate) fn slots_as_words<T: Owned>(slots: &mut [Option<T>]) -> &mut [usize] {
    const { assert!(size_of::<Option<T>>() == size_of::<usize>() && align_of::<Option<T>>() == align_of::<usize>()) };
    // SAFETY: Page and Block, the only types that are Owned, are transparent over NonZeroUsize, whose Option is a usize
    // with 0 for None. Callers write only 0 or words of blocks that have no other owner.
    unsafe { core::slice::from_raw_parts_mut(slots.as_mut_ptr().cast(), slots.len()) }
}

/// One page of 4096 bytes. Freed when dropped.
///
/// Its contents are unspecified unless it was requested with `ZERO`: usually they are what its last owner left.
/// Overwrite a page before you hand it to code that must not see its old contents.
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
/// assert_eq!(pages.len(), 8); // each is freed on its own
/// # Ok::<(), pagemill::Error>(())
/// ```
#[repr(transparent)]
pub struct Block(NonZeroUsize);

impl sealed::Word for Page {
    #[inline]
    unsafe fn from_word(word: usize) -> Self {
        debug_assert!(word != 0 && word.is_multiple_of(PAGE_SIZE));
        // SAFETY: the caller passes the address of a page, which is not null.
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
        // SAFETY: the caller passes the address of a block, which is not null, with an order.
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
            /// A pointer to its first byte.
            #[inline]
            pub fn as_ptr(&self) -> *const u8 {
                core::ptr::with_exposed_provenance(self.addr())
            }
            /// A pointer to its first byte, for writing.
            #[inline]
            pub fn as_mut_ptr(&mut self) -> *mut u8 {
                core::ptr::with_exposed_provenance_mut(self.addr())
            }
            /// The number of its first frame.
            ///
            /// # Panics
            /// If its address is in no allocator's memory. Only a false [`from_raw`](Self::from_raw) makes such a
            /// handle.
            pub fn pfn(&self) -> Pfn {
                let addr = self.addr();
                match registry::by_address(addr) {
                    Some((_, pfn)) => pfn,
                    None => panic!(concat!("a ", $what, " at {:#x} outside of every arena"), addr),
                }
            }
            /// Frees it. Owning the handle proves that it may be freed. If unsafe code made the handle from something
            /// else, this is detected if no arena has the address, if the zone has the block already, and in builds
            /// with full states always. Dropping the handle does the same, but reports misuse only to
            /// [`on_misuse`](crate::on_misuse).
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
                // `$free` reports misuse to the hook; a drop has no caller to return it to.
                let _ = $free(self.0.get());
            }
        }

        impl AsRef<[u8]> for $name {
            #[inline]
            fn as_ref(&self) -> &[u8] {
                &self[..]
            }
        }

        impl AsMut<[u8]> for $name {
            #[inline]
            fn as_mut(&mut self) -> &mut [u8] {
                &mut self[..]
            }
        }

        /// Without a copy: the memory is freed when the last clone of the [`Bytes`](bytes::Bytes) is dropped.
        #[cfg(feature = "bytes")]
        impl From<$name> for bytes::Bytes {
            fn from(memory: $name) -> Self {
                Self::from_owner(memory)
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
    /// Gives up ownership and returns a raw pointer. [`from_raw`](Self::from_raw) takes ownership again, and
    /// [`free_raw`](crate::free_raw) frees the page.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Order, free_raw};
    /// let ptr = Allocator::global().alloc_page(Gfp::KERNEL)?.into_raw();
    /// // SAFETY: this code owns the page and does not use it afterwards.
    /// unsafe { free_raw(ptr, Order::ZERO) }.unwrap();
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline]
    pub fn into_raw(self) -> *mut u8 {
        let addr = ManuallyDrop::new(self).0.get();
        give_away(addr, Order::ZERO);
        core::ptr::with_exposed_provenance_mut(addr)
    }
    /// Takes ownership of a raw page again.
    ///
    /// # Errors
    /// [`Misuse`]: the pointer is not that of a raw page. Nothing was changed.
    ///
    /// # Safety
    /// `ptr` came from [`into_raw`](Self::into_raw), or from a request for raw pages, and nothing else uses
    /// it. A second call with the same pointer is refused, as long as the page has not become a raw pointer again.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, MisuseKind, Page};
    /// let ptr = Allocator::global().alloc_page(Gfp::KERNEL)?.into_raw();
    /// // SAFETY: this code owns the page. The second call is deliberate misuse.
    /// let (page, second) = unsafe { (Page::from_raw(ptr)?, Page::from_raw(ptr)) };
    /// assert_eq!((page.addr(), second.unwrap_err().kind), (ptr.addr(), MisuseKind::DoubleFree));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline]
    pub unsafe fn from_raw(ptr: *mut u8) -> Result<Self, Misuse> {
        take_up(ptr.addr(), Order::ZERO)?;
        // SAFETY: `take_up` found a page at the address, and no page is at address 0.
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
    /// Turns the block into its pages, each of which is freed on its own. Dropping the iterator frees its remaining
    /// pages in bulk.
    pub fn split(self) -> Pages {
        let (addr, order) = (self.addr(), self.order());
        core::mem::forget(self);
        crate::free::split(addr, order);
        Pages { next: addr, end: addr + order.bytes() }
    }
    /// Gives up ownership and returns a raw pointer with the order. [`from_raw`](Self::from_raw) takes ownership again,
    /// and [`free_raw`](crate::free_raw) frees the block.
    pub fn into_raw(self) -> (*mut u8, Order) {
        let word = ManuallyDrop::new(self).0.get();
        let (addr, order) = (addr_of_word(word), order_of_word(word));
        give_away(addr, order);
        (core::ptr::with_exposed_provenance_mut(addr), order)
    }
    /// Takes ownership of a raw block again.
    ///
    /// # Errors
    /// [`Misuse`]: the pointer is not that of a raw block of this order. Nothing was changed.
    ///
    /// # Safety
    /// Both values came from [`into_raw`](Self::into_raw), and nothing else uses the block.
    pub unsafe fn from_raw(ptr: *mut u8, order: Order) -> Result<Self, Misuse> {
        take_up(ptr.addr(), order)?;
        // SAFETY: `take_up` found a block at the address, and no block is at address 0.
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
/// drop(pages); // frees the other page
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
        // SAFETY: the iterator owns the pages from `next` to `end`, and gives up this one.
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

/// Frees all blocks in an array, whichever allocators they belong to, and empties their slots (C3.10). Returns the
/// number of blocks freed. Empty slots cost little.
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
    // Owned handles are not refused, so there is no misuse to return. Should one be refused, the hook is told.
    free_words(slots_as_words(slots), &mut None)
}
