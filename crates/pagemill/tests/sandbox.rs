//! Systems that say less than usual, and sandboxes.
//!
//! C4.3 in a sandbox that was put up after the allocator was built and forbids `membarrier`: lists of other CPUs cannot be
//! drained. They are left alone, and nothing panics. And where there is no `/proc`, no `/sys` or no folder of nodes: a mount
//! namespace of the test's own has none.
use crate::common::{
    all, all_without_waiting, allowed_cpus, assert_all_back, backends, is_all, is_mapped, map, slots, stay_on,
};
use pagemill::{
    Allocator, Backend, Bulk, CpuId, Device, DmaPool, Gfp, Identity, Memory, NodeId, Order, Page, Physical,
};
use std::ffi::CStr;
use std::fs;
use std::ops::ControlFlow::Continue;
use std::time::Duration;

const PAGES: usize = 2048;

/// The first two CPUs that this process may use.
fn two_cpus() -> Option<(usize, usize)> {
    Some((*allowed_cpus().first()?, *allowed_cpus().get(1)?))
}

/// From now on the system answers `EPERM` to this thread's `membarrier` calls.
fn forbid_membarrier() {
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let errno = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let number = std::mem::offset_of!(libc::seccomp_data, nr) as u32;
    let mut steps = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, number),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_membarrier as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, errno),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: the filter and its steps live through the call, which copies them.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let set = libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter);
        assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
        assert_eq!(libc::syscall(libc::SYS_membarrier, 0, 0, 0), -1);
    }
}

/// The CPUs, if restartable sequences and two of those are to be had; says why not.
fn cpus_with_lists() -> Option<(usize, usize)> {
    if !backends().contains(&Backend::Rseq) {
        return None;
    }
    let cpus = two_cpus();
    if cpus.is_none() {
        eprintln!("skipped: no two CPUs to run on");
    }
    cpus
}

#[test]
fn without_membarrier_lists_stay_with_their_cpus() {
    own_process!();
    let Some((other, here)) = cpus_with_lists() else { return };
    let allocator = Allocator::builder().pages(PAGES).backend(Backend::Rseq).huge_pages(false).build().unwrap();
    let range = allocator.arenas()[0].range.clone();
    for (cpu, gfp) in [(other, Gfp::KERNEL), (here, Gfp::KERNEL | Gfp::MOVABLE)] {
        stay_on(cpu);
        allocator.alloc_page(gfp).unwrap()[0] = 1;
    }
    let listed = allocator.stats().listed;
    forbid_membarrier();

    // This CPU's own list goes to the zone, the other's stays.
    let moved = |cpu: usize| allocator.drain_cpu(CpuId::new(cpu as u32)).unwrap().get();
    let kept = listed as usize - moved(here);
    assert!(kept > 0 && kept < listed as usize, "{kept} of {listed} pages stay on lists");
    assert_eq!((moved(other), allocator.drain().get(), allocator.stats().listed), (0, 0, kept as u64));
    assert!(allocator.give_back().get() > 0);
    assert_eq!(allocator.validate().unwrap().listed, kept);

    // All pages but those on the other CPU's list, which only a drain would bring: they are for requests there.
    let mut pages = all(&allocator, Gfp::KERNEL);
    assert_eq!(pages.len(), PAGES - kept);
    stay_on(other);
    pages.extend(all(&allocator, Gfp::KERNEL));
    assert_eq!(pages.len(), PAGES);

    // And to the end, with pages on the lists of both.
    pages.truncate(PAGES / 2);
    stay_on(here);
    drop(pages);
    let stats = allocator.stats();
    assert!(stats.listed > 0 && stats.allocated == stats.freed, "{stats:?}");
    stay_on(other);
    allocator.close().unwrap();
    assert!(!is_mapped(&range), "the memory is still mapped");
}

#[test]
fn without_membarrier_a_dma_pool_goes_on() {
    own_process!();
    let Some((other, here)) = cpus_with_lists() else { return };
    let allocator = Allocator::builder().pages(64).backend(Backend::Rseq).build().unwrap();
    let device = Device::new(&allocator, Identity).unwrap();
    let pool = DmaPool::create("sandboxed", &device, 2048, 0, 0).unwrap();
    stay_on(other);
    pool.free(pool.alloc(Gfp::NOWAIT).unwrap()).unwrap();
    stay_on(here);
    forbid_membarrier();
    // Until neither the pool nor its allocator has more.
    let mut blocks: Vec<_> = std::iter::from_fn(|| pool.alloc(Gfp::NOWAIT).ok()).collect();
    let mine = blocks.len();
    stay_on(other);
    blocks.extend(std::iter::from_fn(|| pool.alloc(Gfp::NOWAIT).ok()));
    assert!(mine > 0 && blocks.len() > mine, "{mine} blocks, and {} in all", blocks.len());
    blocks.into_iter().for_each(|block| pool.free(block).unwrap());
    pool.destroy().unwrap();
}

/// An empty folder in place of this one, for this thread and those that it starts. Says why not.
fn hide(folder: &CStr) -> Option<()> {
    let done = |rc: i32| {
        let why = std::io::Error::last_os_error();
        (rc == 0).then_some(()).ok_or_else(|| println!("skipped: no right to hide {folder:?} ({why})")).ok()
    };
    let none = std::ptr::null();
    // SAFETY: the strings end in zeros; what is mounted is seen in this namespace alone.
    unsafe {
        done(libc::unshare(libc::CLONE_NEWNS))?;
        done(libc::mount(none, c"/".as_ptr(), none, libc::MS_REC | libc::MS_PRIVATE, none.cast()))?;
        done(libc::mount(c"none".as_ptr(), folder.as_ptr(), c"tmpfs".as_ptr(), 0, none.cast()))
    }
}

/// Does whatever a program does, where the system's files are missing.
fn use_everything() {
    for backend in [Backend::Portable, Backend::Rseq] {
        let memory = [Memory::anonymous(3000), Memory::memfd(700), Memory::anonymous(512).within_limit()];
        let builder = memory.into_iter().fold(Allocator::builder(), pagemill::Builder::memory);
        let builder = builder.backend(backend).huge_pages(false).give_back_after(Duration::from_secs(60));
        let Ok(allocator) = builder.background_reclaim(true).build() else {
            assert_eq!(backend, Backend::Rseq, "the portable backend is to be had everywhere");
            continue;
        };
        assert_eq!((allocator.managed_pages().get(), allocator.notes().len()), (4212, 0));
        let mut pages = all_without_waiting(&allocator, Gfp::KERNEL | Gfp::ZERO);
        assert_eq!(pages.len(), 4212);
        assert!(pages.iter().all(|page| is_all(&page[..], 0)));
        pages.iter_mut().for_each(|page| page[0] = 1);
        drop(pages);
        assert_eq!(allocator.give_back().get(), 4212);
        let _ = allocator.populate(|_| Continue(())).unwrap();
        let mut slots = slots::<Page>(600);
        let here = Bulk::exact(600).populated().exact_node(NodeId::new(0).unwrap());
        allocator.alloc_pages_bulk_array(here, &mut slots).unwrap();
        drop(allocator.alloc_pages(Gfp::KERNEL, Order::PAGEBLOCK).unwrap());
        drop(slots);
        assert_eq!(allocator.reclaim_step().get(), 0);
        assert!(!allocator.zoneinfo()[0].to_string().is_empty());
        // SAFETY: new memory, which stays mapped until the process ends, and which nobody else uses.
        let brought = unsafe { Memory::brought(map(2 << 20, 2 << 20), 512) };
        let other = Allocator::builder().memory(brought).build().unwrap();
        drop(other.alloc_page(Gfp::KERNEL).unwrap());
        other.close().unwrap();
        assert_all_back(&allocator);
        allocator.close().unwrap();
    }
    let default = Allocator::global();
    assert!(default.managed_pages().get() > 0);
    drop(default.alloc_page(Gfp::KERNEL).unwrap());
}

#[test]
fn without_a_folder_of_nodes_there_is_one_node() {
    own_process!();
    let cpus = fs::read_to_string("/sys/devices/system/cpu/possible").unwrap();
    if hide(c"/sys/devices/system").is_none() {
        return;
    }
    fs::create_dir("/sys/devices/system/cpu").unwrap();
    fs::write("/sys/devices/system/cpu/possible", cpus).unwrap();
    use_everything();
    let allocator = Allocator::builder().pages(64).build().unwrap();
    assert_eq!(allocator.zoneinfo().len(), 1);
}

#[test]
fn without_sys_high_cpu_numbers_work() {
    own_process!();
    let last = two_cpus().map(|(_, second)| second);
    if hide(c"/sys").is_none() {
        return;
    }
    use_everything();
    // The number of CPUs is now that of those which the process may use.
    if let Some(last) = last {
        stay_on(last);
        use_everything();
    }
}

#[test]
fn without_proc_a_program_goes_on() {
    own_process!();
    if hide(c"/proc").is_none() {
        return;
    }
    use_everything();
    let allocator = Allocator::builder().pages(64).build().unwrap();
    let why = Device::new(&allocator, Physical::new()).unwrap_err();
    assert!(why.to_string().contains("mount /proc"), "{why}");
}

#[test]
fn without_proc_and_sys_a_program_goes_on() {
    own_process!();
    if hide(c"/proc").and_then(|()| hide(c"/sys")).is_some() {
        use_everything();
    }
}
