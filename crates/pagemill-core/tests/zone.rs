//! What a request does whose frames move while it looks for them.
use pagemill_core::atomic::{AtomicU32, AtomicU64};
use pagemill_core::{BoundBlock, Mobility, Order, PAGEBLOCK_FRAMES, Pfn, Zone, ZoneMetadata};

const KIND: Mobility = Mobility::Movable;

/// Gives `frames` and takes a block that is elsewhere, of which there is one: what was free there is here from now on.
fn give_and_take(zone: &Zone<'_>, frames: &[u32], order: u8, block: u32) {
    let mut giving = zone.giving();
    giving.give_slice(frames);
    assert_eq!(giving.finish().frames, frames.len());
    let order = Order::new(order).unwrap();
    assert_eq!((frames.len(), zone.alloc_block(order, KIND, 0)), (order.frames() as usize, Some(Pfn::new(block))));
}

#[test]
fn frames_that_a_request_missed_can_be_had_afterwards() {
    let frames = 2 * PAGEBLOCK_FRAMES;
    let need = ZoneMetadata::for_frames(frames);
    let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    let zone = Zone::new(Pfn::new(0), frames, &bits, &areas).unwrap();
    // Free in the first pageblock: one frame of its seventh word of 64, and a run of 16 in its last one. In the second one
    // every other frame is free, so that it has no block.
    let bound = BoundBlock::new();
    assert_eq!(zone.take(&bound, frames as usize, KIND, 0, &mut |_, _| ()), frames as usize);
    zone.unbind(&bound);
    let mut giving = zone.giving();
    giving.give(Pfn::new(6 * 64));
    giving.give_run(Pfn::new(7 * 64), 16);
    (PAGEBLOCK_FRAMES..frames).step_by(2).for_each(|frame| giving.give(Pfn::new(frame)));
    assert_eq!(giving.finish().frames, 17 + 256);

    // Whoever wants all of them finds some on each way through the words, and the rest has gone behind it by then. After
    // four times it goes on elsewhere.
    let odd = |word: u32, n: u32| (0..n).map(move |i| word * 64 + 2 * i + 1);
    let run = |word: u32, n: u32| word * 64 + 32..word * 64 + 32 + n;
    let mut got = Vec::new();
    let taken = zone.take(&bound, 17, KIND, 0, &mut |first, mask| {
        got.push((first.as_u32(), mask.count_ones()));
        match got.len() {
            1 => give_and_take(&zone, &odd(4, 8).chain(run(5, 8)).collect::<Vec<_>>(), 4, 7 * 64),
            2 => give_and_take(&zone, &odd(2, 4).chain(run(3, 4)).collect::<Vec<_>>(), 3, 5 * 64 + 32),
            3 => give_and_take(&zone, &odd(0, 2).chain(run(1, 2)).collect::<Vec<_>>(), 2, 3 * 64 + 32),
            4 => give_and_take(&zone, &[5, 7], 1, 64 + 32),
            _ => (),
        }
    });
    assert_eq!(got, [(6 * 64, 1), (4 * 64, 8), (2 * 64, 4), (0, 2), (PAGEBLOCK_FRAMES, 2)]);
    zone.unbind(&bound);
    assert_eq!((taken, zone.validate().map(|census| census.free)), (17, Ok(256)));
    assert_eq!(zone.take(&bound, 256, KIND, 0, &mut |_, _| ()), 256);
}
