//! Files read and written at an offset, with vectors.
//!
//! The standard library opens, sizes and syncs files; its vectored reads at an offset are not stable. Each function makes one
//! system call, on a descriptor that the caller opened.
use crate::Errno;
use rustix::fs::{AtFlags, OFlags, StatxFlags};
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;

/// The flag with which a file is opened past the system's cache.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::os::unix::fs::OpenOptionsExt;
/// let path = std::env::current_exe()?;
/// let opened = std::fs::OpenOptions::new().read(true).custom_flags(pagemill_os::file::O_DIRECT).open(path);
/// if let Err(refused) = opened {
///     assert_eq!(refused.raw_os_error(), Some(pagemill_os::Errno::EINVAL.0), "a file system without O_DIRECT");
/// }
/// # }
/// # std::io::Result::Ok(())
/// ```
pub const O_DIRECT: i32 = libc::O_DIRECT;

/// The most slices that one call takes.
pub const SLICES_MAX: usize = 1024;

/// Reads at an offset (`preadv(2)`). Returns the bytes read: 0 at the end of the file or beyond it.
///
/// # Errors
/// The system's.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::{io::IoSliceMut, os::fd::AsFd};
/// let file = std::fs::File::open(std::env::current_exe()?)?;
/// let mut bytes = [0; 3];
/// let read = pagemill_os::file::read_at(file.as_fd(), &mut [IoSliceMut::new(&mut bytes)], 1);
/// assert_eq!((read, &bytes), (Ok(3), b"ELF"));
/// # }
/// # std::io::Result::Ok(())
/// ```
pub fn read_at(file: BorrowedFd<'_>, into: &mut [IoSliceMut<'_>], at: u64) -> Result<usize, Errno> {
    rustix::io::preadv(file, into, at).map_err(Errno::of)
}

/// Writes at an offset (`pwritev(2)`). Returns the bytes written.
///
/// # Errors
/// The system's.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::{io::IoSlice, os::fd::AsFd};
/// let file = std::fs::File::options().write(true).open("/dev/null")?;
/// assert_eq!(pagemill_os::file::write_at(file.as_fd(), &[IoSlice::new(b"some"), IoSlice::new(b"bytes")], 4096), Ok(9));
/// # }
/// # std::io::Result::Ok(())
/// ```
pub fn write_at(file: BorrowedFd<'_>, from: &[IoSlice<'_>], at: u64) -> Result<usize, Errno> {
    rustix::io::pwritev(file, from, at).map_err(Errno::of)
}

/// What `O_DIRECT` asks of a file's requests.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::os::fd::AsFd;
/// let file = std::fs::File::open(std::env::current_exe()?)?;
/// // None before Linux 6.1, or if the file system does not say.
/// if let Some(align) = pagemill_os::file::direct_align(file.as_fd()) {
///     assert!(align.memory.is_power_of_two() && align.offset.is_power_of_two());
/// }
/// # }
/// # std::io::Result::Ok(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirectAlign {
    /// The alignment of memory, in bytes.
    pub memory: usize,
    /// The alignment of offsets and lengths, in bytes.
    pub offset: usize,
}

/// What `O_DIRECT` asks of the requests of this file (`statx(2)` with `STATX_DIOALIGN`). `None` if the system does not say.
pub fn direct_align(file: BorrowedFd<'_>) -> Option<DirectAlign> {
    let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let align = DirectAlign { memory: stat.stx_dio_mem_align as usize, offset: stat.stx_dio_offset_align as usize };
    let is_said = stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
    (is_said && align.memory.is_power_of_two() && align.offset.is_power_of_two()).then_some(align)
}

/// How a file was opened.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::os::fd::AsFd;
/// let file = std::fs::File::open("/dev/null")?;
/// let opened = pagemill_os::file::opened(file.as_fd()).unwrap();
/// assert!(opened.is_readable && !opened.is_writable && !opened.is_appending && !opened.is_direct);
/// # }
/// # std::io::Result::Ok(())
/// ```
#[expect(clippy::struct_excessive_bools, reason = "four flags of open(2)")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Opened {
    /// `O_RDONLY` or `O_RDWR`.
    pub is_readable: bool,
    /// `O_WRONLY` or `O_RDWR`.
    pub is_writable: bool,
    /// `O_APPEND`: writes go to the end, whatever their offset.
    pub is_appending: bool,
    /// `O_DIRECT`.
    pub is_direct: bool,
}

/// How a file was opened (`fcntl(2)` with `F_GETFL`).
///
/// # Errors
/// The system's.
pub fn opened(file: BorrowedFd<'_>) -> Result<Opened, Errno> {
    let flags = rustix::fs::fcntl_getfl(file).map_err(Errno::of)?;
    let mode = flags & OFlags::RWMODE;
    Ok(Opened {
        is_readable: mode != OFlags::WRONLY,
        is_writable: mode != OFlags::RDONLY,
        is_appending: flags.contains(OFlags::APPEND),
        is_direct: flags.contains(OFlags::DIRECT),
    })
}

#[cfg(all(test, not(any(loom, miri))))]
mod tests {
    use super::{SLICES_MAX, read_at, write_at};
    use crate::Errno;
    use std::io::{IoSlice, IoSliceMut};
    use std::os::fd::AsFd;

    #[test]
    fn a_read_beyond_the_end_is_empty_and_a_gap_reads_zero() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(write_at(file.as_fd(), &[IoSlice::new(b"a"), IoSlice::new(b"bc")], 5), Ok(3));
        let (mut first, mut second) = ([9; 6], [9; 6]);
        let mut into = [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)];
        assert_eq!(read_at(file.as_fd(), &mut into, 0), Ok(8));
        assert_eq!((&first, &second), (b"\0\0\0\0\0a", &[b'b', b'c', 9, 9, 9, 9]));
        assert_eq!(read_at(file.as_fd(), &mut [IoSliceMut::new(&mut first)], 8), Ok(0));
    }

    #[test]
    fn the_system_takes_as_many_slices_as_the_constant_says() {
        let file = tempfile::tempfile().unwrap();
        let slices = [IoSlice::new(b"x"); SLICES_MAX + 1];
        assert_eq!(write_at(file.as_fd(), &slices[1..], 0), Ok(SLICES_MAX));
        // Some systems in a sandbox take more.
        assert!(matches!(write_at(file.as_fd(), &slices, 0), Err(Errno::EINVAL) | Ok(_)));
    }
}
