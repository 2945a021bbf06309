//! libnfs as the client. It is LGPL, so nothing links it: where it is installed, the table compiles `libnfs.c`, a program of its
//! own, and has that ask the servers.

use std::fs;
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

use crate::client::DEPTH;
use crate::servers::{Process, Server};

/// The program, compiled in this folder.
pub(crate) fn build(folder: &Path) -> Result<PathBuf, String> {
    let (source, program) = (folder.join("libnfs.c"), folder.join("libnfs-client"));
    fs::write(&source, include_str!("libnfs.c")).map_err(|error| error.to_string())?;
    let built = Command::new("cc").args(["-O2", "-o"]).arg(&program).arg(&source).arg("-lnfs").output();
    let said = match built {
        Ok(built) if built.status.success() => return Ok(program),
        Ok(built) => String::from_utf8_lossy(&built.stderr).into_owned(),
        Err(error) => format!("cc: error: {error}"),
    };
    let why = said.split("error: ").nth(1).and_then(|rest| rest.lines().next()).unwrap_or(said.trim());
    Err(format!("cc does not compile its client ({why}); Debian: apt-get install gcc libnfs-dev"))
}

/// A client that is connected to a server.
pub(crate) struct Libnfs {
    _process: Process,
    asked: ChildStdin,
    said: BufReader<ChildStdout>,
}

impl Libnfs {
    pub(crate) fn connect(program: &Path, server: &Server, tree: &Path, pieces: usize) -> Result<Self, String> {
        // A server that ends is an error, and is not waited for.
        let (nfs, mount) = (server.nfs.port(), server.mount.port());
        let url =
            format!("nfs://127.0.0.1{}?version=3&autoreconnect=0&nfsport={nfs}&mountport={mount}", tree.display());
        let mut command = Command::new(program);
        command.args([url, DEPTH.to_string(), pieces.to_string()]);
        let mut process = Process::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
        let (asked, said) = process.pipes().ok_or("its pipes are gone")?;
        Ok(Self { _process: process, asked, said: BufReader::new(said) })
    }

    /// Nanoseconds of so many pieces, `what` of which is `read` or `write`.
    pub(crate) fn round(&mut self, what: &str, count: usize) -> io::Result<f64> {
        writeln!(self.asked, "{what} {count}")?;
        let mut line = String::new();
        self.said.read_line(&mut line)?;
        line.trim().parse().map_err(|_| io::Error::new(ErrorKind::InvalidData, format!("libnfs {}", line.trim())))
    }
}
