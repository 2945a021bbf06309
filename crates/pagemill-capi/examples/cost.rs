//! What a page costs in C and in Rust, in turns of one run: one page out and back, and 64 in bulk, on lists in no particular order.
//!
//! ```sh
//! cargo xtask install --prefix /tmp/pagemill
//! cargo run --release -p pagemill-capi --example cost /tmp/pagemill
//! ```
use pagemill::{Allocator, Bulk, Gfp, Order, Page, free_pages_bulk, free_pages_bulk_raw, free_raw};
use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

const PAGES: usize = 4096;
const SINGLE: u32 = 2_000_000;
const BULK: u32 = 50_000;
const ROUNDS: usize = 9;

type Row = (f64, f64);

/// An allocator whose lists are in no particular order.
fn allocator() -> Allocator {
    let allocator = Allocator::builder().pages(1 << 16).build().unwrap();
    let mut pages: Vec<Option<Page>> = Vec::new();
    allocator.alloc_pages_bulk_array_fresh(Bulk::exact(PAGES), &mut pages).unwrap();
    (0..PAGES).for_each(|at| pages.swap(at, at * 7919 % PAGES));
    pages.into_iter().for_each(drop);
    allocator
}

fn ns(rounds: u32, mut work: impl FnMut()) -> f64 {
    let before = Instant::now();
    (0..rounds).for_each(|_| work());
    before.elapsed().as_nanos() as f64 / f64::from(rounds)
}

fn handles() -> Row {
    let (allocator, mut slots) = (allocator(), [const { None::<Page> }; 64]);
    let single = ns(SINGLE, || drop(black_box(allocator.alloc_page(Gfp::KERNEL).unwrap())));
    let bulk = ns(BULK, || {
        allocator.alloc_pages_bulk_array(Bulk::exact(64), &mut slots).unwrap();
        assert_eq!(free_pages_bulk(black_box(&mut slots)), 64);
    });
    (single, bulk / 64.0)
}

fn pointers() -> Row {
    let (allocator, mut slots) = (allocator(), [core::ptr::null_mut::<u8>(); 64]);
    let single = ns(SINGLE, || {
        let page = black_box(allocator.alloc_page(Gfp::KERNEL).unwrap().into_raw());
        // SAFETY: the page is this function's.
        unsafe { free_raw(page, Order::ZERO) }.unwrap();
    });
    let bulk = ns(BULK, || {
        allocator.alloc_pages_bulk_array_raw(Bulk::exact(64), &mut slots).unwrap();
        // SAFETY: the pages are this function's.
        assert_eq!(unsafe { free_pages_bulk_raw(black_box(&mut slots), Order::ZERO) }, Ok(64));
    });
    (single, bulk / 64.0)
}

/// Compiles cost.c against the library that is installed below `prefix`.
fn compile(prefix: &Path, package: &str, program: &Path) {
    let mut config = Command::new("pkg-config");
    config.args(["--cflags", "--libs", package]).env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"));
    let words = String::from_utf8(config.output().unwrap().stdout).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/cost.c");
    let mut cc = Command::new("cc");
    cc.arg("-O2").arg(source).arg("-o").arg(program).args(words.split_whitespace());
    assert!(cc.status().unwrap().success(), "{cc:?}: is the library installed below {}?", prefix.display());
}

fn in_c(program: &Path, prefix: &Path) -> Row {
    let ran = Command::new(program).env("LD_LIBRARY_PATH", prefix.join("lib")).output().unwrap();
    let text = String::from_utf8(ran.stdout).unwrap();
    let mut numbers = text.split_whitespace().map(|word| word.parse().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

fn main() {
    let prefix = std::env::args().nth(1).expect("the prefix below which the library is installed");
    let prefix = Path::new(&prefix);
    let folder = tempfile::tempdir().unwrap();
    let [shared, fixed] = ["pagemill", "pagemill-static"].map(|package| {
        let program = folder.path().join(package);
        compile(prefix, package, &program);
        program
    });
    let ways: [(&str, &dyn Fn() -> Row); 4] = [
        ("Rust, handles", &handles),
        ("Rust, raw pointers", &pointers),
        ("C, static library", &|| in_c(&fixed, prefix)),
        ("C, shared library", &|| in_c(&shared, prefix)),
    ];
    let mut rows: [Vec<Row>; 4] = Default::default();
    for _ in 0..ROUNDS {
        ways.iter().zip(&mut rows).for_each(|((_, way), rows)| rows.push(way()));
    }
    println!("nanoseconds a page, out and back: median (least to most) of {ROUNDS} rounds in turns");
    println!("{:<20} {:>24} {:>24}", "", "one page", "64 in bulk");
    for ((name, _), rows) in ways.iter().zip(rows) {
        let column = |of: fn(&Row) -> f64| {
            let mut values: Vec<f64> = rows.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            format!("{:.2} ({:.2} to {:.2})", values[ROUNDS / 2], values[0], values[ROUNDS - 1])
        };
        println!("{name:<20} {:>24} {:>24}", column(|row| row.0), column(|row| row.1));
    }
}
