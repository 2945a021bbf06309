//! A copy of the tree with all mutants of the sample in it, each behind a switch, and the tests built from that.
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::PACKAGES;
use crate::find::{FEATURES, Mutant};

/// What stands behind the switches, for core's `lib.rs`.
const SWITCH: &str = include_str!("../switch.rs");

/// The kind of the examples in the documentation.
pub(crate) const DOC: &str = "doc";

/// A program with tests.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) package: String,
    /// `lib`, `test`, or [`DOC`] for the examples in the documentation, all of which are one test.
    pub(crate) kind: String,
    pub(crate) path: PathBuf,
    /// The package's folder, in which its tests start.
    pub(crate) folder: PathBuf,
}

/// Where each mutant of a file stands in the copy.
type Places = BTreeMap<String, Vec<(u32, Range<usize>)>>;

/// Copies the tree and builds its tests with all of `sample`, but for what does not compile: that is taken out of it.
pub(crate) fn build(root: &Path, work: &Path, sample: &mut Vec<Mutant>) -> Vec<Program> {
    // What did not compile the last time: to try it again would have cargo build everything twice.
    let known = work.join("refused");
    let mut refused_before = fs::read_to_string(&known).unwrap_or_default();
    let line = |mutant: &Mutant| format!("{} {}\n", mutant.key().0, mutant.source);
    sample.retain(|mutant| !refused_before.contains(&line(mutant)));
    loop {
        let places = copy(root, &work.join("tree"), sample);
        let refused = match cargo(work, &["check"]) {
            Ok(_) => match cargo(work, &["test", "--no-run", "--lib", "--tests"]) {
                Ok(messages) => {
                    let (package, kind) = ("pagemill".to_owned(), DOC.to_owned());
                    let doc = Program { package, kind, path: PathBuf::new(), folder: work.to_owned() };
                    return messages.iter().filter_map(program).chain([doc]).collect();
                }
                Err(messages) => messages,
            },
            Err(messages) => messages,
        };
        let out = to_drop(&refused, &places);
        let text: String = refused.iter().filter_map(|message| message["message"]["rendered"].as_str()).collect();
        assert!(!out.is_empty(), "the copy does not build, and no mutant is at fault:\n{text}");
        println!("{} of {} mutants do not compile", out.len(), sample.len());
        sample.iter().filter(|mutant| out.contains(&mutant.number)).for_each(|it| refused_before += &line(it));
        fs::write(&known, &refused_before).expect("a file can be written");
        sample.retain(|mutant| !out.contains(&mutant.number));
    }
}

/// Writes the copy. What stays as it was is left alone, so that cargo builds no more than it must.
fn copy(root: &Path, tree: &Path, sample: &[Mutant]) -> Places {
    let files = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .expect("git lists the project's files");
    let files = String::from_utf8(files.stdout).expect("names of files are UTF-8");
    let mut places = Places::new();
    for name in files.split_terminator('\0') {
        let Ok(mut content) = fs::read(root.join(name)) else { continue };
        let mut mutants: Vec<_> = sample.iter().filter(|mutant| mutant.file == name).collect();
        mutants.sort_by_key(|mutant| (mutant.range.start, usize::MAX - mutant.range.end));
        if !mutants.is_empty() {
            let text = String::from_utf8(content).expect("sources are UTF-8");
            let (mut out, mut at) = (String::new(), Vec::new());
            switch(&text, 0..text.len(), &mutants, &mut out, &mut at);
            places.insert(name.to_owned(), at);
            content = out.into_bytes();
        }
        if let Some(package) = PACKAGES.iter().find(|package| name == format!("crates/{package}/src/lib.rs")) {
            let text = String::from_utf8(content).expect("sources are UTF-8");
            let more = if *package == PACKAGES[0] { SWITCH } else { "\npub(crate) use pagemill_core::mutant;\n" };
            content = (text.replace("#![forbid(unsafe_code)]", "") + more).into_bytes();
        }
        let to = tree.join(name);
        if fs::read(&to).is_ok_and(|there| there == content) {
            continue;
        }
        fs::create_dir_all(to.parent().expect("a file is in a folder")).expect("the copy's folders can be made");
        fs::write(&to, content).expect("the copy can be written");
    }
    places
}

/// Writes `range` of a text with these mutants in it, outer ones first, and where they came to stand.
fn switch(
    text: &str,
    range: Range<usize>,
    mut mutants: &[&Mutant],
    out: &mut String,
    at: &mut Vec<(u32, Range<usize>)>,
) {
    let mut done = range.start;
    while let [outer, rest @ ..] = mutants {
        let (inner, behind) = rest.split_at(rest.partition_point(|mutant| mutant.range.start < outer.range.end));
        out.push_str(&text[done..outer.range.start]);
        let begin = out.len();
        let is_on = format!("crate::mutant({})", outer.number);
        let end = match &outer.mutated {
            Some(mutated) => {
                *out += &format!("(if {is_on} {{ {mutated} }} else {{ ");
                " })"
            }
            None => {
                *out += &format!("if !{is_on} {{ ");
                " }"
            }
        };
        switch(text, outer.range.clone(), inner, out, at);
        *out += end;
        at.push((outer.number, begin..out.len()));
        (done, mutants) = (outer.range.end, behind);
    }
    out.push_str(&text[done..range.end]);
}

/// The mutants that errors of the compiler point at: the innermost around each place, or the one nearest to it.
fn to_drop(messages: &[Value], places: &Places) -> BTreeSet<u32> {
    let errors = messages.iter().filter(|message| message["message"]["level"] == "error");
    let mut out = BTreeSet::new();
    for error in errors {
        let spans = error["message"]["spans"].as_array().into_iter().flatten();
        let distances = spans.filter_map(|span| {
            let at = span["byte_start"].as_u64()? as usize;
            let of = |(number, place): &(u32, Range<usize>)| {
                let away = place.start.saturating_sub(at).max(at.saturating_sub(place.end));
                ((away, place.len()), *number)
            };
            places.get(span["file_name"].as_str()?)?.iter().map(of).min()
        });
        out.extend(distances.min().map(|(_, number)| number));
    }
    out
}

/// Runs cargo in the copy: its messages, and whether all went well.
fn cargo(work: &Path, task: &[&str]) -> Result<Vec<Value>, Vec<Value>> {
    let mut cargo = command(work, task);
    cargo.args(["--message-format", "json"]).stdin(Stdio::null()).stderr(Stdio::inherit());
    let ran = cargo.output().expect("cargo runs");
    let text = String::from_utf8_lossy(&ran.stdout);
    let messages = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    if ran.status.success() { Ok(messages) } else { Err(messages) }
}

/// Cargo in the copy, on the library, in the profile of the checks.
pub(crate) fn command(work: &Path, task: &[&str]) -> Command {
    let mut cargo = Command::new("cargo");
    cargo.args(task).args(["--locked", "--release"]).current_dir(work.join("tree"));
    for package in PACKAGES {
        let profile = format!("profile.release.package.{package}");
        cargo.args(["-p", package, "--config", &format!("{profile}.opt-level=1")]);
        cargo.args(["--config", &format!("{profile}.codegen-units=4")]);
    }
    cargo.arg("--features").arg(FEATURES.map(|feature| format!("pagemill/{feature}")).join(","));
    cargo.env("CARGO_TARGET_DIR", work.join("target")).env("CARGO_TERM_COLOR", "never");
    cargo.env("CARGO_PROFILE_RELEASE_DEBUG", "none").env("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "true");
    cargo.env("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "true");
    cargo
}

/// The program with tests that a message of cargo's tells of, if it does.
fn program(message: &Value) -> Option<Program> {
    if message["profile"]["test"] != true {
        return None;
    }
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
    Some(Program {
        package: folder.file_name()?.to_str()?.to_owned(),
        kind: message["target"]["kind"][0].as_str()?.to_owned(),
        path: message["executable"].as_str()?.into(),
        folder,
    })
}
