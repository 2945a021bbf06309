//! A backing in memory that fails, lies and waits as a test tells it to. Included by the unit tests of the page cache too, so it
//! takes what it needs from the module above.
use super::{Backing, ReadTransfer, WriteTransfer};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What has not come by then never comes.
const PATIENCE: Duration = Duration::from_secs(600);

/// What happens to a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// It is served as usual.
    None,
    /// So many bytes are moved at most.
    Short(usize),
    Error(ErrorKind),
    /// It claims so many bytes more than it was asked for.
    Lie(usize),
    Panic,
}

/// A request, as it arrived. A transfer that is kept is no request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Asked {
    Read { at: u64, bytes: usize, slices: usize },
    Write { at: u64, bytes: usize, slices: usize },
    Sync,
    SetLen(u64),
}

/// A transfer that was begun and kept.
#[derive(Debug)]
pub(crate) enum Kept {
    Read(ReadTransfer),
    Write(WriteTransfer),
}

impl Kept {
    pub(crate) fn complete(self, result: io::Result<usize>) {
        match self {
            Self::Read(read) => read.complete(result),
            Self::Write(write) => write.complete(result),
        }
    }
}

#[derive(Debug, Default)]
struct State {
    bytes: Vec<u8>,
    faults: VecDeque<Fault>,
    asked: Vec<Asked>,
    kept: VecDeque<Kept>,
    keeps: bool,
    is_closed: bool,
    /// Requests at the gate.
    waiting: usize,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct FakeBacking {
    state: Mutex<State>,
    changed: Condvar,
    largest: usize,
}

impl FakeBacking {
    pub(crate) fn new(bytes: impl Into<Vec<u8>>) -> Arc<Self> {
        Self::with_largest(bytes, usize::MAX)
    }

    /// One that wants no request with more bytes than `largest`.
    pub(crate) fn with_largest(bytes: impl Into<Vec<u8>>, largest: usize) -> Arc<Self> {
        let state = State { bytes: bytes.into(), ..State::default() };
        Arc::new(Self { state: Mutex::new(state), changed: Condvar::new(), largest })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[track_caller]
    fn until<T>(&self, what: &str, mut have: impl FnMut(&mut State) -> Option<T>) -> T {
        let mut state = self.lock();
        loop {
            if let Some(got) = have(&mut state) {
                return got;
            }
            let (back, timeout) = self.changed.wait_timeout(state, PATIENCE).unwrap_or_else(PoisonError::into_inner);
            assert!(!timeout.timed_out(), "{what} never came");
            state = back;
        }
    }

    /// The next reads and writes go so, one after another.
    pub(crate) fn fail(&self, faults: impl IntoIterator<Item = Fault>) {
        self.lock().faults.extend(faults);
    }

    /// From now on, reads and writes wait until [`open`](Self::open).
    pub(crate) fn close(&self) {
        self.lock().is_closed = true;
    }

    pub(crate) fn open(&self) {
        self.lock().is_closed = false;
        self.changed.notify_all();
    }

    /// Waits until so many reads and writes wait.
    #[track_caller]
    pub(crate) fn until_waiting(&self, n: usize) {
        self.until("a request that waits", |state| (state.waiting == n).then_some(()));
    }

    /// From now on, transfers are begun and kept for the test to complete.
    pub(crate) fn keep_transfers(&self, keeps: bool) {
        self.lock().keeps = keeps;
    }

    /// The oldest transfer that is kept. Waits for one.
    #[track_caller]
    pub(crate) fn take_kept(&self) -> Kept {
        self.until("a transfer", |state| state.kept.pop_front())
    }

    pub(crate) fn kept(&self) -> usize {
        self.lock().kept.len()
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.lock().bytes.clone()
    }

    /// The requests since the last call.
    pub(crate) fn take_asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.lock().asked)
    }

    /// Notes a request, waits at the gate, and returns what happens to it.
    fn arrive(&self, asked: Asked) -> (MutexGuard<'_, State>, Fault) {
        let mut state = self.lock();
        state.asked.push(asked);
        let fault = state.faults.pop_front().unwrap_or(Fault::None);
        state.waiting += 1;
        self.changed.notify_all();
        while state.is_closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting -= 1;
        (state, fault)
    }
}

/// Moves bytes as the fault says; `all` moves so many at most.
fn serve(fault: Fault, asked: usize, all: impl FnOnce(usize) -> usize) -> io::Result<usize> {
    match fault {
        Fault::None => Ok(all(usize::MAX)),
        Fault::Short(bytes) => Ok(all(bytes)),
        Fault::Error(kind) => Err(kind.into()),
        Fault::Lie(more) => Ok(asked + more),
        Fault::Panic => std::panic::resume_unwind(Box::new("a backing's panic")),
    }
}

impl Backing for FakeBacking {
    fn len(&self) -> io::Result<u64> {
        Ok(self.lock().bytes.len() as u64)
    }

    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        let bytes = into.iter().map(|slice| slice.len()).sum();
        let (state, fault) = self.arrive(Asked::Read { at, bytes, slices: into.len() });
        serve(fault, bytes, |most| {
            let rest = state.bytes.get(at as usize..).unwrap_or_default();
            let mut rest = &rest[..rest.len().min(most)];
            into.iter_mut().map(|slice| rest.read(slice).unwrap()).sum()
        })
    }

    fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        let bytes = from.iter().map(|slice| slice.len()).sum();
        let (mut state, fault) = self.arrive(Asked::Write { at, bytes, slices: from.len() });
        serve(fault, bytes, |most| {
            let end = at as usize + bytes.min(most);
            let len = state.bytes.len().max(end);
            state.bytes.resize(len, 0);
            let mut rest = &mut state.bytes[at as usize..end];
            from.iter().map(|slice| rest.write(slice).unwrap()).sum()
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.lock().asked.push(Asked::Sync);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut state = self.lock();
        state.asked.push(Asked::SetLen(len));
        state.bytes.resize(len as usize, 0);
        Ok(())
    }

    fn start_read(&self, read: ReadTransfer) -> Option<ReadTransfer> {
        let mut state = self.lock();
        if !state.keeps {
            return Some(read);
        }
        state.kept.push_back(Kept::Read(read));
        self.changed.notify_all();
        None
    }

    fn start_write(&self, write: WriteTransfer) -> Option<WriteTransfer> {
        let mut state = self.lock();
        if !state.keeps {
            return Some(write);
        }
        state.kept.push_back(Kept::Write(write));
        self.changed.notify_all();
        None
    }

    fn largest(&self) -> usize {
        self.largest
    }
}
