//! System calls that neither the standard library nor rustix has.
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::fs::Access;

/// The most bytes of a kernel's handle.
const HANDLE_MAX: usize = libc::MAX_HANDLE_SZ as usize;

/// The kernel's name of a file, which stays as long as the file is there (`struct file_handle`).
#[repr(C)]
pub(crate) struct KernelHandle {
    len: u32,
    kind: i32,
    bytes: [u8; HANDLE_MAX],
}

impl KernelHandle {
    /// None: the kernel has no handle so long.
    pub(crate) fn new(kind: i32, bytes: &[u8]) -> Option<Self> {
        let mut handle = Self { len: bytes.len() as u32, kind, bytes: [0; HANDLE_MAX] };
        handle.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(handle)
    }
    pub(crate) fn kind(&self) -> i32 {
        self.kind
    }
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len as usize]
    }
}

fn check(returned: libc::c_long) -> io::Result<libc::c_long> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(returned) }
}

/// The handle of an open file (name_to_handle_at(2)).
pub(crate) fn name_to_handle(file: BorrowedFd<'_>) -> io::Result<KernelHandle> {
    let mut handle = KernelHandle { len: HANDLE_MAX as u32, kind: 0, bytes: [0; HANDLE_MAX] };
    let mut mount = 0_i32;
    // SAFETY: the name is an empty C string; the kernel writes to `handle` as many bytes as its `len` permits, and to `mount`.
    check(unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            file.as_raw_fd(),
            c"".as_ptr(),
            &raw mut handle,
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    })?;
    handle.len = handle.len.min(HANDLE_MAX as u32);
    Ok(handle)
}

/// Opens a file of the file system that has `mount`, with `O_PATH` (open_by_handle_at(2)).
///
/// # Errors
/// `ESTALE`: there is no such file any more. `EPERM`: the process lacks CAP_DAC_READ_SEARCH.
pub(crate) fn open_by_handle(mount: BorrowedFd<'_>, handle: &mut KernelHandle) -> io::Result<OwnedFd> {
    let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    // SAFETY: the kernel reads the handle's `len` bytes, which are no more than there are.
    let opened =
        check(unsafe { libc::syscall(libc::SYS_open_by_handle_at, mount.as_raw_fd(), &raw mut *handle, flags) })?;
    // SAFETY: the kernel has just made this descriptor, and nothing else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(opened as i32) })
}

/// What this thread may do with an open file (faccessat2(2)), as the user that it acts for.
pub(crate) fn access(file: BorrowedFd<'_>, access: Access) -> io::Result<()> {
    let flags = libc::AT_EMPTY_PATH | libc::AT_EACCESS;
    // SAFETY: the name is an empty C string.
    check(unsafe { libc::syscall(libc::SYS_faccessat2, file.as_raw_fd(), c"".as_ptr(), access.bits(), flags) })
        .map(|_| ())
}

/// Sets the user of this thread alone for what it does with files (setfsuid(2)), and says whether that is so now.
pub(crate) fn set_fs_user(uid: u32) -> bool {
    // SAFETY: the calls take numbers. The second one names no user: it changes nothing, and returns the one that is set.
    unsafe {
        libc::syscall(libc::SYS_setfsuid, uid);
        libc::syscall(libc::SYS_setfsuid, u32::MAX) as u32 == uid
    }
}

/// As [`set_fs_user`], for the group.
pub(crate) fn set_fs_group(gid: u32) -> bool {
    // SAFETY: as above.
    unsafe {
        libc::syscall(libc::SYS_setfsgid, gid);
        libc::syscall(libc::SYS_setfsgid, u32::MAX) as u32 == gid
    }
}

/// Sets the supplementary groups of this thread alone: the system call, not the function of the C library, which sets those
/// of all threads.
pub(crate) fn set_groups(groups: &[u32]) -> io::Result<()> {
    // SAFETY: the kernel reads as many numbers as there are.
    check(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) }).map(|_| ())
}

/// The bytes in a socket that its peer has not acknowledged yet (tcp(7), SIOCOUTQ).
pub(crate) fn unsent(socket: BorrowedFd<'_>) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes an int to `bytes`.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) }.into())?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}
