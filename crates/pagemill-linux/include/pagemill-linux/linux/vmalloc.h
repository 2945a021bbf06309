/*
 * Memory for which a kernel would change its page table. In a process the pages lie beside each other in the arena, so nothing is
 * mapped. SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef PAGEMILL_LINUX_VMALLOC_H
#define PAGEMILL_LINUX_VMALLOC_H

#include <linux/gfp.h>
#include <linux/mm.h>
#include <linux/overflow.h>
#include <linux/types.h>

/* Whole pages, or null. The last two arguments are not looked at. */
void *__vmalloc_node(unsigned long size, unsigned long align, gfp_t gfp, int node, const void *caller);
/* Warns of any pointer but null that none of these functions returned, or that was freed, and changes nothing. */
void vfree(const void *address);
bool is_vmalloc_addr(const void *address);
#define vfree_atomic(address) vfree(address)
static inline void *__vmalloc(unsigned long size, gfp_t gfp) { return __vmalloc_node(size, 1, gfp, NUMA_NO_NODE, NULL); }
static inline void *vmalloc(unsigned long size) { return __vmalloc(size, GFP_KERNEL); }
static inline void *vzalloc(unsigned long size) { return __vmalloc(size, GFP_KERNEL | __GFP_ZERO); }
static inline void *vmalloc_user(unsigned long size) { return vzalloc(size); }
static inline void *vmalloc_node(unsigned long size, int node) { return __vmalloc_node(size, 1, GFP_KERNEL, node, NULL); }
static inline void *vzalloc_node(unsigned long size, int node) {
    return __vmalloc_node(size, 1, GFP_KERNEL | __GFP_ZERO, node, NULL);
}
static inline void *vmalloc_array(size_t n, size_t size) { return vmalloc(size_mul(n, size)); }
static inline void *vcalloc(size_t n, size_t size) { return vzalloc(size_mul(n, size)); }
static inline void *vmalloc_huge(unsigned long size, gfp_t gfp) { return __vmalloc(size, gfp); }
static inline struct page *vmalloc_to_page(const void *address) { return virt_to_page(address); }
static inline unsigned long vmalloc_to_pfn(const void *address) { return page_to_pfn(virt_to_page(address)); }

/* Pages that lie beside each other already, in this order: the first one's address. Null for any others, with a warning. */
void *vm_map_ram(struct page **pages, unsigned int count, int node);
void vm_unmap_ram(const void *address, unsigned int count);
static inline void vm_unmap_aliases(void) {}

#endif
