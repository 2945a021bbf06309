/* What must not be freed is refused, changes nothing, and is reported: on standard error, and to the function of pagemill_on_misuse. */
#include "check.h"
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static int reports;
static enum pagemill_error last;

static void note(const struct pagemill_misuse *report) {
    reports++;
    last = report->error;
}

/* The call is reported as this error, and nothing has changed. */
#define REFUSED(error, call)                  \
    do {                                      \
        int before = reports;                 \
        call;                                 \
        CHECK(reports == before + 1);         \
        CHECK(last == PAGEMILL_ERROR_##error); \
    } while (0)

static void frees_that_are_refused(void) {
    struct page *page = alloc_page(GFP_KERNEL), *block = alloc_pages(GFP_KERNEL, 2);
    struct page *compound = alloc_pages(GFP_KERNEL | __GFP_COMP, 2);
    char mine[64];
    REFUSED(WRONG_ORDER, __free_pages(page, 1));
    REFUSED(WRONG_ORDER, put_page(block));
    REFUSED(WRONG_ORDER, __free_pages(block, 3));
    REFUSED(WRONG_ORDER, __free_pages(compound, 0));
    REFUSED(INSIDE, __free_page(block + 1));
    REFUSED(INSIDE, __free_page(compound + 3));
    REFUSED(FOREIGN, __free_page((struct page *)((char *)page + 8)));
    REFUSED(FOREIGN, __free_page((struct page *)mine));
    REFUSED(FOREIGN, put_page(NULL));
    REFUSED(UNALIGNED, put_page((struct page *)page_address(page)));
    REFUSED(FOREIGN, __free_page(virt_to_page(mine)));
    REFUSED(FOREIGN, __free_page((struct page *)0x123456789abcdef0));
    CHECK(page_count(page) == 1 && page_count(block) == 1 && page_count(compound) == 1 && compound_order(compound) == 2);
    settled(9);
    get_page(block);
    REFUSED(WRONG_ORDER, __free_pages(block, 1));
    CHECK(page_count(block) == 2);
    __free_pages(block, 2);
    put_page(block);
    __free_pages(compound, 2);
    __free_page(page);
    settled(0);
    REFUSED(DOUBLE_FREE, __free_page(page));
    REFUSED(DOUBLE_FREE, put_page(page));
    REFUSED(DOUBLE_FREE, free_page((unsigned long)page_address(page)));
    REFUSED(DOUBLE_FREE, __free_pages(compound, 2));
    settled(0);

    /* In bulk: the others are freed. */
    LIST_HEAD(list);
    CHECK(alloc_pages_bulk_list(GFP_KERNEL, 200, &list) == 200);
    block = alloc_pages(GFP_KERNEL, 1);
    list_add(&block->lru, &list);
    REFUSED(WRONG_ORDER, free_pages_bulk(&list));
    CHECK(list_is_singular(&list) && list_first_entry(&list, struct page, lru) == block && page_count(block) == 1);
    list_del(&block->lru);
    __free_pages(block, 1);
    struct page *pages[4] = {NULL};
    CHECK(alloc_pages_bulk_array(GFP_KERNEL, 3, pages) == 3);
    pages[3] = pages[1];
    REFUSED(DOUBLE_FREE, release_pages(pages, 4));
    settled(0);
    REFUSED(DOUBLE_FREE, split_page(pages[0], 0));
}

static void never(struct page *page, void *data) {
    CHECK(!page && !data);
}

static void counts_that_are_refused(void) {
    LIST_HEAD(list);
    struct page *one = NULL;
    /* Warned of once. */
    CHECK(alloc_pages_bulk_list(GFP_KERNEL, -1, &list) == 0);
    CHECK(alloc_pages_bulk_array(GFP_KERNEL, -1, &one) == 0 && !one);
    CHECK(alloc_pages_bulk(GFP_KERNEL, 1UL << 31, &one) == 0 && !one);
    CHECK(alloc_pages_bulk_cb(GFP_KERNEL, -5, never, NULL) == 0);
    CHECK(__alloc_pages_bulk(GFP_KERNEL, 0, NULL, -1, &one) == 0 && !one);
    CHECK(list_empty(&list));
    settled(0);
}

static void *free_it(void *page) {
    __free_page(page);
    return NULL;
}

static void another_thread_frees(void) {
    pthread_t thread;
    struct page *page = alloc_page(GFP_KERNEL);
    CHECK(pthread_create(&thread, NULL, free_it, page) == 0 && pthread_join(thread, NULL) == 0);
    settled(0);
    REFUSED(DOUBLE_FREE, __free_page(page));
}

static void in_handler(int number) {
    (void)number;
    struct page *array[70] = {NULL};
    LIST_HEAD(list);
    struct page *page = alloc_page(GFP_ATOMIC);
    CHECK(page);
    __free_page(page);
    CHECK(alloc_pages_bulk_array(GFP_NOWAIT, 70, array) == 70);
    release_pages(array, 70);
    CHECK(alloc_pages_bulk_list(GFP_ATOMIC, 70, &list) == 70);
    free_pages_bulk(&list);
}

static void a_signal_handler_allocates_and_frees(void) {
    signal(SIGUSR1, in_handler);
    for (int round = 0; round < 100; round++) {
        struct page *page = alloc_page(GFP_KERNEL);
        raise(SIGUSR1);
        __free_page(page);
    }
    settled(0);
}

static void a_forked_child_goes_on(void) {
    struct page *page = alloc_page(GFP_KERNEL);
    pid_t child = fork();
    if (child == 0) {
        __free_page(page);
        REFUSED(DOUBLE_FREE, __free_page(page));
        LIST_HEAD(list);
        CHECK(alloc_pages_bulk_list(GFP_KERNEL, 100, &list) == 100);
        free_pages_bulk(&list);
        settled(0);
        exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(page_count(page) == 1);
    __free_page(page);
}

int main(void) {
    use_pages(4096);
    pagemill_on_misuse(note);
    frees_that_are_refused();
    counts_that_are_refused();
    another_thread_frees();
    a_signal_handler_allocates_and_frees();
    a_forked_child_goes_on();
    return 0;
}
