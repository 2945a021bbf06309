//! Frees one page, onto the list of the CPU that frees it, or one block, to the zone.
//!
//! [`free_fast`] is inlined into the caller and serves the usual case: a page of the zone that the thread met last.
//! Everything else is out of line.
use crate::misuse::{misuse, refuse_foreign};
use crate::registry;
use crate::zone::Zone;
use pagemill_core::{Misuse, MisuseKind, Mobility, Order, PAGE_SIZE, Pfn, step};

/// Frees one page or block by its address.
#[inline]
pub(super) fn free_one<const RAW: bool>(addr: usize, order: Order) -> Result<(), Misuse> {
    if order == Order::ZERO && addr.is_multiple_of(PAGE_SIZE) && free_fast::<RAW>(addr) {
        return Ok(());
    }
    free_slow::<RAW>(addr, order)
}

/// Frees one page by its address. False if the address is not that of a page that is out.
#[inline(always)]
pub(super) fn free_fast<const RAW: bool>(addr: usize) -> bool {
    step!("free_fast");
    let Some((zone, pfn)) = registry::recent(addr) else { return free_other::<RAW>(addr) };
    if !zone.mark_page_free::<RAW>(pfn) {
        return false;
    }
    zone.put_back(pfn);
    true
}

/// The same for a page of another zone than the thread met last.
#[cold]
#[inline(never)]
fn free_other<const RAW: bool>(addr: usize) -> bool {
    let Some((zone, pfn)) = registry::by_address(addr) else { return false };
    let is_out = zone.mark_page_free::<RAW>(pfn);
    if is_out {
        zone.put_back(pfn);
    }
    is_out
}

/// Frees a block, or detects what is wrong with the address.
#[cold]
#[inline(never)]
pub(super) fn free_slow<const RAW: bool>(addr: usize, order: Order) -> Result<(), Misuse> {
    let (zone, pfn) = find(addr)?;
    let refused = |kind| zone.refuse(misuse(kind, addr));
    if RAW { zone.take_up(pfn, order, false) } else { zone.take_back_block(pfn, order) }.map_err(refused)?;
    if order == Order::ZERO {
        zone.put_back(pfn); // `free_fast` looked just before the page became raw.
        return Ok(());
    }
    zone.free_block(pfn, order).map_err(refused)
}

/// The zone and frame of an address, for a caller that is about to change the frame's state.
pub(super) fn find(addr: usize) -> Result<(&'static Zone, Pfn), Misuse> {
    let Some((zone, pfn)) = registry::by_address(addr) else {
        return Err(refuse_foreign(misuse(MisuseKind::Foreign, addr)));
    };
    if !addr.is_multiple_of(PAGE_SIZE) {
        return Err(zone.refuse(misuse(MisuseKind::Unaligned, addr)));
    }
    Ok((zone, pfn))
}

/// The zone and mobility of the page at an address; none if no zone has a page there. Whether the page is out is not
/// checked.
#[inline]
pub(super) fn page_at(addr: usize) -> Option<(&'static Zone, Mobility)> {
    if !addr.is_multiple_of(PAGE_SIZE) {
        return None;
    }
    let (zone, pfn) = registry::by_address(addr)?;
    Some((zone, zone.mobility_of(pfn)))
}
