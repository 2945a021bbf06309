//! Marks: what a request may take is counted before it is taken.
use pagemill_core::atomic::{AtomicU32, AtomicU64};
use pagemill_core::{BoundBlock, Buddy, BuddyMetadata, Mobility, Pfn};

#[test]
fn what_is_taken_above_a_mark_is_counted_before_it_is_found() {
    const FRAMES: u32 = 1024;
    let need = BuddyMetadata::for_frames(FRAMES);
    let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    let buddy = Buddy::new(Pfn::new(0), FRAMES, &bits, &areas).unwrap();
    let bound = BoundBlock::new();
    let mut seen = 0;
    // Whoever else looks meanwhile sees so many left, and takes none below the mark.
    let taken = buddy.take(&bound, 2000, Mobility::Unmovable, 100, &mut |_, mask| {
        assert_eq!(buddy.free_frames(), 100);
        assert_eq!(buddy.steal(100), None);
        seen += mask.count_ones();
    });
    assert_eq!((taken, seen, buddy.free_frames()), (924, 924, 100));
}
