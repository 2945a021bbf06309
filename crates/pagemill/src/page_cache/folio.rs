//! What the cache knows of each of its pages: a folio, 32 bytes beside the page (the kernel's `struct folio`).
//!
//! The index says which folio may hold a page of a file. The folio itself says whether it does. Readers take no lock:
//! they pin a folio by one atomic addition, and look whether it is the right one. All that can happen to a page goes
//! through the one word that the pins are in.
//!
//! # Invariants
//! - L1 A folio with `IN_USE` owns a page. `file`, `at` and `page` change only while it has neither `IN_USE` nor
//!   `ATTACHED`.
//! - L2 A folio with `ATTACHED` is in the index of its file, or is just put there or taken from there by a thread that
//!   has the lock of that index. Only such a thread changes the flag.
//! - L3 A page goes back only once its folio has lost `ATTACHED` and then all pins. One thread takes `IN_USE` away, by
//!   a compare-and-swap that sees both; this thread frees the page.
//! - L4 A pin that finds the wrong folio is given back at once. Such a pin may come at any time, also to a folio that is
//!   free. So every change of the word keeps the pins that it does not know.
//! - L5 The bytes of a page change only while its folio has `LOCKED` and is not yet `UPTODATE`, or has `EXCLUSIVE`.
//!   `EXCLUSIVE` is set only where the one pin is that of the thread that sets it. Whoever finds it after having pinned
//!   waits for its end before looking at the bytes.
use crate::handle::Page;
use crate::handle::sealed::Word;
use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, Mutex};
use core::num::NonZeroU32;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use pagemill_core::PAGE_SIZE;
use std::sync::PoisonError;

/// It owns a page.
pub(super) const IN_USE: u64 = 1;
/// It is in the index of its file.
pub(super) const ATTACHED: u64 = 1 << 1;
/// The page has the file's bytes.
pub(super) const UPTODATE: u64 = 1 << 2;
/// One thread, or one transfer, may change the page.
pub(super) const LOCKED: u64 = 1 << 3;
/// Nobody else reads it.
pub(super) const EXCLUSIVE: u64 = 1 << 4;
/// The page has bytes that the backing does not have.
pub(super) const DIRTY: u64 = 1 << 5;
/// It is being written to the backing.
pub(super) const WRITEBACK: u64 = 1 << 6;
/// Who reads this page begins the next window of readahead.
pub(super) const MARKER: u64 = 1 << 7;
/// A thread sleeps until the word changes.
pub(super) const WAITERS: u64 = 1 << 8;
/// It was read ahead, and nobody has asked for it yet.
pub(super) const AHEAD: u64 = 1 << 9;
/// Its read failed.
pub(super) const FAILED: u64 = 1 << 10;
/// Its read was of this page alone.
pub(super) const ALONE: u64 = 1 << 11;
/// It is in a queue for eviction.
pub(super) const QUEUED: u64 = 1 << 12;
/// How often it was used lately, up to `USES_MAX`.
const USE: u64 = 1 << 16;
pub(super) const USES: u64 = USES_MAX * USE;
const USES_MAX: u64 = 3;
/// One pin.
pub(super) const PIN: u64 = 1 << 32;
/// More pins than this are refused: far fewer than there is room for, so that refused ones do not overflow.
const PINS_MAX: u64 = 1 << 30;

/// The word of a folio, as it was at one moment.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct State(pub(super) u64);

impl State {
    #[inline]
    pub(super) fn has(self, flags: u64) -> bool {
        self.0 & flags == flags
    }
    #[inline]
    pub(super) fn has_any(self, flags: u64) -> bool {
        self.0 & flags != 0
    }
    #[inline]
    pub(super) fn pins(self) -> u64 {
        self.0 / PIN
    }
    #[inline]
    pub(super) fn uses(self) -> u64 {
        (self.0 & USES) / USE
    }
    pub(super) fn with(self, flags: u64) -> Self {
        Self(self.0 | flags)
    }
    pub(super) fn without(self, flags: u64) -> Self {
        Self(self.0 & !flags)
    }
    /// The same number of uses, for a copy of the page.
    pub(super) fn uses_as_flags(self) -> u64 {
        self.0 & USES
    }
    /// With fewer uses, of which there are so many.
    pub(super) fn used_less(self, uses: u64) -> Self {
        Self(self.0 - uses * USE)
    }
}

impl core::fmt::Debug for State {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} pins, {} uses, flags {:#x}", self.pins(), self.uses(), self.0 as u16)
    }
}

/// The number of a folio in its table, from 1 on.
pub(super) type Number = NonZeroU32;

#[repr(C, align(32))]
pub(super) struct Folio {
    state: AtomicU64,
    /// The page's number in the file.
    at: AtomicU64,
    /// The page's address.
    page: AtomicUsize,
    /// The file's number.
    file: AtomicU32,
}

impl Folio {
    #[inline]
    pub(super) fn state(&self) -> State {
        State(self.state.load(Acquire))
    }
    #[inline]
    pub(super) fn at(&self) -> u64 {
        self.at.load(Relaxed)
    }
    #[inline]
    pub(super) fn file(&self) -> u32 {
        self.file.load(Relaxed)
    }
    #[inline]
    pub(super) fn addr(&self) -> usize {
        self.page.load(Relaxed)
    }

    /// A pointer to the page. What may be done with it is L5.
    #[inline]
    pub(super) fn as_ptr(&self) -> *mut u8 {
        core::ptr::with_exposed_provenance_mut(self.addr())
    }

    /// Adds a pin, and returns the word with it.
    #[inline]
    pub(super) fn pin(&self) -> State {
        // Acquire pairs with the Release of whoever attached the folio or filled the page: its identity and its bytes
        // are then visible. It pairs with `detach` too: a folio that is taken from the index is seen to be so, or
        // whoever took it sees this pin.
        State(self.state.fetch_add(PIN, Acquire) + PIN)
    }

    /// Takes pins away. The caller has them. Returns the word without them.
    #[inline]
    pub(super) fn unpin(&self, pins: u64) -> State {
        // Release pairs with the Acquire of whoever changes or frees the page next: this thread's reads come first. Acquire
        // is for the thread that takes the last pin away and frees: others' reads come before.
        State(self.state.fetch_sub(pins * PIN, AcqRel) - pins * PIN)
    }

    /// Takes pins away. Returns whether the folio ended with them (L3): then its page and its number are the caller's.
    #[inline]
    pub(super) fn release(&self, pins: u64) -> bool {
        let now = self.unpin(pins);
        now.pins() == 0 && !now.has(ATTACHED) && self.end()
    }

    /// Whether the folio holds this page of this file. Only for a thread that has pinned it, with the word as it was
    /// then.
    #[inline]
    pub(super) fn is_page(&self, state: State, file: u32, at: u64) -> bool {
        state.has(ATTACHED) && self.at() == at && self.file() == file
    }
    /// The same, where the page is up to date too and nobody changes it (L5).
    #[inline]
    pub(super) fn is_ready(&self, state: State, file: u32, at: u64) -> bool {
        state.has(UPTODATE) && !state.has(EXCLUSIVE) && self.is_page(state, file, at)
    }

    /// Sets and takes flags by one addition. The caller knows that it has none of the flags `on` and all of `off`, and
    /// has `pins` pins, which go too. Returns the word before.
    #[inline]
    pub(super) fn turn(&self, on: u64, off: u64, pins: u64) -> State {
        // AcqRel: as for `pin` and `unpin`.
        State(self.state.fetch_add(on.wrapping_sub(off).wrapping_sub(pins * PIN), AcqRel))
    }

    /// Sets flags. Returns the word before.
    pub(super) fn set(&self, flags: u64) -> State {
        State(self.state.fetch_or(flags, AcqRel))
    }
    /// Takes flags away. Returns the word before.
    pub(super) fn clear(&self, flags: u64) -> State {
        State(self.state.fetch_and(!flags, AcqRel))
    }

    /// Changes the word as `change` says, which is called again where another thread changed it. Returns the word
    /// before, or the one that was refused.
    #[inline]
    pub(super) fn change(&self, mut change: impl FnMut(State) -> Option<State>) -> Result<State, State> {
        // AcqRel, Acquire: as for `pin` and `unpin`.
        let changed =
            self.state.fetch_update(AcqRel, Acquire, |state| change(State(state)).map(|State(changed)| changed));
        changed.map(State).map_err(State)
    }

    /// Notes a use, unless another thread changes the word at this moment: it need not be exact.
    #[inline]
    pub(super) fn used(&self, state: State) {
        if state.has(AHEAD) || state.uses() < USES_MAX {
            self.note_use();
        }
    }
    #[inline(never)]
    fn note_use(&self) {
        // Relaxed: nothing hangs on it.
        let now = self.state.load(Relaxed);
        // The first to ask for a page that was read ahead is as one that misses: no use yet.
        let noted = match now & AHEAD {
            0 if State(now).uses() < USES_MAX => now + USE,
            0 => return,
            _ => now & !AHEAD,
        };
        _ = self.state.compare_exchange(now, noted, Relaxed, Relaxed);
    }

    /// Keeps readers away, if the one pin is the caller's and the page is not on its way to the backing (L5). The caller
    /// has the page locked.
    pub(super) fn make_exclusive(&self) -> bool {
        let is_alone = |now: State| now.pins() == 1 && !now.has(WRITEBACK);
        self.change(|now| is_alone(now).then(|| now.with(EXCLUSIVE))).is_ok()
    }

    /// Takes the folio off its file, and returns the word before. The caller has the lock of the index (L2).
    pub(super) fn detach(&self) -> State {
        self.clear(ATTACHED | DIRTY)
    }

    /// Takes a folio off its file and ends it, if its word is still `state`, which has no pins. The caller has the lock
    /// of the index (L2). `kept` are flags that stay.
    pub(super) fn end_unchanged(&self, state: State, kept: u64) -> bool {
        self.change(|now| (now == state).then_some(State(now.0 & kept))).is_ok()
    }

    /// Takes `IN_USE` away if nobody has the folio any more (L3). Then its page and its number are the caller's, to be
    /// freed. Only for a word that is not `ATTACHED`.
    #[cold]
    pub(super) fn end(&self) -> bool {
        let is_over = |state: State| state.has(IN_USE) && !state.has(ATTACHED) && state.pins() == 0;
        // All that is left is whether it is in a queue.
        self.change(|state| is_over(state).then_some(State(state.0 & QUEUED))).is_ok()
    }
}

/// Whether a folio that was just pinned has room for more pins.
#[inline]
pub(super) fn has_room_for_pins(state: State) -> bool {
    state.pins() <= PINS_MAX
}

/// The folios of a cache. Its memory is committed as folios are used.
pub(super) struct Folios {
    table: Table,
    capacity: u32,
    free: Mutex<Free>,
}

#[cfg(not(any(loom, shuttle)))]
type Table = pagemill_os::Mapping;
#[cfg(any(loom, shuttle))]
type Table = Box<[Folio]>;

#[derive(Default)]
struct Free {
    /// Folios that were in use and are not any more.
    numbers: Vec<Number>,
    /// Folios from this number on were never in use.
    fresh: u32,
}

impl Folios {
    pub(super) fn new(capacity: u32) -> Self {
        Self { table: table(capacity as usize), capacity, free: Mutex::default() }
    }

    fn as_slice(&self) -> &[Folio] {
        // SAFETY: `table` made so many, and they live as long as this.
        unsafe { core::slice::from_raw_parts(self.table.as_ptr(), self.capacity as usize) }
    }

    /// The folio of a number that the index has named.
    #[inline]
    pub(super) fn get(&self, number: Number) -> &Folio {
        &self.as_slice()[number.get() as usize - 1]
    }

    /// Adds the numbers of up to `n` folios that are free, and returns how many.
    pub(super) fn take(&self, n: usize, numbers: &mut Vec<Number>) -> usize {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let back = free.numbers.len();
        let reused = n.min(back);
        numbers.extend(free.numbers.drain(back - reused..));
        let fresh = ((n - reused) as u32).min(self.capacity - free.fresh);
        numbers.extend((free.fresh + 1..=free.fresh + fresh).filter_map(NonZeroU32::new));
        free.fresh += fresh;
        reused + fresh as usize
    }

    /// Takes back the numbers of folios that have ended.
    pub(super) fn put_back(&self, numbers: &[Number]) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).numbers.extend_from_slice(numbers);
    }

    /// Makes a free folio that of a page of a file, with these flags and a pin.
    #[inline]
    pub(super) fn begin(&self, number: Number, page: Page, file: u32, at: u64, flags: u64) -> &Folio {
        let folio = self.get(number);
        debug_assert!(!folio.state().has_any(IN_USE | ATTACHED));
        folio.at.store(at, Relaxed);
        folio.file.store(file, Relaxed);
        folio.page.store(page.into_word(), Relaxed);
        // Release pairs with the Acquire of `pin`.
        folio.turn(IN_USE | flags | PIN, 0, 0);
        folio
    }

    /// The page of a folio whose end the caller has claimed by [`Folio::end`].
    pub(super) fn page_of(&self, number: Number) -> Page {
        // SAFETY: the word came from the page's handle, and L3 gives it to the caller alone.
        unsafe { Page::from_word(self.get(number).addr()) }
    }

    /// The bytes of metadata, for a cache that is full.
    pub(super) fn bytes(&self) -> usize {
        let fresh = self.free.lock().unwrap_or_else(PoisonError::into_inner).fresh;
        fresh as usize * size_of::<Folio>()
    }
}

/// Zeroed memory is a table of free folios: the system commits it as it is used.
#[cfg(not(any(loom, shuttle)))]
fn table(capacity: usize) -> Table {
    let bytes = capacity.max(1) * size_of::<Folio>();
    Table::reserve(bytes, PAGE_SIZE).unwrap_or_else(|why| panic!("{bytes} bytes for a cache's folios: error {}", why.0))
}

/// The atomics of a model checker are not zeroes.
#[cfg(any(loom, shuttle))]
fn table(capacity: usize) -> Table {
    let folio = |_| Folio {
        state: AtomicU64::new(0),
        at: AtomicU64::new(0),
        page: AtomicUsize::new(0),
        file: AtomicU32::new(0),
    };
    (0..capacity).map(folio).collect()
}

impl Drop for Folios {
    fn drop(&mut self) {
        let free = self.free.get_mut().unwrap_or_else(PoisonError::into_inner);
        debug_assert_eq!(free.numbers.len(), free.fresh as usize, "a folio is in use as its cache ends");
    }
}

const _: () = assert!(size_of::<Folio>() == 32 || cfg!(any(loom, shuttle)));
const _: () = assert!(PAGE_SIZE == 4096);
