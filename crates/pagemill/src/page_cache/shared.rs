//! What all files of a cache share: the folios, the queues for eviction, the limit, the files by their numbers.
//!
//! A page enters by [`Shared::make_room`], [`Shared::pages_for`] and `fill.rs` or `write.rs`, and leaves by
//! [`Shared::evict`] or, where its file lets it go, by [`Shared::unpin`] and [`Shared::retire`].
//!
//! # Locks
//! `queues` comes after the lock of an index. Under it an index is locked only if that needs no waiting. `files` comes
//! after `queues`. Nobody allocates pages, calls a backing or waits for a transfer under one of them.
use super::evict::{Look, Queues};
use super::folio::{AHEAD, ATTACHED, DIRTY, Folio, Folios, LOCKED, Number, QUEUED, State, USES, WRITEBACK};
use super::index::Nodes;
use super::mapping::Mapping;
use super::readahead::Decision;
use super::stats::{Counters, PageCacheStats, add};
use super::trace::{ReadaheadDecision, Trace};
use super::wait::{UnderWay, Waits};
use super::workers::Workers;
use crate::allocator::Allocator;
use crate::background::Registered;
use crate::bulk::Bulk;
use crate::error::Error;
use crate::handle::{Page, free_pages_bulk};
use crate::process::Stamp;
use crate::run::Run;
use crate::sync::{AtomicUsize, Mutex, MutexGuard};
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::Gfp;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock, PoisonError, TryLockError};

pub(super) struct Shared {
    pub(super) allocator: Allocator,
    pub(super) folios: Folios,
    pub(super) nodes: Arc<Nodes>,
    pub(super) waits: Waits,
    pub(super) under_way: UnderWay,
    pub(super) counters: Counters,
    pub(super) workers: Arc<Workers>,
    queues: Mutex<Queues>,
    files: Mutex<Files>,
    /// Pages that it may have.
    pub(super) limit: AtomicUsize,
    limit_max: usize,
    /// Pages that it has or is about to get.
    pub(super) pages: AtomicUsize,
    /// Pages that are to be written.
    pub(super) dirty: AtomicUsize,
    /// Pages that are being written.
    pub(super) writing: AtomicUsize,
    /// Writers write back beyond so many dirty pages; a fifth of the limit unless the program says otherwise.
    dirty_max: Option<usize>,
    /// Pages of the largest window of readahead.
    pub(super) window: u32,
    /// Pages are zeroed before they are freed.
    is_wiped: bool,
    pub(super) stamp: Stamp,
    pub(super) name: Box<str>,
    trace: Option<Trace>,
    shrinkers: OnceLock<[Registered; 2]>,
}

/// What the builder was told.
pub(super) struct Sizes {
    pub(super) limit: usize,
    pub(super) dirty: Option<usize>,
    pub(super) window: u32,
    pub(super) threads: usize,
    pub(super) is_wiped: bool,
}

#[derive(Default)]
struct Files {
    by_number: HashMap<u32, Arc<Mapping>>,
    last: u32,
}

/// Fewer pages than this need not be neighbours: a search for a run costs more than their requests to a device.
const RUN_MIN: usize = 32;

/// Folios for pages that requests have in hand while others are evicted. Models make each one anew for each schedule.
const SPARE: usize = if cfg!(shuttle) { 16 } else { 1024 };

/// Pages are evicted so many at a time, whose addresses and numbers are on the stack.
const AT_ONCE: usize = 64;

impl Shared {
    pub(super) fn new(allocator: Allocator, sizes: Sizes, name: Box<str>, trace: Option<Trace>) -> Self {
        let Sizes { limit, dirty, window, threads, is_wiped } = sizes;
        let capacity = u32::try_from(limit + limit / 8 + SPARE).unwrap_or(u32::MAX - 1);
        Self {
            allocator,
            folios: Folios::new(capacity),
            nodes: Nodes::new(),
            waits: Waits::new(),
            under_way: UnderWay::default(),
            counters: Counters::new(),
            workers: Arc::new(Workers::new(threads)),
            queues: Mutex::new(Queues::new(u32::try_from(limit).unwrap_or(u32::MAX))),
            files: Mutex::default(),
            limit: AtomicUsize::new(limit),
            limit_max: limit,
            pages: AtomicUsize::new(0),
            dirty: AtomicUsize::new(0),
            writing: AtomicUsize::new(0),
            dirty_max: dirty,
            window,
            is_wiped,
            stamp: Stamp::here(),
            name,
            trace,
            shrinkers: OnceLock::new(),
        }
    }

    /// Keeps the shrinkers registered for as long as this lives.
    pub(super) fn keep(&self, shrinkers: [Registered; 2]) {
        _ = self.shrinkers.set(shrinkers);
    }

    /// Shows a decision to whoever traces.
    pub(super) fn trace(&self, file: u32, decision: &Decision) {
        if let Some(trace) = &self.trace {
            trace(&ReadaheadDecision::new(file, decision));
        }
    }

    pub(super) fn stats(&self) -> PageCacheStats {
        // Relaxed: figures.
        PageCacheStats {
            pages: self.pages.load(Relaxed) as u64,
            dirty: self.dirty.load(Relaxed) as u64,
            limit: self.limit.load(Relaxed) as u64,
            metadata: (self.folios.bytes() + self.nodes.bytes()) as u64,
            ..self.counters.sum()
        }
    }

    /// Sets the limit: no more than there are folios for.
    pub(super) fn set_limit(&self, pages: usize) {
        let pages = pages.min(self.limit_max);
        self.limit.store(pages, Relaxed);
        self.queues().set_capacity(u32::try_from(pages).unwrap_or(u32::MAX));
        self.evict(self.pages.load(Relaxed).saturating_sub(pages), true);
    }

    /// Whether more pages are dirty, or being written, than writers may leave behind.
    pub(super) fn has_too_many_dirty(&self) -> bool {
        // Relaxed: figures that are compared.
        let limit = self.limit.load(Relaxed);
        let most = self.dirty_max.map_or(limit / 5, |most| most.min(limit));
        self.dirty.load(Relaxed) + self.writing.load(Relaxed) > most
    }
    /// Pages that a writer has written at a time where there are too many.
    pub(super) fn dirty_share(&self) -> usize {
        self.dirty_max.unwrap_or(self.limit.load(Relaxed) / 5) / 8
    }

    /// Adds a file, which `make` makes for its number.
    pub(super) fn add_file<E>(&self, make: impl FnOnce(u32) -> Result<Mapping, E>) -> Result<Arc<Mapping>, E> {
        let number = {
            let mut files = self.files();
            let mut next = files.last.wrapping_add(1);
            while files.by_number.contains_key(&next) {
                next = next.wrapping_add(1);
            }
            files.last = next;
            next
        };
        // Without the lock: it asks the backing for its length.
        let file = Arc::new(make(number)?);
        self.files().by_number.insert(number, file.clone());
        Ok(file)
    }
    pub(super) fn remove_file(&self, number: u32) {
        let removed = self.files().by_number.remove(&number);
        drop(removed); // Not under the lock: it may be the last reference.
    }
    fn file(&self, number: u32) -> Option<Arc<Mapping>> {
        self.files().by_number.get(&number).cloned()
    }
    /// All files, in no order.
    pub(super) fn all_files(&self) -> Vec<Arc<Mapping>> {
        self.files().by_number.values().cloned().collect()
    }
    fn files(&self) -> MutexGuard<'_, Files> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The folio of a page, pinned, if the page is in the cache.
    #[inline]
    pub(super) fn pinned(&self, file: u32, at: u64, number: Number) -> Option<Pinned<'_>> {
        let folio = self.folios.get(number);
        let state = folio.pin();
        let pinned = Pinned { shared: self, folio, number };
        // If it is another page's, the drop gives the pin back.
        folio.is_page(state, file, at).then_some(pinned)
    }

    /// Takes pins of the caller's away, and frees the page if it left its file and these were the last.
    #[inline]
    pub(super) fn unpin(&self, number: Number, folio: &Folio, pins: u64) {
        if folio.release(pins) {
            self.retire(&[number]);
        }
    }

    /// Makes room for `n` more pages, and returns for how many there is: `n`, unless that is more than a quarter of the
    /// cache, or pages must be evicted and cannot be. The caller gives back what it does not use by [`Self::give_room_back`].
    pub(super) fn make_room(&self, n: usize) -> usize {
        // Relaxed here and below: a number that is compared, and orders nothing.
        let limit = self.limit.load(Relaxed);
        let n = n.min((limit / 4).max(1));
        let over = (self.pages.fetch_add(n, Relaxed) + n).saturating_sub(limit);
        if over == 0 {
            return n;
        }
        self.evict(over.max(AT_ONCE.min(limit / 8)), true);
        let over = self.pages.load(Relaxed).saturating_sub(self.limit.load(Relaxed)).min(n);
        self.give_room_back(over);
        n - over
    }
    pub(super) fn give_room_back(&self, n: usize) {
        if n > 0 {
            self.pages.fetch_sub(n, Relaxed);
        }
    }

    /// Up to `n` pages, by a request that neither tries hard nor warns (C8.3). Many pages are neighbours if a zone has
    /// that many free in one run: a device then transfers them as one piece.
    pub(super) fn pages_for(&self, n: usize, runs: &mut Vec<Run<Page>>) -> usize {
        if n >= RUN_MIN {
            let gfp = Gfp::NOWAIT | Gfp::NORETRY | Gfp::NOWARN;
            if let Ok(run) = self.allocator.alloc_contig(gfp, n) {
                runs.push(run);
                return n;
            }
        }
        let request = Bulk::up_to(n).gfp(Gfp::KERNEL | Gfp::NORETRY | Gfp::NOWARN);
        // It has no other error than that the flags are invalid inside a shrinker or a signal handler.
        self.allocator.alloc_pages_bulk_runs(request, runs).map_or(0, |delivered| delivered.blocks)
    }
    /// One page, for which the request tries harder.
    pub(super) fn page(&self) -> Result<Page, Error> {
        self.allocator.alloc_page(Gfp::KERNEL)
    }

    /// Puts folios into the queues. The caller has them pinned; `key` names their pages over time.
    pub(super) fn enqueue(&self, file: u32, pages: impl Iterator<Item = (u64, Number)>) {
        let keyed = |(at, number): (u64, Number)| (number.get(), key_of(file, at));
        let pages: Vec<(u32, u64)> = pages.map(keyed).collect();
        let mut queues = self.queues();
        for &(number, _) in &pages {
            Number::new(number).map(|number| self.folios.get(number).set(QUEUED));
        }
        queues.insert(&pages);
    }
    /// Puts the copy of a page in its place in the queues, or at the end if the old page is about to be put there. The
    /// caller has both pinned.
    pub(super) fn enqueue_copy(&self, old: Number, new: Number) {
        let copy = self.folios.get(new);
        let mut queues = self.queues();
        copy.set(QUEUED);
        match self.folios.get(old).clear(QUEUED).has(QUEUED) {
            true => _ = queues.replace(old.get(), new.get()),
            false => queues.insert(&[(new.get(), key_of(copy.file(), copy.at()))]),
        }
    }
    /// Puts pages first in line for eviction, however often they were used.
    pub(super) fn demote(&self, numbers: &[Number]) {
        let mut queues = self.queues();
        for &number in numbers.iter().filter(|&&number| self.folios.get(number).state().has(QUEUED)) {
            self.folios.get(number).clear(USES);
            queues.demote(number.get());
        }
    }

    /// Evicts up to `wanted` pages that are clean and that nobody has, those first that were used least. Returns how
    /// many. Does nothing if it may not wait and another thread has the queues.
    pub(super) fn evict(&self, wanted: usize, may_wait: bool) -> usize {
        let mut evicted = 0;
        while evicted < wanted {
            let mut victims = [None; AT_ONCE];
            let most = (wanted - evicted).min(AT_ONCE);
            let mut found = 0;
            let mut files = LastFiles { shared: self, looked_up: Vec::new() };
            let mut queues = match self.queues.try_lock() {
                Ok(queues) => queues,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) if may_wait => self.queues(),
                Err(TryLockError::WouldBlock) => break,
            };
            queues.evict(most, usize::MAX, |number, spare| {
                let Some(number) = Number::new(number) else { return Look::Busy };
                let look = self.look(number, u64::from(spare), &mut files);
                if matches!(look, Look::Taken(_)) {
                    victims[found] = Some(number);
                    found += 1;
                }
                look
            });
            drop(queues);
            drop(files); // Maybe the last reference to a file.
            let numbers: Vec<Number> = victims[..found].iter().flatten().copied().collect();
            self.free(&numbers);
            evicted += found;
            if found < most {
                break;
            }
        }
        add(&self.counters.here().evicted, evicted);
        evicted
    }

    /// Looks at a candidate for eviction, under the lock of the queues, and takes it out of its file if it may go.
    fn look(&self, number: Number, spare: u64, files: &mut LastFiles<'_>) -> Look {
        let folio = self.folios.get(number);
        let state = folio.state();
        if state.uses() > spare {
            // If it fails, somebody uses it at this moment.
            _ = folio.change(|now| (now == state).then(|| now.used_less(spare + 1)));
            return Look::Used;
        }
        if state.pins() > 0 || !state.has(ATTACHED) || state.has_any(DIRTY | WRITEBACK | LOCKED) {
            return Look::Busy;
        }
        let (file, at) = (folio.file(), folio.at());
        let Some(mapping) = files.get(file) else { return Look::Busy };
        let Some(mut index) = mapping.index.try_lock() else { return Look::Busy };
        // With the lock of its index (L2), and only if nothing has changed: nobody has it pinned.
        if !folio.end_unchanged(state, 0) {
            return Look::Busy;
        }
        index.remove(at);
        if state.has(AHEAD) {
            add(&self.counters.here().ahead_unused, 1);
        }
        Look::Taken(key_of(file, at))
    }

    /// Frees the pages of folios whose end the caller has claimed, by [`Folio::end`].
    #[cold]
    pub(super) fn retire(&self, numbers: &[Number]) {
        if numbers.iter().any(|&number| self.folios.get(number).state().has(QUEUED)) {
            let mut queues = self.queues();
            for &number in numbers {
                if self.folios.get(number).clear(QUEUED).has(QUEUED) {
                    queues.remove(number.get());
                }
            }
        }
        self.free(numbers);
    }

    /// Frees pages that are in no queue.
    fn free(&self, numbers: &[Number]) {
        for numbers in numbers.chunks(AT_ONCE) {
            let mut pages = [const { None }; AT_ONCE];
            for (page, &number) in pages.iter_mut().zip(numbers) {
                let page = page.insert(self.folios.page_of(number));
                if self.is_wiped {
                    page.fill(0);
                }
            }
            free_pages_bulk(&mut pages);
            self.folios.put_back(numbers);
            self.give_room_back(numbers.len());
        }
    }
}

/// The files that were looked up, the last one last: neighbours in a queue are often of one file. They are kept until the
/// lock of the queues is free: the last reference to a file drops its backing, which may have files of this cache.
struct LastFiles<'s> {
    shared: &'s Shared,
    looked_up: Vec<Arc<Mapping>>,
}

impl LastFiles<'_> {
    fn get(&mut self, number: u32) -> Option<&Mapping> {
        if self.looked_up.last().is_none_or(|file| file.number != number) {
            self.looked_up.push(self.shared.file(number)?);
        }
        self.looked_up.last().map(|file| &**file)
    }
}

/// A page's name in the memory of what was evicted.
fn key_of(file: u32, at: u64) -> u64 {
    // The finish of splitmix64: each bit of the name changes half of the result's.
    let mixed = (at ^ u64::from(file) << 40).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// A pin of a folio, given back when this is dropped.
pub(super) struct Pinned<'s> {
    pub(super) shared: &'s Shared,
    pub(super) folio: &'s Folio,
    pub(super) number: Number,
}

impl Pinned<'_> {
    /// Keeps the pin: the caller gives it back by [`Shared::unpin`].
    pub(super) fn keep(self) -> Number {
        core::mem::ManuallyDrop::new(self).number
    }
    /// Sleeps until the folio's word is as `is_over` wants it.
    pub(super) fn wait(&self, is_over: impl Fn(State) -> bool) -> State {
        self.shared.waits.wait(self.number, self.folio, is_over)
    }
    /// Wakes those who wait for a change of the word, which was `before`.
    pub(super) fn wake(&self, before: State) {
        self.shared.waits.wake(self.number, self.folio, before);
    }
}

impl Drop for Pinned<'_> {
    #[inline]
    fn drop(&mut self) {
        self.shared.unpin(self.number, self.folio, 1);
    }
}
