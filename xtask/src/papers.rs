//! What the documents and manifests claim, held against the tree.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;
use spdx::{Expression, Licensee, ParseMode};

use crate::builds::MUTANTS;
use crate::floors;
use crate::shell::Shell;
use crate::tally::Tally;

/// Who may know whom, each crate of the workspace by name. A crate that is missing
/// here fails the check, so a new one is placed on purpose.
const MAY_KNOW: &[(&str, &[&str])] = &[
    ("pagemill-core", &[]),
    ("pagemill-os", &["pagemill-core"]),
    ("pagemill", &["pagemill-core", "pagemill-os"]),
    ("pagemill-watch", &["pagemill"]),
    ("pagemill-bench", &["pagemill", "pagemill-crypt"]),
    ("pagemill-model", &["pagemill"]),
    ("pagemill-crypt", &["pagemill"]),
    ("pagemill-nvme", &["pagemill"]),
    (
        "pagemill-cli",
        &["pagemill", "pagemill-bench", "pagemill-crypt", "pagemill-model", "pagemill-nvme", "pagemill-watch"],
    ),
    ("pagemill-checks", &["pagemill"]),
    ("xtask", &[]),
];

/// Who may know whom in tests besides.
const TESTS_MAY_KNOW: &[(&str, &str)] = &[("pagemill", "pagemill-model")];

pub(crate) fn layers(shell: &Shell) -> Result<Tally> {
    let packages = workspace(shell)?;
    let members: BTreeSet<_> = packages.iter().map(|package| name_of(package).to_owned()).collect();
    let mut problems = Vec::new();
    let mut edges = 0;
    for package in &packages {
        let name = name_of(package);
        let Some((_, allowed)) = MAY_KNOW.iter().find(|(known, _)| *known == name) else {
            problems.push(format!("{name}: its place is not known; add it to MAY_KNOW in xtask/src/papers.rs"));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let other = name_of(dependency);
            if !members.contains(other) {
                continue;
            }
            edges += 1;
            let is_for_tests = dependency["kind"] == "dev" && TESTS_MAY_KNOW.contains(&(name, other));
            if !allowed.contains(&other) && !is_for_tests {
                problems.push(format!("{name} may not know {other}"));
            }
        }
    }
    let (upward, note) = floors::check(shell)?;
    problems.extend(upward);
    Ok(Tally::from_problems(problems, format!("{} crates, {edges} edges; {note}", members.len())))
}

/// A file of the project must not name the checkout, its neighbours or the home
/// directory of the machine that it was written on, nor anybody's home.
pub(crate) fn machine_paths(shell: &Shell) -> Result<Tally> {
    let mut places: Vec<String> = ["/home", "/Users"].map(|place| format!("{place}/")).into();
    let temporary = std::env::temp_dir();
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let parent = shell.root.parent().map(Path::to_owned);
    for place in [Some(shell.root.clone()), parent, home].into_iter().flatten() {
        if place != Path::new("/") && place != temporary {
            places.push(place.to_string_lossy().into_owned());
        }
    }
    let mut problems = Vec::new();
    let files = project_files(shell)?;
    for path in &files {
        // What is not text names no path.
        let Ok(text) = fs::read_to_string(shell.root.join(path)) else { continue };
        for (number, line) in text.lines().enumerate() {
            // This list and the licence texts hold no path of a machine.
            let own = path == Path::new("xtask/src/papers.rs") && line.contains("\"/home\"");
            if let Some(place) = places.iter().find(|place| !own && names_path(line, place)) {
                problems.push(format!("{}:{}: names {place}", path.display(), number + 1));
            }
        }
    }
    Ok(Tally::from_problems(problems, format!("{} files", files.len())))
}

/// Whether `line` holds `path` as a whole path or the beginning of one.
fn names_path(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + path.len()..].chars().next();
        let is_inside = before.is_some_and(|c| c.is_alphanumeric() || matches!(c, '.' | '/' | '_' | '-' | '$' | '}'));
        let goes_on = after.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '-') && !path.ends_with('/');
        !is_inside && !goes_on
    })
}

/// Relative links in the documents must lead to something.
pub(crate) fn links(shell: &Shell) -> Result<Tally> {
    let mut problems = Vec::new();
    let mut followed = 0;
    for path in project_files(shell)?.into_iter().filter(|path| path.extension().is_some_and(|end| end == "md")) {
        let text = fs::read_to_string(shell.root.join(&path))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = target.split('#').next().unwrap_or_default();
            if file.is_empty() || file.contains("://") || file.contains(char::is_whitespace) {
                continue;
            }
            followed += 1;
            if !shell.root.join(folder).join(file).exists() {
                problems.push(format!("{}: {target} leads nowhere", path.display()));
            }
        }
    }
    Ok(Tally::from_problems(problems, format!("{followed} links")))
}

pub(crate) fn licences(shell: &Shell) -> Result<Tally> {
    let deny = fs::read_to_string(shell.root.join("deny.toml"))?;
    let deny: toml::Table = deny.parse().context("deny.toml")?;
    let allowed_licences = strings(&deny, "licenses", "allow")?;
    let allowed_licences: Vec<_> = allowed_licences.iter().map(|it| Licensee::parse(it)).collect::<Result<_, _>>()?;
    let allowed_sources = strings(&deny, "sources", "allow-registry")?;
    let packages = all_packages(shell)?;
    let mut problems = Vec::new();
    for package in &packages {
        let name = format!("{} {}", name_of(package), package["version"].as_str().unwrap_or_default());
        let licence = package["license"].as_str().unwrap_or("none named");
        if !is_allowed(licence, &allowed_licences) {
            problems.push(format!("{name}: licence {licence:?} is not one that deny.toml allows"));
        }
        // A crate of this workspace has no source.
        if let Some(source) = package["source"].as_str() {
            let url = source.trim_start_matches("registry+");
            if !allowed_sources.iter().any(|allowed| allowed == url) {
                problems.push(format!("{name}: comes from {source}"));
            }
        }
    }
    let mut note = format!("{} packages", packages.len());
    let deny = shell.cargo("deny check advisories bans").run("cargo-deny")?;
    if deny.is_ok() {
        note.push_str(", advisories too (cargo deny)");
    } else if deny.text.contains("no such command") {
        note.push_str("; advisories are checked where cargo-deny is installed, which it is not here");
    } else {
        problems.push(format!("cargo deny check: {}\n{}", deny.how_it_ended(), deny.last_lines(20)));
    }
    Ok(Tally::from_problems(problems, note))
}

/// Whether these licences satisfy a licence expression. The old way to write OR, a slash, is read too.
fn is_allowed(expression: &str, allowed: &[Licensee]) -> bool {
    let expression = Expression::parse_mode(expression, ParseMode::LAX);
    expression.is_ok_and(|it| it.evaluate(|wanted| allowed.iter().any(|licence| licence.satisfies(wanted))))
}

fn strings(table: &toml::Table, section: &str, key: &str) -> Result<Vec<String>> {
    let array = table.get(section).and_then(|s| s.get(key)).and_then(toml::Value::as_array);
    let array = array.with_context(|| format!("deny.toml: no {section}.{key}"))?;
    Ok(array.iter().filter_map(toml::Value::as_str).map(str::to_owned).collect())
}

/// Each direct dependency stands in a row of docs/dependencies.md, and each row is one.
pub(crate) fn dependencies(shell: &Shell) -> Result<Tally> {
    let path = "docs/dependencies.md";
    let text = fs::read_to_string(shell.root.join(path)).context(path)?;
    let mut users: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut packages = workspace(shell)?;
    packages.extend(manifests(shell, "--manifest-path fuzz/Cargo.toml")?);
    packages.extend(manifests(shell, "--manifest-path tests/no-os/Cargo.toml")?);
    packages.extend(manifests(shell, &format!("--manifest-path {MUTANTS}"))?);
    let members: BTreeSet<_> = packages.iter().map(name_of).collect();
    for package in &packages {
        for dependency in dependencies_of(package).filter(|name| !members.contains(name)) {
            users.entry(dependency.to_owned()).or_default().push(name_of(package).to_owned());
        }
    }
    let all = all_packages(shell)?;
    let rows: BTreeMap<&str, &str> = text
        .lines()
        .filter_map(row)
        .flat_map(|(names, licence)| names_in_cell(names).map(move |name| (name, licence)))
        .collect();
    let mut problems = Vec::new();
    for (dependency, users) in users.iter().filter(|(name, _)| !rows.contains_key(name.as_str())) {
        problems.push(format!("{path} has no row for {dependency}, which {} uses", users.join(", ")));
    }
    for (row, licence) in rows {
        if !users.contains_key(row) {
            problems.push(format!("{path} has a row for {row}, which nothing uses"));
        }
        let mut licences = all.iter().filter(|package| name_of(package) == row).filter_map(|p| p["license"].as_str());
        if licences.all(|real| real != licence) {
            problems.push(format!("{path} says that the licence of {row} is {licence:?}, which its manifest does not"));
        }
    }
    Ok(Tally::from_problems(problems, format!("{} direct dependencies", users.len())))
}

/// The first and the last cell of a table's row.
fn row(line: &str) -> Option<(&str, &str)> {
    let (first, rest) = line.trim().strip_prefix('|')?.strip_suffix('|')?.split_once('|')?;
    Some((first.trim(), rest.rsplit('|').next()?.trim()))
}

/// The names that a cell holds in backquotes.
fn names_in_cell(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// The workspace's packages, each with its folder relative to the root.
pub(crate) fn folders(shell: &Shell) -> Result<BTreeMap<String, String>> {
    let folder = |package: &Value| -> Option<String> {
        let folder = Path::new(package["manifest_path"].as_str()?).parent()?;
        Some(folder.strip_prefix(&shell.root).ok()?.display().to_string())
    };
    Ok(workspace(shell)?.iter().filter_map(|package| Some((name_of(package).to_owned(), folder(package)?))).collect())
}

/// Every package that anything here is built from.
fn all_packages(shell: &Shell) -> Result<Vec<Value>> {
    let mut all = metadata(shell, "--locked --all-features")?;
    all.extend(metadata(shell, "--locked --manifest-path fuzz/Cargo.toml")?);
    all.extend(metadata(shell, &format!("--locked --manifest-path {MUTANTS}"))?);
    Ok(all)
}

/// The packages of the workspace.
fn workspace(shell: &Shell) -> Result<Vec<Value>> {
    manifests(shell, "")
}

/// The packages of the workspace that a manifest belongs to.
fn manifests(shell: &Shell, which: &str) -> Result<Vec<Value>> {
    metadata(shell, &format!("--locked --no-deps {which}"))
}

/// The packages that `cargo metadata` lists.
fn metadata(shell: &Shell, args: &str) -> Result<Vec<Value>> {
    let ran = shell.cargo(&format!("metadata --format-version 1 {args}")).run("metadata")?.expect_ok()?;
    Ok(parse_metadata(&ran.text)?["packages"].as_array().context("cargo metadata: no packages")?.clone())
}

/// The object that `cargo metadata` prints, whatever warning stands before it.
fn parse_metadata(text: &str) -> Result<Value> {
    let line = text.lines().find(|line| line.starts_with('{')).context("cargo metadata printed no object")?;
    Ok(serde_json::from_str(line)?)
}

fn name_of(package: &Value) -> &str {
    package["name"].as_str().unwrap_or_default()
}

/// Every dependency of a package, of each kind, for each target.
fn dependencies_of(package: &Value) -> impl Iterator<Item = &str> {
    package["dependencies"].as_array().into_iter().flatten().filter_map(|dependency| dependency["name"].as_str())
}

/// The files that git knows, and new ones that it does not ignore.
pub(crate) fn project_files(shell: &Shell) -> Result<Vec<PathBuf>> {
    let mut git = shell.command("git");
    git.args(["ls-files", "--cached", "--others", "--exclude-standard"]);
    let ran = git.run("git-ls-files")?.expect_ok()?;
    Ok(ran.text.lines().map(PathBuf::from).filter(|path| shell.root.join(path).is_file()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_licence_needs_one_side_of_or_and_both_of_and() {
        let allowed = ["MIT", "Zlib"].map(|licence| Licensee::parse(licence).unwrap());
        let is_allowed = |expression| is_allowed(expression, &allowed);
        assert!(is_allowed("MIT"));
        assert!(is_allowed("GPL-3.0 OR MIT"));
        assert!(is_allowed("MIT/Apache-2.0"));
        assert!(is_allowed("(GPL-3.0 OR MIT) AND Zlib"));
        assert!(!is_allowed("MIT AND GPL-3.0"));
        assert!(!is_allowed("(MIT OR Zlib) AND GPL-3.0"));
        assert!(!is_allowed("none named"));
    }

    #[test]
    fn a_path_is_found_whole_and_not_inside_another() {
        assert!(names_path("see /srv/build/x.md", "/srv/build"));
        assert!(names_path("`/srv/build`", "/srv/build"));
        assert!(!names_path("see /srv/builder", "/srv/build"));
        assert!(!names_path("see a/srv/build", "/srv/build"));
        assert!(!names_path("$HOME/srv/build", "/srv/build"));
    }

    #[test]
    fn a_row_names_its_crates_in_backquotes() {
        let (first, last) = row("| `clap`, `serde` | need | MIT |").unwrap();
        assert_eq!(names_in_cell(first).collect::<Vec<_>>(), ["clap", "serde"]);
        assert_eq!(last, "MIT");
        assert_eq!(row("no row"), None);
    }
}
