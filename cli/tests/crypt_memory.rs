//! The memory of `pagemill crypt serve`: how much it keeps when it has nothing to do, and where clients' bytes are.

use std::fs::{self, File};
use std::io::{BufRead, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

use crate::common::{Folder, PATIENCE, until};
use crate::crypt_serve::{QUICK, Serving, folder_with, serve};

const MIB: usize = 1 << 20;
/// The most that may be resident, in KiB.
const IDLE_KIB: usize = 32 << 10;

/// A server in a folder where others may have been killed.
fn start(folder: &Folder, more: &str) -> Serving {
    let _ = fs::remove_file(folder.path("socket"));
    serve(folder, more)
}

/// A client of the server in this folder, past negotiation.
fn connect(folder: &Folder) -> UnixStream {
    // The socket's file is there a moment before the server listens.
    let mut connected = None;
    until("a connection", || {
        connected = UnixStream::connect(folder.path("socket")).ok();
        connected.is_some()
    });
    let mut stream = connected.unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    // The flags; then the empty name, asking for the block size.
    let go = [&[0; 4][..], &1u16.to_be_bytes(), &3u16.to_be_bytes()].concat();
    let said = [&3u32.to_be_bytes()[..], b"IHAVEOPT", &7u32.to_be_bytes(), &(go.len() as u32).to_be_bytes(), &go];
    stream.write_all(&said.concat()).unwrap();
    loop {
        let mut header = [0; 20];
        stream.read_exact(&mut header).unwrap();
        let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
        stream.read_exact(&mut vec![0; word(16) as usize]).unwrap();
        if word(12) == 1 {
            return stream;
        }
    }
}

const READ: u16 = 0;
const WRITE: u16 = 1;

fn request(command: u16, at: usize, len: usize) -> Vec<u8> {
    let words = [&0x2560_9513u32.to_be_bytes()[..], &[0; 2], &command.to_be_bytes(), &[7; 8]];
    [&words.concat()[..], &(at as u64).to_be_bytes(), &(len as u32).to_be_bytes()].concat()
}

/// Takes an answer, without an error, and the bytes that come with it.
fn answer(mut stream: &UnixStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; 16 + len];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
    bytes.split_off(16)
}

/// Resident memory in KiB.
fn resident(server: &Serving) -> usize {
    let status = fs::read_to_string(format!("/proc/{}/status", server.0.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
}

#[test]
fn an_idle_server_keeps_at_most_32_mib() {
    // Together they have more under way than may stay.
    const CLIENTS: usize = 40;
    // The memory of argon2 must go back as well.
    let folder = folder_with("24M", "--kdf-memory 65536 --kdf-iterations 4");
    for io in ["auto", "plain"] {
        let server = start(&folder, &format!("--io {io}"));
        let before = resident(&server);
        assert!(before <= IDLE_KIB, "{io}: {before} KiB before the first client");
        // Each has read a megabyte, and is writing one.
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                let mut stream = connect(&folder);
                stream.write_all(&request(READ, 0, MIB)).unwrap();
                answer(&stream, MIB);
                stream.write_all(&[request(WRITE, 0, MIB), vec![7; MIB - 512]].concat()).unwrap();
                stream
            })
            .collect();
        until(&format!("{io}: more than {IDLE_KIB} KiB at work"), || resident(&server) > IDLE_KIB);
        // Every second one comes to an end with it.
        for mut stream in clients.iter().step_by(2) {
            stream.write_all(&[7; 512]).unwrap();
            answer(stream, 0);
        }
        drop(clients);
        until(&format!("{io}: at most {IDLE_KIB} KiB"), || resident(&server) <= IDLE_KIB);
    }
}

/// Bytes that only clients have. The first is rare elsewhere, so that it is quick to look for.
const MARK: [u8; 16] = *b"\xa7plain of client";

fn has_mark(mut bytes: &[u8]) -> bool {
    while bytes.skip_until(MARK[0]).is_ok_and(|skipped| skipped > 0) {
        if bytes.starts_with(&MARK[1..]) {
            return true;
        }
    }
    false
}

/// The server's mappings with [`MARK`] in them: each one's line in `smaps`, and whether core dumps leave it out.
fn mappings_with_mark(server: &Serving) -> Vec<(String, bool)> {
    let folder = format!("/proc/{}", server.0.id());
    let memory = File::open(format!("{folder}/mem")).unwrap();
    let (mut found, mut here) = (Vec::new(), None);
    for line in fs::read_to_string(format!("{folder}/smaps")).unwrap().lines() {
        let bounds = line.split(' ').next().and_then(|range| range.split_once('-'));
        let bounds = bounds
            .and_then(|(start, end)| Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?)));
        if let Some(bounds) = bounds {
            here = Some((line.to_owned(), bounds));
        } else if let Some(flags) = line.strip_prefix("VmFlags:")
            && let Some((line, (start, end))) = here.take()
        {
            let mut bytes = vec![0; (end - start) as usize];
            // The system's own mappings cannot be read, and others may be gone by now.
            if memory.read_exact_at(&mut bytes, start).is_ok() && has_mark(&bytes) {
                found.push((line, flags.split(' ').any(|flag| flag == "dd")));
            }
        }
    }
    found
}

#[test]
fn plain_bytes_are_wiped_when_requests_end_and_core_dumps_leave_them_out() {
    let folder = folder_with("20M", QUICK);
    let plain = MARK.repeat(MIB / 16);
    for more in ["--io auto", "--io plain", "--io plain --threads 1", "--memory 4"] {
        let server = start(&folder, more);
        let ended = |what: &str| {
            until(&format!("{more}, {what}: no plain bytes"), || mappings_with_mark(&server).is_empty());
        };
        let stream = connect(&folder);
        let mut sender = &stream;
        // Through pages and through the connection's own bytes, whole sectors and all.
        for len in [MIB, 512 << 10, 32 << 10, 4096] {
            sender.write_all(&[&request(WRITE, 0, len)[..], &plain[..len]].concat()).unwrap();
            answer(&stream, 0);
            sender.write_all(&request(READ, 0, len)).unwrap();
            assert!(answer(&stream, len) == plain[..len], "{more}");
        }
        ended("a client that waits");

        // Answers that are not taken, and half of a short and of a long write.
        let half = |len: usize, sent: usize| [&request(WRITE, 0, len)[..], &plain[..sent]].concat();
        let messages = [request(READ, 0, MIB).repeat(4), half(32 << 10, 20 << 10), half(MIB, MIB / 2 + 100)];
        let clients = messages.map(|message| {
            let mut stream = connect(&folder);
            stream.write_all(&message).unwrap();
            stream
        });
        // A thread at work may have some on its stack, until the piece is done.
        until(&format!("{more}: plain bytes of requests, all left out of core dumps"), || {
            let found = mappings_with_mark(&server);
            !found.is_empty() && found.iter().all(|(_, is_left_out)| *is_left_out)
        });
        drop(clients);
        ended("two that left");
        drop(stream);
        ended("none");
    }
}
