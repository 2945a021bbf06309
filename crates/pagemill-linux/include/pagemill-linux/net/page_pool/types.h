/* Pages that circulate. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_NET_PAGE_POOL_TYPES_H
#define PAGEMILL_NET_PAGE_POOL_TYPES_H

#include <linux/dma-direction.h>
#include <linux/mm.h>

struct device;
struct net_device;
struct napi_struct;
struct page_pool;

/* Each page has a device address (`page_pool_get_dma_addr`). */
#define PP_FLAG_DMA_MAP 1U
/* These change nothing: memory is coherent, and every pool has fragments. */
#define PP_FLAG_DMA_SYNC_DEV 2U
#define PP_FLAG_PAGE_FRAG 4U
#define PP_FLAG_SYSTEM_POOL 8U
#define PP_FLAG_ALLOW_UNREADABLE_NETMEM 16U

struct page_pool_params {
    unsigned int flags;
    /* Each page is a compound page of 2^order. */
    unsigned int order;
    /* Pages that the ring has room for, up to 32768. 0: 1024. */
    unsigned int pool_size;
    /* NUMA_NO_NODE: the nearest. */
    int nid;
    struct device *dev;
    struct napi_struct *napi;
    enum dma_data_direction dma_dir;
    unsigned int max_len;
    unsigned int offset;
    struct net_device *netdev;
    unsigned int queue_idx;
};

struct page_pool_alloc_stats {
    u64 fast, slow, slow_high_order, empty, refill, waive;
};

struct page_pool_recycle_stats {
    u64 cached, cache_full, ring, ring_full, released_refcnt;
};

struct page_pool_stats {
    struct page_pool_alloc_stats alloc_stats;
    struct page_pool_recycle_stats recycle_stats;
};

/* A pool, or an ERR_PTR: -EINVAL, -E2BIG for a ring above 32768, -ENOMEM. */
struct page_pool *page_pool_create(const struct page_pool_params *params);
/* Ends the pool. Pages that come back later go to the allocator; with the last one the pool is gone. */
void page_pool_destroy(struct page_pool *pool);

/* For the pool's consumer, one thread at a time: a page, from the cache, the ring or the allocator, or null. */
struct page *page_pool_alloc_pages(struct page_pool *pool, gfp_t gfp);
/* A part of a page, of `size` bytes from `*offset` on. The page goes back with its last part. */
struct page *page_pool_alloc_frag(struct page_pool *pool, unsigned int *offset, unsigned int size, gfp_t gfp);

/* Drops the caller's part of a page. With the last one it goes to the ring; by the consumer, directly to its cache; and if somebody else
 * holds a reference, it leaves the pool, and becomes free with its last reference. */
void page_pool_put_unrefed_page(struct page_pool *pool, struct page *page, unsigned int dma_sync_size, bool allow_direct);
void page_pool_put_page(struct page_pool *pool, struct page *page, unsigned int dma_sync_size, bool allow_direct);
/* The same for pages that are each somebody's last part: 64 in one section of the ring. */
void pagemill_linux_page_pool_put_bulk(struct page_pool *pool, struct page **pages, int n);
/* The page leaves the pool for good. */
void pagemill_linux_page_pool_release(struct page_pool *pool, struct page *page);
/* The consumer moved to another node. Pages of the pool still come from the node that it was made for. */
void page_pool_update_nid(struct page_pool *pool, int nid);

/* Adds the pool's figures to `stats`. For the consumer. */
bool page_pool_get_stats(const struct page_pool *pool, struct page_pool_stats *stats);
int page_pool_inflight(const struct page_pool *pool, bool strict);

dma_addr_t page_pool_get_dma_addr(const struct page *page);
enum dma_data_direction page_pool_get_dma_dir(const struct page_pool *pool);

#endif
