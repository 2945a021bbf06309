//! Waiting until no restartable section that began earlier is still under way on a CPU (membarrier(2)).
use crate::Errno;

/// The commands of `linux/membarrier.h` for restartable sequences.
const PRIVATE_EXPEDITED_RSEQ: i32 = 1 << 7;
const REGISTER_PRIVATE_EXPEDITED_RSEQ: i32 = 1 << 8;
const FLAG_CPU: i32 = 1;

fn membarrier(command: i32, flags: i32, cpu: i32) -> Result<(), Errno> {
    // SAFETY: the call takes numbers alone.
    let rc = unsafe { libc::syscall(libc::SYS_membarrier, command, flags, cpu) };
    if rc == 0 { Ok(()) } else { Err(Errno::last()) }
}

/// Says that this process will use it; again after a fork.
pub(crate) fn register() -> Result<(), Errno> {
    membarrier(REGISTER_PRIVATE_EXPEDITED_RSEQ, 0, 0)
}

/// When it returns, each section that was under way on `cpu` has committed or will abort, and what this thread wrote
/// before is visible there.
pub(crate) fn restart_sections(cpu: usize) -> Result<(), Errno> {
    let once = || membarrier(PRIVATE_EXPEDITED_RSEQ, FLAG_CPU, cpu as i32);
    match once() {
        // A child of fork that has not registered yet.
        Err(Errno(libc::EPERM)) => register().and_then(|()| once()),
        // No such CPU, or one that went away: nothing runs there.
        Err(Errno(libc::ENXIO)) => Ok(()),
        done => done,
    }
}
