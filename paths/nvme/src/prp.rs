//! The places of a command's data: Physical Region Page entries (section 4.3).
//!
//! A command has two entries. The first is the address where the data begins, possibly inside of a page. With two
//! pages, the second entry is the other page. With more pages, it is the address of a list of entries: whole pages
//! anywhere in memory, in the data's order. A list may not cross a page; if it is too short, its page's last entry is
//! the address of the next list. So the last entry of a page is a pointer exactly if more than one page is still to
//! come (I1). Nothing else marks a pointer, so both sides have to count in the same way.
use crate::spec::PAGE;

/// Entries of a list that fills a page.
pub(crate) const PER_LIST: usize = PAGE / size_of::<u64>();
/// Entries of a short list. Most commands are 128 KiB or smaller, so most lists take a sixteenth of a page.
pub(crate) const PER_SHORT_LIST: usize = 32;
/// Bytes of a short list. It is aligned to as many, so it never crosses a page.
pub(crate) const SHORT_LIST_BYTES: usize = PER_SHORT_LIST * size_of::<u64>();

/// A command's two entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Prp {
    pub(crate) first: u64,
    pub(crate) second: u64,
}

/// The lists that a command needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lists {
    /// No list: its pages are in the command.
    None,
    /// A short one.
    Short,
    /// This many lists of a page each.
    Long(usize),
}

/// The lists that are needed for this many pages.
pub(crate) fn lists_for(pages: usize) -> Lists {
    match pages {
        0..=2 => Lists::None,
        _ if pages - 1 <= PER_SHORT_LIST => Lists::Short,
        // The last list has pages in all of its entries, the others in all but one.
        _ => Lists::Long((pages - 2).div_ceil(PER_LIST - 1).max(1)),
    }
}

/// Memory for a list: the addresses for this process and for the controller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// Room for as many entries as the list's kind has.
    pub(crate) at: *mut u64,
    /// Its device address.
    pub(crate) addr: u64,
}

/// Writes the entries for pages at these device addresses. The first address may be inside of its page.
///
/// # Safety
/// `rooms` are as many as [`lists_for`] says and of that kind. Each can be written, and nobody else accesses it.
///
/// # Panics
/// If there are no pages, or not as many lists as they need.
pub(crate) unsafe fn write(pages: &[u64], rooms: &[Room]) -> Prp {
    let [first, rest @ ..] = pages else { panic!("a command that moves data has at least one page") };
    let (first, second) = (*first, rest.first().copied().unwrap_or(0));
    let per_list = match lists_for(pages.len()) {
        Lists::None => return Prp { first, second },
        Lists::Short => PER_SHORT_LIST,
        Lists::Long(_) => PER_LIST,
    };
    let mut left = rest;
    for (nth, room) in rooms.iter().enumerate() {
        let is_last = left.len() <= per_list;
        let here = if is_last { left.len() } else { per_list - 1 };
        for (at, page) in left[..here].iter().enumerate() {
            // SAFETY: as the caller promises, the list has room for `per_list` entries, and `at` is below that. In
            // tests it may be less aligned than a u64, hence `write_unaligned`.
            unsafe { room.at.add(at).write_unaligned(page.to_le()) };
        }
        left = &left[here..];
        if is_last {
            break;
        }
        let next = rooms.get(nth + 1).unwrap_or_else(|| panic!("{} lists for {} pages", rooms.len(), pages.len()));
        // SAFETY: as above, for the last entry.
        unsafe { room.at.add(here).write_unaligned(next.addr.to_le()) };
    }
    assert!(left.is_empty(), "{} lists for {} pages", rooms.len(), pages.len());
    Prp { first, second: rooms[0].addr }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::fake::walk;

    /// Writes the lists for `pages` into memory of their own. Returns the command's entries, and the lists as the
    /// device sees them; a short list is somewhere in a page.
    fn built(pages: &[u64], short_at: u64) -> (Prp, BTreeMap<u64, u64>) {
        let (count, per_list) = match lists_for(pages.len()) {
            Lists::None => (0, 0),
            Lists::Short => (1, PER_SHORT_LIST),
            Lists::Long(count) => (count, PER_LIST),
        };
        let inside = if per_list == PER_SHORT_LIST { short_at * SHORT_LIST_BYTES as u64 } else { 0 };
        // Entries that are not written are no page's address.
        let mut memory: Vec<Vec<u64>> = vec![vec![0x0bad; per_list]; count];
        let rooms = memory.iter_mut().zip(1..);
        let rooms: Vec<_> =
            rooms.map(|(list, nth)| Room { at: list.as_mut_ptr(), addr: 0xf_0000_0000 * nth + inside }).collect();
        // SAFETY: as many lists as are needed, each a vector of that length.
        let prp = unsafe { write(pages, &rooms) };
        let mut seen = BTreeMap::new();
        for (room, list) in rooms.iter().zip(&memory) {
            seen.extend(list.iter().zip(0..).map(|(entry, nth)| (room.addr + 8 * nth, u64::from_le(*entry))));
        }
        (prp, seen)
    }

    proptest! {
        /// For any length, any place in the first page, and pages anywhere, the controller finds each byte.
        #[test]
        fn a_controller_that_walks_the_lists_finds_every_byte(
            bytes in prop_oneof![1usize..20_000, 1usize..5_000_000],
            inside in 0usize..PAGE / 4,
            short_at in 0u64..16,
            seed in any::<u64>(),
        ) {
            let inside = 4 * inside;
            let count = (inside + bytes).div_ceil(PAGE);
            let mut pages: Vec<u64> = (0..count as u64)
                .map(|nth| (seed ^ nth).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20 << 12 & 0x000f_ffff_ffff_f000)
                .collect();
            let whole = pages.clone();
            pages[0] += inside as u64;
            let (prp, memory) = built(&pages, short_at);
            let pieces = walk(prp, bytes, &mut |at| memory.get(&at).copied().unwrap_or(0x0bad)).unwrap();
            prop_assert_eq!(pieces.iter().map(|piece| piece.1).sum::<usize>(), bytes);
            prop_assert_eq!(pieces.len(), count);
            for (nth, (at, len)) in pieces.iter().enumerate() {
                let begin = if nth == 0 { inside as u64 } else { 0 };
                prop_assert_eq!(*at, whole[nth] + begin);
                prop_assert!(begin as usize + len <= PAGE);
                prop_assert!(nth + 1 == count || begin as usize + len == PAGE, "a hole behind piece {}", nth);
            }
        }
    }

    /// Around each length at which another list is needed.
    #[test]
    fn as_many_lists_as_are_needed_and_no_more() {
        assert_eq!(lists_for(1), Lists::None);
        assert_eq!(lists_for(2), Lists::None);
        assert_eq!(lists_for(3), Lists::Short);
        assert_eq!(lists_for(33), Lists::Short);
        assert_eq!(lists_for(34), Lists::Long(1));
        assert_eq!(lists_for(513), Lists::Long(1), "512 entries in one list, the last of them a page");
        assert_eq!(lists_for(514), Lists::Long(2), "511, a pointer, 2");
        assert_eq!(lists_for(513 + 511), Lists::Long(2));
        assert_eq!(lists_for(513 + 512), Lists::Long(3));
        for pages in 1..3000 {
            let pages: Vec<u64> = (0..pages).map(|nth| 0x1000 * (nth * 7 + 1)).collect();
            let (prp, memory) = built(&pages, 15);
            let pieces = walk(prp, pages.len() * PAGE, &mut |at| memory[&at]).unwrap();
            assert_eq!(pieces.iter().map(|piece| piece.0).collect::<Vec<_>>(), pages);
        }
    }
}
