//! Drains that meet others at a list, on one CPU with those.
use super::*;
use crate::fifo;

const KIND: Mobility = Mobility::Movable;

#[track_caller]
fn assert_sleeps(hold: impl FnOnce(&dyn Fn()) + Send, wait: impl FnOnce() + Send) {
    match fifo::sleeps(hold, wait) {
        Ok(times) => assert!(times > 0, "it kept what it waits for off the CPU"),
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
