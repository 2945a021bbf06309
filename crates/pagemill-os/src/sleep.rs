//! Sleeping until another thread of this process changes a word (futex(2)).
//!
//! `wake` and `wake_all` neither wait nor set errno, so that a signal handler may let go of what others wait for.
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::atomic::AtomicU32;
use pagemill_core::{Lock, Sleep};

pub(crate) use system::{wait, wake_all};

/// How threads of this process sleep on a [`Lock`].
///
/// ```
/// let lock = pagemill_core::Lock::new();
/// std::thread::scope(|scope| {
///     lock.take(pagemill_os::SLEEP);
///     let other = scope.spawn(|| lock.take(pagemill_os::SLEEP));
///     lock.release(pagemill_os::SLEEP);
///     other.join().unwrap();
/// });
/// assert!(!lock.try_take());
/// ```
pub const SLEEP: Sleep = Sleep { wait: system::wait, wake: system::wake };

/// A lock for what a fork copies: the fork takes it too, and lets go of it in both processes.
///
/// Threads may overtake one another, which keeps the processor busy. A fork is overtaken by each of them once at most: a
/// thread that comes while a fork waits sleeps until one fork has got the lock. It does not wait until no fork waits, or threads
/// that fork again and again would keep it out.
///
/// ```
/// let lock = pagemill_os::ForkLock::new();
/// lock.take_for_fork();
/// assert!(!lock.try_take());
/// lock.release();
/// lock.take();
/// ```
#[derive(Debug)]
pub struct ForkLock {
    lock: Lock,
    /// Forks that wait.
    forks: AtomicU32,
}

impl ForkLock {
    /// A free one.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self { lock: Lock::new(), forks: AtomicU32::new(0) }
    }
    /// A free one.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self { lock: Lock::new(), forks: AtomicU32::new(0) }
    }

    /// Takes it when its turn comes.
    #[inline]
    pub fn take(&self) {
        // Relaxed: if a fork comes at the same moment, either may be first.
        let forks = self.forks.load(Relaxed);
        if forks != 0 {
            // Once, whatever ends it: this thread does not wait for later forks.
            wait(&self.forks, forks);
        }
        self.lock.take(SLEEP);
    }

    /// Takes it if nobody holds it. Never waits: a signal handler may do so.
    #[inline]
    pub fn try_take(&self) -> bool {
        self.lock.try_take()
    }

    /// Takes it for a fork. It is let go of by [`release`](Self::release) in the parent, and by
    /// [`free_after_fork`](Self::free_after_fork) in the child.
    pub fn take_for_fork(&self) {
        self.forks.fetch_add(1, Relaxed);
        self.lock.take(SLEEP);
        self.forks.fetch_sub(1, Relaxed);
        // Threads that waited for this fork's turn go for the lock now. Without asking whether there are any: a fork takes a
        // thousand times as long.
        wake_all(&self.forks);
    }

    /// Lets go of it. Never waits.
    #[inline]
    pub fn release(&self) {
        self.lock.release(SLEEP);
    }

    /// In the child of a fork: nobody holds it or waits for it.
    pub fn free_after_fork(&self) {
        self.forks.store(0, Relaxed);
        self.lock.free_after_fork();
    }

    /// Does a fork wait, for models?
    #[cfg(loom)]
    pub fn is_awaited_by_fork(&self) -> bool {
        self.forks.fetch_or(0, Relaxed) != 0
    }
}

impl Default for ForkLock {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(not(loom))]
mod system {
    use pagemill_core::atomic::AtomicU32;
    use rustix::thread::futex;

    /// Sleeps if `word` is `seen`, until woken. May return at any time: callers look again.
    pub(crate) fn wait(word: &AtomicU32, seen: u32) {
        let _ = futex::wait(word, futex::Flags::PRIVATE, seen, None);
    }

    pub(crate) fn wake(word: &AtomicU32) {
        wake_some(word, 1);
    }

    pub(crate) fn wake_all(word: &AtomicU32) {
        wake_some(word, i32::MAX);
    }

    /// The word may be gone by then: its address is looked for among those who sleep, and nothing is read there. A thread
    /// that sleeps on another word at that address is woken in vain.
    fn wake_some(word: *const AtomicU32, most: i32) {
        // SAFETY: the kernel does not touch what the address leads to.
        unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, most) };
    }
}

/// The same for loom: who sleeps on which word, in the order in which they came. What is not woken sleeps for ever, and loom
/// reports that as a deadlock.
#[cfg(loom)]
mod system {
    use core::sync::atomic::Ordering::Relaxed;
    use loom::sync::{Condvar, Mutex};
    use pagemill_core::atomic::AtomicU32;
    use std::vec::Vec;

    #[derive(Default)]
    struct Asleep {
        words: Vec<(usize, u64)>,
        came: u64,
    }

    loom::lazy_static! {
        static ref ASLEEP: (Mutex<Asleep>, Condvar) = (Mutex::new(Asleep::default()), Condvar::new());
    }

    pub(crate) fn wait(word: &AtomicU32, seen: u32) {
        let (asleep, changed) = &*ASLEEP;
        let mut held = asleep.lock().unwrap();
        if word.load(Relaxed) != seen {
            return;
        }
        held.came += 1;
        let me = (core::ptr::from_ref(word).addr(), held.came);
        held.words.push(me);
        while held.words.contains(&me) {
            held = changed.wait(held).unwrap();
        }
    }

    pub(crate) fn wake(word: &AtomicU32) {
        wake_some(word, 1);
    }

    pub(crate) fn wake_all(word: &AtomicU32) {
        wake_some(word, usize::MAX);
    }

    fn wake_some(word: *const AtomicU32, most: usize) {
        let (asleep, changed) = &*ASLEEP;
        let mut held = asleep.lock().unwrap();
        let mut left = most;
        held.words.retain(|(addr, _)| {
            let stays = *addr != word.addr() || left == 0;
            left -= usize::from(!stays);
            stays
        });
        changed.notify_all();
    }
}
