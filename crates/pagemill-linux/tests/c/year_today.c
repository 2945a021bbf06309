/* Written by the interfaces of Linux 6.19: alloc_pages_bulk is the array form, mempools fill arrays, page_pool takes netmem. */
#include <linux/err.h>
#include <linux/gfp.h>
#include <linux/mempool.h>
#include <linux/mm.h>
#include <net/page_pool/helpers.h>
/* What says that it worked. */
#include "check.h"

int main(void)
{
	struct page *pages[64] = { NULL };
	struct page_pool_params pp_params = { .pool_size = 64, .nid = NUMA_NO_NODE };
	unsigned int offset, size = 512, freed;
	struct page_pool *pp;
	struct mempool *pool;
	netmem_ref netmem;

	use_pages(1024);
	CHECK(alloc_pages_bulk(GFP_KERNEL, 32, pages) == 32);
	CHECK(alloc_pages_bulk_node(GFP_KERNEL, numa_mem_id(), 48, pages) == 48);
	CHECK(alloc_pages_bulk_mempolicy(GFP_KERNEL, 64, pages) == 64);
	CHECK(__alloc_pages_bulk(GFP_KERNEL, numa_mem_id(), NULL, 64, pages) == 64);
	release_pages(pages, 64);
	memset(pages, 0, sizeof(pages));

	/* What the page allocator has at once, and the rest by way of the pool. */
	pool = mempool_create_page_pool(64, 0);
	CHECK(pool);
	freed = alloc_pages_bulk(GFP_NOWAIT, 40, pages);
	CHECK(freed == 40 && mempool_alloc_bulk(pool, (void **)pages, 64, freed) == 0 && pages[63]);
	freed = mempool_free_bulk(pool, (void **)pages, 64);
	release_pages(pages + freed, 64 - freed);
	mempool_destroy(pool);

	pp = page_pool_create(&pp_params);
	CHECK(!IS_ERR(pp));
	netmem = page_to_netmem(page_pool_dev_alloc(pp, &offset, &size));
	CHECK(netmem && offset == 0);
	page_pool_put_netmem_bulk(&netmem, 1);
	page_pool_destroy(pp);
	settled(0);
	return 0;
}
