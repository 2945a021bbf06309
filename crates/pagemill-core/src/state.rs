//! What a frame is right now, one byte a frame: how a double free, a foreign page or a wrong order is seen (C2.4).
//!
//! Only the owner of a frame writes its byte: the caller that frees it, then whoever hands it out again. The byte is
//! checked both times, so a frame that two CPUs free at once is caught at hand-out at the latest.
//!
//! A byte that nobody ever wrote is 0: never handed out, so still zero as the operating system gave it (C2.2).
use crate::{Mobility, Order};

/// One frame's state byte.
///
/// ```
/// use pagemill_core::{FrameState, Mobility, Order};
/// let out = FrameState::handed_out(Order::ZERO, Mobility::Movable);
/// assert_eq!(out.order(), Some(Order::ZERO));
/// assert_eq!(FrameState::FRESH.order(), None);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct FrameState(u8);

impl FrameState {
    /// Free, and never handed out: its memory is zero.
    pub const FRESH: Self = Self(0);
    /// Free, handed out before.
    pub const FREE: Self = Self(1);
    /// Inside a block that is handed out, not its first frame.
    pub const INSIDE: Self = Self(2);
    /// Found on two ways at once and put aside.
    pub const QUARANTINED: Self = Self(3);

    const OUT: u8 = 0x80;
    const MOBILITY_SHIFT: u32 = 5;
    const ORDER: u8 = 0x1f;

    /// The first frame of a block that is handed out. `mobility` is that of its pageblock, which says the list it
    /// comes back to.
    #[inline]
    pub const fn handed_out(order: Order, mobility: Mobility) -> Self {
        Self(Self::OUT | (mobility as u8) << Self::MOBILITY_SHIFT | order.get())
    }
    /// From the byte in the table.
    #[inline]
    pub const fn from_byte(byte: u8) -> Self {
        Self(byte)
    }
    /// The byte in the table.
    #[inline]
    pub const fn as_byte(self) -> u8 {
        self.0
    }
    /// May this frame be handed out?
    #[inline]
    pub const fn is_free(self) -> bool {
        self.0 <= Self::FREE.0
    }
    /// If it is the first frame of a block that is handed out: the block's order.
    #[inline]
    pub const fn order(self) -> Option<Order> {
        if self.0 & Self::OUT == 0 {
            return None;
        }
        match Order::new(self.0 & Self::ORDER) {
            Ok(order) => Some(order),
            Err(_) => None,
        }
    }
    /// The mobility of the pageblock that it was handed out from.
    #[inline]
    pub const fn mobility(self) -> Mobility {
        Mobility::from_index((self.0 >> Self::MOBILITY_SHIFT) as u32)
    }
    /// If it is a page of its own that is handed out: its mobility.
    #[inline]
    pub const fn page_mobility(self) -> Option<Mobility> {
        if self.0 & (Self::OUT | Self::ORDER) == Self::OUT { Some(self.mobility()) } else { None }
    }
}
