//! The alphabet: everything that a program may do, decoded from four numbers.
//!
//! Small numbers decode to the simplest operation of their kind, so that a failing case shrinks to something readable.
use core::fmt;
use pagemill::{Bulk, Gfp, Order};

/// An operation before it is decoded: what generators make and shrink. Shown as both.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Raw {
    /// Which operation.
    pub kind: u8,
    /// Its flags.
    pub a: u32,
    /// Its count, or what it is done to.
    pub b: u32,
    /// Its order and pattern.
    pub c: u32,
}

impl fmt::Debug for Raw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, a, b, c } = self;
        write!(f, "({kind}, {a:#x}, {b:#x}, {c:#x}) = {:?}", Op::decode(*self))
    }
}

/// How many a bulk request asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ask {
    /// [`Bulk::up_to`].
    UpTo(usize),
    /// [`Bulk::at_least`].
    AtLeast(usize, usize),
    /// [`Bulk::exact`].
    Exact(usize),
}

impl Ask {
    /// The request.
    pub fn bulk(self, gfp: Gfp, order: Order) -> Bulk<'static> {
        let bulk = match self {
            Self::UpTo(n) => Bulk::up_to(n),
            Self::AtLeast(k, n) => Bulk::at_least(k, n),
            Self::Exact(n) => Bulk::exact(n),
        };
        bulk.gfp(gfp).order(order)
    }
    /// The number that it must reach.
    pub fn least(self) -> usize {
        match self {
            Self::UpTo(_) => 0,
            Self::AtLeast(k, _) => k,
            Self::Exact(n) => n,
        }
    }
    /// The number that it wants.
    pub fn most(self) -> usize {
        match self {
            Self::UpTo(n) | Self::AtLeast(_, n) | Self::Exact(n) => n,
        }
    }
}

/// Which slots of an array are empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holes {
    /// The pattern.
    pub pattern: u8,
    /// Random bits for the patterns that want some.
    pub bits: u16,
}

impl Holes {
    /// Is slot `i` of `n` empty?
    pub fn is_hole(self, i: usize, n: usize) -> bool {
        match self.pattern % 8 {
            0 | 1 => true,
            2 => i % 2 == 1,              // P.P.P.P.
            3 => i < n / 2,               // ....PPPP
            4 => i >= n / 3 && i < n / 2, // PPP....PPP
            5 => (self.bits >> (i % 16)) & 1 == 1,
            6 => i == usize::from(self.bits) % n.max(1),
            _ => false,
        }
    }
}

/// What is wrong with a request, or with a block that comes back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wrong {
    /// A block that was freed just now is freed again.
    Twice,
    /// The same block stands twice in one bulk call.
    TwiceInOneCall,
    /// A frame that is free, or was never handed out.
    Free,
    /// An address outside of every arena, null included.
    Foreign,
    /// Another order than it was handed out with.
    Order,
    /// An address inside a block.
    Inside,
    /// An address that is no page's.
    Unaligned,
}

/// One operation. `which` chooses among what the world holds, modulo its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the fields' names say what the documented types are")]
pub enum Op {
    /// One page.
    Page { gfp: Gfp },
    /// One block.
    Block { gfp: Gfp, order: Order },
    /// A held block becomes pages, of which some are kept.
    Split { which: usize, keep: usize },
    /// The array form, with holes.
    Array { gfp: Gfp, order: Order, ask: Ask, holes: Holes },
    /// The list form, onto the list in hand.
    List { gfp: Gfp, order: Order, ask: Ask },
    /// Takes blocks off the head of the list.
    ListPop { order: Order, n: usize },
    /// Puts held blocks on the tail of the list.
    ListPush { order: Order, n: usize },
    /// Puts held blocks on another list, and joins the two.
    ListAppend { order: Order, n: usize },
    /// Frees the list: by dropping it, or by clearing it.
    ListFree { order: Order, is_drop: bool },
    /// The callback form. The function unwinds at page `unwind`, and takes a page itself at every `nested`th.
    Callback { gfp: Gfp, order: Order, n: usize, unwind: Option<usize>, nested: Option<usize> },
    /// The runs form.
    Runs { gfp: Gfp, order: Order, ask: Ask },
    /// A run becomes pages, of which some are kept.
    RunSplit { which: usize, keep: usize },
    /// Drops a run.
    RunFree { which: usize },
    /// Frees a held block: by dropping it, or by `free`.
    Free { which: usize, is_drop: bool },
    /// Frees an array with holes in bulk.
    FreeArray { order: Order, n: usize, holes: Holes },
    /// Frees a held block by address and order.
    FreeRaw { which: usize },
    /// Frees held blocks by address in bulk.
    FreeArrayRaw { order: Order, n: usize, holes: Holes },
    /// Frees the oldest held blocks, one by one.
    FreeOldest { n: usize },
    /// Misuse, which must be refused and change nothing.
    Misuse { wrong: Wrong, which: usize, order: Order },
    /// A request that must be refused and change nothing.
    Invalid { which: usize },
    /// Drains all lists.
    Drain,
    /// Drains one CPU's lists.
    DrainCpu { cpu: usize },
    /// Goes on on another CPU.
    MoveTo { cpu: usize },
    /// A census, statistics added up, every stamp looked at.
    Check,
}

/// How many kinds [`Op::decode`] tells apart.
const KINDS: u8 = 40;

impl Op {
    /// The operation that these numbers mean; all numbers mean one.
    pub fn decode(raw: Raw) -> Self {
        let Raw { kind, a, b, c } = raw;
        let order = order_of(c);
        let gfp = gfp_of(a, order);
        let (which, n) = (b as usize, count_of(b, order));
        let holes = Holes { pattern: (c >> 8) as u8, bits: (c >> 16) as u16 };
        match kind % KINDS {
            0..3 => Self::Page { gfp: gfp_of(a, Order::ZERO) },
            3 => Self::Block { gfp, order },
            4 => Self::Split { which, keep: (c % 64) as usize },
            5..9 => Self::Array { gfp, order, ask: ask_of(a, n), holes },
            9..12 => Self::List { gfp, order, ask: ask_of(a, n) },
            12 => Self::ListPop { order, n },
            13 => Self::ListPush { order, n },
            14 => Self::ListAppend { order, n },
            15..17 => Self::ListFree { order, is_drop: a & 1 == 0 },
            17..19 => Self::Callback {
                gfp,
                order,
                n,
                unwind: (a >> 28 == 15).then_some(c as usize >> 8 & 63),
                nested: (a >> 24 & 3 == 3).then_some(1 + (c as usize >> 16 & 15)),
            },
            19..22 => Self::Runs { gfp, order, ask: ask_of(a, n) },
            22 => Self::RunSplit { which, keep: (c % 64) as usize },
            23..25 => Self::RunFree { which },
            25..28 => Self::Free { which, is_drop: a & 1 == 0 },
            28..31 => Self::FreeArray { order, n, holes },
            31 => Self::FreeRaw { which },
            32 => Self::FreeArrayRaw { order, n, holes },
            33 => Self::FreeOldest { n },
            34 => Self::Misuse { wrong: wrong_of(a), which, order },
            35 => Self::Invalid { which },
            36 if a.is_multiple_of(4) => Self::Drain,
            36 => Self::DrainCpu { cpu: which },
            37 | 38 => Self::MoveTo { cpu: which },
            _ => Self::Check,
        }
    }

    /// Is it refused on purpose? Where several threads work, a block that was freed may be somebody else's already.
    pub fn is_misuse(self) -> bool {
        matches!(self, Self::Misuse { .. })
    }

    /// A name for tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Page { .. } => "page",
            Self::Block { .. } => "block",
            Self::Split { .. } => "split",
            Self::Array { .. } => "array",
            Self::List { .. } => "list",
            Self::ListPop { .. } | Self::ListPush { .. } | Self::ListAppend { .. } => "list pop, push, append",
            Self::ListFree { .. } => "list free",
            Self::Callback { .. } => "callback",
            Self::Runs { .. } => "runs",
            Self::RunSplit { .. } | Self::RunFree { .. } => "run free",
            Self::Free { .. } | Self::FreeOldest { .. } => "free",
            Self::FreeArray { .. } => "free array",
            Self::FreeRaw { .. } | Self::FreeArrayRaw { .. } => "free raw",
            Self::Misuse { .. } => "misuse",
            Self::Invalid { .. } => "invalid",
            Self::Drain | Self::DrainCpu { .. } => "drain",
            Self::MoveTo { .. } => "migrate",
            Self::Check => "check",
        }
    }
}

fn gfp_of(a: u32, order: Order) -> Gfp {
    let base = [Gfp::KERNEL, Gfp::KERNEL, Gfp::KERNEL, Gfp::KERNEL, Gfp::NOWAIT, Gfp::ATOMIC, Gfp::NOIO, Gfp::NOFS];
    let mut gfp = base[(a & 7) as usize];
    gfp = match a >> 3 & 7 {
        6 => gfp | Gfp::MOVABLE,
        7 => gfp | Gfp::RECLAIMABLE,
        _ => gfp,
    };
    // Zeroing a block of hundreds of MiB shows nothing that one of 4 MiB does not.
    if a >> 6 & 3 == 3 && order.get() <= 10 {
        gfp = gfp | Gfp::ZERO;
    }
    match a >> 8 & 15 {
        14 => gfp | Gfp::NORETRY,
        15 => gfp | Gfp::NOWARN | Gfp::THISNODE,
        _ => gfp,
    }
}

fn order_of(c: u32) -> Order {
    let order = match c & 7 {
        0..=3 => 0,
        4 => 1 + (c >> 3) % 3,
        5 => 1 + (c >> 3) % 9,
        6 => 9,
        _ => (c >> 3) % 19,
    };
    Order::new(order as u8).unwrap_or(Order::MAX)
}

/// Counts of all sizes, around those where paths part (8, 64, 512); fewer of large blocks.
fn count_of(b: u32, order: Order) -> usize {
    let n = (b >> 3) as usize;
    let n = match b & 7 {
        0 | 1 => n % 10,
        2 | 3 => n % 70,
        4 | 5 => n % 300,
        6 => n % 1100,
        _ => n % 5000,
    };
    if order == Order::ZERO { n } else { n.min((8192 >> order.get()).max(2)) }
}

fn ask_of(a: u32, n: usize) -> Ask {
    match a >> 16 & 7 {
        5 => Ask::AtLeast((a >> 19) as usize % (n + 1), n),
        6 => Ask::Exact(n),
        7 => Ask::AtLeast(n / 2, n),
        _ => Ask::UpTo(n),
    }
}

fn wrong_of(a: u32) -> Wrong {
    match a % 7 {
        0 => Wrong::Twice,
        1 => Wrong::TwiceInOneCall,
        2 => Wrong::Free,
        3 => Wrong::Foreign,
        4 => Wrong::Order,
        5 => Wrong::Inside,
        _ => Wrong::Unaligned,
    }
}
