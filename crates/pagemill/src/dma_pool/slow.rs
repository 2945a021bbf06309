//! When a CPU's list is empty or full: to the stack and back, and what the pool grows by.
use super::{DmaBlock, LIST, POISON_FREE, Pool};
use crate::device::DeviceError;
use crate::fork::generation;
use crate::handle::Block;
use crate::registry;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{CpuId, Gfp, ListPolicy, Order, PAGE_SIZE};
use pagemill_sys::{Batch, Load};

impl Pool {
    #[cold]
    #[inline(never)]
    pub(super) fn alloc_slow(&self, gfp: Gfp) -> Result<DmaBlock, DeviceError> {
        loop {
            let mut load = Load::new();
            self.take(gfp, self.limit / 2, &mut load)?;
            let (&number, rest) = load.as_slice().split_last().expect("at least one, or an error");
            self.stock(rest);
            if let Some(block) = self.hand_out(number, gfp) {
                return Ok(block);
            }
        }
    }

    /// `popped` are the numbers that the list had for it.
    #[cold]
    #[inline(never)]
    pub(super) fn alloc_bulk_slow(
        &self,
        gfp: Gfp,
        slots: &mut [Option<DmaBlock>],
        popped: &[u32],
    ) -> Result<usize, DeviceError> {
        let missing = slots.iter().filter(|slot| slot.is_none()).count();
        // In the order in which they are handed out.
        let mut numbers: Vec<u32> = popped.iter().rev().copied().collect();
        let mut filled = 0;
        loop {
            while numbers.len() < missing - filled {
                let want = missing - filled - numbers.len();
                let mut batch = Batch::new();
                if self.generation == generation() {
                    self.lists.pop_n(LIST, want, &mut batch);
                }
                if !batch.is_empty() {
                    numbers.extend(batch.as_slice().iter().rev());
                    continue;
                }
                let mut load = Load::new();
                if let Err(error) = self.take(gfp, want, &mut load) {
                    numbers.reverse();
                    self.give(&numbers);
                    return if filled == 0 { Err(error) } else { Ok(filled) };
                }
                numbers.extend(load.as_slice().iter().rev());
            }
            numbers.reverse();
            let mut left = numbers.as_slice();
            filled += self.fill(gfp, slots, &mut left);
            self.give(left);
            if filled >= missing {
                return Ok(filled);
            }
            numbers.clear(); // Some were in two places (D2).
        }
    }

    /// Fills empty slots with the blocks of `numbers`, from the last on, and leaves there what is over.
    #[inline]
    pub(super) fn fill(&self, gfp: Gfp, slots: &mut [Option<DmaBlock>], numbers: &mut &[u32]) -> usize {
        let mut filled = 0;
        for slot in slots.iter_mut().filter(|slot| slot.is_none()) {
            while slot.is_none() {
                let Some((&number, rest)) = numbers.split_last() else { return filled };
                *numbers = rest;
                *slot = self.hand_out(number, gfp);
            }
            filled += 1;
        }
        filled
    }

    /// Takes up to `want` numbers off the stack, at least one, the top of it last; grows where it is empty.
    fn take(&self, gfp: Gfp, want: usize, load: &mut Load) -> Result<(), DeviceError> {
        if self.generation != generation() {
            return Err(DeviceError::Forked);
        }
        loop {
            let mut shared = self.lock();
            if shared.free > 0 {
                let from = shared.free - want.clamp(1, Load::CAPACITY).min(shared.free);
                load.push_slice(&shared.stack[from..shared.free]);
                shared.free = from;
                return Ok(());
            }
            drop(shared);
            if let Err(error) = self.grow(gfp) {
                // What other CPUs' lists hide.
                let drained = |cpu| {
                    let cpu = CpuId::new(cpu as u32);
                    let list = &self.lists.cpu(cpu).lists[LIST.index()];
                    if list.is_empty() { 0 } else { self.lists.drain(cpu, LIST, |numbers| self.give(numbers)) }
                };
                if (0..self.lists.cpus()).map(drained).sum::<usize>() == 0 {
                    return Err(error);
                }
            }
        }
    }

    /// Puts numbers on this CPU's list, which was empty.
    fn stock(&self, numbers: &[u32]) {
        self.open_here();
        for (i, part) in numbers.chunks(Batch::CAPACITY).enumerate() {
            let mut batch = Batch::new();
            batch.push_slice(part);
            if !self.lists.push_n(LIST, &batch, 0..part.len()) {
                return self.give(&numbers[i * Batch::CAPACITY..]);
            }
        }
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
        let last = order.bytes() - PAGE_SIZE;
        if self.device.address_of(addr + last)? != device_addr.offset(last) {
            return Err(DeviceError::Scattered { size: self.shape.size });
        }
        if self.is_poisoned {
            // SAFETY: the pages are this call's.
            unsafe { core::ptr::with_exposed_provenance_mut::<u8>(addr).write_bytes(POISON_FREE, order.bytes()) };
        }
        let blocks = self.shape.blocks(order);
        let mut shared = self.lock();
        let unit = shared.units.len();
        if unit == self.tables.units.len() {
            return Err(DeviceError::Full { blocks: shared.blocks });
        }
        self.tables.units[unit].set(addr, device_addr.get());
        if let Some((arena, pfn)) = registry::by_address(addr) {
            (pfn..pfn + order.frames()).for_each(|pfn| arena.link(pfn).store(unit as u32, Relaxed));
        }
        shared.units.push(pages);
        shared.blocks += blocks;
        let first = (unit as u32) << self.shape.shift;
        let numbers = (first..first + blocks as u32).rev();
        let free = shared.free;
        shared.stack[free..free + blocks].iter_mut().zip(numbers).for_each(|(entry, number)| *entry = number);
        shared.free += blocks;
        shared.free_max = shared.free_max.max(shared.free);
        Ok(())
    }

    /// Pages for a unit: of an order above the last one's, up to the usual one, if they are at hand.
    fn unit(&self, gfp: Gfp) -> Result<Block, DeviceError> {
        let allocator = self.device.allocator();
        let least = self.shape.order_least;
        let order = least.get() as usize + self.lock().units.len();
        if let Ok(order) = Order::new(order.min(self.shape.order.get() as usize) as u8)
            && order > least
            && let Ok(pages) = allocator.alloc_pages(Gfp::NOWAIT, order)
        {
            return Ok(pages);
        }
        Ok(allocator.alloc_pages(gfp, least)?)
    }

    // ── when it is full ────────────────────────────────────────────────────────────────────────────────────────

    #[cold]
    #[inline(never)]
    pub(super) fn overflow(&self, number: u32) {
        self.open_here();
        if self.lists.push(LIST, number) {
            return;
        }
        let mut load = Load::new();
        while load.len() < self.limit / 2 {
            let mut batch = Batch::new();
            self.lists.pop_n(LIST, Batch::CAPACITY, &mut batch);
            if batch.is_empty() {
                break;
            }
            load.push_slice(batch.as_slice());
        }
        self.give(load.as_slice());
        if !self.lists.push(LIST, number) {
            self.give(&[number]);
        }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn overflow_batch(&self, batch: &Batch) {
        self.open_here();
        if !self.lists.push_n(LIST, batch, 0..batch.len()) {
            self.give(batch.as_slice());
        }
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
