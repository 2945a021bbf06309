//! Commits an allocator's memory before its first use, with threads on each node's own CPUs.
//!
//! It asks the process's memory limit first (`pagemill-os/src/limit.rs`), and tells each buddy, so that `give_back`
//! knows that the memory is committed. It holds no lock while it touches memory.
use crate::allocator::Allocator;
use crate::build_error::BuildError;
use core::ops::ControlFlow;
use pagemill_os::{Mapping, touch_parallel};

/// The progress of [`Allocator::populate`], in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Populated {
    /// Bytes committed so far.
    pub done: usize,
    /// Bytes to commit in total.
    pub total: usize,
}

impl Allocator {
    /// Commits all of the allocator's memory now, so that no first touch causes a page fault. One thread on each CPU of
    /// a node commits that node's memory, in pieces of 64 MiB. `progress` is called after each piece, by one thread at
    /// a time; if it returns `Break`, no further pieces are begun, and those committed stay committed. Contents do not
    /// change, so pages may be in use meanwhile. After a `Break` or an error, the next
    /// [`give_back`](Self::give_back) also counts free pages that were never committed.
    ///
    /// With [`give_back_after`](crate::Builder::give_back_after), memory that stays unused goes back in time.
    ///
    /// # Errors
    /// [`BuildError::MemoryLimit`] if the process's limit has no room for all of it; nothing was committed.
    /// [`BuildError::System`] if the system has no memory for a piece. Linux before 5.14 refuses all pieces.
    ///
    /// # Panics
    /// If `progress` panics.
    ///
    /// ```
    /// use pagemill::Allocator;
    /// use std::ops::ControlFlow::Continue;
    /// let allocator = Allocator::builder().bytes(8 << 20).build()?;
    /// let populated = allocator.populate(|so_far| {
    ///     println!("{} of {} bytes", so_far.done, so_far.total);
    ///     Continue(())
    /// })?;
    /// assert_eq!((populated.done, populated.total), (8 << 20, 8 << 20));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn populate(
        &self,
        mut progress: impl FnMut(Populated) -> ControlFlow<()> + Send,
    ) -> Result<Populated, BuildError> {
        let zones = self.zones();
        let arenas: Vec<_> = zones.in_use().collect();
        let total = arenas.iter().map(|zone| zone.memory().bytes()).sum();
        let mut claim = None;
        if let Some(limit) = &zones.limit {
            let wanted = arenas.iter().map(|zone| zone.uncommitted()).sum();
            claim = limit.claim(wanted);
            if claim.is_none() {
                return Err(BuildError::MemoryLimit { wanted, room: limit.room() });
            }
        }
        // Noted before anything is committed: the buddy then learns of memory that is given back meanwhile.
        arenas.iter().for_each(|zone| zone.buddy().note_committed());
        let cpus: Vec<Vec<usize>> = arenas.iter().map(|zone| zone.cpus()).collect();
        let parts: Vec<(&Mapping, &[usize])> =
            arenas.iter().zip(&cpus).map(|(zone, cpus)| (zone.memory(), cpus.as_slice())).collect();
        let done = touch_parallel(&parts, &mut |done| progress(Populated { done, total }));
        drop(claim);
        Ok(Populated { done: done.map_err(BuildError::system("pages", total))?, total })
    }
}
