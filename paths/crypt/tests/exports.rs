//! Several volumes on one server: each client gets the one that it asked for, and they share threads and memory.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;

use crate::commands::crypt;
use crate::common::far_end::FarEnd;
use crate::common::served::*;
use crate::common::*;
use pagemill_crypt::serve::{Behind, Way};
use pagemill_crypt::{SectorSize, Volume, plain::Plain};

const LEN: u64 = 2 * MIB;

/// A volume with a key of its own.
fn volume(number: usize, sector: u64) -> Volume {
    let sector_size = SectorSize::new(sector).unwrap();
    let plain = Plain { key_bytes: 64, hash: None, offset: 0, skip: 0, size: None, sector_size, counts_sectors: false };
    Volume::new(&plain.key(&pattern(64 + 64 * number)[64 * number..]).unwrap(), plain.geometry(LEN).unwrap()).unwrap()
}

/// The name, and the bytes of a sector.
const VOLUMES: [(&str, u64); 3] = [("one", 512), ("two", 4096), ("far", 512)];

/// Serves two files and a far end in every way; `test` stops the server.
fn by_each_way_of_files(setup: Setup, test: impl Fn(&Bench, &FarEnd, Served)) {
    for way in [Way::Plain, Way::Auto] {
        let bench = Bench::with(&[]).unwrap();
        let end = FarEnd::start(&bench.path("far"), LEN);
        let behind = |number: usize| -> Behind {
            match number {
                2 => end.connect(PATIENCE).into(),
                _ => bench.file(VOLUMES[number].0, LEN).into(),
            }
        };
        // A far end is no file, for which alone a way can be chosen.
        let count = if way == Way::Auto { 3 } else { 2 };
        let volumes = (0..count).map(|number| (VOLUMES[number].0, behind(number), volume(number, VOLUMES[number].1)));
        let served = Served::start_all(&bench, volumes.collect(), Setup { way, ..setup }).unwrap();
        test(&bench, &end, served);
    }
}

fn contents(bench: &Bench, end: &FarEnd, number: usize) -> Vec<u8> {
    let mut bytes = match number {
        2 => end.with(|state| state.bytes.clone()),
        _ => std::fs::read(bench.path(VOLUMES[number].0)).unwrap(),
    };
    volume(number, VOLUMES[number].1).decrypt_in_place(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn clients_get_the_volume_that_they_ask_for() {
    for cache in [None, Some(64)] {
        by_each_way_of_files(Setup { cache, threads: 1, ..Setup::new() }, |bench, end, served| {
            let count = served.server.ways().len();
            let bytes = pattern(count * LEN as usize);
            let bytes: Vec<_> = bytes.chunks(LEN as usize).collect();
            let mut clients: Vec<_> =
                (0..count).map(|number| Client::connect_to(&served, VOLUMES[number].0).unwrap()).collect();
            assert!(Client::connect_to(&served, "three").is_none());
            for (client, bytes) in clients.iter_mut().zip(&bytes) {
                client.write(0, bytes, FUA).unwrap();
            }
            for (number, client) in clients.iter_mut().enumerate() {
                assert!(client.read(0, LEN as usize).unwrap() == bytes[number], "{number}");
                assert!(client.read(4096, 8192).unwrap() == bytes[number][4096..][..8192], "{number}, again");
                assert!(contents(bench, end, number) == bytes[number], "{number}");
            }
            // The blocks are those of the volume.
            assert_eq!((clients[0].read(512, 512).is_ok(), clients[1].read(512, 512).is_ok()), (true, false));
            // The first one is what a client gets that asks for none.
            assert!(Client::connect(&served).read(0, 4096).unwrap() == bytes[0][..4096]);
            drop(clients);
            served.stop();
        });
    }
}

/// Clients of all volumes at once, with so little memory that they wait for each other's pages.
#[test]
fn clients_of_all_volumes_share_a_reserve_that_is_too_small_for_them() {
    let setup = Setup { pages: 64, promised: 16, threads: 2, ..Setup::new() };
    by_each_way_of_files(setup, |bench, end, served| {
        let count = served.server.ways().len();
        let models: Vec<Vec<u8>> = thread::scope(|scope| {
            let work = |me: usize| {
                let number = me % count;
                let half = LEN as usize / 2;
                let base = (me / count * half) as u64;
                let mut client = Client::connect_to(&served, VOLUMES[number].0).unwrap();
                let mut model = vec![0; half];
                for (turn, len) in [half, 4096, 256 << 10, 64 << 10, 12 << 10].into_iter().cycle().take(40).enumerate()
                {
                    let at = (turn * 52 * 4096) % (half - len + 1) / 4096 * 4096;
                    let bytes: Vec<u8> = (0..len).map(|i| (i / 7 + turn + me) as u8).collect();
                    client.write(base + at as u64, &bytes, if turn % 5 == 4 { FUA } else { 0 }).unwrap();
                    model[at..at + len].copy_from_slice(&bytes);
                    assert!(client.read(base + at as u64, len).unwrap() == bytes, "client {me}, turn {turn}");
                }
                assert!(client.read(base, half).unwrap() == model, "client {me}");
                model
            };
            let threads: Vec<_> = (0..2 * count).map(|me| scope.spawn(move || work(me))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for number in 0..count {
            assert!(
                contents(bench, end, number) == [&models[number][..], &models[number + count]].concat(),
                "{number}"
            );
        }
        served.stop();
    });
}

/// A disk that loses data fails the flushes of its own clients alone.
#[test]
fn a_disk_that_fails_concerns_its_own_volume() {
    let bench = Bench::with(&[]).unwrap();
    let end = FarEnd::start(&bench.path("far"), LEN);
    let volumes = vec![
        ("far", end.connect(PATIENCE).into(), volume(2, 512)),
        ("one", bench.file("one", LEN).into(), volume(0, 512)),
    ];
    let served = Served::start_all(&bench, volumes, Setup::new()).unwrap();
    let (mut far, mut one) = (Client::connect(&served), Client::connect_to(&served, "one").unwrap());
    for client in [&mut far, &mut one] {
        client.write(0, &[1; 4096], 0).unwrap();
    }
    end.with(|state| state.flush_fails = Some(5));
    assert_eq!(far.ask(command::FLUSH, 0, 0, 0), Err(5));
    end.with(|state| state.flush_fails = None);
    for _ in 0..2 {
        assert_eq!(far.ask(command::FLUSH, 0, 0, 0), Err(5));
        one.ask(command::FLUSH, 0, 0, 0).unwrap();
        one.write(0, &[2; 512], FUA).unwrap();
    }
    drop((far, one));
    assert!(served.try_stop().is_err(), "told at the end");
}

/// The choice of a volume, requests and the goodbye come at once, and all of them are for that volume.
#[test]
fn requests_that_come_with_the_choice_are_for_the_chosen_volume() {
    by_each_way_of_files(Setup::new(), |bench, end, served| {
        let last = served.server.ways().len() - 1;
        let bytes = pattern(4096);
        for turn in 0..20 {
            let mut stream = UnixStream::connect(&served.socket).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let name = VOLUMES[last].0.as_bytes();
            let choice = [&3u32.to_be_bytes()[..], name, &1u16.to_be_bytes(), &3u16.to_be_bytes()].concat();
            let option =
                [&3u32.to_be_bytes()[..], b"IHAVEOPT", &7u32.to_be_bytes(), &(choice.len() as u32).to_be_bytes()];
            let write = header(command::WRITE, FUA, 1, turn * 4096, 4096);
            let read = header(command::READ, 0, 2, turn * 4096, 4096);
            let goodbye = header(command::DISCONNECT, 0, 3, 0, 0);
            let flushes = end.with(|state| state.count(command::FLUSH));
            stream.write_all(&[&option.concat()[..], &choice, &write, &bytes, &goodbye].concat()).unwrap();
            let mut said = Vec::new();
            stream.read_to_end(&mut said).unwrap();
            assert_eq!(
                said[said.len() - 16..],
                [&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0][..], &1u64.to_be_bytes()].concat()
            );
            assert!(contents(bench, end, last)[turn as usize * 4096..][..4096] == bytes, "turn {turn}");
            assert_eq!(end.with(|state| state.count(command::FLUSH)), flushes + usize::from(last == 2), "turn {turn}");
            let mut stream = UnixStream::connect(&served.socket).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.write_all(&[&option.concat()[..], &choice, &read, &goodbye].concat()).unwrap();
            said.clear();
            stream.read_to_end(&mut said).unwrap();
            assert!(said.ends_with(&bytes), "turn {turn}");
        }
        served.stop();
    });
}

/// As for files: nobody else may use what one of them writes.
#[test]
fn one_far_end_is_not_served_twice_unless_it_is_only_read() {
    // It starts the log, which is the process's.
    own_process!();
    let bench = Bench::with(&[]).unwrap();
    let refused = |more: &str| crypt(&bench, &format!("serve --unix @socket {more}")).err().unwrap().to_string();
    let twice = refused("--export a=nbd://127.0.0.1:1/x,read-only --export b=nbd://127.0.0.1:1/x");
    assert!(twice.contains(r#"the exports "a" and "b" are the same volume"#), "{twice}");
    let twice = refused("nbd+unix:///?socket=/no/such --name a --export b=nbds+unix:///?socket=/no/such");
    assert!(twice.contains("are the same volume"), "{twice}");
    // Nobody answers there.
    let readers = refused("--read-only --export a=nbd://127.0.0.1:1/x --export b=nbd://127.0.0.1:1/x");
    assert!(readers.contains("Connection refused"), "{readers}");
}
