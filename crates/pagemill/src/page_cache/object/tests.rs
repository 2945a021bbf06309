use super::super::backing::Io;
use super::super::testing::{Memory, read_of, some_bytes, write_of};
use super::super::workers::{Urgency, Workers};
use super::http::{Fault, HttpStore, Server, State};
use super::{ATTEMPTS, Backing, ObjectBacking};
use object_store::path::Path;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::sync::Arc;
use tokio::runtime::{Builder, Runtime};

const SIZE: usize = 10_000;

struct Fixture {
    runtime: Runtime,
    server: Arc<Server>,
    /// What the object was when it was opened.
    bytes: Vec<u8>,
    backing: Arc<ObjectBacking>,
}

/// The two ways of a read.
#[derive(Clone, Copy, Debug)]
enum Way {
    Task,
    Blocking,
}

const WAYS: [Way; 2] = [Way::Task, Way::Blocking];

impl Fixture {
    fn new(e_tag: Option<&'static str>) -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let bytes = some_bytes(SIZE);
        let server = Server::new(State { body: bytes.clone(), e_tag, ..State::default() });
        let backing =
            ObjectBacking::open(Arc::new(HttpStore(server.clone())), Path::from("x"), runtime.handle()).unwrap();
        Self { runtime, server, bytes, backing: Arc::new(backing) }
    }

    fn tagged() -> Self {
        Self::new(Some("\"first\""))
    }

    fn fail(&self, faults: impl IntoIterator<Item = Fault>) {
        self.server.lock().faults.extend(faults);
    }

    fn read(&self, way: Way, at: u64, lens: &[usize]) -> io::Result<Vec<u8>> {
        let mut memory = Memory::new();
        let (read, done) = read_of(&mut memory, at, lens);
        let io = Io::new(self.backing.clone(), Arc::new(Workers::new(1)));
        match way {
            Way::Task => io.read(read, Urgency::Awaited),
            Way::Blocking => io.read_here(read),
        }
        let bytes = done.recv().unwrap()?;
        Ok(memory.read(lens)[..bytes].to_vec())
    }
}

#[test]
fn an_object_is_read_into_pieces_up_to_its_end() {
    for e_tag in [None, Some("\"tag\""), Some("W/\"weak\"")] {
        for way in WAYS {
            let f = Fixture::new(e_tag);
            assert_eq!(f.backing.len().unwrap(), SIZE as u64);
            assert_eq!(f.read(way, 0, &[4096, 1, 3000]).unwrap(), f.bytes[..7097], "{way:?} {e_tag:?}");
            assert_eq!(f.read(way, 9000, &[500, 4096]).unwrap(), f.bytes[9000..]);
            f.server.take_asked();
            assert_eq!(f.read(way, SIZE as u64, &[9]).unwrap(), b"");
            assert_eq!(f.read(way, u64::MAX - 9, &[9]).unwrap(), b"");
            assert_eq!(f.server.take_asked(), [], "nothing is asked for beyond the end");
        }
    }
}

#[test]
fn reads_wait_side_by_side() {
    let f = Fixture::tagged();
    const READS: usize = 16;
    // Answered one after another, the first would wait for ever.
    f.server.lock().answers_from = READS;
    let io = Io::new(f.backing.clone(), Arc::new(Workers::new(1)));
    let mut memory: Vec<_> = (0..READS).map(|_| Memory::new()).collect();
    let begin = |(i, memory): (usize, &mut Memory)| {
        let (read, done) = read_of(memory, i as u64 * 100, &[100]);
        io.read(read, Urgency::Ahead);
        done
    };
    let done: Vec<_> = memory.iter_mut().enumerate().map(begin).collect();
    for (i, done) in done.into_iter().enumerate() {
        assert_eq!(done.recv().unwrap().unwrap(), 100);
        assert_eq!(memory[i].read(&[100]), f.bytes[i * 100..][..100]);
    }
}

#[test]
fn a_cut_or_short_body_goes_on_where_it_ended() {
    for way in WAYS {
        let f = Fixture::tagged();
        // 5000 bytes: the store reports the cut. 3999: it does not.
        f.fail([Fault::Cut(1001), Fault::Cut(10), Fault::Short(1989), Fault::Status(500)]);
        assert_eq!(f.read(way, 100, &[4000, 1000]).unwrap(), f.bytes[100..5100], "{way:?}");
        assert_eq!(f.server.take_asked(), [100..5100, 1101..5100, 1111..5100, 3100..5100, 3100..5100]);
    }
}

#[test]
fn a_server_that_fails_again_and_again_fails_the_read() {
    for way in WAYS {
        let f = Fixture::tagged();
        f.fail([Fault::Status(500); ATTEMPTS as usize - 1]);
        assert_eq!(f.read(way, 0, &[10]).unwrap(), f.bytes[..10]);
        f.server.take_asked();
        f.fail([Fault::Status(500); ATTEMPTS as usize]);
        assert_eq!(f.read(way, 0, &[10]).unwrap_err().kind(), ErrorKind::Other, "{way:?}");
        f.fail([Fault::Cut(0); ATTEMPTS as usize]);
        f.read(way, 0, &[10]).unwrap_err();
        assert_eq!(f.server.take_asked().len(), 2 * ATTEMPTS as usize);
        assert_eq!(f.read(way, 0, &[10]).unwrap(), f.bytes[..10], "nothing is left of the failure");
    }
}

#[test]
fn what_will_fail_again_is_not_repeated() {
    for (status, kind) in [(404, ErrorKind::NotFound), (403, ErrorKind::PermissionDenied)] {
        let f = Fixture::tagged();
        f.fail([Fault::Status(status)]);
        assert_eq!(f.read(Way::Task, 0, &[10]).unwrap_err().kind(), kind);
        assert_eq!(f.server.take_asked().len(), 1);
    }
}

#[test]
fn an_object_that_was_replaced_is_an_error_and_never_mixed() {
    for way in WAYS {
        for (e_tag, ignores_conditions) in [(Some("\"first\""), false), (Some("\"first\""), true), (None, true)] {
            let f = Fixture::new(e_tag);
            assert_eq!(f.read(way, 0, &[10]).unwrap(), f.bytes[..10]);
            let replace = || {
                let mut server = f.server.lock();
                (server.e_tag, server.modified) = (e_tag.map(|_| "\"second\""), 1);
                (server.body, server.ignores_conditions) = (vec![0; SIZE], ignores_conditions);
            };
            replace();
            let stale = f.read(way, 0, &[10]).unwrap_err();
            assert_eq!(stale.kind(), ErrorKind::StaleNetworkFileHandle, "{way:?} {e_tag:?} {stale}");
        }
    }
}

/// Between the two requests of one read.
#[test]
fn an_object_that_is_replaced_after_a_cut_is_an_error() {
    let f = Fixture::tagged();
    f.fail([Fault::Cut(1000), Fault::Status(412)]);
    assert_eq!(f.read(Way::Task, 0, &[3000]).unwrap_err().kind(), ErrorKind::StaleNetworkFileHandle);
}

#[test]
fn an_answer_to_another_question_is_refused() {
    for fault in [Fault::Long(1), Fault::Long(5000), Fault::Late(1)] {
        for way in WAYS {
            let f = Fixture::tagged();
            f.fail([fault]);
            assert_eq!(f.read(way, 0, &[3000]).unwrap_err().kind(), ErrorKind::InvalidData, "{way:?} {fault:?}");
        }
    }
}

#[test]
fn changes_are_refused() {
    let f = Fixture::tagged();
    assert_eq!(
        f.backing.write_vectored_at(&[IoSlice::new(b"x")], 0).unwrap_err().kind(),
        ErrorKind::ReadOnlyFilesystem
    );
    assert_eq!(f.backing.set_len(0).unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
    f.backing.sync().unwrap();
    let mut memory = Memory::new();
    let (write, done) = write_of(&mut memory, 0, &[9]);
    Io::new(f.backing.clone(), Arc::new(Workers::new(1))).write(write, Urgency::Ahead);
    assert_eq!(done.recv().unwrap().unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
}

#[test]
fn a_runtime_that_has_shut_down_fails_reads() {
    let f = Fixture::tagged();
    let Fixture { runtime, server, backing, .. } = f;
    drop(runtime);
    let f = Fixture { runtime: Builder::new_current_thread().build().unwrap(), server, bytes: Vec::new(), backing };
    for way in WAYS {
        f.read(way, 0, &[9]).unwrap_err();
    }
}

#[test]
fn a_runtime_of_one_thread_does_not_wait_for_itself() {
    let f = Fixture::tagged();
    let runtime = Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let store = Arc::new(HttpStore(f.server.clone()));
        let backing = ObjectBacking::open_async(store, Path::from("x")).await.unwrap();
        let refused = backing.read_vectored_at(&mut [IoSliceMut::new(&mut [0; 9])], 0).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Deadlock);
    });
}

#[test]
fn a_forked_child_is_told_that_the_runtime_is_its_parents() {
    let f = Fixture::tagged();
    // SAFETY: the child calls what may be called there, and ends without running anything else.
    match unsafe { libc::fork() } {
        0 => {
            let is_refused = WAYS.iter().all(|&way| f.read(way, 0, &[9]).is_err());
            // SAFETY: ends the child.
            unsafe { libc::_exit(if is_refused { 7 } else { 1 }) };
        }
        child => {
            assert!(child > 0);
            let mut status = 0;
            // SAFETY: writes the status.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 7));
        }
    }
}
