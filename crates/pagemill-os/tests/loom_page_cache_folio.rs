//! Interleavings with at most three preemptions, by loom, of threads that pin a page cache's folio and of those that fill,
//! change, take off and free its page meanwhile (L1 to L5 in `folio.rs`). `pagemill` itself is not built for loom, so
//! this test includes the source files of folios and of their waits.
//!
//! A page is a cell of loom's, which fails if one thread reads or writes it while another may write. A page that is freed
//! is written to.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release -p pagemill-os --test tests loom_page_cache_folio
//! ```
#[expect(dead_code, reason = "it is another crate's, and not all of it is tried here")]
#[path = "../../pagemill/src/page_cache/folio.rs"]
mod folio;
#[expect(dead_code, reason = "as above")]
#[path = "../../pagemill/src/page_cache/wait.rs"]
mod wait;

use crate::handle::Page;
use crate::handle::sealed::Word;
use folio::{ATTACHED, DIRTY, EXCLUSIVE, Folio, Folios, IN_USE, LOCKED, Number, State, UPTODATE};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use wait::Waits;

const FILE: u32 = 7;
/// The contents of a page of the file. They are 0 before it is read, and `FREE` when it is free.
const OLD: u32 = 1;
const NEW: u32 = 2;
const FREE: u32 = 99;

/// Folios, of which the first is that of page 0 of the file, and two pages. A page's address is its number here, from 1.
struct Cache {
    folios: Folios,
    waits: Waits,
    pages: [UnsafeCell<u32>; 2],
    number: Number,
}

// SAFETY: loom fails if two threads use a cell at the same time.
unsafe impl Sync for Cache {}

impl Cache {
    /// The first folio has these flags, and a pin that the caller has.
    fn new(flags: u64) -> Arc<Self> {
        let folios = Folios::new(1);
        let mut numbers = Vec::new();
        assert_eq!(folios.take(1, &mut numbers), 1);
        let contents = if flags & UPTODATE > 0 { OLD } else { 0 };
        let pages = [UnsafeCell::new(contents), UnsafeCell::new(NEW)];
        let cache = Arc::new(Self { folios, waits: Waits::new(), pages, number: numbers[0] });
        cache.begin(0, 0, flags);
        cache
    }
    fn begin(&self, page: usize, at: u64, flags: u64) {
        // SAFETY: nobody else has the page.
        self.folios.begin(self.number, unsafe { Page::from_word(page + 1) }, FILE, at, flags);
    }
    fn folio(&self) -> &Folio {
        self.folios.get(self.number)
    }
    /// What the folio's page has.
    fn read(&self) -> u32 {
        // SAFETY: loom has checked that nobody writes it.
        self.pages[self.folio().addr() - 1].with(|page| unsafe { *page })
    }
    fn write(&self, contents: u32) {
        // SAFETY: loom has checked that nobody else uses it.
        self.pages[self.folio().addr() - 1].with_mut(|page| unsafe { *page = contents });
    }
    /// Frees the page of a folio that has ended.
    fn free(&self) {
        assert!(!self.folio().state().has_any(IN_USE | ATTACHED));
        assert!(self.read() != FREE, "freed twice");
        self.write(FREE);
        _ = self.folios.page_of(self.number).into_word();
        self.folios.put_back(&[self.number]);
    }
    fn unpin(&self) {
        if self.folio().release(1) {
            self.free();
        }
    }
    fn turn(&self, on: u64, off: u64) {
        let before = self.folio().turn(on, off, 0);
        self.waits.wake(self.number, self.folio(), before);
    }
    /// Locks the page of a pinned folio, as a writer does.
    fn lock(&self) {
        while self.folio().change(|now| (!now.has(LOCKED)).then(|| now.with(LOCKED))).is_err() {
            self.wait(|now| !now.has(LOCKED));
        }
    }
    fn unlock(&self, flags: u64) {
        let before = self.folio().clear(flags);
        self.waits.wake(self.number, self.folio(), before);
    }
    /// Changes the page in place if nobody reads it, as a writer does.
    fn change(&self) {
        self.folio().pin();
        self.lock();
        if self.folio().make_exclusive() {
            self.write(NEW);
            self.unlock(EXCLUSIVE | LOCKED);
        } else {
            self.unlock(LOCKED);
        }
        self.unpin();
    }
    fn wait(&self, is_over: impl Fn(State) -> bool) -> State {
        self.waits.wait(self.number, self.folio(), is_over)
    }
    /// Reads page 0 of the file, if the folio has it.
    fn look(&self) -> Option<u32> {
        let state = self.folio().pin();
        let seen = self.folio().is_ready(state, FILE, 0).then(|| self.read());
        self.unpin();
        seen
    }
    /// The same, after a wait for whoever fills or changes it.
    fn wait_and_look(&self) -> Option<u32> {
        let state = self.folio().pin();
        let is_ready = self.folio().is_page(state, FILE, 0)
            && self
                .wait(|now| now.has(UPTODATE) && !now.has(EXCLUSIVE) || !now.has_any(LOCKED | EXCLUSIVE))
                .has(UPTODATE);
        let seen = is_ready.then(|| self.read());
        self.unpin();
        seen
    }
    /// Takes the folio off its file, as a cut does.
    fn cut(&self) {
        self.folio().detach();
        if self.folio().end() {
            self.free();
        }
    }
    /// Frees it if nobody has it, as an eviction does. Returns whether it did.
    fn evict(&self) -> bool {
        let state = self.folio().state();
        let is_gone = state.has(ATTACHED)
            && state.pins() == 0
            && !state.has_any(LOCKED | DIRTY)
            && self.folio().end_unchanged(state, 0);
        if is_gone {
            self.free();
        }
        is_gone
    }
    /// At the end: whether the page was freed, and nobody has it pinned.
    fn is_freed(&self, page: usize) -> bool {
        assert_eq!(self.folio().state().pins(), 0);
        // SAFETY: loom has checked that nobody writes it.
        self.pages[page].with(|page| unsafe { *page } == FREE)
    }
    /// Ends the folio, if it is still in use.
    fn end(&self) {
        if self.folio().state().has(IN_USE) {
            self.cut();
        }
    }
}

/// Runs these at once, and then checks what is left.
fn check(flags: u64, threads: &'static [fn(&Cache)], after: fn(&Cache)) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let cache = Cache::new(flags);
        if !flags & LOCKED > 0 {
            cache.unpin();
        }
        let spawn = |thread: &'static fn(&Cache)| {
            let cache = Arc::clone(&cache);
            thread::spawn(move || thread(&cache))
        };
        let others: Vec<_> = threads[1..].iter().map(spawn).collect();
        threads[0](&cache);
        others.into_iter().for_each(|thread| thread.join().unwrap());
        after(&cache);
        cache.end();
    });
}

const READ: u64 = ATTACHED | UPTODATE;

fn reads(cache: &Cache) {
    assert!(cache.look().is_none_or(|seen| seen == OLD));
}

#[test]
fn the_last_to_have_a_page_that_was_cut_off_frees_it() {
    check(READ, &[Cache::cut, reads, reads], |cache| assert!(cache.is_freed(0)));
}

#[test]
fn a_page_is_evicted_only_while_nobody_has_it() {
    fn evicts(cache: &Cache) {
        cache.evict();
    }
    check(READ, &[evicts, reads], |cache| assert_eq!(cache.is_freed(0), !cache.folio().state().has(IN_USE)));
}

#[test]
fn a_page_that_is_evicted_and_cut_off_is_freed_once() {
    fn evicts_or_cuts(cache: &Cache) {
        if !cache.evict() {
            cache.cut();
        }
    }
    check(READ, &[evicts_or_cuts, reads], |cache| assert!(cache.is_freed(0)));
}

/// A reader that comes late pins the folio when it is another page's.
#[test]
fn a_late_pin_of_a_reused_folio_is_given_back() {
    fn reuses(cache: &Cache) {
        if cache.evict() {
            cache.begin(1, 5, READ);
            assert_eq!(cache.read(), NEW);
            cache.unpin();
        }
    }
    check(READ, &[reuses, reads], |cache| assert!(!cache.is_freed(1)));
}

/// The transfer of a read fills the page, and then lets others see it.
#[test]
fn those_who_wait_for_a_read_see_its_bytes() {
    fn ends_the_read(cache: &Cache) {
        cache.write(OLD);
        cache.turn(UPTODATE, LOCKED);
        cache.unpin();
    }
    fn waits(cache: &Cache) {
        assert_eq!(cache.wait_and_look(), Some(OLD));
    }
    check(ATTACHED | LOCKED, &[ends_the_read, waits, waits], |_| {});
}

#[test]
fn those_who_wait_for_a_read_that_fails_go_on() {
    fn fails(cache: &Cache) {
        cache.folio().clear(ATTACHED);
        cache.turn(0, LOCKED);
        cache.unpin();
    }
    fn waits(cache: &Cache) {
        assert_eq!(cache.wait_and_look(), None);
    }
    check(ATTACHED | LOCKED, &[fails, waits, waits], |cache| assert!(cache.is_freed(0)));
}

/// Readers that come while a writer changes a page in place wait for it.
#[test]
fn a_page_changes_only_while_nobody_reads_it() {
    fn looks(cache: &Cache) {
        assert!(cache.look().is_none_or(|seen| [OLD, NEW].contains(&seen)));
    }
    fn waits(cache: &Cache) {
        assert!(cache.wait_and_look().is_some_and(|seen| [OLD, NEW].contains(&seen)));
    }
    check(READ, &[Cache::change, looks, waits], |_| {});
}

#[test]
fn writers_of_a_page_take_turns() {
    check(READ, &[Cache::change, Cache::change], |cache| {
        assert!(!cache.folio().state().has_any(LOCKED | EXCLUSIVE));
    });
}
