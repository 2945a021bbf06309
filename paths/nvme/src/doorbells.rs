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
use std::sync::atomic::Ordering;

use crate::Error;
use crate::barriers::{announce, before_doorbell};
use crate::bus::Bus;
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

/// Whether the controller wants to be woken (D2).
fn is_wanted(event: u32, Move { old, new, depth, .. }: Move) -> bool {
    let distance = |to: u16| if to >= old { to - old } else { depth - old + to };
    match u16::try_from(event) {
        Ok(event) if event < depth => distance(event) < distance(new),
        _ => true,
    }
}

#[cfg(test)]
mod tests;
