//! The table `rpc` of `pagemill bench`: what a thread of an NFS server does between two requests, in several ways; and what
//! a client gets of such a server, beside others.
//!
//! Its part `refill` fills the holes that a request left in the page array of its thread ([`pagemill_nfs::pages`]). Its part
//! `loopback` has one client (`client`, and for some of it `libnfs`) ask several `servers`.

mod client;
mod libnfs;
mod loopback;
mod refill;
mod report;
mod servers;
mod ways;

use pagemill_harness::bars::Limit::AtLeast;
use pagemill_harness::bars::{Bar, bar, least, median, ratio, speed, totals, turns_of};
use pagemill_harness::record::Record;
use pagemill_harness::rounds::ListOrder;
use pagemill_harness::{Error, Run, Table};

use loopback::{GANESHA, OURS, RANDOM, READ, READ_LIBNFS, UNFS3, WRITE, WRITE_LIBNFS};
use refill::{ALL, FIRST, LAST, SPREAD};
use ways::{ARRAY, SINGLE};

/// The table.
pub const TABLE: Table =
    Table { name: "rpc", steps: refill::STEPS + loopback::STEPS, measure: rpc, report: report::rpc, bars };

fn rpc(run: &mut Run<'_>) -> Result<Vec<Record>, Error> {
    let mut records = refill::refill(run)?;
    records.extend(loopback::loopback(run)?);
    Ok(records)
}

fn bars(records: &[Record]) -> Vec<Bar> {
    let turns =
        |bench, name, order| totals(records.iter().find(|r| (r.bench, r.name, r.order) == (bench, name, Some(order)))?);
    // Whatever order the pages came back in.
    let gain = |parts: &[&'static str]| {
        let orders = |part: &&'static str| refill::ORDERS.map(|order| (*part, order));
        let of = |(part, order): (_, ListOrder)| ratio(turns(part, SINGLE, order), turns(part, ARRAY, order));
        least(parts.iter().flat_map(orders).map(of))
    };
    let rate = |part, name| turns_of(records, part, name);
    let gain_on = |part, peer| speed(rate(part, OURS), rate(part, peer));
    let random = match gain_on(RANDOM, UNFS3) {
        Some(gain) => bar("rpc: random 4 KiB / unfs3", Some(gain), Some(AtLeast(1.0)), None),
        None => {
            let each = median(rate(RANDOM, OURS)).map(|ns| 1e6 / ns);
            bar("rpc: random 4 KiB, thousands a second", each, Some(AtLeast(90.0)), None)
        }
    };
    let bars = [
        bar("rpc: 1 MiB reads / ganesha", gain_on(READ, GANESHA), Some(AtLeast(1.2)), None),
        bar("rpc: 1 MiB writes / ganesha", gain_on(WRITE, GANESHA), Some(AtLeast(1.2)), None),
        bar("rpc: 1 MiB reads / ganesha, by libnfs", gain_on(READ_LIBNFS, GANESHA), Some(AtLeast(1.2)), None),
        bar("rpc: 1 MiB writes / ganesha, by libnfs", gain_on(WRITE_LIBNFS, GANESHA), Some(AtLeast(1.2)), None),
        random,
        bar("rpc: 64 in one slice: one by one / array", gain(&[FIRST, LAST]), Some(AtLeast(3.0)), Some(AtLeast(5.0))),
        bar("rpc: 64 scattered: one by one / array", gain(&[SPREAD]), None, None),
        bar("rpc: all 259: one by one / array", gain(&[ALL]), None, None),
    ];
    bars.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemill_harness::record::example;
    use pagemill_harness::rounds::Kind;

    #[test]
    fn the_bar_is_for_the_worse_order_and_the_worse_end_of_the_array() {
        let mut records = Vec::new();
        for (part, order, array) in [
            (FIRST, ListOrder::Random, 2.0),
            (FIRST, ListOrder::InOrder, 1.0),
            (LAST, ListOrder::Random, 2.5),
            (LAST, ListOrder::InOrder, 1.0),
        ] {
            for (name, ns) in [(ARRAY, array), (SINGLE, 10.0)] {
                records.push(Record { order: Some(order), ..example(part, name, Kind::Ours, 64, ns) });
            }
        }
        let found = bars(&records);
        assert_eq!((found.len(), found[0].figure), (1, 4.0));
        assert!(found[0].bar.unwrap().holds(3.0) && !found[0].bar.unwrap().holds(2.9));
        records.pop();
        assert_eq!(bars(&records), [], "not without every figure");
    }
}
