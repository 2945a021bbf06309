//! What answers requests: which program a request is for, and answers that are given twice.
//!
//! A client that loses its connection sends a request again that may have been carried out. To remove a file twice is an
//! error the second time, and would be told to a program that has removed it once. So answers to requests that change something
//! are kept for a while, and given again to the same request of the same client.
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::call::{Answer, Call};
use crate::mount::{self, Mounts};
use crate::nfs::{self, Nfs};
use crate::server::Service;

/// Answers that are kept, unless they are older.
const KEPT: usize = 1 << 16;
/// A client that has lost its connection asks again within this time.
const KEPT_FOR: Duration = Duration::from_secs(120);

/// Both programs, on one port.
pub(crate) struct Programs {
    nfs: Nfs,
    mounts: Mounts,
    given: Given,
    /// Whether ports are served that any user of a client's machine may use.
    is_insecure: bool,
}

/// The lowest port that any user may use.
const UNPRIVILEGED: u16 = 1024;

impl Programs {
    pub(crate) fn new(nfs: Nfs, is_insecure: bool) -> Self {
        Self { nfs, mounts: Mounts::default(), given: Given::default(), is_insecure }
    }

    /// Closes files that nobody uses any more; to be called every few seconds.
    pub(crate) fn tidy(&self) {
        self.nfs.data.close_idle();
    }

    /// Puts everything on the disk that clients wrote.
    ///
    /// # Errors
    /// Data are lost that a client may believe written, unless it asks for the verifier of a later server.
    pub(crate) fn close(&self) -> std::io::Result<()> {
        self.nfs.data.sync_all()
    }
}

impl Service for Programs {
    fn answer(&self, call: &mut Call<'_>) -> Answer {
        // Procedure 0 of every program does nothing; it is how a client finds out that there is a server.
        if call.peer.port() >= UNPRIVILEGED && !self.is_insecure && call.procedure != 0 {
            return Answer::TooWeak;
        }
        match (call.program, call.version) {
            (nfs::PROGRAM, 3) if changes(call.procedure) => {
                let asked = self.given.asked(call);
                match self.given.begin(asked) {
                    Begun::First => {}
                    Begun::Given(results) => return Answer::Results(results),
                    Begun::InProgress => return Answer::Nothing,
                }
                let forget = Forget(&self.given, asked);
                let answer = self.nfs.answer(call);
                if let Answer::Results(results) = &answer {
                    self.given.keep(asked, results);
                    std::mem::forget(forget);
                }
                answer
            }
            (nfs::PROGRAM, 3) => self.nfs.answer(call),
            (mount::PROGRAM, 3) => self.mounts.answer(&self.nfs.export, call),
            (nfs::PROGRAM | mount::PROGRAM, _) => Answer::NoVersion(3, 3),
            _ => Answer::NoProgram,
        }
    }
}

/// Requests that must not be carried out twice: SETATTR, WRITE (the second one could undo another that came between), and
/// those that make, remove, rename and link.
fn changes(procedure: u32) -> bool {
    matches!(procedure, 2 | 7..=15)
}

/// A request, told apart from others of the same client: by its port too, which a client keeps when it connects again.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Asked {
    peer: SocketAddr,
    xid: u32,
    procedure: u32,
    args: u64,
}

enum Begun {
    First,
    InProgress,
    Given(Vec<u8>),
}

/// Answers that were given, the oldest first in `order`.
#[derive(Default)]
struct Given {
    answers: Mutex<Answers>,
    hasher: RandomState,
}

#[derive(Default)]
struct Answers {
    /// None while the request is carried out.
    by_request: HashMap<Asked, Option<Vec<u8>>>,
    order: VecDeque<(Instant, Asked)>,
}

impl Given {
    fn asked(&self, call: &Call<'_>) -> Asked {
        Asked { peer: call.peer, xid: call.xid, procedure: call.procedure, args: self.hasher.hash_one(call.args) }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Answers> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, asked: Asked) -> Begun {
        let mut answers = self.lock();
        match answers.by_request.get(&asked) {
            Some(Some(results)) => return Begun::Given(results.clone()),
            Some(None) => return Begun::InProgress,
            None => {}
        }
        answers.by_request.insert(asked, None);
        Begun::First
    }

    fn keep(&self, asked: Asked, results: &[u8]) {
        let mut answers = self.lock();
        answers.by_request.insert(asked, Some(results.to_vec()));
        answers.order.push_back((Instant::now(), asked));
        while let Some(&(since, oldest)) = answers.order.front()
            && (answers.order.len() > KEPT || since.elapsed() > KEPT_FOR)
        {
            answers.order.pop_front();
            answers.by_request.remove(&oldest);
        }
    }
}

/// Forgets a request that came to no answer, also if it panics.
struct Forget<'a>(&'a Given, Asked);

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.0.lock().by_request.remove(&self.1);
    }
}
