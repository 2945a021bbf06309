//! The kernel's side of a queue, in memory: it behaves, or lies in every way that its side of the rings permits.
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::xdp::XdpRingOffset;

use crate::Error;
use crate::port::Rings;
use crate::ring::{Desc, Entry, Give, Take};

/// Where the kernel puts a packet on its page.
pub(crate) const HEADROOM: u64 = 256;

/// The other ends of a socket's rings, and the frames that the kernel would say it has.
pub(crate) struct Fake {
    pub(crate) fill: Take<u64>,
    pub(crate) completion: Give<u64>,
    pub(crate) rx: Give<Desc>,
    pub(crate) tx: Take<Desc>,
    /// Frames for packets, and addresses that are being sent.
    pub(crate) empty: Vec<u64>,
    pub(crate) sending: Vec<u64>,
}

fn ring<G: Entry>(slots: u32, start: u32) -> (Give<G>, Take<G>) {
    let file = memfd_create("ring", MemfdFlags::CLOEXEC).unwrap();
    let at = XdpRingOffset { producer: 0, consumer: 64, desc: 192, flags: Some(128) };
    let len = at.desc + u64::from(slots) * size_of::<G>() as u64;
    ftruncate(&file, len).unwrap();
    // Both positions.
    rustix::io::pwrite(&file, &start.to_ne_bytes(), 0).unwrap();
    rustix::io::pwrite(&file, &start.to_ne_bytes(), 64).unwrap();
    (Give::map(&file, 0, at, slots).unwrap(), Take::map(&file, 0, at, slots).unwrap())
}

impl Fake {
    /// Rings of `slots` slots, whose positions begin at `start`.
    pub(crate) fn new(slots: u32, start: u32) -> (Self, Rings) {
        let (fill, fill_end) = ring(slots, start);
        let (completion_end, completion) = ring(slots, start);
        let (rx_end, rx) = ring(slots, start);
        let (tx, tx_end) = ring(slots, start);
        let fake = Self {
            fill: fill_end,
            completion: completion_end,
            rx: rx_end,
            tx: tx_end,
            empty: Vec::new(),
            sending: Vec::new(),
        };
        (fake, Rings { fill, completion, rx, tx })
    }

    /// Takes what is in the fill and the send ring.
    pub(crate) fn look(&mut self) {
        while self.fill.ready().unwrap() > 0 {
            self.empty.extend(std::iter::from_fn(|| self.fill.pop()));
            self.fill.publish();
        }
        while self.tx.ready().unwrap() > 0 {
            self.sending.extend(std::iter::from_fn(|| self.tx.pop()).map(|desc| desc.addr));
            self.tx.publish();
        }
    }

    /// Says that a packet was received.
    pub(crate) fn receive(&mut self, desc: Desc) -> Result<(), Error> {
        if self.rx.room(1)? > 0 {
            self.rx.push(desc);
            self.rx.publish();
        }
        Ok(())
    }

    /// Says that a packet was sent.
    pub(crate) fn complete(&mut self, addr: u64) -> Result<(), Error> {
        if self.completion.room(1)? > 0 {
            self.completion.push(addr);
            self.completion.publish();
        }
        Ok(())
    }
}
