//! The transmission phase: checking requests.
use super::replies::Fault;
use super::{Event, Export, MAX_PAYLOAD, Session};

pub(super) const MAGIC: u32 = 0x2560_9513;
/// Magic, flags, type, cookie, offset, length.
pub(super) const HEADER: usize = 28;

/// An export's flags for the client.
pub(super) mod flags {
    use super::Export;

    pub(in crate::nbd) const HAS_FLAGS: u16 = 1 << 0;
    pub(in crate::nbd) const READ_ONLY: u16 = 1 << 1;
    pub(in crate::nbd) const SEND_FLUSH: u16 = 1 << 2;
    pub(in crate::nbd) const SEND_FUA: u16 = 1 << 3;
    pub(in crate::nbd) const SEND_TRIM: u16 = 1 << 5;
    pub(in crate::nbd) const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub(in crate::nbd) const SEND_DF: u16 = 1 << 7;
    pub(in crate::nbd) const CAN_MULTI_CONN: u16 = 1 << 8;
    pub(in crate::nbd) const SEND_CACHE: u16 = 1 << 10;
    pub(in crate::nbd) const SEND_FAST_ZERO: u16 = 1 << 11;

    pub(crate) fn of(export: &Export, structured: bool) -> u16 {
        let always = HAS_FLAGS | SEND_FLUSH | SEND_FUA | CAN_MULTI_CONN | SEND_CACHE;
        let to_write = if export.is_read_only { READ_ONLY } else { SEND_TRIM | SEND_WRITE_ZEROES | SEND_FAST_ZERO };
        always | to_write | if structured { SEND_DF } else { 0 }
    }
}

/// The flags of a request.
pub(super) mod flag {
    pub(in crate::nbd) const FUA: u16 = 1 << 0;
    pub(in crate::nbd) const NO_HOLE: u16 = 1 << 1;
    pub(in crate::nbd) const DF: u16 = 1 << 2;
    pub(in crate::nbd) const REQ_ONE: u16 = 1 << 3;
    pub(in crate::nbd) const FAST_ZERO: u16 = 1 << 4;
}

pub(super) mod kind {
    pub(in crate::nbd) const READ: u16 = 0;
    pub(in crate::nbd) const WRITE: u16 = 1;
    pub(in crate::nbd) const DISCONNECT: u16 = 2;
    pub(in crate::nbd) const FLUSH: u16 = 3;
    pub(in crate::nbd) const TRIM: u16 = 4;
    pub(in crate::nbd) const CACHE: u16 = 5;
    pub(in crate::nbd) const WRITE_ZEROES: u16 = 6;
    pub(in crate::nbd) const BLOCK_STATUS: u16 = 7;
}

/// The operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Answer with the bytes.
    Read,
    /// Write the bytes that follow in the stream.
    Write,
    /// Answer when all writes that were answered before are on the disk.
    Flush,
    /// The contents are not needed any more.
    Trim,
    /// The bytes will be read soon. It is a hint: the answer says nothing about where they are.
    Cache,
    /// Write zeroes. They never become a hole: a hole under a cipher reads as noise.
    WriteZeroes,
    /// Report extents.
    BlockStatus {
        /// One extent at most.
        one: bool,
    },
}

/// A valid request: within its export, aligned, allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The operation.
    pub command: Command,
    /// The client's name for it, which the reply repeats.
    pub cookie: u64,
    /// The first byte.
    pub at: u64,
    /// Bytes; 0 for a flush.
    pub len: u32,
    /// Answer when it is on the disk.
    pub fua: bool,
}

impl Session {
    /// Handles a request's header.
    pub(super) fn request(&mut self, number: usize, message: &[u8], out: &mut Vec<u8>) -> Event {
        let Some(fields) = message.first_chunk::<HEADER>() else { return Event::Violation("a request is cut off") };
        use crate::bytes::Fields;
        if fields.u32_at(0) != MAGIC {
            return Event::Violation("a request does not begin as one");
        }
        let (given, kind) = (fields.u16_at(4), fields.u16_at(6));
        let (cookie, at, len) = (fields.u64_at(8), fields.u64_at(16), fields.u32_at(24));
        if kind == kind::DISCONNECT {
            return Event::Goodbye;
        }
        let export = &self.config.exports[number];
        match check(export, self.agreed.allocation.is_some(), given, kind, at, len) {
            Ok(command) => Event::Request(Request { command, cookie, at, len, fua: given & flag::FUA != 0 }),
            Err(fault) => {
                match kind {
                    kind::WRITE => self.skip_payload(number, len, cookie, fault, out),
                    _ => self.replies().error(cookie, fault, out),
                }
                Event::Continue
            }
        }
    }
}

/// Checks a request against the protocol and the export.
fn check(export: &Export, has_context: bool, given: u16, kind: u16, at: u64, len: u32) -> Result<Command, Fault> {
    let (command, allowed) = match kind {
        kind::READ => (Command::Read, flag::DF),
        kind::WRITE => (Command::Write, 0),
        kind::FLUSH => (Command::Flush, 0),
        kind::TRIM => (Command::Trim, 0),
        kind::CACHE => (Command::Cache, 0),
        kind::WRITE_ZEROES => (Command::WriteZeroes, flag::NO_HOLE | flag::FAST_ZERO),
        kind::BLOCK_STATUS => (Command::BlockStatus { one: given & flag::REQ_ONE != 0 }, flag::REQ_ONE),
        _ => return Err(Fault::Invalid),
    };
    // FUA is allowed with any request, and means nothing for most.
    if given & !(allowed | flag::FUA) != 0 {
        return Err(Fault::Invalid);
    }
    let writes = matches!(command, Command::Write | Command::Trim | Command::WriteZeroes);
    if writes && export.is_read_only {
        return Err(Fault::NotPermitted);
    }
    match command {
        Command::Flush if at != 0 || len != 0 => return Err(Fault::Invalid),
        Command::Flush => return Ok(command),
        Command::Read | Command::Write if len > MAX_PAYLOAD => return Err(Fault::Invalid),
        Command::BlockStatus { .. } if !has_context => return Err(Fault::Invalid),
        _ => {}
    }
    let block = u64::from(export.min_block.max(1));
    if len == 0 || !at.is_multiple_of(block) || !u64::from(len).is_multiple_of(block) {
        return Err(Fault::Invalid);
    }
    match at.checked_add(u64::from(len)) {
        // Zeroes are encrypted and written like other data, so they are never faster. The answer comes before anything
        // is written.
        Some(end) if end <= export.size && given & flag::FAST_ZERO != 0 => Err(Fault::NotSupported),
        Some(end) if end <= export.size => Ok(command),
        _ if matches!(command, Command::Write | Command::WriteZeroes) => Err(Fault::NoSpace),
        _ => Err(Fault::Invalid),
    }
}
