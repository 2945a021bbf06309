//! Random numbers from a seed, the same on every machine.
use crate::Raw;

/// A generator (a counter through a mixing function): small, fast, and random enough to choose operations.
///
/// ```
/// use pagemill_model::Rng;
/// assert_eq!(Rng::new(7).next(), Rng::new(7).next());
/// assert!(Rng::new(7).below(10) < 10);
/// ```
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator that begins at a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }
    /// 64 random bits.
    #[expect(clippy::should_implement_trait, reason = "it never ends, and nobody wants an Option here")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }
    /// A number below `n`, 0 if `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() >> 1) as usize % n.max(1)
    }
    /// The numbers of a random operation.
    pub fn raw(&mut self) -> Raw {
        let (a, b) = (self.next(), self.next());
        Raw { kind: (a >> 32) as u8, a: a as u32, b: b as u32, c: (b >> 32) as u32, d: self.next() as u32 }
    }
}
