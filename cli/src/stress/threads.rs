//! The end of a round's threads.
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::found::Found;

/// Threads that have not ended this long after the round hang. A busy machine may keep them from it for minutes.
const HANG: Duration = Duration::from_secs(600);

/// Waits for all of them. One that panicked has found something.
pub(super) fn end(threads: Vec<JoinHandle<()>>, found: &Found) -> Result<(), String> {
    let limit = Instant::now() + HANG;
    for thread in threads {
        while !thread.is_finished() {
            if Instant::now() > limit {
                let why = found.first().unwrap_or_else(|| "nothing else was found".into());
                return Err(format!("a thread hangs since {} s; {why}", HANG.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if thread.join().is_err() {
            found.say("a thread panicked".into());
        }
    }
    Ok(())
}
