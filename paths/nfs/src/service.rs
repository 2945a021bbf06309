//! What answers requests: which program and procedure a request is for.
use crate::call::{Answer, Call};
use crate::mount::{self, Mounts};
use crate::nfs::{self, Nfs};
use crate::reply_cache::{Lookup, ReplyCache};
use crate::server::Service;

/// Both programs, on one port.
pub(crate) struct Programs {
    nfs: Nfs,
    mounts: Mounts,
    replies: ReplyCache,
    /// Whether ports are served that any user of a client's machine may use.
    is_insecure: bool,
}

/// The lowest port that any user may use.
const UNPRIVILEGED: u16 = 1024;

impl Programs {
    pub(crate) fn new(nfs: Nfs, is_insecure: bool) -> Self {
        Self { nfs, mounts: Mounts::default(), replies: ReplyCache::default(), is_insecure }
    }

    /// Closes files that nobody uses any more; to be called every few seconds.
    pub(crate) fn tidy(&self) {
        self.nfs.data.close_idle();
    }

    /// Puts everything on the disk that clients wrote.
    ///
    /// # Errors
    /// Unstable writes are lost. A client learns of it from the next server's verifier.
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
            (nfs::PROGRAM, 3) if is_not_idempotent(call.procedure) => match self.replies.look_up(call) {
                Lookup::Answered(results) => Answer::Results(results),
                Lookup::InProgress => Answer::Nothing,
                Lookup::New(pending) => {
                    let answer = self.nfs.answer(call);
                    if let Answer::Results(results) = &answer {
                        pending.answered(results);
                    }
                    answer
                }
            },
            (nfs::PROGRAM, 3) => self.nfs.answer(call),
            (mount::PROGRAM, 3) => self.mounts.answer(&self.nfs.export, call),
            (nfs::PROGRAM | mount::PROGRAM, _) => Answer::NoVersion(3, 3),
            _ => Answer::NoProgram,
        }
    }
}

/// Requests that must not be carried out twice: SETATTR, WRITE (the second one could undo another that came between), and
/// those that make, remove, rename and link.
fn is_not_idempotent(procedure: u32) -> bool {
    matches!(procedure, 2 | 7..=15)
}
