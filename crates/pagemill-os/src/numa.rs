//! The nodes of this machine with their CPUs and memory, and binding memory to a node.
//!
//! Read once from the system's files; a system without them counts as one node. Hotplug of CPUs or memory later is not noticed.
//! Node numbers are the system's and may have gaps; distances are indexed by position.
use crate::proc::{self, parse_list};
use crate::{Errno, Mapping, cpu};
use std::fs::read_to_string;
use std::io;
use std::path::Path;

/// Node numbers are below this (`MAX_NUMNODES` of the largest system).
const MAX_NODES: usize = 1024;

/// One node.
///
/// ```
/// let node = pagemill_os::Node { id: 0, cpus: vec![0, 1], bytes: 1 << 30 };
/// assert!(node.cpus.contains(&1));
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node {
    /// The system's number.
    pub id: usize,
    /// Its CPUs in ascending order; empty for a node with memory only.
    pub cpus: Vec<usize>,
    /// Its memory in bytes; 0 for a node with CPUs only.
    pub bytes: usize,
}

/// The machine's nodes and their distances.
///
/// ```
/// let machine = pagemill_os::Topology::of_system().unwrap();
/// let node = machine.node_of_cpu(machine.nodes[0].cpus[0]);
/// assert_eq!(node, Some(&machine.nodes[0]));
/// assert_eq!(machine.distances.len(), machine.nodes.len());
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Topology {
    /// In ascending order of their numbers.
    pub nodes: Vec<Node>,
    /// `distances[from][to]`, by position in `nodes`: 10 from a node to itself, 20 for twice that latency (ACPI's SLIT).
    pub distances: Vec<Vec<u8>>,
}

impl Topology {
    /// The topology of this machine.
    ///
    /// # Errors
    /// As [`Topology::read`].
    pub fn of_system() -> io::Result<Self> {
        if cfg!(miri) {
            return Ok(Self::one_node()); // Miri reads no files.
        }
        Self::read(Path::new("/sys/devices/system/node"))
    }

    /// The topology that the folder `root` describes, in the layout of `/sys/devices/system/node`. One node if there is no such
    /// folder.
    ///
    /// # Errors
    /// A file is missing or cannot be read, or its contents are impossible (`InvalidData`): no nodes, a CPU of two nodes, CPUs
    /// out of order, too few distances.
    ///
    /// ```
    /// use pagemill_os::Topology;
    /// let machine = Topology::read("/no/such/folder".as_ref()).unwrap();
    /// assert_eq!((machine.nodes.len(), machine.distances[0][0]), (1, 10));
    /// ```
    pub fn read(root: &Path) -> io::Result<Self> {
        let folder = match std::fs::read_dir(root) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(Self::one_node()),
            folder => folder.map_err(|why| at(root, why))?,
        };
        let mut ids = Vec::new();
        for entry in folder {
            let name = entry.map_err(|why| at(root, why))?.file_name();
            let digits = name.to_str().and_then(|name| name.strip_prefix("node"));
            if let Some(digits) = digits.filter(|digits| digits.starts_with(|c: char| c.is_ascii_digit())) {
                let id = digits.parse().ok().filter(|&id: &usize| id < MAX_NODES && digits == id.to_string());
                ids.push(id.ok_or_else(|| invalid(root, format!("node{digits} is no valid name of a node")))?);
            }
        }
        if ids.is_empty() {
            return Err(invalid(root, "there are no nodes".into()));
        }
        ids.sort_unstable();
        let nodes = ids.iter().map(|&id| read_node(root, id)).collect::<io::Result<Vec<_>>>()?;
        let distances = ids.iter().map(|&id| read_distances(root, id, ids.len())).collect::<io::Result<_>>()?;
        let mut cpus: Vec<usize> = nodes.iter().flat_map(|node| node.cpus.iter().copied()).collect();
        cpus.sort_unstable();
        if let Some(twice) = cpus.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(invalid(root, format!("CPU {} belongs to two nodes", twice[0])));
        }
        Ok(Self { nodes, distances })
    }

    /// The node that a CPU belongs to; `None` for a CPU that is not online.
    ///
    /// ```
    /// use pagemill_os::{Node, Topology};
    /// let node = |id, cpus| Node { id, cpus, bytes: 1 << 30 };
    /// let nodes = vec![node(0, vec![0, 1]), node(1, vec![2, 3])];
    /// let machine = Topology { nodes, distances: vec![vec![10, 21], vec![21, 10]] };
    /// assert_eq!(machine.node_of_cpu(2).map(|node| node.id), Some(1));
    /// assert_eq!(machine.node_of_cpu(4), None);
    /// ```
    pub fn node_of_cpu(&self, cpu: usize) -> Option<&Node> {
        self.nodes.iter().find(|node| node.cpus.binary_search(&cpu).is_ok())
    }

    fn one_node() -> Self {
        let bytes = proc::total_memory().unwrap_or(0);
        let cpus = (0..cpu::possible_cpus()).collect();
        Self { nodes: vec![Node { id: 0, cpus, bytes }], distances: vec![vec![10]] }
    }
}

fn at(path: &Path, why: io::Error) -> io::Error {
    io::Error::new(why.kind(), format!("{}: {why}", path.display()))
}

fn invalid(path: &Path, what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{}: {what}", path.display()))
}

fn read_node(root: &Path, id: usize) -> io::Result<Node> {
    let folder = root.join(format!("node{id}"));
    let read = |name| {
        let path = folder.join(name);
        read_to_string(&path).map_err(|why| at(&path, why)).map(|text| (path, text))
    };
    let (path, list) = read("cpulist")?;
    let cpus =
        parse_list(&list).ok_or_else(|| invalid(&path, format!("{:?} is not a list of CPUs", list.trim_end())))?;
    // "Node 0 MemTotal:       24684096 kB"
    let (path, text) = read("meminfo")?;
    let total = proc::field(&text, &format!("Node {id} MemTotal:"));
    let bytes = total.and_then(proc::bytes_in).ok_or_else(|| invalid(&path, "no MemTotal in kB".into()))?;
    Ok(Node { id, cpus, bytes })
}

fn read_distances(root: &Path, id: usize, nodes: usize) -> io::Result<Vec<u8>> {
    let path = root.join(format!("node{id}/distance"));
    let text = read_to_string(&path).map_err(|why| at(&path, why))?;
    let found: Option<Vec<u8>> = text.split_whitespace().map(|number| number.parse().ok()).collect();
    found
        .filter(|found| found.len() == nodes)
        .ok_or_else(|| invalid(&path, format!("{:?} are not {nodes} distances", text.trim_end())))
}

impl Mapping {
    /// Binds the range to `node` (the system's number): memory comes from there, and pages that are committed already move
    /// there. With `is_strict` memory comes from no other node: when the node has none left, touching a page kills the process,
    /// and [`populate`](Self::populate) reports that beforehand. Otherwise the system falls back to other nodes. Another
    /// mapping of the same memory keeps its own policy. Offsets are as in [`populate`](Self::populate).
    ///
    /// # Errors
    /// The system's: `ENOSYS` where it knows no nodes, `EPERM` where a sandbox forbids it, `EINVAL` for a node without
    /// memory, `EIO` when `is_strict` and a page cannot move.
    ///
    /// ```
    /// let map = pagemill_os::Mapping::reserve(1 << 20, 4096).unwrap();
    /// match map.bind(0, 1 << 20, 0, true) {
    ///     Ok(()) => {}
    ///     Err(errno) => assert!(errno.0 == 38 || errno.0 == 1, "{errno:?}: no nodes, or forbidden"),
    /// }
    /// ```
    pub fn bind(&self, offset: usize, len: usize, node: usize, is_strict: bool) -> Result<(), Errno> {
        let pages = self.part_outward(offset, len)?;
        /// Flags for pages that lie on another node; `linux/mempolicy.h`.
        const STRICT: usize = 1;
        const MOVE: usize = 2;
        if node >= MAX_NODES {
            return Err(Errno::EINVAL);
        }
        if cfg!(miri) {
            return Err(Errno::ENOSYS);
        }
        let mut nodes = [0_u64; MAX_NODES / 64];
        nodes[node / 64] |= 1 << (node % 64);
        let (policy, flags) = if is_strict { (libc::MPOL_BIND, MOVE | STRICT) } else { (libc::MPOL_PREFERRED, MOVE) };
        // The system reads one bit less than this number says.
        let bits = MAX_NODES + 1;
        // SAFETY: the range is ours, and moving its memory changes no contents; the mask has as many bits as the system reads.
        let rc = unsafe {
            libc::syscall(libc::SYS_mbind, pages.start, pages.len(), policy as usize, nodes.as_ptr(), bits, flags)
        };
        if rc == 0 { Ok(()) } else { Err(Errno::last()) }
    }
}
