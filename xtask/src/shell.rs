//! Running a command: what it prints goes to a log that the step can read, and it
//! ends when its time is up.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// The checkout and the places where a run leaves its traces.
pub(crate) struct Shell {
    /// The repository's root.
    pub(crate) root: PathBuf,
    /// Cargo's target directory for ordinary builds.
    pub(crate) target: PathBuf,
    /// Nothing outside this machine can be reached: cargo is told so.
    pub(crate) is_offline: bool,
    /// Show what commands print as they run.
    pub(crate) is_verbose: bool,
}

/// What a command left behind.
pub(crate) struct Ran {
    /// How it ended.
    pub(crate) status: ExitStatus,
    /// Everything it printed, both streams in order.
    pub(crate) text: String,
    /// Where that is on disk.
    pub(crate) log: PathBuf,
}

impl Ran {
    /// True when the command ended well.
    pub(crate) fn is_ok(&self) -> bool {
        self.status.success()
    }

    /// Fails with the last lines of the output unless the command ended well.
    pub(crate) fn expect_ok(self) -> Result<Self> {
        if self.is_ok() {
            return Ok(self);
        }
        bail!("{}\n{}", self.how_it_ended(), self.last_lines(40))
    }

    /// One line on how the command ended. `timeout` reports 124 when time is up.
    pub(crate) fn how_it_ended(&self) -> String {
        let log = self.log.display();
        match self.status.code() {
            Some(124 | 137) => format!("ran out of time; everything it printed: {log}"),
            Some(code) => format!("ended with {code}; everything it printed: {log}"),
            None => format!("{}; everything it printed: {log}", self.status),
        }
    }

    /// The last `count` lines of the output, indented.
    pub(crate) fn last_lines(&self, count: usize) -> String {
        let lines: Vec<_> = self.text.lines().collect();
        let from = lines.len().saturating_sub(count);
        lines[from..].iter().map(|line| format!("    {line}\n")).collect()
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
        fs::create_dir_all(target.join("xtask"))?;
        Ok(Self { root, target, is_offline: false, is_verbose })
    }

    /// A directory of its own for a build whose flags differ from the ordinary
    /// one's, so that neither build throws the other's away.
    pub(crate) fn own_target(&self, name: &str) -> PathBuf {
        self.target.join("xtask").join(name)
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
        // `timeout` ends a command with everything that the command started.
        let mut command = Command::new("timeout");
        command.current_dir(&self.root).stdin(Stdio::null());
        // What cargo set for this program is not meant for the ones it starts.
        for name in ["CARGO_MANIFEST_DIR", "CARGO_MANIFEST_PATH", "CARGO_PKG_NAME", "CARGO_PKG_VERSION"] {
            command.env_remove(name);
        }
        Cmd { shell: self, command, program: program.as_ref().to_owned(), args: Vec::new(), limit_s: 600 }
    }
}

/// A command being put together.
pub(crate) struct Cmd<'a> {
    shell: &'a Shell,
    command: Command,
    program: std::ffi::OsString,
    args: Vec<std::ffi::OsString>,
    limit_s: u64,
}

impl Cmd<'_> {
    /// Adds arguments.
    pub(crate) fn args<S: AsRef<OsStr>>(&mut self, args: impl IntoIterator<Item = S>) {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
    }

    /// Adds one argument.
    pub(crate) fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
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

    /// How long it may take; ten minutes unless said otherwise.
    pub(crate) fn limit(mut self, limit: Duration) -> Self {
        self.limit_s = limit.as_secs();
        self
    }

    /// Runs it to its end. An error means that it could not be started at all.
    pub(crate) fn run(mut self, log_name: &str) -> Result<Ran> {
        let log = self.shell.own_target("logs").join(format!("{log_name}.log"));
        fs::create_dir_all(log.parent().expect("a file in a directory"))?;
        let file = File::create(&log).with_context(|| log.display().to_string())?;
        self.command.arg("--kill-after=5").arg(self.limit_s.to_string()).arg(&self.program).args(&self.args);
        self.command.stdout(file.try_clone()?).stderr(file);
        let program = self.program.to_string_lossy().into_owned();
        if self.shell.is_verbose {
            let args: Vec<_> = self.args.iter().map(|arg| arg.to_string_lossy()).collect();
            println!("$ {program} {}", args.join(" "));
        }
        let status = self.command.status().with_context(|| format!("starting {program} by way of timeout"))?;
        let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        if self.shell.is_verbose {
            print!("{text}");
        }
        Ok(Ran { status, text, log })
    }
}
