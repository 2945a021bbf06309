//! What a pool knows of its blocks, all of it outside of them: reserved at once, committed by the system as it is touched.
use super::DmaBlock;
use super::shape::Shape;
use crate::device::{DeviceAddr, DeviceError};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, Ordering::Relaxed};
use pagemill_core::{Error, Invalid, PAGE_SIZE};
use pagemill_sys::Mapping;

/// States of a block.
const FREE: u8 = 0;
const OUT: u8 = 1;

/// Where a unit is, here and for the device. Written once, before any of its blocks' numbers is told to anybody.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unit {
    pub(super) addr: usize,
    pub(super) device_addr: DeviceAddr,
}

/// Room for as many blocks as a pool can have, of which only what is used is committed. It goes before its [`Tables`].
pub(super) type Stack = &'static mut [u32];

/// The tables of a pool, but for the stack of its free blocks, which a lock guards.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) find: Find,
    /// Units that there is room for.
    pub(super) units_max: usize,
    _map: Mapping,
}

/// From a block's number to the block, and to its state. A copy of it is what a loop has in registers.
///
/// The functions are unsafe for one reason: the number must be that of a block of the pool's (it came from the pool's lists or
/// stack, or with a [`DmaBlock`] of it), and in the caller's hand (D1).
#[derive(Clone, Copy, Debug)]
pub(super) struct Find {
    units: *mut Unit,
    /// One byte a block.
    states: *mut u8,
    /// The shape's, by a number's lower part.
    offsets: *const u32,
    mask: u32,
    shift: u32,
    /// The pool's, as the upper half of its blocks' tags has it.
    id: u64,
}

// SAFETY: leads into the tables' mapping and the shape; who may touch which entry is told at each access.
unsafe impl Send for Find {}
// SAFETY: as for Send.
unsafe impl Sync for Find {}

impl Tables {
    /// For `units` units, cut as `shape` says, whose offsets stay where they are for as long.
    pub(super) fn new(units: usize, shape: &Shape, id: u32) -> Result<(Self, Stack), DeviceError> {
        let blocks = units << shape.shift;
        let states = (units * size_of::<Unit>()).next_multiple_of(PAGE_SIZE);
        let stack = states + blocks.next_multiple_of(PAGE_SIZE);
        let bytes = stack + blocks * 4;
        let refused = |errno: pagemill_sys::Errno| Invalid::System { what: "a pool's tables", bytes, errno: errno.0 };
        let map = Mapping::reserve(bytes, PAGE_SIZE).map_err(|errno| Error::Invalid(refused(errno)))?;
        let start = map.as_ptr::<u8>();
        let find = Find {
            units: start.cast(), // page-aligned
            states: start.wrapping_add(states),
            offsets: shape.offsets.as_ptr(),
            mask: shape.offsets.len() as u32 - 1,
            shift: shape.shift,
            id: u64::from(id) << 32,
        };
        // SAFETY: the last part of the zeroed mapping, page-aligned, which nothing else leads to. `'static` stands for the
        // mapping's life: the stack goes before that.
        let stack = unsafe { core::slice::from_raw_parts_mut(start.add(stack).cast::<u32>(), blocks) };
        Ok((Self { find, units_max: units, _map: map }, stack))
    }

    /// Enters a unit.
    ///
    /// # Panics
    /// If there is no room for it.
    pub(super) fn enter(&self, number: usize, unit: Unit) {
        assert!(number < self.units_max);
        // SAFETY: in the table; nobody reads it before a number in it is told.
        unsafe { self.find.units.add(number).write(unit) }
    }
}

impl Find {
    /// The number in a tag, if it is this pool's.
    #[inline(always)]
    pub(super) fn number(self, tag: u64) -> Option<u32> {
        if (tag ^ self.id) >> 32 == 0 { Some(tag as u32) } else { None }
    }

    /// The tag of the pool's block of this number.
    #[inline(always)]
    pub(super) fn tag(self, number: u32) -> u64 {
        self.id | u64::from(number)
    }

    /// The lowest number of the blocks in the slots, if each slot holds one of the pool's, and each has the number below that of
    /// the one before it.
    #[inline(always)]
    pub(super) fn run_in(self, slots: &[Option<DmaBlock>]) -> Option<u32> {
        let last = self.number(slots.last()?.as_ref()?.tag)?;
        let tags = (self.tag(last)..self.tag(last) + slots.len() as u64).rev();
        let is_run = slots
            .iter()
            .zip(tags)
            .fold(true, |is_run, (slot, tag)| is_run & slot.as_ref().is_some_and(|block| block.tag == tag));
        is_run.then_some(last)
    }

    /// Where the block of a number is, here and for the device.
    #[inline(always)]
    pub(super) unsafe fn place(self, number: u32) -> Unit {
        // SAFETY: the block's unit is entered, and its offset is in the shape (the caller's).
        unsafe {
            let unit = *self.units.add((number >> self.shift) as usize);
            let offset = *self.offsets.add((number & self.mask) as usize) as usize;
            Unit { addr: unit.addr + offset, device_addr: unit.device_addr.within(offset) }
        }
    }

    /// A block's handle.
    #[inline(always)]
    pub(super) unsafe fn block(self, number: u32) -> DmaBlock {
        // SAFETY: the caller's.
        let addr = core::ptr::with_exposed_provenance_mut(unsafe { self.place(number) }.addr);
        // SAFETY: inside of a unit, which is not at address 0.
        DmaBlock { addr: unsafe { NonNull::new_unchecked(addr) }, tag: self.tag(number) }
    }

    /// Fills the slots, which are empty, with the blocks of as many numbers below `end`, from the highest down.
    #[inline(always)]
    pub(super) unsafe fn fill(self, mut slots: &mut [Option<DmaBlock>], mut end: u32) {
        while !slots.is_empty() {
            let place = (end - 1) & self.mask;
            let (here, others) = slots.split_at_mut(slots.len().min(place as usize + 1));
            slots = others;
            // SAFETY: the unit of a block that there is, and offsets of the shape (the caller's).
            let (unit, offsets) = unsafe {
                let unit = (*self.units.add(((end - 1) >> self.shift) as usize)).addr;
                (unit, core::slice::from_raw_parts(self.offsets.add(place as usize + 1 - here.len()), here.len()))
            };
            let mut tag = self.tag(end);
            end -= here.len() as u32;
            for (slot, &offset) in here.iter_mut().zip(offsets.iter().rev()) {
                tag -= 1;
                let addr = core::ptr::with_exposed_provenance_mut(unit + offset as usize);
                // SAFETY: inside of a unit, which is not at address 0.
                *slot = Some(DmaBlock { addr: unsafe { NonNull::new_unchecked(addr) }, tag });
            }
        }
    }

    #[inline(always)]
    unsafe fn change(self, number: u32, from: u8, to: u8) -> bool {
        // SAFETY: a block that there is has a state (the caller's).
        let state = unsafe { AtomicU8::from_ptr(self.states.add(number as usize)) };
        if state.load(Relaxed) != from {
            return false;
        }
        state.store(to, Relaxed);
        true
    }
    /// Marks a block as out; false if it is.
    #[inline(always)]
    pub(super) unsafe fn hand_out(self, number: u32) -> bool {
        // SAFETY: the caller's.
        unsafe { self.change(number, FREE, OUT) }
    }
    /// Marks a block as free; false if it is.
    #[inline(always)]
    pub(super) unsafe fn take_back(self, number: u32) -> bool {
        // SAFETY: the caller's.
        unsafe { self.change(number, OUT, FREE) }
    }

    /// The same for `n` neighbours from `first` on: all or none.
    #[inline(always)]
    unsafe fn change_run(self, first: u32, n: usize, from: u8, to: u8) -> bool {
        // SAFETY: their states; nobody else writes them, since the blocks are in the caller's hand. (Somebody who frees one
        // of them that he has not does, at that moment: it is found out then or later.)
        let states = unsafe { core::slice::from_raw_parts_mut(self.states.add(first as usize), n) };
        if states.iter().fold(0, |differs, &state| differs | (state ^ from)) != 0 {
            return false;
        }
        states.fill(to);
        true
    }
    #[inline(always)]
    pub(super) unsafe fn hand_out_run(self, first: u32, n: usize) -> bool {
        // SAFETY: the caller's.
        unsafe { self.change_run(first, n, FREE, OUT) }
    }
    #[inline(always)]
    pub(super) unsafe fn take_back_run(self, first: u32, n: usize) -> bool {
        // SAFETY: the caller's.
        unsafe { self.change_run(first, n, OUT, FREE) }
    }
}

/// The lowest of these numbers, if they follow each other, up or down.
#[inline(always)]
pub(super) fn lowest_of_run(numbers: &[u32]) -> Option<u32> {
    let (&first, &last) = (numbers.first()?, numbers.last()?);
    let step = if first <= last { 1 } else { u32::MAX };
    let mut expected = first;
    let differs = numbers.iter().fold(0, |differs, &number| {
        let differs = differs | (number ^ expected);
        expected = expected.wrapping_add(step);
        differs
    });
    (differs == 0).then_some(first.min(last))
}
