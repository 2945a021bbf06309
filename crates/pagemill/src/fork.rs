//! After a fork (C4.4): the child has its own copy of the arena and goes on with it.
//!
//! The other threads of the parent are not in the child; they stopped wherever they were. What they own stays handed
//! out, and so does what they had in their hands on its way between a list, the zone and a caller: it is as if they had
//! been a moment further, or less far. What is free is on a list or has its bit in the zone, and that is all the child
//! believes: it puts what lists hold into the zone, counts the pageblocks again by their bits, and corrects the statistics.
//!
//! The child's memory is a copy of one moment: the system protects every page from writing before it lets go of the process,
//! so that the child has all that a thread wrote up to some point, and nothing after that (`tests/fork.rs` looks at it). So no bit
//! is set, and nothing lies on a list, that belongs to somebody.
//!
//! What a lock guards that a child goes on with (a pool's reserve, say) is not recounted: it is changed in sections that a
//! fork waits for ([`no_fork`]), so that the child finds the lock free and what it guards whole.
//!
//! # Order of locks
//! The registry, then sections. A fork waits for its turn at the registry while sections come and go, since the registry's
//! holder may be on the way into one; then it holds new sections back, and waits for those under way. They end: nobody asks for
//! the registry in a section.
//!
//! Memory that both processes see (a memfd's, or what was brought and is shared) stays the parent's: the child retires it.
use crate::allocator::Inner;
use crate::arena::FULL;
use crate::registry;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use pagemill_core::Pfn;
use pagemill_sys::{ForkHooks, List, Sections};

/// Forks between the first process and this one.
static GENERATION: AtomicU64 = AtomicU64::new(0);

#[inline]
pub(crate) fn generation() -> u64 {
    GENERATION.load(Relaxed)
}

static HOOKS: ForkHooks = ForkHooks { before, in_parent, in_child };

/// Sections that no fork may meet halfway.
static SECTIONS: Sections = Sections::new();

/// Until it is dropped, no fork begins. Many threads may have one at once, and none has two.
#[derive(Debug)]
pub(crate) struct NoFork(());

/// Goes before a lock is taken that a child has to find free, with what it guards whole.
#[inline]
pub(crate) fn no_fork() -> NoFork {
    SECTIONS.enter();
    NoFork(())
}

impl Drop for NoFork {
    #[inline]
    fn drop(&mut self) {
        SECTIONS.leave();
    }
}

fn before() {
    registry::lock_for_fork();
    SECTIONS.hold_back();
}

fn in_parent() {
    SECTIONS.let_in();
    registry::unlock_after_fork();
}

fn in_child() {
    GENERATION.fetch_add(1, Relaxed);
    registry::forget_home();
    registry::for_each(|arena| {
        if arena.inner().recover() {
            registry::come_home(arena);
        }
    });
    registry::unlock_in_child();
    SECTIONS.forget_after_fork(); // Those of the other threads: they are not here.
}

/// Runs as the library is loaded. The system reads its fork handlers as a fork begins: a fork that met the process's
/// first use just then would not wait for it, were they first told of us there, and its child would wait for ever.
// SAFETY: what stands in this section is called once, without anything that it needs but the C library.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = {
    extern "C" fn at_load() {
        pagemill_sys::on_fork(&HOOKS); // If it fails, `watch` tries again and says so.
    }
    at_load
};

/// Has the child of every fork recover every allocator. No allocator is made or closed while the process forks, nor is
/// the self-test run or the default allocator made: whoever does that holds the registry, having called this first.
pub(crate) fn watch() {
    assert!(pagemill_sys::on_fork(&HOOKS), "the system does not take fork handlers: no memory");
}

impl Inner {
    /// Returns whether no handle and no page of it is left.
    fn recover(&self) -> bool {
        for list in self.lists.lists() {
            self.zone.unbind(&list.bound);
        }
        let mut block_end = 0;
        self.zone.recover(self.lists.lists().flat_map(List::frames).map(Pfn::new), |first, n| {
            if FULL {
                let is_free = |pfn| self.zone.is_free(Pfn::new(pfn));
                self.arena.settle_states(first.as_u32(), n as u32, &mut block_end, is_free);
            }
        });
        self.lists.empty_after_fork();
        self.count_stranded();
        self.arena.keep_own_notes();
        self.arena.forget_pins();
        self.opening.forget_after_fork();
        self.nodes.waits.forget_after_fork();
        self.nodes.claims.forget_after_fork();
        self.claimed.store(0, Relaxed);
        self.nodes.limit.iter().for_each(|limit| limit.forget_claims());
        if self.is_ownerless.load(Relaxed) {
            return self.zone.close(self.quarantined.load(Relaxed) as usize);
        }
        if self.arena.is_of_parent() {
            // Whatever is free there the parent hands out.
            self.retired.store(true, Relaxed);
            self.nodes.choose();
        }
        self.settle_lists();
        false
    }
}

#[cfg(all(test, not(any(miri, shuttle))))]
mod tests {
    use super::{before, in_parent, no_fork};
    use crate::{fifo, registry};

    #[track_caller]
    fn assert_sleeps(hold: impl FnOnce(&dyn Fn()) + Send, wait: impl FnOnce() + Send) {
        match fifo::sleeps(hold, wait) {
            Ok(times) => assert!(times > 0, "it kept what it waits for off the CPU"),
            Err(why) => println!("skipped: {why}"),
        }
    }

    /// What a fork does before and after there are two processes.
    fn fork_with(between: impl FnOnce()) {
        before();
        between();
        in_parent();
    }

    fn hold_registry(others: &dyn Fn()) {
        let held = registry::lock();
        others();
        drop(held);
    }

    #[test]
    fn the_registry_is_waited_for_asleep() {
        assert_sleeps(hold_registry, || drop(registry::lock()));
    }

    #[test]
    fn a_fork_waits_for_the_registry_asleep() {
        assert_sleeps(hold_registry, || fork_with(|| {}));
    }

    #[test]
    fn a_fork_waits_for_a_section_asleep() {
        let hold = |others: &dyn Fn()| {
            let section = no_fork();
            others();
            drop(section);
        };
        assert_sleeps(hold, || fork_with(|| {}));
    }

    #[test]
    fn a_section_waits_for_a_fork_asleep() {
        assert_sleeps(|others| fork_with(others), || drop(no_fork()));
    }
}
