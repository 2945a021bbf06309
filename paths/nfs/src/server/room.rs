//! Room for the data of unfinished WRITEs. A WRITE whose data are not all there yet keeps pages while its connection waits for
//! the rest; this bounds how many, over all connections.
//!
//! # Invariants
//! - R1 A WRITE reserves all its pages at once, before its second page. So one that has begun can be finished, and WRITEs
//!   never wait for each other in a circle. The first page, at most one for each connection, is beyond the bound.
//! - R2 No address has more than half of the room, or than the largest WRITE needs if that is more. A WRITE that has room must
//!   come in whole within the time after which a silent connection stalls, so nobody keeps room for longer.
//! - R3 Room is given in the order in which it was asked for, but for those whose address has its half: others go before them.
//!
//! # Lock
//! The one lock here is a leaf: connections are dropped and armed after it is released.
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::mem;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, Weak};

use super::connection::Connection;
use super::lock;
use crate::record::DATA_MAX;

/// Pages of the largest WRITE.
pub(super) const LARGEST: usize = DATA_MAX.div_ceil(pagemill::PAGE_SIZE);

#[derive(Debug)]
pub(super) struct Room(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Pages that may still be reserved.
    free: usize,
    /// The most that one address may have.
    share: usize,
    /// What each address has, unless it has nothing.
    has: HashMap<IpAddr, usize>,
    waiting: VecDeque<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    connection: Weak<Connection>,
    peer: IpAddr,
    pages: usize,
}

/// Pages that a WRITE may keep.
#[derive(Debug)]
pub(super) struct Reserved {
    room: Arc<Room>,
    peer: IpAddr,
    pages: usize,
}

impl State {
    /// Whether this would be beyond the share of the address.
    fn is_beyond_share(&self, peer: IpAddr, pages: usize) -> bool {
        self.has.get(&peer).copied().unwrap_or(0) + pages > self.share
    }
    fn take(&mut self, peer: IpAddr, pages: usize) {
        self.free -= pages;
        *self.has.entry(peer).or_default() += pages;
    }
    fn put_back(&mut self, peer: IpAddr, pages: usize) {
        self.free += pages;
        if let Entry::Occupied(mut has) = self.has.entry(peer) {
            *has.get_mut() -= pages;
            if *has.get() == 0 {
                has.remove();
            }
        }
    }
}

impl Room {
    pub(super) fn new(pages: usize) -> Self {
        let share = (pages / 2).max(LARGEST);
        Self(Mutex::new(State { free: pages, share, has: HashMap::new(), waiting: VecDeque::new() }))
    }
    /// Room for `pages`, or `None`: then the connection is granted the room and armed as soon as others leave it.
    pub(super) fn reserve(self: &Arc<Self>, pages: usize, connection: &Arc<Connection>) -> Option<Reserved> {
        let peer = connection.peer.ip();
        let mut state = lock(&self.0);
        // Those of its own address are first, and those who wait within their share.
        let is_behind = state.waiting.iter().any(|it| it.peer == peer || !state.is_beyond_share(it.peer, it.pages));
        if is_behind || state.free < pages || state.is_beyond_share(peer, pages) {
            state.waiting.push_back(Waiting { connection: Arc::downgrade(connection), peer, pages });
            return None;
        }
        state.take(peer, pages);
        Some(Reserved { room: self.clone(), peer, pages })
    }
    fn leave(self: &Arc<Self>, peer: IpAddr, pages: usize) {
        // The last handle of a connection gives room back itself, so none is dropped under the lock.
        let (mut granted, mut kept, mut blocked) = (Vec::new(), Vec::new(), HashSet::new());
        let mut state = lock(&self.0);
        state.put_back(peer, pages);
        let mut at = 0;
        while let Some(&Waiting { ref connection, peer, pages }) = state.waiting.get(at) {
            let is_beyond = blocked.contains(&peer) || state.is_beyond_share(peer, pages);
            match connection.upgrade() {
                Some(strong) if is_beyond => {
                    kept.push(strong);
                    blocked.insert(peer);
                    at += 1;
                }
                Some(strong) if pages > state.free => {
                    kept.push(strong);
                    break;
                }
                Some(strong) => {
                    state.waiting.remove(at);
                    state.take(peer, pages);
                    granted.push((strong, pages));
                }
                None => drop(state.waiting.remove(at)),
            }
        }
        drop(state);
        drop(kept);
        for (connection, pages) in granted {
            let peer = connection.peer.ip();
            connection.grant(Reserved { room: self.clone(), peer, pages });
        }
    }
    #[cfg(test)]
    pub(super) fn free(&self) -> usize {
        lock(&self.0).free
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.room.leave(self.peer, mem::take(&mut self.pages));
    }
}
