//! A volume behind another NBD server, which is killed, loses what was not flushed, and comes back.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use crate::common::certificates::Certificates;
use crate::common::far_end::*;
use crate::common::served::*;
use crate::common::*;
use pagemill::Allocator;
use pagemill_crypt::Store;
use pagemill_crypt::serve::{DataPath, Disk, Far, FarOptions, Memory, VolumeFile, Way};

const LEN: u64 = 4 * MIB;
const EIO: u32 = 5;

/// A far end, and a server of a plain volume on it.
fn served(bench: &Bench, reconnect: Duration) -> (FarEnd, Served) {
    let end = FarEnd::start(&bench.path("far"), LEN);
    let served = serve_from(bench, &end, reconnect, Setup { may_discard: true, ..Setup::new() });
    (end, served)
}

fn serve_from(bench: &Bench, end: &FarEnd, reconnect: Duration, setup: Setup) -> Served {
    Served::start(bench, end.connect(reconnect), plain_volume(LEN, 512), setup).unwrap()
}

fn decrypted(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    plain_volume(LEN, 512).decrypt_in_place(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn the_far_end_has_the_encrypted_bytes_and_flushes_when_it_is_told() {
    let bench = Bench::with(&[]).unwrap();
    for cache in [None, Some(64)] {
        let end = FarEnd::start(&bench.path("far"), LEN);
        let served = serve_from(&bench, &end, PATIENCE, Setup { cache, may_discard: true, ..Setup::new() });
        let mut client = Client::connect(&served);
        let bytes = pattern(LEN as usize);
        client.write(0, &bytes, 0).unwrap();
        assert!(end.with(|state| decrypted(&state.bytes)) == bytes);
        assert_eq!(end.with(|state| state.count(command::FLUSH)), 0, "nobody asked for that");
        client.ask(command::FLUSH, 0, 0, 0).unwrap();
        assert!(end.with(|state| state.count(command::FLUSH) == 1 && decrypted(state.durable()) == bytes));
        client.write(512, &[7; 512], FUA).unwrap();
        assert!(end.with(|state| decrypted(state.durable())[512..1024] == [7; 512]));
        client.ask(command::TRIM, 0, 4096, 8192).unwrap();
        let trim = Asked { command: command::TRIM, flags: 0, at: 4096, len: 8192 };
        assert_eq!(end.with(|state| state.asked.last().copied()), Some(trim));
        assert!(client.read(0, 512).unwrap() == bytes[..512]);
        assert!(client.read(1024, 3 << 20).unwrap() == bytes[1024..][..3 << 20]);
        drop(client);
        served.stop();
    }
}

/// As the commands for headers use it. A far end that is lost between a write and its sync gets the write again.
#[test]
fn any_bytes_are_written_to_a_far_end_with_large_blocks() {
    let bench = Bench::with(&[]).unwrap();
    let end = FarEnd::start(&bench.path("far"), LEN);
    let mut bytes = pattern(LEN as usize);
    end.with(|state| state.blocks = Some([4096, 4096, 65536]));
    let far = end.connect(PATIENCE);
    far.write_at(&bytes, 0).unwrap();
    far.sync().unwrap();
    for (at, len) in [(0, 592), (4000, 200), (8192, 4096), (10_000, 300_000), (LEN as usize - 1, 1)] {
        bytes[at..at + len].fill(at as u8 | 1);
        far.write_at(&bytes[at..at + len], at as u64).unwrap();
        end.kill();
        end.restart();
        far.sync().unwrap();
        assert!(end.with(|state| state.durable() == bytes), "{len} bytes at {at}");
    }
    for (at, len) in [(LEN, 1), (LEN - 1, 2), (u64::MAX, 1)] {
        let refused = far.write_at(&bytes[..len], at).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::StorageFull, "{len} bytes at {at}");
    }
    assert!(end.with(|state| state.durable() == bytes));
    // A part of a block at its end can't be reached.
    end.with(|state| state.size = Some(LEN + 4095));
    assert_eq!(end.connect(PATIENCE).size().unwrap(), LEN);
}

/// As a mount uses it: by blocking calls.
#[test]
fn a_volume_file_writes_to_the_far_end() {
    let bench = Bench::with(&[]).unwrap();
    let end = FarEnd::start(&bench.path("far"), LEN);
    let allocator = Allocator::builder().pages(1024).build().unwrap();
    let memory = Memory::new(&allocator, 256, 1 << 20).unwrap();
    let disk = Disk::new(end.connect(PATIENCE), 0, 512, false);
    let file = VolumeFile::new(DataPath { volume: plain_volume(LEN, 512), disk, memory });
    let mut bytes = pattern(LEN as usize);
    file.write_at(0, &bytes).unwrap();
    // A part of a sector, across the border of two.
    file.write_at(1000, &[7; 100]).unwrap();
    bytes[1000..1100].fill(7);
    file.sync().unwrap();
    assert!(end.with(|state| decrypted(state.durable()) == bytes));
    let mut read = vec![0; LEN as usize];
    file.read_at(0, &mut read).unwrap();
    assert!(read == bytes);
    end.with(|state| state.write_fails = Some(EIO));
    assert!(file.write_at(0, &[1; 512]).is_err());
    assert_eq!(file.path().memory.pool().stats().out, 0);
}

#[test]
fn requests_keep_to_the_far_ends_blocks_and_flags() {
    const NO_FLUSH: u16 = HAS_FLAGS | SEND_FUA;
    let bench = Bench::with(&[]).unwrap();
    let all = HAS_FLAGS | SEND_FLUSH | SEND_FUA | SEND_TRIM | MULTI_CONN;
    for (flags, blocks) in [(all, [4096, 4096, 64 << 10]), (NO_FLUSH, [512, 8192, 12 << 10]), (all, [1, 512, u32::MAX])]
    {
        let end = FarEnd::start(&bench.path("far"), LEN);
        end.with(|state| (state.flags, state.blocks) = (flags, Some(blocks)));
        let setup = Setup { may_discard: true, cache: (blocks[0] == 1).then_some(64), ..Setup::new() };
        let served = serve_from(&bench, &end, PATIENCE, setup);
        let mut client = Client::connect(&served);
        let bytes = pattern(LEN as usize);
        client.write(0, &bytes, 0).unwrap();
        client.ask(command::FLUSH, 0, 0, 0).unwrap();
        assert!(end.with(|state| decrypted(state.durable()) == bytes), "{blocks:?}");
        assert!(client.read(0, LEN as usize).unwrap() == bytes, "{blocks:?}");
        let is_allowed = client.read(512, 512).is_ok();
        assert_eq!(is_allowed, blocks[0] <= 512, "the client keeps to them as well");
        client.ask(command::TRIM, 0, 0, 8192).unwrap();
        end.with(|state| {
            assert!(state.connections == if flags == all { 4 } else { 1 }, "{}", state.connections);
            assert_eq!(state.count(command::FLUSH), usize::from(flags == all));
            assert_eq!(state.count(command::TRIM), usize::from(flags == all));
            for asked in state.asked.iter().filter(|asked| [command::READ, command::WRITE].contains(&asked.command)) {
                assert!(asked.at % u64::from(blocks[0]) == 0 && asked.len % blocks[0] == 0, "{asked:?}");
                assert!(asked.len <= blocks[2], "{asked:?}");
                let is_durable = asked.command == command::WRITE && flags == NO_FLUSH;
                assert_eq!(asked.flags, u16::from(is_durable), "{asked:?}");
            }
        });
        drop(client);
        served.stop();
    }
}

/// The far end answers nothing before all requests of one client are there.
#[test]
fn many_requests_are_under_way_at_a_time() {
    const COUNT: usize = 64;
    let bench = Bench::with(&[]).unwrap();
    for flags in [HAS_FLAGS | SEND_FLUSH, HAS_FLAGS | SEND_FLUSH | MULTI_CONN] {
        let end = FarEnd::start(&bench.path("far"), LEN);
        end.with(|state| (state.flags, state.hold_until) = (flags, COUNT));
        let served = serve_from(&bench, &end, PATIENCE, Setup { threads: 1, ..Setup::new() });
        let mut client = Client::connect(&served);
        for cookie in 0..COUNT as u64 / 2 {
            client.send(command::READ, 0, cookie, cookie * 4096, 4096);
            client.send(command::WRITE, 0, 1000 + cookie, MIB + cookie * 4096, 4096);
            std::io::Write::write_all(&mut client.0, &[9; 4096]).unwrap();
        }
        for _ in 0..COUNT {
            let (error, cookie) = client.reply();
            assert_eq!(error, 0);
            if cookie < 1000 {
                std::io::Read::read_exact(&mut client.0, &mut [0; 4096]).unwrap();
            }
        }
        drop(client);
        served.stop();
    }
}

/// Numbers that repeat from run to run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Two clients write, read what they wrote, and flush now and then. The far end is killed and started again and again,
/// and each time loses most of what was not flushed.
#[test]
fn nothing_answered_is_lost_when_the_far_end_is_killed_under_load() {
    let bench = Bench::with(&[]).unwrap();
    for cache in [None, Some(128)] {
        let end = FarEnd::start(&bench.path("far"), LEN);
        let served = serve_from(&bench, &end, PATIENCE, Setup { cache, ..Setup::new() });
        let is_over = AtomicBool::new(false);
        let model = thread::scope(|scope| {
            let work = |me: u64| {
                let mut client = Client::connect(&served);
                let (mut numbers, half) = (Numbers(me), LEN as usize / 2);
                let base = me * half as u64;
                let mut model = vec![0; half];
                for at in (0..half).step_by(MIB as usize) {
                    client.write(base + at as u64, &model[at..at + MIB as usize], 0).unwrap();
                }
                let mut turn = 0u32;
                while !is_over.load(Relaxed) {
                    turn += 1;
                    let len = [512, 512, 4096, 65536][numbers.below(4) as usize];
                    let at = numbers.below((half - len) as u64 / 512) * 512;
                    let place = at as usize..at as usize + len;
                    let bytes: Vec<u8> =
                        (0..len as u32).map(|i| (turn.wrapping_mul(2_654_435_761) + i) as u8).collect();
                    let fua = if numbers.below(10) == 0 { FUA } else { 0 };
                    client.write(base + at, &bytes, fua).unwrap();
                    model[place].copy_from_slice(&bytes);
                    if numbers.below(20) == 0 {
                        client.ask(command::FLUSH, 0, 0, 0).unwrap();
                    }
                    let at = numbers.below((half - 8192) as u64 / 512) * 512;
                    let read = client.read(base + at, 8192).unwrap();
                    assert!(read == model[at as usize..][..8192], "client {me}, turn {turn}, at {at}");
                }
                model
            };
            let clients: Vec<_> = (0..2).map(|me| scope.spawn(move || work(me))).collect();
            for _ in 0..12 {
                let asked = end.with(|state| state.asked.len());
                // So many requests in between, however long they take.
                until("requests", || {
                    end.with(|state| state.asked.len()) > asked + 60
                        || clients.iter().any(|client| client.is_finished())
                });
                end.kill();
                end.restart();
            }
            is_over.store(true, Relaxed);
            clients.into_iter().flat_map(|client| client.join().unwrap()).collect::<Vec<u8>>()
        });
        let mut client = Client::connect(&served);
        assert!(client.read(0, LEN as usize).unwrap() == model);
        end.kill();
        end.restart();
        assert!(client.read(0, LEN as usize).unwrap() == model, "also what was never flushed");
        client.ask(command::FLUSH, 0, 0, 0).unwrap();
        end.kill();
        assert!(end.with(|state| decrypted(&state.bytes) == model), "and now it is on the disk");
        end.restart();
        drop(client);
        served.stop();
    }
}

#[test]
fn requests_fail_after_the_limit_and_nothing_is_lost_when_the_far_end_is_back() {
    let bench = Bench::with(&[]).unwrap();
    let (end, served) = served(&bench, Duration::ZERO);
    let mut client = Client::connect(&served);
    client.write(0, &[1; 4096], 0).unwrap();
    client.write(4096, &[2; 4096], FUA).unwrap();
    client.write(4096, &[3; 512], 0).unwrap();
    end.kill();
    for _ in 0..3 {
        assert_eq!(client.read(0, 512), Err(EIO));
        assert_eq!(client.write(MIB, &[9; 512], 0), Err(EIO));
        assert_eq!(client.ask(command::FLUSH, 0, 0, 0), Err(EIO));
        assert_eq!(client.write(MIB, &[9; 512], FUA), Err(EIO));
    }
    end.restart();
    until("the far end", || client.read(0, 512).is_ok());
    assert!(client.read(0, 4096).unwrap() == [1; 4096]);
    assert!(client.read(4096, 512).unwrap() == [3; 512]);
    // What was answered is not lost, so flushes mean something again.
    client.ask(command::FLUSH, 0, 0, 0).unwrap();
    end.with(|state| {
        let durable = decrypted(state.durable());
        assert!(durable[..4096] == [1; 4096] && durable[4096..4608] == [3; 512] && durable[4608..8192] == [2; 3584]);
    });
    drop(client);
    served.stop();
}

#[test]
fn a_flush_that_the_far_end_fails_fails_all_later_ones() {
    let bench = Bench::with(&[]).unwrap();
    for again in [false, true] {
        let (end, served) = served(&bench, PATIENCE);
        let (mut client, mut other) = (Client::connect(&served), Client::connect(&served));
        client.write(0, &[1; 4096], 0).unwrap();
        if again {
            // A kept write can't be written again.
            end.kill();
            end.with(|state| state.write_fails = Some(EIO));
            end.restart();
            client.read(0, 512).unwrap();
            end.with(|state| state.write_fails = None);
        } else {
            end.with(|state| state.flush_fails = Some(28));
            client.ask(command::FLUSH, 0, 0, 0).unwrap_err();
            end.with(|state| state.flush_fails = None);
        }
        for client in [&mut client, &mut other] {
            assert_eq!(client.ask(command::FLUSH, 0, 0, 0), Err(EIO), "{again}");
            assert_eq!(client.write(0, &[8; 512], FUA), Err(EIO), "{again}");
            client.write(0, &[9; 512], 0).unwrap();
            assert_eq!(client.read(0, 512).unwrap(), [9; 512]);
        }
        drop((client, other));
        assert!(served.try_stop().is_err(), "{again}: told at the end as well");
    }
}

/// A refused write is not kept, and concerns its client alone.
#[test]
fn errors_of_the_far_end_reach_the_client() {
    let bench = Bench::with(&[]).unwrap();
    let (end, served) = served(&bench, PATIENCE);
    let mut client = Client::connect(&served);
    client.write(0, &[1; 4096], 0).unwrap();
    for error in [EIO, 28, 12] {
        end.with(|state| state.write_fails = Some(error));
        assert_eq!(client.write(0, &[2; 4096], 0), Err(error));
        end.with(|state| state.write_fails = None);
    }
    end.kill();
    end.restart();
    assert_eq!(client.read(0, 4096).unwrap(), [1; 4096]);
    client.ask(command::FLUSH, 0, 0, 0).unwrap();
    drop(client);
    served.stop();
}

/// Nobody flushes, and the far end is told to when half of the bound is kept.
#[test]
fn what_is_kept_is_bounded_by_flushes_of_its_own() {
    let bench = Bench::with(&[]).unwrap();
    let (end, served) = served(&bench, PATIENCE);
    let mut client = Client::connect(&served);
    for _ in 0..12 {
        for at in 0..4 {
            client.ask(command::WRITE_ZEROES, 0, at * MIB, MIB as u32).unwrap();
        }
    }
    let flushes = end.with(|state| state.count(command::FLUSH));
    assert!((1..=2).contains(&flushes), "{flushes} flushes for 48 MiB");
    end.kill();
    end.restart();
    assert!(client.read(0, LEN as usize).unwrap().iter().all(|&byte| byte == 0));
    drop(client);
    served.stop();
}

/// The far end is another server of this crate, by TLS: its volume has a volume in it.
#[test]
fn a_far_end_by_tls_is_used_with_certificates_that_fit() {
    let bench = Bench::with(&[]).unwrap();
    let (certificates, others) = (Certificates::new(), Certificates::new());
    certificates.for_clients(&bench.path("own"), true);
    certificates.for_clients(&bench.path("none"), false);
    others.for_clients(&bench.path("others"), true);
    let data = bench.file("image", LEN);
    let setup = Setup { way: Way::Plain, socket: "far", ..Setup::new() };
    let far = Served::start_tls(&bench, data, plain_volume(LEN, 4096), setup, certificates.for_server(true));
    let connect = |scheme: &str, folder: &str, name: &str| {
        let (socket, folder) = (bench.path("far"), bench.path(folder));
        let (socket, folder) = (socket.display(), folder.display());
        let options = FarOptions { reconnect: PATIENCE, may_write: true, say: |_| {} };
        let tls = if scheme == "nbds" { format!("&tls-certificates={folder}{name}") } else { String::new() };
        Far::connect(&format!("{scheme}+unix:///?socket={socket}{tls}"), options)
    };
    for (scheme, folder, name, why) in [
        ("nbd", "own", "", "tls-certificates"),
        ("nbds", "others", "", "ca-cert.pem in tls-certificates has to be"),
        ("nbds", "own", "&tls-hostname=elsewhere", "give that name as tls-hostname"),
        ("nbds", "missing", "", "ca-cert.pem"),
        ("nbds", "none", "", ""),
    ] {
        let refused = connect(scheme, folder, name).unwrap_err().to_string();
        assert!(refused.contains(why), "{scheme} {folder} {name}: {refused}");
    }
    let end = connect("nbds", "own", "").unwrap();
    assert_eq!(end.size().unwrap(), LEN);
    let served = Served::start(&bench, end, plain_volume(LEN, 4096), Setup::new()).unwrap();
    let mut client = Client::connect(&served);
    let bytes = pattern(LEN as usize);
    client.write(0, &bytes, 0).unwrap();
    client.ask(command::FLUSH, 0, 0, 0).unwrap();
    assert!(client.read(0, LEN as usize).unwrap() == bytes);
    drop(client);
    served.stop();
    far.stop();
    let mut inner = plain_contents(&bench.open("image"), 4096);
    plain_volume(LEN, 4096).decrypt_in_place(0, &mut inner).unwrap();
    assert!(inner == bytes);
}
