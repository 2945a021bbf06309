//! Random operations against the reference model: every form, every order, misuse, drains and CPUs, on both backends.
//!
//! A failing case is shrunk, printed, and its seed kept in `proptest-regressions/`. What several threads do at once
//! cannot be shrunk: that test prints its seed.
use pagemill::{Allocator, Backend};
use pagemill_model::{Ledger, Op, Raw, Rng, World, fake_cpu, set_fake_cpu};
use proptest::prelude::*;
use proptest::test_runner::{FileFailurePersistence, TestCaseError, TestRunner};
use std::sync::Arc;

/// Sizes around those where paths part: one page, no pageblock, a last one that is cut short, many.
const SMALL: [usize; 8] = [1, 2, 100, 512, 600, 1500, 4096, 20_001];
/// Large enough for a block of 1 GiB, and a second one that does not fit. Address space, mostly.
const LARGE: usize = (1 << 18) * 2 - 77;
const CPUS: usize = 3;

fn portable(pages: usize) -> Option<Allocator> {
    let builder = Allocator::builder().pages(pages).huge_pages(false);
    Some(builder.cpus(CPUS, fake_cpu).build().unwrap())
}

fn rseq(pages: usize) -> Option<Allocator> {
    if let Err(why) = pagemill::self_test() {
        eprintln!("skipped: the rseq backend ({why})");
        return None;
    }
    Some(Allocator::builder().pages(pages).huge_pages(false).backend(Backend::Rseq).build().unwrap())
}

pub(crate) fn raw() -> impl Strategy<Value = Raw> {
    any::<(u8, u32, u32, u32, u32)>().prop_map(|(kind, a, b, c, d)| Raw { kind, a, b, c, d })
}

/// The bits of [`Raw::a`] that say the mobility.
pub(crate) const MOBILITY: u32 = 7 << 3;

/// Does `ops` in a world.
pub(crate) fn apply(world: &mut World, ops: &[Raw], mask: u32) -> Result<(), TestCaseError> {
    for (i, &raw) in ops.iter().enumerate() {
        let op = Op::decode(Raw { a: raw.a & mask, ..raw });
        world.apply(op).map_err(|failure| TestCaseError::fail(format!("operation {i}, {op:?}: {failure}")))?;
    }
    Ok(())
}

/// Does `ops` with an allocator of its own, and then gives everything back.
fn live(allocator: Allocator, ops: &[Raw], mask: u32) -> Result<(), TestCaseError> {
    set_fake_cpu(0);
    let mut world = World::alone(allocator.clone(), set_fake_cpu);
    apply(&mut world, ops, mask)?;
    world.finish().map_err(|failure| TestCaseError::fail(format!("at the end: {failure}")))?;
    allocator.close().map_err(|still_out| TestCaseError::fail(still_out.to_string()))
}

/// `usual` cases, or operations; more or fewer in proportion with PROPTEST_CASES, which is how many cases a test has that
/// usually has 300.
fn scaled(usual: u32) -> u32 {
    match std::env::var_os("PROPTEST_CASES") {
        None => usual,
        Some(_) => (u64::from(usual) * u64::from(ProptestConfig::default().cases) / 300).max(1) as u32,
    }
}

/// The configuration of a test that usually has so many cases, with the file of its failures.
fn config(cases: u32, failures: &'static str) -> ProptestConfig {
    ProptestConfig {
        cases: scaled(cases),
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(failures))),
        ..ProptestConfig::default()
    }
}

/// Tries a test that usually has so many cases, and keeps its failures in that file.
pub(crate) fn run<S: Strategy>(
    cases: u32,
    failures: &'static str,
    strategy: S,
    test: impl Fn(S::Value) -> Result<(), TestCaseError>,
) {
    if let Err(failure) = TestRunner::new(config(cases, failures)).run(&strategy, test) {
        panic!("{failure}");
    }
}

fn check(cases: u32, sizes: &'static [usize], build: fn(usize) -> Option<Allocator>, mask: u32) {
    let strategy = (proptest::sample::select(sizes), proptest::collection::vec(raw(), 1..120));
    run(cases, "proptest-regressions/model.txt", strategy, |(pages, ops)| {
        build(pages).map_or(Ok(()), |allocator| live(allocator, &ops, mask))
    });
}

#[test]
fn portable_agrees_with_the_model() {
    check(300, &SMALL, portable, !0);
}

#[test]
fn portable_finds_every_page_of_one_mobility() {
    check(200, &SMALL, portable, !MOBILITY);
}

#[test]
fn rseq_agrees_with_the_model() {
    check(200, &SMALL, rseq, !0);
}

#[test]
fn large_arenas_agree_with_the_model() {
    check(8, &[LARGE], portable, !0);
    check(8, &[LARGE], rseq, !0);
}

/// Four worlds on one allocator: no page has two owners.
fn share(allocator: Allocator, seed: u64, ops: u32) {
    const THREADS: u32 = 4;
    let ledger = Arc::new(Ledger::new(&allocator));
    let most = ledger.frames() / 3;
    let live = &|who: u32| -> Result<(), String> {
        let mut rng = Rng::new(seed + u64::from(who));
        let mut world = World::shared(allocator.clone(), Arc::clone(&ledger), who, most, set_fake_cpu);
        for _ in 0..ops {
            let op = Op::decode(rng.raw());
            if !op.is_misuse() {
                world.apply(op).map_err(|failure| format!("{op:?}: {failure}"))?;
            }
        }
        world.finish().map_err(|failure| format!("at the end: {failure}"))
    };
    let failures: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..=THREADS).map(|who| scope.spawn(move || live(who))).collect();
        let said = |what| format!("a thread panicked: {what:?}");
        threads.into_iter().filter_map(|thread| thread.join().map_err(said).and_then(|done| done).err()).collect()
    });
    // With two owners of a frame every later step may fail: the allocator's own findings say why.
    let stats = allocator.stats();
    let found = match stats.quarantined + stats.misused {
        0 => String::new(),
        found => format!("a frame owned twice, by what the allocator found {found} times; "),
    };
    assert!(failures.is_empty(), "seed {seed}: {found}{}", failures.join("; "));
    assert_eq!(stats.quarantined, 0, "seed {seed}: a frame owned twice was put in quarantine");
    assert_eq!(stats.misused, 0, "seed {seed}: a free of what its owner had was refused, or a frame owned twice");
    let census = allocator.validate().unwrap();
    assert_eq!(census.handed_out, 0, "seed {seed}: frames are lost");
    assert_eq!(stats.allocated, stats.freed, "seed {seed}");
    allocator.close().unwrap();
}

#[test]
fn worlds_that_share_an_allocator_share_no_page() {
    for (seed, pages) in [(1, 300), (2, 3000), (3, 20_000)] {
        share(portable(pages).unwrap(), seed, scaled(4000));
        if let Some(allocator) = rseq(pages) {
            share(allocator, seed, scaled(4000));
        }
    }
}
