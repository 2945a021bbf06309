//! Requests to a drive, and how they come back.
use std::time::Duration;

use crate::memory::Buffer;
use crate::spec::io;
use crate::{Error, Status};

/// Blocks that one command can name.
pub(crate) const MOST_BLOCKS: u64 = 1 << 16;
/// Ranges that one command can deallocate.
pub(crate) const MOST_RANGES: usize = 256;

/// An operation of a drive.
///
/// ```
/// use pagemill_nvme::{Op, Request};
/// assert_eq!(Request::flush().op(), Op::Flush);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Op {
    /// Reads blocks.
    Read,
    /// Writes blocks.
    Write,
    /// Puts written data on the medium.
    Flush,
    /// Fills blocks with zeros.
    WriteZeroes,
    /// Tells the drive that the contents of blocks are not needed any more.
    Deallocate,
}

/// A range of blocks.
///
/// ```
/// let first_mib = pagemill_nvme::BlockRange { lba: 0, blocks: 2048 };
/// # assert_eq!(first_mib.blocks, 2048);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange {
    /// The first block.
    pub lba: u64,
    /// The number of blocks.
    pub blocks: u64,
}

/// A request: what to do with which blocks, and the memory for them.
///
/// ```
/// use pagemill::{Allocator, Memory};
/// use pagemill_nvme::{Dma, Drive, Fake, Request, Settings};
/// let dma = Dma::new(&Allocator::builder().memory(Memory::anonymous(4096)).build()?);
/// let drive = Drive::on_fake(&dma, &Fake::new(1000), Settings::default())?;
/// let queue = drive.queue()?;
/// let mut buffer = drive.buffer(4096)?;
/// buffer.pieces_mut().for_each(|piece| piece.fill(7));
/// queue.run(Request::write(8, buffer).durable()).ok()?;
/// let read = queue.run(Request::read(8, drive.buffer(4096)?)).ok()?;
/// assert!(read.buffer().unwrap().pieces().flatten().all(|&byte| byte == 7));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Request {
    pub(crate) op: Op,
    pub(crate) lba: u64,
    /// The blocks of an operation without a buffer.
    pub(crate) blocks: u64,
    pub(crate) is_durable: bool,
    pub(crate) ranges: Vec<BlockRange>,
    pub(crate) buffer: Option<Buffer>,
}

impl Request {
    fn new(op: Op, lba: u64, buffer: Option<Buffer>) -> Self {
        Self { op, lba, blocks: 0, is_durable: false, ranges: Vec::new(), buffer }
    }
    /// Reads blocks from `lba` on: as many as the buffer has room for.
    #[must_use]
    pub fn read(lba: u64, buffer: Buffer) -> Self {
        Self::new(Op::Read, lba, Some(buffer))
    }
    /// Writes the buffer's bytes to the blocks from `lba` on. A drive with a write cache may lose them until a flush.
    #[must_use]
    pub fn write(lba: u64, buffer: Buffer) -> Self {
        Self::new(Op::Write, lba, Some(buffer))
    }
    /// Puts all written data on the medium whose requests have come back before.
    #[must_use]
    pub fn flush() -> Self {
        Self::new(Op::Flush, 0, None)
    }
    /// Fills blocks with zeros, without moving data. See [`ControllerInfo::has_write_zeroes`](crate::ControllerInfo).
    #[must_use]
    pub fn write_zeroes(range: BlockRange) -> Self {
        Self { blocks: range.blocks, ..Self::new(Op::WriteZeroes, range.lba, None) }
    }
    /// Tells the drive that the contents of up to 256 ranges are not needed any more (discard, trim). The drive may or
    /// may not forget them. See [`ControllerInfo::has_deallocate`](crate::ControllerInfo).
    #[must_use]
    pub fn deallocate(ranges: Vec<BlockRange>) -> Self {
        Self { ranges, ..Self::new(Op::Deallocate, 0, None) }
    }
    /// A write, or zeros, that comes back only once the data is on the medium (Force Unit Access). Other requests stay as
    /// they are.
    #[must_use]
    pub fn durable(mut self) -> Self {
        self.is_durable = true;
        self
    }
    /// What it does.
    #[must_use]
    pub fn op(&self) -> Op {
        self.op
    }
    /// Its first block; 0 for a flush and for ranges.
    #[must_use]
    pub fn lba(&self) -> u64 {
        self.lba
    }
    /// Its data. `None` if the operation has none, or if the controller could not be stopped and may still use it.
    #[must_use]
    pub fn buffer(&self) -> Option<&Buffer> {
        self.buffer.as_ref()
    }
    /// Its buffer, to be used again.
    #[must_use]
    pub fn into_buffer(self) -> Option<Buffer> {
        self.buffer
    }

    /// The number of blocks, of `block` bytes each.
    pub(crate) fn count(&self, block: u32) -> u64 {
        match self.op {
            Op::Read | Op::Write => self.buffer.as_ref().map_or(0, |buffer| buffer.len() as u64 / u64::from(block)),
            Op::Flush => 0,
            Op::WriteZeroes => self.blocks,
            // Also of ranges that are refused, for the message.
            Op::Deallocate => self.ranges.iter().fold(0, |sum, range| sum.saturating_add(range.blocks)),
        }
    }

    /// What it does, for a message.
    pub(crate) fn what(&self, block: u32) -> String {
        let (blocks, lba) = (self.count(block), self.lba);
        match self.op {
            Op::Read => format!("reading {blocks} blocks at {lba}"),
            Op::Write => format!("writing {blocks} blocks at {lba}"),
            Op::Flush => "flushing".to_owned(),
            Op::WriteZeroes => format!("writing zeros to {blocks} blocks at {lba}"),
            Op::Deallocate => match self.ranges.as_slice() {
                [range] => format!("deallocating {blocks} blocks at {}", range.lba),
                ranges => format!("deallocating {} ranges", ranges.len()),
            },
        }
    }

    pub(crate) fn opcode(&self) -> u8 {
        match self.op {
            Op::Read => io::READ,
            Op::Write => io::WRITE,
            Op::Flush => io::FLUSH,
            Op::WriteZeroes => io::WRITE_ZEROES,
            Op::Deallocate => io::DATASET_MANAGEMENT,
        }
    }
}

/// A request that has come back.
///
/// ```
/// use pagemill::{Allocator, Memory};
/// use pagemill_nvme::{Dma, Drive, Error, Fake, Request, Settings};
/// let dma = Dma::new(&Allocator::builder().memory(Memory::anonymous(4096)).build()?);
/// let drive = Drive::on_fake(&dma, &Fake::new(1000), Settings::default())?;
/// let queue = drive.queue()?;
/// let done = queue.run(Request::read(2000, drive.buffer(512)?));
/// assert!(matches!(done.result, Err(Error::Request(_))), "the drive has 1000 blocks");
/// assert!(done.request.buffer().is_some(), "the buffer comes back");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Done {
    /// The number that [`Queue::submit`](crate::Queue::submit) was given.
    pub tag: u64,
    /// The request, with its buffer.
    pub request: Request,
    /// How it ended. After an error the blocks of a write have their old or their new contents.
    pub result: Result<(), Error>,
    /// The time since it was submitted.
    pub took: Duration,
}

impl Done {
    /// The request, if it succeeded.
    ///
    /// # Errors
    /// How it failed.
    pub fn ok(self) -> Result<Request, Error> {
        self.result.map(|()| self.request)
    }
}

/// A request that was not accepted.
///
/// ```
/// # use pagemill::{Allocator, Memory};
/// # use pagemill_nvme::{Dma, Drive, Error, Fake, Refused, Request, Settings};
/// # let dma = Dma::new(&Allocator::builder().memory(Memory::anonymous(4096)).build()?);
/// # let drive = Drive::on_fake(&dma, &Fake::new(1000), Settings { depth: 1, ..Settings::default() })?;
/// let queue = drive.queue()?; // of one request
/// queue.submit(Request::read(0, drive.buffer(512)?), 0)?;
/// let Err(Refused { request, error: Error::Busy(_) }) = queue.submit(Request::flush(), 1) else { panic!() };
/// // Poll, then submit `request` again.
/// # assert_eq!(request.op(), pagemill_nvme::Op::Flush);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Refused {
    /// The request, unchanged.
    pub request: Request,
    /// Why. [`Error::Busy`] passes: some of the queue's requests must come back first.
    #[source]
    pub error: Error,
}

impl Status {
    /// The error of a request that came back with this status.
    pub(crate) fn result(self, what: impl FnOnce() -> String) -> Result<(), Error> {
        if self.is_ok() { Ok(()) } else { Err(Error::Status { what: what(), status: self }) }
    }
}
