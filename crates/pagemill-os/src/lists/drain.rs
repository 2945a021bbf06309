//! Taking everything off a list, by any thread on any CPU (C4.3).
//!
//! A drain first takes the turn, which one drain of a list has at a time (`draining`; the others sleep), then the list (`held`).
//! Under rseq it has the sections of that CPU restarted after that, and is alone with the list (L2).
use super::PerCpu;
use super::list::{Held, List};
use crate::{Backend, Batch, SLEEP, membarrier};
use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use pagemill_core::{CpuId, Mobility, step};
use std::time::Duration;

/// Alone with a list, and with the turn to drain it.
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
    /// Alone with the list, as soon as it is this drain's turn. After that only sections of the portable backend can hold the
    /// list. They are short: if one lasts, its thread is off its CPU, and the drain naps. A section wakes nobody, since that
    /// would take a second atomic operation on the way of each page.
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
    /// Takes everything off, a batch at a time. Returns how many frames went through `give`.
    pub(super) fn drain(&self, give: &mut impl FnMut(&[u32])) -> usize {
        let mut drained = 0;
        loop {
            let n = self.list.len().min(Batch::CAPACITY);
            if n == 0 {
                return drained;
            }
            // Noted first, so that frames under way never look as if they were out.
            self.list.drained.fetch_add(n as u64, Relaxed);
            let mut batch = Batch::new();
            self.pop_n(n, &mut batch, 0);
            drained += n;
            give(batch.as_slice());
        }
    }
}

impl PerCpu {
    /// Takes everything off one CPU's list of that mobility, a batch at a time, by any thread on any CPU (C4.3). The owner
    /// goes to the zone meanwhile. Returns how many frames went through `give`.
    ///
    /// `None`: the system refuses to restart the sections of that CPU, as a sandbox may that was put up after the
    /// self-test. The list is left alone then, and its CPU goes on with it. The list of the CPU that this runs on is
    /// drained all the same, by sections.
    pub fn drain(&self, cpu: CpuId, mobility: Mobility, mut give: impl FnMut(&[u32])) -> Option<usize> {
        step!("PerCpu::drain");
        let list = &self.cpu(cpu).lists[mobility.index()];
        let drain = list.hold_for_drain();
        if self.backend == Backend::Rseq {
            // SeqCst: `held` is written before the barrier restarts the sections that have not seen it.
            core::sync::atomic::fence(SeqCst);
            if membarrier::restart_sections(cpu.get()).is_err() {
                // A section that read `held` before may still commit (L2), so nothing but `held` may be touched.
                drop(drain);
                return (cpu == self.here()).then(|| self.drain_by_sections(list.len(), mobility, &mut give));
            }
        }
        Some(drain.held.drain(&mut give))
    }

    /// Takes up to `most` frames off the list of the CPU that this runs on, for the zone.
    fn drain_by_sections(&self, most: usize, mobility: Mobility, give: &mut impl FnMut(&[u32])) -> usize {
        let mut drained = 0;
        while drained < most {
            let mut batch = Batch::new();
            self.pop_n(mobility, most - drained, &mut batch);
            if batch.is_empty() {
                break;
            }
            // On another CPU's list if the thread was moved in between: their sum is right.
            self.list_here(mobility).note_overflowed(batch.len());
            drained += batch.len();
            give(batch.as_slice());
        }
        drained
    }

    /// Frames on lists of which [`drain`](Self::drain) may have left some alone; whoever pushed them is done with the
    /// list. 0 under the portable backend, which leaves none alone. Depots never count: they are always drained, and a thread
    /// that put frames into one may still have to let go of it.
    pub fn left_alone(&self) -> usize {
        let of_cpus = (0..self.cpus()).flat_map(|at| &self.place(at).lists);
        match self.backend {
            Backend::Rseq => of_cpus.map(List::len).sum(),
            Backend::Portable => 0,
        }
    }
}
