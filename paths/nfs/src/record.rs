//! The bytes of remote procedure calls on a stream (RFC 5531): marks of records, headers of calls, headers of replies.
//!
//! Everything here works on bytes that a peer sent, which may lie. So no length is believed before it is held against what
//! there is, nothing is allocated by a length, and no input panics.
use nfs3_types::nfs3::{self, NFS3_FHSIZE};
use nfs3_types::rpc::{RPC_VERSION_2 as RPC_VERSION, auth_flavor, auth_stat, msg_type};

use crate::call::{Caller, Credential, Status};
use crate::xdr::{Garbage, Reader};

/// The bytes of a record's mark (section 11).
pub(crate) const MARK: usize = 4;
/// The longest record, not counting the data of a WRITE.
pub(crate) const SMALL_MAX: usize = 16 << 10;
/// The longest data of a WRITE.
pub(crate) const DATA_MAX: usize = 1 << 20;
/// The longest record.
pub(crate) const RECORD_MAX: usize = SMALL_MAX + DATA_MAX;
/// The most bytes of a WRITE before its data: six words, two authenticators, the handle, offset, count, stability, length.
pub(crate) const WRITE_HEAD_MAX: usize = 24 + 2 * (8 + AUTH_MAX) + (4 + NFS3_FHSIZE) + 20;

/// RFC 5531, `opaque_auth`
const AUTH_MAX: usize = 400;
/// RFC 5531, appendix A
const MACHINE_MAX: usize = 255;
const GROUPS_MAX: u32 = 16;

const CALL: u32 = msg_type::CALL as u32;
const REPLY: u32 = msg_type::REPLY as u32;
const AUTH_NONE: u32 = auth_flavor::AUTH_NULL as u32;
pub(crate) const AUTH_SYS: u32 = auth_flavor::AUTH_UNIX as u32;
const LAST: u32 = 1 << 31;

/// Program, version and procedure whose data go to pages.
const WRITE: [u32; 3] = [nfs3::PROGRAM, nfs3::VERSION, nfs3::NFS_PROGRAM::NFSPROC3_WRITE as u32];

/// The mark of a fragment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mark {
    pub(crate) is_last: bool,
    /// At most 2^31 - 1.
    pub(crate) len: usize,
}

impl Mark {
    pub(crate) fn new(bytes: [u8; MARK]) -> Self {
        let word = u32::from_be_bytes(bytes);
        Self { is_last: word & LAST != 0, len: (word & !LAST) as usize }
    }
}

/// The bytes that make `len` a multiple of four.
pub(crate) const fn padding(len: usize) -> usize {
    len.wrapping_neg() & 3
}

/// What a record is, as far as its first bytes say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// More bytes will say.
    Undecided,
    /// It is to be gathered whole: no WRITE, or one that lies about its lengths.
    Small,
    /// A WRITE whose data begin at `at` in the record.
    Write { at: usize, len: usize },
}

/// What a record is that begins with `head`. `record_len` is its length, if that is known: a record of several fragments does
/// not say it before the last.
pub(crate) fn kind(head: &[u8], record_len: Option<usize>) -> Kind {
    let mut reader = Reader::new(head);
    match write_data(&mut reader) {
        Err(Garbage::Cut) if head.len() < WRITE_HEAD_MAX => Kind::Undecided,
        Ok(len) if len <= DATA_MAX => {
            let at = head.len() - reader.left();
            let is_lie = record_len.is_some_and(|record_len| record_len != at + len + padding(len));
            if is_lie { Kind::Small } else { Kind::Write { at, len } }
        }
        _ => Kind::Small,
    }
}

/// The length of a WRITE's data, which begin behind what is read.
///
/// # Errors
/// `Cut`: there are too few bytes to say. `Wrong`: it is no WRITE.
fn write_data(reader: &mut Reader<'_>) -> Result<usize, Garbage> {
    reader.u32()?; // xid
    for word in [CALL, RPC_VERSION].into_iter().chain(WRITE) {
        if reader.u32()? != word {
            return Err(Garbage::Wrong);
        }
    }
    for _ in ["credential", "verifier"] {
        reader.u32()?;
        reader.opaque(AUTH_MAX)?;
    }
    reader.opaque(NFS3_FHSIZE)?;
    reader.array::<16>()?; // offset, count, stable
    Ok(reader.u32()? as usize)
}

/// Program, version and procedure of a call; zeros if it is cut short.
pub(crate) fn procedure(record: &[u8]) -> [u32; 3] {
    let mut reader = Reader::new(record.get(12..24).unwrap_or(&[0; 12]));
    [(); 3].map(|()| reader.u32().unwrap_or_default())
}

/// The most bytes of contents that a call asks for: the last word of those that read files and directories.
pub(crate) fn asks(record: &[u8]) -> usize {
    use nfs3::NFS_PROGRAM::{NFSPROC3_READ, NFSPROC3_READDIR, NFSPROC3_READDIRPLUS};
    let [program, version, procedure] = procedure(record);
    let reads = [NFSPROC3_READ, NFSPROC3_READDIR, NFSPROC3_READDIRPLUS].map(|reads| reads as u32);
    if [program, version] != WRITE[..2] || !reads.contains(&procedure) {
        return 0;
    }
    record.last_chunk().map_or(0, |&word| (u32::from_be_bytes(word) as usize).min(DATA_MAX))
}

/// A call as its header says.
#[derive(Debug)]
pub(crate) struct Header<'a> {
    pub(crate) xid: u32,
    pub(crate) program: u32,
    pub(crate) version: u32,
    pub(crate) procedure: u32,
    pub(crate) credential: Credential,
    pub(crate) args: &'a [u8],
}

impl Header<'_> {
    pub(crate) fn is_write(&self) -> bool {
        [self.program, self.version, self.procedure] == WRITE
    }
}

/// Why a record is no call that a procedure could answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// See [`is_call`].
    NoCall,
    /// Answered so.
    Answered { xid: u32, status: Status },
}

/// Whether a record is a call. There is nothing to answer in another one, and what follows it would make no more sense.
pub(crate) fn is_call(record: &[u8]) -> bool {
    !matches!(header(record.get(..8).unwrap_or_default()), Err(Refusal::NoCall))
}

/// The header of the call in a whole record.
pub(crate) fn header(record: &[u8]) -> Result<Header<'_>, Refusal> {
    let mut reader = Reader::new(record);
    let (Ok(xid), Ok(CALL)) = (reader.u32(), reader.u32()) else { return Err(Refusal::NoCall) };
    rest_of_header(xid, reader).map_err(|status| Refusal::Answered { xid, status })
}

fn rest_of_header(xid: u32, mut reader: Reader<'_>) -> Result<Header<'_>, Status> {
    if reader.u32()? != RPC_VERSION {
        return Err(Status::RpcMismatch);
    }
    let (program, version, procedure) = (reader.u32()?, reader.u32()?, reader.u32()?);
    let (flavor, body) = authenticator(&mut reader, auth_stat::AUTH_BADCRED)?;
    authenticator(&mut reader, auth_stat::AUTH_BADVERF)?;
    let credential = match flavor {
        AUTH_NONE => Credential::None,
        AUTH_SYS => Credential::Sys(caller(body).map_err(|_| Status::Auth(auth_stat::AUTH_BADCRED))?),
        // The client of `AUTH_SHORT` falls back to `AUTH_SYS` by this.
        _ => return Err(Status::Auth(auth_stat::AUTH_REJECTEDCRED)),
    };
    Ok(Header { xid, program, version, procedure, credential, args: reader.rest() })
}

/// Flavor and body of a credential or a verifier.
fn authenticator<'a>(reader: &mut Reader<'a>, too_long: auth_stat) -> Result<(u32, &'a [u8]), Status> {
    let flavor = reader.u32()?;
    match reader.opaque(AUTH_MAX) {
        Err(Garbage::Wrong) => Err(Status::Auth(too_long)),
        body => Ok((flavor, body?)),
    }
}

/// The body of an `AUTH_SYS` credential.
fn caller(body: &[u8]) -> Result<Caller, Garbage> {
    let mut reader = Reader::new(body);
    reader.u32()?; // stamp
    reader.opaque(MACHINE_MAX)?;
    let (uid, gid, count) = (reader.u32()?, reader.u32()?, reader.u32()?);
    if count > GROUPS_MAX {
        return Err(Garbage::Wrong);
    }
    let groups = (0..count).map(|_| reader.u32()).collect::<Result<_, _>>()?;
    reader.end()?;
    Ok(Caller { uid, gid, groups })
}

/// Appends mark and header of a reply. `following` is the number of bytes that the record has after them.
pub(crate) fn put_header(out: &mut Vec<u8>, xid: u32, status: Status, following: usize) {
    let start = out.len();
    let mut put = |words: &[u32]| words.iter().for_each(|word| out.extend_from_slice(&word.to_be_bytes()));
    put(&[0, xid, REPLY]);
    // Accepted: an empty verifier, `accept_stat`. Denied: `reject_stat`.
    let accepted = |status| [0, AUTH_NONE, 0, status];
    match status {
        Status::Success => put(&accepted(0)),
        Status::NoProgram => put(&accepted(1)),
        Status::NoVersion(low, high) => {
            put(&accepted(2));
            put(&[low, high]);
        }
        Status::NoProcedure => put(&accepted(3)),
        Status::Garbage => put(&accepted(4)),
        Status::SystemError => put(&accepted(5)),
        Status::RpcMismatch => put(&[1, 0, RPC_VERSION, RPC_VERSION]),
        Status::Auth(status) => put(&[1, 1, status as u32]),
    }
    let len = out.len() - start - MARK + following;
    debug_assert!(len < LAST as usize, "no result is that long");
    out[start..start + MARK].copy_from_slice(&(len as u32 | LAST).to_be_bytes());
}

/// Everything that is done with a peer's record, for fuzzing: it must not panic, and what it says must agree.
#[cfg(any(test, fuzzing))]
pub(crate) fn check_record(record: &[u8]) {
    let whole = kind(record, Some(record.len()));
    if let Kind::Write { at, len } = whole {
        assert!(at <= WRITE_HEAD_MAX && at + len + padding(len) == record.len());
        // The same is said as soon as the data begin, and not before.
        assert_eq!(kind(&record[..at], Some(record.len())), whole);
        assert_eq!(kind(&record[..at - 1], Some(record.len())), Kind::Undecided);
        assert_eq!(kind(record, None), whole);
    }
    match header(record) {
        Ok(header) => {
            assert!(header.args.len() + 40 <= record.len());
            assert!(header.is_write() || !matches!(whole, Kind::Write { .. }));
        }
        Err(Refusal::Answered { xid, status }) => {
            let mut out = Vec::new();
            put_header(&mut out, xid, status, 0);
            assert_eq!(Mark::new(*out.first_chunk().unwrap()), Mark { is_last: true, len: out.len() - MARK });
        }
        Err(Refusal::NoCall) => {}
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_be_bytes()).collect()
    }
    fn opaque(bytes: &[u8]) -> Vec<u8> {
        [&words(&[bytes.len() as u32]), bytes, &vec![0; padding(bytes.len())]].concat()
    }
    fn sys(name: &[u8], groups: &[u32]) -> Vec<u8> {
        [words(&[AUTH_SYS]), opaque(&sys_body(name, groups))].concat()
    }
    fn sys_body(name: &[u8], groups: &[u32]) -> Vec<u8> {
        [words(&[7]), opaque(name), words(&[1000, 100, groups.len() as u32]), words(groups)].concat()
    }
    fn call_with(credential: &[u8], verifier: &[u8], procedure: u32, args: &[u8]) -> Vec<u8> {
        let head = words(&[99, CALL, RPC_VERSION, WRITE[0], WRITE[1], procedure]);
        [&head, credential, verifier, args].concat()
    }
    /// A record that calls a procedure of NFS.
    pub(crate) fn call(xid: u32, procedure: u32, args: &[u8]) -> Vec<u8> {
        let mut record = call_with(&sys(b"here", &[4, 24]), &words(&[0, 0]), procedure, args);
        record[..4].copy_from_slice(&xid.to_be_bytes());
        record
    }
    /// The arguments of a WRITE.
    pub(crate) fn write_args(data: &[u8]) -> Vec<u8> {
        let len = data.len() as u32;
        [opaque(b"a file's handle"), words(&[0, 0, len, 0]), opaque(data)].concat()
    }

    #[test]
    fn mark_has_a_flag_and_a_length() {
        assert_eq!(Mark::new([0x80, 0, 1, 2]), Mark { is_last: true, len: 258 });
        assert_eq!(Mark::new([0x7f, 255, 255, 255]), Mark { is_last: false, len: 0x7fff_ffff });
    }

    #[test]
    fn header_has_the_words_of_the_call() {
        let record = call_with(&sys(b"client", &[4, 24, 27]), &words(&[0, 0]), 1, b"argument");
        let header = header(&record).unwrap();
        assert_eq!((header.xid, header.program, header.version, header.procedure), (99, 100_003, 3, 1));
        assert_eq!(header.credential, Credential::Sys(Caller { uid: 1000, gid: 100, groups: vec![4, 24, 27] }));
        assert_eq!(header.args, b"argument");
    }

    #[test]
    fn credentials_are_bounded() {
        let none = words(&[0, 0]);
        let status = |credential: &[u8], verifier: &[u8]| match header(&call_with(credential, verifier, 0, &[])) {
            Ok(_) => Status::Success,
            Err(Refusal::Answered { xid: 99, status }) => status,
            Err(other) => panic!("{other:?}"),
        };
        let bad = Status::Auth(auth_stat::AUTH_BADCRED);
        assert_eq!(status(&none, &none), Status::Success);
        assert_eq!(status(&[words(&[0]), opaque(&[1; 400])].concat(), &none), Status::Success);
        assert_eq!(status(&[words(&[0]), opaque(&[1; 401])].concat(), &none), bad);
        assert_eq!(status(&sys(&[b'x'; 255], &[5; 16]), &none), Status::Success);
        assert_eq!(status(&sys(&[b'x'; 256], &[5; 16]), &none), bad);
        assert_eq!(status(&sys(b"x", &[5; 17]), &none), bad);
        // As many groups as there are not.
        let mut body = sys_body(b"x", &[5; 4]);
        let at = body.len() - 20;
        body[at..at + 4].copy_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(status(&[words(&[1]), opaque(&body)].concat(), &none), bad);
        // A name that is longer than the body.
        assert_eq!(status(&[words(&[1]), opaque(&words(&[0, 200, 0]))].concat(), &none), bad);
        assert_eq!(status(&[words(&[1]), opaque(&[])].concat(), &none), bad);
        for flavor in [2, 3, 6, u32::MAX] {
            let rejected = Status::Auth(auth_stat::AUTH_REJECTEDCRED);
            assert_eq!(status(&[words(&[flavor]), opaque(b"body")].concat(), &none), rejected);
        }
        assert_eq!(status(&none, &[words(&[0]), opaque(&[0; 401])].concat()), Status::Auth(auth_stat::AUTH_BADVERF));
        assert_eq!(status(&none, &[words(&[0]), opaque(&[0; 399])].concat()), Status::Success);
    }

    #[test]
    fn truncated_header_is_garbage() {
        let record = call(99, 0, &[]);
        for len in 0..record.len() {
            let garbage = Refusal::Answered { xid: 99, status: Status::Garbage };
            let expected = if len < 8 { Refusal::NoCall } else { garbage };
            assert_eq!(header(&record[..len]).unwrap_err(), expected, "{len}");
        }
        assert_eq!(header(&words(&[1, REPLY, 2, 0, 0, 0])).unwrap_err(), Refusal::NoCall);
    }

    #[test]
    fn other_version_of_rpc_is_told_the_one_there_is() {
        let status = Status::RpcMismatch;
        assert_eq!(header(&words(&[5, CALL, 3])).unwrap_err(), Refusal::Answered { xid: 5, status });
        let mut out = Vec::new();
        put_header(&mut out, 5, status, 0);
        assert_eq!(out, words(&[LAST | 24, 5, REPLY, 1, 0, 2, 2]));
    }

    #[test]
    fn headers_of_replies() {
        let bytes = |status, following| {
            let mut out = vec![];
            put_header(&mut out, 7, status, following);
            out
        };
        assert_eq!(bytes(Status::Success, 100), words(&[LAST | 124, 7, 1, 0, 0, 0, 0]));
        assert_eq!(bytes(Status::NoProgram, 0), words(&[LAST | 24, 7, 1, 0, 0, 0, 1]));
        assert_eq!(bytes(Status::NoVersion(3, 4), 0), words(&[LAST | 32, 7, 1, 0, 0, 0, 2, 3, 4]));
        assert_eq!(bytes(Status::NoProcedure, 0), words(&[LAST | 24, 7, 1, 0, 0, 0, 3]));
        assert_eq!(bytes(Status::Garbage, 0), words(&[LAST | 24, 7, 1, 0, 0, 0, 4]));
        assert_eq!(bytes(Status::SystemError, 0), words(&[LAST | 24, 7, 1, 0, 0, 0, 5]));
        assert_eq!(bytes(Status::Auth(auth_stat::AUTH_TOOWEAK), 0), words(&[LAST | 20, 7, 1, 1, 1, 5]));
    }

    #[test]
    fn write_is_known_as_its_data_begin() {
        let data = [3; 77];
        let record = call(1, WRITE[2], &write_args(&data));
        let at = record.len() - 80;
        for len in 0..=record.len() {
            let expected = if len < at { Kind::Undecided } else { Kind::Write { at, len: 77 } };
            assert_eq!(kind(&record[..len], Some(record.len())), expected, "{len}");
            assert_eq!(kind(&record[..len], None), expected, "{len}");
        }
        assert_eq!(kind(&call(1, 6, &write_args(&data)), Some(record.len())), Kind::Small);
    }

    #[test]
    fn longest_head_of_a_write_fits() {
        let auth = [words(&[0]), opaque(&[0; 400])].concat();
        let args = [opaque(&[1; 64]), words(&[0, 0, 4, 0]), opaque(b"data")].concat();
        let record = call_with(&auth, &auth, WRITE[2], &args);
        assert_eq!(kind(&record, Some(record.len())), Kind::Write { at: WRITE_HEAD_MAX, len: 4 });
        check_record(&record);
    }

    #[test]
    fn write_that_lies_is_no_write() {
        let record = call(1, WRITE[2], &write_args(&[3; 8]));
        let len_at = record.len() - 12;
        for lie in [0, 4, 9, 12, 1 << 20, (1 << 20) + 1, u32::MAX] {
            let mut record = record.clone();
            record[len_at..len_at + 4].copy_from_slice(&lie.to_be_bytes());
            assert_eq!(kind(&record, Some(record.len())), Kind::Small, "{lie}");
        }
        // The handle's length.
        for lie in [65, u32::MAX] {
            let mut record = record.clone();
            let at = len_at - 16 - 16 - 4;
            record[at..at + 4].copy_from_slice(&lie.to_be_bytes());
            assert_eq!(kind(&record, Some(record.len())), Kind::Small);
        }
        // Without the length of the data.
        assert_eq!(kind(&record[..len_at], Some(len_at)), Kind::Undecided);
    }

    #[test]
    fn no_record_panics() {
        let mut rng = 1_u64;
        let mut random = move |n: usize| {
            rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (rng >> 33) as usize % n
        };
        let good =
            [call(1, WRITE[2], &write_args(&[1; 40])), call(2, 1, b"args"), call_with(&[0; 8], &[0; 8], WRITE[2], &[])];
        for round in 0..100_000 {
            let mut record = good[round % good.len()].clone();
            for _ in 0..random(4) {
                let at = random(record.len());
                record[at] = [0, 1, 4, 64, 127, 128, 255][random(7)];
            }
            record.truncate(random(record.len() + 1).max(record.len() * random(2)));
            check_record(&record);
        }
    }
}
