//! The memory that is shared with a controller: queues, the data of commands, and the lists that name its pages.
//!
//! All of it comes from one allocator, mapped for the device once. Data lies on single pages, as many as a command has in one
//! bulk call, wherever they are; lists come from two `DmaPool`s, in bulk where a command needs several. What a request did
//! not get makes it shorter, or has it wait until others have given back theirs: never is more promised than is there.
use std::mem;

use pagemill::{
    Allocator, Block, Bulk, Device, DeviceError, DeviceMap, DmaBlock, DmaPool, Exhausted, Gfp, Order, Page,
    free_pages_bulk,
};

use crate::Error;
use crate::prp::{self, Lists, PER_LIST, Prp, Room, SHORT_LIST_BYTES};
use crate::spec::PAGE;

/// Memory that a controller knows the addresses of.
pub(crate) struct Memory {
    short: DmaPool,
    long: DmaPool,
    device: Device,
    allocator: Allocator,
}

/// Pages of a command's data.
pub(crate) struct Buffer {
    pages: Vec<Option<Page>>,
    addrs: Vec<u64>,
    len: usize,
}

/// The lists that name a command's pages.
pub(crate) enum Held {
    None,
    Short(DmaBlock),
    Long(Vec<Option<DmaBlock>>),
}

/// How urgent a request for memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    /// Others are under way and will give theirs back.
    Soon,
    /// Nothing is under way: what is not there now will not be.
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

/// How often a request that must not fail is made, where acquisitions fail by chance (`PAGEMILL_FAIL`).
const ATTEMPTS: usize = 64;

impl Memory {
    /// Maps the memory of `allocator` for the device.
    pub(crate) fn new(allocator: &Allocator, map: impl DeviceMap + 'static) -> Result<Self, Error> {
        let device = Device::new(allocator, map)?;
        let short = DmaPool::create("prp list 256", &device, SHORT_LIST_BYTES, SHORT_LIST_BYTES, PAGE)?;
        let long = DmaPool::create("prp list page", &device, PAGE, PAGE, 0)?;
        Ok(Self { short, long, device, allocator: allocator.clone() })
    }

    /// Pages for `len` bytes, in one bulk call; fewer, of a multiple of `unit` bytes, if there are not enough. None if there
    /// is not even one unit.
    pub(crate) fn buffer(&self, len: usize, unit: usize, want: Want) -> Result<Option<Buffer>, Error> {
        let count = len.div_ceil(PAGE);
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
        // Holes are filled in ascending order: what is missing is missing at the end.
        pages.truncate(got);
        let len = len.min(got * PAGE) / unit * unit;
        let mut surplus = pages.split_off(len.div_ceil(PAGE));
        free_pages_bulk(&mut surplus);
        if len == 0 {
            return Ok(None);
        }
        let addrs = pages.iter().flatten().map(|page| Ok(self.device.address_of(page.addr())?.get()));
        let addrs = addrs.collect::<Result<_, DeviceError>>()?;
        Ok(Some(Buffer { pages, addrs, len }))
    }

    /// Why [`buffer`](Self::buffer) had none, where none will come.
    pub(crate) fn nothing_left(&self, len: usize) -> Error {
        let (wanted, free) = (len.div_ceil(PAGE), self.allocator.managed_pages().get());
        let why = format!("{wanted} pages were asked for, of the {free} that it works with");
        Error::Request(format!("no memory for a single request: {why}; give more with --memory"))
    }

    /// Writes the lists for a buffer, and says what the command is to have. None if there is no memory for them.
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
        // SAFETY: as many rooms as `lists_for` says, of its kind: blocks of the pools, of that size, which nobody else has.
        let prp = unsafe { prp::write(&buffer.addrs, &rooms) };
        Ok((prp, held))
    }

    /// Takes the lists of a command back that the controller is done with.
    pub(crate) fn unlist(&self, held: Held) {
        match held {
            Held::None => {}
            // Misuse, which these cannot be, is reported on its way.
            Held::Short(block) => drop(self.short.free(block)),
            Held::Long(mut blocks) => {
                self.long.free_bulk(&mut blocks);
            }
        }
    }

    /// Memory whose bytes follow each other for the controller too.
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

    /// What the pools hold, as the kernel says it of a device's.
    pub(crate) fn pools(&self) -> String {
        self.device.pools()
    }
}

impl Buffer {
    /// Bytes that it holds.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
    /// Its pages, each with as many bytes as belong to the data.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        let last = self.len - (self.pages.len() - 1) * PAGE;
        let count = self.pages.len();
        let pages = self.pages.iter().flatten().enumerate();
        pages.map(move |(nth, page)| if nth + 1 == count { &page[..last] } else { &page[..] })
    }
    /// The same, to be written.
    pub(crate) fn pieces_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let last = self.len - (self.pages.len() - 1) * PAGE;
        let count = self.pages.len();
        let pages = self.pages.iter_mut().flatten().enumerate();
        pages.map(move |(nth, page)| if nth + 1 == count { &mut page[..last] } else { &mut page[..] })
    }
    /// Has its pages in another order, so that the data lies all over memory.
    pub(crate) fn scatter(&mut self, mut below: impl FnMut(usize) -> usize) {
        for nth in (1..self.pages.len()).rev() {
            let other = below(nth + 1);
            self.pages.swap(nth, other);
            self.addrs.swap(nth, other);
        }
    }
    /// Keeps its first bytes alone.
    pub(crate) fn shorten(&mut self, len: usize) {
        assert!(len > 0 && len <= self.len, "{len} bytes of {}", self.len);
        self.len = len;
        self.addrs.truncate(len.div_ceil(PAGE));
        let mut surplus = self.pages.split_off(len.div_ceil(PAGE));
        free_pages_bulk(&mut surplus);
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        free_pages_bulk(&mut self.pages);
    }
}

/// Memory that both sides write: reached by volatile accesses alone.
pub(crate) struct Shared {
    memory: Option<Block>,
    at: *mut u32,
    bytes: usize,
    addr: u64,
}

impl Shared {
    /// At least so many bytes, zeroed.
    pub(crate) fn new(memory: &Memory, bytes: usize) -> Result<Self, Error> {
        let (mut block, addr) = memory.contiguous(bytes)?;
        let (at, bytes) = (block.as_mut_ptr().cast(), block.len());
        let mut shared = Self { memory: Some(block), at, bytes, addr };
        shared.clear();
        Ok(shared)
    }

    /// Where the controller has it.
    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    fn word(&self, at: usize) -> *mut u32 {
        assert!(at.is_multiple_of(4) && at < self.bytes, "byte {at} of {}", self.bytes);
        self.at.wrapping_byte_add(at)
    }

    pub(crate) fn read(&self, at: usize) -> u32 {
        // SAFETY: inside of the block (`word`), which is this one's or leaked; the controller may write it meanwhile, hence
        // volatile.
        u32::from_le(unsafe { self.word(at).read_volatile() })
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

    /// Its first page, as it is now.
    pub(crate) fn page(&self) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        for (at, word) in page.chunks_exact_mut(4).enumerate() {
            word.copy_from_slice(&self.read(4 * at).to_le_bytes());
        }
        page
    }

    /// Never gives it back: a controller that could not be stopped may write to it for ever.
    pub(crate) fn leak(&mut self) {
        mem::forget(self.memory.take());
    }
}
