/* What the test programs have in common: a check that says where it failed, and small allocators. */
#ifndef CHECK_H
#define CHECK_H

#include <pagemill.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                     \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);          \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

/* Compares an error with the one that is expected, and says both. */
#define EXPECT(expected, call)                                                                            \
    do {                                                                                                  \
        int is = (call), want = (expected);                                                               \
        if (is != want) {                                                                                 \
            fprintf(stderr, "%s:%d: %s: \"%s\", not \"%s\"\n", __FILE__, __LINE__, #call,                 \
                    pagemill_strerror(is), pagemill_strerror(want));                                      \
            exit(1);                                                                                      \
        }                                                                                                 \
    } while (0)

#define OK(call) EXPECT(PAGEMILL_ERROR_NONE, call)

/* An allocator of so many pages. */
static inline struct pagemill_allocator *allocator_of(size_t pages) {
    struct pagemill_options options;
    struct pagemill_allocator *allocator;
    char message[256] = "";
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.pages = pages;
    options.message = message;
    options.message_size = sizeof message;
    if (pagemill_allocator_create(&options, &allocator) != PAGEMILL_ERROR_NONE) {
        fprintf(stderr, "no allocator of %zu pages: %s\n", pages, message);
        exit(1);
    }
    return allocator;
}

static inline uint64_t stat_of(struct pagemill_allocator *allocator, const char *name) {
    uint64_t value = 0;
    OK(pagemill_stat(allocator, name, &value));
    return value;
}

/* Closes an allocator of which all pages are back, and whose frames add up. */
static inline void close_whole(struct pagemill_allocator *allocator, size_t pages) {
    struct pagemill_census census;
    size_t out = 1;
    pagemill_drain(allocator);
    OK(pagemill_validate(allocator, &census));
    CHECK(census.managed == pages && census.free == pages && census.handed_out == 0 && census.quarantined == 0);
    OK(pagemill_allocator_close(allocator, &out));
    CHECK(out == 0);
}

#endif
