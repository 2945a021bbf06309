//! Puts the libraries, the header and the descriptions for `pkg-config` below a prefix. `cargo xtask install` and the tests of this crate
//! include this file.
//!
//! The shared library is linked here, from the static one: rustc's own way (`cdylib`) passes the linker a version script without names,
//! which GNU ld and lld refuse to combine with another.

use std::fs;
use std::io::{self, Error};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

/// The shared library's name for programs that were linked with it: changes when they must be linked anew.
const SONAME: &str = "libpagemill.so.0";

/// What Rust's standard library needs, as `rustc --print native-static-libs` says.
pub(crate) const SYSTEM: &str = "-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc";

/// Installs the library `archive`, of this version, below `prefix`. `folder` is that of this crate.
pub(crate) fn install(archive: &Path, folder: &Path, version: &str, prefix: &Path) -> io::Result<()> {
    let libraries = prefix.join("lib");
    let (include, descriptions) = (prefix.join("include"), libraries.join("pkgconfig"));
    fs::create_dir_all(&include)?;
    fs::create_dir_all(&descriptions)?;
    fs::copy(folder.join("include/pagemill.h"), include.join("pagemill.h"))?;
    replace(&libraries.join("libpagemill.a"), |place| fs::copy(archive, place).map(drop))?;
    let shared = format!("libpagemill.so.{version}");
    replace(&libraries.join(&shared), |place| link(archive, &folder.join("pagemill.map"), place))?;
    for (name, target) in [(SONAME, shared.as_str()), ("libpagemill.so", SONAME)] {
        replace(&libraries.join(name), |place| symlink(target, place))?;
    }
    let description = |name: &str, libs: &str| {
        format!(
            "prefix=${{pcfiledir}}/../..\nlibdir=${{prefix}}/lib\nincludedir=${{prefix}}/include\n\n\
             Name: {name}\nDescription: Pages in bulk\nVersion: {version}\nCflags: -I${{includedir}}\nLibs: {libs}\n"
        )
    };
    fs::write(descriptions.join("pagemill.pc"), description("pagemill", "-L${libdir} -lpagemill"))?;
    let of_static = description("pagemill-static", &format!("${{libdir}}/libpagemill.a {SYSTEM}"));
    fs::write(descriptions.join("pagemill-static.pc"), of_static)
}

/// Makes a file beside its place and moves it there: a program that has the old one open keeps it.
pub(crate) fn replace(place: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let mut new = place.as_os_str().to_owned();
    new.push(".new");
    let new = Path::new(&new);
    match fs::remove_file(new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    make(new)?;
    fs::rename(new, place)
}

/// Links the shared library, with the symbols and versions of `map` and no others. It stays loaded once it is: pages that are handed out
/// may come back later.
fn link(archive: &Path, map: &Path, shared: &Path) -> io::Result<()> {
    let mut cc = Command::new("cc");
    cc.arg("-shared").arg(format!("-Wl,-soname,{SONAME}"));
    cc.arg(format!("-Wl,--version-script={},--no-undefined-version", map.display()));
    cc.args(["-Wl,-z,defs,-z,relro,-z,now,-z,nodelete", "-Wl,--gc-sections,--strip-debug", "-Wl,--whole-archive"]);
    cc.arg(archive).arg("-Wl,--no-whole-archive").args(SYSTEM.split(' ')).arg("-o").arg(shared);
    let ran = cc
        .output()
        .map_err(|error| Error::other(format!("cc links the shared library: {error}; Debian: apt-get install gcc")))?;
    let said = String::from_utf8_lossy(&ran.stderr);
    if ran.status.success() { Ok(()) } else { Err(Error::other(format!("{cc:?}: {}\n{said}", ran.status))) }
}
