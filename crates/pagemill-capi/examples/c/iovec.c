/* An I/O vector that the callback form fills with pages as they come, written to a file by one system call.
 *
 *     cc iovec.c $(pkg-config --cflags --libs pagemill) -o iovec && ./iovec
 */
#include <pagemill.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>

#define PAGES 64

struct vector {
    struct iovec parts[PAGES];
    int n;
};

/* Called for each page, which belongs to this program from then on. */
static void add(void *page, void *user) {
    struct vector *vector = (struct vector *)user;
    memset(page, 'a' + vector->n % 26, PAGEMILL_PAGE_SIZE);
    vector->parts[vector->n].iov_base = page;
    vector->parts[vector->n].iov_len = PAGEMILL_PAGE_SIZE;
    vector->n++;
}

int main(void) {
    struct pagemill_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.pages = PAGES;
    struct pagemill_allocator *allocator;
    int why = pagemill_allocator_create(&options, &allocator);
    if (why != PAGEMILL_ERROR_NONE) {
        fprintf(stderr, "%s\n", pagemill_strerror(why));
        return 1;
    }

    /* The callback form takes requests up to a number alone: a page that was handed over cannot be taken back. */
    struct pagemill_bulk request = pagemill_bulk_up_to(PAGES, PAGEMILL_GFP_KERNEL | PAGEMILL_GFP_RETRY_MAYFAIL);
    struct pagemill_delivered delivered;
    struct vector vector = {{{NULL, 0}}, 0};
    why = pagemill_alloc_pages_bulk_callback(allocator, &request, add, &vector, &delivered);
    if (why == PAGEMILL_ERROR_NONE)
        why = delivered.why; /* Why pages are missing, if any are. */
    if (why != PAGEMILL_ERROR_NONE) {
        fprintf(stderr, "%d of %d pages came: %s\n", vector.n, PAGES, pagemill_strerror(why));
        return 1;
    }

    FILE *file = tmpfile();
    if (!file) {
        perror("tmpfile");
        return 1;
    }
    ssize_t written = writev(fileno(file), vector.parts, vector.n);
    printf("one writev of %d pages wrote %zd bytes\n", vector.n, written);
    fclose(file);

    for (int at = 0; at < vector.n; at++)
        pagemill_free_page(vector.parts[at].iov_base);
    why = pagemill_allocator_close(allocator, NULL);
    return written == (ssize_t)PAGES * PAGEMILL_PAGE_SIZE && why == PAGEMILL_ERROR_NONE ? 0 : 1;
}
