//! The NBD protocol's server side on bytes: no sockets, no threads, no pages (the protocol document of the
//! NetworkBlockDevice project, with fixed newstyle negotiation and structured replies).
//!
//! A connection is a [`Session`]. Its server reads from the client and calls [`Session::feed`] again and again; what is to
//! be answered collects in a buffer that it passes in, and what is to be *done* comes back as an [`Event`]:
//! - Negotiation is answered here, all of it.
//! - A request that cannot be (beyond the end, unknown flags, unaligned, a write to what is read-only) is answered here
//!   with the protocol's error. A write's payload is skipped first: clients know a write's cookie once they have sent all of
//!   it, and take an earlier answer for one to nothing that they asked.
//! - What is left is [`Event::Request`]: it is in order, and the data path does it. The payload of a write has not been
//!   read: `len` bytes of the stream are the data path's, which reads them straight into its pages, before it feeds on.
//!   When it is done, in any order, it writes a reply with [`Replies`].
//!
//! ```text
//!  socket ──bytes──> Session::feed ──Event::Request──> data path (pages, cipher, disk)
//!     ^                   │ answers                        │ Replies
//!     └───────────────────┴────────────────────────────────┘
//! ```
//!
//! Invariants: a session keeps at most [`MAX_OPTION`] bytes of what it was sent (I1). A [`Request`] lies within its export
//! and keeps its block size, and reads and writes have at most [`MAX_PAYLOAD`] bytes (I2). Nothing that a client sends
//! panics, and what the protocol calls a violation ends this connection alone ([`Event::Violation`]) (I3).
//! A server feeds no more while the answers of a client that does not read are waiting: that bounds them.
mod negotiate;
mod replies;
mod requests;

use std::sync::Arc;

pub use replies::{Extent, Fault, Replies};
pub use requests::{Command, Request};

/// Bytes that an option may have; longer ones are skipped and refused.
pub const MAX_OPTION: usize = 16 << 10;
/// Bytes that an option may claim; what claims more is taken for no client.
const MAX_SKIPPED: u64 = 16 << 20;
/// Bytes of a read or write: what clients assume where nobody tells them.
pub const MAX_PAYLOAD: u32 = 32 << 20;
/// Bytes of a name, as the protocol has it.
const MAX_NAME: usize = 4096;

/// A volume under its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// The name; the empty one is what clients ask for that name none.
    pub name: String,
    /// What it is, for people.
    pub description: String,
    /// Bytes.
    pub size: u64,
    /// Writes are refused.
    pub is_read_only: bool,
    /// Bytes that offsets and lengths are multiples of: a power of two, at most 64 KiB.
    pub min_block: u32,
    /// Bytes that are best asked for at once: a power of two, at least `min_block`.
    pub preferred_block: u32,
}

/// Whether connections are encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tls {
    /// There is none.
    None,
    /// A client may ask for it.
    Offered,
    /// A client gets nothing before it has asked for it.
    Required,
}

/// What a server offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The exports; the first one is also what clients get that ask for the empty name.
    pub exports: Vec<Export>,
    /// Whether connections are encrypted.
    pub tls: Tls,
    /// Clients know the block sizes, whatever they ask for. Otherwise one that does not ask is refused an export with blocks
    /// of more than 512 bytes, which such a client keeps to.
    pub block_size_agreed: bool,
}

/// What came of the bytes that were fed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A message was dealt with, or a part of one was kept: feed what follows.
    Continue,
    /// The data path's part. For a write, the stream goes on with its payload.
    Request(Request),
    /// The answer that is in the buffer has to be sent; then TLS begins, and then [`Session::tls_started`] is called. Bytes
    /// that were read and not taken belong to TLS: fed to the session, they are a violation.
    StartTls,
    /// The client is done: finish what is under way, send the answers, close.
    Goodbye,
    /// The client broke the protocol: close. Says how.
    Violation(&'static str),
}

/// One client's connection.
#[derive(Debug)]
pub struct Session {
    config: Arc<Config>,
    state: State,
    /// The beginning of a message whose end has not come.
    partial: Vec<u8>,
    agreed: Agreed,
    /// The server ends.
    is_ending: bool,
}

/// What was negotiated.
#[derive(Clone, Debug, Default)]
struct Agreed {
    /// The client wants no zeroes behind the old reply.
    no_zeroes: bool,
    structured: bool,
    is_encrypted: bool,
    /// `base:allocation` was chosen for the export of this number.
    allocation: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    ClientFlags,
    OptionHeader,
    /// The answer to STARTTLS is out: the next byte belongs to TLS.
    TlsPending,
    OptionData {
        option: u32,
        len: usize,
    },
    /// An option that is too long.
    SkipOption {
        option: u32,
        left: u64,
    },
    Requests {
        export: usize,
    },
    /// The payload of a write that is refused. It is answered behind the last byte.
    SkipPayload {
        export: usize,
        left: u32,
        cookie: u64,
        fault: Fault,
    },
    Closed,
}

impl Session {
    /// A connection's beginning; the greeting goes to `out`.
    #[must_use]
    pub fn new(config: Arc<Config>, out: &mut Vec<u8>) -> Self {
        negotiate::greet(out);
        Self { config, state: State::ClientFlags, partial: Vec::new(), agreed: Agreed::default(), is_ending: false }
    }

    /// Takes the next message, or a part of it, from the beginning of `input`; answers go to `out`. Returns how many bytes
    /// were taken, which is 0 for an empty `input` and after the end alone.
    pub fn feed(&mut self, input: &[u8], out: &mut Vec<u8>) -> (usize, Event) {
        let needed = match self.state {
            State::Closed => return (0, Event::Goodbye),
            // What came unencrypted behind STARTTLS must not be taken for what comes encrypted.
            State::TlsPending => {
                self.state = State::Closed;
                return (0, Event::Violation("it goes on before TLS has begun"));
            }
            State::SkipOption { option, left } => {
                let taken = left.min(input.len() as u64);
                self.state = State::SkipOption { option, left: left - taken };
                if left == taken {
                    negotiate::refuse_long(option, out);
                    self.state = State::OptionHeader;
                }
                return (taken as usize, Event::Continue);
            }
            State::SkipPayload { export, left, cookie, fault } => {
                let taken = (left as usize).min(input.len());
                self.skip_payload(export, left - taken as u32, cookie, fault, out);
                return (taken, Event::Continue);
            }
            State::ClientFlags => 4,
            State::OptionHeader => negotiate::OPTION_HEADER,
            State::OptionData { len, .. } => len,
            State::Requests { .. } => requests::HEADER,
        };
        let taken = (needed - self.partial.len()).min(input.len());
        self.partial.extend_from_slice(&input[..taken]);
        if self.partial.len() < needed {
            return (taken, Event::Continue);
        }
        let message = std::mem::take(&mut self.partial);
        let event = match self.state {
            State::Requests { export } => self.request(export, &message, out),
            _ => self.negotiate(&message, out),
        };
        if matches!(event, Event::Goodbye | Event::Violation(_)) {
            self.state = State::Closed;
        }
        (taken, event)
    }

    /// TLS has begun: what was agreed before it is forgotten, as the protocol demands.
    pub fn tls_started(&mut self) {
        self.state = State::OptionHeader;
        self.agreed = Agreed { is_encrypted: true, no_zeroes: self.agreed.no_zeroes, ..Agreed::default() };
    }

    /// Answers a request, which was handed out last, with an error; a write once its payload has been fed, and skipped.
    pub fn refuse(&mut self, request: &Request, fault: Fault, out: &mut Vec<u8>) {
        match (self.state, request.command) {
            (State::Requests { export }, Command::Write) => {
                self.skip_payload(export, request.len, request.cookie, fault, out);
            }
            _ => self.replies().error(request.cookie, fault, out),
        }
    }

    /// So many bytes of a refused write's payload are still to come. Nothing of them is kept, so it may be any number.
    fn skip_payload(&mut self, export: usize, left: u32, cookie: u64, fault: Fault, out: &mut Vec<u8>) {
        self.state = State::SkipPayload { export, left, cookie, fault };
        if left == 0 {
            self.state = State::Requests { export };
            self.replies().error(cookie, fault, out);
        }
    }

    /// The server ends: all further options are answered with that. Requests are not: see [`Session::refuse`].
    pub fn shut_down(&mut self) {
        self.is_ending = true;
    }

    /// True while a client negotiates with a server that ends. It may go on after an answer: libnbd takes the first one for
    /// an option that the server does not know, and learns the reason from the answer to its last.
    #[must_use]
    pub fn refuses_options(&self) -> bool {
        let is_over = matches!(self.state, State::Requests { .. } | State::SkipPayload { .. } | State::Closed);
        self.is_ending && !is_over
    }

    /// How this session's requests are answered.
    #[must_use]
    pub fn replies(&self) -> Replies {
        Replies { structured: self.agreed.structured }
    }

    /// The export that the client has chosen, once negotiation is over.
    #[must_use]
    pub fn export(&self) -> Option<&Export> {
        match self.state {
            State::Requests { export } | State::SkipPayload { export, .. } => self.config.exports.get(export),
            _ => None,
        }
    }

    /// True when the client is in the middle of a message or has not finished negotiating: a server gives it a time limit.
    #[must_use]
    pub fn owes_bytes(&self) -> bool {
        !self.partial.is_empty() || !matches!(self.state, State::Requests { .. } | State::Closed)
    }
}
