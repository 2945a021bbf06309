//! The table `xdp`: packets a second, and what each costs.

use std::io::{self, Write};

use pagemill_harness::published::Published;
use pagemill_harness::record::Record;
use pagemill_harness::report::{align, credit, plain, wrap};
use pagemill_harness::stats::short;

use crate::{PRIVATE, RECEIVE, RECEIVE_SOCKET, WORK, WORK_SOCKET};

pub(crate) fn xdp(out: &mut dyn Write, records: &[Record], published: &Published) -> io::Result<()> {
    let of = |bench: &str, name: &str| records.iter().find(|record| (record.bench, record.name) == (bench, name));
    if !records.iter().any(|record| record.bench == RECEIVE) {
        return Ok(());
    }
    writeln!(out, "\nxdp: packets of 60 bytes received on a veth pair and dropped, copy mode")?;
    let loads = [
        (RECEIVE, WORK, "the kernel sends from another processor; medians of rounds in turns"),
        (RECEIVE_SOCKET, WORK_SOCKET, "the same, and a socket of AF_XDP sends"),
    ];
    for (receive, work, title) in loads {
        writeln!(out, "{title}")?;
        let mut table = plain(&["impl", "kpps", "least", "most", "runs", "ns/packet", "/ bare", "ns more"]);
        for record in records.iter().filter(|record| record.bench == receive) {
            let (spread, time) = (record.total, of(work, record.name));
            let bare = (of(receive, PRIVATE), of(work, PRIVATE));
            let shown = |figure: Option<f64>| figure.map_or("-".to_owned(), short);
            table.add_row([
                record.name.to_owned(),
                short(1e6 / spread.median),
                short(1e6 / spread.max),
                short(1e6 / spread.min),
                record.runs.to_string(),
                shown(time.map(|time| time.total.median)),
                shown(bare.0.map(|bare| bare.total.median / spread.median)),
                shown(bare.1.zip(time).map(|(bare, time)| time.total.median - bare.total.median)),
            ]);
        }
        align(&mut table, 1);
        writeln!(out, "{}", table.trim_fmt())?;
    }
    let what = "kpps: thousands of packets a second that arrived. ns/packet: the receiver's time, without turns that found \
                nothing. / bare: rate against private-list, a loop with its frames in a vector, which checks nothing. \
                pool: pages come back to the pool; release: they leave it for good, and 64 new ones are asked for singly, \
                as a list or as an array.";
    writeln!(out, "{}", wrap(what))?;
    credit(out, published, "xdp-redirect-2021")
}
