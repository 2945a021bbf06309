/* Pools: the reserve, the caller's bulk function and its flags, what comes back, pressure. */
#include "check.h"
#include <linux/mempool.h>
#include <pthread.h>

#define RESERVE 16
#define PAGES 1024

/* The allocator has nothing left. */
static void take_all(struct list_head *rest) {
    INIT_LIST_HEAD(rest);
    do
        /* The list of another CPU, where this thread was before, may have pages. */
        pagemill_drain(pagemill_linux_allocator());
    while (alloc_pages_bulk_list(GFP_NOWAIT, PAGES, rest) > 0);
}

static int reports;

static void note(const struct pagemill_misuse *report) {
    (void)report;
    reports++;
}

static int calls;
static gfp_t asked[4];

static unsigned int from_allocator(gfp_t gfp, unsigned int n, void *pool_data, struct page **array,
                                   void (*cb)(struct page *page, void *data), void *data) {
    CHECK(*(int *)pool_data == 7);
    if (calls < 4)
        asked[calls] = gfp;
    calls++;
    return (unsigned int)(array ? alloc_pages_bulk_array(gfp, n, array) : alloc_pages_bulk_cb(gfp, n, cb, data));
}

static void to_allocator(void *element, void *pool_data) {
    CHECK(*(int *)pool_data == 7);
    __free_page(element);
}

struct vector {
    unsigned int n;
    struct page *pages[2 * RESERVE];
};

static void add(struct page *page, void *data) {
    struct vector *vector = data;
    vector->pages[vector->n++] = page;
}

static void pages_in_bulk_by_the_callers_function(void) {
    int seven = 7;
    LIST_HEAD(rest);
    mempool_t pool;
    CHECK(mempool_init_pages_bulk(&pool, RESERVE, from_allocator, to_allocator, &seven) == 0);
    CHECK(calls == RESERVE && mempool_initialized(&pool)); /* One by one. */
    settled(RESERVE);

    /* One call, and no more, where there is memory. */
    struct page *array[2 * RESERVE] = {NULL};
    array[3] = (struct page *)array;
    calls = 0;
    CHECK(mempool_alloc_pages_bulk_array(&pool, GFP_NOIO, RESERVE, array) && calls == 1);
    CHECK(!(asked[0] & (__GFP_DIRECT_RECLAIM | __GFP_HIGH)));
    for (int at = 0; at < 2 * RESERVE; at++)
        CHECK(at < RESERVE ? array[at] != NULL : !array[at]);
    CHECK(array[3] == (struct page *)array && mempool_alloc_pages_bulk_array(&pool, GFP_NOIO, RESERVE, array) && calls == 1);
    array[3] = NULL;
    release_pages(array, RESERVE); /* Back to the allocator: the reserve is whole, and the pages are not its own. */

    /* Without memory: the function without waiting; the reserve. */
    take_all(&rest);
    calls = 0;
    struct vector vector = {0, {NULL}};
    CHECK(mempool_alloc_pages_bulk_cb(&pool, GFP_NOWAIT, 10, add, &vector) && vector.n == 10 && calls == 1);
    /* The rest of the reserve is too little: whole or not at all. */
    CHECK(!mempool_alloc_pages_bulk_cb(&pool, GFP_NOWAIT, 7, add, &vector) && vector.n == 10);
    CHECK(mempool_alloc_pages_bulk_cb(&pool, GFP_NOIO, 6, add, &vector) && vector.n == 16);
    CHECK(!mempool_alloc(&pool, GFP_NOWAIT) && !mempool_alloc_preallocated(&pool));
    CHECK(!mempool_alloc_pages_bulk_cb(&pool, GFP_NOIO, RESERVE + 1, add, &vector) && vector.n == 16); /* Warned of. */

    /* With reclaim, if the flags allow it, after the first try. */
    mempool_free(vector.pages[0], &pool);
    mempool_free(vector.pages[0], &pool); /* Refused. */
    __free_page(vector.pages[0]);         /* Refused: the reserve has it. */
    get_page(vector.pages[1]);
    mempool_free(vector.pages[1], &pool); /* Refused: somebody else holds it. */
    put_page(vector.pages[1]);
    CHECK(page_count(vector.pages[1]) == 1 && reports == 3);
    CHECK(mempool_alloc_preallocated(&pool) == vector.pages[0]);

    /* What is above the reserve is the caller's. */
    vector.n = 16;
    struct page *more = list_first_entry(&rest, struct page, lru);
    list_del(&more->lru);
    vector.pages[vector.n++] = more;
    CHECK(mempool_free_bulk(&pool, (void **)vector.pages, vector.n) == RESERVE);
    for (int at = 0; at < RESERVE; at++)
        CHECK(!vector.pages[at]);
    CHECK(vector.pages[RESERVE] == more && page_count(more) == 1);
    CHECK(mempool_free_bulk(&pool, (void **)vector.pages + RESERVE, 1) == 0);
    __free_page(more);
    free_pages_bulk(&rest);

    CHECK(mempool_resize(&pool, 2 * RESERVE) == 0 && pool.min_nr == 2 * RESERVE);
    settled(2 * RESERVE);
    CHECK(mempool_resize(&pool, 0) == -EINVAL && mempool_resize(&pool, PAGES + 1) == -ENOMEM);
    CHECK(mempool_resize(&pool, 1) == 0);
    settled(1);
    mempool_exit(&pool);
    CHECK(!mempool_initialized(&pool));
    mempool_exit(&pool);
    settled(0);
}

static void *free_later(void *argument) {
    void **both = argument;
    mempool_free(both[0], both[1]);
    return NULL;
}

static void a_request_waits_until_an_element_comes_back(void) {
    LIST_HEAD(rest);
    mempool_t *pool = mempool_create_page_pool(2, 1);
    CHECK(pool);
    take_all(&rest);
    void *elements[3] = {NULL};
    CHECK(mempool_alloc_bulk(pool, elements, 2, 0) == 0 && elements[0] && elements[1]);
    CHECK(mempool_alloc_bulk(pool, elements, 2, 2) == 0);
    void *both[2] = {elements[0], pool};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, free_later, both) == 0);
    void *again = mempool_alloc(pool, GFP_NOIO);
    CHECK(again == elements[0] && pthread_join(thread, NULL) == 0);
    mempool_free(again, pool);
    mempool_free(elements[1], pool);
    mempool_free(NULL, pool);
    free_pages_bulk(&rest);
    CHECK(mempool_alloc_bulk(pool, elements, 3, 2) == 0); /* One is missing, and it is there. */
    __free_pages(elements[2], 1);
    mempool_destroy(pool); /* Warned of: one element went past it. */
    mempool_destroy(NULL);
    settled(0);
    CHECK(!mempool_create_page_pool(PAGES + 1, 0));
    settled(0);
}

struct source {
    int made, ended;
};

static void *make(gfp_t gfp, void *pool_data) {
    struct source *source = pool_data;
    (void)gfp;
    return source->made - source->ended < 4 ? (source->made++, malloc(100)) : NULL;
}

static void end(void *element, void *pool_data) {
    ((struct source *)pool_data)->ended++;
    free(element);
}

static void elements_of_any_functions(void) {
    struct source source = {0, 0};
    CHECK(!mempool_create(5, make, end, &source) && source.made == 4 && source.ended == 4);
    mempool_t *pool = mempool_create(3, make, end, &source);
    CHECK(pool && source.made == 7);
    void *elements[4];
    for (int at = 0; at < 4; at++)
        CHECK((elements[at] = mempool_alloc(pool, GFP_NOWAIT)) != NULL);
    CHECK(!mempool_alloc(pool, GFP_NOWAIT));
    CHECK(mempool_free_bulk(pool, elements, 4) == 3 && !elements[0] && !elements[2] && elements[3] && source.ended == 4);
    end(elements[3], &source);
    mempool_destroy(pool);
    CHECK(source.made == source.ended);
    pool = mempool_create_kmalloc_pool(2, 1000);
    CHECK(pool);
    void *element = mempool_alloc(pool, GFP_KERNEL);
    memset(element, 1, 1000);
    mempool_free(element, pool);
    mempool_destroy(pool);
}

/* Brings more pages than it is asked for, and says that there were none. */
static unsigned int bring_more(gfp_t gfp, unsigned int n, void *pool_data, struct page **array,
                               void (*cb)(struct page *page, void *data), void *data) {
    (void)pool_data;
    for (unsigned int at = 0; array && at < n; at++)
        array[at] = array[at] ? array[at] : alloc_page(gfp);
    for (unsigned int at = 0; !array && at < n + 2; at++)
        cb(alloc_page(gfp), data);
    return 0;
}

static void free_it(void *page, void *pool_data) {
    (void)pool_data;
    __free_page(page);
}

static void take_next(struct page *page, void *next) { *(*(struct page ***)next)++ = page; }

static void what_callers_get_wrong(void) {
    mempool_t *pool = mempool_create_pages_bulk(4, bring_more, free_it, NULL);
    struct page *pages[6] = {NULL}, **next = pages;
    CHECK(pool && mempool_alloc_pages_bulk_cb(pool, GFP_NOWAIT, 4, take_next, &next) && next == pages + 6);
    /* A negative number: the array is not read. */
    CHECK(!mempool_alloc_pages_bulk_array(pool, GFP_KERNEL, (unsigned int)-1, pages));
    for (int at = 0; at < 6; at++)
        __free_page(pages[at]);
    mempool_destroy(pool);

    /* A page of another pool, and of another order. */
    mempool_t *single = mempool_create_page_pool(2, 0), *blocks = mempool_create_page_pool(2, 1);
    struct page *page = mempool_alloc_preallocated(single), *block = mempool_alloc_preallocated(blocks);
    mempool_free(page, blocks);
    mempool_free(block, single);
    CHECK(page_count(page) == 1 && page_count(block) == 1);
    mempool_free(page, single);
    mempool_free(block, blocks);
    mempool_destroy(single);
    mempool_destroy(blocks);
    settled(0);
}

int main(void) {
    use_pages(PAGES);
    pagemill_on_misuse(note);
    pages_in_bulk_by_the_callers_function();
    a_request_waits_until_an_element_comes_back();
    what_callers_get_wrong();
    elements_of_any_functions();
    return 0;
}
