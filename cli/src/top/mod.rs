//! `pagemill top`: watches a running process through the socket that it serves.
//!
//! [`source`] asks and reads lines, [`record`] parses them, [`table`] makes text of a record, [`screen`] has the terminal while the
//! table is live.
mod record;
mod screen;
mod source;
mod table;

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::failure::{Failure, print, print_on, said};
use crate::watched::named_by_environment;
use record::Change;
use screen::Screen;
use source::{PATIENCE, Source};

/// Watch a running process: memory, zones, lists, and rates a second
///
/// The process has to serve a socket: `pagemill copy` and `pagemill stress` do with
/// PAGEMILL_STATS=PATH, another program calls `pagemill_watch::serve_stats`. On a
/// terminal the table is live, and q ends it; elsewhere it is printed once.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment, after_help = AFTER_HELP)]
pub(crate) struct TopArgs {
    /// The socket [default: the path in PAGEMILL_STATS]
    path: Option<PathBuf>,
    /// Print the table once; with --interval, after one and with rates
    #[arg(long)]
    once: bool,
    /// Print a JSON object; with --interval, one a line until the end
    #[arg(long, conflicts_with = "once")]
    json: bool,
    /// Print the figures once in Prometheus' text format
    #[arg(long, conflicts_with_all = ["once", "json", "interval"])]
    prometheus: bool,
    /// Milliseconds between two looks, 50 to 3600000 [default: 1000]
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(50..=3_600_000))]
    interval: Option<u64>,
}

const AFTER_HELP: &str = "\
Examples:
  pagemill stress --seconds 60 --stats /tmp/stress.sock &
  pagemill top /tmp/stress.sock                  live, until q or Ctrl-C
  pagemill top /tmp/stress.sock --once --interval 500
  pagemill top /tmp/stress.sock --json | jq '.figures[] | .name, .value'
  pagemill top /tmp/stress.sock --prometheus

Exit codes:
  0  done; also when the process that was watched has ended
  1  nothing could be shown, and standard error says why
  2  the command line makes no sense";

/// Milliseconds between two looks, unless the user sets them.
const INTERVAL_MS: u64 = 1000;

pub(crate) fn run(args: &TopArgs) -> Result<(), Failure> {
    let Some(path) = args.path.clone().or_else(named_by_environment) else {
        let next = "give the path of the socket that the program serves: pagemill top PATH";
        return Err(Failure::new("which process", "neither PATH nor PAGEMILL_STATS is given").next(next));
    };
    match (args.json, args.prometheus, args.interval) {
        (true, _, None) => print(&Source::ask(&path, "json\n")?.all()?),
        (true, _, Some(ms)) => stream(&path, ms),
        (_, true, _) => print(&Source::ask(&path, "prometheus\n")?.all()?),
        (_, _, ms) if args.once || !io::stdout().is_terminal() => once(&path, ms),
        (_, _, ms) => live(&path, ms.unwrap_or(INTERVAL_MS)),
    }
}

/// Prints a JSON object a line, until the process ends or the reader goes.
fn stream(path: &Path, ms: u64) -> Result<(), Failure> {
    let mut source = Source::ask(path, &format!("watch {ms}\n"))?;
    source.wait_for(ms)?;
    while let Some(line) = source.next_line()? {
        source.record(&line)?;
        if !print_on(&line)? {
            break;
        }
    }
    Ok(())
}

fn once(path: &Path, ms: Option<u64>) -> Result<(), Failure> {
    let question = ms.map_or("json\n".to_owned(), |ms| format!("watch {ms}\n"));
    let mut source = Source::ask(path, &question)?;
    source.wait_for(ms.unwrap_or(0))?;
    let mut change: Option<Change> = None;
    for _ in 0..if ms.is_some() { 2 } else { 1 } {
        let Some(line) = source.next_line()? else { break };
        change = Some(next_change(&source, change, &line)?);
    }
    let next = "it ended, or another kind of program serves there";
    let change = change
        .ok_or_else(|| Failure::new(path.display().to_string(), "the other end closed without an answer").next(next))?;
    print(&(table::lines(&change).join("\n") + "\n"))
}

fn next_change(source: &Source, before: Option<Change>, line: &[u8]) -> Result<Change, Failure> {
    Ok(Change::new(source.record(line)?, before.map(|change| change.now)))
}

/// How the live table ends.
enum End {
    /// The user pressed q.
    Asked,
    Signal(i32),
    /// The watched process has closed the socket.
    Gone,
}

fn live(path: &Path, ms: u64) -> Result<(), Failure> {
    let mut source = Source::ask(path, &format!("watch {ms}\n"))?;
    source.wait_for(0)?;
    // Read the first line before taking the screen, so that an early failure is printed on the ordinary screen.
    let Some(line) = source.next_line()? else {
        let why = "the other end closed without an answer";
        return Err(Failure::new(path.display().to_string(), why).next("is it there? try again"));
    };
    let change = next_change(&source, None, &line)?;
    let pid = change.now.pid;
    let terminal = |error: io::Error| Failure::new("the terminal", said(&error)).next("try --once");
    let mut screen = Screen::enter().map_err(terminal)?;
    let end = watch(&mut source, &mut screen, change, ms);
    drop(screen);
    match end? {
        End::Asked => Ok(()),
        End::Gone => print(&format!("process {pid} ended, or serves {} no more\n", path.display())),
        End::Signal(signal) if signal == signal_hook::consts::SIGINT => Ok(()),
        End::Signal(signal) => Err(Failure::new("stopped", format!("signal {signal} came")).by_signal(signal)),
    }
}

/// Draws records as they come, until something ends it. The caller restores the terminal.
fn watch(source: &mut Source, screen: &mut Screen, first: Change, ms: u64) -> Result<End, Failure> {
    let terminal = |error: io::Error| Failure::new("the terminal", said(&error)).next("try --once");
    let (mut change, mut heard, mut top) = (first, Instant::now(), 0);
    loop {
        if let Some(signal) = screen.ended_by() {
            return Ok(End::Signal(signal));
        }
        screen.pause_if_asked().map_err(terminal)?;
        let silent = heard.elapsed().saturating_sub(Duration::from_millis(ms));
        let foot = match silent >= PATIENCE {
            true => format!("no news for {} s: is the process stopped? q ends", heard.elapsed().as_secs()),
            false => format!("every {ms} ms; q ends"),
        };
        screen.draw(&table::lines(&change), &mut top, &foot).map_err(terminal)?;
        let (has_news, has_key) = wait(source, screen).map_err(terminal)?;
        if has_key {
            match keys() {
                Keys::Quit => return Ok(End::Asked),
                Keys::Scroll(lines) => top = top.saturating_add_signed(lines),
            }
        }
        if has_news && !source.read_more(true)? {
            return Ok(End::Gone);
        }
        while let Some(line) = source.line() {
            change = next_change(source, Some(change), &line)?;
            heard = Instant::now();
        }
    }
}

/// Sleeps until there is news or a key, or a signal comes, or a second is over. Returns whether there is news, and a key.
fn wait(source: &Source, screen: &Screen) -> io::Result<(bool, bool)> {
    let stdin = io::stdin();
    let mut polled = vec![PollFd::new(&source.stream, PollFlags::IN)];
    if screen.has_keys() {
        polled.push(PollFd::new(&stdin, PollFlags::IN));
    }
    match poll(&mut polled, Some(&Timespec { tv_sec: 1, tv_nsec: 0 })) {
        Err(rustix::io::Errno::INTR) => return Ok((false, false)),
        found => found?,
    };
    let mut found = polled.iter().map(|polled| !polled.revents().is_empty());
    Ok((found.next().unwrap_or(false), found.next().unwrap_or(false)))
}

/// The keys that were pressed.
enum Keys {
    Quit,
    /// Lines to scroll down.
    Scroll(isize),
}

/// Reads keys past the standard library's buffer, which `poll` does not see. The end of standard input means quit.
fn keys() -> Keys {
    let mut keys = [0; 64];
    let Ok(read) = rustix::io::read(io::stdin(), &mut keys) else {
        return Keys::Scroll(0); // The terminal is gone: a signal will end the program.
    };
    let keys = &keys[..read];
    if keys.is_empty() || keys.iter().any(|key| matches!(key, b'q' | b'Q')) {
        return Keys::Quit;
    }
    // An arrow key sends ESC [ or ESC O, and a letter. The letter is enough.
    let lines = keys.iter().map(|key| match key {
        b'j' | b'B' => 1,
        b'k' | b'A' => -1,
        _ => 0,
    });
    Keys::Scroll(lines.sum())
}
