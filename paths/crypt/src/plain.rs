//! Plain mappings, which have no header. As in `cryptsetup open --type plain`, the key is a hash of the passphrase, or
//! the first bytes of a key file. The user has to know all other parameters.
use crate::Error;
use crate::cipher::SectorSize;
use crate::hash::Hash;
use crate::secret::Locked;
use crate::volume::{Geometry, UNIT};

/// The parameters of a plain mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plain {
    /// Bytes of the key: 32 or 64.
    pub key_bytes: usize,
    /// The hash of the passphrase; `None` if a key file has the key itself.
    pub hash: Option<Hash>,
    /// Where the data begins, in 512-byte units.
    pub offset: u64,
    /// The number of the first unit.
    pub skip: u64,
    /// How many units; `None` for all.
    pub size: Option<u64>,
    /// Bytes a sector.
    pub sector_size: SectorSize,
    /// Whether tweaks count sectors rather than units of 512 bytes.
    pub counts_sectors: bool,
}

impl Plain {
    /// The key from a passphrase or from a key file's bytes.
    ///
    /// # Errors
    /// [`Error::Request`] for a key file that is too short.
    pub fn key(&self, secret: &[u8]) -> Result<Locked, Error> {
        let mut key = Locked::zeroed(self.key_bytes);
        match self.hash {
            // A key that is longer than a digest goes on with the digest of "A" and the passphrase, then of "AA" and
            // the passphrase, and so on.
            Some(hash) => {
                for (round, part) in key.chunks_mut(hash.digest_len()).enumerate() {
                    hash.digest_into(&[&vec![b'A'; round], secret], part);
                }
            }
            None => match secret.get(..self.key_bytes) {
                Some(bytes) => key.copy_from_slice(bytes),
                None => {
                    let (has, needs) = (secret.len(), self.key_bytes);
                    return Err(Error::Request(format!("the key file has {has} bytes; a key takes {needs}")));
                }
            },
        }
        Ok(key)
    }

    /// Where the data lies in a file of `data_len` bytes.
    ///
    /// # Errors
    /// [`Error::Request`] where it does not fit.
    pub fn geometry(&self, data_len: u64) -> Result<Geometry, Error> {
        let bytes = |units: u64| {
            let too_far = || Error::Request(format!("{units} units of {UNIT} bytes are beyond any file"));
            units.checked_mul(UNIT).ok_or_else(too_far)
        };
        let len = self.size.map(bytes).transpose()?;
        let found = Geometry::within(data_len, bytes(self.offset)?, len, self.sector_size, self.skip);
        let found = found.map_err(|error| match error {
            // The caller chose where the volume begins and ends, so the request is wrong, not the file.
            Error::CutOff { has, needs, .. } => Error::Request(format!(
                "the file is cut off at {has} bytes, and a plain volume that begins and ends there needs {needs} or more: \
                 check its offset and its size, or use a whole copy of the file"
            )),
            Error::Header(why) => Error::Request(why),
            error => error,
        })?;
        let units = self.sector_size.bytes() as u64 / UNIT;
        if self.counts_sectors && !self.skip.is_multiple_of(units) {
            return Err(Error::Request(format!("to skip {} units is no whole number of sectors", self.skip)));
        }
        Ok(Geometry { counts_sectors: self.counts_sectors, ..found })
    }
}
