//! Accepting clients, and stopping.
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use pagemill::PageCount;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::OwnedFd;

use super::cached;
use super::connection::TimeLimits;
use super::crew::Crew;
use super::disk::{Engine, Way};
use super::figures::Figures;
use super::path::DataPath;
use super::ring::Ring;
use super::socket::Socket;
use super::tls::TlsServer;
use super::worker::{Load, Message, Worker, work};
use super::{MemoryStats, Served, Shared};
use crate::nbd::{Config, Tls};

/// How long to wait before accepting again when the system has no descriptor left.
const PAUSE: Duration = Duration::from_millis(100);

/// A listening socket.
#[derive(Debug)]
pub enum Listener {
    /// On this machine.
    Unix(UnixListener),
    /// From any machine that reaches the address.
    Tcp(TcpListener),
}

impl Listener {
    fn accept(&self) -> io::Result<Socket> {
        match self {
            Self::Unix(listener) => Socket::unix(listener.accept()?.0),
            Self::Tcp(listener) => Socket::tcp(listener.accept()?.0),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

/// How a server serves.
#[derive(Clone, Debug)]
pub struct Options {
    /// The exports, one for each volume.
    pub config: Config,
    /// The TLS certificates, if `config` offers or requires TLS.
    pub tls: Option<TlsServer>,
    /// Threads, at least one.
    pub threads: usize,
    /// How the disk is accessed.
    pub way: Way,
    /// The most clients at a time; more are disconnected.
    pub max_connections: usize,
    /// Time limits of clients.
    pub limits: TimeLimits,
    /// Whether trimming makes holes. Holes show which parts of the volume are in use.
    pub may_discard: bool,
}

struct Hand {
    inbox: Sender<Message>,
    wake: Arc<OwnedFd>,
    load: Arc<Load>,
    thread: JoinHandle<()>,
}

impl Hand {
    fn tell(&self, message: Message) {
        // A worker that failed takes no message; the client is then disconnected.
        if self.inbox.send(message).is_ok() {
            // If the counter is full, the worker is awake anyway.
            let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        }
    }
}

/// Volumes that are being served. Dropping it stops it like [`Server::stop`], but errors are lost.
pub struct Server {
    shared: Arc<Shared>,
    hands: Vec<Hand>,
    /// After the hands, so that it is dropped when the workers have ended.
    crew: Crew,
    max_connections: usize,
    /// How each disk is accessed.
    ways: Vec<String>,
}

impl Server {
    /// Starts the threads. Clients come in by [`Server::accept`].
    ///
    /// # Errors
    /// What the system says when threads start, or to the ring that [`Way::Uring`] demands;
    /// [`io::ErrorKind::InvalidInput`] if TLS is offered without `tls`, or the other way round.
    pub fn start(path: DataPath, options: Options) -> io::Result<Self> {
        Self::start_cached(path, options, None)
    }

    /// The same, with up to `cache` pages of plain data kept for reads. They come from the allocator of the path's memory.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start_cached(path: DataPath, options: Options, cache: Option<PageCount>) -> io::Result<Self> {
        Self::start_all(vec![path], options, cache)
    }

    /// The same for several volumes, one for each export of the configuration. They share one memory, a clone of which
    /// each path has.
    ///
    /// # Errors
    /// As [`Server::start`], and [`io::ErrorKind::InvalidInput`] unless there are as many exports as volumes, at least one.
    pub fn start_all(mut paths: Vec<DataPath>, options: Options, cache: Option<PageCount>) -> io::Result<Self> {
        let Options { config, tls, threads, way, max_connections, limits, may_discard } = options;
        if tls.is_some() != (config.tls != Tls::None) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "TLS is offered without a key, or has one for nothing",
            ));
        }
        if paths.is_empty() || paths.len() != config.exports.len() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "there are more exports than volumes, or fewer"));
        }
        if paths.len() > 1 {
            for (path, export) in paths.iter_mut().zip(&config.exports) {
                path.disk.name_export(&export.name);
            }
        }
        let volumes = paths.into_iter().map(|path| Served { path, cached: OnceLock::new() }).collect();
        let (config, failure) = (Arc::new(config), Mutex::new(None));
        let figures = Figures::default();
        let shared = Shared { volumes, config, tls, limits, may_discard, figures, failure };
        let (shared, hands, crew) = (Arc::new(shared), Vec::new(), Crew::new());
        if let Some(pages) = cache {
            cached::open(&shared, pages)?;
        }
        let mut server = Self { shared, hands, crew, max_connections, ways: Vec::new() };
        let processors = thread::available_parallelism().map_or(1, usize::from);
        for number in 0..threads.max(1) {
            let (mut engines, mut is_plain) = (Vec::new(), false);
            server.ways.clear();
            for volume in 0..server.shared.volumes.len() {
                let (engine, said) = server.engine(way, volume)?;
                server.ways.push(said);
                let is_this = matches!(engine, Engine::Plain);
                is_plain |= is_this;
                let helped = is_this && threads.min(processors) > 1;
                engines.push(if helped { Engine::Helped(server.crew.help(volume)?) } else { engine });
            }
            let (inbox, letters) = channel();
            let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
            let load = Arc::new(Load::new(0));
            let worker = Worker::new(Arc::clone(&server.shared), engines, letters, wake.as_fd())?;
            let (their_wake, their_load) = (Arc::clone(&wake), Arc::clone(&load));
            let thread = thread::Builder::new().name(format!("crypt-{number}"));
            let thread = thread.spawn(move || work(worker, &their_wake, &their_load))?;
            server.hands.push(Hand { inbox, wake, load, thread });
            // With one thread there is no crew. More threads than processors keep clients apart, and help nobody.
            if is_plain && (1..processors).contains(&number) {
                server.crew.join(&server.shared)?;
            }
        }
        Ok(server)
    }

    /// A thread's engine for a volume's disk, and its description.
    fn engine(&self, way: Way, volume: usize) -> io::Result<(Engine, String)> {
        let path = &self.shared.volumes[volume].path;
        if let Some(far) = path.disk.far() {
            let count = far.links();
            return match way {
                Way::Auto => Ok((Engine::Far(self.crew.help(volume)?), format!("by NBD, {count} connections"))),
                _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "--io is for a file or a block device")),
            };
        }
        let plain = |why: String| Ok((Engine::Plain, format!("by pread and pwrite{why}")));
        if way == Way::Plain {
            return plain(String::new());
        }
        if way == Way::Auto && !path.disk.is_asynchronous() {
            return plain(": its file system, in memory, has no way to be asked and to answer later".to_owned());
        }
        match Ring::new() {
            Ok(ring) => Ok((Engine::Ring(Box::new(ring)), "by io_uring".to_owned())),
            Err(error) if way == Way::Auto => plain(format!(": the system refuses io_uring ({error})")),
            Err(error) => Err(error),
        }
    }

    /// How the disk of each volume is accessed, in a few words.
    #[must_use]
    pub fn ways(&self) -> Vec<String> {
        let way = |(volume, way): (&Served, &String)| match &volume.path.disk {
            disk if disk.far().is_some() => way.clone(),
            disk if disk.is_direct() => format!("{way}, past the system's cache"),
            _ => format!("{way}, through the system's cache"),
        };
        self.shared.volumes.iter().zip(&self.ways).map(way).collect()
    }

    /// Statistics of the server's memory.
    #[must_use]
    pub fn memory_stats(&self) -> MemoryStats {
        self.shared.path().memory.stats()
    }

    /// What appends the server's own figures to a text, as Prometheus reads them, as long as the server is there.
    ///
    /// Clients, requests, bytes and errors by kind, the time that requests took, and the state of each disk.
    ///
    /// ```
    /// use pagemill_crypt::serve::Server;
    /// use pagemill_watch::StatsServer;
    /// fn show(server: &Server, stats: &StatsServer) {
    ///     stats.show_text(server.figures());
    /// }
    /// ```
    pub fn figures(&self) -> impl Fn(&mut String) + Send + Sync + 'static {
        let shared = Arc::downgrade(&self.shared);
        move |text| {
            if let Some(shared) = shared.upgrade() {
                let names = shared.config.exports.iter().map(|export| export.name.as_str());
                let disks = shared.volumes.iter().map(|volume| &volume.path.disk);
                shared.figures.write(names.zip(disks), text);
            }
        }
    }

    /// The data path of the first volume.
    #[must_use]
    pub fn path(&self) -> &DataPath {
        self.shared.path()
    }

    /// The number of clients.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.hands.iter().map(|hand| hand.load.load(Relaxed)).sum()
    }

    /// Accepts clients until `stop` becomes readable, or a thread has failed.
    ///
    /// # Errors
    /// What the system says about the listener.
    pub fn accept(&self, listener: &Listener, stop: BorrowedFd<'_>) -> io::Result<()> {
        match listener {
            Listener::Unix(listener) => listener.set_nonblocking(true)?,
            Listener::Tcp(listener) => listener.set_nonblocking(true)?,
        }
        loop {
            let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::from_borrowed_fd(stop, PollFlags::IN)];
            let second = rustix::time::Timespec { tv_sec: 1, tv_nsec: 0 };
            match poll(&mut fds, Some(&second)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if !fds[1].revents().is_empty() || self.hands.iter().any(|hand| hand.thread.is_finished()) {
                return Ok(());
            }
            if fds[0].revents().is_empty() {
                continue;
            }
            match listener.accept() {
                Ok(socket) => self.welcome(socket),
                Err(error) if error.raw_os_error().is_some_and(is_shortage) => {
                    tracing::warn!(name: "clients wait", why = %error, "clients wait: the system has no descriptor left");
                    thread::sleep(PAUSE);
                }
                // The client was gone before it was accepted.
                Err(error) => {
                    tracing::debug!(name: "client lost", why = %error, "a client was gone before it was accepted")
                }
            }
        }
    }

    /// Gives a client to the thread that has the fewest clients. Clients beyond the limit are disconnected.
    fn welcome(&self, socket: Socket) {
        if self.connections() >= self.max_connections {
            self.shared.figures.refused.fetch_add(1, Relaxed);
            let (peer, most) = (socket.peer(), self.max_connections);
            tracing::warn!(name: "client refused", %peer, most, "refused a client: there are --max-connections already");
            return;
        }
        if let Some(hand) = self.hands.iter().min_by_key(|hand| hand.load.load(Relaxed)) {
            hand.load.fetch_add(1, Relaxed);
            hand.tell(Message::Client(socket));
        }
    }

    /// Finishes and answers the requests that were begun, and returns when all written data is on the disk.
    ///
    /// # Errors
    /// The error that stopped a thread, or an error of the disk.
    pub fn stop(mut self) -> io::Result<MemoryStats> {
        let has_panicked = self.end();
        let failure = self.shared.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        let synced = self.sync_all();
        if has_panicked {
            return Err(io::Error::other("a thread has panicked"));
        }
        failure.map_or(Ok(()), Err).and(synced)?;
        Ok(self.memory_stats())
    }

    /// Syncs all disks, also if one fails, whose error it returns, with its export's name if there are several.
    fn sync_all(&self) -> io::Result<()> {
        let mut result = Ok(());
        for Served { path: DataPath { disk, .. }, .. } in &self.shared.volumes {
            result = result.and(disk.sync().map_err(|why| match &disk.health.export {
                Some(export) => io::Error::new(why.kind(), format!("the export {export:?}: {why}")),
                None => why,
            }));
        }
        result
    }

    /// Returns when the threads have ended; true if one of them has panicked.
    fn end(&mut self) -> bool {
        self.hands.iter().for_each(|hand| hand.tell(Message::Stop));
        // All threads are joined, even if the first one panicked.
        let ends = self.hands.drain(..).map(|hand| hand.thread.join());
        let has_panicked = ends.fold(false, |has_panicked, end| has_panicked | end.is_err());
        for file in self.shared.volumes.iter().filter_map(|volume| volume.cached.get()) {
            // Also those that are still being read ahead.
            cached::forget(file, 0..u64::MAX);
        }
        has_panicked
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let has_threads = !self.hands.is_empty();
        self.end();
        if has_threads {
            // Errors are reported by `stop` only.
            let _ = self.sync_all();
        }
    }
}

fn is_shortage(errno: i32) -> bool {
    matches!(errno, libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
}
