//! `cargo xtask deb`: the library for C as a Debian package, and the step `deb`, which installs it in an empty root.
//!
//! The package has what `cargo xtask install` installs. `dpkg-deb` builds it, so nothing but Debian's own `dpkg` is needed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::capi;
use crate::dist;
use crate::shell::{Ran, Shell, quoted};
use crate::tally::Tally;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Builds the package.
pub(crate) fn deb() -> Result<bool> {
    let package = build(&Shell::new(false)?)?;
    println!("the package is {}", package.display());
    Ok(true)
}

fn build(shell: &Shell) -> Result<PathBuf> {
    let folder = shell.target.join("deb");
    let stage = folder.join("stage");
    if stage.exists() {
        // A file of an earlier version must not be in it.
        fs::remove_dir_all(&stage)?;
    }
    let (control, documents) = (stage.join("DEBIAN"), stage.join("usr/share/doc/libpagemill"));
    fs::create_dir_all(&control)?;
    fs::create_dir_all(&documents)?;
    capi::install_below(shell, &stage.join("usr"))?;
    fs::write(documents.join("copyright"), copyright(shell)?)?;
    let architecture = shell.command("dpkg").arg("--print-architecture").run("deb-architecture")?.expect_ok()?.text;
    let architecture = architecture.trim();
    let glibc = glibc(shell, ["lib/libpagemill.so", "bin/pagemill-kmod"].map(|file| stage.join("usr").join(file)))?;
    let fields = format!(
        "Package: libpagemill\nVersion: {VERSION}\nArchitecture: {architecture}\nSection: libdevel\nPriority: optional\n\
         Maintainer: the authors of Pagemill\nDepends: libc6 (>= {glibc}), libgcc-s1\nSuggests: gcc, pkg-config\n\
         Description: memory pages in bulk\n Hundreds of aligned 4 KiB pages in one call, from any thread, and freed by address alone.\n \
         The package has pagemill.h, the shared and the static library, headers under the Linux kernel's names, pagemill-kmod, which runs \
         modules of the kernel in a process, and descriptions for pkg-config.\n"
    );
    fs::write(control.join("control"), fields)?;
    // The system's linker looks for new libraries then.
    fs::write(control.join("triggers"), "activate-noawait ldconfig\n")?;
    // Whatever this user's umask is.
    shell.command("chmod").args(["-R", "u=rwX,go=rX"]).arg(&stage).run("deb-chmod")?.expect_ok()?;
    let package = folder.join(format!("libpagemill_{VERSION}_{architecture}.deb"));
    let build = shell.command("dpkg-deb").args(["--root-owner-group", "--build"]).arg(&stage).arg(&package);
    build.run("deb-build")?.expect_ok()?;
    Ok(package)
}

/// The licences: Pagemill's own, and those of what is linked into the library and into pagemill-kmod.
fn copyright(shell: &Shell) -> Result<String> {
    let mit = fs::read_to_string(shell.root.join("LICENSE-MIT"))?;
    let others = dist::licences(shell, "pagemill-linux", &[])?;
    Ok(format!(
        "Pagemill is licensed under MIT or Apache 2.0 (/usr/share/common-licenses/Apache-2.0), at your choice.\n\n{mit}\n\
         The library and pagemill-kmod have these within them:\n\n{others}"
    ))
}

/// The oldest glibc that has every symbol which these files use.
fn glibc(shell: &Shell, files: [PathBuf; 2]) -> Result<String> {
    let needs = shell.command("objdump").arg("-T").args(files).run("deb-symbols")?.expect_ok()?.text;
    let versions = needs.split("GLIBC_2.").skip(1).filter_map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next());
    let newest = versions.filter_map(|minor| minor.parse::<u32>().ok()).max();
    Ok(format!("2.{}", newest.context("the library and the program use symbols of glibc")?))
}

/// Builds the package, installs it below an empty root, compiles an example with it, and removes it.
pub(crate) fn check(shell: &Shell) -> Result<Tally> {
    let package = build(shell)?;
    let folder = tempfile::tempdir()?;
    let root = folder.path().join("root");
    let state = root.join("var/lib/dpkg");
    for name in ["info", "triggers", "updates"] {
        fs::create_dir_all(state.join(name))?;
    }
    fs::write(state.join("status"), "")?;
    // dpkg looks for programs of the administrator's, which other users need not have in their path. The C library is not in the root,
    // and need not be: the programs run with this system's.
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH")?);
    let dpkg = |action: &str, what: &Path| -> Result<Ran> {
        let dpkg = shell.command("dpkg").arg("--root").arg(&root).arg("--log").arg(folder.path().join("log"));
        let dpkg = dpkg.args(["--force-depends", "--force-not-root", action]).arg(what).env("PATH", &path);
        dpkg.run("deb-dpkg")?.expect_ok()
    };
    dpkg("--install", &package)?;
    ensure!(root.join("usr/share/doc/libpagemill/copyright").exists(), "the package has no file `copyright`");
    let source = shell.root.join("crates/pagemill-capi/examples/c/iovec.c");
    let libraries = root.join("usr/lib");
    for (name, found) in [("pagemill", libraries.as_path()), ("pagemill-static", Path::new(""))] {
        let program = folder.path().join(name);
        let compile = format!("cc {} $(pkg-config --cflags --libs {name}) -o {}", quoted(&source), quoted(&program));
        let compile = shell.command("sh").args(["-eu", "-c", &compile]);
        compile.env("PKG_CONFIG_LIBDIR", libraries.join("pkgconfig")).run("deb-compile")?.expect_ok()?;
        shell.command(&program).env("LD_LIBRARY_PATH", found).run("deb-program")?.expect_ok()?;
    }
    dpkg("--remove", Path::new("libpagemill"))?;
    ensure!(!root.join("usr").exists(), "the package left something in {}", root.display());
    Ok(Tally::pass("installed in an empty root, an example linked with both libraries, removed"))
}
