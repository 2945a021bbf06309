//! What the fuzz target calls.
use std::cell::RefCell;

use nfs3_types::mount::{self, MOUNT_PROGRAM};
use nfs3_types::nfs3;
use pagemill::{Allocator, PageCache};

use crate::call::{Answer, Call, Caller, Credential, Payload};
use crate::credentials::Squash;
use crate::data::Data;
use crate::export::{Export, ExportSettings};
use crate::nfs::Nfs;
use crate::pages::PageArray;
use crate::server::Service;
use crate::service::Programs;
use crate::{record, server};

/// What the transport does with a peer's bytes, as one record and as a stream. It must not panic.
pub fn check_bytes(bytes: &[u8]) {
    thread_local! {
        static ARRAY: RefCell<PageArray> = RefCell::new(PageArray::new(Allocator::global(), Default::default()));
    }
    record::check_record(bytes);
    ARRAY.with_borrow_mut(|array| server::check_stream(bytes, array));
}

/// A server of a directory with a file, a directory and a link, which is not changed.
struct Served {
    programs: Programs,
    root: Vec<u8>,
    _folder: tempfile::TempDir,
}

impl Served {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder for the tree");
        let tree = folder.path().join("tree");
        std::fs::create_dir_all(tree.join("dir")).expect("a directory in it");
        std::fs::write(tree.join("file"), vec![7; 10_000]).expect("a file in it");
        std::os::unix::fs::symlink("file", tree.join("link")).expect("a link in it");
        let key = folder.path().join("key");
        let settings = ExportSettings { directory: tree, key, read_only: true, squash: Squash { root: false } };
        let export = Export::open(&settings).expect("an export, for which this runs as root");
        let data = Data::new(PageCache::builder(Allocator::global()).build());
        let programs = Programs::new(Nfs::new(export, data), false);
        let args = [&[0, 0, 0, 1][..], b"/\0\0\0"].concat();
        let mounted = ask(&programs, mount::PROGRAM, MOUNT_PROGRAM::MOUNTPROC3_MNT as u32, &args);
        let Answer::Results(mounted) = mounted else { panic!("{mounted:?}") };
        // After the status: the handle, with its length before it.
        let len = usize::from(mounted[7]).next_multiple_of(4);
        let root = mounted[4..8 + len].to_vec();
        Self { programs, root, _folder: folder }
    }
}

fn ask(programs: &Programs, program: u32, procedure: u32, args: &[u8]) -> Answer {
    programs.answer(&mut Call {
        xid: 1,
        program,
        version: nfs3::VERSION,
        procedure,
        credential: Credential::Sys(Caller { uid: 0, gid: 0, groups: Vec::new() }),
        peer: ([127, 0, 0, 1], 700).into(),
        args,
        payload: Payload { pages: &mut [], len: 0 },
    })
}

/// A procedure with these arguments, on the tree's root or on what they say. It must not panic, and a file system that is
/// served read-only stays as it is.
pub fn check_procedure(bytes: &[u8]) {
    thread_local! {
        static SERVED: Served = Served::new();
    }
    let Some((&choice, args)) = bytes.split_first() else { return };
    SERVED.with(|served| {
        let program = if choice & 0x80 == 0 { nfs3::PROGRAM } else { mount::PROGRAM };
        let with_root = [&served.root, args].concat();
        let args = if choice & 0x40 == 0 { &with_root } else { args };
        ask(&served.programs, program, u32::from(choice & 0x1f), args);
    });
}
