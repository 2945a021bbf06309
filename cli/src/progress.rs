//! Progress on standard error while bytes move.
use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressStyle};

/// A progress bar on standard error; hidden if that is no terminal.
pub(crate) fn progress(size: Option<u64>) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let (bar, template) = match size {
        Some(size) => {
            (ProgressBar::new(size), "[{elapsed}] {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left")
        }
        None => (ProgressBar::no_length(), "[{elapsed}] {bytes}, {bytes_per_sec}"),
    };
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
