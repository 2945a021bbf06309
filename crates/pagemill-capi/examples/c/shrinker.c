/* A cache that keeps pages as long as nobody else needs them: a shrinker gives them back when memory is short.
 *
 *     cc -pthread shrinker.c $(pkg-config --cflags --libs pagemill) -o shrinker && ./shrinker
 */
#include <pagemill.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define ARENA 1024  /* pages */
#define REQUEST 256 /* pages that somebody else needs */

struct cache {
    pthread_mutex_t lock;
    struct pagemill_list *pages;
};

/* Called when a request finds no memory, on that request's thread. The thread may have the lock already, so the lock is
 * tried, not waited for. */
static size_t shrink(size_t wanted, uint32_t gfp, void *user) {
    struct cache *cache = (struct cache *)user;
    size_t freed = 0;
    (void)gfp;
    if (pthread_mutex_trylock(&cache->lock) != 0)
        return 0;
    while (freed < wanted) {
        void *page = pagemill_list_pop(cache->pages);
        if (!page)
            break;
        pagemill_free_page(page);
        freed++;
    }
    pthread_mutex_unlock(&cache->lock);
    return freed;
}

int main(void) {
    struct pagemill_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.pages = ARENA;
    struct pagemill_allocator *allocator;
    struct pagemill_shrinker *shrinker;
    struct cache cache = {PTHREAD_MUTEX_INITIALIZER, pagemill_list_create()};
    enum pagemill_error error = pagemill_allocator_create(&options, &allocator);
    if (error == PAGEMILL_ERROR_NONE)
        error = pagemill_shrinker_register(allocator, shrink, &cache, PAGEMILL_SHRINKER_FREES, &shrinker);
    if (error != PAGEMILL_ERROR_NONE) {
        fprintf(stderr, "%s\n", pagemill_strerror(error));
        return 1;
    }

    /* The cache grows until there is nothing left. NOWAIT: it takes what is free, and asks nobody for more. */
    struct pagemill_bulk fill = pagemill_bulk_up_to(ARENA, PAGEMILL_GFP_NOWAIT);
    pagemill_alloc_pages_bulk_list(allocator, &fill, cache.pages, NULL);
    printf("the cache has %zu of %d pages\n", pagemill_list_length(cache.pages), ARENA);

    /* KERNEL: the request may call shrinkers. */
    void *pages[REQUEST] = {NULL};
    struct pagemill_bulk request = pagemill_bulk_exact(REQUEST, PAGEMILL_GFP_KERNEL);
    error = pagemill_alloc_pages_bulk_array(allocator, &request, pages, NULL);
    if (error != PAGEMILL_ERROR_NONE) {
        fprintf(stderr, "%s\n", pagemill_strerror(error));
        return 1;
    }
    printf("a request got %d pages, and the cache has %zu\n", REQUEST, pagemill_list_length(cache.pages));

    pagemill_free_pages_bulk(pages, REQUEST, 0, NULL);
    pagemill_shrinker_unregister(shrinker);
    pagemill_list_destroy(cache.pages);
    return pagemill_allocator_close(allocator, NULL);
}
