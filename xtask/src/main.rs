//! Pagemill's own checks.
//!
//! `cargo xtask test` is exactly what continuous integration runs; `.ci/run` is the
//! same with no skip allowed but the hardware that `.ci/skips-allowed` names.
//!
//! Where to read on: [`plan`] lists the steps in their order, [`runner`] runs them
//! and counts, [`tools`] says what the machine lacks. The steps themselves are in
//! [`builds`] (compiler, lints, tests), [`hunts`] (model checkers, sanitizers,
//! stress, the canary), [`binaries`] (what the compiler made) and [`papers`] (what
//! the documents claim).

mod binaries;
mod builds;
mod clauses;
mod hunts;
mod papers;
mod plan;
mod readme;
mod runner;
mod shell;
mod tally;
mod tools;
mod vm;

use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

/// Pagemill's own checks.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run every check, in order; the last line counts them.
    Test(TestArgs),
    /// Run tests that need a kernel to themselves, in a virtual machine (QEMU's emulation, Debian's kernel); the scripts of
    /// these names in tests/vm, all of them for none.
    Vm {
        /// A script's name.
        names: Vec<String>,
    },
    /// List the steps of `test`: name, what it shows, what it needs.
    List,
}

/// How `cargo xtask test` runs.
#[derive(Args)]
struct TestArgs {
    /// Only these steps, by name (`cargo xtask list` prints them).
    #[arg(long, value_delimiter = ',', value_name = "NAME,...")]
    only: Vec<String>,
    /// Count a skip as a failure, unless .ci/skips-allowed names it.
    #[arg(long)]
    no_skips: bool,
    /// Install nothing: say what is missing and go on with what is here.
    #[arg(long)]
    no_install: bool,
    /// Print what each command prints as it runs, not only when it fails.
    #[arg(long, short)]
    verbose: bool,
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Task::Test(args) => runner::test(&args),
        Task::Vm { names } => runner::vm(&names),
        Task::List => plan::print().map(|()| true),
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
