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

/// Calls in flight.
const DEPTH: usize = 8;
/// How long a server may take for a reply.
const PATIENCE: Duration = Duration::from_secs(60);
/// The length of a reply's header: its mark, six words, and the status of the procedure.
const HEAD: usize = 4 + 6 * 4 + 4;

/// A connection to a server.
pub(crate) struct Client {
    socket: TcpStream,
    xid: u32,
    reply: Vec<u8>,
}

/// A call, with the data of a WRITE.
pub(crate) struct Call<'a> {
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
        Self { procedure, args: pack(args), data: &[], least: HEAD }
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
        Self { procedure: 7, args, data, least: HEAD }
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
    /// As much of a directory as 64 KiB have, from its beginning.
    pub(crate) fn list(directory: &nfs_fh3) -> Self {
        let (cookie, cookieverf) = (0, cookieverf3::default());
        let args =
            READDIRPLUS3args { dir: directory.clone(), cookie, cookieverf, dircount: 1 << 16, maxcount: 1 << 16 };
        Self { least: 16 << 10, ..Self::new(17, &args) }
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
            return Ok(Self { socket, xid: 0, reply: Vec::with_capacity(2 << 20) });
        }
        Err(ErrorKind::AddrInUse.into())
    }

    /// The handle of a directory, by MOUNT at this server.
    pub(crate) fn mount(&mut self, path: &str) -> io::Result<nfs_fh3> {
        self.send(100_005, &Call::new(1, &Opaque::borrowed(path.as_bytes())))?;
        self.receive(HEAD + 8)?;
        self.handle_at(HEAD)
    }

    pub(crate) fn lookup(&mut self, directory: &nfs_fh3, name: &str) -> io::Result<nfs_fh3> {
        self.send(100_003, &Call::new(3, &LOOKUP3args { what: entry(directory, name) }))?;
        self.receive(HEAD + 8)?;
        self.handle_at(HEAD)
    }

    fn handle_at(&self, at: usize) -> io::Result<nfs_fh3> {
        let bytes = self.reply.get(at..at + 4).ok_or(ErrorKind::InvalidData)?;
        let len = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
        let handle = self.reply.get(at + 4..at + 4 + len).ok_or(ErrorKind::InvalidData)?;
        Ok(nfs_fh3 { data: Opaque::owned(handle.to_vec()) })
    }

    /// Has all calls answered, with so many in flight that the server is never without one.
    pub(crate) fn run<'a>(&mut self, calls: impl IntoIterator<Item = Call<'a>>) -> io::Result<()> {
        let mut least = std::collections::VecDeque::with_capacity(DEPTH);
        for call in calls {
            if least.len() == DEPTH {
                // Replies come in any order; these calls are of one kind.
                let least = least.pop_front().unwrap_or(HEAD);
                self.receive(least)?;
            }
            self.send(100_003, &call)?;
            least.push_back(call.least);
        }
        least.into_iter().try_for_each(|least| self.receive(least))
    }

    fn send(&mut self, program: u32, call: &Call<'_>) -> io::Result<()> {
        const SYS: u32 = 1;
        self.xid = self.xid.wrapping_add(1);
        let len = 4 * (10 + 5) + call.args.len() + call.data.len();
        // The mark, the call, root by AUTH_SYS (stamp, machine, user, group, no more groups), and no verifier.
        let head = [1 << 31 | len as u32, self.xid, 0, 2, program, 3, call.procedure, SYS, 20, 0, 0, 0, 0, 0, 0, 0];
        let mut bytes: Vec<u8> = head.iter().flat_map(|word: &u32| word.to_be_bytes()).collect();
        bytes.extend_from_slice(&call.args);
        let mut sent = self.socket.write_vectored(&[IoSlice::new(&bytes), IoSlice::new(call.data)])?;
        if sent < bytes.len() {
            self.socket.write_all(&bytes[sent..])?;
            sent = bytes.len();
        }
        self.socket.write_all(&call.data[sent - bytes.len()..])
    }

    /// Receives a reply, which has at least so many bytes, and checks that it says success.
    fn receive(&mut self, least: usize) -> io::Result<()> {
        let mut mark = [0; 4];
        self.socket.read_exact(&mut mark)?;
        let len = (u32::from_be_bytes(mark) & !(1 << 31)) as usize;
        self.reply.resize(4 + len, 0);
        self.socket.read_exact(&mut self.reply[4..])?;
        let word = |at: usize| {
            self.reply.get(at..at + 4).map_or(u32::MAX, |it| u32::from_be_bytes([it[0], it[1], it[2], it[3]]))
        };
        if (word(8), word(12), word(24), word(28)) != (1, 0, 0, 0) || self.reply.len() < least {
            let said = format!("a reply of {len} bytes, at least {least} wanted, with status {}", word(28));
            return Err(io::Error::new(ErrorKind::InvalidData, said));
        }
        Ok(())
    }
}
