//! All zones of an allocator, by node and kind, and the order in which a request tries them (C3.6, C3.7).
//!
//! It stands between a request and the zones. A plain request takes from the lists of one zone, the nearest. [`here`]
//! finds that zone with one load if it is the same for all CPUs, and with one more load from the CPU's own slot if not.
//! All other requests walk a zonelist. Each arena is a zone of its own, with its own watermarks; dumps show the zones
//! of one node and kind as one.
//!
//! # Lifetime
//! A [`Zones`] lives until the last handle is dropped (`Owner` in `allocator.rs` frees it), and [`ZonesPtr`] refers to it
//! until then. Its [`Shared`] lives longer: until the last zone has ended.
//!
//! # Invariants
//! - N1 A zone that was added stays until the last handle is dropped. Requests skip a retired zone; it keeps its
//!   metadata, but not its memory, until memory like it is added. So a thread that walks a zonelist needs no lock: it
//!   has a handle.
//! - N2 What is published (`only`, `by_cpu`, the zonelists) changes only under the registry's lock, and is freed
//!   together with the [`Zones`].
//!
//! # Locks
//! The registry's lock comes first. `walked` and `notes` are locked only while it is held, so no fork finds them
//! locked.
//!
//! [`here`]: Zones::here
use crate::build_error::BuildError;
use crate::error::InvalidRequest;
use crate::idle::Idle;
use crate::reclaim::Reclaim;
use crate::registry;
use crate::shared::{Hooks, Lack, Shared};
use crate::topology::Layout;
use crate::zone::Zone;
use core::ops::Deref;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32};
use pagemill_core::{CpuId, Level, NodeId, NodeMask, Policy, zonelist_place};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// For each node, the zones in the order in which requests that prefer it try them.
type Zonelists = Vec<Vec<&'static Zone>>;

fn is_same(one: &Zonelists, other: &Zonelists) -> bool {
    let is_same = |one: &Vec<&Zone>, other: &Vec<&Zone>| {
        one.len() == other.len() && one.iter().zip(other).all(|(one, other)| core::ptr::eq(*one, *other))
    };
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| is_same(one, other))
}

#[derive(Debug)]
pub(crate) struct Zones {
    /// The zone whose lists serve plain requests on every CPU; null if CPUs differ.
    only: AtomicPtr<Zone>,
    /// The same for each CPU; null where the slow path has to choose.
    by_cpu: Vec<AtomicPtr<Zone>>,
    /// The zone that was added first. Its lists tell which CPU a thread runs on.
    oldest: AtomicPtr<Zone>,
    /// The zonelists published last. `walked` keeps the earlier ones, which another thread may still walk.
    zonelists: AtomicPtr<Zonelists>,
    walked: Mutex<Vec<AtomicPtr<Zonelists>>>,
    /// The zone that was added last. Each zone refers to the one added before it. No lock: a forked child reads this
    /// too.
    newest: AtomicPtr<Zone>,
    notes: Mutex<Vec<BuildError>>,
    policy: Policy,
    /// The node that the last interleaved page came from.
    turn: AtomicU32,
    pub(crate) reclaim: Reclaim,
    /// How long memory stays free before it goes back to the system, if it does.
    pub(crate) idle: OnceLock<Idle>,
    pub(crate) shared: Arc<Shared>,
}

impl Deref for Zones {
    type Target = Shared;
    #[inline]
    fn deref(&self) -> &Shared {
        &self.shared
    }
}

/// The functions that zones call in their allocator.
static HOOKS: Hooks = Hooks {
    // SAFETY: the caller ensures that the allocator has a handle, and `zones` is the pointer that `keep` gave to
    // `serves`.
    is_hopeful: |zones, lack| unsafe { &*zones.cast::<Zones>() }.is_hopeful(lack),
    // SAFETY: as above.
    zone_was_retired: |zones| unsafe { &*zones.cast::<Zones>() }.choose(),
};

/// Refers to an allocator's [`Zones`] for as long as its holder has a handle. It is not a reference: a reference must
/// stay valid until the call that received it returns, and the call that drops the last handle frees the zones before
/// it returns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ZonesPtr(NonNull<Zones>);

// SAFETY: it gives out only shared references, and any thread may use those (`&Zones: Send`).
unsafe impl Send for ZonesPtr where for<'a> &'a Zones: Send {}
// SAFETY: as for Send.
unsafe impl Sync for ZonesPtr where for<'a> &'a Zones: Sync {}

impl ZonesPtr {
    #[inline]
    pub(crate) fn get(self) -> &'static Zones {
        // SAFETY: the caller has a handle, so the zones have not been freed.
        unsafe { self.0.as_ref() }
    }

    /// # Safety
    /// Call this once, after the last handle is dropped, when no thread uses the zones any more.
    pub(crate) unsafe fn free(self) {
        // SAFETY: `keep` made the pointer from a box, and the caller ensures that this is the only call.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl Drop for Zones {
    fn drop(&mut self) {
        let walked = core::mem::take(&mut self.walked).into_inner().unwrap_or_else(PoisonError::into_inner);
        for zonelists in walked.into_iter().map(AtomicPtr::into_inner).chain([*self.zonelists.get_mut()]) {
            // SAFETY: the pointer is from `Box::into_raw`, and no handle is left, so no thread walks these zonelists.
            drop(unsafe { Box::from_raw(zonelists) });
        }
    }
}

impl Zones {
    /// Without any zone yet.
    pub(crate) fn new(layout: Layout, policy: Policy, huge_pages: bool) -> Self {
        Self {
            only: AtomicPtr::default(),
            by_cpu: layout.node_of_cpu.iter().map(|_| AtomicPtr::default()).collect(),
            oldest: AtomicPtr::default(),
            zonelists: AtomicPtr::new(Box::into_raw(Box::default())),
            walked: Mutex::default(),
            newest: AtomicPtr::default(),
            notes: Mutex::default(),
            policy,
            turn: AtomicU32::new(0),
            reclaim: Reclaim::default(),
            idle: OnceLock::new(),
            shared: Arc::new(Shared::new(layout, huge_pages, &HOOKS)),
        }
    }

    /// Leaks it, until [`ZonesPtr::free`].
    pub(crate) fn keep(self) -> ZonesPtr {
        let kept = ZonesPtr(NonNull::from(Box::leak(Box::new(self))));
        kept.get().shared.serves(kept.get());
        kept
    }

    /// The zone whose lists serve plain requests on this CPU.
    #[inline]
    pub(crate) fn here(&self) -> Option<&'static Zone> {
        // Acquire pairs with the Release in `choose`: the zone is complete.
        let only = self.only.load(Acquire);
        // SAFETY: null, or a zone of this allocator, which lives as long as the caller's handle (N1).
        unsafe { only.as_ref() }.or_else(|| self.here_by_cpu())
    }

    /// Out of line: inlined, it would add 100 bytes to every caller, also on machines with one node.
    #[inline(never)]
    fn here_by_cpu(&self) -> Option<&'static Zone> {
        // SAFETY: as in `here`.
        unsafe { self.by_cpu.get(self.cpu().get())?.load(Acquire).as_ref() }
    }

    /// The CPU that the calling thread runs on.
    #[inline]
    pub(crate) fn cpu(&self) -> CpuId {
        // Acquire pairs with the Release in `add`.
        // SAFETY: as in `here`.
        let oldest = unsafe { self.oldest.load(Acquire).as_ref() };
        oldest.map_or(CpuId::new(0), |oldest| oldest.lists().here())
    }
    /// The node of that CPU.
    pub(crate) fn node(&self) -> NodeId {
        self.layout.node_of(self.cpu())
    }
    pub(crate) fn policy(&self) -> Policy {
        self.policy
    }

    fn zonelists(&self) -> &Zonelists {
        // Acquire pairs with the Release in `publish`.
        // SAFETY: set in `new` or `publish`, and zonelists that were published are kept (N2).
        unsafe { &*self.zonelists.load(Acquire) }
    }
    /// The zones, the nearest to `from` first.
    pub(crate) fn zonelist(&self, from: NodeId) -> &[&'static Zone] {
        let lists = self.zonelists();
        lists.get(from.get()).or(lists.first()).map_or(&[], Vec::as_slice)
    }
    /// All zones in use.
    pub(crate) fn all(&self) -> &[&'static Zone] {
        self.zonelist(NodeId::ZERO)
    }
    /// The same without retired zones. In a forked child the zonelists still name retired ones: those whose memory is
    /// shared with the parent.
    pub(crate) fn in_use(&self) -> impl Iterator<Item = &'static Zone> {
        self.all().iter().copied().filter(|zone| !zone.is_retired())
    }
    /// The nodes that have memory.
    pub(crate) fn populated(&self) -> NodeMask {
        self.in_use().map(|zone| zone.node()).collect()
    }
    /// Returns the frames on all lists to their zones.
    pub(crate) fn drain_all(&self) -> usize {
        self.all().iter().map(|zone| zone.drain_all()).sum()
    }
    /// The first zone. Every allocator has one.
    pub(crate) fn first(&self) -> &'static Zone {
        match self.all() {
            [first, ..] => first,
            [] => panic!("an allocator without a zone"),
        }
    }

    /// Changes the nodes whose memory requests may take. From now on, requests skip the lists of nodes outside the set.
    pub(crate) fn set_allowed(&self, _held: &registry::Writing, nodes: NodeMask) -> Result<(), InvalidRequest> {
        if !self.in_use().any(|zone| nodes.contains(zone.node())) {
            return Err(InvalidRequest::NoSuchNode { nodes: nodes.as_bits() });
        }
        self.shared.set_allowed(nodes);
        self.choose();
        self.tell_who_waits();
        Ok(())
    }

    /// Takes the next `n` turns among the nodes `among`, from which interleaved pages come. Returns the node of the
    /// first turn; none if `n` is 0 or `among` is empty.
    pub(crate) fn take_turns(&self, among: NodeMask, n: usize) -> Option<NodeId> {
        let steps = n.checked_sub(1)?.checked_rem(among.count())? + 1;
        let node = |last: u32| NodeId::new(last as usize).and_then(|last| among.next_after(last));
        let nth = |last| (1..steps).try_fold(node(last)?, |last, _| among.next_after(last));
        let last = self.turn.fetch_update(Relaxed, Relaxed, |last| nth(last).map(|next| next.get() as u32)).ok()?;
        node(last)
    }

    /// The zone that was added last.
    pub(crate) fn newest(&self) -> Option<&'static Zone> {
        // Acquire pairs with the Release in `add`.
        // SAFETY: as in `here`.
        unsafe { self.newest.load(Acquire).as_ref() }
    }
    /// Adds a zone. Its `older` is the one that was the newest before.
    pub(crate) fn add(&self, held: &registry::Writing, zone: &'static Zone) {
        let added = core::ptr::from_ref(zone).cast_mut();
        if self.oldest.load(Relaxed).is_null() {
            // Release pairs with the Acquire in `cpu`.
            self.oldest.store(added, Release);
        }
        // Release pairs with the Acquire in `newest`.
        self.newest.store(added, Release);
        self.publish(held);
        self.tell_who_waits();
    }
    /// Wakes waiting requests that memory which was just added or allowed may serve. The new zone's lists are shut like
    /// all others.
    pub(crate) fn tell_who_waits(&self) {
        if self.waits.is_awaited() {
            self.settle_lists();
            self.waits.note_freed(&|_| true);
        }
    }
    /// See [`Zone::settle_lists`].
    pub(crate) fn settle_lists(&self) {
        self.all().iter().for_each(|zone| zone.settle_lists());
    }
    /// Whether a zone of one of these nodes was ever added, a retired or inherited one included.
    pub(crate) fn had_memory_on(&self, nodes: NodeMask) -> bool {
        core::iter::successors(self.newest(), |zone| zone.older()).any(|zone| nodes.contains(zone.node()))
    }
    /// Every zone that was ever added, retired ones included, oldest first.
    pub(crate) fn ever(&self) -> Vec<&'static Zone> {
        let mut arenas: Vec<_> = core::iter::successors(self.newest(), |zone| zone.older()).collect();
        arenas.reverse();
        arenas
    }

    /// Whether there may be enough now for a request that waits. Claimed frames count, since the request may be the claimant.
    ///
    /// A free calls this with the lines held, perhaps in a signal handler, perhaps for the last page that was out. The zones are still
    /// there: the request that waits has a handle of the allocator, and no request leaves its line while the lines are held.
    pub(crate) fn is_hopeful(&self, lack: Lack) -> bool {
        self.may_have(lack, |zone| zone.marks().floor(lack.gfp(), Level::Min))
    }

    /// Whether the zones have so many free frames above `floor`.
    fn may_have(&self, lack: Lack, floor: impl Fn(&Zone) -> u32) -> bool {
        let above = |zone: &&'static Zone| zone.buddy().free_frames().saturating_sub(floor(zone) as usize);
        let free: usize = self.all().iter().filter(|zone| zone.serves(lack)).map(above).sum();
        free >= lack.frames()
    }

    /// Whether there is enough for a request that is about to take several blocks; drains lists if need be. A request that tried
    /// without looking would hold all free memory for a moment before it gave that back, and others would find none.
    pub(crate) fn has_enough(&self, lack: Lack) -> bool {
        let has = || self.may_have(lack, |zone| zone.floor(lack.gfp(), Level::Min));
        lack.blocks == 1 || has() || (self.drain_all() > 0 && has())
    }

    /// Records a refusal by the system that is not an error. The caller holds the registry.
    pub(crate) fn note(&self, why: BuildError) {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).push(why);
    }
    pub(crate) fn notes(&self) -> Vec<BuildError> {
        let _held = registry::lock(); // So that no fork finds `notes` locked.
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes zonelists of the zones in use, and publishes them.
    pub(crate) fn publish(&self, _held: &registry::Writing) {
        let mut arenas = self.ever();
        arenas.retain(|zone| !zone.is_retired());
        let nodes = arenas.iter().map(|zone| zone.node().get() + 1).max().unwrap_or(1).max(self.layout.distances.len());
        let lists: Zonelists = (0..nodes.min(NodeId::COUNT_MAX))
            .filter_map(NodeId::new)
            .map(|from| {
                let mut list = arenas.clone();
                let distance = |zone: &Zone| self.layout.distance(from, zone.node());
                list.sort_by_key(|zone| zonelist_place(from, zone.node(), zone.kind(), distance(zone)));
                list
            })
            .collect();
        let mut walked = self.walked.lock().unwrap_or_else(PoisonError::into_inner);
        // The same zones may have been in use before: then their zonelists are reused.
        // SAFETY: the pointer is from `new` or an earlier `publish`, and is kept until the last handle is dropped (N2).
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

    /// Chooses, for each CPU, the zone whose lists serve plain requests; none with the interleave policy, where pages
    /// come from several nodes in turn. The caller holds the registry. Allocates nothing: a forked child calls this
    /// while locks of other libraries may still be held.
    pub(crate) fn choose(&self) {
        let allowed = self.allowed().and(self.policy.nodes());
        let chosen = |cpu: usize| {
            let from = self.policy.first(self.layout.node_of(CpuId::new(cpu as u32)));
            let first = self.zonelist(from).iter().find(|zone| allowed.contains(zone.node()) && !zone.is_retired());
            match (self.policy, first) {
                (Policy::Interleave(_), _) | (_, None) => core::ptr::null_mut(),
                (_, Some(&zone)) => core::ptr::from_ref::<Zone>(zone).cast_mut(),
            }
        };
        // `by_cpu` is set before `only`: where CPUs differ, `only` becomes null and each CPU reads its own slot.
        // Release pairs with the Acquire in `here`.
        (0..).zip(&self.by_cpu).for_each(|(cpu, slot)| slot.store(chosen(cpu), Release));
        let is_same = (0..self.by_cpu.len()).all(|cpu| chosen(cpu) == chosen(0));
        self.only.store(if is_same { chosen(0) } else { core::ptr::null_mut() }, Release);
    }
}
