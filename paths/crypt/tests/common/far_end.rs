//! A far end in this process: a small NBD server that loses what was not flushed when it is killed, and that can lie.

use std::fs;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use pagemill_crypt::serve::{Far, FarOptions};

use crate::common::served::command;

pub(crate) const HAS_FLAGS: u16 = 1 << 0;
pub(crate) const READ_ONLY: u16 = 1 << 1;
pub(crate) const SEND_FLUSH: u16 = 1 << 2;
pub(crate) const SEND_FUA: u16 = 1 << 3;
pub(crate) const SEND_TRIM: u16 = 1 << 5;
pub(crate) const MULTI_CONN: u16 = 1 << 8;

/// A request that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) command: u16,
    pub(crate) flags: u16,
    pub(crate) at: u64,
    pub(crate) len: u32,
}

/// How a far end lies, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lie {
    Greeting,
    /// An option's answer of 4 GiB.
    LongOption,
    /// An answer to another option.
    OtherOption,
    /// Answers without end.
    EndlessOption,
    /// Blocks of no power of two.
    Blocks,
    /// No size.
    NoSize,
    ReplyMagic,
    /// A reply to a request that nobody made.
    Unknown,
    /// Two replies to one request.
    Twice,
    /// Half of a read's bytes, and the end.
    CutOff,
    /// The end in place of a reply.
    Silence,
    /// A chunk of a structured reply.
    Chunk,
}

pub(crate) struct State {
    pub(crate) bytes: Vec<u8>,
    /// What survives.
    durable: Vec<u8>,
    unflushed: Vec<Range<usize>>,
    pub(crate) flags: u16,
    /// Its size, where it is not that of its bytes.
    pub(crate) size: Option<u64>,
    /// The same, for all connections but the first.
    pub(crate) size_of_others: Option<u64>,
    pub(crate) blocks: Option<[u32; 3]>,
    pub(crate) asked: Vec<Asked>,
    /// Errors of the protocol in place of doing what is asked.
    pub(crate) flush_fails: Option<u32>,
    pub(crate) write_fails: Option<u32>,
    /// Replies wait until so many requests have come.
    pub(crate) hold_until: usize,
    pending: Vec<(UnixStream, Vec<u8>)>,
    pub(crate) lie: Option<Lie>,
    streams: Vec<UnixStream>,
    /// Counts the times that it was started or killed.
    life: usize,
    pub(crate) connections: usize,
}

#[derive(Clone)]
pub(crate) struct FarEnd {
    state: Arc<Mutex<State>>,
    path: PathBuf,
}

impl FarEnd {
    /// Started, with so many zeroes.
    pub(crate) fn start(path: &Path, len: u64) -> Self {
        let state = State {
            bytes: vec![0; len as usize],
            durable: vec![0; len as usize],
            unflushed: Vec::new(),
            flags: HAS_FLAGS | SEND_FLUSH | SEND_FUA | SEND_TRIM | MULTI_CONN,
            size: None,
            size_of_others: None,
            blocks: None,
            asked: Vec::new(),
            flush_fails: None,
            write_fails: None,
            hold_until: 0,
            pending: Vec::new(),
            lie: None,
            streams: Vec::new(),
            life: 0,
            connections: 0,
        };
        let end = Self { state: Arc::new(Mutex::new(state)), path: path.to_owned() };
        end.restart();
        end
    }

    pub(crate) fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.state.lock().unwrap())
    }

    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.path.display())
    }

    pub(crate) fn connect(&self, reconnect: Duration) -> Far {
        let options = FarOptions { reconnect, may_write: true, say: |_| {} };
        Far::connect(&self.uri(), options).unwrap()
    }

    /// Ends it, as `kill -9` and a power failure do: of what was not flushed, one part is there and another is not.
    pub(crate) fn kill(&self) {
        self.with(|state| {
            state.life += 1;
            for (number, place) in std::mem::take(&mut state.unflushed).into_iter().enumerate() {
                if number % 3 == 0 {
                    let bytes = state.bytes[place.clone()].to_vec();
                    state.durable[place].copy_from_slice(&bytes);
                }
            }
            state.bytes = state.durable.clone();
            state.pending.clear();
            for stream in state.streams.drain(..) {
                let _ = stream.shutdown(std::net::Shutdown::Both);
            }
        });
        // It wakes the thread that accepts, which then ends.
        let _ = UnixStream::connect(&self.path);
        let _ = fs::remove_file(&self.path);
    }

    /// Ends one connection.
    pub(crate) fn end_one(&self) {
        self.with(|state| state.streams[0].shutdown(std::net::Shutdown::Both).unwrap());
    }

    pub(crate) fn restart(&self) {
        let life = self.with(|state| {
            state.life += 1;
            state.life
        });
        let _ = fs::remove_file(&self.path);
        let listener = UnixListener::bind(&self.path).unwrap();
        let end = self.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                let is_alive = end.with(|state| {
                    // A killed server's connections end with it.
                    let is_alive = state.life == life;
                    if is_alive {
                        state.connections += 1;
                        state.streams.push(stream.try_clone().unwrap());
                    }
                    is_alive
                });
                if !is_alive {
                    return;
                }
                let end = end.clone();
                // An error is the end of the connection.
                thread::spawn(move || drop(end.serve(stream, life)));
            }
        });
    }

    fn takes_lie(&self, lies: &[Lie]) -> Option<Lie> {
        self.with(|state| state.lie.filter(|lie| lies.contains(lie)))
    }

    fn greet(&self, stream: &mut UnixStream) -> io::Result<()> {
        if self.takes_lie(&[Lie::Greeting]).is_some() {
            stream.write_all(b"SSH-2.0-OpenSSH_10.0 and more")?;
        }
        stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
        stream.read_exact(&mut [0; 4])?;
        loop {
            let mut header = [0; 16];
            stream.read_exact(&mut header)?;
            let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
            let option = word(8);
            stream.read_exact(&mut vec![0; word(12) as usize])?;
            let said = |option: u32, kind: u32, len: u32, data: &[u8]| {
                let magic = 0x0003_e889_0455_65a9u64.to_be_bytes();
                [&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len.to_be_bytes(), data].concat()
            };
            let say = |kind: u32, data: &[u8]| said(option, kind, data.len() as u32, data);
            if option != 7 {
                stream.write_all(&say(0x8000_0001, &[]))?;
                continue;
            }
            let (size, flags, blocks) = self.with(|state| (state.says_size(), state.flags, state.blocks));
            match self.takes_lie(&[Lie::LongOption, Lie::OtherOption, Lie::EndlessOption, Lie::Blocks, Lie::NoSize]) {
                Some(Lie::LongOption) => stream.write_all(&said(7, 3, u32::MAX, &[0; 100]))?,
                Some(Lie::OtherOption) => stream.write_all(&said(6, 1, 0, &[]))?,
                Some(Lie::EndlessOption) => loop {
                    stream.write_all(&say(3, &[0, 99]))?;
                },
                Some(Lie::NoSize) => stream.write_all(&say(1, &[]))?,
                _ => {}
            }
            stream.write_all(&say(3, &[&[0, 0][..], &size.to_be_bytes(), &flags.to_be_bytes()].concat()))?;
            let blocks = if self.takes_lie(&[Lie::Blocks]).is_some() { Some([3, 5, 7]) } else { blocks };
            if let Some(blocks) = blocks {
                stream.write_all(&say(3, &[&[0, 3][..], &blocks.map(u32::to_be_bytes).concat()].concat()))?;
            }
            return stream.write_all(&say(1, &[]));
        }
    }

    fn serve(&self, mut stream: UnixStream, life: usize) -> io::Result<()> {
        self.greet(&mut stream)?;
        loop {
            let mut header = [0; 28];
            stream.read_exact(&mut header)?;
            let asked = Asked {
                flags: u16::from_be_bytes(header[4..6].try_into().unwrap()),
                command: u16::from_be_bytes(header[6..8].try_into().unwrap()),
                at: u64::from_be_bytes(header[16..24].try_into().unwrap()),
                len: u32::from_be_bytes(header[24..].try_into().unwrap()),
            };
            if asked.command == command::DISCONNECT {
                return Ok(());
            }
            let mut payload = vec![0; if asked.command == command::WRITE { asked.len as usize } else { 0 }];
            stream.read_exact(&mut payload)?;
            let mut state = self.state.lock().unwrap();
            if state.life != life {
                return Ok(());
            }
            state.asked.push(asked);
            let (error, bytes) = state.act(asked, &payload);
            let magic = 0x6744_6698u32.to_be_bytes();
            let mut reply = [&magic[..], &error.to_be_bytes(), &header[8..16], &bytes].concat();
            match state.lie {
                Some(Lie::ReplyMagic) => reply[0] ^= 1,
                Some(Lie::Unknown) => reply[8] ^= 0x40,
                Some(Lie::Twice) => reply.extend(reply.clone()),
                Some(Lie::CutOff) => reply.truncate(16 + bytes.len() / 2),
                Some(Lie::Silence) => reply.clear(),
                Some(Lie::Chunk) => reply[..4].copy_from_slice(&0x668e_33efu32.to_be_bytes()),
                _ => {}
            }
            let ends = matches!(state.lie, Some(Lie::CutOff | Lie::Silence));
            state.pending.push((stream.try_clone()?, reply));
            if state.asked.len() < state.hold_until {
                continue;
            }
            let pending = std::mem::take(&mut state.pending);
            drop(state);
            for (mut stream, reply) in pending {
                // Another connection may be gone.
                let _ = stream.write_all(&reply);
            }
            if ends {
                return stream.shutdown(std::net::Shutdown::Both);
            }
        }
    }
}

impl State {
    fn says_size(&self) -> u64 {
        let other = self.size_of_others.filter(|_| self.connections > 1);
        other.or(self.size).unwrap_or(self.bytes.len() as u64)
    }

    fn act(&mut self, asked: Asked, payload: &[u8]) -> (u32, Vec<u8>) {
        let place = asked.at as usize..asked.at as usize + asked.len as usize;
        match asked.command {
            command::READ => (0, self.bytes[place].to_vec()),
            command::WRITE => match self.write_fails {
                Some(error) => (error, Vec::new()),
                None => {
                    self.bytes[place.clone()].copy_from_slice(payload);
                    match asked.flags & 1 {
                        0 => self.unflushed.push(place),
                        _ => self.durable[place].copy_from_slice(payload),
                    }
                    (0, Vec::new())
                }
            },
            command::FLUSH => match self.flush_fails {
                Some(error) => (error, Vec::new()),
                None => {
                    self.durable = self.bytes.clone();
                    self.unflushed.clear();
                    (0, Vec::new())
                }
            },
            command::TRIM => (0, Vec::new()),
            other => panic!("nobody may ask for {other}"),
        }
    }

    pub(crate) fn count(&self, command: u16) -> usize {
        self.asked.iter().filter(|asked| asked.command == command).count()
    }

    /// What is there after a power failure in which everything that could be lost was lost.
    pub(crate) fn durable(&self) -> &[u8] {
        &self.durable
    }
}
