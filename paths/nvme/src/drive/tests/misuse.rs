use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Wake, Waker};

use super::*;

/// How long a command may take (`settings`).
const LIMIT: Duration = Duration::from_secs(1);

/// A waker that tells by its owners how often it was cloned.
struct Woken(Mutex<u64>);

impl Woken {
    fn new() -> (Arc<Self>, Waker) {
        let woken = Arc::new(Self(Mutex::new(0)));
        (Arc::clone(&woken), Waker::from(woken))
    }
    fn count(&self) -> u64 {
        *self.0.lock().unwrap()
    }
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        *self.0.lock().unwrap() += 1;
    }
}

fn opened(behaviour: Behaviour, settings: Settings) -> (Fake, Drive) {
    let fake = Fake::with(behaviour, BLOCKS, 1);
    let drive = Drive::on_fake(&dma(PAGES), &fake, settings).unwrap();
    (fake, drive)
}

/// The first command is lost; the others are done.
fn losing_one() -> Behaviour {
    Behaviour { fate: Box::new(|nth| if nth == 0 { Fate::Lost } else { Fate::Done }), ..Behaviour::default() }
}

fn read(drive: &Drive, lba: u64) -> Request {
    Request::read(lba, drive.buffer(BLOCK).unwrap())
}

/// A cache of pages that looks at the drive when it has to free some.
struct Cache(Drive, Mutex<Vec<pagemill::Page>>);

impl pagemill::Shrinker for Cache {
    fn shrink(&self, _wanted: pagemill::Shrink) -> usize {
        assert_eq!(self.0.counts().resets, 0);
        self.1.lock().unwrap().drain(..).count()
    }
}

/// It runs on the thread that submits a request, in the middle of that.
#[test]
fn a_shrinker_may_use_the_drive_whose_request_needs_memory() {
    let allocator = Allocator::builder().memory(Arena::anonymous(512)).build().unwrap();
    let drive = Drive::on_fake(&Dma::new(&allocator), &Fake::new(BLOCKS), settings(1, 4)).unwrap();
    let (queue, buffer, mut pages) = (drive.queue().unwrap(), drive.buffer(3 * PAGE).unwrap(), Vec::new());
    while let Ok(page) = allocator.alloc_page(pagemill::Gfp::NOWAIT) {
        pages.push(page);
    }
    let cache = Arc::new(Cache(drive.clone(), Mutex::new(pages)));
    let registered = allocator.register_shrinker(cache.clone());
    queue.run(Request::read(0, buffer)).ok().unwrap();
    drop(registered);
    assert!(cache.1.lock().unwrap().is_empty(), "the list of pages needed memory");
}

/// The slot of a finished command is free only when its Abort is answered, and no request comes back then.
#[test]
fn a_future_that_waits_for_room_is_woken_when_an_abort_is_answered() {
    let (fake, drive) = opened(Behaviour { holds_aborts: true, ..losing_one() }, settings(1, 1));
    let (queue, mut done) = (drive.queue().unwrap(), Vec::new());
    queue.submit(read(&drive, 0), 0).unwrap();
    while drive.counts().aborts == 0 {
        queue.poll(&mut done).unwrap();
    }
    fake.state().find();
    while done.is_empty() {
        queue.poll(&mut done).unwrap();
    }
    let ((woken, waker), mut future) = (Woken::new(), pin!(queue.start(read(&drive, 1))));
    assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    fake.state().behaviour.holds_aborts = false;
    while queue.out() > 0 {
        queue.poll(&mut done).unwrap();
    }
    assert_eq!((woken.count(), queue.has_room()), (1, true));
}

/// Only the thread of the other queue sees that the requests of this one have failed.
#[test]
fn a_future_that_waits_for_room_is_woken_after_a_reset_by_another_queue() {
    let behaviour = Behaviour { fate: Box::new(|_| Fate::Lost), ..Behaviour::default() };
    let (_fake, drive) = opened(behaviour, settings(2, 1));
    let (here, there, mut done) = (drive.queue().unwrap(), drive.queue().unwrap(), Vec::new());
    there.submit(read(&drive, 0), 0).unwrap();
    there.poll(&mut done).unwrap();
    let ((_, first_waker), mut first) = (Woken::new(), pin!(here.start(read(&drive, 1))));
    let ((woken, waker), mut second) = (Woken::new(), pin!(here.start(read(&drive, 2))));
    assert!(first.as_mut().poll(&mut Context::from_waker(&first_waker)).is_pending());
    assert!(second.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    let mut resets = 0;
    while here.out() > 0 {
        there.poll(&mut done).unwrap();
        if drive.counts().resets > resets && here.out() > 0 {
            resets = drive.counts().resets;
            here.poll(&mut done).unwrap(); // What was interrupted goes out again.
        }
    }
    let before = woken.count();
    here.poll(&mut done).unwrap();
    assert_eq!((woken.count(), here.has_room()), (before + 1, true));
}

/// Each future is polled only when it was woken, on three threads, while commands are lost, the controller is reset, and
/// its health is read.
#[test]
fn no_future_is_forgotten_on_threads_with_resets() {
    // Three: a fourth could be the last attempt of a request.
    let fate = |nth| if [7, 38, 69].contains(&nth) { Fate::Lost } else { Fate::Done };
    let (fake, drive) = opened(Behaviour { fate: Box::new(fate), ..Behaviour::default() }, settings(3, 2));
    std::thread::scope(|scope| {
        for nth in 0..3 {
            let (drive, queue) = (&drive, drive.queue().unwrap());
            scope.spawn(move || {
                let mut futures: Vec<_> = (0..100)
                    .map(|lba| {
                        let (woken, waker) = Woken::new();
                        (Some(Box::pin(queue.start(read(drive, 1000 * nth + lba)))), woken, waker, None)
                    })
                    .collect();
                let mut quiet = 0;
                while futures.iter().any(|(future, ..)| future.is_some()) {
                    let mut is_any_woken = false;
                    for (slot, woken, waker, seen) in &mut futures {
                        let Some(future) = slot else { continue };
                        if seen.replace(woken.count()) == Some(woken.count()) {
                            continue;
                        }
                        is_any_woken = true;
                        if let Poll::Ready(done) = future.as_mut().poll(&mut Context::from_waker(waker)) {
                            assert!(done.result.is_ok());
                            *slot = None;
                        }
                    }
                    queue.poll(&mut Vec::new()).unwrap();
                    drive.health().unwrap();
                    quiet = if is_any_woken || queue.out() > 0 { 0 } else { quiet + 1 };
                    assert!(quiet < 3, "nothing is out, and nobody is woken");
                }
            });
        }
    });
    let counts = drive.shut_down().unwrap();
    assert!(counts.resets > 0 && counts.retries > 0, "{counts:?}");
    assert_eq!(fake.state().complaints, Vec::<String>::new());
}

/// As by an executor that polls all its futures in each turn.
#[test]
fn a_future_that_is_polled_often_while_it_waits_for_room_keeps_no_more_wakers() {
    let (_fake, drive) = opened(Behaviour { fate: Box::new(|_| Fate::Lost), ..Behaviour::default() }, settings(1, 1));
    let queue = drive.queue().unwrap();
    queue.submit(read(&drive, 0), 0).unwrap();
    let ((woken, waker), mut future) = (Woken::new(), pin!(queue.start(read(&drive, 1))));
    for _ in 0..100 {
        assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    }
    assert!(Arc::strong_count(&woken) < 5, "{} wakers", Arc::strong_count(&woken));
}

/// Two drives on one controller: the bells of one would send it stale commands of the other, with pages that have been
/// freed.
#[test]
fn a_drive_that_is_open_cannot_be_opened_again() {
    let (fake, dma) = (Fake::new(BLOCKS), dma(PAGES));
    let drive = Drive::on_fake(&dma, &fake, settings(1, 4)).unwrap();
    assert!(matches!(Drive::on_fake(&dma, &fake, settings(1, 4)), Err(Error::InUse { .. })));
    let queue = drive.queue().unwrap();
    drop(drive);
    assert!(matches!(Drive::on_fake(&dma, &fake, settings(1, 4)), Err(Error::InUse { .. })));
    drop(queue);
    Drive::on_fake(&dma, &fake, settings(1, 4)).unwrap();
}

/// The command comes back by itself, its Abort does not, and an older admin command has not been answered either.
#[test]
fn an_unanswered_abort_ends_in_a_reset_although_the_health_log_was_not_answered() {
    let (fake, drive) = opened(losing_one(), settings(1, 4));
    let admins = std::mem::replace(&mut fake.state().behaviour.admins, 0);
    assert!(matches!(drive.health(), Err(Error::Silent(_))));
    let (queue, mut done) = (drive.queue().unwrap(), Vec::new());
    queue.submit(read(&drive, 0), 0).unwrap();
    while drive.counts().aborts == 0 {
        queue.poll(&mut done).unwrap();
    }
    {
        let mut state = fake.state();
        state.find();
        state.behaviour.holds_aborts = true;
        state.behaviour.admins = admins;
    }
    let begin = drive.now();
    while queue.out() > 0 {
        queue.poll(&mut done).unwrap();
        assert!(drive.now() - begin < 5 * LIMIT, "its slot is taken for ever");
    }
    assert!(done[0].result.is_ok() && drive.counts().resets == 1);
}

/// There is no room left for an Abort.
#[test]
fn a_late_command_ends_in_a_reset_although_the_admin_queue_is_full() {
    let (fake, drive) = opened(losing_one(), settings(1, 4));
    let admins = std::mem::replace(&mut fake.state().behaviour.admins, 0);
    (0..20).for_each(|_| assert!(matches!(drive.health(), Err(Error::Silent(_)))));
    fake.state().behaviour.admins = admins;
    let (queue, mut done) = (drive.queue().unwrap(), Vec::new());
    queue.submit(read(&drive, 0), 0).unwrap();
    let begin = drive.now();
    while queue.out() > 0 {
        queue.poll(&mut done).unwrap();
        assert!(drive.now() - begin < 5 * LIMIT, "it waits for ever");
    }
    assert!(done[0].result.is_ok() && drive.counts().resets == 1);
}

/// What was in its write cache may be lost.
#[test]
fn a_shutdown_of_a_controller_that_somebody_else_has_reset_is_an_error() {
    let (fake, drive) = opened(Behaviour::default(), settings(1, 4));
    drive.queue().unwrap().write(0, drive.buffer(BLOCK).unwrap()).unwrap();
    fake.state().reset();
    let error = drive.shut_down().unwrap_err().to_string();
    assert!(error.contains("somebody else has reset the controller") && error.contains("write cache"), "{error}");
}

#[test]
fn a_reset_that_was_asked_for_is_left_out_after_the_end() {
    let (_fake, drive) = opened(Behaviour::default(), Settings { reset_every: Some(1), ..settings(1, 4) });
    let queue = drive.queue().unwrap();
    queue.read(0, BLOCK).unwrap();
    drive.shut_down().unwrap();
    let begin = drive.now();
    let error = queue.poll(&mut Vec::new()).unwrap_err();
    assert_eq!(error.to_string(), "the drive was stopped: it was shut down");
    assert!(drive.now() - begin < LIMIT, "it asked a controller that is off");
}

#[test]
fn a_command_may_take_for_ever() {
    let (_fake, drive) = opened(Behaviour::default(), Settings { timeout: Duration::MAX, ..settings(1, 4) });
    drive.queue().unwrap().read(0, BLOCK).unwrap();
}

#[test]
fn impossible_lengths_of_buffers_are_refused() {
    let (_fake, drive) = opened(Behaviour::default(), settings(1, 4));
    let queue = drive.queue().unwrap();
    for len in [0, 100, BLOCK + 1, usize::MAX] {
        let error = queue.buffer(len).unwrap_err().to_string();
        assert!(error.contains("the drive has blocks of 512 bytes"), "{error}");
    }
    let most = usize::MAX / PAGE * PAGE;
    assert!(drive.buffer(most).unwrap_err().to_string().starts_with("no memory for a single request"));
    assert!(queue.buffer(most).unwrap().is_some_and(|buffer| buffer.len() < PAGES * PAGE), "it is shorter");
}
