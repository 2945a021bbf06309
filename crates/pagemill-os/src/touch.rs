//! Commits large memory before its first use, by threads on the CPUs of its node.
use crate::{Errno, Mapping, Thread};
use core::ops::ControlFlow;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering::Relaxed};
use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};

/// Bytes that a thread commits in one call; a multiple of every kind's page size.
const PIECE: usize = 64 << 20;

/// Commits all of each mapping, as [`Mapping::populate`] does, in pieces of 64 MiB: all mappings at once, with one thread on
/// each of the CPUs given for a mapping. If no CPUs are given, or this process may not use one, the thread runs anywhere; then
/// [`Mapping::bind`] alone decides on which node the memory lies.
///
/// Calls `progress` after each piece with the number of bytes committed so far, from one thread at a time. When it breaks, the
/// threads stop after their current pieces. Returns the bytes that were committed.
///
/// # Errors
/// The first error of [`Mapping::populate`]: the other threads stop after their current pieces, and committed memory stays
/// committed. `EAGAIN` when no thread could be started for a mapping.
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
            // SAFETY: all threads are joined below, and nothing before that panics.
            match unsafe { Thread::spawn_borrowing(c"pagemill-touch", work) } {
                Ok(thread) => threads.push(thread),
                Err(_) if started > 0 => break, // The threads that did start do its work.
                Err(errno) => total.fail(errno),
            }
        }
    }
    // All threads are joined before a panic is resumed.
    let ends: Vec<_> = threads.into_iter().map(Thread::join).collect();
    ends.into_iter().for_each(|end| end.unwrap_or_else(|panic| resume_unwind(panic)));
    match total.errno.into_inner() {
        0 => Ok(total.done.into_inner().unwrap_or_else(PoisonError::into_inner).0),
        errno => Err(Errno(errno)),
    }
}

/// Called with the number of bytes committed so far; may break.
type Progress<'p> = dyn FnMut(usize) -> ControlFlow<()> + Send + 'p;

/// The state that all threads share.
struct Total<'a> {
    /// Bytes committed, and the function to report them to.
    done: Mutex<(usize, &'a mut Progress<'a>)>,
    /// The first error; 0 if there is none.
    errno: AtomicI32,
    is_over: AtomicBool,
}

impl Total<'_> {
    /// Commits pieces of `mapping` until none is left. `next` is the offset of the next piece.
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
            // Poisoned: `progress` panicked in another thread, whose panic ends the whole call.
            let Ok(mut done) = self.done.lock() else { return };
            done.0 += len;
            let bytes = done.0;
            if (done.1)(bytes).is_break() {
                self.is_over.store(true, Relaxed);
            }
        }
    }

    fn fail(&self, errno: Errno) {
        // Keeps the first error. The thread that joins the others reads it; joining orders the accesses.
        let _ = self.errno.compare_exchange(0, errno.0, Relaxed, Relaxed);
        self.is_over.store(true, Relaxed);
    }
}

/// Pins this thread to `cpu` if the system allows it.
fn pin(cpu: usize) {
    let mut set = [0_u64; 1024];
    if cfg!(miri) || cpu >= set.len() * 64 {
        return;
    }
    set[cpu / 64] |= 1 << (cpu % 64);
    // SAFETY: the call reads a set of that size. It may fail, as said above.
    unsafe { libc::sched_setaffinity(0, size_of_val(&set), set.as_ptr().cast()) };
}
