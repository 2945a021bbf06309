//! `pagemill crypt serve` as a process: flushed data survives it, signals end it, and it refuses what it must.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use crate::common::{Folder, Outcome, PROGRAM, signal, until};
use rustix::process::Signal;

const BYTES: usize = 4 << 20;

/// Runs `pagemill` with these words.
pub(crate) fn pagemill(folder: &Folder, words: &str) -> Outcome {
    folder.run(Command::new(PROGRAM).args(words.split(' ')))
}

/// A folder with a volume of [`BYTES`].
fn folder() -> Folder {
    folder_with("20M", QUICK)
}

/// Options of `format` for a key that is made quickly.
pub(crate) const QUICK: &str = "--kdf pbkdf2 --kdf-iterations 1000";

pub(crate) fn folder_with(size: &str, kdf: &str) -> Folder {
    let folder = Folder::new();
    folder.file("key", &[7; 32]);
    let format = format!("crypt format volume --size {size} --key-file key {kdf}");
    let made = pagemill(&folder, &format);
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    folder
}

/// A process that ends with the test, whether or not the test succeeds.
pub(crate) struct Serving(pub(crate) Child);

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Serving {
    /// Starts `pagemill` with these words.
    pub(crate) fn start(folder: &Folder, words: &str) -> Self {
        Self(folder.spawn(Command::new(PROGRAM).args(words.split(' '))))
    }

    /// The first line that it prints.
    pub(crate) fn first_line(&mut self) -> String {
        BufReader::new(self.0.stderr.take().unwrap()).lines().next().unwrap().unwrap()
    }
}

/// Starts a server, and waits until it serves.
pub(crate) fn serve(folder: &Folder, more: &str) -> Serving {
    let mut child = Serving::start(folder, &format!("crypt serve volume --key-file key --unix socket {more}"));
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

/// Runs `nbdcopy` in the folder.
pub(crate) fn nbdcopy(folder: &Folder, from: &str, to: &str) {
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

pub(crate) fn uri(folder: &Folder) -> String {
    format!("nbd+unix:///?socket={}", folder.path("socket").display())
}

#[test]
fn flushed_data_survives_kill_9() {
    if !has_nbdcopy() {
        return;
    }
    for io in ["auto", "plain"] {
        let folder = folder();
        let noise: Vec<u8> = (0..BYTES as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        folder.file("raw", &noise);
        let mut child = serve(&folder, &format!("--io {io}"));
        nbdcopy(&folder, "raw", &uri(&folder));
        child.0.kill().unwrap();
        child.0.wait().unwrap();
        assert!(folder.path("socket").exists(), "it had no time to remove it");
        fs::remove_file(folder.path("socket")).unwrap();
        let _child = serve(&folder, &format!("--io {io} --read-only"));
        nbdcopy(&folder, &uri(&folder), "back");
        assert!(fs::read(folder.path("back")).unwrap() == noise, "{io}");
    }
}

/// What common clients do for their users, one after the other on the same volume: `nbdcopy` on four connections,
/// `qemu-img`, `qemu-io`, and `nbdsh` as `python3 -m nbd`.
#[test]
fn common_clients_copy_convert_compare_and_check() {
    let asked = [&["nbdcopy"][..], &["qemu-img"], &["qemu-io"], &NBDSH];
    for program in asked {
        let mut command = Command::new(program[0]);
        let is_here = command.args(&program[1..]).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if !is_here.is_ok_and(|status| status.success()) {
            return eprintln!("skipped: {program:?} is not installed");
        }
    }
    let noise: Vec<u8> = (0..8 * BYTES as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let reversed: Vec<u8> = noise.iter().rev().copied().collect();
    for io in ["auto", "plain"] {
        let folder = folder_with("48M", QUICK);
        folder.file("raw", &noise);
        folder.file("reversed", &reversed);
        let _server = serve(&folder, &format!("--io {io} --threads 3"));
        let uri = uri(&folder);
        let run = |words: &[&str]| {
            let ran = folder.run(Command::new(words[0]).args(&words[1..]));
            assert_eq!(ran.code, Some(0), "--io {io}: {words:?}: {}{}", ran.stdout, ran.stderr);
            ran.stdout
        };
        run(&["nbdcopy", "--connections=4", "--flush", "raw", &uri]);
        run(&["nbdcopy", "--connections=4", &uri, "back"]);
        assert!(fs::read(folder.path("back")).unwrap() == noise, "--io {io}: nbdcopy");

        let compare = ["qemu-img", "compare", "-f", "raw", "-F", "raw"];
        run(&[&compare[..], &["raw", &uri]].concat());
        run(&["qemu-img", "convert", "-f", "raw", "-O", "qcow2", "-m", "8", "-W", &uri, "copy.qcow2"]);
        run(&["qemu-img", "compare", "-f", "raw", "-F", "qcow2", "raw", "copy.qcow2"]);
        run(&["qemu-img", "convert", "-n", "-W", "-m", "8", "-f", "raw", "-O", "raw", "reversed", &uri]);
        run(&[&compare[..], &["reversed", &uri]].concat());
        let other = folder.run(Command::new(compare[0]).args(&compare[1..]).args(["raw", &uri]));
        assert_eq!(other.code, Some(1), "--io {io}: {}", other.stdout);

        // A read with -P says "Pattern verification failed" if it finds something else.
        let commands = [
            "write -P 0xa5 1M 3M",
            "aio_write -P 0x11 1536 64k",
            "aio_write -f -P 0x22 5M 512k",
            "aio_flush",
            "write -z 2M 64k",
            "writev -P 0x33 7M 4k 512 12k 64k",
            "flush",
            "read -P 0xa5 1M 1M",
            "read -P 0 2M 64k",
            "read -P 0xa5 2162688 2031616",
            "aio_read -P 0x11 1536 64k",
            "aio_read -P 0x22 5M 512k",
            "readv -P 0x33 7M 64k 12k 4k 512",
            "aio_flush",
        ];
        let commands: Vec<_> = commands.iter().flat_map(|command| ["-c", command]).collect();
        let checked = run(&[&["qemu-io", "-f", "raw"], &commands[..], &[&uri]].concat());
        assert!(checked.contains("read 65536/65536 bytes") && !checked.contains("failed"), "--io {io}: {checked}");
        run(&[&NBDSH[..], &["--uri", &uri, "--command", MANY_AT_ONCE]].concat());
    }
}

const NBDSH: [&str; 3] = ["/usr/bin/python3", "-m", "nbd"];

/// 200 writes at once, some of them durable, and then as many reads, compared with a model.
const MANY_AT_ONCE: &str = "
import random
assert h.can_flush() and h.can_fua() and h.can_multi_conn()
numbers = random.Random(7)
model = bytearray(h.pread(1 << 20, 0))
pieces = {4096 * place: numbers.randbytes(4096) for place in numbers.sample(range(256), 200)}

def wait(cookies):
    while cookies:
        h.poll(-1)
        cookies = [cookie for cookie in cookies if not h.aio_command_completed(cookie)]

def durable(at):
    return nbd.CMD_FLAG_FUA if at % 7 == 0 else 0

buffers = {at: nbd.Buffer.from_bytearray(bytearray(piece)) for at, piece in pieces.items()}
wait([h.aio_pwrite(buffer, at, flags=durable(at)) for at, buffer in buffers.items()])
h.flush()
for at, piece in pieces.items():
    model[at : at + 4096] = piece
read = {at: nbd.Buffer(4096) for at in pieces}
wait([h.aio_pread(buffer, at) for at, buffer in read.items()])
assert all(buffer.to_bytearray() == pieces[at] for at, buffer in read.items())
assert h.pread(1 << 20, 0) == model
try:
    h.pread(4096, h.get_size())
    raise SystemExit('a read beyond the end was answered')
except nbd.Error as error:
    assert error.errno in ('EINVAL', 'ENOSPC'), error.errno
";

/// The help's example, in a folder with a volume and its key.
#[test]
fn the_example_in_its_help_runs() {
    let folder = folder();
    fs::rename(folder.path("volume"), folder.path("disk.img")).unwrap();
    fs::rename(folder.path("key"), folder.path("disk.key")).unwrap();
    let help = folder.run(Command::new(PROGRAM).args(["crypt", "serve", "--help"]));
    let lines = help.stdout.lines().skip_while(|line| !line.starts_with("Example")).skip(1);
    let example: Vec<_> = lines.map_while(|line| line.strip_prefix("  ")).collect();
    let [server, client] = example[..] else { panic!("{}", help.stdout) };
    let mut serving = Serving::start(&folder, server.strip_prefix("pagemill ").unwrap());
    let first = serving.first_line();
    assert!(first.contains("serving 4194304 bytes"), "{first}");
    if has_nbdcopy() {
        let copied = folder.run(Command::new("sh").args(["-c", client]));
        assert_eq!(copied.code, Some(0), "{}", copied.stderr);
        assert_eq!(fs::metadata(folder.path("copy.img")).unwrap().len(), BYTES as u64);
    }
}

#[test]
fn signals_end_it_and_remove_its_socket() {
    for by in [Signal::TERM, Signal::INT] {
        let folder = folder();
        let mut child = serve(&folder, "--threads 3 --name disk");
        signal(&child.0, by);
        assert_eq!(child.0.wait().unwrap().code(), Some(0));
        assert!(!folder.path("socket").exists());
        let first = child.first_line();
        assert!(first.contains("serving 4194304 bytes at") && first.contains("3 threads"), "{first}");
    }
}

/// The server answers the writes that it has, and refuses later ones with an error that libnbd understands.
#[test]
fn a_client_that_writes_at_sigterm_gets_an_error_on_its_connections() {
    if !has_nbdcopy() {
        return;
    }
    let folder = folder_with("80M", QUICK);
    let volume = File::open(folder.path("volume")).unwrap();
    let mut is_told = false;
    for round in 0..5 {
        // Other bytes each time, so that a write shows.
        folder.file("raw", &vec![round + 1; 16 * BYTES]);
        let sector = || {
            let mut bytes = [0; 512];
            volume.read_exact_at(&mut bytes, 20 << 20).unwrap();
            bytes
        };
        let before = sector();
        let io = if round % 2 == 0 { "auto" } else { "plain" };
        let mut server = serve(&folder, &format!("--threads 2 --io {io}"));
        let copy = ["--connections=4", "raw", &uri(&folder)];
        let mut copy = Serving(folder.spawn(Command::new("nbdcopy").args(copy)));
        until("a write", || sector() != before || copy.0.try_wait().unwrap().is_some());
        signal(&server.0, Signal::TERM);
        let mut said = String::new();
        copy.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        let is_whole = copy.0.wait().unwrap().success();
        assert_eq!(server.0.wait().unwrap().code(), Some(0), "round {round}");
        assert!(!said.contains("cookie"), "round {round}: {said}");
        is_told |= is_whole || said.contains("Cannot send after transport endpoint shutdown");
    }
    // Not each time: a client that gets no processor for a second counts as silent.
    assert!(is_told, "its connections ended without an error");
}

#[test]
fn a_socket_left_behind_is_replaced_and_one_in_use_is_not() {
    let folder = folder();
    let mut child = serve(&folder, "--read-only");
    let second = "crypt serve volume --key-file key --unix socket --read-only";
    let refused = pagemill(&folder, second);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("another process answers there already"), "{}", refused.stderr);
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    assert!(UnixStream::connect(folder.path("socket")).is_err(), "no process serves");
    let mut child = Serving::start(&folder, second);
    let first = child.first_line();
    assert!(first.contains("serving"), "{first}");
    UnixStream::connect(folder.path("socket")).unwrap();
}

/// Makes a certificate that is its own authority.
fn certificate(folder: &Folder) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
    folder.file("server.pem", made.cert.pem().as_bytes());
    folder.file("ca-cert.pem", made.cert.pem().as_bytes());
    folder.file("server.key", made.signing_key.serialize_pem().as_bytes());
}

#[test]
fn it_serves_on_a_port_by_tls() {
    if !has_nbdcopy() {
        return;
    }
    let folder = folder();
    certificate(&folder);
    let args = "crypt serve volume --key-file key --tcp 127.0.0.1:0 --tls-cert server.pem --tls-key server.key";
    let mut child = Serving::start(&folder, args);
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
    let folder = folder();
    for address in ["0.0.0.0:0", "[::]:0"] {
        let refused = pagemill(&folder, &format!("crypt serve volume --key-file key --tcp {address}"));
        assert_eq!(refused.code, Some(1));
        assert!(refused.stderr.contains("--allow-plaintext"), "{}", refused.stderr);
    }
    // With TLS, the system refuses this address: it is reserved for documentation, and no machine has it.
    certificate(&folder);
    let args = "crypt serve volume --key-file key --tcp 192.0.2.1:0 --tls-cert server.pem --tls-key server.key";
    let refused = pagemill(&folder, args);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("192.0.2.1") && !refused.stderr.contains("plaintext"), "{}", refused.stderr);
    let half = args.strip_suffix(" --tls-key server.key").unwrap();
    let refused = pagemill(&folder, half);
    assert_eq!(refused.code, Some(2), "a certificate without its key: {}", refused.stderr);
    assert_eq!(pagemill(&folder, "crypt serve volume").code, Some(2), "neither a socket nor an address");
}

#[test]
fn a_wrong_passphrase_has_an_exit_code_of_its_own() {
    let folder = folder();
    folder.file("wrong", &[8; 32]);
    for (key, code) in [("key", 0), ("wrong", 3), ("none", 1)] {
        let ran = pagemill(&folder, &format!("crypt test-passphrase volume --key-file {key}"));
        assert_eq!(ran.code, Some(code), "{key}: {}", ran.stderr);
    }
    assert_eq!(pagemill(&folder, "crypt serve volume --key-file wrong --unix socket").code, Some(3));
}

/// SIGKILL comes when the new files exist and the program waits for its passphrase.
#[test]
fn a_killed_format_leaves_no_files() {
    let folder = Folder::new();
    let args = "crypt format volume --size 20M --header header --key-file /dev/stdin";
    let mut command = Command::new(PROGRAM);
    command.args(args.split(' ')).current_dir(folder.path("")).stdin(Stdio::piped()).stderr(Stdio::null());
    let mut child = Serving(command.spawn().unwrap());
    let inside = fs::canonicalize(folder.path("")).unwrap();
    let files_of = |pid: u32| -> usize {
        let files =
            fs::read_dir(format!("/proc/{pid}/fd")).unwrap().filter_map(|file| fs::read_link(file.ok()?.path()).ok());
        // A lock of a file has a descriptor of its own.
        files.filter(|file| file.starts_with(&inside)).collect::<std::collections::BTreeSet<_>>().len()
    };
    until("both files", || {
        assert!(child.0.try_wait().unwrap().is_none(), "it has ended");
        files_of(child.0.id()) == 2
    });
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    assert_eq!(folder.names(), [""; 0]);
}

#[test]
fn metrics_are_answered_at_an_address_of_this_machine() {
    let folder = folder();
    let words = "crypt serve volume --key-file key --unix socket --reserve 256 --metrics 0";
    let mut child = Serving::start(&folder, words);
    let mut lines = BufReader::new(child.0.stderr.take().unwrap()).lines().map(Result::unwrap);
    let said = lines.by_ref().find(|line| line.contains("figures at ")).unwrap();
    let address = said.split("http://").nth(1).unwrap().strip_suffix("/metrics").unwrap();
    assert!(address.starts_with("127.0.0.1:"), "{said}");
    let ask = || -> Result<String, std::io::Error> {
        let mut client = TcpStream::connect(address)?;
        client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n")?;
        let mut answer = String::new();
        client.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer = ask().unwrap();
    for line in [
        "HTTP/1.1 200 OK\r",
        "pagemill_zone_managed_pages{allocator=\"crypt\",node=\"0\",zone=\"Normal\"} 32768",
        "pagemill_pool_size{allocator=\"crypt\",pool=\"writes\"} 256",
    ] {
        assert!(answer.split('\n').any(|other| other == line), "no {line:?} in {answer}");
    }
    // The address is in use: a second server says so, before it asks for a passphrase.
    let port = address.split(':').nth(1).unwrap();
    let second = pagemill(&folder, &format!("crypt serve no-volume --unix other --metrics {port}"));
    second.refused_by("crypt", &[address, "in use"]);
    signal(&child.0, Signal::TERM);
    assert!(child.0.wait().unwrap().success());
    assert!(ask().is_err(), "nothing answers there any more");
}
