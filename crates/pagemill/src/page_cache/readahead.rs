//! Which pages to read before the reader asks for them.
//!
//! A page cache calls [`Readahead::on_demand`] on two occasions: a reader waits for a page that is not cached
//! ([`Cause::Miss`]), or it reads a page that carries the marker ([`Cause::Marked`]). The answer is a [`Window`]: the
//! pages to fetch, and the page that gets the marker. The cache allocates the window's holes in one bulk request, reads
//! them, and puts the marker on its page if that page was not cached before. A reader that finds its pages cached
//! costs this module nothing.
//!
//! The behaviour is that of Linux's on-demand readahead (Wu Fengguang, Xi Hongsheng, Xu Chenfeng, *On the design of a
//! new Linux readahead framework*, 2008; the kernel's documentation of `mm/readahead.c`). Where it differs, the text
//! says *here*.
//!
//! # What is decided
//!
//! | the reader | the window | [`Why`] |
//! |---|---|---|
//! | starts at page 0, or follows its last request | the request as a power of two, twice or four times | `Initial` |
//! | follows a cached run longer than the request | as long as the run and the request together | `History` |
//! | reaches the marker of its own window | twice as long, where this one ends; four times if small | `Marker` |
//! | misses where its own window ended | the same, and the reader waits | `Sequential` |
//! | reaches another marker | from the next hole on: a stream of this handle continues | `Stream` |
//! | the same, and the next hole is in its own window | none; the reader will miss that page | `Evicted` |
//! | the same, and there is no hole for `cap` pages | none | `Cached` |
//! | misses a page that a window fetched already | half: the page was evicted before it was read | `Shrunk` |
//! | asks for more than `cap`, outside a sequence | the request and no page more, in pieces of `cap` | `Oversized` |
//! | does anything else | the request and no page more | `Random` |
//!
//! A window has `cap` pages at most. A reader that waits gets the marker on the page after its request, so it triggers
//! the next window as soon as it goes on. Where the window is no longer than the request, the marker lies in the
//! window's middle. A window that no reader waits for has the marker on its first page. So two windows are in flight at
//! most, and a reader never waits if reading `max` pages takes it longer than the disk needs to deliver a window.
//!
//! *Here*, page 0 opens a window only for a reader's first request and for a reader that has read to the end, because a
//! reader that goes backward gets there too. A reader that jumps inside the run of cached pages before its request is
//! strided, and gets only what it asks for. Signs of a sequence lie before the request's first page, so a random
//! request that is half cached counts as random. An eviction sets a ceiling of half the window, which rises slowly.
//!
//! # Invariants
//!
//! - I1: a window ends at the file's end at the latest. It is clamped here, once, before anything is allocated.
//! - I2: the window of a miss begins at the page that the reader waits for, and has one page at least.
//! - I3: a window has `cap` pages at most: `max`, twice that for [`Mode::Sequential`], and less under a ceiling.
//! - I4: a marker lies inside its window, and after the page at which the decision was made.
//! - I5: in [`Mode::Random`] no window holds a page that was not asked for.
//!
//! `Decision::validate` checks them.
//!
//! # The caller's part
//!
//! The caller holds the lock of the reader's handle during a call. It takes a marker off before it asks. It says
//! [`Readahead::shortened`] if it could not allocate the whole window; otherwise a later miss looks like an eviction.
//! This module has no lock, memory, clock, input or output of its own.
#![forbid(unsafe_code)]
use core::fmt;
use core::ops::Range;

#[cfg(test)]
mod tests;

/// The kernel's default for `max`: 128 KiB of pages of 4 KiB.
pub(super) const MAX_OF_LINUX: u32 = 32;

/// What the cache's index knows about pages near an offset. A hole is an offset without a page.
pub(super) trait Neighbours {
    /// The first hole at or after `at`, among `max` offsets. Where all of them hold pages: the first offset
    /// beyond, `at + max`, or `u64::MAX` where that would wrap.
    fn next_hole(&self, at: u64, max: u64) -> u64;

    /// The last hole at or before `at`, among `max` offsets. Where all of them hold pages: the first offset
    /// beyond, `at - max`, or `None` if there is no such offset because every page down to page 0 is cached.
    fn prev_hole(&self, at: u64, max: u64) -> Option<u64>;
}

/// Why the cache asks for a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// The reader waits for a page that is not cached.
    Miss,
    /// The reader has reached the page with the marker. The cache takes the marker off.
    Marked,
}

/// One request, at the page where it needs a decision. Offsets are in pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    /// The request's first page.
    pub(super) first: u64,
    /// The page that is missing or marked; equal to `first`, or after it.
    pub(super) at: u64,
    /// The request's pages from `at` on.
    pub(super) pages: u32,
    /// The file's length in pages, rounded up.
    pub(super) end: u64,
    /// The last page of the last request of this reader, the one before this request.
    pub(super) previous: Option<u64>,
}

/// Pages to fetch; those of them that are cached already need no read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) start: u64,
    /// None: there is nothing to fetch.
    pub(super) pages: u32,
    /// The page that gets the marker, unless it is cached already.
    pub(super) marker: Option<u64>,
}

impl Window {
    const fn nothing(at: u64) -> Self {
        Self { start: at, pages: 0, marker: None }
    }

    /// The offset after the last page.
    pub(super) fn end(&self) -> u64 {
        self.start + u64::from(self.pages)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pages == 0
    }
}

/// The rule that made a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Why {
    Initial,
    Sequential,
    Marker,
    Stream,
    History,
    Oversized,
    Random,
    Shrunk,
    Evicted,
    Cached,
    End,
    Empty,
}

impl Why {
    /// All rules, in the order of their discriminants, so that `why as usize` indexes an array of counters.
    pub(super) const ALL: [Self; 12] = [
        Self::Initial,
        Self::Sequential,
        Self::Marker,
        Self::Stream,
        Self::History,
        Self::Oversized,
        Self::Random,
        Self::Shrunk,
        Self::Evicted,
        Self::Cached,
        Self::End,
        Self::Empty,
    ];
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Initial => "a sequence begins",
            Self::Sequential => "a sequence goes on where its window ended",
            Self::Marker => "the reader reached its window's marker",
            Self::Stream => "the reader reached the marker of another stream",
            Self::History => "cached pages lead up to the request",
            Self::Oversized => "a piece of a request larger than a window",
            Self::Random => "random: only what was asked for",
            Self::Shrunk => "evicted before it was read: the window shrinks",
            Self::Evicted => "pages ahead were evicted: the reader's miss decides",
            Self::Cached => "the pages ahead are cached already",
            Self::End => "the file ends here",
            Self::Empty => "no page was asked for",
        })
    }
}

/// A decision, to be carried out, logged and counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decision {
    pub(super) cause: Cause,
    pub(super) asked: Asked,
    pub(super) window: Window,
    pub(super) why: Why,
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cause, asked, window, why } = self;
        let cause = match cause {
            Cause::Miss => "miss",
            Cause::Marked => "marker",
        };
        write!(f, "{cause} at page {}, {} asked: fetch {}", asked.at, asked.pages, window.pages)?;
        write!(f, " from page {}", window.start)?;
        if let Some(marker) = window.marker {
            write!(f, ", marker on page {marker}")?;
        }
        write!(f, " ({why})")
    }
}

/// What the program says about its reads to come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Mode {
    #[default]
    Normal,
    /// Windows may be twice as long.
    Sequential,
    /// `Sequential`, and pages are not kept once they were read; see [`Readahead::behind`].
    DropBehind,
    /// Only what was asked for.
    Random,
}

/// The window that was opened last, and what belongs to it.
#[derive(Clone, Copy, Debug)]
struct Run {
    start: u64,
    pages: u32,
    /// Pages from the marker to the window's end; 0 without a marker.
    ahead: u32,
    /// The start of the window before, if this one continues it; otherwise `start`. Pages from here on may be unread.
    since: u64,
    /// The end of the request that is served in pieces: no page at or after it is fetched. None for a sequence.
    until: Option<u64>,
}

impl Run {
    /// The offset after the last page.
    fn end(&self) -> u64 {
        self.start + u64::from(self.pages)
    }

    fn marker(&self) -> Option<u64> {
        (self.ahead > 0).then(|| self.end() - u64::from(self.ahead))
    }

    /// Only the window's first `pages` pages are there.
    fn shorten(&mut self, pages: u32) {
        let marker = self.marker();
        self.pages = self.pages.min(pages);
        let end = self.end();
        self.ahead = marker.map_or(0, |marker| end.saturating_sub(marker) as u32);
    }

    fn truncate(&mut self, end: u64) {
        if self.start >= end {
            *self = Self { start: end, pages: 0, ahead: 0, since: self.since.min(end), until: self.until };
        } else if self.end() > end {
            self.shorten((end - self.start) as u32);
        }
    }
}

/// What speaks for a sequence, before the request's first page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sign {
    None,
    /// The file's first page.
    Start,
    /// This reader's last request ended here.
    Follows,
    /// Cached pages, more than the request has.
    History,
}

/// One reader's readahead; lives in the handle of an opened file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Readahead {
    max: u32,
    /// Lowered by a page that was evicted before it was read; rises slowly.
    ceiling: u32,
    mode: Mode,
    run: Option<Run>,
    /// Pages that were read in sequence, and were not handed out by `behind`.
    read: (u64, u64),
}

// It is copied, and there is one for each opened file.
const _: () = assert!(size_of::<Readahead>() <= 80);

impl Readahead {
    /// A reader of which nothing is known. A `max` of 0 counts as 1: windows of one page, so nothing is read ahead.
    pub(super) fn new(max: u32) -> Self {
        Self { max: max.max(1), ceiling: u32::MAX, mode: Mode::Normal, run: None, read: (0, 0) }
    }

    /// Windows from now on have `max` pages at most. Those on their way stay as they are.
    pub(super) fn set_max(&mut self, max: u32) {
        self.max = max.max(1);
    }

    /// Takes a hint. It applies from the next decision on, also to markers that are out.
    pub(super) fn advise(&mut self, mode: Mode) {
        self.mode = mode;
        self.read = (0, 0);
    }

    /// Decides what to fetch.
    pub(super) fn on_demand(&mut self, cause: Cause, asked: Asked, cached: &impl Neighbours) -> Decision {
        let Asked { first, at, pages, end, .. } = asked;
        if let Some(run) = &mut self.run {
            run.truncate(end);
        }
        let (window, why) = if at >= end {
            (Window::nothing(at), Why::End)
        } else if pages == 0 {
            (Window::nothing(at), Why::Empty)
        } else {
            let pages = u64::from(pages).min(end - at) as u32;
            let asked = Asked { first: first.min(at), pages, ..asked };
            match cause {
                Cause::Miss => self.miss(asked, cached),
                Cause::Marked => self.marked(asked, cached),
            }
        };
        let decision = Decision { cause, asked, window, why };
        debug_assert_eq!(decision.validate(self.cap(), self.mode), Ok(()), "{decision}");
        decision
    }

    /// Of `window`, only the first `pages` pages were allocated: the reader will miss the next one, or not get as far.
    pub(super) fn shortened(&mut self, window: Window, pages: u32) {
        if let Some(run) = self.run.as_mut().filter(|run| run.start == window.start && run.pages == window.pages) {
            run.shorten(pages);
        }
    }

    /// The windows for a program that says it will need `pages` pages from `start` on; each has `max` pages at most.
    /// The reader's own window stays.
    pub(super) fn chunks(&self, start: u64, pages: u64, end: u64) -> impl Iterator<Item = Window> + use<> {
        let (max, end) = (u64::from(self.max), end.min(start.saturating_add(pages)));
        let mut next = start;
        core::iter::from_fn(move || {
            let pages = end.saturating_sub(next).min(max);
            let window = Window { start: next, pages: pages as u32, marker: None };
            next += pages;
            (pages > 0).then_some(window)
        })
    }

    /// The pages behind the reader that may go, now that it has read `pages`; only for [`Mode::DropBehind`]. They come
    /// in batches of half a window. The last page stays, since the next request may begin inside it.
    pub(super) fn behind(&mut self, pages: Range<u64>) -> Range<u64> {
        let (from, to) = self.read;
        let follows = (from..=to).contains(&pages.start);
        self.read = if follows { (from, to.max(pages.end)) } else { (pages.start, pages.end) };
        let from = self.read.0;
        let to = self.read.1.saturating_sub(1).max(from);
        if self.mode != Mode::DropBehind || to - from < u64::from(self.cap() / 2).max(1) {
            return from..from;
        }
        self.read.0 = to;
        from..to
    }

    /// The longest window, in pages.
    fn cap(&self) -> u32 {
        let max = match self.mode {
            Mode::Normal | Mode::Random => self.max,
            Mode::Sequential | Mode::DropBehind => self.max.saturating_mul(2),
        };
        max.min(self.ceiling).max(1)
    }

    /// The reader waits for page `at`.
    fn miss(&mut self, asked: Asked, cached: &impl Neighbours) -> (Window, Why) {
        let Asked { first, at, pages, previous, .. } = asked;
        if let Some(run) = self.run.filter(|run| run.end() == at && run.until.is_some_and(|until| at < until)) {
            return self.piece(run.since, at, asked);
        }
        if self.mode == Mode::Random {
            return self.only_asked(asked);
        }
        let length = (at - first).saturating_add(u64::from(pages));
        let history = self.history(first, length, cached);
        let sign = sign(asked, length, history);
        if let Some(run) = self.run {
            // A reader that comes back to page 0, or to the page that it read last, has read the page before.
            let is_unread = at > first || sign == Sign::History || previous != Some(first) && sign == Sign::Follows;
            if (run.since..run.end()).contains(&at) && sign != Sign::None && is_unread {
                self.ceiling = (run.pages.min(self.cap()) / 2).max(1);
                return (self.open(at, u64::from(self.ceiling), at, asked), Why::Shrunk);
            }
            let is_strided = previous.is_some_and(|previous| (run.since..first.saturating_sub(1)).contains(&previous));
            if run.end() == at && !is_strided {
                let next = self.next_size(u64::from(run.pages)).max(u64::from(pages));
                return (self.open(at, next, at, asked), Why::Sequential);
            }
        }
        let initial = u64::from(initial_size(pages, self.cap()));
        // A run of cached pages from the file's first page on speaks for a long sequence.
        let run = if history >= first { history.saturating_mul(2) } else { history };
        let grown = run.saturating_add(u64::from(pages));
        let (size, why) = match sign {
            Sign::None => return self.only_asked(asked),
            Sign::Follows if history > length && grown > initial => (grown, Why::History),
            Sign::Start | Sign::Follows => (initial, Why::Initial),
            Sign::History => (grown, Why::History),
        };
        (self.open(at, size, at, asked), why)
    }

    /// The reader has reached a page with the marker.
    fn marked(&mut self, asked: Asked, cached: &impl Neighbours) -> (Window, Why) {
        let Asked { at, pages, end, .. } = asked;
        match self.run.filter(|run| run.marker() == Some(at)) {
            Some(run) if run.until.is_some_and(|until| run.end() < until) => self.piece(run.start, run.end(), asked),
            _ if self.mode == Mode::Random => (Window::nothing(at), Why::Random),
            Some(run) if run.end() >= end => (Window::nothing(run.end()), Why::End),
            Some(run) => {
                let next = self.next_size(u64::from(run.pages));
                (self.open(run.end(), next, run.start, asked), Why::Marker)
            }
            None => {
                let cap = u64::from(self.cap());
                let hole = cached.next_hole(at + 1, cap);
                if hole >= end {
                    (Window::nothing(hole.min(end)), Why::End)
                } else if hole - at > cap {
                    (Window::nothing(hole), Why::Cached)
                } else if self.run.is_some_and(|run| (run.since..run.end()).contains(&hole)) {
                    // An old marker leads into the window, where pages were evicted. A second window from here would
                    // have its own marker, and from then on each marker would open windows. The miss decides.
                    (Window::nothing(hole), Why::Evicted)
                } else {
                    let next = self.next_size((hole - at).saturating_add(u64::from(pages)));
                    (self.open(hole, next, hole, asked), Why::Stream)
                }
            }
        }
    }

    /// The request, and nothing else. A large one is served in pieces, and its window is remembered.
    fn only_asked(&mut self, asked: Asked) -> (Window, Why) {
        let Asked { at, pages, .. } = asked;
        if pages <= self.cap() {
            // The window of a sequence stays, as the reader may come back to it.
            return (Window { start: at, pages, marker: None }, Why::Random);
        }
        self.run = None;
        self.piece(at, at, asked)
    }

    /// The next piece, from `start` on, of a request that is larger than a window.
    fn piece(&mut self, since: u64, start: u64, asked: Asked) -> (Window, Why) {
        let asked_end = asked.at + u64::from(asked.pages);
        let until = self.run.and_then(|run| run.until).unwrap_or(asked_end).min(asked_end);
        if start >= until {
            return (Window::nothing(start), Why::Oversized);
        }
        let pages = u64::from(self.cap()).min(until - start) as u32;
        let more = start + u64::from(pages) < until;
        let ahead = if !more {
            0
        } else if start > asked.at {
            pages
        } else {
            pages / 2
        };
        self.run = Some(Run { start, pages, ahead, since, until: Some(until) });
        (self.window(), Why::Oversized)
    }

    /// Opens a window of a sequence, clamped to the file's end and to the cap.
    fn open(&mut self, start: u64, pages: u64, since: u64, asked: Asked) -> Window {
        let cap = self.cap();
        // The ceiling rises by an eighth with each window, so that a window does not grow back at once.
        self.ceiling = self.ceiling.saturating_add((self.ceiling / 8).max(2));
        let unclamped = pages.min(u64::from(cap)) as u32;
        let pages = u64::from(unclamped).min(asked.end - start) as u32;
        let marker = if start > asked.at {
            0
        } else if asked.pages < unclamped {
            asked.pages
        } else {
            // An odd window's middle page belongs to the first half; a window of one page has no marker.
            unclamped.div_ceil(2)
        };
        self.run = Some(Run { start, pages, ahead: pages.saturating_sub(marker), since, until: None });
        self.window()
    }

    /// The window that was just opened.
    fn window(&self) -> Window {
        self.run.map_or(Window::nothing(0), |run| Window { start: run.start, pages: run.pages, marker: run.marker() })
    }

    /// Cached pages in one run right before `first`; counted up to a window or one more than the request.
    fn history(&self, first: u64, length: u64, cached: &impl Neighbours) -> u64 {
        let Some(last) = first.checked_sub(1) else { return 0 };
        let hole = cached.prev_hole(last, u64::from(self.cap()).max(length.saturating_add(1)));
        hole.map_or(first, |hole| last.saturating_sub(hole))
    }

    /// The size of the window after one of `pages`, before `open` clamps it.
    fn next_size(&self, pages: u64) -> u64 {
        let factor = if pages < u64::from(self.cap() / 16) { 4 } else { 2 };
        pages.max(1).saturating_mul(factor)
    }
}

/// The first window for a request of `pages` pages: a power of two times two or four, or `cap`.
fn initial_size(pages: u32, cap: u32) -> u32 {
    let Some(whole) = pages.checked_next_power_of_two() else { return cap };
    let factor = match whole {
        _ if whole <= cap / 32 => 4,
        _ if whole <= cap / 4 => 2,
        _ => return cap,
    };
    whole.saturating_mul(factor).min(cap)
}

/// `length` is the whole request's, `history` the length of the cached run before it.
fn sign(asked: Asked, length: u64, history: u64) -> Sign {
    let Asked { first, end, previous, .. } = asked;
    if previous.is_some_and(|previous| previous == first || previous.checked_add(1) == Some(first)) {
        return Sign::Follows;
    }
    if first == 0 && previous.is_none_or(|previous| previous >= end - 1) {
        return Sign::Start;
    }
    let is_strided = previous.is_some_and(|previous| (first - history..first).contains(&previous));
    if history > length && !is_strided { Sign::History } else { Sign::None }
}

impl Decision {
    /// Checks I1 to I5.
    fn validate(&self, cap: u32, mode: Mode) -> Result<(), &'static str> {
        let Self { cause, asked, window, why } = *self;
        let Some(end) = window.start.checked_add(u64::from(window.pages)) else { return Err("I1: wraps") };
        if !window.is_empty() && end > asked.end {
            return Err("I1: beyond the file's end");
        }
        let is_due = asked.pages > 0 && asked.at < asked.end;
        if cause == Cause::Miss && is_due && (window.start != asked.at || window.is_empty()) {
            return Err("I2: the reader's page is not in the window");
        }
        if window.pages > cap {
            return Err("I3: too long");
        }
        if window.marker.is_some_and(|marker| marker <= asked.at || !(window.start..end).contains(&marker)) {
            return Err("I4: the marker is outside the window, or behind the reader");
        }
        let asked_end = asked.at.saturating_add(u64::from(asked.pages));
        let is_random = mode == Mode::Random || matches!(why, Why::Random | Why::Oversized);
        if is_random && !window.is_empty() && (window.start < asked.at || end > asked_end) {
            return Err("I5: a page that was not asked for");
        }
        Ok(())
    }
}
