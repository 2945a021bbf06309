//! C12.2: per-CPU lists over a guard that the caller brings: nested callers, several CPUs, misuse.
use pagemill_core::atomic::{AtomicU32, AtomicU64};
use pagemill_core::{
    Buddy, BuddyMetadata, CpuId, FrameRange, Invalid, ListPolicy, Lock, MemoryMap, MemoryRange, Misfit, Misuse,
    MisuseKind, Mobility, Order, PAGE_SIZE, Pcp, PcpLists, Pfn, Sleep, ThisCpu, kept_words_for,
};
use proptest::prelude::*;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

const KIND: Mobility = Mobility::Unmovable;

/// A buddy with a hole and the words that lists over it need. Frames 0 to `frames` - 1 exist, but for 40 to 49.
fn with_buddy(frames: u32, test: impl FnOnce(&Buddy<'_>, &[AtomicU64])) {
    let bytes = PAGE_SIZE as u64;
    let table = [MemoryRange::usable(0, u64::from(frames) * bytes), MemoryRange::reserved(40 * bytes, 10 * bytes)];
    let mut storage = [FrameRange::EMPTY; 2];
    let map = MemoryMap::new(table.into_iter(), &mut storage).unwrap();
    let span = FrameRange::new(Pfn::new(0), frames).unwrap();
    let need = BuddyMetadata::for_span(span);
    let words: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    let kept: Vec<AtomicU64> = (0..kept_words_for(frames)).map(|_| AtomicU64::new(0)).collect();
    test(&Buddy::over(span, &map, &words, &areas).unwrap(), &kept);
}

fn lists<const SLOTS: usize>(cpus: usize) -> Vec<PcpLists<SLOTS>> {
    (0..cpus).map(|_| PcpLists::new()).collect()
}

fn misuse(kind: MisuseKind, pfn: u32) -> Result<(), Misuse> {
    Err(Misuse { kind, addr: pfn as usize * PAGE_SIZE })
}

/// One thread that says which CPU it is on, and never finds a list in use.
#[derive(Debug)]
struct Alone<'c>(&'c Cell<u32>);

impl ThisCpu for Alone<'_> {
    fn exclusive<R>(&self, section: impl FnOnce(CpuId) -> R) -> Option<R> {
        Some(section(CpuId::new(self.0.get())))
    }
}

#[test]
fn pages_come_from_the_list_and_go_back_to_it() {
    with_buddy(2048, |buddy, kept| {
        let (cpu, lists) = (Cell::new(0), lists::<508>(2));
        let pcp = Pcp::new(buddy, &lists, kept, Alone(&cpu)).unwrap();
        let all = buddy.free_frames();
        assert_eq!(all, 2038);
        let first = pcp.alloc(KIND, 0).unwrap();
        let batch = ListPolicy::BATCH_MIN as usize;
        assert_eq!((pcp.listed(), buddy.free_frames()), (batch, all - batch - 1));
        let pages: Vec<Pfn> = (0..batch).map(|_| pcp.alloc(KIND, 0).unwrap()).collect();
        assert_eq!((pcp.listed(), buddy.free_frames()), (0, all - batch - 1), "the buddy was not asked");
        pages.iter().chain([&first]).for_each(|&pfn| pcp.free(pfn).unwrap());
        assert_eq!((pcp.listed(), pcp.validate()), (batch + 1, Ok(batch + 1)));
        assert_eq!(pcp.alloc(KIND, 0), Some(first), "the one that was freed last");
        cpu.set(1);
        assert_ne!(pcp.alloc(KIND, 0), None);
        assert_eq!((pcp.listed(), pcp.drain_here(), pcp.listed()), (2 * batch, batch, batch));
        cpu.set(0);
        assert_eq!((pcp.drain_here(), pcp.validate(), buddy.free_frames()), (batch, Ok(0), all - 2));
    });
}

#[test]
fn a_drained_list_leaves_no_pageblock_bound() {
    with_buddy(4 * 512, |buddy, kept| {
        let (cpu, lists) = (Cell::new(0), lists::<508>(2));
        let pcp = Pcp::new(buddy, &lists, kept, Alone(&cpu)).unwrap();
        let page = pcp.alloc(Mobility::Movable, 0).unwrap();
        pcp.drain_here();
        // Another CPU draws from the same one, and breaks no unused one.
        cpu.set(1);
        let other = pcp.alloc(Mobility::Movable, 0).unwrap();
        assert_eq!(page.as_u32() / 512, other.as_u32() / 512);
        pcp.validate().unwrap();
    });
}

#[test]
fn a_full_list_passes_a_batch_to_the_buddy() {
    with_buddy(4096, |buddy, kept| {
        let (cpu, lists) = (Cell::new(0), lists::<508>(1));
        let pcp = Pcp::new(buddy, &lists, kept, Alone(&cpu)).unwrap();
        let all = buddy.free_frames();
        let pages: Vec<Pfn> = std::iter::from_fn(|| pcp.alloc(KIND, 0)).collect();
        assert_eq!((pages.len(), buddy.free_frames(), pcp.listed()), (all, 0, 0));
        let (first, others) = pages.split_at(ListPolicy::LIMIT_MIN as usize);
        first.iter().for_each(|&page| pcp.free(page).unwrap());
        assert_eq!((pcp.listed(), buddy.free_frames()), (first.len(), 0));
        pcp.free(others[0]).unwrap();
        let batch = ListPolicy::BATCH_MIN as usize;
        assert_eq!((pcp.listed(), buddy.free_frames()), (first.len() - batch, batch + 1));
        for &page in &others[1..] {
            pcp.free(page).unwrap();
            assert!(pcp.listed() <= 508);
        }
        assert!(pcp.listed() >= 100);
        assert_eq!(pcp.listed() + buddy.free_frames(), all);
        pcp.validate().unwrap();
    });
}

/// Lists of one slot and of none, and CPUs that have no list.
#[test]
fn short_lists_and_absent_ones_are_passed_by() {
    fn check<const SLOTS: usize>(number: u32) {
        with_buddy(600, |buddy, kept| {
            let (cpu, lists) = (Cell::new(number), lists::<SLOTS>(2));
            let pcp = Pcp::new(buddy, &lists, kept, Alone(&cpu)).unwrap();
            for _ in 0..2 {
                let pages: Vec<Pfn> = std::iter::from_fn(|| pcp.alloc(KIND, 0)).collect();
                assert_eq!(pages.len(), 590);
                pages.iter().for_each(|&page| pcp.free(page).unwrap());
                assert_eq!(pcp.listed() + buddy.free_frames(), 590);
                assert!(pcp.listed() <= if number < 2 { SLOTS } else { 0 });
                pcp.validate().unwrap();
            }
        });
    }
    check::<0>(0);
    check::<1>(1);
    check::<2>(0);
    check::<508>(2);
    check::<508>(u32::MAX);
}

#[test]
fn a_floor_stays_free_and_every_mobility_is_served_to_the_last_page() {
    with_buddy(1024, |buddy, kept| {
        let (cpu, lists) = (Cell::new(0), lists::<508>(1));
        let pcp = Pcp::new(buddy, &lists, kept, Alone(&cpu)).unwrap();
        let count = |mobility, floor| std::iter::from_fn(|| pcp.alloc(mobility, floor)).count();
        assert_eq!((count(KIND, 300), buddy.free_frames()), (714, 300));
        // On this CPU's lists of other mobilities too.
        let page = pcp.alloc(Mobility::Movable, 0).unwrap();
        pcp.free(page).unwrap();
        assert_eq!((count(Mobility::Reclaimable, 0), buddy.free_frames(), pcp.listed()), (300, 0, 0));
        pcp.validate().unwrap();
    });
}

#[test]
fn misuse_is_refused_and_changes_nothing() {
    with_buddy(2048, |buddy, kept| {
        let (cpu, lists) = (Cell::new(0), lists::<508>(1));
        let pcp = Pcp::new(buddy, &lists, kept, Alone(&cpu)).unwrap();
        let whole = buddy.alloc_block(Order::PAGEBLOCK, KIND, 0).unwrap().as_u32();
        let page = pcp.alloc(KIND, 0).unwrap();
        let [counts, pfn] = [(buddy.free_frames(), pcp.listed()), (page.as_usize(), 0)];
        let wrong = MisuseKind::WrongOrder { handed_out: 9, freed: 0 };
        for (kind, pfn) in [
            (MisuseKind::Foreign, 2048),
            (MisuseKind::Foreign, u32::MAX),
            (MisuseKind::Foreign, 45),
            (wrong, whole),
            (MisuseKind::Inside, whole + 1),
            (MisuseKind::Inside, whole + 64),
            (MisuseKind::DoubleFree, pfn.0 as u32 + 1), // on the list
            (MisuseKind::DoubleFree, 1500),             // in the buddy
        ] {
            assert_eq!(pcp.free(Pfn::new(pfn)), misuse(kind, pfn));
        }
        assert_eq!((buddy.free_frames(), pcp.listed()), counts);
        // On the list, and then in the buddy.
        assert_eq!((pcp.free(page), pcp.free(page)), (Ok(()), misuse(MisuseKind::DoubleFree, page.as_u32())));
        pcp.drain_here();
        assert_eq!(pcp.free(page), misuse(MisuseKind::DoubleFree, page.as_u32()));
        // What the buddy handed out goes back to the buddy, page by page if it was split.
        buddy.split_block(Pfn::new(whole), Order::PAGEBLOCK).unwrap();
        assert_eq!(pcp.free(Pfn::new(whole)), misuse(MisuseKind::DoubleFree, whole));
        (whole..whole + 512).for_each(|pfn| assert_eq!(buddy.free_block(Pfn::new(pfn), Order::ZERO), Ok(false)));
        assert_eq!((pcp.validate(), buddy.free_frames()), (Ok(0), 2038));
    });
}

#[test]
fn a_page_that_was_freed_past_the_lists_while_it_was_on_one_is_reported() {
    with_buddy(1024, |buddy, kept| {
        let (cpu, lists) = (Cell::new(0), lists::<1>(1));
        let pcp = Pcp::new(buddy, &lists, kept, Alone(&cpu)).unwrap();
        let [one, other, third] = [0, 0, 0].map(|_| pcp.alloc(KIND, 0).unwrap());
        pcp.drain_here();
        pcp.free(one).unwrap();
        assert_eq!(buddy.free_block(one, Order::ZERO), Ok(false));
        assert_eq!(pcp.validate(), Err(Misfit::ListedFree { pfn: one }));
        assert_eq!(pcp.free(other), misuse(MisuseKind::DoubleFree, one.as_u32()));
        assert_eq!((pcp.validate(), buddy.free_frames()), (Ok(0), 1013), "both are free, once");
        // Past the lists, and then to them.
        assert_eq!(buddy.free_block(third, Order::ZERO), Ok(false));
        assert_eq!(pcp.validate(), Err(Misfit::OutFree { pfn: third }));
        assert_eq!(pcp.free(third), misuse(MisuseKind::DoubleFree, third.as_u32()));
        assert_eq!((pcp.validate(), buddy.free_frames()), (Ok(0), 1014));
    });
}

#[test]
fn a_page_that_was_freed_past_the_lists_and_comes_to_one_is_freed_once() {
    with_buddy(1024, |buddy, kept| {
        let (cpu, lists) = (Cell::new(0), lists::<508>(1));
        let pcp = Pcp::new(buddy, &lists, kept, Alone(&cpu)).unwrap();
        let pages: Vec<Pfn> = std::iter::from_fn(|| pcp.alloc(KIND, 0)).collect();
        pages.iter().for_each(|&page| assert_eq!(buddy.free_block(page, Order::ZERO), Ok(false)));
        let one = pcp.alloc(KIND, 0).unwrap();
        assert!(pcp.listed() > 0);
        let refused = pages.iter().filter(|&&page| page != one && pcp.free(page).is_err()).count();
        assert_eq!((refused, pcp.validate()), (pages.len() - 1, Ok(pcp.listed())));
        let all: std::collections::BTreeSet<Pfn> = std::iter::from_fn(|| pcp.alloc(KIND, 0)).collect();
        assert_eq!(all.len(), pages.len() - 1, "each has one owner");
    });
}

#[test]
fn words_that_do_not_agree_with_the_lists_are_misfits() {
    with_buddy(1024, |buddy, kept| {
        let (cpu, lists) = (Cell::new(0), lists::<508>(1));
        let short = Pcp::new(buddy, &lists, &kept[1..], Alone(&cpu)).unwrap_err();
        assert_eq!(short, Invalid::Kept { words: 15, need: 16 });
        let pcp = Pcp::new(buddy, &lists, kept, Alone(&cpu)).unwrap();
        let page = pcp.alloc(KIND, 0).unwrap();
        kept[15].fetch_and(!(1 << 63), Relaxed);
        assert_eq!(pcp.validate(), Err(Misfit::OutFree { pfn: Pfn::new(1023) }));
        kept[15].fetch_or(1 << 63, Relaxed);
        pcp.free(page).unwrap();
        kept[0].fetch_and(!(1 << page.as_u32()), Relaxed);
        assert_eq!(pcp.validate(), Err(Misfit::ListedTwice { pfn: page }));
    });
}

/// A guard that is interrupted once, when no chance is left. Each section has four: before it, twice in it, and after it.
struct Interrupted<'t> {
    is_in_use: &'t Cell<bool>,
    left: &'t Cell<i32>,
    handler: &'t dyn Fn(),
}

impl Interrupted<'_> {
    fn chance(&self) {
        self.left.set(self.left.get() - 1);
        if self.left.get() == 0 {
            (self.handler)();
        }
    }
}

impl ThisCpu for Interrupted<'_> {
    fn exclusive<R>(&self, section: impl FnOnce(CpuId) -> R) -> Option<R> {
        self.chance();
        assert!(!self.is_in_use.replace(true));
        self.chance();
        let result = section(CpuId::new(0));
        self.chance();
        self.is_in_use.set(false);
        self.chance();
        Some(result)
    }
}

/// The guard of the interrupt itself: it is turned away if it came during a section.
struct Nested<'t>(&'t Cell<bool>, &'t Cell<u32>);

impl ThisCpu for Nested<'_> {
    fn exclusive<R>(&self, section: impl FnOnce(CpuId) -> R) -> Option<R> {
        self.1.set(self.1.get() + u32::from(self.0.get()));
        if self.0.get() { None } else { Some(section(CpuId::new(0))) }
    }
}

/// An interrupt allocates and frees at every point between and in the sections of a program that refills, drains and reaches the last
/// page. Both together get every frame once.
#[test]
fn a_nested_caller_finds_the_list_in_use_and_goes_to_the_buddy() {
    let turned_away = Cell::new(0);
    for at in 1.. {
        let mut is_over = false;
        with_buddy(600, |buddy, kept| {
            let (is_in_use, lists) = (Cell::new(false), lists::<8>(1));
            let nested = Pcp::new(buddy, &lists, kept, Nested(&is_in_use, &turned_away)).unwrap();
            let held = RefCell::new(BTreeSet::new());
            let handler = || {
                let [one, other] = [KIND, Mobility::Movable].map(|kind| nested.alloc(kind, 0));
                one.into_iter().chain(other).for_each(|pfn| assert!(held.borrow_mut().insert(pfn), "owned twice"));
                if let Some(pfn) = one {
                    held.borrow_mut().remove(&pfn);
                    nested.free(pfn).unwrap();
                }
            };
            let left = Cell::new(at);
            let cpu = Interrupted { is_in_use: &is_in_use, left: &left, handler: &handler };
            let pcp = Pcp::new(buddy, &lists, kept, cpu).unwrap();
            let mut taken = Vec::new();
            // The first pages, some frees, then all there are.
            for round in [12, 0, 30] {
                while round == 0 && taken.len() > 3 {
                    let pfn = taken.pop().unwrap();
                    held.borrow_mut().remove(&pfn);
                    pcp.free(pfn).unwrap();
                }
                for _ in 0..round {
                    let pfn = pcp.alloc(KIND, 560).or_else(|| pcp.alloc(Mobility::Reclaimable, 580));
                    if let Some(pfn) = pfn {
                        assert!(held.borrow_mut().insert(pfn), "{pfn} is owned twice");
                        taken.push(pfn);
                    }
                }
            }
            let held_first = held.take();
            held_first.into_iter().for_each(|pfn| pcp.free(pfn).unwrap());
            pcp.drain_here();
            let all = buddy.free_frames() + pcp.validate().unwrap() + held.borrow().len();
            assert_eq!(all, 590, "interrupted at {at}");
            is_over = left.get() > 0; // The interrupt would have come later than all there is.
        });
        if is_over {
            break;
        }
    }
    assert!(turned_away.get() > 50, "{}", turned_away.get());
}

/// Two CPUs, each with a lock that is tried once.
#[derive(Default)]
struct Tried([Lock; 2]);

thread_local! {
    static CPU: Cell<usize> = const { Cell::new(0) };
}

impl ThisCpu for &Tried {
    fn exclusive<R>(&self, section: impl FnOnce(CpuId) -> R) -> Option<R> {
        let cpu = CPU.get();
        self.0[cpu].try_take().then(|| {
            let result = section(CpuId::new(cpu as u32));
            self.0[cpu].release(Sleep::SPIN);
            result
        })
    }
}

#[test]
fn threads_on_two_cpus_that_meet_at_their_lists_own_each_page_once() {
    const FRAMES: u32 = 1500;
    let rounds = if cfg!(miri) { 30 } else { 20_000 };
    with_buddy(FRAMES, |buddy, kept| {
        let (tried, lists) = (Tried::default(), lists::<64>(2));
        let pcp = Pcp::new(buddy, &lists, kept, &tried).unwrap();
        let owners: Vec<AtomicUsize> = (0..FRAMES).map(|_| AtomicUsize::new(0)).collect();
        let run = |thread: usize| {
            let (mut seed, mut mine) = (thread as u32 * 7919, Vec::new());
            for round in 0..rounds {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                CPU.set((thread + usize::from(round % 64 == 63)) % 2);
                if seed >> 16 & 1 == 0 || mine.is_empty() {
                    if let Some(pfn) = pcp.alloc(Mobility::ALL[seed as usize >> 20 & 1], 0) {
                        assert_eq!(owners[pfn.as_usize()].swap(thread, Relaxed), 0, "{pfn} is owned twice");
                        mine.push(pfn);
                    }
                } else {
                    let pfn: Pfn = mine.swap_remove((seed as usize >> 8) % mine.len());
                    assert_eq!(owners[pfn.as_usize()].swap(0, Relaxed), thread);
                    pcp.free(pfn).unwrap();
                }
                if seed >> 18 & 0xff == 0 {
                    pcp.drain_here();
                }
            }
            for pfn in mine {
                owners[pfn.as_usize()].store(0, Relaxed);
                pcp.free(pfn).unwrap();
            }
        };
        std::thread::scope(|scope| (1..=4).for_each(|thread| _ = scope.spawn(move || run(thread))));
        assert_eq!(pcp.validate().unwrap() + buddy.free_frames(), FRAMES as usize - 10);
        for cpu in 0..2 {
            CPU.set(cpu);
            pcp.drain_here();
        }
        assert_eq!((pcp.validate(), buddy.free_frames()), (Ok(0), FRAMES as usize - 10));
    });
}

#[derive(Clone, Debug)]
enum Op {
    Alloc(usize, u32),
    Free(prop::sample::Index),
    FreeAny(u32),
    Drain,
    Move(u32),
}

proptest! {
    #[test]
    fn every_page_has_one_owner_and_all_add_up(
        ops in prop::collection::vec(prop_oneof![
            8 => (0..3_usize, prop::sample::select(vec![0, 0, 0, 100, 580])).prop_map(|(kind, floor)| Op::Alloc(kind, floor)),
            6 => any::<prop::sample::Index>().prop_map(Op::Free),
            2 => (0..700_u32).prop_map(Op::FreeAny),
            1 => Just(Op::Drain),
            1 => (0..3_u32).prop_map(Op::Move),
        ], 0..400),
    ) {
        with_buddy(700, |buddy, kept| {
            let (cpu, lists) = (Cell::new(0), lists::<12>(2));
            let pcp = Pcp::new(buddy, &lists, kept, Alone(&cpu)).unwrap();
            let mut held = Vec::new();
            for op in ops {
                match op {
                    Op::Alloc(kind, floor) => {
                        if let Some(pfn) = pcp.alloc(Mobility::ALL[kind], floor) {
                            assert!(!held.contains(&pfn) && !(40..50).contains(&pfn.as_u32()), "{pfn}");
                            held.push(pfn);
                        }
                    }
                    Op::Free(index) if !held.is_empty() => pcp.free(held.swap_remove(index.index(held.len()))).unwrap(),
                    Op::Free(_) => {}
                    Op::FreeAny(pfn) if !held.contains(&Pfn::new(pfn)) => _ = pcp.free(Pfn::new(pfn)).unwrap_err(),
                    Op::FreeAny(_) => {}
                    Op::Drain => _ = pcp.drain_here(),
                    Op::Move(to) => cpu.set(to),
                }
                assert_eq!(pcp.validate().unwrap() + buddy.free_frames() + held.len(), 690);
            }
        });
    }
}
