//! The errors of a disk: logged when they happen, and counted.
use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};

use tracing::{error, warn};

/// The operations, by their names in the log and the figures.
pub(super) const OPERATIONS: [&str; 4] = ["read", "write", "sync", "punch"];

/// Counts, and whether a sync has failed.
#[derive(Debug, Default)]
pub(super) struct Health {
    /// Its export's name in the log, where there are several.
    pub(super) export: Option<String>,
    errors: [AtomicU64; OPERATIONS.len()],
    /// A sync has failed, and so do all later ones (D1 in `disk`).
    has_failed: AtomicBool,
}

impl Health {
    /// An operation on `len` bytes from `at` of the file failed.
    pub(super) fn note(&self, operation: &'static str, at: u64, len: u64, why: &io::Error) {
        let place = OPERATIONS.iter().position(|&other| other == operation);
        let count = place.map_or(1, |place| self.errors[place].fetch_add(1, Relaxed) + 1);
        let export = self.export.as_deref();
        match operation {
            "sync" => error!(name: "disk sync failed", export, %why, count, "the disk failed to sync"),
            _ => warn!(name: "disk error", export, operation, at, len, %why, count, "the disk failed"),
        }
    }

    /// A sync failed: written data may be lost.
    pub(super) fn fail(&self) {
        // Relaxed: only the flag itself is read.
        if !self.has_failed.swap(true, Relaxed) {
            error!(
                name: "disk lost data",
                export = self.export.as_deref(),
                "data that was written may be lost, so every flush fails from now on: see to the disk, then restart the \
                 server"
            );
        }
    }

    /// Whether a sync has failed.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Relaxed)
    }

    /// The errors of each operation, as [`OPERATIONS`] has them.
    pub(super) fn errors(&self) -> [u64; OPERATIONS.len()] {
        self.errors.each_ref().map(|count| count.load(Relaxed))
    }
}
