//! A table for each CPU, in which frames that leave its list in no order are collected by word: too large for the stack that a signal
//! handler has.
use crate::SLEEP;
use core::borrow::{Borrow, BorrowMut};
use core::cell::UnsafeCell;
use pagemill_core::{Lock, WordTable};

/// Words that frames are collected for: 512 are 32,768 frames.
const WORDS: usize = 512;

/// One CPU's table. Zeroed memory is an empty one.
///
/// Whoever finds it taken does without: a signal handler that interrupted its holder, or, as long as it lives, the child of a fork whose
/// holder is not there. A child leaves it as it is, since it cannot tell that holder from a thread of its own.
#[repr(C)]
#[derive(Debug)]
pub struct CpuTable {
    lock: Lock,
    table: UnsafeCell<WordTable<WORDS>>,
}

// SAFETY: the table is touched through a `HeldTable` alone, of which the lock lets one be.
unsafe impl Sync for CpuTable {}

impl CpuTable {
    /// Takes it, if nobody has it.
    ///
    /// ```
    /// use pagemill_core::CpuId;
    /// use pagemill_os::{Backend, PerCpu};
    /// let lists = PerCpu::new(Backend::Portable, 1, || 0).unwrap();
    /// let table = &lists.cpu(CpuId::new(0)).table;
    /// let held = table.try_hold();
    /// assert!(held.is_some() && table.try_hold().is_none());
    /// drop(held);
    /// assert!(table.try_hold().is_some());
    /// ```
    #[inline]
    pub fn try_hold(&self) -> Option<HeldTable<'_>> {
        // Not `then_some`: it would let go of what somebody else holds.
        if self.lock.try_take() { Some(HeldTable(self)) } else { None }
    }
}

/// Alone with a CPU's table.
#[derive(Debug)]
pub struct HeldTable<'t>(&'t CpuTable);

impl Borrow<WordTable<WORDS>> for HeldTable<'_> {
    #[inline]
    fn borrow(&self) -> &WordTable<WORDS> {
        // SAFETY: alone with it; zeroed memory is a table.
        unsafe { &*self.0.table.get() }
    }
}

impl BorrowMut<WordTable<WORDS>> for HeldTable<'_> {
    #[inline]
    fn borrow_mut(&mut self) -> &mut WordTable<WORDS> {
        // SAFETY: as above.
        unsafe { &mut *self.0.table.get() }
    }
}

impl Drop for HeldTable<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.lock.release(SLEEP);
    }
}
