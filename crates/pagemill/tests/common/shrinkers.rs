//! Shrinkers.
use pagemill::{Page, Shrink, Shrinker, ShrinkerDoes};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

/// Counts its calls, and answers with a function of the call's number, from 1 on, and of what is wanted.
pub(crate) struct Calls<F>(AtomicUsize, F);

impl<F: Fn(usize, Shrink) -> usize + Send + Sync> Calls<F> {
    pub(crate) fn new(answer: F) -> Arc<Self> {
        Arc::new(Self(AtomicUsize::new(0), answer))
    }
    pub(crate) fn so_far(&self) -> usize {
        self.0.load(Relaxed)
    }
}

impl<F: Fn(usize, Shrink) -> usize + Send + Sync> Shrinker for Calls<F> {
    fn shrink(&self, wanted: Shrink) -> usize {
        (self.1)(self.0.fetch_add(1, Relaxed) + 1, wanted)
    }
}

/// Panics.
pub(crate) fn panics() -> Arc<impl Shrinker> {
    Calls::new(|_, _| panic!("a shrinker that panics on purpose"))
}

/// A cache: has pages, counts its calls, and gives from call number `from` on, `most` pages a call at most.
pub(crate) struct Cache {
    pub(crate) pages: Mutex<Vec<Page>>,
    pub(crate) calls: AtomicUsize,
    pub(crate) from: usize,
    pub(crate) most: usize,
    pub(crate) does: ShrinkerDoes,
}

impl Cache {
    pub(crate) fn of(pages: impl IntoIterator<Item = Page>) -> Self {
        let pages = Mutex::new(pages.into_iter().collect());
        Self { pages, calls: AtomicUsize::new(0), from: 1, most: usize::MAX, does: ShrinkerDoes::Nothing }
    }
    pub(crate) fn calls(&self) -> usize {
        self.calls.load(Relaxed)
    }
    pub(crate) fn len(&self) -> usize {
        self.pages.lock().unwrap().len()
    }
    pub(crate) fn extend(&self, pages: impl IntoIterator<Item = Page>) {
        self.pages.lock().unwrap().extend(pages);
    }
    pub(crate) fn clear(&self) {
        self.pages.lock().unwrap().clear();
    }
}

impl Shrinker for Cache {
    fn shrink(&self, wanted: Shrink) -> usize {
        if self.calls.fetch_add(1, Relaxed) + 1 < self.from {
            return 0;
        }
        // A fork copies this lock too, and the thread that held it is not in the child.
        let Ok(mut pages) = self.pages.try_lock() else { return 0 };
        let rest = pages.len().saturating_sub(wanted.pages.min(self.most));
        pages.drain(rest..).count()
    }
    fn does(&self) -> ShrinkerDoes {
        self.does
    }
}
