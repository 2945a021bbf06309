//! C6.1: a device behind an IOMMU reaches the bytes of its addresses, and no others. The device is QEMU's `edu`, made for
//! teaching: it copies between memory and 4 KiB of its own. The virtual machine of `tests/vm/devices.sh` has one, and names
//! it; anywhere else this counts as skipped, since no other program may use the device meanwhile.

use crate::common::edu::{Container, Edu, MOST};
use crate::common::{Rng, all_without_waiting, without_capabilities};
use pagemill::{Allocator, Device, Gfp, Memory, Page, VfioMap};
use pagemill_os::device::vfio;
use std::collections::HashSet;
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

/// The device's name on the bus, `0000:00:03.0`. It is one test's at a time, whatever process that is in: as long as it has
/// the file.
fn named() -> Option<(String, File)> {
    let Ok(name) = std::env::var("PAGEMILL_TEST_EDU") else {
        println!("skipped: no device behind an IOMMU was named; cargo xtask vm devices has one");
        return None;
    };
    let turn = File::create(std::env::temp_dir().join("pagemill-test-edu")).unwrap();
    turn.lock().unwrap();
    Some((name, turn))
}

#[test]
fn a_device_behind_an_iommu_reaches_only_mapped_addresses() {
    let Some((name, _turn)) = named() else { return };
    let container = Container::of(&name);
    let edu = Edu::open(&container, &name);
    let allowed = vfio::iommu(container.as_fd()).unwrap();
    let ranges = allowed.ranges.expect("Linux 5.4");
    let left = allowed.entries_left.expect("Linux 5.10");

    let memory = [Memory::anonymous(600), Memory::memfd(300)];
    let builder = memory.into_iter().fold(Allocator::builder(), |builder, memory| builder.memory(memory));
    let allocator = builder.huge_pages(false).build().unwrap();
    // Addresses that edu can take; so they lie in order from 1 MiB on, and the kernel allows them.
    let map = || VfioMap::new(container.as_fd()).unwrap().with_address_bits(32);
    let device = Device::new(&allocator, map()).unwrap();
    allocator.add_memory(Memory::anonymous(700)).unwrap();
    let mut pages = all_without_waiting(&allocator, Gfp::NOWAIT);
    assert_eq!(pages.len(), 1600);
    let iova = |page: &Page, at: usize| device.address_of(page.addr() + at).unwrap().get();
    let all: HashSet<u64> = pages.iter().map(|page| iova(page, 0)).collect();
    assert_eq!(all.len(), 1600, "two pages at one address");
    assert!(
        all.iter().all(|&first| ranges.iter().any(|range| range.contains(&first) && range.contains(&(first + 4095))))
    );
    assert_eq!(vfio::iommu(container.as_fd()).unwrap().entries_left, Some(left - 3), "a piece an arena");

    let mut random = Rng::new(0x5eed_0007);
    for page in &mut pages {
        page.fill_with(|| random.below(256) as u8);
    }
    let mut expected: Vec<Vec<u8>> = pages.iter().map(|page| page.to_vec()).collect();
    for round in 0..24 {
        // Bytes of one page to some place in another, by way of the device.
        let len = 1 + random.below(MOST);
        let (from, to) = (random.below(1600), random.below(1600));
        let (start, end) = (random.below(4097 - len), random.below(4097 - len));
        edu.take(iova(&pages[from], start), len);
        edu.put(iova(&pages[to], end), len);
        let bytes = expected[from][start..start + len].to_vec();
        expected[to][end..end + len].copy_from_slice(&bytes);
        assert!(pages.iter().zip(&expected).all(|(page, bytes)| page[..] == bytes[..]), "round {round}");
    }

    // Without the device nothing reaches the memory any more, and the addresses are free again.
    let (from, to) = (iova(&pages[3], 0), iova(&pages[1500], 0));
    edu.take(from, MOST);
    drop(device);
    assert_eq!(vfio::iommu(container.as_fd()).unwrap().entries_left, Some(left));
    edu.put(to, MOST);
    edu.put(from, MOST);
    assert!(pages.iter().zip(&expected).all(|(page, bytes)| page[..] == bytes[..]), "it still reaches the memory");
    let device = Device::new(&allocator, map()).unwrap();
    edu.take(device.address_of(pages[7].addr()).unwrap().get(), MOST);
    edu.put(device.address_of(pages[8].addr()).unwrap().get(), MOST);
    assert!(pages[8][..MOST] == expected[7][..MOST] && pages[8][MOST..] == expected[8][MOST..]);
}

#[test]
fn vfio_maps_beyond_the_iommu_or_a_limit_are_refused_with_a_reason() {
    own_process!();
    let Some((name, _turn)) = named() else { return };
    let why = VfioMap::new(Container::empty().as_fd()).unwrap_err();
    assert!(why.to_string().contains("set its IOMMU to Type1 first"), "{why}");

    let container = Arc::new(Container::of(&name));
    let allocator = Allocator::builder().pages(8192).huge_pages(false).build().unwrap();
    let small = VfioMap::new(container.as_fd()).unwrap().with_address_bits(24);
    let why = Device::new(&allocator, small).unwrap_err();
    assert!(why.to_string().contains("has no free range of 33554432 bytes"), "{why}");
    // Mapped by another map: its addresses are not this one's to give.
    let other = Device::new(&allocator, VfioMap::new(container.as_fd()).unwrap()).unwrap();
    let why = Device::new(&allocator, VfioMap::new(container.as_fd()).unwrap()).unwrap_err();
    assert!(why.to_string().contains("map all of it with one VfioMap"), "{why}");
    drop(other);

    let limited = Arc::clone(&container);
    without_capabilities(move || {
        // 32 MiB, where 8 may be locked unless the limit was raised.
        let limit = libc::rlimit { rlim_cur: 8 << 20, rlim_max: 8 << 20 };
        // SAFETY: it reads the limit.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) }, 0);
        let why = Device::new(&allocator, VfioMap::new(limited.as_fd()).unwrap()).unwrap_err();
        assert!(why.to_string().contains("raise RLIMIT_MEMLOCK"), "{why}");
        // Nothing of it is left behind.
        let few = Allocator::builder().pages(64).build().unwrap();
        drop(Device::new(&few, VfioMap::new(limited.as_fd()).unwrap()).unwrap());
    });
}
