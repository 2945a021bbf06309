//! `pagemill nvme read` and `write`.
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args};
use pagemill_command::size;

use super::open::DriveArgs;
use super::signals::{Pipe, Stop};
use crate::Error;
use crate::drive::Drive;
use crate::request::{BlockRange, Op};
use crate::transfer::{Moved, Place, Transfer};

/// Which blocks.
#[derive(Args, Debug)]
pub(super) struct BlocksArgs {
    /// The first block
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) lba: u64,

    /// How many blocks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    blocks: Option<u64>,

    /// How many bytes, or with K, M, G or T
    #[arg(long, value_name = "BYTES", value_parser = size, conflicts_with = "blocks")]
    bytes: Option<u64>,
}

impl BlocksArgs {
    /// The number of blocks, of `block` bytes each; `None` for all.
    pub(super) fn count(&self, block: u64) -> Result<Option<u64>, Error> {
        match (self.blocks, self.bytes) {
            (Some(blocks), _) => Ok(Some(blocks)),
            (None, Some(bytes)) => whole(bytes, block, "--bytes").map(Some),
            (None, None) => Ok(None),
        }
    }
}

/// The blocks, and the sizes of requests.
#[derive(Args, Debug)]
struct RangeArgs {
    #[command(flatten)]
    blocks: BlocksArgs,

    /// Bytes of the largest command [default: the most]
    #[arg(long, value_name = "BYTES", value_parser = size)]
    transfer: Option<u64>,

    /// Random pieces in random order, on random pages
    #[arg(long, value_name = "SEED")]
    random: Option<u64>,
}

/// Read blocks of a drive
#[derive(Args, Debug)]
#[command(
    group = ArgGroup::new("length").required(true).args(["blocks", "bytes"]),
    override_usage = "pagemill nvme read [OPTIONS] --blocks <N> --to <FILE> <DEV>\n       \
                      pagemill nvme read [OPTIONS] --bytes <BYTES> --to <FILE> <DEV>"
)]
pub(super) struct ReadArgs {
    #[command(flatten)]
    drive: DriveArgs,

    #[command(flatten)]
    range: RangeArgs,

    /// A new file for the data, or - for standard output
    #[arg(long, value_name = "FILE")]
    to: PathBuf,

    /// Overwrite a file that is there
    #[arg(long)]
    force: bool,
}

/// Overwrite blocks of a drive
///
/// What was there is lost. It is on the medium when this ends well.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(super) struct WriteArgs {
    #[command(flatten)]
    drive: DriveArgs,

    #[command(flatten)]
    range: RangeArgs,

    /// A file of whole blocks, or - for standard input
    #[arg(long, value_name = "FILE")]
    from: PathBuf,
}

impl RangeArgs {
    fn piece(&self, drive: &Drive) -> Result<usize, Error> {
        let (block, most) = (u64::from(drive.namespace().block_size), drive.max_transfer());
        let Some(bytes) = self.transfer else { return Ok(most) };
        whole(bytes, block, "--transfer")?;
        if bytes > most as u64 {
            return Err(Error::Request(format!(
                "--transfer {bytes}: a command of this drive moves up to {most} bytes"
            )));
        }
        Ok(bytes as usize)
    }

    fn seed(&self, is_pipe: bool) -> Result<Option<u64>, Error> {
        if is_pipe && self.random.is_some() {
            return Err(Error::Request("--random takes a file: the bytes of a pipe come in order".to_owned()));
        }
        Ok(self.random)
    }
}

/// Bytes as a number of blocks. If they are not whole blocks, the error names the option or file `what`.
fn whole(bytes: u64, block: u64, what: &str) -> Result<u64, Error> {
    if bytes == 0 || !bytes.is_multiple_of(block) {
        return Err(Error::Request(format!("{what} {bytes}: the drive has blocks of {block} bytes")));
    }
    Ok(bytes / block)
}

pub(super) fn read(args: &ReadArgs, notice: &mut dyn FnMut(&str)) -> Result<String, Error> {
    let stop = Stop::watch()?;
    let is_pipe = args.to == Path::new("-");
    let seed = args.range.seed(is_pipe)?;
    let name = args.to.display().to_string();
    let failed = |error| Error::io(name.clone(), error);
    let is_there = || Error::Request(format!("{name} is there already; --force overwrites it"));
    // Before the drive is touched.
    if !is_pipe && !args.force && args.to.exists() {
        return Err(is_there());
    }
    let (drive, queue) = args.drive.open()?;
    let blocks = args.range.blocks.count(drive.namespace().block_size.into())?.unwrap_or(0);
    let piece = args.range.piece(&drive)?;
    let mut old = None;
    let place = if is_pipe {
        Place::Writer(Box::new(Pipe(io::stdout().lock(), stop.clone())))
    } else {
        let mut options = File::options();
        options.read(true).write(true).create(true).create_new(!args.force);
        let file = options.open(&args.to).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => is_there(),
            _ => failed(error),
        })?;
        // The old contents are cut off at the end, so that a refused request leaves them.
        if args.force && file.metadata().map_err(failed)?.is_file() {
            old = Some(file.try_clone().map_err(failed)?);
        }
        Place::File(file)
    };
    let range = BlockRange { lba: args.range.blocks.lba, blocks };
    let transfer = Transfer { op: Op::Read, range, piece, seed, place, is_to_end: false, name: &name };
    let moved = transfer.run(&drive, &queue, &mut args.drive.checking(&drive, &stop, notice));
    if moved.is_err() && !is_pipe && !args.force {
        // The file is new and incomplete. The transfer's error is reported, even if removing it fails.
        let _ = std::fs::remove_file(&args.to);
    }
    let block = u64::from(drive.namespace().block_size);
    let said = finish(drive, &args.drive, moved, notice, "read", range.lba)?;
    if let Some(old) = old {
        old.set_len(blocks * block).map_err(failed)?;
    }
    Ok(if is_pipe { String::new() } else { said })
}

pub(super) fn write(args: &WriteArgs, notice: &mut dyn FnMut(&str)) -> Result<String, Error> {
    let stop = Stop::watch()?;
    let is_pipe = args.from == Path::new("-");
    let seed = args.range.seed(is_pipe)?;
    let name = args.from.display().to_string();
    // Before the drive is touched.
    let file =
        if is_pipe { None } else { Some(File::open(&args.from).map_err(|error| Error::io(name.clone(), error))?) };
    let (drive, queue) = args.drive.open()?;
    let (block, there) = (u64::from(drive.namespace().block_size), drive.namespace().blocks);
    let wanted = args.range.blocks.count(block)?;
    let (place, blocks) = match file {
        None => {
            let left = there.saturating_sub(args.range.blocks.lba);
            (Place::Reader(Box::new(Pipe(io::stdin().lock(), stop.clone()))), wanted.unwrap_or(left))
        }
        Some(file) => {
            let len = length(&file).map_err(|error| Error::io(name.clone(), error))?;
            let blocks = wanted.map_or_else(|| whole(len, block, &name), Ok)?;
            if blocks.checked_mul(block).is_none_or(|bytes| bytes > len) {
                return Err(Error::Request(format!("{name} has {len} bytes: that is less than {blocks} blocks")));
            }
            (Place::File(file), blocks)
        }
    };
    let range = BlockRange { lba: args.range.blocks.lba, blocks };
    let piece = args.range.piece(&drive)?;
    let transfer = Transfer { op: Op::Write, range, piece, seed, place, is_to_end: wanted.is_none(), name: &name };
    let moved = transfer.run(&drive, &queue, &mut args.drive.checking(&drive, &stop, notice));
    finish(drive, &args.drive, moved, notice, "wrote", range.lba)
}

/// The length of a file or a block device.
fn length(file: &File) -> io::Result<u64> {
    use io::Seek;
    let mut file = file;
    let len = file.seek(io::SeekFrom::End(0))?;
    file.rewind()?;
    Ok(len)
}

/// Shuts the drive down after a transfer, successful or not, and returns a summary.
fn finish(
    drive: Drive,
    args: &DriveArgs,
    moved: Result<Moved, Error>,
    notice: &mut dyn FnMut(&str),
    verb: &str,
    lba: u64,
) -> Result<String, Error> {
    drive.said().iter().for_each(|said| notice(said));
    // On an error the drive is shut down when it is dropped.
    let moved = moved?;
    if moved.short > 0 {
        notice(&format!("memory was short {} times; --memory gives more", moved.short));
    }
    let counts = drive.shut_down()?;
    let Moved { bytes, .. } = moved;
    let mut said = format!("{}: {verb} {bytes} bytes at block {lba}, {} commands", args.address, counts.commands);
    if counts.resets + counts.aborts + counts.retries > 0 {
        said += &format!(", {} of them again; {} aborts, {} resets", counts.retries, counts.aborts, counts.resets);
    }
    Ok(said + "\n")
}
