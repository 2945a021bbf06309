//! Watermarks: how many frames a zone keeps free, and from which requests.
use crate::{Gfp, Invalid};

/// A zone's three marks, in free frames, and its lowmem reserve. A zone without marks can be used up.
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
    /// Frames also kept from requests that could use another kind of zone.
    pub lowmem_reserve: u32,
}

/// How hard a request tries.
///
/// ```
/// use pagemill_core::{Gfp, Level, Watermarks};
/// let marks = Watermarks::above(100);
/// // Frames that must stay free: most for the first try, fewest for requests that may use part of the reserve.
/// assert_eq!((marks.floor(Gfp::KERNEL, Level::Low), marks.floor(Gfp::KERNEL, Level::Min)), (125, 100));
/// assert_eq!(marks.floor(Gfp::ATOMIC, Level::Min), 50);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    /// The first try, and bulk requests: frames above `low`.
    Low,
    /// The next try: frames above `min`, or above the part of the reserve that the flags open.
    Min,
}

impl Watermarks {
    /// No marks.
    pub const NONE: Self = Self { min: 0, low: 0, high: 0, lowmem_reserve: 0 };

    /// Marks above `min`, a quarter of it apart, as the kernel sets them for small zones.
    pub const fn above(min: u32) -> Self {
        let step = min / 4;
        let low = min.saturating_add(step);
        Self { min, low, high: low.saturating_add(step), lowmem_reserve: 0 }
    }

    /// Refuses marks that are not in order.
    ///
    /// # Errors
    /// [`Invalid::Watermarks`] unless `min` <= `low` <= `high`.
    pub const fn check(self) -> Result<(), Invalid> {
        let Self { min, low, high, .. } = self;
        if min <= low && low <= high { Ok(()) } else { Err(Invalid::Watermarks { min, low, high }) }
    }

    /// The number of frames that a request with these flags must leave free.
    #[inline]
    pub const fn floor(self, gfp: Gfp, level: Level) -> u32 {
        let reserve = if gfp.contains(Gfp::DMA32) { 0 } else { self.lowmem_reserve };
        reserve.saturating_add(match level {
            Level::Low => self.low,
            Level::Min if gfp.contains(Gfp::ATOMIC) => self.min - self.min / 2,
            Level::Min => self.min,
        })
    }
}
