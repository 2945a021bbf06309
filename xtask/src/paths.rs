//! The data paths, and what the checks do for each besides linting it and running its package's tests. A path says so in a
//! file `checks.rs` beside its code; a new one is added to [`PATHS`].

use std::collections::BTreeSet;

use crate::tools::Need;

/// What one path has the checks do.
pub(crate) struct Path {
    /// Its folder under `paths/`.
    pub(crate) name: &'static str,
    /// Its package.
    pub(crate) package: &'static str,
    /// Programs that its tests compare with. A test whose program is missing says that it is skipped.
    pub(crate) wants: &'static [Need],
    /// Modules of `cli/tests` that test it by way of the program `pagemill`.
    pub(crate) program_tests: &'static [&'static str],
}

#[path = "../../paths/crypt/checks.rs"]
mod crypt;
#[path = "../../paths/nvme/checks.rs"]
mod nvme;

/// Every path.
pub(crate) const PATHS: &[Path] = &[crypt::CHECKS, nvme::CHECKS];

/// What some test of some path cannot do without.
pub(crate) fn wants() -> Vec<Need> {
    PATHS.iter().flat_map(|path| path.wants).copied().collect()
}

/// The paths whose tests this change can be without: it lies within other paths alone. None, when it lies anywhere else.
pub(crate) fn untouched(changed: &BTreeSet<String>) -> Vec<&'static Path> {
    let of = |file: &str| PATHS.iter().find(|path| file.starts_with(&format!("paths/{}/", path.name)));
    if changed.is_empty() || changed.iter().any(|file| of(file).is_none()) {
        return Vec::new();
    }
    let is_touched = |path: &Path| changed.iter().any(|file| of(file).is_some_and(|of| of.name == path.name));
    PATHS.iter().filter(|path| !is_touched(path)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_within_one_path_leaves_the_others_out_and_any_other_change_none() {
        let left_out = |files: &[&str]| {
            let files = files.iter().map(|file| (*file).to_owned()).collect();
            untouched(&files).iter().map(|path| path.name).collect::<Vec<_>>()
        };
        assert_eq!(left_out(&["paths/nvme/src/prp.rs"]), ["crypt"]);
        assert_eq!(left_out(&["paths/nvme/src/prp.rs", "paths/crypt/Cargo.toml"]), [""; 0]);
        assert_eq!(left_out(&["paths/nvme/src/prp.rs", "crates/pagemill/src/free.rs"]), [""; 0]);
        assert_eq!(left_out(&[]), [""; 0], "nothing is known to have changed: a clean checkout");
    }
}
