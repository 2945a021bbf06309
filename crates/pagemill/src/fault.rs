//! Faults on purpose (C3.14): acquisitions that fail although there is memory, so that a program's own ways out can be
//! tested.
use crate::allocator::Inner;
use crate::nodes::Nodes;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use pagemill_core::{Gfp, Invalid};
use std::sync::Arc;

/// Which acquisitions fail. An acquisition is a trip to a zone: for a batch, for one page of another mobility, for a
/// block. What the CPU's list has is handed out without one, so a program that wants each request to fail asks for
/// more, or [drains](crate::Allocator::drain) first.
///
/// In the environment, for programs that say nothing of faults themselves: `PAGEMILL_FAIL=after=100,p=0.01,gfp=atomic`.
///
/// ```
/// use pagemill::{Allocator, Faults, Gfp};
/// let faults: Faults = "after=1".parse()?;
/// let allocator = Allocator::builder().pages(4096).faults(faults.clone()).build()?;
/// let first = allocator.alloc_page(Gfp::KERNEL)?; // brings a batch
/// allocator.drain();
/// assert!(allocator.alloc_page(Gfp::NOWAIT).is_err());
/// assert!(faults.injected() > 0);
/// # drop(first);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Faults(Arc<State>);

#[derive(Debug)]
struct State {
    after: u64,
    /// In 2^32.
    probability: u64,
    gfp: Option<Gfp>,
    seen: AtomicU64,
    random: AtomicU64,
    injected: AtomicU64,
}

impl Faults {
    /// Every acquisition after the first `after` fails.
    pub fn after(after: u64) -> Self {
        Self::of(after, 1 << 32, None, 1)
    }
    /// Each acquisition fails with probability `p`, 0 to 1, by a sequence that `seed` begins.
    pub fn with_probability(p: f64, seed: u64) -> Self {
        Self::of(0, (p.clamp(0.0, 1.0) * (1u64 << 32) as f64) as u64, None, seed)
    }
    /// Only for requests that have all of these flags.
    #[must_use]
    pub fn only(self, gfp: Gfp) -> Self {
        Self::of(self.0.after, self.0.probability, Some(gfp), self.0.random.load(Relaxed))
    }
    fn of(after: u64, probability: u64, gfp: Option<Gfp>, seed: u64) -> Self {
        let counters = (AtomicU64::new(0), AtomicU64::new(seed | 1), AtomicU64::new(0));
        let (seen, random, injected) = counters;
        Self(Arc::new(State { after, probability, gfp, seen, random, injected }))
    }
    /// How many acquisitions were made to fail.
    pub fn injected(&self) -> u64 {
        self.0.injected.load(Relaxed)
    }

    fn strikes(&self, gfp: Gfp) -> bool {
        let state = &*self.0;
        if state.gfp.is_some_and(|only| !gfp.contains(only)) || state.seen.fetch_add(1, Relaxed) < state.after {
            return false;
        }
        // A Weyl sequence, mixed: good enough to scatter, and one atomic addition (a handler may come here).
        let x = state.random.fetch_add(0x9e37_79b9_7f4a_7c15, Relaxed);
        let mixed = (x ^ x >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93) >> 32;
        let strikes = mixed < state.probability;
        state.injected.fetch_add(u64::from(strikes), Relaxed);
        strikes
    }
}

impl core::str::FromStr for Faults {
    type Err = Invalid;

    /// `after=N`, `p=F`, `gfp=kernel|atomic|nowait|noio|nofs|movable|dma32|zero`, `seed=N`, separated by commas; at
    /// least one of the first two.
    fn from_str(text: &str) -> Result<Self, Invalid> {
        let (mut after, mut p, mut gfp, mut seed) = (None, None, None, 1);
        for part in text.split(',') {
            let (key, value) = part.split_once('=').ok_or(Invalid::FaultSyntax)?;
            match key.trim() {
                "after" => after = Some(value.trim().parse().map_err(|_| Invalid::FaultSyntax)?),
                "p" => {
                    p = Some(
                        value
                            .trim()
                            .parse::<f64>()
                            .ok()
                            .filter(|p| (0.0..=1.0).contains(p))
                            .ok_or(Invalid::FaultSyntax)?,
                    )
                }
                "seed" => seed = value.trim().parse().map_err(|_| Invalid::FaultSyntax)?,
                "gfp" => gfp = Some(flag(value.trim()).ok_or(Invalid::FaultSyntax)?),
                _ => return Err(Invalid::FaultSyntax),
            }
        }
        if after.is_none() && p.is_none() {
            return Err(Invalid::FaultSyntax);
        }
        Ok(Self::of(after.unwrap_or(0), (p.unwrap_or(1.0) * (1u64 << 32) as f64) as u64, gfp, seed))
    }
}

fn flag(name: &str) -> Option<Gfp> {
    Some(match name {
        "kernel" => Gfp::KERNEL,
        "noio" => Gfp::NOIO,
        "nofs" => Gfp::NOFS,
        "nowait" => Gfp::NOWAIT,
        "atomic" => Gfp::ATOMIC,
        "movable" => Gfp::MOVABLE,
        "reclaimable" => Gfp::RECLAIMABLE,
        "dma32" => Gfp::DMA32,
        "zero" => Gfp::ZERO,
        _ => return None,
    })
}

impl Nodes {
    /// From now on; once.
    pub(crate) fn inject(&self, faults: Faults) {
        let _ = self.faults.set(faults);
    }
    pub(crate) fn faults_injected(&self) -> u64 {
        self.faults.get().map_or(0, Faults::injected)
    }
}

impl Inner {
    /// Is this acquisition to fail? One look at a word where nothing is injected.
    #[inline]
    pub(crate) fn is_refused_by_fault(&self, gfp: Gfp) -> bool {
        self.nodes.faults.get().is_some_and(|faults| faults.strikes(gfp))
    }
}
