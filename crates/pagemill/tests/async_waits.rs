//! Requests that are awaited (C3.18): served in the lines of sleeping threads, on any executor. Dropped at any time they
//! leave nothing behind. No poll calls a shrinker, and no free a waker.
use crate::common::{
    Calls, Drops, EXECUTORS, HOUR, IN_ORDER, Job, Rng, Run, all, allocator, allocators, assert_all_back, block_on,
    fork, in_child, one_cpu, poll_once, until, until_waiting, wait_for,
};
use pagemill::{
    Account, Allocator, Block, BlockList, Bulk, Cancel, Error, Exact, Gfp, InvalidRequest, Memory, Mempool, Order,
    Page, PageCount, PageList, PageMempool, Pooled, Why,
};
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Poll, RawWaker, RawWakerVTable, Wake, Waker};
use std::thread::ThreadId;
use std::time::Duration;

const REQUESTS: usize = 10_000;
const PAGES: usize = 64;

/// Which requests were served, in their order: the kind of each, and its number.
type Served = Arc<Mutex<Vec<(usize, usize)>>>;

/// A request to a pool.
type Awaited<'p> = Pin<Box<dyn Future<Output = Result<Vec<Pooled<&'p PageMempool>>, Error>> + 'p>>;

fn all_pages(allocator: &Allocator) -> Vec<Page> {
    let pages = all(allocator, Gfp::NOWAIT);
    assert_eq!(pages.len(), allocator.managed_pages().get());
    pages
}

/// Starts an executor with all jobs. While all requests wait, drops every other future, one after the other, and
/// `free`s between that, in an order that the seed gives.
fn storm(
    run: Run,
    seed: u64,
    jobs: Vec<Job>,
    drops: &[Drops],
    is_waiting: impl Fn() -> bool,
    mut free: impl FnMut() -> bool,
) {
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    let executor = std::thread::spawn(move || run(jobs));
    until("all requests in line", is_waiting);
    let mut left: Vec<&Drops> = drops.iter().collect();
    while left.len() > drops.len() / 2 {
        match rng.next() >> 33 {
            choice if choice.is_multiple_of(64) => _ = free(),
            choice => left.swap_remove(choice as usize % left.len()).now(),
        }
    }
    while free() {}
    executor.join().unwrap();
}

fn assert_in_order(name: &str, served: &[(usize, usize)]) {
    for kind in 0..4 {
        let of_kind: Vec<usize> = served.iter().filter(|served| served.0 == kind).map(|served| served.1).collect();
        assert!(of_kind.is_sorted(), "{name}: kind {kind} was served out of order: {of_kind:?}");
    }
}

/// Waits for one page, or two, or a block, or some, and frees them at once.
async fn ask(allocator: &Allocator, kind: usize, has: impl FnOnce()) {
    match kind {
        0 | 1 => {
            let pages: PageList = allocator.alloc_bulk_async(Bulk::exact(kind + 1)).await.unwrap();
            has();
            assert_eq!(pages.len(), kind + 1);
        }
        2 => {
            let request = Bulk::exact(1).order(Order::new(2).unwrap());
            let blocks: BlockList = allocator.alloc_bulk_async(request).await.unwrap();
            has();
            assert_eq!(blocks.len(), 1);
        }
        _ => {
            let pages: PageList = allocator.alloc_bulk_async(Bulk::at_least(3, 9)).await.unwrap();
            has();
            assert!((3..=9).contains(&pages.len()));
        }
    }
}

fn requests_dropped_at_random(name: &str, run: Run, is_in_order: bool) {
    for allocator in allocators(PAGES) {
        let mut pages = all_pages(&allocator);
        let (served, drops): (Served, Vec<_>) = (Served::default(), (0..REQUESTS).map(|_| Drops::default()).collect());
        let job = |(number, drops): (usize, &Drops)| -> Job {
            let (allocator, served, drops) = (allocator.clone(), served.clone(), drops.clone());
            Box::pin(async move {
                let has = || served.lock().unwrap().push((number % 4, number));
                drops.unless_dropped(ask(&allocator, number % 4, has)).await;
            })
        };
        let jobs = drops.iter().enumerate().map(job).collect();
        let is_waiting = || allocator.stats().waiting == REQUESTS as u64;
        storm(run, 7, jobs, &drops, is_waiting, || pages.pop().is_some());
        let served = std::mem::take(&mut *served.lock().unwrap());
        assert!(served.len() >= REQUESTS / 2, "{} were served", served.len());
        if is_in_order {
            assert_in_order(name, &served);
        }
        assert_all_back(&allocator);
    }
}

#[test]
fn ten_thousand_requests_dropped_at_random_lose_nothing() {
    for (name, run) in EXECUTORS {
        requests_dropped_at_random(name, run, IN_ORDER.iter().any(|(other, _)| *other == name));
    }
}

#[test]
fn ten_thousand_requests_to_a_pool_dropped_at_random_lose_nothing() {
    for (name, run) in EXECUTORS {
        let allocator = allocator(16);
        let pool: Arc<PageMempool> = Arc::new(Mempool::pages(&allocator, 16).unwrap());
        let mut out: Vec<_> = (0..16).map(|_| pool.alloc(Gfp::NOIO).unwrap()).collect();
        let (served, drops): (Served, Vec<_>) = (Served::default(), (0..REQUESTS).map(|_| Drops::default()).collect());
        let job = |(number, drops): (usize, &Drops)| -> Job {
            let (pool, served, drops) = (pool.clone(), served.clone(), drops.clone());
            Box::pin(async move {
                let request = Bulk::exact(number % 4 + 1).gfp(Gfp::NOIO);
                let Some(got) = drops.unless_dropped(pool.take_async_owned(request)).await else { return };
                served.lock().unwrap().push((0, number));
                assert_eq!(got.unwrap().len(), number % 4 + 1);
            })
        };
        let jobs = drops.iter().enumerate().map(job).collect();
        storm(run, 11, jobs, &drops, || pool.stats().waiting == REQUESTS, || out.pop().is_some());
        let served = std::mem::take(&mut *served.lock().unwrap());
        assert!(served.len() >= REQUESTS / 2, "{} were served", served.len());
        if IN_ORDER.iter().any(|(other, _)| *other == name) {
            assert_in_order(name, &served);
        }
        drop(out);
        let stats = pool.stats();
        assert_eq!((stats.out, stats.reserve, stats.waiting, stats.misused), (0, 16, 0, 0), "{name}");
        Arc::into_inner(pool).unwrap().close().unwrap();
        assert_all_back(&allocator);
    }
}

#[test]
fn tasks_and_threads_of_one_kind_are_served_in_order_of_arrival() {
    const EACH: usize = 200;
    for allocator in &allocators(1) {
        let pages = all_pages(allocator);
        let served = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for number in 0..EACH {
                let served = &served;
                let wait = move || {
                    let mut list = PageList::new();
                    if number % 2 == 0 {
                        list = block_on(allocator.alloc_bulk_async(Bulk::exact(1))).unwrap();
                    } else {
                        allocator.alloc_pages_bulk_list(Bulk::exact(1).timeout(HOUR), &mut list).unwrap();
                    }
                    served.lock().unwrap().push(number);
                    drop(list);
                };
                std::thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, wait).unwrap();
                until_waiting(allocator, number as u64 + 1);
            }
            drop(pages);
        });
        assert_eq!(served.into_inner().unwrap(), (0..EACH).collect::<Vec<_>>());
        assert_all_back(allocator);
    }
}

fn first_poll<T>(future: impl Future<Output = T>) -> Poll<T> {
    poll_once(pin!(future), Waker::noop())
}

#[test]
fn what_is_there_is_delivered_at_the_first_poll() {
    let allocator = one_cpu(Memory::anonymous(PAGES));
    let ready = |request| match first_poll(allocator.alloc_bulk_async::<_, Page>(request)) {
        Poll::Ready(list) => list.unwrap(),
        Poll::Pending => panic!("it waits"),
    };
    assert_eq!(ready(Bulk::up_to(PAGES)).len(), PAGES);
    let some = ready(Bulk::up_to(40));
    assert_eq!((some.len(), ready(Bulk::up_to(40)).len()), (40, 24));
    let Poll::Ready(rest) = first_poll(allocator.alloc_bulk_async::<_, Page>(Bulk::exact(24))) else { panic!() };
    assert_eq!(rest.unwrap().len(), 24);
    assert_eq!(ready(Bulk::up_to(0)).len(), 0);
    assert_eq!(allocator.stats().waits, 0);
}

#[test]
fn requests_that_may_not_wait_are_ready_at_the_first_poll() {
    let allocator = one_cpu(Memory::anonymous(PAGES));
    let calls = Calls::new(|_, _| 0);
    let _registered = allocator.register_shrinker(calls.clone());
    let pages = all_pages(&allocator);
    for gfp in [Gfp::NOWAIT, Gfp::ATOMIC, Gfp::KERNEL | Gfp::NORETRY] {
        let Poll::Ready(exact) = first_poll(allocator.alloc_bulk_async::<_, Page>(Bulk::exact(2).gfp(gfp))) else {
            panic!("{gfp:?} waits")
        };
        assert!(matches!(exact.unwrap_err(), Error::Exhausted(short) if short.why == Why::Exhausted));
        let Poll::Ready(some) = first_poll(allocator.alloc_bulk_async::<_, Page>(Bulk::up_to(2).gfp(gfp))) else {
            panic!("{gfp:?} waits")
        };
        assert!(some.unwrap().is_empty());
    }
    assert_eq!((calls.so_far(), allocator.stats().waits), (0, 0));
    drop(pages);
}

#[test]
fn awaited_requests_that_cannot_be_served_are_refused_at_the_first_poll() {
    let allocator = one_cpu(Memory::anonymous(PAGES));
    let refused = |request: Bulk<'_, Exact>| match first_poll(allocator.alloc_bulk_async(request)) {
        Poll::Ready(Err(Error::Invalid(why))) => why,
        other => panic!("{other:?}"),
    };
    let timeout = refused(Bulk::exact(1).timeout(HOUR));
    assert_eq!(timeout, InvalidRequest::AwaitedTimeout);
    assert!(timeout.to_string().contains("your runtime's timeout"), "{timeout}");
    assert!(matches!(refused(Bulk::exact(PAGES + 1)), InvalidRequest::MoreThanManaged { most: PAGES, .. }));
    let pool = Mempool::pages(&allocator, 4).unwrap();
    let of_pool = |request| match first_poll(pool.take_async(request)) {
        Poll::Ready(Err(Error::Invalid(why))) => why,
        other => panic!("{other:?}"),
    };
    assert_eq!(of_pool(Bulk::exact(1).timeout(HOUR)), InvalidRequest::AwaitedTimeout);
    assert_eq!(of_pool(Bulk::exact(5)), InvalidRequest::AboveReserve { count: 5, min_nr: 4 });
}

#[test]
fn a_cancel_ends_awaited_requests() {
    for allocator in &allocators(PAGES) {
        let pages = all_pages(allocator);
        let cancel = Cancel::new();
        std::thread::scope(|scope| {
            let exact = scope.spawn(|| block_on(allocator.alloc_bulk_async::<_, Page>(Bulk::exact(2).cancel(&cancel))));
            let behind =
                scope.spawn(|| block_on(allocator.alloc_bulk_async::<_, Page>(Bulk::exact(2).cancel(&cancel))));
            let some = scope.spawn(|| block_on(allocator.alloc_bulk_async::<_, Page>(Bulk::up_to(2).cancel(&cancel))));
            until_waiting(allocator, 3);
            cancel.cancel();
            for exact in [exact, behind] {
                let error = exact.join().unwrap().unwrap_err();
                assert!(matches!(error, Error::Exhausted(short) if short.why == Why::Cancelled), "{error}");
            }
            assert!(some.join().unwrap().unwrap().is_empty());
        });
        drop(pages);
        assert_all_back(allocator);
    }
}

#[test]
fn a_request_for_up_to_n_waits_for_one_and_takes_what_is_there_then() {
    let allocator = one_cpu(Memory::anonymous(PAGES));
    let mut pages = all_pages(&allocator);
    let mut some = pin!(allocator.alloc_bulk_async::<_, Page>(Bulk::up_to(8)));
    assert!(poll_once(some.as_mut(), Waker::noop()).is_pending());
    pages.truncate(PAGES - 3);
    let Poll::Ready(list) = poll_once(some, Waker::noop()) else { panic!("three are free") };
    assert_eq!(list.unwrap().len(), 3);
}

/// It tries for all, and keeps what came. Dropped half-way, it gives back its pages and what it was charged.
#[test]
fn a_future_with_pages_in_hand_gives_all_back_when_it_is_dropped() {
    let allocator = one_cpu(Memory::anonymous(PAGES));
    let mut pages = all_pages(&allocator);
    pages.truncate(PAGES - 5);
    let tenant = Account::new(PageCount::new(100));
    let request = Bulk::up_to(8).gfp(Gfp::KERNEL | Gfp::RETRY_MAYFAIL | Gfp::ACCOUNT).account(&tenant);
    {
        let mut future = pin!(allocator.alloc_bulk_async::<_, Page>(request));
        assert!(poll_once(future.as_mut(), Waker::noop()).is_pending());
        assert_eq!((tenant.charged().get(), allocator.stats().waiting), (5, 1));
        pages.pop();
        assert!(poll_once(future.as_mut(), Waker::noop()).is_pending());
        assert_eq!(tenant.charged().get(), 6);
    }
    assert_eq!((tenant.charged().get(), allocator.stats().waiting), (0, 0));
    pages.truncate(PAGES - 8);
    let Poll::Ready(list) = first_poll(allocator.alloc_bulk_async::<_, Page>(request)) else { panic!("8 are free") };
    assert_eq!((list.unwrap().len(), tenant.charged().get()), (8, 8));
    drop(pages);
    assert_all_back(&allocator);
}

#[test]
fn a_dropped_head_wakes_the_next() {
    for allocator in &allocators(PAGES) {
        let mut pages = all_pages(allocator);
        let mut head = Box::pin(allocator.alloc_bulk_async::<_, Page>(Bulk::exact(2)));
        assert!(poll_once(head.as_mut(), Waker::noop()).is_pending());
        std::thread::scope(|scope| {
            let next = scope.spawn(|| block_on(allocator.alloc_bulk_async::<_, Page>(Bulk::exact(2))).unwrap().len());
            until_waiting(allocator, 2);
            pages.truncate(PAGES - 2);
            drop(head);
            assert_eq!(next.join().unwrap(), 2);
        });
        drop(pages);
        assert_all_back(allocator);
    }
}

/// A future that is woken and never polled again keeps no other request of its kind waiting: also not one that sleeps on
/// the thread that should poll it.
#[test]
fn a_request_behind_a_future_that_is_not_polled_is_served() {
    for allocator in &allocators(PAGES) {
        let mut pages = all_pages(allocator);
        let mut idle = pin!(allocator.alloc_bulk_async::<_, Page>(Bulk::exact(1)));
        assert!(poll_once(idle.as_mut(), Waker::noop()).is_pending());
        pages.truncate(PAGES - 1);
        let page = allocator.alloc_page(Gfp::KERNEL | Gfp::NOFAIL).unwrap();
        assert_eq!(allocator.stats().waiting, 1);
        drop(page);
        // It is late, and still the first.
        assert!(poll_once(idle, Waker::noop()).is_ready());
    }
}

/// The threads that called it.
#[derive(Default)]
struct Witness(Mutex<Vec<ThreadId>>);

impl Wake for Witness {
    fn wake(self: Arc<Self>) {
        self.0.lock().unwrap().push(std::thread::current().id());
    }
}

impl Witness {
    fn calls(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

static FREED_BY_HANDLER: AtomicPtr<Page> = AtomicPtr::new(std::ptr::null_mut());
static CALLS_IN_HANDLER: AtomicUsize = AtomicUsize::new(0);

extern "C" fn frees_a_page(_signal: i32) {
    // SAFETY: the test stored a page that it read out of its variable, for this handler alone.
    let page = unsafe { FREED_BY_HANDLER.load(SeqCst).read() };
    drop(page);
    CALLS_IN_HANDLER.fetch_add(1, SeqCst);
}

#[test]
fn a_free_in_a_signal_handler_wakes_a_task_and_calls_no_waker() {
    own_process!();
    for allocator in &allocators(PAGES) {
        let mut pages = all_pages(allocator);
        // Everything else of a thread that might free is there before: the handler must not be its first.
        drop(pages.split_off(PAGES - 1));
        pages.extend(all(allocator, Gfp::NOWAIT));
        let witness = Arc::new(Witness::default());
        let mut future = pin!(allocator.alloc_bulk_async::<_, Page>(Bulk::exact(1)));
        assert!(poll_once(future.as_mut(), &witness.clone().into()).is_pending());
        let mut page = std::mem::ManuallyDrop::new(pages.pop().unwrap());
        FREED_BY_HANDLER.store(&raw mut *page, SeqCst);
        let before = CALLS_IN_HANDLER.load(SeqCst);
        // SAFETY: the handler frees one page (C2.5), and counts.
        unsafe {
            libc::signal(libc::SIGUSR1, frees_a_page as extern "C" fn(i32) as usize);
            libc::raise(libc::SIGUSR1);
        }
        assert_eq!(CALLS_IN_HANDLER.load(SeqCst), before + 1);
        until("a wake-up", || witness.calls() > 0);
        assert!(poll_once(future, Waker::noop()).is_ready());
        let me = std::thread::current().id();
        assert!(witness.0.lock().unwrap().iter().all(|thread| *thread != me), "a free called a waker");
    }
}

/// A leaked future keeps its place, and nothing of its allocator: the next allocator has no request that waits.
#[test]
fn a_leaked_future_does_not_outlive_its_allocator() {
    own_process!();
    let allocator = one_cpu(Memory::anonymous(PAGES));
    let mut pages = all_pages(&allocator);
    let mut future = Box::pin(allocator.alloc_bulk_async::<_, Page>(Bulk::exact(2)));
    assert!(poll_once(future.as_mut(), Waker::noop()).is_pending());
    // Leaked, but for a detector of leaks, which knows what a static leads to.
    static LEAKED: std::sync::Mutex<Vec<usize>> = std::sync::Mutex::new(Vec::new());
    LEAKED.lock().unwrap().push(std::ptr::from_mut(Box::leak(Box::new(future))).expose_provenance());
    assert_eq!(allocator.stats().waiting, 1);
    pages.truncate(1);
    drop(allocator);
    drop(pages);
    // It takes over what the first one waited with.
    let next = one_cpu(Memory::anonymous(PAGES));
    drop(all_pages(&next));
    assert_eq!((next.stats().waiting, next.stats().waits), (0, 0));
    let list: PageList = block_on(next.alloc_bulk_async(Bulk::exact(2))).unwrap();
    assert_eq!(list.len(), 2);
}

/// A waker that panics ends neither the thread that calls it nor the waits of others.
#[test]
fn a_waker_that_panics_keeps_no_other_task_waiting() {
    struct Panics;
    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("a waker that panics on purpose");
        }
    }
    let allocator = &one_cpu(Memory::anonymous(PAGES));
    let pages = all_pages(allocator);
    let mut one = pin!(allocator.alloc_bulk_async::<_, Page>(Bulk::exact(1)));
    assert!(poll_once(one.as_mut(), &Arc::new(Panics).into()).is_pending());
    std::thread::scope(|scope| {
        let other =
            scope.spawn(|| block_on(allocator.alloc_bulk_async::<_, Page>(Bulk::exact(2))).map(|list| list.len()));
        until_waiting(allocator, 2);
        drop(pages);
        assert_eq!(other.join().unwrap(), Ok(2));
    });
    assert!(poll_once(one, Waker::noop()).is_ready());
}

#[test]
fn no_poll_calls_a_shrinker_and_a_reclaim_step_serves_the_task() {
    let allocator = one_cpu(Memory::anonymous(PAGES));
    let pages = Mutex::new(all_pages(&allocator));
    let callers = Arc::new(Mutex::new(Vec::new()));
    let its = callers.clone();
    let gives = Calls::new(move |_, wanted| {
        its.lock().unwrap().push(std::thread::current().id());
        let mut pages = pages.lock().unwrap();
        let rest = pages.len().saturating_sub(wanted.pages.min(4));
        pages.drain(rest..).count()
    });
    let registered = allocator.register_shrinker(gives);
    let witness = Arc::new(Witness::default());
    let mut future = pin!(allocator.alloc_bulk_async::<_, Page>(Bulk::exact(6)));
    for _ in 0..10 {
        assert!(poll_once(future.as_mut(), &witness.clone().into()).is_pending());
    }
    assert_eq!(callers.lock().unwrap().len(), 0, "a poll called a shrinker");
    // A step makes one round, which brings four, and the next one as many: there are no marks to reach.
    let executor = std::thread::current().id();
    let steps = std::thread::scope(|scope| {
        scope.spawn(|| [allocator.reclaim_step().get(), allocator.reclaim_step().get()]).join()
    });
    assert_eq!(steps.unwrap(), [4, 4]);
    until("a wake-up", || witness.calls() > 0);
    let Poll::Ready(list) = poll_once(future, Waker::noop()) else { panic!("eight pages are free") };
    assert_eq!(list.unwrap().len(), 6);
    assert!(callers.lock().unwrap().iter().all(|thread| *thread != executor));
    assert_eq!(allocator.reclaim_step().get(), 0, "no task waits any more");
    drop(registered);
}

#[test]
fn background_reclaim_serves_tasks_without_marks() {
    let allocator = Allocator::builder().memory(Memory::anonymous(PAGES)).background_reclaim(true).build().unwrap();
    let pages = Mutex::new(all_pages(&allocator));
    let me = std::thread::current().id();
    let registered = allocator.register_shrinker(Calls::new(move |_, _| {
        assert_ne!(std::thread::current().id(), me);
        usize::from(pages.lock().unwrap().pop().is_some())
    }));
    let list: PageList = block_on(allocator.alloc_bulk_async(Bulk::exact(8))).unwrap();
    assert_eq!(list.len(), 8);
    drop(registered);
}

#[test]
fn a_future_continues_in_a_forked_child_and_in_the_parent() {
    own_process!();
    for allocator in &allocators(PAGES) {
        let mut pages = all_pages(allocator);
        let ask = || -> Pin<Box<dyn Future<Output = Result<PageList, Error>> + '_>> {
            Box::pin(allocator.alloc_bulk_async(Bulk::exact(2)))
        };
        let (mut first, mut second, mut dropped) = (ask(), ask(), ask());
        for future in [&mut first, &mut second, &mut dropped] {
            assert!(poll_once(future.as_mut(), Waker::noop()).is_pending());
        }
        let go_on = |mut pages: Vec<Page>, mut futures: [_; 3]| {
            let [_, _, dropped] = &mut futures;
            *dropped = ask();
            let [first, second, _] = futures;
            pages.truncate(PAGES - 2);
            assert_eq!(block_on(first).unwrap().len(), 2);
            drop(pages);
            assert_eq!(block_on(second).unwrap().len(), 2);
            assert_all_back(allocator);
        };
        let futures = [first, second, dropped];
        let mut both = Some((std::mem::take(&mut pages), futures));
        in_child("polls its parent's futures", || {
            let (pages, futures) = both.take().unwrap();
            go_on(pages, futures);
        });
        let (pages, futures) = both.take().unwrap();
        go_on(pages, futures);
    }
}

#[test]
fn a_pools_future_continues_in_a_forked_child_and_in_the_parent() {
    own_process!();
    let allocator = allocator(8);
    let pool = Mempool::pages(&allocator, 8).unwrap();
    let out: Vec<_> = (0..8).map(|_| pool.alloc(Gfp::NOIO).unwrap()).collect();
    let request = Bulk::exact(3).gfp(Gfp::NOIO);
    let mut future: Awaited<'_> = Box::pin(pool.take_async(request));
    assert!(poll_once(future.as_mut(), Waker::noop()).is_pending());
    let mut both = Some((out, future));
    let go_on = |(out, mut future): (Vec<_>, Awaited<'_>)| {
        assert!(poll_once(future.as_mut(), Waker::noop()).is_pending());
        assert_eq!(pool.stats().waiting, 1);
        assert!(matches!(pool.resize(2), Err(Error::Invalid(InvalidRequest::ReserveAwaited { needed: 3, .. }))));
        drop(out);
        assert_eq!(block_on(future).unwrap().len(), 3);
        let stats = pool.stats();
        assert_eq!((stats.out, stats.reserve, stats.waiting), (0, 8, 0));
    };
    in_child("polls its parent's future", || go_on(both.take().unwrap()));
    go_on(both.take().unwrap());
}

/// Half of what it needs comes from the source while it waits.
#[test]
fn a_pools_future_that_is_dropped_gives_back_what_came_from_the_source() {
    let allocator = allocator(12);
    let pool = Mempool::pages(&allocator, 8).unwrap();
    let out: Vec<_> = (0..12).map(|_| pool.alloc(Gfp::NOIO).unwrap()).collect();
    let mut out = out.into_iter();
    // Eight are of the source or the reserve, whichever came first: four free pages are left to the source here.
    let mut future = Box::pin(pool.take_async(Bulk::exact(6).gfp(Gfp::NOIO)));
    assert!(poll_once(future.as_mut(), Waker::noop()).is_pending());
    out.by_ref().take(3).for_each(drop);
    assert!(poll_once(future.as_mut(), Waker::noop()).is_pending());
    drop(future);
    drop(out);
    let stats = pool.stats();
    assert_eq!((stats.out, stats.reserve, stats.waiting, stats.misused), (0, 8, 0, 0));
    pool.close().unwrap();
    assert_all_back(&allocator);
}

/// A future can be spawned, as the runtime's threads are allowed to run it: no executor is needed to see that.
/// Four of its pages come from the source, and are charged, before it waits. The account pays for them only if they are
/// delivered.
#[test]
fn a_pools_future_that_is_not_served_charges_no_account() {
    for ending in ["dropped", "cancelled", "served"] {
        let allocator = one_cpu(Memory::anonymous(12));
        let pool = Mempool::pages(&allocator, 8).unwrap();
        let held = all(&allocator, Gfp::NOWAIT);
        let mut out: Vec<_> = (0..8).map(|_| pool.alloc(Gfp::NOIO).unwrap()).collect();
        drop(held);
        let (tenant, cancel) = (Account::new(PageCount::new(100)), Cancel::new());
        let request = Bulk::exact(6).gfp(Gfp::NOIO).account(&tenant).cancel(&cancel);
        let mut future: Awaited<'_> = Box::pin(pool.take_async(request));
        assert!(poll_once(future.as_mut(), Waker::noop()).is_pending());
        assert_eq!(tenant.charged().get(), 4, "{ending}");
        let charged = match ending {
            "cancelled" => {
                cancel.cancel();
                assert!(matches!(poll_once(future.as_mut(), Waker::noop()), Poll::Ready(Err(_))));
                0
            }
            "served" => {
                out.truncate(6);
                let Poll::Ready(got) = poll_once(future.as_mut(), Waker::noop()) else { panic!("two are in reserve") };
                assert_eq!(got.unwrap().len(), 6);
                4
            }
            _ => 0,
        };
        drop(future);
        assert_eq!(tenant.charged().get(), charged, "{ending}");
        drop(out);
        pool.close().unwrap();
    }
}

/// A waker that keeps the thread that calls it until it may go on.
#[derive(Default)]
struct Holds {
    is_called: AtomicBool,
    may_go: AtomicBool,
}

impl Wake for Holds {
    fn wake(self: Arc<Self>) {
        self.is_called.store(true, SeqCst);
        until("the end of the fork", || self.may_go.load(SeqCst));
    }
}

/// The parent's thread is in a waker, so another task that is due still is when the child begins.
#[test]
fn a_child_calls_no_waker_of_its_parents() {
    own_process!();
    let (first, second) = (one_cpu(Memory::anonymous(PAGES)), one_cpu(Memory::anonymous(PAGES)));
    let pages = [all_pages(&first), all_pages(&second)];
    let (holds, witness) = (Arc::new(Holds::default()), Arc::new(Witness::default()));
    let mut one = pin!(first.alloc_bulk_async::<_, Page>(Bulk::exact(1)));
    assert!(poll_once(one.as_mut(), &holds.clone().into()).is_pending());
    until("the thread in the waker", || holds.is_called.load(SeqCst));
    let mut due = pin!(first.alloc_bulk_async::<_, Page>(Bulk::exact(2)));
    assert!(poll_once(due.as_mut(), &witness.clone().into()).is_pending());
    let mut pages = Some(pages);
    in_child("awaits something of its own", || {
        let [_first, mut pages] = pages.take().unwrap();
        // The second task becomes due after the thread has taken the first one, and so all that was due before.
        for _ in 0..2 {
            let own = Arc::new(Witness::default());
            let mut future = pin!(second.alloc_bulk_async::<_, Page>(Bulk::exact(1)));
            assert!(poll_once(future.as_mut(), &own.clone().into()).is_pending());
            until("a wake-up", || own.calls() > 0);
            pages.pop();
            let Poll::Ready(list) = poll_once(future, Waker::noop()) else { panic!("a page is free") };
            pages.extend(list.unwrap());
        }
        assert_eq!(witness.calls(), 0, "the child called a waker of its parent's");
    });
    holds.may_go.store(true, SeqCst);
    until("a wake-up", || witness.calls() > 0);
    drop(pages);
    assert!(poll_once(one, Waker::noop()).is_ready());
    assert!(poll_once(due, Waker::noop()).is_ready());
}

/// A task claims memory once it was overtaken often. Here it is not polled any more, and nothing else waits.
#[test]
fn what_an_idle_task_claimed_goes_to_a_request_that_would_fail() {
    let allocators = [(); 3].map(|()| one_cpu(Memory::anonymous(256)));
    let [of_pages, of_a_block, of_many] = &allocators;
    let futures: [Pin<Box<dyn Future<Output = usize> + '_>>; 3] = [
        Box::pin(async { of_pages.alloc_bulk_async::<_, Page>(Bulk::exact(100)).await.unwrap().len() }),
        Box::pin(async {
            let request = Bulk::exact(1).order(Order::new(7).unwrap());
            of_a_block.alloc_bulk_async::<_, Block>(request).await.unwrap().len()
        }),
        Box::pin(async { of_many.alloc_bulk_async::<_, Page>(Bulk::exact(100)).await.unwrap().len() }),
    ];
    let mut futures = futures;
    let mut held: Vec<_> = allocators.iter().map(all_pages).collect();
    for ((allocator, pages), future) in allocators.iter().zip(&mut held).zip(&mut futures) {
        assert!(poll_once(future.as_mut(), Waker::noop()).is_pending());
        for _ in 0..100 {
            pages.pop();
            pages.push(allocator.alloc_page(Gfp::NOWAIT).unwrap());
        }
        pages.pop(); // A pageblock is claimed if a page of it is free.
        assert!(poll_once(future.as_mut(), Waker::noop()).is_pending());
        pages.truncate(pages.len() - 80);
        pages.extend(core::iter::from_fn(|| allocator.alloc_page(Gfp::NOWAIT).ok()));
        assert!(pages.len() <= 256 - 80, "what was freed is the task's");
    }
    // Twice the second for which a claim may stand still.
    std::thread::sleep(Duration::from_millis(2100));
    for allocator in &allocators[..2] {
        drop(allocator.alloc_page(Gfp::KERNEL).unwrap());
    }
    let mut list = PageList::new();
    of_many.alloc_pages_bulk_list(Bulk::exact(70), &mut list).unwrap();
    drop((futures, held, list));
    allocators.iter().for_each(assert_all_back);
}

/// Counts the drops of wakers in this process.
struct Dropped;
static WAKERS_DROPPED: AtomicUsize = AtomicUsize::new(0);

impl Wake for Dropped {
    fn wake(self: Arc<Self>) {}
    fn wake_by_ref(self: &Arc<Self>) {}
}

impl Drop for Dropped {
    fn drop(&mut self) {
        WAKERS_DROPPED.fetch_add(1, SeqCst);
    }
}

/// To drop a waker may need a lock that another thread of the parent held.
#[test]
fn a_child_drops_no_waker_of_its_parents() {
    own_process!();
    let allocator = one_cpu(Memory::anonymous(PAGES));
    let pages = all_pages(&allocator);
    let ask = || Box::pin(allocator.alloc_bulk_async::<_, Page>(Bulk::exact(1)));
    let (first, second) = (ask(), ask());
    let mut futures = Some([first, second]);
    for future in futures.as_mut().unwrap() {
        assert!(poll_once(future.as_mut(), &Arc::new(Dropped).into()).is_pending());
    }
    // The thread has called the waker of the first one, and taken that of no other one: it stands behind.
    until("the first wake-up", || WAKERS_DROPPED.load(SeqCst) == 1);
    in_child("drops and polls its parent's futures", || {
        let [dropped, mut polled] = futures.take().unwrap();
        drop(dropped);
        assert!(poll_once(polled.as_mut(), Waker::noop()).is_pending());
        drop(polled);
        assert_eq!(WAKERS_DROPPED.load(SeqCst), 1, "the child dropped a waker of its parent's");
    });
    drop(futures);
    assert_eq!(WAKERS_DROPPED.load(SeqCst), 2);
    drop(pages);
}

/// Forks at its first call.
#[derive(Default)]
struct Forks {
    child: std::sync::OnceLock<libc::pid_t>,
}

static IS_CHILD_OF_WAKER: AtomicBool = AtomicBool::new(false);

impl Wake for Forks {
    fn wake(self: Arc<Self>) {
        self.child.get_or_init(|| {
            let child = fork();
            if child == 0 {
                IS_CHILD_OF_WAKER.store(true, SeqCst);
                // SAFETY: has the signal end this process, which is the copy of the thread that calls wakers.
                unsafe { libc::alarm(1) };
            }
            child
        });
    }
}

/// Ends a child with 7.
#[derive(Default)]
struct EndsChild {
    is_called: AtomicBool,
}

impl Wake for EndsChild {
    fn wake(self: Arc<Self>) {
        self.is_called.store(true, SeqCst);
        if IS_CHILD_OF_WAKER.load(SeqCst) {
            // SAFETY: ends the process, without running anything of the parent's.
            unsafe { libc::_exit(7) };
        }
    }
}

/// The child goes on as the thread that calls wakers. It knows tasks of its parent's that were due before.
#[test]
fn a_waker_that_forks_has_its_child_call_no_waker_of_its_parents() {
    own_process!();
    let (first, second) = (one_cpu(Memory::anonymous(PAGES)), one_cpu(Memory::anonymous(PAGES)));
    let pages = [all_pages(&first), all_pages(&second)];
    let ends = Arc::new(EndsChild::default());
    let mut known = pin!(first.alloc_bulk_async::<_, Page>(Bulk::exact(1)));
    let mut poll_known = || assert!(poll_once(known.as_mut(), &ends.clone().into()).is_pending());
    poll_known();
    until("the first wake-up", || ends.is_called.load(SeqCst));
    poll_known();
    let forks = Arc::new(Forks::default());
    let mut future = pin!(second.alloc_bulk_async::<_, Page>(Bulk::exact(1)));
    assert!(poll_once(future.as_mut(), &forks.clone().into()).is_pending());
    until("the fork", || {
        poll_known();
        forks.child.get().is_some()
    });
    assert_eq!(wait_for(*forks.child.get().unwrap()), libc::SIGALRM, "the child called a waker of its parent's");
    drop(pages);
}

/// A waker whose drop panics, as that of each of its clones does. To wake does not drop it.
fn panics_when_dropped() -> Waker {
    const TABLE: RawWakerVTable = RawWakerVTable::new(
        |_| RawWaker::new(std::ptr::null(), &TABLE),
        |_| (),
        |_| (),
        |_| panic!("a waker that panics on purpose"),
    );
    // SAFETY: the functions use no data.
    unsafe { Waker::from_raw(RawWaker::new(std::ptr::null(), &TABLE)) }
}

#[test]
fn a_waker_whose_drop_panics_leaves_nothing_charged() {
    let allocator = one_cpu(Memory::anonymous(PAGES));
    for is_exact in [true, false] {
        // The thread that calls wakers may take the waker before the poll drops it.
        until("a poll that drops the waker", || {
            let account = Account::new(PageCount::new(100));
            let mut future: Pin<Box<dyn Future<Output = _>>> = match is_exact {
                true => Box::pin(allocator.alloc_bulk_async::<_, Page>(Bulk::exact(4).account(&account))),
                false => Box::pin(allocator.alloc_bulk_async::<_, Page>(Bulk::up_to(4).account(&account))),
            };
            let mut pages = all_pages(&allocator);
            assert!(poll_once(future.as_mut(), Waker::noop()).is_pending());
            pages.truncate(PAGES - 4);
            let waker = ManuallyDrop::new(panics_when_dropped());
            let poll = catch_unwind(AssertUnwindSafe(|| poll_once(future.as_mut(), &waker).map(drop)));
            drop((future, pages));
            assert_all_back(&allocator);
            assert_eq!(account.charged().get(), if poll.is_ok() { 4 } else { 0 });
            poll.is_err()
        });
    }
}

#[test]
fn futures_are_send() {
    fn is_send<T: Send>(_: &T) -> bool {
        true
    }
    let allocator = allocator(8);
    let pool = Arc::new(Mempool::pages(&allocator, 1).unwrap());
    let sent = (
        is_send(&allocator.alloc_bulk_async::<_, Page>(Bulk::exact(1))),
        is_send(&pool.take_async(Bulk::exact(1))),
        is_send(&pool.take_async_owned(Bulk::exact(1))),
    );
    assert_eq!(sent, (true, true, true));
}
