//! C4.3 in a sandbox that was put up after the allocator was built and forbids `membarrier`: lists of other CPUs cannot be
//! drained. They are left alone, and nothing panics.
use pagemill::{Allocator, Backend, CpuId, Device, DmaPool, Gfp, Identity, Page};

const PAGES: usize = 2048;

/// Keeps this thread on one CPU.
fn stay_on(cpu: usize) {
    // SAFETY: zero is a valid, empty set; the call reads it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set), 0);
    }
}

/// The first two CPUs that this thread may run on.
fn two_cpus() -> Option<(usize, usize)> {
    // SAFETY: zero is a valid, empty set, which the call fills.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set), 0);
        set
    };
    // SAFETY: the numbers are those of the set's bits.
    let mut cpus = (0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) });
    Some((cpus.next()?, cpus.next()?))
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
    if let Err(why) = pagemill::self_test() {
        eprintln!("skipped: the rseq backend ({why})");
        return None;
    }
    let cpus = two_cpus();
    if cpus.is_none() {
        eprintln!("skipped: no two CPUs to run on");
    }
    cpus
}

fn all_that_come(allocator: &Allocator) -> Vec<Page> {
    std::iter::from_fn(|| allocator.alloc_page(Gfp::KERNEL).ok()).collect()
}

#[test]
fn lists_that_a_sandbox_keeps_from_being_drained_stay_with_their_cpus() {
    own_process!();
    let Some((other, here)) = cpus_with_lists() else { return };
    let allocator = Allocator::builder().pages(PAGES).backend(Backend::Rseq).huge_pages(false).build().unwrap();
    let range = allocator.arenas()[0].range.clone();
    for (cpu, gfp) in [(other, Gfp::KERNEL), (here, Gfp::KERNEL | Gfp::MOVABLE)] {
        stay_on(cpu);
        drop(allocator.alloc_page(gfp).unwrap());
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

    // To the last page, which only a drain would bring: what the other CPU's list holds is for requests there.
    let mut pages = all_that_come(&allocator);
    assert_eq!(pages.len(), PAGES - kept);
    stay_on(other);
    pages.extend(all_that_come(&allocator));
    assert_eq!(pages.len(), PAGES);

    // And to the end, with pages on the lists of both.
    pages.truncate(PAGES / 2);
    stay_on(here);
    drop(pages);
    let stats = allocator.stats();
    assert!(stats.listed > 0 && stats.allocated == stats.freed, "{stats:?}");
    stay_on(other);
    allocator.close().unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains(&format!("{:x}-", range.start)), "the memory is still mapped");
}

#[test]
fn a_pool_of_blocks_goes_on_in_a_sandbox_that_keeps_its_lists_from_being_drained() {
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
