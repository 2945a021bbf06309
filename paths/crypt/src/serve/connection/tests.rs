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

#[test]
fn requests_without_bytes_take_their_part_of_a_turn() {
    let path = path();
    let export = Export {
        name: String::new(),
        description: String::new(),
        size: LEN,
        is_read_only: false,
        min_block: 512,
        preferred_block: 4096,
    };
    let config = Arc::new(Config { exports: vec![export], tls: Tls::None, block_size_agreed: false });
    // Flush, trim, and block status: each is a call to the disk, or hundreds.
    for (command, len) in [(3, 0), (4, 512), (7, LEN as u32)] {
        let (client, server) = UnixStream::pair().unwrap();
        let socket = Socket::unix(server).unwrap();
        let mut connection = Connection::new(0, socket, Arc::clone(&config), Instant::now()).unwrap();
        let requests = request(command, len).repeat(1000);
        (&client).write_all(&[negotiation(), requests].concat()).unwrap();
        let mut engine = Engine::Plain;
        let now = Instant::now();
        let mut context =
            Context { path: &path, tls: None, engine: &mut engine, now, may_take: true, may_discard: true };
        let mut turns = 0;
        while turns == 0 || connection.is_ready() {
            connection.turn(&mut context);
            turns += 1;
        }
        assert!(turns >= 10, "{turns} turns for 1000 requests of kind {command}");
        drop(connection);
        let mut answers = Vec::new();
        (&client).read_to_end(&mut answers).unwrap();
        let done = answers.windows(12).filter(|bytes| bytes[..4] == [0x66, 0x8e, 0x33, 0xef] && bytes[5] == 1);
        assert_eq!(done.count(), 1000, "of kind {command}");
    }
}
