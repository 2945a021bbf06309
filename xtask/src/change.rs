//! The files that have changed since `main`. `quick` looks only at these, and `test` leaves some paths to `test --all`.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use crate::shell::{Ran, Shell};

/// The files that differ from the commit at which this branch left `main` (the remote's `main`, or else the local one), and those
/// that git does not track yet. `None` if there is no `main`.
pub(crate) fn files(shell: &Shell) -> Result<Option<BTreeSet<String>>> {
    let git = |args: &[&str]| -> Result<Ran> { shell.command("git").args(args).run("git-change") };
    let mut base = None;
    for main in ["origin/main", "main"] {
        let ran = git(&["merge-base", "HEAD", main])?;
        // The output may hold a warning beside the commit.
        let is_commit = |line: &&str| line.len() >= 40 && line.bytes().all(|byte| byte.is_ascii_hexdigit());
        base = base.or_else(|| ran.text.lines().find(is_commit).filter(|_| ran.is_ok()).map(str::to_owned));
    }
    let Some(base) = base else { return Ok(None) };
    let changed = git(&["diff", "--name-only", "--no-renames", &base])?.expect_ok()?;
    let new = git(&["ls-files", "--others", "--exclude-standard"])?.expect_ok()?;
    Ok(Some(changed.text.lines().chain(new.text.lines()).map(str::to_owned).collect()))
}

/// The packages that these files belong to. `folders` has each package's folder, relative to the root.
pub(crate) fn packages(files: &BTreeSet<String>, folders: &BTreeMap<String, String>) -> BTreeSet<String> {
    let holder = |file: &str| {
        let holds = |folder: &str| file.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'));
        folders.iter().filter(|(_, folder)| holds(folder)).max_by_key(|(_, folder)| folder.len()).map(|(name, _)| name)
    };
    files.iter().filter_map(|file| holder(file)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_belongs_to_the_package_with_the_nearest_folder() {
        let folders = [("a", "crates/a"), ("a-tests", "crates/a/tests"), ("ab", "crates/ab")];
        let folders = folders.map(|(name, folder)| (name.to_owned(), folder.to_owned())).into();
        let of = |file: &str| packages(&BTreeSet::from([file.to_owned()]), &folders).into_iter().next();
        assert_eq!(of("crates/a/src/lib.rs").as_deref(), Some("a"));
        assert_eq!(of("crates/a/tests/x.rs").as_deref(), Some("a-tests"));
        assert_eq!(of("crates/ab/src/lib.rs").as_deref(), Some("ab"));
        assert_eq!(of("README.md"), None);
    }
}
