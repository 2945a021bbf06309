//! Helpers of the tests: a folder, and running `cryptsetup` and `qemu-img` in it.
pub(crate) mod certificates;
pub(crate) mod disk;
pub(crate) mod far_end;
#[path = "../../../../tests/patience.rs"]
mod patience;
pub(crate) mod served;

pub(crate) use patience::{PATIENCE, until};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use pagemill_crypt::cipher::SectorSize;
use pagemill_crypt::kdf::{KdfChoice, KdfKind, Limits};
use pagemill_crypt::luks::New;
use pagemill_crypt::secret::Locked;
use pagemill_crypt::{Error, Hash, Luks};

pub(crate) const PASSPHRASE: &[u8] = b"correct horse";
pub(crate) const OTHER: &[u8] = b"battery staple\n";
pub(crate) const MIB: u64 = 1 << 20;

/// A folder with the passphrases in files.
pub(crate) struct Bench {
    dir: PathBuf,
    /// Removes the folder in the end.
    _made: Option<tempfile::TempDir>,
}

impl Bench {
    /// `None`, and a line that says so, when one of `tools` is not installed.
    pub(crate) fn with(tools: &[&str]) -> Option<Self> {
        for tool in tools {
            if Command::new(tool).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
                eprintln!("skipped: {tool} is not installed");
                return None;
            }
        }
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("pw"), PASSPHRASE).unwrap();
        fs::write(dir.path().join("other"), OTHER).unwrap();
        fs::write(dir.path().join("wrong"), b"wrong").unwrap();
        Some(Self { dir: dir.path().to_owned(), _made: Some(dir) })
    }

    /// The folder of another process's bench.
    pub(crate) fn in_folder(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), _made: None }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A new file of zeros, open for reading and writing.
    pub(crate) fn file(&self, name: &str, len: u64) -> File {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(self.path(name)).unwrap();
        file.set_len(len).unwrap();
        file
    }

    pub(crate) fn open(&self, name: &str) -> File {
        File::options().read(true).write(true).open(self.path(name)).unwrap()
    }

    /// Runs a line of words in the folder.
    pub(crate) fn run(&self, line: &str) -> Output {
        let mut words = line.split(' ');
        let mut command = Command::new(words.next().unwrap());
        command.args(words).current_dir(&self.dir).stdin(Stdio::null()).output().unwrap()
    }

    /// Runs a line of words, which has to succeed, and returns its output.
    pub(crate) fn ok(&self, line: &str) -> String {
        let output = self.run(line);
        let all = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{line}: {all}");
        all
    }

    /// The volume key, as `cryptsetup` finds it with the passphrase in file `pw`.
    pub(crate) fn key_by_cryptsetup(&self, image: &str, pw: &str) -> Vec<u8> {
        let _ = fs::remove_file(self.path("key"));
        self.ok(&format!("cryptsetup luksDump -q --dump-volume-key --volume-key-file key --key-file {pw} {image}"));
        fs::read(self.path("key")).unwrap()
    }
}

/// A volume with cheap keyslots.
pub(crate) fn new(version: u8, key_bits: usize, sector: u64, kind: KdfKind) -> New {
    New {
        version,
        key_bytes: key_bits / 8,
        sector_size: SectorSize::new(sector).unwrap(),
        hash: Hash::Sha256,
        kdf: cheap(kind),
        label: String::new(),
        detached: None,
    }
}

pub(crate) fn cheap(kind: KdfKind) -> KdfChoice {
    let iterations = Some(if kind == KdfKind::Pbkdf2 { 1000 } else { 4 });
    KdfChoice { iterations, memory_kib: Some(64), lanes: Some(2), target: Duration::ZERO, ..KdfChoice::new(kind) }
}

pub(crate) fn unlock(file: &File, passphrase: &[u8]) -> Result<(u32, Locked), Error> {
    Luks::read(file)?.unlock(file, passphrase, None, &Limits::default())
}

/// Bytes without repetition.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

pub(crate) fn write(path: &Path, bytes: &[u8]) {
    File::create(path).unwrap().write_all(bytes).unwrap();
}

/// The volume's contents, as read by this crate.
pub(crate) fn contents(header: &File, data: &File, is_detached: bool) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let len = data.metadata().unwrap().len();
    let luks = Luks::read(header).unwrap();
    let volume = luks.open(header, PASSPHRASE, len, is_detached, &Limits::default()).unwrap();
    let mut bytes = vec![0; volume.geometry().len as usize];
    data.read_exact_at(&mut bytes, volume.geometry().offset).unwrap();
    volume.decrypt_in_place(0, &mut bytes).unwrap();
    bytes
}

/// Writes `plain` to the whole volume by this crate.
pub(crate) fn fill(header: &File, data: &File, is_detached: bool, plain: &[u8]) {
    use std::os::unix::fs::FileExt;
    let len = data.metadata().unwrap().len();
    let luks = Luks::read(header).unwrap();
    let volume = luks.open(header, PASSPHRASE, len, is_detached, &Limits::default()).unwrap();
    assert_eq!(volume.geometry().len as usize, plain.len());
    let mut secret = vec![0; plain.len()];
    // In two parts, so that the sector numbers continue.
    let half = plain.len() / 2 / 4096 * 4096;
    volume.encrypt(0, &plain[..half], &mut secret[..half]).unwrap();
    volume.encrypt(half as u64, &plain[half..], &mut secret[half..]).unwrap();
    data.write_all_at(&secret, volume.geometry().offset).unwrap();
}
