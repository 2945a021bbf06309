//! `pagemill crypt serve` as a service: what it logs, its signals, and what systemd tells it and hears from it.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::{Folder, PATIENCE, PROGRAM, signal, until};
use rustix::process::Signal;

/// A server that is patient with clients on a busy machine.
const SERVE: &str = "crypt serve volume --key-file key --handshake-timeout 600";

/// A folder with a volume.
fn folder() -> Folder {
    let folder = Folder::new();
    folder.file("key", &[7; 32]);
    let format = "crypt format volume --size 20M --key-file key --kdf pbkdf2 --kdf-iterations 1000";
    let made = folder.run(Command::new(PROGRAM).args(format.split(' ')));
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    folder
}

/// A server, which ends with the test, and the lines that it has logged so far.
pub(crate) struct Service {
    child: Child,
    pub(crate) lines: Arc<Mutex<Vec<String>>>,
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Service {
    fn start(folder: &Folder, more: &str) -> Self {
        let words = format!("{SERVE} {more}");
        Self::run(folder, Command::new(PROGRAM).args(words.split(' ')))
    }

    /// Runs what becomes the server.
    pub(crate) fn run(folder: &Folder, command: &mut Command) -> Self {
        command.current_dir(folder.path("")).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines: Arc<Mutex<Vec<String>>> = Arc::default();
        let (theirs, stderr) = (Arc::clone(&lines), child.stderr.take().unwrap());
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines() {
                theirs.lock().unwrap().push(line.unwrap());
            }
        });
        Self { child, lines }
    }

    /// The first line that has all of `parts`, once it is there.
    #[track_caller]
    pub(crate) fn says(&self, parts: &[&str]) -> String {
        let start = Instant::now();
        loop {
            let is_over = Arc::strong_count(&self.lines) == 1;
            let lines = self.lines.lock().unwrap();
            if let Some(line) = lines.iter().find(|line| parts.iter().all(|part| line.contains(part))) {
                return line.clone();
            }
            assert!(!is_over && start.elapsed() < PATIENCE, "{parts:?} never came: {lines:#?}");
            drop(lines);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn signal(&self, by: Signal) {
        signal(&self.child, by);
    }

    /// Its exit code, once it has ended.
    pub(crate) fn ends(&mut self) -> Option<i32> {
        let status = self.child.wait().unwrap();
        until("the end of the log", || Arc::strong_count(&self.lines) == 1);
        status.code()
    }
}

/// Connects, once somebody listens.
fn connected(folder: &Folder) -> UnixStream {
    let mut client = None;
    until("a server", || {
        client = UnixStream::connect(folder.path("socket")).ok();
        client.is_some()
    });
    client.unwrap()
}

/// Connects, and negotiates as far as the client's flags.
fn greeted(folder: &Folder) -> UnixStream {
    let mut client = connected(folder);
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client.read_exact(&mut [0; 18]).unwrap();
    client.write_all(&3u32.to_be_bytes()).unwrap();
    client
}

fn option(number: u32, data: &[u8]) -> Vec<u8> {
    [&b"IHAVEOPT"[..], &number.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data].concat()
}

/// Reads to the end, which is all that comes after the answers.
fn until_end(client: &mut UnixStream) -> Vec<u8> {
    let mut rest = Vec::new();
    // A reset is an end, too.
    let _ = client.read_to_end(&mut rest);
    rest
}

/// A client that comes, says goodbye and is answered.
fn visit(folder: &Folder) {
    let mut client = greeted(folder);
    client.write_all(&option(2, &[])).unwrap();
    assert_eq!(until_end(&mut client).len(), 20);
}

#[test]
fn clients_are_logged_when_they_come_and_go_and_why() {
    let folder = folder();
    let mut service = Service::start(&folder, "--unix socket --max-connections 1 --threads 1");
    service.says(&["INFO ", "serving 4194304 bytes at nbd+unix:///?socket=socket", "1 threads"]);
    visit(&folder);
    let us = format!("peer=\"pid {} of uid {}\"", std::process::id(), rustix::process::getuid().as_raw());
    service.says(&["INFO  client connected client=1", &us]);
    service.says(&["INFO  client gone client=1", &us, "it said that it was done", "requests=0"]);
    drop(greeted(&folder));
    service.says(&["client gone client=2", "it closed the connection"]);
    let mut liar = greeted(&folder);
    liar.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    until_end(&mut liar);
    service.says(&["WARN  client cut off client=3", "it broke the protocol: an option does not begin as one"]);
    let silent = greeted(&folder);
    until_end(&mut connected(&folder));
    service.says(&["WARN  refused a client", "most=1"]);
    drop(silent);
    service.says(&["client gone client=4", "it closed the connection"]);
    // Names are a client's own.
    let mut hostile = greeted(&folder);
    let name = b"\n<0>2026 all is lost\x1b[2J\xff\xe2\x80\xae\"";
    let asked = [&(name.len() as u32).to_be_bytes()[..], name, &[0, 0]].concat();
    hostile.write_all(&[option(7, &asked), option(2, &[])].concat()).unwrap();
    until_end(&mut hostile);
    let escaped = r#"export="\n<0>2026 all is lost\u{1b}[2J�\u{202e}\"""#;
    service.says(&["a client asks for an export that is not here client=5", escaped]);
    service.says(&["client gone client=5"]);
    service.signal(Signal::TERM);
    assert_eq!(service.ends(), Some(0));
    let lines = service.lines.lock().unwrap();
    assert!(lines.iter().all(|line| is_plain_line(line)), "{lines:?}");
    assert!(lines[lines.len() - 2].contains("INFO  stopping") && lines[lines.len() - 1].contains("INFO  stopped"));
}

#[test]
fn clients_that_do_not_negotiate_in_time_are_logged() {
    let folder = folder();
    let words = "crypt serve volume --key-file key --unix socket --handshake-timeout 1".split(' ');
    let mut service = Service::run(&folder, Command::new(PROGRAM).args(words));
    until_end(&mut connected(&folder));
    service.says(&["WARN  client cut off client=1", "it did not negotiate within --handshake-timeout"]);
    service.signal(Signal::TERM);
    assert_eq!(service.ends(), Some(0));
}

/// Whether a line begins with a time and a level, and is printable and short.
pub(crate) fn is_plain_line(line: &str) -> bool {
    let Some((time, rest)) = line.split_once("Z ") else { return false };
    let is_time = time.bytes().all(|byte| byte.is_ascii_digit() || b"-T:.".contains(&byte)) && time.len() == 23;
    let has_level = ["ERROR ", "WARN  ", "INFO  ", "DEBUG "].iter().any(|level| rest.starts_with(level));
    is_time && has_level && line.len() < 1024 && !line.chars().any(char::is_control)
}

#[test]
fn a_level_is_chosen_and_the_journal_gets_priorities() {
    let folder = folder();
    for (level, is_journal) in [("info", true), ("warn", true), ("error", false)] {
        let log = File::create(folder.path("log")).unwrap();
        let there = log.metadata().unwrap();
        // The service manager's stream is another one if this is not the journal.
        let stream = format!("{}:{}", there.dev(), there.ino() + u64::from(!is_journal));
        let words = format!("{SERVE} --unix socket --log {level}");
        let mut command = Command::new(PROGRAM);
        command.args(words.split(' ')).current_dir(folder.path("")).env("JOURNAL_STREAM", stream).stderr(log);
        let mut child = command.spawn().unwrap();
        let mut liar = greeted(&folder);
        liar.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        until_end(&mut liar);
        signal(&child, Signal::TERM);
        assert!(child.wait().unwrap().success());
        let said = fs::read_to_string(folder.path("log")).unwrap();
        let lines: Vec<_> = said.lines().collect();
        match level {
            "info" => {
                assert!(lines[0].starts_with("<6>serving "), "{said}");
                assert!(lines.iter().any(|line| line.starts_with("<4>client cut off client=1 ")), "{said}");
                assert!(lines.last().unwrap().starts_with("<6>stopped"), "{said}");
            }
            "warn" => assert!(lines.len() == 1 && lines[0].starts_with("<4>client cut off"), "{said}"),
            _ => assert_eq!(said, ""),
        }
    }
    let wrong = folder.pagemill(&["crypt", "serve", "volume", "--unix", "socket", "--log", "loud"]);
    assert_eq!(wrong.code, Some(2));
}

#[test]
fn a_log_that_nobody_reads_holds_up_nobody() {
    let folder = folder();
    for how in ["full", "gone", "closed"] {
        let (reader, writer) = std::io::pipe().unwrap();
        let full = match how {
            "full" => {
                // Until the pipe takes nothing more.
                rustix::io::ioctl_fionbio(&writer, true).unwrap();
                let mut bytes = 0;
                while let Ok(more) = (&writer).write(&[b'x'; 4096]) {
                    bytes += more;
                }
                rustix::io::ioctl_fionbio(&writer, false).unwrap();
                bytes
            }
            _ => 0,
        };
        let mut reader = Some(reader);
        let mut command = Command::new("sh");
        let words = format!("{SERVE} --unix socket");
        let run = if how == "closed" { "exec \"$0\" \"$@\" 2>&-" } else { "exec \"$0\" \"$@\"" };
        command.args(["-c", run, PROGRAM]).args(words.split(' ')).current_dir(folder.path("")).stderr(writer);
        let mut child = command.spawn().unwrap();
        drop(command);
        if how == "gone" {
            reader = None;
        }
        // Far more lines than wait to be written.
        (0..1500).for_each(|_| visit(&folder));
        signal(&child, Signal::TERM);
        assert!(child.wait().unwrap().success(), "{how}");
        let mut said = Vec::new();
        reader.into_iter().for_each(|mut reader| _ = reader.read_to_end(&mut said).unwrap());
        assert!(said[..full].iter().all(|&byte| byte == b'x'), "{how}");
        assert!(how == "full" || said.is_empty(), "{how}");
    }
}

#[test]
fn a_flood_of_clients_does_not_flood_the_log() {
    const CLIENTS: usize = 2000;
    let folder = folder();
    let mut service = Service::start(&folder, "--unix socket --max-connections 5000");
    service.says(&["serving"]);
    (0..CLIENTS - 1).for_each(|_| drop(UnixStream::connect(folder.path("socket")).unwrap()));
    // They are accepted in their order, so this one is the last.
    visit(&folder);
    service.signal(Signal::TERM);
    assert_eq!(service.ends(), Some(0));
    let lines = service.lines.lock().unwrap();
    // Every client that came is a line, or counted in one.
    let sum = |of: &str, more: &str| {
        let said = lines.iter().filter(|line| line.contains(of)).count() as u64;
        let counted = lines
            .iter()
            .filter(|line| line.ends_with(more))
            .map(|line| line.split("… ").nth(1).unwrap().split(' ').next().unwrap().parse::<u64>().unwrap());
        let counted: Vec<_> = counted.collect();
        assert!(!counted.is_empty(), "{more}: {lines:?}");
        said + counted.iter().sum::<u64>()
    };
    let came = sum("client connected client=", "more like this: client connected");
    assert_eq!(came, CLIENTS as u64);
    assert!(lines.len() < CLIENTS, "{} lines", lines.len());
}

#[test]
fn a_refused_lock_is_said_when_it_happens() {
    let folder = folder();
    // Root may lock whatever the limit is, unless it gives that up.
    let without = ["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-all"];
    let words = format!("{SERVE} --unix socket");
    let is_root = rustix::process::geteuid().is_root();
    let run = ["sh", "-c", "ulimit -l 0; exec \"$0\" \"$@\"", PROGRAM];
    let all: Vec<&str> = without.into_iter().filter(|_| is_root).chain(run).chain(words.split(' ')).collect();
    let mut service = Service::run(&folder, Command::new(all[0]).args(&all[1..]));
    service.says(&["WARN  keys may reach the swap space", "why=\"Operation not permitted", "LimitMEMLOCK"]);
    service.says(&["serving"]);
    let count = |lines: &[String]| lines.iter().filter(|line| line.contains("swap space")).count();
    service.signal(Signal::TERM);
    assert_eq!(service.ends(), Some(0));
    assert_eq!(count(&service.lines.lock().unwrap()), 1, "once, and not again at the end");
}

#[test]
fn sighup_without_tls_is_like_sigterm_unless_it_was_ignored() {
    let folder = folder();
    let words = format!("{SERVE} --unix socket");
    // The tests themselves may run under nohup.
    let mut command = Command::new("env");
    command.args(["--default-signal=HUP", PROGRAM]).args(words.split(' '));
    let mut service = Service::run(&folder, &mut command);
    service.says(&["serving"]);
    service.signal(Signal::HUP);
    assert_eq!(service.ends(), Some(0));
    assert!(!folder.path("socket").exists());
    let ignoring = ["-c", "trap '' HUP; exec \"$0\" \"$@\"", PROGRAM];
    let mut service = Service::run(&folder, Command::new("sh").args(ignoring).args(words.split(' ')));
    service.says(&["serving"]);
    service.signal(Signal::HUP);
    visit(&folder);
    service.signal(Signal::TERM);
    assert_eq!(service.ends(), Some(0));
    assert!(service.lines.lock().unwrap().iter().any(|line| line.contains("client gone client=1")));
}

/// Writes a new certificate and its key, and the folder of clients that trust it.
pub(crate) fn certificate(folder: &Folder, trust: &str) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
    fs::create_dir(folder.path(trust)).unwrap();
    folder.file(&format!("{trust}/ca-cert.pem"), made.cert.pem().as_bytes());
    folder.file("server.pem", made.cert.pem().as_bytes());
    folder.file("server.key", made.signing_key.serialize_pem().as_bytes());
}

#[test]
fn sighup_loads_the_certificates_again_and_keeps_the_old_ones_if_the_new_are_unfit() {
    let folder = folder();
    certificate(&folder, "first");
    let mut service = Service::start(&folder, "--tcp 127.0.0.1:0 --tls-cert server.pem --tls-key server.key");
    let line = service.says(&["serving"]);
    let uri =
        line.split_whitespace().find_map(|word| word.strip_suffix(':').filter(|word| word.starts_with("nbds://")));
    let uri = uri.unwrap().to_owned();
    let trusts = |trust: &str| {
        let uri = format!("{uri}/?tls-certificates={}", folder.path(trust).display());
        folder.run(Command::new("nbdinfo").args(["--size", &uri])).code == Some(0)
    };
    assert!(trusts("first"));
    certificate(&folder, "second");
    assert!(trusts("first"), "nobody has told it yet");
    service.signal(Signal::HUP);
    service.says(&["INFO  loaded the certificates again"]);
    assert!(trusts("second") && !trusts("first"));
    let mut liar = TcpStream::connect(uri.strip_prefix("nbds://").unwrap()).unwrap();
    liar.read_exact(&mut [0; 18]).unwrap();
    liar.write_all(&[&3u32.to_be_bytes(), &option(5, &[])[..]].concat()).unwrap();
    liar.read_exact(&mut [0; 20]).unwrap();
    liar.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    service.says(&["WARN  client cut off", "TLS failed: "]);
    folder.file("server.key", b"no key");
    service.signal(Signal::HUP);
    service.says(&["ERROR new clients get the certificates that were loaded before", "server.key: no private key"]);
    assert!(trusts("second"));
    fs::remove_file(folder.path("server.pem")).unwrap();
    service.signal(Signal::HUP);
    service.says(&["ERROR", "server.pem: No such file"]);
    assert!(trusts("second"));
    service.signal(Signal::TERM);
    assert_eq!(service.ends(), Some(0));
}

#[test]
fn a_limit_of_file_sizes_fails_writes_and_nothing_else() {
    let folder = folder();
    // In blocks of 512 bytes: below all of the data.
    let limited = ["-c", "ulimit -f 2048; exec \"$0\" \"$@\"", PROGRAM];
    let words = format!("{SERVE} --unix socket");
    let mut service = Service::run(&folder, Command::new("sh").args(limited).args(words.split(' ')));
    service.says(&["serving"]);
    folder.file("raw", &[1; 4 << 20]);
    let uri = format!("nbd+unix:///?socket={}", folder.path("socket").display());
    let copied = folder.run(Command::new("nbdcopy").args(["raw", &uri]));
    assert!(copied.code != Some(0) && copied.stderr.contains("No space left"), "{}", copied.stderr);
    service.says(&["WARN  the disk failed operation=write at=", "why=\"File too large"]);
    let read = folder.run(Command::new("nbdcopy").args([&uri, "back"]));
    assert_eq!(read.code, Some(0), "{}", read.stderr);
    service.signal(Signal::TERM);
    assert_eq!(service.ends(), Some(0));
}

#[test]
fn the_board_names_figures_that_the_server_has() {
    let folder = folder();
    let mut service = Service::start(&folder, "--unix socket --metrics 0");
    let line = service.says(&["figures at "]);
    let mut client =
        TcpStream::connect(line.split("http://").nth(1).unwrap().strip_suffix("/metrics").unwrap()).unwrap();
    client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    let board: serde_json::Value = serde_json::from_str(include_str!("../../docs/grafana-crypt.json")).unwrap();
    let targets = board["panels"].as_array().unwrap().iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let names: Vec<_> = targets
        .flat_map(|target| target["expr"].as_str().unwrap().split(|c: char| !c.is_ascii_alphanumeric() && c != '_'))
        .filter(|word| word.starts_with("pagemill_"))
        .collect();
    assert!(names.len() >= 10, "{names:?}");
    for name in names {
        assert!(answer.lines().any(|line| line.split(['{', ' ']).next() == Some(name)), "{name}: {answer}");
        let family = name.strip_suffix("_bucket").unwrap_or(name);
        assert!(
            answer.contains(&format!("# TYPE {family} ")) && answer.contains(&format!("# HELP {family} ")),
            "{name}"
        );
    }
    service.signal(Signal::TERM);
    assert_eq!(service.ends(), Some(0));
}

/// What plays systemd: the socket on which a service says its state.
struct Manager(UnixDatagram);

impl Manager {
    /// The next message, as its lines.
    fn hears(&self) -> Vec<String> {
        let mut bytes = [0; 4096];
        self.0.set_read_timeout(Some(PATIENCE)).unwrap();
        let count = self.0.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..count].to_vec()).unwrap().lines().map(str::to_owned).collect()
    }
}

/// A server that is given these descriptors from 3 on, as its standard input and output are here.
fn activated(folder: &Folder, sockets: [OwnedFd; 2], count: &str, more: &str) -> Service {
    let script = format!(
        "exec 3<&0 4<&1 </dev/null >/dev/null; LISTEN_PID=$$ LISTEN_FDS={count} LISTEN_FDNAMES=clients:others exec \"$0\" \
         \"$@\""
    );
    let words = format!("{SERVE} {more}");
    let [first, second] = sockets;
    let mut command = Command::new("sh");
    command.args(["-c", &script, PROGRAM]).args(words.split(' ')).stdin(first).stdout(second);
    Service::run(folder, &mut command)
}

#[test]
fn systemd_hears_of_each_state() {
    let folder = folder();
    certificate(&folder, "trust");
    for is_abstract in [false, true] {
        let path = folder.path("notify");
        let name = format!("pagemill-test-{}", std::process::id());
        let (socket, said) = match is_abstract {
            false => (UnixDatagram::bind(&path).unwrap(), path.display().to_string()),
            true => {
                let address = SocketAddr::from_abstract_name(&name).unwrap();
                (UnixDatagram::bind_addr(&address).unwrap(), format!("@{name}"))
            }
        };
        let manager = Manager(socket);
        let words = format!("{SERVE} --unix socket --tls-cert server.pem --tls-key server.key");
        let mut command = Command::new(PROGRAM);
        let mut service = Service::run(&folder, command.args(words.split(' ')).env("NOTIFY_SOCKET", said));
        assert_eq!(manager.hears(), ["READY=1", "STATUS=serving"]);
        assert!(folder.path("socket").exists(), "it is ready when clients can come");
        let now = || {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
            now.tv_sec * 1_000_000 + now.tv_nsec / 1000
        };
        let before = now();
        service.signal(Signal::HUP);
        let reloading = manager.hears();
        assert_eq!(reloading[0], "RELOADING=1");
        let at: i64 = reloading[1].strip_prefix("MONOTONIC_USEC=").unwrap().parse().unwrap();
        assert!((before..=now()).contains(&at), "{at}");
        assert_eq!(manager.hears()[0], "READY=1");
        service.signal(Signal::TERM);
        assert_eq!(manager.hears()[0], "STOPPING=1");
        assert_eq!(service.ends(), Some(0));
    }
    // Nobody there: it serves all the same, and says so.
    let words = format!("{SERVE} --unix socket");
    let mut command = Command::new(PROGRAM);
    let mut service = Service::run(&folder, command.args(words.split(' ')).env("NOTIFY_SOCKET", folder.path("nobody")));
    service.says(&["WARN  could not tell systemd", "READY=1"]);
    visit(&folder);
    service.signal(Signal::TERM);
    assert_eq!(service.ends(), Some(0));
}

#[test]
fn sockets_that_systemd_passes_are_served() {
    let folder = folder();
    let unix = UnixListener::bind(folder.path("socket")).unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap();
    // Clients wait here before anybody serves.
    let mut early = UnixStream::connect(folder.path("socket")).unwrap();
    let mut service = activated(&folder, [unix.into(), tcp.into()], "2", "--activated");
    service.says(&["serving 4194304 bytes at nbd+unix:///?socket=", "/socket:"]);
    service.says(&[&format!("serving 4194304 bytes at nbd://{address}:")]);
    early.read_exact(&mut [0; 18]).unwrap();
    drop(early);
    visit(&folder);
    TcpStream::connect(address).unwrap().read_exact(&mut [0; 18]).unwrap();
    // They are closed in programs that it might start.
    for fd in [3, 4] {
        let info = fs::read_to_string(format!("/proc/{}/fdinfo/{fd}", service.child.id())).unwrap();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
        assert!(u32::from_str_radix(flags, 8).unwrap() & 0o2_000_000 > 0, "{fd}: {info}");
    }
    service.signal(Signal::TERM);
    assert_eq!(service.ends(), Some(0));
    assert!(folder.path("socket").exists(), "the name is systemd's");
}

#[test]
fn descriptors_that_cannot_be_served_are_refused() {
    let folder = folder();
    let listener = |name: &str| -> OwnedFd {
        let _ = fs::remove_file(folder.path(name));
        UnixListener::bind(folder.path(name)).unwrap().into()
    };
    let file = || -> OwnedFd { File::open(folder.path("key")).unwrap().into() };
    let cases: [(OwnedFd, &str, &str, &str); 8] = [
        (file(), "2", "--activated", "descriptor 4 (others) of LISTEN_FDS is no socket: name ListenStream="),
        (
            UnixStream::pair().unwrap().0.into(),
            "2",
            "--activated",
            "descriptor 4 (others) of LISTEN_FDS does not listen",
        ),
        (UnixDatagram::unbound().unwrap().into(), "2", "--activated", "(others) of LISTEN_FDS is no stream socket"),
        (TcpListener::bind("0.0.0.0:0").unwrap().into(), "2", "--activated", "say --allow-plaintext"),
        (file(), "99999", "--activated", "LISTEN_FDS=99999: a number of sockets up to 64"),
        (file(), "-1", "--activated", "LISTEN_FDS=-1"),
        (file(), "0", "--activated", "systemd has passed no socket (LISTEN_FDS): start it by its .socket unit"),
        (file(), "1", "--unix other", "say --activated in place of --unix or --tcp"),
    ];
    for (second, count, more, why) in cases {
        let mut service = activated(&folder, [listener("socket"), second], count, more);
        assert_eq!(service.ends(), Some(1), "{why}");
        let lines = service.lines.lock().unwrap();
        assert!(lines.len() == 1 && lines[0].contains(why), "{why}: {lines:?}");
    }
    // Three are named, and one of them is not there.
    let mut service = activated(&folder, [listener("socket"), listener("second")], "3", "--activated");
    assert_eq!(service.ends(), Some(1));
    let said = service.lines.lock().unwrap().concat();
    assert!(said.contains("descriptor 5 () of LISTEN_FDS is not open"), "{said}");
    // For another process: this one has nothing.
    let words = format!("{SERVE} --activated");
    let mut command = Command::new(PROGRAM);
    let mut service =
        Service::run(&folder, command.args(words.split(' ')).env("LISTEN_PID", "1").env("LISTEN_FDS", "1"));
    assert_eq!(service.ends(), Some(1));
    assert!(service.lines.lock().unwrap()[0].contains("systemd has passed no socket"));
}
