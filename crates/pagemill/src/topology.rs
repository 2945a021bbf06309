//! The NUMA layout of an allocator: which node each CPU is on, and how far nodes are from each other. Plain data, made
//! once when the allocator is built.
use pagemill_core::{CpuId, NodeId};
use pagemill_os::Topology;

/// The node of each CPU, and the distances between nodes: the system's, or a test's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Each CPU's node.
    pub(crate) node_of_cpu: Vec<NodeId>,
    /// The distance from each node to each; 10 from a node to itself.
    pub(crate) distances: Vec<Vec<u8>>,
    /// The system's number of each node; these may have gaps. Empty if memory is not bound to nodes.
    pub(crate) system_nodes: Vec<usize>,
}

impl Layout {
    /// A layout with one node.
    pub(crate) fn flat(cpus: usize) -> Self {
        Self { node_of_cpu: vec![NodeId::ZERO; cpus], distances: vec![vec![10]], system_nodes: Vec::new() }
    }

    /// The system's layout for `cpus` CPUs; one node if the system does not tell.
    pub(crate) fn of_system(cpus: usize) -> Self {
        let Ok(topology) = Topology::of_system() else { return Self::flat(cpus) };
        if topology.nodes.len() < 2 {
            return Self::flat(cpus);
        }
        // If the process's cpuset cannot be read, memory is requested on all nodes, and refusals are noted.
        let allowed = pagemill_os::allowed_nodes();
        Self::of(&topology, cpus, |node| allowed.as_ref().is_none_or(|allowed| allowed.contains(&node)))
    }

    /// The layout of the nodes whose memory the process may use. One node if there is only one.
    fn of(topology: &Topology, cpus: usize, is_allowed: impl Fn(usize) -> bool) -> Self {
        let has_memory = |node: &&pagemill_os::Node| node.bytes > 0 && is_allowed(node.id);
        let nodes: Vec<_> = topology.nodes.iter().filter(has_memory).take(NodeId::COUNT_MAX).collect();
        if nodes.len() < 2 {
            return Self::flat(cpus);
        }
        let place = |id| topology.nodes.iter().position(|node| node.id == id);
        let distance = |from: usize, to: usize| {
            let row = topology.distances.get(place(from)?)?;
            row.get(place(to)?).copied()
        };
        let row = |from: usize| nodes.iter().map(|to| distance(from, to.id).unwrap_or(20)).collect();
        // A CPU on a node without usable memory belongs to the nearest node that has some.
        let nearest = |id| (0..nodes.len()).min_by_key(|&at| distance(id, nodes[at].id).unwrap_or(u8::MAX));
        let node_of = |cpu| NodeId::new(nearest(topology.node_of_cpu(cpu)?.id)?);
        Self {
            node_of_cpu: (0..cpus).map(|cpu| node_of(cpu).unwrap_or(NodeId::ZERO)).collect(),
            distances: nodes.iter().map(|from| row(from.id)).collect(),
            system_nodes: nodes.iter().map(|node| node.id).collect(),
        }
    }

    pub(crate) fn distance(&self, from: NodeId, to: NodeId) -> u8 {
        let listed = self.distances.get(from.get()).and_then(|row| row.get(to.get()));
        listed.copied().unwrap_or(if from == to { 10 } else { 20 })
    }
    pub(crate) fn node_of(&self, cpu: CpuId) -> NodeId {
        self.node_of_cpu.get(cpu.get()).copied().unwrap_or(NodeId::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::Layout;
    use pagemill_core::NodeId;
    use pagemill_os::{Node, Topology};

    fn node(id: usize, cpus: &[usize], bytes: usize) -> Node {
        Node { id, cpus: cpus.to_vec(), bytes }
    }

    #[test]
    fn node_numbers_may_have_gaps_and_nodes_no_memory() {
        let nodes = vec![node(0, &[0, 1], 1 << 30), node(2, &[2], 0), node(5, &[3], 1 << 30)];
        let distances = vec![vec![10, 30, 20], vec![30, 10, 15], vec![20, 15, 10]];
        let topology = Topology { nodes, distances };
        let layout = Layout::of(&topology, 5, |_| true);
        assert_eq!(layout.system_nodes, [0, 5]);
        // CPU 2's node has no memory, and node 5 is the nearest that has some. CPU 4 is on no node.
        assert_eq!(layout.node_of_cpu.iter().map(|node| node.get()).collect::<Vec<_>>(), [0, 0, 1, 1, 0]);
        assert_eq!(layout.distances, [[10, 20], [20, 10]]);
        assert_eq!(layout.distance(NodeId::ZERO, NodeId::new(1).unwrap()), 20);
    }

    #[test]
    fn memory_of_a_single_node_is_not_bound() {
        let topology = Topology { nodes: vec![node(0, &[0], 1 << 30)], distances: vec![vec![10]] };
        assert_eq!(Layout::of(&topology, 2, |_| true), Layout::flat(2));
    }

    /// C3.7: a node outside the cpuset is left out, and its CPUs belong to the nearest node inside.
    #[test]
    fn nodes_outside_the_cpuset_are_left_out() {
        let nodes = (0..3).map(|id| node(id, &[id], 1 << 30)).collect();
        let distances = vec![vec![10, 20, 30], vec![20, 10, 15], vec![30, 15, 10]];
        let topology = Topology { nodes, distances };
        let of = |allowed: &[usize]| Layout::of(&topology, 3, |node| allowed.contains(&node));
        let layout = of(&[0, 2]);
        assert_eq!(layout.system_nodes, [0, 2]);
        assert_eq!(layout.node_of_cpu.iter().map(|node| node.get()).collect::<Vec<_>>(), [0, 1, 1]);
        assert_eq!(layout.distances, [[10, 30], [30, 10]]);
        assert_eq!(of(&[1]), Layout::flat(3));
    }
}
