//! Encrypted volumes without a device mapper: a program reads and writes the volumes that `cryptsetup` makes.
//!
//! A request's way through here, from the outside in:
//! 1. [`luks`] reads a volume's header, [`luks2`] or [`luks1`], from a [`store`]. A [`plain`] volume has no header.
//! 2. A passphrase becomes a key ([`kdf`]), the key opens a keyslot (`af`), and the keyslot gives the volume key, in
//!    memory that is kept out of swap and zeroed ([`secret`]).
//! 3. A [`Volume`] is that key in the [`cipher`], and the place of the data. It encrypts from one buffer to another and
//!    decrypts in place. Other modules read and write the bytes.
//!
//! From there on it is the data path, in [`serve`]: it moves a volume's bytes between clients and the disk, through
//! pages of the allocator. Clients come by [`nbd`]; programs that need a file come by [`mount`]. [`commands`] has the
//! program's subcommands.
//!
//! No length, offset, count or text in a header is trusted before it is checked: reading a header never panics, and the
//! cost of opening it is checked before it is spent. Not supported: integrity tags, re-encryption, ciphers other than
//! `aes-xts-plain64`, tokens. A volume that has them counts as intact: it is shown, and left to `cryptsetup`.
mod af;
pub mod backup;
mod bytes;
pub mod cipher;
pub mod commands;
mod error;
#[cfg(fuzzing)]
pub mod fuzzing;
mod hash;
pub mod kdf;
pub mod luks;
pub mod luks1;
pub mod luks2;
pub mod mount;
pub mod nbd;
pub mod plain;
pub mod secret;
pub mod serve;
pub mod store;
pub mod volume;

pub use cipher::{SectorSize, Sectors, Xts};
pub use error::Error;
pub use hash::Hash;
pub use luks::Luks;
pub use store::Store;
pub use volume::{Geometry, Volume};

/// The only supported cipher, by its name in headers.
pub const CIPHER: &str = "aes-xts-plain64";
