/* Pages that circulate: what is made of `types.h`. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_NET_PAGE_POOL_HELPERS_H
#define PAGEMILL_NET_PAGE_POOL_HELPERS_H

#include <net/page_pool/types.h>

static inline struct page *page_pool_dev_alloc_pages(struct page_pool *pool) {
    return page_pool_alloc_pages(pool, GFP_ATOMIC | __GFP_NOWARN);
}

static inline struct page *page_pool_dev_alloc_frag(struct page_pool *pool, unsigned int *offset, unsigned int size) {
    return page_pool_alloc_frag(pool, offset, size, GFP_ATOMIC | __GFP_NOWARN);
}

static inline void page_pool_put_full_page(struct page_pool *pool, struct page *page, bool allow_direct) {
    page_pool_put_page(pool, page, -1U, allow_direct);
}

static inline void page_pool_recycle_direct(struct page_pool *pool, struct page *page) {
    page_pool_put_full_page(pool, page, true);
}

/* So many parts of a page, of which the caller cuts as it likes. */
static inline void page_pool_fragment_page(struct page *page, long n) {
    __atomic_store_n(&page->pp_ref_count.counter, n, __ATOMIC_RELEASE);
}

static inline void page_pool_ref_page(struct page *page) {
    __atomic_fetch_add(&page->pp_ref_count.counter, 1, __ATOMIC_ACQ_REL);
}

/* Returns how many parts are left. */
static inline long page_pool_unref_page(struct page *page, long n) {
    return (long)__atomic_sub_fetch(&page->pp_ref_count.counter, n, __ATOMIC_ACQ_REL);
}

static inline void page_pool_nid_changed(struct page_pool *pool, int nid) {
    page_pool_update_nid(pool, nid);
}

#if PAGEMILL_LINUX_YEAR <= 2023

static inline void page_pool_put_page_bulk(struct page_pool *pool, void **pages, int n) {
    pagemill_linux_page_pool_put_bulk(pool, (struct page **)pages, n);
}

static inline void page_pool_release_page(struct page_pool *pool, struct page *page) {
    pagemill_linux_page_pool_release(pool, page);
}

#else

/* Memory of a network device: here always a page. */
typedef unsigned long netmem_ref;

static inline netmem_ref page_to_netmem(struct page *page) {
    return (netmem_ref)page;
}

static inline struct page *netmem_to_page(netmem_ref memory) {
    return (struct page *)memory;
}

/* Each page knows its pool. */
static inline void page_pool_put_netmem_bulk(netmem_ref *memory, u32 n) {
    struct page *pages[64];
    for (u32 at = 0; at < n; at += 64) {
        u32 some = n - at < 64 ? n - at : 64;
        for (u32 next = 0; next < some; next++)
            pages[next] = netmem_to_page(memory[at + next]);
        pagemill_linux_page_pool_put_bulk(NULL, pages, (int)some);
    }
}

/* A page, or the part of one that `*size` bytes need: `*offset` and `*size` get where it is, and how large. */
static inline struct page *page_pool_alloc(struct page_pool *pool, unsigned int *offset, unsigned int *size, gfp_t gfp) {
    return page_pool_alloc_frag(pool, offset, *size, gfp);
}

static inline struct page *page_pool_dev_alloc(struct page_pool *pool, unsigned int *offset, unsigned int *size) {
    return page_pool_alloc(pool, offset, size, GFP_ATOMIC | __GFP_NOWARN);
}

#endif

#endif
