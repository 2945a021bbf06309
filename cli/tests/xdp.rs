//! `pagemill xdp` in network namespaces: a real ping is answered, TCP is forwarded, and whatever goes wrong, no page is lost
//! and nothing stays attached.
//!
//! A namespace lives as long as its file is open, so nothing of it outlives the test.
use std::ffi::CString;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::process::Signal;
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use serde_json::Value;

use crate::common::{Folder, PATIENCE, PROGRAM, noise, signal, until};

/// A network namespace.
struct Net(File);

impl Net {
    /// A new one. `None` without permission; then it has said that the test is skipped.
    fn new() -> Option<Self> {
        let made = thread::spawn(|| {
            // SAFETY: only this thread's network namespace changes; no descriptors are shared differently.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            Ok::<_, rustix::io::Errno>(File::open("/proc/thread-self/ns/net").unwrap())
        });
        match made.join().unwrap() {
            Ok(file) => Some(Self(file)),
            Err(errno) => {
                println!("skipped: no network namespace: {errno}; it takes root");
                None
            }
        }
    }

    /// Runs this in the namespace. Processes that it starts are in it, too.
    fn inside<T: Send>(&self, run: impl FnOnce() -> T + Send) -> T {
        let file = self.0.as_fd();
        thread::scope(|scope| {
            let entered = move || {
                move_into_link_name_space(file, Some(LinkNameSpaceType::Network)).unwrap();
                run()
            };
            scope.spawn(entered).join().unwrap()
        })
    }

    /// Runs a command to its end. Returns what it printed, if it succeeded.
    fn try_sh(&self, line: &str) -> Result<String, String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ran = self.inside(|| Command::new(words[0]).args(&words[1..]).stdin(Stdio::null()).output());
        let ran = ran.map_err(|error| format!("{}: {error}", words[0]))?;
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        if ran.status.success() { Ok(text(&ran.stdout)) } else { Err(text(&ran.stdout) + &text(&ran.stderr)) }
    }

    #[track_caller]
    fn sh(&self, line: &str) -> String {
        self.try_sh(line).unwrap_or_else(|why| panic!("{line}: {why}"))
    }

    /// A pair of interfaces, here and there, both up. The peers finish their packets themselves.
    fn pair(&self, here: &str, other: &Net, there: &str, more: &str) {
        let path = format!("/proc/{}/fd/{}", std::process::id(), other.0.as_raw_fd());
        self.sh(&format!("ip link add {here} {more} type veth peer name {there} {more} netns {path}"));
        for (net, name) in [(self, here), (other, there)] {
            // Nothing is sent that nobody asked for.
            net.sh(&format!("ip link set {name} addrgenmode none"));
            net.sh(&format!("ethtool -K {name} tx off tso off gso off txvlan off"));
            net.sh(&format!("ip link set {name} up"));
        }
    }

    /// Starts `pagemill xdp`, and waits until it is ready.
    fn xdp(&self, line: &str) -> Xdp {
        let xdp = self.xdp_started(line);
        xdp.wait_for("ready");
        xdp
    }

    fn xdp_started(&self, line: &str) -> Xdp {
        let words: Vec<&str> = line.split_whitespace().collect();
        let mut command = Command::new(PROGRAM);
        command.arg("xdp").args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.inside(|| command.spawn()).unwrap();
        let said = [read(child.stdout.take().unwrap()), read(child.stderr.take().unwrap())];
        Xdp { child, said }
    }

    /// Whether a program is on an interface.
    fn is_attached(&self, name: &str) -> bool {
        self.sh(&format!("ip -d link show {name}")).contains("prog/xdp")
    }
}

/// The lines of a pipe, as they come; and whether it has ended.
type Lines = Arc<Mutex<(Vec<String>, bool)>>;

fn read(pipe: impl Read + Send + 'static) -> Lines {
    let lines = Lines::default();
    let to = Arc::clone(&lines);
    thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            to.lock().unwrap().0.push(line);
        }
        to.lock().unwrap().1 = true;
    });
    lines
}

/// A running `pagemill xdp`, killed with the test.
struct Xdp {
    child: Child,
    /// Standard output and standard error.
    said: [Lines; 2],
}

impl Drop for Xdp {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Xdp {
    fn errors(&self) -> String {
        self.said[1].lock().unwrap().0.join("\n")
    }
    fn out(&self) -> Vec<String> {
        self.said[0].lock().unwrap().0.clone()
    }

    /// Waits until it has said this on standard error.
    #[track_caller]
    fn wait_for(&self, words: &str) {
        let has_ended = || self.said[1].lock().unwrap().1;
        until(words, || self.errors().contains(words) || has_ended());
        assert!(self.errors().contains(words), "no {words:?} in: {}", self.errors());
    }

    /// The last record of `--json`, if there is one.
    fn record(&self) -> Option<Value> {
        self.out().last().map(|line| serde_json::from_str(line).unwrap())
    }

    /// Waits until a figure of the last record is at least this.
    #[track_caller]
    fn wait_until(&self, pointer: &str, least: u64) {
        until(pointer, || {
            let figure = self.record().and_then(|record| record.pointer(pointer).and_then(Value::as_u64));
            figure.is_some_and(|figure| figure >= least)
        });
    }

    /// Waits for its end. Returns its exit code or signal.
    fn end(&mut self) -> (Option<i32>, Option<i32>) {
        use std::os::unix::process::ExitStatusExt;
        until("its end", || self.child.try_wait().unwrap().is_some());
        until("its last words", || self.said.iter().all(|said| said.lock().unwrap().1));
        let status = self.child.wait().unwrap();
        (status.code(), status.signal())
    }

    /// Ends it with SIGTERM; nothing is lost. Returns the last record.
    #[track_caller]
    fn terminate(&mut self) -> Value {
        signal(&self.child, Signal::TERM);
        assert_eq!(self.end(), (None, Some(15)), "{}", self.errors());
        let record = self.record().expect("a record");
        assert_eq!(record["pages_lost"], 0, "{record}");
        for name in
            ["lie_received_outside", "lie_received_not_there", "lie_completed_outside", "lie_completed_not_there"]
        {
            assert_eq!(record[name], 0, "{record}");
        }
        record
    }

    /// It ends with this error, in a line.
    #[track_caller]
    fn fails(&mut self, words: &[&str]) {
        assert_eq!(self.end(), (Some(1), None), "{}", self.errors());
        let errors = self.errors();
        let last = errors.lines().last().unwrap();
        words.iter().for_each(|word| assert!(last.contains(word), "no {word:?} in {errors}"));
    }
}

/// Two namespaces with a pair of interfaces. The first has an address and asks, the second is the program's.
fn two(more: &str) -> Option<(Net, Net)> {
    let (here, there) = (Net::new()?, Net::new()?);
    here.pair("ask", &there, "answer", more);
    here.sh("ip addr add 192.0.2.1/24 dev ask");
    Some((here, there))
}

/// Three answers, whenever they come.
const PING: &str = "ping -c 3 -i 0.2 -w 60 192.0.2.7";
const ECHO: &str = "echo answer --address 192.0.2.7 --json --interval 0.05";

#[test]
fn a_real_ping_is_answered() {
    for mode in ["native", "generic"] {
        let Some((here, there)) = two("") else { return };
        let mut echo = there.xdp(&format!("{ECHO} --mode {mode}"));
        assert!(echo.errors().contains(&format!("{mode} mode")), "{}", echo.errors());
        assert!(there.is_attached("answer"));
        assert!(here.sh(PING).contains(" 3 received"));
        // Every length that fits, and its neighbours.
        for size in [0, 1, 17, 18, 19, 1471, 1472] {
            let said = here.sh(&format!("ping -c 1 -w 60 -s {size} 192.0.2.7"));
            assert!(said.contains(" 1 received"), "{size}: {said}");
        }
        // In parts, or for somebody else: not answered.
        for line in ["ping -c 1 -W 1 -s 1473 192.0.2.7", "ping -c 1 -W 1 192.0.2.8"] {
            assert!(here.try_sh(line).is_err(), "{line}");
        }
        let record = echo.terminate();
        assert!(record["sent"].as_u64() >= Some(11), "an ARP answer and ten others: {record}");
        assert!(record["drop_not_asked"].as_u64() >= Some(3), "{record}");
        assert!(!there.is_attached("answer"), "detached");
    }
}

/// A socket that sends and receives whole frames by an interface (`packet(7)`).
fn frames_of(name: &str) -> File {
    let name = CString::new(name).unwrap();
    let all = (libc::ETH_P_ALL as u16).to_be();
    // SAFETY: the calls get a name with its end, and an address of its size; the descriptor is new.
    unsafe {
        let fd = libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, i32::from(all));
        assert!(fd >= 0);
        let mut address: libc::sockaddr_ll = std::mem::zeroed();
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = all;
        address.sll_ifindex = libc::if_nametoindex(name.as_ptr()) as i32;
        let len = size_of_val(&address) as libc::socklen_t;
        assert_eq!(libc::bind(fd, (&raw const address).cast(), len), 0);
        File::from_raw_fd(fd)
    }
}

/// The kernel here may have no interfaces for tags, so the frames are made by hand. Receiving, it takes the tag off.
#[test]
fn a_packet_with_a_tag_is_answered() {
    let Some((here, there)) = two("") else { return };
    let mac = |net: &Net, name: &str| -> Vec<u8> {
        let text = net.sh(&format!("ip -br link show {name}"));
        let mac = text.split_whitespace().find(|word| word.len() == 17 && word.contains(':')).unwrap();
        mac.split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect()
    };
    let (ours, theirs) = (mac(&here, "ask"), mac(&there, "answer"));
    let mut echo = there.xdp(ECHO);
    let tag = [0x81, 0, 0, 7];
    let arp = |operation: u8, from: &[u8], to: &[u8], addresses: [u8; 2]| -> Vec<u8> {
        let [from_ip, to_ip] = addresses.map(|last| [192, 0, 2, last]);
        [&[8, 6, 0, 1, 8, 0, 6, 4, 0, operation], from, &from_ip, to, &to_ip].concat()
    };
    let request = [&[0xff; 6], &ours[..], &tag, &arp(1, &ours, &[0; 6], [1, 7])].concat();
    let answer = [&ours[..], &theirs[..], &arp(2, &theirs, &ours, [7, 1])].concat();
    let mut socket = here.inside(|| frames_of("ask"));
    rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Recv, Some(PATIENCE)).unwrap();
    assert_eq!(socket.write(&request).unwrap(), request.len());
    loop {
        let mut frame = [0; 2048];
        let len = socket.read(&mut frame).unwrap();
        if frame[6..12] == theirs[..] {
            assert_eq!(frame[..len], answer[..]);
            break;
        }
    }
    assert_eq!(echo.terminate()["sent"], 1);
}

#[test]
fn several_queues_and_threads_share_a_umem() {
    for mode in ["native", "generic"] {
        let Some((here, there)) = two("numrxqueues 3 numtxqueues 3") else { return };
        there.sh("ethtool -L answer rx 3 tx 3");
        let mut echo = there.xdp(&format!("{ECHO} --threads 2 --mode {mode}"));
        for queue in 0..3 {
            assert!(echo.errors().contains(&format!("answer queue {queue}: {mode} mode")), "{}", echo.errors());
        }
        assert!(here.sh(PING).contains(" 3 received"));
        echo.terminate();
    }
}

#[test]
fn several_threads_make_as_many_packets_as_were_asked_for() {
    let Some((here, _there)) = two("numrxqueues 3 numtxqueues 3") else { return };
    here.sh("ethtool -L ask rx 3 tx 3");
    for count in [1, 30_001] {
        let line = format!("generate ask --mac ff:ff:ff:ff:ff:ff --count {count} --threads 3 --json");
        let mut generate = here.xdp(&line);
        assert_eq!(generate.end(), (Some(0), None), "{}", generate.errors());
        let made = generate.record().unwrap();
        assert_eq!([&made["sent"], &made["completed"]], [count, count], "{made}");
    }
}

#[test]
fn queues_that_cannot_send_are_refused_or_left_out() {
    let Some((here, there)) = two("numrxqueues 3 numtxqueues 3") else { return };
    for (net, name) in [(&here, "ask"), (&there, "answer")] {
        net.sh(&format!("ethtool -L {name} rx 3 tx 1"));
    }
    there.xdp_started(ECHO).fails(&["answer receives on 3 queues and sends on 1", "ethtool -L"]);
    let mut echo = there.xdp(&format!("{ECHO} --queues 0"));
    echo.terminate();
    let mut generate = here.xdp("generate ask --mac ff:ff:ff:ff:ff:ff --count 3000 --json");
    assert_eq!(generate.end(), (Some(0), None), "{}", generate.errors());
    assert_eq!(generate.record().unwrap()["completed"], 3000);
}

#[test]
fn top_shows_the_pools_of_a_running_program() {
    let Some((here, there)) = two("") else { return };
    let folder = Folder::new();
    let socket = folder.path("stats");
    let mut echo = there.xdp(&format!("{ECHO} --stats {}", socket.display()));
    assert!(here.sh(PING).contains(" 3 received"));
    let top = folder.pagemill(&["top", "stats", "--once"]);
    let text = &top.done().stdout;
    assert!(text.contains("lane0") && text.contains("refill"), "{text}");
    text.lines().for_each(|line| assert!(line.chars().count() <= 80, "{line}"));
    echo.terminate();
}

#[test]
fn a_full_pipe_does_not_keep_sigterm_from_ending_it() {
    let Some((_here, there)) = two("") else { return };
    let mut command = Command::new(PROGRAM);
    command.args("xdp drop answer --json --interval 0.01".split(' '));
    let mut child = there.inside(|| command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()).unwrap();
    let pipe = child.stdout.take().unwrap();
    let mut held = 0;
    until("a full pipe", || {
        let now = rustix::io::ioctl_fionread(&pipe).unwrap();
        let is_full = now == held && now > 50_000;
        thread::sleep(std::time::Duration::from_millis(100));
        held = now;
        is_full
    });
    signal(&child, Signal::TERM);
    until("its end", || child.try_wait().unwrap().is_some());
}

/// `forward` between two pairs, with a namespace at either end.
fn three() -> Option<(Net, Net, Net)> {
    let (left, middle, right) = (Net::new()?, Net::new()?, Net::new()?);
    middle.pair("left", &left, "ask", "");
    middle.pair("right", &right, "answer", "");
    left.sh("ip addr add 192.0.2.1/24 dev ask");
    right.sh("ip addr add 192.0.2.7/24 dev answer");
    // What comes by a program's sending gets to TCP in time only with this.
    left.sh("ethtool -K ask gro on");
    right.sh("ethtool -K answer gro on");
    Some((left, middle, right))
}

const FORWARD: &str = "forward --from left --to right --json --interval 0.05";

#[test]
fn forward_carries_tcp() {
    let Some((left, middle, right)) = three() else { return };
    let mut forward = middle.xdp(FORWARD);
    let data = noise(4 << 20);
    let listener = right.inside(|| TcpListener::bind("192.0.2.7:4000").unwrap());
    let arrived = thread::scope(|scope| {
        let server = scope.spawn(|| {
            let mut stream = None;
            listener.set_nonblocking(true).unwrap();
            until("a client", || {
                stream = listener.accept().ok();
                stream.is_some()
            });
            let (mut stream, _) = stream.unwrap();
            stream.set_nonblocking(false).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut arrived = Vec::new();
            stream.read_to_end(&mut arrived).unwrap();
            stream.write_all(b"thanks").unwrap();
            arrived
        });
        left.inside(|| {
            let mut stream = TcpStream::connect("192.0.2.7:4000").unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.write_all(&data).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert_eq!(answer, "thanks");
        });
        server.join().unwrap()
    });
    assert!(arrived == data, "{} bytes of {} arrived, or others", arrived.len(), data.len());
    let record = forward.terminate();
    assert!(record["received_bytes"].as_u64() > Some(4 << 20), "{record}");
}

#[test]
fn a_flood_is_forwarded_without_losing_a_page() {
    let Some((left, middle, right)) = three() else { return };
    let mut forward = middle.xdp(FORWARD);
    let mut drop = right.xdp("drop answer --json --interval 0.05");
    let mut generate = left.xdp("generate ask --mac ff:ff:ff:ff:ff:ff --count 200000 --json --interval 0.05");
    assert_eq!(generate.end(), (Some(0), None), "{}", generate.errors());
    let made = generate.record().unwrap();
    assert_eq!((&made["sent"], &made["pages_lost"]), (&200_000.into(), &0.into()), "{made}");
    // What got through gets to the end.
    drop.wait_until("/received", 1000);
    let forwarded = forward.terminate();
    assert!(forwarded["received"].as_u64() >= Some(1000), "{forwarded}");
    let dropped = drop.terminate();
    assert_eq!(dropped["received"], dropped["drop_asked"], "{dropped}");
}

#[test]
fn a_starved_ring_drops_and_goes_on() {
    let Some((here, there)) = two("") else { return };
    // 256 pages for a ring of 2048.
    let mut drop = there.xdp("drop answer --memory 1 --json --interval 0.05");
    let mut generate = here.xdp("generate ask --mac ff:ff:ff:ff:ff:ff --count 100000");
    assert_eq!(generate.end(), (Some(0), None), "{}", generate.errors());
    // More than it has pages.
    drop.wait_until("/received", 300);
    let record = drop.terminate();
    assert!(record["no_page"].as_u64() > Some(0), "{record}");
}

#[test]
fn a_killed_program_leaves_nothing_attached_and_can_be_started_at_once() {
    let Some((here, there)) = two("") else { return };
    for _ in 0..2 {
        let mut echo = there.xdp(ECHO);
        signal(&echo.child, Signal::KILL);
        assert_eq!(echo.end().1, Some(9));
        assert!(!there.is_attached("answer"));
    }
    let mut echo = there.xdp(ECHO);
    assert!(here.sh(PING).contains(" 3 received"));
    // While it runs there is no room for a second one.
    there.xdp_started(ECHO).fails(&["answer has a program already", "end the program"]);
    there.xdp_started("drop answer --queues 1").fails(&["answer has no queue 1"]);
    echo.terminate();
}

#[test]
fn an_interface_goes_down_comes_up_and_goes_away() {
    let Some((here, there)) = two("") else { return };
    there.sh("ip link set answer down");
    there.xdp_started(ECHO).fails(&["answer is down", "ip link set DEV up"]);
    there.sh("ip link set answer up");
    let mut echo = there.xdp(ECHO);
    assert!(here.sh(PING).contains(" 3 received"));
    there.sh("ip link set answer down");
    echo.wait_for("answer is down: waiting for it");
    there.sh("ip link set answer up");
    echo.wait_for("answer is up again");
    until("a ping is answered", || here.try_sh("ping -c 1 -W 1 192.0.2.7").is_ok());
    here.sh("ip link del ask");
    echo.fails(&["answer is gone"]);
    assert_eq!(echo.record().unwrap()["pages_lost"], 0);
}

#[test]
fn jumbo_frames_are_refused_or_dropped_and_it_is_said() {
    let Some((here, there)) = two("") else { return };
    for (net, name) in [(&here, "ask"), (&there, "answer")] {
        net.sh(&format!("ip link set {name} mtu 9000"));
    }
    there.xdp_started(&format!("{ECHO} --mode native")).fails(&["packets of 9000 bytes", "MTU", "--mode generic"]);
    let mut echo = there.xdp(ECHO);
    for words in ["packets come by the generic hook", "an MTU of 3826 fits"] {
        assert!(echo.errors().contains(words), "{}", echo.errors());
    }
    assert!(here.sh("ping -c 1 -w 60 -s 3000 192.0.2.7").contains(" 1 received"));
    assert!(here.try_sh("ping -c 1 -W 1 -s 8000 192.0.2.7").is_err());
    let record = echo.terminate();
    assert!(record["kernel"]["dropped"].as_u64() > Some(0), "{record}");
}

/// The first block of commands in the document, as it stands.
#[test]
fn the_documents_commands_work() {
    let Some(net) = Net::new() else { return };
    let block = include_str!("../../docs/xdp.md").split("```").nth(1).unwrap();
    let commands: Vec<&str> = block.lines().filter_map(|line| line.strip_prefix("# ")).collect();
    assert!(commands.iter().any(|line| line.starts_with("pagemill xdp echo")), "{commands:?}");
    let script = format!("set -e; pagemill() {{ \"$0\" \"$@\"; }}\n{}\nwait", commands.join("\n"));
    let ran = net.inside(|| Command::new("sh").args(["-c", &script, PROGRAM]).output().unwrap());
    let text = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success() && text.contains(" 3 received"), "{ran:?}");
}

#[test]
fn without_permission_it_says_so_in_a_line() {
    let Some((_here, there)) = two("") else { return };
    // The program's own folder may be closed to others, so the shell opens it first.
    let line =
        "exec setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all /proc/self/fd/9 xdp drop answer";
    let ran = there.inside(|| {
        Command::new("sh")
            .args(["-c", &format!("exec 9<\"$0\"; {line}"), PROGRAM])
            .stdin(Stdio::null())
            .output()
            .unwrap()
    });
    let said = String::from_utf8(ran.stderr).unwrap();
    assert_eq!((ran.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.contains("no permission") && said.contains("CAP_NET_RAW"), "{said}");
}

#[test]
fn the_bench_has_figures_of_every_receiver() {
    let Some(net) = Net::new() else { return };
    let before = net.sh("ip -br link");
    let bench = net
        .inside(|| Command::new(PROGRAM).args(["bench", "xdp", "--quick", "--bars", "--json", "-"]).output().unwrap());
    assert!(bench.status.success(), "{bench:?}");
    let [json, text] = [&bench.stdout, &bench.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    text.lines().for_each(|line| assert!(line.chars().count() <= 80, "{line}"));
    if text.contains("absent: xdp: a second processor") {
        println!("skipped: {text}");
        return;
    }
    let records: Vec<Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for name in
        ["private-list", "pool-single", "pool-list", "pool-array", "release-single", "release-list", "release-array"]
    {
        for bench in ["xdp-receive", "xdp-work", "xdp-receive-from-socket", "xdp-work-from-socket"] {
            let of = records.iter().find(|record| record["impl"] == name && record["bench"] == bench);
            assert!(of.is_some_and(|record| record["total_ns"].as_f64() > Some(0.0)), "{bench} {name}: {json}");
        }
        assert!(text.contains(name), "{text}");
    }
    for words in ["ns more than a bare loop", "rate / bare loop", "3,677,958", "+12.68 %"] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    assert_eq!(net.sh("ip -br link"), before, "it leaves nothing behind");
}
