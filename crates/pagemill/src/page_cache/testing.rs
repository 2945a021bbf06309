//! Memory and transfers for the tests of backings.
use super::{ReadTransfer, WriteTransfer};
use core::ptr::NonNull;
use std::io;
use std::sync::mpsc::{Receiver, channel};

/// Memory for transfers, in pieces, perhaps with gaps between them. It outlives them: a transfer may be forgotten.
pub(super) struct Memory {
    bytes: Box<[u8]>,
    /// Where the first piece begins.
    first: usize,
    gap: usize,
}

/// What no transfer has touched.
const UNTOUCHED: u8 = 0xee;

impl Memory {
    /// The gap between pieces of [`new`](Self::new).
    pub(super) const GAP: usize = 3;

    /// 64 KiB for pieces with gaps between them.
    pub(super) fn new() -> Self {
        Self { bytes: vec![UNTOUCHED; 1 << 16].into(), first: 0, gap: Self::GAP }
    }

    /// Aligned pages without gaps.
    pub(super) fn pages(n: usize) -> Self {
        let bytes: Box<[u8]> = vec![UNTOUCHED; (n + 1) * 4096].into();
        let first = bytes.as_ptr().addr().next_multiple_of(4096) - bytes.as_ptr().addr();
        Self { bytes, first, gap: 0 }
    }

    /// Where pieces of these lengths begin and end.
    fn ranges(&self, lens: &[usize]) -> Vec<std::ops::Range<usize>> {
        let mut at = self.first;
        let range = |&len| {
            let range = at..at + len;
            at += len + self.gap;
            assert!(at <= self.bytes.len());
            range
        };
        lens.iter().map(range).collect()
    }

    fn pieces(&mut self, lens: &[usize]) -> Vec<(NonNull<u8>, usize)> {
        let ranges = self.ranges(lens);
        let base = NonNull::from(&mut self.bytes[..]).cast::<u8>();
        // SAFETY: inside the memory, as `ranges` has checked.
        ranges.into_iter().map(|range| (unsafe { base.add(range.start) }, range.len())).collect()
    }

    /// The bytes of the pieces. The gaps are untouched.
    pub(super) fn read(&self, lens: &[usize]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for range in self.ranges(lens) {
            bytes.extend(&self.bytes[range.clone()]);
            assert!(self.bytes[range.end..range.end + self.gap].iter().all(|&byte| byte == UNTOUCHED));
        }
        bytes
    }

    pub(super) fn fill(&mut self, lens: &[usize], bytes: &[u8]) {
        let mut rest = bytes;
        for range in self.ranges(lens) {
            let (these, others) = rest.split_at(range.len());
            self.bytes[range].copy_from_slice(these);
            rest = others;
        }
    }
}

/// A read into pieces of these lengths, and what hears its end.
pub(super) fn read_of(memory: &mut Memory, at: u64, lens: &[usize]) -> (ReadTransfer, Receiver<io::Result<usize>>) {
    let (says, hears) = channel();
    // SAFETY: each test waits for the result before it looks at the memory, and keeps it as long.
    let read = unsafe { ReadTransfer::new(at, memory.pieces(lens), Box::new(move |done| says.send(done).unwrap())) };
    (read, hears)
}

/// A write of pieces of these lengths, and what hears its end.
pub(super) fn write_of(memory: &mut Memory, at: u64, lens: &[usize]) -> (WriteTransfer, Receiver<io::Result<usize>>) {
    let (says, hears) = channel();
    // SAFETY: as for reads.
    let write = unsafe { WriteTransfer::new(at, memory.pieces(lens), Box::new(move |done| says.send(done).unwrap())) };
    (write, hears)
}

/// `n` bytes, in which each page differs from the next.
pub(super) fn some_bytes(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i % 251) as u8).collect()
}
