//! The thread that accepts connections, and ends those that have stalled.
use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::set_socket_keepalive;
use rustix::time::Timespec;

use super::clock::TICKS;
use super::connection::{Connection, Origin};
use super::counters::Why;
use super::hub::Hub;
use super::poller::Event;

/// How long accepting pauses when descriptors or memory run out: a retry at once would fail again.
const PAUSE: Duration = Duration::from_millis(100);

/// So many are accepted between two looks at the clock: those that connect without end do not stop it.
const ACCEPTS: usize = 64;

pub(super) type Allows = dyn Fn(IpAddr) -> bool + Send + Sync;

pub(super) fn accept(listener: &TcpListener, hub: &Hub, allows: &Allows) {
    let start = Instant::now();
    let tick = (hub.settings.stalled_after / TICKS).max(Duration::from_millis(1));
    let mut paused_until = None;
    while !hub.stop.is_cancelled() {
        let now = Instant::now();
        let number = ((now - start).as_nanos() / tick.as_nanos()) as u64;
        if hub.clock.set(number) {
            hub.connections.all().iter().for_each(|connection| connection.end_if_stalled(number, hub));
        }
        paused_until = paused_until.filter(|&until| until > now);
        if paused_until.is_none() && accept_some(listener, hub, allows).is_err() {
            hub.counters.accept_pauses.fetch_add(1, Relaxed);
            paused_until = Some(now + PAUSE);
        }
        wait(listener, hub, if paused_until.is_some() { PAUSE.min(tick) } else { tick }, paused_until.is_none());
    }
}

/// Waits for a connection, for the end of the server, or until the time is over.
fn wait(listener: &TcpListener, hub: &Hub, time: Duration, accepts: bool) {
    let stopping = hub.poller.stopping();
    let mut events = [PollFd::new(&stopping, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
    let watched = if accepts { 2 } else { 1 };
    let time = Timespec::try_from(time).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
    // The result is not needed: the loop checks the clock, the end and the listener anyway.
    let _ = poll(&mut events[..watched], Some(&time));
}

/// Accepts some of those that wait. The error: this should be tried later.
fn accept_some(listener: &TcpListener, hub: &Hub, allows: &Allows) -> io::Result<()> {
    for _ in 0..ACCEPTS {
        match listener.accept() {
            // An IPv4 peer of a socket for both families is named by its IPv4 address.
            Ok((socket, peer)) if allows(peer.ip().to_canonical()) => {
                add(hub, socket, SocketAddr::new(peer.ip().to_canonical(), peer.port()))?;
            }
            Ok(_) => drop(hub.counters.refused_peers.fetch_add(1, Relaxed)),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock => return Ok(()),
                ErrorKind::ConnectionAborted | ErrorKind::Interrupted => {}
                _ => return Err(error),
            },
        }
    }
    Ok(())
}

/// Closes a connection for a newcomer: one of the origin with the most, if that has more than the newcomer's. Of those it is the
/// one that has been idle the longest; one that is not idle only if the origin has more than half of all places. So an origin
/// that opens many takes places from itself, and has no more than half of them if others want them.
fn make_place(hub: &Hub, newcomer: Origin) {
    let all = hub.connections.all();
    let mut counts = HashMap::<Origin, usize>::new();
    all.iter().for_each(|connection| *counts.entry(connection.origin()).or_default() += 1);
    let own = counts.get(&newcomer).copied().unwrap_or(0);
    let closable = all.iter().filter_map(|connection| {
        let (origin, is_idle) = (connection.origin(), connection.is_idle());
        let count = counts[&origin];
        let has_too_many = count > hub.settings.connections / 2 && count > own + 1;
        let may_close = if is_idle { count > own || origin == newcomer } else { has_too_many };
        may_close.then(|| (connection, (count, is_idle, Reverse(connection.used_at()))))
    });
    if let Some((connection, _)) = closable.max_by_key(|&(_, order)| order) {
        connection.close(hub, Why::Idle);
    }
}

fn add(hub: &Hub, socket: TcpStream, peer: SocketAddr) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    // Replies go out as they are made; a peer may be gone already.
    let _ = socket.set_nodelay(true);
    // A peer that vanished while it was idle keeps its place for two hours, and not for good.
    let _ = set_socket_keepalive(&socket, true);
    if hub.connections.len() >= hub.settings.connections {
        make_place(hub, Origin::new(peer));
    }
    let new = |token| Connection::new(token, socket, peer, hub);
    let Some(connection) = hub.connections.add(hub.settings.connections, new) else {
        hub.counters.refused_full.fetch_add(1, Relaxed);
        return Ok(());
    };
    hub.counters.accepted.fetch_add(1, Relaxed);
    let added = hub.poller.add(connection.socket.as_fd(), Event::Input(connection.token));
    if added.is_err() {
        connection.close(hub, Why::Broken);
    }
    added
}
