//! Statistics of a pool.
use core::fmt;
use pagemill_core::PAGE_SIZE;

/// What a pool has (C6.3). [`Display`](fmt::Display) prints a line as in the kernel's `pools` file.
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
    /// Blocks that are handed out. Exact while no thread allocates or frees; otherwise blocks that a call is moving
    /// count too.
    pub in_use: usize,
    /// All blocks of the pool.
    pub blocks: usize,
    /// The size of a block in bytes.
    pub size: usize,
    /// The pages that the blocks lie in.
    pub pages: usize,
    /// Bytes of metadata in use: the pool's tables, and the lists of the CPUs that it was used on.
    pub metadata: usize,
    /// Blocks that were refused when they were freed. In a poisoned pool, blocks that were written to while free count
    /// too.
    pub misused: u64,
}

impl DmaPoolStats {
    /// Bytes of memory and metadata for each block.
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
