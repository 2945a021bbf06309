//! Nodes read from trees of files, memory bound to a node, and memory touched by many threads.
use pagemill_os::{Errno, Mapping, Topology, parse_list, system_page, touch_parallel};
use std::fs::{create_dir_all, write};
use std::io::ErrorKind;
use std::ops::ControlFlow::{Break, Continue};
use tempfile::TempDir;

/// A node's number, and the contents of its files `cpulist`, `meminfo` (kB) and `distance`.
type Files<'a> = (usize, &'a str, usize, &'a str);

fn tree(nodes: &[Files<'_>]) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    // Other entries of a real folder.
    create_dir_all(root.path().join("power")).unwrap();
    for name in ["has_cpu", "online", "possible", "nodes"] {
        write(root.path().join(name), "0-7\n").unwrap();
    }
    for (id, cpus, kib, distances) in nodes {
        let node = root.path().join(format!("node{id}"));
        create_dir_all(&node).unwrap();
        write(node.join("cpulist"), format!("{cpus}\n")).unwrap();
        let meminfo = format!("Node {id} MemTotal:       {kib} kB\nNode {id} MemFree:        12 kB\n");
        write(node.join("meminfo"), meminfo).unwrap();
        write(node.join("distance"), format!("{distances}\n")).unwrap();
    }
    root
}

fn read(nodes: &[Files<'_>]) -> std::io::Result<Topology> {
    Topology::read(tree(nodes).path())
}

#[test]
fn a_tree_of_one_node_is_read() {
    let machine = read(&[(0, "0-1", 24_684_096, "10")]).unwrap();
    assert_eq!((machine.nodes.len(), machine.nodes[0].bytes), (1, 24_684_096 << 10));
    assert_eq!((machine.nodes[0].cpus.as_slice(), machine.distances), ([0, 1].as_slice(), vec![vec![10]]));
}

#[test]
fn four_nodes_with_gaps_and_one_without_cpus() {
    let machine = read(&[
        (8, "16-17,20", 2048, "20 20 10 40"),
        (0, "0-3,8-11", 1024, "10 20 20 30"),
        (2, "4-7,12-15", 1024, "20 10 20 30"),
        (255, "", 4096, "30 30 40 10"),
    ])
    .unwrap();
    assert_eq!(machine.nodes.iter().map(|node| node.id).collect::<Vec<_>>(), [0, 2, 8, 255]);
    assert_eq!(machine.distances[2], [20, 20, 10, 40], "the row of the third node, not of node 2");
    assert_eq!(machine.nodes.iter().map(|node| node.cpus.len()).collect::<Vec<_>>(), [8, 8, 3, 0]);
    for (cpu, node) in [(0, Some(0)), (11, Some(0)), (12, Some(2)), (20, Some(8)), (18, None), (21, None)] {
        assert_eq!(machine.node_of_cpu(cpu).map(|node| node.id), node, "CPU {cpu}");
    }
}

#[test]
fn eight_nodes_of_eight_cpus() {
    let lists: Vec<_> = (0..8).map(|node| format!("{}-{}", node * 8, node * 8 + 7)).collect();
    let rows: Vec<_> = (0..8)
        .map(|from| (0..8).map(|to| if from == to { "10" } else { "21" }).collect::<Vec<_>>().join(" "))
        .collect();
    let files: Vec<Files<'_>> = (0..8).map(|node| (node, lists[node].as_str(), 1 << 20, rows[node].as_str())).collect();
    let machine = read(&files).unwrap();
    assert_eq!(machine.nodes.len(), 8);
    for cpu in 0..64 {
        assert_eq!(machine.node_of_cpu(cpu).unwrap().id, cpu / 8);
    }
    assert!((0..8).all(|from| (0..8).all(|to| machine.distances[from][to] == if from == to { 10 } else { 21 })));
}

#[test]
fn impossible_trees_are_refused() {
    let refused = |nodes: &[Files<'_>], about: &str| {
        let why = read(nodes).unwrap_err();
        assert!(why.kind() == ErrorKind::InvalidData && why.to_string().contains(about), "{why}");
    };
    refused(&[], "no nodes");
    refused(&[(0, "0-1", 1, "10 20"), (1, "1-2", 1, "20 10")], "CPU 1 belongs to two nodes");
    refused(&[(0, "0-1", 1, "10"), (1, "2-3", 1, "20 10")], "2 distances");
    refused(&[(0, "0-1", 1, "10 20")], "1 distances");
    refused(&[(0, "0-1", 1, "ten")], "1 distances");
    refused(&[(0, "0-1", 1, "256")], "1 distances");
    refused(&[(0, "0-", 1, "10")], "is not a list of CPUs");
    refused(&[(0, "0", usize::MAX, "10")], "MemTotal");
    refused(&[(1024, "0", 1, "10")], "node1024");
    for name in ["node00", "node99999999999999999999", "node1x"] {
        let root = tree(&[(0, "0", 1, "10")]);
        create_dir_all(root.path().join(name)).unwrap();
        assert_eq!(Topology::read(root.path()).unwrap_err().kind(), ErrorKind::InvalidData, "{name}");
    }
    for (file, with) in
        [("meminfo", "Node 0 MemFree: 1 kB\n"), ("meminfo", "Node 0 MemTotal: -1 kB\n"), ("cpulist", "\n\n")]
    {
        let root = tree(&[(0, "0", 1, "10")]);
        write(root.path().join("node0").join(file), with).unwrap();
        assert_eq!(Topology::read(root.path()).unwrap_err().kind(), ErrorKind::InvalidData, "{file}: {with}");
    }
    for file in ["cpulist", "meminfo", "distance"] {
        let root = tree(&[(0, "0", 1, "10")]);
        let path = root.path().join("node0").join(file);
        std::fs::remove_file(&path).unwrap();
        let why = Topology::read(root.path()).unwrap_err();
        assert!(why.kind() == ErrorKind::NotFound && why.to_string().contains(path.to_str().unwrap()), "{why}");
        write(&path, [0xff, 0xfe]).unwrap();
        assert_eq!(Topology::read(root.path()).unwrap_err().kind(), ErrorKind::InvalidData, "{file}: not UTF-8");
    }
}

#[test]
fn a_system_without_the_folder_is_one_node() {
    let machine = Topology::read(&tree(&[]).path().join("none")).unwrap();
    let cpus: Vec<_> = (0..pagemill_os::possible_cpus()).collect();
    assert_eq!((machine.nodes.len(), &machine.nodes[0].cpus), (1, &cpus));
    assert!(machine.nodes[0].bytes >= 1 << 20);
}

#[test]
fn the_topology_of_this_machine_is_read() {
    let machine = Topology::of_system().unwrap();
    assert!(machine.node_of_cpu(pagemill_os::current_cpu()).is_some());
    assert!(machine.nodes.iter().map(|node| node.bytes).sum::<usize>() >= 1 << 20);
    assert_eq!(machine.distances.len(), machine.nodes.len());
}

#[test]
fn malformed_lists_are_refused() {
    let good: [(&str, &[usize]); 7] = [
        ("", &[]),
        ("\n", &[]),
        ("0", &[0]),
        ("0-0,2", &[0, 2]),
        ("007-8\n", &[7, 8]),
        ("65535", &[65_535]),
        ("0-3,8", &[0, 1, 2, 3, 8]),
    ];
    for (list, cpus) in good {
        assert_eq!(parse_list(list).as_deref(), Some(cpus), "{list:?}");
    }
    for list in [
        ",",
        "0,",
        ",0",
        "0,,1",
        "-",
        "0-",
        "-1",
        "1-0",
        "0-1-2",
        "3,1",
        "0-4,4",
        "1,1",
        "0x1",
        "+1",
        "1-+2",
        " 0",
        "0 ",
        "0, 1",
        "0-3\n\n",
        "a",
        "0-7:2/4",
        "65536",
        "0-65536",
        "0-18446744073709551615",
        "18446744073709551616",
        "٣",
        "0\0",
    ] {
        assert_eq!(parse_list(list), None, "{list:?}");
    }
}

/// The policy of the range that `addr` lies in, and its nodes from 0 to 63.
fn policy_at(addr: usize) -> (i32, u64) {
    /// Of an address; `linux/mempolicy.h`.
    const ADDR: usize = 2;
    let mut nodes = [0_u64; 16];
    let mut mode = 0_i32;
    // SAFETY: both are written, and the mask has room for the bits that the call writes.
    let rc =
        unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, nodes.as_mut_ptr(), 1025_usize, addr, ADDR) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
    (mode, nodes[0])
}

/// The node that the page at `addr` lies on.
fn node_at(addr: usize) -> usize {
    /// The node, not the policy; of an address.
    const NODE_ADDR: usize = 1 | 2;
    let mut node = -1_i32;
    // SAFETY: the number is written; no mask is asked for.
    let rc = unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut node, 0_usize, 0_usize, addr, NODE_ADDR) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
    usize::try_from(node).unwrap()
}

/// Whether memory can be bound here at all; prints the reason if not.
fn can_bind() -> bool {
    let map = Mapping::reserve(4096, 4096).unwrap();
    match map.bind(0, 4096, Topology::of_system().unwrap().nodes[0].id, false) {
        Err(Errno(libc::ENOSYS)) => eprintln!("skipped: the system knows no nodes"),
        Err(Errno(libc::EPERM)) => eprintln!("skipped: mbind is forbidden here"),
        bound => {
            bound.unwrap();
            return true;
        }
    }
    false
}

#[test]
fn bind_sets_the_memory_policy() {
    if !can_bind() {
        return;
    }
    let node = Topology::of_system().unwrap().nodes[0].id;
    let map = Mapping::reserve(1 << 20, 4096).unwrap();
    let shared = Mapping::memfd(c"bound", 1 << 20, 4096, false).unwrap();
    for map in [&map, &shared] {
        let page = system_page();
        map.bind(page, 2 * page, node, true).unwrap();
        map.bind(4 * page, 4096, node, false).unwrap();
        let policy = |at| policy_at(map.addr() + at * page);
        assert_eq!((policy(1), policy(2)), ((libc::MPOL_BIND, 1 << node), (libc::MPOL_BIND, 1 << node)));
        assert_eq!((policy(0).0, policy(3).0), (libc::MPOL_DEFAULT, libc::MPOL_DEFAULT));
        assert_eq!(policy(4), (libc::MPOL_PREFERRED, 1 << node));
    }
    let refused = Err(Errno(libc::EINVAL));
    for absent in [1023, 1024, usize::MAX] {
        assert_eq!(map.bind(0, 4096, absent, true), refused, "node {absent}");
    }
    for (offset, len) in [(0, 2 << 20), (1, 4096), (4096, 1), (usize::MAX, 4096)] {
        assert_eq!(map.bind(offset, len, node, true), refused, "{offset} {len}");
    }
    assert_eq!(map.bind(0, 0, node, true), Ok(()));
}

#[test]
fn pages_come_from_the_node_that_they_are_bound_to() {
    let machine = Topology::of_system().unwrap();
    let nodes: Vec<_> = machine.nodes.iter().filter(|node| node.bytes > 0).collect();
    if nodes.len() < 2 {
        eprintln!("skipped: one node with memory, two are needed");
        return;
    }
    if !can_bind() {
        return;
    }
    for node in nodes {
        let map = Mapping::reserve(1 << 20, 4096).unwrap();
        map.populate(0, 4096).unwrap();
        map.bind(0, 1 << 20, node.id, true).unwrap();
        assert_eq!(touch_parallel(&[(&map, &node.cpus)], &mut |_| Continue(())), Ok(1 << 20));
        assert!((0..1 << 20).step_by(4096).all(|offset| node_at(map.addr() + offset) == node.id));
    }
}

#[test]
fn touch_parallel_commits_every_byte_and_counts_it_once() {
    const MIB: usize = 1 << 20;
    let page = system_page();
    let private = Mapping::reserve(200 * MIB + page, 1 << 21).unwrap();
    let shared = Mapping::memfd(c"touched", 65 * MIB, 4096, false).unwrap();
    // SAFETY: ours; nobody holds a reference into it.
    unsafe { private.as_ptr::<u8>().add(100 * MIB).write(9) };
    let mut seen = Vec::new();
    let mut progress = |bytes| {
        seen.push(bytes);
        Continue(())
    };
    // CPUs 5000 and `usize::MAX` do not exist.
    match touch_parallel(&[(&private, &[0, 1, 5000, usize::MAX]), (&shared, &[])], &mut progress) {
        Err(Errno(libc::EINVAL)) => return eprintln!("skipped: the system cannot populate, before Linux 5.14"),
        done => assert_eq!(done, Ok(265 * MIB + page)),
    }
    for map in [&private, &shared] {
        assert_eq!(map.resident(0, map.bytes()), Ok(map.bytes()));
    }
    assert!(seen.is_sorted_by(|before, after| before < after), "{seen:?}");
    assert_eq!((seen.len(), seen.last()), (4 + 2, Some(&(265 * MIB + page))));
    // SAFETY: as above.
    assert_eq!(unsafe { private.as_ptr::<u8>().add(100 * MIB).read() }, 9, "contents stay");
}

#[test]
fn touch_parallel_returns_the_error_of_populate() {
    let map = Mapping::reserve(128 << 20, 4096).unwrap();
    // SAFETY: our own mapping, which nothing accesses.
    assert_eq!(unsafe { libc::mprotect(map.as_ptr(), map.bytes(), libc::PROT_NONE) }, 0);
    let met = map.populate(0, 64 << 20).unwrap_err();
    let mut told = Vec::new();
    let mut progress = |bytes| {
        told.push(bytes);
        Continue(())
    };
    assert_eq!(touch_parallel(&[(&map, &[0, 1])], &mut progress), Err(met));
    assert_eq!(told, [], "nothing was committed");
    assert_eq!(touch_parallel(&[], &mut |_| panic!("nothing to tell")), Ok(0));
}

#[test]
fn touch_parallel_stops_when_progress_breaks() {
    let map = Mapping::reserve(256 << 20, 4096).unwrap();
    // The piece is not aligned to huge pages, and one could reach beyond it.
    map.advise_huge_pages(false);
    let mut told = 0;
    match touch_parallel(&[(&map, &[0])], &mut |bytes| {
        told = bytes;
        Break(())
    }) {
        Err(Errno(libc::EINVAL)) => eprintln!("skipped: the system cannot populate, before Linux 5.14"),
        done => assert_eq!((done, told, map.resident(0, map.bytes())), (Ok(64 << 20), 64 << 20, Ok(64 << 20))),
    }
}
