//! A server's page array: each request uses up a prefix, and only the missing pages are filled in for the next one.
//!
//! `cargo run -p pagemill --example array_with_holes`
use pagemill::{Allocator, Bulk, Error, Page, free_pages_bulk};

/// Pages for the largest request, as an NFS server with 1 MiB reads and writes has them.
const SLOTS: usize = 259;

fn main() -> Result<(), Error> {
    let memory = Allocator::builder().bytes(16 << 20).build()?;
    let mut slots: [Option<Page>; SLOTS] = [const { None }; SLOTS];

    for (request, used) in [(1, 3), (2, 200), (3, 1)] {
        // One call fills the holes, wherever they are, and leaves the other slots alone.
        let filled = memory.alloc_pages_bulk_array(Bulk::up_to(SLOTS), &mut slots)?;
        println!("request {request}: {} pages added, {} of {SLOTS} slots occupied", filled.added, filled.occupied);
        // Fewer would be no error: all slots before the first hole can be used meanwhile.
        assert_eq!((filled.first_hole, filled.shortfall), (SLOTS, None));

        // The request keeps the pages that it used: they go out with the reply.
        let reply: Vec<Page> = slots[..used].iter_mut().filter_map(Option::take).collect();
        assert_eq!(reply.len(), used);
    }

    // Holes anywhere: P.P.P.P.
    slots.iter_mut().skip(1).step_by(2).for_each(|slot| drop(slot.take()));
    let filled = memory.alloc_pages_bulk_array(Bulk::up_to(SLOTS), &mut slots)?;
    println!("every other one: {} added, {} occupied", filled.added, filled.occupied);
    assert_eq!(filled.occupied, SLOTS);

    // The whole array goes back in one call, which empties it.
    assert_eq!(free_pages_bulk(&mut slots), SLOTS);
    assert_eq!(memory.validate().unwrap().handed_out, 0);
    Ok(())
}
