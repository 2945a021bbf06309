//! C6.1: a GPU's copies reach the bytes at the addresses that it was given for them. Counts as skipped without a GPU.
use crate::common::singles;
use core::ffi::{CStr, c_int, c_void};
use pagemill::{Allocator, Cuda, Device, DeviceError, Memory};

/// One of the driver's functions that copy, which is loaded already.
fn copy(name: &CStr) -> *mut c_void {
    // SAFETY: names that end; the library stays loaded.
    let address = unsafe { libc::dlsym(libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW), name.as_ptr()) };
    assert!(!address.is_null(), "{name:?}");
    address
}

#[test]
fn a_gpu_copies_from_and_to_the_addresses_of_pages() {
    let cuda = match Cuda::new() {
        Err(why @ DeviceError::Unavailable { .. }) => return println!("skipped: {why}"),
        cuda => cuda.unwrap(),
    };
    let allocator = Allocator::builder().memory(Memory::anonymous(512)).memory(Memory::memfd(300)).build().unwrap();
    let mut pages = singles(&allocator, 812);
    let device = Device::new(&allocator, cuda).unwrap();
    // SAFETY: their types in `cuda.h`: cuMemcpyDtoH(host, device, bytes), cuMemcpyHtoD(device, host, bytes), cuDeviceGet,
    // cuDevicePrimaryCtxRetain and cuCtxSetCurrent. The context stays until the process ends.
    let (to_host, to_device) = unsafe {
        let device: extern "C" fn(*mut c_int, c_int) -> c_int = core::mem::transmute(copy(c"cuDeviceGet"));
        let retain: extern "C" fn(*mut *mut c_void, c_int) -> c_int =
            core::mem::transmute(copy(c"cuDevicePrimaryCtxRetain"));
        let set: extern "C" fn(*mut c_void) -> c_int = core::mem::transmute(copy(c"cuCtxSetCurrent"));
        let (mut number, mut context) = (0, core::ptr::null_mut());
        assert_eq!((device(&raw mut number, 0), retain(&raw mut context, number), set(context)), (0, 0, 0));
        (
            core::mem::transmute::<*mut c_void, extern "C" fn(*mut u8, u64, usize) -> c_int>(copy(c"cuMemcpyDtoH_v2")),
            core::mem::transmute::<*mut c_void, extern "C" fn(u64, *const u8, usize) -> c_int>(copy(
                c"cuMemcpyHtoD_v2",
            )),
        )
    };
    for (number, page) in pages.iter_mut().enumerate() {
        let (start, len) = (number * 37 % 4000, 96);
        page.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 7 + number) as u8);
        let addr = device.address_of(page.addr() + start).unwrap().get();
        let mut found = vec![0; len];
        assert_eq!(to_host(found.as_mut_ptr(), addr, len), 0);
        assert_eq!(found, page[start..start + len]);
        let mut expected = page.to_vec();
        expected[start..start + len].fill(0xc3);
        assert_eq!(to_device(addr, vec![0xc3; len].as_ptr(), len), 0);
        assert!(page[..] == expected, "page {number}");
    }
    assert_eq!(allocator.give_back().get(), 0);
}
