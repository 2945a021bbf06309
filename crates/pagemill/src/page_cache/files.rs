//! The descriptors of a file: one through the system's cache, and one past it for whole blocks.
use pagemill_os::Errno;
use pagemill_os::file::{self, DirectAlign, SLICES_MAX};
use std::fs::{File, FileType};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;

/// The descriptors of a file.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) buffered: File,
    pub(super) direct: Option<(File, DirectAlign)>,
    pub(super) is_read_only: bool,
    pub(super) is_device: bool,
}

/// Refuses what cannot be cached.
pub(super) fn check(kind: FileType) -> io::Result<()> {
    match kind.is_file() || kind.is_block_device() {
        true => Ok(()),
        false => Err(io::Error::new(ErrorKind::InvalidInput, "only a regular file or a block device can be cached")),
    }
}

impl Files {
    pub(super) fn new(buffered: File, direct: Option<(File, DirectAlign)>, is_read_only: bool) -> io::Result<Self> {
        let kind = buffered.metadata()?.file_type();
        check(kind)?;
        Ok(Self { buffered, direct, is_read_only, is_device: kind.is_block_device() })
    }

    pub(super) fn len(&self) -> io::Result<u64> {
        match self.is_device {
            // Nothing else uses the position.
            true => (&self.buffered).seek(SeekFrom::End(0)),
            false => Ok(self.buffered.metadata()?.len()),
        }
    }

    /// Where a request at `at` goes, whose slices have these addresses and lengths. With the `O_DIRECT` descriptor, the bytes
    /// that may go there: whole blocks from the first slice on.
    fn direct(&self, at: u64, slices: impl Iterator<Item = (usize, usize)>) -> Option<(BorrowedFd<'_>, usize)> {
        let (file, align) = self.direct.as_ref()?;
        if !at.is_multiple_of(align.offset as u64) {
            return None;
        }
        let mut bytes = 0;
        for (_, len) in slices.take_while(|(addr, _)| addr.is_multiple_of(align.memory)) {
            bytes += len - len % align.offset;
            if !len.is_multiple_of(align.offset) {
                break;
            }
        }
        (bytes > 0).then(|| (file.as_fd(), bytes))
    }

    /// The descriptor for a request at `at` with these slices, and how many of them it may have.
    #[cfg(feature = "uring")]
    pub(super) fn route(&self, at: u64, lens: &[(usize, usize)]) -> (BorrowedFd<'_>, usize) {
        let all = (self.buffered.as_fd(), lens.len());
        let Some((file, bytes)) = self.direct(at, lens.iter().copied()) else { return all };
        let mut end = 0;
        let whole = lens.iter().take_while(|(_, len)| {
            end += len;
            end <= bytes
        });
        match whole.count() {
            0 => all,
            slices => (file, slices),
        }
    }

    pub(super) fn read(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        let count = into.len().min(SLICES_MAX);
        let into = &mut into[..count];
        let addrs = into.iter().map(|slice| (slice.as_ptr().addr(), slice.len()));
        let Some((file, bytes)) = self.direct(at, addrs) else {
            return file::read_at(self.buffered.as_fd(), into, at).map_err(failed);
        };
        let mut left = bytes;
        let cut = into.iter_mut().map_while(|slice| {
            let len = slice.len().min(left);
            left -= len;
            (len > 0).then(|| IoSliceMut::new(&mut slice[..len]))
        });
        let mut cut: Vec<_> = cut.collect();
        match file::read_at(file, &mut cut, at) {
            // Some file systems refuse requests that they say they take.
            Err(Errno::EINVAL) => file::read_at(self.buffered.as_fd(), &mut cut, at),
            done => done,
        }
        .map_err(failed)
    }

    pub(super) fn write(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        self.refuse_read_only()?;
        let from = &from[..from.len().min(SLICES_MAX)];
        let Some((file, bytes)) = self.direct(at, from.iter().map(|slice| (slice.as_ptr().addr(), slice.len()))) else {
            return file::write_at(self.buffered.as_fd(), from, at).map_err(failed);
        };
        let mut left = bytes;
        let cut = from.iter().map_while(|slice| {
            let len = slice.len().min(left);
            left -= len;
            (len > 0).then(|| IoSlice::new(&slice[..len]))
        });
        let cut: Vec<_> = cut.collect();
        match file::write_at(file, &cut, at) {
            // As for reads.
            Err(Errno::EINVAL) => file::write_at(self.buffered.as_fd(), &cut, at),
            done => done,
        }
        .map_err(failed)
    }

    pub(super) fn refuse_read_only(&self) -> io::Result<()> {
        match self.is_read_only {
            true => Err(io::Error::new(ErrorKind::PermissionDenied, "the file is open for reading only")),
            false => Ok(()),
        }
    }
}

pub(super) fn failed(errno: Errno) -> io::Error {
    io::Error::from_raw_os_error(errno.0)
}
