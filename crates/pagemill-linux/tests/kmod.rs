//! `pagemill-kmod`: modules of `tests/c/modules` run in a process, and what goes wrong is named with the next step.
//!
//! The kernel's own modules are run by the step `modules` of `cargo xtask test`, which fetches them.
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use super::{FOLDER, PREFIX};

/// The program, installed beside its headers and libraries.
static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
    let program = PREFIX.path().join("bin/pagemill-kmod");
    fs::create_dir_all(program.parent().unwrap()).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_pagemill-kmod"), &program).unwrap();
    program
});

fn module(name: &str) -> PathBuf {
    Path::new(FOLDER).join("tests/c/modules").join(name)
}

/// Runs the program: its exit code, the log without its times, and what it said.
fn kmod(arrange: impl FnOnce(&mut Command) -> &mut Command) -> (i32, Vec<String>, String) {
    let mut command = Command::new(&*PROGRAM);
    let ran = arrange(&mut command).output().unwrap();
    let log = String::from_utf8(ran.stdout).unwrap();
    let line = |line: &str| {
        let (time, text) = line.strip_prefix('[').and_then(|rest| rest.split_once("] ")).expect("a time in brackets");
        assert!(time.trim().bytes().all(|byte| byte.is_ascii_digit() || byte == b'.'), "{line}");
        text.to_owned()
    };
    (ran.status.code().unwrap(), log.lines().map(line).collect(), String::from_utf8(ran.stderr).unwrap())
}

#[test]
fn a_module_finds_the_surroundings_that_it_is_used_to() {
    let arguments = ["flag", "sizes=1,2", "label=abc", "words=a b", "small=200", "number=-3"];
    for compiler in super::compilers() {
        let (code, log, said) =
            kmod(|command| command.arg(module("surroundings.c")).args(arguments).env("CC", compiler));
        assert_eq!(code, 0, "{said}");
        assert_eq!(log[0], "surroundings: number -3 flag 1 sizes 2: 1 2 label abc words a b small 200");
        assert!(log.contains(&"dev1: gone".to_owned()), "{log:?}");
        let tail: Vec<_> = log.iter().skip_while(|line| !line.contains("an error")).collect();
        let before = [
            "an error is -ENOMEM, an address 0x10",
            "|  -ENOMEM|-EINVAL | 0x10|5%pe",
            "a line that goes on",
            "no end",
            "once",
        ];
        let before = before.map(|line| format!("surroundings: {line}"));
        assert_eq!(tail[..5], before.iter().collect::<Vec<_>>());
        assert!(tail[5] == "Call Trace:" && tail[6].starts_with(" init_module+0x"), "{tail:?}");
        assert_eq!(*tail.last().unwrap(), "surroundings: the end");
        let end = "pagemill-kmod: surroundings: its first function returned 0, the last one ran, and all its memory is freed\n";
        assert_eq!(said, end);
    }
}

#[test]
fn the_loop_of_the_published_measurements_prints_a_row_for_each_size() {
    let (code, log, said) = kmod(|command| command.arg(module("bulk_bench.c")).arg("loops=3"));
    assert_eq!(code, 0, "{said}");
    let rows: Vec<_> = log.iter().filter(|line| line.ends_with(" ns a page")).collect();
    assert_eq!(rows.len(), 3 * 8, "{log:?}");
    assert!(rows[23].starts_with("bulk_bench: array: 128 pages: "), "{log:?}");
    assert_eq!(log.last().unwrap(), "bulk_bench: done");
}

#[test]
fn the_error_of_a_first_function_is_named_and_the_last_one_does_not_run() {
    let (code, log, said) = kmod(|command| command.arg(module("init_fails.c")));
    assert_eq!((code, log.len()), (1, 0));
    assert_eq!(said, "pagemill-kmod: init_fails: its first function failed: -ENODEV (No such device)\n");
    // Without memory.
    let (code, log, said) = kmod(|command| command.arg(module("bulk_bench.c")).env("PAGEMILL_FAIL", "after=0"));
    assert_eq!((code, log.len()), (1, 0));
    assert!(said.ends_with("its first function failed: -ENOMEM (Cannot allocate memory)\n"), "{said}");
    // The first one again, with the program that is kept.
    let (code, _, said) = kmod(|command| command.arg("--keep").arg(module("init_fails.c")));
    let program = said.lines().next().unwrap().strip_prefix("pagemill-kmod: the program is ").unwrap();
    assert_eq!(code, 1);
    assert_eq!(Command::new(program).arg("init_fails").output().unwrap().status.code(), Some(1));
    fs::remove_dir_all(Path::new(program).parent().unwrap()).unwrap();
}

#[test]
fn misuse_is_warned_of_and_what_is_left_is_counted() {
    let cases = [
        ("kfree twice", "an object of the cache kmalloc-64 that is free"),
        ("kfree inside", "which is no object"),
        ("kfree foreign", "which is no object"),
        ("wrong cache", "which is not of the cache other"),
        ("page twice", "is refused: the block is free already"),
        ("vfree twice", "which vmalloc did not return, or which is free"),
        ("large twice", "which is no object"),
        ("percpu twice", "which is not allocated"),
    ];
    for (how, why) in cases {
        let (code, _, said) = kmod(|command| command.arg(module("misuse.c")).arg(format!("how={how}")));
        assert_eq!(code, 1, "{how}: {said}");
        let lines: Vec<_> = said.lines().collect();
        assert!(lines.len() == 2 && lines[0].ends_with(why), "{how}: {said}");
        assert_eq!(lines[1], "pagemill-kmod: misuse: warnings: 1, see above", "{how}");
    }
    let (code, _, said) = kmod(|command| command.arg(module("misuse.c")).arg("how=leak"));
    let left =
        ["1 objects of kmalloc-64 are not freed", "the cache forgotten is not destroyed", "4 pages are not freed"];
    let left: String = left.iter().map(|what| format!("pagemill-kmod: misuse: {what}\n")).collect();
    assert_eq!((code, said), (1, left));
    let (code, _, said) = kmod(|command| command.arg(module("misuse.c")).arg("how=follow null"));
    assert_eq!(code, 1);
    assert!(said.starts_with("pagemill-kmod: misuse: SIGSEGV ended it; run it with --keep"), "{said}");
}

#[test]
fn what_does_not_compile_is_told_with_the_next_step() {
    let (code, _, said) = kmod(|command| command.arg(module("no_header.c")));
    assert_eq!(code, 2);
    let hint = "There is no linux/blkdev.h here. Write what the module needs of it into a file DIR/linux/blkdev.h, and add -I DIR.";
    assert!(said.contains("no_header.c does not compile\n  ") && said.contains(hint), "{said}");
    let (code, _, said) = kmod(|command| command.arg(module("no_function.c")));
    assert_eq!(code, 2);
    assert!(said.contains("No header that the module includes has nowhere. Declare it in a header of yours"), "{said}");
    let (code, _, said) = kmod(|command| command.arg(module("no_function.c")).env("CFLAGS", "-DDECLARED"));
    assert_eq!(code, 2);
    assert!(said.contains("Nothing defines declared_and_nowhere. Define it in a file of yours"), "{said}");
    let (code, _, said) = kmod(|command| command.arg(module("bulk_bench.c")).env("CC", "no-such-compiler"));
    assert_eq!(code, 2);
    assert!(said.contains("no-such-compiler: ") && said.contains("apt-get install gcc"), "{said}");
    let (code, _, said) = kmod(|command| command.arg("no-such-file.c"));
    assert_eq!((code, said.lines().count()), (2, 1), "{said}");
    assert!(said.contains("name a module's source file"), "{said}");
    let folder = tempfile::tempdir().unwrap();
    let (code, _, said) = kmod(|command| command.arg(folder.path()));
    assert!(code == 2 && said.ends_with(" is a folder; name a module's source file in it\n"), "{said}");
}

#[test]
fn a_log_that_nobody_reads_ends_a_module_without_a_word() {
    let nobody = || std::io::pipe().unwrap().1;
    let run = |name, arrange: fn(&mut Command, Stdio) -> &mut Command| {
        let mut command = Command::new(&*PROGRAM);
        arrange(command.arg(module(name)), nobody().into()).output().unwrap()
    };
    let ran = run("bulk_bench.c", |command, nobody| command.stdout(nobody));
    assert_eq!((ran.status.code(), String::from_utf8(ran.stderr).unwrap()), (Some(1), String::new()));
    assert_eq!(run("no_header.c", |command, nobody| command.stderr(nobody)).status.code(), Some(2));
}

#[test]
fn a_folder_of_headers_and_a_second_file_complete_a_module() {
    let folder = tempfile::tempdir().unwrap();
    let more = folder.path().join("more.c");
    fs::create_dir(folder.path().join("linux")).unwrap();
    fs::write(folder.path().join("linux/blkdev.h"), "int blocks(void);\n").unwrap();
    fs::write(&more, "#include <linux/blkdev.h>\n#include <linux/module.h>\nint blocks(void) { return 3; }\n").unwrap();
    let first = folder.path().join("odd-name.c");
    let text = "#include <linux/blkdev.h>\n#include <linux/module.h>\n\
        static int __init first(void) { pr_info(KBUILD_MODNAME \"\\n\"); return blocks(); }\nmodule_init(first)\n";
    fs::write(&first, text).unwrap();
    let (code, log, said) = kmod(|command| command.arg("-I").arg(folder.path()).arg(&first).arg(&more));
    assert_eq!((code, log), (0, vec!["odd_name".to_owned()]), "{said}");
    assert_eq!(said, "pagemill-kmod: odd_name: its first function returned 3, and all its memory is freed\n");
}

#[test]
fn parameters_that_cannot_be_are_refused() {
    for (argument, why) in [
        ("none=1", "it has no parameter none; its parameters are:"),
        ("number=x", "number=x: the parameter number is of type int: Invalid argument"),
        ("number=3000000000", "number=3000000000: the parameter number is of type int: Numerical result out of range"),
        ("sizes=1,2,3,4,5", "sizes=1,2,3,4,5: the parameter sizes is of type ulong: No space left on device"),
        (
            "label=too long for it",
            "label=too long for it: the parameter label is of type string: No space left on device",
        ),
        ("flag=maybe", "flag=maybe: the parameter flag is of type bool: Invalid argument"),
        ("small=256", "small=256: the parameter small is of type byte: Numerical result out of range"),
    ] {
        let (code, log, said) = kmod(|command| command.arg(module("surroundings.c")).arg(argument));
        assert_eq!((code, log.len()), (2, 0), "{argument}");
        assert_eq!(said.lines().next().unwrap(), format!("pagemill-kmod: surroundings: {why}"));
    }
    let ran = Command::new(&*PROGRAM).arg("--help").output().unwrap();
    let text = String::from_utf8(ran.stdout).unwrap();
    for part in ["pagemill-kmod lib/test_free_pages.c", "test_loop_count=1000", "--init-on-alloc", "linux-source"] {
        assert!(text.contains(part), "{text}");
    }
    assert!(text.lines().all(|line| line.len() <= 80), "{text}");
}

#[test]
fn the_program_installs_beside_itself_in_the_tree_that_it_was_built_in() {
    // Where cargo puts programs and libraries depends on its configuration: a folder as it is by default.
    let tree = tempfile::tempdir().unwrap();
    let program = tree.path().join("pagemill-kmod");
    fs::copy(env!("CARGO_BIN_EXE_pagemill-kmod"), &program).unwrap();
    symlink(super::archive().parent().unwrap(), tree.path().join("deps")).unwrap();
    for _ in 0..2 {
        let ran = Command::new(&program).arg(module("init_fails.c")).output().unwrap();
        assert_eq!(ran.status.code(), Some(1), "{}", String::from_utf8_lossy(&ran.stderr));
    }
    let alone = tempfile::tempdir().unwrap();
    let copy = alone.path().join("pagemill-kmod");
    fs::copy(&program, &copy).unwrap();
    let ran = Command::new(&copy).arg(module("init_fails.c")).output().unwrap();
    let said = String::from_utf8(ran.stderr).unwrap();
    assert!(ran.status.code() == Some(2) && said.contains("run `cargo xtask install --prefix DIR`"), "{said}");
}

#[test]
fn a_module_without_a_first_function_is_told_so() {
    let (code, _, said) = kmod(|command| command.arg(module("no_first.c")));
    assert_eq!(
        (code, said.as_str()),
        (2, "pagemill-kmod: no_first: it has no first function: name one with module_init\n")
    );
}

#[test]
fn a_file_whose_name_begins_with_a_dash_is_compiled() {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(module("init_fails.c"), folder.path().join("-odd.c")).unwrap();
    let (code, _, said) = kmod(|command| command.current_dir(folder.path()).args(["--", "-odd.c"]));
    assert_eq!(code, 1);
    assert_eq!(said, "pagemill-kmod: _odd: its first function failed: -ENODEV (No such device)\n");
}

#[test]
fn an_interrupt_ends_a_module_and_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(&*PROGRAM);
    command.arg(module("waits.c")).env("TMPDIR", folder.path()).process_group(0);
    let mut running = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(running.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.ends_with("] it has begun, at 0%percent\n"), "{line}");
    let group = format!("-{}", running.id());
    assert!(Command::new("kill").args(["-INT", "--", &group]).status().unwrap().success());
    let ran = running.wait_with_output().unwrap();
    assert_eq!((ran.status.code(), String::from_utf8(ran.stderr).unwrap()), (Some(1), String::new()));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_module_ends_when_pagemill_kmod_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(&*PROGRAM);
    command.arg(module("waits.c")).env("TMPDIR", folder.path()).stdout(Stdio::piped());
    let mut running = command.spawn().unwrap();
    let mut log = BufReader::new(running.stdout.take().unwrap());
    log.read_line(&mut String::new()).unwrap();
    running.kill().unwrap();
    running.wait().unwrap();
    // The log has an end once nobody can write to it.
    assert_eq!(log.read_to_end(&mut Vec::new()).unwrap(), 0);
}
