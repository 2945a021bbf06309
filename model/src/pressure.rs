//! Changes of the memory itself: caches that shrink, steps of reclaim, the allowed nodes, memory that is added, retired, or given
//! back to the system.
use crate::expect::Expect;
use crate::ledger::{Breach, Ledger};
use crate::plan::Zone;
use crate::unit::Holding;
use crate::world::{Failure, World, demand};
use pagemill::{ArenaId, Error, InvalidRequest, NodeMask, Order, Registered, Shrink, Shrinker};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Blocks that a shrinker may free.
#[derive(Debug)]
struct Cache {
    ledger: Arc<Ledger>,
    kept: Mutex<Vec<Holding>>,
    /// The blocks that it freed since the last look.
    freed: Mutex<Vec<Result<(usize, Order), Breach>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shrinker for Cache {
    fn shrink(&self, wanted: Shrink) -> usize {
        let mut pages = 0;
        while pages < wanted.pages {
            let Some(Holding { block, tag }) = lock(&self.kept).pop() else { break };
            let (addr, order) = (block.addr(), block.order());
            lock(&self.freed).push(self.ledger.give(addr, order, tag).map(|()| (addr, order)));
            pages += order.pages().get();
        }
        pages
    }
}

/// The world's cache, if it has one; and memory that was added.
#[derive(Debug, Default)]
pub(crate) struct Caching {
    cache: Option<(Arc<Cache>, Registered)>,
    /// Its number, for each zone that was added; none for zones of the builder.
    added: Vec<(usize, ArenaId)>,
}

impl Caching {
    pub(crate) fn is_registered(&self) -> bool {
        self.cache.is_some()
    }
    /// Its frames in a zone.
    pub(crate) fn frames_of(&self, ledger: &Ledger, zone: &Zone) -> usize {
        let Some((cache, _)) = &self.cache else { return 0 };
        let is_of = |held: &&Holding| zone.expect.has(ledger.frame_of(held.block.addr()));
        lock(&cache.kept).iter().filter(is_of).map(|held| held.block.order().pages().get()).sum()
    }
    fn frames(&self) -> usize {
        let pages = |cache: &Arc<Cache>| -> usize {
            lock(&cache.kept).iter().map(|held| held.block.order().pages().get()).sum()
        };
        self.cache.as_ref().map_or(0, |(cache, _)| pages(cache))
    }
}

impl World {
    /// Puts held blocks into the cache.
    pub(crate) fn put_in_cache(&mut self, which: usize, n: usize) {
        if self.zones.is_none() {
            return; // The world's requests would wait for a cache that has too little.
        }
        let held: Vec<Holding> = (0..n).map_while(|i| self.pick_any(which.wrapping_add(i))).collect();
        let (cache, _) = self.cache.cache.get_or_insert_with(|| {
            let (kept, freed) = (Mutex::default(), Mutex::default());
            let cache = Arc::new(Cache { ledger: Arc::clone(&self.ledger), kept, freed });
            (Arc::clone(&cache), self.allocator.register_shrinker(cache))
        });
        lock(&cache.kept).extend(held);
    }

    /// Takes all blocks of the cache, and ends it.
    pub(crate) fn uncache(&mut self) {
        if let Some((cache, registered)) = self.cache.cache.take() {
            drop(registered);
            let kept = core::mem::take(&mut *lock(&cache.kept));
            kept.into_iter().for_each(|Holding { block, tag }| self.hold(block, tag));
        }
    }

    /// Records the frames that the cache freed meanwhile. Returns their number.
    pub(crate) fn reconcile(&mut self) -> Result<usize, Failure> {
        let Some((cache, _)) = &self.cache.cache else { return Ok(0) };
        let freed = core::mem::take(&mut *lock(&cache.freed));
        let mut frames = 0;
        for freed in freed {
            let (addr, order) = freed?;
            frames += order.pages().get();
            self.came_back(addr, order);
        }
        Ok(frames)
    }

    pub(crate) fn reclaim_step(&mut self) -> Result<(), Failure> {
        let told = self.allocator.reclaim_step().get();
        let Some(zones) = &self.zones else { return Ok(()) };
        let below_high = |dump: &pagemill::ZoneInfo| (dump.stats.free as usize) < dump.marks.high as usize;
        let is_short =
            zones.in_use().any(|zone| zone.piece.marks.high > 0) && self.allocator.zoneinfo().iter().any(below_high);
        let freed = self.reconcile()?;
        demand!(told == freed, "a step of reclaim brought {told} pages, and the cache gave {freed}");
        let left = self.cache.frames();
        demand!(!is_short || left == 0, "a step of reclaim ended below a high mark, and the cache has {left}");
        Ok(())
    }

    /// Gives free memory above the high mark back to the system, as far as it is committed. The model does not know which frames
    /// are committed, so it has only an upper bound.
    pub(crate) fn give_back(&mut self) -> Result<(), Failure> {
        let told = self.allocator.give_back().get();
        let Some(zones) = &self.zones else { return Ok(()) };
        let zones = zones.zones.iter().filter(|zone| !zone.is_retired && !zone.is_brought);
        let most: usize = zones.map(|zone| zone.expect.free().saturating_sub(zone.piece.marks.high as usize)).sum();
        demand!(told <= most, "{told} pages were given back, of {most} that are above high marks");
        Ok(())
    }

    pub(crate) fn allow(&mut self, nodes: NodeMask) -> Result<(), Failure> {
        let result = self.allocator.set_allowed_nodes(nodes);
        let Some(zones) = &mut self.zones else { return Ok(()) };
        if zones.populated().and(nodes).is_empty() {
            let is_refused = matches!(result, Err(Error::Invalid(InvalidRequest::NoSuchNode { .. })));
            demand!(is_refused, "{nodes:?} was allowed, and has no memory: {result:?}");
        } else {
            demand!(result.is_ok(), "{nodes:?} was not allowed: {result:?}");
            zones.allowed = nodes;
        }
        Ok(())
    }

    /// Adds the next of the machine's pieces of memory.
    pub(crate) fn add_memory(&mut self, _which: usize) -> Result<(), Failure> {
        let (Some(zones), Some(built)) = (&mut self.zones, &self.machine) else { return Ok(()) };
        let at = zones.zones.len();
        let Some(&piece) = built.machine.spares.get(at - built.machine.pieces.len()) else { return Ok(()) };
        let first = zones.zones.iter().map(|zone| zone.piece.pages).sum();
        let expect = Expect::new(first..first + piece.pages);
        match self.allocator.add_memory(built.memory(at)) {
            Ok(arena) => self.cache.added.push((at, arena)),
            Err(error) => return Err(Failure::new(format!("{piece:?} was not added: {error}"))),
        }
        zones.zones.push(Zone { piece, expect, is_retired: false, is_brought: true });
        Ok(())
    }

    /// Retires a piece that was added, perhaps not for the first time.
    pub(crate) fn retire(&mut self, which: usize) -> Result<(), Failure> {
        let added = &self.cache.added;
        let (Some(zones), false) = (&mut self.zones, added.is_empty()) else { return Ok(()) };
        let (at, arena) = added[which % added.len()];
        let out = zones.zones[at].expect.out();
        match self.allocator.retire(arena) {
            Ok(told) => demand!(told.get() == out, "{told} are out of a retired arena, and {out} must be"),
            Err(error) => return Err(Failure::new(format!("arena {at} was not retired: {error}"))),
        }
        zones.zones[at].is_retired = true;
        Ok(())
    }
}
