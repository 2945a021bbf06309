/* Powers of two. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_LOG2_H
#define PAGEMILL_LINUX_LOG2_H

#include <linux/bitops.h>

#define ilog2(number) (63 - __builtin_clzll(number))
static inline bool is_power_of_2(unsigned long number) { return number != 0 && (number & (number - 1)) == 0; }
/* The least power of two that is not smaller. */
static inline unsigned long roundup_pow_of_two(unsigned long number) { return number <= 1 ? 1 : 1UL << fls64(number - 1); }
static inline unsigned long rounddown_pow_of_two(unsigned long number) { return 1UL << (fls64(number) - 1); }
/* The exponent of that power. */
static inline int order_base_2(unsigned long number) { return number <= 1 ? 0 : fls64(number - 1); }

#endif
