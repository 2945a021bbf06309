//! The bytes of one part of a request: pages anywhere in memory, or one stretch of the heap.
//!
//! Both are seen as runs of contiguous bytes, so that the cipher and the system are called once for each run. All runs
//! but the last have a multiple of a page's size, so no sector crosses from one run into the next.
//!
//! Invariant: a client's bytes are zeroed before their memory goes back to anybody (B1). A buffer counts the bytes at its
//! start that are zeroed or encrypted already, so that each byte is zeroed once, when it was just used.
use std::alloc::{self, Layout};
use std::io::{IoSlice, IoSliceMut};
use std::ops::{Deref, DerefMut, Range};
use std::ptr::{self, NonNull};

use pagemill::{PAGE_SIZE, Page};
use zeroize::Zeroize;

/// The owner that a buffer goes back to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// The pool. Its pages are held while the disk works, and not while waiting for a client.
    Pool,
    /// The allocator, or the heap.
    Free,
    /// Its connection, which keeps one buffer for when there are no pages.
    Connection,
}

/// Bytes of a request, owned.
#[derive(Debug)]
pub struct Buffer {
    /// No slot is empty.
    pub(super) pages: Vec<Option<Page>>,
    stretch: Option<Stretch>,
    runs: Vec<Run>,
    len: usize,
    /// Bytes at its start that are no client's: zeroed, or encrypted.
    clean: usize,
    pub(super) origin: Origin,
}

/// Contiguous bytes in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) addr: usize,
    pub(super) len: usize,
}

impl Buffer {
    /// The first `len` bytes of `pages`, which are exactly as many as needed.
    pub(super) fn of_pages(pages: Vec<Option<Page>>, len: usize, origin: Origin) -> Self {
        assert_eq!(pages.iter().flatten().count(), len.div_ceil(PAGE_SIZE), "a buffer of {len} bytes");
        let mut buffer = Self { pages, stretch: None, runs: Vec::new(), len: 0, clean: 0, origin };
        buffer.set_len(len);
        buffer
    }

    /// The first `len` bytes of pages that the caller allocated, exactly as many as needed.
    ///
    /// # Panics
    /// If there are more or fewer pages.
    #[must_use]
    pub fn over(pages: Vec<Option<Page>>, len: usize) -> Self {
        Self::of_pages(pages, len, Origin::Free)
    }

    /// The pages of a buffer, to be freed by the caller. Plain bytes in them are zeroed.
    #[must_use]
    pub fn into_pages(mut self) -> Vec<Option<Page>> {
        self.wipe(self.len);
        std::mem::take(&mut self.pages)
    }

    /// A stretch of the heap that begins on a page; `None` if there is no memory.
    pub(super) fn of_heap(len: usize, origin: Origin) -> Option<Self> {
        let stretch = Some(Stretch::new(len)?);
        let mut buffer = Self { pages: Vec::new(), stretch, runs: Vec::new(), len: 0, clean: 0, origin };
        buffer.set_len(len);
        Some(buffer)
    }

    /// An empty buffer.
    pub(super) fn none() -> Self {
        Self { pages: Vec::new(), stretch: None, runs: Vec::new(), len: 0, clean: 0, origin: Origin::Free }
    }

    /// Resizes it to the first `len` bytes of its memory, none of which are a client's yet.
    pub(super) fn set_len(&mut self, len: usize) {
        let owned = self.stretch.as_ref().map_or(self.pages.len() * PAGE_SIZE, |stretch| stretch.len);
        assert!(len <= owned, "{len} bytes of a buffer of {owned}");
        (self.len, self.clean) = (len, 0);
        self.runs.clear();
        if let Some(stretch) = &self.stretch {
            self.runs.push(Run { addr: stretch.start.as_ptr().expose_provenance(), len });
            return;
        }
        let mut left = len;
        for page in self.pages.iter().flatten() {
            if left == 0 {
                break;
            }
            let bytes = left.min(PAGE_SIZE);
            left -= bytes;
            match self.runs.last_mut() {
                Some(last) if last.addr + last.len == page.addr() => last.len += bytes,
                _ => self.runs.push(Run { addr: page.addr(), len: bytes }),
            }
        }
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a buffer of a request is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Its bytes, run by run.
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        self.range(0..self.len)
    }

    /// Its bytes, run by run, to be written.
    pub fn slices_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.range_mut(0..self.len)
    }

    /// The bytes of `range`, run by run.
    pub(super) fn range(&self, range: Range<usize>) -> impl Iterator<Item = &[u8]> {
        // SAFETY: a run lies within pages or a stretch that this buffer owns, mapped and initialised, and whose addresses
        // are exposed; neighbouring pages are of one mapping. It is borrowed, so nobody writes to them.
        let bytes = |run: Run| unsafe { std::slice::from_raw_parts(ptr::with_exposed_provenance(run.addr), run.len) };
        self.runs_in(range).map(bytes)
    }

    /// The bytes of `range`, run by run, to be written.
    pub(super) fn range_mut(&mut self, range: Range<usize>) -> impl Iterator<Item = &mut [u8]> {
        self.runs_in(range).map(|run| {
            // SAFETY: as in `range`, borrowed exclusively, and runs do not overlap.
            unsafe { std::slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut(run.addr), run.len) }
        })
    }

    /// The parts of runs that lie in `range`.
    pub(super) fn runs_in(&self, range: Range<usize>) -> impl Iterator<Item = Run> {
        let mut end = 0;
        self.runs.iter().filter_map(move |run| {
            let start = end;
            end += run.len;
            let (from, to) = (range.start.max(start), range.end.min(end));
            (from < to).then(|| Run { addr: run.addr + (from - start), len: to - from })
        })
    }

    /// Bytes at its start that are no client's.
    pub(super) fn clean(&self) -> usize {
        self.clean
    }

    /// The first `len` bytes are encrypted.
    pub(super) fn note_encrypted(&mut self, len: usize) {
        self.clean = len;
    }

    /// Zeroes the first `len` bytes, as far as that is not done.
    pub(super) fn wipe(&mut self, len: usize) {
        if self.clean < len {
            self.range_mut(self.clean..len).for_each(|slice| slice.fill(0));
            self.clean = len;
        }
    }

    /// Adds the bytes from `from` on to a vector for the system, until it has `entries` entries.
    pub(super) fn window<'b>(&'b self, from: usize, entries: usize, vector: &mut Vec<IoSlice<'b>>) {
        let room = entries.saturating_sub(vector.len());
        vector.extend(self.range(from..self.len).take(room).map(IoSlice::new));
    }

    /// The same for bytes to be filled.
    pub(super) fn window_mut<'b>(&'b mut self, from: usize, entries: usize, vector: &mut Vec<IoSliceMut<'b>>) {
        let room = entries.saturating_sub(vector.len());
        vector.extend(self.range_mut(from..self.len).take(room).map(IoSliceMut::new));
    }

    /// Copies bytes out, from byte `at` on, as many as `bytes` has.
    pub(super) fn copy_out(&self, at: usize, mut bytes: &mut [u8]) {
        for place in self.range(at..at + bytes.len()) {
            let (now, later) = bytes.split_at_mut(place.len());
            now.copy_from_slice(place);
            bytes = later;
        }
        assert!(bytes.is_empty(), "{} bytes too many", bytes.len());
    }

    /// Copies `bytes` in, from byte `at` on.
    pub(super) fn copy_in(&mut self, at: usize, mut bytes: &[u8]) {
        for place in self.range_mut(at..at + bytes.len()) {
            let (now, later) = bytes.split_at(place.len());
            place.copy_from_slice(now);
            bytes = later;
        }
        assert!(bytes.is_empty(), "{} bytes too many", bytes.len());
    }
}

impl Drop for Buffer {
    /// B1, however it ends.
    fn drop(&mut self) {
        self.wipe(self.len);
    }
}

/// Zeroed memory of the heap, of whole pages that core dumps leave out. It is zeroed again when it is dropped.
#[derive(Debug)]
pub(super) struct Stretch {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: it owns its bytes alone, as a `Vec<u8>` would.
unsafe impl Send for Stretch {}

impl Stretch {
    pub(super) fn new(len: usize) -> Option<Self> {
        let layout = Self::layout(len)?;
        // SAFETY: the layout's size is not 0.
        let start = NonNull::new(unsafe { alloc::alloc_zeroed(layout) })?;
        // SAFETY: the range was just allocated, and advice changes no byte of it.
        unsafe { libc::madvise(start.as_ptr().cast(), layout.size(), libc::MADV_DONTDUMP) };
        Some(Self { start, len })
    }

    fn layout(len: usize) -> Option<Layout> {
        Layout::from_size_align(len.max(1).checked_next_multiple_of(PAGE_SIZE)?, PAGE_SIZE).ok()
    }
}

impl Deref for Stretch {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: initialised bytes of its own, borrowed.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Stretch {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Stretch {
    fn drop(&mut self) {
        let Some(layout) = Self::layout(self.len) else { unreachable!("it was made with this layout") };
        // Not by `fill`, which the compiler may leave out: it knows that the memory ends here.
        self.zeroize();
        // SAFETY: it came from `alloc_zeroed` with this layout, and nobody has it any more.
        unsafe {
            // The heap may use the pages again, so core dumps include them.
            libc::madvise(self.start.as_ptr().cast(), layout.size(), libc::MADV_DODUMP);
            alloc::dealloc(self.start.as_ptr(), layout);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemill::{Allocator, Bulk};

    fn buffers(len: usize) -> [Buffer; 2] {
        let allocator = Allocator::builder().pages(64).build().unwrap();
        let mut pages: Vec<_> = std::iter::repeat_with(|| None).take(2 * len.div_ceil(PAGE_SIZE)).collect();
        allocator.alloc_pages_bulk_array(Bulk::exact(pages.len()), &mut pages).unwrap();
        // Every other page, so that no two are neighbours.
        pages.sort_by_key(|page| page.as_ref().map(Page::addr));
        let pages = pages.into_iter().step_by(2).collect();
        [Buffer::of_pages(pages, len, Origin::Free), Buffer::of_heap(len, Origin::Free).unwrap()]
    }

    #[test]
    fn buffers_keep_order_and_windows_cover_the_rest() {
        for (mut buffer, runs) in buffers(9000).into_iter().zip([3, 1]) {
            let bytes: Vec<u8> = (0..9000u32).map(|i| (i % 251) as u8).collect();
            buffer.copy_in(0, &bytes[..4000]);
            buffer.copy_in(4000, &bytes[4000..]);
            assert_eq!(buffer.slices().count(), runs);
            assert!(buffer.slices().flatten().eq(&bytes));
            for from in [0, 1, 4095, 4096, 8192, 8999, 9000] {
                let mut vector = Vec::new();
                buffer.window(from, 9, &mut vector);
                assert!(vector.iter().flat_map(|slice| &**slice).eq(&bytes[from..]), "from {from}");
                let mut vector = Vec::new();
                buffer.window_mut(from, 9, &mut vector);
                assert_eq!(vector.iter().map(|slice| slice.len()).sum::<usize>(), 9000 - from);
                for to in [from, from + 1, 4096, 8191, 9000].into_iter().filter(|&to| to >= from && to <= 9000) {
                    assert!(buffer.range_mut(from..to).flat_map(|slice| &*slice).eq(&bytes[from..to]), "{from}..{to}");
                }
            }
            let mut vector = Vec::new();
            buffer.window(5000, 1, &mut vector);
            assert_eq!(vector.len(), 1);
            buffer.set_len(512);
            assert!(buffer.slices().flatten().eq(&bytes[..512]));
        }
    }

    #[test]
    fn plain_bytes_are_zeroed_once_and_encrypted_bytes_stay() {
        for mut buffer in buffers(9000) {
            buffer.copy_in(0, &[7; 9000]);
            buffer.note_encrypted(4096);
            buffer.wipe(5000);
            let expected = |at: usize| if (4096..5000).contains(&at) { 0 } else { 7 };
            assert!(buffer.slices().flatten().enumerate().all(|(at, &byte)| byte == expected(at)));
            buffer.wipe(4000);
            assert_eq!(buffer.clean(), 5000);
            // The next request's bytes are a client's again.
            buffer.set_len(9000);
            buffer.copy_in(0, &[7; 9000]);
            buffer.wipe(9000);
            assert!(buffer.slices().flatten().all(|&byte| byte == 0));
            buffer.set_len(9000);
            buffer.copy_in(0, &[7; 4096]);
            buffer.note_encrypted(4096);
            for (at, page) in buffer.into_pages().iter().flatten().enumerate() {
                assert!(page.iter().all(|&byte| byte == if at == 0 { 7 } else { 0 }), "page {at}");
            }
        }
    }

    #[test]
    fn a_buffer_that_is_dropped_leaves_no_plain_bytes_in_its_pages() {
        let allocator = Allocator::builder().pages(64).build().unwrap();
        let all = || -> Vec<Page> { std::iter::from_fn(|| allocator.alloc_page(pagemill::Gfp::NOWAIT).ok()).collect() };
        let count = all().len();
        assert!(count > 3);
        let pages = all().into_iter().map(Some).collect();
        let mut buffer = Buffer::of_pages(pages, count * PAGE_SIZE, Origin::Free);
        buffer.copy_in(0, &vec![7; count * PAGE_SIZE]);
        drop(buffer);
        let pages = all();
        assert_eq!(pages.len(), count);
        assert!(pages.iter().all(|page| page.iter().all(|&byte| byte == 0)));
    }

    #[test]
    fn neighbouring_pages_are_one_run() {
        let allocator = Allocator::builder().pages(64).build().unwrap();
        let pages = allocator.alloc_pages(pagemill::Gfp::KERNEL, pagemill::Order::new(2).unwrap()).unwrap().split();
        let buffer = Buffer::of_pages(pages.map(Some).collect(), 4 * PAGE_SIZE, Origin::Free);
        assert_eq!(buffer.slices().map(<[u8]>::len).collect::<Vec<_>>(), [4 * PAGE_SIZE]);
    }
}
