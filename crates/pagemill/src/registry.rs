//! Finds the zone of an address or a frame number, so that freeing needs no allocator argument; and ends zones.
//!
//! Every free looks up its zone here, and so do lists, whose links are frame numbers.
//!
//! # Tables
//! Frame numbers are unique in the process. An arena gets pieces of 2^18 numbers (1 GiB), so a list may span arenas,
//! and one table of 16384 entries leads from a number to its zone. The first number is as far above a multiple of the
//! arena's largest block as its address is: what is aligned by number is aligned by address. Addresses are looked up in
//! two levels: 16384 entries of 16 GiB each, which point to leaves of 8192 entries of 2 MiB. A leaf is made when the
//! first arena lies in it, and kept for ever.
//!
//! # Locks
//! Reads take no lock: a pointer that is found here, or remembered by a thread, is that of a [`Zone`], which is never
//! freed. [`Zone::contains`] and [`Zone::has_pfn`] tell whether it still stands for the memory in question. Writers
//! hold one lock ([`lock`]), "the registry". A request waits for it only when it reclaims, since a round holds it for a
//! moment to list the shrinkers. It comes before sections that no fork interrupts, and before every mutex in `zones.rs` and
//! `reclaim.rs`.
//!
//! # How a zone ends (ADR 30)
//! 1. The allocator's last handle is dropped: `Zone::leave` shuts the lists, drains them and closes the zone. From then
//!    on each page that is still out goes to the zone, and the call that frees the last one learns that it was the last.
//! 2. That call, possibly in a signal handler, puts the zone on [`HOME`] ([`come_home`]). If no thread holds the
//!    registry, the call ends the zone at once; otherwise the holder finds it there when it unlocks.
//! 3. [`end`] takes the zone out of the tables and returns its memory to the system. It does only what a signal handler
//!    may do.
//! 4. The next call that may free heap memory frees that of all zones on [`ENDED`] ([`bury`]).
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

/// log2 of the bytes that an entry of a leaf stands for: a pageblock.
const GRANULE_SHIFT: u32 = 21;
const LEAF_BITS: u32 = 13;
const LEAF_SHIFT: u32 = GRANULE_SHIFT + LEAF_BITS;
/// Addresses have at most 48 bits. Only programs that ask for it get more, with five-level page tables.
const ADDRESS_BITS: u32 = 48;
/// Frame numbers are assigned in pieces as large as the largest block, so that no block's number is misaligned.
const PIECE_SHIFT: u32 = Order::MAX.get() as u32;
/// The last piece stays unused: its last number means "no frame".
const PIECES: usize = (1 << (32 - PIECE_SHIFT)) - 1;
/// The largest arena, in frames.
pub(crate) const FRAMES_MAX: usize = PIECES << PIECE_SHIFT;

type Slot = AtomicPtr<Zone>;
/// For each granule 0, or the number of its first frame, which is a multiple of 512, with bit 0 set.
type Leaf = [AtomicU32; 1 << LEAF_BITS];
const PRESENT: u32 = 1;

static LEAVES: [AtomicPtr<Leaf>; 1 << (ADDRESS_BITS - LEAF_SHIFT)] =
    [const { AtomicPtr::new(ptr::null_mut()) }; 1 << (ADDRESS_BITS - LEAF_SHIFT)];
static BY_NUMBER: [Slot; PIECES] = [const { AtomicPtr::new(ptr::null_mut()) }; PIECES];
/// Held by every change to allocators, zones, shrinkers and the allowed nodes, by rounds of reclaim, and over a fork. Not a mutex: after
/// a fork, two processes unlock it.
static WRITING: ForkLock = ForkLock::new();

/// The zone that this thread met last. It is tried first, with a branch that the processor predicts: otherwise the work
/// on a page waits for three dependent loads, between a free and the next allocation (4 ns of 12). It is a thread's and
/// not a CPU's, because reading the CPU's number would take time there too (2 ns of 8).
#[inline]
fn recent_arena() -> Option<&'static Zone> {
    // SAFETY: null, or a zone that `note` stored. Zones are never freed.
    unsafe { pagemill_os::last_zone().cast::<Zone>().as_ref() }
}

fn note(zone: &'static Zone) {
    // SAFETY: the word is for the zone that this thread met last, and only this file sets it, to a zone.
    unsafe { pagemill_os::set_last_zone(ptr::from_ref(zone).cast()) };
}

/// The zone that contains this address, if any, and the number of the address's frame.
#[inline]
pub(crate) fn by_address(addr: usize) -> Option<(&'static Zone, Pfn)> {
    match recent(addr) {
        None => by_levels(addr),
        found => found,
    }
}

/// The same, if it is the zone that this thread met last, as it usually is.
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
    // Acquire pairs with the Release in `enter`: the zone's fields are initialised.
    let entry = leaf[(addr >> GRANULE_SHIFT) & ((1 << LEAF_BITS) - 1)].load(Acquire);
    if entry & PRESENT == 0 {
        return None;
    }
    // SAFETY: null, or a zone that `enter` stored. Zones are never freed.
    let zone = unsafe { BY_NUMBER[(entry >> PIECE_SHIFT) as usize].load(Acquire).as_ref() }?;
    if !zone.contains(addr) {
        return None;
    }
    note(zone);
    // Computed by the zone: the entry may be that of an arena that lay there before.
    Some((zone, zone.pfn_of(addr)))
}

/// The zone that has this frame number.
///
/// # Panics
/// If no zone has it. Numbers come only from Pagemill, so this is a bug.
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
    // SAFETY: null, or a zone that `enter` stored. Zones are never freed.
    match unsafe { zone.as_ref() } {
        Some(zone) => {
            note(zone);
            zone
        }
        None => panic!("{pfn} belongs to no zone"),
    }
}

/// Refuses a range that overlaps an arena: each address has one owner.
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

/// The caller holds the registry. Finds frame numbers for an arena of `frames` frames that begins `lead` frames above a
/// multiple of its largest block. Calls `make` with the first number, and enters the zone that it makes.
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
    // SAFETY: null, or a zone, and zones are never freed.
    let zone = match unsafe { FREE.load(Relaxed).as_ref() } {
        Some(free) => free,
        None => {
            let fresh = Box::into_raw(Box::new(Zone::new()));
            FREE.store(fresh, Relaxed);
            // SAFETY: from a box that is never freed.
            unsafe { &*fresh }
        }
    };
    let body = make(Pfn::new(((first << PIECE_SHIFT) + lead) as u32))?;
    FREE.store(zone.below().load(Relaxed), Relaxed);
    // SAFETY: the zone was on `FREE`, so it stands for nothing, and the caller holds the registry.
    unsafe { zone.begin(body) };
    let entry = ptr::from_ref(zone).cast_mut();
    // Release pairs with the Acquire in `by_levels` and `by_piece`.
    BY_NUMBER[first..first + pieces].iter().for_each(|slot| slot.store(entry, Release));
    entries_of(zone).for_each(|(slot, pfn)| slot.store(pfn.as_u32() | PRESENT, Release));
    note(zone);
    Ok(zone)
}

/// Zones without a handle whose last page was freed, linked by `next`. Each zone that is out of use is on one of these
/// three stacks, so that leak checkers find a pointer to it.
static HOME: Slot = AtomicPtr::new(ptr::null_mut());
/// Zones that stand for no memory, linked by `next`. Changed only with the registry held.
static FREE: Slot = AtomicPtr::new(ptr::null_mut());
/// Zones that have ended and still own heap memory. Changed only with the registry held.
static ENDED: Slot = AtomicPtr::new(ptr::null_mut());

/// Begins the end of a zone without a handle. Called once, by the call that freed the zone's last page, possibly in a
/// signal handler.
#[cold]
#[inline(never)]
pub(crate) fn come_home(zone: &'static Zone) {
    let entry = ptr::from_ref(zone).cast_mut();
    let mut top = HOME.load(Relaxed);
    loop {
        zone.below().store(top, Relaxed);
        // Release pairs with the Acquire in `end_those_at_home`.
        match HOME.compare_exchange_weak(top, entry, Release, Relaxed) {
            Ok(_) => break,
            Err(now) => top = now,
        }
    }
    // SeqCst pairs with the fence in `unlock`: either this finds the registry free, or its holder finds the
    // zone.
    fence(SeqCst);
    end_those_at_home();
}

/// Ends the zones on [`HOME`] if no thread holds the registry. Otherwise the holder does when it unlocks.
fn end_those_at_home() {
    while !HOME.load(Relaxed).is_null() && WRITING.try_take() {
        end_those_held();
        WRITING.release();
        // SeqCst as in `unlock`.
        fence(SeqCst);
    }
}

/// The caller holds the registry. Ends the zones on [`HOME`].
fn end_those_held() {
    let mut next = HOME.swap(ptr::null_mut(), Acquire);
    // SAFETY: null, or a zone, and zones are never freed.
    while let Some(zone) = unsafe { next.as_ref() } {
        next = zone.below().load(Relaxed);
        end(zone);
    }
}

/// The caller holds the registry. Returns a zone's memory to the system, and frees its frame numbers for the next
/// arena. Does only what a signal handler may do.
fn end(zone: &'static Zone) {
    take_out(zone);
    // SAFETY: the zone is closed and complete. So no page of it is out, no thread that freed one touches it any more,
    // and no handle leads to it; nor do the registry's tables. It is on no stack.
    unsafe { zone.end() };
    push(&ENDED, zone);
}

/// The caller holds the registry. Puts a zone on one of its stacks.
fn push(stack: &Slot, zone: &'static Zone) {
    zone.below().store(stack.load(Relaxed), Relaxed);
    stack.store(ptr::from_ref(zone).cast_mut(), Relaxed);
}

/// Frees the heap memory of ended zones, and makes their headers available to the next ones. It frees heap memory and
/// locks the registry, so no signal handler may call it.
pub(crate) fn bury() {
    // One at a time, so that a forked child misses one at most. Not with the registry held: memory that was brought may
    // be of a type with a `Drop` of its own.
    while let Some(zone) = pop_ended() {
        // SAFETY: the zone has ended, and only this thread took it off the stack.
        unsafe { zone.bury() };
        let _held = lock();
        push(&FREE, zone);
    }
}

fn pop_ended() -> Option<&'static Zone> {
    let _held = lock();
    // SAFETY: null, or a zone, and zones are never freed.
    let zone = unsafe { ENDED.load(Relaxed).as_ref() }?;
    ENDED.store(zone.below().load(Relaxed), Relaxed);
    Some(zone)
}

/// In a forked child, which finds out itself which zones end.
fn forget_home() {
    HOME.store(ptr::null_mut(), Relaxed);
}

/// Removes a zone from the tables.
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

/// Visits every zone once.
pub(crate) fn for_each(mut visit: impl FnMut(&'static Zone)) {
    let mut last = ptr::null_mut();
    for slot in &BY_NUMBER {
        let zone = slot.load(Acquire);
        if zone != last {
            last = zone;
            // SAFETY: null, or a zone, and zones are never freed.
            if let Some(zone) = unsafe { zone.as_ref() } {
                visit(zone);
            }
        }
    }
}

/// Proof that the caller holds the registry: no other thread changes it, and the process does not fork.
pub(crate) struct Writing;

impl Drop for Writing {
    fn drop(&mut self) {
        unlock();
    }
}

/// Locks the registry. From the first call on, forks wait for it too.
pub(crate) fn lock() -> Writing {
    watch();
    WRITING.take();
    // Zones that were complete before this call must not be in its way, though their memory may still be on its way to
    // the system.
    end_those_held();
    Writing
}

/// The same, if it is unlocked now.
pub(crate) fn try_lock() -> Option<Writing> {
    watch();
    if WRITING.try_take() { Some(Writing) } else { None }
}

/// No thread changes the registry until [`unlock`] or [`unlock_in_child`]. A thread that locks it while a
/// fork waits comes after the fork.
fn lock_for_fork() {
    WRITING.take_for_fork();
}

fn unlock() {
    WRITING.release();
    // SeqCst pairs with the fence in `come_home`.
    fence(SeqCst);
    end_those_at_home();
}

fn unlock_in_child() {
    WRITING.free_after_fork();
    end_those_at_home();
}

/// The entries of a zone's granules, each with its first frame.
fn entries_of(zone: &Zone) -> impl Iterator<Item = (&'static AtomicU32, Pfn)> {
    let addrs = (zone.base()..zone.base() + zone.bytes()).step_by(1 << GRANULE_SHIFT);
    addrs.map(|addr| (&leaf_for(addr >> GRANULE_SHIFT)[(addr >> GRANULE_SHIFT) % (1 << LEAF_BITS)], zone.pfn_of(addr)))
}

/// The leaf that has this granule, which is made if it does not exist. The caller holds the registry.
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
    unlock();
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

/// Registers the fork handlers when the library is loaded. If they were registered at the first use, a fork at the same
/// moment would not know of them: the system reads its fork handlers as a fork begins. Such a fork would not wait for
/// the registry, and its child would wait for ever.
// SAFETY: the C library calls each function in this section once. `at_load` needs nothing but the C library.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = {
    extern "C" fn at_load() {
        pagemill_os::on_fork(&HOOKS); // If it fails, `watch` tries again and says so.
    }
    at_load
};

/// Ensures that the child of every fork recovers every allocator. Building or closing an allocator, running the
/// self-test and making the default allocator all hold the registry, and call this first: so none of them happens
/// during a fork.
pub(crate) fn watch() {
    assert!(pagemill_os::on_fork(&HOOKS), "the system does not take fork handlers: no memory");
}

#[cfg(test)]
mod tests {
    use super::{ENDED, FRAMES_MAX, PIECE_SHIFT, WRITING, by_address, enter, lock};
    use crate::build_error::BuildError;
    use crate::{Allocator, Gfp, Page};
    use core::sync::atomic::Ordering::Relaxed;

    /// The arenas of other tests would take some of the numbers.
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
        // `make` is called, and fails, only if there are numbers for the arena.
        let ask = |frames| enter(&held, 0, frames, |_| Err(BuildError::BackendName)).err();
        assert_eq!(ask(FRAMES_MAX - (1 << PIECE_SHIFT)), Some(BuildError::BackendName));
        assert_eq!(ask(FRAMES_MAX), Some(BuildError::FrameNumbers { max: FRAMES_MAX }));
    }

    /// A page that keeps its zone alive, whose allocator has no handle; and a function that tells whether that zone
    /// still exists.
    fn last_page() -> (Page, impl Fn() -> bool) {
        let allocator = Allocator::builder().pages(64).build().unwrap();
        let (page, number) = (allocator.alloc_page(Gfp::KERNEL).unwrap(), allocator.zones().number);
        let addr = page.addr();
        // Compared by allocator: another allocator's zone may lie at the address later.
        (page, move || by_address(addr).is_some_and(|(zone, _)| zone.shared().number == number))
    }

    #[test]
    fn a_zone_complete_while_the_registry_is_held_ends_when_it_is_unlocked() {
        let (page, is_there) = last_page();
        let held = lock();
        drop(page);
        assert!(is_there());
        drop(held);
        assert!(!is_there());
    }

    /// A correct program may bring the same memory again as soon as its last page is free. It must not find the old
    /// zone.
    #[test]
    fn a_complete_zone_ends_before_the_next_thread_changes_the_registry() {
        let (page, is_there) = last_page();
        core::mem::forget(lock());
        drop(page);
        assert!(is_there());
        // The holder has unlocked, and has not checked yet for complete zones.
        WRITING.release();
        let held = lock();
        assert!(!is_there());
        drop(held);
    }

    #[test]
    fn building_an_allocator_frees_the_heap_memory_of_ended_zones() {
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
