//! Servers over loopback: what one client gets that keeps eight calls in flight.
//!
//! Files are in memory (`/dev/shm`), each server's its own, and were read before: so no disk is measured. A WRITE is unstable,
//! and a COMMIT at a round's end is timed with it. A round of [`WRITE`] has each byte of the file once, so that every server
//! brings all of them to the file; one of [`AGAIN`] has each four times, and a server that keeps them until the COMMIT brings
//! a quarter of them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use nfs3_types::nfs3::nfs_fh3;
use pagemill_harness::machine::pin_to_all;
use pagemill_harness::record::Record;
use pagemill_harness::rounds::{CellSamples, Effort, Kind, Sample, Unavailable, in_turns};
use pagemill_harness::{Error, Run};

use crate::TABLE;
use crate::client::{Call, Client, DEPTH};
use crate::libnfs::{self, Libnfs};
use crate::report::asked;
use crate::servers::{self, Server};

/// The parts, by what a client asks.
pub(crate) const READ: &str = "rpc-read-1m";
pub(crate) const WRITE: &str = "rpc-write-1m";
/// The same two by libnfs.
pub(crate) const READ_LIBNFS: &str = "rpc-read-1m-libnfs";
pub(crate) const WRITE_LIBNFS: &str = "rpc-write-1m-libnfs";
/// As [`WRITE`], over and over in the same file before the COMMIT.
pub(crate) const AGAIN: &str = "rpc-write-1m-again";
pub(crate) const RANDOM: &str = "rpc-read-4k";
/// The same with one call in flight: how long one takes.
pub(crate) const ONE: &str = "rpc-read-4k-one";
pub(crate) const GETATTR: &str = "rpc-getattr";
pub(crate) const CREATE: &str = "rpc-create";
pub(crate) const LIST: &str = "rpc-readdirplus";

pub(crate) const OURS: &str = "pagemill";
/// The same server, whose threads refill their arrays by a call for each page.
pub(crate) const ONE_BY_ONE: &str = "pagemill-single";
pub(crate) const GANESHA: &str = "ganesha";
pub(crate) const UNFS3: &str = "unfs3";
/// Libraries in Rust, which the program `nfs-peers` serves with.
pub(crate) const NFSSERVE: &str = "nfsserve";
pub(crate) const NFS3_SERVER: &str = "nfs3_server";

pub(crate) const STEPS: usize = 1;

/// A part: its name, and how many operations a round has, all of them and in a quick run.
pub(crate) const PARTS: [(&str, usize, usize); 10] = [
    (READ, 256, 32),
    (WRITE, FILE / MIB, 32),
    (READ_LIBNFS, 256, 32),
    (WRITE_LIBNFS, FILE / MIB, 32),
    (AGAIN, 4 * FILE / MIB, 32),
    (RANDOM, 4000, 800),
    (ONE, 1000, 200),
    (GETATTR, 4000, 800),
    (CREATE, 500, 100),
    (LIST, 20, 4),
];

const MIB: usize = 1 << 20;
/// Of the file that is read, and of the one that is written.
const FILE: usize = 64 * MIB;
const ENTRIES: usize = 1000;
/// Turns of all servers.
const ROUNDS: usize = 15;
const QUICK_ROUNDS: usize = 2;

fn failed(what: &str, why: impl std::fmt::Display) -> Error {
    Error::Table { table: TABLE.name, what: what.to_owned(), why: why.to_string() }
}

pub(crate) fn loopback(run: &mut Run<'_>) -> Result<Vec<Record>, Error> {
    run.progress.set_message("servers over loopback");
    let (program, is_compared) = (run.program.to_owned(), run.is_compared);
    let is_full = run.effort.rounds >= Effort::FULL.rounds;
    let (seed, cpus) = (run.seed, run.machine.allowed.clone());
    // What the thread enters is left as it ends. It and the servers may use every processor, as they do where they are used;
    // this thread is bound to one.
    let measured = thread::scope(|scope| {
        let measure = move || {
            pin_to_all(&cpus).map_err(|error| Error::Pin { cpu: cpus[0], error })?;
            measure(&program, is_compared, is_full, seed)
        };
        scope.spawn(measure).join()
    });
    run.progress.inc(STEPS as u64);
    let (records, absent) = match measured {
        Ok(measured) => measured?,
        Err(panic) => std::panic::resume_unwind(panic),
    };
    for (name, why) in absent {
        run.note_absent(name, "-", &Unavailable(why));
    }
    Ok(records)
}

/// A server with its clients, ready to be asked.
struct Entrant {
    name: &'static str,
    kind: Kind,
    tree: PathBuf,
    server: Server,
    client: Client,
    /// Connected when it is asked for.
    libnfs: Option<Libnfs>,
    read: nfs_fh3,
    written: nfs_fh3,
    listed: nfs_fh3,
    made: nfs_fh3,
}

/// What rounds are made with.
struct Means {
    data: Vec<u8>,
    rng: fastrand::Rng,
    /// The program that is libnfs as the client, or why it is not there.
    libnfs: Result<PathBuf, String>,
}

type Measured = (Vec<Record>, Vec<(&'static str, String)>);

fn measure(program: &Path, is_compared: bool, is_full: bool, seed: u64) -> Result<Measured, Error> {
    let mut absent = Vec::new();
    if let Err(why) = servers::enter() {
        absent.push((TABLE.name, format!("servers over loopback: {why}")));
        return Ok((Vec::new(), absent));
    }
    let folder = tempfile::tempdir_in("/dev/shm").map_err(|error| failed("a folder in /dev/shm", error))?;
    type Start<'a> = &'a dyn Fn(&Path, &Path) -> Result<Server, String>;
    let ours = |tree: &Path, folder: &Path| servers::pagemill(program, tree, folder, &[]);
    let single = |tree: &Path, folder: &Path| servers::pagemill(program, tree, folder, &["--one-by-one"]);
    let makes: [(_, _, Start<'_>); 6] = [
        (OURS, Kind::Ours, &ours),
        (ONE_BY_ONE, Kind::Ours, &single),
        (GANESHA, Kind::Peer, &servers::ganesha),
        (UNFS3, Kind::Peer, &servers::unfs3),
        (NFSSERVE, Kind::Peer, &|tree, _| servers::library(program, NFSSERVE, tree)),
        (NFS3_SERVER, Kind::Peer, &|tree, _| servers::library(program, NFS3_SERVER, tree)),
    ];
    let mut entrants = Vec::new();
    for (name, kind, start) in makes {
        if kind == Kind::Peer && !is_compared {
            continue;
        }
        match Entrant::new(name, kind, start, &folder.path().join(name)) {
            Ok(entrant) => entrants.push(entrant),
            Err(why) if kind == Kind::Peer => absent.push((name, why)),
            Err(why) => return Err(failed(name, why)),
        }
    }
    let rng = fastrand::Rng::with_seed(seed);
    let mut means = Means { data: vec![0x5a; MIB], rng, libnfs: libnfs::build(folder.path()) };
    if let Err(why) = &means.libnfs {
        absent.push(("libnfs", why.clone()));
    }
    let mut records = Vec::new();
    for (part, all, quick) in PARTS {
        if means.libnfs.is_err() && matches!(part, READ_LIBNFS | WRITE_LIBNFS) {
            continue;
        }
        let (count, rounds) = if is_full { (all, ROUNDS) } else { (quick, QUICK_ROUNDS) };
        // The first round of writes takes memory from the system.
        let untimed = if part == WRITE { count } else { count / 4 };
        let mut able = Vec::new();
        for entrant in &mut entrants {
            match entrant.round(part, untimed, &mut means) {
                Ok(_) => able.push(entrant),
                Err(error) if entrant.kind == Kind::Peer => {
                    absent.push((entrant.name, format!("{}: {error}", asked(part))));
                    // Answers may still be on their way to the old one.
                    entrant.client =
                        Client::connect(entrant.server.nfs).map_err(|error| failed(entrant.name, error))?;
                }
                Err(error) => return Err(failed(entrant.name, error)),
            }
        }
        let cell = |it: &&mut Entrant| CellSamples::new(part, (it.name, "-", it.kind), 1);
        let mut cells: Vec<_> = able.iter().map(cell).collect();
        for (_, at) in in_turns(rounds, able.len()) {
            let entrant = &mut able[at];
            let ns = entrant.round(part, count, &mut means).map_err(|error| failed(entrant.name, error))?;
            cells[at].samples.push(Sample::whole(ns));
        }
        records.extend(cells.into_iter().filter_map(CellSamples::record));
    }
    Ok((records, absent))
}

impl Entrant {
    fn new(
        name: &'static str,
        kind: Kind,
        start: &dyn Fn(&Path, &Path) -> Result<Server, String>,
        folder: &Path,
    ) -> Result<Self, String> {
        let tree = folder.join("tree");
        let make = || -> io::Result<()> {
            fs::create_dir_all(tree.join("made"))?;
            fs::create_dir_all(tree.join("listed"))?;
            fs::write(tree.join("read"), vec![0x5a; FILE])?;
            fs::write(tree.join("written"), vec![0; FILE])?;
            (0..ENTRIES).try_for_each(|at| fs::write(tree.join(format!("listed/entry-{at:05}")), ""))
        };
        make().map_err(|error| format!("its files: {error}"))?;
        let server = start(&tree, folder)?;
        let connect = || -> io::Result<_> {
            let path = tree.to_string_lossy();
            let root = Client::connect(server.mount)?.mount(&path)?;
            let mut client = Client::connect(server.nfs)?;
            let mut find = |name| client.lookup(&root, name);
            let found = (find("read")?, find("written")?, find("listed")?, find("made")?);
            Ok((client, found))
        };
        let (client, (read, written, listed, made)) = connect().map_err(|error| error.to_string())?;
        Ok(Self { name, kind, tree, server, client, libnfs: None, read, written, listed, made })
    }

    /// Nanoseconds of one of so many pieces that libnfs reads or writes.
    fn by_libnfs(&mut self, what: &str, count: usize, program: &Result<PathBuf, String>) -> io::Result<f64> {
        let connect = |program: &PathBuf| Libnfs::connect(program, &self.server, &self.tree, FILE / MIB);
        let mut libnfs = match self.libnfs.take() {
            Some(connected) => connected,
            None => program.as_ref().map_err(String::clone).and_then(connect).map_err(io::Error::other)?,
        };
        let ns = libnfs.round(what, count)?;
        // One that failed has ended.
        self.libnfs = Some(libnfs);
        Ok(ns / count as f64)
    }

    /// Nanoseconds of one operation, of so many.
    fn round(&mut self, part: &str, count: usize, means: &mut Means) -> io::Result<f64> {
        let Means { data, rng, libnfs } = means;
        match part {
            READ_LIBNFS => return self.by_libnfs("read", count, libnfs),
            WRITE_LIBNFS => return self.by_libnfs("write", count, libnfs),
            _ => {}
        }
        let Self { client, read, written, listed, made, .. } = self;
        let mib = |at: usize| (at % (FILE / MIB) * MIB) as u64;
        let names: Vec<String> = match part {
            CREATE => (0..count).map(|at| format!("new-{at}")).collect(),
            _ => Vec::new(),
        };
        let start = Instant::now();
        let depth = if part == ONE { 1 } else { DEPTH };
        match part {
            READ => client.run((0..count).map(|at| Call::read(read, mib(at), MIB as u32)), depth)?,
            WRITE | AGAIN => {
                client.run((0..count).map(|at| Call::write(written, mib(at), data)), depth)?;
                let named = |error| io::Error::other(format!("COMMIT: {error}"));
                client.run([Call::commit(written)], depth).map_err(named)?;
            }
            RANDOM | ONE => {
                let mut any = || rng.u64(0..(FILE / 4096) as u64) * 4096;
                client.run((0..count).map(|_| Call::read(read, any(), 4096)), depth)?;
            }
            GETATTR => client.run((0..count).map(|_| Call::getattr(read)), depth)?,
            CREATE => {
                client.run(names.iter().map(|name| Call::create(made, name)), depth)?;
                client.run(names.iter().map(|name| Call::remove(made, name)), depth)?;
            }
            _ => (0..count).try_for_each(|_| client.list(listed, ENTRIES))?,
        }
        Ok(start.elapsed().as_nanos() as f64 / count as f64)
    }
}
