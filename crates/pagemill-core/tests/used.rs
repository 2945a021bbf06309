//! What the child of a fork has to look at: the parts of a buddy that something was taken of.
use pagemill_core::atomic::{AtomicU32, AtomicU64};
use pagemill_core::{
    BoundBlock, Buddy, BuddyMetadata, Giving, Mobility, Order, PageblockId, Pfn, Unused, use_words_for,
};
use std::sync::atomic::Ordering::Relaxed;

/// Five regions of 64 pageblocks, the last one cut short.
const BLOCKS: usize = 4 * 64 + 7;
const FRAMES: u32 = BLOCKS as u32 * 512;

fn with_zone(test: impl FnOnce(&Buddy<'_>)) {
    with_frames(FRAMES, test);
}

fn with_frames(frames: u32, test: impl FnOnce(&Buddy<'_>)) {
    let need = BuddyMetadata::for_frames(frames);
    let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    let used: Vec<AtomicU32> = (0..use_words_for(frames)).map(|_| AtomicU32::new(0)).collect();
    test(&Buddy::new(Pfn::new(0), frames, &bits, &areas).unwrap().noting_use(&used));
}

/// Recovers the buddy, of which so many frames are out and on no list. It looks at the pageblocks of so many regions, the last of
/// which has 7 of them.
fn recover(buddy: &Buddy<'_>, out: usize, regions: &[usize]) {
    let frames = buddy.managed_frames() as usize;
    let blocks: Vec<usize> = (0..frames / 512).filter(|block| regions.contains(&(block / 64))).collect();
    let mut looked = Vec::new();
    buddy.recover([], |first, n| {
        assert_eq!(n, 512);
        looked.push(first.as_u32() as usize / 512);
    });
    assert_eq!(looked, blocks);
    assert_eq!((buddy.free_frames(), buddy.validate().unwrap().free), (frames - out, frames - out));
}

#[test]
fn recovery_looks_at_used_regions_alone() {
    with_zone(|buddy| recover(buddy, 0, &[]));
    // By a list that draws from a pageblock, whatever it got.
    with_zone(|buddy| {
        let bound = BoundBlock::new();
        assert_eq!(buddy.take(&bound, 1, Mobility::Movable, 0, &mut |_, _| {}), 1);
        buddy.unbind(&bound);
        recover(buddy, 1, &[0]);
    });
    // By blocks within a pageblock and by larger ones, and by a single frame of the emptiest pageblock, the last one.
    with_zone(|buddy| {
        let order = |order| Order::new(order).unwrap();
        let small = buddy.alloc_block(order(3), Mobility::Movable, 0).unwrap();
        let large = [15, 14, 13].map(|log2| buddy.alloc_block(order(log2), Mobility::Movable, 0).unwrap());
        assert_eq!(large.map(|pfn| pfn.as_u32() / 512), [64, 32, 16]);
        assert!(buddy.steal(0).is_some());
        assert!(small.as_u32() < 512);
        recover(buddy, 1 + 8 + (1 << 15) + (1 << 14) + (1 << 13), &[0, 1, 4]);
    });
}

/// A list has chosen a pageblock, and got nothing of it.
#[test]
fn a_pageblock_that_is_bound_is_used() {
    with_frames(65 * 512, |buddy| {
        let order = Order::new(15).unwrap();
        assert_eq!(buddy.alloc_block(order, Mobility::Movable, 0), Some(Pfn::new(0)));
        assert_eq!(buddy.withhold(512, 512, PageblockId::FIRST), Some(PageblockId::new(64)));
        let bound = BoundBlock::new();
        assert_eq!(buddy.take(&bound, 1, Mobility::Movable, 0, &mut |_, _| {}), 0);
        buddy.unbind(&bound);
        recover(buddy, 64 * 512, &[0, 1]);
    });
}

#[test]
fn what_went_to_the_system_and_what_it_committed_count_as_well() {
    with_zone(|buddy| {
        // Committed, but of the first region that is all.
        buddy.note_committed();
        let mut from = PageblockId::new(200);
        let (first, frames) = buddy.take_unused(&mut from, Unused::All, 0, 512).unwrap();
        assert_eq!((first.as_u32(), frames), (200 * 512, 512));
        // A thread that is not in the child was about to give it to the system.
        recover(buddy, 0, &[3]);
        assert_eq!(buddy.take_unused(&mut PageblockId::new(0), Unused::All, 0, 512), Some((Pfn::new(0), 512)));
    });
}

#[test]
fn without_notes_recovery_looks_at_everything() {
    let need = BuddyMetadata::for_frames(FRAMES);
    let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    let buddy = Buddy::new(Pfn::new(0), FRAMES, &bits, &areas).unwrap();
    recover(&buddy, 0, &[0, 1, 2, 3, 4]);
}

#[test]
fn a_zone_that_forgets_its_notes_looks_at_everything_and_touches_them_no_more() {
    let need = BuddyMetadata::for_frames(FRAMES);
    let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    let used: Vec<AtomicU32> = (0..use_words_for(FRAMES)).map(|_| AtomicU32::new(0)).collect();
    let buddy = Buddy::new(Pfn::new(0), FRAMES, &bits, &areas).unwrap().noting_use(&used);
    buddy.forget_use();
    assert!(buddy.alloc_block(Order::new(15).unwrap(), Mobility::Movable, 0).is_some());
    assert!(used.iter().all(|word| word.load(Relaxed) == 0));
    recover(&buddy, 1 << 15, &[0, 1, 2, 3, 4]);
}

/// What another thread of the parent was doing stops halfway in the child: each operation, at each of its steps.
#[test]
fn what_was_on_its_way_is_free_or_out_and_all_agrees() {
    let order = |order| Order::new(order).unwrap();
    // A list's frames are free, and what is between a list and the buddy too if its bits say so already.
    with_zone(|buddy| {
        let (bound, mut taken) = (BoundBlock::new(), Vec::new());
        buddy.take(&bound, 100, Mobility::Unmovable, 0, &mut |first, mask| {
            taken.extend((0..64).filter(|bit| mask >> bit & 1 == 1).map(|bit| first.offset(bit)));
        });
        let mut giving = Giving::to(buddy);
        taken[..10].iter().for_each(|&pfn| giving.give(pfn));
        giving.finish();
        buddy.unbind(&bound);
        // Ten are free, of which five stand on a list that is being drained; twenty more are on it.
        buddy.recover(taken[5..30].iter().copied(), |_, _| {});
        assert_eq!(buddy.free_frames(), FRAMES as usize - 70);
        buddy.validate().unwrap();
    });
    // A block of eight pageblocks that is whole stays out; the one whose first pageblock is free already is free.
    with_zone(|buddy| {
        let kept = buddy.alloc_block(order(12), Mobility::Movable, 0).unwrap();
        buddy.recover([], |_, _| {});
        assert_eq!((buddy.free_frames(), buddy.validate().unwrap().whole), (FRAMES as usize - 4096, 4096));
        buddy.split_block(kept, order(12)).unwrap();
        assert_eq!(buddy.mobility_of(kept), Mobility::Movable, "what it was asked for with is kept");
        buddy.recover([], |_, _| {});
        assert_eq!((buddy.free_frames(), buddy.validate().unwrap().whole), (FRAMES as usize - 4096, 0));
    });
}

/// A block of eight pageblocks that another thread was taking or giving back: some of them say that they are its, and not all.
#[test]
fn a_large_block_that_is_not_complete_is_free() {
    let need = BuddyMetadata::for_frames(FRAMES);
    let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    let buddy = Buddy::new(Pfn::new(0), FRAMES, &bits, &areas).unwrap();
    let order = Order::new(12).unwrap();
    for halfway in [0..1, 0..5, 1..8, 7..8, 0..8] {
        let first = buddy.alloc_block(order, Mobility::Unmovable, 0).unwrap();
        let at = first.as_u32() as usize / 512;
        let taken: Vec<u32> = areas[at..at + 8].iter().map(|area| area.load(Relaxed)).collect();
        buddy.free_block(first, order).unwrap();
        halfway.clone().for_each(|i| areas[at + i].store(taken[i], Relaxed));
        buddy.recover([], |_, _| {});
        let out = if halfway == (0..8) { 4096 } else { 0 };
        let census = buddy.validate().unwrap();
        assert_eq!((buddy.free_frames(), census.whole), (FRAMES as usize - out, out), "{halfway:?}");
        if out > 0 {
            assert_eq!(buddy.free_block(first, order), Ok(false));
        }
    }
}
