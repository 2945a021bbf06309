//! `pagemill xdp generate`.
use std::net::Ipv4Addr;

use clap::Args;

use super::Common;
use crate::Error;
use crate::generate::{Ends, packet};
use crate::interface::{Interface, Mac};
use crate::lane::{Generate, Job};
use crate::run::{self, Use, open};

/// Send numbered UDP packets, as fast as it goes or at a rate
#[derive(Args, Debug)]
pub(super) struct GenerateArgs {
    /// The interface
    #[arg(value_name = "IF")]
    interface: String,

    /// The receiver's Ethernet address
    #[arg(long, value_name = "MAC")]
    mac: Mac,

    /// The sender's IPv4 address; the default is for measuring (RFC 2544)
    #[arg(long, value_name = "IP", default_value = "198.18.0.1")]
    source: Ipv4Addr,

    /// The receiver's
    #[arg(long, value_name = "IP", default_value = "198.19.0.1")]
    destination: Ipv4Addr,

    /// Bytes of a packet, with its Ethernet header
    #[arg(long, value_name = "BYTES", default_value_t = 60, value_parser = clap::value_parser!(u16).range(60..=4096))]
    size: u16,

    /// Packets in all [default: until it is stopped]
    #[arg(long, value_name = "N")]
    count: Option<u64>,

    /// Packets a second [default: as many as it can]
    #[arg(long, value_name = "N", value_parser = rate)]
    rate: Option<f64>,

    #[command(flatten)]
    common: Common,
}

fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate| (0.1..=1e9).contains(rate));
    rate.ok_or_else(|| "packets a second, from 0.1 to 1e9".to_owned())
}

pub(super) fn run(args: &GenerateArgs, notice: &mut dyn FnMut(&str)) -> Result<String, Error> {
    let settings = args.common.settings();
    let interface = Interface::find(&args.interface)?;
    let (size, largest) = (usize::from(args.size), interface.mtu + 14);
    if size > largest {
        let (name, mtu) = (&interface.name, interface.mtu);
        return Err(Error::Request(format!("--size {size}: {name} sends up to {largest} bytes (its MTU is {mtu})")));
    }
    let ends = Ends { macs: [interface.mac, args.mac], addresses: [args.source, args.destination] };
    let opened = open(vec![interface], &settings, Use::Send, notice)?;
    let lanes = opened.lanes() as u64;
    let job = |lane: usize, _: &[usize]| {
        let lane = lane as u64;
        // Packet n is of lane n % lanes.
        let left = args.count.map_or(u64::MAX, |count| (count.saturating_sub(lane)).div_ceil(lanes));
        let rate = args.rate.map(|rate| rate / lanes as f64);
        Job::Generate(Generate::new(packet(&ends, size), lane, lanes, left, rate))
    };
    run::run(opened, &settings, job, notice)
}
