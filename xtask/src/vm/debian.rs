//! Debian packages that are downloaded and unpacked, not installed: kernels, and the libraries of programs for another processor.
//! They stay in cargo's target directory, so that a second run needs no network.
//!
//! apt reads the machine's sources, but keeps separate lists here. So the machine's configuration does not change (`dpkg
//! --add-architecture` would affect every use of apt), and root is not needed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::Arch;
use crate::shell::{Cmd, Shell};

impl Arch {
    /// Debian's name for it.
    fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
        }
    }
}

/// A kernel with its modules, unpacked.
pub(super) struct Kernel {
    /// The folder that stands for `/`.
    pub(super) root: PathBuf,
    pub(super) version: String,
}

impl Kernel {
    /// The kernel that `package` depends on, or else the release's ordinary one.
    pub(super) fn fetch(shell: &Shell, arch: Arch, package: Option<&str>) -> Result<Self> {
        let ordinary = format!("linux-image-{}", arch.debian());
        let package = package.unwrap_or(&ordinary);
        let root = unpacked(shell, arch, package, |apt, folder| {
            let depends = apt.command("apt-cache").arg("depends").arg(package).run("vm-package")?.expect_ok()?;
            let kernel = depends.text.lines().find_map(|line| line.trim().strip_prefix("Depends: "));
            let kernel = kernel.with_context(|| format!("{package} depends on no kernel"))?.to_owned();
            apt.unpack(&[kernel.as_str()], folder)?;
            let version = version(folder)?;
            shell.command("/sbin/depmod").arg("-b").arg(folder).arg(version).run("vm-depmod")?.expect_ok()?;
            Ok(())
        })?;
        Ok(Self { version: version(&root)?, root })
    }

    pub(super) fn image(&self) -> PathBuf {
        self.root.join(format!("boot/vmlinuz-{}", self.version))
    }
}

fn version(root: &Path) -> Result<String> {
    let modules = fs::read_dir(root.join("lib/modules"))?.next().context("a kernel without modules")??;
    Ok(modules.file_name().to_string_lossy().into_owned())
}

/// The shell with its commands, and the C library, for `arch`.
pub(super) fn userland(shell: &Shell, arch: Arch) -> Result<PathBuf> {
    let name = format!("userland-{}", arch.debian());
    unpacked(shell, arch, &name, |apt, folder| apt.unpack(&["busybox-static", "libc6", "libgcc-s1"], folder))
}

/// A folder with these files of Linux's source, which a package `linux-source-...` has.
pub(crate) fn source_files(shell: &Shell, package: &str, files: &[&str]) -> Result<PathBuf> {
    let folder = shell.own_target("vm-debian").join(package);
    if folder.exists() && files.iter().any(|file| !folder.join(file).exists()) {
        // An older list of files.
        fs::remove_dir_all(&folder)?;
    }
    // The package is the same for every processor.
    unpacked(shell, Arch::X86_64, package, |apt, folder| {
        apt.unpack(&[package], folder)?;
        let archive = folder.join(format!("usr/src/{package}.tar.xz"));
        let tar = shell.command("tar").arg("-xJf").arg(&archive).arg("-C").arg(folder).arg("--strip-components=1");
        tar.args(files.iter().map(|file| format!("{package}/{file}"))).run("modules-unpack")?.expect_ok()?;
        fs::remove_file(archive)?;
        Ok(())
    })
}

/// The folder of this name. If it does not exist, `fill` fills it; it appears under its name only once it is complete.
fn unpacked(
    shell: &Shell,
    arch: Arch,
    name: &str,
    fill: impl FnOnce(&Apt<'_>, &Path) -> Result<()>,
) -> Result<PathBuf> {
    let folder = shell.own_target("vm-debian").join(name);
    if folder.exists() {
        return Ok(folder);
    }
    let begun = folder.with_extension("begun");
    if begun.exists() {
        fs::remove_dir_all(&begun)?;
    }
    fs::create_dir_all(&begun)?;
    let apt = Apt::new(shell, arch)?;
    fill(&apt, &begun).with_context(|| format!("bringing {name} of Debian's packages"))?;
    fs::rename(&begun, &folder)?;
    fs::remove_dir_all(apt.state)?;
    Ok(folder)
}

/// apt with separate lists.
struct Apt<'a> {
    shell: &'a Shell,
    arch: &'static str,
    state: PathBuf,
}

impl<'a> Apt<'a> {
    fn new(shell: &'a Shell, arch: Arch) -> Result<Self> {
        let arch = arch.debian();
        let apt = Self { shell, arch, state: shell.own_target("vm-debian").join(format!("apt-{arch}")) };
        for folder in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(apt.state.join(folder))?;
        }
        fs::write(apt.state.join("status"), "")?;
        apt.command("apt-get").arg("update").run("vm-apt-update")?.expect_ok()?;
        Ok(apt)
    }

    fn command(&self, program: &str) -> Cmd<'a> {
        let state = self.state.display();
        let options = [
            format!("Dir::State={state}"),
            format!("Dir::State::status={state}/status"),
            format!("Dir::Cache={state}/cache"),
            format!("APT::Architecture={}", self.arch),
            format!("APT::Architectures={}", self.arch),
            // The user `_apt` may not be allowed to write here.
            "APT::Sandbox::User=".to_owned(),
        ];
        self.shell.command(program).args(options.iter().flat_map(|option| ["-o", option]))
    }

    /// Downloads packages and unpacks them.
    fn unpack(&self, packages: &[&str], folder: &Path) -> Result<()> {
        let download = self.command("apt-get").current_dir(&self.state).arg("download").args(packages);
        download.run("vm-download")?.expect_ok()?;
        for entry in fs::read_dir(&self.state)? {
            let path = entry?.path();
            if path.extension().is_some_and(|end| end == "deb") {
                let unpack = self.shell.command("dpkg-deb").arg("-x").arg(&path).arg(folder);
                unpack.run("vm-unpack")?.expect_ok()?;
            }
        }
        Ok(())
    }
}
