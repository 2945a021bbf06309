//! Host memory for a GPU, by the CUDA driver API of `cuda.h`. The driver (`libcuda.so.1`) is loaded at run time; building needs
//! nothing of it.
use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::ops::Range;
use core::ptr;

/// `CU_MEMHOSTREGISTER_PORTABLE`: for all contexts.
const PORTABLE: c_uint = 1;
/// `CU_MEMHOSTREGISTER_DEVICEMAP`: with an address on the GPU.
const DEVICE_MAP: c_uint = 2;

/// A CUcontext.
type Context = *mut c_void;
/// A CUresult; 0 is success.
type Code = c_int;

/// Why there is no GPU, or what the driver refused.
///
/// ```
/// let why = pagemill_os::device::cuda::CudaError::NoDriver("no such file".to_owned());
/// assert_eq!(why.to_string(), "libcuda.so.1 cannot be loaded (no such file)");
/// ```
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CudaError {
    /// There is no driver, or it lacks a function: the loader's message.
    #[error("libcuda.so.1 cannot be loaded ({0})")]
    NoDriver(String),
    /// The driver finds no GPU.
    #[error("the CUDA driver finds {found} GPUs, and number {wanted} was asked for")]
    NoDevice {
        /// The number of GPUs.
        found: i32,
        /// The number of the GPU that was asked for, from 0.
        wanted: i32,
    },
    /// A call of the driver failed.
    #[error("{call}: {text} (CUDA error {code})")]
    Call {
        /// The name of the call.
        call: &'static str,
        /// Its CUresult.
        code: i32,
        /// The driver's description.
        text: String,
    },
}

/// The driver's functions, by their names without versions.
macro_rules! functions {
    ($($name:ident = $symbol:literal ($($argument:ty),*);)*) => {
        #[derive(Clone, Copy)]
        struct Functions { $($name: unsafe extern "C" fn($($argument),*) -> Code,)* }
        impl Functions {
            fn load() -> Result<Self, CudaError> {
                // SAFETY: the name ends in a zero. The driver's library has no initialiser that affects other code, and is
                // never unloaded.
                let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
                if library.is_null() {
                    return Err(CudaError::NoDriver(said()));
                }
                // SAFETY: a library that is open, and the type that `cuda.h` declares for that symbol.
                Ok(Self { $($name: unsafe { core::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> Code>(
                    symbol(library, $symbol)?,
                ) },)* })
            }
        }
    };
}

functions! {
    init = c"cuInit" (c_uint);
    device_count = c"cuDeviceGetCount" (*mut c_int);
    device = c"cuDeviceGet" (*mut c_int, c_int);
    retain_primary = c"cuDevicePrimaryCtxRetain" (*mut Context, c_int);
    release_primary = c"cuDevicePrimaryCtxRelease_v2" (c_int);
    current = c"cuCtxGetCurrent" (*mut Context);
    push = c"cuCtxPushCurrent_v2" (Context);
    pop = c"cuCtxPopCurrent_v2" (*mut Context);
    register = c"cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    device_pointer = c"cuMemHostGetDevicePointer_v2" (*mut u64, *mut c_void, c_uint);
    unregister = c"cuMemHostUnregister" (*mut c_void);
    error_string = c"cuGetErrorString" (Code, *mut *const c_char);
}

/// The loader's last message.
fn said() -> String {
    // SAFETY: null, or a text that ends in a zero and lives until the loader's next call on this thread.
    unsafe {
        match libc::dlerror() {
            text if text.is_null() => "the loader does not say why".to_owned(),
            text => CStr::from_ptr(text).to_string_lossy().into_owned(),
        }
    }
}

/// # Safety
/// The library is open.
unsafe fn symbol(library: *mut c_void, name: &CStr) -> Result<*mut c_void, CudaError> {
    // SAFETY: as the caller promises.
    match unsafe { libc::dlsym(library, name.as_ptr()) } {
        address if address.is_null() => Err(CudaError::NoDriver(said())),
        address => Ok(address),
    }
}

/// A context of the driver, to register host memory with.
///
/// ```
/// match pagemill_os::device::cuda::Cuda::open(0) {
///     Ok(_) => println!("there is a GPU"),
///     Err(why) => println!("{why}"),
/// }
/// ```
#[derive(Debug)]
pub struct Cuda {
    functions: Functions,
    context: Context,
    /// The GPU whose primary context this must release.
    primary: Option<c_int>,
}

// SAFETY: a context may be current on any thread, and on several at once; the driver's functions do their own locking.
unsafe impl Send for Cuda {}
// SAFETY: as for Send.
unsafe impl Sync for Cuda {}

impl core::fmt::Debug for Functions {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("libcuda.so.1")
    }
}

impl Cuda {
    /// Loads the driver. Takes the context that is current on this thread; where there is none, the primary one of the GPU with
    /// this number, which is what the runtime (`libcudart`) uses.
    ///
    /// # Errors
    /// [`CudaError`]: there is no driver or no GPU, or the driver refused.
    pub fn open(number: i32) -> Result<Self, CudaError> {
        Self::with(Functions::load()?, number)
    }

    fn with(functions: Functions, number: i32) -> Result<Self, CudaError> {
        let (mut found, mut device, mut context) = (0, 0, ptr::null_mut());
        // SAFETY: each writes one value, to the variable that its argument points to.
        unsafe {
            functions.check("cuInit", (functions.init)(0))?;
            functions.check("cuCtxGetCurrent", (functions.current)(&raw mut context))?;
            if !context.is_null() {
                return Ok(Self { functions, context, primary: None });
            }
            functions.check("cuDeviceGetCount", (functions.device_count)(&raw mut found))?;
            if !(0..found).contains(&number) {
                return Err(CudaError::NoDevice { found, wanted: number });
            }
            functions.check("cuDeviceGet", (functions.device)(&raw mut device, number))?;
            functions.check("cuDevicePrimaryCtxRetain", (functions.retain_primary)(&raw mut context, device))?;
        }
        Ok(Self { functions, context, primary: Some(device) })
    }

    /// Makes `memory` reachable for GPUs. The driver commits it and keeps it in place until it is
    /// [unregistered](Self::unregister). Returns the address of the first byte on the GPUs; the other bytes follow.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Safety
    /// Until `memory` is unregistered, its contents may change as the kernels and copies on the GPUs dictate, and the caller
    /// keeps it mapped.
    pub unsafe fn register(&self, memory: Range<usize>) -> Result<u64, CudaError> {
        let start = ptr::with_exposed_provenance_mut(memory.start);
        self.in_context(|cuda| {
            // SAFETY: as the caller promises; the address is written to a variable.
            unsafe {
                let flags = PORTABLE | DEVICE_MAP;
                cuda.check("cuMemHostRegister", (cuda.register)(start, memory.len(), flags))?;
                let mut found = 0;
                let pointer = (cuda.device_pointer)(&raw mut found, start, 0);
                if let Err(why) = cuda.check("cuMemHostGetDevicePointer", pointer) {
                    let _ = (cuda.unregister)(start);
                    return Err(why);
                }
                Ok(found)
            }
        })
    }

    /// Makes memory that was registered at `start` unreachable for GPUs again.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn unregister(&self, start: usize) -> Result<(), CudaError> {
        let start = ptr::with_exposed_provenance_mut(start);
        // SAFETY: the driver checks whether memory is registered at that address.
        self.in_context(|cuda| unsafe { cuda.check("cuMemHostUnregister", (cuda.unregister)(start)) })
    }

    /// Calls `work` with this context as the thread's current one, and restores the previous one afterwards.
    fn in_context<T>(&self, work: impl FnOnce(&Functions) -> Result<T, CudaError>) -> Result<T, CudaError> {
        let cuda = &self.functions;
        // SAFETY: a context that lives; what is popped is written to a variable.
        unsafe {
            cuda.check("cuCtxPushCurrent", (cuda.push)(self.context))?;
            let done = work(cuda);
            let mut popped = ptr::null_mut();
            let pop = cuda.check("cuCtxPopCurrent", (cuda.pop)(&raw mut popped));
            let done = done?;
            pop.map(|()| done)
        }
    }
}

impl Functions {
    fn check(&self, call: &'static str, code: Code) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: it writes a pointer to a static text that ends in a zero, or null for an unknown code.
        let text = unsafe {
            match (self.error_string)(code, &raw mut text) {
                0 if !text.is_null() => CStr::from_ptr(text).to_string_lossy().into_owned(),
                _ => "an error without a description".to_owned(),
            }
        };
        Err(CudaError::Call { call, code, text })
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if let Some(device) = self.primary {
            // SAFETY: it was retained once.
            let _ = unsafe { (self.functions.release_primary)(device) };
        }
    }
}

/// Without a GPU: a fake driver that keeps a diary of its calls. `pagemill` tests a real one, where there is one.
#[cfg(test)]
mod tests {
    use super::{Code, Context, Cuda, CudaError, Functions};
    use core::ffi::{c_char, c_int, c_uint, c_void};
    use std::cell::{Cell, RefCell};

    thread_local! {
        static DIARY: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
        static FAILS: Cell<&'static str> = const { Cell::new("") };
        static CURRENT: Cell<usize> = const { Cell::new(0) };
    }
    fn note(what: &'static str, of: usize) -> Code {
        DIARY.with_borrow_mut(|diary| diary.push(format!("{what} {of:x}")));
        if FAILS.get() == what { 712 } else { 0 }
    }
    fn diary() -> Vec<String> {
        DIARY.take()
    }

    fn fake() -> Functions {
        unsafe extern "C" fn init(flags: c_uint) -> Code {
            note("init", flags as usize)
        }
        unsafe extern "C" fn device_count(n: *mut c_int) -> Code {
            // SAFETY: the caller's variable, as in each of these.
            unsafe { *n = 2 };
            0
        }
        unsafe extern "C" fn device(device: *mut c_int, number: c_int) -> Code {
            // SAFETY: as above.
            unsafe { *device = number + 0x70 };
            0
        }
        unsafe extern "C" fn retain_primary(context: *mut Context, device: c_int) -> Code {
            // SAFETY: as above.
            unsafe { *context = core::ptr::without_provenance_mut(0xc0) };
            note("retain", device as usize)
        }
        unsafe extern "C" fn release_primary(device: c_int) -> Code {
            note("release", device as usize)
        }
        unsafe extern "C" fn current(context: *mut Context) -> Code {
            // SAFETY: as above.
            unsafe { *context = core::ptr::without_provenance_mut(CURRENT.get()) };
            0
        }
        unsafe extern "C" fn push(context: Context) -> Code {
            note("push", context.addr())
        }
        unsafe extern "C" fn pop(_: *mut Context) -> Code {
            note("pop", 0)
        }
        unsafe extern "C" fn register(start: *mut c_void, len: usize, flags: c_uint) -> Code {
            assert_eq!(flags, 3, "for all contexts, and with an address");
            note("register", start.addr() + len)
        }
        unsafe extern "C" fn device_pointer(found: *mut u64, start: *mut c_void, flags: c_uint) -> Code {
            assert_eq!(flags, 0);
            // SAFETY: as above.
            unsafe { *found = start.addr() as u64 + 0x7000_0000 };
            note("pointer", start.addr())
        }
        unsafe extern "C" fn unregister(start: *mut c_void) -> Code {
            note("unregister", start.addr())
        }
        unsafe extern "C" fn error_string(code: Code, text: *mut *const c_char) -> Code {
            if code != 712 {
                return 1;
            }
            // SAFETY: as above.
            unsafe { *text = c"part or all of the requested memory range is already mapped".as_ptr() };
            0
        }
        Functions {
            init,
            device_count,
            device,
            retain_primary,
            release_primary,
            current,
            push,
            pop,
            register,
            device_pointer,
            unregister,
            error_string,
        }
    }

    #[test]
    fn memory_is_registered_in_the_primary_context_and_has_the_drivers_address() {
        let cuda = Cuda::with(fake(), 1).unwrap();
        // SAFETY: nobody goes there.
        assert_eq!(unsafe { cuda.register(0x5000..0x9000) }, Ok(0x7000_5000));
        cuda.unregister(0x5000).unwrap();
        drop(cuda);
        let expected = ["init 0", "retain 71", "push c0", "register 9000", "pointer 5000", "pop 0"];
        assert_eq!(diary(), [&expected[..], &["push c0", "unregister 5000", "pop 0", "release 71"]].concat());
        assert_eq!(Cuda::with(fake(), 2).unwrap_err(), CudaError::NoDevice { found: 2, wanted: 2 });
    }

    #[test]
    fn a_current_context_is_used_and_not_released() {
        CURRENT.set(0xab);
        let cuda = Cuda::with(fake(), 7).unwrap();
        cuda.unregister(0x1000).unwrap();
        drop(cuda);
        assert_eq!(diary(), ["init 0", "push ab", "unregister 1000", "pop 0"]);
    }

    #[test]
    fn a_failed_registration_is_undone() {
        let cuda = Cuda::with(fake(), 0).unwrap();
        diary();
        FAILS.set("pointer");
        // SAFETY: nobody goes there.
        let why = unsafe { cuda.register(0x5000..0x9000) }.unwrap_err();
        assert_eq!(diary(), ["push c0", "register 9000", "pointer 5000", "unregister 5000", "pop 0"]);
        let expected =
            "cuMemHostGetDevicePointer: part or all of the requested memory range is already mapped (CUDA error 712)";
        assert_eq!(why.to_string(), expected);
        FAILS.set("register");
        // SAFETY: nobody goes there.
        assert!(unsafe { cuda.register(0x5000..0x9000) }.is_err());
        assert_eq!(diary(), ["push c0", "register 9000", "pop 0"]);
        FAILS.set("push");
        assert!(cuda.unregister(0x5000).is_err());
        assert_eq!(diary(), ["push c0"]);
    }
}
