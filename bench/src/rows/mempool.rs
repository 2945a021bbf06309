//! Pagemill's pool with a reserve: one page a call, the array form and the callback form. Once over an allocator that
//! has pages, and once over one that has none left, so that every page comes from the reserve.

use pagemill::{Allocator, Bulk, Gfp, Mempool, Page, PageList, PageSource};

use crate::rows::pagemill::{BACKENDS, SPARE_PAGES, refused};
use crate::rows::{Kind, Row, Site, Unavailable};
use crate::subject::{Runner, Subject};

/// Pages of an operation, and of the reserve: 1 MiB, as in the published figures.
pub(crate) const POOL_PAGES: usize = 256;

pub(crate) type Pool = Mempool<PageSource<Page>>;

/// The rows, each with its part of the table.
pub(crate) fn rows() -> Vec<(&'static str, Row)> {
    const FORMS: [(&str, Form); 3] =
        [("mempool-single", Form::Single), ("mempool-array", Form::Array), ("mempool-callback", Form::Callback)];
    let mut rows = Vec::new();
    for (bench, is_dry) in [("mempool", false), ("mempool-dry", true)] {
        for (label, backend) in BACKENDS {
            for (name, form) in FORMS {
                let open = move |_| {
                    let (allocator, pool, rest) = pool(backend, is_dry)?;
                    // One thread measures, so there is one runner.
                    let ready = std::sync::Mutex::new(Some(Pooled::new(form, pool, rest)));
                    let site: Site = Box::new(move |_| {
                        let _stays = &allocator;
                        let pooled = ready.lock().ok().and_then(|mut ready| ready.take());
                        Box::new(pooled.expect("one runner a table")) as Box<dyn Runner>
                    });
                    Ok(site)
                };
                rows.push((bench, Row { name, backend: label, kind: Kind::Ours, open: Box::new(open) }));
            }
        }
    }
    rows
}

/// A pool with a full reserve; with `is_dry` its allocator has no other pages.
pub(crate) fn pool(backend: pagemill::Backend, is_dry: bool) -> Result<(Allocator, Pool, PageList), Unavailable> {
    let pages = POOL_PAGES + SPARE_PAGES;
    let allocator = Allocator::builder().pages(pages).backend(backend).build().map_err(refused)?;
    let pool = Mempool::pages(&allocator, POOL_PAGES).map_err(refused)?;
    let mut rest = PageList::new();
    if is_dry {
        let all = Bulk::up_to(pages).gfp(Gfp::NOWAIT);
        allocator.alloc_pages_bulk_list(all, &mut rest).map_err(refused)?;
        while let Ok(page) = allocator.alloc_page(Gfp::NOWAIT) {
            rest.push(page).map_err(|_| Unavailable("a list refuses a page".to_owned()))?;
        }
    }
    Ok((allocator, pool, rest))
}

#[derive(Debug, Clone, Copy)]
enum Form {
    Single,
    Array,
    Callback,
}

struct Pooled {
    form: Form,
    pool: Pool,
    slots: Vec<Option<Page>>,
    len: usize,
    _rest: PageList,
}

impl Pooled {
    fn new(form: Form, pool: Pool, rest: PageList) -> Self {
        Pooled { form, pool, slots: (0..POOL_PAGES).map(|_| None).collect(), len: 0, _rest: rest }
    }
}

impl Subject for Pooled {
    #[inline]
    fn take(&mut self, n: usize) -> bool {
        self.len = n;
        let slots = &mut self.slots[..n];
        match self.form {
            Form::Single => slots.iter_mut().all(|slot| {
                *slot = self.pool.alloc(Gfp::NOIO).ok();
                slot.is_some()
            }),
            Form::Array => self.pool.alloc_bulk_array(Bulk::exact(n).gfp(Gfp::NOIO), slots).is_ok(),
            Form::Callback => {
                let mut next = slots.iter_mut();
                let put = |page| {
                    if let Some(slot) = next.next() {
                        *slot = Some(page);
                    }
                };
                self.pool.alloc_bulk_callback(Bulk::exact(n).gfp(Gfp::NOIO), put).is_ok()
            }
        }
    }

    #[inline]
    fn put(&mut self) {
        let slots = &mut self.slots[..self.len];
        match self.form {
            Form::Single => slots.iter_mut().filter_map(Option::take).for_each(|page| self.pool.free(page)),
            _ => _ = self.pool.free_bulk(slots),
        }
        self.len = 0;
    }

    fn shuffle(&mut self, rng: &mut fastrand::Rng) {
        rng.shuffle(&mut self.slots[..self.len]);
    }

    fn addresses(&mut self) -> Vec<usize> {
        self.slots.iter().flatten().map(Page::addr).collect()
    }

    fn supports(&self, n: usize) -> bool {
        n <= POOL_PAGES
    }

    /// The table has one thread.
    fn hands_over(&self) -> bool {
        false
    }
    fn give(&mut self, _out: &mut [usize]) -> bool {
        false
    }
    fn accept(&mut self, _words: &[usize]) {}
}
