//! Interleavings with at most three preemptions, by loom, of readers of a page cache's index and of writers that insert,
//! remove, and have nodes go from one index to another: what stays is found, and no reader gets another index's frame.
//! `pagemill` itself is not built for loom, so this test includes the source files of the index. Nodes have four slots
//! here.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release -p pagemill-os --test tests loom_page_cache_index
//! ```
#[expect(dead_code, unused_imports, reason = "it is another crate's, and not all of it is tried here")]
#[path = "../../pagemill/src/page_cache/index/mod.rs"]
mod index;

use core::num::NonZeroU32;
use index::{Index, Nodes, Verdict};
use loom::thread;
use std::sync::Arc;

fn frame(number: u32) -> NonZeroU32 {
    NonZeroU32::new(number).unwrap()
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// Two indexes of one pool. The first has frame 1 at offset 1, which stays.
fn two() -> [Arc<Index>; 2] {
    let nodes = Nodes::new();
    let indexes = [0, 1].map(|_| Arc::new(Index::new(Arc::clone(&nodes))));
    indexes[0].lock().insert(1, frame(1)).unwrap();
    indexes
}

/// Both run at the same time. In the first schedule the writer comes first: a reader afterwards may still see all values
/// that were there, so loom tries these. In the other order it would try nothing: it compares a store with the last
/// access only, which is the writer's own load.
fn beside(write: impl FnOnce(), read: impl FnOnce() + Send + 'static) {
    let reader = thread::spawn(read);
    write();
    reader.join().unwrap();
}

#[test]
fn an_entry_is_found_while_the_tree_grows() {
    check(|| {
        let [index, _] = two();
        let reads = Arc::clone(&index);
        beside(
            || index.lock().insert(4, frame(2)).unwrap(),
            move || {
                assert_eq!(reads.get(1), Some(frame(1)));
                assert!(reads.get(4).is_none_or(|found| found == frame(2)));
                assert_eq!(reads.next_present(0, 4), 1);
            },
        );
        assert_eq!(index.get(4), Some(frame(2)));
    });
}

/// The root that a reader is in becomes the node of another index.
#[test]
fn an_entry_is_found_while_the_tree_shrinks_and_its_root_is_reused() {
    check(|| {
        let [index, other] = two();
        index.lock().insert(4, frame(2)).unwrap();
        let reads = Arc::clone(&index);
        beside(
            || {
                assert_eq!(index.lock().remove(4), Some(frame(2)));
                other.lock().insert(5, frame(3)).unwrap();
            },
            move || assert_eq!(reads.get(1), Some(frame(1))),
        );
    });
}

#[test]
fn a_run_is_read_while_the_tree_shrinks_and_its_root_is_reused() {
    check(|| {
        let [index, other] = two();
        index.lock().insert(4, frame(2)).unwrap();
        let reads = Arc::clone(&index);
        beside(
            || {
                assert_eq!(index.lock().remove(4), Some(frame(2)));
                other.lock().insert(5, frame(3)).unwrap();
            },
            move || {
                let mut run = [9; 2];
                assert_eq!((reads.get_run(1, &mut run), run), (2, [1, 0]));
            },
        );
    });
}

#[test]
fn searches_find_what_stays_while_the_tree_shrinks_and_its_root_is_reused() {
    check(|| {
        let [index, other] = two();
        index.lock().insert(4, frame(2)).unwrap();
        let reads = Arc::clone(&index);
        beside(
            || {
                assert_eq!(index.lock().remove(4), Some(frame(2)));
                other.lock().insert(6, frame(3)).unwrap();
            },
            move || assert_eq!(reads.next_present(0, 8), 1),
        );
    });
}

/// The leaf that a reader is in becomes a leaf of another index, at the same offset and with the same slot in use.
#[test]
fn a_reader_in_a_reused_leaf_gets_no_frame_of_another_index() {
    check(|| {
        let [index, other] = two();
        index.lock().insert(4, frame(2)).unwrap();
        let reads = Arc::clone(&index);
        beside(
            || {
                assert_eq!(index.lock().remove(4), Some(frame(2)));
                other.lock().insert(4, frame(3)).unwrap();
            },
            move || assert!(reads.get(4).is_none_or(|found| found == frame(2))),
        );
    });
}

/// As above, by the forms for runs.
#[test]
fn a_reader_of_a_run_in_a_reused_leaf_gets_no_frame_of_another_index() {
    check(|| {
        let [index, other] = two();
        index.lock().insert_run(4, &[frame(2); 2]).unwrap();
        let reads = Arc::clone(&index);
        beside(
            || {
                index.lock().remove_range(4..=u64::MAX, |_, _| Verdict::Remove);
                other.lock().insert_run(0, &[frame(3); 2]).unwrap();
            },
            move || {
                let mut run = [9; 2];
                assert_eq!(reads.get_run(4, &mut run), 2);
                assert!(run.iter().all(|&found| found == 0 || found == 2), "{run:?}");
            },
        );
    });
}

/// A third thread writes to the other index, when it gets to it.
#[test]
fn a_node_changes_hands_between_threads() {
    check(|| {
        let [index, other] = two();
        index.lock().insert(4, frame(2)).unwrap();
        let reads = Arc::clone(&index);
        let takes = thread::spawn(move || other.lock().insert(0, frame(3)).unwrap());
        beside(
            || assert_eq!(index.lock().remove(4), Some(frame(2))),
            move || assert!(reads.get(4).is_none_or(|found| found == frame(2))),
        );
        takes.join().unwrap();
    });
}
