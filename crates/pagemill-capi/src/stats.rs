//! Statistics: counters by name, the text of vmstat, and the walk over all frames.
use crate::allocator::Allocator;
use crate::error::{Error, code};
use crate::handle;
use crate::text;
use core::ffi::c_char;
use pagemill::{Counter, Stats};

/// Reads a counter by its name: `free`, `allocated`, `freed`, `misused` and so on. Sums over CPUs are exact at rest, and close while other
/// threads work.
///
/// Errors: `PAGEMILL_ERROR_NAME` if there is no such counter.
///
/// Threads: any; it takes no lock. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_stat(allocator: *const Allocator, name: *const c_char, value: *mut u64) -> Error {
    let read = || {
        // SAFETY: the caller passes null or a handle, and null or a place for a number.
        let (allocator, place) = unsafe { (handle::get(allocator)?, value.as_mut().ok_or(Error::Argument)?) };
        // SAFETY: the caller passes null, or a text with a 0 at its end.
        let name = unsafe { text::read(name) }?.to_bytes();
        let counter = Stats::COUNTERS.iter().find(|counter| counter.name.as_bytes() == name).ok_or(Error::Name)?;
        *place = counter.of(&allocator.stats());
        Ok(())
    };
    code(read())
}

/// The name of counter `at`, counted from 0: up to `size` bytes of it at `name`, with the 0 at the end. Returns the name's length, as
/// `snprintf` does, and 0 beyond the last counter. A later version may have more counters, in another order.
///
/// Threads: any. Signal handlers: yes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_stat_name(at: usize, name: *mut c_char, size: usize) -> usize {
    // SAFETY: the caller passes null, or so many bytes.
    unsafe { text::copy(Stats::COUNTERS.get(at).map_or("", |counter: &Counter| counter.name), name, size) }
}

/// The counters in the format of `/proc/vmstat`: up to `size` bytes at `text`, with the 0 at the end. Returns the whole length, as
/// `snprintf` does; 0 for no open handle.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_vmstat(allocator: *const Allocator, text: *mut c_char, size: usize) -> usize {
    // SAFETY: the caller passes null or a handle.
    let Ok(allocator) = (unsafe { handle::get(allocator) }) else { return 0 };
    // SAFETY: the caller passes null, or so many bytes.
    unsafe { text::copy(&allocator.vmstat().to_string(), text, size) }
}

/// All pages of an allocator at rest, counted by state.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Census {
    /// All pages.
    pub managed: usize,
    /// Free in a zone.
    pub free: usize,
    /// On per-CPU lists and in depots.
    pub listed: usize,
    /// Handed out.
    pub handed_out: usize,
    /// Put aside for good, because they had two owners at once.
    pub quarantined: usize,
}

/// Walks every page of an allocator that nobody uses meanwhile, and checks that each is in exactly one place.
///
/// Errors: `PAGEMILL_ERROR_BROKEN` if one is not; while other threads allocate or free, this proves nothing.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_validate(allocator: *const Allocator, census: *mut Census) -> Error {
    let walk = || {
        // SAFETY: the caller passes null or a handle, and null or a place for a census.
        let (allocator, place) = unsafe { (handle::get(allocator)?, census.as_mut()) };
        let found = allocator.validate().map_err(|_| Error::Broken)?;
        if let Some(place) = place {
            let pagemill::Census { managed, free, listed, handed_out, quarantined, .. } = found;
            *place = Census { managed, free, listed, handed_out, quarantined };
        }
        Ok(())
    };
    code(walk())
}
