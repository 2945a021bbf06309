//! Rings that this process shares with the kernel: fixed slots, one producer, one consumer (`linux/if_xdp.h`).
//!
//! [`Give`] is the producer's end, [`Take`] the consumer's. The other end is not trusted: it can write whatever it likes to
//! its position, and to slots at any time. So a slot is read once, and a position that cannot be is an error.
//!
//! # Invariants
//! - R1 Slots between the consumer's and the producer's position belong to the consumer, all others to the producer.
//! - R2 Only this end writes its own position. It keeps a copy, and never reads it back.
use std::marker::PhantomData;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::xdp::XdpRingOffset;

use crate::Error;

/// Set in a ring's flags when its other end sleeps (`XDP_RING_NEED_WAKEUP`).
const NEED_WAKEUP: u32 = 1;

/// A packet's place, as a receive or a send ring has it (`struct xdp_desc`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Desc {
    /// An offset in the UMEM.
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) options: u32,
}

/// What lies in a slot.
///
/// # Safety
/// Any bytes are a value of it.
pub(crate) unsafe trait Entry: Copy {}
// SAFETY: a number.
unsafe impl Entry for u64 {}
// SAFETY: numbers, without padding.
unsafe impl Entry for Desc {}

/// Memory that is shared with the kernel.
struct Region {
    start: NonNull<u8>,
    len: usize,
}

impl Region {
    fn map(fd: impl AsFd, offset: u64, len: usize) -> Result<Self, Error> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::POPULATE);
        // SAFETY: a new mapping, at a place that the kernel chooses.
        let start = unsafe { mmap(ptr::null_mut(), len, prot, flags, fd, offset) };
        let start = start.map_err(|errno| Error::io("a ring cannot be mapped", errno))?;
        match NonNull::new(start.cast()) {
            Some(start) => Ok(Self { start, len }),
            None => Err(Error::Broken("a ring was mapped at address 0".to_owned())),
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and nothing points there any more.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

struct Ring<T> {
    memory: Region,
    /// Where the positions, the flags and the slots are, in bytes.
    at: XdpRingOffset,
    /// Slots; a power of two.
    size: u32,
    of: PhantomData<T>,
}

// SAFETY: the memory belongs to no thread, and an end is used through `&mut`.
unsafe impl<T: Entry> Send for Ring<T> {}

impl<T: Entry> Ring<T> {
    /// Maps a ring of `size` slots.
    fn map(fd: impl AsFd, offset: u64, at: XdpRingOffset, size: u32) -> Result<Self, Error> {
        let word = |at: u64| at.is_multiple_of(4).then(|| at.checked_add(4)).flatten();
        let slots = (size as usize).checked_mul(size_of::<T>()).filter(|_| size.is_power_of_two());
        let slots_end = slots.and_then(|bytes| at.desc.checked_add(bytes as u64)).filter(|_| at.desc.is_multiple_of(8));
        let ends = [word(at.producer), word(at.consumer), word(at.flags.unwrap_or(at.producer)), slots_end];
        let len =
            ends.into_iter().try_fold(0, |len, end| Some(len.max(end?))).and_then(|len| usize::try_from(len).ok());
        let Some(len) = len else { return Err(Error::Broken(format!("a ring cannot lie at {at:?}"))) };
        Ok(Self { memory: Region::map(fd, offset, len)?, at, size, of: PhantomData })
    }

    fn word(&self, at: u64) -> &AtomicU32 {
        // SAFETY: within the memory, and aligned: `map` looked. The kernel accesses it as an atomic, too.
        unsafe { self.memory.start.add(at as usize).cast().as_ref() }
    }
    fn producer(&self) -> &AtomicU32 {
        self.word(self.at.producer)
    }
    fn consumer(&self) -> &AtomicU32 {
        self.word(self.at.consumer)
    }

    /// Prefetches the next slots together, to be read or to be written. They lie in the other end's cache: fetched one at a time,
    /// each would stall its packet.
    #[inline]
    fn fetch<const TO_WRITE: bool>(&self, from: u32, count: u32) {
        for at in (0..count).step_by(64 / size_of::<T>()) {
            let slot = self.slot(from.wrapping_add(at)).cast::<i8>();
            #[cfg(target_arch = "x86_64")]
            // SAFETY: it is a hint, and the slot is in the ring's memory.
            unsafe {
                use core::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T0, _mm_prefetch};
                if TO_WRITE { _mm_prefetch::<_MM_HINT_ET0>(slot) } else { _mm_prefetch::<_MM_HINT_T0>(slot) }
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = slot;
        }
    }

    #[inline]
    fn slot(&self, position: u32) -> *mut T {
        let at = self.at.desc as usize + (position & (self.size - 1)) as usize * size_of::<T>();
        // SAFETY: within the memory: `map` looked.
        unsafe { self.memory.start.add(at).cast().as_ptr() }
    }
}

/// The producer's end.
pub(crate) struct Give<T: Entry> {
    ring: Ring<T>,
    /// The next slot that is written.
    next: u32,
    /// Slots that are free, as far as this end knows.
    room: u32,
    /// What the other end has been shown.
    shown: u32,
}

impl<T: Entry> Give<T> {
    pub(crate) fn map(fd: impl AsFd, offset: u64, at: XdpRingOffset, size: u32) -> Result<Self, Error> {
        let ring = Ring::map(fd, offset, at, size)?;
        let next = ring.producer().load(Relaxed);
        Ok(Self { ring, next, room: 0, shown: next })
    }

    /// The number of free slots; at least `wanted` if there are so many.
    #[inline]
    pub(crate) fn room(&mut self, wanted: u32) -> Result<u32, Error> {
        if self.room < wanted {
            // Acquire: the other end has read the slots that it gives back.
            let used = self.next.wrapping_sub(self.ring.consumer().load(Acquire));
            self.room = self.ring.size.checked_sub(used).ok_or_else(|| beyond(used, self.ring.size))?;
        }
        Ok(self.room)
    }

    /// Has the next slots fetched, which will be written.
    #[inline]
    pub(crate) fn fetch(&self, count: u32) {
        self.ring.fetch::<true>(self.next, count);
    }

    /// Writes the next slot, which the other end sees after [`publish`](Self::publish).
    ///
    /// # Panics
    /// If the last call of [`room`](Self::room) promised no more room.
    #[inline]
    pub(crate) fn push(&mut self, entry: T) {
        assert!(self.room > 0, "{} entries are in a ring of {}", self.ring.size, self.ring.size);
        // SAFETY: the slot is in the ring's memory, and this end's (R1).
        unsafe { self.ring.slot(self.next).write_volatile(entry) };
        self.next = self.next.wrapping_add(1);
        self.room -= 1;
    }

    /// Shows the other end what was pushed.
    #[inline]
    pub(crate) fn publish(&mut self) {
        // No store for nothing: the other end's processor has the line.
        if self.shown != self.next {
            // Release: the slots are written.
            self.ring.producer().store(self.next, Release);
            self.shown = self.next;
        }
    }

    /// The number of entries that the other end has not taken.
    pub(crate) fn pending(&self) -> u32 {
        self.next.wrapping_sub(self.ring.consumer().load(Relaxed))
    }

    /// Whether the other end sleeps until it is woken.
    #[inline]
    pub(crate) fn wants_wakeup(&self) -> bool {
        self.ring.at.flags.is_none_or(|at| self.ring.word(at).load(Relaxed) & NEED_WAKEUP != 0)
    }
}

#[cfg(test)]
impl<T: Entry> Give<T> {
    /// Says that it wrote so many slots more.
    pub(crate) fn lie(&self, slots: u32) {
        self.ring.producer().store(self.next.wrapping_add(slots), Release);
    }
}

/// The consumer's end.
pub(crate) struct Take<T: Entry> {
    ring: Ring<T>,
    /// The next slot that is read.
    next: u32,
    /// Slots that are full, as far as this end knows.
    ready: u32,
}

impl<T: Entry> Take<T> {
    pub(crate) fn map(fd: impl AsFd, offset: u64, at: XdpRingOffset, size: u32) -> Result<Self, Error> {
        let ring = Ring::map(fd, offset, at, size)?;
        let next = ring.consumer().load(Relaxed);
        Ok(Self { ring, next, ready: 0 })
    }

    /// Looks how many entries there are.
    #[inline]
    pub(crate) fn ready(&mut self) -> Result<u32, Error> {
        if self.ready == 0 {
            // Acquire: the other end has written the slots.
            let ready = self.ring.producer().load(Acquire).wrapping_sub(self.next);
            if ready > self.ring.size {
                return Err(beyond(ready, self.ring.size));
            }
            self.ready = ready;
        }
        Ok(self.ready)
    }

    /// Has the next slots fetched, which will be read.
    #[inline]
    pub(crate) fn fetch(&self, count: u32) {
        self.ring.fetch::<false>(self.next, count);
    }

    /// Reads the next entry, of those that [`ready`](Self::ready) found.
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<T> {
        self.ready = self.ready.checked_sub(1)?;
        // SAFETY: the slot is in the ring's memory, and any bytes are an entry. Read once, whatever the other end does.
        let entry = unsafe { self.ring.slot(self.next).read_volatile() };
        self.next = self.next.wrapping_add(1);
        Some(entry)
    }

    /// Gives the slots that were read back.
    #[inline]
    pub(crate) fn publish(&self) {
        // Release: the slots are read.
        self.ring.consumer().store(self.next, Release);
    }
}

#[cfg(test)]
impl<T: Entry> Take<T> {
    /// Says that it read so many slots more.
    pub(crate) fn lie(&self, slots: u32) {
        self.ring.consumer().store(self.next.wrapping_add(slots), Release);
    }
}

#[cold]
fn beyond(entries: u32, size: u32) -> Error {
    Error::Broken(format!("a ring of {size} has {entries} entries"))
}
