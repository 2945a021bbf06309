//! The sections for x86-64. The scheme is in [`super`]; `fs:0` is the thread pointer.
//!
//! Labels: 3 the descriptor, 4 start, 5 behind the commit, 6 abort, 7 the way out without a commit. Vector copies use
//! SSE encodings, which leave the upper halves of the registers alone. x86-64's loads are ordered, so that reading
//! `held` before the word needs no fence.
use super::{CPU_SHIFT, HELD, LIMIT, Lists, RESTARTS};
use crate::lists::ITEMS;
use crate::words::is_wide;
use core::arch::asm;
use core::sync::atomic::AtomicU32;
use pagemill_core::{FrameState, PAGE_SHIFT};

/// Fewer numbers than this are copied one by one: a vector read of what was just written singly, or the other way round, waits for
/// the store to reach the cache (about 5 ns).
const FEW: usize = 8;

/// Enters a section, finds the list of the CPU in `{l}` and leaves (by 7 unless said) if it is held or the thread has no CPU.
macro_rules! enter {
    () => {
        enter!("7f")
    };
    ($out:literal) => {
        concat!(
            "2:\n",
            "lea {l}, [rip + 3f]\n",
            "mov qword ptr fs:[{off} + 8], {l}\n",
            "4:\n",
            "mov {l:e}, dword ptr fs:[{off} + 4]\n",
            "cmp {l:e}, {cpus:e}\n",
            "jae ",
            $out,
            "\n",
            "shl {l}, {cpu_shift}\n",
            "add {l}, {base}\n",
            "cmp dword ptr [{l} + {held}], 0\n",
            "jne ",
            $out,
            "\n",
        )
    };
}

/// The descriptor of the section that began at the last 4 and committed before the last 5, and its abort handler
/// behind the signature that glibc registered (0x53053053, the operand of an undefined instruction).
macro_rules! leave {
    () => {
        concat!(
            ".pushsection __rseq_cs, \"aw\"\n",
            ".balign 32\n",
            "3:\n",
            ".long 0, 0\n",
            ".quad 4b, 5b - 4b, 6f\n",
            ".popsection\n",
            ".pushsection __rseq_abort, \"ax\"\n",
            ".byte 0x0f, 0xb9, 0x3d\n",
            ".long 0x53053053\n",
            "6:\n",
            "lock inc qword ptr [rip + {restarts}]\n",
            "jmp 2b\n",
            ".popsection\n",
        )
    };
}

/// The CPU's number as the kernel last wrote it; above all possible ones if the thread is not registered.
#[inline]
pub(crate) fn cpu(offset: isize) -> u32 {
    let cpu: u32;
    // SAFETY: glibc put the thread's area there; reading a field changes nothing.
    unsafe {
        asm!("mov {cpu:e}, dword ptr fs:[{off} + 4]", cpu = out(reg) cpu, off = in(reg) offset,
            options(nostack, readonly, preserves_flags));
    }
    cpu
}

/// Pops one frame number; `u32::MAX` if there is none or the list is held.
///
/// # Safety
/// The self-test passed, and `lists` names lists for `lists.cpus` CPUs.
#[inline]
pub(crate) unsafe fn pop(lists: Lists) -> u32 {
    let pfn: u32;
    // SAFETY: the section touches the list of the CPU it runs on, in bounds (top <= limit), and commits with one
    // store.
    unsafe {
        asm!(
            "mov {pfn:e}, -1",
            enter!(),
            "mov {w}, qword ptr [{l}]",
            "movzx {top:e}, {w:x}",
            "sub {top:e}, 1",
            "jb 7f",
            "mov {top:e}, dword ptr [{l} + {top}*4 + {items}]",
            "add {w}, 0xffff", // top - 1, popped + 1
            "mov qword ptr [{l}], {w}",
            "5:",
            "mov {pfn:e}, {top:e}",
            leave!(),
            "7:",
            l = out(reg) _, w = out(reg) _, top = out(reg) _, pfn = out(reg) pfn,
            off = in(reg) lists.offset, base = in(reg) lists.base, cpus = in(reg) lists.cpus,
            cpu_shift = const CPU_SHIFT, held = const HELD, items = const ITEMS, restarts = sym RESTARTS,
            options(nostack),
        );
    }
    pfn
}

/// Pops up to `want` (1 to 64) frame numbers to `to`, which has room for as many and 15 more; none if there are fewer than
/// `least`. Returns how many.
///
/// # Safety
/// As [`pop`].
#[inline]
pub(crate) unsafe fn pop_n(lists: Lists, to: *mut u32, want: usize, least: usize) -> usize {
    let n: usize;
    // SAFETY: as in `pop`; reads run at most 15 numbers over the top, inside the list's padding, writes as far over
    // `to`, as the caller allows.
    unsafe {
        asm!(
            enter!(),
            "mov {w}, qword ptr [{l}]",
            "movzx {n:e}, {w:x}",
            "mov {i:e}, {n:e}",
            "cmp {n:e}, {least:e}",
            "jb 7f",
            "cmp {n:e}, {want:e}",
            "cmova {n:e}, {want:e}",
            "sub {i:e}, {n:e}",
            "lea {from}, [{l} + {i}*4 + {items}]",
            "xor {i:e}, {i:e}",
            "cmp {n:e}, {few}",
            "jb 9f",
            "8:",
            "movups xmm0, [{from} + {i}*4]",
            "movups xmm1, [{from} + {i}*4 + 16]",
            "movups xmm2, [{from} + {i}*4 + 32]",
            "movups xmm3, [{from} + {i}*4 + 48]",
            "movups [{to} + {i}*4], xmm0",
            "movups [{to} + {i}*4 + 16], xmm1",
            "movups [{to} + {i}*4 + 32], xmm2",
            "movups [{to} + {i}*4 + 48], xmm3",
            "add {i:e}, 16",
            "cmp {i:e}, {n:e}",
            "jb 8b",
            "jmp 8f",
            "9:", // One by one, the last first; none if there is none.
            "mov {i:e}, {n:e}",
            "sub {i}, 1",
            "jb 8f",
            "9:",
            "mov {x:e}, dword ptr [{from} + {i}*4]",
            "mov dword ptr [{to} + {i}*4], {x:e}",
            "sub {i}, 1",
            "jae 9b",
            "8:",
            "imul {i}, {n}, 0xffff", // top - n, popped + n
            "add {w}, {i}",
            "mov qword ptr [{l}], {w}",
            "5:",
            leave!(),
            "jmp 8f",
            "7:",
            "xor {n:e}, {n:e}",
            "8:",
            l = out(reg) _, w = out(reg) _, n = out(reg) n, i = out(reg) _, from = out(reg) _, x = out(reg) _,
            few = const FEW,
            to = in(reg) to, want = in(reg) want, least = in(reg) least,
            off = in(reg) lists.offset, base = in(reg) lists.base, cpus = in(reg) lists.cpus,
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
            cpu_shift = const CPU_SHIFT, held = const HELD, items = const ITEMS, restarts = sym RESTARTS,
            options(nostack),
        );
    }
    n
}

/// Looks at the states of eight frames, in two chains.
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

/// The loop over eight at a time of [`pop_words`]: with vectors of 16 bytes, or of 32.
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

/// The loop over eight at a time of [`push_words`].
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

/// Goes back to 8 while there are eight more; goes on at the next 8 if there is none, else one by one.
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

/// Pops `n` (1 to 64) frame numbers and stores the words of their pages at `to`, where number 0 would be at `zero`. False: there
/// are fewer, or the list is held, or one's byte in `states` is not safe; then nothing is popped, and what is stored means nothing.
///
/// # Safety
/// As [`pop`]; `to` has room for `n` words, and each frame on the lists has a byte at its number in `states`.
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

/// Pushes the frame numbers of the `n` (1 to 64) pages with the words at `from`, where number 0 would be at `zero`. False: they do
/// not fit, or the list is held.
///
/// # Safety
/// As [`pop`]; `n` words can be read at `from`.
#[inline(always)]
pub(crate) unsafe fn push_words(lists: Lists, from: *const usize, n: usize, zero: usize) -> bool {
    // SAFETY: as the caller promises; the processor has what it needs.
    unsafe { if is_wide(n) { push_words_by_32(lists, from, n, zero) } else { push_words_by_16(lists, from, n, zero) } }
}

/// Pushes one frame number. False: the list is full or held.
///
/// # Safety
/// As [`pop`].
#[inline]
pub(crate) unsafe fn push(lists: Lists, pfn: u32) -> bool {
    // SAFETY: as in `pop`; below the limit there is a slot. It leaves by a jump: no flag is made and looked at.
    unsafe {
        asm!(
            enter!("{full}"),
            "mov {w}, qword ptr [{l}]",
            "movzx {top:e}, {w:x}",
            "cmp {top:e}, dword ptr [{l} + {limit}]",
            "jae {full}",
            "mov dword ptr [{l} + {top}*4 + {items}], {pfn:e}",
            "add {w}, 1",
            "mov qword ptr [{l}], {w}",
            "5:",
            leave!(),
            l = out(reg) _, w = out(reg) _, top = out(reg) _, pfn = in(reg) pfn,
            off = in(reg) lists.offset, base = in(reg) lists.base, cpus = in(reg) lists.cpus,
            cpu_shift = const CPU_SHIFT, held = const HELD, limit = const LIMIT, items = const ITEMS,
            restarts = sym RESTARTS, full = label { return false },
            options(nostack),
        );
    }
    true
}

/// Pushes the `n` (1 to 64) frame numbers at `from`, behind which 15 more can be read. False: they do not fit, or
/// the list is held.
///
/// # Safety
/// As [`pop`].
#[inline]
pub(crate) unsafe fn push_n(lists: Lists, from: *const u32, n: usize) -> bool {
    let is_pushed: u32;
    // SAFETY: as in `pop`; writes run at most 15 numbers over the new top, inside the list's padding.
    unsafe {
        asm!(
            "xor {done:e}, {done:e}",
            enter!(),
            "mov {w}, qword ptr [{l}]",
            "movzx {i:e}, {w:x}",
            "lea {to}, [{l} + {i}*4 + {items}]",
            "add {i:e}, {n:e}",
            "cmp {i:e}, dword ptr [{l} + {limit}]",
            "ja 7f",
            "xor {i:e}, {i:e}",
            "cmp {n:e}, {few}",
            "jb 9f",
            "8:",
            "movups xmm0, [{from} + {i}*4]",
            "movups xmm1, [{from} + {i}*4 + 16]",
            "movups xmm2, [{from} + {i}*4 + 32]",
            "movups xmm3, [{from} + {i}*4 + 48]",
            "movups [{to} + {i}*4], xmm0",
            "movups [{to} + {i}*4 + 16], xmm1",
            "movups [{to} + {i}*4 + 32], xmm2",
            "movups [{to} + {i}*4 + 48], xmm3",
            "add {i:e}, 16",
            "cmp {i:e}, {n:e}",
            "jb 8b",
            "jmp 8f",
            "9:", // One by one.
            "mov {x:e}, dword ptr [{from} + {i}*4]",
            "mov dword ptr [{to} + {i}*4], {x:e}",
            "add {i:e}, 1",
            "cmp {i:e}, {n:e}",
            "jb 9b",
            "8:",
            "add {w}, {n}",
            "mov qword ptr [{l}], {w}",
            "5:",
            "mov {done:e}, 1",
            leave!(),
            "7:",
            l = out(reg) _, w = out(reg) _, i = out(reg) _, to = out(reg) _, x = out(reg) _, few = const FEW, done = out(reg) is_pushed,
            from = in(reg) from, n = in(reg) n,
            off = in(reg) lists.offset, base = in(reg) lists.base, cpus = in(reg) lists.cpus,
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
            cpu_shift = const CPU_SHIFT, held = const HELD, limit = const LIMIT,
            items = const ITEMS,
            restarts = sym RESTARTS,
            options(nostack),
        );
    }
    is_pushed != 0
}

/// Adds one to this CPU's 64-bit counter at `counter` bytes into its lists; not while they are held.
///
/// # Safety
/// As [`pop`], with `lists` naming the CPU's first list; the counter must be inside one CPU's lists.
#[inline]
pub(crate) unsafe fn count(lists: Lists, counter: usize) {
    // SAFETY: as in `pop`. One instruction reads and writes the counter: it is the commit.
    unsafe {
        asm!(
            "2:",
            "lea {l}, [rip + 3f]",
            "mov qword ptr fs:[{off} + 8], {l}",
            "4:",
            "mov {l:e}, dword ptr fs:[{off} + 4]",
            "cmp {l:e}, {cpus:e}",
            "jae 7f",
            "shl {l}, {cpu_shift}",
            "add {l}, {base}",
            "inc qword ptr [{l}]",
            "5:",
            leave!(),
            "7:",
            l = out(reg) _,
            off = in(reg) lists.offset, base = in(reg) lists.base.wrapping_add(counter), cpus = in(reg) lists.cpus,
            cpu_shift = const CPU_SHIFT, restarts = sym RESTARTS,
            options(nostack),
        );
    }
}

/// The self-test's section: says in `inside` which CPU it is on, plus one, and spins until `leave` is not 0, `turns`
/// times at most. Returns whether it was sent back.
///
/// # Safety
/// glibc registered this thread at `offset`.
pub(super) unsafe fn spin(offset: isize, inside: &AtomicU32, leave: &AtomicU32, turns: u64) -> bool {
    let was_restarted: u32;
    // SAFETY: touches the two flags and registers alone. The abort goes to the end.
    unsafe {
        asm!(
            "xor {sent:e}, {sent:e}",
            "lea {l}, [rip + 3f]",
            "mov qword ptr fs:[{off} + 8], {l}",
            "4:",
            "mov {l:e}, dword ptr fs:[{off} + 4]",
            "inc {l:e}",
            "mov dword ptr [{inside}], {l:e}",
            "8:",
            "cmp dword ptr [{leave}], 0",
            "jne 7f",
            "dec {turns}",
            "jnz 8b",
            "5:",
            ".pushsection __rseq_cs, \"aw\"",
            ".balign 32",
            "3:",
            ".long 0, 0",
            ".quad 4b, 5b - 4b, 6f",
            ".popsection",
            ".pushsection __rseq_abort, \"ax\"",
            ".byte 0x0f, 0xb9, 0x3d",
            ".long 0x53053053",
            "6:",
            "mov {sent:e}, 1",
            "jmp 7f",
            ".popsection",
            "7:",
            l = out(reg) _, sent = out(reg) was_restarted, turns = inout(reg) turns => _,
            off = in(reg) offset, inside = in(reg) inside.as_ptr(), leave = in(reg) leave.as_ptr(),
            options(nostack),
        );
    }
    was_restarted != 0
}
