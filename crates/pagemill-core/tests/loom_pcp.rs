//! Every interleaving of two callers at one CPU's lists, by loom: the second one is an interrupt, or another CPU, that comes at any point of
//! the first one. No frame has two owners, none is lost, and no double free is taken.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release -p pagemill-core --test tests loom_pcp
//! ```
use loom::thread;
use pagemill_core::atomic::{AtomicU32, AtomicU64};
use pagemill_core::{
    BoundBlock, Buddy, BuddyMetadata, CpuId, Lock, Mobility, Pcp, PcpLists, Pfn, Sleep, ThisCpu, kept_words_for,
};
use std::sync::{Arc, Mutex};

const KIND: Mobility = Mobility::Unmovable;
const FRAMES: u32 = 70;

/// The guard of the only CPU.
struct OneCpu(Lock);

impl ThisCpu for &OneCpu {
    fn exclusive<R>(&self, section: impl FnOnce(CpuId) -> R) -> Option<R> {
        self.0.try_take().then(|| {
            let result = section(CpuId::new(0));
            self.0.release(Sleep::SPIN);
            result
        })
    }
}

struct Memory {
    words: Vec<AtomicU64>,
    areas: Vec<AtomicU32>,
    kept: Vec<AtomicU64>,
    lists: [PcpLists<4>; 1],
    cpu: OneCpu,
}

/// Lists over a buddy, and the frames that the lists handed out. What checks uses std's types, as in `loom_buddy`.
struct Model {
    pcp: Pcp<'static, &'static OneCpu, 4>,
    buddy: *mut Buddy<'static>,
    memory: *mut Memory,
    owned: Mutex<Vec<Pfn>>,
    /// How many frames the buddy has handed out past the lists.
    away: usize,
    /// How many frees by somebody who may own nothing were taken.
    freed: Mutex<usize>,
}

// SAFETY: the pointers are used by `drop` alone.
unsafe impl Send for Model {}
// SAFETY: as for Send.
unsafe impl Sync for Model {}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: both were leaked from boxes in `new`; `pcp`, which borrows them, is not used any more and has no destructor.
        unsafe {
            drop(Box::from_raw(self.buddy));
            drop(Box::from_raw(self.memory));
        }
    }
}

impl Model {
    /// Empty lists, and a buddy with this many free frames.
    fn new(free: u32) -> Self {
        let need = BuddyMetadata::for_frames(FRAMES);
        let memory: *mut Memory = Box::leak(Box::new(Memory {
            words: (0..need.words).map(|_| AtomicU64::new(0)).collect(),
            areas: (0..need.areas).map(|_| AtomicU32::new(0)).collect(),
            kept: (0..kept_words_for(FRAMES)).map(|_| AtomicU64::new(0)).collect(),
            lists: [PcpLists::new()],
            cpu: OneCpu(Lock::new()),
        }));
        // SAFETY: leaked above; freed in `drop`, and shared until then.
        let lent: &'static Memory = unsafe { &*memory };
        let buddy: *mut Buddy<'static> =
            Box::leak(Box::new(Buddy::new(Pfn::new(0), FRAMES, &lent.words, &lent.areas).unwrap()));
        // SAFETY: as above.
        let pcp = Pcp::new(unsafe { &*buddy }, &lent.lists, &lent.kept, &lent.cpu).unwrap();
        let away = (FRAMES - free) as usize;
        let model = Self { pcp, buddy, memory, owned: Mutex::default(), away, freed: Mutex::default() };
        let bound = BoundBlock::new();
        assert_eq!(model.buddy().take(&bound, away, KIND, 0, &mut |_, _| {}), away);
        model.buddy().unbind(&bound);
        model
    }

    fn buddy(&self) -> &Buddy<'static> {
        // SAFETY: as in `new`.
        unsafe { &*self.buddy }
    }

    fn alloc(&self) -> Option<Pfn> {
        let pfn = self.pcp.alloc(KIND, 0)?;
        let mut owned = self.owned.lock().unwrap();
        assert!(!owned.contains(&pfn), "{pfn} is owned twice");
        owned.push(pfn);
        Some(pfn)
    }

    fn free(&self, pfn: Pfn) {
        self.owned.lock().unwrap().retain(|&other| other != pfn);
        self.pcp.free(pfn).unwrap();
    }

    /// Frees a frame that this thread may not own.
    fn free_anyway(&self, pfn: Pfn) {
        if self.pcp.free(pfn).is_ok() {
            *self.freed.lock().unwrap() += 1;
        }
    }

    /// At rest each frame is free, listed or owned.
    fn settle(&self) {
        let listed = self.pcp.validate().unwrap();
        let out = self.owned.lock().unwrap().len() + self.away;
        assert_eq!(self.buddy().free_frames() + listed + out, FRAMES as usize);
    }
}

/// Runs both in every order with up to two unforced switches.
fn explore(free: u32, prepare: fn(&Model), one: fn(&Model), other: fn(&Model), after: fn(&Model)) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.max_branches = 20_000;
    builder.check(move || {
        let model = Arc::new(Model::new(free));
        prepare(&model);
        let there = Arc::clone(&model);
        let thread = thread::spawn(move || other(&there));
        one(&model);
        thread.join().unwrap();
        after(&model);
        model.settle();
    });
}

fn turn(model: &Model) {
    if let Some(pfn) = model.alloc() {
        model.free(pfn);
    }
}

#[test]
fn a_nested_caller_allocates_and_frees_while_a_list_is_refilled() {
    explore(5, |_| {}, turn, turn, |_| {});
}

#[test]
fn a_nested_caller_allocates_and_frees_while_a_list_is_drained() {
    explore(
        8,
        |model| {
            let pages = [0; 5].map(|_| model.alloc().unwrap());
            model.pcp.drain_here();
            pages[..4].iter().for_each(|&pfn| model.free(pfn));
            assert_eq!(model.pcp.listed(), 4, "it is full");
        },
        |model| {
            let last = model.owned.lock().unwrap()[0];
            model.free(last);
        },
        turn,
        |_| {},
    );
}

/// The first one of three free frames: it is handed out first, and the others go on the list.
const FIRST: Pfn = Pfn::new(FRAMES - 3);

#[test]
fn of_two_that_free_one_page_one_is_refused() {
    explore(
        3,
        |model| assert_eq!(model.alloc(), Some(FIRST)),
        |model| model.free_anyway(FIRST),
        |model| model.free_anyway(FIRST),
        |model| assert_eq!((*model.freed.lock().unwrap(), model.owned.lock().unwrap().pop()), (1, Some(FIRST))),
    );
}

#[test]
fn a_page_on_its_way_from_a_list_to_the_buddy_is_not_freed_again() {
    explore(
        3,
        turn,
        |model| assert_eq!(model.pcp.drain_here(), 3),
        |model| model.free_anyway(FIRST),
        |model| assert_eq!(*model.freed.lock().unwrap(), 0),
    );
}

/// Whoever is handed a page out while somebody frees it has lost it, and nobody else has.
#[test]
fn a_page_on_its_way_from_the_buddy_to_a_list_is_not_freed_again() {
    explore(
        3,
        |_| {},
        |model| assert_eq!(model.alloc(), Some(FIRST)),
        |model| model.free_anyway(FIRST.offset(1)),
        |model| assert_eq!(*model.freed.lock().unwrap(), 0),
    );
    explore(
        3,
        |_| {},
        |model| assert_eq!(model.alloc(), Some(FIRST)),
        |model| model.free_anyway(FIRST),
        |model| {
            if *model.freed.lock().unwrap() > 0 {
                model.owned.lock().unwrap().clear();
            }
        },
    );
}
