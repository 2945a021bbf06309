/* dm-crypt's write buffer: a page for each 4 KiB that are encrypted, from a pool that always has enough for the largest write.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include <linux/mempool.h>
#include <linux/mm.h>
#include <stdio.h>

#define BIO_MAX_VECS 256

struct bio {
	unsigned int bi_size, bi_vcnt;
	struct page *bi_pages[BIO_MAX_VECS];
};

/* The pool's own source: single pages, in bulk. */
static unsigned int crypt_alloc_pages_bulk(gfp_t gfp_mask, unsigned int nr, void *pool_data, struct page **page_array,
					   void (*cb)(struct page *page, void *data), void *data)
{
	(void)pool_data;
	if (page_array)
		return alloc_pages_bulk_array(gfp_mask, nr, page_array);
	return alloc_pages_bulk_cb(gfp_mask, nr, cb, data);
}

static void crypt_page_free(void *page, void *pool_data)
{
	(void)pool_data;
	__free_page(page);
}

static void crypt_bulk_alloc_cb(struct page *page, void *data)
{
	struct bio *clone = data;

	clone->bi_pages[clone->bi_vcnt++] = page;
}

static bool crypt_alloc_buffer(mempool_t *page_pool, struct bio *clone, unsigned int size)
{
	clone->bi_vcnt = 0;
	clone->bi_size = size;
	return mempool_alloc_pages_bulk_cb(page_pool, GFP_NOIO, (size + PAGE_SIZE - 1) / PAGE_SIZE, crypt_bulk_alloc_cb,
					   clone);
}

static void crypt_free_buffer_pages(mempool_t *page_pool, struct bio *clone)
{
	for (unsigned int i = 0; i < clone->bi_vcnt; i++)
		mempool_free(clone->bi_pages[i], page_pool);
}

int main(void)
{
	static struct bio clone;
	static const unsigned int sizes[] = { 4096, 131072, 1048576, 512 };
	unsigned long writes = 0, pages = 0;
	mempool_t page_pool;

	if (mempool_init_pages_bulk(&page_pool, BIO_MAX_VECS, crypt_alloc_pages_bulk, crypt_page_free, NULL) != 0)
		return 1;
	for (int round = 0; round < 1000; round++) {
		if (!crypt_alloc_buffer(&page_pool, &clone, sizes[round % 4]))
			return 1;
		for (unsigned int i = 0; i < clone.bi_vcnt; i++)
			*(char *)page_address(clone.bi_pages[i]) = 1; /* The cipher's output. */
		writes++;
		pages += clone.bi_vcnt;
		crypt_free_buffer_pages(&page_pool, &clone);
	}
	mempool_exit(&page_pool);
	printf("dm-crypt: %lu writes, %lu pages\n", writes, pages);
	return 0;
}
