/* Pools of small blocks with device addresses, and the devices: counts, errors, misuse, other threads, a forked child. */
#include "check.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGES 512

static int reports, last_report;

static void on_misuse(const struct pagemill_misuse *report) {
    reports++;
    last_report = report->error;
}

/* A device of the program's own. Each page has an address of its own, descending, or all follow from one. */
struct simulated {
    char *memory;
    size_t pages, maps, unmaps, answer;
    int is_scattered;
};

static uint64_t address_of(struct simulated *device, const void *byte) {
    uint64_t offset = (uint64_t)((const char *)byte - device->memory);
    uint64_t page = offset / PAGEMILL_PAGE_SIZE;
    if (device->is_scattered)
        page = device->pages - 1 - page;
    return (UINT64_C(1) << 40) + page * PAGEMILL_PAGE_SIZE + offset % PAGEMILL_PAGE_SIZE;
}

static size_t map(void *memory, size_t pages, uint64_t *addresses, void *user) {
    struct simulated *device = (struct simulated *)user;
    device->memory = (char *)memory;
    device->pages = pages;
    device->maps++;
    size_t n = device->is_scattered ? pages : 1;
    for (size_t at = 0; at < n; at++)
        addresses[at] = address_of(device, device->memory + at * PAGEMILL_PAGE_SIZE);
    return device->answer == SIZE_MAX ? n : device->answer;
}

static void unmap(void *memory, size_t pages, const uint64_t *addresses, size_t n, void *user) {
    struct simulated *device = (struct simulated *)user;
    CHECK(memory == device->memory && pages == device->pages && n >= 1 && addresses[0] == address_of(device, memory));
    device->unmaps++;
}

/* Pieces of 64 KiB, from the first address on. */
static int is_one_piece(uint64_t first, uint64_t last, void *user) {
    CHECK(user != NULL && first <= last);
    return first >> 16 == last >> 16;
}

static struct pagemill_device_options options_of(uint32_t kind, int fd) {
    struct pagemill_device_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.kind = kind;
    options.fd = fd;
    return options;
}

static struct pagemill_device *device_of(struct pagemill_allocator *allocator, struct simulated *simulated) {
    struct pagemill_device_options options = options_of(PAGEMILL_DEVICE_FUNCTIONS, -1);
    struct pagemill_device *device;
    memset(simulated, 0, sizeof *simulated);
    simulated->answer = SIZE_MAX;
    options.map = map;
    options.unmap = unmap;
    options.user = simulated;
    OK(pagemill_device_create(allocator, &options, &device));
    return device;
}

static struct pagemill_dma_pool_statistics statistics_of(struct pagemill_dma_pool *pool) {
    struct pagemill_dma_pool_statistics statistics;
    OK(pagemill_dma_pool_stats(pool, &statistics));
    return statistics;
}

static void blocks(void) {
    struct pagemill_allocator *allocator = allocator_of(PAGES);
    struct simulated simulated;
    struct pagemill_device *device = device_of(allocator, &simulated);
    struct pagemill_dma_pool *pool, *other;
    uint64_t address, again;
    void *block, *slots[200] = {NULL};
    uint64_t addresses[200] = {0};
    size_t n;
    CHECK(simulated.maps == 1 && simulated.pages == PAGES);
    OK(pagemill_dma_pool_create("commands", device, 60, 32, 4096, 0, &pool));
    CHECK(statistics_of(pool).block_bytes == 64 && statistics_of(pool).pages == 0 && statistics_of(pool).blocks == 0);

    /* One block: of a new page the first, with the address that the device has for it. */
    OK(pagemill_dma_pool_alloc(pool, PAGEMILL_GFP_KERNEL | PAGEMILL_GFP_ZERO, &address, &block));
    CHECK(address == address_of(&simulated, block) && address % 4096 == 0 && *(char *)block == 0);
    OK(pagemill_device_address(device, (char *)block + 5, &again));
    CHECK(again == address + 5);
    memset(block, 0xff, 64);
    CHECK(statistics_of(pool).in_use == 1 && statistics_of(pool).blocks == 64 && statistics_of(pool).pages == 1);
    OK(pagemill_dma_pool_free(pool, block));
    void *same;
    OK(pagemill_dma_pool_alloc(pool, PAGEMILL_GFP_NOWAIT | PAGEMILL_GFP_ZERO, NULL, &same));
    CHECK(same == block && *(char *)same == 0 && *((char *)same + 63) == 0);

    /* Many: holes alone are filled, all of them or none, and slots beyond n are not touched. */
    char mine;
    slots[7] = &mine;
    addresses[7] = 77;
    addresses[150] = 78;
    OK(pagemill_dma_pool_alloc_bulk(pool, PAGEMILL_GFP_KERNEL, slots, addresses, 150, &n));
    CHECK(n == 149 && slots[7] == &mine && addresses[7] == 77 && slots[150] == NULL && addresses[150] == 78);
    for (int at = 0; at < 150; at++) {
        if (at == 7)
            continue;
        CHECK(addresses[at] == address_of(&simulated, slots[at]) && addresses[at] % 32 == 0);
        CHECK(addresses[at] / 4096 == (addresses[at] + 63) / 4096);
        memset(slots[at], at, 64);
    }
    for (int at = 0; at < 150; at++)
        CHECK(at == 7 || *(unsigned char *)slots[at] == at);
    CHECK(statistics_of(pool).in_use == 150);
    OK(pagemill_dma_pool_alloc_bulk(pool, PAGEMILL_GFP_KERNEL, slots, NULL, 150, &n));
    CHECK(n == 0);
    OK(pagemill_dma_pool_alloc_bulk(pool, PAGEMILL_GFP_KERNEL, NULL, NULL, 0, NULL));
    OK(pagemill_dma_pool_alloc_bulk(pool, PAGEMILL_GFP_KERNEL | PAGEMILL_GFP_ZERO, slots + 150, NULL, 3, NULL));
    CHECK(*(char *)slots[150] == 0 && *(char *)slots[152] == 0 && slots[153] == NULL);

    /* What comes back is checked. */
    reports = 0;
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_dma_pool_free(pool, NULL));
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_dma_pool_free(pool, &mine));
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_dma_pool_free(pool, (void *)(uintptr_t)0x4141414141414141));
    EXPECT(PAGEMILL_ERROR_INSIDE, pagemill_dma_pool_free(pool, (char *)same + 32));
    OK(pagemill_dma_pool_free(pool, same));
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_dma_pool_free(pool, same));
    CHECK(pagemill_free_page((char *)same - (uintptr_t)same % 4096) >= 300); /* The pool has the page. */
    void *page = pagemill_alloc_page(allocator, PAGEMILL_GFP_KERNEL);
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_dma_pool_free(pool, page));
    OK(pagemill_free_page(page));
    /* A block of another pool, with blocks of another size. */
    OK(pagemill_dma_pool_create("lists", device, 3000, 0, 0, 0, &other));
    OK(pagemill_dma_pool_alloc(other, PAGEMILL_GFP_KERNEL, NULL, &block));
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_dma_pool_free(pool, block));
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_dma_pool_free(other, slots[0]));
    CHECK(reports == 8 + 1 && statistics_of(pool).misused == 7 && statistics_of(other).misused == 1);

    char text[256];
    n = pagemill_device_pools(device, text, sizeof text);
    CHECK(n == strlen(text) && strstr(text, "commands          152  192   64  3\n") && strstr(text, "lists "));
    CHECK(pagemill_device_pools(device, NULL, 0) == n && pagemill_device_pools(NULL, NULL, 0) == 0);

    EXPECT(PAGEMILL_ERROR_IN_USE, pagemill_dma_pool_destroy(pool, &n));
    CHECK(n == 152);
    /* In bulk: what is refused stays in its slot, everything else is freed. */
    slots[160] = slots[3];
    void *third = slots[3];
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_dma_pool_free_bulk(pool, slots, 150, &n));
    CHECK(n == 149 && slots[7] == &mine && slots[0] == NULL && slots[150] != NULL);
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_dma_pool_free_bulk(pool, slots + 150, 50, &n));
    CHECK(n == 3 && slots[160] == third && slots[150] == NULL && statistics_of(pool).in_use == 0);
    /* The first block of the array is the next one. */
    OK(pagemill_dma_pool_alloc_bulk(pool, PAGEMILL_GFP_KERNEL, slots + 50, NULL, 100, NULL));
    void *first = slots[50];
    OK(pagemill_dma_pool_free_bulk(pool, slots + 50, 100, NULL));
    OK(pagemill_dma_pool_alloc(pool, PAGEMILL_GFP_KERNEL, NULL, slots + 50));
    CHECK(slots[50] == first);
    OK(pagemill_dma_pool_free(pool, first));

    /* The device stays until its last pool is gone. */
    OK(pagemill_device_release(device));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_device_release(device));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_device_address(device, block, &address));
    OK(pagemill_dma_pool_free(other, block));
    OK(pagemill_dma_pool_destroy(other, &n));
    CHECK(n == 0 && simulated.unmaps == 0);
    OK(pagemill_dma_pool_destroy(pool, NULL));
    CHECK(simulated.unmaps == 1);
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_dma_pool_destroy(pool, &n));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_dma_pool_release(pool));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_dma_pool_free(pool, block));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_dma_pool_alloc(pool, PAGEMILL_GFP_KERNEL, NULL, &block));
    CHECK(block == NULL);
    close_whole(allocator, PAGES);
}

/* Arguments that cannot be. */
static void arguments(void) {
    struct pagemill_allocator *allocator = allocator_of(PAGES);
    struct simulated simulated;
    struct pagemill_device *device = device_of(allocator, &simulated);
    struct pagemill_dma_pool *pool;
    uint64_t address;
    void *block = &address;
    size_t n;
    EXPECT(PAGEMILL_ERROR_SIZE, pagemill_dma_pool_create("", device, 0, 0, 0, 0, &pool));
    CHECK(pool == NULL);
    EXPECT(PAGEMILL_ERROR_SIZE, pagemill_dma_pool_create("", device, SIZE_MAX, 0, 0, 0, &pool));
    EXPECT(PAGEMILL_ERROR_SIZE, pagemill_dma_pool_create("", device, 64, 48, 0, 0, &pool));
    EXPECT(PAGEMILL_ERROR_SIZE, pagemill_dma_pool_create("", device, 64, 0, 32, 0, &pool));
    EXPECT(PAGEMILL_ERROR_INVALID, pagemill_dma_pool_create("", device, 64, 0, 0, 2, &pool));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_dma_pool_create(NULL, device, 64, 0, 0, 0, &pool));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_dma_pool_create("", NULL, 64, 0, 0, 0, &pool));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_dma_pool_create("", device, 64, 0, 0, 0, NULL));
    EXPECT(PAGEMILL_ERROR_HANDLE,
           pagemill_dma_pool_create("", (struct pagemill_device *)(void *)allocator, 64, 0, 0, 0, &pool));
    OK(pagemill_dma_pool_create("", device, 1, 0, 0, 0, &pool));
    CHECK(statistics_of(pool).block_bytes == 16);
    EXPECT(PAGEMILL_ERROR_FLAGS, pagemill_dma_pool_alloc(pool, 0x80000000, NULL, &block));
    CHECK(block == NULL);
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_dma_pool_alloc(pool, 0, NULL, NULL));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_dma_pool_alloc(NULL, 0, NULL, &block));
    EXPECT(PAGEMILL_ERROR_COUNT, pagemill_dma_pool_alloc_bulk(pool, 0, &block, NULL, -1, NULL));
    EXPECT(PAGEMILL_ERROR_COUNT, pagemill_dma_pool_free_bulk(pool, &block, INT64_MAX, NULL));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_dma_pool_free_bulk(pool, NULL, 1, NULL));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_dma_pool_stats(pool, NULL));
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_device_address(device, &address, &address));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_device_address(device, simulated.memory, NULL));
    EXPECT(PAGEMILL_ERROR_INVALID, pagemill_device_share(device, 0)); /* It has no table of io_uring. */
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_device_share(NULL, 0));
    /* More than there is: nothing is delivered. The pool keeps the pages that it took: all but those of other CPUs' lists. */
    size_t all = PAGES * 256 + 1;
    void **too_many = (void **)calloc(all, sizeof *too_many);
    EXPECT(PAGEMILL_ERROR_EXHAUSTED,
           pagemill_dma_pool_alloc_bulk(pool, PAGEMILL_GFP_NOWAIT, too_many, NULL, (int64_t)all, &n));
    CHECK(n == 0 && statistics_of(pool).in_use == 0 && statistics_of(pool).pages > PAGES / 2 && too_many[0] == NULL && too_many[all - 1] == NULL);
    free(too_many);
    OK(pagemill_dma_pool_release(pool));
    OK(pagemill_device_release(device));
    close_whole(allocator, PAGES);
}

/* Devices that see each page elsewhere, that refuse, that miscount, and whose pieces are short. */
static void devices_of_functions(void) {
    struct pagemill_allocator *allocator = allocator_of(PAGES);
    struct pagemill_device_options options = options_of(PAGEMILL_DEVICE_FUNCTIONS, -1);
    struct simulated simulated;
    struct pagemill_device *device;
    struct pagemill_dma_pool *pool;
    char message[256] = "";
    void *slots[40] = {NULL};
    uint64_t addresses[40];
    memset(&simulated, 0, sizeof simulated);
    options.map = map;
    options.user = &simulated;
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_device_create(allocator, &options, &device));
    options.unmap = unmap;
    options.message = message;
    options.message_size = sizeof message;
    EXPECT(PAGEMILL_ERROR_DEVICE, pagemill_device_create(allocator, &options, &device));
    CHECK(device == NULL && strstr(message, "the program's function maps no memory"));
    CHECK(simulated.maps == 1 && simulated.unmaps == 0);
    simulated.answer = PAGES - 1;
    EXPECT(PAGEMILL_ERROR_DEVICE, pagemill_device_create(allocator, &options, &device));
    CHECK(strstr(message, "gave 511 addresses for 512 pages") && simulated.unmaps == 1);
    simulated.answer = PAGES + 1;
    EXPECT(PAGEMILL_ERROR_DEVICE, pagemill_device_create(allocator, &options, &device));
    CHECK(strstr(message, "gave 513 addresses for 512 pages") && simulated.unmaps == 1);

    simulated.answer = SIZE_MAX;
    simulated.is_scattered = 1;
    OK(pagemill_device_create(allocator, &options, &device));
    EXPECT(PAGEMILL_ERROR_SIZE, pagemill_dma_pool_create("", device, 5000, 0, 0, 0, &pool));
    OK(pagemill_dma_pool_create("", device, 2048, 0, 0, 0, &pool));
    OK(pagemill_dma_pool_alloc_bulk(pool, PAGEMILL_GFP_KERNEL, slots, addresses, 40, NULL));
    for (int at = 0; at < 40; at++)
        CHECK(addresses[at] == address_of(&simulated, slots[at]));
    OK(pagemill_dma_pool_free_bulk(pool, slots, 40, NULL));
    OK(pagemill_dma_pool_destroy(pool, NULL));
    OK(pagemill_device_release(device));
    CHECK(simulated.unmaps == 2);

    /* No block of three pages lies across a multiple of 64 KiB. */
    simulated.is_scattered = 0;
    options.is_one_piece = is_one_piece;
    OK(pagemill_device_create(allocator, &options, &device));
    OK(pagemill_dma_pool_create("", device, 3 * PAGEMILL_PAGE_SIZE, 0, 0, 0, &pool));
    OK(pagemill_dma_pool_alloc_bulk(pool, PAGEMILL_GFP_KERNEL, slots, addresses, 20, NULL));
    for (int at = 0; at < 20; at++)
        CHECK(addresses[at] >> 16 == (addresses[at] + 3 * PAGEMILL_PAGE_SIZE - 1) >> 16);
    OK(pagemill_dma_pool_free_bulk(pool, slots, 20, NULL));
    OK(pagemill_dma_pool_destroy(pool, NULL));
    OK(pagemill_device_release(device));
    close_whole(allocator, PAGES);
}

/* The system's devices. Where this machine has none the error says so. */
static void devices_of_the_system(void) {
    struct pagemill_allocator *allocator = allocator_of(PAGES);
    struct pagemill_device *device;
    struct pagemill_device_options options;
    char message[512] = "";
    uint64_t address;
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    CHECK(null >= 0);
    uint32_t kinds[] = {PAGEMILL_DEVICE_VFIO, PAGEMILL_DEVICE_UMEM, PAGEMILL_DEVICE_FIXED_BUFFERS};
    for (int at = 0; at < 3; at++) {
        options = options_of(kinds[at], null);
        options.chunk = 4096;
        options.message = message;
        options.message_size = sizeof message;
        message[0] = 0;
        EXPECT(PAGEMILL_ERROR_SYSTEM, pagemill_device_create(allocator, &options, &device));
        CHECK(device == NULL && strchr(message, ';') != NULL); /* What is wrong; what to do. */
        options.fd = -1;
        EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_device_create(allocator, &options, &device));
    }
    options = options_of(PAGEMILL_DEVICE_UMEM, null);
    options.chunk = 1000;
    EXPECT(PAGEMILL_ERROR_DEVICE, pagemill_device_create(allocator, &options, &device));
    options = options_of(77, null);
    EXPECT(PAGEMILL_ERROR_INVALID, pagemill_device_create(allocator, &options, &device));
    options.size = 8;
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_device_create(allocator, &options, &device));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_device_create(allocator, NULL, &device));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_device_create(allocator, &options, NULL));
    options = options_of(PAGEMILL_DEVICE_IDENTITY, -1);
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_device_create(NULL, &options, &device));

    OK(pagemill_device_create(allocator, &options, &device));
    void *page = pagemill_alloc_page(allocator, PAGEMILL_GFP_KERNEL);
    OK(pagemill_device_address(device, (char *)page + 9, &address));
    CHECK(address == (uint64_t)(uintptr_t)page + 9);
    OK(pagemill_device_release(device));

    options = options_of(PAGEMILL_DEVICE_PHYSICAL, -1);
    options.message = message;
    options.message_size = sizeof message;
    if (pagemill_device_create(allocator, &options, &device) == PAGEMILL_ERROR_NONE) {
        OK(pagemill_device_address(device, (char *)page + 9, &address));
        CHECK(address % PAGEMILL_PAGE_SIZE == 9 && address >= PAGEMILL_PAGE_SIZE);
        OK(pagemill_device_release(device));
    } else {
        printf("skipped: physical addresses: %s\n", message);
    }

    /* An io_uring's table of buffers: entry 0 has the arena. */
    unsigned parameters[30] = {0};
    int ring = (int)syscall(SYS_io_uring_setup, 4, parameters);
    if (ring < 0) {
        printf("skipped: no io_uring here: %s\n", strerror(errno));
    } else {
        struct pagemill_arena arena;
        options.kind = PAGEMILL_DEVICE_FIXED_BUFFERS;
        options.fd = ring;
        options.entries = 16;
        int error = pagemill_device_create(allocator, &options, &device);
        if (error == PAGEMILL_ERROR_NONE) {
            CHECK(pagemill_arenas(allocator, &arena, 1) == 1);
            OK(pagemill_device_address(device, page, &address));
            CHECK(address == (uint64_t)((char *)page - (char *)arena.start));
            memset(parameters, 0, sizeof parameters);
            int second = (int)syscall(SYS_io_uring_setup, 4, parameters);
            error = pagemill_device_share(device, second);
            CHECK(error == PAGEMILL_ERROR_NONE || error == PAGEMILL_ERROR_SYSTEM); /* Before Linux 6.12. */
            EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_device_share(device, -1));
            close(second);
            OK(pagemill_device_release(device));
        } else {
            printf("skipped: registered buffers: %s\n", message);
        }
        close(ring);
    }
    close(null);
    OK(pagemill_free_page(page));
    close_whole(allocator, PAGES);
}

/* Two threads hand blocks to each other. */
#define ROUNDS 2000
static struct pagemill_dma_pool *shared;
static void *box;

static void *frees_what_the_other_allocates(void *arg) {
    (void)arg;
    for (int round = 0; round < ROUNDS; round++) {
        void *block, *mine[5] = {NULL};
        OK(pagemill_dma_pool_alloc_bulk(shared, PAGEMILL_GFP_KERNEL, mine, NULL, 5, NULL));
        OK(pagemill_dma_pool_alloc(shared, PAGEMILL_GFP_KERNEL, NULL, &block));
        memset(block, round, 64);
        block = __atomic_exchange_n(&box, block, __ATOMIC_ACQ_REL);
        if (block)
            OK(pagemill_dma_pool_free(shared, block));
        OK(pagemill_dma_pool_free_bulk(shared, mine, 5, NULL));
    }
    return NULL;
}

static void threads(void) {
    struct pagemill_allocator *allocator = allocator_of(PAGES);
    struct simulated simulated;
    struct pagemill_device *device = device_of(allocator, &simulated);
    pthread_t thread;
    size_t out;
    OK(pagemill_dma_pool_create("shared", device, 64, 0, 0, 0, &shared));
    CHECK(pthread_create(&thread, NULL, frees_what_the_other_allocates, NULL) == 0);
    frees_what_the_other_allocates(NULL);
    CHECK(pthread_join(thread, NULL) == 0);
    EXPECT(PAGEMILL_ERROR_IN_USE, pagemill_dma_pool_destroy(shared, &out));
    CHECK(out == 1);
    OK(pagemill_dma_pool_free(shared, box));
    OK(pagemill_dma_pool_destroy(shared, &out));
    CHECK(out == 0);
    OK(pagemill_device_release(device));
    close_whole(allocator, PAGES);
}

/* Whoever writes to a freed block is found out. Blocks that are out of a pool that is let go keep their pages. */
static void a_poisoned_pool_that_is_let_go(void) {
    struct pagemill_allocator *allocator = allocator_of(PAGES);
    struct simulated simulated;
    struct pagemill_device *device = device_of(allocator, &simulated);
    struct pagemill_dma_pool *pool;
    void *block;
    size_t out;
    OK(pagemill_dma_pool_create("poisoned", device, 64, 0, 0, PAGEMILL_DMA_POOL_POISONED, &pool));
    OK(pagemill_dma_pool_alloc(pool, PAGEMILL_GFP_KERNEL, NULL, &block));
    OK(pagemill_dma_pool_free(pool, block));
    memset(block, 0, 8);
    reports = 0;
    OK(pagemill_dma_pool_alloc(pool, PAGEMILL_GFP_KERNEL, NULL, &block));
    CHECK(reports == 1 && last_report == PAGEMILL_ERROR_MISUSE && statistics_of(pool).misused == 1);

    /* In a child the pool is its parent's. */
    pid_t child = fork();
    if (child == 0) {
        uint64_t address;
        void *none;
        EXPECT(PAGEMILL_ERROR_FORKED, pagemill_dma_pool_alloc(pool, PAGEMILL_GFP_KERNEL, NULL, &none));
        EXPECT(PAGEMILL_ERROR_FORKED, pagemill_device_address(device, block, &address));
        CHECK(pagemill_dma_pool_free(pool, block) >= 300 && statistics_of(pool).in_use == 0);
        OK(pagemill_dma_pool_release(pool));
        OK(pagemill_device_release(device));
        CHECK(simulated.unmaps == 0);
        _exit(0);
    }
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(statistics_of(pool).in_use == 1);

    reports = 0;
    OK(pagemill_dma_pool_release(pool));
    CHECK(reports == 1 && last_report == PAGEMILL_ERROR_MISUSE);
    OK(pagemill_device_release(device));
    CHECK(simulated.unmaps == 0);
    memset(block, 1, 64); /* The device may, too. */
    EXPECT(PAGEMILL_ERROR_IN_USE, pagemill_allocator_close(allocator, &out));
    CHECK(out == 1);
    OK(pagemill_allocator_release(allocator));
}

int main(void) {
    pagemill_on_misuse(on_misuse);
    blocks();
    arguments();
    devices_of_functions();
    devices_of_the_system();
    threads();
    a_poisoned_pool_that_is_let_go();
    return 0;
}
