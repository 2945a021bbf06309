//! Signals: a thread sends thousands a second to the workers, and the handler allocates and frees (C2.5).
//!
//! The handler uses only atomics, the allocator and the ledger, which signal handlers may use. The pages that it keeps lie in a
//! fixed array of addresses; a later handler, on any thread, frees them.
use std::io;
use std::sync::atomic::{
    AtomicPtr, AtomicU32, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::SeqCst,
};
use std::time::Duration;

use pagemill::{Bulk, Gfp, Misuse, MisuseKind, Order, Page, free_pages_bulk};
use pagemill_model::{Breach, Fault, Rng, Tag};

use super::common::Common;
use super::round::Round;

const SIGNAL: i32 = libc::SIGUSR1;
/// The handler's number as an owner, above those of all workers.
const WHO: u32 = 4095;
/// The most pages that it keeps.
pub(super) const KEPT: usize = 96;
/// The most pages that it requests at once.
const BULK: usize = 24;
/// The handler sets errno to this, and checks at its end that nothing has changed it.
const ERRNO: i32 = 0x5eed;

/// The round for which handlers work; null between rounds.
static ROUND: AtomicPtr<Round> = AtomicPtr::new(std::ptr::null_mut());
/// The number of handlers that may hold a pointer to it.
static INSIDE: AtomicUsize = AtomicUsize::new(0);

/// Installs the handler and the allocator's hook for misuse, once.
pub(super) fn install() -> io::Result<()> {
    pagemill::on_misuse(on_misuse);
    // SAFETY: a zeroed sigaction is valid and has no flags; the handler does only what is allowed in a signal handler.
    let done = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_signal as extern "C" fn(i32) as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(SIGNAL, &action, std::ptr::null_mut())
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Handlers work for a round until this is dropped.
pub(super) struct Target;

impl Target {
    pub(super) fn new(round: &Round) -> Self {
        ROUND.store(std::ptr::from_ref(round).cast_mut(), SeqCst);
        Self
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // SeqCst here and in `with_round`: either the handler sees null, or this thread sees the handler inside.
        ROUND.store(std::ptr::null_mut(), SeqCst);
        while INSIDE.load(SeqCst) != 0 {
            std::thread::yield_now();
        }
    }
}

fn with_round(work: impl FnOnce(&Round)) {
    INSIDE.fetch_add(1, SeqCst);
    // SAFETY: `Target` keeps the round alive until no handler is inside.
    if let Some(round) = unsafe { ROUND.load(SeqCst).as_ref() } {
        work(round);
    }
    INSIDE.fetch_sub(1, SeqCst);
}

/// No worker frees wrongly on purpose, so a frame that is refused, or found at hand-out, had two owners.
fn on_misuse(misuse: Misuse) {
    with_round(|round| {
        let fault = if misuse.kind == MisuseKind::Quarantined { Fault::Quarantined } else { Fault::Refused };
        let frame = round.common.ledger.frame_of(misuse.addr);
        round.common.fail(Breach { frame, addr: misuse.addr, fault });
    });
}

extern "C" fn on_signal(_: i32) {
    // SAFETY: the pointer is to this thread's errno, which lives as long as the thread.
    let errno = unsafe { &mut *libc::__errno_location() };
    let before = std::mem::replace(errno, ERRNO);
    with_round(|round| {
        round.signals.fetch_add(1, Relaxed);
        if let Err(breach) = handle(round) {
            round.common.fail(breach);
        }
        if *errno != ERRNO {
            round.common.fail(Breach { frame: 0, addr: 0, fault: Fault::Errno });
        }
    });
    *errno = before;
}

/// Handles one signal.
fn handle(round: &Round) -> Result<(), Breach> {
    let Common { allocator, ledger, seed, .. } = &round.common;
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Relaxed);
    let mut rng = Rng::new(seed ^ u64::from(number) << 20);
    let tag: Tag = WHO << 20 | number & 0xf_ffff;
    let gfp = [Gfp::NOWAIT, Gfp::ATOMIC, Gfp::NOWAIT | Gfp::MOVABLE, Gfp::ATOMIC | Gfp::RECLAIMABLE][rng.below(4)];
    if rng.below(2) == 0 {
        return match allocator.alloc_page(gfp) {
            Ok(page) => {
                round.handler_pages.fetch_add(1, Relaxed);
                ledger.take(page.addr(), Order::ZERO, tag)?;
                keep(round, &mut rng, Some(page))
            }
            Err(_) => keep(round, &mut rng, None),
        };
    }
    let mut slots = [const { None::<Page> }; BULK];
    let n = 1 + rng.below(BULK);
    let Ok(filled) = allocator.alloc_pages_bulk_array(Bulk::up_to(n).gfp(gfp), &mut slots) else { return Ok(()) };
    round.handler_pages.fetch_add(filled.added as u64, Relaxed);
    for page in slots.iter().flatten() {
        ledger.take(page.addr(), Order::ZERO, tag)?;
    }
    for slot in slots.iter_mut().step_by(3) {
        keep(round, &mut rng, slot.take())?;
    }
    for page in slots.iter().flatten() {
        ledger.give(page.addr(), Order::ZERO, tag)?;
    }
    free_pages_bulk(&mut slots);
    Ok(())
}

/// Keeps a page, or none, in a random place. Frees the page that was there.
fn keep(round: &Round, rng: &mut Rng, page: Option<Page>) -> Result<(), Breach> {
    let addr = page.map_or(0, |page| page.into_raw().expose_provenance());
    // AcqRel: the page goes from the handler that stored it here to the one that takes it out.
    release(round, round.kept[rng.below(KEPT)].swap(addr, AcqRel))
}

/// Frees a page that a handler kept; 0 is none.
fn release(round: &Round, addr: usize) -> Result<(), Breach> {
    if addr == 0 {
        return Ok(());
    }
    let (frame, tag) = (round.common.ledger.frame_of(addr), round.common.ledger.owner_of(addr));
    if tag >> 20 != WHO {
        return Err(Breach { frame, addr, fault: Fault::OwnedTwice { old: WHO << 20, new: tag } });
    }
    round.common.ledger.give(addr, Order::ZERO, tag)?;
    let ptr = std::ptr::with_exposed_provenance_mut::<u8>(addr);
    // SAFETY: a handler gave this page up when it put the address into the array, from where it came out once.
    let freed = unsafe { Page::from_raw(ptr) }.and_then(Page::free);
    freed.map_err(|misuse| Breach { frame, addr: misuse.addr, fault: Fault::Refused })
}

/// Frees all pages that handlers kept. Call it when no handler runs any more.
pub(super) fn release_all(round: &Round) -> Result<(), Breach> {
    round.kept.iter().try_for_each(|kept| release(round, kept.swap(0, Acquire)))
}

/// Sends signals to workers at random intervals until the round stops.
pub(super) fn send(round: &Round) -> Result<(), String> {
    let mut rng = Rng::new(round.common.seed ^ 0x5157);
    // SAFETY: getpid has no preconditions.
    let pid = unsafe { libc::getpid() };
    while !round.common.is_over() {
        let tid = round.tids[rng.below(round.tids.len())].load(Relaxed);
        if tid != 0 {
            // SAFETY: the signal has a handler, and goes to a thread of this process, or to none if the thread has exited.
            unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, SIGNAL) };
        }
        match rng.below(8) {
            0..5 => std::thread::sleep(Duration::from_micros(rng.below(60) as u64)),
            5 => (0..rng.below(2000)).for_each(|_| std::hint::spin_loop()),
            _ => {} // The next signal follows at once.
        }
    }
    Ok(())
}
