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
use super::connection::Connection;
use super::counters::Why;
use super::hub::Hub;
use super::poller::Event;

/// How long accepting pauses when descriptors or memory run out: a retry at once would fail again.
const PAUSE: Duration = Duration::from_millis(100);

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
        if paused_until.is_none() && accept_all(listener, hub, allows).is_err() {
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

/// Accepts those that wait. The error: this should be tried later.
fn accept_all(listener: &TcpListener, hub: &Hub, allows: &Allows) -> io::Result<()> {
    while !hub.stop.is_cancelled() {
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

/// Closes an idle connection: of the addresses with idle connections, one of that with the most connections; and of those the
/// one that has been idle the longest. So an address that opens many takes places from itself.
fn close_idle(hub: &Hub) {
    let all = hub.connections.all();
    let mut counts = HashMap::<IpAddr, usize>::new();
    all.iter().for_each(|connection| *counts.entry(connection.peer.ip()).or_default() += 1);
    let idle = all.iter().filter_map(|connection| Some((connection, connection.idle_since()?)));
    if let Some((connection, _)) =
        idle.max_by_key(|(connection, since)| (counts[&connection.peer.ip()], Reverse(*since)))
    {
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
        close_idle(hub);
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
