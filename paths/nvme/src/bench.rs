//! `pagemill nvme bench`: random requests of one size, at a given depth, for a given time.
//!
//! Each request's pages come from one bulk call and are freed by another, and its list comes from a `DmaPool`: the same
//! path as for `read` and `write` is timed.
use std::time::Duration;

use serde::Serialize;

use crate::Error;
use crate::bus::Bus;
use crate::drive::{Counts, Drive, Op, Request};
use crate::histogram::Histogram;
use crate::transfer::Random;

/// The load to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Percent of the requests that write.
    pub(crate) writes: u32,
    /// Bytes of a request.
    pub(crate) size: usize,
    /// Requests at a time, in all queues.
    pub(crate) depth: usize,
    /// Requests that are submitted at once.
    pub(crate) batch: usize,
    pub(crate) time: Duration,
    pub(crate) seed: u64,
}

/// The results. Their names are part of the program's interface.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figures {
    pub(crate) seconds: f64,
    pub(crate) requests: u64,
    pub(crate) iops: f64,
    pub(crate) mib_per_s: f64,
    /// Microseconds.
    pub(crate) p50_us: f64,
    pub(crate) p90_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p99_9_us: f64,
    pub(crate) max_us: f64,
    /// Times that memory was short.
    pub(crate) short: u64,
    #[serde(flatten)]
    pub(crate) counts: Counts,
}

/// Runs the load.
///
/// # Errors
/// The first request that failed.
pub(crate) fn run<B: Bus>(
    drive: &mut Drive<B>,
    load: &Load,
    check: &mut dyn FnMut(&mut Drive<B>) -> Result<(), Error>,
) -> Result<Figures, Error> {
    let block = u64::from(drive.namespace().block_size);
    let each = load.size as u64 / block;
    let places = drive.namespace().blocks / each.max(1);
    if each == 0 || !(load.size as u64).is_multiple_of(block) || load.size > drive.max_transfer() || places == 0 {
        let (block, most) = (drive.namespace().block_size, drive.max_transfer());
        let why = format!("requests of {} bytes: take a multiple of {block}, up to {most}", load.size);
        return Err(Error::Request(why));
    }
    let mut random = Random::new(load.seed);
    let mut times = Histogram::new();
    let (mut done, mut held_back, mut short) = (Vec::new(), None, 0);
    let begin = drive.now();
    loop {
        check(drive)?;
        let is_over = drive.now().saturating_sub(begin) >= load.time;
        if is_over && drive.out() == 0 {
            break;
        }
        let room = load.depth.saturating_sub(drive.out());
        let mut left = if is_over || room < load.batch.min(load.depth) { 0 } else { load.batch };
        while left > 0 && drive.has_room() {
            left -= 1;
            let request = match held_back.take() {
                Some(request) => request,
                None => {
                    let buffer = drive.buffer(load.size)?;
                    let whole = buffer.filter(|buffer| buffer.len() == load.size);
                    let Some(mut buffer) = whole else {
                        short += 1;
                        if drive.out() == 0 {
                            return Err(Error::Request(format!(
                                "no memory for a single request of {} bytes; give more with --memory",
                                load.size
                            )));
                        }
                        break;
                    };
                    let op = if random.below(100) < load.writes.into() { Op::Write } else { Op::Read };
                    let lba = random.below(places) * each;
                    if op == Op::Write {
                        // The page's old contents must not be written to the drive.
                        buffer.pieces_mut().for_each(|piece| piece.fill(lba as u8));
                    }
                    Request { op, lba, buffer: Some(buffer) }
                }
            };
            if let Some(request) = drive.submit(request)? {
                (short, held_back) = (short + 1, Some(request));
                break;
            }
        }
        drive.ring();
        drive.wait(&mut done)?;
        for done in done.drain(..) {
            if let Some(error) = drive.failure(&done) {
                return Err(error);
            }
            times.add(done.took);
        }
    }
    let seconds = drive.now().saturating_sub(begin).as_secs_f64();
    let (requests, rate) = (times.total(), times.total() as f64 / seconds);
    Ok(Figures {
        seconds,
        requests,
        iops: rate,
        mib_per_s: rate * load.size as f64 / f64::from(1 << 20),
        p50_us: times.percentile(50.0),
        p90_us: times.percentile(90.0),
        p99_us: times.percentile(99.0),
        p99_9_us: times.percentile(99.9),
        max_us: times.percentile(100.0),
        short,
        counts: drive.counts(),
    })
}
