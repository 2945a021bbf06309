//! Requests under way: how many steps each still has on the disk, and the results of finished steps.
use std::io;
use std::time::Instant;

use super::buffer::Buffer;
use super::disk::{Op, Todo, is_want_of_room};
use super::memory::Memory;
use super::path::DataPath;
use crate::nbd::{Command, Fault, Request};

/// A request under way.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) request: Request,
    pub(super) began: Instant,
    /// The bytes of a read, part by part.
    pub(super) parts: Vec<Option<Buffer>>,
    pub(super) fault: Option<Fault>,
    /// Steps on the disk.
    left: usize,
    /// A sync has to follow the other steps.
    owes_sync: bool,
    /// All its steps have begun.
    has_begun_all: bool,
    /// Nobody waits for an answer.
    is_abandoned: bool,
}

impl Flight {
    fn is_done(&self) -> bool {
        self.left == 0 && self.has_begun_all
    }
}

/// One connection's requests.
#[derive(Debug, Default)]
pub(super) struct Flights {
    slots: Vec<Option<Flight>>,
    free: Vec<usize>,
}

impl Flights {
    pub(super) fn count(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// A new request with `steps` steps; no others follow if `is_all`.
    pub(super) fn open(&mut self, request: Request, steps: usize, is_all: bool) -> usize {
        let writes = matches!(request.command, Command::Write | Command::WriteZeroes | Command::Trim);
        let flight = Flight {
            request,
            began: Instant::now(),
            parts: Vec::new(),
            fault: None,
            left: steps,
            owes_sync: request.fua && writes,
            has_begun_all: is_all,
            is_abandoned: false,
        };
        match self.free.pop() {
            Some(number) => {
                self.slots[number] = Some(flight);
                number
            }
            None => {
                self.slots.push(Some(flight));
                self.slots.len() - 1
            }
        }
    }

    fn get(&mut self, number: usize) -> &mut Flight {
        let count = self.slots.len();
        match self.slots.get_mut(number) {
            Some(Some(flight)) => flight,
            _ => panic!("request {number} of {count} is not under way"),
        }
    }

    /// Counts one more step.
    pub(super) fn more(&mut self, number: usize) {
        self.get(number).left += 1;
    }
    pub(super) fn all_begun(&mut self, number: usize) {
        self.get(number).has_begun_all = true;
    }
    pub(super) fn fail(&mut self, number: usize, fault: Fault) {
        self.get(number).fault = Some(fault);
    }
    /// The client will not send the rest of it, and gets no answer.
    pub(super) fn abandon(&mut self, number: usize) {
        let flight = self.get(number);
        (flight.has_begun_all, flight.is_abandoned) = (true, true);
        let _ = self.take_done(number);
    }

    /// True if a sync has to follow, which is counted as a step: the other steps have to be durable. It is a step of
    /// its own, so that a failed write, which concerns its client, can be told from a failed sync, which concerns all
    /// clients.
    pub(super) fn begin_sync(&mut self, number: usize) -> bool {
        let flight = self.get(number);
        let begins = flight.owes_sync && flight.is_done() && flight.fault.is_none() && !flight.is_abandoned;
        if begins {
            (flight.owes_sync, flight.left) = (false, 1);
        }
        begins
    }

    /// Takes the result of a step.
    pub(super) fn step_done(&mut self, number: usize, mut op: Op, result: io::Result<()>, path: &DataPath) {
        let flight = self.get(number);
        flight.left -= 1;
        let result = match (op.todo, result) {
            // Not every file system makes holes, and nobody depends on them.
            (Todo::Punch { .. }, Err(error)) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
            (_, result) => result,
        };
        if let Err(error) = &result {
            flight.fault = Some(fault_of(error));
        }
        if op.todo == Todo::Read && result.is_ok() {
            let from_start = op.at - path.in_file(flight.request.at);
            let decrypted = match op.is_plain {
                true => Ok(()),
                false => path.decrypt(flight.request.at + from_start, &mut op.buffer),
            };
            match decrypted {
                Ok(()) => {
                    let index = from_start as usize / path.memory.part();
                    if flight.parts.len() <= index {
                        flight.parts.resize_with(index + 1, || None);
                    }
                    flight.parts[index] = Some(op.buffer);
                    return;
                }
                Err(_) => flight.fault = Some(Fault::Io),
            }
        }
        path.memory.give_back(op.buffer);
    }

    /// Removes a request whose steps are done. `None` while it has steps, and if nobody waits for it.
    pub(super) fn take_done(&mut self, number: usize) -> Option<Flight> {
        if !self.get(number).is_done() {
            return None;
        }
        self.free.push(number);
        self.slots[number].take().filter(|flight| !flight.is_abandoned)
    }

    /// Removes all requests. Their steps have no owner when they come back.
    pub(super) fn clear(&mut self, memory: &Memory) {
        for flight in self.slots.drain(..).flatten() {
            flight.parts.into_iter().flatten().for_each(|part| memory.give_back(part));
        }
        self.free.clear();
    }
}

/// The protocol's error for an error of the system.
pub(super) fn fault_of(error: &io::Error) -> Fault {
    match error.raw_os_error() {
        _ if is_want_of_room(error) => Fault::NoSpace,
        Some(libc::ENOMEM) => Fault::NoMemory,
        _ => Fault::Io,
    }
}
