//! A pool's tables of units and blocks, outside the blocks. Their address space is reserved at once, and the system
//! commits it on first touch.
//!
//! A block has a *place*: its unit's number, followed by its place in the unit. The place is the index of its state,
//! and leads to its device address.
use super::shape::Shape;
use crate::build_error::BuildError;
use crate::device::{DeviceAddr, DeviceError};
use crate::registry;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU8, AtomicU64};
use pagemill_core::{MisuseKind, PAGE_SHIFT, PAGE_SIZE};
use pagemill_os::Mapping;

/// Whether the full state of every block is kept. If not, only blocks that are out as pointers are marked.
pub(super) use crate::zone::FULL;

/// State of a block: free. Blocks that handles own have it too unless all states are kept: safe code cannot free them
/// twice.
pub(super) const SAFE: u8 = 0;
/// State: handed over as a pointer.
pub(super) const RAW: u8 = 1;
/// State: a handle owns it. Only if all states are kept.
const OWNED: u8 = 2;
/// The state of a block that a handle owns.
pub(super) const OF_HANDLE: u8 = if FULL { OWNED } else { SAFE };

/// The address of a unit, in the process and for the device. Written once, before any of its blocks is handed out; zero
/// before.
#[derive(Debug)]
pub(super) struct Unit {
    /// Its address and its number of pages: see [`word_of`].
    word: AtomicU64,
    device_addr: AtomicU64,
}

/// The bits of a word below the 36 of a page's number.
const COUNT_BITS: u32 = 28;

/// The address, a multiple of the page size below 2^48, and the number of pages, at most 2^18, in one word.
fn word_of(addr: usize, pages: usize) -> u64 {
    (addr as u64) >> PAGE_SHIFT << COUNT_BITS | pages as u64
}

impl Unit {
    /// Its address and its number of pages.
    #[inline]
    fn load(&self) -> (usize, usize) {
        // Acquire pairs with the Release in `enter`: the unit's other fields are written.
        let word = self.word.load(Acquire);
        ((word >> COUNT_BITS << PAGE_SHIFT) as usize, (word & ((1 << COUNT_BITS) - 1)) as usize)
    }
}

/// Room for as many numbers as a pool can have blocks. Only the used part is committed. It must be dropped before its
/// [`Tables`].
pub(super) type Stack = &'static mut [u32];

/// The tables of a pool, except the stack of its free blocks, which a lock guards.
#[derive(Debug)]
pub(super) struct Tables {
    // `'static` stands for the lifetime of `_map` in both.
    units: &'static [Unit],
    /// One byte for each block.
    states: &'static [AtomicU8],
    _map: Mapping,
}

impl Tables {
    /// Tables for `units` units of this shape.
    pub(super) fn new(units: usize, shape: &Shape) -> Result<(Self, Stack), DeviceError> {
        let blocks = units << shape.shift;
        let states = (units * size_of::<Unit>()).next_multiple_of(PAGE_SIZE);
        let stack = states + blocks.next_multiple_of(PAGE_SIZE);
        let bytes = stack + blocks * 4;
        let map = Mapping::reserve(bytes, PAGE_SIZE).map_err(BuildError::system("a pool's tables", bytes))?;
        let start = map.as_ptr::<u8>();
        // SAFETY: three disjoint page-aligned parts of the zeroed mapping, and zeros are valid values of all three
        // types. The last part is written without atomics, through this reference only.
        let (units, states, stack) = unsafe {
            (
                core::slice::from_raw_parts(start.cast::<Unit>(), units),
                core::slice::from_raw_parts(start.add(states).cast::<AtomicU8>(), blocks),
                core::slice::from_raw_parts_mut(start.add(stack).cast::<u32>(), blocks),
            )
        };
        Ok((Self { units, states, _map: map }, stack))
    }

    /// The number of units that there is room for.
    pub(super) fn units_max(&self) -> usize {
        self.units.len()
    }

    /// Enters a unit.
    ///
    /// # Panics
    /// If there is no room for it.
    pub(super) fn enter(&self, number: usize, addr: usize, pages: usize, device_addr: DeviceAddr) {
        let unit = &self.units[number];
        unit.device_addr.store(device_addr.get(), Relaxed);
        // Release pairs with the Acquire in `load`: the device's address is written.
        unit.word.store(word_of(addr, pages), Release);
        if let Some((zone, pfn)) = registry::by_address(addr) {
            pfn.run(pages as u32).for_each(|pfn| zone.link(pfn).store(number as u32, Relaxed));
        }
    }

    /// The unit that contains this address: its number, its entry, its start and its pages.
    #[inline]
    fn unit_at(&self, addr: usize) -> Option<(u32, &Unit, usize, usize)> {
        let (zone, pfn) = registry::by_address(addr)?;
        // The link of a page that is not this pool's may have any value: then the unit does not contain the address.
        let number = zone.link(pfn).load(Relaxed);
        let unit = self.units.get(number as usize)?;
        let (start, pages) = unit.load();
        (addr.wrapping_sub(start) < pages * PAGE_SIZE).then_some((number, unit, start, pages))
    }

    /// The place of the block at this address.
    #[inline]
    pub(super) fn place_at(&self, shape: &Shape, addr: usize) -> Result<u32, MisuseKind> {
        let (number, _, start, pages) = self.unit_at(addr).ok_or(MisuseKind::Foreign)?;
        match shape.place_of(addr - start, pages) {
            Some(place) => Ok(number << shape.shift | place as u32),
            None => Err(MisuseKind::Inside),
        }
    }

    /// The device's address for this address, which is in a unit.
    #[inline]
    pub(super) fn device_addr_at(&self, addr: usize) -> Option<DeviceAddr> {
        let (_, unit, start, _) = self.unit_at(addr)?;
        Some(DeviceAddr::new(unit.device_addr.load(Relaxed)).within(addr - start))
    }

    /// The address of the block with this place.
    pub(super) fn addr_of(&self, shape: &Shape, place: u32) -> usize {
        let (start, _) = self.units[(place >> shape.shift) as usize].load();
        start + shape.offset_of(place as usize & ((1 << shape.shift) - 1))
    }

    /// Changes a block's state; false if it is not `from`. Not an exchange: only the thread that has the block in hand
    /// writes.
    #[inline]
    pub(super) fn change(&self, place: u32, from: u8, to: u8) -> bool {
        let state = &self.states[place as usize];
        let is_so = state.load(Relaxed) == from;
        if is_so && from != to {
            state.store(to, Relaxed);
        }
        is_so
    }

    /// Marks a block that is about to be handed out, if all states are kept. False: the block has an owner already.
    #[inline]
    pub(super) fn hand_out(&self, place: u32) -> bool {
        self.change(place, SAFE, OF_HANDLE)
    }
}
