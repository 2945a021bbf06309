//! In this process, on one thread: the data path of the server, on an unnamed file in memory.
//!
//! At any time as many operations hold pages as the depth says. A new operation encrypts into its pages, or reads into
//! them and decrypts. Then the oldest one is written to the file, or its pages are freed as if they had been sent. The
//! data to be written comes from 16 MiB that are reused in turn. The row without encryption writes the data as it is,
//! and does not decrypt. The row with pages one by one has a call for each page, both ways. Its code is here, around
//! the server's buffers, pool and allocator, since the server itself asks only in bulk.
//!
//! All rows share the file, the key and the data. Each round has an allocator and a pool of its own, because the place
//! of its memory makes one of two equal rows up to a tenth slower for as long as it keeps that memory. If all rounds
//! shared their memory, the interval of their ratios would exclude 1 although nothing differs.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::time::Instant;

use pagemill::{Allocator, Backend, Gfp, Page};
use pagemill_crypt::secret::Locked;
use pagemill_crypt::serve::{Buffer, DataPath, Disk, Memory, Patience};
use pagemill_crypt::{SectorSize, Volume, volume::Geometry};
use rustix::fs::MemfdFlags;

use crate::{BULK, Cell, Plan, SINGLE, failed};
use pagemill_harness::record::Record;
use pagemill_harness::rounds::{CellSamples, Kind, Sample, enough, in_turns, take_turn};
use pagemill_harness::{Error, PAGE_BYTES, Run};

/// The server's default, in pages.
const RESERVE: usize = Memory::PROMISED;
/// Twice the memory of the deepest cell.
const PAGES: usize = 2 * 256 * 256;
const SOURCE_BYTES: usize = 16 << 20;

/// How a row moves its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The server's data path: all pages of a part with one call.
    Bulk,
    /// The same with a call for each page.
    Single,
    NoEncryption,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Bulk => BULK,
            Way::Single => SINGLE,
            Way::NoEncryption => "no-encryption",
        }
    }
}

pub(crate) fn inside(run: &mut Run<'_>, plan: &Plan) -> Result<Vec<Record>, Error> {
    let mut rows = vec![Way::Bulk, Way::Single];
    if run.is_compared {
        rows.push(Way::NoEncryption);
    }
    let ground = Ground::new(run.backend, plan.image, run.seed).map_err(|error| failed("a file in memory", error))?;
    let verify = || {
        let verified = |way| Entrant::new(&ground, way, run.seed)?.verify();
        rows.iter().try_for_each(|&way| verified(way).map_err(|error| failed(way.name(), error)))
    };
    verify()?;
    let mut records = Vec::new();
    for cell in plan.cells() {
        run.progress.set_message(format!("crypt: {}", cell.shown));
        let mut samples: Vec<CellSamples> = rows.iter().map(|&way| cell_samples(run, &cell, way)).collect();
        let mut reps = Vec::new();
        for (&way, samples) in rows.iter().zip(&samples) {
            let found = Entrant::under_way(&ground, way, run.seed, &cell).and_then(|mut entrant| {
                enough(plan.round, |reps| {
                    let start = Instant::now();
                    entrant.repeat(&cell, reps)?;
                    Ok(start.elapsed())
                })
            });
            reps.push(found.map_err(|flaw| samples.flawed(flaw))?);
        }
        for (turn, at) in in_turns(plan.rounds_of(&cell), rows.len()) {
            let (way, seed) = (rows[at], run.seed.wrapping_add(turn as u64));
            let entrant = Entrant::under_way(&ground, way, seed, &cell);
            let mut entrant = entrant.map_err(|error| samples[at].flawed(error))?;
            take_turn(run, &mut samples[at], reps[at], |reps| {
                let start = Instant::now();
                entrant.repeat(&cell, reps)?;
                Ok::<_, io::Error>(Sample::whole(start.elapsed().as_nanos() as f64 / (reps * cell.pages) as f64))
            })?;
        }
        records.extend(samples.into_iter().filter_map(CellSamples::record));
        run.progress.inc(1);
    }
    verify()?;
    Ok(records)
}

fn cell_samples(run: &Run<'_>, cell: &Cell, way: Way) -> CellSamples {
    let row = match way {
        Way::Bulk | Way::Single => (way.name(), run.backend, Kind::Ours),
        Way::NoEncryption => (way.name(), "-", Kind::Floor),
    };
    let seed = cell.is_random.then_some(run.seed);
    CellSamples { seed, ..CellSamples::new(cell.inside, row, cell.pages) }
}

/// What all rows share: a file, a key, and the data to write.
struct Ground {
    backend: &'static str,
    file: File,
    len: usize,
    key: Locked,
    source: Vec<u8>,
}

impl Ground {
    fn new(backend: &'static str, len: u64, seed: u64) -> io::Result<Ground> {
        let file = File::from(rustix::fs::memfd_create("pagemill-bench-crypt", MemfdFlags::CLOEXEC)?);
        let mut source = vec![0; SOURCE_BYTES];
        fastrand::Rng::with_seed(seed).fill(&mut source);
        for at in (0..len).step_by(SOURCE_BYTES) {
            std::os::unix::fs::FileExt::write_all_at(&file, &source, at)?;
        }
        let key = Locked::random(64).map_err(other)?;
        Ok(Ground { backend, file, len: len as usize, key, source })
    }
}

fn other(error: impl std::fmt::Display) -> io::Error {
    io::Error::other(error.to_string())
}

/// The memory of one operation.
struct Held {
    at: u64,
    buffer: Buffer,
    is_of_pool: bool,
}

/// One row, with memory of its own.
struct Entrant<'g> {
    ground: &'g Ground,
    path: DataPath,
    way: Way,
    /// The operations that hold pages, the oldest first.
    window: VecDeque<Held>,
    next: usize,
    rng: fastrand::Rng,
}

impl<'g> Entrant<'g> {
    fn new(ground: &'g Ground, way: Way, seed: u64) -> io::Result<Entrant<'g>> {
        let sector_size = SectorSize::SMALLEST;
        let geometry =
            Geometry { offset: 0, len: ground.len as u64, sector_size, first_unit: 0, counts_sectors: false };
        let volume = Volume::new(&ground.key, geometry).map_err(other)?;
        let backend = ground.backend.parse::<Backend>().map_err(other)?;
        let allocator = Allocator::builder().pages(PAGES + 2 * RESERVE).backend(backend).build().map_err(other)?;
        let memory = Memory::new(&allocator, RESERVE, Memory::PART).map_err(other)?;
        let disk = Disk::new(ground.file.try_clone()?, 0, sector_size.bytes(), true);
        Ok(Entrant {
            ground,
            path: DataPath { volume, disk, memory },
            way,
            window: VecDeque::new(),
            next: 0,
            rng: fastrand::Rng::with_seed(seed),
        })
    }

    /// The same, with as many operations under way as the cell's depth, so that all pages have been touched.
    fn under_way(ground: &'g Ground, way: Way, seed: u64, cell: &Cell) -> io::Result<Entrant<'g>> {
        let mut entrant = Entrant::new(ground, way, seed)?;
        entrant.repeat(cell, cell.depth + 8)?;
        Ok(entrant)
    }

    /// Runs `reps` operations. The last ones, as many as the depth, stay under way.
    fn repeat(&mut self, cell: &Cell, reps: usize) -> io::Result<()> {
        let bytes = cell.pages * PAGE_BYTES;
        for _ in 0..reps {
            self.next = match cell.is_random {
                true => self.rng.usize(..self.ground.len / bytes) * bytes,
                false => (self.next + bytes) % self.ground.len / bytes * bytes,
            };
            match cell.is_write {
                true => self.write(self.next, bytes, cell.depth)?,
                false => self.read(self.next, bytes, cell.depth)?,
            }
        }
        Ok(())
    }

    /// Takes a part's pages as a worker of the server does: while it holds pages of the pool, it does not wait for
    /// more.
    fn write(&mut self, at: usize, bytes: usize, depth: usize) -> io::Result<()> {
        let plain = &self.ground.source[at % SOURCE_BYTES..][..bytes];
        if self.way == Way::NoEncryption {
            return whole(rustix::io::pwritev(&self.ground.file, &[IoSlice::new(plain)], at as u64)?, bytes);
        }
        let secret = loop {
            let patience = if self.window.is_empty() { Patience::Wait } else { Patience::None };
            match self.encrypted(at as u64, plain, patience)? {
                Some(buffer) => break Held { at: at as u64, buffer, is_of_pool: true },
                None if self.window.is_empty() => return Err(io::ErrorKind::OutOfMemory.into()),
                None => self.write_oldest()?,
            }
        };
        self.window.push_back(secret);
        if self.window.len() < depth { Ok(()) } else { self.write_oldest() }
    }

    /// Encrypts a part into pages of the pool; `None` if there are too few.
    fn encrypted(&self, at: u64, plain: &[u8], patience: Patience) -> io::Result<Option<Buffer>> {
        if self.way == Way::Bulk {
            return self.path.encrypted(at, plain.len(), std::iter::once(plain), patience).map_err(other);
        }
        // With too few pages it frees those that it got, and does not wait: nobody else has pages of this pool.
        let pool = self.path.memory.pool();
        let mut secret = match one_by_one(plain.len(), || pool.alloc_raw(Gfp::NOWAIT).ok()) {
            Ok(pages) => Buffer::over(pages, plain.len()),
            Err(few) => {
                few.into_iter().flatten().for_each(|page| pool.free_raw(page));
                return Ok(None);
            }
        };
        self.path.encrypt(at, std::iter::once(plain), &mut secret).map_err(other)?;
        Ok(Some(secret))
    }

    /// Writes the oldest operation under way, and frees its pages.
    fn write_oldest(&mut self) -> io::Result<()> {
        let Some(secret) = self.window.pop_front() else { return Ok(()) };
        let vector: Vec<IoSlice> = secret.buffer.slices().map(IoSlice::new).collect();
        let written = rustix::io::pwritev(&self.ground.file, &vector, secret.at)?;
        let bytes = secret.buffer.len();
        self.give_back(secret);
        whole(written, bytes)
    }

    fn read(&mut self, at: usize, bytes: usize, depth: usize) -> io::Result<()> {
        let mut buffer = self.borrowed(bytes).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut vector: Vec<IoSliceMut> = buffer.slices_mut().map(IoSliceMut::new).collect();
        whole(rustix::io::preadv(&self.ground.file, &mut vector, at as u64)?, bytes)?;
        if self.way != Way::NoEncryption {
            self.path.decrypt(at as u64, &mut buffer).map_err(other)?;
        }
        self.window.push_back(Held { at: at as u64, buffer, is_of_pool: false });
        if self.window.len() >= depth
            && let Some(sent) = self.window.pop_front()
        {
            self.give_back(sent);
        }
        Ok(())
    }

    /// Pages to read into.
    fn borrowed(&self, bytes: usize) -> Option<Buffer> {
        if self.way != Way::Single {
            return self.path.memory.borrow(bytes);
        }
        let allocator = self.path.memory.allocator();
        let pages = one_by_one(bytes, || allocator.alloc_page(Gfp::NOWAIT).ok()).ok()?;
        Some(Buffer::over(pages, bytes))
    }

    fn give_back(&self, held: Held) {
        let memory = &self.path.memory;
        match (self.way, held.is_of_pool) {
            (Way::Single, true) => {
                held.buffer.into_pages().into_iter().flatten().for_each(|page| memory.pool().free_raw(page))
            }
            (Way::Single, false) => drop(held.buffer),
            _ => memory.give_back(held.buffer),
        }
    }

    fn drain(&mut self) {
        while let Some(held) = self.window.pop_front() {
            self.give_back(held);
        }
    }

    /// Checks that data is read as it was written, and that it is encrypted in the file, or not, as the row says.
    fn verify(&mut self) -> io::Result<()> {
        let bytes = 256 * PAGE_BYTES;
        let plain = self.ground.source[..bytes].to_vec();
        self.drain();
        self.write(0, bytes, 1)?;
        let mut stored = vec![0; bytes];
        std::os::unix::fs::FileExt::read_exact_at(&self.ground.file, &mut stored, 0)?;
        if (stored == plain) == (self.way != Way::NoEncryption) {
            return Err(io::Error::other("what is in the file is not encrypted as it should be"));
        }
        self.read(0, bytes, 2)?;
        let is_same = match self.window.back() {
            Some(held) => held.buffer.slices().flatten().eq(&plain),
            None => false,
        };
        self.drain();
        if is_same { Ok(()) } else { Err(io::Error::other("what was read is not what was written")) }
    }
}

/// Pages for `bytes`, with a call each. If there are too few, the error has those that there were.
fn one_by_one(bytes: usize, mut page: impl FnMut() -> Option<Page>) -> Result<Vec<Option<Page>>, Vec<Option<Page>>> {
    let count = bytes.div_ceil(PAGE_BYTES);
    let mut pages = Vec::with_capacity(count);
    for _ in 0..count {
        match page() {
            Some(page) => pages.push(Some(page)),
            None => return Err(pages),
        }
    }
    Ok(pages)
}

fn whole(done: usize, bytes: usize) -> io::Result<()> {
    if done == bytes { Ok(()) } else { Err(io::Error::other(format!("{done} bytes were moved of {bytes}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CELLS;

    #[test]
    fn every_row_reads_and_writes_the_volume_and_frees_its_pages() {
        let ground = Ground::new("portable", 32 << 20, 1).unwrap();
        for way in [Way::Bulk, Way::Single, Way::NoEncryption] {
            let mut entrant = Entrant::new(&ground, way, 1).unwrap();
            for cell in CELLS {
                entrant.repeat(&cell, cell.depth + 3).unwrap();
                entrant.verify().unwrap();
                assert!(entrant.window.is_empty());
                assert_eq!(entrant.path.memory.pool().stats().out, 0, "{way:?}");
            }
            // Only the row without encryption leaves plain bytes in the file.
            entrant.write(0, 1 << 20, 1).unwrap();
            let mut stored = vec![0; 1 << 20];
            std::os::unix::fs::FileExt::read_exact_at(&ground.file, &mut stored, 0).unwrap();
            assert_eq!(stored == ground.source[..1 << 20], way == Way::NoEncryption);
        }
    }

    #[test]
    fn rows_that_hold_pages_never_wait_for_the_pool() {
        let ground = Ground::new("portable", 32 << 20, 1).unwrap();
        for way in [Way::Bulk, Way::Single] {
            let mut entrant = Entrant::new(&ground, way, 1).unwrap();
            let allocator = Allocator::builder().pages(600).build().unwrap();
            entrant.path.memory = Memory::new(&allocator, 300, Memory::PART).unwrap();
            // Of 16 operations with 256 pages each, at most two get pages.
            entrant.repeat(&CELLS[1], 20).unwrap();
            assert!((1..=2).contains(&entrant.window.len()), "{way:?}: {}", entrant.window.len());
            entrant.verify().unwrap();
            assert_eq!(entrant.path.memory.pool().stats().waits, 0, "{way:?}");
        }
    }
}
