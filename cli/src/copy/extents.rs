//! Finds the parts of a file that hold data, one after the other, while the file is copied.
use std::fs::File;

use rustix::fs::{SeekFrom, seek};
use rustix::io::{Errno, retry_on_intr};

/// Walks a file's data and counts its holes.
///
/// Invariant: everything before `at` is done, and from `at` to `data_end` there is data.
pub(crate) struct Extents<'f> {
    file: &'f File,
    at: u64,
    data_end: u64,
    /// The file's end; `u64::MAX` if only reading will tell.
    end: u64,
    /// Holes that were passed.
    pub(crate) holes: u64,
    /// Their bytes.
    pub(crate) hole_bytes: u64,
}

/// A part of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
}

impl<'f> Extents<'f> {
    /// The extents up to `end`. Without it, everything is data until reading reaches the end.
    pub(crate) fn new(file: &'f File, end: Option<u64>) -> Self {
        let data_end = if end.is_some() { 0 } else { u64::MAX };
        Self { file, at: 0, data_end, end: end.unwrap_or(u64::MAX), holes: 0, hole_bytes: 0 }
    }

    /// The next part with data, of at most `most` bytes.
    pub(crate) fn peek(&mut self, most: usize) -> Result<Option<Part>, Errno> {
        while self.at == self.data_end && self.at < self.end {
            self.find_data()?;
        }
        let left = self.data_end.min(self.end).saturating_sub(self.at);
        let bytes = left.min(most as u64) as usize;
        Ok((bytes > 0).then_some(Part { offset: self.at, bytes }))
    }

    /// Takes the first `bytes` of the part that `peek` showed.
    pub(crate) fn advance(&mut self, bytes: usize) {
        self.at += bytes as u64;
    }

    /// There is nothing more: reading has reached the file's end.
    pub(crate) fn stop(&mut self) {
        (self.end, self.data_end) = (self.at, self.at);
    }

    /// Everything before this offset is done.
    pub(crate) fn position(&self) -> u64 {
        self.at
    }

    /// Passes the hole at `at`, if there is one, and finds the end of the data behind it.
    fn find_data(&mut self) -> Result<(), Errno> {
        let data = match retry_on_intr(|| seek(self.file, SeekFrom::Data(self.at))) {
            Ok(data) => data.clamp(self.at, self.end),
            // No data from here on.
            Err(Errno::NXIO) => self.end,
            // This file system does not report holes.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                self.data_end = self.end;
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        if data > self.at {
            self.holes += 1;
            self.hole_bytes += data - self.at;
        }
        (self.at, self.data_end) = (data, data);
        if data < self.end {
            self.data_end = match retry_on_intr(|| seek(self.file, SeekFrom::Hole(data))) {
                // If somebody has since made a hole of the data, the next call looks again from here.
                Ok(hole) => hole.clamp(data, self.end),
                // Somebody has since cut the file off before `data`: reading will find its end.
                Err(Errno::NXIO) => self.end,
                Err(error) => return Err(error),
            };
        }
        Ok(())
    }
}
