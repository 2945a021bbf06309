//! Drains: any thread on any CPU takes all frames off a list (C4.3).
//!
//! A drain first takes the lock `draining`, which lets one drain at a time go on while the others sleep, and then holds the
//! list (`held`). Under rseq it then restarts that CPU's sections. After that it has the list to itself (L2).
use super::PerCpu;
use super::list::{Held, List};
use crate::{Backend, Batch, SLEEP, membarrier};
use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use pagemill_core::{CpuId, Mobility, step};
use std::time::Duration;

/// Holds a list, and the lock that lets one thread drain it.
pub(super) struct Drain<'l> {
    pub(super) held: Held<'l>,
    _turn: Turn<'l>,
}

struct Turn<'l>(&'l List);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.draining.release(SLEEP);
    }
}

impl List {
    /// Holds the list for a drain, after other drains. Then only sections of the portable backend can still hold the list. They
    /// are short: if one takes long, its thread is off its CPU, and the drain sleeps for a moment. A section does not wake the
    /// drain, which would cost a second atomic operation for each page.
    pub(super) fn hold_for_drain(&self) -> Drain<'_> {
        const TURNS: u32 = 40;
        const NAP: Duration = Duration::from_micros(50);
        self.draining.take(SLEEP);
        let turn = Turn(self);
        loop {
            if let Some(held) = (0..TURNS).find_map(|_| self.try_hold()) {
                return Drain { held, _turn: turn };
            }
            std::thread::sleep(NAP);
        }
    }
}

impl Held<'_> {
    /// Takes all frames off, a batch at a time. Returns how many it passed to `give`.
    pub(super) fn drain(&self, give: &mut impl FnMut(&[u32])) -> usize {
        let mut drained = 0;
        loop {
            let n = self.list.len().min(Batch::CAPACITY);
            if n == 0 {
                return drained;
            }
            // Counted first, so that frames on the move never look as if they were handed out.
            self.list.drained.fetch_add(n as u64, Relaxed);
            let mut batch = Batch::new();
            self.pop_n(n, &mut batch, 0);
            drained += n;
            give(batch.as_slice());
        }
    }
}

impl PerCpu {
    /// Takes all frames off one CPU's list for a mobility, a batch at a time. Any thread on any CPU may call it (C4.3).
    /// Meanwhile requests on the list's CPU go to the zone. Returns how many frames it passed to `give`.
    ///
    /// Returns `None` if the system refuses to restart that CPU's sections, for example in a sandbox that was set up after the
    /// self-test. Then the list stays as it is, and its CPU goes on using it. The list of the calling thread's own CPU is
    /// drained nevertheless, by sections.
    pub fn drain(&self, cpu: CpuId, mobility: Mobility, mut give: impl FnMut(&[u32])) -> Option<usize> {
        step!("PerCpu::drain");
        let list = &self.cpu(cpu).lists[mobility.index()];
        let drain = list.hold_for_drain();
        if self.backend == Backend::Rseq {
            // SeqCst: the write of `held` comes before the barrier that restarts the sections that have not seen it.
            core::sync::atomic::fence(SeqCst);
            if membarrier::restart_sections(cpu.get()).is_err() {
                // A section that read `held` earlier may still commit (L2), so only `held` may be changed.
                drop(drain);
                return (cpu == self.here()).then(|| self.drain_by_sections(list.len(), mobility, &mut give));
            }
        }
        Some(drain.held.drain(&mut give))
    }

    /// Takes up to `most` frames off the list of this thread's CPU, for the zone.
    fn drain_by_sections(&self, most: usize, mobility: Mobility, give: &mut impl FnMut(&[u32])) -> usize {
        let mut drained = 0;
        while drained < most {
            let mut batch = Batch::new();
            self.pop_n(mobility, most - drained, &mut batch);
            if batch.is_empty() {
                break;
            }
            // Counted on another CPU's list if the thread moved in between: the sum over all lists is right.
            self.list_here(mobility).note_overflowed(batch.len());
            drained += batch.len();
            give(batch.as_slice());
        }
        drained
    }

    /// Frames on all lists that [`drain`](Self::drain) may have had to leave alone. The sections that pushed them have
    /// committed. 0 under the portable backend, which can always drain. Depots do not count: they are always drained, and a
    /// thread that put frames into one may still hold it.
    pub fn left_alone(&self) -> usize {
        let of_cpus = (0..self.cpus()).flat_map(|at| &self.place(at).lists);
        match self.backend {
            Backend::Rseq => of_cpus.map(List::len).sum(),
            Backend::Portable => 0,
        }
    }
}
