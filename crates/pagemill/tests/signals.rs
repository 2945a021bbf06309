//! C2.5: a signal handler allocates and frees pages, wherever it interrupts the same calls on its own thread. Nothing is
//! lost, nothing has two owners, nothing deadlocks, and errno is as it was.
//!
//! Timer signals hit a thread that does nothing else than allocate and free, so that many arrive inside of sections
//! and between them. Under restartable sequences the sections that were sent back are counted.
use crate::common::{PATIENCE, allocators, close_all_back, is_stamped, stamp};
use pagemill::{Allocator, Backend, Bulk, Error, Gfp, Page, PageList, free_pages_bulk};
use std::cell::UnsafeCell;
use std::collections::HashSet;
use std::mem::{MaybeUninit, zeroed};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::time::{Duration, Instant};

static ALLOCATOR: AtomicPtr<Allocator> = AtomicPtr::new(null_mut());
static HANDLED: AtomicU64 = AtomicU64::new(0);
static HANDED_OUT: AtomicU64 = AtomicU64::new(0);
/// The first check that failed in the handler, which cannot panic: a line of this file.
static WRONG: AtomicUsize = AtomicUsize::new(0);
/// Pages that the handler keeps from one signal to the next.
static KEPT: Kept = Kept(UnsafeCell::new([const { None }; 24]));

struct Kept(UnsafeCell<[Option<Page>; 24]>);
// SAFETY: the handler alone touches it, which one thread runs, and the test when the storm is over.
unsafe impl Sync for Kept {}

/// An error number that no call of ours sets.
const UNTOUCHED: i32 = 12345;

fn errno() -> *mut i32 {
    // SAFETY: always allowed.
    unsafe { libc::__errno_location() }
}

fn expect(holds: bool, line: u32) {
    if !holds {
        let _ = WRONG.compare_exchange(0, line as usize, SeqCst, SeqCst);
    }
}

/// Writes to a page, sees that nobody else does, and that errno was left alone.
fn use_page(page: &mut Page) {
    stamp(page, 0);
    HANDED_OUT.fetch_add(1, Relaxed);
}

fn is_intact(page: &Page) -> bool {
    is_stamped(page, 0)
}

extern "C" fn handler(_signal: i32) {
    let allocator = ALLOCATOR.load(Relaxed);
    if allocator.is_null() {
        return;
    }
    // SAFETY: the test sets it for as long as signals arrive; errno is this thread's.
    let (allocator, before) = unsafe { (&*allocator, errno().replace(UNTOUCHED)) };
    // SAFETY: see `Kept`; a signal is not delivered inside its own handler.
    let kept = unsafe { &mut *KEPT.0.get() };
    let turn = HANDLED.fetch_add(1, Relaxed);
    let gfp = if turn.is_multiple_of(2) { Gfp::NOWAIT } else { Gfp::ATOMIC };
    expect(kept.iter().flatten().all(is_intact), line!());
    match turn % 4 {
        0 => {
            let slot = &mut kept[turn as usize / 4 % 24];
            *slot = None;
            *slot = allocator.alloc_page(gfp).ok();
            slot.iter_mut().for_each(use_page);
        }
        1 => {
            let occupied = kept.iter().flatten().count();
            match allocator.alloc_pages_bulk_array(Bulk::up_to(24).gfp(gfp), kept) {
                Ok(filled) => expect(filled.occupied == occupied + filled.added, line!()),
                Err(_) => expect(false, line!()),
            }
            kept.iter_mut().flatten().for_each(use_page);
        }
        2 => {
            let mut list = PageList::new();
            // More than there is: a failure must leave errno alone too.
            expect(allocator.alloc_pages_bulk_list(Bulk::exact(1 << 20).gfp(gfp), &mut list).is_err(), line!());
            expect(list.is_empty(), line!());
            let wait = allocator.alloc_page(Gfp::NOWAIT | Gfp::NOFAIL);
            expect(matches!(wait, Err(Error::Invalid(_))), line!());
        }
        _ => {
            let occupied = kept.iter().flatten().count();
            expect(free_pages_bulk(kept) == occupied, line!());
        }
    }
    // SAFETY: errno is this thread's.
    unsafe {
        expect(*errno() == UNTOUCHED, line!());
        *errno() = before;
    }
}

/// Signals to this thread, every so often, until it is dropped.
struct Storm {
    timer: libc::timer_t,
    old: libc::sigaction,
}

impl Storm {
    fn start(every: Duration) -> Self {
        // SAFETY: plain system calls with valid arguments; zero is a valid value of these structures. The handler does
        // only what this test is about, and atomics.
        unsafe {
            let mut action: libc::sigaction = zeroed();
            action.sa_sigaction = handler as extern "C" fn(i32) as usize;
            action.sa_flags = libc::SA_RESTART;
            let mut old = MaybeUninit::<libc::sigaction>::uninit();
            assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, old.as_mut_ptr()), 0);
            let mut event: libc::sigevent = zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = libc::SIGUSR1;
            event.sigev_notify_thread_id = libc::gettid();
            let mut timer: libc::timer_t = null_mut();
            assert_eq!(libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer), 0);
            let each = libc::timespec { tv_sec: 0, tv_nsec: every.as_nanos() as i64 };
            let times = libc::itimerspec { it_interval: each, it_value: each };
            assert_eq!(libc::timer_settime(timer, 0, &raw const times, null_mut()), 0);
            Self { timer, old: old.assume_init() }
        }
    }
}

impl Drop for Storm {
    fn drop(&mut self) {
        // SAFETY: the timer and the action that `start` made.
        unsafe {
            libc::timer_delete(self.timer);
            libc::sigaction(libc::SIGUSR1, &raw const self.old, null_mut());
        }
    }
}

/// The interrupted code: every path of order 0, with waiting requests, so that drains are interrupted too.
fn interrupted(allocator: &Allocator, turns: u64, kept: &mut Vec<Page>) {
    let mut slots: Vec<Option<Page>> = (0..96).map(|_| None).collect();
    for turn in 0..turns {
        match turn % 6 {
            0..=2 => {
                let page = allocator.alloc_page(Gfp::KERNEL);
                drop(page);
            }
            3 => {
                let n = turn as usize % 90 + 1;
                if let Ok(filled) = allocator.alloc_pages_bulk_array(Bulk::up_to(n), &mut slots) {
                    assert_eq!(filled.occupied, slots.iter().flatten().count());
                }
                slots.iter_mut().flatten().for_each(use_page);
                assert!(slots.iter().flatten().all(is_intact), "a page was overwritten");
                free_pages_bulk(&mut slots);
            }
            4 => {
                if kept.len() > 300 {
                    kept.clear();
                }
                if let Ok(mut page) = allocator.alloc_page(Gfp::NOWAIT) {
                    use_page(&mut page);
                    kept.push(page);
                }
            }
            _ if turn % 96 == 5 => {
                allocator.drain();
            }
            _ => {
                let mut list = PageList::new();
                let _ = allocator.alloc_pages_bulk_list(Bulk::up_to(turn as usize % 1500), &mut list);
            }
        }
    }
    assert!(kept.iter().all(is_intact), "a page was overwritten");
}

/// Interrupts a thread until enough signals were handled, some of them inside of sections.
fn storm(allocator: Allocator) {
    const SIGNALS: u64 = 10_000;
    let backend = allocator.backend();
    let (restarts, started) = (pagemill::restarts(), Instant::now());
    HANDLED.store(0, SeqCst);
    HANDED_OUT.store(0, SeqCst);
    WRONG.store(0, SeqCst);
    ALLOCATOR.store((&raw const allocator).cast_mut(), SeqCst);
    let mut kept = Vec::new();
    let storm = Storm::start(Duration::from_micros(50));
    let is_enough =
        || HANDLED.load(Relaxed) >= SIGNALS && (backend == Backend::Portable || pagemill::restarts() > restarts);
    while !is_enough() && started.elapsed() < PATIENCE {
        interrupted(&allocator, 1000, &mut kept);
        assert_eq!(WRONG.load(SeqCst), 0, "a check in the handler failed, at this line of the test");
    }
    drop(storm);
    ALLOCATOR.store(null_mut(), SeqCst);
    let (handled, restarted) = (HANDLED.load(SeqCst), pagemill::restarts() - restarts);
    println!("{backend}: {handled} signals, {restarted} sections restarted, {} pages used", HANDED_OUT.load(SeqCst));
    assert!(is_enough(), "{handled} signals and {restarted} restarts in {:?}", started.elapsed());

    // The pages of the handler and the thread are distinct, and no other page is out.
    // SAFETY: no handler runs any more.
    let of_handler = unsafe { &mut *KEPT.0.get() };
    assert!(of_handler.iter().flatten().all(is_intact));
    let owned: HashSet<usize> = of_handler.iter().flatten().chain(&kept).map(Page::addr).collect();
    assert_eq!(owned.len(), of_handler.iter().flatten().count() + kept.len(), "a page is owned twice");
    assert_eq!(allocator.validate().unwrap().handed_out, owned.len(), "a page is lost");
    free_pages_bulk(of_handler);
    drop(kept);
    close_all_back(allocator);
}

#[test]
fn signal_handlers_allocate_and_free_wherever_they_interrupt() {
    own_process!();
    allocators(2048).into_iter().for_each(storm);
}
