//! The steps of the checks, in their order: steps that are quick and often fail come first. Each belongs to a [`Tier`].

use anyhow::{Result, bail};
use clap::ValueEnum;

use crate::paths;
use crate::shell::Shell;
use crate::tally::Tally;
use crate::tools::{
    self, AARCH64, CBINDGEN, CLANG, CLANG_RT, CLIPPY, DPKG, GCC, GIT, GXX, JEMALLOC, LLVM, MAKE, MANDOC, NIGHTLY, Need,
    OLDEST_TOOLCHAIN, PKG_CONFIG, RUST_SRC, RUSTFMT, VALGRIND, WINDOWS, X86_64_BARE,
};
use crate::{binaries, builds, capi, clauses, deb, hunts, modules, papers, readme, vm};

/// How much is run. A tier has its own steps and those of the tiers before it; [`Tier::Long`] has only its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Tier {
    /// `cargo xtask quick`: run while you work on a change.
    Quick,
    /// `cargo xtask test`: each test once.
    Test,
    /// `cargo xtask test --all`, which `.ci/run` runs: the same code in other builds and on other machines.
    All,
    /// `cargo xtask long`: steps that take hours.
    Long,
}

/// One step.
pub(crate) struct Step {
    /// Its name, which `--only` takes.
    pub(crate) name: &'static str,
    /// What it shows, in a line.
    pub(crate) shows: &'static str,
    /// The first tier that has it.
    pub(crate) tier: Tier,
    /// True when no later tier runs it, because a step of theirs does more.
    pub(crate) is_for_one_tier: bool,
    /// Seconds that it takes on two idle processors, in a clean checkout, after the steps before it.
    pub(crate) about_s: u64,
    /// Without these it is skipped.
    pub(crate) needs: &'static [Need],
    /// Some of its tests are skipped without these.
    pub(crate) wants: fn() -> Vec<Need>,
    /// The next step, if the two run at the same time: one of them leaves a processor idle for much of its time.
    pub(crate) beside: Option<&'static str>,
    /// The beginning of its logs' names.
    pub(crate) logs: &'static str,
    /// Runs it. An error is one failed check.
    pub(crate) run: fn(&Shell) -> Result<Tally>,
}

const C_AND_CXX: &[Need] = &[GCC, GXX, MAKE];
/// With what the tests of the library for C compile, link and run programs with.
const TESTS: &[Need] = &[GCC, GXX, MAKE, PKG_CONFIG, CLANG, CLANG_RT, VALGRIND, JEMALLOC];
const RUSTDOC: &[Need] = &[GCC, GXX, MAKE, NIGHTLY];
const LINTS: &[Need] = &[CLIPPY, DPKG, GCC, GXX, MAKE];
const MIRI: &[Need] = &[GCC, NIGHTLY, tools::MIRI, RUST_SRC];

use Tier::{All, Long, Quick, Test};

/// Every step there is.
#[rustfmt::skip] // A row for each step, in one or two lines.
pub(crate) const STEPS: &[Step] = &[
    step("fmt", Quick, 2, "the code is formatted", &[RUSTFMT], builds::fmt),
    step("layers", Quick, 1, "no crate and no module imports one that stands above it", &[], papers::layers),
    step("paths", Quick, 1, "no file names a place on the machine it was written on", &[GIT], papers::machine_paths),
    step("links", Quick, 1, "the documents' links lead somewhere", &[GIT], papers::links),
    step("licences", Quick, 1, "deny.toml allows each dependency's licence and source", &[], papers::licences),
    step("dependencies", Quick, 1, "docs/dependencies.md says why each dependency is there", &[], papers::dependencies),
    step("clauses", Quick, 1, "each clause, and each fault, names tests that exist", &[GIT], clauses::check),
    step("clippy", Quick, 110, "no lint has anything to say", LINTS, builds::clippy),
    step("unit", Quick, 60, "the unit tests of the crates that changed", C_AND_CXX, builds::unit).in_one_tier(),

    step("build", Test, 10, "the library builds with no C compiler in reach", &[GCC], builds::library),
    step("oldest", Test, 10, "the library builds with the oldest Rust that it promises",
        &[GCC, OLDEST_TOOLCHAIN], builds::oldest),
    step("packages", Test, 60, "each crate of the library can be published, and programs outside build with its package",
        &[GCC], builds::packages),
    step("tests", Test, 200, "each test, on restartable sequences where there are any", TESTS, builds::tests)
        .wanting(|| [paths::wants(), vec![MANDOC]].concat()),
    step("portable", Test, 30, "the tests that choose no backend, on the portable lists", C_AND_CXX, builds::portable),
    step("doctest", Test, 30, "the examples in the documentation and in the README run", C_AND_CXX, builds::doctest),
    step("examples", Test, 5, "the example programs run", C_AND_CXX, builds::examples),
    step("one-page", Test, 20, "docs/one-page.md tells what a page goes through", &[GCC], builds::one_page),
    step("loom", Test, 60, "the models of the portable lists, the bit areas and the page cache's parts", &[GCC], hunts::loom).beside("shuttle"),
    step("shuttle", Test, 40, "the models of pools, waits and the page cache: nobody waits for ever", &[GCC], hunts::shuttle),
    step("release", Test, 60, "the program builds as a user builds it", C_AND_CXX, builds::release),
    step("readme", Test, 120, "the commands of the README and of docs/programs.md run as they stand", C_AND_CXX, readme::commands).beside("stress"),
    step("stress", Test, 15, "five seconds of stress on each backend", C_AND_CXX, hunts::stress),
    step("sizes", Test, 5, "the hot functions are no longer than they may be", &[GCC], binaries::sizes).logging("object"),
    step("no-os", Test, 5, "core links and works with no operating system's library",
        &[GCC, X86_64_BARE], binaries::no_os),

    step("elsewhere", All, 5, "elsewhere than on Linux, the first error says so", &[WINDOWS], builds::elsewhere),
    step("header", All, 5, "pagemill.h is what the functions for C say", &[CBINDGEN], capi::header),
    step("deb", All, 25, "the Debian package can be installed, used and removed", &[GCC, PKG_CONFIG, DPKG], deb::check),
    step("modules", All, 90, "Linux's own test modules run as they stand, in a process", modules::NEEDS, modules::run),
    step("rustdoc", All, 60, "the documentation builds without a warning, for each set of features", RUSTDOC,
        builds::rustdoc),
    step("test-release", All, 90, "the tests of the library as a user builds it, without assertions",
        TESTS, builds::test_release),
    step("canary", All, 120, "stress and the models catch a bug that was put in for them", C_AND_CXX, hunts::canary),
    step("aarch64", All, 15, "the restartable sequences' descriptors and signatures on aarch64",
        &[AARCH64], binaries::aarch64).logging("object"),
    step("miri", All, 300, "miri sees no undefined behaviour in core and the portable backend", MIRI, hunts::miri),
    step("asan", All, 120, "the library's tests under AddressSanitizer", &[GCC, LLVM, NIGHTLY], hunts::asan),
    step("vm", All, 150, "what needs a kernel of its own: nodes, huge pages, limits, the device mapper, a drive",
        vm::NEEDS, vm::all).beside("fuzz"),
    step("fuzz", All, 120, "twenty seconds of each fuzz target", &[GCC, GXX, NIGHTLY], hunts::fuzz),
    step("aarch64-vm", All, 240, "stress and the library's tests that matter most, on aarch64",
        vm::NEEDS_AARCH64, vm::aarch64).logging("vm"),
    step("nfs-vm", All, 75, "`pagemill nfs serve`, used by Linux's client: fsx, pjdfstest, dbench, fio; the server killed, or short of memory",
        vm::NEEDS_NFS, vm::nfs).logging("vm"),

    step("long-stress", Long, 2500, "ten minutes of each stress on each backend", C_AND_CXX, hunts::long_stress),
    step("long-models", Long, 1300, "models and properties at many times their schedules", &[GCC], hunts::long_models),
    step("long-miri", Long, 400, "all of core under miri, the single-threaded files too", MIRI, hunts::long_miri),
    step("long-fuzz", Long, 700, "ten minutes of each fuzz target", &[GCC, GXX, NIGHTLY], hunts::long_fuzz)
        .logging("fuzz"),
    step("long-mutants", Long, 3600, "the library's tests see nine of ten small faults",
        &[GIT, GCC], hunts::long_mutants),
    step("long-machines", Long, 5400, "all tests of the library on two nodes, on aarch64, and on pages of 16 KiB",
        vm::NEEDS_AARCH64, vm::long).wanting(|| vm::NEEDS.to_vec()).logging("vm"),
    step("long-nfs", Long, 450, "more of nfs-vm; git and a compiler work in the mount", vm::NEEDS_LONG_NFS, vm::long_nfs)
        .logging("vm"),
];

const fn step(
    name: &'static str,
    tier: Tier,
    about_s: u64,
    shows: &'static str,
    needs: &'static [Need],
    run: fn(&Shell) -> Result<Tally>,
) -> Step {
    let is_for_one_tier = matches!(tier, Long);
    Step { name, shows, tier, is_for_one_tier, about_s, needs, wants: Vec::new, beside: None, logs: name, run }
}

impl Step {
    const fn wanting(mut self, wants: fn() -> Vec<Need>) -> Self {
        self.wants = wants;
        self
    }

    const fn logging(mut self, logs: &'static str) -> Self {
        self.logs = logs;
        self
    }

    const fn beside(mut self, next: &'static str) -> Self {
        self.beside = Some(next);
        self
    }

    const fn in_one_tier(mut self) -> Self {
        self.is_for_one_tier = true;
        self
    }

    fn is_in(&self, tier: Tier) -> bool {
        if tier == Long || self.is_for_one_tier { self.tier == tier } else { self.tier <= tier }
    }

    /// `needs` and `wants`.
    pub(crate) fn needs_and_wants(&self) -> Vec<Need> {
        self.needs.iter().copied().chain((self.wants)()).collect()
    }
}

/// The steps of a tier; if `only` names any steps, those instead, of whichever tier. In the plan's order.
pub(crate) fn chosen(tier: Tier, only: &[String]) -> Result<Vec<&'static Step>> {
    if let Some(unknown) = only.iter().find(|name| STEPS.iter().all(|step| step.name != **name)) {
        bail!("there is no step {unknown:?}; `cargo xtask list` prints them");
    }
    let is_chosen = |step: &Step| if only.is_empty() { step.is_in(tier) } else { only.iter().any(|n| n == step.name) };
    Ok(STEPS.iter().filter(|step| is_chosen(step)).collect())
}

/// Prints the plan.
pub(crate) fn print() {
    println!("step                first in  about  shows");
    for step in STEPS {
        let tier = step.tier.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        println!("{:<19} {tier:<6} {:>6} s  {}", step.name, step.about_s, step.shows);
    }
    println!(
        "\nquick: `cargo xtask quick`; test: `cargo xtask test`; all: `cargo xtask test --all`; long: `cargo xtask long`."
    );
    println!("Seconds are for two idle processors and a clean checkout, each step after those before it.");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_keeps_the_plans_order_and_refuses_unknown_names() {
        let names = |only: &[&str]| {
            let only: Vec<_> = only.iter().map(|name| (*name).to_owned()).collect();
            chosen(Test, &only).map(|steps| steps.iter().map(|step| step.name).collect::<Vec<_>>())
        };
        assert_eq!(names(&["clippy", "fmt"]).unwrap(), ["fmt", "clippy"]);
        assert_eq!(names(&["asan"]).unwrap(), ["asan"], "a step of another tier, by name");
        assert!(names(&["clipy"]).is_err());
    }

    #[test]
    fn each_tier_includes_the_tiers_before_it_and_long_stands_alone() {
        let names = |tier| chosen(tier, &[]).unwrap().iter().map(|step| step.name).collect::<Vec<_>>();
        let (quick, test, all, long) = (names(Quick), names(Test), names(All), names(Long));
        assert!(quick.contains(&"fmt") && quick.contains(&"unit"));
        assert!(quick.iter().all(|name| *name == "unit" || test.contains(name)), "{quick:?}");
        assert!(test.iter().all(|name| all.contains(name)) && test.len() < all.len(), "{test:?}");
        assert!(long.iter().all(|name| !all.contains(name)) && !long.is_empty(), "{long:?}");
        assert_eq!(all.len() + long.len() + 1, STEPS.len(), "every step is in a tier");
    }

    #[test]
    fn names_are_unique_and_steps_that_run_together_are_neighbours() {
        for (i, step) in STEPS.iter().enumerate() {
            assert!(STEPS[..i].iter().all(|other| other.name != step.name), "{}", step.name);
            let next = STEPS.get(i + 1).map(|next| next.name);
            assert!(step.beside.is_none_or(|beside| next == Some(beside)), "{}", step.name);
        }
    }
}
