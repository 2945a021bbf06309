//! Two pools that differ in one thing: where the links between free blocks are.
//!
//! `links-outside` is Pagemill's design without its detection, and without what else a pool has to do for its users: numbers
//! of blocks on per-CPU lists, the lists that Pagemill has (`pagemill_os::PerCpu`), before one stack of numbers; a
//! table says where each page is. `links-inside` has the same lists before the same stack, but both are chains through
//! the blocks themselves, and a free block remembers beside its link where the device finds it, as Linux's pool does since 2023.
//! Both move the same number of blocks between the two levels, in sections of the same shape.

use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pagemill_core::{ListPolicy, Mobility};
use pagemill_os::{Backend, Batch, Load, PerCpu, current_cpu};

use super::chains::{Chains, first, word};
use crate::rows::dma::{BlockRow, OneBlock, Shape, Singly};
use crate::rows::region::Region;
use crate::rows::{Kind, Unavailable};
use crate::subject::PAGE_BYTES;

/// Blocks that a CPU's list holds at most, as in Pagemill's pool; half of them go to the stack and come from there at once.
fn limit(shape: Shape) -> usize {
    ((1 << 20) / shape.bytes).clamp(256, 512)
}

/// Pages for the blocks of a shape, and for those that lie on the lists of CPUs where the thread was before.
fn memory(shape: Shape) -> Result<Region, Unavailable> {
    let blocks = shape.blocks + limit(shape) * pagemill_os::possible_cpus();
    Region::new((shape.bytes * blocks).div_ceil(PAGE_BYTES))
}

/// Which of a CPU's lists is used.
const LIST: Mobility = Mobility::Unmovable;

pub(super) fn outside() -> BlockRow {
    BlockRow::new("links-outside", Kind::Design, |shape| Ok(Singly(Outside::new(shape)?)))
}

pub(super) fn inside() -> BlockRow {
    BlockRow::new("links-inside", Kind::Design, |shape| Ok(Singly(Inside::new(shape)?)))
}

fn locked<T>(stack: &Mutex<T>) -> MutexGuard<'_, T> {
    stack.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where a page is, for the program and for the device.
struct Place {
    at: NonNull<u8>,
    device: u64,
}

struct Outside {
    lists: PerCpu,
    pages: Box<[Place]>,
    /// A block's number is its page's, shifted so far, and its place in the page.
    shift: u32,
    bytes: usize,
    at_once: usize,
    stack: Mutex<Vec<u32>>,
    _memory: Region,
}

/// A block, and its number.
struct Numbered {
    at: NonNull<u8>,
    device: u64,
    number: u32,
}

impl Outside {
    fn new(shape: Shape) -> Result<Outside, Unavailable> {
        let per_page = PAGE_BYTES / shape.bytes;
        let memory = memory(shape)?;
        let refused = |error: pagemill_core::Error| Unavailable(error.to_string());
        let cpus = pagemill_os::possible_cpus();
        let lists = PerCpu::new(Backend::Rseq, cpus, current_cpu).map_err(refused)?;
        lists.lists().for_each(|list| list.set_policy(ListPolicy { limit: limit(shape) as u32, ..ListPolicy::START }));
        let pages: Box<[Place]> =
            memory.blocks(PAGE_BYTES).map(|at| Place { at, device: at.as_ptr() as u64 }).collect();
        let shift = per_page.next_power_of_two().ilog2();
        let numbers = |page: u32| (0..per_page as u32).map(move |slot| page << shift | slot);
        let mut stack: Vec<u32> = (0..pages.len() as u32).flat_map(numbers).collect();
        stack.reverse();
        let at_once = limit(shape) / 2;
        Ok(Outside { lists, pages, shift, bytes: shape.bytes, at_once, stack: Mutex::new(stack), _memory: memory })
    }

    #[cold]
    #[inline(never)]
    fn refill(&self) -> Option<u32> {
        let mut load = Load::new();
        {
            let mut stack = locked(&self.stack);
            let rest = stack.len().saturating_sub(self.at_once);
            load.push_slice(&stack[rest..]);
            stack.truncate(rest);
        }
        let (&first, rest) = load.as_slice().split_last()?;
        for part in rest.chunks(Batch::CAPACITY) {
            let mut batch = Batch::new();
            batch.push_slice(part);
            if !self.lists.push_n(LIST, &batch, 0..part.len()) {
                locked(&self.stack).extend_from_slice(part);
            }
        }
        Some(first)
    }

    #[cold]
    #[inline(never)]
    fn overflow(&self, number: u32) {
        let mut load = Load::new();
        while load.len() < self.at_once {
            let mut batch = Batch::new();
            self.lists.pop_n(LIST, Batch::CAPACITY, &mut batch);
            if batch.is_empty() {
                break;
            }
            load.push_slice(batch.as_slice());
        }
        locked(&self.stack).extend_from_slice(load.as_slice());
        if !self.lists.push(LIST, number) {
            locked(&self.stack).push(number);
        }
    }
}

impl OneBlock for Outside {
    type Block = Numbered;

    #[inline]
    fn get(&mut self) -> Option<Numbered> {
        let number = match self.lists.pop(LIST) {
            Some(number) => number,
            None => self.refill()?,
        };
        let place = &self.pages[(number >> self.shift) as usize];
        let offset = (number & ((1 << self.shift) - 1)) as usize * self.bytes;
        // SAFETY: the number is that of a block of this page.
        Some(Numbered { at: unsafe { place.at.add(offset) }, device: place.device + offset as u64, number })
    }

    #[inline]
    fn put(&mut self, block: Numbered) {
        if !self.lists.push(LIST, block.number) {
            self.overflow(block.number);
        }
    }

    fn at(block: &Numbered) -> NonNull<u8> {
        block.at
    }

    fn device(&self, block: &Numbered) -> Option<u64> {
        Some(block.device)
    }
}

struct Inside {
    lists: Chains,
    at_once: usize,
    stack: Mutex<Stack>,
    _memory: Region,
}

/// A chain of free blocks, and how many they are.
#[derive(Clone, Copy)]
struct Stack {
    first: Option<NonNull<u8>>,
    len: usize,
}

// SAFETY: the blocks are the pool's own memory, and whoever has the stack has them alone.
unsafe impl Send for Stack {}

/// A block, and where the device finds it.
struct Plain {
    at: NonNull<u8>,
    device: u64,
}

/// What a free block begins with.
#[repr(C)]
struct Free {
    next: u64,
    device: u64,
}

/// What follows a block.
///
/// # Safety
/// It is free, and the caller's.
unsafe fn next(block: NonNull<u8>) -> Option<NonNull<u8>> {
    // SAFETY: the caller vouches for it; a free block begins so.
    first(unsafe { (*block.cast::<Free>().as_ptr()).next })
}

/// Lets a list of `len` follow a block.
///
/// # Safety
/// As [`next`].
unsafe fn follow(block: NonNull<u8>, next: Option<NonNull<u8>>, len: usize) {
    // SAFETY: as in `next`.
    unsafe { (*block.cast::<Free>().as_ptr()).next = next.map_or(0, |next| word(next, len)) };
}

impl Inside {
    fn new(shape: Shape) -> Result<Inside, Unavailable> {
        let lists = Chains::new(limit(shape) as u32)?;
        let memory = memory(shape)?;
        let mut stack = Stack { first: None, len: 0 };
        for block in memory.blocks(shape.bytes).rev() {
            let next = stack.first.map_or(0, |next| word(next, 0));
            // SAFETY: the block is this pool's, and has 16 bytes at least.
            unsafe { block.cast::<Free>().write(Free { next, device: block.as_ptr() as u64 }) };
            stack = Stack { first: Some(block), len: stack.len + 1 };
        }
        Ok(Inside { lists, at_once: limit(shape) / 2, stack: Mutex::new(stack), _memory: memory })
    }

    #[cold]
    #[inline(never)]
    fn refill(&self) -> Option<NonNull<u8>> {
        let (taken, begin, end, len) = {
            let mut stack = locked(&self.stack);
            let taken = stack.first?;
            let len = (stack.len - 1).min(self.at_once - 1);
            // SAFETY: what the stack leads to are `stack.len` free blocks of this pool's, as long as it is locked.
            unsafe {
                let begin = next(taken);
                let (mut end, mut rest) = (None, begin);
                for left in (0..len).rev() {
                    let Some(block) = rest else { break };
                    (end, rest) = (rest, next(block));
                    // On a list each knows how many are behind it.
                    follow(block, rest.filter(|_| left > 0), left);
                }
                *stack = Stack { first: rest, len: stack.len - 1 - len };
                (taken, begin, end, len)
            }
        };
        if let Some((begin, end)) = begin.zip(end)
            && !self.lists.install(word(begin, len))
        {
            self.give(begin, end, len);
        }
        Some(taken)
    }

    #[cold]
    #[inline(never)]
    fn overflow(&self, block: NonNull<u8>) {
        if let Some((begin, end)) = self.lists.pop_chain(self.at_once) {
            self.give(begin, end, self.at_once);
        }
        if !self.lists.push(block) {
            self.give(block, block, 1);
        }
    }

    /// Puts a chain of `len`, which is the caller's, on the stack.
    fn give(&self, begin: NonNull<u8>, end: NonNull<u8>, len: usize) {
        let mut stack = locked(&self.stack);
        // SAFETY: the chain is the caller's, of this pool's free blocks.
        unsafe { follow(end, stack.first, 0) };
        *stack = Stack { first: Some(begin), len: stack.len + len };
    }
}

impl OneBlock for Inside {
    type Block = Plain;

    #[inline]
    fn get(&mut self) -> Option<Plain> {
        let at = match self.lists.pop() {
            Some(block) => block,
            None => self.refill()?,
        };
        // SAFETY: a block that was free begins so, and it is the caller's now.
        let device = unsafe { at.cast::<Free>().as_ref().device };
        Some(Plain { at, device })
    }

    #[inline]
    fn put(&mut self, block: Plain) {
        // SAFETY: the block is the caller's, who gives it up, and has 16 bytes at least.
        unsafe { (*block.at.cast::<Free>().as_ptr()).device = block.device };
        if !self.lists.push(block.at) {
            self.overflow(block.at);
        }
    }

    fn at(block: &Plain) -> NonNull<u8> {
        block.at
    }

    fn device(&self, block: &Plain) -> Option<u64> {
        Some(block.device)
    }
}
