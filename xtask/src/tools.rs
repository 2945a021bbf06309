//! What the checks need of the machine: Debian packages, parts of Rust and programs of crates. [`provide`] names what is missing,
//! and installs it where it may (packages as root with apt-get, parts of Rust with rustup, programs with `cargo install`).

use std::process::{Command, Stdio};

use anyhow::Result;

use crate::shell::{Cmd, Shell};

/// Something that a step cannot do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// A Debian package, and a command that succeeds when the package is installed.
    Deb(&'static str, &'static [&'static str]),
    /// A part of Rust, a command that succeeds when it is installed, and the arguments with which rustup installs it. The
    /// commands work without rustup, which a machine may lack.
    Rust(&'static str, &'static [&'static str], &'static [&'static str]),
    /// A program of a crate, its version, and a command that succeeds when it is installed. `cargo install` installs it.
    Crate(&'static str, &'static str, &'static [&'static str]),
}

/// A C compiler: the linker's driver, and the peers of `pagemill bench`.
pub(crate) const GCC: Need = Need::Deb("gcc", &["gcc", "--version"]);
/// A C++ compiler, for two of the peers and for libFuzzer.
pub(crate) const GXX: Need = Need::Deb("g++", &["g++", "--version"]);
/// Builds one of the peers.
pub(crate) const MAKE: Need = Need::Deb("make", &["make", "--version"]);
/// The second C and C++ compiler that C programs of the tests are compiled with.
pub(crate) const CLANG: Need = Need::Deb("clang", &["clang", "--version"]);
/// What clang links programs under AddressSanitizer with.
pub(crate) const CLANG_RT: Need =
    Need::Deb("libclang-rt-dev", &["sh", "-c", "test -d $(clang -print-resource-dir)/lib/linux"]);
/// Runs the examples in C, and sees each fault of their memory.
pub(crate) const VALGRIND: Need = Need::Deb("valgrind", &["valgrind", "--version"]);
/// Another allocator, which a C program has beside the library.
pub(crate) const JEMALLOC: Need =
    Need::Deb("libjemalloc2", &["sh", "-c", "test -z \"$(LD_PRELOAD=libjemalloc.so.2 true 2>&1)\""]);
/// Says how a C program is compiled with an installed library.
pub(crate) const PKG_CONFIG: Need = Need::Deb("pkg-config", &["pkg-config", "--version"]);
/// Builds and installs Debian packages.
pub(crate) const DPKG: Need = Need::Deb("dpkg", &["dpkg-deb", "--version"]);
/// Writes pagemill.h.
pub(crate) const CBINDGEN: Need =
    Need::Crate("cbindgen", "0.29.4", &["sh", "-c", "cbindgen --version | grep -q ' 0.29.4$'"]);
/// Lists the files that belong to the project.
pub(crate) const GIT: Need = Need::Deb("git", &["git", "--version"]);
/// Reads the man pages.
pub(crate) const MANDOC: Need = Need::Deb("mandoc", &["sh", "-c", "command -v mandoc"]);
/// Names the frames that `xtask/leaks-allowed` tells AddressSanitizer's detector of leaks to pass over.
pub(crate) const LLVM: Need = Need::Deb("llvm", &["llvm-symbolizer", "--version"]);
/// Makes and opens volumes.
pub(crate) const CRYPTSETUP: Need = Need::Deb("cryptsetup-bin", &["cryptsetup", "--version"]);

/// Writes, and verifies what it wrote.
pub(crate) const FIO: Need = Need::Deb("fio", &["fio", "--version"]);

/// The oldest Rust that the library builds with: `rust-version` in Cargo.toml. The step `oldest` compares the two.
pub(crate) const OLDEST: &str = "1.89";

pub(crate) const OLDEST_TOOLCHAIN: Need = Need::Rust(
    "the Rust toolchain 1.89",
    &["cargo", "+1.89", "--version"],
    &["toolchain", "install", OLDEST, "--profile", "minimal"],
);
pub(crate) const RUSTFMT: Need =
    Need::Rust("the Rust component rustfmt", &["rustfmt", "--version"], &["component", "add", "rustfmt"]);
pub(crate) const CLIPPY: Need =
    Need::Rust("the Rust component clippy", &["clippy-driver", "--version"], &["component", "add", "clippy"]);
/// A step that needs one of nightly's components names this one before it: they are installed in that order.
pub(crate) const NIGHTLY: Need = Need::Rust(
    "the nightly toolchain",
    &["cargo", "+nightly", "--version"],
    &["toolchain", "install", "nightly", "--profile", "minimal"],
);
pub(crate) const MIRI: Need = Need::Rust(
    "nightly's Rust component miri",
    &["cargo", "+nightly", "miri", "--version"],
    &["component", "add", "--toolchain", "nightly", "miri"],
);
pub(crate) const RUST_SRC: Need = Need::Rust(
    "nightly's Rust component rust-src",
    &["sh", "-c", "test -d $(rustc +nightly --print sysroot)/lib/rustlib/src/rust/library"],
    &["component", "add", "--toolchain", "nightly", "rust-src"],
);
pub(crate) const X86_64_BARE: Need = Need::Rust(
    "the Rust target x86_64-unknown-none",
    &["sh", "-c", "test -d $(rustc --print sysroot)/lib/rustlib/x86_64-unknown-none/lib"],
    &["target", "add", "x86_64-unknown-none"],
);
pub(crate) const AARCH64: Need = Need::Rust(
    "the Rust target aarch64-unknown-linux-gnu",
    &["sh", "-c", "test -d $(rustc --print sysroot)/lib/rustlib/aarch64-unknown-linux-gnu/lib"],
    &["target", "add", "aarch64-unknown-linux-gnu"],
);

pub(crate) const WINDOWS: Need = Need::Rust(
    "the Rust target x86_64-pc-windows-gnu",
    &["sh", "-c", "test -d $(rustc --print sysroot)/lib/rustlib/x86_64-pc-windows-gnu/lib"],
    &["target", "add", "x86_64-pc-windows-gnu"],
);

impl Need {
    /// The name that messages use.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Deb(package, _) => format!("the Debian package {package}"),
            Self::Rust(name, ..) => name.to_owned(),
            Self::Crate(name, version, _) => format!("the program of the crate {name} {version}"),
        }
    }

    /// True when the machine has it.
    fn is_here(self) -> bool {
        let (Self::Deb(_, probe) | Self::Rust(_, probe, _) | Self::Crate(_, _, probe)) = self;
        succeeds(probe)
    }
}

/// Looks for each need, says what is missing, and installs it when `may_install`. Returns what is still missing.
pub(crate) fn provide(shell: &Shell, needs: &[Need], may_install: bool) -> Result<Vec<Need>> {
    let mut missing: Vec<Need> = Vec::new();
    for need in needs {
        if !missing.contains(need) {
            missing.push(*need);
        }
    }
    missing.retain(|need| !need.is_here());
    if missing.is_empty() {
        println!("tools: everything that the checks need is here");
        return Ok(missing);
    }
    println!("tools: missing here:");
    for need in &missing {
        println!("    {}", need.name());
    }
    if !may_install {
        println!("tools: not installing anything, as asked");
        return Ok(missing);
    }
    install_packages(shell, &missing)?;
    install_rust(shell, &missing)?;
    install_crates(shell, &missing)?;
    missing.retain(|need| !need.is_here());
    for need in &missing {
        println!("tools: still missing: {}; the steps that need it are skipped", need.name());
    }
    Ok(missing)
}

fn install_packages(shell: &Shell, missing: &[Need]) -> Result<()> {
    let package = |need: &Need| if let Need::Deb(package, _) = need { Some(*package) } else { None };
    let packages: Vec<_> = missing.iter().filter_map(package).collect();
    if packages.is_empty() {
        return Ok(());
    }
    let by_hand = format!("apt-get install {}", packages.join(" "));
    if !rustix::process::geteuid().is_root() || !succeeds(&["apt-get", "--version"]) {
        println!("tools: installing packages takes root and apt-get: {by_hand}");
        return Ok(());
    }
    println!("tools: {by_hand}");
    attempt("apt-get update", shell.command("apt-get").arg("update"))?;
    let install = shell.command("apt-get").env("DEBIAN_FRONTEND", "noninteractive");
    let install = install.args(["install", "--yes", "--no-install-recommends"]).args(&packages);
    attempt("apt-get install", install)
}

fn install_rust(shell: &Shell, missing: &[Need]) -> Result<()> {
    let has_rustup = succeeds(&["rustup", "--version"]);
    for need in missing {
        let Need::Rust(_, _, args) = need else { continue };
        let by_hand = format!("rustup {}", args.join(" "));
        if !has_rustup {
            println!("tools: there is no rustup here; with it: {by_hand}");
            continue;
        }
        println!("tools: {by_hand}");
        attempt(&by_hand, shell.command("rustup").args(*args))?;
    }
    Ok(())
}

fn install_crates(shell: &Shell, missing: &[Need]) -> Result<()> {
    for need in missing {
        let Need::Crate(name, version, _) = need else { continue };
        let args = format!("install {name} --version {version} --locked");
        println!("tools: cargo {args}");
        // A folder for the build that is not the project's, and is not kept.
        let target = tempfile::tempdir()?;
        attempt(&format!("cargo {args}"), shell.cargo(&args).env("CARGO_TARGET_DIR", target.path()))?;
    }
    Ok(())
}

/// Runs a command that may fail: what it was to install is then still missing.
fn attempt(name: &str, command: Cmd<'_>) -> Result<()> {
    let ran = command.run(&name.split(' ').take(2).collect::<Vec<_>>().join("-"))?;
    if !ran.is_ok() {
        println!("tools: {name} {}", ran.how_it_ended());
    }
    Ok(())
}

/// True when the command can be started and ends well.
fn succeeds(command: &[&str]) -> bool {
    let mut program = Command::new(command[0]);
    program.args(&command[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    program.status().is_ok_and(|status| status.success())
}
