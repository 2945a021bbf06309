//! The floors: what moving a page's address costs when nothing is managed.
//!
//! - `memcpy`: copies N words from one array to another, once; putting back is nothing. No list that hands out N
//!   addresses can undercut it.
//! - `tls-vec`: a thread-local `Vec` of addresses; push and pop for one page, `extend_from_slice` and
//!   `truncate` for more.
//! - [`Baton`]: hands the same words to another thread without allocating; the floor of handing over.

use std::cell::UnsafeCell;
use std::sync::Arc;

use crate::rows::region::Region;
use crate::rows::{Kind, Row, Site};
use crate::subject::Subject;

pub(crate) fn rows() -> Vec<Row> {
    vec![
        Row::plain("memcpy", Kind::Floor, |need| {
            let region = Arc::new(Region::new(need.pages)?);
            let site: Site = Box::new(move |most_held| {
                let stock: Vec<usize> = region.words().take(most_held).collect();
                Box::new(Memcpy { held: vec![0; stock.len()], stock, len: 0, _region: Arc::clone(&region) })
            });
            Ok(site)
        }),
        Row::plain("tls-vec", Kind::Floor, |need| {
            let region = Arc::new(Region::new(need.pages)?);
            let site: Site = Box::new(move |most_held| Box::new(TlsVec::new(Arc::clone(&region), most_held)));
            Ok(site)
        }),
    ]
}

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
        self.held[..n].copy_from_slice(&self.stock[..n]);
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

thread_local! {
    static STOCK: UnsafeCell<Vec<usize>> = const { UnsafeCell::new(Vec::new()) };
}

/// Lends the thread's stock. Without `RefCell`'s flag, which would be written four times a page: a floor has no more
/// to do than it must.
#[inline]
fn with_stock<R>(body: impl FnOnce(&mut Vec<usize>) -> R) -> R {
    // SAFETY: the stock is this thread's own, and no body in this file lends it again inside of itself.
    STOCK.with(|stock| body(unsafe { &mut *stock.get() }))
}

struct TlsVec {
    held: Vec<usize>,
    _region: Arc<Region>,
}

impl TlsVec {
    fn new(region: Arc<Region>, most_held: usize) -> TlsVec {
        with_stock(|stock| *stock = region.words().collect());
        TlsVec { held: Vec::with_capacity(most_held), _region: region }
    }
}

impl Drop for TlsVec {
    fn drop(&mut self) {
        with_stock(|stock| *stock = Vec::new());
    }
}

impl Subject for TlsVec {
    #[inline]
    fn take(&mut self, n: usize) -> bool {
        with_stock(|stock| {
            if n == 1 {
                let Some(addr) = stock.pop() else { return false };
                self.held.push(addr);
                return true;
            }
            let Some(rest) = stock.len().checked_sub(n) else { return false };
            self.held.extend_from_slice(&stock[rest..]);
            stock.truncate(rest);
            true
        })
    }

    #[inline]
    fn put(&mut self) {
        with_stock(|stock| match self.held.as_slice() {
            &[addr] => stock.push(addr),
            held => stock.extend_from_slice(held),
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

/// Hands over the same words again and again: what crossing costs when nothing is allocated.
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
        // Reads every word, as whoever frees pages must.
        std::hint::black_box(words.iter().fold(0, |sum: usize, &word| sum.wrapping_add(word)));
    }
}
