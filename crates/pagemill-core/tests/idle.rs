//! Which free pageblocks are given to the system, and after how long.
use pagemill_core::atomic::{AtomicU32, AtomicU64};
use pagemill_core::{BoundBlock, Buddy, BuddyMetadata, Giving, Mobility, Order, PageblockId, Pfn, Tick, Unused};

const FRAMES: u32 = 4 * 512 + 100;
/// The first frames of its pageblocks, the last of which is cut short.
const ALL: [u32; 5] = [0, 512, 1024, 1536, 2048];

fn with_zone(test: impl FnOnce(&Buddy<'_>)) {
    let need = BuddyMetadata::for_frames(FRAMES);
    let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    test(&Buddy::new(Pfn::new(0), FRAMES, &bits, &areas).unwrap());
}

/// The pageblocks that are taken, each returned as gone, or not.
fn taken(buddy: &Buddy<'_>, which: Unused, floor: u32, is_gone: bool) -> Vec<u32> {
    let (mut from, mut pfns) = (PageblockId::FIRST, Vec::new());
    while let Some((pfn, frames)) = buddy.take_unused(&mut from, which, floor, 512) {
        assert_eq!(frames, if pfn.as_u32() == 2048 { 100 } else { 512 });
        assert!(buddy.free_frames() >= floor as usize);
        buddy.return_unused(pfn, is_gone).unwrap();
        pfns.push(pfn.as_u32());
    }
    buddy.validate().unwrap();
    pfns
}

/// Takes a frame of each pageblock and gives it back.
fn use_all(buddy: &Buddy<'_>) {
    let mut frames = Vec::new();
    let bound = BoundBlock::new();
    let mut emit =
        |first: Pfn, mask: u64| frames.extend((0..64).filter(|i| mask >> i & 1 == 1).map(|i| first.offset(i)));
    assert_eq!(buddy.take(&bound, FRAMES as usize, Mobility::Movable, 0, &mut emit), FRAMES as usize);
    buddy.unbind(&bound);
    for pfn in frames {
        assert_eq!(buddy.free_block(pfn, Order::ZERO), Ok(false));
    }
}

#[test]
fn what_the_system_has_is_not_given_again() {
    with_zone(|buddy| {
        assert_eq!(taken(buddy, Unused::All, 0, true), [], "nobody had any of it yet");
        use_all(buddy);
        assert_eq!(taken(buddy, Unused::All, 0, false), ALL);
        assert_eq!(taken(buddy, Unused::All, 0, true), ALL);
        assert_eq!(taken(buddy, Unused::All, 0, true), []);
        buddy.note_committed();
        assert_eq!(taken(buddy, Unused::All, FRAMES - 99, true), [], "the floor");
        assert_eq!(buddy.take_unused(&mut PageblockId::new(0), Unused::All, 0, 99), None);
        assert_eq!(buddy.take_unused(&mut PageblockId::new(0), Unused::All, 0, 100), Some((Pfn::new(2048), 100)));
        buddy.return_unused(Pfn::new(2048), false).unwrap();
        // One that was taken whole may have been written to, too.
        assert_eq!(taken(buddy, Unused::All, 0, true), ALL);
        let block = buddy.alloc_block(Order::PAGEBLOCK, Mobility::Movable, 0).unwrap();
        buddy.free_block(block, Order::PAGEBLOCK).unwrap();
        assert_eq!(taken(buddy, Unused::All, 0, true), [block.as_u32()]);
        assert!(buddy.return_unused(block, true).is_err());
    });
}

#[test]
fn age_counts_from_when_a_pageblock_was_seen_free() {
    let since = |now: u64| Unused::Since { now: Tick::new(now), ticks: 8 };
    with_zone(|buddy| {
        use_all(buddy);
        assert_eq!(taken(buddy, since(100), 0, true), [], "seen now");
        assert_eq!(taken(buddy, since(107), 0, true), []);
        // One is used meanwhile, if only for a moment.
        let pfn = buddy.alloc_block(Order::ZERO, Mobility::Movable, 0).unwrap();
        buddy.free_block(pfn, Order::ZERO).unwrap();
        let used = pfn.as_u32() / 512 * 512;
        let others: Vec<u32> = ALL.into_iter().filter(|&first| first != used).collect();
        assert_eq!(taken(buddy, since(108), 0, true), others);
        assert_eq!(taken(buddy, since(115), 0, true), []);
        assert_eq!(taken(buddy, since(116), 0, true), [used]);
        assert_eq!(taken(buddy, since(1000), 0, true), []);
        // Ticks go round.
        use_all(buddy);
        let round = u64::from(Tick::ROUND);
        assert_eq!(taken(buddy, since(round - 3), 0, true), []);
        assert_eq!(taken(buddy, since(round + 4), 0, true), []);
        assert_eq!(taken(buddy, since(round + 5), 0, true), ALL);
    });
}

/// Takes what is free beside what is taken, as long as `floor` frames stay free, and gives it back.
fn parts(buddy: &Buddy<'_>, floor: u32) -> Vec<u32> {
    let (mut from, mut frames) = (PageblockId::FIRST, Vec::new());
    let free = buddy.free_frames();
    while let Some(part) = buddy.next_part(&mut from) {
        let mut taken = Vec::new();
        let mut emit = |first: Pfn, mask: u64| {
            assert!(part.words().any(|(word, free)| word == first && mask & !free == 0));
            taken.extend((0..64).filter(|i| mask >> i & 1 == 1).map(|i| first.offset(i)));
        };
        let n = buddy.take_part(part.first, floor, &mut emit);
        assert_eq!((taken.len(), part.is_unused && n > 0), (n, false));
        frames.extend(taken);
    }
    assert_eq!(buddy.free_frames() + frames.len(), free);
    let numbers = frames.iter().map(|pfn| pfn.as_u32()).collect();
    let mut giving = Giving::to(buddy);
    frames.into_iter().for_each(|pfn| giving.give(pfn));
    assert_eq!(giving.finish().doubles, 0);
    buddy.validate().unwrap();
    numbers
}

#[test]
fn the_parts_of_a_zone_are_what_is_free_beside_what_is_taken() {
    with_zone(|buddy| {
        assert_eq!(parts(buddy, 0), []);
        let one = buddy.alloc_block(Order::ZERO, Mobility::Movable, 0).unwrap();
        let other = buddy.alloc_block(Order::ZERO, Mobility::Unmovable, 0).unwrap();
        let block = |pfn: Pfn| pfn.as_u32() / 512 * 512;
        assert_ne!(block(one), block(other));
        let is_beside = |pfn: &u32| [block(one), block(other)].contains(&(pfn / 512 * 512));
        let beside = (0..FRAMES).filter(|pfn| is_beside(pfn) && *pfn != one.as_u32() && *pfn != other.as_u32());
        let beside: Vec<u32> = beside.collect();
        assert_eq!(parts(buddy, 0), beside);
        assert_eq!(parts(buddy, 0), beside);
        // Down to a floor.
        assert_eq!(parts(buddy, FRAMES - 2 - 600), beside[..600]);
        assert_eq!(parts(buddy, FRAMES - 2), []);
    });
}
