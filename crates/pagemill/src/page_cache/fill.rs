//! Reading pages in: the holes of a window are allocated by one request, and read by one vectored read for each run.
//!
//! The folios are in the index before the read begins, locked and not up to date. So other readers of these pages find
//! them and wait: each page is read once. Whoever completes the transfer unlocks them, or takes them out of the index
//! if the read failed (C8.5).
use super::backing::ReadTransfer;
use super::cached::{Cached, no_memory, pieces};
use super::folio::{AHEAD, ALONE, ATTACHED, EXCLUSIVE, FAILED, LOCKED, MARKER, Number, State, UPTODATE};
use super::mapping::{byte_of, pages_for};
use super::shared::Pinned;
use super::stats::add;
use super::workers::Urgency;
use crate::handle::Page;
use crate::handle::sealed::Word;
use crate::run::Run;
use core::ops::Range;
use core::sync::atomic::Ordering::Acquire;
use pagemill_core::PAGE_SIZE;
use std::io;

/// The most pages of one read: 1 MiB. Disks deliver no more by larger ones, and the pieces of a window arrive one after
/// another: a reader goes on with the first, and a thread begins the next window's while the last is on its way. Whole
/// windows of two streams at once would arrive together, and leave the disk idle while the reader copies both.
const READ_MAX: usize = 256;

/// What is to be read.
pub(super) struct Fetch {
    /// Pages, up to the file's end.
    pub(super) window: Range<u64>,
    /// The page that gets the marker, if it is a hole.
    pub(super) marker: Option<u64>,
    /// The pages that were asked for. All others are read ahead.
    pub(super) asked: Range<u64>,
    /// The caller waits for the window's first page.
    pub(super) is_awaited: bool,
}

impl Fetch {
    /// One page, which the caller waits for.
    pub(super) fn page(at: u64) -> Self {
        Self { window: at..at + 1, marker: None, asked: at..at + 1, is_awaited: true }
    }
}

/// What has begun.
pub(super) struct Fetched<'c> {
    /// The number of the window's pages, from its start on, that are now in the cache or on their way.
    pub(super) covered: u64,
    /// The page that the caller waits for, if this fetch has put it into the cache. Its read has ended, maybe with an
    /// error.
    pub(super) awaited: Option<Pinned<'c>>,
}

/// A run of folios that were put into the index together.
struct Begun {
    at: u64,
    numbers: Vec<Number>,
    /// The backing has nothing there.
    is_zero: bool,
}

impl Cached {
    /// Begins to read the holes of a window.
    ///
    /// # Errors
    /// There is no memory for the page that the caller waits for.
    pub(super) fn fetch(&self, fetch: &Fetch) -> io::Result<Fetched<'_>> {
        let (window, index) = (&fetch.window, &self.file.index);
        let holes = holes(window, |at, max| index.next_hole(at, max), |at, max| index.next_present(at, max));
        if holes == 0 {
            return Ok(Fetched { covered: window.end - window.start, awaited: None });
        }
        let mut runs = Vec::new();
        let got = self.memory_for(holes, fetch.is_awaited, &mut runs)?;
        let (begun, covered) = self.attach(fetch, got, runs);
        let first = begun.first().filter(|run| fetch.is_awaited && run.at == window.start);
        let awaited = first.map(|run| {
            let number = run.numbers[0];
            let folio = self.shared.folios.get(number);
            // The transfer's pin is there still.
            folio.pin();
            Pinned { shared: &self.shared, folio, number }
        });
        let counts = self.shared.counters.here();
        add(&counts.windows, 1);
        add(&counts.windows_marked, usize::from(!fetch.is_awaited));
        add(&counts.windows_shortened, usize::from(got < holes));
        for run in &begun {
            let pages = (run.at..).zip(run.numbers.iter().copied());
            self.shared.enqueue(self.file.number, pages);
        }
        self.start(begun, fetch);
        self.shared.under_way.end();
        Ok(Fetched { covered, awaited })
    }

    /// Pages for some of these holes: as many as there is memory for, and one at least if a reader waits for it. Unless it
    /// fails, they count as a read under way, which the caller ends.
    fn memory_for(&self, holes: usize, is_awaited: bool, runs: &mut Vec<Run<Page>>) -> io::Result<usize> {
        self.shared.under_way.begin();
        let granted = self.shared.make_room(holes);
        let got = if granted > 0 { self.shared.pages_for(granted, runs) } else { 0 };
        self.shared.give_room_back(granted - got);
        if got > 0 || !is_awaited {
            return Ok(got);
        }
        // This one may reclaim and wait, and has dirty pages written to make room. It does not wait for itself.
        self.shared.under_way.end();
        self.make_room_hard(1)?;
        match self.shared.page() {
            Ok(page) => {
                self.shared.under_way.begin();
                runs.push(Run::of_page(page.into_word()));
            }
            Err(error) => {
                self.shared.give_room_back(1);
                return Err(no_memory(error));
            }
        }
        Ok(1)
    }

    /// Puts `got` pages into the window's holes. Returns the runs, and up to where the window has no holes any more,
    /// counted from its start.
    fn attach(&self, fetch: &Fetch, got: usize, runs: Vec<Run<Page>>) -> (Vec<Begun>, u64) {
        let mut pages = runs.into_iter().flat_map(Run::into_pages);
        let mut numbers = Vec::with_capacity(got);
        let mut left = self.shared.folios.take(got, &mut numbers);
        let mut begun = Vec::new();
        let file = &*self.file;
        let mut index = file.index.lock();
        // A change of the length is seen here, or sees the pages that are put here (`resize.rs`).
        let window = fetch.window.start..fetch.window.end.min(pages_for(file.len()));
        // Acquire pairs with the Release of whoever stores pages. Nothing of the file's is behind it, and a page that
        // is stored later is dirty now, so it is no hole.
        let stored = pages_for(file.stored.load(Acquire));
        let mut at = window.start;
        let alone = if left == 1 { ALONE } else { 0 };
        while left > 0 && at < window.end {
            at = file.index.next_hole(at, window.end - at);
            if at >= window.end {
                break;
            }
            let end = file.index.next_present(at, window.end - at);
            let end = if at < stored { end.min(stored) } else { end };
            let n = left.min((end - at) as usize).min(READ_MAX);
            let run = numbers.split_off(numbers.len() - n);
            left -= n;
            for (at, &number) in (at..).zip(&run) {
                let Some(mut page) = pages.next() else { unreachable!("as many pages as numbers") };
                let ahead = if fetch.asked.contains(&at) { 0 } else { AHEAD };
                let marker = if fetch.marker == Some(at) { MARKER } else { 0 };
                let filled = if at < stored {
                    LOCKED
                } else {
                    page.fill(0);
                    UPTODATE
                };
                self.shared.folios.begin(number, page, file.number, at, ATTACHED | filled | ahead | marker | alone);
            }
            index.insert_run(at, &run).unwrap_or_else(|_| unreachable!("they are holes, and the index is locked"));
            begun.push(Begun { at, numbers: run, is_zero: at >= stored });
            at += n as u64;
        }
        drop(index);
        // What others have read meanwhile, or what there is no folio for.
        let spare: Vec<Page> = pages.collect();
        self.shared.give_room_back(spare.len());
        self.shared.folios.put_back(&numbers);
        (begun, at.min(window.end).saturating_sub(window.start))
    }

    /// Begins the transfers of these runs. The one that a reader waits for is made on this thread, as the last.
    fn start(&self, begun: Vec<Begun>, fetch: &Fetch) {
        let mut here = None;
        for run in begun {
            if run.is_zero {
                for &number in &run.numbers {
                    self.shared.unpin(number, self.shared.folios.get(number), 1);
                }
                continue;
            }
            let counts = self.shared.counters.here();
            add(&counts.reads, 1);
            add(&counts.read, run.numbers.len());
            let ahead = (run.at..).take(run.numbers.len()).filter(|at| !fetch.asked.contains(at)).count();
            add(&counts.read_ahead, ahead);
            let is_asked = ahead < run.numbers.len();
            let is_awaited = fetch.is_awaited && run.at == fetch.window.start;
            let transfer = self.transfer(run);
            if is_awaited {
                here = Some(transfer);
            } else {
                // What was asked for will be waited for soon.
                self.file.io.read(transfer, if is_asked { Urgency::Awaited } else { Urgency::Ahead });
            }
        }
        if let Some(transfer) = here {
            self.file.io.read_here(transfer);
        }
    }

    fn transfer(&self, run: Begun) -> ReadTransfer {
        let folio = |&number: &Number| self.shared.folios.get(number);
        let memory = pieces(run.numbers.iter().map(|number| folio(number).addr()));
        let (cached, at) = (self.clone(), run.at);
        // What the backing has now: a write may lengthen it before the answer comes.
        let stored = self.file.stored.load(Acquire);
        self.shared.under_way.begin();
        let done = Box::new(move |result| {
            cached.read_ended(at, &run.numbers, stored, result);
            cached.shared.under_way.end();
        });
        // SAFETY: the folios are locked and not up to date, so nothing else touches their pages before `read_ended`
        // unlocks them (L5); each has the transfer's pin, so no page is freed before (L3).
        unsafe { ReadTransfer::new(byte_of(at), memory, done) }
    }

    /// Ends a read of neighbouring pages, with how many bytes came.
    fn read_ended(&self, at: u64, numbers: &[Number], stored: u64, result: io::Result<usize>) {
        let bytes = match result {
            Ok(bytes) => bytes,
            Err(error) => return self.read_failed(at, numbers, error),
        };
        let whole = (bytes / PAGE_SIZE).min(numbers.len());
        let (filled, rest) = numbers.split_at(whole);
        filled.iter().for_each(|&number| self.unlock_read(number));
        if rest.is_empty() {
            return;
        }
        // Short: right only where the file ends. A page that is partly in the file ends with zeros.
        let end = byte_of(at) + bytes as u64;
        if end < stored.min(self.file.stored.load(Acquire)).min(self.file.len()) {
            let error = io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("the backing ends at byte {end}: it was cut by somebody else than this cache"),
            );
            return self.read_failed(at + whole as u64, rest, error);
        }
        for (i, &number) in rest.iter().enumerate() {
            let kept = if i == 0 { bytes % PAGE_SIZE } else { 0 };
            let page = self.shared.folios.get(number).as_ptr();
            // SAFETY: the page is the transfer's until it is unlocked, as in `transfer`.
            unsafe { page.add(kept).write_bytes(0, PAGE_SIZE - kept) };
            self.unlock_read(number);
        }
    }

    /// Lets others see a page that was read.
    fn unlock_read(&self, number: Number) {
        let folio = self.shared.folios.get(number);
        let before = folio.turn(UPTODATE, LOCKED, 0);
        self.shared.waits.wake(number, folio, before);
        self.shared.unpin(number, folio, 1);
    }

    /// Takes pages out of the cache that could not be read.
    fn read_failed(&self, at: u64, numbers: &[Number], error: io::Error) {
        add(&self.shared.counters.here().reads_failed, 1);
        self.file.read_failed(error);
        let mut index = self.file.index.lock();
        for (at, &number) in (at..).zip(numbers) {
            // With the lock (L2). If the file was cut meanwhile, it is off already.
            if self.shared.folios.get(number).clear(ATTACHED).has(ATTACHED) {
                index.remove(at);
            }
        }
        drop(index);
        for &number in numbers {
            let folio = self.shared.folios.get(number);
            let before = folio.turn(FAILED, LOCKED, 0);
            self.shared.waits.wake(number, folio, before);
            self.shared.unpin(number, folio, 1);
        }
    }

    /// Sleeps until a page that is being read, or changed, may be read. Returns whether it may: otherwise it is not in
    /// the file any more, and the caller looks again.
    ///
    /// # Errors
    /// The page could not be read.
    pub(super) fn wait_for_page(&self, page: &Pinned<'_>) -> io::Result<bool> {
        let is_over = |state: State| state.has(UPTODATE) && !state.has(EXCLUSIVE) || !state.has_any(LOCKED | EXCLUSIVE);
        let state = page.wait(is_over);
        match () {
            () if state.has(UPTODATE) => Ok(true),
            // If it was one page of many, another may be at fault.
            () if state.has(FAILED | ALONE) => Err(self.file.read_error()),
            () => Ok(false),
        }
    }
}

/// The number of holes in a range.
fn holes(range: &Range<u64>, next_hole: impl Fn(u64, u64) -> u64, next_present: impl Fn(u64, u64) -> u64) -> usize {
    let (mut at, mut holes) = (range.start, 0);
    while at < range.end {
        let hole = next_hole(at, range.end - at);
        if hole >= range.end {
            break;
        }
        at = next_present(hole, range.end - hole);
        holes += at - hole;
    }
    holes as usize
}
