//! The drive and all below it, with a controller in memory.
use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

use pagemill::{Allocator, Memory as Arena};

use super::*;
use crate::Status;
use crate::fake::{BLOCK, Behaviour, Fake, Fate};
use crate::request::Done;
use crate::spec::{PAGE, admin};
use crate::transfer::{Moved, Place, Random, Transfer};

/// Zeros, deallocation, durable writes, and the end.
mod durable;
/// Several threads, futures, and what a program may drop or forget.
mod interface;
/// Commands that take too long.
mod late;
/// Calls that no program should make, and controllers that answer too little.
mod misuse;

const BLOCKS: usize = 20_000;
/// Pages of memory that are enough for all requests of a test.
const PAGES: usize = 16 << 10;

fn settings(queues: u16, depth: u16) -> Settings {
    Settings { queues, depth, timeout: Duration::from_secs(1), ..Settings::default() }
}

/// A drive with all its queues as one, for this thread.
struct Rig {
    drive: Drive,
    queue: Queue,
}

impl Deref for Rig {
    type Target = Queue;
    fn deref(&self) -> &Queue {
        &self.queue
    }
}

impl Rig {
    fn shut_down(self) -> Result<Counts, Error> {
        self.drive.shut_down()
    }
    fn counts(&self) -> Counts {
        self.drive.counts()
    }
    fn now(&self) -> Duration {
        self.drive.now()
    }
    fn wait(&self, done: &mut Vec<Done>) -> Result<usize, Error> {
        self.queue.wait(NAP, done)
    }
    fn read(&self, lba: u64) {
        self.submit(Request::read(lba, self.buffer(BLOCK).unwrap().unwrap()), lba).unwrap();
    }
}

fn dma(pages: usize) -> Dma {
    Dma::new(&Allocator::builder().memory(Arena::anonymous(pages)).build().unwrap())
}

fn start(behaviour: Behaviour, pages: usize, settings: Settings) -> (Fake, Result<Rig, Error>) {
    let fake = Fake::with(behaviour, BLOCKS, 1);
    let drive = Drive::on_fake(&dma(pages), &fake, settings);
    (fake, drive.map(|drive| Rig { queue: drive.all(), drive }))
}

fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..len).map(|_| random.below(256) as u8).collect()
}

fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn content(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

const ALL: BlockRange = BlockRange { lba: 0, blocks: BLOCKS as u64 };

fn transfer(rig: &mut Rig, op: Op, range: BlockRange, seed: Option<u64>, place: Place) -> Result<Moved, Error> {
    let piece = rig.drive.max_transfer();
    let transfer = Transfer { op, range, piece, seed, place, is_to_end: false, name: "the file" };
    transfer.run(&rig.drive, &rig.queue, &mut || Ok(()))
}

/// Writes a whole drive and reads it again, in random pieces on random pages. Compares the controller's disk and the
/// file.
fn there_and_back(behaviour: Behaviour, pages: usize, settings: Settings) -> (Fake, Counts, Moved) {
    let (fake, drive) = start(behaviour, pages, settings);
    let mut drive = drive.unwrap();
    let written = bytes(BLOCKS * BLOCK, 5);
    transfer(&mut drive, Op::Write, ALL, Some(6), Place::File(file(&written))).unwrap();
    assert!(fake.state().disk == written, "the drive has something else");
    let read = file(b"");
    let moved = transfer(&mut drive, Op::Read, ALL, Some(7), Place::File(read.try_clone().unwrap())).unwrap();
    assert!(content(&read) == written, "something else was read");
    assert_eq!(moved.bytes, written.len() as u64);
    let counts = drive.shut_down().unwrap();
    assert_eq!(fake.state().complaints, Vec::<String>::new());
    (fake, counts, moved)
}

#[test]
fn written_blocks_are_read_back() {
    for (queues, depth) in [(1, 1), (1, 32), (4, 8), (8, 63)] {
        let (fake, counts, _) = there_and_back(Behaviour::default(), PAGES, settings(queues, depth));
        assert_eq!((counts.resets, counts.aborts, counts.retries), (0, 0, 0));
        assert_eq!(counts.commands, fake.state().ios);
        let state = fake.state();
        assert_eq!((state.shutdowns, state.resets), (1, 0));
    }
}

/// A driver that rang too seldom would leave commands to their time-outs. One of one queue of one command wraps around
/// all the time.
#[test]
fn shadow_doorbells_lose_nothing_and_save_writes_to_registers() {
    for (queues, depth) in [(1, 1), (1, 2), (1, 32), (4, 8), (8, 8)] {
        let [shadowed, plain] = [true, false].map(|has_shadows| {
            let behaviour = Behaviour { has_shadows, mdts: 4, ..Behaviour::default() };
            let (fake, counts, _) = there_and_back(behaviour, PAGES, settings(queues, depth));
            assert_eq!((counts.resets, counts.aborts, counts.retries), (0, 0, 0), "{queues} of {depth}");
            fake.state().rings
        });
        assert!(shadowed < plain, "{queues} of {depth}: {shadowed} and {plain}");
    }
}

#[test]
fn shadow_doorbells_survive_resets() {
    let behaviour = Behaviour { has_shadows: true, mdts: 6, ..Behaviour::default() };
    let (_, counts, _) = there_and_back(behaviour, PAGES, Settings { reset_every: Some(7), ..settings(4, 8) });
    assert!(counts.resets > 3 && counts.retries > 3, "{counts:?}");
}

/// Resets at intervals, with requests under way, which are all done again.
#[test]
fn no_request_is_lost_in_a_reset() {
    let (_, counts, _) = there_and_back(
        Behaviour { mdts: 6, ..Behaviour::default() },
        PAGES,
        Settings { reset_every: Some(7), ..settings(4, 8) },
    );
    assert!(counts.resets > 3 && counts.retries > 3, "{counts:?}");
}

#[test]
fn a_lost_command_is_aborted_and_tried_again() {
    let fate = |nth| if nth % 9 == 3 { Fate::Lost } else { Fate::Done };
    let behaviour = Behaviour { fate: Box::new(fate), aborts: true, ..Behaviour::default() };
    let (fake, counts, _) = there_and_back(behaviour, PAGES, settings(2, 8));
    assert!(counts.aborts > 0 && counts.retries >= counts.aborts && counts.resets == 0, "{counts:?}");
    assert_eq!(fake.state().resets, 0);
}

#[test]
fn an_unsuccessful_abort_ends_in_a_reset() {
    let fate = |nth| if nth % 25 == 3 { Fate::Lost } else { Fate::Done };
    let behaviour = Behaviour { fate: Box::new(fate), ..Behaviour::default() };
    let (_, counts, _) = there_and_back(behaviour, PAGES, settings(2, 8));
    assert!(counts.aborts > 0 && counts.resets > 0 && counts.retries > 0, "{counts:?}");
}

/// Somebody else has reset the controller, or it has reset itself.
#[test]
fn a_reset_by_somebody_else_is_recognised() {
    let (fake, drive) = start(Behaviour { mdts: 4, ..Behaviour::default() }, PAGES, settings(2, 8));
    let drive = drive.unwrap();
    let written = bytes(BLOCKS * BLOCK, 5);
    let other = fake.clone();
    let mut steps = 0;
    let check = &mut || {
        steps += 1;
        if steps == 5 {
            other.state().reset();
            other.state().hidden = 20;
        }
        Ok(())
    };
    let piece = drive.drive.max_transfer();
    let place = Place::File(file(&written));
    Transfer { op: Op::Write, range: ALL, piece, seed: Some(1), place, is_to_end: false, name: "" }
        .run(&drive.drive, &drive.queue, check)
        .unwrap();
    let said = drive.drive.said();
    assert!(said.iter().any(|said| said.contains("somebody else has reset the controller")), "{said:?}");
    assert_eq!(drive.counts().resets, 1);
    assert!(fake.state().disk == written);
}

#[test]
fn a_controller_that_is_gone_is_reported() {
    let (fake, drive) =
        start(Behaviour { fate: Box::new(|_| Fate::Lost), ..Behaviour::default() }, PAGES, settings(1, 8));
    let mut drive = drive.unwrap();
    fake.state().hidden = u32::MAX;
    let error = transfer(&mut drive, Op::Read, ALL, None, Place::File(file(b""))).unwrap_err();
    assert!(matches!(error, Error::Gone), "{error}");
}

/// Somebody else has formatted it with larger blocks, so the requests would mean other data.
#[test]
fn a_drive_that_changed_in_a_reset_is_reported() {
    let (fake, drive) = start(Behaviour::default(), PAGES, Settings { reset_every: Some(2), ..settings(1, 4) });
    let mut drive = drive.unwrap();
    fake.state().behaviour.identify = Box::new(|what, page| {
        if what == admin::CNS_NAMESPACE {
            page[130] = 12;
        }
    });
    let error = transfer(&mut drive, Op::Read, ALL, None, Place::File(file(b""))).unwrap_err();
    assert!(error.to_string().contains("the drive is another one since the reset"), "{error}");
}

#[test]
fn a_request_that_never_works_is_reported() {
    let behaviour = Behaviour { fate: Box::new(|_| Fate::Lost), ..Behaviour::default() };
    let (fake, drive) = start(behaviour, PAGES, settings(1, 4));
    let mut drive = drive.unwrap();
    let range = BlockRange { lba: 8, blocks: 8 };
    let error = transfer(&mut drive, Op::Read, range, None, Place::File(file(b""))).unwrap_err();
    assert_eq!(error.to_string(), "reading 8 blocks at 8: no answer, though tried 4 times");
    assert_eq!(drive.counts().resets, 4);
    // Without requests under way it works again.
    fake.state().behaviour.fate = Box::new(|_| Fate::Done);
    transfer(&mut drive, Op::Read, range, None, Place::File(file(b""))).unwrap();
}

#[test]
fn transient_statuses_are_retried_and_others_are_reported() {
    let fate = |nth| if nth % 7 == 0 { Fate::Fails(0x06) } else { Fate::Done };
    let (_, counts, _) =
        there_and_back(Behaviour { fate: Box::new(fate), ..Behaviour::default() }, PAGES, settings(2, 4));
    assert!(counts.retries > 0 && counts.resets == 0);

    for (status, words) in [(0x281, "unrecovered read error"), (0x06, "internal error of the controller")] {
        let behaviour = Behaviour { fate: Box::new(move |_| Fate::Fails(status)), ..Behaviour::default() };
        let mut drive = start(behaviour, PAGES, settings(1, 4)).1.unwrap();
        let range = BlockRange { lba: 0, blocks: 8 };
        let error = transfer(&mut drive, Op::Read, range, None, Place::File(file(b""))).unwrap_err();
        assert!(error.to_string().starts_with(&format!("reading 8 blocks at 0: {words}")), "{error}");
        assert!(error.next_step().is_some());
    }
}

#[test]
fn an_error_of_the_drive_names_its_blocks() {
    let behaviour = Behaviour { fate: Box::new(|_| Fate::Fails(0x4080)), ..Behaviour::default() };
    let drive = start(behaviour, PAGES, settings(1, 4)).1.unwrap();
    let error = drive.queue.read(5, 8 * BLOCK).unwrap_err();
    assert_eq!(error.to_string(), "reading 8 blocks at 5: LBA out of range (status 0/80h)");
    assert!(matches!(error, Error::Status { status: Status(0x4080), .. }));
    let elsewhere = Settings { namespace: 2, ..settings(1, 4) };
    let error = start(Behaviour::default(), PAGES, elsewhere).1.err().unwrap();
    assert!(error.to_string().starts_with("there is no namespace 2"), "{error}");
}

/// Blocks beyond all numbers, more blocks than the drive has, and blocks beyond its end: nothing is read or written.
#[test]
fn a_range_past_the_end_is_refused_before_anything_moves() {
    let all = BLOCKS as u64;
    for (lba, blocks) in
        [(u64::MAX - 3, 8), (0, u64::MAX), (5, all + 1), (all - 64, 65), (0, all + 1), (all, 1), (all + 1, 1)]
    {
        for (op, seed) in [(Op::Write, None), (Op::Write, Some(1)), (Op::Read, None), (Op::Read, Some(1))] {
            // Pieces of 16 blocks: the pieces before the end would succeed.
            let (fake, drive) = start(Behaviour { mdts: 1, ..Behaviour::default() }, PAGES, settings(1, 4));
            let range = BlockRange { lba, blocks };
            let place = Place::File(file(&[7; 65 * BLOCK]));
            let error = transfer(&mut drive.unwrap(), op, range, seed, place).unwrap_err();
            assert!(fake.state().disk.iter().all(|&byte| byte == 0), "something was written: {error}");
            let said = format!("{blocks} blocks from {lba} on: namespace 1 has {BLOCKS}");
            assert_eq!((error.to_string(), fake.state().ios), (said, 0), "{op:?}");
        }
    }
}

/// Too little memory for all requests at a time, and then for a single command of full length.
#[test]
fn little_memory_slows_transfers_and_loses_nothing() {
    // 512 frames are the least that there is.
    let (_, _, moved) = there_and_back(Behaviour::default(), 512, settings(2, 32));
    assert!(moved.short > 0);
}

/// Wrong fields of a completion.
#[test]
fn invalid_completions_are_errors_and_stop_the_controller() {
    type Lie = fn(u64, &mut [u32; 4]);
    let lies: [(&str, Lie); 3] = [
        ("command 1000, which is not out", |_, words| words[3] = words[3] & !0xffff | 1000),
        ("names queue 7", |_, words| words[2] = words[2] & 0xffff | 7 << 16),
        ("which is not out", |nth, words| words[3] ^= if nth == 1 { 2 } else { 0 }),
    ];
    for (words, lie) in lies {
        let (fake, drive) = start(Behaviour { lie: Box::new(lie), ..Behaviour::default() }, PAGES, settings(1, 2));
        let mut drive = drive.unwrap();
        let range = BlockRange { lba: 0, blocks: 16_000 };
        let error = transfer(&mut drive, Op::Read, range, None, Place::File(file(b""))).unwrap_err();
        let Error::Broken(said) = &error else { panic!("{words}: {error}") };
        assert!(said.contains(words), "{said}");
        drop(drive);
        assert_eq!(fake.read32(crate::spec::CSTS) & 1, 0, "it was stopped");
    }
}

/// Real controllers complete from several cores, whose heads overtake each other.
#[test]
fn a_wrong_head_in_a_completion_is_counted_and_not_relied_on() {
    type Lie = fn(u64, &mut [u32; 4]);
    let back = |nth: u64, words: &mut [u32; 4]| {
        let head = words[2] & 0xffff;
        if nth % 2 == 1 && head > 0 {
            words[2] -= 1;
        }
    };
    let lies: [(&str, bool, Lie); 4] = [
        ("backwards", true, back),
        ("beyond the tail", true, |nth, words| words[2] += nth as u32 % 3),
        ("beyond the queue", true, |_, words| words[2] |= 0xffff),
        // It can't be told from a head that lags behind. A driver that relied on it would find the queue full for ever.
        ("always 0", false, |_, words| words[2] &= !0xffff),
    ];
    for (what, is_told, lie) in lies {
        let behaviour = Behaviour { lie: Box::new(lie), mdts: 4, ..Behaviour::default() };
        let (_, counts, _) = there_and_back(behaviour, PAGES, settings(1, 32));
        assert_eq!((counts.aborts, counts.resets, counts.retries), (0, 0, 0), "{what}");
        assert!(!is_told || counts.wrong_heads > 0, "{what}");
    }
    let (_, counts, _) = there_and_back(Behaviour::default(), PAGES, settings(2, 32));
    assert_eq!(counts.wrong_heads, 0);
}

/// Any changed bit of any completion is reported or harmless, and never causes a panic or a hang.
#[test]
fn any_bit_of_a_completion_may_be_wrong() {
    for bit in 0..128 {
        let lie = move |nth, words: &mut [u32; 4]| {
            if nth % 3 == 1 {
                words[bit / 32] ^= 1 << (bit % 32);
            }
        };
        let (fake, drive) = start(Behaviour { lie: Box::new(lie), ..Behaviour::default() }, PAGES, settings(2, 4));
        let mut drive = drive.unwrap();
        // A finished command may be reported as failed, so that it is tried again and fails in the end.
        let _ = transfer(&mut drive, Op::Read, BlockRange { lba: 0, blocks: 4000 }, Some(2), Place::File(file(b"")));
        drop(drive);
        assert_eq!(fake.state().complaints, Vec::<String>::new(), "bit {bit}");
    }
}

#[test]
fn unsupported_controllers_are_refused() {
    let refused = |behaviour| start(behaviour, PAGES, settings(1, 4)).1.err().unwrap();
    let error = refused(Behaviour { cap: u64::MAX, ..Behaviour::default() });
    assert!(matches!(error, Error::Gone), "{error}");
    let error = refused(Behaviour { cap: Behaviour::default().cap | 2 << 48, ..Behaviour::default() });
    assert!(error.to_string().contains("pages of 16384 bytes"), "{error}");
    let error = refused(Behaviour { cap: Behaviour::default().cap & !(1 << 37), ..Behaviour::default() });
    assert!(error.to_string().contains("command set"), "{error}");
    let error = refused(Behaviour { cap: Behaviour::default().cap | 15 << 32, ..Behaviour::default() });
    assert!(error.to_string().contains("no room for a doorbell"), "{error}");
    let error = refused(Behaviour { cap: Behaviour::default().cap & !0xffff, ..Behaviour::default() });
    assert!(error.to_string().contains("one entry"), "{error}");
    let error = refused(Behaviour { admins: 2, ..Behaviour::default() });
    assert!(error.to_string().contains("no answer within 1.0 s"), "{error}");
    let error = refused(Behaviour { identify: Box::new(|_, page| page.fill(0xff)), ..Behaviour::default() });
    assert!(matches!(error, Error::Broken(_)), "{error}");
    let (_, drive) = start(Behaviour { queues: 2, ..Behaviour::default() }, PAGES, settings(3, 4));
    assert_eq!(drive.err().unwrap().to_string(), "3 queues: this controller grants 2");
    let (_, drive) = start(Behaviour::default(), PAGES, settings(1, 64));
    assert!(drive.err().unwrap().to_string().contains("queues hold 63"));
}

/// A refused start names the namespace and the reason, and advises the kernel's driver.
fn unsupported(behaviour: Behaviour, words: &str) {
    let (fake, drive) = start(behaviour, PAGES, settings(1, 4));
    let error = drive.err().expect(words);
    assert_eq!(error.to_string(), words);
    assert!(matches!(error, Error::Unsupported(_)), "{error:?}");
    assert!(error.next_step().is_some_and(|next| next.contains("kernel's driver")));
    assert_eq!(fake.state().ios, 0);
}

#[test]
fn namespaces_of_other_command_sets_are_refused() {
    let set = |set: u8| Behaviour {
        cap: Behaviour::default().cap | 1 << 43,
        identify: Box::new(move |what, page| {
            if what == admin::CNS_DESCRIPTORS {
                page[16] = set;
            }
        }),
        ..Behaviour::default()
    };
    let only = "only plain blocks, to be written in any order, are driven here";
    unsupported(set(2), &format!("namespace 1 is zoned: {only}"));
    unsupported(set(1), &format!("namespace 1 holds keys and values: {only}"));
    assert!(start(set(0), PAGES, settings(1, 4)).1.is_ok());
}

#[test]
fn blocks_larger_than_a_command_are_refused() {
    let blocks = |mdts, shift: u8| Behaviour {
        mdts,
        identify: Box::new(move |what, page| {
            if what == admin::CNS_NAMESPACE {
                page[130] = shift;
            }
        }),
        ..Behaviour::default()
    };
    let why = "it has blocks of 16384 bytes, and a command of this controller moves up to 8192";
    unsupported(blocks(1, 14), &format!("namespace 1: {why}"));
    unsupported(blocks(0, 17), "namespace 1: blocks of 131072 bytes are not driven here: 65536 are the most");
    for (mdts, shift) in [(0, 16), (1, 13)] {
        assert!(start(blocks(mdts, shift), PAGES, settings(1, 4)).1.is_ok());
    }
}

/// If disabling does not stop it, a reset of the function does. If that fails too, its access to memory is switched
/// off.
#[test]
fn a_controller_that_does_not_stop_is_reset_or_kept_from_memory() {
    let (fake, drive) = start(Behaviour::default(), PAGES, settings(1, 4));
    fake.state().behaviour.is_stuck = true;
    drive.unwrap().shut_down().unwrap();
    assert_eq!(fake.state().resets, 1);

    for (can_reset, reset_helps) in [(false, true), (true, false)] {
        let (fake, drive) = start(Behaviour::default(), PAGES, settings(1, 4));
        fake.state().behaviour = Behaviour { is_stuck: true, can_reset, reset_helps, ..Behaviour::default() };
        assert!(drive.unwrap().shut_down().is_err());
        assert!(!fake.state().is_master, "it may still write to memory");
    }
}

/// Commands with chained lists, and of exactly the drive's limit.
#[test]
fn the_largest_command_moves_all_its_blocks() {
    for (mdts, bytes) in [(1, 2 * PAGE), (10, 4 << 20), (0, 4 << 20), (13, 32 << 20), (63, 4 << 20)] {
        let (fake, drive) = start(Behaviour { mdts, ..Behaviour::default() }, PAGES, settings(1, 4));
        let mut drive = drive.unwrap();
        assert_eq!(drive.drive.max_transfer(), bytes, "{mdts}");
        let blocks = (3 * bytes as u64 / BLOCK as u64 / 2).min(BLOCKS as u64 - 3);
        let range = BlockRange { lba: 3, blocks };
        let read = file(b"");
        let moved = transfer(&mut drive, Op::Read, range, None, Place::File(read)).unwrap();
        assert_eq!(moved.bytes, range.blocks * BLOCK as u64);
        assert_eq!(fake.state().complaints, Vec::<String>::new());
    }
}

/// A pipe gets its bytes in order, whatever order they come in.
#[test]
fn a_pipe_gets_its_bytes_in_order() {
    struct Sink(Arc<Mutex<Vec<u8>>>);
    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let some = bytes.len().min(1000);
            self.0.lock().unwrap().extend(&bytes[..some]);
            Ok(some)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    for pages in [512, PAGES] {
        let (fake, drive) = start(Behaviour { mdts: 4, ..Behaviour::default() }, pages, settings(4, 8));
        let mut drive = drive.unwrap();
        let there = bytes(BLOCKS * BLOCK, 3);
        fake.state().disk.copy_from_slice(&there);
        let sink = Arc::new(Mutex::new(Vec::new()));
        transfer(&mut drive, Op::Read, ALL, None, Place::Writer(Box::new(Sink(Arc::clone(&sink))))).unwrap();
        assert!(*sink.lock().unwrap() == there);
    }
}

#[test]
fn a_pipe_that_ends_early_is_written_up_to_its_last_whole_block() {
    let (fake, drive) = start(Behaviour::default(), PAGES, settings(1, 8));
    let mut drive = drive.unwrap();
    let written = bytes(100 * BLOCK, 4);
    let pipe = Box::new(io::Cursor::new(written.clone()));
    let moved = transfer(&mut drive, Op::Write, ALL, None, Place::Reader(pipe)).unwrap();
    assert_eq!(moved.bytes, 100 * BLOCK as u64);
    assert!(fake.state().disk[..100 * BLOCK] == written);
    // A partial block is not written, and is reported.
    let pipe = Box::new(io::Cursor::new(vec![1; 3 * BLOCK + 1]));
    let error = transfer(&mut drive, Op::Write, ALL, None, Place::Reader(pipe)).unwrap_err();
    assert_eq!(error.to_string(), "the file ends 1 bytes into a block of 512: these are not written");
    assert!(fake.state().disk[..3 * BLOCK].iter().all(|&byte| byte == 1));
    assert!(fake.state().disk[3 * BLOCK..100 * BLOCK] == written[3 * BLOCK..]);
    let error = transfer(&mut drive, Op::Write, ALL, None, Place::Reader(Box::new(Failing))).unwrap_err();
    assert!(error.to_string().contains("the file: "), "{error}");
}

/// A pipe's bytes beyond the drive's end are reported.
#[test]
fn a_pipe_with_more_bytes_than_the_drive_is_reported() {
    let (fake, drive) = start(Behaviour::default(), PAGES, settings(1, 8));
    let drive = drive.unwrap();
    let range = BlockRange { lba: BLOCKS as u64 - 3, blocks: 3 };
    for (len, said) in [
        (3 * BLOCK, None),
        (3 * BLOCK + 1, Some("the file has more than the 3 blocks there are room for; those are written")),
    ] {
        let place = Place::Reader(Box::new(io::Cursor::new(vec![len as u8 | 1; len])));
        let piece = drive.drive.max_transfer();
        let transfer = Transfer { op: Op::Write, range, piece, seed: None, place, is_to_end: true, name: "the file" };
        let told = transfer.run(&drive.drive, &drive.queue, &mut || Ok(())).err().map(|error| error.to_string());
        assert_eq!(told.as_deref(), said);
        assert!(fake.state().disk[(BLOCKS - 3) * BLOCK..].iter().all(|&byte| byte == len as u8 | 1));
    }
}

struct Failing;
impl Read for Failing {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Err(io::Error::other("no more"))
    }
}

#[test]
fn the_bench_counts_its_requests() {
    use crate::bench::{Load, run};
    let (fake, drive) = start(Behaviour::default(), PAGES, settings(2, 16));
    let drive = drive.unwrap();
    let time = Duration::from_secs(2);
    let load = Load { writes: 30, size: 16 << 10, depth: 32, batch: 8, time, seed: 3 };
    let figures = run(&drive.drive, &drive.queue, &load, &mut || Ok(())).unwrap();
    let ios = fake.state().ios;
    assert_eq!((figures.requests, figures.counts.commands), (ios, ios));
    assert!(figures.requests > 32 && figures.p50_us > 0.0 && figures.p50_us <= figures.max_us);
    assert_eq!(fake.state().complaints, Vec::<String>::new());
    let wrong = Load { size: 1000, ..load };
    assert!(run(&drive.drive, &drive.queue, &wrong, &mut || Ok(())).is_err());
}
