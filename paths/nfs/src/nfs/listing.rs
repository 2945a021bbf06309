//! READDIR and READDIRPLUS.
//!
//! A cookie is the file system's own place in the directory (`d_off` of getdents64(2)). It holds as long as the directory
//! exists, whatever is added or removed meanwhile and whoever restarts, on file systems whose places do: ext4, XFS, Btrfs,
//! and tmpfs from Linux 6.6 on. So the cookie verifier is always zero.
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;

use nfs3_types::nfs3::{
    Nfs3Option, READDIR3resfail, READDIRPLUS3resfail, cookieverf3, entry3, entryplus3, fattr3, nfsstat3,
};
use rustix::fs::{Mode, OFlags, RawDir, SeekFrom, seek};

use super::names::wire;
use super::{LISTING_MAX, Nfs, Packed, Request, refused};
use crate::call::Caller;
use crate::credentials::act_as;
use crate::export::{Object, open_entry};
use crate::handles::Handle;
use crate::status::{Failed, Outcome};
use crate::xdr::pack;

/// What a listing may have in bytes.
struct Limits {
    /// For names and cookies.
    names: usize,
    /// For everything.
    all: usize,
}

impl Nfs {
    pub(super) fn readdir(&self, mut request: Request<'_>) -> Packed {
        let handle = request.handle()?;
        let (cookie, _verifier) = (request.args.u64()?, request.args.array::<8>()?);
        let count = request.args.u32()?.min(LISTING_MAX) as usize;
        request.args.end()?;
        Ok(self.list(request.caller, handle, cookie, &Limits { names: count, all: count }, false))
    }

    pub(super) fn readdirplus(&self, mut request: Request<'_>) -> Packed {
        let handle = request.handle()?;
        let (cookie, _verifier) = (request.args.u64()?, request.args.array::<8>()?);
        let names = request.args.u32()?.min(LISTING_MAX) as usize;
        let all = request.args.u32()?.min(LISTING_MAX) as usize;
        request.args.end()?;
        Ok(self.list(request.caller, handle, cookie, &Limits { names, all }, true))
    }

    fn list(&self, caller: &Caller, handle: &[u8], cookie: u64, limits: &Limits, is_plus: bool) -> Vec<u8> {
        // The results of both have the same fields at this place.
        let refuse = |failed, dir_attributes| {
            if is_plus {
                refused(failed, READDIRPLUS3resfail { dir_attributes })
            } else {
                refused(failed, READDIR3resfail { dir_attributes })
            }
        };
        let (directory, key) = match self.object(handle) {
            Ok(found) => found,
            Err(failed) => return refuse(failed, Nfs3Option::None),
        };
        let listed =
            directory.expect_directory().and_then(|()| self.entries(caller, &directory, cookie, limits, is_plus));
        let dir_attributes = self.after(&directory, &key);
        match listed {
            Ok(entries) => {
                let mut results = Vec::with_capacity(HEAD + entries.len());
                results.extend_from_slice(&pack(&nfsstat3::NFS3_OK));
                results.extend_from_slice(&pack(&dir_attributes));
                results.extend_from_slice(&pack(&cookieverf3::default()));
                results.extend_from_slice(&entries);
                results
            }
            Err(failed) => refuse(failed, dir_attributes),
        }
    }

    /// The entries from a cookie on that there is room for, as XDR up to the results' end.
    fn entries(
        &self,
        caller: &Caller,
        directory: &Object,
        cookie: u64,
        limits: &Limits,
        is_plus: bool,
    ) -> Outcome<Vec<u8>> {
        if cookie > i64::MAX as u64 {
            return Err(Failed(nfsstat3::NFS3ERR_BAD_COOKIE));
        }
        let is_root = self.export.is_root(directory);
        // Not many more than there is room for: what is read beyond is read again.
        let len = if is_plus { limits.all / 4 } else { limits.names };
        let mut buffer = vec![MaybeUninit::uninit(); len.clamp(1 << 10, LISTING_MAX as usize)];
        let mut listing = Listing::new(limits);
        let is_end = act_as(caller, || {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            // By its path and not by a name in itself, which only those may look up that may search it.
            let open = rustix::fs::open(directory.path(), flags, Mode::empty())?;
            if cookie != 0 {
                seek(&open, SeekFrom::Start(cookie))?;
            }
            let mut entries = RawDir::new(&open, &mut buffer);
            while let Some(entry) = entries.next() {
                let entry = entry?;
                let (name, cookie) = (entry.file_name(), entry.next_entry_cookie());
                // The parent of the tree's root is the root.
                let fileid = if is_root && name == c".." { directory.stat.st_ino } else { entry.ino() };
                let found = if is_plus { self.found(directory, name) } else { None };
                let packed =
                    if is_plus { pack_plus(fileid, name, cookie, found) } else { pack_plain(fileid, name, cookie) };
                if !listing.push(name, &packed) {
                    return Ok(false);
                }
            }
            Ok(true)
        })?;
        listing.end(is_end)
    }

    /// Attributes and handle of an entry. None where the caller may not search, or where another file system begins.
    fn found(&self, directory: &Object, name: &CStr) -> Option<(fattr3, Handle)> {
        let name = if name == c".." && self.export.is_root(directory) { c"." } else { name };
        let object = Object::new(open_entry(directory.fd.as_fd(), name).ok()?).ok()?;
        let handle = self.export.handle(object.fd.as_fd()).ok()?;
        Some((self.attributes(&object.stat, &object.key(handle.as_ref())), handle))
    }
}

/// Bytes of results without entries: status, attributes, verifier, the end of the list and of the directory.
const HEAD: usize = 4 + 88 + 8 + 8;

/// Entries as they are packed.
struct Listing<'a> {
    limits: &'a Limits,
    packed: Vec<u8>,
    names: usize,
    count: usize,
}

impl<'a> Listing<'a> {
    fn new(limits: &'a Limits) -> Self {
        Self { limits, packed: Vec::new(), names: 0, count: 0 }
    }

    /// Adds an entry. False: there is no room for it.
    fn push(&mut self, name: &CStr, entry: &[u8]) -> bool {
        let names = self.names + 4 + 8 + 4 + name.count_bytes().next_multiple_of(4) + 8;
        if names > self.limits.names || HEAD + self.packed.len() + 4 + entry.len() > self.limits.all {
            return false;
        }
        self.packed.extend_from_slice(&pack(&true));
        self.packed.extend_from_slice(entry);
        self.names = names;
        self.count += 1;
        true
    }

    fn end(mut self, is_end: bool) -> Outcome<Vec<u8>> {
        if self.count == 0 && !is_end {
            return Err(Failed(nfsstat3::NFS3ERR_TOOSMALL));
        }
        self.packed.extend_from_slice(&pack(&false));
        self.packed.extend_from_slice(&pack(&is_end));
        Ok(self.packed)
    }
}

fn pack_plain(fileid: u64, name: &CStr, cookie: u64) -> Vec<u8> {
    pack(&entry3 { fileid, name: name.to_bytes().into(), cookie })
}

fn pack_plus(fileid: u64, name: &CStr, cookie: u64, found: Option<(fattr3, Handle)>) -> Vec<u8> {
    let (name_attributes, name_handle) = match found {
        Some((attributes, handle)) => (Nfs3Option::Some(attributes), Nfs3Option::Some(wire(&handle))),
        None => (Nfs3Option::None, Nfs3Option::None),
    };
    pack(&entryplus3 { fileid, name: name.to_bytes().into(), cookie, name_attributes, name_handle })
}
