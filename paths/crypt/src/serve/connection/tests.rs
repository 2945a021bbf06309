use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use super::*;
use crate::serve::disk::plain_step;
use crate::serve::fixture::*;
use crate::serve::memory::{Memory, Patience};

const TEN_S: Duration = Duration::from_secs(10);

/// A client and its connection.
fn connected(now: Instant) -> (UnixStream, Connection) {
    let (client, server) = UnixStream::pair().unwrap();
    (client, Connection::new(0, Socket::unix(server).unwrap(), config(), now).unwrap())
}

/// A step of a worker without a cache, whose connection is the first in line for pages.
fn context<'a>(path: &'a DataPath, engine: &'a mut Engine, now: Instant) -> Context<'a> {
    Context { path, cache: None, tls: None, elsewhere: 0, engine, now, may_take: true, may_discard: true }
}

/// Gives it turns while it is ready, or its socket has something, as a worker does.
fn turns(connection: &mut Connection, path: &DataPath, engine: &mut Engine, now: Instant) -> usize {
    let mut context = context(path, engine, now);
    let mut turns = 0;
    while turns == 0 || connection.is_ready() || (connection.wants_input() && has_input(connection.socket())) {
        connection.turn(&mut context);
        turns += 1;
    }
    turns
}

fn has_input(socket: &Socket) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
}

#[test]
fn options_are_refused_while_the_server_stops() {
    const SHUTDOWN: u32 = 0x8000_0007;
    let (path, now) = (path(64, 16), Instant::now());
    let limits = TimeLimits { handshake: TEN_S, stall: Some(TEN_S), stop: TEN_S };
    let greeting = 18;
    let flags = 3u32.to_be_bytes();
    // The bytes before the server stops. The options after that each wait for the answer to the one before, as in
    // libnbd.
    let said = [&flags[..], &option(8, &[])].concat();
    for before in [0, 3, 4, 10] {
        let (client, mut connection) = connected(now);
        (&client).write_all(&said[..before]).unwrap();
        turns(&mut connection, &path, &mut Engine::Plain, now);
        connection.drain(now);
        turns(&mut connection, &path, &mut Engine::Plain, now);
        connection.check(&limits, &path, now + Duration::from_millis(900));
        assert!(!connection.is_dead(), "{before}: it has its time");
        (&client).read_exact(&mut [0; 18]).unwrap();
        for (number, asked) in [(8, said[before..].to_vec()), (3, option(3, &[])), (7, option(7, &[0; 6]))] {
            (&client).write_all(&asked).unwrap();
            turns(&mut connection, &path, &mut Engine::Plain, now);
            let mut answer = [0; 20 + "the server ends".len()];
            (&client).read_exact(&mut answer).unwrap();
            assert_eq!(answer[8..16], [u32::to_be_bytes(number), SHUTDOWN.to_be_bytes()].concat(), "{before}");
        }
        drop(client);
        turns(&mut connection, &path, &mut Engine::Plain, now);
        assert!(connection.is_dead());
    }
    // A client that aborts, one that uses the oldest option, which has no such answer, and clients that are silent,
    // refused or not.
    for (last, answer, is_over) in [(Some(2), 20, true), (Some(1), 0, true), (Some(3), 35, false), (None, 0, false)] {
        let (client, mut connection) = connected(now);
        (&client).write_all(&said[..4]).unwrap();
        turns(&mut connection, &path, &mut Engine::Plain, now);
        connection.drain(now);
        if let Some(number) = last {
            (&client).write_all(&option(number, &[])).unwrap();
            turns(&mut connection, &path, &mut Engine::Plain, now);
        }
        assert_eq!(connection.is_dead(), is_over, "{last:?}");
        connection.check(&limits, &path, now + Duration::from_millis(1100));
        assert!(connection.is_dead(), "{last:?}");
        drop(connection);
        let mut answers = Vec::new();
        (&client).read_to_end(&mut answers).unwrap();
        assert_eq!(answers.len(), greeting + answer, "{last:?}");
    }
}

#[test]
fn flush_trim_and_block_status_cost_part_of_a_turn() {
    let path = path(64, 16);
    // Flush, trim, and block status: each makes one call to the disk, or hundreds.
    for (command, len) in [(3, 0), (4, 512), (7, LEN as u32)] {
        let now = Instant::now();
        let (client, mut connection) = connected(now);
        let context = [&[0; 4][..], &1u32.to_be_bytes(), &15u32.to_be_bytes(), b"base:allocation"].concat();
        let flags = &3u32.to_be_bytes()[..];
        let structured = [flags, &option(8, &[]), &option(10, &context), &option(7, &[0; 6])].concat();
        let requests = request(command, len).repeat(1000);
        (&client).write_all(&[structured, requests].concat()).unwrap();
        let turns = turns(&mut connection, &path, &mut Engine::Plain, now);
        assert!(turns >= 10, "{turns} turns for 1000 requests of kind {command}");
        drop(connection);
        let mut answers = Vec::new();
        (&client).read_to_end(&mut answers).unwrap();
        let done = answers.windows(12).filter(|bytes| bytes[..4] == [0x66, 0x8e, 0x33, 0xef] && bytes[5] == 1);
        assert_eq!(done.count(), 1000, "of kind {command}");
    }
}

/// Does the steps on the disk and all that follows, until `done`.
fn finish(connection: &mut Connection, path: &DataPath, engine: &mut Engine, now: Instant, done: impl Fn() -> bool) {
    while !done() {
        let ops = if let Engine::Held(ops) = engine { std::mem::take(ops) } else { Vec::new() };
        for op in ops {
            connection.complete(plain_step(path, op), &mut context(path, engine, now));
        }
        turns(connection, path, engine, now);
        std::thread::yield_now();
    }
}

/// A short read is also a call to the disk, and a durable write is also a flush.
#[test]
fn small_reads_and_durable_writes_cost_part_of_a_turn() {
    let mut durable = request(WRITE, 512);
    durable[5] = 1;
    for (what, one, count, answer, at_least) in [
        ("reads", request(READ, 512), 400, 16 + 512, 400 * STEP / TURN),
        ("durable writes", [durable, vec![9; 512]].concat(), 100, 16, 100 * CALL / TURN),
    ] {
        let (path, now) = (path(2048, 16), Instant::now());
        let (client, mut connection) = connected(now);
        // The requests fit into the socket, and the answers into the socket and the outbox.
        (&client).write_all(&[negotiation(), one.repeat(count)].concat()).unwrap();
        let turns = turns(&mut connection, &path, &mut Engine::Plain, now);
        assert!(turns >= at_least && at_least > 2, "{turns} turns for {count} {what}");
        let reader = std::thread::spawn(move || (&client).read_exact(&mut vec![0; NEGOTIATED + count * answer]));
        finish(&mut connection, &path, &mut Engine::Plain, now, || reader.is_finished());
        reader.join().unwrap().unwrap();
        assert!(connection.session.export().is_some());
    }
}

/// A client's requests under way are bounded in number and in bytes, and so are its answers. All are answered in the
/// end.
#[test]
fn a_clients_requests_bytes_and_answers_are_bounded() {
    let answer = |len: usize| 16 + len;
    for (count, len, is_held) in [(1000, 512, true), (20, LEN as usize, true), (3000, 4096, false)] {
        let (path, now) = (path(6000, 16), Instant::now());
        let (client, mut connection) = connected(now);
        (&client).write_all(&[negotiation(), request(READ, len as u32).repeat(count)].concat()).unwrap();
        let mut engine = if is_held { Engine::Held(Vec::new()) } else { Engine::Plain };
        turns(&mut connection, &path, &mut engine, now);
        let (flights, bytes, unsent) = (connection.flights.count(), connection.bytes, connection.outbox.len());
        match is_held {
            true if len == 512 => assert_eq!((flights, bytes), (MAX_ACTIVE, MAX_ACTIVE * len)),
            true => assert_eq!((flights, bytes), (MAX_BYTES / len, MAX_BYTES)),
            // It receives none of them.
            false => assert!((MAX_UNSENT..=MAX_UNSENT + answer(len)).contains(&unsent), "{unsent} bytes"),
        }
        let reader = std::thread::spawn(move || {
            let mut answers = vec![0; NEGOTIATED + count * answer(len)];
            (&client).read_exact(&mut answers).unwrap();
            (client, answers)
        });
        finish(&mut connection, &path, &mut engine, now, || reader.is_finished());
        let (_client, answers) = reader.join().unwrap();
        let is_done = |answer: &[u8]| answer[..8] == [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0];
        assert!(answers[NEGOTIATED..].chunks(answer(len)).all(is_done));
        assert_eq!((connection.flights.count(), connection.bytes, connection.outbox.len()), (0, 0, 0));
    }
}

#[test]
fn negotiation_has_a_time_limit_of_its_own() {
    let (path, now) = (path(64, 16), Instant::now());
    let second = Duration::from_secs(1);
    let limits = TimeLimits { handshake: second, stall: Some(100 * second), stop: 100 * second };
    let is_gone_after = |said: &[u8], tenths: u32| {
        let (client, mut connection) = connected(now);
        for passed in 0..tenths {
            let now = now + passed * second / 10;
            // All of it at first, and then an option again and again.
            (&client).write_all(if passed == 0 { said } else { &[] }).unwrap();
            if said.len() == 4 {
                (&client).write_all(&option(3, &[])).unwrap();
            }
            turns(&mut connection, &path, &mut Engine::Plain, now);
        }
        connection.check(&limits, &path, now + tenths * second / 10);
        connection.is_dead()
    };
    let half = [negotiation(), request(WRITE, 512), vec![9; 100]].concat();
    for (said, limit) in [(&[][..], 10), (&half[..2], 10), (&half[..4], 10), (&half, 1000)] {
        assert!(!is_gone_after(said, limit - 1), "{} bytes", said.len());
        assert!(is_gone_after(said, limit + 1), "{} bytes", said.len());
    }
}

/// Clients that pause in the middle of a header, of a short, a long or a refused write, or with answers that they do
/// not receive.
#[test]
fn a_paused_client_stays_connected_without_a_stall_limit() {
    let hour = Duration::from_secs(3600);
    let write = |len: u32, sent: usize| [request(WRITE, len), vec![9; sent]].concat();
    for said in [
        request(READ, 512)[..20].to_vec(),
        write(512, 511),
        write(LEN as u32, 1000),
        write(2 * LEN as u32, 1000),
        // More than the socket holds.
        request(READ, LEN as u32).repeat(4),
    ] {
        for (stall, is_kept) in [(None, true), (Some(TEN_S), false)] {
            let (path, now) = (path(600, 16), Instant::now());
            let limits = TimeLimits { handshake: TEN_S, stall, stop: TEN_S };
            let (client, mut connection) = connected(now);
            (&client).write_all(&[negotiation(), said.clone()].concat()).unwrap();
            turns(&mut connection, &path, &mut Engine::Plain, now);
            connection.check(&limits, &path, now + hour);
            assert_eq!(!connection.is_dead(), is_kept, "{} bytes, {stall:?}", said.len());
        }
    }
}

/// A client that is silent while the server stops may be about to send a request, and is answered for a second.
#[test]
fn a_stopping_server_refuses_requests_and_disconnects_silent_clients() {
    const SHUTTING_DOWN: u8 = 108;
    let (path, now) = (path(64, 16), Instant::now());
    let limits = TimeLimits { handshake: TEN_S, stall: None, stop: TEN_S };
    let (client, mut connection) = connected(now);
    (&client).write_all(&negotiation()).unwrap();
    turns(&mut connection, &path, &mut Engine::Plain, now);
    (&client).read_exact(&mut [0; NEGOTIATED]).unwrap();
    connection.drain(now);
    turns(&mut connection, &path, &mut Engine::Plain, now);
    let mut passed = Duration::ZERO;
    for said in [request(READ, 512), [request(WRITE, 512), vec![9; 512]].concat()] {
        passed += Duration::from_millis(900);
        connection.check(&limits, &path, now + passed);
        // In the middle of a request it is not disconnected.
        let (most, last) = said.split_at(said.len() - 1);
        (&client).write_all(most).unwrap();
        turns(&mut connection, &path, &mut Engine::Plain, now + passed);
        passed += Duration::from_millis(9900);
        connection.check(&limits, &path, now + passed);
        (&client).write_all(last).unwrap();
        turns(&mut connection, &path, &mut Engine::Plain, now + passed);
        let mut answer = [0; 16];
        (&client).read_exact(&mut answer).unwrap();
        assert_eq!(answer[4..8], [0, 0, 0, SHUTTING_DOWN]);
    }
    connection.check(&limits, &path, now + passed + Duration::from_millis(1100));
    assert_eq!((&client).read(&mut [0]).unwrap(), 0, "it is told that nothing more comes");
    assert!(!connection.is_dead(), "and may close first");
    connection.check(&limits, &path, now + passed + Duration::from_millis(2300));
    assert!(connection.is_dead());
}

#[test]
fn extents_are_whole_blocks_and_blocks_with_data_are_no_holes() {
    const BLOCK: u64 = 16 << 10;
    let path = path(64, 16);
    // In the middle of a block, up to the end of a block, across two blocks, and in the volume's last page.
    for (at, len) in [(4096, 4096), (5 * BLOCK + 8192, 8192), (8 * BLOCK, BLOCK + 4096), (LEN - 4096, 4096)] {
        let buffer = path.memory.borrow(len as usize).unwrap();
        plain_step(&path, Op::new(Todo::Write, at, buffer, (0, 0))).1.unwrap();
    }
    if path.disk.extent(0, LEN).unwrap() != (4096, true) {
        println!("skipped: the file system of temporary files has no holes of a page");
        return;
    }
    let all = Request { command: Command::BlockStatus { one: false }, cookie: 0, at: 0, len: LEN as u32, fua: false };
    let found = |request: &Request| -> Vec<(u64, bool)> {
        let extents = extents(&path, request, BLOCK).unwrap();
        extents
            .iter()
            .map(|extent| (u64::from(extent.len) / BLOCK, extent.is_hole && extent.len % BLOCK as u32 == 0))
            .collect()
    };
    let blocks = LEN / BLOCK;
    let whole = [(1, false), (4, true), (1, false), (2, true), (2, false), (blocks - 11, true), (1, false)];
    assert_eq!(found(&all), whole);
    // From the middle of a hole, and no further than the request.
    let part = Request { at: 2 * BLOCK, len: 4 * BLOCK as u32, ..all };
    assert_eq!(found(&part), [(3, true), (1, false)]);
}

#[test]
fn a_connection_takes_pages_only_when_it_is_first_in_line() {
    let (path, now) = (path(64, 16), Instant::now());
    let (client, mut connection) = connected(now);
    (&client).write_all(&[negotiation(), request(WRITE, 512), vec![9; 512]].concat()).unwrap();
    let mut engine = Engine::Plain;
    for (may_take, is_stalled) in [(false, true), (false, true), (true, false)] {
        connection.turn(&mut Context { may_take, ..context(&path, &mut engine, now) });
        assert_eq!(connection.is_stalled(), is_stalled);
    }
    let mut answers = vec![0; NEGOTIATED + 16];
    (&client).read_exact(&mut answers).unwrap();
    assert_eq!(path.memory.stats().waits, 1);
}

/// A client vanishes in the middle of a write, with a write or a read on the disk, or with answers that it has not
/// received: none of its bytes are in memory that another gets (B1 in `buffer`).
#[test]
fn a_vanished_clients_bytes_are_in_no_free_page() {
    const LONG: u32 = 200 << 10;
    let write = |len: u32, sent: usize| [request(WRITE, len), vec![0x5a; sent]].concat();
    let said = [
        write(512, 511),
        write(LONG, 1),
        write(LONG, 511),
        write(LONG, 5000),
        write(LONG, LONG as usize - 1),
        write(LONG, LONG as usize),
        request(READ, LONG),
        request(READ, LONG).repeat(6),
    ];
    for (said, pages, is_held) in
        said.iter().flat_map(|said| [(said, 2000, false), (said, 2000, true), (said, 16, false)])
    {
        // One processor, so that no list of another one keeps free pages.
        let allocator = pagemill::Allocator::builder().pages(pages).cpus(1, || 0).build().unwrap();
        let memory = Memory::new(&allocator, 16, 1 << 20).unwrap();
        let (path, now) = (DataPath { memory, ..path(pages, 16) }, Instant::now());
        let mut plain = vec![0x5a; LONG as usize];
        path.volume.encrypt_in_place(0, &mut plain).unwrap();
        let mut buffer = Buffer::of_heap(plain.len(), Origin::Free).unwrap();
        buffer.copy_in(0, &plain);
        plain_step(&path, Op::new(Todo::Write, 0, buffer, (0, 0))).1.unwrap();
        let (client, mut connection) = connected(now);
        let mut engine = if is_held { Engine::Held(Vec::new()) } else { Engine::Plain };
        (&client).write_all(&[negotiation(), said.clone()].concat()).unwrap();
        turns(&mut connection, &path, &mut engine, now);
        drop(client);
        turns(&mut connection, &path, &mut engine, now);
        connection.die(&path);
        let ops = if let Engine::Held(ops) = &mut engine { std::mem::take(ops) } else { Vec::new() };
        for op in ops {
            connection.complete(plain_step(&path, op), &mut context(&path, &mut engine, now));
        }
        drop(connection);
        assert_eq!(path.memory.pool().stats().out, 0);
        let free =
            std::iter::from_fn(|| path.memory.borrow(4096).or_else(|| path.memory.take(4096, Patience::None).unwrap()));
        let free: Vec<_> = free.collect();
        assert_eq!(free.len(), pages);
        let is_plain =
            |buffer: &Buffer| buffer.slices().any(|bytes| bytes.windows(16).any(|bytes| bytes == [0x5a; 16]));
        let plain = free.iter().filter(|buffer| is_plain(buffer)).count();
        assert_eq!(plain, 0, "{} bytes said, {pages} pages, held {is_held}", said.len());
        free.into_iter().for_each(|buffer| path.memory.give_back(buffer));
    }
}
