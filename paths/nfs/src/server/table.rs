//! The connections that there are. An event names one by its place, and by which of the place's connections it is.
use std::sync::{Arc, PoisonError, RwLock};

use super::connection::Connection;
use super::poller::Token;

const GENERATIONS: u32 = 1 << 31;

#[derive(Default)]
pub(super) struct Table(RwLock<Places>);

#[derive(Default)]
struct Places {
    places: Vec<Place>,
    free: Vec<u32>,
}

struct Place {
    generation: u32,
    connection: Option<Arc<Connection>>,
}

impl Table {
    fn read<T>(&self, read: impl FnOnce(&Places) -> T) -> T {
        read(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
    fn change<T>(&self, change: impl FnOnce(&mut Places) -> T) -> T {
        change(&mut self.0.write().unwrap_or_else(PoisonError::into_inner))
    }
    /// Adds a connection unless there are `max` already.
    pub(super) fn add(&self, max: usize, new: impl FnOnce(Token) -> Connection) -> Option<Arc<Connection>> {
        self.change(|table| {
            let place = match table.free.pop() {
                Some(place) => place,
                None if table.places.len() < max => {
                    table.places.push(Place { generation: 0, connection: None });
                    (table.places.len() - 1) as u32
                }
                None => return None,
            };
            let entry = &mut table.places[place as usize];
            let connection = Arc::new(new(Token { place, generation: entry.generation }));
            entry.connection = Some(connection.clone());
            Some(connection)
        })
    }
    pub(super) fn get(&self, token: Token) -> Option<Arc<Connection>> {
        self.read(|table| {
            let place = table.places.get(token.place as usize)?;
            place.connection.as_ref().filter(|_| place.generation == token.generation).cloned()
        })
    }
    pub(super) fn remove(&self, token: Token) {
        let removed = self.change(|table| {
            let place = table.places.get_mut(token.place as usize)?;
            let connection = place.connection.take_if(|_| place.generation == token.generation)?;
            place.generation = (place.generation + 1) % GENERATIONS;
            table.free.push(token.place);
            Some(connection)
        });
        drop(removed); // Not under the lock.
    }
    pub(super) fn all(&self) -> Vec<Arc<Connection>> {
        self.read(|table| table.places.iter().filter_map(|place| place.connection.clone()).collect())
    }
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.read(|table| table.places.iter().filter(|place| place.connection.is_some()).count())
    }
}
