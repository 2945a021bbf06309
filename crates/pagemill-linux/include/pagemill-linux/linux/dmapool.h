/* Small blocks with device addresses. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Unlike Linux's, these functions may not be called from a signal handler: where a CPU's list is empty or full they take a lock. */
#ifndef PAGEMILL_LINUX_DMAPOOL_H
#define PAGEMILL_LINUX_DMAPOOL_H

#include <linux/dma-mapping.h>

struct dma_pool;

/* Blocks of `size` bytes, which is rounded up to a multiple of `align`, a power of two or 0. None crosses a multiple of `boundary`, a power of
 * two or 0. Null if there can be no such blocks. */
struct dma_pool *dma_pool_create(const char *name, struct device *dev, size_t size, size_t align, size_t boundary);
/* The node is not used: a pool's pages come from near the thread that needs them. */
#define dma_pool_create_node(name, dev, size, align, boundary, node) dma_pool_create(name, dev, size, align, boundary)
/* Blocks that are out are warned of with their number, and their pages stay for ever. */
void dma_pool_destroy(struct dma_pool *pool);

void *dma_pool_alloc(struct dma_pool *pool, gfp_t gfp, dma_addr_t *handle);
static inline void *dma_pool_zalloc(struct dma_pool *pool, gfp_t gfp, dma_addr_t *handle) {
    return dma_pool_alloc(pool, gfp | __GFP_ZERO, handle);
}
void dma_pool_free(struct dma_pool *pool, void *block, dma_addr_t handle);

/* Managed pools: no driver is unbound in a process, so they end by `dmam_pool_destroy`, or with the process. */
#define dmam_pool_create(name, dev, size, align, boundary) dma_pool_create(name, dev, size, align, boundary)
#define dmam_pool_destroy(pool) dma_pool_destroy(pool)

#endif
