//! The pool's promise under a model checker (C5.3): run with `RUSTFLAGS="--cfg shuttle"`. No wait times out there, so
//! that a lost wake-up, or two waits for each other, is a deadlock that shuttle reports.
use pagemill::{Bulk, Cancel, Error, Exact, Gfp, Mempool, Source};
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use shuttle::sync::{Arc, Mutex};
use shuttle::thread;

/// So many different schedules of each model.
/// The variable `PAGEMILL_SCHEDULES` names another number, for a hunt.
fn schedules() -> usize {
    let asked = std::env::var("PAGEMILL_SCHEDULES").ok().map(|n| n.parse().expect("PAGEMILL_SCHEDULES is a number"));
    asked.unwrap_or(20_000)
}
const RESERVE: usize = 3;

/// Elements are numbers, each of which has one owner. The source has some beyond the reserve, and fails whenever it likes.
struct Fickle {
    free: Arc<Mutex<Vec<u32>>>,
    is_filled: Arc<AtomicUsize>,
}

impl Source for Fickle {
    type Item = u32;
    fn alloc(&self, _request: Bulk<'_, Exact, u32>) -> Result<Option<u32>, Error> {
        if self.is_filled.load(SeqCst) == 1 && thread_rng().gen_range(0..3) > 0 {
            return Ok(None);
        }
        Ok(self.free.lock().unwrap().pop())
    }
    fn free(&self, item: u32) {
        let mut free = self.free.lock().unwrap();
        assert!(!free.contains(&item), "{item} came back twice");
        free.push(item);
    }
}

struct World {
    pool: Mempool<Fickle>,
    free: Arc<Mutex<Vec<u32>>>,
}

fn world(beyond: u32) -> Arc<World> {
    let free = Arc::new(Mutex::new((0..RESERVE as u32 + beyond).collect()));
    let is_filled = Arc::new(AtomicUsize::new(0));
    let pool = Mempool::new(Fickle { free: free.clone(), is_filled: is_filled.clone() }, RESERVE).unwrap();
    is_filled.store(1, SeqCst);
    Arc::new(World { pool, free })
}

/// A world whose elements are all out.
fn world_with_all_out() -> (Arc<World>, [Option<u32>; RESERVE]) {
    let (world, mut all) = (world(0), [None; RESERVE]);
    world.pool.alloc_bulk_array_raw(Bulk::exact(RESERVE), &mut all).unwrap();
    (world, all)
}

fn at_rest(world: &World, beyond: u32) {
    let stats = world.pool.stats();
    assert_eq!((stats.out, stats.reserve, stats.waiting), (0, RESERVE, 0));
    assert_eq!(world.free.lock().unwrap().len(), beyond as usize);
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let model = std::sync::Arc::new(model);
    let random = model.clone();
    shuttle::check_random(move || random(), schedules());
    shuttle::check_pct(move || model(), schedules(), 3);
}

#[test]
fn requests_within_the_reserve_all_finish() {
    check(|| {
        let beyond = 1;
        let world = world(beyond);
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let world = world.clone();
                thread::spawn(move || {
                    for _ in 0..2 {
                        let n = thread_rng().gen_range(1..=RESERVE);
                        let mut slots = [None; RESERVE];
                        world.pool.alloc_bulk_array_raw(Bulk::exact(n).gfp(Gfp::NOIO), &mut slots).unwrap();
                        assert_eq!(slots.iter().flatten().count(), n);
                        // Given back in two parts, in any case all of it.
                        world.pool.free_bulk_raw(&mut slots[..1]);
                        world.pool.free_bulk_raw(&mut slots);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        at_rest(&world, beyond);
    });
}

#[test]
fn a_cancelled_wait_lets_the_next_one_go_on() {
    check(|| {
        let (world, mut all) = world_with_all_out();
        let cancel = Cancel::new();
        let large = thread::spawn({
            let (world, cancel) = (world.clone(), cancel.clone());
            move || {
                let mut slots = [None; RESERVE];
                let request = Bulk::exact(RESERVE).gfp(Gfp::NOIO).cancel(&cancel);
                let result = world.pool.alloc_bulk_array_raw(request, &mut slots);
                match result {
                    Ok(()) => assert_eq!(world.pool.free_bulk_raw(&mut slots), RESERVE),
                    Err(_) => assert_eq!(slots, [None; RESERVE]),
                }
            }
        });
        let small = thread::spawn({
            let world = world.clone();
            move || world.pool.free_raw(world.pool.alloc_raw(Gfp::NOIO).unwrap())
        });
        // One comes back: enough for the small one, once the large one is out of its way.
        world.pool.free_bulk_raw(&mut all[..1]);
        cancel.cancel();
        small.join().unwrap();
        large.join().unwrap();
        world.pool.free_bulk_raw(&mut all);
        at_rest(&world, 0);
    });
}

#[test]
fn a_free_wakes_a_waiter_that_is_joining_the_queue() {
    check(|| {
        let (world, mut all) = world_with_all_out();
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let world = world.clone();
                thread::spawn(move || world.pool.alloc_raw(Gfp::NOIO).unwrap())
            })
            .collect();
        // One each, and nothing comes after it.
        world.pool.free_bulk_raw(&mut all[..1]);
        world.pool.free_bulk_raw(&mut all[1..2]);
        let got: Vec<_> = waiters.into_iter().map(|waiter| Some(waiter.join().unwrap())).collect();
        all[0] = got[0];
        all[1] = got[1];
        world.pool.free_bulk_raw(&mut all);
        at_rest(&world, 0);
    });
}

#[test]
fn nowait_requests_do_not_overtake_waiters() {
    check(|| {
        let (world, mut all) = world_with_all_out();
        let is_served = Arc::new(AtomicUsize::new(0));
        let waiter = thread::spawn({
            let (world, is_served) = (world.clone(), is_served.clone());
            move || {
                let mut slots = [None; RESERVE];
                world.pool.alloc_bulk_array_raw(Bulk::exact(RESERVE).gfp(Gfp::NOIO), &mut slots).unwrap();
                is_served.store(1, SeqCst);
                world.pool.free_bulk_raw(&mut slots);
            }
        });
        while world.pool.stats().waiting == 0 {
            thread::yield_now();
        }
        world.pool.free_bulk_raw(&mut all[..2]);
        if let Ok(item) = world.pool.alloc_raw(Gfp::NOWAIT) {
            assert_eq!(is_served.load(SeqCst), 1, "taken while somebody waited");
            world.pool.free_raw(item);
        }
        world.pool.free_bulk_raw(&mut all);
        waiter.join().unwrap();
        at_rest(&world, 0);
    });
}

#[test]
fn requests_finish_during_a_resize() {
    check(|| {
        let world = world(2);
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let world = world.clone();
                thread::spawn(move || {
                    let mut slots = [None; 2];
                    world.pool.alloc_bulk_array_raw(Bulk::exact(2).gfp(Gfp::NOIO), &mut slots).unwrap();
                    world.pool.free_bulk_raw(&mut slots);
                })
            })
            .collect();
        // Up to five elements there are, of which the source gives when it likes.
        let _ = world.pool.resize(5);
        world.pool.resize(2).unwrap();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let stats = world.pool.stats();
        assert_eq!((stats.out, stats.reserve, stats.min_nr), (0, 2, 2));
        assert_eq!(world.free.lock().unwrap().len(), 3);
    });
}

/// A bulk free refills the reserve in one section: no other thread sees a part of it there.
#[test]
fn a_bulk_free_refills_the_reserve_atomically() {
    check(|| {
        let (world, mut all) = world_with_all_out();
        let looks = thread::spawn({
            let world = world.clone();
            move || {
                let reserve = world.pool.stats().reserve;
                assert!(reserve == 0 || reserve == RESERVE, "{reserve} of {RESERVE} came first");
            }
        });
        world.pool.free_bulk_raw(&mut all);
        looks.join().unwrap();
        at_rest(&world, 0);
    });
}

/// The new elements of a growing reserve serve waiting requests: here nothing else would wake them.
#[test]
fn a_growing_reserve_serves_waiters() {
    check(|| {
        // The source serves the making of the reserve, and no request.
        let source = |gfp| (gfp == Gfp::KERNEL | Gfp::NORETRY).then_some(7_u32);
        let pool = Arc::new(Mempool::from_fns(source, drop, RESERVE).unwrap());
        let mut all = [None; RESERVE];
        pool.alloc_bulk_array_raw(Bulk::exact(RESERVE).gfp(Gfp::NOIO), &mut all).unwrap();
        let waiter = thread::spawn({
            let pool = pool.clone();
            move || pool.alloc_raw(Gfp::NOIO).unwrap()
        });
        while pool.stats().waiting == 0 {
            thread::yield_now();
        }
        pool.resize(RESERVE + 1).unwrap();
        pool.free_raw(waiter.join().unwrap());
        pool.free_bulk_raw(&mut all);
        assert_eq!((pool.stats().out, pool.stats().reserve), (0, RESERVE + 1));
    });
}
