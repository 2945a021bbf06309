//! The socket on which a process is watched: its answers, and hostile clients.
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::patience::PATIENCE;
use pagemill::{Advice, Allocator, FileBacking, Gfp, Memory, Mempool, PageCache, PageCount, PagePool};
use pagemill_watch::{FIGURES, Snapshot, StatsServer, prometheus};
use serde_json::Value;

/// A folder for one test, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("pagemill-seen-{}-{}", std::process::id(), NUMBER.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }
    fn socket(&self) -> PathBuf {
        self.0.join("stats.sock")
    }
    fn names(&self) -> Vec<String> {
        fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

fn client(path: &Path) -> UnixStream {
    let client = UnixStream::connect(path).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client
}

fn ask(path: &Path, question: &[u8]) -> String {
    let mut client = client(path);
    client.write_all(question).unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    answer
}

fn value(record: &Value, name: &str, allocator: &str) -> Option<u64> {
    let figures = record["figures"].as_array().unwrap();
    let is_it = |figure: &&Value| figure["name"] == name && figure["labels"]["allocator"] == allocator;
    figures.iter().find(is_it).map(|figure| figure["value"].as_u64().unwrap())
}

#[test]
fn json_and_prometheus_show_the_allocators_counters() {
    let folder = Folder::new();
    let server = StatsServer::bind(folder.socket()).unwrap();
    let allocator = Allocator::builder().pages(1000).build().unwrap();
    let _page = allocator.alloc_page(Gfp::KERNEL).unwrap();
    server.show("mine", &allocator);
    let seen = [Snapshot::of("mine", &allocator)];

    let answer = ask(server.path().unwrap(), b"json\n");
    assert_eq!(answer.matches('\n').count(), 1, "one line, with its end");
    let record: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(record["pid"], std::process::id());
    let own = std::env::current_exe().unwrap();
    assert_eq!(record["program"], own.file_name().unwrap().to_str().unwrap());
    let mut told = record["figures"].as_array().unwrap().iter();
    for figure in FIGURES.iter() {
        for sample in figure.samples(&seen) {
            let told = told.next().unwrap();
            assert_eq!((&told["name"], &told["kind"]), (&figure.name.into(), &figure.kind.name().into()));
            let labels: serde_json::Map<_, _> =
                sample.labels.iter().map(|(name, value)| ((*name).to_owned(), value.as_str().into())).collect();
            assert_eq!(told["labels"], Value::Object(labels));
            if !sample.labels.is_empty() {
                assert_eq!(told["value"], sample.value);
            }
        }
    }
    assert_eq!(told.next(), None);

    let ours = |text: &str| -> Vec<String> {
        text.lines().filter(|line| line.contains("allocator=")).map(str::to_owned).collect()
    };
    assert_eq!(ours(&ask(server.path().unwrap(), b"prometheus\n")), ours(&prometheus(&seen)));
    assert!(ours(&prometheus(&seen)).len() > 30);
}

#[test]
fn pools_are_shown_with_their_allocator_until_they_are_gone() {
    let folder = Folder::new();
    let server = StatsServer::bind(folder.socket()).unwrap();
    let allocator = Allocator::builder().pages(100).build().unwrap();
    server.show("mine", &allocator);
    let pool = Arc::new(Mempool::pages(&allocator, 16).unwrap());
    server.show_pool("mine", "writes", &pool);
    server.show_pool("another's", "reads", &pool);
    let page = pool.alloc_raw(Gfp::NOIO).unwrap();
    let shown = |name: &str| -> Vec<String> {
        let text = ask(server.path().unwrap(), b"prometheus\n");
        text.lines().filter(|line| line.starts_with(name)).map(str::to_owned).collect()
    };
    assert_eq!(shown("pagemill_pool_out{"), ["pagemill_pool_out{allocator=\"mine\",pool=\"writes\"} 1"]);
    assert_eq!(shown("pagemill_pool_size{"), ["pagemill_pool_size{allocator=\"mine\",pool=\"writes\"} 16"]);
    pool.free_raw(page);
    drop(pool);
    assert_eq!(shown("pagemill_pool_out{"), [""; 0]);
}

/// The page pools of the process, as JSON shows them: for each its figures, in order.
fn page_pools(path: &Path, name: &str) -> Vec<(String, u64)> {
    let record: Value = serde_json::from_str(&ask(path, b"json\n")).unwrap();
    let ours = record["figures"].as_array().unwrap().iter().filter(|figure| figure["labels"]["page_pool"] == name);
    let short = |figure: &Value| figure["name"].as_str().unwrap().replace("pagemill_page_pool_", "");
    ours.map(|figure| (short(figure), figure["value"].as_u64().unwrap())).collect()
}

#[test]
fn page_pools_are_shown_until_their_last_page_is_back() {
    own_process!(); // Other tests compare what all of the process shows.
    let folder = Folder::new();
    let server = StatsServer::bind(folder.socket()).unwrap();
    let path = server.path().unwrap();
    // Of an allocator that is not shown.
    let allocator = Allocator::builder().pages(1000).build().unwrap();
    let odd = "rx \"0\"\\\n\u{1}}";
    let mut pool = PagePool::pages(&allocator).named(odd);
    let mut pages: Vec<_> = (0..10).map(|_| Some(pool.alloc(Gfp::NOWAIT).unwrap())).collect();
    pages.drain(7..).for_each(drop);
    assert_eq!(pool.stats().in_flight, 7);
    let figures = |of: &[(&str, u64)]| of.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect::<Vec<_>>();
    let counted = [
        ("fast_total", 9),
        ("slow_total", 1),
        ("slow_high_order_total", 0),
        ("empty_total", 1),
        ("refill_total", 0),
        ("waive_total", 0),
        ("cached_total", 0),
        ("cache_full_total", 0),
        ("ring_total", 3),
        ("ring_full_total", 0),
        ("released_refcnt_total", 0),
    ];
    assert_eq!(page_pools(path, odd), figures(&[&counted[..], &[("in_flight", 7)]].concat()));

    drop(pool);
    let after = page_pools(path, odd);
    let (name, age) = after.last().unwrap();
    assert_eq!((after.len(), name.as_str()), (13, "ended_s"));
    assert_eq!(after[11], ("in_flight".into(), 7), "pages that are out are seen after the pool's end");
    let text = ask(path, b"prometheus\n");
    let labels = "{page_pool=\"rx \\\"0\\\"\\\\\\n\u{1}}\",id=\"";
    let line = text.lines().find(|line| line.starts_with(&format!("pagemill_page_pool_in_flight{labels}"))).unwrap();
    assert!(line.ends_with("\"} 7"), "{line}");
    std::thread::sleep(std::time::Duration::from_millis(1100));
    assert!(page_pools(path, odd).last().is_some_and(|(_, now)| now > age), "it gets older");
    drop(pages);
    assert_eq!(page_pools(path, odd), [], "with its last page");
}

/// The page caches of that name, as JSON shows them: for each its figures, in order.
fn page_caches(path: &Path, name: &str) -> Vec<(String, u64)> {
    let record: Value = serde_json::from_str(&ask(path, b"json\n")).unwrap();
    let ours = record["figures"].as_array().unwrap().iter().filter(|figure| figure["labels"]["page_cache"] == name);
    let short = |figure: &Value| figure["name"].as_str().unwrap().replace("pagemill_page_cache_", "");
    ours.map(|figure| (short(figure), figure["value"].as_u64().unwrap())).collect()
}

#[test]
fn page_caches_are_shown_until_they_end() {
    own_process!(); // Other tests compare what all of the process shows.
    let folder = Folder::new();
    let server = StatsServer::bind(folder.socket()).unwrap();
    let path = server.path().unwrap();
    // Of an allocator that is not shown.
    let allocator = Allocator::builder().pages(1000).build().unwrap();
    let odd = "of \"files\"\\\n\u{1}}";
    let cache = PageCache::builder(&allocator).limit(PageCount::new(500)).named(odd).build();
    let file = folder.socket().with_file_name("file");
    std::fs::write(&file, vec![7; 100 << 12]).unwrap();
    let file = cache.open(FileBacking::options().read_only(true).open(file).unwrap()).unwrap();
    file.advise(Advice::Random, 0..0);
    let mut bytes = [0; 4096];
    (0..10).for_each(|page| file.read_exact_at(&mut bytes, (page % 5 * 9) << 12).unwrap());
    let stats = cache.stats();
    let counted = [
        ("hits_total", 5),
        ("misses_total", 5),
        ("read_pages_total", 5),
        ("read_ahead_pages_total", 0),
        ("ahead_unused_pages_total", 0),
        ("windows_total", stats.windows),
        ("windows_marked_total", 0),
        ("windows_shortened_total", 0),
        ("reads_total", 5),
        ("reads_failed_total", 0),
        ("written_pages_total", 0),
        ("writes_total", 0),
        ("writes_failed_total", 0),
        ("copied_pages_total", 0),
        ("evicted_pages_total", 0),
        ("shrinks_total", 0),
        ("lent_pages_total", 0),
        ("pages", 5),
        ("dirty_pages", 0),
        ("limit_pages", 500),
        ("metadata_bytes", stats.metadata),
    ];
    assert_eq!(page_caches(path, odd), counted.map(|(name, value)| (name.to_owned(), value)));
    let text = ask(path, b"prometheus\n");
    let labels = "{page_cache=\"of \\\"files\\\"\\\\\\n\u{1}}\",id=\"";
    let line = text.lines().find(|line| line.starts_with(&format!("pagemill_page_cache_hits_total{labels}"))).unwrap();
    assert!(line.ends_with("\"} 5"), "{line}");
    drop((file, cache));
    assert_eq!(page_caches(path, odd), []);
}

#[test]
fn a_watcher_gets_a_line_each_time_and_sees_what_changes() {
    let folder = Folder::new();
    let server = StatsServer::bind(folder.socket()).unwrap();
    let allocator = Allocator::builder().pages(1000).build().unwrap();
    let mut watcher = client(server.path().unwrap());
    watcher.write_all(b"watch 50\n").unwrap();
    let mut lines = BufReader::new(watcher).lines().map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    let first = lines.next().unwrap();
    assert_eq!(value(&first, "pagemill_handed_out_pages", "late"), None, "nothing is shown yet");
    server.show("late", &allocator);
    let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
    let out = |record: Value| value(&record, "pagemill_handed_out_pages", "late");
    assert!(lines.by_ref().take(1000).any(|record| out(record) == Some(1)));
    drop(page);
    assert!(lines.by_ref().take(1000).any(|record| out(record) == Some(0)));
    let times: Vec<_> = lines.by_ref().take(3).map(|record| record["up_ms"].as_u64().unwrap()).collect();
    assert!(times.is_sorted() && times[0] < times[2], "{times:?}");
    server.hide("late");
    assert!(lines.by_ref().take(1000).any(|record| out(record).is_none()));
    allocator.close().unwrap();
    drop(server);
    assert_eq!(lines.count(), 0, "and then the connection ends");
}

/// An allocator is freed with its last handle, whether it is shown or not.
#[test]
fn showing_an_allocator_does_not_keep_it_alive() {
    own_process!();
    let folder = Folder::new();
    let server = StatsServer::bind(folder.socket()).unwrap();
    let is_shown = || ask(server.path().unwrap(), b"prometheus\n").contains("allocator=\"short-lived\"");
    // The only memfd in this process.
    let allocator = Allocator::builder().memory(Memory::memfd(64)).build().unwrap();
    let is_mapped = || fs::read_to_string("/proc/self/maps").unwrap().contains("/memfd:");
    server.show("short-lived", &allocator);
    assert!(is_shown() && is_mapped());
    let other = allocator.clone();
    allocator.close().unwrap();
    assert!(is_shown() && is_mapped(), "another handle exists");
    other.close().unwrap();
    assert!(!is_shown() && !is_mapped());
}

#[test]
fn a_wrong_question_is_answered_with_the_valid_ones() {
    let folder = Folder::new();
    let server = StatsServer::bind(folder.socket()).unwrap();
    for (question, words) in [
        (&b"\n"[..], "ask one line: json, prometheus, or watch"),
        (b"GET /metrics HTTP/1.1\r\n", "ask one line"),
        (b"watch 1\n", "watch every 50 to 3600000 milliseconds"),
        (b"\xff\xff\n", "ask one line"),
        (&[b'x'; 64], "a question has at most 64 bytes"),
    ] {
        let answer = ask(server.path().unwrap(), question);
        assert!(answer.starts_with("error: ") && answer.contains(words), "{question:?}: {answer}");
    }
}

/// After each of them the next client is answered.
#[test]
fn hostile_clients_cost_only_themselves() {
    let folder = Folder::new();
    let server = StatsServer::bind(folder.socket()).unwrap();
    let path = server.path().unwrap();
    let is_well = || ask(path, b"json\n").starts_with("{\"pid\":");

    // Clients that close without a word, in the middle of one, and before the answer.
    for word in [&b""[..], b"js", b"json\n", b"watch 50\n"] {
        client(path).write_all(word).unwrap();
    }
    assert!(is_well());

    // A line without an end: the client gets an error and is cut off.
    let mut endless = client(path);
    let mut sent = 0usize;
    let cut = loop {
        match endless.write(&[b'x'; 4096]) {
            Ok(n) => sent += n,
            Err(error) => break error.kind(),
        }
        assert!(sent < 64 << 20, "the server reads without a limit");
    };
    assert!(matches!(cut, ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{cut}");
    assert!(is_well());

    // A watcher that keeps writing: the server does not read it.
    let mut talker = client(path);
    talker.write_all(b"watch 50\n").unwrap();
    talker.set_nonblocking(true).unwrap();
    let blocked = loop {
        if let Err(error) = talker.write(&[b'x'; 4096]) {
            break error.kind();
        }
    };
    assert_eq!(blocked, ErrorKind::WouldBlock);
    assert!(is_well());

    // More clients than the server accepts at a time, all silent: they time out, and the others are accepted.
    let mut silent: Vec<_> = (0..100).map(|_| client(path)).collect();
    assert!(is_well());
    for client in &mut silent {
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).unwrap();
        assert!(answer.is_empty(), "a silent client gets no answer");
    }
    drop(talker);
}

/// A watcher that reads nothing is cut off when the system's buffer is full and its time is over.
#[test]
fn a_watcher_that_does_not_read_is_cut_off() {
    let folder = Folder::new();
    let server = StatsServer::bind(folder.socket()).unwrap();
    let allocator = Allocator::builder().pages(1000).build().unwrap();
    for number in 0..50 {
        server.show(format!("one of many, number {number}"), &allocator);
    }
    let mut deaf = client(server.path().unwrap());
    deaf.write_all(b"watch 50\n").unwrap();
    assert!(ask(server.path().unwrap(), b"json\n").starts_with('{'), "others are answered meanwhile");
    // Poll reports that the other side hung up, without a read.
    let mut hung_up = libc::pollfd { fd: deaf.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: one descriptor, which is open.
    assert_eq!(unsafe { libc::poll(&raw mut hung_up, 1, PATIENCE.as_millis() as i32) }, 1, "it is not cut off");
    assert!(ask(server.path().unwrap(), b"json\n").starts_with('{'), "and afterwards");
    let mut all = Vec::new();
    deaf.read_to_end(&mut all).unwrap();
    assert!(!all.ends_with(b"\n"), "it was cut off in the middle of a line");
}

#[test]
fn the_socket_file_is_private_and_removed_with_the_server() {
    let folder = Folder::new();
    let server = StatsServer::bind(folder.socket()).unwrap();
    let mode = fs::symlink_metadata(server.path().unwrap()).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    assert_eq!(folder.names(), ["stats.sock"], "nothing else stays");
    let refused = StatsServer::bind(folder.socket()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::AddrInUse, "{refused}");
    assert_eq!(folder.names(), ["stats.sock"]);
    assert!(ask(server.path().unwrap(), b"json\n").starts_with('{'), "the first one goes on");
    drop(server);
    assert_eq!(folder.names(), [""; 0]);
}

#[test]
fn the_socket_of_a_dead_process_is_replaced_and_another_file_is_not() {
    let folder = Folder::new();
    drop(UnixListener::bind(folder.socket()).unwrap());
    assert_eq!(folder.names(), ["stats.sock"], "the standard library's listener leaves its file");
    let server = StatsServer::bind(folder.socket()).unwrap();
    assert!(ask(server.path().unwrap(), b"json\n").starts_with('{'));

    // Another file takes the name: the server must not remove it.
    fs::remove_file(folder.socket()).unwrap();
    fs::write(folder.socket(), "precious").unwrap();
    drop(server);
    let refused = StatsServer::bind(folder.socket()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::AlreadyExists, "{refused}");
    assert_eq!(fs::read_to_string(folder.socket()).unwrap(), "precious");

    for (path, kind) in [
        (PathBuf::new(), ErrorKind::InvalidInput),
        (folder.0.join(".."), ErrorKind::InvalidInput),
        (folder.0.join("no/such/folder"), ErrorKind::NotFound),
        (folder.0.join("x".repeat(90)).join("y"), ErrorKind::NotFound),
    ] {
        assert_eq!(StatsServer::bind(&path).unwrap_err().kind(), kind, "{path:?}");
    }
}

#[test]
fn one_of_several_concurrent_servers_gets_the_name() {
    let folder = Folder::new();
    drop(UnixListener::bind(folder.socket()).unwrap());
    let path = folder.socket();
    let results: Vec<_> = std::thread::scope(|scope| {
        let bind = || StatsServer::bind(&path);
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(bind)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for refused in results.iter().filter_map(|result| result.as_ref().err()) {
        assert_eq!(refused.kind(), ErrorKind::AddrInUse, "{refused}");
    }
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1);
    assert!(ask(&path, b"json\n").starts_with('{'));
}

#[test]
fn the_child_of_a_fork_leaves_the_socket_alone() {
    own_process!();
    let folder = Folder::new();
    let server = StatsServer::bind(folder.socket()).unwrap();
    let allocator = Allocator::builder().pages(64).build().unwrap();
    server.show("before", &allocator);
    // SAFETY: the child drops the server and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        server.show("in the child", &allocator);
        server.hide("before");
        drop(server);
        // SAFETY: ends the child without the parent's exit handlers.
        unsafe { libc::_exit(0) };
    }
    let mut status = -1;
    // SAFETY: our child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    let record: Value = serde_json::from_str(&ask(server.path().unwrap(), b"json\n")).unwrap();
    assert_eq!(value(&record, "pagemill_cpus", "before"), Some(allocator.cpus() as u64));
    assert_eq!(value(&record, "pagemill_cpus", "in the child"), None);
}
