//! A server on this machine, for a virtual machine whose script tests it with its kernel's client.
//!
//! The virtual machine has QEMU's user network, in which this machine's loopback is 10.0.2.2. `tests/vm/bin/host` sends a line
//! to [`Host`], one on each connection: the name of one of these commands, and its argument.
//! - `say TEXT` prints the text
//! - `alive` fails if the server has ended by itself
//! - `kill` kills the server, which cannot prepare for it (SIGKILL)
//! - `start ARGS` starts it again, with the same folder and port, by these arguments if there are any
//! - `sum FILE` answers the SHA-256 of a file in the server's folder, as this machine has it
//! - `stop` ends the server in order (SIGTERM), and judges its report: see [`judge_report`]. Memory was plentiful, but for
//!   `stop short`
//!
//! The answer is `ok` and what was asked for, or `no` and the reason.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::shell::{Shell, quoted};

/// A server has this long to start, and to end.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often an event is looked for.
const LOOK: Duration = Duration::from_millis(20);
/// A command has at most this many bytes.
const LINE: u64 = 4096;

/// A server, and the thread that does as the script asks. Both end when this is dropped.
pub(super) struct Host {
    /// What the machine has at `/etc/host`, as variables of a shell: the two ports, and the folder that the server exports.
    pub(super) facts: String,
    address: (Ipv4Addr, u16),
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Host {
    /// Starts `PROGRAM KIND serve FOLDER --port PORT --state FILE ARGS`, with an empty folder, and a file that is not there yet.
    pub(super) fn start(shell: &Shell, program: PathBuf, kind: &str, args: &[String]) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("host-").tempdir_in(shell.own_target("vm"))?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = (Ipv4Addr::LOCALHOST, listener.local_addr()?.port());
        let mut server = Server {
            program,
            kind: kind.to_owned(),
            folder,
            // Free now. Another program may take it before the server does, which then says so.
            port: TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port(),
            args: args.to_vec(),
            log: shell.log(&format!("vm-{kind}-server")),
            child: None,
        };
        File::create(&server.log)?;
        fs::create_dir(server.export())?;
        server.start()?;
        let export = quoted(&server.export());
        let facts = format!("server={}\ncontrol={}\nexport={export}\n", server.port, address.1);
        let is_over = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let (is_over, progress) = (Arc::clone(&is_over), shell.progress.clone());
            move || {
                for stream in listener.incoming() {
                    if is_over.load(Ordering::Relaxed) {
                        break;
                    }
                    // A connection that fails is the script's failure: it gets no answer.
                    let _ = stream.and_then(|stream| serve(stream, &mut server, |line| progress.say(line)));
                }
            }
        });
        Ok(Self { facts, address, is_over, thread: Some(thread) })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        // The thread sees it at the next connection.
        drop(TcpStream::connect(self.address));
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Answers one command.
fn serve(stream: TcpStream, server: &mut Server, say: impl Fn(&str)) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut line = String::new();
    BufReader::new(&stream).take(LINE).read_line(&mut line)?;
    let answer = match server.obey(line.trim_end(), say) {
        Ok(answer) => format!("ok {answer}\n"),
        Err(error) => format!("no {error:#}\n"),
    };
    (&stream).write_all(answer.as_bytes())
}

/// The server's process, and what it takes to start it again.
struct Server {
    program: PathBuf,
    kind: String,
    /// Has the folder that it exports, and its state.
    folder: tempfile::TempDir,
    port: u16,
    args: Vec<String>,
    log: PathBuf,
    child: Option<Child>,
}

impl Server {
    fn obey(&mut self, line: &str, say: impl Fn(&str)) -> Result<String> {
        let (command, argument) = line.split_once(' ').unwrap_or((line, ""));
        match command {
            "say" => say(argument),
            "alive" => self.alive()?,
            "kill" => self.kill()?,
            "start" => {
                if !argument.is_empty() {
                    self.args = argument.split_whitespace().map(str::to_owned).collect();
                }
                self.start()?;
            }
            "sum" => return sum(&inside(&self.export(), argument)?),
            "stop" => return self.stop(argument != "short"),
            _ => bail!("there is no command {command:?}"),
        }
        Ok(String::new())
    }

    fn export(&self) -> PathBuf {
        self.folder.path().join("export")
    }

    /// Starts it, and waits until it accepts connections.
    fn start(&mut self) -> Result<()> {
        ensure!(self.child.is_none(), "the server runs already");
        let log = File::options().append(true).open(&self.log)?;
        let mut command = Command::new(&self.program);
        command.args([&self.kind, "serve"]).arg(self.export()).args(["--port", &self.port.to_string()]);
        command.arg("--state").arg(self.folder.path().join("state")).args(&self.args);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = self.child.insert(command.spawn().with_context(|| self.program.display().to_string())?);
        let begun = Instant::now();
        while TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_err() {
            if let Some(status) = child.try_wait()? {
                self.child = None;
                bail!("the server ended: {status}; what it printed: {}", self.log.display());
            }
            ensure!(begun.elapsed() < PATIENCE, "the server accepts no connection on port {}", self.port);
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    fn alive(&mut self) -> Result<()> {
        let child = self.child.as_mut().context("the server does not run")?;
        if let Some(status) = child.try_wait()? {
            self.child = None;
            bail!("the server ended by itself: {status}; what it printed: {}", self.log.display());
        }
        Ok(())
    }

    fn kill(&mut self) -> Result<()> {
        let mut child = self.child.take().context("the server does not run")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Ends it in order. Answers in one line how long that took, and its report.
    fn stop(&mut self, is_plentiful: bool) -> Result<String> {
        let mut child = self.child.take().context("the server does not run")?;
        let begins = fs::metadata(&self.log)?.len();
        kill_process(Pid::from_child(&child), Signal::TERM)?;
        let begun = Instant::now();
        let status = ended(&mut child)?;
        let took = begun.elapsed().as_millis();
        ensure!(is_by_sigterm(status), "by SIGTERM the server {status}; what it printed: {}", self.log.display());
        let text = fs::read(&self.log)?;
        let report = judge_report(&String::from_utf8_lossy(&text[usize::try_from(begins)?..]), is_plentiful)?;
        Ok(format!("ended in {took} ms; {report}"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.child.is_some() {
            // It may have ended by itself.
            drop(self.kill());
        }
    }
}

/// Waits for a process that was told to end, and kills it if it does not.
fn ended(child: &mut Child) -> Result<ExitStatus> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if begun.elapsed() > PATIENCE {
            child.kill()?;
            child.wait()?;
            bail!("the server did not end within {} s of SIGTERM", PATIENCE.as_secs());
        }
        std::thread::sleep(LOOK);
    }
}

/// A program that SIGTERM ended in order: with 0, or as a shell reports the signal.
fn is_by_sigterm(status: ExitStatus) -> bool {
    matches!(status.code(), Some(0 | 143))
}

/// Judges the counters that `pagemill nfs serve --json` prints when it is told to end: it found nothing wrong with itself or the
/// client, and if its memory was plentiful, it was never short. Answers how often threads slept for pages, how many slots of
/// their arrays were empty at the end (C9.1: a refill that is not ended fills each hole), and the counters.
fn judge_report(text: &str, is_plentiful: bool) -> Result<String> {
    let line = text.lines().rfind(|line| line.starts_with('{'));
    let line = line.with_context(|| format!("the server printed no counters: {text:?}"))?;
    let report: Value = serde_json::from_str(line)?;
    let of = |counter: &str| {
        let count = report.pointer(counter).and_then(Value::as_u64);
        count.with_context(|| format!("the server has no counter {counter}: {line}"))
    };
    let of_plenty: &[_] = if is_plentiful { &["/arrays/short_refills", "/arrays/sleeps"] } else { &[] };
    for counter in ["/panics", "/garbage", "/closed/malformed"].iter().chain(of_plenty) {
        let count = of(counter)?;
        ensure!(count == 0, "the server's counter {counter} is {count}: {line}");
    }
    let holes = of("/arrays/holes")? - of("/arrays/pages")?;
    Ok(format!("{} sleeps, {holes} holes left; {line}", of("/arrays/sleeps")?))
}

/// The file's path, unless it leads out of the folder.
fn inside(folder: &Path, file: &str) -> Result<PathBuf> {
    let is_plain = !file.is_empty() && file.split('/').all(|part| !matches!(part, "" | "." | ".."));
    ensure!(is_plain, "not a file of the server's folder: {file:?}");
    Ok(folder.join(file))
}

fn sum(file: &Path) -> Result<String> {
    let ran = Command::new("sha256sum").stdin(File::open(file)?).output()?;
    ensure!(ran.status.success(), "sha256sum {}", ran.status);
    let text = String::from_utf8_lossy(&ran.stdout).into_owned();
    Ok(text.split_whitespace().next().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(arrays: [u64; 4], panics: u64, is_plentiful: bool) -> Result<String, String> {
        let [short, sleeps, holes, pages] = arrays;
        let arrays =
            format!("\"arrays\":{{\"short_refills\":{short},\"sleeps\":{sleeps},\"holes\":{holes},\"pages\":{pages}}}");
        let text = format!("serving\n{{\"panics\":{panics},\"garbage\":0,\"closed\":{{\"malformed\":0}},{arrays}}}\n");
        judge_report(&text, is_plentiful).map_err(|error| error.to_string())
    }

    #[test]
    fn a_report_with_a_short_refill_a_sleep_or_a_panic_fails_and_so_does_one_without_them() {
        assert!(judged([0, 0, 5, 5], 0, true).unwrap().starts_with("0 sleeps, 0 holes left; {"));
        assert!(judged([1, 0, 5, 5], 0, true).unwrap_err().contains("/arrays/short_refills is 1"));
        assert!(judged([0, 10, 5, 5], 0, true).unwrap_err().contains("/arrays/sleeps is 10"));
        assert!(judged([0, 0, 5, 5], 1, true).unwrap_err().contains("/panics is 1"));
        assert!(judge_report("serving\n{\"panics\":0}\n", true).is_err());
        assert!(judge_report("", true).is_err());
    }

    #[test]
    fn a_server_with_too_little_memory_may_sleep_and_not_panic() {
        assert!(judged([1, 10, 7, 5], 0, false).unwrap().starts_with("10 sleeps, 2 holes left; {"));
        assert!(judged([1, 10, 5, 5], 1, false).unwrap_err().contains("/panics is 1"));
    }

    #[test]
    fn a_sum_is_of_a_file_in_the_folder() {
        let folder = Path::new("/export");
        assert_eq!(inside(folder, "a/b").unwrap(), Path::new("/export/a/b"));
        for file in ["", "/etc/passwd", "../x", "a/../../x", "a//b", "."] {
            assert!(inside(folder, file).is_err(), "{file}");
        }
    }
}
