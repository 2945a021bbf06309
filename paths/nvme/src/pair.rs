//! A pair of queues: commands go to the controller by one, completions come back by the other.
//!
//! Both are rings in memory that the controller reads and writes. Each has a doorbell, a register that tells the
//! controller this side's position. A completion is new if its phase bit differs from the last round's (section 4.1).
//! Nothing that the controller writes is trusted before it is checked:
//! - I1 A command's identifier is the number of a slot. A slot is taken from `push` until `pop` returns its completion.
//!   A kept slot (`keep`) is not reused until `release`, because an Abort under way names it.
//! - I2 A completion names this queue and a slot that is taken. Any other is `Error::Broken`, and changes nothing.
//! - I3 There is one slot fewer than entries, and every command that the controller has not fetched holds a slot. A free
//!   slot therefore implies a free entry, with one more that stays empty (section 4.1.2). The head of the submission
//!   queue, a field of each completion, is not needed for that: some controllers report heads that go backwards. Wrong
//!   heads are reported, no more.
//! - I4 `order` has the slots that are taken, in the order in which they were pushed or kept.
//!
//! The controller uses the memory of both until it is stopped, so the owner of a queue stops the controller before
//! dropping the queue.
use std::mem;
use std::sync::atomic::{Ordering, compiler_fence};

use crate::barriers::after_phase;
use crate::bus::Bus;
use crate::doorbells::{Doorbells, Move};
use crate::memory::{Memory, Shared};
use crate::order::Order;
use crate::spec::{COMMAND_BYTES, COMPLETION_BYTES, Command};
use crate::{Error, Status};

/// A finished command.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Completed<T> {
    /// The value that was pushed with it.
    pub(crate) what: T,
    /// The first double word, the answer of some commands.
    pub(crate) answer: u32,
    pub(crate) status: Status,
    /// Whether its head is behind the last one, or beyond the tail.
    pub(crate) has_wrong_head: bool,
}

/// The place of one command.
struct Slot<T> {
    what: Option<T>,
    is_kept: bool,
}

/// A submission queue and its own completion queue. `T` is stored with each command.
pub(crate) struct Pair<T> {
    id: u16,
    depth: u16,
    commands: Shared,
    completions: Shared,
    /// Where the next command goes.
    tail: u16,
    /// The tail that was written to the doorbell.
    rung: u16,
    /// How far the controller has fetched, by its last completion: a hint (I3).
    head: u16,
    /// The next completion.
    next: u16,
    /// The phase bit that the next completion has when it is new.
    phase: bool,
    /// Completions that the controller has not been told of yet.
    untold: u16,
    slots: Box<[Slot<T>]>,
    /// The slots that are neither taken nor kept.
    free: Vec<u16>,
    order: Order,
    /// How often a slot's contents were looked at.
    #[cfg(test)]
    pub(crate) looks: usize,
}

impl<T> Pair<T> {
    /// A pair that holds `depth - 1` commands. The caller creates it in the controller.
    ///
    /// # Panics
    /// If `depth` is below 2.
    pub(crate) fn new(memory: &Memory, id: u16, depth: u16) -> Result<Self, Error> {
        assert!(depth >= 2, "a queue of {depth}");
        let commands = Shared::new(memory, usize::from(depth) * COMMAND_BYTES)?;
        let completions = Shared::new(memory, usize::from(depth) * COMPLETION_BYTES)?;
        let slots = (0..depth - 1).map(|_| Slot { what: None, is_kept: false }).collect();
        let free = (0..depth - 1).rev().collect();
        Ok(Self {
            id,
            depth,
            commands,
            completions,
            tail: 0,
            rung: 0,
            head: 0,
            next: 0,
            phase: true,
            untold: 0,
            slots,
            free,
            order: Order::new(depth - 1),
            #[cfg(test)]
            looks: 0,
        })
    }

    pub(crate) fn id(&self) -> u16 {
        self.id
    }
    pub(crate) fn depth(&self) -> u16 {
        self.depth
    }
    /// The device addresses of both rings.
    pub(crate) fn addrs(&self) -> (u64, u64) {
        (self.commands.addr(), self.completions.addr())
    }
    /// Slots that are taken or kept.
    pub(crate) fn out(&self) -> usize {
        self.slots.len() - self.free.len()
    }
    /// Commands under way.
    pub(crate) fn commands(&self) -> usize {
        self.slots.iter().filter(|slot| slot.what.is_some()).count()
    }
    pub(crate) fn is_full(&self) -> bool {
        self.free.is_empty()
    }
    /// The oldest command under way, by when it was pushed or kept, and its identifier.
    pub(crate) fn oldest(&mut self) -> Option<(u16, &mut T)> {
        #[cfg(test)]
        {
            self.looks += 1;
        }
        let id = self.order.first()?;
        Some((id, self.slots[usize::from(id)].what.as_mut()?))
    }

    /// Keeps a command's slot from being reused after its completion. The command counts as the newest from now on.
    pub(crate) fn keep(&mut self, id: u16) {
        self.slots[usize::from(id)].is_kept = true;
        self.order.remove(id);
        self.order.push(id);
    }

    /// Ends what [`keep`](Self::keep) began.
    pub(crate) fn release(&mut self, id: u16) {
        let slot = &mut self.slots[usize::from(id)];
        if slot.is_kept && slot.what.is_none() {
            self.free.push(id);
        }
        slot.is_kept = false;
    }

    fn after(&self, at: u16) -> u16 {
        if at + 1 == self.depth { 0 } else { at + 1 }
    }
    /// Entries from one place to another.
    fn distance(&self, from: u16, to: u16) -> u16 {
        if to >= from { to - from } else { self.depth - from + to }
    }

    /// The values of commands under way.
    pub(crate) fn whats_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|slot| slot.what.as_mut())
    }

    /// Queues a command. The controller sees it after [`ring`](Self::ring).
    ///
    /// # Panics
    /// If it is full.
    pub(crate) fn push(&mut self, command: Command, what: T) -> u16 {
        assert!(!self.is_full(), "queue {} is full", self.id);
        let id = self.free.pop().expect("a queue that is not full has a free slot");
        for (word, at) in command.with_id(id).0.into_iter().zip(0..) {
            self.commands.write(usize::from(self.tail) * COMMAND_BYTES + 4 * at, word);
        }
        self.slots[usize::from(id)].what = Some(what);
        self.order.push(id);
        self.tail = self.after(self.tail);
        id
    }

    /// Tells the controller about queued commands.
    pub(crate) fn ring(&mut self, bus: &dyn Bus, doorbells: &Doorbells) {
        if self.rung != self.tail {
            let old = mem::replace(&mut self.rung, self.tail);
            let register = 2 * usize::from(self.id);
            doorbells.ring(bus, Move { register, old, new: self.tail, depth: self.depth });
        }
    }

    /// The next completion, if there is one. After the last one, [`thank`](Self::thank) frees their entries.
    ///
    /// # Errors
    /// I2 does not hold for it.
    pub(crate) fn pop(&mut self) -> Result<Option<Completed<T>>, Error> {
        let at = usize::from(self.next) * COMPLETION_BYTES;
        let last = self.completions.read(at + 12);
        if (last >> 16 & 1 == 1) != self.phase {
            return Ok(None);
        }
        after_phase();
        let place = self.completions.read(at + 8);
        let (head, queue) = (place as u16, (place >> 16) as u16);
        let id = last as u16;
        if queue != self.id {
            return Err(self.broken(format!("a completion that names queue {queue}")));
        }
        let slot = self.slots.get_mut(usize::from(id));
        let Some((what, is_kept)) = slot.and_then(|slot| Some((slot.what.take()?, slot.is_kept))) else {
            return Err(self.broken(format!("a completion of command {id}, which is not out")));
        };
        self.order.remove(id);
        if !is_kept {
            self.free.push(id);
        }
        let told = self.distance(self.head, self.rung);
        let has_wrong_head = head >= self.depth || self.distance(self.head, head) > told;
        if !has_wrong_head {
            self.head = head;
        }
        let answer = self.completions.read(at);
        self.next = self.after(self.next);
        self.phase ^= self.next == 0;
        self.untold += 1;
        Ok(Some(Completed { what, answer, status: Status((last >> 17) as u16), has_wrong_head }))
    }

    /// Gives the entries of popped completions back to the controller.
    pub(crate) fn thank(&mut self, bus: &dyn Bus, doorbells: &Doorbells) {
        if self.untold > 0 {
            let untold = mem::take(&mut self.untold);
            let old = (self.next + self.depth - untold % self.depth) % self.depth;
            let register = 2 * usize::from(self.id) + 1;
            // The entries are read before they are given back.
            compiler_fence(Ordering::SeqCst);
            doorbells.ring(bus, Move { register, old, new: self.next, depth: self.depth });
        }
    }

    /// Resets it, and returns the values of commands under way. Only while the controller is stopped.
    pub(crate) fn clear(&mut self) -> Vec<T> {
        self.commands.clear();
        self.completions.clear();
        (self.tail, self.rung, self.head, self.next, self.untold, self.phase) = (0, 0, 0, 0, 0, true);
        self.forget()
    }

    /// Takes the values of commands under way from the slots.
    pub(crate) fn forget(&mut self) -> Vec<T> {
        (self.rung, self.untold) = (self.tail, 0);
        self.free = (0..self.depth - 1).rev().collect();
        self.order.clear();
        self.slots.iter_mut().for_each(|slot| slot.is_kept = false);
        self.slots.iter_mut().filter_map(|slot| slot.what.take()).collect()
    }

    /// Never frees its memory: see [`Shared::leak`].
    pub(crate) fn leak(&mut self) {
        self.commands.leak();
        self.completions.leak();
    }

    fn broken(&self, what: String) -> Error {
        Error::Broken(format!("queue {}: {what}", self.id))
    }
}
