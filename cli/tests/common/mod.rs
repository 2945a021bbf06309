//! A folder for a test's files, and the program at work in it.
#[path = "../../../tests/patience.rs"]
mod patience;
pub(crate) use patience::{PATIENCE, until};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_pagemill");

/// An empty folder, removed at the end.
pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn file(&self, name: &str, contents: &[u8]) -> PathBuf {
        fs::write(self.path(name), contents).unwrap();
        self.path(name)
    }

    /// The names of its files, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Runs `pagemill` in this folder.
    pub(crate) fn pagemill(&self, args: &[&str]) -> Outcome {
        self.run(Command::new(PROGRAM).args(args))
    }

    /// Runs `pagemill copy` in this folder.
    pub(crate) fn copy(&self, args: &[&str]) -> Outcome {
        self.pagemill(&[&["copy"], args].concat())
    }

    /// Runs `pagemill copy` after `before` in a shell.
    pub(crate) fn copy_after(&self, before: &str, args: &[&str]) -> Outcome {
        let script = format!("{before}; exec \"$0\" copy \"$@\"");
        self.run(Command::new("sh").args(["-c", &script, PROGRAM]).args(args))
    }

    pub(crate) fn run(&self, command: &mut Command) -> Outcome {
        Outcome::of(self.spawn(command))
    }

    /// Starts a command in this folder, with its output piped.
    pub(crate) fn spawn(&self, command: &mut Command) -> Child {
        command.current_dir(self.0.path()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Starts a copy of `src` to `dst` that takes a while, and stops it in the middle.
    pub(crate) fn stopped_copy(&self, args: &[&str]) -> Child {
        // On a busy machine a copy may end before it is seen at work: then start another one.
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            // A shell's background processes ignore SIGINT and SIGQUIT, and the program would inherit that.
            let mut command = Command::new("env");
            command.args(["--default-signal", PROGRAM, "copy", "--batch", "1", "--alloc", "single", "src", "dst"]);
            let mut child = self.spawn(command.args(args));
            while child.try_wait().unwrap().is_none() {
                if self.has_partial_with_data() {
                    signal(&child, rustix::process::Signal::STOP);
                    if is_stopped(&child) && self.has_partial_with_data() {
                        return child;
                    }
                    let _ = child.kill();
                }
                std::thread::sleep(Duration::from_micros(200));
            }
            let made = self.names().into_iter().filter(|name| name != "src");
            made.for_each(|name| fs::remove_file(self.path(&name)).unwrap());
        }
        panic!("no copy was ever seen at work");
    }

    fn has_partial_with_data(&self) -> bool {
        let partial = self.names().into_iter().find(|name| name.ends_with(".partial"));
        partial.and_then(|name| fs::metadata(self.path(&name)).ok()).is_some_and(|meta| meta.len() > 0)
    }
}

pub(crate) fn signal(child: &Child, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, signal).unwrap();
}

/// Waits until a process has stopped after SIGSTOP. False: it ended first.
fn is_stopped(child: &Child) -> bool {
    loop {
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        // The state follows the name, which is in brackets.
        match stat.rsplit(") ").next().and_then(|rest| rest.chars().next()) {
            Some('T') => return true,
            Some('Z' | 'X') | None => return false,
            Some(_) => std::thread::sleep(Duration::from_micros(100)),
        }
    }
}

/// Continues a stopped copy, to its end.
pub(crate) fn go_on(child: Child) -> Outcome {
    signal(&child, rustix::process::Signal::CONT);
    Outcome::of(child)
}

/// Reads a pipe to its end.
fn read(mut pipe: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).unwrap();
        bytes
    })
}

/// How the program ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Outcome {
    pub(crate) fn of(mut child: Child) -> Self {
        let start = Instant::now();
        // Read meanwhile: a full pipe would stop it.
        let (stdout, stderr) = (child.stdout.take().map(read), child.stderr.take().map(read));
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if start.elapsed() > PATIENCE {
                child.kill().unwrap();
                panic!("the program hangs");
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let text = |pipe: Option<JoinHandle<Vec<u8>>>| {
            String::from_utf8(pipe.map_or_else(Vec::new, |pipe| pipe.join().unwrap())).unwrap()
        };
        Self { code: status.code(), signal: status.signal(), stdout: text(stdout), stderr: text(stderr) }
    }

    /// It succeeded, with nothing on standard error.
    #[track_caller]
    pub(crate) fn done(&self) -> &Self {
        assert_eq!((self.code, self.stderr.as_str()), (Some(0), ""), "{self:?}");
        self
    }

    /// `pagemill copy` refused: exit code 1, nothing on standard output, and one line that has all these words.
    #[track_caller]
    pub(crate) fn refused(&self, words: &[&str]) -> &Self {
        self.refused_by("copy", words)
    }

    /// The same for another command.
    #[track_caller]
    pub(crate) fn refused_by(&self, command: &str, words: &[&str]) -> &Self {
        assert_eq!((self.code, self.stdout.as_str()), (Some(1), ""), "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        assert!(self.stderr.starts_with(&format!("pagemill: {command}: ")), "{self:?}");
        words.iter().for_each(|word| assert!(self.stderr.contains(word), "no {word:?} in {self:?}"));
        self
    }
}

/// Bytes that don't repeat.
pub(crate) fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64 ^ bytes as u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[0]
    };
    (0..bytes).map(|_| next()).collect()
}

/// Makes a file with this much data, quickly.
pub(crate) fn large(path: &Path, mebibytes: usize) {
    let mut file = File::create(path).unwrap();
    let block = noise(1 << 20);
    (0..mebibytes).for_each(|_| file.write_all(&block).unwrap());
}
