//! The subject for all allocators that hand out one page a call. It holds addresses in a vector, as a C program would
//! hold pointers in an array.

use crate::subject::Subject;

/// An allocator of single pages.
pub(crate) trait OnePage {
    /// [`Subject::fit`].
    fn fit(&mut self, _n: usize) {}

    /// The address of a page; 0 if there is none.
    fn get(&mut self) -> usize;

    /// Frees a page that [`OnePage::get`] of this instance or of another thread's handed out.
    fn put_back(&mut self, addr: usize);

    /// Whether another thread's instance may free a page.
    const HANDS_OVER: bool = true;
}

/// Allocates and frees one page at a time.
pub(crate) struct OneByOne<A> {
    source: A,
    held: Vec<usize>,
}

impl<A: OnePage> OneByOne<A> {
    pub(crate) fn new(source: A, most_held: usize) -> Self {
        OneByOne { source, held: Vec::with_capacity(most_held) }
    }
}

impl<A: OnePage> Subject for OneByOne<A> {
    fn fit(&mut self, n: usize) {
        self.source.fit(n);
    }

    #[inline]
    fn take(&mut self, n: usize) -> bool {
        for _ in 0..n {
            let addr = self.source.get();
            if addr == 0 {
                return false;
            }
            self.held.push(addr);
        }
        true
    }

    #[inline]
    fn put(&mut self) {
        for &addr in &self.held {
            self.source.put_back(addr);
        }
        self.held.clear();
    }

    fn shuffle(&mut self, rng: &mut fastrand::Rng) {
        rng.shuffle(&mut self.held);
    }

    fn addresses(&mut self) -> Vec<usize> {
        self.held.clone()
    }

    fn hands_over(&self) -> bool {
        A::HANDS_OVER
    }

    #[inline]
    fn give(&mut self, out: &mut [usize]) -> bool {
        for slot in out {
            *slot = self.source.get();
            if *slot == 0 {
                return false;
            }
        }
        true
    }

    #[inline]
    fn accept(&mut self, words: &[usize]) {
        for &addr in words {
            self.source.put_back(addr);
        }
    }
}
