//! Compares the claims of the documents and manifests with the tree.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;
use spdx::{Expression, Licensee, ParseMode};

use crate::builds::MUTANTS;
use crate::floors;
use crate::shell::Shell;
use crate::tally::Tally;

/// The crates of the workspace, each with those that it may depend on. A crate that is missing here fails the check, so that
/// somebody decides on the place of a new one.
const MAY_KNOW: &[(&str, &[&str])] = &[
    ("pagemill-core", &[]),
    ("pagemill-os", &["pagemill-core"]),
    ("pagemill", &["pagemill-core", "pagemill-os"]),
    ("pagemill-watch", &["pagemill"]),
    ("pagemill-capi", &["pagemill"]),
    ("pagemill-linux", &["pagemill-capi"]),
    ("pagemill-command", &[]),
    ("pagemill-harness", &[]),
    ("pagemill-bench", &["pagemill", "pagemill-harness"]),
    ("pagemill-model", &["pagemill"]),
    ("pagemill-crypt", &["pagemill", "pagemill-command", "pagemill-watch"]),
    ("pagemill-crypt-bench", &["pagemill", "pagemill-crypt", "pagemill-harness"]),
    ("pagemill-nfs", &["pagemill", "pagemill-command", "pagemill-watch"]),
    ("pagemill-nfs-bench", &["pagemill", "pagemill-harness", "pagemill-nfs"]),
    ("pagemill-nvme", &["pagemill", "pagemill-command"]),
    ("pagemill-xdp", &["pagemill", "pagemill-command", "pagemill-watch"]),
    ("pagemill-xdp-bench", &["pagemill-harness", "pagemill-xdp"]),
    (
        "pagemill-cli",
        &[
            "pagemill",
            "pagemill-bench",
            "pagemill-command",
            "pagemill-crypt",
            "pagemill-crypt-bench",
            "pagemill-model",
            "pagemill-nfs",
            "pagemill-nfs-bench",
            "pagemill-nvme",
            "pagemill-watch",
            "pagemill-xdp",
            "pagemill-xdp-bench",
        ],
    ),
    ("pagemill-checks", &["pagemill"]),
    ("xtask", &[]),
];

/// What a crate's tests may depend on besides.
const TESTS_MAY_KNOW: &[(&str, &str)] = &[("pagemill", "pagemill-model")];

pub(crate) fn layers(shell: &Shell) -> Result<Tally> {
    let packages = workspace(shell)?;
    let members: BTreeSet<_> = packages.iter().map(|package| package.name.as_str()).collect();
    let mut problems = Vec::new();
    let mut edges = 0;
    for Package { name, dependencies, .. } in &packages {
        let Some((_, allowed)) = MAY_KNOW.iter().find(|(known, _)| known == name) else {
            problems.push(format!("{name}: its place is not known; add it to MAY_KNOW in xtask/src/papers.rs"));
            continue;
        };
        for Dependency { name: other, kind } in dependencies.iter().filter(|it| members.contains(it.name.as_str())) {
            edges += 1;
            let is_for_tests = kind.as_deref() == Some("dev") && TESTS_MAY_KNOW.contains(&(name, other));
            if !allowed.contains(&other.as_str()) && !is_for_tests {
                problems.push(format!("{name} may not know {other}"));
            }
        }
    }
    let (upward, note) = floors::check(shell)?;
    problems.extend(upward);
    Ok(Tally::from_problems(problems, format!("{} crates, {edges} edges; {note}", members.len())))
}

/// A file of the project must not name a place on the machine that it was written on: the checkout, the folder around it, or a
/// home directory.
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
        // A file that is no text names no path.
        let Ok(text) = fs::read_to_string(shell.root.join(path)) else { continue };
        for (number, line) in text.lines().enumerate() {
            // The list above is no path of a machine.
            let own = path == Path::new("xtask/src/papers.rs") && line.contains("\"/home\"");
            if let Some(place) = places.iter().find(|place| !own && names_path(line, place)) {
                problems.push(format!("{}:{}: names {place}", path.display(), number + 1));
            }
        }
    }
    Ok(Tally::from_problems(problems, format!("{} files", files.len())))
}

/// Whether `line` contains `path`, whole or as the beginning of a longer path.
fn names_path(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + path.len()..].chars().next();
        let is_inside = before.is_some_and(|c| c.is_alphanumeric() || matches!(c, '.' | '/' | '_' | '-' | '$' | '}'));
        let goes_on = after.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '-') && !path.ends_with('/');
        !is_inside && !goes_on
    })
}

/// Relative links in the documents must lead to a file.
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
    let allowed_licences: Vec<String> = deny["licenses"]["allow"].clone().try_into().context("licenses.allow")?;
    let allowed_licences: Vec<_> = allowed_licences.iter().map(|it| Licensee::parse(it)).collect::<Result<_, _>>()?;
    let allowed_sources: Vec<String> = deny["sources"]["allow-registry"].clone().try_into().context("sources")?;
    let packages = all_packages(shell)?;
    let mut problems = Vec::new();
    for package in &packages {
        let name = format!("{} {}", package.name, package.version);
        let licence = package.license.as_deref().unwrap_or("none named");
        if !is_allowed(licence, &allowed_licences) {
            problems.push(format!("{name}: licence {licence:?} is not one that deny.toml allows"));
        }
        // A crate of this workspace has no source.
        if let Some(source) = &package.source {
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

/// Each direct dependency has a row in docs/dependencies.md, and each row is a direct dependency.
pub(crate) fn dependencies(shell: &Shell) -> Result<Tally> {
    let path = "docs/dependencies.md";
    let text = fs::read_to_string(shell.root.join(path)).context(path)?;
    let mut users: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut packages = workspace(shell)?;
    for manifest in ["fuzz/Cargo.toml", "tests/no-os/Cargo.toml", MUTANTS] {
        packages.extend(metadata(shell, &format!("--locked --no-deps --manifest-path {manifest}"))?);
    }
    let members: BTreeSet<_> = packages.iter().map(|package| package.name.as_str()).collect();
    for package in &packages {
        for dependency in package.dependencies.iter().filter(|it| !members.contains(it.name.as_str())) {
            users.entry(&dependency.name).or_default().push(&package.name);
        }
    }
    let all = all_packages(shell)?;
    let rows: BTreeMap<&str, &str> = text
        .lines()
        .filter_map(row)
        .flat_map(|(names, licence)| names_in_cell(names).map(move |name| (name, licence)))
        .collect();
    let mut problems = Vec::new();
    for (dependency, users) in users.iter().filter(|(name, _)| !rows.contains_key(*name)) {
        problems.push(format!("{path} has no row for {dependency}, which {} uses", users.join(", ")));
    }
    for (row, licence) in rows {
        if !users.contains_key(row) {
            problems.push(format!("{path} has a row for {row}, which nothing uses"));
        }
        let mut licences = all.iter().filter(|package| package.name == row).filter_map(|it| it.license.as_deref());
        if licences.all(|real| real != licence) {
            problems.push(format!("{path} says that the licence of {row} is {licence:?}, which its manifest does not"));
        }
    }
    Ok(Tally::from_problems(problems, format!("{} direct dependencies", users.len())))
}

/// The first and the last cell of a row.
fn row(line: &str) -> Option<(&str, &str)> {
    let (first, rest) = line.trim().strip_prefix('|')?.strip_suffix('|')?.split_once('|')?;
    Some((first.trim(), rest.rsplit('|').next()?.trim()))
}

/// The names in backquotes in a cell.
fn names_in_cell(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// A package, as `cargo metadata` describes it.
#[derive(Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) license: Option<String>,
    source: Option<String>,
    pub(crate) manifest_path: PathBuf,
    /// Every dependency, of each kind, for each target.
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// `dev`, `build`, or none for an ordinary one.
    kind: Option<String>,
}

/// The workspace's packages, each with its folder relative to the root.
pub(crate) fn folders(shell: &Shell) -> Result<BTreeMap<String, String>> {
    let folder =
        |package: &Package| Some(package.manifest_path.parent()?.strip_prefix(&shell.root).ok()?.display().to_string());
    Ok(workspace(shell)?.into_iter().filter_map(|it| folder(&it).map(|folder| (it.name, folder))).collect())
}

/// The packages of the workspace, of the fuzz targets and of the mutants, and all that these depend on.
pub(crate) fn all_packages(shell: &Shell) -> Result<Vec<Package>> {
    let mut all = metadata(shell, "--locked --all-features")?;
    all.extend(metadata(shell, "--locked --manifest-path fuzz/Cargo.toml")?);
    all.extend(metadata(shell, &format!("--locked --manifest-path {MUTANTS}"))?);
    Ok(all)
}

/// The packages of the workspace.
fn workspace(shell: &Shell) -> Result<Vec<Package>> {
    metadata(shell, "--locked --no-deps")
}

/// The packages that `cargo metadata` lists.
fn metadata(shell: &Shell, args: &str) -> Result<Vec<Package>> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    let ran = shell.cargo(&format!("metadata --format-version 1 {args}")).run("metadata")?.expect_ok()?;
    // Warnings may stand before the object.
    let object = ran.text.lines().find(|line| line.starts_with('{')).context("cargo metadata printed no object")?;
    Ok(serde_json::from_str::<Metadata>(object)?.packages)
}

/// The files that git tracks, and new ones that it does not ignore.
pub(crate) fn project_files(shell: &Shell) -> Result<Vec<PathBuf>> {
    let git = shell.command("git").args(["ls-files", "--cached", "--others", "--exclude-standard"]);
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
    fn a_path_is_found_only_as_the_beginning_of_a_path() {
        assert!(names_path("see /srv/build/x.md", "/srv/build"));
        assert!(names_path("`/srv/build`", "/srv/build"));
        assert!(!names_path("see /srv/builder", "/srv/build"));
        assert!(!names_path("see a/srv/build", "/srv/build"));
        assert!(!names_path("$HOME/srv/build", "/srv/build"));
    }

    #[test]
    fn a_rows_crates_are_the_names_in_backquotes() {
        let (first, last) = row("| `clap`, `serde` | need | MIT |").unwrap();
        assert_eq!(names_in_cell(first).collect::<Vec<_>>(), ["clap", "serde"]);
        assert_eq!(last, "MIT");
        assert_eq!(row("no row"), None);
    }
}
