//! Linux's own test modules, as Debian's packages of its source have them, run by `pagemill-kmod` as they stand. Nothing of them is in this
//! repository: they are GPL, and fetched when the step runs.

use std::path::Path;

use anyhow::{Result, bail};

use crate::capi;
use crate::shell::Shell;
use crate::tally::Tally;
use crate::tools::{DPKG, GCC, Need};
use crate::vm;

/// What the step takes.
pub(crate) const NEEDS: &[Need] = &[GCC, DPKG, Need::Deb("xz-utils", &["xz", "--version"])];

/// A module, and what it says when its tests pass.
struct Module {
    /// Debian's package.
    package: &'static str,
    file: &'static str,
    args: &'static [&'static str],
    /// The end of the program.
    code: i32,
    /// Parts of lines, in this order. What the module says, and the last line of `pagemill-kmod`.
    says: &'static [&'static str],
}

const NEW: &str = "linux-source-6.12";
/// Of 2022: some names had other meanings.
const OLD: &str = "linux-source-6.1";

const FREED: &str = "its first function returned 0, the last one ran, and all its memory is freed";
/// Some modules fail on purpose, so that a kernel unloads them at once. What is wrong, they warn of.
const UNLOADED: &str = "its first function failed: -EAGAIN";

const FREE_PAGES: &[&str] =
    &["test_free_pages: Testing with GFP_KERNEL | __GFP_COMP", "test_free_pages: Test completed", FREED];
const MEMINIT: &[&str] = &[
    "test_meminit: all 11 tests in test_pages passed",
    "test_meminit: all 40 tests in test_kvmalloc passed",
    "test_meminit: all 70 tests in test_kmemcache passed",
    "test_meminit: all 10 tests in test_rcu_persistent passed",
    "test_meminit: all 131 tests passed!",
    "its first function returned 0, and all its memory is freed",
];
/// Of the alignments of one test the largest are impossible: it is to fail, its comment says.
const VMALLOC: &[&str] = &[
    "Summary: fix_size_alloc_test passed: 1 failed: 0 ",
    "Summary: full_fit_alloc_test passed: 1 failed: 0 ",
    "Summary: long_busy_list_alloc_test passed: 1 failed: 0 ",
    "Summary: random_size_alloc_test passed: 1 failed: 0 ",
    "Summary: fix_align_alloc_test passed: 1 failed: 0 ",
    "Summary: random_size_align_alloc_test passed: 1 failed: 0 ",
    "Summary: align_shift_alloc_test passed: 0 failed: 1 ",
    "Summary: pcpu_alloc_test passed: 1 failed: 0 ",
    "Summary: kvfree_rcu_1_arg_vmalloc_test passed: 1 failed: 0 ",
    "Summary: kvfree_rcu_2_arg_vmalloc_test passed: 1 failed: 0 ",
    "All test took worker1=",
    UNLOADED,
];
/// A row for each size of blocks.
const DMAPOOL: &[&str] = &[
    "dmapool test: size:16   align:16   blocks:8192 time:",
    "dmapool test: size:64   align:64   blocks:8192 time:",
    "dmapool test: size:256  align:256  blocks:8192 time:",
    "dmapool test: size:1024 align:1024 blocks:2048 time:",
    "dmapool test: size:4096 align:4096 blocks:1024 time:",
    "dmapool test: size:68   align:32   blocks:8192 time:",
    FREED,
];
const VMALLOC_ARGS: &[&str] = &["nr_threads=2", "test_loop_count=1000"];

#[rustfmt::skip] // A row for each module.
const MODULES: &[Module] = &[
    Module { package: NEW, file: "lib/test_free_pages.c", args: &[], code: 0, says: FREE_PAGES },
    Module { package: OLD, file: "lib/test_free_pages.c", args: &[], code: 0, says: FREE_PAGES },
    Module { package: NEW, file: "lib/test_meminit.c", args: &["--init-on-alloc"], code: 0, says: MEMINIT },
    Module { package: OLD, file: "lib/test_meminit.c", args: &["--init-on-alloc"], code: 0, says: MEMINIT },
    Module { package: NEW, file: "mm/dmapool_test.c", args: &[], code: 0, says: DMAPOOL },
    Module { package: NEW, file: "lib/test_vmalloc.c", args: VMALLOC_ARGS, code: 1, says: VMALLOC },
    Module { package: OLD, file: "lib/test_vmalloc.c", args: VMALLOC_ARGS, code: 1, says: VMALLOC },
    Module { package: NEW, file: "lib/test_memcat_p.c", args: &[], code: 0, says: &["test_memcat_p: test passed", FREED] },
    Module { package: NEW, file: "lib/atomic64_test.c", args: &[], code: 0, says: &["atomic64_test: passed", FREED] },
    Module { package: NEW, file: "lib/test-kstrtox.c", args: &[], code: 1, says: &["its first function failed: -EINVAL"] },
    Module { package: NEW, file: "lib/percpu_test.c", args: &[], code: 1, says: &["percpu test start", "percpu test done", UNLOADED] },
];

/// Installs the library and `pagemill-kmod` below a folder, and runs every module there.
pub(crate) fn run(shell: &Shell) -> Result<Tally> {
    let prefix = shell.own_target("modules");
    capi::install_below(shell, &prefix)?;
    let mut tally = Tally::default();
    for package in [NEW, OLD] {
        let modules = || MODULES.iter().filter(|module| module.package == package);
        let files: Vec<_> = modules().map(|module| module.file).collect();
        let folder = vm::source_files(shell, package, &files)?;
        for module in modules() {
            let name = format!("{package}/{}", module.file);
            match one(shell, &prefix, &folder, module) {
                Ok(()) => tally.add(Tally::pass(name)),
                Err(error) => tally.fail(name, format!("{error:#}")),
            }
        }
    }
    Ok(tally)
}

fn one(shell: &Shell, prefix: &Path, folder: &Path, module: &Module) -> Result<()> {
    let command = shell.command(prefix.join("bin/pagemill-kmod"));
    let command = command.arg(folder.join(module.file)).args(module.args);
    let ran = command.run("modules")?;
    let mut lines = ran.text.lines();
    let missing = module.says.iter().find(|part| !lines.any(|line| line.contains(**part)));
    if let Some(part) = missing {
        bail!("it does not say {part:?}\n{}", ran.last_lines(40));
    }
    if ran.end.code() != Some(module.code) || ran.text.contains("WARNING: ") {
        bail!("{}, or a warning\n{}", ran.how_it_ended(), ran.last_lines(40));
    }
    Ok(())
}
