//! Which parts of a file hold data, found one after the other while it is copied.
use std::fs::File;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

/// Walks a file's data and counts its holes.
///
/// Invariant: all before `at` is done with, and from `at` to `data_end` there is data.
pub(crate) struct Extents<'f> {
    file: &'f File,
    at: u64,
    data_end: u64,
    /// Where the file ends; `u64::MAX` where that shows on reading alone.
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
    /// The extents up to `end`; without it, all is data until reading says otherwise.
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

    /// The first `bytes` of the part that `peek` showed are taken.
    pub(crate) fn advance(&mut self, bytes: usize) {
        self.at += bytes as u64;
    }

    /// There is nothing more: the file turned out to end before.
    pub(crate) fn stop(&mut self) {
        (self.end, self.data_end) = (self.at, self.at);
    }

    /// How far it has come.
    pub(crate) fn position(&self) -> u64 {
        self.at
    }

    /// From `at`, passes a hole if there is one, and finds how far the data behind it goes.
    fn find_data(&mut self) -> Result<(), Errno> {
        let data = match retry(|| seek(self.file, SeekFrom::Data(self.at))) {
            Ok(data) => data.clamp(self.at, self.end),
            // No data from here on.
            Err(Errno::NXIO) => self.end,
            // This file system doesn't say where its holes are.
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
            self.data_end = match retry(|| seek(self.file, SeekFrom::Hole(data))) {
                // Somebody punched the data out since: look again from here.
                Ok(hole) => hole.clamp(data, self.end),
                // The file was cut off before `data` since: reading will find out where.
                Err(Errno::NXIO) => self.end,
                Err(error) => return Err(error),
            };
        }
        Ok(())
    }
}

fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}
