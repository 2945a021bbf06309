//! A ring of buffers from which an io_uring's requests choose one when data is there (io_uring's provided buffers).
//!
//! A server that gives each connection a buffer to receive into has thousands of idle buffers. With this ring its requests
//! name a group of buffers instead. The kernel takes a buffer out of the ring when data has arrived, and the completion says
//! which. The program takes the page out, and fills all holes from the allocator in one bulk call.
//!
//! # Invariants
//! - B1 A buffer that is in the ring, or that the kernel took and the program did not, belongs to `buffers`. No other code
//!   reaches its page.
//! - B2 `buffers[id]` is none if and only if `id` is in `holes`.
//! - B3 The kernel has taken the buffers at all positions below `head`, and is offered none from `tail` on.
//! - B4 The head that the kernel reports for the group is this ring's only while [`GROUPS`] has this ring's line. A program may
//!   end a group by a call of its own, and give the number to another `BufRing`, whose head says nothing of this one's pages.
//!   So `new` registers, and `take` and `drop` ask the kernel, under the table's lock.
//!
//! # Locks
//! `GROUPS` is locked in a section that no fork interrupts. No page is requested or freed under it. Its system calls wait only
//! for another call on the same io_uring: so no thread may submit requests whose memory another `BufRing` has to bring, by
//! userfaultfd for example.
use super::fixed_buffers::{FORBIDDEN, MEMLOCK};
use super::{DeviceError, keep, refuse_inherited};
use crate::allocator::Allocator;
use crate::bulk::Bulk;
use crate::handle::Page;
use crate::in_flight::InFlight;
use crate::process::{NoFork, Stamp, no_fork};
use core::mem;
use pagemill_core::{Gfp, PAGE_SIZE};
use pagemill_os::Errno;
use pagemill_os::device::buf_ring;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Pages from which the requests of an io_uring choose a buffer when they need one: the kernel's *provided buffers*
/// (`IORING_REGISTER_PBUF_RING`, Linux 5.19).
///
/// A request with `IOSQE_BUFFER_SELECT` and the group's number has no buffer of its own. The completion carries the number
/// of the buffer that the kernel chose, and [`take`](Self::take) returns that page. [`fill`](Self::fill) puts new pages into
/// all holes with one bulk request. If the ring is empty, a request ends with `ENOBUFS`: the program stops reading until
/// pages are free again.
///
/// Each completion has one buffer: do not use the group for requests in bundles (`IORING_RECVSEND_BUNDLE`), nor, before
/// Linux 6.10, for requests with `MSG_WAITALL`.
///
/// When it is dropped, pages that the kernel has not taken go back to the allocator. Pages that the kernel took and the
/// program did not are leaked, since a request may still write to them ([`InFlight::leaked`] counts them). Before Linux 6.8
/// these cannot be told apart, and all are leaked. The same is true if the io_uring is for a single thread
/// (`IORING_SETUP_SINGLE_ISSUER`) and the ring is dropped on another one.
///
/// Do not give the group to other code before this is dropped. If the program ends the group itself and makes another `BufRing`
/// for it, this one notices: [`take`](Self::take) refuses, and dropping it leaks all its pages and leaves the group alone. A
/// ring that other code registers in its place, which is an `unsafe` call, cannot be noticed. Then dropping this one may free
/// pages that a request still writes to, and ends the group of the other code.
///
/// ```
/// use io_uring::{IoUring, cqueue, opcode, squeue::Flags, types};
/// use pagemill::{Allocator, BufRing, Gfp};
/// use std::io::Write;
/// use std::os::fd::{AsRawFd, BorrowedFd};
/// let mut ring = match IoUring::new(8) {
///     Ok(ring) => ring,
///     Err(why) => return println!("no io_uring here: {why}"),
/// };
/// let allocator = Allocator::builder().pages(512).build().unwrap();
/// // SAFETY: the ring is open.
/// let fd = unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) };
/// let mut buffers = match BufRing::new(fd, 7, 64, &allocator) {
///     Ok(buffers) => buffers,
///     Err(why) => return println!("{why}"), // the message says what to do
/// };
/// assert_eq!(buffers.fill(Gfp::NOWAIT).unwrap(), 64);
///
/// let (mut here, there) = std::os::unix::net::UnixStream::pair().unwrap();
/// here.write_all(b"hello").unwrap();
/// let receive = opcode::Recv::new(types::Fd(there.as_raw_fd()), std::ptr::null_mut(), 4096).buf_group(7);
/// // SAFETY: `buffers` outlives the request, and owns the memory.
/// unsafe { ring.submission().push(&receive.build().flags(Flags::BUFFER_SELECT)) }.unwrap();
/// ring.submit_and_wait(1).unwrap();
/// let done = ring.completion().next().unwrap();
/// let id = cqueue::buffer_select(done.flags()).unwrap();
/// // SAFETY: this is the buffer of a completion of this ring.
/// let page = unsafe { buffers.take(id) }.unwrap();
/// assert_eq!((done.result(), &page[..5]), (5, &b"hello"[..]));
/// assert_eq!(buffers.fill(Gfp::NOWAIT).unwrap(), 1);
/// ```
#[derive(Debug)]
pub struct BufRing {
    entries: buf_ring::BufRing,
    ring: File,
    group: u16,
    line: Line,
    /// By number: the page, and its position in the ring.
    buffers: Vec<Option<Given>>,
    /// The numbers without a page.
    holes: Vec<u16>,
    /// Positions, counted since the beginning.
    head: u64,
    tail: u64,
    stamp: Stamp,
    allocator: Allocator,
}

#[derive(Debug)]
struct Given {
    page: Page,
    position: u64,
}

impl BufRing {
    /// Makes an empty ring of `entries` buffers, a power of two up to 32768, for the group with this number.
    ///
    /// # Errors
    /// [`DeviceError`] says what is wrong: the descriptor is no io_uring, the group is in use, or the kernel is older than
    /// Linux 5.19.
    ///
    /// ```
    /// use pagemill::{Allocator, BufRing};
    /// use std::os::fd::AsFd;
    /// let no_ring = std::fs::File::open("/dev/null").unwrap();
    /// println!("{}", BufRing::new(no_ring.as_fd(), 0, 64, Allocator::global()).unwrap_err());
    /// ```
    pub fn new(ring: BorrowedFd<'_>, group: u16, entries: u16, allocator: &Allocator) -> Result<Self, DeviceError> {
        if !entries.is_power_of_two() || entries > buf_ring::ENTRIES_MAX {
            return Err(DeviceError::Unavailable {
                what: format!("io_uring does not support a ring of {entries} buffers"),
                next: "ask for a power of two up to 32768",
            });
        }
        let ring = File::from(keep(ring, "the ring cannot be kept open")?);
        let inode = ring.metadata().map_err(|error| DeviceError::System {
            what: "the ring cannot be told from others (fstat)",
            errno: error.raw_os_error().unwrap_or(0),
            next: "allow this system call",
        })?;
        let memory = buf_ring::BufRing::new(entries).map_err(refusal)?;
        let mut groups = Groups::lock();
        memory.register(ring.as_fd(), group).map_err(refusal)?;
        let line = groups.enter((inode.ino(), group));
        drop(groups);
        Ok(Self {
            entries: memory,
            ring,
            group,
            line,
            buffers: (0..entries).map(|_| None).collect(),
            holes: (0..entries).rev().collect(),
            head: 0,
            tail: 0,
            stamp: Stamp::here(),
            allocator: allocator.clone(),
        })
    }

    /// Fills all holes with pages by one bulk request with these flags, and offers them to the kernel. Returns the number of
    /// pages that it got, which is lower if memory is short.
    ///
    /// # Errors
    /// [`DeviceError::Memory`] if the flags are invalid, [`DeviceError::Forked`].
    pub fn fill(&mut self, gfp: Gfp) -> Result<usize, DeviceError> {
        refuse_inherited(self.stamp)?;
        let Self { entries, buffers, holes, tail, .. } = self;
        let delivered = self.allocator.alloc_pages_bulk_callback(Bulk::up_to(holes.len()).gfp(gfp), |page: Page| {
            let Some(id) = holes.pop() else { return }; // There are as many holes as pages.
            // SAFETY: `buffers` owns the page, and `take` and `drop` give it up only after the kernel is done (B1).
            unsafe { entries.set(*tail as u16, page.addr(), PAGE_SIZE as u32, id) };
            buffers[usize::from(id)] = Some(Given { page, position: *tail });
            *tail += 1;
        });
        // SAFETY: each position below the tail was set above, now or earlier. Those that the kernel has not taken have numbers
        // that are no holes (B1), so there are no more of them than entries, and each has an entry for itself.
        unsafe { self.entries.publish(self.tail as u16) };
        Ok(delivered?.blocks)
    }

    /// Takes the page with this number out of the ring, whose number is free then.
    ///
    /// Only the bytes that the completion counts are new. The others are unspecified, as those of any page.
    ///
    /// # Errors
    /// [`DeviceError::NoBuffer`] if the ring has no such buffer, if it was taken already, or if the kernel has not chosen it
    /// (known from Linux 6.8 on). [`DeviceError::Forked`].
    ///
    /// # Safety
    /// The number is that of a completion of a request of this group, and no page was taken for this completion before.
    pub unsafe fn take(&mut self, id: u16) -> Result<Page, DeviceError> {
        refuse_inherited(self.stamp)?;
        let none = DeviceError::NoBuffer { group: self.group, id };
        let Some(Some(Given { position, .. })) = self.buffers.get(usize::from(id)) else { return Err(none) };
        let position = *position;
        if position >= self.head {
            // Asked once for all completions that came since.
            self.head = self.head_now(&Groups::lock())?;
        }
        if position >= self.head {
            return Err(none);
        }
        self.holes.push(id);
        self.buffers[usize::from(id)].take().map(|given| given.page).ok_or(none)
    }

    /// The position of the next buffer that the kernel takes.
    fn head_now(&self, groups: &Groups) -> Result<u64, DeviceError> {
        let replaced = || DeviceError::Unavailable {
            what: format!("another ring of buffers has taken the place of the group {}", self.group),
            next: "leave the group to its ring until that is dropped",
        };
        if !groups.have(self.line) {
            return Err(replaced());
        }
        match buf_ring::head(self.ring.as_fd(), self.group) {
            Ok(head) => {
                let offered = u64::from((self.tail as u16).wrapping_sub(head));
                let head = self.tail.checked_sub(offered).filter(|head| *head >= self.head);
                head.ok_or_else(replaced) // By other code.
            }
            Err(Errno::EINVAL) => Ok(self.tail), // Before Linux 6.8: it may have taken all.
            Err(errno) => Err(refusal(errno)),
        }
    }

    /// The number of empty places, which [`fill`](Self::fill) asks pages for.
    ///
    /// ```
    /// # use pagemill::{Allocator, BufRing, Gfp};
    /// # use std::os::fd::{AsRawFd, BorrowedFd};
    /// # let Ok(ring) = io_uring::IoUring::new(8) else { return };
    /// # let allocator = Allocator::builder().pages(20).build().unwrap();
    /// # // SAFETY: the ring is open.
    /// # let fd = unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) };
    /// # let Ok(mut buffers) = BufRing::new(fd, 0, 64, &allocator) else { return };
    /// assert_eq!(buffers.holes(), 64);
    /// assert_eq!(buffers.fill(Gfp::NOWAIT).unwrap(), 20); // All that the allocator has.
    /// assert_eq!(buffers.holes(), 44);
    /// ```
    pub fn holes(&self) -> usize {
        self.holes.len()
    }
}

fn refusal(errno: Errno) -> DeviceError {
    let next = match errno {
        Errno::EEXIST => {
            "use another number for the group; or, if only the thread that made the ring may use it \
             (IORING_SETUP_SINGLE_ISSUER), do this on that thread"
        }
        Errno::EINVAL => "use Linux 5.19 or newer",
        Errno::ENOMEM => MEMLOCK,
        Errno::ENOSYS | Errno::EPERM | Errno::EACCES => FORBIDDEN,
        _ => "use the descriptor of an io_uring, and leave the group to this ring",
    };
    DeviceError::System { what: "io_uring refuses a ring of buffers (IORING_REGISTER_PBUF_RING)", errno: errno.0, next }
}

impl Drop for BufRing {
    fn drop(&mut self) {
        let mut groups = Groups::lock();
        let taken = if self.stamp.is_inherited() || !groups.have(self.line) {
            u64::MAX // The group is the parent's, or another ring's.
        } else {
            // First the entries: what the kernel takes after this has no bytes. Then the head, which says what it took before.
            self.entries.clear();
            let head = self.head_now(&groups).unwrap_or(self.tail);
            let _ = buf_ring::unregister(self.ring.as_fd(), self.group); // Refused, it stays without memory.
            head
        };
        groups.leave(self.line);
        drop(groups);
        let given = mem::take(&mut self.buffers).into_iter().flatten();
        given.filter(|given| given.position < taken).for_each(|given| drop(InFlight::new(given.page)));
    }
}

/// The rings of this process that nothing but their own drop took their group from, as far as `BufRing` sees it (B4).
static GROUPS: Mutex<Table> = Mutex::new(Table { lines: Vec::new(), serials: 0 });

struct Table {
    /// At most one for each key.
    lines: Vec<Line>,
    /// How many were given out.
    serials: u64,
}

/// A ring's line in the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Line {
    /// The inode of the io_uring, which no other one has while this ring keeps its descriptor open (Linux 5.16), and the group.
    /// If two had the same, a ring would give way to that of the other, and leak.
    key: (u64, u16),
    serial: u64,
}

/// The table, locked.
struct Groups {
    // Declared first, so that the lock is free before a fork may begin.
    table: MutexGuard<'static, Table>,
    _no_fork: NoFork,
}

impl Groups {
    fn lock() -> Self {
        let no_fork = no_fork(); // A child would find the table locked for ever.
        Self { table: GROUPS.lock().unwrap_or_else(PoisonError::into_inner), _no_fork: no_fork }
    }

    /// Enters a ring that was registered under this lock, in the place of the one whose group it was.
    fn enter(&mut self, key: (u64, u16)) -> Line {
        self.table.serials += 1;
        let line = Line { key, serial: self.table.serials };
        self.table.lines.retain(|other| other.key != key);
        self.table.lines.push(line);
        line
    }

    fn have(&self, line: Line) -> bool {
        self.table.lines.contains(&line)
    }

    fn leave(&mut self, line: Line) {
        self.table.lines.retain(|other| *other != line);
    }
}
