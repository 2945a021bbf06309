//! The program `nfs-peers`: what the table asks of the libraries, they do on the files of a directory.

#[path = "../src/client.rs"]
mod client;

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};

use client::{Call, Client, DEPTH};

/// Ends its process.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Serves a directory with a library, and asks for what the table asks for. Whether it knows COMMIT.
fn serve(library: &str) -> bool {
    let folder = tempfile::tempdir().unwrap();
    let tree = folder.path();
    fs::create_dir(tree.join("listed")).unwrap();
    fs::write(tree.join("file"), vec![1; 10_000]).unwrap();
    (0..1000).for_each(|at| fs::write(tree.join(format!("listed/{at}")), "").unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_nfs-peers"));
    let mut server = Ended(command.arg(library).arg(tree).stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, line.trim().parse().unwrap()));
    let connect = || Client::connect(address).unwrap();
    let mut client = connect();
    let root = client.mount(tree.to_str().unwrap()).unwrap();
    let file = client.lookup(&root, "file").unwrap();
    // A client that saw an error is of no more use.
    assert!(connect().lookup(&root, "none").is_err());
    assert!(connect().lookup(&root, "..").is_err());

    client.run([Call::getattr(&file)], DEPTH).unwrap();
    client.run([Call::write(&file, 5000, &[2; 20_000])], DEPTH).unwrap();
    assert_eq!(fs::read(tree.join("file")).unwrap(), [&[1; 5000][..], &[2; 20_000]].concat());
    // The client takes no shorter reply.
    client.run([Call::read(&file, 4096, 4096)], DEPTH).unwrap();
    let listed = client.lookup(&root, "listed").unwrap();
    client.list(&listed, 1000).unwrap();
    client.run([Call::create(&root, "new")], DEPTH).unwrap();
    assert!(tree.join("new").exists());
    client.run([Call::remove(&root, "new")], DEPTH).unwrap();
    assert!(!tree.join("new").exists());
    client.run([Call::commit(&file)], DEPTH).is_ok()
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: only root has the ports that the client connects from");
    }
    is_root
}

#[test]
fn nfs3_server_does_all_that_the_table_asks_for() {
    if is_root() {
        assert!(serve("nfs3_server"));
    }
}

/// If a later version knows it, the table has its writes, and the documents are to say so.
#[test]
fn nfsserve_does_all_but_commit() {
    if is_root() {
        assert!(!serve("nfsserve"));
    }
}
