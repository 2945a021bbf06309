//! Clients over loopback against a service that echoes. Time ends a test only if it hangs.
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Condvar, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use pagemill::{Allocator, CachedFile, FileBacking, Gfp, PageCache};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::connection::REQUESTS_MAX;
use super::{Server, Service, Settings, Why, lock};
use crate::call::{Answer, Call, Pace, Status};
use crate::record::tests::{call, write_args};
use crate::record::{Header, MARK};

const NULL: u32 = 0;
/// The results are the arguments.
const ECHO: u32 = 1;
/// The results are as many bytes as the arguments say.
const MANY: u32 = 3;
/// The same, lent by a cache.
const LEND: u32 = 4;
/// The results are the length of the data, and their sum.
const WRITE: u32 = 7;
const PANIC: u32 = 50;
/// Waits at the gate.
const WAIT: u32 = 51;
/// The same, though it is one of those that are quick as a rule.
const QUICK_WAIT: u32 = 16;

const DEADLINE: Duration = Duration::from_secs(120);

/// Requests wait here until it is opened, for good.
#[derive(Default)]
struct Gate {
    /// How many have come, and whether it is open.
    state: Mutex<(usize, bool)>,
    change: Condvar,
}

impl Gate {
    fn pass(&self) {
        let mut state = lock(&self.state);
        state.0 += 1;
        self.change.notify_all();
        // A test that fails meanwhile stops the server, which waits for this.
        drop(self.change.wait_timeout_while(state, DEADLINE, |state| !state.1).unwrap());
    }
    fn wait_for(&self, count: usize) {
        let (state, timeout) =
            self.change.wait_timeout_while(lock(&self.state), DEADLINE, |state| state.0 < count).unwrap();
        assert!(!timeout.timed_out(), "only {} came", state.0);
    }
    fn open(&self) {
        lock(&self.state).1 = true;
        self.change.notify_all();
    }
}

struct Echo {
    gate: Gate,
    lends: Option<CachedFile>,
    /// Whether a WRITE takes its pages.
    takes: bool,
    writes: AtomicUsize,
}

impl Default for Echo {
    fn default() -> Self {
        Self { gate: Gate::default(), lends: None, takes: true, writes: AtomicUsize::new(0) }
    }
}

fn sum<'a>(bytes: impl IntoIterator<Item = &'a u8>) -> u32 {
    bytes.into_iter().fold(1, |sum: u32, &byte| sum.wrapping_mul(31).wrapping_add(byte.into()))
}

impl Service for Echo {
    fn pace(&self, header: &Header<'_>) -> Pace {
        match header.procedure {
            WRITE | PANIC | WAIT => Pace::Slow,
            _ => Pace::Quick,
        }
    }

    fn answer(&self, call: &mut Call<'_>) -> Answer {
        let number = || u32::from_be_bytes(*call.args.first_chunk().unwrap());
        match call.procedure {
            NULL => Answer::Results(Vec::new()),
            ECHO => Answer::Results(call.args.to_vec()),
            MANY => Answer::Results(vec![call.xid as u8; number() as usize]),
            LEND => {
                let lent = self.lends.as_ref().unwrap().lend(0, number() as usize).unwrap();
                Answer::Lent(call.args[..4].to_vec(), lent)
            }
            WRITE => {
                let len = call.payload.len;
                assert_eq!(call.args[call.args.len() - 4..], (len as u32).to_be_bytes());
                assert_eq!(call.payload.pages.len(), len.div_ceil(4096));
                let bytes = call.payload.pages.iter().flat_map(|page| page.as_ref().unwrap().iter()).take(len);
                let results = [len as u32, sum(bytes)];
                if self.takes {
                    call.payload.pages.iter_mut().for_each(|page| drop(page.take()));
                }
                self.writes.fetch_add(1, SeqCst);
                Answer::Results(results.iter().flat_map(|word| word.to_be_bytes()).collect())
            }
            PANIC => panic!("a procedure panics on purpose"),
            WAIT | QUICK_WAIT => {
                self.gate.pass();
                Answer::Results(b"done".to_vec())
            }
            _ => Answer::Refused(Status::NoProcedure),
        }
    }
}

fn allocator(pages: usize) -> Allocator {
    Allocator::builder().pages(pages).build().unwrap()
}

fn start_with(settings: Settings, allocator: &Allocator, echo: Echo) -> (Server, SocketAddr, Arc<Echo>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, echo) = (listener.local_addr().unwrap(), Arc::new(echo));
    (Server::start(listener, settings, allocator, |_| true, echo.clone()).unwrap(), address, echo)
}
fn start(threads: usize) -> (Server, SocketAddr, Arc<Echo>) {
    start_with(Settings { threads, ..Settings::default() }, &allocator(32 << 10), Echo::default())
}

struct Client(TcpStream);

impl Client {
    fn new(address: SocketAddr) -> Self {
        Self::of(TcpStream::connect(address).unwrap())
    }
    /// From another address of this machine.
    fn from_elsewhere(address: SocketAddr) -> Self {
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        bind(&socket, &SocketAddr::from(([127, 0, 0, 2], 0))).unwrap();
        connect(&socket, &address).unwrap();
        Self::of(socket.into())
    }
    fn of(socket: TcpStream) -> Self {
        socket.set_nodelay(true).unwrap();
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
        socket.set_write_timeout(Some(DEADLINE)).unwrap();
        Self(socket)
    }
    fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }
    /// A reply: its `xid`, and what is after the word that says that it is one.
    fn reply(&mut self) -> (u32, Vec<u8>) {
        let mut words = [0; 12];
        self.0.read_exact(&mut words).unwrap();
        let word = |at: usize| u32::from_be_bytes(*words[at..].first_chunk().unwrap());
        assert_eq!((word(0) >> 31, word(8)), (1, 1));
        let mut rest = vec![0; (word(0) & !(1 << 31)) as usize - 8];
        self.0.read_exact(&mut rest).unwrap();
        (word(4), rest)
    }
    /// The results of a call that was answered.
    fn results(&mut self) -> (u32, Vec<u8>) {
        let (xid, rest) = self.reply();
        assert_eq!(rest[..16], [0; 16], "accepted, no verifier, success");
        (xid, rest[16..].to_vec())
    }
    fn is_closed(&mut self) -> bool {
        loop {
            match self.0.read(&mut [0; 1]) {
                // The process was stopped, and goes on.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == io::ErrorKind::ConnectionReset,
                Ok(count) => return count == 0,
            }
        }
    }
}

fn fragment(bytes: &[u8], is_last: bool) -> Vec<u8> {
    [&(bytes.len() as u32 | u32::from(is_last) << 31).to_be_bytes(), bytes].concat()
}
fn record(xid: u32, procedure: u32, args: &[u8]) -> Vec<u8> {
    fragment(&call(xid, procedure, args), true)
}
fn bytes(len: usize, seed: u32) -> Vec<u8> {
    (0..len as u32).map(|i| ((i ^ seed).wrapping_mul(0x9e37_79b9) >> 24) as u8).collect()
}
fn write_results(data: &[u8]) -> Vec<u8> {
    [data.len() as u32, sum(data)].iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// Looks again and again.
fn until(mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < DEADLINE, "it never became so");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn pipelined_requests_are_all_answered() {
    let (server, address, _) = start(4);
    let mut client = Client::new(address);
    let all: Vec<u8> = (0..1000).flat_map(|xid| record(xid, ECHO, &bytes(4 * (xid as usize % 50), xid))).collect();
    let mut sender = client.0.try_clone().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || sender.write_all(&all).unwrap());
        let mut seen = vec![false; 1000];
        for _ in 0..1000 {
            let (xid, results) = client.results();
            assert_eq!(results, bytes(4 * (xid as usize % 50), xid));
            assert!(!std::mem::replace(&mut seen[xid as usize], true), "answered twice");
        }
    });
    assert_eq!(server.counters().requests.load(SeqCst), 1000);
    server.stop();
}

/// Requests of every kind, in one stream.
fn mixed() -> (Vec<u8>, Vec<(u32, Vec<u8>)>) {
    let mut stream = Vec::new();
    let mut results = Vec::new();
    for (xid, len) in [0, 1, 4, 99, 400, 1023, 4096, 4097, 9000].into_iter().enumerate() {
        let (xid, data) = (2 * xid as u32, bytes(len, 7));
        stream.extend(record(xid, WRITE, &write_args(&data)));
        results.push((xid, write_results(&data)));
        let args = bytes(len.next_multiple_of(4), 8);
        stream.extend(record(xid + 1, ECHO, &args));
        results.push((xid + 1, args));
    }
    (stream, results)
}

fn check_mixed(client: &mut Client, expected: &[(u32, Vec<u8>)]) {
    let mut results: Vec<_> = expected.iter().map(|_| client.results()).collect();
    results.sort();
    assert!(results == expected);
}

#[test]
fn requests_arrive_in_pieces_of_any_size() {
    let (server, address, _) = start(3);
    let (stream, expected) = mixed();
    for size in [1, 2, 3, 5, 7, 64, 1000, 1024, 4096, 10_000, 100_000] {
        let mut client = Client::new(address);
        stream.chunks(size).for_each(|piece| client.send(piece));
        check_mixed(&mut client, &expected);
    }
    server.stop();
}

#[test]
fn records_come_in_fragments_of_any_size() {
    let (server, address, _) = start(3);
    for size in [1, 3, 4, 10, 500, 5000] {
        let mut client = Client::new(address);
        let data = bytes(20_000, 3);
        for (xid, procedure, args) in [(1, ECHO, bytes(1200, 1)), (2, WRITE, write_args(&data)), (3, ECHO, bytes(8, 2))]
        {
            let record = call(xid, procedure, &args);
            let pieces = record.chunks(size).flat_map(|piece| fragment(piece, false));
            // The last fragment may be empty.
            client.send(&pieces.chain(fragment(&[], true)).collect::<Vec<_>>());
        }
        check_mixed(&mut client, &[(1, bytes(1200, 1)), (2, write_results(&data)), (3, bytes(8, 2))]);
    }
    server.stop();
}

#[test]
fn write_of_a_mebibyte_arrives_aligned_whole_and_in_pieces() {
    for takes in [true, false] {
        let settings = Settings { threads: 2, ..Settings::default() };
        let (server, address, echo) = start_with(settings, &allocator(4096), Echo { takes, ..Echo::default() });
        let data = bytes(1 << 20, 5);
        let stream: Vec<_> = (0..8).flat_map(|xid| record(xid, WRITE, &write_args(&data))).collect();
        let expected: Vec<_> = (0..8).map(|xid| (xid, write_results(&data))).collect();
        for size in [stream.len(), 100_000, 3001] {
            let mut client = Client::new(address);
            stream.chunks(size).for_each(|piece| client.send(piece));
            check_mixed(&mut client, &expected);
        }
        assert_eq!(echo.writes.load(SeqCst), 24);
        assert_eq!(server.hub.room.free(), settings.unfinished_pages);
        server.stop();
    }
}

#[test]
fn lent_pages_are_sent_and_padded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let contents = bytes(1 << 20, 9);
    std::fs::write(&path, &contents).unwrap();
    let memory = allocator(8192);
    let cache = PageCache::builder(&memory).build();
    let lends = Some(cache.open(FileBacking::open(&path).unwrap()).unwrap());
    let (server, address, _) = start_with(Settings::default(), &memory, Echo { lends, ..Echo::default() });
    let mut client = Client::new(address);
    let lens = [0, 1, 2, 3, 4, 4095, 4096, 4097, 300_001, 1 << 20, 5];
    let stream: Vec<_> = lens.iter().flat_map(|&len: &u32| record(len, LEND, &len.to_be_bytes())).collect();
    client.send(&stream);
    for _ in lens {
        let (len, results) = client.results();
        let data = &contents[..len as usize];
        let expected = [&len.to_be_bytes(), data, &[0; 3][..data.len().wrapping_neg() % 4]].concat();
        assert!(results == expected, "{len}");
    }
    server.stop();
}

#[test]
fn reader_that_is_slow_stops_nobody() {
    let (server, address, _) = start(2);
    let mut slow = Client::new(address);
    let many = 1_u32 << 20;
    let stream: Vec<_> = (0..64).flat_map(|xid| record(xid, MANY, &many.to_be_bytes())).collect();
    slow.send(&stream);
    // It takes nothing until the socket is full.
    until(|| server.hub.connections.all().iter().any(|connection| connection.is_blocked()));
    let mut other = Client::new(address);
    for xid in 0..1000 {
        other.send(&record(xid, ECHO, b"here"));
        assert_eq!(other.results(), (xid, b"here".to_vec()));
    }
    let mut seen: Vec<_> = (0..64)
        .map(|_| {
            let (xid, results) = slow.results();
            assert!(results.len() == many as usize && results.iter().all(|&byte| byte == xid as u8));
            xid
        })
        .collect();
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..64));
    server.stop();
}

#[test]
fn idle_and_unfinished_connections_stop_nobody() {
    let mut limit = getrlimit(Resource::Nofile);
    let room = limit.maximum.unwrap_or(8192).min(8192);
    limit = Rlimit { current: limit.current.map(|current| current.max(room)), ..limit };
    setrlimit(Resource::Nofile, limit).unwrap();
    let count = 1000.min(room as usize / 4);
    if count < 1000 {
        eprintln!("only {count} connections: this system allows no more descriptors");
    }
    let (server, address, _) = start(2);
    let mut idle: Vec<_> = (0..count).map(|_| Client::new(address)).collect();
    let slow = record(1, WRITE, &write_args(&bytes(100_000, 1)));
    let (first, rest) = slow.split_at(50_000);
    let mut unfinished = Client::new(address);
    unfinished.send(first);
    let mut other = Client::new(address);
    for xid in 0..1000 {
        other.send(&record(xid, ECHO, b"here"));
        assert_eq!(other.results(), (xid, b"here".to_vec()));
    }
    unfinished.send(rest);
    assert_eq!(unfinished.results(), (1, write_results(&bytes(100_000, 1))));
    for (xid, client) in idle.iter_mut().enumerate() {
        client.send(&record(xid as u32, NULL, &[]));
        assert_eq!(client.results(), (xid as u32, vec![]));
    }
    assert_eq!(server.counters().connections(), count as u64 + 2);
    server.stop();
    assert!(idle.iter_mut().all(Client::is_closed));
}

#[test]
fn unfinished_writes_wait_for_room_and_are_all_finished() {
    let settings = Settings { threads: 2, unfinished_pages: 256, ..Settings::default() };
    // Those that wait have a page each.
    let (server, address, _) = start_with(settings, &allocator(2 * 259 + 256 + 16), Echo::default());
    let started = Barrier::new(6);
    thread::scope(|scope| {
        for seed in 0..6 {
            let started = &started;
            scope.spawn(move || {
                let data = bytes(1 << 20, seed);
                let record = record(seed, WRITE, &write_args(&data));
                let mut client = Client::new(address);
                client.send(&record[..10_000]);
                started.wait();
                record[10_000..].chunks(50_000).for_each(|piece| client.send(piece));
                assert_eq!(client.results(), (seed, write_results(&data)));
            });
        }
    });
    assert_eq!(server.hub.room.free(), 256);
    server.stop();
}

#[test]
fn an_address_leaves_half_of_the_room_to_others() {
    let settings = Settings { threads: 2, unfinished_pages: 512, ..Settings::default() };
    let (server, address, _) = start_with(settings, &allocator(2048), Echo::default());
    let data = bytes(1 << 20, 1);
    let record = record(1, WRITE, &write_args(&data));
    let (first, rest) = record.split_at(10_000);
    let mut slow: Vec<_> = (0..4).map(|_| Client::new(address)).collect();
    slow.iter_mut().for_each(|client| client.send(first));
    let waiting = || server.counters().waits_for_room.load(SeqCst);
    until(|| waiting() == 3);
    let mut other = Client::from_elsewhere(address);
    for _ in 0..3 {
        other.send(first);
        until(|| server.hub.room.free() == 0);
        other.send(rest);
        assert_eq!(other.results(), (1, write_results(&data)));
    }
    // Each is granted room as the one before it is done.
    for client in &mut slow {
        client.send(rest);
    }
    assert!(slow.iter_mut().all(|client| client.results() == (1, write_results(&data))));
    assert_eq!((server.hub.room.free(), waiting()), (512, 3));
    server.stop();
}

#[test]
fn a_write_that_comes_byte_by_byte_is_closed_though_it_is_never_silent() {
    let stalled_after = Duration::from_millis(200);
    let settings = Settings { threads: 2, stalled_after, ..Settings::default() };
    let (server, address, _) = start_with(settings, &allocator(32 << 10), Echo::default());
    let mut client = Client::new(address);
    client.send(&record(1, WRITE, &write_args(&bytes(1 << 20, 1)))[..10_000]);
    until(|| client.0.write_all(&[0]).is_err());
    until(|| server.counters().closed(Why::Stalled) == 1 && server.hub.connections.len() == 0);
    server.stop();
}

#[test]
fn a_request_does_not_wait_for_a_slow_one_of_the_same_packet() {
    let (server, address, echo) = start(2);
    let mut client = Client::new(address);
    client.send(&[record(1, WAIT, b""), record(2, ECHO, b"here"), record(3, WAIT, b"")].concat());
    assert_eq!(client.results(), (2, b"here".to_vec()));
    echo.gate.open();
    let mut results = [client.results(), client.results()];
    results.sort();
    assert_eq!(results, [(1, b"done".to_vec()), (3, b"done".to_vec())]);
    server.stop();
}

#[test]
fn connection_that_ends_within_a_record_frees_its_pages() {
    let settings = Settings { threads: 1, unfinished_pages: 256, ..Settings::default() };
    let (server, address, _) = start_with(settings, &allocator(259 + 256 + 16), Echo::default());
    let data = bytes(1 << 20, 1);
    let record = record(1, WRITE, &write_args(&data));
    for round in 1..=10 {
        let mut client = Client::new(address);
        client.send(&record[..900_000]);
        drop(client);
        until(|| server.counters().closed(Why::Broken) == round);
    }
    until(|| server.hub.connections.len() == 0 && server.hub.room.free() == 256);
    let mut client = Client::new(address);
    client.send(&record);
    assert_eq!(client.results(), (1, write_results(&data)));
    server.stop();
}

#[test]
fn lies_about_lengths_are_refused() {
    let (server, address, _) = start(2);
    let refused = |bytes: &[u8]| {
        let mut client = Client::new(address);
        client.send(bytes);
        client.is_closed()
    };
    assert!(refused(&[0x7f, 0xff, 0xff, 0xff]) && refused(&[0xff; 64]));
    // In the second fragment; and one that is too long for what it calls.
    assert!(refused(&[fragment(&call(1, ECHO, &[]), false), vec![0x80, 0x20, 0, 0]].concat()));
    assert!(refused(&record(1, ECHO, &bytes(17 << 10, 1))));
    let many = bytes(17 << 10, 1);
    assert!(refused(&[fragment(&call(1, ECHO, &many[..9000]), false), fragment(&many[..9000], false)].concat()));
    until(|| server.counters().closed(Why::TooLong) == 5);
    // No call, no bytes, and a record that goes on behind its data.
    assert!(refused(&fragment(&[0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 2], true)) && refused(&fragment(&[], true)));
    assert!(refused(&[fragment(&call(1, WRITE, &write_args(b"data")), false), fragment(&[0; 4], true)].concat()));
    until(|| server.counters().closed(Why::Malformed) == 3);

    // The data of a WRITE, longer or shorter than it says: the connection goes on.
    let mut client = Client::new(address);
    let garbage = [[0; 15].as_slice(), &[4]].concat();
    for lie in [0_u32, 5, 8, 100, 1 << 20, (1 << 20) + 1, u32::MAX] {
        let mut args = write_args(b"data");
        let at = args.len() - 8;
        args[at..at + 4].copy_from_slice(&lie.to_be_bytes());
        client.send(&record(lie, WRITE, &args));
        assert_eq!(client.reply(), (lie, garbage.clone()), "{lie}");
    }
    for cut in [1, 4, 8, 20] {
        let whole = call(5, WRITE, &write_args(b"data"));
        client.send(&fragment(&whole[..whole.len() - cut], true));
        assert_eq!(client.reply(), (5, garbage.clone()), "{cut}");
        // In fragments, of which the last one is the lie.
        client.send(&[fragment(&whole[..whole.len() - cut], false), fragment(&[], true)].concat());
        assert_eq!(client.reply(), (5, garbage.clone()), "{cut}");
    }
    client.send(&record(6, WRITE, &write_args(b"data")));
    assert_eq!(client.results(), (6, write_results(b"data")));
    assert_eq!(server.counters().garbage.load(SeqCst), 7 + 8);
    server.stop();
}

#[test]
fn more_connections_than_the_limit_are_refused() {
    let settings = Settings { threads: 1, connections: 2, ..Settings::default() };
    let (server, address, _) = start_with(settings, &allocator(1024), Echo::default());
    let mut clients = [Client::new(address), Client::new(address)];
    for client in &mut clients {
        client.send(&record(1, NULL, &[]));
        client.results();
    }
    assert!(Client::new(address).is_closed());
    until(|| server.counters().refused_full.load(SeqCst) == 1);
    let [first, mut second] = clients;
    drop(first);
    until(|| server.counters().closed(Why::Ended) == 1 && server.hub.connections.len() == 1);
    let mut third = Client::new(address);
    for client in [&mut second, &mut third] {
        client.send(&record(2, NULL, &[]));
        client.results();
    }
    server.stop();
}

#[test]
fn peers_that_are_not_allowed_are_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let allows = |peer: std::net::IpAddr| !peer.is_loopback();
    let server =
        Server::start(listener, Settings::default(), &allocator(8192), allows, Arc::new(Echo::default())).unwrap();
    assert!(Client::new(address).is_closed());
    until(|| server.counters().refused_peers.load(SeqCst) == 1);
    assert_eq!(server.counters().connections(), 0);
    server.stop();
}

#[test]
fn connection_that_stalls_within_a_record_is_closed_and_an_idle_one_is_not() {
    let settings = Settings { threads: 1, stalled_after: Duration::from_millis(20), ..Settings::default() };
    let (server, address, _) = start_with(settings, &allocator(2048), Echo::default());
    let mut idle = Client::new(address);
    idle.send(&record(1, NULL, &[]));
    idle.results();
    let write = record(1, WRITE, &write_args(&bytes(100_000, 1)));
    for cut in [2, MARK, 40, 300, 50_000, write.len() - 1] {
        let mut client = Client::new(address);
        client.send(&write[..cut]);
        assert!(client.is_closed());
    }
    until(|| server.counters().closed(Why::Stalled) == 6);
    idle.send(&record(2, NULL, &[]));
    idle.results();
    server.stop();
}

#[test]
fn connection_that_stalls_after_it_waited_for_room_is_closed() {
    let stalled_after = Duration::from_millis(20);
    let settings = Settings { threads: 2, unfinished_pages: 256, stalled_after, ..Settings::default() };
    let (server, address, _) = start_with(settings, &allocator(2048), Echo::default());
    let write = record(1, WRITE, &write_args(&bytes(1 << 20, 1)));
    let mut clients: Vec<_> = (0..8).map(|_| Client::new(address)).collect();
    clients.iter_mut().for_each(|client| client.send(&write[..600]));
    assert!(clients.iter_mut().all(Client::is_closed));
    until(|| server.counters().closed(Why::Stalled) == 8 && server.hub.room.free() == 256);
    server.stop();
}

#[test]
fn peer_that_sends_no_more_gets_its_replies() {
    let (server, address, _) = start(2);
    let mut client = Client::new(address);
    client.send(&(0..100).flat_map(|xid| record(xid, MANY, &100_000_u32.to_be_bytes())).collect::<Vec<_>>());
    client.0.shutdown(Shutdown::Write).unwrap();
    for _ in 0..100 {
        assert_eq!(client.results().1.len(), 100_000);
    }
    assert!(client.is_closed());
    until(|| server.counters().closed(Why::Ended) == 1);
    server.stop();
}

#[test]
fn panic_of_a_procedure_is_a_system_error() {
    let (server, address, _) = start(1);
    let mut client = Client::new(address);
    for xid in 0..3 {
        client.send(&record(xid, PANIC, &[]));
        assert_eq!(client.reply(), (xid, [[0; 15].as_slice(), &[5]].concat()));
    }
    client.send(&record(7, ECHO, b"here"));
    assert_eq!(client.results(), (7, b"here".to_vec()));
    assert_eq!(server.counters().panics.load(SeqCst), 3);
    server.stop();
}

#[test]
fn requests_that_wait_leave_a_thread_for_others() {
    for (procedure, waiting) in [(WAIT, 11), (QUICK_WAIT, 1)] {
        let (server, address, echo) = start(12);
        let mut clients: Vec<_> = (0..waiting).map(|_| Client::new(address)).collect();
        clients.iter_mut().for_each(|client| client.send(&record(1, procedure, &[])));
        echo.gate.wait_for(waiting);
        // Of another connection, and of one with a request that waits.
        clients.push(Client::new(address));
        for client in [0, waiting] {
            for xid in 2..100 {
                clients[client].send(&record(xid, ECHO, b"here"));
                assert_eq!(clients[client].results(), (xid, b"here".to_vec()));
            }
        }
        echo.gate.open();
        for client in &mut clients[..waiting] {
            assert_eq!(client.results(), (1, b"done".to_vec()));
        }
        server.stop();
    }
}

#[test]
fn input_rests_while_too_many_requests_are_in_progress() {
    let (server, address, echo) = start(REQUESTS_MAX + 1);
    let mut client = Client::new(address);
    // One at a time, so that each is a batch of its own.
    for xid in 0..REQUESTS_MAX {
        client.send(&record(xid as u32, WAIT, &[]));
        echo.gate.wait_for(xid + 1);
    }
    client.send(&record(1000, NULL, &[]));
    let mut other = Client::new(address);
    other.send(&record(1, NULL, &[]));
    assert_eq!(other.results(), (1, vec![]));
    assert_eq!(server.counters().requests.load(SeqCst), REQUESTS_MAX as u64 + 1);
    echo.gate.open();
    let mut seen: Vec<_> = (0..=REQUESTS_MAX).map(|_| client.results().0).collect();
    seen.sort_unstable();
    assert!(seen.into_iter().eq((0..REQUESTS_MAX as u32).chain([1000])));
    server.stop();
}

/// Stops the server; a hang is a failure.
fn stop(server: Server) -> mpsc::Receiver<()> {
    let (done, receiver) = mpsc::channel();
    thread::spawn(move || {
        server.stop();
        done.send(())
    });
    receiver
}

#[test]
fn stop_answers_the_request_in_progress() {
    let (server, address, echo) = start(2);
    let mut client = Client::new(address);
    client.send(&record(1, WAIT, &[]));
    echo.gate.wait_for(1);
    // The other thread serves meanwhile, the same connection too.
    client.send(&record(2, NULL, &[]));
    assert_eq!(client.results(), (2, vec![]));
    let hub = server.hub.clone();
    let stopped = stop(server);
    until(|| hub.stop.is_cancelled());
    assert!(stopped.try_recv().is_err(), "a request is in progress");
    echo.gate.open();
    assert_eq!(client.results(), (1, b"done".to_vec()));
    stopped.recv_timeout(DEADLINE).unwrap();
    assert!(client.is_closed());
    assert_eq!((hub.counters.closed(Why::Stopped), hub.counters.connections()), (1, 0));
}

#[test]
fn stop_ends_a_wait_for_memory() {
    let settings = Settings { threads: 3, ..Settings::default() };
    let memory = allocator(100);
    let (server, address, _) = start_with(settings, &memory, Echo::default());
    let mut client = Client::new(address);
    client.send(&record(1, NULL, &[]));
    // The arrays have all that there is; a page that came would wake a thread that waits.
    until(|| memory.alloc_page(Gfp::NOWAIT).is_err());
    stop(server).recv_timeout(DEADLINE).unwrap();
    assert!(client.is_closed());
}

#[test]
fn stop_with_connections_in_every_state() {
    let (server, address, _) = start(4);
    let write = record(1, WRITE, &write_args(&bytes(1 << 20, 1)));
    let clients = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for number in 0..8 {
            let (write, clients) = (&write, &clients);
            scope.spawn(move || {
                let mut client = Client::new(address);
                client.send(&record(1, NULL, &[]));
                client.results();
                client.send(&write[..number * 100_000]);
                lock(clients).push(client);
            });
        }
    });
    let hub = server.hub.clone();
    stop(server).recv_timeout(DEADLINE).unwrap();
    assert_eq!((hub.connections.len(), hub.counters.connections()), (0, 0));
    assert!(lock(&clients).iter_mut().all(Client::is_closed));
}
