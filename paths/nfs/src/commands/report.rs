//! What a server has done, in figures.
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;

use crate::pages::{PageCounters, PageCounts};
use crate::server::{Counters, Why};

/// A server's counters. Names are those of the JSON.
#[derive(Serialize)]
pub(super) struct Report {
    requests: u64,
    received_bytes: u64,
    sent_bytes: u64,
    /// Connections in all: the sum of those that are closed, by the reason.
    connections: u64,
    closed: Closed,
    refused_clients: u64,
    refused_connections: u64,
    accept_pauses: u64,
    garbage: u64,
    denied: u64,
    panics: u64,
    waits_for_room: u64,
    /// What the threads' page arrays had to be filled with.
    arrays: PageCounts,
}

/// Why connections were closed.
#[derive(Serialize)]
struct Closed {
    by_clients: u64,
    broken: u64,
    malformed: u64,
    stalled: u64,
    idle: u64,
    at_the_end: u64,
}

impl Report {
    pub(super) fn of(server: &Counters, pages: &PageCounters) -> Self {
        let of = |counter: &AtomicU64| counter.load(Relaxed);
        Self {
            requests: of(&server.requests),
            received_bytes: of(&server.received_bytes),
            sent_bytes: of(&server.sent_bytes),
            connections: of(&server.accepted),
            closed: Closed {
                by_clients: server.closed(Why::Ended),
                broken: server.closed(Why::Broken),
                malformed: server.closed(Why::Malformed) + server.closed(Why::TooLong),
                stalled: server.closed(Why::Stalled),
                idle: server.closed(Why::Idle),
                at_the_end: server.closed(Why::Stopped),
            },
            refused_clients: of(&server.refused_peers),
            refused_connections: of(&server.refused_full),
            accept_pauses: of(&server.accept_pauses),
            garbage: of(&server.garbage),
            denied: of(&server.denied),
            panics: of(&server.panics),
            waits_for_room: of(&server.waits_for_room),
            arrays: pages.snapshot(),
        }
    }

    pub(super) fn json(&self) -> String {
        let text = serde_json::to_string(self).expect("numbers have a form in JSON");
        text + "\n"
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let Self { requests, connections, closed, arrays, .. } = self;
        writeln!(f, "requests     {requests} on {connections} connections")?;
        writeln!(f, "received     {:.1} MiB", mib(self.received_bytes))?;
        writeln!(f, "sent         {:.1} MiB", mib(self.sent_bytes))?;
        writeln!(f, "refused      {} clients not in --allow", self.refused_clients)?;
        writeln!(f, "             {} connections over --max-connections", self.refused_connections)?;
        writeln!(f, "             {} requests: credential or port", self.denied)?;
        writeln!(f, "             {} requests: malformed", self.garbage)?;
        let Closed { malformed, stalled, idle, .. } = closed;
        writeln!(f, "closed       {malformed} for malformed records, {stalled} stalled, {idle} idle when others came")?;
        let PageCounts { refills, holes, pages, short_refills, sleeps, slept_ns } = arrays;
        writeln!(
            f,
            "page arrays  {refills} refills, {holes} holes, {pages} pages; {short_refills} requests came short"
        )?;
        writeln!(f, "no memory    {sleeps} sleeps, {:.1} ms in all", *slept_ns as f64 / 1e6)?;
        if self.panics > 0 {
            writeln!(f, "faults       {} requests ended in a panic of the server; please report it", self.panics)?;
        }
        Ok(())
    }
}
