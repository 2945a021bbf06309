//! Writing whole pages that the caller has: they move into the cache, and no byte is copied.
//!
//! A page that comes takes a hole, as a fresh page of `write.rs` does, or the place of an old page, as a copy does there. So
//! an old page that is lent or on its way to the backing keeps its bytes, and goes when nobody has it any more. Where the
//! cache has no room for both pages at once, the bytes are copied into the old one.
//!
//! Behind the end of the last page's bytes are those of the old page, or zeros if the file ends there. A page inside of the
//! file of which only a part is written, and which is not in the cache, is read first.
use super::cached::{Cached, no_memory};
use super::fill::Fetch;
use super::shared::Pinned;
use super::stats::add;
use super::write::{AT_ONCE, Patch, check_end};
use super::writeback::Patience;
use crate::handle::Page;
use pagemill_core::PAGE_SIZE;
use std::io;

/// The pages that are to be written, up to the last one with bytes.
struct Given<'p> {
    pages: &'p mut [Option<Page>],
    /// How many bytes they have.
    len: usize,
    /// Where they go: the beginning of a page.
    at: u64,
}

impl Given<'_> {
    /// The first page in the file that they go to.
    fn first(&self) -> u64 {
        self.at / PAGE_SIZE as u64
    }
    /// The bytes of the first page.
    fn bytes(&self) -> &[u8] {
        let Some(page) = &self.pages[0] else { unreachable!("`write_pages` has looked for holes") };
        &page[..self.len.min(PAGE_SIZE)]
    }
    fn end(&self) -> u64 {
        self.at + self.len as u64
    }
    /// What is left behind so many bytes.
    fn after(&mut self, done: usize) -> Given<'_> {
        Given { pages: &mut self.pages[done / PAGE_SIZE..], len: self.len - done, at: self.at + done as u64 }
    }
}

impl Cached {
    /// Writes `len` bytes that lie in `pages`. Returns how many, if an error ends it after the first.
    pub(super) fn write_pages(&self, pages: &mut [Option<Page>], len: usize, at: u64) -> io::Result<usize> {
        check_end(at, len)?;
        if !at.is_multiple_of(PAGE_SIZE as u64) {
            return Err(invalid(format!("pages are written where a page begins, and byte {at} is inside of one")));
        }
        let wanted = len.div_ceil(PAGE_SIZE);
        let given = pages.get_mut(..wanted).filter(|pages| pages.iter().all(Option::is_some));
        let Some(pages) = given else {
            return Err(invalid(format!(
                "{len} bytes lie in {wanted} pages, and the array has fewer before its first hole"
            )));
        };
        // A foreign page would count towards the limit, and its eviction would give the cache's own allocator nothing.
        let is_own =
            |page: &Option<Page>| page.as_ref().is_some_and(|page| self.shared.allocator.has_address(page.addr()));
        let are_moved = pages.iter().all(is_own);
        let mut given = Given { pages, len, at };
        let mut done = 0;
        while done < len {
            let mut rest = given.after(done);
            let written = self.expect_written().and_then(|()| match are_moved {
                true => self.move_some(&mut rest),
                false => self.write(rest.bytes(), rest.at),
            });
            match written {
                Ok(written) => done += written,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
            // Only a copy ends within a page, as memory ends.
            if done < len && !done.is_multiple_of(PAGE_SIZE) {
                break;
            }
            self.throttle();
        }
        Ok(done)
    }

    /// Moves some pages, a run of them into holes or one into the place of another. Returns how many bytes they have.
    fn move_some(&self, given: &mut Given<'_>) -> io::Result<usize> {
        let _length = self.share_length(Patience::All);
        loop {
            if let Some(old) = self.locked(given.first()) {
                let bytes = given.len.min(PAGE_SIZE);
                if !self.put_over(&old, given) {
                    let patch = Patch { page: given.first(), start: 0, bytes: given.bytes() };
                    self.overwrite(old, &patch, true, None)?;
                }
                return Ok(bytes);
            }
            // A part of a page goes into a hole if the file ends there.
            if given.len >= PAGE_SIZE || given.end() >= self.file.len() {
                let written = self.put_into_holes(given)?;
                if written > 0 {
                    return Ok(written);
                }
                // Another thread has put a page there, or lengthened the file.
                self.wait_for_index();
                continue;
            }
            // The rest of the page is needed. Where it cannot be read, nothing has changed.
            let page = match self.find(given.first()) {
                Some(page) => Some(page),
                None => self.fetch(&Fetch::page(given.first()))?.awaited,
            };
            match page {
                Some(page) => _ = self.wait_for_page(&page)?,
                None => self.wait_for_index(),
            }
        }
    }

    /// Puts the first page in the place of one that this thread has locked, and unlocks that one. Returns whether there was
    /// room for both; if not, nothing has changed.
    fn put_over(&self, old: &Pinned<'_>, given: &mut Given<'_>) -> bool {
        if self.shared.make_room(1) == 0 {
            return false;
        }
        let mut numbers = Vec::with_capacity(1);
        if self.shared.folios.take(1, &mut numbers) == 0 {
            self.shared.give_room_back(1);
            return false;
        }
        let kept = given.len.min(PAGE_SIZE);
        let Some(mut page) = given.pages[0].take() else { unreachable!("`write_pages` has looked for holes") };
        // SAFETY: the page is up to date and pinned, and its writers are kept away by its lock.
        let bytes = unsafe { &*old.folio.as_ptr().cast::<[u8; PAGE_SIZE]>() };
        // Behind the file's end they are zeros.
        page[kept..].copy_from_slice(&bytes[kept..]);
        self.replace(old, numbers[0], page, given.at + kept as u64);
        true
    }

    /// Puts pages into the neighbouring holes from the first one on. Returns how many bytes they have: 0 if there is no such
    /// hole any more, or if the only page is not full, and the file does not end in it any more.
    fn put_into_holes(&self, given: &mut Given<'_>) -> io::Result<usize> {
        let index = &self.file.index;
        let first = given.first();
        let most = given.pages.len().min(AT_ONCE) as u64;
        let holes = (index.next_present(first, most) - first) as usize;
        if holes == 0 {
            return Ok(0);
        }
        let granted = self.room_for_some(holes)?;
        let mut numbers = Vec::with_capacity(granted);
        if self.shared.folios.take(granted, &mut numbers) == 0 {
            self.shared.give_room_back(granted);
            self.shared.under_way.end();
            return Err(no_memory("each page that the cache may have is lent"));
        }
        let mut written = given.len.min(numbers.len() * PAGE_SIZE);
        let kept = written % PAGE_SIZE;
        if kept > 0
            && let Some(last) = &mut given.pages[written / PAGE_SIZE]
        {
            last[kept..].fill(0);
        }
        let lock = index.lock();
        let holes = (index.next_present(first, numbers.len() as u64) - first) as usize;
        written = written.min(holes * PAGE_SIZE);
        // Zeros behind the end are right only if the file does not have more. Others may have lengthened it by now.
        if !written.is_multiple_of(PAGE_SIZE) && given.at + (written as u64) < self.file.len() {
            written -= kept;
        }
        let placed = written.div_ceil(PAGE_SIZE);
        let spare = numbers.split_off(placed);
        let pages = given.pages[..placed].iter_mut().filter_map(Option::take);
        self.attach_dirty(lock, first, &numbers, pages, given.at + written as u64);
        self.shared.give_room_back(granted - placed);
        self.shared.folios.put_back(&spare);
        self.shared.under_way.end();
        add(&self.shared.counters.here().misses, placed);
        Ok(written)
    }

    /// Room for up to `n` pages, and for one at least. The caller has something under way then, which it ends: others that lack
    /// room wait for it.
    fn room_for_some(&self, n: usize) -> io::Result<usize> {
        self.shared.under_way.begin();
        match self.shared.make_room(n) {
            0 => {
                // It does not wait for itself.
                self.shared.under_way.end();
                self.make_room_hard(1)?;
                self.shared.under_way.begin();
                Ok(1)
            }
            granted => Ok(granted),
        }
    }
}

#[cold]
fn invalid(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}
