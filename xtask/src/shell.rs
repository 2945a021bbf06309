//! Running a command. Its output goes to a log, which the step can read. [`watch`] ends it when its time is up.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};

use crate::progress::Progress;
use crate::tally;
use crate::watch::{self, End};

/// The processor time that a command may use, unless it sets another limit.
const LIMIT: Duration = Duration::from_secs(600);
/// How often the output of a command is looked at while it runs.
const LOOK: Duration = Duration::from_millis(200);

/// The checkout, the places for logs and builds, and the options of this run.
pub(crate) struct Shell {
    /// Keeps other runs out.
    _lock: File,
    /// The repository's root.
    pub(crate) root: PathBuf,
    /// Cargo's target directory for ordinary builds.
    pub(crate) target: PathBuf,
    /// There is no network: cargo gets CARGO_NET_OFFLINE.
    pub(crate) is_offline: bool,
    /// Print the output of every command.
    pub(crate) is_verbose: bool,
    /// Run only tests whose names contain this.
    pub(crate) filter: Option<String>,
    /// The tier is `quick`.
    pub(crate) is_quick: bool,
    /// Tell how far virtual machines are, a line for each step of theirs.
    pub(crate) is_telling: bool,
    /// Test each path, whatever changed.
    pub(crate) is_all: bool,
    /// Shows how far the steps are.
    pub(crate) progress: Progress,
}

/// A command that has ended.
pub(crate) struct Ran {
    /// How it ended.
    pub(crate) end: End,
    /// Its output, both streams in order.
    pub(crate) text: String,
    /// The file with its output.
    pub(crate) log: PathBuf,
}

impl Ran {
    /// True when the command ended well.
    pub(crate) fn is_ok(&self) -> bool {
        self.end.is_ok()
    }

    /// Fails with the last lines of the output unless the command ended well.
    pub(crate) fn expect_ok(self) -> Result<Self> {
        if self.is_ok() {
            return Ok(self);
        }
        bail!("{}\n{}", self.how_it_ended(), self.last_lines(40))
    }

    /// One line on how the command ended.
    pub(crate) fn how_it_ended(&self) -> String {
        format!("{}; everything it printed: {}", self.end, self.log.display())
    }

    /// The last `count` lines of the output, indented.
    pub(crate) fn last_lines(&self, count: usize) -> String {
        tally::last_lines(&self.text, count)
    }
}

impl Shell {
    /// The shell of the checkout that this program was built from.
    pub(crate) fn new(is_verbose: bool) -> Result<Self> {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = manifest.parent().context("xtask lies in the repository's root")?.to_owned();
        let target = match std::env::var_os("CARGO_TARGET_DIR") {
            Some(dir) => root.join(dir),
            None => root.join("target"),
        };
        fs::create_dir_all(target.join("xtask/logs"))?;
        // Two runs would overwrite each other's logs, disks and README files.
        let lock = File::create(target.join("xtask/lock"))?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            eprintln!("cargo xtask: another run is under way in {}; waiting for its end", target.display());
            flock(&lock, FlockOperation::LockExclusive)?;
        }
        let progress = Progress::default();
        Ok(Self {
            _lock: lock,
            root,
            target,
            is_offline: false,
            is_verbose,
            filter: None,
            is_quick: false,
            is_telling: false,
            is_all: false,
            progress,
        })
    }

    /// Whether a test of this name is to run.
    pub(crate) fn is_wanted(&self, test: &str) -> bool {
        self.filter.as_ref().is_none_or(|filter| test.contains(filter))
    }

    /// Prints a line on how far a virtual machine is, if the user asked for it alone.
    pub(crate) fn tell(&self, line: &str) {
        if self.is_telling {
            self.progress.say(line);
        }
    }

    /// A directory for a build whose flags differ from those of the ordinary build, so that neither replaces the other's objects.
    pub(crate) fn own_target(&self, name: &str) -> PathBuf {
        self.target.join("xtask").join(name)
    }

    /// The log of a command or a step.
    pub(crate) fn log(&self, name: &str) -> PathBuf {
        self.own_target("logs").join(format!("{name}.log"))
    }

    /// A cargo command on the toolchain that the user chose.
    pub(crate) fn cargo(&self, args: &str) -> Cmd<'_> {
        // No colours: this program parses the logs.
        let cmd = self.command("cargo").args(args.split_whitespace()).env("CARGO_TERM_COLOR", "never");
        let cmd = cmd.env("CARGO_TARGET_DIR", &self.target);
        let cmd = if self.is_offline { cmd.env("CARGO_NET_OFFLINE", "true") } else { cmd };
        // Property tests begin at a fixed seed, so that a commit has one verdict. Plain `cargo test` takes a new seed each time.
        if std::env::var_os("PROPTEST_RNG_SEED").is_none() { cmd.env("PROPTEST_RNG_SEED", "1") } else { cmd }
    }

    /// A cargo command on the nightly toolchain.
    pub(crate) fn nightly(&self, args: &str) -> Cmd<'_> {
        self.cargo(&format!("+nightly {args}"))
    }

    /// Any program, started in the repository's root.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Cmd<'_> {
        let mut command = Command::new(program);
        command.current_dir(&self.root).stdin(Stdio::null());
        // Cargo set these variables for this program. Some build scripts depend on them, and would run again in the user's next
        // build, which lacks them.
        let is_ours =
            |name: &OsStr| ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|it| name.to_string_lossy().starts_with(it));
        std::env::vars_os().filter(|(name, _)| is_ours(name)).for_each(|(name, _)| _ = command.env_remove(name));
        Cmd { shell: self, command, limit: LIMIT }
    }
}

/// A command before it runs.
pub(crate) struct Cmd<'a> {
    shell: &'a Shell,
    command: Command,
    limit: Duration,
}

impl Cmd<'_> {
    /// Adds arguments.
    pub(crate) fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.command.args(args);
        self
    }

    /// Adds one argument.
    pub(crate) fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.command.arg(arg);
        self
    }

    /// Sets an environment variable.
    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Sets rustc's flags, and a target directory for them.
    pub(crate) fn rustflags(self, flags: &str, target: &str) -> Self {
        let dir = self.shell.own_target(target);
        self.env("RUSTFLAGS", flags).env("CARGO_TARGET_DIR", dir)
    }

    /// Sets the directory, if it is not the repository's root.
    pub(crate) fn current_dir(mut self, dir: impl AsRef<Path>) -> Self {
        self.command.current_dir(dir);
        self
    }

    /// Sets the processor time that it may use.
    pub(crate) fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Runs it to its end. An error means that it could not be started.
    pub(crate) fn run(self, log_name: &str) -> Result<Ran> {
        self.run_telling(log_name, &[])
    }

    /// The same. Meanwhile it tells ([`Shell::tell`]) the lines of its output that begin with one of these.
    pub(crate) fn run_telling(mut self, log_name: &str, beginnings: &[&str]) -> Result<Ran> {
        let log = self.shell.log(log_name);
        let file = File::create(&log).with_context(|| log.display().to_string())?;
        self.command.stdout(file.try_clone()?).stderr(file);
        let program = self.command.get_program().to_string_lossy().into_owned();
        if self.shell.is_verbose {
            let args: Vec<_> = self.command.get_args().map(OsStr::to_string_lossy).collect();
            println!("$ {program} {}", args.join(" "));
        }
        let shell = self.shell;
        let (is_over, tail) = (AtomicBool::new(false), File::open(&log)?);
        let ended = std::thread::scope(|scope| {
            if !beginnings.is_empty() {
                scope.spawn(|| {
                    follow(tail, &is_over, |line| {
                        if beginnings.iter().any(|begin| line.starts_with(begin)) {
                            shell.tell(line);
                        }
                    })
                });
            }
            let ended = watch::run(&mut self.command, self.limit, watch::IDLE);
            is_over.store(true, Ordering::Relaxed);
            ended
        });
        let (end, _) = ended.with_context(|| format!("running {program}"))?;
        let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        if self.shell.is_verbose {
            print!("{text}");
        }
        Ok(Ran { end, text, log })
    }
}

/// Reads what is added to a file, line by line, until it is over.
fn follow(mut file: File, is_over: &AtomicBool, each: impl Fn(&str)) {
    let mut rest = Vec::new();
    loop {
        // Looked at before the file, so that the last lines are not missed.
        let is_last = is_over.load(Ordering::Relaxed);
        // A log that can't be read is reported when the command has ended.
        _ = file.read_to_end(&mut rest);
        while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
            let line: Vec<_> = rest.drain(..=end).collect();
            each(String::from_utf8_lossy(&line).trim_end());
        }
        if is_last {
            return;
        }
        std::thread::sleep(LOOK);
    }
}

/// A path as a shell's word.
pub(crate) fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn lines_that_are_added_to_a_file_are_followed_to_its_last() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (mut writer, is_over, lines) = (file.reopen().unwrap(), AtomicBool::new(false), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            let reader = file.reopen().unwrap();
            scope.spawn(|| follow(reader, &is_over, |line| lines.lock().unwrap().push(line.to_owned())));
            writer.write_all(b"one\r\ntw").unwrap();
            while lines.lock().unwrap().is_empty() {
                std::thread::yield_now();
            }
            writer.write_all(b"o\nthree\nno end").unwrap();
            is_over.store(true, Ordering::Relaxed);
        });
        assert_eq!(lines.into_inner().unwrap(), ["one", "two", "three"]);
    }
}
