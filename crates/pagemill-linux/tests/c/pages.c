/* Single pages, blocks, references, addresses, and every bulk form of today: counts, order, holes. */
#include "check.h"
#include <sys/mman.h>

#define N 300

static void single_pages_and_blocks(void) {
    struct page *page = alloc_page(GFP_KERNEL | __GFP_ZERO);
    CHECK(page && page_count(page) == 1);
    char *address = page_address(page);
    CHECK(offset_in_page(address) == 0 && virt_to_page(address + 17) == page);
    CHECK(pfn_to_page(page_to_pfn(page)) == page && page_to_pfn(page) == virt_to_pfn(address));
    CHECK(page_to_nid(page) == 0 && pfn_valid(page_to_pfn(page)));
    for (size_t at = 0; at < PAGE_SIZE; at++)
        CHECK(address[at] == 0);
    memset(address, 1, PAGE_SIZE);
    get_page(page);
    CHECK(page_count(page) == 2);
    __free_page(page);
    CHECK(page_count(page) == 1 && address[5] == 1);
    CHECK(try_get_page(page) && !put_page_testzero(page));
    put_page(page);
    CHECK(page_count(page) == 0 && !try_get_page(page));

    unsigned long zeroed = get_zeroed_page(GFP_NOWAIT);
    CHECK(zeroed && *(long *)zeroed == 0);
    free_page(zeroed);
    free_page(0);

    for (unsigned int order = 0; order <= 10; order++) {
        struct page *block = alloc_pages(GFP_KERNEL, order);
        CHECK(block && (page_to_pfn(block) & ((1UL << order) - 1)) == 0 && page_count(block) == 1);
        CHECK(order == 0 || page_count(block + 1) == 0);
        __free_pages(block, order);
        unsigned long start = __get_free_pages(GFP_ATOMIC, order);
        CHECK(start != 0);
        free_pages(start, order);
    }
    struct page *block = alloc_pages(GFP_KERNEL, 3);
    split_page(block, 3);
    for (int at = 0; at < 8; at++) {
        CHECK(page_count(block + at) == 1);
        __free_page(block + at);
    }

    /* Somebody looks at the first page while its owner frees the block: the others are free at once. */
    block = alloc_pages(GFP_KERNEL, 3);
    get_page(block);
    __free_pages(block, 3);
    CHECK(page_count(block) == 1);
    settled(1);
    put_page(block);
    settled(0);

    block = alloc_pages(GFP_KERNEL | __GFP_COMP, 3);
    CHECK(PageCompound(block) && compound_order(block) == 3 && compound_nr(block) == 8 && page_size(block) == 8 * PAGE_SIZE);
    CHECK(PageTail(block + 7) && compound_head(block + 7) == block && page_count(block + 7) == 1);
    get_page(block + 5);
    put_page(block);
    settled(8);
    put_page(block + 2);
    settled(0);
    CHECK(!PageCompound(block) && !PageTail(block + 7));

    char *exact = alloc_pages_exact(5 * PAGE_SIZE - 1, GFP_KERNEL);
    CHECK(exact && page_count(virt_to_page(exact + 4 * PAGE_SIZE)) == 1);
    settled(5);
    free_pages_exact(exact, 5 * PAGE_SIZE - 1);

    page = alloc_pages_node(0, GFP_KERNEL | __GFP_THISNODE, 0);
    CHECK(page && page_to_nid(page) == 0);
    __free_page(page);
    page = alloc_pages_node(NUMA_NO_NODE, GFP_KERNEL, 2);
    CHECK(page);
    __free_pages(page, 2);
    CHECK(num_online_nodes() == 1 && node_online(0) && !node_online(1) && node_online(numa_mem_id()));
    CHECK(!alloc_pages_node(63, GFP_KERNEL, 0)); /* Warned of. */
    CHECK(!alloc_pages(GFP_KERNEL, 19));         /* Warned of. */
    settled(0);
}

static void the_list_form_adds_at_the_head(void) {
    LIST_HEAD(list);
    struct page *old = alloc_page(GFP_KERNEL), *page;
    list_add(&old->lru, &list);
    CHECK(alloc_pages_bulk_list(GFP_KERNEL, N, &list) == N);
    unsigned long n = 0;
    list_for_each_entry(page, &list, lru) {
        CHECK(page_count(page) == 1);
        n++;
    }
    CHECK(n == N + 1 && list_last_entry(&list, struct page, lru) == old);
    struct page *newest = list_first_entry(&list, struct page, lru);
    CHECK(alloc_pages_bulk_list(GFP_KERNEL, 1, &list) == 1);
    CHECK(list_first_entry(&list, struct page, lru) != newest);
    CHECK(list_next_entry(list_first_entry(&list, struct page, lru), lru) == newest);
    CHECK(alloc_pages_bulk_list(GFP_KERNEL, 0, &list) == 0);

    /* A page that somebody else holds stays on the list, with one reference less. */
    get_page(newest);
    free_pages_bulk(&list);
    CHECK(list_first_entry(&list, struct page, lru) == newest && list_is_singular(&list) && page_count(newest) == 1);
    settled(1);
    free_pages_bulk(&list);
    CHECK(list_empty(&list));
    settled(0);
}

/* The holes of each pattern are filled by one call, in ascending order, whose result is the array's first hole. */
static void the_array_form_fills_holes(void) {
    static const char *const patterns[] = {"....PPPP", "PPP....PPP", "P.P.P.P.", "........", "PPPPPPP.", ".PPPPPPP"};
    for (size_t which = 0; which < sizeof patterns / sizeof *patterns; which++) {
        size_t n = strlen(patterns[which]);
        struct page *array[16] = {NULL};
        for (size_t at = 0; at < n; at++)
            if (patterns[which][at] == 'P')
                array[at] = (struct page *)&array[at]; /* Not looked at. */
        CHECK(alloc_pages_bulk_array(GFP_KERNEL, n, array) == n);
        for (size_t at = 0; at < n; at++)
            if (patterns[which][at] == 'P')
                CHECK(array[at] == (struct page *)&array[at]);
            else
                __free_page(array[at]);
        for (size_t at = n; at < 16; at++)
            CHECK(!array[at]);
    }
    settled(0);

    /* Slots from n on are not touched: the memory behind them is not even there. */
    char *two = mmap(NULL, 2 * PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(two != MAP_FAILED && mprotect(two + PAGE_SIZE, PAGE_SIZE, PROT_NONE) == 0);
    struct page **end = (struct page **)(two + PAGE_SIZE), **array = end - N;
    CHECK(alloc_pages_bulk_array(GFP_KERNEL, N, array) == N);
    CHECK(alloc_pages_bulk_array(GFP_KERNEL, N, array) == N); /* Full. */
    CHECK(alloc_pages_bulk_array(GFP_KERNEL, 0, end) == 0);
    struct page *kept[] = {array[N - 1], array[7], array[8]};
    array[N - 1] = NULL;
    CHECK(alloc_pages_bulk(GFP_KERNEL, N, array) == N);
    CHECK(alloc_pages_bulk_array_node(GFP_KERNEL, 0, N, array) == N && alloc_pages_bulk_node(GFP_KERNEL, 0, N, array) == N);
    array[7] = NULL;
    CHECK(alloc_pages_bulk_array_mempolicy(GFP_KERNEL, N, array) == N && alloc_pages_bulk_mempolicy(GFP_KERNEL, N, array) == N);
    array[8] = NULL;
    nodemask_t none = NODE_MASK_NONE, one = nodemask_of_node(0);
    CHECK(__alloc_pages_bulk(GFP_KERNEL, 0, &none, N, array) == 8 && !array[8]);
    CHECK(__alloc_pages_bulk(GFP_KERNEL, NUMA_NO_NODE, &one, N, array) == N);
    settled(N + 3);
    release_pages(array, N);
    settled(3);
    release_pages(kept, 3);
    munmap(two, 2 * PAGE_SIZE);
}

struct count {
    unsigned long n;
    struct page *pages[N];
};

static void take(struct page *page, void *data) {
    struct count *count = data;
    count->pages[count->n++] = page;
    /* It may allocate. */
    struct page *other = alloc_page(GFP_NOWAIT);
    CHECK(other);
    __free_page(other);
}

static void the_callback_form_hands_pages_over(void) {
    static struct count count;
    CHECK(alloc_pages_bulk_cb(GFP_KERNEL, N, take, &count) == N && count.n == N);
    release_pages(count.pages, N);
    CHECK(alloc_pages_bulk_cb(GFP_KERNEL, 0, take, &count) == 0 && count.n == N);
    struct page *pages[4];
    unsigned long n = 4;
    CHECK(alloc_pages_exact_node_multiple(0, GFP_KERNEL, &n, pages) == pages[0] && n == 4);
    release_pages(pages, 4);
    struct page *page = alloc_pages_exact_node_multiple(0, GFP_KERNEL, NULL, NULL);
    CHECK(page);
    __free_page(page);
    n = 4;
    CHECK(!alloc_pages_exact_node_multiple(40, GFP_KERNEL, &n, pages) && n == 0);
}

/* Pages of the table that are committed. */
static size_t committed(void) {
    size_t n = pagemill_linux_table.count * sizeof(struct page) / PAGE_SIZE, sum = 0;
    static unsigned char is[1024];
    CHECK(n <= sizeof is && mincore(pagemill_linux_table.pages, n * PAGE_SIZE, is) == 0);
    for (size_t at = 0; at < n; at++)
        sum += is[at] & 1;
    return sum;
}

static void the_table_is_committed_as_it_is_touched(void) {
    CHECK(pagemill_linux_table.count == 8192 && sizeof(struct page) == 64 && committed() == 0);
    struct page *page = alloc_page(GFP_KERNEL);
    CHECK(committed() == 1);
    __free_page(page);
}

/* The result of a call that comes back short is the first hole: it can be iterated to, and gone on from. */
static void the_array_form_comes_back_short(void) {
    static struct page *array[9000];
    array[10] = (struct page *)array;
    unsigned long hole = alloc_pages_bulk_array(GFP_NOWAIT, 9000, array);
    CHECK(hole > 8000 && hole < 9000 && !array[hole]);
    for (unsigned long at = 0; at < 9000; at++)
        CHECK(!array[at] == (at >= hole));
    __free_page(array[3]);
    array[3] = NULL;
    CHECK(alloc_pages_bulk_array(GFP_NOWAIT, 9000, array) == hole);
    LIST_HEAD(list);
    CHECK(alloc_pages_bulk_list(GFP_NOWAIT, 5, &list) == 0 && list_empty(&list));
    array[10] = NULL;
    release_pages(array, 9000);
    settled(0);
}

int main(void) {
    use_pages(8192);
    the_table_is_committed_as_it_is_touched();
    single_pages_and_blocks();
    the_list_form_adds_at_the_head();
    the_callback_form_hands_pages_over();
    settled(0);
    the_array_form_fills_holes();
    the_array_form_comes_back_short();
    return 0;
}
