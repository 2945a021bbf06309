//! Pages as the buffers of runtimes over io_uring: compio, monoio and tokio-uring, each with a feature.
//!
//! Such a runtime owns a buffer from the submission of a request to its completion, also if the future is dropped. So it can
//! read into a page, or write from it, without a copy. All bytes of a page are initialised at all times: a runtime sees a buffer
//! that is full, as an array is, and its result says how many bytes it read.
//!
//! A [`Pooled`] handle is a buffer if its element is. It goes back to its pool when the runtime drops it.
use crate::handle::{Block, Owned, Page};
use crate::mempool::{PoolRef, Pooled, Source};
use crate::run::Run;

/// The element of a pool.
type Item<P> = <<P as PoolRef>::Source as Source>::Item;

/// Implements a runtime's traits for all handles by a macro.
macro_rules! for_handles {
    ($implement:ident) => {
        $implement!([] Page);
        $implement!([] Block);
        $implement!([T: Owned + Unpin] Run<T>);
    };
}

#[cfg(feature = "compio")]
mod compio {
    use super::{Block, Item, Owned, Page, PoolRef, Pooled, Run};
    use crate::allocator::Allocator;
    use compio_buf::{IoBuf, IoBufMut, SetLen};
    use compio_driver::BufferAllocator;
    use core::alloc::Layout;
    use core::mem::MaybeUninit;
    use core::ptr::NonNull;
    use core::slice;
    use pagemill_core::{Gfp, Order, PAGE_SHIFT, PAGE_SIZE};

    macro_rules! implement {
        ([$($of:tt)*] $handle:ty) => {
            impl<$($of)*> IoBuf for $handle {
                fn as_init(&self) -> &[u8] {
                    self.as_ref()
                }
            }
            impl<$($of)*> SetLen for $handle {
                /// Does nothing: all bytes are initialised at all times.
                unsafe fn set_len(&mut self, len: usize) {
                    debug_assert!(len <= AsRef::<[u8]>::as_ref(self).len());
                }
            }
            impl<$($of)*> IoBufMut for $handle {
                fn as_uninit(&mut self) -> &mut [MaybeUninit<u8>] {
                    let bytes: &mut [u8] = self.as_mut();
                    // SAFETY: the same bytes, borrowed exclusively. The trait lets safe code write uninitialised bytes there,
                    // also into an array, which compio implements it for in the same way. Runtimes write initialised ones.
                    unsafe { slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len()) }
                }
            }
        };
    }
    for_handles!(implement);

    impl<P: PoolRef<Source: 'static> + 'static> IoBuf for Pooled<P>
    where
        Item<P>: IoBuf,
    {
        fn as_init(&self) -> &[u8] {
            (**self).as_init()
        }
    }
    impl<P: PoolRef<Source: 'static> + 'static> SetLen for Pooled<P>
    where
        Item<P>: SetLen,
    {
        unsafe fn set_len(&mut self, len: usize) {
            // SAFETY: the caller promises the same for the element.
            unsafe { (**self).set_len(len) };
        }
    }
    impl<P: PoolRef<Source: 'static> + 'static> IoBufMut for Pooled<P>
    where
        Item<P>: IoBufMut,
    {
        fn as_uninit(&mut self) -> &mut [MaybeUninit<u8>] {
            (**self).as_uninit()
        }
    }

    /// Blocks of the [global allocator](Allocator::global) for compio's own pool of buffers:
    /// `ProactorBuilder::buffer_pool_allocator::<Allocator>()`. A buffer is a block of a power of two pages; its alignment is its
    /// size. compio asks for all buffers when it first needs the pool, and has no way to hear that memory is out: the process
    /// ends then, as for its default, the heap.
    impl BufferAllocator for Allocator {
        fn allocate(len: u32) -> NonNull<MaybeUninit<u8>> {
            let block = order_of(len).and_then(|order| Self::global().alloc_pages(Gfp::KERNEL, order).ok());
            match block.and_then(|block| NonNull::new(block.into_raw().0)) {
                Some(first) => first.cast(),
                None => {
                    std::alloc::handle_alloc_error(Layout::array::<u8>(len as usize).unwrap_or(Layout::new::<u8>()))
                }
            }
        }

        unsafe fn deallocate(first: NonNull<MaybeUninit<u8>>, len: u32) {
            let Some(order) = order_of(len) else { return }; // No such block was allocated.
            // SAFETY: the caller passes a buffer that `allocate` returned for this length. Misuse is reported to the hook.
            let _ = unsafe { crate::free::free_raw(first.as_ptr().cast(), order) };
        }
    }

    /// The order of the smallest block with so many bytes.
    fn order_of(len: u32) -> Option<Order> {
        let size = (len as usize).next_power_of_two().max(PAGE_SIZE);
        Order::new((size.ilog2() - PAGE_SHIFT) as u8).ok()
    }

    #[cfg(test)]
    mod tests {
        use super::order_of;

        #[test]
        fn a_buffer_has_the_smallest_order_that_holds_it() {
            let order = |len| order_of(len).map(|order| order.get());
            assert_eq!([0, 1, 4096, 4097, 8192, 8193, 1 << 30].map(order), [0, 0, 0, 1, 1, 2, 18].map(Some));
            assert_eq!([(1 << 30) + 1, u32::MAX].map(order), [None, None]);
        }
    }
}

#[cfg(feature = "monoio")]
mod monoio {
    use super::{Block, Item, Owned, Page, PoolRef, Pooled, Run};
    use ::monoio::buf::{IoBuf, IoBufMut};

    macro_rules! implement {
        ([$($of:tt)*] $handle:ty) => {
            // SAFETY: the handle owns mapped, initialised memory of that size, which does not move when the handle does.
            unsafe impl<$($of)*> IoBuf for $handle {
                fn read_ptr(&self) -> *const u8 {
                    self.as_ptr()
                }
                fn bytes_init(&self) -> usize {
                    AsRef::<[u8]>::as_ref(self).len()
                }
            }
            // SAFETY: as for `IoBuf`; the pointer is for writing, and the handle is borrowed exclusively.
            unsafe impl<$($of)*> IoBufMut for $handle {
                fn write_ptr(&mut self) -> *mut u8 {
                    self.as_mut_ptr()
                }
                fn bytes_total(&mut self) -> usize {
                    self.bytes_init()
                }
                /// Does nothing: all bytes are initialised at all times.
                unsafe fn set_init(&mut self, _: usize) {}
            }
        };
    }
    for_handles!(implement);

    // SAFETY: the element promises all of it, and the handle has it until it is dropped.
    unsafe impl<P: PoolRef<Source: 'static> + Unpin + 'static> IoBuf for Pooled<P>
    where
        Item<P>: IoBuf,
    {
        fn read_ptr(&self) -> *const u8 {
            (**self).read_ptr()
        }
        fn bytes_init(&self) -> usize {
            (**self).bytes_init()
        }
    }
    // SAFETY: as for `IoBuf`.
    unsafe impl<P: PoolRef<Source: 'static> + Unpin + 'static> IoBufMut for Pooled<P>
    where
        Item<P>: IoBufMut,
    {
        fn write_ptr(&mut self) -> *mut u8 {
            (**self).write_ptr()
        }
        fn bytes_total(&mut self) -> usize {
            (**self).bytes_total()
        }
        unsafe fn set_init(&mut self, len: usize) {
            // SAFETY: the caller promises the same for the element.
            unsafe { (**self).set_init(len) };
        }
    }
}

#[cfg(feature = "tokio-uring")]
mod tokio_uring {
    use super::{Block, Item, Owned, Page, PoolRef, Pooled, Run};
    use ::tokio_uring::buf::{IoBuf, IoBufMut};

    macro_rules! implement {
        ([$($of:tt)*] $handle:ty) => {
            // SAFETY: the handle owns mapped, initialised memory of that size, which does not move when the handle does.
            unsafe impl<$($of)*> IoBuf for $handle {
                fn stable_ptr(&self) -> *const u8 {
                    self.as_ptr()
                }
                fn bytes_init(&self) -> usize {
                    AsRef::<[u8]>::as_ref(self).len()
                }
                fn bytes_total(&self) -> usize {
                    self.bytes_init()
                }
            }
            // SAFETY: as for `IoBuf`; the pointer is for writing, and the handle is borrowed exclusively.
            unsafe impl<$($of)*> IoBufMut for $handle {
                fn stable_mut_ptr(&mut self) -> *mut u8 {
                    self.as_mut_ptr()
                }
                /// Does nothing: all bytes are initialised at all times.
                unsafe fn set_init(&mut self, _: usize) {}
            }
        };
    }
    for_handles!(implement);

    // SAFETY: the element promises all of it, and the handle has it until it is dropped.
    unsafe impl<P: PoolRef<Source: 'static> + Unpin + 'static> IoBuf for Pooled<P>
    where
        Item<P>: IoBuf,
    {
        fn stable_ptr(&self) -> *const u8 {
            (**self).stable_ptr()
        }
        fn bytes_init(&self) -> usize {
            (**self).bytes_init()
        }
        fn bytes_total(&self) -> usize {
            (**self).bytes_total()
        }
    }
    // SAFETY: as for `IoBuf`.
    unsafe impl<P: PoolRef<Source: 'static> + Unpin + 'static> IoBufMut for Pooled<P>
    where
        Item<P>: IoBufMut,
    {
        fn stable_mut_ptr(&mut self) -> *mut u8 {
            (**self).stable_mut_ptr()
        }
        unsafe fn set_init(&mut self, len: usize) {
            // SAFETY: the caller promises the same for the element.
            unsafe { (**self).set_init(len) };
        }
    }
}
