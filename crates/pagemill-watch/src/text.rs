//! The figures as Prometheus text, version 0.0.4 of that format.
use crate::{FIGURES, Snapshot};
use core::fmt::Write;

/// The [`FIGURES`] of these allocators in Prometheus' text format, for a program that answers scrapes itself.
///
/// ```
/// use pagemill::Allocator;
/// use pagemill_watch::{Snapshot, prometheus};
/// let allocator = Allocator::builder().pages(100).build()?;
/// let text = prometheus(&[Snapshot::of("mine", &allocator)]);
/// assert!(text.contains("# TYPE pagemill_zone_free_pages gauge\n"));
/// assert!(text.contains("pagemill_zone_free_pages{allocator=\"mine\",node=\"0\",zone=\"Normal\"} 100\n"));
/// # Ok::<(), pagemill::Error>(())
/// ```
pub fn prometheus(seen: &[Snapshot]) -> String {
    let mut text = String::new();
    for figure in FIGURES.iter() {
        let samples = figure.samples(seen);
        if samples.is_empty() {
            continue;
        }
        // Writing to a string can't fail.
        let _ = writeln!(text, "# HELP {} {}", figure.name, figure.help);
        let _ = writeln!(text, "# TYPE {} {}", figure.name, figure.kind.name());
        for sample in samples {
            text.push_str(figure.name);
            for (i, (name, value)) in sample.labels.iter().enumerate() {
                let _ = write!(text, "{}{name}=\"{}\"", if i == 0 { '{' } else { ',' }, escaped(value));
            }
            let close = if sample.labels.is_empty() { "" } else { "}" };
            let _ = writeln!(text, "{close} {}", sample.value);
        }
    }
    text
}

/// A label's value, escaped for quotes.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemill::Allocator;
    use std::collections::{HashMap, HashSet};

    /// Parses one line by the format's grammar: name, labels, value.
    fn parsed(line: &str) -> (String, Vec<(String, String)>, f64) {
        let name: String = line.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        let mut rest = &line[name.len()..];
        let mut labels = Vec::new();
        if let Some(inside) = rest.strip_prefix('{') {
            rest = inside;
            while !rest.starts_with('}') {
                let (label, after) = rest.split_once("=\"").unwrap();
                let (mut value, mut chars) = (String::new(), after.char_indices());
                let end = loop {
                    match chars.next().unwrap() {
                        (at, '"') => break at,
                        (_, '\\') => value.push(match chars.next().unwrap().1 {
                            'n' => '\n',
                            c @ ('\\' | '"') => c,
                            c => panic!("\\{c} is no escape, in {line}"),
                        }),
                        (_, c) => value.push(c),
                    }
                };
                labels.push((label.to_owned(), value));
                rest = after[end + 1..].strip_prefix(',').unwrap_or(&after[end + 1..]);
            }
            rest = &rest[1..];
        }
        (name, labels, rest.strip_prefix(' ').unwrap().parse().unwrap())
    }

    #[test]
    fn the_prometheus_text_parses_back_to_the_samples() {
        let allocator = Allocator::builder().pages(3000).build().unwrap();
        let pages: Vec<_> = (0..70).map(|_| allocator.alloc_page(pagemill::Gfp::KERNEL).unwrap()).collect();
        let odd = "a \"quoted\\\" name,}\nof two lines";
        let pools = [odd, odd, ""].map(|name| pagemill::PagePool::pages(&allocator).named(name));
        let caches = [odd, odd, ""].map(|name| pagemill::PageCache::builder(&allocator).named(name).build());
        let seen = [Snapshot::of(odd, &allocator), Snapshot::of("plain", &allocator)];
        let text = prometheus(&seen);
        assert!(text.ends_with('\n'));
        let (mut types, mut met, mut values) = (HashMap::new(), HashSet::new(), HashMap::new());
        let mut now = "";
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                now = rest.split_once(' ').unwrap().0;
                assert!(met.insert(now), "{now}: the lines of one figure stand together");
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                assert_eq!(rest.split_once(' ').unwrap().0, now, "HELP and TYPE go before the samples");
                types.insert(now, rest.split_once(' ').unwrap().1);
            } else {
                let (name, labels, value) = parsed(line);
                assert_eq!(name, now);
                assert!(["counter", "gauge"].contains(&types[now]), "{line}");
                assert!(values.insert((name, labels), value).is_none(), "{line} appears twice");
            }
        }
        for figure in FIGURES.iter() {
            for sample in figure.samples(&seen[..1]) {
                let labels = sample.labels.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
                let found = values.get(&(figure.name.to_owned(), labels));
                // Figures of the process may change meanwhile: other tests run in it.
                let is_ours = sample.labels.iter().any(|(name, _)| *name == "allocator");
                assert!(found.is_some_and(|found| !is_ours || *found == sample.value as f64), "{}", figure.name);
            }
        }
        for (figure, label) in [("page_pool_in_flight", "page_pool"), ("page_cache_pages", "page_cache")] {
            let of: Vec<_> = values.keys().filter(|(name, _)| *name == format!("pagemill_{figure}")).collect();
            let named = |is: &str| of.iter().filter(|(_, labels)| labels[0] == (label.into(), is.into())).count();
            assert_eq!((named(odd), named("")), (2, 1), "{of:?}");
        }
        drop((pages, pools, caches));
    }
}
