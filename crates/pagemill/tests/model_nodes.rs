//! Random operations on machines that are not there, against the reference model: several nodes, watermarks, all flags,
//! policies and allowed sets, caches that give way, memory that comes and goes; and all of it again with acquisitions
//! that fail (C3.4, C3.6 to C3.8, C3.12 to C3.14).
//!
//! A failing case is shrunk and printed, machine and operations, and its seed kept in `proptest-regressions/`.
use crate::common::{allowed_cpus, stay_on, this_cpu};
use crate::model::{MOBILITY, apply, raw};
use pagemill::{Allocator, Backend, Builder};
use pagemill_model::{Failing, Machine, Raw, World, fake_cpu, set_fake_cpu};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use std::sync::OnceLock;

const CPUS: usize = 5;

/// How a machine's CPUs are come by.
#[derive(Clone, Copy)]
struct On {
    builder: fn() -> Builder,
    cpus: usize,
    go: fn(usize),
    here: fn() -> usize,
}

const PORTABLE: On = On {
    builder: || Allocator::builder().cpus(CPUS, fake_cpu),
    cpus: CPUS,
    go: |cpu| set_fake_cpu(cpu % CPUS),
    here: fake_cpu,
};

/// Restartable sequences know the true CPU alone: the thread goes from one to the other.
fn rseq() -> Option<On> {
    if let Err(why) = pagemill::self_test() {
        eprintln!("skipped: the rseq backend ({why})");
        return None;
    }
    go_to_cpu(0);
    Some(On {
        builder: || Allocator::builder().backend(Backend::Rseq),
        cpus: libc::CPU_SETSIZE as usize,
        go: go_to_cpu,
        here: this_cpu,
    })
}

fn go_to_cpu(which: usize) {
    static ALLOWED: OnceLock<Vec<usize>> = OnceLock::new();
    let allowed = ALLOWED.get_or_init(allowed_cpus);
    stay_on(allowed[which % allowed.len()]);
}

/// Does `ops` on a machine, gives everything back, and says how many acquisitions failed.
fn live(on: On, machine: &Machine, ops: &[Raw], mask: u32) -> Result<u64, TestCaseError> {
    (on.go)(0);
    let built = machine.build((on.builder)()).map_err(|error| TestCaseError::fail(error.to_string()))?;
    let allocator = built.allocator().clone();
    let mut world = World::over(built, on.go, on.here);
    apply(&mut world, ops, mask)?;
    let failed = allocator.stats().faults;
    drop(allocator);
    world.finish().map_err(|failure| TestCaseError::fail(format!("at the end: {failure}")))?;
    Ok(failed)
}

fn run<S: Strategy>(cases: u32, strategy: S, test: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    crate::model::run(cases, "proptest-regressions/model_nodes.txt", strategy, test);
}

fn machines(cpus: usize) -> impl Strategy<Value = Machine> {
    raw().prop_map(move |raw| Machine::decode(raw, cpus))
}

fn check(cases: u32, on: On, mask: u32) {
    let ops = proptest::collection::vec(raw(), 1..80);
    run(cases, (machines(on.cpus), ops), |(machine, ops)| live(on, &machine, &ops, mask).map(drop));
}

#[test]
fn portable_agrees_with_the_model() {
    check(300, PORTABLE, !0);
}

#[test]
fn portable_finds_every_page_of_one_mobility() {
    check(400, PORTABLE, !MOBILITY);
}

#[test]
fn rseq_agrees_with_the_model() {
    if let Some(on) = rseq() {
        check(100, on, !0);
        check(200, on, !MOBILITY);
    }
}

fn check_failing(cases: u32, on: On) {
    let percent = proptest::sample::select(&[2u8, 20, 60][..]);
    let failing = (percent, any::<u64>()).prop_map(|(percent, seed)| Failing::Sometimes(percent, seed));
    let ops = proptest::collection::vec(raw(), 1..60);
    run(cases, (machines(on.cpus), failing, ops), |(machine, failing, ops)| {
        live(on, &machine.failing(failing), &ops, !0).map(drop)
    });
}

#[test]
fn failed_acquisitions_lose_no_page() {
    check_failing(150, PORTABLE);
    if let Some(on) = rseq() {
        check_failing(75, on);
    }
}

/// The same operations again and again: all acquisitions fail after none, after one, after two…, until none is left.
fn check_each_failing(cases: u32, on: On) {
    let ops = proptest::collection::vec(raw(), 1..12);
    run(cases, (machines(on.cpus), ops), |(machine, ops)| {
        for after in 0.. {
            if live(on, &machine.clone().failing(Failing::After(after)), &ops, !0)? == 0 {
                break;
            }
        }
        Ok(())
    });
}

#[test]
fn a_failure_of_any_one_acquisition_loses_no_page() {
    check_each_failing(12, PORTABLE);
    if let Some(on) = rseq() {
        check_each_failing(6, on);
    }
}
