//! One thread-local word without an initialiser, so that a signal handler may be the first to touch it (C2.5).
//!
//! On x86-64 it uses the initial-exec model (ELF Handling For Thread-Local Storage, 4.4.2): the word lies in the thread's
//! static block, which exists as soon as the thread does, also for a library that is loaded at run time. `thread_local!` does
//! the same in a program; in such a library it allocates the block at the first access, and pays for a call at each access.

/// The calling thread's word, in which Pagemill keeps the zone that the thread used last; null at first.
///
/// ```
/// static HERE: u8 = 0;
/// assert!(pagemill_os::last_zone().is_null());
/// // SAFETY: nobody else in this program uses it.
/// unsafe { pagemill_os::set_last_zone((&raw const HERE).cast()) };
/// assert_eq!(pagemill_os::last_zone(), (&raw const HERE).cast());
/// assert!(std::thread::spawn(|| pagemill_os::last_zone().is_null()).join().unwrap());
/// ```
#[inline]
pub fn last_zone() -> *const () {
    word::get()
}

/// Sets the calling thread's [`last_zone`].
///
/// # Safety
/// There is one word, and Pagemill's allocators dereference it without a check. So only they may set it in a program that has
/// any.
///
/// ```
/// // SAFETY: as at first.
/// unsafe { pagemill_os::set_last_zone(std::ptr::null()) };
/// assert!(pagemill_os::last_zone().is_null());
/// ```
#[inline]
pub unsafe fn set_last_zone(value: *const ()) {
    word::set(value);
}

#[cfg(all(target_os = "linux", target_arch = "x86_64", not(miri)))]
mod word {
    use core::arch::{asm, global_asm};

    /// With the version: two versions may be linked into one program.
    macro_rules! name {
        () => {
            concat!("pagemill_mine_", env!("CARGO_PKG_VERSION"))
        };
    }

    global_asm!(
        ".pushsection .tbss.pagemill_mine, \"awT\", @nobits",
        concat!(".globl ", name!()),
        concat!(".hidden ", name!()),
        concat!(".type ", name!(), ", @tls_object"),
        concat!(".size ", name!(), ", 8"),
        ".balign 8",
        concat!(name!(), ":"),
        ".zero 8",
        ".popsection",
    );

    #[inline]
    pub(super) fn get() -> *const () {
        let value;
        // SAFETY: reads this thread's word, which `set` alone writes.
        unsafe {
            asm!(concat!("mov {v}, qword ptr [rip + ", name!(), "@GOTTPOFF]"), "mov {v}, qword ptr fs:[{v}]",
                v = out(reg) value, options(pure, readonly, nostack, preserves_flags));
        }
        value
    }

    #[inline]
    pub(super) fn set(value: *const ()) {
        // SAFETY: writes this thread's word, with one store: a signal handler sees the old value or the new one.
        unsafe {
            asm!(concat!("mov {t}, qword ptr [rip + ", name!(), "@GOTTPOFF]"), "mov qword ptr fs:[{t}], {v}",
                t = out(reg) _, v = in(reg) value, options(nostack, preserves_flags));
        }
    }
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64", not(miri))))]
mod word {
    use core::{cell::Cell, ptr};

    thread_local! {
        static WORD: Cell<*const ()> = const { Cell::new(ptr::null()) };
    }

    #[inline]
    pub(super) fn get() -> *const () {
        WORD.get()
    }

    #[inline]
    pub(super) fn set(value: *const ()) {
        WORD.set(value);
    }
}
