//! What several files of tests share.
mod allocators;
mod caps;
mod child;
mod cpus;
pub(crate) mod edu;
mod executors;
mod fake_backing;
pub(crate) mod kcore;
mod mappings;
mod pages;
#[path = "../../../../tests/patience.rs"]
mod patience;
mod resident;
mod shrinkers;
pub(crate) mod xsk;

pub(crate) use allocators::*;
pub(crate) use caps::without_capabilities;
pub(crate) use child::{fork, in_child, status_of_child, wait_for};
pub(crate) use cpus::{allowed_cpus, moves_to, stay_here, stay_on, this_cpu};
pub(crate) use executors::{Drops, EXECUTORS, IN_ORDER, Job, Run, block_on, poll_once};
pub(crate) use fake_backing::{Asked, FakeBacking, Fault, Kept};
pub(crate) use mappings::{is_mapped, map, map_as, mappings, range_of};
pub(crate) use pagemill_model::{Rng, fake_cpu, set_fake_cpu as go_to};
pub(crate) use pages::*;
pub(crate) use patience::{PATIENCE, until};
pub(crate) use resident::{are_resident, pages_go_singly, resident_pages, system_page};
pub(crate) use shrinkers::{Cache, Calls, panics};

use pagemill::{Allocator, Backing, Error, Gfp, Page, ReadTransfer, WriteTransfer};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// A deadline that is never met: something else ends the wait.
pub(crate) const HOUR: Duration = Duration::from_secs(3600);

/// Waits until so many requests wait.
#[track_caller]
pub(crate) fn until_waiting(allocator: &Allocator, n: u64) {
    until("a waiting request", || allocator.stats().waiting == n);
}

/// Stops a test's other threads when the test ends, also by a failed assertion, which must not leave them running.
pub(crate) struct Over<'a>(pub(crate) &'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Ends this process, the child of a fork, if it hangs; later than [`until`] gives up, whose message is the better one.
pub(crate) fn end_if_it_hangs() {
    // SAFETY: a plain system call.
    unsafe { libc::alarm(PATIENCE.as_secs() as u32 + 60) };
}

/// Other threads take and free pages all the time, and leave next to none. `request` is overtaken by them, claims what comes
/// back, and brings `n`; the others are served too, before and after.
pub(crate) fn is_served_beside_others(
    pages: usize,
    n: usize,
    request: impl Fn(&Allocator) -> Result<usize, Error> + Sync,
) {
    for allocator in &allocators(pages) {
        let (is_over, turns) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            let _over = Over(&is_over);
            for _ in 0..3 {
                scope.spawn(|| {
                    let mut mine: VecDeque<Page> = VecDeque::new();
                    while !is_over.load(Relaxed) {
                        // One for one, so that without a claim there are never more than a few free.
                        match allocator.alloc_page(Gfp::KERNEL) {
                            Ok(page) => mine.push_back(page),
                            Err(_) => drop(mine.pop_front()),
                        }
                        if mine.len() > pages / 3 - 4 {
                            mine.pop_front();
                            turns.fetch_add(1, Relaxed);
                        }
                    }
                });
            }
            until("others at work", || turns.load(Relaxed) > 20);
            let waiter = scope.spawn(|| request(allocator));
            until("its turn", || waiter.is_finished());
            assert_eq!(waiter.join().unwrap(), Ok(n));
            let before = turns.load(Relaxed);
            until("the others' turns", || turns.load(Relaxed) > before + 20);
        });
        assert_all_back(allocator);
    }
}
