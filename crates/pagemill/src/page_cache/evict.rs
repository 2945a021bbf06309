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
//! stays busy once. `Queues::validate` checks the first three.
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
    /// Places that `Small` gave up in the last call of [`Self::evict`], and that no page took since.
    given: usize,
    ghosts: Ghosts,
}

impl Queues {
    /// Queues of a cache that holds up to `capacity` pages.
    pub(super) fn new(capacity: u32) -> Self {
        let capacity = u64::from(capacity.max(1));
        let empty = Ends { oldest: NONE, newest: NONE, len: 0 };
        let share = (capacity * PARTS / 10).max(PARTS);
        Self {
            nodes: Vec::new(),
            ends: [empty; QUEUES.len()],
            capacity,
            share,
            given: 0,
            ghosts: Ghosts::new(capacity),
        }
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

    /// Pages came in: frames and keys. A key is a hash of file and offset, with all 64 bits well mixed.
    ///
    /// # Panics
    ///
    /// If a frame has a queue already.
    pub(super) fn insert(&mut self, pages: &[(u32, u64)]) {
        for some in pages.chunks(TOGETHER) {
            self.ghosts.touch(some.iter().map(|&(_, key)| key));
            some.iter().for_each(|&(frame, key)| self.insert_one(frame, key));
        }
    }

    fn insert_one(&mut self, frame: u32, key: u64) {
        if frame as usize >= self.nodes.len() {
            self.nodes.resize(frame as usize + 1, Node::ABSENT);
        }
        let queue = self.nodes[frame as usize].queue();
        assert!(queue.is_none(), "frame {frame} comes in, and is in {queue:?}");
        let (into, time) = match self.ghosts.recall(key) {
            Some(ghost) => self.place_of(ghost),
            None => (Queue::Small, 0),
        };
        self.given = self.given.saturating_sub(1);
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
    pub(super) fn evict(&mut self, wanted: usize, most_looks: usize, look: impl FnMut(u32, u8) -> Look) -> usize {
        self.given = 0;
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
        self.ghosts.settle();
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
            Look::Taken(key) => {
                self.given += usize::from(from == Queue::Small);
                self.ghosts.remember(key, is_mains);
            }
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
        if self.given > 0 {
            return (Queue::Main, self.ghosts.now());
        }
        // It was away for its age and for its way through Small.
        (Queue::Rivals, (u64::from(ghost.age) + self.count(Queue::Small) as u64).min(u64::from(Node::TIME)) as u32)
    }

    fn adapt(&mut self, ghost: Ghost) {
        if u64::from(ghost.age) > (self.capacity / 50).max(2) {
            return;
        }
        let step = (self.capacity * PARTS * 2 / 10_000).max(PARTS / 4);
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

/// Entries of the table that are fetched together.
const TOGETHER: usize = 32;

/// Ghosts in a line of the table.
const LINE: usize = 16;

/// What was evicted lately: a table of lines, each a queue of its own. An entry has 18 bits of the key's hash, 13 of the
/// time of its queue, and one for the queue. A key that only looks like a ghost has a chance of one in 16,000.
struct Ghosts {
    lines: Vec<[u32; LINE]>,
    /// Evictions from `Small` and from `Main`.
    clocks: [u32; 2],
    /// Evictions in one unit of an entry's time, as a power of two.
    unit: u32,
    /// Keys and the rest of their entries, on their way to the table.
    coming: Vec<(u64, u32)>,
}

impl Ghosts {
    /// Times that an entry tells apart.
    const TIMES: u32 = 1 << 13;
    /// An entry less what identifies its key.
    const REST: u32 = 2 * Self::TIMES - 1;

    fn new(capacity: u64) -> Self {
        let lines = (2 * capacity).div_ceil(LINE as u64) as usize;
        // A capacity has 512 to 1024 units, so times repeat after 8 capacities or more; entries are gone by then.
        let unit = (capacity / 512).max(1).ilog2();
        Self { lines: vec![[0; LINE]; lines], clocks: [0; 2], unit, coming: Vec::with_capacity(TOGETHER) }
    }

    /// The time of `Main`'s pages: evictions from `Small`.
    fn now(&self) -> u32 {
        self.clocks[0]
    }

    /// The line of a key, and what identifies the key there: never 0, as an unused entry is.
    fn line(&mut self, key: u64) -> (&mut [u32; LINE], u32) {
        let line = (u128::from(key) * self.lines.len() as u128) >> 64;
        (&mut self.lines[line as usize], ((key as u32) & !Self::REST).max(Self::REST + 1))
    }

    fn remember(&mut self, key: u64, is_mains: bool) {
        let clock = &mut self.clocks[usize::from(is_mains)];
        *clock = clock.wrapping_add(1);
        let time = (*clock >> self.unit) % Self::TIMES;
        if self.coming.len() == TOGETHER {
            self.settle();
        }
        self.coming.push((key, (time << 1) | u32::from(is_mains)));
    }

    /// Puts into the table what is on its way.
    fn settle(&mut self) {
        let coming = std::mem::take(&mut self.coming);
        self.touch(coming.iter().map(|&(key, _)| key));
        for &(key, rest) in &coming {
            let (line, print) = self.line(key);
            line.copy_within(..LINE - 1, 1);
            line[0] = print | rest;
        }
        self.coming = coming;
        self.coming.clear();
    }

    /// Reads the lines of keys, so that the processor fetches them at the same time: each is far away.
    fn touch(&mut self, keys: impl Iterator<Item = u64>) {
        std::hint::black_box(keys.fold(0, |sum, key| sum ^ self.line(key).0[0]));
    }

    /// Whether the key is a ghost; it is none from then on.
    fn recall(&mut self, key: u64) -> Option<Ghost> {
        let (clocks, unit) = (self.clocks, self.unit);
        let (line, print) = self.line(key);
        let at = line.iter().position(|entry| entry & !Self::REST == print)?;
        let entry = line[at];
        line.copy_within(at + 1.., at);
        line[LINE - 1] = 0;
        let now = clocks[entry as usize & 1] >> unit;
        let age = (now.wrapping_sub((entry & Self::REST) >> 1) % Self::TIMES) << unit;
        Some(Ghost { age, is_mains: entry & 1 == 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::{Look, Queue, Queues, ROUNDS};
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn mixed(key: u64) -> u64 {
        let n = (key ^ (key >> 30)).wrapping_add(0x9E37_79B9_7F4A_7C15).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (n ^ (n >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB)
    }

    /// A cache of `capacity` pages, each of one key, with counts of reads up to 3.
    struct Cache {
        queues: Queues,
        capacity: u32,
        frames: HashMap<u64, u32>,
        pages: Vec<(u64, u8)>,
        unused: Vec<u32>,
    }

    impl Cache {
        fn new(capacity: u32) -> Self {
            let (queues, unused) = (Queues::new(capacity), (0..capacity).rev().collect());
            Self { queues, capacity, frames: HashMap::new(), pages: vec![(0, 0); capacity as usize], unused }
        }

        fn evict(&mut self, wanted: usize) -> usize {
            let Self { queues, frames, pages, unused, .. } = self;
            queues.evict(wanted, usize::MAX, |frame, spare| {
                let (key, reads) = &mut pages[frame as usize];
                if *reads > spare {
                    *reads -= spare + 1;
                    return Look::Used;
                }
                assert_eq!(frames.remove(key), Some(frame));
                unused.push(frame);
                Look::Taken(mixed(*key))
            })
        }

        /// True for a hit.
        fn read(&mut self, key: u64) -> bool {
            if let Some(&frame) = self.frames.get(&key) {
                let reads = &mut self.pages[frame as usize].1;
                *reads = (*reads + 1).min(3);
                return true;
            }
            if self.frames.len() >= self.capacity as usize {
                let wanted = self.frames.len() + 1 - self.capacity as usize;
                assert_eq!(self.evict(wanted), wanted);
            }
            let frame = self.unused.pop().unwrap();
            self.pages[frame as usize] = (key, 0);
            self.frames.insert(key, frame);
            self.queues.insert(&[(frame, mixed(key))]);
            false
        }
    }

    fn filled(frames: u32, capacity: u32) -> Queues {
        let mut queues = Queues::new(capacity);
        (0..frames).for_each(|frame| queues.insert(&[(frame, mixed(u64::from(frame)))]));
        queues
    }

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u32, u64),
        Remove(u32),
        Replace(u32, u32),
        Demote(u32),
        Capacity(u32),
        /// Wanted, most looks, seed of the answers.
        Evict(usize, usize, u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            6 => (0..64_u32, 0..200_u64).prop_map(|(frame, key)| Step::Insert(frame, key)),
            1 => (0..64_u32).prop_map(Step::Remove),
            1 => (0..64_u32, 0..64_u32).prop_map(|(old, new)| Step::Replace(old, new)),
            1 => (0..64_u32).prop_map(Step::Demote),
            1 => (0..70_u32).prop_map(Step::Capacity),
            3 => (0..20_usize, 0..100_usize, any::<u64>()).prop_map(|(wanted, most, seed)| Step::Evict(wanted, most, seed)),
        ];
        proptest::collection::vec(step, 1..200)
    }

    proptest! {
        /// I1 to I4 against a model: a map from frame to key.
        #[test]
        fn queues_hold_what_a_map_holds(steps in steps()) {
            let (mut queues, mut model) = (Queues::new(32), HashMap::new());
            for step in steps {
                match step {
                    Step::Insert(frame, key) if !model.contains_key(&frame) => {
                        queues.insert(&[(frame, mixed(key))]);
                        model.insert(frame, key);
                    }
                    Step::Insert(..) => {}
                    Step::Remove(frame) => assert_eq!(queues.remove(frame), model.remove(&frame).is_some()),
                    Step::Replace(_, new) if model.contains_key(&new) => {}
                    Step::Replace(old, new) => {
                        let key = model.remove(&old);
                        assert_eq!(queues.replace(old, new), key.is_some());
                        key.map(|key| model.insert(new, key));
                    }
                    Step::Demote(frame) => assert_eq!(queues.demote(frame), model.contains_key(&frame)),
                    Step::Capacity(capacity) => queues.set_capacity(capacity),
                    Step::Evict(wanted, most, seed) => {
                        let (mut looks, mut gone, before) = (0, 0, model.len());
                        let taken = queues.evict(wanted, most, |frame, _| {
                            looks += 1;
                            match mixed(seed ^ (looks << 8)) % 3 {
                                0 => Look::Used,
                                1 => Look::Busy,
                                _ => {
                                    gone += 1;
                                    Look::Taken(mixed(model.remove(&frame).expect("a frame that is there")))
                                }
                            }
                        });
                        assert_eq!(taken, gone);
                        assert!(taken <= wanted && looks as usize <= most.min(ROUNDS * before));
                    }
                }
                queues.validate();
                assert_eq!(queues.len(), model.len());
                model.keys().for_each(|&frame| assert!(queues.queue(frame).is_some()));
            }
        }
    }

    #[test]
    fn busy_pages_are_looked_at_once_in_a_call() {
        let mut queues = filled(100, 100);
        for _ in 0..3 {
            let mut looks = vec![0; 100];
            let busy = |frame: u32, _| {
                looks[frame as usize] += 1;
                Look::Busy
            };
            assert_eq!(queues.evict(10, usize::MAX, busy), 0);
            assert_eq!(looks, [1; 100]);
        }
        assert_eq!(queues.evict(10, 7, |_, _| Look::Busy), 0);
        queues.validate();
    }

    #[test]
    fn pages_that_are_always_read_end_a_call() {
        let (mut queues, mut looks) = (filled(100, 100), 0);
        let used = |_, _| {
            looks += 1;
            Look::Used
        };
        assert_eq!(queues.evict(1, usize::MAX, used), 0);
        assert!(looks <= ROUNDS * 100, "{looks} looks");
    }

    /// Every other page is dirty and stays so: after they have moved aside, a call looks at few of them.
    #[test]
    fn dirty_pages_move_out_of_the_way() {
        let (mut queues, mut free) = (filled(1000, 1000), Vec::new());
        for round in 0..200_u64 {
            let mut looks = 0;
            let look = |frame: u32, _| {
                looks += 1;
                if frame.is_multiple_of(2) {
                    return Look::Busy;
                }
                free.push(frame);
                Look::Taken(mixed(u64::from(frame)))
            };
            assert_eq!(queues.evict(8, usize::MAX, look), 8);
            assert!(round < 70 || looks <= 8 + 3, "round {round}: {looks} looks for 8 pages");
            for (n, frame) in free.drain(..).enumerate() {
                queues.insert(&[(frame, mixed(10_000 + round * 8 + n as u64))]);
            }
        }
    }

    #[test]
    fn clean_pages_come_back_from_aside() {
        let mut queues = filled(100, 100);
        queues.evict(1, usize::MAX, |_, _| Look::Busy);
        assert_eq!(queues.count(Queue::Aside), 100);
        let mut gone = Vec::new();
        let clean = |frame, _| {
            gone.push(frame);
            Look::Taken(mixed(u64::from(frame)))
        };
        assert_eq!(queues.evict(100, usize::MAX, clean), 100);
        assert!(gone.is_sorted(), "the page that was aside for longest goes first");
    }

    #[test]
    fn a_scan_leaves_the_hot_set() {
        for capacity in [10, 100, 5000] {
            let (mut cache, hot) = (Cache::new(capacity), u64::from(capacity) / 2);
            (0..5 * hot).for_each(|n| _ = cache.read(n % hot));
            // Each page comes in by readahead and is read once: a read that misses counts none, the second one counts.
            (0..20 * u64::from(capacity)).for_each(|n| _ = cache.read(1_000_000 + n / 2));
            let left = (0..hot).filter(|key| cache.frames.contains_key(key)).count();
            assert_eq!(left as u64, hot, "{capacity} pages");
            cache.queues.validate();
        }
    }

    /// The same test with a fault put in: a policy that keeps every page that was read at all, as readahead's pages are
    /// by a scan, loses the hot set. So the test above sees a scan that gets through.
    #[test]
    fn a_policy_that_keeps_what_a_scan_read_loses_the_hot_set() {
        let (mut cache, hot) = (Cache::new(100), 50);
        (0..5 * hot).for_each(|n| _ = cache.read(n % hot));
        for n in 0..1000 {
            (0..3).for_each(|_| _ = cache.read(1_000_000 + n));
        }
        assert!((0..hot).filter(|key| cache.frames.contains_key(key)).count() < 5);
    }

    #[test]
    fn part_of_a_loop_stays() {
        let mut cache = Cache::new(1000);
        let hits = (0..30 * 1100).filter(|n| cache.read(n % 1100)).count();
        assert!(hits > 30 * 1100 * 7 / 10, "{hits} hits; LRU has none");
    }

    #[test]
    fn a_smaller_capacity_takes_effect() {
        let mut cache = Cache::new(1000);
        (0..5000).for_each(|n| _ = cache.read(n % 1300));
        cache.capacity = 10;
        cache.queues.set_capacity(10);
        cache.queues.validate();
        (0..500).for_each(|n| _ = cache.read(n % 7));
        assert_eq!(cache.queues.len(), 10);
        assert!((0..7).all(|key| cache.read(key)));
        cache.queues.set_capacity(0);
        assert_eq!(cache.evict(100), 10);
        cache.queues.validate();
    }

    #[test]
    fn a_demoted_page_goes_first_and_leaves_no_ghost() {
        let mut queues = filled(10, 10);
        assert!(queues.demote(7) && !queues.demote(77));
        let mut gone = None;
        let take = |frame, _| {
            gone = Some(frame);
            Look::Taken(mixed(7))
        };
        assert_eq!(queues.evict(1, usize::MAX, take), 1);
        assert_eq!(gone, Some(7));
        assert!(queues.ghosts.recall(mixed(7)).is_none());
    }

    #[test]
    fn a_copy_takes_the_place_of_its_page() {
        let mut queues = filled(3, 10);
        assert!(queues.replace(1, 9) && !queues.replace(1, 8));
        let mut order = Vec::new();
        let take = |frame, _| {
            order.push(frame);
            Look::Taken(0)
        };
        queues.evict(3, usize::MAX, take);
        assert_eq!(order, [0, 9, 2]);
    }

    #[test]
    #[should_panic(expected = "frame 3 comes in, and is in Some(Small)")]
    fn a_frame_that_comes_in_twice_is_a_broken_invariant() {
        filled(5, 10).insert(&[(3, 0)]);
    }

    #[test]
    fn validate_sees_a_broken_link() {
        let mut queues = filled(5, 10);
        queues.nodes[2].newer = 4;
        assert!(std::panic::catch_unwind(|| queues.validate()).is_err());
    }

    #[test]
    fn a_ghost_has_its_age_and_its_queue() {
        let mut ghosts = super::Ghosts::new(1000);
        (0..500).for_each(|key| ghosts.remember(mixed(key), key % 5 == 0));
        ghosts.settle();
        let ghost = ghosts.recall(mixed(101)).unwrap();
        assert_eq!((ghost.age, ghost.is_mains), ((102..500).filter(|n| n % 5 != 0).count() as u32, false));
        assert!(ghosts.recall(mixed(101)).is_none() && ghosts.recall(mixed(9_999)).is_none());
        assert!(ghosts.recall(mixed(100)).unwrap().is_mains);
    }
}
