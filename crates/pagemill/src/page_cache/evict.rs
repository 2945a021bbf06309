//! Which page goes: the eviction policy of the page cache, on frame numbers.
//!
//! The cache calls it under its lock. A hit takes no lock and comes not here: it raises the count of reads in the page's
//! own state, up to 3, and [`Queues::evict`] asks for that count by the closure `look` and lowers it.
//!
//! The policy is S3-FIFO (Yang and others, SOSP 2023) with two changes, which `docs/adr/0050-which-pages-go.md` measures.
//! A new page goes through the queue `Small`. If it was read more than once there, it moves to `Main`; else it is
//! evicted and remembered as a *ghost*, four bytes of a table. A page that comes back while it is a ghost may go to
//! `Main` at once. `Main` gives a page that was read another round. So a scan passes through `Small`, and leaves `Main`
//! as it was. The changes:
//! - *The share of `Small` adapts*, as ARC's does (Megiddo and Modha, FAST 2003). A page that comes back soon after
//!   `Small` evicted it says that `Small` is too small, one that comes back soon after `Main` evicted it says the same of
//!   `Main`.
//! - *A ghost must be better than the page that it replaces*, as with LIRS (Jiang and Zhang, SIGMETRICS 2002): the oldest
//!   page of `Main` must have been unread for longer than the ghost was away. So pages of a loop that is longer than the
//!   cache do not replace each other, and a part of the loop stays.
//!
//! Three queues more: `First` has pages that will not be needed again, and goes before all others. `Aside` has pages that
//! were busy (dirty, pinned, under I/O) when they should have gone, so that no call meets them again and again. `Rivals`
//! has pages that came back, until `evict` compares them with the oldest of `Main`: only it may look at pages.
//!
//! I1: a frame is in one queue at most, and the links of a queue lead from its oldest frame to its newest and back.
//! I2: the lengths of the queues add up to the number of frames that have a queue. I3: the share of `Small` lies between
//! [`Queues::share_bounds`]. I4: a call of `evict` looks at a page [`ROUNDS`] times on average at most, and at a page that
//! stays busy once. [`Queues::validate`] checks the first three.
//!
//! Memory: 12 bytes for each frame up to the highest one seen, 8 for each page of capacity (the ghosts).

/// No frame.
const NONE: u32 = u32::MAX;

/// Reads of a page in `Small` that do not make it worth keeping. One: a page that readahead fetched and a scan then read
/// goes.
const SPARE_SMALL: u8 = 1;

/// Looks at a page in one call, on average: a count of 3 is lowered to 0 by three, and one looks on.
const ROUNDS: usize = 5;

/// Shares are counted in parts of a page.
const PARTS: u64 = 1024;

/// What `look` says of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Look {
    /// It was read more often than `spare` times, and `look` has taken `spare + 1` reads off its count. It stays.
    Used,
    /// It cannot go now: it is pinned, dirty or under I/O. It stays, and `evict` goes on.
    Busy,
    /// `look` has taken it out of the index. The number is the key that the page would come back with.
    Taken(u64),
}

/// Where a frame is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Queue {
    /// First in line for eviction.
    First,
    /// New pages.
    Small,
    /// Pages that proved to be read.
    Main,
    /// Pages that were busy when their turn came.
    Aside,
    /// Pages that came back, until the next call of `evict` compares them with the oldest of `Main`.
    Rivals,
}

const QUEUES: [Queue; 5] = [Queue::First, Queue::Small, Queue::Main, Queue::Aside, Queue::Rivals];

/// A frame's place: its neighbours, its queue and a time.
#[derive(Clone, Copy)]
struct Node {
    older: u32,
    newer: u32,
    /// Three bits for the queue (0: none), the others for [`Self::time`].
    mark: u32,
}

impl Node {
    const TIME_BITS: u32 = 29;
    const TIME: u32 = (1 << Self::TIME_BITS) - 1;
    const ABSENT: Self = Self { older: NONE, newer: NONE, mark: 0 };

    fn queue(self) -> Option<Queue> {
        QUEUES.get((self.mark >> Self::TIME_BITS).checked_sub(1)? as usize).copied()
    }

    /// In `Main`, when it came or was last looked at, by the clock of `Small`. In `Aside`, 1 if it came from `Main`. In
    /// `Rivals`, for how long it was away.
    fn time(self) -> u32 {
        self.mark & Self::TIME
    }
}

#[derive(Clone, Copy)]
struct Ends {
    oldest: u32,
    newest: u32,
    len: usize,
}

/// The queues of a cache.
pub(super) struct Queues {
    nodes: Vec<Node>,
    ends: [Ends; QUEUES.len()],
    capacity: u64,
    /// Pages that `Small` shall have if the cache is full, times [`PARTS`].
    share: u64,
    ghosts: Ghosts,
}

impl Queues {
    /// Queues of a cache that holds up to `capacity` pages.
    pub(super) fn new(capacity: u32) -> Self {
        let capacity = u64::from(capacity.max(1));
        let empty = Ends { oldest: NONE, newest: NONE, len: 0 };
        let share = (capacity * PARTS / 10).max(PARTS);
        Self { nodes: Vec::new(), ends: [empty; QUEUES.len()], capacity, share, ghosts: Ghosts::new(capacity) }
    }

    /// Changes the capacity. Evicts nothing: a caller that shrinks calls [`Self::evict`] for what is too much. The
    /// ghosts are forgotten.
    pub(super) fn set_capacity(&mut self, capacity: u32) {
        let capacity = u64::from(capacity.max(1));
        if capacity != self.capacity {
            let share = u128::from(self.share) * u128::from(capacity) / u128::from(self.capacity);
            self.capacity = capacity;
            let (least, most) = self.share_bounds();
            self.share = (share as u64).clamp(least, most);
            self.ghosts = Ghosts::new(capacity);
        }
    }

    /// Frames that have a queue.
    pub(super) fn len(&self) -> usize {
        self.ends.iter().map(|ends| ends.len).sum()
    }

    /// A page came in. `key` is a hash of file and offset, with all 64 bits well mixed.
    ///
    /// # Panics
    ///
    /// If the frame has a queue already.
    pub(super) fn insert(&mut self, frame: u32, key: u64) {
        if frame as usize >= self.nodes.len() {
            self.nodes.resize(frame as usize + 1, Node::ABSENT);
        }
        let queue = self.nodes[frame as usize].queue();
        assert!(queue.is_none(), "frame {frame} comes in, and is in {queue:?}");
        let (into, time) = match self.ghosts.recall(key) {
            Some(ghost) => self.place_of(ghost),
            None => (Queue::Small, 0),
        };
        self.push(into, frame, time);
    }

    /// A page left the cache without being evicted. False if it had no queue.
    pub(super) fn remove(&mut self, frame: u32) -> bool {
        self.queue(frame).map(|queue| self.unlink(queue, frame)).is_some()
    }

    /// The page in frame `old` is in frame `new` now, and keeps its place. False if it had no queue.
    ///
    /// # Panics
    ///
    /// If `new` has a queue already.
    pub(super) fn replace(&mut self, old: u32, new: u32) -> bool {
        let Some(queue) = self.queue(old) else { return false };
        if new as usize >= self.nodes.len() {
            self.nodes.resize(new as usize + 1, Node::ABSENT);
        }
        let taken = self.nodes[new as usize].queue();
        assert!(taken.is_none(), "frame {new} replaces {old}, and is in {taken:?}");
        let node = std::mem::replace(&mut self.nodes[old as usize], Node::ABSENT);
        self.nodes[new as usize] = node;
        *self.newer_link(queue, node.older) = new;
        *self.older_link(queue, node.newer) = new;
        true
    }

    /// Puts a page first in line: it will not be needed again, or not soon. The caller clears its count of reads; a page
    /// that is read after that goes through `Small` once more. False if it had no queue.
    pub(super) fn demote(&mut self, frame: u32) -> bool {
        let Some(queue) = self.queue(frame) else { return false };
        self.unlink(queue, frame);
        self.push(Queue::First, frame, 0);
        true
    }

    /// Goes over candidates until `wanted` were taken, `most_looks` were looked at, or all were. The number taken.
    ///
    /// `look(frame, spare)` decides on a page: [`Look`] says what it has done then. It says `Used` before `Busy`: a page
    /// that is to stay need not be written.
    ///
    /// Pages that are busy move aside, and a call looks at few of these, unless nothing else is left. If all are busy, it
    /// looks at each once.
    pub(super) fn evict(&mut self, wanted: usize, most_looks: usize, mut look: impl FnMut(u32, u8) -> Look) -> usize {
        let mut trip = Trip { look, wanted, looks: most_looks.min(ROUNDS * self.len()), taken: 0 };
        let (mut waiting, mut patience) = (self.count(Queue::Aside), 1 + wanted / 4);
        while self.consider(Queue::First, &mut trip).is_some() {}
        while waiting > 0 && patience > 0 {
            let Some(seen) = self.consider(Queue::Aside, &mut trip) else { break };
            waiting -= 1;
            patience -= usize::from(seen == Look::Busy);
        }
        while self.compare(&mut trip) || self.consider(self.turn(), &mut trip).is_some() {}
        while waiting > 0 && self.consider(Queue::Aside, &mut trip).is_some() {
            waiting -= 1;
        }
        trip.taken
    }

    /// Looks at the oldest page of a queue, and puts it where it belongs then. None if there is none, or the trip ends.
    fn consider(&mut self, from: Queue, trip: &mut Trip<impl FnMut(u32, u8) -> Look>) -> Option<Look> {
        let frame = self.oldest(from)?;
        let is_mains = from == Queue::Main || from == Queue::Aside && self.nodes[frame as usize].time() == 1;
        let seen = trip.look(frame, if is_mains || from == Queue::First { 0 } else { SPARE_SMALL })?;
        self.unlink(from, frame);
        match seen {
            Look::Used if from == Queue::First => self.push(Queue::Small, frame, 0),
            Look::Used => self.push(Queue::Main, frame, self.ghosts.now()),
            Look::Busy => self.push(Queue::Aside, frame, u32::from(is_mains)),
            Look::Taken(_) if from == Queue::First => {}
            Look::Taken(key) => self.ghosts.remember(key, is_mains),
        }
        Some(seen)
    }

    /// Compares a rival with the oldest page of `Main`, and gives it its place. False if there is none, or the trip ends.
    fn compare(&mut self, trip: &mut Trip<impl FnMut(u32, u8) -> Look>) -> bool {
        let Some(rival) = self.oldest(Queue::Rivals).filter(|_| trip.goes_on()) else { return false };
        let is_better = self.oldest(Queue::Main).is_none_or(|oldest| {
            let unread = self.ghosts.now().wrapping_sub(self.nodes[oldest as usize].time()) & Node::TIME;
            // A tenth more, since both are rounded: in a loop they are equal.
            u64::from(unread) * 10 > u64::from(self.nodes[rival as usize].time()) * 11
        });
        let into = match is_better.then(|| self.consider(Queue::Main, trip)) {
            Some(Some(Look::Busy)) => return true,
            Some(Some(Look::Taken(_)) | None) => Queue::Main,
            Some(Some(Look::Used)) | None => Queue::Small,
        };
        self.unlink(Queue::Rivals, rival);
        self.push(into, rival, self.ghosts.now());
        true
    }

    /// The queue that gives the next page.
    fn turn(&self) -> Queue {
        let is_smalls = self.is_small_above_share() || self.count(Queue::Main) == 0;
        if is_smalls { Queue::Small } else { Queue::Main }
    }

    /// Whether `Small` has more than its share of what `Small` and `Main` have.
    fn is_small_above_share(&self) -> bool {
        let (small, main) = (self.count(Queue::Small) as u64, self.count(Queue::Main) as u64);
        let share = u128::from(self.share) * u128::from(small + main);
        u128::from(small * self.capacity * PARTS) > share.max(u128::from(self.capacity * PARTS))
    }

    /// Where a page goes that comes back, and its time there. Learns from it what share `Small` should have.
    fn place_of(&mut self, ghost: Ghost) -> (Queue, u32) {
        self.adapt(ghost);
        // What Main evicted comes back by Small: otherwise Main's pages drive out each other in a loop.
        if ghost.is_mains || u64::from(ghost.age) > self.capacity {
            return (Queue::Small, 0);
        }
        if self.is_small_above_share() {
            return (Queue::Main, self.ghosts.now());
        }
        // It was away for its age and for its way through Small.
        (Queue::Rivals, (u64::from(ghost.age) + self.count(Queue::Small) as u64).min(u64::from(Node::TIME)) as u32)
    }

    fn adapt(&mut self, ghost: Ghost) {
        if u64::from(ghost.age) > (self.capacity / 50).max(2) {
            return;
        }
        let step = (self.capacity * PARTS * 3 / 10_000).max(PARTS / 4);
        let (least, most) = self.share_bounds();
        let share = if ghost.is_mains { self.share.saturating_sub(step) } else { self.share + step };
        self.share = share.clamp(least, most);
    }

    /// The least and the most that [`Self::share`] may be: a hundredth of the cache, nine tenths of it.
    fn share_bounds(&self) -> (u64, u64) {
        let least = (self.capacity * PARTS / 100).max(PARTS);
        (least, (self.capacity * PARTS / 10 * 9).max(least))
    }

    fn count(&self, queue: Queue) -> usize {
        self.ends[queue as usize].len
    }

    fn oldest(&self, queue: Queue) -> Option<u32> {
        Some(self.ends[queue as usize].oldest).filter(|&frame| frame != NONE)
    }

    fn queue(&self, frame: u32) -> Option<Queue> {
        self.nodes.get(frame as usize)?.queue()
    }

    /// The link that leads to the frame after `frame`; after none comes the oldest.
    fn newer_link(&mut self, queue: Queue, frame: u32) -> &mut u32 {
        if frame == NONE { &mut self.ends[queue as usize].oldest } else { &mut self.nodes[frame as usize].newer }
    }

    /// The link that leads to the frame before `frame`; before none comes the newest.
    fn older_link(&mut self, queue: Queue, frame: u32) -> &mut u32 {
        if frame == NONE { &mut self.ends[queue as usize].newest } else { &mut self.nodes[frame as usize].older }
    }

    /// Puts a frame without a queue at the newest end of one.
    fn push(&mut self, queue: Queue, frame: u32, time: u32) {
        let older = std::mem::replace(self.older_link(queue, NONE), frame);
        let mark = ((queue as u32 + 1) << Node::TIME_BITS) | (time & Node::TIME);
        self.nodes[frame as usize] = Node { older, newer: NONE, mark };
        *self.newer_link(queue, older) = frame;
        self.ends[queue as usize].len += 1;
    }

    fn unlink(&mut self, queue: Queue, frame: u32) {
        let Node { older, newer, .. } = std::mem::replace(&mut self.nodes[frame as usize], Node::ABSENT);
        *self.newer_link(queue, older) = newer;
        *self.older_link(queue, newer) = older;
        self.ends[queue as usize].len -= 1;
    }

    /// Checks I1 to I3.
    #[cfg(test)]
    fn validate(&self) {
        let mut all = 0;
        for queue in QUEUES {
            let (mut at, mut older, mut len) = (self.ends[queue as usize].oldest, NONE, 0);
            while at != NONE {
                let node = self.nodes[at as usize];
                assert_eq!(node.queue(), Some(queue), "I1: frame {at}");
                assert_eq!(node.older, older, "I1: the frame before {at}");
                (older, at, len) = (at, node.newer, len + 1);
                assert!(len <= self.nodes.len(), "I1: a circle in {queue:?}");
            }
            assert_eq!(self.ends[queue as usize].newest, older, "I1: the newest of {queue:?}");
            assert_eq!(self.count(queue), len, "I2: {queue:?}");
            all += len;
        }
        assert_eq!(self.nodes.iter().filter(|node| node.queue().is_some()).count(), all, "I2: frames in no list");
        let (least, most) = self.share_bounds();
        assert!((least..=most).contains(&self.share), "I3: {} not in {least} to {most}", self.share);
    }
}

/// A call of [`Queues::evict`].
struct Trip<F> {
    look: F,
    wanted: usize,
    /// Looks that are left.
    looks: usize,
    taken: usize,
}

impl<F: FnMut(u32, u8) -> Look> Trip<F> {
    fn goes_on(&self) -> bool {
        self.taken < self.wanted && self.looks > 0
    }

    fn look(&mut self, frame: u32, spare: u8) -> Option<Look> {
        if !self.goes_on() {
            return None;
        }
        self.looks -= 1;
        let seen = (self.look)(frame, spare);
        self.taken += usize::from(matches!(seen, Look::Taken(_)));
        Some(seen)
    }
}

/// A page that was evicted, when it comes back.
#[derive(Clone, Copy)]
struct Ghost {
    /// Evictions from the same queue since, about.
    age: u32,
    /// `Main` evicted it, not `Small`.
    is_mains: bool,
}

/// Ghosts in a line of the table.
const LINE: usize = 16;

/// What was evicted lately: a table of lines, each a queue of its own. An entry has 20 bits of the key's hash, 11 of the
/// time of its queue, and one for the queue. A key that only looks like a ghost has a chance of one in 65,000.
struct Ghosts {
    lines: Vec<[u32; LINE]>,
    /// Evictions from `Small` and from `Main`.
    clocks: [u32; 2],
    /// Evictions in one unit of an entry's time, as a power of two.
    unit: u32,
}

impl Ghosts {
    const TIMES: u32 = 1 << 11;

    fn new(capacity: u64) -> Self {
        let lines = (2 * capacity).div_ceil(LINE as u64) as usize;
        // A capacity has 256 to 512 units, so times repeat after 4 capacities or more; entries are gone by then.
        Self { lines: vec![[0; LINE]; lines], clocks: [0; 2], unit: (capacity / 256).max(1).ilog2() }
    }

    /// The time of `Main`'s pages: evictions from `Small`.
    fn now(&self) -> u32 {
        self.clocks[0]
    }

    /// The line of a key, and what identifies the key there: never 0, as an unused entry is.
    fn line(&mut self, key: u64) -> (&mut [u32; LINE], u32) {
        let line = (u128::from(key) * self.lines.len() as u128) >> 64;
        (&mut self.lines[line as usize], ((key as u32) >> 12).max(1) << 12)
    }

    fn remember(&mut self, key: u64, is_mains: bool) {
        let clock = &mut self.clocks[usize::from(is_mains)];
        *clock = clock.wrapping_add(1);
        let time = (*clock >> self.unit) % Self::TIMES;
        let (line, print) = self.line(key);
        line.copy_within(..LINE - 1, 1);
        line[0] = print | (time << 1) | u32::from(is_mains);
    }

    /// Whether the key is a ghost; it is none from then on.
    fn recall(&mut self, key: u64) -> Option<Ghost> {
        let (clocks, unit) = (self.clocks, self.unit);
        let (line, print) = self.line(key);
        let at = line.iter().position(|entry| entry & !0xFFF == print)?;
        let entry = line[at];
        line.copy_within(at + 1.., at);
        line[LINE - 1] = 0;
        let now = clocks[entry as usize & 1] >> unit;
        let age = (now.wrapping_sub((entry & 0xFFF) >> 1) % Self::TIMES) << unit;
        Some(Ghost { age, is_mains: entry & 1 == 1 })
    }
}
