//! The owner of each frame: a tag, which is swapped when the frame is handed out and before it goes back; and stamps in the pages.
//! All functions here may be called in a signal handler.
use core::fmt;
use core::ops::Range;
use core::sync::atomic::{AtomicU32, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed};
use pagemill::{Order, PAGE_SIZE};

/// Marks one allocation; never 0. Its upper bits are the owner's number.
pub type Tag = u32;

/// The number of pages that carry stamps in a larger block: touching all of a large block would commit all of it.
const STAMPED: usize = 8;

/// The owners of the frames of one or more arenas. The frames are numbered through all arenas.
///
/// ```
/// use pagemill::{Allocator, Gfp, Order};
/// use pagemill_model::Ledger;
/// let allocator = Allocator::builder().pages(8).build()?;
/// let ledger = Ledger::new(&allocator);
/// let page = allocator.alloc_page(Gfp::KERNEL)?;
/// assert!(ledger.take(page.addr(), Order::ZERO, 1).is_ok());
/// let twice = ledger.take(page.addr(), Order::ZERO, 2).unwrap_err();
/// assert!(twice.to_string().contains("owned twice"), "{twice}");
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Debug)]
pub struct Ledger {
    /// The addresses of each arena, and the number of its first frame.
    arenas: Box<[(Range<usize>, usize)]>,
    owners: Box<[AtomicU32]>,
}

/// A fault of a frame. It is `Copy` and formatted later, because a signal handler may find it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Breach {
    /// The frame, counted from the first arena's start.
    pub frame: usize,
    /// Its address.
    pub addr: usize,
    /// The kind of fault.
    pub fault: Fault,
}

/// See [`Breach`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// It was handed out to `new` while `old` had it; or `old` was not its owner when it freed it.
    OwnedTwice {
        /// The owner before.
        old: Tag,
        /// The new owner.
        new: Tag,
    },
    /// The allocator found the fault itself: the frame was handed out and free at once.
    Quarantined,
    /// The allocator accepted a block without an owner, or refused a block that was in order.
    Refused,
    /// Another owner wrote to it.
    Overwritten {
        /// The word that was found.
        found: u64,
        /// The word that was expected.
        expected: u64,
    },
    /// It was requested with `ZERO` and is not zero.
    NotZero,
    /// It is in no arena, or not aligned.
    Astray,
    /// A call changed errno.
    Errno,
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { frame, addr, fault } = self;
        write!(f, "frame {frame} at {addr:#x} ")?;
        match fault {
            Fault::OwnedTwice { old, new } => write!(f, "owned twice: by {old:#x} and {new:#x}"),
            Fault::Quarantined => write!(f, "owned twice: found at hand-out and put in quarantine"),
            Fault::Refused => write!(f, "owned twice, or freed by somebody else: its owner's free was refused"),
            Fault::Overwritten { found, expected } => {
                write!(f, "overwritten: its stamp reads {found:#x}, not {expected:#x}")
            }
            Fault::NotZero => write!(f, "not zero, although it was asked for so"),
            Fault::Astray => write!(f, "is not the arena's, or not aligned to its size"),
            Fault::Errno => write!(f, "changed errno under an interrupted caller"),
        }
    }
}

impl core::error::Error for Breach {}

/// The first and last word of a page: a mixture of its own address and its owner.
fn stamp(addr: usize, tag: Tag) -> u64 {
    (addr as u64 ^ u64::from(tag) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

impl Ledger {
    /// A ledger for an allocator's arena, without owners.
    pub fn new(allocator: &pagemill::Allocator) -> Self {
        Self::over(&allocator.arenas().into_iter().map(|arena| arena.range).collect::<Vec<_>>())
    }

    /// A ledger for arenas at these addresses, which an allocator may not have yet.
    pub fn over(arenas: &[Range<usize>]) -> Self {
        let mut frames = 0;
        let numbered = arenas.iter().map(|arena| {
            let first = frames;
            frames += arena.len() / PAGE_SIZE;
            (arena.clone(), first)
        });
        let arenas = numbered.collect();
        Self { arenas, owners: (0..frames).map(|_| AtomicU32::new(0)).collect() }
    }

    /// The number of its frames.
    pub fn frames(&self) -> usize {
        self.owners.len()
    }
    /// The owners of all frames, in order; 0 is no owner.
    pub fn owners(&self) -> impl Iterator<Item = Tag> {
        self.owners_in(0..self.frames())
    }
    /// The owners of some frames.
    pub fn owners_in(&self, frames: Range<usize>) -> impl Iterator<Item = Tag> {
        self.owners[frames].iter().map(|owner| owner.load(Relaxed))
    }
    /// The number of the frame at this address; above all frames' numbers if the address is in no arena.
    pub fn frame_of(&self, addr: usize) -> usize {
        let arena = self.arenas.iter().find(|(arena, _)| arena.contains(&addr));
        arena.map_or(usize::MAX, |(arena, first)| first + (addr - arena.start) / PAGE_SIZE)
    }
    /// The address of a frame.
    pub fn addr_of(&self, frame: usize) -> usize {
        let arena = self.arenas.iter().rev().find(|(_, first)| *first <= frame);
        arena.map_or(0, |(arena, first)| arena.start + (frame - first) * PAGE_SIZE)
    }
    /// The owner of the frame at this address; 0 if it has none or the address is in no arena.
    pub fn owner_of(&self, addr: usize) -> Tag {
        self.owners.get(self.frame_of(addr)).map_or(0, |owner| owner.load(Acquire))
    }

    fn breach(&self, addr: usize, fault: Fault) -> Breach {
        Breach { frame: self.frame_of(addr), addr, fault }
    }

    fn owners_of(&self, addr: usize, order: Order) -> Result<&[AtomicU32], Breach> {
        let astray = self.breach(addr, Fault::Astray);
        let arena = self.arenas.iter().find(|(arena, _)| arena.contains(&addr));
        let is_inside = arena.is_some_and(|(arena, _)| arena.end - addr >= order.bytes());
        if !is_inside || !addr.is_multiple_of(order.bytes()) {
            return Err(astray);
        }
        let first = self.frame_of(addr);
        self.owners.get(first..first + order.pages().get()).ok_or(astray)
    }

    /// The addresses of a block's pages that carry stamps.
    fn stamped(addr: usize, order: Order) -> impl Iterator<Item = usize> {
        let pages = order.pages().get();
        let n = pages.min(STAMPED);
        (0..n).map(move |i| addr + if n < 2 { 0 } else { i * (pages - 1) / (n - 1) } * PAGE_SIZE)
    }

    /// Records that a block was handed out to `tag`, and stamps it. The caller owns the block, unless the allocator erred.
    ///
    /// # Errors
    /// It has an owner already, or is in no arena.
    pub fn take(&self, addr: usize, order: Order, tag: Tag) -> Result<(), Breach> {
        for (i, owner) in self.owners_of(addr, order)?.iter().enumerate() {
            // AcqRel: two owners of one frame see each other here, in either order.
            let old = owner.swap(tag, AcqRel);
            if old != 0 {
                return Err(self.breach(addr + i * PAGE_SIZE, Fault::OwnedTwice { old, new: tag }));
            }
        }
        for page in Self::stamped(addr, order) {
            let [first, last] = words_of(page);
            // SAFETY: both words lie in a page of the arena, which is mapped. Unless the allocator erred, no other thread uses
            // the page; finding such an error is the purpose of this code.
            unsafe {
                first.write_volatile(stamp(page, tag));
                last.write_volatile(!stamp(page, tag));
            }
        }
        Ok(())
    }

    /// Checks that `tag` still owns a block and that no other owner wrote to it.
    ///
    /// # Errors
    /// Another tag owns it, or another owner wrote to it.
    pub fn look(&self, addr: usize, order: Order, tag: Tag) -> Result<(), Breach> {
        for (i, owner) in self.owners_of(addr, order)?.iter().enumerate() {
            // Acquire pairs with the swaps in `take` and `give`.
            let now = owner.load(Acquire);
            if now != tag {
                return Err(self.breach(addr + i * PAGE_SIZE, Fault::OwnedTwice { old: tag, new: now }));
            }
        }
        for page in Self::stamped(addr, order) {
            let expected = stamp(page, tag);
            for (word, expected) in words_of(page).into_iter().zip([expected, !expected]) {
                // SAFETY: as in `take`.
                let found = unsafe { word.read_volatile() };
                if found != expected {
                    return Err(self.breach(page, Fault::Overwritten { found, expected }));
                }
            }
        }
        Ok(())
    }

    /// Checks a block, and records that it has no owner. Call it before the block is freed: afterwards it may have a new owner.
    ///
    /// # Errors
    /// As [`look`](Self::look).
    pub fn give(&self, addr: usize, order: Order, tag: Tag) -> Result<(), Breach> {
        self.look(addr, order, tag)?;
        for (i, owner) in self.owners_of(addr, order)?.iter().enumerate() {
            let now = owner.swap(0, AcqRel);
            if now != tag {
                return Err(self.breach(addr + i * PAGE_SIZE, Fault::OwnedTwice { old: tag, new: now }));
            }
        }
        Ok(())
    }

    /// Checks that a block that was requested with `ZERO` is zero. Call it before the block is stamped.
    ///
    /// # Errors
    /// It is not zero.
    pub fn look_zero(&self, addr: usize, order: Order) -> Result<(), Breach> {
        self.owners_of(addr, order)?;
        // SAFETY: the block lies in the arena, which is mapped, and was handed out to the caller.
        let words = unsafe {
            core::slice::from_raw_parts(
                core::ptr::with_exposed_provenance::<u64>(addr),
                order.bytes() / size_of::<u64>(),
            )
        };
        match words.iter().position(|&word| word != 0) {
            None => Ok(()),
            Some(at) => Err(self.breach(addr + at * size_of::<u64>(), Fault::NotZero)),
        }
    }
}

fn words_of(page: usize) -> [*mut u64; 2] {
    [page, page + PAGE_SIZE - size_of::<u64>()].map(core::ptr::with_exposed_provenance_mut)
}
