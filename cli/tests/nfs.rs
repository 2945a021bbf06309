//! `pagemill nfs serve` as a process: libnfs's programs copy and list through it, what it promised is in the files after
//! `kill -9`, and neither full memory nor hostile clients stop it.
mod rpc;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use nfs3_types::mount::{self, mountstat3};
use nfs3_types::nfs3::{PROGRAM as NFS, WRITE3res, nfs_fh3, nfsstat3, stable_how};
use nfs3_types::rpc::{accept_stat_data, accepted_reply, auth_stat, rejected_reply, reply_body};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use serde_json::Value;

use crate::common::{Folder, Outcome, PROGRAM, noise, signal, until};
use rpc::{Rpc, USER, WRITE, call, connect_from, is_success, pack, record, unpack, with_patience, write_args};

const MIB: usize = 1 << 20;

/// A folder with an empty directory `tree`, in which everybody may write. `None`: the test is skipped, as this says.
fn folder() -> Option<Folder> {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can run the server");
        return None;
    }
    let folder = Folder::new();
    fs::create_dir(folder.path("tree")).unwrap();
    let open = |name, mode| fs::set_permissions(folder.path(name), fs::Permissions::from_mode(mode)).unwrap();
    open("", 0o755);
    open("tree", 0o777);
    Some(folder)
}

fn has_libnfs() -> bool {
    let is_here = Command::new("nfs-cp").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !is_here {
        println!("skipped: nfs-cp is not installed");
    }
    is_here
}

/// The words of a command that serves `tree` at this port.
fn words(port: u16, more: &str) -> Vec<String> {
    let line = format!("nfs serve tree --port {port} --state key --json {more}");
    line.split_whitespace().map(str::to_owned).collect()
}

/// A running server, killed with the test.
struct Server {
    child: Child,
    address: SocketAddr,
    /// Open as long as it runs: what it says must not fail.
    errors: BufReader<ChildStderr>,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Serves the folder's `tree` at a free port.
    fn start(folder: &Folder, more: &str) -> Self {
        Self::start_at(folder, 0, more)
    }

    fn start_at(folder: &Folder, port: u16, more: &str) -> Self {
        Self::of(folder.spawn(Command::new(PROGRAM).args(words(port, more))))
    }

    /// Waits until it serves.
    fn of(mut child: Child) -> Self {
        let mut errors = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        errors.read_line(&mut line).unwrap();
        let address = line.rsplit_once(" at ").and_then(|(_, rest)| rest.rsplit_once(": ")?.0.parse().ok());
        let address = address.unwrap_or_else(|| panic!("no address in {line:?}"));
        Self { child, address, errors }
    }

    fn client(&self) -> Rpc {
        Rpc::new(self.address)
    }

    /// A socket from a port that any user may use.
    fn socket(&self) -> TcpStream {
        with_patience(TcpStream::connect(self.address).unwrap())
    }

    fn kill_9(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Ends it with SIGTERM. Returns its counters; no request of any test may make it panic.
    #[track_caller]
    fn terminate(mut self) -> Value {
        signal(&self.child, Signal::TERM);
        until("its end", || self.child.try_wait().unwrap().is_some());
        let status = self.child.wait().unwrap();
        let (mut said, mut report) = (String::new(), String::new());
        self.errors.read_to_string(&mut said).unwrap();
        self.child.stdout.take().unwrap().read_to_string(&mut report).unwrap();
        assert_eq!((status.code(), status.signal(), said.as_str()), (Some(0), None, ""), "{report}");
        let report: Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["panics"], 0, "{report}");
        report
    }

    /// The address of a file below `tree`, or of `tree` itself, for libnfs.
    fn url(&self, folder: &Folder, name: &str) -> String {
        let (tree, port) = (folder.path("tree"), self.address.port());
        let slash = if name.is_empty() { "" } else { "/" };
        format!("nfs://127.0.0.1{}{slash}{name}?nfsport={port}&mountport={port}&version=3", tree.display())
    }
}

/// Runs one of libnfs's programs as a user without privileges. Returns what it printed.
#[track_caller]
fn libnfs(folder: &Folder, program: &str, args: &[&str]) -> String {
    let done = folder.run(Command::new(program).args(args).uid(USER).gid(USER));
    assert_eq!(done.code, Some(0), "{program} {args:?}: {done:?}");
    done.stdout
}

/// The files below a folder, by their paths in it.
fn files(at: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![at.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(at).unwrap().to_str().unwrap().to_owned();
                found.insert(name, fs::read(path).unwrap());
            }
        }
    }
    found
}

/// Files of all kinds of sizes and names, each folder before what is in it.
fn many_files() -> (Vec<String>, BTreeMap<String, Vec<u8>>) {
    let mut folders = vec!["small".to_owned(), "deep".to_owned()];
    let mut files = BTreeMap::new();
    for number in 0..100 {
        files.insert(format!("small/{number}"), noise(number * 97));
    }
    for _ in 0..40 {
        let deeper = format!("{}/deeper", folders.last().unwrap());
        files.insert(format!("{deeper}/leaf"), noise(deeper.len()));
        folders.push(deeper);
    }
    files.insert("large".to_owned(), noise(20 * MIB + 1));
    files.insert("n".repeat(255), noise(4097));
    // Mostly holes, where it is made.
    let mut holes = vec![0; 6 * MIB];
    for at in [0, 4095, 3 * MIB, 6 * MIB - 1] {
        holes[at] = 7;
    }
    files.insert("holes".to_owned(), holes);
    (folders, files)
}

#[test]
fn a_tree_is_copied_in_and_out_by_libnfs() {
    let Some(folder) = folder() else { return };
    if !has_libnfs() {
        return;
    }
    let (folders, expected) = many_files();
    for name in ["here", "back"] {
        fs::create_dir(folder.path(name)).unwrap();
        folders.iter().for_each(|below| fs::create_dir(folder.path(name).join(below)).unwrap());
    }
    for name in folders.iter().map(String::as_str).chain([""]) {
        fs::set_permissions(folder.path("back").join(name), fs::Permissions::from_mode(0o777)).unwrap();
    }
    for (name, bytes) in &expected {
        let file = File::create(folder.path("here").join(name)).unwrap();
        file.set_len(bytes.len() as u64).unwrap();
        for (number, page) in bytes.chunks(4096).enumerate().filter(|(_, page)| page.iter().any(|byte| *byte != 0)) {
            file.write_all_at(page, number as u64 * 4096).unwrap();
        }
    }
    let server = Server::start(&folder, "--insecure --cache 64M");
    let mut client = server.client();
    for below in &folders {
        let handle = below.split('/').fold(client.root(), |parent, name| {
            client.lookup(&parent, name.as_bytes()).or_else(|_| client.mkdir(&parent, name.as_bytes())).unwrap()
        });
        assert!(client.lookup(&handle, b".").is_ok());
    }
    for name in expected.keys() {
        libnfs(&folder, "nfs-cp", &[&format!("here/{name}"), &server.url(&folder, name)]);
    }
    for name in expected.keys() {
        libnfs(&folder, "nfs-cp", &[&server.url(&folder, name), &format!("back/{name}")]);
    }
    assert!(files(&folder.path("back")) == expected, "as the server has them");
    server.terminate();
    assert!(files(&folder.path("tree")) == expected, "as they are on the disk");
}

#[test]
fn a_directory_of_100_000_entries_is_listed_once_each() {
    let Some(folder) = folder() else { return };
    if !has_libnfs() {
        return;
    }
    fs::create_dir(folder.path("tree/many")).unwrap();
    let names: BTreeSet<String> = (0..100_000).map(|number| format!("entry-{number}")).collect();
    names.iter().for_each(|name| drop(File::create(folder.path("tree/many").join(name)).unwrap()));
    let server = Server::start(&folder, "--insecure --cache 16M");
    let listed = libnfs(&folder, "nfs-ls", &[&server.url(&folder, "many")]);
    let listed: Vec<&str> = listed.lines().filter_map(|line| line.split_whitespace().last()).collect();
    assert_eq!(listed.len(), names.len());
    assert!(listed.into_iter().map(str::to_owned).collect::<BTreeSet<_>>() == names);
    server.terminate();
}

/// On both sides of the first offset that takes more than 32 bits.
#[test]
fn a_file_beyond_4_gib_is_written_and_read_whole() {
    const END: u64 = (4 << 30) + 3 * 4096 + 5;
    let Some(folder) = folder() else { return };
    let server = Server::start(&folder, "--insecure --cache 64M");
    let mut client = server.client();
    let root = client.root();
    let file = client.create(&root, b"far").unwrap();
    let parts = [(0, noise(5000)), (END - 5 * 4096, noise(5 * 4096))];
    for (at, bytes) in &parts {
        client.write(&file, *at, bytes, stable_how::UNSTABLE);
    }
    for (at, bytes) in &parts {
        assert!(client.read(&file, *at, bytes.len()) == *bytes);
    }
    if has_libnfs() {
        let mut command = Command::new("nfs-cat");
        command.arg(server.url(&folder, "far")).uid(USER).gid(USER).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut cat = command.spawn().unwrap();
        check_far(cat.stdout.take().unwrap(), END, &parts);
        assert!(cat.wait().unwrap().success());
    }
    server.terminate();
    let there = File::open(folder.path("tree/far")).unwrap();
    assert_eq!(there.metadata().unwrap().len(), END);
    for (at, bytes) in &parts {
        let mut read = vec![0; bytes.len()];
        there.read_exact_at(&mut read, *at).unwrap();
        assert!(read == *bytes);
    }
}

/// A stream of these parts, and zeros between them.
fn check_far(mut stream: impl Read, end: u64, parts: &[(u64, Vec<u8>)]) {
    let (mut at, mut buffer) = (0, vec![0; MIB]);
    loop {
        let count = stream.read(&mut buffer).unwrap();
        if count == 0 {
            break;
        }
        let mut expected = vec![0; count];
        for (from, bytes) in parts {
            let (start, stop) = (at.max(*from), (at + count as u64).min(from + bytes.len() as u64));
            if start < stop {
                let part = &bytes[(start - from) as usize..(stop - from) as usize];
                expected[(start - at) as usize..(stop - at) as usize].copy_from_slice(part);
            }
        }
        assert!(buffer[..count] == expected, "{count} bytes at {at}");
        at += count as u64;
    }
    assert_eq!(at, end);
}

fn on_disk(folder: &Folder, name: &str) -> Vec<u8> {
    fs::read(folder.path("tree").join(name)).unwrap()
}

#[test]
fn what_was_promised_is_in_the_file_after_kill_9() {
    let Some(folder) = folder() else { return };
    let server = Server::start(&folder, "--cache 64M");
    let port = server.address.port();
    let mut client = server.client();
    let root = client.root();
    let file = client.create(&root, b"file").unwrap();
    let bytes = noise(3 * MIB);
    let parts: Vec<&[u8]> = bytes.chunks(MIB).collect();

    let synced = client.write(&file, 0, parts[0], stable_how::FILE_SYNC);
    assert_eq!(synced.committed, stable_how::FILE_SYNC);
    let unstable = client.write(&file, MIB as u64, parts[1], stable_how::UNSTABLE);
    assert_eq!(client.commit(&file), unstable.verf);
    let lost = client.write(&file, 2 * MIB as u64, parts[2], stable_how::UNSTABLE);
    assert_eq!((lost.committed, lost.verf), (stable_how::UNSTABLE, unstable.verf));
    server.kill_9();
    assert!(on_disk(&folder, "file").starts_with(&bytes[..2 * MIB]));

    // The client's handles are the same, and it sees that it has to send again what was not committed.
    let server = Server::start_at(&folder, port, "--cache 64M");
    let mut client = server.client();
    assert_eq!(client.root(), root);
    assert_eq!(client.lookup(&root, b"file").unwrap(), file);
    assert!(client.read(&file, 0, 2 * MIB) == bytes[..2 * MIB]);
    assert_ne!(client.commit(&file), lost.verf);
    let again = client.write(&file, 2 * MIB as u64, parts[2], stable_how::UNSTABLE);
    assert_eq!(client.commit(&file), again.verf);
    server.kill_9();
    assert!(on_disk(&folder, "file") == bytes);
}

#[test]
fn sigterm_writes_everything_back_while_connections_are_open() {
    let Some(folder) = folder() else { return };
    let server = Server::start(&folder, "--cache 64M");
    let port = server.address.port();
    let mut client = server.client();
    let root = client.root();
    let files: Vec<(nfs_fh3, Vec<u8>)> = (0..20_usize)
        .map(|number| (client.create(&root, number.to_string().as_bytes()).unwrap(), noise(number * 10_007 + 1)))
        .collect();
    let verifiers = files.iter().map(|(file, bytes)| client.write(file, 5, bytes, stable_how::UNSTABLE).verf);
    let verifiers: Vec<_> = verifiers.collect();
    // One is silent, one is within a record, and one is within the data of a WRITE.
    let idle = server.socket();
    let mut half = server.client();
    half.socket.write_all(&record(&call(1, (NFS, 3, 1), b""))[..20]).unwrap();
    let mut writer = server.client();
    let args = pack(&write_args(&files[0].0, 0, &noise(MIB), stable_how::UNSTABLE));
    writer.socket.write_all(&record(&call(1, (NFS, 3, WRITE), &args))[..MIB / 2]).unwrap();
    server.terminate();
    for (number, (_, bytes)) in files.iter().enumerate() {
        assert!(on_disk(&folder, &number.to_string()) == [&[0; 5], &bytes[..]].concat(), "{number}");
    }
    drop(idle);
    assert!(half.is_closed() && writer.is_closed() && client.is_closed());

    let server = Server::start_at(&folder, port, "--cache 64M");
    let mut client = server.client();
    for ((file, bytes), verifier) in files.iter().zip(verifiers) {
        assert!(client.read(file, 5, bytes.len()) == *bytes);
        assert_ne!(client.commit(file), verifier);
    }
    server.terminate();
}

/// As a debugger or a shell does with `kill -STOP` and `fg`.
#[test]
fn a_server_that_was_stopped_and_goes_on_serves_on() {
    let Some(folder) = folder() else { return };
    let server = Server::start(&folder, "--cache 64M");
    let status = format!("/proc/{}/stat", server.child.id());
    let is_stopped = || fs::read_to_string(&status).unwrap().contains(") T ");
    for _ in 0..5 {
        server.client().root();
        signal(&server.child, Signal::STOP);
        until("its stop", is_stopped);
        signal(&server.child, Signal::CONT);
        until("its going on", || !is_stopped());
    }
    server.terminate();
}

/// Writes the parts of a file over and over, until the server is gone. Returns how many were answered; `answered` counts those of
/// all writers.
fn write_until_closed(
    (mut client, file): (Rpc, nfs_fh3),
    parts: &[Vec<u8>],
    how: stable_how,
    answered: &AtomicUsize,
) -> usize {
    let is_written = |(part, bytes): &(usize, &Vec<u8>)| {
        let args = pack(&write_args(&file, (part * PART) as u64, bytes, how));
        let Ok((body, results)) = client.try_asked((NFS, 3, WRITE), &args) else { return false };
        assert!(is_success(&body), "{body:?}");
        let WRITE3res::Ok(ok) = unpack(&results) else { panic!("{results:?}") };
        assert_eq!((ok.count as usize, ok.committed), (bytes.len(), how));
        answered.fetch_add(1, Relaxed);
        true
    };
    parts.iter().enumerate().cycle().take_while(is_written).count()
}

const PART: usize = 48 << 10;

#[test]
fn writes_that_were_answered_survive_a_signal_amid_others() {
    for (by, how) in [(Signal::TERM, stable_how::UNSTABLE), (Signal::KILL, stable_how::FILE_SYNC)] {
        let Some(folder) = folder() else { return };
        let mut server = Server::start(&folder, "--cache 64M");
        let parts: Vec<Vec<u8>> = (0..50).map(|part| noise(PART - part)).collect();
        let answered = AtomicUsize::new(0);
        // All are connected before one of them can bring the signal about.
        let connect = |number: usize| {
            let mut client = server.client();
            let root = client.root();
            let file = client.create(&root, number.to_string().as_bytes()).unwrap();
            (client, file)
        };
        let clients: Vec<_> = (0..4).map(connect).collect();
        let counts: Vec<usize> = thread::scope(|scope| {
            let write = |client| write_until_closed(client, &parts, how, &answered);
            let writers: Vec<_> = clients.into_iter().map(|client| scope.spawn(move || write(client))).collect();
            until("writes", || answered.load(Relaxed) >= 60 || writers.iter().any(|writer| writer.is_finished()));
            signal(&server.child, by);
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        match by {
            Signal::TERM => drop(server.terminate()),
            _ => assert_eq!(server.child.wait().unwrap().signal(), Some(9)),
        }
        for (number, count) in counts.into_iter().enumerate() {
            let there = on_disk(&folder, &number.to_string());
            for (part, bytes) in parts.iter().enumerate().take(count) {
                assert!(there[part * PART..].starts_with(bytes), "{by:?}: {part} of {count} in {number}");
            }
        }
    }
}

/// Clients cannot open more connections than this process has descriptors for.
fn allow_many_descriptors() {
    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }).unwrap();
}

#[test]
fn idle_clients_and_half_a_request_stop_nobody() {
    let Some(folder) = folder() else { return };
    allow_many_descriptors();
    // As few descriptors as a login gives, and fewer than there are connections.
    let script = "ulimit -Sn 512; exec \"$0\" \"$@\"";
    let server =
        Server::of(folder.spawn(Command::new("sh").args(["-c", script, PROGRAM]).args(words(0, "--cache 64M"))));
    let idle: Vec<TcpStream> = (0..1000).map(|_| server.socket()).collect();
    let mut half = server.client();
    half.socket.write_all(&record(&call(1, (NFS, 3, 0), b""))[..20]).unwrap();
    let mut client = server.client();
    let root = client.root();
    let file = client.create(&root, b"file").unwrap();
    client.write(&file, 0, b"served", stable_how::FILE_SYNC);
    // The idle ones are served too, as soon as they ask.
    for socket in idle {
        assert!(is_success(&Rpc::of(socket).asked((NFS, 3, 0), b"").0));
    }
    let report = server.terminate();
    assert_eq!((&report["connections"], &report["refused_connections"]), (&1002.into(), &0.into()), "{report}");
    assert!(on_disk(&folder, "file") == b"served");
}

#[test]
fn connection_beyond_the_limit_takes_the_place_of_an_idle_one() {
    let Some(folder) = folder() else { return };
    let server = Server::start(&folder, "--cache 16M --max-connections 3");
    let mut served: Vec<Rpc> = (0..3).map(|_| server.client()).collect();
    served.iter_mut().for_each(|client| drop(client.root()));
    for _ in 0..5 {
        let mut next = server.client();
        next.root();
        assert!(served.remove(0).is_closed());
        served.push(next);
        served.iter_mut().for_each(|client| drop(client.root()));
    }
    let report = server.terminate();
    assert_eq!((&report["closed"]["idle"], &report["refused_connections"]), (&5.into(), &0.into()), "{report}");
}

/// Each client writes a file of its own, with several WRITEs of 1 MiB on the way at a time, and reads it back.
fn write_concurrently(server: &Server, clients: usize, mebibytes: usize) {
    thread::scope(|scope| {
        for number in 0..clients {
            scope.spawn(move || {
                let mut client = server.client();
                let root = client.root();
                let file = client.create(&root, number.to_string().as_bytes()).unwrap();
                let bytes = contents(number, mebibytes);
                for (group, parts) in bytes.chunks(4 * MIB).enumerate() {
                    write_at_once(&mut client, &file, group * 4 * MIB, parts);
                }
                client.commit(&file);
                for (part, expected) in bytes.chunks(MIB).enumerate() {
                    assert!(client.read(&file, (part * MIB) as u64, MIB) == expected, "{number}: {part}");
                }
            });
        }
    });
}

fn contents(number: usize, mebibytes: usize) -> Vec<u8> {
    let mut bytes = noise(mebibytes * MIB + number);
    bytes.truncate(mebibytes * MIB);
    bytes
}

/// Sends all before it waits for an answer. What was not written whole is sent again.
fn write_at_once(client: &mut Rpc, file: &nfs_fh3, at: usize, bytes: &[u8]) {
    let parts: Vec<(usize, &[u8])> = bytes.chunks(MIB).enumerate().map(|(it, part)| (at + it * MIB, part)).collect();
    let sent = parts.iter().map(|(at, part)| {
        client.send((NFS, 3, WRITE), &pack(&write_args(file, *at as u64, part, stable_how::UNSTABLE)))
    });
    let sent: Vec<u32> = sent.collect();
    let mut short = Vec::new();
    for _ in &sent {
        let (xid, body, results) = client.reply();
        assert!(is_success(&body), "{body:?}");
        let (at, part) = parts[sent.iter().position(|it| *it == xid).unwrap()];
        let count = match unpack(&results) {
            WRITE3res::Ok(ok) => ok.count as usize,
            WRITE3res::Err((nfsstat3::NFS3ERR_JUKEBOX, _)) => 0,
            WRITE3res::Err((status, _)) => panic!("{status:?}"),
        };
        if count < part.len() {
            short.push((at + count, &part[count..]));
        }
    }
    for (at, rest) in short {
        client.write(file, at as u64, rest, stable_how::UNSTABLE);
    }
}

#[test]
fn a_small_cache_takes_concurrent_writes_of_a_mebibyte() {
    let Some(folder) = folder() else { return };
    let server = Server::start(&folder, "--cache 1M --threads 8");
    write_concurrently(&server, 8, 12);
    server.terminate();
    for number in 0..8 {
        assert!(on_disk(&folder, &number.to_string()) == contents(number, 12), "{number}");
    }
}

#[test]
fn arrays_are_filled_at_once_while_memory_is_plentiful() {
    let Some(folder) = folder() else { return };
    let server = Server::start(&folder, "--cache 256M --threads 4");
    write_concurrently(&server, 4, 8);
    let report = server.terminate();
    let arrays = &report["arrays"];
    assert_eq!((&arrays["short_refills"], &arrays["sleeps"]), (&0.into(), &0.into()), "{report}");
    assert_eq!(arrays["holes"], arrays["pages"], "{report}");
    // The arrays, and a page for each that went to the cache.
    assert!(arrays["pages"].as_u64() >= Some(4 * 259 + 32 * 256), "{report}");
    for number in 0..4 {
        assert!(on_disk(&folder, &number.to_string()) == contents(number, 8), "{number}");
    }
}

#[test]
fn bytes_that_are_no_request_close_their_connection_alone() {
    let Some(folder) = folder() else { return };
    let server = Server::start(&folder, "--cache 16M");
    let mut client = server.client();
    let root = client.root();
    let reply = [0, 0, 0, 1, 0, 0, 0, 1];
    let hostile: [&[u8]; 8] = [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        // 2 GiB less a byte, in one fragment and in more of them.
        &[0xff; 64],
        &[0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 1],
        // Longer than a request of this kind may be, and an empty one.
        &[0x80, 0, 0x80, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 9, 0, 0, 0, 3, 0, 0, 0, 1],
        &[0x80, 0, 0, 0],
        &record(&reply),
        &record(b"short"),
        &record(&noise(1000)),
    ];
    for bytes in hostile {
        let mut socket = server.socket();
        socket.write_all(bytes).unwrap();
        assert!(Rpc::of(socket).is_closed(), "{bytes:x?}");
        assert_eq!(client.root(), root);
    }
    // Cut off within a request.
    let whole = record(&call(1, (NFS, 3, 1), &pack(&root)));
    for len in 1..whole.len() {
        server.socket().write_all(&whole[..len]).unwrap();
    }
    assert_eq!(client.root(), root);
    let report = server.terminate();
    assert_eq!(report["closed"]["malformed"], hostile.len(), "{report}");
}

#[test]
fn calls_that_cannot_be_are_answered_so() {
    let Some(folder) = folder() else { return };
    let server = Server::start(&folder, "--cache 16M");
    let mut client = server.client();
    let root = client.root();
    let mut becomes = |procedure, args: &[u8]| match client.asked(procedure, args).0 {
        reply_body::MSG_ACCEPTED(accepted_reply { reply_data, .. }) => reply_data,
        reply_body::MSG_DENIED(why) => panic!("{why:?}"),
    };
    let mismatch = |data| matches!(data, accept_stat_data::PROG_MISMATCH { low: 3, high: 3 });
    for version in [0, 2, 4, u32::MAX] {
        assert!(mismatch(becomes((NFS, version, 0), b"")) && mismatch(becomes((mount::PROGRAM, version, 0), b"")));
    }
    assert!(matches!(becomes((100_000, 2, 0), b""), accept_stat_data::PROG_UNAVAIL));
    assert!(matches!(becomes((NFS, 3, 22), b""), accept_stat_data::PROC_UNAVAIL));
    // Every procedure but NULL with no arguments, with too many, and with lengths that lie.
    let mut garbage = 0;
    for procedure in 1..22 {
        for args in [&b""[..], &[0xff; 40], &[&pack(&root)[..], &[0x7f; 8]].concat()[..7]] {
            let data = becomes((NFS, 3, procedure), args);
            assert!(matches!(data, accept_stat_data::GARBAGE_ARGS), "{procedure} {args:?}: {data:?}");
            garbage += 1;
        }
    }
    // Another version of RPC.
    let mut other = call(9, (NFS, 3, 0), b"");
    other[11] = 3;
    client.socket.write_all(&record(&other)).unwrap();
    let denied = client.reply().1;
    assert!(matches!(denied, reply_body::MSG_DENIED(rejected_reply::RPC_MISMATCH { low: 2, high: 2 })), "{denied:?}");
    assert_eq!(client.root(), root);
    let report = server.terminate();
    assert_eq!((&report["garbage"], &report["denied"]), (&garbage.into(), &1.into()), "{report}");
}

#[test]
fn names_lead_nowhere_out_of_the_tree() {
    let Some(folder) = folder() else { return };
    folder.file("secret", b"outside");
    let server = Server::start(&folder, "--cache 16M");
    let mut client = server.client();
    let root = client.root();
    let inside = client.mkdir(&root, b"inside").unwrap();
    assert_eq!(client.lookup(&root, b"..").unwrap(), root);
    assert_eq!(client.lookup(&inside, b"..").unwrap(), root);
    for name in [&b"../secret"[..], b"inside/..", b"/etc/passwd", b"nul\0name", b"", b"/", &[b'n'; 256]] {
        assert!(client.lookup(&root, name).is_err(), "{name:?}");
        assert!(client.create(&root, name).is_err(), "{name:?}");
        assert!(client.mkdir(&root, name).is_err(), "{name:?}");
    }
    let tree = folder.path("tree").display().to_string();
    for path in ["/etc", &format!("{tree}/.."), &format!("{tree}/inside/../.."), "..", "", &format!("{tree}\0")] {
        assert!(client.mount(path.as_bytes()).is_err(), "{path:?}");
    }
    assert!(matches!(client.mount(format!("{tree}/none").as_bytes()), Err(mountstat3::MNT3ERR_NOENT)));
    assert_eq!(client.mount(format!("{tree}/inside").as_bytes()).unwrap(), inside);
    server.terminate();
    let names: Vec<_> = fs::read_dir(folder.path("tree")).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert_eq!(names, ["inside"]);
    assert_eq!(folder.names(), ["key", "secret", "tree"]);
}

#[test]
fn clients_that_are_not_trusted_are_refused() {
    let Some(folder) = folder() else { return };
    let server = Server::start(&folder, "--cache 16M --allow 127.0.0.1");
    // A port that any user may use: no more than NULL.
    let mut user = Rpc::of(server.socket());
    assert!(is_success(&user.asked((NFS, 3, 0), b"").0));
    for procedure in [(mount::PROGRAM, 3, 1), (NFS, 3, 1), (NFS, 3, 9)] {
        let (body, _) = user.asked(procedure, b"");
        let is_weak = matches!(body, reply_body::MSG_DENIED(rejected_reply::AUTH_ERROR(auth_stat::AUTH_TOOWEAK)));
        assert!(is_weak, "{body:?}");
    }
    // Another address.
    for _ in 0..2 {
        assert!(Rpc::of(connect_from(Ipv4Addr::new(127, 0, 0, 2), server.address)).is_closed());
    }
    server.client().root();
    let report = server.terminate();
    assert_eq!((&report["denied"], &report["refused_clients"]), (&3.into(), &2.into()), "{report}");

    let server = Server::start(&folder, "--cache 16M --insecure");
    Rpc::of(server.socket()).root();
    Rpc::of(connect_from(Ipv4Addr::new(127, 0, 0, 2), server.address)).root();
    server.terminate();
}

/// What the server says instead of serving.
#[track_caller]
fn refused(folder: &Folder, line: &str, words: &[&str]) {
    folder.pagemill(&line.split(' ').collect::<Vec<_>>()).refused_by("nfs: serve", words);
}

#[test]
fn what_cannot_be_served_is_refused_with_the_next_step() {
    let Some(folder) = folder() else { return };
    folder.file("file", b"");
    for address in ["0.0.0.0", "::", "192.0.2.1"] {
        refused(&folder, &format!("nfs serve tree --state key --address {address}"), &[address, "--allow"]);
    }
    refused(&folder, "nfs serve missing --state key", &["missing does not exist", "give a directory that does"]);
    refused(&folder, "nfs serve file --state key", &["file is no directory", "give a directory"]);
    // It has no handles, and no key is left behind for them.
    refused(&folder, "nfs serve /proc --state new-key", &["no file handles", "ext4"]);
    assert!(!Path::new(&folder.path("new-key")).exists());
    for key in ["file", "tree", "file/key", "/proc/key"] {
        refused(&folder, &format!("nfs serve tree --state {key}"), &[key, "--state"]);
    }
    refused(&folder, "nfs serve tree --state key --cache 1T", &["this machine's memory", "give less"]);
    for stats in ["file", "missing/socket"] {
        refused(&folder, &format!("nfs serve tree --state key --cache 16M --stats {stats}"), &[stats, "--stats"]);
    }
    let server = Server::start(&folder, "--cache 16M");
    let port = server.address.port().to_string();
    refused(&folder, &format!("nfs serve tree --state key --cache 16M --port {port}"), &[&port, "in use", "--port"]);
    server.client().root();
    server.terminate();
}

#[test]
fn without_privileges_it_says_to_run_it_as_root() {
    let Some(folder) = folder() else { return };
    let setpriv = |options: &[&str], line: &str| -> Outcome {
        let args = line.split(' ');
        folder.run(Command::new("setpriv").args(options).arg(PROGRAM).args(args))
    };
    let probe = Command::new("setpriv").arg("--version").stdout(Stdio::null()).status();
    if probe.is_err() {
        println!("skipped: setpriv is not installed");
        return;
    }
    let user = ["--reuid", "65534", "--regid", "65534", "--clear-groups"];
    setpriv(&user, "nfs serve tree --cache 16M --port 0").refused_by("nfs: serve", &["run it as root"]);
    // Root, and not allowed to act for others, or to open files by their handles.
    for lacks in ["-setuid", "-setgid", "-dac_read_search"] {
        let options = ["--inh-caps", lacks, "--bounding-set", lacks];
        let outcome = setpriv(&options, "nfs serve tree --state key --cache 16M --port 0");
        outcome.refused_by("nfs: serve", &["run it as root"]);
    }
}
