//! Runs of contiguous blocks: the result of the runs form, which needs as few I/O vector entries as possible.
//!
//! The runs form adds batches here and merges neighbours (`bulk/engine.rs`); a run that is dropped frees its blocks in
//! bulk (`free.rs`). A run owns all its blocks. It takes no lock.
use crate::free::{free_contig, free_page, free_run, free_words, give_away};
use crate::handle::{Owned, Page, Pages};
use crate::word::{addr_of_word, word_of};
use core::marker::PhantomData;
use core::mem::{ManuallyDrop, MaybeUninit};
use pagemill_core::{Order, PAGE_SIZE, Pfn};
use pagemill_os::Batch;

/// Neighbouring blocks of one order, owned together. Freed in bulk when dropped.
///
/// ```
/// use pagemill::{Allocator, Bulk, Page, Run};
/// let mut runs: Vec<Run<Page>> = Vec::new();
/// Allocator::global().alloc_pages_bulk_runs(Bulk::up_to(4), &mut runs)?;
/// for run in &mut runs {
///     run.as_mut_bytes().fill(7);
///     assert_eq!(run.as_bytes().len(), run.len() * 4096);
///     assert_eq!(run.as_ptr().addr(), run.addr());
/// }
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Debug)]
pub struct Run<T: Owned> {
    addr: usize,
    blocks: usize,
    order: Order,
    /// It was asked for as a run, and goes back as one.
    is_contig: bool,
    _owns: PhantomData<T>,
}

impl<T: Owned> Run<T> {
    /// A run of one page, which has no other owner.
    #[inline]
    pub(crate) fn of_page(addr: usize) -> Self {
        Self::of_blocks(addr, 1, Order::ZERO)
    }
    fn of_blocks(addr: usize, blocks: usize, order: Order) -> Self {
        Self { addr, blocks, order, is_contig: false, _owns: PhantomData }
    }
    /// Frees its blocks, of which there are several or of an order above 0.
    fn free_blocks(&self) {
        if self.is_contig { free_contig(self.addr, self.blocks) } else { free_run(self.addr, self.blocks, self.order) }
    }
    /// The number of blocks in it.
    #[expect(clippy::len_without_is_empty, reason = "a run has at least one block")]
    pub fn len(&self) -> usize {
        self.blocks
    }
    /// Its size in bytes.
    pub fn bytes(&self) -> usize {
        self.blocks * self.order.bytes()
    }
    /// Its first address.
    pub fn addr(&self) -> usize {
        self.addr
    }
    /// A pointer to its first byte.
    pub fn as_ptr(&self) -> *const u8 {
        core::ptr::with_exposed_provenance(self.addr)
    }
    /// A pointer to its first byte, for writing.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        core::ptr::with_exposed_provenance_mut(self.addr)
    }
    /// Its memory, for reading.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: the run owns its blocks, which are neighbours; mapped memory is initialised.
        unsafe { core::slice::from_raw_parts(self.as_ptr(), self.bytes()) }
    }
    /// Its memory, for writing.
    pub fn as_mut_bytes(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_bytes`, and the run is borrowed exclusively.
        unsafe { core::slice::from_raw_parts_mut(self.as_mut_ptr(), self.bytes()) }
    }
}

impl<T: Owned> Run<T> {
    /// Gives up ownership of its blocks. Returns a raw pointer to the first, their number and their order. Each block must
    /// be freed by [`free_raw`](crate::free_raw) or [`free_pages_bulk_raw`](crate::free_pages_bulk_raw).
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Order, PAGE_SIZE, free_raw};
    /// let (first, pages, order) = Allocator::global().alloc_contig(Gfp::KERNEL, 3)?.into_raw();
    /// assert_eq!((pages, order), (3, Order::ZERO));
    /// // SAFETY: this code owns the three pages.
    /// (0..3).for_each(|at| unsafe { free_raw(first.add(at * PAGE_SIZE), order) }.unwrap());
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn into_raw(self) -> (*mut u8, usize, Order) {
        let run = ManuallyDrop::new(self);
        (0..run.blocks).for_each(|at| give_away(run.addr + at * run.order.bytes(), run.order));
        (core::ptr::with_exposed_provenance_mut(run.addr), run.blocks, run.order)
    }
}

impl<T: Owned> AsRef<[u8]> for Run<T> {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl<T: Owned> AsMut<[u8]> for Run<T> {
    fn as_mut(&mut self) -> &mut [u8] {
        self.as_mut_bytes()
    }
}

/// Without a copy: the memory is freed when the last clone of the [`Bytes`](bytes::Bytes) is dropped.
#[cfg(feature = "bytes")]
impl<T: Owned> From<Run<T>> for bytes::Bytes {
    fn from(run: Run<T>) -> Self {
        Self::from_owner(run)
    }
}

impl Run<Page> {
    /// A run of `n` neighbouring pages, which have no other owner.
    pub(crate) fn contig(addr: usize, n: usize) -> Self {
        Self { addr, blocks: n, order: Order::ZERO, is_contig: true, _owns: PhantomData }
    }
    /// Its pages, each of which is freed on its own.
    pub fn into_pages(self) -> Pages {
        let run = ManuallyDrop::new(self);
        Pages { next: run.addr, end: run.addr + run.blocks * PAGE_SIZE }
    }
}

impl<T: Owned> Drop for Run<T> {
    #[inline]
    fn drop(&mut self) {
        if self.blocks == 1 && self.order == Order::ZERO {
            let _ = free_page(self.addr); // The hook is told of misuse.
            return;
        }
        self.free_blocks();
    }
}

/// Frees all these runs in bulk, and empties the vector (C3.10). Returns the number of blocks freed. Where few runs are
/// longer than a page, this costs a third of dropping them one by one.
///
/// ```
/// use pagemill::{Allocator, Bulk, Page, Run, free_pages_bulk_runs};
/// let mut runs: Vec<Run<Page>> = Vec::new();
/// Allocator::global().alloc_pages_bulk_runs(Bulk::exact(64), &mut runs)?;
/// assert_eq!((free_pages_bulk_runs(&mut runs), runs.len()), (64, 0));
/// # Ok::<(), pagemill::Error>(())
/// ```
pub fn free_pages_bulk_runs<T: Owned>(runs: &mut Vec<Run<T>>) -> usize {
    let mut freed = 0;
    while !runs.is_empty() {
        // Left uninitialised until filled: initialising them would cost as much as filling.
        let mut words = [const { MaybeUninit::uninit() }; Batch::CAPACITY];
        let mut n = 0;
        while n < words.len()
            && let Some(run) = runs.pop().map(ManuallyDrop::new)
        {
            freed += run.blocks;
            if run.blocks > 1 || run.order > Order::ZERO {
                run.free_blocks();
            } else {
                words[n].write(run.addr);
                n += 1;
            }
        }
        // SAFETY: the loop above initialised the first `n` words.
        let words = unsafe { core::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<usize>(), n) };
        // Owned runs are not refused. Should one be, the hook is told.
        free_words(words, &mut None);
    }
    freed
}

/// The runs that one request appends to a vector.
pub(crate) struct Runs<'v, T: Owned> {
    runs: &'v mut Vec<Run<T>>,
    before: usize,
    order: Order,
}

impl<'v, T: Owned> Runs<'v, T> {
    #[inline]
    pub(crate) fn new(runs: &'v mut Vec<Run<T>>, order: Order) -> Self {
        Self { before: runs.len(), runs, order }
    }

    /// Adds the blocks of a batch, merging neighbours.
    #[inline]
    pub(crate) fn push_batch(&mut self, zero: usize, batch: &Batch) {
        let (mut pfns, step) = (batch.as_pfns(), self.order.frames());
        // The first block may continue the vector's last run. Within the batch, each run is followed by a gap.
        let Some(&first) = pfns.first() else { return };
        let n = run_length(pfns, step);
        self.extend(word_of(zero, first), n);
        pfns = &pfns[n..];
        self.runs.reserve(pfns.len());
        let mut len = self.runs.len();
        let mut runs = self.runs.spare_capacity_mut().iter_mut();
        while let (Some(&first), Some(place)) = (pfns.first(), runs.next()) {
            let n = run_length(pfns, step);
            place.write(Run::of_blocks(word_of(zero, first), n, self.order));
            (len, pfns) = (len + 1, &pfns[n..]);
        }
        // SAFETY: the loop initialised every run below `len`.
        unsafe { self.runs.set_len(len) };
    }

    /// Adds one block.
    pub(crate) fn push(&mut self, block: T) {
        self.extend(addr_of_word(block.into_word()), 1);
    }

    #[inline]
    pub(crate) fn extend(&mut self, addr: usize, blocks: usize) {
        if self.runs.len() > self.before
            && let Some(last) = self.runs.last_mut()
            && last.addr + last.bytes() == addr
        {
            last.blocks += blocks;
            return;
        }
        // Written in place: a copy of a run made elsewhere would wait for its stores.
        self.runs.reserve(1);
        self.runs.spare_capacity_mut()[0].write(Run::of_blocks(addr, blocks, self.order));
        // SAFETY: the line above initialised one more run.
        unsafe { self.runs.set_len(self.runs.len() + 1) };
    }

    /// Frees the runs that this request added.
    pub(crate) fn undo(&mut self) {
        self.runs.truncate(self.before);
    }
}

/// The length of the run at the start: numbers that each exceed the one before by `step`.
#[inline]
fn run_length(pfns: &[Pfn], step: u32) -> usize {
    1 + pfns.windows(2).take_while(|pair| pair[1] == pair[0].offset(step)).count()
}
