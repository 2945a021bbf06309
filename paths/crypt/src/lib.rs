//! Encrypted volumes without a device mapper: what `cryptsetup` makes, read and written by a program.
//!
//! A request's way through here, from the outside in:
//! 1. [`luks`] reads a volume's header, [`luks2`] or [`luks1`], out of a [`store`]; or [`plain`] does without one.
//! 2. A passphrase becomes a key ([`kdf`]), the key opens a keyslot (`af`), and the keyslot gives the volume key, in
//!    memory that is kept out of swap and zeroed ([`secret`]).
//! 3. A [`Volume`] is that key in the [`cipher`], and where the data lies. It encrypts from one buffer to another and
//!    decrypts in place; the bytes are read and written elsewhere.
//!
//! From there on it is the data path, in [`serve`]: a volume's bytes between whoever asks and the disk, through pages of the
//! allocator. Clients ask by [`nbd`]; programs that want a file, by [`mount`]. Around it all, [`commands`] are the program's
//! subcommands.
//!
//! Every length, offset, count and text in a header is taken for a lie until it is checked: reading one never panics, and
//! what it costs to open is looked at before it is spent. What is not done: integrity tags, re-encryption, ciphers other
//! than `aes-xts-plain64`, tokens. A volume that has them is whole: it is shown, and left to `cryptsetup`.
mod af;
mod bytes;
pub mod cipher;
pub mod commands;
mod error;
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

/// The one cipher that is done here, by the name that headers have for it.
pub const CIPHER: &str = "aes-xts-plain64";
