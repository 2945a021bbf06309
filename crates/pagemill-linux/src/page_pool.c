/* Pages that circulate, over `pagemill_page_pool`, which has the cache, the ring and the figures.
 *
 * A page that is out has one reference, `pp` says its pool, and `pp_ref_count` how many parts of it are out. In the pool it has neither
 * references nor parts, so it cannot come back twice. */
#include "internal.h"
#include <linux/dma-mapping.h>
#include <linux/err.h>
#include <net/page_pool/helpers.h>
#include <stdlib.h>

struct page_pool {
    struct pagemill_page_pool *pages;
    struct page_pool_params params;
    /* The page that parts are cut from, of which the pool itself holds one, and how far it is cut. */
    struct page *cut;
    unsigned int cut_to;
    /* Pages that left because somebody held a reference. */
    u64 held;
    bool has_ended, is_closed;
    /* Pages that are out, and one until the pool ends. With the last of them the pool is gone. */
    long out;
};

struct page_pool *page_pool_create(const struct page_pool_params *params) {
    struct pagemill_page_pool_options options;
    struct page_pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return ERR_PTR(-ENOMEM);
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.order = params->order;
    options.ring = params->pool_size;
    if (params->nid != NUMA_NO_NODE) {
        options.flags = PAGEMILL_PAGE_POOL_NODE;
        options.node = (uint32_t)params->nid;
    }
    pool->params = *params;
    pool->out = 1;
    enum pagemill_error error = pagemill_page_pool_create(pagemill_linux_allocator(), &options, &pool->pages);
    if (error == PAGEMILL_ERROR_NONE)
        return pool;
    free(pool);
    return ERR_PTR(error == PAGEMILL_ERROR_SIZE ? -E2BIG : error < PAGEMILL_ERROR_ARGUMENT ? -ENOMEM : -EINVAL);
}

struct page *page_pool_alloc_pages(struct page_pool *pool, gfp_t gfp) {
    void *block;
    enum pagemill_error error = pagemill_page_pool_alloc(pool->pages, pagemill_linux_flags(gfp), &block);
    WARN_ONCE(error >= PAGEMILL_ERROR_ARGUMENT, "a request is refused: %s", pagemill_strerror(error));
    struct page *page = block ? pagemill_linux_hand_out(block, pool->params.order, gfp | __GFP_COMP) : NULL;
    if (!page)
        return NULL;
    __atomic_fetch_add(&pool->out, 1, __ATOMIC_RELAXED);
    page->pp = pool;
    page->pp_ref_count.counter = 1;
    if (pool->params.flags & PP_FLAG_DMA_MAP)
        page->dma_addr = pagemill_linux_dma_address(block);
    return page;
}

/* No more parts are cut from a page: the pool's own part goes as any other. */
static void end_cut(struct page_pool *pool) {
    struct page *page = pool->cut;
    __atomic_store_n(&pool->cut, NULL, __ATOMIC_RELEASE);
    if (page)
        page_pool_put_page(pool, page, -1U, true);
}

struct page *page_pool_alloc_frag(struct page_pool *pool, unsigned int *offset, unsigned int size, gfp_t gfp) {
    unsigned int whole = (unsigned int)PAGE_SIZE << pool->params.order;
    if (WARN_ON_ONCE(size > whole))
        return NULL;
    if (pool->cut && size > whole - pool->cut_to)
        end_cut(pool);
    if (!pool->cut) {
        pool->cut = page_pool_alloc_pages(pool, gfp);
        pool->cut_to = 0;
        if (!pool->cut)
            return NULL;
    }
    page_pool_ref_page(pool->cut);
    *offset = pool->cut_to;
    /* Parts begin at a multiple of a cache line's size. */
    pool->cut_to = (pool->cut_to + size + 63) / 64 * 64;
    pool->cut_to = pool->cut_to < whole ? pool->cut_to : whole;
    return pool->cut;
}

static void refuse(const char *function, struct page *page) {
    pagemill_linux_report(page);
    pagemill_linux_refused(function, page, PAGEMILL_ERROR_MISUSE);
}

/* The pool of a page that is out, `pool` if that is not null. Null if there is none. */
static struct page_pool *pool_of(struct page_pool *pool, const struct page *page) {
    if (!pagemill_linux_is_page(page) || page_ref_count(page) <= 0)
        return NULL;
    struct page_pool *own = READ_ONCE(page->pp);
    return !pool || own == pool ? own : NULL;
}

/* Drops the caller's part of a page. Returns how many are left, or -1 if the caller can have none: then it is refused. */
static long drop_part(const char *function, const struct page_pool *pool, struct page *page) {
    long parts = pool ? __atomic_load_n(&page->pp_ref_count.counter, __ATOMIC_ACQUIRE) : 0;
    /* Of the page that parts are cut from, the last one is the pool's. */
    while (parts > 0 && (parts > 1 || READ_ONCE(pool->cut) != page))
        if (__atomic_compare_exchange_n(&page->pp_ref_count.counter, &parts, parts - 1, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE))
            return parts - 1;
    refuse(function, page);
    return -1;
}

static void came_back(struct page_pool *pool, long n) {
    if (__atomic_sub_fetch(&pool->out, n, __ATOMIC_ACQ_REL) > 0)
        return;
    if (!pool->is_closed)
        pagemill_page_pool_destroy(pool->pages, NULL);
    free(pool);
}

/* The last part of a page went. */
static void recycle(const char *function, struct page_pool *pool, struct page *page, bool is_consumer) {
    int one = 1;
    if (!__atomic_compare_exchange_n(&page->_refcount.counter, &one, 0, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        /* Somebody else holds it. */
        __atomic_fetch_add(&pool->held, 1, __ATOMIC_RELAXED);
        pagemill_linux_page_pool_release(pool, page);
        put_page(page);
        return;
    }
    pagemill_linux_take_back(page);
    uint32_t flags = is_consumer && !pool->has_ended ? PAGEMILL_PAGE_POOL_DIRECT : 0;
    enum pagemill_error error = pagemill_page_pool_put(pool->pages, page_address(page), flags);
    if (error != PAGEMILL_ERROR_NONE)
        pagemill_linux_refused(function, page, error);
    else
        came_back(pool, 1);
}

void page_pool_put_unrefed_page(struct page_pool *pool, struct page *page, unsigned int dma_sync_size, bool allow_direct) {
    (void)dma_sync_size;
    if (pool_of(pool, page) && page->pp_ref_count.counter <= 1 && READ_ONCE(pool->cut) != page)
        recycle(__func__, pool, page, allow_direct);
    else
        refuse(__func__, page);
}

void page_pool_put_page(struct page_pool *pool, struct page *page, unsigned int dma_sync_size, bool allow_direct) {
    (void)dma_sync_size;
    if (drop_part(__func__, pool_of(pool, page), page) == 0)
        recycle(__func__, pool, page, allow_direct);
}

void pagemill_linux_page_pool_put_bulk(struct page_pool *pool, struct page **pages, int n) {
    for (int at = 0; at < n;) {
        void *blocks[64];
        int64_t put = 0;
        struct page_pool *own = NULL;
        for (; at < n && put < 64; at++) {
            struct page *page = pages[at];
            struct page_pool *is = pool_of(pool, page);
            if (own && is && is != own)
                break;
            if (drop_part(__func__, is, page) != 0)
                continue;
            own = is;
            if (page_ref_count(page) != 1) {
                recycle(__func__, own, page, false);
                continue;
            }
            set_page_count(page, 0);
            pagemill_linux_take_back(page);
            blocks[put++] = page_address(page);
        }
        if (put == 0)
            continue;
        size_t count;
        enum pagemill_error error = pagemill_page_pool_put_bulk(own->pages, blocks, put, 0, &count);
        for (int64_t block = 0; error != PAGEMILL_ERROR_NONE && block < put; block++)
            if (blocks[block])
                pagemill_linux_refused(__func__, virt_to_page(blocks[block]), error);
        came_back(own, (long)count);
    }
}

void pagemill_linux_page_pool_release(struct page_pool *pool, struct page *page) {
    enum pagemill_error error = PAGEMILL_ERROR_MISUSE;
    if (READ_ONCE(pool->cut) != page)
        error = pagemill_page_pool_release_page(pool->pages, page_address(page));
    if (error != PAGEMILL_ERROR_NONE) {
        pagemill_linux_refused(__func__, page, error);
        return;
    }
    page->pp = NULL;
    page->private = 0;
    came_back(pool, 1);
}

void page_pool_destroy(struct page_pool *pool) {
    if (!pool)
        return;
    end_cut(pool);
    __atomic_store_n(&pool->has_ended, true, __ATOMIC_RELEASE);
    pool->is_closed = pagemill_page_pool_destroy(pool->pages, NULL) == PAGEMILL_ERROR_NONE;
    came_back(pool, 1);
}

void page_pool_update_nid(struct page_pool *pool, int nid) {
    pool->params.nid = nid;
}

bool page_pool_get_stats(const struct page_pool *pool, struct page_pool_stats *stats) {
    struct pagemill_page_pool_statistics is;
    if (!stats || pagemill_page_pool_stats(pool->pages, &is) != PAGEMILL_ERROR_NONE)
        return false;
    stats->alloc_stats.fast += is.fast;
    stats->alloc_stats.slow += is.slow;
    stats->alloc_stats.slow_high_order += is.slow_high_order;
    stats->alloc_stats.empty += is.empty;
    stats->alloc_stats.refill += is.refill;
    stats->alloc_stats.waive += is.waive;
    stats->recycle_stats.cached += is.cached;
    stats->recycle_stats.cache_full += is.cache_full;
    stats->recycle_stats.ring += is.ring;
    stats->recycle_stats.ring_full += is.ring_full;
    stats->recycle_stats.released_refcnt += is.released_refcnt + __atomic_load_n(&pool->held, __ATOMIC_RELAXED);
    return true;
}

int page_pool_inflight(const struct page_pool *pool, bool strict) {
    struct pagemill_page_pool_statistics is;
    (void)strict;
    return pagemill_page_pool_stats(pool->pages, &is) == PAGEMILL_ERROR_NONE ? (int)is.in_flight : 0;
}

dma_addr_t page_pool_get_dma_addr(const struct page *page) {
    return page->dma_addr;
}

enum dma_data_direction page_pool_get_dma_dir(const struct page_pool *pool) {
    return pool->params.dma_dir;
}
