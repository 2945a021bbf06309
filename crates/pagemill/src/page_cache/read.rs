//! Reading: cached pages are copied without a lock; a missing page is read in, and others ahead of the reader.
use super::cached::Cached;
use super::fill::Fetch;
use super::folio::{AHEAD, MARKER, Number, State};
use super::index::Index;
use super::mapping::{byte_of, pages_for};
use super::readahead::{Asked, Cause, Decision, Mode, Neighbours, Readahead};
use super::shared::Pinned;
use super::stats::add;
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Mutex};
use core::num::NonZeroU32;
use core::ops::Range;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::PAGE_SIZE;
use std::io;
use std::sync::PoisonError;

/// One reader of a file: its window of readahead, and where it read last.
pub(super) struct Reader {
    readahead: Mutex<Readahead>,
    /// The ends of its last requests, in bytes; 0 before the first. The last one is at `turn`.
    ends: [AtomicU64; ENDS],
    turn: AtomicUsize,
    drops_behind: AtomicBool,
}

/// As many streams of one reader are told apart.
const ENDS: usize = 8;

/// A page that was used more often is not let go behind a reader: others use it too.
const USED_ONCE: u64 = 1;

impl Neighbours for Index {
    fn next_hole(&self, at: u64, max: u64) -> u64 {
        Index::next_hole(self, at, max)
    }
    fn prev_hole(&self, at: u64, max: u64) -> Option<u64> {
        // The index returns 0 both for a hole there and where there is none.
        let hole = Index::prev_hole(self, at, max);
        (hole > 0 || max <= at || self.get(0).is_none()).then_some(hole)
    }
}

impl Reader {
    pub(super) fn new(window: u32) -> Self {
        Self {
            readahead: Mutex::new(Readahead::new(window)),
            ends: [const { AtomicU64::new(0) }; ENDS],
            turn: AtomicUsize::new(0),
            drops_behind: AtomicBool::new(false),
        }
    }

    pub(super) fn with<T>(&self, work: impl FnOnce(&mut Readahead) -> T) -> T {
        work(&mut self.readahead.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn advise(&self, mode: Mode) {
        self.drops_behind.store(mode == Mode::DropBehind, Relaxed);
        self.with(|readahead| readahead.advise(mode));
    }

    /// The page at which its last request ended.
    #[inline]
    fn last_end(&self) -> u64 {
        // Relaxed here and below, and no exchange: several threads that share a reader are several streams, however they
        // interleave.
        pages_for(self.ends[self.turn.load(Relaxed) % ENDS].load(Relaxed))
    }

    /// Notes the end of a request, in bytes. One that goes on where the last one ended, or is a step of a stream, takes its
    /// place.
    #[inline]
    fn note(&self, pages: &Range<u64>, end: u64, step: Option<usize>) {
        let turn = self.turn.load(Relaxed);
        let goes_on = (pages.start..=pages.end).contains(&self.last_end());
        let place = if goes_on { turn } else { step.unwrap_or(turn.wrapping_add(1)) };
        if place != turn {
            self.turn.store(place, Relaxed);
        }
        self.ends[place % ENDS].store(end, Relaxed);
    }

    /// Whether one of its last requests ended in the page before this one.
    fn goes_on_at(&self, page: u64) -> bool {
        page > 0 && self.ends.iter().any(|end| pages_for(end.load(Relaxed)) == page)
    }

    /// The place of the stream of which a request for `page`, from byte `at` on, is the next step, if that stream has been in
    /// this page.
    #[inline]
    fn step_within(&self, page: u64, at: u64) -> Option<usize> {
        if self.last_end() == page + 1 {
            return Some(self.turn.load(Relaxed));
        }
        if at.is_multiple_of(PAGE_SIZE as u64) {
            return None;
        }
        self.ends.iter().position(|end| end.load(Relaxed) == at)
    }
}

/// The pages of one request, and what is known of its reader.
struct Request<'r> {
    reader: &'r Reader,
    pages: Range<u64>,
    /// The last page of the request before.
    previous: Option<u64>,
}

impl Cached {
    /// Reads what the file has at `at` into `into`, up to the file's end. Returns how many bytes.
    pub(super) fn read(&self, reader: &Reader, into: &mut [u8], at: u64) -> io::Result<usize> {
        let mut done = 0;
        let result = self.each_page(reader, at, into.len() as u64, |_, page, bytes| {
            let to = &mut into[done..done + bytes.len()];
            // SAFETY: `each_page` has the page pinned and looked that nobody changes it (L5).
            unsafe { to.as_mut_ptr().copy_from_nonoverlapping(page.folio.as_ptr().add(bytes.start), bytes.len()) };
            done += bytes.len();
            drop(page);
        });
        // What was read is delivered; the error comes again when the caller goes on.
        result.map(|()| done).or_else(|error| if done > 0 { Ok(done) } else { Err(error) })
    }

    /// Calls `each` for the pages with these bytes, in order, up to the file's end: with the page's offset, the page,
    /// pinned and up to date, and which of its bytes are asked for.
    pub(super) fn each_page<'c>(
        &'c self,
        reader: &Reader,
        at: u64,
        len: u64,
        mut each: impl FnMut(u64, Pinned<'c>, Range<usize>),
    ) -> io::Result<()> {
        let end = self.file.len().min(at.saturating_add(len));
        if at >= end {
            return Ok(());
        }
        let pages = at / PAGE_SIZE as u64..pages_for(end);
        let request = Request { reader, previous: reader.last_end().checked_sub(1), pages: pages.clone() };
        let step = reader.step_within(pages.start, at);
        let bytes_of = |page: u64| {
            let start = byte_of(page);
            at.saturating_sub(start) as usize..(end - start).min(PAGE_SIZE as u64) as usize
        };
        let mut missed = 0;
        let mut next = pages.start;
        let mut numbers = [0; 64];
        while next < pages.end {
            // One descent for up to 64 pages.
            let most = (pages.end - next).min(64) as usize;
            let found = self.file.index.get_run(next, &mut numbers[..most]);
            for &number in &numbers[..found] {
                let hit = NonZeroU32::new(number).and_then(|number| self.ready(next, number));
                let page = match hit {
                    Some((page, state)) => {
                        // A reader that goes through a page in small steps uses it once.
                        if next != pages.start || step.is_none() {
                            page.folio.used(state);
                        }
                        if state.has(MARKER) {
                            self.reach_marker(&request, next, &page);
                        }
                        page
                    }
                    None => {
                        missed += 1;
                        let Some(page) = self.wait_for(&request, next)? else { return Ok(()) };
                        // It was on its way, and has a reader now.
                        let state = page.folio.state();
                        if state.has(AHEAD) {
                            page.folio.used(state);
                        }
                        page
                    }
                };
                // If the file was cut meanwhile, the page has zeros behind the new end. They are no bytes of the file's.
                let asked = bytes_of(next);
                let in_file = self.file.len().saturating_sub(byte_of(next)).min(PAGE_SIZE as u64) as usize;
                let bytes = asked.start..asked.end.min(in_file);
                if !bytes.is_empty() {
                    each(next, page, bytes.clone());
                }
                if bytes.end < asked.end {
                    return Ok(());
                }
                next += 1;
            }
        }
        reader.note(&pages, end, step);
        let counts = self.shared.counters.here();
        add(&counts.hits, (pages.end - pages.start) as usize - missed);
        if missed > 0 {
            add(&counts.misses, missed);
        }
        Ok(())
    }

    /// The page, if it is up to date and nobody changes it.
    #[inline]
    fn ready(&self, at: u64, number: Number) -> Option<(Pinned<'_>, State)> {
        let folio = self.shared.folios.get(number);
        let state = folio.pin();
        let page = Pinned { shared: &self.shared, folio, number };
        folio.is_ready(state, self.file.number, at).then_some((page, state))
    }

    /// The page, once it is up to date. Reads it if it is not in the cache, and others ahead of it. `None`: the file was
    /// cut, and ends before the page.
    #[cold]
    fn wait_for(&self, request: &Request<'_>, at: u64) -> io::Result<Option<Pinned<'_>>> {
        // A read that failed for a run of pages is tried again for the page that somebody waits for.
        let mut is_alone = false;
        loop {
            let page = match self.find(at) {
                Some(page) => Some(page),
                None if at >= pages_for(self.file.len()) => return Ok(None),
                None if is_alone => self.fetch(&Fetch::page(at))?.awaited,
                None => self.begin(request, &self.decide(request, Cause::Miss, at))?,
            };
            let Some(page) = page else {
                // Another thread was faster, the page is just leaving, or the file was cut.
                self.wait_for_index();
                continue;
            };
            if page.folio.state().has(MARKER) {
                self.reach_marker(request, at, &page);
            }
            if self.wait_for_page(&page)? {
                return Ok(Some(page));
            }
            is_alone = true;
        }
    }

    /// The reader has reached the marker: the next window begins, and the reader does not wait for it.
    #[cold]
    fn reach_marker(&self, request: &Request<'_>, at: u64, page: &Pinned<'_>) {
        if page.folio.clear(MARKER).has(MARKER) {
            let decision = self.decide(request, Cause::Marked, at);
            // Nobody waits, so nobody is told: a reader that gets there asks again.
            _ = self.begin(request, &decision);
        }
    }

    fn decide(&self, request: &Request<'_>, cause: Cause, at: u64) -> Decision {
        let Request { reader, pages, previous } = request;
        let asked = Asked {
            first: pages.start,
            at,
            pages: u32::try_from(pages.end - at).unwrap_or(u32::MAX),
            end: pages_for(self.file.len()),
            previous: *previous,
            goes_on: reader.goes_on_at(pages.start),
        };
        let decision = reader.with(|readahead| readahead.on_demand(cause, asked, &self.file.index));
        self.shared.trace(self.file.number, &decision);
        decision
    }

    /// Begins what was decided. Returns the page that the reader waits for, if this has read it.
    fn begin(&self, request: &Request<'_>, decision: &Decision) -> io::Result<Option<Pinned<'_>>> {
        let window = decision.window;
        if window.is_empty() {
            return Ok(None);
        }
        let fetch = Fetch {
            window: window.start..window.end(),
            marker: window.marker,
            asked: request.pages.clone(),
            is_awaited: decision.cause == Cause::Miss,
        };
        let fetched = self.fetch(&fetch)?;
        if fetched.covered < u64::from(window.pages) {
            request.reader.with(|readahead| readahead.shortened(window, fetched.covered as u32));
        }
        Ok(fetched.awaited)
    }

    /// Begins to read a range that somebody will need.
    pub(super) fn will_need(&self, reader: &Reader, pages: Range<u64>) {
        // More would evict the first of them.
        let most = self.shared.limit.load(Relaxed) as u64;
        let end = pages_for(self.file.len()).min(pages.start.saturating_add(most));
        let windows =
            reader.with(|readahead| readahead.chunks(pages.start, pages.end.saturating_sub(pages.start), end));
        for window in windows {
            let window = window.start..window.end();
            let fetch = Fetch { window: window.clone(), marker: None, asked: pages.clone(), is_awaited: false };
            // Without memory there is no use in going on.
            if !self.fetch(&fetch).is_ok_and(|fetched| fetched.covered == window.end - window.start) {
                break;
            }
        }
    }

    /// Lets pages behind a reader go, if it said that it will not read them again.
    pub(super) fn drop_behind(&self, reader: &Reader, at: u64, len: usize) {
        // Relaxed: a hint.
        if len == 0 || !reader.drops_behind.load(Relaxed) {
            return;
        }
        let pages = at / PAGE_SIZE as u64..pages_for(at.saturating_add(len as u64));
        let behind = reader.with(|readahead| readahead.behind(pages));
        if !behind.is_empty() {
            self.let_go(behind, USED_ONCE);
        }
    }
}
