//! Interleavings with at most three preemptions, by loom, of threads that put into the ring of a page pool, of the consumer that takes from it, and of
//! its end: each item comes out once, or stays with the thread that has it. `pagemill` itself is not built for loom, so this
//! test includes the source file of the ring.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release -p pagemill-os --test tests loom_ring
//! ```
#[path = "../../pagemill/src/page_pool/ring.rs"]
mod ring;

use loom::sync::Arc;
use loom::thread;
use ring::Ring;

/// A thread that puts `items` into the ring, in one section if there is room. Returns those that found none, or came after
/// the end.
fn puts<const N: usize>(ring: &Arc<Ring<usize>>, items: [usize; N]) -> thread::JoinHandle<Vec<usize>> {
    let ring = Arc::clone(ring);
    thread::spawn(move || {
        let mut left = items.into_iter();
        // SAFETY: the `Arc` keeps the ring.
        let _pushed = unsafe { Ring::push(&raw const *ring, N, || left.next().unwrap()) };
        left.collect()
    })
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// Takes what is there, while threads put items in, and the rest at the end: each item is somewhere, once.
fn each_is_somewhere_once<const N: usize>(capacity: usize, takes: usize, of: &'static [[usize; N]]) {
    check(move || {
        let ring = Arc::new(Ring::new(capacity));
        let threads: Vec<_> = of.iter().map(|items| puts(&ring, *items)).collect();
        let mut seen = Vec::new();
        for _ in 0..takes {
            // SAFETY: this thread alone takes.
            unsafe { ring.pop(1, false, |item| seen.push(item)) };
        }
        ring.end();
        // SAFETY: as above.
        while unsafe { ring.pop(usize::MAX, false, |item| seen.push(item)) } > 0 || ring.positions().len() > 0 {
            thread::yield_now();
        }
        for thread in threads {
            seen.extend(thread.join().unwrap());
        }
        seen.sort_unstable();
        let mut all = of.concat();
        all.sort_unstable();
        assert_eq!(seen, all);
    });
}

#[test]
fn two_threads_put_items_in_while_one_takes_them() {
    each_is_somewhere_once(2, 2, &[[1], [2]]);
}

#[test]
fn many_at_once_are_cut_off_by_a_full_ring_or_its_end() {
    each_is_somewhere_once(2, 1, &[[1, 2, 3]]);
}

#[test]
fn a_slot_is_used_again_once_it_was_emptied() {
    each_is_somewhere_once(1, 2, &[[1], [2]]);
}
