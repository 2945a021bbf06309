//! C4.3, for one list: while a list is being drained, its CPU goes on without the list, and does not wait.
use pagemill_core::{CpuId, Mobility};
use pagemill_os::{Backend, Batch, PerCpu};
use std::sync::mpsc::channel;

const KIND: Mobility = Mobility::Movable;

/// Pins this thread to CPU 0.
fn stay_on_cpu_0() {
    assert!(stay_on_cpu(0));
}

/// Pins this thread to one CPU. Returns false if it may not run there.
fn stay_on_cpu(cpu: usize) -> bool {
    if cfg!(miri) {
        return true;
    }
    // SAFETY: zero is a valid, empty set; the call reads it.
    unsafe {
        let mut set: libc::cpu_set_t = core::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) == 0
    }
}

fn owner_goes_on(backend: Backend) {
    let lists = PerCpu::new(backend, pagemill_os::possible_cpus(), || 0).unwrap();
    std::thread::scope(|scope| {
        let (to_owner, orders) = channel::<()>();
        let (to_drain, done) = channel::<usize>();
        let lists = &lists;
        scope.spawn(move || {
            stay_on_cpu_0();
            for pfn in 0..100 {
                assert!(lists.push(KIND, pfn));
            }
            to_drain.send(0).unwrap();
            orders.recv().unwrap();
            // The main thread is in the middle of draining this CPU's list, and waits for this thread.
            let mut batch = Batch::new();
            lists.pop_n(KIND, 64, &mut batch);
            assert!(batch.is_empty() && lists.pop(KIND).is_none(), "a list is being drained");
            assert!(!lists.push(KIND, 1000), "a list is being drained");
            // The CPU's other lists are not held.
            assert!(lists.push(Mobility::Unmovable, 7));
            assert_eq!(lists.pop(Mobility::Unmovable), Some(7));
            to_drain.send(1).unwrap();
            orders.recv().unwrap();
            assert!(lists.push(KIND, 1000), "the list is open again");
            assert_eq!(lists.pop(KIND), Some(1000));
        });
        assert_eq!(done.recv(), Ok(0));
        let mut drained = Vec::new();
        let n = lists.drain(CpuId::new(0), KIND, |pfns| {
            if drained.is_empty() {
                to_owner.send(()).unwrap();
                assert_eq!(done.recv(), Ok(1));
            }
            drained.extend_from_slice(pfns);
        });
        drained.sort_unstable();
        assert_eq!((n, drained), (Some(100), (0..100).collect()));
        to_owner.send(()).unwrap();
    });
    let list = &lists.cpu(CpuId::new(0)).lists[KIND.index()];
    assert_eq!((list.pushed(), list.popped(), list.drained(), list.len()), (101, 1, 100, 0));
}

#[test]
fn the_owner_of_a_portable_list_goes_on_during_a_drain() {
    owner_goes_on(Backend::Portable);
}

#[test]
#[cfg(not(miri))] // Miri sees no assembly.
fn the_owner_of_a_restartable_sequences_list_goes_on_during_a_drain() {
    match pagemill_os::self_test() {
        Ok(()) => owner_goes_on(Backend::Rseq),
        Err(why) => eprintln!("skipped: the rseq backend ({why})"),
    }
}

/// Four threads push and pop frames of one portable list, and one of them drains it all the time.
#[test]
fn no_frame_is_lost_or_doubled_by_drains() {
    let turns = if cfg!(miri) { 30 } else { 20_000 };
    let lists = PerCpu::new(Backend::Portable, 1, || 0).unwrap();
    let frames = 40u32;
    let mut owned: Vec<u32> = std::thread::scope(|scope| {
        let (lists, threads) = (&lists, 4);
        let owners: Vec<_> = (0..threads)
            .map(|thread| {
                scope.spawn(move || {
                    let mut mine: Vec<u32> = (thread * frames / threads..(thread + 1) * frames / threads).collect();
                    for turn in 0..turns {
                        if thread == 0 {
                            lists.drain(CpuId::new(0), KIND, |pfns| mine.extend_from_slice(pfns));
                        }
                        if let Some(&pfn) = mine.last()
                            && turn % 3 != 0
                            && lists.push(KIND, pfn)
                        {
                            mine.pop();
                        } else {
                            let mut batch = Batch::new();
                            lists.pop_n(KIND, turn % 5 + 1, &mut batch);
                            mine.extend_from_slice(batch.as_slice());
                        }
                    }
                    mine
                })
            })
            .collect();
        owners.into_iter().flat_map(|owner| owner.join().unwrap()).collect()
    });
    lists.drain(CpuId::new(0), KIND, |pfns| owned.extend_from_slice(pfns));
    owned.sort_unstable();
    assert_eq!(owned, (0..frames).collect::<Vec<_>>());
}

/// Two threads on two CPUs, which must overlap.
#[cfg(not(miri))] // Miri sees no assembly.
mod two_processors {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
    use std::time::{Duration, Instant};

    /// After this time an event counts as missing.
    const PATIENCE: Duration = Duration::from_secs(600);
    /// The frame is on a list, or on its way between two owners.
    const NOBODY: u32 = 0;
    const OWNER: u32 = 1;
    const DRAINER: u32 = 2;

    /// The owner of each frame.
    struct Owners(Vec<AtomicU32>);

    impl Owners {
        fn pass(&self, pfns: &[u32], from: u32, to: u32) {
            for &pfn in pfns {
                let was = self.0[pfn as usize].swap(to, Relaxed);
                assert_eq!(was, from, "frame {pfn} passes from {from} to {to}, and {was} has it");
            }
        }
    }

    /// Tells the other threads that the test is over, even if an assertion failed: they would run for ever.
    struct Over<'a>(&'a AtomicBool);

    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Relaxed);
        }
    }

    /// Restartable sections of CPU 1 pop and push at full rate, and CPU 0 drains that list all the time: a section that began
    /// before the list was held must not commit afterwards. Without the barrier in `drain` this fails.
    #[test]
    fn a_running_section_does_not_commit_after_a_drain() {
        if let Err(why) = pagemill_os::self_test() {
            eprintln!("skipped: the rseq backend ({why})");
            return;
        }
        if !std::thread::scope(|scope| scope.spawn(|| stay_on_cpu(0) && stay_on_cpu(1)).join().unwrap()) {
            eprintln!("skipped: no two CPUs to run on");
            return;
        }
        const FRAMES: u32 = 32;
        let owners = Owners((0..FRAMES).map(|_| AtomicU32::new(OWNER)).collect());
        let lists = PerCpu::new(Backend::Rseq, pagemill_os::possible_cpus(), || 0).unwrap();
        let (drainer_to_owner, back) = channel::<Vec<u32>>();
        let is_over = AtomicBool::new(false);
        let (owner_has, drained) = std::thread::scope(|scope| {
            let (lists, owners, is_over) = (&lists, &owners, &is_over);
            let owner = scope.spawn(move || {
                assert!(stay_on_cpu(1));
                let mut mine: Vec<u32> = (0..FRAMES).collect();
                while !is_over.load(Relaxed) {
                    for pfn in back.try_iter().flatten() {
                        owners.pass(&[pfn], NOBODY, OWNER);
                        mine.push(pfn);
                    }
                    while let Some(&pfn) = mine.last() {
                        owners.pass(&[pfn], OWNER, NOBODY);
                        if !lists.push(KIND, pfn) {
                            owners.pass(&[pfn], NOBODY, OWNER);
                            break;
                        }
                        mine.pop();
                    }
                    let mut batch = Batch::new();
                    lists.pop_n(KIND, FRAMES as usize, &mut batch);
                    owners.pass(batch.as_slice(), NOBODY, OWNER);
                    mine.extend_from_slice(batch.as_slice());
                }
                mine.extend(back.iter().flatten()); // To the end, including the last frames sent.
                mine
            });
            let drainer = scope.spawn(move || {
                let over = Over(is_over);
                assert!(stay_on_cpu(0));
                let (begin, mut drained) = (Instant::now(), 0);
                // For a second, and on a busy machine until the two have overlapped at least once.
                while begin.elapsed() < Duration::from_secs(1) || (drained == 0 && begin.elapsed() < PATIENCE) {
                    if owner.is_finished() {
                        break;
                    }
                    let mut taken = Vec::new();
                    let moved = lists.drain(CpuId::new(1), KIND, |pfns| {
                        owners.pass(pfns, NOBODY, DRAINER);
                        taken.extend_from_slice(pfns);
                    });
                    drained += moved.expect("membarrier worked in the self-test");
                    owners.pass(&taken, DRAINER, NOBODY);
                    if !taken.is_empty() {
                        let _ = drainer_to_owner.send(taken);
                    }
                }
                drop((over, drainer_to_owner));
                (owner.join().expect("the owner found a frame owned twice"), drained)
            });
            drainer.join().expect("a frame was owned twice")
        });
        let mut all = owner_has;
        lists.drain(CpuId::new(1), KIND, |pfns| all.extend_from_slice(pfns));
        all.sort_unstable();
        assert_eq!(all, (0..FRAMES).collect::<Vec<_>>(), "a frame is lost or doubled");
        assert!(drained > 0, "nothing was drained while the owner went on");
    }
}

/// Does what the child of a fork does that interrupted a drain: it finds a list that is held by a thread that does not exist.
fn child_releases(backend: Backend) {
    let lists = PerCpu::new(backend, pagemill_os::possible_cpus(), || 0).unwrap();
    let cpu = CpuId::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            stay_on_cpu_0();
            assert!((0..10).all(|pfn| lists.push(KIND, pfn)));
            let mut batches = 0;
            lists.drain(cpu, KIND, |_| {
                batches += 1;
                assert!(!lists.push(KIND, 10), "a list is being drained");
                lists.empty_after_fork();
                assert!(lists.push(KIND, 10), "nobody drains it in the child");
                assert_eq!(lists.pop(KIND), Some(10));
                assert_eq!(lists.drain(cpu, KIND, |_| ()), Some(0));
            });
            assert_eq!(batches, 1);
        });
    });
}

#[test]
fn a_child_uses_portable_lists_that_a_drain_held_as_the_process_forked() {
    child_releases(Backend::Portable);
}

#[test]
#[cfg(not(miri))] // Miri sees no assembly.
fn a_child_uses_restartable_sequences_lists_that_a_drain_held_as_the_process_forked() {
    match pagemill_os::self_test() {
        Ok(()) => child_releases(Backend::Rseq),
        Err(why) => eprintln!("skipped: the rseq backend ({why})"),
    }
}
