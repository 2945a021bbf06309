/* A driver's descriptor pool: all blocks of a size out, then all back, a hundred times. Times are microseconds of all of them, as the
 * kernel's own test has them.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include <linux/dmapool.h>
#include <stdio.h>
#include <time.h>

#define ROUNDS 100
#define MOST 8192

struct shape {
	size_t bytes, align, boundary;
	int count;
};

static const struct shape shapes[] = {
	{ 16, 16, 0, 8192 },	 { 64, 64, 0, 8192 },	  { 256, 256, 0, 8192 },
	{ 1024, 1024, 0, 2048 }, { 4096, 4096, 0, 1024 }, { 68, 32, 4096, 8192 },
};

static void *descriptors[MOST];
static dma_addr_t addresses[MOST];

/* Returns how many were out. */
static int all_out_and_back(struct dma_pool *pool, int count)
{
	int out = 0;

	while (out < count && (descriptors[out] = dma_pool_alloc(pool, GFP_KERNEL, &addresses[out])) != NULL)
		out++;
	for (int at = 0; at < out; at++)
		dma_pool_free(pool, descriptors[at], addresses[at]);
	return out;
}

static long long now_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000LL + now.tv_nsec / 1000;
}

int main(void)
{
	for (const struct shape *shape = shapes; shape < shapes + sizeof(shapes) / sizeof(*shapes); shape++) {
		struct dma_pool *pool = dma_pool_create("descriptors", NULL, shape->bytes, shape->align, shape->boundary);
		long long begin = now_us();

		for (int round = 0; round < ROUNDS; round++)
			if (!pool || all_out_and_back(pool, shape->count) != shape->count)
				return 1;
		printf("dmapool test: size:%-4zu align:%-4zu blocks:%-4d time:%lld\n", shape->bytes, shape->align, shape->count,
		       now_us() - begin);
		dma_pool_destroy(pool);
	}
	return 0;
}
