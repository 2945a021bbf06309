//! Pagemill's pool with a reserve: one page a call, the array form and the callback form, with handles that go back when
//! they are dropped and with plain pages (`raw`). Once over an allocator that has pages, and once over one that has none
//! left, so that every page comes from the reserve.

use pagemill::{Allocator, Backend, Bulk, Gfp, Mempool, Page, PageList, PageMempool, Pooled};

use crate::rows::pagemill::{BACKENDS, SPARE_PAGES, refused};
use crate::rows::{Kind, Row, Site, Unavailable};
use crate::subject::{Runner, Subject};

/// Pages of an operation, and of the reserve: 1 MiB, as in the published figures.
pub(crate) const POOL_PAGES: usize = 256;

/// A handle of a page. The pools of rows are leaked, so that handles need no other lifetime.
type Handle = Pooled<&'static PageMempool>;

/// The rows, each with its part of the table.
pub(crate) fn rows() -> Vec<(&'static str, Row)> {
    const FORMS: [(&str, &str, Form); 3] = [
        ("mempool-single", "mempool-single-raw", Form::Single),
        ("mempool-array", "mempool-array-raw", Form::Array),
        ("mempool-callback", "mempool-callback-raw", Form::Callback),
    ];
    let mut rows = Vec::new();
    for (bench, is_dry) in [("mempool", false), ("mempool-dry", true)] {
        for (label, backend) in BACKENDS {
            for (name, raw, form) in FORMS {
                rows.push((bench, row::<Handle>(name, label, backend, form, is_dry)));
                rows.push((bench, row::<Page>(raw, label, backend, form, is_dry)));
            }
        }
    }
    rows
}

fn row<E: Element>(name: &'static str, label: &'static str, backend: Backend, form: Form, is_dry: bool) -> Row {
    let open = move |_| {
        let (allocator, pool, rest) = pool(backend, is_dry)?;
        // One thread measures, so there is one runner.
        let ready = std::sync::Mutex::new(Some(Taker::<E>::new(form, Box::leak(Box::new(pool)), rest)));
        let site: Site = Box::new(move |_| {
            let _stays = &allocator;
            let taker = ready.lock().ok().and_then(|mut ready| ready.take());
            Box::new(taker.expect("one runner a table")) as Box<dyn Runner>
        });
        Ok(site)
    };
    Row { name, backend: label, kind: Kind::Ours, open: Box::new(open) }
}

/// A pool with a full reserve; with `is_dry` its allocator has no other pages.
pub(crate) fn pool(backend: Backend, is_dry: bool) -> Result<(Allocator, PageMempool, PageList), Unavailable> {
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

/// A pool's page as a program has it.
trait Element: Sized + Send + 'static {
    fn one(pool: &'static PageMempool) -> Option<Self>;
    fn fill(pool: &'static PageMempool, slots: &mut [Option<Self>]) -> bool;
    fn each(pool: &'static PageMempool, n: usize, put: impl FnMut(Self)) -> bool;
    fn free(self, pool: &PageMempool);
    fn free_bulk(pool: &PageMempool, slots: &mut [Option<Self>]);
    fn addr(&self) -> usize;
}

fn all(n: usize) -> Bulk<'static, pagemill::Exact, Page> {
    Bulk::exact(n).gfp(Gfp::NOIO)
}

impl Element for Handle {
    #[inline]
    fn one(pool: &'static PageMempool) -> Option<Self> {
        pool.alloc(Gfp::NOIO).ok()
    }
    #[inline]
    fn fill(pool: &'static PageMempool, slots: &mut [Option<Self>]) -> bool {
        pool.alloc_bulk_array(all(slots.len()), slots).is_ok()
    }
    #[inline]
    fn each(pool: &'static PageMempool, n: usize, put: impl FnMut(Self)) -> bool {
        pool.alloc_bulk_callback(all(n), put).is_ok()
    }
    #[inline]
    fn free(self, _: &PageMempool) {
        drop(self);
    }
    #[inline]
    fn free_bulk(pool: &PageMempool, slots: &mut [Option<Self>]) {
        pool.free_bulk(slots);
    }
    fn addr(&self) -> usize {
        Page::addr(self)
    }
}

impl Element for Page {
    #[inline]
    fn one(pool: &'static PageMempool) -> Option<Self> {
        pool.alloc_raw(Gfp::NOIO).ok()
    }
    #[inline]
    fn fill(pool: &'static PageMempool, slots: &mut [Option<Self>]) -> bool {
        pool.alloc_bulk_array_raw(all(slots.len()), slots).is_ok()
    }
    #[inline]
    fn each(pool: &'static PageMempool, n: usize, put: impl FnMut(Self)) -> bool {
        pool.alloc_bulk_callback_raw(all(n), put).is_ok()
    }
    #[inline]
    fn free(self, pool: &PageMempool) {
        pool.free_raw(self);
    }
    #[inline]
    fn free_bulk(pool: &PageMempool, slots: &mut [Option<Self>]) {
        pool.free_bulk_raw(slots);
    }
    fn addr(&self) -> usize {
        Page::addr(self)
    }
}

struct Taker<E> {
    form: Form,
    pool: &'static PageMempool,
    slots: Vec<Option<E>>,
    len: usize,
    _rest: PageList,
}

impl<E: Element> Taker<E> {
    fn new(form: Form, pool: &'static PageMempool, rest: PageList) -> Self {
        Self { form, pool, slots: (0..POOL_PAGES).map(|_| None).collect(), len: 0, _rest: rest }
    }
}

impl<E: Element> Subject for Taker<E> {
    #[inline]
    fn take(&mut self, n: usize) -> bool {
        self.len = n;
        let (pool, slots) = (self.pool, &mut self.slots[..n]);
        match self.form {
            Form::Single => slots.iter_mut().all(|slot| {
                *slot = E::one(pool);
                slot.is_some()
            }),
            Form::Array => E::fill(pool, slots),
            Form::Callback => {
                let mut next = slots.iter_mut();
                E::each(pool, n, |page| {
                    if let Some(slot) = next.next() {
                        *slot = Some(page);
                    }
                })
            }
        }
    }

    #[inline]
    fn put(&mut self) {
        let slots = &mut self.slots[..self.len];
        match self.form {
            Form::Single => slots.iter_mut().filter_map(Option::take).for_each(|page| page.free(self.pool)),
            _ => E::free_bulk(self.pool, slots),
        }
        self.len = 0;
    }

    fn shuffle(&mut self, rng: &mut fastrand::Rng) {
        rng.shuffle(&mut self.slots[..self.len]);
    }

    fn addresses(&mut self) -> Vec<usize> {
        self.slots.iter().flatten().map(E::addr).collect()
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
