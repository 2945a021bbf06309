/* Single bits, and arrays of them. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_BITOPS_H
#define PAGEMILL_LINUX_BITOPS_H

#include <linux/types.h>

#ifndef BITS_PER_LONG
#define BITS_PER_LONG 64
#endif
#define BITS_PER_LONG_LONG 64
#define BITS_PER_BYTE 8
#define BITS_TO_LONGS(bits) (((bits) + BITS_PER_LONG - 1) / BITS_PER_LONG)
#define BITS_PER_TYPE(type) (sizeof(type) * BITS_PER_BYTE)
#ifndef BIT
#define BIT(number) (1UL << (number))
#endif
#define BIT_ULL(number) (1ULL << (number))
#define BIT_MASK(number) (1UL << ((number) % BITS_PER_LONG))
#define BIT_WORD(number) ((number) / BITS_PER_LONG)
#define GENMASK(high, low) ((~0UL << (low)) & (~0UL >> (BITS_PER_LONG - 1 - (high))))
#define GENMASK_ULL(high, low) ((~0ULL << (low)) & (~0ULL >> (63 - (high))))

/* The number of the highest bit that is set, counted from 1; 0 if none is. */
static inline int fls(unsigned int word) { return word ? 32 - __builtin_clz(word) : 0; }
static inline int fls64(u64 word) { return word ? 64 - __builtin_clzll(word) : 0; }
#define fls_long(word) fls64(word)
/* Counted from 0, and never asked of 0. */
static inline unsigned long __ffs(unsigned long word) { return __builtin_ctzl(word); }
static inline unsigned long __fls(unsigned long word) { return 63 - __builtin_clzl(word); }
static inline unsigned long ffz(unsigned long word) { return __ffs(~word); }
#define ffs(word) __builtin_ffs(word)
#define hweight32(word) ((unsigned int)__builtin_popcount(word))
#define hweight64(word) ((unsigned long)__builtin_popcountll(word))
#define hweight_long(word) ((unsigned long)__builtin_popcountl(word))

#ifndef __pagemill_has_bitops
#define __pagemill_has_bitops
static inline void __set_bit(unsigned long bit, volatile unsigned long *bits) { bits[BIT_WORD(bit)] |= BIT_MASK(bit); }
static inline void __clear_bit(unsigned long bit, volatile unsigned long *bits) { bits[BIT_WORD(bit)] &= ~BIT_MASK(bit); }
static inline bool test_bit(unsigned long bit, const volatile unsigned long *bits) {
    return (__atomic_load_n(&bits[BIT_WORD(bit)], __ATOMIC_RELAXED) & BIT_MASK(bit)) != 0;
}
static inline void set_bit(unsigned long bit, volatile unsigned long *bits) {
    __atomic_fetch_or(&bits[BIT_WORD(bit)], BIT_MASK(bit), __ATOMIC_RELAXED);
}
static inline void clear_bit(unsigned long bit, volatile unsigned long *bits) {
    __atomic_fetch_and(&bits[BIT_WORD(bit)], ~BIT_MASK(bit), __ATOMIC_RELAXED);
}
static inline bool test_and_set_bit(unsigned long bit, volatile unsigned long *bits) {
    return (__atomic_fetch_or(&bits[BIT_WORD(bit)], BIT_MASK(bit), __ATOMIC_SEQ_CST) & BIT_MASK(bit)) != 0;
}
static inline bool test_and_clear_bit(unsigned long bit, volatile unsigned long *bits) {
    return (__atomic_fetch_and(&bits[BIT_WORD(bit)], ~BIT_MASK(bit), __ATOMIC_SEQ_CST) & BIT_MASK(bit)) != 0;
}
#endif

#endif
