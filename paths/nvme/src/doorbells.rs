//! Doorbells: the registers by which a controller learns positions of queues, and their shadows in memory.
//!
//! Under a hypervisor each write to a register leaves the virtual machine. A controller that supports it (Doorbell
//! Buffer Config, section 5.7) reads positions from memory instead, as long as it is awake, and says in a second page
//! (EventIdx) from which position on it wants to be woken by the register. Invariants:
//! - D1 The driver writes a position to the shadow before it reads the EventIdx. The controller writes the EventIdx
//!   before it reads the shadow for the last time. Each is followed by a full barrier. So at least one side sees the
//!   other's write: a new position is seen by the controller, or the driver sees that it has to be woken.
//! - D2 The driver writes to the register exactly if the EventIdx is one of the positions that it moves past: in a ring
//!   of `depth`, if the way from the old position to the EventIdx is shorter than to the new one. An EventIdx beyond
//!   the queue, which the specification does not allow, wakes it.
//! - D3 Entries of a submission queue are written before the shadow.
//!
//! The admin queue always uses the registers. So do queues whose shadows would lie beyond the page.
use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::Error;
use crate::bus::{Bus, before_doorbell};
use crate::memory::{Memory, Shared};
use crate::spec::{DOORBELLS, PAGE};

/// The doorbells of a controller's queues.
pub(crate) struct Doorbells {
    stride: usize,
    shadow: Option<Shadow>,
}

struct Shadow {
    positions: Shared,
    events: Shared,
}

// SAFETY: the words of both pages are accessed as atomic numbers alone once several threads have it.
unsafe impl Sync for Shadow {}

/// A position that has moved.
#[derive(Clone, Copy)]
pub(crate) struct Move {
    /// The register's number: twice the queue's, and one more for its completions.
    pub(crate) register: usize,
    pub(crate) old: u16,
    pub(crate) new: u16,
    pub(crate) depth: u16,
}

impl Doorbells {
    /// The registers alone.
    pub(crate) fn registers(stride: usize) -> Self {
        Self { stride, shadow: None }
    }

    /// With shadows. The controller is to be told of them.
    pub(crate) fn shadowed(stride: usize, memory: &Memory) -> Result<Self, Error> {
        let shadow = Shadow { positions: Shared::new(memory, PAGE)?, events: Shared::new(memory, PAGE)? };
        Ok(Self { stride, shadow: Some(shadow) })
    }

    /// The addresses of the pages of shadows and of EventIdx, zeroed for a controller that has just been started. No
    /// other thread uses them.
    pub(crate) fn shadows(&self) -> Option<(u64, u64)> {
        let shadow = self.shadow.as_ref()?;
        for page in [&shadow.positions, &shadow.events] {
            (0..PAGE).step_by(4).for_each(|at| page.atomic(at).store(0, Ordering::Relaxed));
        }
        Some((shadow.positions.addr(), shadow.events.addr()))
    }

    /// Tells the controller of a position.
    pub(crate) fn ring(&self, bus: &dyn Bus, moved: Move) {
        let at = moved.register * self.stride;
        // D3, and for the register.
        before_doorbell();
        if let Some(shadow) = self.shadow.as_ref().filter(|_| at + 4 <= PAGE) {
            let event = announce(shadow.positions.atomic(at), shadow.events.atomic(at), moved.new.into());
            if !is_wanted(event, moved) {
                return;
            }
        }
        bus.write32(DOORBELLS + at, moved.new.into());
    }

    /// Never frees its memory: see [`Shared::leak`].
    pub(crate) fn leak(&mut self) {
        if let Some(shadow) = &mut self.shadow {
            shadow.positions.leak();
            shadow.events.leak();
        }
    }
}

/// Writes a position, and reads the EventIdx after that (D1).
fn announce(position: &AtomicU32, event: &AtomicU32, new: u32) -> u32 {
    position.store(new.to_le(), Ordering::Relaxed);
    // Pairs with the controller's barrier between its write of the EventIdx and its last read of the position.
    fence(Ordering::SeqCst);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier without operands. A fence orders memory among processors only; a device needs the outer domain.
    unsafe {
        std::arch::asm!("dmb osh", options(nostack, preserves_flags))
    };
    u32::from_le(event.load(Ordering::Relaxed))
}

/// Whether the controller wants to be woken (D2).
fn is_wanted(event: u32, Move { old, new, depth, .. }: Move) -> bool {
    let distance = |to: u16| if to >= old { to - old } else { depth - old + to };
    match u16::try_from(event) {
        Ok(event) if event < depth => distance(event) < distance(new),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

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

    /// Where the driver and the controller are, and what both see. Each step is one access to memory.
    #[derive(Clone, Copy, PartialEq, Eq, Hash)]
    struct World {
        /// The driver: submissions left, its position, and its next step.
        left: u8,
        position: u16,
        driver: Driver,
        /// The controller: what it has fetched up to, and its next step.
        fetched: u16,
        controller: Controller,
        /// The words in memory.
        shadow: u16,
        event: u16,
        /// The controller was woken.
        is_woken: bool,
    }

    #[derive(Clone, Copy, PartialEq, Eq, Hash)]
    enum Driver {
        Idle,
        /// The shadow is written; the EventIdx is read next.
        Announced {
            old: u16,
        },
        /// It has to write to the register.
        Wakes,
    }

    #[derive(Clone, Copy, PartialEq, Eq, Hash)]
    enum Controller {
        Asleep,
        /// It writes the EventIdx next.
        Looks,
        /// It reads the shadow next.
        Reads,
    }

    const DEPTH: u16 = 3;

    impl World {
        /// What the driver may do next. `is_early`: it reads the EventIdx before it writes the shadow.
        fn by_driver(mut self, is_early: bool) -> Vec<Self> {
            match self.driver {
                Driver::Idle if self.left == 0 => return Vec::new(),
                // The ring is full.
                Driver::Idle if (self.position + 1) % DEPTH == self.fetched => return Vec::new(),
                Driver::Idle => {
                    let old = self.position;
                    (self.left, self.position) = (self.left - 1, (old + 1) % DEPTH);
                    if !is_early {
                        self.shadow = self.position;
                    }
                    self.driver = if is_early { self.decided(old) } else { Driver::Announced { old } };
                    if is_early && self.driver == Driver::Idle {
                        self.driver = Driver::Announced { old: self.position };
                    }
                }
                Driver::Announced { old } => {
                    self.driver = if is_early { Driver::Idle } else { self.decided(old) };
                    self.shadow = self.position;
                }
                Driver::Wakes => {
                    (self.shadow, self.is_woken, self.driver) = (self.position, true, Driver::Idle);
                }
            }
            vec![self]
        }

        fn decided(&self, old: u16) -> Driver {
            let moved = Move { register: 2, old, new: self.position, depth: DEPTH };
            if is_wanted(self.event.into(), moved) { Driver::Wakes } else { Driver::Idle }
        }

        fn by_controller(mut self) -> Vec<Self> {
            match self.controller {
                Controller::Asleep if !self.is_woken => return Vec::new(),
                Controller::Asleep => (self.is_woken, self.controller) = (false, Controller::Reads),
                Controller::Looks => (self.event, self.controller) = (self.fetched, Controller::Reads),
                Controller::Reads if self.shadow == self.fetched && self.event == self.fetched => {
                    self.controller = Controller::Asleep;
                }
                Controller::Reads => (self.fetched, self.controller) = (self.shadow, Controller::Looks),
            }
            vec![self]
        }
    }

    /// Looks at every order of the accesses of both sides. Says whether one ends with a command that nobody fetches.
    fn loses_a_command(is_early: bool) -> bool {
        let begin = World {
            left: 7,
            position: 0,
            driver: Driver::Idle,
            fetched: 0,
            controller: Controller::Asleep,
            shadow: 0,
            event: 0,
            is_woken: false,
        };
        let (mut seen, mut next, mut is_lost) = (HashSet::from([begin]), vec![begin], false);
        while let Some(world) = next.pop() {
            let after: Vec<_> = world.by_driver(is_early).into_iter().chain(world.by_controller()).collect();
            is_lost |= after.is_empty() && (world.left > 0 || world.fetched != world.position);
            next.extend(after.into_iter().filter(|world| seen.insert(*world)));
        }
        assert!(seen.len() > 100, "{} states", seen.len());
        is_lost
    }

    /// D1. A driver that reads the EventIdx first loses commands: the model sees that.
    #[test]
    fn no_order_of_accesses_loses_a_command() {
        assert!(!loses_a_command(false));
        assert!(loses_a_command(true));
    }
}
