/* What is between a page, its address, its number and its references. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_MM_H
#define PAGEMILL_LINUX_MM_H

#include <asm/page.h>
#include <linux/bug.h>
#include <linux/err.h>
#include <linux/errno.h>
#include <linux/gfp.h>
#include <linux/page_ref.h>
#include <string.h>

/* The table: `struct page` of page number `first`, and how many. It never moves. */
extern struct pagemill_linux_table {
    struct page *pages;
    unsigned long first;
    unsigned long count;
} pagemill_linux_table;

/* A page's number is its address divided by its size, in this process. */
static inline unsigned long page_to_pfn(const struct page *page) {
    return (unsigned long)(page - pagemill_linux_table.pages) + pagemill_linux_table.first;
}

static inline struct page *pfn_to_page(unsigned long pfn) {
    return pagemill_linux_table.pages + (pfn - pagemill_linux_table.first);
}

/* Whether a page has a place in the table. */
static inline bool pfn_valid(unsigned long pfn) {
    return pfn - pagemill_linux_table.first < pagemill_linux_table.count;
}

static inline void *page_address(const struct page *page) {
    return (void *)(page_to_pfn(page) << PAGE_SHIFT);
}

/* For an address that no page has, a pointer that must not be followed. The functions that free refuse it. */
static inline struct page *virt_to_page(const void *address) {
    return pfn_to_page((unsigned long)address >> PAGE_SHIFT);
}

#define page_to_virt(page) page_address(page)
#define virt_to_pfn(address) ((unsigned long)(address) >> PAGE_SHIFT)
#define pfn_to_virt(pfn) ((void *)((unsigned long)(pfn) << PAGE_SHIFT))
#define virt_addr_valid(address) pfn_valid(virt_to_pfn(address))
#define page_to_phys(page) ((phys_addr_t)page_to_pfn(page) << PAGE_SHIFT)
#define offset_in_page(address) ((unsigned long)(address) & ~PAGE_MASK)
#define PAGE_ALIGN(address) (((address) + PAGE_SIZE - 1) & PAGE_MASK)

/* The node of a page's arena. */
int page_to_nid(const struct page *page);

/* The first page of a compound page, the page itself of another. */
static inline struct page *compound_head(const struct page *page) {
    unsigned long head = READ_ONCE(page->compound_head);
    return (struct page *)(head & 1 ? head - 1 : (unsigned long)page);
}

#define PG_head 0
#define PG_reserved 1
#define PG_private 2
#define PG_uptodate 3
#define PG_dirty 4
#define PG_readahead 5
/* In a mempool's reserve. */
#define PG_mempool 6
/* With objects of slab.h, and with memory of vmalloc.h. */
#define PG_slab 7
#define PG_vmalloc 8

#define PAGEMILL_LINUX_FLAG(Name, bit)                                                     \
    static inline bool Page##Name(const struct page *page) {                               \
        return READ_ONCE(page->flags) >> (bit) & 1;                                        \
    }                                                                                      \
    static inline void SetPage##Name(struct page *page) {                                  \
        __atomic_fetch_or(&page->flags, 1UL << (bit), __ATOMIC_ACQ_REL);                   \
    }                                                                                      \
    static inline void ClearPage##Name(struct page *page) {                                \
        __atomic_fetch_and(&page->flags, ~(1UL << (bit)), __ATOMIC_ACQ_REL);               \
    }                                                                                      \
    static inline bool TestSetPage##Name(struct page *page) {                              \
        return __atomic_fetch_or(&page->flags, 1UL << (bit), __ATOMIC_ACQ_REL) >> (bit) & 1; \
    }                                                                                      \
    static inline bool TestClearPage##Name(struct page *page) {                            \
        return __atomic_fetch_and(&page->flags, ~(1UL << (bit)), __ATOMIC_ACQ_REL) >> (bit) & 1; \
    }
PAGEMILL_LINUX_FLAG(Head, PG_head)
PAGEMILL_LINUX_FLAG(Reserved, PG_reserved)
PAGEMILL_LINUX_FLAG(Private, PG_private)
PAGEMILL_LINUX_FLAG(Uptodate, PG_uptodate)
PAGEMILL_LINUX_FLAG(Dirty, PG_dirty)
PAGEMILL_LINUX_FLAG(Readahead, PG_readahead)
PAGEMILL_LINUX_FLAG(Slab, PG_slab)
PAGEMILL_LINUX_FLAG(Vmalloc, PG_vmalloc)

static inline bool PageCompound(const struct page *page) {
    return PageHead(page) || (READ_ONCE(page->compound_head) & 1);
}

static inline bool PageTail(const struct page *page) {
    return READ_ONCE(page->compound_head) & 1;
}

static inline unsigned int compound_order(const struct page *head) {
    return PageHead(head) ? head->compound_order : 0;
}

static inline unsigned long compound_nr(const struct page *head) {
    return 1UL << compound_order(head);
}

#define page_size(head) (PAGE_SIZE << compound_order(head))
#define page_private(page) ((page)->private)
#define set_page_private(page, value) ((void)((page)->private = (value)))

/* Takes one more reference of a page that has some. */
static inline void get_page(struct page *page) {
    page = compound_head(page);
    WARN_ON_ONCE(page_ref_inc_return(page) <= 1);
}

static inline bool get_page_unless_zero(struct page *page) {
    return page_ref_add_unless(page, 1, 0);
}

static inline bool try_get_page(struct page *page) {
    return get_page_unless_zero(compound_head(page));
}

/* Drops a reference without freeing. Returns whether it was the last. */
static inline int put_page_testzero(struct page *page) {
    return page_ref_dec_and_test(page);
}

/* Drops a reference. The last one frees the page, or the compound page. */
void put_page(struct page *page);

/* Makes a block that is not compound 2^order pages with a reference each. */
void split_page(struct page *page, unsigned int order);

static inline void clear_page(void *page) {
    memset(page, 0, PAGE_SIZE);
}

static inline void clear_highpage(struct page *page) {
    clear_page(page_address(page));
}

#define copy_page(to, from) ((void)memcpy(to, from, PAGE_SIZE))

#endif
