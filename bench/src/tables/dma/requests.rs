//! Requests in flight: 4 KiB random reads by io_uring at depth 256, reaped and submitted 64 at a time. Each has a small
//! block while it is in flight: its descriptor, which says where the read goes and which read it is.
//!
//! The file is an unnamed temporary file in the page cache, so that no device takes time, and the allocator's share is
//! as large as it can be. File systems such as ext4 and XFS do such a read while it is submitted, on this thread; its
//! completion and its block wait to be reaped. On other file systems (tmpfs) a kernel thread reads.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use crate::rows::Unavailable;
use crate::rows::dma::{BULK, Shape, Source};
use crate::rows::region::Region;
use crate::subject::{Flaw, PAGE_BYTES};
use io_uring::{IoUring, opcode, types};

/// Reads in flight.
pub(crate) const DEPTH: usize = 256;
/// The shape that a row is opened for: a descriptor for each read in flight, and one batch more.
pub(crate) const SHAPE: Shape = Shape { bytes: 64, blocks: DEPTH + BULK };
/// Pages of the file.
const FILE_PAGES: u64 = 8192;

/// The contents of a request's block.
#[repr(C)]
struct Descriptor {
    /// Where the read goes; the system reads this field.
    to: libc::iovec,
    /// The page of the file, and the index in the table of requests in flight.
    page: u64,
    slot: usize,
}

const _: () = assert!(size_of::<Descriptor>() <= SHAPE.bytes && align_of::<Descriptor>() <= SHAPE.bytes);

/// Why there is no figure.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("{0}")]
    System(#[from] io::Error),
    #[error("got fewer than the {BULK} blocks it was asked for")]
    Short,
    #[error("read {got} bytes and the page {found} where it asked for page {page}")]
    Wrong { page: u64, found: u64, got: i32 },
    #[error("two requests in flight have the same block, at {addr:#x}")]
    Shared { addr: usize },
}

impl From<Failure> for Flaw {
    fn from(failure: Failure) -> Flaw {
        Flaw::Failed(failure.to_string())
    }
}

/// Times of the timed requests.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Busy {
    /// Allocating their blocks, and freeing them.
    pub(crate) alloc: Duration,
    pub(crate) free: Duration,
    pub(crate) wall: Duration,
    /// The sums over all requests: from when the blocks of a batch are asked for until its submission is done, and from then until
    /// the request is reaped.
    pub(crate) submission: Duration,
    pub(crate) completion: Duration,
    /// Processor time of this process.
    pub(crate) cpu: Duration,
}

/// The file, the ring and the buffers that all rows share.
pub(crate) struct Bed {
    ring: IoUring,
    file: File,
    buffers: Region,
    rng: fastrand::Rng,
    in_flight: usize,
}

impl Bed {
    pub(crate) fn new(seed: u64) -> Result<Bed, Unavailable> {
        let told = |what: &'static str| move |error: io::Error| Unavailable(format!("{what}: {error}"));
        let ring = IoUring::new(DEPTH as u32).map_err(told("io_uring is not to be had here"))?;
        let mut file = tempfile::tempfile().map_err(told("no temporary file"))?;
        let mut page = [0u8; PAGE_BYTES];
        for number in 0..FILE_PAGES {
            page[..8].copy_from_slice(&number.to_ne_bytes());
            file.write_all(&page).map_err(told("writing a temporary file"))?;
        }
        Ok(Bed { ring, file, buffers: Region::new(DEPTH)?, rng: fastrand::Rng::with_seed(seed), in_flight: 0 })
    }

    /// Runs `batches` of reads. The reads that fill the queue before, and those that empty it afterwards, are not
    /// timed.
    #[inline(never)]
    pub(crate) fn run<S: Source>(&mut self, source: &mut S, batches: usize) -> Result<Busy, Failure> {
        let mut held: Vec<Option<S::Block>> = (0..DEPTH).map(|_| None).collect();
        let mut blocks: [Option<S::Block>; BULK] = [const { None }; BULK];
        let mut slots: [usize; BULK] = [0; BULK];
        let result = self.fill_and_run(source, batches, &mut held, &mut blocks, &mut slots);
        // The system must not write to buffers and blocks that are freed.
        let is_quiet = self.settle();
        source.empty(&mut held);
        source.empty(&mut blocks);
        is_quiet?;
        result
    }

    fn fill_and_run<S: Source>(
        &mut self,
        source: &mut S,
        batches: usize,
        held: &mut [Option<S::Block>],
        blocks: &mut [Option<S::Block>; BULK],
        slots: &mut [usize; BULK],
    ) -> Result<Busy, Failure> {
        for first in (0..DEPTH).step_by(BULK) {
            *slots = std::array::from_fn(|at| first + at);
            if !source.fill(blocks) {
                return Err(Failure::Short);
            }
            self.submit::<S>(held, blocks, slots)?;
        }
        let mut busy = Busy::default();
        let (start, cpu) = (Instant::now(), cpu_time());
        let mut submitted = [start; DEPTH];
        for _ in 0..batches {
            self.reap::<S>(held, blocks, slots)?;
            let before = Instant::now();
            busy.completion += slots.iter().map(|&slot| before - submitted[slot]).sum::<Duration>();
            source.empty(blocks);
            let between = Instant::now();
            let is_full = source.fill(blocks);
            let after = Instant::now();
            (busy.free, busy.alloc) = (busy.free + (between - before), busy.alloc + (after - between));
            if !is_full {
                return Err(Failure::Short);
            }
            self.submit::<S>(held, blocks, slots)?;
            let now = Instant::now();
            busy.submission += (now - between) * BULK as u32;
            slots.iter().for_each(|&slot| submitted[slot] = now);
        }
        Ok(Busy { wall: start.elapsed(), cpu: cpu_time().saturating_sub(cpu), ..busy })
    }

    /// Submits a batch of reads, each with a block, and waits until as many have completed.
    fn submit<S: Source>(
        &mut self,
        held: &mut [Option<S::Block>],
        blocks: &mut [Option<S::Block>],
        slots: &[usize; BULK],
    ) -> Result<(), Failure> {
        let fd = types::Fd(self.file.as_raw_fd());
        let mut queue = self.ring.submission();
        for (block, &slot) in blocks.iter_mut().zip(slots) {
            let Some(found) = block else { return Err(Failure::Short) };
            let at: NonNull<Descriptor> = S::at(found).cast();
            let page = self.rng.u64(..FILE_PAGES);
            let to = libc::iovec { iov_base: (self.buffers.base() + slot * PAGE_BYTES) as *mut _, iov_len: PAGE_BYTES };
            // SAFETY: the block is this request's, and as large and as aligned as a descriptor has to be.
            unsafe { at.write(Descriptor { to, page, slot }) };
            let read = opcode::Readv::new(fd, at.as_ptr().cast_const().cast(), 1).offset(page * PAGE_BYTES as u64);
            // SAFETY: the descriptor stays until its completion was reaped, and the buffer is this place's.
            let is_queued = unsafe { queue.push(&read.build().user_data(at.as_ptr() as u64)) };
            is_queued.map_err(|_| io::Error::other("the ring has no place for what is in flight"))?;
            self.in_flight += 1;
            held[slot] = block.take();
        }
        drop(queue);
        loop {
            match self.ring.submit_and_wait(BULK) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other.map(drop).map_err(Failure::System),
            }
        }
    }

    /// Reaps a batch of completions, each with its block, and checks the pages that were read.
    fn reap<S: Source>(
        &mut self,
        held: &mut [Option<S::Block>],
        blocks: &mut [Option<S::Block>],
        slots: &mut [usize; BULK],
    ) -> Result<(), Failure> {
        let mut done = 0;
        while done < BULK {
            let mut queue = self.ring.completion();
            for entry in queue.by_ref().take(BULK - done) {
                self.in_flight -= 1;
                let at = entry.user_data() as *const Descriptor;
                // SAFETY: the block of a request in flight holds its descriptor.
                let (page, slot) = unsafe { ((*at).page, (*at).slot) };
                let buffer = (self.buffers.base() + slot * PAGE_BYTES) as *const u64;
                // SAFETY: the buffer of this place, which nobody writes to now.
                let found = unsafe { buffer.read_volatile() };
                if entry.result() != PAGE_BYTES as i32 || found != page {
                    return Err(Failure::Wrong { page, found, got: entry.result() });
                }
                blocks[done] = held[slot].take();
                if blocks[done].is_none() {
                    return Err(Failure::Shared { addr: at as usize });
                }
                slots[done] = slot;
                done += 1;
            }
            drop(queue);
            if done < BULK {
                self.ring.submit_and_wait(1).map(drop).or_else(|error| match error.kind() {
                    io::ErrorKind::Interrupted => Ok(()),
                    _ => Err(error),
                })?;
            }
        }
        Ok(())
    }

    /// Waits for all reads in flight.
    fn settle(&mut self) -> io::Result<()> {
        loop {
            self.in_flight -= self.ring.completion().count();
            if self.in_flight == 0 {
                return Ok(());
            }
            match self.ring.submit_and_wait(1) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
        }
    }
}

fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a structure of the kind that the kernel fills; every process has this clock.
    let rc = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    debug_assert_eq!(rc, 0, "the arguments are valid");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
