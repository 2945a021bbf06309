//! `pagemill bench`: measures Pagemill beside what a program would use today.
//!
//! Where to read: [`BenchArgs`] has the options. `rows` is the catalogue of what is measured; `subject` says what a row
//! must do, and has the timed loops. `tables` runs these loops, the rows taking turns in one run. `report` shows the
//! figures as text: `report/screen.rs` is what a run without options prints. `html` is the page, `chart` draws its
//! curves, and `bars` judges the figures. `file` is a file that a report goes to. What every table shares is in
//! `pagemill-harness`. `bench/README.md` says what each table times and how each peer is set up.
//!
//! Nothing depends on this crate but the program.

mod args;
mod bars;
mod chart;
mod file;
mod html;
mod policies;
mod report;
mod rows;
mod subject;
mod tables;

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressStyle};

pub use args::BenchArgs;
pub use pagemill_harness::{Error, Table};

use pagemill_harness::{machine, published, record, stats};

use args::{Plan, View};
use file::ReportFile;
use machine::Machine;
use pagemill_harness::report::{disturbance, wrap};
use published::Published;
use record::Record;
use tables::{
    Effort, Run, churn, dma, holes, mempool, mixed, one_thread, orders, page_pool, readahead, threads, total, touch,
};

/// Runs the tables that `args` ask for, and reports them. `program` is the file of the program `pagemill`, which a
/// table may start as a process of its own. `more` are the tables of data paths.
///
/// # Errors
/// An unknown name, a row that hands out wrong pages, a server that fails, a signal, a file that can't be written. It
/// is no error when the reader closes standard output early.
pub fn run(args: &BenchArgs, program: &Path, more: &[Table]) -> Result<(), Error> {
    let mut plan = args.plan(rows::catalogue(), more)?;
    let published = Published::load()?;
    let is_json_on_stdout = args.json.as_deref() == Some(Path::new("-"));
    let mut text = Text::new(is_json_on_stdout);
    let files = Files::open(args, is_json_on_stdout)?;

    let machine = Machine::here();
    let cpu = machine.main_cpu();
    machine::pin_to(cpu).map_err(|error| Error::Pin { cpu, error })?;
    let effort = if args.quick { Effort::QUICK } else { Effort::FULL };
    let clock_ns = machine::clock_overhead_ns();
    let backend = rows::default_backend().map_err(|why| Error::NoAllocator(why.to_string()))?;
    plan.on_one_backend(backend);
    let header = report::header(&machine, backend, effort.rounds);
    text.write(|out| writeln!(out, "{header}"))?;
    if plan.view == View::Tables {
        let seed = args.seed;
        text.write(|out| writeln!(out, "clock {clock_ns:.0} ns, subtracted where it is inside; seed {seed}"))?;
    }

    let run = pagemill_harness::Run {
        machine: &machine,
        program,
        effort,
        is_compared: plan.rows.iter().any(|row| row.kind != rows::Kind::Ours),
        backend,
        clock_ns,
        seed: args.seed,
        progress: progress(&plan, more),
        rounds: Default::default(),
        absent: Vec::new(),
    };
    let mut run = Run { run, rows: &plan.rows, is_brief: plan.is_brief, is_full: args.all, notes: Vec::new() };
    let measured = measure_all(&mut run, &plan, more, |run, table, new| {
        if plan.view == View::Tables {
            let (absent, notes) = (std::mem::take(&mut run.absent), std::mem::take(&mut run.notes));
            let own = more.iter().find(|own| own.name == table);
            let show = |out: &mut dyn Write| {
                match own {
                    Some(own) => (own.report)(out, new, &published)?,
                    // Both sizes of `scatter` are shown as one table.
                    None => report::table(out, table.trim_end_matches("-4g"), new, &published, plan.has_every_size)?,
                }
                notes.iter().try_for_each(|note| writeln!(out, "{}", wrap(note)))?;
                absent.iter().try_for_each(|note| writeln!(out, "{}", wrap(&format!("absent: {note}"))))
            };
            return run.progress.suspend(|| text.write(show));
        }
        Ok(())
    });
    run.progress.finish_and_clear();
    // The caller may run on every processor again.
    let _ = machine::pin_to_all(&machine.allowed);
    let records = measured?;
    if records.is_empty() {
        return Err(Error::NoRows);
    }

    let bits = rows::bits_per_frame();
    let own = more.iter().flat_map(|table| (table.bars)(&records));
    let bars = args.bars.then(|| bars::judge(&records, own.collect(), bits.as_ref().ok().copied()));
    text.write(|out| {
        match plan.view {
            View::Screen => report::screen(out, &plan.on_screen(&records, backend), &run.absent, &run.rounds)?,
            View::Tables => writeln!(out, "\n{}", report::footer(&published))?,
            View::Published => report::as_published(out, &records, &run.absent, &published)?,
        }
        if let Some(bars) = &bars {
            pagemill_harness::bars::write(out, bars)?;
            if let Err(why) = &bits {
                writeln!(out, "{}", wrap(&format!("absent: bits a frame: {why}")))?;
            }
        }
        if plan.view == View::Screen { Ok(()) } else { disturbance(out, &run.rounds) }
    })?;
    if is_json_on_stdout {
        quiet_pipe(false, record::write_json(&mut io::stdout().lock(), &records, &machine))?;
    }
    files.write(&header, &records, bars.as_deref().unwrap_or_default(), &machine)
}

/// The files of a run, each if it was asked for.
struct Files {
    json: Option<ReportFile>,
    html: Option<ReportFile>,
    svg: Option<ReportFile>,
}

impl Files {
    fn open(args: &BenchArgs, is_json_on_stdout: bool) -> Result<Files, Error> {
        let is_dash = |path: &Option<PathBuf>| path.as_deref() == Some(Path::new("-"));
        if is_dash(&args.html) || is_dash(&args.svg) {
            return Err(Error::Outputs("--html and --svg take the name of a file, not `-`"));
        }
        let open = |path: &Option<PathBuf>| path.as_deref().map(ReportFile::open).transpose();
        let json = if is_json_on_stdout { None } else { open(&args.json)? };
        let files = Files { json, html: open(&args.html)?, svg: open(&args.svg)? };
        let all: Vec<&ReportFile> = [&files.json, &files.html, &files.svg].into_iter().flatten().collect();
        if all.iter().enumerate().any(|(at, file)| all[..at].iter().any(|other| file.is(other))) {
            return Err(Error::Outputs("--json, --html and --svg name the same file; give each its own"));
        }
        Ok(files)
    }

    fn write(self, header: &str, records: &[Record], bars: &[bars::Bar], machine: &Machine) -> Result<(), Error> {
        if let Some(file) = self.json {
            file.write(|out| record::write_json(out, records, machine))?;
        }
        if let Some(file) = self.html {
            file.write(|out| out.write_all(html::page(header, records, bars).as_bytes()))?;
        }
        if let Some(file) = self.svg {
            file.write(|out| out.write_all(html::first_chart(records, &report::place(machine)).as_bytes()))?;
        }
        Ok(())
    }
}

/// Measures the tables in their order. `seen` is called with the records of each.
fn measure_all(
    run: &mut Run,
    plan: &Plan,
    more: &[Table],
    mut seen: impl FnMut(&mut Run, &str, &[Record]) -> Result<(), Error>,
) -> Result<Vec<Record>, Error> {
    let mut records = Vec::new();
    for &table in &plan.tables {
        let new = match more.iter().find(|own| own.name == table) {
            Some(own) => (own.measure)(run)?,
            None => measure(run, table)?,
        };
        seen(run, table, &new)?;
        records.extend(new);
    }
    Ok(records)
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
        "page-pool" => page_pool::page_pool(run),
        "dma" => dma::dma(run),
        "readahead" => readahead::readahead(run),
        "churn" => churn::churn(run),
        _ => threads::threads(run),
    }
}

/// A progress bar on standard error, if that is a terminal.
fn progress(plan: &Plan, more: &[Table]) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let steps = |table: &&str| match *table {
        "batch" => one_thread::batch_sizes(plan.is_brief).len(),
        "burst" => one_thread::burst_sizes(plan.is_brief).len(),
        "scatter" => one_thread::scatter_sizes(plan.is_brief).len(),
        "touch" | "mempool" | "mixed" => 1,
        "page-pool" => page_pool::STEPS,
        "dma" => dma::STEPS,
        "readahead" => readahead::STEPS,
        "holes" => holes::SLOTS.len(),
        "orders" => orders::ORDERS.len(),
        "total" => total::sizes().len(),
        "scatter-4g" => plan.rows.len(),
        "churn" => churn::steps(&plan.rows),
        other => more
            .iter()
            .find(|own| own.name == other)
            .map_or(threads::own_sizes(plan.is_brief).len() + 1, |own| own.steps),
    };
    let bar = ProgressBar::new(plan.tables.iter().map(steps).sum::<usize>() as u64);
    if let Ok(style) = ProgressStyle::with_template("[{elapsed}] {wide_bar} {pos}/{len} {msg}") {
        bar.set_style(style);
    }
    bar
}

/// Where the tables go. Once the reader has closed the pipe, nothing more is written there; the run goes on for the
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
