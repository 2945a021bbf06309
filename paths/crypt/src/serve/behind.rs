//! What is under a volume: a file, or an export of another server.
use std::fs::File;
use std::io;

use super::far::Far;
use crate::Store;

/// A file or block device, or a far end.
#[derive(Debug)]
pub enum Behind {
    /// A file or block device.
    File(File),
    /// An export of another NBD server.
    Far(Far),
}

impl From<File> for Behind {
    fn from(file: File) -> Self {
        Self::File(file)
    }
}

impl From<Far> for Behind {
    fn from(far: Far) -> Self {
        Self::Far(far)
    }
}

impl Behind {
    fn store(&self) -> &dyn Store {
        match self {
            Self::File(file) => file,
            Self::Far(far) => far,
        }
    }
}

impl Store for Behind {
    fn size(&self) -> io::Result<u64> {
        self.store().size()
    }
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        self.store().read_at(buf, at)
    }
    fn write_at(&self, data: &[u8], at: u64) -> io::Result<()> {
        self.store().write_at(data, at)
    }
    fn sync(&self) -> io::Result<()> {
        self.store().sync()
    }
}
