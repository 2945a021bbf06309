//! Shrinkers: functions that free pages when memory is short.
use crate::allocator::Allocator;
use crate::error::{Error, code};
use crate::handle::{self, handle};
use core::ffi::c_void;
use pagemill::{Shrink, ShrinkerDoes};
use std::sync::Arc;

/// The registration of a function that frees pages when memory is short. The type is opaque.
pub struct Shrinker;
handle!(Shrinker, pagemill::Registered, b"pmshrink");

type Shrinks = unsafe extern "C" fn(pages: usize, gfp: u32, user: *mut c_void) -> usize;

/// The shrinker only frees pages.
pub const PAGEMILL_SHRINKER_FREES: u32 = 0;
/// The shrinker does I/O: it is not called for `PAGEMILL_GFP_NOIO`.
pub const PAGEMILL_SHRINKER_IO: u32 = 1;
/// The shrinker calls into a file system: it is not called for `PAGEMILL_GFP_NOIO` and `PAGEMILL_GFP_NOFS`.
pub const PAGEMILL_SHRINKER_FILESYSTEM: u32 = 2;

struct Function {
    shrink: Shrinks,
    user: *mut c_void,
    does: ShrinkerDoes,
}

// SAFETY: the C program promises that any thread may call the function with its `user`, at `pagemill_shrinker_register`.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl pagemill::Shrinker for Function {
    fn shrink(&self, wanted: Shrink) -> usize {
        // SAFETY: a function of this type, with what it is to get.
        unsafe { (self.shrink)(wanted.pages, wanted.gfp.as_bits(), self.user) }
    }
    fn does(&self) -> ShrinkerDoes {
        self.does
    }
}

/// Registers a function that is called when the allocator's memory is short. It frees about `pages` pages and returns how many it freed. `gfp` are
/// the flags of the request that found no memory; `user` is passed through. `does` is one of `PAGEMILL_SHRINKER_FREES` to
/// `PAGEMILL_SHRINKER_FILESYSTEM`. `*shrinker` gets the handle, or null.
///
/// The function is called on the thread of that request, in the middle of it, on the thread of background reclaim, or in a forked child. So no
/// thread may hold a lock that it waits for while it allocates with flags that reclaim: try the lock. It may free, and allocate with
/// `PAGEMILL_GFP_NOWAIT` or `PAGEMILL_GFP_ATOMIC`. It must return: no exception, no longjmp.
///
/// Errors: 2xx if an argument is wrong.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_shrinker_register(
    allocator: *mut Allocator,
    shrink: Option<unsafe extern "C" fn(pages: usize, gfp: u32, user: *mut c_void) -> usize>,
    user: *mut c_void,
    does: u32,
    shrinker: *mut *mut Shrinker,
) -> Error {
    let register = || {
        let does = match does {
            PAGEMILL_SHRINKER_FREES => ShrinkerDoes::Nothing,
            PAGEMILL_SHRINKER_IO => ShrinkerDoes::Io,
            PAGEMILL_SHRINKER_FILESYSTEM => ShrinkerDoes::Filesystem,
            _ => return Err(Error::Invalid),
        };
        let function = Function { shrink: shrink.ok_or(Error::Argument)?, user, does };
        // SAFETY: the caller passes null or a handle.
        Ok(unsafe { handle::get(allocator) }?.register_shrinker(Arc::new(function)))
    };
    // SAFETY: the caller passes null or a place for a pointer.
    unsafe { handle::make(shrinker, register) }
}

/// Ends a registration. It does not wait for a call that is under way: free what `user` leads to only when none can be.
///
/// Errors: 2xx for no open handle.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_shrinker_unregister(shrinker: *mut Shrinker) -> Error {
    // SAFETY: the caller passes null or a handle.
    code(unsafe { handle::close(shrinker) }.map(drop))
}

/// Does what background reclaim does, for programs that prefer to call it themselves: reclaims until every zone is above its high mark, or no more is
/// freed. Returns the number of pages that shrinkers freed; 0 for no open handle.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_reclaim_step(allocator: *mut Allocator) -> usize {
    // SAFETY: the caller passes null or a handle.
    unsafe { handle::get(allocator) }.map_or(0, |allocator| allocator.reclaim_step().get())
}
