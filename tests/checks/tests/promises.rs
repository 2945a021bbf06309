//! Promises about the library's inner working that a caller can observe: which backend it chooses, how many sections a request
//! takes, what the metadata costs.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use pagemill::{Allocator, Backend, Bulk, Gfp, PageList};

/// The output and the exit code of the program `backend` with these variables set.
fn backend<V: AsRef<OsStr> + Copy>(variables: &[(&str, V)]) -> (String, Option<i32>) {
    let mut program = Command::new(env!("CARGO_BIN_EXE_backend"));
    program.env_remove("PAGEMILL_BACKEND").env_remove("GLIBC_TUNABLES").envs(variables.iter().copied());
    let output = program.output().expect("the program can be started");
    (String::from_utf8_lossy(&output.stdout).trim().to_owned(), output.status.code())
}

/// C4.2: the backend is chosen at start-up by a self-test, or forced by name. A refusal is an error, not a crash.
#[test]
fn the_backend_is_chosen_by_the_self_test_or_by_name() {
    assert_eq!(backend(&[("PAGEMILL_BACKEND", "portable")]), ("backend: portable".to_owned(), Some(0)));
    for (variable, wrong) in
        [("PAGEMILL_BACKEND", &b"fast"[..]), ("PAGEMILL_BACKEND", b"\xff"), ("PAGEMILL_FAIL", b"\xff")]
    {
        let (words, status) = backend(&[(variable, OsStr::from_bytes(wrong))]);
        assert_eq!(status, Some(1), "{variable}: {words}");
        assert!(
            variable == "PAGEMILL_FAIL" || words.contains("set PAGEMILL_BACKEND to `rseq` or `portable`"),
            "{words}"
        );
    }

    // With glibc's registration turned off, restartable sequences do not work.
    let off = ("GLIBC_TUNABLES", "glibc.pthread.rseq=0");
    assert_eq!(backend(&[off]), ("backend: portable".to_owned(), Some(0)));
    let (words, status) = backend(&[off, ("PAGEMILL_BACKEND", "rseq")]);
    assert!(words.starts_with("unavailable: ") && status == Some(3), "{words}");

    match pagemill::self_test() {
        Ok(()) => assert_eq!(backend::<&str>(&[]), ("backend: rseq".to_owned(), Some(0))),
        Err(why) => println!("skipped: restartable sequences: {why}"),
    }
}

/// C3.5: a batch takes one section for each K pages, K a constant, besides the sections of its refills. The portable backend asks
/// for the CPU's number once a section, so counting the questions counts the sections.
#[test]
fn a_batch_takes_one_section_for_many_pages() {
    static ASKED: AtomicUsize = AtomicUsize::new(0);
    fn here() -> usize {
        ASKED.fetch_add(1, Relaxed);
        0
    }
    let memory = Allocator::builder().pages(1 << 16).cpus(1, here).build().expect("an arena");
    // Warm up: afterwards the list has pages.
    let mut list = PageList::new();
    memory.alloc_pages_bulk_list(Bulk::exact(64), &mut list).expect("64 pages");
    list.clear();

    for pages in [1, 16, 64] {
        let before = ASKED.load(Relaxed);
        memory.alloc_pages_bulk_list(Bulk::exact(pages), &mut list).expect("pages from the list");
        let sections = ASKED.load(Relaxed) - before;
        // One for the pages, one for counting the call.
        assert!(sections <= 2, "{sections} sections for {pages} pages that were on the list");
        list.clear();
    }
    let before = ASKED.load(Relaxed);
    memory.alloc_pages_bulk_list(Bulk::exact(16_384), &mut list).expect("16384 pages");
    let sections = ASKED.load(Relaxed) - before;
    // K is 64, and a batch has three sections: for its pages, for its refill, for the place of the refill.
    assert!(sections <= 3 * 16_384 / 64, "{sections} sections for 16384 pages");
}

/// C10.3: at most two bits a frame. The index of pageblocks takes 400 bytes for up to 64 of them, so a small arena pays more for
/// each frame. For small arenas the bound is in bytes.
#[test]
fn free_and_used_cost_at_most_two_bits_a_frame() {
    for pages in [1 << 13, 1 << 14, 1 << 18, (1 << 20) + 1] {
        let memory = Allocator::builder().pages(pages).build().expect("address space");
        let bits = memory.metadata_bits_per_frame();
        assert!((1.0..=2.0).contains(&bits), "{bits} bits a frame for {pages} pages");
    }
    for pages in [1, 512, 1000] {
        let memory = Allocator::builder().pages(pages).build().expect("address space");
        let bytes = memory.metadata_bits_per_frame() * pages as f64 / 8.0;
        assert!(bytes <= 1024.0, "{bytes} bytes for {pages} pages");
    }
}

/// C3.13: the counters add up, also for requests that go past the lists.
#[test]
fn pages_allocated_less_pages_freed_are_out() {
    for backend in [Backend::Portable, Backend::Rseq] {
        if backend == Backend::Rseq
            && let Err(why) = pagemill::self_test()
        {
            println!("skipped: restartable sequences: {why}");
            continue;
        }
        let memory = Allocator::builder().pages(1 << 15).backend(backend).build().expect("an arena");
        let page = memory.alloc_page(Gfp::KERNEL).expect("a page");
        let mut list = PageList::new();
        for pages in [1, 64, 65, 5000] {
            memory.alloc_pages_bulk_list(Bulk::exact(pages), &mut list).expect("pages");
            let stats = memory.stats();
            assert_eq!(stats.allocated - stats.freed, 1 + pages as u64, "{backend}");
            assert_eq!(memory.validate().unwrap().handed_out, 1 + pages, "{backend}");
            list.clear();
        }
        drop(page);
        let stats = memory.stats();
        assert_eq!((stats.allocated, stats.freed), (1 + 5130, 1 + 5130), "{backend}");
    }
}
