//! Memory that runs short: marks, waits that end, the reason, a cache that gives way, and faults on purpose.
//!
//! `cargo run -p pagemill --example pressure`
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pagemill::{Allocator, Bulk, Cancel, Error, Faults, Gfp, Memory, Page, PageList, Shrink, Shrinker, Watermarks};

/// Pages that the program can do without.
struct Cache(Mutex<Vec<Page>>);

impl Shrinker for Cache {
    fn shrink(&self, wanted: Shrink) -> usize {
        // The thread that holds the cache's lock may be the one that asks for memory: no wait here.
        let Ok(mut pages) = self.0.try_lock() else { return 0 };
        let rest = pages.len().saturating_sub(wanted.pages);
        pages.drain(rest..).count() // dropped, and so freed
    }
}

fn main() -> Result<(), Error> {
    let marks = Watermarks::above(100);
    let memory = Allocator::builder().memory(Memory::anonymous(1024).watermarks(marks)).build()?;
    let cached: Vec<Page> = std::iter::from_fn(|| memory.alloc_page(Gfp::NOWAIT).ok()).collect();
    println!("{} pages cached; the last {} are for ATOMIC", cached.len(), marks.min);
    assert_eq!(cached.len(), 1024 - 100);

    // Nothing promises that memory comes back, so it takes a deadline to wait; a `Cancel` ends the wait at once.
    let take = |request| memory.alloc_pages_bulk_list(request, &mut PageList::new());
    let (request, cancel) = (Bulk::exact(300), Cancel::new());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| take(request.timeout(Duration::from_secs(60)).cancel(&cancel)));
        while memory.stats().waiting == 0 && !waiting.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
        cancel.cancel();
        let why = waiting.join().unwrap().unwrap_err().to_string();
        println!("cancelled: {why}");
        assert!(why.ends_with("it was cancelled"));
    });
    let why = take(request.timeout(Duration::from_millis(20))).unwrap_err().to_string();
    println!("after 20 ms: {why}");
    assert!(why.contains("before the deadline"));

    // The cache becomes a shrinker: the same request is served now, without a deadline.
    let cache = Arc::new(Cache(Mutex::new(cached)));
    let registered = memory.register_shrinker(cache.clone());
    assert_eq!(take(request)?.blocks, 300);
    println!("the cache gave {} pages", memory.stats().reclaimed);
    assert!(memory.stats().reclaimed >= 300);
    drop(registered);
    cache.0.lock().unwrap().clear();

    // How a program behaves when memory is short can be tried without making it short.
    let faults = Faults::after(3);
    let memory = Allocator::builder().pages(1 << 16).faults(faults.clone()).build()?;
    let pages: Vec<Page> = std::iter::from_fn(|| memory.alloc_page(Gfp::KERNEL).ok()).collect();
    println!("{} pages by three trips to the zone; the next ones failed on purpose", pages.len());
    assert!(!pages.is_empty() && pages.len() < 1 << 16 && faults.injected() > 0);
    Ok(())
}
