//! A client that sends what a test wants: remote procedure calls in XDR, one by one or many at a time, from any port.
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

use nfs3_types::mount::{self, dirpath, mountres3, mountstat3};
use nfs3_types::nfs3::*;
use nfs3_types::rpc::{
    accept_stat_data, accepted_reply, auth_unix, call_body, fragment_header, msg_body, opaque_auth, reply_body, rpc_msg,
};
use nfs3_types::xdr_codec::{Opaque, Pack, Unpack};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};

use crate::common::{PATIENCE, until};

/// The user that requests come from.
pub(super) const USER: u32 = 1000;

pub(super) const WRITE: u32 = 7;

/// Connects from this address, and from a port that only root may use.
pub(super) fn connect_from(from: Ipv4Addr, to: SocketAddr) -> TcpStream {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let mut connected = None;
    // A port that was used lately is free again after a while.
    until("a free port", || {
        let port = 1023 - NEXT.fetch_add(1, Relaxed) % 400;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        match bind(&socket, &SocketAddrV4::new(from, port)).and_then(|()| connect(&socket, &to)) {
            Ok(()) => connected = Some(TcpStream::from(socket)),
            Err(Errno::ADDRINUSE | Errno::ADDRNOTAVAIL) => {}
            Err(error) => panic!("{from}:{port} to {to}: {error}"),
        }
        connected.is_some()
    });
    with_patience(connected.unwrap())
}

/// A socket on which nothing is waited for in vain for ever.
pub(super) fn with_patience(socket: TcpStream) -> TcpStream {
    socket.set_nodelay(true).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.set_write_timeout(Some(PATIENCE)).unwrap();
    socket
}

pub(super) fn pack(value: &impl Pack) -> Vec<u8> {
    let mut packed = Vec::new();
    value.pack(&mut packed).unwrap();
    packed
}

/// A record of one fragment.
pub(super) fn record(bytes: &[u8]) -> Vec<u8> {
    [&fragment_header::new(bytes.len() as u32, true).into_xdr_buf(), bytes].concat()
}

/// The bytes of a call, without the mark of its record.
pub(super) fn call(xid: u32, (prog, vers, proc): (u32, u32, u32), args: &[u8]) -> Vec<u8> {
    let cred = opaque_auth::auth_unix(&auth_unix { uid: USER, gid: USER, ..auth_unix::default() });
    let body = msg_body::CALL(call_body { rpcvers: 2, prog, vers, proc, cred, verf: opaque_auth::default() });
    [pack(&rpc_msg { xid, body }), args.to_vec()].concat()
}

/// A connection.
pub(super) struct Rpc {
    pub(super) socket: TcpStream,
    xid: u32,
}

impl Rpc {
    pub(super) fn of(socket: TcpStream) -> Self {
        Self { socket, xid: 0 }
    }

    /// Connects from a port that the server trusts.
    pub(super) fn new(to: SocketAddr) -> Self {
        Self::of(connect_from(Ipv4Addr::LOCALHOST, to))
    }

    pub(super) fn send(&mut self, procedure: (u32, u32, u32), args: &[u8]) -> u32 {
        self.try_send(procedure, args).unwrap()
    }

    fn try_send(&mut self, procedure: (u32, u32, u32), args: &[u8]) -> io::Result<u32> {
        self.xid += 1;
        self.socket.write_all(&record(&call(self.xid, procedure, args)))?;
        Ok(self.xid)
    }

    /// The next reply: its number, what became of the call, and the results.
    pub(super) fn reply(&mut self) -> (u32, reply_body<'static>, Vec<u8>) {
        self.try_reply().unwrap()
    }

    fn try_reply(&mut self) -> io::Result<(u32, reply_body<'static>, Vec<u8>)> {
        let mut mark = [0; 4];
        self.socket.read_exact(&mut mark)?;
        let mark = fragment_header::from(mark);
        assert!(mark.eof(), "replies have one fragment");
        let mut bytes = vec![0; mark.fragment_length() as usize];
        self.socket.read_exact(&mut bytes)?;
        let (message, len) = rpc_msg::unpack(&mut &bytes[..]).unwrap();
        let msg_body::REPLY(body) = message.body else { panic!("no reply") };
        Ok((message.xid, body, bytes.split_off(len)))
    }

    /// What becomes of a call.
    pub(super) fn asked(&mut self, procedure: (u32, u32, u32), args: &[u8]) -> (reply_body<'static>, Vec<u8>) {
        self.try_asked(procedure, args).unwrap()
    }

    /// The same, of a server that may be gone.
    pub(super) fn try_asked(
        &mut self,
        procedure: (u32, u32, u32),
        args: &[u8],
    ) -> io::Result<(reply_body<'static>, Vec<u8>)> {
        let sent = self.try_send(procedure, args)?;
        let (xid, body, results) = self.try_reply()?;
        assert_eq!(xid, sent);
        Ok((body, results))
    }

    /// Asks, and reads results that have no byte more.
    pub(super) fn ask<R: Unpack>(&mut self, procedure: u32, args: &impl Pack) -> R {
        let (body, results) = self.asked((PROGRAM, 3, procedure), &pack(args));
        assert!(is_success(&body), "{procedure}: {body:?}");
        unpack(&results)
    }

    /// Whether the server has closed the connection, without a reply.
    pub(super) fn is_closed(&mut self) -> bool {
        // An error: what was sent after the close was answered by a reset.
        matches!(self.socket.read(&mut [0]), Ok(0) | Err(_))
    }

    pub(super) fn mount(&mut self, path: &[u8]) -> Result<nfs_fh3, mountstat3> {
        let (body, results) = self.asked((mount::PROGRAM, 3, 1), &pack(&dirpath(Opaque::borrowed(path))));
        assert!(is_success(&body), "MNT: {body:?}");
        match unpack(&results) {
            mountres3::Ok(ok) => Ok(nfs_fh3 { data: ok.fhandle.0 }),
            mountres3::Err(status) => Err(status),
        }
    }

    pub(super) fn root(&mut self) -> nfs_fh3 {
        self.mount(b"/").unwrap()
    }

    pub(super) fn lookup(&mut self, directory: &nfs_fh3, name: &[u8]) -> Result<nfs_fh3, nfsstat3> {
        match self.ask::<LOOKUP3res>(3, &LOOKUP3args { what: entry(directory, name) }) {
            LOOKUP3res::Ok(ok) => Ok(ok.object),
            LOOKUP3res::Err((status, _)) => Err(status),
        }
    }

    /// Makes a file, or finds it.
    pub(super) fn create(&mut self, directory: &nfs_fh3, name: &[u8]) -> Result<nfs_fh3, nfsstat3> {
        let new = sattr3 { mode: Nfs3Option::Some(0o644), ..sattr3::default() };
        let args = CREATE3args { where_: entry(directory, name), how: createhow3::UNCHECKED(new) };
        match self.ask::<CREATE3res>(8, &args) {
            CREATE3res::Ok(ok) => Ok(ok.obj.unwrap()),
            CREATE3res::Err((status, _)) => Err(status),
        }
    }

    pub(super) fn mkdir(&mut self, directory: &nfs_fh3, name: &[u8]) -> Result<nfs_fh3, nfsstat3> {
        let attributes = sattr3 { mode: Nfs3Option::Some(0o755), ..sattr3::default() };
        match self.ask::<MKDIR3res>(9, &MKDIR3args { where_: entry(directory, name), attributes }) {
            MKDIR3res::Ok(ok) => Ok(ok.obj.unwrap()),
            MKDIR3res::Err((status, _)) => Err(status),
        }
    }

    /// Writes all of it, however much an answer says. Returns the last answer.
    pub(super) fn write(&mut self, file: &nfs_fh3, at: u64, data: &[u8], stable: stable_how) -> WRITE3resok {
        let (mut done, mut last) = (0, None);
        until("the answer to a WRITE", || {
            match self.ask::<WRITE3res>(WRITE, &write_args(file, at + done as u64, &data[done..], stable)) {
                WRITE3res::Ok(ok) => {
                    done += ok.count as usize;
                    last = Some(ok);
                }
                // There is no memory now: a client asks again. So does `read`.
                WRITE3res::Err((nfsstat3::NFS3ERR_JUKEBOX, _)) => {}
                WRITE3res::Err((status, _)) => panic!("{status:?}"),
            }
            done == data.len()
        });
        last.unwrap()
    }

    /// Returns the verifier.
    pub(super) fn commit(&mut self, file: &nfs_fh3) -> writeverf3 {
        match self.ask::<COMMIT3res>(21, &COMMIT3args { file: file.clone(), offset: 0, count: 0 }) {
            COMMIT3res::Ok(ok) => ok.verf,
            COMMIT3res::Err((status, _)) => panic!("{status:?}"),
        }
    }

    /// Reads so many bytes, in as many READs as it takes, or up to the file's end.
    pub(super) fn read(&mut self, file: &nfs_fh3, at: u64, count: usize) -> Vec<u8> {
        let (mut bytes, mut is_end) = (Vec::new(), false);
        until("the answer to a READ", || {
            let (offset, left) = (at + bytes.len() as u64, (count - bytes.len()) as u32);
            match self.ask::<READ3res<'_>>(6, &READ3args { file: file.clone(), offset, count: left }) {
                READ3res::Ok(ok) => {
                    assert_eq!(ok.count as usize, ok.data.len());
                    bytes.extend_from_slice(&ok.data.0);
                    is_end = ok.eof;
                }
                READ3res::Err((nfsstat3::NFS3ERR_JUKEBOX, _)) => {}
                READ3res::Err((status, _)) => panic!("{status:?}"),
            }
            bytes.len() == count || is_end
        });
        bytes
    }
}

pub(super) fn unpack<R: Unpack>(results: &[u8]) -> R {
    let (read, len) = R::unpack(&mut &results[..]).unwrap();
    assert_eq!(len, results.len(), "the results are read whole");
    read
}

pub(super) fn entry<'a>(directory: &nfs_fh3, name: &'a [u8]) -> diropargs3<'a> {
    diropargs3 { dir: directory.clone(), name: filename3(Opaque::borrowed(name)) }
}

pub(super) fn write_args<'a>(file: &nfs_fh3, offset: u64, data: &'a [u8], stable: stable_how) -> WRITE3args<'a> {
    WRITE3args { file: file.clone(), offset, count: data.len() as u32, stable, data: Opaque::borrowed(data) }
}

pub(super) fn is_success(body: &reply_body<'_>) -> bool {
    matches!(body, reply_body::MSG_ACCEPTED(accepted_reply { reply_data: accept_stat_data::SUCCESS, .. }))
}
