/* Pools of blocks with device addresses: alignment, boundary, order, zeros, misuse. */
#include "check.h"
#include <linux/dmapool.h>

#define N 500

static int reports;
static enum pagemill_error last;

static void note(const struct pagemill_misuse *report) {
    reports++;
    last = report->error;
}

int main(void) {
    struct pagemill_allocator *allocator = use_pages(2048);
    pagemill_on_misuse(note);
    struct pagemill_device_options options;
    struct pagemill_device *device;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.kind = PAGEMILL_DEVICE_IDENTITY;
    CHECK(pagemill_device_create(allocator, &options, &device) == PAGEMILL_ERROR_NONE);
    CHECK(pagemill_linux_use_device(NULL) == PAGEMILL_ERROR_INVALID);
    CHECK(pagemill_linux_use_device(device) == PAGEMILL_ERROR_NONE);
    CHECK(pagemill_linux_use_device(device) == PAGEMILL_ERROR_INVALID);

    static void *blocks[N];
    static dma_addr_t handles[N];
    struct dma_pool *pool = dma_pool_create("descriptors", NULL, 100, 64, 1024);
    CHECK(pool);
    for (int at = 0; at < N; at++) {
        blocks[at] = dma_pool_alloc(pool, GFP_KERNEL, &handles[at]);
        CHECK(blocks[at] && handles[at] % 64 == 0 && handles[at] / 1024 == (handles[at] + 99) / 1024);
        CHECK(handles[at] == pagemill_linux_dma_address(blocks[at]));
        /* New blocks ascend within a page. */
        CHECK(at == 0 || handles[at] >> PAGE_SHIFT != handles[at - 1] >> PAGE_SHIFT || handles[at] > handles[at - 1]);
        memset(blocks[at], 0xa5, 100);
    }
    dma_pool_free(pool, blocks[7], handles[7]);
    dma_addr_t handle = 0;
    char *zeroed = dma_pool_zalloc(pool, GFP_ATOMIC, &handle);
    CHECK(zeroed == blocks[7] && handle == handles[7]); /* The last one freed comes first. */
    for (int at = 0; at < 100; at++)
        CHECK(zeroed[at] == 0);

    dma_pool_free(pool, blocks[1], handles[1]);
    CHECK(reports == 0);
    dma_pool_free(pool, blocks[1], handles[1]);
    CHECK(reports == 1 && last == PAGEMILL_ERROR_DOUBLE_FREE);
    dma_pool_free(pool, &handle, handle);
    CHECK(reports == 2 && last == PAGEMILL_ERROR_FOREIGN);
    dma_pool_free(pool, (char *)blocks[2] + 8, handles[2]);
    CHECK(reports == 3);
    blocks[1] = dma_pool_alloc(pool, GFP_KERNEL, &handles[1]);
    for (int at = 0; at < N; at++)
        dma_pool_free(pool, blocks[at], handles[at]);
    CHECK(reports == 3);
    dma_pool_destroy(pool);
    dma_pool_destroy(NULL);
    settled(0);

    pool = dma_pool_create_node("node", NULL, 16, 0, 0, NUMA_NO_NODE);
    CHECK(pool && dma_pool_alloc(pool, GFP_NOWAIT, &handle));
    dma_pool_destroy(pool); /* Warned of, and its page stays. */
    settled(1);
    pool = dmam_pool_create("managed", NULL, 3 * PAGE_SIZE, 16, 0);
    void *block = dma_pool_alloc(pool, GFP_KERNEL, &handle);
    CHECK(block);
    dma_pool_free(pool, block, handle);
    dmam_pool_destroy(pool);
    settled(1);
    CHECK(!dma_pool_create("empty", NULL, 0, 16, 0));
    CHECK(!dma_pool_create("crooked", NULL, 64, 24, 0));

    struct page *page = alloc_page(GFP_KERNEL);
    handle = dma_map_page(NULL, page, 40, 64, DMA_FROM_DEVICE);
    CHECK(!dma_mapping_error(NULL, handle) && handle == dma_map_single(NULL, (char *)page_address(page) + 40, 1, DMA_TO_DEVICE));
    dma_unmap_page(NULL, handle, 64, DMA_FROM_DEVICE);
    CHECK(dma_mapping_error(NULL, dma_map_single(NULL, &page, 8, DMA_TO_DEVICE)) == -ENOMEM);
    __free_page(page);
    return 0;
}
