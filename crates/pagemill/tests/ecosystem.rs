//! Pages as the types of other crates (feature `bytes`), and as bytes.
use crate::common::one_cpu;
use pagemill::{
    Allocator, Bulk, Device, DmaPool, Exact, Exhausted, Gfp, Identity, InvalidRequest, Memory, Mempool, Misfit, Order,
    Page, Run, Shortfall, Source, Why,
};
use std::error::Error;

fn total(parts: &[&dyn AsRef<[u8]>]) -> usize {
    parts.iter().map(|part| part.as_ref().as_ref().len()).sum()
}

#[test]
fn pages_blocks_and_runs_are_bytes() {
    let allocator = one_cpu(Memory::anonymous(64));
    let mut page = allocator.alloc_page(Gfp::KERNEL).unwrap();
    let mut block = allocator.alloc_pages(Gfp::KERNEL, Order::new(2).unwrap()).unwrap();
    let mut runs: Vec<Run<Page>> = Vec::new();
    allocator.alloc_pages_bulk_runs(Bulk::exact(8), &mut runs).unwrap();
    AsMut::<[u8]>::as_mut(&mut page)[4095] = 1;
    AsMut::<[u8]>::as_mut(&mut block)[16383] = 2;
    runs[0].as_mut()[0] = 3;
    assert_eq!((page[4095], block[16383], runs[0].as_bytes()[0]), (1, 2, 3));
    let mut parts: Vec<&dyn AsRef<[u8]>> = vec![&page, &block];
    parts.extend(runs.iter().map(|run| run as &dyn AsRef<[u8]>));
    assert_eq!(total(&parts), (1 + 4 + 8) * 4096);
}

#[cfg(feature = "bytes")]
#[test]
fn bytes_of_a_page_are_that_page_and_free_it_at_their_end() {
    use bytes::Bytes;
    let allocator = one_cpu(Memory::anonymous(64));
    let mut page = allocator.alloc_page(Gfp::KERNEL).unwrap();
    page[..5].copy_from_slice(b"hello");
    let addr = page.addr();
    let bytes = Bytes::from(page);
    assert_eq!((bytes.as_ptr().addr(), bytes.len()), (addr, 4096), "no copy");
    let part = bytes.slice(..5);
    drop(bytes);
    assert_eq!((&part[..], allocator.validate().unwrap().handed_out), (&b"hello"[..], 1));
    std::thread::spawn(move || drop(part)).join().unwrap();
    assert_eq!(allocator.validate().unwrap().handed_out, 0);

    let block = Bytes::from(allocator.alloc_pages(Gfp::KERNEL, Order::new(3).unwrap()).unwrap());
    let mut runs: Vec<Run<Page>> = Vec::new();
    allocator.alloc_pages_bulk_runs(Bulk::exact(8), &mut runs).unwrap();
    let sent: usize = runs.into_iter().map(Bytes::from).map(|run| run.len()).sum();
    assert_eq!((block.len(), sent, allocator.validate().unwrap().handed_out), (8 * 4096, 8 * 4096, 8));
}

/// A source whose elements are all the same.
struct Numbers;
impl Source for Numbers {
    type Item = u32;
    fn alloc(&self, _: Bulk<'_, Exact, u32>) -> Result<Option<u32>, pagemill::Error> {
        Ok(Some(0))
    }
    fn free(&self, _: u32) {}
}

/// `main` prints the error that it returns by `Debug`.
#[test]
fn errors_print_their_sentence_by_debug_too() {
    let allocator = one_cpu(Memory::anonymous(1));
    let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
    let foreign = std::ptr::with_exposed_provenance_mut(4096);
    let device = Device::new(&allocator, Identity).unwrap();
    let dma = DmaPool::create("out", &device, 64, 0, 0).unwrap();
    drop(page);
    let (_block, pool) = (dma.alloc(Gfp::NOWAIT).unwrap(), Mempool::new(Numbers, 1).unwrap());
    let number = pool.alloc_raw(Gfp::NOWAIT).unwrap();
    let errors: [Box<dyn Error>; 11] = [
        Box::new(allocator.alloc_page(Gfp::NOWAIT).unwrap_err()),
        Box::new(Exhausted { wanted: 2, got: 1, order: 0, why: Why::BelowMark }),
        Box::new(Shortfall { missing: 1, why: Why::BelowMark }),
        Box::new(Order::new(31).unwrap_err()),
        Box::new(InvalidRequest::NoAccount),
        // SAFETY: misuse, on purpose, which is refused.
        Box::new(unsafe { Page::from_raw(foreign) }.unwrap_err()),
        Box::new(Misfit::Sum { counted: 7, found: 8 }),
        Box::new(Allocator::builder().pages(0).build().unwrap_err()),
        Box::new(DmaPool::create("none", &device, 0, 0, 0).unwrap_err()),
        Box::new(dma.destroy().unwrap_err()),
        Box::new(pool.close().unwrap_err()),
    ];
    for error in &errors {
        assert_eq!(format!("{error:?}"), error.to_string());
    }
    let still_out = allocator.close().unwrap_err();
    assert_eq!((number, format!("{still_out:?}")), (0, still_out.to_string()));
}
