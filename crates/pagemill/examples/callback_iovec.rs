//! A file read into pages by one `preadv`: the callback turns each page into an entry of the I/O vector.
//!
//! `cargo run -p pagemill --example callback_iovec [FILE]`
use std::error::Error;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use libc::iovec;
use pagemill::{Allocator, Bulk, PAGE_SIZE, Page, free_pages_bulk};

/// An operation of this many pages: 256 KiB.
const PAGES: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).map_or_else(std::env::current_exe, |path| Ok(path.into()))?;
    let file = File::open(&path)?;
    let memory = Allocator::builder().bytes(16 << 20).build()?;

    let (mut bytes, mut calls, mut entries, mut sum) = (0, 0, 0, 0u64);
    loop {
        let mut pages: Vec<Option<Page>> = Vec::with_capacity(PAGES);
        let mut vector: Vec<iovec> = Vec::with_capacity(PAGES);
        // Each page is handed over as it comes. Neighbours share an entry.
        memory.alloc_pages_bulk_callback(Bulk::up_to(PAGES), |mut page: Page| {
            let base = page.as_mut_ptr();
            match vector.last_mut() {
                Some(last) if last.iov_base as usize + last.iov_len == base as usize => last.iov_len += PAGE_SIZE,
                _ => vector.push(iovec { iov_base: base.cast(), iov_len: PAGE_SIZE }),
            }
            pages.push(Some(page));
        })?;

        let count = vector.len() as i32;
        // SAFETY: each entry covers pages that `pages` owns, and nothing else reads them during the call.
        let read = unsafe { libc::preadv(file.as_raw_fd(), vector.as_ptr(), count, bytes as libc::off_t) };
        let read = usize::try_from(read).map_err(|_| io::Error::last_os_error())?;
        // The contents lie in the pages, in order.
        let contents = pages.iter().flatten().flat_map(|page| page.iter());
        sum += contents.take(read).map(|&byte| u64::from(byte)).sum::<u64>();
        free_pages_bulk(&mut pages);
        if read == 0 {
            break;
        }
        (bytes, calls, entries) = (bytes + read, calls + 1, entries + vector.len());
    }
    println!("{}: {bytes} bytes, which add up to {sum}, in {calls} calls of {entries} entries", path.display());
    let plain: u64 = std::fs::read(&path)?.iter().map(|&byte| u64::from(byte)).sum();
    assert_eq!(sum, plain);
    assert_eq!(memory.validate().unwrap().handed_out, 0);
    Ok(())
}
