//! A served volume: clients and the file have what clients write, by every way to the disk.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::thread;

use crate::common::served::*;
use crate::common::*;
use pagemill_crypt::Luks;
use pagemill_crypt::kdf::{KdfKind, Limits};
use pagemill_crypt::serve::Way;

/// Pseudo-random numbers, the same each time.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Requests of every kind and length from one client, compared with a model of the volume.
fn exercise(client: &mut Client, model: &mut [u8], sector: u64, seed: u64, rounds: u32) {
    let mut numbers = Numbers(seed);
    let noise = pattern(4 << 20);
    let sectors = model.len() as u64 / sector;
    for round in 0..rounds {
        // Mostly short requests, some longer than a part.
        let most = match numbers.below(8) {
            0 => 3 << 20,
            1 => 300 << 10,
            _ => 24 << 10,
        };
        let count = 1 + numbers.below((most / sector).min(sectors));
        let first = numbers.below(sectors - count + 1);
        let (at, len) = (first * sector, (count * sector) as usize);
        let place = at as usize..at as usize + len;
        let fua = if numbers.below(4) == 0 { FUA } else { 0 };
        match numbers.below(8) {
            0..4 => {
                let from = numbers.below((noise.len() - len) as u64) as usize;
                client.write(at, &noise[from..from + len], fua).unwrap();
                model[place].copy_from_slice(&noise[from..from + len]);
            }
            4 => {
                client.ask(command::WRITE_ZEROES, fua, at, len as u32).unwrap();
                model[place].fill(0);
            }
            5 => client.ask(command::FLUSH, 0, 0, 0).unwrap(),
            _ => assert!(client.read(at, len).unwrap() == model[place], "seed {seed}, round {round}: {len} at {at}"),
        }
    }
}

fn round_trip(bench: &Bench, setup: Setup, sector: u64) {
    let len = 6 * MIB;
    let file = bench.file("image", len);
    let Some(served) = Served::start(bench, bench.open("image"), plain_volume(len, sector), setup) else { return };
    let mut client = Client::connect(&served);
    let mut model = vec![0; len as usize];
    client.ask(command::WRITE_ZEROES, 0, 0, len as u32).unwrap();
    exercise(&mut client, &mut model, sector, sector, 150);
    assert!(client.read(0, len as usize).unwrap() == model, "{setup:?}, {sector}");
    drop(client);
    served.stop();
    assert!(plain_contents(&file, sector) == model, "{setup:?}, {sector}: what the file holds");
}

#[test]
fn every_way_to_the_disk_keeps_written_data() {
    let bench = Bench::with(&[]).unwrap();
    for way in [Way::Plain, Way::Uring] {
        for sector in [512, 4096] {
            round_trip(&bench, Setup { way, ..Setup::new() }, sector);
        }
    }
}

#[test]
fn a_server_works_with_hardly_any_pages() {
    let bench = Bench::with(&[]).unwrap();
    for way in [Way::Plain, Way::Uring] {
        // Only the reserve, and up to three pages more.
        for (pages, promised) in [(1, 1), (4, 3), (67, 64)] {
            round_trip(&bench, Setup { way, pages, promised, ..Setup::new() }, 1024);
        }
    }
}

#[test]
fn several_connections_see_one_volume() {
    // Each client writes its own quarter; then each quarter is read by a new client.
    let quarter = 4 * MIB;
    by_each_way(Setup { threads: 3, ..Setup::new() }, 4 * quarter, 512, |_, served, way| {
        let models: Vec<Vec<u8>> = thread::scope(|scope| {
            let work = |i: u64| {
                let mut client = Client::connect(&served);
                let mut model = vec![0; quarter as usize];
                for at in (0..quarter).step_by(1 << 18) {
                    let bytes = pattern((1 << 18) + 512 * i as usize)[512 * i as usize..].to_vec();
                    client.write(i * quarter + at, &bytes, 0).unwrap();
                    model[at as usize..at as usize + (1 << 18)].copy_from_slice(&bytes);
                }
                client.ask(command::FLUSH, 0, 0, 0).unwrap();
                model
            };
            let threads: Vec<_> = (0..4).map(|i| scope.spawn(move || work(i))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for (i, model) in models.iter().enumerate() {
            let mut client = Client::connect(&served);
            let read = client.read(i as u64 * quarter, quarter as usize).unwrap();
            assert!(read == *model, "{way:?}, quarter {i}");
        }
        served.stop();
    });
}

#[test]
fn many_requests_at_once_are_all_answered() {
    let noise = pattern(8 << 20);
    by_each_way(Setup::new(), 8 * MIB, 4096, |_, served, way| {
        let mut client = Client::connect(&served);
        client.write(0, &noise, 0).unwrap();
        // More requests than may be under way at once, before the first answer is read.
        let mut writer = Client(client.0.try_clone().unwrap());
        let asking = thread::spawn(move || {
            for cookie in 0..1000 {
                writer.send(command::READ, 0, cookie, cookie % 2048 * 4096, 4096);
            }
        });
        let mut seen = vec![false; 1000];
        for _ in 0..1000 {
            let (error, cookie) = client.reply();
            assert_eq!(error, 0);
            let mut bytes = vec![0; 4096];
            std::io::Read::read_exact(&mut client.0, &mut bytes).unwrap();
            let at = (cookie % 2048 * 4096) as usize;
            assert!(bytes == noise[at..at + 4096], "{way:?}, {cookie}");
            assert!(!std::mem::replace(&mut seen[cookie as usize], true), "{cookie} twice");
        }
        asking.join().unwrap();
        served.stop();
    });
}

#[test]
fn nbdcopy_and_qemu_write_a_served_volume() {
    let Some(bench) = Bench::with(&["nbdcopy", "qemu-img", "nbdinfo"]) else { return };
    for way in [Way::Auto, Way::Plain] {
        let len = 12 * MIB;
        let file = bench.file("image", len);
        let setup = Setup { way, ..Setup::new() };
        let served = Served::start(&bench, bench.open("image"), plain_volume(len, 4096), setup).unwrap();
        let uri = served.uri();
        let mut plain = pattern(len as usize);
        plain[3_000_000..5_000_000].fill(0);
        write(&bench.path("raw"), &plain);
        bench.ok(&format!("nbdcopy --connections=4 --flush raw {uri}"));
        bench.ok(&format!("nbdcopy --connections=4 {uri} back"));
        assert!(fs::read(bench.path("back")).unwrap() == plain);
        plain.reverse();
        write(&bench.path("raw"), &plain);
        bench.ok(&format!("qemu-img convert -n -W -f raw -O raw raw {uri}"));
        bench.ok(&format!("qemu-img compare -f raw -F raw raw {uri}"));
        assert!(bench.ok(&format!("nbdinfo --map {uri}")).contains("data"));
        served.stop();
        assert!(plain_contents(&file, 4096) == plain, "{way:?}");
    }
}

/// Five writes at once, one of them beyond the end, which libnbd sends only in this mode.
const FIVE: &str = "
import nbd, sys
client = nbd.NBD()
client.set_strict_mode(0)
client.connect_uri(sys.argv[1])
size = client.get_size()
errors = {}
def note(place):
    def done(error):
        errors[place] = error.value
        return 1
    return done
for place, at in enumerate([0, 4096, size, 8192, 12288]):
    client.aio_pwrite(bytes([7]) * (1 << 20 if at == size else 4096), at, completion=note(place))
while len(errors) < 5:
    client.poll(-1)
assert [errors[place] for place in range(5)] == [0, 0, 28, 0, 0], errors
assert client.pread(16384, 0) == bytes([7]) * 16384
client.shutdown()
";

/// A cache request, and zeroes that are to be fast or not at all.
const HINTS: &str = "\
import errno, nbd, sys
client = nbd.NBD()
client.connect_uri(sys.argv[1])
assert client.can_cache() and client.can_fast_zero()
bytes = bytes(range(256)) * 4096
client.pwrite(bytes, 0)
client.cache(client.get_size(), 0)
client.cache(4096, 4096)
try:
    client.zero(65536, 0, nbd.CMD_FLAG_FAST_ZERO)
    raise SystemExit('zeroes were fast')
except nbd.Error as refused:
    assert refused.errnum == errno.ENOTSUP, refused
assert client.pread(1 << 20, 0) == bytes
client.zero(65536, 0)
assert client.pread(1 << 20, 0) == b'\\0' * 65536 + bytes[65536:]
client.shutdown()
";

#[test]
fn libnbd_gives_hints_and_is_refused_zeroes_that_are_to_be_fast() {
    by_libnbd(HINTS);
}

#[test]
fn libnbd_gets_one_refusal_among_five_writes() {
    by_libnbd(FIVE);
}

/// Runs a program of libnbd's against a volume of a MiB, by each way to the disk.
fn by_libnbd(program: &str) {
    let Some(bench) = Bench::with(&["/usr/bin/python3"]) else { return };
    if !bench.run("/usr/bin/python3 -m nbd --version").status.success() {
        eprintln!("skipped: python3-libnbd is not installed");
        return;
    }
    write(&bench.path("client.py"), program.as_bytes());
    for way in [Way::Plain, Way::Uring] {
        bench.file("image", MIB);
        let setup = Setup { way, ..Setup::new() };
        let Some(served) = Served::start(&bench, bench.open("image"), plain_volume(MIB, 512), setup) else { continue };
        bench.ok(&format!("/usr/bin/python3 client.py {}", served.uri()));
        served.stop();
    }
}

#[test]
fn cryptsetup_decrypts_data_written_through_the_server() {
    let Some(bench) = Bench::with(&["cryptsetup", "nbdcopy"]) else { return };
    let cheap = "--pbkdf pbkdf2 --pbkdf-force-iterations 1000";
    let plain = pattern(4 * MIB as usize);
    for sector in [512, 4096] {
        // A volume of `cryptsetup`'s, with contents that it encrypted.
        write(&bench.path("data"), &plain);
        let _ = fs::remove_file(bench.path("header"));
        bench.ok(&format!(
            "cryptsetup reencrypt --encrypt -q --type luks2 --sector-size {sector} {cheap} --key-file pw --header header data"
        ));
        let header = bench.open("header");
        let luks = Luks::read(&header).unwrap();
        let volume = luks.open(&header, PASSPHRASE, 4 * MIB, true, &Limits::default()).unwrap();
        let served = Served::start(&bench, bench.open("data"), volume, Setup::new()).unwrap();
        bench.ok(&format!("nbdcopy {} back", served.uri()));
        assert!(fs::read(bench.path("back")).unwrap() == plain, "{sector}");
        let other: Vec<u8> = plain.iter().map(|byte| !byte).collect();
        write(&bench.path("raw"), &other);
        bench.ok(&format!("nbdcopy --flush raw {}", served.uri()));
        served.stop();
        bench.ok("cryptsetup reencrypt --decrypt --force-offline-reencrypt -q --key-file pw --header header data");
        assert!(fs::read(bench.path("data")).unwrap() == other, "{sector}");
    }
}

#[test]
fn qemu_reads_the_luks1_volume_that_was_served() {
    let Some(bench) = Bench::with(&["qemu-img", "nbdcopy"]) else { return };
    let plain = pattern(2 * MIB as usize);
    let file = bench.file("ours", 4 * MIB);
    Luks::format(&file, &new(1, 512, 512, KdfKind::Pbkdf2), PASSPHRASE).unwrap();
    let luks = Luks::read(&file).unwrap();
    let volume = luks.open(&file, PASSPHRASE, 4 * MIB, false, &Limits::default()).unwrap();
    let served = Served::start(&bench, bench.open("ours"), volume, Setup::new()).unwrap();
    write(&bench.path("raw"), &plain);
    bench.ok(&format!("nbdcopy --flush raw {}", served.uri()));
    served.stop();
    let secret = "--object secret,id=pw,file=pw";
    bench.ok(&format!(
        "qemu-img convert {secret} --image-opts driver=luks,key-secret=pw,file.filename=ours -O raw back"
    ));
    assert!(fs::read(bench.path("back")).unwrap() == plain);
}

#[test]
fn stopping_finishes_what_was_begun() {
    let noise = pattern(8 << 20);
    by_each_way(Setup::new(), 8 * MIB, 512, |bench, served, way| {
        let mut client = Client::connect(&served);
        // Half of it has come when the server is told to stop. The client sends the rest, and is answered.
        client.send(command::WRITE, 0, 5, 0, noise.len() as u32);
        let half = noise.len() / 2;
        std::io::Write::write_all(&mut client.0, &noise[..half]).unwrap();
        let mut idle = Client::connect(&served);
        thread::scope(|scope| {
            let stopping = scope.spawn(|| served.stop());
            // It stops: a client with nothing under way is disconnected.
            idle.until_end();
            std::io::Write::write_all(&mut client.0, &noise[half..]).unwrap();
            assert_eq!(client.reply(), (0, 5), "{way:?}");
            // And then nothing more comes.
            client.until_end();
            drop((client, idle));
            stopping.join().unwrap();
        });
        assert!(plain_contents(&bench.open("image"), 512) == noise, "{way:?}");
    });
}

#[test]
fn a_server_that_is_dropped_stops() {
    // One thread: when it has answered the second client, it has received the header of the first one's write.
    by_each_way(Setup { threads: 1, ..Setup::new() }, MIB, 512, |bench, served, way| {
        let mut client = Client::connect(&served);
        client.send(command::WRITE, 0, 5, 0, 8192);
        std::io::Write::write_all(&mut client.0, &[7; 4096]).unwrap();
        let mut idle = Client::connect(&served);
        thread::scope(|scope| {
            let dropping = scope.spawn(|| served.drop_server());
            idle.until_end();
            std::io::Write::write_all(&mut client.0, &[7; 4096]).unwrap();
            assert_eq!(client.reply(), (0, 5), "{way:?}: what was begun is finished");
            drop((client, idle));
            assert_eq!(dropping.join().unwrap().validate().unwrap().handed_out, 0, "{way:?}");
        });
        assert!(plain_contents(&bench.open("image"), 512)[..8192] == [7; 8192], "{way:?}");
    });
}

#[test]
fn requests_that_come_while_the_server_stops_are_refused() {
    const SHUTDOWN: u32 = 108;
    by_each_way(Setup { threads: 1, ..Setup::new() }, MIB, 512, |bench, served, way| {
        let mut client = Client::connect(&served);
        client.ask(command::WRITE_ZEROES, FUA, 0, MIB as u32).unwrap();
        client.send(command::WRITE, 0, 5, 0, 8192);
        std::io::Write::write_all(&mut client.0, &[7; 4096]).unwrap();
        let mut idle = Client::connect(&served);
        thread::scope(|scope| {
            let stopping = scope.spawn(|| served.stop());
            // When one client is disconnected, the server is stopping: both clients have the same thread.
            idle.until_end();
            // In one call, so that all of it has come when the write is done.
            let mut rest = vec![7; 4096];
            for (number, payload) in [(command::READ, 0), (command::WRITE, 512), (command::FLUSH, 0)] {
                let (len, cookie) = (if number == command::FLUSH { 0 } else { 512u32 }, u64::from(number) + 100);
                rest.extend(header(number, 0, cookie, 0, len));
                rest.extend(vec![9; payload]);
            }
            std::io::Write::write_all(&mut client.0, &rest).unwrap();
            let mut answers: Vec<_> = (0..4).map(|_| client.reply()).collect();
            answers.sort_by_key(|&(_, cookie)| cookie);
            let refused =
                [command::READ, command::WRITE, command::FLUSH].map(|number| (SHUTDOWN, u64::from(number) + 100));
            assert_eq!(answers, [&[(0, 5)][..], &refused].concat(), "{way:?}");
            client.until_end();
            drop((client, idle));
            stopping.join().unwrap();
        });
        let contents = plain_contents(&bench.open("image"), 512);
        assert!(contents[..8192] == [7; 8192] && contents[8192..].iter().all(|&byte| byte == 0), "{way:?}");
    });
}

/// Bytes of a write under load, and how many places of that length a client writes to: more than its writes on the disk
/// at once.
const EACH: usize = 40 << 10;
const PLACES: u64 = 256;

/// Writes from `at` on until a write is refused, and disconnects when the last write is answered. Returns the errors,
/// by cookie. The last byte of each write is sent together with the next header, so that a request of the client has
/// always begun.
fn write_until_refused(mut client: Client, at: u64, answered: &AtomicUsize) -> Vec<u32> {
    let (whole, total, is_refused) = (AtomicU64::new(0), AtomicU64::new(u64::MAX), AtomicBool::new(false));
    let mut writer = client.0.try_clone().unwrap();
    let next = |cookie| header(command::WRITE, 0, cookie, at + cookie % PLACES * EACH as u64, EACH as u32);
    thread::scope(|scope| {
        scope.spawn(|| {
            writer.write_all(&next(0)).unwrap();
            for cookie in 0.. {
                let byte = cookie as u8;
                writer.write_all(&[byte; EACH - 1]).unwrap();
                let is_last = is_refused.load(SeqCst);
                if is_last {
                    total.store(cookie + 1, SeqCst);
                }
                whole.store(cookie + 1, SeqCst);
                let then = if is_last { header(command::DISCONNECT, 0, 0, 0, 0) } else { next(cookie + 1) };
                writer.write_all(&[&[byte], &then[..]].concat()).unwrap();
                if is_last {
                    return;
                }
            }
        });
        let mut errors = BTreeMap::new();
        while total.load(SeqCst) != errors.len() as u64 {
            let (error, cookie) = client.reply();
            assert!(cookie < whole.load(SeqCst), "write {cookie} is answered ({error}) before its payload has come");
            assert_eq!(errors.insert(cookie, error), None, "write {cookie} is answered twice");
            answered.fetch_add(1, SeqCst);
            is_refused.fetch_or(error != 0, SeqCst);
        }
        client.until_end();
        errors.into_values().collect()
    })
}

#[test]
fn under_load_each_request_is_answered_once_while_it_stops() {
    const CLIENTS: u64 = 4;
    const SHUTDOWN: u32 = 108;
    let each = PLACES * EACH as u64;
    by_each_way(Setup::new(), CLIENTS * each, 512, |bench, served, way| {
        let answered = [const { AtomicUsize::new(0) }; CLIENTS as usize];
        let errors: Vec<_> = thread::scope(|scope| {
            let clients: Vec<_> = (0..CLIENTS)
                .zip(&answered)
                .map(|(number, answered)| {
                    let client = Client::connect(&served);
                    scope.spawn(move || write_until_refused(client, number * each, answered))
                })
                .collect();
            let is_under_way = |answered: &AtomicUsize| answered.load(SeqCst) > 20;
            until("an answer to everybody", || {
                answered.iter().all(is_under_way) || clients.iter().any(thread::ScopedJoinHandle::is_finished)
            });
            served.stop();
            clients.into_iter().map(|client| client.join().unwrap()).collect()
        });
        let contents = plain_contents(&bench.open("image"), 512);
        for (number, errors) in errors.into_iter().enumerate() {
            let done = errors.iter().take_while(|&&error| error == 0).count();
            assert!(errors[done..].iter().all(|&error| error == SHUTDOWN), "{way:?}: {errors:?}");
            // Answered writes are in the file, and refused ones are not.
            for cookie in done.saturating_sub(PLACES as usize)..done {
                let at = number * each as usize + cookie % PLACES as usize * EACH;
                assert!(contents[at..at + EACH] == [cookie as u8; EACH], "{way:?}, client {number}, write {cookie}");
            }
        }
    });
}

#[test]
fn trims_make_holes_if_allowed_and_holes_are_reported() {
    let Some(bench) = Bench::with(&["nbdinfo"]) else { return };
    for may_discard in [false, true] {
        let len = 4 * MIB;
        let file = bench.file("image", len);
        let setup = Setup { may_discard, ..Setup::new() };
        let served = Served::start(&bench, bench.open("image"), plain_volume(len, 4096), setup).unwrap();
        let mut client = Client::connect(&served);
        client.write(0, &pattern(len as usize), FUA).unwrap();
        client.ask(command::TRIM, FUA, MIB, 2 * MIB as u32).unwrap();
        let map = bench.ok(&format!("nbdinfo --map --json {}", served.uri()));
        let map: serde_json::Value = serde_json::from_str(&map).unwrap();
        let lens: Vec<_> = map.as_array().unwrap().iter().map(|e| (e["length"].as_u64(), e["type"].as_u64())).collect();
        // Type 1 is a hole that does not read as zeroes, since it is decrypted.
        let whole = vec![(Some(len), Some(0))];
        let holed = vec![(Some(MIB), Some(0)), (Some(2 * MIB), Some(1)), (Some(MIB), Some(0))];
        assert_eq!(lens, if may_discard { holed } else { whole });
        drop(client);
        served.stop();
        use std::os::unix::fs::MetadataExt;
        assert_eq!(file.metadata().unwrap().blocks() * 512 < len, may_discard);
    }
}
