//! Waiting until no restartable section that began earlier is still under way on a CPU (membarrier(2)).
use crate::Errno;
use rustix::thread::{Cpuid, MembarrierCommand, membarrier, membarrier_cpu};

/// Says that this process will use it; again after a fork.
pub(crate) fn register() -> Result<(), Errno> {
    membarrier(MembarrierCommand::RegisterPrivateExpeditedRseq).map_err(Errno::of)
}

/// When it returns, each section that was under way on `cpu` has committed or will abort, and what this thread wrote
/// before is visible there.
pub(crate) fn restart_sections(cpu: usize) -> Result<(), Errno> {
    // SAFETY: the system looks the number up, and refuses one that it has no CPU for.
    let cpu = unsafe { Cpuid::from_raw(cpu as u32) };
    let once = || membarrier_cpu(MembarrierCommand::PrivateExpeditedRseq, cpu).map_err(Errno::of);
    match once() {
        // A child of fork that has not registered yet.
        Err(Errno::EPERM) => register().and_then(|()| once()),
        // No such CPU, or one that went away: nothing runs there.
        Err(Errno(libc::ENXIO)) => Ok(()),
        done => done,
    }
}
