//! The options on the command line, and which tables and rows they select.

use std::path::PathBuf;

use crate::Error;
use crate::Table;
use crate::rows::{Kind, OPTIONAL, Row};

/// The tables, in the order in which they run.
pub(crate) const TABLES: [&str; 14] = [
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
    "dma",
    "crypt",
];

/// Those that a data path brings.
const OF_PATHS: [&str; 1] = ["crypt"];

/// The names that `--only` has for the backends of per-CPU lists.
const BACKENDS: [&str; 2] = ["rseq", "portable"];

const DEFAULT_TABLES: [&str; 6] = ["batch", "burst", "scatter", "holes", "orders", "mixed"];

/// Measure Pagemill beside what a program would use today, all in one run.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(after_help = HELP)]
pub struct BenchArgs {
    /// Only these tables, rows or backends, by the names below.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    pub only: Vec<String>,

    /// Compare with these floors and peers alone, or with `none`.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    pub vs: Vec<String>,

    /// Fewer and shorter rounds, for a first look: 10 seconds.
    #[arg(long)]
    pub quick: bool,

    /// Every table. Takes minutes, and up to 8 GiB of memory.
    #[arg(long, conflicts_with = "quick")]
    pub all: bool,

    /// Show alloc, free, spread and ratio for every N.
    #[arg(long)]
    pub details: bool,

    /// One JSON object a line; `-`: to stdout, tables to stderr.
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,

    /// Draw the curves into an HTML page that needs nothing else.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,

    /// Seed of the random orders.
    #[arg(long, value_name = "NUMBER", default_value_t = 20_260_704)]
    pub seed: u64,
}

const HELP: &str = "\
Needs no root. Without options it runs `batch`, `burst`, `scatter`, `holes`,
`orders` and `mixed`, in under 2 minutes. With --all some peers take 8 GiB
for the pages of scatter-4g.
Keep the machine otherwise idle: a disturbance shows as a wide min and max.
PAGEMILL_STATS is not served: who watches reads the counters that the rows
write, and would be measured with them.

Tables:
  batch       N pages out and back, N = 1 to 128; the list of free pages in
              random order, as a queue leaves it (fifo), in order (best case)
  burst       N pages out, then N back, N = 1 to 16384; the halves apart; so
  scatter     16384 pages out, then back in random order
  scatter-4g  the same over 4 GiB (1048576 pages)
  holes       1 to 64 pages leave an array of 64 to 1024 slots, and come back
  orders      blocks of 2 to 512 pages, one and 64 at a time
  mixed       two processors, requests of 1 to 16 pages that end at random,
              a part of them freed by the other thread
  total       128 KiB to 1 GiB, asked for 1 to 32 pages a call; put back
              before in random order, or in order
  touch       16 MiB of pages written to: fresh, recycled, returned
  churn       2 MiB frames that survive 100 rounds of 10 % churn at half full
  threads     two processors: own pages; one takes and the other puts back
  mempool     256 pages an operation from a pool with a reserve; waits for it
  dma         8192 small blocks out, then back; one for each of 256 reads
  crypt       an encrypted volume, in this process and served to fio by NBD

Rows:
  pagemill-single, -list, -array, -callback, -runs, -raw, -split,
          on each backend (rseq, portable)
  floors: memcpy, tls-vec, tls-refcell
  peers:  mutex-vec, array-queue, buddy-system, glibc, mimalloc, jemalloc,
          snmalloc, and rte-mempool where built with the feature dpdk

Every row first proves that it hands out distinct, aligned pages. Published
figures stand beside a table, marked, and enter no ratio. bench/README.md says
how each row is set up.

Examples:
  pagemill bench                                  the usual tables
  pagemill bench --quick --vs tls-vec,glibc       a first look
  pagemill bench --only batch,pagemill-array --vs glibc
  pagemill bench --only total,touch --vs none     Pagemill by itself
  pagemill bench --all --json out.json --html out.html
  pagemill bench --only burst --json - | jq 'select(.n == 16384)'";

/// The tables and rows of a run.
pub(crate) struct Plan {
    pub(crate) tables: Vec<&'static str>,
    pub(crate) rows: Vec<Row>,
}

impl BenchArgs {
    /// Chooses tables and rows. A name that is neither is an error.
    pub(crate) fn plan(&self, catalogue: Vec<Row>, more: &[Table]) -> Result<Plan, Error> {
        let is_table = |name: &str| TABLES.contains(&name);
        let is_here = |name: &str| !OF_PATHS.contains(&name) || more.iter().any(|own| own.name == name);
        if let Some(name) = self.only.iter().find(|name| is_table(name) && !is_here(name)) {
            return Err(Error::NotBuilt { name: name.clone(), feature: "crypt" });
        }
        let is_backend = |name: &str| BACKENDS.contains(&name);
        for name in &self.only {
            if !is_table(name) && !is_backend(name) && !catalogue.iter().any(|row| row.name == name) {
                return Err(unknown(name, "--only", &catalogue, |_| true));
            }
        }
        for name in self.vs.iter().filter(|name| *name != "none") {
            if !catalogue.iter().any(|row| row.kind != Kind::Ours && row.name == name) {
                return Err(unknown(name, "--vs", &catalogue, |row| row.kind != Kind::Ours));
            }
        }
        let names = |wanted: fn(&str) -> bool| self.only.iter().filter(move |name| wanted(name)).collect::<Vec<_>>();
        let asked = names(|name| TABLES.contains(&name));
        let backends = names(|name| BACKENDS.contains(&name));
        let shown = names(|name| !TABLES.contains(&name) && !BACKENDS.contains(&name));
        let usual: &[&str] = if self.all { &TABLES } else { &DEFAULT_TABLES };
        let is_wanted = |table: &&str| match asked.is_empty() {
            true => usual.contains(table),
            // `--all` adds the larger size to a table that was asked for by name.
            false => asked.iter().any(|name| name == table || (self.all && table.strip_suffix("-4g") == Some(name))),
        };
        let tables = TABLES.into_iter().filter(|table| is_here(table) && is_wanted(table)).collect();
        let is_shown = |row: &Row| {
            let is_backend_wanted =
                row.kind != Kind::Ours || backends.is_empty() || backends.iter().any(|b| *b == row.backend);
            let is_versus = row.kind == Kind::Ours || self.vs.is_empty() || self.vs.iter().any(|name| name == row.name);
            // Naming rows of Pagemill keeps the rows to compare with, unless some of those are named too.
            let is_named = shown.is_empty() || shown.iter().any(|name| *name == row.name);
            let names_of_kind = |ours: bool| shown.iter().any(|name| name.starts_with("pagemill-") == ours);
            let is_kept = is_named || (row.kind != Kind::Ours && !names_of_kind(false) && !self.vs.is_empty());
            is_backend_wanted && is_versus && is_kept
        };
        let rows: Vec<Row> = catalogue.into_iter().filter(is_shown).collect();
        if rows.is_empty() {
            return Err(Error::NoRows);
        }
        Ok(Plan { tables, rows })
    }
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

    const CRYPT: Table =
        Table { name: "crypt", steps: 1, measure: |_| Ok(Vec::new()), report: |_, _, _| Ok(()), bars: |_| Vec::new() };

    fn plan(only: &[&str], vs: &[&str], all: bool) -> Result<Plan, Error> {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        BenchArgs { only: owned(only), vs: owned(vs), all, ..BenchArgs::default() }.plan(catalogue(), &[CRYPT])
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
    fn tables_are_the_usual_ones_all_or_those_named() {
        assert_eq!(plan(&[], &[], false).unwrap().tables, DEFAULT_TABLES);
        assert_eq!(plan(&[], &[], true).unwrap().tables, TABLES);
        assert_eq!(plan(&["churn", "batch"], &[], false).unwrap().tables, ["batch", "churn"]);
        assert_eq!(plan(&["scatter"], &[], true).unwrap().tables, ["scatter", "scatter-4g"]);
        assert_eq!(plan(&["glibc"], &[], false).unwrap().tables, DEFAULT_TABLES);
    }

    #[test]
    fn rows_are_those_named_in_only_and_in_vs() {
        assert_eq!(plan(&[], &[], false).unwrap().rows.len(), catalogue().len());
        assert_eq!(names(&plan(&["batch", "tls-vec"], &[], false).unwrap()), ["tls-vec"]);
        let versus = plan(&["pagemill-array", "rseq"], &["glibc", "memcpy"], false).unwrap();
        assert_eq!(names(&versus), ["pagemill-array", "memcpy", "glibc"]);
        assert!(versus.rows.iter().all(|row| row.backend != "portable"));
        let alone = plan(&[], &["none"], false).unwrap();
        assert!(alone.rows.iter().all(|row| row.kind == Kind::Ours) && !alone.rows.is_empty());
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
