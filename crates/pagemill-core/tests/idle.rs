//! Which free pageblocks are given to the system, and after how long.
use pagemill_core::atomic::{AtomicU32, AtomicU64};
use pagemill_core::{BoundBlock, Giving, Mobility, Order, Pfn, Tick, Unused, Zone, ZoneMetadata};

const FRAMES: u32 = 4 * 512 + 100;
/// The first frames of its pageblocks, the last of which is cut short.
const ALL: [u32; 5] = [0, 512, 1024, 1536, 2048];

fn with_zone(test: impl FnOnce(&Zone<'_>)) {
    let need = ZoneMetadata::for_frames(FRAMES);
    let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    test(&Zone::new(Pfn::new(0), FRAMES, &bits, &areas).unwrap());
}

/// The pageblocks that are taken, each returned as gone, or not.
fn taken(zone: &Zone<'_>, which: Unused, floor: u32, is_gone: bool) -> Vec<u32> {
    let (mut from, mut pfns) = (0, Vec::new());
    while let Some((pfn, frames)) = zone.take_unused(&mut from, which, floor, 512) {
        assert_eq!(frames, if pfn.as_u32() == 2048 { 100 } else { 512 });
        assert!(zone.free_frames() >= floor as usize);
        zone.return_unused(pfn, is_gone).unwrap();
        pfns.push(pfn.as_u32());
    }
    zone.validate().unwrap();
    pfns
}

/// Takes a frame of each pageblock and gives it back.
fn use_all(zone: &Zone<'_>) {
    let mut frames = Vec::new();
    let bound = BoundBlock::new();
    let mut emit =
        |first: Pfn, mask: u64| frames.extend((0..64).filter(|i| mask >> i & 1 == 1).map(|i| first.offset(i)));
    assert_eq!(zone.take(&bound, FRAMES as usize, Mobility::Movable, 0, &mut emit), FRAMES as usize);
    zone.unbind(&bound);
    for pfn in frames {
        assert_eq!(zone.free_block(pfn, Order::ZERO), Ok(false));
    }
}

#[test]
fn what_the_system_has_is_not_given_again() {
    with_zone(|zone| {
        assert_eq!(taken(zone, Unused::All, 0, true), [], "nobody had any of it yet");
        use_all(zone);
        assert_eq!(taken(zone, Unused::All, 0, false), ALL);
        assert_eq!(taken(zone, Unused::All, 0, true), ALL);
        assert_eq!(taken(zone, Unused::All, 0, true), []);
        zone.note_committed();
        assert_eq!(taken(zone, Unused::All, FRAMES - 99, true), [], "the floor");
        assert_eq!(zone.take_unused(&mut 0, Unused::All, 0, 99), None);
        assert_eq!(zone.take_unused(&mut 0, Unused::All, 0, 100), Some((Pfn::new(2048), 100)));
        zone.return_unused(Pfn::new(2048), false).unwrap();
        // One that was taken whole may have been written to, too.
        assert_eq!(taken(zone, Unused::All, 0, true), ALL);
        let block = zone.alloc_block(Order::PAGEBLOCK, Mobility::Movable, 0).unwrap();
        zone.free_block(block, Order::PAGEBLOCK).unwrap();
        assert_eq!(taken(zone, Unused::All, 0, true), [block.as_u32()]);
        assert!(zone.return_unused(block, true).is_err());
    });
}

#[test]
fn age_counts_from_when_a_pageblock_was_seen_free() {
    let since = |now: u64| Unused::Since { now: Tick::new(now), ticks: 8 };
    with_zone(|zone| {
        use_all(zone);
        assert_eq!(taken(zone, since(100), 0, true), [], "seen now");
        assert_eq!(taken(zone, since(107), 0, true), []);
        // One is used meanwhile, if only for a moment.
        let pfn = zone.alloc_block(Order::ZERO, Mobility::Movable, 0).unwrap();
        zone.free_block(pfn, Order::ZERO).unwrap();
        let used = pfn.as_u32() / 512 * 512;
        let others: Vec<u32> = ALL.into_iter().filter(|&first| first != used).collect();
        assert_eq!(taken(zone, since(108), 0, true), others);
        assert_eq!(taken(zone, since(115), 0, true), []);
        assert_eq!(taken(zone, since(116), 0, true), [used]);
        assert_eq!(taken(zone, since(1000), 0, true), []);
        // Ticks go round.
        use_all(zone);
        let round = u64::from(Tick::ROUND);
        assert_eq!(taken(zone, since(round - 3), 0, true), []);
        assert_eq!(taken(zone, since(round + 4), 0, true), []);
        assert_eq!(taken(zone, since(round + 5), 0, true), ALL);
    });
}

/// Takes what is free beside what is taken, as long as `floor` frames stay free, and gives it back.
fn parts(zone: &Zone<'_>, floor: u32) -> Vec<u32> {
    let (mut from, mut frames) = (0, Vec::new());
    let free = zone.free_frames();
    while let Some(part) = zone.next_part(&mut from) {
        let mut taken = Vec::new();
        let mut emit = |first: Pfn, mask: u64| {
            assert!(part.words().any(|(word, free)| word == first && mask & !free == 0));
            taken.extend((0..64).filter(|i| mask >> i & 1 == 1).map(|i| first.offset(i)));
        };
        let n = zone.take_part(part.first, floor, &mut emit);
        assert_eq!((taken.len(), part.is_unused && n > 0), (n, false));
        frames.extend(taken);
    }
    assert_eq!(zone.free_frames() + frames.len(), free);
    let numbers = frames.iter().map(|pfn| pfn.as_u32()).collect();
    let mut giving = Giving::to(zone);
    frames.into_iter().for_each(|pfn| giving.give(pfn));
    assert_eq!(giving.finish().doubles, 0);
    zone.validate().unwrap();
    numbers
}

#[test]
fn the_parts_of_a_zone_are_what_is_free_beside_what_is_taken() {
    with_zone(|zone| {
        assert_eq!(parts(zone, 0), []);
        let one = zone.alloc_block(Order::ZERO, Mobility::Movable, 0).unwrap();
        let other = zone.alloc_block(Order::ZERO, Mobility::Unmovable, 0).unwrap();
        let block = |pfn: Pfn| pfn.as_u32() / 512 * 512;
        assert_ne!(block(one), block(other));
        let is_beside = |pfn: &u32| [block(one), block(other)].contains(&(pfn / 512 * 512));
        let beside = (0..FRAMES).filter(|pfn| is_beside(pfn) && *pfn != one.as_u32() && *pfn != other.as_u32());
        let beside: Vec<u32> = beside.collect();
        assert_eq!(parts(zone, 0), beside);
        assert_eq!(parts(zone, 0), beside);
        // Down to a floor.
        assert_eq!(parts(zone, FRAMES - 2 - 600), beside[..600]);
        assert_eq!(parts(zone, FRAMES - 2), []);
    });
}
