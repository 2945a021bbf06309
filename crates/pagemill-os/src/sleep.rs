//! Sleeping until another thread of this process changes a word (futex(2)).
//!
//! `wake` and `wake_all` neither wait nor set errno, so a signal handler may release a lock that others wait for.
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

/// A lock for data that a fork copies: the fork takes it too, and releases it in both processes.
///
/// Threads may overtake one another, which keeps the processor busy. Each thread overtakes a waiting fork once at most: a
/// thread that arrives while a fork waits sleeps until one fork has taken the lock. It does not wait for later forks, so
/// threads that fork in a loop cannot keep it out.
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
    /// How many forks wait.
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

    /// Takes it; sleeps while it is held or a fork waits for it.
    #[inline]
    pub fn take(&self) {
        // Relaxed: if a fork arrives at the same moment, either may go first.
        let forks = self.forks.load(Relaxed);
        if forks != 0 {
            // One sleep only, however it ends: this thread does not wait for later forks.
            wait(&self.forks, forks);
        }
        self.lock.take(SLEEP);
    }

    /// Takes it if it is free. Never waits, so a signal handler may call it.
    #[inline]
    pub fn try_take(&self) -> bool {
        self.lock.try_take()
    }

    /// Takes it for a fork. [`release`](Self::release) releases it in the parent, [`free_after_fork`](Self::free_after_fork) in
    /// the child.
    pub fn take_for_fork(&self) {
        self.forks.fetch_add(1, Relaxed);
        self.lock.take(SLEEP);
        self.forks.fetch_sub(1, Relaxed);
        // Threads that let this fork go first now try to take the lock. It is not checked whether there are any: a fork takes a
        // thousand times as long.
        wake_all(&self.forks);
    }

    /// Releases it. Never waits.
    #[inline]
    pub fn release(&self) {
        self.lock.release(SLEEP);
    }

    /// To be called in the child of a fork: no thread of it holds the lock or waits for it.
    pub fn free_after_fork(&self) {
        self.forks.store(0, Relaxed);
        self.lock.free_after_fork();
    }

    /// Whether a fork waits. For models.
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

    /// If `word` still equals `seen`, sleeps until woken. May return at any time: callers check the word again.
    pub(crate) fn wait(word: &AtomicU32, seen: u32) {
        let _ = futex::wait(word, futex::Flags::PRIVATE, seen, None);
    }

    pub(crate) fn wake(word: &AtomicU32) {
        wake_some(word, 1);
    }

    pub(crate) fn wake_all(word: &AtomicU32) {
        wake_some(word, i32::MAX);
    }

    /// The word may be freed by now: the kernel only compares its address with those that threads sleep on, and reads nothing
    /// there. A thread that sleeps on a new word at that address wakes spuriously.
    fn wake_some(word: *const AtomicU32, most: i32) {
        // SAFETY: the kernel reads and writes nothing at the address.
        unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, most) };
    }
}

/// The same for loom: a queue of sleeping threads with their words, in order of arrival. A thread that is never woken sleeps
/// for ever, and loom reports a deadlock.
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
