/* Single pages, blocks, and every form of bulk requests, with what each promises. */
#include "check.h"
#include <stdint.h>
#include <sys/mman.h>

#define N 64

static void single_pages_and_blocks(void) {
    struct pagemill_allocator *allocator = allocator_of(4096);
    unsigned char *page = (unsigned char *)pagemill_alloc_page(allocator, PAGEMILL_GFP_KERNEL | PAGEMILL_GFP_ZERO);
    CHECK(page && (uintptr_t)page % PAGEMILL_PAGE_SIZE == 0 && page[0] == 0 && page[PAGEMILL_PAGE_SIZE - 1] == 0);
    memset(page, 0xa5, PAGEMILL_PAGE_SIZE);
    OK(pagemill_free_page(page));

    void *block;
    OK(pagemill_alloc_pages(allocator, PAGEMILL_GFP_KERNEL, 3, &block));
    CHECK((uintptr_t)block % (8 * PAGEMILL_PAGE_SIZE) == 0);
    OK(pagemill_free_pages(block, 3));

    OK(pagemill_alloc_pages(allocator, PAGEMILL_GFP_KERNEL, 2, &block));
    OK(pagemill_split(block, 2));
    for (int at = 0; at < 4; at++)
        OK(pagemill_free_page((char *)block + at * PAGEMILL_PAGE_SIZE));

    size_t freed;
    OK(pagemill_alloc_contig(allocator, PAGEMILL_GFP_KERNEL, 266, &block));
    CHECK(stat_of(allocator, "allocated") - stat_of(allocator, "freed") == 266);
    memset(block, 1, 266 * PAGEMILL_PAGE_SIZE);
    OK(pagemill_free_run(block, 266, 0, &freed));
    CHECK(freed == 266);

    struct pagemill_arena arena;
    CHECK(pagemill_arenas(allocator, &arena, 1) == 1 && arena.pages == 4096 && arena.node == 0);
    CHECK((char *)block >= (char *)arena.start && (char *)block < (char *)arena.start + 4096 * PAGEMILL_PAGE_SIZE);
    close_whole(allocator, 4096);
}

/* Only null slots are filled, in ascending order; slots at n and beyond lie on a page that cannot be touched. */
static void an_array_with_holes(void) {
    struct pagemill_allocator *allocator = allocator_of(4096);
    char *memory = (char *)mmap(NULL, 2 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED && mprotect(memory + 4096, 4096, PROT_NONE) == 0);
    void **slots = (void **)(memory + 4096) - N;
    char mine;
    int holes = 0;
    for (int at = 0; at < N; at++) {
        slots[at] = at % 3 == 1 ? &mine : NULL;
        holes += slots[at] == NULL;
    }
    struct pagemill_bulk request = pagemill_bulk_up_to(N, PAGEMILL_GFP_KERNEL);
    struct pagemill_filled filled;
    OK(pagemill_alloc_pages_bulk_array(allocator, &request, slots, &filled));
    CHECK(filled.added == (size_t)holes && filled.occupied == N && filled.first_hole == N && filled.missing == 0 && filled.why == 0);
    for (int at = 0; at < N; at++) {
        CHECK((slots[at] == &mine) == (at % 3 == 1));
        if (slots[at] == &mine)
            slots[at] = NULL;
        else
            *(int *)slots[at] = at;
    }
    size_t freed;
    OK(pagemill_free_pages_bulk(slots, N, 0, &freed));
    CHECK(freed == (size_t)holes);
    for (int at = 0; at < N; at++)
        CHECK(slots[at] == NULL);

    /* Without a hole, or for 0 pages, nothing happens: the array may be null for 0. */
    uint64_t calls = stat_of(allocator, "allocated");
    request.most = 0;
    OK(pagemill_alloc_pages_bulk_array(allocator, &request, NULL, &filled));
    CHECK(filled.added == 0 && filled.occupied == 0 && filled.first_hole == 0);
    for (int at = 0; at < N; at++)
        slots[at] = &mine;
    request.most = N;
    OK(pagemill_alloc_pages_bulk_array(allocator, &request, slots, &filled));
    CHECK(filled.added == 0 && filled.occupied == N && filled.first_hole == N && stat_of(allocator, "allocated") == calls);

    /* An array that is known to be empty is not read. */
    memset(slots, 0xff, N * sizeof *slots);
    OK(pagemill_alloc_pages_bulk_array_fresh(allocator, &request, slots, &filled));
    CHECK(filled.added == N && filled.occupied == N);
    OK(pagemill_free_pages_bulk(slots, N, 0, &freed));
    CHECK(freed == N);
    request.order = 2;
    memset(slots, 0xff, N * sizeof *slots);
    OK(pagemill_alloc_pages_bulk_array_fresh(allocator, &request, slots, NULL));
    OK(pagemill_free_pages_bulk(slots, N, 2, &freed));
    CHECK(freed == N);
    munmap(memory, 2 * 4096);
    close_whole(allocator, 4096);
}

/* What comes short says why, and a request that must have a number leaves everything as it was. */
static void too_few_pages(void) {
    struct pagemill_allocator *allocator = allocator_of(40);
    void *slots[N] = {NULL};
    struct pagemill_filled filled;
    struct pagemill_bulk request = pagemill_bulk_exact(N, PAGEMILL_GFP_NOWAIT);
    EXPECT(PAGEMILL_ERROR_TOO_MANY, pagemill_alloc_pages_bulk_array(allocator, &request, slots, &filled));
    void *taken = pagemill_alloc_page(allocator, PAGEMILL_GFP_NOWAIT);
    request = pagemill_bulk_at_least(40, N, PAGEMILL_GFP_NOWAIT);
    EXPECT(PAGEMILL_ERROR_EXHAUSTED, pagemill_alloc_pages_bulk_array(allocator, &request, slots, &filled));
    CHECK(filled.added == 0 && filled.occupied == 0);
    for (int at = 0; at < N; at++)
        CHECK(slots[at] == NULL);
    request = pagemill_bulk_up_to(N, PAGEMILL_GFP_NOWAIT);
    OK(pagemill_alloc_pages_bulk_array(allocator, &request, slots, &filled));
    CHECK(filled.added == 39 && filled.first_hole == 39 && filled.missing == N - 39 && filled.why == PAGEMILL_ERROR_EXHAUSTED);
    EXPECT(PAGEMILL_ERROR_EXHAUSTED, pagemill_alloc_pages(allocator, PAGEMILL_GFP_NOWAIT, 0, slots + N - 1));
    CHECK(slots[N - 1] == NULL && pagemill_alloc_page(allocator, PAGEMILL_GFP_NOWAIT) == NULL);
    size_t out;
    EXPECT(PAGEMILL_ERROR_IN_USE, pagemill_allocator_close(allocator, &out));
    CHECK(out == 40);

    /* A request that waits ends by its timeout, or at once if it is cancelled. */
    request = pagemill_bulk_exact(1, PAGEMILL_GFP_KERNEL);
    request.timeout_ns = 1000 * 1000;
    void *one = NULL;
    EXPECT(PAGEMILL_ERROR_TIMED_OUT, pagemill_alloc_pages_bulk_array(allocator, &request, &one, NULL));
    struct pagemill_cancel_token *cancel = pagemill_cancel_create();
    OK(pagemill_cancel(cancel));
    request.timeout_ns = UINT64_MAX;
    request.cancel = cancel;
    EXPECT(PAGEMILL_ERROR_CANCELLED, pagemill_alloc_pages_bulk_array(allocator, &request, &one, NULL));
    OK(pagemill_cancel_destroy(cancel));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_alloc_pages_bulk_array(allocator, &request, &one, NULL));

    OK(pagemill_free_page(taken));
    OK(pagemill_free_pages_bulk(slots, N, 0, NULL));
    close_whole(allocator, 40);
}

/* A negative count, or one above INT_MAX, is refused, and warned of once. */
static void counts_that_cannot_be(void) {
    struct pagemill_allocator *allocator = allocator_of(64);
    struct pagemill_list *list = pagemill_list_create();
    const int64_t counts[] = {-1, INT64_MIN, (int64_t)INT32_MAX + 1, INT64_MAX};
    for (int at = 0; at < 4; at++) {
        struct pagemill_bulk request = pagemill_bulk_up_to(counts[at], PAGEMILL_GFP_NOWAIT);
        struct pagemill_filled filled = {7, 7, 7, 7, 7};
        struct pagemill_delivered delivered = {7, 7, 7};
        size_t n = 7;
        void *slot = NULL;
        struct pagemill_run run;
        EXPECT(PAGEMILL_ERROR_COUNT, pagemill_alloc_pages_bulk_array(allocator, &request, &slot, &filled));
        CHECK(filled.added == 0 && filled.occupied == 0 && filled.first_hole == 0 && slot == NULL);
        EXPECT(PAGEMILL_ERROR_COUNT, pagemill_alloc_pages_bulk_array_fresh(allocator, &request, &slot, &filled));
        EXPECT(PAGEMILL_ERROR_COUNT, pagemill_alloc_pages_bulk_list(allocator, &request, list, &delivered));
        CHECK(delivered.blocks == 0 && pagemill_list_length(list) == 0);
        EXPECT(PAGEMILL_ERROR_COUNT, pagemill_alloc_pages_bulk_runs(allocator, &request, &run, &n, &delivered));
        CHECK(n == 0);
        EXPECT(PAGEMILL_ERROR_COUNT, pagemill_free_pages_bulk(&slot, counts[at], 0, &n));
    }
    struct pagemill_bulk request = pagemill_bulk_at_least(3, 2, PAGEMILL_GFP_NOWAIT);
    EXPECT(PAGEMILL_ERROR_COUNT, pagemill_alloc_pages_bulk_list(allocator, &request, list, NULL));
    OK(pagemill_list_destroy(list));
    close_whole(allocator, 64);
}

struct vector {
    void *pages[N];
    size_t n;
};

static void add(void *page, void *user) {
    struct vector *vector = (struct vector *)user;
    vector->pages[vector->n++] = page;
}

static void the_callback_form(void) {
    struct pagemill_allocator *allocator = allocator_of(4096);
    struct vector vector;
    struct pagemill_delivered delivered;
    for (uint32_t order = 0; order < 3; order++) {
        vector.n = 0;
        struct pagemill_bulk request = pagemill_bulk_up_to(N, PAGEMILL_GFP_KERNEL);
        request.order = order;
        OK(pagemill_alloc_pages_bulk_callback(allocator, &request, add, &vector, &delivered));
        CHECK(delivered.blocks == N && vector.n == N && delivered.missing == 0);
        for (size_t at = 0; at < vector.n; at++)
            OK(pagemill_free_pages(vector.pages[at], order));
    }
    struct pagemill_bulk request = pagemill_bulk_exact(N, PAGEMILL_GFP_KERNEL);
    EXPECT(PAGEMILL_ERROR_LEAST, pagemill_alloc_pages_bulk_callback(allocator, &request, add, &vector, &delivered));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_alloc_pages_bulk_callback(allocator, &request, NULL, &vector, &delivered));
    close_whole(allocator, 4096);
}

struct walk {
    struct pagemill_list *list;
    size_t n, refused;
    void *first;
};

/* Writes to each block, and tries what it must not do. */
static void visit(void *block, void *user) {
    struct walk *walk = (struct walk *)user;
    memset(block, (int)walk->n, PAGEMILL_PAGE_SIZE);
    if (walk->n++ == 0)
        walk->first = block;
    walk->refused += pagemill_free_page(block) == PAGEMILL_ERROR_DOUBLE_FREE;
    CHECK(pagemill_list_pop(walk->list) == NULL && pagemill_list_length(walk->list) == 0);
}

static void a_list_is_walked_and_keeps_its_pages(void) {
    struct pagemill_allocator *allocator = allocator_of(512);
    struct pagemill_bulk request = pagemill_bulk_exact(N, PAGEMILL_GFP_KERNEL);
    struct walk walk = {pagemill_list_create(), 0, 0, NULL};
    OK(pagemill_list_each(walk.list, visit, &walk));
    CHECK(walk.n == 0);
    OK(pagemill_alloc_pages_bulk_list(allocator, &request, walk.list, NULL));
    OK(pagemill_list_each(walk.list, visit, &walk));
    CHECK(walk.n == N && walk.refused == N && pagemill_list_length(walk.list) == N);
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_list_each(walk.list, NULL, &walk));
    for (size_t at = 0; at < N; at++) {
        char *page = (char *)pagemill_list_pop(walk.list);
        CHECK(page != NULL && page[0] == (char)at && (at > 0 || page == walk.first));
        OK(pagemill_free_page(page));
    }
    OK(pagemill_list_destroy(walk.list));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_list_each(walk.list, visit, &walk));
    close_whole(allocator, 512);
}

static void the_list_form(void) {
    struct pagemill_allocator *allocator = allocator_of(4096);
    struct pagemill_list *list = pagemill_list_create(), *other = pagemill_list_create();
    struct pagemill_delivered delivered;
    struct pagemill_bulk request = pagemill_bulk_up_to(N, PAGEMILL_GFP_KERNEL);
    OK(pagemill_alloc_pages_bulk_list(allocator, &request, list, &delivered));
    OK(pagemill_alloc_pages_bulk_list(allocator, &request, list, &delivered));
    CHECK(delivered.blocks == N && pagemill_list_length(list) == 2 * N);
    void *page = pagemill_list_pop(list);
    CHECK(page != NULL && pagemill_list_length(list) == 2 * N - 1);
    OK(pagemill_list_push(other, page, 0));
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_list_push(other, page, 0)); /* The list has it. */
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_free_page(page));
    OK(pagemill_list_append(list, other));
    CHECK(pagemill_list_length(list) == 2 * N && pagemill_list_length(other) == 0 && pagemill_list_pop(other) == NULL);
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_list_append(list, list));

    void *block;
    OK(pagemill_alloc_pages(allocator, PAGEMILL_GFP_KERNEL, 1, &block));
    EXPECT(PAGEMILL_ERROR_LIST_ORDER, pagemill_list_push(list, block, 1));
    OK(pagemill_list_push(other, block, 1));
    EXPECT(PAGEMILL_ERROR_LIST_ORDER, pagemill_list_append(list, other));
    request.order = 1;
    EXPECT(PAGEMILL_ERROR_LIST_ORDER, pagemill_alloc_pages_bulk_list(allocator, &request, list, &delivered));
    OK(pagemill_alloc_pages_bulk_list(allocator, &request, other, &delivered));
    CHECK(pagemill_list_length(other) == N + 1);
    CHECK(pagemill_list_clear(list) == 2 * N && pagemill_list_length(list) == 0);
    OK(pagemill_list_destroy(list));
    OK(pagemill_list_destroy(other)); /* With its blocks. */
    close_whole(allocator, 4096);
}

static void the_runs_form(void) {
    struct pagemill_allocator *allocator = allocator_of(4096);
    struct pagemill_run runs[N];
    struct pagemill_delivered delivered;
    for (uint32_t order = 0; order < 3; order++) {
        struct pagemill_bulk request = pagemill_bulk_exact(N, PAGEMILL_GFP_KERNEL);
        request.order = order;
        size_t n, blocks = 0, freed;
        OK(pagemill_alloc_pages_bulk_runs(allocator, &request, runs, &n, &delivered));
        CHECK(n >= 1 && n <= N && delivered.blocks == N);
        for (size_t at = 0; at < n; at++) {
            memset(runs[at].start, 1, runs[at].blocks * (PAGEMILL_PAGE_SIZE << order));
            OK(pagemill_free_run(runs[at].start, runs[at].blocks, order, &freed));
            CHECK(freed == runs[at].blocks);
            blocks += freed;
        }
        CHECK(blocks == N);
    }
    close_whole(allocator, 4096);
}

static void an_account_pays(void) {
    struct pagemill_allocator *allocator = allocator_of(512);
    struct pagemill_account *account = pagemill_account_create(100);
    struct pagemill_list *list = pagemill_list_create();
    struct pagemill_delivered delivered;
    struct pagemill_bulk request = pagemill_bulk_up_to(N, PAGEMILL_GFP_KERNEL | PAGEMILL_GFP_ACCOUNT);
    EXPECT(PAGEMILL_ERROR_NO_ACCOUNT, pagemill_alloc_pages_bulk_list(allocator, &request, list, &delivered));
    request.account = account;
    OK(pagemill_alloc_pages_bulk_list(allocator, &request, list, &delivered));
    OK(pagemill_alloc_pages_bulk_list(allocator, &request, list, &delivered));
    CHECK(delivered.blocks == 36 && delivered.missing == 28 && delivered.why == PAGEMILL_ERROR_ACCOUNT);
    CHECK(pagemill_account_charged(account) == 100);
    OK(pagemill_account_uncharge(account, pagemill_list_clear(list)));
    CHECK(pagemill_account_charged(account) == 0);
    OK(pagemill_account_destroy(account));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_account_destroy(account));
    OK(pagemill_list_destroy(list));
    close_whole(allocator, 512);
}

/* What an allocator is made of: memory of other kinds, marks, faults, and refusals with words. */
static void allocators(void) {
    struct pagemill_options options;
    struct pagemill_memory memory;
    struct pagemill_allocator *allocator;
    char message[256];
    memset(&options, 0, sizeof options);
    memset(&memory, 0, sizeof memory);
    options.size = sizeof options;
    options.memory = &memory;
    options.message = message;
    options.message_size = sizeof message;
    memory.size = sizeof memory;
    EXPECT(PAGEMILL_ERROR_ARENA, pagemill_allocator_create(&options, &allocator));
    CHECK(allocator == NULL && strstr(message, "an arena of 0 pages") == message);
    options.message_size = 9;
    EXPECT(PAGEMILL_ERROR_ARENA, pagemill_allocator_create(&options, &allocator));
    CHECK(strcmp(message, "an arena") == 0);

    memory.pages = 64;
    memory.flags = PAGEMILL_MEMORY_DMA32;
    memory.min = 8;
    memory.low = 12;
    memory.high = 16;
    options.flags = PAGEMILL_NO_HUGE_PAGES;
    options.backend = PAGEMILL_BACKEND_PORTABLE;
    OK(pagemill_allocator_create(&options, &allocator));
    struct pagemill_arena arena;
    CHECK(pagemill_arenas(allocator, &arena, 1) == 1 && arena.is_dma32 == 1);
    void *slots[N] = {NULL};
    struct pagemill_bulk request = pagemill_bulk_up_to(N, PAGEMILL_GFP_NOWAIT | PAGEMILL_GFP_DMA32);
    struct pagemill_filled filled;
    OK(pagemill_alloc_pages_bulk_array(allocator, &request, slots, &filled));
    CHECK(filled.added == 64 - 12 && filled.why == PAGEMILL_ERROR_BELOW_MARK);
    memory.flags = 0;
    OK(pagemill_add_memory(allocator, &memory));
    CHECK(pagemill_arenas(allocator, NULL, 0) == 2);
    OK(pagemill_free_pages_bulk(slots, N, 0, NULL));
    close_whole(allocator, 128);

    /* Memory that the caller brings. */
    const size_t two_mib = 2 << 20;
    char *mine = (char *)mmap(NULL, 2 * two_mib, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(mine != MAP_FAILED);
    memset(&memory, 0, sizeof memory);
    memory.size = sizeof memory;
    memory.kind = PAGEMILL_MEMORY_BROUGHT;
    memory.pages = 512;
    memory.start = mine + (two_mib - (uintptr_t)mine % two_mib);
    OK(pagemill_allocator_create(&options, &allocator));
    char *page = (char *)pagemill_alloc_page(allocator, PAGEMILL_GFP_NOWAIT);
    CHECK(page >= (char *)memory.start && page < (char *)memory.start + two_mib);
    OK(pagemill_free_page(page));
    close_whole(allocator, 512);
    munmap(mine, 2 * two_mib);

    /* Faults on purpose. */
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.pages = 64;
    options.faults = "after=0";
    OK(pagemill_allocator_create(&options, &allocator));
    EXPECT(PAGEMILL_ERROR_FAULT, pagemill_alloc_pages(allocator, PAGEMILL_GFP_NOWAIT, 0, slots));
    CHECK(stat_of(allocator, "faults") > 0);
    close_whole(allocator, 64);
    options.faults = "p=7";
    EXPECT(PAGEMILL_ERROR_FAULTS, pagemill_allocator_create(&options, &allocator));

    /* A page outlives its allocator. */
    allocator = allocator_of(64);
    page = (char *)pagemill_alloc_page(allocator, PAGEMILL_GFP_KERNEL);
    OK(pagemill_allocator_release(allocator));
    page[0] = 1;
    OK(pagemill_free_page(page));

    /* The allocator of the process. */
    allocator = pagemill_allocator_global();
    CHECK(allocator != NULL && allocator == pagemill_allocator_global());
    OK(pagemill_free_page(pagemill_alloc_page(allocator, PAGEMILL_GFP_KERNEL)));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_allocator_close(allocator, NULL));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_allocator_release(allocator));
    CHECK(pagemill_has_rseq() == 0 || pagemill_has_rseq() == 1);
}

static void statistics(void) {
    struct pagemill_allocator *allocator = allocator_of(1024);
    char text[8192], name[64];
    void *page = pagemill_alloc_page(allocator, PAGEMILL_GFP_KERNEL);
    uint64_t value;
    size_t n = 0;
    while (pagemill_stat_name(n, name, sizeof name) > 0) {
        OK(pagemill_stat(allocator, name, &value));
        n++;
    }
    CHECK(n > 20 && name[0] == 0);
    CHECK(pagemill_stat_name(0, name, 3) == 4 && strcmp(name, "fr") == 0);
    EXPECT(PAGEMILL_ERROR_NAME, pagemill_stat(allocator, "riches", &value));
    CHECK(stat_of(allocator, "allocated") == 1 && stat_of(allocator, "freed") == 0);
    size_t length = pagemill_vmstat(allocator, text, sizeof text);
    CHECK(length < sizeof text && strlen(text) == length && strstr(text, "nr_free_pages "));
    CHECK(pagemill_vmstat(allocator, NULL, 0) >= length - 32);
    OK(pagemill_free_page(page));
    pagemill_drain(allocator);
    CHECK(pagemill_give_back(allocator) > 0);
    close_whole(allocator, 1024);
}

int main(void) {
    single_pages_and_blocks();
    an_array_with_holes();
    too_few_pages();
    counts_that_cannot_be();
    the_callback_form();
    the_list_form();
    a_list_is_walked_and_keeps_its_pages();
    the_runs_form();
    an_account_pays();
    allocators();
    statistics();
    return 0;
}
