//! What the checks do for the NVMe driver; read by xtask/src/paths.rs. Its drive is in the step `vm` (tests/vm/nvme.sh).

use super::Path;

pub(super) const CHECKS: Path = Path { name: "nvme", package: "pagemill-nvme", wants: &[], program_tests: &[] };
