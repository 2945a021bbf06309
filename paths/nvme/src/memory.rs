//! The memory that a controller shares: queues, the data of commands, and lists of its pages.
//!
//! All of it comes from one allocator, which is mapped for the device once. A command's data is on single pages of one
//! bulk call, anywhere in memory. Lists come from two `DmaPool`s, in bulk if a command needs several. With too little
//! memory a request becomes shorter, or waits until other requests have freed theirs.
use std::mem;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use pagemill::{
    Allocator, Block, Bulk, Device, DeviceError, DeviceMap, DmaBlock, DmaPool, Exhausted, Gfp, Order, Page,
    free_pages_bulk,
};

use crate::Error;
use crate::prp::{self, Lists, PER_LIST, Prp, Room, SHORT_LIST_BYTES};
use crate::spec::PAGE;

/// Memory whose addresses the controller knows.
pub(crate) struct Memory {
    /// Distinguishes it from others of this process: their device addresses mean other memory.
    id: u64,
    short: DmaPool,
    long: DmaPool,
    device: Device,
    allocator: Allocator,
}

/// Memory for the data of a request: pages that lie anywhere, of one bulk call.
///
/// It goes into a request and comes back with it. While the drive may use the pages, the library has them: dropping a
/// queue or a future, or forgetting it, frees none of them too early.
///
/// ```
/// use pagemill::{Allocator, Memory};
/// use pagemill_nvme::{Dma, Drive, Fake, Settings};
/// let dma = Dma::new(&Allocator::builder().memory(Memory::anonymous(4096)).build()?);
/// let drive = Drive::on_fake(&dma, &Fake::new(1000), Settings::default())?;
/// let mut buffer = drive.buffer(10_240)?;
/// buffer.copy_from(&[7; 10_240]);
/// assert_eq!(buffer.pieces().map(<[u8]>::len).collect::<Vec<_>>(), [4096, 4096, 2048]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Buffer {
    home: u64,
    pages: Vec<Option<Page>>,
    addrs: Vec<u64>,
    len: usize,
}

/// The lists of a command's pages.
pub(crate) enum Held {
    None,
    Short(DmaBlock),
    Long(Vec<Option<DmaBlock>>),
    /// The page with the ranges of a command.
    Ranges {
        _page: Buffer,
    },
}

/// How urgent a request for memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    /// Other requests are under way and will free their memory.
    Soon,
    /// No other request is under way, so no memory will be freed.
    Now,
}

impl Want {
    fn gfp(self) -> Gfp {
        match self {
            Self::Soon => Gfp::NOWAIT,
            Self::Now => Gfp::KERNEL,
        }
    }
}

/// How often a request that must not fail is tried, since acquisitions may be made to fail at random (`PAGEMILL_FAIL`).
const ATTEMPTS: usize = 64;

impl Memory {
    /// Maps the memory of `allocator` for the device.
    pub(crate) fn new(allocator: &Allocator, map: impl DeviceMap + 'static) -> Result<Self, Error> {
        let device = Device::new(allocator, map)?;
        let short = DmaPool::create("prp list 256", &device, SHORT_LIST_BYTES, SHORT_LIST_BYTES, PAGE)?;
        let long = DmaPool::create("prp list page", &device, PAGE, PAGE, 0)?;
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Relaxed: a number that is given once, nothing more.
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self { id, short, long, device, allocator: allocator.clone() })
    }

    /// Pages for `len` bytes, in one bulk call. If there are too few, it is shorter, but a multiple of `unit` bytes.
    /// `None` if there is not even one unit.
    pub(crate) fn buffer(&self, len: usize, unit: usize, want: Want) -> Result<Option<Buffer>, Error> {
        // There are never more, whatever is asked for: the vector below must fit into memory.
        let count = match len.div_ceil(PAGE) {
            many @ PER_LIST.. => many.min(self.allocator.managed_pages().get()),
            few => few,
        };
        let least = unit.div_ceil(PAGE);
        let mut pages: Vec<Option<Page>> = (0..count).map(|_| None).collect();
        let mut got = 0;
        for _ in 0..if want == Want::Now { ATTEMPTS } else { 1 } {
            let request = Bulk::up_to(count).gfp(want.gfp());
            got = self.allocator.alloc_pages_bulk_array(request, &mut pages).map_err(Error::Exhausted)?.occupied;
            if got >= least {
                break;
            }
        }
        // Slots are filled in ascending order, so missing pages are at the end.
        pages.truncate(got);
        let len = len.min(got * PAGE) / unit * unit;
        let mut surplus = pages.split_off(len.div_ceil(PAGE));
        free_pages_bulk(&mut surplus);
        if len == 0 {
            return Ok(None);
        }
        let addrs = pages.iter().flatten().map(|page| Ok(self.device.address_of(page.addr())?.get()));
        let addrs = addrs.collect::<Result<_, DeviceError>>()?;
        Ok(Some(Buffer { home: self.id, pages, addrs, len }))
    }

    /// A buffer of these pages, all of this memory.
    pub(crate) fn buffer_of(&self, pages: Vec<Page>) -> Result<Buffer, Error> {
        if pages.is_empty() {
            return Err(Error::Request("a buffer has at least one page".to_owned()));
        }
        let addrs = pages.iter().map(|page| Ok(self.device.address_of(page.addr())?.get()));
        let addrs = addrs.collect::<Result<_, DeviceError>>()?;
        let len = pages.len() * PAGE;
        Ok(Buffer { home: self.id, pages: pages.into_iter().map(Some).collect(), addrs, len })
    }

    /// The error if [`buffer`](Self::buffer) has no memory, and none will be freed.
    pub(crate) fn nothing_left(&self, len: usize) -> Error {
        let (wanted, free) = (len.div_ceil(PAGE), self.allocator.managed_pages().get());
        let why = format!("{wanted} pages were asked for, of the {free} that it works with");
        Error::Request(format!("no memory for a single request: {why}; give more with --memory"))
    }

    /// Whether a buffer has this memory's device addresses.
    pub(crate) fn is_of(&self, buffer: &Buffer) -> bool {
        buffer.home == self.id
    }

    /// Writes the lists for a buffer, and returns the entries for the command. `None` if there is no memory for them.
    pub(crate) fn list(&self, buffer: &Buffer, want: Want) -> Result<Option<(Prp, Held)>, Error> {
        for _ in 0..if want == Want::Now { ATTEMPTS } else { 1 } {
            match self.try_list(buffer, want.gfp()) {
                Err(DeviceError::Memory(pagemill::Error::Exhausted(Exhausted { .. }))) => {}
                other => return Ok(Some(other?)),
            }
        }
        Ok(None)
    }

    fn try_list(&self, buffer: &Buffer, gfp: Gfp) -> Result<(Prp, Held), DeviceError> {
        fn room(pool: &DmaPool, block: &DmaBlock) -> Room {
            Room { at: block.as_ptr().cast(), addr: pool.device_addr(block).get() }
        }
        let (rooms, held) = match prp::lists_for(buffer.addrs.len()) {
            Lists::None => (Vec::new(), Held::None),
            Lists::Short => {
                let block = self.short.alloc(gfp)?;
                (vec![room(&self.short, &block)], Held::Short(block))
            }
            Lists::Long(count) => {
                let mut blocks: Vec<_> = (0..count).map(|_| None).collect();
                self.long.alloc_bulk(gfp, &mut blocks)?;
                let rooms = blocks.iter().flatten().map(|block| room(&self.long, block)).collect();
                (rooms, Held::Long(blocks))
            }
        };
        const { assert!(PER_LIST * size_of::<u64>() == PAGE) };
        // SAFETY: the rooms are as many as `lists_for` says and of its kind: blocks of the pools, of that size, which
        // nobody else has.
        let prp = unsafe { prp::write(&buffer.addrs, &rooms) };
        Ok((prp, held))
    }

    /// Frees the lists of a finished command.
    pub(crate) fn unlist(&self, held: Held) {
        match held {
            Held::None | Held::Ranges { .. } => {}
            // `free` fails only on misuse, which it also reports.
            Held::Short(block) => drop(self.short.free(block)),
            Held::Long(mut blocks) => {
                self.long.free_bulk(&mut blocks);
            }
        }
    }

    /// Memory that is contiguous for the controller, too.
    fn contiguous(&self, bytes: usize) -> Result<(Block, u64), Error> {
        let order = bytes.div_ceil(PAGE).next_power_of_two().ilog2();
        let order = Order::new(order as u8).map_err(|invalid| Error::Exhausted(invalid.into()))?;
        let mut attempts = (0..ATTEMPTS).map(|_| self.allocator.alloc_pages(Gfp::KERNEL, order));
        let block = attempts.find(Result::is_ok).unwrap_or_else(|| self.allocator.alloc_pages(Gfp::KERNEL, order));
        let block = block.map_err(Error::Exhausted)?;
        let first = self.device.address_of(block.addr())?;
        for at in (0..block.len()).step_by(PAGE) {
            if self.device.address_of(block.addr() + at)? != first.offset(at) {
                return Err(Error::Request("the pages of a queue do not follow each other for the device".to_owned()));
            }
        }
        Ok((block, first.get()))
    }

    /// The pools' contents, in the kernel's format.
    pub(crate) fn pools(&self) -> String {
        self.device.pools()
    }
}

impl Buffer {
    /// Its length in bytes, never 0.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a buffer is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }
    /// The data, page by page.
    pub fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        let last = self.len - (self.pages.len() - 1) * PAGE;
        let count = self.pages.len();
        let pages = self.pages.iter().flatten().enumerate();
        pages.map(move |(nth, page)| if nth + 1 == count { &page[..last] } else { &page[..] })
    }
    /// The same, to be written.
    pub fn pieces_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let last = self.len - (self.pages.len() - 1) * PAGE;
        let count = self.pages.len();
        let pages = self.pages.iter_mut().flatten().enumerate();
        pages.map(move |(nth, page)| if nth + 1 == count { &mut page[..last] } else { &mut page[..] })
    }
    /// Fills it with bytes.
    ///
    /// # Panics
    /// If `bytes` has another length.
    pub fn copy_from(&mut self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len, "bytes for a buffer of another length");
        let mut rest = bytes;
        for piece in self.pieces_mut() {
            let (here, after) = rest.split_at(piece.len());
            piece.copy_from_slice(here);
            rest = after;
        }
    }
    /// A copy of its bytes.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        self.pieces().flatten().copied().collect()
    }
    /// Changes the order of its pages, so that the data is scattered in memory.
    pub(crate) fn scatter(&mut self, mut below: impl FnMut(usize) -> usize) {
        for nth in (1..self.pages.len()).rev() {
            let other = below(nth + 1);
            self.pages.swap(nth, other);
            self.addrs.swap(nth, other);
        }
    }
    /// Shortens it to its first bytes; pages behind them are freed.
    ///
    /// # Panics
    /// If `len` is 0 or above its length.
    pub fn shorten(&mut self, len: usize) {
        assert!(len > 0 && len <= self.len, "{len} bytes of {}", self.len);
        self.len = len;
        self.addrs.truncate(len.div_ceil(PAGE));
        let mut surplus = self.pages.split_off(len.div_ceil(PAGE));
        free_pages_bulk(&mut surplus);
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        free_pages_bulk(&mut self.pages);
    }
}

/// Memory that both sides write, accessed only by volatile reads and writes.
pub(crate) struct Shared {
    memory: Option<Block>,
    at: *mut u32,
    bytes: usize,
    addr: u64,
}

// SAFETY: it owns its block, or has leaked it; `at` points into it and is used through `&self` for reads and `&mut self`
// for writes of this side, all volatile. No thread has a special part in that.
unsafe impl Send for Shared {}

impl Shared {
    /// At least so many bytes, zeroed.
    pub(crate) fn new(memory: &Memory, bytes: usize) -> Result<Self, Error> {
        let (mut block, addr) = memory.contiguous(bytes)?;
        let (at, bytes) = (block.as_mut_ptr().cast(), block.len());
        let mut shared = Self { memory: Some(block), at, bytes, addr };
        shared.clear();
        Ok(shared)
    }

    /// Its device address.
    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    fn word(&self, at: usize) -> *mut u32 {
        assert!(at.is_multiple_of(4) && at < self.bytes, "byte {at} of {}", self.bytes);
        self.at.wrapping_byte_add(at)
    }

    pub(crate) fn read(&self, at: usize) -> u32 {
        // SAFETY: inside of the block (`word`), which this owns or has leaked. The controller may write it at the same
        // time, so the access is volatile.
        u32::from_le(unsafe { self.word(at).read_volatile() })
    }

    /// A word that several threads use.
    pub(crate) fn atomic(&self, at: usize) -> &AtomicU32 {
        // SAFETY: as in `read`; the word is aligned, and lives as long as this.
        unsafe { AtomicU32::from_ptr(self.word(at)) }
    }

    pub(crate) fn write(&mut self, at: usize, value: u32) {
        // SAFETY: as in `read`.
        unsafe { self.word(at).write_volatile(value.to_le()) };
    }

    pub(crate) fn clear(&mut self) {
        for at in (0..self.bytes).step_by(4) {
            self.write(at, 0);
        }
    }

    /// A copy of its first page.
    pub(crate) fn page(&self) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        for (at, word) in page.chunks_exact_mut(4).enumerate() {
            word.copy_from_slice(&self.read(4 * at).to_le_bytes());
        }
        page
    }

    /// Never frees the memory: a controller that could not be stopped may write to it for ever.
    pub(crate) fn leak(&mut self) {
        mem::forget(self.memory.take());
    }
}
