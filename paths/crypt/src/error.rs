//! What can go wrong, and how to continue.
use std::io;
use std::path::Path;

use pagemill_command::said;

/// Why something about an encrypted volume did not work. [`Error::next_step`] says what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refused; `what` was being read, written or asked for.
    #[error("{what}: {}", said(source))]
    Io {
        /// What was being read, written or asked for.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// The caller's arguments are invalid.
    #[error("{0}")]
    Request(String),
    /// There is neither a LUKS1 nor a LUKS2 header.
    #[error("{}no LUKS header is there", before(file))]
    NoHeader {
        /// The file that was searched; empty if it has no name.
        file: String,
    },
    /// The file ends before the volume does, as after an incomplete copy. The header is intact.
    #[error("{}cut off at {has} bytes: it should have at least {needs}", before(file))]
    CutOff {
        /// The file; empty if it has no name.
        file: String,
        /// Its bytes.
        has: u64,
        /// The least bytes that it should have.
        needs: u64,
    },
    /// There is a header, and it is damaged or has impossible values.
    #[error("{0}")]
    Header(String),
    /// The header is intact, and needs something that this program does not support.
    #[error("{0}")]
    Unsupported(String),
    /// Deriving the key would cost more than the caller allows.
    #[error("{0}")]
    TooExpensive(String),
    /// Another program uses the file.
    #[error("{0}: another program is using it")]
    Busy(String),
    /// The block device is mounted, or another program or device has claimed it.
    #[error("{0} is in use: it is mounted, or another program or device has it")]
    Held(String),
    /// Something else has been written over a copy of the header.
    #[error("{0}")]
    Overwritten(String),
    /// The two copies of a header are intact, and belong to different volumes.
    #[error("{0}")]
    TwoVolumes(String),
    /// No passphrase opens the volume any more.
    #[error("the volume has no keyslot: no passphrase opens it")]
    NoKeyslots,
    /// No keyslot opens with this passphrase.
    #[error("no keyslot opens with this passphrase ({tried} tried{}{})", behind(not_tried), empty(*is_empty))]
    WrongPassphrase {
        /// Keyslots that were tried.
        tried: usize,
        /// Keyslots that can't be used here, each with the reason; empty if there are none.
        not_tried: String,
        /// Whether the passphrase is empty.
        is_empty: bool,
    },
    /// This keyslot is the last one.
    #[error("keyslot {0} is the last one: without it nobody can open the volume again")]
    LastKeyslot(u32),
    /// There is already something where a volume should be made.
    #[error("{0}")]
    Occupied(String),
    /// The system refused to mount a volume.
    #[error("mounting {at}: {}", said(source))]
    Mount {
        /// The mount point.
        at: String,
        /// What the system said.
        source: io::Error,
    },
    /// There is too little memory.
    #[error("{0}")]
    Memory(pagemill::Error),
}

impl Error {
    pub(crate) fn io(what: impl Into<String>, source: io::Error) -> Self {
        Self::Io { what: what.into(), source }
    }

    pub(crate) fn cut_off(has: u64, needs: u64) -> Self {
        Self::CutOff { file: String::new(), has, needs }
    }

    /// The same, with the name of the file, `path`, if the error is about the contents of a header or of data.
    pub(crate) fn in_file(self, path: &Path) -> Self {
        let path = path.display();
        match self {
            Self::NoHeader { file } if file.is_empty() => Self::NoHeader { file: path.to_string() },
            Self::CutOff { file, has, needs } if file.is_empty() => Self::CutOff { file: path.to_string(), has, needs },
            Self::Header(why) => Self::Header(format!("{path}: {why}")),
            Self::Overwritten(why) => Self::Overwritten(format!("{path}: {why}")),
            Self::TwoVolumes(why) => Self::TwoVolumes(format!("{path}: {why}")),
            error => error,
        }
    }

    /// The same, for the passphrase that was tried.
    pub(crate) fn of_passphrase(self, passphrase: &[u8]) -> Self {
        match self {
            Self::WrongPassphrase { tried, not_tried, .. } => {
                Self::WrongPassphrase { tried, not_tried, is_empty: passphrase.is_empty() }
            }
            error => error,
        }
    }

    /// What the user can do about it, in a few words.
    #[must_use]
    pub fn next_step(&self) -> Option<&'static str> {
        if let Self::Io { source, .. } = self {
            return after_io(source);
        }
        Some(match self {
            Self::Io { .. } | Self::Request(_) | Self::Memory(_) => return None,
            Self::NoHeader { .. } => {
                "if the header is in a file of its own, name that one with --header FILE; if the volume is still to be \
                 made, `pagemill crypt format` makes it"
            }
            Self::CutOff { .. } => "use a whole copy of the file: what is missing cannot be made up for",
            Self::Header(_) => {
                "restore the header from its backup (pagemill crypt header-restore); passphrases that were removed since \
                 then open it again"
            }
            Self::Unsupported(_) => "open it with cryptsetup",
            Self::TooExpensive(_) => "if you trust this header, allow more with --max-kdf-memory or --max-kdf-work",
            Self::Busy(_) => "wait until it is done, or end it",
            Self::Held(_) => "lsblk shows by what: unmount that, or close it",
            Self::Overwritten(_) => {
                "look at what it is (wipefs); if it is the volume that you want, restore the copy with: cryptsetup repair"
            }
            Self::TwoVolumes(_) => {
                "keep a copy of the file's first 16 MiB, find out whose data it is, then fill the first 4096 bytes of the \
                 other volume's copy with zeroes; do not open it with cryptsetup before that, which may write one copy \
                 over the other"
            }
            Self::WrongPassphrase { is_empty: true, .. } => {
                "type it, or name the key file or descriptor that has it: the one that was named is empty"
            }
            Self::WrongPassphrase { .. } => "try again; mind the keyboard layout, and a line feed at a key file's end",
            Self::NoKeyslots => "restore a backup of its header, or format it anew",
            Self::LastKeyslot(_) => "add another first, or say --last to lose the volume on purpose",
            Self::Occupied(_) => "name another file, or say --force to overwrite it",
            Self::Mount { .. } => {
                "it takes /dev/fuse (modprobe fuse), and root or the program fusermount3 (package fuse3)"
            }
        })
    }
}

fn after_io(error: &io::Error) -> Option<&'static str> {
    if let Some(libc::EMFILE | libc::ENFILE) = error.raw_os_error() {
        return Some("raise the limit: `ulimit -n` or LimitNOFILE=");
    }
    match error.kind() {
        io::ErrorKind::NotFound => Some("check the name"),
        io::ErrorKind::PermissionDenied => Some("ask its owner for the right, or name another"),
        io::ErrorKind::AddrInUse => Some("end who has it, or choose another address"),
        io::ErrorKind::AddrNotAvailable => Some("choose an address of this machine (`ip address` shows them)"),
        io::ErrorKind::ReadOnlyFilesystem => Some("mount it with the right to write, or name another place"),
        io::ErrorKind::IsADirectory => Some("name a file"),
        io::ErrorKind::FileTooLarge => Some("choose a smaller size, or a file system that has files of this one"),
        io::ErrorKind::StorageFull => Some("make room, or choose another place"),
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotConnected => {
            Some("start the server there, or check the address and the port")
        }
        io::ErrorKind::TimedOut | io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
            Some("check the address, and whether a firewall, a server that hangs or its only client is in the way")
        }
        _ => None,
    }
}

/// The file's name in front of a failure.
fn before(file: &str) -> String {
    if file.is_empty() { String::new() } else { format!("{file}: ") }
}

/// The text after a count.
fn behind(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("; not tried: {text}") }
}

fn empty(is_empty: bool) -> &'static str {
    if is_empty { "; the passphrase is empty" } else { "" }
}
