//! Restartable sequences (rseq(2)): sections that the kernel sends back to their start when they are preempted,
//! migrated or interrupted by a signal before their last store.
//!
//! glibc 2.35 and later registers every thread, and exports the offset of the thread's area. Pagemill writes only the field
//! `rseq_cs` of that area. Each architecture has its assembly in a file of its own; both follow one scheme:
//!
//! ```text
//! 2:  rseq_cs = descriptor { start 4, commit 5, abort 6 }
//! 4:  list = base + cpu_id * 32 KiB          (out of range: the thread is not registered; leave)
//!     if list.held: leave                    (it is being drained)
//!     ... copy ...
//!     list.word = new                        one store: the commit
//! 5:  ... done
//! 6:  count the restart; go to 2             (after the signature that the kernel requires)
//! ```
//!
//! A thread's `rseq_cs` keeps pointing to the descriptor of its last section until the kernel clears it, as the interface
//! intends. So code with sections in it must not be unloaded: a shared object that holds Pagemill is linked with `-z nodelete`.
//!
//! loom, miri, valgrind and the sanitizers do not see into these sections. They are tested by `pagemill stress`, with signals,
//! migrations and drains, and by the self-test at start-up.
use crate::{Thread, membarrier};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::OnceLock;
use std::time::Duration;

#[cfg_attr(all(target_os = "linux", target_arch = "x86_64", not(miri), not(loom)), path = "x86_64.rs")]
#[cfg_attr(all(target_os = "linux", target_arch = "aarch64", not(miri), not(loom)), path = "aarch64.rs")]
#[cfg_attr(
    not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"), not(miri), not(loom))),
    path = "none.rs"
)]
mod arch;

pub(crate) use arch::{count, cpu, pop, pop_n, pop_words, push, push_n, push_words};

/// Offsets in a list and strides between lists. Assertions in [`crate::lists`] check them against the layout.
pub(crate) const LIMIT: usize = 8;
pub(crate) const HELD: usize = 12;
pub(crate) const LIST_SHIFT: u32 = 13;
pub(crate) const CPU_SHIFT: u32 = 15;

/// The argument of a section: a list of CPU 0, from which it computes the list of its own CPU.
#[derive(Clone, Copy)]
pub(crate) struct Lists {
    pub(crate) base: *mut u8,
    pub(crate) cpus: u32,
    pub(crate) offset: isize,
}

/// Sections that were restarted in this process.
static RESTARTS: AtomicU64 = AtomicU64::new(0);

/// How many sections were restarted in this process so far, by preemption, migration, signals and drains.
///
/// ```
/// let before = pagemill_os::restarts();
/// assert!(pagemill_os::restarts() >= before);
/// ```
pub fn restarts() -> u64 {
    RESTARTS.load(Relaxed)
}

/// The offset from the thread pointer to the thread's rseq area; 0 if glibc registered none.
pub(crate) fn area_offset() -> isize {
    *glibc_area().as_ref().unwrap_or(&0)
}

/// glibc's registration, by the symbols that it exports since 2.35. They are looked up at run time, so that the program also
/// loads on older systems.
#[cfg(all(target_os = "linux", not(miri), not(loom)))]
fn glibc_area() -> &'static Result<isize, &'static str> {
    static AREA: OnceLock<Result<isize, &'static str>> = OnceLock::new();
    AREA.get_or_init(|| {
        let symbol = |name: &core::ffi::CStr| {
            // SAFETY: looks a name up in the loaded objects; the name ends in a zero.
            unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
        };
        let (offset, size) = (symbol(c"__rseq_offset"), symbol(c"__rseq_size"));
        if offset.is_null() || size.is_null() {
            return Err("the C library does not register restartable sequences (glibc 2.35 and later does)");
        }
        // SAFETY: glibc documents `const ptrdiff_t __rseq_offset` and `const unsigned int __rseq_size`.
        let (offset, size) = unsafe { (*offset.cast::<isize>(), *size.cast::<u32>()) };
        if size == 0 {
            Err("the C library has not registered restartable sequences (old kernel, or glibc.pthread.rseq=0)")
        } else {
            Ok(offset)
        }
    })
}
#[cfg(not(all(target_os = "linux", not(miri), not(loom))))]
fn glibc_area() -> &'static Result<isize, &'static str> {
    &Err("this platform has no restartable sequences")
}

/// Whether restartable sequences work here. Tested once, in earnest: a thread spins inside a section, and the command that
/// drains use must restart it.
///
/// # Errors
/// The reason why they do not work.
///
/// ```
/// match pagemill_os::self_test() {
///     Ok(()) => println!("restartable sequences work"),
///     Err(why) => println!("portable lists: {why}"),
/// }
/// ```
pub fn self_test() -> Result<(), &'static str> {
    static RESULT: OnceLock<Result<(), &'static str>> = OnceLock::new();
    *RESULT.get_or_init(|| {
        let offset = (*glibc_area())?;
        membarrier::register().map_err(|_| "the system has no membarrier command for restartable sequences")?;
        if cpu(offset) as usize >= crate::possible_cpus() {
            return Err("this thread has no CPU number");
        }
        drains_restart_sections(offset)?;
        Ok(())
    })
}

/// Lets a thread spin in a section: restarting that CPU's sections must abort it.
fn drains_restart_sections(offset: isize) -> Result<(), &'static str> {
    /// Iterations of the spinning section: about a second, so that the test ends on a system where nothing restarts it.
    const TURNS: u64 = 1 << 30;
    static INSIDE: AtomicU32 = AtomicU32::new(0);
    static LEAVE: AtomicU32 = AtomicU32::new(0);
    INSIDE.store(0, Relaxed);
    LEAVE.store(0, Relaxed);
    // SAFETY: glibc registered every thread at `offset`; the flags are static.
    let spin = move || unsafe { arch::spin(offset, &INSIDE, &LEAVE, TURNS) };
    let spinner = Thread::spawn(c"pagemill-rseq", spin).map_err(|_| "no thread could be started for the self-test")?;
    // The section writes its CPU's number plus one.
    let cpu = loop {
        match INSIDE.load(Relaxed) {
            0 if spinner.is_finished() => return Err("a thread could not enter a section"),
            // A section cannot wake this thread, and may need this very CPU to start on, so this thread sleeps. The spinner
            // ends by itself.
            0 => std::thread::sleep(Duration::from_micros(50)),
            cpu => break cpu - 1,
        }
    };
    let barrier = membarrier::restart_sections(cpu as usize);
    LEAVE.store(1, Relaxed);
    let was_restarted = spinner.join().map_err(|_| "the self-test's thread ended early")?;
    match (barrier, was_restarted) {
        (Err(_), _) => Err("the membarrier command for one CPU fails"),
        (Ok(()), false) => Err("a section was not restarted by the membarrier command"),
        (Ok(()), true) => Ok(()),
    }
}
