//! The pages of one step of a copy, as an I/O vector.
//!
//! The bulk form takes all pages in one call. Its callback adds an entry to the vector for each page, or lengthens the last entry
//! if the page is its neighbour. The single form calls `alloc_page` for each page and builds the vector in the same way, so the two
//! differ only in the allocation.
use std::time::{Duration, Instant};

use libc::iovec;
use pagemill::{Allocator, Bulk, Error, Exhausted, Gfp, PAGE_SIZE, Page, free_pages_bulk};

use super::AllocForm;

/// The most entries that a system call takes (UIO_MAXIOV).
const ENTRIES_MAX: usize = 1024;

/// The pages of a whole copy.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub(crate) struct Tally {
    /// Calls of the allocator.
    #[serde(rename = "alloc_calls")]
    pub(crate) calls: u64,
    /// Pages that the calls returned.
    pub(crate) pages: u64,
    /// Entries of the I/O vectors.
    #[serde(rename = "iovec_entries")]
    pub(crate) entries: u64,
    /// Time for taking pages, building the vectors, and giving pages back.
    #[serde(skip)]
    pub(crate) time: Duration,
}

/// The pages of a step. `entries` covers `pages` in their order, neighbours merged.
#[derive(Default)]
pub(crate) struct Buffer {
    pages: Vec<Option<Page>>,
    entries: Vec<iovec>,
    /// The entries that the next system call gets.
    window: Vec<iovec>,
}

impl Buffer {
    /// Takes up to `want` pages, fewer if the allocator has fewer. Returns the bytes that they hold.
    ///
    /// # Errors
    /// If the allocator has no page.
    pub(crate) fn take(
        &mut self,
        allocator: &Allocator,
        form: AllocForm,
        want: usize,
        tally: &mut Tally,
    ) -> Result<usize, Error> {
        let start = Instant::now();
        let Self { pages, entries, .. } = self;
        debug_assert!(pages.is_empty());
        entries.clear();
        let mut keep = |mut page: Page| {
            let base = page.as_mut_ptr();
            match entries.last_mut() {
                Some(last) if last.iov_base as usize + last.iov_len == base as usize => last.iov_len += PAGE_SIZE,
                _ => entries.push(iovec { iov_base: base.cast(), iov_len: PAGE_SIZE }),
            }
            pages.push(Some(page));
        };
        match form {
            AllocForm::Bulk => {
                tally.calls += 1;
                let delivered = allocator.alloc_pages_bulk_callback(Bulk::up_to(want), &mut keep)?;
                if let (0, Some(shortfall)) = (delivered.blocks, delivered.shortfall) {
                    return Err(Exhausted { wanted: 1, got: 0, order: 0, why: shortfall.why }.into());
                }
            }
            AllocForm::Single => {
                for got in 0..want {
                    tally.calls += 1;
                    match allocator.alloc_page(Gfp::KERNEL) {
                        Ok(page) => keep(page),
                        // As in bulk, fewer pages make a shorter step.
                        Err(_) if got > 0 => break,
                        Err(error) => return Err(error),
                    }
                }
            }
        }
        tally.pages += self.pages.len() as u64;
        tally.entries += self.entries.len() as u64;
        tally.time += start.elapsed();
        Ok(self.pages.len() * PAGE_SIZE)
    }

    /// Gives the pages back: all at once, or one by one.
    pub(crate) fn give_back(&mut self, form: AllocForm, tally: &mut Tally) {
        let start = Instant::now();
        self.entries.clear();
        self.window.clear();
        if form == AllocForm::Bulk {
            free_pages_bulk(&mut self.pages);
        }
        // The single form has freed nothing yet: this frees the pages one by one.
        self.pages.clear();
        tally.time += start.elapsed();
    }

    /// The vector for the bytes from `from` to `to` of this buffer, or for as many as one system call takes. It is valid until the
    /// next call of this function or of `give_back`.
    pub(crate) fn window(&mut self, from: usize, to: usize) -> &[iovec] {
        self.window.clear();
        let mut start = 0;
        for entry in &self.entries {
            let end = start + entry.iov_len;
            let (first, last) = (start.max(from), end.min(to));
            if first < last {
                let iov_base = entry.iov_base.cast::<u8>().wrapping_add(first - start).cast();
                self.window.push(iovec { iov_base, iov_len: last - first });
            }
            start = end;
            if start >= to || self.window.len() == ENTRIES_MAX {
                break;
            }
        }
        &self.window
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(window: &[iovec]) -> usize {
        window.iter().map(|entry| entry.iov_len).sum()
    }

    #[test]
    fn a_window_covers_exactly_the_bytes_from_start_to_end() {
        let allocator = Allocator::builder().pages(4096).build().unwrap();
        for form in [AllocForm::Bulk, AllocForm::Single] {
            let (mut buffer, mut tally) = (Buffer::default(), Tally::default());
            assert_eq!(buffer.take(&allocator, form, 8, &mut tally).unwrap(), 8 * PAGE_SIZE);
            assert_eq!((tally.pages, tally.calls), (8, if form == AllocForm::Bulk { 1 } else { 8 }));
            assert_eq!(bytes(buffer.window(0, 8 * PAGE_SIZE)), 8 * PAGE_SIZE);
            assert_eq!(bytes(buffer.window(0, 1)), 1);
            assert_eq!(bytes(buffer.window(4095, 4097)), 2);
            assert_eq!(bytes(buffer.window(3 * PAGE_SIZE + 7, 8 * PAGE_SIZE - 1)), 5 * PAGE_SIZE - 8);
            assert!(buffer.window(PAGE_SIZE, PAGE_SIZE).is_empty());
            let whole = buffer.window(0, 8 * PAGE_SIZE)[0].iov_base as usize;
            assert_eq!(buffer.window(10, 20)[0].iov_base as usize, whole + 10);
            buffer.give_back(form, &mut tally);
            assert!(buffer.window(0, PAGE_SIZE).is_empty());
        }
        assert_eq!(allocator.validate().unwrap().handed_out, 0);
    }

    #[test]
    fn a_window_has_no_more_entries_than_a_system_call_takes() {
        let allocator = Allocator::builder().pages(8192).build().unwrap();
        let (mut buffer, mut tally) = (Buffer::default(), Tally::default());
        buffer.take(&allocator, AllocForm::Bulk, 2048, &mut tally).unwrap();
        // An entry for each page, as if no two were neighbours.
        buffer.entries = (buffer.pages.iter_mut().flatten())
            .map(|page| iovec { iov_base: page.as_mut_ptr().cast(), iov_len: PAGE_SIZE })
            .collect();
        let all = 2048 * PAGE_SIZE;
        assert_eq!(bytes(buffer.window(0, all)), ENTRIES_MAX * PAGE_SIZE);
        assert_eq!(bytes(buffer.window(1500 * PAGE_SIZE, all)), 548 * PAGE_SIZE);
        buffer.give_back(AllocForm::Bulk, &mut tally);
    }

    #[test]
    fn too_few_pages_shorten_the_step_and_none_is_an_error() {
        let allocator = Allocator::builder().pages(10).build().unwrap();
        for form in [AllocForm::Bulk, AllocForm::Single] {
            let (mut all, mut none, mut tally) = (Buffer::default(), Buffer::default(), Tally::default());
            assert_eq!(all.take(&allocator, form, 64, &mut tally).unwrap(), 10 * PAGE_SIZE);
            assert!(matches!(none.take(&allocator, form, 64, &mut tally), Err(Error::Exhausted(_))));
            all.give_back(form, &mut tally);
        }
    }
}
