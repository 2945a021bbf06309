//! What a request does whose frames move while it looks for them.
use pagemill_core::atomic::{AtomicU32, AtomicU64};
use pagemill_core::{
    BoundBlock, Buddy, BuddyMetadata, Giving, MisuseKind, Mobility, Order, PAGEBLOCK_FRAMES, PageblockId, Pfn,
};

const KIND: Mobility = Mobility::Movable;

/// Gives `frames` and takes a block that is elsewhere, of which there is one: what was free there is here from now on.
fn give_and_take(buddy: &Buddy<'_>, frames: &[u32], order: u8, block: u32) {
    let mut giving = Giving::to(buddy);
    giving.give_slice(&frames.iter().copied().map(Pfn::new).collect::<Vec<_>>());
    assert_eq!(giving.finish().frames, frames.len());
    let order = Order::new(order).unwrap();
    assert_eq!((frames.len(), buddy.alloc_block(order, KIND, 0)), (order.frames() as usize, Some(Pfn::new(block))));
}

/// Runs `test` on a buddy of this many pageblocks, all free.
fn with_buddy(blocks: u32, test: impl FnOnce(&Buddy<'_>)) {
    let need = BuddyMetadata::for_frames(blocks * PAGEBLOCK_FRAMES);
    let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    test(&Buddy::new(Pfn::new(0), blocks * PAGEBLOCK_FRAMES, &bits, &areas).unwrap());
}

#[test]
fn a_frame_given_twice_in_one_call_is_a_double_free() {
    with_buddy(1, |buddy| {
        let bound = BoundBlock::new();
        assert_eq!(buddy.take(&bound, 8, KIND, 0, &mut |_, _| ()), 8);
        let mut giving = Giving::to(buddy);
        [3, 5, 3, 4].into_iter().for_each(|frame| giving.give(Pfn::new(frame)));
        let given = giving.finish();
        assert_eq!((given.frames, given.doubles, given.last_double), (3, 1, Some(Pfn::new(3))));
        assert_eq!(buddy.free_frames(), PAGEBLOCK_FRAMES as usize - 5);
    });
}

#[test]
fn a_large_block_is_freed_with_its_own_order_and_as_a_whole() {
    with_buddy(4, |buddy| {
        let [nine, ten] = [9, 10].map(|order| Order::new(order).unwrap());
        let block = buddy.alloc_block(ten, KIND, 0).unwrap();
        let wrong = MisuseKind::WrongOrder { handed_out: 10, freed: 9 };
        assert_eq!(buddy.free_block(block, nine), Err(wrong));
        assert_eq!(buddy.free_block(block.offset(PAGEBLOCK_FRAMES), nine), Err(MisuseKind::Inside));
        assert_eq!(
            (buddy.free_block(block, ten), buddy.free_block(block, ten)),
            (Ok(false), Err(MisuseKind::DoubleFree))
        );
        assert_eq!(buddy.free_frames(), 4 * PAGEBLOCK_FRAMES as usize);
    });
}

#[test]
fn a_buddy_with_nothing_free_has_no_pageblock_to_withhold() {
    with_buddy(2, |buddy| {
        let bound = BoundBlock::new();
        let all = buddy.free_frames();
        assert_eq!(buddy.take(&bound, all, KIND, 0, &mut |_, _| ()), all);
        buddy.unbind(&bound);
        assert_eq!(buddy.withhold(16, 16, PageblockId::FIRST), None);
        assert_eq!(buddy.free_block(Pfn::new(PAGEBLOCK_FRAMES + 16), Order::new(4).unwrap()), Ok(false));
        assert_eq!(buddy.withhold(16, 16, PageblockId::FIRST), Some(PageblockId::new(1)));
    });
}

#[test]
fn frames_that_a_request_missed_can_be_had_afterwards() {
    let frames = 2 * PAGEBLOCK_FRAMES;
    let need = BuddyMetadata::for_frames(frames);
    let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    let buddy = Buddy::new(Pfn::new(0), frames, &bits, &areas).unwrap();
    // Free in the first pageblock: one frame of its seventh word of 64, and a run of 16 in its last one. In the second one
    // every other frame is free, so that it has no block.
    let bound = BoundBlock::new();
    assert_eq!(buddy.take(&bound, frames as usize, KIND, 0, &mut |_, _| ()), frames as usize);
    buddy.unbind(&bound);
    let mut giving = Giving::to(&buddy);
    giving.give(Pfn::new(6 * 64));
    giving.give_run(Pfn::new(7 * 64), 16);
    (PAGEBLOCK_FRAMES..frames).step_by(2).for_each(|frame| giving.give(Pfn::new(frame)));
    assert_eq!(giving.finish().frames, 17 + 256);

    // Whoever wants all of them finds some on each way through the words, and the rest has gone behind it by then. After
    // four times it goes on elsewhere.
    let odd = |word: u32, n: u32| (0..n).map(move |i| word * 64 + 2 * i + 1);
    let run = |word: u32, n: u32| word * 64 + 32..word * 64 + 32 + n;
    let mut got = Vec::new();
    let taken = buddy.take(&bound, 17, KIND, 0, &mut |first, mask| {
        got.push((first.as_u32(), mask.count_ones()));
        match got.len() {
            1 => give_and_take(&buddy, &odd(4, 8).chain(run(5, 8)).collect::<Vec<_>>(), 4, 7 * 64),
            2 => give_and_take(&buddy, &odd(2, 4).chain(run(3, 4)).collect::<Vec<_>>(), 3, 5 * 64 + 32),
            3 => give_and_take(&buddy, &odd(0, 2).chain(run(1, 2)).collect::<Vec<_>>(), 2, 3 * 64 + 32),
            4 => give_and_take(&buddy, &[5, 7], 1, 64 + 32),
            _ => (),
        }
    });
    assert_eq!(got, [(6 * 64, 1), (4 * 64, 8), (2 * 64, 4), (0, 2), (PAGEBLOCK_FRAMES, 2)]);
    buddy.unbind(&bound);
    assert_eq!((taken, buddy.validate().map(|census| census.free)), (17, Ok(256)));
    assert_eq!(buddy.take(&bound, 256, KIND, 0, &mut |_, _| ()), 256);
}

#[test]
fn four_blocks_of_a_word_come_together() {
    with_buddy(1, |buddy| {
        let (mut taken, order) = (Vec::new(), Order::new(4).unwrap());
        assert_eq!(buddy.take_blocks(order, 4, KIND, 0, &mut |first, blocks| taken.push((first, blocks))), 4);
        assert_eq!(taken, [(Pfn::new(0), 0x0001_0001_0001_0001)], "one operation");
    });
}

/// Of two that give the same block at the same moment each may set some of its words: one is told that it was the second.
#[test]
fn a_block_that_two_give_word_by_word_is_given_by_one() {
    with_buddy(1, |buddy| {
        let order = Order::new(7).unwrap();
        for firsts_are in [0, 1] {
            assert_eq!(buddy.alloc_block(order, KIND, 0), Some(Pfn::new(0)));
            let mut giving = Giving::to(buddy).of_order(order);
            giving.give_run(Pfn::new(64 * firsts_are), 64);
            assert_eq!(giving.finish().double_blocks, 0);
            let mut giving = Giving::to(buddy).of_order(order);
            giving.give_run(Pfn::new(0), 128);
            let given = giving.finish();
            assert_eq!((given.frames, given.doubles, given.double_blocks), (64, 64, 1 - firsts_are as usize));
        }
    });
}

/// A zone that was closed may end as soon as its last frames count: who looks at it in `finish_with` does so before.
#[test]
fn what_was_given_is_told_before_it_counts() {
    with_buddy(1, |buddy| {
        let first = buddy.alloc_block(Order::ZERO, Mobility::Unmovable, 0).unwrap();
        let free = buddy.free_frames();
        let mut giving = Giving::to(buddy);
        giving.give(first);
        let given = giving.finish_with(|given| assert_eq!((given.frames, buddy.free_frames()), (1, free)));
        assert_eq!((given.frames, buddy.free_frames()), (1, free + 1));
    });
}
