/* A pool with a reserve. Two threads write while the arena is empty: they share the reserve, wait for each other, and both
 * come to their end.
 *
 *     cc -pthread pressure.c $(pkg-config --cflags --libs pagemill) -o pressure && ./pressure
 */
#include <pagemill.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define ARENA 1024 /* pages */
#define WRITE 16   /* pages of one write: as many as the reserve has */
#define WRITES 100

/* Writes a hundred times, with pages of the pool. */
static void *writes(void *user) {
    struct pagemill_mempool *pool = (struct pagemill_mempool *)user;
    /* NOIO: memory for a write must not depend on another write. */
    struct pagemill_bulk request = pagemill_bulk_exact(WRITE, PAGEMILL_GFP_NOIO);
    for (int n = 0; n < WRITES; n++) {
        void *pages[WRITE] = {NULL};
        /* All that it needs in one request: threads that held some and waited for more could wait for each other. */
        enum pagemill_error error = pagemill_mempool_alloc_bulk_array(pool, &request, pages, NULL);
        if (error != PAGEMILL_ERROR_NONE) {
            fprintf(stderr, "write %d: %s\n", n, pagemill_strerror(error));
            return NULL;
        }
        for (int at = 0; at < WRITE; at++)
            memset(pages[at], n, PAGEMILL_PAGE_SIZE); /* Here a driver would write. */
        pagemill_mempool_free_bulk(pool, pages, WRITE, NULL);
    }
    return pool;
}

int main(void) {
    struct pagemill_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.pages = ARENA;
    struct pagemill_allocator *allocator;
    struct pagemill_mempool *pool;
    enum pagemill_error error = pagemill_allocator_create(&options, &allocator);
    if (error == PAGEMILL_ERROR_NONE)
        error = pagemill_mempool_create_pages(allocator, 0, WRITE, &pool);
    if (error != PAGEMILL_ERROR_NONE) {
        fprintf(stderr, "%s\n", pagemill_strerror(error));
        return 1;
    }

    /* The rest of the program takes all other pages, and keeps them. */
    struct pagemill_list *rest = pagemill_list_create();
    struct pagemill_bulk all = pagemill_bulk_up_to(ARENA, PAGEMILL_GFP_NOWAIT);
    pagemill_alloc_pages_bulk_list(allocator, &all, rest, NULL);
    void *page = pagemill_alloc_page(allocator, PAGEMILL_GFP_NOWAIT);
    printf("%zu pages are taken, and the allocator has %s\n", pagemill_list_length(rest), page ? "more" : "no more");

    pthread_t threads[2];
    int done = 0;
    for (int at = 0; at < 2; at++)
        if (pthread_create(threads + at, NULL, writes, pool) != 0)
            return 1;
    for (int at = 0; at < 2; at++) {
        void *result;
        pthread_join(threads[at], &result);
        done += result != NULL;
    }
    struct pagemill_mempool_statistics statistics;
    pagemill_mempool_stats(pool, &statistics);
    printf("%d threads have written %d times each, with %llu pages of the reserve\n", done, WRITES,
           (unsigned long long)statistics.from_reserve);

    pagemill_list_destroy(rest);
    error = pagemill_mempool_destroy(pool, NULL);
    if (error == PAGEMILL_ERROR_NONE)
        error = pagemill_allocator_close(allocator, NULL);
    return done == 2 && !page && error == PAGEMILL_ERROR_NONE ? 0 : 1;
}
