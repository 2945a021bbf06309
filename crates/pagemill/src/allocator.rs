//! The allocator: arenas, the zone over each and the per-CPU lists above that.
use crate::arena::Arena;
use crate::builder::Builder;
use crate::free::finish;
use crate::memory::Memory;
use crate::misuse::{misuse, report};
use crate::nodes::{Kept, Nodes};
use crate::registry;
use crate::shutting;
use core::fmt;
use core::mem::ManuallyDrop;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};
use pagemill_core::{
    Buddy, CpuId, Error, Gfp, Given, Giving, Invalid, Level, ListPolicy, Misuse, MisuseKind, Mobility, NodeId,
    NodeMask, PageCount, Watermarks, ZoneKind, step,
};
use pagemill_os::{Backend, List, PerCpu, Sections};
use std::sync::{Arc, OnceLock, Weak};

/// An arena in use: its zone, and the lists above that. It lives until no handle of the allocator is left and all pages are
/// back; pages find it through their arena.
#[derive(Debug)]
pub(crate) struct Inner {
    /// The CPU whose list asked a depot last, plus one; 0 for none: see [`passes_on`](Inner::passes_on).
    pub(crate) last_to_ask: AtomicU32,
    /// Unmapped by [`end`](Self::end).
    pub(crate) lists: ManuallyDrop<PerCpu>,
    pub(crate) arena: &'static Arena,
    pub(crate) buddy: Buddy<'static>,
    /// The allocator's other arenas, and what they share.
    pub(crate) nodes: &'static Nodes,
    /// The arena that was added before this one.
    pub(crate) older: Option<&'static Self>,
    pub(crate) node: NodeId,
    pub(crate) kind: ZoneKind,
    pub(crate) marks: Watermarks,
    /// What it was made of.
    pub(crate) described: Memory,
    /// How often it was taken up again after it was retired.
    pub(crate) turn: AtomicU32,
    /// No handle of the allocator is left.
    pub(crate) is_ownerless: AtomicBool,
    /// Calls that open or shut its lists just now. `leave` holds them back for good.
    pub(crate) opening: Sections,
    /// It gives nothing any more, and what comes back goes to the system.
    pub(crate) retired: AtomicBool,
    /// It fell below its low mark, and is not above the high one yet.
    pub(crate) is_low: AtomicBool,
    /// Below: free frames that are kept for the request that claims them. Above, times 2^32: that claim's number.
    pub(crate) claimed: AtomicU64,
    /// Frames that a list may hold: its share of the zone, so that CPUs cannot hide much of a small one.
    pub(crate) limit_max: u32,
    /// Entries of frames that were found on two ways at once, and put aside.
    pub(crate) quarantined: AtomicU64,
    /// Blocks that came back and were refused.
    pub(crate) misused: AtomicU64,
    /// The next one on `registry::ENDED`.
    pub(crate) next_ended: AtomicPtr<Self>,
}

/// An allocator of pages: a handle that is cheap to clone, and that threads share or take with them. See the
/// [crate's front page](crate) for a program.
///
/// Pages keep their memory alive: when the last handle is dropped while pages are out, each arena stays until its last page
/// comes back, and goes then.
///
/// ```
/// use pagemill::{Allocator, Gfp};
/// let allocator = Allocator::builder().pages(1024).build()?;
/// let page = allocator.alloc_page(Gfp::KERNEL)?;
/// let refused = allocator.clone().close().unwrap_err();
/// assert_eq!(refused.pages_out.get(), 1);
/// drop(page);
/// # drop(refused);
/// allocator.close().unwrap();
/// # Ok::<(), pagemill::Error>(())
/// ```
///
/// # Fork
/// The child of a `fork` goes on with a copy of each allocator (C4.4): what anybody had stays handed out there, everything
/// else is free. Memory that both processes see, a memfd's or what was brought and is shared, stays the parent's: the child
/// gets no page of it and gives none back to the system. All that is done by the C library's fork handlers. `_Fork`, a `fork`
/// or `clone` system call made by hand, and whatever else runs no `pthread_atfork` handlers, recover nothing: a child made so
/// must not use Pagemill, unless to exec. A signal handler that interrupted a call of Pagemill's must not fork: the child would
/// count what that call was changing, and then change it once more.
#[derive(Clone)]
pub struct Allocator {
    nodes: Kept,
    owner: Arc<Owner>,
}

impl fmt::Debug for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stats = self.stats();
        f.debug_struct("Allocator")
            .field("backend", &format_args!("{}", self.backend()))
            .field("arenas", &self.nodes().in_use().count())
            .field("pages", &self.managed_pages().get())
            .field("out", &stats.allocated.saturating_sub(stats.freed))
            .finish()
    }
}

/// Ends the allocator when the last handle is gone.
#[derive(Debug)]
pub(crate) struct Owner(Kept);

impl Owner {
    pub(crate) fn nodes(&self) -> &'static Nodes {
        self.0.get()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.nodes().reclaim.stop();
        // All of them before any ends: the child of a fork would look at the others' zonelists.
        self.nodes().ever().into_iter().for_each(Inner::abandon);
        for inner in self.nodes().ever() {
            let arena = inner.arena;
            if inner.leave() {
                registry::come_home(arena);
            }
        }
        registry::bury();
        // SAFETY: the part of the handles, once, and none is left.
        unsafe { self.0.let_go() };
    }
}

/// [`Allocator::close`] was refused: pages are out.
///
/// ```
/// # use pagemill::{Allocator, Gfp};
/// # let allocator = Allocator::builder().pages(8).build()?;
/// let page = allocator.alloc_page(Gfp::KERNEL)?;
/// let still_open = allocator.close().unwrap_err();
/// println!("{still_open}");
/// drop(page);
/// still_open.allocator.close().unwrap();
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[error("the allocator still has {pages_out} handed out; free them first")]
pub struct StillOut {
    /// The allocator, as it was.
    pub allocator: Allocator,
    /// How many pages are out.
    pub pages_out: PageCount,
}

impl Allocator {
    /// Begins to describe an allocator.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The default allocator, made on first use: half of the system's memory as address space, committed as it is
    /// touched.
    ///
    /// # Panics
    /// If the system refuses even that address space, `PAGEMILL_BACKEND` names a backend that there is not or that does not
    /// work here, or `PAGEMILL_FAIL` cannot be read (see [`Faults`](crate::Faults)). [`builder`](Self::builder) returns these
    /// as errors.
    ///
    /// ```
    /// assert!(pagemill::Allocator::global().managed_pages().get() > 0);
    /// ```
    pub fn global() -> &'static Self {
        static GLOBAL: OnceLock<Allocator> = OnceLock::new();
        if let Some(allocator) = GLOBAL.get() {
            return allocator;
        }
        let mut begun = None;
        // Held outside of the cell, so that no child of a fork finds it half made.
        let held = registry::lock();
        GLOBAL.get_or_init(|| match Self::builder().build_held(&held, &mut begun) {
            Ok(allocator) => allocator,
            Err(error) => panic!("the default allocator cannot be made: {error}"),
        })
    }

    /// Is this address in its memory?
    pub(crate) fn has_address(&self, addr: usize) -> bool {
        registry::by_address(addr).is_some_and(|(arena, _)| core::ptr::eq(arena.inner().nodes, self.nodes()))
    }

    pub(crate) fn of(nodes: &'static Nodes) -> Self {
        Self::from_owner(Arc::new(Owner(nodes.kept())))
    }
    pub(crate) fn from_owner(owner: Arc<Owner>) -> Self {
        Self { nodes: owner.0, owner }
    }
    #[inline]
    pub(crate) fn nodes(&self) -> &'static Nodes {
        self.nodes.get()
    }
    pub(crate) fn weak(&self) -> Weak<Owner> {
        Arc::downgrade(&self.owner)
    }

    /// The list backend in force.
    pub fn backend(&self) -> Backend {
        self.nodes().first().lists.backend()
    }
    /// How many CPUs have lists.
    pub fn cpus(&self) -> usize {
        self.nodes().first().lists.cpus()
    }
    /// How many pages it manages.
    pub fn managed_pages(&self) -> PageCount {
        PageCount::new(self.nodes().in_use().map(|inner| inner.arena.frames()).sum())
    }
    /// What the free/used state of a frame costs, in bits (C10.3: at most 2).
    pub fn metadata_bits_per_frame(&self) -> f64 {
        self.nodes().first().arena.metadata_bits_per_frame()
    }

    /// Takes what all CPUs' lists hold back to the zones. Their owners go on meanwhile (C4.3). Returns the pages that
    /// were moved.
    ///
    /// Restartable sequences take `membarrier` for the lists of other CPUs. Where a sandbox that was put up after the
    /// allocator was built forbids it, those lists are left alone: what they hold serves requests on their own CPUs.
    pub fn drain(&self) -> PageCount {
        PageCount::new(self.nodes().drain_all())
    }
    /// Takes what one CPU's lists hold back to the zones.
    ///
    /// # Errors
    /// [`Invalid::Cpus`] if there is no such CPU.
    pub fn drain_cpu(&self, cpu: CpuId) -> Result<PageCount, Error> {
        if cpu.get() >= self.cpus() {
            return Err(Invalid::Cpus { cpus: cpu.get() + 1, max: self.cpus() }.into());
        }
        Ok(PageCount::new(self.nodes().all().iter().map(|inner| inner.drain_cpu(cpu)).sum()))
    }

    /// Allows requests the memory of these nodes alone, from each request's next refill on (C3.7: the kernel's cpuset).
    /// Pages that are out stay out.
    ///
    /// # Errors
    /// [`Invalid::NoSuchNode`] if the allocator has no memory on any of them.
    ///
    /// ```
    /// use pagemill::{Allocator, NodeId, NodeMask};
    /// let allocator = Allocator::builder().pages(64).build()?;
    /// allocator.set_allowed_nodes(NodeMask::only(NodeId::ZERO))?;
    /// assert!(allocator.set_allowed_nodes(NodeMask::NONE).is_err());
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn set_allowed_nodes(&self, nodes: NodeMask) -> Result<(), Error> {
        Ok(self.nodes().set_allowed(&registry::lock(), nodes)?)
    }

    /// Closes this handle, and with it the allocator if no other one is left. `Ok` says that no page is out, not that the
    /// memory is unmapped: while clones of the handle are about, the allocator stays open, and they may go on with it.
    /// A [`Registered`](crate::Registered) shrinker holds one too.
    ///
    /// # Errors
    /// [`StillOut`] with the number of pages, while some are out; nothing has changed then.
    pub fn close(self) -> Result<(), StillOut> {
        let arenas = self.nodes().ever();
        arenas.iter().for_each(|inner| _ = inner.drain_all());
        match arenas.iter().map(|inner| inner.out_at_rest()).sum() {
            0 => Ok(()),
            out => Err(StillOut { allocator: self, pages_out: PageCount::new(out) }),
        }
    }
}

/// Do restartable sequences work here? Tried once, for real; [`Builder::build`] asks it too.
///
/// # Errors
/// Why not.
///
/// ```
/// match pagemill::self_test() {
///     Ok(()) => println!("restartable sequences work"),
///     Err(why) => println!("portable lists: {why}"),
/// }
/// ```
pub fn self_test() -> Result<(), &'static str> {
    let _held = registry::lock();
    pagemill_os::self_test()
}

impl Inner {
    /// Returns all lists' frames to the zone, and then the depots', to which lists may have passed some meanwhile.
    #[cold]
    pub(crate) fn drain_all(&self) -> usize {
        let listed: usize = (0..self.lists.cpus()).map(|cpu| self.drain_cpu(CpuId::new(cpu as u32))).sum();
        listed + self.drain_depots()
    }

    /// Returns the depots' frames to the zone.
    pub(crate) fn drain_depots(&self) -> usize {
        let mut giving = Giving::to(&self.buddy);
        let drained = self.lists.drain_depots(|pfns| giving.give_slice(pfns));
        // Where nothing came nobody has to be woken.
        if drained > 0 {
            finish(self, &mut giving);
        }
        drained
    }

    /// Called when the allocator's last handle is gone. From then on freed pages go to the zone and not to a list.
    ///
    /// Returns whether all pages are back. If they are not, the call that frees the last page will learn that from the zone
    /// and end the arena. That may happen on another thread at any time: do not touch `self` after `false`.
    pub(crate) fn leave(&self) -> bool {
        // Waits for calls that are opening lists. None does so from now on.
        self.opening.hold_back();
        self.lists.lists().for_each(List::shut);
        self.drain_all();
        if self.out_at_rest() != 0 {
            // Some pages are not back. A thread may have put one of them on a list just before the list was shut, so drain
            // again, lists that look empty too. A thread that reaches a list after this drain sees that the list is shut.
            for cpu in 0..self.lists.cpus() {
                self.drain_lists(CpuId::new(cpu as u32), |_| true);
            }
            self.drain_depots();
        }
        let quarantined = self.quarantined.load(Relaxed) as usize;
        // Frames on lists that cannot be drained. With pages out they do not count, and the arena stays: a free may push
        // others of its list to the zone, where they would count once more.
        let left =
            if self.out_at_rest() == 0 { self.arena.frames() - self.buddy.free_frames() - quarantined } else { 0 };
        self.buddy.close(quarantined + left)
    }

    /// No handle is left: [`leave`](Self::leave) comes next, in the child of a fork too.
    fn abandon(&'static self) {
        self.is_ownerless.store(true, Relaxed);
        self.retired.store(true, Relaxed);
    }

    /// Unmaps the memory of the lists.
    ///
    /// # Safety
    /// Call this once for each `Inner`, and only when no thread uses its lists any more. Its other fields stay valid: they are
    /// on the heap and are freed later.
    pub(crate) unsafe fn end(this: *mut Self) {
        // SAFETY: the copy is dropped here, once, as the caller promises; the original never is.
        drop(unsafe { ManuallyDrop::into_inner((&raw const (*this).lists).read()) });
    }

    /// Returns one CPU's lists' frames to the zone.
    pub(crate) fn drain_cpu(&self, cpu: CpuId) -> usize {
        step!("Inner::drain_cpu");
        self.drain_lists(cpu, |list| !list.is_empty())
    }

    fn drain_lists(&self, cpu: CpuId, is_due: impl Fn(&List) -> bool) -> usize {
        let mut drained = 0;
        for mobility in Mobility::ALL {
            let list = &self.lists.cpu(cpu).lists[mobility.index()];
            if is_due(list) {
                let mut giving = Giving::to(&self.buddy);
                let given = self.lists.drain(cpu, mobility, |pfns| giving.give_slice(pfns));
                finish(self, &mut giving);
                // A list that cannot be drained is left as it is, its policy too.
                let Some(given) = given else { continue };
                drained += given;
            }
            self.buddy.unbind(&list.bound);
            list.set_policy(ListPolicy::start(self.limit_max));
        }
        drained
    }

    pub(crate) fn is_retired(&self) -> bool {
        self.retired.load(Relaxed)
    }
    /// Has the lists accept freed pages, or none while a request waits, the zone is low, or the arena is retired. Goes after each
    /// change of those: see `shutting.rs`.
    pub(crate) fn settle_lists(&self) {
        if !self.opening.try_enter() {
            return; // No handle is left: see `leave`.
        }
        let set = |is_open| self.lists.lists().for_each(if is_open { List::open } else { List::shut });
        shutting::settle(|| self.goes_past_lists(), set);
        // Nothing of this is to be touched from here on: see `leave`.
        self.opening.leave();
    }
    /// Whether freed pages go to the zone, where every CPU finds them, and not to a list.
    pub(crate) fn goes_past_lists(&self) -> bool {
        self.is_retired() || self.is_low.load(Relaxed) || self.nodes.waits.is_awaited()
    }

    /// Called after pages of this zone were handed out. Below the zone's low mark its lists are shut until it is above the
    /// high mark: freed pages refill the zone's reserve, and on a list any request could take them.
    pub(crate) fn shut_lists_below_low(&self) {
        let low = self.marks.floor(Gfp::NOWAIT, Level::Low) as usize;
        if low > 0 && self.buddy.free_frames() < low && !self.is_low.swap(true, Relaxed) {
            self.settle_lists();
        }
    }
    /// Opens the lists again if the zone is above its high mark. The caller owns a page of the zone, so the arena stays.
    pub(crate) fn open_lists_above_high(&self) {
        let high = (self.marks.high as usize).saturating_add(self.marks.lowmem_reserve as usize);
        if self.is_low.load(Relaxed) && self.buddy.free_frames() >= high {
            self.is_low.store(false, Relaxed);
            self.settle_lists();
        }
    }

    /// How many frames are neither in the zone, nor put aside, nor on lists that cannot be drained. Exact only when all other
    /// lists are drained and no thread allocates or frees.
    pub(crate) fn out_at_rest(&self) -> usize {
        // The zone first, by an acquiring load: a page that is freed may push others from a list to the zone, and none may
        // count twice.
        let here = self.buddy.free_frames() + self.quarantined.load(Relaxed) as usize;
        self.arena.frames().saturating_sub(here + self.lists.left_alone())
    }

    /// Is this acquisition to fail? One look at a word where nothing is injected.
    #[inline]
    pub(crate) fn is_refused_by_fault(&self, gfp: Gfp) -> bool {
        self.nodes.faults.get().is_some_and(|faults| faults.strikes(gfp))
    }

    /// Counts and reports misuse of this allocator's memory.
    #[cold]
    pub(crate) fn refuse(&self, misuse: Misuse) -> Misuse {
        self.misused.fetch_add(1, Relaxed);
        report(misuse)
    }

    /// Reports frames that were already in the free areas when they were freed: each was freed twice, and is free once from
    /// now on. All are counted; the last one is named.
    #[inline]
    pub(crate) fn note_doubles(&self, given: Given) -> Option<Misuse> {
        let pfn = given.last_double?;
        self.misused.fetch_add(given.doubles as u64 - 1, Relaxed);
        Some(self.refuse(misuse(MisuseKind::DoubleFree, self.arena.addr_of(pfn.as_u32()))))
    }
}

#[cfg(all(test, not(any(miri, shuttle))))]
mod tests {
    use crate::patience::until;
    use crate::registry::by_address;
    use crate::{Allocator, Gfp, Memory, Mobility, free_pages_bulk};
    use core::borrow::Borrow;
    use core::sync::atomic::Ordering::Relaxed;
    use pagemill_core::{CpuId, ListPolicy, SlowEvent, WordTable};

    #[test]
    fn a_list_that_takes_nothing_does_not_grow() {
        let allocator = Allocator::builder().memory(Memory::anonymous(1024)).cpus(1, || 0).build().unwrap();
        let inner = allocator.nodes().first();
        let policy = || inner.lists.list_here(Mobility::Unmovable).policy();
        let before = policy();
        inner.retired.store(true, Relaxed);
        assert!(!inner.grow_or_pass_on(Mobility::Unmovable, 64));
        assert_eq!(policy(), before);
        inner.retired.store(false, Relaxed);
        assert!(inner.grow_or_pass_on(Mobility::Unmovable, 64));
        assert_ne!(policy(), before);
    }

    /// One drain moves 768 of a list of 1024, by the CPU's table, and 256 where another call has the table.
    #[test]
    fn a_list_in_no_order_is_drained_in_large_parts_and_without_its_table_in_small_ones() {
        for is_held in [false, true] {
            let allocator = Allocator::builder().memory(Memory::anonymous(1 << 15)).cpus(1, || 0).build().unwrap();
            let cpu = allocator.nodes().first().lists.cpu(CpuId::new(0));
            let mut pages: Vec<_> = (0..16_384).map(|_| allocator.alloc_page(Gfp::KERNEL).ok()).collect();
            allocator.drain();
            (0..pages.len()).for_each(|at| pages.swap(at, (at * 7919) % 16_384));
            let list = &cpu.lists[Mobility::Unmovable.index()];
            list.set_policy(ListPolicy { batch: ListPolicy::BATCH_MAX, limit: 1024, last: SlowEvent::Drain });
            let table = cpu.table.try_hold().filter(|_| is_held);
            pages.chunks_mut(64).for_each(|pages| _ = free_pages_bulk(pages));
            let stats = allocator.stats();
            assert_eq!(stats.drained_pages, stats.drains * if is_held { 256 } else { 768 });
            drop(table);
            let table = cpu.table.try_hold().unwrap();
            assert_eq!(Borrow::<WordTable<_>>::borrow(&table), &WordTable::new());
            drop(table);
            allocator.drain();
            assert_eq!((allocator.validate().unwrap().free, stats.misused), (1 << 15, 0));
        }
    }

    #[test]
    fn a_child_forked_amid_the_drop_of_the_last_handle_ends_all_arenas() {
        let allocator = (0..3).fold(Allocator::builder(), |builder, _| builder.memory(Memory::anonymous(64))).build();
        let allocator = allocator.unwrap();
        let number = allocator.nodes().number;
        let arenas = allocator.nodes().ever();
        let addrs: Vec<usize> = arenas.iter().map(|inner| inner.arena.base()).collect();
        let is_there = |addr| by_address(addr).is_some_and(|(arena, _)| arena.inner().nodes.number == number);
        // The thread that drops the handle waits for this at the second one, and has not come to the third.
        assert!(arenas[1].opening.try_enter());
        let dropping = std::thread::spawn(|| drop(allocator));
        until("a thread at the second arena", || {
            let is_open = arenas[1].opening.try_enter();
            is_open.then(|| arenas[1].opening.leave()).is_none()
        });
        // SAFETY: the child calls what may be called in the child of a program with threads.
        match unsafe { libc::fork() } {
            0 => {
                let left = addrs.iter().filter(|&&addr| is_there(addr)).count();
                // SAFETY: ends the child without what the parent's exit runs.
                unsafe { libc::_exit(left as i32) }
            }
            child => {
                arenas[1].opening.leave();
                let mut status = 0;
                // SAFETY: the child made above.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                assert_eq!(
                    libc::WEXITSTATUS(status),
                    0,
                    "arenas are left in the child, over zonelists of others that ended"
                );
                assert_eq!(status, 0);
            }
        }
        dropping.join().unwrap();
        assert!(!addrs.into_iter().any(is_there));
    }
}
