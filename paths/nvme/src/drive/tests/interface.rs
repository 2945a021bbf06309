use std::future::Future;
use std::mem;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use super::*;

/// The page of the pool of short lists.
const LISTS: usize = 1;

/// Pages that are handed out.
fn held(dma: &Dma) -> usize {
    dma.allocator().validate().unwrap().handed_out
}

fn opened(behaviour: Behaviour, settings: Settings) -> (Fake, Dma, Drive) {
    let (fake, dma) = (Fake::with(behaviour, BLOCKS, 1), dma(PAGES));
    let drive = Drive::on_fake(&dma, &fake, settings).unwrap();
    (fake, dma, drive)
}

/// Compiles only if they can be moved to, or used by, other threads as documented.
#[test]
fn a_queue_can_be_sent_and_a_drive_shared() {
    fn is_send<T: Send>() {}
    fn is_sync<T: Sync>() {}
    is_send::<Queue>();
    is_send::<Drive>();
    is_sync::<Drive>();
    is_send::<Request>();
    is_send::<Done>();
    is_sync::<Dma>();
}

/// Each thread writes its own blocks and reads them back, while the controller loses commands and is reset for it.
#[test]
fn threads_with_a_queue_each_lose_nothing_in_resets() {
    for has_shadows in [false, true] {
        threads(has_shadows);
    }
}

fn threads(has_shadows: bool) {
    let fate = |nth| if nth % 151 == 50 { Fate::Lost } else { Fate::Done };
    let behaviour = Behaviour { fate: Box::new(fate), has_shadows, ..Behaviour::default() };
    let (fake, _dma, drive) = opened(behaviour, settings(4, 8));
    std::thread::scope(|scope| {
        for nth in 0..4u64 {
            let (drive, queue) = (&drive, drive.queue().unwrap());
            scope.spawn(move || {
                let (mut done, mut next) = (Vec::new(), 0);
                while next < 100 || queue.out() > 0 {
                    while next < 100 && queue.has_room() {
                        let mut buffer = drive.buffer(BLOCK).unwrap();
                        buffer.copy_from(&[(next ^ nth) as u8; BLOCK]);
                        match queue.submit(Request::write(1000 * nth + next, buffer), next) {
                            Ok(()) => next += 1,
                            // Another thread's reset has filled the queue with what is tried again.
                            Err(refused) => assert!(matches!(refused.error, Error::Busy(_)), "{refused}"),
                        }
                    }
                    queue.wait(NAP, &mut done).unwrap();
                }
                let mut tags: Vec<_> = done.iter().map(|done| done.tag).collect();
                tags.sort_unstable();
                assert!(tags.into_iter().eq(0..100) && done.iter().all(|done| done.result.is_ok()));
                for lba in 0..100 {
                    assert_eq!(queue.read(1000 * nth + lba, BLOCK).unwrap().to_vec(), [(lba ^ nth) as u8; BLOCK]);
                }
            });
        }
    });
    let counts = drive.shut_down().unwrap();
    assert!(counts.resets > 0 && counts.retries > 0, "{counts:?}");
    assert_eq!(fake.state().complaints, Vec::<String>::new());
}

#[test]
fn a_queue_has_one_owner_and_can_be_had_again() {
    let (_fake, _dma, drive) = opened(Behaviour::default(), settings(2, 4));
    let (first, _second) = (drive.queue().unwrap(), drive.queue().unwrap());
    assert!(drive.queue().err().unwrap().to_string().starts_with("all 2 queues are taken"));
    drop(first);
    drive.queue().unwrap();
}

/// The fake reads and writes the buffers later: a page that was freed meanwhile would be another owner's.
#[test]
fn buffers_of_a_dropped_queue_or_future_stay_until_their_requests_are_finished() {
    for forgets in [false, true] {
        let behaviour = Behaviour { fate: Box::new(|_| Fate::Lost), ..Behaviour::default() };
        let (fake, dma, drive) = opened(behaviour, settings(1, 8));
        let before = held(&dma);
        let queue = drive.queue().unwrap();
        for tag in 0..4 {
            queue.submit(Request::read(tag, drive.buffer(64 << 10).unwrap()), tag).unwrap();
        }
        {
            let mut future = Box::pin(queue.start(Request::read(9, drive.buffer(64 << 10).unwrap())));
            assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            if forgets {
                mem::forget(future);
            }
        }
        queue.round().unwrap();
        while fake.state().lost() < 5 {
            _ = drive.now();
        }
        drop(queue);
        assert!(held(&dma) >= before + 5 * 16, "the controller has 5 buffers of 16 pages");
        // The next owner of the pair sees none of them.
        fake.state().find();
        let (queue, mut done) = (drive.queue().unwrap(), Vec::new());
        while queue.out() > 0 {
            queue.wait(NAP, &mut done).unwrap();
        }
        assert!(done.is_empty());
        let leaked = if forgets { 16 } else { 0 };
        assert_eq!(held(&dma), before + leaked + LISTS);
        assert_eq!(fake.state().complaints, Vec::<String>::new());
    }
}

/// Nobody can tell whether it still writes: the memory is never freed, and the requests come back without it.
#[test]
fn buffers_of_a_controller_that_cannot_be_stopped_are_never_freed() {
    let lie = |_, words: &mut [u32; 4]| words[3] |= 0xffff;
    let fate = |nth| if nth < 3 { Fate::Lost } else { Fate::Done };
    let behaviour = Behaviour { fate: Box::new(fate), lie: Box::new(lie), ..Behaviour::default() };
    let (fake, dma, drive) = opened(behaviour, settings(1, 8));
    {
        let mut state = fake.state();
        (state.behaviour.is_stuck, state.behaviour.can_reset, state.behaviour.is_free) = (true, false, true);
    }
    let before = held(&dma);
    let (queue, mut done) = (drive.queue().unwrap(), Vec::new());
    for tag in 0..4 {
        queue.submit(Request::read(tag, drive.buffer(64 << 10).unwrap()), tag).unwrap();
    }
    let error = loop {
        if let Err(error) = queue.wait(NAP, &mut done) {
            break error;
        }
    };
    assert!(matches!(error, Error::Broken(_)), "{error}");
    assert_eq!(done.len(), 4, "all have come back");
    for done in done.drain(..) {
        assert!(matches!(done.result, Err(Error::Stopped(_))));
        assert!(done.request.buffer().is_none());
    }
    let refused = queue.submit(Request::flush(), 0).unwrap_err();
    assert!(matches!(refused.error, Error::Stopped(_)), "{refused}");
    assert!(matches!(drive.shut_down(), Err(Error::Stopped(_))));
    drop((queue, drive));
    assert!(held(&dma) >= before + 4 * 16, "the buffers are not free");
}

/// A drive that fails for good ends the requests of all threads, with their buffers, and wakes futures.
#[test]
fn a_failed_drive_returns_every_request_of_every_queue() {
    let lie = |nth, words: &mut [u32; 4]| words[3] |= if nth == 5 { 0xffff } else { 0 };
    let fate = |nth| if nth < 5 { Fate::Lost } else { Fate::Done };
    let behaviour = Behaviour { fate: Box::new(fate), lie: Box::new(lie), ..Behaviour::default() };
    let (_fake, _dma, drive) = opened(behaviour, settings(2, 8));
    let (first, second, mut done) = (drive.queue().unwrap(), drive.queue().unwrap(), Vec::new());
    for tag in 0..4 {
        first.submit(Request::read(tag, drive.buffer(BLOCK).unwrap()), tag).unwrap();
    }
    first.ring();
    let (woken, mut awaited) = (Woken::new(), pin!(first.start(Request::read(4, drive.buffer(BLOCK).unwrap()))));
    let waker = Waker::from(Arc::clone(&woken));
    assert!(awaited.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    let error = second.run(Request::read(6, drive.buffer(BLOCK).unwrap())).result.unwrap_err();
    assert!(matches!(error, Error::Stopped(_)), "{error}");
    assert_eq!(woken.count(), 1);
    let Poll::Ready(ended) = awaited.as_mut().poll(&mut Context::from_waker(&waker)) else { panic!("it is over") };
    assert!(ended.result.is_err() && ended.request.buffer().is_some());
    assert_eq!(first.poll(&mut done).unwrap(), 4);
    assert!(done.iter().all(|done| done.result.is_err() && done.request.buffer().is_some()));
    assert!(matches!(first.poll(&mut done), Err(Error::Stopped(_))));
}

/// Counts its wakes.
struct Woken(AtomicU64);

impl Woken {
    fn new() -> Arc<Self> {
        Arc::new(Self(AtomicU64::new(0)))
    }
    fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// More futures than the queue has room for, polled by one task.
#[test]
fn futures_wait_for_room_and_all_become_ready() {
    let (fake, _dma, drive) = opened(Behaviour::default(), settings(1, 4));
    let queue = drive.queue().unwrap();
    let read = |lba| queue.start(Request::read(lba, drive.buffer(BLOCK).unwrap()));
    let mut futures: Vec<Option<Pin<Box<_>>>> = (0..20).map(|lba| Some(Box::pin(read(lba)))).collect();
    let mut lbas = Vec::new();
    queue.block_on(std::future::poll_fn(|context| {
        for slot in &mut futures {
            if let Some(future) = slot
                && let Poll::Ready(done) = future.as_mut().poll(context)
            {
                lbas.push(done.ok().unwrap().lba());
                *slot = None;
            }
        }
        if lbas.len() == 20 { Poll::Ready(()) } else { Poll::Pending }
    }));
    lbas.sort_unstable();
    assert!(lbas.into_iter().eq(0..20));
    assert_eq!(fake.state().complaints, Vec::<String>::new());
}

/// Only polls of the queue make progress here; the futures' wakers are called then.
#[test]
fn a_poll_of_the_queue_wakes_futures() {
    let (_fake, _dma, drive) = opened(Behaviour::default(), settings(1, 4));
    let queue = drive.queue().unwrap();
    let (woken, mut future) = (Woken::new(), pin!(queue.start(Request::read(1, drive.buffer(BLOCK).unwrap()))));
    let waker = Waker::from(Arc::clone(&woken));
    if future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
        let mut done = Vec::new();
        while woken.count() == 0 {
            queue.poll(&mut done).unwrap();
        }
        assert!(done.is_empty(), "it is the future's");
        assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready());
    }
}

/// A waker that uses the queue at once, as some executors do.
#[test]
fn a_waker_may_use_the_queue() {
    struct Reenters(Mutex<Queue>);
    impl Wake for Reenters {
        fn wake(self: Arc<Self>) {
            self.0.lock().unwrap().poll(&mut Vec::new()).unwrap();
        }
    }
    let (_fake, _dma, drive) = opened(Behaviour::default(), settings(2, 4));
    let queue = drive.queue().unwrap();
    let waker = Waker::from(Arc::new(Reenters(Mutex::new(drive.queue().unwrap()))));
    let mut future = pin!(queue.start(Request::read(1, drive.buffer(BLOCK).unwrap())));
    while future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
        queue.poll(&mut Vec::new()).unwrap();
    }
}

/// Device addresses of other memory would let a drive write there.
#[test]
fn a_buffer_of_another_dma_is_refused() {
    let (_fake, _dma, drive) = opened(Behaviour::default(), settings(1, 4));
    let (_other_fake, _other_dma, other) = opened(Behaviour::default(), settings(1, 4));
    let done = drive.queue().unwrap().run(Request::write(0, other.buffer(BLOCK).unwrap()));
    assert!(done.result.unwrap_err().to_string().contains("the buffer is another drive's"));
    let page = other.core.memory().buffer(BLOCK, BLOCK, Want::Now);
    assert!(page.is_ok());
    let page = Allocator::builder().memory(Arena::anonymous(1024)).build().unwrap();
    let page = page.alloc_page(pagemill::Gfp::KERNEL).unwrap();
    assert!(drive.buffer_of(vec![page]).is_err());
}

/// Requests that cannot be are refused before the drive sees them.
#[test]
fn impossible_requests_are_refused() {
    let (fake, _dma, drive) = opened(Behaviour { mdts: 1, ..Behaviour::default() }, settings(1, 4));
    let queue = drive.queue().unwrap();
    let all = BLOCKS as u64;
    let range = |lba, blocks| vec![BlockRange { lba, blocks }];
    for (request, words) in [
        (Request::read(all, drive.buffer(BLOCK).unwrap()), "namespace 1 has 20000"),
        (Request::read(u64::MAX, drive.buffer(BLOCK).unwrap()), "namespace 1 has 20000"),
        (Request::read(0, drive.buffer(3 * PAGE).unwrap()), "12288 bytes: take a multiple of 512, up to 8192"),
        (Request::write_zeroes(BlockRange { lba: 0, blocks: 0 }), "1 to 2048 blocks"),
        (Request::write_zeroes(BlockRange { lba: 0, blocks: 2049 }), "1 to 2048 blocks"),
        (Request::write_zeroes(BlockRange { lba: all - 1, blocks: 2 }), "namespace 1 has 20000"),
        (Request::deallocate(Vec::new()), "1 to 4 ranges of 1 to 1000 blocks, 2000 in all"),
        (Request::deallocate(vec![BlockRange { lba: 0, blocks: 1 }; 5]), "1 to 4 ranges"),
        (Request::deallocate(vec![BlockRange { lba: 0, blocks: u64::MAX }; 2]), "1 to 1000 blocks"),
        (Request::deallocate(range(0, 1001)), "1 to 1000 blocks"),
        (Request::deallocate(vec![BlockRange { lba: 0, blocks: 900 }; 3]), "2000 in all"),
        (Request::deallocate(range(all - 1, 2)), "namespace 1 has 20000"),
        (Request::deallocate(range(u64::MAX, 1)), "namespace 1 has 20000"),
    ] {
        let error = queue.run(request).result.unwrap_err();
        assert!(matches!(error, Error::Request(_)) && error.to_string().contains(words), "{error}");
    }
    assert_eq!(fake.state().ios, 0);
    assert!(drive.buffer(100).is_err() && drive.buffer(0).is_err());
}

#[test]
fn a_full_queue_returns_the_request() {
    let (_fake, _dma, drive) = opened(Behaviour::default(), settings(1, 2));
    let queue = drive.queue().unwrap();
    let request = |lba| Request::read(lba, drive.buffer(BLOCK).unwrap());
    (0..2).for_each(|lba| queue.submit(request(lba), lba).unwrap());
    let refused = queue.submit(request(7), 7).unwrap_err();
    assert!(matches!(refused.error, Error::Busy(_)) && refused.request.lba() == 7, "{refused}");
}
