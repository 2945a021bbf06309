//! A worker: random operations from the model's alphabet, until its life ends; what it holds is then somebody else's.
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use pagemill::{Gfp, Order, Page};
use pagemill_model::{Breach, Op, Rng, World};

use super::round::Round;

/// Frames that all workers hold at most, together: each touched page is committed.
const COMMITTED: usize = 120_000;
/// Holdings that a new worker takes over from those before it.
const TAKEN_OVER: usize = 400;

/// Pages that a churn has out at once, and how often.
const CHURN: usize = 6;
const CHURN_TURNS: u32 = 40;

/// Threads that found themselves on another CPU than before.
pub(super) static MIGRATIONS: AtomicU64 = AtomicU64::new(0);

/// Goes to another CPU of those that the process may use.
fn migrate(cpu: usize) {
    static CPUS: OnceLock<Vec<usize>> = OnceLock::new();
    let cpus = CPUS.get_or_init(allowed_cpus);
    let Some(&to) = cpus.get(cpu % cpus.len().max(1)) else { return };
    // SAFETY: a CPU set is plain bits; zero is an empty one. The number is below its size, as it came from one.
    unsafe {
        let before = libc::sched_getcpu();
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(to, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
        if libc::sched_getcpu() != before {
            MIGRATIONS.fetch_add(1, Relaxed);
        }
    }
}

fn allowed_cpus() -> Vec<usize> {
    // SAFETY: as in `migrate`. The main thread's set: workers narrow their own.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(libc::getpid(), size_of_val(&set), &mut set);
        (0..libc::CPU_SETSIZE as usize).filter(|&cpu| libc::CPU_ISSET(cpu, &set)).collect()
    }
}

/// One worker's life. `place`: which of the round's threads it is. `who`: its number as an owner.
pub(super) fn live(round: &Round, place: usize, who: u32, seed: u64) {
    // SAFETY: gettid has no preconditions.
    let tid = unsafe { libc::gettid() };
    round.tids[place].store(tid, Relaxed);
    let result = work(round, who, seed);
    round.tids[place].store(0, Relaxed);
    if let Err(failure) = result {
        round.fail_with(failure.to_string());
    }
}

fn work(round: &Round, who: u32, seed: u64) -> Result<(), pagemill_model::Failure> {
    let mut rng = Rng::new(seed);
    let places = round.tids.len();
    // All together they want more than there is, so that the small arenas are exhausted again and again.
    let most = (round.ledger.frames() * 3 / 2).min(COMMITTED) / places;
    let mut world = World::shared(round.allocator.clone(), Arc::clone(&round.ledger), who, most, migrate);
    round.with_pool(|pool| world.take_over(pool.split_off(pool.len().saturating_sub(TAKEN_OVER))));
    let mut ops = BTreeMap::new();
    let life = 500 + rng.below(6000);
    for _ in 0..life {
        if round.is_over() {
            break;
        }
        let op = Op::decode(rng.raw());
        if !op.is_misuse() {
            world.apply(op)?;
            *ops.entry(op.name()).or_default() += 1;
        }
        if rng.below(4) == 0 {
            churn(round, who, &mut rng)?;
            *ops.entry("churn").or_default() += 1;
        }
    }
    round.counts.add(&ops);
    round.counts.exits.fetch_add(1, Relaxed);
    let left = world.hand_over();
    round.with_pool(|pool| pool.extend(left));
    world.finish()
}

/// A few pages out and back, again and again with little between: so that signals meet sections.
fn churn(round: &Round, who: u32, rng: &mut Rng) -> Result<(), Breach> {
    let gfp = [Gfp::KERNEL, Gfp::NOWAIT, Gfp::KERNEL | Gfp::MOVABLE][rng.below(3)];
    let mut pages: [Option<Page>; CHURN] = [const { None }; CHURN];
    for turn in 1..=CHURN_TURNS {
        let tag = who << 20 | turn;
        for slot in &mut pages {
            *slot = round.allocator.alloc_page(gfp).ok();
        }
        for page in pages.iter().flatten() {
            round.ledger.take(page.addr(), Order::ZERO, tag)?;
        }
        for page in pages.iter().flatten() {
            round.ledger.give(page.addr(), Order::ZERO, tag)?;
        }
        pages.iter_mut().for_each(|slot| drop(slot.take()));
    }
    Ok(())
}
