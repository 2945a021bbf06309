//! Pages lent: their bytes without a copy, for as long as the borrower likes. A socket, for example, sends from them.
use super::cached::{Cached, no_memory};
use super::folio::{Number, has_room_for_pins};
use super::mapping::pages_for;
use super::read::Reader;
use super::stats::add;
use core::fmt;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::PAGE_SIZE;
use std::io::{self, IoSlice};

/// Bytes of a file, lent by its cache: see [`CachedFile::lend`](super::CachedFile::lend).
///
/// They do not change: whoever writes to the file meanwhile writes to a copy of the page. The pages are neither evicted
/// nor used again before this is dropped, also if the file is closed, or cut. They count towards the cache's limit.
///
/// ```
/// use pagemill::{Allocator, FileBacking, PageCache};
/// # let path = std::env::temp_dir().join(format!("pagemill-lent-{}", std::process::id()));
/// # std::fs::write(&path, b"some bytes, some more")?;
/// let cache = PageCache::builder(&Allocator::builder().pages(64).build().unwrap()).build();
/// let file = cache.open(FileBacking::open(&path)?)?;
/// let lent = file.lend(5, 5)?;
/// assert_eq!(lent.slices().concat(), b"bytes");
/// # drop((lent, file)); std::fs::remove_file(path)?;
/// # std::io::Result::Ok(())
/// ```
#[must_use = "dropped, it gives the pages back"]
pub struct Lent {
    cached: Cached,
    pages: Vec<LentPage>,
    len: usize,
}

struct LentPage {
    number: Number,
    start: u32,
    end: u32,
}

impl Cached {
    pub(super) fn lend(&self, reader: &Reader, at: u64, len: usize) -> io::Result<Lent> {
        let mut lent = Lent { cached: self.clone(), pages: Vec::new(), len: 0 };
        let first = at / PAGE_SIZE as u64;
        let pages = pages_for(self.file.len().min(at.saturating_add(len as u64))).saturating_sub(first);
        let limit = self.shared.limit.load(Relaxed);
        if pages > limit as u64 {
            return Err(no_memory(format!("{pages} pages are to be lent at once, and the cache may have {limit}")));
        }
        let mut too_many = false;
        self.each_page(reader, at, len as u64, |_, page, bytes| {
            too_many |= !has_room_for_pins(page.folio.state());
            if !too_many {
                lent.len += bytes.len();
                let (start, end) = (bytes.start as u32, bytes.end as u32);
                lent.pages.push(LentPage { number: page.keep(), start, end });
            }
        })?;
        if too_many {
            return Err(io::Error::new(
                io::ErrorKind::QuotaExceeded,
                "a page is lent a billion times: are handles forgotten?",
            ));
        }
        add(&self.shared.counters.here().lent, lent.pages.len());
        Ok(lent)
    }
}

impl Lent {
    /// The number of its bytes: fewer than were asked for if the file ends there.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether it has no bytes: the file ends before them.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// The bytes, page by page.
    pub fn slices(&self) -> Vec<&[u8]> {
        let slice = |page: &LentPage| {
            let bytes = self.cached.shared.folios.get(page.number).as_ptr();
            let len = (page.end - page.start) as usize;
            // SAFETY: the page is pinned since it was up to date and nobody changed it, so nobody does (L5), and it is
            // not freed (L3) before the drop of this.
            unsafe { core::slice::from_raw_parts(bytes.add(page.start as usize), len) }
        };
        self.pages.iter().map(slice).collect()
    }
    /// The same, for a vectored write.
    pub fn io_slices(&self) -> Vec<IoSlice<'_>> {
        self.slices().into_iter().map(IoSlice::new).collect()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        for page in &self.pages {
            self.cached.shared.unpin(page.number, self.cached.shared.folios.get(page.number), 1);
        }
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes in {} pages", self.len, self.pages.len())
    }
}
