//! The servers, each a process with an image of its own, and how they are cleaned up.
//!
//! Sockets, images and the key are in one folder in `/dev/shm`, which is removed when the table is done, when it fails,
//! or on a signal. Dropping a [`Child`] ends the process; if this process is killed, the system ends its children.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use crate::failed;
use pagemill_harness::Error;
use pagemill_harness::rounds::{Kind, Unavailable};

/// A folder whose files are in memory.
const IN_MEMORY: &str = "/dev/shm";
/// How long a server may take to answer, and to end.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often a child's state is polled.
const PAUSE: Duration = Duration::from_millis(2);

/// Catches the signals that end the program. Dropping it restores their default action.
pub(crate) struct Stop {
    came: Arc<AtomicUsize>,
    is_default: Arc<AtomicBool>,
}

impl Stop {
    pub(crate) fn watch() -> io::Result<Stop> {
        let stop = Stop { came: Arc::default(), is_default: Arc::default() };
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
            signal_hook::flag::register_usize(signal, Arc::clone(&stop.came), signal as usize)?;
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&stop.is_default))?;
        }
        Ok(stop)
    }

    /// Fails once a signal has come.
    pub(crate) fn check(&self) -> Result<(), Error> {
        // Relaxed: only the number itself is read.
        match self.came.load(Relaxed) {
            0 => Ok(()),
            signal => Err(Error::Interrupted { signal: signal as i32 }),
        }
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        // Relaxed: the handlers read only the flag.
        self.is_default.store(true, Relaxed);
    }
}

/// A process that ends when this is dropped.
pub(crate) struct Child(std::process::Child);

impl Child {
    pub(crate) fn spawn(command: &mut Command) -> io::Result<Child> {
        let end_with_parent = || Ok(rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?);
        // SAFETY: between fork and exec it makes one system call, which is safe there, and allocates nothing.
        unsafe { command.pre_exec(end_with_parent) };
        command.stdin(Stdio::null()).spawn().map(Child)
    }

    /// Waits until it ends by itself; `None` if it has not ended after `patience`.
    pub(crate) fn wait(&mut self, patience: Duration, stop: &Stop) -> Result<Option<ExitStatus>, Error> {
        let until = Instant::now() + patience;
        while Instant::now() < until {
            // Checked first: a signal from a terminal ends the child as well.
            stop.check()?;
            if let Some(status) = self.0.try_wait().map_err(|error| failed("waiting for a process", error))? {
                stop.check()?;
                return Ok(Some(status));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(None)
    }

    /// The processor time that its threads have used so far, those that have ended included.
    fn cpu_time(&self) -> io::Result<Duration> {
        let mut clock = 0;
        // SAFETY: it writes one id.
        match unsafe { libc::clock_getcpuclockid(self.0.id().cast_signed(), &mut clock) } {
            0 => {}
            errno => return Err(io::Error::from_raw_os_error(errno)),
        }
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: it writes one time.
        match unsafe { libc::clock_gettime(clock, &mut time) } {
            0 => Ok(Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let asked = Instant::now();
        if let Some(pid) = rustix::process::Pid::from_raw(self.0.id().cast_signed())
            && matches!(self.0.try_wait(), Ok(None))
        {
            // It has not been waited for, so the number is still its own.
            let _ = rustix::process::kill_process(pid, Signal::TERM);
            while matches!(self.0.try_wait(), Ok(None)) && asked.elapsed() < PATIENCE {
                std::thread::sleep(PAUSE);
            }
        }
        // Both calls fail only if it has ended, which is fine.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The volumes, and how each is formatted.
const VOLUMES: [(&str, &[&str]); 2] =
    [("luks1", &["--type", "luks1"]), ("luks2", &["--type", "luks2", "--kdf", "pbkdf2", "--sector-size", "4096"])];

/// The folder, with a key and volumes to copy.
pub(crate) struct Place {
    folder: tempfile::TempDir,
    image: u64,
}

impl Place {
    /// Makes a LUKS1 volume of `image` bytes, all of them written, and a LUKS2 volume, and checks that there is room for `copies` copies.
    pub(crate) fn new(program: &Path, image: u64, copies: u64) -> Result<Place, Unavailable> {
        let refused = |error: io::Error| Unavailable(format!("{IN_MEMORY}: {error}"));
        let needed = (copies + 2) * image;
        let space = rustix::fs::statvfs(IN_MEMORY).map_err(|error| refused(error.into()))?;
        let there =
            pagemill_harness::machine::available_bytes().unwrap_or(u64::MAX).min(space.f_bavail * space.f_frsize);
        if there < needed {
            let [there, needed] = [there, needed].map(|bytes| bytes >> 20);
            return Err(Unavailable(format!("{there} MiB of memory are left in {IN_MEMORY}, {needed} are needed")));
        }
        let folder = tempfile::Builder::new().prefix("pagemill-bench-").tempdir_in(IN_MEMORY).map_err(refused)?;
        let place = Place { folder, image };
        fs::write(place.path("key"), b"what a benchmark keeps is no secret").map_err(refused)?;
        for (name, how) in VOLUMES {
            place.fill(name).map_err(refused)?;
            let mut format = Command::new(program);
            format.args(["crypt", "format", "--kdf-iterations", "1000", "--force"]).args(how).arg("--key-file");
            let format = format.arg(place.path("key")).arg(place.path(name)).stdin(Stdio::null()).output();
            let format = format.map_err(|error| Unavailable(format!("{}: {error}", program.display())))?;
            if !format.status.success() {
                let said = String::from_utf8_lossy(&format.stderr).trim().to_owned();
                return Err(Unavailable(format!("crypt format: {}: {said}", format.status)));
            }
        }
        Ok(place)
    }

    fn fill(&self, name: &str) -> io::Result<()> {
        let mut volume = File::create(self.path(name))?;
        let mut noise = vec![0; 1 << 20];
        fastrand::Rng::with_seed(self.image).fill(&mut noise);
        (0..self.image >> 20).try_for_each(|_| io::Write::write_all(&mut volume, &noise))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// A server to measure, and its row's name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Make {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) how: How,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// `pagemill crypt serve`.
    Pagemill,
    /// The same with LUKS2 and 4096-byte sectors.
    PagemillLarge,
    NbdkitLuks,
    QemuNbd,
    Nbdkit,
}

pub(crate) struct Server {
    pub(crate) make: Make,
    pub(crate) socket: PathBuf,
    child: Child,
}

impl Server {
    /// Starts it, and waits until it answers.
    pub(crate) fn start(
        make: Make,
        program: &Path,
        place: &Place,
        stop: &Stop,
    ) -> Result<Result<Server, Unavailable>, Error> {
        let [socket, image, said] = ["sock", "img", "err"].map(|end| place.path(&format!("{}.{end}", make.name)));
        let volume = if make.how == How::PagemillLarge { "luks2" } else { "luks1" };
        let prepared = fs::copy(place.path(volume), &image).and_then(|_| File::create(&said));
        let said_file = match prepared {
            Ok(file) => file,
            Err(error) => return Ok(Err(Unavailable(format!("its image in memory: {error}")))),
        };
        let key = place.path("key");
        let mut command = command(make.how, program, &socket, &image, &key);
        command.current_dir(place.folder()).stdout(Stdio::null()).stderr(said_file);
        let mut child = match Child::spawn(&mut command) {
            Ok(child) => child,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Err(Unavailable(format!("{} is not installed", command.get_program().display()))));
            }
            Err(error) => return Ok(Err(Unavailable(format!("{}: {error}", command.get_program().display())))),
        };
        let until = Instant::now() + PATIENCE;
        while UnixStream::connect(&socket).is_err() {
            if child.wait(5 * PAUSE, stop)?.is_some() || Instant::now() > until {
                let said = fs::read_to_string(&said).unwrap_or_default();
                let last = said.lines().last().unwrap_or("it does not answer").to_owned();
                return Ok(Err(Unavailable(last)));
            }
        }
        Ok(Ok(Server { make, socket, child }))
    }

    /// The processor time that it has used so far.
    pub(crate) fn cpu_time(&self) -> io::Result<Duration> {
        self.child.cpu_time()
    }
}

/// Each server as its users start it, with its defaults.
fn command(how: How, program: &Path, socket: &Path, image: &Path, key: &Path) -> Command {
    let joined = |start: &str, path: &Path| {
        let mut word = OsStr::new(start).to_owned();
        word.push(path);
        word
    };
    let mut command;
    match how {
        How::Pagemill | How::PagemillLarge => {
            command = Command::new(program);
            command.args(["crypt", "serve", "--key-file"]).arg(key).arg("--unix").arg(socket).arg(image);
        }
        How::NbdkitLuks => {
            command = Command::new("nbdkit");
            command.args(["--foreground", "--unix"]).arg(socket).args(["--filter=luks", "file"]).arg(image);
            command.arg(joined("passphrase=+", key));
        }
        How::Nbdkit => {
            command = Command::new("nbdkit");
            command.args(["--foreground", "--unix"]).arg(socket).arg("file").arg(image);
        }
        How::QemuNbd => {
            command = Command::new("qemu-nbd");
            command.arg("--persistent").arg("--socket").arg(socket);
            command.arg("--object").arg(joined("secret,id=key,file=", key)).arg("--image-opts");
            command.arg(joined("driver=luks,key-secret=key,file.driver=file,file.filename=", image));
        }
    }
    command
}
