//! All the memory of an allocator: its arenas by node and kind, and which of them a request is to try, in which order
//! (C3.6, C3.7).
//!
//! Stands between a request and the arenas. A plain request takes from the lists of one arena, the nearest: [`here`] is one
//! look at a word where all CPUs have the same, and else one at the CPU's. All others walk a zonelist. Each arena stands there
//! as a zone of its own, with its own marks; in dumps, arenas of one node and kind are one zone.
//!
//! # How long it lives
//! A [`Nodes`] is kept by its parts: all handles together are one, each arena is one. So it outlives the last handle as long as
//! pages are out, and the call that lets go of the last part frees it. Until then [`Kept`] leads to it.
//!
//! # Invariants
//! - N1 An arena that was added stays until the last handle is gone. One that was retired is passed over, and has its metadata
//!   but no memory, until memory like it is added. So a thread that walks a zonelist, which has a handle, needs no lock.
//! - N2 What is published (`only`, `by_cpu`, the zonelists) changes under the registry's lock alone, and is freed with this.
//! - N3 `waits` alone is never freed: a thread that freed the last page of an arena may still ask whether a request waits. It
//!   serves another allocator later; at worst such a late question wakes a request there in vain.
//!
//! [`here`]: Nodes::here
use crate::allocator::Inner;
use crate::claim::Claims;
use crate::fault::{self, Faults};
use crate::idle::Idle;
use crate::reclaim::Reclaim;
use crate::registry;
use crate::slow::Lack;
use crate::wait::Waits;
use core::ops::Deref;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};
use pagemill_core::{CpuId, Error, Gfp, Invalid, NodeId, NodeMask, Policy, zonelist_place};
use pagemill_os::{MemoryLimit, Topology};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

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
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let allowed = mems_allowed(&status);
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

/// The system's numbers of the nodes that the process may have memory of (its cpuset), by `/proc/self/status`.
fn mems_allowed(status: &str) -> Option<Vec<usize>> {
    let list = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"))?;
    pagemill_os::cpus_of(list.trim())
}

/// The arenas in the order in which requests that prefer each node try them.
type Zonelists = Vec<Vec<&'static Inner>>;

fn is_same(one: &Zonelists, other: &Zonelists) -> bool {
    let is_same = |one: &Vec<&Inner>, other: &Vec<&Inner>| {
        one.len() == other.len() && one.iter().zip(other).all(|(one, other)| core::ptr::eq(*one, *other))
    };
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| is_same(one, other))
}

#[derive(Debug)]
pub(crate) struct Nodes {
    /// The arena whose lists serve plain requests on every CPU; null where CPUs differ.
    only: AtomicPtr<Inner>,
    /// The same for each CPU; null where the slow path has to choose.
    by_cpu: Vec<AtomicPtr<Inner>>,
    /// The arena that was added first, whose lists say which CPU this is.
    oldest: AtomicPtr<Inner>,
    /// The last one that was published, and those before, which somebody may still walk.
    zonelists: AtomicPtr<Zonelists>,
    walked: Mutex<Vec<AtomicPtr<Zonelists>>>,
    /// Itself, as the box that it came from.
    kept: OnceLock<Kept>,
    /// How many parts keep it: see the module.
    parts: AtomicUsize,
    /// No two have the same.
    pub(crate) number: u64,
    /// The arena that was added last; each leads to the one before. No lock: a child of a fork reads it too.
    newest: AtomicPtr<Inner>,
    notes: Mutex<Vec<Invalid>>,
    layout: Layout,
    policy: Policy,
    /// Nodes that requests may have memory of (C3.7): the kernel's cpuset.
    allowed: AtomicU64,
    /// Where the last interleaved page came from.
    turn: AtomicU32,
    pub(crate) waits: &'static MemoryWaits,
    pub(crate) claims: Claims,
    pub(crate) reclaim: Reclaim,
    pub(crate) faults: OnceLock<fault::Faults>,
    /// After how long free memory goes back to the system, if it does.
    pub(crate) idle: OnceLock<Idle>,
    /// Is the system asked for 2 MiB pages?
    huge_pages: bool,
    /// What the process may commit, if that is limited.
    pub(crate) limit: Option<MemoryLimit>,
}

/// The requests that wait for an allocator's memory. It is never freed (N3).
#[derive(Debug, Default)]
pub(crate) struct MemoryWaits {
    waits: Waits<Lack>,
    /// The allocator that it serves, or did last.
    of: AtomicPtr<Nodes>,
}

impl Deref for MemoryWaits {
    type Target = Waits<Lack>;
    fn deref(&self) -> &Waits<Lack> {
        &self.waits
    }
}

impl MemoryWaits {
    /// Memory came back: wakes requests that it may be enough for. [`claim_freed`](Nodes::claim_freed) goes before.
    #[inline]
    pub(crate) fn note_memory(&self) {
        if self.waits.is_awaited() {
            // SAFETY: `is_hopeful` is called with the lines held and a request in them, which has a handle. So the allocator
            // that this serves now is there, also if the memory was another one's; and `of` was set before anybody could wait.
            self.waits.note_free(&|lack| unsafe { &*self.of.load(Relaxed) }.is_hopeful(lack));
        }
    }
}

/// Those that serve no allocator now (N3). Locked with the registry held, so that no fork meets it locked.
static UNUSED_WAITS: Mutex<Vec<&MemoryWaits>> = Mutex::new(Vec::new());

fn unused_waits(_held: &registry::Writing) -> MutexGuard<'static, Vec<&'static MemoryWaits>> {
    UNUSED_WAITS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Leads to an allocator's [`Nodes`] as long as its holder has a part of them. It is not a reference: one has to be valid until
/// the call that was given it returns, and the call that drops the last handle frees them earlier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept(NonNull<Nodes>);

// SAFETY: as a shared reference to what any thread may use.
unsafe impl Send for Kept where for<'a> &'a Nodes: Send {}
// SAFETY: as for Send.
unsafe impl Sync for Kept where for<'a> &'a Nodes: Send {}

impl Kept {
    #[inline]
    pub(crate) fn get(self) -> &'static Nodes {
        // SAFETY: there, as the caller has a part of it.
        unsafe { self.0.as_ref() }
    }

    /// Lets go of one part; frees it with the last.
    ///
    /// # Safety
    /// The caller has the part, of an arena that has ended, or of the handles, and uses nothing of it from here on.
    pub(crate) unsafe fn let_go(self) {
        // AcqRel: whoever frees it sees what all others did to it before.
        if self.get().parts.fetch_sub(1, AcqRel) == 1 {
            // SAFETY: `keep` made it of a box, and no part of it is left.
            drop(unsafe { Box::from_raw(self.0.as_ptr()) });
        }
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        let walked = core::mem::take(&mut self.walked).into_inner().unwrap_or_else(PoisonError::into_inner);
        for zonelists in walked.into_iter().map(AtomicPtr::into_inner).chain([*self.zonelists.get_mut()]) {
            // SAFETY: a box's, and nobody walks it any more.
            drop(unsafe { Box::from_raw(zonelists) });
        }
        // Nobody waits: a request that waits has a handle.
        unused_waits(&registry::lock()).push(self.waits);
    }
}

impl Nodes {
    /// From now on; once.
    pub(crate) fn inject(&self, faults: Faults) {
        let _ = self.faults.set(faults);
    }
    /// Were acquisitions made to fail, and are those with these flags among them?
    pub(crate) fn has_failed_on_purpose(&self, gfp: Gfp) -> bool {
        self.faults.get().is_some_and(|faults| faults.injected() > 0 && faults.is_for(gfp))
    }
    pub(crate) fn faults_injected(&self) -> u64 {
        self.faults.get().map_or(0, Faults::injected)
    }

    /// Of no arena yet.
    pub(crate) fn new(held: &registry::Writing, layout: Layout, policy: Policy, huge_pages: bool) -> Self {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let waits = unused_waits(held).pop().unwrap_or_else(|| Box::leak(Box::default()));
        [&waits.ended, &waits.waited_us, &waits.longest_us].iter().for_each(|counter| counter.store(0, Relaxed));
        Self {
            only: AtomicPtr::default(),
            by_cpu: layout.node_of_cpu.iter().map(|_| AtomicPtr::default()).collect(),
            oldest: AtomicPtr::default(),
            zonelists: AtomicPtr::new(Box::into_raw(Box::default())),
            walked: Mutex::default(),
            kept: OnceLock::new(),
            parts: AtomicUsize::new(1),
            number: MADE.fetch_add(1, Relaxed),
            newest: AtomicPtr::default(),
            notes: Mutex::default(),
            layout,
            policy,
            allowed: AtomicU64::new(NodeMask::ALL.as_bits()),
            turn: AtomicU32::new(0),
            waits,
            claims: Claims::default(),
            reclaim: Reclaim::default(),
            faults: OnceLock::new(),
            idle: OnceLock::new(),
            huge_pages,
            limit: MemoryLimit::of_process(),
        }
    }

    /// Keeps it until all its parts are [let go](Kept::let_go).
    pub(crate) fn keep(self) -> &'static Self {
        let kept = Kept(NonNull::from(Box::leak(Box::new(self))));
        kept.get().kept.get_or_init(|| kept);
        kept.get().waits.of.store(kept.0.as_ptr(), Relaxed);
        kept.get()
    }
    /// A pointer to itself, for a holder of a part.
    pub(crate) fn kept(&self) -> Kept {
        match self.kept.get() {
            Some(&kept) => kept,
            None => unreachable!("`keep` sets it"),
        }
    }

    /// The arena whose lists serve plain requests of this CPU.
    #[inline]
    pub(crate) fn here(&self) -> Option<&'static Inner> {
        // Acquire pairs with the Release in `publish`: the arena is complete.
        let only = self.only.load(Acquire);
        // SAFETY: null, or an arena's, which lives as long as the allocator (N1).
        unsafe { only.as_ref() }.or_else(|| self.here_by_cpu())
    }

    /// Out of line: where there is one node it would be 100 bytes more wherever a page is asked for.
    #[inline(never)]
    fn here_by_cpu(&self) -> Option<&'static Inner> {
        // SAFETY: as in `here`.
        unsafe { self.by_cpu.get(self.cpu().get())?.load(Acquire).as_ref() }
    }

    /// The CPU that this runs on.
    #[inline]
    pub(crate) fn cpu(&self) -> CpuId {
        // Acquire pairs with the Release in `add`.
        // SAFETY: as in `here`.
        let oldest = unsafe { self.oldest.load(Acquire).as_ref() };
        oldest.map_or(CpuId::new(0), |oldest| oldest.lists.here())
    }
    /// The node of the CPU that this runs on.
    pub(crate) fn node(&self) -> NodeId {
        self.layout.node_of(self.cpu())
    }
    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }
    pub(crate) fn policy(&self) -> Policy {
        self.policy
    }
    pub(crate) fn huge_pages(&self) -> bool {
        self.huge_pages
    }

    fn zonelists(&self) -> &Zonelists {
        // Acquire as in `here`.
        // SAFETY: set in `new`, and published ones are kept (N2).
        unsafe { &*self.zonelists.load(Acquire) }
    }
    /// The arenas, the nearest to `from` first.
    pub(crate) fn zonelist(&self, from: NodeId) -> &[&'static Inner] {
        let lists = self.zonelists();
        lists.get(from.get()).or(lists.first()).map_or(&[], Vec::as_slice)
    }
    /// All arenas in use.
    pub(crate) fn all(&self) -> &[&'static Inner] {
        self.zonelist(NodeId::ZERO)
    }
    /// The same without those that were retired and still stand there: after a fork, what is shared with the parent.
    pub(crate) fn in_use(&self) -> impl Iterator<Item = &'static Inner> {
        self.all().iter().copied().filter(|arena| !arena.is_retired())
    }
    /// The nodes that have memory.
    pub(crate) fn populated(&self) -> NodeMask {
        self.in_use().map(|arena| arena.node).collect()
    }
    /// Returns all lists' frames to their zones.
    pub(crate) fn drain_all(&self) -> usize {
        self.all().iter().map(|arena| arena.drain_all()).sum()
    }
    /// The first arena: a process that declares nothing has one.
    pub(crate) fn first(&self) -> &'static Inner {
        match self.all() {
            [first, ..] => first,
            [] => panic!("an allocator without an arena"),
        }
    }

    /// Nodes that requests may have memory of, now.
    pub(crate) fn allowed(&self) -> NodeMask {
        NodeMask::from_bits(self.allowed.load(Relaxed))
    }
    /// Changes them. Lists of nodes that are not allowed any more are passed over from now on.
    pub(crate) fn set_allowed(&self, _held: &registry::Writing, nodes: NodeMask) -> Result<(), Invalid> {
        if !self.in_use().any(|arena| nodes.contains(arena.node)) {
            return Err(Invalid::NoSuchNode { nodes: nodes.as_bits() });
        }
        self.allowed.store(nodes.as_bits(), Relaxed);
        self.choose();
        self.tell_who_waits();
        Ok(())
    }

    /// Takes the next `n` turns, at least one, of nodes that pages come from in turn. Returns whose the first one is.
    pub(crate) fn take_turns(&self, among: NodeMask, n: usize) -> Option<NodeId> {
        let steps = n.checked_sub(1)?.checked_rem(among.count())? + 1;
        let node = |last: u32| NodeId::new(last as usize).and_then(|last| among.next_after(last));
        let nth = |last| (1..steps).try_fold(node(last)?, |last, _| among.next_after(last));
        let last = self.turn.fetch_update(Relaxed, Relaxed, |last| nth(last).map(|next| next.get() as u32)).ok()?;
        node(last)
    }

    /// The arena that was added last.
    pub(crate) fn newest(&self) -> Option<&'static Inner> {
        // Acquire pairs with the Release in `add`.
        // SAFETY: as in `here`.
        unsafe { self.newest.load(Acquire).as_ref() }
    }
    /// Adds an arena, whose `older` is the newest up to now, and which is one more part.
    pub(crate) fn add(&self, held: &registry::Writing, arena: &'static Inner) {
        self.parts.fetch_add(1, Relaxed);
        let added = core::ptr::from_ref(arena).cast_mut();
        if self.oldest.load(Relaxed).is_null() {
            // Release pairs with the Acquire in `cpu`.
            self.oldest.store(added, Release);
        }
        // Release pairs with the Acquire in `newest`.
        self.newest.store(added, Release);
        self.publish(held);
        self.tell_who_waits();
    }
    /// Requests that wait may be served by memory that is new, or allowed only now. Its lists are shut like all others.
    pub(crate) fn tell_who_waits(&self) {
        if self.waits.is_awaited() {
            self.settle_lists();
            self.waits.note_free(&|_| true);
        }
    }
    /// See [`Inner::settle_lists`].
    pub(crate) fn settle_lists(&self) {
        self.all().iter().for_each(|arena| arena.settle_lists());
    }
    /// Every arena that was ever added, retired ones too, in the order in which they came.
    pub(crate) fn ever(&self) -> Vec<&'static Inner> {
        let mut arenas: Vec<_> = core::iter::successors(self.newest(), |arena| arena.older).collect();
        arenas.reverse();
        arenas
    }

    /// Remembers what the system refused without that being an error; with the registry held.
    pub(crate) fn note(&self, why: Invalid) {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).push(why);
    }
    pub(crate) fn notes(&self) -> Vec<Invalid> {
        let _held = registry::lock(); // No fork meets it locked.
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes zonelists of the arenas that are in use.
    pub(crate) fn publish(&self, _held: &registry::Writing) {
        let mut arenas = self.ever();
        arenas.retain(|arena| !arena.is_retired());
        let nodes = arenas.iter().map(|arena| arena.node.get() + 1).max().unwrap_or(1).max(self.layout.distances.len());
        let lists: Zonelists = (0..nodes.min(NodeId::COUNT_MAX))
            .filter_map(NodeId::new)
            .map(|from| {
                let mut list = arenas.clone();
                let distance = |arena: &Inner| self.layout.distance(from, arena.node);
                list.sort_by_key(|arena| zonelist_place(from, arena.node, arena.kind, distance(arena)));
                list
            })
            .collect();
        let mut walked = self.walked.lock().unwrap_or_else(PoisonError::into_inner);
        // The same arenas may have been in use before.
        // SAFETY: from `new` or from here, and kept: somebody may be walking it.
        let same = walked.iter().position(|kept| is_same(unsafe { &*kept.load(Relaxed) }, &lists));
        let fresh = match same {
            Some(at) => walked.swap_remove(at).into_inner(),
            None => Box::into_raw(Box::new(lists)),
        };
        // Release pairs with the Acquire in `zonelists`.
        walked.push(AtomicPtr::new(self.zonelists.swap(fresh, Release)));
        drop(walked);
        self.choose();
    }

    /// Chooses whose lists serve the plain requests of each CPU: none where pages of several nodes come in turn. With the
    /// registry held. Allocates nothing: the child of a fork comes here before all locks of other libraries are free.
    pub(crate) fn choose(&self) {
        let allowed = self.allowed().and(self.policy.nodes());
        let chosen = |cpu: usize| {
            let from = self.policy.first(self.layout.node_of(CpuId::new(cpu as u32)));
            let first = self.zonelist(from).iter().find(|arena| allowed.contains(arena.node) && !arena.is_retired());
            match (self.policy, first) {
                (Policy::Interleave(_), _) | (_, None) => core::ptr::null_mut(),
                (_, Some(&arena)) => core::ptr::from_ref::<Inner>(arena).cast_mut(),
            }
        };
        // Where CPUs differ, each looks at its own, which is set first. Release pairs with the Acquire in `here`.
        (0..).zip(&self.by_cpu).for_each(|(cpu, slot)| slot.store(chosen(cpu), Release));
        let is_same = (0..self.by_cpu.len()).all(|cpu| chosen(cpu) == chosen(0));
        self.only.store(if is_same { chosen(0) } else { core::ptr::null_mut() }, Release);
    }

    /// Refuses flags that no arena here can honour.
    ///
    /// # Errors
    /// [`Invalid::GfpConflict`], [`Invalid::GfpUnsupported`].
    pub(crate) fn check(&self, gfp: Gfp) -> Result<(), Error> {
        gfp.check()?;
        if gfp.contains(Gfp::DMA32) && !self.in_use().any(|arena| arena.kind.serves(gfp)) {
            return Err(Invalid::GfpUnsupported("DMA32").into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Layout, mems_allowed};
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
        let of = |status: &str| {
            let allowed = mems_allowed(status).unwrap();
            Layout::of(&topology, 3, |node| allowed.contains(&node))
        };
        let layout = of("Cpus_allowed_list:\t0-1\nMems_allowed_list:\t0,2\nthreads:\t1\n");
        assert_eq!(layout.system_nodes, [0, 2]);
        assert_eq!(layout.node_of_cpu.iter().map(|node| node.get()).collect::<Vec<_>>(), [0, 1, 1]);
        assert_eq!(layout.distances, [[10, 30], [30, 10]]);
        assert_eq!(of("Mems_allowed_list:\t1\n"), Layout::flat(3));
        assert_eq!((mems_allowed("Name:\tx\n"), mems_allowed("Mems_allowed_list:\tx\n")), (None, None));
        // And this process's own can be read.
        let own = mems_allowed(&std::fs::read_to_string("/proc/self/status").unwrap());
        assert!(own.is_some_and(|own| !own.is_empty()));
    }
}
