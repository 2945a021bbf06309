//! What else happens in a process: lists are drained from outside (C4.3), and it forks (C4.4).
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use pagemill::CpuId;
use pagemill_model::{Failure, Holding, Op, Rng, World};

use super::round::Round;

/// Drains lists of random CPUs at random intervals until the round stops.
pub(super) fn drain(round: &Round) {
    let mut rng = Rng::new(round.seed ^ 0xd4a1);
    let cpus = round.allocator.cpus();
    while !round.is_over() {
        if rng.below(32) == 0 {
            round.allocator.drain();
        } else if let Err(error) = round.allocator.drain_cpu(CpuId::new(rng.below(cpus) as u32)) {
            round.fail_with(format!("a drain failed: {error}"));
        }
        round.counts.drains.fetch_add(1, Relaxed);
        std::thread::sleep(Duration::from_micros(rng.below(1500) as u64));
    }
}

/// Holdings that a child goes on with, as its parent does with its own copy.
const INHERITED: usize = 60;
/// Operations of a child.
const CHILD_OPS: usize = 150;
/// A child that takes longer hangs.
const CHILD_LIMIT: Duration = Duration::from_secs(600);

/// Forks; the child goes on with its copy of the allocator, validates it, and must end well.
pub(super) fn fork(round: &Round, rng: &mut Rng) -> Result<(), String> {
    let seed = rng.next();
    let mut inherited = Vec::new();
    round.with_pool(|pool| inherited.extend(pool.drain(pool.len().saturating_sub(INHERITED)..)));
    // SAFETY: the child only uses what works after a fork of many threads: the allocator, whose promise that is, and
    // the C library's heap.
    let pid = unsafe { libc::fork() };
    match pid {
        0 => {
            let code = child(round, seed, inherited);
            // SAFETY: ends the child at once, without the parent's exit handlers.
            unsafe { libc::_exit(code) }
        }
        _ => round.with_pool(|pool| pool.append(&mut inherited)),
    }
    if pid < 0 {
        return Ok(()); // No memory for a child just now.
    }
    round.counts.forks.fetch_add(1, Relaxed);
    let end = Instant::now() + CHILD_LIMIT;
    loop {
        let mut status = 0;
        // SAFETY: our child, waited for by nobody else.
        if unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) } == pid {
            return if status == 0 { Ok(()) } else { Err(format!("a forked child ended with status {status:#x}")) };
        }
        if Instant::now() > end {
            // SAFETY: as above.
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
            // SAFETY: writes our own bytes. Standard error's lock may be held by a thread that is not here.
            unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
            1
        }
        Err(_) => 1, // The panic's hook has said what.
    }
}

fn child_lives(round: &Round, seed: u64, inherited: Vec<Holding>) -> Result<(), Failure> {
    let mut rng = Rng::new(seed);
    let mut world = World::shared(round.allocator.clone(), Arc::clone(&round.ledger), 4094, 2000, |_| {});
    world.take_over(inherited);
    // What it does first meets lists that nobody has touched since the fork: often a free.
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
    match round.allocator.validate() {
        Ok(_) => Ok(()),
        Err(misfit) => Err(Failure::new(misfit.to_string())),
    }
}
