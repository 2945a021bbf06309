/* Pools of pages that circulate: where pages come from and go to, counts, misuse, other threads, the end with pages out. */
#include "check.h"
#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGES 1024

static int reports;

static void on_misuse(const struct pagemill_misuse *report) {
    CHECK(report->error >= 300 && report->error < 400);
    reports++;
}

static struct pagemill_page_pool_statistics statistics_of(struct pagemill_page_pool *pool) {
    struct pagemill_page_pool_statistics statistics;
    OK(pagemill_page_pool_stats(pool, &statistics));
    return statistics;
}

/* A page by way of the cache, of the ring, and out of the pool for good. */
static void the_ways_of_a_page(void) {
    struct pagemill_allocator *allocator = allocator_of(PAGES);
    struct pagemill_page_pool *pool, *other;
    void *page, *again;
    size_t out;
    OK(pagemill_page_pool_create(allocator, NULL, &pool));
    CHECK(stat_of(allocator, "allocated") == 0);
    OK(pagemill_page_pool_alloc(pool, PAGEMILL_GFP_KERNEL, &page));
    CHECK((uintptr_t)page % PAGEMILL_PAGE_SIZE == 0 && stat_of(allocator, "allocated") == 64);
    memset(page, 7, PAGEMILL_PAGE_SIZE);
    OK(pagemill_page_pool_put(pool, page, PAGEMILL_PAGE_POOL_DIRECT));
    OK(pagemill_page_pool_alloc(pool, PAGEMILL_GFP_NOWAIT, &again));
    CHECK(again == page && *(char *)again == 7); /* As its last owner left it. */
    OK(pagemill_page_pool_put(pool, page, PAGEMILL_PAGE_POOL_DIRECT));
    OK(pagemill_page_pool_alloc(pool, PAGEMILL_GFP_NOWAIT | PAGEMILL_GFP_ZERO, &again));
    CHECK(again == page && *(char *)again == 0);
    OK(pagemill_page_pool_put(pool, page, 0));
    struct pagemill_page_pool_statistics seen = statistics_of(pool);
    CHECK(seen.slow == 1 && seen.empty == 1 && seen.fast == 2 && seen.cached == 2 && seen.ring == 1);
    CHECK(seen.in_flight == 0 && seen.refill == 0 && seen.has_ended == 0 && seen.age_s == 0 && seen.slow_high_order == 0);

    /* What comes back is checked. The pool's pages are refused elsewhere, and others' by the pool. */
    char mine;
    struct pagemill_list *list = pagemill_list_create();
    struct pagemill_mempool *mempool;
    OK(pagemill_mempool_create_pages(allocator, 0, 1, &mempool));
    OK(pagemill_page_pool_create(allocator, NULL, &other));
    OK(pagemill_page_pool_alloc(pool, PAGEMILL_GFP_NOWAIT, &page));
    reports = 0;
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_free_page(page));
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_free_pages(page, 1));
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_list_push(list, page, 0));
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_mempool_free(mempool, page));
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_page_pool_put_fragment(pool, page));
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_page_pool_put(other, page, 0));
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_page_pool_release_page(other, page));
    EXPECT(PAGEMILL_ERROR_UNALIGNED, pagemill_page_pool_put(pool, (char *)page + 64, 0));
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_page_pool_put(pool, NULL, 0));
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_page_pool_put(pool, &mine, 0));
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_page_pool_put_fragment(pool, &mine));
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_page_pool_put_fragment(pool, NULL));
    CHECK(reports == 12);
    OK(pagemill_page_pool_put(pool, page, 0));
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_page_pool_put(pool, page, 0));
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_page_pool_put(pool, page, PAGEMILL_PAGE_POOL_DIRECT));
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_page_pool_release_page(pool, page));
    void *ordinary = pagemill_alloc_page(allocator, PAGEMILL_GFP_KERNEL);
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_page_pool_put(pool, ordinary, 0));
    OK(pagemill_free_page(ordinary));
    EXPECT(PAGEMILL_ERROR_INVALID, pagemill_page_pool_put(pool, page, 2));
    EXPECT(PAGEMILL_ERROR_FLAGS, pagemill_page_pool_alloc(pool, 0x80000000, &page));
    CHECK(page == NULL && statistics_of(pool).in_flight == 0 && statistics_of(other).in_flight == 0);

    /* For good: an ordinary page from then on. */
    OK(pagemill_page_pool_alloc(pool, PAGEMILL_GFP_NOWAIT, &page));
    CHECK(statistics_of(pool).in_flight == 1);
    OK(pagemill_page_pool_release_page(pool, page));
    CHECK(statistics_of(pool).in_flight == 0);
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_page_pool_put(pool, page, 0));
    OK(pagemill_free_page(page));

    OK(pagemill_page_pool_destroy(pool, &out));
    CHECK(out == 0);
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_page_pool_destroy(pool, NULL));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_page_pool_alloc(pool, PAGEMILL_GFP_NOWAIT, &page));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_page_pool_put(pool, ordinary, 0));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_page_pool_put_fragment(pool, ordinary));
    OK(pagemill_page_pool_destroy(other, NULL));
    OK(pagemill_mempool_destroy(mempool, NULL));
    OK(pagemill_list_destroy(list));
    close_whole(allocator, PAGES);
}

/* Pages in bulk, with the addresses that a device has for them. */
static void bulk(void) {
    struct pagemill_allocator *allocator = allocator_of(PAGES);
    struct pagemill_device_options identity;
    struct pagemill_device *device;
    struct pagemill_page_pool *pool;
    void *slots[300] = {NULL}, *page;
    uint64_t addresses[300] = {0};
    char mine;
    size_t n;
    memset(&identity, 0, sizeof identity);
    identity.size = sizeof identity;
    OK(pagemill_device_create(allocator, &identity, &device));
    OK(pagemill_page_pool_create(allocator, NULL, &pool));
    slots[3] = &mine;
    OK(pagemill_page_pool_alloc_bulk(pool, PAGEMILL_GFP_KERNEL, slots, 200, &n));
    CHECK(n == 199 && slots[3] == &mine && slots[199] != NULL && slots[200] == NULL);
    slots[3] = NULL;
    addresses[3] = 3;
    OK(pagemill_device_addresses(device, slots, addresses, 300));
    for (int at = 0; at < 200; at++) {
        if (at == 3)
            continue;
        CHECK(addresses[at] == (uint64_t)(uintptr_t)slots[at]);
        memset(slots[at], at, PAGEMILL_PAGE_SIZE);
    }
    CHECK(addresses[3] == 3 && addresses[200] == 0);
    slots[3] = &mine;
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_device_addresses(device, slots, addresses, 300));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_device_addresses(device, slots, NULL, 1));
    EXPECT(PAGEMILL_ERROR_COUNT, pagemill_device_addresses(device, slots, addresses, -1));
    for (int at = 0; at < 200; at++)
        CHECK(at == 3 || *(unsigned char *)slots[at] == at);
    CHECK(statistics_of(pool).in_flight == 199);

    /* To the cache, and what it has no room for to the ring. A page that stands there twice is refused once. */
    slots[250] = slots[0];
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_page_pool_put_bulk(pool, slots, 300, PAGEMILL_PAGE_POOL_DIRECT, &n));
    CHECK(n == 199 && slots[3] == &mine && slots[250] != NULL && slots[0] == NULL);
    struct pagemill_page_pool_statistics seen = statistics_of(pool);
    CHECK(seen.in_flight == 0 && seen.cached + seen.ring == 199 && seen.cached <= 128 && seen.cache_full == seen.ring);
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_page_pool_put(pool, slots[250], 0));
    slots[3] = slots[250] = NULL;

    /* All there are; then none. */
    void *all[PAGES] = {NULL};
    OK(pagemill_page_pool_alloc_bulk(pool, PAGEMILL_GFP_NOWAIT, all, PAGES, &n));
    CHECK(n == PAGES);
    OK(pagemill_page_pool_alloc_bulk(pool, PAGEMILL_GFP_NOWAIT, all, PAGES, &n));
    CHECK(n == 0);
    EXPECT(PAGEMILL_ERROR_EXHAUSTED, pagemill_page_pool_alloc_bulk(pool, PAGEMILL_GFP_NOWAIT, slots, 10, &n));
    CHECK(n == 0);
    EXPECT(PAGEMILL_ERROR_EXHAUSTED, pagemill_page_pool_alloc(pool, PAGEMILL_GFP_NOWAIT, &page));
    CHECK(page == NULL);
    EXPECT(PAGEMILL_ERROR_COUNT, pagemill_page_pool_alloc_bulk(pool, PAGEMILL_GFP_NOWAIT, slots, -1, &n));
    EXPECT(PAGEMILL_ERROR_COUNT, pagemill_page_pool_put_bulk(pool, slots, INT64_MIN, 0, &n));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_page_pool_put_bulk(pool, NULL, 1, 0, &n));
    OK(pagemill_page_pool_put_bulk(pool, NULL, 0, 0, &n));
    /* By the ring; then the rest is asked for in vain, and what came is kept. */
    OK(pagemill_page_pool_put_bulk(pool, all, 100, 0, &n));
    CHECK(n == 100 && all[99] == NULL && all[100] != NULL);
    OK(pagemill_page_pool_alloc_bulk(pool, PAGEMILL_GFP_NOWAIT, slots, 150, &n));
    CHECK(n == 100 && slots[99] != NULL && slots[100] == NULL && statistics_of(pool).refill >= 2);
    OK(pagemill_page_pool_put_bulk(pool, slots, 300, 0, NULL));
    OK(pagemill_page_pool_put_bulk(pool, all, PAGES, 0, &n));
    CHECK(n == PAGES - 100 && statistics_of(pool).ring_full == 0);
    OK(pagemill_page_pool_destroy(pool, NULL));
    OK(pagemill_device_release(device));
    close_whole(allocator, PAGES);
}

/* Blocks, a small ring, a node, a name; what cannot be. */
static void options_of_pools(void) {
    struct pagemill_allocator *allocator = allocator_of(PAGES);
    struct pagemill_page_pool_options options;
    struct pagemill_page_pool *pool;
    void *slots[8] = {NULL};
    memset(&options, 0, sizeof options);
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_page_pool_create(allocator, &options, &pool));
    options.size = sizeof options;
    options.ring = 32769;
    EXPECT(PAGEMILL_ERROR_SIZE, pagemill_page_pool_create(allocator, &options, &pool));
    options.ring = 4;
    options.order = 19;
    EXPECT(PAGEMILL_ERROR_ORDER, pagemill_page_pool_create(allocator, &options, &pool));
    options.order = 2;
    options.flags = 2;
    EXPECT(PAGEMILL_ERROR_INVALID, pagemill_page_pool_create(allocator, &options, &pool));
    options.flags = PAGEMILL_PAGE_POOL_NODE;
    options.node = 1000;
    EXPECT(PAGEMILL_ERROR_NODE, pagemill_page_pool_create(allocator, &options, &pool));
    options.node = 0;
    options.name = "eth0, queue 3";
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_page_pool_create(NULL, &options, &pool));
    CHECK(pool == NULL);
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_page_pool_create(allocator, &options, NULL));
    OK(pagemill_page_pool_create(allocator, &options, &pool));
    OK(pagemill_page_pool_alloc_bulk(pool, PAGEMILL_GFP_KERNEL, slots, 8, NULL));
    for (int at = 0; at < 8; at++)
        memset(slots[at], at, 4 * PAGEMILL_PAGE_SIZE);
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_free_pages(slots[0], 2));
    EXPECT(PAGEMILL_ERROR_INSIDE, pagemill_page_pool_put(pool, (char *)slots[0] + PAGEMILL_PAGE_SIZE, 0));
    void *block = slots[7];
    OK(pagemill_page_pool_release_page(pool, block));
    slots[7] = NULL;
    EXPECT(PAGEMILL_ERROR_WRONG_ORDER, pagemill_free_page(block));
    OK(pagemill_free_pages(block, 2));
    OK(pagemill_page_pool_put_bulk(pool, slots, 8, 0, NULL));
    struct pagemill_page_pool_statistics seen = statistics_of(pool);
    CHECK(seen.slow_high_order == 1 && seen.ring == 4 && seen.ring_full == 3 && seen.in_flight == 0 && seen.waive == 0);
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_page_pool_stats(pool, NULL));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_page_pool_alloc(pool, 0, NULL));
    OK(pagemill_page_pool_destroy(pool, NULL));
    close_whole(allocator, PAGES);
}

static void *returns_a_fragment(void *arg) {
    void **both = (void **)arg;
    struct pagemill_page_pool *pool = (struct pagemill_page_pool *)both[0];
    OK(pagemill_page_pool_put_fragment(pool, both[1]));
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_page_pool_put_fragment(pool, both[1]));
    return NULL;
}

static void fragments(void) {
    struct pagemill_allocator *allocator = allocator_of(PAGES);
    struct pagemill_page_pool *pool;
    void *parts[3], *last;
    size_t out;
    OK(pagemill_page_pool_create(allocator, NULL, &pool));
    EXPECT(PAGEMILL_ERROR_SIZE, pagemill_page_pool_alloc_fragment(pool, PAGEMILL_GFP_KERNEL, 0, &last));
    EXPECT(PAGEMILL_ERROR_SIZE, pagemill_page_pool_alloc_fragment(pool, PAGEMILL_GFP_KERNEL, 4097, &last));
    CHECK(last == NULL);
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_page_pool_alloc_fragment(pool, PAGEMILL_GFP_KERNEL, 64, NULL));
    for (int at = 0; at < 3; at++) {
        OK(pagemill_page_pool_alloc_fragment(pool, PAGEMILL_GFP_KERNEL, 1000, parts + at));
        memset(parts[at], at, 1000);
    }
    CHECK((char *)parts[1] - (char *)parts[0] == 1024 && (char *)parts[2] - (char *)parts[0] == 2048);
    CHECK(statistics_of(pool).in_flight == 1); /* All are of one page. */
    OK(pagemill_page_pool_alloc_fragment(pool, PAGEMILL_GFP_KERNEL, 2000, &last));
    CHECK(statistics_of(pool).in_flight == 2 && statistics_of(pool).released_refcnt == 1);
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_page_pool_put(pool, parts[0], 0));
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_free_page(parts[0]));
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_page_pool_put_fragment(pool, (char *)parts[0] + 64));
    for (int at = 0; at < 3; at++)
        CHECK(*(char *)parts[at] == at && *((char *)parts[at] + 999) == at);
    for (int at = 0; at < 3; at++) {
        void *both[2] = {pool, parts[at]};
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, returns_a_fragment, both) == 0 && pthread_join(thread, NULL) == 0);
    }
    CHECK(statistics_of(pool).in_flight == 1 && statistics_of(pool).ring == 1);
    EXPECT(PAGEMILL_ERROR_IN_USE, pagemill_page_pool_destroy(pool, &out));
    CHECK(out == 1);
    OK(pagemill_page_pool_put_fragment(pool, last));
    OK(pagemill_page_pool_destroy(pool, &out));
    close_whole(allocator, PAGES);
}

/* The consumer hands pages to a thread, which returns them singly and in bulk. */
#define ROUNDS 3000
static struct pagemill_page_pool *shared;
static void *boxes[64];

static void *returns_pages(void *arg) {
    void *slots[8] = {NULL};
    int got = 0;
    (void)arg;
    while (got < ROUNDS) {
        void *page = __atomic_exchange_n(&boxes[got % 64], NULL, __ATOMIC_ACQ_REL);
        if (!page) {
            sched_yield();
            continue;
        }
        CHECK(*(int *)page == got);
        got++;
        if (got % 3 == 0) {
            OK(pagemill_page_pool_put(shared, page, 0));
        } else {
            slots[got % 8] = page;
        }
        if (got % 8 == 7)
            OK(pagemill_page_pool_put_bulk(shared, slots, 8, 0, NULL));
    }
    OK(pagemill_page_pool_put_bulk(shared, slots, 8, 0, NULL));
    return NULL;
}

static void threads(void) {
    struct pagemill_allocator *allocator = allocator_of(PAGES);
    pthread_t thread;
    OK(pagemill_page_pool_create(allocator, NULL, &shared));
    CHECK(pthread_create(&thread, NULL, returns_pages, NULL) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        void *page, *none = NULL;
        OK(pagemill_page_pool_alloc(shared, PAGEMILL_GFP_KERNEL, &page));
        *(int *)page = round;
        while (!__atomic_compare_exchange_n(&boxes[round % 64], &none, page, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
            none = NULL;
            sched_yield();
        }
    }
    CHECK(pthread_join(thread, NULL) == 0);
    struct pagemill_page_pool_statistics seen = statistics_of(shared);
    CHECK(seen.in_flight == 0 && seen.ring + seen.ring_full == ROUNDS && seen.fast > 0 && seen.fast < ROUNDS);
    OK(pagemill_page_pool_destroy(shared, NULL));
    close_whole(allocator, PAGES);
}

static void *returns_the_last(void *arg) {
    void **pages = (void **)arg;
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_page_pool_put(shared, &pages, 0));
    OK(pagemill_page_pool_put_bulk(shared, pages, 3, 0, NULL));
    return NULL;
}

/* A pool that ends with pages out takes them back, and ends with the last. */
static void the_end(void) {
    struct pagemill_allocator *allocator = allocator_of(PAGES);
    void *pages[4] = {NULL}, *none;
    size_t out;
    pthread_t thread;
    OK(pagemill_page_pool_create(allocator, NULL, &shared));
    OK(pagemill_page_pool_alloc_bulk(shared, PAGEMILL_GFP_KERNEL, pages, 4, NULL));
    EXPECT(PAGEMILL_ERROR_IN_USE, pagemill_page_pool_destroy(shared, &out));
    CHECK(out == 4);
    struct pagemill_census census;
    OK(pagemill_validate(allocator, &census));
    CHECK(census.handed_out == 4); /* What it had in its cache is back. */
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_page_pool_alloc(shared, PAGEMILL_GFP_KERNEL, &none));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_page_pool_alloc_bulk(shared, PAGEMILL_GFP_KERNEL, &none, 1, NULL));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_page_pool_alloc_fragment(shared, PAGEMILL_GFP_KERNEL, 64, &none));
    CHECK(statistics_of(shared).in_flight == 4 && statistics_of(shared).has_ended == 1 && statistics_of(shared).slow == 1);
    OK(pagemill_page_pool_put(shared, pages[3], PAGEMILL_PAGE_POOL_DIRECT));
    EXPECT(PAGEMILL_ERROR_IN_USE, pagemill_page_pool_destroy(shared, &out));
    CHECK(out == 3);
    CHECK(pthread_create(&thread, NULL, returns_the_last, pages) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(statistics_of(shared).in_flight == 0);
    OK(pagemill_page_pool_destroy(shared, &out));
    CHECK(out == 0);
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_page_pool_stats(shared, NULL));
    close_whole(allocator, PAGES);
}

/* A child goes on with its copy. */
static void after_fork(void) {
    struct pagemill_allocator *allocator = allocator_of(PAGES);
    struct pagemill_page_pool *pool;
    void *page, *other;
    OK(pagemill_page_pool_create(allocator, NULL, &pool));
    OK(pagemill_page_pool_alloc(pool, PAGEMILL_GFP_KERNEL, &page));
    *(char *)page = 1;
    pid_t child = fork();
    if (child == 0) {
        OK(pagemill_page_pool_alloc(pool, PAGEMILL_GFP_KERNEL, &other));
        *(char *)page = *(char *)other = 2;
        OK(pagemill_page_pool_put(pool, page, 0));
        EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_page_pool_put(pool, page, 0));
        OK(pagemill_page_pool_put(pool, other, PAGEMILL_PAGE_POOL_DIRECT));
        OK(pagemill_page_pool_destroy(pool, NULL));
        close_whole(allocator, PAGES);
        _exit(0);
    }
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(*(char *)page == 1);
    OK(pagemill_page_pool_put(pool, page, 0));
    OK(pagemill_page_pool_destroy(pool, NULL));
    close_whole(allocator, PAGES);
}

int main(void) {
    pagemill_on_misuse(on_misuse);
    the_ways_of_a_page();
    bulk();
    options_of_pools();
    fragments();
    threads();
    the_end();
    after_fork();
    return 0;
}
