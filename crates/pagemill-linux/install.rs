//! Compiles the library `libpagemill-linux.a`, and puts it, its headers and its descriptions for `pkg-config` below a prefix that has
//! `pagemill.h` already. `cargo xtask install` and the tests include this file.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Error};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Installs version `version` below `prefix`. `folder` is that of this crate.
pub(crate) fn install(folder: &Path, version: &str, prefix: &Path) -> io::Result<()> {
    let (include, libraries) = (prefix.join("include"), prefix.join("lib"));
    let headers = include.join("pagemill-linux");
    copy_folder(&folder.join("include/pagemill-linux"), &headers)?;
    let archive = libraries.join("libpagemill-linux.a");
    compile(&folder.join("src"), [&headers, &include], &archive)?;
    for (name, below, libs) in [
        ("pagemill-linux", "pagemill", "-L${libdir} -lpagemill-linux"),
        ("pagemill-linux-static", "pagemill-static", "${libdir}/libpagemill-linux.a"),
    ] {
        let description = format!(
            "prefix=${{pcfiledir}}/../..\nlibdir=${{prefix}}/lib\nincludedir=${{prefix}}/include\n\n\
             Name: {name}\nDescription: Pages in bulk, under the names of the Linux kernel\nVersion: {version}\n\
             Requires: {below}\nCflags: -I${{includedir}}/pagemill-linux\nLibs: {libs}\n"
        );
        fs::write(libraries.join("pkgconfig").join(format!("{name}.pc")), description)?;
    }
    Ok(())
}

fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let place = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &place)?;
        } else {
            fs::copy(entry.path(), place)?;
        }
    }
    Ok(())
}

/// Compiles the files in C of a folder into a static library.
fn compile(sources: &Path, include: [&Path; 2], archive: &Path) -> io::Result<()> {
    let objects = archive.with_extension("objects");
    fs::create_dir_all(&objects)?;
    let files: Vec<_> = fs::read_dir(sources)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
    let mut made: Vec<PathBuf> = Vec::new();
    for source in files.iter().filter(|file| file.extension() == Some(OsStr::new("c"))) {
        let name = source.file_name().expect("a file in a folder has a name");
        let object = objects.join(name).with_extension("o");
        // In the folder, so that warnings name a file and not a place on this machine.
        let mut cc = Command::new("cc");
        cc.current_dir(sources).args(["-std=gnu11", "-O2", "-fPIC", "-Wall", "-Wextra", "-c"]);
        // For a user, what a newer compiler warns of is no error.
        cc.args(cfg!(test).then_some("-Werror"));
        cc.arg(name).arg("-o").arg(&object);
        run(cc.args(include.map(|folder| format!("-I{}", folder.display()))), "gcc")?;
        made.push(object);
    }
    made.sort();
    // Archives grow when they are written again.
    match fs::remove_file(archive) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    run(Command::new("ar").arg("rcs").arg(archive).args(&made), "binutils")?;
    fs::remove_dir_all(objects)
}

fn run(command: &mut Command, package: &str) -> io::Result<()> {
    let ran = command
        .output()
        .map_err(|error| Error::other(format!("{command:?}: {error}; Debian: apt-get install {package}")))?;
    let said = String::from_utf8_lossy(&ran.stderr);
    if ran.status.success() { Ok(()) } else { Err(Error::other(format!("{command:?}: {}\n{said}", ran.status))) }
}
