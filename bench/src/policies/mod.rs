//! Eviction policies beside each other: hit rates on generated traces.
//!
//! The four textbook policies serve as peers of the page cache's own. They are written after their papers, for clarity
//! and not for speed: each finds its entries by a hash map, and links them by indices ([`lists`]).
//!
//! I1: a policy never holds more keys than its capacity. I2: an access of a key that is held is a hit, any other one is
//! a miss that brings the key in.

pub(crate) mod arc;
mod lists;
pub(crate) mod lru;
pub(crate) mod s3fifo;
pub(crate) mod sieve;
pub(crate) mod traces;

/// A cache of keys that decides what to evict.
pub(crate) trait Policy {
    /// Reads a key. True if it was held; otherwise it is held from now on, in the place of another one if need be.
    fn access(&mut self, key: u64) -> bool;

    /// Whether the key is held. Changes nothing.
    fn holds(&self, key: u64) -> bool;
}

/// The share of accesses that hit, in percent, leaving out the first `warm` accesses.
pub(crate) fn hit_percent(policy: &mut dyn Policy, trace: &[u64], warm: usize) -> f64 {
    let (before, counted) = trace.split_at(warm.min(trace.len()));
    before.iter().for_each(|&key| _ = policy.access(key));
    let hits = counted.iter().filter(|&&key| policy.access(key)).count();
    100.0 * hits as f64 / counted.len().max(1) as f64
}

/// The policies of the literature, by name.
pub(crate) fn peers(capacity: usize) -> [(&'static str, Box<dyn Policy>); 4] {
    [
        ("LRU", Box::new(lru::Lru::new(capacity))),
        ("ARC", Box::new(arc::Arc::new(capacity))),
        ("S3-FIFO", Box::new(s3fifo::S3Fifo::new(capacity))),
        ("SIEVE", Box::new(sieve::Sieve::new(capacity))),
    ]
}

#[cfg(test)]
mod tests {
    use super::traces::Random;
    use super::{Policy, peers};

    #[test]
    fn a_policy_holds_no_more_than_its_capacity_and_hits_what_it_holds() {
        for capacity in [1, 2, 10, 64] {
            for (name, mut policy) in peers(capacity) {
                let mut random = Random::new(7);
                for step in 0..20_000 {
                    let key = random.below(3 * capacity as u64).min(random.below(3 * capacity as u64));
                    let held = policy.holds(key);
                    assert_eq!(policy.access(key), held, "{name} {capacity} {step}");
                    let all = (0..3 * capacity as u64).filter(|&key| policy.holds(key)).count();
                    assert!(policy.holds(key) && all <= capacity, "{name} holds {all} of {capacity}");
                }
            }
        }
    }

    /// Belady's and LRU's textbook sequence: 1 2 3 4 1 2 5 1 2 3 4 5 has 2 hits with 3 places, 4 with 4 places.
    #[test]
    fn lru_has_the_textbook_hits() {
        let sequence = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5];
        for (places, hits) in [(3, 2), (4, 4)] {
            let mut lru = super::lru::Lru::new(places);
            assert_eq!(sequence.iter().filter(|&&key| lru.access(key)).count(), hits);
        }
    }

    /// The example of SIEVE's paper, figure 2, in its idea: a page that was read survives in its place, and the hand
    /// goes on from where it stands.
    #[test]
    fn sieve_keeps_what_was_read_in_its_place() {
        let mut sieve = super::sieve::Sieve::new(3);
        [1, 2, 3, 1].iter().for_each(|&key| _ = sieve.access(key));
        sieve.access(4); // the hand passes 1, takes 2
        assert!(sieve.holds(1) && !sieve.holds(2));
        sieve.access(5); // goes on at 3, not at 1, whose bit it has cleared
        assert!(sieve.holds(1) && !sieve.holds(3));
    }
}
