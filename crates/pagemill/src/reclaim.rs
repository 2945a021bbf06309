//! Reclaim: shrinkers free pages, for a request that found none or in the background while a zone is below its watermarks.
//!
//! Direct reclaim stands between a failed walk over the zones and waiting in line (`slow.rs`). It runs in rounds, and
//! the request's flags bound their number. Background reclaim is a thread that the builder starts, or
//! [`Allocator::reclaim_step`](crate::Allocator::reclaim_step), which a program calls when it likes.
//!
//! # Invariants and locks
//! Shrinkers are called without any lock of Pagemill's held. They may free; they may not allocate with flags that
//! reclaim. The mutexes here are locked only while the registry is held, so no fork finds them locked, and a forked
//! child can use them.
use crate::process::Stamp;
use crate::registry;
use crate::sync::thread_local;
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

/// Something that can free pages when memory is short: a cache, for example.
///
/// A shrinker is called in the middle of an allocation, on any thread, and in a forked child too. A lock that the
/// calling thread may hold, or that another thread may have held at the fork, should be tried and not waited for, as in
/// this example:
///
/// ```
/// use pagemill::{Allocator, Bulk, Gfp, Page, Shrinker, Shrink};
/// use std::sync::{Arc, Mutex};
/// struct Cache(Mutex<Vec<Page>>);
/// impl Shrinker for Cache {
///     fn shrink(&self, wanted: Shrink) -> usize {
///         let Ok(mut pages) = self.0.try_lock() else { return 0 };
///         let rest = pages.len().saturating_sub(wanted.pages);
///         pages.drain(rest..).count() // dropping frees them
///     }
/// }
/// let allocator = Allocator::builder().pages(64).build()?;
/// let mut pages = Vec::new();
/// allocator.alloc_pages_bulk_callback(Bulk::up_to(64), |page: Page| pages.push(page))?;
/// let cache = Arc::new(Cache(Mutex::new(pages)));
/// let registered = allocator.register_shrinker(cache.clone());
/// assert!(allocator.alloc_page(Gfp::NOWAIT).is_err());
/// let page = allocator.alloc_page(Gfp::KERNEL)?; // the cache freed one
/// # drop((page, registered));
/// # cache.0.lock().unwrap().clear();
/// # Ok::<(), pagemill::Error>(())
/// ```
pub trait Shrinker: Send + Sync {
    /// Frees about as many pages as are wanted, and returns how many it freed. It may free more, and may allocate with
    /// flags that neither wait nor reclaim.
    ///
    /// It is called on the thread whose request found no memory, in the middle of that request, or on the reclaim
    /// thread. So no thread may hold a lock that the shrinker waits for while it allocates with flags that reclaim. Use
    /// `try_lock`, or allocate without the lock.
    ///
    /// The returned number is trusted for little: it enters the statistics, it ends a round once enough pages came
    /// back, and a round that reports 0 is a request's last. Otherwise the request tries again after each round, a
    /// bounded number of times. A panic unwinds through the request that reclaims; on the background thread it is
    /// reported, and the shrinker is called again in the next round.
    fn shrink(&self, wanted: Shrink) -> usize;
    /// The kind of work that it does to free pages. It is not called for requests whose flags exclude that work.
    fn does(&self) -> ShrinkerDoes {
        ShrinkerDoes::Nothing
    }
}

/// The work that a shrinker does to free pages.
///
/// ```
/// use pagemill::{Shrink, Shrinker, ShrinkerDoes};
/// struct DirtyPages;
/// impl Shrinker for DirtyPages {
///     fn shrink(&self, wanted: Shrink) -> usize {
///         # let written_back = |_: usize| 0;
///         written_back(wanted.pages) // to a block device
///     }
///     // The code that does this I/O allocates with NOIO, so it never calls this shrinker.
///     fn does(&self) -> ShrinkerDoes {
///         ShrinkerDoes::Io
///     }
/// }
/// assert_eq!(DirtyPages.does(), ShrinkerDoes::Io);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ShrinkerDoes {
    /// It only frees pages.
    Nothing,
    /// It does I/O: not called for `NOIO`.
    Io,
    /// It calls into a file system, which may do I/O: not called for `NOFS` and `NOIO`.
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

/// What a shrinker is asked to free.
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
    /// The number of pages wanted.
    pub pages: usize,
    /// The flags of the request that found no memory.
    pub gfp: Gfp,
}

pub(crate) type Numbered = (u64, Arc<dyn Shrinker>);

/// Starts an allocator's reclaim thread.
type Start = dyn Fn() -> Result<Background, Errno> + Send + Sync;

/// An allocator's shrinkers, its reclaim thread, and statistics of both.
#[derive(Default)]
pub(crate) struct Reclaim {
    shrinkers: Mutex<Vec<Numbered>>,
    /// The number of shrinkers.
    registered: AtomicUsize,
    pub(crate) next_number: AtomicU64,
    background: Mutex<Option<Background>>,
    /// Starts the thread. Set once the allocator is to have one.
    start: OnceLock<Box<Start>>,
    /// Whether there is to be a thread.
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
    /// Must not be joined, detached or dropped in a forked child, where this thread does not exist.
    thread: ManuallyDrop<Thread<()>>,
    shared: Arc<BackgroundState>,
    /// The process that the thread runs in.
    stamp: Stamp,
}

/// What the thread shares with the code that wakes and stops it.
#[derive(Default, Debug)]
struct BackgroundState {
    is_over: AtomicBool,
    /// The thread, which sleeps between checks; unset until its first check begins.
    sleeper: OnceLock<Sleeper>,
}

impl BackgroundState {
    /// Makes the thread check now. A signal handler may call this.
    fn wake(&self) {
        self.sleeper.get().map(Sleeper::unpark);
    }
}

thread_local! {
    /// Whether this thread is inside a shrinker. Only requests that may wait read it, and those never run in a signal
    /// handler.
    static IS_RECLAIMING: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is reclaiming. A request of this thread whose flags reclaim is refused then.
pub(crate) fn is_reclaiming() -> bool {
    IS_RECLAIMING.with(Cell::get)
}

/// Shrinkers are asked for at least this many pages at once: a batch.
pub(crate) const PAGES_AT_ONCE: usize = 64;
/// The interval between the background thread's own checks.
const LOOK: Duration = Duration::from_millis(200);

impl Reclaim {
    pub(crate) fn has_shrinkers(&self) -> bool {
        self.registered.load(Relaxed) > 0
    }

    /// Adds or removes a shrinker.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut Vec<Numbered>) -> T) -> T {
        let held = registry::lock();
        let mut shrinkers = locked(&self.shrinkers, &held);
        let changed = change(&mut shrinkers);
        self.registered.store(shrinkers.len(), Relaxed);
        changed
    }

    /// One round: calls every shrinker that the flags allow, until `pages` pages were freed. Returns how many were.
    pub(crate) fn round(&self, gfp: Gfp, pages: usize) -> usize {
        let shrinkers: Vec<Arc<dyn Shrinker>> = {
            let held = registry::lock();
            locked(&self.shrinkers, &held).iter().map(|(_, shrinker)| shrinker.clone()).collect()
        };
        struct Over(bool);
        impl Drop for Over {
            fn drop(&mut self) {
                IS_RECLAIMING.with(|is_reclaiming| is_reclaiming.set(self.0));
            }
        }
        let _over = Over(IS_RECLAIMING.with(|is_reclaiming| is_reclaiming.replace(true)));
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

    /// A round for a request that found no memory.
    pub(crate) fn direct(&self, gfp: Gfp, pages: usize) -> usize {
        self.direct_runs.fetch_add(1, Relaxed);
        self.round(gfp, pages.max(PAGES_AT_ONCE))
    }

    /// Starts the background thread by `start`. A forked child starts its own by `start` again.
    ///
    /// # Errors
    /// The system refused to start a thread.
    pub(crate) fn run(&self, held: &registry::Writing, start: Box<Start>) -> Result<(), Errno> {
        *locked(&self.background, held) = Some(start()?);
        _ = self.start.set(start);
        // Release pairs with the Acquire in `wake`.
        self.is_wanted.store(true, Release);
        Ok(())
    }

    /// Makes the background thread check, if there is to be one. In a forked child, a request that may wait starts the
    /// thread again; other requests do not, since they may run in a signal handler.
    pub(crate) fn wake(&self, may_start: bool) {
        // Acquire pairs with the Release in `run`.
        if !self.is_wanted.load(Acquire) {
            return;
        }
        // If another thread holds the registry, the next request wakes the background thread, or it checks by itself.
        let Some(held) = registry::try_lock() else { return };
        let mut background = locked(&self.background, &held);
        match (&*background, self.start.get()) {
            (Some(running), _) if !running.stamp.is_inherited() => running.shared.wake(),
            // If the system refuses now, the next request tries again.
            (_, Some(start)) if may_start => *background = start().ok(),
            _ => {}
        }
    }

    /// Stops the thread.
    pub(crate) fn stop(&self) {
        self.is_wanted.store(false, Release);
        let background = locked(&self.background, &registry::lock()).take();
        if let Some(running) = background.filter(|running| !running.stamp.is_inherited()) {
            running.shared.is_over.store(true, Relaxed);
            // SeqCst pairs with the fence in `Background::start`: either the thread sees `is_over`, or `wake` sees the
            // thread.
            fence(SeqCst);
            running.shared.wake();
            let thread = ManuallyDrop::into_inner(running.thread);
            // The reclaim thread itself may have dropped the last handle, between two checks. It then ends by itself.
            if !thread.is_current() {
                let _ = thread.join();
            }
        }
    }
}

impl Background {
    /// Starts a thread that runs `look` when it is woken and every [`LOOK`], until it is stopped or `look` returns
    /// `Break`.
    pub(crate) fn start(mut look: impl FnMut() -> ControlFlow<()> + Send + 'static) -> Result<Self, Errno> {
        let shared = Arc::new(BackgroundState::default());
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
