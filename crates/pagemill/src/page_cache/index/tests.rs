//! The index against a `BTreeMap`, and beside threads.
use super::nodes::FAN;
use super::{Index, Mark, Nodes, Occupied, Verdict};
use core::num::NonZeroU32;
use core::ops::ControlFlow;
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::Relaxed;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

fn frame(number: u32) -> NonZeroU32 {
    NonZeroU32::new(number).unwrap()
}

/// Each frame with its marks.
type Model = BTreeMap<u64, (NonZeroU32, [bool; 2])>;

#[derive(Clone, Debug)]
enum Op {
    Insert(u64, u32),
    InsertRun(u64, usize),
    Replace(u64, u32),
    Remove(u64),
    RemoveRange(u64, u64, u32),
    Range(u64, u64, usize),
    Mark(u64, u64, bool),
    Unmark(u64, u64, bool),
    Search(u64, u64),
    GetRun(u64, usize),
}

/// Offsets near the borders of nodes, so that operations meet.
fn offset() -> impl Strategy<Value = u64> {
    let near_border =
        (0_u32..=10, 0_u64..200).prop_map(|(level, add)| (1_u64 << (6 * level)).wrapping_add(add).saturating_sub(100));
    prop_oneof![
        4 => 0_u64..300,
        3 => near_border,
        1 => (0_u64..150).prop_map(|less| u64::MAX - less),
        1 => any::<u64>(),
    ]
}

fn operation() -> impl Strategy<Value = Op> {
    let number = || 1_u32..=u32::MAX;
    let few = || prop_oneof![Just(0), 0_u64..300, any::<u64>()];
    let most = || prop_oneof![0_u64..4, 0_u64..300, any::<u64>()];
    prop_oneof![
        3 => (offset(), number()).prop_map(|(at, frame)| Op::Insert(at, frame)),
        3 => (offset(), 0_usize..200).prop_map(|(at, len)| Op::InsertRun(at, len)),
        1 => (offset(), number()).prop_map(|(at, frame)| Op::Replace(at, frame)),
        2 => offset().prop_map(Op::Remove),
        2 => (offset(), offset(), 1_u32..5).prop_map(|(one, other, of)| Op::RemoveRange(one, other, of)),
        1 => (offset(), offset(), 0_usize..500).prop_map(|(one, other, most)| Op::Range(one, other, most)),
        2 => (offset(), few(), any::<bool>()).prop_map(|(at, more, is_dirty)| Op::Mark(at, at.saturating_add(more), is_dirty)),
        1 => (offset(), few(), any::<bool>()).prop_map(|(at, more, is_dirty)| Op::Unmark(at, at.saturating_add(more), is_dirty)),
        4 => (offset(), most()).prop_map(|(at, max)| Op::Search(at, max)),
        2 => (offset(), 0_usize..100).prop_map(|(at, len)| Op::GetRun(at, len)),
    ]
}

fn mark_of(is_dirty: bool) -> Mark {
    if is_dirty { Mark::Dirty } else { Mark::Writeback }
}

/// By C8.1, from the offsets that are of the sort, in the order in which they are looked at.
fn nearest(mut offsets: impl Iterator<Item = u64>, beyond: u64, max: u64) -> impl Fn(u64) -> u64 {
    let found = if max == 0 { None } else { offsets.next() };
    move |at| if max == 0 { at } else { found.unwrap_or(beyond) }
}

/// The first hole from `at` on, in steps of +1 or -1, up to and with `last`.
fn hole(model: &Model, at: u64, last: u64) -> Option<u64> {
    let mut at = at;
    while model.contains_key(&at) {
        if at == last {
            return None;
        }
        at = if at < last { at + 1 } else { at - 1 };
    }
    Some(at)
}

fn check_search(index: &Index, model: &Model, at: u64, max: u64) {
    let last = at.saturating_add(max.saturating_sub(1));
    let first = at.saturating_sub(max.saturating_sub(1));
    let (after, before) = (at.saturating_add(max), at.saturating_sub(max));
    let up = || model.range(at..=last);
    let present = nearest(up().map(|(&at, _)| at), after, max);
    assert_eq!(index.next_present(at, max), present(at), "next_present({at}, {max})");
    let present = nearest(model.range(first..=at).rev().map(|(&at, _)| at), before, max);
    assert_eq!(index.prev_present(at, max), present(at), "prev_present({at}, {max})");
    let holes = nearest(hole(model, at, last).into_iter(), after, max);
    assert_eq!(index.next_hole(at, max), holes(at), "next_hole({at}, {max})");
    let holes = nearest(hole(model, at, first).into_iter(), before, max);
    assert_eq!(index.prev_hole(at, max), holes(at), "prev_hole({at}, {max})");
    for is_dirty in [false, true] {
        let marked = nearest(up().filter(|(_, entry)| entry.1[usize::from(is_dirty)]).map(|(&at, _)| at), after, max);
        assert_eq!(index.next_marked(mark_of(is_dirty), at, max), marked(at), "next_marked({is_dirty}, {at}, {max})");
    }
}

/// Nodes of a tree with these entries.
fn nodes_for(model: &Model) -> usize {
    let Some((&greatest, _)) = model.last_key_value() else { return 0 };
    let levels = (0..11).find(|&level| level == 10 || greatest >> (6 * (level + 1)) == 0).unwrap() + 1;
    let mut count = 0;
    for level in 1..=levels {
        let mut last = None;
        for at in model.keys().map(|at| at.checked_shr(6 * level).unwrap_or(0)) {
            count += usize::from(last.replace(at) != Some(at));
        }
    }
    count
}

fn apply(index: &Index, model: &mut Model, operation: &Op) {
    match *operation {
        Op::Insert(at, number) => {
            let expected = model.get(&at).map_or(Ok(()), |&(frame, _)| Err(Occupied { at, frame }));
            assert_eq!(index.lock().insert(at, frame(number)), expected);
            model.entry(at).or_insert((frame(number), [false; 2]));
        }
        Op::InsertRun(at, len) => {
            let at = at.min(u64::MAX - (len as u64).saturating_sub(1));
            let frames: Vec<_> = (1..=len as u32).map(frame).collect();
            let offset = |nth: usize| at + nth as u64;
            let occupied = len.checked_sub(1).and_then(|last| model.range(at..=offset(last)).next());
            let expected = occupied.map_or(Ok(()), |(&at, &(frame, _))| Err(Occupied { at, frame }));
            assert_eq!(index.lock().insert_run(at, &frames), expected);
            if expected.is_ok() {
                model.extend(frames.into_iter().enumerate().map(|(nth, frame)| (offset(nth), (frame, [false; 2]))));
            }
        }
        Op::Replace(at, number) => {
            let old = model.get_mut(&at).map(|entry| core::mem::replace(&mut entry.0, frame(number)));
            assert_eq!(index.lock().replace(at, frame(number)), old);
        }
        Op::Remove(at) => assert_eq!(index.lock().remove(at), model.remove(&at).map(|entry| entry.0)),
        Op::RemoveRange(one, other, of) => {
            let mut visited = Vec::new();
            index.lock().remove_range(one..=other, |at, frame| {
                visited.push((at, frame));
                match frame.get() % of {
                    0 => Verdict::Remove,
                    _ => Verdict::Keep,
                }
            });
            let range = if one <= other { model.range(one..=other) } else { model.range(0..0) };
            let expected: Vec<_> = range.map(|(&at, entry)| (at, entry.0)).collect();
            assert_eq!(visited, expected);
            visited.retain(|(_, frame)| frame.get() % of == 0);
            visited.iter().for_each(|(at, _)| _ = model.remove(at));
        }
        Op::Range(one, other, most) => {
            let mut visited = Vec::new();
            index.lock().range(one..=other, |at, frame| {
                visited.push((at, frame));
                if visited.len() > most { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            let range = if one <= other { model.range(one..=other) } else { model.range(0..0) };
            assert_eq!(visited, range.map(|(&at, entry)| (at, entry.0)).take(most + 1).collect::<Vec<_>>());
        }
        Op::Mark(one, other, is_dirty) | Op::Unmark(one, other, is_dirty) => {
            let is_mark = matches!(operation, Op::Mark(..));
            let mut index = index.try_lock().unwrap();
            let mark = mark_of(is_dirty);
            if is_mark {
                index.mark(one..=other, mark)
            } else {
                index.unmark(one..=other, mark)
            }
            model.range_mut(one..=other).for_each(|(_, entry)| entry.1[usize::from(is_dirty)] = is_mark);
            assert!(model.iter().all(|(&at, entry)| index.is_marked(at, mark) == entry.1[usize::from(is_dirty)]));
            assert!(!model.contains_key(&one) || index.is_marked(one, mark) == is_mark);
            assert!(model.contains_key(&other) || !index.is_marked(other, mark));
        }
        Op::Search(at, max) => check_search(index, model, at, max),
        Op::GetRun(at, len) => {
            let mut out = vec![u32::MAX; len];
            let seen = index.get_run(at, &mut out);
            assert_eq!(seen, len.min(FAN - at as usize % FAN));
            for (nth, &number) in out[..seen].iter().enumerate() {
                assert_eq!(NonZeroU32::new(number), model.get(&(at + nth as u64)).map(|entry| entry.0));
            }
            assert!(out[seen..].iter().all(|number| *number == u32::MAX));
        }
    }
}

proptest! {
    #[test]
    fn it_does_what_a_map_does(operations in prop::collection::vec(operation(), 1..150)) {
        let nodes = Nodes::new();
        // One beside it has nodes of the same pool.
        let (index, mut model) = (Index::new(Arc::clone(&nodes)), Model::new());
        let (other, mut model_of_other) = (Index::new(Arc::clone(&nodes)), Model::new());
        for (turn, operation) in operations.iter().enumerate() {
            if turn % 3 == 0 {
                apply(&other, &mut model_of_other, operation);
            } else {
                apply(&index, &mut model, operation);
            }
            prop_assert_eq!(nodes.in_use(), nodes_for(&model) + nodes_for(&model_of_other));
        }
        for (index, model) in [(&index, &model), (&other, &model_of_other)] {
            prop_assert_eq!(index.len(), model.len());
            for (&at, &(frame, _)) in model {
                prop_assert_eq!(index.get(at), Some(frame));
                check_search(index, model, at, 70);
            }
        }
        drop(other);
        prop_assert_eq!(nodes.in_use(), nodes_for(&model));
        drop(index);
        prop_assert_eq!(nodes.in_use(), 0);
    }
}

/// A generator of numbers that needs no crate (xorshift).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

#[test]
fn a_million_sparse_entries_come_and_go() {
    const COUNT: usize = if cfg!(miri) { 30 } else { 1_000_000 };
    let nodes = Nodes::new();
    let index = Index::new(Arc::clone(&nodes));
    let mut random = Random(7);
    let mut model = BTreeMap::new();
    while model.len() < COUNT {
        let at = random.next() >> (model.len() % 44);
        let frame = frame(model.len() as u32 + 1);
        assert_eq!(index.lock().insert(at, frame).is_ok(), !model.contains_key(&at));
        model.entry(at).or_insert(frame);
    }
    assert_eq!(index.len(), COUNT);
    let mut last = None;
    for (&at, &frame) in &model {
        assert_eq!(index.get(at), Some(frame));
        let next = last.map_or(0, |last| last + 1);
        assert_eq!(index.next_present(next, u64::MAX), at);
        assert!(last.is_none_or(|last| index.prev_present(at - 1, u64::MAX) == last));
        last = Some(at);
    }
    model.iter().for_each(|(&at, &frame)| assert_eq!(index.lock().remove(at), Some(frame)));
    assert_eq!((index.len(), nodes.in_use()), (0, 0));
    assert!(nodes.bytes() > 0);
}

#[test]
fn one_writing_that_inserts_and_removes_again_and_again_reuses_nodes() {
    let nodes = Nodes::new();
    let index = Index::new(Arc::clone(&nodes));
    let mut writing = index.lock();
    for _ in 0..1000 {
        writing.insert(u64::MAX, frame(1)).unwrap();
        assert_eq!(writing.remove(u64::MAX), Some(frame(1)));
        assert!(nodes.in_use() < 100);
    }
}

#[test]
fn a_verdict_that_unwinds_leaves_the_index_whole() {
    let index = Index::new(Nodes::new());
    index.lock().insert_run(60, &[frame(1); 10]).unwrap();
    let unwound = std::panic::catch_unwind(core::panic::AssertUnwindSafe(|| {
        index.lock().remove_range(0..=u64::MAX, |at, _| {
            if at == 66 { std::panic::resume_unwind(Box::new(())) } else { Verdict::Remove }
        });
    }));
    assert!(unwound.is_err());
    assert_eq!((index.len(), index.next_present(0, u64::MAX)), (6, 64));
    assert!(index.try_lock().is_some_and(|mut index| index.insert(60, frame(2)).is_ok()));
}

#[test]
fn a_locked_index_can_be_read() {
    let index = Index::new(Nodes::new());
    let mut writing = index.lock();
    writing.insert(5, frame(1)).unwrap();
    assert!(index.try_lock().is_none());
    assert_eq!((index.get(5), writing.get(5)), (Some(frame(1)), Some(frame(1))));
}

/// Two indexes of one pool are written to, each by a thread; all readers look at both. Every tenth entry or so stays, and is
/// always found; frames tell the index and the offset.
#[test]
fn entries_that_stay_are_found_beside_writers() {
    const OFFSETS: [u64; 6] = [0, 63, 64, 4096, 1 << 18, (1 << 30) + 5];
    const ROUNDS: usize = if cfg!(miri) { 12 } else { 1_000_000 };
    let nodes = Nodes::new();
    let indexes = [0, 1].map(|_| Index::new(Arc::clone(&nodes)));
    let number = |which: usize, at: u64| frame(((at % 1_000_003) as u32) << 1 | which as u32 | 1 << 31);
    let stays = |at: u64| at == 0 || at == 200;
    for (which, index) in indexes.iter().enumerate() {
        for at in [0, 200] {
            index.lock().insert(at, number(which, at)).unwrap();
        }
    }
    let ends = AtomicBool::new(false);
    let write = |which: usize| {
        let (index, mut random) = (&indexes[which], Random(which as u64 + 1));
        for _ in 0..ROUNDS {
            let at = OFFSETS[random.below(6) as usize] + random.below(8);
            let mut index = index.lock();
            match random.below(4) {
                0 => index.remove_range(1..=u64::MAX, |at, _| if stays(at) { Verdict::Keep } else { Verdict::Remove }),
                1 if !stays(at) => _ = index.remove(at),
                2 => _ = index.insert_run(at, &[0, 1, 2].map(|more| number(which, at + more))),
                _ => _ = index.insert(at, number(which, at)),
            }
        }
    };
    let read = |seed: u64| {
        let (mut random, mut run) = (Random(seed), [0; FAN]);
        while !ends.load(Relaxed) {
            for (which, index) in indexes.iter().enumerate() {
                assert_eq!(index.get(0), Some(number(which, 0)));
                assert_eq!(index.get(200), Some(number(which, 200)));
                assert_eq!((index.get_run(200, &mut run), run[0]), (FAN - 200 % FAN, number(which, 200).get()));
                let next = index.next_present(1, u64::MAX);
                assert!((1..=200).contains(&next), "{next}");
                let before = index.prev_present(1 << 40, u64::MAX);
                assert!((200..1 << 31).contains(&before), "{before}");
                // No one enters what begins at 100 and 1 << 29.
                assert_eq!(index.next_hole(100, 3), 100);
                assert_eq!(index.prev_hole(1 << 29, 3), 1 << 29);
                let at = OFFSETS[random.below(6) as usize] + random.below(8);
                assert!(index.get(at).is_none_or(|frame| frame == number(which, at)));
                let seen = index.get_run(at, &mut run);
                for (&found, at) in run[..seen].iter().zip(at..) {
                    assert!(found == 0 || found == number(which, at).get());
                }
            }
        }
    };
    std::thread::scope(|scope| {
        let readers = [11, 12].map(|seed| scope.spawn(move || read(seed)));
        let writers = [0, 1].map(|which| scope.spawn(move || write(which)));
        let written = writers.map(|writer| writer.join());
        ends.store(true, Relaxed);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        written.into_iter().for_each(Result::unwrap);
    });
    drop(indexes);
    assert_eq!(nodes.in_use(), 0);
}
