//! Threads that the child of a fork may start too.
//!
//! The standard library's threads take a lock of that library as they begin and as they end, to note where their stacks end.
//! A fork does not wait for that lock. Forked while another thread held it, the child has a lock that nobody releases, and each
//! thread that it starts through the standard library waits for it for ever. The C library prepares its own locks for a fork,
//! so these are its threads. They differ from the standard library's in that a stack overflow ends the process without a message.
use crate::Errno;
use core::any::Any;
use core::ffi::{CStr, c_void};
use core::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

/// As much stack as the standard library gives its threads: shrinkers run on it.
const STACK: usize = 2 << 20;

/// What a thread's work returned, or its panic.
type Outcome<T> = Result<T, Box<dyn Any + Send>>;

/// A thread; detached when this is dropped.
///
/// ```
/// let thread = pagemill_os::Thread::spawn(c"adds", || 1 + 1).unwrap();
/// assert_eq!(thread.join().unwrap(), 2);
/// ```
#[derive(Debug)]
pub struct Thread<T> {
    id: libc::pthread_t,
    outcome: Arc<Mutex<Option<Outcome<T>>>>,
    is_joined: bool,
}

// SAFETY: any thread may join another; the outcome is shared by a lock.
unsafe impl<T: Send> Send for Thread<T> {}
// SAFETY: `&Thread` says who the thread is, and nothing of the outcome but whether it is there.
unsafe impl<T: Send> Sync for Thread<T> {}

impl<T: Send + 'static> Thread<T> {
    /// Starts a thread with a name of at most 15 bytes.
    ///
    /// # Errors
    /// `EAGAIN`: the system has no room for another thread.
    pub fn spawn(name: &'static CStr, work: impl FnOnce() -> T + Send + 'static) -> Result<Self, Errno> {
        // SAFETY: the work borrows nothing.
        unsafe { Self::spawn_borrowing(name, work) }
    }
}

impl<T: Send> Thread<T> {
    /// The same for work that borrows.
    ///
    /// # Safety
    /// The thread is joined before what the work and its result borrow ends.
    pub(crate) unsafe fn spawn_borrowing(name: &'static CStr, work: impl FnOnce() -> T + Send) -> Result<Self, Errno> {
        let outcome = Arc::new(Mutex::new(None));
        let told = outcome.clone();
        let body = move || {
            // SAFETY: this thread, and a terminated name. If the name is too long it is left out.
            unsafe { libc::pthread_setname_np(libc::pthread_self(), name.as_ptr()) };
            let done = catch_unwind(AssertUnwindSafe(work));
            *told.lock().unwrap_or_else(PoisonError::into_inner) = Some(done);
        };
        let body: Box<dyn FnOnce() + Send + '_> = Box::new(body);
        let body = Box::into_raw(Box::new(body));
        let mut id = MaybeUninit::uninit();
        let attributes = Attributes::with_stack(STACK)?;
        // SAFETY: `run` gets the box that it expects, once.
        let errno = unsafe { libc::pthread_create(id.as_mut_ptr(), attributes.as_ptr(), run, body.cast()) };
        if errno != 0 {
            // SAFETY: there is no thread that would have it.
            drop(unsafe { Box::from_raw(body) });
            return Err(Errno(errno));
        }
        // SAFETY: the call has set it.
        Ok(Self { id: unsafe { id.assume_init() }, outcome, is_joined: false })
    }

    /// Has the work returned?
    pub fn is_finished(&self) -> bool {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Is this the thread that asks?
    pub fn is_current(&self) -> bool {
        // SAFETY: a plain call. The C libraries of Linux compare the names of threads as numbers or pointers; a name stays while the
        // thread is not joined.
        self.id == unsafe { libc::pthread_self() }
    }

    /// Waits until the thread ends.
    ///
    /// # Errors
    /// The payload of its panic.
    pub fn join(mut self) -> Outcome<T> {
        self.is_joined = true;
        // SAFETY: a thread of this process that nobody joined or detached.
        let errno = unsafe { libc::pthread_join(self.id, core::ptr::null_mut()) };
        let outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A thread that joins itself is the one error left.
        outcome.unwrap_or_else(|| panic!("a thread cannot be joined: {}", std::io::Error::from_raw_os_error(errno)))
    }
}

impl<T> Drop for Thread<T> {
    fn drop(&mut self) {
        if !self.is_joined {
            // SAFETY: a thread of this process that nobody joined or detached.
            unsafe { libc::pthread_detach(self.id) };
        }
    }
}

/// What a thread begins with.
struct Attributes(MaybeUninit<libc::pthread_attr_t>);

impl Attributes {
    #[cfg(not(miri))]
    fn with_stack(bytes: usize) -> Result<Self, Errno> {
        let mut attributes = Self(MaybeUninit::uninit());
        // SAFETY: initialised by the first call, of which `drop` takes care once that has succeeded; a size that is set after.
        match unsafe { libc::pthread_attr_init(attributes.0.as_mut_ptr()) } {
            // SAFETY: as above.
            0 => match unsafe { libc::pthread_attr_setstacksize(attributes.0.as_mut_ptr(), bytes) } {
                0 => Ok(attributes),
                errno => Err(Errno(errno)),
            },
            errno => {
                core::mem::forget(attributes);
                Err(Errno(errno))
            }
        }
    }
    #[cfg(not(miri))]
    fn as_ptr(&self) -> *const libc::pthread_attr_t {
        self.0.as_ptr()
    }

    // Miri has attributes for the standard library alone.
    #[cfg(miri)]
    fn with_stack(_: usize) -> Result<Self, Errno> {
        Ok(Self(MaybeUninit::uninit()))
    }
    #[cfg(miri)]
    fn as_ptr(&self) -> *const libc::pthread_attr_t {
        core::ptr::null()
    }
}

#[cfg(not(miri))]
impl Drop for Attributes {
    fn drop(&mut self) {
        // SAFETY: initialised in `with_stack`.
        unsafe { libc::pthread_attr_destroy(self.0.as_mut_ptr()) };
    }
}

/// Where a thread begins.
extern "C" fn run(body: *mut c_void) -> *mut c_void {
    // SAFETY: `spawn_borrowing` made it, for this call alone.
    let body = unsafe { Box::from_raw(body.cast::<Box<dyn FnOnce() + Send>>()) };
    body();
    core::ptr::null_mut()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::Thread;

    #[test]
    fn a_panic_of_a_thread_is_told_to_the_one_who_joins_it() {
        let thread = Thread::spawn(c"panics", || std::panic::panic_any(7_u32)).unwrap();
        assert_eq!(thread.join().map(|()| 0).unwrap_err().downcast_ref(), Some(&7_u32));
    }

    #[test]
    fn a_thread_knows_itself_and_what_it_was_told_is_dropped_once() {
        let kept = std::sync::Arc::new(());
        let mine = kept.clone();
        let thread = Thread::spawn(c"counts", move || std::sync::Arc::strong_count(&mine)).unwrap();
        assert!(!thread.is_current());
        assert_eq!((thread.join().unwrap(), std::sync::Arc::strong_count(&kept)), (2, 1));
    }
}
