//! `pagemill nvme zero` and `discard`: blocks without data of their own.
use clap::{ArgGroup, Args};

use super::move_blocks::BlocksArgs;
use super::open::DriveArgs;
use super::signals::Stop;
use crate::Error;
use crate::drive::{Drive, NAP};
use crate::queue::Queue;
use crate::request::{BlockRange, Op, Refused, Request};

/// The blocks.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("length").required(true).args(["blocks", "bytes"]))]
pub(super) struct ClearArgs {
    #[command(flatten)]
    drive: DriveArgs,

    #[command(flatten)]
    blocks: BlocksArgs,
}

pub(super) fn run(args: &ClearArgs, op: Op, notice: &mut dyn FnMut(&str)) -> Result<String, Error> {
    let stop = Stop::watch()?;
    let (drive, queue) = args.drive.open()?;
    let block = u64::from(drive.namespace().block_size);
    // One of the two is given.
    let blocks = args.blocks.count(block)?.unwrap_or(0);
    let range = BlockRange { lba: args.blocks.lba, blocks };
    let cleared = clear(&drive, &queue, op, range, &mut args.drive.checking(&drive, &stop, notice));
    drive.said().iter().for_each(|said| notice(said));
    cleared?;
    let counts = drive.shut_down()?;
    let verb = if op == Op::WriteZeroes { "wrote zeros to" } else { "deallocated" };
    let (address, lba) = (args.drive.address, range.lba);
    Ok(format!("{address}: {verb} {blocks} blocks from block {lba} on, {} commands\n", counts.commands))
}

/// Runs the operation over a range, by commands as large as the drive takes. It is on the medium at the end.
fn clear(
    drive: &Drive,
    queue: &Queue,
    op: Op,
    range: BlockRange,
    check: &mut dyn FnMut() -> Result<(), Error>,
) -> Result<(), Error> {
    let BlockRange { lba, blocks } = range;
    let (id, there) = (drive.namespace().id, drive.namespace().blocks);
    // The whole range is checked before anything changes: the drive would refuse only the pieces beyond its end.
    let end = lba
        .checked_add(blocks)
        .filter(|&end| end <= there)
        .ok_or_else(|| Error::Request(format!("{blocks} blocks from {lba} on: namespace {id} has {there}")))?;
    let most = drive.most_blocks(op);
    let (mut at, mut done, mut failed) = (lba, Vec::new(), None);
    loop {
        while failed.is_none() && at < end && queue.has_room() {
            let piece = BlockRange { lba: at, blocks: most.min(end - at) };
            let request =
                if op == Op::Deallocate { Request::deallocate(vec![piece]) } else { Request::write_zeroes(piece) };
            match check().map_or_else(Err, |()| queue.submit(request, 0).map_err(|Refused { error, .. }| error)) {
                Ok(()) => at += piece.blocks,
                Err(Error::Busy(_)) => break,
                Err(error) => failed = Some(error),
            }
        }
        if queue.out() == 0 {
            break;
        }
        queue.wait(NAP, &mut done)?;
        if let Some(error) = done.drain(..).find_map(|done| done.result.err()) {
            failed.get_or_insert(error);
        }
    }
    match failed {
        Some(error) => Err(error),
        None if drive.info().has_write_cache => queue.flush(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use pagemill::{Allocator, Memory};

    use super::*;
    use crate::dma::Dma;
    use crate::drive::Settings;
    use crate::fake::{BLOCK, Behaviour, Fake};

    #[test]
    fn a_range_is_cleared_by_commands_of_the_drives_size_and_nothing_else_is() {
        for (op, byte) in [(Op::WriteZeroes, 0), (Op::Deallocate, 0xdd)] {
            let dma = Dma::new(&Allocator::builder().memory(Memory::anonymous(4096)).build().unwrap());
            let fake = Fake::with(Behaviour::default(), 20_000, 1);
            fake.state().disk.fill(1);
            let drive = Drive::on_fake(&dma, &fake, Settings::default()).unwrap();
            let queue = drive.all();
            let range = |lba, blocks| BlockRange { lba, blocks };
            for beyond in [range(0, 20_001), range(u64::MAX, 1), range(19_999, 2)] {
                let error = clear(&drive, &queue, op, beyond, &mut || Ok(())).unwrap_err();
                assert!(error.to_string().contains("namespace 1 has 20000"), "{error}");
            }
            clear(&drive, &queue, op, range(7, 19_000), &mut || Ok(())).unwrap();
            let state = fake.state();
            let is_right = |at: usize| state.disk[at] == if (7..19_007).contains(&(at / BLOCK)) { byte } else { 1 };
            assert!((0..20_000 * BLOCK).all(is_right), "{op:?}");
            let commands = state.seen.iter().filter(|(opcode, _)| *opcode != crate::spec::io::FLUSH).count();
            assert_eq!(commands, if op == Op::WriteZeroes { 10 } else { 19 });
        }
    }
}
