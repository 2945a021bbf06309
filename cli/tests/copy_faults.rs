//! `pagemill copy` with acquisitions that fail on purpose: it copies the whole file, or refuses and leaves nothing behind.

use std::fs;

use crate::common::{Folder, noise};

/// C3.14, as a user sees it: with fewer pages than it wants a copy takes shorter steps, with none it fails.
#[test]
fn failing_acquisitions_leave_a_whole_copy_or_none() {
    let folder = Folder::new();
    let contents = noise(6 << 20);
    folder.file("src", &contents);
    let (mut copied, mut refused) = (0, 0);
    for (io, alloc) in [("auto", "bulk"), ("auto", "single"), ("preadv", "bulk"), ("preadv", "single")] {
        let form = ["--json", "--io", io, "--alloc", alloc, "--batch", "512", "src", "dst", "--fail"];
        for spec in ["p=0.1", "p=0.3,seed=2", "p=0.5,seed=3", "after=3", "after=0"] {
            let outcome = folder.copy(&[&form[..], &[spec]].concat());
            if outcome.code == Some(0) {
                assert!(fs::read(folder.path("dst")).unwrap() == contents, "{spec}");
                let report: serde_json::Value = serde_json::from_str(&outcome.done().stdout).unwrap();
                copied += u32::from(report["faults"].as_u64().unwrap() > 0);
                fs::remove_file(folder.path("dst")).unwrap();
            } else {
                outcome.refused(&["no page to copy through", "--fail", "PAGEMILL_FAIL", "dst was not made"]);
                refused += 1;
            }
            assert_eq!(folder.names(), ["src"], "{spec}");
        }
    }
    assert!(copied > 0 && refused >= 4, "{copied} copied in spite of faults, {refused} refused");
}

#[test]
fn faults_come_from_the_environment_and_malformed_ones_are_refused() {
    let folder = Folder::new();
    folder.file("src", b"x");
    folder.copy_after("export PAGEMILL_FAIL=p=1", &["src", "dst"]).refused(&["no page to copy through"]);
    folder.copy_after("export PAGEMILL_FAIL=p=1", &["--fail", "p=0", "src", "dst"]).done();
    for wrong in ["often", "p=2", "p=", "after=-1", "gfp=atomic", "p=0.1,,", "$(printf '\\377')"] {
        let refused = folder.copy_after(&format!("export PAGEMILL_FAIL={wrong}"), &["src", "other"]);
        refused.refused(&["PAGEMILL_FAIL=", "faults", "not at all"]);
        let option = folder.copy(&["--fail", wrong, "src", "other"]);
        assert_eq!(option.code, Some(2));
        assert!(option.stderr.contains("--fail <SPEC>") && option.stderr.contains("faults"), "{option:?}");
    }
}
