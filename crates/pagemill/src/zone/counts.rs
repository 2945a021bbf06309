//! What a zone counts: pages handed out and freed, summed over CPUs and lists (C3.13).
//!
//! The counters lie beside the lists, one set for each CPU, and are read without a lock. Sums are exact at rest, and close
//! while other threads work.
use super::Zone;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::atomic::AtomicU64;
use pagemill_core::{CpuId, Gfp, Level};
use pagemill_os::{CpuStats, List};

/// Lists count modulo 2^48, and a list that is read between two updates may seem to have fewer than 0 pages: so sums
/// are modulo 2^48 too.
const LISTS_COUNT: u64 = u64::MAX >> 16;

impl Zone {
    pub(crate) fn cpu_stats(&self) -> impl Iterator<Item = &CpuStats> {
        (0..self.lists().cpus()).map(|cpu| &self.lists().cpu(CpuId::new(cpu as u32)).stats)
    }

    fn sum(&self, field: fn(&CpuStats) -> &AtomicU64) -> u64 {
        self.cpu_stats().fold(0, |sum, cpu| sum.wrapping_add(field(cpu).load(Relaxed)))
    }
    pub(crate) fn sum_lists(&self, field: fn(&List) -> u64) -> u64 {
        self.lists().lists().fold(0, |sum, list| sum.wrapping_add(field(list)))
    }
    pub(crate) fn allocated(&self) -> u64 {
        self.allocated_on(|_| true)
    }
    /// Pages handed out on the CPUs that `which` selects.
    pub(crate) fn allocated_on(&self, which: impl Fn(CpuId) -> bool) -> u64 {
        (0..self.lists().cpus() as u32).map(CpuId::new).filter(|&cpu| which(cpu)).fold(0u64, |sum, cpu| {
            let cpu = self.lists().cpu(cpu);
            let direct = cpu.stats.direct_out.load(Relaxed).wrapping_add(cpu.stats.block_pages_out.load(Relaxed));
            cpu.lists.iter().fold(sum.wrapping_add(direct), |sum, list| sum.wrapping_add(list.popped()))
        }) & LISTS_COUNT
    }
    pub(crate) fn freed(&self) -> u64 {
        let direct = self.sum(|cpu| &cpu.direct_in).wrapping_add(self.sum(|cpu| &cpu.block_pages_in));
        self.sum_lists(|list| list.pushed()).wrapping_add(direct) & LISTS_COUNT
    }

    /// Whether some frame is neither handed out nor put aside, nor kept by a watermark or a claim. If a request found
    /// none all the same, another thread had that frame in its hands.
    #[cold]
    pub(crate) fn has_frames_under_way(&self, gfp: Gfp) -> bool {
        let kept = (self.floor(gfp, Level::Min) as usize).min(self.buddy().free_frames());
        // Pages freed between the two sums make the count too small, or negative.
        self.counted_out() + (self.quarantined() as i64) + (kept as i64) < self.frames() as i64
    }

    /// Pages that are out, by the counters. Sums are modulo 2^48; while other threads allocate, the result may be too
    /// small or too large.
    pub(crate) fn counted_out(&self) -> i64 {
        (self.allocated().wrapping_sub(self.freed()) << 16) as i64 >> 16
    }

    /// In a forked child: counts frames that are neither free nor counted as handed out as handed out. Other threads of
    /// the parent had them in their hands.
    pub(crate) fn count_stranded(&self) {
        let out = (self.frames() - self.buddy().free_frames()) as i64;
        self.lists().cpu(CpuId::new(0)).stats.direct_out.fetch_add((out - self.counted_out()) as u64, Relaxed);
    }
}
