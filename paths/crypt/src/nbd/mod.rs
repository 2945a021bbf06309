//! The NBD protocol's server side on bytes: no sockets, no threads, no pages (the protocol document of the
//! NetworkBlockDevice project, with fixed newstyle negotiation and structured replies). `client` has the other side.
//!
//! A connection is a [`Session`]. Its server reads from the client and calls [`Session::feed`] again and again. Answers
//! are appended to a buffer that the server passes in, and work for the server is returned as an [`Event`]:
//! - All of the negotiation is answered here.
//! - An invalid request (beyond the end, unknown flags, unaligned, a write to a read-only export) is answered here with
//!   the protocol's error. A write's payload is skipped first: clients register a write's cookie once they have sent
//!   all of it, and do not recognise an earlier answer.
//! - A valid request is returned as [`Event::Request`], for the data path. The payload of a write has not been read:
//!   the data path reads these `len` bytes of the stream directly into its pages before it feeds more. When a request
//!   is done, in any order, it writes a reply with [`Replies`].
//!
//! ```text
//!  socket ──bytes──> Session::feed ──Event::Request──> data path (pages, cipher, disk)
//!     ^                   │ answers                        │ Replies
//!     └───────────────────┴────────────────────────────────┘
//! ```
//!
//! Invariants: a session stores at most [`MAX_OPTION`] bytes of a client's, and the beginning of a name (I1). A [`Request`] lies within its export
//! and is aligned to its block size, and reads and writes have at most [`MAX_PAYLOAD`] bytes (I2). Nothing that a
//! client sends causes a panic, and a violation of the protocol ends only this connection ([`Event::Violation`]) (I3).
//! A server does not feed more while a client does not receive its answers; that bounds them.
pub(crate) mod client;
mod negotiate;
mod replies;
mod requests;

use std::sync::Arc;

pub use replies::{Extent, Fault, Replies};
pub use requests::{Command, Request};

/// Bytes that an option may have; longer ones are skipped and refused.
pub const MAX_OPTION: usize = 16 << 10;
/// Bytes that an option may claim. A client that claims more is disconnected.
const MAX_SKIPPED: u64 = 16 << 20;
/// Bytes of a read or write, as clients assume by default.
pub const MAX_PAYLOAD: u32 = 32 << 20;
/// Bytes of a name, as the protocol has it.
const MAX_NAME: usize = 4096;
/// Bytes that are kept of the name of an export that is not there.
const MAX_KEPT: usize = 256;

/// A volume and its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// The name; clients that name none ask for the empty name.
    pub name: String,
    /// A description for people.
    pub description: String,
    /// Bytes.
    pub size: u64,
    /// Writes are refused.
    pub is_read_only: bool,
    /// Offsets and lengths are multiples of this: a power of two, at most 64 KiB.
    pub min_block: u32,
    /// The best size of requests: a power of two, at least `min_block`.
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
    /// The exports. Clients that ask for the empty name get the first one.
    pub exports: Vec<Export>,
    /// Whether connections are encrypted.
    pub tls: Tls,
    /// Clients know the block sizes by other means. Otherwise a client that does not ask for them assumes 512 bytes,
    /// and is refused an export with larger blocks.
    pub block_size_agreed: bool,
}

impl Config {
    fn needs_block_size(&self, export: &Export) -> bool {
        !self.block_size_agreed && export.min_block > 512
    }
}

/// The result of feeding bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A message was handled, or a part of one was stored: feed the following bytes.
    Continue,
    /// A request for the data path. For a write, the payload follows in the stream.
    Request(Request),
    /// The answer in the buffer has to be sent; then TLS begins, and then [`Session::tls_started`] is called. Bytes
    /// that were read and not taken belong to TLS: feeding them to the session is a violation.
    StartTls,
    /// The client is done: finish the requests under way, send the answers, close.
    Goodbye,
    /// The client broke the protocol: close. The text says how.
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
    /// The server stops.
    is_ending: bool,
    /// The name that the client asked for last, and that no export has; its beginning.
    unknown: Option<Vec<u8>>,
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
    /// STARTTLS is answered: the next byte belongs to TLS.
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
    /// The payload of a refused write, which is answered after the last byte.
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
        let (state, partial, agreed) = (State::ClientFlags, Vec::new(), Agreed::default());
        Self { config, state, partial, agreed, is_ending: false, unknown: None }
    }

    /// Takes the next message, or a part of it, from the beginning of `input`; answers go to `out`. Returns how many
    /// bytes were taken, which is 0 only for an empty `input` and after the end.
    pub fn feed(&mut self, input: &[u8], out: &mut Vec<u8>) -> (usize, Event) {
        let needed = match self.state {
            State::Closed => return (0, Event::Goodbye),
            // Unencrypted bytes after STARTTLS must not be taken for encrypted ones.
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

    /// TLS has begun: everything agreed before is forgotten, as the protocol demands.
    pub fn tls_started(&mut self) {
        self.state = State::OptionHeader;
        self.agreed = Agreed { is_encrypted: true, no_zeroes: self.agreed.no_zeroes, ..Agreed::default() };
    }

    /// Answers the request that was returned last with an error; a write after its payload has been fed and skipped.
    pub fn refuse(&mut self, request: &Request, fault: Fault, out: &mut Vec<u8>) {
        match (self.state, request.command) {
            (State::Requests { export }, Command::Write) => {
                self.skip_payload(export, request.len, request.cookie, fault, out);
            }
            _ => self.replies().error(request.cookie, fault, out),
        }
    }

    /// `left` bytes of a refused write's payload are still to come. They are not stored, so it may be any number.
    fn skip_payload(&mut self, export: usize, left: u32, cookie: u64, fault: Fault, out: &mut Vec<u8>) {
        self.state = State::SkipPayload { export, left, cookie, fault };
        if left == 0 {
            self.state = State::Requests { export };
            self.replies().error(cookie, fault, out);
        }
    }

    /// The server stops: all further options are answered with that. For requests see [`Session::refuse`].
    pub fn shut_down(&mut self) {
        self.is_ending = true;
    }

    /// True while a client negotiates with a server that stops. The client may go on after an answer: libnbd takes the
    /// first one for an unknown option, and finds the reason in the answer to its last option.
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

    /// The name of an export that is not there, if the client has asked for one since the last call: its first 256
    /// bytes, whatever they are.
    pub(crate) fn take_unknown(&mut self) -> Option<Vec<u8>> {
        self.unknown.take()
    }

    /// The export that the client has chosen, once negotiation is over.
    #[must_use]
    pub fn export(&self) -> Option<&Export> {
        self.export_number().and_then(|export| self.config.exports.get(export))
    }

    /// Whether there is more than one.
    pub(crate) fn has_several(&self) -> bool {
        self.config.exports.len() > 1
    }

    /// Its number among the exports.
    #[must_use]
    pub fn export_number(&self) -> Option<usize> {
        match self.state {
            State::Requests { export } | State::SkipPayload { export, .. } => Some(export),
            _ => None,
        }
    }

    /// True if the client is in the middle of a message or has not finished negotiating, which a server limits in time.
    #[must_use]
    pub fn owes_bytes(&self) -> bool {
        !self.partial.is_empty() || !matches!(self.state, State::Requests { .. } | State::Closed)
    }
}
