//! Progress when memory is out: two writers share a reserve that is enough for one of them at a time.
//!
//! `cargo run -p pagemill --example mempool`
use pagemill::{Allocator, Bulk, Error, Gfp, Mempool, PageList, PageMempool, Pooled};

/// Pages that one write has. A request for more than the reserve could wait for ever, and is refused.
const PAGES: usize = 64;

/// Writes `rounds` times: takes all pages at once, fills them, and frees them. A writer that held some while asking for more could
/// wait for another that does the same. An early `?` loses nothing: the handles in `pages` go back to the pool.
fn write(pool: &PageMempool, rounds: usize, mark: u8) -> Result<(), Error> {
    let mut pages: [Option<Pooled<&PageMempool>>; PAGES] = [const { None }; PAGES];
    for _ in 0..rounds {
        // NOIO: a shrinker that writes pages out would come back here.
        pool.alloc_bulk_array(Bulk::exact(PAGES).gfp(Gfp::NOIO), &mut pages)?;
        pages.iter_mut().flatten().for_each(|page| page[..64].fill(mark));
        std::thread::yield_now(); // As long as the disk takes.
        assert!(pages.iter().flatten().all(|page| page[..64] == [mark; 64]));
        assert_eq!(pool.free_bulk(&mut pages), PAGES);
    }
    Ok(())
}

fn main() -> Result<(), Error> {
    let memory = Allocator::builder().pages(2 * PAGES).build()?;
    let pool = Mempool::pages(&memory, PAGES)?;

    // Somebody else has all that is left.
    let mut hog = PageList::new();
    memory.alloc_pages_bulk_list(Bulk::up_to(2 * PAGES), &mut hog)?;
    assert!(memory.alloc_page(Gfp::NOWAIT).is_err());

    std::thread::scope(|scope| {
        let writers = [1, 2].map(|mark| {
            scope.spawn({
                let pool = &pool;
                move || write(pool, 1000, mark)
            })
        });
        writers.into_iter().try_for_each(|writer| writer.join().expect("it does not panic"))
    })?;

    let stats = pool.stats();
    println!(
        "{} pages came from the reserve; {} waits, the longest {} us",
        stats.from_reserve, stats.waits, stats.longest_wait_us
    );
    assert_eq!((stats.from_reserve, stats.low_water, stats.out), (2 * 1000 * PAGES as u64, 0, 0));
    pool.close().expect("all of its pages came back");
    drop(hog);
    assert_eq!(memory.validate().unwrap().handed_out, 0);
    Ok(())
}
