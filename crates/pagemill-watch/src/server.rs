//! The socket and the one thread that answers on it.
//!
//! The thread sleeps in `poll` until a client comes, says something, can be sent more, or is due for its next line.
//! Without clients it never wakes. Locks: `Shared::shown` and `Shared::pools`, under which nothing else is locked.
use crate::connection::{Connection, Form};
use crate::socket_file::SocketFile;
use crate::{Snapshot, json, prometheus};
use pagemill::{Allocator, Mempool, MempoolStats, Source, WeakAllocator};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Clients at a time. Those beyond wait in the system's queue until one of them is gone: silent ones soon are.
const CLIENTS_MAX: usize = 64;
/// How long nobody is let in after the system had no descriptor left for it.
const PAUSE: Duration = Duration::from_millis(100);

/// A socket on which this process can be watched: by `pagemill top`, or by whatever scrapes. Made by [`serve_stats`]
/// or [`StatsServer::bind`]; dropped, it ends its thread and removes the file.
///
/// A client sends one line. `json` and `prometheus` are answered once; `watch 1000` is answered with a JSON object a
/// line each 1000 milliseconds, until the client goes away.
///
/// It keeps no allocator or pool alive: one is shown as long as somebody has a handle of it (while an answer is put
/// together, the server has one too). The child of a fork is not shown: there, all of this does nothing.
#[derive(Debug)]
pub struct StatsServer {
    file: SocketFile,
    shared: Arc<Shared>,
    /// Closed, it ends the thread.
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
    /// `AddrInUse`: somebody serves there. `AlreadyExists`: a file that is no socket is there; a socket that its
    /// process left behind is replaced. And what the system says to a new file, a socket or a thread.
    pub fn bind(path: impl AsRef<Path>) -> io::Result<Self> {
        let (listener, file) = SocketFile::make(path.as_ref())?;
        listener.set_nonblocking(true)?;
        let (stop, stopped) = UnixStream::pair()?;
        let shared = Arc::new(Shared::new());
        let theirs = Arc::clone(&shared);
        let thread = Builder::new().name("pagemill-stats".into());
        let thread = thread.spawn(move || serve(&listener, &stopped, &theirs))?;
        Ok(Self { file, shared, stop: Some(stop), thread: Some(thread) })
    }

    /// Shows an allocator under this name, instead of the one that had it, until its last handle is gone.
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
        if self.file.is_ours() {
            let name = name.into();
            let mut shown = self.shared.shown();
            // Without those that are gone: a program may show one after the other, each under a name of its own.
            shown.retain(|(_, allocator)| !allocator.is_closed());
            match shown.iter_mut().find(|(other, _)| *other == name) {
                Some((_, shown)) => *shown = allocator.downgrade(),
                None => shown.push((name, allocator.downgrade())),
            }
        }
    }
    /// Shows a pool under this name with what is shown as `allocator`, instead of the one that had it, until it is gone.
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
    pub fn show_pool<S>(&self, allocator: impl Into<String>, name: impl Into<String>, pool: &Arc<Mempool<S>>)
    where
        S: Source + Send + Sync + 'static,
    {
        if self.file.is_ours() {
            let key = (allocator.into(), name.into());
            let pool: Weak<dyn Pool> = Arc::downgrade(&(Arc::clone(pool) as Arc<dyn Pool>));
            let mut pools = self.shared.pools();
            pools.retain(|(other, pool)| *other != key && pool.strong_count() > 0);
            pools.push((key, pool));
        }
    }
    /// Shows it no more.
    pub fn hide(&self, name: &str) {
        if self.file.is_ours() {
            self.shared.shown().retain(|(other, _)| other != name);
        }
    }
    /// Where it serves.
    pub fn path(&self) -> &Path {
        self.file.path()
    }
}

impl Drop for StatsServer {
    fn drop(&mut self) {
        if self.file.is_ours() {
            drop(self.stop.take());
            if let Some(thread) = self.thread.take() {
                // A panic in it has been told where panics are told.
                let _ = thread.join();
            }
        }
    }
}

/// A pool of whatever.
trait Pool: Send + Sync {
    fn stats(&self) -> MempoolStats;
}

impl<S: Source + Send + Sync> Pool for Mempool<S> {
    fn stats(&self) -> MempoolStats {
        Mempool::stats(self)
    }
}

/// The allocator's name and the pool's own, and the pool.
type ShownPool = ((String, String), Weak<dyn Pool>);

/// What the thread and the handle share.
struct Shared {
    pools: Mutex<Vec<ShownPool>>,
    shown: Mutex<Vec<(String, WeakAllocator)>>,
    program: String,
    start: Instant,
}

impl core::fmt::Debug for Shared {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let pools: Vec<_> = self.pools().iter().map(|(name, _)| name.clone()).collect();
        f.debug_struct("Shared").field("shown", &self.shown).field("pools", &pools).finish_non_exhaustive()
    }
}

impl Shared {
    fn new() -> Self {
        let program = std::env::args_os().next().unwrap_or_default();
        let program = Path::new(&program).file_name().unwrap_or_default().to_string_lossy().into_owned();
        Self { shown: Mutex::default(), pools: Mutex::default(), program, start: Instant::now() }
    }

    fn shown(&self) -> MutexGuard<'_, Vec<(String, WeakAllocator)>> {
        // Whoever panicked while it held the list left it whole.
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pools(&self) -> MutexGuard<'_, Vec<ShownPool>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn snapshot(&self, name: &str, allocator: &Allocator) -> Snapshot {
        let pools = self.pools().clone();
        let pools = pools.into_iter().filter(|((of, _), _)| of == name);
        let pools = pools.filter_map(|((_, pool), weak)| Some((pool, weak.upgrade()?)));
        pools.fold(Snapshot::of(name, allocator), |seen, (name, pool)| seen.with_pool(name, pool.stats()))
    }

    fn answer(&self, form: Form) -> Vec<u8> {
        let shown = self.shown().clone();
        let live = shown.iter().filter_map(|(name, allocator)| Some((name, allocator.upgrade()?)));
        let seen: Vec<_> = live.map(|(name, allocator)| self.snapshot(name, &allocator)).collect();
        match form {
            Form::Json => json::line(&self.program, self.start.elapsed(), &seen),
            Form::Prometheus => prometheus(&seen).into_bytes(),
        }
    }
}

/// The thread.
fn serve(listener: &UnixListener, stopped: &UnixStream, shared: &Shared) {
    let render = |form| shared.answer(form);
    let mut clients: Vec<Connection> = Vec::new();
    let mut closed_until = None;
    loop {
        let has_room = clients.len() < CLIENTS_MAX && closed_until.is_none();
        let knocks = if has_room { PollFlags::IN } else { PollFlags::empty() };
        let doors = [PollFd::new(stopped, PollFlags::IN), PollFd::new(listener, knocks)];
        let mut polled: Vec<_> = doors.into_iter().chain(clients.iter().map(Connection::polled)).collect();
        let due = clients.iter().filter_map(Connection::due).chain(closed_until).min();
        // No time to come is further away than a timespec reaches.
        let time = due.and_then(|due| due.saturating_duration_since(Instant::now()).try_into().ok());
        match poll(&mut polled, time.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            // No memory for a moment: nothing was found, and it is tried again.
            Err(_) => std::thread::sleep(PAUSE),
        }
        if !polled[0].revents().is_empty() {
            return;
        }
        let now = Instant::now();
        let is_knocked = polled[1].revents().contains(PollFlags::IN);
        // The other end is gone, or the descriptor is broken.
        let has_ended = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        let ended: Vec<_> = polled[2..].iter().map(|polled| polled.revents().intersects(has_ended)).collect();
        let mut ended = ended.into_iter();
        drop(polled);
        clients.retain_mut(|client| client.step(now, ended.next().unwrap_or(false), &render).is_some());
        closed_until = closed_until.filter(|until| now < *until);
        while is_knocked && clients.len() < CLIENTS_MAX {
            match listener.accept() {
                Ok((stream, _)) => clients.extend(Connection::new(stream, now)),
                Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => {
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    closed_until = Some(now + PAUSE);
                    break;
                }
            }
        }
    }
}
