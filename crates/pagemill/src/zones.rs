//! All the memory of an allocator: its arenas by node and kind, and which of them a request is to try, in which order
//! (C3.6, C3.7).
//!
//! Stands between a request and the arenas. A plain request takes from the lists of one arena, the nearest: [`here`] is one
//! look at a word where all CPUs have the same, and else one at the CPU's. All others walk a zonelist. Each arena stands there
//! as a zone of its own, with its own marks; in dumps, arenas of one node and kind are one zone.
//!
//! # How long it lives
//! A [`Zones`] is kept by its parts: all handles together are one, each arena is one. So it outlives the last handle as long as
//! pages are out, and the call that lets go of the last part frees it. Until then [`Kept`] leads to it.
//!
//! # Invariants
//! - N1 An arena that was added stays until the last handle is gone. One that was retired is passed over, and has its metadata
//!   but no memory, until memory like it is added. So a thread that walks a zonelist, which has a handle, needs no lock.
//! - N2 What is published (`only`, `by_cpu`, the zonelists) changes under the registry's lock alone, and is freed with this.
//! - N3 `waits` alone is never freed: a thread that freed the last page of an arena may still ask whether a request waits. It
//!   serves another allocator later; at worst such a late question wakes a request there in vain.
//!
//! [`here`]: Zones::here
use crate::build_error::BuildError;
use crate::error::{Error, InvalidRequest};
use crate::idle::Idle;
use crate::reclaim::Reclaim;
use crate::registry;
use crate::shared::{Hooks, Shared};
use crate::topology::Layout;
use crate::zone::Zone;
use core::ops::Deref;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32};
use pagemill_core::{CpuId, Gfp, NodeId, NodeMask, Policy, zonelist_place};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The arenas in the order in which requests that prefer each node try them.
type Zonelists = Vec<Vec<&'static Zone>>;

fn is_same(one: &Zonelists, other: &Zonelists) -> bool {
    let is_same = |one: &Vec<&Zone>, other: &Vec<&Zone>| {
        one.len() == other.len() && one.iter().zip(other).all(|(one, other)| core::ptr::eq(*one, *other))
    };
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| is_same(one, other))
}

#[derive(Debug)]
pub(crate) struct Zones {
    /// The arena whose lists serve plain requests on every CPU; null where CPUs differ.
    only: AtomicPtr<Zone>,
    /// The same for each CPU; null where the slow path has to choose.
    by_cpu: Vec<AtomicPtr<Zone>>,
    /// The arena that was added first, whose lists say which CPU this is.
    oldest: AtomicPtr<Zone>,
    /// The last one that was published, and those before, which somebody may still walk.
    zonelists: AtomicPtr<Zonelists>,
    walked: Mutex<Vec<AtomicPtr<Zonelists>>>,
    /// The arena that was added last; each leads to the one before. No lock: a child of a fork reads it too.
    newest: AtomicPtr<Zone>,
    notes: Mutex<Vec<BuildError>>,
    policy: Policy,
    /// Where the last interleaved page came from.
    turn: AtomicU32,
    pub(crate) reclaim: Reclaim,
    /// After how long free memory goes back to the system, if it does.
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

/// What zones call here.
static HOOKS: Hooks = Hooks {
    // SAFETY: of an allocator with a handle, as its caller says, and what was given to `serves`.
    is_hopeful: |zones, lack| unsafe { &*zones.cast::<Zones>() }.is_hopeful(lack),
    // SAFETY: as above.
    zone_was_retired: |zones| unsafe { &*zones.cast::<Zones>() }.choose(),
};

/// Leads to an allocator's [`Zones`] as long as its holder has a handle. It is not a reference: one has to be valid until the call
/// that was given it returns, and the call that drops the last handle frees them earlier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept(NonNull<Zones>);

// SAFETY: as a shared reference to what any thread may use.
unsafe impl Send for Kept where for<'a> &'a Zones: Send {}
// SAFETY: as for Send.
unsafe impl Sync for Kept where for<'a> &'a Zones: Sync {}

impl Kept {
    #[inline]
    pub(crate) fn get(self) -> &'static Zones {
        // SAFETY: there, as the caller has a handle.
        unsafe { self.0.as_ref() }
    }

    /// # Safety
    /// Once, when the last handle is gone: nobody uses it any more.
    pub(crate) unsafe fn free(self) {
        // SAFETY: `keep` made it of a box.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl Drop for Zones {
    fn drop(&mut self) {
        let walked = core::mem::take(&mut self.walked).into_inner().unwrap_or_else(PoisonError::into_inner);
        for zonelists in walked.into_iter().map(AtomicPtr::into_inner).chain([*self.zonelists.get_mut()]) {
            // SAFETY: a box's, and nobody walks it any more.
            drop(unsafe { Box::from_raw(zonelists) });
        }
    }
}

impl Zones {
    /// Of no zone yet.
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

    /// Keeps it until the last handle is gone.
    pub(crate) fn keep(self) -> Kept {
        let kept = Kept(NonNull::from(Box::leak(Box::new(self))));
        kept.get().shared.serves(kept.get());
        kept
    }

    /// The arena whose lists serve plain requests of this CPU.
    #[inline]
    pub(crate) fn here(&self) -> Option<&'static Zone> {
        // Acquire pairs with the Release in `publish`: the arena is complete.
        let only = self.only.load(Acquire);
        // SAFETY: null, or an arena's, which lives as long as the allocator (N1).
        unsafe { only.as_ref() }.or_else(|| self.here_by_cpu())
    }

    /// Out of line: where there is one node it would be 100 bytes more wherever a page is asked for.
    #[inline(never)]
    fn here_by_cpu(&self) -> Option<&'static Zone> {
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
    pub(crate) fn policy(&self) -> Policy {
        self.policy
    }

    fn zonelists(&self) -> &Zonelists {
        // Acquire as in `here`.
        // SAFETY: set in `new`, and published ones are kept (N2).
        unsafe { &*self.zonelists.load(Acquire) }
    }
    /// The arenas, the nearest to `from` first.
    pub(crate) fn zonelist(&self, from: NodeId) -> &[&'static Zone] {
        let lists = self.zonelists();
        lists.get(from.get()).or(lists.first()).map_or(&[], Vec::as_slice)
    }
    /// All arenas in use.
    pub(crate) fn all(&self) -> &[&'static Zone] {
        self.zonelist(NodeId::ZERO)
    }
    /// The same without those that were retired and still stand there: after a fork, what is shared with the parent.
    pub(crate) fn in_use(&self) -> impl Iterator<Item = &'static Zone> {
        self.all().iter().copied().filter(|zone| !zone.is_retired())
    }
    /// The nodes that have memory.
    pub(crate) fn populated(&self) -> NodeMask {
        self.in_use().map(|zone| zone.node).collect()
    }
    /// Returns all lists' frames to their zones.
    pub(crate) fn drain_all(&self) -> usize {
        self.all().iter().map(|zone| zone.drain_all()).sum()
    }
    /// The first arena: a process that declares nothing has one.
    pub(crate) fn first(&self) -> &'static Zone {
        match self.all() {
            [first, ..] => first,
            [] => panic!("an allocator without an arena"),
        }
    }

    /// Changes the nodes that requests may have memory of. Lists of nodes that are not allowed any more are passed over from now on.
    pub(crate) fn set_allowed(&self, _held: &registry::Writing, nodes: NodeMask) -> Result<(), InvalidRequest> {
        if !self.in_use().any(|zone| nodes.contains(zone.node)) {
            return Err(InvalidRequest::NoSuchNode { nodes: nodes.as_bits() });
        }
        self.shared.set_allowed(nodes);
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
    pub(crate) fn newest(&self) -> Option<&'static Zone> {
        // Acquire pairs with the Release in `add`.
        // SAFETY: as in `here`.
        unsafe { self.newest.load(Acquire).as_ref() }
    }
    /// Adds an arena, whose `older` is the newest up to now, and which is one more part.
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
    /// Requests that wait may be served by memory that is new, or allowed only now. Its lists are shut like all others.
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
    /// Every arena that was ever added, retired ones too, in the order in which they came.
    pub(crate) fn ever(&self) -> Vec<&'static Zone> {
        let mut arenas: Vec<_> = core::iter::successors(self.newest(), |zone| zone.older).collect();
        arenas.reverse();
        arenas
    }

    /// Remembers what the system refused without that being an error; with the registry held.
    pub(crate) fn note(&self, why: BuildError) {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).push(why);
    }
    pub(crate) fn notes(&self) -> Vec<BuildError> {
        let _held = registry::lock(); // No fork meets it locked.
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes zonelists of the arenas that are in use.
    pub(crate) fn publish(&self, _held: &registry::Writing) {
        let mut arenas = self.ever();
        arenas.retain(|zone| !zone.is_retired());
        let nodes = arenas.iter().map(|zone| zone.node.get() + 1).max().unwrap_or(1).max(self.layout.distances.len());
        let lists: Zonelists = (0..nodes.min(NodeId::COUNT_MAX))
            .filter_map(NodeId::new)
            .map(|from| {
                let mut list = arenas.clone();
                let distance = |zone: &Zone| self.layout.distance(from, zone.node);
                list.sort_by_key(|zone| zonelist_place(from, zone.node, zone.kind, distance(zone)));
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
            let first = self.zonelist(from).iter().find(|zone| allowed.contains(zone.node) && !zone.is_retired());
            match (self.policy, first) {
                (Policy::Interleave(_), _) | (_, None) => core::ptr::null_mut(),
                (_, Some(&zone)) => core::ptr::from_ref::<Zone>(zone).cast_mut(),
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
    /// [`Invalid::GfpConflict`](pagemill_core::Invalid::GfpConflict), [`InvalidRequest::GfpUnsupported`].
    pub(crate) fn check(&self, gfp: Gfp) -> Result<(), Error> {
        gfp.check()?;
        if gfp.contains(Gfp::DMA32) && !self.in_use().any(|zone| zone.kind.serves(gfp)) {
            return Err(InvalidRequest::GfpUnsupported("DMA32").into());
        }
        Ok(())
    }
}
