/* What the test programs have in common: a check that says where it failed, and an allocator of a size. */
#ifndef CHECK_H
#define CHECK_H

#include <linux/gfp.h>
#include <linux/mm.h>
#include <pagemill-linux.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                \
        }                                                                           \
    } while (0)

/* What every kernel-shaped function takes its pages from. */
static inline struct pagemill_allocator *use_pages(size_t pages) {
    struct pagemill_options options;
    struct pagemill_allocator *allocator;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.pages = pages;
    CHECK(pagemill_allocator_create(&options, &allocator) == PAGEMILL_ERROR_NONE);
    CHECK(pagemill_linux_use(allocator) == PAGEMILL_ERROR_NONE);
    CHECK(pagemill_linux_use(allocator) == PAGEMILL_ERROR_INVALID && pagemill_linux_allocator() == allocator);
    return allocator;
}

/* So many pages are handed out, and every page is in one place. */
#define settled(pages)                                                                    \
    do {                                                                                  \
        struct pagemill_census census;                                                    \
        CHECK(pagemill_validate(pagemill_linux_allocator(), &census) == PAGEMILL_ERROR_NONE); \
        if (census.handed_out != (size_t)(pages)) {                                       \
            fprintf(stderr, "%s:%d: %zu pages are out, not %d\n", __FILE__, __LINE__, census.handed_out, (int)(pages)); \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)

#endif
