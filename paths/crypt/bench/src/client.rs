//! fio as the client: runs it, and reads its report.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::servers::{Child, Stop};
use crate::{BESIDE_DEPTH, Cell};
use pagemill_harness::rounds::Unavailable;
use pagemill_harness::{Error, PAGE_BYTES};

/// How much longer than its time a run may take. A client that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// The figures of one run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Seen {
    pub(crate) ns_a_page: f64,
    /// Of all clients.
    pub(crate) pages: f64,
    /// The median latency and the 99th percentile, in microseconds.
    pub(crate) latency_us: [f64; 2],
}

/// Why this `fio` can't measure: it is not installed, or has no engine for NBD.
pub(crate) fn lacking(fio: &str) -> Option<Unavailable> {
    let why = match Command::new(fio).arg("--enghelp=nbd").stdin(Stdio::null()).output() {
        Ok(said) if said.status.success() => return None,
        Ok(_) => "fio, the client, has no engine nbd".to_owned(),
        Err(error) if error.kind() == ErrorKind::NotFound => "fio, the client, is not installed".to_owned(),
        Err(error) => format!("fio: {error}"),
    };
    Some(Unavailable(why))
}

/// Runs fio against the server at `socket` for `time`.
pub(crate) fn measure(
    folder: &Path,
    socket: &Path,
    cell: &Cell,
    time: Duration,
    stop: &Stop,
) -> Result<Result<Seen, Unavailable>, Error> {
    let (output, said) = (folder.join("fio.json"), folder.join("fio.err"));
    // The output of an earlier run must not be taken for this one's.
    let _ = fs::remove_file(&output);
    let mut command = Command::new("fio");
    command.args(["--output-format=json", "--group_reporting", &format!("--output={}", output.display())]);
    let mut job = |name: &str, is_random: bool, is_write: bool, pages: usize, depth: usize, clients: usize| {
        command.args([&format!("--name={name}"), "--new_group", "--ioengine=nbd", "--thread", "--time_based"]);
        command.arg(format!("--uri=nbd+unix:///?socket={}", socket.display()));
        let random = if is_random { "rand" } else { "" };
        command.arg(format!("--rw={random}{}", if is_write { "write" } else { "read" }));
        command.args([format!("--bs={}", pages * PAGE_BYTES), format!("--iodepth={depth}")]);
        command.args([format!("--numjobs={clients}"), format!("--runtime={}ms", time.as_millis())]);
    };
    job("bench", cell.is_random, cell.is_write, cell.pages, cell.depth, 1);
    if cell.writers > 0 {
        job("beside", false, true, (1 << 20) / PAGE_BYTES, BESIDE_DEPTH, cell.writers);
    }
    command.current_dir(folder).stdout(Stdio::null());
    match File::create(&said) {
        Ok(file) => _ = command.stderr(file),
        Err(error) => return Ok(Err(Unavailable(format!("{}: {error}", said.display())))),
    }
    let mut child = match Child::spawn(&mut command) {
        Ok(child) => child,
        Err(error) => return Ok(Err(Unavailable(format!("fio: {error}")))),
    };
    let status = child.wait(time + PATIENCE, stop)?;
    let text = fs::read_to_string(&output).unwrap_or_default();
    Ok(match status {
        None => Err(Unavailable(format!("fio is not done {} s after it should be", PATIENCE.as_secs()))),
        Some(status) if !status.success() => {
            let all = fs::read_to_string(&said).unwrap_or_default() + &text;
            let line = all.lines().find(|line| line.starts_with("fio:")).unwrap_or_default();
            Err(Unavailable(format!("fio: {status}: {line}")))
        }
        Some(_) => seen(&text, cell).ok_or_else(|| Unavailable("fio's report says nothing of it".to_owned())),
    })
}

/// Reads fio's JSON, which other output may precede.
fn seen(text: &str, cell: &Cell) -> Option<Seen> {
    let report: Value = serde_json::from_str(&text[text.find('{')?..]).ok()?;
    let job = &report["jobs"][0];
    if job["error"] != 0 {
        return None;
    }
    let done = &job[if cell.is_write { "write" } else { "read" }];
    let (ms, operations) = (done["runtime"].as_f64()?, done["total_ios"].as_f64()?);
    let latency_ns = |percent| done["clat_ns"]["percentile"][percent].as_f64();
    let latency_us = [latency_ns("50.000000")? / 1e3, latency_ns("99.000000")? / 1e3];
    let pages = operations * cell.pages as f64;
    let beside = match cell.writers {
        0 => 0.0,
        _ => report["jobs"][1]["write"]["io_bytes"].as_f64()? / PAGE_BYTES as f64,
    };
    let is_seen = ms > 0.0 && pages > 0.0 && (cell.writers == 0 || beside > 0.0);
    is_seen.then(|| Seen { ns_a_page: ms * 1e6 / pages, pages: pages + beside, latency_us })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BESIDE, CELLS};

    #[test]
    fn a_missing_fio_and_a_missing_engine_have_different_reasons() {
        let why = |fio| lacking(fio).map(|why| why.to_string());
        assert_eq!(why("true"), None);
        assert!(why("false").is_some_and(|why| why.contains("engine")));
        assert!(why("/there is no such file").is_some_and(|why| why.contains("not installed")));
    }

    #[test]
    fn fio_reports_give_times_and_errors_give_none() {
        let report = |error: u32| {
            format!(
                "fio: connected to NBD server\n{{\"jobs\":[{{\"error\":{error},\"write\":{{\"runtime\":200,\
                 \"total_ios\":400,\"clat_ns\":{{\"percentile\":{{\"50.000000\":7500,\"99.000000\":90000}}}}}},\
                 \"read\":{{\"runtime\":0,\"total_ios\":0}}}}]}}"
            )
        };
        // 400 operations of 256 pages in 200 ms.
        let expected = Seen { ns_a_page: 200e6 / 102_400.0, pages: 102_400.0, latency_us: [7.5, 90.0] };
        assert_eq!(seen(&report(0), &CELLS[1]), Some(expected));
        assert_eq!(seen(&report(0), &CELLS[2]), None, "nothing was read");
        assert_eq!(seen(&report(5), &CELLS[1]), None);
        assert_eq!(seen("fio: no such engine", &CELLS[1]), None);
        assert_eq!(seen(&report(0), &BESIDE), None, "the reader read nothing, and nobody wrote beside it");
        let read = r#"{"error":0,"read":{"runtime":100,"total_ios":100,"clat_ns":{"percentile":{"50.000000":1000,"99.000000":2000}}}}"#;
        let both = format!(r#"{{"jobs":[{read},{{"error":0,"write":{{"io_bytes":409600}}}}]}}"#);
        assert_eq!(seen(&both, &BESIDE), Some(Seen { ns_a_page: 1e6, pages: 200.0, latency_us: [1.0, 2.0] }));
    }
}
