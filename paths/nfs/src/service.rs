//! What answers requests: which program and procedure a request is for.
use nfs3_types::rpc::auth_stat;
use nfs3_types::{mount, nfs3};

use crate::call::{Answer, Call, Pace, Status};
use crate::mount::Mounts;
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
pub(crate) const UNPRIVILEGED: u16 = 1024;

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
    fn pace(&self, [program, version, procedure]: [u32; 3]) -> Pace {
        match (program, version) {
            (nfs3::PROGRAM, nfs3::VERSION) => nfs::pace(procedure),
            _ => Pace::Slow,
        }
    }

    fn answer(&self, call: &mut Call<'_>) -> Answer {
        // Procedure 0 of every program does nothing; it is how a client finds out that there is a server.
        if call.peer.port() >= UNPRIVILEGED && !self.is_insecure && call.procedure != 0 {
            return Answer::Refused(Status::Auth(auth_stat::AUTH_TOOWEAK));
        }
        match (call.program, call.version) {
            (nfs3::PROGRAM, nfs3::VERSION) if nfs::is_idempotent(call.procedure) => self.nfs.answer(call),
            (nfs3::PROGRAM, nfs3::VERSION) => match self.replies.look_up(call) {
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
            (mount::PROGRAM, mount::VERSION) => self.mounts.answer(&self.nfs.export, call),
            (nfs3::PROGRAM, _) => Answer::Refused(Status::NoVersion(nfs3::VERSION, nfs3::VERSION)),
            (mount::PROGRAM, _) => Answer::Refused(Status::NoVersion(mount::VERSION, mount::VERSION)),
            _ => Answer::Refused(Status::NoProgram),
        }
    }
}
