//! What a connection received of its next record, and how requests are made of it.
//!
//! A record comes in fragments, a fragment in pieces of any size. The bytes before a WRITE's data, and all bytes of other
//! records, are gathered in `head`. A WRITE's data go to pages, the first byte to the beginning of the first page.
//!
//! # Invariants
//! - N1 `head` has at most [`SMALL_MAX`] bytes, and grows by bytes that came.
//! - N2 Between two records, nothing is kept but the capacity of `head`.
//! - N3 `data` has pages for the bytes that it got and no more, except while a thread receives.
use std::io::IoSliceMut;
use std::mem;
use std::ops::Range;

use pagemill::{PAGE_SIZE, Page};

use super::counters::Why;
use super::room::Reserved;
use crate::pages::{PageArray, SLOTS};
use crate::record::{self, DATA_MAX, Kind, MARK, Mark, RECORD_MAX, SMALL_MAX};

const _: () = assert!(SLOTS > DATA_MAX / PAGE_SIZE + 1);

/// The fewest bytes of a WRITE that has data, rounded down. So `n` bytes need no more than `n / WRITE_MIN` pages, and two for
/// a WRITE that they continue.
const WRITE_MIN: usize = 64;

/// A record that has begun must bring so many bytes, or its end, each time that a connection may be silent for: 4 KiB a second.
/// Bytes that come one by one do not keep it alive.
pub(super) const PROGRESS: usize = 128 << 10;

/// So much of `head` is kept for the next record.
const KEEP: usize = 1 << 10;

/// The pages that a thread takes from its array for the requests it receives: a prefix of it.
pub(super) struct Source<'a> {
    pub(super) array: &'a mut PageArray,
    /// Those taken since the array was full.
    pub(super) taken: &'a mut usize,
}

impl Source<'_> {
    pub(super) fn left(&self) -> usize {
        SLOTS - *self.taken
    }
    fn take(&mut self) -> Option<Page> {
        if self.left() == 0 {
            return None;
        }
        *self.taken += 1;
        self.array.payload(*self.taken * PAGE_SIZE).last_mut()?.take()
    }
    /// Puts a page back that was not used, the last one taken first.
    fn put_back(&mut self, page: Option<Page>) {
        if let Some(slot) = self.array.payload(*self.taken * PAGE_SIZE).last_mut() {
            *slot = page;
            *self.taken -= 1;
        }
    }
    /// Fills holes with pages of a request that no longer needs them.
    pub(super) fn fill(&mut self, pages: Vec<Option<Page>>) {
        let mut pages = pages.into_iter().flatten().peekable();
        if *self.taken == 0 || pages.peek().is_none() {
            return;
        }
        for hole in self.array.payload(*self.taken * PAGE_SIZE).iter_mut().filter(|slot| slot.is_none()) {
            *hole = pages.next();
        }
    }
}

/// The data of a WRITE.
pub(super) struct Data {
    pub(super) pages: Vec<Option<Page>>,
    got: usize,
    pub(super) len: usize,
    /// Room for its pages, unless all its data came at once.
    pub(super) reserved: Option<Reserved>,
}

impl Data {
    pub(super) fn is_complete(&self) -> bool {
        self.got == self.len
    }
    pub(super) fn pages_needed(&self) -> usize {
        self.len.div_ceil(PAGE_SIZE)
    }
    /// Copies bytes to the pages. `None`: there was no page.
    fn copy(&mut self, mut bytes: &[u8], source: &mut Source<'_>) -> Option<()> {
        while !bytes.is_empty() {
            let (page, at) = (self.got / PAGE_SIZE, self.got % PAGE_SIZE);
            if page == self.pages.len() {
                self.pages.push(Some(source.take()?));
            }
            let (now, rest) = bytes.split_at(bytes.len().min(PAGE_SIZE - at));
            self.pages.last_mut()?.as_mut()?[at..at + now.len()].copy_from_slice(now);
            self.got += now.len();
            bytes = rest;
        }
        Some(())
    }
    fn add_pages(&mut self, bytes: usize, source: &mut Source<'_>) {
        let wanted = (self.got + bytes).div_ceil(PAGE_SIZE);
        self.pages.reserve_exact(wanted.saturating_sub(self.pages.len()).min(source.left()));
        while self.pages.len() < wanted
            && let Some(page) = source.take()
        {
            self.pages.push(Some(page));
        }
    }
    fn remove_pages(&mut self, source: &mut Source<'_>) {
        while self.pages.len() > self.got.div_ceil(PAGE_SIZE) {
            source.put_back(self.pages.pop().flatten());
        }
    }
    fn bytes_of_pages(&self) -> usize {
        self.pages.len() * PAGE_SIZE - self.got
    }
}

/// A request that was received whole.
pub(super) struct Received {
    /// The record, in the batch's bytes; without its data if it is a WRITE.
    pub(super) record: Range<usize>,
    pub(super) data: Option<Data>,
    /// It is a WRITE that ends before its data, or lacks the padding.
    pub(super) is_cut: bool,
    /// The most bytes that its reply may have, if they are many.
    pub(super) asks: usize,
}

/// The requests that a thread received at once.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) bytes: Vec<u8>,
    pub(super) requests: Vec<Received>,
}

#[derive(Default)]
pub(super) struct Input {
    mark: [u8; MARK],
    mark_len: usize,
    /// Bytes of the fragment that are still to come.
    left: usize,
    is_last: bool,
    /// The length of the record, as far as its fragments say.
    announced: usize,
    head: Vec<u8>,
    /// Whether `head` cannot be that of a WRITE.
    is_small: bool,
    pub(super) data: Option<Data>,
    /// Bytes after the data: padding.
    after: usize,
    /// It gets more time once so many bytes of the record came.
    due: usize,
}

impl Input {
    /// Whether a record has begun.
    pub(super) fn is_within_record(&self) -> bool {
        self.mark_len > 0 || self.announced > 0
    }
    /// Whether a record has begun, or has brought [`PROGRESS`] since this was last so.
    pub(super) fn has_progressed(&mut self) -> bool {
        let came = self.announced - self.left;
        let is_due = came >= self.due;
        if is_due {
            self.due = came + PROGRESS;
        }
        is_due
    }
    /// Bytes without which the WRITE that is being received cannot be finished, if it has no room.
    pub(super) fn missing_without_room(&self) -> Option<usize> {
        self.data.as_ref().filter(|data| data.reserved.is_none()).map(|data| data.len - data.got)
    }
    /// Data that can be received into pages: how many bytes come next, in this fragment.
    pub(super) fn direct(&self) -> usize {
        self.data.as_ref().map_or(0, |data| self.left.min(data.len - data.got))
    }

    /// Takes bytes that came. Whole requests go to the batch.
    pub(super) fn take(&mut self, mut bytes: &[u8], batch: &mut Batch, source: &mut Source<'_>) -> Result<(), Why> {
        while !bytes.is_empty() {
            if self.left == 0 {
                let (now, rest) = bytes.split_at(bytes.len().min(MARK - self.mark_len));
                self.mark[self.mark_len..self.mark_len + now.len()].copy_from_slice(now);
                self.mark_len += now.len();
                bytes = rest;
                if self.mark_len == MARK {
                    self.begin_fragment()?;
                }
            } else {
                let (now, rest) = bytes.split_at(bytes.len().min(self.left));
                self.left -= now.len();
                bytes = rest;
                self.take_of_record(now, source)?;
            }
            self.end_record(batch)?;
        }
        Ok(())
    }

    fn begin_fragment(&mut self) -> Result<(), Why> {
        let mark = Mark::new(self.mark);
        self.mark_len = 0;
        self.announced += mark.len;
        if self.announced > RECORD_MAX {
            return Err(Why::TooLong);
        }
        (self.left, self.is_last) = (mark.len, mark.is_last);
        // No call is without a byte, and no client begins one with a fragment without a byte.
        if self.announced == 0 { Err(Why::Malformed) } else { Ok(()) }
    }

    fn take_of_record(&mut self, bytes: &[u8], source: &mut Source<'_>) -> Result<(), Why> {
        // Cannot happen: a batch brings no more data than the array has pages for.
        let no_page = Why::Broken;
        if let Some(data) = &mut self.data {
            let (now, rest) = bytes.split_at(bytes.len().min(data.len - data.got));
            data.copy(now, source).ok_or(no_page)?;
            self.after += rest.len();
            return if self.after > record::padding(data.len) { Err(Why::Malformed) } else { Ok(()) };
        }
        self.head.extend_from_slice(bytes);
        if !self.is_small {
            let record_len = self.is_last.then_some(self.announced);
            match record::kind(&self.head, record_len) {
                Kind::Undecided => return Ok(()),
                Kind::Small => self.is_small = true,
                Kind::Write { at, len } => {
                    let rest = self.head.split_off(at);
                    self.data = Some(Data { pages: Vec::new(), got: 0, len, reserved: None });
                    return self.take_of_record(&rest, source);
                }
            }
        }
        if self.head.len().max(self.announced) > SMALL_MAX { Err(Why::TooLong) } else { Ok(()) }
    }

    /// Makes a request of the record if all of it came.
    fn end_record(&mut self, batch: &mut Batch) -> Result<(), Why> {
        if self.left > 0 || !self.is_last || self.mark_len > 0 || self.announced == 0 {
            return Ok(());
        }
        if !record::is_call(&self.head) {
            return Err(Why::Malformed);
        }
        let start = batch.bytes.len();
        batch.bytes.extend_from_slice(&self.head);
        let mut data = self.data.take();
        let is_cut = data.as_ref().is_some_and(|data| !data.is_complete() || self.after != record::padding(data.len));
        if let Some(data) = &mut data {
            data.reserved = None; // It is the thread's now.
        }
        let asks = record::asks(&self.head);
        batch.requests.push(Received { record: start..batch.bytes.len(), data, is_cut, asks });
        let mut head = mem::take(&mut self.head);
        head.clear();
        head.shrink_to(KEEP);
        *self = Self { head, ..Self::default() };
        Ok(())
    }

    /// Where the next bytes go: to the pages of the WRITE, and then to `tail`. Returns how many go to pages.
    pub(super) fn receive_into<'a>(
        &'a mut self,
        tail: &'a mut [u8],
        source: &mut Source<'_>,
        slices: &mut Vec<IoSliceMut<'a>>,
    ) -> usize {
        let direct = self.direct();
        let Some(data) = &mut self.data else { return 0 };
        data.add_pages(direct, source);
        let direct = direct.min(data.bytes_of_pages());
        let tail_len = tail.len().min(source.left().saturating_sub(2) * WRITE_MIN);
        slices.reserve_exact(direct.div_ceil(PAGE_SIZE) + 2);
        let (mut at, mut rest) = (data.got % PAGE_SIZE, direct);
        for page in data.pages[data.got / PAGE_SIZE..].iter_mut().flatten() {
            let end = PAGE_SIZE.min(at + rest);
            rest -= end - at;
            slices.push(IoSliceMut::new(&mut page[at..end]));
            at = 0;
        }
        slices.push(IoSliceMut::new(&mut tail[..tail_len]));
        direct
    }
    /// So many bytes came to the pages.
    pub(super) fn received(&mut self, direct: usize, batch: &mut Batch) -> Result<(), Why> {
        if let Some(data) = &mut self.data {
            data.got += direct;
            self.left -= direct;
        }
        self.end_record(batch)
    }
    /// Gives the pages back that no byte came to (N3).
    pub(super) fn trim(&mut self, source: &mut Source<'_>) {
        if let Some(data) = &mut self.data {
            data.remove_pages(source);
        }
    }
}

/// What an input makes of a stream, received in pieces of some size. It must not depend on that size, nor panic.
#[cfg(any(test, fuzzing))]
pub(crate) fn check_stream(stream: &[u8], array: &mut PageArray) {
    let mut whole = None;
    for size in [1024, 1, 7, 64] {
        let mut input = Input::default();
        let (mut requests, mut ended) = (Vec::new(), None);
        for piece in stream.chunks(size) {
            let mut batch = Batch::default();
            let mut taken = 0;
            let _ = array.refill(&pagemill::Cancel::new());
            let mut source = Source { array, taken: &mut taken };
            ended = input.take(piece, &mut batch, &mut source).err();
            assert!(source.left() > 0 && input.head.len() <= SMALL_MAX);
            for Received { record, data, is_cut, .. } in batch.requests {
                let data = data.map(|data| {
                    assert!(data.pages.len() == data.got.div_ceil(PAGE_SIZE) && data.got <= data.len);
                    let bytes: Vec<u8> = data.pages.iter().flatten().flat_map(|page| page.iter().copied()).collect();
                    bytes[..data.got].to_vec()
                });
                requests.push((batch.bytes[record].to_vec(), data, is_cut));
            }
            if ended.is_some() {
                break;
            }
        }
        let result = (requests, ended, input.is_within_record());
        let expected = whole.get_or_insert_with(|| result.clone());
        assert!(*expected == result, "pieces of {size} make {result:?}, and not {expected:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::{call, write_args};
    use pagemill::Allocator;
    use std::sync::Arc;

    fn fragment(bytes: &[u8], is_last: bool) -> Vec<u8> {
        [&(bytes.len() as u32 | u32::from(is_last) << 31).to_be_bytes(), bytes].concat()
    }

    #[test]
    fn sizes_of_pieces_make_no_difference_to_hostile_streams() {
        let mut rng = 7_u64;
        let mut random = move |n: usize| {
            rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (rng >> 33) as usize % n
        };
        let mut array = PageArray::new(&Allocator::builder().pages(2048).build().unwrap(), Arc::default());
        for _ in 0..3000 {
            let mut stream = Vec::new();
            for xid in 0..1 + random(12) {
                let data = vec![xid as u8; [0, 1, 3, 50, 1000, 5000][random(6)]];
                let procedure = [1, 7, 7][random(3)];
                let record = call(xid as u32, procedure, &write_args(&data));
                let cut = if random(8) == 0 { random(record.len() + 1) } else { record.len() };
                let (first, rest) = record.split_at(cut);
                if cut < record.len() || random(6) == 0 {
                    stream.extend(fragment(first, false));
                }
                // Without the first part it is a record that begins anywhere.
                if random(10) > 0 || cut == record.len() {
                    stream.extend(fragment(if cut == record.len() { &record } else { rest }, true));
                }
            }
            for _ in 0..random(3) {
                let at = random(stream.len());
                stream[at] = [0, 1, 4, 64, 127, 128, 255][random(7)];
            }
            check_stream(&stream, &mut array);
        }
    }
}
