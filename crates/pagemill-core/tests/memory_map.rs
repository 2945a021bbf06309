//! C12.1: what a memory map makes of a table, against a table of cells, and of tables that lie.
use pagemill_core::{FrameRange, MapError, MemoryMap, MemoryRange, PAGE_SIZE, PageCount, Pfn};
use proptest::prelude::*;

const PAGE: u64 = PAGE_SIZE as u64;
/// Bytes for which the model has one entry: eight to a page.
const CELL: u64 = PAGE / 8;
/// The model's cells.
const CELLS: u64 = 400 * 8;

fn range(first: u32, frames: u32) -> FrameRange {
    FrameRange::new(Pfn::new(first), frames).unwrap()
}

/// The frames of a map, or the reason why there is none.
fn frames_of(table: &[MemoryRange], room: usize) -> Result<Vec<(u32, u32)>, MapError> {
    let mut storage = vec![FrameRange::EMPTY; room];
    let map = MemoryMap::new(table.iter().copied(), &mut storage)?;
    Ok(map.ranges().iter().map(|range| (range.first().as_u32(), range.frames())).collect())
}

#[test]
fn partial_frames_are_not_used_and_ranges_that_touch_inside_a_frame_are_one() {
    let usable = MemoryRange::usable;
    assert_eq!(frames_of(&[usable(1, 2 * PAGE - 1)], 4), Ok(vec![(1, 1)]));
    assert_eq!(frames_of(&[usable(1, PAGE)], 4), Ok(vec![]));
    assert_eq!(frames_of(&[usable(PAGE / 2, PAGE), usable(0, PAGE / 2)], 4), Ok(vec![(0, 1)]));
    assert_eq!(frames_of(&[usable(0, 2 * PAGE), usable(2 * PAGE, 2 * PAGE)], 1), Ok(vec![(0, 4)]));
    assert_eq!(frames_of(&[usable(0, 4 * PAGE), MemoryRange::reserved(2 * PAGE - 1, 1)], 2), Ok(vec![(0, 1), (2, 2)]));
}

#[test]
fn empty_tables_and_empty_ranges_have_no_frame() {
    assert_eq!(frames_of(&[], 0), Ok(vec![]));
    let empty = [MemoryRange::usable(0, 0), MemoryRange::usable(u64::MAX, 0), MemoryRange::reserved(u64::MAX, 0)];
    assert_eq!(frames_of(&empty, 0), Ok(vec![]));
    let mut storage = [];
    let mut map = MemoryMap::new([].into_iter(), &mut storage).unwrap();
    assert_eq!((map.frames(), map.spans(0).count(), map.carve(PageCount::new(1))), (0, 0, None));
    // A reserved range of no byte cuts nothing.
    assert_eq!(frames_of(&[MemoryRange::usable(0, PAGE), MemoryRange::reserved(8, 0)], 1), Ok(vec![(0, 1)]));
}

#[test]
fn ranges_at_the_end_of_the_address_space_are_used_or_refused() {
    let (top, limit) = (u64::MAX, u64::from(FrameRange::MOST) * PAGE);
    let refused = MapError::PastTheEnd { start: top, bytes: 2 };
    assert_eq!(frames_of(&[MemoryRange::usable(top, 2)], 4), Err(refused));
    assert_eq!(frames_of(&[MemoryRange::reserved(top, 2)], 4), Err(refused));
    // Reserved addresses above all frames do no harm; usable ones are more than numbers count.
    let all = [MemoryRange::usable(limit - PAGE, PAGE), MemoryRange::reserved(limit, top - limit + 1)];
    assert_eq!(frames_of(&all, 4), Ok(vec![(FrameRange::MOST - 1, 1)]));
    let beyond = frames_of(&[MemoryRange::usable(limit - PAGE, 2 * PAGE)], 4);
    assert!(matches!(beyond, Err(MapError::TooHigh { .. })), "{beyond:?}");
    let last = frames_of(&[MemoryRange::usable(top - PAGE + 1, PAGE)], 4);
    assert_eq!(last, Err(MapError::TooHigh { start: top - PAGE + 1 }));
    // Where reserved ranges cover it, it is not used, and not refused.
    assert_eq!(
        frames_of(&[MemoryRange::usable(limit, top - limit), MemoryRange::reserved(limit, top - limit + 1)], 0),
        Ok(vec![])
    );
    assert_eq!(
        frames_of(&[MemoryRange::usable(0, top), MemoryRange::reserved(2 * PAGE, top - 2 * PAGE)], 1),
        Ok(vec![(0, 2)])
    );
}

#[test]
fn storage_that_is_too_small_is_refused() {
    let table = [MemoryRange::usable(0, PAGE), MemoryRange::usable(2 * PAGE, PAGE)];
    assert_eq!(frames_of(&table, 1), Err(MapError::Storage { most: 1 }));
    assert_eq!(frames_of(&table, 2), Ok(vec![(0, 1), (2, 1)]));
}

#[test]
fn frame_ranges_beyond_the_last_frame_are_refused() {
    for (first, frames) in [(FrameRange::MOST, 1), (u32::MAX, 1), (u32::MAX, u32::MAX), (1, u32::MAX), (u32::MAX, 0)] {
        let refused = FrameRange::new(Pfn::new(first), frames);
        assert!(matches!(refused, Err(MapError::TooHigh { .. })), "{first} {frames}");
    }
    assert_eq!(range(0, FrameRange::MOST).end(), Pfn::new(FrameRange::MOST));
    assert_eq!(FrameRange::covering(PAGE - 1, 2), Ok(range(0, 2)));
    assert_eq!(FrameRange::covering(7, 0), Ok(FrameRange::EMPTY));
    assert!(matches!(FrameRange::covering(u64::MAX, 1), Err(MapError::TooHigh { .. })));
    assert!(matches!(FrameRange::covering(u64::MAX, 2), Err(MapError::PastTheEnd { .. })));
}

#[test]
fn memory_for_metadata_is_carved_from_the_end_of_the_largest_range() {
    let table = [(0, 3), (8, 5), (16, 4)].map(|(first, frames)| MemoryRange::usable(first * PAGE, frames * PAGE));
    let mut storage = [FrameRange::EMPTY; 3];
    let mut map = MemoryMap::new(table.into_iter(), &mut storage).unwrap();
    assert_eq!(map.carve(PageCount::new(6)), None);
    assert_eq!(map.carve(PageCount::new(0)), Some(FrameRange::EMPTY));
    assert_eq!(map.carve(PageCount::new(usize::MAX)), None);
    assert_eq!(map.carve(PageCount::new(3)), Some(range(10, 3)));
    assert_eq!(map.carve(PageCount::new(4)), Some(range(16, 4)));
    assert_eq!(map.ranges(), [range(0, 3), range(8, 2)], "a range that is used up is gone");
    assert_eq!(map.carve(PageCount::new(3)), Some(range(0, 3)));
    assert_eq!((map.ranges(), map.frames()), (&[range(8, 2)][..], 2));
}

/// Entries of a table in the model's cells behind `base`; some of them have no byte.
fn table() -> impl Strategy<Value = Vec<(u64, u64, bool)>> {
    let entry = (0..CELLS, prop_oneof![3 => 0..200_u64, 1 => 0..CELLS], prop::bool::weighted(0.7));
    prop::collection::vec(entry.prop_map(|(at, cells, is_usable)| (at, cells.min(CELLS - at), is_usable)), 0..24)
}

proptest! {
    #[test]
    fn the_usable_frames_are_those_of_the_model(table in table(), base in prop::sample::select(vec![0, 700, FrameRange::MOST - 400])) {
        let mut is_usable = vec![false; CELLS as usize];
        for wanted in [true, false] {
            for &(at, cells, _) in table.iter().filter(|entry| entry.2 == wanted) {
                is_usable[at as usize..(at + cells) as usize].fill(wanted);
            }
        }
        let start = u64::from(base) * PAGE;
        let ranges: Vec<MemoryRange> = table
            .iter()
            .map(|&(at, cells, is_usable)| MemoryRange { start: start + at * CELL, bytes: cells * CELL, is_usable })
            .collect();
        let mut storage = vec![FrameRange::EMPTY; 2 * table.len()];
        let map = MemoryMap::new(ranges.iter().copied(), &mut storage).unwrap();
        let mut found = vec![false; is_usable.len() / 8];
        for range in map.ranges() {
            prop_assert!(!range.is_empty());
            let first = range.first().since(Pfn::new(base)) as usize;
            found[first..first + range.frames() as usize].fill(true);
        }
        let expected: Vec<bool> = is_usable.chunks(8).map(|cells| cells.iter().all(|&cell| cell)).collect();
        prop_assert_eq!(found.iter().filter(|&&is| is).count(), map.frames() as usize, "a frame is in two ranges");
        prop_assert_eq!(found, expected);
        // M1: ascending, and not touching.
        prop_assert!(map.ranges().windows(2).all(|two| two[0].end() < two[1].first()));
        prop_assert!(map.spans(0).eq(map.ranges().iter().copied()));
        prop_assert!(map.spans(u32::MAX).count() <= 1);
    }

    #[test]
    fn tables_that_lie_are_refused_or_give_frames_that_they_list(
        table in prop::collection::vec((number(), number(), any::<bool>()), 0..12),
        room in 0..16_usize,
    ) {
        let table: Vec<_> =
            table.into_iter().map(|(start, bytes, is_usable)| MemoryRange { start, bytes, is_usable }).collect();
        let overflows = |range: &MemoryRange| u128::from(range.start) + u128::from(range.bytes) > 1 << 64;
        match frames_of(&table, room) {
            Ok(ranges) => {
                prop_assert!(!table.iter().any(overflows));
                for (first, frames) in ranges {
                    let (start, bytes) = (u64::from(first) * PAGE, u64::from(frames) * PAGE);
                    let touches = |range: &&MemoryRange| {
                        range.bytes > 0 && range.start < start + bytes && range.start + (range.bytes - 1) >= start
                    };
                    prop_assert!(table.iter().filter(touches).all(|range| range.is_usable));
                    prop_assert!(table.iter().filter(touches).count() > 0);
                }
            }
            Err(MapError::PastTheEnd { start, bytes }) => {
                prop_assert!(table.iter().any(|range| overflows(range) && (range.start, range.bytes) == (start, bytes)));
            }
            Err(MapError::TooHigh { start }) => {
                prop_assert!(start >= u64::from(FrameRange::MOST) * PAGE, "{start:#x}");
            }
            Err(refused) => prop_assert_eq!(refused, MapError::Storage { most: room }),
        }
    }
}

/// Numbers near those at which something may overflow.
fn number() -> impl Strategy<Value = u64> {
    let near = |at: u64| (0..3 * PAGE).prop_map(move |by| at.wrapping_sub(PAGE).wrapping_add(by));
    prop_oneof![
        near(0),
        near(PAGE),
        near(1 << 32),
        near(u64::from(FrameRange::MOST) * PAGE),
        near(1 << 63),
        any::<u64>()
    ]
}
