//! Blocks of the cache of keys and values that a language model fills while it writes: allocated in bulk, shared by
//! sequences with the same beginning, and swapped out to a file under pressure. All by a single thread.
//!
//! `cargo run --release -p pagemill --example kv_blocks`
use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pagemill::{Allocator, Block, Bulk, Gfp, Order};

/// A block holds the keys and values of this many tokens, 2 KiB each: 32 KiB, which is order 3.
const TOKENS: usize = 16;
const TOKEN_BYTES: usize = 2048;
const ORDER: u8 = 3;
const _: () = assert!(TOKENS * TOKEN_BYTES == 4096 << ORDER);

/// A block in memory, perhaps shared, or its place in the swap file.
#[derive(Clone)]
enum Slot {
    Memory(Arc<Block>),
    Swapped(Arc<Place>),
}

/// A place of the swap file. It is free again when the last sequence that has it is dropped or swapped in.
struct Place {
    number: u64,
    holes: Arc<Mutex<Vec<u64>>>,
}

impl Drop for Place {
    fn drop(&mut self) {
        locked(&self.holes).push(self.number);
    }
}

fn locked(holes: &Mutex<Vec<u64>>) -> MutexGuard<'_, Vec<u64>> {
    holes.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A sequence of tokens, and the blocks with what the model computed for them.
#[derive(Clone, Default)]
struct Sequence {
    tokens: Vec<u32>,
    slots: Vec<Slot>,
}

struct KvCache {
    memory: Allocator,
    order: Order,
    swap: File,
    /// Places of the swap file that are free, and the first one that was never used.
    holes: Arc<Mutex<Vec<u64>>>,
    end: u64,
    swapped_out: usize,
    swapped_in: usize,
    copies: usize,
}

impl KvCache {
    fn new(blocks: usize) -> Result<Self, Box<dyn std::error::Error>> {
        let order = Order::new(ORDER)?;
        let memory = Allocator::builder().pages(blocks * order.pages().get()).build()?;
        let (holes, end, swapped_out, swapped_in, copies) = (Arc::default(), 0, 0, 0, 0);
        Ok(Self { memory, order, swap: swap_file()?, holes, end, swapped_out, swapped_in, copies })
    }

    /// Allocates `n` blocks in one call. While memory is short, it swaps out blocks of the sequences in `idle`, in order.
    fn alloc(&mut self, n: usize, idle: &mut [Sequence]) -> io::Result<Vec<Block>> {
        loop {
            let mut blocks = Vec::with_capacity(n);
            let request = Bulk::up_to(n).order(self.order).gfp(Gfp::NOWAIT);
            self.memory
                .alloc_pages_bulk_callback(request, |block: Block| blocks.push(block))
                .map_err(io::Error::other)?;
            if blocks.len() == n {
                return Ok(blocks);
            }
            let missing = n - blocks.len();
            drop(blocks); // Give them back first: swapping out makes room for all n.
            if self.swap_out(missing, idle)? == 0 {
                return Err(io::Error::other("all blocks are in use by running sequences; run fewer at a time"));
            }
        }
    }

    /// Moves up to `n` blocks that no other sequence shares to the swap file. Returns how many.
    fn swap_out(&mut self, n: usize, idle: &mut [Sequence]) -> io::Result<usize> {
        let mut moved = 0;
        for slot in idle.iter_mut().flat_map(|sequence| &mut sequence.slots) {
            if moved == n {
                break;
            }
            let Slot::Memory(block) = slot else { continue };
            let Some(bytes) = Arc::get_mut(block) else { continue };
            let number = locked(&self.holes).pop().unwrap_or(self.end);
            self.end = self.end.max(number + 1);
            let place = Place { number, holes: self.holes.clone() };
            self.swap.write_all_at(bytes, number * bytes.len() as u64)?;
            *slot = Slot::Swapped(Arc::new(place)); // The block is free now.
            moved += 1;
        }
        self.swapped_out += moved;
        Ok(moved)
    }

    /// Brings all blocks of a sequence back into memory, which makes it ready to run.
    fn swap_in(&mut self, sequence: &mut Sequence, idle: &mut [Sequence]) -> io::Result<()> {
        let missing = sequence.slots.iter().filter(|slot| matches!(slot, Slot::Swapped(_))).count();
        let mut blocks = self.alloc(missing, idle)?.into_iter();
        for slot in &mut sequence.slots {
            if let Slot::Swapped(place) = slot
                && let Some(mut block) = blocks.next()
            {
                let at = place.number * block.len() as u64;
                self.swap.read_exact_at(&mut block, at)?;
                *slot = Slot::Memory(Arc::new(block));
            }
        }
        self.swapped_in += missing;
        Ok(())
    }

    /// Appends tokens to a sequence that is in memory, with new blocks where the last one is full.
    fn append(&mut self, sequence: &mut Sequence, tokens: &[u32], idle: &mut [Sequence]) -> io::Result<()> {
        let blocks = (sequence.tokens.len() + tokens.len()).div_ceil(TOKENS) - sequence.slots.len();
        let new = self.alloc(blocks, idle)?;
        sequence.slots.extend(new.into_iter().map(|block| Slot::Memory(Arc::new(block))));
        for &token in tokens {
            let at = sequence.tokens.len();
            let Slot::Memory(block) = &mut sequence.slots[at / TOKENS] else {
                unreachable!("the sequence is in memory")
            };
            if Arc::get_mut(block).is_none() {
                // Another sequence shares the block: this one writes to a copy.
                let mut copy = self.alloc(1, idle)?.remove(0);
                copy.copy_from_slice(block);
                *block = Arc::new(copy);
                self.copies += 1;
            }
            if let Some(bytes) = Arc::get_mut(block) {
                let start = at % TOKENS * TOKEN_BYTES;
                bytes[start..start + TOKEN_BYTES].fill(computed(token, at));
            }
            sequence.tokens.push(token);
        }
        Ok(())
    }
}

/// Plays the model: what it computes for a token at a place.
fn computed(token: u32, at: usize) -> u8 {
    (token as usize * 31 + at) as u8
}

/// Reads everything that belongs to a sequence, as attention does.
fn check(sequence: &Sequence) {
    for (at, &token) in sequence.tokens.iter().enumerate() {
        let Slot::Memory(block) = &sequence.slots[at / TOKENS] else { unreachable!("the sequence is in memory") };
        let start = at % TOKENS * TOKEN_BYTES;
        let expected = [computed(token, at); TOKEN_BYTES];
        assert!(block[start..start + TOKEN_BYTES] == expected, "token {at} has another one's keys and values");
    }
}

/// A file without a name, which ends with the process.
fn swap_file() -> io::Result<File> {
    // SAFETY: a name that ends; the call returns a new descriptor or -1.
    match unsafe { libc::memfd_create(c"swap".as_ptr(), libc::MFD_CLOEXEC) } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: nothing else owns the new descriptor.
        fd => Ok(unsafe { File::from_raw_fd(fd) }),
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Too few for all sequences at once: 256 blocks, 8 MiB.
    let mut cache = KvCache::new(256)?;
    // All sequences begin with the same prompt, whose blocks are computed and stored once.
    let mut prompt = Sequence::default();
    let instructions: Vec<u32> = (0..1000).collect();
    cache.append(&mut prompt, &instructions, &mut [])?;
    let mut sequences = vec![prompt.clone(); 32];
    println!("32 sequences share the {} blocks of one prompt", prompt.slots.len());

    // Each sequence runs for a while, then the next one: 32 * 300 tokens do not fit beside the prompt.
    for round in 0..6 {
        for running in 0..sequences.len() {
            let mut sequence = std::mem::take(&mut sequences[running]);
            cache.swap_in(&mut sequence, &mut sequences)?;
            let tokens: Vec<u32> = (0..50).map(|n| round * 1000 + running as u32 * 50 + n).collect();
            cache.append(&mut sequence, &tokens, &mut sequences)?;
            check(&sequence);
            sequences[running] = sequence;
        }
    }
    let (copies, out, back) = (cache.copies, cache.swapped_out, cache.swapped_in);
    println!("{copies} blocks copied before a write; {out} swapped out and {back} swapped in");
    assert!(copies == 32 && out > 0 && back > 0);
    let in_file = cache.end - locked(&cache.holes).len() as u64;
    println!("{} distinct blocks in memory, {in_file} in the swap file", cache.memory.validate()?.handed_out >> ORDER);
    drop((prompt, sequences));
    assert_eq!(locked(&cache.holes).len() as u64, cache.end, "every place is free again");
    cache.memory.close()?;
    Ok(())
}
