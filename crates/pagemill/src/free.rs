//! The way back: a freed page goes on the list of the CPU that frees it. A full list passes pages on to a depot or the zone.
//!
//! Each function here finds the zone of an address (`registry.rs`), checks the frame's state (`zone/states.rs`), and
//! puts the frame on a list or gives it to the zone. `one.rs` frees one block; `many.rs` frees many, through the
//! collectors in `segment.rs`, `large.rs` and `blocks.rs`.
//!
//! # Invariants
//! - A block that a handle owned needs no check: the type ensures that it is freed once. A raw pointer must be that of
//!   a block that was made raw, with its order (C2.4). The constant `RAW` tells the two cases apart.
//! - A call that frees the last page of a zone without a handle may end the zone. So the call counts while it still has
//!   pages in hand, and touches nothing of the zone after it gave up the last one.
//!
//! Freeing pages waits for no lock: a signal handler may free them (C2.5).
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

/// Frees one page that a handle owned, by its address.
#[inline]
pub(crate) fn free_page(addr: usize) -> Result<(), Misuse> {
    if free_fast::<false>(addr) { Ok(()) } else { free_slow::<false>(addr, Order::ZERO) }
}

/// Frees a raw block by address and order, whichever allocator it belongs to. Misuse is detected here.
///
/// # Errors
/// [`Misuse`], which says what is wrong with the block. Nothing was changed in this case.
///
/// # Safety
/// The caller owns the block, got its address from [`Page::into_raw`](crate::Page::into_raw) or
/// [`Block::into_raw`](crate::Block::into_raw), and nothing uses it any more. Any other pointer is refused, unless its
/// block was handed out and made raw again since: then the call frees another owner's block.
///
/// ```
/// use pagemill::{Allocator, Gfp, Order, free_raw};
/// let page = Allocator::global().alloc_page(Gfp::KERNEL)?.into_raw();
/// // SAFETY: this code owns the page. The second call is deliberate misuse.
/// unsafe {
///     assert!(free_raw(page, Order::ZERO).is_ok());
///     let twice = free_raw(page, Order::ZERO).unwrap_err();
///     assert!(twice.to_string().ends_with("is free, or a handle has it"), "{twice}");
/// }
/// # Ok::<(), pagemill::Error>(())
/// ```
#[inline]
pub unsafe fn free_raw(ptr: *mut u8, order: Order) -> Result<(), Misuse> {
    free_one::<true>(ptr.addr(), order)
}

/// Makes a handle's block raw.
#[inline]
pub(crate) fn give_away(addr: usize, order: Order) {
    let Ok((zone, pfn)) = find(addr) else { return };
    if let Err(kind) = zone.give_away(pfn, order) {
        zone.refuse(misuse(kind, addr));
    }
}

/// Makes a raw block a handle's.
///
/// # Errors
/// [`Misuse`]: the block is not raw.
#[inline]
pub(crate) fn take_up(addr: usize, order: Order) -> Result<(), Misuse> {
    let (zone, pfn) = find(addr)?;
    zone.take_up(pfn, order, true).map_err(|kind| zone.refuse(misuse(kind, addr)))
}

/// Makes a handle's block raw, which belongs to the page pool with this number.
#[inline]
pub(crate) fn give_away_pooled(addr: usize, order: Order, pool: u32) {
    let Ok((zone, pfn)) = find(addr) else { return };
    if let Err(kind) = zone.give_away_pooled(pfn, order, pool) {
        zone.refuse(misuse(kind, addr));
    }
}

/// Makes such a block a handle's. Returns its order.
///
/// # Errors
/// [`Misuse`]: the block is not raw, or not that pool's.
#[inline]
pub(crate) fn take_up_pooled(addr: usize, pool: u32) -> Result<Order, Misuse> {
    let (zone, pfn) = find(addr)?;
    zone.take_up_pooled(pfn, pool).map_err(|kind| zone.refuse(misuse(kind, addr)))
}

/// Turns a handle's block into pages.
pub(crate) fn split(addr: usize, order: Order) {
    let Some((zone, pfn)) = registry::by_address(addr) else { return };
    if order == Order::ZERO {
        return;
    }
    let is_split = zone.split_block(pfn, order).and_then(|()| zone.buddy().split_block(pfn, order));
    if let Err(kind) = is_split {
        zone.refuse(misuse(kind, addr));
        return;
    }
    let stats = zone.stats_here();
    // From now on they count as pages.
    stats.block_pages_out.fetch_sub(u64::from(order.frames()), Relaxed);
    stats.direct_out.fetch_add(u64::from(order.frames()), Relaxed);
}

/// Frees the blocks behind `words` and empties their slots. Slots of refused blocks stay as they are, and `misused`
/// gets the first refusal. Returns the number of blocks freed.
#[inline(always)]
pub(crate) fn free_words(words: &mut [usize], misused: &mut Option<Misuse>) -> usize {
    free_any::<false>(words, None, misused)
}

/// The same; with an `order`, the words are raw pointers to blocks of that order.
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

/// Whether this may be the word of a page.
fn is_page(word: usize, order: Option<Order>) -> bool {
    word != 0 && word.is_multiple_of(PAGE_SIZE) && order.is_none_or(|order| order == Order::ZERO)
}

#[inline(never)]
fn free_many<const RAW: bool>(words: &mut [usize], order: Option<Order>, misused: &mut Option<Misuse>) -> usize {
    let is_batch = (2..=Batch::CAPACITY).contains(&words.len()) && order.is_none_or(|order| order == Order::ZERO);
    let freed = if is_batch { free_batch::<RAW>(words) } else { 0 };
    if freed == words.len() { freed } else { freed + free_slots::<RAW>(&mut words[freed..], order, misused) }
}

/// Frees words that are not a batch of pages of one zone.
#[inline(never)]
fn free_slots<const RAW: bool>(words: &mut [usize], order: Option<Order>, misused: &mut Option<Misuse>) -> usize {
    free_all::<RAW>(&mut Slots::new(words, order), misused)
}

/// Frees up to a batch of pages in one section, if all of them belong to the zone that this thread met last and that
/// zone only ever used one mobility. It stops at the first page that is not out. Returns the number of pages freed; 0
/// if the pages are of another zone.
#[inline(always)]
fn free_batch<const RAW: bool>(words: &mut [usize]) -> usize {
    let Some((zone, _)) = registry::recent(words[0]) else { return 0 };
    let (zone, zero) = (zone, zone.addr_of_pfn_zero());
    if zone.buddy().is_mixed() || !zone.has_pages(words) {
        return 0;
    }
    let taken = zone.mark_words_free::<RAW>(words);
    let Some(words) = words.get_mut(..taken).filter(|words| !words.is_empty()) else { return 0 };
    // Counted while pages are still in hand: see `Segment::end`.
    if taken > 1 {
        zone.lists().count_bulk(BulkCall::Free, taken);
    }
    if !zone.lists().push_words(Mobility::Unmovable, words, zero) {
        zone.overflow_words(words);
    }
    empty(words);
    taken
}

/// Frees `n` neighbouring blocks of `order` from `addr` on.
pub(crate) fn free_run(addr: usize, n: usize, order: Order) {
    // The hook is told of misuse; a run's drop cannot return it.
    free_all::<false>(&mut Neighbours { addr, end: addr + n * order.bytes(), order }, &mut None);
}

/// Frees a run of `n` neighbouring pages from `addr` on, past the lists: there they would be scattered, and no run could
/// have them before the lists are drained.
pub(crate) fn free_contig(addr: usize, n: usize) {
    match registry::by_address(addr) {
        Some((zone, first)) if zone.mark_run_free::<false>(first, n) => zone.give_run(first, n),
        _ => free_run(addr, n, Order::ZERO), // It finds the pages that are not out.
    }
}

/// Frees raw blocks by address, all of one order, as [`free_raw`] does for one. Empties the slots of the blocks that it
/// frees, and skips null slots. Returns the number of blocks freed.
///
/// # Errors
/// The number of blocks freed, and the first [`Misuse`]. The slots of refused blocks are unchanged.
///
/// # Safety
/// As for [`free_raw`], for each block. A block that two threads free at the same moment is freed once: one of the two
/// calls returns misuse, with the slot emptied.
///
/// ```
/// use pagemill::{Allocator, Gfp, Order, free_pages_bulk_raw};
/// let page = Allocator::global().alloc_page(Gfp::KERNEL)?.into_raw();
/// let mut slots = [page, std::ptr::null_mut(), page];
/// // SAFETY: this code owns the page. Listing it twice is deliberate misuse.
/// let (freed, misuse) = unsafe { free_pages_bulk_raw(&mut slots, Order::ZERO) }.unwrap_err();
/// assert_eq!((freed, slots), (1, [std::ptr::null_mut(), std::ptr::null_mut(), page]));
/// # let _ = misuse;
/// # Ok::<(), pagemill::Error>(())
/// ```
pub unsafe fn free_pages_bulk_raw(slots: &mut [*mut u8], order: Order) -> Result<usize, (usize, Misuse)> {
    // SAFETY: pointers and addresses have the same layout. Only 0 or an address that was in the slot before is written.
    let words = unsafe { core::slice::from_raw_parts_mut(slots.as_mut_ptr().cast::<usize>(), slots.len()) };
    let mut misused = None;
    let freed = free_any::<true>(words, Some(order), &mut misused);
    match misused {
        None => Ok(freed),
        Some(misuse) => Err((freed, misuse)),
    }
}
