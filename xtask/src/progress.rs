//! Progress of the steps: on a terminal a moving line for each, elsewhere a line when a step begins.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The steps that run now. A clone shows the same.
#[derive(Clone)]
pub(crate) struct Progress {
    lines: MultiProgress,
    running: Arc<Mutex<BTreeMap<&'static str, ProgressBar>>>,
}

impl Default for Progress {
    fn default() -> Self {
        let lines = MultiProgress::with_draw_target(ProgressDrawTarget::stdout());
        Self { lines, running: Arc::default() }
    }
}

impl Progress {
    /// A step begins. It takes `about` so long, and writes `log`.
    pub(crate) fn begin(&self, step: &'static str, about: Duration, log: &str) {
        if self.lines.is_hidden() {
            // A short step prints only how it ended.
            if about > Duration::from_secs(2) {
                println!("{step:<20} about {}; {log}", minutes(about));
            }
            return;
        }
        let about = minutes(about);
        let style =
            ProgressStyle::with_template("{prefix:<20} {elapsed} of about {msg}").expect("the template is valid");
        let line = self.lines.add(ProgressBar::new_spinner().with_style(style).with_prefix(step));
        line.set_message(format!("{about}; {log}"));
        line.enable_steady_tick(Duration::from_secs(1));
        self.running().insert(step, line);
    }

    /// `done` of a step's `of` tests are done.
    pub(crate) fn done(&self, step: &str, done: usize, of: usize) {
        if let Some(line) = self.running().get(step) {
            line.set_prefix(format!("{step} {done}/{of}"));
        }
    }

    /// Prints a line of a step that takes minutes.
    pub(crate) fn say(&self, line: &str) {
        self.lines.suspend(|| println!("{line}"));
    }

    /// A step has ended: prints its report.
    pub(crate) fn end(&self, step: &str, lines: &str) {
        if let Some(line) = self.running().remove(step) {
            line.finish_and_clear();
        }
        self.lines.suspend(|| println!("{lines}"));
    }

    fn running(&self) -> std::sync::MutexGuard<'_, BTreeMap<&'static str, ProgressBar>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `12 s`, or `3 min 5 s`.
pub(crate) fn minutes(time: Duration) -> String {
    match time.as_secs() {
        s @ 0..60 => format!("{s} s"),
        s => format!("{} min {} s", s / 60, s % 60),
    }
}
