//! Runs a test in a process of its own, with one mutant or with none.
use std::fs::{self, File};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::tree::{self, DOC, Program};

/// A test may take ten times as long as without a mutant, and this long in any case.
const PATIENCE: Duration = Duration::from_secs(20);
/// What is said of a test that does not end.
const HANGS: &str = "hangs";
/// What a test may use of memory: none uses so much without a mutant.
const MEMORY: usize = 6 << 30;
/// The bytes of a file in which a test says to which mutants it came.
const SEEN: u64 = 1 << 16;

/// One test.
#[derive(Clone, Debug)]
pub(crate) struct Test {
    pub(crate) program: Program,
    pub(crate) name: String,
    /// Whether lists are the portable ones, whatever this machine has.
    pub(crate) is_portable: bool,
    /// How long it takes without a mutant.
    pub(crate) took: Duration,
    /// A byte for each mutant: 1 when it comes to it.
    pub(crate) seen: Vec<u8>,
    /// Whether it says that it cannot do its work on this machine.
    pub(crate) is_skipped: bool,
}

impl Test {
    pub(crate) fn key(&self) -> String {
        format!("{}/{}{}", self.program.package, self.name, if self.is_portable { " (portable)" } else { "" })
    }

    /// Runs it: none when it passes, else how it failed. To skip what can be done here is a failure too, as in `.ci/run`.
    pub(crate) fn fails(&self, mutant: u32, folder: &Path) -> Option<String> {
        let limit = PATIENCE.max(10 * self.took);
        let (mut why, is_skipped) = self.run(mutant, None, folder, limit);
        if why.as_deref() == Some(HANGS) {
            // For want of time on a busy machine, perhaps: then not once more.
            why = self.run(mutant, None, folder, limit).0;
        }
        why.or_else(|| (is_skipped && !self.is_skipped).then(|| "skips".to_owned()))
    }

    /// How it failed, if it did, and whether it said that it was skipped.
    fn run(&self, mutant: u32, seen: Option<&Path>, folder: &Path, limit: Duration) -> (Option<String>, bool) {
        let mut command = if self.program.kind == DOC {
            tree::command(&self.program.folder, &["test", "--doc"])
        } else {
            let mut command = Command::new(&self.program.path);
            command
                .args([&self.name, "--exact", "--show-output", "--test-threads=2"])
                .current_dir(&self.program.folder);
            command.env("CARGO_MANIFEST_DIR", &self.program.folder);
            command
        };
        let said = folder.join(format!("said-{:?}", std::thread::current().id()));
        command.stdin(Stdio::null()).stdout(File::create(&said).expect("a file can be written")).stderr(Stdio::null());
        command.env("PAGEMILL_TEST_PROCESS", "own").env("PROPTEST_RNG_SEED", "1");
        command.env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "true");
        command.env("PROPTEST_MAX_SHRINK_ITERS", "0").env("TMPDIR", folder);
        command.env("PAGEMILL_MUTANT", mutant.to_string());
        if let Some(seen) = seen {
            command.env("PAGEMILL_MUTANTS_SEEN", seen);
        }
        if self.is_portable {
            command.env("PAGEMILL_BACKEND", "portable");
        }
        let why = wait(command, limit);
        let said = fs::read(&said).expect("what was written can be read");
        (why, String::from_utf8_lossy(&said).lines().any(|line| line.starts_with("skipped: ")))
    }
}

/// Runs a command in a process group of its own, which ends with it: none when it ends well in time.
fn wait(mut command: Command, limit: Duration) -> Option<String> {
    // SAFETY: both are system calls, which may be made between fork and exec. A mutant dumps no core, and ends with this.
    unsafe {
        command.pre_exec(|| {
            libc::setrlimit(libc::RLIMIT_CORE, &libc::rlimit { rlim_cur: 0, rlim_max: 0 });
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        })
    };
    let mut child = command.process_group(0).spawn().expect("a test starts");
    let (begun, pid) = (Instant::now(), child.id());
    let mut nap = Duration::from_millis(1);
    let why = loop {
        // SAFETY: zero is a valid one, and the call writes it. The child stays, so that its number is its own.
        let ended = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            libc::waitid(libc::P_PID, pid, &mut info, libc::WEXITED | libc::WNOHANG | libc::WNOWAIT);
            info.si_pid() != 0
        };
        if ended {
            break None;
        }
        let pages = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
        let resident: usize = pages.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
        if begun.elapsed() > limit {
            break Some(HANGS);
        }
        if resident * 4096 > MEMORY {
            break Some("takes memory without end");
        }
        std::thread::sleep(nap);
        nap = (2 * nap).min(Duration::from_millis(20));
    };
    // SAFETY: nobody has waited for the group's first process yet.
    unsafe { libc::kill(-pid.cast_signed(), libc::SIGKILL) };
    let status = child.wait().expect("a child can be waited for");
    match (why, status.signal()) {
        (Some(why), _) => Some(why.to_owned()),
        (None, Some(signal)) => Some(format!("ends by signal {signal}")),
        (None, None) => (!status.success()).then(|| "fails".to_owned()),
    }
}

/// The module of tests that see something only with two processors to themselves, which they do not have here.
const TWO_PROCESSORS: &str = "two_processors::";

/// A program's tests, by name.
fn list(program: &Program) -> Vec<String> {
    if program.kind == DOC {
        return vec!["examples in the documentation".to_owned()];
    }
    let mut list = Command::new(&program.path);
    let output = list.args(["--list", "--format", "terse"]).current_dir(&program.folder).output();
    let text = String::from_utf8(output.expect("tests can be listed").stdout).expect("names are UTF-8");
    let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
    names.filter(|name| !name.contains(TWO_PROCESSORS)).map(str::to_owned).collect()
}

/// All tests that pass without a mutant, what they take and to which mutants they come.
pub(crate) fn tests(programs: &[Program], folder: &Path, lanes: usize) -> Vec<Test> {
    let mut tests = Vec::new();
    for program in programs {
        for name in list(program) {
            for is_portable in [false, true] {
                if !is_portable || (program.package == "pagemill" && program.kind != DOC) {
                    let (program, name) = (program.clone(), name.clone());
                    let (took, seen) = (Duration::ZERO, Vec::new());
                    tests.push(Test { program, name, is_portable, took, seen, is_skipped: false });
                }
            }
        }
    }
    let kept = Mutex::new(Vec::new());
    in_lanes(lanes, tests.len(), |lane, at| {
        let mut test = tests[at].clone();
        let seen = folder.join(format!("seen-{lane}"));
        File::create(&seen).and_then(|file| file.set_len(SEEN)).expect("a file can be written");
        let begun = Instant::now();
        let (why, is_skipped) = test.run(0, Some(&seen), folder, Duration::from_secs(900));
        (test.took, test.is_skipped) = (begun.elapsed(), is_skipped);
        test.seen = fs::read(&seen).expect("what was written can be read");
        match why {
            Some(why) => println!("left out: {} {why} without a mutant", test.key()),
            None => kept.lock().unwrap().push(test),
        }
    });
    kept.into_inner().unwrap()
}

/// Does `count` things, so many at a time.
pub(crate) fn in_lanes(lanes: usize, count: usize, work: impl Fn(usize, usize) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for lane in 0..lanes {
            let (next, work) = (&next, &work);
            scope.spawn(move || {
                loop {
                    let at = next.fetch_add(1, Relaxed);
                    if at >= count {
                        break;
                    }
                    work(lane, at);
                }
            });
        }
    });
}
