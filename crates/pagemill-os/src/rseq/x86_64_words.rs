//! The sections that move pages between a list and an array's slots, and convert between frame numbers and addresses on the
//! way.
//!
//! A batch that goes from the list to a buffer and from there to the slots is stored and loaded twice, and each load waits for
//! the store before it. Here it is once. Words are loaded by vectors of the width that stored them (see [`is_wide`]), or the
//! load waits for the cache.
use super::{CPU_SHIFT, FEW, HELD, LIMIT, Lists, RESTARTS};
use crate::lists::list::ITEMS;
use crate::words::is_wide;
use core::arch::asm;
use pagemill_core::{FrameState, PAGE_SHIFT};

/// Combines the states of eight frames, in two dependency chains.
macro_rules! look_at_eight {
    () => {
        concat!(
            look!("", "safe"),
            look!(" + 4", "other"),
            look!(" + 8", "safe"),
            look!(" + 12", "other"),
            look!(" + 16", "safe"),
            look!(" + 20", "other"),
            look!(" + 24", "safe"),
            look!(" + 28", "other"),
        )
    };
}

macro_rules! look {
    ($at:literal, $chain:literal) => {
        concat!("mov {x:e}, dword ptr [{from} + {i}*4", $at, "]\n", "and {", $chain, ":l}, byte ptr [{states} + {x}]\n")
    };
}

/// The loop of [`pop_words`], eight frames at a time: with vectors of 16 bytes, or of 32.
macro_rules! words_of_eight {
    (16) => {
        concat!(
            "pxor xmm2, xmm2\n",
            "movq xmm3, {zero}\n",
            "punpcklqdq xmm3, xmm3\n",
            "8:\n",
            "movups xmm0, [{from} + {i}*4]\n",
            "movups xmm4, [{from} + {i}*4 + 16]\n",
            "movaps xmm1, xmm0\n",
            "movaps xmm5, xmm4\n",
            "punpckldq xmm0, xmm2\n",
            "punpckhdq xmm1, xmm2\n",
            "punpckldq xmm4, xmm2\n",
            "punpckhdq xmm5, xmm2\n",
            "psllq xmm0, {page_shift}\n",
            "psllq xmm1, {page_shift}\n",
            "psllq xmm4, {page_shift}\n",
            "psllq xmm5, {page_shift}\n",
            "paddq xmm0, xmm3\n",
            "paddq xmm1, xmm3\n",
            "paddq xmm4, xmm3\n",
            "paddq xmm5, xmm3\n",
            "movups [{to} + {i}*8], xmm0\n",
            "movups [{to} + {i}*8 + 16], xmm1\n",
            "movups [{to} + {i}*8 + 32], xmm4\n",
            "movups [{to} + {i}*8 + 48], xmm5\n",
            look_at_eight!(),
            next_eight!(),
        )
    };
    (32) => {
        concat!(
            "vmovq xmm3, {zero}\n",
            "vpbroadcastq ymm3, xmm3\n",
            "8:\n",
            "vpmovzxdq ymm0, [{from} + {i}*4]\n",
            "vpmovzxdq ymm1, [{from} + {i}*4 + 16]\n",
            "vpsllq ymm0, ymm0, {page_shift}\n",
            "vpsllq ymm1, ymm1, {page_shift}\n",
            "vpaddq ymm0, ymm0, ymm3\n",
            "vpaddq ymm1, ymm1, ymm3\n",
            "vmovdqu [{to} + {i}*8], ymm0\n",
            "vmovdqu [{to} + {i}*8 + 32], ymm1\n",
            look_at_eight!(),
            next_eight!(),
            "vzeroupper\n",
        )
    };
}

/// The loop of [`push_words`], eight frames at a time.
macro_rules! numbers_of_eight {
    (16) => {
        concat!(
            "movq xmm4, {zero}\n",
            "punpcklqdq xmm4, xmm4\n",
            "8:\n",
            "movups xmm0, [{from} + {i}*8]\n",
            "movups xmm1, [{from} + {i}*8 + 16]\n",
            "movups xmm2, [{from} + {i}*8 + 32]\n",
            "movups xmm3, [{from} + {i}*8 + 48]\n",
            "psubq xmm0, xmm4\n",
            "psubq xmm1, xmm4\n",
            "psubq xmm2, xmm4\n",
            "psubq xmm3, xmm4\n",
            "psrlq xmm0, {page_shift}\n",
            "psrlq xmm1, {page_shift}\n",
            "psrlq xmm2, {page_shift}\n",
            "psrlq xmm3, {page_shift}\n",
            "shufps xmm0, xmm1, 0x88\n", // The lower halves.
            "shufps xmm2, xmm3, 0x88\n",
            "movups [{to} + {i}*4], xmm0\n",
            "movups [{to} + {i}*4 + 16], xmm2\n",
            next_eight!(),
        )
    };
    (32) => {
        concat!(
            "vmovq xmm4, {zero}\n",
            "vpbroadcastq ymm4, xmm4\n",
            "8:\n",
            "vmovdqu ymm0, [{from} + {i}*8]\n",
            "vmovdqu ymm1, [{from} + {i}*8 + 32]\n",
            "vpsubq ymm0, ymm0, ymm4\n",
            "vpsubq ymm1, ymm1, ymm4\n",
            "vpsrlq ymm0, ymm0, {page_shift}\n",
            "vpsrlq ymm1, ymm1, {page_shift}\n",
            "vshufps ymm0, ymm0, ymm1, 0x88\n", // The lower halves, and in their order.
            "vpermq ymm0, ymm0, 0xd8\n",
            "vmovdqu [{to} + {i}*4], ymm0\n",
            next_eight!(),
            "vzeroupper\n",
        )
    };
}

/// Jumps back to 8 while at least eight are left.
macro_rules! next_eight {
    () => {
        concat!("add {i:e}, 8\n", "lea {x:e}, [{i} + 8]\n", "cmp {x:e}, {n:e}\n", "jbe 8b\n")
    };
}

macro_rules! pop_words {
    ($name:ident, $width:tt) => {
        /// [`pop_words`], with vectors of that many bytes.
        ///
        /// # Safety
        /// As [`pop_words`]; the processor has such vectors.
        #[inline(always)]
        unsafe fn $name(lists: Lists, to: *mut usize, n: usize, zero: usize, states: *const u8) -> bool {
            // SAFETY: as in `pop`; reads and writes are of the `n` numbers, states and words alone.
            unsafe {
                asm!(
                    enter!("{none}"),
                    "movzx {i:e}, word ptr [{l}]",
                    "sub {i:e}, {n:e}",
                    "jb {none}",
                    "lea {from}, [{l} + {i}*4 + {items}]",
                    "xor {i:e}, {i:e}",
                    "mov {safe:e}, {safe_bit}",
                    "mov {other:e}, {safe_bit}",
                    "cmp {n:e}, {few}",
                    "jb 9f",
                    words_of_eight!($width),
                    "cmp {i:e}, {n:e}",
                    "jae 8f",
                    "9:", // One by one.
                    "mov {x:e}, dword ptr [{from} + {i}*4]",
                    "and {safe:l}, byte ptr [{states} + {x}]",
                    "shl {x}, {page_shift}",
                    "add {x}, {zero}",
                    "mov qword ptr [{to} + {i}*8], {x}",
                    "add {i:e}, 1",
                    "cmp {i:e}, {n:e}",
                    "jb 9b",
                    "8:",
                    "test {safe:l}, {other:l}",
                    "jz {none}",
                    "imul {x}, {n}, 0xffff", // top - n, popped + n
                    "add {x}, qword ptr [{l}]",
                    "mov qword ptr [{l}], {x}",
                    "5:",
                    leave!(),
                    l = out(reg) _, i = out(reg) _, from = out(reg) _, x = out(reg) _, safe = out(reg) _, other = out(reg) _,
                    to = in(reg) to, n = in(reg) n, zero = in(reg) zero, states = in(reg) states,
                    off = in(reg) lists.offset, base = in(reg) lists.base, cpus = in(reg) lists.cpus,
                    out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _, out("xmm5") _,
                    few = const FEW, page_shift = const PAGE_SHIFT, safe_bit = const FrameState::SAFE.as_byte(),
                    cpu_shift = const CPU_SHIFT, held = const HELD, items = const ITEMS, restarts = sym RESTARTS,
                    none = label { return false },
                    options(nostack),
                );
            }
            true
        }
    };
}
pop_words!(pop_words_by_16, 16);
pop_words!(pop_words_by_32, 32);

macro_rules! push_words {
    ($name:ident, $width:tt) => {
        /// [`push_words`], with vectors of that many bytes.
        ///
        /// # Safety
        /// As [`push_words`]; the processor has such vectors.
        #[inline(always)]
        unsafe fn $name(lists: Lists, from: *const usize, n: usize, zero: usize) -> bool {
            // SAFETY: as in `pop`; reads and writes are of the `n` words and numbers alone, and below the limit there are slots.
            unsafe {
                asm!(
                    enter!("{full}"),
                    "mov {w}, qword ptr [{l}]",
                    "movzx {i:e}, {w:x}",
                    "lea {to}, [{l} + {i}*4 + {items}]",
                    "add {i:e}, {n:e}",
                    "cmp {i:e}, dword ptr [{l} + {limit}]",
                    "ja {full}",
                    "xor {i:e}, {i:e}",
                    "cmp {n:e}, {few}",
                    "jb 9f",
                    numbers_of_eight!($width),
                    "cmp {i:e}, {n:e}",
                    "jae 8f",
                    "9:", // One by one.
                    "mov {x}, qword ptr [{from} + {i}*8]",
                    "sub {x}, {zero}",
                    "shr {x}, {page_shift}",
                    "mov dword ptr [{to} + {i}*4], {x:e}",
                    "add {i:e}, 1",
                    "cmp {i:e}, {n:e}",
                    "jb 9b",
                    "8:",
                    "add {w}, {n}",
                    "mov qword ptr [{l}], {w}",
                    "5:",
                    leave!(),
                    l = out(reg) _, w = out(reg) _, i = out(reg) _, to = out(reg) _, x = out(reg) _,
                    from = in(reg) from, n = in(reg) n, zero = in(reg) zero,
                    off = in(reg) lists.offset, base = in(reg) lists.base, cpus = in(reg) lists.cpus,
                    out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _,
                    few = const FEW, page_shift = const PAGE_SHIFT,
                    cpu_shift = const CPU_SHIFT, held = const HELD, limit = const LIMIT, items = const ITEMS,
                    restarts = sym RESTARTS, full = label { return false },
                    options(nostack),
                );
            }
            true
        }
    };
}
push_words!(push_words_by_16, 16);
push_words!(push_words_by_32, 32);

/// Pops `n` (1 to 64) frame numbers and stores the addresses of their pages at `to`. `zero` is the address of number 0. Returns
/// false, and pops none, if there are fewer, the list is held, or a frame's byte in `states` is not safe; then the words at
/// `to` are unspecified.
///
/// # Safety
/// As [`pop`](super::pop); `to` has room for `n` words, and each frame on the lists has a byte at its number in `states`.
#[inline(always)]
pub(crate) unsafe fn pop_words(lists: Lists, to: *mut usize, n: usize, zero: usize, states: *const u8) -> bool {
    // SAFETY: as the caller promises; the processor has what it needs.
    unsafe {
        if is_wide(n) {
            pop_words_by_32(lists, to, n, zero, states)
        } else {
            pop_words_by_16(lists, to, n, zero, states)
        }
    }
}

/// Pushes the frame numbers of the `n` (1 to 64) pages whose addresses are at `from`. `zero` is the address of number 0.
/// Returns false if they do not fit or the list is held.
///
/// # Safety
/// As [`pop`](super::pop); `n` words can be read at `from`.
#[inline(always)]
pub(crate) unsafe fn push_words(lists: Lists, from: *const usize, n: usize, zero: usize) -> bool {
    // SAFETY: as the caller promises; the processor has what it needs.
    unsafe { if is_wide(n) { push_words_by_32(lists, from, n, zero) } else { push_words_by_16(lists, from, n, zero) } }
}
