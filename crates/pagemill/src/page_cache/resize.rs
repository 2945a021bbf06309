//! Pages that leave their file: it is cut, they are let go, or its last opener closes it.
use super::cached::Cached;
use super::folio::{ATTACHED, DIRTY, Folio, LOCKED, State, WRITEBACK};
use super::index::Verdict;
use super::mapping::pages_for;
use super::write::Patch;
use super::writeback::Patience;
use crate::handle::Page;
use core::ops::{ControlFlow, Range};
use core::sync::atomic::Ordering::{Relaxed, Release};
use pagemill_core::PAGE_SIZE;
use std::io;
use std::sync::PoisonError;

impl Cached {
    /// Changes the file's length, here and in the backing.
    ///
    /// The new length is set first, so that no read adds a page behind it; then the backing is cut; then the pages go
    /// that were there before. A read of the last page that began before the cut may bring bytes from behind the new
    /// end: that page is waited for, and its end becomes zeros.
    pub(super) fn set_len(&self, len: u64) -> io::Result<()> {
        if len > i64::MAX as u64 {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "a file has at most 2^63 - 1 bytes"));
        }
        let file = &*self.file;
        // If the last page is lent, its end becomes zeros in a copy. Before the length is locked, since room for it may
        // come from write-back.
        let spare = if len.is_multiple_of(PAGE_SIZE as u64) { None } else { Some(self.one_page()?) };
        let _length = file.resizing.write().unwrap_or_else(PoisonError::into_inner);
        let before = file.len();
        if len < before {
            // Release, here and below: as in `lengthen`.
            file.size.store(len, Release);
        }
        // None begins while this thread has the length.
        file.wait_for_writes();
        if let Err(error) = file.io.set_len(len) {
            file.size.store(before, Release);
            self.shared.give_room_back(usize::from(spare.is_some()));
            return Err(error);
        }
        file.stored.store(len, Release);
        file.size.store(len, Release);
        if len < before {
            return self.cut(len, spare);
        }
        self.shared.give_room_back(usize::from(spare.is_some()));
        Ok(())
    }

    /// Takes out what lies behind a new end, and makes zeros of what the last page has behind it.
    fn cut(&self, len: u64, spare: Option<Page>) -> io::Result<()> {
        let mut over = Vec::new();
        self.file.index.lock().remove_range(pages_for(len)..=u64::MAX, |_, number| {
            if self.detach(number) {
                over.push(number);
            }
            Verdict::Remove
        });
        self.shared.retire(&over);
        let kept = (len % PAGE_SIZE as u64) as usize;
        if kept > 0
            && let Some(page) = self.locked(len / PAGE_SIZE as u64)
        {
            let zeros = Patch { page: len / PAGE_SIZE as u64, start: kept, bytes: &[0; PAGE_SIZE][kept..] };
            return self.overwrite(page, &zeros, false, spare);
        }
        self.shared.give_room_back(usize::from(spare.is_some()));
        Ok(())
    }

    /// Takes pages off the file that are neither dirty nor on their way. Whoever has them keeps them, with the bytes that
    /// they had. Returns how many of the range stay.
    pub(super) fn invalidate(&self, pages: Range<u64>) -> usize {
        self.remove(pages, |folio| {
            let is_clean = |now: State| !now.has_any(DIRTY | WRITEBACK | LOCKED);
            folio.change(|now| is_clean(now).then(|| now.without(ATTACHED))).is_ok()
        })
    }

    /// Removes those pages of a range from the index that `detach` takes off the file. Returns how many stay.
    fn remove(&self, pages: Range<u64>, detach: impl Fn(&Folio) -> bool) -> usize {
        let (mut over, mut kept) = (Vec::new(), 0);
        let Some(last) = pages.end.checked_sub(1) else { return 0 };
        self.file.index.lock().remove_range(pages.start..=last, |_, number| {
            let folio = self.shared.folios.get(number);
            if !detach(folio) {
                kept += 1;
                return Verdict::Keep;
            }
            if folio.end() {
                over.push(number);
            }
            Verdict::Remove
        });
        self.shared.retire(&over);
        kept
    }

    /// Takes a clean page off its file, so that it is read again. Whoever has it lent keeps it.
    fn forget(&self, at: u64) {
        let Some(page) = self.locked(at) else { return };
        if !page.folio.state().has(DIRTY) {
            let mut index = self.file.index.lock();
            index.remove(at);
            let is_over = self.detach(page.number);
            debug_assert!(!is_over, "this thread has it pinned");
        }
        page.wake(page.folio.clear(LOCKED));
    }

    /// Lets pages go that were used `most` times at most, or puts them first in line for eviction where somebody has them,
    /// or they are to be written.
    pub(super) fn let_go(&self, pages: Range<u64>, most: u64) {
        let is_unused = |now: State| now.uses() <= most;
        let is_free = |now: State| is_unused(now) && now.pins() == 0 && !now.has_any(DIRTY | WRITEBACK | LOCKED);
        let detach = |folio: &Folio| folio.change(|now| is_free(now).then(|| now.without(ATTACHED))).is_ok();
        if self.remove(pages.clone(), detach) == 0 {
            return;
        }
        let mut numbers = Vec::new();
        self.file.index.lock().range(pages.start..=pages.end - 1, |_, number| {
            if is_unused(self.shared.folios.get(number).state()) {
                numbers.push(number);
            }
            ControlFlow::Continue(())
        });
        self.shared.demote(&numbers);
    }

    /// Ends the file: the last opener has gone. What is dirty is written, and what cannot be written is lost; the error
    /// says so.
    pub(super) fn end(&self) -> io::Result<()> {
        let file = &*self.file;
        self.write_back(0..u64::MAX, usize::MAX, Patience::All);
        // Requests for memory may be writing pages again that could not be written.
        let _length = file.resizing.write().unwrap_or_else(PoisonError::into_inner);
        file.wait_for_writes();
        let mut over = Vec::new();
        let mut index = file.index.lock();
        // Relaxed: with the lock it does not change.
        let lost = file.dirty.load(Relaxed);
        index.remove_range(0..=u64::MAX, |_, number| {
            if self.detach(number) {
                over.push(number);
            }
            Verdict::Remove
        });
        drop(index);
        self.shared.retire(&over);
        self.shared.remove_file(file.number);
        match lost {
            0 => Ok(()),
            _ => Err(io::Error::other(format!("{lost} dirty pages could not be written, and are lost"))),
        }
    }

    /// Takes the backing's length again, where others than this cache change it. Returns the new length.
    pub(super) fn refresh(&self) -> io::Result<u64> {
        let file = &*self.file;
        // The last page, as far as this cache has changed it; what others have appended to it is read again.
        let last = file.len() / PAGE_SIZE as u64;
        self.write_back(last..last + 1, 1, Patience::All);
        let spare = self.one_page()?;
        let _length = file.resizing.write().unwrap_or_else(PoisonError::into_inner);
        file.wait_for_writes();
        let len = match file.io.len() {
            Ok(len) => len,
            Err(error) => {
                self.shared.give_room_back(1);
                return Err(error);
            }
        };
        let stored = file.stored.swap(len, Release);
        if len < file.len() && file.len() <= stored {
            file.size.store(len, Release);
            self.cut(len, Some(spare))?;
            return Ok(len);
        }
        if len > file.len() {
            self.forget(stored / PAGE_SIZE as u64);
            file.size.store(len, Release);
        }
        self.shared.give_room_back(1);
        Ok(len)
    }
}
