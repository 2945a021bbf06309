//! `cargo xtask dist`: the program as it is handed to others, with its man pages, completions and licences.
//!
//! The folder is laid out as one below which programs are installed, such as /usr/local.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::builds::BUILD_LIMIT;
use crate::papers::{self, Package};
use crate::shell::Shell;

/// The beginnings of the names of files that have a licence's text.
const LICENCE_FILES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"];

/// Builds the program with the profile `dist`, which gets these arguments, and fills the folder.
pub(crate) fn dist(folder: Option<&Path>, args: &[String]) -> Result<bool> {
    let shell = Shell::new(false)?;
    let default = shell.target.join("dist/pagemill");
    // Cargo puts the program itself at the default's place.
    let folder = folder.map_or_else(|| default.with_file_name("pagemill-files"), Path::to_owned);
    // The commands run in the repository's root; the user may be elsewhere.
    let folder = std::path::absolute(&folder).with_context(|| folder.display().to_string())?;
    // With `--target` Cargo builds elsewhere, and the program of an earlier build would be taken for this one's.
    remove(&default)?;
    let build = shell.cargo("build --locked --profile dist -p pagemill-cli");
    build.args(args).limit(BUILD_LIMIT).run("dist")?.expect_ok()?;
    let program = folder.join("bin/pagemill");
    copy(&default, &program)?;
    remove_man_pages(&folder.join("share/man/man1"))?;
    shell.command(&program).arg("generate").arg(&folder).run("dist-generate")?.expect_ok()?;
    let documents = folder.join("share/doc/pagemill");
    for name in ["LICENSE-MIT", "LICENSE-APACHE", "README.md", "CHANGELOG.md"] {
        copy(&shell.root.join(name), &documents.join(name))?;
    }
    fs::write(documents.join("LICENSES-of-dependencies"), licences(&shell, "pagemill-cli", args)?)?;
    println!("the program, its man pages, completions and licences are in {}", folder.display());
    Ok(true)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to.parent().unwrap_or(to)).with_context(|| to.display().to_string())?;
    // First under another name: the file may be a program that runs, and an interrupted copy must not look complete.
    let mut name = to.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = to.with_file_name(name);
    let copied = fs::copy(from, &new).and_then(|_| fs::rename(&new, to));
    copied.with_context(|| format!("{} to {}", from.display(), to.display()))
}

/// Removes a file that may not be there.
fn remove(file: &Path) -> Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error).with_context(|| file.display().to_string()),
        _ => Ok(()),
    }
}

/// Removes the man pages of an earlier run: the program may have had commands that it has no more.
fn remove_man_pages(folder: &Path) -> Result<()> {
    if !folder.exists() {
        return Ok(());
    }
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        if name.to_str().is_some_and(|name| name.starts_with("pagemill") && name.ends_with(".1")) {
            remove(&folder.join(name))?;
        }
    }
    Ok(())
}

/// The licences of everything that is linked into a package of the workspace. Most of them must go where the program goes.
pub(crate) fn licences(shell: &Shell, package: &str, args: &[String]) -> Result<String> {
    let tree = format!("tree --locked -p {package} -e normal --prefix none --format {{p}}");
    let linked = shell.cargo(&tree).args(args).run("dist-tree")?.expect_ok()?.text;
    // `name v1.2.3`, and for a crate of this workspace its folder.
    let linked: BTreeSet<_> = linked.lines().filter(|line| !line.contains('(')).map(str::trim).collect();
    let key = |package: &Package| format!("{} v{}", package.name, package.version);
    // A package of several manifests is listed for each.
    let packages: BTreeMap<_, _> = papers::all_packages(shell)?.into_iter().map(|it| (key(&it), it)).collect();
    let mut text = String::new();
    for (_, package) in packages.iter().filter(|(key, _)| linked.contains(key.as_str())) {
        let licence = package.license.as_deref().unwrap_or("see below");
        write!(text, "{:=<80}\n{} {}: {licence}\n\n", "", package.name, package.version)?;
        for file in licence_files(package)? {
            // A licence that is not in UTF-8 is still readable.
            text.push_str(&String::from_utf8_lossy(&fs::read(file)?));
            text.push('\n');
        }
    }
    ensure!(text.contains("libc "), "cargo tree named no dependency:\n{linked:?}");
    Ok(text)
}

fn licence_files(package: &Package) -> Result<Vec<PathBuf>> {
    let folder = package.manifest_path.parent().context("a manifest lies in a folder")?;
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().to_uppercase();
        if entry.file_type()?.is_file() && LICENCE_FILES.iter().any(|beginning| name.starts_with(beginning)) {
            files.push(entry.path());
        }
    }
    files.sort();
    Ok(files)
}
