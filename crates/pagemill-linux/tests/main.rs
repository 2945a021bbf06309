//! The tests of the kernel-shaped headers: C programs, compiled by each compiler that is here, linked with the shared and with the static
//! library from an installed prefix by the words of `pkg-config`, and run.
//!
//! A C compiler, `ar` and `pkg-config` must be there: without them the tests fail, with the packages' names.
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;
use tempfile::TempDir;

mod kmod;

#[path = "../install.rs"]
mod install;
#[path = "../../pagemill-capi/install.rs"]
mod libraries;

/// This crate's folder.
const FOLDER: &str = env!("CARGO_MANIFEST_DIR");

/// A prefix with the libraries that cargo built for this test.
static PREFIX: LazyLock<TempDir> = LazyLock::new(|| {
    let prefix = tempfile::tempdir().unwrap();
    let version = env!("CARGO_PKG_VERSION");
    libraries::install(&archive(), &Path::new(FOLDER).join("../pagemill-capi"), version, prefix.path()).unwrap();
    install::install(Path::new(FOLDER), version, prefix.path()).unwrap();
    prefix
});

/// The static library of `pagemill.h`: beside this program, the newest if an earlier build left another.
fn archive() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let files = fs::read_dir(program.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path());
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("libpagemill_capi") && name.ends_with(".a")
    };
    let newest = files.filter(is_ours).max_by_key(|path| path.metadata().unwrap().modified().unwrap());
    newest.expect("cargo builds the static library beside these tests")
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

/// The compilers. Clang is used where it is there.
fn compilers() -> &'static [&'static str] {
    if Command::new("clang").arg("--version").output().is_ok() { &["gcc", "clang"] } else { &["gcc"] }
}

/// Compiles a program in every way, by the interfaces of a year, and runs each. Returns what it wrote on standard output, always the
/// same but for times, and on standard error, each time.
fn compile_and_run(source: &str, year: Option<u32>) -> (String, Vec<String>) {
    let mut errors = Vec::new();
    let mut said: Option<String> = None;
    for compiler in compilers() {
        for package in ["pagemill-linux", "pagemill-linux-static"] {
            let folder = tempfile::tempdir().unwrap();
            let program = folder.path().join("program");
            let mut compile = Command::new(compiler);
            compile.args(["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]);
            compile.args(year.map(|year| format!("-DPAGEMILL_LINUX_{year}")));
            compile.arg(Path::new(FOLDER).join(source)).arg("-o").arg(&program).args(pkg_config(package));
            run(&mut compile, compiler);
            let output = run(Command::new(&program).env("LD_LIBRARY_PATH", PREFIX.path().join("lib")), "");
            let text = String::from_utf8(output.stdout).unwrap();
            // Times differ.
            let text: String = text.lines().map(|line| format!("{}\n", line.split("time:").next().unwrap())).collect();
            assert_eq!(*said.get_or_insert_with(|| text.clone()), text, "{compiler}, {package}");
            errors.push(String::from_utf8(output.stderr).unwrap());
        }
    }
    (said.unwrap(), errors)
}

#[test]
fn pages_come_and_go_in_every_form() {
    for said in compile_and_run("tests/c/pages.c", None).1 {
        // Nodes that there are not are warned of once, and so is an order.
        let lines: Vec<_> = said.lines().map(|line| line.rsplit(": ").next().unwrap()).collect();
        assert_eq!(lines, ["node 63 has no memory", "an order above 18 (1 GiB)"], "{said}");
    }
}

#[test]
fn misuse_is_refused_and_changes_nothing() {
    for said in compile_and_run("tests/c/misuse.c", None).1 {
        // Of the counts that are refused, the first is warned of. What is not freed is named each time.
        let counts: Vec<_> = said.lines().filter(|line| !line.starts_with("BUG: Bad page state: ")).collect();
        assert_eq!(counts, ["pagemill: a bulk request for -1 blocks is refused: a count is 0 to INT_MAX"]);
        let refused = said.lines().filter(|line| line.ends_with(": the block is free already")).count();
        assert!(refused >= 7, "{said}");
    }
}

#[test]
fn pools_serve_from_their_reserve_and_take_back_what_it_lacks() {
    for said in compile_and_run("tests/c/mempool.c", None).1 {
        let lines: Vec<_> = said.lines().map(|line| line.split_once(" at ").map_or(line, |(_, after)| after)).collect();
        assert_eq!(lines[0], "count_holes: a request for 17 elements of a reserve of 16 is refused");
        assert!(
            lines[1].starts_with("BUG: Bad page state: mempool_free")
                && lines[1].ends_with("the block is free already")
        );
        assert!(
            lines[2].starts_with("BUG: Bad page state: __free_pages")
                && lines[2].ends_with("the block is free already")
        );
        assert!(
            lines[3].starts_with("BUG: Bad page state: mempool_free")
                && lines[3].ends_with("the block cannot be freed")
        );
        assert_eq!(lines[4], "mempool_exit: 1 elements are handed out");
        assert!(lines[5..].iter().all(|line| line.ends_with("the block was handed out with another order")), "{said}");
        assert_eq!(lines.len(), 7, "{said}");
    }
}

#[test]
fn a_radix_tree_finds_the_nearest_present_slot_and_the_nearest_hole() {
    compile_and_run("tests/c/radix_tree.c", None);
}

#[test]
fn dma_pools_hand_out_device_addresses_and_refuse_misuse() {
    for said in compile_and_run("tests/c/dmapool.c", None).1 {
        let lines: Vec<_> = said.lines().map(|line| line.split_once(" at ").unwrap().1).collect();
        assert!(lines[..3].iter().all(|line| line.starts_with("dma_pool_free: block 0x")), "{said}");
        assert_eq!(lines[3..], ["dma_pool_destroy: 1 blocks are handed out"], "{said}");
    }
}

#[test]
fn page_pools_circulate_pages_and_end_with_the_last_one() {
    for said in compile_and_run("tests/c/page_pool.c", None).1 {
        let refused = said.lines().filter(|line| line.starts_with("BUG: Bad page state: ")).count();
        let warned = said.lines().filter(|line| line.ends_with(" at page_pool_alloc_frag")).count();
        assert_eq!((refused, warned, said.lines().count()), (11, 1, 12), "{said}");
    }
}

#[test]
fn programs_by_the_interfaces_of_each_year_compile_and_run() {
    for (source, year) in [("2017", Some(2017)), ("2021", Some(2021)), ("2023", Some(2023)), ("today", None)] {
        for said in compile_and_run(&format!("tests/c/year_{source}.c"), year).1 {
            assert_eq!(said, "", "{source}");
        }
    }
}

#[test]
fn the_examples_print_what_they_did() {
    let printed = |name: &str| {
        let (said, errors) = compile_and_run(&format!("../../examples/linux/{name}.c"), None);
        assert!(errors.iter().all(String::is_empty), "{name}: {errors:?}");
        said
    };
    assert_eq!(printed("svc_alloc_arg"), "svc_alloc_arg: 78025 pages consumed, 1001 refills, 0 sleeps\n");
    assert!(printed("page_pool_refill").starts_with("page_pool: 48000 dropped, 8000 redirected, 8000 passed\n"));
    assert_eq!(printed("crypt_buffer"), "dm-crypt: 1000 writes, 72500 pages\n");
    let shapes = printed("dmapool_test");
    assert_eq!(shapes.matches("dmapool test: size:").count(), 6, "{shapes}");
    let read = "readahead: 410 pages cached, 3686 read by 461 requests, 4096 freed\n";
    assert_eq!(printed("readahead"), read);
}
