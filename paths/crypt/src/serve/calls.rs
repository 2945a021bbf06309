//! The data path as blocking calls at any byte, for callers that do one request at a time, such as a mount.
//!
//! Whole sectors are handled like a client's. A sector that is written in part is read, decrypted, changed and written.
//! Nobody else writes to it meanwhile (S1): a write of whole sectors holds `sectors` shared, a write of a part of a
//! sector holds it exclusively.
use std::io;
use std::ops::Range;
use std::sync::{PoisonError, RwLock};

use zeroize::Zeroizing;

use super::buffer::Buffer;
use super::disk::{Op, Todo, plain_step};
use super::memory::Patience;
use super::path::DataPath;
use crate::Error;

/// A volume that is read and written like a file.
#[derive(Debug)]
pub struct VolumeFile {
    path: DataPath,
    sectors: RwLock<()>,
}

impl VolumeFile {
    /// Over an open volume.
    #[must_use]
    pub fn new(path: DataPath) -> Self {
        Self { path, sectors: RwLock::new(()) }
    }

    /// The open volume.
    #[must_use]
    pub fn path(&self) -> &DataPath {
        &self.path
    }

    /// Bytes of the volume.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.path.volume.geometry().len
    }

    /// Fills `plain` from `at`.
    ///
    /// # Errors
    /// What the disk says, and [`io::ErrorKind::UnexpectedEof`] beyond the volume's end.
    pub fn read_at(&self, at: u64, plain: &mut [u8]) -> io::Result<()> {
        self.within(at, plain.len(), io::ErrorKind::UnexpectedEof)?;
        let mut to = 0;
        while to < plain.len() {
            let from = at + to as u64;
            let sectors = self.sectors_around(from, plain.len() - to);
            let buffer = self.read_sectors(&sectors)?;
            let skip = (from - sectors.start) as usize;
            let len = (buffer.len() - skip).min(plain.len() - to);
            buffer.copy_out(skip, &mut plain[to..to + len]);
            self.path.memory.give_back(buffer);
            to += len;
        }
        Ok(())
    }

    /// Writes all of `plain` at `at`.
    ///
    /// # Errors
    /// What the disk says, and [`io::ErrorKind::StorageFull`] beyond the volume's end; nothing was written then.
    pub fn write_at(&self, at: u64, plain: &[u8]) -> io::Result<()> {
        self.within(at, plain.len(), io::ErrorKind::StorageFull)?;
        let mut done = 0;
        while done < plain.len() {
            let from = at + done as u64;
            let sectors = self.sectors_around(from, plain.len() - done);
            let len = ((sectors.end - from) as usize).min(plain.len() - done);
            let rest = &plain[done..done + len];
            done += match sectors.start == from && sectors.end == from + len as u64 {
                true => self.write_sectors(from, rest)?,
                false => self.write_in_part(from, rest)?,
            };
        }
        Ok(())
    }

    /// Returns when all written data is on the disk.
    ///
    /// # Errors
    /// What the disk says.
    pub fn sync(&self) -> io::Result<()> {
        self.path.disk.sync()
    }

    fn within(&self, at: u64, len: usize, beyond: io::ErrorKind) -> io::Result<()> {
        match at.checked_add(len as u64) {
            Some(end) if end <= self.size() => Ok(()),
            _ => Err(beyond.into()),
        }
    }

    /// The sectors with these bytes, at most as many as are moved at once.
    fn sectors_around(&self, at: u64, len: usize) -> Range<u64> {
        let size = self.sector();
        let first = at / size * size;
        first..(at + len as u64).next_multiple_of(size).min(first + self.path.memory.part() as u64)
    }

    fn sector(&self) -> u64 {
        self.path.volume.geometry().sector_size.bytes() as u64
    }

    fn read_sectors(&self, sectors: &Range<u64>) -> io::Result<Buffer> {
        let len = (sectors.end - sectors.start) as usize;
        let buffer = match self.path.memory.borrow(len) {
            Some(buffer) => buffer,
            // Memory is short; the pool's reserve is enough for one part.
            None => self
                .path
                .memory
                .take(len, Patience::Wait)
                .map_err(Error::Memory)
                .map_err(said)?
                .ok_or(io::ErrorKind::OutOfMemory)?,
        };
        // It comes back decrypted, like every blocking step.
        let (buffer, result) = self.step(Todo::Read, sectors.start, buffer);
        match result {
            Ok(()) => Ok(buffer),
            Err(error) => {
                self.path.memory.give_back(buffer);
                Err(error)
            }
        }
    }

    /// Writes whole sectors, at most a part. Returns how many bytes.
    fn write_sectors(&self, at: u64, plain: &[u8]) -> io::Result<usize> {
        // S1. The lock protects no data that a panic could leave broken.
        let _shared = self.sectors.read().unwrap_or_else(PoisonError::into_inner);
        self.write_alone(at, plain)
    }

    fn write_alone(&self, at: u64, plain: &[u8]) -> io::Result<usize> {
        let secret = self.path.encrypted(at, plain.len(), std::iter::once(plain), Patience::Wait).map_err(said)?;
        let secret = secret.ok_or(io::ErrorKind::OutOfMemory)?;
        let (secret, result) = self.step(Todo::Write, at, secret);
        self.path.memory.give_back(secret);
        result.map(|()| plain.len())
    }

    /// Writes bytes that begin or end inside of a sector: only that sector. Returns how many bytes.
    fn write_in_part(&self, at: u64, plain: &[u8]) -> io::Result<usize> {
        let size = self.sector();
        let first = at / size * size;
        if at == first && plain.len() as u64 > size {
            // Only the last sector is written in part.
            return self.write_sectors(at, &plain[..plain.len() / size as usize * size as usize]);
        }
        let _alone = self.sectors.write().unwrap_or_else(PoisonError::into_inner);
        let mut sector = Zeroizing::new(vec![0; size as usize]);
        let old = self.read_sectors(&(first..first + size))?;
        old.copy_out(0, &mut sector);
        self.path.memory.give_back(old);
        let skip = (at - first) as usize;
        let len = plain.len().min(sector.len() - skip);
        sector[skip..skip + len].copy_from_slice(&plain[..len]);
        self.write_alone(first, &sector)?;
        Ok(len)
    }

    fn step(&self, todo: Todo, at: u64, buffer: Buffer) -> (Buffer, io::Result<()>) {
        let (op, result) = plain_step(&self.path, Op::new(todo, self.path.in_file(at), buffer, (0, 0)));
        (op.buffer, result)
    }
}

fn said(error: Error) -> io::Error {
    match error {
        Error::Io { source, .. } => source,
        Error::Memory(_) => io::ErrorKind::OutOfMemory.into(),
        other => io::Error::other(other),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Disk, Memory};
    use super::*;
    use crate::secret::Locked;
    use crate::{SectorSize, Volume, volume::Geometry};

    const LEN: usize = 96 << 10;

    fn file(sector: u64, pages: usize, promised: usize) -> (VolumeFile, std::fs::File) {
        let data = tempfile::tempfile().unwrap();
        data.set_len(LEN as u64 + 1024).unwrap();
        let sector_size = SectorSize::new(sector).unwrap();
        let geometry = Geometry { offset: 1024, len: LEN as u64, sector_size, first_unit: 0, counts_sectors: false };
        let volume = Volume::new(&Locked::copy_of(&[7; 64]), geometry).unwrap();
        let allocator = pagemill::Allocator::builder().pages(pages).build().unwrap();
        let memory = Memory::new(&allocator, promised, 1 << 20).unwrap();
        let disk = Disk::new(data.try_clone().unwrap(), 1024, sector as usize, true);
        (VolumeFile::new(DataPath { volume, disk, memory }), data)
    }

    /// Any bytes at any place, compared with a plain array; with plenty of memory, and with the reserve only.
    #[test]
    fn any_bytes_are_read_and_written() {
        for (sector, pages) in [(512, 1024), (4096, 1024), (512, 4), (4096, 4)] {
            let (file, data) = file(sector, pages, 4);
            let mut model = vec![0; LEN];
            file.write_at(0, &model).unwrap();
            let mut seed = 1u64;
            let mut random = |below: usize| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (seed >> 33) as usize % below
            };
            for turn in 0..300 {
                let at = random(LEN);
                let len = random([600, 5000, 40_000][turn % 3]).min(LEN - at);
                let bytes: Vec<u8> = (0..len).map(|_| random(256) as u8).collect();
                file.write_at(at as u64, &bytes).unwrap();
                model[at..at + len].copy_from_slice(&bytes);
                let at = random(LEN);
                let mut read = vec![0; random(40_000).min(LEN - at)];
                file.read_at(at as u64, &mut read).unwrap();
                assert!(read == model[at..at + read.len()], "turn {turn}, {} bytes at {at}", read.len());
            }
            file.sync().unwrap();
            let mut whole = vec![0; LEN];
            file.read_at(0, &mut whole).unwrap();
            assert!(whole == model);
            // The file has what the volume says, and nothing before or after it was touched.
            let mut stored = vec![0; LEN + 1024];
            std::os::unix::fs::FileExt::read_exact_at(&data, &mut stored, 0).unwrap();
            assert!(stored[..1024].iter().all(|&byte| byte == 0));
            file.path().volume.decrypt_in_place(0, &mut stored[1024..]).unwrap();
            assert!(stored[1024..] == model);
            assert_eq!(data.metadata().unwrap().len(), LEN as u64 + 1024);
            assert_eq!(file.path().memory.pool().stats().out, 0);
        }
    }

    #[test]
    fn concurrent_writes_to_parts_of_one_sector_all_last() {
        let (file, _data) = file(4096, 1024, 64);
        file.write_at(0, &[0; 8192]).unwrap();
        std::thread::scope(|scope| {
            for part in 0..8u8 {
                let file = &file;
                scope.spawn(move || {
                    (0..200).for_each(|_| file.write_at(u64::from(part) * 512, &[part + 1; 512]).unwrap())
                });
            }
            scope.spawn(|| (0..200).for_each(|_| file.write_at(4096, &[9; 4096]).unwrap()));
        });
        let mut read = [0; 8192];
        file.read_at(0, &mut read).unwrap();
        assert!(
            read.chunks(512)
                .zip([1, 2, 3, 4, 5, 6, 7, 8].into_iter().chain([9; 8]))
                .all(|(part, is)| part == [is; 512])
        );
    }

    /// Waits until `count` threads wait for the pool. Gives up after `looks` checks, since a lock may keep them from
    /// getting there.
    fn until_waiting(file: &VolumeFile, count: usize, looks: usize) {
        for _ in 0..looks {
            if file.path.memory.pool().stats().waiting == count {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }

    /// There is one page, which is taken: the first writer waits for it before it reads the sector, and again before it
    /// writes it. The second writer comes in between.
    #[test]
    fn writes_to_parts_of_a_sector_exclude_each_other() {
        const SECTOR: usize = 4096;
        for second in [512..1024, 0..SECTOR] {
            let (file, _data) = file(SECTOR as u64, 1, 1);
            file.write_at(0, &[1; SECTOR]).unwrap();
            let memory = &file.path.memory;
            let only = memory.take(SECTOR, Patience::None).unwrap().unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| file.write_at(0, &[2; 512]).unwrap());
                until_waiting(&file, 1, 300_000); // Ten minutes: it comes.
                assert_eq!(memory.pool().stats().waiting, 1);
                scope.spawn(|| file.write_at(second.start as u64, &vec![3; second.len()]).unwrap());
                until_waiting(&file, 2, 100);
                memory.give_back(only);
            });
            let mut is = [0; SECTOR];
            file.read_at(0, &mut is).unwrap();
            let mut expected = [1; SECTOR];
            expected[..512].fill(2);
            expected[second.clone()].fill(3);
            assert!(is == expected, "{second:?}: one write is lost");
        }
    }

    #[test]
    fn reads_and_writes_beyond_the_end_fail() {
        let (file, _data) = file(512, 64, 4);
        for (at, len) in [(LEN as u64, 1), (LEN as u64 - 1, 2), (u64::MAX, 1), (u64::MAX - 1, 512)] {
            let refused = file.write_at(at, &vec![1; len]).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
            let refused = file.read_at(at, &mut vec![1; len]).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::UnexpectedEof);
        }
        file.write_at(LEN as u64, &[]).unwrap();
    }
}
