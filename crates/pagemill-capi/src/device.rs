//! Devices: an allocator's memory, with the addresses by which a device reaches it.
use crate::allocator::Allocator;
use crate::bulk;
use crate::error::{Error, code};
use crate::handle::{self, handle};
use crate::sized::{self, BeginsWithSize};
use crate::text;
use core::ffi::{c_char, c_int, c_void};
use core::ops::Range;
use core::ptr::null_mut;
use pagemill::{
    DeviceAddr, DeviceError, DeviceMap, FixedBuffers, Identity, Mapped, PAGE_SIZE, Physical, Umem, VfioMap,
};
use std::os::fd::BorrowedFd;

/// An allocator's memory as a device sees it: each byte has a device address. The type is opaque. Any thread may use a device.
///
/// Every arena of the allocator is mapped for the device as a whole, once: when the device is made, or, if the arena is added later, when an
/// address in it is first looked up. Its memory does not go back to the system then.
///
/// The child of a `fork` gets `PAGEMILL_ERROR_FORKED` from each call that looks up an address; what it releases stays as it is for the
/// parent.
pub struct Device;
handle!(Device, Mapping, b"pm devic");

pub(crate) struct Mapping {
    pub(crate) device: pagemill::Device,
    /// The table of a device of io_uring.
    buffers: Option<FixedBuffers>,
}

/// Device addresses are the process's own: for simulated devices and for trials.
pub const PAGEMILL_DEVICE_IDENTITY: u32 = 0;
/// Physical addresses. It needs CAP_SYS_ADMIN, and locks the memory. The kernel may still move pages that are not of reserved huge pages, and
/// a fork moves all: use it only where nothing does, and VFIO where there is an IOMMU.
pub const PAGEMILL_DEVICE_PHYSICAL: u32 = 1;
/// Addresses of the IOMMU of a VFIO container (type 1), `fd`, which has its groups and its IOMMU already.
pub const PAGEMILL_DEVICE_VFIO: u32 = 2;
/// Offsets in the UMEM of an AF_XDP socket, `fd`: the allocator has one arena, which becomes the UMEM.
pub const PAGEMILL_DEVICE_UMEM: u32 = 3;
/// Registered buffers of an io_uring, `fd`, which has none yet. The upper bits of a device address, from bit 30 on, are the `buf_index` of
/// requests; their `addr` is the pointer. An arena has a buffer for each GiB, and no request may reach from one buffer to the next: no page
/// does, nor a block of a pool.
pub const PAGEMILL_DEVICE_FIXED_BUFFERS: u32 = 4;
/// Whatever the functions `map` and `unmap` say: a GPU's addresses, for example.
pub const PAGEMILL_DEVICE_FUNCTIONS: u32 = 5;

/// How a device gets its addresses. Set `size` to `sizeof(struct pagemill_device_options)`, `kind`, and what that kind needs; the rest is 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DeviceOptions {
    /// The size of this structure, in bytes.
    pub size: usize,
    /// One of `PAGEMILL_DEVICE_IDENTITY` to `PAGEMILL_DEVICE_FUNCTIONS`.
    pub kind: u32,
    /// The descriptor of VFIO's container, of the socket or of the io_uring. It is duplicated: close yours when you like.
    pub fd: c_int,
    /// VFIO: device addresses have at most so many bits. 0: as the IOMMU allows.
    pub address_bits: u32,
    /// UMEM: the size of a chunk, 2048 or 4096 bytes.
    pub chunk: u32,
    /// UMEM: the bytes at the beginning of a chunk that stay free.
    pub headroom: u32,
    /// Registered buffers: how many the table has room for, up to 16384. 0: 1024.
    pub entries: u32,
    /// Makes memory known to the device, `pages` pages of 4096 bytes from `memory` on, which is one arena. It writes the device address of
    /// the first byte and returns 1, if the others follow it; or writes the address of each page, and returns `pages`. 0: the device refuses.
    ///
    /// It may not call this device's functions, may be called by any thread, and returns: no exception, no longjmp.
    pub map: Option<
        unsafe extern "C" fn(memory: *mut c_void, pages: usize, addresses: *mut u64, user: *mut c_void) -> usize,
    >,
    /// Undoes `map`, of which it gets the `n` addresses. When it returns, the device reaches the memory no more. It is called when the device
    /// and all pools over it are gone. As `map` otherwise.
    pub unmap: Option<
        unsafe extern "C" fn(memory: *mut c_void, pages: usize, addresses: *const u64, n: usize, user: *mut c_void),
    >,
    /// Whether one transfer may reach from the first device address to the last: 1 or 0. 1 for memory of up to 1 GiB that is aligned to its
    /// size. May be null: it always may. As `map` otherwise.
    pub is_one_piece: Option<unsafe extern "C" fn(first: u64, last: u64, user: *mut c_void) -> c_int>,
    /// Passed to the functions.
    pub user: *mut c_void,
    /// Gets the words of an error, with what to do, if it is not null: up to `message_size` bytes, with the 0 at the end.
    pub message: *mut c_char,
    /// The bytes at `message`.
    pub message_size: usize,
}
// SAFETY: integers, pointers, and functions that may be null, the size first.
unsafe impl BeginsWithSize for DeviceOptions {}

/// A map by the program's functions.
struct Functions(DeviceOptions);

// SAFETY: the C program promises that any thread may call the functions with their `user`, at `DeviceOptions::map`.
unsafe impl Send for Functions {}
// SAFETY: as above.
unsafe impl Sync for Functions {}

impl DeviceMap for Functions {
    unsafe fn map(&self, memory: Range<usize>) -> Result<Mapped, DeviceError> {
        let refused = DeviceError::Unavailable {
            what: "the program's function maps no memory for this device".to_owned(),
            next: "see what that function needs",
        };
        let Some(map) = self.0.map else { return Err(refused) };
        let (start, pages) = parts(&memory);
        // Of what the function does not write nothing is committed.
        let mut addresses = vec![0; pages];
        // SAFETY: the program's own function, with room for as many addresses as it may write.
        let n = unsafe { map(start, pages, addresses.as_mut_ptr(), self.0.user) };
        if n > pages {
            return Err(DeviceError::Miscounted { given: n, pages });
        }
        addresses.truncate(n);
        match *addresses {
            [] => Err(refused),
            [first] => Ok(Mapped::Linear(DeviceAddr::new(first))),
            // The library refuses any other number, and unmaps.
            _ => Ok(Mapped::Pages(addresses.into_iter().map(DeviceAddr::new).collect())),
        }
    }

    fn unmap(&self, memory: Range<usize>, mapped: &Mapped) {
        let addresses = match mapped {
            Mapped::Linear(first) => core::slice::from_ref(first),
            Mapped::Pages(pages) => pages,
            _ => unreachable!("`map` gives no others: {mapped:?}"),
        };
        let addresses: Vec<u64> = addresses.iter().map(|address| address.get()).collect();
        let (start, pages) = parts(&memory);
        if let Some(unmap) = self.0.unmap {
            // SAFETY: the program's own function, with what `map` wrote.
            unsafe { unmap(start, pages, addresses.as_ptr(), addresses.len(), self.0.user) };
        }
    }

    fn is_one_piece(&self, first: DeviceAddr, last: DeviceAddr) -> bool {
        // SAFETY: the program's own function.
        self.0.is_one_piece.is_none_or(|is| unsafe { is(first.get(), last.get(), self.0.user) } != 0)
    }
}

fn parts(memory: &Range<usize>) -> (*mut c_void, usize) {
    (core::ptr::with_exposed_provenance_mut(memory.start), memory.len() / PAGE_SIZE)
}

/// An error of C's, with the words of the library's error if it had any.
struct Refused(Error, Option<DeviceError>);

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        Self(error, None)
    }
}

impl From<DeviceError> for Refused {
    fn from(why: DeviceError) -> Self {
        Self(why.clone().into(), Some(why))
    }
}

/// A descriptor of the caller's.
fn descriptor<'a>(fd: c_int) -> Result<BorrowedFd<'a>, Error> {
    if fd < 0 {
        return Err(Error::Argument);
    }
    // SAFETY: no negative number. It is used during the call alone, and a descriptor that is not open is refused by the system.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

fn build(allocator: &pagemill::Allocator, options: &DeviceOptions) -> Result<Mapping, Refused> {
    let fd = || descriptor(options.fd);
    let mut buffers = None;
    let device = match options.kind {
        PAGEMILL_DEVICE_IDENTITY => pagemill::Device::new(allocator, Identity),
        PAGEMILL_DEVICE_PHYSICAL => pagemill::Device::new(allocator, Physical::new()),
        PAGEMILL_DEVICE_VFIO => {
            let map = VfioMap::new(fd()?)?;
            let bits = options.address_bits;
            pagemill::Device::new(allocator, if bits == 0 { map } else { map.with_address_bits(bits) })
        }
        PAGEMILL_DEVICE_UMEM => pagemill::Device::new(allocator, Umem::new(fd()?, options.chunk, options.headroom)?),
        PAGEMILL_DEVICE_FIXED_BUFFERS => {
            let table = match options.entries {
                0 => FixedBuffers::new(fd()?)?,
                entries => FixedBuffers::with_entries(fd()?, entries as usize)?,
            };
            buffers = Some(table.clone());
            pagemill::Device::new(allocator, table)
        }
        PAGEMILL_DEVICE_FUNCTIONS => {
            options.map.and(options.unmap).ok_or(Error::Argument)?;
            pagemill::Device::new(allocator, Functions(*options))
        }
        _ => return Err(Error::Invalid.into()),
    };
    Ok(Mapping { device: device?, buffers })
}

/// Makes a device over an allocator, and maps the allocator's arenas for it. `*device` gets the handle, or null.
///
/// Errors: `PAGEMILL_ERROR_SYSTEM` if the system refuses, `PAGEMILL_ERROR_DEVICE` if this machine or the device lacks something, 2xx if an
/// argument is wrong. `options->message` then has the words.
///
/// Threads: any. Signal handlers: no. A device of an io_uring for a single thread is made and released on that thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_device_create(
    allocator: *mut Allocator,
    options: *const DeviceOptions,
    device: *mut *mut Device,
) -> Error {
    // SAFETY: the caller passes null or a place for a pointer.
    let Some(place) = (unsafe { device.as_mut() }) else { return Error::Argument };
    *place = null_mut();
    // SAFETY: the caller passes a structure of the size that it says.
    let options = match unsafe { sized::read(options) } {
        Ok(options) => options,
        Err(error) => return error,
    };
    // SAFETY: the caller passes null or a handle.
    let allocator = unsafe { handle::get(allocator) };
    match allocator.map_err(Refused::from).and_then(|allocator| build(allocator, options)) {
        Ok(built) => {
            *place = handle::open(built);
            Error::None
        }
        Err(Refused(error, why)) => {
            let words = why.map_or_else(|| text::sentence(error).to_owned(), |why| why.to_string());
            // SAFETY: the caller passes null, or so many bytes.
            unsafe { text::copy(&words, options.message, options.message_size) };
            error
        }
    }
}

/// The device address of a byte in the allocator's memory: of a page, or anywhere in a block. `*address` gets it.
///
/// Errors: `PAGEMILL_ERROR_FOREIGN` for a pointer outside that memory, `PAGEMILL_ERROR_FORKED`; for the first look-up in an arena that was
/// added later, as for `pagemill_device_create`. 2xx if an argument is wrong.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_device_address(
    device: *const Device,
    byte: *const c_void,
    address: *mut u64,
) -> Error {
    let look = || {
        // SAFETY: the caller passes null or a handle, and null or a place for a number.
        let (of, place) = unsafe { (handle::get(device)?, address.as_mut().ok_or(Error::Argument)?) };
        *place = of.device.address_of(byte.addr())?.get();
        Ok(())
    };
    code(look())
}

/// The device addresses of `n` bytes, as `pagemill_device_address` gives one: those of pages that were allocated in bulk, for example. Null
/// pointers are passed over, and leave their slot of `addresses` as it is.
///
/// Errors: as for `pagemill_device_address`, the first one's: slots before it are written.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_device_addresses(
    device: *const Device,
    bytes: *const *mut c_void,
    addresses: *mut u64,
    n: i64,
) -> Error {
    let look = || {
        // SAFETY: the caller passes null or a handle.
        let device = &unsafe { handle::get(device) }?.device;
        let n = bulk::count(n)?;
        if (bytes.is_null() || addresses.is_null()) && n > 0 {
            return Err(Error::Argument);
        }
        for at in 0..n {
            // SAFETY: the caller passes n pointers. Other threads may read them too.
            let byte = unsafe { bytes.add(at).read() };
            if !byte.is_null() {
                let address = device.address_of(byte.addr())?.get();
                // SAFETY: the caller passes a place for n addresses.
                unsafe { addresses.add(at).write(address) };
            }
        }
        Ok(())
    };
    code(look())
}

/// Shares the table of registered buffers with another io_uring, `fd`, which has none yet: it then reaches the same memory at the same device
/// addresses. The library keeps it open as long as the device exists.
///
/// Errors: `PAGEMILL_ERROR_SYSTEM` before Linux 6.12, or if the rings are of different users. `PAGEMILL_ERROR_INVALID` for a device of
/// another kind.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_device_share(device: *mut Device, fd: c_int) -> Error {
    let share = || {
        // SAFETY: the caller passes null or a handle.
        let buffers = unsafe { handle::get(device) }?.buffers.as_ref().ok_or(Error::Invalid)?;
        Ok(buffers.clone_to(descriptor(fd)?)?)
    };
    code(share())
}

/// The device's pools in the format of the kernel's `pools` file, a line for each: name, blocks that are handed out, blocks, bytes of a
/// block, pages. Up to `size` bytes at `text`, with the 0 at the end. Returns the whole length, as `snprintf` does; 0 for no open handle.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_device_pools(device: *const Device, text: *mut c_char, size: usize) -> usize {
    // SAFETY: the caller passes null or a handle.
    let Ok(of) = (unsafe { handle::get(device) }) else { return 0 };
    // SAFETY: the caller passes null, or so many bytes.
    unsafe { text::copy(&of.device.pools(), text, size) }
}

/// Lets a device go. Its memory is unmapped when the last pool over it is gone, too.
///
/// Errors: 2xx for no open handle.
///
/// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_device_release(device: *mut Device) -> Error {
    // SAFETY: the caller passes null or a handle.
    code(unsafe { handle::close(device) }.map(drop))
}
