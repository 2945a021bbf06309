//! What a frame is right now, one byte a frame: how a double free, a foreign page or a wrong order is seen (C2.4).
//!
//! Misuse is possible where a block is a raw pointer, so that is where its state changes: written when a block leaves
//! the world of owned handles, demanded when it comes back. A block that a handle owns is as safe as a free one: safe code
//! cannot free it twice. Taking a frame only looks: whatever is raw or inside of a raw block has an owner.
//!
//! A byte that nobody ever wrote is 0: never handed out, so still zero as the operating system gave it (C2.2).
//!
//! Builds with full states (debug builds, and a feature of `pagemill`) also write [`owned`](FrameState::owned): they see a
//! fault of Pagemill's own that hands a frame out twice.
use crate::Order;

/// One frame's state byte.
///
/// ```
/// use pagemill_core::{FrameState, Order};
/// let raw = FrameState::raw(Order::ZERO);
/// assert_eq!(raw.order(), Some(Order::ZERO));
/// assert!(!raw.is_safe() && FrameState::FRESH.is_safe());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct FrameState(u8);

impl FrameState {
    /// Free, and never handed out: its memory is zero.
    pub const FRESH: Self = Self(0);
    /// Free and handed out before, or owned by a handle. With full states: free. No other state has its bit, so that many frames
    /// are looked at by "and" alone.
    pub const SAFE: Self = Self(0x20);
    /// Inside of a block that is raw (with full states: or owned), not its first frame.
    pub const INSIDE: Self = Self(2);
    /// Found on two ways at once and put aside.
    pub const QUARANTINED: Self = Self(3);

    const RAW: u8 = 0x80;
    const OWNED: u8 = 0x40;
    const ORDER: u8 = 0x1f;

    /// The first frame of a block that somebody has as a raw pointer.
    #[inline]
    pub const fn raw(order: Order) -> Self {
        Self(Self::RAW | order.get())
    }
    /// The first frame of a block that a handle owns; written with full states alone.
    #[inline]
    pub const fn owned(order: Order) -> Self {
        Self(Self::OWNED | order.get())
    }
    /// The first frame of a pool's block that somebody has as a raw pointer. It comes back by way of its pool alone.
    #[inline]
    pub const fn pooled(order: Order) -> Self {
        Self(Self::RAW | Self::OWNED | order.get())
    }
    /// Whether it is the first frame of a pool's block that is raw.
    #[inline]
    pub const fn is_pooled(self) -> bool {
        self.0 & (Self::RAW | Self::OWNED) == Self::RAW | Self::OWNED
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
    /// Whether this frame may be handed out.
    #[inline]
    pub const fn is_safe(self) -> bool {
        self.0 & !Self::SAFE.0 == 0
    }
    /// Whether it is the first frame of a raw block.
    #[inline]
    pub const fn is_raw(self) -> bool {
        self.0 & Self::RAW != 0
    }
    /// If it is the first frame of a block that is raw or known to be owned: the block's order.
    #[inline]
    pub const fn order(self) -> Option<Order> {
        if self.0 & (Self::RAW | Self::OWNED) == 0 {
            return None;
        }
        match Order::new(self.0 & Self::ORDER) {
            Ok(order) => Some(order),
            Err(_) => None,
        }
    }
}
