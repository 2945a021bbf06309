//! Per-CPU lists for a system without an operating system below it: single pages, taken and freed by several CPUs and by interrupts.
//!
//! They stand in front of a [`Buddy`]. A CPU has one list for each mobility, a stack of frame numbers. The kernel brings the storage,
//! and a guard ([`ThisCpu`]) that keeps everybody else off a CPU's lists for one short section. A caller that the guard turns away, an
//! interrupt that came during a section for example, goes to the buddy, which needs no lock for single frames (C2.5, C4.1).
//!
//! In a process, `pagemill-os` has lists of its own: these are shaped by restartable sequences, and serve arrays, depots and forks. Both
//! move as much at once as [`ListPolicy`] says.
//!
//! # Invariants
//! - L1 `items[..len]` are frames that the list owns. Each is on one list, and has its bit in `kept`.
//! - L2 Only a section of the guard touches `len` and `items`.
//! - L3 A frame has its bit in `kept` unless these lists handed it out. To hand it out clears the bit at last, to free it sets the bit at
//!   first. So a second free finds the bit set, wherever the frame is by then: on a list, in the buddy, or on its way.
use crate::sync::Ordering::Relaxed;
use crate::sync::{AtomicU32, AtomicU64};
use crate::{
    BoundBlock, Buddy, CpuId, Given, Giving, Invalid, ListPolicy, Misfit, Misuse, MisuseKind, Mobility, Order,
    PAGE_SIZE, Pfn, SlowEvent, WordId,
};

/// A kernel's "nobody else on this CPU": interrupts off, or a lock that is tried once. The [crate's root](crate) has an example.
pub trait ThisCpu {
    /// Runs `section` with the number of the CPU that it runs on. Until it returns, no other section with the same number runs: not on
    /// another CPU, and not in an interrupt. What one section wrote, the next one with this number sees. Returns `None`, and runs
    /// nothing, if that cannot be had at once: if an interrupt came during a section, or, with a lock, another CPU is in one.
    ///
    /// A section moves at most [`ListPolicy::SECTION`] frames, waits for nothing, and does not call its guard. If a guard
    /// breaks these rules, frames can be lost or handed out twice.
    fn exclusive<R>(&self, section: impl FnOnce(CpuId) -> R) -> Option<R>;
}

/// One CPU's lists, with room for `SLOTS` frames of each mobility. With 508 slots a list fills 2 KiB. Zeroed memory is empty lists.
///
/// ```
/// use pagemill_core::PcpLists;
/// static LISTS: [PcpLists<508>; 4] = [const { PcpLists::new() }; 4]; // for 4 CPUs
/// assert_eq!(size_of_val(&LISTS), 4 * 3 * 2048);
/// ```
#[derive(Debug)]
pub struct PcpLists<const SLOTS: usize>([List<SLOTS>; Mobility::COUNT]);

#[derive(Debug)]
#[repr(align(64))]
struct List<const SLOTS: usize> {
    /// As [`ListPolicy::as_word`]; 0 before the list is first empty or full.
    policy: AtomicU64,
    len: AtomicU32,
    bound: BoundBlock,
    items: [AtomicU32; SLOTS],
}

impl<const SLOTS: usize> PcpLists<SLOTS> {
    /// Empty lists.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        const { assert!(SLOTS < 1 << 24, "a list's limit has 24 bits") }
        Self([const { List::new() }; Mobility::COUNT])
    }
    /// Empty lists.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(core::array::from_fn(|_| List::new()))
    }
}

impl<const SLOTS: usize> Default for PcpLists<SLOTS> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const SLOTS: usize> List<SLOTS> {
    #[cfg(not(loom))]
    const fn new() -> Self {
        Self {
            policy: AtomicU64::new(0),
            len: AtomicU32::new(0),
            bound: BoundBlock::new(),
            items: [const { AtomicU32::new(0) }; SLOTS],
        }
    }
    #[cfg(loom)]
    fn new() -> Self {
        Self {
            policy: AtomicU64::new(0),
            len: AtomicU32::new(0),
            bound: BoundBlock::new(),
            items: core::array::from_fn(|_| AtomicU32::new(0)),
        }
    }

    fn policy(&self) -> ListPolicy {
        match self.policy.load(Relaxed) {
            0 => ListPolicy::start(SLOTS as u32),
            word => ListPolicy::from_word(word),
        }
    }

    /// The policy after this event. A race costs good sizes, never a frame.
    fn advance(&self, event: SlowEvent) -> ListPolicy {
        let policy = self.policy().after(event, SLOTS as u32);
        self.policy.store(policy.as_word(), Relaxed);
        policy
    }

    /// The frames on it. For a section, or a list at rest.
    fn frames(&self) -> impl Iterator<Item = Pfn> {
        self.items[..self.len.load(Relaxed) as usize].iter().map(|item| Pfn::new(item.load(Relaxed)))
    }

    // In a section:

    fn pop(&self) -> Option<Pfn> {
        let top = self.len.load(Relaxed).checked_sub(1)?;
        self.len.store(top, Relaxed);
        Some(Pfn::new(self.items[top as usize].load(Relaxed)))
    }

    /// Pops as many frames as there are and `to` has room for.
    fn pop_n(&self, to: &mut [Pfn]) -> usize {
        let len = self.len.load(Relaxed) as usize;
        let n = len.min(to.len());
        to.iter_mut().zip(&self.items[len - n..len]).for_each(|(to, item)| *to = Pfn::new(item.load(Relaxed)));
        self.len.store((len - n) as u32, Relaxed);
        n
    }

    /// Pushes frames of one word, by the frame of its bit 0 and the bits: all of them, or none if they are more than the limit allows.
    fn push(&self, first: Pfn, mut mask: u64) -> bool {
        let len = self.len.load(Relaxed);
        let more = mask.count_ones();
        if len + more > self.policy().limit {
            return false;
        }
        for item in &self.items[len as usize..(len + more) as usize] {
            item.store(first.offset(mask.trailing_zeros()).as_u32(), Relaxed);
            mask &= mask - 1;
        }
        self.len.store(len + more, Relaxed);
        true
    }
}

/// The number of words that [`Pcp::new`] needs for a buddy that [spans](Buddy::spanned_frames) so many frames: a bit for each.
///
/// ```
/// assert_eq!(pagemill_core::kept_words_for(1000), 16);
/// ```
pub const fn kept_words_for(frames: u32) -> usize {
    frames.div_ceil(64) as usize
}

/// Per-CPU lists in front of a buddy. Any CPU and any interrupt may allocate and free.
///
/// ```
/// # use pagemill_core::{Buddy, BuddyMetadata, CpuId, Mobility, Pcp, PcpLists, Pfn, ThisCpu, kept_words_for};
/// # use pagemill_core::atomic::{AtomicU32, AtomicU64};
/// struct OneCpu; // Interrupts are off in all of this program.
/// impl ThisCpu for OneCpu {
///     fn exclusive<R>(&self, section: impl FnOnce(CpuId) -> R) -> Option<R> {
///         Some(section(CpuId::new(0)))
///     }
/// }
/// # let need = BuddyMetadata::for_frames(1024);
/// # let words: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
/// # let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
/// # let kept: Vec<AtomicU64> = (0..kept_words_for(1024)).map(|_| AtomicU64::new(0)).collect();
/// let buddy = Buddy::new(Pfn::new(0), 1024, &words, &areas).unwrap();
/// let lists = [PcpLists::<508>::new()];
/// let pcp = Pcp::new(&buddy, &lists, &kept, OneCpu).unwrap();
/// let page = pcp.alloc(Mobility::Movable, 0).unwrap();
/// pcp.free(page).unwrap();
/// assert_eq!((pcp.listed(), pcp.validate()), (65, Ok(65))); // a batch of 64, and this one
/// assert_eq!((pcp.drain_here(), buddy.free_frames()), (65, 1024));
/// ```
///
/// Frames on lists do not count as free in the buddy: [`listed`](Self::listed) counts them. The buddy serves blocks beside the lists, and
/// blocks go back to the buddy, also as the pages that they were split into. A buddy with lists is not [closed](Buddy::close).
#[derive(Debug)]
pub struct Pcp<'m, C, const SLOTS: usize> {
    buddy: &'m Buddy<'m>,
    lists: &'m [PcpLists<SLOTS>],
    /// A bit for each frame that is not handed out (L3).
    kept: &'m [AtomicU64],
    cpu: C,
}

impl<'m, C: ThisCpu, const SLOTS: usize> Pcp<'m, C, SLOTS> {
    /// Lists for CPUs 0 to `lists.len()` - 1. A CPU with a higher number goes to the buddy. The lists must be empty. The words of
    /// `kept` are written here for the first time.
    ///
    /// # Errors
    /// [`Invalid::Kept`] for fewer words than [`kept_words_for`] says.
    pub fn new(
        buddy: &'m Buddy<'m>,
        lists: &'m [PcpLists<SLOTS>],
        kept: &'m [AtomicU64],
        cpu: C,
    ) -> Result<Self, Invalid> {
        let need = kept_words_for(buddy.spanned_frames());
        let kept = kept.get(..need).ok_or(Invalid::Kept { words: kept.len(), need })?;
        kept.iter().for_each(|word| word.store(!0, Relaxed));
        Ok(Self { buddy, lists, kept, cpu })
    }

    /// Takes one frame: from this CPU's list, or, if that is empty, from the buddy as long as `floor` frames stay free there, and then
    /// a batch more for the list. If no pageblock of the mobility has a frame, this CPU's lists are drained, and another mobility's pageblock
    /// serves. `None`: there is none left but those on other CPUs' lists, which these can [drain](Self::drain_here).
    #[inline]
    pub fn alloc(&self, mobility: Mobility, floor: u32) -> Option<Pfn> {
        let pfn = match self.on_list(mobility, |list| (list, list.pop())) {
            Some((_, Some(pfn))) => pfn,
            Some((list, None)) => self.refill(list, mobility, floor)?,
            None => self.alloc_past(mobility, floor)?,
        };
        self.set_kept(pfn, false);
        Some(pfn)
    }

    /// Frees one frame: to this CPU's list for the mobility of the frame's pageblock. A full list passes a batch to the buddy first.
    ///
    /// # Errors
    /// The misuse, with the address of the frame: it is free or on a list, these lists did not hand it out, or it is absent. Nothing is
    /// changed then. If the list was full and one of its frames had been freed to the buddy meanwhile, the error has that frame's address,
    /// and this frame is free.
    #[inline]
    pub fn free(&self, pfn: Pfn) -> Result<(), Misuse> {
        self.buddy.check_in_zone(pfn, Order::ZERO).map_err(|kind| misuse(kind, pfn))?;
        // L3. A frame that is free without its bit was freed past the lists.
        if self.set_kept(pfn, true) || self.buddy.is_free(pfn) {
            return Err(self.refused(pfn));
        }
        let mobility = self.buddy.mobility_of(pfn);
        let given = match self.on_list(mobility, |list| (list, list.push(pfn, 1))) {
            Some((_, true)) => return Ok(()),
            Some((list, false)) => self.drain_batch(list, mobility, pfn),
            None => self.give(&[pfn]),
        };
        given.last_double.map_or(Ok(()), |pfn| Err(misuse(MisuseKind::DoubleFree, pfn)))
    }

    /// Frees all frames on this CPU's lists to the buddy, and returns how many. A kernel calls it on each CPU when memory is short, and
    /// on a CPU that goes away. Lists that are in use are left alone.
    pub fn drain_here(&self) -> usize {
        let mut drained = 0;
        for mobility in Mobility::ALL {
            let mut chunk = [Pfn::new(0); ListPolicy::SECTION];
            while let Some((list, n)) = self.on_list(mobility, |list| (list, list.pop_n(&mut chunk))) {
                if n == 0 {
                    self.buddy.unbind(&list.bound);
                    break;
                }
                drained += self.give(&chunk[..n]).frames;
            }
        }
        drained
    }

    /// The number of frames on all lists. Exact at rest.
    pub fn listed(&self) -> usize {
        self.lists.iter().flat_map(|lists| &lists.0).map(|list| list.len.load(Relaxed) as usize).sum()
    }

    /// Checks the buddy, and L1. Returns how many frames are on lists: together with the free ones, and those that are handed out, they
    /// are all that the buddy manages (C10.2). Nobody else may use either meanwhile.
    ///
    /// # Errors
    /// The first [`Misfit`]. At rest there is none.
    pub fn validate(&self) -> Result<usize, Misfit> {
        self.buddy.validate()?;
        // Clears the bit of each frame on a list, and sets it again afterwards: if it is clear already, the frame is on lists twice.
        let frames = || self.lists.iter().flat_map(|lists| &lists.0).flat_map(List::frames);
        let is_here = |pfn: &Pfn| self.buddy.check_in_zone(*pfn, Order::ZERO).is_ok();
        let out = self.kept.iter().zip(self.buddy.bits).zip(0..).find_map(|((kept, bits), word)| {
            let free = bits.load(Relaxed) & !kept.load(Relaxed);
            (free != 0).then(|| self.buddy.first_of_word(WordId::new(word)).offset(free.trailing_zeros()))
        });
        let on_lists = frames().try_for_each(|pfn| match pfn {
            pfn if !is_here(&pfn) => Err(Misfit::OtherZones { pfn }),
            pfn if !self.set_kept(pfn, false) => Err(Misfit::ListedTwice { pfn }),
            pfn if self.buddy.is_free(pfn) => Err(Misfit::ListedFree { pfn }),
            _ => Ok(()),
        });
        frames().filter(is_here).for_each(|pfn| _ = self.set_kept(pfn, true));
        on_lists?;
        out.map_or(Ok(self.listed()), |pfn| Err(Misfit::OutFree { pfn }))
    }

    /// Runs a section on this CPU's list. `None`: it is in use, or the CPU has none.
    #[inline]
    fn on_list<R>(&self, mobility: Mobility, section: impl FnOnce(&'m List<SLOTS>) -> R) -> Option<R> {
        let lists = self.lists;
        self.cpu.exclusive(|cpu| lists.get(cpu.get()).map(|lists| section(&lists.0[mobility.index()]))).flatten()
    }

    #[cold]
    fn refill(&self, list: &List<SLOTS>, mobility: Mobility, floor: u32) -> Option<Pfn> {
        let batch = list.advance(SlowEvent::Refill).batch as usize;
        let mut handful = self.buddy.take_handful(&list.bound, batch + 1, mobility, floor);
        let Some((first, mask)) = handful.next_word(64) else {
            self.drain_here();
            return self.alloc_past(mobility, floor);
        };
        // One word and one section at a time.
        let mut next = Some((first, mask & (mask - 1)));
        while let Some((first, mask)) = next {
            self.put_on_list(mobility, first, mask);
            next = handful.next_word(64);
        }
        Some(first.offset(mask.trailing_zeros()))
    }

    /// Puts frames that were taken from the buddy on this CPU's list, or back if it is in use or has no room.
    fn put_on_list(&self, mobility: Mobility, first: Pfn, mask: u64) {
        // Some may lack their bits: these lists handed them out, and they were freed past them.
        self.kept[self.buddy.word_of(first).as_usize()].fetch_or(mask, Relaxed);
        if self.on_list(mobility, |list| list.push(first, mask)) != Some(true) {
            let mut giving = Giving::to(self.buddy);
            giving.give_bits(self.buddy.word_of(first), mask);
            giving.finish();
        }
    }

    /// Past the lists.
    #[cold]
    fn alloc_past(&self, mobility: Mobility, floor: u32) -> Option<Pfn> {
        self.buddy.alloc_block(Order::ZERO, mobility, floor).or_else(|| self.buddy.steal(floor))
    }

    /// Frees a batch of a full list to the buddy, and this frame with it.
    #[cold]
    fn drain_batch(&self, list: &List<SLOTS>, mobility: Mobility, pfn: Pfn) -> Given {
        let mut left = list.advance(SlowEvent::Drain).batch as usize;
        let mut chunk = [pfn; ListPolicy::SECTION];
        let mut given = self.give(&chunk[..1]);
        while left > 0 {
            let most = left.min(chunk.len());
            let n = self.on_list(mobility, |list| list.pop_n(&mut chunk[..most])).unwrap_or(0);
            if n == 0 {
                break;
            }
            left -= n;
            given.last_double = self.give(&chunk[..n]).last_double.or(given.last_double);
        }
        given
    }

    /// Frees frames to the buddy.
    fn give(&self, frames: &[Pfn]) -> Given {
        let mut giving = Giving::to(self.buddy);
        giving.give_slice(frames);
        giving.finish()
    }

    /// Sets or clears a frame's bit. Returns whether it was set. Relaxed: what orders two owners is the list or the buddy in between.
    #[inline]
    fn set_kept(&self, pfn: Pfn, is_kept: bool) -> bool {
        let bit = 1 << (pfn.as_u32() % 64);
        let word = &self.kept[self.buddy.word_of(pfn).as_usize()];
        let before = if is_kept { word.fetch_or(bit, Relaxed) } else { word.fetch_and(!bit, Relaxed) };
        before & bit != 0
    }

    /// Why a frame is not taken back.
    #[cold]
    fn refused(&self, pfn: Pfn) -> Misuse {
        misuse(self.buddy.check_page_out(pfn).err().unwrap_or(MisuseKind::DoubleFree), pfn)
    }
}

fn misuse(kind: MisuseKind, pfn: Pfn) -> Misuse {
    Misuse { kind, addr: pfn.as_usize().saturating_mul(PAGE_SIZE) }
}
