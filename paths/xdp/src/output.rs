//! Standard output, whose reader may pause or go away: the packets go on, and a signal still ends the program.
use std::io::{self, Write};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::signals::Stop;

/// Whether a line can be written without waiting. A pipe that is ready takes 4096 bytes.
fn is_ready() -> bool {
    let out = io::stdout();
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(&out, PollFlags::OUT)], Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Writes a line, unless nobody reads.
pub(crate) fn line(text: &str) {
    if is_ready() {
        // Whoever closed the output misses it.
        let _ = io::stdout().lock().write_all(text.as_bytes());
    }
}

/// Writes the last words. After a signal it waits for a reader for a second, and not longer.
pub(crate) fn last_words(text: &str, stop: &Stop) {
    let since = Instant::now();
    while !is_ready() && (stop.check().is_ok() || since.elapsed() < Duration::from_secs(1)) {
        std::thread::sleep(Duration::from_millis(20));
    }
    line(text);
}
