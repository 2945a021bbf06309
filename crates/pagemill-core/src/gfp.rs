//! What a request may do: the kernel's `gfp` flags by their names.
use crate::error::Invalid;
use core::fmt;
use core::ops::BitOr;

/// The flags of a request. One of [`KERNEL`](Gfp::KERNEL), [`NOIO`](Gfp::NOIO), [`NOFS`](Gfp::NOFS),
/// [`NOWAIT`](Gfp::NOWAIT) and [`ATOMIC`](Gfp::ATOMIC), with modifiers or-ed to it.
///
/// ```
/// use pagemill_core::Gfp;
/// let gfp = Gfp::KERNEL | Gfp::ZERO;
/// assert!(gfp.contains(Gfp::ZERO) && gfp.check().is_ok());
/// assert!((Gfp::NOWAIT | Gfp::NOFAIL).check().is_err());
/// assert!((Gfp::KERNEL | Gfp::ATOMIC).check().is_err());
/// assert_eq!((Gfp::NOFS | Gfp::MOVABLE).kind(), Gfp::NOFS);
/// assert_eq!(format!("{gfp:?}"), "KERNEL | ZERO");
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Gfp(u32);

impl fmt::Debug for Gfp {
    /// The names of its flags, as they are written.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            _ if self.contains(Self::KERNEL) => "KERNEL",
            _ if self.contains(Self::NOFS) => "NOFS",
            _ if self.contains(Self::NOIO) => "NOIO",
            _ if self.contains(Self::ATOMIC) => "ATOMIC",
            _ => "NOWAIT",
        })?;
        let reserve = if self.may_wait() { Self::ATOMIC } else { Self::NOWAIT };
        let modifiers = [
            (reserve, "ATOMIC"),
            (Self::MOVABLE, "MOVABLE"),
            (Self::RECLAIMABLE, "RECLAIMABLE"),
            (Self::ZERO, "ZERO"),
            (Self::DMA32, "DMA32"),
            (Self::THISNODE, "THISNODE"),
            (Self::NORETRY, "NORETRY"),
            (Self::RETRY_MAYFAIL, "RETRY_MAYFAIL"),
            (Self::NOFAIL, "NOFAIL"),
            (Self::NOWARN, "NOWARN"),
            (Self::ACCOUNT, "ACCOUNT"),
        ];
        let mut set = modifiers.iter().filter(|(flag, _)| *flag != Self::NOWAIT && self.contains(*flag));
        set.try_for_each(|(_, name)| write!(f, " | {name}"))
    }
}

impl Gfp {
    // Mobility stands in the lowest two bits, so that it is the list's index as it is.
    /// Place among pages that can be moved; keeps them away from those that cannot.
    pub const MOVABLE: Self = Self(1);
    /// Place among pages that reclaim can give back.
    pub const RECLAIMABLE: Self = Self(2);
    /// The page comes zeroed (C2.1, C2.2).
    pub const ZERO: Self = Self(1 << 2);

    /// May reclaim, may wait.
    pub const KERNEL: Self = Self(Self::RECLAIM | Self::IO | Self::FS);
    /// May wait; its reclaim calls no shrinker that does I/O.
    pub const NOIO: Self = Self(Self::RECLAIM);
    /// May wait; its reclaim calls no shrinker that enters a file system.
    pub const NOFS: Self = Self(Self::RECLAIM | Self::IO);
    /// Neither waits nor reclaims.
    pub const NOWAIT: Self = Self(0);
    /// `NOWAIT` with access to part of the reserve.
    pub const ATOMIC: Self = Self(Self::RESERVE);

    /// From memory with device addresses below 4 GiB.
    pub const DMA32: Self = Self(1 << 8);
    /// From this node or not at all.
    pub const THISNODE: Self = Self(1 << 9);
    /// One round of reclaim, then give up.
    pub const NORETRY: Self = Self(1 << 10);
    /// Try hard, but give up. A bulk request that keeps what it got tries for all of it (C3.4).
    pub const RETRY_MAYFAIL: Self = Self(1 << 11);
    /// Never give up.
    pub const NOFAIL: Self = Self(1 << 12);
    /// Do not warn about a shortfall. It changes nothing: Pagemill says what is short in what it returns, and warns of nothing.
    pub const NOWARN: Self = Self(1 << 13);
    /// Charge the request to an account.
    pub const ACCOUNT: Self = Self(1 << 14);

    const RECLAIM: u32 = 1 << 4;
    const IO: u32 = 1 << 5;
    const FS: u32 = 1 << 6;
    /// Beside RECLAIM, which it excludes: see `PAIRS`.
    const RESERVE: u32 = 1 << 3;
    const KIND: u32 = Self::RECLAIM | Self::IO | Self::FS | Self::RESERVE;
    /// The lower of two neighbouring bits that exclude each other.
    const PAIRS: u32 = Self::MOVABLE.0 | Self::RESERVE;
    /// Without any of these, and with a mobility that exists, a request needs no further look.
    const LOOK: u32 = Self::ZERO.0 | Self::PLACE | Self::NOFAIL.0 | Self::ACCOUNT.0 | Self::PATIENCE;
    /// Not every CPU's list will do.
    const PLACE: u32 = Self::DMA32.0 | Self::THISNODE.0;
    /// All flags that there are.
    const EVERY: u32 = Self::KIND | 3 | Self::ZERO.0 | Self::PLACE | Self::PATIENCE | Self::NOWARN.0 | Self::ACCOUNT.0;
    /// How hard to try: at most one of these.
    const PATIENCE: u32 = Self::NORETRY.0 | Self::RETRY_MAYFAIL.0 | Self::NOFAIL.0;

    /// As one number, for an interface that has no types: a header for C repeats the values of the flags.
    ///
    /// ```
    /// use pagemill_core::Gfp;
    /// assert_eq!(Gfp::from_bits((Gfp::NOIO | Gfp::ZERO).as_bits()), Some(Gfp::NOIO | Gfp::ZERO));
    /// assert_eq!(Gfp::from_bits(1 << 31), None);
    /// ```
    #[inline]
    pub const fn as_bits(self) -> u32 {
        self.0
    }
    /// From [`as_bits`](Self::as_bits); `None` for a number that no flags have.
    #[inline]
    pub const fn from_bits(bits: u32) -> Option<Self> {
        // `FS` comes with `IO`, and `IO` with `RECLAIM`: the bit below is set too.
        let lacks_lower = (bits & (Self::FS | Self::IO)) >> 1 & !bits;
        if bits & !Self::EVERY == 0 && lacks_lower == 0 { Some(Self(bits)) } else { None }
    }

    /// Whether all flags of `other` are set here.
    #[inline]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether the request may wait.
    #[inline]
    pub const fn may_wait(self) -> bool {
        self.0 & Self::RECLAIM != 0
    }

    /// Whether its reclaim may call shrinkers that do I/O.
    #[inline]
    pub const fn may_io(self) -> bool {
        self.0 & Self::IO != 0
    }
    /// Whether its reclaim may call shrinkers that enter a file system.
    #[inline]
    pub const fn may_fs(self) -> bool {
        self.0 & Self::FS != 0
    }

    /// The same without the flags of `other`.
    ///
    /// ```
    /// # use pagemill_core::Gfp;
    /// assert_eq!((Gfp::NOIO | Gfp::ZERO).without(Gfp::ZERO), Gfp::NOIO);
    /// ```
    #[inline]
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The same, but it neither waits nor touches a reserve.
    ///
    /// ```
    /// # use pagemill_core::Gfp;
    /// assert_eq!((Gfp::NOIO | Gfp::NOFAIL | Gfp::ZERO).nowait(), Gfp::NOWAIT | Gfp::ZERO);
    /// ```
    #[inline]
    #[must_use]
    pub const fn nowait(self) -> Self {
        Self(self.0 & !(Self::KERNEL.0 | Self::RESERVE | Self::PATIENCE))
    }
    /// The same, but it gives up after one round of reclaim and touches no reserve.
    ///
    /// ```
    /// # use pagemill_core::Gfp;
    /// assert_eq!((Gfp::NOIO | Gfp::NOFAIL).noretry(), Gfp::NOIO | Gfp::NORETRY);
    /// ```
    #[inline]
    #[must_use]
    pub const fn noretry(self) -> Self {
        Self((self.0 & !(Self::RESERVE | Self::PATIENCE)) | Self::NORETRY.0)
    }

    /// Whether nothing has to be checked or cleared: a request of the fast path.
    #[inline]
    pub const fn is_plain(self) -> bool {
        self.0 & Self::LOOK == 0 && self.0 & self.0 >> 1 & Self::PAIRS == 0
    }

    /// `KERNEL`, `NOIO`, `NOFS`, `NOWAIT` or `ATOMIC`: the request without its modifiers.
    #[must_use]
    pub const fn kind(self) -> Self {
        Self(self.0 & Self::KIND)
    }

    /// Whether memory of any node and address will do.
    #[inline]
    pub const fn is_anywhere(self) -> bool {
        self.0 & Self::PLACE == 0
    }

    /// The kind of pageblock that serves the request.
    #[inline]
    pub const fn mobility(self) -> Mobility {
        match self.0 & 3 {
            1 => Mobility::Movable,
            2 => Mobility::Reclaimable,
            _ => Mobility::Unmovable,
        }
    }

    /// Refuses combinations that contradict themselves.
    ///
    /// # Errors
    /// [`Invalid::GfpConflict`].
    #[inline]
    pub const fn check(self) -> Result<(), Invalid> {
        if self.is_plain() { Ok(()) } else { self.check_slow() }
    }

    const fn check_slow(self) -> Result<(), Invalid> {
        if self.0 & 3 == 3 {
            return Err(Invalid::GfpConflict(&["MOVABLE", "RECLAIMABLE"]));
        }
        if self.may_wait() && self.contains(Self::ATOMIC) {
            return Err(Invalid::GfpConflict(&["ATOMIC", "KERNEL, NOIO or NOFS"]));
        }
        if self.contains(Self::NOFAIL) && !self.may_wait() {
            return Err(Invalid::GfpConflict(&["NOFAIL", "NOWAIT"]));
        }
        if (self.0 & Self::PATIENCE).count_ones() > 1 {
            return Err(Invalid::GfpConflict(&["NOFAIL or RETRY_MAYFAIL", "NORETRY or RETRY_MAYFAIL"]));
        }
        Ok(())
    }
}

impl BitOr for Gfp {
    type Output = Self;
    #[inline]
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// What a pageblock's pages have in common: whether they can be moved, given back, or neither. Pages of one kind
/// share pageblocks, so that those of the others stay whole.
///
/// ```
/// use pagemill_core::{Gfp, Mobility};
/// assert_eq!((Gfp::KERNEL | Gfp::MOVABLE).mobility(), Mobility::Movable);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Mobility {
    /// Stays where it is.
    Unmovable = 0,
    /// Can be moved.
    Movable = 1,
    /// Can be given back.
    Reclaimable = 2,
}

impl Mobility {
    /// How many kinds there are.
    pub const COUNT: usize = 3;
    /// All kinds.
    pub const ALL: [Self; Self::COUNT] = [Self::Unmovable, Self::Movable, Self::Reclaimable];

    /// The kind numbered `index & 3`; 3 reads as unmovable.
    #[inline]
    pub const fn from_index(index: u32) -> Self {
        match index & 3 {
            1 => Self::Movable,
            2 => Self::Reclaimable,
            _ => Self::Unmovable,
        }
    }
    /// Its number, 0 to 2.
    #[inline]
    pub const fn index(self) -> usize {
        self as usize
    }
}
