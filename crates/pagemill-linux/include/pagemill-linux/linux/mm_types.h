/* struct page. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_MM_TYPES_H
#define PAGEMILL_LINUX_MM_TYPES_H

#include <linux/compiler.h>

struct address_space;
struct page_pool;

/* 64 bytes for each page between the first and the last arena of the allocator, in one table that is committed as it is touched.
 * A page that was never handed out has zeros here. `flags`, `mapping`, `private` and the number of references are set when
 * a page is handed out; everything else is as its last user left it. */
struct page {
    unsigned long flags;
    /* Free to use for the page's owner. The list forms link through it. */
    struct list_head lru;
    /* In all pages of a compound page but the first: the first one's address, with the lowest bit set. */
    unsigned long compound_head;
    union {
        struct address_space *mapping;
        struct page_pool *pp;
    };
    union {
        pgoff_t index;
        dma_addr_t dma_addr;
    };
    union {
        unsigned long private;
        atomic_long_t pp_ref_count;
    };
    atomic_t _refcount;
    /* Of the first page of a block, compound or not. */
    unsigned int compound_order;
};

_Static_assert(sizeof(struct page) == 64, "docs/contract.md names the size");

#endif
