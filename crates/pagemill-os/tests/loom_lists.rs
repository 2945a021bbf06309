//! Every interleaving of the portable lists' callers, by loom: two threads that pop and push, as after a move to another CPU,
//! and a drain. No frame has two owners, none is lost (L1, L3).
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release -p pagemill-os --test tests loom_lists
//! ```
//!
//! With `--cfg pagemill_canary` as well, the lists have a bug, and these tests must fail with "owned twice".
use loom::thread;
use pagemill_os::{Batch, List};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

/// A list, a depot, and the frames that threads own. The lock around the last is std's, so loom does not branch there.
struct Model {
    list: List,
    depot: List,
    owned: Mutex<BTreeSet<u32>>,
}

impl Model {
    /// A list with `frames` and this limit; the threads own frames 100 to 103.
    fn new(frames: &[u32], limit: u32) -> Arc<Self> {
        let list = List::for_model(limit);
        assert!(list.try_push_n(frames));
        Arc::new(Self { list, depot: List::for_model(limit), owned: Mutex::new((100..104).collect()) })
    }

    fn own(&self, frames: &[u32]) {
        let mut owned = self.owned.lock().unwrap();
        frames.iter().for_each(|frame| assert!(owned.insert(*frame), "frame {frame} is owned twice"));
    }

    /// Pops as a caller does, who then owns the frames.
    fn pop(&self, want: usize) -> Vec<u32> {
        let mut batch = Batch::new();
        self.list.try_pop_n(want, &mut batch);
        assert!(batch.len() <= want);
        self.own(batch.as_slice());
        batch.as_slice().to_vec()
    }

    /// Pushes as a caller does, who keeps the frames that the list does not accept.
    fn push(&self, frames: &[u32]) {
        frames.iter().for_each(|frame| assert!(self.owned.lock().unwrap().remove(frame), "{frame} was nobody's"));
        if !self.list.try_push_n(frames) {
            self.own(frames);
        }
    }

    /// Checks that all frames are accounted for.
    fn settle(&self, all: usize) {
        while !self.pop(64).is_empty() || self.list.from_depot_for_model(&self.depot, 64) > 0 {}
        assert!(self.list.is_empty() && self.depot.is_empty());
        assert_eq!(self.owned.lock().unwrap().len(), all, "a frame is lost");
        assert_eq!(self.list.pushed() + self.list.refilled(), self.list.popped() + self.list.drained());
        assert_eq!((self.depot.popped(), self.depot.pushed()), (0, 0), "callers pass depots by");
        assert_eq!(self.depot.refilled(), self.depot.drained());
    }
}

fn explore(preemptions: usize, frames: &'static [u32], limit: u32, threads: [fn(&Model); 3]) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(move || {
        let model = Model::new(frames, limit);
        let others = threads[1..].iter().map(|&run| {
            let model = Arc::clone(&model);
            thread::spawn(move || run(&model))
        });
        let others: Vec<_> = others.collect();
        threads[0](&model);
        others.into_iter().for_each(|thread| thread.join().unwrap());
        model.settle(frames.len() + 4);
    });
}

#[test]
fn two_owners_pop() {
    explore(3, &[1, 2, 3], 8, [|model| drop(model.pop(2)), |model| drop(model.pop(2)), |_| {}]);
}

#[test]
fn one_pops_while_others_push() {
    explore(3, &[1], 8, [|model| drop(model.pop(2)), |model| model.push(&[100, 101]), |model| model.push(&[102])]);
}

#[test]
fn a_frame_refused_by_a_full_list_stays_with_its_owner() {
    explore(3, &[1], 2, [|model| model.push(&[100, 101]), |model| model.push(&[102]), |model| drop(model.pop(1))]);
}

#[test]
fn a_drain_takes_all_while_owners_go_on() {
    explore(
        3,
        &[1, 2],
        8,
        [
            |model| drop(model.drain()),
            |model| {
                let frames = model.pop(1);
                model.push(&frames);
            },
            |model| model.push(&[100]),
        ],
    );
}

#[test]
fn loads_go_through_a_depot_while_it_is_drained() {
    explore(
        3,
        &[1, 2, 3],
        8,
        [
            |model| _ = model.list.to_depot_for_model(&model.depot, 2),
            |model| {
                model.list.from_depot_for_model(&model.depot, 2);
                drop(model.pop(1));
            },
            |model| drop(model.drain_of(&model.depot)),
        ],
    );
}

#[test]
fn a_full_depot_accepts_nothing() {
    explore(
        3,
        &[1, 2],
        2,
        [
            |model| _ = model.list.to_depot_for_model(&model.depot, 2),
            |model| {
                model.list.to_depot_for_model(&model.depot, 1);
                model.list.from_depot_for_model(&model.depot, 1);
            },
            |model| model.push(&[100]),
        ],
    );
}

impl Model {
    /// Drains as a drain does, which holds the list until it is empty.
    fn drain(&self) -> Vec<u32> {
        self.drain_of(&self.list)
    }

    fn drain_of(&self, list: &List) -> Vec<u32> {
        let mut drained = Vec::new();
        // The holder releases the list soon; without a bound loom would try for ever.
        for _ in 0..3 {
            if list.drain_for_model(|frames| drained.extend_from_slice(frames)).is_some() {
                break;
            }
            thread::yield_now();
        }
        self.own(&drained);
        drained
    }
}
