//! The machine that the figures were taken on: processor, kernel, build; and where the measuring threads run.

use std::ops::Range;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use std::{fs, io};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The machine and the build, as the header of every report names them.
#[derive(Debug, Clone)]
pub struct Machine {
    /// The processor's model.
    pub cpu: String,
    /// The system and its release.
    pub kernel: String,
    /// Compiler, optimisation level and what else the build was asked for.
    pub build: String,
    /// Processors that this process may use, in ascending order.
    pub allowed: Vec<usize>,
    /// Whether Pagemill keeps every frame's full state. That costs two stores a page.
    pub has_full_states: bool,
}

impl Machine {
    /// The machine that this runs on.
    pub fn here() -> Machine {
        let uname = rustix::system::uname();
        Machine {
            cpu: cpu_model().unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            kernel: format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy()),
            build: format!("{}, opt-level {}{}", env!("BENCH_RUSTC"), env!("BENCH_OPT_LEVEL"), build_flags()),
            allowed: allowed_cpus(),
            has_full_states: cfg!(any(debug_assertions, feature = "full-states")),
        }
    }

    /// Stands in where a test has no use for a real machine.
    pub fn unknown() -> Machine {
        Machine {
            cpu: "unknown".to_owned(),
            kernel: "unknown".to_owned(),
            build: "unknown".to_owned(),
            allowed: vec![0],
            has_full_states: false,
        }
    }

    /// The processor for tables with one thread: the last one, since the first takes most interrupts.
    pub fn main_cpu(&self) -> usize {
        self.allowed.last().copied().unwrap_or(0)
    }

    /// A second processor, on another core than [`Machine::main_cpu`] if there is one.
    pub fn second_cpu(&self) -> Option<usize> {
        let main = self.main_cpu();
        let siblings = core_siblings(main);
        let others = || self.allowed.iter().rev().copied().filter(|&cpu| cpu != main);
        others().find(|cpu| !siblings.contains(cpu)).or_else(|| others().next())
    }
}

/// Today in UTC, as `2026-11-25`.
pub fn today() -> String {
    date(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / 86400))
}

/// The date so many days after 1970-01-01.
fn date(mut day: u64) -> String {
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while day >= 365 + u64::from(is_leap(year)) {
        day -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for days in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if day < days {
            break;
        }
        day -= days;
        month += 1;
    }
    format!("{year}-{month:02}-{:02}", day + 1)
}

fn build_flags() -> String {
    let mut flags = match env!("BENCH_RUSTFLAGS") {
        "" => String::new(),
        flags => format!(", RUSTFLAGS {flags}"),
    };
    if cfg!(debug_assertions) {
        flags.push_str(", DEBUG ASSERTIONS ON: these figures mean nothing");
    }
    flags
}

fn cpu_model() -> Option<String> {
    let info = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn allowed_cpus() -> Vec<usize> {
    match sched_getaffinity(None) {
        Ok(set) => (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect(),
        Err(_) => vec![0],
    }
}

/// The processors of `cpu`'s core, itself included; empty if the system does not tell.
fn core_siblings(cpu: usize) -> Vec<usize> {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    fs::read_to_string(path).map(|list| parse_cpu_list(&list)).unwrap_or_default()
}

/// Reads the kernel's `0-2,5` notation, and skips parts that it can't read.
fn parse_cpu_list(list: &str) -> Vec<usize> {
    let mut cpus = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) {
            cpus.extend(first..=last);
        }
    }
    cpus
}

/// Binds the calling thread to one processor.
pub fn pin_to(cpu: usize) -> rustix::io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set)
}

/// Lets the calling thread run on all of `cpus` again.
pub fn pin_to_all(cpus: &[usize]) -> rustix::io::Result<()> {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(cpu));
    sched_setaffinity(None, &set)
}

/// How often the system has preempted the calling thread so far.
pub fn preemptions() -> i64 {
    // SAFETY: all zeros is a valid value of this plain structure.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is a structure of the kind that the kernel fills.
    let rc = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    debug_assert_eq!(rc, 0, "the arguments are valid");
    usage.ru_nivcsw
}

/// Memory that is available without swapping, in bytes, as the kernel estimates it.
pub fn available_bytes() -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// Bytes in transparent 2 MiB pages, as the kernel counts them, of the mappings that overlap `addresses`.
pub fn huge_bytes(addresses: &Range<usize>) -> io::Result<usize> {
    Ok(huge_bytes_of(&fs::read_to_string("/proc/self/smaps")?, addresses))
}

fn huge_bytes_of(smaps: &str, addresses: &Range<usize>) -> usize {
    let mut kib = 0;
    let mut is_inside = false;
    for line in smaps.lines() {
        let first = line.split_whitespace().next().unwrap_or_default();
        let hex = |digits| usize::from_str_radix(digits, 16).ok();
        if let Some((start, end)) = first.split_once('-').and_then(|(start, end)| hex(start).zip(hex(end))) {
            is_inside = start < addresses.end && addresses.start < end;
        } else if is_inside && first == "AnonHugePages:" {
            kib += line.split_whitespace().nth(1).and_then(|kib| kib.parse::<usize>().ok()).unwrap_or(0);
        }
    }
    kib * 1024
}

/// How many pages of `addresses`, which begin at a page, have memory behind them.
pub fn committed_pages(addresses: &Range<usize>) -> io::Result<usize> {
    let mut pages = vec![0u8; addresses.len().div_ceil(crate::PAGE_BYTES)];
    let start = std::ptr::with_exposed_provenance_mut(addresses.start);
    // SAFETY: it writes a byte a page, and `pages` has so many.
    match unsafe { libc::mincore(start, addresses.len(), pages.as_mut_ptr()) } {
        0 => Ok(pages.iter().filter(|&&page| page & 1 == 1).count()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Nanoseconds between two readings of the clock with nothing between them: the clock's own share of a measured
/// interval. It is the mean of many pairs, since a single pair is too coarse, and the smallest of many such means over
/// some time, since other work for a few milliseconds would spoil every subtraction.
pub fn clock_overhead_ns() -> f64 {
    const READINGS: u32 = 2_000;
    let mut best = f64::INFINITY;
    for _ in 0..100 {
        std::thread::sleep(std::time::Duration::from_millis(2));
        let mut sum = std::time::Duration::ZERO;
        for _ in 0..READINGS {
            let start = Instant::now();
            sum += Instant::now() - start;
        }
        best = best.min(sum.as_nanos() as f64 / f64::from(READINGS));
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_are_read_in_the_kernels_notation() {
        assert_eq!(parse_cpu_list("0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(parse_cpu_list("7"), [7]);
        assert_eq!(parse_cpu_list(""), [0; 0]);
    }

    #[test]
    fn huge_bytes_counts_only_the_given_mappings() {
        let smaps = "1000-3000 rw-p 00000000 00:00 0\nAnonHugePages:      2048 kB\n\
                     3000-5000 rw-p 00000000 00:00 0 [heap]\nRss: 8 kB\nAnonHugePages:      4096 kB\n";
        let at = |addresses| huge_bytes_of(smaps, &addresses) >> 20;
        assert_eq!((at(0x2000..0x3000), at(0x2000..0x3001), at(0x4000..0x9000), at(0x5000..0x9000)), (2, 6, 4, 0));
    }

    #[test]
    fn days_are_counted_across_leap_years_and_ends_of_months() {
        let days = [0, 58, 59, 364, 365, 11016, 11017, 19782, 20782, 47540, 47541];
        let dates = ["1970-01-01", "1970-02-28", "1970-03-01", "1970-12-31", "1971-01-01", "2000-02-29"];
        let more = ["2000-03-01", "2024-02-29", "2026-11-25", "2100-02-28", "2100-03-01"];
        assert_eq!(days.map(date).to_vec(), [&dates[..], &more].concat());
    }

    #[test]
    fn written_pages_are_committed() {
        let mut pages = vec![0u8; 64 * 4096];
        let start = pages.as_ptr().expose_provenance().next_multiple_of(4096);
        pages.fill(1);
        assert_eq!(committed_pages(&(start..start + 60 * 4096)).unwrap(), 60);
        assert!(committed_pages(&(start + 1..start + 4096)).is_err(), "no page begins there");
    }

    #[test]
    fn the_second_cpu_differs_from_the_first() {
        let mut machine = Machine::unknown();
        assert_eq!((machine.main_cpu(), machine.second_cpu()), (0, None));
        machine.allowed = vec![0, 1];
        assert_eq!((machine.main_cpu(), machine.second_cpu()), (1, Some(0)));
    }

    #[test]
    fn this_machine_has_a_name_and_a_clock() {
        let here = Machine::here();
        assert!(!here.cpu.is_empty() && here.kernel.starts_with("Linux"), "{here:?}");
        assert!(!here.allowed.is_empty());
        let overhead = clock_overhead_ns();
        assert!(overhead > 0.0 && overhead < 100_000.0, "{overhead}");
    }
}
