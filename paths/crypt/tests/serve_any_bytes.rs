//! A live server and clients that send anything: random bytes, and valid messages with wrong fields, before, during and
//! after negotiation, by TLS or without. Afterwards an honest client is served and no page is missing.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;

use crate::common::certificates::{self, Certificates};
use crate::common::served::*;
use crate::common::*;
use pagemill_crypt::serve::Way;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

const LEN: u64 = 4 * MIB;
const PROMISED: usize = 256;

/// A message of a client.
#[derive(Clone, Debug)]
enum Word {
    Noise(Vec<u8>),
    Flags(u32),
    /// With the length that it claims, and the data that it has.
    Option {
        number: u32,
        claimed: u32,
        data: Vec<u8>,
    },
    Request {
        flags: u16,
        command: u16,
        at: u64,
        len: u32,
        payload: usize,
    },
}

impl Word {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Noise(bytes) => bytes.clone(),
            Self::Flags(flags) => flags.to_be_bytes().to_vec(),
            Self::Option { number, claimed, data } => {
                [&b"IHAVEOPT"[..], &number.to_be_bytes(), &claimed.to_be_bytes(), data].concat()
            }
            Self::Request { flags, command, at, len, payload } => {
                let magic = 0x2560_9513u32.to_be_bytes();
                let numbers = [&magic[..], &flags.to_be_bytes(), &command.to_be_bytes(), &[5; 8], &at.to_be_bytes()];
                [&numbers.concat()[..], &len.to_be_bytes(), &vec![3; *payload]].concat()
            }
        }
    }
}

fn word() -> impl Strategy<Value = Word> {
    let bytes = |most: usize| prop::collection::vec(any::<u8>(), 0..most);
    let len = || prop_oneof![Just(0u32), Just(512), Just(1 << 20), Just(u32::MAX), 0..3u32 << 20, any::<u32>()];
    let option = (0..12u32, prop_oneof![Just(0u32), 0..64u32, any::<u32>()], bytes(64));
    let at = prop_oneof![(0..LEN / 512).prop_map(|sector| sector * 512), Just(LEN - 512), any::<u64>()];
    let request = (prop_oneof![Just(0u16), any::<u16>()], 0..9u16, at, len(), any::<bool>(), 0..70_000usize);
    prop_oneof![
        1 => bytes(300).prop_map(Word::Noise),
        1 => prop_oneof![Just(3u32), any::<u32>()].prop_map(Word::Flags),
        2 => option.prop_map(|(number, claimed, data)| Word::Option { number, claimed, data }),
        6 => request.prop_map(|(flags, command, at, len, is_whole, some)| {
            let payload = if is_whole && len <= 3 << 20 && command == command::WRITE { len as usize } else { some };
            Word::Request { flags, command, at, len, payload }
        }),
    ]
}

/// How far a client follows the protocol before it sends anything.
#[derive(Clone, Copy, Debug)]
enum Book {
    Nothing,
    Greeted,
    Negotiated,
    /// TLS was agreed on, but its bytes are not TLS.
    TlsAgreed,
    /// Everything by TLS.
    Encrypted,
}

fn book(is_tls: bool) -> impl Strategy<Value = Book> {
    match is_tls {
        false => prop_oneof![1 => Just(Book::Nothing), 1 => Just(Book::Greeted), 4 => Just(Book::Negotiated)].boxed(),
        true => prop_oneof![Just(Book::Greeted), Just(Book::TlsAgreed), Just(Book::Encrypted)].boxed(),
    }
}

/// Sends the messages, and reads until the other side closes; with `vanishes` it reads nothing.
fn client(served: &Served, certificates: &Certificates, book: Book, words: &[Word], vanishes: bool) {
    let said: Vec<u8> = words.iter().flat_map(Word::bytes).collect();
    let plain = match book {
        Book::Nothing => UnixStream::connect(&served.socket).unwrap(),
        Book::Greeted => certificates::greeted(&served.socket),
        Book::Negotiated => Client::connect(served).0,
        Book::TlsAgreed => certificates::agreed(&served.socket),
        Book::Encrypted => {
            let mut client = Client::go(certificates.connect(certificates::agreed(&served.socket)));
            // It may be disconnected in the middle. It does not read, so it sends no more than the socket takes.
            let _ = client.0.write_all(&said[..said.len().min(100_000)]);
            return;
        }
    };
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            // It may be disconnected in the middle.
            let _ = (&plain).write_all(&said);
            let _ = plain.shutdown(Shutdown::Write);
        });
        if !vanishes {
            // Reset counts as an end.
            let _ = (&plain).read_to_end(&mut Vec::new());
        }
        let _ = plain.shutdown(Shutdown::Both);
        writer.join().unwrap();
    });
}

fn try_all(way: Way, is_tls: bool) {
    let bench = Bench::with(&[]).unwrap();
    let certificates = Certificates::new();
    bench.file("image", LEN);
    let (image, volume) = (bench.open("image"), plain_volume(LEN, 512));
    let setup = Setup { way, pages: PROMISED + 700, promised: PROMISED, ..Setup::new() };
    let served = match is_tls {
        true => Some(Served::start_tls(&bench, image, volume, setup, certificates.for_server(false))),
        false => Served::start(&bench, image, volume, setup),
    };
    let Some(served) = served else { return };
    let clients = prop::collection::vec((book(is_tls), prop::collection::vec(word(), 0..8), any::<bool>()), 1..4);
    let mut runner = TestRunner::new(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) });
    let tried = runner.run(&clients, |clients| {
        thread::scope(|scope| {
            for (book, words, vanishes) in &clients {
                scope.spawn(|| client(&served, &certificates, *book, words, *vanishes));
            }
        });
        served.wait_for_connections(0);
        let stats = || served.allocator.stats();
        until("the last page", || stats().allocated - stats().freed == PROMISED as u64);
        prop_assert_eq!(served.server.path().memory.pool().stats().out, 0);
        prop_assert_eq!(served.allocator.validate().unwrap().handed_out, PROMISED);
        let noise = pattern(5000 / 512 * 512);
        if is_tls {
            let mut good = Client::go(certificates.connect(certificates::agreed(&served.socket)));
            good.write(1024, &noise, 0).unwrap();
            prop_assert!(good.read(1024, noise.len()).unwrap() == noise);
        } else {
            let mut good = Client::connect(&served);
            good.write(1024, &noise, 0).unwrap();
            prop_assert!(good.read(1024, noise.len()).unwrap() == noise);
        }
        Ok(())
    });
    tried.unwrap_or_else(|error| panic!("{way:?}: {error}"));
    served.stop();
}

#[test]
fn any_bytes_leave_a_plain_server_working() {
    try_all(Way::Plain, false);
    try_all(Way::Uring, false);
}

#[test]
fn any_bytes_leave_a_tls_server_working() {
    try_all(Way::Plain, true);
}
