//! Walks from the root: to a slot, or to the nearest slot of a sort. They run with and without the index's lock; without
//! it the nodes may change under them, and [`Tree::read`](super::tree::Tree::read) judges the result.
use super::nodes::{ALL, BITS, DIRTY, FAN, FULL, Leaf, Link, MAX_LEVELS, PRESENT, WRITEBACK, Wandered};
use core::num::NonZeroU32;

/// What can be looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    Present,
    Hole,
    Dirty,
    Writeback,
}

/// Of an offset, at the node where so many levels begin.
#[inline]
pub(super) fn slot_at(at: u64, levels: usize) -> usize {
    (at >> (BITS as usize * (levels - 1))) as usize % FAN
}

/// The greatest offset of a tree of so many levels.
#[inline]
pub(super) fn reach(levels: usize) -> u64 {
    u64::MAX.checked_shr(u64::BITS.saturating_sub(BITS * levels as u32)).unwrap_or(0)
}

/// Levels that a tree needs to reach this offset.
#[inline]
pub(super) fn levels_for(at: u64) -> usize {
    (u64::BITS - at.leading_zeros()).div_ceil(BITS).max(1) as usize
}

/// The leaf where this offset belongs, if there is one.
#[inline]
pub(super) fn leaf_at(root: Link<'_>, at: u64) -> Result<Option<&Leaf>, Wandered> {
    let (mut link, mut levels) = (root, root.levels());
    let Some(above) = levels.checked_sub(1) else { return Ok(None) };
    let mut shift = BITS as usize * above;
    if at >> shift >= FAN as u64 {
        return Ok(None);
    }
    // Counts by itself: otherwise each step would wait for the tag of the node before.
    while levels > 1 {
        let Some(node) = link.as_interior_of(levels) else { break };
        link = node.child((at >> shift) as usize);
        levels -= 1;
        shift -= BITS as usize;
    }
    if link.levels() == levels || link.is_none() { Ok(link.as_leaf()) } else { Err(Wandered) }
}

#[inline]
pub(super) fn get(root: Link<'_>, at: u64) -> Result<Option<NonZeroU32>, Wandered> {
    Ok(leaf_at(root, at)?.and_then(|leaf| leaf.get(slot_at(at, 1))))
}

/// Copies frames from `at` on, up to the end of the leaf, and returns how many.
#[inline]
pub(super) fn get_run(root: Link<'_>, at: u64, out: &mut [u32]) -> Result<usize, Wandered> {
    let slot = slot_at(at, 1);
    Ok(match leaf_at(root, at)? {
        Some(leaf) => leaf.copy(slot, out),
        None => {
            let len = out.len().min(FAN - slot);
            out[..len].fill(0);
            len
        }
    })
}

/// What one way down from the root found.
enum Found {
    Here(u64),
    /// There is none up to this offset, which is to be looked at next.
    Beyond(u64),
    Nowhere,
}

/// The nearest slot of a sort, from `at` on upwards (`UP`) or downwards, up to and with `to`.
pub(super) fn search<const UP: bool>(root: Link<'_>, sort: Sort, at: u64, to: u64) -> Result<Option<u64>, Wandered> {
    let mut at = at;
    // After a node without such a slot the search goes on a level above. More turns are due to changes meanwhile.
    for _ in 0..2 * MAX_LEVELS {
        match descend::<UP>(root, sort, at, to)? {
            Found::Here(at) => return Ok(Some(at)),
            Found::Beyond(next) => at = next,
            Found::Nowhere => return Ok(None),
        }
    }
    Err(Wandered)
}

/// One way down. `at` is not beyond `to`.
fn descend<const UP: bool>(root: Link<'_>, sort: Sort, mut at: u64, to: u64) -> Result<Found, Wandered> {
    let end = reach(root.levels());
    if root.is_none() || at > end {
        return Ok(match sort {
            Sort::Hole => Found::Here(at),
            // All offsets that have a slot are below.
            _ if !UP && !root.is_none() && to <= end => Found::Beyond(end),
            _ => Found::Nowhere,
        });
    }
    let mut link = root;
    loop {
        let shift = BITS as usize * (link.levels() - 1);
        // The offset's and the bound's part that this node and those above it tell apart.
        let (here, bound) = (at >> shift, to >> shift);
        let slot = here as usize % FAN;
        let map = match sort {
            Sort::Present => link.map(PRESENT),
            Sort::Hole => !link.map(FULL) & ALL,
            Sort::Dirty => link.map(DIRTY),
            Sort::Writeback => link.map(WRITEBACK),
        };
        let rest = if UP { map & ALL << slot } else { map & u64::MAX >> (63 - slot) };
        let Some(found) = nearest::<UP>(rest) else {
            // Nothing in this node.
            return Ok(step::<UP>(here - slot as u64 + if UP { FAN as u64 - 1 } else { 0 }, bound, shift));
        };
        let there = here - slot as u64 + found as u64;
        if if UP { there > bound } else { there < bound } {
            return Ok(Found::Nowhere);
        }
        if there != here {
            at = if UP { there << shift } else { there << shift | ((1 << shift) - 1) };
        }
        if shift == 0 {
            return Ok(Found::Here(at));
        }
        let child = link.child(found)?;
        if child.is_none() {
            // No node has no entries. A bit that says otherwise is about to be cleared.
            return Ok(if sort == Sort::Hole { Found::Here(at) } else { step::<UP>(there, bound, shift) });
        }
        link = child;
    }
}

#[inline]
fn nearest<const UP: bool>(map: u64) -> Option<usize> {
    let slot = if UP { map.trailing_zeros() } else { 63_u32.wrapping_sub(map.leading_zeros()) };
    (map != 0).then_some(slot as usize)
}

/// Beyond the slot `here` of a node of this shift, unless that is beyond the bound's slot.
#[inline]
fn step<const UP: bool>(here: u64, bound: u64, shift: usize) -> Found {
    match here {
        here if UP && here < bound => Found::Beyond((here + 1) << shift),
        here if !UP && here > bound => Found::Beyond((here << shift) - 1),
        _ => Found::Nowhere,
    }
}
