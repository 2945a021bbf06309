//! Frame numbers on their way between a per-CPU list, the zone and a caller.
use crate::words::are_pages;
use core::mem::MaybeUninit;
use pagemill_core::{ListPolicy, PAGE_SHIFT, Pfn};

/// At most [`CAPACITY`](Self::CAPACITY) frame numbers, in order: a [`Batch`] or a [`Load`]. The space is not initialised
/// beforehand, which would cost as much as filling it.
///
/// ```
/// let mut batch = pagemill_os::Batch::new();
/// batch.push_bits(64, 0b1010);
/// assert_eq!(batch.as_slice(), [65, 67]);
/// ```
#[derive(Debug)]
pub struct Frames<const ROOM: usize> {
    // Invariant: pfns[..len] is initialised.
    len: usize,
    pfns: [MaybeUninit<u32>; ROOM],
}

/// Sections copy 16 numbers at a time, so they may write up to 15 past the end.
pub(crate) const PAD: usize = 16;

/// As many frames as one restartable section moves.
pub type Batch = Frames<{ ListPolicy::SECTION + PAD }>;
/// As many frames as one refill from the zone moves at most.
pub type Load = Frames<{ ListPolicy::BATCH_MAX as usize + PAD }>;

impl<const ROOM: usize> Frames<ROOM> {
    /// The most numbers that it holds.
    pub const CAPACITY: usize = ROOM - PAD;

    /// An empty batch.
    #[inline]
    #[expect(clippy::new_without_default, reason = "an empty batch is a thing to fill, not a value")]
    pub fn new() -> Self {
        Self { len: 0, pfns: [MaybeUninit::uninit(); ROOM] }
    }
    /// The number of frame numbers in it.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether it is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// How many more numbers fit.
    #[inline]
    pub fn room(&self) -> usize {
        Self::CAPACITY - self.len
    }
    /// Removes all numbers.
    #[inline]
    pub fn clear(&mut self) {
        self.len = 0;
    }
    /// Keeps the first `len` numbers.
    #[inline]
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
    /// The numbers.
    #[inline]
    pub fn as_slice(&self) -> &[u32] {
        // SAFETY: the first `len` elements are initialised (the type's invariant), and MaybeUninit<u32> has the
        // layout of u32.
        unsafe { core::slice::from_raw_parts(self.pfns.as_ptr().cast(), self.len) }
    }
    /// The same, as frame numbers.
    #[inline]
    pub fn as_pfns(&self) -> &[Pfn] {
        as_pfns(self.as_slice())
    }
    /// The numbers, mutable.
    #[inline]
    pub fn as_mut_slice(&mut self) -> &mut [u32] {
        // SAFETY: as in `as_slice`; the borrow is exclusive.
        unsafe { core::slice::from_raw_parts_mut(self.pfns.as_mut_ptr().cast(), self.len) }
    }
    /// Appends one number.
    ///
    /// # Panics
    /// If it is full.
    #[inline]
    pub fn push(&mut self, pfn: u32) {
        if self.len >= Self::CAPACITY {
            is_full(Self::CAPACITY);
        }
        self.pfns[self.len].write(pfn);
        self.len += 1;
    }
    /// Appends `n` numbers from `first` up.
    ///
    /// # Panics
    /// If they do not fit.
    #[inline]
    pub fn push_run(&mut self, first: u32, n: usize) {
        let places = &mut self.pfns[self.len..Self::CAPACITY][..n];
        places.iter_mut().zip(first..).for_each(|(place, pfn)| {
            place.write(pfn);
        });
        self.len += n;
    }
    /// Appends all of `pfns`.
    ///
    /// # Panics
    /// If they do not fit.
    #[inline]
    pub fn push_slice(&mut self, pfns: &[u32]) {
        let places = &mut self.pfns[self.len..Self::CAPACITY][..pfns.len()];
        places.iter_mut().zip(pfns).for_each(|(place, &pfn)| {
            place.write(pfn);
        });
        self.len += pfns.len();
    }
    /// Appends the numbers that `number` computes from the elements, in reverse order.
    ///
    /// # Panics
    /// If they do not fit.
    #[inline(always)]
    pub fn push_reversed<T>(&mut self, from: &[T], mut number: impl FnMut(&T) -> u32) {
        let places = &mut self.pfns[self.len..Self::CAPACITY][..from.len()];
        places.iter_mut().zip(from.iter().rev()).for_each(|(place, from)| {
            place.write(number(from));
        });
        self.len += from.len();
    }
    /// Appends `first` + i for each set bit i of `mask`.
    ///
    /// # Panics
    /// If they do not fit.
    #[inline]
    pub fn push_bits(&mut self, first: u32, mut mask: u64) {
        while mask != 0 {
            let skip = mask.trailing_zeros();
            let run = (mask >> skip).trailing_ones();
            self.push_run(first + skip, run as usize);
            mask = if skip + run == 64 { 0 } else { mask & (!0 << (skip + run)) };
        }
    }

    /// Appends the frame numbers of the pages at these addresses. All must be pages of one arena, which has `frames` frames
    /// from `base` on, the first one numbered `first`. Returns false, and appends nothing, if any is not.
    ///
    /// # Panics
    /// If they do not fit.
    ///
    /// ```
    /// let mut batch = pagemill_os::Batch::new();
    /// assert!(batch.push_pages(&[0x7000, 0x5000], 0x4000, 4, 100) && batch.as_slice() == [103, 101]);
    /// assert!(!batch.push_pages(&[0x5000, 0x8000], 0x4000, 4, 100) && batch.len() == 2);
    /// ```
    #[inline(always)]
    pub fn push_pages(&mut self, addrs: &[usize], base: usize, frames: u32, first: u32) -> bool {
        let places = &mut self.pfns[self.len..Self::CAPACITY][..addrs.len()];
        if !are_pages(addrs, base, frames) {
            return false;
        }
        places.iter_mut().zip(addrs).for_each(|(place, addr)| {
            place.write(first + (addr.wrapping_sub(base) >> PAGE_SHIFT) as u32);
        });
        self.len += addrs.len();
        true
    }

    /// Where a section writes numbers.
    #[inline]
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u32 {
        self.pfns.as_mut_ptr().cast()
    }
    /// Where a section reads the numbers in `range`. The padding behind the last number is readable, too.
    ///
    /// # Panics
    /// If `range` reaches past the last number.
    #[inline]
    pub(crate) fn as_ptr_at(&self, range: &core::ops::Range<usize>) -> *const u32 {
        let from = range.start;
        assert!(from <= range.end && range.end <= self.len);
        self.pfns[from..].as_ptr().cast()
    }
    /// Sets the length after a section wrote the first `len` numbers.
    ///
    /// # Safety
    /// The section wrote that many, and `len` is at most the capacity.
    #[inline]
    pub(crate) unsafe fn set_len(&mut self, len: usize) {
        debug_assert!(len <= Self::CAPACITY);
        self.len = len;
    }
}

#[cold]
#[inline(never)]
fn is_full(capacity: usize) -> ! {
    panic!("a batch of {capacity} frame numbers is full")
}

/// Numbers from a list, as frame numbers.
///
/// ```
/// use pagemill_core::Pfn;
/// assert_eq!(pagemill_os::as_pfns(&[7, 9]), [Pfn::new(7), Pfn::new(9)]);
/// ```
#[inline]
pub fn as_pfns(numbers: &[u32]) -> &[Pfn] {
    // SAFETY: a Pfn is a transparent u32, and each of them is valid.
    unsafe { core::slice::from_raw_parts(numbers.as_ptr().cast(), numbers.len()) }
}

#[cfg(test)]
mod tests {
    use super::Batch;

    #[test]
    fn bits_become_numbers_in_order() {
        let mut batch = Batch::new();
        batch.push_bits(128, 1 << 63 | 0b111);
        assert_eq!(batch.as_slice(), [128, 129, 130, 191]);
        batch.clear();
        batch.push_bits(0, !0);
        assert_eq!((batch.len(), batch.room(), batch.as_slice()[63]), (64, 0, 63));
    }
}
