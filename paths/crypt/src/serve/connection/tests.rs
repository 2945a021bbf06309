use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use pagemill::Allocator;

use super::*;
use crate::nbd::{Export, Tls};
use crate::secret::Locked;
use crate::serve::{Disk, Form, Memory};
use crate::{Geometry, SectorSize, Volume};

const LEN: u64 = 1 << 20;

fn path() -> DataPath {
    let data = tempfile::tempfile().unwrap();
    data.set_len(LEN).unwrap();
    let geometry =
        Geometry { offset: 0, len: LEN, sector_size: SectorSize::SMALLEST, first_unit: 0, counts_sectors: false };
    let volume = Volume::new(&Locked::copy_of(&[7; 64]), geometry).unwrap();
    let allocator = Allocator::builder().pages(64).build().unwrap();
    DataPath {
        volume,
        disk: Disk::new(data, 0, 512, true),
        memory: Memory::new(&allocator, 16, 1 << 20, Form::Bulk).unwrap(),
    }
}

/// Structured replies, `base:allocation`, and the only export.
fn negotiation() -> Vec<u8> {
    let option = |number: u32, data: &[u8]| {
        [b"IHAVEOPT", &number.to_be_bytes()[..], &(data.len() as u32).to_be_bytes(), data].concat()
    };
    let context = [&[0; 4][..], &1u32.to_be_bytes(), &15u32.to_be_bytes(), b"base:allocation"].concat();
    [&3u32.to_be_bytes()[..], &option(8, &[]), &option(10, &context), &option(7, &[0; 6])].concat()
}

fn request(command: u16, len: u32) -> Vec<u8> {
    let magic = 0x2560_9513u32.to_be_bytes();
    [&magic[..], &[0; 2], &command.to_be_bytes(), &[7; 8], &[0; 8], &len.to_be_bytes()].concat()
}

fn config() -> Arc<Config> {
    let export = Export {
        name: String::new(),
        description: String::new(),
        size: LEN,
        is_read_only: false,
        min_block: 512,
        preferred_block: 4096,
    };
    Arc::new(Config { exports: vec![export], tls: Tls::None, block_size_agreed: false })
}

/// A client, and its connection.
fn connected(now: Instant) -> (UnixStream, Connection) {
    let (client, server) = UnixStream::pair().unwrap();
    (client, Connection::new(0, Socket::unix(server).unwrap(), config(), now).unwrap())
}

/// Gives turns as long as there is something to do.
fn turns(connection: &mut Connection, path: &DataPath, engine: &mut Engine, now: Instant) -> usize {
    let mut context = Context { path, tls: None, engine, now, may_take: true, may_discard: true };
    let mut turns = 0;
    while turns == 0 || connection.is_ready() {
        connection.turn(&mut context);
        turns += 1;
    }
    turns
}

#[test]
fn who_negotiates_while_the_server_stops_is_told_so() {
    const SHUTDOWN: u32 = 0x8000_0007;
    let (path, now) = (path(), Instant::now());
    let limits = Limits { handshake: TEN_S, stall: TEN_S, stop: TEN_S };
    let greeting = 18;
    // What comes before and behind the moment, in pieces; the end is the same.
    let option = |number: u32| [b"IHAVEOPT", &number.to_be_bytes()[..], &[0; 4]].concat();
    let said = [&3u32.to_be_bytes()[..], &option(3), &option(8)].concat();
    for before in [0, 3, 4, 10] {
        let (client, mut connection) = connected(now);
        (&client).write_all(&said[..before]).unwrap();
        turns(&mut connection, &path, &mut Engine::Plain, now);
        connection.drain(now);
        turns(&mut connection, &path, &mut Engine::Plain, now);
        connection.check(&limits, &path, now + Duration::from_millis(900));
        assert!(!connection.is_dead(), "{before}: it has its time");
        (&client).write_all(&said[before..]).unwrap();
        turns(&mut connection, &path, &mut Engine::Plain, now);
        let mut answers = Vec::new();
        (&client).read_to_end(&mut answers).unwrap();
        let kinds: Vec<_> =
            answers[greeting..].chunks(20 + "the server ends".len()).map(|answer| &answer[8..16]).collect();
        let told = |number: u32| [number.to_be_bytes(), SHUTDOWN.to_be_bytes()].concat();
        assert_eq!(kinds, [told(3), told(8)], "{before}");
        drop(client);
        turns(&mut connection, &path, &mut Engine::Plain, now);
        assert!(connection.is_dead());
    }
    // Who says goodbye, or asks in the oldest way, which has no such answer; and who says nothing.
    for (last, answer) in [(Some(2), 20), (Some(1), 0), (None, 0)] {
        let (client, mut connection) = connected(now);
        (&client).write_all(&said[..4]).unwrap();
        turns(&mut connection, &path, &mut Engine::Plain, now);
        connection.drain(now);
        match last {
            Some(number) => {
                (&client).write_all(&option(number)).unwrap();
                turns(&mut connection, &path, &mut Engine::Plain, now);
            }
            None => connection.check(&limits, &path, now + Duration::from_millis(1100)),
        }
        assert!(connection.is_dead(), "{last:?}");
        drop(connection);
        let mut answers = Vec::new();
        (&client).read_to_end(&mut answers).unwrap();
        assert_eq!(answers.len(), greeting + answer, "{last:?}");
    }
}

const TEN_S: Duration = Duration::from_secs(10);

#[test]
fn requests_without_bytes_take_their_part_of_a_turn() {
    let path = path();
    // Flush, trim, and block status: each is a call to the disk, or hundreds.
    for (command, len) in [(3, 0), (4, 512), (7, LEN as u32)] {
        let now = Instant::now();
        let (client, mut connection) = connected(now);
        let requests = request(command, len).repeat(1000);
        (&client).write_all(&[negotiation(), requests].concat()).unwrap();
        let turns = turns(&mut connection, &path, &mut Engine::Plain, now);
        assert!(turns >= 10, "{turns} turns for 1000 requests of kind {command}");
        drop(connection);
        let mut answers = Vec::new();
        (&client).read_to_end(&mut answers).unwrap();
        let done = answers.windows(12).filter(|bytes| bytes[..4] == [0x66, 0x8e, 0x33, 0xef] && bytes[5] == 1);
        assert_eq!(done.count(), 1000, "of kind {command}");
    }
}
