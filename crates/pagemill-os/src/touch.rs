//! Committing much memory before its first use, on the CPUs of the node that it belongs to.
use crate::{Errno, Mapping, Thread};
use core::ops::ControlFlow;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering::Relaxed};
use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};

/// What a thread commits in one call, in bytes; a multiple of every kind's page.
const PIECE: usize = 64 << 20;

/// Commits all of each mapping, as [`Mapping::populate`] does: with one thread on each of the CPUs named beside it, all
/// mappings at once, in pieces of 64 MiB. With no CPUs named, and on a CPU that this process may not use, the thread runs
/// wherever it may; to which node the memory belongs is then for [`Mapping::bind`] to say.
///
/// `progress` is told how many bytes are committed in all, after each piece, each time more; by one thread at a time. When it
/// breaks, the others stop after their pieces. Returns the bytes that were committed.
///
/// # Errors
/// The first that [`Mapping::populate`] met: the others stop after their pieces, and what is committed stays so.
/// `EAGAIN` when no thread could be started for a mapping.
///
/// # Panics
/// When `progress` does.
///
/// ```
/// use pagemill_os::{Mapping, touch_parallel};
/// use std::ops::ControlFlow::Continue;
/// let map = Mapping::reserve(1 << 20, 4096).unwrap();
/// let mut done = 0;
/// let committed = touch_parallel(&[(&map, &[0])], &mut |bytes| Continue(done = bytes));
/// match committed {
///     Ok(bytes) => assert_eq!((bytes, done), (1 << 20, 1 << 20)),
///     Err(errno) => assert!(errno.is_unsupported(), "a system before Linux 5.14"),
/// }
/// ```
pub fn touch_parallel(parts: &[(&Mapping, &[usize])], progress: &mut Progress<'_>) -> Result<usize, Errno> {
    let total = Total { done: Mutex::new((0, progress)), errno: AtomicI32::new(0), is_over: AtomicBool::new(false) };
    let next: Vec<AtomicUsize> = parts.iter().map(|_| AtomicUsize::new(0)).collect();
    let mut threads = Vec::new();
    for (&(mapping, cpus), next) in parts.iter().zip(&next) {
        let anywhere = [usize::MAX];
        let cpus = if cpus.is_empty() { &anywhere } else { cpus };
        for (started, &cpu) in cpus.iter().take(mapping.bytes().div_ceil(PIECE)).enumerate() {
            let total = &total;
            let work = move || {
                pin(cpu);
                total.commit_pieces(mapping, next);
            };
            // SAFETY: all threads are joined below, and nothing between here and there panics.
            match unsafe { Thread::spawn_borrowing(c"pagemill-touch", work) } {
                Ok(thread) => threads.push(thread),
                Err(_) if started > 0 => break, // Those that did start do its work.
                Err(errno) => total.fail(errno),
            }
        }
    }
    // All of them end before a panic of one goes on.
    let ends: Vec<_> = threads.into_iter().map(Thread::join).collect();
    ends.into_iter().for_each(|end| end.unwrap_or_else(|panic| resume_unwind(panic)));
    match total.errno.into_inner() {
        0 => Ok(total.done.into_inner().unwrap_or_else(PoisonError::into_inner).0),
        errno => Err(Errno(errno)),
    }
}

/// Told how many bytes are committed; it may break.
type Progress<'p> = dyn FnMut(usize) -> ControlFlow<()> + Send + 'p;

/// What all threads have done together.
struct Total<'a> {
    /// Bytes committed, and who is told.
    done: Mutex<(usize, &'a mut Progress<'a>)>,
    /// The first error; zero while there is none.
    errno: AtomicI32,
    is_over: AtomicBool,
}

impl Total<'_> {
    /// Commits pieces of `mapping` until there are no more, `next` being where the next one begins.
    fn commit_pieces(&self, mapping: &Mapping, next: &AtomicUsize) {
        while !self.is_over.load(Relaxed) {
            let start = next.fetch_add(PIECE, Relaxed);
            if start >= mapping.bytes() {
                return;
            }
            let len = PIECE.min(mapping.bytes() - start);
            if let Err(errno) = mapping.populate(start, len) {
                return self.fail(errno);
            }
            // Poisoned: `progress` panicked, and the thread that met it ends all.
            let Ok(mut done) = self.done.lock() else { return };
            done.0 += len;
            let bytes = done.0;
            if (done.1)(bytes).is_break() {
                self.is_over.store(true, Relaxed);
            }
        }
    }

    fn fail(&self, errno: Errno) {
        // The first is kept; who joins the threads reads it, and joining orders that.
        let _ = self.errno.compare_exchange(0, errno.0, Relaxed, Relaxed);
        self.is_over.store(true, Relaxed);
    }
}

/// Keeps this thread on `cpu`, if the system lets it.
fn pin(cpu: usize) {
    let mut set = [0_u64; 1024];
    if cfg!(miri) || cpu >= set.len() * 64 {
        return;
    }
    set[cpu / 64] |= 1 << (cpu % 64);
    // SAFETY: a set of that size, which the call reads. That it may fail is said above.
    unsafe { libc::sched_setaffinity(0, size_of_val(&set), set.as_ptr().cast()) };
}
