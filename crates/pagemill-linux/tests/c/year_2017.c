/* Written by the interfaces of 2013 (readahead with several pages a call) and 2017 (the bulk interface with an order and a zonelist). */
#include <linux/gfp.h>
#include <linux/list.h>
#include <linux/mm.h>
#include <linux/radix-tree.h>
/* What says that it worked. */
#include "check.h"

static RADIX_TREE(page_tree, GFP_ATOMIC);

/* 2013: the holes of a window of readahead, each run of holes by one call. */
static unsigned long read_ahead(unsigned long offset, unsigned long nr_to_read)
{
	struct page *pages[64];
	unsigned long page_idx = 0, calls = 0;

	while (page_idx < nr_to_read) {
		unsigned long at = offset + page_idx, nr_pages, i;
		unsigned long end = radix_tree_next_present(&page_tree, at, nr_to_read - page_idx);

		nr_pages = end - at;
		if (!nr_pages) {
			page_idx++;
			continue;
		}
		if (!alloc_pages_exact_node_multiple(numa_node_id(), GFP_KERNEL | __GFP_COLD | __GFP_NORETRY | __GFP_NOWARN,
						     &nr_pages, pages))
			break;
		calls++;
		for (i = 0; i < nr_pages; i++) {
			pages[i]->index = at + i;
			CHECK(radix_tree_insert(&page_tree, at + i, pages[i]) == 0);
		}
		page_idx += nr_pages;
	}
	return calls;
}

static void of_2013(void)
{
	struct page *page = alloc_pages_exact_node(0, GFP_KERNEL | __GFP_WAIT, 0);
	unsigned long i;

	CHECK(page && radix_tree_insert(&page_tree, 5, page) == 0);
	page->index = 5;
	CHECK(read_ahead(0, 32) == 2);
	CHECK(radix_tree_next_hole(&page_tree, 0, 100) == 32 && radix_tree_prev_hole(&page_tree, 31, 100) == 0);
	CHECK(radix_tree_prev_present(&page_tree, 40, 20) == 31);
	CHECK(read_ahead(0, 32) == 0);
	for (i = 0; i < 32; i++) {
		page = radix_tree_delete(&page_tree, i);
		CHECK(page && page->index == i);
		put_page(page);
	}
	settled(0);
}

/* 2017: list, order, zonelist. */
static void of_2017(void)
{
	struct zonelist *zonelist = node_zonelist(numa_mem_id(), GFP_KERNEL);
	nodemask_t nodes = nodemask_of_node(0);
	LIST_HEAD(list);
	LIST_HEAD(blocks);
	struct page *page, *next;

	CHECK(alloc_pages_bulk(GFP_KERNEL, 0, 100, &list) == 100);
	CHECK(__alloc_pages_bulk(GFP_KERNEL, 0, zonelist, 50, &list) == 50);
	CHECK(__alloc_pages_bulk_nodemask(GFP_ATOMIC, 0, zonelist, &nodes, 10, &list) == 10);
	free_pages_bulk(&list);
	CHECK(list_empty(&list));
	CHECK(alloc_pages_bulk(GFP_KERNEL, 2, 10, &blocks) == 10);
	settled(40);
	list_for_each_entry_safe(page, next, &blocks, lru) {
		list_del(&page->lru);
		__free_pages(page, 2);
	}
	page = __alloc_pages(GFP_KERNEL, 1, zonelist);
	CHECK(page);
	__free_pages(page, 1);
	settled(0);
}

int main(void)
{
	use_pages(1024);
	of_2013();
	of_2017();
	return 0;
}
