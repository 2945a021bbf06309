//! Acting as the user that a request comes from.
//!
//! The kernel checks permissions, not this program: a thread takes on the caller's user, group and groups for what it does
//! with files (setfsuid(2)), and is the server again afterwards. The kernel takes the privileges over files away for that
//! time, unless the caller is root and root is not squashed.
//!
//! - C1 A thread that cannot take on a caller does nothing for it.
//! - C2 A thread that cannot become the server again ends the process: it would serve the next caller as this one.
use std::cell::Cell;
use std::io;

use rustix::fs::Mode;
use rustix::thread::UnshareFlags;

use crate::call::{Caller, Credential};
use crate::error::{AS_ROOT, Error};
use crate::syscalls::{set_fs_group, set_fs_user, set_groups};

/// Nobody.
pub(crate) const ANONYMOUS: u32 = 65534;

/// Whom requests are served as.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Squash {
    /// Root of a client is nobody here.
    pub(crate) root: bool,
}

impl Squash {
    /// Who the request is served as.
    pub(crate) fn caller(self, credential: &Credential) -> Caller {
        match credential {
            Credential::None => Caller { uid: ANONYMOUS, gid: ANONYMOUS, groups: Vec::new() },
            Credential::Sys(caller) if self.root => {
                let squashed = |id: u32| if id == 0 { ANONYMOUS } else { id };
                if caller.uid == 0 {
                    return Caller { uid: ANONYMOUS, gid: ANONYMOUS, groups: Vec::new() };
                }
                Caller {
                    uid: caller.uid,
                    gid: squashed(caller.gid),
                    groups: caller.groups.iter().map(|&group| squashed(group)).collect(),
                }
            }
            Credential::Sys(caller) => caller.clone(),
        }
    }
}

thread_local! {
    /// Whether the mask of this thread's new files is its own, and empty: modes are the client's.
    static HAS_MASK: Cell<bool> = const { Cell::new(false) };
}

/// Fails unless this process may act for others.
pub(crate) fn expect_privileges() -> Result<(), Error> {
    act_as(&Caller { uid: ANONYMOUS, gid: ANONYMOUS, groups: Vec::new() }, || Ok(())).map_err(|_| {
        let lacks = "this process may not act for other users (it lacks CAP_SETUID or CAP_SETGID)";
        Error::new(lacks, AS_ROOT)
    })
}

/// Does something as the caller.
///
/// # Errors
/// The thread cannot act as this user (C1); and whatever `work` fails with.
pub(crate) fn act_as<T>(caller: &Caller, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    if !HAS_MASK.get() {
        // SAFETY: only the working folder and the mask stop being shared with other threads, on which nothing here relies.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }?;
        rustix::process::umask(Mode::empty());
        HAS_MASK.set(true);
    }
    // A thread that may not do this has changed nothing, and could not become the server again either.
    set_groups(&caller.groups)?;
    let server = Server;
    // The user last: this takes the privileges away.
    if !set_fs_group(caller.gid) || !set_fs_user(caller.uid) {
        return Err(rustix::io::Errno::PERM.into());
    }
    let done = work();
    drop(server);
    done
}

/// Becomes the server again, whatever ends the work.
struct Server;

impl Drop for Server {
    fn drop(&mut self) {
        // The user first: this gives the privileges back.
        let is_server = set_fs_user(0) && set_fs_group(0) && set_groups(&[]).is_ok();
        if !is_server {
            std::process::abort();
        }
    }
}
