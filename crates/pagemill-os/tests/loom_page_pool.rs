//! Interleavings with at most three preemptions, by loom, of a page pool's end and of threads that return or release
//! its pages meanwhile: the source gets each page back once, and what is shared is freed once, by the last to use it.
//! `pagemill` itself is not built for loom, so this test includes the source files of the handle, of what is shared,
//! and of the ring. The consumer's cache is not among them: nobody else touches it.
//!
//! Under loom the atomics of a pool check, as they are freed, that whoever touched them did so before; and the source
//! checks the same of itself.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release -p pagemill-os --test tests loom_page_pool
//! ```
#[expect(unreachable_pub, reason = "these are another crate's")]
#[path = "../../pagemill/src/page_pool/page.rs"]
mod page;
#[expect(dead_code, unreachable_pub, reason = "it is another crate's, and not all of it is tried here")]
#[path = "../../pagemill/src/page_pool/record.rs"]
mod record;
#[path = "../../pagemill/src/page_pool/ring.rs"]
mod ring;
#[path = "../../pagemill/src/page_pool/shared.rs"]
mod shared;
#[expect(unreachable_pub, reason = "as above")]
#[path = "../../pagemill/src/page_pool/stats.rs"]
mod stats;

/// What the source files expect of `pagemill`.
#[expect(unreachable_pub, reason = "the source files have public types over it")]
pub(crate) mod handle {
    pub struct Page(core::num::NonZeroUsize);

    pub mod sealed {
        pub trait Word {
            /// # Safety
            /// The word is that of a page without an owner.
            unsafe fn from_word(word: usize) -> Self;
            fn into_word(self) -> usize;
        }
        impl Word for super::Page {
            unsafe fn from_word(word: usize) -> Self {
                Self(word.try_into().unwrap())
            }
            fn into_word(self) -> usize {
                self.0.get()
            }
        }
    }
}

/// As above.
#[expect(unreachable_pub, reason = "as above")]
pub(crate) mod mempool {
    use core::marker::PhantomData;

    pub trait Source {
        type Item: Send;
        fn free_bulk(&self, slots: &mut [Option<Self::Item>]);
    }
    pub struct PageSource<T>(PhantomData<T>);
    impl<T: Send> Source for PageSource<T> {
        type Item = T;
        fn free_bulk(&self, _: &mut [Option<T>]) {}
    }
}

use loom::cell::UnsafeCell;
use loom::thread;
use mempool::Source;
use page::PoolPage;
use record::Ending;
use shared::SharedPtr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// How often each page came back to the source, and how often the source was dropped. The cells are loom's, which fails
/// if one is read or written by a thread that need not know of the last write.
#[derive(Default)]
struct Seen {
    back: [UnsafeCell<usize>; 3],
    ends: UnsafeCell<usize>,
}

// SAFETY: loom fails if two threads use a cell at the same time.
unsafe impl Sync for Seen {}
// SAFETY: it has numbers.
unsafe impl Send for Seen {}

impl Seen {
    fn back(&self) -> [usize; 3] {
        // SAFETY: loom has checked that nobody writes it.
        self.back.each_ref().map(|times| times.with(|times| unsafe { *times }))
    }
}

fn count(times: &UnsafeCell<usize>) {
    // SAFETY: loom has checked that nobody else uses it.
    times.with_mut(|times| unsafe { *times += 1 });
}

struct Numbers {
    seen: Arc<Seen>,
    /// Read by each use of the source, and written by its end.
    exists: UnsafeCell<()>,
}

impl Source for Numbers {
    type Item = usize;
    fn free_bulk(&self, slots: &mut [Option<usize>]) {
        self.exists.with(|_| ());
        slots.iter_mut().filter_map(Option::take).for_each(|number| count(&self.seen.back[number]));
        self.exists.with(|_| ());
    }
}

impl Drop for Numbers {
    fn drop(&mut self) {
        self.exists.with_mut(|_| ());
        count(&self.seen.ends);
    }
}

type Handle = PoolPage<Numbers>;

/// The consumer of a pool with a ring of so many slots; the pages `out` are handed out, and the others are in its
/// cache.
struct Consumer {
    shared: SharedPtr<Numbers>,
    cached: Vec<usize>,
}

// SAFETY: as for `PagePool`.
unsafe impl Send for Consumer {}

impl Consumer {
    fn new<const OUT: usize>(slots: usize) -> (Self, Arc<Seen>, [Handle; OUT]) {
        let seen = Arc::new(Seen::default());
        let shared = SharedPtr::new(Numbers { seen: Arc::clone(&seen), exists: UnsafeCell::new(()) }, slots);
        shared.get().record.count.fetch_add(seen.back.len(), Relaxed);
        let out = core::array::from_fn(|number| PoolPage::new(number, shared));
        (Self { shared, cached: (OUT..seen.back.len()).collect() }, seen, out)
    }
    fn end(mut self) {
        // SAFETY: as for `PagePool`: this is the one consumer, and gone afterwards.
        unsafe { self.shared.end(|| self.cached.pop()) };
    }
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

fn returns(page: Handle) -> thread::JoinHandle<()> {
    thread::spawn(move || drop(page))
}

fn returns_in_bulk<const N: usize>(pages: [Handle; N]) -> thread::JoinHandle<()> {
    thread::spawn(move || assert_eq!(PoolPage::put_bulk(&mut pages.map(Some)), N))
}

/// All is back, and what is shared has ended.
fn assert_ended(seen: &Seen, back: [usize; 3]) {
    assert_eq!(seen.back(), back);
    // SAFETY: loom has checked that nobody writes it.
    assert_eq!(seen.ends.with(|times| unsafe { *times }), 1);
}

#[test]
fn two_threads_return_pages_while_the_pool_ends() {
    check(|| {
        let (pool, seen, [first, second]) = Consumer::new(2);
        let threads = [returns(first), returns_in_bulk([second])];
        pool.end();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_ended(&seen, [1; 3]);
    });
}

#[test]
fn pages_that_find_the_ring_full_go_to_the_source_while_the_pool_ends() {
    check(|| {
        let (pool, seen, [first, second, third]) = Consumer::new(1);
        let threads = [returns_in_bulk([first, second]), returns(third)];
        pool.end();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_ended(&seen, [1; 3]);
    });
}

#[test]
fn a_page_is_released_and_another_returned_while_the_pool_ends() {
    check(|| {
        let (pool, seen, [first, second]) = Consumer::new(1);
        let releases = thread::spawn(move || assert_eq!(PoolPage::release(first), 0));
        let returns = returns(second);
        pool.end();
        releases.join().unwrap();
        returns.join().unwrap();
        assert_ended(&seen, [0, 1, 1]);
    });
}

#[test]
fn the_consumer_takes_a_page_and_hands_it_out_again_before_the_end() {
    check(|| {
        let (mut pool, seen, [first]) = Consumer::new(2);
        let before = returns(first);
        let shared = pool.shared.get();
        // SAFETY: this thread alone takes.
        unsafe { shared.ring.pop(1, false, |number| pool.cached.push(number)) };
        let again = PoolPage::new(pool.cached.pop().unwrap(), pool.shared);
        let after = returns(again);
        pool.end();
        before.join().unwrap();
        after.join().unwrap();
        assert_ended(&seen, [1; 3]);
    });
}

/// Whoever sees by an [`Ending`] that no page is out may rely on it: the source has them all.
#[test]
fn an_ending_sees_the_last_page_come_back() {
    check(|| {
        let (pool, seen, [first, second]) = Consumer::new(1);
        let ending = Ending { record: Arc::clone(&pool.shared.get().record) };
        // The record of this model is not freed: loom does not know how `Arc` orders that.
        core::mem::forget(Arc::clone(&ending.record));
        let threads = [returns(first), thread::spawn(move || _ = PoolPage::release(second))];
        pool.end();
        let before = ending.in_flight();
        assert!(before <= 2);
        while ending.in_flight() > 0 {
            thread::yield_now();
        }
        assert_eq!(seen.back(), [1, 0, 1]);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_ended(&seen, [1, 0, 1]);
    });
}
