//! Ways to read a file that is in nobody's cache.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::rc::Rc;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};
use pagemill::{Allocator, Backing, CachedFile, FileBacking, PageCache, PageCount};

use super::{Buffer, DataFile, Mapped, sum_of, word_of};
use crate::rows::{Kind, Unavailable};
use crate::subject::{Flaw, PAGE_BYTES};

/// Pages that an allocator has beyond those of its cache.
const SPARE: usize = 4096;

/// Requests, in their order.
#[derive(Clone)]
pub(crate) struct Pattern {
    /// The reader that asks, and the first page that it asks for.
    pub(crate) requests: Vec<(u16, u32)>,
    /// Pages of each request.
    pub(crate) each: usize,
    /// Readers.
    pub(crate) streams: u16,
}

impl Pattern {
    /// One reader from page 0 on.
    pub(crate) fn sequential(pages: usize, each: usize) -> Pattern {
        Pattern { requests: (0..pages as u32).step_by(each).map(|page| (0, page)).collect(), each, streams: 1 }
    }

    /// Pages of all requests.
    pub(crate) fn asked(&self) -> usize {
        self.requests.len() * self.each
    }

    fn sum(&self) -> u64 {
        let pages = self.requests.iter().flat_map(|&(_, page)| (u64::from(page)..).take(self.each));
        pages.fold(0, |sum, page| sum.wrapping_add(word_of(page)))
    }
}

/// What a pass over a pattern did.
#[derive(Clone, Copy)]
pub(crate) struct Pass {
    pub(crate) elapsed: Duration,
    /// Pages that were read from the file, where that is known.
    pub(crate) fetched: Option<u64>,
    /// Pages that the reader found in the cache, where that is known.
    pub(crate) hits: Option<u64>,
    /// Of the first words of the pages.
    pub(super) sum: u64,
}

impl Pass {
    /// The same if the reader got the pages that it asked for.
    pub(crate) fn checked(self, pattern: &Pattern) -> Result<Pass, Flaw> {
        let is_right = self.sum == pattern.sum();
        is_right.then_some(self).ok_or_else(|| Flaw::Failed("the reader got other bytes than the file has".into()))
    }
}

/// A way to read the file.
pub(crate) trait Way {
    /// Empties all caches that it reads through, untimed.
    fn chill(&mut self, pattern: &Pattern) -> Result<(), Flaw>;

    fn pass(&mut self, pattern: &Pattern) -> Result<Pass, Flaw>;
}

/// Opens a way to read the file.
type Open = dyn Fn(&Rc<DataFile>) -> Result<Box<dyn Way>, Unavailable>;

/// A row: its name, its kind, the pages of a request for a sequence, and how it is opened.
pub(crate) struct WayRow {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) each: usize,
    /// Of a pass, only the first of so many parts is read: the others would take too long.
    pub(crate) part: usize,
    pub(crate) open: Box<Open>,
}

/// Pages of the requests of most rows: 128 KiB.
pub(crate) const EACH: usize = 32;

/// Reads by calls, timed.
pub(super) fn by_calls(
    pattern: &Pattern,
    read: impl FnMut(usize, &mut [u8], u64) -> io::Result<usize>,
) -> Result<(Duration, u64), Flaw> {
    by_calls_into(&mut Buffer::new(pattern.each), pattern, read)
}

fn by_calls_into(
    buffer: &mut Buffer,
    pattern: &Pattern,
    mut read: impl FnMut(usize, &mut [u8], u64) -> io::Result<usize>,
) -> Result<(Duration, u64), Flaw> {
    let mut sum: u64 = 0;
    let start = Instant::now();
    for &(stream, page) in &pattern.requests {
        let mut done = 0;
        while done < buffer.len() {
            let read =
                read(usize::from(stream), &mut buffer[done..], u64::from(page) * PAGE_BYTES as u64 + done as u64)?;
            if read == 0 {
                return Err(Flaw::Failed(format!("the file ends at page {page}")));
            }
            done += read;
        }
        sum = sum.wrapping_add(sum_of(buffer));
    }
    Ok((start.elapsed(), sum))
}

/// How a cache is set up.
#[derive(Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) is_direct: bool,
    pub(crate) has_ring: bool,
    /// Its arena has 2 MiB pages.
    pub(crate) is_huge: bool,
    /// Each pass has a cache of its own, whose memory is not committed yet.
    pub(crate) is_fresh: bool,
    /// Its limit is the file's pages divided by this.
    pub(crate) share: usize,
    pub(crate) window: Option<usize>,
    /// Each stream has an opener of its own.
    pub(crate) has_own_handles: bool,
}

/// The usual one: past the system's cache, with memory as an allocator has it by default, that was used before, as large as
/// the file.
pub(crate) const USUAL: Setup = Setup {
    is_direct: true,
    has_ring: false,
    is_huge: true,
    is_fresh: false,
    share: 1,
    window: None,
    has_own_handles: false,
};

pub(crate) struct Ours {
    data: Rc<DataFile>,
    setup: Setup,
    pages: usize,
    cache: Option<(PageCache, Vec<CachedFile>)>,
}

impl Ours {
    /// A cache over the file. It is made, and its memory committed, by the first `chill`.
    pub(crate) fn new(data: &Rc<DataFile>, setup: Setup, pages: usize) -> Result<Ours, Unavailable> {
        let mut ours = Ours { data: Rc::clone(data), setup, pages, cache: None };
        ours.backing().map_err(|why| Unavailable(why.to_string()))?;
        ours.cache = None;
        Ok(ours)
    }

    fn backing(&self) -> io::Result<FileBacking> {
        if self.setup.is_direct && self.data.is_in_memory {
            let why = format!("{} is in memory: reads of it go past no cache", self.data.place.display());
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        let options = FileBacking::options().read_only(true).direct(self.setup.is_direct);
        let backing = options.open(self.data.path())?;
        if !self.setup.has_ring {
            return Ok(backing);
        }
        let backing = backing.with_ring();
        if backing.is_ring() { Ok(backing) } else { Err(io::Error::other("the system refuses io_uring")) }
    }

    fn made(&self) -> Result<(PageCache, Vec<CachedFile>), Flaw> {
        let backing = self.backing()?;
        cache_over(backing, self.pages / self.setup.share, self.setup.window, self.setup.is_huge)
    }
}

/// A cache of so many pages with one file, opened once.
pub(crate) fn cache_over(
    backing: impl Backing,
    pages: usize,
    window: Option<usize>,
    is_huge: bool,
) -> Result<(PageCache, Vec<CachedFile>), Flaw> {
    let allocator = Allocator::builder().pages(pages + pages / 16 + SPARE).huge_pages(is_huge).build();
    let allocator = allocator.map_err(|why| Flaw::Failed(why.to_string()))?;
    let builder = PageCache::builder(&allocator).limit(PageCount::new(pages));
    let builder = match window {
        Some(window) => builder.window(PageCount::new(window)),
        None => builder,
    };
    let cache = builder.build();
    let file = cache.open(backing)?;
    Ok((cache, vec![file]))
}

/// Reads a pattern through a cache.
pub(crate) fn by_cache(cache: &PageCache, files: &[CachedFile], pattern: &Pattern) -> Result<Pass, Flaw> {
    let before = cache.stats();
    let (elapsed, sum) = by_calls(pattern, |stream, into, at| files[stream % files.len()].read_at(into, at))?;
    let after = cache.stats();
    Ok(Pass { elapsed, fetched: Some(after.read - before.read), hits: Some(after.hits - before.hits), sum })
}

/// Lets a file's pages go. Reads ahead that are under way are waited for.
pub(crate) fn empty(cache: &PageCache, file: &CachedFile) -> Result<(), Flaw> {
    for _ in 0..1000 {
        file.invalidate(0..u64::MAX);
        if cache.stats().pages == 0 {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err(Flaw::Failed(format!("{} pages do not leave the cache", cache.stats().pages)))
}

impl Way for Ours {
    fn chill(&mut self, pattern: &Pattern) -> Result<(), Flaw> {
        if self.setup.is_fresh {
            self.cache = None;
        }
        let is_new = self.cache.is_none();
        let (cache, mut files) = match self.cache.take() {
            Some(made) => made,
            None => self.made()?,
        };
        if is_new && !self.setup.is_fresh {
            // Commits the memory.
            by_cache(&cache, &files, &Pattern::sequential(self.pages, EACH))?
                .checked(&Pattern::sequential(self.pages, EACH))?;
        }
        // Openers without a window.
        files = vec![files[0].reopen()];
        empty(&cache, &files[0])?;
        let streams = if self.setup.has_own_handles { pattern.streams } else { 1 };
        files.extend((1..streams).map(|_| files[0].reopen()).collect::<Vec<_>>());
        self.cache = Some((cache, files));
        self.data.chill()
    }

    fn pass(&mut self, pattern: &Pattern) -> Result<Pass, Flaw> {
        let Some((cache, files)) = &self.cache else { return Err(Flaw::Failed("no cache was made".into())) };
        by_cache(cache, files, pattern)
    }
}

/// `pread(2)`, with a descriptor for all streams or one for each.
pub(crate) struct Calls {
    data: Rc<DataFile>,
    flags: i32,
    has_own_handles: bool,
    /// It reads into a 2 MiB page.
    is_huge: bool,
    files: Vec<File>,
}

impl Calls {
    pub(crate) fn new(
        data: &Rc<DataFile>,
        is_direct: bool,
        has_own_handles: bool,
        is_huge: bool,
    ) -> Result<Calls, Unavailable> {
        if is_direct && data.is_in_memory {
            return Err(Unavailable(format!("{} is in memory", data.place.display())));
        }
        let flags = if is_direct { libc::O_DIRECT } else { 0 };
        data.open(flags).map_err(|why| Unavailable(why.to_string()))?;
        Ok(Calls { data: Rc::clone(data), flags, has_own_handles, is_huge, files: Vec::new() })
    }
}

impl Way for Calls {
    fn chill(&mut self, pattern: &Pattern) -> Result<(), Flaw> {
        let streams = if self.has_own_handles { pattern.streams } else { 1 };
        self.files = (0..streams).map(|_| self.data.open(self.flags)).collect::<io::Result<_>>()?;
        self.data.chill()
    }

    fn pass(&mut self, pattern: &Pattern) -> Result<Pass, Flaw> {
        let files = &self.files;
        let mut buffer = if self.is_huge { Buffer::huge(pattern.each)? } else { Buffer::new(pattern.each) };
        let read = |stream: usize, into: &mut [u8], at| files[stream % files.len()].read_at(into, at);
        let (elapsed, sum) = by_calls_into(&mut buffer, pattern, read)?;
        let fetched = if self.flags == 0 { self.data.resident()? } else { pattern.asked() };
        Ok(Pass { elapsed, fetched: Some(fetched as u64), hits: None, sum })
    }
}

/// `O_DIRECT` by an io_uring, so many requests at a time. The reader gets them in their order.
pub(crate) struct Ring {
    data: Rc<DataFile>,
    ring: IoUring,
    file: File,
    depth: usize,
    /// It reads into 2 MiB pages.
    is_huge: bool,
}

impl Ring {
    pub(crate) fn new(data: &Rc<DataFile>, depth: usize, is_huge: bool) -> Result<Ring, Unavailable> {
        if data.is_in_memory {
            return Err(Unavailable(format!("{} is in memory", data.place.display())));
        }
        let why = |why: io::Error| Unavailable(why.to_string());
        let (ring, file) = (IoUring::new(depth as u32).map_err(why)?, data.open(libc::O_DIRECT).map_err(why)?);
        Ok(Ring { data: Rc::clone(data), ring, file, depth, is_huge })
    }

    fn begin(&mut self, slot: usize, buffer: &mut Buffer, page: u32) -> io::Result<()> {
        let (into, len) = (buffer.as_mut_ptr(), buffer.len() as u32);
        let entry = opcode::Read::new(types::Fd(self.file.as_raw_fd()), into, len);
        let entry = entry.offset(u64::from(page) * PAGE_BYTES as u64).build().user_data(slot as u64);
        // SAFETY: the caller waits for the completion before it uses or drops the buffer.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| io::Error::other("the ring is full"))?;
        self.ring.submit().map(drop)
    }

    fn read(&mut self, pattern: &Pattern, buffers: &mut [Buffer]) -> io::Result<(Duration, u64)> {
        let mut sum: u64 = 0;
        let mut is_done = vec![false; self.depth];
        let mut under_way = VecDeque::new();
        let start = Instant::now();
        let mut requests = pattern.requests.iter().map(|&(_, page)| page);
        for (slot, buffer) in buffers.iter_mut().enumerate() {
            let Some(page) = requests.next() else { break };
            self.begin(slot, buffer, page)?;
            under_way.push_back(slot);
        }
        while let Some(slot) = under_way.pop_front() {
            while !is_done[slot] {
                self.ring.submit_and_wait(1)?;
                for ended in self.ring.completion() {
                    if ended.result() != (pattern.each * PAGE_BYTES) as i32 {
                        return Err(io::Error::other(format!("a read ended with {}", ended.result())));
                    }
                    is_done[ended.user_data() as usize] = true;
                }
            }
            is_done[slot] = false;
            sum = sum.wrapping_add(sum_of(&buffers[slot]));
            if let Some(page) = requests.next() {
                self.begin(slot, &mut buffers[slot], page)?;
                under_way.push_back(slot);
            }
        }
        Ok((start.elapsed(), sum))
    }
}

impl Way for Ring {
    fn chill(&mut self, _: &Pattern) -> Result<(), Flaw> {
        self.data.chill()
    }

    fn pass(&mut self, pattern: &Pattern) -> Result<Pass, Flaw> {
        let buffer = |_| if self.is_huge { Buffer::huge(pattern.each) } else { Ok(Buffer::new(pattern.each)) };
        let mut buffers = (0..self.depth).map(buffer).collect::<io::Result<Vec<Buffer>>>()?;
        match self.read(pattern, &mut buffers) {
            Ok((elapsed, sum)) => Ok(Pass { elapsed, fetched: Some(pattern.asked() as u64), hits: None, sum }),
            Err(why) => {
                // The kernel may still write to them.
                std::mem::forget(buffers);
                Err(why.into())
            }
        }
    }
}

/// A mapping, of which a word in each page is read.
pub(crate) struct Touched {
    data: Rc<DataFile>,
    advice: Option<rustix::mm::Advice>,
    mapped: Option<Mapped>,
}

impl Touched {
    pub(crate) fn new(data: &Rc<DataFile>, advice: Option<rustix::mm::Advice>) -> Touched {
        Touched { data: Rc::clone(data), advice, mapped: None }
    }
}

impl Way for Touched {
    fn chill(&mut self, _: &Pattern) -> Result<(), Flaw> {
        self.data.chill()?;
        let mapped = Mapped::new(&self.data)?;
        if let Some(advice) = self.advice {
            mapped.advise(advice)?;
        }
        self.mapped = Some(mapped);
        Ok(())
    }

    fn pass(&mut self, pattern: &Pattern) -> Result<Pass, Flaw> {
        // Taken, since mapped pages would stay in the system's cache.
        let Some(mapped) = self.mapped.take() else { return Err(Flaw::Failed("no mapping was made".into())) };
        let start = Instant::now();
        let at = |page: u32| page as usize * PAGE_BYTES;
        let sums = pattern.requests.iter().map(|&(_, page)| sum_of(&mapped[at(page)..][..pattern.each * PAGE_BYTES]));
        let sum = sums.fold(0, u64::wrapping_add);
        let elapsed = start.elapsed();
        Ok(Pass { elapsed, fetched: Some(self.data.resident()? as u64), hits: None, sum })
    }
}

/// The rows of a cold sequence of so many pages.
pub(crate) fn rows(pages: usize) -> Vec<WayRow> {
    let ours = |name, setup: Setup| WayRow {
        name,
        kind: Kind::Ours,
        each: EACH,
        part: 1,
        open: Box::new(move |data| Ok(Box::new(Ours::new(data, setup, pages)?) as Box<dyn Way>)),
    };
    let calls = |name: &'static str, is_direct, each, part| WayRow {
        name,
        kind: Kind::Peer,
        each,
        part,
        open: Box::new(move |data| {
            Ok(Box::new(Calls::new(data, is_direct, false, name.ends_with("-huge"))?) as Box<dyn Way>)
        }),
    };
    let ring = |name: &'static str, depth, each| WayRow {
        name,
        kind: Kind::Peer,
        each,
        part: 1,
        open: Box::new(move |data| Ok(Box::new(Ring::new(data, depth, name.ends_with("-huge"))?) as Box<dyn Way>)),
    };
    let mapped = |name, advice| WayRow {
        name,
        kind: Kind::Peer,
        each: EACH,
        part: 1,
        open: Box::new(move |data| Ok(Box::new(Touched::new(data, advice)) as Box<dyn Way>)),
    };
    vec![
        ours("cache", USUAL),
        ours("cache-ring", Setup { has_ring: true, ..USUAL }),
        ours("cache-evicts", Setup { share: 8, ..USUAL }),
        ours("cache-4k", Setup { is_huge: false, ..USUAL }),
        ours("cache-fresh", Setup { is_fresh: true, ..USUAL }),
        ours("cache-fresh-4k", Setup { is_fresh: true, is_huge: false, ..USUAL }),
        ours("cache-buffered", Setup { is_direct: false, ..USUAL }),
        calls("direct-1m", true, 256, 1),
        ring("direct-1m-2", 2, 256),
        calls("direct-1m-huge", true, 256, 1),
        ring("direct-1m-2-huge", 2, 256),
        ring("direct-128k-8", 8, EACH),
        calls("direct-128k", true, EACH, 2),
        calls("direct-4k", true, 1, 64),
        calls("read-128k", false, EACH, 1),
        mapped("mmap", None),
        mapped("mmap-sequential", Some(rustix::mm::Advice::Sequential)),
    ]
}

/// The rows of other patterns: one opener for all streams, and one for each.
pub(crate) fn pattern_rows(pages: usize) -> Vec<WayRow> {
    let ours = |name, has_own_handles| WayRow {
        name,
        kind: Kind::Ours,
        each: 1,
        part: 1,
        open: Box::new(move |data| {
            Ok(Box::new(Ours::new(data, Setup { has_own_handles, ..USUAL }, pages)?) as Box<dyn Way>)
        }),
    };
    let calls = |name, has_own_handles| WayRow {
        name,
        kind: Kind::Peer,
        each: 1,
        part: 1,
        open: Box::new(move |data| Ok(Box::new(Calls::new(data, false, has_own_handles, false)?) as Box<dyn Way>)),
    };
    vec![ours("cache", false), ours("cache-own", true), calls("read", false), calls("read-own", true)]
}
