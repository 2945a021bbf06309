//! An echo server over io_uring with thousands of connections and few pages, and the clients that load it.
//!
//! A connection has a page only from the moment its data arrives until it is echoed: the kernel receives into a ring of
//! buffers, and replies go out from registered memory. When free pages fall below the low mark, the server stops reading
//! and accepting. The data then waits in the sockets, and TCP slows the clients down.
//!
//! Left out, for brevity: a limit on the time of a send, so clients that do not read can hold all spare pages; and what to do when
//! descriptors run out (`EMFILE`) or a signal interrupts a call (`EINTR`): both end this server.
//!
//! `cargo run --release -p pagemill --example uring_server [CONNECTIONS]`
use std::collections::{HashMap, VecDeque};
use std::error::Error;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, RawFd};
use std::thread;
use std::time::Instant;

use io_uring::{IoUring, cqueue, opcode, squeue, types::Fd};
use pagemill::{Allocator, BufRing, Device, FixedBuffers, Gfp, InFlight, Memory, PAGE_SIZE, Page, Piece, Watermarks};

/// Pages of the whole server: too few for this load, so that the marks matter.
const PAGES: usize = 400;
/// Pages that the kernel may choose from.
const BUFFERS: u16 = 256;
const GROUP: u16 = 0;
const MARKS: Watermarks = Watermarks::above(64);

/// `user_data`: the kind of request in the upper half, the connection's descriptor in the lower.
const ACCEPT: u64 = 1 << 32;
const RECEIVE: u64 = 2 << 32;
const SEND: u64 = 3 << 32;

struct Connection {
    socket: TcpStream,
    /// The page that is sent, and the part of it that is left.
    reply: Option<(InFlight<Page>, Piece)>,
}

struct Server {
    ring: IoUring,
    listener: TcpListener,
    received: BufRing,
    registered: FixedBuffers,
    connections: HashMap<RawFd, Connection>,
    /// Connections that are to be read next, and those whose data found no buffer.
    to_read: Vec<RawFd>,
    put_off: VecDeque<RawFd>,
    /// Accepts that wait for a client.
    accepts: usize,
    accepted: usize,
    bytes: u64,
    /// Reads that found no buffer, and rounds in which memory was low.
    without_buffer: u64,
    low: u64,
    _device: Device,
    memory: Allocator,
}

impl Server {
    fn new(listener: TcpListener) -> Result<Self, Box<dyn Error>> {
        let ring = IoUring::new(1024)?;
        // SAFETY: the ring is open.
        let fd = unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) };
        let memory = Allocator::builder().memory(Memory::anonymous(PAGES).watermarks(MARKS)).build()?;
        let registered = FixedBuffers::new(fd)?;
        Ok(Self {
            listener,
            received: BufRing::new(fd, GROUP, BUFFERS, &memory)?,
            _device: Device::new(&memory, registered.clone())?,
            registered,
            connections: HashMap::new(),
            to_read: Vec::new(),
            put_off: VecDeque::new(),
            accepts: 0,
            accepted: 0,
            bytes: 0,
            without_buffer: 0,
            low: 0,
            ring,
            memory,
        })
    }

    /// Serves this number of connections until all of them are closed.
    fn serve(&mut self, connections: usize) -> Result<(), Box<dyn Error>> {
        while self.accepted < connections || !self.connections.is_empty() {
            self.received.fill(Gfp::NOWAIT)?; // One bulk request for all pages that were taken.
            if self.is_low() {
                self.low += 1; // Replies are on their way, and free their pages when they are sent.
            } else {
                self.resume(connections)?;
            }
            self.ring.submit_and_wait(1)?;
            let completions: Vec<_> = self.ring.completion().collect();
            for done in completions {
                let fd = done.user_data() as u32 as RawFd;
                match done.user_data() & !u64::from(u32::MAX) {
                    ACCEPT => self.accepted(done.result())?,
                    RECEIVE => self.received(fd, &done)?,
                    _ => self.sent(fd, done.result())?,
                }
            }
        }
        Ok(())
    }

    /// Whether free pages are at the low mark. Computed from two counters, which is cheaper than asking each zone what it has
    /// (`Allocator::zoneinfo`) in every round.
    fn is_low(&self) -> bool {
        let stats = self.memory.stats();
        PAGES as u64 - (stats.allocated - stats.freed) <= u64::from(MARKS.low)
    }

    /// Reads and accepts again.
    fn resume(&mut self, connections: usize) -> Result<(), Box<dyn Error>> {
        let buffers = usize::from(BUFFERS) - self.received.holes();
        let again = self.put_off.drain(..buffers.min(self.put_off.len()));
        self.to_read.extend(again);
        for fd in std::mem::take(&mut self.to_read) {
            let receive = opcode::Recv::new(Fd(fd), std::ptr::null_mut(), PAGE_SIZE as u32).buf_group(GROUP).build();
            self.push(receive.flags(squeue::Flags::BUFFER_SELECT), RECEIVE | fd as u64)?;
        }
        while self.accepts < 64.min(connections - self.accepted) {
            let accept = opcode::Accept::new(Fd(self.listener.as_raw_fd()), std::ptr::null_mut(), std::ptr::null_mut());
            self.push(accept.build(), ACCEPT)?;
            self.accepts += 1;
        }
        Ok(())
    }

    fn push(&mut self, request: squeue::Entry, user_data: u64) -> Result<(), Box<dyn Error>> {
        let request = request.user_data(user_data);
        // SAFETY: a request names no memory but a reply's, which is in flight. Its socket is open until it is complete.
        while unsafe { self.ring.submission().push(&request) }.is_err() {
            self.ring.submit()?; // The queue is full.
        }
        Ok(())
    }

    fn accepted(&mut self, result: i32) -> Result<(), Box<dyn Error>> {
        let fd = checked(result)? as RawFd;
        // SAFETY: the kernel has just made the descriptor for this accept.
        let socket = unsafe { TcpStream::from_raw_fd(fd) };
        self.connections.insert(fd, Connection { socket, reply: None });
        self.to_read.push(fd);
        (self.accepts, self.accepted) = (self.accepts - 1, self.accepted + 1);
        Ok(())
    }

    fn received(&mut self, fd: RawFd, done: &cqueue::Entry) -> Result<(), Box<dyn Error>> {
        // Without data there may still be a buffer, which goes back when its page is dropped.
        // SAFETY: the number of this completion, taken once.
        let page = cqueue::buffer_select(done.flags()).map(|id| unsafe { self.received.take(id) }).transpose()?;
        match (done.result(), page) {
            (result, _) if -result == libc::ENOBUFS => {
                self.without_buffer += 1;
                self.put_off.push_back(fd);
            }
            (len @ 1.., Some(page)) => {
                let pieces = self.registered.pieces(&page[..len as usize])?;
                let Some(connection) = self.connections.get_mut(&fd) else { return Ok(()) };
                connection.reply = Some((InFlight::new(page), pieces[0])); // A page lies in one buffer.
                self.send(fd)?;
            }
            _ => _ = self.connections.remove(&fd), // The client has closed the connection, or it broke.
        }
        Ok(())
    }

    /// Sends what is left of the reply.
    fn send(&mut self, fd: RawFd) -> Result<(), Box<dyn Error>> {
        let Some(Connection { socket, reply: Some((_, rest)) }) = self.connections.get(&fd) else { return Ok(()) };
        let from = std::ptr::with_exposed_provenance(rest.addr);
        let write = opcode::WriteFixed::new(Fd(socket.as_raw_fd()), from, rest.len as u32, rest.index).build();
        self.push(write, SEND | fd as u64)
    }

    fn sent(&mut self, fd: RawFd, result: i32) -> Result<(), Box<dyn Error>> {
        let Some(Connection { reply, .. }) = self.connections.get_mut(&fd) else { return Ok(()) };
        let Some((page, mut rest)) = reply.take() else { return Ok(()) };
        let Ok(len) = usize::try_from(result) else {
            // SAFETY: the only request that names the page has failed.
            drop(unsafe { page.done() });
            self.connections.remove(&fd);
            return Ok(());
        };
        (rest.addr, rest.len) = (rest.addr + len, rest.len - len);
        self.bytes += len as u64;
        if rest.len > 0 {
            *reply = Some((page, rest));
            return self.send(fd);
        }
        // SAFETY: the only request that names the page is complete.
        drop(unsafe { page.done() });
        self.to_read.push(fd); // Read again if memory allows it.
        Ok(())
    }
}

fn checked(result: i32) -> std::io::Result<u32> {
    u32::try_from(result).map_err(|_| std::io::Error::from_raw_os_error(-result))
}

/// Opens connections, sends a message on each of them, and checks what comes back. Returns the number of bytes.
fn load(server: SocketAddr, connections: usize, rounds: u8) -> std::io::Result<u64> {
    let mut sockets = (0..connections).map(|_| TcpStream::connect(server)).collect::<Result<Vec<_>, _>>()?;
    let (mut bytes, mut reply) = (0, [0; PAGE_SIZE]);
    for round in 0..rounds {
        let message = |at: usize| [round ^ at as u8; PAGE_SIZE];
        let len = |at: usize| 1 + (at * 131 + usize::from(round) * 1777) % PAGE_SIZE;
        for (at, socket) in sockets.iter_mut().enumerate() {
            socket.write_all(&message(at)[..len(at)])?;
        }
        for (at, socket) in sockets.iter_mut().enumerate() {
            let reply = &mut reply[..len(at)];
            socket.read_exact(reply)?;
            assert!(*reply == message(at)[..len(at)], "connection {at} got another one's bytes");
            bytes += reply.len() as u64;
        }
    }
    Ok(bytes)
}

/// Both ends of each connection are in this process. Returns how many connections it may open, up to `wanted`.
fn raise_open_files(wanted: usize) -> usize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the system reads and writes the structure.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
    }
    wanted.min((limit.rlim_cur as usize).saturating_sub(64) / 2)
}

fn main() -> Result<(), Box<dyn Error>> {
    let wanted = std::env::args().nth(1).map_or(Ok(2000), |count| count.parse())?;
    let connections = raise_open_files(wanted) / 2 * 2;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    // The standard library's queue of 128 is short for clients that all come at once.
    // SAFETY: it is called on an open socket, and has no pointers.
    unsafe { libc::listen(listener.as_raw_fd(), 4096) };
    let address = listener.local_addr()?;
    let mut server = match Server::new(listener) {
        Ok(server) => server,
        // Where io_uring is forbidden, or too old, the message says what to do.
        Err(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    let start = Instant::now();
    let client = move || {
        load(address, connections / 2, 5).unwrap_or_else(|why| {
            eprintln!("a client failed: {why}"); // The server would wait for its connections for ever.
            std::process::exit(1)
        })
    };
    let clients = [(); 2].map(|()| thread::spawn(client));
    server.serve(connections)?;
    let echoed: u64 = clients.into_iter().map(|client| client.join().expect("it does not panic")).sum();

    let (seconds, stats) = (start.elapsed().as_secs_f64(), server.memory.stats());
    println!("{connections} connections, {echoed} bytes echoed in {seconds:.2} s, with {PAGES} pages of memory");
    println!("{} pages handed out by {} bulk requests", stats.allocated, stats.bulk_calls());
    println!(
        "below the low mark in {} rounds; {} reads put off until pages were free",
        server.low, server.without_buffer
    );
    assert_eq!(server.bytes, echoed);
    let Server { received, memory, .. } = server;
    drop(received);
    assert_eq!(memory.validate().unwrap().handed_out, 0);
    Ok(())
}
