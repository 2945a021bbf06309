//! A frame's link: a list of pages keeps the number of its next frame there.
use super::body::Zone;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use pagemill_core::Pfn;

impl Zone {
    /// A frame's link, where a list keeps the number of its next frame.
    #[inline]
    pub(crate) fn link(&self, pfn: Pfn) -> &AtomicU32 {
        debug_assert!(self.has_pfn(pfn));
        // SAFETY: a frame of this arena has a link, for as long as the arena lives.
        unsafe { AtomicU32::from_ptr(self.links.wrapping_add(pfn.as_usize())) }
    }

    /// The frame that this one's link leads to.
    #[inline]
    pub(crate) fn next(&self, pfn: Pfn) -> Pfn {
        Pfn::new(self.link(pfn).load(Relaxed))
    }

    /// Links each of these frames to the next.
    #[inline]
    pub(crate) fn link_all(&self, pfns: &[Pfn]) {
        // In a register: the compiler must assume that a store to a link changes the field.
        let links = self.links;
        let link = |from: Pfn, to: Pfn| {
            debug_assert!(self.has_pfn(from));
            // SAFETY: as in `link`.
            unsafe { AtomicU32::from_ptr(links.wrapping_add(from.as_usize())) }.store(to.as_u32(), Relaxed);
        };
        // Eight at a time, since a store costs little more than the loop itself.
        let Some((&last, from)) = pfns.split_last() else { return };
        let (groups, rest) = from.as_chunks::<8>();
        for (i, group) in groups.iter().enumerate() {
            (0..7).for_each(|at| link(group[at], group[at + 1]));
            link(group[7], pfns[8 * i + 8]);
        }
        for (&from, &to) in rest.iter().zip(rest.iter().skip(1).chain([&last])) {
            link(from, to);
        }
    }
}
