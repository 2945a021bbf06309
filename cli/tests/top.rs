//! `pagemill top`: what it shows of a process, on a terminal and elsewhere, and its messages when no process answers.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use crate::common::{Folder, Outcome, PATIENCE, PROGRAM, signal, until};
use pagemill::{Allocator, Bulk, Gfp, PageCache, PageCount, PageList, PagePool};
use pagemill_watch::StatsServer;
use rustix::fs::OFlags;
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use serde_json::Value;

/// An allocator that is served at the socket `s` in a folder of its own. It has handed out 7 single pages and 100 in bulk.
struct Served {
    folder: Folder,
    server: StatsServer,
    /// The server shows it until it is dropped.
    allocator: Allocator,
    list: PageList,
}

impl Served {
    fn new() -> Self {
        let folder = Folder::new();
        let server = StatsServer::bind(folder.path("s")).unwrap();
        let allocator = Allocator::builder().pages(5000).build().unwrap();
        let mut list = PageList::new();
        allocator.alloc_pages_bulk_list(Bulk::exact(100), &mut list).unwrap();
        (0..7).for_each(|_| list.push(allocator.alloc_page(Gfp::KERNEL).unwrap()).unwrap());
        server.show("mine", &allocator);
        Self { folder, server, allocator, list }
    }
    fn top(&self, args: &[&str]) -> Outcome {
        self.folder.pagemill(&[&["top", "s"], args].concat())
    }
}

#[test]
fn the_table_shows_pages_handed_out_and_fits_80_columns() {
    let served = Served::new();
    for args in [&["--once"][..], &[]] {
        let table = served.top(args);
        let text = &table.done().stdout;
        for words in ["allocator mine:", "5,000 pages, 19.5 MiB", "# handed out 107", "Normal", "unmovable", "order"] {
            assert!(text.contains(words), "no {words:?} in {text}");
        }
        let row = text.lines().find(|line| line.contains("allocated pages")).unwrap();
        assert_eq!(row.split_whitespace().collect::<Vec<_>>()[2..], ["107", "-"], "no rate from one look");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }
    let rates = served.top(&["--once", "--interval", "50"]);
    let row = rates.done().stdout.lines().find(|line| line.contains("allocated pages")).unwrap().to_owned();
    assert_eq!(row.split_whitespace().collect::<Vec<_>>()[2..], ["107", "0"], "nothing was taken meanwhile");
}

#[test]
fn json_and_prometheus_have_the_processs_figures() {
    let served = Served::new();
    let record: Value = serde_json::from_str(&served.top(&["--json"]).done().stdout).unwrap();
    assert_eq!(record["pid"], std::process::id());
    let of = |name: &str| {
        let figures = record["figures"].as_array().unwrap();
        figures.iter().find(|figure| figure["name"] == name).unwrap()["value"].as_u64().unwrap()
    };
    assert_eq!((of("pagemill_handed_out_pages"), of("pagemill_zone_managed_pages")), (107, 5000));
    let text = served.top(&["--prometheus"]);
    assert!(text.done().stdout.contains("\npagemill_handed_out_pages{allocator=\"mine\"} 107\n"), "{text:?}");
}

#[test]
fn a_page_pool_is_shown_until_its_last_page_is_back() {
    let served = Served::new();
    let mut pool = PagePool::pages(&served.allocator).named("rx\u{1b}0");
    let page = pool.alloc(Gfp::NOWAIT).unwrap();
    let row = || {
        let table = served.top(&["--once"]);
        let text = &table.done().stdout;
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
        let row = text.lines().find(|line| line.contains("rx?0"))?;
        Some(row.split_whitespace().skip(2).map(str::to_owned).collect::<Vec<_>>())
    };
    assert_eq!(row().unwrap(), ["1"], "in flight, and no age");
    drop(pool);
    let after = row().unwrap();
    assert!(after[0] == "1" && after[1].replace(',', "").parse::<u64>().is_ok(), "{after:?}");
    drop(page);
    assert_eq!(row(), None);
}

#[test]
fn a_page_cache_is_shown_until_it_ends() {
    let served = Served::new();
    let cache = PageCache::builder(&served.allocator).limit(PageCount::new(1234)).named("vol\u{1b}0").build();
    let row = || {
        let table = served.top(&["--once"]);
        let text = &table.done().stdout;
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
        let row = text.lines().find(|line| line.contains("vol?0"))?;
        Some(row.split_whitespace().skip(2).map(str::to_owned).collect::<Vec<_>>())
    };
    assert_eq!(row().unwrap()[..3], ["0", "0", "1,234"], "pages, dirty ones, the limit");
    drop(cache);
    assert_eq!(row(), None);
}

#[test]
fn shortfalls_are_shown_by_reason() {
    let mut served = Served::new();
    let request = Bulk::up_to(5000 - 107 + 1);
    served.allocator.alloc_pages_bulk_list(request, &mut served.list).unwrap();
    let text = served.top(&["--prometheus"]);
    let line = |reason: &str, count: u64| {
        let labels = format!("allocator=\"mine\",node=\"0\",zone=\"Normal\",reason=\"{reason}\"");
        format!("\npagemill_shortfalls_total{{{labels}}} {count}\n")
    };
    for line in [line("exhausted", 1), line("account", 0)] {
        assert!(text.done().stdout.contains(&line), "no {line} in {text:?}");
    }
    let table = served.top(&["--once"]);
    let (_, reasons) = table.done().stdout.split_once("shortfalls by reason").unwrap();
    assert_eq!(reasons.lines().nth(1).unwrap().split_whitespace().collect::<Vec<_>>(), ["exhausted", "1"]);
}

#[test]
fn without_a_process_it_tells_the_next_step() {
    let folder = Folder::new();
    let top = |args: &[&str]| folder.run(Command::new(PROGRAM).arg("top").args(args).env_remove("PAGEMILL_STATS"));
    top(&[]).refused_by("top", &["PAGEMILL_STATS", "pagemill top PATH"]);
    top(&["s"]).refused_by("top", &["no such socket", "pagemill stress --stats"]);
    drop(UnixListener::bind(folder.path("s")).unwrap());
    top(&["s"]).refused_by("top", &["nobody answers there", "start it again"]);
    folder.file("file", b"");
    top(&["file"]).refused_by("top", &["is no socket", "that the program serves"]);
    let by_environment = folder.run(Command::new(PROGRAM).arg("top").env("PAGEMILL_STATS", "other"));
    by_environment.refused_by("top", &["other", "no such socket"]);
    for args in [&["s", "--interval", "1"][..], &["s", "--json", "--prometheus"], &["s", "--json", "--once"]] {
        assert_eq!(top(args).code, Some(2), "{args:?}");
    }
}

/// The process at the socket does not use `pagemill_watch`.
#[test]
fn an_answer_of_another_program_is_refused() {
    let folder = Folder::new();
    let listener = UnixListener::bind(folder.path("s")).unwrap();
    for (answer, args, words) in [
        (&b""[..], &["--once"][..], &["closed without an answer"][..]),
        (b"", &["--json"], &["without a word"]),
        (b"HTTP/1.1 400\n", &["--once"], &["makes no sense", "another version"]),
        (b"{\"pid\":1}\n", &["--once"], &["missing field"]),
        (b"error: \x1b[31mno\n", &["--once"], &["  [31mno"]),
        (b"error: no\n", &["--prometheus"], &["makes no sense: no"]),
        (b"\xff\xff\n", &["--json"], &["no text"]),
    ] {
        let outcome = std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut question = [0; 64];
                assert!(stream.read(&mut question).unwrap() > 0);
                stream.write_all(answer).unwrap();
            });
            folder.pagemill(&[&["top", "s"], args].concat())
        });
        outcome.refused_by("top", words);
    }
    // The kernel takes the connection, and nothing accepts it.
    folder.pagemill(&["top", "s", "--once"]).refused_by("top", &["no news for 5 s", "kill -CONT"]);
}

#[test]
fn stress_is_watched_to_its_end() {
    watch_to_its_end(&[], "pagemill_allocated_pages_total");
}

#[test]
fn tight_stress_is_watched_to_its_end() {
    watch_to_its_end(&["--tight"], "pagemill_waits_total");
}

/// `figure` must rise while the run is watched. On a busy machine a short run may end too soon, so longer ones follow.
fn watch_to_its_end(more: &[&str], figure: &str) {
    let has_risen = ["3", "30", "300"].into_iter().any(|seconds| rises_until_its_end(seconds, more, figure));
    assert!(has_risen, "{figure} never rose");
}

/// Watches a run of so many seconds. False if it ended before the figure rose.
fn rises_until_its_end(seconds: &str, more: &[&str], figure: &str) -> bool {
    let folder = Folder::new();
    let args = ["stress", "--seconds", seconds, "--threads", "3", "--seed", "5", "--stats", "s"];
    let mut stress = folder.spawn(Command::new(PROGRAM).args(args).args(more));
    until("its socket, or its end", || folder.path("s").exists() || stress.try_wait().unwrap().is_some());
    // Into a file, because it prints more than a pipe holds.
    let mut top = Command::new(PROGRAM);
    top.args(["top", "s", "--json", "--interval", "100"]).current_dir(folder.path(""));
    top.stdout(File::create(folder.path("records")).unwrap()).stderr(Stdio::piped());
    let top = Outcome::of(top.spawn().unwrap());
    let text = fs::read_to_string(folder.path("records")).unwrap();
    let came_too_late = top.code != Some(0) && text.is_empty();
    if !came_too_late {
        top.done();
    }
    let records: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(records.iter().all(|record| record["pid"] == stress.id()));
    let risen = |record: &Value| {
        let figures = record["figures"].as_array().unwrap();
        let figure = figures.iter().find(|is| is["name"] == figure)?;
        assert_eq!(figure["labels"]["allocator"], "stress");
        figure["value"].as_u64()
    };
    let has_risen = records.iter().filter_map(risen).max() > Some(0);
    Outcome::of(stress).done();
    assert!(!folder.path("s").exists());
    if !has_risen {
        println!("{seconds} s were too few: {top:?} {records:?}");
    }
    has_risen
}

#[test]
fn a_copy_that_cannot_be_watched_makes_nothing() {
    let folder = Folder::new();
    folder.file("src", b"contents");
    let copy =
        |stats: &str| folder.run(Command::new(PROGRAM).args(["copy", "src", "dst"]).env("PAGEMILL_STATS", stats));
    let outcome = copy("src");
    assert_eq!(outcome.code, Some(1));
    assert!(outcome.stderr.contains("can't be watched at src") && outcome.stderr.contains("no socket"), "{outcome:?}");
    assert_eq!(folder.names(), ["src"]);
    copy("s").done();
    assert_eq!(folder.names(), ["dst", "src"]);
}

/// `pagemill top` on a terminal of its own, with everything that it writes there.
struct Terminal {
    child: Child,
    keys: File,
    slave: File,
    written: Receiver<Vec<u8>>,
    so_far: String,
}

impl Terminal {
    fn new(folder: &Folder, rows: u16) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let slave = rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY, rustix::fs::Mode::empty()).unwrap();
        let size = Winsize { ws_row: rows, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&slave, size).unwrap();
        let slave = File::from(slave);
        let end = || Stdio::from(slave.try_clone().unwrap());
        let mut command = Command::new(PROGRAM);
        command.args(["top", "s", "--interval", "50"]).current_dir(folder.path(""));
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let keys = File::from(master);
        let (mut screen, (send, written)) = (keys.try_clone().unwrap(), channel());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = screen.read(&mut bytes) {
                if send.send(bytes[..read].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self { child, keys, slave, written, so_far: String::new() }
    }

    /// Waits until it has written these words.
    #[track_caller]
    fn sees(&mut self, words: &str) {
        while !self.so_far.contains(words) {
            match self.written.recv_timeout(PATIENCE) {
                Ok(more) => self.so_far += &String::from_utf8_lossy(&more),
                Err(_) => panic!("no {words:?} in {:?}", self.so_far),
            }
        }
    }

    /// The program writes `last` and ends with this code, and the terminal is as it was.
    #[track_caller]
    fn ended(mut self, last: &str, code: Option<i32>) {
        self.sees("\x1b[?25h\x1b[?1049l");
        self.sees(last);
        let status = self.child.wait().unwrap();
        assert_eq!(status.code(), code);
        let modes = tcgetattr(&self.slave).unwrap().local_modes;
        assert!(modes.contains(LocalModes::ICANON | LocalModes::ECHO), "{modes:?}");
    }
}

fn on_terminal(served: &Served) -> Terminal {
    let mut terminal = Terminal::new(&served.folder, 60);
    terminal.sees("\x1b[?1049h");
    terminal.sees("handed out 107");
    terminal.sees("q ends");
    let modes = tcgetattr(&terminal.slave).unwrap().local_modes;
    assert!(!modes.intersects(LocalModes::ICANON | LocalModes::ECHO), "keys come one by one: {modes:?}");
    terminal
}

#[test]
fn on_a_terminal_it_follows_the_process_until_q() {
    let mut served = Served::new();
    let mut terminal = on_terminal(&served);
    drop(std::mem::take(&mut served.list));
    terminal.sees("handed out 0 ");
    terminal.keys.write_all(b"x").unwrap();
    terminal.keys.write_all(b"q").unwrap();
    terminal.ended("", Some(0));
}

#[test]
fn on_a_terminal_it_ends_with_the_process() {
    let served = Served::new();
    let terminal = on_terminal(&served);
    drop(served.server);
    terminal.ended(&format!("process {} ended, or serves s no more", std::process::id()), Some(0));
}

#[test]
fn signals_end_it_and_restore_the_terminal() {
    let served = Served::new();
    let terminal = on_terminal(&served);
    signal(&terminal.child, Signal::INT);
    terminal.ended("", Some(0));
    let terminal = on_terminal(&served);
    signal(&terminal.child, Signal::TERM);
    terminal.ended("signal 15 came", None);
}

#[test]
fn a_low_terminal_is_scrolled() {
    let served = Served::new();
    let mut terminal = Terminal::new(&served.folder, 10);
    terminal.sees("j and k scroll");
    assert!(!terminal.so_far.contains("shortfalls"), "{}", terminal.so_far);
    terminal.keys.write_all("j\x1b[B\x1bOB".repeat(20).as_bytes()).unwrap();
    terminal.sees("shortfalls");
    terminal.keys.write_all(b"q").unwrap();
    terminal.ended("", Some(0));
}

#[test]
fn a_stopped_process_is_reported_and_shown_again_when_it_goes_on() {
    let folder = Folder::new();
    let args = ["stress", "--seconds", "600", "--threads", "1", "--pages", "500", "--stats", "s"];
    let mut stress = folder.spawn(Command::new(PROGRAM).args(args));
    until("its socket", || folder.path("s").exists());
    let mut terminal = Terminal::new(&folder, 60);
    terminal.sees("allocator stress");
    signal(&stress, Signal::STOP);
    terminal.sees("is the process stopped?");
    signal(&stress, Signal::CONT);
    terminal.so_far.clear();
    terminal.sees("every 50 ms; q ends");
    stress.kill().unwrap();
    stress.wait().unwrap();
    terminal.ended("ended, or serves s no more", Some(0));
}
