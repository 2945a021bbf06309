/* The device, and small blocks with its addresses. A `struct dma_pool` is a handle of pagemill.h. */
#include "internal.h"
#include <linux/dmapool.h>
#include <pthread.h>

static struct pagemill_device *the_device;
static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;

enum pagemill_error pagemill_linux_use_device(struct pagemill_device *device) {
    pthread_mutex_lock(&making);
    enum pagemill_error error = device && !the_device ? PAGEMILL_ERROR_NONE : PAGEMILL_ERROR_INVALID;
    if (error == PAGEMILL_ERROR_NONE)
        __atomic_store_n(&the_device, device, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&making);
    return error;
}

static struct pagemill_device *device(void) {
    struct pagemill_device *made = __atomic_load_n(&the_device, __ATOMIC_ACQUIRE);
    if (likely(made))
        return made;
    struct pagemill_allocator *allocator = pagemill_linux_allocator();
    struct pagemill_device_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.kind = PAGEMILL_DEVICE_IDENTITY;
    pthread_mutex_lock(&making);
    if (!the_device && pagemill_device_create(allocator, &options, &made) == PAGEMILL_ERROR_NONE)
        __atomic_store_n(&the_device, made, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&making);
    return the_device;
}

dma_addr_t pagemill_linux_dma_address(const void *address) {
    uint64_t found;
    return pagemill_device_address(device(), (void *)address, &found) == PAGEMILL_ERROR_NONE ? found : DMA_MAPPING_ERROR;
}

struct dma_pool *dma_pool_create(const char *name, struct device *dev, size_t size, size_t align, size_t boundary) {
    struct pagemill_dma_pool *pool;
    (void)dev;
    if (size == 0)
        return NULL;
    pagemill_dma_pool_create(name, device(), size, align, boundary, 0, &pool);
    return (struct dma_pool *)pool;
}

void dma_pool_destroy(struct dma_pool *pool) {
    size_t out = 0;
    if (!pool)
        return;
    enum pagemill_error error = pagemill_dma_pool_destroy((struct pagemill_dma_pool *)pool, &out);
    if (error == PAGEMILL_ERROR_IN_USE) {
        WARN(true, "%zu blocks are handed out", out);
        error = pagemill_dma_pool_release((struct pagemill_dma_pool *)pool);
    }
    WARN(error != PAGEMILL_ERROR_NONE, "%s", pagemill_strerror(error));
}

void *dma_pool_alloc(struct dma_pool *pool, gfp_t gfp, dma_addr_t *handle) {
    uint64_t address;
    void *block;
    enum pagemill_error error =
        pagemill_dma_pool_alloc((struct pagemill_dma_pool *)pool, pagemill_linux_flags(gfp), &address, &block);
    WARN_ONCE(error >= PAGEMILL_ERROR_ARGUMENT, "a request is refused: %s", pagemill_strerror(error));
    if (block)
        *handle = address;
    return block;
}

void dma_pool_free(struct dma_pool *pool, void *block, dma_addr_t handle) {
    (void)handle;
    enum pagemill_error error = pagemill_dma_pool_free((struct pagemill_dma_pool *)pool, block);
    WARN(error != PAGEMILL_ERROR_NONE, "block %p is refused: %s", block, pagemill_strerror(error));
}
