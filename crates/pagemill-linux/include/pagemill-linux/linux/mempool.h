/* Pools with a reserve. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * A request that may wait always succeeds, as long as other owners free theirs: requests for as many elements as the reserve has, or
 * fewer. One for more is warned of once and refused. What a pool of pages hands out may be freed by `mempool_free` alone: while a page is
 * in the reserve it has no references, and a second free is refused. No function here may be called from a signal handler. */
#ifndef PAGEMILL_LINUX_MEMPOOL_H
#define PAGEMILL_LINUX_MEMPOOL_H

#include <linux/gfp.h>

typedef void *(mempool_alloc_t)(gfp_t gfp, void *pool_data);
typedef void(mempool_free_t)(void *element, void *pool_data);
/* Up to `n` pages: into the null slots among the array's first n, or to the function. The array is null, or the function. */
typedef unsigned int(mempool_alloc_pages_bulk_t)(gfp_t gfp, unsigned int n, void *pool_data, struct page **array,
                                                 void (*cb)(struct page *page, void *data), void *data);

/* Set by `mempool_init` and the like; it must not move until `mempool_exit`. */
typedef struct mempool {
    int min_nr;
    void *pool_data;
    mempool_alloc_t *alloc;
    mempool_free_t *free;
    mempool_alloc_pages_bulk_t *alloc_pages_bulk;
    struct pagemill_mempool *reserve;
} mempool_t;

static inline bool mempool_initialized(const mempool_t *pool) {
    return pool->reserve != NULL;
}

/* Returns 0, -ENOMEM if `alloc` makes too few elements for the reserve, or -EINVAL. */
int mempool_init(mempool_t *pool, int min_nr, mempool_alloc_t *alloc, mempool_free_t *free, void *pool_data);
/* A pool of pages that come from a function in bulk. */
int mempool_init_pages_bulk(mempool_t *pool, int min_nr, mempool_alloc_pages_bulk_t *alloc, mempool_free_t *free,
                            void *pool_data);
/* Frees the reserve. Elements that are out are warned of with their number. */
void mempool_exit(mempool_t *pool);

mempool_t *mempool_create(int min_nr, mempool_alloc_t *alloc, mempool_free_t *free, void *pool_data);
mempool_t *mempool_create_pages_bulk(int min_nr, mempool_alloc_pages_bulk_t *alloc, mempool_free_t *free, void *pool_data);
void mempool_destroy(mempool_t *pool);
#define mempool_init_node(pool, min_nr, alloc, free, data, gfp, nid) mempool_init(pool, min_nr, alloc, free, data)
#define mempool_create_node(min_nr, alloc, free, data, gfp, nid) mempool_create(min_nr, alloc, free, data)

/* Returns 0, -ENOMEM, or -EINVAL for a size below 1 or below that of a request that waits. */
int mempool_resize(mempool_t *pool, int min_nr);

void *mempool_alloc(mempool_t *pool, gfp_t gfp);
/* From the reserve alone, without waiting. */
void *mempool_alloc_preallocated(mempool_t *pool);
void mempool_free(void *element, mempool_t *pool);

/* As many pages as there are null slots among the first n, or n for the function: in bulk without waiting; what is missing from the
 * reserve, whole or not at all; both again with reclaim; then it sleeps. Returns whether it got all of them: always, if it may wait.
 * Pages that came stay in the array, or with the function. */
bool mempool_alloc_pages_bulk_array(mempool_t *pool, gfp_t gfp, unsigned int n, struct page **array);
bool mempool_alloc_pages_bulk_cb(mempool_t *pool, gfp_t gfp, unsigned int n, void (*cb)(struct page *page, void *data),
                                 void *data);

/* Fills the null slots among the first n; waits. `allocated` is how many are not null. Returns 0, or -EINVAL for more than the reserve has. */
int mempool_alloc_bulk(mempool_t *pool, void **elements, unsigned int n, unsigned int allocated);
/* Puts elements into the reserve, from the first on, and empties their slots. Returns how many: the rest is the caller's to free. */
unsigned int mempool_free_bulk(mempool_t *pool, void **elements, unsigned int n);

/* Blocks of 2^pool_data pages. Such a pool refuses blocks of another order. */
void *mempool_alloc_pages(gfp_t gfp, void *pool_data);
void mempool_free_pages(void *element, void *pool_data);
#define mempool_init_page_pool(pool, min_nr, order) \
    mempool_init(pool, min_nr, mempool_alloc_pages, mempool_free_pages, (void *)(long)(order))
#define mempool_create_page_pool(min_nr, order) \
    mempool_create(min_nr, mempool_alloc_pages, mempool_free_pages, (void *)(long)(order))

/* Objects of kmalloc, of pool_data bytes, and of a cache. */
void *mempool_kmalloc(gfp_t gfp, void *pool_data);
void mempool_kfree(void *element, void *pool_data);
void *mempool_alloc_slab(gfp_t gfp, void *pool_data);
void mempool_free_slab(void *element, void *pool_data);
#define mempool_init_kmalloc_pool(pool, min_nr, size) \
    mempool_init(pool, min_nr, mempool_kmalloc, mempool_kfree, (void *)(size_t)(size))
#define mempool_create_kmalloc_pool(min_nr, size) \
    mempool_create(min_nr, mempool_kmalloc, mempool_kfree, (void *)(size_t)(size))
#define mempool_init_slab_pool(pool, min_nr, cache) mempool_init(pool, min_nr, mempool_alloc_slab, mempool_free_slab, cache)
#define mempool_create_slab_pool(min_nr, cache) mempool_create(min_nr, mempool_alloc_slab, mempool_free_slab, cache)

#endif
