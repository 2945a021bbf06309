//! Room for the data of unfinished WRITEs. A WRITE whose data are not all there yet keeps pages while its connection waits for
//! the rest; this bounds how many, over all connections.
//!
//! # Invariants
//! - R1 A WRITE reserves all its pages at once, before its second page. So one that has begun can be finished, and WRITEs
//!   never wait for each other in a circle. The first page, at most one for each connection, is beyond the bound.
//! - R2 Room is given in the order in which it was asked for.
//!
//! # Lock
//! The one lock here is a leaf: connections are dropped and armed after it is released.
use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, Mutex, Weak};

use super::connection::Connection;
use super::lock;

#[derive(Debug)]
pub(super) struct Room(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Pages that may still be reserved.
    free: usize,
    waiting: VecDeque<(Weak<Connection>, usize)>,
}

/// Pages that a WRITE may keep.
#[derive(Debug)]
pub(super) struct Reserved {
    room: Arc<Room>,
    pages: usize,
}

impl Room {
    pub(super) fn new(pages: usize) -> Self {
        Self(Mutex::new(State { free: pages, waiting: VecDeque::new() }))
    }
    /// Room for `pages`, or `None`: then the connection is granted the room and armed as soon as others leave it.
    pub(super) fn reserve(self: &Arc<Self>, pages: usize, connection: &Arc<Connection>) -> Option<Reserved> {
        let mut state = lock(&self.0);
        if !state.waiting.is_empty() || state.free < pages {
            state.waiting.push_back((Arc::downgrade(connection), pages));
            return None;
        }
        state.free -= pages;
        Some(Reserved { room: self.clone(), pages })
    }
    fn leave(self: &Arc<Self>, pages: usize) {
        // The last handle of a connection gives room back itself, so none is dropped under the lock.
        let (mut granted, mut refused) = (Vec::new(), None);
        let mut state = lock(&self.0);
        state.free += pages;
        while let Some((connection, pages)) = state.waiting.pop_front() {
            match connection.upgrade() {
                Some(strong) if pages <= state.free => {
                    state.free -= pages;
                    granted.push((strong, pages));
                }
                Some(strong) => {
                    state.waiting.push_front((connection, pages));
                    refused = Some(strong);
                    break;
                }
                None => {}
            }
        }
        drop(state);
        drop(refused);
        for (connection, pages) in granted {
            connection.grant(Reserved { room: self.clone(), pages });
        }
    }
    #[cfg(test)]
    pub(super) fn free(&self) -> usize {
        lock(&self.0).free
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let pages = mem::take(&mut self.pages);
        self.room.leave(pages);
    }
}
