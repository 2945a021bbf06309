//! Background reclaim: calls shrinkers until every zone is above its high mark.
//!
//! The background thread does it when a request wakes it or every 200 ms (`reclaim.rs`), or a program calls
//! [`Allocator::reclaim_step`]. No lock is held while shrinkers run.
use crate::allocator::Allocator;
use crate::build_error::BuildError;
use crate::reclaim::{Background, Numbered, PAGES_AT_ONCE, Shrinker};
use crate::registry;
use crate::shared::Lack;
use crate::sync::survive;
use crate::zone::Zone;
use crate::zones::Zones;
use core::ops::ControlFlow;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Gfp, Order, PageCount};
use pagemill_os::Errno;
use std::sync::Arc;
use std::time::Instant;

/// A registration of a shrinker. The shrinker is called until this is dropped.
#[derive(Debug)]
#[must_use = "the shrinker is called until this is dropped"]
pub struct Registered {
    allocator: Allocator,
    number: u64,
}

impl Drop for Registered {
    /// Does not wait for a call of the shrinker that is under way.
    fn drop(&mut self) {
        let reclaim = &self.allocator.zones().reclaim;
        let is_this = |(number, _): &Numbered| *number == self.number;
        let shrinker = reclaim.change(|shrinkers| Some(shrinkers.remove(shrinkers.iter().position(is_this)?)));
        drop(shrinker); // Not under the lock: this may be the last reference, and drop pages.
    }
}

impl Zones {
    /// Reclaims until every zone is above its high mark, or until a round does not increase the number of free pages.
    /// While tasks wait for memory there is one round at least, for what they lack: they call no shrinkers themselves.
    /// Returns the pages freed, as reported by the shrinkers.
    pub(crate) fn balance(&self) -> usize {
        self.end_idle_claim();
        // Retired zones count too: a round that freed only pages of theirs may be followed by one that helps.
        let free = || self.ever().iter().map(|zone| zone.buddy().free_frames()).sum::<usize>();
        let below_high = || self.in_use().map(Zone::below_high).max().unwrap_or(0);
        let (mut pages, mut missing) = (0_usize, below_high().max(self.lacked_by_tasks()));
        while missing > 0 {
            let before = free();
            self.reclaim.background_runs.fetch_add(1, Relaxed);
            pages = pages.saturating_add(self.reclaim.round(Gfp::KERNEL, missing.max(PAGES_AT_ONCE)));
            // Usually the freed pages went to the lists of this CPU.
            self.drain_all();
            if free() <= before {
                break;
            }
            missing = below_high();
        }
        pages
    }

    /// The number of pages that waiting tasks lack. Those that wait for single pages, of which there are enough, are
    /// only to be polled.
    fn lacked_by_tasks(&self) -> usize {
        self.waits.lacked_by_tasks(|lack, tasks| {
            let all = Lack { blocks: lack.blocks.saturating_mul(tasks), ..lack };
            let are_there = lack.order == Order::ZERO && self.is_hopeful(all);
            if are_there { 0 } else { all.blocks.saturating_mul(lack.order.frames() as usize) }
        })
    }
}

impl Allocator {
    /// Registers `shrinker`, which is called when memory is short, until the returned value is dropped.
    pub fn register_shrinker(&self, shrinker: Arc<dyn Shrinker>) -> Registered {
        let reclaim = &self.zones().reclaim;
        let number = reclaim.next_number.fetch_add(1, Relaxed);
        reclaim.change(|shrinkers| shrinkers.push((number, shrinker)));
        Registered { allocator: self.clone(), number }
    }

    /// Does what the background thread does when it is woken, for programs that prefer to call it themselves. It
    /// reclaims until every zone is above its high mark, or until no more pages are freed. Then it [gives
    /// back](Self::give_back_idle) memory that was free for long. Returns the pages that shrinkers freed.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Memory, Page, Shrink, Shrinker, Watermarks};
    /// use std::sync::{Arc, Mutex};
    /// struct Cache(Mutex<Vec<Page>>);
    /// impl Shrinker for Cache {
    ///     fn shrink(&self, wanted: Shrink) -> usize {
    ///         let Ok(mut pages) = self.0.try_lock() else { return 0 };
    ///         let rest = pages.len().saturating_sub(wanted.pages);
    ///         pages.drain(rest..).count()
    ///     }
    /// }
    /// let memory = Memory::anonymous(512).watermarks(Watermarks::above(40)); // low 50, high 60
    /// let allocator = Allocator::builder().memory(memory).build()?;
    /// assert_eq!(allocator.reclaim_step().get(), 0); // the zone is above its marks
    /// // Allocate down to the lowest mark.
    /// let pages: Vec<Page> = std::iter::from_fn(|| allocator.alloc_page(Gfp::NOWAIT).ok()).collect();
    /// assert_eq!(pages.len(), 512 - 40);
    /// let cache = Arc::new(Cache(Mutex::new(pages)));
    /// let registered = allocator.register_shrinker(cache.clone());
    /// // A program's own loop calls this now and then. It reclaims up to the high mark.
    /// assert!(allocator.reclaim_step().get() >= 20);
    /// allocator.drain();
    /// assert!(allocator.stats().free >= 60);
    /// # drop(registered);
    /// # cache.0.lock().unwrap().clear();
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn reclaim_step(&self) -> PageCount {
        let came = self.zones().balance();
        self.zones().give_back_idle(Instant::now());
        PageCount::new(came)
    }

    /// Starts the background thread, which reclaims when a zone falls below its low mark.
    pub(crate) fn start_reclaim(&self, held: &registry::Writing) -> Result<(), BuildError> {
        let allocator = self.weak();
        let start = move || {
            let allocator = allocator.clone();
            Background::start(move || {
                let Some(owner) = allocator.upgrade() else { return ControlFlow::Break(()) };
                // A shrinker's panic ends this round.
                survive(|| owner.zones().balance());
                owner.zones().give_back_idle(Instant::now());
                ControlFlow::Continue(())
            })
        };
        let refused = |errno: Errno| BuildError::NoThread { errno: errno.0 };
        self.zones().reclaim.run(held, Box::new(start)).map_err(refused)
    }
}
