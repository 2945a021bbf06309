//! A `SCHED_FIFO` thread on one CPU with what it waits for. If it spins or yields instead of sleeping, the other thread, of
//! lower priority, does not go on.
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::channel;

/// Runs `hold` on a thread of its own. When `hold` calls its argument, a `SCHED_FIFO` thread on the same CPU runs `wait`; `hold`
/// goes on when that thread sleeps. Returns how often `wait` slept. 0: it never did, and `hold` went on only because the kernel
/// throttled the other thread. `Err`: such threads are not permitted here.
pub(crate) fn sleeps(hold: impl FnOnce(&dyn Fn()) + Send, wait: impl FnOnce() + Send) -> Result<i64, String> {
    let (says_ready, is_ready) = channel();
    let is_asked = &AtomicBool::new(false);
    let waiter = move || {
        let permitted = become_fifo();
        let is_permitted = permitted.is_ok();
        says_ready.send(permitted).unwrap();
        if !is_permitted {
            return 0;
        }
        while !is_asked.load(SeqCst) {
            std::thread::park();
        }
        let before = times_slept();
        wait();
        times_slept() - before
    };
    std::thread::scope(|scope| {
        let holder = scope.spawn(move || {
            stay_here();
            let waiter = scope.spawn(waiter);
            is_ready.recv().unwrap()?;
            hold(&|| {
                is_asked.store(true, SeqCst);
                waiter.thread().unpark();
                // It has the CPU from here on, until it sleeps.
            });
            Ok(waiter.join().unwrap())
        });
        holder.join().unwrap()
    })
}

/// Keeps this thread and those that it starts on the CPU that it is on.
fn stay_here() {
    // SAFETY: zero is a valid, empty set; the call reads it.
    let rc = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(libc::sched_getcpu() as usize, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
}

/// Makes this thread one of `SCHED_FIFO`.
fn become_fifo() -> Result<(), String> {
    // One that spins where the kernel lets it have the CPU for ever ends the process, not the machine.
    let limit = libc::rlimit { rlim_cur: 20_000_000, rlim_max: libc::RLIM_INFINITY };
    let lowest = libc::sched_param { sched_priority: 1 };
    // SAFETY: both read what they are given.
    unsafe {
        libc::setrlimit(libc::RLIMIT_RTTIME, &raw const limit);
        if libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const lowest) == 0 {
            return Ok(());
        }
    }
    Err(format!("SCHED_FIFO: {}", std::io::Error::last_os_error()))
}

/// How often this thread gave the CPU away to wait for something.
fn times_slept() -> i64 {
    // SAFETY: zero is valid, and the structure is written.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage), 0);
        usage.ru_nvcsw
    }
}
