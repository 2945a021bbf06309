use super::*;
use crate::fake::ABORTS;

/// How long a command may take (`settings`).
const LIMIT: Duration = Duration::from_secs(1);

/// The n-th command is lost.
fn losing(nth: u64) -> Behaviour {
    let fate = move |this| if this == nth { Fate::Lost } else { Fate::Done };
    Behaviour { fate: Box::new(fate), aborts: true, ..Behaviour::default() }
}

/// Submits reads of a block while there is room.
fn fill(drive: &mut Rig) {
    while drive.has_room() {
        drive.read(0);
    }
    drive.ring();
}

/// Keeps the drive busy until its clock shows `end`, then waits for all requests. After each wait, `after` gets the
/// number of requests that have come back. None fails.
fn keep_busy(drive: &mut Rig, end: Duration, mut after: impl FnMut(&mut Rig, usize)) {
    let mut done = Vec::new();
    loop {
        if drive.now() < end {
            fill(drive);
        } else if drive.out() == 0 {
            return;
        }
        drive.wait(&mut done).unwrap();
        after(drive, done.len());
        for done in done.drain(..) {
            done.result.unwrap();
        }
    }
}

#[test]
fn a_lost_command_is_aborted_in_time_while_others_complete() {
    for vectors in [0, 3] {
        let (fake, drive) = start(Behaviour { vectors, ..losing(5) }, PAGES, settings(2, 8));
        let mut drive = drive.unwrap();
        let (mut aborted, begin) = (None, drive.now());
        keep_busy(&mut drive, begin + 5 * LIMIT, |drive, _| {
            if drive.counts().aborts == 1 {
                let now = drive.now();
                aborted.get_or_insert(now - begin);
            }
        });
        let aborted = aborted.unwrap();
        assert!(aborted > LIMIT && aborted < LIMIT + LIMIT / 4, "{vectors} interrupts: aborted after {aborted:?}");
        let Counts { aborts, retries, resets, .. } = drive.counts();
        assert_eq!((aborts, retries, resets), (1, 1, 0));
        assert_eq!(fake.state().complaints, Vec::<String>::new());
    }
}

/// Commands of the same queue, too. An unanswered Abort ends in a reset, in time.
#[test]
fn other_commands_complete_while_an_abort_is_unanswered() {
    for (queues, vectors) in [(1, 0), (3, 0), (3, 4)] {
        let (fake, drive) = start(Behaviour { holds_aborts: true, vectors, ..losing(5) }, PAGES, settings(queues, 8));
        let mut drive = drive.unwrap();
        let (mut meanwhile, mut reset, begin) = (0, None, drive.now());
        keep_busy(&mut drive, begin + 3 * LIMIT, |drive, done| {
            let Counts { aborts, resets, .. } = drive.counts();
            if resets == 1 {
                let now = drive.now();
                reset.get_or_insert(now - begin);
            } else if aborts == 1 {
                meanwhile += done;
            }
        });
        assert!(meanwhile > 50, "{meanwhile} were done while the Abort was out");
        let reset = reset.unwrap();
        assert!(reset > 2 * LIMIT && reset < 2 * LIMIT + LIMIT / 4, "reset after {reset:?}");
        let said = drive.drive.said();
        assert!(said.iter().any(|said| said.contains("no answer to an Abort within 1 s: resetting")), "{said:?}");
        assert_eq!((drive.counts().resets, fake.state().lost()), (1, 0));
    }
}

/// Otherwise the Abort would hit the next command with this number.
#[test]
fn a_number_that_an_abort_names_is_not_used_again_before_its_answer() {
    let (fake, drive) = start(Behaviour { holds_aborts: true, ..losing(0) }, PAGES, settings(1, 1));
    let (mut drive, mut done) = (drive.unwrap(), Vec::new());
    fill(&mut drive);
    while drive.counts().aborts == 0 {
        drive.wait(&mut done).unwrap();
    }
    fake.state().find();
    while done.is_empty() {
        drive.wait(&mut done).unwrap();
    }
    assert!(done[0].result.is_ok());
    drive.wait(&mut done).unwrap();
    assert_eq!((drive.has_room(), drive.out(), done.len()), (false, 1, 1), "its number is still taken");
    fake.state().behaviour.holds_aborts = false;
    while drive.out() > 0 {
        drive.wait(&mut done).unwrap();
    }
    assert!(drive.has_room());
    let end = drive.now() + LIMIT;
    keep_busy(&mut drive, end, |_, _| {});
    let Counts { aborts, retries, resets, .. } = drive.counts();
    assert_eq!((aborts, retries, resets, done.len()), (1, 0, 0, 1));
}

/// Many are lost at once. The fake complains about more Aborts than its limit.
#[test]
fn aborts_stay_within_the_controllers_limit() {
    let fate = |nth| if nth < 10 { Fate::Lost } else { Fate::Done };
    let behaviour = Behaviour { fate: Box::new(fate), aborts: true, holds_aborts: true, ..Behaviour::default() };
    let (fake, drive) = start(behaviour, PAGES, settings(2, 8));
    let (mut drive, other) = (drive.unwrap(), fake.clone());
    keep_busy(&mut drive, 3 * LIMIT, |drive, _| {
        if drive.now() > LIMIT * 3 / 2 && other.state().behaviour.holds_aborts {
            assert_eq!(drive.counts().aborts, ABORTS as u64);
            other.state().behaviour.holds_aborts = false;
        }
    });
    let Counts { aborts, retries, resets, .. } = drive.counts();
    assert_eq!((aborts, retries, resets), (10, 10, 0));
    assert_eq!(fake.state().complaints, Vec::<String>::new());
}

#[test]
fn a_poll_that_finds_nothing_looks_at_one_command_of_each_queue() {
    // Queues of 2048 entries.
    let cap = Behaviour::default().cap | 2047;
    let behaviour = Behaviour { fate: Box::new(|_| Fate::Lost), cap, ..Behaviour::default() };
    let (fake, drive) = start(behaviour, PAGES, Settings { timeout: 100 * LIMIT, ..settings(2, 2000) });
    let (mut drive, mut done) = (drive.unwrap(), Vec::new());
    fill(&mut drive);
    assert_eq!(drive.out(), 4000);
    let looks = |drive: &Rig| drive.queue.looks();
    for _ in 0..10 {
        let before = looks(&drive);
        drive.poll(&mut done).unwrap();
        let looked = looks(&drive) - before;
        assert!(looked <= 2, "it looked at {looked} commands");
    }
    assert_eq!((done.len(), drive.counts().aborts), (0, 0));
    drop(drive);
    assert_eq!(fake.state().complaints, Vec::<String>::new());
}
