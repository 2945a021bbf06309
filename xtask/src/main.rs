//! Pagemill's own checks, in tiers: `cargo xtask quick`, `test`, `test --all` (which `.ci/run` runs with no skip allowed
//! but the hardware that `.ci/skips-allowed` names) and `long`.
//!
//! Where to read on: [`plan`] lists the steps in their order, [`runner`] runs them
//! and counts, [`tools`] says what the machine lacks. The steps themselves are in
//! [`builds`] (compiler, lints, tests by way of [`suites`]), [`hunts`] (model checkers, sanitizers,
//! stress, the canary), [`binaries`] (what the compiler made), [`vm`] and [`papers`] (what
//! the documents claim). [`shell`] starts every command, and [`watch`] ends those that hang.

mod binaries;
mod builds;
mod change;
mod clauses;
mod floors;
mod hunts;
mod papers;
mod paths;
mod plan;
mod progress;
mod readme;
mod runner;
mod shell;
mod suites;
mod tally;
mod tools;
mod vm;
mod watch;

use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use plan::Tier;

/// Pagemill's own checks.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Check what changed since main: format, documents, lints, unit tests. A minute or two.
    Quick(TestArgs),
    /// Run each test once, in about 15 minutes from a clean checkout; with --all also in the other builds and on the other
    /// machines, in about 35.
    Test {
        /// Optimised, under AddressSanitizer and miri, with a bug put in, fuzzed, in virtual machines.
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        args: TestArgs,
    },
    /// Run what takes hours: long stress, models and fuzzing, small faults that tests must see, whole machines of another kind.
    Long(TestArgs),
    /// Run tests that need a kernel to themselves, in a virtual machine (QEMU's emulation, Debian's kernel): the scripts of
    /// these names in tests/vm; for none, those of the step `vm`.
    Vm {
        /// A script's name.
        names: Vec<String>,
    },
    /// List the steps: name, tier, how long each takes, what it shows.
    List,
}

/// How the checks run.
#[derive(Args, Default)]
struct TestArgs {
    /// Only these steps, by name, of whichever tier (`cargo xtask list` prints them).
    #[arg(long, value_delimiter = ',', value_name = "NAME,...")]
    only: Vec<String>,
    /// Only tests whose names hold this.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Count a skip as a failure, unless .ci/skips-allowed names it.
    #[arg(long)]
    no_skips: bool,
    /// Install nothing: say what is missing and go on with what is here.
    #[arg(long)]
    no_install: bool,
    /// Print what each command prints as it ends, not only when it fails.
    #[arg(long, short)]
    verbose: bool,
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Task::Quick(args) => runner::test(Tier::Quick, &args),
        Task::Test { all, args } => runner::test(if all { Tier::All } else { Tier::Test }, &args),
        Task::Long(args) => runner::test(Tier::Long, &args),
        Task::Vm { names } => runner::vm(&names),
        Task::List => {
            plan::print();
            Ok(true)
        }
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cargo xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
