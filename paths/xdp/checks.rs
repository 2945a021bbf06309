//! What the checks do for the packet path; read by xtask/src/paths.rs.

use super::Path;
use crate::tools::Need;

pub(super) const CHECKS: Path = Path {
    name: "xdp",
    package: "pagemill-xdp",
    wants: &[
        Need::Deb("iproute2", &["ip", "-V"]),
        // Asks what `echo` answers.
        Need::Deb("iputils-ping", &["ping", "-V"]),
        // Runs it without permission.
        Need::Deb("util-linux", &["setpriv", "--version"]),
        // Has senders finish their packets: checksums, segments, tags.
        Need::Deb("ethtool", &["ethtool", "--version"]),
    ],
    program_tests: &["xdp"],
};
