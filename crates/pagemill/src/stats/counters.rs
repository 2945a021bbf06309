//! [`Stats`], generated from the table of counters, and the table itself for programs that show counters: [`Stats::COUNTERS`].
//!
//! The table is in `pagemill-os/src/counters.rs`: a counter that is added there appears here by itself.
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::Why;
use pagemill_core::atomic::AtomicU64;
use pagemill_os::CpuStats;

/// A counter of [`Stats`], and its names: see [`Stats::COUNTERS`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Counter {
    /// The field of [`Stats`].
    pub name: &'static str,
    /// What it counts, as a sentence.
    pub help: &'static str,
    /// Its name in [`VmStat`](super::VmStat), if it is shown there.
    pub vmstat: Option<&'static str>,
    /// The name of the Prometheus figure that a running process shows, if it shows one: `pagemill_`, what it counts,
    /// and `_total` if it only grows.
    pub figure: Option<&'static str>,
    /// Whether the figure has one value for the allocator or one for each zone.
    pub by: CountedBy,
    read: fn(&Stats) -> u64,
}

/// The things that a [`Counter`] has one value for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CountedBy {
    /// One value for the allocator.
    Allocator,
    /// One value for each zone.
    Zone,
}

impl Counter {
    /// Its value.
    pub fn of(&self, stats: &Stats) -> u64 {
        (self.read)(stats)
    }
}

/// Turns a name of the table into an `Option`: `_` means none.
macro_rules! name {
    (_) => {
        None
    };
    ($name:literal) => {
        Some($name)
    };
}

/// Sums a counter of the section `cpu` over CPUs. Counters of other sections are computed elsewhere.
macro_rules! add_of_cpu {
    (cpu $sum:expr, $counted:expr) => {
        $sum = $sum.wrapping_add($counted.load(Relaxed))
    };
    ($_section:ident $_sum:expr, $_counted:expr) => {};
}

/// Generates [`Stats`] from the table in `pagemill-os/src/counters.rs`, which explains its entries.
macro_rules! stats {
    ($($section:ident { $(#[doc = $doc:literal] $field:ident: $vmstat:tt, $figure:tt by $by:ident;)* })*) => {
        /// Counters of an allocator, summed over its CPUs. They are read without a lock: exact at rest, close while
        /// other threads work. Counts of pages wrap at 2^48.
        ///
        /// ```
        /// use pagemill::{Allocator, Bulk, PageList};
        /// let allocator = Allocator::builder().pages(512).build()?;
        /// let mut list = PageList::new();
        /// allocator.alloc_pages_bulk_list(Bulk::up_to(64), &mut list)?;
        /// let stats = allocator.stats();
        /// assert_eq!((stats.allocated, stats.freed, stats.bulk_calls()), (64, 0, 1));
        /// println!("{}", allocator.vmstat());
        /// # Ok::<(), pagemill::Error>(())
        /// ```
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[doc = $doc] pub $field: u64,)*)*
            /// Requests that delivered less than they were asked for, by reason: see [`shortfalls`](Self::shortfalls).
            pub(super) shortfalls: [u64; Why::COUNT],
            /// Bulk allocations by the number of blocks that they delivered, where a page is a block of order 0: entry
            /// i counts calls of 2^i to 2^(i+1) - 1 blocks. A call for one block is no bulk allocation.
            pub bulk_alloc: [u64; 32],
            /// Bulk frees by the number of blocks, in the same way. A call counts once for each zone and each kind of
            /// block in it, where pages of different mobility differ; blocks of 2 MiB and more are freed singly and do
            /// not count.
            pub bulk_free: [u64; 32],
        }

        impl Stats {
            /// Every counter that is one number, with its names, for programs that export counters.
            ///
            /// ```
            /// use pagemill::{Allocator, Stats};
            /// let stats = Allocator::builder().pages(512).build()?.stats();
            /// let free = Stats::COUNTERS.iter().find(|counter| counter.name == "free").unwrap();
            /// assert_eq!((free.vmstat, free.of(&stats)), (Some("nr_free_pages"), 512));
            /// # Ok::<(), pagemill::Error>(())
            /// ```
            pub const COUNTERS: &'static [Counter] = &[$($(Counter {
                name: stringify!($field),
                help: $doc.trim_ascii_start(),
                vmstat: name!($vmstat),
                figure: name!($figure),
                by: CountedBy::$by,
                read: |stats| stats.$field,
            },)*)*];

            /// The counters that CPUs count themselves.
            pub(super) fn of_cpus<'s>(cpus: impl Iterator<Item = &'s CpuStats>) -> Self {
                let loaded = |counts: &'s [AtomicU64]| counts.iter().map(|count| count.load(Relaxed));
                let mut stats = Self::default();
                for cpu in cpus {
                    $($(add_of_cpu!($section stats.$field, cpu.$field);)*)*
                    add(&mut stats.shortfalls, loaded(&cpu.shortfalls));
                    add(&mut stats.bulk_alloc, loaded(&cpu.bulk_alloc));
                    add(&mut stats.bulk_free, loaded(&cpu.bulk_free));
                }
                stats
            }

            /// Adds another zone's counters.
            pub(super) fn add(&mut self, other: &Self) {
                $($(self.$field = self.$field.wrapping_add(other.$field);)*)*
                add(&mut self.shortfalls, other.shortfalls);
                add(&mut self.bulk_alloc, other.bulk_alloc);
                add(&mut self.bulk_free, other.bulk_free);
            }
        }
    };
}
pagemill_os::counters!(stats);

fn add(sums: &mut [u64], more: impl IntoIterator<Item = u64>) {
    sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
}

impl Stats {
    /// The number of bulk allocations of more than one page or block.
    pub fn bulk_calls(&self) -> u64 {
        self.bulk_alloc.iter().sum()
    }
    /// The number of requests that delivered less than they were asked for.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Why};
    /// let allocator = Allocator::builder().pages(1).build()?;
    /// let page = allocator.alloc_page(Gfp::NOWAIT)?;
    /// assert!(allocator.alloc_page(Gfp::NOWAIT).is_err());
    /// let stats = allocator.stats();
    /// assert_eq!((stats.shortfalls(), stats.shortfalls_by(Why::Exhausted)), (1, 1));
    /// # drop(page);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn shortfalls(&self) -> u64 {
        self.shortfalls.iter().sum()
    }
    /// The number of requests that delivered less for this reason.
    pub fn shortfalls_by(&self, why: Why) -> u64 {
        self.shortfalls[why.index()]
    }
    /// The counters that [`VmStat`](super::VmStat) shows, with their names there.
    pub(super) fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Self::COUNTERS.iter().filter_map(|counter| Some((counter.vmstat?, counter.of(self))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn counters_have_unique_names_and_a_sentence() {
        let counters = || Stats::COUNTERS.iter();
        let are_unlike = |names: Vec<&str>| names.iter().collect::<HashSet<_>>().len() == names.len();
        assert!(are_unlike(counters().filter_map(|counter| counter.vmstat).collect()));
        assert!(are_unlike(counters().filter_map(|counter| counter.figure).collect()));
        for counter in counters() {
            assert!(counter.help.ends_with('.') && !counter.help.starts_with(' '), "{counter:?}");
        }
    }

    #[test]
    fn each_counter_is_summed_over_zones() {
        let one = Stats { refills: 1, free: 2, waits: 3, bulk_free: [4; 32], ..Stats::default() };
        let mut sum = one.clone();
        sum.add(&one);
        assert_eq!((sum.refills, sum.free, sum.waits, sum.bulk_free[31]), (2, 4, 6, 8));
        let values = |stats: &Stats| Stats::COUNTERS.iter().map(|counter| counter.of(stats)).sum::<u64>();
        assert_eq!(values(&sum), 2 * values(&one));
    }
}
