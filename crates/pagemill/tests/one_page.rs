//! Holds `docs/one-page.md` against a real trace: the steps that a page goes through, in order, and where each stands.
use pagemill::{Allocator, Backend, Gfp};
use pagemill_core::trace;
use std::path::Path;

/// The document's headings: `### 4. \`Zones::take_one\` (crates/pagemill/src/slow.rs)`.
fn documented() -> Vec<(String, String)> {
    let text = std::fs::read_to_string(root().join("docs/one-page.md")).unwrap();
    let headings = text.lines().filter(|line| line.starts_with("### "));
    headings
        .enumerate()
        .map(|(i, line)| {
            let line =
                line.strip_prefix(&format!("### {}. `", i + 1)).unwrap_or_else(|| panic!("{line}: not step {}", i + 1));
            let (name, file) = line.split_once("` (").unwrap();
            (name.to_owned(), file.trim_end_matches(')').to_owned())
        })
        .collect()
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

#[test]
fn the_document_matches_a_trace() {
    let allocator = Allocator::builder().pages(1024).backend(Backend::Portable).cpus(1, || 0).build().unwrap();
    trace::take();
    let page = allocator.alloc_page(Gfp::KERNEL).unwrap(); // from the zone
    drop(page); // to the list
    let page = allocator.alloc_page(Gfp::KERNEL).unwrap(); // from the list
    drop(page);
    allocator.drain(); // to the zone
    let went: Vec<&str> = trace::take();
    let told = documented();
    let names: Vec<&str> = told.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, went, "docs/one-page.md tells the left, a page went through the right");
    for (name, file) in &told {
        let source = std::fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        let marked = source.split_once(&format!("step!(\"{name}\")"));
        let (before, _) = marked.unwrap_or_else(|| panic!("{name} does not stand in {file}"));
        let function = name.rsplit("::").next().unwrap();
        let above = before.rsplit_once("fn ").map(|(_, rest)| rest).unwrap_or_default();
        let is_it = above.starts_with(&format!("{function}(")) || above.starts_with(&format!("{function}<"));
        assert!(is_it, "{name} is marked in another function of {file}: {}", above.lines().next().unwrap_or_default());
    }
}
