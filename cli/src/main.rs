//! The program `pagemill`: shows the library at work.
//!
//! `bench` measures it (the crate `pagemill-bench`), `copy` moves a file through its pages, `crypt` makes
//! encrypted volumes (the crate `pagemill-crypt`), `nvme` drives a disk past the kernel's driver (the crate `pagemill-nvme`), `stress` looks for a page
//! with two owners, `info` says what it found on this machine, `top` watches another process. Each is a module with its arguments and a `run`.
mod allocator;
mod copy;
#[cfg(feature = "crypt")]
mod crypt;
mod failure;
mod faults;
mod info;
#[cfg(feature = "nvme")]
mod nvme;
mod stop;
mod stress;
mod top;
mod watched;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use failure::Failure;

/// Memory pages in bulk: the Linux kernel's bulk page allocators as a library
#[derive(Parser)]
#[command(name = "pagemill", version, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    #[cfg(feature = "bench")]
    /// Measure Pagemill beside what a program would use today
    Bench(pagemill_bench::BenchArgs),
    Copy(copy::CopyArgs),
    #[cfg(feature = "crypt")]
    Crypt(crypt::CryptArgs),
    Info(info::InfoArgs),
    #[cfg(feature = "nvme")]
    Nvme(nvme::NvmeArgs),
    Stress(stress::StressArgs),
    Top(top::TopArgs),
}

const AFTER_HELP: &str = "\
Examples:
  pagemill bench --quick             a first look at the figures, in seconds
  pagemill bench                     pages one by one and in bulk, beside peers
  pagemill copy disk.img copy.img    copy a file, 256 pages an operation
  pagemill copy --alloc single a b   the same with one page an allocation
  pagemill crypt format disk.img --size 1G
                                     make an encrypted volume
  pagemill nvme identify 01:00.0     what an NVMe drive says of itself
  pagemill stress --seconds 60       look for a page with two owners
  pagemill info                      backend, CPUs, arena, and a zone's state
  pagemill top /tmp/stress.sock      watch a process that serves this socket

Exit codes:
  0  done
  1  failed; standard error says what, why and what to do next
  2  the command line makes no sense
  3  crypt alone: no keyslot opens with this passphrase
  stopped by a signal, it ends by that signal (for Ctrl-C a shell shows 130)

Environment:
  PAGEMILL_BACKEND=rseq|portable     force how the per-CPU lists work
  PAGEMILL_STATS=PATH                copy and stress serve `pagemill top` there
  PAGEMILL_FAIL=after=1000,p=0.01    acquisitions fail, to see what happens then";

fn main() -> ExitCode {
    let command = Cli::parse().command;
    let checked = allocator::check_forced_backend().and_then(|()| faults::check_environment());
    match checked.and_then(|()| command.run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(command.name()),
    }
}

#[cfg(feature = "bench")]
fn bench(args: &pagemill_bench::BenchArgs) -> Result<(), Failure> {
    use failure::said;
    use pagemill_bench::Error;
    let program = std::env::current_exe().map_err(|error| Failure::new("this program's own file", said(&error)))?;
    pagemill_bench::run(args, &program, &[pagemill_crypt_bench::TABLE]).map_err(|error| {
        let failure = Failure::new("no figures", &error);
        let failure = match error {
            Error::Interrupted { signal } => failure.by_signal(signal),
            Error::UnknownName { .. } | Error::NotBuilt { .. } | Error::NoRows => failure.usage(),
            _ => failure,
        };
        match error.next_step() {
            Some(next) => failure.next(next),
            None => failure,
        }
    })
}

impl Command {
    fn name(&self) -> &'static str {
        match self {
            #[cfg(feature = "bench")]
            Self::Bench(_) => "bench",
            Self::Copy(_) => "copy",
            #[cfg(feature = "crypt")]
            Self::Crypt(_) => "crypt",
            Self::Info(_) => "info",
            #[cfg(feature = "nvme")]
            Self::Nvme(_) => "nvme",
            Self::Stress(_) => "stress",
            Self::Top(_) => "top",
        }
    }

    fn run(&self) -> Result<(), Failure> {
        match self {
            #[cfg(feature = "bench")]
            Self::Bench(args) => bench(args),
            Self::Copy(args) => copy::run(args),
            #[cfg(feature = "crypt")]
            Self::Crypt(args) => crypt::run(args),
            Self::Info(args) => info::run(args),
            #[cfg(feature = "nvme")]
            Self::Nvme(args) => nvme::run(args),
            Self::Stress(args) => stress::run(args),
            Self::Top(args) => top::run(args),
        }
    }
}
