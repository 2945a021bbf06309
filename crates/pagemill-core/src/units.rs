//! Units: each kind of number has a type of its own, so that they cannot be mixed up (style 2).
use crate::error::Invalid;
use core::fmt;

/// log2 of the page size.
pub const PAGE_SHIFT: u32 = 12;
/// Bytes in a page.
pub const PAGE_SIZE: usize = 1 << PAGE_SHIFT;
/// Frames in a pageblock: 2 MiB.
pub const PAGEBLOCK_FRAMES: u32 = 1 << Order::PAGEBLOCK.0;

/// A page frame number: the slot of one page. It is process-wide in `pagemill`; in a kernel its meaning is the caller's.
///
/// ```
/// use pagemill_core::Pfn;
/// assert_eq!(Pfn::new(7).offset(3).as_u32(), 10);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct Pfn(u32);

impl Pfn {
    /// The frame numbered `n`.
    #[inline]
    pub const fn new(n: u32) -> Self {
        Self(n)
    }
    /// The number.
    #[inline]
    pub const fn as_u32(self) -> u32 {
        self.0
    }
    /// The number, as an index.
    #[inline]
    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }
    /// How many frames this one lies behind `first`; a frame before `first` wraps round to more than any zone has.
    #[inline]
    pub const fn since(self, first: Self) -> u32 {
        self.0.wrapping_sub(first.0)
    }
    /// This frame and those behind it, `n` in all.
    #[inline]
    pub fn run(self, n: u32) -> impl Iterator<Item = Self> + Clone {
        (self.0..self.0 + n).map(Self)
    }
    /// The frame `by` frames on.
    #[inline]
    #[must_use]
    pub const fn offset(self, by: u32) -> Self {
        Self(self.0 + by)
    }
    /// Whether this is the first frame of a block of this order.
    #[inline]
    pub const fn is_aligned_to(self, order: Order) -> bool {
        self.0 & (order.frames() - 1) == 0
    }
}

impl fmt::Display for Pfn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pfn {:#x}", self.0)
    }
}

/// Words of 64 frames that a pageblock has.
pub(crate) const BLOCK_WORDS: usize = PAGEBLOCK_FRAMES as usize / 64;

/// One of a buddy's pageblocks, the first of which is 0.
///
/// ```
/// use pagemill_core::PageblockId;
/// assert_eq!(PageblockId::FIRST.offset(3).as_usize(), 3);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(transparent)]
pub struct PageblockId(u32);

impl PageblockId {
    /// The first pageblock.
    pub const FIRST: Self = Self(0);

    /// The pageblock numbered `n`.
    #[inline]
    pub const fn new(n: usize) -> Self {
        Self(n as u32)
    }
    /// The number.
    #[inline]
    pub const fn as_u32(self) -> u32 {
        self.0
    }
    /// The number, as an index.
    #[inline]
    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }
    /// The pageblock `by` pageblocks on.
    #[inline]
    #[must_use]
    pub const fn offset(self, by: usize) -> Self {
        Self(self.0 + by as u32)
    }
    /// This pageblock and those behind it, `n` in all.
    pub(crate) fn run(self, n: usize) -> impl Iterator<Item = Self> {
        (self.0..self.0 + n as u32).map(Self)
    }
    #[inline]
    pub(crate) const fn first_word(self) -> WordId {
        WordId(self.0 * BLOCK_WORDS as u32)
    }
    /// The value for this pageblock in a word that may name one. 0 names none.
    #[inline]
    pub(crate) const fn as_entry(self) -> u32 {
        self.0 + 1
    }
    /// The pageblock that such a word names.
    #[inline]
    pub(crate) fn from_entry(entry: u32) -> Option<Self> {
        entry.checked_sub(1).map(Self)
    }
}

impl fmt::Display for PageblockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One of a buddy's words, each of which has the bits of 64 frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub(crate) struct WordId(u32);

impl WordId {
    #[inline]
    pub(crate) const fn new(n: u32) -> Self {
        Self(n)
    }
    #[inline]
    pub(crate) const fn as_u32(self) -> u32 {
        self.0
    }
    #[inline]
    pub(crate) const fn as_usize(self) -> usize {
        self.0 as usize
    }
    #[inline]
    pub(crate) const fn offset(self, by: usize) -> Self {
        Self(self.0 + by as u32)
    }
    #[inline]
    pub(crate) const fn pageblock(self) -> PageblockId {
        PageblockId(self.0 / BLOCK_WORDS as u32)
    }
}

/// The size of a block: 2^order contiguous pages, aligned to their size.
///
/// ```
/// use pagemill_core::Order;
/// assert_eq!(Order::new(3).unwrap().pages().get(), 8);
/// assert!(Order::new(31).is_err());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct Order(u8);

impl Order {
    /// One page.
    pub const ZERO: Self = Self(0);
    /// A whole pageblock, 2 MiB.
    pub const PAGEBLOCK: Self = Self(9);
    /// The largest block, 1 GiB.
    pub const MAX: Self = Self(18);

    /// The order `order`.
    ///
    /// # Errors
    /// [`Invalid::OrderTooLarge`] above [`Order::MAX`].
    #[inline]
    pub const fn new(order: u8) -> Result<Self, Invalid> {
        if order <= Self::MAX.0 { Ok(Self(order)) } else { Err(Invalid::OrderTooLarge { order }) }
    }
    /// As a number, 0 to 18.
    #[inline]
    pub const fn get(self) -> u8 {
        self.0
    }
    /// How many pages a block of this order has.
    #[inline]
    pub const fn pages(self) -> PageCount {
        PageCount(1 << self.0)
    }
    /// How many frames a block of this order has, for arithmetic with frame numbers.
    #[inline]
    pub const fn frames(self) -> u32 {
        1 << self.0
    }
    /// How many bytes a block of this order has.
    #[inline]
    pub const fn bytes(self) -> usize {
        PAGE_SIZE << self.0
    }
}

/// A number of pages.
///
/// ```
/// use pagemill_core::PageCount;
/// assert_eq!(PageCount::new(2).bytes(), 8192);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(transparent)]
pub struct PageCount(usize);

impl PageCount {
    /// `n` pages.
    #[inline]
    pub const fn new(n: usize) -> Self {
        Self(n)
    }
    /// The number.
    #[inline]
    pub const fn get(self) -> usize {
        self.0
    }
    /// Their size in bytes; saturates.
    #[inline]
    pub const fn bytes(self) -> usize {
        self.0.saturating_mul(PAGE_SIZE)
    }
}

impl fmt::Display for PageCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages", self.0)
    }
}

/// A CPU's number, as the operating system counts them.
///
/// ```
/// assert_eq!(pagemill_core::CpuId::new(3).get(), 3);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct CpuId(u32);

impl CpuId {
    /// CPU number `n`.
    #[inline]
    pub const fn new(n: u32) -> Self {
        Self(n)
    }
    /// The number.
    #[inline]
    pub const fn get(self) -> usize {
        self.0 as usize
    }
}
