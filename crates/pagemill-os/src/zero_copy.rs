//! Sending without a copy (`MSG_ZEROCOPY`, Linux's `Documentation/networking/msg_zerocopy.rst`): the kernel sends from the
//! caller's memory, and says later that it is done with it.
//!
//! The kernel numbers a socket's calls from 0 on, those that sent something. What it is done with comes as ranges of these
//! numbers, on the socket's queue of errors.
use crate::Errno;
use core::mem;
use core::ops::RangeInclusive;
use core::time::Duration;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::io::IoSlice;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `SO_EE_ORIGIN_ZEROCOPY` of the kernel's `linux/errqueue.h`: an entry that says what the kernel is done with.
const ORIGIN: u8 = 5;
/// `SO_EE_CODE_ZEROCOPY_COPIED` of the same.
const COPIED: u8 = 1;

/// Permits calls of [`send`] on a socket.
///
/// # Errors
/// The system's: `EOPNOTSUPP` if sockets of this kind cannot.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::os::fd::AsFd;
/// let socket = std::net::TcpListener::bind("127.0.0.1:0")?;
/// pagemill_os::zero_copy::permit(socket.as_fd()).unwrap();
/// # }
/// # std::io::Result::Ok(())
/// ```
pub fn permit(socket: BorrowedFd<'_>) -> Result<(), Errno> {
    let (yes, len) = (1_i32, size_of::<i32>() as libc::socklen_t);
    // SAFETY: the option is an int, and this is one.
    let done = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ZEROCOPY, (&raw const yes).cast(), len)
    };
    if done == 0 { Ok(()) } else { Err(Errno::last()) }
}

/// Sends bytes without a copy. Returns how many it sent. No signal is raised if the peer is gone.
///
/// # Errors
/// The system's: `ENOBUFS` if too much is on its way.
///
/// # Safety
/// Until [`completed`] has named this call, nothing changes the bytes or gives their memory to somebody else.
pub unsafe fn send(socket: BorrowedFd<'_>, bytes: &[IoSlice<'_>]) -> Result<usize, Errno> {
    // SAFETY: all zeroes is a message without any part.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = bytes.as_ptr().cast_mut().cast();
    message.msg_iovlen = bytes.len().min(crate::file::SLICES_MAX);
    // SAFETY: an IoSlice is laid out as an iovec, which the call reads; the caller vouches for the time after it.
    let sent =
        unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_ZEROCOPY | libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| Errno::last())
}

/// What the kernel is done with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Completed {
    /// The numbers of the calls; if the first is above the last, the numbers have wrapped.
    pub calls: RangeInclusive<u32>,
    /// The kernel has copied the bytes after all, as for a peer on this machine.
    pub is_copied: bool,
}

/// The next range of calls that the kernel is done with, if there is one. Does not wait.
///
/// # Errors
/// The system's.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::os::fd::AsFd;
/// let socket = std::net::TcpListener::bind("127.0.0.1:0")?;
/// assert_eq!(pagemill_os::zero_copy::completed(socket.as_fd()), Ok(None)); // nothing was sent
/// # }
/// # std::io::Result::Ok(())
/// ```
pub fn completed(socket: BorrowedFd<'_>) -> Result<Option<Completed>, Errno> {
    loop {
        // In words, so that it is aligned as a header of control data must be.
        let mut control = [0_u64; 16];
        // SAFETY: all zeroes is a message without any part.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        // SAFETY: the message names the array alone, with its length.
        let got =
            unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT) };
        if got < 0 {
            return match Errno::last() {
                Errno::EAGAIN => Ok(None),
                Errno::EINTR => continue,
                error => Err(error),
            };
        }
        // SAFETY: the kernel has filled in the message's control data.
        let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
        if header.is_null() {
            continue;
        }
        // SAFETY: not null, so it lies in the array.
        let (level, kind, len) = unsafe { ((*header).cmsg_level, (*header).cmsg_type, (*header).cmsg_len) };
        let is_error = matches!((level, kind), (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR));
        // SAFETY: a number.
        let needed = unsafe { libc::CMSG_LEN(size_of::<libc::sock_extended_err>() as u32) } as usize;
        if !is_error || len < needed {
            continue;
        }
        // SAFETY: the header says that so much data follows it.
        let error = unsafe { libc::CMSG_DATA(header).cast::<libc::sock_extended_err>().read_unaligned() };
        // Other errors of the network are on the same queue; the next call of the socket returns them.
        if error.ee_errno == 0 && error.ee_origin == ORIGIN {
            let is_copied = error.ee_code == COPIED;
            return Ok(Some(Completed { calls: error.ee_info..=error.ee_data, is_copied }));
        }
    }
}

/// Waits until there may be something for [`completed`] to return, or for so long; for as long as it takes without a
/// time. A signal ends it early.
///
/// # Errors
/// The system's.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::{os::fd::AsFd, time::Duration};
/// let socket = std::net::TcpListener::bind("127.0.0.1:0")?;
/// pagemill_os::zero_copy::wait(socket.as_fd(), Some(Duration::ZERO)).unwrap();
/// # }
/// # std::io::Result::Ok(())
/// ```
pub fn wait(socket: BorrowedFd<'_>, time: Option<Duration>) -> Result<(), Errno> {
    // The queue of errors is watched without being asked for.
    let mut polled = [PollFd::from_borrowed_fd(socket, PollFlags::empty())];
    // At most a minute at once: a number of seconds that the system takes.
    let time = time.map(|time| time.min(Duration::from_secs(60)));
    let time = time.map(|time| Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) });
    match rustix::event::poll(&mut polled, time.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(Errno::of(error)),
    }
}
