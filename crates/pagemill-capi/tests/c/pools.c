/* Pools with a reserve, and shrinkers: who gets pages when memory is short. */
#include "check.h"
#include <pthread.h>

#define RESERVE 16

static int reports;

static void note(const struct pagemill_misuse *report) {
    (void)report;
    reports++;
}

static struct pagemill_mempool_statistics statistics_of(struct pagemill_mempool *pool) {
    struct pagemill_mempool_statistics statistics;
    OK(pagemill_mempool_stats(pool, &statistics));
    return statistics;
}

struct vector {
    void *elements[RESERVE];
    size_t n;
};

static void add(void *element, void *user) {
    struct vector *vector = (struct vector *)user;
    vector->elements[vector->n++] = element;
}

/* The allocator has nothing left, and the pool serves from its reserve. */
static void a_pool_under_pressure(uint32_t order) {
    size_t pages = 1024;
    struct pagemill_allocator *allocator = allocator_of(pages);
    struct pagemill_mempool *pool;
    OK(pagemill_mempool_create_pages(allocator, order, RESERVE, &pool));
    struct pagemill_list *rest = pagemill_list_create();
    struct pagemill_bulk all = pagemill_bulk_up_to((int64_t)pages, PAGEMILL_GFP_NOWAIT);
    struct pagemill_delivered delivered;
    do {
        /* The list of another CPU, where this thread was before, may have pages. */
        pagemill_drain(allocator);
        OK(pagemill_alloc_pages_bulk_list(allocator, &all, rest, &delivered));
    } while (delivered.blocks > 0);

    void *slots[RESERVE] = {NULL};
    char mine;
    size_t n;
    slots[3] = &mine;
    struct pagemill_bulk request = pagemill_bulk_exact(RESERVE, PAGEMILL_GFP_NOIO | PAGEMILL_GFP_ZERO);
    OK(pagemill_mempool_alloc_bulk_array(pool, &request, slots, &n));
    CHECK(n == RESERVE - 1 && slots[3] == &mine && *(char *)slots[0] == 0);
    CHECK(statistics_of(pool).reserve == 1 && statistics_of(pool).out == RESERVE - 1 && statistics_of(pool).from_reserve == RESERVE - 1);
    OK(pagemill_mempool_alloc(pool, PAGEMILL_GFP_NOWAIT, slots + 3));
    void *none;
    EXPECT(PAGEMILL_ERROR_EXHAUSTED, pagemill_mempool_alloc(pool, PAGEMILL_GFP_NOWAIT, &none));
    CHECK(none == NULL);
    request = pagemill_bulk_exact(1, PAGEMILL_GFP_NOIO);
    request.timeout_ns = 1000 * 1000;
    EXPECT(PAGEMILL_ERROR_TIMED_OUT, pagemill_mempool_alloc_bulk_array(pool, &request, &none, NULL));
    request = pagemill_bulk_exact(RESERVE + 1, PAGEMILL_GFP_NOIO);
    struct vector vector = {{NULL}, 0};
    EXPECT(PAGEMILL_ERROR_ABOVE_RESERVE, pagemill_mempool_alloc_bulk_callback(pool, &request, add, &vector, &n));
    CHECK(n == 0 && vector.n == 0);
    request = pagemill_bulk_exact(-1, PAGEMILL_GFP_NOIO);
    EXPECT(PAGEMILL_ERROR_COUNT, pagemill_mempool_alloc_bulk_callback(pool, &request, add, &vector, &n));

    /* What comes back is checked, also when the reserve would take it. */
    void *block = slots[0];
    OK(pagemill_mempool_free(pool, block));
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_mempool_free(pool, block));
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_free_pages(block, order)); /* The reserve has it. */
    pagemill_on_misuse(note);
    int before = reports;
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_mempool_free(pool, &mine));
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_mempool_free(pool, NULL));
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_mempool_free(pool, block));
    CHECK(reports == before + 3);
    pagemill_on_misuse(NULL);
    CHECK(statistics_of(pool).reserve == 1);
    EXPECT(PAGEMILL_ERROR_IN_USE, pagemill_mempool_destroy(pool, &n));
    CHECK(n == RESERVE - 1);
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_mempool_free_bulk(pool, slots, RESERVE, &n));
    CHECK(n == RESERVE - 1 && slots[0] == block && slots[1] == NULL);
    CHECK(statistics_of(pool).reserve == RESERVE && statistics_of(pool).out == 0);

    request = pagemill_bulk_exact(RESERVE, PAGEMILL_GFP_NOIO);
    OK(pagemill_mempool_alloc_bulk_callback(pool, &request, add, &vector, &n));
    CHECK(n == RESERVE && vector.n == RESERVE);
    OK(pagemill_mempool_free_bulk(pool, vector.elements, RESERVE, &n));
    CHECK(n == RESERVE);
    OK(pagemill_list_destroy(rest));
    EXPECT(PAGEMILL_ERROR_RESERVE, pagemill_mempool_resize(pool, 0));
    OK(pagemill_mempool_resize(pool, 2 * RESERVE));
    CHECK(statistics_of(pool).min_nr == 2 * RESERVE && statistics_of(pool).misused == 0);
    OK(pagemill_mempool_destroy(pool, &n));
    CHECK(n == 0);
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_mempool_destroy(pool, NULL));
    EXPECT(PAGEMILL_ERROR_TOO_MANY, pagemill_mempool_create_pages(allocator, 18, 1, &pool));
    CHECK(pool == NULL);
    close_whole(allocator, pages);
}

struct store {
    size_t made, ended, limit;
};

static void *make(uint32_t gfp, void *user) {
    struct store *store = (struct store *)user;
    (void)gfp;
    if (store->made - store->ended == store->limit)
        return NULL;
    store->made++;
    return malloc(100);
}

static void end(void *element, void *user) {
    ((struct store *)user)->ended++;
    free(element);
}

static void a_pool_of_functions(void) {
    struct store store = {0, 0, 3};
    struct pagemill_mempool *pool;
    EXPECT(PAGEMILL_ERROR_EXHAUSTED, pagemill_mempool_create(make, end, &store, 4, &pool));
    CHECK(pool == NULL && store.made == 3 && store.ended == 3);
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_mempool_create(make, NULL, &store, 2, &pool));
    store.limit = 4;
    OK(pagemill_mempool_create(make, end, &store, 4, &pool));
    void *elements[4] = {NULL};
    struct pagemill_bulk request = pagemill_bulk_exact(4, PAGEMILL_GFP_NOWAIT);
    OK(pagemill_mempool_alloc_bulk_array(pool, &request, elements, NULL));
    for (int at = 0; at < 4; at++)
        memset(elements[at], 1, 100);
    OK(pagemill_mempool_free(pool, elements[0]));
    elements[0] = NULL;
    OK(pagemill_mempool_free_bulk(pool, elements, 4, NULL));
    OK(pagemill_mempool_release(pool));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_mempool_release(pool));
    CHECK(store.made == store.ended);
}

/* A cache that gives pages back when somebody needs them. */
struct cache {
    pthread_mutex_t lock;
    struct pagemill_list *pages;
    size_t calls;
};

static size_t shrink(size_t pages, uint32_t gfp, void *user) {
    struct cache *cache = (struct cache *)user;
    size_t freed = 0;
    (void)gfp;
    if (pthread_mutex_trylock(&cache->lock) != 0)
        return 0;
    cache->calls++;
    for (; freed < pages; freed++) {
        void *page = pagemill_list_pop(cache->pages);
        if (!page)
            break;
        OK(pagemill_free_page(page));
    }
    pthread_mutex_unlock(&cache->lock);
    return freed;
}

/* A page, also of the list of another CPU, where this thread was before. */
static void *page_without_waiting(struct pagemill_allocator *allocator) {
    void *page = pagemill_alloc_page(allocator, PAGEMILL_GFP_NOWAIT);
    if (page == NULL) {
        pagemill_drain(allocator);
        page = pagemill_alloc_page(allocator, PAGEMILL_GFP_NOWAIT);
    }
    return page;
}

static void a_shrinker(void) {
    struct pagemill_options options;
    struct pagemill_memory memory;
    struct pagemill_allocator *allocator;
    memset(&options, 0, sizeof options);
    memset(&memory, 0, sizeof memory);
    options.size = sizeof options;
    options.memory = &memory;
    memory.size = sizeof memory;
    memory.pages = 512;
    memory.min = 40;
    memory.low = 50;
    memory.high = 60;
    OK(pagemill_allocator_create(&options, &allocator));
    struct cache cache = {PTHREAD_MUTEX_INITIALIZER, pagemill_list_create(), 0};
    struct pagemill_shrinker *shrinker, *writer;
    EXPECT(PAGEMILL_ERROR_INVALID, pagemill_shrinker_register(allocator, shrink, &cache, 77, &shrinker));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_shrinker_register(allocator, NULL, &cache, 0, &shrinker));
    OK(pagemill_shrinker_register(allocator, shrink, &cache, PAGEMILL_SHRINKER_FREES, &shrinker));
    CHECK(pagemill_reclaim_step(allocator) == 0); /* Nothing is short. */

    /* Down to the lowest mark: who may not wait gets nothing more, who may wait gets the cache's. */
    void *page;
    while ((page = page_without_waiting(allocator)) != NULL)
        OK(pagemill_list_push(cache.pages, page, 0));
    CHECK(cache.calls == 0 && pagemill_list_length(cache.pages) == 512 - 40);
    page = pagemill_alloc_page(allocator, PAGEMILL_GFP_KERNEL);
    CHECK(page != NULL && cache.calls > 0);
    OK(pagemill_list_push(cache.pages, page, 0));

    /* One that does I/O is not called for who does I/O. */
    OK(pagemill_shrinker_unregister(shrinker));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_shrinker_unregister(shrinker));
    OK(pagemill_shrinker_register(allocator, shrink, &cache, PAGEMILL_SHRINKER_IO, &writer));
    while ((page = page_without_waiting(allocator)) != NULL)
        OK(pagemill_list_push(cache.pages, page, 0));
    cache.calls = 0;
    EXPECT(PAGEMILL_ERROR_BELOW_MARK, pagemill_alloc_pages(allocator, PAGEMILL_GFP_NOIO | PAGEMILL_GFP_NORETRY, 0, &page));
    CHECK(cache.calls == 0);
    CHECK(pagemill_reclaim_step(allocator) >= 20 && cache.calls > 0);
    pagemill_drain(allocator);
    CHECK(stat_of(allocator, "free") >= 60);
    OK(pagemill_shrinker_unregister(writer));
    OK(pagemill_list_destroy(cache.pages));
    close_whole(allocator, 512);
}

int main(void) {
    a_pool_under_pressure(0);
    a_pool_under_pressure(1);
    a_pool_of_functions();
    a_shrinker();
    return 0;
}
