//! `pagemill nvme identify`.
use std::fmt::Write;

use clap::Args;
use serde::Serialize;

use super::{json_line, open};
use crate::Error;
use crate::controller::NO_QUEUES;
use crate::identify::{ControllerInfo, NamespaceInfo};
use crate::pci::Address;

/// Pairs of queues that are asked for, to see how many it grants.
const MANY: u16 = 1024;

/// Show what a controller says of itself and of its namespaces
#[derive(Args, Debug)]
pub(super) struct IdentifyArgs {
    /// The drive's PCI address, as 0000:01:00.0
    #[arg(value_name = "DEV")]
    address: Address,

    /// Print it as a JSON object
    #[arg(long)]
    json: bool,
}

/// The report. The names are part of the program's interface.
#[derive(Serialize)]
struct Report {
    address: String,
    version: String,
    #[serde(flatten)]
    controller: ControllerInfo,
    /// Pairs of queues that it grants.
    queues: u16,
    /// Requests that each holds.
    depth: u16,
    active: Vec<NamespaceInfo>,
    /// Why others that are active are not driven here.
    unsupported: Vec<String>,
}

pub(super) fn run(args: &IdentifyArgs) -> Result<String, Error> {
    let mut asked = open::asked(args.address)?;
    let controller = &mut asked.controller;
    let (major, minor, patch) = controller.version();
    let info = controller.info()?;
    let queues = controller.grant(controller.doorbells().clamp(1, MANY))?.min(controller.doorbells());
    let numbers = controller.namespaces()?;
    let (mut active, mut unsupported) = (Vec::new(), Vec::new());
    for id in numbers {
        match controller.namespace(id) {
            Ok(namespace) => active.extend(namespace),
            Err(Error::Unsupported(why)) => unsupported.push(why),
            Err(error) => return Err(error),
        }
    }
    let report = Report {
        address: args.address.to_string(),
        version: format!("{major}.{minor}.{patch}"),
        controller: info,
        queues,
        depth: controller.longest_queue() - 1,
        active,
        unsupported,
    };
    controller.shut_down(NO_QUEUES, report.controller.shutdown_limit())?;
    Ok(if args.json { json_line(&report) } else { report.table() })
}

impl Report {
    fn table(&self) -> String {
        let ControllerInfo { vendor, serial, model, firmware, max_transfer, has_write_cache, .. } = &self.controller;
        let most = max_transfer.map_or_else(|| "no limit".to_owned(), |bytes| format!("{} KiB", bytes >> 10));
        let rows = [
            ("address", self.address.clone()),
            ("model", model.clone()),
            ("serial", serial.clone()),
            ("firmware", firmware.clone()),
            ("vendor", format!("{vendor:04x}")),
            ("NVMe", self.version.clone()),
            ("a command moves", most),
            ("queues", format!("{} pairs, of {} requests", self.queues, self.depth)),
            ("write cache", if *has_write_cache { "yes" } else { "no" }.to_owned()),
        ];
        let mut text = String::new();
        for (name, value) in rows {
            // Writing to a string can't fail.
            let _ = writeln!(text, "{name:<16}{value}");
        }
        for namespace in &self.active {
            let NamespaceInfo { id, blocks, block_size, metadata, is_protected, .. } = namespace;
            let mib = namespace.bytes() as f64 / f64::from(1 << 20);
            let extra = if *metadata > 0 { format!(", {metadata} bytes of metadata each") } else { String::new() };
            let guard = if *is_protected { ", protected" } else { "" };
            let what = format!("{blocks} blocks of {block_size} bytes, {mib:.1} MiB{extra}{guard}");
            let _ = writeln!(text, "{:<16}{what}", format!("namespace {id}"));
        }
        for why in &self.unsupported {
            let _ = writeln!(text, "{:<16}{why}", "not driven");
        }
        text
    }
}
