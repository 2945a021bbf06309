//! The interface to a controller: its registers, its interrupts, and the two ways to stop it.
//!
//! A real controller is accessed through VFIO (`vfio.rs`). Tests have one in memory (`fake.rs`), with a clock of its
//! own.
use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::Error;

/// Access to a controller, from any thread.
pub(crate) trait Bus: Send + Sync {
    /// Bytes of its registers, doorbells among them.
    fn len(&self) -> usize;
    /// A register.
    fn read32(&self, at: usize) -> u32;
    /// Writes a register.
    fn write32(&self, at: usize, value: u32);
    /// The number of interrupts that are set up; without any, completions are polled.
    fn vectors(&self) -> u16;
    /// Sleeps until one of these interrupts or a signal comes, at most for `limit`.
    fn wait(&self, vectors: &[u16], limit: Duration) -> Result<(), Error>;
    /// The descriptor that an interrupt makes readable.
    fn event(&self, _vector: u16) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Makes the descriptor unreadable until the next interrupt.
    fn quiet(&self, _vector: u16) -> Result<(), Error> {
        Ok(())
    }
    /// Time since some moment.
    fn now(&self) -> Duration;
    /// Resets the whole function, in any state.
    fn reset(&self) -> Result<(), Error>;
    /// Whether the controller may read and write memory.
    fn set_master(&self, may: bool) -> Result<(), Error>;

    /// Reads a register of 64 bits as two of 32 bits, which every controller supports.
    fn read64(&self, at: usize) -> u64 {
        u64::from(self.read32(at)) | u64::from(self.read32(at + 4)) << 32
    }
    /// Writes a register of 64 bits.
    fn write64(&self, at: usize, value: u64) {
        self.write32(at, value as u32);
        self.write32(at + 4, (value >> 32) as u32);
    }
}
