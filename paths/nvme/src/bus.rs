//! What is between this program and a controller: its registers, its interrupts, and the two things that stop it.
//!
//! A real one is reached through VFIO (`vfio.rs`); tests have one in memory (`fake.rs`), whose clock is theirs too.
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use crate::Error;

/// A controller, as it is reached.
pub(crate) trait Bus {
    /// Bytes of its registers, doorbells among them.
    fn len(&self) -> usize;
    /// A register.
    fn read32(&self, at: usize) -> u32;
    /// Writes a register.
    fn write32(&self, at: usize, value: u32);
    /// Interrupts that are set up; with none, somebody has to look.
    fn vectors(&self) -> u16;
    /// Sleeps until an interrupt or a signal came, or for so long.
    fn wait(&self, limit: Duration) -> Result<(), Error>;
    /// Time since some moment.
    fn now(&self) -> Duration;
    /// Resets the whole function, whatever state it is in.
    fn reset(&self) -> Result<(), Error>;
    /// Whether the controller may read and write memory.
    fn set_master(&self, may: bool) -> Result<(), Error>;

    /// A register of 64 bits, which every controller has as two of 32, and some as nothing else.
    fn read64(&self, at: usize) -> u64 {
        u64::from(self.read32(at)) | u64::from(self.read32(at + 4)) << 32
    }
    /// Writes one.
    fn write64(&self, at: usize, value: u64) {
        self.write32(at, value as u32);
        self.write32(at + 4, (value >> 32) as u32);
    }
}

/// What was written to memory before this is seen by the controller before a doorbell that is written after it.
pub(crate) fn before_doorbell() {
    // On x86 a store to the registers never overtakes one to memory: the compiler alone has to be told.
    fence(Ordering::SeqCst);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier; it has no operands. A fence orders memory among processors, a device is further out.
    unsafe {
        std::arch::asm!("dmb oshst", options(nostack, preserves_flags))
    };
}

/// What the controller wrote before it turned the phase bit is read after this.
pub(crate) fn after_phase() {
    fence(Ordering::Acquire);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("dmb oshld", options(nostack, preserves_flags))
    };
}
