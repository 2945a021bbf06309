/* Pages under the kernel's names: the table of `struct page`, requests, references, and what comes back.
 *
 * The table has a place for each page between the first and the last arena of one allocator. The number of references there says
 * which pages this library has handed out: a page without any is free, in a mempool's reserve, or inside a block. Whether a page may
 * be freed is still for pagemill.h to say: it knows each page's state and order, and what it refuses keeps its reference. */
#include "internal.h"
#include <limits.h>
#include <linux/topology.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

struct pagemill_linux_table pagemill_linux_table;

#define MAX_ARENAS 64
static struct pagemill_arena arenas[MAX_ARENAS];
static size_t n_arenas;
static struct pagemill_allocator *the_allocator;
unsigned long pagemill_linux_faults;
bool pagemill_linux_init_on_alloc;
static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;

void pagemill_linux_warn(const char *file, int line, const char *function, const char *format, ...) {
    char text[256] = "";
    if (format) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(text, sizeof text, format, arguments);
        va_end(arguments);
    }
    __atomic_fetch_add(&pagemill_linux_faults, 1, __ATOMIC_RELAXED);
    dprintf(STDERR_FILENO, "WARNING: %s:%d at %s%s%s\n", file, line, function, *text ? ": " : "", text);
}

void pagemill_linux_bug(const char *file, int line, const char *function) {
    dprintf(STDERR_FILENO, "kernel BUG at %s:%d, in %s\n", file, line, function);
    abort();
}

/* With `making` held. */
static enum pagemill_error adopt(struct pagemill_allocator *allocator) {
    n_arenas = pagemill_arenas(allocator, arenas, MAX_ARENAS);
    if (n_arenas == 0)
        return PAGEMILL_ERROR_HANDLE;
    if (n_arenas > MAX_ARENAS)
        return PAGEMILL_ERROR_INVALID;
    unsigned long first = ULONG_MAX, end = 0;
    for (size_t at = 0; at < n_arenas; at++) {
        unsigned long pfn = virt_to_pfn(arenas[at].start);
        first = pfn < first ? pfn : first;
        end = pfn + arenas[at].pages > end ? pfn + arenas[at].pages : end;
    }
    size_t size = (end - first) * sizeof(struct page);
    struct page *pages =
        mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED)
        return PAGEMILL_ERROR_SYSTEM;
    /* A huge page of the table would be committed by the first touch, for 32768 pages. */
    madvise(pages, size, MADV_NOHUGEPAGE);
    pagemill_linux_table = (struct pagemill_linux_table){pages, first, end - first};
    __atomic_store_n(&the_allocator, allocator, __ATOMIC_RELEASE);
    return PAGEMILL_ERROR_NONE;
}

enum pagemill_error pagemill_linux_use(struct pagemill_allocator *allocator) {
    pthread_mutex_lock(&making);
    enum pagemill_error error = the_allocator ? PAGEMILL_ERROR_INVALID : adopt(allocator);
    pthread_mutex_unlock(&making);
    return error;
}

struct pagemill_allocator *pagemill_linux_allocator(void) {
    struct pagemill_allocator *allocator = __atomic_load_n(&the_allocator, __ATOMIC_ACQUIRE);
    if (likely(allocator))
        return allocator;
    pthread_mutex_lock(&making);
    /* Of its own: to that of the whole process, anybody may add arenas. */
    if (!the_allocator && pagemill_allocator_create(NULL, &allocator) == PAGEMILL_ERROR_NONE && adopt(allocator))
        pagemill_allocator_release(allocator);
    pthread_mutex_unlock(&making);
    return the_allocator;
}

unsigned long pagemill_linux_nodes(void) {
    unsigned long nodes = 0;
    if (pagemill_linux_allocator())
        for (size_t at = 0; at < n_arenas; at++)
            nodes |= 1UL << arenas[at].node;
    return nodes;
}

int page_to_nid(const struct page *page) {
    for (size_t at = 0; at < n_arenas; at++)
        if (page_to_pfn(page) - virt_to_pfn(arenas[at].start) < arenas[at].pages)
            return (int)arenas[at].node;
    return NUMA_NO_NODE;
}

int numa_node_id(void) {
    unsigned int node;
    return getcpu(NULL, &node) == 0 && node < MAX_NUMNODES ? (int)node : 0;
}

int numa_mem_id(void) {
    int node = numa_node_id();
    return node_online(node) ? node : __builtin_ctzl(pagemill_linux_nodes() | 1UL << (MAX_NUMNODES - 1));
}

/* The flags of pagemill.h. */
uint32_t pagemill_linux_flags(gfp_t gfp) {
    uint32_t flags = gfp & ((1U << 16) - 1) & ~(uint32_t)PAGEMILL_GFP_ACCOUNT;
    if (pagemill_linux_init_on_alloc)
        flags |= PAGEMILL_GFP_ZERO;
    if (gfp & __GFP_DMA)
        flags |= PAGEMILL_GFP_DMA32;
    if (!(gfp & __GFP_DIRECT_RECLAIM))
        flags &= ~(__GFP_IO | __GFP_FS | __GFP_NORETRY | __GFP_RETRY_MAYFAIL);
    else if (!(gfp & __GFP_IO))
        flags &= ~__GFP_FS;
    return flags;
}

static void make_compound(struct page *head, unsigned int order) {
    for (unsigned long at = 1; at < 1UL << order; at++)
        head[at].compound_head = (unsigned long)head | 1;
    head->flags = 1UL << PG_head;
}

static void unmake_compound(struct page *head) {
    for (unsigned long at = 1; at < 1UL << head->compound_order; at++)
        head[at].compound_head = 0;
    head->flags = 0;
}

/* A block is no compound page any more, and no pool's. */
void pagemill_linux_take_back(struct page *page) {
    if (PageHead(page))
        unmake_compound(page);
    page->pp = NULL;
    page->private = 0;
}

static void begin(struct page *page, unsigned int order) {
    page->flags = 0;
    page->compound_head = 0;
    page->compound_order = order;
    page->mapping = NULL;
    page->private = 0;
    set_page_count(page, 1);
}

/* A block becomes its new owner's. Null if it has no place in the table. */
struct page *pagemill_linux_hand_out(void *block, unsigned int order, gfp_t gfp) {
    if (WARN_ONCE(!virt_addr_valid(block), "an arena was added after the first request")) {
        pagemill_free_pages(block, order);
        return NULL;
    }
    struct page *page = virt_to_page(block);
    begin(page, order);
    if (order > 0 && (gfp & __GFP_COMP))
        make_compound(page, order);
    return page;
}

struct page *alloc_pages(gfp_t gfp, unsigned int order) {
    struct pagemill_allocator *allocator = pagemill_linux_allocator();
    void *block;
    if (order == 0) {
        block = pagemill_alloc_page(allocator, pagemill_linux_flags(gfp));
    } else {
        enum pagemill_error error = pagemill_alloc_pages(allocator, pagemill_linux_flags(gfp), order, &block);
        WARN_ONCE(error >= PAGEMILL_ERROR_ARGUMENT, "a request for a block of order %u is refused: %s", order,
                  pagemill_strerror(error));
    }
    return block ? pagemill_linux_hand_out(block, order, gfp) : NULL;
}

/* Where the pages of a bulk request go. */
struct delivery {
    gfp_t gfp;
    unsigned int order;
    unsigned long n;
    struct list_head *list;
    struct page **array;
    /* No slot of the array before this one is empty. */
    long at;
    void (*each)(struct page *page, void *data);
    void *data;
};

static void deliver(void *block, void *user) {
    struct delivery *to = user;
    struct page *page = pagemill_linux_hand_out(block, to->order, to->gfp);
    if (!page)
        return;
    to->n++;
    if (to->array) {
        while (to->array[to->at])
            to->at++;
        to->array[to->at++] = page;
    } else if (to->list) {
        list_add(&page->lru, to->list);
    } else {
        to->each(page, to->data);
    }
}

unsigned long pagemill_linux_bulk(gfp_t gfp, unsigned int order, int nid, const nodemask_t *nodes, long n,
                                  struct list_head *list, struct page **array,
                                  void (*each)(struct page *page, void *data), void *data) {
    struct delivery to = {gfp, order, 0, list, array, 0, each, data};
    bool is_count = n >= 0 && n <= INT_MAX;
    long missing = n;
    if (n == 0 || WARN_ONCE(!list && !array && !each, "a bulk request has nowhere to put its pages"))
        return 0;
    if (array && is_count) {
        missing = 0;
        for (long at = n - 1; at >= 0; at--)
            if (!array[at]) {
                missing++;
                to.at = at;
            }
        if (missing == 0)
            return (unsigned long)n;
    }
    struct pagemill_allocator *allocator = pagemill_linux_allocator();
    struct pagemill_bulk request = pagemill_bulk_up_to(missing, pagemill_linux_flags(gfp));
    request.order = order;
    request.nodes = nodes ? nodes->bits[0] & pagemill_linux_nodes() : 0;
    if (nodes && !request.nodes)
        return (unsigned long)to.at;
    if (nid != NUMA_NO_NODE) {
        if (WARN_ONCE(!node_online(nid), "node %d has no memory", nid))
            return (unsigned long)to.at;
        request.policy = PAGEMILL_POLICY_PREFERRED;
        request.policy_nodes = 1UL << nid;
        if (gfp & __GFP_THISNODE) {
            request.gfp &= ~(uint32_t)PAGEMILL_GFP_THISNODE;
            request.nodes = (request.nodes ? request.nodes : ~0UL) & 1UL << nid;
        }
    }
    /* What is no count is refused, and warned of once, by this call. */
    enum pagemill_error error = pagemill_alloc_pages_bulk_callback(allocator, &request, deliver, &to, NULL);
    WARN_ONCE(error >= PAGEMILL_ERROR_ARGUMENT && error != PAGEMILL_ERROR_COUNT, "a bulk request is refused: %s",
              pagemill_strerror(error));
    if (!array || !is_count)
        return to.n;
    while (to.at < n && array[to.at])
        to.at++;
    return (unsigned long)to.at;
}

struct page *pagemill_linux_block(gfp_t gfp, unsigned int order, int nid, const nodemask_t *nodes) {
    struct page *page = NULL;
    pagemill_linux_bulk(gfp, order, nid, nodes, 1, NULL, &page, NULL, NULL);
    return page;
}

struct page *alloc_pages_node(int nid, gfp_t gfp, unsigned int order) {
    return nid == NUMA_NO_NODE ? alloc_pages(gfp, order) : pagemill_linux_block(gfp, order, nid, NULL);
}

static void into_next(struct page *page, void *data) {
    struct page ***next = data;
    *(*next)++ = page;
}

struct page *alloc_pages_exact_node_multiple(int nid, gfp_t gfp, unsigned long *n, struct page **array) {
    struct page *page = NULL;
    unsigned long one = 1;
    if (!n) {
        n = &one;
        array = &page;
    }
    struct page **next = array;
    *n = pagemill_linux_bulk(gfp | __GFP_THISNODE, 0, nid, NULL, (long)*n, NULL, NULL, array ? into_next : NULL, &next);
    return *n > 0 ? array[0] : NULL;
}

unsigned long __get_free_pages(gfp_t gfp, unsigned int order) {
    struct page *page = alloc_pages(gfp, order);
    return page ? (unsigned long)page_address(page) : 0;
}

void *alloc_pages_exact(size_t size, gfp_t gfp) {
    void *start = NULL;
    size_t n = PAGE_ALIGN(size) >> PAGE_SHIFT;
    enum pagemill_error error = pagemill_alloc_contig(pagemill_linux_allocator(), pagemill_linux_flags(gfp), n, &start);
    WARN_ONCE(error >= PAGEMILL_ERROR_ARGUMENT, "a request for %zu bytes is refused: %s", size, pagemill_strerror(error));
    for (size_t at = 0; start && at < n; at++)
        pagemill_linux_hand_out((char *)start + (at << PAGE_SHIFT), 0, gfp);
    return start;
}

/* Says that a page was not freed, and why. */
void pagemill_linux_refused(const char *function, const struct page *page, enum pagemill_error error) {
    __atomic_fetch_add(&pagemill_linux_faults, 1, __ATOMIC_RELAXED);
    dprintf(STDERR_FILENO, "BUG: Bad page state: %s of page %p is refused: %s\n", function, (const void *)page,
            pagemill_strerror(error));
}

bool pagemill_linux_is_page(const struct page *page) {
    unsigned long at = (unsigned long)page - (unsigned long)pagemill_linux_table.pages;
    return at % sizeof(struct page) == 0 && at / sizeof(struct page) < pagemill_linux_table.count;
}

/* Tells the function of `pagemill_on_misuse` too, where no call of pagemill.h would. No page has an odd address: this frees nothing. */
enum pagemill_error pagemill_linux_report(const struct page *page) {
    return pagemill_free_page((void *)((unsigned long)page | 1));
}

/* Drops a reference of a page that has some. Returns how many are left, or -1 if it has none: then it is refused. */
static int drop(const char *function, struct page *page, unsigned int order) {
    enum pagemill_error error;
    if (!pagemill_linux_is_page(page)) {
        pagemill_linux_refused(function, page, pagemill_linux_report(page));
        return -1;
    }
    int count = page_ref_count(page);
    do {
        if (count <= 0) {
            /* pagemill.h knows whether the page is free, inside a block, or none. A page of a reserve it would take for handed out. */
            if (READ_ONCE(page->flags) >> PG_mempool & 1) {
                pagemill_linux_report(page);
                error = PAGEMILL_ERROR_DOUBLE_FREE;
            } else {
                error = pagemill_free_pages(page_address(page), order);
            }
            if (error != PAGEMILL_ERROR_NONE)
                pagemill_linux_refused(function, page, error);
            return -1;
        }
    } while (!__atomic_compare_exchange_n(&page->_refcount.counter, &count, count - 1, false, __ATOMIC_ACQ_REL,
                                          __ATOMIC_ACQUIRE));
    return count - 1;
}

/* Takes the only reference of a page from its owner, for a mempool. Refused, if it has none, or others. The flag comes first: a page
 * without references and without it may be freed. */
bool pagemill_linux_claim(const char *function, struct page *page) {
    int one = 1;
    unsigned long flag = 1UL << PG_mempool;
    if (pagemill_linux_is_page(page) && !(__atomic_fetch_or(&page->flags, flag, __ATOMIC_ACQ_REL) & flag)) {
        if (__atomic_compare_exchange_n(&page->_refcount.counter, &one, 0, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return true;
        __atomic_fetch_and(&page->flags, ~flag, __ATOMIC_ACQ_REL);
        if (one > 1) {
            pagemill_linux_report(page);
            pagemill_linux_refused(function, page, PAGEMILL_ERROR_MISUSE);
            return false;
        }
    }
    drop(function, page, 0);
    return false;
}

/* Frees a block without references, or gives it its reference back. */
static void free_block(const char *function, struct page *page, unsigned int order) {
    if (PageHead(page) && order == page->compound_order)
        unmake_compound(page);
    enum pagemill_error error = pagemill_free_pages(page_address(page), order);
    if (error != PAGEMILL_ERROR_NONE) {
        set_page_count(page, 1);
        pagemill_linux_refused(function, page, error);
    }
}

void __free_pages(struct page *page, unsigned int order) {
    /* Somebody else holds the first page of a block that is no compound page: the others are free. */
    if (order > 0 && pagemill_linux_is_page(page) && !PageHead(page) && page_ref_count(page) > 1) {
        enum pagemill_error error = pagemill_split(page_address(page), order);
        if (error != PAGEMILL_ERROR_NONE) {
            pagemill_linux_refused(__func__, page, error);
            return;
        }
        page->compound_order = 0;
        pagemill_free_run((char *)page_address(page) + PAGE_SIZE, (1UL << order) - 1, 0, NULL);
        order = 0;
    }
    if (drop(__func__, page, order) == 0)
        free_block(__func__, page, order);
}

void free_pages(unsigned long address, unsigned int order) {
    if (address)
        __free_pages(virt_to_page((void *)address), order);
}

void put_page(struct page *page) {
    if (pagemill_linux_is_page(page))
        page = compound_head(page);
    if (drop(__func__, page, 0) == 0)
        free_block(__func__, page, compound_order(page));
}

void split_page(struct page *page, unsigned int order) {
    enum pagemill_error error = PAGEMILL_ERROR_FOREIGN;
    if (pagemill_linux_is_page(page) && !PageCompound(page))
        error = pagemill_split(page_address(page), order);
    if (error != PAGEMILL_ERROR_NONE) {
        pagemill_linux_refused(__func__, page, error);
        return;
    }
    page->compound_order = 0;
    for (unsigned long at = 1; at < 1UL << order; at++)
        begin(page + at, 0);
}

/* Pages without references, on their way to being freed in one call. */
struct batch {
    const char *function;
    /* Gets back what is refused, or null. */
    struct list_head *list;
    long n;
    void *pages[64];
};

static void flush(struct batch *batch) {
    enum pagemill_error error = pagemill_free_pages_bulk(batch->pages, batch->n, 0, NULL);
    for (long at = 0; error != PAGEMILL_ERROR_NONE && at < batch->n; at++) {
        if (!batch->pages[at])
            continue;
        struct page *page = virt_to_page(batch->pages[at]);
        set_page_count(page, 1);
        if (batch->list)
            list_add_tail(&page->lru, batch->list);
        pagemill_linux_refused(batch->function, page, error);
    }
    batch->n = 0;
}

static void into_batch(struct batch *batch, struct page *page) {
    if (PageHead(page)) {
        free_block(batch->function, page, page->compound_order);
        return;
    }
    batch->pages[batch->n++] = page_address(page);
    if (batch->n == 64)
        flush(batch);
}

void free_pages_bulk(struct list_head *list) {
    LIST_HEAD(refused);
    struct batch batch = {__func__, &refused, 0, {NULL}};
    struct page *page, *after;
    list_for_each_entry_safe(page, after, list, lru) {
        if (drop(__func__, page, 0) == 0) {
            list_del(&page->lru);
            into_batch(&batch, page);
        }
    }
    flush(&batch);
    list_splice_tail(&refused, list);
}

void release_pages(struct page **pages, int n) {
    struct batch batch = {__func__, NULL, 0, {NULL}};
    for (int at = 0; at < n; at++) {
        struct page *page = pages[at];
        if (!page)
            continue;
        if (pagemill_linux_is_page(page))
            page = compound_head(page);
        if (drop(__func__, page, 0) == 0)
            into_batch(&batch, page);
    }
    flush(&batch);
}

void free_pages_exact(void *start, size_t size) {
    struct batch batch = {__func__, NULL, 0, {NULL}};
    for (size_t at = 0; at < PAGE_ALIGN(size); at += PAGE_SIZE) {
        struct page *page = virt_to_page((char *)start + at);
        if (drop(__func__, page, 0) == 0)
            into_batch(&batch, page);
    }
    flush(&batch);
}
