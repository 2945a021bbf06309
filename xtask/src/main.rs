//! Pagemill's own checks, in tiers: `cargo xtask quick`, `test`, `test --all` and `long`. `.ci/run` runs `test --all`, and allows
//! no skips except for the hardware that `.ci/skips-allowed` names.
//!
//! [`plan`] lists the steps in their order, [`runner`] runs and counts them, [`tools`] installs what the machine lacks. The steps
//! themselves are in [`builds`] (compiler, lints, tests by way of [`suites`]), [`hunts`] (model checkers, sanitizers, stress, the
//! canary), [`binaries`] (compiled code), [`vm`] (virtual machines), [`papers`] and [`clauses`] (documents and manifests) and
//! [`readme`]. [`modules`] runs modules of the kernel. [`dist`], [`capi`] and [`deb`] make what is handed to others. [`shell`] starts
//! every command, and [`watch`] ends those that hang.

mod binaries;
mod builds;
mod capi;
mod change;
mod clauses;
mod deb;
mod dist;
mod floors;
mod hunts;
mod modules;
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

use std::path::PathBuf;
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
    /// Check the changes since main: format, documents, lints, unit tests. Takes a minute or two.
    Quick(TestArgs),
    /// Run each test once: about 20 minutes from a clean checkout, on two CPUs. With --all, run them also in other builds and on
    /// other machines: about 35 minutes.
    Test {
        /// Run the steps of the tier `all` too: optimised, AddressSanitizer, miri, the canary, fuzzing, virtual machines.
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        args: TestArgs,
    },
    /// Run steps that take hours: long stress, models and fuzzing, small faults that tests must see, all tests on other machines.
    Long(TestArgs),
    /// Run tests that need a kernel to themselves, in a virtual machine (QEMU's emulation, Debian's kernel).
    Vm {
        /// Scripts in tests/vm, by name [default: those of the step `vm`].
        names: Vec<String>,
    },
    /// Build the program for others: optimised further, stripped, with man pages, completions and licences.
    Dist {
        /// The folder to fill, such as /usr/local [default: target/dist/pagemill-files].
        folder: Option<PathBuf>,
        /// Arguments for `cargo build`, such as `--no-default-features --features crypt,nvme`, for which a C compiler is enough.
        #[arg(last = true)]
        args: Vec<String>,
    },
    /// Install the library for C: pagemill.h, libpagemill.so and .a, and their descriptions for pkg-config.
    Install {
        /// The folder to install below.
        #[arg(long, default_value = "/usr/local", value_name = "DIR")]
        prefix: PathBuf,
    },
    /// Build a Debian package of what `install` installs, in target/deb.
    Deb,
    /// List the steps: the name, the tier, the time and the purpose of each.
    List,
}

/// Options of every tier.
#[derive(Args, Default)]
struct TestArgs {
    /// Run only these steps, of whichever tier (`cargo xtask list` prints their names).
    #[arg(long, value_delimiter = ',', value_name = "NAME,...")]
    only: Vec<String>,
    /// Run only tests whose names contain this.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Count a skip as a failure, unless .ci/skips-allowed names it.
    #[arg(long)]
    no_skips: bool,
    /// Install nothing: report what is missing, and skip the steps that need it.
    #[arg(long)]
    no_install: bool,
    /// Print the output of every command, not only of those that fail.
    #[arg(long, short)]
    verbose: bool,
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Task::Quick(args) => runner::test(Tier::Quick, &args),
        Task::Test { all, args } => runner::test(if all { Tier::All } else { Tier::Test }, &args),
        Task::Long(args) => runner::test(Tier::Long, &args),
        Task::Vm { names } => runner::vm(&names),
        Task::Dist { folder, args } => dist::dist(folder.as_deref(), &args),
        Task::Install { prefix } => capi::install(&prefix),
        Task::Deb => deb::deb(),
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
