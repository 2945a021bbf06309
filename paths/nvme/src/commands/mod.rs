//! `pagemill nvme`: the subcommands that show a drive, read and write it, measure it, and give it to this program and back.
//! Each is its arguments and a `run`.
//!
//! A drive is named by its PCI address, always: none is ever picked. What there is to say is returned ([`Said`]), or said while
//! it runs; printing is the program's part.
mod bench;
mod bind;
mod clear;
mod identify;
mod move_blocks;
mod open;
mod signals;
mod smart;

use clap::{Args, Subcommand};

use crate::Error;
use crate::request::Op;

/// Drive an NVMe disk from this process, past the kernel's driver
///
/// The drive has to be bound to vfio-pci, which bind does, on a machine whose
/// IOMMU is on; it takes root, or a user to whom root gave /dev/vfio/GROUP.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment, after_help = AFTER_HELP)]
pub struct NvmeArgs {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
A drive is named by its PCI address (lspci -D), in each command: none is ever
picked. While it is bound to vfio-pci it has no /dev/nvme*.

Examples:
  pagemill nvme bind 0000:01:00.0
  pagemill nvme identify 0000:01:00.0
  pagemill nvme read 0000:01:00.0 --bytes 1M --to start.img
  pagemill nvme write 0000:01:00.0 --lba 2048 --from part.img
  pagemill nvme smart 0000:01:00.0
  pagemill nvme discard 0000:01:00.0 --lba 4096 --bytes 1G
  pagemill nvme bench 0000:01:00.0 --seconds 10 --depth 128 --queues 2
  pagemill nvme unbind 0000:01:00.0

Exit codes:
  0  done
  1  failed: standard error says what, why and what to do next
  2  the command line makes no sense
  stopped by a signal, it shuts the drive down and ends by that signal";

#[derive(Debug, Subcommand)]
enum Command {
    Identify(identify::IdentifyArgs),
    Read(move_blocks::ReadArgs),
    Write(move_blocks::WriteArgs),
    /// Fill blocks of a drive with zeros; their contents are lost
    Zero(clear::ClearArgs),
    /// Tell a drive that blocks are not needed; their contents are lost
    ///
    /// A read may return anything afterwards: zero makes sure of zeros.
    Discard(clear::ClearArgs),
    Smart(smart::SmartArgs),
    Bench(bench::BenchArgs),
    Bind(bind::BindArgs),
    Unbind(bind::UnbindArgs),
}

impl NvmeArgs {
    /// What the subcommand is called.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self.command {
            Command::Identify(_) => "identify",
            Command::Read(_) => "read",
            Command::Write(_) => "write",
            Command::Zero(_) => "zero",
            Command::Discard(_) => "discard",
            Command::Smart(_) => "smart",
            Command::Bench(_) => "bench",
            Command::Bind(_) => "bind",
            Command::Unbind(_) => "unbind",
        }
    }
}

/// What a subcommand has to say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// For standard output; ends with a line feed unless it is empty.
    pub out: String,
}

/// Runs a subcommand. What is to be said while it runs, a line each, goes to `notice`.
///
/// # Errors
/// What stopped it; [`Error::next_step`] says what to do.
pub fn run(args: &NvmeArgs, notice: &mut dyn FnMut(&str)) -> Result<Said, Error> {
    let out = match &args.command {
        Command::Identify(args) => identify::run(args),
        Command::Read(args) => move_blocks::read(args, notice),
        Command::Write(args) => move_blocks::write(args, notice),
        Command::Zero(args) => clear::run(args, Op::WriteZeroes, notice),
        Command::Discard(args) => clear::run(args, Op::Deallocate, notice),
        Command::Smart(args) => smart::run(args),
        Command::Bench(args) => bench::run(args, notice),
        Command::Bind(args) => bind::bind(args),
        Command::Unbind(args) => bind::unbind(args),
    }?;
    Ok(Said { out })
}

/// A record of `--json`, on a line.
fn json_line(value: &impl serde::Serialize) -> String {
    // Numbers and text, under names: there is nothing in it that JSON has not.
    serde_json::to_string(value).unwrap_or_default() + "\n"
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        nvme: NvmeArgs,
    }

    fn parse(line: &str) -> Result<NvmeArgs, String> {
        let words = ["nvme"].into_iter().chain(line.split_whitespace());
        Program::try_parse_from(words).map(|program| program.nvme).map_err(|error| error.to_string())
    }

    #[test]
    fn every_subcommand_needs_a_drive() {
        for line in [
            "identify",
            "read --to a",
            "write --from a",
            "zero --blocks 1",
            "discard --blocks 1",
            "smart",
            "bench",
            "bind",
            "unbind",
            "identify nvme0",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
        assert_eq!(parse("identify 01:00.0").unwrap().name(), "identify");
    }

    #[test]
    fn a_length_can_be_given_only_once() {
        assert!(parse("read 01:00.0 --blocks 8 --bytes 4096 --to a").is_err());
        assert!(parse("read 01:00.0 --blocks 8 --to a").is_ok());
        assert!(parse("zero 01:00.0").is_err() && parse("discard 01:00.0 --blocks 1 --bytes 512").is_err());
        assert!(parse("read 01:00.0 --to a").is_err(), "all of a drive is nobody's intention");
    }

    /// Nothing is done on a machine that has no such drive, and it is said in a line.
    #[test]
    fn a_missing_drive_is_an_error() {
        for line in [
            "identify ffff:ff:1f.7",
            "smart ffff:ff:1f.7",
            "zero ffff:ff:1f.7 --blocks 1",
            "bind ffff:ff:1f.7",
            "unbind ffff:ff:1f.7",
            "bench ffff:ff:1f.7",
        ] {
            let error = run(&parse(line).unwrap(), &mut |_| {}).unwrap_err();
            assert_eq!(error.to_string(), "there is no PCI device ffff:ff:1f.7", "{line}");
            assert!(error.next_step().is_some());
        }
    }
}
