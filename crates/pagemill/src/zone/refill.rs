//! This CPU's list is empty: takes frames for the request, and more for the list, from a depot or from the buddy in one trip.
use super::body::Zone;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Gfp, Level, Mobility, SlowEvent, step};
use pagemill_os::{Batch, Frames, List, Load};

impl Zone {
    /// Takes `want` frames (at most a batch's room) from a depot, or else from the buddy above the watermark, into `batch`, which is
    /// empty; and more frames for the list, as its policy says. They are not prepared. False: a fault was injected.
    pub(super) fn refill(&self, gfp: Gfp, level: Level, want: usize, batch: &mut Batch) -> bool {
        step!("Zone::refill");
        if self.shared.is_refused_by_fault(gfp) {
            return false;
        }
        let mobility = gfp.mobility();
        let cpu = self.lists.cpu(self.lists.here());
        let list = &cpu.lists[mobility.index()];
        let policy = list.policy();
        list.set_policy(policy.after(SlowEvent::Refill, self.limit_max));
        let load = if self.goes_past_lists() { 0 } else { want.max(policy.batch as usize) };
        if self.take_from_depot(mobility, want, load, batch) {
            return true;
        }
        cpu.stats.refills.fetch_add(1, Relaxed);

        // While free memory falls, lists take less: at most a quarter of the frames above the low watermark, and none below it.
        let floor = self.floor(gfp, level);
        let share = match self.floor(Gfp::NOWAIT, Level::Low) as usize {
            0 => policy.batch as usize,
            _ if level == Level::Min || self.is_low.load(Relaxed) => 0,
            low => (self.buddy.free_frames().saturating_sub(low) / 4).min(policy.batch as usize),
        };
        let direct = if gfp.may_wait() {
            self.load(list, want.max(share), want, mobility, floor, batch)
        } else {
            self.load_in_parts(list, share, want, mobility, floor, batch)
        };
        cpu.stats.direct_out.fetch_add(direct as u64, Relaxed);
        true
    }

    /// Takes up to `want` frames (at most a batch's room) from a depot into `batch`, which is empty. With `load` above 0 it first moves so
    /// many frames to this CPU's list. False: the depots are empty, or another CPU uses them.
    #[inline(never)]
    pub(crate) fn take_from_depot(&self, mobility: Mobility, want: usize, load: usize, batch: &mut Batch) -> bool {
        if load > 0 && self.load_from_depot(mobility, load) {
            self.lists.pop_n(mobility, want, batch);
        }
        if batch.is_empty() {
            self.lists.pop_depot(mobility, want, batch);
            self.stats_here().direct_out.fetch_add(batch.len() as u64, Relaxed);
        }
        !batch.is_empty()
    }

    /// Moves a load of `n` frames from a depot to this CPU's list.
    fn load_from_depot(&self, mobility: Mobility, n: usize) -> bool {
        let here = self.lists.here().get() as u32 + 1;
        if self.last_to_ask.load(Relaxed) != here {
            self.last_to_ask.store(here, Relaxed); // Only when it changes: all CPUs share the line.
        }
        let is_loaded = self.lists.depot_to_list(mobility, n) > 0;
        if is_loaded {
            self.stats_here().depot_out.fetch_add(1, Relaxed);
        }
        is_loaded
    }

    /// Moves a load from a depot to this CPU's list, if that has fewer than `n` frames. Not if faults are injected: the slow path
    /// counts the acquisition.
    #[cold]
    #[inline(never)]
    pub(super) fn reload_from_depot(&self, mobility: Mobility, n: usize) -> bool {
        let list = self.lists.list_here(mobility);
        if list.len() >= n || self.shared.faults.get().is_some() || self.goes_past_lists() {
            return false;
        }
        let policy = list.policy();
        let is_loaded = self.load_from_depot(mobility, n.max(policy.batch as usize));
        if is_loaded {
            list.set_policy(policy.after(SlowEvent::Refill, self.limit_max));
        }
        is_loaded
    }

    /// Takes `all` frames from the buddy in one trip: `want` for the caller, the others for the list.
    #[inline(never)]
    fn load(&self, list: &List, all: usize, want: usize, mobility: Mobility, floor: u32, batch: &mut Batch) -> usize {
        let mut load = Load::new();
        self.take_from_zone(&list.bound, all, mobility, floor, &mut load);
        let kept = load.len().saturating_sub(want);
        batch.push_slice(&load.as_slice()[kept..]);
        let direct = load.len() - kept;
        load.truncate(kept);
        self.put_on_list(mobility, &load);
        direct
    }

    /// The same for a caller that may be a signal handler with little stack: a part at a time. Other CPUs may take the last frames in
    /// between; the caller then gets what is on the list.
    #[inline(never)]
    fn load_in_parts(
        &self,
        list: &List,
        all: usize,
        want: usize,
        mobility: Mobility,
        floor: u32,
        batch: &mut Batch,
    ) -> usize {
        let mut left = all.min(self.buddy.free_frames().saturating_sub(floor as usize)).saturating_sub(want);
        while left > 0 {
            let mut part = Batch::new();
            let n = left.min(Batch::CAPACITY);
            self.take_from_zone(&list.bound, n, mobility, floor, &mut part);
            self.put_on_list(mobility, &part);
            if part.len() < n {
                break;
            }
            left -= n;
        }
        let direct = self.take_from_zone(&list.bound, want, mobility, floor, batch);
        if batch.is_empty() {
            self.lists.pop_n(mobility, want, batch);
        }
        direct
    }

    /// Puts frames from the buddy on this CPU's list, and back into the buddy if the list takes no more.
    fn put_on_list<const ROOM: usize>(&self, mobility: Mobility, load: &Frames<ROOM>) {
        step!("Zone::put_on_list");
        for start in (0..load.len()).step_by(Batch::CAPACITY) {
            let end = load.len().min(start + Batch::CAPACITY);
            let list = self.lists.list_here(mobility);
            if !self.lists.push_n(mobility, load, start..end) {
                return self.give_to_zone(&load.as_pfns()[start..]);
            }
            // Counted afterwards, so that frames on the move never look as if they were out.
            list.note_refilled(end - start);
        }
    }
}
