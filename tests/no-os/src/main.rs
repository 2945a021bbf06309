//! Pagemill's core with nothing below it: no operating system's library, no allocator,
//! no runtime. It is linked for `x86_64-unknown-none` and then run as a process, where
//! its only two system calls say how it ended.
//!
//! What a kernel would lend, arrays lend here.
#![no_std]
#![no_main]

use core::arch::{asm, naked_asm};
use core::panic::PanicInfo;
use core::sync::atomic::Ordering::Relaxed;

use pagemill_core::atomic::{AtomicU32, AtomicU64};
use pagemill_core::{
    BoundBlock, Buddy, BuddyMetadata, CpuId, FrameRange, Giving, Lock, MapError, MemoryMap, MemoryRange, MisuseKind,
    Mobility, Order, Pcp, PcpLists, Pfn, Sleep, ThisCpu, kept_words_for,
};

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
        on_two_cpus();
        say(
            "8192 frames out and in three times, then blocks of every order up to 12; a machine's frames through the lists of \
             two CPUs\n",
        );
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

/// A machine with 16 MiB behind a hole, as its firmware describes it.
const TABLE: [MemoryRange; 5] = [
    MemoryRange::usable(0x100_0000, 0xff_f000),
    MemoryRange::reserved(0xf_0000, 0x1_0000),
    MemoryRange::usable(0, 0x9_fc00),
    MemoryRange::reserved(0x9_fc00, 0x400),
    MemoryRange::reserved(0x17f_0000, 0x1000),
];
/// The first 0x9f frames, and those from 16 MiB on but one.
const USABLE: u32 = 0x9f + 0xffe;
const SPAN: FrameRange = match FrameRange::new(Pfn::new(0), 0x1fff) {
    Ok(span) => span,
    Err(_) => panic!("a span beyond all frames"),
};
const SPAN_NEED: BuddyMetadata = BuddyMetadata::for_span(SPAN);
static SPAN_WORDS: [AtomicU64; SPAN_NEED.words] = [const { AtomicU64::new(0) }; SPAN_NEED.words];
static SPAN_AREAS: [AtomicU32; SPAN_NEED.areas] = [const { AtomicU32::new(0) }; SPAN_NEED.areas];
static KEPT: [AtomicU64; kept_words_for(0x1fff)] = [const { AtomicU64::new(0) }; kept_words_for(0x1fff)];
static LISTS: [PcpLists<508>; 2] = [const { PcpLists::new() }; 2];

/// The guard: a lock for each CPU. The only processor here plays both, one after the other.
struct Cpus {
    locks: [Lock; 2],
    here: AtomicU32,
}

impl ThisCpu for &Cpus {
    fn exclusive<R>(&self, section: impl FnOnce(CpuId) -> R) -> Option<R> {
        let cpu = CpuId::new(self.here.load(Relaxed));
        self.locks[cpu.get()].try_take().then(|| {
            let result = section(cpu);
            self.locks[cpu.get()].release(Sleep::SPIN);
            result
        })
    }
}

/// From the firmware's table to pages that one CPU allocates and the other one frees.
fn on_two_cpus() {
    let mut storage = [FrameRange::EMPTY; 4];
    let map = MemoryMap::new(TABLE.into_iter(), &mut storage).expect("a table like others");
    let buddy = Buddy::over(SPAN, &map, &SPAN_WORDS, &SPAN_AREAS).expect("metadata of the size that it asked for");
    assert!(map.frames() == USABLE && buddy.managed_frames() == USABLE, "frames of the map miscounted");
    let image = FrameRange::new(Pfn::new(0x1000), 0x100).expect("frames of the machine");
    assert!(buddy.reserve_range(image) == Ok(0x100), "the kernel's image is not free");
    let cpus = Cpus { locks: [Lock::new(), Lock::new()], here: AtomicU32::new(0) };
    let pages = Pcp::new(&buddy, &LISTS, &KEPT, &cpus).expect("a bit for each frame");
    let mut seen = [0u64; 0x2000 / 64];
    let mut out = 0;
    while let Some(pfn) = pages.alloc(Mobility::Unmovable, 0) {
        let (word, bit) = (&mut seen[pfn.as_usize() / 64], 1 << (pfn.as_u32() % 64));
        assert!(*word & bit == 0 && buddy.free_block(Pfn::new(0x200), Order::ZERO) == Err(MisuseKind::Foreign));
        *word |= bit;
        out += 1;
    }
    assert!(out == USABLE - 0x100, "a frame lost, or one of a hole handed out");
    assert!(buddy.reserve_range(image).is_ok_and(|frames| frames == 0), "the image was handed out");
    assert!(matches!(buddy.add_range(SPAN), Err(MapError::Present { .. })), "frames that are out were added");
    cpus.here.store(1, Relaxed);
    let is_out = |pfn: &u32| seen[*pfn as usize / 64] >> (pfn % 64) & 1 == 1;
    for pfn in (0..0x1fff).filter(is_out).map(Pfn::new) {
        // An interrupt that comes while the lists are in use goes to the buddy.
        let is_nested = pfn.as_u32() % 3 == 0 && cpus.locks[1].try_take();
        assert!(pages.free(pfn).is_ok() && pages.free(pfn).is_err(), "a free refused, or a second one taken");
        if is_nested {
            cpus.locks[1].release(Sleep::SPIN);
        }
    }
    assert!(pages.validate().is_ok_and(|listed| listed + buddy.free_frames() == out as usize), "frames lost");
    assert!(pages.drain_here() > 0 && buddy.free_frames() == out as usize, "frames left on a list");
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
