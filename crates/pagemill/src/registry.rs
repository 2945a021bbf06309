//! Which arena an address or a frame number belongs to; how freeing needs no allocator argument. And how an arena ends.
//!
//! Frame numbers are process-wide: an arena gets pieces of 2^18 of them (1 GiB), so that a list may span arenas and one table of
//! 16384 entries leads back. Its first number lies as far beyond a multiple of its largest block as its address does, so what
//! is aligned by number is aligned by address. Addresses go through two levels: 16384 entries of 16 GiB, each a leaf of 8192
//! entries of 2 MiB, made when an arena first comes to lie there and kept for ever.
//!
//! Reads take no lock: a pointer that is found here, or remembered by a thread, is that of an [`Zone`], which is never freed.
//! Whether it still stands for the memory that was looked for, [`Zone::contains`] and [`Zone::has_pfn`] say. Writers hold the
//! one lock ([`lock`]); no page's path waits for it.
//!
//! # How an arena ends (ADR 30)
//! 1. The allocator's last handle is dropped: `Zone::leave` shuts the lists, drains them and closes the zone. Each page that is
//!    still out goes to the zone from then on, and the call that brings the last one is told so.
//! 2. That call, perhaps in a signal handler, puts the arena on [`HOME`] ([`come_home`]). It goes on if nobody holds the registry;
//!    else the holder finds the arena there when it lets go.
//! 3. [`end`]
//! 4. The next call that may free memory of the heap does that with all of [`ENDED`] ([`bury`]).
use crate::build_error::BuildError;
use crate::process::{SECTIONS, begin_generation};
use crate::shared::forget_unused_waits;
use crate::zone::{Body, Zone};
use core::ops::Range;
use core::ptr;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicPtr, AtomicU32, fence};
use pagemill_core::{Order, Pfn, step};
use pagemill_os::{ForkHooks, ForkLock};

/// log2 of the bytes an entry of a leaf stands for: a pageblock.
const GRANULE_SHIFT: u32 = 21;
const LEAF_BITS: u32 = 13;
const LEAF_SHIFT: u32 = GRANULE_SHIFT + LEAF_BITS;
/// Addresses have 48 bits at most, without the system's five-level page tables, which nobody gets without asking.
const ADDRESS_BITS: u32 = 48;
/// Frame numbers are given out in pieces of the largest block, so that no block's number is misaligned.
const PIECE_SHIFT: u32 = Order::MAX.get() as u32;
/// The last piece stays unused: its last number means "no frame".
const PIECES: usize = (1 << (32 - PIECE_SHIFT)) - 1;
/// The largest arena, in frames.
pub(crate) const FRAMES_MAX: usize = PIECES << PIECE_SHIFT;

type Slot = AtomicPtr<Zone>;
/// For each granule 0, or the number of its first frame with bit 0 set: such a number is a multiple of 512.
type Leaf = [AtomicU32; 1 << LEAF_BITS];
const PRESENT: u32 = 1;

static LEAVES: [AtomicPtr<Leaf>; 1 << (ADDRESS_BITS - LEAF_SHIFT)] =
    [const { AtomicPtr::new(ptr::null_mut()) }; 1 << (ADDRESS_BITS - LEAF_SHIFT)];
static BY_NUMBER: [Slot; PIECES] = [const { AtomicPtr::new(ptr::null_mut()) }; PIECES];
/// Held by whoever makes or closes an allocator, or forks. Not a mutex: a fork lets go of it in two processes.
static WRITING: ForkLock = ForkLock::new();

/// The arena that this thread met last. Looked at first, by a branch that the processor predicts: otherwise what is done
/// with a page waits for three loads that depend on its address, one after the other, on the way from a free to the next
/// allocation (4 ns of 12). A thread's and not a CPU's, whose number would stand on that way too (2 ns of 8).
#[inline]
fn recent_arena() -> Option<&'static Zone> {
    // SAFETY: null, or what `note` set. Arenas are never freed.
    unsafe { pagemill_os::last_zone().cast::<Zone>().as_ref() }
}

fn note(zone: &'static Zone) {
    // SAFETY: an allocator's own word.
    unsafe { pagemill_os::set_last_zone(ptr::from_ref(zone).cast()) };
}

/// The arena that has this address, if one does, and the number of the frame there.
#[inline]
pub(crate) fn by_address(addr: usize) -> Option<(&'static Zone, Pfn)> {
    match recent(addr) {
        None => by_levels(addr),
        found => found,
    }
}

/// The same, if it is the arena that this thread met last: as a rule it is.
#[inline]
pub(crate) fn recent(addr: usize) -> Option<(&'static Zone, Pfn)> {
    step!("registry::recent");
    let zone = recent_arena()?;
    if zone.contains(addr) { Some((zone, zone.pfn_of(addr))) } else { None }
}

#[cold]
#[inline(never)]
fn by_levels(addr: usize) -> Option<(&'static Zone, Pfn)> {
    // Acquire pairs with the Release in `leaf_for`: the leaf's entries are initialised.
    let leaf = LEAVES.get(addr >> LEAF_SHIFT)?.load(Acquire);
    // SAFETY: a leaf is leaked, so it lives for ever.
    let leaf = unsafe { leaf.as_ref() }?;
    // Acquire pairs with the Release in `enter`: the arena's fields.
    let entry = leaf[(addr >> GRANULE_SHIFT) & ((1 << LEAF_BITS) - 1)].load(Acquire);
    if entry & PRESENT == 0 {
        return None;
    }
    // SAFETY: as in `recent_arena`.
    let zone = unsafe { BY_NUMBER[(entry >> PIECE_SHIFT) as usize].load(Acquire).as_ref() }?;
    if !zone.contains(addr) {
        return None;
    }
    note(zone);
    // Not by the entry, which may be that of an arena that lay there before.
    Some((zone, zone.pfn_of(addr)))
}

/// The arena that has this frame number.
///
/// # Panics
/// If none does: numbers come from Pagemill alone.
#[inline]
pub(crate) fn by_pfn(pfn: Pfn) -> &'static Zone {
    match recent_arena() {
        Some(recent) if recent.has_pfn(pfn) => recent,
        _ => by_piece(pfn),
    }
}

#[cold]
#[inline(never)]
fn by_piece(pfn: Pfn) -> &'static Zone {
    // Acquire pairs with the Release in `enter`.
    let zone = BY_NUMBER[(pfn.as_u32() >> PIECE_SHIFT) as usize].load(Acquire);
    // SAFETY: as in `recent_arena`.
    match unsafe { zone.as_ref() } {
        Some(zone) => {
            note(zone);
            zone
        }
        None => panic!("{pfn} belongs to no arena"),
    }
}

/// Refuses a range in which some arena lies: each address has one owner.
pub(crate) fn check_apart(_held: &Writing, range: &Range<usize>) -> Result<(), BuildError> {
    let mut refused = Ok(());
    for_each(|zone| {
        let other = zone.range();
        if range.start < other.end && other.start < range.end {
            let (start, end) = (range.start, range.end);
            refused = Err(BuildError::Overlap { start, end, other_start: other.start, other_end: other.end });
        }
    });
    refused
}

/// With the registry held: finds frame numbers for an arena of `frames` frames that begins `lead` frames beyond a multiple of its
/// largest block. Calls `make` with the first number, and enters what that made.
pub(crate) fn enter(
    _held: &Writing,
    lead: usize,
    frames: usize,
    make: impl FnOnce(Pfn) -> Result<Body, BuildError>,
) -> Result<&'static Zone, BuildError> {
    let pieces = (lead + frames).div_ceil(1 << PIECE_SHIFT);
    let mut first = 0;
    while let Some(taken) = (first..first + pieces).find(|&i| i < PIECES && !BY_NUMBER[i].load(Relaxed).is_null()) {
        first = taken + 1;
    }
    if first + pieces > PIECES {
        return Err(BuildError::FrameNumbers { max: FRAMES_MAX });
    }
    // SAFETY: null, or an arena, and those are never freed.
    let zone = match unsafe { FREE.load(Relaxed).as_ref() } {
        Some(free) => free,
        None => {
            let fresh = Box::into_raw(Box::new(Zone::new()));
            FREE.store(fresh, Relaxed);
            // SAFETY: a box's, kept for ever.
            unsafe { &*fresh }
        }
    };
    let body = make(Pfn::new(((first << PIECE_SHIFT) + lead) as u32))?;
    FREE.store(zone.next.load(Relaxed), Relaxed);
    // SAFETY: it was free, and the registry is held.
    unsafe { zone.begin(body) };
    let entry = ptr::from_ref(zone).cast_mut();
    // Release pairs with the Acquire of both readers.
    BY_NUMBER[first..first + pieces].iter().for_each(|slot| slot.store(entry, Release));
    entries_of(zone).for_each(|(slot, pfn)| slot.store(pfn.as_u32() | PRESENT, Release));
    note(zone);
    Ok(zone)
}

/// Arenas without a handle whose last page is back, by their `next`. Whatever is kept is on one of these three stacks: leak
/// checkers report memory that nothing leads to.
static HOME: Slot = AtomicPtr::new(ptr::null_mut());
/// Headers of arenas that stand for nothing, by their `next`. Changed with the registry held.
static FREE: Slot = AtomicPtr::new(ptr::null_mut());
/// Zones that have ended and still have something on the heap. Changed with the registry held.
static ENDED: Slot = AtomicPtr::new(ptr::null_mut());

/// Puts an arena without a handle on its way to its end. Called once, by the call whose page made the zone complete; perhaps in a
/// signal handler.
#[cold]
#[inline(never)]
pub(crate) fn come_home(zone: &'static Zone) {
    let entry = ptr::from_ref(zone).cast_mut();
    let mut top = HOME.load(Relaxed);
    loop {
        zone.next.store(top, Relaxed);
        // Release pairs with the Acquire in `end_those_at_home`.
        match HOME.compare_exchange_weak(top, entry, Release, Relaxed) {
            Ok(_) => break,
            Err(now) => top = now,
        }
    }
    // SeqCst pairs with the fence in `unlock_after_fork`: this finds the registry free, or its holder finds the arena.
    fence(SeqCst);
    end_those_at_home();
}

/// Ends the arenas on [`HOME`], if nobody holds the registry; else its holder does, when it lets go.
fn end_those_at_home() {
    while !HOME.load(Relaxed).is_null() && WRITING.try_take() {
        end_those_held();
        WRITING.release();
        // SeqCst as in `unlock_after_fork`.
        fence(SeqCst);
    }
}

/// With the registry held: ends the arenas on [`HOME`].
fn end_those_held() {
    let mut next = HOME.swap(ptr::null_mut(), Acquire);
    // SAFETY: null, or an arena, and those are never freed.
    while let Some(zone) = unsafe { next.as_ref() } {
        next = zone.next.load(Relaxed);
        end(zone);
    }
}

/// With the registry held: gives the memory and the numbers of an arena to the system and to the next arena. Does only what a
/// signal handler may do.
fn end(zone: &'static Zone) {
    take_out(zone);
    // SAFETY: the zone is closed and complete. So no page of it is out, no thread that freed one touches it any more, and no
    // handle is left that leads to it; nor does the registry. It is on no stack.
    unsafe { zone.end() };
    push(&ENDED, zone);
}

/// With the registry held: puts a zone on one of its stacks.
fn push(stack: &Slot, zone: &'static Zone) {
    zone.next.store(stack.load(Relaxed), Relaxed);
    stack.store(ptr::from_ref(zone).cast_mut(), Relaxed);
}

/// Frees what ended zones have on the heap, whose headers may stand for the next ones then. For calls that no signal handler may
/// make; locks the registry.
pub(crate) fn bury() {
    // One at a time, so that the child of a fork misses one at most. Not with the registry held: memory that was brought may be a
    // type's with a `Drop` of its own.
    while let Some(zone) = pop_ended() {
        // SAFETY: it has ended, and nobody else takes it off the stack.
        unsafe { zone.bury() };
        let _held = lock();
        push(&FREE, zone);
    }
}

fn pop_ended() -> Option<&'static Zone> {
    let _held = lock();
    // SAFETY: null, or a zone, and those are never freed.
    let zone = unsafe { ENDED.load(Relaxed).as_ref() }?;
    ENDED.store(zone.next.load(Relaxed), Relaxed);
    Some(zone)
}

/// In the child of a fork: it finds again by itself which arenas end.
fn forget_home() {
    HOME.store(ptr::null_mut(), Relaxed);
}

/// Takes an arena out of the tables.
fn take_out(zone: &'static Zone) {
    entries_of(zone).for_each(|(slot, _)| slot.store(0, Release));
    let entry = ptr::from_ref(zone).cast_mut();
    for slot in &BY_NUMBER[zone.pfn_of(zone.base()).as_usize() >> PIECE_SHIFT..] {
        if slot.load(Relaxed) != entry {
            break;
        }
        slot.store(ptr::null_mut(), Release);
    }
}

/// Every arena, each once.
pub(crate) fn for_each(mut visit: impl FnMut(&'static Zone)) {
    let mut last = ptr::null_mut();
    for slot in &BY_NUMBER {
        let zone = slot.load(Acquire);
        if zone != last {
            last = zone;
            // SAFETY: as in `by_address`.
            if let Some(zone) = unsafe { zone.as_ref() } {
                visit(zone);
            }
        }
    }
}

/// Whoever has it holds the registry: nobody else changes it, and the process does not fork.
pub(crate) struct Writing;

impl Drop for Writing {
    fn drop(&mut self) {
        unlock_after_fork();
    }
}

/// Holds the registry, as soon as nobody else does. Forks wait from the first call on.
pub(crate) fn lock() -> Writing {
    watch();
    WRITING.take();
    // What ended before this call is not in its way, though its memory may still be on the way to the system.
    end_those_held();
    Writing
}

/// The same, if nobody holds it just now.
pub(crate) fn try_lock() -> Option<Writing> {
    watch();
    if WRITING.try_take() { Some(Writing) } else { None }
}

/// Nobody changes the registry until [`unlock_after_fork`] or [`unlock_in_child`]. A thread that asks for it while this
/// waits comes after the fork.
fn lock_for_fork() {
    WRITING.take_for_fork();
}

fn unlock_after_fork() {
    WRITING.release();
    // SeqCst pairs with the fence in `come_home`.
    fence(SeqCst);
    end_those_at_home();
}

fn unlock_in_child() {
    WRITING.free_after_fork();
    end_those_at_home();
}

/// Where an arena's granules are entered, each with its first frame.
fn entries_of(zone: &Zone) -> impl Iterator<Item = (&'static AtomicU32, Pfn)> {
    let addrs = (zone.base()..zone.base() + zone.bytes()).step_by(1 << GRANULE_SHIFT);
    addrs.map(|addr| (&leaf_for(addr >> GRANULE_SHIFT)[(addr >> GRANULE_SHIFT) % (1 << LEAF_BITS)], zone.pfn_of(addr)))
}

/// The leaf that has this granule, made if there is none. Only under the lock.
fn leaf_for(granule: usize) -> &'static Leaf {
    let slot = &LEAVES[granule >> LEAF_BITS];
    // SAFETY: a leaf is leaked, so it lives for ever.
    if let Some(leaf) = unsafe { slot.load(Acquire).as_ref() } {
        return leaf;
    }
    let leaf: Box<Leaf> = Box::new([const { AtomicU32::new(0) }; 1 << LEAF_BITS]);
    let leaf = Box::leak(leaf);
    // Release pairs with the Acquire in `by_levels`.
    slot.store(leaf, Release);
    leaf
}

static HOOKS: ForkHooks = ForkHooks { before, in_parent, in_child };

fn before() {
    lock_for_fork();
    SECTIONS.hold_back();
}

fn in_parent() {
    SECTIONS.let_in();
    unlock_after_fork();
}

fn in_child() {
    begin_generation();
    forget_unused_waits();
    forget_home();
    for_each(|zone| {
        if zone.recover() {
            come_home(zone);
        }
    });
    unlock_in_child();
    SECTIONS.forget_after_fork(); // Those of the other threads: they are not here.
}

/// Runs as the library is loaded. The system reads its fork handlers as a fork begins: a fork that met the process's
/// first use just then would not wait for it, were they first told of us there, and its child would wait for ever.
// SAFETY: what stands in this section is called once, without anything that it needs but the C library.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = {
    extern "C" fn at_load() {
        pagemill_os::on_fork(&HOOKS); // If it fails, `watch` tries again and says so.
    }
    at_load
};

/// Has the child of every fork recover every allocator. No allocator is made or closed while the process forks, nor is
/// the self-test run or the default allocator made: whoever does that holds the registry, having called this first.
pub(crate) fn watch() {
    assert!(pagemill_os::on_fork(&HOOKS), "the system does not take fork handlers: no memory");
}

#[cfg(test)]
mod tests {
    use super::{ENDED, FRAMES_MAX, PIECE_SHIFT, WRITING, by_address, enter, lock};
    use crate::build_error::BuildError;
    use crate::{Allocator, Gfp, Page};
    use core::sync::atomic::Ordering::Relaxed;

    /// Other tests' arenas would have some of the numbers.
    fn has_process_of_its_own() -> bool {
        let has = std::env::var_os("PAGEMILL_TEST_PROCESS").is_some();
        if !has {
            println!("skipped: other tests run in this process");
        }
        has
    }

    #[test]
    fn frame_numbers_are_given_out_up_to_the_last_piece_and_not_beyond() {
        if !has_process_of_its_own() {
            return;
        }
        let _first = Allocator::builder().pages(64).build().unwrap();
        let held = lock();
        // What makes the arena is asked, and has none, only if there are numbers for it.
        let ask = |frames| enter(&held, 0, frames, |_| Err(BuildError::BackendName)).err();
        assert_eq!(ask(FRAMES_MAX - (1 << PIECE_SHIFT)), Some(BuildError::BackendName));
        assert_eq!(ask(FRAMES_MAX), Some(BuildError::FrameNumbers { max: FRAMES_MAX }));
    }

    /// A page that keeps its arena, whose allocator has no handle, and whether that arena is still there.
    fn last_page() -> (Page, impl Fn() -> bool) {
        let allocator = Allocator::builder().pages(64).build().unwrap();
        let (page, number) = (allocator.alloc_page(Gfp::KERNEL).unwrap(), allocator.zones().number);
        let addr = page.addr();
        // By its allocator: another one's may come to lie there.
        (page, move || by_address(addr).is_some_and(|(zone, _)| zone.shared.number == number))
    }

    #[test]
    fn an_arena_that_comes_home_while_the_registry_is_held_ends_when_it_is_let_go() {
        let (page, is_there) = last_page();
        let held = lock();
        drop(page);
        assert!(is_there());
        drop(held);
        assert!(!is_there());
    }

    /// A right program may bring the same memory again as soon as its last page is free: it must not meet the old arena.
    #[test]
    fn an_arena_that_came_home_ends_before_the_next_thread_changes_the_registry() {
        let (page, is_there) = last_page();
        core::mem::forget(lock());
        drop(page);
        assert!(is_there());
        // The holder has let go, and has not looked yet for what came home.
        WRITING.release();
        let held = lock();
        assert!(!is_there());
        drop(held);
    }

    #[test]
    fn building_an_allocator_frees_what_arenas_that_ended_have_on_the_heap() {
        if !has_process_of_its_own() {
            return;
        }
        let page = Allocator::builder().pages(64).build().unwrap().alloc_page(Gfp::KERNEL).unwrap();
        assert!(ENDED.load(Relaxed).is_null());
        drop(page);
        assert!(!ENDED.load(Relaxed).is_null());
        let _next = Allocator::builder().pages(64).build().unwrap();
        assert!(ENDED.load(Relaxed).is_null());
    }
}

#[cfg(all(test, not(any(miri, shuttle))))]
mod fork_tests {
    use super::{before, in_parent, lock};
    use crate::fifo;
    use crate::process::no_fork;

    #[track_caller]
    fn assert_sleeps(hold: impl FnOnce(&dyn Fn()) + Send, wait: impl FnOnce() + Send) {
        match fifo::sleeps(hold, wait) {
            Ok(times) => assert!(times > 0, "it kept what it waits for off the CPU"),
            Err(why) => println!("skipped: {why}"),
        }
    }

    /// What a fork does before and after there are two processes.
    fn fork_with(between: impl FnOnce()) {
        before();
        between();
        in_parent();
    }

    fn hold_registry(others: &dyn Fn()) {
        let held = lock();
        others();
        drop(held);
    }

    #[test]
    fn the_registry_is_waited_for_asleep() {
        assert_sleeps(hold_registry, || drop(lock()));
    }

    #[test]
    fn a_fork_waits_for_the_registry_asleep() {
        assert_sleeps(hold_registry, || fork_with(|| {}));
    }

    #[test]
    fn a_fork_waits_for_a_section_asleep() {
        let hold = |others: &dyn Fn()| {
            let section = no_fork();
            others();
            drop(section);
        };
        assert_sleeps(hold, || fork_with(|| {}));
    }

    #[test]
    fn a_section_waits_for_a_fork_asleep() {
        assert_sleeps(|others| fork_with(others), || drop(no_fork()));
    }
}
