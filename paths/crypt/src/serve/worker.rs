//! A thread that serves some of the clients. It sleeps until a socket, its ring or its inbox has something, and then
//! gives each client a turn.
//!
//! Clients that wait for pages of the pool form a line; only the first takes pages (C5.3). The worker itself sleeps in
//! the pool only while it has no step on the disk, since only it would take those steps back.
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::OwnedFd;

use super::Shared;
use super::connection::{Connection, Context};
use super::disk::{Done, Engine};
use super::socket::Socket;
use super::tally::{Counts, End};

/// How often time limits are checked.
const TICK: Duration = Duration::from_millis(250);
/// How often finished steps are taken before sockets are served again. A disk that answers at once, such as a file in
/// memory, would otherwise let clients that ask all the time keep the worker to themselves.
const ROUNDS: usize = 8;
/// After so long without work, the free memory of requests goes back to the system. Without a client it goes at once.
const QUIET: Duration = Duration::from_secs(10);
const WAKE: u64 = u64::MAX;
const RING: u64 = u64::MAX - 1;

/// A message to a worker.
pub(super) enum Message {
    Client(Socket),
    Stop,
}

struct Client {
    connection: Connection,
    /// The events of its socket that epoll reports; `None` if it is not registered.
    interest: Option<EventFlags>,
    /// The other side has closed, which epoll would report again and again.
    is_hung: bool,
    is_queued: bool,
}

pub(super) struct Worker {
    shared: Arc<Shared>,
    /// One for each volume.
    engines: Vec<Engine>,
    epoll: OwnedFd,
    inbox: Receiver<Message>,
    clients: Vec<Option<Client>>,
    /// Clients that can go on.
    ready: VecDeque<usize>,
    /// Clients that wait for the pool, in order of arrival.
    line: VecDeque<usize>,
    /// It has done a queued step of its own, and there may be others.
    has_more: bool,
    /// When it last had work; `None` if no work came since memory went back.
    worked_at: Option<Instant>,
    stop_at: Option<Instant>,
    counts: Arc<Counts>,
}

/// How many clients a worker has; new clients go to the worker with the fewest.
pub(super) type Load = AtomicUsize;

impl Worker {
    pub(super) fn new(
        shared: Arc<Shared>,
        engines: Vec<Engine>,
        inbox: Receiver<Message>,
        wake: BorrowedFd<'_>,
    ) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        for ring in engines.iter().filter_map(Engine::fd) {
            epoll::add(&epoll, ring, EventData::new_u64(RING), EventFlags::IN)?;
        }
        let (clients, ready, line) = (Vec::new(), VecDeque::new(), VecDeque::new());
        let counts = shared.figures.worker();
        let (has_more, worked_at, stop_at) = (false, None, None);
        Ok(Self { shared, engines, epoll, inbox, clients, ready, line, has_more, worked_at, stop_at, counts })
    }

    /// Serves until it is told to stop and all clients are gone.
    pub(super) fn run(&mut self, wake: BorrowedFd<'_>, load: &Load) -> io::Result<()> {
        let mut events = Vec::with_capacity(64);
        let mut done = Vec::new();
        let mut checked = Instant::now();
        while self.stop_at.is_none() || self.clients.iter().any(Option::is_some) {
            self.sleep(&mut events)?;
            let now = Instant::now();
            if !events.is_empty() {
                self.worked_at = Some(now);
            }
            for event in events.drain(..) {
                match event.data.u64() {
                    WAKE => self.read_inbox(wake, load, now),
                    RING => {}
                    number => self.woken(number as usize, event.flags),
                }
            }
            self.serve(now, &mut done)?;
            if now - checked >= TICK {
                checked = now;
                self.check(now);
            }
            self.bury(load);
        }
        Ok(())
    }

    fn sleep(&self, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        let timeout = if self.ready.is_empty() && !self.has_more { TICK } else { Duration::ZERO };
        let timeout = rustix::time::Timespec { tv_sec: 0, tv_nsec: timeout.subsec_nanos().into() };
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn read_inbox(&mut self, wake: BorrowedFd<'_>, load: &Load, now: Instant) {
        let mut count = [0; 8];
        // The inbox is read whether there was an event or not.
        let _ = rustix::io::read(wake, &mut count);
        while let Ok(message) = self.inbox.try_recv() {
            match message {
                Message::Client(socket) => self.welcome(socket, load, now),
                Message::Stop => {
                    self.stop_at.get_or_insert(now + self.shared.limits.stop);
                    for number in 0..self.clients.len() {
                        if let Some(client) = &mut self.clients[number] {
                            client.connection.drain(now);
                            self.queue(number);
                        }
                    }
                }
            }
        }
    }

    fn welcome(&mut self, socket: Socket, load: &Load, now: Instant) {
        let number = self.clients.iter().position(Option::is_none).unwrap_or_else(|| {
            self.clients.push(None);
            self.clients.len() - 1
        });
        let connection = Connection::new(number, socket, Arc::clone(&self.shared.config), now);
        // Without memory for its buffer, the client is disconnected.
        let Some(mut connection) = connection else {
            load.fetch_sub(1, Relaxed);
            return tracing::warn!(name: "client without memory", "disconnected a client: there is no memory for it");
        };
        let (client, peer) = (self.shared.figures.came.fetch_add(1, Relaxed) + 1, connection.socket().peer());
        connection.tally.welcome(&self.counts, client, peer, now);
        if self.stop_at.is_some() {
            connection.drain(now);
        }
        self.clients[number] = Some(Client { connection, interest: None, is_hung: false, is_queued: false });
        self.queue(number);
    }

    fn queue(&mut self, number: usize) {
        if let Some(Some(client)) = self.clients.get_mut(number)
            && !client.is_queued
        {
            client.is_queued = true;
            self.ready.push_back(number);
        }
    }

    fn woken(&mut self, number: usize, flags: EventFlags) {
        if let Some(Some(client)) = self.clients.get_mut(number) {
            client.is_hung |= flags.intersects(EventFlags::HUP | EventFlags::ERR);
        }
        self.queue(number);
    }

    /// One round: gives a turn to each client that can go on, and takes finished steps from the disk.
    fn serve(&mut self, now: Instant, done: &mut Vec<Done>) -> io::Result<()> {
        self.turns(now);
        let mut has_done_one = false;
        self.has_more = false;
        for round in 1.. {
            for (engine, volume) in self.engines.iter_mut().zip(&self.shared.volumes) {
                engine.reap(&volume.path.disk, done)?;
            }
            if done.is_empty() {
                // Only once, since a socket may have something meanwhile.
                if std::mem::replace(&mut has_done_one, true) {
                    break;
                }
                let mut engines = self.engines.iter_mut().zip(&self.shared.volumes);
                done.extend(engines.find_map(|(engine, volume)| engine.do_one(&volume.path)));
                self.has_more = !done.is_empty();
            }
            if done.is_empty() {
                break;
            }
            // All of them first, so that their pages are free before any client takes pages.
            for step in done.drain(..) {
                let number = step.0.tag.0;
                self.with(number, now, |client, context| client.connection.complete(step, context));
                self.queue(number);
            }
            self.turns(now);
            if round == ROUNDS {
                self.has_more = true;
                break;
            }
        }
        while let Some(&first) = self.line.front() {
            self.turn(first, now);
            if self.line.front() == Some(&first) {
                break;
            }
        }
        Ok(())
    }

    /// Gives a turn to each client that is ready now.
    fn turns(&mut self, now: Instant) {
        for _ in 0..self.ready.len() {
            let Some(number) = self.ready.pop_front() else { break };
            self.turn(number, now);
        }
    }

    fn with(&mut self, number: usize, now: Instant, act: impl FnOnce(&mut Client, &mut Context<'_>)) {
        let Some(Some(client)) = self.clients.get_mut(number) else {
            unreachable!("client {number} is buried with steps on the disk")
        };
        let may_take = self.line.front().is_none_or(|&first| first == number);
        let Self { engines, shared, .. } = self;
        let may_discard = shared.may_discard;
        let tls = shared.tls.as_ref();
        let (number, in_flight) = (client.connection.volume(), engines.iter().map(Engine::in_flight).sum::<usize>());
        let (engine, volume) = (&mut engines[number], &shared.volumes[number]);
        let (path, cache, elsewhere) = (&volume.path, volume.cached.get(), in_flight - engine.in_flight());
        act(client, &mut Context { path, cache, tls, elsewhere, engine, now, may_take, may_discard });
    }

    fn turn(&mut self, number: usize, now: Instant) {
        if self.clients.get(number).is_none_or(Option::is_none) {
            return;
        }
        self.with(number, now, |client, context| {
            client.is_queued = false;
            client.connection.turn(context);
        });
        let Some(Some(client)) = self.clients.get_mut(number) else { return };
        let place = self.line.iter().position(|&other| other == number);
        match (client.connection.is_stalled(), place) {
            (true, None) => self.line.push_back(number),
            (false, Some(place)) => {
                self.line.remove(place);
            }
            _ => {}
        }
        // Epoll reports no more about a socket that the other side closed. The next call in either direction finds the
        // end.
        let meets_the_end = client.connection.wants_input() || client.connection.wants_output();
        if client.connection.is_ready() || (client.is_hung && meets_the_end) {
            self.queue(number);
        }
        self.listen(number);
    }

    /// Tells epoll which events of a client's socket to report.
    fn listen(&mut self, number: usize) {
        let Some(Some(client)) = self.clients.get_mut(number) else { return };
        let connection = &client.connection;
        let mut interest = EventFlags::empty();
        interest.set(EventFlags::IN, connection.wants_input());
        interest.set(EventFlags::OUT, connection.wants_output());
        let wanted = (!client.is_hung && !connection.is_dead()).then_some(interest);
        if wanted == client.interest {
            return;
        }
        let (epoll, socket, data) = (&self.epoll, connection.socket().as_fd(), EventData::new_u64(number as u64));
        let told = match (client.interest, wanted) {
            (None, Some(flags)) => epoll::add(epoll, socket, data, flags),
            (Some(_), Some(flags)) => epoll::modify(epoll, socket, data, flags),
            (_, None) => epoll::delete(epoll, socket),
        };
        client.interest = wanted;
        if told.is_err() {
            // Nothing would report when it can go on.
            client.connection.die(self.shared.path());
        }
    }

    fn check(&mut self, now: Instant) {
        let has_clients = self.clients.iter().any(Option::is_some);
        if self.worked_at.take_if(|at| now - *at >= QUIET || !has_clients).is_some() {
            self.shared.path().memory.allocator().give_back();
        }
        let is_over = self.stop_at.is_some_and(|stop_at| now > stop_at);
        for number in 0..self.clients.len() {
            let Some(client) = &mut self.clients[number] else { continue };
            if is_over {
                client.connection.tally.ends(End::Stopped);
                client.connection.die(self.shared.path());
            }
            client.connection.check(&self.shared.limits, self.shared.path(), now);
            if client.connection.is_dead() {
                self.line.retain(|&other| other != number);
                self.listen(number);
            }
        }
    }

    /// Removes dead clients that have no step on the disk.
    fn bury(&mut self, load: &Load) {
        for number in 0..self.clients.len() {
            let Some(client) = &self.clients[number] else { continue };
            if client.connection.is_dead() && client.connection.steps() == 0 {
                self.line.retain(|&other| other != number);
                // First, so that a client that comes once the log says that this one is gone finds its place free.
                load.fetch_sub(1, Relaxed);
                self.clients[number] = None;
            }
        }
    }
}

/// Runs a worker to its end. An error is kept for the caller of [`super::Server::stop`].
pub(super) fn work(mut worker: Worker, wake: &OwnedFd, load: &Load) {
    let result = worker.run(wake.as_fd(), load);
    if let Err(error) = result {
        let shared = Arc::clone(&worker.shared);
        shared.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::{Mutex, OnceLock, mpsc};

    use pagemill::PAGE_SIZE;

    use super::*;
    use crate::serve::disk::plain_step;
    use crate::serve::fixture::*;
    use crate::serve::memory::Patience;
    use crate::serve::{Served, TimeLimits};

    /// A worker with a pool of `promised` pages and no other pages.
    fn worker(promised: usize, engine: Engine) -> Worker {
        let second = Duration::from_secs(1);
        let shared = Shared {
            volumes: vec![Served { path: path(promised, promised), cached: OnceLock::new() }],
            config: config(),
            tls: None,
            limits: TimeLimits { handshake: second, stall: Some(second), stop: second },
            may_discard: false,
            figures: Default::default(),
            failure: Mutex::new(None),
        };
        let wake = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let (_, letters) = mpsc::channel();
        Worker::new(Arc::new(shared), vec![engine], letters, wake.as_fd()).unwrap()
    }

    #[test]
    fn only_the_first_client_in_line_takes_pages_of_the_pool() {
        let (mut worker, now, load) = (worker(16, Engine::Held(Vec::new())), Instant::now(), Load::new(0));
        let shared = Arc::clone(&worker.shared);
        let held = shared.path().memory.take(8 * PAGE_SIZE, Patience::None).unwrap().unwrap();
        // The first client has a page on the disk, so the worker does not sleep in the pool. The second needs more
        // pages than there are, the third fewer.
        let clients: Vec<_> = [4096, 8 * PAGE_SIZE, 512]
            .map(|len| {
                let (client, server) = UnixStream::pair().unwrap();
                (&client).write_all(&[negotiation(), request(WRITE, len as u32), vec![9; len]].concat()).unwrap();
                load.fetch_add(1, Relaxed);
                worker.welcome(Socket::unix(server).unwrap(), &load, now);
                for _ in 0..3 {
                    worker.serve(now, &mut Vec::new()).unwrap();
                }
                client
            })
            .into();
        assert_eq!((worker.engines[0].in_flight(), &worker.line), (1, &VecDeque::from([1, 2])));
        shared.path().memory.give_back(held);
        worker.serve(now, &mut Vec::new()).unwrap();
        assert_eq!((worker.engines[0].in_flight(), worker.line.len()), (3, 0));
        let Engine::Held(ops) = std::mem::replace(&mut worker.engines[0], Engine::Plain) else { unreachable!() };
        for op in ops {
            let (number, done) = (op.tag.0, plain_step(shared.path(), op));
            worker.with(number, now, |client, context| client.connection.complete(done, context));
        }
        assert_eq!(shared.path().memory.pool().stats().out, 0);
        drop(clients);
    }

    /// A client that sends requests all the time, to a disk that is always done at once, does not starve the others.
    #[test]
    fn a_flood_of_requests_does_not_starve_other_clients() {
        const FLUSH: u16 = 3;
        const FLOOD: usize = 2000;
        let (mut worker, now, load) = (worker(16, Engine::Prompt(Vec::new())), Instant::now(), Load::new(0));
        let clients = [(); 2].map(|()| {
            let (client, server) = UnixStream::pair().unwrap();
            (&client).write_all(&negotiation()).unwrap();
            load.fetch_add(1, Relaxed);
            worker.welcome(Socket::unix(server).unwrap(), &load, now);
            worker.serve(now, &mut Vec::new()).unwrap();
            (&client).read_exact(&mut [0; NEGOTIATED]).unwrap();
            client.set_nonblocking(true).unwrap();
            client
        });
        let answers = |number: usize| {
            let (mut bytes, mut count) = (vec![0; FLOOD * 16], 0);
            while let Ok(n @ 1..) = (&clients[number]).read(&mut bytes) {
                count += n;
            }
            count / 16
        };
        (&clients[0]).write_all(&request(FLUSH, 0).repeat(FLOOD)).unwrap();
        worker.woken(0, EventFlags::IN);
        worker.serve(now, &mut Vec::new()).unwrap();
        (&clients[1]).write_all(&request(FLUSH, 0)).unwrap();
        worker.woken(1, EventFlags::IN);
        worker.serve(now, &mut Vec::new()).unwrap();
        let mut answered = answers(0);
        assert_eq!(answers(1), 1);
        assert!((1..FLOOD).contains(&answered), "{answered} requests were answered before another's only one");
        // The rest is answered without another event.
        for _ in 0..FLOOD {
            assert!(worker.has_more || answered == FLOOD);
            worker.serve(now, &mut Vec::new()).unwrap();
            answered += answers(0);
        }
        assert_eq!(answered, FLOOD);
    }
}
