//! A fake reader and a fake cache drive the policy as a page cache does, and record what it fetches.
use super::*;
use std::collections::BTreeSet;

const MAX: u32 = MAX_OF_LINUX;
const HUGE: u64 = 1 << 40;

/// A file's pages in the cache.
struct Cache {
    pages: BTreeSet<u64>,
    markers: BTreeSet<u64>,
    end: u64,
    /// Pages that a window gets at most; the page that the reader waits for is always allocated.
    allowed: u32,
    decisions: Vec<Decision>,
    /// Pages in the order in which they were fetched.
    fetched: Vec<u64>,
    asked: BTreeSet<u64>,
}

impl Neighbours for Cache {
    fn next_hole(&self, at: u64, max: u64) -> u64 {
        let end = at.saturating_add(max);
        (at..end).find(|page| !self.pages.contains(page)).unwrap_or(end)
    }

    fn prev_hole(&self, at: u64, max: u64) -> Option<u64> {
        let first = (at + 1).saturating_sub(max);
        (first..=at).rev().find(|page| !self.pages.contains(page)).or(first.checked_sub(1))
    }
}

impl Cache {
    fn new(end: u64) -> Self {
        let (pages, markers, asked) = Default::default();
        Self { pages, markers, end, allowed: u32::MAX, decisions: Vec::new(), fetched: Vec::new(), asked }
    }

    /// A reader's `read`. Returns how often it waited.
    fn read(&mut self, reader: &mut Reader, first: u64, pages: u32) -> usize {
        let end = first.saturating_add(pages.into()).min(self.end);
        let mut waits = 0;
        for at in first..end {
            let asked =
                Asked { first, at, pages: pages - (at - first) as u32, end: self.end, previous: reader.previous };
            self.asked.insert(at);
            if !self.pages.contains(&at) {
                waits += 1;
                self.decide(reader, Cause::Miss, asked);
                assert!(self.pages.contains(&at), "the page that the reader waits for");
            }
            if self.markers.remove(&at) {
                self.decide(reader, Cause::Marked, asked);
            }
        }
        if end > first {
            reader.previous = Some(end - 1);
        }
        waits
    }

    fn decide(&mut self, reader: &mut Reader, cause: Cause, asked: Asked) {
        let decision = reader.ahead.on_demand(cause, asked, self);
        check(&decision, &reader.ahead);
        self.decisions.push(decision);
        let window = decision.window;
        let mut left = self.allowed;
        for page in window.start..window.end() {
            if self.pages.contains(&page) {
                continue;
            }
            if left == 0 && (cause == Cause::Marked || page > asked.at) {
                reader.ahead.shortened(window, (page - window.start) as u32);
                break;
            }
            left = left.saturating_sub(1);
            self.pages.insert(page);
            self.fetched.push(page);
            if window.marker == Some(page) {
                self.markers.insert(page);
            }
        }
    }

    fn evict(&mut self, pages: Range<u64>) {
        for page in pages {
            self.pages.remove(&page);
            self.markers.remove(&page);
        }
    }

    fn truncate(&mut self, end: u64) {
        self.end = end;
        self.pages.split_off(&end);
        self.markers.split_off(&end);
    }

    fn cached(&mut self, pages: Range<u64>) {
        self.pages.extend(pages);
    }

    fn windows(&self) -> Vec<(u64, u32)> {
        self.decisions.iter().map(|decision| (decision.window.start, decision.window.pages)).collect()
    }

    fn whys(&self) -> Vec<Why> {
        self.decisions.iter().map(|decision| decision.why).collect()
    }

    fn last(&self) -> Decision {
        *self.decisions.last().expect("a decision")
    }

    /// Pages that no request asked for.
    fn unasked(&self) -> usize {
        self.fetched.iter().filter(|page| !self.asked.contains(page)).count()
    }
}

struct Reader {
    ahead: Readahead,
    previous: Option<u64>,
}

impl Reader {
    fn new(max: u32) -> Self {
        Self { ahead: Readahead::new(max), previous: None }
    }

    fn advised(mode: Mode) -> Self {
        let mut reader = Self::new(MAX);
        reader.ahead.advise(mode);
        reader
    }
}

/// The invariants, in other words than `validate` uses.
fn check(decision: &Decision, ahead: &Readahead) {
    let Decision { cause, asked, window, .. } = *decision;
    let pages = window.start..window.start.checked_add(window.pages.into()).expect("I1: no wrap");
    let is_due = asked.pages > 0 && asked.at < asked.end;
    assert!(pages.is_empty() || pages.end <= asked.end, "I1: {decision}");
    assert!(
        cause == Cause::Marked || !is_due || pages.contains(&asked.at) && pages.start == asked.at,
        "I2: {decision}"
    );
    let max =
        if matches!(ahead.mode, Mode::Sequential | Mode::DropBehind) { ahead.max.saturating_mul(2) } else { ahead.max };
    assert!(window.pages <= max, "I3: {decision}");
    if let Some(marker) = window.marker {
        assert!(pages.contains(&marker) && marker > asked.at, "I4: {decision}");
        let asked_end = asked.at.saturating_add(asked.pages.into());
        let is_longer = cause == Cause::Miss && pages.end > asked_end;
        assert!(!is_longer || asked.pages >= max / 2 || marker >= asked_end, "I4: ahead of the request: {decision}");
    }
    if ahead.mode == Mode::Random {
        assert!(pages.is_empty() || pages.end <= asked.at.saturating_add(asked.pages.into()), "I5: {decision}");
    }
}

#[test]
fn first_window_comes_from_the_size_of_the_first_request() {
    let sizes = [(1, 4), (2, 4), (3, 8), (4, 8), (5, 16), (8, 16), (9, 32), (16, 32), (31, 32), (32, 32)];
    for (asked, opened) in sizes {
        let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
        cache.read(&mut reader, 0, 1.max(asked));
        let decision = cache.decisions[0];
        assert_eq!((decision.window.pages, decision.why), (opened, Why::Initial), "{asked} pages");
        let marker = if asked < 32 { u64::from(asked) } else { 16 };
        assert_eq!(decision.window.marker, Some(marker), "{asked} pages");
    }
}

#[test]
fn sequential_windows_grow_up_to_the_cap() {
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(256));
    for page in 0..1000 {
        cache.read(&mut reader, page, 1);
    }
    let sizes: Vec<_> = cache.windows().iter().map(|window| window.1).collect();
    assert_eq!(sizes, [4, 16, 32, 64, 128, 256, 256, 256, 256]);
    assert!(cache.whys()[1..].iter().all(|why| *why == Why::Marker));
}

#[test]
fn sequential_reader_waits_only_once() {
    for request in [1, 2, 3, 7, 16, 31, 32, 33, 100] {
        let (mut cache, mut reader) = (Cache::new(10_000), Reader::new(MAX));
        let waits: usize = (0..10_000).step_by(request).map(|at| cache.read(&mut reader, at, request as u32)).sum();
        assert_eq!(waits, 1, "requests of {request}");
    }
}

#[test]
fn sequential_read_fetches_each_page_once_in_few_windows() {
    for (max, end) in [(1, 50), (2, 77), (3, 1000), (32, 1), (32, 31), (32, 10_007), (512, 100_000)] {
        let (mut cache, mut reader) = (Cache::new(end), Reader::new(max));
        for page in 0..end {
            cache.read(&mut reader, page, 1);
        }
        assert_eq!(cache.fetched, (0..end).collect::<Vec<_>>(), "max {max}, {end} pages");
        let windows: Vec<_> = cache.windows().into_iter().filter(|window| window.1 > 0).collect();
        assert_eq!(windows.iter().map(|window| u64::from(window.1)).sum::<u64>(), end, "no two windows overlap");
        let most = end / u64::from(max) + u64::from(max.ilog2()) + 2;
        assert!(windows.len() as u64 <= most, "max {max}, {end} pages: {} windows", windows.len());
    }
}

#[test]
fn at_most_two_windows_are_in_flight() {
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    for page in 0..1000 {
        cache.read(&mut reader, page, 1);
        let fetched = cache.fetched.last().expect("a page");
        assert!(fetched - page <= 2 * u64::from(MAX), "page {page}: fetched up to {fetched}");
        assert!(page < 100 || fetched - page >= u64::from(MAX), "page {page}: fetched up to {fetched}");
    }
}

#[test]
fn request_larger_than_the_cap_is_served_in_whole_windows() {
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    cache.read(&mut reader, 0, 100);
    assert_eq!(cache.windows(), [(0, 32), (32, 32), (64, 32), (96, 32), (128, 32)]);
    assert_eq!(cache.decisions.iter().filter(|decision| decision.cause == Cause::Miss).count(), 1);
}

#[test]
fn random_request_larger_than_the_cap_fetches_nothing_else() {
    for mode in [Mode::Normal, Mode::Random] {
        let (mut cache, mut reader) = (Cache::new(HUGE), Reader::advised(mode));
        let waits = cache.read(&mut reader, 5000, 100);
        assert_eq!((cache.windows(), waits), (vec![(5000, 32), (5032, 32), (5064, 32), (5096, 4)], 1));
        assert_eq!(cache.whys(), [Why::Oversized; 4]);
        assert_eq!(cache.unasked(), 0);
    }
}

#[test]
fn reader_that_follows_a_random_request_starts_a_sequence() {
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    cache.read(&mut reader, 5000, 1);
    cache.read(&mut reader, 5001, 1);
    assert_eq!(cache.whys(), [Why::Random, Why::Initial]);
    cache.read(&mut reader, 9000, 100);
    cache.read(&mut reader, 9100, 4);
    assert_eq!(cache.last().why, Why::Sequential);
    assert_eq!(cache.last().window.start, 9100);
}

#[test]
fn part_of_a_page_at_a_time_is_sequential() {
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    cache.read(&mut reader, 5000, 1);
    cache.read(&mut reader, 5000, 2);
    assert_eq!(cache.whys(), [Why::Random, Why::Initial]);
}

#[test]
fn interleaved_streams_on_one_handle_are_recognised() {
    // Request by request, the reader's last page is always the other stream's.
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    let mut waits = 0;
    for page in 0..500 {
        waits += cache.read(&mut reader, 1_000 + page, 1);
        waits += cache.read(&mut reader, 90_000 + page, 1);
    }
    assert!(cache.whys().contains(&Why::History), "before there is a window");
    assert!(cache.whys().contains(&Why::Stream), "a marker without its window");
    assert!(waits <= 12, "{waits} waits");
    assert!(cache.decisions.iter().rev().take(4).all(|decision| decision.window.pages == MAX));
}

#[test]
fn marker_of_a_stream_whose_window_is_forgotten_goes_on_at_the_next_hole() {
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    cache.cached(100..110);
    cache.markers.insert(104);
    cache.read(&mut reader, 104, 1);
    assert_eq!(cache.last().why, Why::Stream);
    assert_eq!(cache.last().window, Window { start: 110, pages: 14, marker: Some(110) });
}

#[test]
fn marker_before_a_window_of_cached_pages_fetches_nothing() {
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    cache.cached(100..200);
    cache.markers.insert(104);
    cache.read(&mut reader, 104, 1);
    assert_eq!((cache.last().why, cache.fetched.len()), (Why::Cached, 0));
}

#[test]
fn reader_that_leaves_a_cached_part_continues_with_a_window_of_its_length() {
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    cache.cached(1000..1100);
    for page in 1000..1200 {
        cache.read(&mut reader, page, 1);
    }
    assert_eq!((cache.decisions[0].why, cache.windows()[0]), (Why::History, (1100, MAX)));
    assert!(cache.whys()[1..].iter().all(|why| *why == Why::Marker));

    // A shorter run: as many pages as the run and the request. It counts twice if it starts with the file.
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    cache.cached(1000..1010);
    reader.previous = Some(77_777);
    cache.read(&mut reader, 1010, 1);
    assert_eq!(cache.last().window, Window { start: 1010, pages: 11, marker: Some(1011) });
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    cache.cached(0..10);
    reader.previous = Some(77_777);
    cache.read(&mut reader, 10, 1);
    assert_eq!(cache.last().window, Window { start: 10, pages: 21, marker: Some(11) });
}

#[test]
fn random_reads_fetch_only_what_was_asked_for() {
    let (mut cache, mut reader, mut random) = (Cache::new(HUGE), Reader::new(512), Random(7));
    for _ in 0..20_000 {
        cache.read(&mut reader, random.below(HUGE), 1);
    }
    assert_eq!(cache.unasked(), 0);
    for _ in 0..2_000 {
        let pages = 1 + random.below(64) as u32;
        cache.read(&mut reader, random.below(HUGE), pages);
    }
    assert_eq!(cache.unasked(), 0);
    assert!(cache.whys().iter().all(|why| *why == Why::Random));
}

#[test]
fn random_request_that_is_half_cached_fetches_the_rest_only() {
    for cached in 1..16 {
        let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
        reader.previous = Some(3);
        cache.cached(1000..1000 + cached);
        cache.read(&mut reader, 1000, 16);
        assert_eq!(cache.windows(), [(1000 + cached, 16 - cached as u32)]);
    }
}

#[test]
fn cached_run_no_longer_than_the_request_is_no_sign_of_a_sequence() {
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    reader.previous = Some(77_777);
    cache.cached(1000..1004);
    cache.read(&mut reader, 1004, 4);
    assert_eq!((cache.last().why, cache.last().window.pages), (Why::Random, 4));
}

#[test]
fn piece_of_a_request_that_was_given_up_fetches_nothing_else() {
    for mode in [Mode::Normal, Mode::Random] {
        let (mut cache, mut reader) = (Cache::new(HUGE), Reader::advised(mode));
        let asked = |at, pages| Asked { first: at, at, pages, end: HUGE, previous: None };
        cache.decide(&mut reader, Cause::Miss, asked(5000, 100));
        cache.decide(&mut reader, Cause::Marked, asked(5016, 10));
        assert_eq!((cache.last().why, cache.last().window.pages), (Why::Oversized, 0));
        cache.decide(&mut reader, Cause::Miss, asked(5032, 1));
        assert_eq!((cache.last().why, cache.last().window.pages), (Why::Oversized, 1));
    }
}

#[test]
fn request_longer_than_the_next_window_is_not_shrunk() {
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    cache.read(&mut reader, 0, 4);
    cache.markers.clear();
    cache.read(&mut reader, 4, 4);
    cache.read(&mut reader, 8, 20);
    assert_eq!(cache.whys()[1], Why::Sequential);
    assert_eq!((cache.last().why, cache.windows().last()), (Why::Marker, Some(&(28, 32))));
    assert_eq!(cache.windows()[1], (8, 20));
}

#[test]
fn backward_reader_gets_only_what_it_asks_for() {
    for request in [1, 3, 16] {
        let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
        for step in (0..200).rev() {
            cache.read(&mut reader, step * u64::from(request), request);
        }
        assert_eq!(cache.unasked(), 0, "requests of {request}");
    }
    // Also at page 0, where a sequence might begin, and also if nothing of what it read remains.
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    for page in (0..200).rev() {
        cache.read(&mut reader, page, 1);
        cache.evict(page..page + 1);
    }
    assert_eq!(cache.fetched.len(), 200);
}

#[test]
fn strided_reader_gets_only_what_it_asks_for() {
    for stride in [2, 3, 5, 17, 64] {
        for start in [1000, 0] {
            let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
            for step in 0..200 {
                cache.read(&mut reader, start + step * stride, 1);
            }
            // From page 0 on the first request opens a window: nothing speaks for a stride yet.
            let unasked = if start == 0 { 4 - 4_u64.div_ceil(stride) } else { 0 };
            assert_eq!(cache.unasked() as u64, unasked, "stride {stride} from page {start}");
        }
    }
}

#[test]
fn window_ends_at_the_files_end() {
    for end in 1..100 {
        let (mut cache, mut reader) = (Cache::new(end), Reader::new(MAX));
        for page in 0..200 {
            cache.read(&mut reader, page, 3);
        }
        assert_eq!(cache.fetched, (0..end).collect::<Vec<_>>());
    }
}

#[test]
fn request_beyond_the_end_or_of_no_page_fetches_nothing() {
    let (cache, mut reader) = (Cache::new(10), Reader::new(MAX));
    let asked = |at, pages| Asked { first: at, at, pages, end: 10, previous: None };
    for cause in [Cause::Miss, Cause::Marked] {
        for (at, pages, why) in [(10, 1, Why::End), (u64::MAX, u32::MAX, Why::End), (0, 0, Why::Empty)] {
            let decision = reader.ahead.on_demand(cause, asked(at, pages), &cache);
            assert_eq!((decision.window.pages, decision.window.marker, decision.why), (0, None, why));
        }
    }
    assert!(reader.ahead.run.is_none());
    // A first page that lies after the missing one is taken for it.
    let wrong = Asked { first: 9, ..asked(3, 2) };
    assert_eq!(reader.ahead.on_demand(Cause::Miss, wrong, &cache).window.start, 3);
}

#[test]
fn file_that_grew_is_read_on_from_its_old_end() {
    let (mut cache, mut reader) = (Cache::new(40), Reader::new(MAX));
    for page in 0..40 {
        cache.read(&mut reader, page, 1);
    }
    assert_eq!(cache.fetched.len(), 40);
    cache.end = 400;
    cache.read(&mut reader, 40, 1);
    // The last window ended after 12 pages.
    assert_eq!((cache.last().why, cache.windows().last()), (Why::Sequential, Some(&(40, 24))));
    let waits: usize = (41..400).map(|page| cache.read(&mut reader, page, 1)).sum();
    assert_eq!((waits, cache.fetched.len()), (0, 400));
}

#[test]
fn truncated_file_shortens_the_window() {
    let (mut cache, mut reader) = (Cache::new(1000), Reader::new(MAX));
    for page in 0..50 {
        cache.read(&mut reader, page, 1);
    }
    cache.truncate(45);
    cache.read(&mut reader, 44, 1);
    assert_eq!(reader.ahead.on_demand(Cause::Miss, asked_at(50, 45), &cache).why, Why::End);
    // It has grown again: its pages were not evicted, they went with the file's end.
    cache.end = 1000;
    cache.read(&mut reader, 45, 1);
    assert_eq!((cache.last().why, cache.last().window.start), (Why::Sequential, 45));
}

fn asked_at(at: u64, end: u64) -> Asked {
    Asked { first: at, at, pages: 1, end, previous: at.checked_sub(1) }
}

#[test]
fn marker_is_on_no_page_that_is_cached_already() {
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    cache.cached(1..2);
    cache.read(&mut reader, 0, 1);
    assert_eq!((cache.last().window.marker, cache.markers.len()), (Some(1), 0));
    // Without a marker the reader waits where the window ends, and the sequence goes on.
    let waits: usize = (1..5).map(|page| cache.read(&mut reader, page, 1)).sum();
    assert_eq!((waits, cache.last().why, cache.last().window.pages), (1, Why::Sequential, 8));
}

#[test]
fn offsets_near_the_largest_do_not_wrap() {
    for end in [u64::MAX, u64::MAX - 1, u64::MAX - 40] {
        for mode in [Mode::Normal, Mode::Sequential, Mode::Random] {
            let (mut cache, mut reader) = (Cache::new(end), Reader::advised(mode));
            for page in u64::MAX - 300..=u64::MAX {
                cache.read(&mut reader, page, 1);
                cache.read(&mut reader, page, u32::MAX);
            }
            assert!(cache.fetched.iter().all(|page| *page < end));
            assert_eq!(cache.fetched.len() as u64, end - (u64::MAX - 300));
        }
    }
    let mut ahead = Readahead::new(u32::MAX);
    let (mut cache, none) = (Cache::new(u64::MAX), Some(u64::MAX));
    for (at, pages) in [(0, 1), (0, u32::MAX), (u64::MAX - 1, u32::MAX), (1 << 63, u32::MAX)] {
        for mode in [Mode::Normal, Mode::Sequential, Mode::Random] {
            ahead.advise(mode);
            let asked = Asked { first: at, at, pages, end: u64::MAX, previous: none };
            for cause in [Cause::Miss, Cause::Marked] {
                check(&ahead.on_demand(cause, asked, &cache), &ahead);
            }
        }
    }
    cache.cached(u64::MAX - 10..u64::MAX);
    assert_eq!(Readahead::new(4).on_demand(Cause::Marked, asked_at(u64::MAX - 2, u64::MAX), &cache).why, Why::End);
}

#[test]
fn partial_allocation_is_read_on_where_it_ended() {
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    for page in 0..12 {
        cache.read(&mut reader, page, 1);
    }
    assert_eq!(cache.windows(), [(0, 4), (4, 8), (12, 16)]);
    cache.allowed = 5;
    cache.read(&mut reader, 12, 1);
    assert_eq!((cache.last().cause, cache.last().window.start, cache.fetched.len()), (Cause::Marked, 28, 28 + 5));
    cache.allowed = 3;
    let waits: usize = (13..=28).map(|page| cache.read(&mut reader, page, 1)).sum();
    // The short window had its marker on its first page, and the next begins where the pages end.
    assert_eq!((waits, cache.last().why, cache.last().window.start), (0, Why::Marker, 33));
    cache.evict(33..34);
    cache.markers.clear();
    cache.allowed = u32::MAX;
    assert_eq!((29..33).map(|page| cache.read(&mut reader, page, 1)).sum::<usize>(), 0);
    cache.cached(33..34);
    assert_eq!((33..37).map(|page| cache.read(&mut reader, page, 1)).sum::<usize>(), 1);
    assert_eq!((cache.last().why, cache.last().window.start, cache.last().window.pages), (Why::Sequential, 36, 6));
}

#[test]
fn window_that_got_no_page_at_all_is_opened_anew() {
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    cache.read(&mut reader, 0, 1);
    cache.allowed = 0;
    cache.read(&mut reader, 1, 1);
    assert_eq!((cache.last().why, cache.fetched.len()), (Why::Marker, 4));
    cache.allowed = u32::MAX;
    assert_eq!(cache.read(&mut reader, 2, 3), 1);
    assert_eq!((cache.last().why, cache.last().window.start), (Why::Sequential, 4));
}

#[test]
fn shortening_a_window_of_another_reader_changes_nothing() {
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    cache.read(&mut reader, 0, 8);
    reader.ahead.shortened(Window { start: 8, pages: 16, marker: None }, 3);
    reader.ahead.shortened(Window { start: 0, pages: 8, marker: None }, 3);
    assert_eq!(reader.ahead.run.map(|run| (run.start, run.pages)), Some((0, 16)));
}

#[test]
fn page_evicted_before_it_was_read_halves_the_window() {
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    for page in 0..100 {
        cache.read(&mut reader, page, 1);
    }
    // Both windows in flight are gone: the one that the reader is in, and the next.
    cache.evict(100..HUGE.min(400));
    cache.read(&mut reader, 100, 1);
    assert_eq!(
        (cache.last().why, cache.last().window),
        (Why::Shrunk, Window { start: 100, pages: 16, marker: Some(101) })
    );
    cache.evict(101..400);
    cache.read(&mut reader, 101, 1);
    assert_eq!((cache.last().why, cache.last().window.pages), (Why::Shrunk, 8));
    // It grows back step by step, while nothing more is evicted.
    let before = cache.decisions.len();
    for page in 102..1000 {
        cache.read(&mut reader, page, 1);
    }
    let sizes: Vec<_> = cache.windows()[before..].iter().map(|window| window.1).collect();
    assert!(sizes.is_sorted() && sizes.windows(2).all(|pair| pair[1] - pair[0] <= 4), "{sizes:?}");
    assert_eq!(sizes.last(), Some(&MAX));
}

#[test]
fn readahead_that_is_always_evicted_shrinks_to_what_survives() {
    // Six pages survive ahead of the reader. Windows much longer than that are fetched in vain.
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(512));
    for page in 0..20_000 {
        cache.read(&mut reader, page, 1);
        let ahead: Vec<_> = cache.pages.range(page + 7..).copied().collect();
        ahead.into_iter().for_each(|page| cache.evict(page..page + 1));
    }
    let fetched = cache.fetched.len();
    assert!(fetched < 3 * 20_000, "{fetched} pages fetched for 20,000");
}

#[test]
fn rewinding_to_the_start_is_no_eviction() {
    let (mut cache, mut reader) = (Cache::new(20), Reader::new(MAX));
    cache.read(&mut reader, 0, 20);
    cache.evict(0..20);
    cache.read(&mut reader, 0, 1);
    assert_eq!((cache.last().why, cache.last().window.pages), (Why::Initial, 4));
}

#[test]
fn lower_cap_applies_from_the_next_window_on() {
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(256));
    for page in 0..2000 {
        cache.read(&mut reader, page, 1);
    }
    assert_eq!(cache.last().window.pages, 256);
    let before = cache.decisions.len();
    reader.ahead.set_max(8);
    let waits: usize = (2000..4000).map(|page| cache.read(&mut reader, page, 1)).sum();
    assert!(waits == 0 && cache.windows()[before..].iter().all(|window| window.1 == 8));
    reader.ahead.set_max(0);
    (4000..4100).for_each(|page| _ = cache.read(&mut reader, page, 1));
    assert_eq!(cache.last().window.pages, 1);
}

#[test]
fn sequential_hint_doubles_the_windows() {
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::advised(Mode::Sequential));
    for page in 0..1000 {
        cache.read(&mut reader, page, 1);
    }
    assert_eq!(cache.last().window.pages, 2 * MAX);
    reader.ahead.advise(Mode::Normal);
    for page in 1000..2000 {
        cache.read(&mut reader, page, 1);
    }
    assert_eq!(cache.last().window.pages, MAX);
}

#[test]
fn random_hint_fetches_only_what_was_asked_for() {
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    cache.read(&mut reader, 0, 1);
    cache.read(&mut reader, 1, 1);
    assert!(!cache.markers.is_empty());
    let fetched = cache.fetched.len();
    reader.ahead.advise(Mode::Random);
    for page in 2..200 {
        cache.read(&mut reader, page, 1);
    }
    assert_eq!(cache.fetched.len(), fetched.max(200), "the marker triggers nothing");
    assert_eq!(cache.unasked(), 0);
}

#[test]
fn will_need_is_split_in_chunks_of_the_cap() {
    let ahead = Readahead::new(MAX);
    let chunks = |start, pages, end| -> Vec<_> {
        ahead.chunks(start, pages, end).map(|window| (window.start, window.pages, window.marker)).collect()
    };
    assert_eq!(chunks(10, 70, 1000), [(10, 32, None), (42, 32, None), (74, 6, None)]);
    assert_eq!(chunks(10, 70, 50), [(10, 32, None), (42, 8, None)]);
    assert_eq!(chunks(u64::MAX - 3, u64::MAX, u64::MAX), [(u64::MAX - 3, 3, None)]);
    assert_eq!([chunks(50, 70, 50), chunks(60, 70, 50), chunks(0, 0, 50)], [const { Vec::new() }; 3]);
}

#[test]
fn drop_behind_hands_out_each_page_behind_the_reader_once() {
    let mut ahead = Readahead::new(MAX);
    assert!(ahead.behind(0..500).is_empty(), "only for a reader that asked for it");
    ahead.advise(Mode::DropBehind);
    let mut dropped = Vec::new();
    for page in 1000..1500 {
        let behind = ahead.behind(page..page + 1);
        assert!(behind.is_empty() || behind.end <= page && behind.end - behind.start == 32, "{behind:?}");
        dropped.extend(behind);
    }
    assert_eq!(dropped, (1000..1480).collect::<Vec<_>>());
    // After a jump, nothing between the two places was read.
    assert!(ahead.behind(9000..9004).is_empty());
    assert_eq!(ahead.behind(9004..9050), 9000..9049);
    assert!(ahead.behind(9000..9000).is_empty());
    assert!(ahead.behind(u64::MAX - 1..u64::MAX).is_empty());
}

#[test]
fn decisions_are_said_in_plain_words() {
    let (mut cache, mut reader) = (Cache::new(HUGE), Reader::new(MAX));
    cache.read(&mut reader, 0, 2);
    let said = "miss at page 0, 2 asked: fetch 4 from page 0, marker on page 2 (a sequence begins)";
    assert_eq!(cache.last().to_string(), said);
    for (index, why) in Why::ALL.into_iter().enumerate() {
        assert_eq!(why as usize, index);
    }
    let said: BTreeSet<_> = Why::ALL.map(|why| why.to_string()).into();
    assert_eq!(said.len(), Why::ALL.len());
}

/// Vigna's `SplitMix64`.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }
}

/// One random operation; the checks are `check`'s and `Cache::read`'s.
fn step(cache: &mut Cache, readers: &mut [Reader; 2], random: &mut Random) {
    let reader = &mut readers[random.below(2) as usize];
    let place = random.below(3000);
    match random.below(24) {
        0..6 => _ = cache.read(reader, place, 1 + random.below(9) as u32),
        6 => _ = cache.read(reader, place, random.below(200) as u32),
        7 => _ = cache.read(reader, place, u32::MAX - random.below(3) as u32),
        8..17 => {
            let pages = 1 + random.below(5) as u32;
            for _ in 0..random.below(40) {
                let next = reader.previous.map_or(0, |previous| previous + 1);
                cache.read(reader, next, pages);
            }
        }
        17 => cache.truncate(random.below(3000)),
        18 => cache.end += random.below(1000),
        19..21 => cache.evict(place..place + random.below(300)),
        21 => cache.allowed = [0, 1, 7, u32::MAX, u32::MAX][random.below(5) as usize],
        22 => reader.ahead.set_max([0, 1, 2, 5, 32, 512][random.below(6) as usize]),
        _ => reader.ahead.advise(
            [Mode::Normal, Mode::Normal, Mode::Sequential, Mode::DropBehind, Mode::Random][random.below(5) as usize],
        ),
    }
}

#[test]
fn any_sequence_of_operations_keeps_the_invariants() {
    let mut counts = [0_u64; Why::ALL.len()];
    for seed in 0..60 {
        // A panic names the seed, since the harness prints what the test wrote.
        println!("seed {seed}");
        let (mut cache, mut random) = (Cache::new(2000), Random(seed));
        let mut readers = [MAX, 100].map(Reader::new);
        for _ in 0..200 {
            step(&mut cache, &mut readers, &mut random);
        }
        cache.decisions.iter().for_each(|decision| counts[decision.why as usize] += 1);
    }
    // `Cache::read` asks for no decision on an empty request.
    for why in Why::ALL.into_iter().filter(|why| *why != Why::Empty) {
        assert!(counts[why as usize] > 0, "no decision by the rule: {why}");
    }
}
