//! C6.1 for the devices that take no more than a registration: AF_XDP, physical addresses, VFIO's refusals. Where the system
//! has one not, or does not permit it, its test says so and counts as skipped.

use crate::common::kcore::Kcore;
use crate::common::xsk::{Xsk, socket};
use crate::common::{Rng, all, in_child, map, singles, without_capabilities};
use pagemill::{
    Allocator, Device, DeviceAddr, DeviceError, DeviceMap, Gfp, Identity, Mapped, Memory, Page, Physical, Umem, VfioMap,
};
use pagemill_os::device::pagemap;
use std::collections::HashSet;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex};

/// Does it refuse because such a process may not know, or not lock so much?
fn is_unpermitted(why: &DeviceError) -> bool {
    matches!(why, DeviceError::Unavailable { next: "run as root, or with CAP_SYS_ADMIN", .. })
        || matches!(why, DeviceError::System { errno: libc::ENOMEM | libc::EPERM, .. })
}

/// A physical address for each page of an allocator, if this process may know them.
fn physical(allocator: &Allocator) -> Option<Vec<DeviceAddr>> {
    match Device::new(allocator, Physical::new()) {
        Err(why) if is_unpermitted(&why) => {
            println!("skipped: {why}");
            None
        }
        device => {
            let (device, range) = (device.unwrap(), &allocator.arenas()[0].range);
            Some(range.clone().step_by(4096).map(|addr| device.address_of(addr).unwrap()).collect())
        }
    }
}

/// An allocator without detection does not go on in a child.
#[test]
fn memory_of_a_childs_own_device_is_not_given_back() {
    own_process!();
    let allocator = Allocator::builder().pages(1024).build().unwrap();
    let _parents = Device::new(&allocator, Identity).unwrap();
    in_child("registers memory with a device of its own", || {
        drop(all(&allocator, Gfp::NOWAIT));
        let own = Device::new(&allocator, Identity).unwrap();
        assert_eq!(allocator.give_back().get(), 0);
        drop(own);
        assert_eq!(allocator.give_back().get(), 1024);
    });
}

#[test]
fn two_mappings_of_a_page_have_one_physical_address() {
    const PAGES: usize = 512;
    let allocator = Allocator::builder().memory(Memory::memfd(PAGES)).huge_pages(false).build().unwrap();
    let arena = &allocator.arenas()[0];
    // SAFETY: nobody writes by it.
    let fd = unsafe { allocator.memfd(arena.id) }.unwrap();
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let place = map(2 << 20, 2 << 20);
    // SAFETY: a new mapping, in place of one that nobody uses.
    let again = unsafe {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        libc::mmap(place.cast(), 2 << 20, protection, flags, fd.as_raw_fd(), 0)
    };
    assert_ne!(again, libc::MAP_FAILED);
    // SAFETY: it stays mapped; no page of either allocator is handed out.
    let memory = unsafe { Memory::brought(again.cast(), PAGES) };
    let other = Allocator::builder().memory(memory).build().unwrap();
    // The kernel may move pages meanwhile: then the addresses before and after differ.
    let found = (0..20).find_map(|_| {
        let Some(before) = physical(&allocator) else { return Some(None) };
        let through_other = physical(&other)?;
        (physical(&allocator)? == before).then_some(Some((before, through_other)))
    });
    let Some((addresses, through_other)) = found.expect("the kernel moved pages twenty times") else { return };
    assert_eq!(addresses, through_other);
    assert!(addresses.iter().all(|addr| addr.get() != 0 && addr.get().is_multiple_of(4096)));
    assert_eq!(addresses.iter().collect::<HashSet<_>>().len(), PAGES, "two pages at one address");
    // Bytes of a page follow each other.
    let device = Device::new(&allocator, Physical::new()).unwrap();
    let byte = |at: usize| device.address_of(arena.range.start + at).unwrap().get();
    assert_eq!(byte(7 * 4096 + 4095) - byte(7 * 4096), 4095);
}

#[test]
fn kcore_shows_each_page_at_its_physical_address() {
    let Some(kernel) = Kcore::open() else { return };
    let allocator = Allocator::builder().pages(64).huge_pages(false).build().unwrap();
    let mut pages = singles(&allocator, 64);
    for (number, page) in pages.iter_mut().enumerate() {
        page.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 13 + at / 256 + number * 7) as u8);
    }
    let range = allocator.arenas()[0].range.clone();
    let found = (0..20).find_map(|_| {
        let Some(before) = physical(&allocator) else { return Some(None) };
        let at = |page: &Page| before[(page.addr() - range.start) / 4096].get();
        let seen: Vec<bool> = pages.iter().map(|page| kernel.page(at(page)) == page[..]).collect();
        // The kernel may have moved some meanwhile.
        (physical(&allocator)? == before).then_some(Some(seen))
    });
    if let Some(seen) = found.expect("the kernel moved pages twenty times") {
        assert_eq!(seen, [true; 64]);
    }
}

#[test]
fn memory_is_locked_while_it_has_physical_addresses() {
    let (plain, locked) = (Memory::anonymous(8), Memory::anonymous(8).locked().or_ordinary());
    let [plain, locked] = [plain, locked].map(|memory| Allocator::builder().memory(memory).build().unwrap());
    let is_locked = |allocator: &Allocator| pagemap::is_locked(allocator.arenas()[0].range.clone()).unwrap();
    let before = is_locked(&locked);
    if physical(&plain).is_none() {
        return;
    }
    assert!(!is_locked(&plain));
    let devices = [&plain, &locked].map(|allocator| Device::new(allocator, Physical::new()).unwrap());
    assert!(is_locked(&plain) && is_locked(&locked));
    drop(devices);
    assert_eq!((is_locked(&plain), is_locked(&locked)), (false, before), "what the allocator locked stays so");
    // As long as one of several devices has the addresses.
    let [one, other] = [(); 2].map(|()| Device::new(&plain, Physical::new()).unwrap());
    drop(one);
    assert!(is_locked(&plain));
    drop(other);
    assert!(!is_locked(&plain));
}

#[test]
fn physical_addresses_without_permission_are_refused_with_a_reason() {
    without_capabilities(|| {
        let allocator = Allocator::builder().pages(8).build().unwrap();
        let why = Device::new(&allocator, Physical::new()).unwrap_err();
        assert!(why.to_string().contains("frame 0); run as root, or with CAP_SYS_ADMIN"), "{why}");
        assert!(!pagemap::is_locked(allocator.arenas()[0].range.clone()).unwrap(), "left locked");
    });
}

#[test]
fn packets_are_sent_from_the_addresses_of_their_bytes() {
    let run = || {
        let Some(mut xsk) = Xsk::new() else { return };
        let allocator = Allocator::builder().memory(Memory::anonymous(600)).huge_pages(false).build().unwrap();
        let mut pages = singles(&allocator, 600);
        let device = match Device::new(&allocator, Umem::new(xsk.as_fd(), 4096, 0).unwrap()) {
            Err(why @ DeviceError::System { errno: libc::ENOBUFS, .. }) => return println!("skipped: {why}"),
            device => device.unwrap(),
        };
        xsk.bind();
        let mut random = Rng::new(0x5eed_0005);
        for round in 0..400 {
            let len = 60 + random.below(1400);
            let (page, start) = (random.below(600), random.below(4096 - len));
            let bytes: Vec<u8> = (0..len).map(|_| random.below(256) as u8).collect();
            pages[page][start..start + len].copy_from_slice(&bytes);
            let addr = device.address_of(pages[page].addr() + start).unwrap();
            assert!(xsk.send(addr.get(), len) == bytes, "packet {round}, {len} bytes at {addr}, is another");
        }
        assert_eq!(allocator.give_back().get(), 0);
    };
    // A thread's network of its own, with a loopback interface that nobody else uses.
    std::thread::spawn(run).join().unwrap();
}

#[test]
fn a_umem_takes_one_arena_and_one_socket() {
    let Some(socket) = socket() else { return };
    let memory = [Memory::anonymous(8), Memory::anonymous(8)];
    let two = memory.into_iter().fold(Allocator::builder(), |builder, memory| builder.memory(memory)).build().unwrap();
    let why = Device::new(&two, Umem::new(socket.as_fd(), 2048, 0).unwrap()).unwrap_err();
    if matches!(why, DeviceError::System { errno: libc::ENOBUFS, .. }) {
        return println!("skipped: {why}");
    }
    assert!(why.to_string().contains("has one UMEM"), "{why}");
    // The kernel has the first one of them until the socket is closed.
    let one = Allocator::builder().pages(8).build().unwrap();
    let why = Device::new(&one, Umem::new(socket.as_fd(), 4096, 256).unwrap()).unwrap_err();
    assert!(why.to_string().contains("use a socket that has no UMEM yet"), "{why}");
}

#[test]
fn a_retired_arena_is_mapped_for_pages_that_are_out_of_it_alone() {
    /// Notes what is mapped.
    struct Notes(Arc<Mutex<Vec<Range<usize>>>>);
    impl DeviceMap for Notes {
        unsafe fn map(&self, memory: Range<usize>) -> Result<Mapped, DeviceError> {
            self.0.lock().unwrap().push(memory.clone());
            Ok(Mapped::Linear(DeviceAddr::new(memory.start as u64)))
        }
        fn unmap(&self, _memory: Range<usize>, _mapped: &Mapped) {}
    }
    let allocator = Allocator::builder().pages(8).build().unwrap();
    let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
    let first = allocator.arenas()[0].clone();
    allocator.add_memory(Memory::anonymous(8)).unwrap();
    allocator.retire(first.id).unwrap();
    let mapped = Arc::new(Mutex::new(Vec::new()));
    let device = Device::new(&allocator, Notes(mapped.clone())).unwrap();
    assert!(!mapped.lock().unwrap().contains(&first.range) && mapped.lock().unwrap().len() == 1);
    assert_eq!(device.address_of(page.addr()).unwrap().get(), page.addr() as u64);
    assert_eq!(mapped.lock().unwrap().len(), 2);
}

#[test]
fn descriptors_that_are_no_device_are_refused_with_a_reason() {
    let null = File::open("/dev/null").unwrap();
    let allocator = Allocator::builder().pages(8).build().unwrap();
    let why = VfioMap::new(null.as_fd()).unwrap_err();
    assert!(why.to_string().contains("bound to vfio-pci, and set its IOMMU to Type1"), "{why}");
    for (chunk, headroom) in [(0, 0), (1024, 0), (3000, 0), (8192, 0), (2048, 2048)] {
        let why = Umem::new(null.as_fd(), chunk, headroom).unwrap_err();
        assert!(why.to_string().contains("use chunks of 2048 or 4096 bytes"), "{why}");
    }
    let why = Device::new(&allocator, Umem::new(null.as_fd(), 2048, 0).unwrap()).unwrap_err();
    assert!(why.to_string().contains("use an AF_XDP socket"), "{why}");
}
