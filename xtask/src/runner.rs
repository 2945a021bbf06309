//! Runs the steps one after the other, times them, and reports at the end what passed, failed and was skipped.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use crate::TestArgs;
use crate::plan::{self, Step, Tier};
use crate::progress::minutes;
use crate::shell::Shell;
use crate::tally::{Skip, Tally};
use crate::tools::{self, Need};
use crate::{vm, watch};

/// The processor time that all steps of `test --all` may use together. Other work on the machine does not count, its speed does:
/// the same checks used 56 minutes on one machine and 84 on another.
const MAY_USE: Duration = Duration::from_secs(120 * 60);

/// The name of a failure of all steps together.
const BUDGET: &str = "budget";

/// The outcome of one step, and its cost.
struct Done {
    step: &'static Step,
    tally: Tally,
    took: Duration,
    /// Processor time. Of two steps that ran together, the first has all of it.
    used: Duration,
}

/// Runs the steps of a tier. True when nothing failed.
pub(crate) fn test(tier: Tier, args: &TestArgs) -> Result<bool> {
    let start = Instant::now();
    let steps = plan::chosen(tier, &args.only)?;
    let mut shell = Shell::new(args.verbose)?;
    shell.filter.clone_from(&args.filter);
    shell.is_quick = tier == Tier::Quick;
    shell.is_all = tier >= Tier::All || !args.only.is_empty();
    let allowed = AllowedSkips::read(&shell)?;
    let needs: Vec<_> = steps.iter().flat_map(|step| step.needs_and_wants()).collect();
    let missing = tools::provide(&shell, &needs, !args.no_install)?;
    fetch(&mut shell)?;
    let brought = watch::of_children();

    let mut done: Vec<Done> = Vec::new();
    let mut left = &steps[..];
    while let [step, ..] = left {
        if watch::is_interrupted() {
            println!("interrupted before the step {}", step.name);
            break;
        }
        let is_pair = left.get(1).is_some_and(|next| step.beside == Some(next.name));
        let (together, rest) = left.split_at(if is_pair { 2 } else { 1 });
        done.extend(run(together, &shell, &missing, args.no_skips.then_some(&allowed))?);
        left = rest;
    }
    let used = watch::of_children().saturating_sub(brought);
    if tier == Tier::All && args.only.is_empty() && used > MAY_USE {
        let last = done.last_mut().context("there is a step")?;
        last.tally.fail(BUDGET, format!("all steps used {}, {} are allowed", minutes(used), minutes(MAY_USE)));
    }
    Ok(print_summary(&done, start.elapsed(), used, tier, args))
}

/// Runs one step, or two at the same time. Given `allowed`, any other skip is a failure.
fn run(
    together: &[&'static Step],
    shell: &Shell,
    missing: &[Need],
    allowed: Option<&AllowedSkips>,
) -> Result<Vec<Done>> {
    let before = watch::of_children();
    let mut done = std::thread::scope(|scope| -> Result<Vec<Done>> {
        let mut running = Vec::new();
        for &step in together {
            let log = shell.log(&format!("{}*", step.logs));
            let log = log.strip_prefix(&shell.root).unwrap_or(&log).display().to_string();
            shell.progress.begin(step.name, Duration::from_secs(step.about_s), &log);
            running.push(scope.spawn(move || {
                let begun = Instant::now();
                let tally = run_step(step, shell, missing);
                Done { step, tally, took: begun.elapsed(), used: Duration::ZERO }
            }));
        }
        let joined = running.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a step's thread panicked")));
        joined.collect()
    })?;
    done[0].used = watch::of_children().saturating_sub(before);
    for done in &mut done {
        if let Some(allowed) = allowed {
            forbid_skips(done.step.name, &mut done.tally, allowed);
        }
        shell.progress.end(done.step.name, &report(done));
    }
    Ok(done)
}

/// Runs `cargo xtask vm`. True when nothing failed.
pub(crate) fn vm(names: &[String]) -> Result<bool> {
    let mut shell = Shell::new(false)?;
    shell.is_telling = true;
    let missing = tools::provide(&shell, &vm::needs(&shell, names)?, true)?;
    if let Some(need) = missing.first() {
        bail!("{} is missing", need.name());
    }
    let tally = vm::some(&shell, names)?;
    tally.notes.iter().for_each(|note| println!("{note}"));
    tally.failures.iter().for_each(|failure| println!("failed: {}: {}", failure.name, failure.why));
    println!("\n{}", counts(&tally));
    Ok(tally.failures.is_empty())
}

/// Runs one step. An error becomes a failure.
fn run_step(step: &Step, shell: &Shell, missing: &[Need]) -> Tally {
    if let Some(need) = step.needs.iter().find(|need| missing.contains(need)) {
        return Tally::skip(step.name, format!("{} is missing", need.name()));
    }
    let mut tally = (step.run)(shell).unwrap_or_else(|error| Tally::failure("", format!("{error:#}")));
    for failure in tally.failures.iter_mut().filter(|failure| failure.name.is_empty()) {
        step.name.clone_into(&mut failure.name);
    }
    tally
}

/// Fetches the dependencies. Without a network, goes on if the machine has them all.
fn fetch(shell: &mut Shell) -> Result<()> {
    if shell.cargo("fetch --locked").run("fetch")?.is_ok() {
        return Ok(());
    }
    let online = fs::read_to_string(shell.log("fetch"))?;
    shell.is_offline = true;
    if shell.cargo("fetch --locked").run("fetch-offline")?.is_ok() {
        println!("network: none; every dependency is on this machine already, going on without it");
        return Ok(());
    }
    bail!("cargo fetch --locked fails, and so does doing without a network:\n{online}")
}

/// The lines that report a step that has ended.
fn report(done: &Done) -> String {
    let Done { step, tally, took, used } = done;
    let verdict = if !tally.failures.is_empty() {
        "FAILED"
    } else if tally.passed == 0 && !tally.skips.is_empty() {
        "skipped"
    } else {
        "ok"
    };
    let (took, used) = (took.as_secs_f64(), used.as_secs_f64() / 60.0);
    let mut text = format!("{:<20} {verdict:<8} {took:>6.1} s {used:>5.1} min cpu  {}", step.name, counts(tally));
    for note in &tally.notes {
        for line in note.lines() {
            // Writing to a string cannot fail.
            let _ = write!(text, "\n    {line}");
        }
    }
    for failure in &tally.failures {
        let _ = write!(text, "\n    failed: {}: {}", failure.name, failure.why);
    }
    text
}

fn counts(tally: &Tally) -> String {
    format!("{} passed, {} failed, {} skipped", tally.passed, tally.failures.len(), tally.skips.len())
}

/// Prints what was skipped, what failed and how to run that alone. True when nothing failed.
fn print_summary(done: &[Done], took: Duration, used: Duration, tier: Tier, args: &TestArgs) -> bool {
    let mut total = Tally::default();
    done.iter().for_each(|done| total.add(done.tally.clone()));
    println!("\n{} in all, {} of processor time", minutes(took), minutes(used));
    // A test that several steps skip counts once.
    let skips: BTreeMap<_, _> = total.skips.iter().map(|Skip { name, reason }| (name, reason)).collect();
    if !skips.is_empty() {
        println!("\nskipped:");
        skips.iter().for_each(|(name, reason)| println!("    {name}: {reason}"));
    }
    if !total.failures.is_empty() {
        println!("\nfailed, and how to run it alone:");
        for Done { step, tally, .. } in done {
            for failure in &tally.failures {
                println!("    {}", failure.name);
                println!("        {}", again(step, &failure.name, tier, args));
            }
        }
    }
    println!("\n{} passed, {} failed, {} skipped", total.passed, total.failures.len(), skips.len());
    let has_run = total.passed + total.failures.len() + skips.len() > 0;
    if !has_run {
        println!("no step had anything to run{}", if args.filter.is_some() { ": no test has such a name" } else { "" });
    }
    total.failures.is_empty() && has_run && !watch::is_interrupted()
}

/// The command that runs only what failed.
fn again(step: &Step, failed: &str, tier: Tier, args: &TestArgs) -> String {
    let task = match tier {
        Tier::Quick => "quick",
        Tier::Long => "long",
        Tier::Test | Tier::All => "test",
    };
    let no_skips = if args.no_skips { " --no-skips" } else { "" };
    if failed == BUDGET {
        return format!("cargo xtask {task} --all");
    }
    if let Some(script) = failed.strip_prefix(vm::SCRIPT) {
        let script = script.split_once(':').map_or(script, |(script, _check)| script);
        return format!("cargo xtask vm {script}");
    }
    // step/package/test, or step/test where cargo runs the test.
    let test = failed.strip_prefix(step.name).and_then(|rest| rest.strip_prefix('/'));
    let test =
        test.map(|rest| if rest.contains("::") { rest.split_once('/').map_or(rest, |(_, test)| test) } else { rest });
    let filter = test.map(|test| format!(" --filter '{test}'")).unwrap_or_default();
    format!("cargo xtask {task}{no_skips} --only {}{filter}", step.name)
}

/// The skips that `.ci/skips-allowed` names: tests of hardware that the machine may lack.
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

/// Turns each skip that is not allowed into a failure.
fn forbid_skips(step: &str, total: &mut Tally, allowed: &AllowedSkips) {
    let (kept, forbidden): (Vec<_>, Vec<_>) = total.skips.drain(..).partition(|skip| allowed.has(&skip.name));
    total.skips = kept;
    for Skip { name, reason } in forbidden {
        let name = if name.contains('/') { format!("{step}/{name}") } else { name };
        total.fail(name, format!("skipped, and that is not allowed here: {reason}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_repeated_by_its_step_and_test_name() {
        let step = plan::STEPS.iter().find(|step| step.name == "asan").unwrap();
        let args = TestArgs::default();
        let of = |failed| again(step, failed, Tier::All, &args);
        assert_eq!(of("asan/pagemill/forms::a_list"), "cargo xtask test --only asan --filter 'forms::a_list'");
        assert_eq!(of("asan/loom_buddy::two"), "cargo xtask test --only asan --filter 'loom_buddy::two'", "no package");
        assert_eq!(of("asan"), "cargo xtask test --only asan");
        assert_eq!(of("budget"), "cargo xtask test --all");
        assert_eq!(of("script nvme"), "cargo xtask vm nvme");
        assert_eq!(of("script nfs: nfs/fsx"), "cargo xtask vm nfs");
    }

    #[test]
    fn a_skip_that_is_not_allowed_is_a_failure() {
        let allowed = AllowedSkips(vec!["tests/numa*".to_owned(), "hugetlb".to_owned()]);
        let mut total = Tally::skip("tests/numa::two_nodes", "one node");
        total.add(Tally::skip("hugetlb", "none reserved"));
        total.add(Tally::skip("hugetlb2", "none reserved"));
        forbid_skips("tests", &mut total, &allowed);
        assert_eq!(total.skips.len(), 2);
        assert_eq!(total.failures.len(), 1);
        assert_eq!(total.failures[0].name, "hugetlb2");
        assert!(total.failures[0].why.contains("none reserved"));
    }
}
