//! `pagemill crypt serve`.
use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr};
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use clap::Args;
use pagemill::{PAGE_SIZE, PageCount};
use pagemill_command::size;
use pagemill_watch::StatsServer;
use rustix::event::{PollFd, PollFlags, poll};
use tracing::{error, info, warn};
use zeroize::Zeroizing;

use super::exports::{ExportArg, Prepared, Wanted, export, name, refuse_one_far, refuse_one_name};
use super::listen::{Listening, Place, address, listen_all};
use super::log::{LogLevel, Logging};
use super::memory::MemoryArgs;
use super::open::OpenArgs;
use super::signals::of_server;
use super::systemd::{self, Passed};
use super::{Said, shown};
use crate::Error;
use crate::nbd::{Config, Tls};
use crate::serve::{Listener, Memory, MemoryStats, Options, Pem, Server, TimeLimits, TlsServer, Way};

/// Serve a volume to NBD clients, until SIGTERM or SIGINT
///
/// Clients read and write plain data; in the file it is encrypted. When told to
/// stop, the server finishes and answers the requests that it has begun, puts
/// their data on the disk, and refuses later ones. SIGHUP loads the files of
/// TLS again, for new clients; without TLS it is like SIGTERM.
#[derive(Args, Debug)]
#[command(
    verbatim_doc_comment,
    override_usage = "pagemill crypt serve [OPTIONS] --unix PATH|--tcp ADDR|--activated [IMAGE]",
    after_help = EXAMPLE
)]
pub(super) struct ServeArgs {
    /// The file or block device with the data, or an NBD server's export:
    /// nbd://HOST:PORT/EXPORT or nbd+unix:///EXPORT?socket=PATH, and with
    /// nbds by TLS: ?tls-certificates=FOLDER has ca-cert.pem, and may have
    /// client-cert.pem and client-key.pem
    #[arg(required_unless_present = "export", verbatim_doc_comment)]
    image: Option<PathBuf>,

    /// Serve another volume too; it may be given several times
    ///
    /// After IMAGE come options, each after a comma: key-file=FILE,
    /// header=FILE, read-only. A passphrase that is not in a key file of its
    /// own comes from where IMAGE's does: from the same file, or in turn from
    /// the terminal or the descriptor. Other options are for all volumes.
    #[arg(long, value_name = "NAME=IMAGE", value_parser = export, verbatim_doc_comment)]
    export: Vec<ExportArg>,

    #[command(flatten)]
    open: OpenArgs,

    #[command(flatten)]
    place: Place,

    /// IMAGE's name; a client that asks for none gets the first volume
    #[arg(long, default_value = "", value_parser = name)]
    name: String,

    /// Refuse clients' writes
    #[arg(long)]
    read_only: bool,

    /// Accept clients that do not ask for the block size
    ///
    /// For volumes with 4096-byte sectors, where the client is told the size
    /// by other means: nbd-client -b 4096. A request for part of a sector is
    /// refused.
    #[arg(long, verbatim_doc_comment)]
    block_size_agreed: bool,

    #[command(flatten)]
    tls: TlsArgs,

    /// Serve without TLS on an address that other machines can reach
    #[arg(long)]
    allow_plaintext: bool,

    /// Let trims make holes in the file; holes show which parts are in use
    #[arg(long)]
    discard: bool,

    /// Threads [default: one for each processor, at least 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,

    /// Clients at a time, from the moment they connect; more are disconnected
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u16).range(1..))]
    max_connections: u16,

    /// Disconnect a client that moves less than 64 KiB in S seconds in the
    /// middle of a request or a reply; 0: never, so that clients may pause
    #[arg(long, value_name = "S", default_value_t = 0, verbatim_doc_comment)]
    timeout: u16,

    /// Seconds for finishing requests when the server is told to stop
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = clap::value_parser!(u16).range(1..))]
    stop_timeout: u16,

    /// Answer Prometheus at http://ADDR/metrics; a port alone is 127.0.0.1's
    ///
    /// Figures of the clients, their requests and the disk, of the memory,
    /// the reserve for writes and the cache. All who reach the address may
    /// read them: there is no password and no TLS.
    #[arg(long, value_name = "ADDR", value_parser = metrics_address, verbatim_doc_comment)]
    metrics: Option<SocketAddr>,

    /// What is said on standard error
    ///
    /// A line an event: with the time and the level, or with a priority if
    /// standard error is systemd's journal.
    #[arg(long, value_name = "LEVEL", value_enum, default_value_t = LogLevel::Info, verbatim_doc_comment)]
    log: LogLevel,

    /// Seconds that a client may take to negotiate
    #[arg(long, value_name = "S", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..))]
    handshake_timeout: u16,

    #[command(flatten, next_help_heading = "Memory and disk")]
    ways: Ways,
}

const EXAMPLE: &str = "\
Example, with the client in a second terminal:
  pagemill crypt serve disk.img --key-file disk.key --unix disk.sock
  nbdcopy 'nbd+unix:///?socket=disk.sock' copy.img";

impl ServeArgs {
    /// The volumes, IMAGE first.
    fn wanted(&self) -> Result<Vec<Wanted>, Error> {
        if self.image.is_none() && (self.open.has_header() || !self.name.is_empty()) {
            let why = "--header and --name are for IMAGE: write --export NAME=IMAGE,header=FILE";
            return Err(Error::Request(why.to_owned()));
        }
        let image =
            self.image.as_ref().map(|image| Wanted::new(self.name.clone(), self.open.of(image), self.read_only));
        let exports = self.export.iter().map(|export| Wanted::export(export, &self.open, self.read_only));
        let wanted: Vec<_> = image.into_iter().chain(exports).collect();
        refuse_one_name(&wanted)?;
        refuse_one_far(&wanted)?;
        Ok(wanted)
    }

    fn limits(&self) -> TimeLimits {
        let seconds = |seconds: u16| Duration::from_secs(seconds.into());
        TimeLimits {
            handshake: seconds(self.handshake_timeout),
            stall: (self.timeout > 0).then(|| seconds(self.timeout)),
            stop: seconds(self.stop_timeout),
        }
    }
}

/// With a certificate, clients are served only by TLS.
#[derive(Args, Debug)]
struct TlsArgs {
    /// Require TLS; FILE has the server's certificate and its chain, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,

    /// The certificate's private key, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,

    /// Accept only clients whose certificate one of these authorities signed
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,
}

impl TlsArgs {
    fn server(&self) -> Result<Option<TlsServer>, Error> {
        let (Some(chain), Some(key)) = (&self.tls_cert, &self.tls_key) else { return Ok(None) };
        let read = |path: &PathBuf| match std::fs::read(path) {
            Ok(text) => Ok((shown(path), Zeroizing::new(text))),
            Err(error) => Err(Error::io(shown(path), error)),
        };
        let (chain, key) = (read(chain)?, read(key)?);
        let authorities = self.tls_client_ca.as_ref().map(read).transpose()?;
        fn pem((from, text): &(String, Zeroizing<Vec<u8>>)) -> Pem<'_> {
            Pem { from, text }
        }
        TlsServer::new(pem(&chain), pem(&key), authorities.as_ref().map(pem)).map(Some)
    }
}

#[derive(Args, Debug)]
struct Ways {
    /// How the disk is read and written
    #[arg(long, value_enum, default_value_t)]
    io: Way,

    #[command(flatten)]
    memory: MemoryArgs,

    /// Keep so much plain data in memory for reads, with K, M, G or T; it is
    /// zeroed when it leaves the cache, and when the server stops
    #[arg(long, value_name = "SIZE", value_parser = cache, verbatim_doc_comment)]
    cache: Option<PageCount>,
}

/// The least and the most memory of a cache.
const CACHE: RangeInclusive<u64> = 1 << 20..=1 << 40;

fn cache(text: &str) -> Result<PageCount, String> {
    match size(text)? {
        0 => Err("a cache of 0 bytes keeps nothing; leave --cache out".to_owned()),
        bytes if CACHE.contains(&bytes) => Ok(PageCount::new((bytes / PAGE_SIZE as u64) as usize)),
        _ => Err("1M to 1T".to_owned()),
    }
}

/// An address as [`address`] reads it; a port alone is this machine's.
fn metrics_address(text: &str) -> Result<SocketAddr, String> {
    match text.parse::<u16>() {
        Ok(port) => Ok((Ipv4Addr::LOCALHOST, port).into()),
        Err(_) => address(text).map_err(|why| format!("a port, or {why}")),
    }
}

/// Shows a server's memory as the allocator `crypt`, with the reserve as its pool `writes`.
fn show(at: SocketAddr, memory: &Memory) -> Result<StatsServer, Error> {
    let stats = StatsServer::bind_http(at).map_err(|error| Error::io(at.to_string(), error))?;
    stats.show("crypt", memory.allocator());
    stats.show_pool("crypt", "writes", memory.pool());
    Ok(stats)
}

/// A thread for each processor, and at least four: with fewer, clients that ask for much would often share one with a
/// client that waits for little.
fn usual_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).max(4)
}

impl ServeArgs {
    /// Refuses an address at which others could read along.
    fn check_plaintext(&self, address: SocketAddr) -> Result<(), Error> {
        if address.ip().is_loopback() || self.tls.tls_cert.is_some() || self.allow_plaintext {
            return Ok(());
        }
        let why = format!(
            "{address} is reached by others, who could read along: give --tls-cert and --tls-key, or say \
             --allow-plaintext if they may"
        );
        Err(Error::Request(why))
    }

    /// Loads the files of TLS again. If they are unfit, those that were loaded before stay.
    fn reload(&self, tls: &TlsServer) {
        systemd::notify_reloading();
        match self.tls.server() {
            Ok(new) => {
                new.iter().for_each(|new| tls.renew(new));
                info!(name: "certificates loaded", "loaded the certificates again, for new clients");
            }
            Err(why) => {
                let next = why.next_step();
                error!(name: "certificates refused", %why, next, "new clients get the certificates that were loaded before");
            }
        }
        systemd::notify("READY=1\nSTATUS=serving");
    }
}

pub(super) fn run(args: &ServeArgs) -> Result<Said, Error> {
    // Before the log has a thread.
    let passed = args.place.passed()?;
    let _log = Logging::start(args.log).map_err(|error| Error::io("starting the log's thread", error))?;
    serve(args, passed)
}

fn serve(args: &ServeArgs, passed: Vec<Passed>) -> Result<Said, Error> {
    let tcp = passed.iter().filter_map(|Passed { listener, .. }| match listener {
        Listener::Tcp(listener) => listener.local_addr().ok(),
        Listener::Unix(_) => None,
    });
    args.place.tcp.into_iter().chain(tcp).try_for_each(|address| args.check_plaintext(address))?;
    // Before the passphrase is asked for.
    args.place.check()?;
    let tls = args.tls.server()?;
    // Beside the memory for requests, so that a full cache leaves that as it is.
    let cache = args.ways.cache;
    let memory = args.ways.memory.memory_and(cache.map_or(0, PageCount::get))?;
    let stats = args.metrics.map(|at| show(at, &memory)).transpose()?;
    let wanted = args.wanted()?;
    let open = |wanted| Prepared::open(wanted, &memory, args.ways.memory.buffered);
    let opened: Vec<Prepared> = wanted.into_iter().map(open).collect::<Result<_, _>>()?;
    let (mut paths, mut exports, mut claims) = (Vec::new(), Vec::new(), Vec::new());
    for Prepared { path, export, claim } in opened {
        paths.push(path);
        exports.push(export);
        claims.push(claim);
    }
    let told_exports: Vec<_> = exports.iter().map(|export| (export.name.clone(), export.size)).collect();
    let options = Options {
        config: Config {
            exports,
            tls: if tls.is_some() { Tls::Required } else { Tls::None },
            block_size_agreed: args.block_size_agreed,
        },
        tls: tls.clone(),
        threads: args.threads.map_or_else(usual_threads, usize::from),
        way: args.ways.io,
        max_connections: args.max_connections.into(),
        limits: args.limits(),
        may_discard: args.discard,
    };
    let (stop, reload) = of_server(tls.is_some()).map_err(|error| Error::io("waiting for signals", error))?;
    let threads = options.threads;
    let server = Server::start_all(paths, options, cache);
    let server = server.map_err(|error| Error::io("starting the server's threads", error))?;
    // The socket comes last: a client that sees it is served, and may end this program.
    let listening = listen_all(&args.place, passed, if tls.is_some() { "nbds" } else { "nbd" })?;
    for Listening { uri, .. } in &listening {
        let mut what = told_exports.iter().zip(server.ways());
        match (what.len(), what.next()) {
            (1, Some(((_, size), way))) => info!("serving {size} bytes at {uri}: {threads} threads, the disk {way}"),
            (count, first) => {
                info!("serving {count} volumes at {uri}: {threads} threads");
                for ((name, size), way) in first.into_iter().chain(what) {
                    info!("volume {name:?}: {size} bytes, the disk {way}");
                }
            }
        }
    }
    if let Some(stats) = &stats {
        stats.show_text(server.figures());
        if let Some(address) = stats.address() {
            info!("figures at http://{address}/metrics");
        }
    }
    systemd::notify("READY=1\nSTATUS=serving");

    let accepted = accept(&server, &listening, &stop, reload.as_ref(), || tls.iter().for_each(|tls| args.reload(tls)));
    systemd::notify("STOPPING=1\nSTATUS=finishing the requests that were begun");
    let clients = server.connections();
    info!(name: "stopping", clients, "stopping: the requests that were begun are finished");
    let stats = server.stop().map_err(|error| Error::io("serving", error))?;
    drop(claims);
    accepted?;
    told(&stats).iter().for_each(|what| warn!(name: "memory", "{what}"));
    info!(name: "stopped", "stopped: all that was written is on the disk");
    Ok(Said::default())
}

/// Accepts clients until a signal comes to `stop`, or until that is impossible. After a signal to `reload` it calls
/// `reloaded`.
fn accept(
    server: &Server,
    listening: &[Listening],
    stop: &UnixStream,
    reload: Option<&UnixStream>,
    reloaded: impl Fn(),
) -> Result<(), Error> {
    let failed = |error| Error::io("waiting for clients", error);
    let (is_over, over) = &UnixStream::pair().map_err(failed)?;
    let end = || over.shutdown(Shutdown::Both);
    thread::scope(|scope| {
        let acceptors = listening.iter().map(|Listening { listener, uri, .. }| {
            let work = move || {
                let accepted = server.accept(listener, is_over.as_fd()).map_err(|error| Error::io(uri, error));
                // One that ends, ends all.
                end().map_err(failed).and(accepted)
            };
            thread::Builder::new().name("crypt-accept".to_owned()).spawn_scoped(scope, work)
        });
        let acceptors: io::Result<Vec<_>> = acceptors.collect();
        let waited = acceptors.as_ref().map_or(Ok(()), |_| wait(stop, reload, is_over, reloaded));
        end().and(waited).map_err(failed)?;
        for acceptor in acceptors.map_err(failed)? {
            acceptor.join().unwrap_or_else(|_| Err(failed(io::Error::other("a thread has panicked"))))?;
        }
        Ok(())
    })
}

/// Waits until `stop` or `is_over` becomes readable, and calls `reloaded` for signals to `reload`.
fn wait(stop: &UnixStream, reload: Option<&UnixStream>, is_over: &UnixStream, reloaded: impl Fn()) -> io::Result<()> {
    loop {
        let mut fds: Vec<_> =
            [stop, is_over].into_iter().chain(reload).map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_ready: Vec<_> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if is_ready[0] || is_ready[1] {
            return Ok(());
        }
        if let Some(reload) = reload.filter(|_| is_ready[2]) {
            // Several signals that have come by now are one.
            rustix::io::read(reload, &mut [0; 64])?;
            reloaded();
        }
    }
}

/// Messages about memory at the end; none if there was always enough.
fn told(stats: &MemoryStats) -> Vec<String> {
    let mut told = Vec::new();
    if stats.waits > 0 {
        let MemoryStats { waits, longest_wait, .. } = stats;
        let longest = longest_wait.as_secs_f64() * 1e3;
        told.push(format!("{waits} parts of writes waited for pages, at most {longest:.1} ms; --memory gives more"));
    }
    if stats.short > 0 {
        let short = stats.short;
        told.push(format!(
            "{short} times a request went through in short parts for want of pages; --memory gives more"
        ));
    }
    told
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: ServeArgs,
    }

    #[test]
    fn figures_are_served_to_this_machine_unless_an_address_is_given() {
        let read = |text: &str| metrics_address(text).map(|address| address.to_string());
        assert_eq!(read("9100").unwrap(), "127.0.0.1:9100");
        assert_eq!(read("0.0.0.0:9100").unwrap(), "0.0.0.0:9100");
        assert_eq!(read("[::1]:0").unwrap(), "[::1]:0");
        for wrong in ["", "65536", "-1", "localhost", "localhost:9100", "127.0.0.1", ":9100"] {
            assert!(read(wrong).unwrap_err().starts_with("a port, or an address in numbers"), "{wrong}");
        }
    }

    #[test]
    fn a_cache_has_1_mib_to_1_tib() {
        assert_eq!(cache("1M"), Ok(PageCount::new(256)));
        assert_eq!(cache("1T"), Ok(PageCount::new(1 << 28)));
        assert!(cache("0").unwrap_err().contains("leave --cache out"));
        for wrong in ["4K", "2T", "-1", "x", "9999999999T"] {
            assert!(cache(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn negotiated_clients_have_no_time_limit_by_default() {
        let limits = |more: &[&str]| {
            let line = [&["serve", "volume", "--unix", "socket"], more].concat();
            Line::try_parse_from(line).map(|line| line.args.limits()).unwrap()
        };
        let unless_told = limits(&[]);
        assert_eq!((unless_told.stall, unless_told.handshake), (None, Duration::from_secs(10)));
        assert_eq!(
            (limits(&["--timeout", "0"]).stall, limits(&["--timeout", "9"]).stall),
            (None, Some(Duration::from_secs(9)))
        );
        assert_eq!(limits(&["--stop-timeout", "7"]).stop, Duration::from_secs(7));
    }
}
