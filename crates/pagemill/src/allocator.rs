//! The allocator handle: what a program holds, clones and closes.
//!
//! It stands above the path of every request. [`Allocator`] refers to the allocator's [`Zones`], which are freed when
//! the last handle is dropped. A zone with pages out outlives the handle: [`Owner`] marks each zone as ownerless, and
//! the free of its last page ends it (`registry.rs`).
use crate::error::{Error, InvalidRequest};
use crate::process::no_fork;
use crate::registry;
use crate::zones::{Zones, ZonesPtr};
use core::fmt;
use pagemill_core::{CpuId, NodeMask, PageCount};
use pagemill_os::Backend;
use std::sync::{Arc, Weak};

/// An allocator of pages. It is a handle: cheap to clone, and threads may share one or own a clone each. The [crate's
/// front page](crate) shows a program.
///
/// Pages keep their memory alive. If the last handle is dropped while pages are out, each arena stays until its last
/// page is freed, and is unmapped then.
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
/// The child of a `fork` continues with a copy of each allocator (C4.4). Pages that were handed out at the fork stay
/// handed out in the child; all other pages are free there. Memory that both processes see, a memfd or shared memory
/// that was brought, stays the parent's: the child gets no page of it and returns none of it to the system.
///
/// The C library's fork handlers do this work. `_Fork`, a raw `fork` or `clone` system call, and anything else that
/// runs no `pthread_atfork` handlers skip it: a child made that way must not use Pagemill until it execs. A signal
/// handler that interrupted a call into Pagemill must not fork: the child would count the frames that this call is
/// changing, and then return into the call, which would change them once more.
#[derive(Clone)]
pub struct Allocator {
    zones: ZonesPtr,
    owner: Arc<Owner>,
}

/// Ends the allocator when the last handle is dropped.
#[derive(Debug)]
pub(crate) struct Owner(ZonesPtr);

impl Owner {
    pub(crate) fn zones(&self) -> &'static Zones {
        self.0.get()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.zones().reclaim.stop();
        self.zones().waits.forget_leaked();
        // Abandon all zones before any ends, in one section that no fork interrupts. Otherwise a forked child could
        // keep a zone that is not abandoned yet, and with it zonelists that name zones which have ended.
        let zones = self.zones().ever();
        let section = no_fork();
        zones.iter().for_each(|zone| zone.abandon());
        drop(section);
        for zone in zones {
            if zone.leave() {
                registry::come_home(zone);
            }
        }
        // SAFETY: this runs once, as the last handle is dropped, so no other handle leads to the zones.
        unsafe { self.0.free() };
        registry::bury();
    }
}

/// The error of [`Allocator::close`]: pages are still handed out.
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
#[derive(thiserror::Error)]
#[error("the allocator still has {pages_out} handed out; free them first")]
#[non_exhaustive]
pub struct StillOut {
    /// The allocator, unchanged.
    pub allocator: Allocator,
    /// How many pages are out.
    pub pages_out: PageCount,
}

/// The sentence, as `Display`, for a `main` that returns this error.
impl fmt::Debug for StillOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Allocator {
    /// Whether a pointer leads into the allocator's memory, handed out or not.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp};
    /// let allocator = Allocator::builder().pages(8).build()?;
    /// let page = allocator.alloc_page(Gfp::KERNEL)?;
    /// assert!(allocator.has_memory_at(page.as_ptr()) && !Allocator::global().has_memory_at(page.as_ptr()));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn has_memory_at(&self, pointer: *const u8) -> bool {
        self.has_address(pointer.addr())
    }

    /// Whether this address lies in the allocator's memory.
    pub(crate) fn has_address(&self, addr: usize) -> bool {
        registry::by_address(addr).is_some_and(|(zone, _)| std::sync::Arc::ptr_eq(zone.shared(), &self.zones().shared))
    }

    pub(crate) fn of(zones: ZonesPtr) -> Self {
        Self::from_owner(Arc::new(Owner(zones)))
    }
    pub(crate) fn from_owner(owner: Arc<Owner>) -> Self {
        Self { zones: owner.0, owner }
    }
    #[inline]
    pub(crate) fn zones(&self) -> &'static Zones {
        self.zones.get()
    }
    pub(crate) fn weak(&self) -> Weak<Owner> {
        Arc::downgrade(&self.owner)
    }

    /// The backend of the per-CPU lists.
    pub fn backend(&self) -> Backend {
        self.zones().first().lists().backend()
    }
    /// How many CPUs have lists.
    pub fn cpus(&self) -> usize {
        self.zones().first().lists().cpus()
    }
    /// The number of pages that the allocator manages.
    pub fn managed_pages(&self) -> PageCount {
        PageCount::new(self.zones().in_use().map(|zone| zone.frames()).sum())
    }
    /// The cost of a frame's free state, in bits (C10.3: at most 2).
    pub fn metadata_bits_per_frame(&self) -> f64 {
        self.zones().first().metadata_bits_per_frame()
    }

    /// Moves the frames on all CPUs' lists to the zones, while the CPUs keep using their lists (C4.3). Returns the
    /// number of pages moved.
    ///
    /// With restartable sequences, draining another CPU's list needs `membarrier`. If a sandbox was entered after the
    /// allocator was built and forbids `membarrier`, other CPUs' lists are skipped: their pages still serve requests on
    /// those CPUs.
    pub fn drain(&self) -> PageCount {
        PageCount::new(self.zones().drain_all())
    }
    /// Moves the frames on one CPU's lists to the zones.
    ///
    /// # Errors
    /// [`InvalidRequest::NoSuchCpu`] if no CPU has this number.
    pub fn drain_cpu(&self, cpu: CpuId) -> Result<PageCount, Error> {
        if cpu.get() >= self.cpus() {
            return Err(InvalidRequest::NoSuchCpu { cpu: cpu.get(), cpus: self.cpus() }.into());
        }
        Ok(PageCount::new(self.zones().all().iter().map(|zone| zone.drain_cpu(cpu)).sum()))
    }

    /// Restricts requests to the memory of these nodes, as the kernel's cpuset does (C3.7). It takes effect at each
    /// request's next refill. Pages that are already handed out are unaffected.
    ///
    /// # Errors
    /// [`InvalidRequest::NoSuchNode`] if the allocator has no memory on any of them.
    ///
    /// ```
    /// use pagemill::{Allocator, NodeId, NodeMask};
    /// let allocator = Allocator::builder().pages(64).build()?;
    /// allocator.set_allowed_nodes(NodeMask::only(NodeId::ZERO))?;
    /// assert!(allocator.set_allowed_nodes(NodeMask::NONE).is_err());
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn set_allowed_nodes(&self, nodes: NodeMask) -> Result<(), Error> {
        Ok(self.zones().set_allowed(&registry::lock(), nodes)?)
    }

    /// Closes this handle. If it is the last one, the allocator is closed and its memory unmapped. `Ok` means that no
    /// page is out; while clones of the handle exist, the allocator stays open and they remain usable. A
    /// [`Registered`](crate::Registered) shrinker holds a clone too, and so does the reclaim thread during a round.
    ///
    /// # Errors
    /// [`StillOut`], with the number of pages that are out. Nothing has changed in this case.
    pub fn close(self) -> Result<(), StillOut> {
        let arenas = self.zones().ever();
        arenas.iter().for_each(|zone| _ = zone.drain_all());
        match arenas.iter().map(|zone| zone.out_at_rest()).sum() {
            0 => Ok(()),
            out => Err(StillOut { allocator: self, pages_out: PageCount::new(out) }),
        }
    }
}

/// Tests whether restartable sequences work on this system, by running one. The test runs once, and
/// [`Builder::build`](crate::Builder::build) uses its result too.
///
/// # Errors
/// The reason why they do not work.
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

#[cfg(all(test, not(any(miri, shuttle))))]
mod tests {
    use crate::patience::until;
    use crate::registry::by_address;
    use crate::{Allocator, Gfp, Memory, Mobility, free_pages_bulk};
    use core::borrow::Borrow;
    use pagemill_core::{CpuId, ListPolicy, SlowEvent, WordTable};

    #[test]
    fn the_list_of_a_retired_zone_does_not_grow() {
        let allocator = Allocator::builder().memory(Memory::anonymous(1024)).cpus(1, || 0).build().unwrap();
        let zone = allocator.zones().first();
        let policy = || zone.lists().list_here(Mobility::Unmovable).policy();
        let before = policy();
        zone.set_retired(true);
        assert!(!zone.grow_or_pass_on(Mobility::Unmovable, 64));
        assert_eq!(policy(), before);
        zone.set_retired(false);
        assert!(zone.grow_or_pass_on(Mobility::Unmovable, 64));
        assert_ne!(policy(), before);
    }

    /// One drain moves 768 pages of a list of 1024 with the CPU's table, and 256 while another call holds the table.
    #[test]
    fn an_unordered_list_drains_768_pages_with_its_table_and_256_without() {
        for is_held in [false, true] {
            let allocator = Allocator::builder().memory(Memory::anonymous(1 << 15)).cpus(1, || 0).build().unwrap();
            let cpu = allocator.zones().first().lists().cpu(CpuId::new(0));
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
    fn a_child_forked_while_the_last_handle_drops_ends_all_zones() {
        let allocator = (0..3).fold(Allocator::builder(), |builder, _| builder.memory(Memory::anonymous(64))).build();
        let allocator = allocator.unwrap();
        let number = allocator.zones().number;
        let arenas = allocator.zones().ever();
        let addrs: Vec<usize> = arenas.iter().map(|zone| zone.base()).collect();
        let is_there = |addr| by_address(addr).is_some_and(|(zone, _)| zone.shared().number == number);
        // The dropping thread now waits at the second zone, before it reaches the third.
        assert!(arenas[1].opening().try_enter());
        let dropping = std::thread::spawn(|| drop(allocator));
        until("the dropping thread is at the second zone", || {
            let is_open = arenas[1].opening().try_enter();
            is_open.then(|| arenas[1].opening().leave()).is_none()
        });
        // SAFETY: the child calls only functions that are allowed in the child of a multi-threaded program.
        match unsafe { libc::fork() } {
            0 => {
                let left = addrs.iter().filter(|&&addr| is_there(addr)).count();
                // SAFETY: ends the child without the parent's exit handlers.
                unsafe { libc::_exit(left as i32) }
            }
            child => {
                arenas[1].opening().leave();
                let mut status = 0;
                // SAFETY: waits for the child forked above.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                assert_eq!(libc::WEXITSTATUS(status), 0, "the child kept zones whose zonelists name ended zones");
                assert_eq!(status, 0);
            }
        }
        dropping.join().unwrap();
        assert!(!addrs.into_iter().any(is_there));
    }
}
