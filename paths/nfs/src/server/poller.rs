//! The epoll that all service threads wait on.
//!
//! A registration is armed for one event. So whoever gets an event owns that side of the connection until it arms it again.
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

/// Names a connection in an event: its slot, and which of the slot's connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Token {
    pub(super) slot: u32,
    /// 30 bits: after a billion connections an old event may reach a new one, which it does not hurt.
    pub(super) generation: u32,
}

/// What a thread is woken for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Event {
    Input(Token),
    Output(Token),
    /// The peer sends no more. Whoever gets this does not own the connection's input.
    Left(Token),
    Stop,
}

const STOP: u64 = u64::MAX;

impl Event {
    fn to_data(self) -> EventData {
        let data = |token: Token, side| u64::from(token.slot) << 32 | u64::from(token.generation << 2) | side;
        EventData::new_u64(match self {
            Self::Input(token) => data(token, 0),
            Self::Output(token) => data(token, 1),
            Self::Left(token) => data(token, 2),
            Self::Stop => STOP,
        })
    }
    fn new(data: u64) -> Self {
        let token = Token { slot: (data >> 32) as u32, generation: data as u32 >> 2 };
        match data & 3 {
            0 => Self::Input(token),
            1 => Self::Output(token),
            2 => Self::Left(token),
            _ => Self::Stop,
        }
    }
    fn flags(self) -> EventFlags {
        match self {
            Self::Input(_) => EventFlags::IN | EventFlags::ONESHOT,
            Self::Output(_) => EventFlags::OUT | EventFlags::ONESHOT,
            Self::Left(_) => EventFlags::RDHUP | EventFlags::ONESHOT,
            Self::Stop => EventFlags::IN,
        }
    }
}

#[derive(Debug)]
pub(super) struct Poller {
    epoll: OwnedFd,
    /// Readable once the server stops, and then for good: it wakes every thread.
    stopping: OwnedFd,
}

impl Poller {
    pub(super) fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let stopping = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &stopping, Event::Stop.to_data(), Event::Stop.flags())?;
        Ok(Self { epoll, stopping })
    }
    pub(super) fn add(&self, fd: impl AsFd, event: Event) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, event.to_data(), event.flags())?)
    }
    /// Arms it again. If the connection was closed meanwhile, nothing is armed.
    pub(super) fn arm(&self, fd: impl AsFd, event: Event) {
        let armed = epoll::modify(&self.epoll, fd, event.to_data(), event.flags());
        debug_assert!(matches!(armed, Ok(()) | Err(Errno::NOENT)), "{armed:?}");
    }
    pub(super) fn remove(&self, fd: impl AsFd) {
        // It may be removed already.
        let _ = epoll::delete(&self.epoll, fd);
    }
    /// The next event. One at a time: while this thread serves it, others get those behind it.
    pub(super) fn wait(&self) -> Event {
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }];
        loop {
            match epoll::wait(&self.epoll, &mut events, None) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Event::new(events[0].data.u64()),
                Err(error) => unreachable!("the epoll is open: {error}"),
            }
        }
    }
    pub(super) fn stop(&self) {
        // It can only fail because the count is at its end: then it is readable.
        let _ = rustix::io::write(&self.stopping, &1_u64.to_ne_bytes());
    }
    pub(super) fn stopping(&self) -> impl AsFd + '_ {
        &self.stopping
    }
}
