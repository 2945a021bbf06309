//! Random operations on machines that are not there, against the reference model: several nodes, watermarks, all flags,
//! policies and allowed sets, caches that give way, memory that comes and goes; and all of it again with acquisitions
//! that fail (C3.4, C3.6 to C3.8, C3.12 to C3.14).
//!
//! A failing case is shrunk and printed, machine and operations, and its seed kept in `proptest-regressions/`.
use crate::model::config;
use pagemill::{Allocator, Backend, Builder};
use pagemill_model::{Failing, Machine, Op, Raw, World, fake_cpu, set_fake_cpu};
use proptest::prelude::*;
use proptest::test_runner::{TestCaseError, TestRunner};

const CPUS: usize = 5;
/// The bits of [`Raw::a`] that say the mobility.
const MOBILITY: u32 = 7 << 3;

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
        here: true_cpu,
    })
}

fn true_cpu() -> usize {
    // SAFETY: no preconditions.
    unsafe { libc::sched_getcpu() as usize }
}

fn go_to_cpu(which: usize) {
    static ALLOWED: std::sync::OnceLock<Vec<usize>> = std::sync::OnceLock::new();
    // SAFETY: a CPU set is plain bits; zero is an empty one, and the numbers are below its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let allowed = ALLOWED.get_or_init(|| {
            let mut all: libc::cpu_set_t = std::mem::zeroed();
            assert_eq!(libc::sched_getaffinity(libc::getpid(), size_of_val(&all), &mut all), 0);
            (0..libc::CPU_SETSIZE as usize).filter(|&cpu| libc::CPU_ISSET(cpu, &all)).collect()
        });
        libc::CPU_SET(allowed[which % allowed.len()], &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&set), &set), 0);
    }
}

fn raw() -> impl Strategy<Value = Raw> {
    any::<(u8, u32, u32, u32, u32)>().prop_map(|(kind, a, b, c, d)| Raw { kind, a, b, c, d })
}

/// Does `ops` on a machine, gives everything back, and says how many acquisitions failed.
fn live(on: On, machine: &Machine, ops: &[Raw], mask: u32) -> Result<u64, TestCaseError> {
    (on.go)(0);
    let built = machine.build((on.builder)()).map_err(|error| TestCaseError::fail(error.to_string()))?;
    let allocator = built.allocator().clone();
    let mut world = World::over(built, on.go, on.here);
    for (i, &raw) in ops.iter().enumerate() {
        let op = Op::decode(Raw { a: raw.a & mask, ..raw });
        world.apply(op).map_err(|failure| TestCaseError::fail(format!("operation {i}, {op:?}: {failure}")))?;
    }
    let failed = allocator.stats().faults;
    drop(allocator);
    world.finish().map_err(|failure| TestCaseError::fail(format!("at the end: {failure}")))?;
    Ok(failed)
}

fn run<S: Strategy>(cases: u32, strategy: S, test: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let config = config(cases, "proptest-regressions/model_nodes.txt");
    if let Err(failure) = TestRunner::new(config).run(&strategy, test) {
        panic!("{failure}");
    }
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
