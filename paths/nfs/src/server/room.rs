//! Room for the data of unfinished WRITEs. A WRITE whose data are not all there yet keeps pages while its connection waits for
//! the rest; this bounds how many, over all connections.
//!
//! # Invariants
//! - R1 A WRITE reserves all its pages at once, before its second page. So one that has begun can be finished, and WRITEs
//!   never wait for each other in a circle. The first page, at most one for each connection, is beyond the bound.
//! - R2 Room is given in the order in which it was asked for, except that R3 lets others pass.
//! - R3 When room is given, an address gets no more than stays free: it has at most half, and leaves the other half to others.
//!   An address that has none gets what is free, and one that has some stops nobody while it waits for more. So connections that
//!   hold room for long stop those of other addresses only if they come from many addresses. An address is an [`Origin`] here.
//! - R4 A connection that is closed does not wait.
//!
//! # Lock
//! The one lock here is a leaf: connections are dropped and armed after it is released.
use std::collections::{HashMap, HashSet, VecDeque};
use std::mem;
use std::sync::{Arc, Mutex, Weak};

use super::connection::{Connection, Origin};
use super::lock;
use super::poller::Token;

#[derive(Debug)]
pub(super) struct Room(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Pages that may still be reserved.
    free: usize,
    /// Those that are reserved, by origin.
    held: HashMap<Origin, usize>,
    waiting: VecDeque<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    connection: Weak<Connection>,
    token: Token,
    origin: Origin,
    pages: usize,
}

/// Pages that a WRITE may keep.
#[derive(Debug)]
pub(super) struct Reserved {
    room: Arc<Room>,
    origin: Origin,
    pages: usize,
}

impl State {
    /// The first one that may have room now.
    fn first(&self) -> Option<usize> {
        let mut passed = HashSet::new();
        for (at, Waiting { origin, pages, .. }) in self.waiting.iter().enumerate() {
            if passed.contains(origin) {
                continue; // Those of one address keep their order.
            }
            let held = self.held.get(origin).copied().unwrap_or(0);
            if held + pages <= self.free {
                return Some(at);
            }
            if *pages > self.free && held == 0 {
                return None; // Smaller ones do not pass it.
            }
            passed.insert(*origin);
        }
        None
    }
    fn give(&mut self, at: usize) -> Option<Waiting> {
        let next = self.waiting.remove(at)?;
        self.free -= next.pages;
        *self.held.entry(next.origin).or_default() += next.pages;
        Some(next)
    }
}

impl Room {
    pub(super) fn new(pages: usize) -> Self {
        Self(Mutex::new(State { free: pages, held: HashMap::new(), waiting: VecDeque::new() }))
    }
    /// Room for `pages`, or `None`: then the connection is granted the room and armed as soon as others leave it.
    pub(super) fn reserve(self: &Arc<Self>, pages: usize, connection: &Arc<Connection>) -> Option<Reserved> {
        let (token, origin) = (connection.token, connection.origin());
        let mut state = lock(&self.0);
        let last = state.waiting.len();
        state.waiting.push_back(Waiting { connection: Arc::downgrade(connection), token, origin, pages });
        if state.first() != Some(last) {
            return None;
        }
        state.give(last)?;
        Some(Reserved { room: self.clone(), origin, pages })
    }
    fn leave(self: &Arc<Self>, origin: Origin, pages: usize) {
        self.change(|state| {
            state.free += pages;
            if let Some(held) = state.held.get_mut(&origin) {
                *held -= pages;
                if *held == 0 {
                    state.held.remove(&origin);
                }
            }
        });
    }
    /// A connection waits no more (R4).
    pub(super) fn forget(self: &Arc<Self>, token: Token) {
        self.change(|state| state.waiting.retain(|waiting| waiting.token != token));
    }
    /// Changes the state, and gives those that wait what there is then.
    fn change(self: &Arc<Self>, change: impl FnOnce(&mut State)) {
        let mut granted = Vec::new();
        let mut state = lock(&self.0);
        change(&mut state);
        while let Some(next) = state.first().and_then(|at| state.give(at)) {
            let reserved = Reserved { room: self.clone(), origin: next.origin, pages: next.pages };
            granted.push((next.connection, reserved));
        }
        drop(state);
        for (connection, reserved) in granted {
            // One that is gone gives its room back by this.
            if let Some(connection) = connection.upgrade() {
                connection.grant(reserved);
            }
        }
    }
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        lock(&self.0).waiting.len()
    }
    #[cfg(test)]
    pub(super) fn free(&self) -> usize {
        lock(&self.0).free
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let pages = mem::take(&mut self.pages);
        self.room.leave(self.origin, pages);
    }
}
