/* Readahead: the holes of a window are found run by run, and each run is one request and one read.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include <linux/gfp.h>
#include <linux/mm.h>
#include <linux/radix-tree.h>
#include <stdio.h>

#define FILE_PAGES 4096
#define WINDOW 64

static RADIX_TREE(page_tree, GFP_ATOMIC);
static unsigned long requests, pages_read;

/* The window's end is known to be within the file. Fewer pages than asked for make it shorter. */
static unsigned long do_page_cache_readahead(unsigned long offset, unsigned long nr_to_read)
{
	unsigned long at = offset, end = offset + nr_to_read, got = 0;

	while (at < end) {
		struct page *pages[WINDOW];
		unsigned long present = radix_tree_next_present(&page_tree, at, end - at), n = present - at;

		if (n > 0) {
			if (!alloc_pages_exact_node_multiple(numa_node_id(), GFP_KERNEL | __GFP_NORETRY | __GFP_NOWARN, &n, pages))
				break;
			for (unsigned long i = 0; i < n; i++) {
				pages[i]->index = at + i;
				if (radix_tree_insert(&page_tree, at + i, pages[i]) != 0)
					put_page(pages[i]);
			}
			SetPageReadahead(pages[0]);
			requests++;
			got += n;
			if (n < present - at)
				break;
		}
		at = present + 1;
	}
	pages_read += got;
	return got;
}

int main(void)
{
	unsigned long cached = 0, freed = 0;

	/* Every tenth page is there already: some other reader's. */
	for (unsigned long i = 0; i < FILE_PAGES; i += 10, cached++) {
		struct page *page = alloc_page(GFP_KERNEL);

		if (!page || radix_tree_insert(&page_tree, i, page) != 0)
			return 1;
		page->index = i;
	}
	for (unsigned long offset = 0; offset < FILE_PAGES; offset += WINDOW)
		do_page_cache_readahead(offset, WINDOW);
	for (unsigned long i = 0; i < FILE_PAGES; i++) {
		struct page *page = radix_tree_delete(&page_tree, i);

		if (!page || page->index != i)
			return 1;
		put_page(page);
		freed++;
	}
	printf("readahead: %lu pages cached, %lu read by %lu requests, %lu freed\n", cached, pages_read, requests, freed);
	return 0;
}
