//! Far ends whose every byte a fuzzer chooses, and what must hold whatever they say.
//!
//! The bytes are all there before the client's side reads the first one, and then the connection ends. So one thread
//! plays both sides, and an input does the same each time. A second reader of the replies ([`heard`]) says what each
//! request was told, and that is what its job must have been told.
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use super::super::uri::FarUri;
use super::super::{FarOptions, Job, Shared, Work};
use super::{Link, REPLY};
use crate::nbd::client::{self, Agreed};
use crate::serve::buffer::{Buffer, Origin};
use crate::serve::socket::Socket;

/// The choices that are left; 0 when there are none.
struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    fn next(&mut self) -> usize {
        let (byte, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        usize::from(*byte)
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.next() % all.len()]
    }

    /// As many as the next one says.
    fn bytes(&mut self) -> &'a [u8] {
        let count = self.next().min(self.0.len());
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }
}

/// A far end that has said all that it will say.
struct Said<'a>(&'a [u8]);

impl Read for Said<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for Said<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Agrees on an export with what the fuzzer says. Returns the bytes that follow, too.
fn agree(choices: &mut Choices<'_>) -> Option<(Agreed, Vec<u8>)> {
    let answer = |kind: u32, data: &[u8]| {
        let head = [&0x0003_e889_0455_65a9u64.to_be_bytes()[..], &7u32.to_be_bytes(), &kind.to_be_bytes()].concat();
        [&head, &(data.len() as u32).to_be_bytes()[..], data].concat()
    };
    let mut said = b"NBDMAGICIHAVEOPT\0\x03".to_vec();
    let how = choices.next();
    if how & 1 == 0 {
        let (size, min) =
            (choices.of(&[1 << 20, 512, 77, 1 << 16, i64::MAX as u64]), choices.of(&[512, 1, 4096, 1 << 16]));
        let max = choices.of(&[1 << 20, min, 4 * min, u32::MAX]);
        let flags = 1 | (choices.next() as u16) << 1;
        said.extend(answer(3, &[&[0, 0][..], &size.to_be_bytes(), &flags.to_be_bytes()].concat()));
        said.extend(answer(3, &[&[0, 3][..], &[min, min, max].map(u32::to_be_bytes).concat()].concat()));
    }
    match how >> 1 & 3 {
        0 => said.extend(answer(1, &[])),
        1 => said.extend(answer(choices.next() as u32, choices.bytes())),
        2 => said.extend(choices.bytes()),
        _ => said = choices.bytes().to_vec(),
    }
    let mut said = Said(&said);
    client::greet(&mut said, how & 8 != 0).ok()?;
    let agreed = client::go(&mut said, "export").ok()?;
    assert!(agreed.size > 0 && agreed.min_block.is_power_of_two() && agreed.max_block >= agreed.min_block);
    assert!(agreed.max_block.is_multiple_of(agreed.min_block) && agreed.max_block <= crate::nbd::MAX_PAYLOAD);
    assert!(agreed.shortfall(&agreed).is_none());
    Some((agreed, said.0.to_vec()))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Trim,
    Flush,
}

/// A job that was given to the far end. No two have both kind and place in common, but flushes.
struct Given {
    kind: Kind,
    at: u64,
    len: usize,
    /// Whether it was told that it is done, and in which connection's time.
    told: Option<(io::Result<Vec<u8>>, usize)>,
}

/// A request as it was sent.
#[derive(Clone, Copy, Debug)]
struct Sent {
    kind: Kind,
    /// Its job, and its first byte there.
    job: usize,
    from: usize,
    len: usize,
}

/// What a request was told: bytes, or an error number.
type Heard = Result<Vec<u8>, u32>;

/// Reads the replies to `sent`, up to the first one that makes no sense.
fn heard(mut bytes: &[u8], sent: &[Sent]) -> HashMap<usize, Heard> {
    let mut heard = HashMap::new();
    while let Some((reply, rest)) = bytes.split_first_chunk::<REPLY>() {
        bytes = rest;
        let [magic, error] =
            [0, 4].map(|at| u32::from_be_bytes([reply[at], reply[at + 1], reply[at + 2], reply[at + 3]]));
        let cookie = u64::from_be_bytes([8, 9, 10, 11, 12, 13, 14, 15].map(|at| reply[at]));
        let number = usize::try_from(cookie).unwrap_or(usize::MAX);
        let Some(request) = sent.get(number).filter(|_| magic == 0x6744_6698 && error != 108) else { break };
        if heard.contains_key(&number) {
            break;
        }
        let data = if error == 0 && request.kind == Kind::Read { request.len } else { 0 };
        let Some((data, rest)) = bytes.split_at_checked(data) else { break };
        bytes = rest;
        heard.insert(number, if error == 0 { Ok(data.to_vec()) } else { Err(error) });
    }
    heard
}

/// What a job writes: not what any other writes there.
fn written(job: usize, len: usize) -> Vec<u8> {
    (0..len).map(|byte| (job * 31 + byte) as u8).collect()
}

struct Game {
    shared: Shared,
    given: Arc<Mutex<Vec<Given>>>,
    /// The number of the connection.
    life: Arc<Mutex<usize>>,
    /// Nothing waits for anything else, so all requests are sent before the first reply is read.
    is_simple: bool,
}

impl Game {
    fn new(agreed: Agreed) -> Option<Self> {
        let can_last = agreed.can_flush || agreed.can_fua;
        let options = FarOptions { reconnect: Duration::MAX, may_write: can_last && !agreed.is_read_only, say: |_| {} };
        let uri = FarUri::new("nbd+unix:///?socket=none").ok()?;
        let shared = Shared::new(uri, agreed, options);
        Some(Self { shared, given: Arc::default(), life: Arc::default(), is_simple: true })
    }

    /// One more job, if it has a place.
    fn give(&mut self, choices: &mut Choices<'_>) {
        let agreed = self.shared.agreed;
        let block = u64::from(agreed.min_block);
        let how = choices.next();
        let kind = match how & 7 {
            0..3 => Kind::Read,
            3..6 if self.shared.options.may_write => Kind::Write,
            6 if self.shared.options.may_write && agreed.can_trim => Kind::Trim,
            7 => Kind::Flush,
            _ => Kind::Read,
        };
        let number = self.given.lock().unwrap().len();
        // Each begins at a block of its own.
        let apart = if how & 0x80 == 0 { 16 } else { 1 };
        let mut at = 16 * block * number as u64;
        if apart == 1 {
            // They may overlap now.
            (at, self.is_simple) = (block * number as u64, false);
        }
        // All requests fit into the socket at once.
        let blocks = if block > 512 { 1 } else { 1 + (how as u64 >> 3 & 15) };
        if block > 4096 && number > 1 {
            return;
        }
        let mut len = (blocks * block) as usize;
        match kind {
            Kind::Flush => {
                (at, len) = (0, 0);
                self.is_simple &= !self.given.lock().unwrap().iter().any(|job| job.kind == Kind::Flush);
            }
            _ if at + len as u64 > agreed.size => return,
            _ => {}
        }
        if self.given.lock().unwrap().iter().any(|other| other.kind == kind && other.at == at && kind != Kind::Flush) {
            return;
        }
        self.given.lock().unwrap().push(Given { kind, at, len, told: None });
        let (work, buffer) = match kind {
            Kind::Read => (Work::Read, Buffer::of_heap(len, Origin::Free).unwrap()),
            Kind::Write => (Work::Write(Arc::new(written(number, len))), Buffer::none()),
            Kind::Trim => (Work::Trim(len as u64), Buffer::none()),
            Kind::Flush => (Work::Flush, Buffer::none()),
        };
        let (given, life) = (Arc::clone(&self.given), Arc::clone(&self.life));
        let home = move |buffer: Buffer, result: io::Result<()>| {
            let result = result.map(|()| buffer.slices().flatten().copied().collect());
            let told = given.lock().unwrap()[number].told.replace((result, *life.lock().unwrap()));
            assert!(told.is_none(), "job {number} is told twice");
        };
        self.shared.submit(Job::new(work, at, buffer, Some(Box::new(home))));
    }

    /// The lengths that replies to the requests of the next connection probably have.
    fn lengths(&self) -> Vec<usize> {
        let (state, most) = (self.shared.state(), self.shared.agreed.max_block as usize);
        let mut lengths = Vec::new();
        if state.kept.count() > 0 {
            lengths.resize(state.kept.count(), 0);
        }
        for job in &state.queue {
            match &job.work {
                Work::Read => {
                    lengths.extend((0..job.buffer.len()).step_by(most).map(|from| most.min(job.buffer.len() - from)))
                }
                Work::Write(bytes) => lengths.extend((0..bytes.len()).step_by(most).map(|_| 0)),
                _ => lengths.push(0),
            }
        }
        lengths
    }

    /// What the far end says to them.
    fn replies(&self, choices: &mut Choices<'_>) -> Vec<u8> {
        let lengths = self.lengths();
        let mut out = Vec::new();
        let head = |magic: u32, error: u32, cookie: u64| {
            [&magic.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes()].concat()
        };
        const SIMPLE: u32 = 0x6744_6698;
        for turn in 0..64 {
            let how = choices.next();
            let cookie = if how & 8 == 0 { turn } else { choices.next() % (lengths.len() + 1) };
            let len = lengths.get(cookie).copied().unwrap_or(0);
            let fill = |len: usize| (0..len).map(move |byte| (cookie * 57 + turn * 3 + byte) as u8 | 0x80);
            match how >> 4 {
                0 => break,
                1..10 => {
                    out.extend(head(SIMPLE, 0, cookie as u64));
                    out.extend(fill(len));
                }
                10 | 11 => out.extend(head(SIMPLE, choices.of(&[5, 28, 1, 12, 22, 95, 108, u32::MAX]), cookie as u64)),
                12 => {
                    out.extend(head(SIMPLE, 0, cookie as u64));
                    out.extend(fill((len + choices.next()).saturating_sub(128)));
                }
                13 => out.extend(choices.bytes()),
                14 => out.extend(head(choices.of(&[0x668e_33ef, 0, 0x6744_6699]), 0, cookie as u64)),
                _ => out.extend(head(SIMPLE, 0, choices.of(&[u64::MAX, 1 << 32, 1 << 63, 64]))),
            }
        }
        out
    }

    /// One connection, from its first reply to its end.
    fn live(&self, mut said: Vec<u8>, stage: usize) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let taken = theirs.write(&said).unwrap_or(0);
        said.truncate(taken);
        theirs.shutdown(Shutdown::Write).unwrap();
        let life = {
            let mut life = self.life.lock().unwrap();
            *life += 1;
            *life
        };
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        let mut link = Link::new(Socket::unix(ours).unwrap(), 0, wake);
        link.stage.truncate(stage);
        let (kept, had_lost) = (self.kept(), self.shared.state().kept.has_lost());
        let was_open: Vec<bool> = self.given.lock().unwrap().iter().map(|job| job.told.is_none()).collect();
        self.shared.enter(std::slice::from_ref(&link));
        link.run(&self.shared);
        let mut bytes = Vec::new();
        // What was not read of the other direction is an error after the last byte.
        let _ = theirs.read_to_end(&mut bytes);
        let sent = self.sent(&bytes, &was_open);
        self.check_again(&kept, &sent, &was_open);
        let heard = heard(&said, &sent);
        self.check_told(&heard, &sent, life, &was_open);
        self.check_flushes(&heard, &sent, had_lost, &was_open);
    }

    /// The writes that no flush can have covered, in earlier connections: they are written again.
    fn kept(&self) -> Vec<usize> {
        let given = self.given.lock().unwrap();
        let done_in = |job: &Given| job.told.as_ref().filter(|(told, _)| told.is_ok()).map(|&(_, life)| life);
        let flushes = given.iter().filter(|job| job.kind == Kind::Flush);
        let flushed = flushes.filter_map(done_in).max();
        let is_kept = |job: &Given| job.kind == Kind::Write && done_in(job) > flushed;
        let can_last = self.shared.agreed.can_flush && !self.shared.state().kept.has_lost();
        (0..given.len()).filter(|&number| can_last && is_kept(&given[number])).collect()
    }

    /// Reads the requests that were sent. Each is a sound one, of a job that is not over, or of a write that is kept.
    fn sent(&self, mut bytes: &[u8], was_open: &[bool]) -> Vec<Sent> {
        let agreed = &self.shared.agreed;
        let given = self.given.lock().unwrap();
        let mut sent: Vec<Sent> = Vec::new();
        while let Some((header, rest)) = bytes.split_first_chunk::<28>() {
            bytes = rest;
            let field =
                |from: usize, to: usize| header[from..to].iter().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
            let (at, len) = (field(16, 24), field(24, 28) as usize);
            assert_eq!((field(0, 4), field(8, 16)), (0x2560_9513, sent.len() as u64));
            let kind = match field(6, 8) {
                0 => Kind::Read,
                1 => Kind::Write,
                3 => Kind::Flush,
                4 => Kind::Trim,
                other => panic!("nobody asked for {other}"),
            };
            let is_durable = kind == Kind::Write && !agreed.can_flush;
            assert_eq!(field(4, 6), u64::from(is_durable));
            assert!(at + len as u64 <= agreed.size && at.is_multiple_of(agreed.min_block.into()));
            assert!(len.is_multiple_of(agreed.min_block as usize));
            assert!(len <= agreed.max_block as usize || kind == Kind::Trim);
            let is_its = |job: &Given| job.kind == kind && job.at <= at && at + len as u64 <= job.at + job.len as u64;
            // Jobs that overlap: a request goes on where the one before ended, or is a job's first.
            let goes_on = sent.last().copied().filter(|last| {
                last.kind == kind
                    && given[last.job].at + (last.from + last.len) as u64 == at
                    && is_its(&given[last.job])
            });
            let (job, from) = match goes_on {
                Some(last) if kind != Kind::Flush => (last.job, last.from + last.len),
                _ => {
                    let is_first = |job: &Given| is_its(job) && job.at == at;
                    let found = (0..given.len()).find(|&number| is_first(&given[number]) && was_open[number]);
                    let found = found.or_else(|| given.iter().position(is_first));
                    (found.expect("a request of a job"), 0)
                }
            };
            assert!(was_open[job] || kind == Kind::Write, "job {job} was over");
            if kind == Kind::Write {
                let Some((payload, rest)) = bytes.split_at_checked(len) else { break };
                assert!(payload == &written(job, given[job].len)[from..from + len], "bytes of job {job}");
                bytes = rest;
            }
            sent.push(Sent { kind, job, from, len });
        }
        sent
    }

    /// Kept writes come first, and all of them.
    fn check_again(&self, kept: &[usize], sent: &[Sent], was_open: &[bool]) {
        let again: Vec<usize> = sent
            .iter()
            .filter(|request| !was_open[request.job] && request.from == 0)
            .map(|request| request.job)
            .collect();
        let first_new = sent.iter().position(|request| was_open[request.job]).unwrap_or(sent.len());
        assert!(sent[first_new..].iter().all(|request| was_open[request.job]), "a kept write comes late");
        if self.is_simple && again.is_empty() {
            let is_sent = |job: usize| sent.iter().any(|request| request.job == job);
            assert!((0..was_open.len()).all(|job| !was_open[job] || is_sent(job)), "a job is stuck");
        }
        if self.is_simple {
            assert!(kept.iter().all(|job| again.contains(job)), "{kept:?} are kept, {again:?} were written again");
        }
    }

    /// Each job was told what its requests were told.
    fn check_told(&self, heard: &HashMap<usize, Heard>, sent: &[Sent], life: usize, was_open: &[bool]) {
        let given = self.given.lock().unwrap();
        for (number, job) in
            given.iter().enumerate().filter(|(number, job)| was_open[*number] && job.kind != Kind::Flush)
        {
            let own = || sent.iter().enumerate().filter(|(_, request)| request.job == number);
            let count: usize = own().map(|(_, request)| request.len).sum();
            let is_answered = count == job.len && own().all(|(cookie, _)| heard.contains_key(&cookie));
            let has_failed = own().any(|(cookie, _)| heard.get(&cookie).is_some_and(Result::is_err));
            match &job.told {
                None => assert!(!(self.is_simple && is_answered && life == 1), "job {number} was answered"),
                Some((told, when)) => {
                    assert!(*when == life && is_answered, "job {number} was not answered");
                    assert_eq!(told.is_err(), has_failed, "job {number}");
                    if let (Ok(bytes), Kind::Read) = (told, job.kind) {
                        for (cookie, request) in own() {
                            let Some(Ok(said)) = heard.get(&cookie) else { continue };
                            assert!(
                                bytes[request.from..request.from + request.len] == said[..],
                                "bytes of job {number}"
                            );
                        }
                    }
                }
            }
        }
    }

    /// A flush succeeds if the far end says so, and never after a loss.
    fn check_flushes(&self, heard: &HashMap<usize, Heard>, sent: &[Sent], had_lost: bool, was_open: &[bool]) {
        let is_first = *self.life.lock().unwrap() == 1;
        let given = self.given.lock().unwrap();
        let has_lost = self.shared.state().kept.has_lost();
        let heard: Vec<_> = (0..sent.len())
            .filter(|&cookie| sent[cookie].kind == Kind::Flush)
            .map(|cookie| heard.get(&cookie))
            .collect();
        for (number, job) in
            given.iter().enumerate().filter(|(number, job)| was_open[*number] && job.kind == Kind::Flush)
        {
            match &job.told {
                None => {}
                Some((Ok(_), _)) => {
                    assert!(!had_lost && heard.iter().flatten().any(|told| told.is_ok()), "flush {number}")
                }
                Some((Err(_), _)) => assert!(has_lost, "flush {number}"),
            }
        }
        let has_failed = heard.iter().flatten().any(|told| told.is_err());
        assert!(!has_failed || has_lost || !self.is_simple || !is_first, "a failed flush is forgotten");
    }

    /// Nothing is lost: what was not told waits.
    fn check_all(&self) {
        let given = self.given.lock().unwrap();
        let state = self.shared.state();
        let waiting: usize = state.queue.iter().map(|job| usize::from(job.home.is_some()) + job.along.len()).sum();
        let told = given.iter().filter(|job| job.told.is_some()).count();
        assert_eq!(waiting + told, given.len());
        // Kept writes are written again in their order, and not as others are.
        assert!(state.queue.iter().all(|job| !matches!(job.work, Work::Again(..))));
        assert!(state.live == 0 && state.kept.count() <= given.len());
        // Those that are under way are dropped when they begin anew.
        let is_under_way = |job: &&Given| job.kind == Kind::Write && job.told.is_none();
        let under_way = given.iter().filter(is_under_way).count();
        assert!(!state.kept.has_lost() || state.kept.count() <= under_way, "kept after a loss");
    }
}

/// Plays the far end that `input` describes, up to three times in a row.
///
/// # Panics
/// If a request was told what the far end did not say to it.
pub(crate) fn check_far_end(input: &[u8]) {
    let mut choices = Choices(input);
    let Some((agreed, mut left)) = agree(&mut choices) else { return };
    let Some(mut game) = Game::new(agreed) else { return };
    for _ in 0..1 + choices.next() % 3 {
        for _ in 0..choices.next() % 8 {
            game.give(&mut choices);
        }
        let stage = choices.of(&[64 << 10, REPLY, REPLY + 1, 100]);
        let mut said = std::mem::take(&mut left);
        said.extend(game.replies(&mut choices));
        game.live(said, stage);
        game.check_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn requests_are_told_what_the_far_end_said_to_them(
            begin in prop::collection::vec(any::<u8>(), 5..6),
            input in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            // Most agree, and go on.
            check_far_end(&[&[0][..], &begin, &input].concat());
            check_far_end(&input);
        }
    }
}
