/* Objects: caches of one size over blocks of pages, and kmalloc over caches.
 *
 * I1. A slab is a block of pages with objects of one cache, or one object of kmalloc that is larger than any cache's. Each of its pages
 *     has PG_slab, and the slab in `private`: so an object's slab is found from its address, whatever the address is.
 * I2. An object is allocated if its bit in `taken` is set, and is in the stack `free` if not. Nothing is written to a free object.
 * I3. A slab of a cache is on `partial` if it has a free object, else on `full`. Both lists, and all of the slab, belong to the
 *     cache's lock.
 *
 * The page allocator is never called with a cache's lock held. */
#include "internal.h"
#include "module.h"
#include <linux/kernel.h>
#include <linux/rcupdate.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/string.h>
#include <linux/vmalloc.h>
#include <stdlib.h>

struct kmem_cache {
    struct list_head link;
    char name[32];
    unsigned int size, stride, order, per_slab;
    slab_flags_t flags;
    void (*ctor)(void *object);
    spinlock_t lock;
    struct list_head partial, full;
    /* Slabs without an allocated object, and objects that are allocated. */
    unsigned int n_empty;
    unsigned long n_out;
};

struct slab {
    struct rcu_head rcu;
    struct list_head link;
    /* Null: one large object. */
    struct kmem_cache *cache;
    char *base;
    unsigned int order, stride, n, n_free;
    u64 *taken;
    u16 free[];
};

/* Empty slabs that a cache keeps. */
#define KEEP 4
/* Blocks that caches take by preference, unless an object needs a larger one. */
#define MOST_ORDER 3

static LIST_HEAD(caches);
static spinlock_t caches_lock;
static unsigned long n_large;

static struct slab *slab_of(const void *address) {
    struct page *page = virt_to_page(address);
    if (!pagemill_linux_is_page(page) || !PageSlab(page))
        return NULL;
    return (struct slab *)READ_ONCE(page->private);
}

/* Which object begins there; -1 if none does. */
static long object_at(const struct slab *slab, const void *address) {
    unsigned long offset = (unsigned long)((const char *)address - slab->base);
    return offset % slab->stride == 0 && offset / slab->stride < slab->n ? (long)(offset / slab->stride) : -1;
}

static unsigned long order_of(size_t size) {
    return size <= PAGE_SIZE ? 0 : (unsigned long)order_base_2((size + PAGE_SIZE - 1) >> PAGE_SHIFT);
}

/* A slab with all its objects free, in ascending order, on no list. */
static struct slab *new_slab(struct kmem_cache *cache, unsigned int order, unsigned int stride, unsigned int n, gfp_t gfp,
                             int node) {
    size_t words = (n + 63) / 64;
    struct slab *slab = calloc(1, sizeof *slab + ALIGN(n * sizeof(u16), 8) + words * 8);
    struct page *page = slab ? alloc_pages_node(node, gfp | (order ? __GFP_COMP : 0), order) : NULL;
    if (!page) {
        free(slab);
        return NULL;
    }
    slab->cache = cache;
    slab->base = page_address(page);
    slab->order = order;
    slab->stride = stride;
    slab->n = slab->n_free = n;
    slab->taken = (u64 *)((char *)slab->free + ALIGN(n * sizeof(u16), 8));
    for (unsigned int at = 0; at < n; at++)
        slab->free[at] = (u16)(n - 1 - at);
    for (unsigned long at = 0; at < 1UL << order; at++) {
        page[at].private = (unsigned long)slab;
        SetPageSlab(page + at);
    }
    for (unsigned int at = 0; cache && cache->ctor && at < n; at++)
        cache->ctor(slab->base + (size_t)at * stride);
    return slab;
}

static void end_slab(struct rcu_head *head) {
    struct slab *slab = container_of(head, struct slab, rcu);
    struct page *page = virt_to_page(slab->base);
    for (unsigned long at = 0; at < 1UL << slab->order; at++) {
        ClearPageSlab(page + at);
        page[at].private = 0;
    }
    __free_pages(page, slab->order);
    free(slab);
}

/* Frees slabs that are on no list of their cache any more. */
static void end_slabs(struct kmem_cache *cache, struct list_head *slabs) {
    struct slab *slab, *after;
    list_for_each_entry_safe(slab, after, slabs, link) {
        if (cache->flags & SLAB_TYPESAFE_BY_RCU)
            call_rcu(&slab->rcu, end_slab);
        else
            end_slab(&slab->rcu);
    }
}

/* With the cache's lock held: an object of a slab that has a free one. */
static void *take(struct kmem_cache *cache) {
    if (list_empty(&cache->partial))
        return NULL;
    struct slab *slab = list_first_entry(&cache->partial, struct slab, link);
    unsigned int at = slab->free[--slab->n_free];
    slab->taken[at / 64] |= 1ULL << at % 64;
    cache->n_empty -= slab->n_free == slab->n - 1;
    if (slab->n_free == 0)
        list_move(&slab->link, &cache->full);
    cache->n_out++;
    return slab->base + (size_t)at * slab->stride;
}

/* With the cache's lock held: an object is free again. A slab that the cache does not keep goes to `ended`. */
static void give(struct slab *slab, long at, struct list_head *ended) {
    struct kmem_cache *cache = slab->cache;
    slab->taken[at / 64] &= ~(1ULL << at % 64);
    slab->free[slab->n_free++] = (u16)at;
    cache->n_out--;
    if (slab->n_free == slab->n && cache->n_empty >= KEEP)
        list_move(&slab->link, ended);
    else if (slab->n_free == slab->n)
        cache->n_empty++, list_move_tail(&slab->link, &cache->partial);
    else if (slab->n_free == 1)
        list_move(&slab->link, &cache->partial);
}

static bool is_taken(const struct slab *slab, long at) { return at >= 0 && (slab->taken[at / 64] >> at % 64 & 1); }

/* What a new object holds: zeros, if the caller asks for them or the kernel's option does; but never in place of what a constructor
 * wrote, or readers under RCU may still look at. */
static void prepare(struct kmem_cache *cache, void *object, gfp_t gfp) {
    bool is_plain = !cache->ctor && !(cache->flags & SLAB_TYPESAFE_BY_RCU);
    if ((gfp & __GFP_ZERO) || (pagemill_linux_init_on_alloc && is_plain))
        memset(object, 0, cache->stride);
}

/* All of n objects, or none. */
static size_t take_all(struct kmem_cache *cache, gfp_t gfp, int node, size_t n, void **objects) {
    gfp_t pages = gfp & ~__GFP_ZERO;
    size_t got = 0;
    while (got < n) {
        spin_lock(&cache->lock);
        while (got < n && (objects[got] = take(cache)))
            got++;
        spin_unlock(&cache->lock);
        if (got == n)
            break;
        struct slab *slab = new_slab(cache, cache->order, cache->stride, cache->per_slab, pages, node);
        if (!slab) {
            kmem_cache_free_bulk(cache, got, objects);
            return 0;
        }
        spin_lock(&cache->lock);
        cache->n_empty++;
        list_add(&slab->link, &cache->partial);
        spin_unlock(&cache->lock);
    }
    for (size_t at = 0; at < n; at++)
        prepare(cache, objects[at], gfp);
    return n;
}

void *kmem_cache_alloc_node(struct kmem_cache *cache, gfp_t gfp, int node) {
    void *object;
    return take_all(cache, gfp, node, 1, &object) ? object : NULL;
}

int kmem_cache_alloc_bulk(struct kmem_cache *cache, gfp_t gfp, size_t n, void **objects) {
    return (int)take_all(cache, gfp, NUMA_NO_NODE, n, objects);
}

/* Frees an object, of `cache` unless it is null. Says so in a warning if there is no such object. */
static void free_object(const char *function, struct kmem_cache *cache, const void *object) {
    LIST_HEAD(ended);
    struct slab *slab = slab_of(object);
    long at = slab ? object_at(slab, object) : -1;
    if (WARN(at < 0, "%s of %p, which is no object", function, object))
        return;
    struct kmem_cache *owner = slab->cache;
    if (WARN(cache && owner != cache, "%s of %p, which is not of the cache %s", function, object, cache->name))
        return;
    if (!owner) {
        struct page *page = virt_to_page(slab->base);
        if (WARN(!TestClearPageSlab(page), "%s of %p, which is free", function, object))
            return;
        __atomic_fetch_sub(&n_large, 1, __ATOMIC_RELAXED);
        end_slab(&slab->rcu);
        return;
    }
    spin_lock(&owner->lock);
    bool was_taken = is_taken(slab, at);
    if (was_taken)
        give(slab, at, &ended);
    spin_unlock(&owner->lock);
    WARN(!was_taken, "%s of %p, an object of the cache %s that is free", function, object, owner->name);
    end_slabs(owner, &ended);
}

void kmem_cache_free(struct kmem_cache *cache, void *object) {
    if (object)
        free_object(__func__, cache, object);
}

void kmem_cache_free_bulk(struct kmem_cache *cache, size_t n, void **objects) {
    for (size_t at = 0; at < n; at++)
        if (!ZERO_OR_NULL_PTR(objects[at]))
            free_object(__func__, cache, objects[at]);
}

struct kmem_cache *kmem_cache_create(const char *name, unsigned int size, unsigned int align, slab_flags_t flags,
                                     void (*ctor)(void *object)) {
    if (flags & SLAB_HWCACHE_ALIGN)
        align = max(align, 64U);
    align = max(align, (unsigned int)sizeof(void *));
    bool is_possible = size > 0 && size <= KMALLOC_MAX_SIZE && is_power_of_2(align) && align <= PAGE_SIZE << MOST_ORDER;
    struct kmem_cache *cache = is_possible ? calloc(1, sizeof *cache) : NULL;
    if (!cache) {
        if (flags & SLAB_PANIC)
            panic("the cache %s of objects of %u bytes cannot be made", name, size);
        WARN(!is_possible, "the cache %s of objects of %u bytes, aligned to %u, cannot be", name, size, align);
        return NULL;
    }
    strncpy(cache->name, name, sizeof cache->name - 1);
    cache->size = size;
    cache->stride = ALIGN(size, align);
    cache->order = (unsigned int)order_of(cache->stride);
    while (cache->order < MOST_ORDER && (PAGE_SIZE << cache->order) / cache->stride < 16)
        cache->order++;
    cache->per_slab = (unsigned int)((PAGE_SIZE << cache->order) / cache->stride);
    cache->flags = flags;
    cache->ctor = ctor;
    INIT_LIST_HEAD(&cache->partial);
    INIT_LIST_HEAD(&cache->full);
    spin_lock(&caches_lock);
    list_add_tail(&cache->link, &caches);
    spin_unlock(&caches_lock);
    return cache;
}

struct kmem_cache *kmem_cache_create_usercopy(const char *name, unsigned int size, unsigned int align, slab_flags_t flags,
                                              unsigned int from, unsigned int bytes, void (*ctor)(void *object)) {
    (void)from, (void)bytes;
    return kmem_cache_create(name, size, align, flags, ctor);
}

unsigned int kmem_cache_size(struct kmem_cache *cache) { return cache->size; }

int kmem_cache_shrink(struct kmem_cache *cache) {
    LIST_HEAD(ended);
    struct slab *slab, *after;
    spin_lock(&cache->lock);
    list_for_each_entry_safe(slab, after, &cache->partial, link) {
        if (slab->n_free == slab->n)
            list_move(&slab->link, &ended);
    }
    cache->n_empty = 0;
    spin_unlock(&cache->lock);
    end_slabs(cache, &ended);
    return 0;
}

void kmem_cache_destroy(struct kmem_cache *cache) {
    if (!cache || WARN(cache->n_out > 0, "the cache %s is not destroyed: %lu objects of it are not freed", cache->name,
                       cache->n_out))
        return;
    spin_lock(&caches_lock);
    list_del(&cache->link);
    spin_unlock(&caches_lock);
    kmem_cache_shrink(cache);
    if (cache->flags & SLAB_TYPESAFE_BY_RCU)
        rcu_barrier();
    free(cache);
}

/* The sizes that kmalloc has a cache for, from 8 to KMALLOC_MAX_CACHE_SIZE. */
static const unsigned int sizes[] = {8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192};
static struct kmem_cache *kmalloc_caches[ARRAY_SIZE(sizes)];

static unsigned int class_of(size_t size) {
    if (size > 192)
        return (unsigned int)order_base_2(size) - 1;
    unsigned int class = 0;
    while (sizes[class] < size)
        class++;
    return class;
}

static struct kmem_cache *kmalloc_cache(unsigned int class) {
    struct kmem_cache *cache = __atomic_load_n(&kmalloc_caches[class], __ATOMIC_ACQUIRE), *expected = NULL;
    if (likely(cache))
        return cache;
    char name[32];
    snprintf(name, sizeof name, "kmalloc-%u", sizes[class]);
    cache = kmem_cache_create(name, sizes[class], is_power_of_2(sizes[class]) ? sizes[class] : 0, 0, NULL);
    if (__atomic_compare_exchange_n(&kmalloc_caches[class], &expected, cache, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return cache;
    kmem_cache_destroy(cache);
    return expected;
}

static bool is_kmalloc(const struct kmem_cache *cache) { return strncmp(cache->name, "kmalloc-", 8) == 0; }

void *__kmalloc_node(size_t size, gfp_t gfp, int node) {
    if (size == 0)
        return ZERO_SIZE_PTR;
    if (size <= KMALLOC_MAX_CACHE_SIZE) {
        struct kmem_cache *cache = kmalloc_cache(class_of(size));
        return cache ? kmem_cache_alloc_node(cache, gfp, node) : NULL;
    }
    if (WARN_ONCE(size > KMALLOC_MAX_SIZE && !(gfp & __GFP_NOWARN), "kmalloc of %zu bytes", size) || size > KMALLOC_MAX_SIZE)
        return NULL;
    unsigned int order = (unsigned int)order_of(size);
    struct slab *slab = new_slab(NULL, order, (unsigned int)(PAGE_SIZE << order), 1, gfp, node);
    if (!slab)
        return NULL;
    __atomic_fetch_add(&n_large, 1, __ATOMIC_RELAXED);
    return slab->base;
}

void kfree(const void *object) {
    if (!ZERO_OR_NULL_PTR(object))
        free_object(__func__, NULL, object);
}

size_t ksize(const void *object) {
    if (ZERO_OR_NULL_PTR(object))
        return 0;
    struct slab *slab = slab_of(object);
    return WARN(!slab || object_at(slab, object) < 0, "ksize of %p, which is no object", object) ? 0 : slab->stride;
}

size_t kmalloc_size_roundup(size_t size) {
    if (size == 0 || size > KMALLOC_MAX_SIZE)
        return size;
    return size <= KMALLOC_MAX_CACHE_SIZE ? sizes[class_of(size)] : PAGE_SIZE << order_of(size);
}

void kfree_sensitive(const void *object) {
    size_t size = ksize(object);
    if (size > 0)
        memzero_explicit((void *)object, size);
    kfree(object);
}

void *krealloc(const void *object, size_t size, gfp_t gfp) {
    if (size == 0) {
        kfree(object);
        return ZERO_SIZE_PTR;
    }
    size_t had = ksize(object);
    if (had >= size)
        return (void *)object;
    void *larger = kmalloc(size, gfp);
    if (larger && had > 0) {
        memcpy(larger, object, had);
        kfree(object);
    }
    return larger;
}

void *kvmalloc_node(size_t size, gfp_t gfp, int node) {
    void *object = NULL;
    if (size <= KMALLOC_MAX_SIZE)
        object = __kmalloc_node(size, size > PAGE_SIZE ? gfp | __GFP_NORETRY | __GFP_NOWARN : gfp, node);
    return object || size <= PAGE_SIZE ? object : __vmalloc_node(size, 1, gfp, node, NULL);
}

void kvfree(const void *object) {
    if (is_vmalloc_addr(object))
        vfree(object);
    else
        kfree(object);
}

char *kstrndup(const char *text, size_t most, gfp_t gfp) {
    size_t length = text ? strnlen(text, most) : 0;
    char *copy = text ? kmalloc(length + 1, gfp) : NULL;
    if (copy) {
        memcpy(copy, text, length);
        copy[length] = 0;
    }
    return copy;
}

char *kstrdup(const char *text, gfp_t gfp) { return kstrndup(text, SIZE_MAX, gfp); }

void *kmemdup(const void *bytes, size_t size, gfp_t gfp) {
    void *copy = kmalloc(size, gfp);
    return copy ? memcpy(copy, bytes, size) : NULL;
}

unsigned int pagemill_linux_caches(void) {
    struct kmem_cache *cache;
    unsigned int n = 0;
    list_for_each_entry(cache, &caches, link) n += !is_kmalloc(cache);
    return n;
}

size_t pagemill_linux_slabs_left(void (*say)(const char *format, ...)) {
    struct kmem_cache *cache;
    struct slab *slab;
    size_t pages = 0;
    rcu_barrier();
    list_for_each_entry(cache, &caches, link) {
        kmem_cache_shrink(cache);
        if (cache->n_out > 0)
            say("%lu objects of %s are not freed", cache->n_out, cache->name);
        else if (!is_kmalloc(cache))
            say("the cache %s is not destroyed", cache->name);
        list_for_each_entry(slab, &cache->full, link) pages += 1UL << slab->order;
        list_for_each_entry(slab, &cache->partial, link) pages += 1UL << slab->order;
    }
    rcu_barrier();
    if (n_large > 0)
        say("%lu objects of kmalloc above %lu bytes are not freed", n_large, KMALLOC_MAX_CACHE_SIZE);
    return pages;
}
