//! A list is a stack under every operation and every number of frames.
use pagemill_core::{FrameState, Mobility, Order, PAGE_SHIFT};
use pagemill_os::{Backend, Batch, PerCpu};
use std::mem::MaybeUninit;

const KIND: Mobility = Mobility::Unmovable;

/// Pseudo-random numbers, the same in each run.
fn random(seed: &mut u64) -> usize {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    (*seed >> 33) as usize
}

#[test]
fn a_list_of_restartable_sequences_is_a_stack() {
    match PerCpu::new(Backend::Rseq, pagemill_os::possible_cpus(), pagemill_os::current_cpu) {
        Ok(lists) => is_a_stack(&lists),
        Err(why) => println!("skipped: {why}"),
    }
}

#[test]
fn a_portable_list_is_a_stack() {
    is_a_stack(&PerCpu::new(Backend::Portable, 1, || 0).unwrap());
}

fn is_a_stack(lists: &PerCpu) {
    stay_here();
    let (mut stack, mut seed, mut missed) = (Vec::<u32>::new(), 1, 0);
    let turns = if cfg!(miri) { 200 } else { 20_000 };
    let mut states = vec![FrameState::SAFE.as_byte(); turns as usize * 64 + 64];
    for turn in 0..turns {
        let n = 1 + random(&mut seed) % 64;
        let has_room = stack.len() + n < 120;
        let mut batch = Batch::new();
        match random(&mut seed) % 7 {
            0 if has_room => {
                assert!(lists.push(KIND, turn));
                stack.push(turn);
            }
            1 if has_room => {
                (0..n as u32).for_each(|i| batch.push(turn * 64 + i * 7 % 64));
                let from = random(&mut seed) % n;
                assert!(lists.push_n(KIND, &batch, from..n));
                stack.extend(&batch.as_slice()[from..]);
            }
            2 => assert_eq!(lists.pop(KIND), stack.pop(), "turn {turn}"),
            3 => {
                lists.pop_n(KIND, n, &mut batch);
                assert_eq!(batch.as_slice(), stack.split_off(stack.len().saturating_sub(n)), "turn {turn}");
            }
            4 if has_room => {
                let numbers: Vec<u32> = (0..n as u32).map(|i| turn * 64 + i * 7 % 64).collect();
                let words: Vec<usize> = numbers.iter().map(|&number| word_of(number)).collect();
                assert!(lists.push_words(KIND, &words, ZERO));
                stack.extend(numbers);
            }
            5 => {
                let (mut words, place) =
                    ([MaybeUninit::new(7); 66], stack.len().saturating_sub(1 + random(&mut seed) % n));
                // Now and then one of them has an owner.
                let taken = stack.get(place).copied().filter(|_| turn % 3 == 0);
                let state = |state: FrameState| state.as_byte();
                taken.inspect(|&taken| states[taken as usize] = state(FrameState::raw(Order::ZERO)));
                // SAFETY: `states` has a byte for every number.
                let has_all = unsafe { lists.pop_words(KIND, &mut words[1..=n], ZERO, states.as_ptr()) };
                taken.inspect(|&taken| states[taken as usize] = state(FrameState::SAFE));
                // SAFETY: all are initialised.
                let words = words.map(|word| unsafe { word.assume_init() });
                assert_eq!(has_all, stack.len() >= n && taken.is_none(), "turn {turn}");
                if has_all {
                    let popped = stack.split_off(stack.len() - n);
                    assert!(
                        popped.iter().map(|&number| word_of(number)).eq(words[1..=n].iter().copied()),
                        "turn {turn}"
                    );
                }
                assert!(words[0] == 7 && words[n + 1..].iter().all(|&word| word == 7), "turn {turn}: beyond {n} words");
            }
            _ => {
                let has_all = lists.pop_all(KIND, n, &mut batch);
                assert_eq!(has_all, stack.len() >= n, "turn {turn}");
                let taken = if has_all { stack.split_off(stack.len() - n) } else { Vec::new() };
                assert_eq!(batch.as_slice(), taken, "turn {turn}");
                missed += u32::from(!has_all);
            }
        }
    }
    assert!(missed > turns / 200, "lists had too few {missed} times");
}

/// The address of number 0: it wraps below 0, as for an arena whose first number is larger than its address allows.
const ZERO: usize = 0x4000_usize.wrapping_sub(1 << 30);

fn word_of(number: u32) -> usize {
    ZERO.wrapping_add((number as usize) << PAGE_SHIFT)
}

/// Pins this thread to the CPU that it runs on.
fn stay_here() {
    // SAFETY: zeroed memory is an empty set; the call reads the set that it is given the size of.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(pagemill_os::current_cpu(), &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    assert_eq!(result, 0, "this thread cannot be bound to its CPU");
}
