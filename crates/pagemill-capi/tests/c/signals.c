/* A signal handler allocates and frees, whatever it interrupts: no page is lost, none has two owners. */
#include "check.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>

#define ROUNDS 20000

static struct pagemill_allocator *allocator;
static volatile sig_atomic_t handled, is_done;

static void handler(int signal) {
    (void)signal;
    int before = errno;
    errno = 77;
    void *slots[8] = {NULL};
    struct pagemill_bulk request = pagemill_bulk_up_to(8, PAGEMILL_GFP_ATOMIC);
    void *page = pagemill_alloc_page(allocator, PAGEMILL_GFP_NOWAIT);
    if (page && pagemill_free_page(page) != PAGEMILL_ERROR_NONE)
        abort();
    if (page && pagemill_free_page(page) != PAGEMILL_ERROR_DOUBLE_FREE)
        abort();
    if (pagemill_alloc_pages_bulk_array(allocator, &request, slots, NULL) == PAGEMILL_ERROR_NONE
        && pagemill_free_pages_bulk(slots, 8, 0, NULL) != PAGEMILL_ERROR_NONE)
        abort();
    if (errno != 77)
        abort();
    errno = before;
    handled++;
}

/* Interrupts the main thread until it has done its rounds. */
static void *interrupts(void *thread) {
    while (!is_done)
        pthread_kill(*(pthread_t *)thread, SIGUSR1);
    return NULL;
}

int main(void) {
    struct sigaction action;
    pthread_t self = pthread_self(), thread;
    memset(&action, 0, sizeof action);
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    allocator = allocator_of(4096);
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    CHECK(pthread_create(&thread, NULL, interrupts, &self) == 0);
    for (int round = 0; round < ROUNDS || handled < 1000; round++) {
        void *slots[64] = {NULL};
        struct pagemill_bulk request = pagemill_bulk_exact(64, PAGEMILL_GFP_KERNEL);
        OK(pagemill_alloc_pages_bulk_array(allocator, &request, slots, NULL));
        void *page = pagemill_alloc_page(allocator, PAGEMILL_GFP_KERNEL);
        CHECK(page != NULL);
        OK(pagemill_free_page(page));
        OK(pagemill_free_pages_bulk(slots, 64, 0, NULL));
    }
    is_done = 1;
    CHECK(pthread_join(thread, NULL) == 0);
    close_whole(allocator, 4096);
    return 0;
}
