//! A server's own figures, as Prometheus reads them.
use std::fmt::Write;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use super::disk::Disk;
use super::health::OPERATIONS;
use super::tally::{BUCKETS, Counts, End, KINDS, limit_us};

/// The counts of all workers, and what is counted before a worker has a client.
#[derive(Debug, Default)]
pub(super) struct Figures {
    workers: Mutex<Vec<Arc<Counts>>>,
    /// Clients beyond `max_connections`.
    pub(super) refused: AtomicU64,
    /// Clients that were accepted; each has its number by it.
    pub(super) came: AtomicU64,
}

impl Figures {
    /// Counts for one more worker.
    pub(super) fn worker(&self) -> Arc<Counts> {
        let counts = Arc::new(Counts::default());
        self.all().push(Arc::clone(&counts));
        counts
    }

    /// No code panics while it holds the lock.
    fn all(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Counts>>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sum<'a>(workers: &'a [Arc<Counts>], of: impl Fn(&'a Counts) -> &'a AtomicU64) -> u64 {
        workers.iter().map(|counts| of(counts).load(Relaxed)).sum()
    }

    /// Appends the figures. `disks` are those of the exports, with their names.
    pub(super) fn write<'a>(&self, disks: impl Iterator<Item = (&'a str, &'a Disk)>, out: &mut String) {
        let workers = &*self.all();
        let sum = |of: fn(&Counts) -> &AtomicU64| Self::sum(workers, of);
        let mut out = Text(out);
        // Ends first, for a client that comes and goes meanwhile. The processor may still read the other counts earlier.
        let ended: Vec<u64> =
            (0..End::NAMES.len()).map(|end| Self::sum(workers, |counts| &counts.ended[end])).collect();
        let connected = sum(|counts| &counts.connected);
        out.head("connections", "gauge", "Clients that are served now.");
        out.sample("connections", "", connected.saturating_sub(ended.iter().sum()));
        out.head("connections_total", "counter", "Clients that were accepted.");
        out.sample("connections_total", "", connected);
        out.head("connections_refused_total", "counter", "Clients that were disconnected because there were too many.");
        out.sample("connections_refused_total", "", self.refused.load(Relaxed));
        out.head("connections_ended_total", "counter", "Clients that are gone, by the reason.");
        for (why, count) in End::NAMES.iter().zip(ended) {
            out.sample("connections_ended_total", &format!("why=\"{why}\""), count);
        }
        type By = fn(&Counts, usize) -> &AtomicU64;
        let by_kind: [(&str, &str, By); 3] = [
            ("requests_total", "Requests by kind.", |counts, kind| &counts.requests[kind]),
            ("bytes_total", "Bytes of requests that went well.", |counts, kind| &counts.bytes[kind]),
            ("errors_total", "Requests that the disk or the memory failed.", |counts, kind| &counts.errors[kind]),
        ];
        for (name, help, by) in by_kind {
            out.head(name, "counter", help);
            for (number, kind) in KINDS.iter().enumerate() {
                out.sample(name, &format!("kind=\"{kind}\""), Self::sum(workers, |counts| by(counts, number)));
            }
        }
        out.head("request_us", "histogram", "Microseconds from a request's arrival to its answer.");
        for (number, kind) in KINDS.iter().enumerate() {
            let mut count = 0;
            for bucket in 0..BUCKETS {
                count += Self::sum(workers, |counts| &counts.took[number][bucket]);
                let limit = limit_us(bucket).map_or("+Inf".to_owned(), |limit| limit.to_string());
                out.sample("request_us_bucket", &format!("kind=\"{kind}\",le=\"{limit}\""), count);
            }
            let kind = format!("kind=\"{kind}\"");
            out.sample("request_us_sum", &kind, Self::sum(workers, |counts| &counts.took_us[number]));
            out.sample("request_us_count", &kind, count);
        }
        out.head("disk_errors_total", "counter", "Operations on the disk that failed.");
        let disks: Vec<_> =
            disks.map(|(export, disk)| (format!("export=\"{}\"", escaped(export)), &disk.health)).collect();
        for (export, health) in &disks {
            for (operation, count) in OPERATIONS.iter().zip(health.errors()) {
                out.sample("disk_errors_total", &format!("{export},operation=\"{operation}\""), count);
            }
        }
        out.head("disk_failed", "gauge", "1 once a sync has failed: every flush fails until the server is restarted.");
        for (export, health) in &disks {
            out.sample("disk_failed", export, health.has_failed().into());
        }
    }
}

/// A label's value.
fn escaped(text: &str) -> String {
    text.replace('\\', r"\\").replace('"', r#"\""#).replace('\n', r"\n")
}

/// Text in Prometheus' format. Writing to a string can't fail.
struct Text<'a>(&'a mut String);

impl Text<'_> {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP pagemill_crypt_{name} {help}\n# TYPE pagemill_crypt_{name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &str, value: u64) {
        let (open, close) = if labels.is_empty() { ("", "") } else { ("{", "}") };
        let _ = writeln!(self.0, "pagemill_crypt_{name}{open}{labels}{close} {value}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts of other threads come in any order.
    #[test]
    fn a_client_whose_end_is_seen_before_its_begin_makes_no_number_negative() {
        let figures = Figures::default();
        figures.worker().ended[0].store(1, Relaxed);
        let mut text = String::new();
        figures.write(std::iter::empty(), &mut text);
        assert!(text.contains("\npagemill_crypt_connections 0\n"), "{text}");
    }
}
