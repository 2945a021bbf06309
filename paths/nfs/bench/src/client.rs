//! A client that keeps several calls in flight, the same for all servers. It checks the status of each reply and its length,
//! and looks at no data.
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use nfs3_types::nfs3::{
    COMMIT3args, CREATE3args, GETATTR3args, LOOKUP3args, READ3args, READDIRPLUS3args, REMOVE3args, cookieverf3,
    createhow3, diropargs3, nfs_fh3, sattr3, stable_how,
};
use nfs3_types::xdr_codec::{Opaque, Pack};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};

/// Calls in flight, unless a part of the table says otherwise.
pub(crate) const DEPTH: usize = 8;
/// How long a server may take for a reply.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes received at once, at most: more than the largest reply.
const BUFFER: usize = 2 << 20;
/// The length of a reply's header: its mark, six words, and the status of the procedure.
const HEAD: usize = 4 + 6 * 4 + 4;

/// A connection to a server.
pub(crate) struct Client {
    socket: TcpStream,
    xid: u32,
    /// Calls that are sent together.
    out: Vec<u8>,
    /// What was received: up to `taken` it was looked at.
    buffer: Vec<u8>,
    taken: usize,
    filled: usize,
}

/// The length of a file's attributes.
const ATTRIBUTES: usize = 84;

/// What is left of a reply's results.
struct Words<'a>(&'a [u8]);

impl<'a> Words<'a> {
    fn take(&mut self, len: usize) -> io::Result<&'a [u8]> {
        let (taken, left) = self.0.split_at_checked(len).ok_or(ErrorKind::UnexpectedEof)?;
        self.0 = left;
        Ok(taken)
    }
    fn word(&mut self) -> io::Result<u32> {
        let word = self.take(4)?.first_chunk().ok_or(ErrorKind::UnexpectedEof)?;
        Ok(u32::from_be_bytes(*word))
    }
    /// Bytes behind their length, and what fills them up to a word.
    fn counted(&mut self) -> io::Result<&'a [u8]> {
        let len = self.word()? as usize;
        Ok(&self.take(len.next_multiple_of(4))?[..len])
    }
    /// Skips so many bytes behind a word that says whether they are there, and returns that.
    fn skip_if_there(&mut self, len: usize) -> io::Result<bool> {
        let is_there = self.word()? == 1;
        self.take(if is_there { len } else { 0 })?;
        Ok(is_there)
    }
}

/// A call, with the data of a WRITE.
pub(crate) struct Call<'a> {
    program: u32,
    procedure: u32,
    args: Vec<u8>,
    data: &'a [u8],
    /// The fewest bytes that its reply has.
    least: usize,
}

fn pack(args: &impl Pack) -> Vec<u8> {
    let mut packed = Vec::with_capacity(args.packed_size());
    args.pack(&mut packed).expect("a vector takes all bytes");
    packed
}

fn entry<'a>(directory: &nfs_fh3, name: &'a str) -> diropargs3<'a> {
    diropargs3 { dir: directory.clone(), name: name.as_bytes().into() }
}

impl<'a> Call<'a> {
    fn new(procedure: u32, args: &impl Pack) -> Self {
        Self { program: 100_003, procedure, args: pack(args), data: &[], least: HEAD }
    }
    pub(crate) fn getattr(file: &nfs_fh3) -> Self {
        Self::new(1, &GETATTR3args { object: file.clone() })
    }
    pub(crate) fn read(file: &nfs_fh3, offset: u64, count: u32) -> Self {
        Self { least: HEAD + count as usize, ..Self::new(6, &READ3args { file: file.clone(), offset, count }) }
    }
    /// Unstable: it is durable after a COMMIT.
    pub(crate) fn write(file: &nfs_fh3, offset: u64, data: &'a [u8]) -> Self {
        let count = data.len() as u32;
        let mut args = pack(file);
        args.extend(pack(&offset));
        args.extend(pack(&count));
        args.extend(pack(&stable_how::UNSTABLE));
        args.extend(pack(&count));
        Self { program: 100_003, procedure: 7, args, data, least: HEAD }
    }
    pub(crate) fn commit(file: &nfs_fh3) -> Self {
        Self::new(21, &COMMIT3args { file: file.clone(), offset: 0, count: 0 })
    }
    pub(crate) fn create(directory: &nfs_fh3, name: &str) -> Self {
        let how = createhow3::GUARDED(sattr3::default());
        Self::new(8, &CREATE3args { where_: entry(directory, name), how })
    }
    pub(crate) fn remove(directory: &nfs_fh3, name: &str) -> Self {
        Self::new(12, &REMOVE3args { object: entry(directory, name) })
    }
    /// As much of a directory as 64 KiB have, from a cookie on.
    fn list(directory: &nfs_fh3, cookie: u64, cookieverf: [u8; 8]) -> Self {
        let cookieverf = cookieverf3(cookieverf);
        let args =
            READDIRPLUS3args { dir: directory.clone(), cookie, cookieverf, dircount: 1 << 16, maxcount: 1 << 16 };
        Self::new(17, &args)
    }
}

impl Client {
    /// Connects from a port that only root may use, as a mount does.
    pub(crate) fn connect(server: SocketAddr) -> io::Result<Self> {
        for port in (700..1024).rev() {
            let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
            if bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, port))).is_err() {
                continue;
            }
            match connect(&socket, &server) {
                // Of an earlier connection, which the system still remembers.
                Err(rustix::io::Errno::ADDRNOTAVAIL) => continue,
                connected => connected?,
            }
            let socket = TcpStream::from(socket);
            socket.set_nodelay(true)?;
            socket.set_read_timeout(Some(PATIENCE))?;
            socket.set_write_timeout(Some(PATIENCE))?;
            // Not the numbers of an earlier connection from this port: a server may take calls for calls that are sent again.
            let xid = fastrand::u32(..);
            return Ok(Self { socket, xid, out: Vec::new(), buffer: vec![0; BUFFER], taken: 0, filled: 0 });
        }
        Err(ErrorKind::AddrInUse.into())
    }

    /// The handle of a directory, by MOUNT at this server.
    pub(crate) fn mount(&mut self, path: &str) -> io::Result<nfs_fh3> {
        let call = Call { program: 100_005, ..Call::new(1, &Opaque::borrowed(path.as_bytes())) };
        self.run([call], 1)?;
        self.handle_at(HEAD)
    }

    pub(crate) fn lookup(&mut self, directory: &nfs_fh3, name: &str) -> io::Result<nfs_fh3> {
        self.run([Call::new(3, &LOOKUP3args { what: entry(directory, name) })], 1)?;
        self.handle_at(HEAD)
    }

    /// Lists all of a directory, one call after the other, and checks that it has so many entries, each with its attributes and
    /// its handle.
    pub(crate) fn list(&mut self, directory: &nfs_fh3, entries: usize) -> io::Result<()> {
        let (mut cookie, mut verifier, mut found, mut is_end) = (0, [0; 8], 0, false);
        while !is_end {
            self.run([Call::list(directory, cookie, verifier)], 1)?;
            let mut reply = Words(self.buffer.get(HEAD..self.filled).unwrap_or_default());
            reply.skip_if_there(ATTRIBUTES)?;
            verifier = *reply.take(8)?.first_chunk().ok_or(ErrorKind::InvalidData)?;
            let before = found;
            while reply.word()? == 1 {
                reply.take(8)?;
                let name = reply.counted()?;
                let is_dot = matches!(name, b"." | b"..");
                cookie = u64::from(reply.word()?) << 32 | u64::from(reply.word()?);
                let has_attributes = reply.skip_if_there(ATTRIBUTES)?;
                let has_handle = reply.word()? == 1;
                if has_handle {
                    reply.counted()?;
                }
                if !(is_dot || has_attributes && has_handle) {
                    return Err(io::Error::new(ErrorKind::InvalidData, "an entry without attributes or handle"));
                }
                found += usize::from(!is_dot);
            }
            is_end = reply.word()? == 1;
            if !is_end && found == before {
                return Err(io::Error::new(ErrorKind::InvalidData, "a listing that does not go on"));
            }
        }
        if found == entries {
            return Ok(());
        }
        Err(io::Error::new(ErrorKind::InvalidData, format!("{found} entries of {entries}")))
    }

    fn handle_at(&self, at: usize) -> io::Result<nfs_fh3> {
        let bytes = self.buffer.get(at..at + 4).ok_or(ErrorKind::InvalidData)?;
        let len = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
        let handle = self.buffer.get(at + 4..at + 4 + len).ok_or(ErrorKind::InvalidData)?;
        Ok(nfs_fh3 { data: Opaque::owned(handle.to_vec()) })
    }

    /// Has all calls answered, of one kind, with `depth` in flight. Those that take the places of replies that came together
    /// are sent together.
    pub(crate) fn run<'a>(&mut self, calls: impl IntoIterator<Item = Call<'a>>, depth: usize) -> io::Result<()> {
        let mut calls = calls.into_iter();
        let (mut in_flight, mut least) = (0, HEAD);
        loop {
            for call in calls.by_ref().take(depth - in_flight) {
                least = call.least;
                self.put(&call)?;
                in_flight += 1;
            }
            self.socket.write_all(&self.out)?;
            self.out.clear();
            if in_flight == 0 {
                return Ok(());
            }
            in_flight -= self.receive(least)?;
        }
    }

    /// Adds a call to those that are sent together. A WRITE is sent at once, its data from where they are.
    fn put(&mut self, call: &Call<'_>) -> io::Result<()> {
        const SYS: u32 = 1;
        self.xid = self.xid.wrapping_add(1);
        let len = 4 * (10 + 5) + call.args.len() + call.data.len();
        // The mark, the call, root by AUTH_SYS (stamp, machine, user, group, no more groups), and no verifier.
        let head =
            [1 << 31 | len as u32, self.xid, 0, 2, call.program, 3, call.procedure, SYS, 20, 0, 0, 0, 0, 0, 0, 0];
        self.out.extend(head.iter().flat_map(|word: &u32| word.to_be_bytes()));
        self.out.extend_from_slice(&call.args);
        if call.data.is_empty() {
            return Ok(());
        }
        let mut sent = self.socket.write_vectored(&[IoSlice::new(&self.out), IoSlice::new(call.data)])?;
        if sent < self.out.len() {
            self.socket.write_all(&self.out[sent..])?;
            sent = self.out.len();
        }
        let left = &call.data[sent - self.out.len()..];
        self.out.clear();
        self.socket.write_all(left)
    }

    /// Receives what is there, at least one reply, and checks that each says success and has so many bytes. Returns how many
    /// there were; the last one stays at the beginning of the buffer if it is the only one.
    fn receive(&mut self, least: usize) -> io::Result<usize> {
        let mut count = 0;
        // What is left of the reply before.
        self.buffer.copy_within(self.taken..self.filled, 0);
        (self.filled, self.taken) = (self.filled - self.taken, 0);
        while count == 0 {
            let got = self.socket.read(&mut self.buffer[self.filled..])?;
            if got == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            self.filled += got;
            while let Some(len) = self.reply_at(self.taken, least)? {
                self.taken += len;
                count += 1;
            }
        }
        Ok(count)
    }

    /// The length of the reply that begins there, once it is complete.
    fn reply_at(&self, at: usize, least: usize) -> io::Result<Option<usize>> {
        let there = &self.buffer[at..self.filled];
        let word = |at: usize| match there.get(at..at + 4) {
            Some(it) => u32::from_be_bytes([it[0], it[1], it[2], it[3]]),
            None => u32::MAX,
        };
        let len = 4 + (word(0) & !(1 << 31)) as usize;
        if there.len() < 4 || (there.len() < len && len <= self.buffer.len()) {
            return Ok(None);
        }
        let why = match (word(8), word(12), word(24), word(28)) {
            (1, 0, 0, 0) if len >= least && there.len() >= len => return Ok(Some(len)),
            (1, 0, 3, _) => "the server has no such procedure".to_owned(),
            (.., status) => format!("a reply of {len} bytes, at least {least} wanted, with status {status}"),
        };
        Err(io::Error::new(ErrorKind::InvalidData, why))
    }
}
