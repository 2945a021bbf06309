//! What a pool knows of its blocks, all of it outside of them: reserved at once, committed by the system as it is touched.
use super::DeviceError;
use core::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering::Relaxed};
use pagemill_core::{Error, Invalid, PAGE_SIZE};
use pagemill_sys::Mapping;

/// A unit: where it is, here and for the device. Written once, before any of its blocks is handed out.
#[derive(Debug)]
pub(super) struct Unit {
    addr: AtomicUsize,
    device_addr: AtomicU64,
}

impl Unit {
    #[inline]
    pub(super) fn addr(&self) -> usize {
        self.addr.load(Relaxed)
    }
    #[inline]
    pub(super) fn device_addr(&self) -> u64 {
        self.device_addr.load(Relaxed)
    }
    pub(super) fn set(&self, addr: usize, device_addr: u64) {
        self.addr.store(addr, Relaxed);
        self.device_addr.store(device_addr, Relaxed);
    }
}

/// The tables of a pool, but for the stack of its free blocks, which a lock guards.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) units: &'static [Unit],
    /// One byte a block.
    pub(super) states: &'static [AtomicU8],
    _map: Mapping,
}

/// Room for as many blocks as a pool can have, of which only what is used is committed. It goes before its [`Tables`].
pub(super) type Stack = &'static mut [u32];

impl Tables {
    /// For `units` units of 2^shift blocks each.
    pub(super) fn new(units: usize, shift: u32) -> Result<(Self, Stack), DeviceError> {
        let blocks = units << shift;
        let states = (units * size_of::<Unit>()).next_multiple_of(PAGE_SIZE);
        let stack = states + blocks.next_multiple_of(PAGE_SIZE);
        let bytes = stack + blocks * 4;
        let refused = |errno: pagemill_sys::Errno| Invalid::System { what: "a pool's tables", bytes, errno: errno.0 };
        let map = Mapping::reserve(bytes, PAGE_SIZE).map_err(|errno| Error::Invalid(refused(errno)))?;
        let start = map.as_ptr::<u8>();
        // SAFETY: three parts of one zeroed mapping, apart from each other, inside of it and aligned to a page, of types for
        // which zero is a value. `'static` stands for the mapping's life: the tables are seen through `Tables` alone, which
        // has it, and the stack goes before that.
        let tables = unsafe {
            let units = core::slice::from_raw_parts(start.cast::<Unit>(), units);
            let states = core::slice::from_raw_parts(start.add(states).cast::<AtomicU8>(), blocks);
            let stack = core::slice::from_raw_parts_mut(start.add(stack).cast::<u32>(), blocks);
            (Self { units, states, _map: map }, stack)
        };
        Ok(tables)
    }
}
