//! `pagemill nvme smart`.
use std::fmt::Write;

use clap::Args;
use serde::Serialize;

use super::{json_line, open};
use crate::Error;
use crate::controller::NO_QUEUES;
use crate::logs::{ErrorEntry, Health, Warning};
use crate::pci::Address;

/// Show a drive's health, and its latest errors
///
/// Critical warnings come first, each with what to do. The exit code is 0 even
/// if there are some: a script looks at "warnings" in the output of --json.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(super) struct SmartArgs {
    /// The drive's PCI address, as 0000:01:00.0
    #[arg(value_name = "DEV")]
    address: Address,

    /// How many of the latest errors to show
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(0..=64))]
    errors: u16,

    /// Print it as a JSON object
    #[arg(long)]
    json: bool,
}

/// The report. The names are part of the program's interface.
#[derive(Serialize)]
struct Report {
    address: String,
    model: String,
    serial: String,
    warnings: Vec<Warning>,
    #[serde(flatten)]
    health: Health,
    errors: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    number: u64,
    queue: u16,
    command: u16,
    /// The status's type and code.
    status: [u8; 2],
    message: String,
    lba: u64,
    namespace: u32,
}

pub(super) fn run(args: &SmartArgs) -> Result<String, Error> {
    let mut asked = open::asked(args.address)?;
    let controller = &mut asked.controller;
    let info = controller.info()?;
    let health = controller.health_log()?;
    let errors = controller.error_log(args.errors.min(info.error_entries))?;
    controller.shut_down(NO_QUEUES, info.shutdown_limit())?;
    let (address, warnings) = (args.address.to_string(), health.warnings());
    let errors = errors.into_iter().map(Row::new).collect();
    let report = Report { address, model: info.model, serial: info.serial, warnings, health, errors };
    Ok(if args.json { json_line(&report) } else { report.table() })
}

impl Row {
    fn new(entry: ErrorEntry) -> Self {
        let ErrorEntry { number, queue, command, status, lba, namespace } = entry;
        let message = status.to_string();
        Self { number, queue, command, status: [status.kind(), status.code()], message, lba, namespace }
    }
}

impl Report {
    fn table(&self) -> String {
        let health = &self.health;
        let degrees: Vec<_> = health.sensors_c.iter().map(ToString::to_string).collect();
        let spare = format!("{} % left, it warns below {} %", health.spare_percent, health.spare_threshold_percent);
        let rows = [
            ("address", self.address.clone()),
            ("model", self.model.clone()),
            ("serial", self.serial.clone()),
            ("temperature", format!("{} °C", health.temperature_c)),
            ("sensors", if degrees.is_empty() { "none".to_owned() } else { degrees.join(", ") + " °C" }),
            ("too hot", format!("{} min warm, {} min critical", health.warm_minutes, health.hot_minutes)),
            ("spare blocks", spare),
            ("life used", format!("{} %", health.used_percent)),
            ("read", format!("{}, {} commands", bytes(health.bytes_read), health.reads)),
            ("written", format!("{}, {} commands", bytes(health.bytes_written), health.writes)),
            ("busy", format!("{} min", health.busy_minutes)),
            ("on", format!("{} h, switched on {} times", health.power_on_hours, health.power_cycles)),
            ("power lost", format!("{} times without a shutdown", health.unsafe_shutdowns)),
            ("medium", format!("{} errors", health.media_errors)),
            ("error log", format!("{} entries so far", health.error_entries)),
        ];
        let mut text = String::new();
        // Writing to a string can't fail.
        for Warning { what, next, .. } in &self.warnings {
            let _ = writeln!(text, "CRITICAL: {what}\n  {next}");
        }
        for (name, value) in rows {
            let _ = writeln!(text, "{name:<14}{value}");
        }
        for Row { number, queue, message, lba, namespace, .. } in &self.errors {
            let _ = writeln!(text, "error {number}, queue {queue}:\n  namespace {namespace}, block {lba}\n  {message}");
        }
        text
    }
}

/// Bytes in units of a thousand, as drives are sold.
fn bytes(bytes: u128) -> String {
    const UNITS: [&str; 7] = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1000.0, unit + 1);
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;
    use crate::spec::PAGE;

    /// Numbers of any drive that lives for a thousand years.
    #[test]
    fn the_table_fits_80_columns_and_names_warnings_with_their_next_steps() {
        let mut page = [0; PAGE];
        page[0] = 0xff;
        page[1..8].fill(0xff);
        page[200..216].fill(0xff);
        for at in (32..192).step_by(16) {
            page[at..at + 8].copy_from_slice(&1_000_000_000_000_000u64.to_le_bytes());
        }
        page[192..200].fill(0xff);
        let health = Health::read(&page);
        let errors = (0..1 << 11).map(|status| ErrorEntry {
            number: u64::MAX,
            queue: u16::MAX,
            command: u16::MAX,
            status: Status(status),
            lba: 1 << 55,
            namespace: 1000,
        });
        let report = Report {
            address: "10000:ff:1f.7".to_owned(),
            model: "m".repeat(40),
            serial: "s".repeat(20),
            warnings: health.warnings(),
            health,
            errors: errors.map(Row::new).collect(),
        };
        let table = report.table();
        let longest = table.lines().max_by_key(|line| line.chars().count()).unwrap();
        assert!(longest.chars().count() <= 80, "{longest}");
        assert!(table.starts_with("CRITICAL: few spare blocks are left\n  copy its data and replace the drive\n"));
        assert!(table.contains("read          512.0 EB, 1000000000000000 commands"), "{table}");
        let json: serde_json::Value = serde_json::from_str(&json_line(&report)).unwrap();
        assert_eq!(json["temperature_c"], 65_535 - 273);
        assert_eq!(json["errors"][0x80]["message"], "LBA out of range (status 0/80h)");
    }

    #[test]
    fn bytes_have_units_of_a_thousand() {
        assert_eq!(bytes(0), "0.0 B");
        assert_eq!(bytes(1_536_000), "1.5 MB");
        assert_eq!(bytes(25_000_000_000_000_000_000_000), "25000.0 EB");
    }
}
