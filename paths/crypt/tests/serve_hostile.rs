//! Clients that lie, stall or vanish, and memory that is exhausted: other clients are served, and afterwards all memory
//! is free.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::served::*;
use crate::common::*;
use pagemill_crypt::serve::Way;

const LEN: u64 = 8 * MIB;

fn start(bench: &Bench, setup: Setup) -> Option<Served> {
    bench.file("image", LEN);
    Served::start(bench, bench.open("image"), plain_volume(LEN, 512), setup)
}

/// Limits after which a client that stalls is disconnected. Other clients must stay within them, however busy the
/// machine is.
fn impatient() -> Setup {
    let mut setup = Setup::new();
    (setup.limits.handshake, setup.limits.stall) = (Duration::from_secs(5), Some(Duration::from_secs(5)));
    setup
}

/// Checks that the reserve is full and nothing else is allocated. A client gets its answer a moment before its pages
/// are freed.
fn nothing_is_missing(served: &Served, promised: usize) {
    let stats = || served.allocator.stats();
    until("the last page", || stats().allocated - stats().freed == promised as u64);
    assert_eq!(served.server.path().memory.pool().stats().out, 0);
    assert_eq!(served.allocator.validate().unwrap().handed_out, promised);
}

/// The bytes that clients send before they stop in the middle; `true` for clients past negotiation.
fn halves() -> Vec<(bool, Vec<u8>)> {
    let flags = [0, 0, 0, 3];
    let option = [&flags[..], b"IHAVEOPT", &7u32.to_be_bytes(), &64u32.to_be_bytes(), b"half"].concat();
    let write = |len: u32, sent: usize| [header(command::WRITE, 0, 7, 0, len), vec![9; sent]].concat();
    vec![
        (false, vec![]),
        (false, flags[..3].to_vec()),
        (false, flags.to_vec()),
        (false, option),
        (true, header(command::READ, 0, 7, 0, 512)[..20].to_vec()),
        (true, write(512, 511)),
        (true, write(16 << 10, 5000)),
        (true, write(1 << 20, 1 << 19)),
        (true, write(5 << 20, (1 << 20) + 77)),
        (true, write(8 << 20, 4)),
    ]
}

#[test]
fn clients_that_stop_in_the_middle_are_disconnected_and_block_nobody() {
    let bench = Bench::with(&[]).unwrap();
    for way in [Way::Plain, Way::Uring] {
        for vanishes in [false, true] {
            let Some(served) = start(&bench, Setup { way, ..impatient() }) else { continue };
            let stopped: Vec<UnixStream> = halves()
                .into_iter()
                .filter_map(|(has_negotiated, said)| {
                    let mut stream = match has_negotiated {
                        true => Client::connect(&served).0,
                        false => UnixStream::connect(&served.socket).unwrap(),
                    };
                    stream.write_all(&said).unwrap();
                    (!vanishes).then_some(stream)
                })
                .collect();
            let mut good = Client::connect(&served);
            let noise = pattern(1 << 20);
            // A write of more than a part may be on the disk as far as it was received: the first MiB is theirs.
            for round in 1..8 {
                good.write(round << 20, &noise, 0).unwrap();
                assert!(good.read(round << 20, 1 << 20).unwrap() == noise);
            }
            served.wait_for_connections(1);
            // Their connections were closed.
            for mut stream in stopped {
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                let mut rest = Vec::new();
                let _ = stream.read_to_end(&mut rest); // Reset counts as an end.
            }
            // Their unfinished writes were not answered, and the other client's data is still there.
            assert!(good.read(7 << 20, 1 << 20).unwrap() == noise);
            nothing_is_missing(&served, 256);
            drop(good);
            served.stop();
        }
    }
}

#[test]
fn clients_that_receive_no_answers_hold_no_page_of_the_pool() {
    // Memory for one answer besides the reserve, which the first client takes.
    by_each_way(Setup { pages: 256 + 300, ..Setup::new() }, LEN, 512, |_, served, way| {
        let mut stuck = Client::connect(&served);
        stuck.ask(command::WRITE_ZEROES, 0, 0, LEN as u32).unwrap();
        for cookie in 0..8 {
            stuck.send(command::READ, 0, cookie, 0, 1 << 20);
        }
        let mut good = Client::connect(&served);
        let noise = pattern(1 << 20);
        for round in 0..16 {
            good.write((round % 8) << 20, &noise, FUA).unwrap();
            assert!(good.read((round % 8) << 20, 1 << 20).unwrap() == noise);
        }
        assert_eq!(served.server.connections(), 2, "the one that is stuck had not to go for it");
        assert_eq!(served.server.path().memory.pool().stats().out, 0);
        // It gets all of its answers when it receives them.
        for cookie in 0..8 {
            assert_eq!(stuck.reply(), (0, cookie));
            stuck.0.read_exact(&mut vec![0; 1 << 20]).unwrap();
        }
        drop((stuck, good));
        assert!(served.stop().short > 0, "{way:?}: there were pages for everybody");
    });
    let bench = Bench::with(&[]).unwrap();
    let Some(served) = start(&bench, impatient()) else { return };
    let mut stuck = Client::connect(&served);
    for cookie in 0..8 {
        stuck.send(command::READ, 0, cookie, 0, 1 << 20);
    }
    served.wait_for_connections(0);
    nothing_is_missing(&served, 256);
    served.stop();
}

#[test]
fn paused_clients_block_nobody_and_can_resume() {
    const NO_SPACE: u32 = 28;
    let noise = pattern(1 << 20);
    let (half, rest) = noise.split_at(1 << 19);
    // One thread for all clients, and memory for one part besides the reserve, which the first client has.
    by_each_way(Setup { threads: 1, pages: 256 + 300, ..Setup::new() }, LEN, 512, |_, served, way| {
        let [mut writer, mut refused, mut reader, mut good] = [(); 4].map(|()| Client::connect(&served));
        writer.send(command::WRITE, 0, 1, 0, 1 << 20);
        writer.0.write_all(half).unwrap();
        refused.send(command::WRITE, 0, 2, LEN, 1 << 20);
        refused.0.write_all(half).unwrap();
        for cookie in 0..8 {
            reader.send(command::READ, 0, cookie, 0, 1 << 20);
        }
        for round in 1..8 {
            good.write(round << 20, &noise, FUA).unwrap();
            good.ask(command::FLUSH, 0, 0, 0).unwrap();
            assert!(good.read(round << 20, 1 << 20).unwrap() == noise, "{way:?}, round {round}");
        }
        assert_eq!(served.server.connections(), 4);
        assert_eq!(served.server.path().memory.pool().stats().out, 0);
        writer.0.write_all(rest).unwrap();
        assert_eq!(writer.reply(), (0, 1), "{way:?}");
        refused.0.write_all(rest).unwrap();
        assert_eq!(refused.reply(), (NO_SPACE, 2), "{way:?}");
        for cookie in 0..8 {
            assert_eq!(reader.reply(), (0, cookie), "{way:?}");
            reader.0.read_exact(&mut vec![0; 1 << 20]).unwrap();
        }
        assert!(good.read(0, 1 << 20).unwrap() == noise, "{way:?}");
        drop((writer, refused, reader, good));
        assert!(served.stop().short > 0, "{way:?}: there were pages for everybody");
    });
}

/// A client registers the cookie of a write once it has sent the payload, so it would not recognise an earlier answer.
#[test]
fn refused_writes_are_answered_after_their_payload() {
    const INVALID: u32 = 22;
    const NO_SPACE: u32 = 28;
    const TOO_LONG: u32 = (32 << 20) + 512;
    // One thread: when it has answered another client, it has handled all earlier bytes.
    by_each_way(Setup { threads: 1, ..Setup::new() }, LEN, 512, |_, served, way| {
        let (mut client, mut other) = (Client::connect(&served), Client::connect(&served));
        client.ask(command::WRITE_ZEROES, 0, 0, LEN as u32).unwrap();
        for (flags, at, len, error) in [
            (0, LEN - 512, 1024, NO_SPACE),
            (0, LEN, 1 << 20, NO_SPACE),
            (0, 3, 512, INVALID),
            (0x8000, 0, 4096, INVALID),
            (0, 0, TOO_LONG, INVALID),
        ] {
            let payload = vec![9; len as usize];
            let (half, rest) = payload.split_at(payload.len() / 2);
            client.send(command::WRITE, flags, 3, at, len);
            client.0.write_all(half).unwrap();
            other.ask(command::FLUSH, 0, 0, 0).unwrap();
            client.0.set_nonblocking(true).unwrap();
            let early = client.0.read(&mut [0]);
            assert!(early.is_err(), "{way:?}, {len} at {at}: answered before its payload has come");
            client.0.set_nonblocking(false).unwrap();
            client.0.write_all(rest).unwrap();
            assert_eq!(client.reply(), (error, 3), "{way:?}, {len} at {at}");
        }
        // One of five writes under way together.
        for (cookie, at) in [0, 4096, LEN, 8192, 12288].into_iter().enumerate() {
            client.send(command::WRITE, 0, cookie as u64, at, 4096);
            client.0.write_all(&[7; 4096]).unwrap();
        }
        let mut answers: Vec<_> = (0..5).map(|_| client.reply()).collect();
        answers.sort_by_key(|&(_, cookie)| cookie);
        assert_eq!(answers, [(0, 0), (0, 1), (NO_SPACE, 2), (0, 3), (0, 4)], "{way:?}");
        let contents = client.read(0, LEN as usize).unwrap();
        assert!(contents[..16384] == [7; 16384] && contents[16384..].iter().all(|&byte| byte == 0), "{way:?}");
        drop((client, other));
        served.stop();
    });
}

#[test]
fn invalid_requests_get_the_protocols_errors_from_a_server() {
    const INVALID: u32 = 22;
    const NO_SPACE: u32 = 28;
    let bench = Bench::with(&[]).unwrap();
    let served = start(&bench, Setup::new()).unwrap();
    let mut client = Client::connect(&served);
    for (command, flags, at, len, error) in [
        (command::READ, 0, LEN - 512, 1024, INVALID),
        (command::READ, 0, u64::MAX - 511, 512, INVALID),
        (command::READ, 0, 0, u32::MAX, INVALID),
        (command::READ, 0, 0, 0, INVALID),
        (command::READ, 0, 1, 512, INVALID),
        (command::READ, 0x8000, 0, 512, INVALID),
        (command::TRIM, 0, LEN, 512, INVALID),
        (command::WRITE_ZEROES, 0, LEN - 512, 1024, NO_SPACE),
        (command::FLUSH, 0, 512, 0, INVALID),
        (99, 0, 0, 512, INVALID),
    ] {
        assert_eq!(client.ask(command, flags, at, len), Err(error), "{command} {flags} {at} {len}");
    }
    assert_eq!(client.write(LEN - 512, &[1; 1024], 0), Err(NO_SPACE));
    assert_eq!(client.write(3, &[1; 512], 0), Err(INVALID));
    // The session goes on.
    client.write(LEN - 512, &[1; 512], FUA).unwrap();
    assert_eq!(client.read(LEN - 512, 512).unwrap(), [1; 512]);
    // Bytes that are no request end it.
    client.0.write_all(&[0xff; 28]).unwrap();
    assert_eq!(client.0.read(&mut [0]).unwrap_or(0), 0);
    served.wait_for_connections(0);
    nothing_is_missing(&served, 256);
    served.stop();
}

#[test]
fn connections_beyond_the_limit_are_closed() {
    own_process!();
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls are given a place for one limit.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        limit.rlim_cur = limit.rlim_max.min(4096);
        libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
    }
    if limit.rlim_cur < 2500 {
        eprintln!("skipped: this process may open {} files, and the test takes 2500", limit.rlim_cur);
        return;
    }
    let bench = Bench::with(&[]).unwrap();
    let served = start(&bench, Setup { max_connections: 600, ..Setup::new() }).unwrap();
    let mut good = Client::connect(&served);
    let mut streams: Vec<_> = (0..1000).map(|_| UnixStream::connect(&served.socket).unwrap()).collect();
    served.wait_for_connections(600);
    let noise = pattern(1 << 20);
    good.write(0, &noise, 0).unwrap();
    assert!(good.read(0, 1 << 20).unwrap() == noise);
    // Clients beyond the limit were disconnected, the others were greeted.
    let greeted = streams.iter_mut().filter(|stream| {
        let mut greeting = [0; 18];
        (&mut &**stream).read_exact(&mut greeting).is_ok()
    });
    assert_eq!(greeted.count(), 599);
    drop(streams);
    served.wait_for_connections(1);
    nothing_is_missing(&served, 256);
    drop(Client::connect(&served));
    drop(good);
    served.stop();
}

#[test]
fn deep_queues_finish_without_free_memory() {
    // The reserve, and four pages.
    by_each_way(Setup { pages: 256 + 4, threads: 2, ..Setup::new() }, LEN, 512, |_, served, way| {
        let noise = pattern(1 << 20);
        let start = Instant::now();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut client = Client::connect(&served);
                    let mut writer = Client(client.0.try_clone().unwrap());
                    thread::scope(|scope| {
                        scope.spawn(|| {
                            for cookie in 0..64 {
                                writer.send(command::WRITE, 0, cookie, (cookie % 8) << 20, 1 << 20);
                                writer.0.write_all(&noise).unwrap();
                            }
                        });
                        let mut answered: Vec<_> = (0..64).map(|_| client.reply()).collect();
                        answered.sort_unstable();
                        assert!(answered.into_iter().eq((0..64).map(|cookie| (0, cookie))));
                    });
                    assert!(client.read(3 << 20, 1 << 20).unwrap() == noise);
                });
            }
        });
        let took = start.elapsed();
        served.wait_for_connections(0);
        nothing_is_missing(&served, 256);
        let stats = served.stop();
        assert!(stats.short > 0, "{way:?}: there was memory");
        println!("{way:?}: 256 MiB in {took:?} from 260 pages, {stats:?}");
    });
}

#[test]
fn answers_are_never_interleaved() {
    // No page besides the reserve: reads are sent in parts, while the writes before them are on the disk.
    by_each_way(Setup { pages: 256, ..Setup::new() }, LEN, 512, |_, served, way| {
        let mut client = Client::connect(&served);
        let noise = pattern(1 << 20);
        client.write(4 << 20, &noise, 0).unwrap();
        let mut writer = Client(client.0.try_clone().unwrap());
        thread::scope(|scope| {
            scope.spawn(|| {
                for cookie in 0..400 {
                    match cookie % 8 {
                        7 => writer.send(command::READ, 0, cookie, 4 << 20, 1 << 20),
                        place => {
                            writer.send(command::WRITE, FUA, cookie, place << 15, 1 << 15);
                            writer.0.write_all(&noise[..1 << 15]).unwrap();
                        }
                    }
                }
            });
            for _ in 0..400 {
                let (error, cookie) = client.reply();
                assert_eq!(error, 0);
                if cookie % 8 == 7 {
                    let mut bytes = vec![0; 1 << 20];
                    client.0.read_exact(&mut bytes).unwrap();
                    assert!(bytes == noise, "{way:?}: what read {cookie} gave");
                }
            }
        });
        drop(client);
        assert!(served.stop().short > 0, "{way:?}: there were pages");
    });
}
