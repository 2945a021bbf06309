//! Watermarks: what a zone keeps, from whom.
use crate::Gfp;

/// A zone's three marks, in free frames, and its lowmem reserve. A zone without marks gives all it has.
///
/// ```
/// use pagemill_core::{Gfp, Level, Watermarks};
/// let marks = Watermarks::above(1000);
/// assert_eq!((marks.min, marks.low, marks.high), (1000, 1250, 1500));
/// assert_eq!(marks.floor(Gfp::KERNEL, Level::Low), 1250);
/// assert_eq!(marks.floor(Gfp::KERNEL, Level::Min), 1000);
/// assert_eq!(marks.floor(Gfp::ATOMIC, Level::Min), 500);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Watermarks {
    /// Below it only requests with access to reserves succeed, `ATOMIC` down to half of it.
    pub min: u32,
    /// Below it background reclaim wakes.
    pub low: u32,
    /// Background reclaim runs until it is reached.
    pub high: u32,
    /// What is kept beside from requests that could use another kind of zone.
    pub lowmem_reserve: u32,
}

/// How hard a request tries.
///
/// ```
/// assert!(pagemill_core::Level::Low != pagemill_core::Level::Min);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    /// At first, and in bulk: what lies above `low`.
    Low,
    /// Then: what lies above `min`, or above what the flags give access to.
    Min,
}

impl Watermarks {
    /// No marks.
    pub const NONE: Self = Self { min: 0, low: 0, high: 0, lowmem_reserve: 0 };

    /// Marks above `min`, a quarter of it apart, as the kernel sets them for small zones.
    pub const fn above(min: u32) -> Self {
        let step = min / 4;
        Self { min, low: min + step, high: min + 2 * step, lowmem_reserve: 0 }
    }

    /// How many frames must stay when a request with these flags takes some.
    #[inline]
    pub const fn floor(self, gfp: Gfp, level: Level) -> u32 {
        let reserve = if gfp.contains(Gfp::DMA32) { 0 } else { self.lowmem_reserve };
        reserve
            + match level {
                Level::Low => self.low,
                Level::Min if gfp.contains(Gfp::ATOMIC) => self.min - self.min / 2,
                Level::Min => self.min,
            }
    }
}
