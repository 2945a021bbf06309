//! Depots: whole loads pass through them from the list of a CPU that frees to the list of a CPU that allocates.
//!
//! A depot is a [`List`] that belongs to no CPU. Both backends use it the portable way: its `held` word is a try-lock. A thread
//! that finds it held, full or empty goes on to the next depot, and from the last one to the zone. No thread waits for a depot
//! except a drain, so a signal handler that interrupted the holder goes on, too.
//!
//! # Invariants
//! - P1 Restartable sections never touch a depot as their list: they use the lists of CPUs below `cpus`, and depots stand
//!   behind those. They do copy from and to a depot's items on behalf of the thread that holds it.
//! - P2 A thread puts a load into a depot only after reading the limit while it holds the depot. So once a depot was shut and
//!   then held by a drain, no load enters it any more.
//! - P3 A depot's word never counts a caller's pops or pushes: frames that enter count as `refilled`, frames that leave as
//!   `overflowed` (to a list) or `drained` (to the zone, or to a request past its list).
//! - P4 A frame leaves the word that counts it before another word counts it. So the child of a fork finds it in one place at
//!   most.
use super::list::{Held, List, POPPED_SHIFT, TOP};
use super::{DEPOTS, PerCpu};
use crate::batch::PAD;
use crate::{Backend, Batch, rseq};
use core::ptr;
use core::sync::atomic::Ordering::{Relaxed, Release};
use pagemill_core::Mobility;
use pagemill_core::atomic::AtomicU32;

impl List {
    /// Tries to hold it as a depot.
    #[inline]
    fn hold_as_depot(&self) -> Option<Held<'_>> {
        // Checked first: a failed exchange would take the cache line away from the holder.
        if self.held.load(Relaxed) != 0 { None } else { self.try_hold() }
    }
    /// The same, if there is room for `n` more frames.
    fn hold_with_room(&self, n: usize) -> Option<Held<'_>> {
        let has_room = || self.len().saturating_add(n) <= self.limit.load(Relaxed) as usize;
        // Checked again while it is held: P2.
        if has_room() { self.hold_as_depot().filter(|_| has_room()) } else { None }
    }
    /// The same, if it has frames.
    fn hold_with_frames(&self) -> Option<Held<'_>> {
        if self.is_empty() { None } else { self.hold_as_depot() }
    }
    /// For a depot: frames that it has passed on to lists so far.
    pub fn passed_on(&self) -> u64 {
        self.overflowed.load(Relaxed)
    }
}

impl Held<'_> {
    /// Moves up to `n` frames from a list here; there must be room for them. `pop` copies at most as many frames as it is asked
    /// for to the front of its slice, which only the holder accesses, and may write garbage after them.
    #[inline(always)]
    fn take_from_list(&self, list: &List, n: usize, pop: impl Fn(&[AtomicU32], usize) -> usize) -> usize {
        let mut put = 0;
        while put < n {
            let word = self.list.word.load(Relaxed);
            let popped = pop(&self.list.items.0[(word & TOP) as usize..], (n - put).min(Batch::CAPACITY));
            if popped == 0 {
                break;
            }
            // Release, as in `push_each`.
            self.list.word.store(word + popped as u64, Release);
            put += popped;
        }
        list.note_overflowed(put);
        // Afterwards, so that frames on the move never look as if they were handed out.
        self.list.note_refilled(put);
        put
    }

    /// Moves up to `n` frames to a list, as many as it accepts. `push` copies as many frames as it is asked for from the front
    /// of its slice.
    #[inline(always)]
    fn move_to_list(&self, list: &List, n: usize, push: impl Fn(&[AtomicU32], usize) -> bool) -> usize {
        let mut given = 0;
        while given < n {
            let word = self.list.word.load(Relaxed);
            let top = (word & TOP) as usize;
            let part = (n - given).min(top).min(Batch::CAPACITY);
            if part == 0 {
                break;
            }
            // Before the list gets them: P4. They count as popped here and as overflowed below: P3.
            self.list.word.store(word - part as u64 + ((part as u64) << POPPED_SHIFT), Relaxed);
            if !push(&self.list.items.0[top - part..], part) {
                self.list.word.store(word, Release); // As in `push_each`.
                break;
            }
            given += part;
        }
        self.list.note_overflowed(given);
        list.note_refilled(given);
        given
    }
}

/// For the portable backend.
impl List {
    fn try_pop_to(&self, to: &[AtomicU32], want: usize) -> usize {
        let mut part = Batch::new();
        self.try_pop_n(want, &mut part);
        part.as_slice().iter().zip(to).for_each(|(&pfn, to)| to.store(pfn, Relaxed));
        part.len()
    }
    fn try_push_from(&self, from: &[AtomicU32], n: usize) -> bool {
        let mut part = Batch::new();
        from[..n].iter().for_each(|pfn| part.push(pfn.load(Relaxed)));
        self.try_push_n(part.as_slice())
    }
}

#[cfg(loom)]
impl List {
    /// [`PerCpu::list_to_depot`] between two lists.
    pub fn to_depot_for_model(&self, depot: &List, n: usize) -> usize {
        let pop = |to: &[AtomicU32], want| self.try_pop_to(to, want);
        depot.hold_with_room(n).map_or(0, |held| held.take_from_list(self, n, pop))
    }
    /// [`PerCpu::depot_to_list`] between two lists.
    pub fn from_depot_for_model(&self, depot: &List, n: usize) -> usize {
        let push = |from: &[AtomicU32], n| self.try_push_from(from, n);
        depot.hold_with_frames().map_or(0, |held| held.move_to_list(self, n, push))
    }
}

impl PerCpu {
    /// Takes up to `want` frames, at most a batch, off this CPU's list into `to`, which must have room for padding after them.
    #[inline(always)]
    fn pop_to(&self, mobility: Mobility, to: &[AtomicU32], want: usize) -> usize {
        match self.backend {
            Backend::Rseq => {
                assert!(want + PAD <= to.len());
                let to = ptr::from_ref(to).cast::<u32>().cast_mut();
                // SAFETY: as in `PerCpu::pop`; there is room for `want` numbers and the padding, in atomics, which may be
                // written through a shared reference. Nobody else accesses them: the caller holds their list, and they lie
                // above its top.
                unsafe { rseq::pop_n(self.sections(mobility), to, want, 0) }
            }
            Backend::Portable => self.list_here(mobility).try_pop_to(to, want),
        }
    }

    /// Puts the first `n` of these frames, at most a batch, back on this CPU's list: all or none.
    #[inline(always)]
    fn push_from(&self, mobility: Mobility, from: &[AtomicU32], n: usize) -> bool {
        match self.backend {
            Backend::Rseq => {
                assert!(n + PAD <= from.len());
                // SAFETY: as in `PerCpu::pop`; the numbers are initialised, with readable padding after them, and nobody writes
                // to them meanwhile: the caller holds their list.
                unsafe { rseq::push_n(self.sections(mobility), ptr::from_ref(from).cast::<u32>(), n) }
            }
            Backend::Portable => self.list_here(mobility).try_push_from(from, n),
        }
    }

    /// The depots for a mobility.
    fn depots_of(&self, mobility: Mobility) -> impl Iterator<Item = &List> {
        (self.cpus()..self.cpus() + DEPOTS).map(move |at| &self.place(at).lists[mobility.index()])
    }
    /// The depots for all mobilities.
    pub fn depots(&self) -> impl Iterator<Item = &List> {
        (self.cpus()..self.cpus() + DEPOTS).flat_map(|at| &self.place(at).lists)
    }

    /// Moves up to `n` frames from this CPU's list to a depot that is not held and has room for `n`. Returns how many; 0 if
    /// there is no such depot.
    ///
    /// ```
    /// use pagemill_core::Mobility;
    /// use pagemill_os::{Backend, PerCpu};
    /// let (lists, list) = (PerCpu::new(Backend::Portable, 1, || 0).unwrap(), Mobility::Movable);
    /// assert!(lists.push(list, 7) && lists.push(list, 8));
    /// assert_eq!(lists.list_to_depot(list, 64), 2);
    /// assert_eq!(lists.pop(list), None);
    /// assert_eq!(lists.depot_to_list(list, 1), 1);
    /// assert_eq!(lists.pop(list), Some(8));
    /// ```
    pub fn list_to_depot(&self, mobility: Mobility, n: usize) -> usize {
        let depot = self.depots_of(mobility).find_map(|depot| depot.hold_with_room(n));
        depot.map_or(0, |depot| {
            depot.take_from_list(self.list_here(mobility), n, |to, want| self.pop_to(mobility, to, want))
        })
    }

    /// Moves up to `n` frames from a depot that is not held to this CPU's list. Returns how many.
    pub fn depot_to_list(&self, mobility: Mobility, n: usize) -> usize {
        let depot = self.depots_of(mobility).find_map(List::hold_with_frames);
        depot.map_or(0, |depot| {
            depot.move_to_list(self.list_here(mobility), n, |from, n| self.push_from(mobility, from, n))
        })
    }

    /// Takes up to `want` frames, at most a batch, out of a depot that is not held into `batch`, which must be empty: for a
    /// request, past its CPU's list.
    pub fn pop_depot(&self, mobility: Mobility, want: usize, batch: &mut Batch) {
        if let Some(depot) = self.depots_of(mobility).find_map(List::hold_with_frames) {
            // Counted first, so that frames on the move never look as if they were handed out.
            let n = depot.list.len().min(want).min(Batch::CAPACITY);
            depot.list.drained.fetch_add(n as u64, Relaxed);
            depot.pop_n(n, batch, 0);
        }
    }

    /// Takes all frames out of all depots, a batch at a time. Waits for a thread that holds a depot, even if the depot looks
    /// empty: the thread may be about to put frames into it (P2). Returns how many frames it passed to `give`.
    pub fn drain_depots(&self, mut give: impl FnMut(&[u32])) -> usize {
        self.depots().map(|depot| depot.hold_for_drain().held.drain(&mut give)).sum()
    }
}
