//! The NBD protocol's client side on bytes: agreeing on an export of a server, and requests with simple replies.
//!
//! Everything that comes from the server is checked here before it is used: magic numbers, lengths, sizes of blocks
//! (C1). A reply has no length of its own: a read's bytes are as many as were asked for.
use std::io::{self, Read, Write};

use super::negotiate::{FIXED_NEWSTYLE, GREETING, NO_ZEROES, OPTION_MAGIC, REPLY_MAGIC, info, option, reply};
use super::replies::SIMPLE_MAGIC;
use super::requests::{HEADER, MAGIC, flag, flags, kind};
use super::{MAX_NAME, MAX_OPTION, MAX_PAYLOAD};
use crate::bytes::Fields;

/// Bytes of a reply's header.
pub(crate) const REPLY: usize = 16;
/// Replies to one option. A server sends a handful.
const MAX_REPLIES: usize = 64;
/// The most that `min_block` may be.
const MAX_MIN_BLOCK: u32 = 64 << 10;
/// The error number of a server that stops.
pub(crate) const SHUTDOWN: u32 = 108;

/// What a server has said of its export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Agreed {
    /// Bytes.
    pub(crate) size: u64,
    pub(crate) is_read_only: bool,
    pub(crate) can_flush: bool,
    pub(crate) can_fua: bool,
    pub(crate) can_trim: bool,
    /// A flush on one connection covers what was answered on all of them.
    pub(crate) can_multi_conn: bool,
    /// Offsets and lengths are multiples of this, a power of two.
    pub(crate) min_block: u32,
    /// The most bytes of a read or write, a multiple of `min_block`.
    pub(crate) max_block: u32,
}

impl Agreed {
    /// What is less than `before`, if anything is: an export that has shrunk is not the one that was.
    pub(crate) fn shortfall(&self, before: &Self) -> Option<String> {
        let has_less = |has: bool, had: bool| had && !has;
        match () {
            () if self.size < before.size => Some(format!("it has {} bytes, and had {}", self.size, before.size)),
            () if has_less(!self.is_read_only, !before.is_read_only) => Some("it is read-only now".to_owned()),
            () if has_less(self.can_flush, before.can_flush)
                || has_less(self.can_fua, before.can_fua)
                || has_less(self.can_trim, before.can_trim)
                || has_less(self.can_multi_conn, before.can_multi_conn) =>
            {
                Some("it offers fewer kinds of requests than before".to_owned())
            }
            () if self.min_block > before.min_block || self.max_block < before.max_block => {
                Some("its sizes of blocks are others than before".to_owned())
            }
            () => None,
        }
    }
}

/// The server broke the protocol.
fn lie(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the far end breaks the NBD protocol: {why}"))
}

fn refusal(why: String) -> io::Error {
    io::Error::other(why)
}

/// Takes the greeting and answers it. With `by_tls`, TLS begins with the next byte.
pub(crate) fn greet(stream: &mut (impl Read + Write), by_tls: bool) -> io::Result<()> {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    if greeting.u64_at(0) != GREETING {
        return Err(lie("it does not greet as a server of NBD does"));
    }
    let offered = u32::from(greeting.u16_at(16));
    if greeting.u64_at(8) != OPTION_MAGIC || offered & FIXED_NEWSTYLE == 0 {
        return Err(refusal("the far end speaks an old form of NBD, without options".to_owned()));
    }
    stream.write_all(&(offered & (FIXED_NEWSTYLE | NO_ZEROES)).to_be_bytes())?;
    if !by_tls {
        return Ok(());
    }
    ask(stream, option::STARTTLS, &[])?;
    match read_reply(stream, option::STARTTLS)? {
        (reply::ACK, _) => Ok(()),
        (kind, text) => Err(refused(kind, &text, "it has no TLS: name it with nbd:// or nbd+unix://")),
    }
}

/// Chooses an export, with which requests begin.
pub(crate) fn go(stream: &mut (impl Read + Write), export: &str) -> io::Result<Agreed> {
    if export.len() > MAX_NAME {
        return Err(refusal(format!("the name of an export has at most {MAX_NAME} bytes")));
    }
    let mut data = (export.len() as u32).to_be_bytes().to_vec();
    data.extend(export.as_bytes());
    data.extend(1u16.to_be_bytes());
    data.extend(info::BLOCK_SIZE.to_be_bytes());
    ask(stream, option::GO, &data)?;
    let (mut export, mut blocks) = (None, None);
    for _ in 0..MAX_REPLIES {
        let (kind, data) = read_reply(stream, option::GO)?;
        match kind {
            reply::ACK => {
                let (size, flags) = export.ok_or_else(|| lie("it says nothing of its export"))?;
                return agreed(size, flags, blocks);
            }
            reply::INFO => match data.split_first_chunk().map(|(kind, rest)| (u16::from_be_bytes(*kind), rest)) {
                Some((info::EXPORT, rest)) => {
                    let fields: &[u8; 10] = rest.try_into().map_err(|_| lie("an export's information is cut off"))?;
                    export = Some((fields.u64_at(0), fields.u16_at(8)));
                }
                Some((info::BLOCK_SIZE, rest)) => {
                    let fields: &[u8; 12] = rest.try_into().map_err(|_| lie("the sizes of blocks are cut off"))?;
                    blocks = Some([0, 4, 8].map(|at| fields.u32_at(at)));
                }
                Some(_) => {}
                None => return Err(lie("an information is cut off")),
            },
            kind => return Err(refused(kind, &data, "it is too old, and does not know how to be asked for an export")),
        }
    }
    Err(lie("it does not stop describing its export"))
}

fn agreed(size: u64, given: u16, blocks: Option<[u32; 3]>) -> io::Result<Agreed> {
    let has = |flag: u16| given & flags::HAS_FLAGS != 0 && given & flag != 0;
    // Without a word of it, these are what the protocol lets clients assume.
    let [min, preferred, max] = blocks.unwrap_or([512, 4096, MAX_PAYLOAD]);
    let is_sound = min.is_power_of_two() && min <= MAX_MIN_BLOCK && preferred.is_power_of_two() && preferred >= min;
    // Any length is allowed by the greatest number there is.
    if !is_sound || max < min || (max != u32::MAX && !max.is_multiple_of(min)) {
        return Err(lie(&format!("blocks of {min}, {preferred} and {max} bytes")));
    }
    // A part of a block at the end can't be reached.
    let whole = size - size % u64::from(min);
    if whole == 0 || size > i64::MAX as u64 {
        return Err(lie(&format!("an export of {size} bytes")));
    }
    Ok(Agreed {
        size: whole,
        is_read_only: has(flags::READ_ONLY),
        can_flush: has(flags::SEND_FLUSH),
        can_fua: has(flags::SEND_FUA),
        can_trim: has(flags::SEND_TRIM),
        can_multi_conn: has(flags::CAN_MULTI_CONN),
        min_block: min,
        max_block: max.min(MAX_PAYLOAD),
    })
}

fn ask(stream: &mut impl Write, option: u32, data: &[u8]) -> io::Result<()> {
    let magic = OPTION_MAGIC.to_be_bytes();
    stream.write_all(&[&magic[..], &option.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data].concat())
}

/// The next reply to `option`: its kind and data.
fn read_reply(stream: &mut impl Read, option: u32) -> io::Result<(u32, Vec<u8>)> {
    let mut header = [0; 20];
    stream.read_exact(&mut header)?;
    if header.u64_at(0) != REPLY_MAGIC || header.u32_at(8) != option {
        return Err(lie("an answer to an option that was not asked"));
    }
    let len = header.u32_at(16) as usize;
    if len > MAX_OPTION {
        return Err(lie(&format!("an answer of {len} bytes to an option")));
    }
    let mut data = vec![0; len];
    stream.read_exact(&mut data)?;
    Ok((header.u32_at(12), data))
}

fn refused(kind: u32, text: &[u8], unsupported: &str) -> io::Error {
    let why = match kind {
        reply::UNSUPPORTED => unsupported.to_owned(),
        reply::UNKNOWN => "it has no export of that name: nbdinfo --list shows its names".to_owned(),
        reply::TLS_REQUIRED => {
            "it wants TLS: name it with nbds:// or nbds+unix://, and tls-certificates=FOLDER".to_owned()
        }
        reply::SHUTDOWN => "it is about to stop".to_owned(),
        other => format!("it answers with error {other:#x}"),
    };
    let said: String = String::from_utf8_lossy(text).chars().filter(|char| !char.is_control()).take(200).collect();
    let said = if said.is_empty() { said } else { format!(" ({said})") };
    refusal(format!("the far end refuses: {why}{said}"))
}

/// A request to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    Read,
    Write {
        is_durable: bool,
    },
    Flush,
    Trim,
    /// No more requests follow, and it has no reply.
    Disconnect,
}

/// A request's header.
pub(crate) fn request(ask: Ask, cookie: u64, at: u64, len: u32) -> [u8; HEADER] {
    let (kind, flags) = match ask {
        Ask::Read => (kind::READ, 0),
        Ask::Write { is_durable } => (kind::WRITE, if is_durable { flag::FUA } else { 0 }),
        Ask::Flush => (kind::FLUSH, 0),
        Ask::Trim => (kind::TRIM, 0),
        Ask::Disconnect => (kind::DISCONNECT, 0),
    };
    let mut header = [0; HEADER];
    header[..4].copy_from_slice(&MAGIC.to_be_bytes());
    header[4..6].copy_from_slice(&flags.to_be_bytes());
    header[6..8].copy_from_slice(&kind.to_be_bytes());
    header[8..16].copy_from_slice(&cookie.to_be_bytes());
    header[16..24].copy_from_slice(&at.to_be_bytes());
    header[24..].copy_from_slice(&len.to_be_bytes());
    header
}

/// A reply's error number, 0 if there is none, and the cookie of its request.
pub(crate) fn reply(header: &[u8; REPLY]) -> io::Result<(u32, u64)> {
    match header.u32_at(0) {
        SIMPLE_MAGIC => Ok((header.u32_at(4), header.u64_at(8))),
        _ => Err(lie("a reply does not begin as one")),
    }
}

/// A request of this cookie is not under way.
pub(crate) fn unknown(cookie: u64) -> io::Error {
    lie(&format!("a reply to request {cookie:#x}, which is not under way"))
}

/// The system's error for the protocol's.
pub(crate) fn error_of(number: u32) -> io::Error {
    io::Error::from_raw_os_error(match number {
        1 => libc::EPERM,
        12 => libc::ENOMEM,
        22 => libc::EINVAL,
        28 => libc::ENOSPC,
        95 => libc::EOPNOTSUPP,
        _ => libc::EIO,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A server that has said all it will, and what it was told.
    struct Said<'a>(&'a [u8], Vec<u8>);

    impl Read for Said<'_> {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            self.0.read(bytes)
        }
    }

    impl Write for Said<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.1.write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn answer(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
        let header = [&REPLY_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &kind.to_be_bytes()].concat();
        [&header, &(data.len() as u32).to_be_bytes()[..], data].concat()
    }

    fn export(size: u64, flags: u16) -> Vec<u8> {
        answer(7, 3, &[&[0, 0][..], &size.to_be_bytes(), &flags.to_be_bytes()].concat())
    }

    fn blocks(sizes: [u32; 3]) -> Vec<u8> {
        answer(7, 3, &[&[0, 3][..], &sizes.map(u32::to_be_bytes).concat()].concat())
    }

    #[test]
    fn an_export_is_agreed_on_with_its_blocks() {
        let said = [export(1 << 20, 0x12d), blocks([512, 4096, 1 << 25]), answer(7, 1, &[])].concat();
        let mut server = Said(&said, Vec::new());
        let agreed = go(&mut server, "disk").unwrap();
        assert_eq!(server.1, b"IHAVEOPT\0\0\0\x07\0\0\0\x0c\0\0\0\x04disk\0\x01\0\x03");
        assert_eq!((agreed.size, agreed.min_block, agreed.max_block), (1 << 20, 512, 1 << 25));
        assert!(agreed.can_flush && agreed.can_fua && agreed.can_trim && agreed.can_multi_conn && !agreed.is_read_only);
        // Blocks of any length are as long as a client may send without a word.
        let said = [blocks([1, 1, u32::MAX]), export(77, 0x12d), answer(7, 1, &[])].concat();
        assert_eq!(go(&mut Said(&said, Vec::new()), "").unwrap().max_block, MAX_PAYLOAD);
    }

    #[test]
    fn refusals_say_what_to_do() {
        for (kind, word) in [
            (reply::UNKNOWN, "nbdinfo --list"),
            (reply::TLS_REQUIRED, "nbds://"),
            (reply::UNSUPPORTED, "too old"),
            (reply::SHUTDOWN, "stop"),
            (0x8000_00ff, "0x800000ff (why\u{fffd})"),
        ] {
            let said = answer(7, kind, b"w\x1bhy\xff");
            let refused = go(&mut Said(&said, Vec::new()), "").unwrap_err().to_string();
            assert!(refused.contains(word) && !refused.contains('\x1b'), "{refused}");
        }
        let old = [&GREETING.to_be_bytes()[..], &0x0000_4202_8186_1253u64.to_be_bytes(), &[0, 0]].concat();
        let refused = greet(&mut Said(&old, Vec::new()), false).unwrap_err().to_string();
        assert!(refused.contains("old form"), "{refused}");
        let greeting = [&b"NBDMAGICIHAVEOPT\0\x03"[..], &answer(5, reply::UNSUPPORTED, &[])].concat();
        let refused = greet(&mut Said(&greeting, Vec::new()), true).unwrap_err().to_string();
        assert!(refused.contains("no TLS"), "{refused}");
    }

    proptest! {
        /// Sound and unsound answers in any order, cut off anywhere.
        #[test]
        fn what_is_agreed_on_is_sound(
            parts in prop::collection::vec(
                prop_oneof![
                    (any::<u64>(), any::<u16>()).prop_map(|(size, flags)| export(size >> (flags % 64), flags)),
                    (0u32..20, 0u32..33, any::<u32>()).prop_map(|(min, preferred, max)| {
                        blocks([1 << min, 1u32.checked_shl(preferred).unwrap_or(3), max])
                    }),
                    (0u32..9, 0u32..9, prop::collection::vec(any::<u8>(), 0..20))
                        .prop_map(|(option, kind, data)| answer(option, kind, &data)),
                    Just(answer(7, 1, &[])),
                    prop::collection::vec(any::<u8>(), 0..40),
                ],
                0..8,
            ),
            cut in 0usize..200,
        ) {
            let said = parts.concat();
            let said = &said[..said.len().saturating_sub(cut / 2 * (cut % 2))];
            if let Ok(agreed) = go(&mut Said(said, Vec::new()), "") {
                prop_assert!(agreed.size > 0 && i64::try_from(agreed.size).is_ok());
                prop_assert!(agreed.min_block.is_power_of_two() && agreed.min_block <= MAX_MIN_BLOCK);
                prop_assert!(agreed.max_block >= agreed.min_block && agreed.max_block <= MAX_PAYLOAD);
                prop_assert!(agreed.max_block.is_multiple_of(agreed.min_block));
            }
            let _ = greet(&mut Said(said, Vec::new()), true);
        }
    }
}
