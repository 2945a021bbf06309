/* Pages. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * docs/linux.md says of each name which test shows it, and what differs from Linux. A request that cannot be (an order above 18, a
 * node without memory, a number of pages that is negative or above INT_MAX) is warned of once and gets nothing. Freeing what is free
 * already, what was never handed out, or with the wrong order changes nothing: it is warned of on standard error, and by the function
 * of `pagemill_on_misuse`.
 *
 * A signal handler may allocate pages of order 0 with GFP_NOWAIT or GFP_ATOMIC, and free them, singly and in bulk, after the process's
 * first request. */
#ifndef PAGEMILL_LINUX_GFP_H
#define PAGEMILL_LINUX_GFP_H

#include <linux/gfp_types.h>
#include <linux/list.h>
#include <linux/mm_types.h>
#include <linux/mmzone.h>
#include <linux/topology.h>

static inline bool gfpflags_allow_blocking(gfp_t gfp) {
    return (gfp & __GFP_DIRECT_RECLAIM) != 0;
}

static inline bool gfpflags_allow_spinning(gfp_t gfp) {
    return (gfp & __GFP_RECLAIM) != 0;
}

/* A block of 2^order pages, with one reference, or null. Without `__GFP_COMP` only `__free_pages` with its order frees it, or
 * `split_page` makes it pages. */
struct page *alloc_pages(gfp_t gfp, unsigned int order);
/* The same, from a node if that has any, and with `__GFP_THISNODE` from no other. NUMA_NO_NODE: the nearest. */
struct page *alloc_pages_node(int nid, gfp_t gfp, unsigned int order);
#define alloc_page(gfp) alloc_pages(gfp, 0)
#define alloc_page_node(nid, gfp) alloc_pages_node(nid, gfp, 0)
/* Until 2015, for a node that is known: it is the nearest, not the only one. */
#define alloc_pages_exact_node(nid, gfp, order) alloc_pages_node(nid, gfp, order)

unsigned long __get_free_pages(gfp_t gfp, unsigned int order);
#define __get_free_page(gfp) __get_free_pages(gfp, 0)
#define get_zeroed_page(gfp) __get_free_pages((gfp) | __GFP_ZERO, 0)

/* Drops a reference. The last one frees the block. */
void __free_pages(struct page *page, unsigned int order);
void free_pages(unsigned long address, unsigned int order);
#define __free_page(page) __free_pages(page, 0)
#define free_page(address) free_pages(address, 0)

/* As many pages as `size` bytes take, contiguous, with a reference each. */
void *alloc_pages_exact(size_t size, gfp_t gfp);
void free_pages_exact(void *start, size_t size);

/* What every form of a bulk request comes down to: pages go to the null slots of `array` among the first `n`, to the head of `list`,
 * or to `each`, whichever is not null. A node of NUMA_NO_NODE is the nearest; null nodes are all. Of the array the first hole is
 * returned, `n` if there is none; else the number of pages. */
unsigned long pagemill_linux_bulk(gfp_t gfp, unsigned int order, int nid, const nodemask_t *nodes, long n,
                                  struct list_head *list, struct page **array,
                                  void (*each)(struct page *page, void *data), void *data);

/* Adds pages to the head of a list. Returns how many. */
static inline unsigned long alloc_pages_bulk_list(gfp_t gfp, unsigned long n, struct list_head *list) {
    return pagemill_linux_bulk(gfp, 0, NUMA_NO_NODE, NULL, (long)n, list, NULL, NULL, NULL);
}

/* Fills the null slots among the first n. Returns the first hole that is left, n if there is none: all slots before it have a page. */
static inline unsigned long alloc_pages_bulk_array(gfp_t gfp, unsigned long n, struct page **array) {
    return pagemill_linux_bulk(gfp, 0, NUMA_NO_NODE, NULL, (long)n, NULL, array, NULL, NULL);
}

/* The same, from a node if that has any. */
static inline unsigned long alloc_pages_bulk_array_node(gfp_t gfp, int nid, unsigned long n, struct page **array) {
    return pagemill_linux_bulk(gfp, 0, nid, NULL, (long)n, NULL, array, NULL, NULL);
}

/* By the allocator's policy. */
static inline unsigned long alloc_pages_bulk_array_mempolicy(gfp_t gfp, unsigned long n, struct page **array) {
    return alloc_pages_bulk_array(gfp, n, array);
}

/* Hands each page to a function, which owns it from then on. Returns how many. */
static inline unsigned long alloc_pages_bulk_cb(gfp_t gfp, unsigned long n, void (*cb)(struct page *page, void *data),
                                                void *data) {
    return pagemill_linux_bulk(gfp, 0, NUMA_NO_NODE, NULL, (long)n, NULL, NULL, cb, data);
}

/* `*n` pages of one node, or fewer: `*n` gets how many, and the array's first slots get them. Returns the first page. With a null
 * `n` one page. */
struct page *alloc_pages_exact_node_multiple(int nid, gfp_t gfp, unsigned long *n, struct page **array);

#if PAGEMILL_LINUX_YEAR == 2017

/* The order in which a node's requests try nodes: the node, in disguise. */
struct zonelist;
static inline struct zonelist *node_zonelist(int nid, gfp_t gfp) {
    (void)gfp;
    return (struct zonelist *)(long)(nid + 1);
}

#define __alloc_pages(gfp, order, zonelist) alloc_pages_node((int)(long)(zonelist) - 1, gfp, order)

/* Adds blocks to the head of a list. Returns how many. */
static inline unsigned long __alloc_pages_bulk_nodemask(gfp_t gfp, unsigned int order, struct zonelist *zonelist,
                                                        nodemask_t *nodes, unsigned long n, struct list_head *list) {
    return pagemill_linux_bulk(gfp, order, (int)(long)zonelist - 1, nodes, (long)n, list, NULL, NULL, NULL);
}

static inline unsigned long __alloc_pages_bulk(gfp_t gfp, unsigned int order, struct zonelist *zonelist, unsigned long n,
                                               struct list_head *list) {
    return __alloc_pages_bulk_nodemask(gfp, order, zonelist, NULL, n, list);
}

static inline unsigned long alloc_pages_bulk(gfp_t gfp, unsigned int order, unsigned long n, struct list_head *list) {
    return pagemill_linux_bulk(gfp, order, NUMA_NO_NODE, NULL, (long)n, list, NULL, NULL, NULL);
}

#else

#define __alloc_pages(gfp, order, nid, nodes) pagemill_linux_block(gfp, order, nid, nodes)

#if PAGEMILL_LINUX_YEAR == 2021 || PAGEMILL_LINUX_YEAR == 2023

/* Into a list or an array; with eight arguments, the last two a function and its data, to the function. */
#define __alloc_pages_bulk(...) PAGEMILL_LINUX_8TH(__VA_ARGS__, pagemill_linux_bulk_8, , pagemill_linux_bulk_6, )(__VA_ARGS__)
#define PAGEMILL_LINUX_8TH(a, b, c, d, e, f, g, h, chosen, ...) chosen
#define pagemill_linux_bulk_6(gfp, nid, nodes, n, list, array) \
    pagemill_linux_bulk(gfp, 0, nid, nodes, n, list, array, NULL, NULL)
#define pagemill_linux_bulk_8(gfp, nid, nodes, n, list, array, cb, data) \
    pagemill_linux_bulk(gfp, 0, nid, nodes, n, list, array, cb, data)

#else

static inline unsigned long __alloc_pages_bulk(gfp_t gfp, int nid, nodemask_t *nodes, int n, struct page **array) {
    return pagemill_linux_bulk(gfp, 0, nid, nodes, n, NULL, array, NULL, NULL);
}

#endif

#if PAGEMILL_LINUX_YEAR == 2021

/* The list form: what this name meant first. */
static inline unsigned long alloc_pages_bulk(gfp_t gfp, unsigned long n, struct list_head *list) {
    return alloc_pages_bulk_list(gfp, n, list);
}

#else

/* The array form, since Linux 6.14. */
static inline unsigned long alloc_pages_bulk(gfp_t gfp, unsigned long n, struct page **array) {
    return alloc_pages_bulk_array(gfp, n, array);
}

static inline unsigned long alloc_pages_bulk_node(gfp_t gfp, int nid, unsigned long n, struct page **array) {
    return alloc_pages_bulk_array_node(gfp, nid, n, array);
}

static inline unsigned long alloc_pages_bulk_mempolicy(gfp_t gfp, unsigned long n, struct page **array) {
    return alloc_pages_bulk_array_mempolicy(gfp, n, array);
}

#endif
#endif

/* A block, from a node if that has any, and from no nodes but these. */
struct page *pagemill_linux_block(gfp_t gfp, unsigned int order, int nid, const nodemask_t *nodes);

/* Drops a reference of each page on a list. Frees those whose last one it was, and takes them off. */
void free_pages_bulk(struct list_head *list);
/* The same for an array's first n slots, which stay as they are. */
void release_pages(struct page **pages, int n);

#endif
