//! Where nodes are, and CPUs on them.
use pagemill_core::{CpuId, NodeId};
use pagemill_os::Topology;

/// Where nodes are, and CPUs on them: the system's, or what a test says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Each CPU's node.
    pub(crate) node_of_cpu: Vec<NodeId>,
    /// From each node to each, 10 to itself.
    pub(crate) distances: Vec<Vec<u8>>,
    /// What the system calls each node: its numbers may have gaps. Empty where memory is not to be bound to nodes.
    pub(crate) system_nodes: Vec<usize>,
}

impl Layout {
    /// One node.
    pub(crate) fn flat(cpus: usize) -> Self {
        Self { node_of_cpu: vec![NodeId::ZERO; cpus], distances: vec![vec![10]], system_nodes: Vec::new() }
    }

    /// The system's, for `cpus` CPUs; one node where it does not say.
    pub(crate) fn of_system(cpus: usize) -> Self {
        let Ok(topology) = Topology::of_system() else { return Self::flat(cpus) };
        if topology.nodes.len() < 2 {
            return Self::flat(cpus);
        }
        // Where the process's cpuset cannot be read, memory is asked for everywhere, and what is refused is noted.
        let allowed = pagemill_os::allowed_nodes();
        Self::of(&topology, cpus, |node| allowed.as_ref().is_none_or(|allowed| allowed.contains(&node)))
    }

    /// The nodes with memory that the process may have, by their numbers in the system; one node where it may have one.
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
        // A CPU of a node without memory to be had belongs to the nearest that has some.
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
    fn nodes_with_gaps_and_without_memory() {
        let nodes = vec![node(0, &[0, 1], 1 << 30), node(2, &[2], 0), node(5, &[3], 1 << 30)];
        let distances = vec![vec![10, 30, 20], vec![30, 10, 15], vec![20, 15, 10]];
        let topology = Topology { nodes, distances };
        let layout = Layout::of(&topology, 5, |_| true);
        assert_eq!(layout.system_nodes, [0, 5]);
        // CPU 2's node has no memory, and node 5 is nearer to it; CPU 4 is nowhere.
        assert_eq!(layout.node_of_cpu.iter().map(|node| node.get()).collect::<Vec<_>>(), [0, 0, 1, 1, 0]);
        assert_eq!(layout.distances, [[10, 20], [20, 10]]);
        assert_eq!(layout.distance(NodeId::ZERO, NodeId::new(1).unwrap()), 20);
    }

    #[test]
    fn one_node_is_not_bound_to() {
        let topology = Topology { nodes: vec![node(0, &[0], 1 << 30)], distances: vec![vec![10]] };
        assert_eq!(Layout::of(&topology, 2, |_| true), Layout::flat(2));
    }

    /// C3.7: what a cpuset forbids is nobody's node, and its CPUs belong to the nearest that is left.
    #[test]
    fn nodes_that_the_process_may_not_have_are_left_out() {
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
