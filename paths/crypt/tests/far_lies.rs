//! Far ends that break the protocol, or are not what they were: requests fail, and everything else goes on.

use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use crate::common::far_end::*;
use crate::common::served::*;
use crate::common::*;
use pagemill_crypt::serve::{Far, FarOptions};

const LEN: u64 = MIB;
const EIO: u32 = 5;

const OPTIONS: FarOptions = FarOptions { reconnect: Duration::ZERO, may_write: true, say: |_| {} };

#[test]
fn a_far_end_that_lies_as_it_agrees_is_refused() {
    let bench = Bench::with(&[]).unwrap();
    let end = FarEnd::start(&bench.path("far"), LEN);
    for (lie, why) in [
        (Lie::Greeting, "does not greet"),
        (Lie::LongOption, "4294967295 bytes"),
        (Lie::OtherOption, "was not asked"),
        (Lie::EndlessOption, "does not stop"),
        (Lie::Blocks, "blocks of 3, 5 and 7"),
        (Lie::NoSize, "nothing of its export"),
    ] {
        end.with(|state| state.lie = Some(lie));
        let refused = Far::connect(&end.uri(), OPTIONS).unwrap_err().to_string();
        assert!(refused.contains(why), "{lie:?}: {refused}");
    }
    end.with(|state| state.lie = None);
    for (size, flags, why) in [
        (0, HAS_FLAGS | SEND_FLUSH, "0 bytes"),
        (u64::MAX, HAS_FLAGS | SEND_FLUSH, "bytes"),
        (LEN, HAS_FLAGS | READ_ONLY, "--read-only"),
        (LEN, HAS_FLAGS, "--read-only"),
        (LEN, SEND_FLUSH, "--read-only"),
    ] {
        end.with(|state| (state.size, state.flags) = (Some(size), flags));
        let refused = Far::connect(&end.uri(), OPTIONS).unwrap_err().to_string();
        assert!(refused.contains(why), "{size}, {flags}: {refused}");
    }
    // It may be read.
    Far::connect(&end.uri(), FarOptions { may_write: false, ..OPTIONS }).unwrap();
    end.kill();
    let absent = Far::connect(&end.uri(), OPTIONS).unwrap_err();
    assert!(absent.next_step().is_some(), "{absent}");
}

#[test]
fn a_far_end_that_lies_in_replies_fails_requests_and_harms_nothing() {
    let bench = Bench::with(&[]).unwrap();
    for lie in [Lie::ReplyMagic, Lie::Unknown, Lie::Twice, Lie::CutOff, Lie::Silence, Lie::Chunk] {
        let end = FarEnd::start(&bench.path("far"), LEN);
        let served = Served::start(&bench, end.connect(Duration::ZERO), plain_volume(LEN, 512), Setup::new()).unwrap();
        let mut client = Client::connect(&served);
        let bytes = pattern(64 << 10);
        client.write(0, &bytes, 0).unwrap();
        end.with(|state| state.lie = Some(lie));
        // The first of two replies is a good one; the second ends the connection.
        let has_one = lie == Lie::Twice;
        for _ in 0..5 {
            let read = client.read(0, bytes.len());
            assert!(read == Err(EIO) || (has_one && read.as_ref() == Ok(&bytes)), "{lie:?}");
            let written = client.write(512 << 10, &bytes, 0);
            // The half of nothing is all of a write's reply.
            assert!(written == Err(EIO) || ((has_one || lie == Lie::CutOff) && written == Ok(())), "{lie:?}");
        }
        end.with(|state| state.lie = None);
        until("the far end", || client.read(0, 512).is_ok());
        assert!(client.read(0, bytes.len()).unwrap() == bytes, "{lie:?}");
        client.write(0, &bytes, 0).unwrap();
        client.ask(command::FLUSH, 0, 0, 0).unwrap();
        drop(client);
        served.stop();
    }
}

/// Another disk at the same address, or less of it, is not written to.
#[test]
fn a_far_end_that_is_less_than_before_is_not_used() {
    let bench = Bench::with(&[]).unwrap();
    let all = HAS_FLAGS | SEND_FLUSH | SEND_FUA | SEND_TRIM | MULTI_CONN;
    let end = FarEnd::start(&bench.path("far"), LEN);
    let served = Served::start(&bench, end.connect(Duration::ZERO), plain_volume(LEN, 512), Setup::new()).unwrap();
    let mut client = Client::connect(&served);
    client.write(0, &[1; 4096], 0).unwrap();
    for (size, flags, blocks) in [
        (LEN - 512, all, None),
        (LEN, all | READ_ONLY, None),
        (LEN, all & !SEND_FLUSH, None),
        (LEN, all & !MULTI_CONN, None),
        (LEN, all, Some([4096, 4096, 1 << 20])),
    ] {
        end.kill();
        end.with(|state| {
            (state.size, state.flags, state.blocks) = (Some(size), flags, blocks);
            (state.asked, state.connections) = (Vec::new(), 0);
        });
        end.restart();
        until("an attempt", || end.with(|state| state.connections > 1));
        assert_eq!(client.read(0, 512), Err(EIO));
        assert!(end.with(|state| state.asked.is_empty()), "{size}, {flags}: it was asked");
    }
    end.with(|state| (state.size, state.flags, state.blocks) = (Some(LEN + 512), all, None));
    until("the far end", || client.read(0, 512).is_ok());
    assert_eq!(client.read(0, 4096).unwrap(), [1; 4096]);
    drop(client);
    served.stop();
}

/// A balancer that leads each connection to another disk: only the first connection is used.
#[test]
fn connections_to_less_than_the_first_are_not_used() {
    let bench = Bench::with(&[]).unwrap();
    let end = FarEnd::start(&bench.path("far"), LEN);
    end.with(|state| state.size_of_others = Some(LEN - 512));
    let served = Served::start(&bench, end.connect(PATIENCE), plain_volume(LEN, 512), Setup::new()).unwrap();
    assert!(served.server.ways()[0].contains("1 connections"), "{:?}", served.server.ways());
    served.stop();
}

/// One that never answers, on connections that have as many requests as they may, ends them all when it loses one.
#[test]
fn connections_full_of_unanswered_requests_end_when_one_is_lost() {
    const CLIENTS: usize = 3;
    const READS: u64 = 100;
    /// The links, and what is under way on each.
    const FULL: usize = 4 * 64;
    let bench = Bench::with(&[]).unwrap();
    let end = FarEnd::start(&bench.path("far"), LEN);
    end.with(|state| state.hold_until = usize::MAX);
    let served = Served::start(&bench, end.connect(PATIENCE), plain_volume(LEN, 512), Setup::new()).unwrap();
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| Client::connect(&served)).collect();
    for client in &mut clients {
        (0..READS).for_each(|cookie| client.send(command::READ, 0, cookie, cookie * 512, 512));
    }
    until("all that may be under way", || end.with(|state| state.asked.len() == FULL));
    end.with(|state| state.hold_until = 0);
    end.end_one();
    for client in &mut clients {
        for _ in 0..READS {
            assert_eq!(client.reply().0, 0);
            std::io::Read::read_exact(&mut client.0, &mut [0; 512]).unwrap();
        }
    }
    drop(clients);
    served.stop();
}

/// A stopped process: its socket is there, and the system takes no more connections for it.
#[test]
fn a_far_end_that_accepts_nobody_is_away() {
    let bench = Bench::with(&[]).unwrap();
    let end = FarEnd::start(&bench.path("far"), LEN);
    let reconnect = Duration::from_secs(1);
    let served = Served::start(&bench, end.connect(reconnect), plain_volume(LEN, 512), Setup::new()).unwrap();
    let mut client = Client::connect(&served);
    client.write(0, &[1; 512], 0).unwrap();
    end.kill();
    let stopped = UnixListener::bind(bench.path("far")).unwrap();
    rustix::net::listen(&stopped, 0).unwrap();
    let _first = UnixStream::connect(bench.path("far")).unwrap();
    assert_eq!(client.read(0, 512), Err(EIO));
    drop(stopped);
    end.restart();
    until("the far end", || client.read(0, 512).is_ok());
    assert_eq!(client.read(0, 512).unwrap(), [1; 512]);
    drop(client);
    served.stop();
}
