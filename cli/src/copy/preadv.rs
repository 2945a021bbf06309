//! One step after the other: reads a part into pages, and writes it out of them.
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use libc::{c_int, iovec, off_t};

use super::Job;
use super::pages::Buffer;
use crate::failure::Failure;

pub(crate) fn copy(job: &mut Job) -> Result<(), Failure> {
    let mut buffer = Buffer::default();
    while let Some(part) = job.next_part(&mut buffer)? {
        let read = move_all(&mut buffer, part.bytes, |window, done| {
            job.io.reads += 1;
            read(&job.source.file, window, part.offset + done)
        });
        let got = read.map_err(|error| job.source.unreadable(&error))?;
        let written = move_all(&mut buffer, got, |window, done| {
            job.io.writes += 1;
            write(job.target.file(), window, part.offset + done)
        });
        let written = written.map_err(|error| job.target.unwritable(&error))?;
        if written < got {
            return Err(job.target.unwritable(&io::ErrorKind::WriteZero.into()));
        }
        job.part_done(part, got, &mut buffer);
    }
    Ok(())
}

/// Calls `step` with the rest of the buffer's first `bytes` until all bytes are moved, or `step` moves none. So short reads and
/// writes continue where they ended. Returns the number of bytes moved.
fn move_all(
    buffer: &mut Buffer,
    bytes: usize,
    mut step: impl FnMut(&[iovec], u64) -> io::Result<usize>,
) -> io::Result<usize> {
    let mut done = 0;
    while done < bytes {
        match step(buffer.window(done, bytes), done as u64) {
            Ok(0) => break,
            Ok(moved) => done += moved,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

fn read(file: &File, window: &[iovec], offset: u64) -> io::Result<usize> {
    // SAFETY: the entries cover pages that the buffer owns and to which nothing else has a reference (see `Buffer::window`), so
    // the kernel may write to them.
    moved(unsafe { libc::preadv(file.as_raw_fd(), window.as_ptr(), window.len() as c_int, offset as off_t) })
}

fn write(file: &File, window: &[iovec], offset: u64) -> io::Result<usize> {
    // SAFETY: as in `read`; here the kernel only reads from them.
    moved(unsafe { libc::pwritev(file.as_raw_fd(), window.as_ptr(), window.len() as c_int, offset as off_t) })
}

fn moved(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::AllocForm;
    use crate::copy::pages::Tally;

    #[test]
    fn short_moves_continue_and_interrupted_ones_are_repeated() {
        let allocator = pagemill::Allocator::builder().pages(512).build().unwrap();
        let (mut buffer, mut tally) = (Buffer::default(), Tally::default());
        buffer.take(&allocator, AllocForm::Bulk, 4, &mut tally).unwrap();
        // Each call moves at most 1000 bytes, and every third call is interrupted.
        let (mut calls, mut seen) = (0, Vec::new());
        let done = move_all(&mut buffer, 10_000, |window, done| {
            calls += 1;
            if calls % 3 == 0 {
                return Err(io::ErrorKind::Interrupted.into());
            }
            seen.push(done);
            Ok(window.iter().map(|entry| entry.iov_len).sum::<usize>().min(1000))
        });
        assert_eq!(done.unwrap(), 10_000);
        assert_eq!(seen, (0..10).map(|i| i * 1000).collect::<Vec<_>>());
        // The end of a file, and a failure.
        let mut left = 2;
        let done = move_all(&mut buffer, 10_000, |_, _| {
            left -= 1;
            Ok(if left > 0 { 77 } else { 0 })
        });
        assert_eq!(done.unwrap(), 77);
        let failed = move_all(&mut buffer, 1, |_, _| Err(io::ErrorKind::StorageFull.into()));
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
        buffer.give_back(AllocForm::Bulk, &mut tally);
    }
}
