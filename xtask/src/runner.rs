//! Runs the steps one after the other, times them, and says at the end what passed,
//! what failed and what was skipped.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use crate::TestArgs;
use crate::plan::{self, Step};
use crate::shell::Shell;
use crate::tally::{Skip, Tally};
use crate::tools::{self, Need};
use crate::vm;

/// The whole run may take this long on two processors, from a clean checkout.
const LIMIT: Duration = Duration::from_secs(25 * 60);

/// Runs `cargo xtask test`. True when nothing failed.
pub(crate) fn test(args: &TestArgs) -> Result<bool> {
    let start = Instant::now();
    let steps = plan::chosen(&args.only)?;
    let mut shell = Shell::new(args.is_verbose())?;
    let allowed = AllowedSkips::read(&shell)?;
    let needs: Vec<Need> = steps.iter().flat_map(|step| step.needs.iter().chain(step.wants).copied()).collect();
    let missing = tools::provide(&shell, &needs, !args.no_install)?;
    fetch(&mut shell)?;

    let mut total = Tally::default();
    let mut left = &steps[..];
    while let [step, ..] = left {
        let is_pair = left.get(1).is_some_and(|next| step.beside == Some(next.name));
        let (together, rest) = left.split_at(if is_pair { 2 } else { 1 });
        let done = |step: &Step| {
            let begun = Instant::now();
            let tally = run_step(step, &shell, &missing);
            (tally, begun.elapsed())
        };
        std::thread::scope(|scope| -> Result<()> {
            let running: Vec<_> = together.iter().map(|step| (step.name, scope.spawn(|| done(step)))).collect();
            for (name, step) in running {
                print_start(name);
                let (tally, took) = step.join().map_err(|_| anyhow!("{name}: its thread panicked"))?;
                print_end(&tally, took);
                total.add(tally);
            }
            Ok(())
        })?;
        left = rest;
    }
    let is_whole = args.only.is_empty();
    if is_whole && start.elapsed() > LIMIT {
        // Said, and not failed: a machine that does other work beside it is slow and no worse.
        println!("\nthis took longer than the {} minutes that it should on 2 cores", LIMIT.as_secs() / 60);
    }
    if args.no_skips {
        forbid_skips(&mut total, &allowed);
    }
    print_summary(&total, start.elapsed());
    Ok(total.failures.is_empty())
}

/// Runs `cargo xtask vm`. True when nothing failed.
pub(crate) fn vm(names: &[String]) -> Result<bool> {
    let start = Instant::now();
    let shell = Shell::new(false)?;
    let missing = tools::provide(&shell, vm::NEEDS, true)?;
    if let Some(need) = missing.first() {
        bail!("{} is missing", need.name());
    }
    let tally = vm::some(&shell, names)?;
    tally.notes.iter().for_each(|note| println!("{note}"));
    tally.failures.iter().for_each(|failure| println!("failed: {failure}"));
    print_summary(&tally, start.elapsed());
    Ok(tally.failures.is_empty())
}

impl TestArgs {
    fn is_verbose(&self) -> bool {
        self.verbose
    }
}

/// One step, with everything that can go wrong turned into a count.
fn run_step(step: &Step, shell: &Shell, missing: &BTreeSet<Need>) -> Tally {
    if let Some(need) = step.needs.iter().find(|need| missing.contains(need)) {
        return Tally::skip(step.name, format!("{} is missing", need.name()));
    }
    match (step.run)(shell) {
        Ok(tally) => tally,
        Err(error) => Tally { failures: vec![format!("{}: {error:#}", step.name)], ..Tally::default() },
    }
}

/// Brings the dependencies, or finds out that they are here already.
fn fetch(shell: &mut Shell) -> Result<()> {
    if shell.cargo("fetch --locked").limit(Duration::from_secs(300)).run("fetch")?.is_ok() {
        return Ok(());
    }
    let online = fs::read_to_string(shell.own_target("logs").join("fetch.log"))?;
    shell.is_offline = true;
    if shell.cargo("fetch --locked").run("fetch-offline")?.is_ok() {
        println!("network: none; every dependency is on this machine already, going on without it");
        return Ok(());
    }
    bail!("cargo fetch --locked fails, and so does doing without a network:\n{online}")
}

fn print_start(name: &str) {
    use std::io::Write;
    print!("{name:<20}");
    // A terminal that cannot be written to shows in the next println.
    drop(std::io::stdout().flush());
}

fn print_end(tally: &Tally, took: Duration) {
    let verdict = if !tally.failures.is_empty() {
        "FAILED"
    } else if tally.passed == 0 && !tally.skips.is_empty() {
        "skipped"
    } else {
        "ok"
    };
    println!("{verdict:<8} {:>7.1} s   {}", took.as_secs_f64(), counts(tally));
    for note in &tally.notes {
        for line in note.lines() {
            println!("    {line}");
        }
    }
    for failure in &tally.failures {
        println!("    failed: {failure}");
    }
}

fn counts(tally: &Tally) -> String {
    format!("{} passed, {} failed, {} skipped", tally.passed, tally.failures.len(), tally.skips.len())
}

fn print_summary(total: &Tally, took: Duration) {
    println!("\n{} min {} s in all", took.as_secs() / 60, took.as_secs() % 60);
    if !total.skips.is_empty() {
        println!("\nskipped:");
        for Skip { name, reason } in &total.skips {
            println!("    {name}: {reason}");
        }
    }
    if !total.failures.is_empty() {
        println!("\nfailed:");
        for failure in &total.failures {
            println!("    {}", failure.lines().next().unwrap_or_default());
        }
    }
    println!("\n{}", counts(total));
}

/// The hardware that `.ci/skips-allowed` lets a run do without.
struct AllowedSkips(Vec<String>);

impl AllowedSkips {
    fn read(shell: &Shell) -> Result<Self> {
        let path = shell.root.join(".ci/skips-allowed");
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        Ok(Self(lines.filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()))
    }

    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|pattern| match pattern.strip_suffix('*') {
            Some(prefix) => name.starts_with(prefix),
            None => name == pattern,
        })
    }
}

/// With `--no-skips`, a skip that is not allowed is a failure.
fn forbid_skips(total: &mut Tally, allowed: &AllowedSkips) {
    let (kept, forbidden): (Vec<_>, Vec<_>) = total.skips.drain(..).partition(|skip| allowed.has(&skip.name));
    total.skips = kept;
    total.failures.extend(
        forbidden.into_iter().map(|s| format!("skipped, and that is not allowed here: {}: {}", s.name, s.reason)),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skip_that_is_not_named_becomes_a_failure() {
        let allowed = AllowedSkips(vec!["tests/numa*".to_owned(), "hugetlb".to_owned()]);
        let mut total = Tally::skip("tests/numa::two_nodes", "one node");
        total.add(Tally::skip("hugetlb", "none reserved"));
        total.add(Tally::skip("hugetlb2", "none reserved"));
        forbid_skips(&mut total, &allowed);
        assert_eq!(total.skips.len(), 2);
        assert_eq!(total.failures, ["skipped, and that is not allowed here: hugetlb2: none reserved"]);
    }
}
