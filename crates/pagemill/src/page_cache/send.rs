//! Sending pages without a copy: a socket has them until the kernel says that it is done (`MSG_ZEROCOPY`).
use super::lend::Lent;
use core::mem;
use core::time::Duration;
use pagemill_os::{Errno, zero_copy};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

/// Sends lent pages on a socket without a copy (`MSG_ZEROCOPY`): TCP or UDP, since Linux 4.14.
///
/// The pages stay lent until the kernel has said that it is done with them. So [`reap`](Self::reap) must be called now and
/// then: when a poll of the socket says `POLLERR`, or before more is sent. What is on its way when this is dropped stays
/// lent for good, since nobody can say any more when the kernel is done: [`wait`](Self::wait) first.
///
/// Below some kilobytes a copy costs less than this does. To a peer on the same machine the kernel copies anyway.
///
/// A ring does the same by `IORING_OP_SEND_ZC`: keep the [`Lent`] until the second completion of the request, the one with
/// `IORING_CQE_F_NOTIF`.
///
/// ```
/// use pagemill::{Allocator, FileBacking, LentSender, PageCache};
/// use std::io::Read;
/// use std::net::{TcpListener, TcpStream};
/// # let path = std::env::temp_dir().join(format!("pagemill-send-{}", std::process::id()));
/// # std::fs::write(&path, vec![7; 1 << 16])?;
/// let cache = PageCache::builder(&Allocator::builder().pages(256).build().unwrap()).build();
/// let file = cache.open(FileBacking::open(&path)?)?;
/// let listener = TcpListener::bind("127.0.0.1:0")?;
/// let mut peer = TcpStream::connect(listener.local_addr()?)?;
/// let mut sender = LentSender::new(listener.accept()?.0)?;
/// sender.push(file.lend(0, 1 << 16)?);
/// while !sender.flush()? {} // a socket that does not block would be polled here
/// let mut received = vec![0; 1 << 16];
/// peer.read_exact(&mut received)?;
/// assert!(sender.wait(None)? && sender.in_flight() == 0);
/// # assert_eq!(received, [7; 1 << 16]); drop(file); std::fs::remove_file(path)?;
/// # std::io::Result::Ok(())
/// ```
#[derive(Debug)]
pub struct LentSender<S: AsFd> {
    socket: S,
    /// What is to be sent, each with the number of bytes that are sent already.
    queue: VecDeque<(Arc<Lent>, usize)>,
    /// What the kernel has, by the numbers of its calls.
    in_flight: VecDeque<(u32, Arc<Lent>)>,
    /// The number of the next call.
    next: u32,
    /// Calls whose bytes the kernel copied after all.
    copied: u64,
}

impl<S: AsFd> LentSender<S> {
    /// For a socket on which nobody else sends without a copy.
    ///
    /// # Errors
    /// Sockets of this kind cannot.
    pub fn new(socket: S) -> io::Result<Self> {
        zero_copy::permit(socket.as_fd()).map_err(os)?;
        Ok(Self { socket, queue: VecDeque::new(), in_flight: VecDeque::new(), next: 0, copied: 0 })
    }

    /// Adds bytes to what is to be sent. [`flush`](Self::flush) sends them.
    pub fn push(&mut self, lent: Lent) {
        if !lent.is_empty() {
            self.queue.push_back((Arc::new(lent), 0));
        }
    }

    /// Sends what was pushed. Returns whether all is sent: not if the socket does not block and has no room, or if the kernel
    /// wants earlier bytes to be done first. A poll says when to go on.
    ///
    /// # Errors
    /// The socket's. What was not sent is still there, so that the next call tries again.
    pub fn flush(&mut self) -> io::Result<bool> {
        self.reap()?;
        while let Some((lent, sent)) = self.queue.front_mut() {
            let slices = rest_of(lent, *sent);
            // SAFETY: the pages are lent, so their bytes do not change; `in_flight` keeps them lent until the kernel is
            // done, or they stay lent for good.
            let done = unsafe { zero_copy::send(self.socket.as_fd(), &slices) };
            drop(slices);
            match done {
                // The kernel numbers calls that sent something.
                Ok(0) => return Err(io::Error::new(ErrorKind::WriteZero, "the socket takes no bytes")),
                Ok(bytes) => {
                    self.in_flight.push_back((self.next, lent.clone()));
                    self.next = self.next.wrapping_add(1);
                    *sent += bytes;
                    if *sent >= lent.len() {
                        self.queue.pop_front();
                    }
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(false),
                Err(Errno::ENOBUFS) if self.in_flight.is_empty() => return Err(os(Errno::ENOBUFS)),
                Err(Errno::ENOBUFS) => {
                    if self.reap()? == 0 {
                        return Ok(false);
                    }
                }
                Err(error) => return Err(os(error)),
            }
        }
        Ok(true)
    }

    /// Gives back the pages that the kernel is done with. Returns how many of its calls these were. Does not wait.
    ///
    /// # Errors
    /// The system's.
    pub fn reap(&mut self) -> io::Result<usize> {
        let before = self.in_flight.len();
        while let Some(completed) = zero_copy::completed(self.socket.as_fd()).map_err(os)? {
            let (first, last) = (*completed.calls.start(), *completed.calls.end());
            // Numbers wrap: one lies in the range if it is no further from its start than the end is.
            let is_done = |call: u32| call.wrapping_sub(first) <= last.wrapping_sub(first);
            let known = self.in_flight.len();
            self.in_flight.retain(|&(call, _)| !is_done(call));
            if completed.is_copied {
                self.copied += (known - self.in_flight.len()) as u64;
            }
        }
        Ok(before - self.in_flight.len())
    }

    /// Waits until the kernel is done with all that was sent, or for so long. Returns whether it is.
    ///
    /// # Errors
    /// The system's.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<bool> {
        let end = timeout.map(crate::bulk::from_now);
        loop {
            self.reap()?;
            let left = end.map(|end| end.saturating_duration_since(std::time::Instant::now()));
            if self.in_flight.is_empty() || left == Some(Duration::ZERO) {
                return Ok(self.in_flight.is_empty());
            }
            zero_copy::wait(self.socket.as_fd(), left).map_err(os)?;
        }
    }

    /// Calls whose bytes the kernel still has.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }
    /// Calls whose bytes the kernel has copied after all.
    pub fn copied(&self) -> u64 {
        self.copied
    }
    /// The socket.
    pub fn socket(&self) -> &S {
        &self.socket
    }
}

/// What sockets had as their senders were dropped: lent for good, since the kernel may still send from it.
static KEPT: Mutex<Vec<Arc<Lent>>> = Mutex::new(Vec::new());

impl<S: AsFd> Drop for LentSender<S> {
    fn drop(&mut self) {
        if !self.in_flight.is_empty() {
            let kept = mem::take(&mut self.in_flight).into_iter().map(|(_, lent)| lent);
            KEPT.lock().unwrap_or_else(PoisonError::into_inner).extend(kept);
        }
    }
}

/// The slices behind the first `sent` bytes.
fn rest_of(lent: &Lent, mut sent: usize) -> Vec<IoSlice<'_>> {
    let rest = lent.slices().into_iter().filter_map(|slice| {
        let skipped = sent.min(slice.len());
        sent -= skipped;
        (skipped < slice.len()).then(|| IoSlice::new(&slice[skipped..]))
    });
    rest.collect()
}

fn os(error: Errno) -> io::Error {
    io::Error::from_raw_os_error(error.0)
}
