//! The file to be formatted: an existing file, or a new one.
//!
//! A new file appears under its name only once its header is complete, so if the program ends before that, even by
//! SIGKILL, nothing of that name is left (I1). If the file system allows, the file has no name until then. Otherwise it
//! has a temporary name in the same folder, which is removed when the program fails or gets SIGTERM or SIGINT. If
//! somebody else has taken the name meanwhile, their file stays (I2).
use std::ffi::{CString, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use signal_hook::SigId;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::low_level::{emulate_default_handler, register, unregister};

use super::hold::{Claim, MetadataLock, open_claimed};
use super::{folder, need_folder, refuse_uri, shown};
use crate::{Error, Store};

pub(super) struct Target<'a> {
    pub(super) path: &'a Path,
    pub(super) file: File,
    state: State,
    /// Nobody else uses the data meanwhile, or reads the header.
    _locks: (Claim, MetadataLock),
}

enum State {
    /// It existed before, or is complete.
    Kept,
    /// It is new, and has no name.
    Nameless,
    /// It is new, and has a temporary name.
    Beside(Beside),
    /// It is new, and has its name.
    Named,
}

impl<'a> Target<'a> {
    pub(super) fn open(path: &'a Path, size: Option<u64>) -> Result<Self, Error> {
        refuse_uri(path)?;
        if let (false, Ok(link)) = (path.exists(), fs::read_link(path)) {
            let (path, link) = (shown(path), shown(&link));
            let why = format!(
                "{path} is a symbolic link to {link}, which does not exist: name the file itself, or remove the link"
            );
            return Err(Error::Request(why));
        }
        if path.exists() {
            let (file, claim) = open_claimed(path, true)?;
            let lock = MetadataLock::take(&file, path, true)?;
            let there = Self { path, file, state: State::Kept, _locks: (claim, lock) };
            return match size {
                Some(size) if there.len()? != size => {
                    let why = format!("{} has {} bytes already: leave --size out", shown(path), there.len()?);
                    Err(Error::Request(why))
                }
                _ => Ok(there),
            };
        }
        let Some(size) = size else {
            return Err(Error::Request(format!("{} is not there: say --size to make it", shown(path))));
        };
        Self::create(path, size)
    }

    /// A new file, whatever has its name meanwhile.
    pub(super) fn create(path: &'a Path, size: u64) -> Result<Self, Error> {
        need_folder(path)?;
        Self::make(path, size, nameless(path).or_else(|error| without_tmpfile(error, path)))
    }

    fn make(path: &'a Path, size: u64, made: io::Result<(File, State)>) -> Result<Self, Error> {
        let (file, state) = made.map_err(|error| Error::io(shown(path), error))?;
        let claim = Claim::of_file(&file, path, true)?;
        let lock = MetadataLock::take(&file, path, true)?;
        let made = Self { path, file, state, _locks: (claim, lock) };
        made.file
            .set_len(size)
            .map_err(|error| Error::io(format!("making {} {size} bytes long", shown(path)), error))?;
        Ok(made)
    }

    pub(super) fn len(&self) -> Result<u64, Error> {
        self.file.size().map_err(|error| Error::io(shown(self.path), error))
    }

    /// Gives a new file its name, and returns when the name is on the disk.
    pub(super) fn publish(&mut self) -> Result<(), Error> {
        let named = match &self.state {
            State::Kept | State::Named => return Ok(()),
            State::Nameless => {
                let nameless = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                rustix::fs::linkat(CWD, nameless, CWD, self.path, AtFlags::SYMLINK_FOLLOW)
            }
            State::Beside(beside) => beside.rename(self.path),
        };
        match named {
            Ok(()) => self.state = State::Named,
            Err(Errno::EXIST) => {
                return Err(Error::Occupied(format!("{} has come into being meanwhile", shown(self.path))));
            }
            Err(error) => return Err(Error::io(format!("naming {}", shown(self.path)), error.into())),
        }
        match File::open(folder(self.path)).and_then(|folder| folder.sync_all()) {
            // Some file systems do not sync folders.
            Err(error) if error.kind() != io::ErrorKind::InvalidInput => {
                Err(Error::io(format!("syncing the folder of {}", shown(self.path)), error))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn keep(mut self) {
        self.state = State::Kept;
    }
}

impl Drop for Target<'_> {
    fn drop(&mut self) {
        if let State::Named = self.state {
            // The error that led here is reported.
            let _ = fs::remove_file(self.path);
        }
    }
}

const READ_WRITE: OFlags = OFlags::RDWR.union(OFlags::CLOEXEC);
const OURS: Mode = Mode::RUSR.union(Mode::WUSR);

fn nameless(path: &Path) -> io::Result<(File, State)> {
    Ok((rustix::fs::open(folder(path), READ_WRITE | OFlags::TMPFILE, OURS)?.into(), State::Nameless))
}

/// What to do if the file system refuses a nameless file.
fn without_tmpfile(error: io::Error, path: &Path) -> io::Result<(File, State)> {
    match error.raw_os_error() {
        // Both errors come from file systems that can't.
        Some(libc::EOPNOTSUPP | libc::EISDIR) => Beside::make(path),
        _ => Err(error),
    }
}

/// A file's temporary name. It is removed when this is dropped, and by a signal that ends the program.
struct Beside {
    path: PathBuf,
    signals: Vec<SigId>,
}

impl Beside {
    fn make(path: &Path) -> io::Result<(File, State)> {
        let own = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let mut name = OsString::from(".");
        name.push(own);
        name.push(format!(".{}", uuid::Uuid::new_v4().simple()));
        let path = folder(path).join(name);
        let file = rustix::fs::open(&path, READ_WRITE | OFlags::CREATE | OFlags::EXCL, OURS)?;
        let mut beside = Self { path, signals: Vec::new() };
        let name = CString::new(beside.path.as_os_str().as_bytes())?;
        for signal in [SIGTERM, SIGINT] {
            let name = name.clone();
            let remove = move || {
                // SAFETY: the name is a C string, and the handler that uses it is never removed, nor is the name freed.
                unsafe { libc::unlink(name.as_ptr()) };
                let _ = emulate_default_handler(signal);
            };
            // SAFETY: at a signal it makes two calls that are allowed there (signal-safety(7), and the latter's
            // documentation): it neither allocates nor locks, and does not unwind.
            beside.signals.push(unsafe { register(signal, remove) }?);
        }
        Ok((file.into(), State::Beside(beside)))
    }

    /// Renames the file to `path`, if nothing has that name.
    fn rename(&self, path: &Path) -> Result<(), Errno> {
        match rustix::fs::renameat_with(CWD, &self.path, CWD, path, RenameFlags::NOREPLACE) {
            // The file system does not support that. A hard link is also refused if the name is taken.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => rustix::fs::link(&self.path, path),
            renamed => renamed,
        }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // After a rename it is gone already.
        let _ = fs::remove_file(&self.path);
        for signal in self.signals.drain(..) {
            unregister(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::process::ExitStatusExt;
    use std::time::Duration;

    use super::*;

    fn names(folder: &Path) -> Vec<OsString> {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    }

    /// As on a file system without nameless files.
    fn made(path: &Path) -> Target<'_> {
        let refused = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
        Target::make(path, 5000, without_tmpfile(refused, path)).unwrap()
    }

    #[test]
    fn a_new_file_gets_its_name_when_it_is_complete() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let mut target = made(&path);
        let before = names(folder.path());
        assert!(before.len() == 1 && before[0] != "a", "{before:?}");
        target.publish().unwrap();
        assert_eq!(names(folder.path()), ["a"]);
        target.keep();
        let there = fs::metadata(&path).unwrap();
        assert_eq!((there.len(), there.mode() & 0o777), (5000, 0o600));
        // Neither stays: a file that failed before it had its name, and one that failed after that.
        let other = folder.path().join("b");
        drop(made(&other));
        let mut target = made(&other);
        target.publish().unwrap();
        drop(target);
        assert_eq!(names(folder.path()), ["a"]);
    }

    #[test]
    fn a_name_taken_meanwhile_is_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let mut target = made(&path);
        fs::write(&path, "theirs").unwrap();
        assert!(matches!(target.publish(), Err(Error::Occupied(_))));
        drop(target);
        assert_eq!(names(folder.path()), ["a"]);
        assert_eq!(fs::read(&path).unwrap(), b"theirs");
    }

    /// The test runs itself in another process, which is killed.
    #[test]
    fn a_signal_leaves_no_file_behind() {
        const FOLDER: &str = "PAGEMILL_CRYPT_TEST_FOLDER";
        if let Some(folder) = std::env::var_os(FOLDER) {
            let path = Path::new(&folder).join("a");
            let _target = made(&path);
            std::thread::sleep(Duration::from_secs(120));
            return;
        }
        for signal in [rustix::process::Signal::TERM, rustix::process::Signal::INT] {
            let folder = tempfile::tempdir().unwrap();
            let this = [module_path!().split_once("::").unwrap().1, "a_signal_leaves_no_file_behind"].join("::");
            let mut child = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", &this])
                .env(FOLDER, folder.path())
                .stdout(std::process::Stdio::null())
                .spawn()
                .unwrap();
            // The file has its size once the handlers are installed.
            let is_made = || {
                names(folder.path())
                    .first()
                    .is_some_and(|name| fs::metadata(folder.path().join(name)).is_ok_and(|there| there.len() == 5000))
            };
            while !is_made() {
                assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
                std::thread::sleep(Duration::from_millis(5));
            }
            rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
            assert_eq!(child.wait().unwrap().signal(), Some(signal.as_raw()));
            assert_eq!(names(folder.path()), Vec::<OsString>::new());
        }
    }
}
