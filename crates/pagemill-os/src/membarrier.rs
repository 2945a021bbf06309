//! Waits until no restartable section that began earlier is still running on a CPU (membarrier(2)).
use crate::Errno;
use rustix::thread::{Cpuid, MembarrierCommand, membarrier, membarrier_cpu};

/// Registers this process for the command; needed again after a fork.
pub(crate) fn register() -> Result<(), Errno> {
    membarrier(MembarrierCommand::RegisterPrivateExpeditedRseq).map_err(Errno::of)
}

/// When it returns, each section that was running on `cpu` has committed or will abort, and that CPU sees everything that this
/// thread wrote before.
pub(crate) fn restart_sections(cpu: usize) -> Result<(), Errno> {
    // SAFETY: the kernel only looks the number up, and does nothing for a number without a CPU.
    let cpu = unsafe { Cpuid::from_raw(cpu as u32) };
    let once = || membarrier_cpu(MembarrierCommand::PrivateExpeditedRseq, cpu).map_err(Errno::of);
    match once() {
        // The child of a fork has not registered yet.
        Err(Errno::EPERM) => register().and_then(|()| once()),
        // There is no such CPU, or it went offline: nothing runs there.
        Err(Errno(libc::ENXIO)) => Ok(()),
        done => done,
    }
}
