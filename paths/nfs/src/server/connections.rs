//! The connections that there are. An event names one by its slot, and by which of the slot's connections it is.
use std::sync::{Arc, PoisonError, RwLock};

use super::connection::Connection;
use super::poller::Token;

const GENERATIONS: u32 = 1 << 30;

#[derive(Default)]
pub(super) struct Connections(RwLock<Slots>);

#[derive(Default)]
struct Slots {
    all: Vec<Slot>,
    free: Vec<u32>,
}

struct Slot {
    generation: u32,
    connection: Option<Arc<Connection>>,
}

impl Connections {
    fn read<T>(&self, read: impl FnOnce(&Slots) -> T) -> T {
        read(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
    fn change<T>(&self, change: impl FnOnce(&mut Slots) -> T) -> T {
        change(&mut self.0.write().unwrap_or_else(PoisonError::into_inner))
    }
    /// Adds a connection unless there are `max` already.
    pub(super) fn add(&self, max: usize, new: impl FnOnce(Token) -> Connection) -> Option<Arc<Connection>> {
        self.change(|slots| {
            let slot = match slots.free.pop() {
                Some(free) => free,
                None if slots.all.len() < max => {
                    slots.all.push(Slot { generation: 0, connection: None });
                    (slots.all.len() - 1) as u32
                }
                None => return None,
            };
            let entry = &mut slots.all[slot as usize];
            let connection = Arc::new(new(Token { slot, generation: entry.generation }));
            entry.connection = Some(connection.clone());
            Some(connection)
        })
    }
    pub(super) fn get(&self, token: Token) -> Option<Arc<Connection>> {
        self.read(|slots| {
            let slot = slots.all.get(token.slot as usize)?;
            slot.connection.as_ref().filter(|_| slot.generation == token.generation).cloned()
        })
    }
    pub(super) fn remove(&self, token: Token) {
        let removed = self.change(|slots| {
            let slot = slots.all.get_mut(token.slot as usize)?;
            let connection = slot.connection.take_if(|_| slot.generation == token.generation)?;
            slot.generation = (slot.generation + 1) % GENERATIONS;
            slots.free.push(token.slot);
            Some(connection)
        });
        drop(removed); // Not under the lock.
    }
    pub(super) fn all(&self) -> Vec<Arc<Connection>> {
        self.read(|slots| slots.all.iter().filter_map(|slot| slot.connection.clone()).collect())
    }
    pub(super) fn len(&self) -> usize {
        self.read(|slots| slots.all.len() - slots.free.len())
    }
}
