//! Committing all of an allocator's memory before its first use, each node's by threads on its own CPUs.
use crate::allocator::Allocator;
use crate::build_error::BuildError;
use core::ops::ControlFlow;
use pagemill_os::{Mapping, touch_parallel};

/// How far [`Allocator::populate`] has come, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Populated {
    /// Committed.
    pub done: usize,
    /// To be committed in all.
    pub total: usize,
}

impl Allocator {
    /// Has the system commit all of its memory now, so that no first touch faults: by a thread on each CPU of the node that
    /// the memory is on, in pieces of 64 MiB. `progress` is told after each piece, by one thread at a time; when it breaks,
    /// no more pieces are begun. What is committed stays so. Contents stay too, so pages may be in use meanwhile.
    ///
    /// With [`give_back_after`](crate::Builder::give_back_after), what nobody uses goes back in time.
    ///
    /// # Errors
    /// [`BuildError::MemoryLimit`] when the limit of the process has no room for all of it: nothing was committed.
    /// [`BuildError::System`] when the system has no memory for a piece; Linux before 5.14 refuses all.
    ///
    /// # Panics
    /// When `progress` does.
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
        // Before anything is committed: what is given back meanwhile is known to be gone again.
        arenas.iter().for_each(|zone| zone.buddy.note_committed());
        let cpus: Vec<Vec<usize>> = arenas.iter().map(|zone| zone.cpus()).collect();
        let parts: Vec<(&Mapping, &[usize])> =
            arenas.iter().zip(&cpus).map(|(zone, cpus)| (zone.memory(), cpus.as_slice())).collect();
        let done = touch_parallel(&parts, &mut |done| progress(Populated { done, total }));
        drop(claim);
        Ok(Populated { done: done.map_err(BuildError::system("pages", total))?, total })
    }
}
