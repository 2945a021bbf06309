//! A table for each CPU, in which frames that leave its list in no order are collected by bitmap word. It is too large for a
//! signal handler's stack.
use crate::SLEEP;
use core::borrow::{Borrow, BorrowMut};
use core::cell::UnsafeCell;
use pagemill_core::{Lock, WordTable};

/// The number of bitmap words in the table: 512 cover 32,768 frames.
const WORDS: usize = 512;

/// One CPU's table. Zeroed memory is an empty one.
///
/// A thread that finds it taken goes on without: a signal handler that interrupted its holder, or the child of a fork for ever,
/// if the holder was another thread of the parent. A child never releases it, since it cannot tell that holder from a thread of
/// its own.
#[repr(C)]
#[derive(Debug)]
pub struct CpuTable {
    lock: Lock,
    table: UnsafeCell<WordTable<WORDS>>,
}

// SAFETY: the table is accessed only through a `HeldTable`, and the lock allows one at a time.
unsafe impl Sync for CpuTable {}

impl CpuTable {
    /// Takes it if it is free.
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
        // Not `then_some`: that makes a `HeldTable` in any case, and dropping it would release another thread's table.
        if self.lock.try_take() { Some(HeldTable(self)) } else { None }
    }
}

/// Holds a CPU's table until it is dropped.
#[derive(Debug)]
pub struct HeldTable<'t>(&'t CpuTable);

impl Borrow<WordTable<WORDS>> for HeldTable<'_> {
    #[inline]
    fn borrow(&self) -> &WordTable<WORDS> {
        // SAFETY: the lock is held; zeroed memory is a valid table.
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
