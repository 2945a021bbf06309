//! Where a passphrase comes from: the terminal, a file, or a descriptor. It goes straight into locked memory.
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, FromRawFd, RawFd};
use std::path::{Path, PathBuf};

use clap::Args;
use pagemill_command::size;
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr};

use super::shown;
use crate::Error;
use crate::secret::Locked;

/// The longest key file, as in `cryptsetup`.
const MAX: u64 = 8 << 20;
/// The longest passphrase that can be typed.
const MAX_TYPED: usize = 512;

/// Where the passphrase comes from.
#[derive(Args, Clone, Debug, Default)]
pub(super) struct SecretArgs {
    /// Read the passphrase from FILE: all bytes, a line feed at its end too
    ///
    /// - is standard input. At most 8 MiB.
    #[arg(long, value_name = "FILE", conflicts_with = "passphrase_fd", verbatim_doc_comment)]
    key_file: Option<PathBuf>,

    /// Skip so many bytes of the key file
    #[arg(long, value_name = "N", requires = "key_file", conflicts_with = "passphrase_fd", value_parser = size)]
    keyfile_offset: Option<u64>,

    /// Read so many bytes of the key file, and no more [default: all]
    #[arg(long, value_name = "N", requires = "key_file", conflicts_with = "passphrase_fd", value_parser = key_len)]
    keyfile_size: Option<u64>,

    /// Read the passphrase, a line, from this descriptor (0: standard input)
    #[arg(long, value_name = "FD")]
    pub(super) passphrase_fd: Option<RawFd>,

    /// Whether it is a second passphrase, with options of its own.
    #[arg(skip)]
    is_second: bool,
}

/// Where a new keyslot's passphrase comes from.
#[derive(Args, Clone, Debug, Default)]
pub(super) struct NewSecretArgs {
    /// The new one: all bytes of this file; - is standard input
    #[arg(long, value_name = "FILE", conflicts_with = "new_passphrase_fd")]
    new_key_file: Option<PathBuf>,

    /// Skip so many bytes of the new key file
    #[arg(long, value_name = "N", requires = "new_key_file", conflicts_with = "new_passphrase_fd", value_parser = size)]
    new_keyfile_offset: Option<u64>,

    /// Read so many bytes of the new key file, and no more [default: all]
    #[arg(long, value_name = "N", requires = "new_key_file", conflicts_with = "new_passphrase_fd", value_parser = key_len)]
    new_keyfile_size: Option<u64>,

    /// The new one: the first line from this descriptor
    #[arg(long, value_name = "FD")]
    new_passphrase_fd: Option<RawFd>,
}

impl From<NewSecretArgs> for SecretArgs {
    fn from(new: NewSecretArgs) -> Self {
        Self {
            key_file: new.new_key_file,
            keyfile_offset: new.new_keyfile_offset,
            keyfile_size: new.new_keyfile_size,
            passphrase_fd: new.new_passphrase_fd,
            is_second: true,
        }
    }
}

fn key_len(text: &str) -> Result<u64, String> {
    match size(text)? {
        bytes @ 1..=MAX => Ok(bytes),
        _ => Err(format!("a key has 1 byte to {} MiB", MAX >> 20)),
    }
}

impl SecretArgs {
    /// All bytes of a file.
    pub(super) fn of_key_file(path: &Path) -> Self {
        Self { key_file: Some(path.to_owned()), ..Self::default() }
    }

    /// Whether a file has the key, as it is. Standard input has a passphrase, as for `cryptsetup`.
    pub(super) fn has_key(&self) -> bool {
        self.key_file.as_ref().is_some_and(|path| path.as_os_str() != "-")
    }

    /// The passphrase that opens `what`.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Request`] if there is no terminal, or the file is too long.
    pub(super) fn get(&self, what: &str) -> Result<Locked, Error> {
        self.given().unwrap_or_else(|| self.typed(&format!("Passphrase for {what}: ")))
    }

    /// A new passphrase; on a terminal it is typed twice.
    ///
    /// # Errors
    /// As for [`SecretArgs::get`]; [`Error::Request`] for an empty passphrase, and if the two differ.
    pub(super) fn get_new(&self, what: &str) -> Result<Locked, Error> {
        let secret = match self.given() {
            Some(secret) => secret?,
            None => {
                let first = self.typed(&format!("New passphrase for {what}: "))?;
                let again = self.typed("The same again: ")?;
                if first[..] != again[..] {
                    return Err(Error::Request("the two passphrases differ: nothing was changed".to_owned()));
                }
                first
            }
        };
        if secret.is_empty() {
            let why = match &self.key_file {
                Some(path) if path.as_os_str() == "-" => {
                    "standard input has no bytes for the new key: if the old one is read from there too, say how long it \
                     is with --keyfile-size"
                        .to_owned()
                }
                Some(path) => format!(
                    "the key file {0} is empty: put a key into it first, as this does: head -c 32 /dev/urandom > {0}",
                    shown(path)
                ),
                None => "the new passphrase is empty: give one of a character or more".to_owned(),
            };
            return Err(Error::Request(why));
        }
        Ok(secret)
    }

    fn typed(&self, prompt: &str) -> Result<Locked, Error> {
        let mut terminal = File::options().read(true).write(true).open("/dev/tty").map_err(|_| {
            let (which, new) = if self.is_second { ("new passphrase", "new-") } else { ("passphrase", "") };
            Error::Request(format!(
                "there is no terminal to ask for the {which}: say --{new}key-file or --{new}passphrase-fd"
            ))
        })?;
        read_typed(&mut terminal, prompt).map_err(|error| Error::io("the passphrase", error))
    }

    fn of_file(&self, path: &Path) -> Result<Locked, Error> {
        let (what, read) = match path.as_os_str() == "-" {
            true => ("standard input".to_owned(), descriptor(0).and_then(|mut file| self.part_of(&mut file))),
            false => {
                (format!("the key file {}", shown(path)), File::open(path).and_then(|mut file| self.part_of(&mut file)))
            }
        };
        read.map_err(|error| Error::io(what, error))
    }

    /// The bytes of a key file that the options name.
    fn part_of(&self, file: &mut File) -> io::Result<Locked> {
        let new = if self.is_second { "new-" } else { "" };
        if let Some(offset) = self.keyfile_offset {
            skip(file, offset)?;
        }
        let secret = match self.keyfile_size {
            Some(size) => read_until(&mut file.take(size), None)?,
            None => read_until(file, None)?,
        };
        match (self.keyfile_offset, self.keyfile_size) {
            (Some(offset), _) if secret.is_empty() => Err(io::Error::other(format!(
                "it ends at byte {offset} or before, and the key should begin there: check --{new}keyfile-offset"
            ))),
            (_, Some(size)) if (secret.len() as u64) < size => Err(io::Error::other(format!(
                "it has {} bytes there, and {size} should be read: check --{new}keyfile-size and --{new}keyfile-offset",
                secret.len()
            ))),
            _ => Ok(secret),
        }
    }

    fn given(&self) -> Option<Result<Locked, Error>> {
        match (&self.key_file, self.passphrase_fd) {
            (Some(path), _) => Some(self.of_file(path)),
            (None, Some(fd)) => Some(of_descriptor(fd)),
            (None, None) => None,
        }
    }
}

fn of_descriptor(fd: RawFd) -> Result<Locked, Error> {
    let read = descriptor(fd).and_then(|mut file| read_until(&mut *file, Some(b'\n')));
    read.map_err(|error| Error::io(format!("descriptor {fd}"), error))
}

fn descriptor(fd: RawFd) -> io::Result<ManuallyDrop<File>> {
    // SAFETY: asks whether the number is a descriptor; any number may be asked about.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return Err(io::Error::other("it is not open: open it for this command, as the shell does with 3<FILE"));
    }
    // SAFETY: it is open, and `ManuallyDrop` leaves it open: the user's descriptor is not ours to close.
    Ok(ManuallyDrop::new(unsafe { File::from_raw_fd(fd) }))
}

/// Goes on by `count` bytes. If there are fewer, nothing is left to read.
fn skip(file: &mut File, mut count: u64) -> io::Result<()> {
    // A length is a signed number.
    match file.seek(SeekFrom::Current(count.min(i64::MAX as u64) as i64)) {
        // A pipe is read.
        Err(error) if error.raw_os_error() == Some(libc::ESPIPE) => {}
        // Farther than a file can be long.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => return file.seek(SeekFrom::End(0)).map(drop),
        sought => return sought.map(drop),
    }
    let mut skipped = Locked::zeroed(4096);
    while count > 0 {
        let most = count.min(skipped.len() as u64) as usize;
        match file.read(&mut skipped[..most]) {
            Ok(0) => break,
            Ok(n) => count -= n as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// All bytes up to `end`, which is read and left out, or to the end of the file. With `end` it reads byte by byte, so
/// that the following bytes stay for the next reader.
fn read_until(from: &mut impl Read, end: Option<u8>) -> io::Result<Locked> {
    const TOO_LONG: usize = MAX as usize + 1;
    let (mut secret, mut len) = (Locked::zeroed(4096), 0);
    loop {
        if len == TOO_LONG {
            let why = format!("more than {} MiB: name a shorter file, or a part of it with --keyfile-size", MAX >> 20);
            return Err(io::Error::other(why));
        }
        if len == secret.len() {
            let mut longer = Locked::zeroed((2 * len).min(TOO_LONG));
            longer[..len].copy_from_slice(&secret);
            secret = longer;
        }
        let stop = if end.is_some() { len + 1 } else { secret.len() };
        match from.read(&mut secret[len..stop]) {
            Ok(0) => break,
            Ok(_) if end.is_some_and(|end| secret[len] == end) => break,
            Ok(n) => len += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Locked::copy_of(&secret[..len]))
}

/// Restores the terminal's settings when it is dropped.
struct Quiet<'a>(&'a File, Termios);

impl Drop for Quiet<'_> {
    fn drop(&mut self) {
        // This fails only if the terminal is gone.
        let _ = tcsetattr(self.0.as_fd(), OptionalActions::Flush, &self.1);
    }
}

/// Reads a line without echo. Keys are read one by one, Ctrl-C among them, so that no signal ends the program while
/// echo is off.
fn read_typed(terminal: &mut File, prompt: &str) -> io::Result<Locked> {
    const ENTER: [u8; 2] = [b'\r', b'\n'];
    const ERASE: [u8; 2] = [0x7f, 0x08];
    const CTRL_C: u8 = 3;
    const CTRL_D: u8 = 4;
    const CTRL_U: u8 = 21;
    terminal.write_all(prompt.as_bytes())?;
    let reader = terminal.try_clone()?;
    let before = tcgetattr(reader.as_fd())?;
    let mut quiet = before.clone();
    quiet.local_modes -= LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG;
    quiet.special_codes[SpecialCodeIndex::VMIN] = 1;
    quiet.special_codes[SpecialCodeIndex::VTIME] = 0;
    tcsetattr(reader.as_fd(), OptionalActions::Flush, &quiet)?;
    let mut quiet = Quiet(&reader, before);
    let (mut secret, mut len) = (Locked::zeroed(MAX_TYPED), 0);
    let ended = loop {
        let mut key = Locked::zeroed(1);
        match quiet.0.read(&mut key) {
            Ok(0) => break Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) if ENTER.contains(&key[0]) || (key[0] == CTRL_D && len > 0) => break Ok(()),
            Ok(_) if key[0] == CTRL_C || key[0] == CTRL_D => break Err(io::Error::other("interrupted")),
            Ok(_) if key[0] == CTRL_U => len = 0,
            // A character of several bytes is removed as a whole.
            Ok(_) if ERASE.contains(&key[0]) => {
                let is_inside = |byte: u8| byte & 0xc0 == 0x80;
                while len > 0 && is_inside(secret[len - 1]) {
                    len -= 1;
                }
                len = len.saturating_sub(1);
            }
            Ok(_) if len == MAX_TYPED => break Err(io::Error::other(format!("longer than {MAX_TYPED} bytes"))),
            Ok(_) => {
                secret[len] = key[0];
                len += 1;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => break Err(error),
        }
    };
    drop(quiet);
    terminal.write_all(b"\n")?;
    ended.map(|()| Locked::copy_of(&secret[..len]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_files_are_read_whole_and_lines_without_their_end() {
        let read = |bytes: &[u8], end| read_until(&mut &*bytes, end).unwrap().to_vec();
        assert_eq!(read(b"key\n", None), b"key\n");
        assert_eq!(read(b"pass\nnext\n", Some(b'\n')), b"pass");
        assert_eq!(read(b"pass", Some(b'\n')), b"pass");
        let long = vec![7; 3 * 4096 + 1];
        assert_eq!(read(&long, None), long);
        assert!(read_until(&mut io::repeat(1), None).is_err());
    }

    #[test]
    fn a_typed_passphrase_is_not_echoed() {
        use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
        let pty = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&pty).unwrap();
        unlockpt(&pty).unwrap();
        let name = ptsname(&pty, Vec::new()).unwrap();
        let mut user = File::from(pty);
        for (keys, expected) in [
            ("secret\r", Some("secret")),
            ("secx\u{7f}ret\n", Some("secret")),
            ("wrong\u{15}caf\u{e9}\u{7f}e\r", Some("cafe")),
            ("half\u{3}", None),
        ] {
            let mut terminal = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
            let before = tcgetattr(terminal.as_fd()).unwrap().local_modes;
            let (begun, started) = std::sync::mpsc::channel();
            let asked = std::thread::spawn(move || {
                begun.send(()).unwrap();
                let read = read_typed(&mut terminal, "? ");
                (read, tcgetattr(terminal.as_fd()).unwrap().local_modes)
            });
            started.recv().unwrap();
            // Changing the settings discards earlier keys, so the keys are sent once echo is off.
            while tcgetattr(user.as_fd()).unwrap().local_modes.contains(LocalModes::ECHO) {
                std::thread::yield_now();
            }
            user.write_all(keys.as_bytes()).unwrap();
            let (read, after) = asked.join().unwrap();
            assert_eq!(read.ok().map(|secret| secret.to_vec()), expected.map(|text| text.as_bytes().to_vec()));
            assert_eq!(after, before);
            // All of it was written before the thread ended, but one read may return only a part.
            let mut shown = Vec::new();
            while !shown.ends_with(b"\n") {
                let mut part = [0; 100];
                let n = user.read(&mut part).unwrap();
                shown.extend(&part[..n]);
            }
            assert_eq!(String::from_utf8_lossy(&shown), "? \r\n", "only the prompt and the end of its line");
        }
    }
}
