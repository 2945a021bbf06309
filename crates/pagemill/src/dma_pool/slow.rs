//! The pool's slow path: a CPU's list is empty or full, or the pool grows. Blocks move between lists and the stack. Unusual
//! blocks are handled here too: far ones, foreign ones, and those of poisoned pools.
use super::block::{FAR, addr_of_word};
use super::shape::Shape;
use super::tables::{FULL, OF_HANDLE, SAFE};
use super::{DmaBlock, FreeBlocks, LIST, LIST_MAX, POISON_FREE, POISON_OUT, Pool};
use crate::device::{DeviceError, refuse_inherited};
use crate::error::Error;
use crate::handle::{Block, Page};
use crate::misuse::misuse;
use crate::run::Run;
use pagemill_core::{CpuId, Gfp, ListPolicy, Misuse, MisuseKind, Order, PAGE_SIZE};
use pagemill_os::{Batch, Load};

impl Pool {
    #[cold]
    #[inline(never)]
    pub(super) fn pop_slow(&self, gfp: Gfp) -> Result<u32, DeviceError> {
        loop {
            let mut load = Load::new();
            self.take(gfp, self.limit / 2, &mut load)?;
            let number = *load.as_slice().last().expect("at least one, or an error");
            load.truncate(load.len() - 1);
            self.stock(&load);
            if !self.is_looking() || self.hand_out(number) {
                if self.is_poisoned {
                    self.check(number);
                }
                return Ok(number);
            }
        }
    }

    /// If this CPU's list is empty, takes half a list of numbers from the stack: up to `want` of them into `batch` for
    /// the call, the others onto the list.
    #[cold]
    #[inline(never)]
    pub(super) fn restock(&self, want: usize, batch: &mut Batch) {
        if self.is_poisoned || self.stamp.is_inherited() || !self.lists.list_here(LIST).is_empty() {
            return;
        }
        let mut load = Load::new();
        self.unstack(self.limit / 2, &mut load);
        let rest = load.len() - want.min(batch.room()).min(load.len());
        batch.push_slice(&load.as_slice()[rest..]);
        load.truncate(rest);
        self.stock(&load);
    }

    /// Fills any number of empty slots, wherever they are. It uses the numbers in `taken` first, which the call has
    /// already.
    #[inline(never)]
    pub(super) fn alloc_bulk_slow(&self, gfp: Gfp, words: &mut [u64], taken: &Batch) -> Result<usize, DeviceError> {
        let missing = words.iter().filter(|&&word| word == 0).count();
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
        hand.add(taken.as_slice());
        while hand.have < missing {
            let (mut batch, mut load) = (Batch::new(), Load::new());
            self.lists.pop_n(LIST, missing - hand.have, &mut batch);
            if batch.is_empty() {
                self.restock(missing - hand.have, &mut batch);
            }
            if batch.is_empty() {
                self.take(gfp, missing - hand.have, &mut load)?;
            }
            hand.add(if batch.is_empty() { load.as_slice() } else { batch.as_slice() });
        }
        hand.have = 0; // From here on the slots own the blocks.
        for (word, &number) in words.iter_mut().filter(|word| **word == 0).zip(&*hand.numbers) {
            if self.is_poisoned {
                self.check(number);
            }
            *word = self.word(number);
            if gfp.contains(Gfp::ZERO) {
                self.zero_block(*word);
            }
        }
        Ok(missing)
    }

    /// Checks whether a block was written to while it was free.
    #[cold]
    fn check(&self, number: u32) {
        // SAFETY: the block is in this call's hand, so no other thread of the process uses it. A device that still
        // writes to it, which this check looks for, does so outside the process.
        let (start, bytes) = unsafe {
            let start = core::ptr::with_exposed_provenance_mut::<u8>(addr_of_word(self.word(number)));
            (start, core::slice::from_raw_parts_mut(start, self.shape.size))
        };
        if bytes.iter().any(|&byte| byte != POISON_FREE) {
            self.report(misuse(MisuseKind::WrittenFree, start.addr()));
        }
        bytes.fill(POISON_OUT);
    }

    fn poison(&self, number: u32) {
        let start = core::ptr::with_exposed_provenance_mut::<u8>(addr_of_word(self.word(number)));
        // SAFETY: the block is in this call's hand, so nothing else uses it.
        unsafe { start.write_bytes(POISON_FREE, self.shape.size) };
    }

    /// Frees a block that the fast path does not: it is far or foreign, its list does not accept it, or all states are
    /// kept.
    #[cold]
    #[inline(never)]
    pub(super) fn free_slow(&self, block: DmaBlock) -> Result<(), Misuse> {
        if !self.words.is_ours(block.word()) {
            return Err(self.report(misuse(MisuseKind::Foreign, addr_of_word(block.word()))));
        }
        self.free_word(block.into_word())
    }

    /// Frees a block of this pool that a handle owned.
    #[cold]
    pub(super) fn free_word(&self, word: u64) -> Result<(), Misuse> {
        let addr = addr_of_word(word);
        if self.stamp.is_inherited() {
            return Err(self.report(misuse(MisuseKind::Foreign, addr)));
        }
        let number = self.number(word).expect("a block of the pool's");
        if FULL && !self.tables.change(self.place_of(word), OF_HANDLE, SAFE) {
            return Err(self.report(misuse(MisuseKind::DoubleFree, addr)));
        }
        self.give_back(number);
        Ok(())
    }

    /// Puts a number in this call's hand on this CPU's list, or on the stack if the list is full.
    pub(super) fn give_back(&self, number: u32) {
        if !self.lists.push(LIST, number) {
            let mut one = Batch::new();
            one.push(number);
            self.overflow(&one);
        }
    }

    /// Frees the blocks in slots one by one. Some slots may be empty, or hold foreign or far blocks; or all states are
    /// kept.
    #[cold]
    #[inline(never)]
    pub(super) fn free_each(&self, words: &mut [u64]) -> usize {
        let is_here = !self.stamp.is_inherited();
        let mut batch = Batch::new();
        for word in words.iter_mut().rev().filter(|word| **word != 0) {
            match self.number(*word).filter(|_| is_here) {
                None => _ = self.report(misuse(MisuseKind::Foreign, addr_of_word(*word))),
                Some(_) if FULL && !self.tables.change(self.place_of(*word), OF_HANDLE, SAFE) => {
                    _ = self.report(misuse(MisuseKind::DoubleFree, addr_of_word(*word)));
                }
                Some(number) => {
                    batch.push(number);
                    *word = 0;
                }
            }
        }
        if !batch.is_empty() && !self.lists.push_n(LIST, &batch, 0..batch.len()) {
            self.overflow(&batch);
        }
        batch.len()
    }

    /// Takes up to `want` numbers off the stack, and at least one. The top of the stack comes last. Grows the pool if
    /// the stack is empty.
    fn take(&self, gfp: Gfp, want: usize, load: &mut Load) -> Result<(), DeviceError> {
        refuse_inherited(self.stamp)?;
        loop {
            self.unstack(want, load);
            if !load.is_empty() {
                return Ok(());
            }
            if let Err(error) = self.grow(gfp) {
                // Other CPUs' lists may have some.
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

    /// Puts numbers on this CPU's list, which was empty. Those that it does not accept go back on the stack.
    fn stock(&self, load: &Load) {
        if self.is_poisoned {
            return self.give(load.as_slice());
        }
        self.open_here();
        for from in (0..load.len()).step_by(Batch::CAPACITY) {
            if !self.lists.push_n(LIST, load, from..load.len().min(from + Batch::CAPACITY)) {
                return self.give(&load.as_slice()[from..]);
            }
        }
    }

    /// Opens this CPU's list at its first use. Until then a list takes no memory.
    fn open_here(&self) {
        let list = self.lists.list_here(LIST);
        if list.policy().limit == 0 {
            list.set_policy(ListPolicy { limit: self.limit as u32, ..ListPolicy::START });
            list.open();
        }
    }

    /// Adds a unit (C6.2). Its blocks go on the stack, the first one on top.
    fn grow(&self, gfp: Gfp) -> Result<(), DeviceError> {
        let unit = self.unit(gfp)?;
        let (addr, pages) = match &unit {
            Pages::Block(block) => (block.addr(), block.order().frames() as usize),
            Pages::Run(run) => (run.addr(), run.len()),
        };
        let bytes = pages * PAGE_SIZE;
        let device_addr = self.device.address_of(addr)?;
        let align = self.shape.unit_align(pages);
        if !device_addr.get().is_multiple_of(align as u64) {
            return Err(DeviceError::Unaligned { addr: device_addr, align });
        }
        for at in (PAGE_SIZE..bytes).step_by(PAGE_SIZE) {
            if self.device.address_of(addr + at)? != device_addr.within(at) {
                return Err(DeviceError::Scattered { size: self.shape.size });
            }
        }
        if self.is_poisoned {
            // SAFETY: this call just allocated the pages, and owns them.
            unsafe { core::ptr::with_exposed_provenance_mut::<u8>(addr).write_bytes(POISON_FREE, bytes) };
        }
        let blocks = self.shape.blocks(pages);
        let mut shared = self.lock();
        let number_of_unit = shared.unit_count();
        if number_of_unit == self.tables.units_max() {
            return Err(DeviceError::Full { blocks: shared.blocks });
        }
        self.tables.enter(number_of_unit, addr, pages, device_addr);
        match unit {
            Pages::Block(block) => shared.units.push(block),
            Pages::Run(run) => shared.runs.push(run),
        }
        shared.blocks += blocks;
        let number = |place: usize| {
            let near = self.words.near(self.words.at(addr + self.shape.offset_of(place)));
            near.unwrap_or(FAR | (number_of_unit << self.shape.shift | place) as u32)
        };
        let free = shared.free;
        let places = shared.stack[free..free + blocks].iter_mut();
        places.zip((0..blocks).rev()).for_each(|(slot, place)| *slot = number(place));
        shared.free += blocks;
        shared.free_max = shared.free_max.max(shared.free);
        Ok(())
    }

    /// Allocates the pages of a unit: as many as usual if they are free, else the least number.
    fn unit(&self, gfp: Gfp) -> Result<Pages, DeviceError> {
        let allocator = self.device.allocator();
        gfp.check().map_err(Error::from)?;
        let gfp = gfp.without(Gfp::ZERO); // A block is zeroed when it is handed out.
        let Shape { pages, pages_least, .. } = self.shape;
        let take = |gfp, pages: usize| {
            if self.shape.is_of_runs() {
                let run = allocator.alloc_contig(gfp, pages)?;
                if self.device.is_one_piece(run.addr(), run.bytes()) {
                    return Ok(Pages::Run(run));
                }
                // It goes back. A block that is aligned to its size lies in one piece.
            }
            let order = Order::new(pages.next_power_of_two().ilog2() as u8)?;
            allocator.alloc_pages(gfp, order).map(Pages::Block)
        };
        if pages > pages_least
            && let Ok(unit) = take(gfp.nowait(), pages)
        {
            return Ok(unit);
        }
        Ok(take(gfp, pages_least)?)
    }

    /// This CPU's list does not accept a batch: makes room on the list, or puts the batch on the stack. False in a
    /// forked child.
    #[cold]
    #[inline(never)]
    pub(super) fn overflow(&self, batch: &Batch) -> bool {
        if self.stamp.is_inherited() {
            return false;
        }
        if self.is_poisoned {
            batch.as_slice().iter().for_each(|&number| self.poison(number));
            self.give(batch.as_slice());
            return true;
        }
        self.make_room();
        if !self.lists.push_n(LIST, batch, 0..batch.len()) {
            self.give(batch.as_slice());
        }
        true
    }

    /// Moves half of this CPU's list to the stack. The top of the list is on top of the stack afterwards.
    fn make_room(&self) {
        self.open_here();
        let mut batches: [Batch; LIST_MAX / 2 / Batch::CAPACITY] = core::array::from_fn(|_| Batch::new());
        let half = self.limit / 2 / Batch::CAPACITY;
        batches[..half].iter_mut().for_each(|batch| self.lists.pop_n(LIST, Batch::CAPACITY, batch));
        let mut shared = self.lock();
        batches.iter().rev().for_each(|batch| shared.push(batch.as_slice()));
    }

    /// Puts numbers on the stack, the last of them on top.
    pub(super) fn give(&self, numbers: &[u32]) {
        self.lock().push(numbers);
    }
}

/// The pages of a unit.
enum Pages {
    Block(Block),
    Run(Run<Page>),
}

impl FreeBlocks {
    pub(super) fn unit_count(&self) -> usize {
        self.units.len() + self.runs.len()
    }

    fn push(&mut self, numbers: &[u32]) {
        let end = self.free + numbers.len();
        self.stack[self.free..end].copy_from_slice(numbers);
        self.free = end;
        self.free_max = self.free_max.max(end);
    }
}

/// Blocks that a call has taken and not handed out yet. They are freed if the call fails or unwinds.
struct Hand<'a> {
    pool: &'a Pool,
    numbers: &'a mut [u32],
    have: usize,
}

impl Hand<'_> {
    /// Adds numbers from the top of a list or the stack, except those of blocks that have an owner (D2).
    fn add(&mut self, taken: &[u32]) {
        for &number in taken.iter().rev() {
            if !self.pool.is_looking() || self.pool.hand_out(number) {
                self.numbers[self.have] = number;
                self.have += 1;
            }
        }
    }
}

impl Drop for Hand<'_> {
    fn drop(&mut self) {
        for &number in self.numbers[..self.have].iter().rev() {
            if FULL {
                self.pool.tables.change(self.pool.place_of(self.pool.word(number)), OF_HANDLE, SAFE);
            }
            self.pool.give(&[number]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::Shape;
    use crate::{
        Allocator, Backend, Device, DeviceAddr, DeviceError, DeviceMap, DmaBlock, DmaPool, Gfp, Identity, Mapped,
    };
    use core::ops::Range;

    /// A device that has memory in pieces of 64 KiB, as io_uring has arenas in buffers of 1 GiB.
    struct Pieces;

    impl DeviceMap for Pieces {
        unsafe fn map(&self, memory: Range<usize>) -> Result<Mapped, DeviceError> {
            Ok(Mapped::Linear(DeviceAddr::new(memory.start as u64)))
        }
        fn unmap(&self, _: Range<usize>, _: &Mapped) {}
        fn is_one_piece(&self, first: DeviceAddr, last: DeviceAddr) -> bool {
            first.get() >> 16 == last.get() >> 16
        }
    }

    #[test]
    fn a_block_of_an_odd_number_of_pages_lies_in_one_piece_of_the_device() {
        let allocator = Allocator::builder().pages(64).build().unwrap();
        let pool = DmaPool::create("pieces", &Device::new(&allocator, Pieces).unwrap(), 3 * 4096, 0, 0).unwrap();
        let blocks: Vec<DmaBlock> = std::iter::from_fn(|| pool.alloc(Gfp::KERNEL).ok()).collect();
        assert!(blocks.len() >= 12, "{}", blocks.len());
        for block in &blocks {
            let addr = pool.device_addr(block).get();
            assert_eq!(addr >> 16, (addr + 3 * 4096 - 1) >> 16, "{addr:#x}");
        }
    }

    /// D2: two frees of a block at once leave its number in two places. A request that finds the number while the block
    /// is out as a pointer discards it.
    #[test]
    fn a_number_in_two_places_is_handed_out_once() {
        for backend in [Backend::Portable, Backend::Rseq] {
            let Ok(allocator) = Allocator::builder().pages(64).backend(backend).build() else { continue };
            let device = Device::new(&allocator, Identity).unwrap();
            for bulk in [0, 1, 8, 40, 100] {
                let pool = DmaPool::create("twice", &device, 64, 0, 0).unwrap();
                let mut slots: Vec<Option<DmaBlock>> = (0..64).map(|_| None).collect();
                pool.alloc_bulk(Gfp::KERNEL, &mut slots).unwrap();
                let raw: Vec<_> = slots.drain(..20).flatten().map(|block| pool.into_raw(block)).collect();
                // They go on this CPU's list, from which the next blocks come.
                for block in raw.iter().rev() {
                    pool.0.give_back(pool.0.number(pool.0.words.at(block.addr())).unwrap());
                }
                let mut more: Vec<Option<DmaBlock>> = (0..100).map(|_| None).collect();
                if bulk == 0 {
                    more.iter_mut().for_each(|slot| *slot = Some(pool.alloc(Gfp::KERNEL).unwrap()));
                } else {
                    more.chunks_mut(bulk).for_each(|slots| _ = pool.alloc_bulk(Gfp::KERNEL, slots).unwrap());
                }
                let of_handles = slots.iter().chain(&more).flatten().map(|block| block.as_ptr().addr());
                let mut places: Vec<_> = of_handles.chain(raw.iter().map(|block| block.addr())).collect();
                places.sort_unstable();
                places.dedup();
                assert_eq!(places.len(), 164, "{backend}, {bulk} a call");
                // Numbers that lie deeper stay until a request finds them.
                assert!((1..=20).contains(&pool.stats().misused), "{backend}, {bulk} a call: {:?}", pool.stats());
                assert_eq!(pool.free_bulk(&mut slots) + pool.free_bulk(&mut more), 144);
                // SAFETY: each block belongs to the pool, and its pointer is given up once, here.
                raw.into_iter().for_each(|block| unsafe { pool.free_raw(block) }.unwrap());
            }
        }
    }

    /// Blocks that are too far apart for 31-bit offsets: those in the upper half of the memory, all blocks, none.
    #[test]
    fn far_blocks_come_and_go_beside_near_ones() {
        for (size, boundary) in [(64, 0), (200, 1024), (17, 0), (4096, 0)] {
            let device = device();
            let arena = device.allocator().arenas()[0].range.clone();
            let shape = || Shape::new(size, 0, boundary, true).unwrap();
            // Units come from the lower end of the memory.
            let middle = arena.start + 12 * 4096;
            for (memory, is_near) in [
                (middle - (1 << (31 + shape().grain))..middle, [true, false]),
                (4096..8192, [false, false]),
                (arena.clone(), [true, true]),
            ] {
                let pool = DmaPool::new("far", &device, shape(), false, memory).unwrap();
                let all = 24 * 4096 / pool.size() * 7 / 8;
                let mut slots: Vec<Option<DmaBlock>> = (0..all).map(|_| None).collect();
                for round in 0..3 {
                    slots.iter_mut().take(all / 3).for_each(|slot| *slot = pool.alloc(Gfp::KERNEL).ok());
                    let missing = slots.iter().filter(|slot| slot.is_none()).count();
                    let got: usize =
                        slots.chunks_mut(50).map(|slots| pool.alloc_bulk(Gfp::KERNEL, slots).unwrap()).sum();
                    assert_eq!((got, pool.stats().in_use), (missing, all), "{round}");
                    let mut places: Vec<_> = slots.iter().flatten().map(|block| block.as_ptr().addr()).collect();
                    places.sort_unstable();
                    assert!(places.windows(2).all(|two| two[1] - two[0] >= size));
                    for block in slots.iter().flatten() {
                        let addr = block.as_ptr().addr();
                        assert_eq!(pool.device_addr(block).get(), addr as u64);
                        let is_near = is_near[usize::from(addr >= middle)];
                        assert_eq!(pool.0.words.near(block.word()).is_some(), is_near, "{addr:#x} of {arena:x?}");
                    }
                    assert!(places[0] < middle && *places.last().unwrap() >= middle, "on both sides");
                    // Freed in another order: by pointer, singly, dropped, and in bulk.
                    let half = slots.len() / 2;
                    slots.chunks_mut(7).for_each(<[_]>::reverse);
                    for (nth, block) in slots[..half].iter_mut().filter_map(Option::take).enumerate() {
                        match nth % 3 {
                            0 => pool.free(block).unwrap(),
                            1 => drop(block),
                            // SAFETY: the block belongs to the pool, and its pointer is given up here.
                            _ => unsafe { pool.free_raw(pool.into_raw(block)) }.unwrap(),
                        }
                    }
                    let missing = pool.alloc_bulk(Gfp::KERNEL, &mut slots[..half / 2]).unwrap();
                    assert_eq!(pool.free_bulk(&mut slots), all - half + missing);
                    assert_eq!((pool.stats().in_use, pool.stats().misused), (0, 0));
                }
                pool.destroy().unwrap();
            }
        }
    }

    fn device() -> Device {
        Device::new(&Allocator::builder().pages(64).build().unwrap(), Identity).unwrap()
    }

    #[test]
    fn blocks_come_and_go_while_all_lists_are_held() {
        let pool = DmaPool::create("held", &device(), 64, 0, 0).unwrap();
        pool.0.lists.hold_all();
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
    fn a_forked_child_waits_for_no_thread_of_its_parent() {
        let device = device();
        let pool = DmaPool::create("parent's", &device, 64, 0, 0).unwrap();
        let block = pool.alloc(Gfp::KERNEL).unwrap();
        // As if another thread were changing both just now.
        let locked = (pool.0.lock(), device.lock_pools());
        // SAFETY: the child calls only functions that are allowed in the child of a multi-threaded program.
        match unsafe { libc::fork() } {
            0 => {
                // SAFETY: the alarm ends a child that hangs.
                unsafe { libc::alarm(30) };
                let is_right = pool.stats().blocks == 0
                    && device.pools().lines().count() == 1
                    && DmaPool::create("child's", &device, 64, 0, 0).is_err_and(|why| why == DeviceError::Forked)
                    && pool.free(block).is_err();
                // SAFETY: ends the child without the parent's exit handlers.
                unsafe { libc::_exit(if is_right { 0 } else { 1 }) }
            }
            child => {
                let mut status = 0;
                // SAFETY: waits for the child forked above.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                assert_eq!(status, 0);
            }
        }
        drop(locked);
        pool.free(block).unwrap();
        pool.destroy().unwrap();
    }
}
