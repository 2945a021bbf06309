//! Getting memory back: what shrinkers can give, asked directly by a request that found none, or in the background
//! while a zone is below its marks.
//!
//! Shrinkers are called without any lock of Pagemill's held; they may free, and may not allocate in a way that reclaims
//! again. Direct reclaim goes in rounds, whose number the request's flags bound; background reclaim is a thread that
//! the builder starts, or [`Allocator::reclaim_step`](crate::Allocator::reclaim_step), which a program calls when it likes.
//!
//! What is locked here is locked by whoever holds the registry alone: so no fork meets it locked, and the child goes on
//! with it.
use crate::process::Stamp;
use crate::registry;
use core::cell::Cell;
use core::mem::ManuallyDrop;
use core::ops::ControlFlow;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, fence};
use pagemill_core::Gfp;
use pagemill_os::{Errno, Thread};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread as Sleeper;
use std::time::Duration;

/// Something that can give pages back when memory is short: a cache.
///
/// It is asked in the middle of an allocation, by any thread, and in a forked child too: a lock that the asking thread
/// may hold, or that another thread held at the fork, is to be tried and not waited for, as here.
///
/// ```
/// use pagemill::{Allocator, Bulk, Gfp, Page, Shrinker, Shrink};
/// use std::sync::{Arc, Mutex};
/// struct Cache(Mutex<Vec<Page>>);
/// impl Shrinker for Cache {
///     fn shrink(&self, wanted: Shrink) -> usize {
///         let Ok(mut pages) = self.0.try_lock() else { return 0 };
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
    ///
    /// It is called on the thread whose request is short, in the middle of that request, or on the reclaim thread: a lock
    /// that it takes must not be held by whoever asks for pages with flags that reclaim. Use `try_lock`, or ask without the lock.
    ///
    /// What it says is believed for statistics alone: a request asks again, a bounded number of times, until it is served.
    /// If it panics, that unwinds through the request that reclaims; the background thread lets it be reported, and asks
    /// again at its next round.
    fn shrink(&self, wanted: Shrink) -> usize;
    /// What it has to do for that. It is not called for requests whose flags exclude it.
    fn does(&self) -> ShrinkerDoes {
        ShrinkerDoes::Nothing
    }
}

/// What a shrinker has to do to give pages back.
///
/// ```
/// use pagemill::{Shrink, Shrinker, ShrinkerDoes};
/// struct DirtyPages;
/// impl Shrinker for DirtyPages {
///     fn shrink(&self, wanted: Shrink) -> usize {
///         # let written_back = |_: usize| 0;
///         written_back(wanted.pages) // to a block device
///     }
///     // Whoever does that I/O asks for memory with NOIO: it is not to come back here.
///     fn does(&self) -> ShrinkerDoes {
///         ShrinkerDoes::Io
///     }
/// }
/// assert_eq!(DirtyPages.does(), ShrinkerDoes::Io);
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
/// use pagemill::{Allocator, Gfp, Shrink, Shrinker};
/// use std::sync::{Arc, Mutex};
/// struct Witness(Mutex<Vec<Shrink>>);
/// impl Shrinker for Witness {
///     fn shrink(&self, wanted: Shrink) -> usize {
///         self.0.lock().unwrap().push(wanted);
///         0
///     }
/// }
/// let allocator = Allocator::builder().pages(16).build()?;
/// let _page = allocator.alloc_page(Gfp::KERNEL)?;
/// let witness = Arc::new(Witness(Mutex::default()));
/// let registered = allocator.register_shrinker(witness.clone());
/// let order = pagemill::Order::new(4)?; // 16 pages: one more than are free
/// assert!(allocator.alloc_pages(Gfp::NOIO | Gfp::NORETRY, order).is_err());
/// let asked = witness.0.lock().unwrap()[0];
/// assert!(asked.pages >= 16 && !asked.gfp.may_io());
/// # drop(registered);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Shrink {
    /// Pages.
    pub pages: usize,
    /// The flags of the request that is short.
    pub gfp: Gfp,
}

pub(crate) type Numbered = (u64, Arc<dyn Shrinker>);

/// Starts an allocator's reclaim thread.
type Start = dyn Fn() -> Result<Background, Errno> + Send + Sync;

/// An allocator's shrinkers, its reclaim thread, and what they did.
#[derive(Default)]
pub(crate) struct Reclaim {
    shrinkers: Mutex<Vec<Numbered>>,
    /// How many those are.
    registered: AtomicUsize,
    pub(crate) next_number: AtomicU64,
    background: Mutex<Option<Background>>,
    /// How the thread is started, once there is to be one.
    start: OnceLock<Box<Start>>,
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
pub(crate) struct Background {
    /// Not to be joined, detached or dropped in the child of a fork, where there is no such thread.
    thread: ManuallyDrop<Thread<()>>,
    shared: Arc<Shared>,
    /// The process that it runs in.
    stamp: Stamp,
}

/// What the thread shares with those that wake and end it.
#[derive(Default, Debug)]
struct Shared {
    is_over: AtomicBool,
    /// The thread, which sleeps between two looks; none until it begins with its first one.
    sleeper: OnceLock<Sleeper>,
}

impl Shared {
    /// Has it look now. A signal handler may call this.
    fn wake(&self) {
        self.sleeper.get().map(Sleeper::unpark);
    }
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
pub(crate) const PAGES_AT_ONCE: usize = 64;
/// The background thread looks this often by itself.
const LOOK: Duration = Duration::from_millis(200);

impl Reclaim {
    pub(crate) fn has_shrinkers(&self) -> bool {
        self.registered.load(Relaxed) > 0
    }

    /// Adds or removes one.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut Vec<Numbered>) -> T) -> T {
        let held = registry::lock();
        let mut shrinkers = locked(&self.shrinkers, &held);
        let changed = change(&mut shrinkers);
        self.registered.store(shrinkers.len(), Relaxed);
        changed
    }

    /// One round: every shrinker that the flags allow, until `pages` came back. Returns how many did.
    pub(crate) fn round(&self, gfp: Gfp, pages: usize) -> usize {
        let shrinkers: Vec<Arc<dyn Shrinker>> = {
            let held = registry::lock();
            locked(&self.shrinkers, &held).iter().map(|(_, shrinker)| shrinker.clone()).collect()
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
            got = shrinker.shrink(Shrink { pages: pages - got, gfp }).saturating_add(got);
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

    /// From now on there is a thread, which `start` starts, in the child of a fork too.
    ///
    /// # Errors
    /// The system starts none.
    pub(crate) fn run(&self, held: &registry::Writing, start: Box<Start>) -> Result<(), Errno> {
        *locked(&self.background, held) = Some(start()?);
        _ = self.start.set(start);
        // Release pairs with the Acquire in `wake`.
        self.is_wanted.store(true, Release);
        Ok(())
    }

    /// Has the background thread look, if there is to be one. In the child of a fork a request that may wait starts it again;
    /// others start nothing: they may be signal handlers.
    pub(crate) fn wake(&self, may_start: bool) {
        // Acquire pairs with the Release in `run`.
        if !self.is_wanted.load(Acquire) {
            return;
        }
        // Held by others, the thread is woken by the next request, or looks by itself.
        let Some(held) = registry::try_lock() else { return };
        let mut background = locked(&self.background, &held);
        match (&*background, self.start.get()) {
            (Some(running), _) if !running.stamp.is_inherited() => running.shared.wake(),
            // If the system starts none now, the next request tries again.
            (_, Some(start)) if may_start => *background = start().ok(),
            _ => {}
        }
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) {
        self.is_wanted.store(false, Release);
        let background = locked(&self.background, &registry::lock()).take();
        if let Some(running) = background.filter(|running| !running.stamp.is_inherited()) {
            running.shared.is_over.store(true, Relaxed);
            // SeqCst pairs with the fence in `Background::start`: the thread sees that it is over, or `wake` finds it.
            fence(SeqCst);
            running.shared.wake();
            let thread = ManuallyDrop::into_inner(running.thread);
            // The last owner may be the thread itself, between two looks: it ends by itself then.
            if !thread.is_current() {
                let _ = thread.join();
            }
        }
    }
}

impl Background {
    /// Starts a thread that looks when it is woken, and by itself now and then, until it is ended or `look` breaks.
    pub(crate) fn start(mut look: impl FnMut() -> ControlFlow<()> + Send + 'static) -> Result<Self, Errno> {
        let shared = Arc::new(Shared::default());
        let of_thread = shared.clone();
        let thread = Thread::spawn(c"pagemill-reclaim", move || {
            _ = of_thread.sleeper.set(std::thread::current());
            // SeqCst pairs with the fence in `stop`.
            fence(SeqCst);
            while !of_thread.is_over.load(Relaxed) && look().is_continue() {
                std::thread::park_timeout(LOOK);
            }
        })?;
        Ok(Self { thread: ManuallyDrop::new(thread), shared, stamp: Stamp::here() })
    }
}

fn locked<'m, T>(lock: &'m Mutex<T>, _held: &'m registry::Writing) -> MutexGuard<'m, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}
