//! Who owns which frame: a tag for each, swapped when it is handed out and before it goes back, and stamps in the
//! pages. Everything here does only what a signal handler may.
use core::fmt;
use core::ops::Range;
use core::sync::atomic::{AtomicU32, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed};
use pagemill::{Order, PAGE_SIZE};

/// Marks one allocation; never 0. The upper bits say whose it is.
pub type Tag = u32;

/// Pages of a block that carry stamps, if it has more: touching all of a large block would commit all of it.
const STAMPED: usize = 8;

/// The owners of the frames of one or more arenas, which are counted through.
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
    /// Where each arena lies, and the number of its first frame.
    arenas: Box<[(Range<usize>, usize)]>,
    owners: Box<[AtomicU32]>,
}

/// What is wrong with a frame. `Copy`, and formatted later: a signal handler may find it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Breach {
    /// The frame, counted from the first arena's start.
    pub frame: usize,
    /// Its address.
    pub addr: usize,
    /// What it is.
    pub fault: Fault,
}

/// See [`Breach`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// It was handed out to `new` while `old` had it; or `old` was not its owner any more when it freed it.
    OwnedTwice {
        /// Who had it.
        old: Tag,
        /// Who got it.
        new: Tag,
    },
    /// The allocator found that itself: it was on two ways at once.
    Quarantined,
    /// The allocator took it back although nobody had it, or refused a block that was fine.
    Refused,
    /// Somebody else wrote to it.
    Overwritten {
        /// What was written.
        found: u64,
        /// What had to be there.
        expected: u64,
    },
    /// It was asked for with `ZERO` and is not.
    NotZero,
    /// Not of the arena, or not aligned.
    Astray,
    /// A system call's or the caller's errno changed.
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

/// What stands in the first and last word of a page: its own address and owner, mixed.
fn stamp(addr: usize, tag: Tag) -> u64 {
    (addr as u64 ^ u64::from(tag) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

impl Ledger {
    /// For an allocator's arena, with nobody owning anything.
    pub fn new(allocator: &pagemill::Allocator) -> Self {
        Self::over(&allocator.arenas().into_iter().map(|arena| arena.range).collect::<Vec<_>>())
    }

    /// For arenas that lie there, whether an allocator has them yet or not.
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

    /// How many frames it is about.
    pub fn frames(&self) -> usize {
        self.owners.len()
    }
    /// Its frames' owners, from the first on: 0 is nobody.
    pub fn owners(&self) -> impl Iterator<Item = Tag> {
        self.owners_in(0..self.frames())
    }
    /// Those of some.
    pub fn owners_in(&self, frames: Range<usize>) -> impl Iterator<Item = Tag> {
        self.owners[frames].iter().map(|owner| owner.load(Relaxed))
    }
    /// The number of the frame at this address; beyond all of them if no arena has it.
    pub fn frame_of(&self, addr: usize) -> usize {
        let arena = self.arenas.iter().find(|(arena, _)| arena.contains(&addr));
        arena.map_or(usize::MAX, |(arena, first)| first + (addr - arena.start) / PAGE_SIZE)
    }
    /// The address of a frame.
    pub fn addr_of(&self, frame: usize) -> usize {
        let arena = self.arenas.iter().rev().find(|(_, first)| *first <= frame);
        arena.map_or(0, |(arena, first)| arena.start + (frame - first) * PAGE_SIZE)
    }
    /// Whose frame this is; 0 if nobody's, or not the arena's.
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

    /// The pages of a block that carry stamps.
    fn stamped(addr: usize, order: Order) -> impl Iterator<Item = usize> {
        let pages = order.pages().get();
        let n = pages.min(STAMPED);
        (0..n).map(move |i| addr + if n < 2 { 0 } else { i * (pages - 1) / (n - 1) } * PAGE_SIZE)
    }

    /// Notes that a block was handed out to `tag`, and stamps it. The caller owns the block, or the allocator erred.
    ///
    /// # Errors
    /// It has an owner already, or is not the arena's.
    pub fn take(&self, addr: usize, order: Order, tag: Tag) -> Result<(), Breach> {
        for (i, owner) in self.owners_of(addr, order)?.iter().enumerate() {
            // Acquire and Release: two owners of one frame see each other here, in whatever order.
            let old = owner.swap(tag, AcqRel);
            if old != 0 {
                return Err(self.breach(addr + i * PAGE_SIZE, Fault::OwnedTwice { old, new: tag }));
            }
        }
        for page in Self::stamped(addr, order) {
            let [first, last] = words_of(page);
            // SAFETY: both words lie in a page of the arena, which is mapped. If the allocator did its work nobody
            // else has the page; if not, that is what this looks for.
            unsafe {
                first.write_volatile(stamp(page, tag));
                last.write_volatile(!stamp(page, tag));
            }
        }
        Ok(())
    }

    /// Looks whether a block is still `tag`'s and nobody wrote to it.
    ///
    /// # Errors
    /// It is not, or somebody did.
    pub fn look(&self, addr: usize, order: Order, tag: Tag) -> Result<(), Breach> {
        for (i, owner) in self.owners_of(addr, order)?.iter().enumerate() {
            // Acquire pairs with the swaps.
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

    /// Looks, and notes that nobody owns the block any more. Before it is freed: after that it may be somebody's.
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

    /// Looks whether a block that was asked for with `ZERO` is zero. Before it is stamped.
    ///
    /// # Errors
    /// It is not.
    pub fn look_zero(&self, addr: usize, order: Order) -> Result<(), Breach> {
        self.owners_of(addr, order)?;
        // SAFETY: a block of the arena, which is mapped, handed out to the caller.
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
