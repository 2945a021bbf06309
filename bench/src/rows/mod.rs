//! The catalogue: every row that a table can have, in the order in which tables show them.
//!
//! A row is opened once for each table, for as many pages as the table needs. That makes the part that threads share
//! (an allocator, a pool); each measuring thread then makes its own [`Runner`] from it.

mod c_peers;
pub(crate) mod dma;
#[cfg(feature = "dpdk")]
mod dpdk;
mod floors;
pub(crate) mod holes;
pub(crate) mod mempool;
pub(crate) mod mixed;
mod one_by_one;
pub(crate) mod orders;
pub(crate) mod page_pool;
mod pagemill;
pub(crate) mod readahead;
pub(crate) mod region;
mod rust_peers;
mod stock;
mod touch;

use crate::subject::Runner;
use pagemill_harness::rounds::RowName;
pub(crate) use pagemill_harness::rounds::{Kind, Unavailable};

pub(crate) use floors::Baton;
pub(crate) use pagemill::{
    backend_named, bits_per_frame, burst_rows, churn_rows as pagemill_churn_rows, default_backend, total_rows,
};
pub(crate) use rust_peers::churn_row as buddy_churn_row;
pub(crate) use touch::{TouchRow, Written, rows as touch_rows};

/// What a table needs of a row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Need {
    /// The most pages that are allocated at once, all threads together.
    pub(crate) pages: usize,
}

/// The part of a row that threads share. It makes a runner that holds at most the given number of pages.
pub(crate) type Site = Box<dyn Fn(usize) -> Box<dyn Runner> + Send + Sync>;

/// One row of a table. `open` makes the subject that is measured, from what the table needs. The type parameters are
/// for tables with other needs and other subjects than pages that one thread allocates and frees.
pub(crate) struct Row<N = Need, O = Site> {
    pub(crate) name: &'static str,
    /// Pagemill's per-CPU backend, or `-`.
    pub(crate) backend: &'static str,
    pub(crate) kind: Kind,
    pub(crate) open: Box<dyn Fn(N) -> Result<O, Unavailable>>,
}

impl<N, O> Row<N, O> {
    /// A row outside Pagemill.
    pub(crate) fn plain<F>(name: &'static str, kind: Kind, open: F) -> Self
    where
        F: Fn(N) -> Result<O, Unavailable> + 'static,
    {
        Row { name, backend: "-", kind, open: Box::new(open) }
    }

    pub(crate) fn row_name(&self) -> RowName {
        (self.name, self.backend, self.kind)
    }

    /// A row of Pagemill's, on that backend.
    pub(crate) fn on(self, backend: &'static str) -> Self {
        Row { backend, kind: Kind::Ours, ..self }
    }
}

/// All rows of this build.
pub(crate) fn catalogue() -> Vec<Row> {
    let mut rows = pagemill::rows();
    rows.extend(floors::rows());
    rows.extend(rust_peers::rows());
    rows.extend(c_peers::rows());
    #[cfg(feature = "dpdk")]
    rows.push(dpdk::row());
    rows
}

/// Rows that a build may lack. If one is named in `--only` or `--vs`, the message says which feature brings it.
pub(crate) const OPTIONAL: [(&str, &str); 4] =
    [("mimalloc", "mimalloc"), ("jemalloc", "jemalloc"), ("snmalloc", "snmalloc"), ("rte-mempool", "dpdk")];

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the check that every cell of a table makes before it is timed.
    #[test]
    fn every_row_hands_out_distinct_pages() {
        for row in catalogue() {
            let site = match (row.open)(Need { pages: 2048 }) {
                Ok(site) => site,
                Err(reason) => {
                    assert!(row.kind != Kind::Floor, "{} is missing: {reason}", row.name);
                    println!("skipped {} {}: {reason}", row.name, row.backend);
                    continue;
                }
            };
            let mut runner = site(2048);
            for n in [1, 2, 3, 64, 1000, 2048].into_iter().filter(|&n| runner.supports(n)).collect::<Vec<_>>() {
                for _ in 0..2 {
                    runner.verify(n).unwrap_or_else(|flaw| panic!("{} {} at {n}: {flaw}", row.name, row.backend));
                }
            }
        }
    }

    /// After each loop all pages are free again, shuffled or not.
    #[test]
    fn every_loop_frees_the_pages_that_it_allocated() {
        for row in catalogue() {
            let Ok(site) = (row.open)(Need { pages: 512 }) else { continue };
            let mut runner = site(512);
            let mut rng = fastrand::Rng::with_seed(7);
            for _ in 0..3 {
                runner.batch(64, 2).unwrap();
                runner.parts(512, 1).unwrap();
                runner.scattered(512, 2, &mut rng).unwrap();
            }
            runner.verify(512).unwrap_or_else(|flaw| panic!("{} {}: {flaw}", row.name, row.backend));
        }
    }

    #[test]
    fn the_catalogue_has_every_documented_row() {
        let rows = catalogue();
        for name in ["single", "list", "array", "callback", "runs", "raw", "split"] {
            for backend in ["rseq", "portable"] {
                let full = format!("pagemill-{name}");
                assert!(rows.iter().any(|row| row.name == full && row.backend == backend), "{full} {backend}");
            }
        }
        for name in ["memcpy", "tls-vec", "tls-refcell", "mutex-vec", "array-queue", "glibc", "buddy-system"] {
            assert!(rows.iter().any(|row| row.name == name), "{name}");
        }
        let is_built = [
            cfg!(feature = "mimalloc"),
            cfg!(feature = "jemalloc"),
            cfg!(feature = "snmalloc"),
            cfg!(feature = "dpdk"),
        ];
        for ((name, _), is_built) in OPTIONAL.into_iter().zip(is_built) {
            assert_eq!(rows.iter().any(|row| row.name == name), is_built, "{name}");
        }
    }
}
