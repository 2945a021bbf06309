/* What a page costs in C: one page out and back, and 64 in bulk. Prints two numbers of nanoseconds a page. See cost.rs. */
#include <pagemill.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PAGES 4096
#define SINGLE 2000000
#define BULK 50000

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
}

static void must(enum pagemill_error error) {
    if (error != PAGEMILL_ERROR_NONE) {
        fprintf(stderr, "%s\n", pagemill_strerror(error));
        exit(1);
    }
}

int main(void) {
    struct pagemill_options options;
    struct pagemill_allocator *allocator;
    static void *pages[PAGES];
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.pages = 1 << 16;
    must(pagemill_allocator_create(&options, &allocator));

    /* Lists in no particular order. */
    struct pagemill_bulk request = pagemill_bulk_exact(PAGES, PAGEMILL_GFP_KERNEL);
    must(pagemill_alloc_pages_bulk_array(allocator, &request, pages, NULL));
    for (size_t at = 0; at < PAGES; at++) {
        size_t other = at * 7919 % PAGES;
        void *page = pages[at];
        pages[at] = pages[other];
        pages[other] = page;
    }
    for (size_t at = 0; at < PAGES; at++)
        must(pagemill_free_page(pages[at]));

    double before = now_ns();
    for (int round = 0; round < SINGLE; round++) {
        void *page = pagemill_alloc_page(allocator, PAGEMILL_GFP_KERNEL);
        if (pagemill_free_page(page) != PAGEMILL_ERROR_NONE)
            return 1;
    }
    double single = (now_ns() - before) / SINGLE;

    void *slots[64] = {NULL};
    request = pagemill_bulk_exact(64, PAGEMILL_GFP_KERNEL);
    before = now_ns();
    for (int round = 0; round < BULK; round++) {
        if (pagemill_alloc_pages_bulk_array(allocator, &request, slots, NULL) != PAGEMILL_ERROR_NONE)
            return 1;
        if (pagemill_free_pages_bulk(slots, 64, 0, NULL) != PAGEMILL_ERROR_NONE)
            return 1;
    }
    double bulk = (now_ns() - before) / BULK / 64;
    printf("%.3f %.3f\n", single, bulk);
    return 0;
}
