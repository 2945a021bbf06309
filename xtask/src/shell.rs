//! Running a command: what it prints goes to a log that the step can read, and it
//! ends when its time is up ([`watch`]).

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};

use crate::progress::Progress;
use crate::tally;
use crate::watch::{self, End};

/// The processor time that a command may use which says nothing else.
const LIMIT: Duration = Duration::from_secs(600);

/// The checkout, the places where a run leaves its traces, and what was asked of it.
pub(crate) struct Shell {
    /// Held for as long as this is there.
    _lock: File,
    /// The repository's root.
    pub(crate) root: PathBuf,
    /// Cargo's target directory for ordinary builds.
    pub(crate) target: PathBuf,
    /// Nothing outside this machine can be reached: cargo is told so.
    pub(crate) is_offline: bool,
    /// Show what commands print as they run.
    pub(crate) is_verbose: bool,
    /// Only tests whose names hold this, when it is said.
    pub(crate) filter: Option<String>,
    /// Look no further than at what changed.
    pub(crate) is_quick: bool,
    /// Each test of each path, whatever changed.
    pub(crate) is_all: bool,
    /// Where steps show how far they are.
    pub(crate) progress: Progress,
}

/// What a command left behind.
pub(crate) struct Ran {
    /// How it ended.
    pub(crate) end: End,
    /// Everything it printed, both streams in order.
    pub(crate) text: String,
    /// Where that is on disk.
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
        // Logs, disks and the README's files have the same names in each run.
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
            is_all: false,
            progress,
        })
    }

    /// Whether a test of this name is to run.
    pub(crate) fn is_wanted(&self, test: &str) -> bool {
        self.filter.as_ref().is_none_or(|filter| test.contains(filter))
    }

    /// A directory of its own for a build whose flags differ from the ordinary
    /// one's, so that neither build throws the other's away.
    pub(crate) fn own_target(&self, name: &str) -> PathBuf {
        self.target.join("xtask").join(name)
    }

    /// Where what a command or a step prints is kept.
    pub(crate) fn log(&self, name: &str) -> PathBuf {
        self.own_target("logs").join(format!("{name}.log"))
    }

    /// A cargo command on the toolchain that `rust-toolchain` or the user chose.
    pub(crate) fn cargo(&self, args: &str) -> Cmd<'_> {
        let mut cmd = self.command("cargo");
        cmd.args(args.split_whitespace());
        if self.is_offline {
            cmd = cmd.env("CARGO_NET_OFFLINE", "true");
        }
        // Logs are read by this program and shown by others: no colours.
        cmd = cmd.env("CARGO_TARGET_DIR", &self.target).env("CARGO_TERM_COLOR", "never");
        // The same commit, the same verdict: property tests begin at one seed here. `cargo test` takes another each time.
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
        // What cargo set for this program is not meant for the ones it starts. Build scripts look at some of it, and would run
        // again for whoever builds without it.
        let is_ours =
            |name: &OsStr| ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|it| name.to_string_lossy().starts_with(it));
        std::env::vars_os().filter(|(name, _)| is_ours(name)).for_each(|(name, _)| _ = command.env_remove(name));
        Cmd { shell: self, command, limit: LIMIT }
    }
}

/// A command being put together.
pub(crate) struct Cmd<'a> {
    shell: &'a Shell,
    command: Command,
    limit: Duration,
}

impl Cmd<'_> {
    /// Adds arguments.
    pub(crate) fn args<S: AsRef<OsStr>>(&mut self, args: impl IntoIterator<Item = S>) {
        self.command.args(args);
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

    /// Sets the flags that rustc gets, and a target directory of their own.
    pub(crate) fn rustflags(self, flags: &str, target: &str) -> Self {
        let dir = self.shell.own_target(target);
        self.env("RUSTFLAGS", flags).env("CARGO_TARGET_DIR", dir)
    }

    /// Starts it in another directory than the repository's root.
    pub(crate) fn current_dir(mut self, dir: impl AsRef<Path>) -> Self {
        self.command.current_dir(dir);
        self
    }

    /// How much processor time it may use; ten minutes unless said otherwise.
    pub(crate) fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Runs it to its end. An error means that it could not be started at all.
    pub(crate) fn run(mut self, log_name: &str) -> Result<Ran> {
        let log = self.shell.log(log_name);
        let file = File::create(&log).with_context(|| log.display().to_string())?;
        self.command.stdout(file.try_clone()?).stderr(file);
        let program = self.command.get_program().to_string_lossy().into_owned();
        if self.shell.is_verbose {
            let args: Vec<_> = self.command.get_args().map(OsStr::to_string_lossy).collect();
            println!("$ {program} {}", args.join(" "));
        }
        let (end, _) =
            watch::run(&mut self.command, self.limit, watch::IDLE).with_context(|| format!("running {program}"))?;
        let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        if self.shell.is_verbose {
            print!("{text}");
        }
        Ok(Ran { end, text, log })
    }
}
