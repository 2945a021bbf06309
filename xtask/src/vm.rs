//! `cargo xtask vm`: tests that need a kernel to themselves, as root (its own NUMA nodes, huge pages, device mapper), or
//! another processor. Each `tests/vm/NAME.sh` runs in a virtual machine of its own, on Debian's kernel, under QEMU's
//! emulation. It tests correctness; its speed means nothing.
//!
//! The head of the script describes the machine, a line each:
//! - `# arch: aarch64` its processor [default: x86_64]
//! - `# tier: long` only `cargo xtask long` runs it, and `cargo xtask vm NAME`
//! - `# minutes: N` the processor time that it may use [default: 10]
//! - `# kernel-package: NAME` the Debian package that depends on its kernel [default: the release's ordinary one]
//! - `# machine: ARGS` more arguments for QEMU
//! - `# kernel: ARGS` more arguments for the kernel
//! - `# disks: NAME=SIZE[,OPTION …] …` empty images, each a drive of that name for the machine's devices
//! - `# modules: NAME …` modules of the kernel, loaded with those that they need
//! - `# programs: NAME …` programs of this machine, copied with their libraries
//! - `# tests: NAME …` test programs, at `/tests/NAME`: `PACKAGE` has the tests in the package's folder `tests`,
//!   `PACKAGE.unit` its unit tests
//! - `# files: NAME …` files of `tests/vm/etc`, at `/etc/NAME`
//! - `# host: KIND ARGS` as root, starts `pagemill KIND serve FOLDER ARGS` on this machine, which [`host`] controls, and gives the machine
//!   a network
//! - `# examples: PACKAGE/EXAMPLE …` examples of the workspace, at `/bin/EXAMPLE`
//! - `# crate: PACKAGE` a program of the workspace, at `/bin/pagemill`
//!
//! `cargo xtask vm` tells a line for each `== STEP` that a script prints, and for each test.
//!
//! In the machine, `init` starts the script, which ends with 0 unless the script itself failed. The files of `tests/vm/bin`
//! are commands there: `tests` runs tests, `check` runs anything else, and [`found`] reads their output.
//! [`debian`] fetches kernels and another processor's libraries, [`boot`] puts a machine together.

mod boot;
mod debian;
mod found;
mod host;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::shell::Shell;
use crate::tally::Tally;
use crate::tools::{AARCH64, CRYPTSETUP, DPKG, FIO, GCC, GIT, MAKE, Need};

const CPIO: Need = Need::Deb("cpio", &["cpio", "--version"]);
const KMOD: Need = Need::Deb("kmod", &["/sbin/modprobe", "--version"]);
const QEMU: Need = Need::Deb("qemu-system-x86", &["qemu-system-x86_64", "--version"]);
const BUSYBOX: Need = Need::Deb("busybox-static", &["busybox", "true"]);
const DBENCH: Need = Need::Deb("dbench", &["dbench", "--help"]);
/// Many small stressors of files, which look at what their calls did.
const STRESS_NG: Need = Need::Deb("stress-ng", &["stress-ng", "--version"]);
const TCC: Need = Need::Deb("tcc", &["tcc", "-v"]);
/// Uses a file at random places, and compares all that it reads.
const FSX: Need = Need::Crate("fsx", "0.3.2", &["fsx", "--version"]);
/// Tests a file system for what POSIX says.
const PJDFSTEST: Need = Need::Crate("pjdfstest", "0.2.2", &["pjdfstest", "--version"]);

pub(crate) use debian::source_files;

/// The beginning of the name of a script's failure. The script's name follows; and if a check of it failed, a colon and the
/// check.
pub(crate) const SCRIPT: &str = "script ";

/// The needs of the scripts on x86-64.
pub(crate) const NEEDS: &[Need] = &[
    GCC,
    CPIO,
    KMOD,
    DPKG,
    QEMU,
    BUSYBOX,
    // Programs that the scripts run.
    CRYPTSETUP,
    Need::Deb("e2fsprogs", &["/sbin/mkfs.ext4", "-V"]),
    Need::Deb("nbd-client", &["/sbin/nbd-client", "-V"]),
];

/// The needs of the short script that uses `pagemill nfs serve` on this machine.
pub(crate) const NEEDS_NFS: &[Need] = &[GCC, CPIO, KMOD, DPKG, QEMU, BUSYBOX, FIO, DBENCH, FSX, PJDFSTEST];

/// The needs of the long one.
pub(crate) const NEEDS_LONG_NFS: &[Need] =
    &[GCC, CPIO, KMOD, DPKG, QEMU, BUSYBOX, FIO, DBENCH, FSX, PJDFSTEST, STRESS_NG, GIT, MAKE, TCC];

/// The needs of the scripts on aarch64.
pub(crate) const NEEDS_AARCH64: &[Need] = &[
    GCC,
    CPIO,
    KMOD,
    DPKG,
    AARCH64,
    Need::Deb("gcc-aarch64-linux-gnu", &["aarch64-linux-gnu-gcc", "--version"]),
    Need::Deb("libc6-dev-arm64-cross", &["test", "-e", "/usr/aarch64-linux-gnu/lib/crt1.o"]),
    Need::Deb("qemu-system-arm", &["qemu-system-aarch64", "--version"]),
];

/// A processor that QEMU emulates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arch {
    X86_64,
    Aarch64,
}

/// A file `tests/vm/NAME.sh`.
struct Script {
    name: String,
    path: PathBuf,
    text: String,
    arch: Arch,
    is_long: bool,
}

impl Script {
    fn read(path: PathBuf) -> Result<Self> {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let mut script = Self { name, path, text, arch: Arch::X86_64, is_long: false };
        script.arch = match script.head("arch").first().map(String::as_str) {
            None | Some("x86_64") => Arch::X86_64,
            Some("aarch64") => Arch::Aarch64,
            Some(other) => bail!("{}: there is no processor {other}", script.path.display()),
        };
        script.is_long = match script.head("tier").first().map(String::as_str) {
            None => false,
            Some("long") => true,
            Some(other) => bail!("{}: there is no tier {other}", script.path.display()),
        };
        Ok(script)
    }

    /// The words of all lines `# KEY: WORD …` in the head.
    fn head(&self, key: &str) -> Vec<String> {
        let prefix = format!("# {key}: ");
        let lines = self.text.lines().filter_map(|line| line.strip_prefix(&prefix));
        lines.flat_map(str::split_whitespace).map(str::to_owned).collect()
    }

    /// The step that runs it.
    fn step(&self) -> &'static str {
        match (self.is_long, self.arch, self.head("host").is_empty()) {
            (true, _, true) => "long-machines",
            (true, _, false) => "long-nfs",
            (false, Arch::Aarch64, _) => "aarch64-vm",
            (false, Arch::X86_64, true) => "vm",
            (false, Arch::X86_64, false) => "nfs-vm",
        }
    }

    /// The processor time that it may use.
    fn limit(&self) -> Result<Duration> {
        let minutes = self.head("minutes").first().map_or(Ok(10), |minutes| minutes.parse());
        Ok(Duration::from_secs(60 * minutes.context("minutes are a number")?))
    }
}

/// Every script there is, by name.
fn scripts(shell: &Shell) -> Result<Vec<Script>> {
    let mut paths: Vec<_> = fs::read_dir(shell.root.join("tests/vm"))?.filter_map(|it| Some(it.ok()?.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|end| end == "sh"));
    paths.sort();
    paths.into_iter().map(Script::read).collect()
}

/// The scripts of these names. Without names, those of [`all`].
fn named(shell: &Shell, names: &[String]) -> Result<Vec<Script>> {
    let mut scripts = scripts(shell)?;
    if let Some(unknown) = names.iter().find(|wanted| scripts.iter().all(|script| script.name != **wanted)) {
        let names: Vec<_> = scripts.iter().map(|script| script.name.as_str()).collect();
        bail!("there is no tests/vm/{unknown}.sh; there are {}", names.join(", "));
    }
    if names.is_empty() {
        scripts.retain(|script| script.step() == "vm");
    } else {
        scripts.retain(|script| names.contains(&script.name));
    }
    Ok(scripts)
}

/// The needs of the scripts of these names.
pub(crate) fn needs(shell: &Shell, names: &[String]) -> Result<Vec<Need>> {
    let of = |script: &Script| match (script.step(), script.arch) {
        ("nfs-vm", _) => NEEDS_NFS,
        ("long-nfs", _) => NEEDS_LONG_NFS,
        (_, Arch::X86_64) => NEEDS,
        (_, Arch::Aarch64) => NEEDS_AARCH64,
    };
    Ok(named(shell, names)?.iter().flat_map(of).copied().collect())
}

/// Runs the scripts of these names. Without names, those of [`all`].
pub(crate) fn some(shell: &Shell, names: &[String]) -> Result<Tally> {
    run(shell, "vm", &named(shell, names)?)
}

/// Runs the short scripts on x86-64.
pub(crate) fn all(shell: &Shell) -> Result<Tally> {
    some(shell, &[])
}

/// Runs the short scripts on aarch64.
pub(crate) fn aarch64(shell: &Shell) -> Result<Tally> {
    of_step(shell, "aarch64-vm")
}

/// Runs the short script that uses `pagemill nfs serve`.
pub(crate) fn nfs(shell: &Shell) -> Result<Tally> {
    of_step(shell, "nfs-vm")
}

/// Runs the long scripts: all tests on two nodes, and on aarch64 with long stress and with pages of 16 KiB.
pub(crate) fn long(shell: &Shell) -> Result<Tally> {
    of_step(shell, "long-machines")
}

/// Runs the long script that uses `pagemill nfs serve`.
pub(crate) fn long_nfs(shell: &Shell) -> Result<Tally> {
    of_step(shell, "long-nfs")
}

fn of_step(shell: &Shell, step: &str) -> Result<Tally> {
    let mut scripts = scripts(shell)?;
    scripts.retain(|script| script.step() == step);
    run(shell, step, &scripts)
}

/// Runs scripts, one machine after the other.
fn run(shell: &Shell, step: &str, scripts: &[Script]) -> Result<Tally> {
    ensure!(!scripts.is_empty(), "there is no such script in tests/vm");
    let mut tally = Tally::default();
    for script in scripts {
        // With a filter on tests' names, scripts without tests are left out.
        if shell.filter.is_some() && script.head("tests").is_empty() {
            continue;
        }
        if !script.head("host").is_empty() && !rustix::process::geteuid().is_root() {
            tally.add(Tally::skip(format!("vm-{}", script.name), "root on this machine, for the server"));
            continue;
        }
        match boot::run(shell, script) {
            Ok(mut found) => {
                for failure in &mut found.failures {
                    failure.why = format!("in {}: {}", script.name, failure.why);
                    failure.name = match failure.name.as_str() {
                        "" => format!("{SCRIPT}{}", script.name),
                        // No filter selects a check of a script that has no tests.
                        check if script.head("tests").is_empty() => format!("{SCRIPT}{}: {check}", script.name),
                        test => format!("{step}/{test}"),
                    };
                }
                // Other names than on other machines, where these tests may be skipped: the virtual machine is made for them.
                for skip in &mut found.skips {
                    let test = skip.name.split_once('/').map_or(skip.name.as_str(), |(_package, test)| test);
                    skip.name = format!("vm-{}/{test}", script.name);
                }
                tally.add(found);
            }
            Err(error) => tally.fail(format!("{SCRIPT}{}", script.name), format!("{error:#}")),
        }
    }
    Ok(tally)
}
