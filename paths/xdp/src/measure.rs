//! Receivers to be measured: the lane of `pagemill xdp drop` with several ways to get its pages, and what is written without
//! a pool: a bare loop with a private list of frames.
use std::mem::ManuallyDrop;

use pagemill::{Allocator, Bulk, Error as MemoryError, Exact, Gfp, Page, PageList, PageSource, Source};

use crate::Error;
use crate::interface::Interface;
use crate::lane::{Generate, Job, Lane};
use crate::port::{BATCH, Rings};
use crate::program::{Attached, Mode};
use crate::umem::{Shape, Socket, Umem};

const RING: u32 = 2048;
/// Full rings for receiving, and what the pools and the allocator's own lists keep.
const PAGES: usize = 8192;
const PAGE: u64 = pagemill::PAGE_SIZE as u64;

/// Where a receiver's pages come from, and where they go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refill {
    /// Addresses in a vector, without tables, checks, or slots fetched ahead: the loop that guides have.
    PrivateList,
    /// A page pool that asks the allocator page by page.
    Single {
        /// Whether pages go back to the pool; else to the allocator.
        is_recycling: bool,
    },
    /// A page pool that asks for lists of 64.
    List {
        /// As above.
        is_recycling: bool,
    },
    /// A page pool that asks for arrays of 64, as they are.
    Array {
        /// As above.
        is_recycling: bool,
    },
}

/// A receiver on queue 0 of an interface.
pub trait Receiver: Send {
    /// Receives and drops what is there, up to 64 packets. Returns how many they were.
    ///
    /// # Errors
    /// What stopped it.
    fn turn(&mut self) -> Result<u64, Error>;

    /// Packets that the kernel dropped on the way to it.
    ///
    /// # Errors
    /// The system's.
    fn dropped(&self) -> Result<u64, Error>;

    /// Closes it. Returns how many pages were lost, which is 0; `None` where the card may still write to them (zero copy).
    fn end(self: Box<Self>) -> Option<usize>;
}

/// Opens a receiver, with the program in the driver.
///
/// # Errors
/// What this machine does not have or does not permit.
pub fn receiver(interface: &Interface, refill: Refill) -> Result<Box<dyn Receiver>, Error> {
    let mut umem = Umem::new(PAGES)?;
    let attached = Attached::new(interface, Mode::Native, &mut |_| {})?;
    let (socket, rings) = umem.open(interface, 0, Shape { ring: RING, is_generic: false }, &mut |_| {})?;
    let allocator = umem.allocator().clone();
    let source = PageSource::pages(&allocator);
    attached.give(0, &socket)?;
    Ok(match refill {
        Refill::PrivateList => Box::new(Bare::new(umem, attached, socket, rings)?),
        Refill::Single { is_recycling } => pooled(umem, attached, socket, rings, Singly(source), is_recycling),
        Refill::List { is_recycling } => pooled(umem, attached, socket, rings, Lists(allocator, source), is_recycling),
        Refill::Array { is_recycling } => pooled(umem, attached, socket, rings, source, is_recycling),
    })
}

/// A sender on queue 0 of an interface: the lane of `pagemill xdp generate`.
pub struct Sender {
    lane: Lane<PageSource<Page>>,
    umem: Umem,
}

impl Sender {
    /// Opens a socket that sends copies of a packet.
    ///
    /// # Errors
    /// What this machine does not have or does not permit.
    pub fn out_of(interface: &Interface, packet: Vec<u8>) -> Result<Self, Error> {
        let mut umem = Umem::new(PAGES)?;
        let shape = Shape { ring: RING, is_generic: false };
        let socket = umem.open(interface, 0, shape, &mut |_| {})?;
        let job = Job::Generate(Generate::new(packet, 0, 1, 0, None));
        let lane = Lane::new(&umem, PageSource::pages(umem.allocator()), vec![socket], job, "sender");
        Ok(Self { lane, umem })
    }

    /// Sends so many packets, and waits until they are sent.
    ///
    /// # Errors
    /// What stopped it.
    pub fn send(&mut self, count: u32) -> Result<(), Error> {
        self.lane.make(u64::from(count));
        while !self.lane.is_done() {
            self.lane.turn()?;
        }
        Ok(())
    }

    /// Closes it. Returns how many pages were lost, as [`Receiver::end`] does.
    #[must_use]
    pub fn end(self) -> Option<usize> {
        let Self { lane, mut umem } = self;
        let (sockets, rest) = lane.split();
        umem.close(sockets).map(|closed| rest.end(&closed))
    }
}

/// The allocator's pages, asked for one by one.
struct Singly(PageSource<Page>);

impl Source for Singly {
    type Item = Page;
    fn alloc(&self, request: Bulk<'_, Exact, Page>) -> Result<Option<Page>, MemoryError> {
        self.0.alloc(request)
    }
    fn free(&self, page: Page) {
        self.0.free(page);
    }
}

/// The same, asked for as lists.
struct Lists(Allocator, PageSource<Page>);

impl Source for Lists {
    type Item = Page;
    fn alloc(&self, request: Bulk<'_, Exact, Page>) -> Result<Option<Page>, MemoryError> {
        self.1.alloc(request)
    }
    fn free(&self, page: Page) {
        self.1.free(page);
    }
    fn fill(&self, request: Bulk<'_, Exact, Page>, slots: &mut [Option<Page>]) -> Result<usize, MemoryError> {
        let mut list = PageList::new();
        self.0.alloc_pages_bulk_list(request, &mut list)?;
        let mut filled = 0;
        for slot in slots.iter_mut().filter(|slot| slot.is_none()) {
            let Some(page) = list.pop() else { break };
            *slot = Some(page);
            filled += 1;
        }
        Ok(filled)
    }
}

/// A lane, and what it needs.
struct Pooled<S: Source<Item = Page>> {
    lane: Lane<S>,
    attached: Attached,
    umem: Umem,
}

fn pooled<S: Source<Item = Page> + Send + Sync + 'static>(
    umem: Umem,
    attached: Attached,
    socket: Socket,
    rings: Rings,
    source: S,
    is_recycling: bool,
) -> Box<dyn Receiver> {
    let lane = Lane::new(&umem, source, vec![(socket, rings)], Job::Drop, "measured");
    let lane = if is_recycling { lane } else { lane.without_recycling() };
    Box::new(Pooled { lane, attached, umem })
}

impl<S: Source<Item = Page> + Send + Sync> Receiver for Pooled<S> {
    fn turn(&mut self) -> Result<u64, Error> {
        let before = self.lane.counts().received;
        self.lane.turn()?;
        Ok(self.lane.counts().received - before)
    }
    fn dropped(&self) -> Result<u64, Error> {
        self.lane.kernel().map(|kernel| kernel.all_dropped())
    }
    fn end(self: Box<Self>) -> Option<usize> {
        let Self { lane, attached, mut umem } = *self;
        drop(attached);
        let (sockets, rest) = lane.split();
        umem.close(sockets).map(|closed| rest.end(&closed))
    }
}

/// The loop that every guide to AF_XDP has.
struct Bare {
    rings: Rings,
    free: Vec<u64>,
    received: u64,
    received_bytes: u64,
    socket: Socket,
    attached: Attached,
    /// The frames' pages. They go back when the socket is closed, and else are lost.
    pages: ManuallyDrop<Vec<Option<Page>>>,
    umem: Umem,
}

impl Bare {
    fn new(umem: Umem, attached: Attached, socket: Socket, rings: Rings) -> Result<Self, Error> {
        let mut pages: Vec<Option<Page>> = (0..PAGES / 2).map(|_| None).collect();
        let request = Bulk::exact(PAGES / 2).gfp(Gfp::KERNEL);
        umem.allocator().alloc_pages_bulk_array(request, &mut pages).map_err(Error::Exhausted)?;
        let base = umem.base();
        let free = pages.iter().flatten().map(|page| (page.addr() - base) as u64).collect();
        let (received, received_bytes, pages) = (0, 0, ManuallyDrop::new(pages));
        Ok(Self { rings, free, received, received_bytes, socket, attached, pages, umem })
    }
}

impl Receiver for Bare {
    fn turn(&mut self) -> Result<u64, Error> {
        let Self { rings, free, .. } = self;
        let ready = rings.rx.ready()?.min(BATCH);
        for _ in 0..ready {
            let Some(packet) = rings.rx.pop() else { break };
            self.received += 1;
            self.received_bytes += u64::from(packet.len);
            free.push(packet.addr - packet.addr % PAGE);
        }
        if ready > 0 {
            rings.rx.publish();
        }
        if rings.fill.room(BATCH)? >= BATCH && free.len() >= BATCH as usize {
            for frame in free.drain(free.len() - BATCH as usize..) {
                rings.fill.push(frame);
            }
            rings.fill.publish();
        }
        if rings.fill.wants_wakeup() {
            self.socket.wake_receiver();
        }
        Ok(u64::from(ready))
    }
    fn dropped(&self) -> Result<u64, Error> {
        let mut kernel = crate::counts::Kernel::default();
        kernel.add(&self.socket.statistics()?);
        Ok(kernel.all_dropped())
    }
    fn end(self: Box<Self>) -> Option<usize> {
        let Self { rings, socket, attached, pages, mut umem, .. } = *self;
        drop(attached);
        umem.close(vec![(socket, rings)]).map(|_| drop(ManuallyDrop::into_inner(pages)))?;
        umem.allocator().validate().ok().map(|census| census.handed_out)
    }
}
