//! The way back: a block is checked against its state, marked as free, and put on the list of the CPU that frees it;
//! a full list passes it on to the zone.
mod large;

pub(crate) use large::Large;

use crate::allocator::Inner;
use crate::arena::{Arena, GROUP};
use crate::handle::{addr_of_word, order_of_word};
use crate::misuse::{misuse, refuse_foreign};
use crate::registry;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{FrameState, Giving, ListPolicy, Misuse, MisuseKind, Mobility, Order, PAGE_SIZE, Pfn, step};
use pagemill_sys::lists::BulkCall;
use pagemill_sys::{Batch, neighbours};

/// Frees one block by its handle's word.
#[inline]
pub(crate) fn free_word(word: usize) -> Result<(), Misuse> {
    if word.is_multiple_of(PAGE_SIZE) { free_page(word) } else { free_slow(addr_of_word(word), order_of_word(word)) }
}

/// Frees one page by its address.
#[inline]
pub(crate) fn free_page(addr: usize) -> Result<(), Misuse> {
    if free_fast(addr) { Ok(()) } else { free_slow(addr, Order::ZERO) }
}

/// Frees one page by its address; false if it is no page that is handed out.
#[inline]
fn free_fast(addr: usize) -> bool {
    step!("free_fast");
    let Some((arena, pfn)) = registry::recent(addr) else { return free_other(addr) };
    // The usual mobility by a branch, so that the processor goes on with the list before it has the state.
    if !arena.take_back(pfn, Mobility::Unmovable) {
        return free_other(addr);
    }
    let inner = arena.inner();
    if !inner.lists.push(Mobility::Unmovable, pfn) {
        inner.overflow_one(Mobility::Unmovable, pfn);
    }
    true
}

/// The same for a page of another arena than the thread met last, or of another mobility.
#[cold]
#[inline(never)]
fn free_other(addr: usize) -> bool {
    let Some((arena, pfn)) = registry::by_address(addr) else { return false };
    let Some(mobility) = arena.take_back_page(pfn) else { return false };
    let inner = arena.inner();
    if !inner.lists.push(mobility, pfn) {
        inner.overflow_one(mobility, pfn);
    }
    true
}

/// Frees by address and order, wherever the block came from; the way for C, and for misuse.
///
/// # Errors
/// [`Misuse`], saying what is wrong with the block; nothing was changed then.
///
/// # Safety
/// The caller owns the block, and nobody uses it any more. A pointer for which that does not hold is refused as long
/// as the block has not been handed out again; after that it frees somebody else's block.
///
/// ```
/// use pagemill::{Allocator, Gfp, Order, free_raw};
/// let page = Allocator::global().alloc_page(Gfp::KERNEL)?.into_raw();
/// // SAFETY: the page is ours; the second call is misuse, on purpose, and nobody allocated in between.
/// unsafe {
///     assert!(free_raw(page, Order::ZERO).is_ok());
///     let twice = free_raw(page, Order::ZERO).unwrap_err();
///     assert!(twice.to_string().ends_with("is free already"), "{twice}");
/// }
/// # Ok::<(), pagemill::Error>(())
/// ```
pub unsafe fn free_raw(ptr: *mut u8, order: Order) -> Result<(), Misuse> {
    let addr = ptr.addr();
    if addr.is_multiple_of(PAGE_SIZE) { free_word(addr | usize::from(order.get())) } else { free_slow(addr, order) }
}

/// What is not a page on its way to a list: blocks, and misuse.
#[cold]
#[inline(never)]
fn free_slow(addr: usize, order: Order) -> Result<(), Misuse> {
    let Some((arena, pfn)) = registry::by_address(addr) else {
        return Err(refuse_foreign(misuse(MisuseKind::Foreign, addr)));
    };
    let inner = arena.inner();
    inner.check_generation();
    let refused = |kind| inner.refuse(misuse(kind, addr));
    if !addr.is_multiple_of(PAGE_SIZE) {
        return Err(refused(MisuseKind::Unaligned));
    }
    check_block(arena, pfn, order).map_err(refused)?;
    arena.mark_block(pfn, order, FrameState::FREE);
    let stats = inner.stats_here();
    stats.blocks_in.fetch_add(1, Relaxed);
    stats.block_pages_in.fetch_add(u64::from(order.frames()), Relaxed);
    let waits = inner.nodes.waits;
    inner.nodes.claim_freed(inner, || order.frames() as usize);
    let freed = inner.zone.free_block(Pfn::new(pfn), order);
    waits.note_memory();
    match freed {
        Ok(is_complete) => {
            // Nothing of it is looked at from here on.
            if is_complete {
                registry::come_home(arena);
            }
            Ok(())
        }
        Err(kind) => {
            // Somebody else freed it at the same moment, and has counted it.
            stats.blocks_in.fetch_sub(1, Relaxed);
            stats.block_pages_in.fetch_sub(u64::from(order.frames()), Relaxed);
            Err(refused(kind))
        }
    }
}

/// Is this a block of this order that is handed out?
fn check_block(arena: &Arena, pfn: u32, order: Order) -> Result<(), MisuseKind> {
    if cfg!(feature = "detection-off") {
        return Ok(());
    }
    let state = arena.state(pfn);
    match state.order() {
        Some(handed_out) if handed_out == order => Ok(()),
        Some(handed_out) => Err(MisuseKind::WrongOrder { handed_out: handed_out.get(), freed: order.get() }),
        None if state == FrameState::INSIDE => Err(MisuseKind::Inside),
        None if state == FrameState::QUARANTINED => Err(MisuseKind::Quarantined),
        // It is free; and nobody can have had it before, unless some went back to the system meanwhile.
        None if state == FrameState::FRESH && !arena.has_given_back.load(Relaxed) => Err(MisuseKind::Foreign),
        None => Err(MisuseKind::DoubleFree),
    }
}

/// Turns a block that its caller owns into pages.
pub(crate) fn split(addr: usize, order: Order) {
    let Some((arena, pfn)) = registry::by_address(addr) else { return };
    if order == Order::ZERO {
        return;
    }
    let inner = arena.inner();
    inner.check_generation();
    let mobility = arena.state(pfn).mobility();
    let is_split = check_block(arena, pfn, order).and_then(|()| inner.zone.split_block(Pfn::new(pfn), order, mobility));
    if let Err(kind) = is_split {
        inner.refuse(misuse(kind, addr));
        return;
    }
    arena.mark_block(pfn, order, FrameState::handed_out(Order::ZERO, mobility));
    let stats = inner.stats_here();
    // From now on they count as pages.
    stats.block_pages_out.fetch_sub(u64::from(order.frames()), Relaxed);
    stats.direct_out.fetch_add(u64::from(order.frames()), Relaxed);
}

/// Frees the blocks behind `words` and empties their slots; those that are refused stay, and the first refusal is left
/// in `misused`. Returns how many were freed.
#[inline(always)]
pub(crate) fn free_words(words: &mut [usize], misused: &mut Option<Misuse>) -> usize {
    match words {
        [word] => usize::from(free_slot(word, misused)),
        _ => free_many(words, misused),
    }
}

#[inline(always)]
fn free_slot(word: &mut usize, misused: &mut Option<Misuse>) -> bool {
    if *word != 0 && word.is_multiple_of(PAGE_SIZE) && free_fast(*word) {
        *word = 0;
        return true;
    }
    free_slot_slow(word, misused)
}

#[cold]
#[inline(never)]
fn free_slot_slow(word: &mut usize, misused: &mut Option<Misuse>) -> bool {
    if *word == 0 {
        return false;
    }
    match free_word(*word) {
        Ok(()) => *word = 0,
        Err(misuse) => *misused = misused.or(Some(misuse)),
    }
    *word == 0
}

/// Frees `n` neighbouring pages from `addr` on, at most a batch's worth, if they are of the usual kind: in the arena that
/// this thread met last, unmovable, each handed out as a page.
#[inline]
pub(crate) fn free_one_run(addr: usize, n: usize) -> bool {
    if n > Batch::CAPACITY || !addr.is_multiple_of(PAGE_SIZE) {
        return false;
    }
    let Some((arena, first)) = registry::recent(addr) else { return false };
    if !arena.contains(addr + (n - 1) * PAGE_SIZE) || !arena.take_back_run(first, n, Mobility::Unmovable) {
        return false;
    }
    let inner = arena.inner();
    // Counted while they are in hand: see `Segment::end`.
    inner.lists.count_bulk(BulkCall::Free, n);
    if !inner.lists.push_run(Mobility::Unmovable, first, n) {
        inner.overflow_run(first, n);
    }
    true
}

fn free_many(words: &mut [usize], misused: &mut Option<Misuse>) -> usize {
    let n = words.len();
    if (2..=Batch::CAPACITY).contains(&n) && address_run(words, n) == n && free_one_run(words[0], n) {
        empty(words);
        return n;
    }
    let (mut at, mut freed) = (0, 0);
    // How many the last segment had: where kinds alternate, tables for many cost more than they bring.
    let mut last = usize::MAX;
    while at < words.len() {
        if words[at] == 0 {
            at += 1;
        } else if words.len() - at > 1
            && let Some((arena, mobility)) = page_of(words[at])
        {
            if words.len() - at > ListPolicy::LARGE && last >= Batch::CAPACITY {
                last = large::return_words(arena, mobility, words, &mut at);
            } else {
                let mut segment = Segment::new(arena, mobility);
                at = segment.return_words(words, at);
                last = segment.end();
            }
            freed += last;
        } else {
            freed += usize::from(free_slot(&mut words[at], misused));
            at += 1;
        }
    }
    freed
}

/// Completes what goes to the zone, and wakes requests that wait for it. Those may be the allocator's last pages: nothing of it
/// is touched afterwards but its [waits](crate::nodes::MemoryWaits), and for misuse. If no handle is left either, the arena ends.
pub(crate) fn finish<const N: usize>(inner: &Inner, giving: &mut Giving<'_, '_, N>) {
    let (arena, waits) = (inner.arena, inner.nodes.waits);
    inner.nodes.claim_freed(inner, || giving.frames());
    let given = giving.finish();
    if given.doubles > 0 {
        inner.note_doubles(given);
    }
    waits.note_memory();
    if given.is_complete {
        registry::come_home(arena);
    }
}

/// Frees `n` neighbouring blocks of `order` from `addr` on.
pub(crate) fn free_run(addr: usize, n: usize, order: Order) {
    if order == Order::ZERO && n > 1 && free_one_run(addr, n) {
        return;
    }
    let mut at = addr;
    let end = addr + n * order.bytes();
    while at < end {
        let page = if order == Order::ZERO { page_of(at) } else { None };
        at = match page {
            Some((arena, mobility)) if end - at > ListPolicy::LARGE * PAGE_SIZE => {
                large::return_run(arena, mobility, at, end)
            }
            Some((arena, mobility)) => {
                let mut segment = Segment::new(arena, mobility);
                let next = segment.return_run(at, end);
                segment.end();
                next
            }
            None => {
                // What is refused is reported on its way; a run has nobody to tell.
                let _ = free_word(at | usize::from(order.get()));
                at + order.bytes()
            }
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
/// As [`free_raw`], for each.
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
    let freed = if order == Order::ZERO && words.iter().all(|addr| addr.is_multiple_of(PAGE_SIZE)) {
        free_words(words, &mut misused)
    } else {
        let mut freed = 0;
        for addr in words.iter_mut().filter(|addr| **addr != 0) {
            let ptr = core::ptr::with_exposed_provenance_mut(*addr);
            // SAFETY: the caller's promise.
            match unsafe { free_raw(ptr, order) } {
                Ok(()) => (*addr, freed) = (0, freed + 1),
                Err(misuse) => misused = misused.or(Some(misuse)),
            }
        }
        freed
    };
    match misused {
        None => Ok(freed),
        Some(misuse) => Err((freed, misuse)),
    }
}

/// Empties slots: a few by a loop, since a call of `memset`, which the compiler makes of a value that it knows, costs more.
#[inline]
fn empty(words: &mut [usize]) {
    if words.len() >= 2 * GROUP {
        return words.fill(0);
    }
    let nothing = core::hint::black_box(0);
    words.iter_mut().for_each(|word| *word = nothing);
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

/// The arena and mobility of a page that is handed out, by its word; none for anything else.
#[inline]
pub(crate) fn page_of(word: usize) -> Option<(&'static Arena, Mobility)> {
    if !word.is_multiple_of(PAGE_SIZE) {
        return None;
    }
    let (arena, pfn) = registry::by_address(word)?;
    if cfg!(feature = "detection-off") {
        return Some((arena, Mobility::Unmovable));
    }
    Some((arena, arena.page_mobility(pfn)?))
}

/// Pages of one arena and mobility on their way back, collected to batches for the list. More than that is for are [`Large`].
pub(crate) struct Segment {
    arena: &'static Arena,
    mobility: Mobility,
    pages: usize,
    is_counted: bool,
    batch: Batch,
}

impl Segment {
    /// Of pages like the one that [`page_of`] found.
    #[inline(always)]
    pub(crate) fn new(arena: &'static Arena, mobility: Mobility) -> Self {
        Self { arena, mobility, pages: 0, is_counted: false, batch: Batch::new() }
    }

    /// Takes pages from `words[at..]` and empties their slots, up to the first that is not of this kind. Returns
    /// where that is.
    #[inline]
    fn return_words(&mut self, words: &mut [usize], mut at: usize) -> usize {
        while at < words.len() {
            let n = address_run(&words[at..], Batch::CAPACITY);
            if n > 1 && self.give_run_at(words[at], n, at + n == words.len()) {
                empty(&mut words[at..at + n]);
                at += n;
                continue;
            }
            // Pages that are not neighbours, or not all of this kind.
            for word in &mut words[at..at + n.max(1)] {
                if *word != 0 {
                    if !self.give_at(*word) {
                        return at;
                    }
                    *word = 0;
                }
                at += 1;
            }
        }
        at
    }

    /// Takes pages from `addr` up to `end`, up to the first that is not of this kind. Returns where that is.
    #[inline]
    fn return_run(&mut self, mut addr: usize, end: usize) -> usize {
        while addr < end {
            let n = ((end - addr) / PAGE_SIZE).min(Batch::CAPACITY);
            if self.give_run_at(addr, n, addr + n * PAGE_SIZE == end) {
                addr += n * PAGE_SIZE;
                continue;
            }
            for _ in 0..n {
                if !self.give_at(addr) {
                    return addr;
                }
                addr += PAGE_SIZE;
            }
        }
        addr
    }

    #[inline]
    fn give_run_at(&mut self, addr: usize, n: usize, is_last: bool) -> bool {
        addr.is_multiple_of(PAGE_SIZE)
            && self.arena.contains(addr)
            && self.arena.contains(addr + (n - 1) * PAGE_SIZE)
            && self.give_run(self.arena.pfn_of(addr), n, is_last)
    }

    #[inline]
    fn give_at(&mut self, word: usize) -> bool {
        word.is_multiple_of(PAGE_SIZE) && self.arena.contains(word) && self.give(self.arena.pfn_of(word))
    }

    /// Passes the batch on to the list, or to the zone.
    #[inline]
    fn flush(&mut self) {
        let inner = self.arena.inner();
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
            self.arena.inner().lists.count_bulk(BulkCall::Free, pages);
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

/// Who collects frames of one arena that come back as pages of one kind.
pub(crate) trait Collect {
    /// Takes neighbouring frames of the arena, at most a batch's worth, if all are pages of this kind. `is_last`: no
    /// others will be given.
    fn give_run(&mut self, first: u32, n: usize, is_last: bool) -> bool;
    /// Takes one frame of the arena, if it is a page of this kind.
    fn give(&mut self, pfn: u32) -> bool;
}

impl Collect for Segment {
    #[inline]
    fn give_run(&mut self, first: u32, n: usize, is_last: bool) -> bool {
        if !self.arena.take_back_run(first, n, self.mobility) {
            return false;
        }
        if is_last {
            // All that is left needs no table. What came before goes first, and the call is counted while these are
            // still in hand: see `end`.
            if !self.batch.is_empty() {
                self.flush();
            }
            self.pages += n;
            self.count();
            if self.arena.inner().lists.push_run(self.mobility, first, n) {
                return true;
            }
            self.pages -= n;
        } else if self.batch.room() < n {
            self.flush();
        }
        self.batch.push_run(first, n);
        true
    }

    #[inline]
    fn give(&mut self, pfn: u32) -> bool {
        if !self.arena.take_back(pfn, self.mobility) {
            return false;
        }
        if self.batch.room() == 0 {
            self.flush();
        }
        self.batch.push(pfn);
        true
    }
}

impl Inner {
    #[cold]
    #[inline(never)]
    fn overflow_one(&self, mobility: Mobility, pfn: u32) {
        let mut one = Batch::new();
        one.push(pfn);
        self.overflow(mobility, &one);
    }

    #[cold]
    #[inline(never)]
    fn overflow_run(&self, first: u32, n: usize) {
        let mut batch = Batch::new();
        batch.push_run(first, n);
        self.overflow(Mobility::Unmovable, &batch);
    }
}
