//! An imaginary machine: nodes, their distances, their CPUs, and pieces of memory with marks. It is decoded from numbers, as
//! operations are, so that a failing case shrinks to a small one.
use crate::op::Raw;
use crate::request::node_of;
use core::fmt;
use core::ops::Range;
use pagemill::{
    Allocator, BuildError, Builder, Faults, Memory, NodeId, NodeMask, PAGE_SIZE, Policy, StillOut, Watermarks,
};
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};

/// A piece of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Its node.
    pub node: NodeId,
    /// Whether it lies below 4 GiB, for devices.
    pub is_dma32: bool,
    /// The watermarks below which it refuses requests.
    pub marks: Watermarks,
    /// How large it is.
    pub pages: usize,
}

/// Acquisitions that fail (C3.14).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failing {
    /// None fails.
    Never,
    /// All fail after so many.
    After(u64),
    /// Each fails with a probability in percent, by a sequence from a seed.
    Sometimes(u8, u64),
}

/// See the [module](self).
#[derive(Clone, PartialEq, Eq)]
pub struct Machine {
    /// The node of each CPU.
    pub node_of_cpu: Vec<NodeId>,
    /// The distance from each node to each other.
    pub distances: Vec<Vec<u8>>,
    /// The memory with which the allocator begins.
    pub pieces: Vec<Piece>,
    /// Memory that may be added later.
    pub spares: Vec<Piece>,
    /// The allocator's policy.
    pub policy: Policy,
    /// The acquisitions that fail.
    pub failing: Failing,
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node_of_cpu, distances, pieces, spares, policy, failing } = self;
        let cpus: Vec<usize> = node_of_cpu.iter().take(8).map(|node| node.get()).collect();
        write!(f, "CPUs on nodes {cpus:?} and so on, distances {distances:?}, {policy:?}, faults {failing:?}, ")?;
        let piece = |piece: &Piece| {
            let (kind, marks) = (if piece.is_dma32 { " DMA32" } else { "" }, piece.marks);
            let marks = format!("{}/{}/{}+{}", marks.min, marks.low, marks.high, marks.lowmem_reserve);
            format!("{} pages{kind} of {}, marks {marks}", piece.pages, piece.node)
        };
        let list = |pieces: &[Piece]| pieces.iter().map(piece).collect::<Vec<_>>().join("; ");
        write!(f, "memory {}, to add {}", list(pieces), list(spares))
    }
}

/// Sizes around the limits at which the code branches. They are small, so that requests exhaust them.
const SIZES: [usize; 8] = [600, 64, 512, 1100, 40, 1536, 300, 2100];
/// Distances of up to four nodes: a ring, two boards, and all alike.
const RING: [[u8; 4]; 4] = [[10, 20, 30, 20], [20, 10, 20, 30], [30, 20, 10, 20], [20, 30, 20, 10]];
const BOARDS: [[u8; 4]; 4] = [[10, 15, 30, 40], [15, 10, 40, 30], [30, 40, 10, 15], [40, 30, 15, 10]];
const ALIKE: [[u8; 4]; 4] = [[10, 20, 20, 20], [20, 10, 20, 20], [20, 20, 10, 20], [20, 20, 20, 10]];

impl Machine {
    /// The machine that these numbers describe, with `cpus` CPUs. Zeros describe one node with one piece of memory.
    pub fn decode(raw: Raw, cpus: usize) -> Self {
        let Raw { kind, a, b, c, d } = raw;
        let nodes = 1 + usize::from(kind) % 4;
        let distances = [BOARDS, RING, ALIKE][(c & 3).min(2) as usize];
        let bits = |of: u32, at: usize| of >> (4 * at) & 15;
        let piece = |at: usize, node: usize, is_dma32: bool| {
            let pages = SIZES[bits(a, at) as usize % SIZES.len()];
            let reserve = if is_dma32 { [0, 0, 30, pages as u32 / 2][bits(c, 7) as usize % 4] } else { 0 };
            Piece { node: node_of(node), is_dma32, marks: marks_of(bits(b, at), pages, reserve), pages }
        };
        // One piece on each node, except perhaps one node; then perhaps one more somewhere, perhaps below 4 GiB.
        let bare = (c >> 2 & 7 == 7).then_some((c >> 5) as usize % nodes).filter(|_| nodes > 1);
        let mut pieces: Vec<Piece> =
            (0..nodes).filter(|&node| Some(node) != bare).map(|node| piece(node, node, false)).collect();
        match c >> 8 & 7 {
            5 => pieces.push(piece(4, (c >> 11) as usize % nodes, false)),
            6 | 7 => pieces.push(piece(4, (c >> 11) as usize % nodes, true)),
            _ => {}
        }
        let spares = (0..(c >> 14 & 3) as usize % 3)
            .map(|at| piece(5 + at, (c >> (16 + at)) as usize % nodes, c >> (18 + at) & 3 == 3));
        // The policy's nodes must include one with memory: otherwise the builder refuses.
        let populated: NodeMask = pieces.iter().map(|piece| piece.node).collect();
        let among = NodeMask::from_bits(u64::from(d >> 4 & 15));
        let among = if among.and(populated).is_empty() { populated } else { among };
        let policy = match d & 15 {
            12 => Policy::Preferred(node_of((d >> 4) as usize % nodes)),
            13 => Policy::Interleave(NodeMask::ALL),
            14 => Policy::Interleave(among),
            15 => Policy::Bind(among),
            _ => Policy::Local,
        };
        Self {
            node_of_cpu: (0..cpus).map(|cpu| node_of((cpu + (d >> 8) as usize) % nodes)).collect(),
            distances: distances[..nodes].iter().map(|row| row[..nodes].to_vec()).collect(),
            spares: spares.collect(),
            pieces,
            policy,
            failing: Failing::Never,
        }
    }

    /// The same machine with acquisitions that fail.
    #[must_use]
    pub fn failing(self, failing: Failing) -> Self {
        Self { failing, ..self }
    }

    /// Builds its allocator. `builder` sets the backend.
    ///
    /// # Errors
    /// Those of the builder.
    pub fn build(&self, builder: Builder) -> Result<Built, BuildError> {
        let mut builder = builder.huge_pages(false).policy(self.policy);
        builder = builder.nodes(self.node_of_cpu.clone(), self.distances.clone());
        builder = match self.failing {
            Failing::Never => builder,
            Failing::After(n) => builder.faults(Faults::after(n)),
            Failing::Sometimes(percent, seed) => {
                builder.faults(Faults::with_probability(f64::from(percent) / 100.0, seed))
            }
        };
        // Memory that the caller brings has known addresses, and the system takes no part of it back. So a single piece is not
        // brought: then the allocator reports its address.
        let is_alone = self.pieces.len() == 1 && self.spares.is_empty();
        let all = || self.pieces.iter().chain(&self.spares);
        let regions: Vec<Region> = all().filter(|_| !is_alone).map(|piece| Region::new(piece.pages)).collect();
        for (at, piece) in self.pieces.iter().enumerate() {
            builder = builder.memory(piece.memory(regions.get(at)));
        }
        let allocator = builder.build()?;
        let ranges = match is_alone {
            true => allocator.arenas().into_iter().map(|arena| arena.range).collect(),
            false => regions.iter().map(Region::range).collect(),
        };
        Ok(Built { machine: self.clone(), allocator, ranges, regions })
    }
}

/// Marks of all kinds: none, high ones, and steps other than a quarter.
fn marks_of(bits: u32, pages: usize, lowmem_reserve: u32) -> Watermarks {
    let pages = pages as u32;
    let marks = match bits {
        8 | 9 => Watermarks::above(pages / 10),
        10 => Watermarks::above(pages / 3),
        11 => Watermarks::above(7),
        12 => Watermarks { min: 1, low: 1, high: 2, lowmem_reserve: 0 },
        13 => Watermarks { min: 0, low: pages / 4, high: pages / 2, lowmem_reserve: 0 },
        14 => Watermarks { min: pages / 2, low: pages / 2 + 1, high: pages + 5, lowmem_reserve: 0 },
        15 => Watermarks { min: pages + 1, low: pages + 2, high: pages + 3, lowmem_reserve: 0 },
        _ => Watermarks::NONE,
    };
    Watermarks { lowmem_reserve, ..marks }
}

impl Piece {
    /// The description of the piece for the builder.
    pub(crate) fn memory(&self, region: Option<&Region>) -> Memory {
        let memory = match region {
            // SAFETY: nothing else uses the region, and it outlives the allocator: `Built` frees it only after closing.
            Some(region) => unsafe { Memory::brought(region.start, self.pages) },
            None => Memory::anonymous(self.pages),
        };
        let memory = memory.node(self.node).watermarks(self.marks);
        if self.is_dma32 { memory.dma32() } else { memory }
    }
}

/// Memory with the alignment that an arena needs.
#[derive(Debug)]
pub(crate) struct Region {
    start: *mut u8,
    layout: Layout,
}

impl Region {
    fn new(pages: usize) -> Self {
        // Aligned to the largest block in it, so that the allocator's blocks are aligned to their sizes.
        let align = (pages * PAGE_SIZE).next_power_of_two().max(1 << 21);
        let Ok(layout) = Layout::from_size_align(pages * PAGE_SIZE, align) else {
            panic!("{pages} pages are too many")
        };
        // SAFETY: the layout is not empty, because a piece has pages.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        Self { start, layout }
    }
    fn range(&self) -> Range<usize> {
        let start = self.start.expose_provenance();
        start..start + self.layout.size()
    }
    fn free(self) {
        // SAFETY: the pointer and the layout come from `new`, and are freed only here.
        unsafe { dealloc(self.start, self.layout) }
    }
}

/// A machine's allocator, and the memory that was brought for it. Dropping it before it is closed leaks the memory.
#[derive(Debug)]
pub struct Built {
    pub(crate) machine: Machine,
    pub(crate) allocator: Allocator,
    /// The addresses of its pieces, first those that it has and then those that may be added.
    pub(crate) ranges: Vec<Range<usize>>,
    regions: Vec<Region>,
}

impl Built {
    /// The allocator.
    pub fn allocator(&self) -> &Allocator {
        &self.allocator
    }
    /// The memory of a piece that may be added.
    pub(crate) fn memory(&self, at: usize) -> Memory {
        let mut pieces = self.machine.pieces.iter().chain(&self.machine.spares);
        match (pieces.nth(at), self.regions.get(at)) {
            (Some(piece), Some(region)) => piece.memory(Some(region)),
            _ => panic!("piece {at} of a machine that has no memory of its own to add"),
        }
    }
    /// Closes the allocator, and frees its memory.
    ///
    /// # Errors
    /// Pages are still out.
    pub fn close(self) -> Result<(), StillOut> {
        self.allocator.close()?;
        self.regions.into_iter().for_each(Region::free);
        Ok(())
    }
}
