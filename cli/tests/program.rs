//! `pagemill` itself: its help, the output of `info`, forced backends, and a closed standard output.

use std::io;
use std::process::{Command, Stdio};

use crate::common::{Folder, Outcome, PROGRAM};
use serde_json::Value;

fn pagemill(args: &[&str]) -> Outcome {
    Folder::new().pagemill(args)
}

#[test]
fn help_shows_every_command_and_fits_80_columns() {
    let help = pagemill(&["--help"]);
    let commands = ["bench", "copy", "crypt", "generate", "stress", "info", "nfs", "nvme", "read", "top", "xdp"];
    let sections = ["Examples:", "Exit codes:", "_BACKEND=", "_STATS=", "_FAIL="];
    for words in commands.iter().chain(&sections) {
        assert!(help.done().stdout.contains(words), "no {words:?} in {}", help.stdout);
    }
    let crypt = [
        "format",
        "info",
        "test-passphrase",
        "add-key",
        "change-key",
        "remove-key",
        "erase",
        "header-backup",
        "header-restore",
        "resize",
        "serve",
        "mount",
    ]
    .map(|it| format!("crypt {it}"));
    let nfs = ["nfs serve".to_owned()];
    let nvme = ["identify", "read", "write", "zero", "discard", "smart", "bench", "bind", "unbind"]
        .map(|it| format!("nvme {it}"));
    let xdp = ["forward", "drop", "echo", "generate"].map(|it| format!("xdp {it}"));
    for command in commands.map(str::to_owned).into_iter().chain(crypt).chain(nfs).chain(nvme).chain(xdp) {
        let help = pagemill(&command.split(' ').chain(["--help"]).collect::<Vec<_>>());
        assert!(help.done().stdout.contains(&format!("Usage: pagemill {command}")), "{}", help.stdout);
        help.stdout.lines().for_each(|line| assert!(line.chars().count() <= 80, "{command}: {line}"));
    }
    help.stdout.lines().for_each(|line| assert!(line.chars().count() <= 80, "{line}"));
    let nothing = pagemill(&[]);
    assert_eq!(nothing.code, Some(2));
    assert!(nothing.stderr.contains("Usage: pagemill"), "{nothing:?}");
}

/// The commands that a help text lists.
fn listed(help: &str) -> Vec<&str> {
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    // The description of a command goes on in lines that are indented further.
    let names = lines.filter_map(|line| line.strip_prefix("  ")?.split(' ').next().filter(|name| !name.is_empty()));
    names.filter(|name| *name != "help").collect()
}

/// Every command below these words, with its subcommands.
fn tree(words: &[&str]) -> Vec<String> {
    let help = pagemill(&[words, &["--help"]].concat());
    let below = listed(&help.done().stdout).into_iter().flat_map(|name| tree(&[words, &[name]].concat()));
    below.chain([words.join(" ")]).collect()
}

#[test]
fn each_command_has_a_man_page_and_is_completed() {
    let folder = Folder::new();
    folder.pagemill(&["generate", "made"]).done();
    let at = |name: &str| std::fs::read_to_string(folder.path(&format!("made/share/{name}"))).unwrap();
    let commands = tree(&[]);
    assert!(commands.len() > 8 && commands.iter().any(|words| words == "crypt add-key"), "{commands:?}");
    for words in &commands {
        let name = format!("pagemill {words}").trim_end().replace(' ', "-");
        let page = at(&format!("man/man1/{name}.1"));
        assert!(page.contains(&format!(".TH {name} 1")) && page.contains(".SH SYNOPSIS"), "{name}: {page}");
    }
    let pages = std::fs::read_dir(folder.path("made/share/man/man1")).unwrap().count();
    assert_eq!(pages, commands.len(), "a page for each command, and no other");
    for script in ["bash-completion/completions/pagemill", "zsh/site-functions/_pagemill"] {
        assert!(at(script).contains("add-key") && at(script).contains("--max-connections"), "{script}");
    }
    assert!(at("fish/vendor_completions.d/pagemill.fish").contains("max-connections"));
    folder.file("taken", b"");
    folder.pagemill(&["generate", "taken"]).refused_by("generate", &["can't write to taken", "a folder"]);
}

#[test]
fn man_pages_are_free_of_errors() {
    if Command::new("mandoc").arg("-h").stderr(Stdio::null()).status().is_err() {
        eprintln!("skipped: mandoc is not installed");
        return;
    }
    let folder = Folder::new();
    folder.pagemill(&["generate", "made"]).done();
    let pages = std::fs::read_dir(folder.path("made/share/man/man1")).unwrap().map(|page| page.unwrap().path());
    let pages: Vec<_> = pages.collect();
    let checked = folder.run(Command::new("mandoc").args(["-Tlint", "-Werror"]).args(&pages));
    assert_eq!((checked.code, checked.stdout.as_str()), (Some(0), ""), "{checked:?}");
    let shown = folder.run(Command::new("mandoc").arg("-Tutf8").args(&pages));
    assert!(shown.stdout.contains("Examples:") && shown.stdout.contains("pagemill copy"), "{shown:?}");
}

#[test]
fn nvme_refuses_a_drive_that_does_not_exist() {
    for command in ["identify", "bench", "bind", "unbind"] {
        let refused = pagemill(&["nvme", command, "ffff:ff:1f.7"]);
        refused.refused_by(
            &format!("nvme: {command}"),
            &[&format!("{command}: there is no PCI device ffff:ff:1f.7; see what there is")],
        );
    }
}

#[test]
fn info_shows_the_machine_and_a_zone() {
    let info = pagemill(&["info", "--json"]);
    let report: Value = serde_json::from_str(&info.done().stdout).unwrap();
    let is_rseq = pagemill::self_test().is_ok() && std::env::var_os("PAGEMILL_BACKEND").is_none();
    if is_rseq {
        assert_eq!((&report["backend"], &report["rseq"]), (&"rseq".into(), &"the self-test passed".into()));
    }
    assert_eq!(report["page_size"], 4096);
    let bits = report["metadata_bits_per_frame"].as_f64().unwrap();
    assert!((1.0..=2.0).contains(&bits), "C10.3: {bits}");
    let vmstat = report["vmstat"].as_str().unwrap();
    let counter = |name: &str| -> u64 {
        let line = vmstat.lines().find_map(|line| line.strip_prefix(&format!("{name} "))).unwrap();
        line.parse().unwrap()
    };
    // Allocated: one page, 256 in bulk, a block of 512. Freed: 128.
    assert_eq!((counter("pgalloc_normal"), counter("pgfree")), (769, 128));
    let managed = report["arena_pages"].as_u64().unwrap();
    assert_eq!(counter("nr_free_pages") + counter("nr_pcp_pages") + 769 - 128, managed);
    let buddyinfo = report["buddyinfo"].as_str().unwrap();
    let free: u64 = (0..).zip(buddyinfo.split_whitespace().skip(4)).map(|(k, n)| n.parse::<u64>().unwrap() << k).sum();
    assert_eq!(free, counter("nr_free_pages"));

    let text = pagemill(&["info"]);
    for words in ["backend", "default arena", "free blocks of order", "Node 0, zone", "nr_free_pages"] {
        assert!(text.done().stdout.contains(words), "no {words:?} in {}", text.stdout);
    }
    // The zone's folded line has the same counts.
    let folded = text.stdout.lines().filter_map(|line| line.strip_prefix("Node 0, zone Normal"));
    let counts: Vec<u64> = folded.flat_map(str::split_whitespace).map(|count| count.parse().unwrap()).collect();
    assert_eq!(counts.len(), buddyinfo.split_whitespace().count() - 4);
    for line in text.stdout.lines().skip_while(|line| !line.is_empty()) {
        assert!(line.len() <= 80, "{line}");
    }
}

#[test]
fn every_command_refuses_a_backend_that_the_machine_lacks() {
    for args in [&["bench", "--quick"][..], &["stress", "--seconds", "1"], &["copy", "a", "b"], &["info"]] {
        let refused = Folder::new().run(Command::new(PROGRAM).args(args).env("PAGEMILL_BACKEND", "magic"));
        refused.refused_by(args[0], &["PAGEMILL_BACKEND=magic: is neither rseq nor portable"]);
        let mut command = Command::new(PROGRAM);
        command.args(args).env("PAGEMILL_BACKEND", "rseq").env("GLIBC_TUNABLES", "glibc.pthread.rseq=0");
        let refused = Folder::new().run(&mut command);
        refused.refused_by(args[0], &["PAGEMILL_BACKEND=rseq: does not work here"]);
    }
    let option = pagemill(&["stress", "--backend", "magic"]);
    assert_eq!(option.code, Some(2));
    assert!(option.stderr.contains("possible values: rseq, portable"), "{option:?}");
    let negative = pagemill(&["stress", "--seconds", "-1"]);
    assert!(negative.stderr.contains("invalid value '-1' for '--seconds"), "{negative:?}");
}

#[test]
fn info_reports_a_forced_backend() {
    let forced = Folder::new().run(Command::new(PROGRAM).arg("info").env("PAGEMILL_BACKEND", "portable"));
    assert!(forced.done().stdout.contains("portable (PAGEMILL_BACKEND says so)"), "{}", forced.stdout);
}

#[test]
fn a_closed_standard_output_is_no_failure() {
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    let child = Command::new(PROGRAM).arg("info").stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
    Outcome::of(child).done();
}
