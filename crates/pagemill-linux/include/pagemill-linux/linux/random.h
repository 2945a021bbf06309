/* Numbers that nobody can guess. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_RANDOM_H
#define PAGEMILL_LINUX_RANDOM_H

#include <linux/types.h>

void get_random_bytes(void *bytes, size_t size);
u64 get_random_u64(void);
static inline u32 get_random_u32(void) { return (u32)get_random_u64(); }
static inline u16 get_random_u16(void) { return (u16)get_random_u64(); }
static inline u8 get_random_u8(void) { return (u8)get_random_u64(); }
static inline unsigned long get_random_long(void) { return get_random_u64(); }
static inline unsigned int get_random_int(void) { return get_random_u32(); }
/* Below `end`, which is not 0. */
static inline u32 get_random_u32_below(u32 end) { return (u32)((u64)get_random_u32() * end >> 32); }
static inline u32 get_random_u32_inclusive(u32 least, u32 most) { return least + get_random_u32_below(most - least + 1); }
static inline u32 get_random_u32_above(u32 floor) { return get_random_u32_inclusive(floor + 1, ~0U); }
#define prandom_u32 get_random_u32
#define prandom_u32_max get_random_u32_below
#define prandom_bytes get_random_bytes

#endif
