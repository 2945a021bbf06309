//! What a list knows of the order of its frames (L4), against a stack that knows all of it.
use pagemill_core::Mobility;
use pagemill_sys::{Backend, Batch, PerCpu};

const KIND: Mobility = Mobility::Unmovable;

/// The first of the top `n` of a stack, if they follow each other.
fn run_on_top(stack: &[u32], n: usize) -> Option<u32> {
    let top = &stack[stack.len().checked_sub(n)?..];
    top.windows(2).all(|pair| pair[1] == pair[0] + 1).then(|| top[0])
}

/// Random numbers, the same for each run of the test.
fn random(seed: &mut u64) -> usize {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    (*seed >> 33) as usize
}

#[test]
fn restartable_sequences_hand_out_runs_and_know_batches_in_order() {
    let lists = match PerCpu::new(Backend::Rseq, pagemill_sys::possible_cpus(), pagemill_sys::current_cpu) {
        Ok(lists) => lists,
        Err(why) => return println!("skipped: {why}"),
    };
    stay_here();
    let (mut stack, mut seed, mut runs) = (Vec::<u32>::new(), 1, 0);
    for turn in 0..20_000u32 {
        let n = 1 + random(&mut seed) % 64;
        // Often the neighbour of the top, so that runs grow, or a number from far away.
        let next = match stack.last() {
            Some(&top) if random(&mut seed).is_multiple_of(2) => top + 1,
            _ => 1 + (random(&mut seed) % 1000) as u32 * 1000,
        };
        let has_room = stack.len() + n < 120;
        match random(&mut seed) % 6 {
            0 if has_room => {
                assert!(lists.push(KIND, next));
                stack.push(next);
            }
            1 if has_room => {
                assert!(lists.push_run(KIND, next, n));
                stack.extend(next..next + n as u32);
                assert!(run_on_top(&stack, n).is_some());
            }
            2 if has_room => {
                let mut batch = Batch::new();
                let step = 1 + 2 * (random(&mut seed) % 2) as u32;
                (0..n as u32).for_each(|i| batch.push(next + step * i));
                if n > 3 && random(&mut seed).is_multiple_of(2) {
                    // The ends are as those of a run.
                    batch.as_mut_slice().swap(1, 2 + random(&mut seed) % (n - 3));
                }
                assert!(lists.push_n(KIND, &batch, 0..n));
                stack.extend(batch.as_slice());
            }
            3 => assert_eq!(lists.pop(KIND), stack.pop(), "turn {turn}"),
            4 => {
                let mut batch = Batch::new();
                lists.pop_n(KIND, n, &mut batch);
                assert_eq!(batch.as_slice(), stack.split_off(stack.len().saturating_sub(n)), "turn {turn}");
            }
            _ => {
                let n = if random(&mut seed).is_multiple_of(2) { n.next_multiple_of(8) } else { n };
                let first = lists.pop_run(KIND, n);
                // Eights are looked at, whatever is known.
                if first.is_some() || (n.is_multiple_of(8) && cfg!(target_arch = "x86_64")) {
                    assert_eq!(first, run_on_top(&stack, n), "turn {turn}: {n} of {stack:?}");
                }
                if first.is_some() {
                    stack.truncate(stack.len() - n);
                    runs += 1;
                }
            }
        }
    }
    assert!(runs > 100 || cfg!(not(target_arch = "x86_64")), "{runs} runs were handed out");

    while lists.pop(KIND).is_some() {}
    // Batches one after the other that follow each other are one run, whatever lies below.
    assert!(lists.push(KIND, 7) && lists.push_run(KIND, 1000, 30) && lists.push_run(KIND, 1030, 30));
    if cfg!(target_arch = "x86_64") {
        assert_eq!((lists.pop_run(KIND, 61), lists.pop_run(KIND, 60)), (None, Some(1000)));
        assert_eq!(lists.pop(KIND), Some(7));
    }
}

/// Binds this thread to the CPU that it is on.
fn stay_here() {
    // SAFETY: zeroed memory is an empty set; the call reads the set that it is given the size of.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(pagemill_sys::current_cpu(), &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    assert_eq!(result, 0, "this thread cannot be bound to its CPU");
}
