//! Rows of the table `dma`: small blocks as in the self test of Linux's `dma_pool`, all allocated one by one, then all
//! freed in the same order; and blocks as the descriptors of requests in flight.
//!
//! A [`Source`] hands out blocks in the form in which its users hold them. [`Lane`] is the object-safe interface to the
//! timed loops, which are compiled for each source. Pagemill's own sources are in `ours`, what a program would use
//! today is in `peers`.

mod ours;
mod peers;

use std::hint::black_box;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use crate::rows::{Kind, Row, Unavailable};
use crate::subject::{Flaw, Parts};
use crate::tables::dma::requests::{Bed, Busy};

/// Blocks of a bulk call.
pub(crate) const BULK: usize = 64;

/// How large the blocks are, and how many there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) bytes: usize,
    pub(crate) blocks: usize,
}

/// A row of the table.
pub(crate) type BlockRow = Row<Shape, Box<dyn Lane>>;

impl BlockRow {
    pub(super) fn of_source<S: Source + 'static>(
        name: &'static str,
        kind: Kind,
        open: impl Fn(Shape) -> Result<S, Unavailable> + 'static,
    ) -> BlockRow {
        Row::plain(name, kind, move |shape: Shape| {
            let slots = (0..shape.blocks).map(|_| None).collect();
            Ok(Box::new(Held { source: open(shape)?, slots, shape }) as Box<dyn Lane>)
        })
    }
}

/// The rows, Pagemill's on that backend.
pub(crate) fn rows(backend: &'static str) -> Vec<BlockRow> {
    let mut rows = ours::rows(backend);
    rows.extend(peers::rows());
    #[cfg(feature = "dpdk")]
    rows.extend(super::dpdk::block_rows());
    rows
}

/// One way of getting blocks of one size.
pub(crate) trait Source {
    /// What its user holds of a block.
    type Block;

    /// Fills all `slots`, which are empty. False if there were too few blocks.
    fn fill(&mut self, slots: &mut [Option<Self::Block>]) -> bool;

    /// Frees the blocks in `slots`, in their order.
    fn empty(&mut self, slots: &mut [Option<Self::Block>]);

    /// The program's address of a block.
    fn at(block: &Self::Block) -> NonNull<u8>;

    /// The device's address of a block, if there is one. In these tables it is the same.
    fn device(&self, _block: &Self::Block) -> Option<u64> {
        None
    }

    /// The alignment of blocks of `bytes`.
    fn align(bytes: usize) -> usize {
        bytes
    }

    /// Bytes of memory for each block, itself included, if that is known.
    fn bytes_a_block(&self) -> Option<f64> {
        None
    }

    /// Allocates and frees all blocks `reps` times. Overridden by rows whose own users write this loop in C.
    #[inline]
    fn repeat(&mut self, slots: &mut [Option<Self::Block>], reps: usize) -> bool {
        let mut is_complete = true;
        for _ in 0..reps {
            is_complete &= self.fill(slots);
            black_box(&mut *slots);
            self.empty(slots);
            black_box(&mut *slots);
        }
        is_complete
    }
}

/// A source that has one block a call.
pub(crate) trait OneBlock {
    type Block;
    fn get(&mut self) -> Option<Self::Block>;
    fn put(&mut self, block: Self::Block);
    fn at(block: &Self::Block) -> NonNull<u8>;
    fn device(&self, _block: &Self::Block) -> Option<u64> {
        None
    }
    fn align(bytes: usize) -> usize {
        bytes
    }
    fn bytes_a_block(&self) -> Option<f64> {
        None
    }
}

/// [`OneBlock`], one call a block.
pub(crate) struct Singly<O>(pub(crate) O);

impl<O: OneBlock> Source for Singly<O> {
    type Block = O::Block;

    #[inline]
    fn fill(&mut self, slots: &mut [Option<O::Block>]) -> bool {
        for slot in slots {
            let block = self.0.get();
            if block.is_none() {
                return false;
            }
            *slot = block;
        }
        true
    }

    #[inline]
    fn empty(&mut self, slots: &mut [Option<O::Block>]) {
        for slot in slots {
            if let Some(block) = slot.take() {
                self.0.put(block);
            }
        }
    }

    fn at(block: &O::Block) -> NonNull<u8> {
        O::at(block)
    }

    fn device(&self, block: &O::Block) -> Option<u64> {
        self.0.device(block)
    }

    fn align(bytes: usize) -> usize {
        O::align(bytes)
    }

    fn bytes_a_block(&self) -> Option<f64> {
        self.0.bytes_a_block()
    }
}

/// The timed loops over a source.
pub(crate) trait Lane {
    /// Allocates all blocks, and checks that they are as many as the shape says, distinct, aligned, and at the
    /// addresses that the device is given.
    fn verify(&mut self) -> Result<(), Flaw>;

    /// Allocates and frees all blocks `reps` times, timed as a whole.
    fn rounds(&mut self, reps: usize) -> Result<Duration, Flaw>;

    /// The same, with a word written to each block, as any user would at least do.
    fn written_rounds(&mut self, reps: usize) -> Result<Duration, Flaw>;

    /// Allocates all blocks and frees them in random order, with a clock around each half. Shuffling is untimed.
    fn shuffled_rounds(&mut self, reps: usize, rng: &mut fastrand::Rng) -> Result<Parts, Flaw>;

    /// `batches` of requests, each of which has a block while it is in flight.
    fn requests(&mut self, bed: &mut Bed, batches: usize) -> Result<Busy, Flaw>;

    /// Bytes of memory for each block, itself included, once all blocks have been allocated.
    fn bytes_a_block(&self) -> Option<f64>;
}

/// A source and the blocks that are allocated.
struct Held<S: Source> {
    source: S,
    slots: Vec<Option<S::Block>>,
    shape: Shape,
}

impl<S: Source> Held<S> {
    fn timed(&self, start: Instant, is_complete: bool) -> Result<Duration, Flaw> {
        is_complete.then(|| start.elapsed()).ok_or(Flaw::ShortOfBlocks { wanted: self.shape.blocks })
    }
}

impl<S: Source> Drop for Held<S> {
    fn drop(&mut self) {
        self.source.empty(&mut self.slots);
    }
}

impl<S: Source> Lane for Held<S> {
    fn verify(&mut self) -> Result<(), Flaw> {
        let is_complete = self.source.fill(&mut self.slots);
        let found: Vec<(usize, Option<u64>)> = self
            .slots
            .iter()
            .flatten()
            .map(|block| (S::at(block).as_ptr() as usize, self.source.device(block)))
            .collect();
        self.source.empty(&mut self.slots);
        is_complete.then_some(()).ok_or(Flaw::ShortOfBlocks { wanted: self.shape.blocks })?;
        check_blocks(found, self.shape, S::align(self.shape.bytes))
    }

    #[inline(never)]
    fn rounds(&mut self, reps: usize) -> Result<Duration, Flaw> {
        let start = Instant::now();
        let is_complete = self.source.repeat(&mut self.slots, reps);
        self.timed(start, is_complete)
    }

    #[inline(never)]
    fn written_rounds(&mut self, reps: usize) -> Result<Duration, Flaw> {
        let mut is_complete = true;
        let start = Instant::now();
        for _ in 0..reps {
            for chunk in self.slots.chunks_mut(BULK) {
                is_complete &= self.source.fill(chunk);
                for block in chunk.iter().flatten() {
                    // SAFETY: the block is this program's, and has 16 bytes at least.
                    unsafe { S::at(block).cast::<u64>().write_volatile(1) };
                }
            }
            self.source.empty(&mut self.slots);
        }
        self.timed(start, is_complete)
    }

    #[inline(never)]
    fn shuffled_rounds(&mut self, reps: usize, rng: &mut fastrand::Rng) -> Result<Parts, Flaw> {
        let mut parts = Parts::default();
        let mut is_complete = true;
        for _ in 0..reps {
            let start = Instant::now();
            is_complete &= self.source.fill(&mut self.slots);
            parts.alloc += start.elapsed();
            rng.shuffle(&mut self.slots);
            let start = Instant::now();
            self.source.empty(&mut self.slots);
            parts.free += start.elapsed();
        }
        is_complete.then_some(parts).ok_or(Flaw::ShortOfBlocks { wanted: self.shape.blocks })
    }

    fn requests(&mut self, bed: &mut Bed, batches: usize) -> Result<Busy, Flaw> {
        Ok(bed.run(&mut self.source, batches)?)
    }

    fn bytes_a_block(&self) -> Option<f64> {
        self.source.bytes_a_block()
    }
}

/// Checks that there are as many blocks as the shape says, that they are aligned to `align`, that no two overlap, and
/// that the device's address of each is right.
fn check_blocks(mut found: Vec<(usize, Option<u64>)>, shape: Shape, align: usize) -> Result<(), Flaw> {
    let Shape { bytes, blocks } = shape;
    if found.len() != blocks {
        return Err(Flaw::CountOfBlocks { wanted: blocks, held: found.len() });
    }
    for &(addr, device) in &found {
        if addr == 0 || addr % align != 0 {
            return Err(Flaw::UnalignedBlock { addr, align });
        }
        if let Some(device) = device.filter(|&device| device != addr as u64) {
            return Err(Flaw::Elsewhere { addr, device });
        }
    }
    found.sort_unstable();
    match found.windows(2).find(|pair| pair[1].0 - pair[0].0 < bytes) {
        Some(pair) => Err(Flaw::Overlap { addr: pair[1].0 }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { bytes: 64, blocks: 3 };

    #[test]
    fn the_check_of_blocks_fails_on_each_flaw() {
        let check = |blocks: [(usize, Option<u64>); 3]| check_blocks(blocks.to_vec(), SHAPE, 64);
        assert_eq!(check([(192, None), (64, Some(64)), (128, None)]), Ok(()));
        assert_eq!(check_blocks(vec![(64, None)], SHAPE, 64), Err(Flaw::CountOfBlocks { wanted: 3, held: 1 }));
        assert_eq!(check([(192, None), (72, None), (128, None)]), Err(Flaw::UnalignedBlock { addr: 72, align: 64 }));
        assert_eq!(check([(192, None), (0, None), (128, None)]), Err(Flaw::UnalignedBlock { addr: 0, align: 64 }));
        assert_eq!(check_blocks(vec![(96, None); 1], Shape { bytes: 64, blocks: 1 }, 32), Ok(()));
        assert_eq!(check([(64, None), (128, None), (64, None)]), Err(Flaw::Overlap { addr: 64 }));
        assert_eq!(check([(192, None), (64, Some(128)), (128, None)]), Err(Flaw::Elsewhere { addr: 64, device: 128 }));
    }

    /// Checks every row of this build in every shape, as every cell is checked before it is timed, and again after each
    /// loop.
    #[test]
    fn every_row_hands_out_distinct_blocks_and_takes_them_back() {
        for backend in ["rseq", "portable"] {
            for row in rows(backend) {
                for (bytes, blocks) in [(16, 1000), (64, 8192), (4096, 100)] {
                    let shape = Shape { bytes, blocks };
                    let mut lane = match (row.open)(shape) {
                        Ok(lane) => lane,
                        Err(reason) => {
                            println!("skipped {} {backend}: {reason}", row.name);
                            continue;
                        }
                    };
                    let told = |flaw: Flaw| -> ! { panic!("{} {backend}, {shape:?}: {flaw}", row.name) };
                    lane.verify().unwrap_or_else(|flaw| told(flaw));
                    lane.rounds(3).unwrap_or_else(|flaw| told(flaw));
                    lane.written_rounds(2).unwrap_or_else(|flaw| told(flaw));
                    lane.shuffled_rounds(2, &mut fastrand::Rng::with_seed(7)).unwrap_or_else(|flaw| told(flaw));
                    lane.rounds(1).unwrap_or_else(|flaw| told(flaw));
                    lane.verify().unwrap_or_else(|flaw| told(flaw));
                    if let Some(all) = lane.bytes_a_block() {
                        assert!(all >= bytes as f64, "{} takes {all} bytes for {bytes}", row.name);
                    }
                }
            }
        }
    }

    /// A source that always has too few blocks.
    struct Short;
    impl Source for Short {
        type Block = NonNull<u8>;
        fn fill(&mut self, _: &mut [Option<NonNull<u8>>]) -> bool {
            false
        }
        fn empty(&mut self, _: &mut [Option<NonNull<u8>>]) {}
        fn at(block: &NonNull<u8>) -> NonNull<u8> {
            *block
        }
    }

    #[test]
    fn a_row_that_runs_short_gets_an_error_instead_of_a_time() {
        let row = BlockRow::of_source("short", Kind::Peer, |_| Ok(Short));
        let mut lane = (row.open)(SHAPE).map_err(|_| ()).unwrap();
        let short = Flaw::ShortOfBlocks { wanted: 3 };
        assert_eq!(lane.verify(), Err(short.clone()));
        assert_eq!(lane.rounds(1), Err(short.clone()));
        assert_eq!(lane.shuffled_rounds(1, &mut fastrand::Rng::with_seed(7)), Err(short.clone()));
        assert_eq!(lane.written_rounds(1), Err(short));
    }
}
