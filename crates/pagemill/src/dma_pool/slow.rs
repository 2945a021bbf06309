//! When a CPU's list is empty or full: to the stack and back, and what the pool grows by.
use super::shape::Shape;
use super::tables::{Unit, lowest_of_run};
use super::{DmaBlock, LIST, POISON_FREE, POISON_OUT, Pool};
use crate::device::DeviceError;
use crate::fork::generation;
use crate::handle::Block;
use crate::misuse::misuse;
use crate::registry;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{CpuId, Gfp, ListPolicy, Misuse, MisuseKind, PAGE_SIZE};
use pagemill_sys::{Batch, Load};

impl Pool {
    #[cold]
    #[inline(never)]
    pub(super) fn pop_slow(&self, gfp: Gfp) -> Result<u32, DeviceError> {
        loop {
            let mut load = Load::new();
            self.take(gfp, self.limit / 2, &mut load)?;
            let (&number, rest) = load.as_slice().split_last().expect("at least one, or an error");
            self.stock(rest);
            if self.hand_out(number) {
                if self.is_poisoned {
                    self.check(number);
                }
                return Ok(number);
            }
        }
    }

    /// Half a list's worth from the stack for this CPU's list, if that is empty and there is some.
    #[cold]
    #[inline(never)]
    pub(super) fn restock(&self) -> bool {
        if self.is_poisoned || self.generation != generation() || !self.lists.list_here(LIST).is_empty() {
            return false;
        }
        let mut load = Load::new();
        self.unstack(self.limit / 2, &mut load);
        self.stock(load.as_slice())
    }

    /// Fills empty slots with blocks that follow each other in no particular way.
    #[inline(never)]
    pub(super) fn alloc_bulk_slow(&self, gfp: Gfp, slots: &mut [Option<DmaBlock>]) -> Result<usize, DeviceError> {
        let missing = slots.iter().filter(|slot| slot.is_none()).count();
        let (mut few, mut many) = ([0; Batch::CAPACITY], Vec::new());
        // In the order in which they are handed out.
        let numbers = match few.get_mut(..missing) {
            Some(few) => few,
            None => {
                many.resize(missing, 0);
                &mut many[..]
            }
        };
        let mut hand = Hand { pool: self, numbers, have: 0 };
        while hand.have < missing {
            let (mut batch, mut load) = (Batch::new(), Load::new());
            self.lists.pop_n(LIST, missing - hand.have, &mut batch);
            if batch.is_empty() && !self.restock() {
                self.take(gfp, missing - hand.have, &mut load)?;
            }
            let taken = if batch.is_empty() { load.as_slice() } else { batch.as_slice() };
            let places = &mut hand.numbers[hand.have..hand.have + taken.len()];
            places.iter_mut().zip(taken.iter().rev()).for_each(|(place, &number)| *place = number);
            let is_run = lowest_of_run(places)
                // SAFETY: just taken from the pool.
                .is_some_and(|low| unsafe { self.tables.find.hand_out_run(low, places.len()) });
            // Those that are found to be out already (D2) are left out.
            hand.have += if is_run { places.len() } else { keep(places, |number| self.hand_out(number)) };
        }
        hand.have = 0; // The slots have them from here on.
        for (slot, &number) in slots.iter_mut().filter(|slot| slot.is_none()).zip(&*hand.numbers) {
            if self.is_poisoned {
                self.check(number);
            }
            if gfp.contains(Gfp::ZERO) {
                self.zero(number);
            }
            // SAFETY: just taken from the pool.
            *slot = Some(unsafe { self.tables.find.block(number) });
        }
        Ok(missing)
    }

    /// A block that was marked as out goes back without having been seen by anybody.
    #[cold]
    pub(super) fn undo(&self, number: u32) {
        // SAFETY: in this call's hand.
        unsafe { self.tables.find.take_back(number) };
        self.give(&[number]);
    }

    /// Of `n` numbers from `first` on some are out, and somebody else's (D2): those are forgotten, the others go back.
    #[cold]
    #[inline(never)]
    pub(super) fn sort_out(&self, first: u32, n: usize) {
        (first..first + n as u32).filter(|&number| self.hand_out(number)).for_each(|number| self.undo(number));
    }

    /// Finds out if somebody wrote to a block while it was free.
    #[cold]
    fn check(&self, number: u32) {
        // SAFETY: the block is in this call's hand: nobody else has it. A device that still writes to it, which is looked for
        // here, does so beside all that the process does.
        let (start, bytes) = unsafe {
            let start = self.tables.find.block(number).as_ptr();
            (start, core::slice::from_raw_parts_mut(start, self.shape.size))
        };
        if bytes.iter().any(|&byte| byte != POISON_FREE) {
            self.report(misuse(MisuseKind::WrittenFree, start.addr()));
        }
        bytes.fill(POISON_OUT);
    }

    fn poison(&self, number: u32) {
        // SAFETY: the block is in this call's hand.
        unsafe { self.tables.find.block(number).as_ptr().write_bytes(POISON_FREE, self.shape.size) };
    }

    /// Takes back what the slots hold, in no particular way.
    #[inline(never)]
    pub(super) fn free_each(&self, slots: &mut [Option<DmaBlock>]) -> usize {
        let find = self.tables.find;
        let is_ours = self.generation == generation();
        let (mut numbers, mut n) = ([0; Batch::CAPACITY], 0);
        for slot in slots.iter_mut().rev() {
            let Some(block) = slot else { continue };
            match find.number(block.tag) {
                Some(number) if is_ours => numbers[n] = number,
                _ => {
                    self.refuse(block);
                    continue;
                }
            }
            *slot = None;
            n += 1;
        }
        let numbers = &mut numbers[..n];
        // SAFETY: the pool's tags: it made the blocks.
        let is_run = lowest_of_run(numbers).is_some_and(|low| unsafe { find.take_back_run(low, n) });
        let is_taken = |number| {
            // SAFETY: as above.
            let is_out = unsafe { find.take_back(number) };
            if !is_out {
                // SAFETY: as above.
                self.refuse(&unsafe { find.block(number) });
            }
            is_out
        };
        let kept = if is_run { n } else { keep(numbers, is_taken) };
        let mut batch = Batch::new();
        batch.push_slice(&numbers[..kept]);
        if kept > 0 && !self.lists.push_n(LIST, &batch, 0..kept) {
            self.overflow_batch(&batch);
        }
        kept
    }

    /// Takes up to `want` numbers off the stack, at least one, the top of it last; grows where it is empty.
    fn take(&self, gfp: Gfp, want: usize, load: &mut Load) -> Result<(), DeviceError> {
        if self.generation != generation() {
            return Err(DeviceError::Forked);
        }
        loop {
            self.unstack(want, load);
            if !load.is_empty() {
                return Ok(());
            }
            if let Err(error) = self.grow(gfp) {
                // What other CPUs' lists hide.
                let drained = |cpu| {
                    let cpu = CpuId::new(cpu as u32);
                    let list = &self.lists.cpu(cpu).lists[LIST.index()];
                    if list.is_empty() { None } else { self.lists.drain(cpu, LIST, |numbers| self.give(numbers)) }
                };
                if (0..self.lists.cpus()).filter_map(drained).sum::<usize>() == 0 {
                    return Err(error);
                }
            }
        }
    }

    /// Takes up to `want` numbers off the stack.
    fn unstack(&self, want: usize, load: &mut Load) {
        let mut shared = self.lock();
        let from = shared.free - want.min(Load::CAPACITY).min(shared.free);
        load.push_slice(&shared.stack[from..shared.free]);
        shared.free = from;
    }

    /// Puts numbers on this CPU's list, which was empty. False: it took none, or there are none.
    fn stock(&self, numbers: &[u32]) -> bool {
        if self.is_poisoned {
            self.give(numbers);
            return false;
        }
        self.open_here();
        for (i, part) in numbers.chunks(Batch::CAPACITY).enumerate() {
            let mut batch = Batch::new();
            batch.push_slice(part);
            if !self.lists.push_n(LIST, &batch, 0..part.len()) {
                self.give(&numbers[i * Batch::CAPACITY..]);
                return i > 0;
            }
        }
        !numbers.is_empty()
    }

    /// Lists are empty memory until their CPU comes by.
    fn open_here(&self) {
        let list = self.lists.list_here(LIST);
        if list.policy().limit == 0 {
            list.set_policy(ListPolicy { limit: self.limit as u32, ..ListPolicy::START });
            list.open();
        }
    }

    /// Adds a unit (C6.2): its blocks go on the stack so that the first is on top.
    fn grow(&self, gfp: Gfp) -> Result<(), DeviceError> {
        let pages = self.unit(gfp)?;
        let (addr, order) = (pages.addr(), pages.order());
        let device_addr = self.device.address_of(addr)?;
        let align = self.shape.unit_align(order);
        if !device_addr.get().is_multiple_of(align as u64) {
            return Err(DeviceError::Unaligned { addr: device_addr, align });
        }
        for at in (PAGE_SIZE..order.bytes()).step_by(PAGE_SIZE) {
            if self.device.address_of(addr + at)? != device_addr.within(at) {
                return Err(DeviceError::Scattered { size: self.shape.size });
            }
        }
        if self.is_poisoned {
            // SAFETY: the pages are this call's.
            unsafe { core::ptr::with_exposed_provenance_mut::<u8>(addr).write_bytes(POISON_FREE, order.bytes()) };
        }
        let blocks = self.shape.blocks(order);
        let mut shared = self.lock();
        // From the last number down: what is handed out of one unit after the other are neighbours too.
        let Some(unit) = (self.tables.units_max - 1).checked_sub(shared.units.len()) else {
            return Err(DeviceError::Full { blocks: shared.blocks });
        };
        self.tables.enter(unit, Unit { addr, device_addr });
        if let Some((arena, pfn)) = registry::by_address(addr) {
            (pfn..pfn + order.frames()).for_each(|pfn| arena.link(pfn).store(unit as u32, Relaxed));
        }
        shared.units.push(pages);
        shared.blocks += blocks;
        let end = (unit as u32 + 1) << self.shape.shift;
        let numbers = end - blocks as u32..end;
        let free = shared.free;
        shared.stack[free..free + blocks].iter_mut().zip(numbers).for_each(|(place, number)| *place = number);
        shared.free += blocks;
        shared.free_max = shared.free_max.max(shared.free);
        Ok(())
    }

    /// Pages for a unit: of the usual order if they are at hand, else of the least.
    fn unit(&self, gfp: Gfp) -> Result<Block, DeviceError> {
        let allocator = self.device.allocator();
        let Shape { order, order_least, .. } = self.shape;
        if order > order_least
            && let Ok(pages) = allocator.alloc_pages(Gfp::NOWAIT, order)
        {
            return Ok(pages);
        }
        Ok(allocator.alloc_pages(gfp, order_least)?)
    }

    // ── when it is full ────────────────────────────────────────────────────────────────────────────────────────

    #[cold]
    #[inline(never)]
    pub(super) fn overflow(&self, number: u32) -> Result<(), Misuse> {
        if self.generation != generation() {
            // SAFETY: the pool's.
            return Err(self.refuse(&unsafe { self.tables.find.block(number) }));
        }
        let mut one = Batch::new();
        one.push(number);
        self.overflow_batch(&one);
        Ok(())
    }

    /// The same for `n` numbers from `first` on; false in the child of a fork.
    #[cold]
    #[inline(never)]
    pub(super) fn overflow_run(&self, first: u32, n: usize) -> bool {
        if self.generation != generation() {
            return false;
        }
        let mut batch = Batch::new();
        batch.push_run(first, n);
        self.overflow_batch(&batch);
        true
    }

    #[cold]
    #[inline(never)]
    fn overflow_batch(&self, batch: &Batch) {
        if self.is_poisoned {
            batch.as_slice().iter().for_each(|&number| self.poison(number));
            return self.give(batch.as_slice());
        }
        self.make_room();
        if !self.lists.push_n(LIST, batch, 0..batch.len()) {
            self.give(batch.as_slice());
        }
    }

    /// Half of this CPU's list goes to the stack.
    fn make_room(&self) {
        self.open_here();
        let mut load = Load::new();
        // From the top, and below it what is below: as it lay.
        while load.len() < self.limit / 2 && load.room() >= Batch::CAPACITY {
            let mut batch = Batch::new();
            self.lists.pop_n(LIST, Batch::CAPACITY, &mut batch);
            if batch.is_empty() {
                break;
            }
            load.push_slice(batch.as_slice());
        }
        self.give(load.as_slice());
    }

    /// Puts numbers on the stack, the last of them on top.
    pub(super) fn give(&self, numbers: &[u32]) {
        let mut shared = self.lock();
        let free = shared.free;
        shared.stack[free..free + numbers.len()].copy_from_slice(numbers);
        shared.free += numbers.len();
        shared.free_max = shared.free_max.max(shared.free);
    }
}

/// Blocks that a call has marked as out and has not handed out: they go back if it fails or unwinds.
struct Hand<'a> {
    pool: &'a Pool,
    numbers: &'a mut [u32],
    have: usize,
}

impl Drop for Hand<'_> {
    fn drop(&mut self) {
        self.numbers[..self.have].iter().rev().for_each(|&number| self.pool.undo(number));
    }
}

/// Moves those that are to be kept to the front, in their order; returns how many.
fn keep(numbers: &mut [u32], mut is_kept: impl FnMut(u32) -> bool) -> usize {
    let mut kept = 0;
    for at in 0..numbers.len() {
        let number = numbers[at];
        if is_kept(number) {
            numbers[kept] = number;
            kept += 1;
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use crate::{Allocator, Backend, Device, DeviceError, DmaBlock, DmaPool, Gfp, Identity};

    /// D2: two frees of a block at once leave its number in two places. Whoever finds it while it is out forgets it.
    #[test]
    fn a_number_in_two_places_is_handed_out_once() {
        for backend in [Backend::Portable, Backend::Rseq] {
            let Ok(allocator) = Allocator::builder().pages(64).backend(backend).build() else { continue };
            let device = Device::new(&allocator, Identity).unwrap();
            for bulk in [0, 1, 8, 40, 100] {
                let pool = DmaPool::create("twice", &device, 64, 0, 0).unwrap();
                let mut slots: Vec<Option<DmaBlock>> = (0..64).map(|_| None).collect();
                pool.alloc_bulk(Gfp::KERNEL, &mut slots).unwrap();
                let twice: Vec<_> = slots[..20].iter().flatten().map(|block| block.tag as u32).rev().collect();
                // On this CPU's list, where the next ones come from.
                let one_by_one = twice.iter().filter(|&&number| !pool.0.lists.push(super::LIST, number));
                one_by_one.for_each(|&number| pool.0.give(&[number]));
                let mut more: Vec<Option<DmaBlock>> = (0..100).map(|_| None).collect();
                if bulk == 0 {
                    more.iter_mut().for_each(|slot| *slot = Some(pool.alloc(Gfp::KERNEL).unwrap()));
                } else {
                    more.chunks_mut(bulk).for_each(|slots| _ = pool.alloc_bulk(Gfp::KERNEL, slots).unwrap());
                }
                let mut places: Vec<_> =
                    slots.iter().chain(&more).flatten().map(|block| block.as_ptr().addr()).collect();
                places.sort_unstable();
                places.dedup();
                assert_eq!(places.len(), 164, "{backend}, {bulk} a call");
                // Those that lie deeper wait for who comes to them.
                assert!((1..=20).contains(&pool.stats().misused), "{backend}, {bulk} a call: {:?}", pool.stats());
                assert_eq!(pool.free_bulk(&mut slots) + pool.free_bulk(&mut more), 164);
            }
        }
    }

    /// D2 as above, of a run that is taken at once: the run's other numbers are not lost.
    #[test]
    fn a_run_with_a_number_that_is_out_goes_back_but_for_that_one() {
        let pool = DmaPool::create("run", &device(), 64, 0, 0).unwrap();
        let mut slots: Vec<Option<DmaBlock>> = (0..8).map(|_| None).collect();
        for _ in 0..2 {
            pool.alloc_bulk(Gfp::KERNEL, &mut slots).unwrap();
            assert_eq!(pool.free_bulk(&mut slots), 8);
        }
        pool.alloc_bulk(Gfp::KERNEL, &mut slots).unwrap();
        let third = slots[3].as_ref().unwrap().tag as u32;
        assert_eq!((pool.free_bulk(&mut slots), pool.0.hand_out(third)), (8, true));
        pool.alloc_bulk(Gfp::KERNEL, &mut slots).unwrap();
        assert_eq!((pool.stats().in_use, pool.stats().misused), (8 + 1, 1));
        pool.0.undo(third);
        assert_eq!((pool.free_bulk(&mut slots), pool.stats().in_use), (8, 0));
    }

    #[test]
    fn no_two_pools_have_one_number() {
        let pools = core::sync::atomic::AtomicU64::new(u64::from(u32::MAX));
        assert_eq!(super::super::next_number(&pools), Ok(u32::MAX));
        assert!(super::super::next_number(&pools).is_err_and(|why| why.to_string().ends_with("use them again")));
    }

    fn device() -> Device {
        Device::new(&Allocator::builder().pages(64).build().unwrap(), Identity).unwrap()
    }

    #[test]
    fn blocks_come_and_go_while_somebody_is_at_all_lists() {
        let pool = DmaPool::create("held", &device(), 64, 0, 0).unwrap();
        pool.0.lists.hold_after_fork();
        for round in 1..4 {
            let mut blocks = [const { None }; 80];
            assert_eq!(pool.alloc_bulk(Gfp::KERNEL, &mut blocks).unwrap(), 80);
            let block = pool.alloc(Gfp::KERNEL).unwrap();
            assert_eq!(pool.stats().in_use, 81, "{round}");
            pool.free(block).unwrap();
            assert_eq!(pool.free_bulk(&mut blocks), 80);
        }
        pool.destroy().unwrap();
    }

    #[test]
    #[cfg(not(miri))]
    fn the_child_of_a_fork_waits_for_no_thread_of_its_parent() {
        let device = device();
        let pool = DmaPool::create("parent's", &device, 64, 0, 0).unwrap();
        let block = pool.alloc(Gfp::KERNEL).unwrap();
        // As if another thread were at it just now.
        let locked = (pool.0.lock(), device.lock_pools());
        // SAFETY: the child calls what may be called in the child of a program with threads.
        match unsafe { libc::fork() } {
            0 => {
                // SAFETY: it ends a child that waits.
                unsafe { libc::alarm(30) };
                let is_right = pool.stats().blocks == 0
                    && device.pools().lines().count() == 1
                    && DmaPool::create("child's", &device, 64, 0, 0).is_err_and(|why| why == DeviceError::Forked)
                    && pool.free(block).is_err();
                // SAFETY: ends the child without what the parent's exit runs.
                unsafe { libc::_exit(if is_right { 0 } else { 1 }) }
            }
            child => {
                let mut status = 0;
                // SAFETY: the child made above.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                assert_eq!(status, 0);
            }
        }
        drop(locked);
        pool.free(block).unwrap();
        pool.destroy().unwrap();
    }
}
