//! `pagemill read`: streams files through a page cache to standard output.
//!
//! [`source`] opens each file, and refuses what cannot be cached. The stream is a loop of two calls: a read of the cache, which
//! reads ahead, and a write to standard output. [`report`] shows what the cache counted.
//!
//! Signals are left as they are: nothing is to be cleaned up, and a write to a full pipe would outlast a signal that only sets
//! a flag.
mod report;
mod source;

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Instant;

use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use indicatif::{BinaryBytes, ProgressBar};
use pagemill::{Advice, PAGE_SIZE, PageCache, PageCount};
use pagemill_command::size;

use crate::allocator::default_allocator;
use crate::failure::{Failure, said};
use crate::progress::progress;
use crate::watched;
use report::Report;
use source::{Identity, Kept, Source};

/// Stream files through a page cache to standard output, as cat does
///
/// The cache reads ahead: the window grows while a file is read in sequence. Files
/// and block devices come in the order of their names. One that cannot be read is
/// reported, and the next one follows. A file that is named again is read from the
/// cache, as far as its pages are still there.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment, after_help = AFTER_HELP)]
pub(crate) struct ReadArgs {
    /// Files and block devices; not directories, pipes or terminals
    #[arg(required = true, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(named))]
    files: Vec<PathBuf>,

    /// The largest window of readahead; 0: none [default: 4M]
    ///
    /// With less than 32M of --memory an eighth of that.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    window: Option<u64>,

    /// Bytes of a read of the cache, and of a write to standard output
    #[arg(long, value_name = "SIZE", default_value = "128K", value_parser = batch)]
    batch: usize,

    /// Memory for cached pages
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = memory)]
    memory: u64,

    /// How files are read
    #[arg(long, value_enum, default_value_t = Engine::Plain)]
    engine: Engine,

    /// Read past the system's own cache (O_DIRECT)
    #[arg(long)]
    direct: bool,

    #[command(flatten)]
    hint: Hint,

    /// Say each decision of readahead on standard error
    #[arg(long)]
    trace: bool,

    /// Say on standard error what the cache counted
    #[arg(long)]
    stats: bool,

    /// The same as a JSON object on a line
    #[arg(long)]
    json: bool,
}

/// What the cache is told about the way in which files are read.
#[derive(Args, Debug)]
#[group(multiple = false)]
struct Hint {
    /// Tell the cache that reads are in sequence: windows twice as large
    #[arg(long)]
    sequential: bool,

    /// Tell it that they are at random: nothing is read ahead
    #[arg(long)]
    random: bool,

    /// Tell it that each page is read once: pages go behind the reader
    #[arg(long)]
    no_reuse: bool,
}

impl Hint {
    fn advice(&self) -> Advice {
        match self {
            Self { sequential: true, .. } => Advice::Sequential,
            Self { random: true, .. } => Advice::Random,
            Self { no_reuse: true, .. } => Advice::NoReuse,
            _ => Advice::Normal,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Engine {
    /// By preadv, on threads of the cache
    Plain,
    /// By io_uring
    Uring,
}

const AFTER_HELP: &str = "\
SIZE is a number of bytes, with K, M, G or T behind it if you like.

Examples:
  pagemill read disk.img | sha256sum
  pagemill read --stats --direct disk.img >/dev/null
  pagemill read --window 0 --json disk.img 2>&1 >/dev/null | jq .reads
  pagemill read --trace --window 64K disk.img >/dev/null
  pagemill read --batch 1M --memory 256M a.img b.img >both.img

Exit codes:
  0  done, also if the reader of standard output has closed it
  1  a file could not be read, or standard output not written
  2  the command line makes no sense";

/// The largest window unless the command line says otherwise, or memory is small.
const WINDOW: u64 = 4 << 20;
/// Less memory would hold no window beside the one that is read.
const MEMORY_MIN: u64 = 16 * PAGE_SIZE as u64;
/// As much as all descriptors of a cache can describe, and some left.
const MEMORY_MAX: u64 = 1 << 40;
/// Larger calls gain nothing.
const BATCH_MAX: u64 = 64 << 20;

fn named(path: PathBuf) -> Result<PathBuf, String> {
    match path.as_os_str().as_encoded_bytes() {
        b"-" => Err("standard input has no pages to read ahead: use `cat`, or ./- for a file of that name".to_owned()),
        _ => Ok(path),
    }
}

fn batch(text: &str) -> Result<usize, String> {
    match size(text)? {
        0 => Err("0 bytes a call read nothing".to_owned()),
        bytes @ 1..=BATCH_MAX => Ok(bytes as usize),
        _ => Err("more than 64M a call gain nothing; give fewer".to_owned()),
    }
}

fn memory(text: &str) -> Result<u64, String> {
    match size(text)? {
        bytes if bytes < MEMORY_MIN => Err("a cache has at least 64K".to_owned()),
        bytes if bytes > MEMORY_MAX => Err("a cache has at most 1T".to_owned()),
        bytes => Ok(bytes),
    }
}
const _: () = assert!(MEMORY_MIN == 64 << 10 && MEMORY_MAX == 1 << 40 && BATCH_MAX == 64 << 20);

fn pages(bytes: u64) -> PageCount {
    PageCount::new(bytes.div_ceil(PAGE_SIZE as u64) as usize)
}

pub(crate) fn run(args: &ReadArgs) -> Result<(), Failure> {
    let window_max = args.memory / 8;
    let window = args.window.unwrap_or(WINDOW.min(window_max));
    if window > window_max {
        let why = format!("an eighth of --memory, {}, is the most", BinaryBytes(window_max));
        return Err(Failure::new(format!("a window of {}", BinaryBytes(window)), why)
            .next("give a smaller --window, or more --memory"));
    }
    let limit = pages(args.memory);
    // Beside the cache's pages, those that the watermarks keep back.
    let allocator = default_allocator(Some(limit.get() + limit.get() / 8 + 1024), None)?;
    let builder = PageCache::builder(&allocator).limit(limit).window(pages(window)).named("read");
    let builder = match args.trace {
        // If standard error is closed, nobody looks.
        true => builder.trace(|decision| _ = writeln!(io::stderr(), "{decision}")),
        false => builder,
    };
    let cache = builder.build();
    let server = watched::serve(None)?;
    if let Some(server) = &server {
        server.show("read", &allocator);
    }
    let out = io::stdout().as_fd().try_clone_to_owned().map_err(|error| unwritable(&error))?;
    let mut stream = Stream {
        args,
        cache,
        out: File::from(out),
        out_is: Identity::of_output(),
        buffer: vec![0; args.batch],
        kept: Kept::default(),
        last: None,
        progress: bar(args),
        bytes: 0,
        failed: None,
        failures: 0,
    };
    let start = Instant::now();
    let result = stream.files();
    stream.progress.finish_and_clear();
    let report = Report {
        files: args.files.len() as u64,
        files_failed: stream.failures,
        bytes: stream.bytes,
        seconds: start.elapsed().as_secs_f64(),
        engine: args.engine,
        direct: args.direct,
        window,
        stats: stream.cache.stats(),
    };
    if args.json || args.stats {
        let text = if args.json { report.json() } else { report.text() };
        let _ = io::stderr().write_all(text.as_bytes());
    }
    result.and(stream.failed.map_or(Ok(()), Err))
}

/// Progress, if the bytes go elsewhere than to the terminal.
fn bar(args: &ReadArgs) -> ProgressBar {
    if args.trace || io::stdout().is_terminal() {
        return ProgressBar::hidden();
    }
    progress(Some(args.files.iter().map(|file| source::size_of(file)).sum()))
}

fn unwritable(error: &io::Error) -> Failure {
    Failure::new("standard output", said(error)).next("send it to a file or a terminal that takes it")
}

/// The files on their way to standard output.
struct Stream<'a> {
    args: &'a ReadArgs,
    cache: PageCache,
    out: File,
    out_is: Option<Identity>,
    buffer: Vec<u8>,
    kept: Kept,
    last: Option<Source>,
    progress: ProgressBar,
    bytes: u64,
    /// The last file that could not be read, which was said.
    failed: Option<Failure>,
    failures: u64,
}

impl Stream<'_> {
    /// # Errors
    /// Standard output cannot be written.
    fn files(&mut self) -> Result<(), Failure> {
        let files = &self.args.files;
        for (i, path) in files.iter().enumerate() {
            let opened = match self.kept.take(path, self.args.hint.advice()) {
                Some(source) => Ok(source),
                None => Source::open(path, &self.cache, self.args, self.out_is),
            };
            let source = match opened {
                Ok(source) => source,
                Err(failure) => {
                    self.complain(failure);
                    continue;
                }
            };
            if self.args.trace {
                let _ = writeln!(io::stderr(), "{}: {:?}", path.display(), source.file);
            }
            let is_open = self.file(&source)?;
            match files[i + 1..].contains(path) {
                true => self.kept.put(source),
                // Open until the report: with the file its pages leave the cache.
                false => self.last = Some(source),
            }
            if !is_open {
                break;
            }
        }
        Ok(())
    }

    /// Streams a file. False: the reader of standard output has closed it.
    fn file(&mut self, source: &Source) -> Result<bool, Failure> {
        let mut at = 0;
        loop {
            match source.file.read_at(&mut self.buffer, at) {
                Ok(0) => match source.grown(at) {
                    Ok(true) => {}
                    Ok(false) => return Ok(true),
                    Err(failure) => {
                        self.complain(failure);
                        return Ok(true);
                    }
                },
                Ok(read) => {
                    match self.out.write_all(&self.buffer[..read]) {
                        Ok(()) => {}
                        Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(false),
                        Err(error) => return Err(unwritable(&error)),
                    }
                    at += read as u64;
                    self.bytes += read as u64;
                    self.progress.set_position(self.bytes);
                }
                Err(error) => match source.trouble(at, &error) {
                    // It was cut, and has something before its new end.
                    None => {}
                    Some(failure) => {
                        self.complain(failure);
                        return Ok(true);
                    }
                },
            }
        }
    }

    /// Says what is wrong with a file; the next one follows.
    fn complain(&mut self, failure: Failure) {
        self.failures += 1;
        self.failed = Some(self.progress.suspend(|| failure.say("read")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_bounds() {
        assert_eq!((batch("1"), batch("64M")), (Ok(1), Ok(64 << 20)));
        assert!(batch("0").is_err() && batch("65M").is_err());
        assert_eq!((memory("64K"), memory("1T")), (Ok(64 << 10), Ok(1 << 40)));
        assert!(memory("60K").is_err() && memory("2T").is_err());
    }

    #[test]
    fn standard_input_is_no_file() {
        assert!(named("-".into()).unwrap_err().contains("cat"));
        assert_eq!(named("./-".into()), Ok("./-".into()));
    }
}
