//! Fixtures for unit tests of the server: a volume, and messages of clients.
use std::sync::Arc;

use pagemill::Allocator;

use super::{DataPath, Disk, Memory};
use crate::nbd::{Config, Export, Tls};
use crate::secret::Locked;
use crate::{Geometry, SectorSize, Volume};

pub(super) const LEN: u64 = 1 << 20;

/// A volume of [`LEN`] bytes in an empty sparse file, with so many pages of memory.
pub(super) fn path(pages: usize, promised: usize) -> DataPath {
    let data = tempfile::tempfile().unwrap();
    data.set_len(LEN).unwrap();
    let geometry =
        Geometry { offset: 0, len: LEN, sector_size: SectorSize::SMALLEST, first_unit: 0, counts_sectors: false };
    let volume = Volume::new(&Locked::copy_of(&[7; 64]), geometry).unwrap();
    let allocator = Allocator::builder().pages(pages).build().unwrap();
    DataPath {
        volume,
        disk: Disk::new(data, 0, 512, true),
        memory: Memory::new(&allocator, promised, 1 << 20).unwrap(),
    }
}

pub(super) fn config() -> Arc<Config> {
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

pub(super) fn option(number: u32, data: &[u8]) -> Vec<u8> {
    [b"IHAVEOPT", &number.to_be_bytes()[..], &(data.len() as u32).to_be_bytes(), data].concat()
}

/// The flags, and choosing the only export; replies are simple ones.
pub(super) fn negotiation() -> Vec<u8> {
    [&3u32.to_be_bytes()[..], &option(7, &[0; 6])].concat()
}
/// Bytes of the server's answers to that.
pub(super) const NEGOTIATED: usize = 18 + (20 + 12) + 20;

/// A request for the volume's first bytes.
pub(super) fn request(command: u16, len: u32) -> Vec<u8> {
    let magic = 0x2560_9513u32.to_be_bytes();
    [&magic[..], &[0; 2], &command.to_be_bytes(), &[7; 8], &[0; 8], &len.to_be_bytes()].concat()
}
pub(super) const READ: u16 = 0;
pub(super) const WRITE: u16 = 1;
