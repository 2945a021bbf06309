//! The table `rpc` of `pagemill bench`.
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::common::{Folder, PROGRAM};

#[test]
fn each_way_to_refill_an_array_has_figures_and_the_slice_is_judged() {
    let folder = Folder::new();
    let outcome = folder.pagemill(&["bench", "rpc", "--quick", "--bars", "--json", "out.json"]);
    let text = &outcome.done().stdout;
    let json = fs::read_to_string(folder.path("out.json")).unwrap();
    let lines: Vec<Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for (part, holes) in [("first", 64), ("last", 64), ("spread", 64), ("all", 259), ("one", 1)] {
        for name in ["array-slice", "array-whole", "list", "one-by-one", "array-stops"] {
            for order in ["random", "in-order"] {
                let is_it = |line: &&Value| {
                    line["bench"] == format!("rpc-refill-{part}") && line["impl"] == name && line["order"] == order
                };
                let found: Vec<&Value> = lines.iter().filter(is_it).collect();
                assert!(
                    matches!(found[..], [line] if line["n"] == holes && line["total_ns"].as_f64() > Some(0.0)),
                    "{part} {name} {order}: {found:?}"
                );
            }
        }
    }
    for words in ["64 in one slice: one by one / array", ">= 3.00", "25.007", "6.258", "4.590", "not of this run"] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    servers_have_figures(text, &lines);
    text.lines().for_each(|line| assert!(line.chars().count() <= 80, "{line}"));
}

fn has_header(name: &str) -> bool {
    let mut command = Command::new("cc");
    command.args(["-E", "-x", "c", "-include", name, "/dev/null"]).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// What each part of the table has over loopback: this server always; others where they are.
fn servers_have_figures(text: &str, lines: &[Value]) {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can run the servers over loopback");
        assert!(text.contains("absent: rpc: servers over loopback: "), "{text}");
        return;
    }
    let is_absent = |name: &str, part: &str| text.contains(&format!("absent: {name}: {part}"));
    let own = ["read-1m", "write-1m", "write-1m-again", "read-4k", "read-4k-one", "getattr", "create", "readdirplus"];
    let by_libnfs = ["read-1m-libnfs", "write-1m-libnfs"];
    let has_libnfs = has_header("nfsc/libnfs.h");
    if !has_libnfs {
        println!("skipped: libnfs as the client: libnfs-dev is not installed");
    }
    assert_eq!(is_absent("libnfs", "cc does not compile"), !has_libnfs, "{text}");
    let mut servers = vec!["pagemill", "pagemill-single"];
    for (name, why) in [("ganesha", "ganesha.nfsd is not installed"), ("unfs3", "unfsd is not installed")] {
        if !is_absent(name, why) {
            servers.push(name);
        }
    }
    let has_peers = Path::new(PROGRAM).with_file_name("nfs-peers").exists();
    for name in ["nfsserve", "nfs3_server"] {
        assert_eq!(is_absent(name, "not built; cargo build"), !has_peers, "{text}");
        if has_peers {
            servers.push(name);
        } else {
            println!("skipped: {name}: nfs-peers is not built (cargo test --features pagemill-nfs-bench/peers)");
        }
    }
    for part in own.iter().chain(by_libnfs.iter().filter(|_| has_libnfs)) {
        // It has no COMMIT.
        let expected = servers.iter().filter(|name| **name != "nfsserve" || !part.starts_with("write"));
        let of =
            lines.iter().filter(|line| line["bench"] == format!("rpc-{part}") && line["total_ns"].as_f64() > Some(0.0));
        let found: BTreeSet<_> = of.filter_map(|line| line["impl"].as_str()).collect();
        assert_eq!(found, expected.copied().collect(), "{part}: {text}");
    }
    assert_eq!(is_absent("nfsserve", "write 1 MiB: COMMIT: "), has_peers, "{text}");
}
