//! `pagemill nvme bench`.
use std::fmt::Write;
use std::time::Duration;

use clap::Args;
use pagemill_command::size;
use serde::Serialize;

use super::json_line;
use super::open::DriveArgs;
use super::signals::Stop;
use crate::Error;
use crate::bench::{self, Figures, Load};

/// Time random reads, or writes, of one size
#[derive(Args, Debug)]
pub(super) struct BenchArgs {
    #[command(flatten)]
    drive: DriveArgs,

    /// How long
    #[arg(long, value_name = "N", default_value_t = 5.0)]
    seconds: f64,

    /// Bytes of a request, or with K or M
    #[arg(long, value_name = "BYTES", default_value = "4K", value_parser = size)]
    size: u64,

    /// Requests that are handed in at once
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,

    /// Percent that write, over what is there
    #[arg(long, value_name = "PERCENT", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=100))]
    writes: u32,

    /// What is on the drive may be lost
    #[arg(long)]
    overwrite: bool,

    /// Where the random places begin
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Print the figures as a JSON object
    #[arg(long)]
    json: bool,
}

/// The record of `--json`. The names are part of the program's interface.
#[derive(Serialize)]
struct Record<'a> {
    address: String,
    model: &'a str,
    size: u64,
    writes: u32,
    depth: usize,
    batch: u32,
    is_polled: bool,
    #[serde(flatten)]
    figures: &'a Figures,
}

pub(super) fn run(args: &BenchArgs, notice: &mut dyn FnMut(&str)) -> Result<String, Error> {
    if args.writes > 0 && !args.overwrite {
        let why = "--writes destroys what is on the drive; say --overwrite if it may".to_owned();
        return Err(Error::Request(why));
    }
    let time = Duration::try_from_secs_f64(args.seconds)
        .map_err(|_| Error::Request(format!("--seconds {}: not a time", args.seconds)))?;
    let stop = Stop::watch()?;
    let (drive, queue) = args.drive.open()?;
    let load = Load {
        writes: args.writes,
        size: usize::try_from(args.size).unwrap_or(usize::MAX),
        depth: args.drive.in_all(),
        batch: args.batch as usize,
        time,
        seed: args.seed,
    };
    let Load { depth, writes, size, .. } = load;
    let seconds = args.seconds;
    notice(&format!("random requests of {size} bytes, {writes} % writes, {depth} at a time, for {seconds} s"));
    let figures = bench::run(&drive, &queue, &load, &mut args.drive.checking(&drive, &stop, notice));
    drive.said().iter().for_each(|said| notice(said));
    let figures = match figures {
        Ok(figures) => figures,
        Err(interrupted @ Error::Interrupted { .. }) => {
            // What was begun is finished first.
            drive.shut_down()?;
            return Err(interrupted);
        }
        Err(error) => return Err(error),
    };
    let record = Record {
        address: args.drive.address.to_string(),
        model: &drive.info().model,
        size: args.size,
        writes: args.writes,
        depth: load.depth,
        batch: args.batch,
        is_polled: args.drive.poll,
        figures: &figures,
    };
    let text = if args.json { json_line(&record) } else { table(&record, &drive.pools()) };
    drive.shut_down()?;
    Ok(text)
}

fn table(record: &Record<'_>, pools: &str) -> String {
    let Record { address, model, size, writes, depth, batch, figures, .. } = record;
    let Figures { seconds, requests, iops, mib_per_s, p50_us, p90_us, p99_us, p99_9_us, max_us, short, counts } =
        figures;
    let how = if record.is_polled { "polled" } else { "by interrupts" };
    let mut text = String::new();
    // Writing to a string can't fail.
    let _ = writeln!(text, "{address} ({model}): random requests of {size} bytes, {writes} % writes");
    let _ = writeln!(text, "depth {depth}, batches of {batch}, {how}; {requests} requests in {seconds:.2} s");
    let _ = writeln!(text, "{iops:.0} IOPS, {mib_per_s:.1} MiB/s");
    let _ = writeln!(
        text,
        "us: half within {p50_us:.1}, 90 % {p90_us:.1}, 99 % {p99_us:.1}, 99.9 % {p99_9_us:.1}, all {max_us:.1}"
    );
    if *short > 0 || counts.resets + counts.aborts + counts.retries > 0 {
        let (again, aborts, resets) = (counts.retries, counts.aborts, counts.resets);
        let _ = writeln!(text, "memory short {short} times; {again} tried again, {aborts} aborts, {resets} resets");
    }
    text + pools
}
