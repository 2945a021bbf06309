//! The address at which a process is scraped: its answers, and hostile clients.
use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::patience::PATIENCE;
use pagemill::{Allocator, Bulk, Device, DmaPool, Gfp, Identity, Mempool, Order, PageList, Why};
use pagemill_watch::StatsServer;
use prometheus_parse::{Scrape, Value};

const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: text/plain;version=0.0.4\r\n\r\n";

fn client(server: &StatsServer) -> TcpStream {
    let client = TcpStream::connect(server.address().unwrap()).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client
}

/// The head and the body of the answer.
fn ask(server: &StatsServer, request: &[u8]) -> (String, String) {
    let mut client = client(server);
    client.write_all(request).unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.to_owned())
}

/// A scrape, as a parser of Prometheus' format reads it: for each figure its labels and values.
fn scrape(server: &StatsServer) -> Vec<(String, HashMap<String, String>, f64)> {
    let (head, body) = ask(server, GET);
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"), "{head}");
    assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())), "{head}");
    let parsed = Scrape::parse(body.lines().map(|line| Ok(line.to_owned()))).unwrap();
    assert_eq!(parsed.samples.len(), body.lines().filter(|line| !line.starts_with('#')).count(), "each line is read");
    let sample = |sample: &prometheus_parse::Sample| {
        let (Value::Counter(value) | Value::Gauge(value)) = sample.value else { panic!("{sample:?} has no type") };
        assert!(parsed.docs.contains_key(&sample.metric), "{sample:?} has no help");
        (
            sample.metric.clone(),
            sample.labels.iter().map(|(name, value)| (name.clone(), value.clone())).collect(),
            value,
        )
    };
    parsed.samples.iter().map(sample).collect()
}

fn sum(scraped: &[(String, HashMap<String, String>, f64)], name: &str, labels: &[(&str, &str)]) -> f64 {
    let is_it = |(metric, have, _): &&(String, HashMap<String, String>, f64)| {
        metric == name && labels.iter().all(|(name, value)| have.get(*name).is_some_and(|have| have == value))
    };
    scraped.iter().filter(is_it).map(|(.., value)| value).sum()
}

#[test]
fn a_scrape_has_the_allocators_counters() {
    let server = StatsServer::bind_http("127.0.0.1:0").unwrap();
    assert_eq!((server.path(), server.address().unwrap().ip().is_loopback()), (None, true));
    let allocator = Allocator::builder().pages(4096).build().unwrap();
    server.show("mine", &allocator);
    let ours = ("allocator", "mine");
    let mut list = pagemill::BlockList::new();
    allocator.alloc_pages_bulk_list(Bulk::exact(10).order(Order::new(6).unwrap()), &mut list).unwrap();
    assert_eq!(sum(&scrape(&server), "pagemill_handed_out_pages", &[ours]), 640.0);
    assert_eq!(sum(&scrape(&server), "pagemill_bulk_allocations_total", &[ours, ("blocks", "8-15")]), 1.0);
    assert_eq!(sum(&scrape(&server), "pagemill_bulk_allocations_total", &[ours]), 1.0);
    let (head, body) = ask(&server, b"HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(
        head.starts_with("HTTP/1.1 200 OK\r\n") && !head.contains("Content-Length: 0") && body.is_empty(),
        "{head}"
    );
}

#[test]
fn shortfalls_by_reason_add_up() {
    let server = StatsServer::bind_http("127.0.0.1:0").unwrap();
    let allocator = Allocator::builder().pages(64).build().unwrap();
    server.show("small", &allocator);
    let account = pagemill::Account::new(pagemill::PageCount::new(3));
    let mut list = PageList::new();
    allocator.alloc_pages_bulk_list(Bulk::up_to(4).account(&account), &mut list).unwrap();
    (0..2).for_each(|_| _ = allocator.alloc_pages_bulk_list(Bulk::up_to(100).gfp(Gfp::NOWAIT), &mut list).unwrap());
    let scraped = scrape(&server);
    let of = |why: Why| sum(&scraped, "pagemill_shortfalls_total", &[("reason", why.name())]);
    assert_eq!((of(Why::Account), of(Why::Exhausted)), (1.0, 2.0));
    let (stats, vmstat) = (allocator.stats(), allocator.vmstat().to_string());
    assert_eq!(Why::ALL.map(of).iter().sum::<f64>(), stats.shortfalls() as f64);
    for why in Why::ALL {
        assert_eq!(of(why), stats.shortfalls_by(why) as f64, "{why:?}");
        let line = format!("alloc_shortfall_{} {}", why.name(), stats.shortfalls_by(why));
        assert!(vmstat.lines().any(|other| other == line), "no {line:?} in {vmstat}");
    }
}

#[test]
fn pools_and_dma_pools_are_shown_until_they_are_gone() {
    let server = StatsServer::bind_http("127.0.0.1:0").unwrap();
    let allocator = Allocator::builder().pages(256).build().unwrap();
    server.show("drive", &allocator);
    let writes = Arc::new(Mempool::pages(&allocator, 16).unwrap());
    let prp = DmaPool::create("prp", &Device::new(&allocator, Identity).unwrap(), 256, 256, 0).unwrap();
    server.show_pool("drive", "writes", &writes);
    server.show_dma_pool("drive", prp.name(), &prp);
    let block = prp.alloc(Gfp::KERNEL).unwrap();
    let page = writes.alloc(Gfp::KERNEL).unwrap();
    let scraped = scrape(&server);
    let out = |scraped: &[_], name, pool| sum(scraped, name, &[("allocator", "drive"), pool]);
    assert_eq!(out(&scraped, "pagemill_pool_out", ("pool", "writes")), 1.0);
    assert_eq!(out(&scraped, "pagemill_dma_pool_out", ("dma_pool", "prp")), 1.0);
    assert_eq!(out(&scraped, "pagemill_dma_pool_blocks", ("dma_pool", "prp")), 16.0);
    assert_eq!(out(&scraped, "pagemill_dma_pool_block_bytes", ("dma_pool", "prp")), 256.0);
    drop((block, page));
    prp.destroy().unwrap();
    drop(writes);
    let scraped = scrape(&server);
    assert!(scraped.iter().all(|(name, ..)| !name.contains("pool")), "{scraped:?}");
    drop(server);
    allocator.close().unwrap();
}

#[test]
fn the_child_of_a_fork_serves_its_own_pools() {
    own_process!();
    let server = StatsServer::bind_http("127.0.0.1:0").unwrap();
    let allocator = Allocator::builder().pages(256).build().unwrap();
    server.show("parent's", &allocator);
    let prp = DmaPool::create("prp", &Device::new(&allocator, Identity).unwrap(), 256, 256, 0).unwrap();
    server.show_dma_pool("parent's", "prp", &prp);
    let _block = prp.alloc(Gfp::KERNEL).unwrap();
    // SAFETY: the child makes a server of its own, asks it, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_right = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            server.show_dma_pool("parent's", "other", &prp);
            drop(server);
            let own = StatsServer::bind_http("127.0.0.1:0").unwrap();
            let pool = Arc::new(Mempool::pages(&allocator, 4).unwrap());
            own.show("child's", &allocator);
            own.show_pool("child's", "pool", &pool);
            own.show_dma_pool("child's", "prp", &prp);
            let scraped = scrape(&own);
            assert_eq!(sum(&scraped, "pagemill_pool_reserve", &[("allocator", "child's")]), 4.0);
            assert_eq!(sum(&scraped, "pagemill_dma_pool_blocks", &[("allocator", "child's")]), 0.0, "the parent's");
        }));
        // SAFETY: ends the child without the parent's exit handlers.
        unsafe { libc::_exit(i32::from(is_right.is_err())) };
    }
    let mut status = -1;
    // SAFETY: our child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    let scraped = scrape(&server);
    assert_eq!(sum(&scraped, "pagemill_dma_pool_out", &[("allocator", "parent's"), ("dma_pool", "prp")]), 1.0);
    assert!(scraped.iter().all(|(_, labels, _)| labels.get("dma_pool").is_none_or(|name| name == "prp")));
}

#[test]
fn requests_for_anything_else_are_refused() {
    let server = StatsServer::bind_http("127.0.0.1:0").unwrap();
    for (request, status, words) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "404 Not Found", "at /metrics"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed", "GET /metrics"),
        (b"GET /metrics HTTP/3\r\n\r\n", "505 HTTP Version Not Supported", "HTTP/1.1"),
        (b"prometheus\n\n", "400 Bad Request", "GET /metrics HTTP/1.1"),
        (&[b'x'; 8192], "431 Request Header Fields Too Large", "8192 bytes"),
    ] {
        let (head, body) = ask(&server, request);
        assert!(head.starts_with(&format!("HTTP/1.1 {status}\r\n")) && body.contains(words), "{head}\n{body}");
    }
    let taken = StatsServer::bind_http(server.address().unwrap()).unwrap_err();
    assert_eq!(taken.kind(), ErrorKind::AddrInUse, "{taken}");
}

/// After each of them the next client is answered, and the server can be dropped while they hang on.
#[test]
fn hostile_scrapers_cost_only_themselves() {
    let server = StatsServer::bind_http("127.0.0.1:0").unwrap();
    let allocator = Allocator::builder().pages(1000).build().unwrap();
    (0..2000).for_each(|number| server.show(format!("one of many, number {number}"), &allocator));
    let is_well = || ask(&server, b"HEAD /metrics HTTP/1.1\r\n\r\n").0.starts_with("HTTP/1.1 200 OK\r\n");
    // Clients that close without a word, in the middle of one, and before the answer.
    for word in [&b""[..], b"GET /met", GET] {
        client(&server).write_all(word).unwrap();
    }
    assert!(is_well());
    // A head without an end.
    let mut endless = client(&server);
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
    // A client that does not read an answer of megabytes, and one that asks a byte at a time: both are cut off.
    let (mut deaf, mut slow) = (client(&server), client(&server));
    deaf.write_all(GET).unwrap();
    let began = Instant::now();
    while slow.write_all(b"x").is_ok() {
        assert!(began.elapsed() < PATIENCE, "a client may take as long as it likes to ask");
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut answer = Vec::new();
    // The rest of the answer was never sent.
    let _ = deaf.read_to_end(&mut answer);
    assert!(answer.starts_with(b"HTTP/1.1 200 OK\r\n") && !answer.ends_with(b"\n"), "{} bytes came", answer.len());
    assert!(is_well());
    // More clients than the server accepts at a time, all silent.
    let silent: Vec<_> = (0..100).map(|_| client(&server)).collect();
    assert!(is_well());
    drop(server);
    drop(silent);
}

/// What a client sent beyond its request's head must not cost it the answer: a socket that is closed before all is read resets
/// the connection.
#[test]
fn clients_that_send_more_than_a_head_get_the_whole_answer() {
    let server = StatsServer::bind_http("127.0.0.1:0").unwrap();
    let allocator = Allocator::builder().pages(1000).build().unwrap();
    (0..500).for_each(|number| server.show(format!("one of many, number {number}"), &allocator));
    let body = [b'x'; 4000];
    let post = [&b"POST /metrics HTTP/1.1\r\nContent-Length: 4000\r\n\r\n"[..], &body].concat();
    for (request, status) in [(GET.repeat(40), "200"), (vec![b'x'; 9000], "431"), (post, "405")] {
        let (head, body) = ask(&server, &request);
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{head}");
        assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())), "{} bytes came: {head}", body.len());
        assert!(status != "200" || body.len() > 1 << 20, "a short answer proves nothing: {} bytes", body.len());
    }
}

/// A process that inherits every descriptor and does nothing.
struct Sleeper(libc::pid_t);

impl Sleeper {
    fn fork() -> Self {
        // SAFETY: the child makes no other call than this one, which may be made there.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: no arguments.
                unsafe { libc::pause() };
            }
        }
        assert!(child > 0, "{}", std::io::Error::last_os_error());
        Self(child)
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        // SAFETY: our child, which was not waited for.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

#[test]
fn a_dropped_server_ends_though_a_forked_child_has_its_descriptors() {
    own_process!();
    let server = StatsServer::bind_http("127.0.0.1:0").unwrap();
    let address = server.address().unwrap();
    let mut idle = client(&server);
    // It is accepted before this one, which is answered.
    assert!(ask(&server, GET).0.starts_with("HTTP/1.1 200 OK\r\n"));
    let child = Sleeper::fork();
    drop(server);
    assert_eq!(idle.read(&mut [0; 10]).unwrap(), 0, "the connection has ended");
    assert_eq!(TcpStream::connect(address).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    let again = StatsServer::bind_http(address).unwrap();
    assert!(ask(&again, GET).0.starts_with("HTTP/1.1 200 OK\r\n"));
    drop(child);
}

#[test]
fn the_grafana_board_names_figures_that_exist() {
    let board: serde_json::Value = serde_json::from_str(include_str!("../../../docs/grafana.json")).unwrap();
    let targets = board["panels"].as_array().unwrap().iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let names: Vec<_> = targets
        .flat_map(|target| target["expr"].as_str().unwrap().split(|c: char| !c.is_ascii_alphanumeric() && c != '_'))
        .filter(|word| word.starts_with("pagemill_"))
        .collect();
    assert!(names.len() >= 16, "{names:?}");
    for name in names {
        assert!(pagemill_watch::FIGURES.iter().any(|figure| figure.name == name), "{name}");
    }
}
