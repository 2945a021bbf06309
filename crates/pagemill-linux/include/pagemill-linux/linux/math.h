/* Rounding and dividing. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_MATH_H
#define PAGEMILL_LINUX_MATH_H

#include <linux/types.h>

#ifndef ALIGN
#define __ALIGN_MASK(number, mask) (((number) + (mask)) & ~(mask))
#define ALIGN(number, to) __ALIGN_MASK(number, (typeof(number))(to) - 1)
#define ALIGN_DOWN(number, to) ((number) & ~((typeof(number))(to) - 1))
#define IS_ALIGNED(number, to) (((number) & ((typeof(number))(to) - 1)) == 0)
#endif
/* By powers of two. */
#define round_up(number, to) ((((number) - 1) | ((typeof(number))(to) - 1)) + 1)
#define round_down(number, to) ((number) & ~((typeof(number))(to) - 1))
/* By any number. */
#define roundup(number, to)                            \
    ({                                                 \
        typeof(to) to_ = (to);                         \
        (((number) + (to_ - 1)) / to_) * to_;          \
    })
#define rounddown(number, to)                          \
    ({                                                 \
        typeof(number) number_ = (number);             \
        number_ - number_ % (to);                      \
    })
#define DIV_ROUND_UP(number, by) (((number) + (by) - 1) / (by))
#define DIV_ROUND_UP_ULL(number, by) DIV_ROUND_UP((unsigned long long)(number), (unsigned long long)(by))
#define DIV_ROUND_CLOSEST(number, by) (((number) + (by) / 2) / (by))
#ifdef __KERNEL__
/* Of any type. Outside a module <stdlib.h> has a function of this name. */
#define abs(number)                                    \
    ({                                                 \
        typeof(number) number_ = (number);             \
        number_ < 0 ? -number_ : number_;              \
    })
#endif

/* Divides the variable, and is the remainder. */
#define do_div(variable, by)                           \
    ({                                                 \
        u32 by_ = (by);                                \
        u32 rest_ = (u64)(variable) % by_;             \
        (variable) = (u64)(variable) / by_;            \
        rest_;                                         \
    })

static inline u64 div_u64_rem(u64 number, u32 by, u32 *rest) {
    *rest = number % by;
    return number / by;
}
static inline u64 div_u64(u64 number, u32 by) { return number / by; }
static inline s64 div_s64(s64 number, s32 by) { return number / by; }
static inline u64 div64_u64(u64 number, u64 by) { return number / by; }
static inline s64 div64_s64(s64 number, s64 by) { return number / by; }
#define div64_ul(number, by) div64_u64(number, by)
#define div64_long(number, by) div64_s64(number, by)
static inline u64 mul_u64_u32_shr(u64 a, u32 b, unsigned int shift) { return (u64)(((unsigned __int128)a * b) >> shift); }

#endif
