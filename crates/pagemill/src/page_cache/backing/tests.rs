use super::super::fake_backing::{Asked, FakeBacking, Fault, Kept};
use super::super::testing::{Memory, read_of, some_bytes, write_of};
use super::super::workers::{THREADS, Urgency, Workers};
use super::{Backing, Io, PIECES_MAX, ReadTransfer};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::sync::{Arc, Mutex};

type Result = io::Result<usize>;

fn io(backing: &Arc<FakeBacking>) -> Arc<Io> {
    Io::new(backing.clone(), Arc::new(Workers::new(THREADS)))
}

/// The ways of a transfer to a backing that begins none.
#[derive(Clone, Copy, Debug)]
enum Way {
    Here,
    Workers,
    /// Begun, and completed with 1 byte: the rest goes to a worker.
    Begun,
}

const WAYS: [Way; 3] = [Way::Here, Way::Workers, Way::Begun];

fn read_on(way: Way, backing: &Arc<FakeBacking>, memory: &mut Memory, at: u64, lens: &[usize]) -> Result {
    let (read, done) = read_of(memory, at, lens);
    let io = io(backing);
    match way {
        Way::Here => io.read_here(read),
        Way::Workers => io.read(read, Urgency::Awaited),
        Way::Begun => {
            backing.keep_transfers(true);
            io.read(read, Urgency::Ahead);
            let Kept::Read(mut read) = backing.take_kept() else { panic!() };
            let bytes = backing.bytes();
            let first: &[u8] = bytes.get(at as usize..).unwrap_or_default();
            let n = first.len().min(1);
            read.slices()[0][..n].copy_from_slice(&first[..n]);
            read.complete(Ok(n));
        }
    }
    done.recv().unwrap()
}

fn write_on(way: Way, backing: &Arc<FakeBacking>, memory: &mut Memory, at: u64, lens: &[usize]) -> Result {
    let (write, done) = write_of(memory, at, lens);
    let io = io(backing);
    match way {
        Way::Here => io.write_here(write),
        Way::Workers => io.write(write, Urgency::Awaited),
        Way::Begun => {
            backing.keep_transfers(true);
            io.write(write, Urgency::Ahead);
            let Kept::Write(write) = backing.take_kept() else { panic!() };
            let n = backing.write_vectored_at(&[IoSlice::new(&write.slices()[0][..1])], write.at());
            write.complete(n);
        }
    }
    done.recv().unwrap()
}

#[test]
fn a_short_or_interrupted_read_goes_on_with_the_rest() {
    let lens = [5, 0, 1, 100, 7];
    let faults =
        [Fault::Short(3), Fault::Error(ErrorKind::Interrupted), Fault::Short(3), Fault::Short(1), Fault::Short(50)];
    for way in WAYS {
        let (backing, mut memory) = (FakeBacking::new(some_bytes(200)), Memory::new());
        backing.fail(faults);
        assert_eq!(read_on(way, &backing, &mut memory, 10, &lens).unwrap(), 113, "{way:?}");
        assert_eq!(memory.read(&lens), some_bytes(200)[10..123]);
    }
}

#[test]
fn a_read_ends_where_the_backing_ends() {
    for way in WAYS {
        let (backing, mut memory) = (FakeBacking::new(some_bytes(20)), Memory::new());
        assert_eq!(read_on(way, &backing, &mut memory, 15, &[3, 4, 5]).unwrap(), 5, "{way:?}");
        assert_eq!(memory.read(&[3, 4, 5])[..5], some_bytes(20)[15..]);
        assert_eq!(memory.read(&[3, 4, 5])[5..], [0xee; 7]);
        assert_eq!(read_on(way, &backing, &mut memory, 20, &[3]).unwrap(), 0);
        assert_eq!(read_on(way, &backing, &mut memory, u64::MAX - 9, &[3]).unwrap(), 0);
    }
}

#[test]
fn a_short_or_interrupted_write_goes_on_with_the_rest() {
    let lens = [5, 1, 100, 7];
    let faults = [Fault::Short(3), Fault::Error(ErrorKind::Interrupted), Fault::Short(3), Fault::Short(1)];
    for way in WAYS {
        let (backing, mut memory) = (FakeBacking::new(*b"begin"), Memory::new());
        backing.fail(faults);
        memory.fill(&lens, &some_bytes(113));
        assert_eq!(write_on(way, &backing, &mut memory, 4, &lens).unwrap(), 113, "{way:?}");
        assert_eq!((&backing.bytes()[..4], &backing.bytes()[4..]), (&b"begi"[..], &some_bytes(113)[..]));
    }
}

#[test]
fn an_error_a_lie_or_a_panic_fails_the_transfer() {
    let failures = [
        (Fault::Error(ErrorKind::StorageFull), ErrorKind::StorageFull),
        (Fault::Error(ErrorKind::WouldBlock), ErrorKind::WouldBlock),
        (Fault::Lie(1), ErrorKind::InvalidData),
        (Fault::Panic, ErrorKind::Other),
    ];
    for (fault, kind) in failures {
        for way in WAYS {
            let (backing, mut memory) = (FakeBacking::new(some_bytes(100)), Memory::new());
            let faults = if matches!(way, Way::Begun) { [Fault::None, fault] } else { [Fault::Short(1), fault] };
            backing.fail(faults);
            assert_eq!(write_on(way, &backing, &mut memory, 0, &[9, 9]).unwrap_err().kind(), kind, "{way:?} {fault:?}");
            let faults = if matches!(way, Way::Begun) { &faults[1..] } else { &faults[..] };
            backing.fail(faults.iter().copied());
            assert_eq!(read_on(way, &backing, &mut memory, 0, &[9, 9]).unwrap_err().kind(), kind, "{way:?} {fault:?}");
        }
    }
}

#[test]
fn a_backing_that_stops_writing_fails_the_write() {
    let (backing, mut memory) = (FakeBacking::new(*b""), Memory::new());
    backing.fail([Fault::Short(2), Fault::Short(0)]);
    assert_eq!(write_on(Way::Here, &backing, &mut memory, 0, &[9]).unwrap_err().kind(), ErrorKind::WriteZero);
}

/// The lie is about one request, not about all that is left.
#[test]
fn a_lie_within_the_transfer_is_refused() {
    let (backing, mut memory) = (FakeBacking::with_largest(some_bytes(100), 10), Memory::new());
    backing.fail([Fault::Lie(1)]);
    assert_eq!(read_on(Way::Here, &backing, &mut memory, 0, &[50]).unwrap_err().kind(), ErrorKind::InvalidData);
}

#[test]
fn requests_are_cut_to_the_largest_size_and_to_1024_slices() {
    let (backing, mut memory) = (FakeBacking::with_largest(some_bytes(100), 40), Memory::new());
    assert_eq!(read_on(Way::Here, &backing, &mut memory, 5, &[30, 30, 30]).unwrap(), 90);
    let asked = |at, bytes, slices| Asked::Read { at, bytes, slices };
    assert_eq!(backing.take_asked(), [asked(5, 40, 2), asked(45, 40, 2), asked(85, 10, 1)]);

    let (backing, lens) = (FakeBacking::new(some_bytes(5000)), [2; PIECES_MAX + 1]);
    let mut memory = Memory::new();
    assert_eq!(read_on(Way::Here, &backing, &mut memory, 0, &lens).unwrap(), 2050);
    assert_eq!(backing.take_asked(), [asked(0, 2048, 1024), asked(2048, 2, 1)]);
    assert_eq!(memory.read(&lens), some_bytes(2050));
    let (mut read, done) = read_of(&mut memory, 0, &lens);
    assert_eq!((read.slices().len(), read.iovecs().1), (PIECES_MAX, PIECES_MAX));
    read.advance(2048).unwrap();
    assert_eq!((read.slices().len(), read.iovecs().1, read.at(), read.len()), (1, 1, 2048, 2));
    drop(read);
    done.recv().unwrap().unwrap_err();
}

#[test]
fn a_dropped_transfer_fails_and_a_forgotten_one_never_ends() {
    let (backing, mut memory) = (FakeBacking::new(some_bytes(100)), Memory::new());
    backing.keep_transfers(true);
    let io = io(&backing);
    let (read, done) = read_of(&mut memory, 0, &[9]);
    io.read(read, Urgency::Awaited);
    drop(backing.take_kept());
    assert!(done.recv().unwrap().unwrap_err().to_string().contains("without completing"));

    let mut memory = Memory::new();
    let (write, done) = write_of(&mut memory, 0, &[9]);
    io.write(write, Urgency::Awaited);
    // As if it were forgotten, and no leak: nothing drops what a static has.
    static FORGOTTEN: std::sync::OnceLock<std::sync::Mutex<crate::page_cache::fake_backing::Kept>> =
        std::sync::OnceLock::new();
    FORGOTTEN.set(std::sync::Mutex::new(backing.take_kept())).unwrap();
    done.try_recv().unwrap_err();
}

#[test]
fn a_panic_where_a_transfer_begins_fails_it() {
    struct Panics;
    impl Backing for Panics {
        fn len(&self) -> io::Result<u64> {
            Ok(0)
        }
        fn read_vectored_at(&self, _: &mut [IoSliceMut<'_>], _: u64) -> Result {
            Ok(0)
        }
        fn write_vectored_at(&self, _: &[IoSlice<'_>], _: u64) -> Result {
            Ok(0)
        }
        fn sync(&self) -> io::Result<()> {
            Ok(())
        }
        fn set_len(&self, _: u64) -> io::Result<()> {
            Ok(())
        }
        fn start_read(&self, _: ReadTransfer) -> Option<ReadTransfer> {
            std::panic::resume_unwind(Box::new(7))
        }
    }
    let io = Io::new(Arc::new(Panics), Arc::new(Workers::new(1)));
    let mut memory = Memory::new();
    let (read, done) = read_of(&mut memory, 0, &[9]);
    io.read(read, Urgency::Awaited);
    done.recv().unwrap().unwrap_err();
}

/// By the array of `struct iovec`, as a ring moves bytes.
#[test]
fn iovecs_stay_where_they_are_while_the_transfer_moves() {
    let mut memory = Memory::new();
    let (mut read, done) = read_of(&mut memory, 0, &[4, 4]);
    read.advance(1).unwrap();
    let (array, entries) = read.iovecs();
    let elsewhere = Mutex::new(Some(Box::new(read)));
    let array = array.cast::<libc::iovec>();
    for i in 0..entries {
        // SAFETY: `entries` vectors are there, and lead to memory of the transfer.
        unsafe {
            let vector = array.add(i).read();
            vector.iov_base.cast::<u8>().write_bytes(7, vector.iov_len);
        }
    }
    assert_eq!(entries, 2);
    elsewhere.lock().unwrap().take().unwrap().complete(Ok(7));
    assert_eq!(done.recv().unwrap().unwrap(), 8);
    assert_eq!(memory.read(&[4, 4]), [0xee, 7, 7, 7, 7, 7, 7, 7]);
}

#[test]
fn an_empty_transfer_asks_for_nothing() {
    let (backing, mut memory) = (FakeBacking::new(some_bytes(100)), Memory::new());
    assert_eq!(read_on(Way::Here, &backing, &mut memory, 0, &[]).unwrap(), 0);
    assert_eq!(write_on(Way::Workers, &backing, &mut memory, 0, &[0]).unwrap(), 0);
    assert_eq!(backing.take_asked(), []);
}

/// Nowhere to go on, and never taken for the end of the backing.
#[test]
fn a_short_answer_without_a_cache_is_an_error() {
    let mut memory = Memory::new();
    let (read, done) = read_of(&mut memory, 0, &[9]);
    read.complete(Ok(8));
    assert_eq!(done.recv().unwrap().unwrap_err().kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn bytes_are_copied_across_pieces_and_not_beyond_the_last() {
    let (lens, mut memory) = ([2; PIECES_MAX + 1], Memory::new());
    let bytes = some_bytes(2 * lens.len());
    let (mut read, done) = read_of(&mut memory, 0, &lens);
    read.copy_from(&bytes[..3]).unwrap();
    read.copy_from(&bytes[3..]).unwrap();
    read.copy_from(b"").unwrap();
    assert_eq!(read.copy_from(b"x").unwrap_err().kind(), ErrorKind::InvalidData);
    read.complete(Ok(0));
    assert_eq!(done.recv().unwrap().unwrap(), bytes.len());
    assert_eq!(memory.read(&lens), bytes);
}

#[test]
fn a_read_that_is_awaited_overtakes_readahead_and_write_back() {
    let backing = FakeBacking::new(some_bytes(100));
    let io = Io::new(backing.clone(), Arc::new(Workers::new(1)));
    let mut memory: Vec<_> = (0..4).map(|_| Memory::new()).collect();
    backing.close();
    let mut done = Vec::new();
    for (memory, at) in memory.iter_mut().zip([0, 1, 2, 3]) {
        match at {
            1 => {
                let (write, end) = write_of(memory, at, &[1]);
                io.write(write, Urgency::Ahead);
                done.push(end);
            }
            _ => {
                let (read, end) = read_of(memory, at, &[1]);
                io.read(read, if at == 3 { Urgency::Awaited } else { Urgency::Ahead });
                done.push(end);
            }
        }
        // The first has the thread, and the others wait for it.
        backing.until_waiting(1);
    }
    backing.open();
    assert!(done.iter().all(|end| end.recv().unwrap().unwrap() == 1));
    let (read, write) = (|at| Asked::Read { at, bytes: 1, slices: 1 }, |at| Asked::Write { at, bytes: 1, slices: 1 });
    assert_eq!(backing.take_asked(), [read(0), read(3), write(1), read(2)]);
}

#[test]
fn begun_transfers_may_end_in_any_order_and_on_any_thread() {
    let backing = FakeBacking::new(some_bytes(100));
    backing.keep_transfers(true);
    let io = io(&backing);
    let (mut first, mut second) = (Memory::new(), Memory::new());
    let (read, read_done) = read_of(&mut first, 0, &[9]);
    let (write, write_done) = write_of(&mut second, 0, &[9]);
    io.read(read, Urgency::Awaited);
    io.write(write, Urgency::Ahead);
    assert_eq!(backing.kept(), 2);
    let (read, write) = (backing.take_kept(), backing.take_kept());
    std::thread::spawn(move || write.complete(Ok(9))).join().unwrap();
    assert_eq!(write_done.recv().unwrap().unwrap(), 9);
    read_done.try_recv().unwrap_err();
    read.complete(Err(ErrorKind::TimedOut.into()));
    assert_eq!(read_done.recv().unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
    assert_eq!(backing.take_asked(), []);
}
