//! Encrypted volumes without a device mapper: what `cryptsetup` makes, read and written by a program.
//!
//! A request's way through here, from the outside in:
//! 1. [`luks`] reads a volume's header, [`luks2`] or [`luks1`], out of a [`store`]; or [`plain`] does without one.
//! 2. A passphrase becomes a key ([`kdf`]), the key opens a keyslot (`af`), and the keyslot gives the volume key, in
//!    memory that is kept out of swap and zeroed ([`secret`]).
//! 3. A [`Volume`] is that key in the [`cipher`], and where the data lies. It encrypts from one buffer to another and
//!    decrypts in place; the bytes are read and written elsewhere.
//!
//! Around it, [`commands`] are the program's subcommands; [`nbd`] is the protocol by which [`serve`] offers a volume to
//! clients, through pages of the allocator.
//!
//! Every length, offset, count and text in a header is taken for a lie until it is checked: reading one never panics, and
//! what it costs to open is looked at before it is spent. What is not done: integrity tags, re-encryption, ciphers other
//! than `aes-xts-plain64`, tokens.
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

use std::ops::Range;
use std::time::Duration;

pub use cipher::{SectorSize, Sectors, Xts};
pub use error::Error;
pub use hash::Hash;
pub use luks::Luks;
pub use store::Store;
pub use volume::{Geometry, Volume};

/// The one cipher that is done here, by the name that headers have for it.
pub const CIPHER: &str = "aes-xts-plain64";

/// How long the digest of a volume key takes, which is looked at for each keyslot that is tried.
const DIGEST_TIME: Duration = Duration::from_millis(125);

/// Writes, and returns when it is on the disk.
fn write_synced(store: &dyn Store, data: &[u8], at: u64, what: &str) -> Result<(), Error> {
    store.write_at(data, at).and_then(|()| store.sync()).map_err(|error| Error::io(format!("writing {what}"), error))
}

/// Overwrites key material with random bytes, and returns when they are on the disk.
///
/// A drive or a file system that writes elsewhere keeps the old bytes for a while; the splitter makes that harmless as
/// soon as it reuses any of them.
fn wipe(store: &dyn Store, area: Range<u64>, what: &str) -> Result<(), Error> {
    let mut noise = vec![0; (area.end - area.start) as usize];
    secret::random(&mut noise)?;
    write_synced(store, &noise, area.start, what)
}

fn no_free_slot(wanted: Option<u32>, slots: u32) -> Error {
    Error::Request(match wanted {
        Some(number) if number >= slots => {
            format!("there is no keyslot {number}: they are numbered 0 to {}", slots - 1)
        }
        Some(number) => format!("keyslot {number} is taken"),
        None => format!("all {slots} keyslots are taken: remove one first"),
    })
}
