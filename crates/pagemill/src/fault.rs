//! Injected faults (C3.14): acquisitions that fail although there is memory, so that a program can test its own error paths.
//!
//! A zone asks [`Faults::strikes`] at each acquisition, through `Shared::is_refused_by_fault`. A signal handler may
//! ask, so it is a few atomic operations.
use crate::build_error::BuildError;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use pagemill_core::Gfp;
use std::sync::Arc;

/// Selects the acquisitions that fail. An acquisition is a trip to a zone: for a batch, for one page of another
/// mobility, or for a block. Pages on the CPU's list are handed out without an acquisition. To make each request fail,
/// a program requests more than the list has, or [drains](crate::Allocator::drain) first.
///
/// The environment variable `PAGEMILL_FAIL=after=100,p=0.01,gfp=atomic` injects faults into programs that set none
/// themselves. A program's own option may take the same text: see [`from_str`](core::str::FromStr::from_str).
///
/// ```
/// use pagemill::{Allocator, Faults, Gfp};
/// let faults: Faults = "after=1".parse()?;
/// let allocator = Allocator::builder().pages(4096).faults(faults.clone()).build()?;
/// let first = allocator.alloc_page(Gfp::KERNEL)?; // the zone delivers a batch
/// allocator.drain();
/// assert!(allocator.alloc_page(Gfp::NOWAIT).is_err());
/// assert!(faults.injected() > 0);
/// let wrong = "after=1,p=7".parse::<Faults>().unwrap_err();
/// assert!(wrong.to_string().starts_with("faults to inject, part 2: p is a probability, 0 to 1;"));
/// # drop(first);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone)]
pub struct Faults(Arc<State>);

#[derive(Debug)]
struct State {
    after: u64,
    /// The probability, times 2^32.
    probability: u64,
    gfp: Option<Gfp>,
    /// Only requests of this thread fail.
    thread: Option<i32>,
    seen: AtomicU64,
    random: AtomicU64,
    injected: AtomicU64,
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults")
            .field("after", &self.0.after)
            .field("p", &(self.0.probability as f64 / ALWAYS as f64))
            .field("only", &self.0.gfp)
            .field("injected", &self.injected())
            .finish()
    }
}

impl Faults {
    /// Makes every acquisition after the first `after` fail.
    pub fn after(after: u64) -> Self {
        Self::of(after, ALWAYS, None, 1)
    }
    /// Makes each acquisition fail with probability `p`, from 0 to 1. `seed` starts the random sequence.
    ///
    /// ```
    /// use pagemill::{Allocator, Faults, Gfp, Order};
    /// let faults = Faults::with_probability(0.5, 7);
    /// let allocator = Allocator::builder().pages(4096).faults(faults.clone()).build()?;
    /// let order = Order::new(1)?;
    /// let failed = (0..100).filter(|_| allocator.alloc_pages(Gfp::NOWAIT, order).is_err()).count();
    /// // A request whose first acquisition fails makes a second one, for a block of another mobility.
    /// assert!(failed > 0 && failed < 100 && faults.injected() >= failed as u64);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn with_probability(p: f64, seed: u64) -> Self {
        Self::of(0, scaled(p), None, seed)
    }
    /// Restricts the faults to requests of this kind ([`Gfp::KERNEL`], `NOIO`, `NOFS`, `NOWAIT` or `ATOMIC`, and no
    /// other) with at least these modifiers. Modifiers alone select requests of every kind. Requests with
    /// [`Gfp::NOFAIL`] never fail.
    ///
    /// ```
    /// use pagemill::{Allocator, Faults, Gfp, Order};
    /// let allocator = Allocator::builder().pages(512).faults(Faults::after(0).only(Gfp::ATOMIC)).build()?;
    /// let order = Order::new(1)?;
    /// assert!(allocator.alloc_pages(Gfp::ATOMIC, order).is_err());
    /// assert!(allocator.alloc_pages(Gfp::KERNEL, order).is_ok());
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[must_use]
    pub fn only(self, gfp: Gfp) -> Self {
        self.with(Some(gfp), self.0.thread)
    }
    /// Restricts the faults to requests of the calling thread. A forked child's thread is another thread, so it sees no
    /// faults.
    ///
    /// ```
    /// use pagemill::{Allocator, Faults, Gfp};
    /// let faults = Faults::after(0).only_on_this_thread();
    /// let allocator = Allocator::builder().pages(64).faults(faults).build()?;
    /// assert!(allocator.alloc_page(Gfp::KERNEL).is_err());
    /// std::thread::scope(|scope| scope.spawn(|| allocator.alloc_page(Gfp::KERNEL).map(drop)).join().unwrap())?;
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[must_use]
    pub fn only_on_this_thread(self) -> Self {
        self.with(self.0.gfp, Some(pagemill_os::current_thread()))
    }
    fn with(&self, gfp: Option<Gfp>, thread: Option<i32>) -> Self {
        let State { after, probability, .. } = *self.0;
        let counters = (AtomicU64::new(0), AtomicU64::new(self.0.random.load(Relaxed)), AtomicU64::new(0));
        let (seen, random, injected) = counters;
        Self(Arc::new(State { after, probability, gfp, thread, seen, random, injected }))
    }
    fn of(after: u64, probability: u64, gfp: Option<Gfp>, seed: u64) -> Self {
        let counters = (AtomicU64::new(0), AtomicU64::new(seed | 1), AtomicU64::new(0));
        let (seen, random, injected) = counters;
        Self(Arc::new(State { after, probability, gfp, thread: None, seen, random, injected }))
    }
    /// The faults that `PAGEMILL_FAIL` describes; none if it is unset or empty.
    pub(crate) fn from_env() -> Result<Option<Self>, BuildError> {
        match std::env::var_os("PAGEMILL_FAIL") {
            Some(text) if !text.is_empty() => {
                let text = text.to_str().ok_or(BuildError::FaultSyntax { part: 1, why: "it is not UTF-8" })?;
                text.parse().map(Some)
            }
            _ => Ok(None),
        }
    }
    /// The number of acquisitions that were made to fail.
    pub fn injected(&self) -> u64 {
        self.0.injected.load(Relaxed)
    }

    /// Whether the faults apply to requests with these flags.
    pub(crate) fn is_for(&self, gfp: Gfp) -> bool {
        let is_among = |only: Gfp| {
            let is_any_kind = only != Gfp::NOWAIT && only.kind() == Gfp::NOWAIT;
            gfp.contains(only) && (is_any_kind || gfp.kind() == only.kind())
        };
        // A request that may not fail would try again until it succeeds.
        !gfp.contains(Gfp::NOFAIL)
            && self.0.gfp.is_none_or(is_among)
            && self.0.thread.is_none_or(|thread| thread == pagemill_os::current_thread())
    }

    pub(crate) fn strikes(&self, gfp: Gfp) -> bool {
        let state = &*self.0;
        if !self.is_for(gfp) || state.seen.fetch_add(1, Relaxed) < state.after {
            return false;
        }
        // A Weyl sequence, mixed: random enough to scatter, and one atomic addition, as a signal handler may come here.
        let x = state.random.fetch_add(0x9e37_79b9_7f4a_7c15, Relaxed);
        let mixed = (x ^ x >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93) >> 32;
        let strikes = mixed < state.probability;
        state.injected.fetch_add(u64::from(strikes), Relaxed);
        strikes
    }
}

impl core::str::FromStr for Faults {
    type Err = BuildError;

    /// Parses `after=N`, `p=F`, `gfp=kernel|noio|nofs|nowait|atomic|movable|reclaimable|dma32|zero` and `seed=N`,
    /// separated by commas. Each may appear once; `after` or `p` must appear. `gfp` is as for [`only`](Self::only).
    fn from_str(text: &str) -> Result<Self, BuildError> {
        let (mut after, mut p, mut gfp, mut seed) = (None, None, None, None);
        for (part, said) in (1..).zip(text.split(',')) {
            let wrong = |why| BuildError::FaultSyntax { part, why };
            let (key, value) = said.split_once('=').ok_or(wrong("it is not KEY=VALUE"))?;
            let value = value.trim();
            let is_first = match key.trim() {
                "after" => {
                    after.replace(value.parse().map_err(|_| wrong("after is a number of acquisitions"))?).is_none()
                }
                "seed" => seed.replace(value.parse().map_err(|_| wrong("seed is a number"))?).is_none(),
                "p" => p.replace(probability(value).ok_or(wrong("p is a probability, 0 to 1"))?).is_none(),
                "gfp" => gfp.replace(flag(value).ok_or(wrong(FLAGS))?).is_none(),
                _ => return Err(wrong("its key is not after, p, gfp or seed")),
            };
            if !is_first {
                return Err(wrong("its key appears twice"));
            }
        }
        if after.is_none() && p.is_none() {
            return Err(BuildError::FaultSyntax { part: 1, why: "neither after nor p says which acquisitions fail" });
        }
        Ok(Self::of(after.unwrap_or(0), p.unwrap_or(ALWAYS), gfp, seed.unwrap_or(1)))
    }
}

/// The values that `gfp=` accepts, for the error message. [`flag`] parses them.
const FLAGS: &str = "gfp is one of kernel, noio, nofs, nowait, atomic, movable, reclaimable, dma32 and zero";

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

/// A probability of 1, as [`State`] stores it.
const ALWAYS: u64 = 1 << 32;

fn probability(text: &str) -> Option<u64> {
    let p = text.parse().ok().filter(|p| (0.0..=1.0).contains(p))?;
    Some(scaled(p))
}

fn scaled(p: f64) -> u64 {
    (p.clamp(0.0, 1.0) * ALWAYS as f64) as u64
}
