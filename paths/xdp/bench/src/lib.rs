//! The table `xdp` of `pagemill bench`: packets received and dropped, with page pools that get their pages in several ways,
//! beside a bare loop with a private list of frames.
//!
//! Each row has a receiver on a veth pair of its own, in a network namespace that exists as long as the measuring thread. The
//! kernel sends copies of one packet from the other processor. A record's time is nanoseconds a packet: how long the kernel
//! took to send them and the receiver to get them, divided by the number that it got. The receiver's own time is that of the
//! turns that moved packets; turns that found nothing are not in it, since a receiver that is faster than the sender would only
//! wait more.

mod report;

use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use pagemill_harness::bars::Limit::{AtLeast, AtMost};
use pagemill_harness::bars::{Bar, bar, difference, ratio, speed, turns_of};
use pagemill_harness::record::Record;
use pagemill_harness::rounds::{CellSamples, Effort, Kind, Sample, Unavailable, in_turns};
use pagemill_harness::{Error, Run, Table, machine};
use pagemill_xdp::measure::{Receiver, Refill, Sender, receiver};
use pagemill_xdp::{Ends, Flood, Interface, packet};
use rustix::thread::UnshareFlags;

/// The table.
pub const TABLE: Table = Table { name: "xdp", steps: 1, measure: xdp, report: report::xdp, bars };

/// How long packets may be on their way after the last one came.
const PATIENCE: Duration = Duration::from_secs(5);

/// The names of the records: wall-clock time, and processor time, a packet.
const RECEIVE: &str = "xdp-receive";
const WORK: &str = "xdp-work";
/// The same with a socket that sends, and not the kernel.
const RECEIVE_SOCKET: &str = "xdp-receive-from-socket";
const WORK_SOCKET: &str = "xdp-work-from-socket";

const PRIVATE: &str = "private-list";
const RECYCLED: [&str; 3] = ["pool-single", "pool-list", "pool-array"];
const RELEASED: [&str; 3] = ["release-single", "release-list", "release-array"];

const ROWS: [(&str, Kind, Refill); 7] = [
    (PRIVATE, Kind::Floor, Refill::PrivateList),
    (RECYCLED[0], Kind::Ours, Refill::Single { is_recycling: true }),
    (RECYCLED[1], Kind::Ours, Refill::List { is_recycling: true }),
    (RECYCLED[2], Kind::Ours, Refill::Array { is_recycling: true }),
    (RELEASED[0], Kind::Ours, Refill::Single { is_recycling: false }),
    (RELEASED[1], Kind::Ours, Refill::List { is_recycling: false }),
    (RELEASED[2], Kind::Ours, Refill::Array { is_recycling: false }),
];

fn failed(what: &str, why: impl std::fmt::Display) -> Error {
    Error::Table { table: TABLE.name, what: what.to_owned(), why: why.to_string() }
}

fn xdp(run: &mut Run<'_>) -> Result<Vec<Record>, Error> {
    let Some(second) = run.machine.second_cpu() else {
        run.note_absent(TABLE.name, "-", &Unavailable("a second processor, for the sender".to_owned()));
        return Ok(Vec::new());
    };
    let plan = Plan { main: run.machine.main_cpu(), second, effort: run.effort, clock_ns: run.clock_ns };
    // The namespace is the thread's, and what is in it goes with it.
    let measured = thread::scope(|scope| scope.spawn(move || plan.measure()).join());
    run.progress.inc(1);
    match measured {
        Ok(Ok(records)) => Ok(records),
        Ok(Err(Stopped::Absent(why))) => {
            run.note_absent(TABLE.name, "-", &Unavailable(why));
            Ok(Vec::new())
        }
        Ok(Err(Stopped::Failed(error))) => Err(error),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Why nothing was measured.
enum Stopped {
    /// This machine does not permit it.
    Absent(String),
    Failed(Error),
}

struct Plan {
    main: usize,
    second: usize,
    effort: Effort,
    clock_ns: f64,
}

struct Entrant {
    receiver: Box<dyn Receiver>,
    flood: Flood,
    packet: Vec<u8>,
    sender: Sender,
}

/// Who sends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Load {
    Kernel,
    Socket,
}

impl Plan {
    fn measure(&self) -> Result<Vec<Record>, Stopped> {
        let _ = machine::pin_to(self.main);
        // SAFETY: only the network namespace of this thread changes; no descriptors are shared differently.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }
            .map_err(|errno| Stopped::Absent(format!("a network namespace: {errno}; run it as root")))?;
        let mut entrants = Vec::new();
        for (at, (name, _, refill)) in ROWS.into_iter().enumerate() {
            entrants.push(Entrant::new(at, refill).map_err(|why| Stopped::Absent(format!("{name}: {why}")))?);
        }
        let cells = |bench: &'static str| -> Vec<CellSamples> {
            ROWS.iter().map(|&(name, kind, _)| CellSamples::new(bench, (name, "-", kind), 64)).collect()
        };
        let is_full = self.effort.rounds >= Effort::FULL.rounds;
        let loads = [
            (Load::Kernel, RECEIVE, WORK, if is_full { 1 << 20 } else { 1 << 16 }),
            (Load::Socket, RECEIVE_SOCKET, WORK_SOCKET, if is_full { 1 << 17 } else { 1 << 14 }),
        ];
        let mut records = Vec::new();
        // The first packets of each find cold pages. A kernel that sends none is too old.
        for entrant in &mut entrants {
            self.round(entrant, Load::Kernel, 1 << 14).map_err(|why| Stopped::Absent(why.to_string()))?;
        }
        for (load, receive, work, count) in loads {
            let (mut walls, mut works) = (cells(receive), cells(work));
            for (_, at) in in_turns(self.effort.rounds, ROWS.len()) {
                let Figures { wall, work } = self.round(&mut entrants[at], load, count).map_err(Stopped::Failed)?;
                walls[at].samples.push(Sample::whole(wall));
                works[at].samples.push(Sample::whole(work));
            }
            records.extend(walls.into_iter().chain(works).filter_map(CellSamples::record));
        }
        for ((name, ..), entrant) in ROWS.iter().zip(entrants) {
            if let Some(lost @ 1..) = entrant.receiver.end().max(entrant.sender.end()) {
                return Err(Stopped::Failed(failed(name, format!("{lost} pages did not come back"))));
            }
        }
        Ok(records)
    }

    /// Has `count` packets sent, and receives them.
    fn round(&self, entrant: &mut Entrant, load: Load, count: u32) -> Result<Figures, Error> {
        let Entrant { receiver, flood, packet, sender } = entrant;
        let said = |why: pagemill_xdp::Error| failed("packets", why);
        // Of an earlier round, if its last packets were very late.
        while receiver.turn().map_err(said)? > 0 {}
        let dropped_before = receiver.dropped().map_err(said)?;
        let (is_sent, start) = (AtomicBool::new(false), Instant::now());
        let (mut received, mut work, mut turns, mut last) = (0, Duration::ZERO, 0, start);
        thread::scope(|scope| {
            let sending = scope.spawn(|| {
                let _ = machine::pin_to(self.second);
                let sent = match load {
                    Load::Kernel => flood.send(packet, count),
                    Load::Socket => sender.send(count),
                };
                // Relaxed: what it sent is not read by this thread.
                is_sent.store(true, Relaxed);
                sent
            });
            loop {
                let before = Instant::now();
                let got = receiver.turn()?;
                if got > 0 {
                    last = Instant::now();
                    (received, work, turns) = (received + got, work + (last - before), turns + 1);
                } else if is_sent.load(Relaxed) {
                    // The last ones may still be on their way. The interface may drop some, too, and does not say so here.
                    let missing = u64::from(count).saturating_sub(received + receiver.dropped()? - dropped_before);
                    let patience = if load == Load::Kernel { PATIENCE } else { PATIENCE / 50 };
                    if missing == 0 || last.elapsed() > patience {
                        break;
                    }
                }
            }
            sending.join().unwrap_or(Ok(()))
        })
        .map_err(said)?;
        if !(1..=u64::from(count)).contains(&received) {
            return Err(failed("packets", format!("{received} packets received of {count}")));
        }
        let (each, clock) = (|ns: f64| ns / received as f64, f64::from(turns) * self.clock_ns);
        Ok(Figures { wall: each((last - start).as_nanos() as f64), work: each(work.as_nanos() as f64 - clock) })
    }
}

/// Nanoseconds a packet.
struct Figures {
    wall: f64,
    work: f64,
}

impl Entrant {
    /// A veth pair, and a receiver on its second end.
    fn new(number: usize, refill: Refill) -> Result<Self, String> {
        let (from, to) = (format!("from{number}"), format!("to{number}"));
        ip(&["link", "add", &from, "type", "veth", "peer", "name", &to])?;
        for end in [&from, &to] {
            // No addresses, so that nobody else sends.
            ip(&["link", "set", end, "addrgenmode", "none"])?;
            ip(&["link", "set", end, "up"])?;
        }
        let said = |error: pagemill_xdp::Error| match error.next_step() {
            Some(next) => format!("{error}; {next}"),
            None => error.to_string(),
        };
        let (from, to) = (Interface::find(&from).map_err(said)?, Interface::find(&to).map_err(said)?);
        let receiver = receiver(&to, refill).map_err(said)?;
        let flood = Flood::out_of(from.index).map_err(said)?;
        let addresses = [Ipv4Addr::new(198, 18, 0, 1), Ipv4Addr::new(198, 19, 0, 1)];
        let packet = packet(&Ends { macs: [from.mac, to.mac], addresses }, 60);
        let sender = Sender::out_of(&from, packet.clone()).map_err(said)?;
        Ok(Self { receiver, flood, packet, sender })
    }
}

/// Runs `ip` in this thread's namespace.
fn ip(words: &[&str]) -> Result<(), String> {
    let done = Command::new("ip").args(words).output().map_err(|error| format!("ip: {error}; install iproute2"))?;
    if done.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&done.stderr).trim().to_owned()) }
}

fn bars(records: &[Record]) -> Vec<Bar> {
    let wall = |name| turns_of(records, RECEIVE, name);
    let work = |name| turns_of(records, WORK, name);
    let more: Option<f64> = difference(work(RECYCLED[2]), work(PRIVATE));
    let gain = |name: &'static str| -> Option<f64> { ratio(work(RELEASED[0]), work(name)) };
    let bars = [
        bar("xdp: ns more than a bare loop", more, Some(AtMost(5.0)), None),
        bar("xdp: rate / bare loop", speed(wall(RECYCLED[2]), wall(PRIVATE)), Some(AtLeast(0.97)), None),
        bar("xdp: released, list / single", gain(RELEASED[1]), None, None),
        bar("xdp: released, array / single", gain(RELEASED[2]), None, None),
    ];
    bars.into_iter().flatten().collect()
}
