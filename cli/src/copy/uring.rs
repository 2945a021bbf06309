//! Several steps at once through io_uring: while one part is written, others are read.
//!
//! A lane owns a buffer and moves one part at a time through two phases, reading and writing. Its request in the ring carries the
//! lane's number. Invariant: the kernel may touch a lane's pages and vector exactly while `is_in_flight` is set. They are neither
//! changed nor freed then, whatever else fails.
use std::io;
use std::mem;
use std::os::fd::AsRawFd;

use io_uring::squeue::Entry;
use io_uring::{IoUring, opcode, types};

use super::Job;
use super::extents::Part;
use super::pages::Buffer;
use crate::failure::Failure;

/// Parts in flight: enough that reading and writing overlap, few enough that their pages stay in the cache.
pub(crate) const LANES: usize = 4;

/// A ring, if the system gives one.
pub(crate) fn ring() -> io::Result<IoUring> {
    IoUring::new(LANES as u32)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Reading,
    Writing,
}

struct Lane {
    buffer: Buffer,
    part: Part,
    phase: Phase,
    /// Bytes that this phase has moved.
    done: usize,
    /// Bytes that this phase has to move.
    bytes: usize,
    is_in_flight: bool,
}

impl Lane {
    fn new() -> Self {
        let part = Part { offset: 0, bytes: 0 };
        Self { buffer: Buffer::default(), part, phase: Phase::Reading, done: 0, bytes: 0, is_in_flight: false }
    }

    fn begin(&mut self, phase: Phase, bytes: usize) {
        (self.phase, self.done, self.bytes) = (phase, 0, bytes);
    }
}

/// The lanes and their ring. Dropping waits for requests in flight, or leaks their buffers.
struct Lanes {
    ring: IoUring,
    lanes: [Lane; LANES],
}

pub(crate) fn copy(job: &mut Job, ring: IoUring) -> Result<(), Failure> {
    let mut lanes = Lanes { ring, lanes: std::array::from_fn(|_| Lane::new()) };
    let mut idle: Vec<usize> = (0..LANES).collect();
    loop {
        while let Some(&i) = idle.last() {
            let lane = &mut lanes.lanes[i];
            let Some(part) = job.next_part(&mut lane.buffer)? else { break };
            idle.pop();
            lane.part = part;
            lane.begin(Phase::Reading, part.bytes);
            lanes.submit(job, i);
        }
        if idle.len() == LANES {
            return Ok(());
        }
        lanes.wait()?;
        while let Some((i, result)) = lanes.completed() {
            if lanes.lanes[i].advance(job, result)? {
                lanes.submit(job, i);
            } else {
                idle.push(i);
            }
        }
    }
}

impl Lane {
    /// Records the result of a request. True if the part needs another request.
    fn advance(&mut self, job: &mut Job, result: i32) -> Result<bool, Failure> {
        if result < 0 {
            let error = io::Error::from_raw_os_error(-result);
            if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) {
                return Ok(true);
            }
            return Err(match self.phase {
                Phase::Reading => job.source.unreadable(&error),
                Phase::Writing => job.target.unwritable(&error),
            });
        }
        self.done += result as usize;
        match self.phase {
            // A short read continues, up to the file's end.
            Phase::Reading if result > 0 && self.done < self.bytes => Ok(true),
            Phase::Reading if self.done > 0 => {
                self.begin(Phase::Writing, self.done);
                Ok(true)
            }
            Phase::Writing if result == 0 => Err(job.target.unwritable(&io::ErrorKind::WriteZero.into())),
            Phase::Writing if self.done < self.bytes => Ok(true),
            _ => {
                job.part_done(self.part, self.done, &mut self.buffer);
                Ok(false)
            }
        }
    }
}

impl Lanes {
    /// Submits a request for the rest of a lane's phase.
    fn submit(&mut self, job: &mut Job, i: usize) {
        let lane = &mut self.lanes[i];
        let offset = lane.part.offset + lane.done as u64;
        let window = lane.buffer.window(lane.done, lane.bytes);
        let (first, entries) = (window.as_ptr(), window.len() as u32);
        let entry: Entry = match lane.phase {
            Phase::Reading => {
                job.io.reads += 1;
                let file = types::Fd(job.source.file.as_raw_fd());
                opcode::Readv::new(file, first, entries).offset(offset).build()
            }
            Phase::Writing => {
                job.io.writes += 1;
                let file = types::Fd(job.target.file().as_raw_fd());
                opcode::Writev::new(file, first, entries).offset(offset).build()
            }
        };
        lane.is_in_flight = true;
        // SAFETY: the vector and its pages belong to the lane, and by the invariant stay unchanged until the request completes.
        // The files outlive the request, for which `Drop` waits.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(i as u64)) };
        // The ring has a place for each lane, and a lane has at most one request.
        assert!(pushed.is_ok(), "{LANES} lanes and the ring is full");
    }

    /// Waits until a request completes.
    fn wait(&mut self) -> Result<(), Failure> {
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let next = "copy with --io preadv";
                    return Err(Failure::new("io_uring", crate::failure::said(&error)).next(next));
                }
            }
        }
    }

    fn completed(&mut self) -> Option<(usize, i32)> {
        let done = self.ring.completion().next()?;
        let i = done.user_data() as usize;
        self.lanes[i].is_in_flight = false;
        Some((i, done.result()))
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        while self.lanes.iter().any(|lane| lane.is_in_flight) {
            if self.wait().is_err() {
                // The kernel may still write to these pages, so they must never be freed.
                let in_flight = self.lanes.iter_mut().filter(|lane| lane.is_in_flight);
                in_flight.for_each(|lane| mem::forget(mem::take(&mut lane.buffer)));
                return;
            }
            while self.completed().is_some() {}
        }
    }
}
