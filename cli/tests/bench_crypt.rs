//! `pagemill bench --only crypt`: it has the figures, and comparisons if the peers are installed, and leaves nothing behind.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::{Folder, PROGRAM, until};
use serde_json::Value;

/// The command lines that contain this path, of processes with this parent if one is given.
fn processes_with(path: &str, parent: Option<u32>) -> Vec<String> {
    let is_child = |folder: &Path| {
        let status = fs::read_to_string(folder.join("status")).unwrap_or_default();
        parent.is_none_or(|parent| status.lines().any(|line| line == format!("PPid:\t{parent}")))
    };
    let folders = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path()).filter(|folder| is_child(folder));
    let lines = folders.filter_map(|folder| fs::read(folder.join("cmdline")).ok());
    lines.map(|line| String::from_utf8_lossy(&line).into_owned()).filter(|line| line.contains(path)).collect()
}

fn is_installed(program: &str) -> bool {
    let ran = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    ran.is_ok_and(|status| status.success())
}

#[test]
fn the_data_path_and_the_server_have_figures_beside_the_installed_peers() {
    let folder = Folder::new();
    let outcome = folder.pagemill(&["bench", "--only", "crypt", "--quick", "--bars", "--json", "out.json"]);
    let text = &outcome.done().stdout;
    let json = fs::read_to_string(folder.path("out.json")).unwrap();
    let lines: Vec<Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names = |bench: &str| -> BTreeSet<String> {
        let of = lines.iter().filter(|line| line["bench"] == bench);
        of.map(|line| line["impl"].as_str().unwrap().to_owned()).collect()
    };
    for line in &lines {
        let (pages, figure) = (line["n"].as_u64().unwrap(), line["mib_per_s"].as_f64().unwrap());
        assert!([1, 256].contains(&pages) && figure > 0.0, "{line}");
        let ns = line["total_ns"].as_f64().unwrap();
        assert!((figure * ns / 1e9 * 256.0 - 1.0).abs() < 1e-6, "{line}");
        // Only operations over NBD are timed one by one.
        let [p50, p99] = ["p50_us", "p99_us"].map(|name| line.get(name).and_then(Value::as_f64));
        assert_eq!(p50.is_some(), line["bench"].as_str().unwrap().starts_with("crypt-nbd"), "{line}");
        assert!(p50.is_none_or(|p50| p50 > 0.0 && p99.is_some_and(|p99| p99 >= p50)), "{line}");
        assert_eq!(line.get("cpu_ns").is_some_and(|ns| ns.as_f64() > Some(0.0)), p50.is_some(), "{line}");
    }
    let expected = BTreeSet::from(["pagemill-bulk", "pagemill-single", "no-encryption"].map(str::to_owned));
    for what in ["write-16", "read-16", "random-read-32", "random-write-32"] {
        assert_eq!(names(&format!("crypt-{what}")), expected, "{what}");
    }
    // If figures are absent, the output says so.
    if !is_installed("fio") || text.contains("absent: all over NBD") {
        println!("skipped: over NBD: {text}");
        assert!(text.contains("absent: all over NBD"), "{text}");
        return;
    }
    let mut expected = BTreeSet::from(["pagemill-bulk", "pagemill-4096"].map(str::to_owned));
    for (name, program) in [("nbdkit-luks", "nbdkit"), ("nbdkit", "nbdkit"), ("qemu-nbd", "qemu-nbd")] {
        if text.contains(&format!("absent: {name}: ")) {
            // The filter is a package of its own, and --quick leaves out the slowest peer.
            assert!(!is_installed(program) || name != "nbdkit", "{text}");
        } else {
            expected.insert(name.to_owned());
        }
    }
    for what in ["write-16", "read-16", "random-read-32", "random-write-32", "beside-writers"] {
        assert_eq!(names(&format!("crypt-nbd-{what}")), expected, "{what}");
    }
    assert_eq!(text.contains("NBD, 1 MiB write: speed / nbdkit-luks"), expected.contains("nbdkit-luks"), "{text}");
    assert!(text.contains("bulk / single from"), "{text}");
}

/// The client never ends, however long the signal takes to come.
#[test]
fn a_signal_ends_its_servers_and_removes_its_files() {
    let folder = Folder::new();
    let client = folder.path("fio");
    // The client has the engine. In every run it reads from a pipe to which nothing writes.
    fs::write(&client, "#!/bin/sh\ncase \"$1\" in --enghelp*) exit 0;; esac\nread -r line < \"${0%/*}/nobody\"\n")
        .unwrap();
    fs::set_permissions(&client, fs::Permissions::from_mode(0o755)).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, folder.path("nobody"), rustix::fs::Mode::RWXU).unwrap();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = [PathBuf::from(client.parent().unwrap())].into_iter().chain(std::env::split_paths(&path));
    let mut child = Command::new(PROGRAM)
        .args(["bench", "--only", "crypt", "--vs", "none", "--quick"])
        .env("PATH", std::env::join_paths(path).unwrap())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut place = None;
    until("a client at work", || {
        assert!(child.try_wait().unwrap().is_none(), "it ended before a client came");
        let clients = processes_with("--ioengine=nbd", Some(child.id()));
        let mut words = clients.iter().flat_map(|line| line.split('\0'));
        let output = words.find_map(|word| word.strip_prefix("--output="));
        place = output.map(|path| Path::new(path).parent().unwrap().display().to_string());
        place.is_some()
    });
    let place = place.unwrap();
    assert_eq!(processes_with("serve", Some(child.id())).len(), 2, "the servers");
    assert!(fs::exists(&place).unwrap());
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::INT).unwrap();
    let ended = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.signal(), Some(2), "{said}");
    assert!(said.contains("SIGINT"), "{said}");
    assert!(!fs::exists(&place).unwrap(), "{place} is still there");
    // They were killed, and may not have ended yet.
    until("the end of the last one", || processes_with(&place, None).is_empty());
}

#[test]
fn an_unknown_name_is_refused_with_the_known_names() {
    let outcome = Folder::new().pagemill(&["bench", "--only", "bath"]);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(2), ""), "{outcome:?}");
    assert!(outcome.stderr.contains("nothing is called `bath`; there are: array-queue, batch, "), "{outcome:?}");
}
