//! The tests of `pagemill.h`: C programs, compiled as C and as C++ by gcc and by clang, linked with the shared and with the static
//! library from an installed prefix by the words of `pkg-config`, and run.
//!
//! The compilers, `pkg-config` and valgrind must be there: without them the tests fail, with the packages' names.
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
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
    let needs = match package {
        "" => String::new(),
        package => format!("these tests need it (Debian: apt-get install {package})"),
    };
    let ran = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}; {needs}"));
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{command:?}: {}\n{said}\n{needs}", ran.status);
    ran
}

/// What `pkg-config` says of a package in the prefix.
fn pkg_config(package: &str) -> Vec<String> {
    let mut command = Command::new("pkg-config");
    command.args(["--cflags", "--libs", package]).env("PKG_CONFIG_PATH", PREFIX.path().join("lib/pkgconfig"));
    let words = run(&mut command, "pkg-config").stdout;
    String::from_utf8(words).unwrap().split_whitespace().map(str::to_owned).collect()
}

/// The compilers, each with the dialect that it is to take a file as, and with its Debian package.
const COMPILERS: [(&str, [&str; 2], &str); 4] = [
    ("gcc", ["-std=c11", "-xc"], "gcc"),
    ("g++", ["-std=c++17", "-xc++"], "g++"),
    ("clang", ["-std=c11", "-xc"], "clang libclang-rt-dev"),
    ("clang++", ["-std=c++17", "-xc++"], "clang libclang-rt-dev"),
];

/// Compiles a program of tests/c in every way, and runs each.
fn compile_and_run(name: &str, args: &[&Path]) -> Vec<Output> {
    compile_and_run_file(&Path::new(FOLDER).join("tests/c").join(name), args)
}

fn compile_and_run_file(source: &Path, args: &[&Path]) -> Vec<Output> {
    let folder = tempfile::tempdir().unwrap();
    let mut outputs = Vec::new();
    for compiler in COMPILERS {
        for package in ["pagemill", "pagemill-static"] {
            let program = compile(compiler, source, package, &[], folder.path());
            outputs.push(run(start(&program).args(args), ""));
        }
    }
    outputs
}

/// Compiles a program, and links it with a package of the prefix.
fn compile(compiler: (&str, [&str; 2], &str), source: &Path, package: &str, flags: &[&str], folder: &Path) -> PathBuf {
    let (compiler, dialect, debian) = compiler;
    let program = folder.join("program");
    let mut compile = Command::new(compiler);
    compile
        .args(dialect)
        .args(["-D_GNU_SOURCE", "-O1", "-gdwarf-4", "-Wall", "-Wextra", "-Werror", "-pthread"])
        .args(flags);
    compile.arg(source).args(["-xnone", "-o"]).arg(&program).args(pkg_config(package));
    run(&mut compile, debian);
    program
}

/// A command that finds the shared library.
fn start(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", PREFIX.path().join("lib"));
    command
}

/// Each example is compiled by every compiler, and run: plainly, with AddressSanitizer and UndefinedBehaviorSanitizer, and by valgrind. The
/// sanitizers and valgrind end a program with an error at the first fault, and at its end if memory leaked.
#[test]
fn the_examples_run_with_sanitizers_and_valgrind() {
    let sanitized = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    let folder = tempfile::tempdir().unwrap();
    let examples = fs::read_dir(Path::new(FOLDER).join("examples/c")).unwrap();
    let mut ran = 0;
    for source in examples.map(|entry| entry.unwrap().path()) {
        for compiler in COMPILERS {
            let program = compile(compiler, &source, "pagemill-static", &sanitized, folder.path());
            run(&mut start(program), "");
            let program = compile(compiler, &source, "pagemill-static", &[], folder.path());
            run(&mut start(program), "");
            let program = compile(compiler, &source, "pagemill", &[], folder.path());
            let said = String::from_utf8(run(&mut start(&program), "").stdout).unwrap();
            assert!(said.lines().count() > 0, "{}: an example says what it did", source.display());
            let mut valgrind = start("valgrind");
            valgrind.args(["--quiet", "--leak-check=full", "--errors-for-leak-kinds=definite", "--error-exitcode=1"]);
            let said = run(valgrind.arg(&program), "valgrind").stderr;
            assert!(said.is_empty(), "{}: {}", source.display(), String::from_utf8_lossy(&said));
            ran += 1;
        }
    }
    assert!(ran > 0, "there are examples");
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
fn the_program_and_the_commands_of_the_readme_run() {
    let readme = fs::read_to_string(Path::new(FOLDER).join("README.md")).unwrap();
    let block = |fence: &str, at: usize| readme.split(fence).nth(at).and_then(|rest| rest.split("```").next()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("program.c");
    fs::write(&source, block("```c\n", 1)).unwrap();
    compile_and_run_file(&source, &[]);
    // Its commands, of which the first installs the library below the home folder.
    symlink(PREFIX.path(), folder.path().join(".local")).unwrap();
    let mut commands = Command::new("sh");
    commands.args(["-eu", "-c", block("```sh\n", 2)]).env("HOME", folder.path()).current_dir(folder.path());
    let said = String::from_utf8(run(&mut commands, "gcc pkg-config").stdout).unwrap();
    assert_eq!(said.matches("64 pages").count(), 2, "{said}");
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
fn a_page_cache_reads_writes_and_lends_files() {
    compile_and_run("cache.c", &[]);
}

#[test]
fn signal_handlers_allocate_and_free() {
    compile_and_run("signals.c", &[]);
}

#[test]
fn the_library_loads_late_beside_200_threads_and_stays() {
    compile_and_run("loads.c", &[&PREFIX.path().join("lib/libpagemill.so")]);
}

#[test]
fn the_library_loads_late_beside_another_allocator() {
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(FOLDER).join("tests/c/loads.c");
    let program = compile(COMPILERS[0], &source, "pagemill", &[], folder.path());
    let library = PREFIX.path().join("lib/libpagemill.so");
    let output = run(start(&program).arg(library).env("LD_PRELOAD", "libjemalloc.so.2"), "");
    // What cannot be loaded before the program is said there, and no error.
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said, "", "this test needs jemalloc (Debian: apt-get install libjemalloc2)");
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

/// The items of the README's list of functions: their names, and the programs that call them.
fn listed() -> Vec<(Vec<String>, Vec<String>)> {
    let readme = fs::read_to_string(Path::new(FOLDER).join("README.md")).unwrap();
    let (_, list) = readme.split_once("## All functions\n").unwrap();
    let items = list.split("\n- **").skip(1);
    let words = |text: &str| text.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    items.map(|item| item.split_once("):").unwrap()).map(|(about, names)| (words(names), words(about))).collect()
}

#[test]
fn every_symbol_is_declared_and_in_the_list_of_the_readme_and_its_program_calls_it() {
    let declared = declared();
    let promised: BTreeSet<_> = promised().iter().map(|symbol| symbol.split('@').next().unwrap().to_owned()).collect();
    assert_eq!(declared, promised);
    let mut seen = BTreeSet::new();
    for (functions, programs) in listed() {
        let program = |name| fs::read_to_string(Path::new(FOLDER).join("tests/c").join(name)).unwrap();
        let text: String = programs.iter().map(program).collect();
        for name in functions.iter().map(|name| format!("pagemill_{name}")) {
            assert!(text.contains(&format!("{name}(")), "{programs:?} do not call {name}");
            assert!(seen.insert(name), "a function is listed twice");
        }
    }
    assert_eq!(seen, declared);
}
