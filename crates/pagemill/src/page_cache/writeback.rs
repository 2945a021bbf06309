//! Write-back: dirty pages go to the backing, in runs of neighbours.
//!
//! A page on its way has `WRITEBACK` and a pin, so it is neither changed nor freed. The mark `Writeback` of its place
//! in the index says the same of the place: where a copy has taken it meanwhile, the copy waits for the end of the
//! write, so that two writes of one place never overlap.
//!
//! A place goes from one mark to the other by way of both. Whoever waits for all that is to be written looks first for
//! dirty places and then for those that are being written, without the lock of the index: none escapes in between.
//!
//! A page whose write fails stays dirty, and the error goes to each opener's next `sync`. If the backing fails to make
//! durable what it was given, everything that was written since the last time is dirty again: nobody knows what it has.
use super::backing::{WriteTransfer, is_in_backing};
use super::cached::{Cached, no_memory, pieces};
use super::folio::{ATTACHED, DIRTY, LOCKED, Number, PIN, State, UPTODATE, WRITEBACK};
use super::index::Mark;
use super::mapping::{Mapping, again, byte_of, pages_for};
use super::shared::Shared;
use super::stats::add;
use super::wait::Waited;
use super::workers::Urgency;
use crate::sync::{AtomicU64, RwLockReadGuard, thread_local};
use core::cell::Cell;
use core::ops::{ControlFlow, Range};
use core::sync::atomic::Ordering::{Relaxed, Release};
use core::time::Duration;
use pagemill_core::PAGE_SIZE;
use std::io;
use std::sync::{Arc, PoisonError, TryLockError};

/// Pages of one write: 1 MiB.
const PAGES_MAX: usize = 256;
/// A request for memory that finds the cache full of dirty pages has so many written before it looks again.
const PAGES_AT_ONCE: usize = 256;
/// How often it does so before it gives up.
const ROUNDS: usize = 8;
/// How often it looks again where nothing is under way: pages that others are just using are soon free.
const LOOKS: u32 = 200;
/// A transfer that takes longer than this does not count as one that will end: a backing may have forgotten it.
const PATIENCE: Duration = Duration::from_secs(10);

/// Who wants pages to be written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Patience {
    /// Every page that is dirty now: waits for those that others write to.
    All,
    /// Those that nobody uses, to make room or because a program asked: waits for no lock.
    Some,
}

thread_local! {
    /// The file whose length this thread keeps as it is.
    static SHARED: Cell<*const Mapping> = const { Cell::new(core::ptr::null()) };
}

/// As long as this is there, the length of a file does not change but by writes.
pub(super) struct LengthShared<'f> {
    _guard: Option<RwLockReadGuard<'f, ()>>,
    before: *const Mapping,
}

impl Drop for LengthShared<'_> {
    fn drop(&mut self) {
        SHARED.with(|shared| shared.set(self.before));
    }
}

impl Cached {
    /// Writes dirty pages of a range to the backing, `most` of them at most, and returns how many it began to write. With
    /// [`Patience::All`] their writes have ended when this returns.
    pub(super) fn write_back(&self, range: Range<u64>, most: usize, patience: Patience) -> usize {
        let mut begun = 0;
        let mut at = range.start;
        while begun < most && at < range.end {
            at = self.file.index.next_marked(Mark::Dirty, at, range.end - at);
            if at >= range.end {
                break;
            }
            let Some(length) = self.share_length(patience) else { break };
            let run = at..range.end.min(at + PAGES_MAX.min(most - begun) as u64);
            // Counted without the lock of the index, which whoever waits for writes takes to look.
            self.file.write_begins();
            let numbers = self.take_dirty(run, patience);
            let taken = numbers.len();
            if taken == 0 {
                self.file.write_ends();
                drop(length);
                at += u64::from(!self.waited_for(at, patience));
                continue;
            }
            // Several at once keep a disk busy.
            let is_one_of_many = patience == Patience::All && (begun > 0 || self.file.dirty.load(Relaxed) > 0);
            self.write_run(at, numbers, is_one_of_many);
            drop(length);
            begun += taken;
            at += taken as u64;
        }
        if patience == Patience::All {
            let marked = || self.file.index.next_marked(Mark::Writeback, range.start, range.end - range.start);
            self.file.wait_until_written(|_| marked() >= range.end);
        }
        begun
    }

    /// Keeps the file's length as it is.
    pub(super) fn share_length(&self, patience: Patience) -> Option<LengthShared<'_>> {
        let file = core::ptr::from_ref(&*self.file);
        let before = SHARED.with(Cell::get);
        // A thread that shares it already does not ask again: it would wait behind one that waits to change the length.
        let guard = if before == file { None } else { Some(self.lock_length(patience)?) };
        SHARED.with(|shared| shared.set(file));
        Some(LengthShared { _guard: guard, before })
    }

    fn lock_length(&self, patience: Patience) -> Option<RwLockReadGuard<'_, ()>> {
        match self.file.resizing.try_read() {
            Ok(length) => Some(length),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if patience == Patience::Some => None,
            Err(TryLockError::WouldBlock) => Some(self.file.resizing.read().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    /// Takes a run of dirty pages for a write, from the start of `run` on, as far as nobody else has them.
    fn take_dirty(&self, run: Range<u64>, patience: Patience) -> Vec<Number> {
        let index = match patience {
            Patience::All => Some(self.file.index.lock()),
            Patience::Some => self.file.index.try_lock(),
        };
        let Some(mut index) = index else { return Vec::new() };
        // A place that is being written still is left for later.
        let end = self.file.index.next_marked(Mark::Writeback, run.start, run.end - run.start);
        let mut numbers = Vec::new();
        index.range(run.start..=run.end - 1, |at, number| {
            let is_free = |now: State| now.has(DIRTY) && !now.has_any(LOCKED | WRITEBACK);
            let taken = |now: State| State(now.without(DIRTY).with(WRITEBACK).0 + PIN);
            let folio = self.shared.folios.get(number);
            let is_next = at < end && at == run.start + numbers.len() as u64;
            if !is_next || folio.change(|now| is_free(now).then(|| taken(now))).is_err() {
                return ControlFlow::Break(());
            }
            numbers.push(number);
            ControlFlow::Continue(())
        });
        if let Some(more) = numbers.len().checked_sub(1) {
            let taken = run.start..=run.start + more as u64;
            index.mark(taken.clone(), Mark::Writeback);
            index.unmark(taken, Mark::Dirty);
        }
        self.shared.writing.fetch_add(numbers.len(), Relaxed);
        self.count_dirty(-(numbers.len() as isize));
        numbers
    }

    /// Sleeps until a dirty page can be taken that could not. Returns false for a caller that does not wait.
    fn waited_for(&self, at: u64, patience: Patience) -> bool {
        if patience == Patience::Some {
            return false;
        }
        if let Some(page) = self.find(at) {
            page.wait(|now| !now.has(LOCKED));
        }
        self.file.wait_until_written(|_| !self.file.index.lock().is_marked(at, Mark::Writeback));
        true
    }

    /// Writes a run that was taken: on this thread if it is the only one, unless the backing begins writes by itself.
    fn write_run(&self, at: u64, numbers: Vec<Number>, is_one_of_many: bool) {
        let counts = self.shared.counters.here();
        add(&counts.writes, 1);
        add(&counts.written, numbers.len());
        let len = (self.file.len() - byte_of(at)).min((numbers.len() * PAGE_SIZE) as u64) as usize;
        let mut memory = pieces(numbers.iter().map(|&number| self.shared.folios.get(number).addr()));
        if let Some(last) = memory.last_mut() {
            last.1 -= numbers.len() * PAGE_SIZE - len;
        }
        let cached = self.clone();
        let done = Box::new(move |result: io::Result<usize>| cached.write_ended(at, &numbers, len, result.map(drop)));
        // SAFETY: the folios have WRITEBACK and the transfer's pins. So nobody changes the pages, which needs the only
        // pin (L5), and none is freed (L3), before `write_ended`.
        let write = unsafe { WriteTransfer::new(byte_of(at), memory, done) };
        self.shared.under_way.begin();
        match is_one_of_many {
            true => self.file.io.write(write, Urgency::Ahead),
            false => self.file.io.write_or_here(write),
        }
    }

    fn write_ended(&self, at: u64, numbers: &[Number], len: usize, result: io::Result<()>) {
        let pages = at..at + numbers.len() as u64;
        match &result {
            Ok(()) => {
                self.file.written(pages.clone());
                self.file.write_succeeded();
                // Release pairs with the Acquire of whoever asks what is stored: the backing has it.
                self.file.stored.fetch_max(byte_of(at) + len as u64, Release);
            }
            Err(_) => add(&self.shared.counters.here().writes_failed, 1),
        }
        // Before the marks go: whoever waits for them is told.
        let is_failed = result.is_err();
        if let Err(error) = result {
            self.file.write_failed(Arc::new(error));
        }
        let mut index = self.file.index.lock();
        if is_failed {
            for (at, &number) in pages.clone().zip(numbers) {
                // A copy that has taken its place is dirty itself.
                if self.shared.folios.get(number).state().has(ATTACHED) {
                    self.make_dirty(&mut index, at, number);
                }
            }
        }
        index.unmark(pages.start..=pages.end - 1, Mark::Writeback);
        drop(index);
        for &number in numbers {
            let folio = self.shared.folios.get(number);
            let before = folio.clear(WRITEBACK);
            self.shared.waits.wake(number, folio, before);
            self.shared.unpin(number, folio, 1);
        }
        self.shared.writing.fetch_sub(numbers.len(), Relaxed);
        self.file.write_ends();
        self.shared.under_way.end();
    }

    /// Writes all dirty pages and makes them durable.
    ///
    /// # Errors
    /// Those of any write-back since the opener was told last.
    pub(super) fn sync(&self, seen: &AtomicU64) -> io::Result<()> {
        // One at a time: where a flush fails, the next one would succeed, and promise what the failed one has lost.
        let _turn = self.file.syncing.lock().unwrap_or_else(PoisonError::into_inner);
        // Pages that are appended from now on are not this call's.
        self.write_back(0..pages_for(self.file.len()), usize::MAX, Patience::All);
        let mut unsynced = self.file.take_unsynced();
        if let Err(error) = self.file.io.sync() {
            // The flush may have lost what was written beside it, too.
            self.file.wait_for_writes();
            unsynced.extend(self.file.take_unsynced());
            self.write_again(unsynced);
            self.file.write_failed(Arc::new(error));
        }
        match self.file.error_since(seen) {
            Some(error) => Err(again(&error)),
            None => Ok(()),
        }
    }

    /// Makes pages dirty again that were written and may be lost. Those that are not in the cache any more are in the
    /// backing or nowhere: the error says so.
    fn write_again(&self, ranges: Vec<Range<u64>>) {
        let mut index = self.file.index.lock();
        for range in ranges {
            let mut lost = Vec::new();
            index.range(range.start..=range.end - 1, |at, number| {
                lost.push((at, number));
                ControlFlow::Continue(())
            });
            for (at, number) in lost {
                let state = self.shared.folios.get(number).state();
                if state.has(UPTODATE | ATTACHED) && !state.has(WRITEBACK) {
                    self.make_dirty(&mut index, at, number);
                }
            }
            self.file.written(range);
        }
    }

    /// Refuses more dirty pages of a file whose backing does not take them, once the cache has as many as it likes: they would
    /// fill it, and leave no room for other files.
    ///
    /// # Errors
    /// That of the backing, which goes to the next `sync` too.
    pub(super) fn expect_written(&self) -> io::Result<()> {
        let has_too_many = || self.shared.has_too_many_dirty() && !is_in_backing();
        if !has_too_many() || self.file.failing().is_none() {
            return Ok(());
        }
        // It may take them by now.
        self.write_back(0..u64::MAX, PAGES_AT_ONCE, Patience::Some);
        match self.file.failing() {
            Some(error) if has_too_many() => Err(again(&error)),
            _ => Ok(()),
        }
    }

    /// Has some pages written if there are more dirty ones than the cache likes. The writer waits until there are not: it
    /// must not be faster than the backing for long.
    pub(super) fn throttle(&self) {
        let shared = &self.shared;
        if !shared.has_too_many_dirty() || is_in_backing() {
            return;
        }
        let wanted = PAGES_AT_ONCE.max(shared.dirty_share());
        let written = self.write_back(0..u64::MAX, wanted, Patience::Some);
        if written < wanted && shared.has_too_many_dirty() {
            write_back_files(shared, wanted - written);
        }
        loop {
            let ended = shared.under_way.ended();
            if !shared.has_too_many_dirty() || shared.under_way.wait_for_another(ended, PATIENCE) != Waited::Ended {
                return;
            }
        }
    }

    /// Room for `n` pages, for which others are written back if need be.
    ///
    /// # Errors
    /// Pages that are lent, locked, or dirty and cannot be written fill the cache.
    pub(super) fn make_room_hard(&self, n: usize) -> io::Result<()> {
        let (mut rounds, mut looks) = (0, 0);
        let mut waits = !is_in_backing();
        while rounds < ROUNDS && looks < LOOKS {
            let ended = self.shared.under_way.ended();
            if self.shared.make_room(n) == n {
                return Ok(());
            }
            if !is_in_backing() && write_back_files(&self.shared, PAGES_AT_ONCE) > 0 {
                rounds += 1;
                continue;
            }
            let waited =
                if waits { self.shared.under_way.wait_for_another(ended, PATIENCE) } else { Waited::NoneUnderWay };
            // Once is enough: each look would wait as long.
            waits &= waited != Waited::TooLong;
            if waited != Waited::Ended {
                crate::sync::let_others_on(looks);
                looks += 1;
            }
        }
        let limit = self.shared.limit.load(Relaxed);
        Err(no_memory(format!(
            "each of the {limit} pages that the cache may have is lent, in use or cannot be written"
        )))
    }
}

/// Has dirty pages written, of any file of the cache, and waits for the writes, though not for ever. Returns how many
/// pages.
pub(super) fn write_back_files(shared: &Arc<Shared>, most: usize) -> usize {
    let mut written = 0;
    for file in shared.all_files() {
        // Relaxed: if a page becomes dirty now, it is not what others wait for.
        if written < most && file.dirty.load(Relaxed) > 0 && !file.is_stuck() {
            let cached = Cached { shared: shared.clone(), file };
            written += cached.write_back(0..u64::MAX, most - written, Patience::Some);
            cached.file.wait_for_writes_up_to(PATIENCE);
        }
    }
    written
}
