//! The program `pagemill`: shows the library at work.
//!
//! `copy` moves a file through its pages, `read` streams files through a page cache, `stress` looks for a page with two owners, `info` reports what the library found on this
//! machine, `top` watches another process, `generate` writes man pages and completions. Each of these is a module with its arguments and a `run`. [`commands`] calls the
//! commands of other crates: `bench` measures the library, `crypt` makes encrypted volumes, `nfs` serves a directory, `nvme` drives a disk without the
//! kernel's driver, `xdp` forwards packets.
mod allocator;
#[cfg(any(feature = "crypt", feature = "nfs", feature = "nvme", feature = "xdp"))]
mod commands;
mod copy;
mod failure;
mod faults;
mod generate;
mod info;
mod progress;
mod read;
mod stop;
mod stress;
mod top;
mod watched;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

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
    Crypt(pagemill_crypt::commands::CryptArgs),
    Generate(generate::GenerateArgs),
    Info(info::InfoArgs),
    #[cfg(feature = "nfs")]
    Nfs(pagemill_nfs::commands::NfsArgs),
    #[cfg(feature = "nvme")]
    Nvme(pagemill_nvme::commands::NvmeArgs),
    Read(read::ReadArgs),
    Stress(stress::StressArgs),
    Top(top::TopArgs),
    #[cfg(feature = "xdp")]
    Xdp(pagemill_xdp::commands::XdpArgs),
}

const AFTER_HELP: &str = "\
Examples:
  pagemill bench --quick             a first look at the figures, in seconds
  pagemill bench                     pages one by one and in bulk, beside peers
  pagemill copy disk.img copy.img    copy a file, 256 pages an operation
  pagemill copy --alloc single a b   the same with one page an allocation
  pagemill crypt format disk.img --size 1G
                                     make an encrypted volume
  pagemill nfs serve /srv/data       serve a directory over NFSv3, as root
  pagemill nvme identify 01:00.0     what an NVMe drive says of itself
  pagemill read --stats disk.img >/dev/null
                                     stream a file through a page cache
  pagemill xdp echo eth0 --address 192.0.2.7
                                     answer ARP and ping from a process
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
  PAGEMILL_STATS=PATH                copy, read and stress serve `pagemill top`
  PAGEMILL_FAIL=after=1000,p=0.01    acquisitions fail, to see what happens then";

fn main() -> ExitCode {
    let matches = Cli::command().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let checked = allocator::check_forced_backend().and_then(|()| faults::check_environment());
    match checked.and_then(|()| run(&cli.command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(matches.subcommand_name().unwrap_or_default()),
    }
}

fn run(command: &Command) -> Result<(), Failure> {
    match command {
        #[cfg(feature = "bench")]
        Command::Bench(args) => commands::bench(args),
        Command::Copy(args) => copy::run(args),
        #[cfg(feature = "crypt")]
        Command::Crypt(args) => commands::crypt(args),
        Command::Generate(args) => generate::run(args, Cli::command()),
        Command::Info(args) => info::run(args),
        #[cfg(feature = "nfs")]
        Command::Nfs(args) => commands::nfs(args),
        #[cfg(feature = "nvme")]
        Command::Nvme(args) => commands::nvme(args),
        Command::Read(args) => read::run(args),
        Command::Stress(args) => stress::run(args),
        Command::Top(args) => top::run(args),
        #[cfg(feature = "xdp")]
        Command::Xdp(args) => commands::xdp(args),
    }
}
