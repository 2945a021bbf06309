/* Frees garbage, twice, with the wrong order, from other threads and after fork. Each is refused, and changes nothing. */
#include "check.h"
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

static int reports;

static void on_misuse(const struct pagemill_misuse *report) {
    CHECK(report->error >= 300 && report->error < 400);
    reports++;
}

static struct pagemill_allocator *allocator;

static void garbage(void) {
    int on_stack = 0;
    char *on_heap = (char *)malloc(3 * PAGEMILL_PAGE_SIZE);
    char *aligned = on_heap + PAGEMILL_PAGE_SIZE - (uintptr_t)on_heap % PAGEMILL_PAGE_SIZE;
    char *page = (char *)pagemill_alloc_page(allocator, PAGEMILL_GFP_KERNEL);
    void *never = (void *)(uintptr_t)0x7ffffffff000;
    reports = 0;
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_free_page(NULL));
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_free_page(&on_stack));
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_free_page(on_heap));
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_free_page(aligned));
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_free_page(never));
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_free_page((void *)(uintptr_t)-1));
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_free_page((void *)(uintptr_t)0x4141414141414141));
    EXPECT(PAGEMILL_ERROR_UNALIGNED, pagemill_free_page(page + 1));
    CHECK(reports == 8);
    /* A page of the allocator that was never handed out. */
    struct pagemill_arena arena;
    CHECK(pagemill_arenas(allocator, &arena, 1) == 1);
    char *other = page == (char *)arena.start ? page + PAGEMILL_PAGE_SIZE : (char *)arena.start;
    CHECK(pagemill_free_page(other) >= 300);
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_split(&on_stack, 1));
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_free_pages(on_heap, 4));
    EXPECT(PAGEMILL_ERROR_ORDER, pagemill_free_pages(page, 19));
    EXPECT(PAGEMILL_ERROR_ORDER, pagemill_free_pages(page, UINT32_MAX));
    OK(pagemill_free_page(page));
    free(on_heap);
}

static void twice(void) {
    void *page = pagemill_alloc_page(allocator, PAGEMILL_GFP_KERNEL);
    OK(pagemill_free_page(page));
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_free_page(page));
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_free_pages(page, 0));
    pagemill_drain(allocator);
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_free_page(page));

    /* In bulk: what is refused stays in its slot, everything else is freed. */
    void *slots[64] = {NULL};
    struct pagemill_bulk request = pagemill_bulk_exact(60, PAGEMILL_GFP_KERNEL);
    OK(pagemill_alloc_pages_bulk_array(allocator, &request, slots, NULL));
    slots[61] = slots[7];
    slots[62] = &request;
    void *seventh = slots[7];
    size_t freed;
    CHECK(pagemill_free_pages_bulk(slots, 64, 0, &freed) >= 300);
    CHECK(freed == 60 && slots[7] == NULL && slots[61] == seventh && slots[62] == &request && slots[63] == NULL);
    void *run;
    OK(pagemill_alloc_contig(allocator, PAGEMILL_GFP_KERNEL, 100, &run));
    OK(pagemill_free_page((char *)run + 5 * PAGEMILL_PAGE_SIZE));
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_free_run(run, 100, 0, &freed));
    CHECK(freed == 99);
    CHECK(pagemill_free_run(run, SIZE_MAX, 0, &freed) >= 300 && freed == 0);
}

static void wrong_orders(void) {
    void *block;
    OK(pagemill_alloc_pages(allocator, PAGEMILL_GFP_KERNEL, 2, &block));
    EXPECT(PAGEMILL_ERROR_WRONG_ORDER, pagemill_free_page(block));
    EXPECT(PAGEMILL_ERROR_WRONG_ORDER, pagemill_free_pages(block, 1));
    EXPECT(PAGEMILL_ERROR_WRONG_ORDER, pagemill_split(block, 3));
    EXPECT(PAGEMILL_ERROR_INSIDE, pagemill_free_page((char *)block + PAGEMILL_PAGE_SIZE));
    EXPECT(PAGEMILL_ERROR_ORDER, pagemill_alloc_pages(allocator, PAGEMILL_GFP_KERNEL, 19, &block));
    CHECK(block == NULL);
}

/* Flags, sizes and handles that cannot be. */
static void arguments(void) {
    void *page = NULL, *slots[2] = {NULL};
    EXPECT(PAGEMILL_ERROR_FLAGS, pagemill_alloc_pages(allocator, 0x80000000, 0, &page));
    EXPECT(PAGEMILL_ERROR_FLAGS, pagemill_alloc_pages(allocator, PAGEMILL_GFP_NOWAIT | PAGEMILL_GFP_NOFAIL, 0, &page));
    EXPECT(PAGEMILL_ERROR_FLAGS, pagemill_alloc_pages(allocator, 0x40, 0, &page));
    CHECK(pagemill_alloc_page(allocator, 0x80000000) == NULL && pagemill_alloc_page(NULL, 0) == NULL);
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_alloc_pages(NULL, 0, 0, &page));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_alloc_pages(allocator, 0, 0, NULL));
    struct pagemill_bulk request = pagemill_bulk_up_to(2, 0);
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_alloc_pages_bulk_array(allocator, NULL, slots, NULL));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_alloc_pages_bulk_array(allocator, &request, NULL, NULL));
    request.size = 8;
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_alloc_pages_bulk_array(allocator, &request, slots, NULL));
    /* A structure of a later version: what is not known must be 0. */
    struct {
        struct pagemill_bulk request;
        uint64_t more;
    } later;
    later.request = pagemill_bulk_up_to(2, 0);
    later.request.size = sizeof later;
    later.more = 0;
    OK(pagemill_alloc_pages_bulk_array(allocator, &later.request, slots, NULL));
    OK(pagemill_free_pages_bulk(slots, 2, 0, NULL));
    later.more = 1;
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_alloc_pages_bulk_array(allocator, &later.request, slots, NULL));
    request = pagemill_bulk_up_to(2, 0);
    request.policy = 77;
    EXPECT(PAGEMILL_ERROR_NODE, pagemill_alloc_pages_bulk_array(allocator, &request, slots, NULL));

    struct pagemill_list *list = pagemill_list_create();
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_allocator_release((struct pagemill_allocator *)(void *)list));
    OK(pagemill_list_destroy(list));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_list_destroy(list));
    CHECK(pagemill_list_length(list) == 0 && pagemill_list_pop(list) == NULL);
    struct pagemill_allocator *small = allocator_of(8);
    OK(pagemill_allocator_release(small));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_allocator_release(small));
    CHECK(pagemill_alloc_page(small, PAGEMILL_GFP_KERNEL) == NULL);
    CHECK(strcmp(pagemill_strerror(12345), "no error of Pagemill has this number") == 0);
}

static void *frees(void *page) {
    OK(pagemill_free_page(page));
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_free_page(page));
    return pagemill_alloc_page(allocator, PAGEMILL_GFP_KERNEL);
}

static void from_another_thread(void) {
    void *page = pagemill_alloc_page(allocator, PAGEMILL_GFP_KERNEL), *theirs;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, frees, page) == 0 && pthread_join(thread, &theirs) == 0);
    CHECK(theirs != NULL);
    OK(pagemill_free_page(theirs));
    CHECK(pagemill_free_page(page) >= 300);
}

/* A child has a copy of the allocator: it frees its own copy of what was handed out, once. */
static void after_fork(void) {
    char *page = (char *)pagemill_alloc_page(allocator, PAGEMILL_GFP_KERNEL), *freed;
    freed = (char *)pagemill_alloc_page(allocator, PAGEMILL_GFP_KERNEL);
    OK(pagemill_free_page(freed));
    page[0] = 1;
    pid_t child = fork();
    if (child == 0) {
        EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_free_page(freed));
        CHECK(page[0] == 1);
        page[0] = 2;
        OK(pagemill_free_page(page));
        EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_free_page(page));
        void *mine = pagemill_alloc_page(allocator, PAGEMILL_GFP_KERNEL);
        CHECK(mine != NULL);
        OK(pagemill_free_page(mine));
        _exit(0);
    }
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(page[0] == 1);
    OK(pagemill_free_page(page));
}

int main(void) {
    allocator = allocator_of(1024);
    pagemill_on_misuse(on_misuse);
    garbage();
    twice();
    arguments();
    from_another_thread();
    after_fork();
    pagemill_on_misuse(NULL);
    reports = 0;
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_free_page(NULL));
    CHECK(reports == 0);
    CHECK(stat_of(allocator, "misused") > 0 && stat_of(allocator, "allocated") == stat_of(allocator, "freed"));
    close_whole(allocator, 1024);

    /* The blocks of this one stay out: what is refused changes nothing. */
    allocator = allocator_of(64);
    wrong_orders();
    size_t out;
    EXPECT(PAGEMILL_ERROR_IN_USE, pagemill_allocator_close(allocator, &out));
    CHECK(out == 4);
    OK(pagemill_allocator_release(allocator));
    return 0;
}
