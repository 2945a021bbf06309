//! A queue of an interface: its four rings, and the pages that the kernel has of it.
//!
//! A page leaves the pool by [`Port::refill`], comes back with a packet by [`Port::receive`], leaves again by [`Port::send`],
//! and comes back by [`Port::complete`]. What the rings say is checked against the tables of pages ([`Frames`]): what cannot
//! be is counted and dropped, and no page is believed to be back because of it.
use std::ops::{Deref, DerefMut};

use pagemill::{Error as MemoryError, Gfp, PAGE_SIZE, Page, PagePool, PoolPage, Source};

use crate::Error;
use crate::counts::{Counts, Dropped};
use crate::frames::{Frames, Lie};
use crate::ring::{Desc, Give, Take};
use crate::umem::{Closed, Umem};

/// Entries of a ring that are moved at once.
pub(crate) const BATCH: u32 = 64;

/// A socket's rings.
pub(crate) struct Rings {
    pub(crate) fill: Give<u64>,
    pub(crate) completion: Take<u64>,
    pub(crate) rx: Take<Desc>,
    pub(crate) tx: Give<Desc>,
}

/// A packet, on a page of its own.
pub(crate) struct Packet<S: Source<Item = Page>> {
    page: PoolPage<S>,
    start: u16,
    len: u16,
}

impl<S: Source<Item = Page>> Packet<S> {
    /// A packet of `len` bytes at the start of its page. The caller writes them all: they are what the page's last owner left.
    pub(crate) fn new(page: PoolPage<S>, len: usize) -> Self {
        assert!(len <= PAGE_SIZE, "a packet of {len} bytes on a page");
        Self { page, start: 0, len: len as u16 }
    }
}

impl<S: Source<Item = Page>> Deref for Packet<S> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.page[usize::from(self.start)..][..usize::from(self.len)]
    }
}
impl<S: Source<Item = Page>> DerefMut for Packet<S> {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.page[usize::from(self.start)..][..usize::from(self.len)]
    }
}

/// The pool of a lane, and what becomes of pages that nobody needs.
pub(crate) struct Pages<S: Source<Item = Page>> {
    pub(crate) pool: PagePool<S>,
    /// Whether they go back to the pool; else they leave it for good, as in the rows `release-` of the benchmark.
    pub(crate) is_recycling: bool,
}

impl<S: Source<Item = Page>> Pages<S> {
    #[inline]
    fn put(&mut self, page: PoolPage<S>) {
        if self.is_recycling {
            self.pool.put(page);
        } else {
            drop(PoolPage::release(page));
        }
    }

    /// Drops a packet.
    #[inline]
    pub(crate) fn end(&mut self, packet: Packet<S>) {
        self.put(packet.page);
    }
}

pub(crate) struct Port<S: Source<Item = Page>> {
    rings: Rings,
    /// Pages in the fill ring, or on their way to the receive ring.
    filled: Frames<S>,
    /// Pages in the send ring, or on their way to the completion ring.
    sent: Frames<S>,
    /// Where in its page each packet begins that is being sent.
    starts: Box<[u16]>,
    /// Whether the rest of a packet in several parts is still to come.
    is_in_parts: bool,
}

/// The pages that the kernel has of a port that is being closed.
pub(crate) struct Held<S: Source<Item = Page>>([Frames<S>; 2]);

impl<S: Source<Item = Page>> Held<S> {
    /// Gives all back, when the kernel uses them no more.
    pub(crate) fn end(self, closed: &Closed) {
        self.0.into_iter().for_each(|frames| frames.end(closed));
    }
}

impl<S: Source<Item = Page>> Port<S> {
    pub(crate) fn new(rings: Rings, umem: &Umem) -> Self {
        let (base, frames) = (umem.base(), umem.frames());
        Self {
            rings,
            filled: Frames::new(base, frames),
            sent: Frames::new(base, frames),
            starts: vec![0; frames].into_boxed_slice(),
            is_in_parts: false,
        }
    }

    /// Puts 64 pages of the pool into the fill ring, if it has room for them. Returns whether it put any.
    pub(crate) fn refill(&mut self, pages: &mut Pages<S>, counts: &mut Counts) -> Result<bool, Error> {
        let fill = &mut self.rings.fill;
        if fill.room(BATCH)? < BATCH {
            return Ok(false);
        }
        fill.fetch(BATCH);
        let mut has_any = false;
        for _ in 0..BATCH {
            let page = match pages.pool.alloc(Gfp::NOWAIT | Gfp::NOWARN) {
                Ok(page) => page,
                Err(MemoryError::Exhausted(_)) => {
                    counts.no_page += 1;
                    break;
                }
                Err(error) => return Err(Error::Exhausted(error)),
            };
            fill.push(self.filled.put(page)?);
            has_any = true;
        }
        fill.publish();
        Ok(has_any)
    }

    /// Takes back up to 64 packets that were sent. Returns whether there were any.
    pub(crate) fn complete(&mut self, pages: &mut Pages<S>, counts: &mut Counts) -> Result<bool, Error> {
        let ready = self.rings.completion.ready()?.min(BATCH);
        for _ in 0..ready {
            let Some(addr) = self.rings.completion.pop() else { break };
            let frame = usize::try_from(addr).unwrap_or(usize::MAX) / PAGE_SIZE;
            // The kernel returns the address that it was given, and no other.
            let back = match self.starts.get(frame) {
                None => Err(Lie::Outside),
                Some(&start) if addr % PAGE_SIZE as u64 != u64::from(start) => Err(Lie::NotThere),
                Some(_) => self.sent.take(addr),
            };
            match back {
                Ok(page) => {
                    counts.completed += 1;
                    pages.put(page);
                }
                Err(lie) => counts.lies_completed(lie),
            }
        }
        if ready > 0 {
            self.rings.completion.publish();
        }
        Ok(ready > 0)
    }

    /// The number of packets that are there, at most 64; each is taken by [`receive`](Self::receive).
    #[inline]
    pub(crate) fn ready(&mut self) -> Result<u32, Error> {
        let ready = self.rings.rx.ready()?.min(BATCH);
        self.rings.rx.fetch(ready);
        Ok(ready)
    }

    /// The next packet. `None` if what the ring says of it cannot be.
    #[inline]
    pub(crate) fn receive(&mut self, counts: &mut Counts) -> Option<Packet<S>> {
        let Desc { addr, len, options } = self.rings.rx.pop()?;
        let start = (addr % PAGE_SIZE as u64) as usize;
        let page = match self.filled.take(addr) {
            Ok(page) => page,
            Err(lie) => {
                counts.lies_received(lie);
                return None;
            }
        };
        // The last part says that nothing follows, as a whole packet does.
        let is_part = options != 0 || self.is_in_parts;
        self.is_in_parts = options != 0;
        if len == 0 || len as usize > PAGE_SIZE - start || is_part {
            // The page is back all the same: its pool's ring takes it.
            counts.drop(Dropped::BadLength);
            drop(page);
            return None;
        }
        Some(Packet { page, start: start as u16, len: len as u16 })
    }

    /// Gives the slots of received packets back.
    pub(crate) fn end_receiving(&mut self) {
        self.rings.rx.publish();
    }

    /// Puts a packet into the send ring, or drops it if that is full.
    #[inline]
    pub(crate) fn send(&mut self, packet: Packet<S>, pages: &mut Pages<S>, counts: &mut Counts) -> Result<(), Error> {
        if self.rings.tx.room(1)? == 0 {
            counts.drop(Dropped::SendRingFull);
            pages.end(packet);
            return Ok(());
        }
        let Packet { page, start, len } = packet;
        let addr = self.sent.put(page)? + u64::from(start);
        self.starts[addr as usize / PAGE_SIZE] = start;
        self.rings.tx.push(Desc { addr, len: u32::from(len), options: 0 });
        counts.sent += 1;
        counts.sent_bytes += u64::from(len);
        Ok(())
    }

    /// The free slots of the send ring.
    pub(crate) fn room(&mut self, wanted: u32) -> Result<u32, Error> {
        self.rings.tx.room(wanted)
    }

    /// Shows the kernel what [`send`](Self::send) wrote. Returns how much of it is not sent yet.
    pub(crate) fn end_sending(&mut self) -> u32 {
        self.rings.tx.publish();
        self.rings.tx.pending()
    }

    /// Whether the kernel has to be woken to see the send ring.
    pub(crate) fn is_sender_asleep(&self) -> bool {
        self.rings.tx.wants_wakeup()
    }

    /// Whether the kernel has to be woken to see the fill ring.
    pub(crate) fn is_receiver_asleep(&self) -> bool {
        self.rings.fill.wants_wakeup()
    }

    /// The number of packets in the send ring.
    pub(crate) fn unsent(&self) -> u32 {
        self.rings.tx.pending()
    }

    /// The number of pages that the kernel has: to receive into, and to send.
    #[cfg(test)]
    pub(crate) fn held(&self) -> [usize; 2] {
        [self.filled.len(), self.sent.len()]
    }

    /// Ends it: the rings are to be closed, and then what the kernel has of it goes back.
    pub(crate) fn split(self) -> (Rings, Held<S>) {
        (self.rings, Held([self.filled, self.sent]))
    }
}

#[cfg(test)]
mod tests;
