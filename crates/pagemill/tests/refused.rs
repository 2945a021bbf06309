//! Impossible allocators and requests are refused with an error that says what was wrong (C10.1).

use crate::common::{all_without_waiting, arena, in_child, slots};
use pagemill::{
    Allocator, Backend, BuildError, Bulk, Error, Gfp, Invalid, InvalidRequest, Memory, NodeId, NodeMask, Order, Page,
    PageList, Policy, Watermarks,
};

fn node(id: usize) -> NodeId {
    NodeId::new(id).unwrap()
}

#[test]
fn extreme_watermarks_work_and_unordered_ones_are_refused() {
    const MAX: u32 = u32::MAX;
    let of = |min, low, high, lowmem_reserve| Watermarks { min, low, high, lowmem_reserve };
    let build = |marks| Allocator::builder().memory(Memory::anonymous(1024).watermarks(marks)).build();
    for (marks, free) in [
        (Watermarks::above(3_000_000_000), 0),
        (of(MAX, MAX, MAX, MAX), 0),
        (of(MAX, MAX, MAX, 1), 0),
        (of(10, MAX - 4, MAX, 5), 1024 - 15),
    ] {
        let allocator = build(marks).unwrap();
        let pages = all_without_waiting(&allocator, Gfp::NOWAIT);
        assert_eq!(pages.len(), free, "{marks:?}");
        // There is no shrinker: a step finds nothing and ends.
        assert_eq!(allocator.reclaim_step().get(), 0);
    }
    for marks in [of(2, 1, 3, 0), of(1, 3, 2, 0), of(3, 3, 1, 0)] {
        let Watermarks { min, low, high, .. } = marks;
        assert_eq!(build(marks).unwrap_err(), BuildError::Invalid(Invalid::Watermarks { min, low, high }));
        let allocator = build(Watermarks::NONE).unwrap();
        assert!(allocator.add_memory(Memory::anonymous(512).watermarks(marks)).is_err());
        assert_eq!(allocator.managed_pages().get(), 1024);
    }
}

#[test]
fn build_errors_and_request_errors_are_distinct() {
    fn page(pages: usize, order: u8, gfp: Gfp) -> Result<(), Error> {
        let allocator = Allocator::builder().pages(pages).build()?;
        allocator.alloc_pages(gfp, Order::new(order)?).map(drop)
    }
    let built = Allocator::builder().pages(0).build().unwrap_err();
    assert!(matches!(built, BuildError::ArenaSize { pages: 0, .. }));
    let error = page(0, 0, Gfp::NOWAIT).unwrap_err();
    assert_eq!((error, error.to_string()), (Error::Build(built), built.to_string()));
    let error = page(64, 19, Gfp::NOWAIT).unwrap_err();
    assert_eq!(error, Error::Invalid(InvalidRequest::Invalid(Invalid::OrderTooLarge { order: 19 })));
    assert_eq!(error.to_string(), "invalid request: order 19 is above the largest, 18 (1 GiB)");
    let error = page(64, 0, Gfp::NOWAIT | Gfp::NOFAIL).unwrap_err();
    assert_eq!(error.to_string(), "invalid request: the gfp flags NOFAIL and NOWAIT exclude each other");
    let error = page(64, 0, Gfp::NOWAIT | Gfp::ACCOUNT).unwrap_err();
    assert_eq!(error, Error::Invalid(InvalidRequest::NoAccount));
    assert_eq!(page(64, 6, Gfp::NOWAIT), Ok(()));
}

/// Never mapped: what is refused is not touched.
#[test]
fn brought_memory_that_cannot_exist_is_refused() {
    let refused = |addr: usize, pages| {
        // SAFETY: no allocator is made of it.
        let memory = unsafe { Memory::brought(std::ptr::without_provenance_mut(addr), pages) };
        Allocator::builder().memory(memory).build().unwrap_err()
    };
    let (last, most) = (usize::MAX << 21, 1 << 20);
    for (addr, pages) in [(0, 512), (last, 512), (last, most)] {
        let error = refused(addr, pages);
        assert_eq!(error, BuildError::NoMemory { addr, pages });
        let text =
            format!("there is no memory of {pages} pages at {addr:#x}: it begins at a null pointer or ends beyond");
        assert!(error.to_string().starts_with(&text), "{error}");
    }
    let odd = refused(last + 1 - (8 << 20), 512);
    assert_eq!(odd, BuildError::Alignment { addr: last + 1 - (8 << 20), align: 2 << 20 });
    // The message of an address whose next multiple is beyond the address space.
    let error = BuildError::Alignment { addr: usize::MAX, align: 2 << 20 };
    assert!(error.to_string().contains("it must be aligned to 2097152 bytes"), "{error}");
}

#[test]
fn errors_of_building_say_what_limits_and_what_to_do() {
    let system = |errno| BuildError::System { what: "an arena", bytes: 4096, errno }.to_string();
    for (errno, advice) in [
        (libc::ENOMEM, "Cannot allocate memory (os error 12); ask for less, or raise what limits it: `ulimit -v`"),
        (libc::EMFILE, "Too many open files (os error 24); close files, or raise the limit (`ulimit -n`)"),
        (libc::EPERM, "Operation not permitted (os error 1); a sandbox (seccomp) or a missing capability forbids"),
    ] {
        let text = system(errno);
        assert!(text.starts_with(&format!("the system refuses 4096 bytes for an arena: {advice}")), "{text}");
    }
    let locked = BuildError::LockLimit { wanted: 8192, locked: 4096, limit: 10_000 }.to_string();
    let text = "wanted to lock 8192 bytes besides the 4096 that this process has locked, and RLIMIT_MEMLOCK is 10000;";
    assert!(locked.starts_with(text), "{locked}");
    let empty = BuildError::NoSuchNode { nodes: 0 }.to_string();
    assert!(empty.starts_with("no node of the policy's set (which is empty) has memory;"), "{empty}");
    let some = Error::from(InvalidRequest::NoSuchNode { nodes: 0x20 }).to_string();
    assert_eq!(some, "invalid request: no node of the request's set 0x20 has memory; name other nodes, or none");
}

#[test]
fn nodes_must_be_named_for_every_cpu() {
    let of = |named: usize| {
        let nodes = (0..named).map(|_| NodeId::ZERO).collect();
        Allocator::builder().cpus(4, || 3).nodes(nodes, vec![]).memory(Memory::anonymous(64)).build()
    };
    for named in 0..4 {
        let refused = BuildError::NodesOfCpus { cpus: 4, named };
        assert_eq!(of(named).unwrap_err(), refused);
    }
    assert!(of(4).unwrap().alloc_page(Gfp::KERNEL).is_ok());
}

#[test]
fn empty_and_absent_sets_of_nodes_are_refused() {
    let build = |policy| arena(64).policy(policy).build();
    let allocator = build(Policy::Local).unwrap();
    for policy in [Policy::Bind, Policy::Interleave] {
        assert_eq!(build(policy(NodeMask::NONE)).unwrap_err(), BuildError::NoSuchNode { nodes: 0 });
        let absent = BuildError::NoSuchNode { nodes: 1 << 5 };
        assert_eq!(build(policy(NodeMask::only(node(5)))).unwrap_err(), absent);
        assert!(build(policy(NodeMask::from_bits(1 << 5 | 1))).is_ok());
        for (nodes, n) in [0, 1 << 5].into_iter().flat_map(|nodes| [1, 2, 1000].map(|n| (nodes, n))) {
            let refused = Error::Invalid(InvalidRequest::NoSuchNode { nodes });
            let mut list = PageList::new();
            let request = Bulk::up_to(n).policy(policy(NodeMask::from_bits(nodes)));
            assert_eq!(allocator.alloc_pages_bulk_list(request, &mut list).unwrap_err(), refused);
            let mut slots = slots::<Page>(n);
            assert_eq!(allocator.alloc_pages_bulk_array(request, &mut slots).unwrap_err(), refused);
        }
    }
}

#[test]
fn kernel_and_atomic_flags_exclude_each_other() {
    let allocator = arena(64).build().unwrap();
    // The list has pages, so that the fast path could serve them.
    drop(allocator.alloc_page(Gfp::KERNEL).unwrap());
    for kind in [Gfp::KERNEL, Gfp::NOIO, Gfp::NOFS] {
        let gfp = kind | Gfp::ATOMIC;
        let conflict = |error: Error| {
            matches!(error, Error::Invalid(InvalidRequest::Invalid(Invalid::GfpConflict(["ATOMIC", _]))))
        };
        assert!(conflict(allocator.alloc_page(gfp).unwrap_err()));
        let request = Bulk::up_to(2).gfp(gfp);
        assert!(conflict(allocator.alloc_pages_bulk_list(request, &mut PageList::new()).unwrap_err()));
    }
    for gfp in
        [Gfp::NOWAIT | Gfp::ATOMIC, Gfp::KERNEL | Gfp::NOIO, Gfp::ATOMIC | Gfp::MOVABLE, Gfp::NOFS | Gfp::RECLAIMABLE]
    {
        assert!(allocator.alloc_page(gfp).is_ok(), "{gfp:?}");
    }
}

#[test]
fn a_reclaim_thread_that_cannot_start_is_a_build_error() {
    own_process!();
    in_child("may start no thread", || {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: plain system calls of this process, which ends soon. Root has no such limit, so it becomes another user.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NPROC, &raw const none) }, 0);
        // SAFETY: as above. An unprivileged user may not, and need not.
        unsafe { libc::setuid(65534) };
        // The other one needs a thread for its self-test.
        let builder = || arena(64).backend(Backend::Portable);
        let refused = builder().background_reclaim(true).build().unwrap_err();
        assert_eq!(refused, BuildError::NoThread { errno: libc::EAGAIN });
        assert!(refused.to_string().contains("reclaim_step"), "{refused}");
        builder().build().unwrap().close().unwrap();
    });
}
