//! How bytes move between a client's pages and the disk, without sockets; it does what dm-crypt does.
//!
//! A short write is encrypted from the connection's bytes into pages of the pool, all pages of a part with one call, and
//! written from there. A longer write is received into borrowed pages, encrypted in place as it comes, and written from
//! those. A read's bytes are decrypted in place.
//!
//! A part has at most [`Memory::part`] bytes, a megabyte or the pool's reserve. Longer requests have several parts,
//! each of which takes and frees its own pages, so that nobody needs more than the reserve at once (C5.3).
use std::ops::Range;

use super::buffer::Buffer;
use super::disk::Disk;
use super::memory::{Memory, Patience};
use crate::secret::scrub_blocks;
use crate::{Error, Volume};

/// An open volume, its disk, and the memory between the disk and clients.
#[derive(Debug)]
pub struct DataPath {
    /// The key and the place of the data.
    pub volume: Volume,
    /// The file.
    pub disk: Disk,
    /// The pages.
    pub memory: Memory,
}

/// Zeroes to encrypt.
static ZEROES: [u8; 1 << 16] = [0; 1 << 16];

impl DataPath {
    /// Where byte `at` of the volume lies in the file.
    pub(super) fn in_file(&self, at: u64) -> u64 {
        self.volume.geometry().offset + at
    }

    /// Encrypts a part at `at` of the volume into pages of the pool. `None` if there are too few pages, and `patience`
    /// does not allow waiting.
    ///
    /// # Errors
    /// [`Error::Request`] unless it is a whole number of sectors; [`Error::Memory`] as for [`Memory::take`].
    pub fn encrypted<'a>(
        &self,
        at: u64,
        len: usize,
        plain: impl Iterator<Item = &'a [u8]>,
        patience: Patience,
    ) -> Result<Option<Buffer>, Error> {
        let Some(mut secret) = self.memory.take(len, patience).map_err(Error::Memory)? else { return Ok(None) };
        match self.encrypt(at, plain, &mut secret) {
            Ok(()) => Ok(Some(secret)),
            Err(error) => {
                self.memory.give_back(secret);
                Err(error)
            }
        }
    }

    /// Encrypts zeroes, like [`DataPath::encrypted`].
    ///
    /// # Errors
    /// As there.
    pub fn encrypted_zeroes(&self, at: u64, len: usize, patience: Patience) -> Result<Option<Buffer>, Error> {
        let whole = std::iter::repeat_n(&ZEROES[..], len / ZEROES.len());
        let rest = &ZEROES[..len % ZEROES.len()];
        self.encrypted(at, len, whole.chain([rest]), patience)
    }

    /// Encrypts a part at `at` of the volume into a buffer of its length, run by run of both. No sector crosses the end
    /// of a run.
    ///
    /// # Errors
    /// [`Error::Request`] for what is no whole number of sectors.
    ///
    /// # Panics
    /// The buffer is shorter.
    pub fn encrypt<'a>(
        &self,
        mut at: u64,
        plain: impl Iterator<Item = &'a [u8]>,
        secret: &mut Buffer,
    ) -> Result<(), Error> {
        let first = at;
        {
            let mut places = secret.slices_mut();
            let mut place: &mut [u8] = &mut [];
            for mut plain in plain {
                while !plain.is_empty() {
                    if place.is_empty() {
                        let Some(next) = places.next() else { unreachable!("more is encrypted than was asked for") };
                        place = next;
                    }
                    let len = plain.len().min(place.len());
                    let (from, to) = (plain.split_at(len), std::mem::take(&mut place).split_at_mut(len));
                    self.volume.encrypt(at, from.0, to.0)?;
                    (plain, place) = (from.1, to.1);
                    at += len as u64;
                }
            }
        }
        scrub_blocks();
        secret.note_encrypted((at - first) as usize);
        Ok(())
    }

    /// Encrypts the first `end` bytes of a buffer for `at` of the volume, where they stand, except those that are already
    /// encrypted. Until the buffer is full, the bytes after the last whole sector wait.
    ///
    /// # Errors
    /// [`Error::Request`] for what is no whole number of sectors, and beyond the volume's end.
    pub(super) fn encrypt_up_to(&self, at: u64, buffer: &mut Buffer, end: usize) -> Result<(), Error> {
        let sector = self.volume.geometry().sector_size.bytes();
        let range = buffer.clean()..if end < buffer.len() { end / sector * sector } else { end };
        let mut from = at + range.start as u64;
        for slice in buffer.range_mut(range.clone()) {
            self.volume.encrypt_in_place(from, slice)?;
            from += slice.len() as u64;
        }
        scrub_blocks();
        buffer.note_encrypted(range.end);
        Ok(())
    }

    /// Decrypts `range` of a buffer that was read from `at` of the volume. It has whole sectors.
    pub(super) fn decrypt_range(&self, at: u64, buffer: &mut Buffer, range: Range<usize>) -> Result<(), Error> {
        let mut at = at + range.start as u64;
        for slice in buffer.range_mut(range) {
            self.volume.decrypt_in_place(at, slice)?;
            at += slice.len() as u64;
        }
        scrub_blocks();
        Ok(())
    }

    /// Decrypts a buffer that was read from `at` of the volume.
    ///
    /// # Errors
    /// [`Error::Request`] for what is no whole number of sectors.
    pub fn decrypt(&self, at: u64, buffer: &mut Buffer) -> Result<(), Error> {
        self.decrypt_range(at, buffer, 0..buffer.len())
    }
}
