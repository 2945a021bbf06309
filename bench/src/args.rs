//! The options on the command line, and which tables and rows they select.

use std::path::PathBuf;

use crate::Error;
use crate::Table;
use crate::record::Record;
use crate::rows::{Kind, OPTIONAL, Row};

/// The tables, in the order in which they run.
pub(crate) const TABLES: [&str; 18] = [
    "batch",
    "burst",
    "scatter",
    "scatter-4g",
    "holes",
    "orders",
    "mixed",
    "total",
    "touch",
    "churn",
    "threads",
    "mempool",
    "page-pool",
    "dma",
    "readahead",
    "crypt",
    "xdp",
    "rpc",
];

/// Those that a data path brings. The feature that does is called as the table is.
const OF_PATHS: [&str; 3] = ["crypt", "xdp", "rpc"];

/// The names that `--only` has for the backends of per-CPU lists.
const BACKENDS: [&str; 2] = ["rseq", "portable"];

/// The tables that `--details` and `--bars` run without names.
const DETAILED: [&str; 8] = ["batch", "burst", "scatter", "holes", "orders", "mixed", "churn", "threads"];

/// The tables from which the first screen takes its figures, a few cells of each.
const FIRST: [&str; 6] = ["batch", "burst", "scatter", "mixed", "churn", "threads"];

/// The rows of the first screen, if none is named.
const FIRST_ROWS: [&str; 11] = [
    "pagemill-single",
    "pagemill-array",
    "memcpy",
    "tls-vec",
    "mutex-vec",
    "array-queue",
    "rte-mempool",
    "glibc",
    "mimalloc",
    "jemalloc",
    "snmalloc",
];

/// The tables in which Linux's publications have figures, and the rows that have their shape.
const PUBLISHED: [&str; 5] = ["batch", "burst", "total", "dma", "crypt"];
const PUBLISHED_ROWS: [&str; 3] = ["pagemill-single", "pagemill-list", "pagemill-array"];

/// Measure Pagemill beside what a program would use today, all in one run.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(after_help = HELP)]
pub struct BenchArgs {
    /// As --only.
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,

    /// These tables in full; these rows or backends alone.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    pub only: Vec<String>,

    /// Compare with these floors and peers alone, or with `none`.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    pub vs: Vec<String>,

    /// Fewer and shorter rounds, for a first look: 10 seconds.
    #[arg(long)]
    pub quick: bool,

    /// Eight tables in full; with --only or --all each size too.
    #[arg(long)]
    pub details: bool,

    /// Every table. Takes minutes, and up to 12 GiB of memory.
    #[arg(long, conflicts_with = "quick")]
    pub all: bool,

    /// Judge the figures by the project's own limits.
    #[arg(long)]
    pub bars: bool,

    /// Linux's published tables, each beside this machine's.
    #[arg(long, conflicts_with_all = ["details", "all", "bars"])]
    pub as_published: bool,

    /// One JSON object a line; `-`: to stdout, text to stderr.
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,

    /// Charts and all figures, one page that needs no other.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,

    /// The page's first chart alone.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// Seed of the random orders.
    #[arg(long, value_name = "NUMBER", default_value_t = 20_260_704)]
    pub seed: u64,
}

const HELP: &str = "\
Without options it shows one screen, within a minute: ns a page for Pagemill,
the mallocs, pools and a floor, on one processor and on two. A table named in
--only is shown in full. Needs no root. Keep the machine otherwise idle.

Tables:
  batch       N pages out and back, N = 1 to 128; the list of free pages in
              random order, as a queue leaves it (fifo), in order (best case)
  burst       N pages out, then N back, N = 1 to 16384; each half too
  scatter     16384 pages out, then back in random order
  scatter-4g  the same over 4 GiB; some peers need 8 GiB for it
  holes       1 to 64 pages leave an array of 64 to 1024 slots, and come back
  orders      blocks of 2 to 512 pages, one and 64 at a time
  mixed       two processors, requests of 1 to 16 pages that end at random,
              a part of them freed by the other thread
  total       128 KiB to 1 GiB, asked for 1 to 32 pages a call
  touch       16 MiB of pages written to: fresh, recycled, returned
  churn       2 MiB frames that stay whole when half of the memory is in use
  threads     two processors: own pages; one takes and the other puts back
  mempool     256 pages an operation from a pool with a reserve; waits for it
  page-pool   pages that circulate between a consumer and other threads, 1 to
              1024 out; refill; 64 pages or one block for a device
  dma         8192 small blocks out, then back; one for each of 256 reads
  readahead   a file read through a page cache: cold, warm, at random; beside
              read(2), O_DIRECT, mmap and caches of values; writes 512 MiB
  crypt       an encrypted volume, in this process and served to fio by NBD
  xdp         packets received on a veth pair; needs root
  rpc         refilling the page array of a thread that serves RPC requests

Rows:
  pagemill-single, -list, -array, -callback, -runs, -raw, -split,
          on each backend (rseq, portable)
  floors: memcpy, tls-vec, tls-refcell
  peers:  mutex-vec, array-queue, buddy-system, glibc, mimalloc, jemalloc,
          snmalloc, and rte-mempool where built with the feature dpdk

bench/README.md says how each row is set up and what each table times.

Examples:
  pagemill bench --quick                          a first look
  pagemill bench --html out.html                  the same with charts
  pagemill bench --only batch,pagemill-array --vs glibc
  pagemill bench --all --bars --json out.json     everything
  pagemill bench --only burst --json - | jq 'select(.n == 16384)'";

/// What a run reports, beside the bars.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum View {
    /// One screen.
    Screen,
    /// Each table in full.
    Tables,
    /// Linux's publications.
    Published,
}

/// The tables and rows of a run.
pub(crate) struct Plan {
    pub(crate) tables: Vec<&'static str>,
    pub(crate) rows: Vec<Row>,
    pub(crate) view: View,
    /// Whether the tables are measured only as far as the screen shows them.
    pub(crate) is_brief: bool,
    /// Whether tables show the halves, the spread and the ratio of every size, and not of a few.
    pub(crate) has_every_size: bool,
}

impl Plan {
    /// The records that the screen shows, of a run that measured more than these.
    pub(crate) fn on_screen(&self, records: &[Record], backend: &str) -> Vec<Record> {
        let is_usual = |record: &&Record| {
            ["-", backend].contains(&record.backend)
                && (FIRST_ROWS.contains(&record.name) || record.name == "hand-over")
        };
        records.iter().filter(|record| self.is_brief || is_usual(record)).cloned().collect()
    }

    /// Leaves out the rows on other backends, where only one is shown and this one has rows.
    pub(crate) fn on_one_backend(&mut self, backend: &str) {
        let is_ours = |row: &Row| row.kind == Kind::Ours;
        let shows_one = self.is_brief || self.view == View::Published;
        if shows_one && self.rows.iter().any(|row| is_ours(row) && row.backend == backend) {
            self.rows.retain(|row| !is_ours(row) || row.backend == backend);
        }
    }
}

impl BenchArgs {
    /// Chooses tables and rows. A name that is neither is an error.
    pub(crate) fn plan(&self, catalogue: Vec<Row>, more: &[Table]) -> Result<Plan, Error> {
        if !self.names.is_empty() {
            let only = [&self.names[..], &self.only].concat();
            return Self { names: Vec::new(), only, ..self.clone() }.plan(catalogue, more);
        }
        let is_here = |name: &str| !OF_PATHS.contains(&name) || more.iter().any(|own| own.name == name);
        self.check_names(&catalogue, &is_here)?;
        let asked: Vec<&String> = self.only.iter().filter(|name| is_table(name)).collect();
        let (view, usual) = match () {
            () if self.as_published => (View::Published, &PUBLISHED[..]),
            () if self.all => (View::Tables, &TABLES[..]),
            () if self.details || !asked.is_empty() => (View::Tables, &DETAILED[..]),
            () if self.bars => (View::Screen, &DETAILED[..]),
            () => (View::Screen, &FIRST[..]),
        };
        let is_wanted = |table: &&str| match asked.is_empty() {
            true => usual.contains(table),
            // `--all` adds the larger size to a table that was asked for by name.
            false => asked.iter().any(|name| *name == table || (self.all && table.strip_suffix("-4g") == Some(name))),
        };
        let is_reported = |table: &&str| view != View::Published || PUBLISHED.contains(table);
        let tables: Vec<&str> =
            TABLES.into_iter().filter(|table| is_here(table) && is_wanted(table) && is_reported(table)).collect();
        let is_brief = view == View::Screen && !self.bars;
        let rows = self.rows(catalogue, view, is_brief);
        if rows.is_empty() || tables.is_empty() {
            return Err(Error::NoRows);
        }
        let has_every_size = self.details && (self.all || !asked.is_empty());
        Ok(Plan { tables, rows, view, is_brief, has_every_size })
    }

    fn check_names(&self, catalogue: &[Row], is_here: &dyn Fn(&str) -> bool) -> Result<(), Error> {
        let is_asked_for = |name: &&&str| self.only.iter().any(|only| only == **name);
        if let Some(&name) = OF_PATHS.iter().filter(is_asked_for).find(|name| !is_here(name)) {
            return Err(Error::NotBuilt { name: name.to_owned(), feature: name });
        }
        for name in &self.only {
            if !is_table(name) && !is_backend(name) && !catalogue.iter().any(|row| row.name == name) {
                return Err(unknown(name, "--only", catalogue, |_| true));
            }
        }
        for name in self.vs.iter().filter(|name| *name != "none") {
            if !catalogue.iter().any(|row| row.kind != Kind::Ours && row.name == name) {
                return Err(unknown(name, "--vs", catalogue, |row| row.kind != Kind::Ours));
            }
        }
        Ok(())
    }

    /// The rows that were asked for; if none is named, those of the report.
    fn rows(&self, catalogue: Vec<Row>, view: View, is_brief: bool) -> Vec<Row> {
        let backends: Vec<&String> = self.only.iter().filter(|name| is_backend(name)).collect();
        let shown: Vec<&String> = self.only.iter().filter(|name| !is_table(name) && !is_backend(name)).collect();
        let is_usual = |row: &Row| match view {
            View::Published => PUBLISHED_ROWS.contains(&row.name),
            _ if is_brief => FIRST_ROWS.contains(&row.name) || self.vs.iter().any(|name| name == row.name),
            _ => true,
        };
        let is_shown = |row: &Row| {
            let is_backend_wanted =
                row.kind != Kind::Ours || backends.is_empty() || backends.iter().any(|b| *b == row.backend);
            let is_versus = row.kind == Kind::Ours || self.vs.is_empty() || self.vs.iter().any(|name| name == row.name);
            // Naming rows of Pagemill keeps the rows to compare with, unless some of those are named too.
            let is_named = if shown.is_empty() { is_usual(row) } else { shown.iter().any(|name| *name == row.name) };
            let names_of_kind = |ours: bool| shown.iter().any(|name| name.starts_with("pagemill-") == ours);
            let is_kept = is_named || (row.kind != Kind::Ours && !names_of_kind(false) && !self.vs.is_empty());
            is_backend_wanted && is_versus && is_kept
        };
        catalogue.into_iter().filter(is_shown).collect()
    }
}

fn is_table(name: &str) -> bool {
    TABLES.contains(&name)
}

fn is_backend(name: &str) -> bool {
    BACKENDS.contains(&name)
}

fn unknown(name: &str, option: &'static str, catalogue: &[Row], is_known: impl Fn(&Row) -> bool) -> Error {
    if let Some((_, feature)) = OPTIONAL.iter().find(|(optional, _)| *optional == name) {
        return Error::NotBuilt { name: name.to_owned(), feature };
    }
    let mut known: Vec<&str> = if option == "--only" { [&TABLES[..], &BACKENDS].concat() } else { vec!["none"] };
    known.extend(catalogue.iter().filter(|row| is_known(row)).map(|row| row.name));
    known.sort_unstable();
    known.dedup();
    Error::UnknownName { name: name.to_owned(), option, known: known.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::catalogue;

    const PATHS: [Table; 3] = [path("crypt"), path("xdp"), path("rpc")];

    const fn path(name: &'static str) -> Table {
        Table { name, steps: 1, measure: |_| Ok(Vec::new()), report: |_, _, _| Ok(()), bars: |_| Vec::new() }
    }

    fn plan(only: &[&str], vs: &[&str], all: bool) -> Result<Plan, Error> {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        BenchArgs { only: owned(only), vs: owned(vs), all, ..BenchArgs::default() }.plan(catalogue(), &PATHS)
    }

    fn plan_of(args: BenchArgs) -> Plan {
        args.plan(catalogue(), &PATHS).unwrap()
    }

    fn names(plan: &Plan) -> Vec<&'static str> {
        let mut names: Vec<&str> = plan.rows.iter().map(|row| row.name).collect();
        names.dedup();
        names
    }

    #[test]
    fn an_unknown_name_is_refused_with_every_known_name() {
        let Err(Error::UnknownName { known, .. }) = plan(&["batch", "rsq"], &[], false) else { panic!() };
        let known: Vec<&str> = known.split(", ").collect();
        assert!(TABLES.iter().chain(&BACKENDS).all(|name| known.contains(name)), "{known:?}");
        assert!(known.iter().all(|name| plan(&[name], &[], false).is_ok()), "{known:?}");
    }

    #[test]
    fn help_names_every_table_and_stays_within_80_columns() {
        use clap::Args as _;
        let mut command = BenchArgs::augment_args(clap::Command::new("bench"));
        for help in [command.render_help().to_string(), command.render_long_help().to_string()] {
            let wide: Vec<&str> = help.lines().filter(|line| line.chars().count() > 80).collect();
            assert!(wide.is_empty(), "{wide:#?}");
            assert!(TABLES.iter().all(|table| help.contains(&format!("  {table} "))), "{help}");
        }
    }

    #[test]
    fn tables_are_those_of_the_screen_all_or_those_named() {
        let screen = plan(&[], &[], false).unwrap();
        assert_eq!((screen.tables, screen.view, screen.is_brief), (FIRST.to_vec(), View::Screen, true));
        let all = plan(&[], &[], true).unwrap();
        assert_eq!((all.tables, all.view, all.is_brief), (TABLES.to_vec(), View::Tables, false));
        let named = plan(&["churn", "batch"], &[], false).unwrap();
        assert_eq!((named.tables, named.view), (vec!["batch", "churn"], View::Tables));
        let named = plan_of(BenchArgs { names: vec!["xdp".to_owned()], ..BenchArgs::default() });
        assert_eq!((named.tables, named.view), (vec!["xdp"], View::Tables));
        assert_eq!(plan(&["scatter"], &[], true).unwrap().tables, ["scatter", "scatter-4g"]);
        assert_eq!(plan(&["glibc"], &[], false).unwrap().tables, FIRST, "a row names no table");
        let details = plan_of(BenchArgs { details: true, ..BenchArgs::default() });
        assert_eq!((details.tables, details.view, details.has_every_size), (DETAILED.to_vec(), View::Tables, false));
        let batch = plan_of(BenchArgs { details: true, only: vec!["batch".to_owned()], ..BenchArgs::default() });
        assert_eq!((batch.tables, batch.has_every_size), (vec!["batch"], true));
        let bars = plan_of(BenchArgs { bars: true, ..BenchArgs::default() });
        assert_eq!((bars.tables, bars.view, bars.is_brief), (DETAILED.to_vec(), View::Screen, false));
    }

    #[test]
    fn publications_run_their_tables_with_the_rows_of_their_shape() {
        let mut published = plan_of(BenchArgs { as_published: true, ..BenchArgs::default() });
        published.on_one_backend("portable");
        assert_eq!(published.tables, PUBLISHED);
        assert_eq!(names(&published), PUBLISHED_ROWS);
        assert!(published.rows.iter().all(|row| row.backend == "portable"));
        let only = |name: &str| BenchArgs { as_published: true, only: vec![name.to_owned()], ..BenchArgs::default() };
        assert_eq!(plan_of(only("total")).tables, ["total"]);
        assert!(matches!(only("churn").plan(catalogue(), &PATHS), Err(Error::NoRows)), "nobody published churn");
    }

    #[test]
    fn rows_are_those_named_in_only_and_in_vs() {
        assert_eq!(plan(&["batch"], &[], false).unwrap().rows.len(), catalogue().len());
        assert_eq!(names(&plan(&["batch", "tls-vec"], &[], false).unwrap()), ["tls-vec"]);
        let versus = plan(&["pagemill-array", "rseq"], &["glibc", "memcpy"], false).unwrap();
        assert_eq!(names(&versus), ["pagemill-array", "memcpy", "glibc"]);
        assert!(versus.rows.iter().all(|row| row.backend != "portable"));
        let alone = plan(&[], &["none"], false).unwrap();
        assert!(alone.rows.iter().all(|row| row.kind == Kind::Ours) && !alone.rows.is_empty());
    }

    #[test]
    fn the_screen_has_one_backend_and_its_own_rows_unless_others_are_named() {
        let mut screen = plan(&[], &[], false).unwrap();
        screen.on_one_backend("rseq");
        assert!(screen.rows.iter().all(|row| row.backend != "portable" && FIRST_ROWS.contains(&row.name)));
        let is_row = |name: &str| catalogue().iter().any(|row| row.name == name);
        let is_optional = |name: &str| OPTIONAL.iter().any(|(optional, _)| *optional == name);
        assert!(FIRST_ROWS.iter().all(|name| is_row(name) || is_optional(name)));
        let mut other = plan(&["portable", "pagemill-list"], &["buddy-system"], false).unwrap();
        other.on_one_backend("rseq");
        assert_eq!(names(&other), ["pagemill-list", "buddy-system"]);
        assert!(other.rows.iter().all(|row| row.backend != "rseq"));
        let mut bars = plan_of(BenchArgs { bars: true, ..BenchArgs::default() });
        bars.on_one_backend("rseq");
        assert!(bars.rows.iter().any(|row| row.backend == "portable"), "some bars are for the other backend");
        let of = |name, backend| Record { backend, ..crate::record::example("batch", name, Kind::Ours, 1, 1.0) };
        let records = [of("pagemill-array", "rseq"), of("pagemill-array", "portable"), of("pagemill-list", "rseq")];
        assert_eq!(bars.on_screen(&records, "rseq"), records[..1], "the screen is the same");
        assert_eq!(other.on_screen(&records, "rseq"), records, "what was named is shown");
    }

    #[test]
    fn refusals_list_the_names_that_the_option_takes() {
        let refused = plan(&["batches"], &[], false).err().unwrap().to_string();
        assert!(refused.contains("batches") && refused.contains("batch, ") && refused.contains("glibc"), "{refused}");
        let refused = plan(&[], &["pagemill-list"], false).err().unwrap().to_string();
        assert!(refused.contains("--vs") && refused.contains("tls-vec") && !refused.contains("burst"), "{refused}");
        if !cfg!(feature = "dpdk") {
            let refused = plan(&[], &["rte-mempool"], false).err().unwrap().to_string();
            assert!(refused.contains("feature") && refused.contains("dpdk"), "{refused}");
        }
    }
}
