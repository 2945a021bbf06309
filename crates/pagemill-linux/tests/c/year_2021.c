/* Written by the interfaces of 2021: alloc_pages_bulk is the list form; lists and arrays; page_pool by its header of that year. */
#include <linux/gfp.h>
#include <linux/list.h>
#include <linux/mm.h>
#include <linux/err.h>
#include <net/page_pool.h>
/* What says that it worked. */
#include "check.h"

int main(void)
{
	struct page_pool_params pp_params = { .order = 0, .flags = PP_FLAG_DMA_MAP, .pool_size = 64, .nid = NUMA_NO_NODE,
					      .dma_dir = DMA_BIDIRECTIONAL };
	struct page *array[32] = { NULL }, *page, *next;
	struct page_pool *pool;
	LIST_HEAD(list);
	void *both[2];
	int n = 0;

	use_pages(1024);
	CHECK(alloc_pages_bulk(GFP_KERNEL, 20, &list) == 20);
	CHECK(alloc_pages_bulk_list(GFP_KERNEL, 20, &list) == 20);
	CHECK(__alloc_pages_bulk(GFP_KERNEL, numa_mem_id(), NULL, 20, &list, NULL) == 20);
	list_for_each_entry_safe(page, next, &list, lru) {
		list_del(&page->lru);
		put_page(page);
		n++;
	}
	CHECK(n == 60);
	settled(0);

	CHECK(alloc_pages_bulk_array(GFP_KERNEL, 16, array) == 16);
	__free_page(array[3]);
	array[3] = NULL;
	CHECK(__alloc_pages_bulk(GFP_KERNEL, numa_mem_id(), NULL, 32, NULL, array) == 32);
	CHECK(alloc_pages_bulk_array_node(GFP_KERNEL, NUMA_NO_NODE, 32, array) == 32);
	release_pages(array, 32);
	page = __alloc_pages(GFP_KERNEL, 0, numa_mem_id(), NULL);
	CHECK(page);
	__free_page(page);
	settled(0);

	pool = page_pool_create(&pp_params);
	CHECK(!IS_ERR(pool));
	both[0] = page_pool_dev_alloc_pages(pool);
	both[1] = page_pool_dev_alloc_pages(pool);
	page = page_pool_alloc_pages(pool, GFP_ATOMIC);
	CHECK(both[0] && both[1] && page && page_pool_get_dma_addr(page));
	page_pool_put_page_bulk(pool, both, 2);
	page_pool_release_page(pool, page);
	put_page(page);
	page = page_pool_dev_alloc_pages(pool);
	page_pool_put_page(pool, page, -1, true);
	page_pool_destroy(pool);
	settled(0);
	return 0;
}
