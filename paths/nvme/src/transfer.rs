//! Moving a range of blocks between a drive and a file, in pieces, many at a time.
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};

use crate::Error;
use crate::drive::{Drive, NAP};
use crate::memory::Buffer;
use crate::queue::Queue;
use crate::request::{BlockRange, Done, Op, Refused, Request};

/// Vectors that the system takes at once.
const MOST_VECTORS: usize = 1024;

/// The other side of a transfer.
pub(crate) enum Place {
    /// A file with random access. Its beginning corresponds to the range's.
    File(File),
    /// A stream that is read in order.
    Reader(Box<dyn Read>),
    Writer(Box<dyn Write>),
}

/// A requested transfer.
pub(crate) struct Transfer<'a> {
    pub(crate) op: Op,
    pub(crate) range: BlockRange,
    /// Bytes of the largest command.
    pub(crate) piece: usize,
    /// The seed for pieces of random lengths in random order, each on pages in random order. Only for a `Place::File`.
    pub(crate) seed: Option<u64>,
    pub(crate) place: Place,
    /// A pipe must end with the range, or before.
    pub(crate) is_to_end: bool,
    /// The name of the file or pipe.
    pub(crate) name: &'a str,
}

/// What was moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    pub(crate) bytes: u64,
    pub(crate) requests: u64,
    /// Requests that were shortened or had to wait because memory was short.
    pub(crate) short: u64,
}

/// Random numbers, the same for the same seed (xorshift64*).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    /// Below `end`, which is not 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((u128::from(self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)) * u128::from(end)) >> 64) as u64
    }
}

/// The pieces of a range that have not been requested yet.
enum Pieces {
    InOrder(BlockRange),
    Shuffled(Vec<BlockRange>),
}

impl Pieces {
    fn new(range: BlockRange, most: u64, random: Option<&mut Random>) -> Self {
        let Some(random) = random else { return Self::InOrder(range) };
        let (mut pieces, mut at, end) = (Vec::new(), range.lba, range.lba + range.blocks);
        while at < end {
            // One piece of eight has the largest length. The lengths of the others are distributed evenly over powers
            // of two.
            let most_here = if random.below(8) == 0 { most } else { most >> random.below(most.ilog2() as u64 + 1) };
            let blocks = if most_here == most { most } else { 1 + random.below(most_here) };
            let blocks = blocks.min(end - at);
            pieces.push(BlockRange { lba: at, blocks });
            at += blocks;
        }
        for nth in (1..pieces.len()).rev() {
            pieces.swap(nth, random.below(nth as u64 + 1) as usize);
        }
        Self::Shuffled(pieces)
    }

    fn next(&mut self, most: u64) -> Option<BlockRange> {
        match self {
            Self::InOrder(range) if range.blocks == 0 => None,
            Self::InOrder(range) => {
                let piece = BlockRange { blocks: range.blocks.min(most), ..*range };
                (range.lba, range.blocks) = (range.lba + piece.blocks, range.blocks - piece.blocks);
                Some(piece)
            }
            Self::Shuffled(pieces) => pieces.pop(),
        }
    }

    /// Puts a piece back, which comes next.
    fn put_back(&mut self, rest: BlockRange) {
        match self {
            Self::InOrder(range) => (range.lba, range.blocks) = (rest.lba, range.blocks + rest.blocks),
            Self::Shuffled(pieces) => pieces.push(rest),
        }
    }
}

impl Transfer<'_> {
    /// Moves the range. `check` is called between steps and may end it.
    ///
    /// # Errors
    /// The first error. All requests have come back then.
    pub(crate) fn run(
        self,
        drive: &Drive,
        queue: &Queue,
        check: &mut dyn FnMut() -> Result<(), Error>,
    ) -> Result<Moved, Error> {
        let block = u64::from(drive.namespace().block_size);
        let (BlockRange { lba, blocks }, there) = (self.range, drive.namespace());
        // The whole range is checked before anything moves: the drive would refuse only the pieces beyond its end.
        if lba.checked_add(blocks).is_none_or(|end| end > there.blocks) {
            let (id, there) = (there.id, there.blocks);
            return Err(Error::Request(format!("{blocks} blocks from {lba} on: namespace {id} has {there}")));
        }
        let mut random = self.seed.map(Random::new);
        let most = (self.piece as u64 / block).max(1);
        let pieces = Pieces::new(self.range, most, random.as_mut());
        let mut way = Way {
            transfer: self,
            random,
            block,
            most,
            pieces,
            held_back: None,
            early: BTreeMap::new(),
            next: 0,
            surplus: None,
            moved: Moved::default(),
        };
        way.next = way.transfer.range.lba;
        let mut done = Vec::new();
        let mut failed = None;
        loop {
            if failed.is_none()
                && let Err(error) = check().and_then(|()| way.fill(queue))
            {
                // A signal also ends a read from a pipe, and is the better error.
                failed = Some(check().err().unwrap_or(error));
            }
            if queue.out() == 0 {
                break;
            }
            queue.wait(NAP, &mut done)?;
            for done in done.drain(..) {
                let landed = if failed.is_none() { way.landed(done) } else { done.result };
                if let Err(error) = landed {
                    failed.get_or_insert(error);
                }
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        way.finish(drive, queue).map_err(|error| check().err().unwrap_or(error))
    }
}

/// A transfer under way.
struct Way<'a> {
    transfer: Transfer<'a>,
    random: Option<Random>,
    block: u64,
    most: u64,
    pieces: Pieces,
    /// A request that found no memory for its lists.
    held_back: Option<Request>,
    /// Blocks that were read before it is their turn to be written to the pipe.
    early: BTreeMap<u64, Buffer>,
    /// The block whose turn it is.
    next: u64,
    /// What is wrong with the end of the pipe's data.
    surplus: Option<Error>,
    moved: Moved,
}

impl Way<'_> {
    /// Submits requests as long as there are pieces, with room and memory for them.
    fn fill(&mut self, queue: &Queue) -> Result<(), Error> {
        while queue.has_room() && self.early.len() <= queue.out() {
            let request = match self.held_back.take() {
                Some(request) => request,
                None => match self.request(queue)? {
                    Some(request) => request,
                    None => break,
                },
            };
            match queue.submit(request, 0) {
                Ok(()) => self.moved.requests += 1,
                Err(Refused { request, error: Error::Busy(_) }) => {
                    self.moved.short += 1;
                    self.held_back = Some(request);
                    break;
                }
                Err(refused) => return Err(refused.error),
            }
        }
        queue.ring();
        Ok(())
    }

    fn request(&mut self, queue: &Queue) -> Result<Option<Request>, Error> {
        let Some(mut piece) = self.pieces.next(self.most) else { return Ok(None) };
        let Some(mut buffer) = queue.buffer((piece.blocks * self.block) as usize)? else {
            self.moved.short += 1;
            self.pieces.put_back(piece);
            return Ok(None);
        };
        let got = buffer.len() as u64 / self.block;
        if got < piece.blocks {
            self.moved.short += 1;
            self.pieces.put_back(BlockRange { lba: piece.lba + got, blocks: piece.blocks - got });
            piece.blocks = got;
        }
        if let Some(random) = &mut self.random {
            buffer.scatter(|end| random.below(end as u64) as usize);
        }
        if self.transfer.op == Op::Write && !self.load(piece.lba, &mut buffer)? {
            return Ok(None);
        }
        let lba = piece.lba;
        let request =
            if self.transfer.op == Op::Write { Request::write(lba, buffer) } else { Request::read(lba, buffer) };
        Ok(Some(request))
    }

    /// Fills a buffer with the data for `lba`. False if the pipe has ended; then there are no more pieces.
    fn load(&mut self, lba: u64, buffer: &mut Buffer) -> Result<bool, Error> {
        let name = self.transfer.name;
        let failed = |error| Error::io(name, error);
        match &mut self.transfer.place {
            Place::File(file) => {
                let at = (lba - self.transfer.range.lba) * self.block;
                read_at(file, buffer, at).map_err(failed)?;
                Ok(true)
            }
            Place::Reader(reader) => {
                let mut got = 0;
                for piece in buffer.pieces_mut() {
                    let here = read_full(reader, piece).map_err(failed)?;
                    got += here;
                    if here < piece.len() {
                        break;
                    }
                }
                if got == buffer.len() {
                    return Ok(true);
                }
                self.pieces = Pieces::InOrder(BlockRange { lba, blocks: 0 });
                let (block, rest) = (self.block, got as u64 % self.block);
                if rest != 0 {
                    let why = format!("{name} ends {rest} bytes into a block of {block}: these are not written");
                    self.surplus = Some(Error::Request(why));
                }
                let whole = got - rest as usize;
                if whole > 0 {
                    buffer.shorten(whole);
                }
                Ok(whole > 0)
            }
            Place::Writer(_) => unreachable!("what is written to the drive is read from elsewhere"),
        }
    }

    /// Handles a finished request: data that was read goes to the file or pipe.
    fn landed(&mut self, done: Done) -> Result<(), Error> {
        let request = done.ok()?;
        let lba = request.lba;
        let Some(buffer) = request.buffer else { return Ok(()) };
        self.moved.bytes += buffer.len() as u64;
        if self.transfer.op != Op::Read {
            return Ok(());
        }
        let name = self.transfer.name;
        let failed = |error| Error::io(name, error);
        match &mut self.transfer.place {
            Place::File(file) => {
                let at = (lba - self.transfer.range.lba) * self.block;
                write_at(file, &buffer, at).map_err(failed)
            }
            Place::Writer(writer) => {
                self.early.insert(lba, buffer);
                while let Some(buffer) = self.early.remove(&self.next) {
                    buffer.pieces().try_for_each(|piece| writer.write_all(piece)).map_err(failed)?;
                    self.next += buffer.len() as u64 / self.block;
                }
                Ok(())
            }
            Place::Reader(_) => unreachable!("what is read from the drive is written elsewhere"),
        }
    }

    /// Makes the data durable, on the drive or in the file.
    fn finish(mut self, drive: &Drive, queue: &Queue) -> Result<Moved, Error> {
        let name = self.transfer.name;
        let failed = |error| Error::io(name, error);
        match &mut self.transfer.place {
            Place::Writer(writer) => writer.flush().map_err(failed)?,
            Place::File(file) if self.transfer.op == Op::Read => file.sync_data().map_err(failed)?,
            _ => {}
        }
        if self.transfer.op == Op::Write && drive.info().has_write_cache {
            queue.flush()?;
        }
        let BlockRange { blocks, .. } = self.transfer.range;
        if let Place::Reader(reader) = &mut self.transfer.place
            && self.transfer.is_to_end
            && self.moved.bytes == blocks * self.block
            && read_full(reader, &mut [0]).map_err(failed)? > 0
        {
            let why = format!("{name} has more than the {blocks} blocks there are room for; those are written");
            self.surplus = Some(Error::Request(why));
        }
        self.surplus.map_or(Ok(self.moved), Err)
    }
}

/// Fills a buffer from a place in a file.
fn read_at(file: &File, buffer: &mut Buffer, mut at: u64) -> io::Result<()> {
    let mut pieces: Vec<_> = buffer.pieces_mut().map(IoSliceMut::new).collect();
    let mut left = pieces.as_mut_slice();
    while !left.is_empty() {
        let most = left.len().min(MOST_VECTORS);
        match rustix::io::preadv(file, &mut left[..most], at) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => {
                at += got as u64;
                IoSliceMut::advance_slices(&mut left, got);
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Writes a buffer to a place in a file.
fn write_at(file: &File, buffer: &Buffer, mut at: u64) -> io::Result<()> {
    let mut pieces: Vec<_> = buffer.pieces().map(IoSlice::new).collect();
    let mut left = pieces.as_mut_slice();
    while !left.is_empty() {
        let most = left.len().min(MOST_VECTORS);
        match rustix::io::pwritev(file, &left[..most], at) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(put) => {
                at += put as u64;
                IoSlice::advance_slices(&mut left, put);
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Reads until `bytes` is full or the stream ends.
fn read_full(reader: &mut dyn Read, bytes: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while got < bytes.len() {
        match reader.read(&mut bytes[got..]) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}
