/* Loads the shared library late, in a program with 200 threads, uses it in all of them beside malloc, and closes it with pages out. */
#include "check.h"
#include <dlfcn.h>
#include <pthread.h>

#define THREADS 200
#define SYMBOL(name) name##_type name = (name##_type)dlsym(library, #name)

typedef enum pagemill_error (*pagemill_allocator_create_type)(const struct pagemill_options *, struct pagemill_allocator **);
typedef void *(*pagemill_alloc_page_type)(struct pagemill_allocator *, uint32_t);
typedef enum pagemill_error (*pagemill_free_page_type)(void *);

static pthread_barrier_t before, loaded, used;
static pagemill_alloc_page_type alloc_page;
static pagemill_free_page_type free_page;
static struct pagemill_allocator *allocator;

static void *work(void *slot) {
    pthread_barrier_wait(&before);
    pthread_barrier_wait(&loaded);
    char *own = (char *)malloc(PAGEMILL_PAGE_SIZE);
    CHECK(own != NULL);
    memset(own, 2, PAGEMILL_PAGE_SIZE);
    *(void **)slot = alloc_page(allocator, PAGEMILL_GFP_KERNEL);
    if (*(void **)slot)
        memset(*(void **)slot, 1, PAGEMILL_PAGE_SIZE);
    CHECK(own[0] == 2 && own[PAGEMILL_PAGE_SIZE - 1] == 2);
    free(own);
    pthread_barrier_wait(&used);
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[THREADS];
    void *pages[THREADS];
    CHECK(argc == 2);
    pthread_barrier_init(&before, NULL, THREADS + 1);
    pthread_barrier_init(&loaded, NULL, THREADS + 1);
    pthread_barrier_init(&used, NULL, THREADS + 1);
    for (int at = 0; at < THREADS; at++)
        CHECK(pthread_create(threads + at, NULL, work, pages + at) == 0);
    pthread_barrier_wait(&before);

    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library)
        fprintf(stderr, "%s\n", dlerror());
    CHECK(library != NULL);
    SYMBOL(pagemill_allocator_create);
    SYMBOL(pagemill_alloc_page);
    SYMBOL(pagemill_free_page);
    CHECK(pagemill_allocator_create && pagemill_alloc_page && pagemill_free_page);
    CHECK(dlvsym(library, "pagemill_free_page", "PAGEMILL_0.1") == (void *)pagemill_free_page);
    CHECK(dlsym(library, "rust_eh_personality") == NULL);
    alloc_page = pagemill_alloc_page;
    free_page = pagemill_free_page;
    struct pagemill_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.pages = 4096;
    CHECK(pagemill_allocator_create(&options, &allocator) == PAGEMILL_ERROR_NONE);
    pthread_barrier_wait(&loaded);
    pthread_barrier_wait(&used);
    for (int at = 0; at < THREADS; at++)
        CHECK(pthread_join(threads[at], NULL) == 0);

    /* It stays loaded. */
    CHECK(dlclose(library) == 0);
    for (int at = 0; at < THREADS; at++) {
        CHECK(pages[at] != NULL && *(char *)pages[at] == 1);
        CHECK(free_page(pages[at]) == PAGEMILL_ERROR_NONE);
    }
    return 0;
}
