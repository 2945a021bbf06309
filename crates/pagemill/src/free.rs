//! The way back: a page goes on the list of the CPU that frees it; a full list passes some on
//! to a depot or the zone.
//!
//! What a handle owned needs no check: that it is freed once is what its type says. A raw pointer must be that of a block that
//! was made raw, with its order (C2.4). `RAW` tells the two apart.
mod batch;
mod blocks;
mod large;
mod many;
mod one;
mod segment;

pub(crate) use batch::FreeBatch;
pub(crate) use many::{Source, free_all};

use crate::misuse::misuse;
use crate::registry;
use crate::word::{addr_of_word, order_of_word};
use core::sync::atomic::Ordering::Relaxed;
use many::{Neighbours, Slots};
use one::{find, free_fast, free_one, free_slow};
use pagemill_core::{Misuse, Mobility, Order, PAGE_SIZE};
use pagemill_os::lists::BulkCall;
use pagemill_os::{Batch, empty};

/// Frees one block by its handle's word.
#[inline]
pub(crate) fn free_word(word: usize) -> Result<(), Misuse> {
    if word.is_multiple_of(PAGE_SIZE) {
        free_page(word)
    } else {
        free_slow::<false>(addr_of_word(word), order_of_word(word))
    }
}

/// Frees one page, which a handle had, by its address.
#[inline]
pub(crate) fn free_page(addr: usize) -> Result<(), Misuse> {
    if free_fast::<false>(addr) { Ok(()) } else { free_slow::<false>(addr, Order::ZERO) }
}

/// Frees a block that is a raw pointer by address and order, wherever it came from; the way for C, and for misuse.
///
/// # Errors
/// [`Misuse`], saying what is wrong with the block; nothing was changed then.
///
/// # Safety
/// The caller owns the block, as [`Page::into_raw`](crate::Page::into_raw) gave it away, and nobody uses it any more. A
/// pointer for which that does not hold is refused, as long as the block has not become a raw pointer again; after that it frees
/// somebody else's block.
///
/// ```
/// use pagemill::{Allocator, Gfp, Order, free_raw};
/// let page = Allocator::global().alloc_page(Gfp::KERNEL)?.into_raw();
/// // SAFETY: the page is ours; the second call is misuse, on purpose.
/// unsafe {
///     assert!(free_raw(page, Order::ZERO).is_ok());
///     let twice = free_raw(page, Order::ZERO).unwrap_err();
///     assert!(twice.to_string().ends_with("is free, or a handle has it"), "{twice}");
/// }
/// # Ok::<(), pagemill::Error>(())
/// ```
pub unsafe fn free_raw(ptr: *mut u8, order: Order) -> Result<(), Misuse> {
    free_one::<true>(ptr.addr(), order)
}

/// A handle's block becomes a raw pointer.
#[inline]
pub(crate) fn give_away(addr: usize, order: Order) {
    let Ok((zone, pfn)) = find(addr) else { return };
    if let Err(kind) = zone.give_away(pfn, order) {
        zone.refuse(misuse(kind, addr));
    }
}

/// A raw block becomes a handle's.
///
/// # Errors
/// [`Misuse`]: it is not raw.
#[inline]
pub(crate) fn take_up(addr: usize, order: Order) -> Result<(), Misuse> {
    let (zone, pfn) = find(addr)?;
    zone.take_up(pfn, order, true).map_err(|kind| zone.refuse(misuse(kind, addr)))
}

/// Turns a handle's block into pages.
pub(crate) fn split(addr: usize, order: Order) {
    let Some((zone, pfn)) = registry::by_address(addr) else { return };
    if order == Order::ZERO {
        return;
    }
    let is_split = zone.split_block(pfn, order).and_then(|()| zone.buddy.split_block(pfn, order));
    if let Err(kind) = is_split {
        zone.refuse(misuse(kind, addr));
        return;
    }
    let stats = zone.stats_here();
    // From now on they count as pages.
    stats.block_pages_out.fetch_sub(u64::from(order.frames()), Relaxed);
    stats.direct_out.fetch_add(u64::from(order.frames()), Relaxed);
}

/// Frees the blocks behind `words` and empties their slots; those that are refused stay, and the first refusal is left
/// in `misused`. Returns how many were freed.
#[inline(always)]
pub(crate) fn free_words(words: &mut [usize], misused: &mut Option<Misuse>) -> usize {
    free_any::<false>(words, None, misused)
}

/// The same with raw pointers, whose order is this.
#[inline(always)]
fn free_any<const RAW: bool>(words: &mut [usize], order: Option<Order>, misused: &mut Option<Misuse>) -> usize {
    match words {
        [word] if is_page(*word, order) && free_fast::<RAW>(*word) => {
            *word = 0;
            1
        }
        _ => free_many::<RAW>(words, order, misused),
    }
}

/// May this be the word of a page?
fn is_page(word: usize, order: Option<Order>) -> bool {
    word != 0 && word.is_multiple_of(PAGE_SIZE) && order.is_none_or(|order| order == Order::ZERO)
}

#[inline(never)]
fn free_many<const RAW: bool>(words: &mut [usize], order: Option<Order>, misused: &mut Option<Misuse>) -> usize {
    let is_batch = (2..=Batch::CAPACITY).contains(&words.len()) && order.is_none_or(|order| order == Order::ZERO);
    let freed = if is_batch { free_batch::<RAW>(words) } else { 0 };
    if freed == words.len() { freed } else { freed + free_slots::<RAW>(&mut words[freed..], order, misused) }
}

/// Those that are no batch of pages of one zone.
#[inline(never)]
fn free_slots<const RAW: bool>(words: &mut [usize], order: Option<Order>, misused: &mut Option<Misuse>) -> usize {
    free_all::<RAW>(&mut Slots::new(words, order), misused)
}

/// Frees the pages of a batch at most, in one section, if all are of the arena that this thread met last, where only one mobility was
/// ever used: those up to the first that is not out. Returns how many those are; none if the pages are others.
#[inline(always)]
fn free_batch<const RAW: bool>(words: &mut [usize]) -> usize {
    let Some((zone, _)) = registry::recent(words[0]) else { return 0 };
    let (zone, zero) = (zone, zone.addr_of_zero());
    if zone.buddy.is_mixed() || !zone.has_pages(words) {
        return 0;
    }
    let taken = zone.words_come_back::<RAW>(words);
    let Some(words) = words.get_mut(..taken).filter(|words| !words.is_empty()) else { return 0 };
    // Counted while they are in hand: see `Segment::end`.
    if taken > 1 {
        zone.lists.count_bulk(BulkCall::Free, taken);
    }
    if !zone.lists.push_words(Mobility::Unmovable, words, zero) {
        zone.overflow_words(words);
    }
    empty(words);
    taken
}

/// Frees `n` neighbouring blocks of `order` from `addr` on.
pub(crate) fn free_run(addr: usize, n: usize, order: Order) {
    // What is refused is reported on its way; a run has nobody to tell.
    free_all::<false>(&mut Neighbours { addr, end: addr + n * order.bytes(), order }, &mut None);
}

/// Frees blocks by address, all of one order, as [`free_raw`] does one; empties the slots of those that it takes.
/// Null slots are passed over. Returns how many it freed.
///
/// # Errors
/// The number freed and the first [`Misuse`]; the slots of all that were refused are as they were.
///
/// # Safety
/// As [`free_raw`], for each. A block that somebody else frees at the same moment is freed once: one of the two is told of misuse, with
/// the slot empty.
///
/// ```
/// use pagemill::{Allocator, Gfp, Order, free_pages_bulk_raw};
/// let page = Allocator::global().alloc_page(Gfp::KERNEL)?.into_raw();
/// let mut slots = [page, std::ptr::null_mut(), page];
/// // SAFETY: the page is ours; that it stands here twice is misuse, on purpose.
/// let (freed, misuse) = unsafe { free_pages_bulk_raw(&mut slots, Order::ZERO) }.unwrap_err();
/// assert_eq!((freed, slots), (1, [std::ptr::null_mut(), std::ptr::null_mut(), page]));
/// # let _ = misuse;
/// # Ok::<(), pagemill::Error>(())
/// ```
pub unsafe fn free_pages_bulk_raw(slots: &mut [*mut u8], order: Order) -> Result<usize, (usize, Misuse)> {
    // SAFETY: pointers and addresses have one layout; an address that is written back is one that was there, or 0.
    let words = unsafe { core::slice::from_raw_parts_mut(slots.as_mut_ptr().cast::<usize>(), slots.len()) };
    let mut misused = None;
    let freed = free_any::<true>(words, Some(order), &mut misused);
    match misused {
        None => Ok(freed),
        Some(misuse) => Err((freed, misuse)),
    }
}
