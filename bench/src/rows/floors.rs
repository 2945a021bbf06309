//! The floors: the cost of moving a page's address when nothing is managed.
//!
//! - `memcpy`: copies N words from one array to another, once; freeing does nothing. No list that hands out N addresses
//!   can be faster.
//! - `tls-vec`: a thread-local `Vec` of addresses; push and pop for one page, `extend_from_slice` and
//!   `truncate` for more.
//!
//! Both copy [`PIECE`] words at a time: in one piece, some AMD processors copy 1024 words ten times slower than a list
//! hands them out, if the two arrays lie alike in their pages (the C library copies with `rep movsb` then).
//!
//! - `tls-refcell`: the same in a `RefCell`, as a program without `unsafe` writes it.
//! - [`Baton`]: hands the same words to another thread without allocating; the floor of handing over.

use std::cell::{RefCell, UnsafeCell};
use std::marker::PhantomData;
use std::sync::Arc;

use crate::rows::region::Region;
use crate::rows::{Kind, Need, Row, Site, Unavailable};
use crate::subject::Subject;

pub(crate) fn rows() -> Vec<Row> {
    vec![
        Row::plain("memcpy", Kind::Floor, |need: Need| {
            let region = Arc::new(Region::new(need.pages)?);
            let site: Site = Box::new(move |most_held| {
                let stock: Vec<usize> = region.words().take(most_held).collect();
                Box::new(Memcpy { held: vec![0; stock.len()], stock, len: 0, _region: Arc::clone(&region) })
            });
            Ok(site)
        }),
        Row::plain("tls-vec", Kind::Floor, tls_site::<Raw>),
        Row::plain("tls-refcell", Kind::Floor, tls_site::<Checked>),
    ]
}

/// Words that are copied at once, as many as `mutex-vec` moves under its lock.
const PIECE: usize = 64;

struct Memcpy {
    stock: Vec<usize>,
    held: Vec<usize>,
    len: usize,
    _region: Arc<Region>,
}

impl Subject for Memcpy {
    #[inline]
    fn take(&mut self, n: usize) -> bool {
        if n > self.stock.len() {
            return false;
        }
        for (to, from) in self.held[..n].chunks_mut(PIECE).zip(self.stock.chunks(PIECE)) {
            to.copy_from_slice(&from[..to.len()]);
        }
        self.len = n;
        true
    }

    #[inline]
    fn put(&mut self) {
        self.len = 0;
    }

    fn shuffle(&mut self, rng: &mut fastrand::Rng) {
        rng.shuffle(&mut self.held[..self.len]);
    }

    fn addresses(&mut self) -> Vec<usize> {
        self.held[..self.len].to_vec()
    }

    fn hands_over(&self) -> bool {
        false
    }

    fn give(&mut self, _out: &mut [usize]) -> bool {
        false
    }

    fn accept(&mut self, _words: &[usize]) {}
}

fn tls_site<L: Lend + 'static>(need: Need) -> Result<Site, Unavailable> {
    let region = Arc::new(Region::new(need.pages)?);
    Ok(Box::new(move |most_held| Box::new(TlsVec::<L>::new(Arc::clone(&region), most_held))))
}

thread_local! {
    static RAW: UnsafeCell<Vec<usize>> = const { UnsafeCell::new(Vec::new()) };
    static CHECKED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// How a thread accesses its stock.
trait Lend {
    fn with<R>(body: impl FnOnce(&mut Vec<usize>) -> R) -> R;
}

/// Without `RefCell`'s flag, which would be written four times a page.
struct Raw;

impl Lend for Raw {
    #[inline]
    fn with<R>(body: impl FnOnce(&mut Vec<usize>) -> R) -> R {
        // Only the address comes out of `with`, so that the compiler inlines it. In some builds it did not, and a page
        // cost 4.6 ns instead of 2.3.
        let stock = RAW.with(UnsafeCell::get);
        // SAFETY: the stock is this thread's own, and no body in this file lends it again inside of itself.
        body(unsafe { &mut *stock })
    }
}

/// As a program without `unsafe` writes it.
struct Checked;

impl Lend for Checked {
    #[inline]
    fn with<R>(body: impl FnOnce(&mut Vec<usize>) -> R) -> R {
        CHECKED.with_borrow_mut(body)
    }
}

struct TlsVec<L: Lend> {
    held: Vec<usize>,
    _region: Arc<Region>,
    _lend: PhantomData<L>,
}

impl<L: Lend> TlsVec<L> {
    fn new(region: Arc<Region>, most_held: usize) -> Self {
        L::with(|stock| *stock = region.words().collect());
        TlsVec { held: Vec::with_capacity(most_held), _region: region, _lend: PhantomData }
    }
}

impl<L: Lend> Drop for TlsVec<L> {
    fn drop(&mut self) {
        L::with(|stock| *stock = Vec::new());
    }
}

impl<L: Lend> Subject for TlsVec<L> {
    #[inline]
    fn take(&mut self, n: usize) -> bool {
        L::with(|stock| {
            if n == 1 {
                let Some(addr) = stock.pop() else { return false };
                self.held.push(addr);
                return true;
            }
            let Some(rest) = stock.len().checked_sub(n) else { return false };
            stock[rest..].chunks(PIECE).for_each(|piece| self.held.extend_from_slice(piece));
            stock.truncate(rest);
            true
        })
    }

    #[inline]
    fn put(&mut self) {
        L::with(|stock| match self.held.as_slice() {
            &[addr] => stock.push(addr),
            held => held.chunks(PIECE).for_each(|piece| stock.extend_from_slice(piece)),
        });
        self.held.clear();
    }

    fn shuffle(&mut self, rng: &mut fastrand::Rng) {
        rng.shuffle(&mut self.held);
    }

    fn addresses(&mut self) -> Vec<usize> {
        self.held.clone()
    }

    fn hands_over(&self) -> bool {
        false
    }

    fn give(&mut self, _out: &mut [usize]) -> bool {
        false
    }

    fn accept(&mut self, _words: &[usize]) {}
}

/// Hands over the same words again and again: the cost of handing over when nothing is allocated.
pub(crate) struct Baton;

impl Subject for Baton {
    fn take(&mut self, _n: usize) -> bool {
        false
    }

    fn put(&mut self) {}

    fn shuffle(&mut self, _rng: &mut fastrand::Rng) {}

    fn addresses(&mut self) -> Vec<usize> {
        Vec::new()
    }

    fn supports(&self, _n: usize) -> bool {
        false
    }

    #[inline]
    fn give(&mut self, out: &mut [usize]) -> bool {
        std::hint::black_box(out);
        true
    }

    #[inline]
    fn accept(&mut self, words: &[usize]) {
        // Reads every word, as a row that frees pages must.
        std::hint::black_box(words.iter().fold(0, |sum: usize, &word| sum.wrapping_add(word)));
    }
}
