//! What the checks need of the machine: Debian packages and Rust components. What is
//! missing is named, and installed where that is possible (root and apt-get, rustup).

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

use anyhow::Result;

use crate::shell::Shell;

/// Something that a step cannot do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Need {
    /// A Debian package, and a command that succeeds when it is there.
    Deb(&'static str, &'static [&'static str]),
    /// A component of the toolchain in use.
    Component(&'static str),
    /// A component of the nightly toolchain; an empty name is the toolchain itself.
    Nightly(&'static str),
    /// The standard library for a target.
    Target(&'static str),
    /// A toolchain by its version.
    Toolchain(&'static str),
}

/// A C compiler: the linker's driver, and the peers of `pagemill bench`.
pub(crate) const GCC: Need = Need::Deb("gcc", &["gcc", "--version"]);
/// A C++ compiler, for two of the peers and for libFuzzer.
pub(crate) const GXX: Need = Need::Deb("g++", &["g++", "--version"]);
/// Builds one of the peers.
pub(crate) const MAKE: Need = Need::Deb("make", &["make", "--version"]);
/// Lists the files that belong to the project.
pub(crate) const GIT: Need = Need::Deb("git", &["git", "--version"]);
/// Makes and opens volumes.
pub(crate) const CRYPTSETUP: Need = Need::Deb("cryptsetup-bin", &["cryptsetup", "--version"]);

impl Need {
    /// How it is called when something is said about it.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Deb(package, _) => format!("the Debian package {package}"),
            Self::Component(name) => format!("the Rust component {name}"),
            Self::Nightly("") => "the nightly toolchain".to_owned(),
            Self::Nightly(name) => format!("nightly's Rust component {name}"),
            Self::Target(name) => format!("the Rust target {name}"),
            Self::Toolchain(version) => format!("the Rust toolchain {version}"),
        }
    }

    /// True when the machine has it.
    pub(crate) fn is_here(self) -> bool {
        match self {
            Self::Deb(_, probe) => succeeds(probe),
            Self::Component(name) => has_component("", name),
            Self::Nightly("") => succeeds(&["cargo", "+nightly", "--version"]),
            Self::Nightly(name) => has_component("+nightly", name),
            Self::Target(name) => has_target(name),
            Self::Toolchain(version) => succeeds(&["cargo", &format!("+{version}"), "--version"]),
        }
    }

    /// The rustup command that brings it, if rustup does.
    fn rustup_args(self) -> Option<Vec<&'static str>> {
        Some(match self {
            Self::Deb(..) => return None,
            Self::Component(name) => vec!["component", "add", name],
            Self::Nightly("") => vec!["toolchain", "install", "nightly", "--profile", "minimal"],
            Self::Nightly(name) => vec!["component", "add", "--toolchain", "nightly", name],
            Self::Target(name) => vec!["target", "add", name],
            Self::Toolchain(version) => vec!["toolchain", "install", version, "--profile", "minimal"],
        })
    }
}

/// Looks for each need, says what is missing, and installs it when `may_install`.
/// Returns what is still missing.
pub(crate) fn provide(shell: &Shell, needs: &[Need], may_install: bool) -> Result<BTreeSet<Need>> {
    let unique: BTreeSet<_> = needs.iter().copied().collect();
    let missing: BTreeSet<_> = unique.into_iter().filter(|need| !need.is_here()).collect();
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
    let left: BTreeSet<_> = missing.into_iter().filter(|need| !need.is_here()).collect();
    for need in &left {
        println!("tools: still missing: {}; the steps that need it are skipped", need.name());
    }
    Ok(left)
}

fn install_packages(shell: &Shell, missing: &BTreeSet<Need>) -> Result<()> {
    let packages: Vec<_> = missing
        .iter()
        .filter_map(|need| match need {
            Need::Deb(package, _) => Some(*package),
            _ => None,
        })
        .collect();
    if packages.is_empty() {
        return Ok(());
    }
    let by_hand = format!("apt-get install {}", packages.join(" "));
    if !is_root() || !succeeds(&["apt-get", "--version"]) {
        println!("tools: installing packages takes root and apt-get: {by_hand}");
        return Ok(());
    }
    println!("tools: {by_hand}");
    let update = shell.command("apt-get").arg("update").run("apt-get-update")?;
    if !update.is_ok() {
        println!("tools: apt-get update {}", update.how_it_ended());
    }
    let mut install = shell.command("apt-get").env("DEBIAN_FRONTEND", "noninteractive");
    install.args(["install", "--yes", "--no-install-recommends"]);
    install.args(&packages);
    let ran = install.run("apt-get-install")?;
    if !ran.is_ok() {
        println!("tools: apt-get install {}", ran.how_it_ended());
    }
    Ok(())
}

fn install_rust(shell: &Shell, missing: &BTreeSet<Need>) -> Result<()> {
    let has_rustup = succeeds(&["rustup", "--version"]);
    // The toolchain comes before its components: `Nightly("")` sorts first.
    for need in missing {
        let Some(args) = need.rustup_args() else { continue };
        let by_hand = format!("rustup {}", args.join(" "));
        if !has_rustup {
            println!("tools: there is no rustup here; with it: {by_hand}");
            continue;
        }
        println!("tools: {by_hand}");
        let mut rustup = shell.command("rustup");
        rustup.args(&args);
        let ran = rustup.run("rustup")?;
        if !ran.is_ok() {
            println!("tools: {by_hand} {}", ran.how_it_ended());
        }
    }
    Ok(())
}

/// True when the command can be started and ends well.
pub(crate) fn succeeds(command: &[&str]) -> bool {
    output_of(command).is_some()
}

/// What a command prints, if it can be started and ends well.
fn output_of(command: &[&str]) -> Option<String> {
    let (program, args) = command.split_first()?;
    let output = Command::new(program).args(args).stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn is_root() -> bool {
    output_of(&["id", "-u"]).is_some_and(|uid| uid.trim() == "0")
}

/// Whether a toolchain has a component, without asking rustup, which may not be
/// there: each component leaves a program or a folder in the toolchain.
fn has_component(toolchain: &str, name: &str) -> bool {
    let tool = |program: &'static str| {
        let mut command = vec![program];
        command.extend((!toolchain.is_empty()).then_some(toolchain));
        command.push("--version");
        succeeds(&command)
    };
    match name {
        "rustfmt" => tool("rustfmt"),
        "clippy" => tool("clippy-driver"),
        "miri" if toolchain.is_empty() => succeeds(&["cargo", "miri", "--version"]),
        "miri" => succeeds(&["cargo", toolchain, "miri", "--version"]),
        "rust-src" => sysroot(toolchain).is_some_and(|root| root.join("lib/rustlib/src/rust/library").is_dir()),
        _ => false,
    }
}

fn has_target(target: &str) -> bool {
    sysroot("").is_some_and(|root| root.join("lib/rustlib").join(target).join("lib").is_dir())
}

/// Where a toolchain lives; `toolchain` is empty or `+name`.
pub(crate) fn sysroot(toolchain: &str) -> Option<std::path::PathBuf> {
    let mut command = vec!["rustc"];
    command.extend((!toolchain.is_empty()).then_some(toolchain));
    command.extend(["--print", "sysroot"]);
    output_of(&command).map(|path| path.trim().into())
}
