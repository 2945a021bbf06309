//! From interfaces to lanes: opens everything, starts the threads, reports while they run, and closes everything in order.
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pagemill::{PAGE_SIZE, Page, PageSource};

use crate::Error;
use crate::commands::signals::Stop;
use crate::counts::{Pool, Report};
use crate::interface::Interface;
use crate::lane::{Job, Lane};
use crate::port::Rings;
use crate::program::{Attached, Mode};
use crate::umem::{Shape, Socket, Umem};

type PageLane = Lane<PageSource<Page>>;

/// What the kernel leaves free in front of a packet, in bytes (`XDP_PACKET_HEADROOM`).
const HEADROOM: usize = 256;

/// How everything is set up.
pub(crate) struct Settings {
    pub(crate) mode: Mode,
    /// Slots of each ring.
    pub(crate) ring: u32,
    /// The UMEM in MiB; twice what the rings hold, without.
    pub(crate) memory: Option<u32>,
    /// The queues, of each interface; all that there are, without.
    pub(crate) queues: Option<Vec<u32>>,
    /// Threads, at most.
    pub(crate) threads: usize,
    /// How long.
    pub(crate) time: Option<Duration>,
    /// Time between two reports.
    pub(crate) interval: Duration,
    pub(crate) is_json: bool,
}

/// Interfaces with their sockets, ready to run.
pub(crate) struct Opened {
    umem: Umem,
    interfaces: Vec<Interface>,
    /// The program on each interface that receives.
    attached: Vec<Attached>,
    /// Sockets of each thread, with the number of their interface.
    lanes: Vec<Vec<(usize, Socket, Rings)>>,
}

impl Opened {
    /// The number of threads.
    pub(crate) fn lanes(&self) -> usize {
        self.lanes.len()
    }
}

/// Opens sockets for the queues of these interfaces, and spreads them over threads.
pub(crate) fn open(
    mut interfaces: Vec<Interface>,
    settings: &Settings,
    is_receiving: bool,
    notice: &mut dyn FnMut(&str),
) -> Result<Opened, Error> {
    let queues: Vec<Vec<u32>> = interfaces.iter().map(|of| queues_of(of, settings)).collect::<Result<_, _>>()?;
    let sockets = queues.iter().map(Vec::len).sum::<usize>();
    // Full rings for receiving and for sending, and what the pools keep.
    let pages = sockets * (2 * settings.ring as usize + 512) + 1024;
    let pages = settings.memory.map_or(pages, |mib| mib as usize * ((1 << 20) / PAGE_SIZE));
    let threads = queues.iter().map(Vec::len).min().unwrap_or(1).min(settings.threads).max(1);
    let mut opened =
        Opened { umem: Umem::new(pages)?, interfaces: Vec::new(), attached: Vec::new(), lanes: Vec::new() };
    opened.lanes.resize_with(threads, Vec::new);
    for (number, (interface, queues)) in interfaces.iter_mut().zip(&queues).enumerate() {
        match interface.is_up() {
            Some(true) => {}
            _ => {
                let what = format!("{} is down", interface.name);
                return Err(Error::Unavailable { what, next: "ip link set DEV up" });
            }
        }
        let mut is_generic = settings.mode == Mode::Generic;
        if is_receiving {
            let attached = Attached::new(interface, settings.mode, notice)?;
            is_generic = attached.is_generic;
            opened.attached.push(attached);
            let largest = PAGE_SIZE - HEADROOM - 14;
            if interface.mtu > largest {
                let (name, mtu) = (&interface.name, interface.mtu);
                notice(&format!(
                    "{name} has an MTU of {mtu}: what does not fit a page is dropped; an MTU of {largest} fits"
                ));
            }
        }
        let shape = Shape { ring: settings.ring, is_generic };
        for (at, &queue) in queues.iter().enumerate() {
            let (socket, rings) = opened.umem.open(interface, queue, shape, notice)?;
            if let Some(attached) = opened.attached.get(number) {
                attached.give(queue, &socket)?;
            }
            let how = match opened.attached.get(number) {
                Some(attached) if attached.is_generic => "generic mode, ",
                Some(_) => "native mode, ",
                None => "",
            };
            let copied = if socket.is_zero_copy() { "zero copy" } else { "copied" };
            notice(&format!("{} queue {queue}: {how}{copied}", interface.name));
            opened.lanes[at % threads].push((number, socket, rings));
        }
    }
    opened.interfaces = interfaces;
    Ok(opened)
}

fn queues_of(interface: &Interface, settings: &Settings) -> Result<Vec<u32>, Error> {
    let Some(queues) = &settings.queues else { return Ok((0..interface.queues).collect()) };
    match queues.iter().find(|&&queue| queue >= interface.queues) {
        Some(queue) => {
            let (name, count) = (&interface.name, interface.queues);
            Err(Error::Request(format!("{name} has no queue {queue}: it has {count}, from 0 (ethtool -l {name})")))
        }
        None => Ok(queues.clone()),
    }
}

/// A lane that runs in a thread.
struct Running {
    thread: JoinHandle<(PageLane, Result<(), Error>)>,
    reports: Receiver<Report>,
}

/// What all lanes look at.
struct Control {
    /// The number of the report that is asked for; the largest number asks for the end.
    asked: AtomicU64,
}
const END: u64 = u64::MAX;

/// Runs until a signal comes, the time is over, the jobs are done or something fails. Returns what there is to say in the end.
pub(crate) fn run(
    mut opened: Opened,
    settings: &Settings,
    mut job: impl FnMut(usize, &[usize]) -> Job,
    notice: &mut dyn FnMut(&str),
) -> Result<String, Error> {
    let stop = Stop::watch()?;
    let control = Arc::new(Control { asked: AtomicU64::new(0) });
    let mut running = Vec::new();
    for (number, ports) in std::mem::take(&mut opened.lanes).into_iter().enumerate() {
        let interfaces: Vec<usize> = ports.iter().map(|(of, ..)| *of).collect();
        let sockets = ports.into_iter().map(|(_, socket, rings)| (socket, rings)).collect();
        let source = PageSource::pages(opened.umem.allocator());
        let lane = Lane::new(&opened.umem, source, sockets, job(number, &interfaces));
        running.push(start(lane, Arc::clone(&control))?);
    }
    notice("ready");
    let since = Instant::now();
    let watched = watch(&opened, settings, &running, &control, &stop, notice);
    let seconds = since.elapsed().as_secs_f64();
    // Relaxed: the lanes read nothing else because of it.
    control.asked.store(END, Relaxed);
    close(opened, running, watched, seconds, settings)
}

fn start(mut lane: PageLane, control: Arc<Control>) -> Result<Running, Error> {
    let (sender, reports) = channel();
    let work = move || {
        let done = work(&mut lane, &control, &sender);
        (lane, done)
    };
    let thread = thread::Builder::new().name("lane".to_owned()).spawn(work);
    Ok(Running { thread: thread.map_err(|error| Error::io("a thread cannot be started", error))?, reports })
}

fn work(lane: &mut PageLane, control: &Control, reports: &Sender<Report>) -> Result<(), Error> {
    let mut answered = 0;
    while !lane.is_done() {
        // Relaxed: only the number itself is read.
        let asked = control.asked.load(Relaxed);
        if asked == END {
            break;
        }
        if asked != answered {
            answered = asked;
            // Nobody listens in the end.
            let _ = reports.send(lane.report()?);
        }
        if !lane.turn()? {
            lane.sleep()?;
        }
    }
    Ok(())
}

/// Reports at intervals, and says when an interface goes down, comes up, or is gone.
fn watch(
    opened: &Opened,
    settings: &Settings,
    running: &[Running],
    control: &Control,
    stop: &Stop,
    notice: &mut dyn FnMut(&str),
) -> Result<(), Error> {
    let (start, mut last) = (Instant::now(), Report::default());
    let mut were_up = vec![true; opened.interfaces.len()];
    for number in 1.. {
        let tick = start + settings.interval * number;
        let end = settings.time.map_or(tick, |time| tick.min(start + time));
        while Instant::now() < end {
            if stop.check().is_err() || running.iter().any(|lane| lane.thread.is_finished()) {
                return stop.check();
            }
            thread::sleep(end.saturating_duration_since(Instant::now()).min(Duration::from_millis(50)));
        }
        for (interface, was_up) in opened.interfaces.iter().zip(&mut were_up) {
            let name = &interface.name;
            let is_up = interface.is_up().ok_or_else(|| Error::Gone(name.clone()))?;
            if is_up != *was_up {
                notice(&if is_up { format!("{name} is up again") } else { format!("{name} is down: waiting for it") });
                *was_up = is_up;
            }
        }
        if settings.time.is_some_and(|time| start.elapsed() >= time) {
            return Ok(());
        }
        control.asked.store(u64::from(number), Relaxed);
        let mut report = Report::default();
        for lane in running {
            match lane.reports.recv_timeout(Duration::from_secs(1)) {
                // The newest, if this one came late.
                Ok(of) => report.add(&lane.reports.try_iter().last().unwrap_or(of)),
                Err(RecvTimeoutError::Disconnected) => return stop.check(),
                // It is busy in a call. What it says later is said later.
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        say(&report, &last, settings);
        last = report;
    }
    Ok(())
}

fn say(report: &Report, last: &Report, settings: &Settings) {
    let mut out = io::stdout().lock();
    // Whoever closed the output does not read it: the packets go on.
    let _ = if settings.is_json {
        writeln!(out, "{}", serde_json::to_string(report).unwrap_or_default())
    } else {
        writeln!(out, "{}", line(report, last, settings.interval))
    };
}

/// A line of the live counters.
fn line(report: &Report, last: &Report, interval: Duration) -> String {
    let (now, before) = (&report.counts, &last.counts);
    let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / interval.as_secs_f64();
    let dropped: u64 = report.drops().iter().map(|(count, _)| count).sum();
    let dropped_before: u64 = last.drops().iter().map(|(count, _)| count).sum();
    format!(
        "in {:>9.0}/s {:>7.1} Mbit/s  out {:>9.0}/s {:>7.1} Mbit/s  dropped {:>9.0}/s",
        rate(now.received, before.received),
        rate(now.received_bytes, before.received_bytes) * 8e-6,
        rate(now.sent, before.sent),
        rate(now.sent_bytes, before.sent_bytes) * 8e-6,
        rate(dropped, dropped_before),
    )
}

/// Ends the lanes and closes everything: first what the kernel uses, then the pages.
fn close(
    mut opened: Opened,
    running: Vec<Running>,
    watched: Result<(), Error>,
    seconds: f64,
    settings: &Settings,
) -> Result<String, Error> {
    let (mut lanes, mut failed) = (Vec::new(), watched.err());
    for lane in running {
        match lane.thread.join() {
            Ok((lane, done)) => {
                lanes.push(lane);
                failed = failed.or(done.err());
            }
            Err(_) => failed = failed.or(Some(Error::Broken("a thread panicked: its pages are lost".to_owned()))),
        }
    }
    let mut report = Report::default();
    for lane in &lanes {
        report.add(&lane.report()?);
    }
    // Detached first: from here on packets go to the kernel.
    opened.attached.clear();
    let sockets = lanes.iter_mut().flat_map(Lane::take_sockets).collect();
    let lost = opened.umem.close(sockets).map(|closed| lanes.into_iter().map(|lane| lane.end(&closed)).sum::<usize>());
    let text = summary(&report, seconds, lost, settings);
    match failed {
        None => Ok(text),
        Some(error) => {
            // What was counted is said in any case; whoever closed the output doesn't read it.
            let _ = io::stdout().write_all(text.as_bytes());
            Err(error)
        }
    }
}

/// The last words.
fn summary(report: &Report, seconds: f64, lost: Option<usize>, settings: &Settings) -> String {
    use std::fmt::Write as _;
    if settings.is_json {
        #[derive(serde::Serialize)]
        struct Summary<'a> {
            seconds: f64,
            pages_lost: Option<usize>,
            #[serde(flatten)]
            report: &'a Report,
        }
        let summary = Summary { seconds, pages_lost: lost, report };
        return serde_json::to_string(&summary).unwrap_or_default() + "\n";
    }
    let counts = &report.counts;
    let mut text = String::new();
    // Writing to a string can't fail.
    let _ = writeln!(text, "{seconds:.1} s: {} packets came in, {} went out", counts.received, counts.sent);
    for (count, what) in report.drops() {
        let _ = writeln!(text, "{count:>12}  {what}");
    }
    let Pool { fast, slow, refill, ring, cache_full, .. } = report.pool;
    let _ = writeln!(text, "pool: fast {fast}, slow {slow}, refill {refill}, ring {ring}, cache_full {cache_full}");
    let _ = match lost {
        Some(0) => writeln!(text, "all pages came back"),
        Some(pages) => writeln!(text, "{pages} pages did not come back: a fault of this program, please report it"),
        None => writeln!(text, "a thread failed, so its pages are lost"),
    };
    text
}
