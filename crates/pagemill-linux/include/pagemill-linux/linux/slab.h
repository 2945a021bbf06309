/*
 * Objects of any size, and caches of objects of one size, over Pagemill's pages (slab.c). SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * A null pointer or ZERO_SIZE_PTR is freed by doing nothing. Any other pointer that is no allocated object of the right kind is
 * refused, with a warning: freed twice, never handed out, or inside an object. Any thread may call everything here; a signal handler
 * must not.
 */
#ifndef PAGEMILL_LINUX_SLAB_H
#define PAGEMILL_LINUX_SLAB_H

#include <linux/gfp.h>
#include <linux/overflow.h>
#include <linux/rcupdate.h>
#include <linux/types.h>

#define ZERO_SIZE_PTR ((void *)16)
#define ZERO_OR_NULL_PTR(pointer) ((unsigned long)(pointer) <= (unsigned long)ZERO_SIZE_PTR)

/* The largest object: 4 MiB. */
#define KMALLOC_MAX_SIZE (4UL << 20)
#define KMALLOC_MIN_SIZE 8
#define KMALLOC_MAX_CACHE_SIZE 8192UL
#define ARCH_KMALLOC_MINALIGN 8

/* Each size has a cache of its own, up to 8 KiB; larger ones take blocks of pages. A power of two is aligned to itself. */
void *__kmalloc_node(size_t size, gfp_t gfp, int node);
void *krealloc(const void *object, size_t size, gfp_t gfp);
void kfree(const void *object);
/* Also overwrites it. */
void kfree_sensitive(const void *object);
#define kzfree(object) kfree_sensitive(object)
/* How many bytes there are behind a pointer that kmalloc returned. */
size_t ksize(const void *object);
/* How many there would be. */
size_t kmalloc_size_roundup(size_t size);

/* From kmalloc if it has room, else from vmalloc. kvfree frees either. */
void *kvmalloc_node(size_t size, gfp_t gfp, int node);
void *kvrealloc(const void *object, size_t size, gfp_t gfp);
void kvfree(const void *object);

static inline void *kmalloc_node(size_t size, gfp_t gfp, int node) { return __kmalloc_node(size, gfp, node); }
static inline void *kmalloc(size_t size, gfp_t gfp) { return __kmalloc_node(size, gfp, NUMA_NO_NODE); }
static inline void *__kmalloc(size_t size, gfp_t gfp) { return kmalloc(size, gfp); }
static inline void *kzalloc(size_t size, gfp_t gfp) { return kmalloc(size, gfp | __GFP_ZERO); }
static inline void *kzalloc_node(size_t size, gfp_t gfp, int node) { return kmalloc_node(size, gfp | __GFP_ZERO, node); }
static inline void *kmalloc_array(size_t n, size_t size, gfp_t gfp) { return kmalloc(size_mul(n, size), gfp); }
static inline void *kmalloc_array_node(size_t n, size_t size, gfp_t gfp, int node) {
    return kmalloc_node(size_mul(n, size), gfp, node);
}
static inline void *kcalloc(size_t n, size_t size, gfp_t gfp) { return kmalloc_array(n, size, gfp | __GFP_ZERO); }
static inline void *kcalloc_node(size_t n, size_t size, gfp_t gfp, int node) {
    return kmalloc_array_node(n, size, gfp | __GFP_ZERO, node);
}
static inline void *krealloc_array(void *object, size_t n, size_t size, gfp_t gfp) {
    return krealloc(object, size_mul(n, size), gfp);
}
static inline void *kvmalloc(size_t size, gfp_t gfp) { return kvmalloc_node(size, gfp, NUMA_NO_NODE); }
static inline void *kvzalloc(size_t size, gfp_t gfp) { return kvmalloc(size, gfp | __GFP_ZERO); }
static inline void *kvzalloc_node(size_t size, gfp_t gfp, int node) { return kvmalloc_node(size, gfp | __GFP_ZERO, node); }
static inline void *kvmalloc_array(size_t n, size_t size, gfp_t gfp) { return kvmalloc(size_mul(n, size), gfp); }
static inline void *kvcalloc(size_t n, size_t size, gfp_t gfp) { return kvmalloc_array(n, size, gfp | __GFP_ZERO); }
static inline void *kvcalloc_node(size_t n, size_t size, gfp_t gfp, int node) {
    return kvmalloc_node(size_mul(n, size), gfp | __GFP_ZERO, node);
}
char *kstrdup(const char *text, gfp_t gfp);
char *kstrndup(const char *text, size_t most, gfp_t gfp);
void *kmemdup(const void *bytes, size_t size, gfp_t gfp);

/* Aligned to a line of the processor's cache. */
#define SLAB_HWCACHE_ALIGN 0x2000U
/* Memory that held an object stays an object of this cache until a grace period is over. */
#define SLAB_TYPESAFE_BY_RCU 0x80000U
#define SLAB_DESTROY_BY_RCU SLAB_TYPESAFE_BY_RCU
/* The cache cannot be made: panic. */
#define SLAB_PANIC 0x40000U
/* These change nothing here: all uses are checked, none is accounted, and sizes share no cache. */
#define SLAB_CONSISTENCY_CHECKS 0x100U
#define SLAB_RED_ZONE 0x400U
#define SLAB_POISON 0x800U
#define SLAB_STORE_USER 0x10000U
#define SLAB_RECLAIM_ACCOUNT 0x20000U
#define SLAB_MEM_SPREAD 0x100000U
#define SLAB_ACCOUNT 0x4000000U
#define SLAB_NO_MERGE 0x8000000U
#define SLAB_TEMPORARY SLAB_RECLAIM_ACCOUNT
typedef unsigned int slab_flags_t;

struct kmem_cache;

/* A cache, or null. `ctor` is called for each object when its memory comes from the page allocator, not at each allocation. */
struct kmem_cache *kmem_cache_create(const char *name, unsigned int size, unsigned int align, slab_flags_t flags,
                                     void (*ctor)(void *object));
struct kmem_cache *kmem_cache_create_usercopy(const char *name, unsigned int size, unsigned int align, slab_flags_t flags,
                                              unsigned int from, unsigned int bytes, void (*ctor)(void *object));
#define KMEM_CACHE(type, flags) kmem_cache_create(#type, sizeof(struct type), __alignof__(struct type), (flags), NULL)
/* Warns of objects that are not freed, and keeps the cache then. */
void kmem_cache_destroy(struct kmem_cache *cache);
/* Gives pages without an object back. */
int kmem_cache_shrink(struct kmem_cache *cache);
unsigned int kmem_cache_size(struct kmem_cache *cache);
void *kmem_cache_alloc_node(struct kmem_cache *cache, gfp_t gfp, int node);
static inline void *kmem_cache_alloc(struct kmem_cache *cache, gfp_t gfp) {
    return kmem_cache_alloc_node(cache, gfp, NUMA_NO_NODE);
}
static inline void *kmem_cache_zalloc(struct kmem_cache *cache, gfp_t gfp) { return kmem_cache_alloc(cache, gfp | __GFP_ZERO); }
void kmem_cache_free(struct kmem_cache *cache, void *object);
/* All of them, or none: n or 0. */
int kmem_cache_alloc_bulk(struct kmem_cache *cache, gfp_t gfp, size_t n, void **objects);
/* The cache may be null: each object goes back to its own. */
void kmem_cache_free_bulk(struct kmem_cache *cache, size_t n, void **objects);
#define kfree_bulk(n, objects) kmem_cache_free_bulk(NULL, n, objects)

#endif
