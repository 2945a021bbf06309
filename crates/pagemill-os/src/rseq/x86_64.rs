//! The sections for x86-64. The scheme is in [`super`]; `fs:0` is the thread pointer.
//!
//! Labels: 3 the descriptor, 4 the start, 5 after the commit, 6 the abort handler, 7 the exit without a commit. Vector copies
//! use SSE encodings, which do not change the upper halves of the registers. x86-64 orders loads, so reading `held` before the
//! word needs no fence.
use super::{CPU_SHIFT, HELD, LIMIT, Lists, RESTARTS};
use crate::lists::list::ITEMS;
use core::arch::asm;
use core::sync::atomic::AtomicU32;

/// Fewer numbers than this are copied one by one: a vector load of numbers that were just stored one by one, or the reverse,
/// waits for the stores to reach the cache (about 5 ns).
const FEW: usize = 8;

/// Enters a section and puts the CPU's list into `{l}`. Leaves, by 7 unless a label is given, if the list is held or the thread
/// has no CPU number.
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

/// The descriptor of the section between the last labels 4 and 5, and its abort handler after the signature that glibc
/// registered (0x53053053, the operand of an undefined instruction).
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

#[path = "x86_64_words.rs"]
mod words;
pub(crate) use words::{pop_words, push_words};

/// The CPU's number as the kernel last wrote it; larger than any CPU's if the thread is not registered.
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
    // SAFETY: the section accesses the list of the CPU that it runs on, in bounds (top <= limit), and commits with one store.
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

/// Pops up to `want` (1 to 64) frame numbers to `to`, which must have room for 15 more; pops none if there are fewer than
/// `least`. Returns how many.
///
/// # Safety
/// As [`pop`].
#[inline]
pub(crate) unsafe fn pop_n(lists: Lists, to: *mut u32, want: usize, least: usize) -> usize {
    let n: usize;
    // SAFETY: as in `pop`; it reads at most 15 numbers past the top, inside the list's padding, and writes as many past the end
    // of `to`, as the caller allows.
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

/// Pushes one frame number. Returns false if the list is full or held.
///
/// # Safety
/// As [`pop`].
#[inline]
pub(crate) unsafe fn push(lists: Lists, pfn: u32) -> bool {
    // SAFETY: as in `pop`; below the limit there is a slot. A full list leaves by a jump, so no flag is set and tested.
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

/// Pushes the `n` (1 to 64) frame numbers at `from`, after which 15 more must be readable. Returns false if they do not fit or
/// the list is held.
///
/// # Safety
/// As [`pop`].
#[inline]
pub(crate) unsafe fn push_n(lists: Lists, from: *const u32, n: usize) -> bool {
    let is_pushed: u32;
    // SAFETY: as in `pop`; it writes at most 15 numbers past the new top, inside the list's padding.
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

/// Adds one to this CPU's 64-bit counter at offset `counter` in its lists.
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

/// The self-test's section: writes its CPU's number plus one to `inside`, and spins until `leave` is not 0, at most `turns`
/// times. Returns whether it was restarted.
///
/// # Safety
/// glibc registered this thread at `offset`.
pub(super) unsafe fn spin(offset: isize, inside: &AtomicU32, leave: &AtomicU32, turns: u64) -> bool {
    let was_restarted: u32;
    // SAFETY: accesses only the two flags and registers. The abort handler jumps to the end.
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
