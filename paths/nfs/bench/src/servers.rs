//! The servers, each a process of its own, in a network and a set of mounts that exist as long as the measuring thread: an
//! NFS server that wants a portmapper finds one there, and disturbs none of this machine's.
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::UnshareFlags;

use crate::client::Client;

/// How long a server may take to start.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process that ends when this is dropped.
pub(crate) struct Process(Child);

impl Process {
    fn spawn(command: &mut Command) -> Result<Self, String> {
        Self::start(command.stdin(Stdio::null()))
    }

    pub(crate) fn start(command: &mut Command) -> Result<Self, String> {
        let name = command.get_program().to_string_lossy().into_owned();
        let end_with_parent = || Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?);
        // SAFETY: between fork and exec it makes one system call, which is safe there, and allocates nothing.
        unsafe { command.pre_exec(end_with_parent) };
        command.spawn().map(Self).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => format!("{name} is not installed"),
            _ => format!("{name}: {error}"),
        })
    }

    /// Its input and its output, if they are pipes.
    pub(crate) fn pipes(&mut self) -> Option<(ChildStdin, ChildStdout)> {
        Some((self.0.stdin.take()?, self.0.stdout.take()?))
    }

    fn has_ended(&mut self) -> bool {
        !matches!(self.0.try_wait(), Ok(None))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.has_ended()
            && let Some(pid) = Pid::from_raw(self.0.id().cast_signed())
        {
            // It has not been waited for, so the number is its own.
            let _ = kill_process(pid, Signal::TERM);
            let asked = Instant::now();
            while !self.has_ended() && asked.elapsed() < PATIENCE {
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = self.0.kill();
        }
        let _ = self.0.wait();
    }
}

/// A server that runs, with what it needs.
pub(crate) struct Server {
    /// Ended in this order.
    _processes: Vec<Process>,
    pub(crate) nfs: SocketAddr,
    pub(crate) mount: SocketAddr,
}

fn at(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// Puts this thread in a network and a set of mounts of its own.
pub(crate) fn enter() -> Result<(), String> {
    let said = |what: &str, error: io::Error| format!("{what}: {error}; run it as root");
    // SAFETY: only this thread's network, mounts and working folder change; no descriptors are shared differently.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET | UnshareFlags::NEWNS) }
        .map_err(|errno| said("a network namespace", errno.into()))?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .and_then(|()| mount("none", "/run", "tmpfs", MountFlags::empty(), None))
        .map_err(|errno| said("mounts of its own", errno.into()))?;
    let done = Command::new("ip").args(["link", "set", "lo", "up"]).output();
    let done = done.map_err(|error| format!("ip: {error}; install iproute2"))?;
    if done.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&done.stderr).trim().to_owned()) }
}

/// `pagemill nfs serve`, with more arguments.
pub(crate) fn pagemill(program: &Path, tree: &Path, folder: &Path, more: &[&str]) -> Result<Server, String> {
    let mut command = Command::new(program);
    command.args(["nfs", "serve", "--port", "0", "--no-root-squash", "--cache", "1G", "--state"]);
    command.arg(folder.join("key")).arg(tree).args(more).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut process = Process::spawn(&mut command)?;
    let mut line = String::new();
    if let Some(said) = process.0.stderr.take() {
        BufReader::new(said).read_line(&mut line).map_err(|error| error.to_string())?;
    }
    // Its address is what follows the last ` at `, up to the last `: `.
    let address = line.rsplit(" at ").next().and_then(|rest| rest.split(": ").next());
    let address = address.and_then(|address| address.parse().ok()).ok_or_else(|| line.trim().to_owned())?;
    Ok(Server { _processes: vec![process], nfs: address, mount: address })
}

/// nfs-ganesha, with the portmapper that it wants.
pub(crate) fn ganesha(tree: &Path, folder: &Path) -> Result<Server, String> {
    let settings = format!(
        "NFS_CORE_PARAM {{ Protocols = 3; NFS_Port = 2049; MNT_Port = 20048; Enable_NLM = false; Enable_RQUOTA = false; }}\n\
         NFS_KRB5 {{ Active_krb5 = false; }}\n\
         EXPORT {{ Export_Id = 1; Path = {tree}; Pseudo = /tree; Access_Type = RW; Squash = No_Root_Squash; SecType = sys;\n\
         Protocols = 3; Transports = TCP; MaxRead = 1048576; MaxWrite = 1048576; PrefRead = 1048576; PrefWrite = 1048576;\n\
         FSAL {{ Name = VFS; }} }}\n",
        tree = tree.display()
    );
    let (path, log) = (folder.join("ganesha.conf"), folder.join("ganesha.log"));
    fs::write(&path, settings).and_then(|()| fs::create_dir_all("/run/ganesha")).map_err(|error| error.to_string())?;
    let mut mapper = Command::new("rpcbind");
    let mapper = Process::spawn(mapper.args(["-f", "-w"]).stdout(Stdio::null()).stderr(Stdio::null()))?;
    listens(at(111), &mut [])?;
    let mut command = Command::new("ganesha.nfsd");
    command.arg("-F").arg("-L").arg(&log).arg("-f").arg(&path).args(["-p", "/run/ganesha.pid"]);
    let process = Process::spawn(command.stdout(Stdio::null()).stderr(Stdio::null()))?;
    let mut processes = vec![process, mapper];
    listens(at(20048), &mut processes)?;
    listens(at(2049), &mut processes)?;
    Ok(Server { _processes: processes, nfs: at(2049), mount: at(20048) })
}

/// unfs3, in the foreground and without a portmapper.
pub(crate) fn unfs3(tree: &Path, folder: &Path) -> Result<Server, String> {
    let exports = folder.join("exports");
    fs::write(&exports, format!("{} 127.0.0.1(rw,no_root_squash)\n", tree.display()))
        .map_err(|error| error.to_string())?;
    let mut command = Command::new("unfsd");
    command.args(["-d", "-p", "-t", "-n", "2050", "-m", "2051", "-e"]).arg(&exports);
    let mut processes = vec![Process::spawn(command.stdout(Stdio::null()).stderr(Stdio::null()))?];
    listens(at(2051), &mut processes)?;
    Ok(Server { _processes: processes, nfs: at(2050), mount: at(2051) })
}

/// A library in Rust, which `nfs-peers` serves with: a program beside this one, if it was built.
pub(crate) fn library(program: &Path, name: &str, tree: &Path) -> Result<Server, String> {
    let peers = program.with_file_name("nfs-peers");
    if !peers.exists() {
        return Err("not built; cargo build --release -p pagemill-nfs-bench --features peers".to_owned());
    }
    let mut command = Command::new(peers);
    let mut process = Process::spawn(command.arg(name).arg(tree).stdout(Stdio::piped()).stderr(Stdio::null()))?;
    let mut line = String::new();
    if let Some(said) = process.0.stdout.take() {
        BufReader::new(said).read_line(&mut line).map_err(|error| error.to_string())?;
    }
    let port = line.trim().parse().map_err(|_| "it ended at its start".to_owned())?;
    Ok(Server { _processes: vec![process], nfs: at(port), mount: at(port) })
}

/// Waits until a server answers there.
fn listens(address: SocketAddr, processes: &mut [Process]) -> Result<(), String> {
    let since = Instant::now();
    loop {
        let Err(error) = Client::connect(address) else { return Ok(()) };
        if processes.iter_mut().any(Process::has_ended) {
            return Err("it ended at its start".to_owned());
        }
        if since.elapsed() > PATIENCE {
            return Err(format!("it does not answer at {address}: {error}"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
