//! Pagemill's core with nothing below it: no operating system's library, no allocator,
//! no runtime. It is linked for `x86_64-unknown-none` and then run as a process, where
//! its only two system calls say how it ended.
//!
//! What a kernel would lend, four arrays lend here.
#![no_std]
#![no_main]

use core::arch::{asm, naked_asm};
use core::panic::PanicInfo;

use pagemill_core::atomic::{AtomicU32, AtomicU64};
use pagemill_core::{BoundBlock, Buddy, BuddyMetadata, Giving, MisuseKind, Mobility, Order, Pfn};

/// 32 MiB, had they memory: 16 pageblocks.
const FRAMES: u32 = 8192;
const NEED: BuddyMetadata = BuddyMetadata::for_frames(FRAMES);

static WORDS: [AtomicU64; NEED.words] = [const { AtomicU64::new(0) }; NEED.words];
static AREAS: [AtomicU32; NEED.areas] = [const { AtomicU32::new(0) }; NEED.areas];

/// Where the kernel, or whoever loads this, begins.
///
/// # Safety
/// To be entered once, at the program's start, with a stack.
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn _start() -> ! {
    naked_asm!("and rsp, -16", "call {run}", "ud2", run = sym run)
}

extern "C" fn run() -> ! {
    let rounds = work();
    if rounds == 3 {
        say("8192 frames out and in three times, then blocks of every order up to 12\n");
        exit(0)
    }
    exit(2)
}

/// Everything out and everything in, three times; then blocks. Returns the rounds.
fn work() -> u32 {
    let buddy = Buddy::new(Pfn::new(0), FRAMES, &WORDS, &AREAS).expect("metadata of the size that it asked for");
    let bound = BoundBlock::new();
    let mut rounds = 0;
    for _ in 0..3 {
        let mut seen = [0u64; FRAMES as usize / 64];
        while buddy.free_frames() > 0 {
            let got = buddy.take(&bound, 100, Mobility::Unmovable, 0, &mut |first, mask| {
                let word = &mut seen[first.as_u32() as usize / 64];
                assert!(*word & mask == 0, "a frame handed out twice");
                *word |= mask;
            });
            assert!(got > 0, "free frames that cannot be had");
        }
        assert!(seen.iter().all(|&word| word == !0), "a frame lost");
        let mut giving = Giving::to(&buddy);
        // Backwards and by halves, so that buddies come home apart.
        (0..FRAMES).rev().filter(|n| n % 2 == 0).for_each(|n| giving.give(Pfn::new(n)));
        (0..FRAMES).filter(|n| n % 2 == 1).for_each(|n| giving.give(Pfn::new(n)));
        let given = giving.finish();
        assert!(given.frames == FRAMES as usize && given.doubles == 0, "frames given back miscounted");
        rounds += 1;
    }
    buddy.unbind(&bound);
    for order in 0..=12 {
        let order = Order::new(order).expect("an order up to 18");
        let pfn = buddy.alloc_block(order, Mobility::Movable, 0).expect("a block of an empty buddy");
        assert!(pfn.is_aligned_to(order), "a block not aligned to its size");
        buddy.free_block(pfn, order).expect("a block that was handed out");
        assert!(buddy.free_block(pfn, order) == Err(MisuseKind::DoubleFree), "a double free not noticed");
    }
    assert!(buddy.free_frames() == FRAMES as usize, "frames lost among the blocks");
    rounds
}

fn say(text: &str) {
    // SAFETY: write(2) reads the bytes of `text`, which live until it returns; the
    // system call overwrites rcx and r11 and nothing else, as declared.
    unsafe {
        asm!("syscall", inlateout("rax") 1usize => _, in("rdi") 1usize, in("rsi") text.as_ptr(), in("rdx") text.len(),
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
}

fn exit(status: usize) -> ! {
    // SAFETY: exit_group(2) takes a number and does not return.
    unsafe { asm!("syscall", in("rax") 231usize, in("rdi") status, options(noreturn, nostack)) }
}

#[panic_handler]
fn panicked(info: &PanicInfo<'_>) -> ! {
    if let Some(text) = info.message().as_str() {
        say(text);
        say("\n");
    }
    exit(1)
}
