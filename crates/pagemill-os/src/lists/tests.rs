//! Drains that wait for other threads at a list, all on one CPU.
use super::*;
use crate::fifo;

const KIND: Mobility = Mobility::Movable;

#[track_caller]
fn assert_sleeps(hold: impl FnOnce(&dyn Fn()) + Send, wait: impl FnOnce() + Send) {
    match fifo::sleeps(hold, wait) {
        Ok(times) => assert!(times > 0, "the waiting thread kept the holder off the CPU"),
        Err(why) => println!("skipped: {why}"),
    }
}

fn list_of_one() -> PerCpu {
    let lists = PerCpu::new(Backend::Portable, 1, || 0).unwrap();
    assert!(lists.push(KIND, 7));
    lists
}

#[test]
fn a_drain_waits_asleep_for_another_one() {
    let lists = list_of_one();
    let hold = |others: &dyn Fn()| assert_eq!(lists.drain(CpuId::new(0), KIND, |_| others()), Some(1));
    assert_sleeps(hold, || assert_eq!(lists.drain(CpuId::new(0), KIND, |_| {}), Some(0)));
}

#[test]
fn a_drain_waits_asleep_for_a_section_of_the_portable_backend() {
    let lists = list_of_one();
    let hold = |others: &dyn Fn()| {
        let section = lists.cpu(CpuId::new(0)).lists[KIND.index()].try_hold().unwrap();
        others();
        drop(section);
    };
    assert_sleeps(hold, || assert_eq!(lists.drain(CpuId::new(0), KIND, |_| {}), Some(1)));
}

#[test]
fn a_drain_waits_for_frames_that_enter_a_depot_that_looks_empty() {
    let lists = list_of_one();
    let hold = |others: &dyn Fn()| {
        let depot = lists.depots().next().unwrap().try_hold().unwrap();
        others();
        assert!(depot.push_n(&[8]));
    };
    assert_sleeps(hold, || assert_eq!(lists.drain_depots(|frames| assert_eq!(frames, [8])), 1));
}

#[test]
fn zero_words_and_more_than_a_batch_are_refused() {
    let backends = [Backend::Portable, Backend::Rseq];
    for lists in backends.into_iter().filter_map(|backend| PerCpu::new(backend, 1, || 0).ok()) {
        for n in [0, Batch::CAPACITY + 1] {
            assert!(!lists.push_words(KIND, &vec![0; n], 0), "{n}");
            let mut words = vec![MaybeUninit::new(0); n];
            // SAFETY: no frame is on the lists.
            assert!(!unsafe { lists.pop_words(KIND, &mut words, 0, std::ptr::null()) }, "{n}");
        }
        assert!(lists.list_here(KIND).is_empty());
    }
}

#[test]
fn a_depot_has_no_room_for_a_length_near_the_maximum() {
    let lists = list_of_one();
    assert_eq!(lists.list_to_depot(KIND, usize::MAX), 0);
    assert_eq!(lists.list_to_depot(KIND, 1), 1);
    assert!(lists.push(KIND, 8));
    assert_eq!(lists.list_to_depot(KIND, usize::MAX), 0);
}
