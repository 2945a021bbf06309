//! Getting memory back: what shrinkers can give, asked directly by a request that found none, or in the background
//! while a zone is below its marks.
//!
//! Shrinkers are called without any lock of Pagemill's held; they may free, and may not allocate in a way that reclaims
//! again. Direct reclaim goes in rounds, whose number the request's flags bound; background reclaim is a thread that
//! the builder starts, or [`Allocator::reclaim_step`], which a program calls when it likes.
use crate::allocator::{Allocator, Inner};
use crate::fork;
use crate::nodes::Nodes;
use core::cell::Cell;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicU64};
use pagemill_core::{Gfp, PageCount};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// Something that can give pages back when memory is short: a cache.
///
/// ```
/// use pagemill::{Allocator, Bulk, Gfp, Page, Shrinker, Shrink};
/// use std::sync::{Arc, Mutex};
/// struct Cache(Mutex<Vec<Page>>);
/// impl Shrinker for Cache {
///     fn shrink(&self, wanted: Shrink) -> usize {
///         let mut pages = self.0.lock().unwrap();
///         let rest = pages.len().saturating_sub(wanted.pages);
///         pages.drain(rest..).count() // dropped, and so freed
///     }
/// }
/// let allocator = Allocator::builder().pages(64).build()?;
/// let mut pages = Vec::new();
/// allocator.alloc_pages_bulk_callback(Bulk::up_to(64), |page: Page| pages.push(page))?;
/// let cache = Arc::new(Cache(Mutex::new(pages)));
/// let registered = allocator.register_shrinker(cache.clone());
/// assert!(allocator.alloc_page(Gfp::NOWAIT).is_err());
/// let page = allocator.alloc_page(Gfp::KERNEL)?; // the cache gave way
/// # drop((page, registered));
/// # cache.0.lock().unwrap().clear();
/// # Ok::<(), pagemill::Error>(())
/// ```
pub trait Shrinker: Send + Sync {
    /// Frees about as many pages as are wanted, and says how many it freed. It may free others, and may allocate with
    /// flags that neither wait nor reclaim.
    fn shrink(&self, wanted: Shrink) -> usize;
    /// What it has to do for that. It is not called for requests whose flags exclude it.
    fn does(&self) -> ShrinkerDoes {
        ShrinkerDoes::Nothing
    }
}

/// What a shrinker has to do to give pages back.
///
/// ```
/// assert!(pagemill::ShrinkerDoes::Nothing != pagemill::ShrinkerDoes::Io);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ShrinkerDoes {
    /// Nothing but to let go of them.
    Nothing,
    /// I/O: not called for `NOIO`.
    Io,
    /// It enters a file system, which may do I/O: not called for `NOFS` and `NOIO`.
    Filesystem,
}

impl ShrinkerDoes {
    fn is_allowed(self, gfp: Gfp) -> bool {
        match self {
            Self::Nothing => true,
            Self::Io => gfp.may_io(),
            Self::Filesystem => gfp.may_io() && gfp.may_fs(),
        }
    }
}

/// What a shrinker is asked for.
///
/// ```
/// # struct None_; impl pagemill::Shrinker for None_ { fn shrink(&self, wanted: pagemill::Shrink) -> usize {
/// assert!(wanted.pages > 0);
/// # 0 } }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Shrink {
    /// Pages.
    pub pages: usize,
    /// The flags of the request that is short.
    pub gfp: Gfp,
}

/// A shrinker is called until this is dropped.
#[derive(Debug)]
#[must_use = "the shrinker is called until this is dropped"]
pub struct Registered {
    allocator: Allocator,
    number: u64,
}

impl Drop for Registered {
    /// Waits for nobody: a call that is under way ends on its own.
    fn drop(&mut self) {
        let reclaim = &self.allocator.nodes().reclaim;
        let mut shrinkers = reclaim.shrinkers.lock().unwrap_or_else(PoisonError::into_inner);
        let shrinker = shrinkers.iter().position(|(number, _)| *number == self.number).map(|at| shrinkers.remove(at));
        drop(shrinkers);
        drop(shrinker); // Perhaps the last of it, with pages: not under the lock.
    }
}

type Numbered = (u64, Arc<dyn Shrinker>);

/// An allocator's shrinkers, its reclaim thread, and what they did.
#[derive(Default)]
pub(crate) struct Reclaim {
    shrinkers: Mutex<Vec<Numbered>>,
    registered: AtomicU64,
    background: Mutex<Option<Background>>,
    /// Is there to be a thread?
    is_wanted: AtomicBool,
    pub(crate) direct_runs: AtomicU64,
    pub(crate) background_runs: AtomicU64,
    pub(crate) pages: AtomicU64,
}

impl core::fmt::Debug for Reclaim {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Reclaim").field("direct_runs", &self.direct_runs).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Background {
    thread: JoinHandle<()>,
    is_over: Arc<AtomicBool>,
    /// The fork in whose process it runs.
    generation: u64,
}

thread_local! {
    /// Is this thread inside a shrinker? Looked at by requests that may wait alone, never in a signal handler.
    static IS_RECLAIMING: Cell<bool> = const { Cell::new(false) };
}

/// Does this thread reclaim already? Then a request that would is refused.
pub(crate) fn is_reclaiming() -> bool {
    IS_RECLAIMING.get()
}

/// Asked for at least so many pages at once: a batch.
const PAGES_AT_ONCE: usize = 64;
/// The background thread looks this often by itself.
const LOOK: Duration = Duration::from_millis(200);

impl Reclaim {
    pub(crate) fn has_shrinkers(&self) -> bool {
        !self.shrinkers.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// One round: every shrinker that the flags allow, until `pages` came back. Returns how many did.
    fn round(&self, gfp: Gfp, pages: usize) -> usize {
        let shrinkers: Vec<Arc<dyn Shrinker>> = {
            let shrinkers = self.shrinkers.lock().unwrap_or_else(PoisonError::into_inner);
            shrinkers.iter().map(|(_, shrinker)| shrinker.clone()).collect()
        };
        struct Over(bool);
        impl Drop for Over {
            fn drop(&mut self) {
                IS_RECLAIMING.set(self.0);
            }
        }
        let _over = Over(IS_RECLAIMING.replace(true));
        let mut got = 0;
        for shrinker in shrinkers.iter().filter(|shrinker| shrinker.does().is_allowed(gfp)) {
            got += shrinker.shrink(Shrink { pages: pages - got, gfp });
            if got >= pages {
                break;
            }
        }
        self.pages.fetch_add(got as u64, Relaxed);
        got
    }

    /// A round for a request that found nothing.
    pub(crate) fn direct(&self, gfp: Gfp, pages: usize) -> usize {
        self.direct_runs.fetch_add(1, Relaxed);
        self.round(gfp, pages.max(PAGES_AT_ONCE))
    }

    /// Has the background thread look, if there is to be one; starts it again in the child of a fork.
    pub(crate) fn wake(&self, allocator: impl FnOnce() -> Option<WeakAllocator>) {
        // Acquire pairs with the Release in `start`.
        if !self.is_wanted.load(Acquire) {
            return;
        }
        // A signal handler may have interrupted the holder: then that one looks anyway.
        let Ok(mut background) = self.background.try_lock() else { return };
        match &*background {
            Some(running) if running.generation == fork::generation() => running.thread.thread().unpark(),
            Some(_) | None => {
                if let Some(allocator) = allocator() {
                    *background = start(allocator);
                }
            }
        }
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) {
        self.is_wanted.store(false, Release);
        let background = self.background.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(running) = background.filter(|running| running.generation == fork::generation()) {
            running.is_over.store(true, Release);
            running.thread.thread().unpark();
            if running.thread.thread().id() != std::thread::current().id() {
                let _ = running.thread.join(); // A shrinker that panicked has said so.
            }
        }
    }
}

/// What the thread holds: not what keeps the allocator open.
pub(crate) type WeakAllocator = Weak<crate::allocator::Owner>;

fn start(allocator: WeakAllocator) -> Option<Background> {
    let is_over = Arc::new(AtomicBool::new(false));
    let over = is_over.clone();
    let thread = std::thread::Builder::new().name("pagemill-reclaim".into()).spawn(move || {
        while !over.load(Acquire) {
            match allocator.upgrade() {
                Some(owner) => owner.nodes().balance(),
                None => return,
            };
            std::thread::park_timeout(LOOK);
        }
    });
    Some(Background { thread: thread.ok()?, is_over, generation: fork::generation() })
}

impl Nodes {
    /// Reclaims until every arena is above its high mark, or nothing more comes. Returns the pages that came.
    pub(crate) fn balance(&self) -> usize {
        let mut pages = 0;
        while let Some(missing) = self.all().iter().map(|arena| arena.below_high()).max().filter(|&missing| missing > 0)
        {
            self.reclaim.background_runs.fetch_add(1, Relaxed);
            let got = self.reclaim.round(Gfp::KERNEL, missing.max(PAGES_AT_ONCE));
            if got == 0 {
                break;
            }
            // They went to the lists of this CPU, as a rule.
            self.all().iter().for_each(|arena| _ = arena.drain_all());
            pages += got;
        }
        pages
    }
}

impl Inner {
    /// How many frames are missing to the high mark.
    fn below_high(&self) -> usize {
        (self.marks.high as usize).saturating_sub(self.zone.free_frames())
    }
}

impl Allocator {
    /// Has `shrinker` called when memory is short, until what this returns is dropped.
    pub fn register_shrinker(&self, shrinker: Arc<dyn Shrinker>) -> Registered {
        let reclaim = &self.nodes().reclaim;
        let number = reclaim.registered.fetch_add(1, Relaxed);
        reclaim.shrinkers.lock().unwrap_or_else(PoisonError::into_inner).push((number, shrinker));
        Registered { allocator: self.clone(), number }
    }

    /// What the background thread does when it is woken, for programs that would rather do it themselves: reclaims
    /// until every zone is above its high mark, or nothing more comes. Returns the pages that came.
    ///
    /// ```
    /// let allocator = pagemill::Allocator::builder().pages(64).build()?;
    /// assert_eq!(allocator.reclaim_step().get(), 0); // above its marks
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn reclaim_step(&self) -> PageCount {
        PageCount::new(self.nodes().balance())
    }

    /// Starts the background thread, which looks when a zone falls below its low mark.
    pub(crate) fn start_reclaim(&self) {
        let reclaim = &self.nodes().reclaim;
        // Release pairs with the Acquire in `wake`; AcqRel in the swap keeps it to one thread.
        if !reclaim.is_wanted.swap(true, AcqRel) {
            *reclaim.background.lock().unwrap_or_else(PoisonError::into_inner) = start(self.weak());
        }
    }
}
