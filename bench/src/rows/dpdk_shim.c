/*
 * What the row rte-mempool needs of DPDK. A mempool's fast path is inline in DPDK's headers, so the loops that are
 * timed stand here, in C, as a DPDK program would compile them.
 *
 * Objects are pages: 4096 bytes at an address aligned to 4096. A mempool puts a header in front of each object, so
 * each object's slot is two pages long and begins just before a page boundary.
 */
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>

#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_lcore.h>
#include <rte_mempool.h>

#define PAGE 4096u
#define SLOT (2u * PAGE)
#define HEADER RTE_CACHE_LINE_SIZE
/* Objects a call; larger requests than the cache would pass it by. */
#define AT_ONCE 64u
#define CACHE 512u

struct pmb_pool {
	struct rte_mempool *pool;
	void *memory;
	size_t bytes;
};

/* Starts the environment on one processor, without huge pages, files or root. Returns 0 or a negative errno. */
int pmb_dpdk_init(unsigned int cpu)
{
	char lcores[32];
	snprintf(lcores, sizeof(lcores), "0@%u", cpu);
	char *args[] = { "pagemill-bench", "--no-huge", "--no-shconf", "--no-pci", "--no-telemetry", "--iova-mode=va",
			 "-m", "128", "--lcores", lcores, "--log-level=*:error", NULL };
	int n = (int)(sizeof(args) / sizeof(args[0])) - 1;
	return rte_eal_init(n, args) < 0 ? -rte_errno : 0;
}

/* Gives the calling thread a number, without which it would have no cache. 1: it got one, 0: it had one. */
int pmb_dpdk_thread_enter(void)
{
	if (rte_lcore_id() != LCORE_ID_ANY)
		return 0;
	return rte_thread_register() < 0 ? -rte_errno : 1;
}

void pmb_dpdk_thread_leave(void)
{
	rte_thread_unregister();
}

void pmb_dpdk_pool_free(struct pmb_pool *p)
{
	rte_mempool_free(p->pool);
	if (p->memory != MAP_FAILED)
		munmap(p->memory, p->bytes);
}

/* A pool of n pages with a cache for each thread. Returns 0 or a negative errno. */
int pmb_dpdk_pool_new(struct pmb_pool *p, unsigned int n)
{
	static unsigned int serial;
	char name[RTE_MEMPOOL_NAMESIZE];

	snprintf(name, sizeof(name), "pmb%u", __atomic_fetch_add(&serial, 1, __ATOMIC_RELAXED));
	p->memory = MAP_FAILED;
	p->pool = rte_mempool_create_empty(name, n, SLOT - HEADER, CACHE, 0, SOCKET_ID_ANY,
					   RTE_MEMPOOL_F_NO_SPREAD | RTE_MEMPOOL_F_NO_IOVA_CONTIG);
	if (p->pool == NULL)
		return -rte_errno;
	if (p->pool->header_size + p->pool->elt_size + p->pool->trailer_size != SLOT ||
	    p->pool->header_size != HEADER) {
		pmb_dpdk_pool_free(p);
		return -ENOTSUP;
	}
	p->bytes = (size_t)n * SLOT + PAGE + SLOT;
	p->memory = mmap(NULL, p->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p->memory == MAP_FAILED) {
		pmb_dpdk_pool_free(p);
		return -ENOMEM;
	}
	char *first_header = (char *)p->memory + PAGE - HEADER;
	int added = rte_mempool_populate_iova(p->pool, first_header, RTE_BAD_IOVA, (size_t)n * SLOT, NULL, NULL);
	if (added != (int)n) {
		pmb_dpdk_pool_free(p);
		return added < 0 ? added : -ENOMEM;
	}
	return 0;
}

/* A pool of n blocks as DPDK lays them out when nobody says how. Returns 0 or a negative errno. */
int pmb_dpdk_blocks_new(struct pmb_pool *p, unsigned int n, unsigned int bytes)
{
	static unsigned int serial;
	char name[RTE_MEMPOOL_NAMESIZE];

	snprintf(name, sizeof(name), "pmbb%u", __atomic_fetch_add(&serial, 1, __ATOMIC_RELAXED));
	p->memory = MAP_FAILED;
	p->bytes = 0;
	p->pool = rte_mempool_create(name, n, bytes, CACHE, 0, NULL, NULL, NULL, NULL, SOCKET_ID_ANY, 0);
	return p->pool == NULL ? -rte_errno : 0;
}

/* What one block takes: header, block and trailer. */
unsigned int pmb_dpdk_block_bytes(const struct pmb_pool *p)
{
	return p->pool->header_size + p->pool->elt_size + p->pool->trailer_size;
}

static inline int take(struct rte_mempool *pool, void **pages, unsigned int n)
{
	unsigned int done = 0;
	if (n == 1)
		return rte_mempool_get(pool, pages);
	while (done < n) {
		unsigned int batch = RTE_MIN(n - done, AT_ONCE);
		if (rte_mempool_get_bulk(pool, pages + done, batch) != 0)
			return -ENOENT;
		done += batch;
	}
	return 0;
}

static inline void put(struct rte_mempool *pool, void *const *pages, unsigned int n)
{
	unsigned int done = 0;
	if (n == 1) {
		rte_mempool_put(pool, pages[0]);
		return;
	}
	while (done < n) {
		unsigned int batch = RTE_MIN(n - done, AT_ONCE);
		rte_mempool_put_bulk(pool, pages + done, batch);
		done += batch;
	}
}

int pmb_dpdk_take(const struct pmb_pool *p, void **pages, unsigned int n)
{
	return take(p->pool, pages, n);
}

void pmb_dpdk_put(const struct pmb_pool *p, void *const *pages, unsigned int n)
{
	put(p->pool, pages, n);
}

/* reps times n pages out and back. */
int pmb_dpdk_batch(const struct pmb_pool *p, void **pages, unsigned int n, size_t reps)
{
	int rc = 0;
	for (size_t i = 0; i < reps; i++) {
		rc |= take(p->pool, pages, n);
		/* The caller's pages are used in between, for all that the compiler knows. */
		__asm__ volatile("" : : "r"(pages) : "memory");
		put(p->pool, pages, n);
	}
	return rc;
}

static inline int take_singly(struct rte_mempool *pool, void **pages, unsigned int n)
{
	int rc = 0;
	for (unsigned int at = 0; at < n; at++)
		rc |= rte_mempool_get(pool, &pages[at]);
	return rc;
}

/* n pages, one call each. Pages that were got before it fell short stay with the caller. */
int pmb_dpdk_take_singly(const struct pmb_pool *p, void **pages, unsigned int n)
{
	return take_singly(p->pool, pages, n);
}

void pmb_dpdk_put_singly(const struct pmb_pool *p, void *const *pages, unsigned int n)
{
	for (unsigned int at = 0; at < n; at++)
		rte_mempool_put(p->pool, pages[at]);
}

/* reps times n pages out, then back in the order of `back`, which has the places in `pages`: one by one, or AT_ONCE
 * gathered and put with one call. */
int pmb_dpdk_orders(const struct pmb_pool *p, void **pages, const uint16_t *back, unsigned int n, int is_bulk,
		    size_t reps)
{
	void *gathered[AT_ONCE];

	for (size_t i = 0; i < reps; i++) {
		int rc = is_bulk ? take(p->pool, pages, n) : take_singly(p->pool, pages, n);
		if (rc != 0)
			return rc;
		/* The caller's pages are used in between, for all that the compiler knows. */
		__asm__ volatile("" : : "r"(pages) : "memory");
		if (!is_bulk) {
			for (unsigned int at = 0; at < n; at++)
				rte_mempool_put(p->pool, pages[back[at]]);
			continue;
		}
		for (unsigned int done = 0; done < n; done += AT_ONCE) {
			unsigned int batch = RTE_MIN(n - done, AT_ONCE);
			for (unsigned int at = 0; at < batch; at++)
				gathered[at] = pages[back[done + at]];
			rte_mempool_put_bulk(p->pool, gathered, batch);
		}
	}
	return 0;
}

/* reps times n blocks out, then back in the same order: one by one, or AT_ONCE a call. */
int pmb_dpdk_rounds(const struct pmb_pool *p, void **blocks, unsigned int n, int is_bulk, size_t reps)
{
	int rc = 0;
	for (size_t i = 0; i < reps; i++) {
		if (is_bulk) {
			rc |= take(p->pool, blocks, n);
		} else {
			for (unsigned int at = 0; at < n; at++)
				rc |= rte_mempool_get(p->pool, &blocks[at]);
		}
		if (rc != 0)
			return rc;
		/* The caller's blocks are used in between, for all that the compiler knows. */
		__asm__ volatile("" : : "r"(blocks) : "memory");
		if (is_bulk) {
			put(p->pool, blocks, n);
		} else {
			for (unsigned int at = 0; at < n; at++)
				rte_mempool_put(p->pool, blocks[at]);
		}
	}
	return rc;
}
