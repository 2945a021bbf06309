/* The number of references to a page. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_PAGE_REF_H
#define PAGEMILL_LINUX_PAGE_REF_H

#include <linux/mm_types.h>

static inline int page_ref_count(const struct page *page) {
    return __atomic_load_n(&page->_refcount.counter, __ATOMIC_ACQUIRE);
}

static inline int page_count(const struct page *page) {
    unsigned long head = READ_ONCE(page->compound_head);
    return page_ref_count(head & 1 ? (const struct page *)(head - 1) : page);
}

static inline void set_page_count(struct page *page, int count) {
    __atomic_store_n(&page->_refcount.counter, count, __ATOMIC_RELEASE);
}

static inline void page_ref_add(struct page *page, int n) {
    __atomic_fetch_add(&page->_refcount.counter, n, __ATOMIC_ACQ_REL);
}

static inline void page_ref_sub(struct page *page, int n) {
    __atomic_fetch_sub(&page->_refcount.counter, n, __ATOMIC_ACQ_REL);
}

static inline void page_ref_inc(struct page *page) {
    page_ref_add(page, 1);
}

static inline void page_ref_dec(struct page *page) {
    page_ref_sub(page, 1);
}

static inline int page_ref_inc_return(struct page *page) {
    return __atomic_add_fetch(&page->_refcount.counter, 1, __ATOMIC_ACQ_REL);
}

static inline int page_ref_dec_and_test(struct page *page) {
    return __atomic_sub_fetch(&page->_refcount.counter, 1, __ATOMIC_ACQ_REL) == 0;
}

static inline bool page_ref_add_unless(struct page *page, int n, int unless) {
    int is = page_ref_count(page);
    while (is != unless)
        if (__atomic_compare_exchange_n(&page->_refcount.counter, &is, is + n, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return true;
    return false;
}

#endif
