//! Runs of any length, against a naive model: a vector that says who has which frame.
use pagemill_core::atomic::{AtomicU32, AtomicU64};
use pagemill_core::{BoundBlock, Buddy, BuddyMetadata, Giving, Mobility, Order, PAGEBLOCK_FRAMES, PageblockId, Pfn};

const KIND: Mobility = Mobility::Unmovable;

/// A buddy, and for each frame whether it is free.
struct World<'m> {
    buddy: Buddy<'m>,
    free: Vec<bool>,
    /// The runs that are held: their first frames and lengths.
    held: Vec<(u32, u32)>,
}

/// Runs `test` on a buddy of this many frames, all free.
fn with_world(frames: u32, test: impl FnOnce(World<'_>)) {
    let need = BuddyMetadata::for_frames(frames);
    let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    // Not the first frame of all: numbers and places differ.
    let buddy = Buddy::new(Pfn::new(5 * PAGEBLOCK_FRAMES), frames, &bits, &areas).unwrap();
    test(World { buddy, free: vec![true; frames as usize], held: Vec::new() });
}

impl World<'_> {
    fn hold(&mut self, first: Pfn, n: u32) {
        let first = first.since(self.buddy.start());
        for frame in &mut self.free[first as usize..][..n as usize] {
            assert!(core::mem::take(frame), "frames {first} to {} are not all free", first + n);
        }
        self.held.push((first, n));
    }

    fn take(&mut self, n: u32, mobility: Mobility) -> bool {
        let taken = self.buddy.take_run(n as usize, mobility, 0);
        taken.into_iter().for_each(|first| self.hold(first, n));
        taken.is_some()
    }

    fn give(&mut self, at: usize) {
        let (first, n) = self.held.swap_remove(at);
        self.free[first as usize..][..n as usize].fill(true);
        let mut giving = Giving::to(&self.buddy);
        giving.give_run(self.buddy.start().offset(first), n as usize);
        let given = giving.finish();
        assert_eq!((given.frames, given.doubles), (n as usize, 0));
    }

    /// The lengths of the free runs.
    fn runs(&self) -> impl Iterator<Item = usize> {
        self.free.split(|free| !free).map(<[bool]>::len)
    }

    fn check(&self) {
        let free = self.free.iter().filter(|&&free| free).count();
        assert_eq!((self.buddy.validate().map(|census| census.free), self.buddy.free_frames()), (Ok(free), free));
        for (pfn, &is_free) in self.buddy.start().run(self.free.len() as u32).zip(&self.free) {
            assert_eq!(self.buddy.is_free(pfn), is_free, "{pfn}");
        }
    }
}

/// Numbers below `n`, the same in each run of the test.
fn numbers() -> impl FnMut(usize) -> usize {
    let mut state = 7u64;
    move |n| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    }
}

#[test]
fn a_run_is_found_exactly_if_there_is_one() {
    let mut below = numbers();
    for frames in [3, 64, 500, 512, 513, 1100, 3000] {
        with_world(frames, |mut world| {
            let mut refused = 0;
            for step in 0..if cfg!(miri) { 40 } else { 3000 } {
                // Fills and empties it in turns.
                if world.held.is_empty() || below(10) < if step / 200 % 2 == 0 { 7 } else { 3 } {
                    let most = [3, 70, 300, 700][below(4)];
                    let n = 1 + below(most);
                    let has = world.runs().any(|run| run >= n);
                    assert_eq!(world.take(n as u32, KIND), has, "{n} frames of {frames}");
                    refused += usize::from(!has);
                } else {
                    let at = below(world.held.len());
                    world.give(at);
                }
                if step % 50 == 0 {
                    world.check();
                }
            }
            assert!(refused > 0);
            (0..world.held.len()).for_each(|_| world.give(0));
            world.check();
            // All of it is one run again, or what remains of none.
            assert!(world.take(frames, KIND));
            assert!(!world.take(1, KIND));
        });
    }
}

#[test]
fn runs_of_266_leave_no_frame_unused_but_a_remainder() {
    with_world(64 * PAGEBLOCK_FRAMES + 77, |mut world| {
        while world.take(266, KIND) {}
        assert_eq!(world.held.len(), (64 * 512 + 77) / 266);
        world.check();
    });
}

#[test]
fn the_tightest_gap_is_taken_from_its_upper_end() {
    with_world(2 * PAGEBLOCK_FRAMES, |mut world| {
        assert!(world.take(1024, KIND));
        let (first, _) = world.held.pop().unwrap();
        // Gaps of 40, 20 and 30 frames; the second one crosses a word.
        let mut giving = Giving::to(&world.buddy);
        for (at, n) in [(100, 40), (310, 20), (900, 30)] {
            giving.give_run(world.buddy.start().offset(first + at), n);
        }
        giving.finish();
        let at = |n| world.buddy.take_run(n, KIND, 0).map(|pfn| pfn.since(world.buddy.start()));
        assert_eq!([at(15), at(25), at(35), at(35)], [Some(315), Some(905), Some(105), None]);
        assert_eq!([at(5), at(6), at(5), at(1)], [Some(900), None, Some(310), Some(104)]);
    });
}

#[test]
fn other_mobilities_and_blocks_are_left_alone() {
    with_world(4 * PAGEBLOCK_FRAMES, |mut world| {
        // The last pageblock is movable, the second one is out as a block, and a page of the first is out.
        assert!(world.take(1, Mobility::Movable));
        let nine = Order::PAGEBLOCK;
        let blocks = [0, 0].map(|_| world.buddy.alloc_block(nine, KIND, 0).unwrap());
        let (first, bound) = (world.buddy.start(), BoundBlock::new());
        assert_eq!(blocks, [first, first.offset(512)]);
        assert_eq!(world.buddy.free_block(first, nine), Ok(false));
        assert_eq!(world.buddy.take(&bound, 1, KIND, 0, &mut |at, mask| assert_eq!((at, mask), (first, 1))), 1);
        world.buddy.unbind(&bound);

        assert_eq!(world.buddy.take_run(513, KIND, 0), None, "the third pageblock has 512");
        assert_eq!(world.buddy.take_run(512, KIND, 0), Some(first.offset(1024)));
        assert_eq!(world.buddy.take_run(511, KIND, 0), Some(first.offset(1)));
        assert_eq!(world.buddy.take_run(1, KIND, 0), None);
        assert_eq!(world.buddy.take_run(1, Mobility::Movable, 0), Some(first.offset(2046)));
        // Whoever takes from any mobility leaves the pageblock's as it is.
        assert_eq!(world.buddy.steal_run(510, 0), Some(first.offset(1536)));
        assert_eq!(world.buddy.mobility_of(first.offset(1536)), Mobility::Movable);
        assert_eq!((world.buddy.free_frames(), world.buddy.steal_run(1, 0)), (0, None));
    });
}

#[test]
fn a_run_stays_above_the_floor_and_leaves_the_withheld_pageblock_alone() {
    with_world(2 * PAGEBLOCK_FRAMES, |world| {
        let (buddy, first) = (&world.buddy, world.buddy.start());
        assert_eq!(buddy.take_run(1000, KIND, 25), None);
        assert_eq!((buddy.take_run(1000, KIND, 24), buddy.take_run(1, KIND, 24)), (Some(first.offset(24)), None));
        let mut giving = Giving::to(buddy);
        giving.give_run(first.offset(24), 1000);
        giving.finish();
        assert_eq!(buddy.withhold(300, 1, PageblockId::FIRST), Some(PageblockId::new(1)));
        assert_eq!((buddy.take_run(513, KIND, 0), buddy.take_run(512, KIND, 0)), (None, Some(first)));
        assert_eq!((buddy.take_withheld_run(513, 0), buddy.take_withheld_run(512, 1)), (None, None));
        assert_eq!(buddy.take_withheld_run(300, 212), Some(first.offset(724)));
        buddy.end_withholding();
        assert_eq!((buddy.take_withheld_run(1, 0), buddy.take_run(212, KIND, 0)), (None, Some(first.offset(512))));
    });
}

#[test]
fn impossible_numbers_are_refused_at_once() {
    with_world(600, |world| {
        for n in [0, 601, u32::MAX as usize + 2, usize::MAX] {
            assert_eq!([world.buddy.take_run(n, KIND, 0), world.buddy.steal_run(n, 5)], [None; 2]);
        }
        world.check();
    });
}
