//! In this process, on one thread: the data path of the server, on a file in memory that has no name.
//!
//! As many operations as the depth says hold their pages: a new one encrypts, or reads and decrypts; the oldest is then
//! written, or its pages go back as if they had been sent. Whoever asks has its own bytes already (16 MiB of them, in
//! turn). Without encryption what came in is written as it is, and what was read stays as it was.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::time::Instant;

use pagemill::Allocator;
use pagemill_crypt::secret::Locked;
use pagemill_crypt::serve::{Buffer, DataPath, Disk, Form, Memory, Patience};
use pagemill_crypt::{SectorSize, Volume, volume::Geometry};
use rustix::fs::MemfdFlags;

use super::{Cell, FORMS, Plan, failed, is_compared};
use crate::Error;
use crate::record::Record;
use crate::rows::{Kind, backend_named};
use crate::subject::PAGE_BYTES;
use crate::tables::{CellSamples, Run, Sample, enough, take_turns};

/// What the server keeps for writes when nobody says how much, in pages.
const RESERVE: usize = 1024;
/// Memory for the deepest cell, and as much again.
const PAGES: usize = 2 * 256 * 256;
const SOURCE_BYTES: usize = 16 << 20;
const NO_ENCRYPTION: &str = "no-encryption";

pub(super) fn inside(run: &mut Run, plan: &Plan) -> Result<Vec<Record>, Error> {
    let mut rows: Vec<(&'static str, Option<Form>)> = FORMS.map(|(name, form, _)| (name, Some(form))).to_vec();
    if is_compared(run) {
        rows.push((NO_ENCRYPTION, None));
    }
    let mut rng = fastrand::Rng::with_seed(run.seed);
    let mut entrants = Vec::new();
    for &(name, form) in &rows {
        let made = Entrant::new(run.backend, form, plan.image, &mut rng);
        let mut entrant = made.map_err(|error| failed(name, error))?;
        entrant.verify().map_err(|error| failed(name, error))?;
        entrants.push(entrant);
    }
    let mut records = Vec::new();
    for cell in plan.cells() {
        run.progress.set_message(format!("crypt: {}", cell.shown));
        let mut samples: Vec<CellSamples> =
            rows.iter().map(|(name, form)| cell_samples(run, &cell, name, *form)).collect();
        let mut reps = Vec::new();
        for (entrant, samples) in entrants.iter_mut().zip(&samples) {
            let wrong = |error: io::Error| failed(samples.name, error);
            // Every page is touched, and every operation of the depth is under way, before anything is timed.
            entrant.repeat(&cell, cell.depth + 8).map_err(wrong)?;
            let mut failure = None;
            let scaled = enough(plan.round, |reps| {
                let start = Instant::now();
                failure = entrant.repeat(&cell, reps).err();
                Ok(start.elapsed().max(if failure.is_some() { plan.round } else { Default::default() }))
            });
            failure.map_or(Ok(()), |error| Err(wrong(error)))?;
            reps.push(scaled.map_err(|flaw| samples.flawed(flaw))?);
        }
        let mut failure = None;
        take_turns(run, plan.rounds, &mut samples, &reps, |at, reps| {
            let start = Instant::now();
            if let Err(error) = entrants[at].repeat(&cell, reps) {
                failure.get_or_insert(failed(rows[at].0, error));
            }
            let total = start.elapsed().as_nanos() as f64 / (reps * cell.pages) as f64;
            Ok(Sample { alloc: None, free: None, total })
        })?;
        failure.map_or(Ok(()), Err)?;
        entrants.iter_mut().for_each(Entrant::drain);
        records.extend(samples.into_iter().filter_map(CellSamples::record));
        run.progress.inc(1);
    }
    for (entrant, (name, _)) in entrants.iter_mut().zip(&rows) {
        entrant.verify().map_err(|error| failed(name, error))?;
    }
    Ok(records)
}

fn cell_samples(run: &Run, cell: &Cell, name: &'static str, form: Option<Form>) -> CellSamples {
    let (backend, kind) = if form.is_some() { (run.backend, Kind::Ours) } else { ("-", Kind::Floor) };
    let seed = cell.is_random.then_some(run.seed);
    CellSamples { bench: cell.inside, name, backend, kind, n: cell.pages, samples: Vec::new(), seed }
}

struct Entrant {
    path: DataPath,
    file: File,
    is_encrypted: bool,
    len: usize,
    source: Vec<u8>,
    /// What is under way, the oldest first.
    window: VecDeque<(u64, Buffer)>,
    next: usize,
    rng: fastrand::Rng,
}

impl Entrant {
    fn new(backend: &str, form: Option<Form>, len: u64, rng: &mut fastrand::Rng) -> io::Result<Entrant> {
        let other = |error: &dyn std::fmt::Display| io::Error::other(error.to_string());
        let file = File::from(rustix::fs::memfd_create("pagemill-bench-crypt", MemfdFlags::CLOEXEC)?);
        let mut source = vec![0; SOURCE_BYTES];
        rng.fill(&mut source);
        for at in (0..len).step_by(SOURCE_BYTES) {
            std::os::unix::fs::FileExt::write_all_at(&file, &source, at)?;
        }
        let sector_size = SectorSize::SMALLEST;
        let geometry = Geometry { offset: 0, len, sector_size, first_unit: 0, counts_sectors: false };
        let key = Locked::random(64).map_err(|error| other(&error))?;
        let volume = Volume::new(&key, geometry).map_err(|error| other(&error))?;
        let allocator = Allocator::builder().pages(PAGES + 2 * RESERVE).backend(backend_named(backend)).build();
        let allocator = allocator.map_err(|error| other(&error))?;
        let memory = Memory::new(&allocator, RESERVE, 1 << 20, form.unwrap_or_default());
        let memory = memory.map_err(|error| other(&error))?;
        let disk = Disk::new(file.try_clone()?, 0, sector_size.bytes(), true);
        Ok(Entrant {
            path: DataPath { volume, disk, memory },
            file,
            is_encrypted: form.is_some(),
            len: len as usize,
            source,
            window: VecDeque::new(),
            next: 0,
            rng: rng.fork(),
        })
    }

    /// So many operations. Those of the depth stay under way.
    fn repeat(&mut self, cell: &Cell, reps: usize) -> io::Result<()> {
        let bytes = cell.pages * PAGE_BYTES;
        for _ in 0..reps {
            self.next = match cell.is_random {
                true => self.rng.usize(..self.len / bytes) * bytes,
                false => (self.next + bytes) % self.len / bytes * bytes,
            };
            match cell.is_write {
                true => self.write(self.next, bytes, cell.depth)?,
                false => self.read(self.next, bytes, cell.depth)?,
            }
        }
        Ok(())
    }

    fn write(&mut self, at: usize, bytes: usize, depth: usize) -> io::Result<()> {
        let plain = &self.source[at % SOURCE_BYTES..][..bytes];
        if !self.is_encrypted {
            return whole(rustix::io::pwritev(&self.file, &[IoSlice::new(plain)], at as u64)?, bytes);
        }
        let secret = self.path.encrypted(at as u64, bytes, std::iter::once(plain), Patience::Wait);
        let secret = secret.map_err(|error| io::Error::other(error.to_string()))?;
        self.window.push_back((at as u64, secret.ok_or(io::ErrorKind::OutOfMemory)?));
        if self.window.len() < depth {
            return Ok(());
        }
        let Some((at, secret)) = self.window.pop_front() else { return Ok(()) };
        let vector: Vec<IoSlice> = secret.slices().map(IoSlice::new).collect();
        let written = rustix::io::pwritev(&self.file, &vector, at)?;
        self.path.memory.give_back(secret);
        whole(written, bytes)
    }

    fn read(&mut self, at: usize, bytes: usize, depth: usize) -> io::Result<()> {
        let mut buffer = self.path.memory.borrow(bytes).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut vector: Vec<IoSliceMut> = buffer.slices_mut().map(IoSliceMut::new).collect();
        whole(rustix::io::preadv(&self.file, &mut vector, at as u64)?, bytes)?;
        if self.is_encrypted {
            let decrypted = self.path.decrypt(at as u64, &mut buffer);
            decrypted.map_err(|error| io::Error::other(error.to_string()))?;
        }
        self.window.push_back((at as u64, buffer));
        if self.window.len() >= depth
            && let Some((_, sent)) = self.window.pop_front()
        {
            self.path.memory.give_back(sent);
        }
        Ok(())
    }

    fn drain(&mut self) {
        self.window.drain(..).for_each(|(_, buffer)| self.path.memory.give_back(buffer));
    }

    /// What is written comes back as it was, and is in the file as it should be: encrypted or not.
    fn verify(&mut self) -> io::Result<()> {
        let bytes = 256 * PAGE_BYTES;
        let plain = self.source[..bytes].to_vec();
        self.drain();
        self.write(0, bytes, 1)?;
        let mut stored = vec![0; bytes];
        std::os::unix::fs::FileExt::read_exact_at(&self.file, &mut stored, 0)?;
        if (stored == plain) == self.is_encrypted {
            return Err(io::Error::other("what is in the file is not encrypted as it should be"));
        }
        self.read(0, bytes, 2)?;
        let is_same = match self.window.back() {
            Some((_, buffer)) => buffer.slices().flatten().eq(&plain),
            None => false,
        };
        self.drain();
        if is_same { Ok(()) } else { Err(io::Error::other("what was read is not what was written")) }
    }
}

fn whole(done: usize, bytes: usize) -> io::Result<()> {
    if done == bytes { Ok(()) } else { Err(io::Error::other(format!("{done} bytes were moved of {bytes}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::crypt::CELLS;

    #[test]
    fn every_row_moves_what_it_should_and_gives_its_pages_back() {
        let mut rng = fastrand::Rng::with_seed(1);
        for form in [Some(Form::Bulk), Some(Form::Single), Some(Form::Malloc), None] {
            let mut entrant = Entrant::new("portable", form, 32 << 20, &mut rng).unwrap();
            for cell in CELLS {
                entrant.repeat(&cell, cell.depth + 3).unwrap();
                entrant.verify().unwrap();
                assert!(entrant.window.is_empty());
                assert_eq!(entrant.path.memory.pool().stats().out, 0, "{form:?}");
            }
            // The file has plain bytes in one row alone.
            entrant.write(0, 1 << 20, 1).unwrap();
            let mut stored = vec![0; 1 << 20];
            std::os::unix::fs::FileExt::read_exact_at(&entrant.file, &mut stored, 0).unwrap();
            assert_eq!(stored == entrant.source[..1 << 20], form.is_none());
        }
    }
}
