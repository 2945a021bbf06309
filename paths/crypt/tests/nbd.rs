//! The NBD protocol on bytes: valid messages, messages cut into pieces, and clients that lie.
use std::sync::Arc;

use pagemill_crypt::nbd::{
    Command, Config, Event, Export, Extent, Fault, MAX_OPTION, MAX_PAYLOAD, Request, Session, Tls,
};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn config(tls: Tls) -> Arc<Config> {
    let export = |name: &str, min_block, is_read_only| Export {
        name: name.to_owned(),
        description: format!("the volume {name}"),
        size: MIB,
        is_read_only,
        min_block,
        preferred_block: 4096,
    };
    Arc::new(Config {
        exports: vec![export("small", 1, false), export("large", 4096, false), export("fixed", 1, true)],
        tls,
        block_size_agreed: false,
    })
}

/// A session after its greeting, and its answers since.
struct Client {
    session: Session,
    out: Vec<u8>,
}

impl Client {
    fn new(tls: Tls) -> Self {
        Self::of(config(tls))
    }

    fn of(config: Arc<Config>) -> Self {
        let mut out = Vec::new();
        let session = Session::new(config, &mut out);
        assert_eq!(out, b"NBDMAGICIHAVEOPT\0\x03");
        let mut client = Self { session, out: Vec::new() };
        assert_eq!(client.send(&3u32.to_be_bytes()), Event::Continue);
        client
    }

    /// Feeds all of `bytes`, and returns the last event.
    fn send(&mut self, bytes: &[u8]) -> Event {
        let mut left = bytes;
        loop {
            let (taken, event) = self.session.feed(left, &mut self.out);
            left = &left[taken..];
            if left.is_empty() || event != Event::Continue {
                assert!(left.is_empty(), "{event:?} with {} bytes left", left.len());
                return event;
            }
        }
    }

    fn option(&mut self, option: u32, data: &[u8]) -> Event {
        self.send(&option_bytes(option, data))
    }

    /// The answers since, as replies to options: option, kind, data.
    fn replies(&mut self) -> Vec<(u32, u32, Vec<u8>)> {
        let mut replies = Vec::new();
        let mut left = &std::mem::take(&mut self.out)[..];
        while !left.is_empty() {
            assert_eq!(left[..8], 0x0003_e889_0455_65a9u64.to_be_bytes());
            let word = |at: usize| u32::from_be_bytes(left[at..at + 4].try_into().unwrap());
            let (option, kind, len) = (word(8), word(12), word(16) as usize);
            replies.push((option, kind, left[20..20 + len].to_vec()));
            left = &left[20 + len..];
        }
        replies
    }

    fn kinds(&mut self) -> Vec<u32> {
        self.replies().into_iter().map(|(_, kind, _)| kind).collect()
    }

    /// Chooses an export, and is past negotiation.
    fn go(&mut self, name: &str) {
        assert_eq!(self.option(GO, &go_data(name, &[3])), Event::Continue);
        assert_eq!(self.kinds().last(), Some(&ACK), "{name}");
        assert_eq!(self.session.export().unwrap().name, name);
    }

    fn request(&mut self, flags: u16, kind: u16, at: u64, len: u32) -> Event {
        self.send(&request_bytes(flags, kind, at, len))
    }

    /// The error of the simple reply.
    fn simple_error(&mut self) -> u32 {
        let out = std::mem::take(&mut self.out);
        assert_eq!(
            (out.len(), &out[..4], &out[8..16]),
            (16, &0x6744_6698u32.to_be_bytes()[..], &COOKIE.to_be_bytes()[..])
        );
        u32::from_be_bytes(out[4..8].try_into().unwrap())
    }
}

fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    [b"IHAVEOPT", &option.to_be_bytes()[..], &(data.len() as u32).to_be_bytes(), data].concat()
}

fn request_bytes(flags: u16, kind: u16, at: u64, len: u32) -> Vec<u8> {
    let halves = [&0x2560_9513u32.to_be_bytes()[..], &flags.to_be_bytes(), &kind.to_be_bytes(), &COOKIE.to_be_bytes()];
    [&halves.concat()[..], &at.to_be_bytes(), &len.to_be_bytes()].concat()
}

fn go_data(name: &str, asked: &[u16]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend((asked.len() as u16).to_be_bytes());
    data.extend(asked.iter().flat_map(|kind| kind.to_be_bytes()));
    data
}

fn meta_data(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend((queries.len() as u32).to_be_bytes());
    for query in queries {
        data.extend((query.len() as u32).to_be_bytes());
        data.extend(query.as_bytes());
    }
    data
}

const COOKIE: u64 = 0x1122_3344_5566_7788;
const EXPORT_NAME: u32 = 1;
const ABORT: u32 = 2;
const LIST: u32 = 3;
const STARTTLS: u32 = 5;
const INFO: u32 = 6;
const GO: u32 = 7;
const STRUCTURED: u32 = 8;
const LIST_META: u32 = 9;
const SET_META: u32 = 10;
const ACK: u32 = 1;
const INVALID: u32 = 0x8000_0003;
const UNSUPPORTED: u32 = 0x8000_0001;
const UNKNOWN: u32 = 0x8000_0006;
const READ: u16 = 0;
const WRITE: u16 = 1;
const DISC: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const CACHE: u16 = 5;
const ZEROES: u16 = 6;
/// The flag of zeroes that are to be fast or not at all.
const FAST_ZERO: u16 = 1 << 4;
const STATUS: u16 = 7;

/// By the protocol, clients that do not ask for the block size assume 512 bytes; larger blocks they must know by other
/// means.
#[test]
fn clients_that_do_not_ask_for_the_block_size_get_small_or_agreed_ones() {
    for (min_block, block_size_agreed, is_let_in) in
        [(512, false, true), (1024, false, false), (4096, false, false), (4096, true, true)]
    {
        let mut config = Config { block_size_agreed, ..(*config(Tls::None)).clone() };
        config.exports[1].min_block = min_block;
        let config = Arc::new(config);
        let mut client = Client::of(Arc::clone(&config));
        client.option(GO, &go_data("large", &[]));
        assert_eq!(client.kinds().last() == Some(&ACK), is_let_in, "{min_block}, {block_size_agreed}");
        // The oldest option has no answer that says why.
        let event = Client::of(config).option(EXPORT_NAME, b"large");
        assert_eq!(event == Event::Continue, is_let_in, "{min_block}, {block_size_agreed}: {event:?}");
    }
}

#[test]
fn options_are_answered_as_the_protocol_says() {
    let mut client = Client::new(Tls::None);
    client.option(LIST, &[]);
    let listed = client.replies();
    assert_eq!(listed.len(), 4);
    assert_eq!(listed[0], (LIST, 2, b"\0\0\0\x05smallthe volume small".to_vec()));
    assert_eq!(listed[3], (LIST, ACK, vec![]));
    for (option, data, expected) in [
        (LIST, vec![0], INVALID),
        (STRUCTURED, vec![0], INVALID),
        (STARTTLS, vec![], UNSUPPORTED),
        (11, vec![], UNSUPPORTED),
        (0xffff_ffff, vec![1; 100], UNSUPPORTED),
        (INFO, vec![], INVALID),
        (INFO, go_data("small", &[3])[..8].to_vec(), INVALID),
        (INFO, [go_data("small", &[3]), vec![0]].concat(), INVALID),
        (GO, vec![0xff; 6], INVALID),
        (GO, go_data("nothing", &[]), UNKNOWN),
        (GO, go_data("large", &[]), 0x8000_0008),
        (SET_META, meta_data("small", &["base:allocation"]), INVALID),
        (LIST_META, vec![0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff], INVALID),
        (LIST_META, meta_data("nothing", &[]), UNKNOWN),
    ] {
        assert_eq!(client.option(option, &data), Event::Continue);
        assert_eq!(client.kinds(), [expected], "option {option} {data:?}");
    }
    client.option(INFO, &go_data("large", &[3, 1, 2, 77]));
    let told = client.replies();
    let flags = 0b1101_0110_1101u16.to_be_bytes();
    assert_eq!(told[0], (INFO, 3, [&[0, 0][..], &MIB.to_be_bytes(), &flags].concat()));
    assert_eq!(told[1].2, [&[0, 3][..], &[0, 0, 16, 0, 0, 0, 16, 0], &MAX_PAYLOAD.to_be_bytes()].concat());
    assert_eq!((&told[2].2[2..], &told[3].2[2..]), (&b"large"[..], &b"the volume large"[..]));
    assert_eq!((told.len(), told[4].1), (5, ACK));
    assert!(client.session.export().is_none());
    assert_eq!(client.option(ABORT, &[]), Event::Goodbye);
    assert_eq!(client.kinds(), [ACK]);
    assert_eq!(client.session.feed(b"more", &mut client.out), (0, Event::Goodbye));
}

#[test]
fn too_long_options_are_skipped_or_end_the_connection() {
    let mut client = Client::new(Tls::None);
    let long = vec![7; MAX_OPTION + 1];
    assert_eq!(client.option(GO, &long), Event::Continue);
    assert_eq!(client.kinds(), [0x8000_0009]);
    client.go("small");
    let mut client = Client::new(Tls::None);
    let endless = [b"IHAVEOPT", &GO.to_be_bytes()[..], &u32::MAX.to_be_bytes()].concat();
    assert!(matches!(client.send(&endless), Event::Violation(_)));
    for wrong in
        [&b"IHAVEOPS\0\0\0\x03\0\0\0\0"[..], &option_bytes(EXPORT_NAME, b"nothing"), &option_bytes(EXPORT_NAME, &long)]
    {
        let mut client = Client::new(Tls::None);
        let mut taken = 0;
        let event = loop {
            let (n, event) = client.session.feed(&wrong[taken..], &mut client.out);
            taken += n;
            if event != Event::Continue || n == 0 {
                break event;
            }
        };
        assert!(matches!(event, Event::Violation(_)), "{event:?}");
    }
    let mut session = Session::new(config(Tls::None), &mut Vec::new());
    assert!(matches!(session.feed(&7u32.to_be_bytes(), &mut Vec::new()), (4, Event::Violation(_))));
}

#[test]
fn export_name_leads_to_requests_too() {
    let mut client = Client::new(Tls::None);
    client.option(EXPORT_NAME, b"");
    // No zeroes, as the client's flags said.
    assert_eq!(client.out, [&MIB.to_be_bytes()[..], &0b1101_0110_1101u16.to_be_bytes()].concat());
    assert_eq!(client.session.export().unwrap().name, "small");
    let mut out = Vec::new();
    let mut session = Session::new(config(Tls::None), &mut out);
    out.clear();
    session.feed(&1u32.to_be_bytes(), &mut out);
    session.feed(&option_bytes(EXPORT_NAME, b"fixed")[..16], &mut out);
    session.feed(b"fixed", &mut out);
    assert_eq!(out, [&MIB.to_be_bytes()[..], &0b101_0000_1111u16.to_be_bytes(), &[0; 124]].concat());
}

#[test]
fn required_tls_comes_first_and_resets_the_negotiation() {
    let mut client = Client::new(Tls::Required);
    for option in [LIST, STRUCTURED, 99] {
        client.option(option, &[]);
        assert_eq!(client.kinds(), [0x8000_0005]);
    }
    assert_eq!(client.option(STARTTLS, &[1]), Event::Continue);
    assert_eq!(client.kinds(), [INVALID]);
    assert_eq!(client.option(STARTTLS, &[]), Event::StartTls);
    assert_eq!(client.kinds(), [ACK]);
    client.session.tls_started();
    client.go("small");
    assert!(matches!(Client::new(Tls::Required).option(EXPORT_NAME, b"small"), Event::Violation(_)));

    let mut client = Client::new(Tls::Offered);
    client.option(STRUCTURED, &[]);
    client.option(SET_META, &meta_data("small", &["base:allocation"]));
    client.option(STARTTLS, &[]);
    client.session.tls_started();
    client.out.clear();
    assert_eq!(client.option(STARTTLS, &[]), Event::Continue);
    assert_eq!(client.kinds(), [INVALID]);
    client.go("small");
    client.request(0, STATUS, 0, 512);
    assert_eq!(client.simple_error(), Fault::Invalid as u32);

    // Unencrypted bytes after STARTTLS are not taken for encrypted ones.
    let mut client = Client::new(Tls::Offered);
    let smuggled = [option_bytes(STARTTLS, &[]), option_bytes(LIST, &[])].concat();
    let (taken, event) = client.session.feed(&smuggled, &mut client.out);
    assert_eq!((taken, event), (16, Event::StartTls));
    assert!(matches!(client.session.feed(&smuggled[16..], &mut client.out), (0, Event::Violation(_))));
}

#[test]
fn contexts_count_only_for_the_export_they_were_chosen_for() {
    let choose = |contexts_of: &str, queries: &[&str], export: &str| {
        let mut client = Client::new(Tls::None);
        client.option(STRUCTURED, &[]);
        client.option(SET_META, &meta_data(contexts_of, queries));
        client.out.clear();
        client.go(export);
        client.request(0, STATUS, 0, 4096)
    };
    assert!(matches!(choose("small", &["x:y", "base:allocation"], "small"), Event::Request(_)));
    assert_eq!(choose("small", &["base:allocation"], "fixed"), Event::Continue);
    assert_eq!(choose("small", &["base:"], "small"), Event::Continue);
    let mut client = Client::new(Tls::None);
    for queries in [&[][..], &["base:"], &["base:allocation", "other:"]] {
        client.option(LIST_META, &meta_data("", queries));
        assert_eq!(client.replies()[0], (LIST_META, 4, b"\0\0\0\0base:allocation".to_vec()));
    }
}

#[test]
fn invalid_requests_get_the_protocols_errors() {
    const PERM: u32 = 1;
    const INVAL: u32 = 22;
    const NOSPC: u32 = 28;
    const NOTSUP: u32 = 95;
    let cases = [
        ("small", 0, READ, MIB, 1, INVAL),
        ("small", 0, READ, MIB - 1, 2, INVAL),
        ("small", 0, READ, u64::MAX, 2, INVAL),
        ("small", 0, READ, 0, 0, INVAL),
        ("small", 0, READ, 0, MAX_PAYLOAD + 1, INVAL),
        ("small", 0, READ, 0, u32::MAX, INVAL),
        ("small", 1 << 1, READ, 0, 1, INVAL),
        ("small", 1 << 15, READ, 0, 1, INVAL),
        ("small", 0, ZEROES, MIB - 1, 2, NOSPC),
        ("small", 1 << 5, ZEROES, 0, 1, INVAL),
        ("small", FAST_ZERO, ZEROES, 0, 1, NOTSUP),
        ("small", FAST_ZERO | 3, ZEROES, 0, MIB as u32, NOTSUP),
        ("small", FAST_ZERO, ZEROES, MIB - 1, 2, NOSPC),
        ("small", FAST_ZERO, READ, 0, 1, INVAL),
        ("small", FAST_ZERO, TRIM, 0, 1, INVAL),
        ("large", FAST_ZERO, ZEROES, 0, 512, INVAL),
        ("fixed", FAST_ZERO, ZEROES, 0, 1, PERM),
        ("small", 0, CACHE, MIB - 1, 2, INVAL),
        ("small", 0, CACHE, u64::MAX, 2, INVAL),
        ("small", 0, CACHE, 0, 0, INVAL),
        ("small", 1 << 1, CACHE, 0, 1, INVAL),
        ("large", 0, CACHE, 0, 512, INVAL),
        ("small", 0, TRIM, MIB, 1, INVAL),
        ("small", 0, FLUSH, 1, 0, INVAL),
        ("small", 0, FLUSH, 0, 1, INVAL),
        ("small", 0, STATUS, 0, 1, INVAL),
        ("small", 0, 8, 0, 1, INVAL),
        ("small", 0, 99, 0, 0, INVAL),
        ("large", 0, READ, 1, 4096, INVAL),
        ("large", 0, READ, 0, 4095, INVAL),
        ("fixed", 0, ZEROES, 0, 1, PERM),
        ("fixed", 0, TRIM, 0, 1, PERM),
    ];
    for (export, flags, kind, at, len, expected) in cases {
        let mut client = Client::new(Tls::None);
        client.go(export);
        assert_eq!(client.request(flags, kind, at, len), Event::Continue);
        assert_eq!(client.simple_error(), expected, "{export} {flags} {kind} {at} {len}");
        // The connection goes on.
        assert!(matches!(client.request(0, READ, 4096, 4096), Event::Request(_)));
    }
}

#[test]
fn cache_requests_are_checked_like_reads_and_allowed_on_a_read_only_export() {
    for export in ["small", "fixed"] {
        let mut client = Client::new(Tls::None);
        client.go(export);
        let expected = Request { command: Command::Cache, cookie: COOKIE, at: 0, len: MIB as u32, fua: false };
        assert_eq!(client.request(0, CACHE, 0, MIB as u32), Event::Request(expected));
    }
}

#[test]
fn payloads_of_refused_writes_are_skipped() {
    const PERM: u32 = 1;
    const INVAL: u32 = 22;
    const NOSPC: u32 = 28;
    // The payload of a refused write is skipped, whatever is in it, and then the write is answered.
    for (export, flags, at, len, expected) in [
        ("small", 0, MIB, 70, NOSPC),
        ("small", 1 << 9, 0, 70, INVAL),
        ("large", 0, 5, 70, INVAL),
        ("fixed", 0, 0, 70, PERM),
        ("small", 0, 0, 0, INVAL),
    ] {
        let mut client = Client::new(Tls::None);
        client.go(export);
        client.request(flags, WRITE, at, len);
        let payload = &request_bytes(0, DISC, 0, 0).repeat(3)[..len as usize];
        if let Some((last, most)) = payload.split_last() {
            client.send(most);
            assert!(client.out.is_empty(), "{export} {flags} {at} {len}: it is answered before its payload has come");
            client.send(&[*last]);
        }
        assert_eq!(client.simple_error(), expected);
        let next = client.request(1, READ, 4096, 4096);
        let expected = Request { command: Command::Read, cookie: COOKIE, at: 4096, len: 4096, fua: true };
        assert_eq!(next, Event::Request(expected));
    }
    // However long the payload is.
    let mut client = Client::new(Tls::None);
    client.go("small");
    client.request(0, WRITE, 0, u32::MAX);
    let chunk = vec![7; 1 << 20];
    for at in (0..u64::from(u32::MAX)).step_by(chunk.len()) {
        assert!(client.out.is_empty() && client.session.owes_bytes(), "after {at} bytes");
        client.send(&chunk[..chunk.len().min((u64::from(u32::MAX) - at) as usize)]);
    }
    assert_eq!(client.simple_error(), INVAL);
    assert!(!client.session.owes_bytes());
    let mut client = Client::new(Tls::None);
    client.go("small");
    assert!(matches!(client.send(&[0; 28]), Event::Violation(_)));
    let mut client = Client::new(Tls::None);
    client.go("small");
    assert_eq!(client.request(0, DISC, 0, 0), Event::Goodbye);
}

#[test]
fn half_a_message_is_stored_and_counts_as_owed() {
    let mut client = Client::new(Tls::None);
    assert!(client.session.owes_bytes());
    client.go("small");
    assert!(!client.session.owes_bytes());
    let whole = request_bytes(0, READ, 0, 1);
    assert_eq!(client.send(&whole[..13]), Event::Continue);
    assert!(client.session.owes_bytes());
    assert!(matches!(client.send(&whole[13..]), Event::Request(_)));
    assert!(!client.session.owes_bytes());
}

#[test]
fn simple_and_structured_replies_have_the_protocols_bytes() {
    let mut client = Client::new(Tls::None);
    client.option(STRUCTURED, &[]);
    let structured = client.session.replies();
    let simple = Client::new(Tls::None).session.replies();
    let request =
        Request { command: Command::BlockStatus { one: false }, cookie: COOKIE, at: 512, len: 1024, fua: false };
    let said = |say: &dyn Fn(&mut Vec<u8>)| {
        let mut out = Vec::new();
        say(&mut out);
        out.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    assert_eq!(said(&|out| simple.done(COOKIE, out)), "67446698000000001122334455667788");
    assert_eq!(said(&|out| simple.error(COOKIE, Fault::Io, out)), "67446698000000051122334455667788");
    assert_eq!(said(&|out| simple.before_data(&request, out)), "67446698000000001122334455667788");
    assert_eq!(said(&|out| structured.done(COOKIE, out)), "668e33ef00010000112233445566778800000000");
    assert_eq!(
        said(&|out| structured.error(COOKIE, Fault::NoSpace, out)),
        "668e33ef0001800111223344556677880000000600".to_owned() + "00001c0000"
    );
    assert_eq!(
        said(&|out| structured.before_data(&request, out)),
        "668e33ef000100011122334455667788000004080000000000000200"
    );
    let extents = [
        Extent { len: 0, is_hole: true, is_zero: true },
        Extent { len: 512, is_hole: true, is_zero: false },
        Extent { len: 4096, is_hole: false, is_zero: true },
        Extent { len: 1, is_hole: false, is_zero: false },
    ];
    let head = |len: &str| format!("668e33ef000100051122334455667788{len}00000001");
    assert_eq!(
        said(&|out| structured.block_status(&request, &extents, out)),
        head("00000014") + "0000020000000001" + "0000020000000002"
    );
    let one = Request { command: Command::BlockStatus { one: true }, ..request };
    assert_eq!(said(&|out| structured.block_status(&one, &extents, out)), head("0000000c") + "0000020000000001");
    assert_eq!(
        said(&|out| structured.block_status(&one, &[], out)),
        "668e33ef000180011122334455667788000000060000".to_owned() + "00050000"
    );
}

/// A message: mostly a meaningful one, sometimes random bytes.
fn message() -> impl Strategy<Value = Vec<u8>> {
    let name = prop::sample::select(vec!["small", "large", "fixed", "", "nothing"]);
    let edge = prop::sample::select(vec![0u64, 1, 511, 512, 4096, MIB - 1, MIB, MIB + 1, u64::MAX, u64::MAX - 4095]);
    let len = prop::sample::select(vec![0u32, 1, 512, 4096, 1 << 20, MAX_PAYLOAD, MAX_PAYLOAD + 1, u32::MAX]);
    prop_oneof![
        (0u32..13, prop::collection::vec(any::<u8>(), 0..40)).prop_map(|(option, data)| option_bytes(option, &data)),
        (6u32..8, name.clone(), prop::collection::vec(0u16..5, 0..4))
            .prop_map(|(o, name, asked)| option_bytes(o, &go_data(name, &asked))),
        (9u32..11, name).prop_map(|(o, name)| option_bytes(o, &meta_data(name, &["base:allocation"]))),
        (any::<u32>(), any::<u32>()).prop_map(|(option, len)| [
            b"IHAVEOPT",
            &option.to_be_bytes()[..],
            &len.to_be_bytes()
        ]
        .concat()),
        (0u16..17, 0u16..9, edge, len).prop_map(|(flags, kind, at, len)| request_bytes(flags, kind, at, len)),
        prop::collection::vec(any::<u8>(), 0..60),
    ]
}

/// All events except `Continue`, and all answers, with `cut` bytes fed at once.
fn run(bytes: &[u8], cut: usize) -> (Vec<Event>, Vec<u8>) {
    let mut out = Vec::new();
    let mut session = Session::new(config(Tls::Offered), &mut out);
    let (mut events, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let (taken, event) = session.feed(&bytes[at..bytes.len().min(at + cut)], &mut out);
        at += taken;
        match &event {
            Event::Continue => {
                assert!(taken > 0, "it neither takes nor says anything");
                continue;
            }
            Event::Request(request) => {
                let export = session.export().unwrap();
                let end = request.at.checked_add(u64::from(request.len)).unwrap();
                assert!(end <= export.size && request.at.is_multiple_of(u64::from(export.min_block)));
                assert!(request.len.is_multiple_of(export.min_block), "{request:?}");
                let has_payload = matches!(request.command, Command::Read | Command::Write);
                assert!(!has_payload || request.len <= MAX_PAYLOAD);
                if request.command == Command::Write {
                    at += request.len as usize; // The data path reads it.
                }
                session.replies().done(request.cookie, &mut out);
            }
            Event::StartTls => session.tls_started(),
            Event::Goodbye | Event::Violation(_) => {
                events.push(event);
                break;
            }
        }
        events.push(event);
    }
    (events, out)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn cutting_the_input_does_not_change_events_and_answers(messages in prop::collection::vec(message(), 0..20), cut in 1usize..40) {
        let bytes = [3u32.to_be_bytes().to_vec(), messages.concat()].concat();
        prop_assert_eq!(run(&bytes, usize::MAX / 2), run(&bytes, cut));
    }
}
