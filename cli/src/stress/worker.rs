//! A worker: random operations from the model's alphabet until its life ends. Later workers take over its holdings.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use pagemill::{Gfp, Order, Page};
use pagemill_model::{Breach, Op, Rng, World};

use super::common::{Common, Counts};
use super::round::Round;

/// The most frames that all workers together hold: each page that is touched is committed.
const COMMITTED: usize = 120_000;
/// Holdings that a new worker takes over from workers before it.
const TAKEN_OVER: usize = 400;

/// Pages that a churn has out at once.
const CHURN: usize = 6;
/// How often it allocates and frees them.
const CHURN_TURNS: u32 = 40;

/// Migrations that took a thread to another CPU.
pub(super) static MIGRATIONS: AtomicU64 = AtomicU64::new(0);

/// Moves this thread to another of the CPUs that the process may use.
fn migrate(cpu: usize) {
    static CPUS: OnceLock<Vec<usize>> = OnceLock::new();
    let cpus = CPUS.get_or_init(allowed_cpus);
    let Some(&to) = cpus.get(cpu % cpus.len().max(1)) else { return };
    // SAFETY: a CPU set is plain bits, and all-zero is an empty set. `to` comes from such a set, so it is below the set's size.
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
    // The main thread's set, because workers narrow their own.
    // SAFETY: an all-zero CPU set is valid memory for the call; each number is below the set's size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(libc::getpid(), size_of_val(&set), &mut set);
        (0..libc::CPU_SETSIZE as usize).filter(|&cpu| libc::CPU_ISSET(cpu, &set)).collect()
    }
}

/// One worker's life. `place` is its index among the round's threads, `who` its number as an owner.
pub(super) fn live(round: &Round, place: usize, who: u32, seed: u64) -> Result<(), String> {
    // SAFETY: gettid has no preconditions.
    let tid = unsafe { libc::gettid() };
    round.tids[place].store(tid, Relaxed);
    let result = work(round, who, seed);
    round.tids[place].store(0, Relaxed);
    result.map_err(|failure| failure.to_string())
}

fn work(round: &Round, who: u32, seed: u64) -> Result<(), pagemill_model::Failure> {
    let mut rng = Rng::new(seed);
    let places = round.tids.len();
    let Common { allocator, ledger, .. } = &round.common;
    // Together the workers want more frames than there are, so that small arenas are exhausted again and again.
    let most = (ledger.frames() * 3 / 2).min(COMMITTED) / places;
    let mut world = World::shared(allocator.clone(), Arc::clone(ledger), who, most, migrate);
    round.with_pool(|pool| world.take_over(pool.split_off(pool.len().saturating_sub(TAKEN_OVER))));
    let mut ops = Counts::new();
    let life = 500 + rng.below(6000);
    for _ in 0..life {
        if round.common.is_over() {
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
    round.add_ops(&ops);
    round.common.count("exits");
    let left = world.hand_over();
    round.with_pool(|pool| pool.extend(left));
    world.finish()
}

/// Allocates and frees a few pages again and again with little work in between, so that signals interrupt sections.
fn churn(round: &Round, who: u32, rng: &mut Rng) -> Result<(), Breach> {
    let Common { allocator, ledger, .. } = &round.common;
    let gfp = [Gfp::KERNEL, Gfp::NOWAIT, Gfp::KERNEL | Gfp::MOVABLE][rng.below(3)];
    let mut pages: [Option<Page>; CHURN] = [const { None }; CHURN];
    for turn in 1..=CHURN_TURNS {
        let tag = who << 20 | turn;
        for slot in &mut pages {
            *slot = allocator.alloc_page(gfp).ok();
        }
        for page in pages.iter().flatten() {
            ledger.take(page.addr(), Order::ZERO, tag)?;
        }
        for page in pages.iter().flatten() {
            ledger.give(page.addr(), Order::ZERO, tag)?;
        }
        pages.iter_mut().for_each(|slot| drop(slot.take()));
    }
    Ok(())
}
