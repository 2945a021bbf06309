//! What a lane counts, and how it is shown.
use std::fmt::Write;
use std::time::Duration;

use pagemill::PagePoolStats;
use rustix::net::xdp::XdpStatistics;
use serde::Serialize;

use crate::frames::Lie;

/// Why this program dropped a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dropped {
    /// Dropping is what it was asked to do.
    Asked,
    /// The send ring had no room.
    SendRingFull,
    /// It asks nothing that `echo` answers.
    NotAsked,
    /// It is shorter than it says, or a checksum is wrong.
    Damaged,
    /// It is empty, longer than its page, or in several parts.
    BadLength,
}

/// Packets, bytes, and what was wrong. The names are part of the program's interface.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Counts {
    pub(crate) received: u64,
    pub(crate) received_bytes: u64,
    pub(crate) sent: u64,
    pub(crate) sent_bytes: u64,
    pub(crate) completed: u64,
    pub(crate) drop_asked: u64,
    pub(crate) drop_send_ring_full: u64,
    pub(crate) drop_not_asked: u64,
    pub(crate) drop_damaged: u64,
    pub(crate) drop_bad_length: u64,
    /// Received or completed addresses that are outside of the UMEM, and those of frames that the kernel doesn't have.
    pub(crate) lie_received_outside: u64,
    pub(crate) lie_received_not_there: u64,
    pub(crate) lie_completed_outside: u64,
    pub(crate) lie_completed_not_there: u64,
    /// How often the pool had too few pages, for a refill or for packets to make.
    pub(crate) no_page: u64,
}

impl Counts {
    #[inline]
    pub(crate) fn drop(&mut self, why: Dropped) {
        *match why {
            Dropped::Asked => &mut self.drop_asked,
            Dropped::SendRingFull => &mut self.drop_send_ring_full,
            Dropped::NotAsked => &mut self.drop_not_asked,
            Dropped::Damaged => &mut self.drop_damaged,
            Dropped::BadLength => &mut self.drop_bad_length,
        } += 1;
    }

    #[cold]
    pub(crate) fn lies_received(&mut self, lie: Lie) {
        match lie {
            Lie::Outside => self.lie_received_outside += 1,
            Lie::NotThere => self.lie_received_not_there += 1,
        }
    }

    #[cold]
    pub(crate) fn lies_completed(&mut self, lie: Lie) {
        match lie {
            Lie::Outside => self.lie_completed_outside += 1,
            Lie::NotThere => self.lie_completed_not_there += 1,
        }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.received += other.received;
        self.received_bytes += other.received_bytes;
        self.sent += other.sent;
        self.sent_bytes += other.sent_bytes;
        self.completed += other.completed;
        self.drop_asked += other.drop_asked;
        self.drop_send_ring_full += other.drop_send_ring_full;
        self.drop_not_asked += other.drop_not_asked;
        self.drop_damaged += other.drop_damaged;
        self.drop_bad_length += other.drop_bad_length;
        self.lie_received_outside += other.lie_received_outside;
        self.lie_received_not_there += other.lie_received_not_there;
        self.lie_completed_outside += other.lie_completed_outside;
        self.lie_completed_not_there += other.lie_completed_not_there;
        self.no_page += other.no_page;
    }
}

/// What the kernel counted for the sockets.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub(crate) struct Kernel {
    /// Packets that had no page, or did not fit one.
    dropped: u64,
    receive_ring_full: u64,
    fill_ring_empty: u64,
    /// Addresses that it did not take.
    invalid_received: u64,
    invalid_sent: u64,
}

impl Kernel {
    pub(crate) fn add(&mut self, of: &XdpStatistics) {
        self.dropped += of.rx_dropped;
        self.receive_ring_full += of.rx_ring_full.unwrap_or(0);
        self.fill_ring_empty += of.rx_fill_ring_empty_descs.unwrap_or(0);
        self.invalid_received += of.rx_invalid_descs;
        self.invalid_sent += of.tx_invalid_descs;
    }

    /// All packets that did not reach the receive ring.
    pub(crate) fn all_dropped(&self) -> u64 {
        self.dropped + self.receive_ring_full
    }
}

/// The pools' figures, by Linux's names.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub(crate) struct Pool {
    pub(crate) fast: u64,
    pub(crate) slow: u64,
    pub(crate) empty: u64,
    pub(crate) refill: u64,
    pub(crate) cached: u64,
    pub(crate) cache_full: u64,
    pub(crate) ring: u64,
    pub(crate) ring_full: u64,
    pub(crate) in_flight: usize,
}

/// All counters at one moment.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub(crate) struct Report {
    #[serde(flatten)]
    pub(crate) counts: Counts,
    pub(crate) kernel: Kernel,
    pub(crate) pool: Pool,
}

impl Report {
    pub(crate) fn add(&mut self, other: &Self) {
        self.counts.add(&other.counts);
        let (to, of) = (&mut self.kernel, &other.kernel);
        to.dropped += of.dropped;
        to.receive_ring_full += of.receive_ring_full;
        to.fill_ring_empty += of.fill_ring_empty;
        to.invalid_received += of.invalid_received;
        to.invalid_sent += of.invalid_sent;
        let (to, of) = (&mut self.pool, &other.pool);
        to.fast += of.fast;
        to.slow += of.slow;
        to.empty += of.empty;
        to.refill += of.refill;
        to.cached += of.cached;
        to.cache_full += of.cache_full;
        to.ring += of.ring;
        to.ring_full += of.ring_full;
        to.in_flight += of.in_flight;
    }

    /// The drops by reason, without those that did not happen.
    pub(crate) fn drops(&self) -> Vec<(u64, &'static str)> {
        let (counts, kernel) = (&self.counts, &self.kernel);
        let all = [
            (counts.drop_asked, "dropped as asked"),
            (counts.drop_not_asked, "no ARP or ping for these addresses"),
            (counts.drop_damaged, "damaged"),
            (counts.drop_send_ring_full, "found the send ring full"),
            (counts.drop_bad_length, "empty, longer than their page, or in parts"),
            // The kernel counts a packet that finds no page as dropped, too.
            (kernel.dropped.saturating_sub(kernel.fill_ring_empty), "too long for a page (kernel)"),
            (kernel.fill_ring_empty, "found the fill ring empty (kernel)"),
            (kernel.receive_ring_full, "found the receive ring full (kernel)"),
            (kernel.invalid_received + kernel.invalid_sent, "addresses that the kernel refused"),
            (counts.lie_received_outside + counts.lie_completed_outside, "addresses outside of the UMEM"),
            (counts.lie_received_not_there, "received frames that the kernel did not have"),
            (counts.lie_completed_not_there, "completed frames that were not sent"),
        ];
        all.into_iter().filter(|(count, _)| *count > 0).collect()
    }
}

impl Report {
    /// A line of live counters, since the last report so long ago; or all of them as JSON.
    pub(crate) fn line(&self, last: &Self, passed: Duration, is_json: bool) -> String {
        if is_json {
            return serde_json::to_string(self).unwrap_or_default() + "\n";
        }
        let (now, before) = (&self.counts, &last.counts);
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / passed.as_secs_f64();
        let dropped = |of: &Self| of.drops().iter().map(|(count, _)| count).sum::<u64>();
        format!(
            "in {:>9.0}/s {:>7.1} Mbit/s  out {:>9.0}/s {:>7.1} Mbit/s  dropped {:>9.0}/s\n",
            rate(now.received, before.received),
            rate(now.received_bytes, before.received_bytes) * 8e-6,
            rate(now.sent, before.sent),
            rate(now.sent_bytes, before.sent_bytes) * 8e-6,
            rate(dropped(self), dropped(last)),
        )
    }

    /// The last words.
    pub(crate) fn last_words(&self, seconds: f64, pages_lost: Option<usize>, is_json: bool) -> String {
        if is_json {
            #[derive(Serialize)]
            struct Summary<'a> {
                seconds: f64,
                pages_lost: Option<usize>,
                #[serde(flatten)]
                report: &'a Report,
            }
            return serde_json::to_string(&Summary { seconds, pages_lost, report: self }).unwrap_or_default() + "\n";
        }
        let Counts { received, sent, .. } = self.counts;
        let Pool { fast, slow, refill, ring, cache_full, .. } = self.pool;
        let mut text = format!("{seconds:.1} s: {received} packets came in, {sent} went out\n");
        // Writing to a string can't fail.
        for (count, what) in self.drops() {
            let _ = writeln!(text, "{count:>12}  {what}");
        }
        let _ = writeln!(text, "pool: fast {fast}, slow {slow}, refill {refill}, ring {ring}, cache_full {cache_full}");
        let _ = match pages_lost {
            Some(0) => writeln!(text, "all pages came back"),
            Some(pages) => writeln!(text, "{pages} pages did not come back: a fault of this program, please report it"),
            None => {
                writeln!(text, "the pages are left to the kernel, which may still use them (zero copy, or a failure)")
            }
        };
        text
    }
}

impl From<PagePoolStats> for Pool {
    fn from(of: PagePoolStats) -> Self {
        let PagePoolStats { fast, slow, empty, refill, cached, cache_full, ring, ring_full, in_flight, .. } = of;
        Self { fast, slow, empty, refill, cached, cache_full, ring, ring_full, in_flight }
    }
}
