//! `pagemill nvme bench`: random requests of one size, at a given depth, for a given time.
//!
//! Each request's pages come from one bulk call and are freed by another, and its list comes from a `DmaPool`: the same
//! path as for `read` and `write` is timed.
use std::time::Duration;

use serde::Serialize;

use crate::Error;
use crate::drive::{Counts, Drive, NAP};
use crate::histogram::Histogram;
use crate::queue::Queue;
use crate::request::{Refused, Request};
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
pub(crate) fn run(
    drive: &Drive,
    queue: &Queue,
    load: &Load,
    check: &mut dyn FnMut() -> Result<(), Error>,
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
        check()?;
        let is_over = drive.now().saturating_sub(begin) >= load.time;
        if is_over && queue.out() == 0 {
            break;
        }
        let room = load.depth.saturating_sub(queue.out());
        let mut left = if is_over || room < load.batch.min(load.depth) { 0 } else { load.batch };
        while left > 0 && queue.has_room() {
            left -= 1;
            let request = match held_back.take() {
                Some(request) => request,
                None => {
                    let buffer = queue.buffer(load.size)?;
                    let whole = buffer.filter(|buffer| buffer.len() == load.size);
                    let Some(mut buffer) = whole else {
                        short += 1;
                        if queue.out() == 0 {
                            return Err(Error::Request(format!(
                                "no memory for a single request of {} bytes; give more with --memory",
                                load.size
                            )));
                        }
                        break;
                    };
                    let is_write = random.below(100) < load.writes.into();
                    let lba = random.below(places) * each;
                    if is_write {
                        // The page's old contents must not be written to the drive.
                        buffer.pieces_mut().for_each(|piece| piece.fill(lba as u8));
                    }
                    if is_write { Request::write(lba, buffer) } else { Request::read(lba, buffer) }
                }
            };
            match queue.submit(request, 0) {
                Ok(()) => {}
                Err(Refused { request, error: Error::Busy(_) }) => {
                    (short, held_back) = (short + 1, Some(request));
                    break;
                }
                Err(refused) => return Err(refused.error),
            }
        }
        queue.ring();
        queue.wait(NAP, &mut done)?;
        for done in done.drain(..) {
            done.result?;
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
