//! The table `rpc` of `pagemill bench`.
use std::fs;

use serde_json::Value;

use crate::common::Folder;

#[test]
fn each_way_to_refill_an_array_has_figures_and_the_slice_is_judged() {
    let folder = Folder::new();
    let outcome = folder.pagemill(&["bench", "rpc", "--quick", "--bars", "--json", "out.json"]);
    let text = &outcome.done().stdout;
    let json = fs::read_to_string(folder.path("out.json")).unwrap();
    let lines: Vec<Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for (part, holes) in [("first", 64), ("last", 64), ("spread", 64), ("all", 259), ("one", 1)] {
        for name in ["array-slice", "array-whole", "list", "one-by-one", "array-stops"] {
            for order in ["random", "in-order"] {
                let is_it = |line: &&Value| {
                    line["bench"] == format!("rpc-refill-{part}") && line["impl"] == name && line["order"] == order
                };
                let found: Vec<&Value> = lines.iter().filter(is_it).collect();
                assert!(
                    matches!(found[..], [line] if line["n"] == holes && line["total_ns"].as_f64() > Some(0.0)),
                    "{part} {name} {order}: {found:?}"
                );
            }
        }
    }
    for words in ["64 in one slice: one by one / array", ">= 3.00", "25.007", "6.258", "4.590", "not of this run"] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    text.lines().for_each(|line| assert!(line.chars().count() <= 80, "{line}"));
}
