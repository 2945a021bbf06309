//! An open volume: the key in the cipher, and the place of the data in its file.
use crate::Error;
use crate::cipher::{SectorSize, Sectors, Xts};
use crate::secret::Locked;

/// Bytes in which offsets and tweaks are counted.
pub const UNIT: u64 = 512;

/// Where a volume's data lies in its file, and how its sectors are numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The first byte of data in the file.
    pub offset: u64,
    /// Bytes of data, a multiple of the sector size.
    pub len: u64,
    /// Bytes that are encrypted as one sector.
    pub sector_size: SectorSize,
    /// Added to each sector's number, in units of 512 bytes.
    pub first_unit: u64,
    /// Whether tweaks count sectors rather than units of 512 bytes (`cryptsetup`'s `--iv-large-sectors`; LUKS never).
    pub counts_sectors: bool,
}

impl Geometry {
    /// `len` bytes, or all bytes after `offset` of a file of `file_len` bytes; at least one sector.
    ///
    /// A last part of less than 512 bytes is left out, as by a loop device. If the rest is not a whole number of
    /// sectors, that is an error, as for `cryptsetup`.
    pub(crate) fn within(
        file_len: u64,
        offset: u64,
        len: Option<u64>,
        sector_size: SectorSize,
        first_unit: u64,
    ) -> Result<Self, Error> {
        let there = file_len.saturating_sub(offset);
        let sector = sector_size.bytes() as u64;
        let least = len.unwrap_or(sector);
        if least > there {
            return Err(Error::cut_off(file_len, offset.saturating_add(least)));
        }
        let len = len.unwrap_or(there / UNIT * UNIT);
        if len == 0 {
            return Err(Error::Header("the size of the data is given as 0 bytes".to_owned()));
        }
        if !len.is_multiple_of(sector) {
            let why = format!(
                "{len} bytes of data are not a whole number of {sector}-byte sectors: if the file was cut off, use a whole \
                 copy; otherwise lengthen it by {} bytes",
                sector - len % sector
            );
            return Err(Error::Request(why));
        }
        Ok(Self { offset, len, sector_size, first_unit, counts_sectors: false })
    }

    /// The sectors from byte `at` of the volume on.
    fn sectors(&self, at: u64, len: usize) -> Result<Sectors, Error> {
        let size = self.sector_size.bytes() as u64;
        let end = at.checked_add(len as u64);
        if !at.is_multiple_of(size) || end.is_none_or(|end| end > self.len) {
            let why = format!("{len} bytes at {at}: the volume has {} bytes in {size}-byte sectors", self.len);
            return Err(Error::Request(why));
        }
        let unit = (at / UNIT).wrapping_add(self.first_unit);
        let units = size / UNIT;
        let (first, step) = if self.counts_sectors { (unit / units, 1) } else { (unit, units) };
        Ok(Sectors { size: self.sector_size, first, step })
    }
}

/// A volume that is open. Its key is zeroed when it is dropped.
///
/// The methods encrypt and decrypt whole sectors; reading and writing the file is the caller's part, at
/// `geometry().offset` and behind.
#[derive(Debug)]
pub struct Volume {
    xts: Xts,
    geometry: Geometry,
}

impl Volume {
    /// With a key of 32 or 64 bytes.
    ///
    /// # Errors
    /// [`Error::Request`] for a key of any other length.
    pub fn new(key: &Locked, geometry: Geometry) -> Result<Self, Error> {
        Ok(Self { xts: Xts::new(key)?, geometry })
    }

    /// Where the data lies.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Encrypts the sectors at byte `at` of the volume from `plain` into `secret`.
    ///
    /// # Errors
    /// [`Error::Request`] for what is no whole number of sectors, and beyond the volume's end.
    pub fn encrypt(&self, at: u64, plain: &[u8], secret: &mut [u8]) -> Result<(), Error> {
        self.xts.encrypt(self.geometry.sectors(at, plain.len())?, plain, secret)
    }

    /// Encrypts the sectors at byte `at` of the volume where they stand.
    ///
    /// # Errors
    /// As for [`Volume::encrypt`].
    ///
    /// ```
    /// # use pagemill_crypt::{SectorSize, Volume, plain::Plain};
    /// let sector_size = SectorSize::SMALLEST;
    /// let plain = Plain { key_bytes: 64, hash: None, offset: 0, skip: 0, size: None, sector_size, counts_sectors: false };
    /// let volume = Volume::new(&plain.key(&[7; 64])?, plain.geometry(1 << 20)?)?;
    /// let mut data = vec![1; 1024];
    /// volume.encrypt_in_place(4096, &mut data)?;
    /// assert_ne!(data, [1; 1024]);
    /// volume.decrypt_in_place(4096, &mut data)?;
    /// assert_eq!(data, [1; 1024]);
    /// # Ok::<(), pagemill_crypt::Error>(())
    /// ```
    pub fn encrypt_in_place(&self, at: u64, data: &mut [u8]) -> Result<(), Error> {
        self.xts.encrypt_in_place(self.geometry.sectors(at, data.len())?, data)
    }

    /// Decrypts the sectors at byte `at` of the volume where they stand.
    ///
    /// # Errors
    /// As for [`Volume::encrypt`].
    pub fn decrypt_in_place(&self, at: u64, data: &mut [u8]) -> Result<(), Error> {
        self.xts.decrypt_in_place(self.geometry.sectors(at, data.len())?, data)
    }
}
