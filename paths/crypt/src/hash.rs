//! The hashes that headers name, and PBKDF2 over them.
use sha2::Digest;

use crate::Error;

/// A hash that a LUKS header may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hash {
    /// SHA-1, in LUKS1 volumes of old.
    Sha1,
    /// SHA-256, the default of both formats.
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
}

/// Evaluates `$then` with the type of the hash.
macro_rules! with {
    ($hash:expr, $D:ident => $then:expr) => {
        match $hash {
            Hash::Sha1 => {
                type $D = sha1::Sha1;
                $then
            }
            Hash::Sha256 => {
                type $D = sha2::Sha256;
                $then
            }
            Hash::Sha384 => {
                type $D = sha2::Sha384;
                $then
            }
            Hash::Sha512 => {
                type $D = sha2::Sha512;
                $then
            }
        }
    };
}

impl Hash {
    const ALL: [Self; 4] = [Self::Sha1, Self::Sha256, Self::Sha384, Self::Sha512];

    /// By the name that headers and `cryptsetup` use.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for any other name.
    pub fn named(name: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|hash| hash.name() == name);
        found.ok_or_else(|| Error::Unsupported(format!("the hash {name:?} is none of sha1, sha256, sha384, sha512")))
    }

    /// Its name in headers.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha1 => "sha1",
            Self::Sha256 => "sha256",
            Self::Sha384 => "sha384",
            Self::Sha512 => "sha512",
        }
    }

    /// Bytes of a digest.
    #[must_use]
    pub fn digest_len(self) -> usize {
        with!(self, D => <D as Digest>::output_size())
    }

    /// Writes the digest of `parts`, one after the other, to the beginning of `out`; as much of it as fits.
    pub(crate) fn digest_into(self, parts: &[&[u8]], out: &mut [u8]) {
        with!(self, D => {
            let mut state = D::new();
            for part in parts {
                state.update(part);
            }
            let mut digest = state.finalize();
            let n = out.len().min(digest.len());
            out[..n].copy_from_slice(&digest[..n]);
            zeroize::Zeroize::zeroize(digest.as_mut_slice());
        });
    }

    /// PBKDF2 with HMAC of this hash (RFC 8018).
    pub(crate) fn pbkdf2(self, passphrase: &[u8], salt: &[u8], iterations: u32, out: &mut [u8]) {
        with!(self, D => pbkdf2::pbkdf2_hmac::<D>(passphrase, salt, iterations, out));
    }
}
