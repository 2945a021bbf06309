//! How long a test waits for what is to come, in every crate.
use std::time::{Duration, Instant};

/// What has not come by then never comes. However busy the machine is: no test fails because it is slow.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);

/// Waits for what another thread or process is about to do; that it never does it is the failure.
#[track_caller]
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let limit = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < limit, "{what} never came");
        std::thread::sleep(Duration::from_micros(500));
    }
}
