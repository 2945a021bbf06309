//! The rule when to write a register, and a model by loom of both sides' accesses to the shadow and the EventIdx: it
//! also delays stores, as processors do.
use loom::sync::Arc;
use loom::sync::atomic::{self as sync, AtomicU32, Ordering, fence};

use super::{Move, is_wanted};

#[path = "../barriers.rs"]
#[expect(dead_code, clippy::duplicate_mod, reason = "with other atomics; the model has no completions")]
mod barriers;

/// All positions in all small rings, against a walk from the old position to the new one.
#[test]
fn the_register_is_written_exactly_if_the_event_index_is_moved_past() {
    for depth in 2..12 {
        for (old, steps, event) in (0..depth)
            .flat_map(|old| (0..depth).flat_map(move |steps| (0..depth).map(move |event| (old, steps, event))))
        {
            let new = (old + steps) % depth;
            let is_passed = (0..steps).any(|step| (old + step) % depth == event);
            let moved = Move { register: 2, old, new, depth };
            assert_eq!(is_wanted(event.into(), moved), is_passed, "{old} to {new} of {depth}, event {event}");
        }
        let moved = Move { register: 2, old: 0, new: 1, depth };
        assert!(is_wanted(depth.into(), moved) && is_wanted(u32::MAX, moved), "no such position");
    }
}

/// A submission queue in memory, and its register.
#[derive(Default)]
struct Ring {
    entries: [AtomicU32; DEPTH as usize],
    position: AtomicU32,
    event: AtomicU32,
    register: AtomicU32,
    /// The driver has submitted all commands.
    is_over: AtomicU32,
}

const DEPTH: u16 = 3;
/// Both sides begin here, so that positions wrap.
const BEGIN: u16 = 1;
/// As many commands as the queue holds.
const END: u16 = (BEGIN + DEPTH - 1) % DEPTH;

impl Ring {
    /// The controller sleeps until the register is written, which had this value. Returns the new one.
    fn sleep(&self, before: u32) -> u32 {
        loop {
            let is_over = self.is_over.load(Ordering::Acquire) == 1;
            let written = self.register.load(Ordering::Acquire);
            if written != before {
                return written;
            }
            assert!(!is_over, "a command is lost");
            loom::thread::yield_now();
        }
    }
}

fn after(at: u16) -> u16 {
    (at + 1) % DEPTH
}

/// Every order of a driver that submits commands one by one, and a controller that fetches them and sleeps when it sees
/// none.
fn every_command_is_fetched(announce: fn(&AtomicU32, &AtomicU32, u32) -> u32) {
    loom::model(move || {
        let ring = Arc::new(Ring::default());
        [&ring.position, &ring.register].into_iter().for_each(|word| word.store(BEGIN.into(), Ordering::Relaxed));
        let driver = loom::thread::spawn({
            let ring = Arc::clone(&ring);
            move || {
                let mut old = BEGIN;
                while old != END {
                    let new = after(old);
                    ring.entries[usize::from(old)].store(1, Ordering::Relaxed);
                    barriers::before_doorbell();
                    let event = announce(&ring.position, &ring.event, new.into());
                    if is_wanted(event, Move { register: 2, old, new, depth: DEPTH }) {
                        ring.register.store(new.into(), Ordering::Release);
                    }
                    old = new;
                }
                ring.is_over.store(1, Ordering::Release);
            }
        });
        let (mut fetched, mut written) = (BEGIN, BEGIN.into());
        while fetched != END {
            ring.event.store(fetched.into(), Ordering::Relaxed);
            fence(Ordering::SeqCst);
            let tail = ring.position.load(Ordering::Relaxed) as u16;
            if tail == fetched {
                written = ring.sleep(written);
            }
            fence(Ordering::Acquire);
            while fetched != tail {
                // D3.
                assert_eq!(ring.entries[usize::from(fetched)].load(Ordering::Relaxed), 1, "an entry comes late");
                fetched = after(fetched);
            }
        }
        driver.join().unwrap();
    });
}

#[test]
fn no_order_of_accesses_loses_a_command() {
    every_command_is_fetched(barriers::announce);
}

#[test]
#[should_panic(expected = "a command is lost")]
fn without_the_barrier_a_command_is_lost() {
    every_command_is_fetched(|position, event, new| {
        position.store(new, Ordering::Relaxed);
        event.load(Ordering::Relaxed)
    });
}

#[test]
#[should_panic(expected = "a command is lost")]
fn a_command_is_lost_if_the_event_index_is_read_first() {
    every_command_is_fetched(|position, event, new| {
        let wanted = event.load(Ordering::Relaxed);
        fence(Ordering::SeqCst);
        position.store(new, Ordering::Relaxed);
        wanted
    });
}
