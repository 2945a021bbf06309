//! What the checks do for the NFS server; read by xtask/src/paths.rs. Linux's client is in the step `nfs-vm`
//! (tests/vm/nfs.sh).

use super::Path;
use crate::tools::Need;

pub(super) const CHECKS: Path = Path {
    name: "nfs",
    package: "pagemill-nfs",
    wants: &[
        // `nfs-cp`, `nfs-cat` and `nfs-ls`.
        Need::Deb("libnfs-utils", &["sh", "-c", "command -v nfs-cp"]),
        // libnfs as a client of `pagemill bench rpc`.
        Need::Deb("libnfs-dev", &["sh", "-c", "cc -E -x c -include nfsc/libnfs.h /dev/null"]),
        // Runs the server without permission.
        Need::Deb("util-linux", &["setpriv", "--version"]),
    ],
    program_tests: &["bench_rpc", "nfs"],
};
