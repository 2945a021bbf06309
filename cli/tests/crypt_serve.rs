//! `pagemill crypt serve` as a process: what was flushed survives it, signals end it, and what it refuses.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use crate::common::{Folder, PROGRAM, until};

const BYTES: usize = 4 << 20;

/// A volume of [`BYTES`].
fn format(folder: &Folder) {
    format_file_of(folder, "20M");
}

fn format_file_of(folder: &Folder, size: &str) {
    folder.file("key", &[7; 32]);
    let args = format!("crypt format volume --size {size} --key-file key --kdf pbkdf2 --kdf-iterations 1000");
    let made = folder.run(Command::new(PROGRAM).args(args.split(' ')));
    assert_eq!(made.code, Some(0), "{}", made.stderr);
}

/// A server, ended with the test whatever comes of that.
struct Serving(Child);

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Serving {
    /// What it says first.
    fn first_line(&mut self) -> String {
        BufReader::new(self.0.stderr.take().unwrap()).lines().next().unwrap().unwrap()
    }
}

/// Starts serving, and waits until it does.
fn serve(folder: &Folder, more: &[&str]) -> Serving {
    let mut command = Command::new(PROGRAM);
    command.args(["crypt", "serve", "volume", "--key-file", "key", "--unix", "socket"]).args(more);
    command.current_dir(folder.path("")).stdin(Stdio::null()).stderr(Stdio::piped());
    let mut child = Serving(command.spawn().unwrap());
    until("its socket", || {
        if let Some(status) = child.0.try_wait().unwrap() {
            let mut said = String::new();
            child.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            panic!("{status}: {said}");
        }
        folder.path("socket").exists()
    });
    child
}

/// `nbdcopy` in the folder.
fn nbdcopy(folder: &Folder, from: &str, to: &str) {
    let done = folder.run(Command::new("nbdcopy").args(["--flush", from, to]));
    assert_eq!(done.code, Some(0), "{from} {to}: {}", done.stderr);
}

fn has_nbdcopy() -> bool {
    let is_here = Command::new("nbdcopy").arg("--version").stdout(Stdio::null()).status().is_ok();
    if !is_here {
        eprintln!("skipped: nbdcopy is not installed");
    }
    is_here
}

fn uri(folder: &Folder) -> String {
    format!("nbd+unix:///?socket={}", folder.path("socket").display())
}

#[test]
fn what_was_flushed_is_there_after_kill_9() {
    if !has_nbdcopy() {
        return;
    }
    for io in ["auto", "plain"] {
        let folder = Folder::new();
        format(&folder);
        let noise: Vec<u8> = (0..BYTES as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        folder.file("raw", &noise);
        let mut child = serve(&folder, &["--io", io]);
        nbdcopy(&folder, "raw", &uri(&folder));
        child.0.kill().unwrap();
        child.0.wait().unwrap();
        assert!(folder.path("socket").exists(), "it had no time to tidy up");
        fs::remove_file(folder.path("socket")).unwrap();
        let _child = serve(&folder, &["--io", io, "--read-only"]);
        nbdcopy(&folder, &uri(&folder), "back");
        assert!(fs::read(folder.path("back")).unwrap() == noise, "{io}");
    }
}

/// As a newcomer types it, in a folder with a volume and its key.
#[test]
fn the_example_in_its_help_runs() {
    let folder = Folder::new();
    format(&folder);
    fs::rename(folder.path("volume"), folder.path("disk.img")).unwrap();
    fs::rename(folder.path("key"), folder.path("disk.key")).unwrap();
    let help = folder.run(Command::new(PROGRAM).args(["crypt", "serve", "--help"]));
    let lines = help.stdout.lines().skip_while(|line| !line.starts_with("Example")).skip(1);
    let example: Vec<_> = lines.map_while(|line| line.strip_prefix("  ")).collect();
    let [server, client] = example[..] else { panic!("{}", help.stdout) };
    let args = server.strip_prefix("pagemill ").unwrap().split(' ');
    let mut command = Command::new(PROGRAM);
    command.args(args).current_dir(folder.path("")).stdin(Stdio::null()).stderr(Stdio::piped());
    let mut serving = Serving(command.spawn().unwrap());
    let first = serving.first_line();
    assert!(first.contains("serving 4194304 bytes"), "{first}");
    if has_nbdcopy() {
        let copied = folder.run(Command::new("sh").args(["-c", client]));
        assert_eq!(copied.code, Some(0), "{}", copied.stderr);
        assert_eq!(fs::metadata(folder.path("copy.img")).unwrap().len(), BYTES as u64);
    }
}

#[test]
fn signals_end_it_and_its_socket_goes() {
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let folder = Folder::new();
        format(&folder);
        let mut child = serve(&folder, &["--threads", "3", "--name", "disk"]);
        // SAFETY: a signal to a child that has not been waited for.
        unsafe { libc::kill(child.0.id() as i32, signal) };
        assert_eq!(child.0.wait().unwrap().code(), Some(0));
        assert!(!folder.path("socket").exists());
        let first = child.first_line();
        assert!(first.contains("serving 4194304 bytes at") && first.contains("3 threads"), "{first}");
    }
}

/// What was copied by then was answered, and every later write is refused, in words that libnbd understands.
#[test]
fn a_copy_that_meets_sigterm_is_told_so_and_keeps_its_connections() {
    if !has_nbdcopy() {
        return;
    }
    let folder = Folder::new();
    format_file_of(&folder, "80M");
    let volume = File::open(folder.path("volume")).unwrap();
    let mut is_told = false;
    for round in 0..5 {
        // Another one each time, so that a write shows.
        folder.file("raw", &vec![round + 1; 16 * BYTES]);
        let sector = || {
            let mut bytes = [0; 512];
            volume.read_exact_at(&mut bytes, 20 << 20).unwrap();
            bytes
        };
        let before = sector();
        let mut server = serve(&folder, &["--threads", "2", "--io", if round % 2 == 0 { "auto" } else { "plain" }]);
        let mut copy = Command::new("nbdcopy");
        copy.args(["--connections=4", "raw", &uri(&folder)]).current_dir(folder.path(""));
        let mut copy = Serving(copy.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
        until("a write", || sector() != before || copy.0.try_wait().unwrap().is_some());
        // SAFETY: a signal to a child that has not been waited for.
        unsafe { libc::kill(server.0.id() as i32, libc::SIGTERM) };
        let mut said = String::new();
        copy.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        let is_whole = copy.0.wait().unwrap().success();
        assert_eq!(server.0.wait().unwrap().code(), Some(0), "round {round}");
        assert!(!said.contains("cookie"), "round {round}: {said}");
        is_told |= is_whole || said.contains("Cannot send after transport endpoint shutdown");
    }
    // Not each time: a copy that gets no processor for a second is taken for silent.
    assert!(is_told, "its connections ended without a word");
}

#[test]
fn a_socket_left_behind_is_replaced_and_one_in_use_is_not() {
    let folder = Folder::new();
    format(&folder);
    let mut child = serve(&folder, &["--read-only"]);
    let second = "crypt serve volume --key-file key --unix socket --read-only";
    let refused = folder.run(Command::new(PROGRAM).args(second.split(' ')));
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("another process answers there already"), "{}", refused.stderr);
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(second.split(' ')).current_dir(folder.path("")).stderr(Stdio::piped());
    assert!(UnixStream::connect(folder.path("socket")).is_err(), "nobody serves");
    let mut child = Serving(command.spawn().unwrap());
    let first = child.first_line();
    assert!(first.contains("serving"), "{first}");
    UnixStream::connect(folder.path("socket")).unwrap();
}

/// A certificate that is its own authority.
fn certificate(folder: &Folder) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
    folder.file("server.pem", made.cert.pem().as_bytes());
    folder.file("ca-cert.pem", made.cert.pem().as_bytes());
    folder.file("server.key", made.signing_key.serialize_pem().as_bytes());
}

#[test]
fn by_tls_it_serves_on_a_port() {
    if !has_nbdcopy() {
        return;
    }
    let folder = Folder::new();
    format(&folder);
    certificate(&folder);
    let mut command = Command::new(PROGRAM);
    let args = "crypt serve volume --key-file key --tcp 127.0.0.1:0 --tls-cert server.pem --tls-key server.key";
    command.args(args.split(' ')).current_dir(folder.path("")).stdin(Stdio::null()).stderr(Stdio::piped());
    let mut child = Serving(command.spawn().unwrap());
    let first = child.first_line();
    let uri =
        first.split_whitespace().find_map(|word| word.strip_suffix(':').filter(|word| word.starts_with("nbds://")));
    let uri = format!("{}/?tls-certificates={}", uri.expect(&first), folder.path("").display());
    folder.file("plain", &[42; BYTES]);
    nbdcopy(&folder, "plain", &uri);
    nbdcopy(&folder, &uri, "back");
    assert!(fs::read(folder.path("back")).unwrap()[..BYTES] == [42; BYTES]);
}

#[test]
fn an_address_that_others_reach_is_refused_without_tls() {
    let folder = Folder::new();
    format(&folder);
    for address in ["0.0.0.0:0", "[::]:0"] {
        let args = ["crypt", "serve", "volume", "--key-file", "key", "--tcp", address];
        let refused = folder.run(Command::new(PROGRAM).args(args));
        assert_eq!(refused.code, Some(1));
        assert!(refused.stderr.contains("--allow-plaintext"), "{}", refused.stderr);
    }
    // With TLS it is the system that refuses this one: an address for documents, which no machine has.
    certificate(&folder);
    let args = "crypt serve volume --key-file key --tcp 192.0.2.1:0 --tls-cert server.pem --tls-key server.key";
    let refused = folder.run(Command::new(PROGRAM).args(args.split(' ')));
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("192.0.2.1") && !refused.stderr.contains("plaintext"), "{}", refused.stderr);
    let half = args.strip_suffix(" --tls-key server.key").unwrap();
    let refused = folder.run(Command::new(PROGRAM).args(half.split(' ')));
    assert_eq!(refused.code, Some(2), "a certificate without its key: {}", refused.stderr);
    let none = folder.run(Command::new(PROGRAM).args(["crypt", "serve", "volume"]));
    assert_eq!(none.code, Some(2), "neither a socket nor an address");
}

#[test]
fn a_wrong_passphrase_has_an_exit_code_of_its_own() {
    let folder = Folder::new();
    format(&folder);
    folder.file("wrong", &[8; 32]);
    for (key, code) in [("key", 0), ("wrong", 3), ("none", 1)] {
        let ran = folder.run(Command::new(PROGRAM).args(["crypt", "test-passphrase", "volume", "--key-file", key]));
        assert_eq!(ran.code, Some(code), "{key}: {}", ran.stderr);
    }
    let wrong = ["crypt", "serve", "volume", "--key-file", "wrong", "--unix", "socket"];
    assert_eq!(folder.run(Command::new(PROGRAM).args(wrong)).code, Some(3));
}

/// It waits for its passphrase with the new files made; then it is killed, which it cannot hear.
#[test]
fn an_interrupted_format_leaves_nothing_behind() {
    let folder = Folder::new();
    let args = "crypt format volume --size 20M --header header --key-file /dev/stdin";
    let mut command = Command::new(PROGRAM);
    command.args(args.split(' ')).current_dir(folder.path("")).stdin(Stdio::piped()).stderr(Stdio::null());
    let mut child = Serving(command.spawn().unwrap());
    let inside = fs::canonicalize(folder.path("")).unwrap();
    let files_of = |pid: u32| -> usize {
        let files =
            fs::read_dir(format!("/proc/{pid}/fd")).unwrap().filter_map(|file| fs::read_link(file.ok()?.path()).ok());
        // A file's locks have descriptors of their own.
        files.filter(|file| file.starts_with(&inside)).collect::<std::collections::BTreeSet<_>>().len()
    };
    until("both files", || {
        assert!(child.0.try_wait().unwrap().is_none(), "it has ended");
        files_of(child.0.id()) == 2
    });
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    let left: Vec<_> = fs::read_dir(&inside).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}
