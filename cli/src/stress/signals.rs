//! Signals: a thread sends them to the workers, thousands a second, and their handler allocates and frees (C2.5).
//!
//! The handler does only what one may: atomics, the allocator, the ledger. What it keeps lies in a fixed array of
//! addresses, from one signal to another on whatever thread.
use std::io;
use std::sync::atomic::{
    AtomicPtr, AtomicU32, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::SeqCst,
};
use std::time::Duration;

use pagemill::{Bulk, Gfp, Misuse, MisuseKind, Order, Page, free_pages_bulk};
use pagemill_model::{Breach, Fault, Rng, Tag};

use super::round::Round;

const SIGNAL: i32 = libc::SIGUSR1;
/// The handler's number as an owner, above all workers'.
const WHO: u32 = 4095;
/// Pages that it keeps at most.
pub(super) const KEPT: usize = 96;
/// Pages that it asks for at once, at most.
const BULK: usize = 24;
/// What the interrupted code's errno is set to, to see that nothing changes it.
const ERRNO: i32 = 0x5eed;

/// The round that handlers work for; null between rounds.
static ROUND: AtomicPtr<Round> = AtomicPtr::new(std::ptr::null_mut());
/// Handlers that may hold a pointer to it.
static INSIDE: AtomicUsize = AtomicUsize::new(0);

/// Installs the handler and the allocator's hook for misuse, once.
pub(super) fn install() -> io::Result<()> {
    pagemill::on_misuse(on_misuse);
    // SAFETY: a zeroed sigaction is a valid one without flags; the handler does only what is allowed in one.
    let done = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_signal as extern "C" fn(i32) as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(SIGNAL, &action, std::ptr::null_mut())
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Has handlers work for `round` until this is dropped.
pub(super) struct Target;

impl Target {
    pub(super) fn new(round: &Round) -> Self {
        ROUND.store(std::ptr::from_ref(round).cast_mut(), SeqCst);
        Self
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // SeqCst on both sides, here and in `with_round`: either the handler sees null, or it is seen inside.
        ROUND.store(std::ptr::null_mut(), SeqCst);
        while INSIDE.load(SeqCst) != 0 {
            std::thread::yield_now();
        }
    }
}

fn with_round(work: impl FnOnce(&Round)) {
    INSIDE.fetch_add(1, SeqCst);
    // SAFETY: a round that stands here stays until nobody is inside.
    if let Some(round) = unsafe { ROUND.load(SeqCst).as_ref() } {
        work(round);
    }
    INSIDE.fetch_sub(1, SeqCst);
}

/// No worker frees wrongly on purpose: what is refused, or found at hand-out, had two owners.
fn on_misuse(misuse: Misuse) {
    with_round(|round| {
        let fault = if misuse.kind == MisuseKind::Quarantined { Fault::Quarantined } else { Fault::Refused };
        round.fail(Breach { frame: round.ledger.frame_of(misuse.addr), addr: misuse.addr, fault });
    });
}

extern "C" fn on_signal(_: i32) {
    // SAFETY: this thread's own errno, which lives as long as the thread.
    let errno = unsafe { &mut *libc::__errno_location() };
    let before = std::mem::replace(errno, ERRNO);
    with_round(|round| {
        round.counts.signals.fetch_add(1, Relaxed);
        if let Err(breach) = handle(round) {
            round.fail(breach);
        }
        if *errno != ERRNO {
            round.fail(Breach { frame: 0, addr: 0, fault: Fault::Errno });
        }
    });
    *errno = before;
}

/// What one signal does.
fn handle(round: &Round) -> Result<(), Breach> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Relaxed);
    let mut rng = Rng::new(round.seed ^ u64::from(number) << 20);
    let tag: Tag = WHO << 20 | number & 0xf_ffff;
    let gfp = [Gfp::NOWAIT, Gfp::ATOMIC, Gfp::NOWAIT | Gfp::MOVABLE, Gfp::ATOMIC | Gfp::RECLAIMABLE][rng.below(4)];
    if rng.below(2) == 0 {
        return match round.allocator.alloc_page(gfp) {
            Ok(page) => {
                round.counts.handler_pages.fetch_add(1, Relaxed);
                round.ledger.take(page.addr(), Order::ZERO, tag)?;
                keep(round, &mut rng, Some(page))
            }
            Err(_) => keep(round, &mut rng, None),
        };
    }
    let mut slots = [const { None::<Page> }; BULK];
    let n = 1 + rng.below(BULK);
    let Ok(filled) = round.allocator.alloc_pages_bulk_array(Bulk::up_to(n).gfp(gfp), &mut slots) else { return Ok(()) };
    round.counts.handler_pages.fetch_add(filled.added as u64, Relaxed);
    for page in slots.iter().flatten() {
        round.ledger.take(page.addr(), Order::ZERO, tag)?;
    }
    for slot in slots.iter_mut().step_by(3) {
        keep(round, &mut rng, slot.take())?;
    }
    for page in slots.iter().flatten() {
        round.ledger.give(page.addr(), Order::ZERO, tag)?;
    }
    free_pages_bulk(&mut slots);
    Ok(())
}

/// Keeps a page, or none, in a random place; whatever was there is freed.
fn keep(round: &Round, rng: &mut Rng, page: Option<Page>) -> Result<(), Breach> {
    let addr = page.map_or(0, |page| page.into_raw().expose_provenance());
    // Acquire and Release: a page goes from the handler that kept it to the one that frees it.
    release(round, round.kept[rng.below(KEPT)].swap(addr, AcqRel))
}

/// Frees a page that a handler kept; 0 is none.
fn release(round: &Round, addr: usize) -> Result<(), Breach> {
    if addr == 0 {
        return Ok(());
    }
    let (frame, tag) = (round.ledger.frame_of(addr), round.ledger.owner_of(addr));
    if tag >> 20 != WHO {
        return Err(Breach { frame, addr, fault: Fault::OwnedTwice { old: WHO << 20, new: tag } });
    }
    round.ledger.give(addr, Order::ZERO, tag)?;
    let ptr = std::ptr::with_exposed_provenance_mut::<u8>(addr);
    // SAFETY: a handler gave this page up when it put the address into the array, from where it came out once.
    let freed = unsafe { Page::from_raw(ptr) }.and_then(Page::free);
    freed.map_err(|misuse| Breach { frame, addr: misuse.addr, fault: Fault::Refused })
}

/// Frees all that handlers kept. When none runs any more.
pub(super) fn release_all(round: &Round) -> Result<(), Breach> {
    round.kept.iter().try_for_each(|kept| release(round, kept.swap(0, Acquire)))
}

/// Sends signals to workers at random intervals until the round stops.
pub(super) fn send(round: &Round) {
    let mut rng = Rng::new(round.seed ^ 0x5157);
    // SAFETY: getpid has no preconditions.
    let pid = unsafe { libc::getpid() };
    while !round.is_over() {
        let tid = round.tids[rng.below(round.tids.len())].load(Relaxed);
        if tid != 0 {
            // SAFETY: a signal with a handler, to a thread of this process, or to none if it has exited.
            unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, SIGNAL) };
        }
        match rng.below(8) {
            0..5 => std::thread::sleep(Duration::from_micros(rng.below(60) as u64)),
            5 => (0..rng.below(2000)).for_each(|_| std::hint::spin_loop()),
            _ => {} // At once another one.
        }
    }
}
