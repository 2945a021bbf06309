//! Clients over loopback against a service that echoes. Time ends a test only if it hangs.
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Condvar, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use pagemill::{Allocator, CachedFile, FileBacking, Gfp, PageCache};
use rustix::net::sockopt::{set_socket_linger, set_socket_recv_buffer_size};
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::clock::TICKS;
use super::connection::{ASKED_MAX, Connection, REQUESTS_MAX};
use super::input::PROGRESS;
use super::{Server, Service, Settings, Why, lock};
use crate::call::{Answer, Call, Pace, Status};
use crate::record::MARK;
use crate::record::tests::{call, write_args};
use crate::syscalls::unsent;

const NULL: u32 = 0;
/// The results are the arguments.
const ECHO: u32 = 1;
/// The results are as many bytes as the arguments say.
const MANY: u32 = 3;
/// The same, lent by a cache.
const LEND: u32 = 4;
/// The results are the length of the data, and their sum.
const WRITE: u32 = 7;
/// Waits at the gate. The last word of the arguments is the length of the reply that is asked for.
const READ: u32 = 6;
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
    fn pace(&self, [_, _, procedure]: [u32; 3]) -> Pace {
        match procedure {
            WRITE | PANIC | WAIT | READ => Pace::Slow,
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
            WAIT | QUICK_WAIT | READ => {
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
        Self::from(Ipv4Addr::LOCALHOST, address)
    }
    /// A client with this address, which is one of this machine's.
    fn from(own: Ipv4Addr, address: SocketAddr) -> Self {
        Self::with(own, None, address)
    }
    /// A client whose system keeps about so many bytes that it has not read.
    fn with(own: Ipv4Addr, unread: Option<usize>, address: SocketAddr) -> Self {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        unread.into_iter().for_each(|bytes| set_socket_recv_buffer_size(&socket, bytes).unwrap());
        bind(&socket, &SocketAddr::from((own, 0))).unwrap();
        connect(&socket, &address).unwrap();
        let socket = TcpStream::from(socket);
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
                Ok(count) => return count == 0,
                // The process was stopped and went on.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == io::ErrorKind::ConnectionReset,
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
    assert!(refused(&fragment(&[], false)));
    assert!(refused(&[fragment(&call(1, WRITE, &write_args(b"data")), false), fragment(&[0; 4], true)].concat()));
    until(|| server.counters().closed(Why::Malformed) == 4);

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
fn more_connections_than_the_limit_are_refused_while_none_is_idle() {
    let settings = Settings { threads: 3, connections: 2, ..Settings::default() };
    let (server, address, echo) = start_with(settings, &allocator(2048), Echo::default());
    let mut clients = [Client::new(address), Client::new(address)];
    // One has a request in progress, the other one a part of a record.
    clients[0].send(&record(1, WAIT, &[]));
    echo.gate.wait_for(1);
    let received = || server.counters().received_bytes.load(SeqCst);
    let before = received();
    let (part, rest) = (&record(1, NULL, &[])[..10], &record(1, NULL, &[])[10..]);
    clients[1].send(part);
    until(|| received() == before + 10);
    assert!(Client::new(address).is_closed());
    until(|| server.counters().refused_full.load(SeqCst) == 1);
    clients[1].send(rest);
    echo.gate.open();
    clients.iter_mut().for_each(|client| assert_eq!(client.results().0, 1));
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
fn a_newcomer_takes_the_place_of_the_address_with_most_connections_that_is_idle_longest() {
    let settings = Settings { threads: 1, connections: 3, ..Settings::default() };
    let (server, address, _) = start_with(settings, &allocator(1024), Echo::default());
    let [here, there] = [Ipv4Addr::LOCALHOST, Ipv4Addr::new(127, 0, 0, 2)];
    let request = |client: &mut Client| {
        client.send(&record(1, NULL, &[]));
        client.results();
        // It is idle once its reply is no longer being sent.
        until(|| server.hub.connections.all().iter().all(|connection| connection.is_idle()));
    };
    let mut clients = [there, here, here].map(|own| Client::from(own, address));
    [0, 2, 1].into_iter().for_each(|client| request(&mut clients[client]));
    let mut newcomer = Client::new(address);
    assert!(clients[2].is_closed());
    clients[..2].iter_mut().chain([&mut newcomer]).for_each(request);
    let mut newcomer = Client::from(there, address);
    assert!(clients[1].is_closed());
    request(&mut newcomer);
    let counters = server.counters();
    assert_eq!((counters.closed(Why::Idle), counters.refused_full.load(SeqCst), counters.connections()), (2, 0, 3));
    server.stop();
}

#[test]
fn an_address_with_many_connections_takes_no_place_from_one_with_few_and_has_half_at_most() {
    let settings = Settings { threads: 1, connections: 4, ..Settings::default() };
    let (server, address, _) = start_with(settings, &allocator(1024), Echo::default());
    let [few, many, newcomer] = [1, 2, 3].map(|number| Ipv4Addr::new(127, 0, 0, number));
    let request = |client: &mut Client| {
        client.send(&record(1, NULL, &[]));
        client.results();
    };
    let mut idle = Client::from(few, address);
    request(&mut idle);
    let before = server.counters().received_bytes.load(SeqCst);
    // None of these is idle.
    let mut unfinished: Vec<_> = (0..3).map(|_| Client::from(many, address)).collect();
    unfinished.iter_mut().for_each(|client| client.send(&record(1, NULL, &[])[..10]));
    until(|| server.counters().received_bytes.load(SeqCst) == before + 30);
    assert!(Client::from(many, address).is_closed());
    request(&mut idle);
    let mut newcomer = Client::from(newcomer, address);
    request(&mut newcomer);
    assert!(unfinished[0].is_closed());
    request(&mut idle);
    let counters = server.counters();
    assert_eq!((counters.closed(Why::Idle), counters.refused_full.load(SeqCst)), (1, 1));
    server.stop();
}

#[test]
fn those_that_connect_without_end_do_not_stop_the_clock() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let stranger = Ipv4Addr::new(127, 0, 0, 2);
    let is_over = Arc::new(AtomicBool::new(false));
    // Whenever a stranger is accepted, the next one is there already.
    let allows = {
        let is_over = is_over.clone();
        move |peer: std::net::IpAddr| {
            if peer == stranger && !is_over.load(SeqCst) {
                drop(Client::from(stranger, address));
            }
            peer != stranger
        }
    };
    let settings = Settings { threads: 1, stalled_after: Duration::from_millis(20), ..Settings::default() };
    let server = Server::start(listener, settings, &allocator(1024), allows, Arc::new(Echo::default())).unwrap();
    let mut client = Client::new(address);
    drop(Client::from(stranger, address));
    client.send(&record(1, NULL, &[])[..10]);
    let is_closed = client.is_closed();
    is_over.store(true, SeqCst);
    assert!(is_closed);
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

/// A server whose clock stands still but for `tick`: a tick is a long time.
fn start_without_time() -> (Server, SocketAddr, Arc<Echo>) {
    let settings = Settings { threads: 2, stalled_after: Duration::from_secs(1 << 20), ..Settings::default() };
    start_with(settings, &allocator(8192), Echo::default())
}
fn tick(server: &Server, number: u64) {
    server.hub.clock.set(number);
    server.hub.connections.all().iter().for_each(|connection| connection.end_if_stalled(number, &server.hub));
}

#[test]
fn record_that_comes_byte_by_byte_is_not_waited_for() {
    let (server, address, _) = start_without_time();
    let received = || server.counters().received_bytes.load(SeqCst) as usize;
    let data = bytes(1 << 20, 1);
    let write = record(1, WRITE, &write_args(&data));
    // Fragments without a byte are no progress either.
    let empty = [fragment(&[0], false), vec![0; 2 * MARK]].concat();
    for (record, begin) in [(&write, 0), (&write, 1000), (&write, 900_000), (&empty, MARK + 1)] {
        let mut client = Client::new(address);
        let before = received();
        client.send(&record[..begin]);
        until(|| received() - before == begin);
        for number in 0..=u64::from(TICKS) {
            tick(&server, number);
            let at = begin + number as usize;
            client.send(&record[at..=at]);
            until(|| received() - before == at + 1);
        }
        tick(&server, u64::from(TICKS) + 1);
        assert!(client.is_closed(), "{begin}");
        server.hub.clock.set(0);
    }
    until(|| server.counters().closed(Why::Stalled) == 4);

    // With a little more in that time it goes on.
    let mut client = Client::new(address);
    let (mut before, mut number) = (received(), 0);
    for piece in write.chunks(PROGRESS) {
        client.send(piece);
        before += piece.len();
        until(|| received() == before);
        number += u64::from(TICKS);
        tick(&server, number);
    }
    assert_eq!(client.results(), (1, write_results(&data)));
    server.stop();
}

#[test]
fn peer_that_does_not_take_a_reply_is_not_waited_for() {
    let (server, address, _) = start_without_time();
    let mut client = Client::new(address);
    // One: more may be received.
    client.send(&record(1, MANY, &(64_u32 << 20).to_be_bytes()));
    until(|| server.hub.connections.all().iter().any(|connection| connection.is_blocked()));
    tick(&server, u64::from(TICKS));
    assert_eq!(server.hub.connections.len(), 1);
    // Its system may have taken more, as long as it had room.
    let mut number = 0;
    until(|| {
        number += u64::from(TICKS) + 1;
        tick(&server, number);
        server.counters().closed(Why::Stalled) == 1
    });
    server.stop();
}

#[test]
fn peer_that_takes_a_reply_slowly_gets_all_of_it() {
    let (server, address, _) = start_without_time();
    // What it does not read is soon in the server's socket.
    let mut client = Client::with(Ipv4Addr::LOCALHOST, Some(64 << 10), address);
    let len = 16 << 20;
    client.send(&record(1, MANY, &(len as u32).to_be_bytes()));
    until(|| server.hub.connections.all().iter().any(|connection| connection.is_blocked()));
    let connection = server.hub.connections.all().remove(0);
    let unsent = || unsent(connection.socket.as_fd()).unwrap();
    let (mut received, mut number) = (0, 0);
    // It takes a little more than it must. The socket has no room for more meanwhile.
    while connection.is_blocked() && number < 10 * u64::from(TICKS) {
        let before = unsent();
        while connection.is_blocked() && unsent() + PROGRESS > before {
            received += client.0.read(&mut [0; 4096]).unwrap();
        }
        number += u64::from(TICKS);
        tick(&server, number);
    }
    assert_eq!(server.counters().closed(Why::Stalled), 0);
    let mut rest = vec![0; MARK + 24 + len - received];
    client.0.read_exact(&mut rest).unwrap();
    server.stop();
}

/// How many bytes a server has not read of what came.
fn unread(server: &Server) -> u64 {
    let all = server.hub.connections.all();
    all.iter().map(|connection| rustix::io::ioctl_fionread(&connection.socket).unwrap()).sum()
}

#[test]
fn record_that_comes_while_all_threads_are_busy_does_not_stall() {
    let (server, address, echo) = start_without_time();
    let data = bytes(20_000, 1);
    let write = record(1, WRITE, &write_args(&data));
    let mut client = Client::new(address);
    client.send(&write[..10_000]);
    until(|| server.counters().received_bytes.load(SeqCst) == 10_000);
    let mut others = [Client::new(address), Client::new(address)];
    for (count, other) in others.iter_mut().enumerate() {
        other.send(&record(1, WAIT, &[]));
        echo.gate.wait_for(count + 1);
    }
    client.send(&write[10_000..]);
    until(|| unread(&server) == write.len() as u64 - 10_000);
    (0..=2 * u64::from(TICKS)).for_each(|number| tick(&server, number));
    echo.gate.open();
    assert_eq!(client.results(), (1, write_results(&data)));
    server.stop();
}

#[test]
fn connection_with_a_request_that_is_not_read_yet_is_not_idle() {
    let settings = Settings { threads: 2, connections: 3, ..Settings::default() };
    let (server, address, echo) = start_with(settings, &allocator(2048), Echo::default());
    let mut client = Client::new(address);
    client.send(&record(1, NULL, &[]));
    client.results();
    let mut others = [Client::new(address), Client::new(address)];
    for (count, other) in others.iter_mut().enumerate() {
        other.send(&record(1, WAIT, &[]));
        echo.gate.wait_for(count + 1);
    }
    let request = record(2, ECHO, b"here");
    client.send(&request);
    until(|| unread(&server) == request.len() as u64);
    assert!(Client::new(address).is_closed());
    echo.gate.open();
    assert_eq!(client.results(), (2, b"here".to_vec()));
    server.stop();
}

#[test]
fn unfinished_writes_of_one_address_leave_room_for_those_of_another() {
    let settings = Settings { threads: 2, unfinished_pages: 512, ..Settings::default() };
    let (server, address, _) = start_with(settings, &allocator(4096), Echo::default());
    let data = bytes(1 << 20, 1);
    let write = record(1, WRITE, &write_args(&data));
    let mut slow: Vec<_> = (0..4).map(|_| Client::new(address)).collect();
    for (waiting, client) in slow.iter_mut().enumerate() {
        client.send(&write[..600]);
        until(|| server.hub.room.waiting() == waiting && server.hub.room.free() == 256);
    }
    let mut other = Client::from(Ipv4Addr::new(127, 0, 0, 2), address);
    for _ in 0..10 {
        other.send(&write);
        assert_eq!(other.results(), (1, write_results(&data)));
    }
    assert_eq!((server.hub.room.free(), server.hub.room.waiting()), (256, 3));
    // Each in its turn.
    for client in &mut slow {
        client.send(&write[600..]);
        assert_eq!(client.results(), (1, write_results(&data)));
    }
    assert_eq!(server.hub.room.free(), 512);
    server.stop();
}

/// Adds a connection that looks as if it came from there.
fn add_from(peer: &str, server: &Server, address: SocketAddr) -> Arc<Connection> {
    let (socket, peer) = (TcpStream::connect(address).unwrap(), peer.parse().unwrap());
    let new = |token| Connection::new(token, socket, peer, &server.hub);
    server.hub.connections.add(server.hub.settings.connections, new).unwrap()
}

#[test]
fn an_address_that_has_room_and_waits_for_more_stops_no_other() {
    let settings = Settings { threads: 1, unfinished_pages: 512, ..Settings::default() };
    let (server, address, _) = start_with(settings, &allocator(1024), Echo::default());
    let connections: Vec<_> =
        (1..=5).map(|number| add_from(&format!("10.0.0.{number}:700"), &server, address)).collect();
    let reserve = |connection: usize, pages| server.hub.room.reserve(pages, &connections[connection]);
    let first = reserve(0, 256).unwrap();
    assert!(reserve(0, 256).is_none());
    let second = reserve(1, 200).unwrap();
    let third = reserve(2, 16).unwrap();
    // One that has none is not passed by smaller ones.
    assert!(reserve(3, 50).is_none() && reserve(4, 1).is_none());
    drop(second);
    // All but the first address's second.
    assert_eq!((server.hub.room.waiting(), server.hub.room.free()), (1, 512 - 256 - 16 - 51));
    drop((first, third));
    server.stop();
}

#[test]
fn users_of_a_machine_who_are_not_served_leave_room_for_those_who_are() {
    let settings = Settings { threads: 1, unfinished_pages: 512, ..Settings::default() };
    let (server, address, _) = start_with(settings, &allocator(1024), Echo::default());
    let [user, root] = ["10.0.0.1:40000", "10.0.0.1:700"].map(|peer| add_from(peer, &server, address));
    let held = server.hub.room.reserve(256, &user).unwrap();
    assert!(server.hub.room.reserve(256, &user).is_none());
    assert!(server.hub.room.reserve(256, &root).is_some());
    drop(held);
    server.stop();
}

#[test]
fn peer_that_leaves_while_it_waits_for_room_is_not_waited_for() {
    let settings = Settings { threads: 2, unfinished_pages: 256, ..Settings::default() };
    let (server, address, _) = start_with(settings, &allocator(2048), Echo::default());
    let data = bytes(1 << 20, 1);
    let write = record(1, WRITE, &write_args(&data));
    let mut first = Client::new(address);
    first.send(&write[..600]);
    until(|| server.hub.room.free() == 0);
    // One has sent all of its WRITE, and waits for the reply alone.
    let small = bytes(5000, 2);
    let mut complete = Client::new(address);
    complete.send(&record(2, WRITE, &write_args(&small)));
    complete.0.shutdown(Shutdown::Write).unwrap();
    for round in 1..=5 {
        let mut client = Client::new(address);
        client.send(&write[..600]);
        until(|| server.counters().waits_for_room.load(SeqCst) == round + 1);
        drop(client);
        until(|| server.counters().closed(Why::Broken) == round && server.hub.connections.len() == 2);
    }
    assert_eq!(server.hub.room.waiting(), 1);
    first.send(&write[600..]);
    assert_eq!(first.results(), (1, write_results(&data)));
    assert_eq!(complete.results(), (2, write_results(&small)));
    until(|| server.hub.room.free() == 256);
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

#[test]
fn input_rests_while_requests_in_progress_ask_for_too_much() {
    const LARGEST: usize = 1 << 20;
    let count = ASKED_MAX / LARGEST;
    let (server, address, echo) = start(count + 2);
    let mut client = Client::new(address);
    for xid in 0..count {
        // More than the largest reply is asked for in vain.
        client.send(&record(xid as u32, READ, &((LARGEST << (xid % 3)) as u32).to_be_bytes()));
        echo.gate.wait_for(xid + 1);
    }
    client.send(&record(1000, NULL, &[]));
    let mut other = Client::new(address);
    other.send(&record(1, NULL, &[]));
    assert_eq!(other.results(), (1, vec![]));
    assert_eq!(server.counters().requests.load(SeqCst), count as u64 + 1);
    echo.gate.open();
    let mut seen: Vec<_> = (0..=count).map(|_| client.results().0).collect();
    seen.sort_unstable();
    assert!(seen.into_iter().eq((0..count as u32).chain([1000])));
    server.stop();
}

#[test]
fn quick_requests_do_not_wait_for_a_slow_one_that_came_with_them() {
    let (server, address, echo) = start(2);
    let mut client = Client::new(address);
    let procedures = [ECHO, WAIT, ECHO, NULL];
    let stream: Vec<_> = (0..4).flat_map(|xid| record(xid, procedures[xid as usize], &[])).collect();
    client.send(&stream);
    for xid in [0, 2, 3] {
        assert_eq!(client.results(), (xid, vec![]));
    }
    echo.gate.open();
    assert_eq!(client.results(), (1, b"done".to_vec()));
    server.stop();
}

/// One of the ways in which a client uses a connection and ends it. It may be closed at any time.
fn use_somehow(client: &mut Client, random: &mut impl FnMut(usize) -> usize) -> io::Result<()> {
    let write = record(1, WRITE, &write_args(&bytes([5000, 300_000, 1 << 20][random(3)], 1)));
    let many: Vec<_> = (0..3).flat_map(|xid| record(xid, MANY, &(3_u32 << 20).to_be_bytes())).collect();
    match random(6) {
        0 => client.0.write_all(&write[..random(write.len())])?,
        1 => client.0.write_all(&write)?,
        2 => client.0.write_all(&[&write[..], &many, &write[..600]].concat())?,
        3 => {
            client.0.write_all(&many)?;
            let mut some = vec![0; random(4 << 20)];
            client.0.read_exact(&mut some)?;
        }
        4 => client.0.write_all(&(0..20).map(|_| random(256) as u8).collect::<Vec<_>>())?,
        _ => {
            client.0.write_all(&[&record(1, READ, &[0, 16, 0, 0]), &many[..100]].concat())?;
            client.0.read_exact(&mut [0; 28])?;
        }
    }
    match random(4) {
        // A reset.
        0 => set_socket_linger(&client.0, Some(Duration::ZERO))?,
        1 => client.0.shutdown(Shutdown::Write)?,
        2 => {
            client.0.shutdown(Shutdown::Write)?;
            io::copy(&mut client.0, &mut io::sink())?;
        }
        _ => {}
    }
    Ok(())
}

#[test]
fn connections_that_end_in_any_way_leave_nothing() {
    let memory = allocator(8192);
    let in_use = || memory.validate().unwrap().handed_out;
    let before = in_use();
    let settings = Settings { threads: 3, connections: 6, unfinished_pages: 512, ..Settings::default() };
    let (server, address, echo) =
        start_with(Settings { stalled_after: Duration::from_secs(1 << 20), ..settings }, &memory, Echo::default());
    echo.gate.open();
    let running = AtomicUsize::new(4);
    thread::scope(|scope| {
        for seed in 0..4 {
            let running = &running;
            scope.spawn(move || {
                let mut rng = seed as u64;
                let mut random = move |n: usize| {
                    rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (rng >> 33) as usize % n
                };
                for _ in 0..50 {
                    let mut clients: Vec<_> =
                        (0..=random(3)).map(|_| Client::from(Ipv4Addr::new(127, 0, 0, 1 + seed), address)).collect();
                    for client in &mut clients {
                        // Whatever it comes to: it may be closed for another one's sake, or as too slow.
                        let _ = use_somehow(client, &mut random);
                    }
                }
                running.fetch_sub(1, SeqCst);
            });
        }
        // Each may be a long time.
        let mut number = 0;
        while running.load(SeqCst) > 0 {
            number += 1;
            tick(&server, number);
            thread::sleep(Duration::from_millis(1));
        }
    });
    until(|| server.hub.connections.len() == 0);
    until(|| server.hub.room.free() == 512);
    assert_eq!((server.hub.room.waiting(), server.counters().connections()), (0, 0));
    server.stop();
    drop(server);
    assert_eq!(in_use(), before);
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
