//! The way back: a block is checked against its state, marked as free, and put on the list of the CPU that frees it;
//! a full list passes it on to the zone.
use crate::allocator::Inner;
use crate::arena::{Arena, GROUP};
use crate::handle::{addr_of_word, order_of_word};
use crate::misuse::{misuse, refuse_foreign};
use crate::registry;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{FrameState, Giving, ListPolicy, Misuse, MisuseKind, Mobility, Order, PAGE_SIZE, Pfn};
use pagemill_sys::Batch;
use pagemill_sys::lists::BulkCall;

/// Frees one block by its handle's word.
#[inline]
pub(crate) fn free_word(word: usize) -> Result<(), Misuse> {
    let (addr, order) = (addr_of_word(word), order_of_word(word));
    if order == Order::ZERO
        && let Some(arena) = registry::by_address(addr)
        && addr.is_multiple_of(PAGE_SIZE)
    {
        let pfn = arena.pfn_of(addr);
        let mobility = take_back(arena, pfn);
        if let Some(mobility) = mobility {
            let inner = arena.inner();
            if !inner.lists.push(mobility, pfn) {
                inner.overflow_one(mobility, pfn);
            }
            return Ok(());
        }
    }
    free_slow(addr, order)
}

/// Marks a page that is handed out as free. Its mobility, which says the list; none if it is no such page.
#[inline]
fn take_back(arena: &Arena, pfn: u32) -> Option<Mobility> {
    if cfg!(feature = "detection-off") {
        return Some(Mobility::Unmovable);
    }
    let mobility = arena.state(pfn).page_mobility()?;
    arena.set_state(pfn, FrameState::FREE);
    Some(mobility)
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
/// let page = Allocator::global().alloc_page(Gfp::KERNEL)?.into_raw().as_ptr();
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
    let Some(arena) = registry::by_address(addr) else {
        return Err(refuse_foreign(misuse(MisuseKind::Foreign, addr)));
    };
    let inner = arena.inner();
    inner.check_generation();
    let refused = |kind| inner.refuse(misuse(kind, addr));
    if !addr.is_multiple_of(PAGE_SIZE) {
        return Err(refused(MisuseKind::Unaligned));
    }
    let pfn = arena.pfn_of(addr);
    check_block(arena, pfn, order).map_err(refused)?;
    arena.mark_block(pfn, order, FrameState::FREE);
    let stats = inner.stats_here();
    stats.blocks_in.fetch_add(1, Relaxed);
    stats.block_pages_in.fetch_add(u64::from(order.frames()), Relaxed);
    inner.zone.free_block(Pfn::new(pfn), order).map_err(refused)
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
        None if state == FrameState::FRESH => Err(MisuseKind::Foreign),
        None => Err(MisuseKind::DoubleFree),
    }
}

/// Turns a block that its caller owns into pages.
pub(crate) fn split(addr: usize, order: Order) {
    let Some(arena) = registry::by_address(addr) else { return };
    if order == Order::ZERO {
        return;
    }
    let (inner, pfn) = (arena.inner(), arena.pfn_of(addr));
    inner.check_generation();
    let mobility = inner.zone.mobility_of(Pfn::new(pfn));
    if let Err(kind) = inner.zone.split_block(Pfn::new(pfn), order, mobility) {
        inner.refuse(misuse(kind, addr));
        return;
    }
    arena.mark_block(pfn, order, FrameState::handed_out(Order::ZERO, mobility));
    let stats = inner.stats_here();
    // From now on they count as pages.
    stats.block_pages_out.fetch_sub(u64::from(order.frames()), Relaxed);
    stats.direct_out.fetch_add(u64::from(order.frames()), Relaxed);
}

/// What a bulk free did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Freed {
    pub(crate) freed: usize,
    pub(crate) misused: Option<Misuse>,
}

/// Frees the blocks behind `words` and empties their slots; those that are refused stay.
pub(crate) fn free_words(words: &mut [usize]) -> Freed {
    let mut returning = Returning::new(words.len());
    let mut at = 0;
    while at < words.len() {
        if at + GROUP <= words.len() {
            let group = &mut words[at..at + GROUP];
            if is_address_run(group) && returning.give_group(group[0]) {
                group.fill(0);
                at += GROUP;
                continue;
            }
        }
        if words[at] != 0 && returning.give(words[at]) {
            words[at] = 0;
        }
        at += 1;
    }
    returning.finish()
}

/// Frees `n` neighbouring blocks of `order` from `addr` on.
pub(crate) fn free_run(addr: usize, n: usize, order: Order) -> Freed {
    let mut returning = Returning::new(n);
    let word = |i: usize| (addr + i * order.bytes()) | usize::from(order.get());
    let mut at = 0;
    while at < n {
        if order == Order::ZERO && at + GROUP <= n && returning.give_group(word(at)) {
            at += GROUP;
        } else {
            returning.give(word(at));
            at += 1;
        }
    }
    returning.finish()
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
/// let page = Allocator::global().alloc_page(Gfp::KERNEL)?.into_raw().as_ptr();
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
    let freed = if order == Order::ZERO && words.iter().all(|addr| addr.is_multiple_of(PAGE_SIZE)) {
        free_words(words)
    } else {
        let mut done = Freed::default();
        for addr in words.iter_mut().filter(|addr| **addr != 0) {
            let ptr = core::ptr::with_exposed_provenance_mut(*addr);
            // SAFETY: the caller's promise.
            match unsafe { free_raw(ptr, order) } {
                Ok(()) => (*addr, done.freed) = (0, done.freed + 1),
                Err(misuse) => done.misused = done.misused.or(Some(misuse)),
            }
        }
        done
    };
    match freed.misused {
        None => Ok(freed.freed),
        Some(misuse) => Err((freed.freed, misuse)),
    }
}

/// Are these eight words those of eight neighbouring pages?
#[inline]
fn is_address_run(words: &[usize]) -> bool {
    let first = words[0];
    let differs =
        words.iter().zip(0usize..).fold(0, |differs, (&word, i)| differs | (word ^ first.wrapping_add(i * PAGE_SIZE)));
    differs == 0
}

/// Blocks on their way back, collected to batches of one allocator and mobility.
pub(crate) struct Returning {
    arena: Option<&'static Arena>,
    mobility: Mobility,
    batch: Batch,
    /// Past the lists: more comes than they are for.
    large: Option<Giving<'static, 'static, 256>>,
    is_large: bool,
    done: Freed,
    /// Pages of this arena so far, for its statistics.
    pages: usize,
}

impl Returning {
    #[inline]
    pub(crate) fn new(expected: usize) -> Self {
        Self {
            arena: None,
            mobility: Mobility::Unmovable,
            batch: Batch::new(),
            large: None,
            is_large: expected > ListPolicy::LARGE,
            done: Freed::default(),
            pages: 0,
        }
    }

    /// Takes the eight neighbouring pages from the one at `addr` on, if they are what the last one was like.
    #[inline]
    pub(crate) fn give_group(&mut self, addr: usize) -> bool {
        let Some(arena) = self.arena else { return false };
        if !arena.contains(addr) || !arena.contains(addr + (GROUP - 1) * PAGE_SIZE) || !addr.is_multiple_of(PAGE_SIZE) {
            return false;
        }
        self.give_group_of(arena, arena.pfn_of(addr))
    }

    /// The same, by frame number.
    #[inline]
    pub(crate) fn give_group_of(&mut self, arena: &'static Arena, first: u32) -> bool {
        if !self.arena.is_some_and(|last| core::ptr::eq(last, arena)) || !arena.take_back_group(first, self.mobility) {
            return false;
        }
        if self.batch.room() < GROUP {
            self.flush();
        }
        self.batch.push_run(first, GROUP);
        true
    }

    /// Takes one block. False: it is misuse.
    #[inline]
    pub(crate) fn give(&mut self, word: usize) -> bool {
        let addr = addr_of_word(word);
        let arena = match self.arena {
            Some(arena) if arena.contains(addr) => arena,
            _ => match registry::by_address(addr) {
                Some(arena) => arena,
                None => return self.give_slow(word),
            },
        };
        if !word.is_multiple_of(PAGE_SIZE) {
            return self.give_slow(word);
        }
        let pfn = arena.pfn_of(addr);
        let Some(mobility) = take_back(arena, pfn) else { return self.give_slow(word) };
        let is_like_last = self.arena.is_some_and(|last| core::ptr::eq(last, arena)) && mobility == self.mobility;
        if !is_like_last {
            self.change(arena, mobility);
        } else if self.batch.room() == 0 {
            self.flush();
        }
        self.batch.push(pfn);
        true
    }

    /// Blocks above order 0, and misuse.
    #[cold]
    fn give_slow(&mut self, word: usize) -> bool {
        match free_slow(addr_of_word(word), order_of_word(word)) {
            Ok(()) => {
                self.done.freed += 1;
                true
            }
            Err(misuse) => {
                self.done.misused = self.done.misused.or(Some(misuse));
                false
            }
        }
    }

    #[cold]
    fn change(&mut self, arena: &'static Arena, mobility: Mobility) {
        if self.arena.is_some_and(|last| core::ptr::eq(last, arena)) {
            self.flush();
        } else {
            self.leave_arena();
            arena.inner().check_generation();
            self.arena = Some(arena);
        }
        self.mobility = mobility;
    }

    /// Passes the batch on to the list, or to the zone.
    #[inline]
    fn flush(&mut self) {
        let Some(arena) = self.arena else { return };
        if self.batch.is_empty() {
            return;
        }
        let inner = arena.inner();
        self.pages += self.batch.len();
        if self.is_large {
            self.large.get_or_insert_with(|| inner.zone.giving_many()).give_slice(self.batch.as_slice());
        } else if !inner.lists.push_n(self.mobility, &self.batch, 0) {
            inner.overflow(self.mobility, &self.batch);
        }
        self.batch.clear();
    }

    /// Counts the call; before its last pages go back: they may be the allocator's last, and nothing of it is touched
    /// after that.
    fn count(&mut self) {
        let Some(arena) = self.arena else { return };
        let pages = core::mem::take(&mut self.pages) + self.batch.len();
        self.done.freed += pages;
        if pages > 1 {
            arena.inner().lists.count_bulk(BulkCall::Free, pages);
        }
        if self.is_large {
            arena.inner().stats_here().direct_in.fetch_add(pages as u64, Relaxed);
        }
    }

    fn leave_arena(&mut self) {
        self.count();
        self.flush();
        self.pages = 0;
        if let (Some(large), Some(arena)) = (self.large.take(), self.arena) {
            let given = large.finish();
            if given.doubles > 0 {
                arena.inner().note_doubles(given.doubles);
            }
        }
    }

    #[inline]
    pub(crate) fn finish(mut self) -> Freed {
        self.leave_arena();
        self.done
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
}
