//! `pagemill stress`: every order and form at once, from the model's alphabet, with everything in the way that a
//! process has: signals inside sections, threads that migrate and exit, drains, forks.
//!
//! The run is a row of rounds, each with an allocator of its own: a small one, where everybody runs out of memory all
//! the time, a large one with room for every order, and one between. In a round
//! - workers apply random operations; who owns a frame is noted in one [`Ledger`] and stamped into the pages
//!   ([`worker`]);
//! - a thread sends them signals, whose handler allocates and frees with ownership of its own ([`signals`]);
//! - a thread drains lists, and the main thread forks now and then ([`disturb`]);
//! - at the end everything goes back, every frame is accounted for, and the allocator is closed.
//!
//! With `--tight` the rounds are others: an arena that has less than is wanted of it ([`tight`]).
//!
//! The first frame that is owned twice, lost or overwritten ends the run, with the seed. Threads make a run differ
//! from the next; the seed fixes what each of them asks for.
mod disturb;
mod found;
mod report;
mod round;
mod signals;
mod threads;
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
use report::Tally;
use round::Round;
use tight::Tight;

/// Look for a page with two owners, while everything happens at once
///
/// Every order and form, with signals, migrations, drains and forks in between.
/// Prints what was done. A frame that is owned twice, lost or overwritten ends the
/// run with exit code 1, and the seed that repeats it.
#[derive(Args, Debug, Clone)]
#[command(verbatim_doc_comment, after_help = AFTER_HELP)]
pub(crate) struct StressArgs {
    /// How long, in seconds: 1 to 86400; what is under way is then finished
    #[arg(long, allow_negative_numbers = true, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// What determines each thread's operations [default: a new one]
    #[arg(long, allow_negative_numbers = true)]
    seed: Option<u64>,
    /// Worker threads, 1 to 256 [default: twice the CPUs]
    #[arg(long, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=256))]
    threads: Option<u32>,
    /// How the per-CPU lists work [default: as the self-test finds]
    #[arg(long, value_parser = PossibleValuesParser::new(["rseq", "portable"]).try_map(|name| name.parse::<Backend>()))]
    backend: Option<Backend>,
    /// Pages in the arena, 1 to 16777216 [default: three sizes in turn]
    #[arg(long, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pages: Option<u32>,
    /// An arena at 90 % of what is wanted: waits, reclaim, faults, watermarks
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

On a busy machine a run of 5 seconds or more goes on until it met what it must
have met, such as a restarted section: 20 times as long at most.

Exit codes:
  0  each frame had one owner
  1  one had not, or too little was tried to say so: standard error says what
  2  the command line makes no sense
  ended by SIGINT, SIGTERM, SIGHUP or SIGQUIT, when the round is over: nothing
  was found until then";

/// Arenas, in pages: exhausted all the time; room for a block of 1 GiB and more; between. None ends with a pageblock.
const SIZES: [usize; 3] = [3_001, 600_077, 20_011];
/// How long a round lasts. Short ones look at every frame more often, long ones fragment more.
const ROUND: Duration = Duration::from_millis(1500);
/// A shorter run is too short to say that no section was ever restarted.
const ENOUGH: Duration = Duration::from_secs(5);
/// How many times as long a run goes on at most that has not met what it must.
const LONGER: u32 = 20;

/// What fixes a run.
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
    /// The command that does the same again.
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

    fn allocator(&self, round: usize) -> Result<Allocator, Failure> {
        let pages = self.pages.unwrap_or(SIZES[round % SIZES.len()]);
        // Small pages: with large ones, stamping the ends of a block would commit 2 MiB at each.
        let builder = Allocator::builder().pages(pages).huge_pages(false);
        let builder = self.faults()?.into_iter().fold(builder, Builder::faults);
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
    let backend = plan.allocator(0)?.backend();
    plan.backend = Some(backend);
    let threads = if plan.threads == 1 { "1 thread".to_owned() } else { format!("{} threads", plan.threads) };
    let begun = format!("seed {}, {threads}, {backend} lists, {} s\n", plan.seed, plan.seconds);
    match (args.json, args.seed) {
        (false, _) => print(&begun)?,
        // A run that is killed has told the seed that it chose.
        (true, None) => drop(io::stderr().write_all(begun.as_bytes())),
        (true, Some(_)) => {}
    }
    signals::install().map_err(|error| Failure::new("can't handle signals", error))?;
    say_seed_on_panic(plan.clone());
    if plan.is_tight {
        let (rounds, counts) = run_tight(&plan, server.as_ref(), &stop)?;
        has_pages(counts.get("pages").copied().unwrap_or(0))?;
        return print(&if args.json {
            report::tight_json(&plan, &counts)
        } else {
            report::tight_table(rounds, &counts)
        });
    }

    let tally = run_rounds(&plan, server.as_ref(), &stop)?;
    if backend == Backend::Rseq && tally.restarts == 0 && Duration::from_secs(plan.seconds) >= ENOUGH {
        let next = format!("run it longer; repeat with: {}", plan.again());
        return Err(Failure::new("too little is proved", "no section was restarted").next(next));
    }
    has_pages(tally.pages)?;
    print(&if args.json { tally.json(&plan) } else { tally.table() })
}

/// A run in which nothing was handed out has looked at nothing.
fn has_pages(pages: u64) -> Result<(), Failure> {
    match pages {
        0 => Err(Failure::new("too little is proved", "no page was ever handed out")
            .next("have fewer acquisitions fail, or give it more pages")),
        _ => Ok(()),
    }
}

fn run_rounds(plan: &Plan, server: Option<&StatsServer>, stop: &Stop) -> Result<Tally, Failure> {
    let (start, length) = (Instant::now(), Duration::from_secs(plan.seconds));
    let mut rng = Rng::new(plan.seed);
    let mut tally = Tally::default();
    let restarts = pagemill::restarts();
    let progress = Progress::new();
    while goes_on(start, length, plan.backend != Some(Backend::Rseq) || pagemill::restarts() > restarts) {
        let round = Round::new(plan.allocator(tally.rounds)?, rng.next(), plan.threads);
        if let Some(server) = server {
            server.show("stress", &round.allocator);
        }
        let done = round.run(end_of_round(start, length)).map_err(|what| {
            progress.clear();
            let why = format!("seed {}, {} lists{}", plan.seed, round.allocator.backend(), round.beside(&what));
            Failure::new(what, why).next(format!("repeat with: {}", plan.again()))
        })?;
        tally.add(&done);
        progress.show(start.elapsed(), length, &tally);
        stop.check(&format!("repeat with: {}", plan.again())).inspect_err(|_| progress.clear())?;
    }
    progress.clear();
    tally.restarts = pagemill::restarts() - restarts;
    tally.seconds = start.elapsed().as_secs_f64();
    Ok(tally)
}

/// Is there another round? For as long as was asked for; then, on a machine so busy that what the run must have met has not come
/// yet, until it does, or [`LONGER`] times as long.
fn goes_on(start: Instant, length: Duration, has_met_all: bool) -> bool {
    let longest = if has_met_all || length < ENOUGH { length } else { length * LONGER };
    start.elapsed() < longest
}

fn end_of_round(start: Instant, length: Duration) -> Instant {
    let (now, end) = (Instant::now(), start + length);
    if now < end { end.min(now + ROUND) } else { now + ROUND }
}

/// What a tight run must have counted and has not.
fn missing(counts: &tight::Counts) -> Option<&'static str> {
    tight::MUST.iter().find(|name| counts.get(*name).is_none_or(|&n| n == 0)).copied()
}

/// Rounds with less memory than is wanted; how many, and what was counted.
fn run_tight(plan: &Plan, server: Option<&StatsServer>, stop: &Stop) -> Result<(usize, tight::Counts), Failure> {
    let (start, length) = (Instant::now(), Duration::from_secs(plan.seconds));
    let mut rng = Rng::new(plan.seed);
    let (mut rounds, mut counts) = (0, tight::Counts::new());
    while goes_on(start, length, missing(&counts).is_none()) {
        let round = Tight::new(plan, rounds, rng.next())?;
        if let Some(server) = server {
            server.show("stress", &round.allocator);
        }
        let done = round.run(end_of_round(start, length)).map_err(|what| {
            let why = format!("seed {}, {} lists", plan.seed, round.allocator.backend());
            Failure::new(what, why).next(format!("repeat with: {}", plan.again()))
        })?;
        tight::add(&mut counts, &done);
        rounds += 1;
        stop.check(&format!("repeat with: {}", plan.again()))?;
    }
    if let Some(name) = missing(&counts).filter(|_| Duration::from_secs(plan.seconds) >= ENOUGH) {
        let next = format!("run it longer; repeat with: {}", plan.again());
        return Err(Failure::new("too little is proved", format!("nothing was counted as {name}")).next(next));
    }
    Ok((rounds, counts))
}

/// A broken invariant panics in whatever thread found it: the seed belongs to it.
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
    fn show(&self, elapsed: Duration, length: Duration, tally: &Tally) {
        if self.0 {
            let (now, of, all) = (elapsed.as_secs(), length.as_secs(), tally.all_ops());
            let _ =
                write!(io::stderr(), "\r\x1b[K{now} of {of} s, {}, {all} operations", report::counted(tally.rounds));
        }
    }
    fn clear(&self) {
        if self.0 {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}
