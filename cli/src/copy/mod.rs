//! `pagemill copy`: copies a file through pages.
//!
//! A copy is a sequence of steps. A step takes pages from the allocator ([`pages`]), in one call or one by one. It reads the next
//! part of the source into them and writes it out again ([`preadv`], or [`uring`] with several steps at once). Then it gives the
//! pages back. [`extents`] finds the parts that hold data: holes are skipped, and stay holes. [`files`] decides which files are
//! accepted, and gives the copy its name once it is complete.
//!
//! Invariants: the destination's name leads to the old file or to the complete copy (I1). Unless SIGKILL ends the program, the
//! unfinished copy is removed first, and a message says so (I2).
mod extents;
mod files;
mod pages;
mod preadv;
mod report;
mod uring;

use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, ValueEnum};
use pagemill::{Allocator, PAGE_SIZE};

use crate::allocator::default_allocator;
use crate::failure::{Failure, print, said};
use crate::faults;
use crate::progress::progress;
use crate::stop::Stop;
use crate::watched;
use extents::{Extents, Part};
use files::{Source, Target};
use indicatif::ProgressBar;
use pages::{Buffer, Tally};
use report::Report;

/// Copy a file through Pagemill's pages, as a storage program would
///
/// Each operation allocates pages, reads into them and writes out of them as one
/// I/O vector, and frees them. At the end it prints the bytes, the holes, the time
/// and the cost of allocating. Holes stay holes; permissions are kept.
///
/// The copy is made under a temporary name (.pagemill-*.partial) beside DST, and
/// gets its own name once it is complete. If anything fails or a signal ends it,
/// DST is as it was, and the unfinished copy is removed; only SIGKILL leaves it.
/// With --force, DST becomes a new file: other hard links to the old one keep the
/// old contents.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment, after_help = AFTER_HELP)]
pub(crate) struct CopyArgs {
    /// The file to copy; not a directory, pipe or device
    src: PathBuf,

    /// The file to make
    dst: PathBuf,

    /// How pages are allocated
    #[arg(long, value_enum, default_value_t = AllocForm::Bulk)]
    alloc: AllocForm,

    /// Pages an operation, 1 to 16384 (64 MiB)
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value = "256", value_parser = batch)]
    batch: usize,

    /// How the file is read and written
    #[arg(long, value_enum, default_value_t = IoForm::Auto)]
    io: IoForm,

    /// Replace DST if it exists
    #[arg(long)]
    force: bool,

    /// Wait until the copy is on the disk
    #[arg(long)]
    sync: bool,

    /// Make acquisitions fail, to see how the copy reacts
    #[arg(long, value_name = "SPEC", value_parser = faults::spec)]
    fail: Option<String>,

    /// Print the result as a JSON object
    #[arg(long)]
    json: bool,
}

const AFTER_HELP: &str = "\
Examples:
  pagemill copy disk.img copy.img
  pagemill copy --alloc single --io preadv disk.img copy.img
  pagemill copy --json --force disk.img copy.img | jq .gib_per_s
  pagemill copy --fail p=0.5,seed=7 disk.img copy.img

A copy that gets fewer pages than it wants takes shorter steps; one that gets
none fails. SPEC, or else PAGEMILL_FAIL, makes that happen:
  after=N     acquisitions (trips to a zone) fail after the first N
  p=0.5       each fails with this probability; seed=N begins the sequence

Exit codes:
  0  copied
  1  failed: nothing was made, and standard error says why
  2  the command line makes no sense
  ended by SIGINT, SIGTERM, SIGHUP or SIGQUIT: stopped, nothing was made";

/// The user's next step after a signal.
const AGAIN: &str = "start the copy again";

/// How pages are allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum AllocForm {
    /// One call an operation; its callback gets each page
    Bulk,
    /// One call a page
    Single,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum IoForm {
    /// By io_uring if the system has it, else by preadv and pwritev
    Auto,
    /// By io_uring, four operations at once
    Uring,
    /// By preadv and pwritev, one operation after the other
    Preadv,
}

/// 64 MiB an operation. Larger ones gain nothing, and the operations in flight still fit the memory of a small machine.
const BATCH_MAX: usize = 16384;

fn batch(text: &str) -> Result<usize, String> {
    let number: u128 = text.parse().map_err(|_| format!("{text:?} is no number of pages; give 1 to {BATCH_MAX}"))?;
    match number {
        0 => Err(format!("0 pages an operation copy nothing; give 1 to {BATCH_MAX}")),
        1..=16384 => Ok(number as usize),
        _ => Err(format!("more than {BATCH_MAX} pages (64 MiB) an operation gain nothing; give fewer")),
    }
}

/// Calls that moved data.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub(crate) struct IoTally {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
}

/// A copy under way.
pub(crate) struct Job<'c> {
    pub(crate) source: &'c Source,
    pub(crate) target: &'c Target,
    pub(crate) io: IoTally,
    extents: Extents<'c>,
    allocator: Allocator,
    alloc: AllocForm,
    batch: usize,
    tally: Tally,
    data_bytes: u64,
    /// Where reading reached the file's end, if that was before its size.
    eof: Option<u64>,
    stop: &'c Stop,
    progress: ProgressBar,
}

impl Job<'_> {
    /// The next part, and pages for it in `buffer`. None after the last part.
    fn next_part(&mut self, buffer: &mut Buffer) -> Result<Option<Part>, Failure> {
        self.stop.check(AGAIN)?;
        let found = self.extents.peek(self.batch * PAGE_SIZE);
        let Some(mut part) = found.map_err(|error| self.source.unreadable(&error.into()))? else { return Ok(None) };
        let want = part.bytes.div_ceil(PAGE_SIZE);
        let room = buffer.take(&self.allocator, self.alloc, want, &mut self.tally).map_err(|error| {
            let next = match self.allocator.stats().faults {
                0 => "give the program more memory, or a smaller --batch",
                _ => "leave --fail out, and PAGEMILL_FAIL unset",
            };
            Failure::new("no page to copy through", error).next(next)
        })?;
        part.bytes = part.bytes.min(room);
        self.extents.advance(part.bytes);
        Ok(Some(part))
    }

    /// `bytes` of the part were read and written: fewer than it has if the file ended there.
    fn part_done(&mut self, part: Part, bytes: usize, buffer: &mut Buffer) {
        buffer.give_back(self.alloc, &mut self.tally);
        self.data_bytes += bytes as u64;
        if bytes < part.bytes {
            let end = part.offset + bytes as u64;
            self.eof = Some(self.eof.map_or(end, |eof| eof.min(end)));
            self.extents.stop();
        }
        self.progress.set_position(self.extents.position());
    }
}

pub(crate) fn run(args: &CopyArgs) -> Result<(), Failure> {
    let stop = Stop::watch().map_err(|error| Failure::new("can't watch for signals", said(&error)))?;
    let source = Source::open(&args.src)?;
    let target = Target::create(&args.dst, &source, args.force)?;
    let result = copy(args, &source, &target, &stop)
        .and_then(|report| target.finish(&source, report.bytes, args.sync).map(|()| report));
    // A signal that comes later has no effect: the copy is complete.
    let report = match result.and_then(|report| stop.check(AGAIN).map(|()| report)) {
        Ok(report) => report,
        Err(failure) => return Err(failure.left(target.discard())),
    };
    target.name(args.sync)?;
    report.warn(&args.src);
    print(&if args.json { report.json() } else { report.text() })
}

/// Moves the data. Afterwards the copy has neither its size nor its name yet.
fn copy(args: &CopyArgs, source: &Source, target: &Target, stop: &Stop) -> Result<Report, Failure> {
    // Made before the clock starts: a program that copies many files makes it once.
    let allocator = default_allocator(Some(2 * uring::LANES * args.batch), args.fail.as_deref())?;
    let server = watched::serve(None)?;
    if let Some(server) = &server {
        server.show("copy", &allocator);
    }
    let (ring, io_fallback) = choose_io(args.io, source)?;
    let io = if ring.is_some() { "io_uring" } else { "preadv" };
    let start = Instant::now();
    let mut job = Job {
        source,
        target,
        io: IoTally::default(),
        extents: Extents::new(&source.file, source.size),
        allocator,
        alloc: args.alloc,
        batch: args.batch,
        tally: Tally::default(),
        data_bytes: 0,
        eof: None,
        stop,
        progress: progress(source.size),
    };
    let moved = match ring {
        Some(ring) => uring::copy(&mut job, ring),
        None => preadv::copy(&mut job),
    };
    job.progress.finish_and_clear();
    moved?;
    let bytes = job.eof.or(source.size).unwrap_or_else(|| job.extents.position());
    let fate = source.fate(bytes)?;
    Ok(Report {
        bytes,
        data_bytes: job.data_bytes,
        hole_bytes: job.extents.hole_bytes,
        holes: job.extents.holes,
        seconds: start.elapsed().as_secs_f64(),
        io,
        io_fallback,
        alloc: args.alloc,
        batch: args.batch,
        backend: job.allocator.backend().name(),
        tally: job.tally,
        calls: job.io,
        faults: job.allocator.stats().faults,
        fate,
    })
}

/// A ring, or the reason why `--io auto` does without one.
fn choose_io(io: IoForm, source: &Source) -> Result<(Option<io_uring::IoUring>, Option<String>), Failure> {
    if io == IoForm::Preadv {
        return Ok((None, None));
    }
    let ring = match source.size {
        Some(_) => uring::ring().map_err(|error| said(&error)),
        // Without its length, each part is known only after the one before it.
        None => Err("the source doesn't say how long it is".to_owned()),
    };
    match ring {
        Ok(ring) => Ok((Some(ring), None)),
        Err(why) if io == IoForm::Auto => Ok((None, Some(why))),
        Err(why) => Err(Failure::new("no io_uring", why).next("copy with --io preadv, or leave --io out")),
    }
}

#[cfg(test)]
mod tests {
    use super::batch;

    #[test]
    fn a_batch_outside_its_range_is_refused_in_words() {
        assert_eq!(batch("1"), Ok(1));
        assert_eq!(batch("16384"), Ok(16384));
        for (text, word) in [
            ("0", "nothing"),
            ("16385", "fewer"),
            ("18446744073709551615", "fewer"),
            ("999999999999999999999999", "fewer"),
            ("-1", "no number"),
            ("many", "no number"),
            ("", "no number"),
        ] {
            let refused = batch(text).unwrap_err();
            assert!(refused.contains(word), "{text}: {refused}");
        }
    }
}
