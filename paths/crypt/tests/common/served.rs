//! A volume on a server in this process, and a client that can send anything.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use pagemill::{Allocator, PageCount};
use pagemill_crypt::nbd::{Config, Export, Tls};
use pagemill_crypt::serve::{
    Behind, DataPath, Disk, Listener, Memory, MemoryStats, Options, Server, TimeLimits, TlsServer, Way,
};
use pagemill_crypt::{SectorSize, Volume, plain::Plain};

use crate::common::{Bench, PATIENCE, pattern, until};

pub(crate) const PART: usize = 1 << 20;

/// The settings of a test's server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) way: Way,
    pub(crate) pages: usize,
    pub(crate) promised: usize,
    pub(crate) threads: usize,
    pub(crate) max_connections: usize,
    pub(crate) limits: TimeLimits,
    pub(crate) may_discard: bool,
    /// The name of its socket.
    pub(crate) socket: &'static str,
    /// Plain pages that the server keeps.
    pub(crate) cache: Option<usize>,
}

impl Setup {
    pub(crate) fn new() -> Self {
        let limits = TimeLimits { handshake: PATIENCE, stall: None, stop: PATIENCE };
        Self {
            way: Way::Auto,
            pages: 8192,
            promised: 256,
            threads: 2,
            max_connections: 64,
            limits,
            may_discard: false,
            socket: "socket",
            cache: None,
        }
    }
}

/// A plain volume over the whole file.
pub(crate) fn plain_volume(len: u64, sector: u64) -> Volume {
    let sector_size = SectorSize::new(sector).unwrap();
    let plain = Plain { key_bytes: 64, hash: None, offset: 0, skip: 0, size: None, sector_size, counts_sectors: false };
    Volume::new(&plain.key(&pattern(64)).unwrap(), plain.geometry(len).unwrap()).unwrap()
}

/// The contents of the volume in `file`.
pub(crate) fn plain_contents(file: &File, sector: u64) -> Vec<u8> {
    let len = file.metadata().unwrap().len();
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    plain_volume(len, sector).decrypt_in_place(0, &mut bytes).unwrap();
    bytes
}

pub(crate) struct Served {
    pub(crate) allocator: Allocator,
    pub(crate) server: Arc<Server>,
    pub(crate) socket: PathBuf,
    stop: UnixStream,
    accepting: JoinHandle<()>,
}

impl Served {
    /// Serves `volume`, whose data is in `data`. Returns `None` and prints that it is skipped if a ring is demanded and
    /// the system has none.
    pub(crate) fn start(bench: &Bench, data: impl Into<Behind>, volume: Volume, setup: Setup) -> Option<Self> {
        Self::start_with(bench, vec![("", data.into(), volume)], setup, None)
    }

    /// The same, with TLS required.
    pub(crate) fn start_tls(bench: &Bench, data: File, volume: Volume, setup: Setup, tls: TlsServer) -> Self {
        Self::start_with(bench, vec![("", data.into(), volume)], setup, Some(tls)).expect("the way is no ring")
    }

    /// The same, of several volumes by their names.
    pub(crate) fn start_all(bench: &Bench, volumes: Vec<(&str, Behind, Volume)>, setup: Setup) -> Option<Self> {
        Self::start_with(bench, volumes, setup, None)
    }

    fn start_with(
        bench: &Bench,
        volumes: Vec<(&str, Behind, Volume)>,
        setup: Setup,
        tls: Option<TlsServer>,
    ) -> Option<Self> {
        let allocator = Allocator::builder().pages(setup.pages).build().unwrap();
        let memory = Memory::new(&allocator, setup.promised, PART).unwrap();
        let prepared = |(name, data, volume): (&str, Behind, Volume)| {
            let geometry = *volume.geometry();
            let disk = Disk::new(data, geometry.offset, geometry.sector_size.bytes(), false);
            let export = Export {
                name: name.to_owned(),
                description: "a volume".to_owned(),
                size: geometry.len,
                is_read_only: false,
                min_block: disk.block() as u32,
                preferred_block: 4096,
            };
            (DataPath { volume, disk, memory: memory.clone() }, export)
        };
        let (paths, exports) = volumes.into_iter().map(prepared).unzip();
        let options = Options {
            config: Config {
                exports,
                tls: if tls.is_some() { Tls::Required } else { Tls::None },
                block_size_agreed: false,
            },
            tls,
            threads: setup.threads,
            way: setup.way,
            max_connections: setup.max_connections,
            limits: setup.limits,
            may_discard: setup.may_discard,
        };
        let server = match Server::start_all(paths, options, setup.cache.map(PageCount::new)) {
            Ok(server) => Arc::new(server),
            Err(error) if setup.way == Way::Uring => {
                eprintln!("skipped: the system refuses io_uring: {error}");
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let socket = bench.path(setup.socket);
        let _ = std::fs::remove_file(&socket);
        let listener = Listener::Unix(UnixListener::bind(&socket).unwrap());
        let (stop, stopped) = UnixStream::pair().unwrap();
        let theirs = Arc::clone(&server);
        let accepting = thread::spawn(move || theirs.accept(&listener, stopped.as_fd()).unwrap());
        Some(Self { allocator, server, socket, stop, accepting })
    }

    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    /// Stops it, and checks that all its memory is free.
    pub(crate) fn stop(self) -> MemoryStats {
        self.try_stop().unwrap()
    }

    /// The same, where the disk may fail.
    pub(crate) fn try_stop(self) -> std::io::Result<MemoryStats> {
        let Self { allocator, server, stop, accepting, .. } = self;
        drop(stop);
        accepting.join().unwrap();
        let out = server.path().memory.pool().stats().out;
        let server = Arc::into_inner(server).expect("nobody else has the server");
        let stats = server.stop();
        // All clients are gone now.
        let census = allocator.validate().unwrap();
        assert_eq!(census.handed_out, 0, "pages are still out, {out} of the pool before");
        stats
    }

    /// Drops the server, and returns its allocator.
    pub(crate) fn drop_server(self) -> Allocator {
        let Self { allocator, server, stop, accepting, .. } = self;
        drop(stop);
        accepting.join().unwrap();
        drop(Arc::into_inner(server).expect("nobody else has the server"));
        allocator
    }

    /// Waits until the server has `count` clients.
    pub(crate) fn wait_for_connections(&self, count: usize) {
        until(&format!("the number of {count} clients"), || self.server.connections() == count);
    }
}

/// Serves a new volume of `len` bytes by each way to the disk that the system has. `test` stops the server.
pub(crate) fn by_each_way(setup: Setup, len: u64, sector: u64, test: impl Fn(&Bench, Served, Way)) {
    let bench = Bench::with(&[]).unwrap();
    for way in [Way::Plain, Way::Uring] {
        bench.file("image", len);
        let volume = plain_volume(len, sector);
        if let Some(served) = Served::start(&bench, bench.open("image"), volume, Setup { way, ..setup }) {
            test(&bench, served, way);
        }
    }
}

pub(crate) mod command {
    pub(crate) const READ: u16 = 0;
    pub(crate) const WRITE: u16 = 1;
    pub(crate) const DISCONNECT: u16 = 2;
    pub(crate) const FLUSH: u16 = 3;
    pub(crate) const TRIM: u16 = 4;
    pub(crate) const CACHE: u16 = 5;
    pub(crate) const WRITE_ZEROES: u16 = 6;
}
pub(crate) const FUA: u16 = 1;

/// A request's header.
pub(crate) fn header(command: u16, flags: u16, cookie: u64, at: u64, len: u32) -> Vec<u8> {
    let header = [
        &0x2560_9513u32.to_be_bytes()[..],
        &flags.to_be_bytes(),
        &command.to_be_bytes(),
        &cookie.to_be_bytes(),
        &at.to_be_bytes(),
        &len.to_be_bytes(),
    ];
    header.concat()
}

/// A client past negotiation, with simple replies.
pub(crate) struct Client<S = UnixStream>(pub(crate) S);

impl Client {
    pub(crate) fn connect(served: &Served) -> Self {
        Self::connect_to(served, "").unwrap()
    }

    /// Connects to the export of this name; `None` if there is none.
    pub(crate) fn connect_to(served: &Served, name: &str) -> Option<Self> {
        let mut stream = UnixStream::connect(&served.socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.read_exact(&mut [0; 18]).unwrap();
        // Fixed newstyle, no zeroes.
        stream.write_all(&3u32.to_be_bytes()).unwrap();
        Self::go_to(stream, name)
    }
}

impl<S: Read + Write> Client<S> {
    /// Asks for the empty name, and for the block size.
    pub(crate) fn go(stream: S) -> Self {
        Self::go_to(stream, "").expect("there is always a first one")
    }

    fn go_to(mut stream: S, name: &str) -> Option<Self> {
        let data = [&(name.len() as u32).to_be_bytes()[..], name.as_bytes(), &1u16.to_be_bytes(), &3u16.to_be_bytes()]
            .concat();
        let option = [&b"IHAVEOPT"[..], &7u32.to_be_bytes(), &(data.len() as u32).to_be_bytes(), &data].concat();
        stream.write_all(&option).unwrap();
        loop {
            let mut header = [0; 20];
            stream.read_exact(&mut header).unwrap();
            let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
            stream.read_exact(&mut vec![0; word(16) as usize]).unwrap();
            match word(12) {
                1 => return Some(Self(stream)),
                0x8000_0006 => return None,
                kind => assert!(kind < 1 << 31, "refused: {kind:#x}"),
            }
        }
    }

    pub(crate) fn send(&mut self, command: u16, flags: u16, cookie: u64, at: u64, len: u32) {
        self.0.write_all(&header(command, flags, cookie, at, len)).unwrap();
    }

    /// Waits until the server closes, without a further byte.
    pub(crate) fn until_end(&mut self) {
        let mut rest = Vec::new();
        // `read_to_end` continues after an interruption; dropping a ring interrupts the thread that made it.
        self.0.read_to_end(&mut rest).unwrap();
        assert!(rest.is_empty(), "{rest:?}");
    }

    /// A reply's error and cookie.
    pub(crate) fn reply(&mut self) -> (u32, u64) {
        let mut header = [0; 16];
        self.0.read_exact(&mut header).unwrap();
        assert_eq!(header[..4], 0x6744_6698u32.to_be_bytes());
        let error = u32::from_be_bytes(header[4..8].try_into().unwrap());
        (error, u64::from_be_bytes(header[8..].try_into().unwrap()))
    }

    pub(crate) fn read(&mut self, at: u64, len: usize) -> Result<Vec<u8>, u32> {
        self.send(command::READ, 0, 77, at, len as u32);
        match self.reply() {
            (0, 77) => {
                let mut bytes = vec![0; len];
                self.0.read_exact(&mut bytes).unwrap();
                Ok(bytes)
            }
            (error, cookie) => {
                assert_eq!(cookie, 77);
                Err(error)
            }
        }
    }

    pub(crate) fn write(&mut self, at: u64, bytes: &[u8], flags: u16) -> Result<(), u32> {
        self.send(command::WRITE, flags, 78, at, bytes.len() as u32);
        self.0.write_all(bytes).unwrap();
        self.done(78)
    }

    pub(crate) fn ask(&mut self, command: u16, flags: u16, at: u64, len: u32) -> Result<(), u32> {
        self.send(command, flags, 79, at, len);
        self.done(79)
    }

    fn done(&mut self, cookie: u64) -> Result<(), u32> {
        match self.reply() {
            (0, answered) if answered == cookie => Ok(()),
            (error, answered) => {
                assert_eq!(answered, cookie);
                Err(error)
            }
        }
    }
}
