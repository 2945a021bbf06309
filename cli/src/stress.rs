//! `pagemill stress`: every order and form at once, from the model's alphabet, with everything that can happen in a process:
//! signals inside sections, threads that migrate and exit, drains, forks.
//!
//! A run is a sequence of rounds, each with an allocator of its own: a small one that is always exhausted, a large one with room
//! for every order, and one between. In a round ([`round`])
//! - workers apply random operations. The owner of each frame is recorded in one ledger and stamped into the pages ([`worker`]);
//! - a thread sends signals to the workers. The handler allocates and frees, as an owner of its own ([`signals`]);
//! - a thread drains lists, and the main thread forks now and then ([`disturb`]);
//! - at the end everything is freed, every frame is accounted for, and the allocator is closed.
//!
//! With `--tight`, the arena has less memory than the workers want ([`tight`]). [`common`] is what both kinds of round share.
//!
//! The first frame that is owned twice, lost or overwritten ends the run, and the seed is reported. The seed fixes what each thread
//! requests; the interleaving of threads differs between runs.
mod common;
mod disturb;
mod report;
mod round;
mod signals;
mod tight;
mod worker;

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use pagemill::{Allocator, Backend, Builder, Faults};
use pagemill_model::Rng;
use pagemill_watch::StatsServer;

use crate::failure::{Failure, print, said};
use crate::stop::Stop;
use crate::{faults, watched};
use common::Kind;
use report::{Report, Tally};
use round::Round;
use tight::Tight;

/// Look for a page with two owners, while everything happens at once
///
/// Requests of every order and form, with signals, migrations, drains and forks in
/// between. Prints what was done. A frame that is owned twice, lost or overwritten
/// ends the run with exit code 1, and with the seed that repeats it.
#[derive(Args, Debug, Clone)]
#[command(verbatim_doc_comment, after_help = AFTER_HELP)]
pub(crate) struct StressArgs {
    /// How long, in seconds: 1 to 86400; the round under way is finished
    #[arg(long, allow_negative_numbers = true, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Determines each thread's operations [default: a new one]
    #[arg(long, allow_negative_numbers = true)]
    seed: Option<u64>,
    /// Worker threads, 1 to 256 [default: twice the CPUs]
    #[arg(long, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=256))]
    threads: Option<u32>,
    /// How the per-CPU lists work [default: the self-test decides]
    #[arg(long, value_parser = PossibleValuesParser::new(["rseq", "portable"]).try_map(|name| name.parse::<Backend>()))]
    backend: Option<Backend>,
    /// Pages in the arena, 1 to 16777216 [default: three sizes in turn]
    #[arg(long, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pages: Option<u32>,
    /// An arena with 90 % of the pages wanted: waits, reclaim, faults, marks
    #[arg(long)]
    tight: bool,
    /// Make acquisitions fail, as PAGEMILL_FAIL would: `p=0.01`, `after=1000`
    #[arg(long, value_name = "SPEC", value_parser = faults::spec)]
    fail: Option<String>,
    /// Serve `pagemill top PATH`; what PAGEMILL_STATS says if it is not given
    #[arg(long, value_name = "PATH")]
    stats: Option<PathBuf>,
    /// Print the result as a JSON object
    #[arg(long)]
    json: bool,
}

const AFTER_HELP: &str = "\
Examples:
  pagemill stress --seconds 60 --threads 4
  pagemill stress --seconds 60 --seed 7 --threads 4 --backend portable
  pagemill stress --json | jq .restarts
  pagemill stress --seconds 60 --tight
  pagemill stress --fail p=0.1,gfp=nowait   each round begins the faults anew
  pagemill stress --stats /tmp/s.sock    beside it: pagemill top /tmp/s.sock

On a busy machine a run of 5 seconds or more goes on, up to 20 times as long,
until the events that it must see have occurred, such as a restarted section.

Exit codes:
  0  each frame had one owner
  1  a frame had two, or too little was tried; standard error says which
  2  the command line makes no sense
  ended by SIGINT, SIGTERM, SIGHUP or SIGQUIT, when the round is over: nothing
  was found until then";

/// How long a round lasts. Short rounds check every frame more often, long ones fragment more.
const ROUND: Duration = Duration::from_millis(1500);
/// A shorter run may miss events that a run must see.
const ENOUGH: Duration = Duration::from_secs(5);
/// A run that lacks such events lasts at most this many times as long.
const LONGER: u32 = 20;

/// The settings of a run.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    seed: u64,
    threads: u32,
    backend: Option<Backend>,
    pages: Option<usize>,
    seconds: u64,
    is_tight: bool,
    /// Which acquisitions fail: [`faults::spec`].
    fail: Option<String>,
}

impl Plan {
    /// The command that repeats the run.
    fn again(&self) -> String {
        let backend = self.backend.map_or(String::new(), |backend| format!(" --backend {backend}"));
        let pages = self.pages.map_or(String::new(), |pages| format!(" --pages {pages}"));
        let tight = if self.is_tight { " --tight" } else { "" };
        let fail = self.fail.as_ref().map_or(String::new(), |spec| format!(" --fail {spec}"));
        let Self { seed, threads, seconds, .. } = self;
        format!("pagemill stress --seconds {seconds} --seed {seed} --threads {threads}{backend}{pages}{tight}{fail}")
    }

    fn faults(&self) -> Result<Option<Faults>, Failure> {
        self.fail.as_deref().map(faults::anew).transpose()
    }

    /// The size of the arena of round `number`.
    fn pages(&self, number: usize, sizes: [usize; 3]) -> usize {
        self.pages.unwrap_or(sizes[number % sizes.len()])
    }

    /// Builds an allocator on the plan's backend.
    fn build(&self, builder: Builder) -> Result<Allocator, Failure> {
        let builder = self.backend.iter().fold(builder, |builder, &backend| builder.backend(backend));
        let next = "choose another --backend or fewer --pages";
        builder.build().map_err(|error| Failure::new("can't make an allocator", error).next(next))
    }
}

pub(crate) fn run(args: &StressArgs) -> Result<(), Failure> {
    let cpus = std::thread::available_parallelism().map_or(2, |cpus| cpus.get() as u32);
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_micros() as u64);
    let mut plan = Plan {
        seed: args.seed.unwrap_or(clock),
        threads: args.threads.unwrap_or(cpus * 2),
        backend: args.backend,
        pages: args.pages.map(|pages| pages as usize),
        seconds: args.seconds,
        is_tight: args.tight,
        fail: faults::wanted(args.fail.as_deref())?,
    };
    let stop = Stop::watch().map_err(|error| Failure::new("can't watch for signals", said(&error)))?;
    let server = watched::serve(args.stats.as_deref())?;
    let backend = plan.build(Allocator::builder().pages(plan.pages.unwrap_or(1)))?.backend();
    plan.backend = Some(backend);
    let threads = if plan.threads == 1 { "1 thread".to_owned() } else { format!("{} threads", plan.threads) };
    let begun = format!("seed {}, {threads}, {backend} lists, {} s\n", plan.seed, plan.seconds);
    match (args.json, args.seed) {
        (false, _) => print(&begun)?,
        // If the run is killed, the seed that it chose is known.
        (true, None) => drop(io::stderr().write_all(begun.as_bytes())),
        (true, Some(_)) => {}
    }
    signals::install().map_err(|error| Failure::new("can't handle signals", error))?;
    say_seed_on_panic(plan.clone());
    let run = if plan.is_tight { run_rounds::<Tight> } else { run_rounds::<Round> };
    let report = run(&plan, server.as_ref(), &stop)?;
    if report.tally.get("pages") == 0 {
        let next = "have fewer acquisitions fail, or give it more pages";
        return Err(Failure::new("too little is proved", "no page was ever handed out").next(next));
    }
    print(&if args.json { report.json() } else { report.table() })
}

/// Runs rounds for as long as the user asked. If an event that the run must see has not occurred by then, goes on until it does, or
/// [`LONGER`] times as long.
fn run_rounds<'p, R: Kind>(plan: &'p Plan, server: Option<&StatsServer>, stop: &Stop) -> Result<Report<'p>, Failure> {
    let (start, length) = (Instant::now(), Duration::from_secs(plan.seconds));
    let missing = |tally: &Tally| R::must(plan).iter().find(|name| length >= ENOUGH && tally.get(name) == 0);
    let again = format!("repeat with: {}", plan.again());
    let mut rng = Rng::new(plan.seed);
    let (mut rounds, mut tally) = (0, Tally::default());
    let progress = Progress::new();
    while start.elapsed() < if missing(&tally).is_some() { length * LONGER } else { length } {
        let round = R::begin(plan, rounds, rng.next())?;
        let common = round.common();
        if let Some(server) = server {
            server.show("stress", &common.allocator);
        }
        let done = round.run(end_of_round(start, length)).map_err(|what| {
            progress.clear();
            let why = format!("seed {}, {} lists{}", plan.seed, common.allocator.backend(), common.beside(&what));
            Failure::new(what, why).next(again.clone())
        })?;
        tally.add(&done);
        rounds += 1;
        progress.show(start.elapsed(), length, rounds, &tally);
        stop.check(&again).inspect_err(|_| progress.clear())?;
    }
    progress.clear();
    if let Some(name) = missing(&tally) {
        let why = match *name {
            "restarts" => "no section was restarted".to_owned(),
            name => format!("nothing was counted as {name}"),
        };
        return Err(Failure::new("too little is proved", why).next(format!("run it longer; {again}")));
    }
    Ok(Report { plan, rounds, seconds: start.elapsed().as_secs_f64(), tally })
}

fn end_of_round(start: Instant, length: Duration) -> Instant {
    let (now, end) = (Instant::now(), start + length);
    if now < end { end.min(now + ROUND) } else { now + ROUND }
}

/// A broken invariant panics in the thread that found it. This prints the seed after the panic's message.
fn say_seed_on_panic(plan: Plan) {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        before(info);
        let _ = writeln!(io::stderr(), "pagemill: stress: seed {}; repeat with: {}", plan.seed, plan.again());
    }));
}

/// One line on standard error, where that is a terminal.
struct Progress(bool);

impl Progress {
    fn new() -> Self {
        Self(io::stderr().is_terminal())
    }
    fn show(&self, elapsed: Duration, length: Duration, rounds: usize, tally: &Tally) {
        if self.0 {
            let (now, of, rounds, pages) =
                (elapsed.as_secs(), length.as_secs(), report::counted(rounds), tally.get("pages"));
            let _ = write!(io::stderr(), "\r\x1b[K{now} of {of} s, {rounds}, {pages} pages handed out");
        }
    }
    fn clear(&self) {
        if self.0 {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}
