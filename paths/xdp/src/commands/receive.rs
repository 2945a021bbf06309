//! `pagemill xdp forward`, `drop` and `echo`.
use std::net::Ipv4Addr;

use clap::Args;

use super::Common;
use crate::Error;
use crate::echo::Echo;
use crate::interface::Interface;
use crate::lane::Job;
use crate::run::{Use, open, run};

/// Send what comes by one interface out of another, and back
#[derive(Args, Debug)]
pub(super) struct ForwardArgs {
    /// An interface
    #[arg(long, value_name = "IF")]
    from: String,

    /// The other
    #[arg(long, value_name = "IF")]
    to: String,

    #[command(flatten)]
    common: Common,
}

pub(super) fn forward(args: &ForwardArgs, notice: &mut dyn FnMut(&str)) -> Result<String, Error> {
    let settings = args.common.settings();
    let mut interfaces = vec![Interface::find(&args.from)?, Interface::find(&args.to)?];
    if interfaces[0].index == interfaces[1].index {
        let what = format!("--from and --to are both {}", args.from);
        return Err(Error::Request(what + ": name two interfaces"));
    }
    for interface in &mut interfaces {
        interface.listen_to_all()?;
    }
    let opened = open(interfaces, &settings, Use::Both, notice)?;
    run(opened, &settings, |_, interfaces| Job::Forward(others(interfaces)), notice)
}

/// For each port of a lane, by its interface's number, a port of the other interface.
fn others(interfaces: &[usize]) -> Vec<usize> {
    let of = |interface| (0..interfaces.len()).filter(move |&at| interfaces[at] == interface).collect::<Vec<_>>();
    let ports = [of(0), of(1)];
    let mut nth = [0, 0];
    let other = |&interface: &usize| {
        let to = &ports[1 - interface];
        nth[interface] += 1;
        to[(nth[interface] - 1) % to.len()]
    };
    interfaces.iter().map(other).collect()
}

/// Count packets and drop them
#[derive(Args, Debug)]
pub(super) struct DropArgs {
    /// The interface
    #[arg(value_name = "IF")]
    interface: String,

    #[command(flatten)]
    common: Common,
}

pub(super) fn drop(args: &DropArgs, notice: &mut dyn FnMut(&str)) -> Result<String, Error> {
    let settings = args.common.settings();
    let opened = open(vec![Interface::find(&args.interface)?], &settings, Use::Receive, notice)?;
    run(opened, &settings, |_, _| Job::Drop, notice)
}

/// Answer ARP and ping, and drop everything else
#[derive(Args, Debug)]
pub(super) struct EchoArgs {
    /// The interface
    #[arg(value_name = "IF")]
    interface: String,

    /// Addresses that answer
    #[arg(long = "address", value_name = "IP,...", required = true, value_delimiter = ',')]
    addresses: Vec<Ipv4Addr>,

    #[command(flatten)]
    common: Common,
}

pub(super) fn echo(args: &EchoArgs, notice: &mut dyn FnMut(&str)) -> Result<String, Error> {
    let settings = args.common.settings();
    let interface = Interface::find(&args.interface)?;
    let mac = interface.mac;
    let opened = open(vec![interface], &settings, Use::Both, notice)?;
    run(opened, &settings, |_, _| Job::Echo(Echo { mac, addresses: args.addresses.clone() }), notice)
}

#[cfg(test)]
mod tests {
    use super::others;

    #[test]
    fn every_port_has_one_on_the_other_side() {
        assert_eq!(others(&[0, 1]), [1, 0]);
        assert_eq!(others(&[0, 0, 1, 1]), [2, 3, 0, 1]);
        assert_eq!(others(&[0, 1, 1, 1]), [1, 0, 0, 0]);
    }
}
