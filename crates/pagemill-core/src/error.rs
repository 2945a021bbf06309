//! The kinds of error, told apart by type (C10.1).
use core::fmt;

/// A request did not reach the number that it must have.
///
/// ```
/// use pagemill_core::{Exhausted, Why};
/// let refused = Exhausted { wanted: 10, got: 4, order: 0, why: Why::BelowMark };
/// assert!(refused.to_string().starts_with("wanted 10, got 4: free memory is below the watermark"));
/// let refused = Exhausted { order: 3, ..refused };
/// assert!(refused.to_string().starts_with("wanted 10 of order 3, got 4: "));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("wanted {wanted}{}, got {got}: {why}", OfOrder(*order))]
pub struct Exhausted {
    /// How many blocks, or elements of a pool, the request must have.
    pub wanted: usize,
    /// How many there were. They have been given back; those of a pool stay where they were delivered (C5.2).
    pub got: usize,
    /// The order that was asked for; 0 for elements of a pool that have none.
    pub order: u8,
    /// Why there were not more.
    pub why: Why,
}

/// The order, where it says something: most requests are for pages.
struct OfOrder(u8);

impl fmt::Display for OfOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { Ok(()) } else { write!(f, " of order {}", self.0) }
    }
}

/// A request got fewer blocks than it asked for, which is no error where it says so (C3.4).
///
/// ```
/// use pagemill_core::{Shortfall, Why};
/// let shortfall = Shortfall { missing: 3, why: Why::Cancelled };
/// assert_eq!(shortfall.to_string(), "3 missing: it was cancelled");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{missing} missing: {why}")]
pub struct Shortfall {
    /// How many.
    pub missing: usize,
    /// What kept the request from having them.
    pub why: Why,
}

/// Why a request got fewer than it asked for. Where several things are true it is the first of: uncommitted, account,
/// cancelled, reclaiming, not allowed, fault, timed out, below mark, exhausted. A request that keeps what it got instead of
/// waiting for more (C3.4) is not cancelled, reclaiming or timed out, and its mark is the low one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Why {
    /// The zones have no more.
    #[error("there are no more; free some, ask for fewer, or make the arena (of a pool: the reserve) larger")]
    Exhausted,
    /// Free memory is below the watermark for the request's flags.
    #[error("free memory is below the watermark for these flags; free some, or lower the watermarks")]
    BelowMark,
    /// No node that the request names is allowed, or has memory.
    #[error("no node of the request is both allowed and has memory; name other nodes")]
    NotAllowed,
    /// The request's account has no more.
    #[error("its account has no more; uncharge what was freed, or raise the limit")]
    Account,
    /// It may reclaim, and was made by a shrinker while this thread reclaims: ask with `NOWAIT` or `ATOMIC` there.
    #[error("a shrinker asked for it with flags that reclaim; use NOWAIT or ATOMIC there")]
    Reclaiming,
    /// The request was cancelled.
    #[error("it was cancelled")]
    Cancelled,
    /// It waited until its deadline.
    #[error("no memory was freed before the deadline; free some, or wait longer")]
    TimedOut,
    /// There is memory, and acquisitions like this one are made to fail (C3.14).
    #[error("an injected fault made the request fail")]
    Fault,
    /// The system refused to commit the pages: it has no memory, or the process's limit leaves no room.
    #[error(
        "the system has no memory for them, or the process's limit (that of its control group) leaves no room; free \
         memory and give it back, or raise the limit"
    )]
    Uncommitted,
}

impl Why {
    /// How many there are.
    pub const COUNT: usize = Self::ALL.len();
    /// Each, in the order of their [indices](Self::index).
    pub const ALL: [Self; 9] = [
        Self::Exhausted,
        Self::BelowMark,
        Self::NotAllowed,
        Self::Account,
        Self::Reclaiming,
        Self::Cancelled,
        Self::TimedOut,
        Self::Fault,
        Self::Uncommitted,
    ];

    /// Its place in [`ALL`](Self::ALL), and in an array of counters.
    ///
    /// ```
    /// use pagemill_core::Why;
    /// assert_eq!(Why::ALL.map(Why::index), core::array::from_fn(|i| i));
    /// ```
    #[inline]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Its name in statistics: `exhausted`, `below_mark`.
    ///
    /// ```
    /// assert_eq!(pagemill_core::Why::TimedOut.name(), "timed_out");
    /// ```
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exhausted => "exhausted",
            Self::BelowMark => "below_mark",
            Self::NotAllowed => "not_allowed",
            Self::Account => "account",
            Self::Reclaiming => "reclaiming",
            Self::Cancelled => "cancelled",
            Self::TimedOut => "timed_out",
            Self::Fault => "fault",
            Self::Uncommitted => "uncommitted",
        }
    }
}

/// A value that is invalid in every request.
///
/// ```
/// use pagemill_core::{Invalid, Order};
/// let refused = Order::new(31).unwrap_err();
/// assert_eq!(refused, Invalid::OrderTooLarge { order: 31 });
/// assert_eq!(refused.to_string(), "order 31 is above the largest, 18 (1 GiB)");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Invalid {
    /// Orders go from 0 to 18.
    #[error("order {order} is above the largest, 18 (1 GiB)")]
    OrderTooLarge {
        /// The order asked for.
        order: u8,
    },
    /// Two flags that exclude each other.
    #[error("the gfp flags {} and {} exclude each other", .0[0], .0[1])]
    GfpConflict(&'static [&'static str; 2]),
    /// A zone's watermarks are not in order.
    #[error("watermarks of min {min}, low {low} and high {high}: each must be at least the one before")]
    Watermarks {
        /// Their `min`.
        min: u32,
        /// Their `low`.
        low: u32,
        /// Their `high`.
        high: u32,
    },
    /// Fewer words than per-CPU lists take for the frames of a buddy: one bit for each.
    #[error("per-CPU lists over {words} words: the frames of their buddy take {need}, as `kept_words_for` says")]
    Kept {
        /// How many words there are.
        words: usize,
        /// How many there must be.
        need: usize,
    },
    /// A buddy of no frames, or over less metadata than its frames take.
    #[error(
        "a buddy of {frames} frames over metadata for {most}: it takes at least one frame, and the metadata that \
         `BuddyMetadata::for_frames` says"
    )]
    Metadata {
        /// How many frames it was to have.
        frames: usize,
        /// For how many there are words.
        most: usize,
    },
}

/// A block cannot be freed or taken up. Nothing was changed (C2.4).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Misuse {
    /// What is wrong with it.
    pub kind: MisuseKind,
    /// Its address, or its frame number times the page size where there are no addresses.
    pub addr: usize,
}

/// Why a block cannot be freed or taken up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum MisuseKind {
    /// It is free, or a handle has it: it is no raw pointer that could be freed or taken up.
    DoubleFree,
    /// Pagemill never handed it out.
    Foreign,
    /// It was handed out with another order.
    WrongOrder {
        /// The order it was handed out with.
        handed_out: u8,
        /// The order it came back with.
        freed: u8,
    },
    /// The address is not that of a page.
    Unaligned,
    /// It is inside a larger block, not its start.
    Inside,
    /// The frame was freed twice, and is in quarantine.
    Quarantined,
    /// A pool was dropped with blocks out. Its pages stay as they are.
    PoolInUse {
        /// How many.
        out: usize,
    },
    /// Two threads freed it at once. It stays with its owner.
    FreedTwice,
    /// It was written to while it was free, perhaps by a device.
    WrittenFree,
}

impl fmt::Display for Misuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addr = self.addr;
        match self.kind {
            MisuseKind::DoubleFree => write!(f, "the block at {addr:#x} is free, or a handle has it"),
            MisuseKind::Foreign => write!(f, "no allocator handed out the block at {addr:#x}"),
            MisuseKind::WrongOrder { handed_out, freed } => {
                write!(f, "the block at {addr:#x} was handed out with order {handed_out} and freed with {freed}")
            }
            MisuseKind::Unaligned => write!(f, "{addr:#x} is not the address of a page"),
            MisuseKind::Inside => write!(f, "{addr:#x} is inside a block, not its start"),
            MisuseKind::Quarantined => write!(f, "the frame at {addr:#x} is in quarantine: it was freed twice"),
            MisuseKind::PoolInUse { out } => {
                write!(f, "the pool with the block at {addr:#x} was dropped with {out} out; its pages stay mapped")
            }
            MisuseKind::FreedTwice => write!(f, "the block at {addr:#x} was freed twice at once"),
            MisuseKind::WrittenFree => write!(f, "the block at {addr:#x} was written to while it was free"),
        }
    }
}

impl core::error::Error for Misuse {}

/// The sentence, as `Display`: a `main` that returns an error prints it by `Debug`.
macro_rules! debug_is_the_sentence {
    ($($error:ty),*) => {
        $(impl fmt::Debug for $error {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        })*
    };
}
debug_is_the_sentence!(Exhausted, Shortfall, Invalid, Misuse);
