//! A GPU that reaches host memory, through the CUDA driver.
use super::{DeviceAddr, DeviceError, DeviceMap, Mapped, refuse_inherited};
use crate::process::Stamp;
use core::ops::Range;
use pagemill_os::device::cuda::{Cuda as Context, CudaError};

/// Arenas are registered with the CUDA driver (`cuMemHostRegister`): kernels on a GPU read and write their pages at the
/// addresses that it gives, and copies to and from there need no second buffer.
///
/// The driver is loaded when this is made; nothing of it is needed to build. Registering an arena commits all of it, and the
/// driver keeps it in place. The registration is for all contexts of the process. Needs the feature `cuda`.
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
    /// The process that made it: the driver does not work in the child of a fork.
    stamp: Stamp,
}

impl Cuda {
    /// In the context that is current on this thread, or where none is in the first GPU's primary one.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] if there is no driver or no GPU.
    pub fn new() -> Result<Self, DeviceError> {
        Self::on(0)
    }

    /// In the context that is current on this thread, or where none is in the primary one of the GPU with this number.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    ///
    /// ```
    /// // Nobody has so many.
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
        // SAFETY: the memory stays mapped, as the caller promises; who starts kernels says what they write where.
        let first = unsafe { self.context.register(memory) }.map_err(unavailable)?;
        Ok(Mapped::Linear(DeviceAddr::new(first)))
    }

    fn unmap(&self, memory: Range<usize>, _: &Mapped) {
        if !self.stamp.is_inherited() {
            // It fails only if the context is gone, and then so is what it knew.
            let _ = self.context.unregister(memory.start);
        }
    }
}

fn unavailable(why: CudaError) -> DeviceError {
    let next = match why {
        CudaError::NoDriver(_) => "install NVIDIA's driver, or do without a GPU",
        CudaError::NoDevice { .. } => {
            "see nvidia-smi for the GPUs that there are, and CUDA_VISIBLE_DEVICES for those to be seen"
        }
        CudaError::Call { .. } => "see nvidia-smi and the system's log for the driver's state",
    };
    DeviceError::Unavailable { what: why.to_string(), next }
}
