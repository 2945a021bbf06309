//! Memory that a device has registered stays where it is: giving it back to the system waits until no device has it.
//!
//! The kernel pins registered memory (io_uring, AF_XDP, VFIO). If the system took a page back, the device would go on with the old
//! page while the process had another one at the same address. So giving back is a section: the first device holds it back, and
//! the last one lets it in again.
use crate::process::Stamp;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use pagemill_core::Lock;
use pagemill_os::{SLEEP, Sections};

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Pins {
    giving: Sections,
    /// Changed with `lock` held.
    devices: AtomicUsize,
    lock: Lock,
}

/// Until it is dropped, the zone's memory does not go back to the system.
#[derive(Debug)]
pub(crate) struct Pinned {
    pins: &'static Pins,
    /// The process that pinned it. A forked child's copy of the memory belongs to no device.
    stamp: Stamp,
}

/// Until it is dropped, some of the zone's memory goes back to the system.
#[derive(Debug)]
pub(crate) struct GivingBack<'a>(&'a Pins);

impl Pins {
    /// Pins the zone before it is registered with a device. Waits for calls that give some of it back right now.
    pub(crate) fn pin(&'static self) -> Pinned {
        self.lock.take(SLEEP);
        if self.devices.fetch_add(1, Relaxed) == 0 {
            self.giving.hold_back();
        }
        self.lock.release(SLEEP);
        Pinned { pins: self, stamp: Stamp::here() }
    }

    /// Begins to give memory back; none while a device has the zone.
    pub(crate) fn giving_back(&self) -> Option<GivingBack<'_>> {
        if self.giving.try_enter() { Some(GivingBack(self)) } else { None }
    }

    /// In the child of a fork neither the devices nor the calls that gave memory back exist.
    pub(super) fn forget_after_fork(&self) {
        self.giving.forget_after_fork();
        self.devices.store(0, Relaxed);
        self.lock.free_after_fork();
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.stamp.is_inherited() {
            return;
        }
        self.pins.lock.take(SLEEP);
        if self.pins.devices.fetch_sub(1, Relaxed) == 1 {
            self.pins.giving.let_in();
        }
        self.pins.lock.release(SLEEP);
    }
}

impl Drop for GivingBack<'_> {
    fn drop(&mut self) {
        self.0.giving.leave();
    }
}

#[cfg(test)]
mod tests {
    use crate::{Allocator, Gfp, Memory, PageCount};
    use core::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::time::Instant;

    /// An allocator with two zones, of which every page was handed out and freed.
    fn used() -> Allocator {
        let builder = Allocator::builder().memory(Memory::anonymous(1024)).memory(Memory::anonymous(512));
        let allocator = builder.huge_pages(false).cpus(1, || 0).build().unwrap();
        let mut pages: Vec<_> = std::iter::from_fn(|| allocator.alloc_page(Gfp::NOWAIT).ok()).collect();
        pages.iter_mut().for_each(|page| page[0] = 1);
        assert_eq!(pages.len(), 1536);
        drop(pages);
        allocator.drain();
        allocator
    }

    #[test]
    fn memory_goes_back_again_when_the_last_device_lets_go() {
        let allocator = used();
        let [first, second] = [0, 1].map(|number| allocator.zones().ever()[number]);
        let resident = || [first, second].map(|zone| zone.resident(zone.pfn_of(zone.base()), zone.frames()));
        let (one, other, of_second) = (first.pins.pin(), first.pins.pin(), second.pins.pin());
        assert_eq!(allocator.give_back(), PageCount::new(0));
        assert_eq!(allocator.give_back_at_most(PageCount::new(512)), PageCount::new(0));
        drop(one);
        assert_eq!((allocator.give_back(), resident()), (PageCount::new(0), [1024, 512]));
        // The same for a retired zone.
        let id = allocator.arenas()[1].id;
        assert_eq!(allocator.retire(id).unwrap(), PageCount::new(0));
        assert_eq!((allocator.give_back_idle(Instant::now()), resident()), (PageCount::new(0), [1024, 512]));
        drop(of_second);
        assert_eq!((allocator.retire(id).unwrap(), resident()), (PageCount::new(0), [1024, 0]));
        drop(other);
        assert_eq!((allocator.give_back(), resident()), (PageCount::new(1024), [0, 0]));
    }

    #[test]
    fn no_device_begins_while_memory_goes_back() {
        const ROUNDS: usize = 1000;
        let allocator = used();
        let zone = allocator.zones().first();
        // The last rounds in which a device asked for the zone, in which memory went back, and in which the device had it.
        let [asked, gone, had] = [const { AtomicUsize::new(0) }; 3];
        let until = |round: &AtomicUsize, n| {
            while round.load(SeqCst) < n {
                std::thread::yield_now()
            }
        };
        let mut early = 0;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=ROUNDS {
                    let giving = zone.pins.giving_back();
                    assert!(giving.is_some(), "no device has it");
                    asked.store(round, SeqCst);
                    // No other call may give back while the device waits for those under way.
                    while zone.pins.giving_back().is_some() && had.load(SeqCst) < round {
                        std::thread::yield_now();
                    }
                    (0..3).for_each(|_| std::thread::yield_now());
                    gone.store(round, SeqCst);
                    drop(giving);
                    until(&had, round);
                }
            });
            for round in 1..=ROUNDS {
                until(&asked, round);
                let pinned = zone.pins.pin();
                early += usize::from(gone.load(SeqCst) < round);
                drop(pinned);
                had.store(round, SeqCst);
            }
        });
        assert_eq!(early, 0, "a device had the arena while somebody gave some of it back");
    }

    #[test]
    #[cfg(not(any(miri, shuttle)))]
    fn a_device_waits_asleep_until_no_memory_goes_back() {
        let allocator = Allocator::builder().pages(64).build().unwrap();
        let zone = allocator.zones().first();
        let hold = |others: &dyn Fn()| {
            let giving = zone.pins.giving_back().unwrap();
            others();
            drop(giving);
        };
        match crate::fifo::sleeps(hold, || drop(zone.pins.pin())) {
            Ok(times) => assert!(times > 0, "it kept what it waits for off the CPU"),
            Err(why) => println!("skipped: {why}"),
        }
    }
}
