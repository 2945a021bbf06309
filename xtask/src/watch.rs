//! Waits for a child process, and ends it when it runs for too long.
//!
//! The limit is processor time, which other programs on the machine do not use up. It counts the child and all that the child
//! started. A child that uses no processor time for twelve minutes is ended too. So a limit means the same on a busy machine as
//! on an idle one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};

/// A child that uses no processor time for so long waits for an event that does not come. A test gives up after ten minutes, the
/// child of a fork after eleven; in the twelfth they report it.
pub(crate) const IDLE: Duration = Duration::from_secs(720);
/// Processor time within [`IDLE`] that counts as none: a program that polls now and then uses that much.
const NONE: Duration = Duration::from_secs(5);
/// How long to wait for a killed process. The kernel may hold it for ever.
const GONE: Duration = Duration::from_secs(60);
/// How often the processor time of a child is added up.
const LOOK: Duration = Duration::from_secs(1);
/// Ticks of `/proc/PID/stat` in a second; the same on every Linux that Rust runs on.
const TICKS_PER_S: u64 = 100;

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// It ended by itself.
    Itself(ExitStatus),
    /// It was ended: it had used this much processor time, its limit.
    OutOfTime(Duration),
    /// It was ended: it had used no processor time for so long.
    Idle(Duration),
    /// The user interrupted the checks.
    Interrupted,
}

impl End {
    /// Its exit code, if it ended by itself.
    pub(crate) fn code(self) -> Option<i32> {
        if let Self::Itself(status) = self { status.code() } else { None }
    }

    /// True when it ended by itself, with success.
    pub(crate) fn is_ok(self) -> bool {
        matches!(self, Self::Itself(status) if status.success())
    }
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Itself(status) => match status.code() {
                Some(code) => write!(f, "ended with {code}"),
                None => write!(f, "ended by {status}"),
            },
            Self::OutOfTime(limit) => write!(f, "was ended: it used {} s of processor time", limit.as_secs()),
            Self::Idle(idle) => write!(f, "was ended: it used no processor time for {} s", idle.as_secs()),
            Self::Interrupted => write!(f, "was interrupted"),
        }
    }
}

/// True after SIGINT, SIGTERM or SIGHUP: children are then ended, and no more are started.
pub(crate) fn is_interrupted() -> bool {
    interrupted().load(Ordering::Relaxed)
}

fn interrupted() -> &'static Arc<AtomicBool> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    static FLAG: std::sync::OnceLock<Arc<AtomicBool>> = std::sync::OnceLock::new();
    FLAG.get_or_init(|| {
        let flag = Arc::new(AtomicBool::new(false));
        // Under nohup(1), SIGHUP stays ignored.
        let is_under_nohup = fs::read_to_string("/proc/self/status").is_ok_and(|text| ignores_hup(&text));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            if signal == SIGHUP && is_under_nohup {
                continue;
            }
            // The second signal ends this program at once.
            signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&flag))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&flag)))
                .expect("these signals can be caught");
        }
        flag
    })
}

/// Whether SIGHUP, the lowest bit, is ignored according to proc(5)'s `status`.
fn ignores_hup(status: &str) -> bool {
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).is_some_and(|bits| bits & 1 == 1)
}

/// Starts `command` in a process group of its own and waits for it. Returns how it ended, and the processor time that it and its
/// descendants used. `limit` is the processor time that they may use, `idle` how long they may use none.
pub(crate) fn run(command: &mut Command, limit: Duration, idle: Duration) -> io::Result<(End, Duration)> {
    interrupted();
    let mut child = command.process_group(0).spawn()?;
    let pid = Pid::from_child(&child);
    let mut nap = Duration::from_millis(1);
    let mut looked = Instant::now();
    let (mut used, mut used_when_it_moved, mut still) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
    let end = loop {
        // It stays a zombie until its processor time has been read.
        let ended = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT)?;
        if ended.is_some() {
            used = used.max(stat(pid.as_raw_nonzero().get()).map_or(used, |stat| stat.used));
            // End what it has left running. The group's number is not reused before the child has been waited for.
            let _ = kill_process_group(pid, Signal::KILL);
            break End::Itself(child.wait()?);
        }
        if is_interrupted() {
            break End::Interrupted;
        }
        if looked.elapsed() >= LOOK {
            // A late look counts for no more than three: the whole machine may have stood still.
            still += looked.elapsed().min(3 * LOOK);
            looked = Instant::now();
            // The time of an orphan that has ended is lost, so the sum may shrink.
            used = used.max(of_tree(pid));
            if used >= used_when_it_moved + NONE {
                (used_when_it_moved, still) = (used, Duration::ZERO);
            }
            if used > limit {
                break End::OutOfTime(limit);
            }
            if still > idle {
                waits(pid).iter().for_each(|line| eprintln!("    {line}"));
                break End::Idle(idle);
            }
        }
        std::thread::sleep(nap);
        nap = (nap * 2).min(Duration::from_millis(50));
    };
    if !matches!(end, End::Itself(_)) {
        end_all(&mut child)?;
    }
    Ok((end, used))
}

/// What each thread of a tree waits for: a function of the kernel, and the system call with its arguments (proc(5)).
fn waits(root: Pid) -> Vec<String> {
    let mut lines = Vec::new();
    for pid in tree(root).into_keys() {
        for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let of = |name| fs::read_to_string(task.path().join(name)).unwrap_or_else(|error| error.to_string());
            let (name, waits, call) = (of("comm"), of("wchan"), of("syscall"));
            let tid = task.file_name();
            lines.push(format!("{pid}/{} {}: in {waits}, system call {}", tid.display(), name.trim(), call.trim()));
        }
    }
    lines
}

/// Ends a child and all its descendants, also those that have left its process group.
fn end_all(child: &mut Child) -> io::Result<()> {
    let pid = Pid::from_child(child);
    let left: Vec<_> = tree(pid).into_keys().filter_map(Pid::from_raw).collect();
    // An error means that it has ended already.
    let _ = kill_process_group(pid, Signal::KILL);
    for process in left {
        let _ = kill_process(process, Signal::KILL);
    }
    let end = Instant::now();
    while child.try_wait()?.is_none() && end.elapsed() < GONE {
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Processor time of the living processes of a tree, and of their children that ended.
fn of_tree(root: Pid) -> Duration {
    tree(root).values().sum()
}

/// A process with all its descendants and all of its process group, each with the processor time that it has used.
fn tree(root: Pid) -> BTreeMap<i32, Duration> {
    let root = root.as_raw_nonzero().get();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let all: Vec<(i32, Stat)> = pids.filter_map(|pid| Some((pid, stat(pid)?))).collect();
    let mut found: BTreeSet<i32> =
        all.iter().filter(|(pid, stat)| *pid == root || stat.group == root).map(|(pid, _)| *pid).collect();
    loop {
        let children = all.iter().filter(|(_, stat)| found.contains(&stat.parent)).map(|(pid, _)| *pid);
        let more: Vec<_> = children.filter(|pid| !found.contains(pid)).collect();
        if more.is_empty() {
            break;
        }
        found.extend(more);
    }
    all.into_iter().filter(|(pid, _)| found.contains(pid)).map(|(pid, stat)| (pid, stat.used)).collect()
}

/// Processor time of the children that this program has waited for, and of theirs.
pub(crate) fn of_children() -> Duration {
    stat(std::process::id().cast_signed()).map_or(Duration::ZERO, |stat| stat.by_children)
}

struct Stat {
    parent: i32,
    group: i32,
    used: Duration,
    by_children: Duration,
}

/// The process's line in proc(5); none after its parent has waited for it.
fn stat(pid: i32) -> Option<Stat> {
    parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Reads a line of proc(5)'s `stat`. The program's name, in brackets, may hold anything.
fn parse(text: &str) -> Option<Stat> {
    let fields: Vec<_> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |from: usize| -> Option<Duration> {
        let both = fields.get(from..from + 2)?.iter().map(|field| field.parse::<u64>());
        let ticks = both.sum::<Result<u64, _>>().ok()?;
        Some(Duration::from_millis(ticks * 1000 / TICKS_PER_S))
    };
    let (own, by_children) = (ticks(11)?, ticks(13)?);
    Some(Stat {
        parent: fields.get(1)?.parse().ok()?,
        group: fields.get(2)?.parse().ok()?,
        used: own + by_children,
        by_children,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.arg("-c").arg(script);
        command
    }

    #[test]
    fn stat_is_parsed_with_brackets_in_the_programs_name() {
        let line = "7 (a) b (c) S 3 5 5 0 -1 4194560 1 2 3 4 150 50 25 75 20 0 1 0 9 0 0";
        let stat = parse(line).unwrap();
        assert_eq!((stat.parent, stat.group), (3, 5));
        assert_eq!(stat.used, Duration::from_secs(3));
        assert_eq!(stat.by_children, Duration::from_secs(1));
        assert!(parse("7 (a) S 3").is_none());
    }

    #[test]
    fn an_ignored_sighup_is_read_from_status() {
        assert!(ignores_hup("Name:\tx\nSigIgn:\t0000000000001001\nSigCgt:\t0\n"));
        assert!(!ignores_hup("SigIgn:\t0000000000001000\n"));
        assert!(!ignores_hup("Name:\tx\n"));
    }

    #[test]
    fn processes_that_outlive_the_child_are_ended() {
        let file = std::env::temp_dir().join(format!("pagemill-left-{}", std::process::id()));
        let (end, _) = run(&mut sh(&format!("sleep 100000 & echo $! > {}", file.display())), IDLE, IDLE).unwrap();
        assert!(end.is_ok(), "{end}");
        let left: i32 = fs::read_to_string(&file).unwrap().trim().parse().unwrap();
        fs::remove_file(file).unwrap();
        while fs::read_to_string(format!("/proc/{left}/stat")).is_ok_and(|text| !text.contains(") Z")) {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_child_over_its_limit_is_ended_with_its_descendants() {
        let file = std::env::temp_dir().join(format!("pagemill-watch-{}", std::process::id()));
        let spin = format!("setsid sh -c 'echo $$ > {0}; while :; do :; done' & while :; do :; done", file.display());
        let (end, used) = run(&mut sh(&spin), Duration::from_millis(1500), IDLE).unwrap();
        assert_eq!(end, End::OutOfTime(Duration::from_millis(1500)));
        assert!(used >= Duration::from_millis(1500), "{used:?}");
        let started: i32 = fs::read_to_string(&file).unwrap().trim().parse().unwrap();
        fs::remove_file(file).unwrap();
        // It may be a zombie until its parent has waited for it.
        let state = || fs::read_to_string(format!("/proc/{started}/stat")).ok();
        while state().is_some_and(|text| !text.contains(") Z")) {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_child_that_uses_no_processor_time_is_ended() {
        let idle = Duration::from_millis(1500);
        let (end, used) = run(&mut sh("sleep 100000 & wait"), IDLE, idle).unwrap();
        assert_eq!(end, End::Idle(idle));
        assert!(used < NONE, "{used:?}");
    }

    #[test]
    fn it_is_told_what_each_thread_of_a_tree_waits_for() {
        let mut child = sh("sleep 100000 & wait").process_group(0).spawn().unwrap();
        // The number of the call stands there once it waits.
        let waits_in = |line: &String, name: &str| {
            line.contains(name)
                && line.rsplit("system call ").next().is_some_and(|call| call.starts_with(char::is_numeric))
        };
        while !matches!(&waits(Pid::from_child(&child))[..],
            [shell, sleep] if waits_in(shell, " sh: in ") && waits_in(sleep, " sleep: in "))
        {
            std::thread::yield_now();
        }
        end_all(&mut child).unwrap();
    }

    #[test]
    fn processor_time_includes_the_childs_children() {
        let (end, used) =
            run(&mut sh("(i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done); exit 3"), IDLE, IDLE).unwrap();
        assert!(matches!(end, End::Itself(status) if status.code() == Some(3)), "{end}");
        assert!(used > Duration::ZERO);
        assert!(of_children() >= used, "{:?} {used:?}", of_children());
    }
}
