//! How much moves between a per-CPU list and the zone, and how long a list may grow (C4.3).
//!
//! Two numbers adapt. The *batch* doubles while refills follow refills, or drains follow drains: the caller goes one
//! way, so larger steps cost less. The *limit* grows when refills and drains alternate: the caller swings further
//! than the list is long. Both fall back when a list is drained from outside.

/// The last event that made a list go to a depot or to the buddy.
///
/// ```
/// use pagemill_core::{ListPolicy, SlowEvent};
/// let start = ListPolicy::START;
/// let refilled = start.after(SlowEvent::Refill, 1024);
/// assert_eq!(refilled.after(SlowEvent::Refill, 1024).batch, 2 * refilled.batch);
/// assert!(refilled.after(SlowEvent::Drain, 1024).limit > start.limit);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum SlowEvent {
    /// Nothing yet.
    None = 0,
    /// It was empty.
    Refill = 1,
    /// It was full.
    Drain = 2,
}

/// A list's two adapting numbers, in one word so that a racing update tears nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ListPolicy {
    /// Frames that one refill or drain moves.
    pub batch: u32,
    /// Frames that the list may hold.
    pub limit: u32,
    /// The last event.
    pub last: SlowEvent,
}

impl ListPolicy {
    /// The most frames that one exclusive section moves, K of C3.5: one word of a free area, and 256 bytes of frame
    /// numbers, which a section copies in about 20 cycles.
    pub const SECTION: usize = 64;
    /// Refill or drain at least one section's worth.
    pub const BATCH_MIN: u32 = Self::SECTION as u32;
    /// At most half a pageblock; what a [large drain](Self::large_drain) moves is more.
    pub const BATCH_MAX: u32 = crate::PAGEBLOCK_FRAMES / 2;
    /// A list starts with room for two refills and two drains.
    pub const LIMIT_MIN: u32 = 4 * Self::BATCH_MIN;
    /// Requests for more pages than this bypass the list (C3.1): they would only empty it.
    pub const LARGE: usize = Self::BATCH_MAX as usize * 2;
    /// The numbers of a new list.
    pub const START: Self = Self { batch: Self::BATCH_MIN, limit: Self::LIMIT_MIN, last: SlowEvent::None };

    /// The numbers of a new list that may hold at most `limit_max` frames.
    #[must_use]
    pub fn start(limit_max: u32) -> Self {
        let limit = Self::LIMIT_MIN.min(limit_max);
        Self { batch: Self::BATCH_MIN.min((limit / 2).max(1)), limit, last: SlowEvent::None }
    }

    /// The numbers after `event`; `limit_max` bounds the list (its capacity, or its share of the zone).
    #[must_use]
    pub fn after(self, event: SlowEvent, limit_max: u32) -> Self {
        let (mut batch, mut limit) = (self.batch, self.limit);
        if self.last == event {
            batch = (batch * 2).min(Self::BATCH_MAX);
        } else if self.last != SlowEvent::None {
            batch = Self::BATCH_MIN;
            limit += Self::BATCH_MIN;
        }
        let limit = limit.min(limit_max);
        // A drain must leave room for what made it, and half of the list, or a quarter if it is a large one. Whole sections, as they are popped.
        let half = limit / 2;
        let most = if half > Self::BATCH_MIN { half - half % Self::BATCH_MIN } else { half.max(1) };
        Self { batch: batch.min(most), limit, last: event }
    }

    /// How many frames a drain moves that may use the CPU's large table: three quarters of the limit. `None` until drains have followed
    /// drains so often that the batch is at its largest.
    ///
    /// ```
    /// use pagemill_core::{ListPolicy, SlowEvent};
    /// let long = ListPolicy { limit: 1024, ..ListPolicy::START };
    /// assert_eq!(long.large_drain(), None);
    /// let drains = (0..3).fold(long, |policy, _| policy.after(SlowEvent::Drain, 1024));
    /// assert_eq!((drains.batch, drains.large_drain()), (ListPolicy::BATCH_MAX, Some(768)));
    /// ```
    pub fn large_drain(self) -> Option<u32> {
        let most = self.limit - self.limit / 4;
        (self.last == SlowEvent::Drain && self.batch == Self::BATCH_MAX).then_some(most - most % Self::BATCH_MIN)
    }

    /// Packed into one word.
    #[inline]
    pub const fn as_word(self) -> u64 {
        self.batch as u64 | (self.limit as u64) << 24 | (self.last as u64) << 48
    }
    /// From [`as_word`](Self::as_word).
    #[inline]
    pub const fn from_word(word: u64) -> Self {
        let last = match word >> 48 {
            1 => SlowEvent::Refill,
            2 => SlowEvent::Drain,
            _ => SlowEvent::None,
        };
        Self { batch: word as u32 & 0xff_ffff, limit: (word >> 24) as u32 & 0xff_ffff, last }
    }
}
