//! Measures Pagemill beside what a program would use today: `pagemill bench`.
//!
//! Where to read: [`BenchArgs`] says what can be asked for; `rows` is the catalogue of what is measured, `subject`
//! what a row must do and the timed loops over it; `tables` runs those loops, every row taking turns in one run;
//! `report`, `html` and `record` show the figures, `bars` judges them; `published` holds what others measured, which
//! is shown and never mixed in; `file` is where a report goes. `bench/README.md` says what each table times and how
//! each peer is set up.
//!
//! Nothing depends on this crate but the program.

mod args;
mod bars;
mod file;
mod html;
mod machine;
mod published;
mod record;
mod report;
mod rows;
mod stats;
mod subject;
mod tables;

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressStyle};

pub use args::BenchArgs;

use file::ReportFile;
use machine::Machine;
use published::Published;
use record::Record;
use tables::{
    Effort, Rounds, Run, churn, crypt, dma, holes, mempool, mixed, one_thread, orders, threads, total, touch,
};

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A name on the command line is neither a table nor a row.
    #[error("{option}: nothing is called `{name}`; there are: {known}")]
    UnknownName {
        /// What was given.
        name: String,
        /// The option it was given to.
        option: &'static str,
        /// What would have meant something.
        known: String,
    },
    /// A row that this build leaves out.
    #[error("`{name}` is not in this build: build with `--features {feature}` (bench/README.md says what it needs)")]
    NotBuilt {
        /// The row.
        name: String,
        /// The Cargo feature that brings it.
        feature: &'static str,
    },
    /// There is no allocator to measure.
    #[error("can't make an allocator: {0}")]
    NoAllocator(String),
    /// `--only` and `--vs` together leave no row, or the tables that they leave have none of them.
    #[error("--only and --vs together leave no row to measure in these tables")]
    NoRows,
    /// A row did not hand out what it must: its figures would mean nothing.
    #[error("{bench}, N = {n}: {name} ({backend}) {flaw}")]
    Row {
        /// The table.
        bench: &'static str,
        /// The row.
        name: &'static str,
        /// Its backend.
        backend: &'static str,
        /// The number of pages.
        n: usize,
        /// What was wrong.
        flaw: String,
    },
    /// The thread could not be bound to a processor.
    #[error("can't bind a thread to processor {cpu}: {error}")]
    Pin {
        /// The processor.
        cpu: usize,
        /// What the system said.
        error: rustix::io::Errno,
    },
    /// A measuring thread ended early.
    #[error("a measuring thread ended before its table did")]
    WorkerDied,
    /// A signal asked for the end. What was started is gone.
    #[error("{}", signal_hook::low_level::signal_name(*signal).unwrap_or("a signal"))]
    Interrupted {
        /// Its number.
        signal: i32,
    },
    /// A server, a client or a volume of the table `crypt`.
    #[error("crypt: {what}: {why}")]
    Crypt {
        /// What was being done.
        what: String,
        /// What is wrong.
        why: String,
    },
    /// Standard output, or standard error, does not take the report.
    #[error("{}: {error}", if *is_stderr { "standard error" } else { "standard output" })]
    Stream {
        /// Which of the two.
        is_stderr: bool,
        /// What the system said.
        error: io::Error,
    },
    /// A report could not be written.
    #[error("can't write {}: {error}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// A chart could not be drawn.
    #[error("can't draw a chart: {0}")]
    Drawing(String),
    /// The published figures in this build can't be read.
    #[error("the published figures are damaged: {0}")]
    Published(serde_json::Error),
}

impl Error {
    /// What the user can do about it, where there is something.
    ///
    /// ```
    /// use pagemill_bench::Error;
    /// let refused = Error::NotBuilt { name: "rte-mempool".into(), feature: "dpdk" };
    /// assert!(refused.next_step().is_some());
    /// assert_eq!(Error::WorkerDied.next_step(), None);
    /// ```
    pub fn next_step(&self) -> Option<&'static str> {
        match self {
            Error::UnknownName { .. } | Error::NotBuilt { .. } | Error::NoRows => Some("see `pagemill bench --help`"),
            Error::Stream { .. } => Some("send it to a file or a terminal that takes it"),
            Error::Write { .. } => Some("name a file that can be written"),
            Error::NoAllocator(_) => Some("see whether a limit (`ulimit -v`) keeps it from reserving address space"),
            _ => None,
        }
    }
}

/// Runs what `args` ask for, and reports it. `program` is the file of the program `pagemill`, whose `crypt serve` is
/// measured as a process of its own.
///
/// # Errors
/// An unknown name, a row that hands out wrong pages, a server that fails, a signal, a file that can't be written. A reader that closes standard
/// output early is no error.
pub fn run(args: &BenchArgs, program: &Path) -> Result<(), Error> {
    let plan = args.plan(rows::catalogue())?;
    let published = Published::load()?;
    let is_json_on_stdout = args.json.as_deref() == Some(Path::new("-"));
    let mut text = Text::new(is_json_on_stdout);
    let html_file = args.html.as_deref().map(ReportFile::open).transpose()?;
    let json_file = args.json.as_deref().filter(|_| !is_json_on_stdout).map(ReportFile::open).transpose()?;

    let machine = Machine::here();
    let cpu = machine.main_cpu();
    machine::pin_to(cpu).map_err(|error| Error::Pin { cpu, error })?;
    let effort = if args.quick { Effort::QUICK } else { Effort::FULL };
    let clock_ns = machine::clock_overhead_ns();
    let backend = rows::default_backend().map_err(|why| Error::NoAllocator(why.to_string()))?;
    let header = report::header(&machine, backend, clock_ns, effort.rounds, args.seed);
    text.write(|out| writeln!(out, "{header}"))?;

    let mut run = Run {
        machine: &machine,
        program,
        effort,
        rows: &plan.rows,
        backend,
        clock_ns,
        seed: args.seed,
        progress: progress(&plan),
        rounds: Rounds::default(),
        absent: Vec::new(),
    };
    let mut records: Vec<Record> = Vec::new();
    let measured = plan.tables.iter().try_for_each(|&table| {
        let new = measure(&mut run, table)?;
        // What `scatter` shows of both sizes is one table.
        let name = table.trim_end_matches("-4g");
        let absent = std::mem::take(&mut run.absent);
        run.progress.suspend(|| {
            text.write(|out| {
                report::table(out, name, &new, &published, args.details)?;
                absent.iter().try_for_each(|note| writeln!(out, "{}", report::wrap(&format!("absent: {note}"))))
            })
        })?;
        records.extend(new);
        Ok(())
    });
    run.progress.finish_and_clear();
    // Whoever called goes on wherever it ran before.
    let _ = machine::pin_to_all(&machine.allowed);
    measured?;
    if records.is_empty() {
        return Err(Error::NoRows);
    }

    let bits = rows::bits_per_frame();
    let bars = bars::judge(&records, bits.as_ref().ok().copied());
    text.write(|out| {
        bars::write(out, &bars)?;
        if let Err(why) = &bits {
            writeln!(out, "{}", report::wrap(&format!("absent: bits a frame: {why}")))?;
        }
        report::disturbance(out, &run.rounds)?;
        writeln!(out, "\n{}", report::footer(&published))
    })?;
    if let Some(file) = json_file {
        file.write(|out| record::write_json(out, &records, &machine))?;
    }
    if is_json_on_stdout {
        quiet_pipe(false, record::write_json(&mut io::stdout().lock(), &records, &machine))?;
    }
    if let Some(file) = html_file {
        let page = html::page(&header, &records, &bars, &published)?;
        file.write(|out| out.write_all(page.as_bytes()))?;
    }
    Ok(())
}

fn measure(run: &mut Run, table: &str) -> Result<Vec<Record>, Error> {
    match table {
        "batch" => one_thread::batch(run),
        "burst" => one_thread::burst(run),
        "scatter" => one_thread::scatter(run),
        "scatter-4g" => one_thread::scatter_wide(run),
        "holes" => holes::holes(run),
        "orders" => orders::orders(run),
        "mixed" => mixed::mixed(run),
        "total" => total::total(run),
        "touch" => touch::touch(run),
        "mempool" => mempool::mempool(run),
        "dma" => dma::dma(run),
        "crypt" => crypt::crypt(run),
        "churn" => churn::churn(run),
        _ => threads::threads(run),
    }
}

/// A bar on standard error, when that is a terminal.
fn progress(plan: &args::Plan) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let steps = |table: &&str| match *table {
        "batch" => one_thread::BATCH_SIZES.len(),
        "burst" => one_thread::burst_sizes().len(),
        "scatter" | "touch" | "mempool" | "mixed" => 1,
        "dma" => dma::STEPS,
        "crypt" => crypt::STEPS,
        "holes" => holes::SLOTS.len(),
        "orders" => orders::ORDERS.len(),
        "total" => total::sizes().len(),
        "scatter-4g" => plan.rows.len(),
        "churn" => churn::steps(&plan.rows),
        _ => threads::OWN_SIZES.len() + 1,
    };
    let bar = ProgressBar::new(plan.tables.iter().map(steps).sum::<usize>() as u64);
    if let Ok(style) = ProgressStyle::with_template("[{elapsed}] {wide_bar} {pos}/{len} {msg}") {
        bar.set_style(style);
    }
    bar
}

/// Where the tables go. Once the reader has closed the pipe, nothing more is written, and the run goes on for the
/// files that were asked for.
struct Text {
    is_stderr: bool,
    is_closed: bool,
}

impl Text {
    fn new(is_stderr: bool) -> Text {
        Text { is_stderr, is_closed: false }
    }

    fn write(&mut self, body: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Error> {
        if self.is_closed {
            return Ok(());
        }
        let mut out: Box<dyn Write> = if self.is_stderr { Box::new(io::stderr()) } else { Box::new(io::stdout()) };
        let result = body(&mut out).and_then(|()| out.flush());
        self.is_closed = result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe);
        quiet_pipe(self.is_stderr, result)
    }
}

fn quiet_pipe(is_stderr: bool, result: io::Result<()>) -> Result<(), Error> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Error::Stream { is_stderr, error }),
        _ => Ok(()),
    }
}
