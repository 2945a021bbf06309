/* Pages beside each other, in any number. All of them have PG_vmalloc; the first one's `private` is their number. */
#include "internal.h"
#include <linux/kernel.h>
#include <linux/vmalloc.h>

void *__vmalloc_node(unsigned long size, unsigned long align, gfp_t gfp, int node, const void *caller) {
    (void)node, (void)caller;
    unsigned long n = (size >> PAGE_SHIFT) + ((size & ~PAGE_MASK) != 0);
    char *start = NULL;
    if (n == 0 || align > PAGE_SIZE << PAGEMILL_ORDER_MAX || n > 1UL << 40)
        return NULL;
    if (align <= PAGE_SIZE) {
        start = alloc_pages_exact(n << PAGE_SHIFT, gfp);
    } else {
        unsigned int order = (unsigned int)order_base_2(max(n, align >> PAGE_SHIFT));
        struct page *block = order <= PAGEMILL_ORDER_MAX ? alloc_pages(gfp, order) : NULL;
        if (block) {
            split_page(block, order);
            start = page_address(block);
            free_pages_exact(start + (n << PAGE_SHIFT), PAGE_SIZE * ((1UL << order) - n));
        }
    }
    struct page *first = start ? virt_to_page(start) : NULL;
    for (unsigned long at = 0; start && at < n; at++) {
        first[at].private = at == 0 ? n : 0;
        SetPageVmalloc(first + at);
    }
    return start;
}

bool is_vmalloc_addr(const void *address) {
    struct page *page = virt_to_page(address);
    return pagemill_linux_is_page(page) && PageVmalloc(page);
}

void vfree(const void *address) {
    if (!address)
        return;
    struct page *first = virt_to_page(address);
    bool is_first = offset_in_page(address) == 0 && is_vmalloc_addr(address) && first->private > 0;
    if (WARN(!is_first || !TestClearPageVmalloc(first), "vfree of %p, which vmalloc did not return, or which is free", address))
        return;
    unsigned long n = first->private;
    first->private = 0;
    for (unsigned long at = 1; at < n; at++)
        ClearPageVmalloc(first + at);
    free_pages_exact((void *)address, n << PAGE_SHIFT);
}

void *vm_map_ram(struct page **pages, unsigned int count, int node) {
    (void)node;
    for (unsigned int at = 1; at < count; at++)
        if (WARN_ONCE(pages[at] != pages[0] + at, "vm_map_ram of pages that do not lie beside each other, which only a kernel can map"))
            return NULL;
    return count > 0 ? page_address(pages[0]) : NULL;
}

void vm_unmap_ram(const void *address, unsigned int count) { (void)address, (void)count; }
