//! The data paths: what their tests need, and which tests they can be left out of. Each path describes this in a file `checks.rs`
//! beside its code; a new path is added to [`PATHS`].

use std::collections::BTreeSet;

use crate::tools::Need;

/// A path, as the checks see it.
pub(crate) struct Path {
    /// Its folder under `paths/`.
    pub(crate) name: &'static str,
    /// Its package.
    pub(crate) package: &'static str,
    /// Programs that its tests compare with. Without its program, a test reports that it is skipped.
    pub(crate) wants: &'static [Need],
    /// Modules of `cli/tests` that test the path through the program `pagemill`.
    pub(crate) program_tests: &'static [&'static str],
}

#[path = "../../paths/crypt/checks.rs"]
mod crypt;
#[path = "../../paths/nfs/checks.rs"]
mod nfs;
#[path = "../../paths/nvme/checks.rs"]
mod nvme;
#[path = "../../paths/xdp/checks.rs"]
mod xdp;

/// Every path.
pub(crate) const PATHS: &[Path] = &[crypt::CHECKS, nfs::CHECKS, nvme::CHECKS, xdp::CHECKS];

/// The needs of all paths' tests.
pub(crate) fn wants() -> Vec<Need> {
    PATHS.iter().flat_map(|path| path.wants).copied().collect()
}

/// The paths that this change does not touch, if it lies within other paths. No paths, if any changed file lies elsewhere.
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
    fn a_change_leaves_the_other_paths_out_only_if_it_lies_within_paths() {
        let left_out = |files: &[&str]| {
            let files = files.iter().map(|file| (*file).to_owned()).collect();
            untouched(&files).iter().map(|path| path.name).collect::<Vec<_>>()
        };
        assert_eq!(left_out(&["paths/nvme/src/prp.rs"]), ["crypt", "nfs", "xdp"]);
        assert_eq!(left_out(&["paths/nvme/src/prp.rs", "paths/crypt/Cargo.toml"]), ["nfs", "xdp"]);
        assert_eq!(left_out(&["paths/nvme/src/prp.rs", "crates/pagemill/src/free.rs"]), [""; 0]);
        assert_eq!(left_out(&[]), [""; 0], "a clean checkout: every path is tested");
    }
}
