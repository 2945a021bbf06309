/* An RPC server's service thread: each request consumes pages of its array, and before the next one the holes are filled by one call.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include <linux/gfp.h>
#include <linux/mm.h>
#include <stdio.h>
#include <time.h>

/* The largest request, 1 MiB, with its reply's head and a page more. */
#define RPCSVC_MAXPAGES 259

struct svc_rqst {
	struct page *rq_pages[RPCSVC_MAXPAGES];
};

static unsigned long refills, sleeps;

/* Returns when every slot has a page. */
static void svc_alloc_arg(struct svc_rqst *rqstp)
{
	unsigned long filled;

	for (filled = 0; filled < RPCSVC_MAXPAGES;) {
		unsigned long before = filled;

		filled = alloc_pages_bulk(GFP_KERNEL, RPCSVC_MAXPAGES, rqstp->rq_pages);
		refills++;
		if (filled < RPCSVC_MAXPAGES && filled == before) {
			/* No progress: another thread has to give pages back first. */
			sleeps++;
			nanosleep(&(struct timespec){ .tv_nsec = 500 * 1000 * 1000 }, NULL);
		}
	}
}

/* A READ hands its payload's pages to the network, which frees them when they are sent. */
static void svc_read(struct svc_rqst *rqstp, int first, int n)
{
	release_pages(rqstp->rq_pages + first, n);
	for (int i = first; i < first + n; i++)
		rqstp->rq_pages[i] = NULL;
}

int main(void)
{
	static struct svc_rqst rqst;
	static const int payloads[] = { 1, 16, 64, 256, 3, 128 };
	unsigned long consumed = 0;

	svc_alloc_arg(&rqst);
	for (int round = 0; round < 1000; round++) {
		int n = payloads[round % 6];

		svc_read(&rqst, 1, n);
		consumed += n;
		svc_alloc_arg(&rqst);
	}
	release_pages(rqst.rq_pages, RPCSVC_MAXPAGES);
	printf("svc_alloc_arg: %lu pages consumed, %lu refills, %lu sleeps\n", consumed, refills, sleeps);
	return 0;
}
