//! The description of memory that a program gives to an allocator: size, kind of page, node, watermarks.
//!
//! The builder and `arenas.rs` take a [`Memory`] by value, map it here, and make a zone of it. It is plain data without
//! locks.
use crate::build_error::BuildError;
use core::ops::Range;
use pagemill_core::{NodeId, Order, PAGE_SIZE, Watermarks, ZoneKind};
use pagemill_os::{HUGE_PAGE_SIZE, Mapping};

/// A piece of memory for an allocator to manage: an arena. An allocator takes it by value and it cannot be cloned, so
/// memory that was [brought](Self::brought) has one owner.
///
/// ```
/// use pagemill::{Allocator, Gfp, Memory};
/// // Ordinary memory, and memory that a device with 32 address bits can reach.
/// let allocator = Allocator::builder().pages(1024).memory(Memory::anonymous(512).dma32()).build()?;
/// let reachable = allocator.alloc_page(Gfp::KERNEL | Gfp::DMA32)?;
/// # drop(reachable);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Debug)]
pub struct Memory {
    backing: Backing,
    pub(crate) node: NodeId,
    pub(crate) kind: ZoneKind,
    pub(crate) marks: Watermarks,
    pub(crate) may_be_ordinary: bool,
    pub(crate) is_locked: bool,
    pub(crate) is_within_limit: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Backing {
    Anonymous { pages: usize },
    HugePages { pages: usize },
    Memfd { pages: usize, is_huge: bool },
    Brought { start: usize, pages: usize },
}

impl Memory {
    fn of(backing: Backing) -> Self {
        Self {
            backing,
            node: NodeId::ZERO,
            kind: ZoneKind::Normal,
            marks: Watermarks::NONE,
            may_be_ordinary: false,
            is_locked: false,
            is_within_limit: false,
        }
    }

    /// Private memory of the process, committed on first touch.
    pub fn anonymous(pages: usize) -> Self {
        Self::of(Backing::Anonymous { pages })
    }
    /// Huge pages of 2 MiB that the administrator reserved (`/proc/sys/vm/nr_hugepages`). `pages` counts pages of 4 KiB
    /// and must be a multiple of 512.
    ///
    /// ```
    /// use pagemill::{Allocator, BuildError, Memory};
    /// match Allocator::builder().memory(Memory::huge_pages(512)).build() {
    ///     Ok(allocator) => assert_eq!(allocator.managed_pages().get(), 512),
    ///     // The message says how to reserve some; or_ordinary() falls back to ordinary pages.
    ///     Err(why @ BuildError::HugePages { free, .. }) => println!("{free} are free: {why}"),
    ///     Err(other) => return Err(other.into()),
    /// }
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn huge_pages(pages: usize) -> Self {
        Self::of(Backing::HugePages { pages })
    }
    /// A file in memory that another process may map too; [`Allocator::memfd`](crate::Allocator::memfd) returns it. A
    /// forked child gets no page of it: see [`Allocator`](crate::Allocator#fork).
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Memory};
    /// use std::{fs::File, os::unix::fs::FileExt};
    /// let allocator = Allocator::builder().memory(Memory::memfd(64)).build()?;
    /// let arena = &allocator.arenas()[0];
    /// let mut page = allocator.alloc_page(Gfp::KERNEL)?;
    /// page[..5].copy_from_slice(b"hello");
    /// // A process that receives the descriptor finds the page at its offset in the arena.
    /// // SAFETY: nothing writes to the file here.
    /// let file = File::from(unsafe { allocator.memfd(arena.id) }.unwrap().try_clone_to_owned().unwrap());
    /// let mut text = [0; 5];
    /// file.read_exact_at(&mut text, (page.addr() - arena.range.start) as u64).unwrap();
    /// assert_eq!(&text, b"hello");
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn memfd(pages: usize) -> Self {
        Self::of(Backing::Memfd { pages, is_huge: false })
    }
    /// The same, of huge pages of 2 MiB that the administrator reserved.
    pub fn memfd_of_huge_pages(pages: usize) -> Self {
        Self::of(Backing::Memfd { pages, is_huge: true })
    }
    /// Memory that the caller has mapped: `pages` pages from `start`, which must be aligned to 2 MiB. Closing the
    /// allocator does not unmap it. Its contents count as unspecified. A block's address is a multiple of the block's
    /// size, for blocks above 2 MiB too.
    ///
    /// It must not overlap any arena, nor lie in a block of another allocator: see [`BuildError::Overlap`].
    ///
    /// # Safety
    /// The memory is readable and writable until the allocator is closed and every page has been freed, and nothing
    /// else uses it meanwhile.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Memory, PAGE_SIZE};
    /// // Two pageblocks of static memory.
    /// #[repr(align(0x20_0000))]
    /// struct Static([u8; 4 << 20]);
    /// static mut MEMORY: Static = Static([0; 4 << 20]);
    /// let start = (&raw mut MEMORY).cast::<u8>();
    /// // SAFETY: a static lives for ever, and nothing else uses this one.
    /// let memory = unsafe { Memory::brought(start, (4 << 20) / PAGE_SIZE) };
    /// let allocator = Allocator::builder().memory(memory).build()?;
    /// let page = allocator.alloc_page(Gfp::KERNEL)?;
    /// assert!((0..4 << 20).contains(&(page.addr() - start.addr())));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    ///
    /// Memory goes to one allocator only:
    /// ```compile_fail,E0382
    /// # use pagemill::{Allocator, Memory};
    /// fn two_owners(memory: Memory) {
    ///     let one = Allocator::builder().memory(memory).build();
    ///     let other = Allocator::builder().memory(memory).build();
    /// }
    /// ```
    pub unsafe fn brought(start: *mut u8, pages: usize) -> Self {
        Self::of(Backing::Brought { start: start.expose_provenance(), pages })
    }

    /// Sets the node that the memory is on.
    #[must_use]
    pub fn node(self, node: NodeId) -> Self {
        Self { node, ..self }
    }
    /// Declares that the memory's device addresses lie below 4 GiB.
    #[must_use]
    pub fn dma32(self) -> Self {
        Self { kind: ZoneKind::Dma32, ..self }
    }
    /// Sets the watermarks, which keep pages from ordinary requests. Without this call no page is kept.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Memory, Watermarks};
    /// let memory = Memory::anonymous(1024).watermarks(Watermarks::above(100));
    /// let allocator = Allocator::builder().memory(memory).build()?;
    /// let pages: Vec<_> = std::iter::from_fn(|| allocator.alloc_page(Gfp::NOWAIT).ok()).collect();
    /// assert_eq!(pages.len(), 924);
    /// assert!(allocator.alloc_page(Gfp::ATOMIC).is_ok()); // may use half of the rest
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[must_use]
    pub fn watermarks(self, marks: Watermarks) -> Self {
        Self { marks, ..self }
    }

    pub(crate) fn pages(&self) -> usize {
        match self.backing {
            Backing::Anonymous { pages }
            | Backing::HugePages { pages }
            | Backing::Memfd { pages, .. }
            | Backing::Brought { pages, .. } => pages,
        }
    }

    /// Falls back to ordinary memory if the system refuses huge pages or to lock the memory, and records the reason in
    /// the [notes](crate::Allocator::notes). Without this call such a refusal is an error.
    ///
    /// ```
    /// use pagemill::{Allocator, Memory};
    /// let memory = Memory::huge_pages(1024).or_ordinary();
    /// let allocator = Allocator::builder().memory(memory).build()?;
    /// assert_eq!(allocator.managed_pages().get(), 1024);
    /// allocator.notes().iter().for_each(|why| println!("on ordinary pages: {why}"));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[must_use]
    pub fn or_ordinary(self) -> Self {
        Self { may_be_ordinary: true, ..self }
    }
    /// Locks the memory (`mlock`), which commits all of it.
    ///
    /// ```
    /// use pagemill::{Allocator, BuildError, Memory};
    /// match Allocator::builder().memory(Memory::anonymous(16).locked()).build() {
    ///     Ok(allocator) => assert!(allocator.notes().is_empty()), // never swapped out
    ///     Err(why @ BuildError::LockLimit { .. }) => println!("{why}"), // says how to raise it
    ///     Err(other) => return Err(other.into()),
    /// }
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[must_use]
    pub fn locked(self) -> Self {
        Self { is_locked: true, ..self }
    }

    /// Limits the memory to what the process's memory limit has room for when the memory is added. A control group may
    /// set such a limit, a container's for example; the system kills a process that touches more. The
    /// [notes](crate::Allocator::notes) say how much was left out. The room may shrink later: the process's other needs
    /// are only estimated, and those of other processes in the group are unknown.
    ///
    /// ```
    /// use pagemill::{Allocator, Memory};
    /// let allocator = Allocator::builder().memory(Memory::anonymous(1 << 20).within_limit()).build()?;
    /// assert_eq!(allocator.managed_pages().get() == 1 << 20, allocator.notes().is_empty());
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[must_use]
    pub fn within_limit(self) -> Self {
        Self { is_within_limit: true, ..self }
    }

    /// The same memory with another number of pages.
    pub(crate) fn resized(self, pages: usize) -> Self {
        let backing = match self.backing {
            Backing::Anonymous { .. } => Backing::Anonymous { pages },
            Backing::HugePages { .. } => Backing::HugePages { pages },
            Backing::Memfd { is_huge, .. } => Backing::Memfd { pages, is_huge },
            Backing::Brought { start, .. } => Backing::Brought { start, pages },
        };
        Self { backing, ..self }
    }

    /// The addresses, if the memory was brought.
    pub(crate) fn brought_range(&self) -> Result<Option<Range<usize>>, BuildError> {
        let Backing::Brought { start: addr, pages } = self.backing else { return Ok(None) };
        let end = pages.checked_mul(PAGE_SIZE).and_then(|len| addr.checked_add(len)).filter(|_| addr != 0);
        let range = addr..end.ok_or(BuildError::NoMemory { addr, pages })?;
        let align = HUGE_PAGE_SIZE;
        if addr.is_multiple_of(align) { Ok(Some(range)) } else { Err(BuildError::Alignment { addr, align }) }
    }

    /// Whether a retired arena with no page out can serve for this memory. Not if the system reserved huge pages for it
    /// or locked it: retiring ended that.
    pub(crate) fn is_served_by_retired(&self, retired: &Self) -> bool {
        let is_set_aside = matches!(self.backing, Backing::HugePages { .. } | Backing::Memfd { is_huge: true, .. });
        let described =
            |memory: &Self| (memory.backing, memory.node, memory.kind, memory.marks, memory.may_be_ordinary);
        let is_plain = |memory: &Self| !memory.is_locked && !memory.is_within_limit;
        !is_set_aside && described(self) == described(retired) && is_plain(self) && is_plain(retired)
    }

    /// Whether pages that were never handed out are zero.
    pub(crate) fn is_zeroed(&self) -> bool {
        !matches!(self.backing, Backing::Brought { .. })
    }

    /// The alignment of the mapping, in bytes: that of the largest block in it, since blocks are aligned to their size.
    fn align(&self) -> usize {
        (self.pages() * PAGE_SIZE).next_power_of_two().clamp(1 << 21, Order::MAX.bytes())
    }

    /// How many pages lie between such an aligned address and the start. 0 unless the memory was brought.
    pub(crate) fn lead(&self) -> usize {
        match self.backing {
            Backing::Brought { start, .. } => start % self.align() / PAGE_SIZE,
            _ => 0,
        }
    }

    /// Maps the memory.
    pub(crate) fn map(&self, huge_pages: bool) -> Result<Mapping, BuildError> {
        let bytes = self.pages() * PAGE_SIZE;
        let is_huge = matches!(self.backing, Backing::HugePages { .. } | Backing::Memfd { is_huge: true, .. });
        if is_huge && !bytes.is_multiple_of(HUGE_PAGE_SIZE) {
            return Err(BuildError::HugePageMultiple { pages: self.pages() });
        }
        let align = self.align();
        let refused = |what| BuildError::system(what, bytes);
        let mapping = match self.backing {
            Backing::Anonymous { .. } => Mapping::reserve(bytes, align).map_err(refused("an arena"))?,
            Backing::HugePages { .. } => return Mapping::huge(bytes, align).map_err(BuildError::of_memory(bytes)),
            Backing::Memfd { is_huge, .. } => {
                Mapping::memfd(c"pagemill", bytes, align, is_huge).map_err(BuildError::of_memory(bytes))?
            }
            Backing::Brought { start, .. } => {
                let start = core::ptr::with_exposed_provenance_mut(start);
                // SAFETY: the caller of `brought` promised that the memory stays valid and is used by nothing else.
                return unsafe { Mapping::adopt(start, bytes) }.map_err(refused("memory that was brought"));
            }
        };
        // Only advice: a system without huge pages ignores it.
        let _ = mapping.advise_huge_pages(huge_pages);
        Ok(mapping)
    }

    /// The same memory, of ordinary pages.
    pub(crate) fn ordinary(&self) -> Self {
        let pages = self.pages();
        let backing = match self.backing {
            Backing::HugePages { .. } => Backing::Anonymous { pages },
            Backing::Memfd { .. } => Backing::Memfd { pages, is_huge: false },
            other => other,
        };
        Self { backing, ..*self }
    }
}
