//! Sleeping until a word changes, and waking who sleeps (futex(2)), within this process.
//!
//! The word is the truth and the sleep only saves time: who waits looks at the word, sleeps if it still has that value,
//! and looks again; who wakes changes the word first. So no wake is lost, and one too many does no harm.
use crate::Errno;
use core::ptr::null;
use core::sync::atomic::AtomicU32;
use core::time::Duration;

/// Sleeps while `word` is `expected`, until [`wake`] or for `timeout` at most. False: the time was over. True: anything
/// else, a wake for no reason included; look at the word again. Signal handlers run meanwhile and do not end the sleep.
/// `errno` stays as it was.
///
/// ```
/// use pagemill_sys::futex;
/// use std::{sync::atomic::{AtomicU32, Ordering}, time::Duration};
/// let word = AtomicU32::new(0);
/// assert!(!futex::wait(&word, 0, Some(Duration::from_millis(1))));
/// assert!(futex::wait(&word, 1, None), "it is not 1, so there is nothing to wait for");
/// std::thread::scope(|scope| {
///     scope.spawn(|| {
///         word.store(1, Ordering::Release);
///         futex::wake(&word, 1);
///     });
///     while word.load(Ordering::Acquire) == 0 {
///         assert!(futex::wait(&word, 0, None));
///     }
/// });
/// ```
pub fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) -> bool {
    let _errno = KeptErrno::new();
    // A moment, not a length of time: sleeping goes on after a signal. One beyond the clock's end never comes.
    let until = timeout.and_then(|timeout| add(now(), timeout));
    loop {
        let until = until.as_ref().map_or(null(), |until| &raw const *until);
        let operation = libc::FUTEX_WAIT_BITSET | libc::FUTEX_PRIVATE_FLAG;
        let any = libc::FUTEX_BITSET_MATCH_ANY;
        // SAFETY: the word lives as long as the borrow; the time is null or a valid one on this stack; the fifth
        // argument is not used.
        let rc =
            unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, expected, until, null::<u32>(), any) };
        match (rc, Errno::last().0) {
            (-1, libc::EINTR) => {}
            (-1, libc::ETIMEDOUT) => return false,
            (-1, libc::EAGAIN) | (0, _) => return true,
            (_, errno) => panic!("futex: {}", std::io::Error::from_raw_os_error(errno)),
        }
    }
}

/// Wakes up to `n` threads of this process that [wait](wait()) on `word`, first come first served among those of one
/// priority; returns how many. A signal handler may call it: it takes no lock, and `errno` stays as it was.
///
/// ```
/// let word = std::sync::atomic::AtomicU32::new(0);
/// assert_eq!(pagemill_sys::futex::wake(&word, u32::MAX), 0, "nobody waits");
/// ```
pub fn wake(word: &AtomicU32, n: u32) -> usize {
    let _errno = KeptErrno::new();
    let n = i32::try_from(n).unwrap_or(i32::MAX);
    // SAFETY: the system only compares the address with those that threads wait on.
    let woken =
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, n) };
    // It fails for no address of an aligned word; then nobody was woken.
    usize::try_from(woken).unwrap_or(0)
}

fn now() -> libc::timespec {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is written.
    let rc = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    assert_eq!(rc, 0, "every system has a monotonic clock");
    now
}

fn add(time: libc::timespec, more: Duration) -> Option<libc::timespec> {
    const SECOND_NS: i64 = 1_000_000_000;
    let nanoseconds = time.tv_nsec + i64::from(more.subsec_nanos());
    let seconds = i64::try_from(more.as_secs()).ok()?.checked_add(nanoseconds / SECOND_NS)?;
    Some(libc::timespec { tv_sec: time.tv_sec.checked_add(seconds)?, tv_nsec: nanoseconds % SECOND_NS })
}

/// Puts `errno` back, so that who was interrupted by a signal handler finds its own.
struct KeptErrno(i32);

impl KeptErrno {
    fn new() -> Self {
        // SAFETY: this thread's own variable.
        Self(unsafe { *libc::__errno_location() })
    }
}

impl Drop for KeptErrno {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = self.0 };
    }
}

#[cfg(test)]
mod tests {
    use super::{add, wait, wake};
    use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};
    use core::time::Duration;

    #[test]
    fn each_wake_ends_as_many_waits_as_it_says() {
        let (word, awake) = (AtomicU32::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    assert!(wait(&word, 0, None));
                    awake.fetch_add(1, Relaxed);
                });
            }
            // The word does not change, so only a wake ends a wait.
            for n in [1, 2, 1] {
                let mut woken = 0;
                while woken < n {
                    woken += wake(&word, 1);
                    std::thread::yield_now();
                }
            }
            assert_eq!(wake(&word, u32::MAX), 0, "all four are awake");
        });
        assert_eq!(awake.load(Relaxed), 4);
    }

    #[test]
    fn a_wait_ends_when_its_time_is_over_and_not_before() {
        let word = AtomicU32::new(0);
        for timeout in [Duration::ZERO, Duration::from_millis(20)] {
            let start = std::time::Instant::now();
            assert!(!wait(&word, 0, Some(timeout)));
            assert!(start.elapsed() >= timeout);
        }
        assert!(wait(&word, 1, Some(Duration::MAX)), "another value is no wait at all");
    }

    #[test]
    fn errno_stays() {
        let errno = || std::io::Error::last_os_error().raw_os_error();
        // SAFETY: this thread's own variable.
        unsafe { *libc::__errno_location() = libc::EXDEV };
        let word = AtomicU32::new(0);
        assert!(!wait(&word, 0, Some(Duration::from_nanos(1))));
        assert_eq!(errno(), Some(libc::EXDEV));
        assert!(wait(&word, 1, None));
        assert_eq!((wake(&word, 1), errno()), (0, Some(libc::EXDEV)));
    }

    #[test]
    fn times_carry_and_end_with_the_clock() {
        let time = libc::timespec { tv_sec: 7, tv_nsec: 999_999_999 };
        let sum = add(time, Duration::new(2, 2)).unwrap();
        assert_eq!((sum.tv_sec, sum.tv_nsec), (10, 1));
        assert!(add(time, Duration::MAX).is_none());
        assert!(add(time, Duration::from_secs(i64::MAX as u64)).is_none());
    }
}
