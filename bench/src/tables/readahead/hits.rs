//! *hits*: what stays in the cache, on generated traces, beside policies of the literature.
//!
//! The page cache reads from a source in memory. Nothing is read ahead, so that only eviction counts.

use std::collections::HashMap;

use pagemill::{Advice, CachedFile, PageCache};

use super::{Sizes, failed, is_shown};
use crate::Error;
use crate::policies::traces::{Trace, all, hot_set_and_scan};
use crate::policies::{hit_percent, peers};
use crate::record::Record;
use crate::rows::Kind;
use crate::rows::readahead::cold::cache_over;
use crate::rows::readahead::delayed::Zeros;
use crate::stats::Spread;
use crate::subject::{Flaw, PAGE_BYTES};
use crate::tables::Run;

/// What the names of its records begin with; a trace's name follows.
pub(crate) const HITS: &str = "readahead-hits ";

/// What is left of a hot set after a scan of ten times the cache, in percent.
pub(crate) const SCAN: &str = "readahead-scan";

/// The sizes of the cache for the scan.
pub(crate) const SCANNED: [usize; 2] = [1000, 10_000];

pub(super) fn hits(run: &mut Run, sizes: Sizes) -> Result<Vec<Record>, Error> {
    let mut records = Vec::new();
    for trace in all(sizes.accesses, run.seed) {
        // As many names as there are traces, which live as long as the report.
        let bench: &'static str = Box::leak(format!("{HITS}{}", trace.name).into_boxed_str());
        let keys = dense(&trace.keys);
        let middle = trace.sizes.len() / 2;
        let used = if sizes.has_all_traces { &trace.sizes[..] } else { &trace.sizes[middle..=middle] };
        for &size in used {
            if is_shown(run, Kind::Ours) {
                let percent = ours(&keys, &trace, size).map_err(|why| failed(&trace.name, why))?;
                records.push(record(bench, super::CACHE, Kind::Ours, size, percent));
            }
            for (name, mut policy) in peers(size).into_iter().filter(|_| is_shown(run, Kind::Peer)) {
                let percent = hit_percent(policy.as_mut(), &trace.keys, trace.warm);
                records.push(record(bench, name, Kind::Peer, size, percent));
            }
        }
    }
    for size in SCANNED {
        let (before, keys) = hot_set_and_scan(size, run.seed);
        if is_shown(run, Kind::Ours) {
            let percent = scanned(&keys, before, size).map_err(|why| failed("a scan", why))?;
            records.push(record(SCAN, super::CACHE, Kind::Ours, size, percent));
        }
        for (name, mut policy) in peers(size).into_iter().filter(|_| is_shown(run, Kind::Peer)) {
            keys.iter().for_each(|&key| _ = policy.access(key));
            let hot = hot_set(&keys[..before]);
            let held = hot.iter().filter(|&&key| policy.holds(key)).count();
            records.push(record(SCAN, name, Kind::Peer, size, 100.0 * held as f64 / hot.len() as f64));
        }
    }
    Ok(records)
}

fn record(bench: &'static str, name: &'static str, kind: Kind, n: usize, percent: f64) -> Record {
    let nothing = Spread { median: 0.0, min: 0.0, max: 0.0 };
    Record { hit_percent: Some(percent), runs: 1, ..Record::of(bench, (name, "-", kind), n, nothing) }
}

/// The keys as the pages of a file, numbered as they first occur.
fn dense(keys: &[u64]) -> Vec<u64> {
    let mut pages = HashMap::new();
    keys.iter()
        .map(|&key| {
            let next = pages.len() as u64;
            *pages.entry(key).or_insert(next)
        })
        .collect()
}

fn cache(size: usize) -> Result<(PageCache, CachedFile), Flaw> {
    let (cache, mut files) = cache_over(Zeros(1 << 44), size, None, false)?;
    let file = files.remove(0);
    file.advise(Advice::Random, 0..0);
    Ok((cache, file))
}

fn access(file: &CachedFile, page: u64) -> Result<(), Flaw> {
    file.read_at(&mut [0; 8], page * PAGE_BYTES as u64)?;
    Ok(())
}

fn ours(keys: &[u64], trace: &Trace, size: usize) -> Result<f64, Flaw> {
    let (cache, file) = cache(size)?;
    let (before, counted) = keys.split_at(trace.warm.min(keys.len()));
    before.iter().try_for_each(|&page| access(&file, page))?;
    let hits = cache.stats().hits;
    counted.iter().try_for_each(|&page| access(&file, page))?;
    let stats = cache.stats();
    if stats.pages > size as u64 {
        return Err(Flaw::Failed(format!("{} pages in a cache of {size}", stats.pages)));
    }
    Ok(100.0 * (stats.hits - hits) as f64 / counted.len().max(1) as f64)
}

/// Keys that were read twice at least.
fn hot_set(keys: &[u64]) -> Vec<u64> {
    let mut reads: HashMap<u64, u32> = HashMap::new();
    keys.iter().for_each(|&key| *reads.entry(key).or_default() += 1);
    reads.into_iter().filter(|&(_, reads)| reads > 1).map(|(key, _)| key).collect()
}

fn scanned(keys: &[u64], before: usize, size: usize) -> Result<f64, Flaw> {
    let (cache, file) = cache(size)?;
    let pages = dense(keys);
    pages.iter().try_for_each(|&page| access(&file, page))?;
    // A look at a page that has gone brings it back in the place of another: this finds a little less than was left.
    let hot = hot_set(&pages[..before]);
    let hits = cache.stats().hits;
    hot.iter().try_for_each(|&page| access(&file, page))?;
    let held = cache.stats().hits - hits;
    Ok(100.0 * held as f64 / hot.len() as f64)
}
