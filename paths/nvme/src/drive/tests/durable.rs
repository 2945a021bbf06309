use super::*;
use crate::spec::{FUA, io as op};

/// A controller with a write cache, whose shutdown takes so many seconds, and which says so many.
fn slow(takes_s: u64, says_us: u32) -> Behaviour {
    let identify = move |what, page: &mut [u8; PAGE]| {
        if what == admin::CNS_CONTROLLER {
            page[88..92].copy_from_slice(&says_us.to_le_bytes());
        }
    };
    Behaviour { shutdown: Duration::from_secs(takes_s), identify: Box::new(identify), ..Behaviour::default() }
}

fn written(behaviour: Behaviour) -> (Fake, Rig) {
    let (fake, rig) = start(behaviour, PAGES, settings(3, 4));
    let rig = rig.unwrap();
    let buffer = rig.drive.buffer(BLOCK).unwrap();
    rig.queue.write(0, buffer).unwrap();
    (fake, rig)
}

/// As long as it says, and at least five seconds. The fake complains of a shutdown before its queues are deleted, and of
/// a completion queue that is deleted first.
#[test]
fn a_clean_stop_waits_until_the_write_cache_is_on_the_medium() {
    for (takes_s, says_us) in [(0, 0), (4, 0), (4, 1), (59, 60_000_000), (290, u32::MAX)] {
        for is_dropped in [false, true] {
            let (fake, rig) = written(slow(takes_s, says_us));
            if is_dropped {
                drop(rig);
            } else {
                rig.shut_down().unwrap();
            }
            let state = fake.state();
            assert_eq!((state.lost_writes, state.shutdowns, state.resets), (0, 1, 0), "{takes_s} s, {says_us} us");
            assert_eq!(state.complaints, Vec::<String>::new());
            assert_eq!(state.queues(), 0);
        }
    }
}

#[test]
fn a_shutdown_that_takes_too_long_is_reported() {
    for says_us in [0, u32::MAX] {
        let (fake, rig) = written(slow(1000, says_us));
        let error = rig.shut_down().unwrap_err().to_string();
        assert!(error.contains("it did not shut down: what it had in its write cache may be lost"), "{error}");
        assert_eq!(fake.state().lost_writes, 1);
    }
}

/// Also by a thread that does not wait for what it has submitted.
#[test]
fn a_shutdown_waits_for_requests_under_way_and_refuses_others() {
    let (fake, rig) = start(Behaviour::default(), PAGES, settings(2, 8));
    let Rig { drive, queue } = rig.unwrap();
    for lba in 0..16 {
        queue.submit(Request::write(lba, drive.buffer(BLOCK).unwrap()), lba).unwrap();
    }
    drive.shut_down().unwrap();
    assert!(matches!(queue.submit(Request::flush(), 0).unwrap_err().error, Error::Stopped(_)));
    assert!(matches!(drive.queue(), Err(Error::Stopped(_))));
    let mut done = Vec::new();
    assert_eq!(queue.poll(&mut done).unwrap(), 16);
    assert!(done.iter().all(|done| done.result.is_ok()));
    assert!(matches!(queue.poll(&mut done), Err(Error::Stopped(_))));
    let error = drive.shut_down().unwrap_err();
    assert_eq!(error.to_string(), "the drive was stopped: it was shut down");
    assert_eq!(fake.state().lost_writes, 0);
}

#[test]
fn a_durable_write_has_the_bit_that_says_so() {
    let (fake, rig) = start(Behaviour::default(), PAGES, settings(1, 4));
    let rig = rig.unwrap();
    let buffer = rig.drive.buffer(2 * BLOCK).unwrap();
    let buffer = rig.queue.run(Request::write(0, buffer).durable()).ok().unwrap().into_buffer().unwrap();
    let zeros = BlockRange { lba: 5, blocks: 3 };
    rig.queue.run(Request::write_zeroes(zeros).durable()).ok().unwrap();
    rig.queue.write(0, buffer).unwrap();
    // A bit that is reserved there.
    rig.queue.run(Request::flush().durable()).ok().unwrap();
    let seen = [(op::WRITE, FUA | 1), (op::WRITE_ZEROES, FUA | 2), (op::WRITE, 1), (op::FLUSH, 0)];
    assert_eq!(fake.state().seen, seen);
}

#[test]
fn zeros_and_deallocation_reach_the_blocks_that_were_named_and_no_others() {
    let (fake, rig) = start(Behaviour::default(), PAGES, settings(1, 4));
    let rig = rig.unwrap();
    fake.state().disk.fill(1);
    rig.queue.run(Request::write_zeroes(BlockRange { lba: 10, blocks: 2048 })).ok().unwrap();
    let ranges = [(0, 1), (3000, 1000), (19_999, 1)].map(|(lba, blocks)| BlockRange { lba, blocks });
    rig.queue.run(Request::deallocate(ranges.to_vec())).ok().unwrap();
    let mut wanted = vec![1; BLOCKS * BLOCK];
    wanted[10 * BLOCK..2058 * BLOCK].fill(0);
    for BlockRange { lba, blocks } in ranges {
        wanted[lba as usize * BLOCK..][..blocks as usize * BLOCK].fill(0xdd);
    }
    assert!(fake.state().disk == wanted);
    assert_eq!(fake.state().complaints, Vec::<String>::new());
}

/// They are repeated after a reset, as reads and writes are.
#[test]
fn zeros_and_deallocation_survive_resets() {
    let fate = |nth| if nth % 3 == 1 { Fate::Lost } else { Fate::Done };
    let (fake, rig) = start(Behaviour { fate: Box::new(fate), ..Behaviour::default() }, PAGES, settings(1, 4));
    let rig = rig.unwrap();
    fake.state().disk.fill(1);
    for lba in 0..8 {
        let range = BlockRange { lba: 100 * lba, blocks: 100 };
        let request = if lba % 2 == 0 { Request::write_zeroes(range) } else { Request::deallocate(vec![range]) };
        rig.queue.run(request).ok().unwrap();
    }
    assert!(rig.counts().resets > 0);
    let state = fake.state();
    assert!((0..800 * BLOCK).all(|at| state.disk[at] == if (at / BLOCK / 100).is_multiple_of(2) { 0 } else { 0xdd }));
}

#[test]
fn commands_that_the_controller_lacks_are_refused() {
    let identify = |what, page: &mut [u8; PAGE]| {
        if what == admin::CNS_CONTROLLER {
            page[520] = 0;
        }
    };
    let behaviour = Behaviour { identify: Box::new(identify), ..Behaviour::default() };
    let (fake, rig) = start(behaviour, PAGES, settings(1, 4));
    let rig = rig.unwrap();
    let range = BlockRange { lba: 0, blocks: 1 };
    for request in [Request::write_zeroes(range), Request::deallocate(vec![range])] {
        assert!(matches!(rig.queue.run(request).result, Err(Error::Unsupported(_))));
    }
    assert_eq!(fake.state().ios, 0);
}
