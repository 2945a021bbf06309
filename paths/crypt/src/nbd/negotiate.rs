//! The handshake: the greeting, the client's flags, options and their answers.
use super::requests::flags;
use super::{Event, MAX_KEPT, MAX_NAME, MAX_OPTION, MAX_PAYLOAD, MAX_SKIPPED, Session, State, Tls};

pub(super) const GREETING: u64 = 0x4e42_444d_4147_4943; // "NBDMAGIC"
pub(super) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054; // "IHAVEOPT"
pub(super) const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Both of the server's flags, and of the client's: fixed newstyle, no zeroes.
pub(super) const FIXED_NEWSTYLE: u32 = 1;
pub(super) const NO_ZEROES: u32 = 2;

/// Magic, option, length.
pub(super) const OPTION_HEADER: usize = 16;
/// Zeroes after the reply to the oldest option.
const OLD_ZEROES: usize = 124;
/// The number of the one metadata context.
pub(super) const ALLOCATION_ID: u32 = 1;
const ALLOCATION: &str = "base:allocation";

pub(super) mod option {
    pub(in crate::nbd) const EXPORT_NAME: u32 = 1;
    pub(in crate::nbd) const ABORT: u32 = 2;
    pub(in crate::nbd) const LIST: u32 = 3;
    pub(in crate::nbd) const STARTTLS: u32 = 5;
    pub(in crate::nbd) const INFO: u32 = 6;
    pub(in crate::nbd) const GO: u32 = 7;
    pub(in crate::nbd) const STRUCTURED_REPLY: u32 = 8;
    pub(in crate::nbd) const LIST_META_CONTEXT: u32 = 9;
    pub(in crate::nbd) const SET_META_CONTEXT: u32 = 10;
}

pub(super) mod reply {
    pub(in crate::nbd) const ACK: u32 = 1;
    pub(in crate::nbd) const SERVER: u32 = 2;
    pub(in crate::nbd) const INFO: u32 = 3;
    pub(in crate::nbd) const META_CONTEXT: u32 = 4;
    pub(in crate::nbd) const UNSUPPORTED: u32 = 0x8000_0001;
    pub(in crate::nbd) const INVALID: u32 = 0x8000_0003;
    pub(in crate::nbd) const TLS_REQUIRED: u32 = 0x8000_0005;
    pub(in crate::nbd) const UNKNOWN: u32 = 0x8000_0006;
    pub(in crate::nbd) const SHUTDOWN: u32 = 0x8000_0007;
    pub(in crate::nbd) const BLOCK_SIZE_REQUIRED: u32 = 0x8000_0008;
    pub(in crate::nbd) const TOO_BIG: u32 = 0x8000_0009;
}

pub(super) mod info {
    pub(in crate::nbd) const EXPORT: u16 = 0;
    pub(in crate::nbd) const NAME: u16 = 1;
    pub(in crate::nbd) const DESCRIPTION: u16 = 2;
    pub(in crate::nbd) const BLOCK_SIZE: u16 = 3;
}

pub(super) fn greet(out: &mut Vec<u8>) {
    out.extend(GREETING.to_be_bytes());
    out.extend(OPTION_MAGIC.to_be_bytes());
    out.extend(((FIXED_NEWSTYLE | NO_ZEROES) as u16).to_be_bytes());
}

/// Refuses an option that was skipped because it is too long.
pub(super) fn refuse_long(option: u32, out: &mut Vec<u8>) {
    say(option, reply::TOO_BIG, b"this option is longer than any needs to be", out);
}

fn say(option: u32, kind: u32, data: &[u8], out: &mut Vec<u8>) {
    out.extend(REPLY_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
}

/// Reads fields from the front; `None` if the bytes are too few.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(front)
    }

    fn u16(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes(*self.bytes(2)?.first_chunk()?))
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_be_bytes(*self.bytes(4)?.first_chunk()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_be_bytes(*self.bytes(8)?.first_chunk()?))
    }

    /// A length and that many bytes.
    fn text(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()? as usize;
        self.bytes(len).filter(|text| text.len() <= MAX_NAME)
    }
}

impl Session {
    /// Handles a whole message of the handshake.
    pub(super) fn negotiate(&mut self, message: &[u8], out: &mut Vec<u8>) -> Event {
        let mut reader = Reader(message);
        match self.state {
            State::ClientFlags => {
                let Some(given) = reader.u32() else { return Event::Violation("the flags are cut off") };
                if given & !(FIXED_NEWSTYLE | NO_ZEROES) != 0 {
                    return Event::Violation("it sets flags that the greeting did not offer");
                }
                self.agreed.no_zeroes = given & NO_ZEROES != 0;
                self.state = State::OptionHeader;
                Event::Continue
            }
            State::OptionHeader => {
                let (Some(OPTION_MAGIC), Some(option), Some(len)) = (reader.u64(), reader.u32(), reader.u32()) else {
                    return Event::Violation("an option does not begin as one");
                };
                let left = u64::from(len);
                self.state = match len as usize {
                    0 => return self.option(option, &[], out),
                    len if len <= MAX_OPTION => State::OptionData { option, len },
                    _ if option == option::EXPORT_NAME || left > MAX_SKIPPED => {
                        return Event::Violation("an option claims to be longer than any needs to be");
                    }
                    _ => State::SkipOption { option, left },
                };
                Event::Continue
            }
            State::OptionData { option, .. } => self.option(option, message, out),
            // What is skipped, and requests, are dealt with before they get here.
            _ => Event::Violation("an option after the options"),
        }
    }

    /// Answers one option.
    fn option(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Event {
        self.state = State::OptionHeader;
        let is_closed_to_it = self.config.tls == Tls::Required && !self.agreed.is_encrypted;
        match option {
            option::ABORT => {
                say(option, reply::ACK, &[], out);
                return Event::Goodbye;
            }
            // The oldest option has no answer but the export itself.
            option::EXPORT_NAME if self.is_ending => return Event::Violation("the server ends"),
            _ if self.is_ending => say(option, reply::SHUTDOWN, b"the server ends", out),
            option::STARTTLS => return self.start_tls(data, out),
            option::EXPORT_NAME if is_closed_to_it => return Event::Violation("it asks for an export before TLS"),
            option::EXPORT_NAME => return self.export_by_name(data, out),
            _ if is_closed_to_it => say(option, reply::TLS_REQUIRED, b"begin with TLS", out),
            option::LIST => self.list(data, out),
            option::INFO | option::GO => self.info(option, data, out),
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.agreed.structured = true;
                say(option, reply::ACK, &[], out);
            }
            option::STRUCTURED_REPLY => say(option, reply::INVALID, b"this option has no data", out),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.meta_context(option, data, out),
            _ => say(option, reply::UNSUPPORTED, &[], out),
        }
        Event::Continue
    }

    fn start_tls(&mut self, data: &[u8], out: &mut Vec<u8>) -> Event {
        let refusal = match () {
            () if self.config.tls == Tls::None => Some((reply::UNSUPPORTED, &b"this server has no TLS"[..])),
            () if self.agreed.is_encrypted => Some((reply::INVALID, &b"TLS has begun already"[..])),
            () if !data.is_empty() => Some((reply::INVALID, &b"this option has no data"[..])),
            () => None,
        };
        let (kind, text) = refusal.unwrap_or((reply::ACK, &[]));
        say(option::STARTTLS, kind, text, out);
        if refusal.is_some() {
            return Event::Continue;
        }
        self.state = State::TlsPending;
        Event::StartTls
    }

    /// The number of the export of that name.
    fn find(&mut self, name: &[u8]) -> Option<usize> {
        let named = self.config.exports.iter().position(|export| export.name.as_bytes() == name);
        let found = named.or((name.is_empty() && !self.config.exports.is_empty()).then_some(0));
        if found.is_none() {
            self.unknown = Some(name[..name.len().min(MAX_KEPT)].to_vec());
        }
        found
    }

    /// Negotiation is over.
    fn enter(&mut self, export: usize) {
        // A context that was chosen for another export does not count.
        self.agreed.allocation = self.agreed.allocation.filter(|&chosen| chosen == export);
        self.state = State::Requests { export };
    }

    fn export_by_name(&mut self, name: &[u8], out: &mut Vec<u8>) -> Event {
        let Some(number) = self.find(name) else { return Event::Violation("it asks for an export that is not there") };
        let export = &self.config.exports[number];
        if self.config.needs_block_size(export) {
            return Event::Violation("it does not ask for the block size, which this export demands");
        }
        out.extend(export.size.to_be_bytes());
        out.extend(flags::of(export, self.agreed.structured).to_be_bytes());
        if !self.agreed.no_zeroes {
            out.extend([0; OLD_ZEROES]);
        }
        self.enter(number);
        Event::Continue
    }

    fn list(&self, data: &[u8], out: &mut Vec<u8>) {
        if !data.is_empty() {
            return say(option::LIST, reply::INVALID, b"this option has no data", out);
        }
        for export in &self.config.exports {
            let mut entry = (export.name.len() as u32).to_be_bytes().to_vec();
            entry.extend(export.name.as_bytes());
            entry.extend(export.description.as_bytes());
            say(option::LIST, reply::SERVER, &entry, out);
        }
        say(option::LIST, reply::ACK, &[], out);
    }

    fn info(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) {
        let mut reader = Reader(data);
        let parsed = (|| {
            let name = reader.text()?;
            let count = reader.u16()?;
            let asked: Vec<u16> = (0..count).map(|_| reader.u16()).collect::<Option<_>>()?;
            reader.0.is_empty().then_some((name, asked))
        })();
        let Some((name, asked)) = parsed else {
            return say(option, reply::INVALID, b"its lengths do not add up", out);
        };
        let Some(number) = self.find(name) else {
            return say(option, reply::UNKNOWN, b"there is no export of that name", out);
        };
        let export = &self.config.exports[number];
        let has_block_size = asked.contains(&info::BLOCK_SIZE);
        if option == option::GO && self.config.needs_block_size(export) && !has_block_size {
            return say(option, reply::BLOCK_SIZE_REQUIRED, b"ask for the block size, and keep to it", out);
        }
        let tell = |kind: u16, rest: &[u8], out: &mut Vec<u8>| {
            say(option, reply::INFO, &[&kind.to_be_bytes(), rest].concat(), out);
        };
        let flags = flags::of(export, self.agreed.structured);
        tell(info::EXPORT, &[&export.size.to_be_bytes()[..], &flags.to_be_bytes()].concat(), out);
        if has_block_size {
            let sizes = [export.min_block, export.preferred_block, MAX_PAYLOAD];
            tell(info::BLOCK_SIZE, &sizes.map(u32::to_be_bytes).concat(), out);
        }
        if asked.contains(&info::NAME) {
            tell(info::NAME, export.name.as_bytes(), out);
        }
        if asked.contains(&info::DESCRIPTION) {
            tell(info::DESCRIPTION, export.description.as_bytes(), out);
        }
        say(option, reply::ACK, &[], out);
        if option == option::GO {
            self.enter(number);
        }
    }

    fn meta_context(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) {
        let mut reader = Reader(data);
        let parsed = (|| {
            let name = reader.text()?;
            let count = reader.u32()?;
            // Each query takes at least four bytes, so the count is bounded by the option's length.
            let queries: Vec<&[u8]> = (0..count).map(|_| reader.text()).collect::<Option<_>>()?;
            reader.0.is_empty().then_some((name, queries))
        })();
        let is_choice = option == option::SET_META_CONTEXT;
        if is_choice {
            self.agreed.allocation = None; // A choice replaces the one before it, even if it fails.
        }
        let Some((name, queries)) = parsed else {
            return say(option, reply::INVALID, b"its lengths do not add up", out);
        };
        if is_choice && !self.agreed.structured {
            return say(option, reply::INVALID, b"structured replies come first", out);
        }
        let Some(number) = self.find(name) else {
            return say(option, reply::UNKNOWN, b"there is no export of that name", out);
        };
        let is_it = |query: &&[u8]| *query == ALLOCATION.as_bytes() || (!is_choice && *query == b"base:");
        if queries.iter().any(is_it) || (!is_choice && queries.is_empty()) {
            let id = if is_choice { ALLOCATION_ID } else { 0 };
            say(option, reply::META_CONTEXT, &[&id.to_be_bytes(), ALLOCATION.as_bytes()].concat(), out);
            if is_choice {
                self.agreed.allocation = Some(number);
            }
        }
        say(option, reply::ACK, &[], out);
    }
}
