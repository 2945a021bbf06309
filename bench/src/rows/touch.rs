//! The rows of the table `touch`: ways of getting fresh pages and having the system commit them.

use std::hint::black_box;
use std::ops::Range;

use pagemill::{Allocator, Backend, Bulk, Gfp, Page, free_pages_bulk};

use crate::rows::pagemill::{BACKENDS, refused};
use crate::rows::region::Region;
use crate::rows::{Kind, Unavailable};
use crate::subject::PAGE_BYTES;
use crate::tables::churn::HUGE_PAGES;

/// Pages to write to: all pages of a row's arena or mapping.
pub(crate) trait Written {
    /// Allocates the pages. False if there were too few, or the system refused.
    fn take(&mut self) -> bool;

    /// Writes a byte to each page.
    fn touch(&mut self);

    /// Frees them. False if the system did not take memory back that it should have taken.
    fn put(&mut self) -> bool;

    /// For a row of fresh pages: returns the memory to the system, if `put` did not. Untimed. False if the system did
    /// not take all.
    fn renew(&mut self) -> bool;

    /// The addresses of the pages that are held. Untimed.
    fn addresses(&self) -> Vec<usize>;
}

/// One row, opened with a number of pages.
pub(crate) struct TouchRow {
    pub(crate) bench: &'static str,
    pub(crate) name: &'static str,
    pub(crate) backend: &'static str,
    pub(crate) kind: Kind,
    /// Whether the system has to use 2 MiB pages, or must not.
    pub(crate) is_huge: bool,
    pub(crate) open: OpenWritten,
}

/// Opens an arena or a mapping of a number of pages.
pub(crate) type OpenWritten = Box<dyn Fn(usize) -> Result<Box<dyn Written>, Unavailable>>;

/// How a row of Pagemill's allocates its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ask {
    OneByOne,
    Bulk,
    Populated,
}

/// What happens to the pages between two rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    /// Their memory goes back to the system, untimed.
    Renewed,
    /// Their memory stays.
    Recycled,
    /// Their memory goes back to the system, timed.
    Returned,
}

/// All rows, those of fresh pages first.
pub(crate) fn rows() -> Vec<TouchRow> {
    const OURS: [(&str, &str, bool, Ask, After); 9] = [
        ("touch-4k", "pagemill-single", false, Ask::OneByOne, After::Renewed),
        ("touch-4k", "pagemill-array", false, Ask::Bulk, After::Renewed),
        ("touch-4k-populated", "pagemill-array", false, Ask::Populated, After::Renewed),
        ("touch-2m", "pagemill-array", true, Ask::Bulk, After::Renewed),
        ("touch-2m-populated", "pagemill-array", true, Ask::Populated, After::Renewed),
        ("touch-4k-recycled", "pagemill-array", false, Ask::Bulk, After::Recycled),
        ("touch-4k-returned", "pagemill-array", false, Ask::Bulk, After::Returned),
        ("touch-2m-recycled", "pagemill-array", true, Ask::Bulk, After::Recycled),
        ("touch-2m-returned", "pagemill-array", true, Ask::Bulk, After::Returned),
    ];
    const SYSTEMS: [(&str, bool, bool); 4] = [
        ("touch-4k", false, false),
        ("touch-4k-populated", false, true),
        ("touch-2m", true, false),
        ("touch-2m-populated", true, true),
    ];
    let ours = OURS.into_iter().flat_map(|(bench, name, is_huge, ask, after)| {
        BACKENDS.map(|(label, backend)| {
            let open = move |pages| Ok(Box::new(Paged::open(backend, is_huge, pages, ask, after)?) as Box<dyn Written>);
            TouchRow { bench, name, backend: label, kind: Kind::Ours, is_huge, open: Box::new(open) }
        })
    });
    let systems = SYSTEMS.into_iter().map(|(bench, is_huge, is_populated)| {
        let open = move |pages| Ok(Box::new(Mapped::open(pages, is_huge, is_populated)?) as Box<dyn Written>);
        TouchRow { bench, name: "mmap", backend: "-", kind: Kind::Peer, is_huge, open: Box::new(open) }
    });
    let mut rows: Vec<TouchRow> = ours.chain(systems).collect();
    // Rows that keep their memory come last: until then all committed memory belongs to the row that was opened last.
    rows.sort_by_key(|row| (row.bench.ends_with("-recycled"), row.bench.ends_with("-returned")));
    rows
}

/// An arena of exactly the pages that are written to.
struct Paged {
    allocator: Allocator,
    slots: Vec<Option<Page>>,
    ask: Ask,
    after: After,
}

impl Paged {
    fn open(backend: Backend, is_huge: bool, pages: usize, ask: Ask, after: After) -> Result<Paged, Unavailable> {
        let builder = Allocator::builder().pages(pages).backend(backend).huge_pages(is_huge);
        let slots = std::iter::repeat_with(|| None).take(pages).collect();
        Ok(Paged { allocator: builder.build().map_err(refused)?, slots, ask, after })
    }

    fn give_back(&self) -> bool {
        self.allocator.give_back().get() == self.slots.len()
    }
}

impl Written for Paged {
    #[inline(never)]
    fn take(&mut self) -> bool {
        let n = self.slots.len();
        let request = match self.ask {
            Ask::OneByOne => {
                return self.slots.iter_mut().all(|slot| {
                    *slot = self.allocator.alloc_page(Gfp::KERNEL).ok();
                    slot.is_some()
                });
            }
            Ask::Bulk => Bulk::up_to(n),
            Ask::Populated => Bulk::up_to(n).populated(),
        };
        self.allocator.alloc_pages_bulk_array(request, &mut self.slots).is_ok_and(|filled| filled.added == n)
    }

    #[inline(never)]
    fn touch(&mut self) {
        self.slots.iter_mut().flatten().for_each(|page| page[0] = 1);
        black_box(&mut self.slots);
    }

    #[inline(never)]
    fn put(&mut self) -> bool {
        free_pages_bulk(&mut self.slots);
        self.after != After::Returned || self.give_back()
    }

    fn renew(&mut self) -> bool {
        self.after != After::Renewed || self.give_back()
    }

    fn addresses(&self) -> Vec<usize> {
        self.slots.iter().flatten().map(Page::addr).collect()
    }
}

/// A mapping, as a program without a page allocator uses it.
struct Mapped {
    _region: Region,
    /// The part of the region that begins at a multiple of 2 MiB.
    addresses: Range<usize>,
    is_populated: bool,
}

impl Mapped {
    fn open(pages: usize, is_huge: bool, is_populated: bool) -> Result<Mapped, Unavailable> {
        let region = Region::new(pages + HUGE_PAGES)?;
        let base = region.base().next_multiple_of(HUGE_PAGES * PAGE_BYTES);
        let mapped = Mapped { _region: region, addresses: base..base + pages * PAGE_BYTES, is_populated };
        mapped.advise(if is_huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE })?;
        if is_populated {
            // Linux before 5.14 does not have it.
            mapped.advise(libc::MADV_POPULATE_WRITE)?;
            mapped.advise(libc::MADV_DONTNEED)?;
        }
        Ok(mapped)
    }

    fn advise(&self, advice: i32) -> Result<(), Unavailable> {
        let start = std::ptr::with_exposed_provenance_mut(self.addresses.start);
        // SAFETY: the range is a part of the region, of which nobody holds a reference; its contents count for nothing.
        match unsafe { libc::madvise(start, self.addresses.len(), advice) } {
            0 => Ok(()),
            _ => Err(Unavailable(format!("madvise, advice {advice}: {}", std::io::Error::last_os_error()))),
        }
    }
}

impl Written for Mapped {
    #[inline(never)]
    fn take(&mut self) -> bool {
        !self.is_populated || self.advise(libc::MADV_POPULATE_WRITE).is_ok()
    }

    #[inline(never)]
    fn touch(&mut self) {
        for addr in self.addresses.clone().step_by(PAGE_BYTES) {
            // SAFETY: the mapping is readable and writable, and nobody holds a reference into it.
            unsafe { std::ptr::with_exposed_provenance_mut::<u8>(addr).write_volatile(1) };
        }
    }

    #[inline(never)]
    fn put(&mut self) -> bool {
        self.advise(libc::MADV_DONTNEED).is_ok()
    }

    fn renew(&mut self) -> bool {
        true
    }

    fn addresses(&self) -> Vec<usize> {
        self.addresses.clone().step_by(PAGE_BYTES).collect()
    }
}
