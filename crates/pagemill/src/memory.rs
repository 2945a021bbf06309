//! Memory for an allocator: how much, of what kind, on which node, with which marks.
use crate::build_error::BuildError;
use core::ops::Range;
use pagemill_core::{NodeId, Order, PAGE_SIZE, Watermarks, ZoneKind};
use pagemill_os::{HUGE_PAGE_SIZE, Mapping};

/// A piece of memory that an allocator is to manage: an arena. An allocator takes it by value, and there is no second one like
/// it: [brought](Self::brought) memory has one owner.
///
/// ```
/// use pagemill::{Allocator, Gfp, Memory};
/// // Memory that a device with 32 address bits reaches, beside the ordinary kind.
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

    /// Private memory of the process, committed as it is touched.
    pub fn anonymous(pages: usize) -> Self {
        Self::of(Backing::Anonymous { pages })
    }
    /// 2 MiB pages that the administrator set aside (`/proc/sys/vm/nr_hugepages`). `pages` counts pages of 4 KiB, a
    /// multiple of 512.
    ///
    /// ```
    /// use pagemill::{Allocator, BuildError, Memory};
    /// match Allocator::builder().memory(Memory::huge_pages(512)).build() {
    ///     Ok(allocator) => assert_eq!(allocator.managed_pages().get(), 512),
    ///     // The message says how to set some aside; or_ordinary() does without.
    ///     Err(why @ BuildError::HugePages { free, .. }) => println!("{free} are free: {why}"),
    ///     Err(other) => return Err(other.into()),
    /// }
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn huge_pages(pages: usize) -> Self {
        Self::of(Backing::HugePages { pages })
    }
    /// A file in memory, which another process may map too: [`Allocator::memfd`](crate::Allocator::memfd) gives it. The
    /// child of a fork gets no page of it, see [`Allocator`](crate::Allocator#fork).
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Memory};
    /// use std::{fs::File, os::unix::fs::FileExt};
    /// let allocator = Allocator::builder().memory(Memory::memfd(64)).build()?;
    /// let arena = &allocator.arenas()[0];
    /// let mut page = allocator.alloc_page(Gfp::KERNEL)?;
    /// page[..5].copy_from_slice(b"hello");
    /// // What another process sees that was sent the descriptor, and where the page lies.
    /// // SAFETY: nobody writes to the file here.
    /// let file = File::from(unsafe { allocator.memfd(arena.id) }.unwrap().try_clone_to_owned().unwrap());
    /// let mut text = [0; 5];
    /// file.read_exact_at(&mut text, (page.addr() - arena.range.start) as u64).unwrap();
    /// assert_eq!(&text, b"hello");
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn memfd(pages: usize) -> Self {
        Self::of(Backing::Memfd { pages, is_huge: false })
    }
    /// The same of 2 MiB pages that the administrator set aside.
    pub fn memfd_of_huge_pages(pages: usize) -> Self {
        Self::of(Backing::Memfd { pages, is_huge: true })
    }
    /// Memory that the caller has mapped: `pages` pages from `start`, aligned to 2 MiB. It is not unmapped when the
    /// allocator closes. Its contents count as unspecified. Larger blocks lie where their size divides the address.
    ///
    /// No part of it may lie in an arena, so neither in a block of another allocator: see [`BuildError::Overlap`].
    ///
    /// # Safety
    /// It is readable and writable until the allocator is closed and every page is back, and nobody else uses it meanwhile.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Memory, PAGE_SIZE};
    /// // Two pageblocks of static memory.
    /// #[repr(align(0x20_0000))]
    /// struct Static([u8; 4 << 20]);
    /// static mut MEMORY: Static = Static([0; 4 << 20]);
    /// let start = (&raw mut MEMORY).cast::<u8>();
    /// // SAFETY: it lives for ever, and nothing else here names it.
    /// let memory = unsafe { Memory::brought(start, (4 << 20) / PAGE_SIZE) };
    /// let allocator = Allocator::builder().memory(memory).build()?;
    /// let page = allocator.alloc_page(Gfp::KERNEL)?;
    /// assert!((0..4 << 20).contains(&(page.addr() - start.addr())));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    ///
    /// One call makes memory for one allocator:
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

    /// It is on this node.
    #[must_use]
    pub fn node(self, node: NodeId) -> Self {
        Self { node, ..self }
    }
    /// Its device addresses lie below 4 GiB.
    #[must_use]
    pub fn dma32(self) -> Self {
        Self { kind: ZoneKind::Dma32, ..self }
    }
    /// Keeps so many pages from requests; none unless said.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Memory, Watermarks};
    /// let memory = Memory::anonymous(1024).watermarks(Watermarks::above(100));
    /// let allocator = Allocator::builder().memory(memory).build()?;
    /// let pages: Vec<_> = std::iter::from_fn(|| allocator.alloc_page(Gfp::NOWAIT).ok()).collect();
    /// assert_eq!(pages.len(), 924);
    /// assert!(allocator.alloc_page(Gfp::ATOMIC).is_ok()); // has access to half of what is left
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

    /// If the system refuses huge pages, or to lock the memory, goes on with ordinary memory, and
    /// [notes](crate::Allocator::notes) why. Without this it is an error.
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
    /// Locks it in memory (`mlock`), which commits all of it.
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

    /// No more of it than the memory limit of the process leaves room for when it is added, if its control groups have one
    /// (a container's does): the system kills whoever touches more. How much that is stands in the
    /// [notes](crate::Allocator::notes). Later the room may be less: what else the process needs is only guessed at, and others
    /// in its group are not known.
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

    /// The same with so many pages.
    pub(crate) fn resized(self, pages: usize) -> Self {
        let backing = match self.backing {
            Backing::Anonymous { .. } => Backing::Anonymous { pages },
            Backing::HugePages { .. } => Backing::HugePages { pages },
            Backing::Memfd { is_huge, .. } => Backing::Memfd { pages, is_huge },
            Backing::Brought { start, .. } => Backing::Brought { start, pages },
        };
        Self { backing, ..self }
    }

    /// Its addresses, if the caller brought it.
    ///
    /// # Errors
    /// [`BuildError::NoMemory`], [`BuildError::Alignment`].
    pub(crate) fn brought_range(&self) -> Result<Option<Range<usize>>, BuildError> {
        let Backing::Brought { start: addr, pages } = self.backing else { return Ok(None) };
        let end = pages.checked_mul(PAGE_SIZE).and_then(|len| addr.checked_add(len)).filter(|_| addr != 0);
        let range = addr..end.ok_or(BuildError::NoMemory { addr, pages })?;
        let align = HUGE_PAGE_SIZE;
        if addr.is_multiple_of(align) { Ok(Some(range)) } else { Err(BuildError::Alignment { addr, align }) }
    }

    /// Can an arena that was retired, and of which nothing is out, stand for this memory? Not where the system set memory
    /// aside or locked it, which is over once it is retired.
    pub(crate) fn is_served_by_retired(&self, retired: &Self) -> bool {
        let is_set_aside = matches!(self.backing, Backing::HugePages { .. } | Backing::Memfd { is_huge: true, .. });
        let described =
            |memory: &Self| (memory.backing, memory.node, memory.kind, memory.marks, memory.may_be_ordinary);
        let is_plain = |memory: &Self| !memory.is_locked && !memory.is_within_limit;
        !is_set_aside && described(self) == described(retired) && is_plain(self) && is_plain(retired)
    }

    /// Is what nobody ever had of it zero?
    pub(crate) fn is_zeroed(&self) -> bool {
        !matches!(self.backing, Backing::Brought { .. })
    }

    /// Blocks are aligned to their size, so what is mapped for them is to the largest that it holds. In bytes.
    fn align(&self) -> usize {
        (self.pages() * PAGE_SIZE).next_power_of_two().clamp(1 << 21, Order::MAX.bytes())
    }

    /// How many pages after such an address it begins: none, unless it was brought.
    pub(crate) fn lead(&self) -> usize {
        match self.backing {
            Backing::Brought { start, .. } => start % self.align() / PAGE_SIZE,
            _ => 0,
        }
    }

    /// Maps it.
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
                // SAFETY: what the caller of `brought` promised.
                return unsafe { Mapping::adopt(start, bytes) }.map_err(refused("memory that was brought"));
            }
        };
        // Advice: a system that knows no such pages goes on.
        let _ = mapping.advise_huge_pages(huge_pages);
        Ok(mapping)
    }

    /// The same of ordinary pages.
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
