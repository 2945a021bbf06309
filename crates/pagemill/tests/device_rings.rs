//! C6.1: addresses in io_uring's fixed buffers lead to their bytes: what is read and written through them is
//! compared whole. Where there is no io_uring, or it is not permitted, each test says so and counts as skipped.

use crate::common::{Rng, all_without_waiting, in_child, map, without_capabilities};
use io_uring::{IoUring, opcode, squeue, types};
use pagemill::{
    Allocator, Bulk, Device, DeviceAddr, DeviceError, DmaBlock, DmaPool, FixedBuffers, Gfp, Memory, Page, PageList,
    Piece,
};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::os::unix::fs::FileExt;

const GIB: usize = 1 << 30;
const FILE: usize = 1 << 20;

/// A ring, if the system gives one.
pub(crate) fn ring() -> Option<IoUring> {
    IoUring::new(64).map_err(|why| println!("skipped: no io_uring here ({why})")).ok()
}
pub(crate) fn fd(ring: &IoUring) -> BorrowedFd<'_> {
    // SAFETY: the ring is open for as long as it is borrowed.
    unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) }
}

/// Does it refuse because such a process may not lock so much?
fn is_lock_limit(why: &DeviceError) -> bool {
    matches!(why, DeviceError::System { errno: libc::ENOMEM, .. })
}
/// None where the process may not lock so much: the tests beside it, and all else of that user, share the limit.
fn within_limit<T>(made: Result<T, DeviceError>) -> Option<T> {
    match made {
        Err(why) if is_lock_limit(&why) => {
            println!("skipped: {why}");
            None
        }
        made => Some(made.unwrap()),
    }
}

pub(crate) fn file() -> File {
    // SAFETY: a name that ends; a new descriptor, or -1, which is looked at.
    let fd = unsafe { libc::memfd_create(c"pagemill-test".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: nobody else has it.
    unsafe { File::from_raw_fd(fd) }
}

/// Random bytes.
fn bytes(random: &mut Rng, n: usize) -> Vec<u8> {
    (0..n).map(|_| random.below(256) as u8).collect()
}

/// A request from or to `len` bytes at a device's address: nothing but that address says where.
fn request(
    buffers: &FixedBuffers,
    file: &File,
    is_read: bool,
    addr: DeviceAddr,
    len: usize,
    at: usize,
) -> squeue::Entry {
    let start = std::ptr::with_exposed_provenance_mut(buffers.address(addr).unwrap());
    let (file, index) = (types::Fd(file.as_raw_fd()), FixedBuffers::index(addr));
    match is_read {
        true => opcode::ReadFixed::new(file, start, len as u32, index).offset(at as u64).build(),
        false => opcode::WriteFixed::new(file, start, len as u32, index).offset(at as u64).build(),
    }
}

/// Submits all requests, and returns the result of each.
fn run(ring: &mut IoUring, requests: &[squeue::Entry]) -> Vec<i32> {
    for (number, request) in requests.iter().enumerate() {
        // SAFETY: the memory and the file are the caller's until the requests are done, which is waited for.
        unsafe { ring.submission().push(&request.clone().user_data(number as u64)) }.unwrap();
    }
    let mut results = vec![0; requests.len()];
    for _ in requests {
        ring.submit_and_wait(1).unwrap();
        let done = ring.completion().next().unwrap();
        results[done.user_data() as usize] = done.result();
    }
    results
}

/// Rounds of requests through a page's address, on one ring after the other; pages and file are compared whole.
fn read_and_write(rings: &mut [&mut IoUring], buffers: &FixedBuffers, device: &Device, pages: &mut [Page], seed: u64) {
    let mut random = Rng::new(seed);
    println!("seed {seed:#x}");
    let (file, mut in_file) = (file(), bytes(&mut random, FILE));
    file.write_all_at(&in_file, 0).unwrap();
    let mut in_pages: Vec<Vec<u8>> = pages.iter().map(|_| bytes(&mut random, 4096)).collect();
    pages.iter_mut().zip(&in_pages).for_each(|(page, bytes)| page.copy_from_slice(bytes));
    for round in 0..60 {
        // Neighbouring parts of the file, so that none is written twice in a round; each with another page.
        let first = random.below(pages.len());
        let parts: Vec<_> = (0..16)
            .map(|part| {
                let (start, place) = (random.below(4096), part * (FILE / 16));
                let len = 1 + random.below(4096 - start);
                let at = place + random.below(FILE / 16 - len);
                ((first + part * 7) % pages.len(), start, len, at, random.below(2) == 0)
            })
            .collect();
        let entries: Vec<_> = parts
            .iter()
            .map(|&(page, start, len, at, is_read)| {
                let addr = device.address_of(pages[page].addr() + start).unwrap();
                request(buffers, &file, is_read, addr, len, at)
            })
            .collect();
        let turn = round % rings.len();
        let results = run(rings[turn], &entries);
        for (&(page, start, len, at, is_read), result) in parts.iter().zip(results) {
            assert_eq!(result, len as i32);
            let (memory, disk) = (&mut in_pages[page][start..start + len], &mut in_file[at..at + len]);
            if is_read { memory.copy_from_slice(disk) } else { disk.copy_from_slice(memory) }
        }
        let mut found = vec![0; FILE];
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found == in_file, "the file differs after round {round}");
        assert!(pages.iter().zip(&in_pages).all(|(page, bytes)| page[..] == bytes[..]), "a page differs after {round}");
    }
}

/// All of an allocator with two arenas, one of them of a length that is no power of two.
fn two_arenas() -> (Allocator, Vec<Page>) {
    let builder = Allocator::builder().memory(Memory::anonymous(512)).memory(Memory::memfd(300));
    let allocator = builder.huge_pages(false).build().unwrap();
    let pages = all_without_waiting(&allocator, Gfp::NOWAIT);
    assert_eq!(pages.len(), 812);
    (allocator, pages)
}

#[test]
fn fixed_buffer_io_reaches_the_bytes_of_its_addresses() {
    let Some(mut ring) = ring() else { return };
    let (allocator, mut pages) = two_arenas();
    let buffers = FixedBuffers::new(fd(&ring)).unwrap();
    let Some(device) = within_limit(Device::new(&allocator, buffers.clone())) else { return };
    read_and_write(&mut [&mut ring], &buffers, &device, &mut pages, 0x5eed_0001);
    // Without the device its addresses lead nowhere, and the table has room again for another.
    let addr = device.address_of(pages[0].addr()).unwrap();
    let file = file();
    let entry = request(&buffers, &file, true, addr, 16, 0);
    assert_eq!(buffers.address(DeviceAddr::new(addr.get() + (1 << 29))), None, "behind the buffer's end");
    drop(device);
    assert_eq!((buffers.address(addr), run(&mut ring, &[entry])), (None, vec![-libc::EFAULT]));
    let Some(device) = within_limit(Device::new(&allocator, buffers.clone())) else { return };
    read_and_write(&mut [&mut ring], &buffers, &device, &mut pages, 0x5eed_0002);
    drop((device, buffers));
    // The ring is as it was before, and may have buffers by hand.
    FixedBuffers::with_entries(fd(&ring), 1).unwrap();
}

#[test]
fn rings_can_share_a_table_of_buffers() {
    let (Some(mut one), Some(mut other)) = (ring(), ring()) else { return };
    let (allocator, mut pages) = two_arenas();
    let buffers = FixedBuffers::new(fd(&one)).unwrap();
    // Before there is memory and after: both see it.
    match buffers.clone_to(fd(&other)) {
        Err(why @ DeviceError::System { errno: libc::EINVAL, .. }) => return println!("skipped: {why}"),
        shared => shared.unwrap(),
    }
    let device = match Device::new(&allocator, buffers.clone()) {
        // It says so, not that the other ring has to give up its own.
        Err(why @ DeviceError::System { errno: libc::EBUSY, .. }) => {
            assert!(why.to_string().contains("6.13 to add arenas later"), "{why}");
            return println!("skipped: {why}");
        }
        made => within_limit(made),
    };
    let Some(device) = device else { return };
    let Some(mut third) = ring() else { return };
    let Some(()) = within_limit(buffers.clone_to(fd(&third))) else { return };
    read_and_write(&mut [&mut one, &mut other, &mut third], &buffers, &device, &mut pages, 0x5eed_0003);
    let addr = device.address_of(pages[700].addr()).unwrap();
    let file = file();
    let entry = request(&buffers, &file, true, addr, 16, 0);
    drop(device);
    for ring in [&mut one, &mut other, &mut third] {
        assert_eq!(run(ring, std::slice::from_ref(&entry)), [-libc::EFAULT], "a ring still reaches the memory");
    }
    let why = buffers.clone_to(fd(&third)).unwrap_err();
    assert!(why.to_string().contains("unregister the other ring's buffers"), "{why}");
}

#[test]
fn fixed_buffer_io_reaches_the_blocks_of_dma_pools() {
    let Some(mut ring) = ring() else { return };
    let (allocator, pages) = two_arenas();
    drop(pages);
    let buffers = FixedBuffers::new(fd(&ring)).unwrap();
    let Some(device) = within_limit(Device::new(&allocator, buffers.clone())) else { return };
    let (file, mut random) = (file(), Rng::new(0x5eed_0008));
    for (size, boundary) in [(16, 0), (100, 0), (512, 4096), (4096, 0), (9000, 16384)] {
        let pool = DmaPool::create("requests", &device, size, 0, boundary).unwrap();
        let mut slots = [const { None::<DmaBlock> }; 32];
        assert_eq!(pool.alloc_bulk(Gfp::KERNEL, &mut slots).unwrap(), 32);
        let blocks: Vec<&DmaBlock> = slots.iter().flatten().collect();
        let bytes_of = |block: &DmaBlock| {
            // SAFETY: a block that is out, of at least that size; the device is not at it.
            unsafe { std::slice::from_raw_parts_mut(block.as_ptr(), size) }
        };
        let written = bytes(&mut random, 32 * size);
        file.write_all_at(&written, 0).unwrap();
        blocks.iter().for_each(|block| bytes_of(block).fill(0xee));
        // Every other one is read into; the ones between stay as they are.
        let read = |at: usize| request(&buffers, &file, true, pool.device_addr(blocks[at]), size, at * size);
        let requests: Vec<_> = (0..32).step_by(2).map(read).collect();
        assert_eq!(run(&mut ring, &requests), [size as i32; 16]);
        for (at, block) in blocks.iter().enumerate() {
            let part = &written[at * size..(at + 1) * size];
            assert!(
                bytes_of(block).iter().eq(part.iter().map(|byte| if at % 2 == 0 { byte } else { &0xee })),
                "{size}: {at}"
            );
        }
        // And written from, in the other order.
        let write = |at: usize| request(&buffers, &file, false, pool.device_addr(blocks[at]), size, (31 - at) * size);
        assert_eq!(run(&mut ring, &(0..32).map(write).collect::<Vec<_>>()), [size as i32; 32]);
        let mut found = vec![0; 32 * size];
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found.chunks(size).zip(blocks.iter().rev()).all(|(part, block)| part == bytes_of(block)), "{size}");
        assert_eq!(pool.free_bulk(&mut slots), 32);
        pool.destroy().unwrap();
    }
}

/// Address space of 1 GiB and 64 MiB for 10 MiB of memory: the same 2 MiB again and again, but for 2 MiB of its own at both
/// ends and on both sides of 1 GiB. It begins where no piece of 1 GiB would by itself.
struct Large {
    start: usize,
}
impl Large {
    const BYTES: usize = GIB + (64 << 20);
    const OWN: [usize; 4] = [0, GIB - (2 << 20), GIB, Self::BYTES - (2 << 20)];

    fn new() -> Self {
        // Of one file: kernels before 6.5 take no buffer of several.
        let file = file();
        file.set_len(10 << 20).unwrap();
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let start = map(Self::BYTES, 2 << 20).addr();
        for at in (0..Self::BYTES).step_by(2 << 20) {
            let place = std::ptr::with_exposed_provenance_mut(start + at);
            let part = Self::OWN.iter().position(|&own| own == at).map_or(0, |own| own as libc::off_t + 1);
            let (flags, part) = (libc::MAP_SHARED | libc::MAP_FIXED, part << 21);
            // SAFETY: a mapping in the place of a part of another, which nobody uses yet.
            let map = unsafe { libc::mmap(place, 2 << 20, protection, flags, file.as_raw_fd(), part) };
            assert_ne!(map, libc::MAP_FAILED);
        }
        Self { start }
    }
    fn bytes(&mut self, at: usize, n: usize) -> &mut [u8] {
        // SAFETY: mapped until the process ends, and named nowhere else.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(self.start + at), n) }
    }
}

#[test]
fn an_arena_above_the_limit_of_a_buffer_is_split() {
    let Some(mut ring) = ring() else { return };
    let mut large = Large::new();
    let start = large.start;
    // SAFETY: it stays mapped, and what is the test's own is handed out to it below.
    let memory = unsafe { Memory::brought(std::ptr::with_exposed_provenance_mut(large.start), Large::BYTES / 4096) };
    let allocator = Allocator::builder().memory(memory).build().unwrap();
    let mut all = PageList::new();
    allocator.alloc_pages_bulk_list(Bulk::exact(Large::BYTES / 4096), &mut all).unwrap();
    let buffers = FixedBuffers::with_entries(fd(&ring), 2).unwrap();
    let Some(device) = within_limit(Device::new(&allocator, buffers.clone())) else { return };
    let addr = |at: usize| device.address_of(start + at).unwrap();
    assert_eq!((FixedBuffers::index(addr(GIB - 1)), FixedBuffers::offset(addr(GIB - 1))), (0, GIB as u32 - 1));
    assert_eq!((FixedBuffers::index(addr(GIB + 5)), FixedBuffers::offset(addr(GIB + 5))), (1, 5));
    assert_eq!(addr(Large::BYTES - 1).get() - addr(0).get(), Large::BYTES as u64 - 1);

    let mut random = Rng::new(0x5eed_0004);
    for at in Large::OWN.into_iter().chain([2 << 20]) {
        large.bytes(at, 2 << 20).copy_from_slice(&bytes(&mut random, 2 << 20));
    }
    let file = file();
    for round in 0..300 {
        // One in two lies in memory of its own, next to the limit or an end; the others anywhere.
        let len = 1 + random.below(9000);
        let at = match random.below(2) {
            0 => Large::OWN[random.below(4)] + random.below((2 << 20) - len),
            _ => random.below(Large::BYTES - len),
        };
        if at < GIB && at + len > GIB {
            continue; // In two buffers: not one request.
        }
        let expected = large.bytes(at, len).to_vec();
        assert_eq!(run(&mut ring, &[request(&buffers, &file, false, addr(at), len, 0)]), [len as i32]);
        let mut found = vec![0; len];
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found == expected, "round {round}: {len} bytes at {at:#x} were written wrong");
        let other = bytes(&mut random, len);
        file.write_all_at(&other, 0).unwrap();
        assert_eq!(run(&mut ring, &[request(&buffers, &file, true, addr(at), len, 0)]), [len as i32]);
        assert!(large.bytes(at, len) == other, "round {round}: {len} bytes at {at:#x} were read wrong");
    }
    // Memory on both sides is cut into a request for each; all of it arrives.
    let (at, len) = (GIB - 5000, 12_000);
    let data = bytes(&mut random, len);
    file.write_all_at(&data, 0).unwrap();
    let pieces = buffers.pieces(large.bytes(at, len)).unwrap();
    let [low, high] =
        [(0, start + at, 5000), (1, start + GIB, 7000)].map(|(index, addr, len)| Piece { index, addr, len });
    assert_eq!(pieces, [low, high]);
    let reads = pieces.iter().map(|piece| {
        let memory = std::ptr::with_exposed_provenance_mut(piece.addr);
        let read = opcode::ReadFixed::new(types::Fd(file.as_raw_fd()), memory, piece.len as u32, piece.index);
        read.offset((piece.addr - pieces[0].addr) as u64).build()
    });
    assert_eq!(run(&mut ring, &reads.collect::<Vec<_>>()), [5000, 7000]);
    assert!(large.bytes(at, len) == data, "read in pieces");
    assert!(matches!(buffers.pieces_of([&data]), Err(DeviceError::NotHere { .. })), "no memory of the allocator");
    // Up to the limit and from it on; over it, and by the other buffer's index, the kernel refuses.
    let ends =
        [request(&buffers, &file, false, addr(GIB - 4096), 4096, 0), request(&buffers, &file, false, addr(GIB), 1, 0)];
    assert_eq!(run(&mut ring, &ends), [4096, 1]);
    let over = request(&buffers, &file, false, addr(GIB - 4096), 4097, 0);
    let start = std::ptr::with_exposed_provenance_mut(large.start + GIB);
    let foreign = opcode::WriteFixed::new(types::Fd(file.as_raw_fd()), start, 1, 0).build();
    assert_eq!(run(&mut ring, &[over, foreign]), [-libc::EFAULT; 2]);
    drop(device);

    // Two entries are too few where one is taken.
    let small = Allocator::builder().pages(64).build().unwrap();
    let first = Device::new(&small, buffers.clone()).unwrap();
    let why = Device::new(&allocator, buffers.clone()).unwrap_err();
    assert!(why.to_string().contains("the table of 2 buffers has no 2 entries left"), "{why}");
    drop(first);
    Device::new(&allocator, buffers).unwrap();
}

#[test]
fn refused_tables_of_buffers_say_what_to_do() {
    let why = FixedBuffers::new(File::open("/dev/null").unwrap().as_fd()).unwrap_err();
    assert!(why.to_string().ends_with("use the descriptor of an io_uring"), "{why}");
    let Some(ring) = ring() else { return };
    let why = FixedBuffers::with_entries(fd(&ring), 1 << 15).unwrap_err();
    assert!(why.to_string().contains("ask for 1 to 16384"), "{why}");
    let _buffers = FixedBuffers::new(fd(&ring)).unwrap();
    let why = FixedBuffers::new(fd(&ring)).unwrap_err();
    assert!(why.to_string().contains("unregister the ring's buffers"), "{why}");
    if let Ok(own) = IoUring::builder().setup_single_issuer().build(8) {
        let from_elsewhere = std::thread::scope(|scope| scope.spawn(|| FixedBuffers::new(fd(&own))).join());
        let why = from_elsewhere.unwrap().unwrap_err();
        assert!(why.to_string().contains("IORING_SETUP_SINGLE_ISSUER): do this on that thread"), "{why}");
    }
}

/// `RLIMIT_MEMLOCK` holds for a thread without CAP_IPC_LOCK; a thread can drop its own capabilities.
#[test]
fn memory_above_the_lock_limit_is_refused() {
    without_capabilities(|| {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: for the system to write.
        unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
        let pages = (limit.rlim_cur / 4096).saturating_add(512);
        if pages > 1 << 17 {
            return println!("skipped: RLIMIT_MEMLOCK is {} bytes here, too much to exceed", limit.rlim_cur);
        }
        let Some(ring) = ring() else { return };
        let allocator = Allocator::builder().pages(pages as usize).build().unwrap();
        let buffers = FixedBuffers::new(fd(&ring)).unwrap();
        let why = Device::new(&allocator, buffers.clone()).unwrap_err();
        assert!(is_lock_limit(&why) && why.to_string().contains("RLIMIT_MEMLOCK"), "{why}");
        // No entry is left behind: the table takes a smaller allocator.
        let small = Allocator::builder().pages(16).build().unwrap();
        drop(within_limit(Device::new(&small, buffers)));
    });
}

#[test]
fn registered_memory_is_kept_until_the_device_is_dropped() {
    let Some(ring) = ring() else { return };
    let (allocator, pages) = two_arenas();
    let buffers = FixedBuffers::new(fd(&ring)).unwrap();
    let Some(device) = within_limit(Device::new(&allocator, buffers)) else { return };
    drop(pages);
    allocator.drain();
    assert_eq!(allocator.give_back().get(), 0);
    let again = device.clone();
    drop(device);
    assert_eq!(allocator.give_back().get(), 0);
    drop(again);
    assert_eq!(allocator.give_back().get(), 812);
}

/// An allocator without detection does not go on in a child.
#[test]
fn a_forked_child_cannot_use_its_parents_rings() {
    own_process!();
    let (Some(mut ring), Some(other)) = (ring(), ring()) else { return };
    let (allocator, mut pages) = two_arenas();
    let mut buffers = Some(FixedBuffers::new(fd(&ring)).unwrap());
    let mut device = match within_limit(Device::new(&allocator, buffers.clone().unwrap())) {
        None => return,
        device => device,
    };
    in_child("has its parent's device", || {
        let (device, buffers) = (device.take().unwrap(), buffers.take().unwrap());
        assert_eq!(device.address_of(pages[0].addr()), Err(DeviceError::Forked));
        assert_eq!(buffers.clone_to(fd(&other)), Err(DeviceError::Forked));
        assert_eq!(Device::new(&allocator, buffers.clone()).unwrap_err(), DeviceError::Forked);
        // Its copy of the memory is no device's: pages of it go back.
        pages.clear();
        allocator.drain();
        assert_eq!(allocator.give_back().get(), 512);
        drop((device, buffers));
    });
    let (Some(device), Some(buffers)) = (device, buffers) else { unreachable!("they were taken in the child") };
    read_and_write(&mut [&mut ring], &buffers, &device, &mut pages, 0x5eed_0006);
    drop(pages);
    allocator.drain();
    assert_eq!(allocator.give_back().get(), 0);
}
