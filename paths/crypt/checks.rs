//! What the checks do for encrypted volumes; read by xtask/src/paths.rs.

use super::Path;
use crate::tools::{CRYPTSETUP, FIO, Need};

pub(super) const CHECKS: Path = Path {
    name: "crypt",
    package: "pagemill-crypt",
    wants: &[
        CRYPTSETUP,
        // `qemu-img`, `qemu-io` and `qemu-nbd`; writes and reads LUKS1 volumes.
        Need::Deb("qemu-utils", &["qemu-img", "--version"]),
        // `nbdinfo` and `nbdcopy`.
        Need::Deb("libnbd-bin", &["nbdcopy", "--version"]),
        // libnbd in Python: requests that no program sends.
        Need::Deb("python3-libnbd", &["/usr/bin/python3", "-c", "import nbd"]),
        // Writes over NBD.
        FIO,
    ],
    program_tests: &[
        "crypt_exports",
        "crypt_far",
        "crypt_memory",
        "crypt_mount",
        "crypt_serve",
        "crypt_service",
        "crypt_soak",
        "bench_crypt",
    ],
};
