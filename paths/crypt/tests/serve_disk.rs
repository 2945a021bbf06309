//! A disk that fails or is slow.

use std::io::Write;
use std::path::PathBuf;
use std::thread;

use crate::common::disk::*;
use crate::common::served::*;
use crate::common::*;
use pagemill_crypt::serve::Way;

/// Serves from the disk in every way; `test` stops the server.
fn on_disk(test: impl Fn(&Disk, &Bench, Served, Way)) {
    for way in [Way::Plain, Way::Uring] {
        let bench = Bench::with(&[]).unwrap();
        let disk = Disk::default();
        let at: PathBuf = bench.path("disk");
        let Some(_mount) = mounted(&disk, &at) else { return };
        if let Some(served) =
            Served::start(&bench, bench.open("disk"), plain_volume(LEN, 512), Setup { way, ..Setup::new() })
        {
            test(&disk, &bench, served, way);
        }
    }
}

#[test]
fn durable_writes_are_synced_before_they_are_answered() {
    on_disk(|disk, _, served, way| {
        let mut client = Client::connect(&served);
        let asked = || disk.with(|state| std::mem::take(&mut state.asked));
        // A page, and scattered pages; zeroes take another path.
        for len in [512, 4096, 300 << 10, 2 << 20] {
            client.write(0, &pattern(len), 0).unwrap();
            assert!(!asked().contains(&Asked::Sync), "{way:?}, {len}: nobody asked for that");
            client.ask(command::FLUSH, 0, 0, 0).unwrap();
            assert_eq!(asked(), [Asked::Sync], "{way:?}, {len}: a flush");
            client.write(0, &pattern(len), FUA).unwrap();
            assert!(is_durable(&asked()), "{way:?}, {len}: FUA");
            client.ask(command::WRITE_ZEROES, FUA, 0, len as u32).unwrap();
            assert!(is_durable(&asked()), "{way:?}, {len}: zeroes with FUA");
        }
        client.write(0, &[1; 512], 0).unwrap();
        drop(client);
        assert_eq!(asked(), [Asked::Write]);
        served.stop();
        assert_eq!(asked(), [Asked::Sync], "{way:?}: at the end");
    });
}

/// Whether a sync follows the writes.
fn is_durable(asked: &[Asked]) -> bool {
    asked.contains(&Asked::Write) && asked.last() == Some(&Asked::Sync)
}

#[test]
fn disk_errors_are_reported_to_the_clients_concerned() {
    on_disk(|disk, _, served, way| {
        let (mut client, mut other) = (Client::connect(&served), Client::connect(&served));
        client.write(0, &[7; 4096], FUA).unwrap();
        for len in [512, 300 << 10, 2 << 20] {
            for error in [EIO, NO_SPACE] {
                disk.with(|state| state.write_fails = Some(error));
                assert_eq!(client.write(4096, &pattern(len), 0), Err(error), "{way:?}, {len}");
                assert_eq!(client.ask(command::WRITE_ZEROES, 0, 4096, len as u32), Err(error), "{way:?}, {len}");
                disk.with(|state| state.write_fails = None);
            }
            disk.with(|state| state.read_fails = true);
            assert_eq!(client.read(0, len), Err(EIO), "{way:?}, {len}");
            disk.with(|state| state.read_fails = false);
        }
        // The session goes on, and so do others. A refused write breaks no promise.
        assert_eq!(other.read(0, 4096).unwrap(), [7; 4096]);
        client.ask(command::FLUSH, 0, 0, 0).unwrap();
        client.write(0, &[8; 4096], 0).unwrap();
        disk.with(|state| state.sync_fails = Some(EIO));
        assert_eq!(client.ask(command::FLUSH, 0, 0, 0), Err(EIO), "{way:?}");
        disk.with(|state| state.sync_fails = None);
        // The system reports it once. The data is lost for all clients, so no sync succeeds any more.
        assert_eq!(other.ask(command::FLUSH, 0, 0, 0), Err(EIO), "{way:?}");
        assert_eq!(client.write(0, &[8; 512], FUA), Err(EIO), "{way:?}");
        other.write(0, &[9; 512], 0).unwrap();
        assert_eq!(other.read(0, 512).unwrap(), [9; 512]);
        assert_eq!(served.server.path().memory.pool().stats().out, 0);
        drop((client, other));
        assert!(served.try_stop().is_err(), "{way:?}: told at the end as well");
    });
}

#[test]
fn a_failed_flush_fails_later_flushes_and_a_failed_write_does_not() {
    on_disk(|disk, _, served, way| {
        let mut clients = [(); 3].map(|()| Client::connect(&served));
        for len in [512, 300 << 10, 2 << 20] {
            disk.with(|state| state.write_fails = Some(EIO));
            assert_eq!(clients[0].write(0, &pattern(len), FUA), Err(EIO), "{way:?}, {len}");
            assert_eq!(clients[0].ask(command::WRITE_ZEROES, FUA, 0, len as u32), Err(EIO), "{way:?}, {len}");
            disk.with(|state| state.write_fails = None);
            for client in &mut clients {
                assert_eq!(client.ask(command::FLUSH, 0, 0, 0), Ok(()), "{way:?}, {len}: the failure was another's");
                assert_eq!(client.write(8192, &[1; 4096], FUA), Ok(()), "{way:?}, {len}");
            }
        }
        // One client's flush covers the writes of all. The system reports a failure once.
        clients[1].write(0, &[2; 4096], 0).unwrap();
        disk.with(|state| state.sync_fails = Some(EIO));
        assert_eq!(clients[0].ask(command::FLUSH, 0, 0, 0), Err(EIO), "{way:?}");
        disk.with(|state| state.sync_fails = None);
        let later = Client::connect(&served);
        for client in clients.iter_mut().chain(&mut [later]) {
            assert_eq!(client.ask(command::FLUSH, 0, 0, 0), Err(EIO), "{way:?}: the write is still not on the disk");
        }
        drop(clients);
        assert!(served.try_stop().is_err(), "{way:?}");
    });
}

#[test]
fn a_full_disk_fails_the_write_and_a_full_sync_fails_later_syncs() {
    on_disk(|disk, _, served, way| {
        let mut client = Client::connect(&served);
        disk.with(|state| state.write_fails = Some(NO_SPACE));
        for len in [512, 300 << 10, 2 << 20] {
            assert_eq!(client.write(0, &pattern(len), FUA), Err(NO_SPACE), "{way:?}, {len}");
            assert_eq!(client.ask(command::WRITE_ZEROES, FUA, 0, len as u32), Err(NO_SPACE), "{way:?}, {len}");
        }
        disk.with(|state| state.write_fails = None);
        client.ask(command::FLUSH, 0, 0, 0).unwrap();
        client.write(0, &[8; 4096], FUA).unwrap();
        // The disk accepts the write and then has no room for it: other writes may be lost with it.
        disk.with(|state| state.sync_fails = Some(NO_SPACE));
        assert_eq!(client.write(0, &[9; 4096], FUA), Err(NO_SPACE), "{way:?}");
        disk.with(|state| state.sync_fails = None);
        assert_eq!(client.ask(command::FLUSH, 0, 0, 0), Err(EIO), "{way:?}");
        drop(client);
        assert!(served.try_stop().is_err(), "{way:?}");
    });
}

#[test]
fn steps_on_the_disk_are_finished_when_the_server_stops_or_the_client_goes() {
    on_disk(|disk, bench, served, way| {
        let mut gone = Client::connect(&served);
        disk.hold(true);
        gone.send(command::WRITE, 0, 1, 0, 4096);
        gone.0.write_all(&[1; 4096]).unwrap();
        disk.until_held();
        drop(gone);
        disk.hold(false);
        served.wait_for_connections(0);
        assert_eq!(served.server.path().memory.pool().stats().out, 0, "{way:?}");

        let mut client = Client::connect(&served);
        assert_eq!(client.read(0, 4096).unwrap(), [1; 4096], "{way:?}");
        disk.hold(true);
        client.send(command::WRITE, 0, 2, 4096, 4096);
        client.0.write_all(&[2; 4096]).unwrap();
        disk.until_held();
        thread::scope(|scope| {
            let stopping = scope.spawn(|| served.stop());
            disk.hold(false);
            assert_eq!(client.reply(), (0, 2), "{way:?}");
            drop(client);
            stopping.join().unwrap();
        });
        assert!(plain_contents(&bench.open("disk"), 512)[4096..8192] == [2; 4096], "{way:?}");
    });
}
