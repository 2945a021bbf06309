//! The sections for 64-bit Arm. The scheme is in [`super`]; `tpidr_el0` is the thread pointer.
//!
//! Labels as on x86-64. `held` is read with acquire, so the word read after it is the one that the last holder left. The
//! signature that glibc registered is 0xd428bc00, a `brk`.
use super::{CPU_SHIFT, HELD, LIMIT, Lists, RESTARTS};
use crate::lists::list::ITEMS;
use core::arch::asm;
use core::sync::atomic::AtomicU32;
use pagemill_core::{FrameState, PAGE_SHIFT};

/// Enters a section and puts the address of the CPU's list into `{l}`. Leaves by 7 if the thread has no CPU number.
macro_rules! enter {
    () => {
        concat!(
            "2:\n",
            "adrp {l}, 3f\n",
            "add {l}, {l}, :lo12:3f\n",
            "str {l}, [{rs}, #8]\n",
            "4:\n",
            "ldr {l:w}, [{rs}, #4]\n",
            "cmp {l:w}, {cpus:w}\n",
            "b.hs 7f\n",
            "add {l}, {base}, {l}, lsl {cpu_shift}\n",
        )
    };
}

/// Leaves by 7 if the list is held.
macro_rules! unless_held {
    () => {
        concat!("add {x}, {l}, {held}\n", "ldar {x:w}, [{x}]\n", "cbnz {x:w}, 7f\n")
    };
}

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
            ".inst 0xd428bc00\n",
            "6:\n",
            "adrp {l}, {restarts}\n",
            "add {l}, {l}, :lo12:{restarts}\n",
            "9:\n",
            "ldxr {x}, [{l}]\n",
            "add {x}, {x}, #1\n",
            "stxr {y:w}, {x}, [{l}]\n",
            "cbnz {y:w}, 9b\n",
            "b 2b\n",
            ".popsection\n",
        )
    };
}

/// The thread's rseq area.
#[inline]
fn area(offset: isize) -> *const u32 {
    let thread: *const u8;
    // SAFETY: reads a register.
    unsafe {
        asm!("mrs {}, tpidr_el0", out(reg) thread, options(nostack, nomem, preserves_flags));
    }
    thread.wrapping_offset(offset).cast()
}

/// The CPU's number as the kernel last wrote it; larger than any CPU's if the thread is not registered.
#[inline]
pub(crate) fn cpu(offset: isize) -> u32 {
    // SAFETY: glibc put the thread's area there; `cpu_id` is its second word, and the kernel writes it.
    unsafe { area(offset).add(1).read_volatile() }
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
            "mov {pfn:w}, #-1",
            enter!(),
            unless_held!(),
            "ldr {w}, [{l}]",
            "and {x:w}, {w:w}, #0xffff",
            "cbz {x:w}, 7f",
            "sub {x:w}, {x:w}, #1",
            "add {y}, {l}, {x}, lsl #2",
            "ldr {x:w}, [{y}, {items}]",
            "mov {y}, #0xffff", // top - 1, popped + 1
            "add {w}, {w}, {y}",
            "str {w}, [{l}]",
            "5:",
            "mov {pfn:w}, {x:w}",
            leave!(),
            "7:",
            l = out(reg) _, w = out(reg) _, x = out(reg) _, y = out(reg) _, pfn = out(reg) pfn,
            rs = in(reg) area(lists.offset), base = in(reg) lists.base, cpus = in(reg) lists.cpus,
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
            unless_held!(),
            "ldr {w}, [{l}]",
            "and {x}, {w}, #0xffff",
            "cmp {x}, {least}",
            "b.lo 7f",
            "cmp {x}, {want}",
            "csel {n}, {want}, {x}, hi",
            "sub {x}, {x}, {n}",
            "add {from}, {l}, {x}, lsl #2",
            "add {from}, {from}, {items}",
            "mov {y}, {to}",
            "mov {x}, {n}",
            "8:",
            "ldp q0, q1, [{from}]",
            "ldp q2, q3, [{from}, #32]",
            "stp q0, q1, [{y}]",
            "stp q2, q3, [{y}, #32]",
            "add {from}, {from}, #64",
            "add {y}, {y}, #64",
            "subs {x}, {x}, #16",
            "b.gt 8b",
            "lsl {x}, {n}, #16", // top - n, popped + n
            "sub {x}, {x}, {n}",
            "add {w}, {w}, {x}",
            "str {w}, [{l}]",
            "5:",
            leave!(),
            "b 8f",
            "7:",
            "mov {n}, xzr",
            "8:",
            l = out(reg) _, w = out(reg) _, n = out(reg) n, x = out(reg) _, y = out(reg) _, from = out(reg) _,
            to = in(reg) to, want = in(reg) want, least = in(reg) least,
            rs = in(reg) area(lists.offset), base = in(reg) lists.base, cpus = in(reg) lists.cpus,
            out("v0") _, out("v1") _, out("v2") _, out("v3") _,
            cpu_shift = const CPU_SHIFT, held = const HELD, items = const ITEMS, restarts = sym RESTARTS,
            options(nostack),
        );
    }
    n
}

/// Pops `n` (1 to 64) frame numbers and stores the addresses of their pages at `to`. `zero` is the address of number 0. Returns
/// false, and pops none, if there are fewer, the list is held, or a frame's byte in `states` is not safe; then the words at
/// `to` are unspecified.
///
/// # Safety
/// As [`pop`]; `to` has room for `n` words, and each frame on the lists has a byte at its number in `states`.
#[inline]
pub(crate) unsafe fn pop_words(lists: Lists, to: *mut usize, n: usize, zero: usize, states: *const u8) -> bool {
    let is_popped: u32;
    // SAFETY: as in `pop`; reads and writes are of the `n` numbers, states and words alone.
    unsafe {
        asm!(
            "mov {done:w}, wzr",
            enter!(),
            unless_held!(),
            "ldr {w}, [{l}]",
            "and {x}, {w}, #0xffff",
            "subs {x}, {x}, {n}",
            "b.lo 7f",
            "add {from}, {l}, {x}, lsl #2",
            "add {from}, {from}, {items}",
            "mov {y}, {to}",
            "mov {x}, {n}",
            "mov {safe:w}, {safe_bit}",
            "8:",
            "ldr {t:w}, [{from}], #4",
            "ldrb {s:w}, [{states}, {t}]",
            "add {t}, {zero}, {t}, lsl {page_shift}",
            "str {t}, [{y}], #8",
            "and {safe:w}, {safe:w}, {s:w}",
            "subs {x}, {x}, #1",
            "b.ne 8b",
            "cbz {safe:w}, 7f",
            "lsl {x}, {n}, #16", // top - n, popped + n
            "sub {x}, {x}, {n}",
            "add {w}, {w}, {x}",
            "str {w}, [{l}]",
            "5:",
            "mov {done:w}, #1",
            leave!(),
            "7:",
            l = out(reg) _, w = out(reg) _, x = out(reg) _, y = out(reg) _, from = out(reg) _, t = out(reg) _,
            s = out(reg) _, safe = out(reg) _,
            done = out(reg) is_popped, to = in(reg) to, n = in(reg) n, zero = in(reg) zero, states = in(reg) states,
            rs = in(reg) area(lists.offset), base = in(reg) lists.base, cpus = in(reg) lists.cpus,
            page_shift = const PAGE_SHIFT, safe_bit = const FrameState::SAFE.as_byte(),
            cpu_shift = const CPU_SHIFT, held = const HELD, items = const ITEMS, restarts = sym RESTARTS,
            options(nostack),
        );
    }
    is_popped != 0
}

/// Pushes the frame numbers of the `n` (1 to 64) pages whose addresses are at `from`. `zero` is the address of number 0.
/// Returns false if they do not fit or the list is held.
///
/// # Safety
/// As [`pop`]; `n` words can be read at `from`.
#[inline]
pub(crate) unsafe fn push_words(lists: Lists, from: *const usize, n: usize, zero: usize) -> bool {
    let is_pushed: u32;
    // SAFETY: as in `pop`; reads and writes are of the `n` words and numbers alone, and below the limit there are slots.
    unsafe {
        asm!(
            "mov {done:w}, wzr",
            enter!(),
            unless_held!(),
            "ldr {w}, [{l}]",
            "and {x}, {w}, #0xffff",
            "add {to}, {l}, {x}, lsl #2",
            "add {to}, {to}, {items}",
            "ldr {y:w}, [{l}, {limit}]",
            "add {x}, {x}, {n}",
            "cmp {x:w}, {y:w}",
            "b.hi 7f",
            "mov {y}, {from}",
            "dup v4.2d, {zero}",
            "subs {x}, {n}, #4",
            "b.lo 9f",
            "8:", // Four at a time.
            "ldp q0, q1, [{y}], #32",
            "sub v0.2d, v0.2d, v4.2d",
            "sub v1.2d, v1.2d, v4.2d",
            "shrn v2.2s, v0.2d, {page_shift}",
            "shrn2 v2.4s, v1.2d, {page_shift}",
            "str q2, [{to}], #16",
            "subs {x}, {x}, #4",
            "b.hs 8b",
            "9:", // One by one.
            "adds {x}, {x}, #4",
            "b.eq 8f",
            "9:",
            "ldr {t}, [{y}], #8",
            "sub {t}, {t}, {zero}",
            "lsr {t}, {t}, {page_shift}",
            "str {t:w}, [{to}], #4",
            "subs {x}, {x}, #1",
            "b.ne 9b",
            "8:",
            "add {w}, {w}, {n}",
            "str {w}, [{l}]",
            "5:",
            "mov {done:w}, #1",
            leave!(),
            "7:",
            l = out(reg) _, w = out(reg) _, x = out(reg) _, y = out(reg) _, to = out(reg) _, t = out(reg) _,
            done = out(reg) is_pushed, from = in(reg) from, n = in(reg) n, zero = in(reg) zero,
            rs = in(reg) area(lists.offset), base = in(reg) lists.base, cpus = in(reg) lists.cpus,
            out("v0") _, out("v1") _, out("v2") _, out("v4") _, page_shift = const PAGE_SHIFT,
            cpu_shift = const CPU_SHIFT, held = const HELD, limit = const LIMIT, items = const ITEMS,
            restarts = sym RESTARTS,
            options(nostack),
        );
    }
    is_pushed != 0
}

/// Pushes one frame number. Returns false if the list is full or held.
///
/// # Safety
/// As [`pop`].
#[inline]
pub(crate) unsafe fn push(lists: Lists, pfn: u32) -> bool {
    let is_pushed: u32;
    // SAFETY: as in `pop`; below the limit there is a slot.
    unsafe {
        asm!(
            "mov {done:w}, wzr",
            enter!(),
            unless_held!(),
            "ldr {w}, [{l}]",
            "and {x:w}, {w:w}, #0xffff",
            "ldr {y:w}, [{l}, {limit}]",
            "cmp {x:w}, {y:w}",
            "b.hs 7f",
            "add {y}, {l}, {x}, lsl #2",
            "str {pfn:w}, [{y}, {items}]",
            "add {w}, {w}, #1",
            "str {w}, [{l}]",
            "5:",
            "mov {done:w}, #1",
            leave!(),
            "7:",
            l = out(reg) _, w = out(reg) _, x = out(reg) _, y = out(reg) _, done = out(reg) is_pushed,
            pfn = in(reg) pfn,
            rs = in(reg) area(lists.offset), base = in(reg) lists.base, cpus = in(reg) lists.cpus,
            cpu_shift = const CPU_SHIFT, held = const HELD, limit = const LIMIT, items = const ITEMS,
            restarts = sym RESTARTS,
            options(nostack),
        );
    }
    is_pushed != 0
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
            "mov {done:w}, wzr",
            enter!(),
            unless_held!(),
            "ldr {w}, [{l}]",
            "and {x}, {w}, #0xffff",
            "add {to}, {l}, {x}, lsl #2",
            "add {to}, {to}, {items}",
            "ldr {y:w}, [{l}, {limit}]",
            "add {x}, {x}, {n}",
            "cmp {x:w}, {y:w}",
            "b.hi 7f",
            "mov {x}, {n}",
            "mov {y}, {from}",
            "8:",
            "ldp q0, q1, [{y}]",
            "ldp q2, q3, [{y}, #32]",
            "stp q0, q1, [{to}]",
            "stp q2, q3, [{to}, #32]",
            "add {y}, {y}, #64",
            "add {to}, {to}, #64",
            "subs {x}, {x}, #16",
            "b.gt 8b",
            "add {w}, {w}, {n}",
            "str {w}, [{l}]",
            "5:",
            "mov {done:w}, #1",
            leave!(),
            "7:",
            l = out(reg) _, w = out(reg) _, x = out(reg) _, y = out(reg) _, to = out(reg) _,
            done = out(reg) is_pushed, from = in(reg) from, n = in(reg) n,
            rs = in(reg) area(lists.offset), base = in(reg) lists.base, cpus = in(reg) lists.cpus,
            out("v0") _, out("v1") _, out("v2") _, out("v3") _,
            cpu_shift = const CPU_SHIFT, held = const HELD, limit = const LIMIT, items = const ITEMS,
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
    // SAFETY: as in `pop`. The store of the new count is the commit.
    unsafe {
        asm!(
            enter!(),
            "ldr {x}, [{l}]",
            "add {x}, {x}, #1",
            "str {x}, [{l}]",
            "5:",
            leave!(),
            "7:",
            l = out(reg) _, x = out(reg) _, y = out(reg) _,
            rs = in(reg) area(lists.offset), base = in(reg) lists.base.wrapping_add(counter),
            cpus = in(reg) lists.cpus,
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
            "mov {sent:w}, wzr",
            "adrp {l}, 3f",
            "add {l}, {l}, :lo12:3f",
            "str {l}, [{rs}, #8]",
            "4:",
            "ldr {l:w}, [{rs}, #4]",
            "add {l:w}, {l:w}, #1",
            "str {l:w}, [{inside}]",
            "8:",
            "ldr {l:w}, [{leave}]",
            "cbnz {l:w}, 7f",
            "subs {turns}, {turns}, #1",
            "b.ne 8b",
            "5:",
            ".pushsection __rseq_cs, \"aw\"",
            ".balign 32",
            "3:",
            ".long 0, 0",
            ".quad 4b, 5b - 4b, 6f",
            ".popsection",
            ".pushsection __rseq_abort, \"ax\"",
            ".inst 0xd428bc00",
            "6:",
            "mov {sent:w}, #1",
            "b 7f",
            ".popsection",
            "7:",
            l = out(reg) _, sent = out(reg) was_restarted, turns = inout(reg) turns => _,
            rs = in(reg) area(offset), inside = in(reg) inside.as_ptr(), leave = in(reg) leave.as_ptr(),
            options(nostack),
        );
    }
    was_restarted != 0
}
