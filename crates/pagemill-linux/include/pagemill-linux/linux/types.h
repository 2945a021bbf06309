/* Types, and the year by whose interfaces a program is written. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * PAGEMILL_LINUX_2017, PAGEMILL_LINUX_2021 or PAGEMILL_LINUX_2023, defined before the first header, chooses the interfaces of that
 * year where a name's arguments or meaning changed; without any it is today's. docs/linux.md lists the names.
 *
 * The C library's headers include <linux/types.h> too, so this one begins with the system's. */
#ifndef PAGEMILL_LINUX_TYPES_H
#define PAGEMILL_LINUX_TYPES_H

#include_next <linux/types.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#if defined(PAGEMILL_LINUX_2017)
#define PAGEMILL_LINUX_YEAR 2017
#elif defined(PAGEMILL_LINUX_2021)
#define PAGEMILL_LINUX_YEAR 2021
#elif defined(PAGEMILL_LINUX_2023)
#define PAGEMILL_LINUX_YEAR 2023
#else
#define PAGEMILL_LINUX_YEAR 2026
#endif

typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __u64 u64;
typedef __s8 s8;
typedef __s16 s16;
typedef __s32 s32;
typedef __s64 s64;

typedef unsigned int gfp_t;
typedef unsigned long pgoff_t;
typedef u64 dma_addr_t;
typedef u64 phys_addr_t;

typedef struct {
    int counter;
} atomic_t;

typedef struct {
    s64 counter;
} atomic64_t;
typedef atomic64_t atomic_long_t;

struct list_head {
    struct list_head *next, *prev;
};

struct hlist_head {
    struct hlist_node *first;
};

struct hlist_node {
    struct hlist_node *next, **pprev;
};

#endif
