//! Reads of pages that are cached: copies of 4 KiB, or looks at 8 bytes.

use std::fs::File;
use std::hint::black_box;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagemill::{Advice, CachedFile, PageCache};

use super::cold::{EACH, Pattern, Setup, USUAL, by_cache, cache_over};
use super::{DataFile, Mapped, word_of};
use crate::rows::{Kind, Row, Unavailable};
use crate::subject::{Flaw, PAGE_BYTES};

/// A row of so many cached pages.
pub(crate) type WarmRow = Row<Need, Box<dyn Warm>>;

/// What a row is opened for.
#[derive(Clone)]
pub(crate) struct Need {
    pub(crate) data: Rc<DataFile>,
    /// The first pages of the file, which are read.
    pub(crate) pages: usize,
}

impl Need {
    /// Bytes of its pages.
    pub(crate) fn bytes(&self) -> u64 {
        (self.pages * PAGE_BYTES) as u64
    }
}

/// Cached pages, and the readers of them.
pub(crate) trait Warm {
    /// A reader for one thread.
    fn reader(&self) -> Result<Box<dyn Loop>, Flaw>;
}

/// The timed loop of one thread.
pub(crate) trait Loop: Send {
    /// Reads these pages one after the other, and checks what it read. `is_whole`: copies each, and otherwise looks at its
    /// first 8 bytes.
    fn round(&mut self, pages: &[u32], is_whole: bool) -> Result<Duration, Flaw>;
}

/// Copies the beginning of a page into `into`, all that there is room for. False if it is not cached.
trait Read: Send {
    fn read(&self, page: u32, into: &mut [u8]) -> bool;
}

#[repr(align(4096))]
struct Page([u8; PAGE_BYTES]);

impl<R: Read> Loop for R {
    #[inline(never)]
    fn round(&mut self, pages: &[u32], is_whole: bool) -> Result<Duration, Flaw> {
        let mut page = Page([0; PAGE_BYTES]);
        let len = if is_whole { PAGE_BYTES } else { 8 };
        let into = &mut page.0[..len];
        let (mut is_complete, mut sum) = (true, 0_u64);
        let start = Instant::now();
        for &page in pages {
            is_complete &= self.read(page, into);
            let word = into.first_chunk().map_or(0, |word| u64::from_ne_bytes(*word));
            sum = sum.wrapping_add(word);
            black_box(&mut *into);
        }
        let elapsed = start.elapsed();
        if !is_complete {
            return Err(Flaw::Failed("a page was not cached".into()));
        }
        let expected = pages.iter().fold(0, |sum: u64, &page| sum.wrapping_add(word_of(u64::from(page))));
        if sum != expected {
            return Err(Flaw::Failed("the reader got other bytes than the file has".into()));
        }
        Ok(elapsed)
    }
}

fn at(page: u32) -> u64 {
    u64::from(page) * PAGE_BYTES as u64
}

struct Cached {
    _cache: PageCache,
    file: CachedFile,
    advice: Advice,
}

impl Cached {
    /// Has all pages read in.
    fn new(need: &Need, setup: Setup, advice: Advice) -> Result<Cached, Unavailable> {
        let why = |flaw: Flaw| Unavailable(flaw.to_string());
        let options =
            pagemill::FileBacking::options().read_only(true).direct(setup.is_direct && !need.data.is_in_memory);
        let backing = options.open(need.data.path()).map_err(|error| Unavailable(error.to_string()))?;
        let (cache, mut files) = cache_over(backing, need.data.pages, None, setup.is_huge).map_err(why)?;
        let all = Pattern::sequential(need.pages / EACH * EACH, EACH);
        by_cache(&cache, &files, &all).and_then(|pass| pass.checked(&all)).map_err(why)?;
        let rest = Pattern {
            requests: (need.pages / EACH * EACH..need.pages).map(|page| (0, page as u32)).collect(),
            each: 1,
            streams: 1,
        };
        by_cache(&cache, &files, &rest).map_err(why)?;
        let file = files.remove(0);
        Ok(Cached { _cache: cache, file, advice })
    }
}

impl Warm for Cached {
    fn reader(&self) -> Result<Box<dyn Loop>, Flaw> {
        let file = self.file.reopen();
        file.advise(self.advice, 0..0);
        Ok(Box::new(file))
    }
}

impl Read for CachedFile {
    #[inline]
    fn read(&self, page: u32, into: &mut [u8]) -> bool {
        self.read_at(into, at(page)).is_ok_and(|read| read == into.len())
    }
}

struct OfSystem(Rc<DataFile>);

impl Warm for OfSystem {
    fn reader(&self) -> Result<Box<dyn Loop>, Flaw> {
        Ok(Box::new(self.0.open(0)?))
    }
}

impl Read for File {
    #[inline]
    fn read(&self, page: u32, into: &mut [u8]) -> bool {
        self.read_at(into, at(page)).is_ok_and(|read| read == into.len())
    }
}

struct OfMapping(Arc<Mapped>);

impl Warm for OfMapping {
    fn reader(&self) -> Result<Box<dyn Loop>, Flaw> {
        Ok(Box::new(Arc::clone(&self.0)))
    }
}

impl Read for Arc<Mapped> {
    #[inline]
    fn read(&self, page: u32, into: &mut [u8]) -> bool {
        let Some(bytes) = self.get(at(page) as usize..).and_then(|rest| rest.get(..into.len())) else { return false };
        into.copy_from_slice(bytes);
        true
    }
}

/// A floor: pages in one piece of memory, found by their numbers.
struct Table(Arc<super::Buffer>);

impl Warm for Table {
    fn reader(&self) -> Result<Box<dyn Loop>, Flaw> {
        Ok(Box::new(Arc::clone(&self.0)))
    }
}

impl Read for Arc<super::Buffer> {
    #[inline]
    fn read(&self, page: u32, into: &mut [u8]) -> bool {
        let Some(bytes) = self.get(at(page) as usize..).and_then(|rest| rest.get(..into.len())) else { return false };
        into.copy_from_slice(bytes);
        true
    }
}

fn failed(why: io::Error) -> Unavailable {
    Unavailable(why.to_string())
}

/// The rows that take turns with each other, then those that are opened one after the other.
pub(crate) fn rows() -> Vec<WarmRow> {
    let ours =
        |name, setup: Setup, advice: Advice| {
            Row::plain(name, Kind::Ours, move |need: Need| {
                Ok(Box::new(Cached::new(&need, setup, advice)?) as Box<dyn Warm>)
            })
        };
    vec![
        ours("cache", USUAL, Advice::Normal),
        ours("cache-4k", Setup { is_huge: false, ..USUAL }, Advice::Normal),
        Row::plain("read", Kind::Peer, |need: Need| {
            need.data.heat().map_err(failed)?;
            Ok(Box::new(OfSystem(need.data)) as Box<dyn Warm>)
        }),
        Row::plain("mmap", Kind::Peer, |need: Need| {
            need.data.heat().map_err(failed)?;
            let mapped = Mapped::new(&need.data).map_err(failed)?;
            mapped.advise(rustix::mm::Advice::LinuxPopulateRead).map_err(failed)?;
            Ok(Box::new(OfMapping(Arc::new(mapped))) as Box<dyn Warm>)
        }),
    ]
}

/// Rows that hold pages as values.
pub(crate) fn value_rows() -> Vec<WarmRow> {
    let mut rows = vec![Row::plain("memcpy", Kind::Floor, |need: Need| {
        let mut buffer = super::Buffer::new(need.pages);
        for (page, bytes) in buffer.chunks_mut(PAGE_BYTES).enumerate() {
            bytes.copy_from_slice(&value_of(page as u64)[..]);
        }
        Ok(Box::new(Table(Arc::new(buffer))) as Box<dyn Warm>)
    })];
    #[cfg(feature = "caches")]
    rows.extend(values::rows());
    rows
}

/// A page's bytes, without reading it.
fn value_of(page: u64) -> Box<[u8; PAGE_BYTES]> {
    let mut bytes = Box::new([0x5A; PAGE_BYTES]);
    bytes[..8].copy_from_slice(&word_of(page).to_ne_bytes());
    bytes
}

/// Caches of values in Rust: a page is `Arc<[u8; 4096]>`, found by its number, and copied.
#[cfg(feature = "caches")]
mod values {
    use super::*;

    type Value = Arc<[u8; PAGE_BYTES]>;

    /// Room for so many, and some: shards are not equally full.
    fn room(pages: usize) -> usize {
        pages + pages / 4 + 1024
    }

    struct Of<C>(Arc<C>);

    trait Get: Send + Sync + 'static {
        fn put(&self, page: u64, value: Value);
        fn get_into(&self, page: u64, into: &mut [u8]) -> bool;
    }

    #[inline]
    fn copy(value: &[u8; PAGE_BYTES], into: &mut [u8]) -> bool {
        into.copy_from_slice(&value[..into.len()]);
        true
    }

    impl Get for quick_cache::sync::Cache<u64, Value> {
        fn put(&self, page: u64, value: Value) {
            self.insert(page, value);
        }
        #[inline]
        fn get_into(&self, page: u64, into: &mut [u8]) -> bool {
            self.get(&page).is_some_and(|value| copy(&value, into))
        }
    }

    impl Get for moka::sync::Cache<u64, Value> {
        fn put(&self, page: u64, value: Value) {
            self.insert(page, value);
        }
        #[inline]
        fn get_into(&self, page: u64, into: &mut [u8]) -> bool {
            self.get(&page).is_some_and(|value| copy(&value, into))
        }
    }

    impl Get for foyer_memory::Cache<u64, Value> {
        fn put(&self, page: u64, value: Value) {
            self.insert(page, value);
        }
        #[inline]
        fn get_into(&self, page: u64, into: &mut [u8]) -> bool {
            self.get(&page).is_some_and(|entry| copy(entry.value(), into))
        }
    }

    struct Reader<C>(Arc<C>);

    impl<C: Get> Read for Reader<C> {
        #[inline]
        fn read(&self, page: u32, into: &mut [u8]) -> bool {
            self.0.get_into(u64::from(page), into)
        }
    }

    impl<C: Get> Warm for Of<C> {
        fn reader(&self) -> Result<Box<dyn Loop>, Flaw> {
            Ok(Box::new(Reader(Arc::clone(&self.0))))
        }
    }

    fn row<C: Get>(name: &'static str, make: fn(usize) -> C) -> WarmRow {
        Row::plain(name, Kind::Peer, move |need: Need| {
            let cache = make(room(need.pages));
            (0..need.pages as u64).for_each(|page| cache.put(page, Arc::from(value_of(page))));
            Ok(Box::new(Of(Arc::new(cache))) as Box<dyn Warm>)
        })
    }

    pub(super) fn rows() -> Vec<WarmRow> {
        vec![
            row("quick_cache", quick_cache::sync::Cache::new),
            row("moka", |pages| moka::sync::Cache::new(pages as u64)),
            row("foyer", |pages| foyer_memory::CacheBuilder::new(pages).build()),
        ]
    }
}
