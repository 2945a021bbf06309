//! `pagemill` itself: its help, what `info` says, and that a closed standard output is no failure.
mod common;

use std::io;
use std::process::{Command, Stdio};

use common::{Folder, Outcome, PROGRAM};
use serde_json::Value;

fn pagemill(args: &[&str]) -> Outcome {
    Folder::new().run(Command::new(PROGRAM).args(args))
}

#[test]
fn help_shows_every_command_and_what_exit_codes_mean() {
    let help = pagemill(&["--help"]);
    for words in ["bench", "copy", "stress", "info", "Examples:", "Exit codes:", "PAGEMILL_BACKEND"] {
        assert!(help.done().stdout.contains(words), "no {words:?} in {}", help.stdout);
    }
    for command in ["bench", "copy", "stress", "info"] {
        let help = pagemill(&[command, "--help"]);
        assert!(help.done().stdout.contains(&format!("Usage: pagemill {command}")), "{}", help.stdout);
    }
    let nothing = pagemill(&[]);
    assert_eq!(nothing.code, Some(2));
    assert!(nothing.stderr.contains("Usage: pagemill"), "{nothing:?}");
}

#[test]
fn info_says_what_is_here_and_shows_a_zone() {
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
    // One page, 256 in bulk, a block of 512; 128 came back.
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
}

#[test]
fn info_says_which_backend_was_forced_and_refuses_unknown_ones() {
    let forced = Folder::new().run(Command::new(PROGRAM).arg("info").env("PAGEMILL_BACKEND", "portable"));
    assert!(forced.done().stdout.contains("portable (PAGEMILL_BACKEND says so)"), "{}", forced.stdout);
    let unknown = Folder::new().run(Command::new(PROGRAM).arg("info").env("PAGEMILL_BACKEND", "magic"));
    assert_eq!(unknown.code, Some(1));
    assert!(unknown.stderr.starts_with("pagemill: info: ") && unknown.stderr.contains("magic"), "{unknown:?}");
}

#[test]
fn a_reader_that_went_away_is_no_failure() {
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    let child = Command::new(PROGRAM).arg("info").stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
    Outcome::of(child).done();
}
