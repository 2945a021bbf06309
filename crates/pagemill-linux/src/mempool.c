/* Pools with a reserve, over `pagemill_mempool`, which has the reserve, the queue of those who wait, and the numbers.
 *
 * An element of a pool of pages is a `struct page`. In the reserve it has no references, and the flag PG_mempool: so it cannot
 * be freed there, and cannot enter the reserve twice. */
#include "internal.h"
#include <limits.h>
#include <linux/mempool.h>
#include <linux/slab.h>
#include <stdlib.h>

/* While this thread asks for the reserve alone, the source has nothing. */
static _Thread_local bool is_reserve_only;
/* While this thread frees in bulk, what the reserve does not take is kept here. */
static _Thread_local struct kept {
    void **elements;
    unsigned int n;
} *kept;

static bool has_pages(const mempool_t *pool) {
    return pool->alloc == mempool_alloc_pages || pool->alloc_pages_bulk;
}

static void into_pool(const mempool_t *pool, void *element) {
    struct page *page = element;
    if (has_pages(pool)) {
        __atomic_fetch_or(&page->flags, 1UL << PG_mempool, __ATOMIC_ACQ_REL);
        set_page_count(page, 0);
    }
}

static void *out_of_pool(const mempool_t *pool, void *element) {
    struct page *page = element;
    if (has_pages(pool)) {
        set_page_count(page, 1);
        __atomic_fetch_and(&page->flags, ~(1UL << PG_mempool), __ATOMIC_ACQ_REL);
    }
    return element;
}

/* Neither waits nor reclaims, nor takes the allocator's reserve. */
static gfp_t without_waiting(gfp_t gfp) {
    return (gfp & ~(__GFP_DIRECT_RECLAIM | __GFP_IO | __GFP_FS | __GFP_HIGH | __GFP_NOFAIL)) | __GFP_NOMEMALLOC |
           __GFP_NORETRY | __GFP_NOWARN;
}

static gfp_t with_reclaim(gfp_t gfp) {
    return (gfp & ~__GFP_NOFAIL) | __GFP_NOMEMALLOC | __GFP_NORETRY | __GFP_NOWARN;
}

/* The source of `pagemill_mempool`. */
static void *make(uint32_t flags, void *user) {
    mempool_t *pool = user;
    gfp_t gfp = (flags & __GFP_DIRECT_RECLAIM) ? flags | __GFP_KSWAPD_RECLAIM : flags;
    void *element = NULL;
    if (is_reserve_only)
        return NULL;
    if (pool->alloc_pages_bulk)
        pool->alloc_pages_bulk(gfp, 1, pool->pool_data, (struct page **)&element, NULL, NULL);
    else
        element = pool->alloc(gfp, pool->pool_data);
    if (element)
        into_pool(pool, element);
    return element;
}

static void end(void *element, void *user) {
    mempool_t *pool = user;
    out_of_pool(pool, element);
    if (kept)
        kept->elements[kept->n++] = element;
    else
        pool->free(element, pool->pool_data);
}

static int number_of(enum pagemill_error error) {
    return error == PAGEMILL_ERROR_NONE ? 0 : error < PAGEMILL_ERROR_ARGUMENT ? -ENOMEM : -EINVAL;
}

static int init(mempool_t *pool, int min_nr, mempool_alloc_t *alloc, mempool_alloc_pages_bulk_t *bulk, mempool_free_t *free,
                void *pool_data) {
    *pool = (mempool_t){min_nr, pool_data, alloc, free, bulk, NULL};
    if (WARN_ON_ONCE(min_nr <= 0 || !free || (!alloc && !bulk)))
        return -EINVAL;
    return number_of(pagemill_mempool_create(make, end, pool, (size_t)min_nr, &pool->reserve));
}

int mempool_init(mempool_t *pool, int min_nr, mempool_alloc_t *alloc, mempool_free_t *free, void *pool_data) {
    return init(pool, min_nr, alloc, NULL, free, pool_data);
}

int mempool_init_pages_bulk(mempool_t *pool, int min_nr, mempool_alloc_pages_bulk_t *alloc, mempool_free_t *free,
                            void *pool_data) {
    return init(pool, min_nr, NULL, alloc, free, pool_data);
}

static mempool_t *create(int min_nr, mempool_alloc_t *alloc, mempool_alloc_pages_bulk_t *bulk, mempool_free_t *ends,
                         void *pool_data) {
    mempool_t *pool = malloc(sizeof *pool);
    if (pool && init(pool, min_nr, alloc, bulk, ends, pool_data) != 0) {
        free(pool);
        return NULL;
    }
    return pool;
}

mempool_t *mempool_create(int min_nr, mempool_alloc_t *alloc, mempool_free_t *free, void *pool_data) {
    return create(min_nr, alloc, NULL, free, pool_data);
}

mempool_t *mempool_create_pages_bulk(int min_nr, mempool_alloc_pages_bulk_t *alloc, mempool_free_t *free, void *pool_data) {
    return create(min_nr, NULL, alloc, free, pool_data);
}

void mempool_exit(mempool_t *pool) {
    struct pagemill_mempool_statistics statistics;
    if (!pool->reserve)
        return;
    if (pagemill_mempool_stats(pool->reserve, &statistics) == PAGEMILL_ERROR_NONE)
        WARN(statistics.out > 0, "%zu elements are handed out", statistics.out);
    pagemill_mempool_release(pool->reserve);
    pool->reserve = NULL;
}

void mempool_destroy(mempool_t *pool) {
    if (!pool)
        return;
    mempool_exit(pool);
    free(pool);
}

int mempool_resize(mempool_t *pool, int min_nr) {
    int error = min_nr <= 0 ? -EINVAL : number_of(pagemill_mempool_resize(pool->reserve, (size_t)min_nr));
    if (error == 0)
        pool->min_nr = min_nr;
    return error;
}

void *mempool_alloc(mempool_t *pool, gfp_t gfp) {
    void *element;
    enum pagemill_error error = pagemill_mempool_alloc(pool->reserve, pagemill_linux_flags(gfp), &element);
    WARN_ONCE(error >= PAGEMILL_ERROR_ARGUMENT, "a request is refused: %s", pagemill_strerror(error));
    return element ? out_of_pool(pool, element) : NULL;
}

void *mempool_alloc_preallocated(mempool_t *pool) {
    is_reserve_only = true;
    void *element = mempool_alloc(pool, GFP_NOWAIT);
    is_reserve_only = false;
    return element;
}

/* Where the elements of a bulk request go. */
struct delivery {
    mempool_t *pool;
    unsigned int missing;
    void **array;
    unsigned int at;
    void (*cb)(struct page *page, void *data);
    void *data;
};

static void place(struct delivery *to, void *element) {
    /* A function may bring more than it was asked for. */
    to->missing -= to->missing > 0;
    if (!to->array) {
        to->cb(element, to->data);
        return;
    }
    while (to->array[to->at])
        to->at++;
    to->array[to->at++] = element;
}

static void place_page(struct page *page, void *data) {
    place(data, page);
}

static void take_out(void *element, void *user) {
    struct delivery *to = user;
    place(to, out_of_pool(to->pool, element));
}

static bool count_holes(struct delivery *to, unsigned int n) {
    to->missing = n;
    for (unsigned int at = 0; to->array && n <= INT_MAX && at < n; at++)
        to->missing -= to->array[at] != NULL;
    /* A reserve that is full does not have so many: the request could wait for ever. */
    return !WARN_ONCE(to->missing > (unsigned int)to->pool->min_nr, "a request for %u elements of a reserve of %d is refused",
                      to->missing, to->pool->min_nr);
}

/* By way of the pool: its source, its reserve, and sleep, as the flags allow. */
static bool take(struct delivery *to, gfp_t gfp) {
    struct pagemill_bulk request = pagemill_bulk_exact(to->missing, pagemill_linux_flags(gfp));
    if (to->missing == 0)
        return true;
    enum pagemill_error error = pagemill_mempool_alloc_bulk_callback(to->pool->reserve, &request, take_out, to, NULL);
    WARN_ONCE(error >= PAGEMILL_ERROR_ARGUMENT, "a request is refused: %s", pagemill_strerror(error));
    return error == PAGEMILL_ERROR_NONE;
}

static bool bulk(mempool_t *pool, gfp_t gfp, unsigned int n, struct page **array, void (*cb)(struct page *page, void *data),
                 void *data) {
    struct delivery to = {pool, 0, (void **)array, 0, cb, data};
    if (!count_holes(&to, n))
        return false;
    gfp_t tries[] = {without_waiting(gfp), with_reclaim(gfp)};
    for (int at = 0; pool->alloc_pages_bulk && to.missing > 0 && at < ((gfp & __GFP_DIRECT_RECLAIM) ? 2 : 1); at++) {
        if (array)
            pool->alloc_pages_bulk(tries[at], n, pool->pool_data, array, NULL, NULL);
        else
            pool->alloc_pages_bulk(tries[at], to.missing, pool->pool_data, NULL, place_page, &to);
        count_holes(&to, array ? n : to.missing);
        is_reserve_only = true;
        bool is_full = take(&to, GFP_NOWAIT);
        is_reserve_only = false;
        if (is_full)
            return true;
    }
    return take(&to, gfp);
}

bool mempool_alloc_pages_bulk_array(mempool_t *pool, gfp_t gfp, unsigned int n, struct page **array) {
    return bulk(pool, gfp, n, array, NULL, NULL);
}

bool mempool_alloc_pages_bulk_cb(mempool_t *pool, gfp_t gfp, unsigned int n, void (*cb)(struct page *page, void *data),
                                 void *data) {
    return bulk(pool, gfp, n, NULL, cb, data);
}

int mempool_alloc_bulk(mempool_t *pool, void **elements, unsigned int n, unsigned int allocated) {
    (void)allocated;
    struct delivery to = {pool, 0, elements, 0, NULL, NULL};
    return count_holes(&to, n) && take(&to, GFP_KERNEL) ? 0 : -EINVAL;
}

/* Takes an element back from its owner, or says why not. */
static bool claim(const char *function, mempool_t *pool, void *element) {
    struct page *page = element;
    if (!has_pages(pool))
        return true;
    if (!pagemill_linux_claim(function, page))
        return false;
    if (pool->alloc == mempool_alloc_pages && page->compound_order != (unsigned int)(long)pool->pool_data) {
        out_of_pool(pool, page);
        pagemill_linux_report(page);
        pagemill_linux_refused(function, page, PAGEMILL_ERROR_WRONG_ORDER);
        return false;
    }
    return true;
}

void mempool_free(void *element, mempool_t *pool) {
    if (element && claim(__func__, pool, element))
        pagemill_mempool_free(pool->reserve, element);
}

unsigned int mempool_free_bulk(mempool_t *pool, void **elements, unsigned int n) {
    unsigned int own = 0;
    while (own < n && elements[own] && claim(__func__, pool, elements[own]))
        own++;
    void *first[64], **rest = own <= 64 ? first : malloc(own * sizeof *rest);
    if (!rest)
        abort();
    struct kept here = {rest, 0};
    kept = &here;
    pagemill_mempool_free_bulk(pool->reserve, elements, own, NULL);
    kept = NULL;
    memcpy(elements + own - here.n, rest, here.n * sizeof *rest);
    if (rest != first)
        free(rest);
    return own - here.n;
}

void *mempool_alloc_pages(gfp_t gfp, void *pool_data) {
    return alloc_pages(gfp, (unsigned int)(long)pool_data);
}

void mempool_free_pages(void *element, void *pool_data) {
    __free_pages(element, (unsigned int)(long)pool_data);
}

void *mempool_kmalloc(gfp_t gfp, void *pool_data) {
    return kmalloc((size_t)pool_data, gfp);
}

void mempool_kfree(void *element, void *pool_data) {
    (void)pool_data;
    kfree(element);
}

void *mempool_alloc_slab(gfp_t gfp, void *pool_data) {
    return kmem_cache_alloc(pool_data, gfp);
}

void mempool_free_slab(void *element, void *pool_data) {
    kmem_cache_free(pool_data, element);
}
