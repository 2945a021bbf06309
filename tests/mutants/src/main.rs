//! How many small faults in the library its tests see.
//!
//! A mutant is the library with one operator exchanged, one condition negated or one call left out. All mutants of a sample are
//! compiled into one copy of the tree, each behind a switch that `PAGEMILL_MUTANT` turns on, so a mutant costs no build: the
//! tests that come to it run, quick ones of its own crate first, until one fails. A test that fails is run once more without the
//! mutant, so that no test that fails by chance counts. The sample has some of every file and is the same for the same
//! seed and sources. The file `equivalent` names mutants that no test can see, and says why.
mod find;
mod run;
mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;
use std::{env, fs, process};

use serde_json::{Value, json};

use crate::find::Mutant;
use crate::run::Test;
use crate::tree::DOC;

/// The crates of the library, what others depend on first.
pub(crate) const PACKAGES: [&str; 3] = ["pagemill-core", "pagemill-os", "pagemill"];
/// What the tests must see of the mutants that are not equivalent, in percent.
const WANTED: usize = 90;
/// How many mutants a file has in the sample, if it has as many.
const OF_EACH: usize = 2;

const USAGE: &str = "mutants [--count 200] [--seed 1] [--only TEXT] [--missed] [--list] [--work FOLDER] [--json FILE]

--count  about so many mutants, at least two of each file
--only   of these, those whose `file:line` holds the text
--missed of these, those that the last run with the same --json did not catch; the others count as they did
--list   prints the sample and runs nothing
--work   where the copy and its build go; target/xtask/mutants
--json   writes what became of each mutant";

struct Options {
    count: usize,
    seed: u64,
    only: String,
    is_missed_alone: bool,
    is_list: bool,
    work: PathBuf,
    json: Option<PathBuf>,
}

/// What became of a mutant.
struct Outcome {
    mutant: Mutant,
    /// How many tests come to it.
    reached_by: usize,
    /// The test that failed, and how; none when it is missed.
    caught: Option<String>,
}

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository is there");
    let options = options(&root);
    let all: Vec<Mutant> = PACKAGES.iter().flat_map(|package| find::all(&root, package)).collect();
    let equivalent = equivalent(&root, &all);
    let mut sample = sample(&all, options.count, options.seed);
    println!("{} of {} possible mutants, seed {}", sample.len(), all.len(), options.seed);
    let before = options.json.as_ref().filter(|_| options.is_missed_alone);
    let before = before.and_then(|path| serde_json::from_str(&fs::read_to_string(path).ok()?).ok());
    let mut outcomes = before.map(|records: Vec<Value>| known(&records, &sample)).unwrap_or_default();
    let was_caught =
        |it: &Mutant| outcomes.iter().any(|known| known.mutant.number == it.number && known.caught.is_some());
    let has = |it: &Mutant| format!("{}:{}", it.file, it.line).contains(&options.only) && !was_caught(it);
    if options.is_list {
        sample.iter().filter(|it| has(it)).for_each(|it| println!("{:>4} {}", it.number, told(it)));
        return;
    }

    let folder = env::temp_dir().join(format!("pagemill-mutants-{}", process::id()));
    fs::create_dir_all(&folder).expect("a temporary folder can be made");
    // What a mutant takes is taken from it before anything else on the machine.
    drop(fs::write("/proc/self/oom_score_adj", "1000"));
    let programs = tree::build(&root, &options.work, &mut sample);
    sample.retain(has);
    let programs = if sample.is_empty() { Vec::new() } else { programs };
    let lanes = std::thread::available_parallelism().map_or(1, usize::from);
    let begun = Instant::now();
    let mut tests = run::tests(&programs, &folder, lanes);
    println!("{} tests pass without a mutant, in {} s", tests.len(), begun.elapsed().as_secs());
    tests.sort_by_key(|test| (test.is_portable, test.took));

    let (now, done) = (Mutex::new(Vec::new()), AtomicUsize::new(0));
    run::in_lanes(lanes, sample.len(), |_, at| {
        // No test sees an equivalent one: to ask them all would take minutes.
        let is_equivalent = equivalent.contains(&sample[at].key());
        let asked = if is_equivalent { &[] } else { &tests[..] };
        let outcome = outcome(&sample[at], asked, &folder);
        let done = done.fetch_add(1, Relaxed) + 1;
        let caught = outcome.caught.as_deref().unwrap_or(if is_equivalent { "equivalent" } else { "MISSED" });
        println!("{done}/{} {} {}: {caught}", sample.len(), outcome.mutant.number, told(&outcome.mutant));
        now.lock().unwrap().push(outcome);
    });
    drop(fs::remove_dir_all(&folder));

    let now = now.into_inner().unwrap();
    outcomes.retain(|it| now.iter().all(|new| new.mutant.number != it.mutant.number));
    outcomes.extend(now);
    outcomes.sort_by_key(|outcome| outcome.mutant.number);
    if let Some(path) = &options.json {
        let records: Vec<_> = outcomes.iter().map(as_json).collect();
        fs::write(path, serde_json::to_string_pretty(&records).expect("it is plain data")).expect("JSON is written");
    }
    if !report(&outcomes, &equivalent) {
        process::exit(1);
    }
}

fn options(root: &Path) -> Options {
    let work = root.join("target/xtask/mutants");
    let mut options =
        Options { count: 200, seed: 1, only: String::new(), is_missed_alone: false, is_list: false, work, json: None };
    let mut args = env::args().skip(1);
    while let Some(name) = args.next() {
        let mut value = || args.next().unwrap_or_else(usage);
        match name.as_str() {
            "--count" => options.count = value().parse().unwrap_or_else(|_| usage()),
            "--seed" => options.seed = value().parse().unwrap_or_else(|_| usage()),
            "--only" => options.only = value(),
            "--missed" => options.is_missed_alone = true,
            "--list" => options.is_list = true,
            "--work" => options.work = value().into(),
            "--json" => options.json = Some(value().into()),
            _ => usage(),
        }
    }
    options
}

fn usage<T>() -> T {
    eprintln!("{USAGE}");
    process::exit(2);
}

/// Some of every file, by chance, in the order of the sources, and numbered from 1.
fn sample(all: &[Mutant], count: usize, seed: u64) -> Vec<Mutant> {
    let mut files: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    all.iter().enumerate().for_each(|(at, mutant)| files.entry(&mutant.file).or_default().push(at));
    // SplitMix64 (Steele, Lea and Flood, 2014).
    let mut state = seed;
    let mut random = |below: usize| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ mixed >> 31) % below as u64) as usize
    };
    let mut chosen = Vec::new();
    for mut of_file in files.into_values() {
        let share = ((of_file.len() * count + all.len() / 2) / all.len()).max(OF_EACH).min(of_file.len());
        for _ in 0..share {
            chosen.push(of_file.swap_remove(random(of_file.len())));
        }
    }
    chosen.sort_unstable();
    let numbered = chosen.into_iter().zip(1..).map(|(at, number)| Mutant { number, ..all[at].clone() });
    numbered.collect()
}

/// The mutants that `equivalent` names: one in each line that begins a line; the source below, and why. It ends this program when
/// there is no such mutant any more.
fn equivalent(root: &Path, all: &[Mutant]) -> Vec<(String, String)> {
    let text = fs::read_to_string(root.join("tests/mutants/equivalent")).unwrap_or_default();
    let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).collect();
    let mut named = Vec::new();
    for (at, head) in lines.iter().enumerate().filter(|(_, line)| !line.starts_with(' ')) {
        let below = |n: usize| lines.get(at + n).filter(|line| line.starts_with(' ')).map(|line| line.trim());
        let key = ((*head).to_owned(), below(1).unwrap_or_default().to_owned());
        let is_there = all.iter().any(|mutant| mutant.key() == key);
        assert!(is_there && below(2).is_some(), "tests/mutants/equivalent: no such mutant, or no reason: {key:?}");
        named.push(key);
    }
    named
}

/// Runs what comes to a mutant until a test fails.
fn outcome(mutant: &Mutant, tests: &[Test], folder: &Path) -> Outcome {
    let comes = |test: &&Test| test.seen[mutant.number as usize] == 1;
    // What comes to it on either backend need not do so on both.
    let usual: BTreeSet<_> =
        tests.iter().filter(|test| !test.is_portable && comes(test)).map(|test| &test.name).collect();
    let is_new = |test: &&Test| !test.is_portable || !usual.contains(&test.name);
    let mut coming: Vec<_> = tests.iter().filter(comes).filter(is_new).collect();
    let reached_by = coming.len();
    // Stable: quick ones first among equals. What takes long comes last, whosever it is.
    coming.sort_by_key(|test| {
        let is_far = test.program.package != mutant.package;
        (test.program.kind == DOC, test.took.as_secs() >= 5, test.is_portable, is_far, test.program.kind != "lib")
    });
    let caught = coming.iter().find_map(|test| {
        let how = test.fails(mutant.number, folder)?;
        // A test that fails by chance says nothing.
        test.fails(0, folder).is_none().then(|| format!("{} {how}", test.key()))
    });
    Outcome { mutant: mutant.clone(), reached_by, caught }
}

fn told(mutant: &Mutant) -> String {
    format!("{}:{} {} in {}", mutant.file, mutant.line, mutant.what, mutant.source)
}

fn as_json(Outcome { mutant, reached_by, caught }: &Outcome) -> Value {
    json!({
        "number": mutant.number, "file": mutant.file, "line": mutant.line, "what": mutant.what, "source": mutant.source,
        "reached_by": reached_by, "caught": caught,
    })
}

/// What an earlier run says of these mutants.
fn known(records: &[Value], sample: &[Mutant]) -> Vec<Outcome> {
    let of = |mutant: &Mutant| {
        let is_it = |it: &&Value| {
            (&it["number"], &it["file"], &it["what"])
                == (&json!(mutant.number), &json!(mutant.file), &json!(mutant.what))
        };
        let record = records.iter().find(is_it)?;
        let reached_by = record["reached_by"].as_u64()? as usize;
        Some(Outcome { mutant: mutant.clone(), reached_by, caught: record["caught"].as_str().map(str::to_owned) })
    };
    sample.iter().filter_map(of).collect()
}

/// Prints the table by file and what was missed. True when the tests see enough.
fn report(outcomes: &[Outcome], equivalent: &[(String, String)]) -> bool {
    let is_equivalent = |it: &Outcome| it.caught.is_none() && equivalent.contains(&it.mutant.key());
    let counts = |of: &dyn Fn(&Outcome) -> bool| {
        let these = || outcomes.iter().filter(|it| of(it));
        let (caught, same) =
            (these().filter(|it| it.caught.is_some()).count(), these().filter(|it| is_equivalent(it)).count());
        (these().count(), caught, same, these().count() - caught - same)
    };
    let mut files: Vec<_> = outcomes.iter().map(|it| it.mutant.file.as_str()).collect();
    files.dedup();
    println!("\n| file | mutants | caught | equivalent | missed |\n|---|---|---|---|---|");
    for file in files {
        let (all, caught, same, missed) = counts(&|it| it.mutant.file == file);
        println!("| `{file}` | {all} | {caught} | {same} | {missed} |");
    }
    let (all, caught, same, missed) = counts(&|_| true);
    println!("| all | {all} | {caught} | {same} | {missed} |\n");
    for it in outcomes.iter().filter(|it| it.caught.is_none()) {
        let kind = if is_equivalent(it) { "equivalent" } else { "missed" };
        println!("{kind} {} {} ({} tests come to it)", it.mutant.number, told(&it.mutant), it.reached_by);
    }
    let percent = (100 * caught).checked_div(caught + missed).unwrap_or(100);
    println!(
        "\n{caught} of {} mutants that are not equivalent were caught: {percent} %; {WANTED} are wanted",
        caught + missed
    );
    percent >= WANTED
}
