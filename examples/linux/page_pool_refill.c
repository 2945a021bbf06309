/* A network driver's receive ring: buffers come from a page_pool, which refills itself 64 at a time; the stack gives most of them back.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include <linux/err.h>
#include <linux/mm.h>
#include <net/page_pool/helpers.h>
#include <stdio.h>

#define RING 256

struct rx_ring {
	struct page_pool *pool;
	struct page *pages[RING];
	/* What the device is told. */
	dma_addr_t descriptors[RING];
	unsigned int next_to_use, next_to_clean;
};

static int rx_refill(struct rx_ring *ring, unsigned int n)
{
	while (n--) {
		unsigned int at = ring->next_to_use % RING;
		struct page *page = page_pool_dev_alloc_pages(ring->pool);

		if (!page)
			return -ENOMEM;
		ring->pages[at] = page;
		ring->descriptors[at] = page_pool_get_dma_addr(page);
		ring->next_to_use++;
	}
	return 0;
}

int main(void)
{
	static struct rx_ring ring;
	struct page_pool_params params = { .flags = PP_FLAG_DMA_MAP, .pool_size = RING, .nid = NUMA_NO_NODE,
					   .dma_dir = DMA_FROM_DEVICE };
	struct page_pool_stats stats = { 0 };
	unsigned long dropped = 0, redirected = 0, passed = 0;

	ring.pool = page_pool_create(&params);
	if (IS_ERR(ring.pool))
		return 1;
	if (rx_refill(&ring, RING) != 0)
		return 1;
	for (int poll = 0; poll < 1000; poll++) {
		/* 64 packets: dropped, redirected, or kept by a socket. */
		for (int i = 0; i < 64; i++) {
			struct page *page = ring.pages[ring.next_to_clean++ % RING];

			if (i % 4 != 0) {
				page_pool_recycle_direct(ring.pool, page);
				dropped++;
			} else if (i % 8 != 0) {
				page_pool_put_full_page(ring.pool, page, false);
				redirected++;
			} else {
				get_page(page);
				page_pool_put_full_page(ring.pool, page, true);
				put_page(page);
				passed++;
			}
		}
		if (rx_refill(&ring, 64) != 0)
			return 1;
	}
	page_pool_get_stats(ring.pool, &stats);
	printf("page_pool: %lu dropped, %lu redirected, %lu passed\n", dropped, redirected, passed);
	printf("page_pool: fast:%llu cached:%llu ring:%llu released_refcnt:%llu inflight:%d\n", stats.alloc_stats.fast,
	       stats.recycle_stats.cached, stats.recycle_stats.ring, stats.recycle_stats.released_refcnt,
	       page_pool_inflight(ring.pool, true));
	for (int i = 0; i < RING; i++)
		page_pool_put_full_page(ring.pool, ring.pages[ring.next_to_clean++ % RING], false);
	page_pool_destroy(ring.pool);
	return 0;
}
