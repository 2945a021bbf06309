//! The listening socket and the one thread that answers on it.
//!
//! The thread sleeps in `poll` until a client connects, writes, can be sent more, or is due for its next line. Without clients
//! it never wakes. Locks: `Shown::shown`, `Shown::pools` and `Shown::texts`; no other lock is taken under them.
use crate::connection::{Connection, Form, Protocol};
use crate::socket_file::SocketFile;
use crate::{Snapshot, json, prometheus};
use pagemill::{Allocator, DmaPool, Mempool, MempoolStats, Source, WeakAllocator, WeakDmaPool};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// The most clients at a time. Further ones wait in the system's queue until one leaves; silent clients are soon closed.
const CLIENTS_MAX: usize = 64;
/// How long no client is accepted after the system had no descriptor left.
const PAUSE: Duration = Duration::from_millis(100);

/// A socket on which `pagemill top`, or any scraper, can watch this process. Made by [`serve_stats`], [`StatsServer::bind`] or
/// [`StatsServer::bind_http`]; dropping it ends its thread and removes the file.
///
/// A client of a socket with a path sends one line. `json` and `prometheus` get one answer; `watch 1000` gets a line with a JSON object every 1000
/// milliseconds, until the client closes. A client of an address asks by HTTP.
///
/// It keeps no allocator or pool alive: each is shown as long as a handle of it exists (while it composes an answer, the server
/// holds one, too). The child of a fork is not served: there, all methods do nothing. It keeps neither the address nor connections
/// when the server is dropped in the parent.
#[derive(Debug)]
pub struct StatsServer {
    place: Place,
    /// The process that it belongs to: in the child of a fork there is no thread.
    pid: u32,
    shared: Arc<Shown>,
    /// Shutting it down ends the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

/// Serves the figures of [`Allocator::global`], as `default`, on a socket at this path, which only this user may open.
///
/// ```
/// use std::io::{Read, Write};
/// let path = std::env::temp_dir().join(format!("pagemill-example-{}", std::process::id()));
/// let server = pagemill_watch::serve_stats(&path)?;
/// let mut client = std::os::unix::net::UnixStream::connect(&path)?;
/// client.write_all(b"prometheus\n")?;
/// let mut text = String::new();
/// client.read_to_string(&mut text)?;
/// assert!(text.contains("pagemill_zone_free_pages{allocator=\"default\""));
/// drop(server);
/// assert!(!path.exists());
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
/// As [`StatsServer::bind`].
pub fn serve_stats(path: impl AsRef<Path>) -> io::Result<StatsServer> {
    let server = StatsServer::bind(path)?;
    server.show("default", Allocator::global());
    Ok(server)
}

impl StatsServer {
    /// Serves on a socket at this path, which only this user may open (mode 0600). It shows no allocator yet.
    ///
    /// # Errors
    /// `AddrInUse`: another server answers there. `AlreadyExists`: the path is a file that is no socket; a socket that a dead
    /// process left behind is replaced. Otherwise the system's, for a new file, socket or thread.
    pub fn bind(path: impl AsRef<Path>) -> io::Result<Self> {
        let (listener, file) = SocketFile::make(path.as_ref())?;
        listener.set_nonblocking(true)?;
        Self::start(listener.into(), Place::Socket(file), Protocol::Line)
    }

    /// Answers `GET /metrics` by HTTP on this address, for Prometheus. Everyone who reaches the address may read the figures:
    /// there is neither a password nor encryption. So choose one of this machine, unless the network is trusted. With the port 0,
    /// the system chooses one: see [`address`](Self::address). It shows no allocator yet.
    ///
    /// # Errors
    /// `AddrInUse`, and whatever else the system says about the address, or about a new socket or thread.
    ///
    /// ```
    /// use std::io::{Read, Write};
    /// let server = pagemill_watch::StatsServer::bind_http("127.0.0.1:0")?;
    /// server.show("default", pagemill::Allocator::global());
    /// let mut client = std::net::TcpStream::connect(server.address().unwrap())?;
    /// client.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
    /// let mut answer = String::new();
    /// client.read_to_string(&mut answer)?;
    /// assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains("pagemill_zone_free_pages"));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn bind_http(address: impl ToSocketAddrs) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Self::start(listener.into(), Place::Address(address), Protocol::Http)
    }

    fn start(listener: OwnedFd, place: Place, protocol: Protocol) -> io::Result<Self> {
        let listener = Listener(listener);
        let (stop, stopped) = UnixStream::pair()?;
        let shared = Arc::new(Shown::new());
        let theirs = Arc::clone(&shared);
        let thread = Builder::new().name("pagemill-stats".into());
        let thread = thread.spawn(move || serve(&listener.0, protocol, &stopped, &theirs))?;
        Ok(Self { place, pid: std::process::id(), shared, stop: Some(stop), thread: Some(thread) })
    }

    fn is_ours(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Shows an allocator under this name until its last handle is gone; replaces the allocator that had the name.
    ///
    /// ```
    /// use pagemill::Allocator;
    /// use pagemill_watch::StatsServer;
    /// # let path = std::env::temp_dir().join(format!("pagemill-shown-{}", std::process::id()));
    /// let server = StatsServer::bind(&path)?;
    /// let allocator = Allocator::builder().pages(64).build().unwrap();
    /// server.show("requests", &allocator);
    /// allocator.close().unwrap(); // it is not shown any more
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn show(&self, name: impl Into<String>, allocator: &Allocator) {
        if self.is_ours() {
            let name = name.into();
            let mut shown = self.shared.shown();
            // Removes closed ones: a program may show many, one after the other, each under its own name.
            shown.retain(|(_, allocator)| !allocator.is_closed());
            match shown.iter_mut().find(|(other, _)| *other == name) {
                Some((_, shown)) => *shown = allocator.downgrade(),
                None => shown.push((name, allocator.downgrade())),
            }
        }
    }
    /// Shows a pool under this name, with the allocator that is shown as `allocator`, until it is gone; replaces the pool that
    /// had the name.
    ///
    /// ```
    /// use pagemill::{Allocator, Mempool};
    /// use pagemill_watch::StatsServer;
    /// use std::sync::Arc;
    /// # let path = std::env::temp_dir().join(format!("pagemill-pool-{}", std::process::id()));
    /// let server = StatsServer::bind(&path)?;
    /// let allocator = Allocator::builder().pages(64).build().unwrap();
    /// server.show("requests", &allocator);
    /// let pool = Arc::new(Mempool::pages(&allocator, 16).unwrap());
    /// server.show_pool("requests", "writes", &pool);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// Drop the server before you take the pool out of its `Arc` or close its allocator: while it composes an answer, the server
    /// has the pool too.
    pub fn show_pool<S>(&self, allocator: impl Into<String>, name: impl Into<String>, pool: &Arc<Mempool<S>>)
    where
        S: Source + Send + Sync + 'static,
    {
        let pool = Arc::clone(pool) as Arc<dyn Pool>;
        self.enter((allocator.into(), name.into()), AnyPool::Mempool(Arc::downgrade(&pool)));
    }
    /// Shows a pool of blocks for a device, in the same way.
    ///
    /// ```
    /// use pagemill::{Allocator, Device, DmaPool, Identity};
    /// use pagemill_watch::StatsServer;
    /// let allocator = Allocator::builder().pages(64).build().unwrap();
    /// let device = Device::new(&allocator, Identity).unwrap();
    /// let pool = DmaPool::create("commands", &device, 64, 64, 0).unwrap();
    /// let server = StatsServer::bind_http("127.0.0.1:0")?;
    /// server.show("drive", &allocator);
    /// server.show_dma_pool("drive", pool.name(), &pool);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn show_dma_pool(&self, allocator: impl Into<String>, name: impl Into<String>, pool: &DmaPool) {
        self.enter((allocator.into(), name.into()), AnyPool::Dma(pool.downgrade()));
    }
    fn enter(&self, key: (String, String), pool: AnyPool) {
        if self.is_ours() {
            let mut pools = self.shared.pools();
            pools.retain(|(other, pool)| *other != key && !pool.is_gone());
            pools.push((key, pool));
        }
    }
    /// Shows figures of the program's own: each answer to Prometheus ends with what `text` appends, in the format of
    /// [`prometheus`] (version 0.0.4: `# HELP`, `# TYPE`, and a line for each sample, all ending in line
    /// feeds). `text` runs in the server's thread, so it should not wait. JSON does not have them.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    /// let server = pagemill_watch::StatsServer::bind_http("127.0.0.1:0")?;
    /// let served = Arc::new(AtomicU64::new(0));
    /// let counted = Arc::clone(&served);
    /// server.show_text(move |text| {
    ///     text.push_str("# HELP shop_served_total Customers.\n# TYPE shop_served_total counter\n");
    ///     text.push_str(&format!("shop_served_total {}\n", counted.load(Relaxed)));
    /// });
    /// # use std::io::{Read, Write};
    /// # served.store(7, Relaxed);
    /// # let mut client = std::net::TcpStream::connect(server.address().unwrap())?;
    /// # client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n")?;
    /// # let mut answer = String::new();
    /// # client.read_to_string(&mut answer)?;
    /// # assert!(answer.ends_with("counter\nshop_served_total 7\n"), "{answer}");
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn show_text(&self, text: impl Fn(&mut String) + Send + Sync + 'static) {
        if self.is_ours() {
            self.shared.texts().push(Arc::new(text));
        }
    }
    /// Stops showing the allocator of this name.
    pub fn hide(&self, name: &str) {
        if self.is_ours() {
            self.shared.shown().retain(|(other, _)| other != name);
        }
    }
    /// The path of the socket, unless it is an address.
    pub fn path(&self) -> Option<&Path> {
        match &self.place {
            Place::Socket(file) => Some(file.path()),
            Place::Address(_) => None,
        }
    }
    /// The address of the socket, unless it is a path.
    pub fn address(&self) -> Option<SocketAddr> {
        match self.place {
            Place::Socket(_) => None,
            Place::Address(address) => Some(address),
        }
    }
}

impl Drop for StatsServer {
    fn drop(&mut self) {
        if self.is_ours() {
            if let Some(stop) = self.stop.take() {
                // Closing it would not be seen while a forked child has a copy. Refused, the thread has ended already.
                let _ = stop.shutdown(std::net::Shutdown::Both);
            }
            if let Some(thread) = self.thread.take() {
                // If it panicked, the panic hook has reported that.
                let _ = thread.join();
            }
        }
    }
}

/// The socket that clients connect to. Dropping it refuses them, also if a forked child has a copy of the descriptor.
struct Listener(OwnedFd);

impl Drop for Listener {
    fn drop(&mut self) {
        // Closing the descriptor would leave the address in use, and clients waiting for an answer, while the child lives.
        let _ = shutdown(&self.0, Shutdown::Both);
    }
}

/// Where a server listens.
#[derive(Debug)]
enum Place {
    Socket(SocketFile),
    Address(SocketAddr),
}

/// A pool of any kind of element.
trait Pool: Send + Sync {
    fn stats(&self) -> MempoolStats;
}

impl<S: Source + Send + Sync> Pool for Mempool<S> {
    fn stats(&self) -> MempoolStats {
        Mempool::stats(self)
    }
}

/// A pool that is shown, which this does not keep.
#[derive(Clone)]
enum AnyPool {
    Mempool(Weak<dyn Pool>),
    Dma(WeakDmaPool),
}

impl AnyPool {
    fn is_gone(&self) -> bool {
        match self {
            Self::Mempool(pool) => pool.strong_count() == 0,
            Self::Dma(pool) => pool.is_gone(),
        }
    }
    /// Adds the pool to the snapshot of its allocator, if it is still there.
    fn add_to(&self, seen: Snapshot, name: String) -> Snapshot {
        match self {
            Self::Mempool(pool) => match pool.upgrade() {
                Some(pool) => seen.with_pool(name, pool.stats()),
                None => seen,
            },
            Self::Dma(pool) => match pool.stats() {
                Some(stats) => seen.with_dma_pool(name, stats),
                None => seen,
            },
        }
    }
}

/// The names of the allocator and of the pool, and the pool.
type ShownPool = ((String, String), AnyPool);

/// Appends figures of the program's own.
type OwnText = Arc<dyn Fn(&mut String) + Send + Sync>;

/// The state that the thread and the handle share.
struct Shown {
    pools: Mutex<Vec<ShownPool>>,
    shown: Mutex<Vec<(String, WeakAllocator)>>,
    texts: Mutex<Vec<OwnText>>,
    program: String,
    start: Instant,
}

impl core::fmt::Debug for Shown {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let pools: Vec<_> = self.pools().iter().map(|(name, _)| name.clone()).collect();
        f.debug_struct("Shown").field("shown", &self.shown).field("pools", &pools).finish_non_exhaustive()
    }
}

impl Shown {
    fn new() -> Self {
        let program = std::env::args_os().next().unwrap_or_default();
        let program = Path::new(&program).file_name().unwrap_or_default().to_string_lossy().into_owned();
        Self {
            shown: Mutex::default(),
            pools: Mutex::default(),
            texts: Mutex::default(),
            program,
            start: Instant::now(),
        }
    }

    fn shown(&self) -> MutexGuard<'_, Vec<(String, WeakAllocator)>> {
        // A panic under the lock leaves the list consistent.
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pools(&self) -> MutexGuard<'_, Vec<ShownPool>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn texts(&self) -> MutexGuard<'_, Vec<OwnText>> {
        self.texts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn snapshot(&self, name: &str, allocator: &Allocator) -> Snapshot {
        let pools = self.pools().clone();
        let pools = pools.into_iter().filter(|((of, _), _)| of == name);
        pools.fold(Snapshot::of(name, allocator), |seen, ((_, name), pool)| pool.add_to(seen, name))
    }

    fn answer(&self, form: Form) -> Vec<u8> {
        let shown = self.shown().clone();
        let live = shown.iter().filter_map(|(name, allocator)| Some((name, allocator.upgrade()?)));
        let seen: Vec<_> = live.map(|(name, allocator)| self.snapshot(name, &allocator)).collect();
        match form {
            Form::Json => json::line(&self.program, self.start.elapsed(), &seen),
            Form::Prometheus => {
                let (mut answer, texts) = (prometheus(&seen), self.texts().clone());
                texts.iter().for_each(|text| text(&mut answer));
                answer.into_bytes()
            }
        }
    }
}

/// The thread's main function.
fn serve(listener: &OwnedFd, protocol: Protocol, stopped: &UnixStream, shared: &Shown) {
    let render = |form| shared.answer(form);
    let mut clients: Vec<Connection> = Vec::new();
    let mut closed_until = None;
    loop {
        let has_room = clients.len() < CLIENTS_MAX && closed_until.is_none();
        let knocks = if has_room { PollFlags::IN } else { PollFlags::empty() };
        let doors = [PollFd::new(stopped, PollFlags::IN), PollFd::new(listener, knocks)];
        let mut polled: Vec<_> = doors.into_iter().chain(clients.iter().map(Connection::polled)).collect();
        let due = clients.iter().filter_map(Connection::due).chain(closed_until).min();
        // No due time is too far away for a timespec.
        let time = due.and_then(|due| due.saturating_duration_since(Instant::now()).try_into().ok());
        match poll(&mut polled, time.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            // No memory at the moment: treated as no event, and tried again.
            Err(_) => std::thread::sleep(PAUSE),
        }
        if !polled[0].revents().is_empty() {
            return;
        }
        let now = Instant::now();
        let is_knocked = polled[1].revents().contains(PollFlags::IN);
        // The other end closed, or the descriptor is invalid.
        let has_ended = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        let ended: Vec<_> = polled[2..].iter().map(|polled| polled.revents().intersects(has_ended)).collect();
        let mut ended = ended.into_iter();
        drop(polled);
        clients.retain_mut(|client| client.step(now, ended.next().unwrap_or(false), &render).is_some());
        closed_until = closed_until.filter(|until| now < *until);
        while is_knocked && clients.len() < CLIENTS_MAX {
            match accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Ok(stream) => clients.push(Connection::new(stream, protocol, now)),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => {
                    closed_until = Some(now + PAUSE);
                    break;
                }
            }
        }
    }
}
