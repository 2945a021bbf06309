//! The tests of `pagemill.h`: C programs, compiled as C and as C++ by each compiler that is here, linked with the shared and with the
//! static library from an installed prefix by the words of `pkg-config`, and run.
//!
//! A C and a C++ compiler and `pkg-config` must be there: without them the tests fail, with the packages' names.
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;
use tempfile::TempDir;

#[path = "../install.rs"]
mod install;

/// This crate's folder.
const FOLDER: &str = env!("CARGO_MANIFEST_DIR");

/// A prefix with the library that cargo built for this test.
static PREFIX: LazyLock<TempDir> = LazyLock::new(|| {
    let prefix = tempfile::tempdir().unwrap();
    install::install(&archive(), Path::new(FOLDER), env!("CARGO_PKG_VERSION"), prefix.path()).unwrap();
    prefix
});

/// The static library: beside this program, the newest if an earlier build left another.
fn archive() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let files = fs::read_dir(program.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path());
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("libpagemill_capi") && name.ends_with(".a")
    };
    let newest = files.filter(is_ours).max_by_key(|path| path.metadata().unwrap().modified().unwrap());
    newest.expect("cargo builds the static library beside its tests")
}

/// Runs a command that must be there and must end well. Returns what it wrote.
fn run(command: &mut Command, package: &str) -> Output {
    let ran = command.output().unwrap_or_else(|error| {
        panic!("{command:?}: {error}; these tests need it (Debian: apt-get install {package})")
    });
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{command:?}: {}\n{said}", ran.status);
    ran
}

/// What `pkg-config` says of a package in the prefix.
fn pkg_config(package: &str) -> Vec<String> {
    let mut command = Command::new("pkg-config");
    command.args(["--cflags", "--libs", package]).env("PKG_CONFIG_PATH", PREFIX.path().join("lib/pkgconfig"));
    let words = run(&mut command, "pkg-config").stdout;
    String::from_utf8(words).unwrap().split_whitespace().map(str::to_owned).collect()
}

/// The compilers for C and for C++. Clang's are used where they are there.
fn compilers() -> Vec<[&'static str; 2]> {
    let has_clang = ["clang", "clang++"].iter().all(|name| Command::new(name).arg("--version").output().is_ok());
    if has_clang { vec![["gcc", "g++"], ["clang", "clang++"]] } else { vec![["gcc", "g++"]] }
}

/// Compiles a program of tests/c in every way, and runs each.
fn compile_and_run(name: &str, args: &[&Path]) -> Vec<Output> {
    compile_and_run_file(&Path::new(FOLDER).join("tests/c").join(name), args)
}

fn compile_and_run_file(source: &Path, args: &[&Path]) -> Vec<Output> {
    let mut outputs = Vec::new();
    for [c, cxx] in compilers() {
        for (compiler, dialect) in [(c, ["-std=c11", "-xc"]), (cxx, ["-std=c++17", "-xc++"])] {
            for package in ["pagemill", "pagemill-static"] {
                let folder = tempfile::tempdir().unwrap();
                let program = folder.path().join("program");
                let mut compile = Command::new(compiler);
                compile.args(dialect).args(["-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]);
                compile.arg(source).args(["-xnone", "-o"]).arg(&program).args(pkg_config(package));
                run(&mut compile, compiler);
                let mut command = Command::new(&program);
                command.args(args).env("LD_LIBRARY_PATH", PREFIX.path().join("lib"));
                outputs.push(run(&mut command, ""));
            }
        }
    }
    outputs
}

#[test]
fn pages_come_and_go_in_every_form() {
    for output in compile_and_run("pages.c", &[]) {
        // Of dozens of counts that are refused, the first is warned of.
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(said, "pagemill: a bulk request for -1 blocks is refused: a count is 0 to INT_MAX\n");
    }
}

#[test]
fn the_program_in_the_readme_runs() {
    let readme = fs::read_to_string(Path::new(FOLDER).join("README.md")).unwrap();
    let program = readme.split("```c\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("program.c");
    fs::write(&source, program).unwrap();
    compile_and_run_file(&source, &[]);
}

#[test]
fn misuse_is_refused_and_changes_nothing() {
    compile_and_run("misuse.c", &[]);
}

#[test]
fn pools_serve_from_their_reserve_and_shrinkers_free_pages() {
    compile_and_run("pools.c", &[]);
}

/// What a program could not try on this machine.
fn say_what_was_skipped(outputs: &[Output]) {
    let said: BTreeSet<_> = outputs.iter().map(|output| String::from_utf8_lossy(&output.stdout)).collect();
    said.iter().for_each(|said| print!("{said}"));
}

#[test]
fn blocks_with_device_addresses_come_and_go_and_misuse_of_them_is_refused() {
    say_what_was_skipped(&compile_and_run("dma.c", &[]));
}

#[test]
fn pages_circulate_in_a_pool_and_go_back_to_it_alone() {
    compile_and_run("page_pool.c", &[]);
}

#[test]
fn signal_handlers_allocate_and_free() {
    compile_and_run("signals.c", &[]);
}

#[test]
fn the_library_loads_late_beside_200_threads_and_stays() {
    compile_and_run("loads.c", &[&PREFIX.path().join("lib/libpagemill.so")]);
}

/// The functions that the header declares, but for those that it defines.
fn declared() -> BTreeSet<String> {
    let header = fs::read_to_string(Path::new(FOLDER).join("include/pagemill.h")).unwrap();
    let mut names = BTreeSet::new();
    for line in header.lines().filter(|line| !line.starts_with([' ', '/', '#']) && !line.starts_with("static inline")) {
        let Some((before, _)) = line.split_once('(') else { continue };
        let name = before.rsplit([' ', '*']).next().unwrap();
        names.insert(name.to_owned());
    }
    names
}

/// The symbols of the version script, each with its version.
fn promised() -> BTreeSet<String> {
    let map = fs::read_to_string(Path::new(FOLDER).join("pagemill.map")).unwrap();
    let mut version = "";
    let mut symbols = BTreeSet::new();
    for line in map.lines().map(str::trim) {
        if let Some(name) = line.strip_suffix(" {") {
            version = name;
        } else if let Some(symbol) = line.strip_suffix(';').filter(|symbol| symbol.starts_with("pagemill_")) {
            symbols.insert(format!("{symbol}@@{version}"));
        }
    }
    symbols
}

#[test]
fn the_shared_library_has_the_symbols_and_versions_of_the_list_and_no_others() {
    let mut nm = Command::new("nm");
    nm.args(["-D", "--defined-only"]).arg(PREFIX.path().join("lib/libpagemill.so"));
    let text = String::from_utf8(run(&mut nm, "binutils").stdout).unwrap();
    // The nodes of the versions are symbols too, without an address in the text.
    let functions = text.lines().filter(|line| line.contains(" T "));
    let exported: BTreeSet<_> = functions.map(|line| line.rsplit(' ').next().unwrap().to_owned()).collect();
    assert_eq!(exported, promised());
    let others: Vec<_> = text.lines().filter(|line| !line.contains(" T ") && !line.contains(" A ")).collect();
    assert!(others.is_empty(), "{others:?}");
}

#[test]
fn the_header_declares_every_symbol_and_a_c_program_calls_each() {
    let declared = declared();
    let promised: BTreeSet<_> = promised().iter().map(|symbol| symbol.split('@').next().unwrap().to_owned()).collect();
    assert_eq!(declared, promised);
    let programs = fs::read_dir(Path::new(FOLDER).join("tests/c")).unwrap();
    let text: String = programs.map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap()).collect();
    let uncalled: Vec<_> = declared.iter().filter(|name| !text.contains(&format!("{name}("))).collect();
    assert!(uncalled.is_empty(), "no test calls {uncalled:?}");
}
