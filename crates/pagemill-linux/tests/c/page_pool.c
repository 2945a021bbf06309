/* Pages that circulate: the cache, the ring, parts, references of others, figures, the end with pages out. */
#include "check.h"
#include <linux/dma-mapping.h>
#include <linux/err.h>
#include <net/page_pool/helpers.h>
#include <pthread.h>

#define N 128

static int reports;

static void note(const struct pagemill_misuse *report) {
    (void)report;
    reports++;
}

static struct page_pool *pool_of(unsigned int order, unsigned int size) {
    struct page_pool_params params;
    memset(&params, 0, sizeof params);
    params.flags = PP_FLAG_DMA_MAP;
    params.order = order;
    params.pool_size = size;
    params.nid = NUMA_NO_NODE;
    params.dma_dir = DMA_FROM_DEVICE;
    struct page_pool *pool = page_pool_create(&params);
    CHECK(!IS_ERR(pool));
    return pool;
}

static struct page_pool_stats figures(const struct page_pool *pool) {
    struct page_pool_stats stats;
    memset(&stats, 0, sizeof stats);
    CHECK(page_pool_get_stats(pool, &stats));
    return stats;
}

static struct page_pool *shared;

static void *put_from_elsewhere(void *page) {
    page_pool_put_full_page(shared, page, false);
    return NULL;
}

static void pages_circulate(void) {
    static struct page *pages[N];
    struct page_pool *pool = pool_of(0, 64);
    for (int at = 0; at < N; at++) {
        pages[at] = page_pool_dev_alloc_pages(pool);
        CHECK(pages[at] && page_count(pages[at]) == 1 && pages[at]->pp == pool);
        CHECK(page_pool_get_dma_addr(pages[at]) == pagemill_linux_dma_address(page_address(pages[at])));
    }
    CHECK(page_pool_inflight(pool, true) == N && page_pool_get_dma_dir(pool) == DMA_FROM_DEVICE);
    CHECK(figures(pool).alloc_stats.slow == 2 && figures(pool).alloc_stats.fast == N - 2);

    for (int at = 0; at < 10; at++)
        page_pool_recycle_direct(pool, pages[at]);
    CHECK(figures(pool).recycle_stats.cached == 10 && page_pool_dev_alloc_pages(pool) == pages[9]);
    shared = pool;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, put_from_elsewhere, pages[9]) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(figures(pool).recycle_stats.ring == 1);

    /* What was returned, is no page of the pool, or is still the pool's, is refused. */
    CHECK(reports == 0);
    page_pool_put_full_page(pool, pages[9], false);
    page_pool_put_full_page(pool, NULL, true);
    __free_page(pages[9]);
    CHECK(reports == 3);
    __free_page(pages[20]);
    CHECK(reports == 4 && page_count(pages[20]) == 1);
    struct page *ordinary = alloc_page(GFP_KERNEL);
    page_pool_put_full_page(pool, ordinary, false);
    CHECK(reports == 5 && page_count(ordinary) == 1);
    __free_page(ordinary);

    /* A page that somebody else holds leaves the pool. */
    get_page(pages[20]);
    page_pool_put_full_page(pool, pages[20], false);
    CHECK(page_count(pages[20]) == 1 && !pages[20]->pp && figures(pool).recycle_stats.released_refcnt == 1);
    put_page(pages[20]);
    CHECK(page_count(pages[20]) == 0);

    netmem_ref memory[90];
    for (int at = 0; at < 90; at++)
        memory[at] = page_to_netmem(pages[30 + at]);
    page_pool_put_netmem_bulk(memory, 90);
    CHECK(page_pool_inflight(pool, true) == N - 10 - 1 - 90 && figures(pool).recycle_stats.ring_full > 0);

    /* It ends with its last page. */
    page_pool_nid_changed(pool, 0);
    page_pool_destroy(pool);
    for (int at = 10; at < N; at++)
        if (at < 20 || (at > 20 && at < 30) || at >= 120)
            page_pool_put_full_page(pool, pages[at], at % 2);
    CHECK(reports == 5);
    settled(0);
}

static void parts_of_pages(void) {
    struct page_pool *pool = pool_of(1, 0);
    unsigned int offset, offset_of_next, size = 3000;
    struct page *page = page_pool_dev_alloc_frag(pool, &offset, 1000);
    CHECK(page && offset == 0 && PageHead(page) && compound_order(page) == 1);
    CHECK(page_pool_dev_alloc(pool, &offset_of_next, &size) == page && offset_of_next == 1024);
    CHECK(page_pool_alloc_frag(pool, &offset, 4000, GFP_KERNEL) == page && offset == 4032);
    struct page *next = page_pool_alloc_frag(pool, &offset, 4000, GFP_KERNEL);
    CHECK(next && next != page && offset == 0);
    page_pool_put_full_page(pool, page, true);
    page_pool_put_full_page(pool, page, true);
    CHECK(page_count(page) == 1 && page_pool_inflight(pool, true) == 2);
    page_pool_put_full_page(pool, page, true);
    CHECK(page_count(page) == 0 && page_pool_inflight(pool, true) == 1 && !PageCompound(page));
    page_pool_put_full_page(pool, next, true);

    page = page_pool_dev_alloc_pages(pool);
    page_pool_fragment_page(page, 3);
    page_pool_ref_page(page);
    CHECK(page_pool_unref_page(page, 3) == 1);
    page_pool_put_page(pool, page, 100, false);
    CHECK(page_count(page) == 0 && !page_pool_alloc_frag(pool, &offset, 8193, GFP_KERNEL)); /* Warned of. */
    page_pool_destroy(pool);
    page_pool_destroy(NULL);
    settled(0);
}

static void what_goes_back_too_often(void) {
    struct page_pool *pool = pool_of(0, 0), *other = pool_of(0, 0);
    unsigned int offset;
    struct page *page = page_pool_alloc_frag(pool, &offset, 1000, GFP_KERNEL);
    CHECK(page && page_pool_alloc_frag(pool, &offset, 1000, GFP_KERNEL) == page);
    page_pool_put_full_page(pool, page, false);
    page_pool_put_full_page(pool, page, false);
    /* The pool itself cuts further parts: it has the last one. */
    int before = reports;
    page_pool_put_full_page(pool, page, false);
    page_pool_put_unrefed_page(pool, page, -1U, false);
    netmem_ref memory = page_to_netmem(page);
    page_pool_put_netmem_bulk(&memory, 1);
    CHECK(reports == before + 3 && page_count(page) == 1 && page_pool_inflight(pool, true) == 1);
    pagemill_linux_page_pool_release(pool, page);
    CHECK(page->pp == pool && page_pool_alloc_frag(pool, &offset, 1000, GFP_KERNEL) == page && offset == 2048);
    page_pool_put_full_page(pool, page, false);

    /* Nobody has a part of these: what is not this pool's stays as it is. */
    struct page *ordinary = alloc_page(GFP_KERNEL), *others = page_pool_dev_alloc_pages(other);
    before = reports;
    page_pool_put_unrefed_page(pool, ordinary, -1U, false);
    page_pool_put_unrefed_page(pool, others, -1U, false);
    CHECK(reports == before + 2 && page_count(ordinary) == 1 && page_count(others) == 1 && others->pp == other);
    __free_page(ordinary);
    CHECK(page_pool_unref_page(others, 1) == 0);
    page_pool_put_unrefed_page(other, others, -1U, false);
    page_pool_destroy(other);
    page_pool_destroy(pool);
    settled(0);
}

int main(void) {
    use_pages(2048);
    pagemill_on_misuse(note);
    pages_circulate();
    parts_of_pages();
    what_goes_back_too_often();
    struct page_pool_params params;
    memset(&params, 0, sizeof params);
    params.pool_size = 40000;
    CHECK(page_pool_create(&params) == ERR_PTR(-E2BIG));
    params.pool_size = 0;
    params.order = 40;
    CHECK(page_pool_create(&params) == ERR_PTR(-EINVAL));
    return 0;
}
