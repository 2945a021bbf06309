
/// Which mutant runs: `PAGEMILL_MUTANT`, read before anything else does. `PAGEMILL_MUTANTS_SEEN` names a file with a byte for
/// each mutant, which becomes 1 when a process comes to it.
#[doc(hidden)]
pub mod mutant_switch {
    use core::ffi::{c_char, c_int, c_long, c_void};
    use core::ptr::null_mut;
    use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU8, Ordering::Relaxed};

    const SEEN: usize = 1 << 16;
    static ON: AtomicU32 = AtomicU32::new(0);
    static SEEN_AT: AtomicPtr<AtomicU8> = AtomicPtr::new(null_mut());

    unsafe extern "C" {
        fn getenv(name: *const c_char) -> *const c_char;
        fn atoi(text: *const c_char) -> c_int;
        fn open(path: *const c_char, flags: c_int) -> c_int;
        fn mmap(at: *mut c_void, len: usize, prot: c_int, flags: c_int, file: c_int, from: c_long) -> *mut c_void;
        fn close(file: c_int) -> c_int;
    }

    #[used]
    #[unsafe(link_section = ".init_array")]
    static READ: extern "C" fn() = read;

    extern "C" fn read() {
        const READ_AND_WRITE: c_int = 2;
        const SHARED: c_int = 1;
        // SAFETY: no thread but this one runs yet; what `getenv` returns is null or a string that stays; the mapping is new,
        // shared with the file, and stays too.
        unsafe {
            let on = getenv(c"PAGEMILL_MUTANT".as_ptr());
            if !on.is_null() {
                ON.store(atoi(on) as u32, Relaxed);
            }
            let path = getenv(c"PAGEMILL_MUTANTS_SEEN".as_ptr());
            if !path.is_null() {
                let file = open(path, READ_AND_WRITE);
                let at = mmap(null_mut(), SEEN, 1 | 2, SHARED, file, 0);
                close(file);
                if at as isize != -1 {
                    SEEN_AT.store(at.cast(), Relaxed);
                }
            }
        }
    }

    /// Is it this mutant that runs?
    #[inline]
    pub fn mutant(number: u32) -> bool {
        // SAFETY: null, or a mapping of `SEEN` bytes, more than there are mutants.
        if let Some(seen) = unsafe { SEEN_AT.load(Relaxed).as_ref() } {
            // SAFETY: as above.
            unsafe { (*core::ptr::from_ref(seen).add(number as usize)).store(1, Relaxed) };
        }
        ON.load(Relaxed) == number
    }
}
#[doc(hidden)]
pub use mutant_switch::mutant;
