//! C12.1: frames that do not exist or are reserved are never handed out, merged over or taken back.
use pagemill_core::atomic::{AtomicU32, AtomicU64};
use pagemill_core::{
    BoundBlock, Buddy, BuddyMetadata, FrameRange, Giving, Invalid, MapError, MemoryMap, MemoryRange, Misfit,
    MisuseKind, Mobility, Order, PAGE_SIZE, PageblockId, Pfn, use_words_for,
};
use proptest::prelude::*;
use std::sync::atomic::Ordering::Relaxed;

const KIND: Mobility = Mobility::Unmovable;

fn range(first: u32, frames: u32) -> FrameRange {
    FrameRange::new(Pfn::new(first), frames).unwrap()
}

fn order(order: u8) -> Order {
    Order::new(order).unwrap()
}

/// Runs `test` on a buddy over `span`, of which these frames are usable.
fn with_buddy(span: FrameRange, usable: &[(u32, u32)], test: impl FnOnce(&Buddy<'_>)) {
    let bytes = |frames: u32| u64::from(frames) * PAGE_SIZE as u64;
    let table = usable.iter().map(|&(first, frames)| MemoryRange::usable(bytes(first), bytes(frames)));
    let mut storage = vec![FrameRange::EMPTY; usable.len()];
    let map = MemoryMap::new(table, &mut storage).unwrap();
    let need = BuddyMetadata::for_span(span);
    let words: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    let used: Vec<AtomicU32> = (0..use_words_for(span.end().as_u32())).map(|_| AtomicU32::new(0)).collect();
    test(&Buddy::over(span, &map, &words, &areas).unwrap().noting_use(&used));
}

/// Takes all free frames, in ascending order.
fn take_all(buddy: &Buddy<'_>, mobility: Mobility) -> Vec<u32> {
    let (bound, mut frames) = (BoundBlock::new(), Vec::new());
    buddy.take(&bound, usize::MAX, mobility, 0, &mut |first, mask| {
        frames.extend((0..64).filter(|bit| mask >> bit & 1 == 1).map(|bit| first.as_u32() + bit));
    });
    buddy.unbind(&bound);
    frames.sort_unstable();
    frames
}

#[test]
fn frames_of_a_hole_in_the_middle_of_a_pageblock_are_not_handed_out() {
    with_buddy(range(0, 2048), &[(0, 700), (800, 1248)], |buddy| {
        assert_eq!((buddy.managed_frames(), buddy.free_frames(), buddy.spanned_frames()), (1948, 1948, 2048));
        assert_eq!(buddy.validate().unwrap().free, 1948);
        assert_eq!(buddy.buddy_info().free_blocks(Order::PAGEBLOCK), 1);
        assert_eq!(take_all(buddy, KIND), (0..700).chain(800..2048).collect::<Vec<_>>());
        assert_eq!((buddy.free_frames(), buddy.steal(0)), (0, None));
        buddy.validate().unwrap();
    });
}

#[test]
fn a_pageblock_that_is_reserved_whole_is_no_part_of_a_block() {
    with_buddy(range(0, 2048), &[(0, 512), (1024, 1024)], |buddy| {
        assert_eq!(buddy.alloc_block(order(11), KIND, 0), None);
        assert_eq!(buddy.alloc_block(order(10), KIND, 0), Some(Pfn::new(1024)));
        assert_eq!(buddy.alloc_block(order(9), KIND, 0), Some(Pfn::new(0)));
        assert_eq!(buddy.alloc_block(order(0), KIND, 0), None);
        assert_eq!(buddy.free_block(Pfn::new(512), order(9)), Err(MisuseKind::Foreign));
        assert_eq!(buddy.free_block(Pfn::new(1024), order(10)), Ok(false));
        buddy.validate().unwrap();
    });
}

#[test]
fn freeing_an_absent_frame_is_misuse_and_changes_nothing() {
    with_buddy(range(100, 924), &[(100, 300), (600, 100), (720, 304)], |buddy| {
        assert_eq!((buddy.start(), buddy.managed_frames()), (Pfn::new(0), 704));
        take_all(buddy, KIND);
        for absent in [0, 99, 400, 599, 700, 719] {
            assert_eq!(buddy.free_block(Pfn::new(absent), Order::ZERO), Err(MisuseKind::Foreign), "{absent}");
        }
        // Blocks that reach into a hole, of one word and of several.
        for (first, log2) in [(64, 6), (0, 8), (696, 3), (384, 7)] {
            assert_eq!(buddy.free_block(Pfn::new(first), order(log2)), Err(MisuseKind::Foreign), "{first} {log2}");
        }
        let mut giving = Giving::to(buddy);
        giving.give_run(Pfn::new(380), 40);
        let given = giving.finish();
        assert_eq!((given.frames, given.doubles, given.last_double), (20, 20, Some(Pfn::new(419))));
        assert_eq!(buddy.free_frames(), 20);
        assert_eq!(buddy.free_block(Pfn::new(1024), Order::ZERO), Err(MisuseKind::Foreign));
        buddy.validate().unwrap();
    });
}

#[test]
fn a_range_is_reserved_whole_or_not_at_all() {
    with_buddy(range(0, 2048), &[(0, 2048)], |buddy| {
        // Of three pageblocks, the middle one whole.
        assert_eq!(buddy.reserve_range(range(500, 600)), Ok(600));
        assert_eq!((buddy.managed_frames(), buddy.free_frames()), (1448, 1448));
        assert_eq!(buddy.reserve_range(range(500, 600)), Ok(0), "they are reserved already");
        assert_eq!(take_all(buddy, KIND), (0..500).chain(1100..2048).collect::<Vec<_>>());
        assert_eq!(buddy.free_block(Pfn::new(600), Order::ZERO), Err(MisuseKind::Foreign));
        assert_eq!(buddy.reserve_range(range(400, 100)), Err(MapError::HandedOut { pfn: Pfn::new(400) }));
        let mut giving = Giving::to(buddy);
        giving.give_run(Pfn::new(400), 100);
        giving.give_run(Pfn::new(1100), 10);
        assert_eq!(giving.finish().frames, 110);
        assert_eq!(buddy.reserve_range(range(390, 800)), Err(MapError::HandedOut { pfn: Pfn::new(390) }));
        assert_eq!(buddy.reserve_range(range(400, 711)), Err(MapError::HandedOut { pfn: Pfn::new(1110) }));
        assert_eq!((buddy.managed_frames(), buddy.free_frames()), (1448, 110));
        assert_eq!(buddy.reserve_range(range(400, 710)), Ok(110));
        assert_eq!((buddy.managed_frames(), buddy.free_frames()), (1338, 0));
        buddy.validate().unwrap();
    });
}

#[test]
fn a_range_of_a_block_that_is_handed_out_is_not_reserved() {
    with_buddy(range(0, 1024), &[(0, 1024)], |buddy| {
        assert_eq!(buddy.alloc_block(order(9), KIND, 0), Some(Pfn::new(0)));
        assert_eq!(buddy.reserve_range(range(10, 5)), Err(MapError::HandedOut { pfn: Pfn::new(10) }));
        assert_eq!(buddy.reserve_range(range(600, 5)), Ok(5));
        assert_eq!(buddy.free_block(Pfn::new(0), order(9)), Ok(false));
        assert_eq!(buddy.reserve_range(range(10, 5)), Ok(5));
        assert_eq!(buddy.validate().unwrap().free, 1014);
    });
}

#[test]
fn what_was_reserved_can_be_added_and_merges() {
    with_buddy(range(0, 1024), &[(0, 1024)], |buddy| {
        assert_eq!(buddy.reserve_range(range(300, 400)), Ok(400));
        assert_eq!(buddy.add_range(range(299, 2)), Err(MapError::Present { pfn: Pfn::new(299) }));
        assert_eq!(buddy.add_range(range(600, 101)), Err(MapError::Present { pfn: Pfn::new(700) }));
        assert_eq!(buddy.add_range(range(300, 200)), Ok(()));
        assert_eq!((buddy.managed_frames(), buddy.free_frames()), (824, 824));
        assert_eq!(buddy.alloc_block(order(10), KIND, 0), None);
        assert_eq!(buddy.add_range(range(500, 200)), Ok(()));
        assert_eq!(buddy.add_range(FrameRange::EMPTY), Ok(()));
        assert_eq!(buddy.alloc_block(order(10), KIND, 0), Some(Pfn::new(0)));
        buddy.validate().unwrap();
    });
}

#[test]
fn ranges_that_a_buddy_cannot_have_are_refused() {
    with_buddy(range(600, 400), &[(0, 2000)], |buddy| {
        assert_eq!((buddy.start(), buddy.managed_frames()), (Pfn::new(512), 400));
        for outside in [range(0, 1), range(511, 2), range(999, 2), range(1000, 1), range(0, FrameRange::MOST)] {
            let refused = MapError::Outside { first: outside.first(), frames: outside.frames() };
            assert_eq!((buddy.reserve_range(outside), buddy.add_range(outside)), (Err(refused), Err(refused)));
        }
        // Before its span, and in its first pageblock: absent like any hole.
        assert_eq!((buddy.reserve_range(range(512, 88)), buddy.free_frames()), (Ok(0), 400));
        buddy.validate().unwrap();
    });
    let need = BuddyMetadata::for_frames(512);
    let words: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    let buddy = Buddy::new(Pfn::new(0), 512, &words, &areas).unwrap();
    assert_eq!(
        (buddy.reserve_range(range(0, 1)), buddy.add_range(range(0, 1))),
        (Err(MapError::NoHoles), Err(MapError::NoHoles))
    );
    // For holes it takes more metadata, and no span at all takes none.
    let mut storage = [];
    let map = MemoryMap::new([].into_iter(), &mut storage).unwrap();
    for span in [range(0, 512), FrameRange::EMPTY] {
        assert!(matches!(Buddy::over(span, &map, &words, &areas), Err(Invalid::Metadata { .. })));
    }
}

#[test]
fn a_buddy_without_a_usable_frame_serves_nothing() {
    with_buddy(range(0, 600), &[], |buddy| {
        assert_eq!((buddy.managed_frames(), buddy.free_frames(), buddy.validate().unwrap().free), (0, 0, 0));
        assert_eq!((take_all(buddy, KIND), buddy.alloc_block(order(9), KIND, 0), buddy.steal(0)), (vec![], None, None));
    });
}

#[test]
fn the_highest_frames_work_like_others() {
    let (most, frames) = (FrameRange::MOST, 1000);
    with_buddy(range(most - frames, frames), &[(most - frames, frames)], |buddy| {
        assert_eq!(buddy.free_frames(), frames as usize);
        assert_eq!(take_all(buddy, KIND), (most - frames..most).collect::<Vec<_>>());
        assert_eq!(buddy.free_block(Pfn::new(most), Order::ZERO), Err(MisuseKind::Foreign));
        assert_eq!(buddy.free_block(Pfn::new(u32::MAX), Order::ZERO), Err(MisuseKind::Foreign));
        assert_eq!(buddy.free_block(Pfn::new(most - 1), Order::ZERO), Ok(false));
        assert_eq!(buddy.reserve_range(range(most - 1, 1)), Ok(1));
        buddy.validate().unwrap();
    });
}

/// One of two buddies over spans that meet inside a pageblock: a frame belongs to one of them.
#[test]
fn spans_that_share_a_pageblock_share_no_frame() {
    let usable = [(0, 2000)];
    with_buddy(range(0, 700), &usable, |low| {
        with_buddy(range(700, 1300), &usable, |high| {
            assert_eq!((low.start(), high.start()), (Pfn::new(0), Pfn::new(512)));
            assert_eq!(take_all(low, KIND), (0..700).collect::<Vec<_>>());
            assert_eq!(take_all(high, KIND), (700..2000).collect::<Vec<_>>());
            assert_eq!(high.free_block(Pfn::new(600), Order::ZERO), Err(MisuseKind::Foreign));
        });
    });
}

#[test]
fn a_pageblock_with_a_hole_is_chosen_for_no_block_that_it_cannot_have() {
    // Free: all of the first but its hole, which no aligned block of 256 avoids, and one frame of the second.
    with_buddy(range(0, 1024), &[(0, 200), (201, 200), (402, 622)], |buddy| {
        take_all(buddy, KIND);
        let mut giving = Giving::to(buddy);
        giving.give_run(Pfn::new(0), 200);
        giving.give(Pfn::new(1000));
        assert_eq!(giving.finish().frames, 201);
        for (log2, block) in [(9, 1), (8, 1), (7, 0)] {
            assert_eq!(
                buddy.withhold(1 << log2, 1 << log2, PageblockId::FIRST),
                Some(PageblockId::new(1)),
                "behind the first one"
            );
            assert_eq!(
                buddy.withhold(1 << log2, 1 << log2, PageblockId::new(1)),
                Some(PageblockId::new(block)),
                "{log2}"
            );
        }
        buddy.end_withholding();
    });
}

#[test]
fn a_pageblock_is_chosen_for_a_block_only_if_it_can_begin_where_blocks_do() {
    // 299 neighbours between two holes, and no aligned block of 256.
    with_buddy(range(0, 512), &[(0, 100), (101, 299), (401, 111)], |buddy| {
        assert_eq!(buddy.withhold(256, 256, PageblockId::FIRST), None);
        assert_eq!(buddy.withhold(256, 1, PageblockId::FIRST), Some(PageblockId::FIRST));
        buddy.end_withholding();
    });
}

#[test]
fn a_closed_buddy_with_holes_is_complete_without_them() {
    with_buddy(range(0, 1024), &[(0, 700)], |buddy| {
        let pfn = buddy.alloc_block(Order::ZERO, KIND, 0).unwrap();
        assert!(!buddy.close(0));
        assert_eq!(buddy.free_block(pfn, Order::ZERO), Ok(true));
    });
    with_buddy(range(0, 1024), &[(0, 700)], |buddy| assert!(buddy.close(0)));
}

#[test]
fn holes_are_no_free_frames_after_a_recount() {
    with_buddy(range(0, 2048), &[(0, 700), (1024, 1024)], |buddy| {
        buddy.recover([], |_, _| panic!("nothing was used"));
        assert_eq!(buddy.free_frames(), 1724);
        let taken = take_all(buddy, KIND);
        buddy.recover(taken.into_iter().map(Pfn::new), |_, _| {});
        assert_eq!((buddy.free_frames(), buddy.validate().unwrap().free), (1724, 1724));
    });
}

#[test]
fn more_entries_than_needed_are_no_more_frames() {
    let need = BuddyMetadata::for_frames(512);
    let words: Vec<AtomicU64> = (0..need.words + 9).map(|_| AtomicU64::new(0)).collect();
    let areas: Vec<AtomicU32> = (0..need.areas + 9).map(|_| AtomicU32::new(0)).collect();
    let buddy = Buddy::new(Pfn::new(0), 512, &words, &areas).unwrap();
    assert_eq!((take_all(&buddy, KIND).len(), buddy.validate().unwrap().free), (512, 0));
}

#[test]
fn an_absent_frame_that_is_free_is_a_misfit() {
    let need = BuddyMetadata::for_span(range(0, 512));
    let words: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    let mut storage = [FrameRange::EMPTY];
    let map = MemoryMap::new([MemoryRange::usable(0, 1 << 20)].into_iter(), &mut storage).unwrap();
    let buddy = Buddy::over(range(0, 512), &map, &words, &areas).unwrap();
    words[need.words - 8].fetch_or(1 << 5, Relaxed);
    assert_eq!(buddy.validate(), Err(Misfit::AbsentFree { pfn: Pfn::new(5) }));
    words[need.words - 8].fetch_and(!(1 << 5), Relaxed);
    words[need.words - 1].fetch_and(!1, Relaxed);
    assert_eq!(buddy.validate(), Err(Misfit::Absent { counted: 256, found: 255 }));
}

/// What a frame is, by the model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Frame {
    Absent,
    Free,
    Out,
}

#[derive(Clone, Debug)]
enum Op {
    Alloc(u8),
    Take(usize),
    Free(prop::sample::Index),
    FreeAny(u32, u8),
    Reserve(u32, u32),
    Add(u32, u32),
}

/// The model's frames begin here, in the middle of a pageblock, and end in the middle of another one.
const FIRST: u32 = 512 * 5 + 130;
const FRAMES: u32 = 512 * 5;

fn op() -> impl Strategy<Value = Op> {
    let (at, frames) = (0..FRAMES, prop_oneof![0..70_u32, 400..600_u32, 0..FRAMES]);
    prop_oneof![
        4 => (0..=10_u8).prop_map(Op::Alloc),
        1 => (0..700_usize).prop_map(Op::Take),
        4 => any::<prop::sample::Index>().prop_map(Op::Free),
        2 => (0..FRAMES, 0..=10_u8).prop_map(|(at, order)| Op::FreeAny(at, order)),
        2 => (at.clone(), frames.clone()).prop_map(|(at, frames)| Op::Reserve(at, frames)),
        2 => (at, frames).prop_map(|(at, frames)| Op::Add(at, frames)),
    ]
}

struct Model<'b> {
    buddy: &'b Buddy<'b>,
    frames: Vec<Frame>,
    /// Blocks that are handed out.
    out: Vec<(u32, u8)>,
}

impl Model<'_> {
    fn set(&mut self, at: u32, frames: u32, from: Frame, to: Frame) {
        for frame in &mut self.frames[at as usize..(at + frames) as usize] {
            assert_eq!(std::mem::replace(frame, to), from);
        }
    }

    fn is_all(&self, at: u32, frames: u32, wanted: Frame) -> bool {
        self.frames[at as usize..(at + frames) as usize].iter().all(|&frame| frame == wanted)
    }

    /// Whether an aligned block of this order is free.
    fn has_free(&self, log2: u8) -> bool {
        let frames = 1 << log2;
        let first = FIRST.next_multiple_of(frames) - FIRST;
        (first..FRAMES).step_by(frames as usize).any(|at| at + frames <= FRAMES && self.is_all(at, frames, Frame::Free))
    }

    fn run(&mut self, op: Op) {
        match op {
            Op::Alloc(log2) => {
                let pfn = self.buddy.alloc_block(order(log2), KIND, 0);
                assert_eq!(pfn.is_some(), self.has_free(log2), "order {log2}");
                if let Some(pfn) = pfn {
                    assert!(pfn.is_aligned_to(order(log2)));
                    self.set(pfn.as_u32() - FIRST, 1 << log2, Frame::Free, Frame::Out);
                    self.out.push((pfn.as_u32() - FIRST, log2));
                }
            }
            Op::Take(want) => {
                let free = self.buddy.free_frames();
                let (bound, mut taken) = (BoundBlock::new(), Vec::new());
                let got = self.buddy.take(&bound, want, KIND, 0, &mut |first, mask| {
                    taken.extend((0..64).filter(|bit| mask >> bit & 1 == 1).map(|bit| first.as_u32() + bit - FIRST));
                });
                self.buddy.unbind(&bound);
                assert_eq!((got, taken.len()), (want.min(free), got));
                for at in taken {
                    self.set(at, 1, Frame::Free, Frame::Out);
                    self.out.push((at, 0));
                }
            }
            Op::Free(index) if !self.out.is_empty() => {
                let (at, log2) = self.out.swap_remove(index.index(self.out.len()));
                assert_eq!(self.buddy.free_block(Pfn::new(FIRST + at), order(log2)), Ok(false));
                self.set(at, 1 << log2, Frame::Out, Frame::Free);
            }
            Op::Free(_) => {}
            // Only what is not out as a whole: that would be a free of another's block.
            Op::FreeAny(at, log2) => {
                let within = at.min(FRAMES.saturating_sub(1 << log2));
                if !self.frames[within as usize..][..1 << log2].contains(&Frame::Out) {
                    self.buddy.free_block(Pfn::new(FIRST + within), order(log2)).unwrap_err();
                }
            }
            Op::Reserve(at, frames) => {
                let frames = frames.min(FRAMES - at);
                let all = &mut self.frames[at as usize..(at + frames) as usize];
                let reserved = self.buddy.reserve_range(range(FIRST + at, frames));
                if all.contains(&Frame::Out) {
                    let Err(MapError::HandedOut { pfn }) = reserved else { panic!("{reserved:?}") };
                    assert_eq!(self.frames[(pfn.as_u32() - FIRST) as usize], Frame::Out);
                } else {
                    let free = all.iter().filter(|&&frame| frame == Frame::Free).count();
                    assert_eq!(reserved, Ok(free as u32));
                    all.fill(Frame::Absent);
                }
            }
            Op::Add(at, frames) => {
                let frames = frames.min(FRAMES - at);
                let added = self.buddy.add_range(range(FIRST + at, frames));
                if self.is_all(at, frames, Frame::Absent) {
                    assert_eq!(added, Ok(()));
                    self.set(at, frames, Frame::Absent, Frame::Free);
                } else {
                    let Err(MapError::Present { pfn }) = added else { panic!("{added:?}") };
                    assert_ne!(self.frames[(pfn.as_u32() - FIRST) as usize], Frame::Absent);
                }
            }
        }
        let count = |wanted| self.frames.iter().filter(|&&frame| frame == wanted).count();
        let census = self.buddy.validate().unwrap();
        let out: u32 = self.out.iter().filter(|(_, log2)| *log2 >= 9).map(|(_, log2)| 1 << log2).sum();
        assert_eq!((census.free, census.whole), (count(Frame::Free), out as usize));
        assert_eq!(self.buddy.managed_frames() as usize, count(Frame::Free) + count(Frame::Out));
    }
}

proptest! {
    #[test]
    fn any_map_and_any_operations_agree_with_a_table_of_frames(
        usable in prop::collection::vec((0..FRAMES, prop_oneof![1..100_u32, 1..FRAMES]), 0..8),
        ops in prop::collection::vec(op(), 0..60),
    ) {
        let mut frames = vec![Frame::Absent; FRAMES as usize];
        let usable: Vec<_> = usable.into_iter().map(|(at, n)| (FIRST + at, n.min(FRAMES - at))).collect();
        for &(first, n) in &usable {
            frames[(first - FIRST) as usize..][..n as usize].fill(Frame::Free);
        }
        with_buddy(range(FIRST, FRAMES), &usable, |buddy| {
            let is_free = |at: usize| buddy.is_free(Pfn::new(FIRST + at as u32));
            assert!(frames.iter().enumerate().all(|(at, &frame)| (frame == Frame::Free) == is_free(at)));
            let mut model = Model { buddy, frames, out: Vec::new() };
            ops.into_iter().for_each(|op| model.run(op));
        });
    }
}

#[test]
fn frames_behind_the_last_one_are_part_of_no_pageblock() {
    // The second pageblock has 200 neighbours at its end, and 100 frames before those are absent.
    with_buddy(range(0, 812), &[(0, 100), (612, 200)], |buddy| {
        assert_eq!(buddy.withhold(250, 1, PageblockId::FIRST), None);
        assert_eq!(buddy.withhold(200, 1, PageblockId::FIRST), Some(PageblockId::new(1)));
        buddy.end_withholding();
    });
}
