//! Threads that the child of a fork can start, too.
//!
//! A thread of the standard library takes a lock of that library when it begins and when it ends, to record where its stack
//! ends. A fork does not wait for that lock. If another thread holds it during the fork, nobody releases it in the child, and
//! every thread that the child starts through the standard library waits for it for ever. The C library prepares its own locks
//! for a fork, so this module uses its threads. One difference: a stack overflow ends the process without a message.
use crate::Errno;
use core::any::Any;
use core::ffi::{CStr, c_void};
use core::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

/// The stack size of the standard library's threads: shrinkers run on it.
const STACK: usize = 2 << 20;

/// The result of a thread's work, or its panic.
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
// SAFETY: `&Thread` gives access to the thread's id, and to whether the outcome is there, but not to the outcome.
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
    /// Starts a thread whose work may borrow.
    ///
    /// # Safety
    /// The caller joins the thread while everything that the work and its result borrow is still alive.
    pub(crate) unsafe fn spawn_borrowing(name: &'static CStr, work: impl FnOnce() -> T + Send) -> Result<Self, Errno> {
        let outcome = Arc::new(Mutex::new(None));
        let told = outcome.clone();
        let body = move || {
            // SAFETY: this thread, and a name with a terminating zero. A name that is too long is left out.
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
            // SAFETY: no thread was started that would own the box.
            drop(unsafe { Box::from_raw(body) });
            return Err(Errno(errno));
        }
        // SAFETY: the call succeeded, so it wrote the id.
        Ok(Self { id: unsafe { id.assume_init() }, outcome, is_joined: false })
    }

    /// Whether the work has returned.
    pub fn is_finished(&self) -> bool {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Whether it is the calling thread.
    pub fn is_current(&self) -> bool {
        // SAFETY: a plain call. On Linux thread ids are numbers or pointers, which can be compared; an id stays valid until the
        // thread is joined.
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
        // The only error left is a thread that joins itself.
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

/// The attributes of a new thread.
struct Attributes(MaybeUninit<libc::pthread_attr_t>);

impl Attributes {
    #[cfg(not(miri))]
    fn with_stack(bytes: usize) -> Result<Self, Errno> {
        let mut attributes = Self(MaybeUninit::uninit());
        // SAFETY: the first call initialises the attributes, and the second sets a size in them. `drop` destroys them, unless
        // the first call failed.
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

    // Miri supports attributes for the standard library only.
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

/// The entry point of a thread.
extern "C" fn run(body: *mut c_void) -> *mut c_void {
    // SAFETY: `spawn_borrowing` made the box for this call only.
    let body = unsafe { Box::from_raw(body.cast::<Box<dyn FnOnce() + Send>>()) };
    body();
    core::ptr::null_mut()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::Thread;

    #[test]
    fn join_returns_the_panic_of_a_thread() {
        let thread = Thread::spawn(c"panics", || std::panic::panic_any(7_u32)).unwrap();
        assert_eq!(thread.join().map(|()| 0).unwrap_err().downcast_ref(), Some(&7_u32));
    }

    #[test]
    fn a_thread_is_told_from_its_parent_and_drops_its_work_once() {
        let kept = std::sync::Arc::new(());
        let mine = kept.clone();
        let thread = Thread::spawn(c"counts", move || std::sync::Arc::strong_count(&mine)).unwrap();
        assert!(!thread.is_current());
        assert_eq!((thread.join().unwrap(), std::sync::Arc::strong_count(&kept)), (2, 1));
    }
}
