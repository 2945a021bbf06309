//! Per-CPU lists like those of `pagemill-os`, whose links lie in the blocks: for the row `links-inside` alone.
//!
//! A CPU's list is one word: the address of its first block (48 bits) and how many there are. A free block's first word
//! is the list's word without it. So a block is taken by one load of the list, one of the block and the store that
//! commits, in a restartable section (rseq(2)) of the same shape as Pagemill's own: `crates/pagemill-os/src/rseq`.
//!
//! A section may read a block that somebody else has had meanwhile: the memory stays mapped, and the section does not
//! commit then.

use std::ptr::NonNull;

/// Bits of an address.
const ADDRESS_BITS: u32 = 48;

/// The address of the first block of a list, or of what follows a block; `None` at the end.
pub(super) fn first(word: u64) -> Option<NonNull<u8>> {
    NonNull::new((word & ((1 << ADDRESS_BITS) - 1)) as *mut u8)
}

/// A list of `len` blocks that begins with this one.
pub(super) fn word(first: NonNull<u8>, len: usize) -> u64 {
    first.as_ptr() as u64 | (len as u64) << ADDRESS_BITS
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
pub(super) use none::Chains;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
pub(super) use x86::Chains;

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod x86 {
    use std::arch::asm;
    use std::ffi::CStr;
    use std::mem::offset_of;
    use std::ptr::NonNull;
    use std::sync::atomic::{AtomicU32, AtomicU64};

    use crate::rows::Unavailable;

    /// One CPU's list.
    #[repr(C, align(64))]
    struct Chain {
        word: AtomicU64,
        /// Blocks that it may hold.
        limit: AtomicU32,
        /// Not 0: somebody else is at it. Nobody ever is; the sections look as Pagemill's do.
        held: AtomicU32,
    }

    const SHIFT: u32 = 6;
    const _: () = assert!(size_of::<Chain>() == 1 << SHIFT && offset_of!(Chain, word) == 0);
    const LIMIT: usize = offset_of!(Chain, limit);
    const HELD: usize = offset_of!(Chain, held);

    /// The lists of all CPUs.
    pub(in super::super) struct Chains {
        chains: Box<[Chain]>,
        /// From the thread pointer to the thread's rseq area.
        offset: isize,
    }

    /// Enters a section and finds the list of the CPU in `{l}`; leaves by 7 if it is held or the thread has no CPU.
    macro_rules! enter {
        () => {
            concat!(
                "2:\n",
                "lea {l}, [rip + 3f]\n",
                "mov qword ptr fs:[{off} + 8], {l}\n",
                "4:\n",
                "mov {l:e}, dword ptr fs:[{off} + 4]\n",
                "cmp {l:e}, {cpus:e}\n",
                "jae 7f\n",
                "shl {l}, {shift}\n",
                "add {l}, {base}\n",
                "cmp dword ptr [{l} + {held}], 0\n",
                "jne 7f\n",
            )
        };
    }

    /// The descriptor of the section that began at the last 4 and committed before the last 5, and its way back behind
    /// the signature that glibc registered.
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
                "jmp 2b\n",
                ".popsection\n",
            )
        };
    }

    impl Chains {
        /// Empty lists of at most `limit` blocks.
        pub(in super::super) fn new(limit: u32) -> Result<Chains, Unavailable> {
            pagemill_os::self_test().map_err(|why| Unavailable(why.to_owned()))?;
            let of_one = |_| Chain { word: AtomicU64::new(0), limit: AtomicU32::new(limit), held: AtomicU32::new(0) };
            let chains = (0..pagemill_os::possible_cpus()).map(of_one).collect();
            let symbol: &CStr = c"__rseq_offset";
            // SAFETY: looks a name up in the loaded objects; the name is terminated.
            let offset = unsafe { libc::dlsym(libc::RTLD_DEFAULT, symbol.as_ptr()) };
            if offset.is_null() {
                return Err(Unavailable("the C library does not tell where its rseq area is".to_owned()));
            }
            // SAFETY: glibc documents `const ptrdiff_t __rseq_offset`.
            Ok(Chains { chains, offset: unsafe { *offset.cast::<isize>() } })
        }

        /// Takes the first block off this CPU's list.
        #[inline]
        pub(in super::super) fn pop(&self) -> Option<NonNull<u8>> {
            let block: *mut u8;
            // SAFETY: the self-test passed. The section touches the list of the CPU that it runs on, reads its first
            // block, which stays mapped, and commits with one store.
            unsafe {
                asm!(
                    "xor {b:e}, {b:e}",
                    enter!(),
                    "mov {w}, qword ptr [{l}]",
                    "test {w}, {w}",
                    "jz 7f",
                    "shl {w}, 16",
                    "shr {w}, 16",
                    "mov {n}, qword ptr [{w}]",
                    "mov qword ptr [{l}], {n}",
                    "5:",
                    "mov {b}, {w}",
                    leave!(),
                    "7:",
                    l = out(reg) _, w = out(reg) _, n = out(reg) _, b = out(reg) block,
                    off = in(reg) self.offset, base = in(reg) self.chains.as_ptr(), cpus = in(reg) self.chains.len(),
                    shift = const SHIFT, held = const HELD,
                    options(nostack),
                );
            }
            NonNull::new(block)
        }

        /// Puts a block that is the caller's on this CPU's list. False: the list is full.
        #[inline]
        pub(in super::super) fn push(&self, block: NonNull<u8>) -> bool {
            // SAFETY: as in `pop`; the block is nobody's but the caller's until the commit.
            unsafe {
                asm!(
                    enter!(),
                    "mov {w}, qword ptr [{l}]",
                    "mov {n}, {w}",
                    "shr {n}, 48",
                    "cmp {n:e}, dword ptr [{l} + {limit}]",
                    "jae 7f",
                    "mov qword ptr [{b}], {w}",
                    "inc {n:e}",
                    "shl {n}, 48",
                    "or {n}, {b}",
                    "mov qword ptr [{l}], {n}",
                    "5:",
                    leave!(),
                    ".subsection 1",
                    "7:",
                    "jmp {full}",
                    ".previous",
                    l = out(reg) _, w = out(reg) _, n = out(reg) _, b = in(reg) block.as_ptr(),
                    off = in(reg) self.offset, base = in(reg) self.chains.as_ptr(), cpus = in(reg) self.chains.len(),
                    shift = const SHIFT, held = const HELD, limit = const LIMIT,
                    full = label { return false },
                    options(nostack),
                );
            }
            true
        }

        /// Takes the first `n` blocks off this CPU's list, which stay linked: the first and the last of them. `None`: there
        /// are not more than so many.
        pub(in super::super) fn pop_chain(&self, n: usize) -> Option<(NonNull<u8>, NonNull<u8>)> {
            let (first, last): (*mut u8, *mut u8);
            // SAFETY: as in `pop`; as long as the section is not sent back, the blocks that it walks are on the list.
            unsafe {
                asm!(
                    "xor {first:e}, {first:e}",
                    enter!(),
                    "mov {w}, qword ptr [{l}]",
                    "mov {b}, {w}",
                    "shr {b}, 48",
                    "cmp {b}, {want}",
                    "jbe 7f",
                    "mov {i}, {want}",
                    "8:",
                    "mov {b}, {w}",
                    "shl {b}, 16",
                    "shr {b}, 16",
                    "mov {w}, qword ptr [{b}]",
                    "dec {i}",
                    "jnz 8b",
                    "mov {i}, qword ptr [{l}]",
                    "mov qword ptr [{l}], {w}",
                    "5:",
                    "mov {first}, {i}",
                    "shl {first}, 16",
                    "shr {first}, 16",
                    leave!(),
                    "7:",
                    l = out(reg) _, w = out(reg) _, i = out(reg) _, b = out(reg) last, first = out(reg) first,
                    want = in(reg) n,
                    off = in(reg) self.offset, base = in(reg) self.chains.as_ptr(), cpus = in(reg) self.chains.len(),
                    shift = const SHIFT, held = const HELD,
                    options(nostack),
                );
            }
            NonNull::new(first).zip(NonNull::new(last))
        }

        /// Makes a list that is the caller's this CPU's. False: that has one.
        pub(in super::super) fn install(&self, word: u64) -> bool {
            let is_done: u32;
            // SAFETY: as in `pop`; the blocks of `word` are nobody's but the caller's until the commit.
            unsafe {
                asm!(
                    "xor {done:e}, {done:e}",
                    enter!(),
                    "cmp qword ptr [{l}], 0",
                    "jne 7f",
                    "mov qword ptr [{l}], {word}",
                    "5:",
                    "mov {done:e}, 1",
                    leave!(),
                    "7:",
                    l = out(reg) _, done = out(reg) is_done, word = in(reg) word,
                    off = in(reg) self.offset, base = in(reg) self.chains.as_ptr(), cpus = in(reg) self.chains.len(),
                    shift = const SHIFT, held = const HELD,
                    options(nostack),
                );
            }
            is_done == 1
        }
    }
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
mod none {
    use std::ptr::NonNull;

    use crate::rows::Unavailable;

    /// Nothing: the sections are written for x86-64 alone.
    pub(in super::super) enum Chains {}

    impl Chains {
        pub(in super::super) fn new(_limit: u32) -> Result<Chains, Unavailable> {
            Err(Unavailable("its sections are written for x86-64 alone".to_owned()))
        }
        pub(in super::super) fn pop(&self) -> Option<NonNull<u8>> {
            match *self {}
        }
        pub(in super::super) fn push(&self, _block: NonNull<u8>) -> bool {
            match *self {}
        }
        pub(in super::super) fn pop_chain(&self, _n: usize) -> Option<(NonNull<u8>, NonNull<u8>)> {
            match *self {}
        }
        pub(in super::super) fn install(&self, _word: u64) -> bool {
            match *self {}
        }
    }
}

#[cfg(all(test, target_os = "linux", target_arch = "x86_64"))]
mod tests {
    use std::collections::HashSet;
    use std::sync::Mutex;

    use super::*;

    const LIMIT: u32 = 8;

    fn blocks(n: usize) -> Vec<[u64; 2]> {
        vec![[0; 2]; n]
    }

    /// Bound to one CPU, so that all is on one list.
    fn on_one_cpu(test: impl FnOnce(Chains) + Send) {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let machine = crate::machine::Machine::here();
                crate::machine::pin_to(machine.main_cpu()).unwrap();
                match Chains::new(LIMIT) {
                    Ok(chains) => test(chains),
                    Err(why) => println!("skipped: {why}"),
                }
            });
        });
    }

    #[test]
    fn the_last_in_is_the_first_out_and_a_full_list_takes_no_more() {
        on_one_cpu(|chains| {
            let mut memory = blocks(LIMIT as usize + 1);
            let all: Vec<NonNull<u8>> = memory.iter_mut().map(|block| NonNull::from(block).cast()).collect();
            assert_eq!(chains.pop(), None);
            let (last, fit) = all.split_last().unwrap();
            assert!(fit.iter().all(|&block| chains.push(block)) && !chains.push(*last));
            let (first, end) = chains.pop_chain(3).unwrap();
            assert_eq!((first, end), (fit[7], fit[5]), "three from the front");
            assert_eq!(chains.pop_chain(5), None, "they are all that is left");
            for &block in fit[..5].iter().rev() {
                assert_eq!(chains.pop(), Some(block));
            }
            assert_eq!(chains.pop(), None);
            // SAFETY: a block of this test's, of two words, on no list.
            unsafe { all[1].cast::<u64>().write(word(all[0], 1)) };
            // SAFETY: as above.
            unsafe { all[0].cast::<u64>().write(0) };
            assert!(chains.install(word(all[1], 2)) && !chains.install(word(all[1], 2)));
            assert_eq!([chains.pop(), chains.pop(), chains.pop()], [Some(all[1]), Some(all[0]), None]);
        });
    }

    /// Threads that are moved about and stopped in the middle lose no block and have none twice.
    #[test]
    fn sections_that_are_sent_back_lose_nothing() {
        let chains = match Chains::new(u32::from(u16::MAX)) {
            Ok(chains) => chains,
            Err(why) => return println!("skipped: {why}"),
        };
        let mut memory = blocks(64);
        for block in &mut memory {
            assert!(chains.push(NonNull::from(block).cast()));
        }
        let all = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let mut mine = Vec::new();
                    for turn in 0..20_000 {
                        mine.extend(chains.pop());
                        if let Some(block) = (turn % 3 != 0).then(|| mine.pop()).flatten() {
                            assert!(chains.push(block));
                        }
                        if turn % 500 == 0 {
                            std::thread::yield_now();
                        }
                    }
                    all.lock().unwrap().extend(mine.into_iter().map(|block| block.as_ptr() as usize));
                });
            }
        });
        let mut found = all.into_inner().unwrap();
        // What is left lies on the lists of all CPUs.
        for cpu in crate::machine::Machine::here().allowed {
            std::thread::scope(|scope| {
                let left = scope.spawn(|| {
                    crate::machine::pin_to(cpu).unwrap();
                    std::iter::from_fn(|| chains.pop()).map(|block| block.as_ptr() as usize).collect::<Vec<_>>()
                });
                found.extend(left.join().unwrap());
            });
        }
        assert_eq!(found.len(), memory.len());
        assert_eq!(found.into_iter().collect::<HashSet<_>>().len(), memory.len());
    }
}
