//! A GPU that accesses host memory, through the CUDA driver.
use super::{DeviceAddr, DeviceError, DeviceMap, Mapped, refuse_inherited};
use crate::process::Stamp;
use core::ops::Range;
use pagemill_os::device::cuda::{Cuda as Context, CudaError};

/// Registers arenas with the CUDA driver (`cuMemHostRegister`). Kernels on a GPU read and write their pages at the
/// device addresses, and copies to and from them need no second buffer.
///
/// The driver is loaded when this is made; the build needs nothing of it. Registering an arena commits all of it, and
/// the driver keeps it in place. The registration is valid in all contexts of the process. Needs the feature `cuda`.
///
/// ```
/// use pagemill::{Allocator, Cuda, Device, Gfp};
/// let cuda = match Cuda::new() {
///     Ok(cuda) => cuda,
///     Err(why) => return println!("{why}"), // no driver, or no GPU
/// };
/// let allocator = Allocator::builder().pages(512).build().unwrap();
/// let device = Device::new(&allocator, cuda).unwrap();
/// let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
/// println!("a kernel finds it at {}", device.address_of(page.addr()).unwrap());
/// ```
#[derive(Debug)]
pub struct Cuda {
    context: Context,
    /// The process that made it: the driver does not work in a forked child.
    stamp: Stamp,
}

impl Cuda {
    /// Uses the context that is current on this thread, or the primary context of the first GPU if there is none.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] if there is no driver or no GPU.
    pub fn new() -> Result<Self, DeviceError> {
        Self::on(0)
    }

    /// Uses the context that is current on this thread, or the primary context of the GPU with this number if there is
    /// none.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    ///
    /// ```
    /// // No machine has so many GPUs.
    /// println!("{}", pagemill::Cuda::on(4096).unwrap_err());
    /// ```
    pub fn on(number: i32) -> Result<Self, DeviceError> {
        let context = Context::open(number).map_err(unavailable)?;
        Ok(Self { context, stamp: Stamp::here() })
    }
}

impl DeviceMap for Cuda {
    unsafe fn map(&self, memory: Range<usize>) -> Result<Mapped, DeviceError> {
        refuse_inherited(self.stamp)?;
        // SAFETY: the memory stays mapped, as the caller promises. The program that starts kernels decides what they
        // write where.
        let first = unsafe { self.context.register(memory) }.map_err(unavailable)?;
        Ok(Mapped::Linear(DeviceAddr::new(first)))
    }

    fn unmap(&self, memory: Range<usize>, _: &Mapped) {
        if !self.stamp.is_inherited() {
            // Fails only if the context is destroyed, and then its registrations are gone too.
            let _ = self.context.unregister(memory.start);
        }
    }
}

fn unavailable(why: CudaError) -> DeviceError {
    let next = match why {
        CudaError::NoDriver(_) => "install NVIDIA's driver, or do without a GPU",
        CudaError::NoDevice { .. } => "nvidia-smi lists the GPUs, and CUDA_VISIBLE_DEVICES selects the visible ones",
        CudaError::Call { .. } => "see nvidia-smi and the system's log for the driver's state",
    };
    DeviceError::Unavailable { what: why.to_string(), next }
}
