/* A ring of descriptors, as a network card has it: the descriptors are blocks of a dma_pool, the buffers are pages that are
 * allocated in bulk, and the device knows both by its own addresses alone. The device is simulated: a window onto the
 * program's memory.
 *
 *     cc ring.c $(pkg-config --cflags --libs pagemill) -o ring && ./ring
 */
#include <pagemill.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RING 64       /* descriptors */
#define PACKETS 10000 /* to receive */
#define WINDOW (UINT64_C(1) << 32)

/* What both the driver and the device read and write. The addresses are the device's. */
struct descriptor {
    uint64_t next;
    uint64_t buffer;
    uint32_t length;
    uint32_t is_filled; /* 0: it is the device's turn. */
};

struct card {
    char *memory;     /* which the window shows */
    uint64_t at;      /* the descriptor that comes next */
    uint32_t packets; /* received so far */
};

/* Called once for each arena: the device sees it in one piece, from WINDOW on. */
static size_t map(void *memory, size_t pages, uint64_t *addresses, void *user) {
    struct card *card = (struct card *)user;
    printf("the device maps %zu pages at %#llx\n", pages, (unsigned long long)WINDOW);
    card->memory = (char *)memory;
    addresses[0] = WINDOW;
    return 1;
}

static void unmap(void *memory, size_t pages, const uint64_t *addresses, size_t n, void *user) {
    (void)memory, (void)addresses, (void)n;
    ((struct card *)user)->memory = NULL;
    printf("the device unmaps %zu pages\n", pages);
}

/* What the device does on its own: a packet into each buffer that it was given, as far as there are any. */
static void receive(struct card *card) {
    for (;;) {
        struct descriptor *descriptor = (struct descriptor *)(void *)(card->memory + (card->at - WINDOW));
        if (descriptor->is_filled || card->packets == PACKETS)
            return;
        char *buffer = card->memory + (descriptor->buffer - WINDOW);
        descriptor->length = 64 + card->packets % 1400;
        memset(buffer, (int)(card->packets & 0xff), descriptor->length);
        card->packets++;
        descriptor->is_filled = 1;
        card->at = descriptor->next;
    }
}

static struct pagemill_allocator *allocator;
static struct pagemill_device *device;
static struct pagemill_dma_pool *pool;

/* Ends the program if a call failed. */
static void check(int error, const char *what) {
    if (error != PAGEMILL_ERROR_NONE) {
        fprintf(stderr, "%s: %s\n", what, pagemill_strerror(error));
        exit(1);
    }
}

static void set_up(struct card *card) {
    struct pagemill_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.pages = 512;
    check(pagemill_allocator_create(&options, &allocator), "an allocator");
    struct pagemill_device_options window;
    memset(&window, 0, sizeof window);
    window.size = sizeof window;
    window.kind = PAGEMILL_DEVICE_FUNCTIONS;
    window.map = map;
    window.unmap = unmap;
    window.user = card;
    check(pagemill_device_create(allocator, &window, &device), "a device");
    /* Aligned to a cache line, and none lies across a page. */
    check(pagemill_dma_pool_create("descriptors", device, sizeof(struct descriptor), 64, 4096, 0, &pool), "a pool");
}

int main(void) {
    struct card card = {NULL, 0, 0};
    set_up(&card);

    /* The descriptors, in bulk, and in a circle. */
    void *ring[RING] = {NULL}, *buffers[RING] = {NULL};
    uint64_t addresses[RING], buffer_addresses[RING];
    check(pagemill_dma_pool_alloc_bulk(pool, PAGEMILL_GFP_KERNEL | PAGEMILL_GFP_ZERO, ring, addresses, RING, NULL), "descriptors");
    for (int at = 0; at < RING; at++) {
        struct descriptor *descriptor = (struct descriptor *)ring[at];
        descriptor->next = addresses[(at + 1) % RING];
        descriptor->is_filled = 1; /* It has no buffer yet. */
    }
    card.at = addresses[0];

    unsigned long received = 0, bytes = 0, refills = 0, wrong = 0;
    while (received < PACKETS) {
        /* One call fills every hole of the array, wherever it is; then the device gets what is new. */
        struct pagemill_bulk request = pagemill_bulk_exact(RING, PAGEMILL_GFP_KERNEL);
        struct pagemill_filled filled;
        check(pagemill_alloc_pages_bulk_array(allocator, &request, buffers, &filled), "buffers");
        check(pagemill_device_addresses(device, buffers, buffer_addresses, RING), "their addresses");
        for (int at = 0; at < RING; at++) {
            struct descriptor *descriptor = (struct descriptor *)ring[at];
            descriptor->buffer = buffer_addresses[at];
            descriptor->is_filled = 0;
        }
        refills++;
        receive(&card);

        /* The driver hands packets on, each with its page; they all end here, in bulk. */
        void *packets[RING] = {NULL};
        for (int at = 0; at < RING; at++) {
            struct descriptor *descriptor = (struct descriptor *)ring[at];
            if (!descriptor->is_filled)
                continue;
            unsigned char *packet = (unsigned char *)buffers[at];
            wrong += packet[0] != (received & 0xff) || packet[descriptor->length - 1] != (received & 0xff);
            bytes += descriptor->length;
            received++;
            packets[at] = buffers[at];
            buffers[at] = NULL;
        }
        check(pagemill_free_pages_bulk(packets, RING, 0, NULL), "packets");
    }
    printf("%lu packets, %lu bytes, by %d descriptors; %lu bulk requests for buffers\n", received, bytes, RING, refills);
    char text[128];
    pagemill_device_pools(device, text, sizeof text);
    printf("%s", text);

    /* The last buffers are still the device's: it is stopped first, then they are freed. */
    check(pagemill_free_pages_bulk(buffers, RING, 0, NULL), "buffers");
    check(pagemill_dma_pool_free_bulk(pool, ring, RING, NULL), "descriptors");
    check(pagemill_dma_pool_destroy(pool, NULL), "the pool");
    check(pagemill_device_release(device), "the device");
    check(pagemill_allocator_close(allocator, NULL), "the allocator");
    return wrong == 0 && card.memory == NULL ? 0 : 1;
}
