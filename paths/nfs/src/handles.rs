//! File handles: how a client names a file for as long as the file exists, whatever becomes of its name or of this process.
//!
//! A handle is the kernel's own (name_to_handle_at(2)) with a mark, which only this server can make: SipHash-2-4 of the
//! kernel's handle and the export, with a secret key. So a client cannot make up the handle of a file that it was never
//! shown, and the handle of one export opens nothing in another. The key is in a file that only its owner can read, so that
//! handles hold when the server is started again.
//!
//! ```text
//! byte 0      1..5          5..n              n..n+8
//! version 1   kind (LE)     kernel's handle   mark (LE)
//! ```
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nfs3_types::nfs3::NFS3_FHSIZE;
use rustix::io::Errno;
use siphasher::sip::SipHasher24;

use crate::error::Error;
use crate::syscalls::{KernelHandle, name_to_handle};

const VERSION: u8 = 1;
const HEAD: usize = 5;
const MARK: usize = 8;

/// The secret of the marks.
pub(crate) struct Key([u8; 16]);

impl Key {
    /// Reads the key, or makes one if there is no such file.
    pub(crate) fn from_file(path: &Path) -> Result<Self, Error> {
        let shown = path.display();
        let another = "name another file with --state FILE";
        let mut file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let what = format!("the key of file handles cannot be kept in {shown}");
                return Self::create(path).map_err(|error| Error::io(what, error, another));
            }
            Err(error) => return Err(Error::io(format!("the key of file handles, {shown}"), error, another)),
        };
        let mut key = [0; 16];
        let is_key = file.metadata().is_ok_and(|it| it.is_file() && it.mode() & 0o077 == 0 && it.len() == 16);
        if !is_key || file.read_exact(&mut key).is_err() {
            return Err(Error::new(
                format!("{shown} is not a key of file handles: 16 bytes that only their owner may read"),
                "name another file with --state FILE, or remove this one: clients then have to mount again",
            ));
        }
        Ok(Self(key))
    }

    /// The file appears under its name when it is complete, and the first of two that are made at once stays.
    fn create(path: &Path) -> io::Result<Self> {
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder)?;
        }
        let mut key = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut key)?;
        let unfinished = path.with_extension(format!("{}.new", std::process::id()));
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?;
        let made =
            file.write_all(&key).and_then(|()| file.sync_all()).and_then(|()| std::fs::hard_link(&unfinished, path));
        std::fs::remove_file(&unfinished)?;
        match made {
            Ok(()) => Ok(Self(key)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                File::open(path)?.read_exact(&mut key)?;
                Ok(Self(key))
            }
            Err(error) => Err(error),
        }
    }
}

/// A handle as a client has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Handle {
    bytes: [u8; NFS3_FHSIZE],
    len: usize,
}

impl AsRef<[u8]> for Handle {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The kernel's handle of an open file.
///
/// # Errors
/// `EOPNOTSUPP`: the file system has none. `EOVERFLOW`: it is too long for NFS.
pub(crate) fn kernel_handle(file: BorrowedFd<'_>) -> io::Result<KernelHandle> {
    let handle = name_to_handle(file)?;
    if HEAD + handle.bytes().len() + MARK > NFS3_FHSIZE { Err(Errno::OVERFLOW.into()) } else { Ok(handle) }
}

/// Makes and checks handles.
pub(crate) struct Handles {
    marks: SipHasher24,
    /// The export's own kernel handle: a mark is for one export.
    export: Vec<u8>,
}

impl Handles {
    /// For the export whose root has this handle.
    pub(crate) fn new(key: &Key, root: &KernelHandle) -> Self {
        Self { marks: SipHasher24::new_with_key(&key.0), export: root.bytes().to_vec() }
    }

    fn mark(&self, handle: &[u8]) -> [u8; MARK] {
        let mut marked = Vec::with_capacity(handle.len() + self.export.len());
        // The handle's length is part of it: no other pair runs together to the same bytes.
        marked.push(handle.len() as u8);
        marked.extend_from_slice(handle);
        marked.extend_from_slice(&self.export);
        self.marks.hash(&marked).to_le_bytes()
    }

    /// The handle of an open file.
    ///
    /// # Errors
    /// As [`kernel_handle`].
    pub(crate) fn handle(&self, file: BorrowedFd<'_>) -> io::Result<Handle> {
        let kernel = kernel_handle(file)?;
        let len = HEAD + kernel.bytes().len() + MARK;
        let mut bytes = [0; NFS3_FHSIZE];
        bytes[0] = VERSION;
        bytes[1..HEAD].copy_from_slice(&kernel.kind().to_le_bytes());
        bytes[HEAD..len - MARK].copy_from_slice(kernel.bytes());
        let mark = self.mark(&bytes[..len - MARK]);
        bytes[len - MARK..len].copy_from_slice(&mark);
        Ok(Handle { bytes, len })
    }

    /// The kernel's handle in a client's. None: this server did not make it for this export.
    pub(crate) fn check(&self, handle: &[u8]) -> Option<KernelHandle> {
        let (marked, mark) = handle.split_at_checked(handle.len().checked_sub(MARK)?)?;
        let (head, bytes) = marked.split_first_chunk::<HEAD>()?;
        if head[0] != VERSION || self.mark(marked) != mark {
            return None;
        }
        KernelHandle::new(i32::from_le_bytes([head[1], head[2], head[3], head[4]]), bytes)
    }
}
