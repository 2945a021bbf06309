//! The flags of requests, with the values that C programs are compiled with.
use crate::error::Error;
use pagemill::Gfp;

/// May reclaim and wait. Not in a signal handler.
pub const PAGEMILL_GFP_KERNEL: u32 = 0x70;
/// As `PAGEMILL_GFP_KERNEL`, but its reclaim calls no shrinker that does I/O.
pub const PAGEMILL_GFP_NOIO: u32 = 0x10;
/// As `PAGEMILL_GFP_KERNEL`, but its reclaim calls no shrinker that enters a file system.
pub const PAGEMILL_GFP_NOFS: u32 = 0x30;
/// Neither waits nor reclaims.
pub const PAGEMILL_GFP_NOWAIT: u32 = 0;
/// `PAGEMILL_GFP_NOWAIT` with access to part of the reserve.
pub const PAGEMILL_GFP_ATOMIC: u32 = 0x8;
/// Modifier: place among pages that can be moved.
pub const PAGEMILL_GFP_MOVABLE: u32 = 0x1;
/// Modifier: place among pages that reclaim can give back.
pub const PAGEMILL_GFP_RECLAIMABLE: u32 = 0x2;
/// Modifier: the memory comes zeroed.
pub const PAGEMILL_GFP_ZERO: u32 = 0x4;
/// Modifier: from memory with device addresses below 4 GiB.
pub const PAGEMILL_GFP_DMA32: u32 = 0x100;
/// Modifier: from this node or not at all.
pub const PAGEMILL_GFP_THISNODE: u32 = 0x200;
/// Modifier: one round of reclaim, then give up.
pub const PAGEMILL_GFP_NORETRY: u32 = 0x400;
/// Modifier: try hard, but give up. A bulk request then tries for all its pages.
pub const PAGEMILL_GFP_RETRY_MAYFAIL: u32 = 0x800;
/// Modifier: never give up. Not with `PAGEMILL_GFP_NOWAIT` and `PAGEMILL_GFP_ATOMIC`.
pub const PAGEMILL_GFP_NOFAIL: u32 = 0x1000;
/// Modifier: accepted, and changes nothing.
pub const PAGEMILL_GFP_NOWARN: u32 = 0x2000;
/// Modifier: charge the request's account, which must be named.
pub const PAGEMILL_GFP_ACCOUNT: u32 = 0x4000;

// A program that was compiled with other values would ask for something else.
const _: () = {
    let pairs = [
        (PAGEMILL_GFP_KERNEL, Gfp::KERNEL),
        (PAGEMILL_GFP_NOIO, Gfp::NOIO),
        (PAGEMILL_GFP_NOFS, Gfp::NOFS),
        (PAGEMILL_GFP_NOWAIT, Gfp::NOWAIT),
        (PAGEMILL_GFP_ATOMIC, Gfp::ATOMIC),
        (PAGEMILL_GFP_MOVABLE, Gfp::MOVABLE),
        (PAGEMILL_GFP_RECLAIMABLE, Gfp::RECLAIMABLE),
        (PAGEMILL_GFP_ZERO, Gfp::ZERO),
        (PAGEMILL_GFP_DMA32, Gfp::DMA32),
        (PAGEMILL_GFP_THISNODE, Gfp::THISNODE),
        (PAGEMILL_GFP_NORETRY, Gfp::NORETRY),
        (PAGEMILL_GFP_RETRY_MAYFAIL, Gfp::RETRY_MAYFAIL),
        (PAGEMILL_GFP_NOFAIL, Gfp::NOFAIL),
        (PAGEMILL_GFP_NOWARN, Gfp::NOWARN),
        (PAGEMILL_GFP_ACCOUNT, Gfp::ACCOUNT),
    ];
    let mut at = 0;
    while at < pairs.len() {
        assert!(pairs[at].0 == pairs[at].1.as_bits());
        at += 1;
    }
};

/// The flags behind a number of C's.
#[inline]
pub(crate) fn gfp(bits: u32) -> Result<Gfp, Error> {
    Gfp::from_bits(bits).ok_or(Error::Flags)
}
