/* Written by the interfaces of 2023: pages to a function, pools of pages in bulk, dma_pool, page_pool by its new headers. */
#include <linux/dmapool.h>
#include <linux/err.h>
#include <linux/gfp.h>
#include <linux/mempool.h>
#include <linux/mm.h>
#include <net/page_pool/helpers.h>
#include <net/page_pool/types.h>
/* What says that it worked. */
#include "check.h"

struct bio {
	unsigned int nr_vecs;
	struct page *pages[256];
};

static void bio_add_page(struct page *page, void *data)
{
	struct bio *bio = data;

	bio->pages[bio->nr_vecs++] = page;
}

static unsigned int alloc_bulk(gfp_t gfp_mask, unsigned int nr, void *pool_data, struct page **page_array,
			       void (*cb)(struct page *page, void *data), void *data)
{
	(void)pool_data;
	return __alloc_pages_bulk(gfp_mask, numa_mem_id(), NULL, nr, NULL, page_array, cb, data);
}

static void free_one(void *page, void *pool_data)
{
	(void)pool_data;
	__free_page(page);
}

int main(void)
{
	static struct bio bio;
	struct page *array[256] = { NULL };
	struct page_pool_params pp_params = { .pool_size = 64, .nid = NUMA_NO_NODE };
	struct page_pool *pp;
	struct dma_pool *dma;
	mempool_t *pool;
	dma_addr_t handle;
	unsigned int offset;
	void *block;

	use_pages(1024);
	CHECK(alloc_pages_bulk_cb(GFP_KERNEL, 100, bio_add_page, &bio) == 100 && bio.nr_vecs == 100);
	CHECK(__alloc_pages_bulk(GFP_KERNEL, numa_mem_id(), NULL, 100, NULL, array) == 100);
	release_pages(bio.pages, 100);
	release_pages(array, 100);
	memset(array, 0, sizeof(array));
	bio.nr_vecs = 0;

	pool = mempool_create_pages_bulk(256, alloc_bulk, free_one, NULL);
	CHECK(pool);
	CHECK(mempool_alloc_pages_bulk_cb(pool, GFP_NOIO, 256, bio_add_page, &bio) && bio.nr_vecs == 256);
	CHECK(mempool_alloc_pages_bulk_array(pool, GFP_NOIO, 256, array));
	for (int i = 0; i < 256; i++) {
		mempool_free(bio.pages[i], pool);
		mempool_free(array[i], pool);
	}
	mempool_destroy(pool);
	settled(0);

	dma = dma_pool_create("2023", NULL, 64, 64, 0);
	block = dma_pool_zalloc(dma, GFP_KERNEL, &handle);
	CHECK(block && handle % 64 == 0);
	dma_pool_free(dma, block, handle);
	dma_pool_destroy(dma);
	pp = page_pool_create(&pp_params);
	CHECK(!IS_ERR(pp));
	array[0] = page_pool_dev_alloc_frag(pp, &offset, 2048);
	CHECK(array[0] && offset == 0);
	page_pool_put_full_page(pp, array[0], false);
	page_pool_destroy(pp);
	settled(0);
	return 0;
}
