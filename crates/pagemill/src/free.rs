//! The way back: a page goes on the list of the CPU that frees it; a full list passes some on
//! to a depot or the zone.
//!
//! What a handle owned needs no check: that it is freed once is what its type says. A raw pointer must be that of a block that
//! was made raw, with its order (C2.4). `RAW` tells the two apart.
mod blocks;
mod large;

pub(crate) use blocks::Blocks;
pub(crate) use large::Large;

use crate::misuse::{misuse, refuse_foreign};
use crate::registry;
use crate::word::{addr_of_word, order_of_word};
use crate::zone::Zone;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{ListPolicy, Misuse, MisuseKind, Mobility, Order, PAGE_SIZE, Pfn, step};
use pagemill_os::lists::BulkCall;
use pagemill_os::{Batch, empty, neighbours};

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

/// Frees one page by its address; false if it is no page that is out.
#[inline(always)]
fn free_fast<const RAW: bool>(addr: usize) -> bool {
    step!("free_fast");
    let Some((arena, pfn)) = registry::recent(addr) else { return free_other::<RAW>(addr) };
    if !arena.comes_back::<RAW>(pfn) {
        return false;
    }
    arena.put_back(pfn);
    true
}

/// The same for a page of another arena than the thread met last.
#[cold]
#[inline(never)]
fn free_other<const RAW: bool>(addr: usize) -> bool {
    let Some((arena, pfn)) = registry::by_address(addr) else { return false };
    let is_out = arena.comes_back::<RAW>(pfn);
    if is_out {
        arena.put_back(pfn);
    }
    is_out
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
    let addr = ptr.addr();
    if order == Order::ZERO && addr.is_multiple_of(PAGE_SIZE) && free_fast::<true>(addr) {
        return Ok(());
    }
    free_slow::<true>(addr, order)
}

/// What is not a page on its way to a list: blocks, and misuse.
#[cold]
#[inline(never)]
fn free_slow<const RAW: bool>(addr: usize, order: Order) -> Result<(), Misuse> {
    let (arena, pfn) = find(addr)?;
    let refused = |kind| arena.refuse(misuse(kind, addr));
    if RAW { arena.take_up(pfn, order, false) } else { arena.take_back_block(pfn, order) }.map_err(refused)?;
    if order == Order::ZERO {
        arena.put_back(pfn); // A raw block of order 0 that was looked at a moment too early.
        return Ok(());
    }
    arena.free_block(pfn, order).map_err(refused)
}

/// The arena and frame of a page's address; who asks is about to change what is there.
fn find(addr: usize) -> Result<(&'static Zone, u32), Misuse> {
    let Some((arena, pfn)) = registry::by_address(addr) else {
        return Err(refuse_foreign(misuse(MisuseKind::Foreign, addr)));
    };
    if !addr.is_multiple_of(PAGE_SIZE) {
        return Err(arena.refuse(misuse(MisuseKind::Unaligned, addr)));
    }
    Ok((arena, pfn))
}

/// A handle's block becomes a raw pointer.
#[inline]
pub(crate) fn give_away(addr: usize, order: Order) {
    let Ok((arena, pfn)) = find(addr) else { return };
    if let Err(kind) = arena.give_away(pfn, order) {
        arena.refuse(misuse(kind, addr));
    }
}

/// A raw block becomes a handle's.
///
/// # Errors
/// [`Misuse`]: it is not raw.
#[inline]
pub(crate) fn take_up(addr: usize, order: Order) -> Result<(), Misuse> {
    let (arena, pfn) = find(addr)?;
    arena.take_up(pfn, order, true).map_err(|kind| arena.refuse(misuse(kind, addr)))
}

/// Turns a handle's block into pages.
pub(crate) fn split(addr: usize, order: Order) {
    let Some((arena, pfn)) = registry::by_address(addr) else { return };
    if order == Order::ZERO {
        return;
    }
    let inner = arena;
    let is_split = arena.split_block(pfn, order).and_then(|()| inner.buddy.split_block(Pfn::new(pfn), order));
    if let Err(kind) = is_split {
        inner.refuse(misuse(kind, addr));
        return;
    }
    let stats = inner.stats_here();
    // From now on they count as pages.
    stats.block_pages_out.fetch_sub(u64::from(order.frames()), Relaxed);
    stats.direct_out.fetch_add(u64::from(order.frames()), Relaxed);
}

/// Frees the blocks behind `words` and empties their slots; those that are refused stay, and the first refusal is left
/// in `misused`. Returns how many were freed.
#[inline(always)]
pub(crate) fn free_words<const RAW: bool>(words: &mut [usize], misused: &mut Option<Misuse>) -> usize {
    match words {
        [word] => usize::from(free_slot::<RAW>(word, misused)),
        _ => free_many::<RAW>(words, misused),
    }
}

#[inline(never)]
fn free_many<const RAW: bool>(words: &mut [usize], misused: &mut Option<Misuse>) -> usize {
    let freed = if (2..=Batch::CAPACITY).contains(&words.len()) { free_batch::<RAW>(words) } else { 0 };
    if freed == words.len() { freed } else { freed + free_others::<RAW>(&mut words[freed..], misused) }
}

#[inline(always)]
fn free_slot<const RAW: bool>(word: &mut usize, misused: &mut Option<Misuse>) -> bool {
    if *word != 0 && word.is_multiple_of(PAGE_SIZE) && free_fast::<RAW>(*word) {
        *word = 0;
        return true;
    }
    free_slot_slow::<RAW>(word, misused)
}

#[cold]
#[inline(never)]
fn free_slot_slow<const RAW: bool>(word: &mut usize, misused: &mut Option<Misuse>) -> bool {
    if *word == 0 {
        return false;
    }
    match free_slow::<RAW>(addr_of_word(*word), order_of_word(*word)) {
        Ok(()) => *word = 0,
        Err(misuse) => *misused = misused.or(Some(misuse)),
    }
    *word == 0
}

/// Frees the pages of a batch at most, in one section, if all are of the arena that this thread met last, where only one mobility was
/// ever used: those up to the first that is not out. Returns how many those are; none if the pages are others.
#[inline(always)]
fn free_batch<const RAW: bool>(words: &mut [usize]) -> usize {
    let Some((arena, _)) = registry::recent(words[0]) else { return 0 };
    let (inner, zero) = (arena, arena.addr_of_zero());
    if inner.buddy.is_mixed() || !arena.has_pages(words) {
        return 0;
    }
    let taken = arena.words_come_back::<RAW>(words);
    let Some(words) = words.get_mut(..taken).filter(|words| !words.is_empty()) else { return 0 };
    // Counted while they are in hand: see `Segment::end`.
    if taken > 1 {
        inner.lists.count_bulk(BulkCall::Free, taken);
    }
    if !inner.lists.push_words(Mobility::Unmovable, words, zero) {
        inner.overflow_words(words);
    }
    empty(words);
    taken
}

/// Those that are no batch of pages of one arena.
#[inline(never)]
fn free_others<const RAW: bool>(words: &mut [usize], misused: &mut Option<Misuse>) -> usize {
    let (mut freed, mut at) = (0, 0);
    // How many the last segment had: where kinds alternate, tables for many cost more than they bring.
    let mut last = usize::MAX;
    while at < words.len() {
        if words[at] == 0 {
            at += 1;
        } else if !words[at].is_multiple_of(PAGE_SIZE) {
            let order = order_of_word(words[at]);
            let from = at;
            freed += blocks::return_blocks::<RAW>(words, &mut at, order, misused);
            if at == from {
                freed += usize::from(free_slot_slow::<RAW>(&mut words[at], misused));
                at += 1;
            }
        } else if words.len() - at > 1
            && let Some((arena, mobility)) = page_of(words[at])
        {
            let from = at;
            if words.len() - at > ListPolicy::LARGE && last >= Batch::CAPACITY {
                last = large::return_words::<RAW>(arena, mobility, words, &mut at, misused);
            } else {
                let mut segment = Segment::<RAW>::new(arena, mobility);
                at = segment.return_words(words, at);
                last = segment.end();
            }
            freed += last;
            if at == from {
                freed += usize::from(free_slot_slow::<RAW>(&mut words[at], misused));
                at += 1;
            }
        } else {
            freed += usize::from(free_slot::<RAW>(&mut words[at], misused));
            at += 1;
        }
    }
    freed
}

/// Frees `n` neighbouring blocks of `order` from `addr` on.
pub(crate) fn free_run(addr: usize, n: usize, order: Order) {
    let mut at = addr;
    let end = addr + n * order.bytes();
    if let Some(mut blocks) = Blocks::<false>::new(addr, order) {
        while at < end && blocks.give_at(at) {
            at += order.bytes();
        }
        blocks.end(&mut None); // A run has nobody to tell.
    }
    while at < end {
        let page = if order == Order::ZERO { page_of(at) } else { None };
        let next = match page {
            None => at,
            Some((arena, mobility)) if end - at > ListPolicy::LARGE * PAGE_SIZE => {
                large::return_run(arena, mobility, at, end)
            }
            Some((arena, mobility)) => {
                let mut segment = Segment::<false>::new(arena, mobility);
                let next = segment.return_run(at, end);
                segment.end();
                next
            }
        };
        at = if next > at {
            next
        } else {
            // What is refused is reported on its way; a run has nobody to tell.
            let _ = free_word(at | usize::from(order.get()));
            at + order.bytes()
        };
    }
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
    let mut freed = if order == Order::ZERO && (2..=Batch::CAPACITY).contains(&words.len()) {
        free_batch::<true>(words)
    } else {
        0
    };
    let words = &mut words[freed..];
    if order == Order::ZERO && words.iter().all(|addr| addr.is_multiple_of(PAGE_SIZE)) {
        freed += match words {
            [word] => usize::from(free_slot::<true>(word, &mut misused)),
            _ => free_others::<true>(words, &mut misused),
        };
    } else {
        let mut at = 0;
        while at < words.len() {
            if order > Order::ZERO && words[at] != 0 {
                freed += blocks::return_blocks::<true>(words, &mut at, order, &mut misused);
            }
            let Some(addr) = words.get_mut(at) else { break };
            at += 1;
            if *addr == 0 {
                continue;
            }
            let ptr = core::ptr::with_exposed_provenance_mut(*addr);
            // SAFETY: the caller's promise.
            match unsafe { free_raw(ptr, order) } {
                Ok(()) => (*addr, freed) = (0, freed + 1),
                Err(misuse) => misused = misused.or(Some(misuse)),
            }
        }
    }
    match misused {
        None => Ok(freed),
        Some(misuse) => Err((freed, misuse)),
    }
}

/// How many of these words, at most `most`, are those of neighbouring pages, from the first on.
#[inline(always)]
fn address_run(words: &[usize], most: usize) -> usize {
    let words = &words[..words.len().min(most)];
    if words.len() < 2 || words[1] != words[0].wrapping_add(PAGE_SIZE) {
        return words.len().min(1); // In no order, as a rule: seen before 64 words are compared.
    }
    neighbours(words)
}

/// The arena and mobility of a page, by its word; none for anything else. Whether it is out is still to be seen.
#[inline]
pub(crate) fn page_of(word: usize) -> Option<(&'static Zone, Mobility)> {
    if !word.is_multiple_of(PAGE_SIZE) {
        return None;
    }
    let (arena, pfn) = registry::by_address(word)?;
    Some((arena, arena.mobility_of(pfn)))
}

/// Pages of one arena and mobility on their way back, collected to batches for the list. More than that is for are [`Large`].
pub(crate) struct Segment<const RAW: bool> {
    arena: &'static Zone,
    mobility: Mobility,
    /// Only one mobility was ever used in the arena: what is in it is of this kind.
    is_of_one_kind: bool,
    pages: usize,
    is_counted: bool,
    batch: Batch,
}

impl<const RAW: bool> Segment<RAW> {
    /// Of pages like the one that [`page_of`] found.
    #[inline(always)]
    pub(crate) fn new(arena: &'static Zone, mobility: Mobility) -> Self {
        let is_of_one_kind = !arena.buddy.is_mixed();
        Self { arena, mobility, is_of_one_kind, pages: 0, is_counted: false, batch: Batch::new() }
    }

    /// Takes pages from `words[at..]` and empties their slots, up to the first that is not of this kind. Returns
    /// where that is.
    #[inline(always)]
    fn return_words(&mut self, words: &mut [usize], mut at: usize) -> usize {
        while at < words.len() {
            // A full batch is passed on when one more page is seen to be of this kind, not before: see `end`.
            let n = (words.len() - at).min(self.batch.room()).max(1);
            let chunk = &mut words[at..at + n];
            let taken = if self.batch.room() > 0 && self.is_of_one_kind && self.arena.push_pages(chunk, &mut self.batch)
            {
                let taken = self.keep_sound(n);
                empty(&mut chunk[..taken]);
                taken
            } else {
                self.take_each(chunk)
            };
            at += taken;
            if taken < n {
                break;
            }
        }
        at
    }

    /// Of the `n` pages that were put in the batch last, keeps those up to the first that is not out. Returns how many.
    #[inline(always)]
    fn keep_sound(&mut self, n: usize) -> usize {
        let before = self.batch.len() - n;
        let sound = self.arena.frames_come_back::<RAW>(&self.batch.as_slice()[before..]);
        self.batch.truncate(before + sound);
        sound
    }

    /// One by one, up to the first that is not of this kind; empty slots are passed over.
    fn take_each(&mut self, words: &mut [usize]) -> usize {
        for (i, word) in words.iter_mut().enumerate() {
            if *word != 0 {
                let is_here = word.is_multiple_of(PAGE_SIZE) && self.arena.contains(*word);
                if !is_here || !self.give(self.arena.pfn_of(*word)) {
                    return i;
                }
                *word = 0;
            }
        }
        words.len()
    }

    /// Takes pages from `addr` up to `end`, up to the first that is not of this kind. Returns where that is.
    #[inline]
    fn return_run(&mut self, mut addr: usize, end: usize) -> usize {
        while addr < end && self.arena.contains(addr) && self.give(self.arena.pfn_of(addr)) {
            addr += PAGE_SIZE;
        }
        addr
    }

    /// Passes the batch on to the list, or to the zone.
    #[inline]
    fn flush(&mut self) {
        let inner = self.arena;
        self.pages += self.batch.len();
        if !inner.lists.push_n(self.mobility, &self.batch, 0..self.batch.len()) {
            inner.overflow(self.mobility, &self.batch);
        }
        self.batch.clear();
    }

    /// Counts the call.
    #[inline]
    fn count(&mut self) {
        let pages = self.pages + self.batch.len();
        if pages > 1 && !core::mem::replace(&mut self.is_counted, true) {
            self.arena.lists.count_bulk(BulkCall::Free, pages);
        }
    }

    /// Counts the call and passes on what is left. Those may be the allocator's last pages: nothing of it is touched
    /// after that, and until then some are in hand. Returns how many pages there were.
    #[inline]
    pub(crate) fn end(&mut self) -> usize {
        let pages = self.pages + self.batch.len();
        self.count();
        if !self.batch.is_empty() {
            self.flush();
        }
        pages
    }
}

/// Collects frames of one arena on their way back.
pub(crate) trait Collect {
    /// Takes the page or block that begins at this frame, if it is of this kind and out.
    fn give(&mut self, pfn: u32) -> bool;
}

impl<const RAW: bool> Collect for Segment<RAW> {
    #[inline]
    fn give(&mut self, pfn: u32) -> bool {
        let is_ours = self.is_of_one_kind || self.arena.buddy.mobility_of(Pfn::new(pfn)) == self.mobility;
        if !is_ours || !self.arena.comes_back::<RAW>(pfn) {
            return false;
        }
        if self.batch.room() == 0 {
            self.flush();
        }
        self.batch.push(pfn);
        true
    }
}
