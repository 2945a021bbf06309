//! `pagemill info`: what the library found on this machine, and a zone's state after a few operations.
use std::fmt::Write;
use std::fs;

use clap::Args;
use pagemill::{Allocator, Block, Bulk, Error, Gfp, Order, PAGE_SIZE, Page, PageList, self_test};
use serde::Serialize;

use crate::allocator::default_allocator;
use crate::failure::{Failure, print, said};

/// Show what Pagemill found here: backend and why, CPUs, arena, a zone
///
/// It allocates a few pages, frees half of them, and prints the zone in the format
/// of /proc/buddyinfo, folded at 80 columns, and the counters in that of
/// /proc/vmstat. With --json, both are as the library prints them.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment, after_help = AFTER_HELP)]
pub(crate) struct InfoArgs {
    /// Print it as a JSON object
    #[arg(long)]
    json: bool,
}

const AFTER_HELP: &str = "\
Examples:
  pagemill info
  pagemill info --json | jq .backend
  PAGEMILL_BACKEND=portable pagemill info";

/// The report. The names are part of the program's interface.
#[derive(Serialize)]
struct Info {
    version: &'static str,
    kernel: String,
    processor: String,
    backend: String,
    backend_why: String,
    /// The result of the self-test of restartable sequences.
    rseq: String,
    cpus_with_lists: usize,
    cpus_usable: usize,
    page_size: usize,
    system_page_size: usize,
    /// The setting in /sys/kernel/mm/transparent_hugepage/enabled.
    huge_pages: String,
    arena_pages: usize,
    arena_bytes: usize,
    metadata_bits_per_frame: f64,
    detection_bytes_per_frame: u32,
    link_bytes_per_frame: u32,
    full_states: bool,
    io_uring: String,
    buddyinfo: String,
    vmstat: String,
}

pub(crate) fn run(args: &InfoArgs) -> Result<(), Failure> {
    let allocator = default_allocator(None, None)?;
    let kept = warm_up(&allocator).map_err(|error| Failure::new("can't take a few pages", error))?;
    let info = Info::of(&allocator);
    drop(kept);
    // It has only numbers and strings, so it can be written as JSON.
    print(&if args.json { format!("{}\n", serde_json::json!(info)) } else { info.text() })
}

/// Allocates a page, 256 more in bulk and a block, and frees half of the 256.
fn warm_up(allocator: &Allocator) -> Result<(Page, PageList, Block), Error> {
    let page = allocator.alloc_page(Gfp::KERNEL)?;
    let mut list = PageList::new();
    allocator.alloc_pages_bulk_list(Bulk::exact(256), &mut list)?;
    let block = allocator.alloc_pages(Gfp::KERNEL, Order::new(9)?)?;
    for _ in 0..128 {
        drop(list.pop());
    }
    Ok((page, list, block))
}

impl Info {
    fn of(allocator: &Allocator) -> Self {
        let system = rustix::system::uname();
        let forced = std::env::var("PAGEMILL_BACKEND").ok().filter(|name| !name.is_empty());
        let rseq = match self_test() {
            Ok(()) => "the self-test passed".to_owned(),
            Err(why) => format!("does not work here: {why}"),
        };
        let backend_why = match forced {
            Some(_) => "PAGEMILL_BACKEND says so".to_owned(),
            None => format!("restartable sequences: {rseq}"),
        };
        let pages = allocator.managed_pages().get();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            kernel: format!("{} {}", system.sysname().to_string_lossy(), system.release().to_string_lossy()),
            processor: processor(),
            backend: allocator.backend().to_string(),
            backend_why,
            rseq,
            cpus_with_lists: allocator.cpus(),
            cpus_usable: std::thread::available_parallelism().map_or(1, usize::from),
            page_size: PAGE_SIZE,
            system_page_size: rustix::param::page_size(),
            huge_pages: huge_pages(),
            arena_pages: pages,
            arena_bytes: pages * PAGE_SIZE,
            metadata_bits_per_frame: allocator.metadata_bits_per_frame(),
            detection_bytes_per_frame: 1,
            link_bytes_per_frame: 4,
            full_states: cfg!(any(debug_assertions, feature = "full-states")),
            io_uring: match io_uring::IoUring::new(1) {
                Ok(_) => "available".to_owned(),
                Err(error) => format!("not available: {}", said(&error)),
            },
            buddyinfo: allocator.buddyinfo().to_string(),
            vmstat: allocator.vmstat().to_string(),
        }
    }

    fn text(&self) -> String {
        let gib = self.arena_bytes as f64 / (1u64 << 30) as f64;
        let rows = [
            ("pagemill", self.version.to_owned()),
            ("machine", format!("{}, {}", self.kernel, self.processor)),
            ("backend", format!("{} ({})", self.backend, self.backend_why)),
            ("CPUs", format!("{} with lists, {} usable by this process", self.cpus_with_lists, self.cpus_usable)),
            ("page size", format!("{} bytes; the system's {}", self.page_size, self.system_page_size)),
            ("2 MiB pages", self.huge_pages.clone()),
            (
                "default arena",
                format!("{} pages, {gib:.1} GiB of address space, committed when touched", self.arena_pages),
            ),
            (
                "metadata",
                format!(
                    "{:.2} bits free/used, {} byte of state, {} bytes of link a frame",
                    self.metadata_bits_per_frame, self.detection_bytes_per_frame, self.link_bytes_per_frame
                ),
            ),
            ("misuse", if self.full_states { "detected, with full states" } else { "detected" }.to_owned()),
            ("io_uring", self.io_uring.clone()),
        ];
        let mut text = String::new();
        for (name, value) in rows {
            // Writing to a string can't fail.
            let _ = writeln!(text, "{name:<14} {value}");
        }
        let _ = write!(
            text,
            "\nWith one page, 128 of 256 taken in bulk, and one block of order 9 handed out:\n\n{}\n{}",
            with_orders(&self.buddyinfo),
            self.vmstat
        );
        text
    }
}

/// Writes the orders above the columns of each zone's line of free blocks, and folds the lines to 80 columns.
fn with_orders(zones: &str) -> String {
    let mut text = String::new();
    for line in zones.lines() {
        let words: Vec<_> = line.split_whitespace().collect();
        // "Node", its number, "zone", its name; then a count for each order.
        let (zone, counts) = words.split_at(words.len().min(4));
        let name = zone.join(" ");
        for (first, counts) in (0..).step_by(8).zip(counts.chunks(8)) {
            let heads: String = (first..).zip(counts).map(|(order, _)| format!("{order:>7}")).collect();
            let counts: String = counts.iter().map(|count| format!("{count:>7}")).collect();
            // Writing to a string can't fail.
            let _ = writeln!(text, "{:<23}{heads}\n{name:<23}{counts}", "free blocks of order");
        }
    }
    text
}

fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or(std::env::consts::ARCH, |(_, name)| name).to_owned()
}

fn huge_pages() -> String {
    match fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled") {
        Ok(text) => match text.split_once('[').and_then(|(_, rest)| rest.split_once(']')) {
            Some(("never", _)) => "never".to_owned(),
            Some((setting, _)) => format!("asked for, and the system allows them ({setting})"),
            None => "unknown".to_owned(),
        },
        Err(_) => "not in this kernel".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn orders_are_written_above_the_free_blocks_of_each_zone() {
        let text = super::with_orders("Node 0, zone   Normal 0 1\nNode 1, zone   Normal 1 2 3 4 5 6 7 8 9");
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
        assert_eq!(
            text.lines().map(words).collect::<Vec<_>>(),
            [
                "free blocks of order 0 1",
                "Node 0, zone Normal 0 1",
                "free blocks of order 0 1 2 3 4 5 6 7",
                "Node 1, zone Normal 1 2 3 4 5 6 7 8",
                "free blocks of order 8",
                "Node 1, zone Normal 9",
            ]
        );
    }
}
