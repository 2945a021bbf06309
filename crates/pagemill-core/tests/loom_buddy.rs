//! Every interleaving of two or three threads on one small buddy, by loom: no frame has two owners, none is lost, and
//! what [`Buddy::validate`] proves holds when all are done (I1 to I5).
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release -p pagemill-core --test tests
//! ```
//!
//! With `--cfg pagemill_canary` besides, the buddy has a bug and these must fail with "owned twice".
use loom::cell::UnsafeCell;
use loom::thread;
use pagemill_core::atomic::{AtomicU32, AtomicU64};
use pagemill_core::{
    BoundBlock, Buddy, BuddyMetadata, Given, Giving, MisuseKind, Mobility, Order, PAGEBLOCK_FRAMES, PageblockId, Pfn,
    Tick, Unused,
};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

const KIND: Mobility = Mobility::Unmovable;

/// A buddy, and who has which of its frames. What checks is not part of what is checked: it uses std's types, which
/// are no choice points for loom and order nothing.
struct Model {
    buddy: Option<Buddy<'static>>,
    words: *mut [AtomicU64],
    areas: *mut [AtomicU32],
    owned: Mutex<BTreeSet<u32>>,
    /// The first frames' memory, which an owner writes when it gets the frame and before it gives it: loom fails where
    /// the buddy does not order one owner's writes before the next one's.
    memory: Vec<UnsafeCell<()>>,
    /// The orders of the blocks that were handed out.
    served: Mutex<Vec<u8>>,
    /// What giving said that did not go well.
    doubles: Mutex<usize>,
    refused: Mutex<Vec<MisuseKind>>,
}

// SAFETY: the pointers are to atomics, and are used by `drop` alone besides the buddy.
unsafe impl Send for Model {}
// SAFETY: as for Send.
unsafe impl Sync for Model {}

impl Drop for Model {
    fn drop(&mut self) {
        self.buddy = None;
        // SAFETY: both were leaked from boxes in `new`, and the buddy that borrowed them is gone.
        unsafe {
            drop(Box::from_raw(self.words));
            drop(Box::from_raw(self.areas));
        }
    }
}

impl Model {
    fn new(frames: u32) -> Arc<Self> {
        let need = BuddyMetadata::for_frames(frames);
        let words: &'static mut [AtomicU64] = Box::leak((0..need.words).map(|_| AtomicU64::new(0)).collect());
        let areas: &'static mut [AtomicU32] = Box::leak((0..need.areas).map(|_| AtomicU32::new(0)).collect());
        let (words, areas): (*mut [_], *mut [_]) = (words, areas);
        // SAFETY: leaked a line above; freed in `drop`, after the buddy.
        let buddy = unsafe { Buddy::new(Pfn::new(0), frames, &*words, &*areas) }.unwrap();
        Arc::new(Self {
            buddy: Some(buddy),
            words,
            areas,
            owned: Mutex::default(),
            memory: (0..frames.min(256)).map(|_| UnsafeCell::new(())).collect(),
            served: Mutex::default(),
            doubles: Mutex::default(),
            refused: Mutex::default(),
        })
    }

    fn buddy(&self) -> &Buddy<'static> {
        self.buddy.as_ref().unwrap()
    }

    fn own(&self, frames: impl IntoIterator<Item = u32>) {
        let mut owned = self.owned.lock().unwrap();
        for frame in frames {
            assert!(owned.insert(frame), "frame {frame} is owned twice");
            self.write(frame);
        }
    }

    fn disown(&self, frames: impl IntoIterator<Item = u32>) {
        let mut owned = self.owned.lock().unwrap();
        for frame in frames {
            assert!(owned.remove(&frame), "frame {frame} is given by nobody");
            self.write(frame);
        }
    }

    fn write(&self, frame: u32) {
        if let Some(memory) = self.memory.get(frame as usize) {
            memory.with_mut(|_| ());
        }
    }

    fn take(&self, want: usize) -> Vec<u32> {
        let bound = BoundBlock::new();
        let frames = self.take_bound(&bound, want);
        // Or its block stands nowhere in the index from then on, and I5 says nothing about it.
        self.buddy().unbind(&bound);
        frames
    }

    fn take_bound(&self, bound: &BoundBlock, want: usize) -> Vec<u32> {
        let mut frames = Vec::new();
        let got = self.buddy().take(bound, want, KIND, 0, &mut |first, mask| {
            frames.extend((0..64).filter(|bit| mask >> bit & 1 == 1).map(|bit| first.as_u32() + bit));
        });
        assert_eq!(got, frames.len());
        self.own(frames.iter().copied());
        frames
    }

    fn give(&self, frames: &[u32]) {
        self.disown(frames.iter().copied());
        assert_eq!(self.give_unchecked(frames), Given { frames: frames.len(), ..Given::default() });
    }

    fn give_unchecked(&self, frames: &[u32]) -> Given {
        let mut giving = Giving::to(self.buddy());
        giving.give_slice(&frames.iter().copied().map(Pfn::new).collect::<Vec<_>>());
        giving.finish()
    }

    fn alloc(&self, order: u8) -> Option<(Pfn, Order)> {
        let order = Order::new(order).unwrap();
        let block = self.buddy().alloc_block(order, KIND, 0)?;
        assert!(block.is_aligned_to(order), "{block} is not aligned to order {order:?}");
        self.own(block.as_u32()..block.as_u32() + order.frames());
        self.served.lock().unwrap().push(order.get());
        Some((block, order))
    }

    /// Up to `want` blocks at once.
    fn alloc_many(&self, order: u8, want: usize) -> Vec<(Pfn, Order)> {
        let order = Order::new(order).unwrap();
        let mut blocks = Vec::new();
        let mut emit = |first: Pfn, runs: u64| {
            blocks.extend((0..64).filter(|bit| runs >> bit & 1 == 1).map(|bit| (first.offset(bit), order)));
        };
        assert_eq!(self.buddy().take_blocks(order, want, KIND, 0, &mut emit), blocks.len());
        for (block, order) in &blocks {
            assert!(block.is_aligned_to(*order), "{block} is not aligned to order {order:?}");
            self.own(block.as_u32()..block.as_u32() + order.frames());
            self.served.lock().unwrap().push(order.get());
        }
        blocks
    }

    /// A run of `n` frames. Returns the first.
    fn run(&self, n: u32) -> Option<u32> {
        let first = self.buddy().take_run(n as usize, KIND, 0)?.as_u32();
        self.own(first..first + n);
        self.served.lock().unwrap().push(0);
        Some(first)
    }

    /// What was served, if it was.
    fn own_some(&self, block: Option<(Pfn, u32)>) {
        let Some((block, frames)) = block else { return };
        self.own(block.as_u32()..block.as_u32() + frames);
        self.served.lock().unwrap().push(frames.ilog2() as u8);
    }

    fn free(&self, (block, order): (Pfn, Order)) {
        self.disown(block.as_u32()..block.as_u32() + order.frames());
        assert_eq!(self.buddy().free_block(block, order), Ok(false));
    }

    /// At rest: what nobody owns is free, and all of it can be had.
    fn settle(&self) {
        let census = self.buddy().validate().unwrap();
        let owned: Vec<u32> = self.owned.lock().unwrap().iter().copied().collect();
        assert_eq!(census.free + owned.len(), self.buddy().managed_frames() as usize, "a frame is lost");
        self.take(census.free);
        assert_eq!(self.owned.lock().unwrap().len(), self.buddy().managed_frames() as usize);
    }
}

/// Runs the threads in every order with up to `preemptions` unforced switches, and settles each.
fn explore(preemptions: usize, start: impl Fn() -> (Arc<Model>, Vec<fn(&Model)>) + Send + Sync + 'static) {
    explore_then(preemptions, start, |_| {});
}

fn explore_then(
    preemptions: usize,
    start: impl Fn() -> (Arc<Model>, Vec<fn(&Model)>) + Send + Sync + 'static,
    after: fn(&Model),
) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 20_000;
    builder.check(move || {
        let (model, mut threads) = start();
        let here = threads.pop();
        let others: Vec<_> = threads
            .into_iter()
            .map(|run| {
                let model = Arc::clone(&model);
                thread::spawn(move || run(&model))
            })
            .collect();
        if let Some(run) = here {
            run(&model);
        }
        others.into_iter().for_each(|thread| thread.join().unwrap());
        model.settle();
        after(&model);
    });
}

/// A buddy of `frames` frames of which the last `free` are free.
fn nearly_empty(frames: u32, free: u32) -> Arc<Model> {
    let model = Model::new(frames);
    model.take((frames - free) as usize);
    model
}

#[test]
fn two_take_what_is_left() {
    // Three are left, one of them in another word.
    explore(3, || {
        let take: fn(&Model) = |model| {
            model.take(2);
        };
        (nearly_empty(129, 3), vec![take, take])
    });
}

#[test]
fn one_takes_while_another_gives() {
    explore(3, || {
        (
            nearly_empty(130, 1),
            vec![|model| model.give(&[3, 64]), |model| {
                model.take(2);
            }],
        )
    });
}

#[test]
fn a_class_is_left_and_entered_at_once() {
    // 15 frames are free, and 16 begin another class of the index: I5.
    explore(3, || {
        (
            nearly_empty(130, 15),
            vec![|model| model.give(&[3]), |model| {
                model.take(1);
            }],
        )
    });
}

#[test]
fn a_class_is_entered_by_two_and_left_by_one() {
    // As above, and nobody is bound to the block: it is filed by all three, in any order.
    explore(3, || {
        (
            nearly_empty(70, 15),
            vec![|model| model.give(&[3]), |model| model.give(&[4]), |model| {
                model.alloc(1);
            }],
        )
    });
}

#[test]
fn what_is_counted_as_free_can_be_had() {
    explore(3, || {
        (
            nearly_empty(70, 0),
            vec![|model| model.give(&[3]), |model| {
                if model.buddy().free_frames() > 0 {
                    assert_eq!(model.take(1), [3], "counted too early");
                }
            }],
        )
    });
}

#[test]
fn two_give_and_one_takes() {
    // Of one word: whose count is reserved is not always whose bit is taken.
    explore(3, || {
        (
            nearly_empty(70, 0),
            vec![|model| model.give(&[0]), |model| model.give(&[1]), |model| {
                model.take(1);
            }],
        )
    });
}

#[test]
fn two_give_and_one_takes_a_block() {
    explore(3, || {
        (
            nearly_empty(70, 0),
            vec![|model| model.give(&[0]), |model| model.give(&[1]), |model| {
                model.alloc(0);
            }],
        )
    });
}

#[test]
fn two_words_are_given_and_taken_as_a_block() {
    // The count is there before the giver's is: frames 128 to 255 are free.
    explore(3, || {
        (
            nearly_empty(256, 128),
            vec![|model| model.give(&(0..128).collect::<Vec<_>>()), |model| {
                model.alloc(7);
            }],
        )
    });
}

#[test]
fn a_word_that_a_block_took_in_vain_is_as_it_was() {
    // Words 2 and 3 are free, and one frame of word 1. The block takes word 0, which is being given and not counted yet,
    // and puts it back as word 1 has too little. Who takes of word 0 then is its giver's heir all the same.
    explore(2, || {
        (
            nearly_empty(256, 129),
            vec![
                |model| model.give(&(0..64).collect::<Vec<_>>()),
                |model| {
                    model.alloc(7);
                },
                |model| {
                    model.take(1);
                },
            ],
        )
    });
}

#[test]
fn a_frame_and_a_block_of_two_words() {
    explore(3, || {
        (
            Model::new(130),
            vec![
                |model| {
                    let frames = model.take(1);
                    model.give(&frames);
                },
                |model| {
                    if let Some(block) = model.alloc(7) {
                        model.free(block);
                    }
                },
            ],
        )
    });
}

#[test]
fn two_blocks_and_a_frame_in_one_word() {
    // Six free: an order 2 fits once beside an order 1, or two of order 1.
    explore(3, || {
        (
            nearly_empty(70, 6),
            vec![
                |model| {
                    model.alloc(2);
                },
                |model| {
                    model.alloc(1);
                },
                |model| {
                    model.take(1);
                },
            ],
        )
    });
}

#[test]
fn blocks_of_one_word_taken_together_and_freed() {
    // Six free: three blocks of order 1, for two that want two each, of which one gives back what it got.
    explore(2, || {
        (
            nearly_empty(70, 6),
            vec![
                |model| {
                    model.alloc_many(1, 2);
                },
                |model| {
                    let blocks = model.alloc_many(1, 2);
                    blocks.into_iter().for_each(|block| model.free(block));
                },
            ],
        )
    });
}

#[test]
fn blocks_of_two_words_taken_together_while_frames_come_back() {
    explore(2, || {
        let model = Model::new(512);
        model.take(510 - 256);
        (
            model,
            vec![
                |model| {
                    model.alloc_many(7, 2);
                },
                |model| model.give(&[0, 1]),
                |model| {
                    model.take(1);
                },
            ],
        )
    });
}

/// Whoever reserves all of a pageblock takes its bits by plain stores.
#[test]
fn all_of_a_pageblock_is_taken_at_once_while_frames_come_back() {
    let all: [fn(&Model); 2] = [|model| drop(model.alloc_many(6, 8)), |model| drop(model.take(512))];
    for take_all in all {
        explore(2, move || {
            let model = Model::new(512);
            model.take(2);
            (
                model,
                vec![take_all, |model| model.give(&[0]), |model| {
                    model.give(&[1]);
                    model.take(1);
                }],
            )
        });
    }
}

#[test]
fn a_pageblock_goes_whole_or_in_frames() {
    explore(3, || {
        (
            Model::new(PAGEBLOCK_FRAMES),
            vec![
                |model| {
                    if let Some(block) = model.alloc(9) {
                        model.free(block);
                    }
                },
                |model| {
                    let frames = model.take(1);
                    model.give(&frames);
                },
            ],
        )
    });
}

#[test]
fn large_blocks_do_not_undo_each_other_for_ever() {
    explore_then(
        3,
        || {
            let alloc: fn(&Model) = |model| {
                model.alloc(10);
            };
            (Model::new(2 * PAGEBLOCK_FRAMES), vec![alloc, alloc])
        },
        |model| assert_eq!(*model.served.lock().unwrap(), [10], "one of the two gets the block"),
    );
}

#[test]
fn a_pageblock_taken_in_vain_is_missed_by_nobody() {
    // The large block fails if a pageblock goes meanwhile, and what it had taken by then is not exhausted for others.
    explore_then(
        3,
        || {
            let pageblocks: fn(&Model) = |model| {
                model.alloc(9);
                model.alloc(9);
            };
            let large: fn(&Model) = |model| {
                model.alloc(10);
            };
            (Model::new(2 * PAGEBLOCK_FRAMES), vec![pageblocks, large])
        },
        |model| {
            let served = model.served.lock().unwrap();
            assert!(
                [&[10][..], &[9, 9]].contains(&&served[..]),
                "free pageblocks were refused: {served:?} were served"
            );
        },
    );
}

#[test]
fn large_blocks_tried_in_vain_are_missed_by_no_other_large_request() {
    // Of four pageblocks order 11 wants all, order 10 two, and order 9 takes one without waiting for anybody. If that keeps
    // order 11 from succeeding, the other two are served, although order 11 had their pageblocks in hand for a moment.
    explore_then(
        2,
        || {
            let threads: Vec<fn(&Model)> =
                vec![|model| _ = model.alloc(11), |model| _ = model.alloc(10), |model| _ = model.alloc(9)];
            (Model::new(4 * PAGEBLOCK_FRAMES), threads)
        },
        |model| {
            let mut served = model.served.lock().unwrap().clone();
            served.sort_unstable();
            assert!([&[11][..], &[9, 10]].contains(&&served[..]), "only {served:?} were served");
        },
    );
}

#[test]
fn giving_back_and_a_request_leave_what_the_mark_says() {
    // Two pageblocks are free, and one of them is to stay.
    const MARK: u32 = PAGEBLOCK_FRAMES;
    explore_then(
        3,
        || {
            let model = Model::new(2 * PAGEBLOCK_FRAMES);
            model.buddy().note_committed();
            let threads: Vec<fn(&Model)> = vec![
                |model| {
                    model.own_some(model.buddy().take_unused(
                        &mut PageblockId::new(0),
                        Unused::All,
                        MARK,
                        PAGEBLOCK_FRAMES,
                    ))
                },
                |model| {
                    let block = model.buddy().alloc_block(Order::PAGEBLOCK, KIND, MARK);
                    model.own_some(block.map(|block| (block, PAGEBLOCK_FRAMES)));
                },
            ];
            (model, threads)
        },
        |model| assert!(model.served.lock().unwrap().len() <= 1, "below the mark"),
    );
}

#[test]
fn a_pageblock_that_was_used_a_moment_ago_is_not_given_back() {
    static IS_USED: AtomicBool = AtomicBool::new(false);
    explore(3, || {
        let model = Model::new(PAGEBLOCK_FRAMES);
        model.buddy().note_committed();
        // Seen free long ago.
        let seen = Unused::Since { now: Tick::new(1), ticks: 8 };
        assert_eq!(model.buddy().take_unused(&mut PageblockId::new(0), seen, 0, PAGEBLOCK_FRAMES), None);
        IS_USED.store(false, SeqCst);
        let threads: Vec<fn(&Model)> = vec![
            |model| {
                let due = Unused::Since { now: Tick::new(100), ticks: 8 };
                if let Some((block, _)) = model.buddy().take_unused(&mut PageblockId::new(0), due, 0, PAGEBLOCK_FRAMES)
                {
                    assert!(!IS_USED.load(SeqCst), "it was used meanwhile");
                    model.buddy().return_unused(block, true).unwrap();
                }
            },
            |model| {
                if let Some(block) = model.alloc(0) {
                    model.free(block);
                    IS_USED.store(true, SeqCst);
                }
            },
        ];
        (model, threads)
    });
}

/// The index finds pageblocks behind the first 64 by its upper level alone.
#[test]
fn a_pageblock_that_enters_a_class_as_the_last_one_leaves_it_is_found() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.max_branches = 20_000;
    builder.check(|| {
        let model = Model::new(66 * PAGEBLOCK_FRAMES);
        let alloc = |order: u8| model.buddy().alloc_block(Order::new(order).unwrap(), KIND, 0).unwrap();
        // Number 64 alone is free, and 65 comes back while it goes.
        alloc(15);
        let [stays, last] = [alloc(9), alloc(9)];
        model.buddy().free_block(stays, Order::PAGEBLOCK).unwrap();
        let giver = {
            let model = Arc::clone(&model);
            thread::spawn(move || model.buddy().free_block(last, Order::PAGEBLOCK).unwrap())
        };
        let taken = model.buddy().alloc_block(Order::PAGEBLOCK, KIND, 0);
        giver.join().unwrap();
        assert!(taken.is_some());
        model.buddy().validate().unwrap();
    });
}

#[test]
fn a_steal_and_a_take_of_the_last_frame() {
    explore(3, || {
        (
            nearly_empty(70, 1),
            vec![
                |model| {
                    if let Some(frame) = model.buddy().steal(0) {
                        model.own([frame.as_u32()]);
                    }
                },
                |model| {
                    model.take(1);
                },
            ],
        )
    });
}

#[test]
fn two_share_what_they_draw_from() {
    // One CPU's list, whose owner was moved to another CPU in the middle of a refill.
    explore(3, || {
        static BOUND: Mutex<Option<Arc<BoundBlock>>> = Mutex::new(None);
        *BOUND.lock().unwrap() = Some(Arc::default());
        let take: fn(&Model) = |model| {
            let bound = BOUND.lock().unwrap().clone().unwrap();
            model.take_bound(&bound, 2);
        };
        (nearly_empty(130, 3), vec![take, take])
    });
}

#[test]
fn a_frame_given_twice_is_free_once() {
    explore_then(
        3,
        || {
            let model = nearly_empty(70, 2);
            model.disown([5]);
            let give: fn(&Model) = |model| *model.doubles.lock().unwrap() += model.give_unchecked(&[5]).doubles;
            (model, vec![give, give])
        },
        |model| assert_eq!(*model.doubles.lock().unwrap(), 1),
    );
}

/// Two threads free the block that somebody had: one of them is refused at least, and the buddy counts it once.
fn block_freed_twice(frames: u32, order: u8) {
    explore_then(
        2,
        move || {
            let model = Model::new(frames);
            let (block, order) = model.alloc(order).unwrap();
            assert_eq!(block, Pfn::new(0), "a buddy that is entirely free serves from its start");
            model.disown(0..order.frames());
            let free: fn(&Model) = match order.get() {
                7 => |model| model.free_first(7),
                9 => |model| model.free_first(9),
                _ => |model| model.free_first(10),
            };
            (model, vec![free, free])
        },
        |model| {
            let refused = model.refused.lock().unwrap();
            assert!((1..=2).contains(&refused.len()), "{refused:?}");
            assert!(refused.iter().all(|kind| *kind == MisuseKind::DoubleFree), "{refused:?}");
        },
    );
}

impl Model {
    fn free_first(&self, order: u8) {
        if let Err(kind) = self.buddy().free_block(Pfn::new(0), Order::new(order).unwrap()) {
            self.refused.lock().unwrap().push(kind);
        }
    }
}

#[test]
fn a_block_freed_twice_is_free_once() {
    block_freed_twice(130, 7);
    block_freed_twice(PAGEBLOCK_FRAMES, 9);
    block_freed_twice(2 * PAGEBLOCK_FRAMES, 10);
}

/// Nobody will ask any more, and the last frames come back meanwhile: exactly one of those who bring them, or who closes
/// the buddy, is told that all are back, and is alone with it then.
#[test]
fn one_is_told_that_a_closed_zone_is_complete() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let model = Model::new(130);
        let frames = model.take(3);
        let block = model.alloc(0).unwrap();
        // What stands for the metadata: read by all, and written to by whoever takes it away.
        let metadata = Arc::new(UnsafeCell::new(()));
        let look = |metadata: &UnsafeCell<()>| metadata.with(|_| ());
        let end = |model: &Model, metadata: &UnsafeCell<()>, is_complete: bool| {
            if is_complete {
                metadata.with_mut(|_| ());
                let (buddy, mut from) = (model.buddy(), PageblockId::FIRST);
                let mut parts = core::iter::from_fn(|| buddy.next_part(&mut from));
                assert!(parts.all(|part| part.is_unused), "somebody is still to count frames");
            }
            usize::from(is_complete)
        };
        let giver = {
            let (model, metadata) = (Arc::clone(&model), Arc::clone(&metadata));
            thread::spawn(move || {
                look(&metadata);
                end(&model, &metadata, model.give_unchecked(&frames).is_complete)
            })
        };
        let freer = {
            let (model, metadata) = (Arc::clone(&model), Arc::clone(&metadata));
            thread::spawn(move || {
                look(&metadata);
                end(&model, &metadata, model.buddy().free_block(block.0, block.1).unwrap())
            })
        };
        look(&metadata);
        let told = end(&model, &metadata, model.buddy().close(0));
        assert_eq!(told + giver.join().unwrap() + freer.join().unwrap(), 1);
    });
}

/// How many requests were served.
fn served(model: &Model) -> usize {
    model.served.lock().unwrap().len()
}

#[test]
fn of_two_runs_that_overlap_one_is_taken() {
    // Frames 100 to 199 are free: each run would take some of the other's.
    let run: fn(&Model) = |model| {
        model.run(60);
    };
    explore_then(2, move || (nearly_empty(200, 100), vec![run, run]), |model| assert_eq!(served(model), 1));
}

#[test]
fn two_runs_are_taken_where_both_fit() {
    let run: fn(&Model) = |model| {
        model.run(50);
    };
    explore_then(2, move || (nearly_empty(200, 100), vec![run, run]), |model| assert_eq!(served(model), 2));
}

#[test]
fn of_a_run_and_a_block_that_overlap_one_is_taken() {
    // Free are frames 20 to 127 and 130 to 191. The block can only be word 1, in which the run ends. A run that comes too late has
    // taken its part of word 0 by then, and gives it back.
    explore_then(
        3,
        || {
            let model = nearly_empty(192, 0);
            model.give(&(20..128).chain(130..192).collect::<Vec<_>>());
            let [run, block]: [fn(&Model); 2] = [|model| _ = model.run(100), |model| _ = model.alloc(6)];
            (model, vec![run, block])
        },
        |model| assert_eq!(served(model), 1),
    );
}

#[test]
fn a_run_over_a_border_and_pages_of_both_sides_have_one_owner_each() {
    // Two frames of each pageblock are free. The run takes three of them, or the other thread takes two first.
    explore(2, || {
        let [run, pages]: [fn(&Model); 2] = [|model| _ = model.run(3), |model| _ = model.take(2)];
        (nearly_empty(514, 4), vec![run, pages])
    });
}

#[test]
fn a_run_waits_for_no_count_of_frames_that_are_being_given() {
    // The run crosses a word. Whoever gets it sees what its last owner wrote.
    explore(3, || {
        let [give, run]: [fn(&Model); 2] =
            [|model| model.give(&(55..75).collect::<Vec<_>>()), |model| _ = model.run(20)];
        (nearly_empty(130, 30), vec![give, run])
    });
}
