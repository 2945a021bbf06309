//! `pagemill stress`: short runs with a seed, their counts, and runs that prove too little.

use std::process::Command;

use crate::common::{Folder, Outcome, PROGRAM, signal, until};
use serde_json::Value;

fn stress(args: &[&str]) -> Outcome {
    Folder::new().run(Command::new(PROGRAM).arg("stress").args(args).env_remove("PAGEMILL_FAIL"))
}

/// Runs it with a seed until each of these sums of counts is more than 0: for two seconds and, if that is too short on this
/// machine, for ten and a hundred times as long.
fn counts_each(args: &[&str], sums: &[&[&str]]) {
    for seconds in ["2", "20", "200"] {
        let outcome = stress(&[&["--seed", "7", "--threads", "4", "--json", "--seconds", seconds], args].concat());
        if outcome.stderr.contains("too little is proved") {
            continue;
        }
        let record: Value = serde_json::from_str(&outcome.done().stdout).unwrap();
        assert_eq!((&record["seed"], &record["threads"]), (&7.into(), &4.into()));
        let of = |name: &str| record[name].as_u64().unwrap_or_else(|| panic!("no {name} in {record}"));
        if sums.iter().all(|names| names.iter().map(|name| of(name)).sum::<u64>() > 0) {
            return;
        }
        println!("{seconds} s were too few for {args:?}: {record}");
    }
    panic!("{args:?}: some of {sums:?} was never counted");
}

#[test]
fn tight_stress_meets_waits_reclaim_and_faults_on_each_backend() {
    for backend in ["rseq", "portable"] {
        if backend == "rseq" && pagemill::self_test().is_err() {
            println!("skipped: restartable sequences don't work here");
            continue;
        }
        let names = ["pages", "faults", "drains", "looks_at_the_mark", "array", "list", "callback", "runs", "single"];
        let mut sums: Vec<&[&str]> = names.iter().map(std::slice::from_ref).collect();
        // Some requests met a shortage.
        sums.push(&["waits", "below_mark", "exhausted"]);
        counts_each(&["--tight", "--backend", backend], &sums);
    }
}

#[test]
fn a_run_of_one_round_says_1_round() {
    for (args, words) in [(&["--tight"][..], "clean: 1 round with less"), (&[], " operations in 1 round and ")] {
        let outcome = stress(&[&["--seconds", "1", "--seed", "7", "--threads", "2"], args].concat());
        assert!(outcome.done().stdout.contains(words), "{outcome:?}");
    }
}

/// C3.14.
#[test]
fn failing_acquisitions_are_counted_and_a_run_without_pages_fails() {
    for more in [&[][..], &["--tight"]] {
        counts_each(&[&["--fail", "p=0.2,seed=3"], more].concat(), &[&["faults"], &["pages"]]);
        let none = stress(&[&["--seconds", "1", "--fail", "p=1"], more].concat());
        assert_eq!(none.code, Some(1), "{none:?}");
        assert!(none.stderr.contains("no page was ever handed out"), "{none:?}");
    }
}

#[test]
fn a_signal_ends_it_tells_the_seed_and_removes_the_socket() {
    for more in [&[][..], &["--tight"]] {
        let folder = Folder::new();
        let socket = folder.path("socket");
        let mut command = Command::new("env");
        command.args(["--default-signal", PROGRAM, "stress", "--json", "--seconds", "600", "--stats"]).arg(&socket);
        let mut child = folder.spawn(command.args(more));
        until("its socket", || {
            assert!(child.try_wait().unwrap().is_none(), "it ended before it was watched");
            socket.exists()
        });
        signal(&child, rustix::process::Signal::INT);
        let outcome = Outcome::of(child);
        assert_eq!((outcome.code, outcome.signal, outcome.stdout.as_str()), (None, Some(2), ""), "{outcome:?}");
        let seed = outcome.stderr.split_whitespace().nth(1).unwrap().trim_end_matches(',');
        let again = format!("interrupted: SIGINT came; repeat with: pagemill stress --seconds 600 --seed {seed} ");
        assert!(outcome.stderr.contains(&again), "{outcome:?}");
        assert!(!socket.exists());
    }
}
