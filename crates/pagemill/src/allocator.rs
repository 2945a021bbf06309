//! The allocator: arenas, the zone over each and the per-CPU lists above that.
use crate::error::{Error, InvalidRequest};
use crate::process::no_fork;
use crate::registry;
use crate::zones::{Kept, Zones};
use core::fmt;
use pagemill_core::{CpuId, NodeMask, PageCount};
use pagemill_os::Backend;
use std::sync::{Arc, Weak};

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
            .field("arenas", &self.zones().in_use().count())
            .field("pages", &self.managed_pages().get())
            .field("out", &stats.allocated.saturating_sub(stats.freed))
            .finish()
    }
}

/// Ends the allocator when the last handle is gone.
#[derive(Debug)]
pub(crate) struct Owner(Kept);

impl Owner {
    pub(crate) fn zones(&self) -> &'static Zones {
        self.0.get()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.zones().reclaim.stop();
        // All of them before any ends, and in one section: the child of a fork would keep those that are not, and look at zonelists
        // with zones that ended.
        let zones = self.zones().ever();
        let section = no_fork();
        zones.iter().for_each(|zone| zone.abandon());
        drop(section);
        for zone in zones {
            if zone.leave() {
                registry::come_home(zone);
            }
        }
        // SAFETY: once, and no handle is left.
        unsafe { self.0.free() };
        registry::bury();
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
    /// Is this address in its memory?
    pub(crate) fn has_address(&self, addr: usize) -> bool {
        registry::by_address(addr).is_some_and(|(zone, _)| core::ptr::eq(&*zone.shared, &*self.zones().shared))
    }

    pub(crate) fn of(nodes: Kept) -> Self {
        Self::from_owner(Arc::new(Owner(nodes)))
    }
    pub(crate) fn from_owner(owner: Arc<Owner>) -> Self {
        Self { nodes: owner.0, owner }
    }
    #[inline]
    pub(crate) fn zones(&self) -> &'static Zones {
        self.nodes.get()
    }
    pub(crate) fn weak(&self) -> Weak<Owner> {
        Arc::downgrade(&self.owner)
    }

    /// The list backend in force.
    pub fn backend(&self) -> Backend {
        self.zones().first().lists.backend()
    }
    /// How many CPUs have lists.
    pub fn cpus(&self) -> usize {
        self.zones().first().lists.cpus()
    }
    /// How many pages it manages.
    pub fn managed_pages(&self) -> PageCount {
        PageCount::new(self.zones().in_use().map(|zone| zone.frames()).sum())
    }
    /// What the free/used state of a frame costs, in bits (C10.3: at most 2).
    pub fn metadata_bits_per_frame(&self) -> f64 {
        self.zones().first().metadata_bits_per_frame()
    }

    /// Takes what all CPUs' lists hold back to the zones. Their owners go on meanwhile (C4.3). Returns the pages that
    /// were moved.
    ///
    /// Restartable sequences take `membarrier` for the lists of other CPUs. Where a sandbox that was put up after the
    /// allocator was built forbids it, those lists are left alone: what they hold serves requests on their own CPUs.
    pub fn drain(&self) -> PageCount {
        PageCount::new(self.zones().drain_all())
    }
    /// Takes what one CPU's lists hold back to the zones.
    ///
    /// # Errors
    /// [`InvalidRequest::NoSuchCpu`] if there is no such CPU.
    pub fn drain_cpu(&self, cpu: CpuId) -> Result<PageCount, Error> {
        if cpu.get() >= self.cpus() {
            return Err(InvalidRequest::NoSuchCpu { cpu: cpu.get(), cpus: self.cpus() }.into());
        }
        Ok(PageCount::new(self.zones().all().iter().map(|zone| zone.drain_cpu(cpu)).sum()))
    }

    /// Allows requests the memory of these nodes alone, from each request's next refill on (C3.7: the kernel's cpuset).
    /// Pages that are out stay out.
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

    /// Closes this handle, and with it the allocator if no other one is left. `Ok` says that no page is out, not that the
    /// memory is unmapped: while clones of the handle are about, the allocator stays open, and they may go on with it.
    /// A [`Registered`](crate::Registered) shrinker holds one too.
    ///
    /// # Errors
    /// [`StillOut`] with the number of pages, while some are out; nothing has changed then.
    pub fn close(self) -> Result<(), StillOut> {
        let arenas = self.zones().ever();
        arenas.iter().for_each(|zone| _ = zone.drain_all());
        match arenas.iter().map(|zone| zone.out_at_rest()).sum() {
            0 => Ok(()),
            out => Err(StillOut { allocator: self, pages_out: PageCount::new(out) }),
        }
    }
}

/// Do restartable sequences work here? Tried once, for real; [`Builder::build`](crate::Builder::build) asks it too.
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
        let zone = allocator.zones().first();
        let policy = || zone.lists.list_here(Mobility::Unmovable).policy();
        let before = policy();
        zone.retired.store(true, Relaxed);
        assert!(!zone.grow_or_pass_on(Mobility::Unmovable, 64));
        assert_eq!(policy(), before);
        zone.retired.store(false, Relaxed);
        assert!(zone.grow_or_pass_on(Mobility::Unmovable, 64));
        assert_ne!(policy(), before);
    }

    /// One drain moves 768 of a list of 1024, by the CPU's table, and 256 where another call has the table.
    #[test]
    fn a_list_in_no_order_is_drained_in_large_parts_and_without_its_table_in_small_ones() {
        for is_held in [false, true] {
            let allocator = Allocator::builder().memory(Memory::anonymous(1 << 15)).cpus(1, || 0).build().unwrap();
            let cpu = allocator.zones().first().lists.cpu(CpuId::new(0));
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
        let number = allocator.zones().number;
        let arenas = allocator.zones().ever();
        let addrs: Vec<usize> = arenas.iter().map(|zone| zone.base()).collect();
        let is_there = |addr| by_address(addr).is_some_and(|(zone, _)| zone.shared.number == number);
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
