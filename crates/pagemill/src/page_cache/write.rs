//! Writing: bytes go into cached pages, which are written to the backing later.
//!
//! A page that somebody reads, or that is on its way to the backing, is not changed: a copy takes its place, and the
//! old page goes when the last of those who have it lets it go. So a page that is lent keeps its bytes, and what a
//! backing is given to write does not change meanwhile.
use super::cached::{Cached, no_memory};
use super::fill::Fetch;
use super::folio::{ATTACHED, DIRTY, EXCLUSIVE, LOCKED, Number, UPTODATE, WRITEBACK};
use super::index::{Mark, Writing};
use super::mapping::{byte_of, pages_for};
use super::shared::Pinned;
use super::stats::add;
use super::writeback::Patience;
use crate::handle::Page;
use crate::handle::sealed::Word;
use crate::run::Run;
use core::ops::Range;
use core::sync::atomic::Ordering::Release;
use pagemill_core::PAGE_SIZE;
use std::io;
use std::sync::PoisonError;

/// Fresh pages are made so many at a time; between two times the file's length may change.
pub(super) const AT_ONCE: usize = 64;

/// Bytes of one page that are to be written.
pub(super) struct Patch<'b> {
    pub(super) page: u64,
    /// Where they go in the page.
    pub(super) start: usize,
    pub(super) bytes: &'b [u8],
}

impl<'b> Patch<'b> {
    fn new(from: &'b [u8], at: u64) -> Self {
        let start = (at % PAGE_SIZE as u64) as usize;
        Self { page: at / PAGE_SIZE as u64, start, bytes: &from[..from.len().min(PAGE_SIZE - start)] }
    }
    fn end(&self) -> u64 {
        byte_of(self.page) + (self.start + self.bytes.len()) as u64
    }
    /// # Safety
    /// Nobody else touches the page at `to`.
    unsafe fn write_to(&self, to: *mut u8) {
        // SAFETY: the bytes lie inside the page.
        unsafe { to.add(self.start).copy_from_nonoverlapping(self.bytes.as_ptr(), self.bytes.len()) };
    }
}

/// Refuses what would lie behind the greatest length that a file may have.
pub(super) fn check_end(at: u64, len: usize) -> io::Result<()> {
    match at.checked_add(len as u64) {
        Some(end) if end <= i64::MAX as u64 => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::FileTooLarge, "a file has at most 2^63 - 1 bytes")),
    }
}

impl Cached {
    /// Writes all of `from` at `at`. Returns how many bytes, if an error ends it after the first.
    pub(super) fn write(&self, from: &[u8], at: u64) -> io::Result<usize> {
        check_end(at, from.len())?;
        let mut done = 0;
        while done < from.len() {
            let written = self.expect_written().and_then(|()| self.write_some(&from[done..], at + done as u64));
            match written {
                Ok(written) => done += written,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
            self.throttle();
        }
        Ok(done)
    }

    /// Writes some bytes, one page or a run of fresh pages.
    fn write_some(&self, from: &[u8], at: u64) -> io::Result<usize> {
        let _length = self.share_length(Patience::All);
        let patch = Patch::new(from, at);
        loop {
            if let Some(page) = self.locked(patch.page) {
                self.overwrite(page, &patch, true, None)?;
                return Ok(patch.bytes.len());
            }
            let whole = from.len() / PAGE_SIZE;
            let is_fresh = byte_of(patch.page) >= self.file.len();
            let fresh = if patch.start == 0 && whole > 0 { whole.min(AT_ONCE) } else { usize::from(is_fresh) };
            if fresh == 0 {
                // The rest of the page is needed. Where it cannot be read, nothing has changed.
                let page = match self.find(patch.page) {
                    Some(page) => Some(page),
                    None => self.fetch(&Fetch::page(patch.page))?.awaited,
                };
                match page {
                    Some(page) => _ = self.wait_for_page(&page)?,
                    None => self.wait_for_index(),
                }
                continue;
            }
            let written = self.write_fresh(from, at, fresh)?;
            if written > 0 {
                return Ok(written);
            }
            self.wait_for_index();
        }
    }

    /// Lets readers see bytes up to here. A page that is dirty lies in the file: its write-back would leave out what lies
    /// behind the end. So this comes before the page can be written back.
    fn lengthen(&self, end: u64) {
        // Release pairs with the Acquire of `len`.
        self.file.size.fetch_max(end, Release);
    }

    /// The page, locked and up to date, if it is in the cache. Waits for whoever has it locked.
    pub(super) fn locked(&self, at: u64) -> Option<Pinned<'_>> {
        loop {
            let page = self.find(at)?;
            match page.folio.change(|now| (!now.has(LOCKED)).then(|| now.with(LOCKED))) {
                Ok(before) if before.has(ATTACHED | UPTODATE) => return Some(page),
                // It has just left the file.
                Ok(_) => self.unlock(&page, LOCKED),
                Err(_) => _ = page.wait(|now| !now.has(LOCKED)),
            }
        }
    }

    fn unlock(&self, page: &Pinned<'_>, flags: u64) {
        let before = page.folio.clear(flags);
        page.wake(before);
    }

    /// Writes to a page that this thread has locked, and unlocks it. Where the page must be copied, `spare` serves.
    pub(super) fn overwrite(
        &self,
        page: Pinned<'_>,
        patch: &Patch<'_>,
        lengthens: bool,
        mut spare: Option<Page>,
    ) -> io::Result<()> {
        let end = if lengthens { patch.end() } else { 0 };
        loop {
            if page.folio.make_exclusive() {
                // SAFETY: the one pin is this thread's, and EXCLUSIVE keeps readers away (L5).
                unsafe { patch.write_to(page.folio.as_ptr()) };
                self.lengthen(end);
                if !page.folio.state().has(DIRTY) {
                    self.make_dirty(&mut self.file.index.lock(), patch.page, page.number);
                }
                self.unlock(&page, EXCLUSIVE | LOCKED);
                self.shared.give_room_back(usize::from(spare.is_some()));
                return Ok(());
            }
            let copy = spare.take().map_or_else(|| self.one_page(), Ok);
            match copy.and_then(|copy| self.copy(&page, patch, end, copy)) {
                Ok(()) => return Ok(()),
                Err(_) if page.folio.state().has(WRITEBACK) => {
                    // There is no memory, but the backing is about to let the page go.
                    page.wait(|now| !now.has(WRITEBACK));
                }
                Err(_) if page.folio.state().pins() == 1 => {} // Its reader has gone.
                Err(error) => {
                    self.unlock(&page, LOCKED);
                    return Err(error);
                }
            }
        }
    }

    /// Puts a changed copy in the place of a page that somebody reads. This thread has the page locked, and room for the
    /// copy is reserved.
    fn copy(&self, page: &Pinned<'_>, patch: &Patch<'_>, end: u64, mut copy: Page) -> io::Result<()> {
        // SAFETY: the page is up to date and pinned, and its writers are kept away by its lock.
        copy.copy_from_slice(unsafe { &*page.folio.as_ptr().cast::<[u8; PAGE_SIZE]>() });
        copy[patch.start..patch.start + patch.bytes.len()].copy_from_slice(patch.bytes);
        let mut numbers = Vec::with_capacity(1);
        if self.shared.folios.take(1, &mut numbers) == 0 {
            drop(copy);
            self.shared.give_room_back(1);
            return Err(no_memory("each page that the cache may have is lent"));
        }
        self.replace(page, numbers[0], copy, end);
        add(&self.shared.counters.here().copied, 1);
        Ok(())
    }

    /// Puts another page in the place of one that this thread has locked, dirty, under a free folio's number, and lets
    /// readers see bytes up to `end`. The old page goes when nobody has it any more.
    pub(super) fn replace(&self, old: &Pinned<'_>, number: Number, page: Page, end: u64) {
        let at = old.folio.at();
        let mut index = self.file.index.lock();
        // The page's place in the queues comes with its uses, so that a copy is no newcomer.
        let flags = ATTACHED | UPTODATE | DIRTY | old.folio.state().uses_as_flags();
        let new = self.shared.folios.begin(number, page, self.file.number, at, flags);
        index.replace(at, number);
        let before = old.folio.clear(ATTACHED | DIRTY | LOCKED);
        if !before.has(DIRTY) {
            self.count_dirty(1);
            index.mark(at..=at, Mark::Dirty);
        }
        self.lengthen(end);
        drop(index);
        self.shared.enqueue_copy(old.number, number);
        self.shared.unpin(number, new, 1);
        old.wake(before);
    }

    /// A page for a writer, which is counted.
    pub(super) fn one_page(&self) -> io::Result<Page> {
        if self.shared.make_room(1) == 0 {
            self.make_room_hard(1)?;
        }
        self.shared.page().map_err(|error| {
            self.shared.give_room_back(1);
            no_memory(error)
        })
    }

    /// Makes pages of what is written, up to `most` whole ones, or one that the file ends in, and puts them into holes.
    /// Returns how many bytes they took: 0 if another thread has put a page there.
    fn write_fresh(&self, from: &[u8], at: u64, most: usize) -> io::Result<usize> {
        let first = at / PAGE_SIZE as u64;
        let free = self.file.index.next_present(first, most as u64) - first;
        let mut runs = Vec::new();
        let n = self.pages_to_write(free as usize, &mut runs)?;
        if n == 0 {
            return Ok(0);
        }
        let mut pages: Vec<Page> = runs.into_iter().flat_map(Run::into_pages).collect();
        let (mut bytes, mut ends) = (0, [0; AT_ONCE]);
        for (page, end) in pages.iter_mut().zip(&mut ends) {
            let patch = Patch::new(&from[bytes..], at + bytes as u64);
            page[..patch.start].fill(0);
            page[patch.start..patch.start + patch.bytes.len()].copy_from_slice(patch.bytes);
            page[patch.start + patch.bytes.len()..].fill(0);
            bytes += patch.bytes.len();
            *end = bytes;
        }
        let mut numbers = Vec::with_capacity(n);
        self.shared.folios.take(n, &mut numbers);
        let index = self.file.index.lock();
        let free = self.file.index.next_present(first, n as u64) - first;
        // A page that is made in part must lie behind the end. If it lies there no more, others have written to it.
        let is_partial = !at.is_multiple_of(PAGE_SIZE as u64) || !bytes.is_multiple_of(PAGE_SIZE);
        let is_late = is_partial && byte_of(first) < self.file.len();
        let placed = if is_late { 0 } else { numbers.len().min(free as usize) };
        let spare = numbers.split_off(placed);
        let rest = pages.split_off(placed);
        let end = placed.checked_sub(1).map_or(0, |last| ends[last]);
        self.attach_dirty(index, first, &numbers, pages.into_iter(), at + end as u64);
        self.shared.give_room_back(rest.len());
        drop(rest);
        self.shared.folios.put_back(&spare);
        self.shared.under_way.end();
        add(&self.shared.counters.here().misses, placed);
        Ok(end)
    }

    /// Puts pages into neighbouring holes, from page `first` on: one for each of these free folios. The caller has looked
    /// under this lock that they are holes. Readers see bytes up to `end` from now on.
    pub(super) fn attach_dirty(
        &self,
        mut index: Writing<'_>,
        first: u64,
        numbers: &[Number],
        pages: impl Iterator<Item = Page>,
        end: u64,
    ) {
        if numbers.is_empty() {
            return;
        }
        for ((page, &number), at) in pages.zip(numbers).zip(first..) {
            self.shared.folios.begin(number, page, self.file.number, at, ATTACHED | UPTODATE | DIRTY);
        }
        index.insert_run(first, numbers).unwrap_or_else(|_| unreachable!("they are holes, and the index is locked"));
        index.mark(first..=first + (numbers.len() - 1) as u64, Mark::Dirty);
        self.count_dirty(numbers.len() as isize);
        self.lengthen(end);
        drop(index);
        self.shared.enqueue(self.file.number, (first..).zip(numbers.iter().copied()));
        for &number in numbers {
            self.shared.unpin(number, self.shared.folios.get(number), 1);
        }
    }

    /// Pages for a writer: up to `n`, at least one of some. They count as a read under way, which the caller ends.
    fn pages_to_write(&self, n: usize, runs: &mut Vec<Run<Page>>) -> io::Result<usize> {
        if n == 0 {
            return Ok(0);
        }
        self.shared.under_way.begin();
        let granted = self.shared.make_room(n);
        let got = if granted > 0 { self.shared.pages_for(granted, runs) } else { 0 };
        self.shared.give_room_back(granted - got);
        if got == 0 {
            self.shared.under_way.end();
            runs.push(Run::of_page(self.one_page()?.into_word()));
            self.shared.under_way.begin();
        }
        Ok(got.max(1))
    }

    /// Marks a page dirty that is in the file. The caller has the lock of the index.
    pub(super) fn make_dirty(&self, index: &mut Writing<'_>, at: u64, number: Number) {
        let before = self.shared.folios.get(number).set(DIRTY);
        if !before.has(DIRTY) && before.has(ATTACHED) {
            index.mark(at..=at, Mark::Dirty);
            self.count_dirty(1);
        }
    }

    /// Writes `from` where the file ends, and returns where that was.
    pub(super) fn append(&self, from: &[u8]) -> io::Result<u64> {
        let _turn = self.file.appending.lock().unwrap_or_else(PoisonError::into_inner);
        let at = self.file.len();
        match self.write(from, at)? {
            written if written == from.len() => Ok(at),
            written => Err(io::Error::new(
                io::ErrorKind::WriteZero,
                format!("{written} of {} bytes were appended at byte {at}, then there was no memory", from.len()),
            )),
        }
    }
}

/// The pages that these bytes lie in.
pub(super) fn pages_of(bytes: Range<u64>) -> Range<u64> {
    bytes.start / PAGE_SIZE as u64..pages_for(bytes.end)
}
