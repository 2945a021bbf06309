//! What the checks do for the NFS server; read by xtask/src/paths.rs. Linux's client is in the step `nfs-vm`
//! (tests/vm/nfs.sh).

use super::Path;

pub(super) const CHECKS: Path =
    Path { name: "nfs", package: "pagemill-nfs", wants: &[], program_tests: &["bench_rpc"] };
