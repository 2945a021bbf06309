//! System calls that make a process's pages reachable for a device.
//!
//! | module | who reaches the memory | made by |
//! |---|---|---|
//! | [`ring`] | the requests of an io_uring | `io_uring_register` on the ring |
//! | [`buf_ring`] | an io_uring's requests that choose a buffer when they need it | `IORING_REGISTER_PBUF_RING` on the ring |
//! | [`vfio`] | a PCI device behind an IOMMU | `VFIO_IOMMU_MAP_DMA` on a Type1 container |
//! | [`xsk`] | packets of an AF_XDP socket | `XDP_UMEM_REG` on the socket |
//! | [`pagemap`] | a device that is told physical addresses | `/proc/self/pagemap`, `mlock` |
//! | `cuda`, a feature | kernels and copies on a GPU | `cuMemHostRegister` of the driver, loaded then |
//!
//! Each function makes one system call, on a descriptor that the caller opened. The `DeviceMap`s of `pagemill` know which
//! address a page has, and what to tell a user when the kernel refuses.
pub mod buf_ring;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod pagemap;
pub mod ring;
pub mod vfio;
pub mod xsk;
