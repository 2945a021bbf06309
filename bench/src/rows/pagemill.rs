//! Pagemill's own rows: each form on each per-CPU backend, through the public interface alone.
//!
//! Each row has an allocator of its own in each table, so that no row works on lists that another row has left behind.
//! The bulk forms allocate all N pages in one call and free them in one. `single` makes N calls each way. `split`
//! allocates one block of N pages, splits it and frees the pages in bulk, so it is defined for powers of two only.
//! `raw` fills an array with pointers, and frees the pointers.

use pagemill::{
    Allocator, Backend, Bulk, Gfp, Order, Page, PageList, Run, free_pages_bulk, free_pages_bulk_raw,
    free_pages_bulk_runs,
};

use crate::rows::{Kind, Row, Site, Unavailable};
use crate::subject::{Runner, Subject};
use crate::tables::churn::{CHURN_PAGES, ChurnRow, Frames, HUGE_PAGES, pick_to_the_end};

/// Pages of an arena beyond those that a table needs: 1 GiB, so that the per-CPU lists are as large as in a program,
/// and not as small as in a tiny arena.
pub(super) const SPARE_PAGES: usize = 1 << 18;

pub(super) const BACKENDS: [(&str, Backend); 2] = [("rseq", Backend::Rseq), ("portable", Backend::Portable)];

type MakeRunner = fn(Allocator, usize) -> Box<dyn Runner>;

const FORMS: [(&str, MakeRunner); 7] = [
    ("pagemill-single", |allocator, most| Box::new(Single { allocator, held: Vec::with_capacity(most) })),
    ("pagemill-list", |allocator, _| Box::new(Listed { allocator, list: PageList::new() })),
    ("pagemill-array", |allocator, most| Box::new(Slots::<Array>::new(allocator, most))),
    ("pagemill-callback", |allocator, most| Box::new(Slots::<Callback>::new(allocator, most))),
    ("pagemill-runs", |allocator, most| Box::new(InRuns::new(allocator, most))),
    ("pagemill-raw", |allocator, most| Box::new(Raw::new(allocator, most))),
    ("pagemill-split", |allocator, most| Box::new(Slots::<Split>::new(allocator, most))),
];

pub(crate) fn rows() -> Vec<Row> {
    FORMS.into_iter().flat_map(|(name, make)| on_each_backend(name, make)).collect()
}

/// The array form with 64 slots a call, both ways, in the table `burst`, for more than 64 pages.
pub(crate) fn burst_rows() -> Vec<Row> {
    on_each_backend("pagemill-array-64", |allocator, most| Box::new(Slots::<By64>::new(allocator, most))).into()
}

fn on_each_backend(name: &'static str, make: MakeRunner) -> [Row; 2] {
    BACKENDS.map(|(label, backend)| row(name, label, backend, make))
}

/// Pagemill in the table `total`, with the name of each part: one page a call, and the array form with 1 to 32 pages a
/// call. All free in bulk, so that each row starts from the same state.
pub(crate) fn total_rows() -> Vec<(&'static str, Row)> {
    const FORMS: [(&str, &str, MakeRunner); 7] = [
        ("total-1", "pagemill-single", |allocator, most| Box::new(Slots::<OneByOne>::new(allocator, most))),
        ("total-1", "pagemill-array", |allocator, most| Box::new(Slots::<ArrayBy<1>>::new(allocator, most))),
        ("total-2", "pagemill-array", |allocator, most| Box::new(Slots::<ArrayBy<2>>::new(allocator, most))),
        ("total-4", "pagemill-array", |allocator, most| Box::new(Slots::<ArrayBy<4>>::new(allocator, most))),
        ("total-8", "pagemill-array", |allocator, most| Box::new(Slots::<ArrayBy<8>>::new(allocator, most))),
        ("total-16", "pagemill-array", |allocator, most| Box::new(Slots::<ArrayBy<16>>::new(allocator, most))),
        ("total-32", "pagemill-array", |allocator, most| Box::new(Slots::<ArrayBy<32>>::new(allocator, most))),
    ];
    let each = |(label, backend)| FORMS.map(|(bench, name, make)| (bench, row(name, label, backend, make)));
    BACKENDS.into_iter().flat_map(each).collect()
}

fn row(name: &'static str, label: &'static str, backend: Backend, make: MakeRunner) -> Row {
    let open = move |need: crate::rows::Need| {
        let allocator = open(backend, need.pages + SPARE_PAGES)?;
        let site: Site = Box::new(move |most_held| make(allocator.clone(), most_held));
        Ok(site)
    };
    Row { name, backend: label, kind: Kind::Ours, open: Box::new(open) }
}

pub(super) fn open(backend: Backend, pages: usize) -> Result<Allocator, Unavailable> {
    Allocator::builder().pages(pages).backend(backend).build().map_err(refused)
}

pub(super) fn refused(error: impl core::fmt::Display) -> Unavailable {
    Unavailable(error.to_string())
}

/// The backend with this label.
pub(crate) fn backend_named(label: &str) -> Backend {
    BACKENDS.iter().find(|(name, _)| *name == label).map_or(Backend::Portable, |(_, backend)| *backend)
}

/// The backend that an allocator has by default.
pub(crate) fn default_backend() -> Result<&'static str, Unavailable> {
    let allocator = Allocator::builder().pages(HUGE_PAGES).build().map_err(refused)?;
    Ok(if allocator.backend() == Backend::Rseq { "rseq" } else { "portable" })
}

/// Bits a frame of the free/used state, as reported by an allocator of the size that `churn` has.
pub(crate) fn bits_per_frame() -> Result<f64, Unavailable> {
    let allocator = Allocator::builder().pages(CHURN_PAGES).build().map_err(refused)?;
    Ok(allocator.metadata_bits_per_frame())
}

/// Leaves pages in `out` as words.
fn to_words(out: &mut [usize], pages: impl Iterator<Item = Page>) {
    out.iter_mut().zip(pages).for_each(|(word, page)| *word = to_word(page));
}

/// A page's handle as a word, which crosses a ring.
fn to_word(page: Page) -> usize {
    // SAFETY: a handle is a word that is not 0.
    unsafe { core::mem::transmute::<Page, usize>(page) }
}

/// The page of a word of [`to_word`].
fn to_page(word: usize) -> Option<Page> {
    // SAFETY: every word that crosses a ring is a page's, crosses once, and is taken up once; 0 is none.
    unsafe { core::mem::transmute::<usize, Option<Page>>(word) }
}

struct Single {
    allocator: Allocator,
    held: Vec<Page>,
}

impl Subject for Single {
    fn allocator(&self) -> Option<&Allocator> {
        Some(&self.allocator)
    }

    #[inline]
    fn take(&mut self, n: usize) -> bool {
        for _ in 0..n {
            match self.allocator.alloc_page(Gfp::KERNEL) {
                Ok(page) => self.held.push(page),
                Err(_) => return false,
            }
        }
        true
    }

    #[inline]
    fn put(&mut self) {
        self.held.clear();
    }

    fn shuffle(&mut self, rng: &mut fastrand::Rng) {
        rng.shuffle(&mut self.held);
    }

    fn addresses(&mut self) -> Vec<usize> {
        self.held.iter().map(Page::addr).collect()
    }

    #[inline]
    fn give(&mut self, out: &mut [usize]) -> bool {
        for word in out {
            match self.allocator.alloc_page(Gfp::KERNEL) {
                Ok(page) => *word = to_word(page),
                Err(_) => return false,
            }
        }
        true
    }

    #[inline]
    fn accept(&mut self, words: &[usize]) {
        for &word in words {
            drop(to_page(word));
        }
    }
}

struct Listed {
    allocator: Allocator,
    list: PageList,
}

impl Subject for Listed {
    fn allocator(&self) -> Option<&Allocator> {
        Some(&self.allocator)
    }

    #[inline]
    fn take(&mut self, n: usize) -> bool {
        let delivered = self.allocator.alloc_pages_bulk_list(Bulk::up_to(n), &mut self.list);
        delivered.is_ok_and(|delivered| delivered.blocks == n)
    }

    #[inline]
    fn put(&mut self) {
        self.list.clear();
    }

    fn shuffle(&mut self, rng: &mut fastrand::Rng) {
        let mut pages: Vec<Page> = self.list.by_ref().collect();
        rng.shuffle(&mut pages);
        self.list.extend(pages);
    }

    fn addresses(&mut self) -> Vec<usize> {
        let pages: Vec<Page> = self.list.by_ref().collect();
        let addresses = pages.iter().map(Page::addr).collect();
        self.list.extend(pages);
        addresses
    }

    #[inline]
    fn give(&mut self, out: &mut [usize]) -> bool {
        let complete = self.take(out.len());
        to_words(out, self.list.by_ref());
        complete
    }

    #[inline]
    fn accept(&mut self, words: &[usize]) {
        self.list.extend(words.iter().filter_map(|&word| to_page(word)));
        self.list.clear();
    }
}

/// How a row fills an empty array.
trait Fill {
    /// Fills all of `slots`. False if there were too few pages.
    fn fill(allocator: &Allocator, slots: &mut [Option<Page>]) -> bool;

    /// Frees the pages of all slots.
    #[inline]
    fn empty(slots: &mut [Option<Page>]) {
        free_pages_bulk(slots);
    }

    fn supports(_n: usize) -> bool {
        true
    }

    /// Whether the pages come from a CPU's list.
    const IS_LISTED: bool = true;
}

struct Array;

impl Fill for Array {
    #[inline]
    fn fill(allocator: &Allocator, slots: &mut [Option<Page>]) -> bool {
        let n = slots.len();
        allocator.alloc_pages_bulk_array(Bulk::up_to(n), slots).is_ok_and(|filled| filled.added == n)
    }
}

/// The same with `K` slots a call.
struct ArrayBy<const K: usize>;

impl<const K: usize> Fill for ArrayBy<K> {
    #[inline]
    fn fill(allocator: &Allocator, slots: &mut [Option<Page>]) -> bool {
        slots.chunks_mut(K).all(|slots| Array::fill(allocator, slots))
    }
}

/// 64 slots a call, both ways.
struct By64;

impl Fill for By64 {
    #[inline]
    fn fill(allocator: &Allocator, slots: &mut [Option<Page>]) -> bool {
        ArrayBy::<64>::fill(allocator, slots)
    }

    #[inline]
    fn empty(slots: &mut [Option<Page>]) {
        slots.chunks_mut(64).for_each(|slots| _ = free_pages_bulk(slots));
    }

    /// With up to 64 pages this would be `pagemill-array`.
    fn supports(n: usize) -> bool {
        n > 64
    }
}

/// Fills an empty slot. Dropping its old contents would be a check that a row's users need not make.
#[inline]
fn fill_empty(slot: &mut Option<Page>, page: Page) {
    std::mem::forget(slot.replace(page));
}

/// One plain call a page.
struct OneByOne;

impl Fill for OneByOne {
    #[inline]
    fn fill(allocator: &Allocator, slots: &mut [Option<Page>]) -> bool {
        slots.iter_mut().all(|slot| match allocator.alloc_page(Gfp::KERNEL) {
            Ok(page) => {
                fill_empty(slot, page);
                true
            }
            Err(_) => false,
        })
    }
}

struct Callback;

impl Fill for Callback {
    #[inline]
    fn fill(allocator: &Allocator, slots: &mut [Option<Page>]) -> bool {
        let n = slots.len();
        let mut next = slots.iter_mut();
        let delivered = allocator.alloc_pages_bulk_callback(Bulk::up_to(n), |page: Page| {
            if let Some(slot) = next.next() {
                fill_empty(slot, page);
            }
        });
        delivered.is_ok_and(|delivered| delivered.blocks == n)
    }
}

struct Split;

impl Fill for Split {
    #[inline]
    fn fill(allocator: &Allocator, slots: &mut [Option<Page>]) -> bool {
        let Ok(order) = Order::new(slots.len().trailing_zeros() as u8) else { return false };
        let Ok(block) = allocator.alloc_pages(Gfp::KERNEL, order) else { return false };
        slots.iter_mut().zip(block.split()).for_each(|(slot, page)| *slot = Some(page));
        true
    }

    const IS_LISTED: bool = false;

    fn supports(n: usize) -> bool {
        n.is_power_of_two() && Order::new(n.trailing_zeros() as u8).is_ok()
    }
}

/// The forms that leave their pages in an array and free them in bulk.
struct Slots<F> {
    allocator: Allocator,
    slots: Vec<Option<Page>>,
    len: usize,
    _form: std::marker::PhantomData<F>,
}

impl<F: Fill> Slots<F> {
    fn new(allocator: Allocator, most_held: usize) -> Self {
        let slots = std::iter::repeat_with(|| None).take(most_held).collect();
        Slots { allocator, slots, len: 0, _form: std::marker::PhantomData }
    }
}

impl<F: Fill> Subject for Slots<F> {
    fn allocator(&self) -> Option<&Allocator> {
        F::IS_LISTED.then_some(&self.allocator)
    }

    #[inline]
    fn take(&mut self, n: usize) -> bool {
        self.len = n;
        F::fill(&self.allocator, &mut self.slots[..n])
    }

    #[inline]
    fn put(&mut self) {
        F::empty(&mut self.slots[..self.len]);
        self.len = 0;
    }

    fn shuffle(&mut self, rng: &mut fastrand::Rng) {
        rng.shuffle(&mut self.slots[..self.len]);
    }

    fn addresses(&mut self) -> Vec<usize> {
        self.slots.iter().flatten().map(Page::addr).collect()
    }

    fn supports(&self, n: usize) -> bool {
        F::supports(n)
    }

    #[inline]
    fn give(&mut self, out: &mut [usize]) -> bool {
        let slots = &mut self.slots[..out.len()];
        let complete = F::fill(&self.allocator, slots);
        to_words(out, slots.iter_mut().filter_map(Option::take));
        complete
    }

    #[inline]
    fn accept(&mut self, words: &[usize]) {
        let slots = &mut self.slots[..words.len()];
        slots.iter_mut().zip(words).for_each(|(slot, &word)| *slot = to_page(word));
        free_pages_bulk(slots);
    }
}

/// Pages that are held as an array of pointers, as a caller from C does.
struct Raw {
    allocator: Allocator,
    slots: Vec<*mut u8>,
    len: usize,
}

impl Raw {
    fn new(allocator: Allocator, most_held: usize) -> Self {
        Raw { allocator, slots: vec![std::ptr::null_mut(); most_held], len: 0 }
    }

    fn held(&mut self) -> &mut [*mut u8] {
        &mut self.slots[..self.len]
    }

    #[inline]
    fn free_held(&mut self) {
        // SAFETY: each pointer is that of a page which was given away, and is freed once: its slot is null afterwards.
        let freed = unsafe { free_pages_bulk_raw(self.held(), Order::ZERO) };
        debug_assert!(freed.is_ok(), "every pointer is a page's");
    }
}

impl Subject for Raw {
    fn allocator(&self) -> Option<&Allocator> {
        Some(&self.allocator)
    }

    #[inline]
    fn take(&mut self, n: usize) -> bool {
        self.len = n;
        let slots = &mut self.slots[..n];
        self.allocator.alloc_pages_bulk_array_raw(Bulk::up_to(n), slots).is_ok_and(|filled| filled.added == n)
    }

    #[inline]
    fn put(&mut self) {
        self.free_held();
    }

    fn shuffle(&mut self, rng: &mut fastrand::Rng) {
        rng.shuffle(self.held());
    }

    fn addresses(&mut self) -> Vec<usize> {
        self.held().iter().map(|page| page.addr()).collect()
    }

    #[inline]
    fn give(&mut self, out: &mut [usize]) -> bool {
        let complete = self.take(out.len());
        out.iter_mut().zip(self.held()).for_each(|(word, page)| *word = page.addr());
        self.held().fill(std::ptr::null_mut());
        complete
    }

    #[inline]
    fn accept(&mut self, words: &[usize]) {
        self.len = words.len();
        self.held().iter_mut().zip(words).for_each(|(page, &word)| *page = word as *mut u8);
        self.free_held();
    }
}

struct InRuns {
    allocator: Allocator,
    runs: Vec<Run<Page>>,
    /// Pages that were shuffled or came from another thread, and are no longer in runs.
    slots: Vec<Option<Page>>,
}

impl InRuns {
    fn new(allocator: Allocator, most_held: usize) -> Self {
        InRuns { allocator, runs: Vec::with_capacity(most_held), slots: Vec::with_capacity(most_held) }
    }

    fn leave_runs(&mut self) {
        self.slots.extend(self.runs.drain(..).flat_map(|run| run.into_pages().map(Some)));
    }
}

impl Subject for InRuns {
    fn allocator(&self) -> Option<&Allocator> {
        Some(&self.allocator)
    }

    #[inline]
    fn take(&mut self, n: usize) -> bool {
        let delivered = self.allocator.alloc_pages_bulk_runs(Bulk::up_to(n), &mut self.runs);
        delivered.is_ok_and(|delivered| delivered.blocks == n)
    }

    #[inline]
    fn put(&mut self) {
        free_pages_bulk_runs(&mut self.runs);
    }

    fn shuffle(&mut self, rng: &mut fastrand::Rng) {
        self.leave_runs();
        rng.shuffle(&mut self.slots);
    }

    #[inline]
    fn put_scattered(&mut self) {
        free_pages_bulk(&mut self.slots);
        self.slots.clear();
    }

    fn addresses(&mut self) -> Vec<usize> {
        let pages = |run: &Run<Page>| (0..run.len()).map(move |page| page * pagemill::PAGE_SIZE);
        self.runs.iter().flat_map(|run| pages(run).map(move |offset| run.addr() + offset)).collect()
    }

    #[inline]
    fn give(&mut self, out: &mut [usize]) -> bool {
        let complete = self.take(out.len());
        to_words(out, self.runs.drain(..).flat_map(Run::into_pages));
        complete
    }

    #[inline]
    fn accept(&mut self, words: &[usize]) {
        self.slots.extend(words.iter().map(|&word| to_page(word)));
        self.put_scattered();
    }
}

/// Pagemill's rows of the table `churn`: one call a page, and the array form.
pub(crate) fn churn_rows() -> Vec<ChurnRow> {
    let mut rows = Vec::new();
    for (name, is_bulk) in [("pagemill-single", false), ("pagemill-array", true)] {
        for (label, backend) in BACKENDS {
            let open = move |pages| {
                let allocator = open(backend, pages)?;
                let frames: Box<dyn Frames> = Box::new(Churned { allocator, held: Vec::with_capacity(pages), is_bulk });
                Ok(frames)
            };
            rows.push(ChurnRow { name, backend: label, kind: Kind::Ours, open: Box::new(open) });
        }
    }
    rows
}

struct Churned {
    allocator: Allocator,
    held: Vec<Option<Page>>,
    is_bulk: bool,
}

impl Frames for Churned {
    fn managed(&self) -> usize {
        self.allocator.managed_pages().get()
    }

    fn held(&self) -> usize {
        self.held.len()
    }

    fn take(&mut self, n: usize) -> bool {
        let before = self.held.len();
        if self.is_bulk {
            self.held.resize_with(before + n, || None);
            let filled = self.allocator.alloc_pages_bulk_array(Bulk::up_to(n), &mut self.held[before..]);
            self.held.truncate(before + filled.map_or(0, |filled| filled.first_hole));
        } else {
            let one = || self.allocator.alloc_page(Gfp::KERNEL).ok().map(Some);
            self.held.extend(std::iter::from_fn(one).take(n));
        }
        self.held.len() == before + n
    }

    fn pick(&mut self, n: usize, rng: &mut fastrand::Rng) {
        pick_to_the_end(&mut self.held, n, rng);
    }

    fn put_last(&mut self, n: usize) {
        let rest = self.held.len() - n;
        if self.is_bulk {
            free_pages_bulk(&mut self.held[rest..]);
        }
        self.held.truncate(rest);
    }

    fn drain(&mut self) {
        self.allocator.drain();
    }

    fn free_huge(&mut self) -> usize {
        let block = || self.allocator.alloc_pages(Gfp::KERNEL, Order::PAGEBLOCK).ok();
        std::iter::from_fn(block).collect::<Vec<_>>().len()
    }
}
