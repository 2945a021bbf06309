//! Plain pages in front of the cipher: a page cache whose backing reads the disk and decrypts.
//!
//! Only reads go through it. A write goes to the disk as without it. When it is there, or has failed, and before the client
//! is told, its pages leave the cache ([`forget`]). The cache has no dirty page, so a flush, a durable write and a trim mean
//! what they mean without it.
//!
//! Invariant: a read that begins after a write was answered returns that write's bytes, or later ones (K1). A page is in the
//! cache's index before its bytes are read from the disk. So a read of the disk that began before the write was done has its
//! pages in the index when `forget` looks: it waits for them, and takes them out. A read that begins later finds the new
//! bytes on the disk.
//!
//! Nobody who has a page of the cache waits for a worker, so `forget` waits for the disk alone.
use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::Weak;
use std::time::Duration;

use pagemill::{Backing, CachedFile, PAGE_SIZE, PageCache, PageCount};

use super::buffer::Buffer;
use super::path::DataPath;
use super::{Shared, disk};

/// The volume of this number, as the cache reads it.
struct Plain(Weak<Shared>, usize);

/// Gives all volumes a cache of up to `pages` pages of the server's allocator. They are zeroed before they are freed.
pub(super) fn open(shared: &std::sync::Arc<Shared>, pages: PageCount) -> io::Result<()> {
    let allocator = shared.path().memory.allocator();
    let cache = PageCache::builder(allocator).limit(pages).wiped(true).named("crypt").build();
    for (number, volume) in shared.volumes.iter().enumerate() {
        let _ = volume.cached.set(cache.open(Plain(std::sync::Arc::downgrade(shared), number))?);
    }
    Ok(())
}

/// Fills a buffer from byte `at` of the volume.
pub(super) fn read(file: &CachedFile, mut at: u64, buffer: &mut Buffer) -> io::Result<()> {
    for slice in buffer.slices_mut() {
        file.read_exact_at(slice, at)?;
        at += slice.len() as u64;
    }
    Ok(())
}

/// Takes the pages of these bytes out of the cache, zeroed. Waits for those that are being read.
pub(super) fn forget(file: &CachedFile, bytes: Range<u64>) {
    let mut looks = 0;
    while file.invalidate(bytes.clone()) > 0 {
        looks += 1;
        match looks {
            ..32 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(50)),
        }
    }
}

impl Plain {
    fn with<T>(&self, act: impl FnOnce(&DataPath) -> io::Result<T>) -> io::Result<T> {
        let shared = self.0.upgrade().ok_or_else(|| io::Error::other("the server has ended"))?;
        act(&shared.volumes[self.1].path)
    }
}

impl Backing for Plain {
    fn len(&self) -> io::Result<u64> {
        self.with(|path| Ok(path.volume.geometry().len))
    }

    /// All of it, so that no sector is read in part.
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        self.with(|path| {
            let mut left = path.volume.geometry().len.saturating_sub(at);
            let cut = into.iter_mut().map_while(|slice| {
                let len = slice.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                left -= len as u64;
                (len > 0).then(|| &mut slice[..len])
            });
            let mut slices: Vec<&mut [u8]> = cut.collect();
            let len = slices.iter().map(|slice| slice.len()).sum();
            disk::read_all(&path.disk, &mut slices, path.in_file(at))?;
            let mut at = at;
            for slice in slices {
                path.volume.decrypt_in_place(at, slice).map_err(io::Error::other)?;
                at += slice.len() as u64;
            }
            Ok(len)
        })
    }

    fn write_vectored_at(&self, _: &[IoSlice<'_>], _: u64) -> io::Result<usize> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn set_len(&self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn largest(&self) -> usize {
        disk::ENTRIES * PAGE_SIZE
    }
}
