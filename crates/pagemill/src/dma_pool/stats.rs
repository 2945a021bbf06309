//! What is seen of a pool, and why it was not destroyed.
use core::fmt;
use pagemill_core::PAGE_SIZE;

/// What a pool has (C6.3): the kernel's `pools` file, a line each, is what [`Display`](fmt::Display) prints.
///
/// ```
/// use pagemill::{Allocator, Device, DmaPool, Gfp, Identity};
/// let device = Device::new(&Allocator::builder().pages(64).build()?, Identity)?;
/// let pool = DmaPool::create("commands", &device, 64, 64, 0)?;
/// let block = pool.alloc(Gfp::KERNEL)?;
/// let stats = pool.stats();
/// assert_eq!((stats.in_use, stats.blocks, stats.size, stats.pages), (1, 64, 64, 1));
/// assert_eq!(stats.to_string(), "commands            1   64   64  1");
/// # pool.free(block).unwrap();
/// # Ok::<(), pagemill::DeviceError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct DmaPoolStats {
    /// The pool's name.
    pub name: String,
    /// Blocks that are out. Exact while nobody allocates or frees; else those that another call moves at that moment count.
    pub in_use: usize,
    /// Blocks that there are.
    pub blocks: usize,
    /// Bytes of a block.
    pub size: usize,
    /// Pages that they take.
    pub pages: usize,
    /// Bytes that are in use of what the pool keeps besides: its tables, and the lists of those CPUs that it was used on.
    pub metadata: usize,
    /// Blocks that came back and were refused, or were written to by somebody while they were free, where that is looked for.
    pub misused: u64,
}

impl DmaPoolStats {
    /// Bytes of all that there is of the pool, for each of its blocks.
    ///
    /// ```
    /// use pagemill::{Allocator, Device, DmaPool, Gfp, Identity};
    /// let device = Device::new(&Allocator::builder().pages(1024).build()?, Identity)?;
    /// let pool = DmaPool::create("small", &device, 16, 16, 0)?;
    /// let mut blocks: Vec<_> = (0..8192).map(|_| pool.alloc(Gfp::KERNEL).ok()).collect();
    /// assert!(pool.stats().bytes_a_block() <= 16.0 + 8.0);
    /// # pool.free_bulk(&mut blocks);
    /// # Ok::<(), pagemill::DeviceError>(())
    /// ```
    pub fn bytes_a_block(&self) -> f64 {
        (self.pages * PAGE_SIZE + self.metadata) as f64 / self.blocks.max(1) as f64
    }
}

impl fmt::Display for DmaPoolStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<16} {:>4} {:>4} {:>4} {:>2}", self.name, self.in_use, self.blocks, self.size, self.pages)
    }
}
