//! The library for C: `cargo xtask install`, and the step `header`.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::builds::BUILD_LIMIT;
use crate::shell::Shell;
use crate::tally::Tally;

#[path = "../../crates/pagemill-linux/install.rs"]
mod kernel_shaped;
#[path = "../../crates/pagemill-capi/install.rs"]
mod libraries;

const FOLDER: &str = "crates/pagemill-capi";
const LINUX_FOLDER: &str = "crates/pagemill-linux";

/// Builds the library as its users do, and installs it.
pub(crate) fn install(prefix: &Path) -> Result<bool> {
    // The commands run in the repository's root; the user may be elsewhere.
    let prefix = std::path::absolute(prefix).with_context(|| prefix.display().to_string())?;
    println!("cargo builds the library, which takes about a minute");
    install_below(&Shell::new(false)?, &prefix)?;
    println!("pagemill.h, libpagemill.so and libpagemill.a are below {}", prefix.display());
    println!(
        "The kernel's names are in include/pagemill-linux and libpagemill-linux.a there, and bin/pagemill-kmod runs modules"
    );
    Ok(true)
}

/// The same, in a run that is under way.
pub(crate) fn install_below(shell: &Shell, prefix: &Path) -> Result<()> {
    shell
        .cargo("build --locked --release -p pagemill-capi -p pagemill-linux")
        .limit(BUILD_LIMIT)
        .run("install")?
        .expect_ok()?;
    let archive = shell.target.join("release/libpagemill_capi.a");
    libraries::install(&archive, &shell.root.join(FOLDER), env!("CARGO_PKG_VERSION"), prefix)?;
    kernel_shaped::install(&shell.root.join(LINUX_FOLDER), env!("CARGO_PKG_VERSION"), prefix)?;
    let programs = prefix.join("bin");
    fs::create_dir_all(&programs)?;
    libraries::replace(&programs.join("pagemill-kmod"), |place| {
        fs::copy(shell.target.join("release/pagemill-kmod"), place).map(drop)
    })?;
    Ok(())
}

/// Compares pagemill.h with what cbindgen makes of the crate.
pub(crate) fn header(shell: &Shell) -> Result<Tally> {
    let header = shell.command("cbindgen").current_dir(shell.root.join(FOLDER));
    let header = header.args(["--quiet", "--verify", "--output", "include/pagemill.h"]).run("header")?;
    header
        .expect_ok()
        .context("pagemill.h is not that of the crate: run `cbindgen -o include/pagemill.h` in its folder")?;
    Ok(Tally::pass("pagemill.h is what cbindgen writes"))
}
