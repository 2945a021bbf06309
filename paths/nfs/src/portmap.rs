//! Tells this machine's portmapper (RFC 1833, version 2) where NFS and MOUNT are, for clients that ask it.
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use nfs3_types::portmap::{IPPROTO_TCP, PMAP_PORT, PMAP_PROG, PROGRAM, VERSION, mapping};
use nfs3_types::{mount, nfs3};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};

use crate::error::Error;
use crate::xdr::pack;

/// Where a portmapper listens.
const PORTMAPPER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), PMAP_PORT);
const SET: u32 = PMAP_PROG::PMAPPROC_SET as u32;
const UNSET: u32 = PMAP_PROG::PMAPPROC_UNSET as u32;
/// How long a portmapper may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Both programs are registered as long as this lives.
pub(crate) struct Registered {
    portmapper: SocketAddr,
    /// Those that this has registered: others are other servers'.
    programs: Vec<u32>,
}

impl Registered {
    /// # Errors
    /// There is no portmapper, it refuses, or other servers are registered.
    pub(crate) fn new(port: u16) -> Result<Self, Error> {
        Self::at(PORTMAPPER, port)
    }

    fn at(portmapper: SocketAddr, port: u16) -> Result<Self, Error> {
        let mut this = Self { portmapper, programs: Vec::new() };
        for program in [nfs3::PROGRAM, mount::PROGRAM] {
            // Dropped here, it takes back what it did.
            let is_set = ask(portmapper, SET, program, port).map_err(|error| {
                let what = format!("the portmapper at {portmapper}");
                Error::io(what, error, "start rpcbind, or leave --register out and tell clients the port")
            })?;
            if !is_set {
                return Err(Error::new(
                    format!("the portmapper has another server for program {program}, or lets only root register"),
                    "see what is registered with `rpcinfo -p`, and stop the other server or leave --register out",
                ));
            }
            this.programs.push(program);
        }
        Ok(this)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        for &program in &self.programs {
            // A portmapper that is gone has forgotten it.
            let _ = ask(self.portmapper, UNSET, program, 0);
        }
    }
}

/// Calls the portmapper. Returns whether it did as it was told.
fn ask(portmapper: SocketAddr, procedure: u32, program: u32, port: u16) -> io::Result<bool> {
    let mut socket = connected(portmapper)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    const XID: u32 = 1;
    // The call (RFC 5531): its number, CALL, version of RPC, and neither a credential nor a verifier.
    let head = [XID, 0, 2, PROGRAM, VERSION, procedure, 0, 0, 0, 0];
    let mut call: Vec<u8> = head.iter().flat_map(|word| word.to_be_bytes()).collect();
    call.extend(pack(&mapping { prog: program, vers: 3, prot: IPPROTO_TCP, port: port.into() }));
    let mark = 1_u32 << 31 | call.len() as u32;
    socket.write_all(&[&mark.to_be_bytes()[..], &call].concat())?;
    // The reply: mark, number, REPLY, accepted, an empty verifier, success, and the result.
    let mut reply = [0; 4 * 8];
    socket.read_exact(&mut reply)?;
    let word = |at: usize| u32::from_be_bytes([reply[4 * at], reply[4 * at + 1], reply[4 * at + 2], reply[4 * at + 3]]);
    if (word(1), word(2), word(3), word(6)) != (XID, 1, 0, 0) {
        return Err(io::Error::new(ErrorKind::InvalidData, "it refuses the call"));
    }
    Ok(word(7) == 1)
}

/// From a port that only root may use, if one is free: other calls are refused.
fn connected(to: SocketAddr) -> io::Result<TcpStream> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    for port in (600..1024).rev() {
        if bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, port))).is_ok() {
            break;
        }
    }
    connect(&socket, &to)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// A portmapper that gives these answers. Returns what it was asked: procedure, program, version, protocol, port.
    fn portmapper(answers: &'static [u32]) -> (SocketAddr, thread::JoinHandle<Vec<[u32; 5]>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let serve = move |&answer: &u32| {
            let (mut socket, _) = listener.accept().unwrap();
            let mut call = [0; 4 + 4 * 14];
            socket.read_exact(&mut call).unwrap();
            let words: Vec<u32> = call.chunks(4).map(|word| u32::from_be_bytes(word.try_into().unwrap())).collect();
            assert_eq!((words[0], words[4], words[5]), (1 << 31 | 56, 100_000, 2));
            let reply = [1 << 31 | 28, words[1], 1, 0, 0, 0, 0, answer];
            socket.write_all(&reply.iter().flat_map(|word: &u32| word.to_be_bytes()).collect::<Vec<_>>()).unwrap();
            [words[6], words[11], words[12], words[13], words[14]]
        };
        (address, thread::spawn(move || answers.iter().map(serve).collect()))
    }

    #[test]
    fn both_programs_are_registered_for_as_long_as_the_server_runs() {
        let (address, asked) = portmapper(&[1, 1, 1, 1]);
        drop(Registered::at(address, 2049).unwrap());
        let of = |procedure, program, port| [procedure, program, 3, 6, port];
        let expected = [of(SET, 100_003, 2049), of(SET, 100_005, 2049), of(UNSET, 100_003, 0), of(UNSET, 100_005, 0)];
        assert_eq!(asked.join().unwrap(), expected);
    }

    #[test]
    fn a_portmapper_that_refuses_or_is_not_there_is_an_error_that_says_what_to_do() {
        let (address, asked) = portmapper(&[1, 0, 1]);
        let refused = Registered::at(address, 2049).err().unwrap();
        assert!(refused.next_step().contains("rpcinfo"), "{refused}");
        // What it did is taken back, and nothing else: MOUNT is another server's.
        let asked = asked.join().unwrap();
        assert_eq!(
            asked.iter().map(|call| (call[0], call[1])).collect::<Vec<_>>(),
            [(SET, 100_003), (SET, 100_005), (UNSET, 100_003)]
        );
        let missing = Registered::at(address, 2049).err().unwrap();
        assert!(missing.next_step().contains("rpcbind"), "{missing}");
    }
}
