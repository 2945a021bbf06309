//! What the child of a fork has to look at: the parts of a zone that something was taken of.
use pagemill_core::atomic::{AtomicU32, AtomicU64};
use pagemill_core::{BoundBlock, FrameState, Mobility, Order, Pfn, Unused, Zone, ZoneMetadata, use_words_for};
use std::sync::atomic::Ordering::Relaxed;

/// Five regions of 64 pageblocks, the last one cut short.
const BLOCKS: usize = 4 * 64 + 7;
const FRAMES: u32 = BLOCKS as u32 * 512;

fn with_zone(test: impl FnOnce(&Zone<'_>)) {
    with_frames(FRAMES, test);
}

fn with_frames(frames: u32, test: impl FnOnce(&Zone<'_>)) {
    let need = ZoneMetadata::for_frames(frames);
    let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    let used: Vec<AtomicU32> = (0..use_words_for(frames)).map(|_| AtomicU32::new(0)).collect();
    test(&Zone::new(Pfn::new(0), frames, &bits, &areas).unwrap().noting_use(&used));
}

/// Recovers the zone by these states, which all lie in the given regions; it may look at no others.
fn recover(zone: &Zone<'_>, states: &[FrameState], regions: &[usize]) {
    let mut looked = Vec::new();
    zone.recover(|first, n| {
        let first = first.as_u32() as usize;
        looked.push(first / 512);
        &states[first..first + n]
    });
    let expected: Vec<usize> = (0..states.len() / 512).filter(|block| regions.contains(&(block / 64))).collect();
    assert_eq!(looked, expected);
    let free = states.iter().filter(|state| state.is_free()).count();
    assert_eq!((zone.free_frames(), zone.validate().unwrap().free), (free, free));
}

#[test]
fn recovery_looks_at_used_regions_alone() {
    let mut states = vec![FrameState::FRESH; FRAMES as usize];
    with_zone(|zone| recover(zone, &states, &[]));
    // By a list that draws from a pageblock, whatever it got.
    with_zone(|zone| {
        let bound = BoundBlock::new();
        assert_eq!(zone.take(&bound, 1, Mobility::Movable, 0, &mut |_, _| {}), 1);
        recover(zone, &states, &[0]);
    });
    // By blocks within a pageblock and by larger ones, and by a single frame of the emptiest pageblock, the last one.
    with_zone(|zone| {
        let order = |order| Order::new(order).unwrap();
        let small = zone.alloc_block(order(3), Mobility::Movable, 0).unwrap();
        let large = [15, 14, 13].map(|log2| zone.alloc_block(order(log2), Mobility::Movable, 0).unwrap());
        assert_eq!(large.map(|pfn| pfn.as_u32() / 512), [64, 32, 16]);
        assert!(zone.steal(0).is_some());
        for (pfn, log2) in [small].into_iter().chain(large).zip([3, 15, 14, 13]) {
            let at = pfn.as_u32() as usize;
            states[at..at + (1 << log2)].fill(FrameState::INSIDE);
            states[at] = FrameState::handed_out(order(log2), Mobility::Movable);
        }
        recover(zone, &states, &[0, 1, 4]);
    });
}

/// A list has chosen a pageblock, and got nothing of it.
#[test]
fn a_pageblock_that_is_bound_is_used() {
    with_frames(65 * 512, |zone| {
        let mut states = vec![FrameState::FRESH; 65 * 512];
        let order = Order::new(15).unwrap();
        assert_eq!(zone.alloc_block(order, Mobility::Movable, 0), Some(Pfn::new(0)));
        states[0] = FrameState::handed_out(order, Mobility::Movable);
        states[1..64 * 512].fill(FrameState::INSIDE);
        assert_eq!(zone.withhold(Order::PAGEBLOCK, 0), Some(64));
        let bound = BoundBlock::new();
        assert_eq!(zone.take(&bound, 1, Mobility::Movable, 0, &mut |_, _| {}), 0);
        recover(zone, &states, &[0, 1]);
    });
}

#[test]
fn what_went_to_the_system_and_what_it_committed_count_as_well() {
    let states = vec![FrameState::FRESH; FRAMES as usize];
    with_zone(|zone| {
        // Committed, but of the first region that is all.
        zone.note_committed();
        let mut from = 200;
        let (first, frames) = zone.take_unused(&mut from, Unused::All, 0, 512).unwrap();
        assert_eq!((first.as_u32(), frames), (200 * 512, 512));
        // A thread that is not in the child was about to give it to the system.
        recover(zone, &states, &[3]);
        assert_eq!(zone.take_unused(&mut 0, Unused::All, 0, 512), Some((Pfn::new(0), 512)));
    });
}

#[test]
fn without_notes_recovery_looks_at_everything() {
    let need = ZoneMetadata::for_frames(FRAMES);
    let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    let zone = Zone::new(Pfn::new(0), FRAMES, &bits, &areas).unwrap();
    let states = vec![FrameState::FRESH; FRAMES as usize];
    recover(&zone, &states, &[0, 1, 2, 3, 4]);
}

#[test]
fn a_zone_that_forgets_its_notes_looks_at_everything_and_touches_them_no_more() {
    let need = ZoneMetadata::for_frames(FRAMES);
    let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    let used: Vec<AtomicU32> = (0..use_words_for(FRAMES)).map(|_| AtomicU32::new(0)).collect();
    let zone = Zone::new(Pfn::new(0), FRAMES, &bits, &areas).unwrap().noting_use(&used);
    zone.forget_use();
    assert!(zone.alloc_block(Order::new(15).unwrap(), Mobility::Movable, 0).is_some());
    assert!(used.iter().all(|word| word.load(Relaxed) == 0));
    let states = vec![FrameState::FRESH; FRAMES as usize];
    recover(&zone, &states, &[0, 1, 2, 3, 4]);
}
