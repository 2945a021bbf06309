//! Months in small: a server whose clients come and go, whose disk fails now and then, and whose certificates are
//! replaced. Nothing that was flushed is lost, the log is readable and agrees with the figures, and memory stays flat.
//!
//! `PAGEMILL_SOAK_ROUNDS=40000` runs it for about an hour on a machine with two processors.

use std::collections::HashMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::process::Signal;
use rustls::{ClientConnection, StreamOwned};

use crate::common::{Folder, PATIENCE, PROGRAM, signal, until};
use crate::crypt_service::is_plain_line;

#[path = "../../paths/crypt/tests/common/certificates.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod certificates;
#[path = "../../paths/crypt/tests/common/disk.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod disk;

use certificates::Certificates;
use disk::{Disk, EIO, mounted};

const BLOCK: usize = 4096;
/// Blocks of a writer.
const BLOCKS: usize = 16;
const WRITERS: usize = 4;
/// Visits of each writer in a round.
const VISITS: usize = 4;
/// The server's memory and its reserve.
const MEMORY_MIB: u64 = 8;
const RESERVE: u64 = 256;

mod kind {
    pub(super) const READ: u16 = 0;
    pub(super) const WRITE: u16 = 1;
    pub(super) const DISCONNECT: u16 = 2;
    pub(super) const FLUSH: u16 = 3;
}

/// The numbers of a fixed sequence.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

/// A client past negotiation, by TLS.
struct Client(StreamOwned<ClientConnection, UnixStream>);

impl Client {
    fn connect(socket: &Path, certificates: &Certificates) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.read_exact(&mut [0; 18])?;
        stream.write_all(&[&3u32.to_be_bytes(), &certificates::option(certificates::STARTTLS)[..]].concat())?;
        // The server agrees, with an answer that has no text.
        stream.read_exact(&mut [0; 20])?;
        let mut stream = certificates.connect(stream);
        let data = [&0u32.to_be_bytes()[..], &1u16.to_be_bytes(), &3u16.to_be_bytes()].concat();
        let len = (data.len() as u32).to_be_bytes();
        stream.write_all(&[&b"IHAVEOPT"[..], &7u32.to_be_bytes(), &len, &data].concat())?;
        loop {
            let mut header = [0; 20];
            stream.read_exact(&mut header)?;
            let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
            stream.read_exact(&mut vec![0; word(16) as usize])?;
            if word(12) == 1 {
                return Ok(Self(stream));
            }
            assert!(word(12) < 1 << 31, "refused: {:#x}", word(12));
        }
    }

    fn send(&mut self, command: u16, fua: bool, at: u64, len: usize, payload: &[u8]) -> io::Result<()> {
        let header = [
            &0x2560_9513u32.to_be_bytes()[..],
            &u16::from(fua).to_be_bytes(),
            &command.to_be_bytes(),
            &7u64.to_be_bytes(),
            &at.to_be_bytes(),
            &(len as u32).to_be_bytes(),
            payload,
        ];
        self.0.write_all(&header.concat())
    }

    /// The error that the server answers with, if it does.
    fn answer(&mut self) -> io::Result<Option<u32>> {
        let mut header = [0; 16];
        self.0.read_exact(&mut header)?;
        assert_eq!(header[..4], 0x6744_6698u32.to_be_bytes());
        let error = u32::from_be_bytes(header[4..8].try_into().unwrap());
        Ok((error != 0).then_some(error))
    }
}

/// A block's contents.
fn contents(place: u64, version: u64) -> Vec<u8> {
    [place.to_be_bytes(), version.to_be_bytes()].concat().repeat(BLOCK / 16)
}

/// What is known of a block's versions.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    /// The last version that was sent, if only in part.
    tried: u64,
    /// The last version that the server took.
    taken: u64,
    /// The last version that was taken before a flush that succeeded.
    flushed: u64,
}

/// One writer's part of the volume.
struct Region {
    first: u64,
    known: [Known; BLOCKS],
    random: Random,
    /// Answers with and without an error, by kind.
    answers: HashMap<(u16, bool), u64>,
}

impl Region {
    fn new(number: usize) -> Self {
        let first = (number * BLOCKS) as u64;
        Self { first, known: Default::default(), random: Random(first + 1), answers: HashMap::new() }
    }

    fn answered(&mut self, client: &mut Client, kind: u16) -> io::Result<bool> {
        let error = client.answer()?;
        assert!(error.is_none_or(|error| error == EIO), "{error:?}");
        *self.answers.entry((kind, error.is_some())).or_default() += 1;
        Ok(error.is_none())
    }

    /// Reads a block. Its version is one that may be there: not older than `least` says.
    fn check(&mut self, client: &mut Client, block: usize, least: fn(&Known) -> u64) -> io::Result<()> {
        let place = self.first + block as u64;
        client.send(kind::READ, false, place * BLOCK as u64, BLOCK, &[])?;
        if self.answered(client, kind::READ)? {
            let mut bytes = vec![0; BLOCK];
            client.0.read_exact(&mut bytes)?;
            let known = self.known[block];
            let mut possible = (least(&known).max(1)..=known.tried).rev();
            let is_possible = least(&known) == 0 || possible.any(|version| bytes == contents(place, version));
            assert!(is_possible, "block {place} of {known:?} has {:?}", &bytes[..16]);
        }
        Ok(())
    }

    /// A client comes, does this and that, and leaves in one way or another.
    fn visit(&mut self, socket: &Path, certificates: &Certificates) -> io::Result<()> {
        let mut client = Client::connect(socket, certificates)?;
        for _ in 0..8 {
            let block = self.random.below(BLOCKS);
            let place = self.first + block as u64;
            match self.random.below(4) {
                0 => self.check(&mut client, block, |known| known.taken)?,
                1 => {
                    client.send(kind::FLUSH, false, 0, 0, &[])?;
                    if self.answered(&mut client, kind::FLUSH)? {
                        self.known.iter_mut().for_each(|known| known.flushed = known.taken);
                    }
                }
                fua => {
                    let known = &mut self.known[block];
                    known.tried += 1;
                    let version = known.tried;
                    client.send(kind::WRITE, fua == 3, place * BLOCK as u64, BLOCK, &contents(place, version))?;
                    if self.answered(&mut client, kind::WRITE)? {
                        let known = &mut self.known[block];
                        known.taken = version;
                        known.flushed = if fua == 3 { version } else { known.flushed };
                    }
                }
            }
        }
        match self.random.below(4) {
            0 => client.send(kind::DISCONNECT, false, 0, 0, &[]),
            // In the middle of a write that is never whole.
            1 => {
                self.known[0].tried += 1;
                let part = &contents(self.first, self.known[0].tried)[..BLOCK / 2];
                client.send(kind::WRITE, false, self.first * BLOCK as u64, BLOCK, part)
            }
            2 => client.0.sock.write_all(b"\n<0>this is no TLS\x1b[2J"),
            _ => Ok(()),
        }
    }
}

/// The server and what it has said.
struct Server {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
    metrics: String,
    socket: PathBuf,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start(folder: &Folder) -> Self {
        let words = format!(
            "crypt serve disk --header header --key-file key --unix socket --tls-cert server.pem --tls-key server.key \
             --metrics 0 --threads 2 --handshake-timeout 600 --memory {MEMORY_MIB} --reserve {RESERVE}"
        );
        let mut command = Command::new(PROGRAM);
        command.args(words.split(' ')).current_dir(folder.path("")).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines: Arc<Mutex<Vec<String>>> = Arc::default();
        let (theirs, stderr) = (Arc::clone(&lines), child.stderr.take().unwrap());
        thread::spawn(move || {
            for line in BufReader::new(stderr).lines() {
                theirs.lock().unwrap().push(line.unwrap());
            }
        });
        let mut this = Self { child, lines, metrics: String::new(), socket: folder.path("socket") };
        let line = this.says("figures at ", 0);
        this.metrics = line.split("http://").nth(1).unwrap().strip_suffix("/metrics").unwrap().to_owned();
        this
    }

    /// Waits for a line, beyond the first `from`.
    fn says(&self, text: &str, from: usize) -> String {
        let mut found = None;
        until(text, || {
            let lines = self.lines.lock().unwrap();
            found = lines[from..].iter().find(|line| line.contains(text)).cloned();
            assert!(found.is_some() || Arc::strong_count(&self.lines) > 1, "no {text}: it ended: {lines:#?}");
            found.is_some()
        });
        found.unwrap()
    }

    fn said(&self) -> usize {
        self.lines.lock().unwrap().len()
    }

    /// All figures, by their names and labels.
    fn figures(&self) -> HashMap<String, u64> {
        let mut client = TcpStream::connect(&self.metrics).unwrap();
        client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
        let samples = body.lines().filter(|line| !line.starts_with('#'));
        samples
            .map(|line| line.rsplit_once(' ').unwrap())
            .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
            .collect()
    }

    /// The figures once all clients but `staying` ones are gone.
    fn figures_of_rest(&self, staying: u64) -> HashMap<String, u64> {
        // An answer is no snapshot, and a client has its answer a moment before the page of it is free.
        until("the end of all clients, and their pages", || {
            let figures = self.figures();
            figures["pagemill_crypt_connections"] == staying
                && figures["pagemill_handed_out_pages{allocator=\"crypt\"}"] == RESERVE
        });
        self.figures()
    }

    /// Its threads, its descriptors, and its memory in KiB.
    fn size(&self) -> (u64, usize, u64) {
        let proc = format!("/proc/{}", self.child.id());
        let status = fs::read_to_string(format!("{proc}/status")).unwrap();
        let value = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().next().unwrap().parse::<u64>().unwrap()
        };
        (value("Threads:"), fs::read_dir(format!("{proc}/fd")).unwrap().count(), value("RssAnon:"))
    }

    fn hang_up(&self) {
        signal(&self.child, Signal::HUP);
    }
}

/// How many events of a kind the log has: lines, and the numbers of those that were left out.
fn events(lines: &[String], line: &str, kind: &str) -> u64 {
    let said = lines.iter().filter(|other| other.contains(line)).count() as u64;
    let more = lines.iter().filter(|line| line.ends_with(&format!("more like this: {kind}")));
    let more = more.map(|line| line.split("… ").nth(1).unwrap().split(' ').next().unwrap().parse::<u64>().unwrap());
    said + more.sum::<u64>()
}

/// New certificates of a new authority; the server is told, and new clients see them.
fn replace(folder: &Folder, server: &Server, certificates: &mut Certificates, is_fit: bool) {
    let from = server.said();
    if !is_fit {
        fs::write(folder.path("server.key"), "no key").unwrap();
        server.hang_up();
        server.says("new clients get the certificates that were loaded before", from);
        return;
    }
    *certificates = Certificates::new();
    write(folder, certificates);
    server.hang_up();
    server.says("loaded the certificates again", from);
}

fn write(folder: &Folder, certificates: &Certificates) {
    fs::write(folder.path("server.pem"), &certificates.server.certificate).unwrap();
    fs::write(folder.path("server.key"), &certificates.server.key).unwrap();
}

/// Clients of all regions at once. With `is_cut` the server may go away under them.
fn visits(regions: &mut [Region], socket: &Path, certificates: &Certificates, is_cut: &AtomicBool) {
    thread::scope(|scope| {
        for region in regions {
            scope.spawn(move || {
                for _ in 0..VISITS {
                    match region.visit(socket, certificates) {
                        Err(_) if is_cut.load(SeqCst) => return,
                        visited => visited.unwrap(),
                    }
                }
            });
        }
    });
}

/// How a server's life ends.
#[derive(Clone, Copy, Debug)]
enum End {
    /// The disk fails to sync.
    Sync,
    /// SIGKILL, and a power cut.
    Kill,
    /// SIGTERM.
    Term,
}

#[test]
fn a_server_lives_through_failures_and_loses_nothing() {
    let rounds = std::env::var("PAGEMILL_SOAK_ROUNDS").map_or(9, |rounds| rounds.parse::<usize>().unwrap());
    let (folder, disk) = (Folder::new(), Disk::default());
    let Some(_mount) = mounted(&disk, &folder.path("disk")) else { return };
    folder.file("key", &[7; 32]);
    let format = "crypt format disk --header header --key-file key --kdf pbkdf2 --kdf-iterations 1000 --force";
    let made = folder.run(Command::new(PROGRAM).args(format.split(' ')));
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    let mut certificates = Certificates::new();
    let mut regions: Vec<_> = (0..WRITERS).map(Region::new).collect();
    let is_cut = AtomicBool::new(false);
    let mut left = rounds;
    for life in 0.. {
        let end = [End::Term, End::Sync, End::Kill][life % 3];
        let here = left.min((rounds / 9).max(3));
        left -= here;
        write(&folder, &certificates);
        let server = Server::start(&folder);
        regions.iter_mut().for_each(|region| region.answers.clear());
        // Nothing that was flushed is lost, however the last server ended.
        let mut stays = Client::connect(&server.socket, &certificates).unwrap();
        for region in &mut regions {
            for block in 0..BLOCKS {
                region.check(&mut stays, block, |known| known.flushed).unwrap();
            }
        }
        let (mut baseline, mut half) = (None, 0);
        for round in 0..here {
            live(&folder, &disk, &server, &mut regions, &mut certificates, round, &is_cut);
            // Certificates change only for new clients.
            regions[0].check(&mut stays, 0, |known| known.taken).unwrap();
            let figures = server.figures_of_rest(1);
            agrees(&server, &figures, &regions);
            let (threads, files, kib) = server.size();
            let (threads_then, files_then, kib_then) = *baseline.get_or_insert((threads, files, kib));
            assert_eq!(threads, threads_then, "round {round}");
            // A few of those that asked for figures may still be closing.
            assert!(files <= files_then + 8, "round {round}: {files} descriptors after {files_then}");
            // All memory for requests may be touched by and by.
            let most = kib_then + (MEMORY_MIB << 10) + 4096;
            assert!(kib <= most, "round {round}: {kib} KiB after {kib_then} KiB");
            half = if round == here / 2 { kib } else { half };
            if rounds > 50 && round + 1 == here {
                println!(
                    "life {life}, {end:?}: {kib_then}, {half} and {kib} KiB at the beginning, half and end of {here} rounds"
                );
            }
        }
        finish(end, server, stays, &disk, &mut regions, &certificates, &is_cut);
        if left == 0 {
            return;
        }
    }
}

/// One round: clients come and go while the disk fails and recovers, and between them the certificates change.
fn live(
    folder: &Folder,
    disk: &Disk,
    server: &Server,
    regions: &mut [Region],
    certificates: &mut Certificates,
    round: usize,
    is_cut: &AtomicBool,
) {
    visits(regions, &server.socket, certificates, is_cut);
    replace(folder, server, certificates, round.is_multiple_of(2));
    thread::scope(|scope| {
        let work = scope.spawn(|| visits(regions, &server.socket, certificates, is_cut));
        // Now and then, while they are at work.
        let mut fails = false;
        while !work.is_finished() {
            fails = !fails;
            disk.with(|state| match round % 3 {
                0 => state.write_fails = fails.then_some(EIO),
                1 => state.read_fails = fails,
                _ => {}
            });
            server.figures();
        }
        work.join().unwrap();
    });
    disk.with(|state| {
        (state.write_fails, state.read_fails) = (None, false);
        state.asked.clear();
    });
}

/// The figures agree with each other, with the clients, and with the log.
fn agrees(server: &Server, figures: &HashMap<String, u64>, regions: &[Region]) {
    let sum =
        |name: &str| figures.iter().filter(|(other, _)| other.starts_with(name)).map(|(_, value)| value).sum::<u64>();
    let (came, gone) = (figures["pagemill_crypt_connections_total"], sum("pagemill_crypt_connections_ended_total{"));
    assert_eq!(came, gone + 1);
    for (kind, name) in [(kind::READ, "read"), (kind::WRITE, "write"), (kind::FLUSH, "flush")] {
        let count = |is_error: bool| {
            regions.iter().map(|region| region.answers.get(&(kind, is_error)).unwrap_or(&0)).sum::<u64>()
        };
        assert_eq!(figures[&format!("pagemill_crypt_errors_total{{kind=\"{name}\"}}")], count(true), "{name}");
        let all = figures[&format!("pagemill_crypt_request_us_count{{kind=\"{name}\"}}")];
        assert_eq!(all, count(true) + count(false), "{name}");
        if count(true) > 0 {
            let failed = figures[&format!("pagemill_crypt_disk_errors_total{{export=\"\",operation=\"{name}\"}}")];
            assert!(failed >= count(true), "{name}: {failed} of {}", count(true));
        }
    }
    assert_eq!(figures["pagemill_crypt_disk_failed{export=\"\"}"], 0);
    // All pages but the reserve are free.
    assert_eq!(figures["pagemill_handed_out_pages{allocator=\"crypt\"}"], RESERVE);
    let has_failed = sum("pagemill_crypt_disk_errors_total{") > 0;
    assert!(
        !has_failed
            || server.lines.lock().unwrap().iter().any(|line| line.contains("WARN  the disk failed operation="))
    );
}

/// Ends a server's life.
fn finish(
    end: End,
    mut server: Server,
    mut stays: Client,
    disk: &Disk,
    regions: &mut [Region],
    certificates: &Certificates,
    is_cut: &AtomicBool,
) {
    let code = match end {
        End::Term => Some(0),
        End::Sync => {
            disk.with(|state| state.sync_fails = Some(EIO));
            let flush = |client: &mut Client| {
                client.send(kind::FLUSH, false, 0, 0, &[]).unwrap();
                client.answer().unwrap()
            };
            assert_eq!(flush(&mut stays), Some(EIO));
            disk.with(|state| state.sync_fails = None);
            let mut other = Client::connect(&server.socket, certificates).unwrap();
            assert_eq!(flush(&mut other), Some(EIO), "what the first one lost is lost for all");
            server.says("ERROR the disk failed to sync", 0);
            server.says("every flush fails from now on", 0);
            assert_eq!(server.figures()["pagemill_crypt_disk_failed{export=\"\"}"], 1);
            Some(1)
        }
        End::Kill => {
            is_cut.store(true, SeqCst);
            thread::scope(|scope| {
                let work = scope.spawn(|| visits(regions, &server.socket, certificates, is_cut));
                let before = server.figures()["pagemill_crypt_connections_total"];
                until("clients at work", || {
                    work.is_finished() || server.figures()["pagemill_crypt_connections_total"] > before + 2
                });
                server.child.kill().unwrap();
                server.child.wait().unwrap();
            });
            is_cut.store(false, SeqCst);
            None
        }
    };
    drop(stays);
    let came = code.map(|_| server.figures_of_rest(0)["pagemill_crypt_connections_total"]);
    if code.is_some() {
        signal(&server.child, Signal::TERM);
    }
    assert_eq!(server.child.wait().unwrap().code(), code, "{end:?}");
    until("the end of the log", || Arc::strong_count(&server.lines) == 1);
    // The power is cut: what was not synced is lost.
    disk.with(|state| state.bytes.clone_from(&state.durable));
    regions.iter_mut().flat_map(|region| &mut region.known).for_each(|known| known.taken = known.flushed);
    let mut lines = server.lines.lock().unwrap();
    if code != Some(0) {
        // A server that was killed had no time for its last line, and one that fails says so without the log.
        lines.retain(|line| is_plain_line(line));
    }
    assert!(lines.iter().all(|line| is_plain_line(line)), "{lines:#?}");
    if let Some(came) = came {
        assert_eq!(events(&lines, "INFO  client connected client=", "client connected"), came);
        let gone = ["client gone", "client closed", "client cut off"];
        let said = lines
            .iter()
            .filter(|line| line.contains(" client gone client=") || line.contains(" client cut off client="));
        let more: u64 = gone.iter().map(|kind| events(&lines, "\0", kind)).sum();
        assert_eq!(said.count() as u64 + more, came);
    }
}
