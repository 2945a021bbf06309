//! Handles: pointers that a C program holds for anything but pages, blocks and fragments.
//!
//! Each begins with a mark that says its type, and that it is open. The memory of a closed handle is never unmapped: it serves
//! the next handle of its type. So a stale handle can be read, and is refused until its memory is handed out again.
//!
//! No lock is taken, so the child of a fork goes on with all handles.
use crate::error::{Error, code};
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicUsize};

/// A type of handle, as C declares it: nothing of it is ever read.
pub(crate) trait Kind: Sized + 'static {
    /// The value behind a handle.
    type Value: Send;
    /// The first word of an open handle: a number that no other type has.
    const MARK: usize;
    /// Closed handles of this type.
    fn closed() -> &'static Closed<Self>;
}

/// The memory behind a handle's pointer.
#[repr(C)]
struct Handle<K: Kind> {
    /// [`Kind::MARK`], or 0 when it is closed.
    mark: AtomicUsize,
    /// The next closed handle.
    next: AtomicPtr<Self>,
    value: UnsafeCell<MaybeUninit<K::Value>>,
}

/// A stack of closed handles.
pub(crate) struct Closed<K: Kind>(AtomicPtr<Handle<K>>);

impl<K: Kind> Closed<K> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    /// Puts a handle on the stack.
    fn push(&self, handle: *mut Handle<K>) {
        let link = |head| {
            // SAFETY: handles are never freed, and this one is the thread's.
            unsafe { (*handle).next.store(head, Relaxed) };
            Some(handle)
        };
        // Release pairs with the Acquire in `take`.
        _ = self.0.fetch_update(Release, Relaxed, link);
    }

    /// Takes one off. The whole stack is taken and the rest put back, so that no thread follows a link that another changes.
    fn take(&self) -> Option<*mut Handle<K>> {
        // Acquire pairs with the Release in `push` and below.
        let first = self.0.swap(null_mut(), Acquire);
        // SAFETY: null, or a handle, which is never freed.
        let mut rest = unsafe { first.as_ref() }?.next.swap(null_mut(), Relaxed);
        while !rest.is_null() && self.0.compare_exchange(null_mut(), rest, Release, Relaxed).is_err() {
            // Those that were closed meanwhile are few. They come before the rest.
            let newer = self.0.swap(null_mut(), Acquire);
            let mut last = newer;
            // SAFETY: null, or handles, which are never freed; these are the thread's.
            while let Some(handle) = unsafe { last.as_ref() } {
                last = handle.next.load(Relaxed);
                if last.is_null() {
                    handle.next.store(rest, Relaxed);
                    rest = newer;
                }
            }
        }
        Some(first)
    }
}

/// Opens a handle.
pub(crate) fn open<K: Kind>(value: K::Value) -> *mut K {
    let handle = K::closed().take().unwrap_or_else(|| {
        let value = UnsafeCell::new(MaybeUninit::uninit());
        Box::into_raw(Box::new(Handle { mark: AtomicUsize::new(0), next: AtomicPtr::default(), value }))
    });
    // SAFETY: the handle is closed and off the stack, so nobody else uses it.
    unsafe {
        (*(*handle).value.get()).write(value);
        // Release pairs with the Acquire in `close`.
        (*handle).mark.store(K::MARK, Release);
    }
    handle.cast()
}

/// Opens a handle for what `make` makes, and writes it where the caller wants it: null if there is an error.
///
/// # Safety
/// Null, or a place for a pointer.
pub(crate) unsafe fn make<K: Kind>(place: *mut *mut K, make: impl FnOnce() -> Result<K::Value, Error>) -> Error {
    // SAFETY: the caller says so.
    let Some(place) = (unsafe { place.as_mut() }) else { return Error::Argument };
    *place = null_mut();
    code(make().map(|value| *place = open(value)))
}

/// The value behind an open handle.
///
/// # Safety
/// Null, or a pointer that `open` returned, of whatever type; and the handle is not closed meanwhile.
#[inline]
pub(crate) unsafe fn get<'a, K: Kind>(handle: *const K) -> Result<&'a K::Value, Error> {
    // SAFETY: the caller says that it is null or a handle, which is never freed.
    let Some(this) = (unsafe { handle.cast::<Handle<K>>().as_ref() }) else { return Err(Error::Argument) };
    if this.mark.load(Relaxed) != K::MARK {
        return Err(Error::Handle);
    }
    // SAFETY: it is open, so it has a value, of this type.
    Ok(unsafe { (*this.value.get()).assume_init_ref() })
}

/// The same, for changing.
///
/// # Safety
/// As for `get`, and nobody else uses the handle meanwhile.
pub(crate) unsafe fn get_mut<'a, K: Kind>(handle: *mut K) -> Result<&'a mut K::Value, Error> {
    // SAFETY: the caller says so.
    unsafe { get(handle)? };
    // SAFETY: `get` found a value there, and nobody else uses it.
    Ok(unsafe { (*(*handle.cast::<Handle<K>>()).value.get()).assume_init_mut() })
}

/// Closes a handle and returns its value.
///
/// # Safety
/// As for `get_mut`, but that another thread may close it at the same moment: one of the two is refused.
pub(crate) unsafe fn close<K: Kind>(handle: *mut K) -> Result<K::Value, Error> {
    let handle = handle.cast::<Handle<K>>();
    // SAFETY: the caller says that it is null or a handle, which is never freed.
    let Some(this) = (unsafe { handle.as_ref() }) else { return Err(Error::Argument) };
    // Acquire pairs with the Release in `open`.
    if this.mark.compare_exchange(K::MARK, 0, AcqRel, Relaxed).is_err() {
        return Err(Error::Handle);
    }
    // SAFETY: it was open, and this call alone closed it.
    let value = unsafe { (*this.value.get()).assume_init_read() };
    K::closed().push(handle);
    Ok(value)
}

/// Gives a type of handle its value, its mark and its stack of closed handles.
macro_rules! handle {
    ($kind:ty, $value:ty, $mark:literal) => {
        impl $crate::handle::Kind for $kind {
            type Value = $value;
            const MARK: usize = usize::from_ne_bytes(*$mark);
            fn closed() -> &'static $crate::handle::Closed<Self> {
                static CLOSED: $crate::handle::Closed<$kind> = $crate::handle::Closed::new();
                &CLOSED
            }
        }
    };
}
pub(crate) use handle;

#[cfg(test)]
mod tests {
    use super::*;

    struct One;
    struct Other;
    handle!(One, u32, b"test one");
    handle!(Other, u32, b"test two");

    #[test]
    fn a_closed_handle_is_refused_until_its_memory_is_handed_out_again() {
        let (first, second) = (open::<One>(1), open::<One>(2));
        // SAFETY: both are handles, used by this thread alone.
        unsafe {
            assert_eq!((get(first), get_mut(second)), (Ok(&1), Ok(&mut 2)));
            assert_eq!((close(first), close(first), get(first)), (Ok(1), Err(Error::Handle), Err(Error::Handle)));
            assert_eq!(get(second), Ok(&2));
            assert_eq!((open::<One>(3), get(first)), (first, Ok(&3)));
        }
    }

    #[test]
    fn null_and_a_handle_of_another_type_are_refused() {
        let other = open::<Other>(1);
        // SAFETY: null, or a handle, used by this thread alone.
        unsafe {
            assert_eq!(
                (get(null_mut::<One>()), close(null_mut::<One>())),
                (Err(Error::Argument), Err(Error::Argument))
            );
            assert_eq!(
                (get(other.cast::<One>()), close(other.cast::<One>())),
                (Err(Error::Handle), Err(Error::Handle))
            );
            assert_eq!(close(other), Ok(1));
        }
    }

    #[test]
    fn every_closed_handle_is_handed_out_again() {
        struct Third;
        handle!(Third, u32, b"testthre");
        let mut before: Vec<_> = (0..100).map(open::<Third>).collect();
        before.iter().for_each(|handle| _ = handle.expose_provenance());
        std::thread::scope(|scope| {
            for half in before.chunks(50).map(|half| half.iter().map(|handle| handle.addr()).collect::<Vec<_>>()) {
                scope.spawn(move || {
                    for addr in half {
                        // SAFETY: handles, half of them this thread's.
                        assert!(unsafe { close(core::ptr::with_exposed_provenance_mut::<Third>(addr)) }.is_ok());
                        // SAFETY: as above.
                        assert!(unsafe { close(open::<Third>(0)) }.is_ok());
                    }
                });
            }
        });
        // Threads that find the stack empty make handles of their own.
        let mut after: Vec<_> = core::iter::repeat_with(|| open::<Third>(0)).take(400).collect();
        before.sort_unstable();
        after.sort_unstable();
        assert!(before.iter().all(|handle| after.binary_search(handle).is_ok()));
    }

    #[test]
    fn threads_that_open_and_close_share_no_handle() {
        let work = |id: u32| {
            for round in 0..10_000 {
                let handle = open::<Other>(id << 16 | round);
                // SAFETY: a handle of this thread's.
                assert_eq!(unsafe { close(handle) }, Ok(id << 16 | round));
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|id| _ = scope.spawn(move || work(id))));
    }
}
