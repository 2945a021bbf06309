//! Tables of bytes that several threads share, where each thread loads and stores the bytes of its own frames, several bytes
//! with one instruction.
//!
//! A thread that owns neighbouring cells loads and stores them together. The same load may cover cells of other threads, whose
//! values it ignores, and any thread may read all cells at any time. So each access to a cell must be a relaxed atomic one.
//! Rust has no such access to several cells at once, since atomic accesses of different sizes must not overlap. Processors have
//! it: a load or store of a word or a vector is atomic for each aligned cell in it. So on x86-64, and for bytes on AArch64, one
//! instruction of assembly does the work of as many relaxed atomics. On other processors, and under miri or a model checker,
//! cells are accessed one by one.
use core::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// Defines a load and a store of one word's bytes, in memory order.
macro_rules! bytes {
    ($load:ident, $store:ident, $word:ty, $x86:literal, $x86_reg:literal, $arm_load:literal, $arm_store:literal) => {
        #[inline(always)]
        unsafe fn $load(from: *const u8) -> $word {
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            {
                let word: $word;
                // SAFETY: the caller says that these bytes may be read. A byte is always read whole.
                unsafe {
                    core::arch::asm!(concat!("mov {w", $x86_reg, "}, ", $x86, " ptr [{from}]"), w = lateout(reg) word,
                        from = in(reg) from, options(nostack, preserves_flags, readonly));
                }
                word
            }
            #[cfg(all(target_arch = "aarch64", not(miri)))]
            {
                let word: $word;
                // SAFETY: the caller says that these bytes may be read. A byte is always read whole.
                unsafe {
                    core::arch::asm!(concat!($arm_load, ", [{from}]"), w = lateout(reg) word, from = in(reg) from,
                        options(nostack, preserves_flags, readonly));
                }
                word
            }
            #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
            {
                // SAFETY: the caller's bytes.
                <$word>::from_ne_bytes(core::array::from_fn(|i| unsafe { byte(from, i) }.load(Relaxed)))
            }
        }

        #[inline(always)]
        unsafe fn $store(to: *mut u8, word: $word) {
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            // SAFETY: the caller says that these bytes may be written. A byte is always written whole.
            unsafe {
                core::arch::asm!(concat!("mov ", $x86, " ptr [{to}], {w", $x86_reg, "}"), w = in(reg) word, to = in(reg) to,
                    options(nostack, preserves_flags));
            }
            #[cfg(all(target_arch = "aarch64", not(miri)))]
            // SAFETY: the caller says that these bytes may be written. A byte is always written whole.
            unsafe {
                core::arch::asm!(concat!($arm_store, ", [{to}]"), w = in(reg) word, to = in(reg) to,
                    options(nostack, preserves_flags));
            }
            #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
            for (i, value) in word.to_ne_bytes().into_iter().enumerate() {
                // SAFETY: the caller's bytes.
                unsafe { byte(to, i) }.store(value, Relaxed);
            }
        }
    };
}
bytes!(load_8, store_8, u64, "qword", "", "ldr {w:x}", "str {w:x}");
bytes!(load_4, store_4, u32, "dword", ":e", "ldr {w:w}", "str {w:w}");
bytes!(load_2, store_2, u16, "word", ":x", "ldrh {w:w}", "strh {w:w}");

/// The bits in which any of 32 bytes differs from the wanted byte, combined into eight bytes, in no order. `wanted` repeats the
/// wanted byte eight times.
#[inline(always)]
unsafe fn differ_32(bytes: *const u8, wanted: u64) -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let differs: u64;
        // SAFETY: the caller says that these bytes may be read. A byte is always read whole.
        unsafe {
            core::arch::asm!("movq {w}, {wanted}", "punpcklqdq {w}, {w}", "movdqu {a}, [{from}]", "movdqu {b}, [{from} + 16]",
                "pxor {a}, {w}", "pxor {b}, {w}", "por {a}, {b}", "movdqa {b}, {a}", "punpckhqdq {b}, {b}", "por {a}, {b}",
                "movq {differs}, {a}", w = out(xmm_reg) _, a = out(xmm_reg) _, b = out(xmm_reg) _,
                from = in(reg) bytes, wanted = in(reg) wanted, differs = lateout(reg) differs,
                options(nostack, preserves_flags, readonly));
        }
        differs
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    // SAFETY: the caller says that these bytes may be read.
    (0..4).fold(0, |differs, i| differs | unsafe { load_8(bytes.add(i * 8)) } ^ wanted)
}

/// # Safety
/// The byte is mapped, and every other access to it is one of this module's or atomic.
#[inline(always)]
unsafe fn byte<'c>(bytes: *const u8, at: usize) -> &'c AtomicU8 {
    // SAFETY: the caller's promise.
    unsafe { AtomicU8::from_ptr(bytes.add(at).cast_mut()) }
}

// Stores take eight bytes at a time, loads 32 or eight, and both split a shorter tail into four, two and one. So each load of
// up to eight bytes reads what one store wrote, and the processor forwards it without waiting for the cache. Loads of 32 bytes
// lose that, and save more than the wait costs.

/// The bits of `mask` in which any of `n` bytes differs from `byte_wanted`, combined into eight bytes, in no order.
///
/// # Safety
/// The `n` bytes at `bytes` are mapped, and meanwhile every thread accesses them through this module or as [`AtomicU8`].
///
/// ```
/// let mut states = [7_u8; 13];
/// // SAFETY: 13 bytes that nobody else uses.
/// assert!(unsafe { pagemill_os::bytes_differ(states.as_mut_ptr(), 13, 6, !1) } == 0);
/// ```
#[inline(always)]
pub unsafe fn bytes_differ(bytes: *mut u8, n: usize, byte_wanted: u8, mask: u8) -> u64 {
    let (words, tail) = (n / 8, n % 8);
    let wanted = u64::from_ne_bytes([byte_wanted; 8]);
    let mut differs = 0;
    // SAFETY: all below `n`: the words, then what is left of a word in falling powers of two.
    unsafe {
        for i in 0..n / 32 {
            differs |= differ_32(bytes.add(i * 32), wanted);
        }
        for i in words - words % 4..words {
            differs |= load_8(bytes.add(i * 8)) ^ wanted;
        }
        let mut at = bytes.add(words * 8);
        if tail & 4 != 0 {
            differs |= u64::from(load_4(at) ^ wanted as u32);
            at = at.add(4);
        }
        if tail & 2 != 0 {
            differs |= u64::from(load_2(at) ^ wanted as u16);
            at = at.add(2);
        }
        if tail & 1 != 0 {
            differs |= u64::from(byte(at, 0).load(Relaxed) ^ byte_wanted);
        }
    }
    differs & u64::from_ne_bytes([mask; 8])
}

/// Sets `n` bytes to `value`.
///
/// # Safety
/// As [`bytes_differ`].
#[inline(always)]
pub unsafe fn set_bytes(bytes: *mut u8, n: usize, value: u8) {
    let (words, tail) = (n / 8, n % 8);
    let word = u64::from_ne_bytes([value; 8]);
    // SAFETY: as in `bytes_differ`.
    unsafe {
        for i in 0..words {
            store_8(bytes.add(i * 8), word);
        }
        let mut at = bytes.add(words * 8);
        if tail & 4 != 0 {
            store_4(at, word as u32);
            at = at.add(4);
        }
        if tail & 2 != 0 {
            store_2(at, word as u16);
            at = at.add(2);
        }
        if tail & 1 != 0 {
            byte(at, 0).store(value, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For every length up to a few words, with a wrong byte at each position in turn; the bytes beside the range stay
    /// untouched.
    #[test]
    fn every_byte_of_the_range_and_no_other_is_compared_and_set() {
        for n in 0..=if cfg!(miri) { 19 } else { 70 } {
            let mut bytes = vec![9_u8; n + 2];
            // SAFETY: cells 1 to n of a vector with as many and two more.
            let states = unsafe { bytes.as_mut_ptr().add(1) };
            // SAFETY: as above.
            let differs = |value, mask| unsafe { bytes_differ(states, n, value, mask) };
            // SAFETY: as above.
            unsafe {
                set_bytes(states, n, 5);
                assert_eq!((*states.sub(1), *states.add(n)), (9, 9));
            }
            assert_eq!(differs(5, !0), 0, "{n}");
            for at in 0..n {
                // SAFETY: as above.
                let state = unsafe { &mut *states.add(at) };
                *state ^= 0x80;
                assert!(differs(5, !0) != 0 && differs(5, 0x7f) == 0, "{at} of {n}");
                // SAFETY: as above.
                unsafe { *states.add(at) = 5 };
            }
        }
    }
}
