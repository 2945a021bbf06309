//! Backups of headers: a header and its keyslots in a file, as by `cryptsetup luksHeaderBackup`: the first bytes of the
//! volume as they are, up to the end of the keyslots.
//!
//! A backup opens the volume with the passphrases that it had then, also with those that were removed since.
use crate::luks::Luks;
use crate::store::Store;
use crate::{Error, luks1};

/// More bytes than any header with its keyslots has: two copies of 4 MiB, and an area of 128 MiB.
pub(crate) const MOST: u64 = 136 << 20;

/// A header and its keyslots.
///
/// ```
/// use pagemill_crypt::backup::Backup;
/// use pagemill_crypt::kdf::{KdfChoice, KdfKind};
/// use pagemill_crypt::luks::New;
/// use pagemill_crypt::{Hash, Luks, SectorSize};
///
/// let volume = tempfile::tempfile()?;
/// volume.set_len(4 << 20)?;
/// let new = New {
///     version: 1,
///     key_bytes: 64,
///     sector_size: SectorSize::SMALLEST,
///     hash: Hash::Sha256,
///     kdf: KdfChoice { iterations: Some(1000), ..KdfChoice::new(KdfKind::Pbkdf2) },
///     label: String::new(),
///     detached: None,
/// };
/// let mut header = Luks::format(&volume, &new, b"secret")?;
/// let backup = Backup::take(header.clone(), &volume)?;
/// header.erase(&volume)?;
/// Backup::read(backup.bytes().to_vec())?.restore(&volume, Some(&header))?;
/// assert_eq!(Luks::read(&volume)?.openers(), [0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Backup {
    header: Luks,
    bytes: Vec<u8>,
}

impl Backup {
    /// Of `header`, which was read from `store`.
    ///
    /// # Errors
    /// [`Error::CutOff`] if the file ends before the keyslots do, [`Error::Io`]; [`Error::Request`] if `store` has
    /// another header meanwhile; [`Error::Header`],
    /// [`Error::Overwritten`] and [`Error::TwoVolumes`] for a header that is not worth a backup.
    pub fn take(header: Luks, store: &dyn Store) -> Result<Self, Error> {
        header.check_not_written_over()?;
        let (len, has) = (header.backup_len()?, store.size().map_err(|error| Error::io("the header's file", error))?);
        if len > MOST {
            return Err(Error::Header(format!("its keyslots end at {len}, and no header has more than {MOST} bytes")));
        }
        if has < len {
            return Err(Error::cut_off(has, len));
        }
        let mut bytes = vec![0; len as usize];
        store.read_at(&mut bytes, 0).map_err(|error| Error::io("reading the header", error))?;
        // Nothing locks an export of another server. A keyslot that is replaced is wiped after the header names its heir.
        if !Luks::read(store)?.is_same(&header) {
            return Err(Error::Request("another program has changed the header meanwhile: try again".to_owned()));
        }
        if let Luks::V1(header) = &header {
            // As by `cryptsetup`: what lay there before the volume was made is left out.
            bytes[luks1::HEADER..header.first_area()].fill(0);
        }
        Ok(Self { header, bytes })
    }

    /// Reads a backup, and checks it from end to end. More bytes than it needs do not matter.
    ///
    /// # Errors
    /// As for [`Luks::read`] and [`Luks::check_changeable`]; [`Error::CutOff`].
    pub fn read(mut bytes: Vec<u8>) -> Result<Self, Error> {
        let header = Luks::read(&bytes.as_slice())?;
        header.check_changeable()?;
        let len = header.backup_len()?;
        if (bytes.len() as u64) < len {
            return Err(Error::cut_off(bytes.len() as u64, len));
        }
        bytes.truncate(len as usize);
        Ok(Self { header, bytes })
    }

    /// Its header.
    #[must_use]
    pub fn header(&self) -> &Luks {
        &self.header
    }

    /// The bytes of its file.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Writes it to `store`, in the place of the header `present` that was read there, if there was one. The caller has
    /// checked that its volume is there.
    ///
    /// LUKS2: as long as the layout is the same, `present` or the backup opens, wherever it is stopped. If places of
    /// keyslots are taken by others, the restored keyslots get new places. LUKS1: a keyslot that is the same in both
    /// opens at every moment. Others may not open until the backup is restored once more.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Request`] if there is no room for both.
    pub fn restore(&self, store: &dyn Store, present: Option<&Luks>) -> Result<(), Error> {
        self.header.put_back(store, &self.bytes, present)
    }
}
