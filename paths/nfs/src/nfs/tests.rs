//! Each procedure as RFC 1813 has it, errors included, by requests in XDR on a real directory.
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use nfs3_types::mount::{dirpath, mountres3, mountstat3};
use nfs3_types::nfs3::{self, *};
use nfs3_types::rpc::auth_stat;
use nfs3_types::xdr_codec::{Opaque, Pack, Unpack, Void};
use pagemill::{Allocator, Gfp, Page, PageCache};

use crate::call::{Answer, Call, Caller, Credential, Pace, Payload, Status};
use crate::credentials::Squash;
use crate::data::Data;
use crate::export::{Export, ExportSettings};
use crate::handles::Key;
use crate::nfs::Nfs;
use crate::server::Service;
use crate::service::Programs;
use crate::xdr::pack;

/// A server, and the directory that it serves.
struct Served {
    programs: Programs,
    folder: tempfile::TempDir,
    allocator: Allocator,
    xid: AtomicU32,
    caller: Caller,
}

fn user(uid: u32) -> Caller {
    Caller { uid, gid: uid, groups: Vec::new() }
}

impl Served {
    fn new() -> Self {
        Self::with(false, false)
    }

    /// The directory `tree` in the folder is served. Root is root unless it is squashed.
    fn with(read_only: bool, squash: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("tree")).unwrap();
        for path in [folder.path().to_owned(), folder.path().join("tree")] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        Self::of(folder, read_only, squash)
    }

    fn of(folder: tempfile::TempDir, read_only: bool, squash: bool) -> Self {
        let (directory, key) = (folder.path().join("tree"), folder.path().join("key"));
        let settings = ExportSettings { directory, key, read_only, squash: Squash { root: squash } };
        let export = Export::open(&settings).unwrap();
        let allocator = Allocator::builder().pages(8192).build().unwrap();
        let data = Data::new(PageCache::builder(&allocator).build());
        let programs = Programs::new(Nfs::new(export, data), false);
        Self { programs, folder, allocator, xid: AtomicU32::new(1), caller: user(0) }
    }

    /// A server that is started again on the same directory.
    fn restarted(self) -> Self {
        let Self { folder, programs, .. } = self;
        drop(programs);
        Self::of(folder, false, false)
    }

    fn by(self, caller: Caller) -> Self {
        Self { caller, ..self }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("tree").join(name)
    }

    fn answer(&self, program: u32, procedure: u32, args: &[u8], payload: &mut [Option<Page>], len: usize) -> Answer {
        let mut call = Call {
            xid: self.xid.fetch_add(1, Relaxed),
            program,
            version: 3,
            procedure,
            credential: Credential::Sys(self.caller.clone()),
            peer: "127.0.0.1:700".parse().unwrap(),
            args,
            payload: Payload { pages: payload, len },
        };
        self.programs.answer(&mut call)
    }

    /// Results in XDR, with what is lent.
    fn results(&self, procedure: u32, args: &[u8]) -> Vec<u8> {
        match self.answer(nfs3::PROGRAM, procedure, args, &mut [], 0) {
            Answer::Results(results) => results,
            Answer::Lent(mut results, lent) => {
                lent.slices().iter().for_each(|slice| results.extend_from_slice(slice));
                results.resize(results.len().next_multiple_of(4), 0);
                results
            }
            other => panic!("{other:?}"),
        }
    }

    /// The results, all of which have to be read.
    fn ask<R: Unpack>(&self, procedure: u32, args: &impl Pack) -> R {
        read(&self.results(procedure, &pack(args)))
    }

    fn mount(&self, path: &str) -> Result<nfs_fh3, mountstat3> {
        let args = pack(&dirpath(Opaque::borrowed(path.as_bytes())));
        let Answer::Results(results) = self.answer(nfs3_types::mount::PROGRAM, 1, &args, &mut [], 0) else { panic!() };
        match read(&results) {
            mountres3::Ok(ok) => {
                assert_eq!(ok.auth_flavors, [1]);
                Ok(nfs_fh3 { data: ok.fhandle.0 })
            }
            mountres3::Err(status) => Err(status),
        }
    }

    fn root(&self) -> nfs_fh3 {
        self.mount("/").unwrap()
    }

    fn lookup(&self, dir: &nfs_fh3, name: &[u8]) -> Result<(nfs_fh3, fattr3), nfsstat3> {
        match self.ask::<LOOKUP3res>(3, &LOOKUP3args { what: entry(dir, name) }) {
            LOOKUP3res::Ok(ok) => {
                assert!(ok.dir_attributes.is_some());
                Ok((ok.object, ok.obj_attributes.unwrap()))
            }
            LOOKUP3res::Err((status, _)) => Err(status),
        }
    }

    fn file(&self, name: &str) -> nfs_fh3 {
        self.lookup(&self.root(), name.as_bytes()).unwrap().0
    }

    fn getattr(&self, object: &nfs_fh3) -> Result<fattr3, nfsstat3> {
        match self.ask::<GETATTR3res>(1, &GETATTR3args { object: object.clone() }) {
            GETATTR3res::Ok(ok) => Ok(ok.obj_attributes),
            GETATTR3res::Err((status, Void)) => Err(status),
        }
    }

    fn setattr(&self, object: &nfs_fh3, new_attributes: sattr3, guard: sattrguard3) -> nfsstat3 {
        let args = SETATTR3args { object: object.clone(), new_attributes, guard };
        status(&self.ask::<SETATTR3res>(2, &args))
    }

    fn create(&self, dir: &nfs_fh3, name: &[u8], how: createhow3) -> Result<nfs_fh3, nfsstat3> {
        match self.ask::<CREATE3res>(8, &CREATE3args { where_: entry(dir, name), how }) {
            CREATE3res::Ok(ok) => {
                assert!(ok.dir_wcc.before.is_some() && ok.dir_wcc.after.is_some() && ok.obj_attributes.is_some());
                Ok(ok.obj.unwrap())
            }
            CREATE3res::Err((status, _)) => Err(status),
        }
    }

    fn write(&self, file: &nfs_fh3, offset: u64, bytes: &[u8], stable: stable_how) -> Result<WRITE3resok, nfsstat3> {
        let mut args = pack(file);
        args.extend_from_slice(&pack(&offset));
        args.extend_from_slice(&pack(&(bytes.len() as u32)));
        args.extend_from_slice(&pack(&stable));
        args.extend_from_slice(&pack(&(bytes.len() as u32)));
        let page = |bytes: &[u8]| {
            let mut page = self.allocator.alloc_page(Gfp::KERNEL).unwrap();
            page[..bytes.len()].copy_from_slice(bytes);
            Some(page)
        };
        let mut pages: Vec<_> = bytes.chunks(4096).map(page).collect();
        let answer = self.answer(nfs3::PROGRAM, 7, &args, &mut pages, bytes.len());
        let Answer::Results(results) = answer else { panic!("{answer:?}") };
        match read::<WRITE3res>(&results) {
            WRITE3res::Ok(ok) => Ok(ok),
            WRITE3res::Err((status, _)) => Err(status),
        }
    }

    fn read(&self, file: &nfs_fh3, offset: u64, count: u32) -> Result<(Vec<u8>, bool), nfsstat3> {
        match self.ask::<READ3res<'static>>(6, &READ3args { file: file.clone(), offset, count }) {
            READ3res::Ok(ok) => {
                assert_eq!(ok.count as usize, ok.data.len());
                assert!(ok.file_attributes.is_some());
                Ok((ok.data.to_vec(), ok.eof))
            }
            READ3res::Err((status, _)) => Err(status),
        }
    }

    fn readdir(&self, dir: &nfs_fh3, cookie: u64, count: u32) -> Result<(Vec<entry3<'static>>, bool), nfsstat3> {
        let args = READDIR3args { dir: dir.clone(), cookie, cookieverf: cookieverf3::default(), count };
        let results = self.results(16, &pack(&args));
        match read::<READDIR3res<'static>>(&results) {
            READDIR3res::Ok(ok) => {
                assert!(results.len() <= count as usize, "{} bytes, and {count} are wanted", results.len());
                Ok((ok.reply.entries.0, ok.reply.eof))
            }
            READDIR3res::Err((status, _)) => Err(status),
        }
    }

    fn access(&self, object: &nfs_fh3, access: u32) -> u32 {
        let args = ACCESS3args { object: object.clone(), access };
        self.ask::<ACCESS3res>(4, &args).unwrap().access
    }
}

fn entry<'a>(dir: &nfs_fh3, name: &'a [u8]) -> diropargs3<'a> {
    diropargs3 { dir: dir.clone(), name: name.into() }
}

#[track_caller]
fn read<R: Unpack>(results: &[u8]) -> R {
    let mut rest = results;
    let (read, len) = R::unpack(&mut rest).unwrap();
    assert_eq!((len, rest.len()), (results.len(), 0), "results and their length");
    read
}

fn status<T, E>(result: &Nfs3Result<T, E>) -> nfsstat3 {
    match result {
        Nfs3Result::Ok(_) => nfsstat3::NFS3_OK,
        Nfs3Result::Err((status, _)) => *status,
    }
}

fn mode(mode: u32) -> sattr3 {
    sattr3 { mode: Nfs3Option::Some(mode), ..sattr3::default() }
}

fn size(size: u64) -> sattr3 {
    sattr3 { size: Nfs3Option::Some(size), ..sattr3::default() }
}

const UNSTABLE: stable_how = stable_how::UNSTABLE;
const FILE_SYNC: stable_how = stable_how::FILE_SYNC;

#[test]
fn mount_gives_the_handle_of_the_tree_and_of_directories_below_it() {
    let served = Served::new();
    fs::create_dir_all(served.path("a/b")).unwrap();
    fs::write(served.path("file"), "").unwrap();
    symlink("/", served.path("out")).unwrap();
    let tree = served.path("").to_str().unwrap().trim_end_matches('/').to_owned();
    assert_eq!(served.mount(&tree).unwrap(), served.root());
    let below = served.mount(&format!("{tree}/a/b")).unwrap();
    assert_eq!(served.getattr(&below).unwrap().fileid, fs::metadata(served.path("a/b")).unwrap().ino());
    for (path, expected) in [
        ("/tmp", mountstat3::MNT3ERR_NOENT),
        (&format!("{tree}/missing"), mountstat3::MNT3ERR_NOENT),
        (&format!("{tree}/file"), mountstat3::MNT3ERR_NOTDIR),
        (&format!("{tree}/out"), mountstat3::MNT3ERR_NOTDIR),
        (&format!("{tree}/out/etc"), mountstat3::MNT3ERR_ACCES),
        (&format!("{tree}/a/../.."), mountstat3::MNT3ERR_ACCES),
        (&format!("{tree}x"), mountstat3::MNT3ERR_NOENT),
        (&format!("{tree}/a\0b"), mountstat3::MNT3ERR_INVAL),
    ] {
        assert_eq!(served.mount(path).unwrap_err() as u32, expected as u32, "{path}");
    }
}

#[test]
fn programs_versions_and_procedures_that_there_are_not_are_refused() {
    let served = Served::new();
    let ask = |program, version, procedure, port: u16| {
        let mut call = Call {
            xid: 1,
            program,
            version,
            procedure,
            credential: Credential::None,
            peer: ([127, 0, 0, 1], port).into(),
            args: &[],
            payload: Payload { pages: &mut [], len: 0 },
        };
        served.programs.answer(&mut call)
    };
    assert!(matches!(ask(100_003, 3, 0, 700), Answer::Results(results) if results.is_empty()));
    assert!(matches!(ask(100_005, 3, 0, 700), Answer::Results(results) if results.is_empty()));
    assert!(matches!(ask(100_003, 2, 0, 700), Answer::Refused(Status::NoVersion(3, 3))));
    assert!(matches!(ask(100_005, 1, 0, 700), Answer::Refused(Status::NoVersion(3, 3))));
    assert!(matches!(ask(100_021, 4, 0, 700), Answer::Refused(Status::NoProgram)));
    assert!(matches!(ask(100_003, 3, 22, 700), Answer::Refused(Status::NoProcedure)));
    assert!(matches!(ask(100_005, 3, 6, 700), Answer::Refused(Status::NoProcedure)));
    // Any user may have such a port, and could pass for another one; but may see that there is a server.
    assert!(matches!(ask(100_003, 3, 1, 1024), Answer::Refused(Status::Auth(auth_stat::AUTH_TOOWEAK))));
    assert!(matches!(ask(100_005, 3, 1, 60000), Answer::Refused(Status::Auth(auth_stat::AUTH_TOOWEAK))));
    assert!(matches!(ask(100_003, 3, 0, 60000), Answer::Results(_)));
    // Arguments cut short, and more than there should be.
    for procedure in 1..=21 {
        let root = pack(&served.root());
        for args in [&root[..root.len() - 4], &[0, 0, 0, 65], &[0xff; 40], &[root.clone(), vec![0xff; 9]].concat()] {
            let answer = served.answer(nfs3::PROGRAM, procedure, args, &mut [], 0);
            assert!(matches!(answer, Answer::Refused(Status::Garbage)), "procedure {procedure}: {answer:?}");
        }
    }
}

#[test]
fn getattr_shows_every_kind_of_file() {
    let served = Served::new();
    fs::write(served.path("file"), "hello").unwrap();
    fs::set_permissions(served.path("file"), fs::Permissions::from_mode(0o4751)).unwrap();
    std::os::unix::fs::chown(served.path("file"), Some(7), Some(8)).unwrap();
    fs::set_permissions(served.path("file"), fs::Permissions::from_mode(0o4751)).unwrap();
    symlink("to", served.path("link")).unwrap();
    let there = fs::metadata(served.path("file")).unwrap();
    let shown = served.getattr(&served.file("file")).unwrap();
    assert_eq!((shown.type_, shown.mode, shown.nlink, shown.size), (ftype3::NF3REG, 0o4751, 1, 5));
    assert_eq!((shown.uid, shown.gid, shown.fileid, shown.fsid), (7, 8, there.ino(), there.dev()));
    assert_eq!((i64::from(shown.mtime.seconds), i64::from(shown.mtime.nseconds)), (there.mtime(), there.mtime_nsec()));
    assert_eq!((i64::from(shown.ctime.seconds), i64::from(shown.ctime.nseconds)), (there.ctime(), there.ctime_nsec()));
    assert_eq!(served.getattr(&served.file("link")).unwrap().type_, ftype3::NF3LNK);
    assert_eq!(served.getattr(&served.root()).unwrap().type_, ftype3::NF3DIR);
}

#[test]
fn handles_that_are_forged_stale_or_of_another_export_are_refused() {
    let (served, other) = (Served::new(), Served::new());
    fs::write(served.path("file"), "hello").unwrap();
    let handle = served.file("file");
    // A link outside the tree: the file stays, and so does its handle's number.
    assert_eq!(other.getattr(&handle).unwrap_err(), nfsstat3::NFS3ERR_BADHANDLE);
    for at in 0..handle.data.len() {
        let mut forged = handle.data.to_vec();
        forged[at] ^= 1;
        let forged = nfs_fh3 { data: Opaque::owned(forged) };
        assert_eq!(served.getattr(&forged).unwrap_err(), nfsstat3::NFS3ERR_BADHANDLE, "byte {at}");
    }
    for len in 0..handle.data.len() {
        let cut = nfs_fh3 { data: Opaque::owned(handle.data[..len].to_vec()) };
        assert_eq!(served.getattr(&cut).unwrap_err(), nfsstat3::NFS3ERR_BADHANDLE, "{len} bytes");
    }
    fs::remove_file(served.path("file")).unwrap();
    assert_eq!(served.getattr(&handle).unwrap_err(), nfsstat3::NFS3ERR_STALE);
    assert_eq!(served.read(&handle, 0, 5).unwrap_err(), nfsstat3::NFS3ERR_STALE);
}

#[test]
fn handles_survive_a_rename_and_a_restart() {
    let served = Served::new();
    fs::write(served.path("file"), "hello").unwrap();
    fs::create_dir(served.path("dir")).unwrap();
    let (root, handle) = (served.root(), served.file("file"));
    fs::rename(served.path("file"), served.path("dir/renamed")).unwrap();
    assert_eq!(served.read(&handle, 0, 100).unwrap(), (b"hello".to_vec(), true));
    let served = served.restarted();
    assert_eq!(served.root(), root);
    assert_eq!(served.read(&handle, 1, 3).unwrap(), (b"ell".to_vec(), false));
}

#[test]
fn procedures_that_change_something_are_answered_once_and_expected_to_wait() {
    for procedure in 0..=21 {
        let changes = procedure == 2 || (7..=15).contains(&procedure);
        let pace = match procedure {
            6 => Pace::MayWait,
            21 => Pace::Slow,
            _ if changes => Pace::Slow,
            _ => Pace::Quick,
        };
        assert_eq!((super::is_idempotent(procedure), super::pace(procedure)), (!changes, pace), "{procedure}");
    }
}

#[test]
fn a_key_that_others_can_read_or_that_is_none_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new/key");
    let first = Key::from_file(&path).map(|_| fs::read(&path).unwrap()).unwrap();
    assert_eq!((first.len(), fs::metadata(&path).unwrap().mode() & 0o777), (16, 0o600));
    Key::from_file(&path).unwrap();
    assert_eq!(fs::read(&path).unwrap(), first);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    assert!(Key::from_file(&path).is_err_and(|error| error.to_string().contains("only their owner may read")));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&path, "short").unwrap();
    assert!(Key::from_file(&path).is_err_and(|error| error.next_step().contains("--state")));
}

#[test]
fn lookup_finds_names_and_stays_in_the_tree() {
    let served = Served::new();
    fs::create_dir(served.path("dir")).unwrap();
    fs::write(served.folder.path().join("secret"), "outside").unwrap();
    symlink("../secret", served.path("out")).unwrap();
    let long = "x".repeat(255);
    fs::write(served.path(&long), "").unwrap();
    let (root, dir) = (served.root(), served.file("dir"));
    assert_eq!(served.lookup(&dir, b"..").unwrap().0, root);
    assert_eq!(served.lookup(&root, b".").unwrap().0, root);
    // The parent of the tree is the tree.
    assert_eq!(served.lookup(&root, b"..").unwrap().0, root);
    assert_eq!(served.lookup(&root, b"out").unwrap().1.type_, ftype3::NF3LNK);
    assert!(served.lookup(&root, long.as_bytes()).is_ok());
    for (name, expected) in [
        (&b"missing"[..], nfsstat3::NFS3ERR_NOENT),
        (b"", nfsstat3::NFS3ERR_ACCES),
        (b"../secret", nfsstat3::NFS3ERR_INVAL),
        (b"/etc", nfsstat3::NFS3ERR_INVAL),
        (b"dir\0", nfsstat3::NFS3ERR_INVAL),
        (&[b'x'; 256], nfsstat3::NFS3ERR_NAMETOOLONG),
    ] {
        assert_eq!(served.lookup(&root, name).unwrap_err(), expected, "{name:?}");
    }
    let link = served.file("out");
    assert_eq!(served.lookup(&link, b"secret").unwrap_err(), nfsstat3::NFS3ERR_NOTDIR);
}

#[test]
fn a_directory_that_was_moved_out_of_the_tree_is_stale() {
    let served = Served::new();
    fs::create_dir_all(served.path("dir/sub")).unwrap();
    fs::write(served.path("dir/file"), "").unwrap();
    let dir = served.file("dir");
    let sub = served.lookup(&dir, b"sub").unwrap().0;
    fs::rename(served.path("dir"), served.folder.path().join("outside")).unwrap();
    for moved in [&dir, &sub] {
        assert_eq!(served.lookup(moved, b"..").unwrap_err(), nfsstat3::NFS3ERR_STALE);
        assert_eq!(served.readdir(moved, 0, 4096).unwrap_err(), nfsstat3::NFS3ERR_STALE);
        let made = served.create(moved, b"new", createhow3::UNCHECKED(sattr3::default()));
        assert_eq!(made.unwrap_err(), nfsstat3::NFS3ERR_STALE);
    }
    assert!(!served.folder.path().join("outside/new").exists());
}

#[test]
fn a_name_that_turns_into_a_link_between_look_and_use_leads_nowhere() {
    let served = Served::new();
    let outside = served.folder.path().join("secret");
    fs::write(&outside, "outside").unwrap();
    symlink(&outside, served.path("name")).unwrap();
    let root = served.root();
    // As if LOOKUP had found nothing, and somebody were faster than CREATE.
    let made = served.create(&root, b"name", createhow3::UNCHECKED(size(0)));
    assert_eq!(made.unwrap_err(), nfsstat3::NFS3ERR_EXIST);
    let link = served.file("name");
    assert_eq!(served.read(&link, 0, 10).unwrap_err(), nfsstat3::NFS3ERR_INVAL);
    assert_eq!(served.write(&link, 0, b"x", FILE_SYNC).unwrap_err(), nfsstat3::NFS3ERR_INVAL);
    assert_eq!(served.setattr(&link, size(0), Nfs3Option::None), nfsstat3::NFS3ERR_INVAL);
    let past =
        sattr3 { mtime: set_mtime::SET_TO_CLIENT_TIME(nfstime3 { seconds: 1, nseconds: 0 }), ..sattr3::default() };
    assert_eq!(served.setattr(&link, past, Nfs3Option::None), nfsstat3::NFS3_OK);
    let owner = sattr3 { uid: Nfs3Option::Some(7), ..sattr3::default() };
    assert_eq!(served.setattr(&link, owner, Nfs3Option::None), nfsstat3::NFS3_OK);
    let there = fs::metadata(&outside).unwrap();
    assert_eq!((fs::read(&outside).unwrap(), there.uid()), (b"outside".to_vec(), 0));
    assert_ne!(there.mtime(), 1);
    assert_eq!(fs::symlink_metadata(served.path("name")).unwrap().mtime(), 1);
}

#[test]
fn setattr_sets_each_attribute_and_minds_the_guard() {
    let served = Served::new();
    fs::write(served.path("file"), vec![1; 10_000]).unwrap();
    let file = served.file("file");
    let none = Nfs3Option::None;
    assert_eq!(served.setattr(&file, mode(0o2640), none), nfsstat3::NFS3_OK);
    assert_eq!(served.setattr(&file, size(5000), none), nfsstat3::NFS3_OK);
    let owner = sattr3 { uid: Nfs3Option::Some(5), gid: Nfs3Option::Some(6), ..sattr3::default() };
    assert_eq!(served.setattr(&file, owner, none), nfsstat3::NFS3_OK);
    let times = sattr3 {
        atime: set_atime::SET_TO_CLIENT_TIME(nfstime3 { seconds: 11, nseconds: 12 }),
        mtime: set_mtime::SET_TO_CLIENT_TIME(nfstime3 { seconds: 21, nseconds: 22 }),
        ..sattr3::default()
    };
    assert_eq!(served.setattr(&file, times, none), nfsstat3::NFS3_OK);
    let there = fs::metadata(served.path("file")).unwrap();
    assert_eq!((there.len(), there.uid(), there.gid(), there.mode() & 0o777), (5000, 5, 6, 0o640));
    assert_eq!((there.atime(), there.atime_nsec(), there.mtime(), there.mtime_nsec()), (11, 12, 21, 22));
    let shown = served.getattr(&file).unwrap();
    assert_eq!((shown.size, shown.mtime), (5000, nfstime3 { seconds: 21, nseconds: 22 }));

    let old = nfstime3 { seconds: 1, nseconds: 1 };
    assert_eq!(served.setattr(&file, mode(0o600), Nfs3Option::Some(old)), nfsstat3::NFS3ERR_NOT_SYNC);
    assert_eq!(fs::metadata(served.path("file")).unwrap().mode() & 0o777, 0o640);
    assert_eq!(served.setattr(&file, mode(0o600), Nfs3Option::Some(shown.ctime)), nfsstat3::NFS3_OK);
    let now = sattr3 { mtime: set_mtime::SET_TO_SERVER_TIME, ..sattr3::default() };
    assert_eq!(served.setattr(&file, now, none), nfsstat3::NFS3_OK);
    assert!(fs::metadata(served.path("file")).unwrap().mtime() > 1_700_000_000);
    let wrong = set_mtime::SET_TO_CLIENT_TIME(nfstime3 { seconds: 1, nseconds: 1_000_000_000 });
    assert_eq!(served.setattr(&file, sattr3 { mtime: wrong, ..sattr3::default() }, none), nfsstat3::NFS3ERR_INVAL);
    assert_eq!(served.setattr(&file, size(u64::MAX), none), nfsstat3::NFS3ERR_FBIG);
    assert_eq!(served.setattr(&served.root(), size(0), none), nfsstat3::NFS3ERR_ISDIR);
}

#[test]
fn a_time_that_is_set_after_a_write_stays() {
    let served = Served::new();
    fs::write(served.path("file"), "").unwrap();
    let file = served.file("file");
    served.write(&file, 0, &[1; 9000], UNSTABLE).unwrap();
    let set = nfstime3 { seconds: 5, nseconds: 0 };
    let past = sattr3 { mtime: set_mtime::SET_TO_CLIENT_TIME(set), ..sattr3::default() };
    assert_eq!(served.setattr(&file, past, Nfs3Option::None), nfsstat3::NFS3_OK);
    served.ask::<COMMIT3res>(21, &COMMIT3args { file: file.clone(), offset: 0, count: 0 }).unwrap();
    assert_eq!(served.getattr(&file).unwrap().mtime, set);
    assert_eq!(fs::metadata(served.path("file")).unwrap().mtime(), 5);
}

#[test]
fn permissions_are_those_of_the_caller() {
    let served = Served::new();
    fs::write(served.path("mine"), "hello").unwrap();
    fs::write(served.path("shared"), "hello").unwrap();
    fs::create_dir(served.path("dir")).unwrap();
    for (name, mode) in [("mine", 0o600), ("shared", 0o640), ("dir", 0o700)] {
        std::os::unix::fs::chown(served.path(name), Some(1000), Some(50)).unwrap();
        fs::set_permissions(served.path(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    let [mine, shared, dir] = ["mine", "shared", "dir"].map(|name| served.file(name));
    let all = 0x3f;
    let served = served.by(user(1000));
    assert_eq!(served.access(&mine, all), ACCESS3_READ | ACCESS3_MODIFY | ACCESS3_EXTEND);
    assert_eq!(served.access(&dir, all), all & !ACCESS3_EXECUTE);
    served.write(&mine, 0, b"owner", FILE_SYNC).unwrap();

    let served = served.by(Caller { uid: 1001, gid: 1001, groups: vec![7, 50] });
    assert_eq!(
        (served.access(&mine, all), served.access(&shared, all), served.access(&dir, all)),
        (0, ACCESS3_READ, 0)
    );
    assert_eq!(served.read(&shared, 0, 5).unwrap().0, b"hello");
    assert_eq!(served.read(&mine, 0, 5).unwrap_err(), nfsstat3::NFS3ERR_ACCES);
    assert_eq!(served.write(&shared, 0, b"x", FILE_SYNC).unwrap_err(), nfsstat3::NFS3ERR_ACCES);
    assert_eq!(served.setattr(&mine, size(0), Nfs3Option::None), nfsstat3::NFS3ERR_ACCES);
    assert_eq!(served.setattr(&mine, mode(0o666), Nfs3Option::None), nfsstat3::NFS3ERR_PERM);
    assert_eq!(served.lookup(&dir, b"x").unwrap_err(), nfsstat3::NFS3ERR_ACCES);
    assert_eq!(served.readdir(&dir, 0, 4096).unwrap_err(), nfsstat3::NFS3ERR_ACCES);
    let made = served.create(&dir, b"x", createhow3::UNCHECKED(mode(0o644)));
    assert_eq!(made.unwrap_err(), nfsstat3::NFS3ERR_ACCES);

    // The server itself is still root, and the next caller is served as itself.
    assert_eq!(served.by(user(1000)).read(&mine, 0, 5).unwrap().0, b"owner");
}

#[test]
fn an_owner_uses_a_file_whatever_its_mode_says() {
    let served = Served::new();
    fs::set_permissions(served.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    let served = served.by(user(1000));
    let file = served.create(&served.root(), b"file", createhow3::GUARDED(mode(0o444))).unwrap();
    assert_eq!(served.access(&file, 0x3f), ACCESS3_READ);
    served.write(&file, 0, b"hello", FILE_SYNC).unwrap();
    served.setattr(&file, mode(0), Nfs3Option::None);
    assert_eq!(served.read(&file, 0, 9).unwrap().0, b"hello");
    let there = fs::metadata(served.path("file")).unwrap();
    assert_eq!((there.uid(), there.gid(), there.mode() & 0o7777), (1000, 1000, 0));
}

#[test]
fn who_may_run_a_program_may_read_it() {
    let served = Served::new();
    fs::write(served.path("program"), "code").unwrap();
    fs::set_permissions(served.path("program"), fs::Permissions::from_mode(0o711)).unwrap();
    let program = served.file("program");
    let served = served.by(user(1000));
    assert_eq!(served.access(&program, 0x3f), ACCESS3_EXECUTE);
    assert_eq!(served.read(&program, 0, 9).unwrap().0, b"code");
}

#[test]
fn a_write_takes_the_bits_away_that_run_a_program_as_its_owner() {
    let served = Served::new();
    for (name, mode) in [("user", 0o4777), ("group", 0o2777), ("locked", 0o2767)] {
        fs::write(served.path(name), "code").unwrap();
        fs::set_permissions(served.path(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    let files = ["user", "group", "locked"].map(|name| served.file(name));
    let served = served.by(user(1000));
    let modes = files.map(|file| {
        served.write(&file, 0, b"evil", UNSTABLE).unwrap();
        served.getattr(&file).unwrap().mode
    });
    assert_eq!(modes, [0o777, 0o777, 0o2767]);
}

#[test]
fn root_of_a_client_is_nobody_if_squashed() {
    let served = Served::with(false, true);
    fs::set_permissions(served.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    fs::write(served.path("secret"), "root's").unwrap();
    fs::set_permissions(served.path("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    let secret = served.file("secret");
    assert_eq!(served.read(&secret, 0, 9).unwrap_err(), nfsstat3::NFS3ERR_ACCES);
    served.create(&served.root(), b"new", createhow3::UNCHECKED(mode(0o644))).unwrap();
    let there = fs::metadata(served.path("new")).unwrap();
    assert_eq!((there.uid(), there.gid()), (65534, 65534));
    // Not by its group either, and not as a user that there cannot be.
    let served = served.by(Caller { uid: 1000, gid: 0, groups: vec![0] });
    fs::set_permissions(served.path("secret"), fs::Permissions::from_mode(0o660)).unwrap();
    assert_eq!(served.read(&secret, 0, 9).unwrap_err(), nfsstat3::NFS3ERR_ACCES);
    let served = served.by(user(u32::MAX));
    assert_eq!(served.read(&secret, 0, 9).unwrap_err(), nfsstat3::NFS3ERR_ACCES);
}

#[test]
fn readlink_reads_links_and_nothing_else() {
    let served = Served::new();
    symlink("some/where", served.path("link")).unwrap();
    let ask = |symlink: nfs_fh3| served.ask::<READLINK3res<'static>>(5, &READLINK3args { symlink });
    assert_eq!(ask(served.file("link")).unwrap().data.as_ref(), b"some/where");
    assert_eq!(status(&ask(served.root())), nfsstat3::NFS3ERR_INVAL);
}

#[test]
fn read_delivers_bytes_and_says_where_the_file_ends() {
    let served = Served::new();
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| (at % 251) as u8).collect();
    fs::write(served.path("file"), &bytes).unwrap();
    let file = served.file("file");
    for (at, count) in [(0, 1), (1, 4096), (4095, 2), (123_457, 70_001), (0, 1 << 20), (2_999_999, 1)] {
        let (read, is_end) = served.read(&file, at, count).unwrap();
        let end = (at as usize + count as usize).min(bytes.len());
        assert_eq!((read == bytes[at as usize..end], is_end), (true, end == bytes.len()), "{count} bytes at {at}");
    }
    // No more than the most, and nothing beyond the end.
    assert_eq!(served.read(&file, 0, u32::MAX).unwrap().0.len(), 1 << 20);
    assert_eq!(served.read(&file, 2_999_990, 100).unwrap(), (bytes[2_999_990..].to_vec(), true));
    assert_eq!(served.read(&file, 1 << 40, 100).unwrap(), (Vec::new(), true));
    assert_eq!(served.read(&file, u64::MAX, 1).unwrap_err(), nfsstat3::NFS3ERR_INVAL);
    assert_eq!(served.read(&served.root(), 0, 1).unwrap_err(), nfsstat3::NFS3ERR_ISDIR);
}

#[test]
fn devices_and_pipes_are_never_opened() {
    let served = Served::new();
    let root = served.root();
    let make = |name: &[u8], what| served.ask::<MKNOD3res>(11, &MKNOD3args { where_: entry(&root, name), what });
    let device = || devicedata3 { dev_attributes: mode(0o666), spec: specdata3 { specdata1: 1, specdata2: 3 } };
    make(b"null", mknoddata3::NF3CHR(device())).unwrap();
    make(b"block", mknoddata3::NF3BLK(device())).unwrap();
    make(b"pipe", mknoddata3::NF3FIFO(mode(0o600))).unwrap();
    make(b"socket", mknoddata3::NF3SOCK(mode(0o600))).unwrap();
    let kind = |name: &str| fs::symlink_metadata(served.path(name)).unwrap().file_type();
    assert!(kind("null").is_char_device() && kind("block").is_block_device());
    assert!(kind("pipe").is_fifo() && kind("socket").is_socket());
    assert_eq!(served.getattr(&served.file("null")).unwrap().rdev, specdata3 { specdata1: 1, specdata2: 3 });
    for name in ["null", "block", "pipe", "socket"] {
        // A pipe without a reader would stop whoever opens it.
        let file = served.file(name);
        assert_eq!(served.read(&file, 0, 1).unwrap_err(), nfsstat3::NFS3ERR_INVAL, "{name}");
        assert_eq!(served.write(&file, 0, b"x", FILE_SYNC).unwrap_err(), nfsstat3::NFS3ERR_INVAL, "{name}");
        assert_eq!(served.setattr(&file, size(0), Nfs3Option::None), nfsstat3::NFS3ERR_INVAL, "{name}");
    }
    assert_eq!(status(&make(b"null", mknoddata3::NF3FIFO(mode(0o600)))), nfsstat3::NFS3ERR_EXIST);
    let args = [pack(&entry(&root, b"dir")), pack(&ftype3::NF3DIR)].concat();
    assert_eq!(status(&read::<MKNOD3res>(&served.results(11, &args))), nfsstat3::NFS3ERR_BADTYPE);
    let served = served.by(user(1000));
    fs::set_permissions(served.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    let made =
        served.ask::<MKNOD3res>(11, &MKNOD3args { where_: entry(&root, b"mine"), what: mknoddata3::NF3CHR(device()) });
    assert_eq!(status(&made), nfsstat3::NFS3ERR_PERM);
}

#[test]
fn a_write_is_seen_at_once_and_on_the_disk_after_commit() {
    let served = Served::new();
    fs::write(served.path("file"), "").unwrap();
    let file = served.file("file");
    let bytes: Vec<u8> = (0..1 << 20_u32).map(|at| (at % 253) as u8).collect();
    let written = served.write(&file, 0, &bytes, UNSTABLE).unwrap();
    assert_eq!((written.count, written.committed), (1 << 20, UNSTABLE));
    assert_eq!(written.file_wcc.after.unwrap().size, 1 << 20);
    assert!(written.file_wcc.before.is_none(), "others may write it too");
    assert_eq!(served.read(&file, 0, 1 << 20).unwrap(), (bytes.clone(), true));
    assert_eq!(served.getattr(&file).unwrap().size, 1 << 20);
    let done = served.ask::<COMMIT3res>(21, &COMMIT3args { file: file.clone(), offset: 0, count: 0 }).unwrap();
    assert_eq!(done.verf, written.verf);
    assert_eq!(fs::read(served.path("file")).unwrap(), bytes);

    // Anywhere, also far behind the end; nothing becomes zeros.
    let far = 5_000_000_000_123;
    let written = served.write(&file, far, b"far", FILE_SYNC).unwrap();
    assert_eq!((written.count, written.committed), (3, FILE_SYNC));
    assert_eq!(served.read(&file, far - 2, 9).unwrap(), (b"\0\0far".to_vec(), true));
    assert_eq!(fs::metadata(served.path("file")).unwrap().len(), far + 3);
    assert_eq!(served.write(&file, i64::MAX as u64, b"x", FILE_SYNC).unwrap_err(), nfsstat3::NFS3ERR_FBIG);
    assert_eq!(served.write(&served.root(), 0, b"x", FILE_SYNC).unwrap_err(), nfsstat3::NFS3ERR_ISDIR);
    let bad = COMMIT3args { file, offset: u64::MAX, count: 1 };
    assert_eq!(status(&served.ask::<COMMIT3res>(21, &bad)), nfsstat3::NFS3ERR_INVAL);
}

#[test]
fn the_verifier_is_another_one_after_a_restart() {
    let served = Served::new();
    fs::write(served.path("file"), "").unwrap();
    let file = served.file("file");
    let before = served.write(&file, 0, b"hello", UNSTABLE).unwrap().verf;
    let served = served.restarted();
    let after = served.ask::<COMMIT3res>(21, &COMMIT3args { file, offset: 0, count: 0 }).unwrap().verf;
    assert_ne!(before, after);
}

#[test]
fn a_write_whose_lengths_do_not_agree_is_garbage() {
    let served = Served::new();
    fs::write(served.path("file"), "").unwrap();
    let file = served.file("file");
    for (count, stable, length) in [(6_u32, 0_u32, 5_u32), (5, 3, 5), (5, 0, 6)] {
        let args = [pack(&file), pack(&0_u64), pack(&count), pack(&stable), pack(&length)].concat();
        let mut pages = [Some(served.allocator.alloc_page(Gfp::KERNEL).unwrap())];
        assert!(matches!(served.answer(nfs3::PROGRAM, 7, &args, &mut pages, 5), Answer::Refused(Status::Garbage)));
    }
    assert_eq!(served.getattr(&file).unwrap().size, 0);
}

#[test]
fn create_has_three_ways_to_treat_a_file_that_is_there() {
    let served = Served::new();
    let root = served.root();
    let new = sattr3 { size: Nfs3Option::Some(3), ..mode(0o6751) };
    let file = served.create(&root, b"file", createhow3::UNCHECKED(new)).unwrap();
    let shown = served.getattr(&file).unwrap();
    assert_eq!((shown.mode, shown.size, shown.type_), (0o6751, 3, ftype3::NF3REG));
    served.write(&file, 0, b"hello", FILE_SYNC).unwrap();
    // Unchecked: the same file, of which nothing but the length is set.
    assert_eq!(served.create(&root, b"file", createhow3::UNCHECKED(mode(0o600))).unwrap(), file);
    assert_eq!(served.read(&file, 0, 9).unwrap().0, b"hello");
    assert_eq!(served.create(&root, b"file", createhow3::UNCHECKED(size(0))).unwrap(), file);
    let shown = served.getattr(&file).unwrap();
    assert_eq!((shown.mode, shown.size), (0o6751, 0));
    let guarded = served.create(&root, b"file", createhow3::GUARDED(sattr3::default()));
    assert_eq!(guarded.unwrap_err(), nfsstat3::NFS3ERR_EXIST);

    // Exclusive: the same request sent again, by a client that did not hear the answer, finds its file; another one does not.
    let exclusive = |verifier| served.create(&root, b"only", createhow3::EXCLUSIVE(createverf3(verifier)));
    let first = exclusive(*b"\xff2345678").unwrap();
    assert_eq!(exclusive(*b"\xff2345678").unwrap(), first);
    assert_eq!(exclusive(*b"12345679").unwrap_err(), nfsstat3::NFS3ERR_EXIST);
    fs::create_dir(served.path("dir")).unwrap();
    let made = served.create(&root, b"dir", createhow3::UNCHECKED(sattr3::default()));
    assert_eq!(made.unwrap_err(), nfsstat3::NFS3ERR_EXIST);
    for (name, expected) in [
        (&b"."[..], nfsstat3::NFS3ERR_EXIST),
        (b"..", nfsstat3::NFS3ERR_EXIST),
        (b"a/b", nfsstat3::NFS3ERR_INVAL),
        (&[b'x'; 256], nfsstat3::NFS3ERR_NAMETOOLONG),
    ] {
        assert_eq!(served.create(&root, name, createhow3::UNCHECKED(sattr3::default())).unwrap_err(), expected);
    }
    let made = served.create(&file, b"x", createhow3::UNCHECKED(sattr3::default()));
    assert_eq!(made.unwrap_err(), nfsstat3::NFS3ERR_NOTDIR);
}

#[test]
fn mkdir_and_symlink_make_what_they_say() {
    let served = Served::new();
    let root = served.root();
    let mkdir = |name: &[u8], mode_of| {
        served.ask::<MKDIR3res>(9, &MKDIR3args { where_: entry(&root, name), attributes: mode(mode_of) })
    };
    let made = mkdir(b"dir", 0o3751).unwrap();
    assert_eq!(made.obj_attributes.unwrap().mode, 0o3751);
    assert_eq!(fs::metadata(served.path("dir")).unwrap().mode() & 0o7777, 0o3751);
    assert_eq!(status(&mkdir(b"dir", 0o755)), nfsstat3::NFS3ERR_EXIST);
    let link = |name: &[u8], target: &[u8]| {
        let symlink = symlinkdata3 { symlink_attributes: mode(0o777), symlink_data: target.into() };
        served.ask::<SYMLINK3res>(10, &SYMLINK3args { where_: entry(&root, name), symlink })
    };
    link(b"link", b"../any/where").unwrap();
    assert_eq!(fs::read_link(served.path("link")).unwrap().to_str(), Some("../any/where"));
    assert_eq!(status(&link(b"link", b"x")), nfsstat3::NFS3ERR_EXIST);
    assert_eq!(status(&link(b"nul", b"a\0b")), nfsstat3::NFS3ERR_INVAL);
    assert_eq!(status(&link(b"long", &[b'x'; 5000])), nfsstat3::NFS3ERR_NAMETOOLONG);
}

#[test]
fn remove_and_rmdir_remove_what_they_should() {
    let served = Served::new();
    let root = served.root();
    fs::create_dir_all(served.path("dir/full")).unwrap();
    fs::write(served.path("file"), "").unwrap();
    fs::hard_link(served.path("file"), served.path("second")).unwrap();
    let file = served.file("file");
    let remove = |name: &[u8]| status(&served.ask::<REMOVE3res>(12, &REMOVE3args { object: entry(&root, name) }));
    let rmdir = |name: &[u8]| status(&served.ask::<RMDIR3res>(13, &RMDIR3args { object: entry(&root, name) }));
    served.write(&file, 0, b"hello", UNSTABLE).unwrap();
    assert_eq!(remove(b"file"), nfsstat3::NFS3_OK);
    // It has another name, and keeps what was written.
    assert_eq!(served.read(&file, 0, 9).unwrap().0, b"hello");
    assert_eq!(fs::read(served.path("second")).unwrap(), b"hello");
    assert_eq!(remove(b"second"), nfsstat3::NFS3_OK);
    assert_eq!(served.getattr(&file).unwrap_err(), nfsstat3::NFS3ERR_STALE);
    assert_eq!(remove(b"file"), nfsstat3::NFS3ERR_NOENT);
    assert_eq!(remove(b"dir"), nfsstat3::NFS3ERR_ISDIR);
    assert_eq!(rmdir(b"dir"), nfsstat3::NFS3ERR_NOTEMPTY);
    fs::remove_dir(served.path("dir/full")).unwrap();
    assert_eq!((rmdir(b"dir"), rmdir(b"dir")), (nfsstat3::NFS3_OK, nfsstat3::NFS3ERR_NOENT));
    assert_eq!((rmdir(b"."), rmdir(b"..")), (nfsstat3::NFS3ERR_INVAL, nfsstat3::NFS3ERR_EXIST));
}

#[test]
fn rename_replaces_and_stays_where_it_may() {
    let served = Served::new();
    let root = served.root();
    fs::create_dir_all(served.path("dir/sub")).unwrap();
    fs::write(served.path("a"), "a").unwrap();
    fs::write(served.path("b"), "b").unwrap();
    let (a, b, dir) = (served.file("a"), served.file("b"), served.file("dir"));
    let rename = |from: &nfs_fh3, old: &[u8], to: &nfs_fh3, new: &[u8]| {
        status(&served.ask::<RENAME3res>(14, &RENAME3args { from: entry(from, old), to: entry(to, new) }))
    };
    served.write(&a, 1, b"bc", UNSTABLE).unwrap();
    assert_eq!(rename(&root, b"a", &root, b"b"), nfsstat3::NFS3_OK);
    assert_eq!(served.read(&a, 0, 9).unwrap().0, b"abc");
    assert_eq!(served.getattr(&b).unwrap_err(), nfsstat3::NFS3ERR_STALE);
    assert_eq!(rename(&root, b"b", &dir, b"c"), nfsstat3::NFS3_OK);
    assert_eq!(served.read(&a, 0, 9).unwrap().0, b"abc");
    assert_eq!(rename(&root, b"b", &dir, b"c"), nfsstat3::NFS3ERR_NOENT);
    assert_eq!(rename(&dir, b"c", &dir, b"sub"), nfsstat3::NFS3ERR_ISDIR);
    assert_eq!(rename(&root, b"dir", &dir, b"sub"), nfsstat3::NFS3ERR_INVAL);
    assert_eq!(rename(&dir, b"..", &root, b"x"), nfsstat3::NFS3ERR_INVAL);
    assert_eq!(rename(&dir, b"c", &root, b"../x"), nfsstat3::NFS3ERR_INVAL);
    assert!(!served.folder.path().join("x").exists());
}

#[test]
fn link_gives_a_file_another_name() {
    let served = Served::new();
    let root = served.root();
    fs::write(served.path("file"), "").unwrap();
    symlink("file", served.path("symlink")).unwrap();
    let link = |file: &nfs_fh3, name: &[u8]| {
        served.ask::<LINK3res>(15, &LINK3args { file: file.clone(), link: entry(&root, name) })
    };
    let file = served.file("file");
    assert_eq!(link(&file, b"second").unwrap().file_attributes.unwrap().nlink, 2);
    assert_eq!(served.file("second"), file);
    assert_eq!(status(&link(&file, b"second")), nfsstat3::NFS3ERR_EXIST);
    // The link itself, not what it leads to.
    link(&served.file("symlink"), b"third").unwrap();
    assert_eq!(fs::read_link(served.path("third")).unwrap().to_str(), Some("file"));
    assert_eq!(status(&link(&root, b"dir")), nfsstat3::NFS3ERR_PERM);
}

#[test]
fn a_directory_is_listed_in_pieces_while_it_changes() {
    let served = Served::new();
    let root = served.root();
    let long = |at: u32| format!("{at:0>200}");
    (0..500).for_each(|at| fs::write(served.path(&long(at)), "").unwrap());
    let (mut seen, mut cookie, mut pieces) = (BTreeMap::new(), 0, 0);
    loop {
        let (entries, is_end) = served.readdir(&root, cookie, 4096).unwrap();
        for entry in entries {
            cookie = entry.cookie;
            *seen.entry(entry.name.as_ref().to_vec()).or_insert(0) += 1;
        }
        pieces += 1;
        if is_end {
            break;
        }
        // Files come and go; and the server is asked from the beginning of the next piece.
        fs::write(served.path(&format!("new{pieces}")), "").unwrap();
        let gone = seen.keys().rev().nth(1).cloned();
        if let Some(gone) = gone.filter(|name| name.len() == 200) {
            let _ = fs::remove_file(served.path(std::str::from_utf8(&gone).unwrap()));
        }
    }
    assert!(pieces > 25 && seen.values().all(|&times| times == 1), "{pieces} pieces");
    assert!((0..500).all(|at| seen.contains_key(long(at).as_bytes())));
    assert!(seen.contains_key(&b"."[..]) && seen.contains_key(&b".."[..]));
    assert_eq!(served.readdir(&root, 0, 100).unwrap_err(), nfsstat3::NFS3ERR_TOOSMALL);
    assert_eq!(served.readdir(&root, u64::MAX, 4096).unwrap_err(), nfsstat3::NFS3ERR_BAD_COOKIE);
    assert_eq!(served.readdir(&served.file(&long(499)), 0, 4096).unwrap_err(), nfsstat3::NFS3ERR_NOTDIR);
}

#[test]
fn readdirplus_has_handles_and_attributes() {
    let served = Served::new();
    let root = served.root();
    (0..100).for_each(|at| fs::write(served.path(&format!("file{at}")), vec![0; at]).unwrap());
    let (mut seen, mut cookie) = (0, 0);
    loop {
        let args = READDIRPLUS3args {
            dir: root.clone(),
            cookie,
            cookieverf: cookieverf3::default(),
            dircount: 2000,
            maxcount: 4000,
        };
        let results = served.results(17, &pack(&args));
        let ok = read::<READDIRPLUS3res<'static>>(&results).unwrap();
        assert!(results.len() <= 4000);
        for entry in ok.reply.entries.0 {
            cookie = entry.cookie;
            let (attributes, handle) = (entry.name_attributes.unwrap(), entry.name_handle.unwrap());
            assert_eq!(served.getattr(&handle).unwrap().fileid, attributes.fileid);
            match entry.name.as_ref() {
                // The parent of the tree is the tree, and shows nothing of what is around it.
                b"." | b".." => assert_eq!((handle, entry.fileid), (root.clone(), attributes.fileid)),
                name => {
                    let name = std::str::from_utf8(name).unwrap();
                    assert_eq!(attributes.size, name.trim_start_matches("file").parse::<u64>().unwrap());
                    seen += 1;
                }
            }
        }
        if ok.reply.eof {
            break;
        }
    }
    assert_eq!(seen, 100);
    // Who may list but not search sees names alone.
    fs::set_permissions(served.path(""), fs::Permissions::from_mode(0o744)).unwrap();
    let served = served.by(user(1000));
    let args =
        READDIRPLUS3args { dir: root, cookie: 0, cookieverf: cookieverf3::default(), dircount: 60000, maxcount: 60000 };
    let ok = served.ask::<READDIRPLUS3res<'static>>(17, &args).unwrap();
    assert_eq!(ok.reply.entries.0.len(), 102);
    assert!(ok.reply.entries.0.iter().all(|entry| entry.name_handle.is_none() && entry.name_attributes.is_none()));
}

#[test]
fn a_read_only_tree_is_not_changed() {
    let served = Served::with(true, false);
    fs::write(served.path("file"), "hello").unwrap();
    let (root, file) = (served.root(), served.file("file"));
    let rofs = nfsstat3::NFS3ERR_ROFS;
    assert_eq!(served.read(&file, 0, 9).unwrap().0, b"hello");
    assert_eq!(served.access(&file, 0x3f), ACCESS3_READ);
    assert_eq!(served.write(&file, 0, b"x", FILE_SYNC).unwrap_err(), rofs);
    assert_eq!(served.setattr(&file, mode(0), Nfs3Option::None), rofs);
    assert_eq!(served.create(&root, b"x", createhow3::UNCHECKED(sattr3::default())).unwrap_err(), rofs);
    let dir = MKDIR3args { where_: entry(&root, b"d"), attributes: sattr3::default() };
    assert_eq!(status(&served.ask::<MKDIR3res>(9, &dir)), rofs);
    assert_eq!(status(&served.ask::<REMOVE3res>(12, &REMOVE3args { object: entry(&root, b"file") })), rofs);
    assert_eq!(status(&served.ask::<RMDIR3res>(13, &RMDIR3args { object: entry(&root, b"file") })), rofs);
    let rename = RENAME3args { from: entry(&root, b"file"), to: entry(&root, b"x") };
    assert_eq!(status(&served.ask::<RENAME3res>(14, &rename)), rofs);
    assert_eq!(status(&served.ask::<LINK3res>(15, &LINK3args { file, link: entry(&root, b"x") })), rofs);
}

#[test]
fn fsstat_fsinfo_and_pathconf_say_what_the_file_system_has() {
    let served = Served::new();
    let (object, fsroot) = (served.root(), served.root());
    let there = rustix::fs::statvfs(served.path("").as_path()).unwrap();
    let stat = served.ask::<FSSTAT3res>(18, &FSSTAT3args { fsroot: fsroot.clone() }).unwrap();
    assert_eq!((stat.tbytes, stat.tfiles), (there.f_blocks * there.f_frsize, there.f_files));
    let info = served.ask::<FSINFO3res>(19, &FSINFO3args { fsroot }).unwrap();
    assert_eq!((info.rtmax, info.wtmax, info.dtpref), (1 << 20, 1 << 20, 64 << 10));
    assert_eq!(info.properties, FSF3_LINK | FSF3_SYMLINK | FSF3_HOMOGENEOUS | FSF3_CANSETTIME);
    let conf = served.ask::<PATHCONF3res>(20, &PATHCONF3args { object }).unwrap();
    assert!(
        conf.name_max == 255
            && conf.no_trunc
            && conf.chown_restricted
            && !conf.case_insensitive
            && conf.case_preserving
    );
}

#[test]
fn a_request_that_is_sent_again_is_answered_again_and_carried_out_once() {
    let served = Served::new();
    let root = served.root();
    fs::write(served.path("file"), "").unwrap();
    let args = pack(&REMOVE3args { object: entry(&root, b"file") });
    let again = |port: u16| {
        let mut call = Call {
            xid: 77,
            program: nfs3::PROGRAM,
            version: 3,
            procedure: 12,
            credential: Credential::Sys(user(0)),
            peer: ([127, 0, 0, 1], port).into(),
            args: &args,
            payload: Payload { pages: &mut [], len: 0 },
        };
        let Answer::Results(results) = served.programs.answer(&mut call) else { panic!() };
        results
    };
    let first = again(700);
    assert_eq!(status(&read::<REMOVE3res>(&first)), nfsstat3::NFS3_OK);
    fs::write(served.path("file"), "another one").unwrap();
    assert_eq!(again(700), first);
    assert!(served.path("file").exists());
    // Another client's, by chance with the same number.
    assert_eq!(status(&read::<REMOVE3res>(&again(701))), nfsstat3::NFS3_OK);
    assert!(!served.path("file").exists());
}

#[test]
fn whoever_may_write_a_file_cuts_it_as_clients_do() {
    let served = Served::new();
    fs::write(served.path("shared"), "hello").unwrap();
    std::os::unix::fs::chown(served.path("shared"), Some(1), Some(50)).unwrap();
    fs::set_permissions(served.path("shared"), fs::Permissions::from_mode(0o660)).unwrap();
    let shared = served.file("shared");
    let now = || sattr3 { mtime: set_mtime::SET_TO_SERVER_TIME, ..sattr3::default() };
    let cut = || sattr3 { size: Nfs3Option::Some(0), ..now() };
    // Linux's client opens with O_TRUNC so.
    let served = served.by(Caller { uid: 1000, gid: 1000, groups: vec![50] });
    assert_eq!(served.setattr(&shared, cut(), Nfs3Option::None), nfsstat3::NFS3_OK);
    assert_eq!(served.setattr(&shared, now(), Nfs3Option::None), nfsstat3::NFS3_OK);
    // A time of its own choice is the owner's.
    let past =
        sattr3 { mtime: set_mtime::SET_TO_CLIENT_TIME(nfstime3 { seconds: 1, nseconds: 0 }), ..sattr3::default() };
    assert_eq!(served.setattr(&shared, past, Nfs3Option::None), nfsstat3::NFS3ERR_PERM);
    let served = served.by(user(1001));
    for refused in [cut(), now()] {
        assert_eq!(served.setattr(&shared, refused, Nfs3Option::None), nfsstat3::NFS3ERR_ACCES);
    }
}

#[test]
fn a_tree_that_is_closed_to_a_client_s_root_can_be_mounted_for_its_owner() {
    let served = Served::with(false, true);
    fs::write(served.path("file"), "hello").unwrap();
    std::os::unix::fs::chown(served.path(""), Some(1000), Some(1000)).unwrap();
    fs::set_permissions(served.path(""), fs::Permissions::from_mode(0o700)).unwrap();
    // Root mounts, and is nobody here.
    let root = served.root();
    assert_eq!(served.lookup(&root, b"file").unwrap_err(), nfsstat3::NFS3ERR_ACCES);
    assert!(served.by(user(1000)).lookup(&root, b"file").is_ok());
}

#[test]
fn no_bytes_are_older_than_the_time_that_they_are_told_with() {
    let served = Served::new();
    fs::write(served.path("file"), "old").unwrap();
    let file = served.file("file");
    assert_eq!(served.read(&file, 0, 9).unwrap().0, b"old");
    // Within a second of the last look; by the way of the owner, and by that of others.
    fs::write(served.path("file"), "newer").unwrap();
    assert_eq!(served.read(&file, 0, 9).unwrap().0, b"newer");
    fs::write(served.path("file"), "newest").unwrap();
    assert_eq!(served.by(user(1000)).read(&file, 0, 9).unwrap().0, b"newest");
}

#[test]
fn a_program_that_was_read_can_be_run_and_a_removed_file_goes() {
    let served = Served::new();
    fs::copy("/bin/true", served.path("program")).unwrap();
    let program = served.file("program");
    served.read(&program, 0, 100).unwrap();
    assert!(std::process::Command::new(served.path("program")).status().unwrap().success());
    let is_open = || {
        let links = fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
        links.into_iter().any(|link| {
            link.starts_with(served.path("program")) || link.to_string_lossy().contains("program (deleted)")
        })
    };
    assert!(is_open());
    served.programs.tidy();
    assert!(is_open(), "it was used a moment ago");
    served.programs.tidy();
    assert!(!is_open());
}

#[test]
fn no_write_goes_beyond_what_a_file_can_have() {
    let served = Served::new();
    fs::write(served.path("file"), "").unwrap();
    let (root, file) = (served.root(), served.file("file"));
    let most = served.ask::<FSINFO3res>(19, &FSINFO3args { fsroot: root }).unwrap().maxfilesize;
    assert!((1 << 40..=i64::MAX as u64).contains(&most), "{most}");
    // Else these bytes would stay in the cache for good.
    assert_eq!(served.write(&file, most - 1, b"xy", UNSTABLE).unwrap_err(), nfsstat3::NFS3ERR_FBIG);
    served.write(&file, most - 2, b"xy", FILE_SYNC).unwrap();
    assert_eq!(fs::metadata(served.path("file")).unwrap().len(), most);
}

#[test]
fn what_a_directory_was_before_belongs_to_what_it_is_after() {
    let served = Served::new();
    let root = served.root();
    let changes = std::thread::scope(|scope| {
        let make = |thread: usize| {
            let (served, root) = (&served, &root);
            scope.spawn(move || {
                let one = |at: usize| {
                    let name = format!("{thread}-{at}");
                    let how = createhow3::GUARDED(sattr3::default());
                    let args = CREATE3args { where_: entry(root, name.as_bytes()), how };
                    let wcc = served.ask::<CREATE3res>(8, &args).unwrap().dir_wcc;
                    (wcc.before.unwrap().ctime, wcc.after.unwrap().ctime)
                };
                (0..200).map(one).collect::<Vec<_>>()
            })
        };
        let threads: Vec<_> = (0..4).map(make).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    // In order, each begins where another one ended: none has another one's change in it.
    let mut times: Vec<_> =
        changes.iter().map(|(before, after)| [before, after].map(|it| (it.seconds, it.nseconds))).collect();
    times.sort_unstable();
    assert!(times.windows(2).all(|pair| pair[0][1] <= pair[1][0] || pair[0] == pair[1]), "{times:?}");
}

/// What the way of an open file must not skip.
#[test]
fn a_file_that_is_open_is_written_as_one_that_is_not() {
    let served = Served::new();
    let owned = |name: &str, uid: u32, mode: u32| {
        fs::write(served.path(name), "code").unwrap();
        std::os::unix::fs::chown(served.path(name), Some(uid), Some(uid)).unwrap();
        fs::set_permissions(served.path(name), fs::Permissions::from_mode(mode)).unwrap();
        served.file(name)
    };
    let large = vec![7; 70_000];
    let [program, given, removed, gone] = [("program", 0o755), ("given", 0o600), ("removed", 0o600), ("gone", 0o600)]
        .map(|(name, mode)| owned(name, 1000, mode));
    let path = |name: &str| served.folder.path().join("tree").join(name);
    let (program_path, given_path, gone_path) = (path("program"), path("given"), path("gone"));
    fs::set_permissions(served.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    let served = served.by(user(1000));
    for file in [&program, &given, &removed, &gone] {
        // A READ opens it for reading alone.
        served.read(file, 0, 4).unwrap();
        served.write(file, 0, b"open", UNSTABLE).unwrap();
        let written = served.write(file, 4, b"more", UNSTABLE).unwrap();
        assert_eq!(written.file_wcc.after.unwrap().size, 8);
    }
    let beyond = served.ask::<FSINFO3res>(19, &FSINFO3args { fsroot: served.root() }).unwrap().maxfilesize - 1;
    assert_eq!(served.write(&given, beyond, b"xy", UNSTABLE).unwrap_err(), nfsstat3::NFS3ERR_FBIG);
    for (set, left) in [(0o4755, 0o755), (0o6775, 0o775), (0o2765, 0o2765)] {
        for bytes in [&b"evil"[..], &large] {
            fs::set_permissions(&program_path, fs::Permissions::from_mode(set)).unwrap();
            let written = served.write(&program, 0, bytes, UNSTABLE).unwrap();
            assert_eq!(written.file_wcc.after.unwrap().mode, left, "{set:o}");
            assert_eq!(fs::metadata(&program_path).unwrap().mode() & 0o7777, left);
        }
    }
    std::os::unix::fs::chown(&given_path, Some(1001), Some(1001)).unwrap();
    assert_eq!(served.write(&given, 0, &large, UNSTABLE).unwrap_err(), nfsstat3::NFS3ERR_ACCES);
    let done: REMOVE3res = served.ask(12, &REMOVE3args { object: entry(&served.root(), b"removed") });
    assert_eq!(status(&done), nfsstat3::NFS3_OK);
    assert_eq!(served.write(&removed, 0, &large, UNSTABLE).unwrap_err(), nfsstat3::NFS3ERR_STALE);
    fs::remove_file(&gone_path).unwrap();
    assert_eq!(served.write(&gone, 0, &large, UNSTABLE).unwrap_err(), nfsstat3::NFS3ERR_STALE);
    let served = served.by(user(1001));
    let written = served.write(&given, 100, &large, UNSTABLE).unwrap();
    assert_eq!(written.file_wcc.after.unwrap().size, 70_100);
}
