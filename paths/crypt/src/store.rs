//! Where headers are stored: a file, a block device or an export of another server, bytes in memory, or in tests a store
//! that loses what was not synced.
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes at positions, written in any order until `sync` puts them on the disk.
pub trait Store {
    /// Its length in bytes.
    ///
    /// # Errors
    /// What the system says.
    fn size(&self) -> io::Result<u64>;

    /// Fills `buf` from `at`.
    ///
    /// # Errors
    /// What the system says; `UnexpectedEof` if the store is too short.
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()>;

    /// Writes all of `data` at `at`.
    ///
    /// # Errors
    /// What the system says.
    fn write_at(&self, data: &[u8], at: u64) -> io::Result<()>;

    /// Returns when all written data is on the disk.
    ///
    /// # Errors
    /// What the system says.
    fn sync(&self) -> io::Result<()>;
}

impl Store for File {
    fn size(&self) -> io::Result<u64> {
        // The metadata of a block device has no length; its end has.
        let len = self.metadata()?.len();
        if len > 0 { Ok(len) } else { io::Seek::seek(&mut &*self, io::SeekFrom::End(0)) }
    }

    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        self.read_exact_at(buf, at)
    }

    fn write_at(&self, data: &[u8], at: u64) -> io::Result<()> {
        self.write_all_at(data, at)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }
}

/// Bytes in memory, which are only read.
///
/// ```
/// use pagemill_crypt::{Error, Luks};
/// assert!(matches!(Luks::read(&[0; 4096].as_slice()), Err(Error::NoHeader { .. })));
/// ```
impl Store for &[u8] {
    fn size(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        let from = usize::try_from(at).ok().and_then(|at| self.get(at..)).and_then(|rest| rest.get(..buf.len()));
        buf.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}
