//! Traces of accesses to pages, generated from a seed.
//!
//! A trace's name says its shape; [`Trace::sizes`] are the cache sizes to run it with. I1: the same seed gives the same
//! trace. I2: parts of a trace that are to be independent have disjoint keys ([`part`]).

/// Random numbers, the same for the same seed (SplitMix64; Steele, Lea and Flood, 2014).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut n = self.0;
        n = (n ^ (n >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        n = (n ^ (n >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        n ^ (n >> 31)
    }

    /// A number below `most`.
    pub(crate) fn below(&mut self, most: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(most)) >> 64) as u64
    }

    /// True in so many of a hundred cases.
    fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// A number from 0 to 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Key `n` of an independent part of a trace.
fn part(part: u64, n: u64) -> u64 {
    (part << 40) | n
}

/// Zipf's distribution: key number r, from 1, has a probability proportional to r to the power of -alpha.
pub(crate) struct Zipf {
    /// Sums of the probabilities up to each key.
    sums: Vec<f64>,
}

impl Zipf {
    pub(crate) fn new(keys: usize, alpha: f64) -> Self {
        let mut sum = 0.0;
        let add = |rank: usize| {
            sum += (rank as f64).powf(-alpha);
            sum
        };
        Self { sums: (1..=keys).map(add).collect() }
    }

    pub(crate) fn draw(&self, random: &mut Random) -> u64 {
        let at = random.unit() * self.sums.last().copied().unwrap_or_default();
        self.sums.partition_point(|&sum| sum <= at).min(self.sums.len() - 1) as u64
    }
}

/// A trace with the sizes of caches to run it with.
pub(crate) struct Trace {
    pub(crate) name: String,
    /// Keys read, in order.
    pub(crate) keys: Vec<u64>,
    /// Accesses at the beginning that are not counted.
    pub(crate) warm: usize,
    /// Pages that the cache holds.
    pub(crate) sizes: Vec<usize>,
}

/// Keys of most traces.
pub(crate) const KEYS: usize = 100_000;

/// Caches of 0.1, 1, 10 and 30 percent of the keys.
fn usual_sizes() -> Vec<usize> {
    vec![KEYS / 1000, KEYS / 100, KEYS / 10, KEYS * 3 / 10]
}

/// Independent reads by Zipf's distribution.
pub(crate) fn zipf(alpha: f64, accesses: usize, seed: u64) -> Trace {
    let (zipf, mut random) = (Zipf::new(KEYS, alpha), Random::new(seed));
    let keys = (0..accesses).map(|_| zipf.draw(&mut random)).collect();
    Trace { name: format!("zipf {alpha}"), keys, warm: accesses / 5, sizes: usual_sizes() }
}

/// Zipf's reads, alpha 1.0, and in between scans of `length` pages that nobody reads again. So many percent of the
/// accesses belong to scans, which take turns with the other reads page by page while they last.
pub(crate) fn zipf_and_scans(percent: u64, length: u64, accesses: usize, seed: u64) -> Trace {
    let (zipf, mut random) = (Zipf::new(KEYS, 1.0), Random::new(seed));
    let (mut keys, mut scan, mut left) = (Vec::with_capacity(accesses), 0, 0);
    while keys.len() < accesses {
        // While a scan goes on, three of four accesses are its own; pauses bring the share down.
        if left == 0 && random.below(length * 100 / percent.max(1) * 3) < 4 + percent / 20 {
            left = length;
        }
        if left > 0 && random.percent(75) {
            keys.push(part(1, scan));
            (scan, left) = (scan + 1, left - 1);
        } else {
            keys.push(zipf.draw(&mut random));
        }
    }
    let scans = keys.iter().filter(|&&key| key >= part(1, 0)).count() * 100 / accesses;
    let name = format!("zipf 1.0, {scans} % scans of {length}");
    Trace { name, keys, warm: accesses / 5, sizes: usual_sizes() }
}

/// A loop over so many percent of the cache's pages, from an empty cache or after reads by Zipf's distribution.
pub(crate) fn cycle(percent: usize, size: usize, is_warm: bool, rounds: usize, seed: u64) -> Trace {
    let length = (size * percent / 100) as u64;
    let before = if is_warm { zipf(1.0, 10 * size, seed).keys } else { Vec::new() };
    let warm = before.len();
    let mut keys = before;
    keys.extend((0..rounds as u64 * length).map(|n| part(1, n % length)));
    let name = format!("loop {:.1}x{}", percent as f64 / 100.0, if is_warm { " after zipf" } else { "" });
    Trace { name, keys, warm, sizes: vec![size] }
}

/// Reads by Zipf's distribution, alpha 1.0, in turn with a loop as long as so many percent of the cache.
pub(crate) fn cycle_and_zipf(percent: usize, size: usize, accesses: usize, seed: u64) -> Trace {
    let (zipf, mut random) = (Zipf::new(KEYS, 1.0), Random::new(seed));
    let (length, mut at) = ((size * percent / 100) as u64, 0);
    let mut draw = || {
        if random.percent(50) {
            return zipf.draw(&mut random);
        }
        at = (at + 1) % length;
        part(1, at)
    };
    let keys = (0..accesses).map(|_| draw()).collect();
    let name = format!("loop {:.1}x and zipf", percent as f64 / 100.0);
    Trace { name, keys, warm: accesses / 5, sizes: vec![size] }
}

/// The two-pool experiment of O'Neil, O'Neil and Weikum ("The LRU-K page replacement algorithm for database disk
/// buffering", SIGMOD 1993, section 4.1; LIRS's trace `2-pools` is built alike): reads of 100 index pages take turns with
/// reads of 10,000 record pages, both uniform. The buffers of 60 to 450 pages are those of the paper's table.
pub(crate) fn two_pools(accesses: usize, seed: u64) -> Trace {
    let mut random = Random::new(seed);
    let mut draw = |n: usize| if n.is_multiple_of(2) { random.below(100) } else { part(1, random.below(10_000)) };
    let keys = (0..accesses).map(&mut draw).collect();
    Trace { name: "two pools (LRU-K)".into(), keys, warm: accesses / 5, sizes: vec![60, 100, 200, 450, 1000] }
}

/// After `multi2` of Jiang and Zhang ("LIRS", SIGMETRICS 2002; described again with CLOCK-Pro, USENIX 2005): `cs`, which
/// loops over 9 MB of C source, `cpp`, which reads files of 11 MB with probabilities that differ, and `postgres`, whose
/// joins loop over relations of different sizes, run at once. Taken from there: the sizes of `cs` and `cpp` in pages of
/// 4 KiB, and the kinds of patterns. Chosen here: `cpp` picks files of 8 pages by Zipf's distribution, alpha 0.9, and
/// reads each through; `postgres` loops over 40, 400 and 4000 pages, 100 scans of the first for 10 and 1 of the others.
pub(crate) fn multi(accesses: usize, seed: u64) -> Trace {
    const CS_PAGES: u64 = 9 * 256;
    const CPP_PAGES: u64 = 11 * 256;
    let (files, mut random) = (Zipf::new(CPP_PAGES as usize / 8, 0.9), Random::new(seed));
    let (mut cs, mut file, mut page, mut keys) = (0, 0, 0, Vec::with_capacity(accesses));
    let (mut relation, mut row) = (0, 0);
    while keys.len() < accesses {
        match random.below(3) {
            0 => {
                keys.push(part(1, cs % CS_PAGES));
                cs += 1;
            }
            1 => {
                if page == 8 {
                    (file, page) = (files.draw(&mut random), 0);
                }
                keys.push(part(2, file * 8 + page));
                page += 1;
            }
            _ => {
                let length = [40, 400, 4000][relation];
                if row == length {
                    row = 0;
                    relation = match random.below(111) {
                        0..100 => 0,
                        100..110 => 1,
                        _ => 2,
                    };
                }
                keys.push(part(3 + relation as u64, row % length));
                row = (row + 1).min(length);
            }
        }
    }
    Trace { name: "multi2-like (LIRS)".into(), keys, warm: accesses / 5, sizes: vec![100, 500, 1000, 2000, 4000] }
}

/// After `sprite`, the trace that the papers on LIRS and CLOCK-Pro class as temporally clustered, and that suits LRU:
/// requests of clients to a file server for two days. Taken from there: the class. Chosen here: the depth of each read
/// in LRU's stack, as 2 to the power of a uniform number, so that every doubling of the depth takes as many reads; 3
/// percent of the reads are of pages not seen before.
pub(crate) fn clustered(accesses: usize, seed: u64) -> Trace {
    const DEPTH: usize = 16_384;
    let mut random = Random::new(seed);
    let mut stack: std::collections::VecDeque<u64> = (0..DEPTH as u64).collect();
    let (mut fresh, mut keys) = (DEPTH as u64, Vec::with_capacity(accesses));
    for _ in 0..accesses {
        let key = if random.percent(3) {
            stack.pop_back();
            fresh += 1;
            fresh
        } else {
            let depth = ((DEPTH as f64).powf(random.unit()) as usize).min(DEPTH) - 1;
            stack.remove(depth).unwrap_or_default()
        };
        stack.push_front(key);
        keys.push(key);
    }
    Trace { name: "clustered (sprite-like)".into(), keys, warm: accesses / 5, sizes: vec![160, 800, 1600, 4900, 8000] }
}

/// Pages read often, by Zipf's distribution over half of a cache, 20 reads a page; then a scan of ten times the cache,
/// each page read once. The first number is the count of accesses before the scan. The pages read at least twice are
/// the hot set.
pub(crate) fn hot_set_and_scan(size: usize, seed: u64) -> (usize, Vec<u64>) {
    let mut random = Random::new(seed);
    let hot = size as u64 / 2;
    let mut keys: Vec<u64> = (0..20 * hot).map(|n| if n < 2 * hot { n % hot } else { random.below(hot) }).collect();
    let before = keys.len();
    keys.extend((0..10 * size as u64).map(|n| part(1, n)));
    (before, keys)
}

/// All traces, with `accesses` each where a trace's length is free.
pub(crate) fn all(accesses: usize, seed: u64) -> Vec<Trace> {
    let mut traces: Vec<Trace> = [0.8, 1.0, 1.2].map(|alpha| zipf(alpha, accesses, seed)).into();
    traces.extend(
        [(30, 5_000), (30, 50_000), (50, 5_000), (50, 50_000)]
            .map(|(percent, length)| zipf_and_scans(percent, length, accesses, seed)),
    );
    for size in [KEYS / 100, KEYS / 10] {
        for percent in [100, 110, 150, 200] {
            traces.push(cycle(percent, size, false, 40, seed));
            traces.push(cycle(percent, size, true, 40, seed));
        }
        traces.extend([50, 100, 200].map(|percent| cycle_and_zipf(percent, size, accesses, seed)));
    }
    traces.extend([two_pools(accesses, seed), multi(accesses, seed), clustered(accesses / 2, seed)]);
    traces
}
