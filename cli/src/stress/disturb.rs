//! Drains from outside (C4.3) and forks (C4.4), while workers work.
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagemill::{Allocator, CpuId};
use pagemill_model::{Failure, Holding, Op, Rng, World};

use super::common::Common;
use super::round::Round;

/// Drains lists of random CPUs at random intervals until the round stops.
pub(super) fn drain(round: &Round) -> Result<(), String> {
    let Common { allocator, seed, .. } = &round.common;
    let mut rng = Rng::new(seed ^ 0xd4a1);
    while !round.common.is_over() {
        drain_some(allocator, &mut rng, 32)?;
        round.common.count("drains");
        std::thread::sleep(Duration::from_micros(rng.below(1500) as u64));
    }
    Ok(())
}

/// Drains the lists of a random CPU; once in `all_of` times, those of all CPUs.
pub(super) fn drain_some(allocator: &Allocator, rng: &mut Rng, all_of: usize) -> Result<(), String> {
    if rng.below(all_of) == 0 {
        allocator.drain();
        return Ok(());
    }
    let cpu = CpuId::new(rng.below(allocator.cpus()) as u32);
    allocator.drain_cpu(cpu).map(|_| ()).map_err(|error| format!("a drain failed: {error}"))
}

/// Holdings that a child uses, as its parent uses its own copy of them.
const INHERITED: usize = 60;
/// Operations of a child.
const CHILD_OPS: usize = 150;
/// A child that runs longer hangs.
const CHILD_LIMIT: Duration = Duration::from_secs(600);

/// Forks. The child uses its copy of the allocator, validates it, and must end well.
pub(super) fn fork(round: &Round, rng: &mut Rng) -> Result<(), String> {
    let seed = rng.next();
    let mut inherited = Vec::new();
    round.with_pool(|pool| inherited.extend(pool.drain(pool.len().saturating_sub(INHERITED)..)));
    // SAFETY: the child uses only the allocator and the C library's heap, which both work in the child of a process with many
    // threads.
    let pid = unsafe { libc::fork() };
    match pid {
        0 => {
            let code = child(round, seed, inherited);
            // SAFETY: _exit ends the child at once, without running the parent's exit handlers.
            unsafe { libc::_exit(code) }
        }
        _ => round.with_pool(|pool| pool.append(&mut inherited)),
    }
    if pid < 0 {
        return Ok(()); // The system has no memory for a child at the moment.
    }
    round.common.count("forks");
    let end = Instant::now() + CHILD_LIMIT;
    loop {
        let mut status = 0;
        // SAFETY: `pid` is this process's child, and nothing else waits for it.
        if unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) } == pid {
            return if status == 0 { Ok(()) } else { Err(format!("a forked child ended with status {status:#x}")) };
        }
        if Instant::now() > end {
            // SAFETY: `pid` is this process's child, and has not been waited for.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            return Err(format!("a forked child hangs after {} s", CHILD_LIMIT.as_secs()));
        }
        std::thread::sleep(Duration::from_micros(500));
    }
}

fn child(round: &Round, seed: u64, inherited: Vec<Holding>) -> i32 {
    let lived = catch_unwind(AssertUnwindSafe(|| child_lives(round, seed, inherited)));
    match lived {
        Ok(Ok(())) => 0,
        Ok(Err(failure)) => {
            let text = format!("in a forked child: {failure}\n");
            // Standard error's lock may be held by a thread that the child does not have.
            // SAFETY: the pointer and the length are those of `text`.
            unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
            1
        }
        Err(_) => 1, // The panic's hook has printed the reason.
    }
}

fn child_lives(round: &Round, seed: u64, inherited: Vec<Holding>) -> Result<(), Failure> {
    let mut rng = Rng::new(seed);
    let Common { allocator, ledger, .. } = &round.common;
    let mut world = World::shared(allocator.clone(), Arc::clone(ledger), 4094, 2000, |_| {});
    world.take_over(inherited);
    // The first operation meets lists untouched since the fork. Often it is a free.
    if rng.below(4) > 0 {
        world.apply(Op::FreeOldest { n: 1 + rng.below(INHERITED) })?;
    }
    for _ in 0..CHILD_OPS {
        let op = Op::decode(rng.raw());
        if !op.is_misuse() {
            world.apply(op)?;
        }
    }
    world.finish()?;
    match allocator.validate() {
        Ok(_) => Ok(()),
        Err(misfit) => Err(Failure::new(misfit.to_string())),
    }
}
