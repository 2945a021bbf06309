//! This CPU's list is full: a load goes to a depot if another CPU asked the depots last, else a batch goes to the buddy. And drains,
//! which empty the lists of any CPU, and the depots.
use super::body::Zone;
use super::free::finish;
use core::borrow::BorrowMut;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{CpuId, Giving, ListPolicy, Mobility, Pfn, SlowEvent, WordTable, step};
use pagemill_os::lists::CpuLists;
use pagemill_os::{Batch, List, as_pfns};

impl Zone {
    #[cold]
    #[inline(never)]
    pub(super) fn overflow_one(&self, mobility: Mobility, pfn: Pfn) {
        let mut one = Batch::new();
        one.push(pfn.as_u32());
        self.overflow(mobility, &one);
    }

    /// Passes on a page that a list does not take.
    #[cold]
    #[inline(never)]
    pub(crate) fn overflow_words(&self, words: &[usize]) {
        let kind = Mobility::Unmovable;
        if self.grow_or_pass_on(kind, words.len()) && self.lists.push_words(kind, words, self.addr_of_pfn_zero()) {
            return;
        }
        let mut batch = Batch::new();
        words.iter().for_each(|&word| batch.push(self.pfn_of(word).as_u32()));
        self.overflow_to_zone(kind, &batch);
    }

    /// Passes on pages that a list does not take: as many others of the list go to a depot, or these go to the buddy.
    #[cold]
    #[inline(never)]
    pub(crate) fn overflow(&self, mobility: Mobility, batch: &Batch) {
        if !self.grow_or_pass_on(mobility, batch.len()) || !self.lists.push_n(mobility, batch, 0..batch.len()) {
            self.overflow_to_zone(mobility, batch);
        }
    }

    /// Makes room for `n` frames on the full list of this CPU: lets the list grow, or passes a load to a depot. The caller holds the
    /// frames, so the zone stays until this thread has let go of the depot.
    #[inline(never)]
    pub(crate) fn grow_or_pass_on(&self, mobility: Mobility, n: usize) -> bool {
        self.open_lists_above_high();
        if self.goes_past_lists() {
            return false;
        }
        let list = self.lists.list_here(mobility);
        let policy = list.policy().after(SlowEvent::Drain, self.limit_max);
        list.set_policy(policy);
        if list.len() + n <= policy.limit as usize {
            return true;
        }
        let has_moved = self.passes_on() && self.lists.list_to_depot(mobility, n.max(policy.batch as usize)) > 0;
        if has_moved {
            self.stats_here().depot_in.fetch_add(1, Relaxed);
        }
        has_moved
    }

    /// Whether a full list of this CPU passes pages to a depot. It does not if no other CPU's list was empty since this one's: the pages
    /// would soon be back, and the buddy keeps pageblocks whole better than a depot.
    fn passes_on(&self) -> bool {
        let asked = self.last_to_ask.load(Relaxed);
        asked != 0 && asked != self.lists.here().get() as u32 + 1
    }

    /// Passes pages that a list does not take to the buddy, and more of the list, as its policy says: more while drains follow
    /// drains.
    #[inline(always)] // One frame less on the stack of a signal handler.
    pub(crate) fn overflow_to_zone(&self, mobility: Mobility, batch: &Batch) {
        let cpu = self.lists.cpu(self.lists.here());
        if self.goes_past_lists() {
            // A request waits for them, they refill a reserve, or the system is to have them.
            cpu.stats.direct_in.fetch_add(batch.len() as u64, Relaxed);
            return self.give_to_zone(batch.as_pfns());
        }
        cpu.stats.drains.fetch_add(1, Relaxed);
        let moved = cpu.lists[mobility.index()].policy().batch as usize;
        if batch.len() >= moved {
            // These are as many as would be moved from the list.
            cpu.stats.direct_in.fetch_add(batch.len() as u64, Relaxed);
            return self.give_to_zone(batch.as_pfns());
        }
        self.drain_to_zone(cpu, mobility);
        if !self.lists.push_n(mobility, batch, 0..batch.len()) {
            self.stats_here().direct_in.fetch_add(batch.len() as u64, Relaxed);
            self.give_to_zone(batch.as_pfns());
        }
    }

    /// Moves frames of this CPU's list to the buddy, as many as its policy says. The more there are, the more of them share a word, also
    /// if they are in no order (ADR 35). The caller holds pages, so the zone stays until the table is free again.
    #[inline(never)]
    fn drain_to_zone(&self, cpu: &CpuLists, mobility: Mobility) {
        let policy = cpu.lists[mobility.index()].policy();
        if let Some(n) = policy.large_drain()
            && let Some(table) = cpu.table.try_hold()
        {
            self.move_to_zone(mobility, n as usize, Giving::by(&self.buddy, table));
        } else {
            self.move_to_zone(mobility, policy.batch as usize, Giving::to(&self.buddy));
        }
    }

    fn move_to_zone<const N: usize, T: BorrowMut<WordTable<N>>>(
        &self,
        mobility: Mobility,
        n: usize,
        mut giving: Giving<'_, '_, N, T>,
    ) {
        let mut left = n;
        while left > 0 {
            let mut out = Batch::new();
            self.lists.pop_n(mobility, left, &mut out);
            if out.is_empty() {
                break;
            }
            self.lists.list_here(mobility).note_overflowed(out.len());
            left -= out.len();
            giving.give_slice(out.as_pfns());
        }
        finish(self, &mut giving);
    }

    /// Returns the frames of all lists to the buddy, and then those of the depots, to which lists may have passed some meanwhile.
    #[cold]
    pub(crate) fn drain_all(&self) -> usize {
        let listed: usize = (0..self.lists.cpus()).map(|cpu| self.drain_cpu(CpuId::new(cpu as u32))).sum();
        listed + self.drain_depots()
    }

    /// Returns the depots' frames to the buddy.
    pub(crate) fn drain_depots(&self) -> usize {
        let mut giving = Giving::to(&self.buddy);
        let drained = self.lists.drain_depots(|numbers| giving.give_slice(as_pfns(numbers)));
        // If no frame came, no request needs to be woken.
        if drained > 0 {
            finish(self, &mut giving);
        }
        drained
    }

    /// Returns the frames of one CPU's lists to the buddy.
    pub(crate) fn drain_cpu(&self, cpu: CpuId) -> usize {
        step!("Zone::drain_cpu");
        self.drain_lists(cpu, |list| !list.is_empty())
    }

    pub(super) fn drain_lists(&self, cpu: CpuId, is_due: impl Fn(&List) -> bool) -> usize {
        let mut drained = 0;
        for mobility in Mobility::ALL {
            let list = &self.lists.cpu(cpu).lists[mobility.index()];
            if is_due(list) {
                let mut giving = Giving::to(&self.buddy);
                let given = self.lists.drain(cpu, mobility, |numbers| giving.give_slice(as_pfns(numbers)));
                finish(self, &mut giving);
                // A list that cannot be drained stays as it is, with its policy.
                let Some(given) = given else { continue };
                drained += given;
            }
            self.buddy.unbind(&list.bound);
            list.set_policy(ListPolicy::start(self.limit_max));
        }
        drained
    }
}
