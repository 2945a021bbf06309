//! From interfaces to lanes: opens everything, starts the threads, reports while they run, and closes everything in order.
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pagemill::{PAGE_SIZE, Page, PageSource};
use pagemill_watch::StatsServer;

use crate::Error;
use crate::counts::Report;
use crate::interface::{Interface, missing};
use crate::lane::{Job, Lane};
use crate::output;
use crate::port::Rings;
use crate::program::{Attached, Mode};
use crate::signals::Stop;
use crate::umem::{Shape, Socket, Umem};

type PageLane = Lane<PageSource<Page>>;

/// What the kernel leaves free in front of a packet, in bytes (`XDP_PACKET_HEADROOM`).
const HEADROOM: usize = 256;
/// Time between two looks at signals, lanes that ended, and interfaces.
const NAP: Duration = Duration::from_millis(50);

/// How everything is set up.
pub(crate) struct Settings {
    pub(crate) mode: Mode,
    /// Slots of each ring.
    pub(crate) ring: u32,
    /// The UMEM in MiB. By default, 2 pages for each slot of a ring and 512 more, for each socket, and 1024 in all.
    pub(crate) memory: Option<u32>,
    /// The queues, of each interface; else all.
    pub(crate) queues: Option<Vec<u32>>,
    /// Threads, at most.
    pub(crate) threads: usize,
    /// How long to run; else until it is stopped.
    pub(crate) time: Option<Duration>,
    /// Time between two reports.
    pub(crate) interval: Duration,
    pub(crate) is_json: bool,
    /// Where `pagemill top` finds the figures.
    pub(crate) stats: Option<PathBuf>,
}

/// What queues are used for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    Receive,
    Send,
    Both,
}

/// A socket, and the queue that it is bound to.
struct Bound {
    /// The interface's number.
    interface: usize,
    queue: u32,
    socket: Socket,
    rings: Rings,
}

/// Interfaces with their sockets, ready to run.
pub(crate) struct Opened {
    umem: Umem,
    interfaces: Vec<Interface>,
    /// The program on each interface, if they receive.
    attached: Vec<Attached>,
    /// The sockets of each thread.
    lanes: Vec<Vec<Bound>>,
}

impl Opened {
    /// The number of threads.
    pub(crate) fn lanes(&self) -> usize {
        self.lanes.len()
    }
}

/// Opens sockets for the queues of these interfaces, and spreads them over threads. No packet comes to them yet.
pub(crate) fn open(
    interfaces: Vec<Interface>,
    settings: &Settings,
    what_for: Use,
    notice: &mut dyn FnMut(&str),
) -> Result<Opened, Error> {
    let queues: Vec<_> = interfaces.iter().map(|of| queues_of(of, settings, what_for)).collect::<Result<_, _>>()?;
    for interface in &interfaces {
        if !interface.is_up().ok_or_else(|| missing(&interface.name))? {
            let what = format!("{} is down", interface.name);
            return Err(Error::Unavailable { what, next: "ip link set DEV up" });
        }
    }
    let mut attached = Vec::new();
    for interface in interfaces.iter().filter(|_| what_for != Use::Send) {
        attached.push(Attached::new(interface, settings.mode, notice)?);
        let (name, mtu, largest) = (&interface.name, interface.mtu, PAGE_SIZE - HEADROOM - 14);
        if mtu > largest {
            notice(&format!(
                "{name} has an MTU of {mtu}: what does not fit a page is dropped; an MTU of {largest} fits"
            ));
        }
    }
    let sockets = queues.iter().map(Vec::len).sum::<usize>();
    let pages = sockets * (2 * settings.ring as usize + 512) + 1024;
    let pages = settings.memory.map_or(pages, |mib| mib as usize * ((1 << 20) / PAGE_SIZE));
    let threads = queues.iter().map(Vec::len).min().unwrap_or(1).min(settings.threads).max(1);
    let (mut umem, mut lanes) = (Umem::new(pages)?, Vec::new());
    lanes.resize_with(threads, Vec::new);
    // Sockets that share a UMEM all get their packets as the first one does.
    let is_generic = settings.mode == Mode::Generic || attached.iter().any(|of: &Attached| of.is_generic);
    for (number, (interface, queues)) in interfaces.iter().zip(&queues).enumerate() {
        for (at, &queue) in queues.iter().enumerate() {
            let shape = Shape { ring: settings.ring, is_generic };
            let (socket, rings) = umem.open(interface, queue, shape, notice)?;
            let how = match attached.get(number) {
                Some(attached) if attached.is_generic => "generic mode, ",
                Some(_) => "native mode, ",
                None => "",
            };
            let copied = if socket.is_zero_copy() { "zero copy" } else { "copied" };
            notice(&format!("{} queue {queue}: {how}{copied}", interface.name));
            lanes[at % threads].push(Bound { interface: number, queue, socket, rings });
        }
    }
    Ok(Opened { umem, interfaces, attached, lanes })
}

fn queues_of(interface: &Interface, settings: &Settings, what_for: Use) -> Result<Vec<u32>, Error> {
    let Interface { name, receives, sends, .. } = interface;
    let count = match what_for {
        Use::Receive | Use::Both => *receives,
        Use::Send => *sends,
    };
    let queues = settings.queues.clone().unwrap_or_else(|| (0..count).collect());
    if let Some(queue) = queues.iter().find(|&&queue| queue >= count) {
        return Err(Error::Request(format!("{name} has no queue {queue}: it has {count}, from 0 (ethtool -l {name})")));
    }
    if what_for == Use::Both && queues.iter().any(|queue| queue >= sends) {
        let what =
            format!("{name} receives on {receives} queues and sends on {sends}, so some packets could not be sent");
        return Err(Error::Unavailable { what, next: "make it as many (ethtool -L DEV), or choose with --queues" });
    }
    Ok(queues)
}

/// A lane that runs in a thread.
struct Running {
    thread: JoinHandle<(PageLane, Result<(), Error>)>,
    /// Answers, each with the number of its question.
    reports: Receiver<(u64, Report)>,
}

/// What all lanes look at.
#[derive(Default)]
struct Control {
    /// The number of the report that is asked for; the largest number asks for the end.
    asked: AtomicU64,
    /// Lanes that have nothing left to do, ever.
    done: AtomicUsize,
}
const END: u64 = u64::MAX;

/// Runs until a signal comes, the time is over, the jobs are done or something fails. Returns the last words. `job` gets the
/// number of a lane, and the interface of each of its ports.
pub(crate) fn run(
    mut opened: Opened,
    settings: &Settings,
    mut job: impl FnMut(usize, &[usize]) -> Job,
    notice: &mut dyn FnMut(&str),
) -> Result<String, Error> {
    let stop = Stop::watch()?;
    let _stats = settings.stats.as_ref().map(|path| serve(path, &opened.umem)).transpose()?;
    let mut lanes = VecDeque::new();
    let mut failed = Ok(());
    for (number, bound) in std::mem::take(&mut opened.lanes).into_iter().enumerate() {
        let ports: Vec<_> = bound.iter().map(|of| (of.interface, of.queue)).collect();
        let interfaces: Vec<usize> = ports.iter().map(|(of, _)| *of).collect();
        let sockets = bound.into_iter().map(|of| (of.socket, of.rings)).collect();
        let source = PageSource::pages(opened.umem.allocator());
        let mut lane = Lane::new(&opened.umem, source, sockets, job(number, &interfaces), &format!("lane{number}"));
        failed = failed.and_then(|()| lane.fill());
        lanes.push_back((lane, ports));
    }
    // The fill rings have their pages: from here on packets come.
    for (lane, ports) in &lanes {
        for (at, (interface, queue)) in ports.iter().enumerate() {
            if let Some(attached) = opened.attached.get(*interface) {
                failed = failed.and_then(|()| attached.give(*queue, lane.socket(at)));
            }
        }
    }
    let (control, mut running, mut ended) = (Arc::new(Control::default()), Vec::new(), Vec::new());
    while let Some((lane, _)) = lanes.pop_front() {
        match failed {
            Ok(()) => match start(lane, &control) {
                Ok(lane) => running.push(lane),
                Err(error) => failed = Err(error),
            },
            Err(_) => ended.push(lane),
        }
    }
    let since = Instant::now();
    if failed.is_ok() {
        notice("ready");
        failed = watch(&opened, settings, &running, &control, &stop, notice);
    }
    let seconds = since.elapsed().as_secs_f64();
    // Relaxed: the lanes read nothing else because of it.
    control.asked.store(END, Relaxed);
    for lane in running {
        match lane.thread.join() {
            Ok((lane, done)) => {
                ended.push(lane);
                failed = failed.and(done);
            }
            Err(_) => failed = failed.and(Err(Error::Fault("a thread panicked, so its pages are lost".to_owned()))),
        }
    }
    let (report, lost) = close(opened, ended);
    let text = report.last_words(seconds, lost, settings.is_json);
    match failed {
        Ok(()) => Ok(text),
        Err(error) => {
            output::last_words(&text, &stop);
            Err(error)
        }
    }
}

/// Shows the allocator, and all page pools, to whoever asks at this socket.
fn serve(path: &Path, umem: &Umem) -> Result<StatsServer, Error> {
    let stats = StatsServer::bind(path).map_err(|error| Error::io(path.display().to_string(), error))?;
    stats.show("xdp", umem.allocator());
    Ok(stats)
}

fn start(mut lane: PageLane, control: &Arc<Control>) -> Result<Running, Error> {
    let (sender, reports) = channel();
    let control = Arc::clone(control);
    let work = move || {
        let done = work(&mut lane, &control, &sender);
        (lane, done)
    };
    // If there is no thread, the lane is dropped, and its pages are lost: the program ends.
    let thread = thread::Builder::new().name("lane".to_owned()).spawn(work);
    Ok(Running { thread: thread.map_err(|error| Error::io("a thread cannot be started", error))?, reports })
}

fn work(lane: &mut PageLane, control: &Control, reports: &Sender<(u64, Report)>) -> Result<(), Error> {
    let (mut answered, mut is_done) = (0, false);
    loop {
        // Relaxed: only the number itself is read.
        let asked = control.asked.load(Relaxed);
        if asked == END {
            return Ok(());
        }
        if asked != answered {
            answered = asked;
            // Nobody listens in the end.
            let _ = reports.send((asked, lane.report()?));
        }
        if is_done {
            thread::sleep(Duration::from_millis(5));
        } else if lane.is_done() {
            is_done = true;
            // Relaxed: as above.
            control.done.fetch_add(1, Relaxed);
        } else if !lane.turn()? {
            lane.sleep()?;
        }
    }
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
    let start = Instant::now();
    let (mut next, mut last) = (start + settings.interval, (start, Report::default()));
    let (mut were_up, mut reports) = (vec![true; opened.interfaces.len()], vec![Report::default(); running.len()]);
    let mut number = 0;
    loop {
        stop.check()?;
        let is_over = settings.time.is_some_and(|time| start.elapsed() >= time);
        // Relaxed: only the number itself is read.
        let are_done = control.done.load(Relaxed) == running.len();
        if is_over || are_done || running.iter().any(|lane| lane.thread.is_finished()) {
            return Ok(());
        }
        for (interface, was_up) in opened.interfaces.iter().zip(&mut were_up) {
            let name = &interface.name;
            let is_up = interface.is_up().ok_or_else(|| Error::Gone(name.clone()))?;
            if is_up != *was_up {
                notice(&if is_up { format!("{name} is up again") } else { format!("{name} is down: waiting for it") });
                *was_up = is_up;
            }
        }
        let now = Instant::now();
        if now >= next {
            number += 1;
            next = (next + settings.interval).max(now);
            control.asked.store(number, Relaxed);
            for (lane, report) in running.iter().zip(&mut reports) {
                *report = answer(lane, number, *report);
            }
            let mut report = Report::default();
            reports.iter().for_each(|of| report.add(of));
            output::line(&report.line(&last.1, now - last.0, settings.is_json));
            last = (now, report);
        }
        let end = settings.time.map_or(next, |time| next.min(start + time));
        thread::sleep(end.saturating_duration_since(Instant::now()).min(NAP));
    }
}

/// A lane's report with this number; its last one if it is long in a call.
fn answer(lane: &Running, number: u64, mut last: Report) -> Report {
    loop {
        match lane.reports.recv_timeout(Duration::from_secs(1)) {
            Ok((of, report)) if of == number => return report,
            Ok((_, report)) => last = report,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return last,
        }
    }
}

/// Closes everything: first what the kernel uses, then the pages. Returns the counters, and how many pages are lost: none;
/// without a number where the kernel may still use them.
fn close(mut opened: Opened, lanes: Vec<PageLane>) -> (Report, Option<usize>) {
    let mut report = Report::default();
    for lane in &lanes {
        match lane.report() {
            Ok(of) => report.add(&of),
            // The kernel's own figures are missing then.
            Err(_) => report.counts.add(lane.counts()),
        }
    }
    // Detached first: from here on packets go to the kernel.
    opened.attached.clear();
    let (sockets, rest): (Vec<_>, Vec<_>) = lanes.into_iter().map(Lane::split).unzip();
    let closed = opened.umem.close(sockets.into_iter().flatten().collect());
    let lost = closed.map(|closed| rest.into_iter().map(|rest| rest.end(&closed)).sum::<usize>());
    (report, lost)
}
