//! The alphabet: every operation of a program, decoded from numbers.
//!
//! Small numbers decode to the simplest operation of their kind, so that a failing case shrinks to a readable one.
use crate::request::{Ends, How, Place, Request};
use core::fmt;
use pagemill::{Gfp, NodeMask, Order};

/// An operation before it is decoded: the form that generators make and shrink. It is shown in both forms.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Raw {
    /// The kind of operation.
    pub kind: u8,
    /// Its flags.
    pub a: u32,
    /// Its count, or the holding that it works on.
    pub b: u32,
    /// Its order and pattern.
    pub c: u32,
    /// Its nodes, and how long it tries.
    pub d: u32,
}

impl fmt::Debug for Raw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, a, b, c, d } = self;
        write!(f, "({kind}, {a:#x}, {b:#x}, {c:#x}, {d:#x}) = {:?}", Op::decode(*self))
    }
}

/// The number of blocks that a bulk request asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ask {
    /// [`Bulk::up_to`](pagemill::Bulk::up_to).
    UpTo(usize),
    /// [`Bulk::at_least`](pagemill::Bulk::at_least).
    AtLeast(usize, usize),
    /// [`Bulk::exact`](pagemill::Bulk::exact).
    Exact(usize),
}

impl Ask {
    /// The number that it must get.
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
    /// Random bits for the random patterns.
    pub bits: u16,
}

impl Holes {
    /// Whether slot `i` of `n` is empty.
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

/// What is wrong with a request, or with a block that is freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wrong {
    /// A block that was just freed is freed again.
    Twice,
    /// The same block is in one bulk call twice.
    TwiceInOneCall,
    /// A frame that is free or was never handed out.
    Free,
    /// An address outside of every arena, null included.
    Foreign,
    /// Another order than it was handed out with.
    Order,
    /// An address inside a block.
    Inside,
    /// An address that is not a page's.
    Unaligned,
}

/// One operation. `which` chooses among the world's holdings, modulo their number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the fields' names say what the documented types are")]
pub enum Op {
    /// Allocates one page or one block.
    One { request: Request },
    /// Splits a held block into pages, and keeps some.
    Split { which: usize, keep: usize },
    /// Allocates by the array form, with holes.
    Array { request: Request, holes: Holes },
    /// Allocates by the list form, onto the list in hand.
    List { request: Request },
    /// Takes blocks off the head of the list.
    ListPop { order: Order, n: usize },
    /// Puts held blocks on the tail of the list.
    ListPush { order: Order, n: usize },
    /// Puts held blocks on another list, and joins the two.
    ListAppend { order: Order, n: usize },
    /// Frees the list: by dropping it, or by clearing it.
    ListFree { order: Order, is_drop: bool },
    /// Allocates by the callback form. The callback unwinds at page `unwind`, and requests a page itself at every `nested`th.
    Callback { request: Request, unwind: Option<usize>, nested: Option<usize> },
    /// Allocates by the runs form.
    Runs { request: Request },
    /// Allocates a run of `n` neighbouring pages, without waiting.
    Contig { gfp: Gfp, n: usize },
    /// Turns a run into pages, and keeps some.
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
    /// Moves to another CPU.
    MoveTo { cpu: usize },
    /// Puts held blocks into a cache, which frees them when memory is short.
    Cache { which: usize, n: usize },
    /// Takes all blocks of the cache, and ends it.
    Uncache,
    /// Makes a step of background reclaim.
    ReclaimStep,
    /// Gives free pageblocks back to the system.
    GiveBack,
    /// Restricts requests to these nodes.
    Allow { nodes: NodeMask },
    /// Adds a piece of memory.
    AddMemory { which: usize },
    /// Retires a piece of memory.
    Retire { which: usize },
    /// Validates the allocator, adds up statistics, and checks every stamp.
    Check,
}

/// The number of kinds that [`Op::decode`] distinguishes.
const KINDS: u8 = 53;

impl Op {
    /// The operation that these numbers encode; all numbers encode one.
    pub fn decode(raw: Raw) -> Self {
        let Raw { kind, a, b, c, d } = raw;
        let order = order_of(c);
        let (which, n) = (b as usize, count_of(b, order));
        let request = |order, ask| Request { gfp: gfp_of(a, order), order, ask, how: how_of(d) };
        let bulk = request(order, ask_of(a, n));
        let holes = Holes { pattern: (c >> 8) as u8, bits: (c >> 16) as u16 };
        match kind % KINDS {
            0..3 => Self::One { request: request(Order::ZERO, Ask::Exact(1)) },
            3 => Self::One { request: request(order, Ask::Exact(1)) },
            4 => Self::Split { which, keep: (c % 64) as usize },
            5..9 => Self::Array { request: bulk, holes },
            9..12 => Self::List { request: bulk },
            12 => Self::ListPop { order, n },
            13 => Self::ListPush { order, n },
            14 => Self::ListAppend { order, n },
            15..17 => Self::ListFree { order, is_drop: a & 1 == 0 },
            17..19 => Self::Callback {
                request: request(order, Ask::UpTo(n)),
                unwind: (a >> 28 == 15).then_some(c as usize >> 8 & 63),
                nested: (a >> 24 & 3 == 3).then_some(1 + (c as usize >> 16 & 15)),
            },
            19..22 => Self::Runs { request: bulk },
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
            40 | 41 => Self::Cache { which, n: count_of(a, Order::ZERO) },
            42 => Self::Uncache,
            43 => Self::ReclaimStep,
            44 => Self::GiveBack,
            45 => Self::Allow { nodes: nodes_of(b) },
            46 => Self::AddMemory { which },
            47 => Self::Retire { which },
            48 => Self::Free { which, is_drop: true },
            49 => Self::FreeOldest { n },
            50 => Self::Array { request: bulk, holes },
            51 => Self::List { request: bulk },
            52 => Self::Contig {
                gfp: [Gfp::NOWAIT, Gfp::ATOMIC, Gfp::NOWAIT | Gfp::MOVABLE, Gfp::NOWAIT | Gfp::ZERO][a as usize % 4],
                n: count_of(b, Order::ZERO),
            },
            _ => Self::Check,
        }
    }

    /// Whether it is refused on purpose. Among several threads, a freed block may have a new owner already.
    pub fn is_misuse(self) -> bool {
        matches!(self, Self::Misuse { .. })
    }

    /// A name for tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::One { request } if request.order == Order::ZERO => "page",
            Self::One { .. } => "block",
            Self::Split { .. } => "split",
            Self::Array { .. } => "array",
            Self::List { .. } => "list",
            Self::ListPop { .. } | Self::ListPush { .. } | Self::ListAppend { .. } => "list pop, push, append",
            Self::ListFree { .. } => "list free",
            Self::Callback { .. } => "callback",
            Self::Runs { .. } => "runs",
            Self::Contig { .. } => "contig",
            Self::RunSplit { .. } | Self::RunFree { .. } => "run free",
            Self::Free { .. } | Self::FreeOldest { .. } => "free",
            Self::FreeArray { .. } => "free array",
            Self::FreeRaw { .. } | Self::FreeArrayRaw { .. } => "free raw",
            Self::Misuse { .. } => "misuse",
            Self::Invalid { .. } => "invalid",
            Self::Drain | Self::DrainCpu { .. } => "drain",
            Self::MoveTo { .. } => "migrate",
            Self::Cache { .. } | Self::Uncache | Self::ReclaimStep => "cache, reclaim",
            Self::GiveBack => "give back",
            Self::Allow { .. } => "allow nodes",
            Self::AddMemory { .. } | Self::Retire { .. } => "add, retire",
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
    // Zeroing a block of hundreds of MiB shows no more than zeroing one of 4 MiB.
    if a >> 6 & 3 == 3 && order.get() <= 10 {
        gfp = gfp | Gfp::ZERO;
    }
    match a >> 8 & 15 {
        12 => gfp | Gfp::RETRY_MAYFAIL,
        13 => gfp | Gfp::THISNODE,
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

/// Counts of all sizes, around the limits at which the code branches (8, 64, 512); smaller for large blocks.
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

/// A set of the first four nodes, in most cases several.
fn nodes_of(bits: u32) -> NodeMask {
    match bits & 31 {
        0 | 16.. => NodeMask::ALL,
        some => NodeMask::from_bits(u64::from(some)),
    }
}

fn how_of(d: u32) -> How {
    let among = nodes_of(d >> 3);
    let node = (d >> 8 & 3) as usize;
    let place = match d >> 10 & 15 {
        8 | 9 => Place::Among(among),
        10 => Place::Bind(among),
        11 => Place::Preferred(node),
        12 | 13 => Place::Interleave(among),
        14 => Place::Exactly(node),
        15 => Place::Preferred(node).among(among),
        _ => Place::Anywhere,
    };
    let ends = match d >> 14 & 15 {
        13 => Ends::Cancelled,
        14 => Ends::Expired,
        15 => Ends::CancelledBeforeDeadline,
        _ => Ends::Alone,
    };
    // Small accounts: a large account is like none.
    let account = (d >> 18 & 7 == 7).then_some(count_of(d >> 21, Order::ZERO));
    How { is_drained: d & 3 != 0, is_dma32: d >> 28 & 7 == 7, place, ends, account }
}
