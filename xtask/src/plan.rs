//! The steps of `cargo xtask test`, in their order: what is quick and often broken
//! comes first.

use anyhow::{Result, bail};

use crate::shell::Shell;
use crate::tally::Tally;
use crate::tools::{CRYPTSETUP, FIO, GCC, GIT, GXX, LIBNBD, MAKE, Need, QEMU_IMG};
use crate::{binaries, builds, clauses, hunts, papers, readme, vm};

/// One step.
pub(crate) struct Step {
    /// How `--only` calls it.
    pub(crate) name: &'static str,
    /// What it shows, in a line.
    pub(crate) shows: &'static str,
    /// What it cannot do without.
    pub(crate) needs: &'static [Need],
    /// What some of its tests cannot do without.
    pub(crate) wants: &'static [Need],
    /// The next step, if it can be done at the same time: neither of the two keeps two processors busy.
    pub(crate) beside: Option<&'static str>,
    /// Does it. An error is one failed check.
    pub(crate) run: fn(&Shell) -> Result<Tally>,
}

const NIGHTLY: Need = Need::Nightly("");
const MIRI: &[Need] = &[GCC, NIGHTLY, Need::Nightly("miri"), Need::Nightly("rust-src")];
/// `rust-version` in Cargo.toml; the step `oldest` holds the two together.
pub(crate) const OLDEST: &str = "1.89";
const C_AND_CXX: &[Need] = &[GCC, GXX, MAKE];
/// Programs that tests compare with; a test whose program is missing says so, and the others run.
const ORACLES: &[Need] = &[CRYPTSETUP, FIO, LIBNBD, QEMU_IMG];

/// Every step there is.
pub(crate) const STEPS: &[Step] = &[
    step("fmt", "the code is formatted", &[Need::Component("rustfmt")], builds::fmt),
    step("layers", "no crate knows one that stands above it", &[], papers::layers),
    step("lengths", "no source file has grown out of hand", &[GIT], papers::lengths),
    step("paths", "no file names a place on the machine it was written on", &[GIT], papers::machine_paths),
    step("links", "the documents' links lead somewhere", &[GIT], papers::links),
    step("licences", "each dependency's licence and source is one that deny.toml allows", &[], papers::licences),
    step("dependencies", "docs/dependencies.md says why each direct dependency is there", &[], papers::dependencies),
    step("clauses", "docs/clauses.md names tests that exist for each clause", &[GIT], clauses::check),
    step("build", "the library builds with no C compiler in reach", &[GCC], builds::library),
    step("clippy", "no lint has anything to say", &[Need::Component("clippy"), GCC, GXX, MAKE], builds::clippy),
    step(
        "oldest",
        "the library builds with the oldest Rust that it promises",
        &[GCC, Need::Toolchain(OLDEST)],
        builds::oldest,
    ),
    step("test-rseq", "the tests, on restartable sequences", &[GCC], builds::test_rseq).wanting(ORACLES),
    step("test-portable", "the tests, on the portable lists", &[GCC], builds::test_portable),
    step(
        "test-release",
        "the tests of the library and of the bench with its peers, optimised, on both backends",
        C_AND_CXX,
        builds::test_release,
    ),
    step(
        "test-detection-off",
        "the library's tests, without the detection of misuse that measuring may switch off",
        &[GCC],
        builds::test_detection_off,
    ),
    step("one-page", "docs/one-page.md tells what a page goes through", &[GCC], builds::one_page),
    step("doctest", "the examples in the documentation and in the README run", &[GCC], builds::doctest),
    step("examples", "the example programs run", &[GCC], builds::examples),
    step("rustdoc", "the documentation builds without a warning", C_AND_CXX, builds::rustdoc),
    step("release", "the program builds as a user builds it", C_AND_CXX, builds::release),
    step("readme", "the README's commands run as they stand", C_AND_CXX, readme::commands),
    step("stress", "five seconds of stress on each backend", C_AND_CXX, hunts::stress),
    step("sizes", "the hot functions are no longer than they may be", &[GCC], binaries::sizes),
    step(
        "no-os",
        "core links and works with no operating system's library",
        &[GCC, Need::Target("x86_64-unknown-none")],
        binaries::no_os,
    ),
    step(
        "aarch64",
        "the restartable sequences' descriptors and signatures on aarch64",
        &[Need::Target("aarch64-unknown-linux-gnu")],
        binaries::aarch64,
    ),
    step("loom", "the models of the portable lists and the bit areas", &[GCC], hunts::loom),
    step("shuttle", "the models of pools and waits: nobody waits for ever", &[GCC], hunts::shuttle),
    step("canary", "stress and the models catch a bug that was put in for them", C_AND_CXX, hunts::canary),
    step("miri", "core and the portable backend have no undefined behaviour that miri sees", MIRI, hunts::miri)
        .beside("asan"),
    step("asan", "the library's tests under AddressSanitizer", &[GCC, NIGHTLY], hunts::asan),
    step(
        "vm",
        "what needs a kernel of its own: nodes, huge pages, limits, the device mapper, a drive",
        vm::NEEDS,
        vm::all,
    )
    .beside("fuzz"),
    step("fuzz", "twenty seconds of each fuzz target", &[GCC, GXX, NIGHTLY], hunts::fuzz),
];

const fn step(
    name: &'static str,
    shows: &'static str,
    needs: &'static [Need],
    run: fn(&Shell) -> Result<Tally>,
) -> Step {
    Step { name, shows, needs, wants: &[], beside: None, run }
}

impl Step {
    const fn wanting(mut self, wants: &'static [Need]) -> Self {
        self.wants = wants;
        self
    }

    const fn beside(mut self, next: &'static str) -> Self {
        self.beside = Some(next);
        self
    }
}

/// The steps that `--only` names, in the plan's order; all of them when it names none.
pub(crate) fn chosen(only: &[String]) -> Result<Vec<&'static Step>> {
    if let Some(unknown) = only.iter().find(|name| STEPS.iter().all(|step| step.name != **name)) {
        bail!("there is no step {unknown:?}; `cargo xtask list` prints them");
    }
    Ok(STEPS.iter().filter(|step| only.is_empty() || only.iter().any(|name| name == step.name)).collect())
}

/// Prints the plan.
pub(crate) fn print() -> Result<()> {
    for step in STEPS {
        println!("{:<19} {}", step.name, step.shows);
        if !(step.needs.is_empty() && step.wants.is_empty()) {
            let needs: Vec<_> = step.needs.iter().chain(step.wants).map(|need| need.name()).collect();
            println!("{:<19}     needs {}", "", needs.join(", "));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_keeps_the_plans_order_and_refuses_what_it_does_not_know() {
        let names = |only: &[&str]| {
            let only: Vec<_> = only.iter().map(|name| (*name).to_owned()).collect();
            chosen(&only).map(|steps| steps.iter().map(|step| step.name).collect::<Vec<_>>())
        };
        assert_eq!(names(&["clippy", "fmt"]).unwrap(), ["fmt", "clippy"]);
        assert_eq!(names(&[]).unwrap().len(), STEPS.len());
        assert!(names(&["clipy"]).is_err());
    }

    #[test]
    fn no_two_steps_share_a_name_and_those_done_together_are_neighbours() {
        for (i, step) in STEPS.iter().enumerate() {
            assert!(STEPS[..i].iter().all(|other| other.name != step.name), "{}", step.name);
            let next = STEPS.get(i + 1).map(|next| next.name);
            assert!(step.beside.is_none_or(|beside| next == Some(beside)), "{}", step.name);
        }
    }
}
