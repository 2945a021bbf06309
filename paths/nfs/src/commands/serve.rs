//! `pagemill nfs serve`.
use std::io::{ErrorKind, Read};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use pagemill::{Allocator, BuildError, PAGE_SIZE, PageCache, PageCount};
use pagemill_command::size;
use pagemill_watch::StatsServer;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::low_level::pipe;

use super::allow::Network;
use super::report::Report;
use crate::Error;
use crate::credentials::{Squash, expect_privileges};
use crate::data::Data;
use crate::export::{Export, ExportSettings};
use crate::nfs::Nfs;
use crate::pages::SLOTS;
use crate::portmap::Registered;
use crate::server::{self, Server};
use crate::service::Programs;

/// Serve a directory over NFSv3, until SIGTERM or SIGINT
///
/// What it does not protect: NFSv3 has neither encryption nor passwords. A
/// client's machine says which user a request comes from, and the server
/// believes it. Allow none but machines whose root you trust, on a network
/// that others cannot listen to.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(super) struct ServeArgs {
    /// The directory; other file systems below it are not served
    #[arg(value_name = "DIR")]
    directory: PathBuf,

    /// The address to serve on; one that others reach takes --allow too
    #[arg(long, value_name = "IP", default_value_t = Ipv4Addr::LOCALHOST.into())]
    address: IpAddr,

    /// The port, of both NFS and MOUNT
    #[arg(long, default_value_t = 2049)]
    port: u16,

    /// Clients, as 10.0.0.7,10.1.0.0/16 [default: this machine]
    #[arg(long, value_name = "IP[/BITS],...", value_delimiter = ',')]
    allow: Vec<Network>,

    /// Serve clients on ports that any of their users may use (1024 and up)
    #[arg(long)]
    insecure: bool,

    /// Register with this machine's portmapper, for clients that ask it
    #[arg(long)]
    register: bool,

    /// Refuse all changes
    #[arg(long)]
    read_only: bool,

    /// Serve root of a client as root, not as nobody (65534)
    #[arg(long)]
    no_root_squash: bool,

    /// Keep so much of the files in memory, with K, M, G or T [default: half
    /// of the machine's memory]
    #[arg(long, value_name = "SIZE", value_parser = cache, verbatim_doc_comment)]
    cache: Option<PageCount>,

    /// Threads that answer requests
    #[arg(long, value_name = "N", default_value_t = server::THREADS, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,

    /// Connections at a time; more are closed at once
    #[arg(long, value_name = "N", default_value_t = server::CONNECTIONS, value_parser = clap::value_parser!(u32).range(1..))]
    max_connections: u32,

    /// Where the key of file handles is kept, so that handles hold when the
    /// server is started again
    #[arg(long, value_name = "FILE", default_value = "/var/lib/pagemill/nfs.key", verbatim_doc_comment)]
    state: PathBuf,

    /// A socket at which `pagemill top PATH` shows memory and cache
    #[arg(long, value_name = "PATH")]
    stats: Option<PathBuf>,

    /// Print the counters at the end as JSON
    #[arg(long)]
    json: bool,

    // For `bench rpc` alone.
    #[arg(long, hide = true)]
    one_by_one: bool,

    // For tests of a shortage alone: so much memory in all, for the arrays, one unfinished WRITE, and a cache of what is left.
    #[arg(long, hide = true, conflicts_with = "cache", value_parser = cache)]
    memory: Option<PageCount>,
}

const MORE_LIMITS: &str = "allow more open files and threads (`ulimit -n`, `ulimit -u`), or give fewer --threads";
const ANOTHER_ADDRESS: &str = "name another address or port with --address or --port";

/// Files that nobody uses are closed after once to twice this time.
const TIDY_EVERY: Duration = Duration::from_secs(5);

/// The least and the most memory of a cache.
const CACHE: std::ops::RangeInclusive<u64> = 1 << 20..=1 << 40;

fn cache(text: &str) -> Result<PageCount, String> {
    match size(text)? {
        bytes if CACHE.contains(&bytes) => Ok(PageCount::new((bytes / PAGE_SIZE as u64) as usize)),
        _ => Err("give 1M to 1T".to_owned()),
    }
}

pub(super) fn run(args: &ServeArgs, notice: &mut dyn FnMut(&str)) -> Result<String, Error> {
    if !args.address.is_loopback() && args.allow.is_empty() {
        let address = args.address;
        return Err(Error::new(
            format!("{address} can be reached by other machines"),
            "name the clients to serve with --allow IP[/BITS],...; --help says what NFSv3 does not protect",
        ));
    }
    // Before anything else is refused for want of them.
    expect_privileges()?;
    let settings = ExportSettings {
        directory: args.directory.clone(),
        key: args.state.clone(),
        read_only: args.read_only,
        squash: Squash { root: !args.no_root_squash },
    };
    let export = Export::open(&settings)?;
    // From here on SIGTERM and SIGINT write a byte here instead of ending the process.
    let mut stop = signals().map_err(|error| Error::io("waiting for signals", error, MORE_LIMITS))?;

    raise_descriptor_limit();
    let settings = server_settings(args);
    let memory = match args.memory {
        Some(all) => Memory::short(all)?,
        None => Memory::new(args.cache, &settings)?,
    };
    let stats = args.stats.as_ref().map(|path| show(path, &memory.allocator)).transpose()?;
    let at = SocketAddr::new(args.address, args.port);
    let listener = listen(at)?;
    let at = listener.local_addr().map_err(|error| Error::io(at, error, ANOTHER_ADDRESS))?;
    let allowed = args.allow.clone();
    let allows = move |peer: IpAddr| {
        if allowed.is_empty() { peer.to_canonical().is_loopback() } else { allowed.iter().any(|it| it.has(peer)) }
    };
    let programs = Arc::new(Programs::new(Nfs::new(export, Data::new(memory.cache.clone())), args.insecure));
    let server = Server::start(listener, settings, &memory.allocator, allows, programs.clone())
        .map_err(|error| Error::io("starting the server's threads", error, MORE_LIMITS))?;
    let registered = args.register.then(|| Registered::new(at.port())).transpose()?;
    // Programs read the address: it is what follows the last ` at `, up to the last `: `.
    notice(&format!("serving {} at {at}: {} threads", args.directory.display(), args.threads));

    // A byte comes with a signal. A process that was stopped and goes on is interrupted. Whatever else ends the wait would mean
    // that none can come any more.
    while matches!(stop.read(&mut [0]), Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted))
    {
        programs.tidy();
    }
    drop(registered);
    server.stop();
    let report = Report::of(server.counters(), server.page_counters());
    let written = programs.close();
    drop(stats);
    let text = if args.json { report.json() } else { report.to_string() };
    match written {
        Ok(()) => Ok(text),
        Err(error) => {
            // The figures matter most then.
            text.lines().for_each(notice);
            let next =
                "mend the disk or make room, and start the server again: clients send what they have not committed";
            Err(Error::io("writing back what clients wrote", error, next))
        }
    }
}

fn server_settings(args: &ServeArgs) -> server::Settings {
    server::Settings {
        threads: args.threads.into(),
        connections: (args.max_connections as usize).min(connections_allowed()),
        // 0 is room for one WRITE, the least: with less memory, unfinished WRITEs could wait for each other.
        unfinished_pages: args.memory.map_or(server::Settings::default().unfinished_pages, |_| 0),
        is_one_by_one: args.one_by_one,
        ..server::Settings::default()
    }
}

fn signals() -> std::io::Result<UnixStream> {
    let (stop, signalled) = UnixStream::pair()?;
    stop.set_read_timeout(Some(TIDY_EVERY))?;
    for signal in [SIGTERM, SIGINT] {
        pipe::register(signal, signalled.try_clone()?)?;
    }
    Ok(stop)
}

/// Each connection takes a descriptor, and each open file two: what a login allows at first is few.
fn raise_descriptor_limit() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    // If it may not, fewer connections are served at a time.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// As many as leave descriptors for files: a connection that must wait for its client takes two.
fn connections_allowed() -> usize {
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(descriptors / 4).unwrap_or(usize::MAX).max(1)
}

fn listen(at: SocketAddr) -> Result<TcpListener, Error> {
    TcpListener::bind(at).map_err(|error| {
        let next = match error.kind() {
            ErrorKind::AddrInUse => "name another port with --port, or stop the program that has this one",
            ErrorKind::AddrNotAvailable => "name an address of this machine with --address",
            ErrorKind::PermissionDenied => "run it as root, or name a port from 1024 on with --port",
            _ => ANOTHER_ADDRESS,
        };
        Error::io(at, error, next)
    })
}

fn show(path: &std::path::Path, allocator: &Allocator) -> Result<StatsServer, Error> {
    let stats =
        StatsServer::bind(path).map_err(|error| Error::io(path.display(), error, "name another path with --stats"))?;
    stats.show("nfs", allocator);
    Ok(stats)
}

/// The pages: of the cache, of the threads' arrays, and of requests that have arrived in part.
struct Memory {
    allocator: Allocator,
    cache: PageCache,
}

fn no_memory(error: BuildError) -> Error {
    Error::new(format!("no memory for pages: {error}"), "give less with --cache, or make memory free")
}

/// The machine's memory.
fn machine_pages() -> usize {
    let system = rustix::system::sysinfo();
    (system.totalram as u64 * u64::from(system.mem_unit) / PAGE_SIZE as u64) as usize
}

impl Memory {
    fn new(cache: Option<PageCount>, server: &server::Settings) -> Result<Self, Error> {
        // A connection that waits for room for its WRITE has a page.
        let beside = server.threads * SLOTS + server.unfinished_pages + server.connections;
        let machine = machine_pages();
        if cache.is_some_and(|cache| cache.get() > machine) {
            return Err(Error::new(
                format!("--cache is more than this machine's memory of {} MiB", machine >> 8),
                "give less, or leave --cache out for half of the memory",
            ));
        }
        let builder = Allocator::builder();
        let builder = match cache {
            // 1/64 more, and 4096 pages, for the per-CPU lists.
            Some(cache) => builder.pages(cache.get() + beside + cache.get() / 64 + 4096),
            None => builder,
        };
        let allocator = builder.build().map_err(no_memory)?;
        let most = allocator.managed_pages().get().saturating_sub(beside + 4096);
        let limit = cache.map_or(most, PageCount::get);
        if limit < 256 || limit > most {
            let needs = ((beside + 4096 + 256) * PAGE_SIZE) >> 20;
            let what = format!("half of the memory is not enough: {needs} MiB and the cache are needed");
            return Err(Error::new(what, "give fewer --threads, or the size of the cache with --cache"));
        }
        let cache = PageCache::builder(&allocator).limit(PageCount::new(limit)).named("nfs").build();
        Ok(Self { allocator, cache })
    }

    /// The cache takes whatever is free, so that threads have to wait for what it gives back.
    fn short(all: PageCount) -> Result<Self, Error> {
        let allocator = Allocator::builder().pages(all.get()).build().map_err(no_memory)?;
        let cache = PageCache::builder(&allocator).named("nfs").build();
        Ok(Self { allocator, cache })
    }
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches;

    use super::*;

    fn parsed(words: &str) -> ServeArgs {
        let command = ServeArgs::augment_args(clap::Command::new("serve"));
        ServeArgs::from_arg_matches(&command.get_matches_from(words.split_whitespace())).unwrap()
    }

    #[test]
    fn there_is_memory_for_a_cache_that_is_full_and_for_a_page_of_each_connection() {
        let settings = server::Settings { connections: 20_000, threads: 2, ..server::Settings::default() };
        let memory = Memory::new(Some(PageCount::new(256)), &settings).unwrap();
        let needed = 256 + 20_000 + 2 * SLOTS + settings.unfinished_pages;
        assert!(memory.allocator.managed_pages().get() > needed);
    }

    #[test]
    fn what_the_command_line_says_of_the_server_reaches_it() {
        let settings = server_settings(&parsed("serve tree"));
        assert_eq!((settings.threads, settings.is_one_by_one), (server::Settings::default().threads, false));
        let settings = server_settings(&parsed("serve tree --threads 3 --max-connections 2 --one-by-one"));
        assert_eq!((settings.threads, settings.connections, settings.is_one_by_one), (3, 2, true));
    }
}
