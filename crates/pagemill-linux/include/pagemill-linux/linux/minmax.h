/* The smaller, the larger, and what lies between. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_MINMAX_H
#define PAGEMILL_LINUX_MINMAX_H

#include <linux/types.h>

#ifndef min_t
#define __pagemill_smaller(a, b)     \
    ({                               \
        typeof(a) a_ = (a);          \
        typeof(b) b_ = (b);          \
        a_ < b_ ? a_ : b_;           \
    })
#define __pagemill_larger(a, b)      \
    ({                               \
        typeof(a) a_ = (a);          \
        typeof(b) b_ = (b);          \
        a_ > b_ ? a_ : b_;           \
    })
#define min(a, b) __pagemill_smaller(a, b)
#define max(a, b) __pagemill_larger(a, b)
#define min_t(type, a, b) __pagemill_smaller((type)(a), (type)(b))
#define max_t(type, a, b) __pagemill_larger((type)(a), (type)(b))
#endif
#ifndef clamp
#define min3(a, b, c) min((typeof(a))min(a, b), c)
#define max3(a, b, c) max((typeof(a))max(a, b), c)
#define clamp_t(type, number, low, high)                                     \
    ({                                                                       \
        type number_ = (number), low_ = (low), high_ = (high);               \
        number_ < low_ ? low_ : number_ > high_ ? high_ : number_;           \
    })
#define clamp(number, low, high) clamp_t(typeof(number), number, low, high)
#define clamp_val(number, low, high) clamp_t(typeof(number), number, low, high)
#endif
#ifndef swap
#define swap(a, b)                   \
    do {                             \
        typeof(a) a_ = (a);          \
        (a) = (b);                   \
        (b) = a_;                    \
    } while (0)
#endif

#endif
