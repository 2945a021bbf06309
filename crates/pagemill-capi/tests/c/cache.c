/* A page cache: files of the system and of the program's own functions, read, written, lent, by one thread and by several. */
#include "check.h"
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE ((size_t)PAGEMILL_PAGE_SIZE)
#define PAGES 256

static unsigned char byte_at(size_t at) {
    return (unsigned char)(at * 31 + at / PAGE);
}

static void fill(unsigned char *bytes, size_t n, size_t at) {
    for (size_t i = 0; i < n; i++)
        bytes[i] = byte_at(at + i);
}

static int is_filled(const unsigned char *bytes, size_t n, size_t at) {
    for (size_t i = 0; i < n; i++)
        if (bytes[i] != byte_at(at + i))
            return 0;
    return 1;
}

static struct pagemill_page_cache_statistics statistics_of(struct pagemill_page_cache *cache) {
    struct pagemill_page_cache_statistics statistics;
    OK(pagemill_page_cache_stats(cache, &statistics));
    return statistics;
}

static struct pagemill_page_cache_options options_of(size_t limit) {
    struct pagemill_page_cache_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.limit = limit;
    return options;
}

/* A file of the system: what is written comes back, from the cache and from the file. */
static void a_file_of_the_system(struct pagemill_allocator *allocator) {
    struct pagemill_page_cache_options options = options_of(PAGES);
    struct pagemill_page_cache *cache;
    struct pagemill_file *file, *other;
    FILE *stream = tmpfile();
    CHECK(stream != NULL);
    options.threads = 2;
    options.dirty_limit = 100;
    options.name = "cache.c";
    OK(pagemill_page_cache_create(allocator, &options, &cache));
    CHECK(statistics_of(cache).limit == PAGES);
    OK(pagemill_page_cache_open(cache, fileno(stream), &file));
    CHECK(pagemill_file_len(file) == 0);

    static unsigned char bytes[64 * PAGEMILL_PAGE_SIZE + 100], back[sizeof bytes];
    size_t n;
    uint64_t at;
    fill(bytes, sizeof bytes, 0);
    OK(pagemill_file_write_at(file, bytes, 1000, 0, &n));
    CHECK(n == 1000);
    OK(pagemill_file_append(file, bytes + 1000, sizeof bytes - 1000, &at));
    CHECK(at == 1000 && pagemill_file_len(file) == sizeof bytes && statistics_of(cache).dirty > 0);
    OK(pagemill_file_read_at(file, back, sizeof back, 0, &n));
    CHECK(n == sizeof back && memcmp(bytes, back, n) == 0);
    CHECK(pagemill_file_write_back(file, 0, PAGE) == 1 && pagemill_page_cache_write_back(cache, 5) == 5);
    OK(pagemill_file_sync(file));
    CHECK(statistics_of(cache).dirty == 0 && statistics_of(cache).written == 65);
    CHECK(pread(fileno(stream), back, sizeof back, 0) == (ssize_t)sizeof back && memcmp(bytes, back, sizeof back) == 0);
    OK(pagemill_file_read_at(file, back, sizeof back, sizeof bytes - 7, &n));
    CHECK(n == 7);
    OK(pagemill_file_read_at(file, back, 1, sizeof bytes, &n));
    CHECK(n == 0);
    OK(pagemill_file_read_at(file, NULL, 0, 0, NULL));

    /* Where its pages are. */
    CHECK(pagemill_file_next_present(file, 0, 1000) == 0 && pagemill_file_prev_present(file, 1000, 2000) == 64);
    CHECK(pagemill_page_cache_evict(cache, PAGES) == 65 && statistics_of(cache).pages == 0);
    CHECK(pagemill_file_next_present(file, 3, 50) == 53 && pagemill_file_prev_present(file, 60, 50) == 10);
    OK(pagemill_file_reopen(file, &other));
    OK(pagemill_file_advise(other, PAGEMILL_ADVICE_RANDOM, 0, 0));
    OK(pagemill_file_read_at(other, back, 100, 40 * PAGE, &n));
    CHECK(n == 100 && is_filled(back, n, 40 * PAGE));
    CHECK(statistics_of(cache).pages == 1);
    CHECK(pagemill_file_next_present(file, 0, 65) == 40 && pagemill_file_prev_present(file, 64, 65) == 40);
    CHECK(pagemill_file_next_present(file, UINT64_MAX - 3, 100) == UINT64_MAX && pagemill_file_prev_present(file, 3, 100) == 0);
    OK(pagemill_file_advise(other, PAGEMILL_ADVICE_DONTNEED, 40 * PAGE, PAGE));
    CHECK(statistics_of(cache).pages == 0);
    OK(pagemill_file_advise(other, PAGEMILL_ADVICE_WILLNEED, 0, 4 * PAGE));
    OK(pagemill_file_advise(other, PAGEMILL_ADVICE_NOREUSE, 0, 0));
    OK(pagemill_file_advise(other, PAGEMILL_ADVICE_SEQUENTIAL, 0, 0));
    OK(pagemill_file_advise(other, PAGEMILL_ADVICE_NORMAL, 0, 0));
    EXPECT(PAGEMILL_ERROR_INVALID, pagemill_file_advise(other, 6, 0, 0));
    OK(pagemill_file_read_at(other, back, 4 * PAGE, 0, &n));
    CHECK(n == 4 * PAGE && is_filled(back, n, 0) && statistics_of(cache).read == 1 + 4);

    /* Others change the file. */
    CHECK(pwrite(fileno(stream), "new", 3, 0) == 3 && ftruncate(fileno(stream), (off_t)PAGE) == 0);
    OK(pagemill_file_refresh(file, &at));
    CHECK(at == PAGE && pagemill_file_len(other) == PAGE);
    OK(pagemill_file_invalidate(file, 0, PAGE, &n));
    CHECK(n == 0);
    OK(pagemill_file_read_at(file, back, PAGE, 0, &n));
    CHECK(n == PAGE && memcmp(back, "new", 3) == 0 && is_filled(back + 3, PAGE - 3, 3));
    OK(pagemill_file_set_len(file, 2 * PAGE));
    struct stat stat;
    CHECK(fstat(fileno(stream), &stat) == 0 && stat.st_size == (off_t)(2 * PAGE));
    OK(pagemill_file_read_at(file, back, 2 * PAGE, 0, &n));
    CHECK(n == 2 * PAGE && back[PAGE] == 0 && back[2 * PAGE - 1] == 0);

    OK(pagemill_page_cache_set_limit(cache, 1));
    CHECK(statistics_of(cache).limit == 1 && statistics_of(cache).pages <= 1);
    OK(pagemill_file_close(file));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_file_close(file));
    OK(pagemill_page_cache_close(cache)); /* It goes on until its last file is closed. */
    OK(pagemill_file_read_at(other, back, 1, 0, &n));
    CHECK(n == 1 && back[0] == 'n');
    OK(pagemill_file_close(other));
    fclose(stream);
}

/* By its path, and what cannot be opened. */
static void what_cannot_be_opened(struct pagemill_allocator *allocator) {
    struct pagemill_page_cache *cache;
    struct pagemill_file *file = NULL;
    char path[] = "/tmp/pagemill-cache-XXXXXX";
    int descriptor = mkstemp(path), pipes[2];
    CHECK(descriptor >= 0 && pipe(pipes) == 0);
    OK(pagemill_page_cache_create(allocator, NULL, &cache));
    OK(pagemill_page_cache_open_path(cache, path, 0, &file));
    OK(pagemill_file_write_at(file, "abc", 3, 0, NULL));
    OK(pagemill_file_close(file));
    OK(pagemill_page_cache_open_path(cache, path, PAGEMILL_FILE_READ_ONLY, &file));
    CHECK(pagemill_file_len(file) == 3);
    errno = 0;
    EXPECT(PAGEMILL_ERROR_IO, pagemill_file_set_len(file, 1));
    CHECK(errno == EACCES && pagemill_file_len(file) == 3);
    OK(pagemill_file_close(file));
    OK(unlink(path));
    EXPECT(PAGEMILL_ERROR_IO, pagemill_page_cache_open_path(cache, path, 0, &file));
    CHECK(errno == ENOENT && file == NULL);
    int opened = pagemill_page_cache_open_path(cache, path, PAGEMILL_FILE_CREATE | PAGEMILL_FILE_DIRECT, &file);
    CHECK(opened == PAGEMILL_ERROR_NONE ? file != NULL : opened == PAGEMILL_ERROR_IO && errno == EOPNOTSUPP);
    if (file)
        OK(pagemill_file_close(file));
    OK(unlink(path));
    EXPECT(PAGEMILL_ERROR_INVALID, pagemill_page_cache_open_path(cache, path, PAGEMILL_FILE_CREATE | PAGEMILL_FILE_READ_ONLY, &file));
    EXPECT(PAGEMILL_ERROR_INVALID, pagemill_page_cache_open_path(cache, path, 8, &file));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_page_cache_open_path(cache, NULL, 0, &file));
    EXPECT(PAGEMILL_ERROR_INVALID, pagemill_page_cache_open_path(cache, "/tmp", 0, &file));
    EXPECT(PAGEMILL_ERROR_INVALID, pagemill_page_cache_open_path(cache, "/dev/null", 0, &file));
    /* A pipe that nobody writes to is not waited for. */
    OK(mkfifo(path, 0600));
    alarm(60);
    EXPECT(PAGEMILL_ERROR_INVALID, pagemill_page_cache_open_path(cache, path, PAGEMILL_FILE_READ_ONLY, &file));
    alarm(0);
    OK(unlink(path));
    EXPECT(PAGEMILL_ERROR_IO, pagemill_page_cache_open(cache, -1, &file));
    CHECK(errno == EBADF);
    EXPECT(PAGEMILL_ERROR_IO, pagemill_page_cache_open(cache, 12345, &file));
    CHECK(errno == EBADF && file == NULL);
    EXPECT(PAGEMILL_ERROR_INVALID, pagemill_page_cache_open(cache, pipes[0], &file));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_page_cache_open(cache, descriptor, NULL));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_page_cache_open(NULL, descriptor, &file));
    close(descriptor);
    close(pipes[0]);
    close(pipes[1]);
    OK(pagemill_page_cache_close(cache));
}

/* A file in memory, whose functions fail as they are told. */
struct memory {
    pthread_mutex_t lock;
    unsigned char *bytes;
    size_t len, room, largest;
    int64_t read_fails;
    int write_fails, sync_fails, set_len_fails, len_fails;
    unsigned reads, writes, syncs, released;
};

static int64_t memory_len(void *user) {
    struct memory *memory = (struct memory *)user;
    return memory->len_fails ? -memory->len_fails : (int64_t)memory->len;
}

/* Copies between the vector and the file, as one read or write of `most` bytes at most. */
static int64_t copy(struct memory *memory, const struct iovec *parts, size_t n, uint64_t at, size_t end, int is_write) {
    size_t done = 0;
    for (size_t part = 0; part < n && at + done < end; part++) {
        size_t bytes = parts[part].iov_len < end - at - done ? parts[part].iov_len : end - at - done;
        if (is_write)
            memcpy(memory->bytes + at + done, parts[part].iov_base, bytes);
        else
            memcpy(parts[part].iov_base, memory->bytes + at + done, bytes);
        done += bytes;
    }
    if (done > memory->largest)
        memory->largest = done;
    return (int64_t)done;
}

static int64_t memory_read(const struct iovec *parts, size_t n, uint64_t at, void *user) {
    struct memory *memory = (struct memory *)user;
    pthread_mutex_lock(&memory->lock);
    memory->reads++;
    int64_t done = memory->read_fails ? -memory->read_fails : copy(memory, parts, n, at, memory->len, 0);
    pthread_mutex_unlock(&memory->lock);
    return done;
}

static int64_t memory_write(const struct iovec *parts, size_t n, uint64_t at, void *user) {
    struct memory *memory = (struct memory *)user;
    pthread_mutex_lock(&memory->lock);
    memory->writes++;
    if (at > memory->len && at <= memory->room)
        memset(memory->bytes + memory->len, 0, (size_t)at - memory->len);
    int64_t done = memory->write_fails ? -memory->write_fails : copy(memory, parts, n, at, memory->room, 1);
    if (done > 0 && at + (uint64_t)done > memory->len)
        memory->len = (size_t)at + (size_t)done;
    pthread_mutex_unlock(&memory->lock);
    return done;
}

static int memory_sync(void *user) {
    struct memory *memory = (struct memory *)user;
    memory->syncs++;
    return -memory->sync_fails;
}

static int memory_set_len(uint64_t len, void *user) {
    struct memory *memory = (struct memory *)user;
    if (memory->set_len_fails)
        return -memory->set_len_fails;
    if (len > memory->room)
        return -ENOSPC;
    if (len > memory->len)
        memset(memory->bytes + memory->len, 0, len - memory->len);
    memory->len = len;
    return 0;
}

static void memory_release(void *user) {
    __atomic_fetch_add(&((struct memory *)user)->released, 1, __ATOMIC_RELEASE);
}

/* A thread of the cache may be the last to have the file. */
static void wait_for_release(struct memory *memory, unsigned times) {
    while (__atomic_load_n(&memory->released, __ATOMIC_ACQUIRE) < times)
        sched_yield();
    CHECK(memory->released == times);
}

static void memory_of(struct memory *memory, size_t len, size_t room) {
    memset(memory, 0, sizeof *memory);
    pthread_mutex_init(&memory->lock, NULL);
    memory->bytes = (unsigned char *)malloc(room);
    CHECK(memory->bytes != NULL);
    memory->len = len;
    memory->room = room;
    fill(memory->bytes, len, 0);
}

static struct pagemill_backing backing_of(struct memory *memory) {
    struct pagemill_backing backing;
    memset(&backing, 0, sizeof backing);
    backing.size = sizeof backing;
    backing.user = memory;
    backing.len = memory_len;
    backing.read = memory_read;
    backing.write = memory_write;
    backing.sync = memory_sync;
    backing.set_len = memory_set_len;
    backing.release = memory_release;
    return backing;
}

/* The errors of the program's functions arrive, with their numbers. */
static void functions_of_the_programs(struct pagemill_allocator *allocator) {
    struct pagemill_page_cache *cache;
    struct pagemill_file *file;
    struct memory memory;
    unsigned char back[3 * PAGEMILL_PAGE_SIZE];
    size_t n = 1;
    memory_of(&memory, 20 * PAGE + 10, 32 * PAGE);
    struct pagemill_backing backing = backing_of(&memory);
    struct pagemill_page_cache_options options = options_of(0);
    options.flags = PAGEMILL_PAGE_CACHE_NO_READAHEAD | PAGEMILL_PAGE_CACHE_WIPED;
    OK(pagemill_page_cache_create(allocator, &options, &cache));
    memory.len_fails = ESTALE;
    EXPECT(PAGEMILL_ERROR_IO, pagemill_page_cache_open_backing(cache, &backing, &file));
    CHECK(errno == ESTALE && file == NULL && memory.released == 1);
    memory.len_fails = 0;
    OK(pagemill_page_cache_open_backing(cache, &backing, &file));
    CHECK(pagemill_file_len(file) == 20 * PAGE + 10);

    memory.read_fails = EREMOTEIO;
    errno = 0;
    EXPECT(PAGEMILL_ERROR_IO, pagemill_file_read_at(file, back, 10, 0, &n));
    CHECK(errno == EREMOTEIO && n == 0 && statistics_of(cache).reads_failed == 1 && statistics_of(cache).pages == 0);
    struct pagemill_lent *lent;
    EXPECT(PAGEMILL_ERROR_IO, pagemill_file_lend(file, 0, 10, &lent));
    CHECK(errno == EREMOTEIO && lent == NULL);
    EXPECT(PAGEMILL_ERROR_IO, pagemill_file_write_at(file, "x", 1, 5, &n)); /* The page's other bytes are to stay. */
    CHECK(errno == EREMOTEIO && n == 0);
    memory.read_fails = 0;
    OK(pagemill_file_read_at(file, back, sizeof back, 100, &n));
    CHECK(n == sizeof back && is_filled(back, n, 100));
    CHECK(statistics_of(cache).pages == 4 && statistics_of(cache).read_ahead == 0);

    memory.write_fails = ENOSPC;
    OK(pagemill_file_write_at(file, "some", 4, 0, NULL));
    EXPECT(PAGEMILL_ERROR_IO, pagemill_file_sync(file));
    CHECK(errno == ENOSPC && statistics_of(cache).dirty == 1 && statistics_of(cache).writes_failed > 0);
    memory.write_fails = 0;
    memory.sync_fails = EIO;
    EXPECT(PAGEMILL_ERROR_IO, pagemill_file_sync(file));
    CHECK(errno == EIO && memory.syncs > 0);
    memory.sync_fails = 0;
    OK(pagemill_file_sync(file));
    CHECK(memcmp(memory.bytes, "some", 4) == 0 && is_filled(memory.bytes + 4, 100, 4));
    EXPECT(PAGEMILL_ERROR_IO, pagemill_file_set_len(file, 1000 * PAGE));
    CHECK(errno == ENOSPC && pagemill_file_len(file) == 20 * PAGE + 10);
    OK(pagemill_file_set_len(file, 3));
    CHECK(memory.len == 3);
    memory.len_fails = ENOLINK;
    EXPECT(PAGEMILL_ERROR_IO, pagemill_file_refresh(file, NULL));
    CHECK(errno == ENOLINK);
    memory.len_fails = 0;

    /* The last opener tells what could not be written. */
    OK(pagemill_file_write_at(file, "lost", 4, 0, NULL));
    memory.write_fails = EDQUOT;
    EXPECT(PAGEMILL_ERROR_IO, pagemill_file_close(file));
    CHECK(errno == EIO); /* Not the number of the write: pages are lost. */
    wait_for_release(&memory, 2);
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_file_close(file));
    free(memory.bytes);

    /* Without a function that writes, and with no numbers of errors. */
    memory_of(&memory, PAGE, PAGE);
    backing = backing_of(&memory);
    backing.write = NULL;
    backing.sync = NULL;
    backing.set_len = NULL;
    OK(pagemill_page_cache_open_backing(cache, &backing, &file));
    OK(pagemill_file_sync(file));
    EXPECT(PAGEMILL_ERROR_IO, pagemill_file_set_len(file, 0));
    CHECK(errno == EROFS);
    OK(pagemill_file_write_at(file, "x", 1, 0, NULL));
    EXPECT(PAGEMILL_ERROR_IO, pagemill_file_sync(file));
    CHECK(errno == EROFS);
    EXPECT(PAGEMILL_ERROR_IO, pagemill_file_close(file));
    wait_for_release(&memory, 1);
    free(memory.bytes);
    memory_of(&memory, PAGE, PAGE);
    OK(pagemill_page_cache_open_backing(cache, &backing, &file));
    memory.read_fails = (int64_t)1 << 40; /* No number of an error. */
    EXPECT(PAGEMILL_ERROR_IO, pagemill_file_read_at(file, back, 1, 0, &n));
    CHECK(errno == EIO && n == 0);
    OK(pagemill_file_close(file));
    wait_for_release(&memory, 1);
    free(memory.bytes);
    OK(pagemill_page_cache_close(cache));
}

/* Bytes without a copy: out of the cache by an I/O vector, and into it as pages. */
static void without_a_copy(struct pagemill_allocator *allocator) {
    struct pagemill_page_cache *cache;
    struct pagemill_file *file;
    struct pagemill_lent *lent;
    struct memory memory;
    memory_of(&memory, 8 * PAGE, 32 * PAGE);
    struct pagemill_backing backing = backing_of(&memory);
    backing.largest = 2 * PAGE;
    OK(pagemill_page_cache_create(allocator, NULL, &cache));
    OK(pagemill_page_cache_open_backing(cache, &backing, &file));

    struct iovec parts[8];
    OK(pagemill_file_lend(file, 100, 3 * PAGE, &lent));
    CHECK(memory.largest == 2 * PAGE);
    CHECK(pagemill_lent_len(lent) == 3 * PAGE && pagemill_lent_parts(lent, NULL, 0) == 4);
    memset(parts, 0, sizeof parts);
    CHECK(pagemill_lent_parts(lent, parts, 3) == 4 && parts[2].iov_len == PAGE && parts[3].iov_base == NULL);
    CHECK(pagemill_lent_parts(lent, parts, 8) == 4 && parts[0].iov_len == PAGE - 100 && parts[3].iov_len == 100);
    OK(pagemill_file_write_at(file, "changed", 7, 100, NULL));
    CHECK(is_filled((unsigned char *)parts[0].iov_base, parts[0].iov_len, 100)); /* Lent bytes do not change. */
    CHECK(statistics_of(cache).lent == 4 && statistics_of(cache).copied == 1);

    /* Two pages of the cache's allocator move, and one that is not whole; then one of another allocator is copied. */
    void *pages[4] = {NULL};
    struct pagemill_bulk request = pagemill_bulk_exact(3, PAGEMILL_GFP_KERNEL);
    size_t n;
    OK(pagemill_alloc_pages_bulk_array(allocator, &request, pages, NULL));
    for (int at = 0; at < 3; at++)
        fill((unsigned char *)pages[at], PAGE, (10 + at) * PAGE);
    EXPECT(PAGEMILL_ERROR_INVALID, pagemill_file_write_pages(file, pages, 2 * PAGE, 1, &n));
    EXPECT(PAGEMILL_ERROR_INVALID, pagemill_file_write_pages(file, pages, 4 * PAGE, 0, &n));
    CHECK(n == 0 && pages[0] && pages[1] && pages[2]);
    pages[3] = parts;
    EXPECT(PAGEMILL_ERROR_FOREIGN, pagemill_file_write_pages(file, pages, 4 * PAGE, 0, &n));
    CHECK(n == 0 && pages[0] && pages[1] && pages[2] && pages[3] == parts);
    pages[3] = pages[0];
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_file_write_pages(file, pages, 4 * PAGE, 0, &n));
    CHECK(n == 0 && pages[0] && pages[3] == pages[0]);
    void *first = pages[0];
    OK(pagemill_file_write_pages(file, pages, 2 * PAGE + 5, 10 * PAGE, &n));
    CHECK(n == 2 * PAGE + 5 && !pages[0] && !pages[1] && !pages[2] && pages[3] == first);
    EXPECT(PAGEMILL_ERROR_DOUBLE_FREE, pagemill_free_page(first)); /* The cache has it. */
    struct pagemill_allocator *foreign = allocator_of(64);
    pages[0] = pagemill_alloc_page(foreign, PAGEMILL_GFP_KERNEL);
    fill((unsigned char *)pages[0], PAGE, 20 * PAGE);
    OK(pagemill_file_write_pages(file, pages, PAGE, 20 * PAGE, &n));
    CHECK(n == PAGE && pages[0] != NULL);
    OK(pagemill_free_page(pages[0]));
    OK(pagemill_allocator_close(foreign, NULL));
    OK(pagemill_file_sync(file));
    CHECK(is_filled(memory.bytes + 10 * PAGE, 2 * PAGE + 5, 10 * PAGE) && is_filled(memory.bytes + 20 * PAGE, PAGE, 20 * PAGE));
    CHECK(memcmp(memory.bytes + 100, "changed", 7) == 0 && memory.bytes[8 * PAGE] == 0);

    /* They outlive the file and the cache. */
    OK(pagemill_file_close(file));
    OK(pagemill_page_cache_close(cache));
    CHECK(is_filled((unsigned char *)parts[3].iov_base, 100, 3 * PAGE));
    OK(pagemill_lent_give_back(lent));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_lent_give_back(lent));
    CHECK(pagemill_lent_len(lent) == 0 && pagemill_lent_parts(lent, parts, 8) == 0);
    wait_for_release(&memory, 1);
    free(memory.bytes);
}

#define THREADS 4
#define ROUNDS 400

struct worker {
    struct pagemill_file *file;
    unsigned id;
};

/* Each thread has every fourth page, which it writes and reads; in between it reads those of others, which are of one round. */
static void *work(void *user) {
    struct worker *worker = (struct worker *)user;
    struct pagemill_file *own;
    unsigned char page[PAGEMILL_PAGE_SIZE];
    uint64_t random = worker->id + 1;
    size_t n;
    OK(pagemill_file_reopen(worker->file, &own));
    for (unsigned round = 0; round < ROUNDS; round++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        uint64_t at = random >> 40;
        at = at % (PAGES / THREADS) * THREADS + worker->id;
        memset(page, (int)round, sizeof page);
        OK(pagemill_file_write_at(own, page, sizeof page, at * PAGE, &n));
        CHECK(n == sizeof page);
        OK(pagemill_file_read_at(own, page, sizeof page, at * PAGE, &n));
        CHECK(n == sizeof page && page[0] == (unsigned char)round && memcmp(page, page + 1, sizeof page - 1) == 0);
        OK(pagemill_file_read_at(own, page, sizeof page, (random >> 20) % PAGES * PAGE, &n));
        CHECK(n == sizeof page && memcmp(page, page + 1, sizeof page - 1) == 0);
        if (round % 100 == 0)
            OK(pagemill_file_sync(own));
    }
    OK(pagemill_file_close(own));
    return NULL;
}

/* Several threads, with a cache of a quarter of the file. */
static void several_threads(struct pagemill_allocator *allocator) {
    struct pagemill_page_cache_options options = options_of(PAGES / 4);
    struct pagemill_page_cache *cache;
    struct pagemill_file *file;
    struct memory memory;
    memory_of(&memory, PAGES * PAGE, PAGES * PAGE);
    memset(memory.bytes, 7, memory.len);
    struct pagemill_backing backing = backing_of(&memory);
    options.window = 8;
    OK(pagemill_page_cache_create(allocator, &options, &cache));
    OK(pagemill_page_cache_open_backing(cache, &backing, &file));
    pthread_t threads[THREADS];
    struct worker workers[THREADS];
    for (unsigned at = 0; at < THREADS; at++) {
        workers[at].file = file;
        workers[at].id = at;
        CHECK(pthread_create(threads + at, NULL, work, workers + at) == 0);
    }
    for (unsigned at = 0; at < THREADS; at++)
        CHECK(pthread_join(threads[at], NULL) == 0);
    CHECK(statistics_of(cache).evicted > 0 && statistics_of(cache).pages <= PAGES / 4);
    OK(pagemill_file_sync(file));
    for (size_t page = 0; page < PAGES; page++)
        CHECK(memcmp(memory.bytes + page * PAGE, memory.bytes + page * PAGE + 1, PAGE - 1) == 0);
    OK(pagemill_file_close(file));
    OK(pagemill_page_cache_close(cache));
    wait_for_release(&memory, 1);
    free(memory.bytes);
}

/* The cache gives its pages to a request that finds none. */
static void memory_is_short(void) {
    struct pagemill_allocator *allocator = allocator_of(128);
    struct pagemill_page_cache *cache;
    struct pagemill_file *file;
    struct memory memory;
    unsigned char page[PAGEMILL_PAGE_SIZE];
    size_t n;
    memory_of(&memory, 128 * PAGE, 128 * PAGE);
    struct pagemill_backing backing = backing_of(&memory);
    OK(pagemill_page_cache_create(allocator, NULL, &cache));
    OK(pagemill_page_cache_open_backing(cache, &backing, &file));
    for (size_t at = 0; at < 128; at++) {
        OK(pagemill_file_read_at(file, page, PAGE, at * PAGE, &n));
        CHECK(n == PAGE && is_filled(page, n, at * PAGE));
    }
    void *pages[64] = {NULL};
    struct pagemill_bulk request = pagemill_bulk_exact(64, PAGEMILL_GFP_KERNEL);
    OK(pagemill_alloc_pages_bulk_array(allocator, &request, pages, NULL));
    CHECK(statistics_of(cache).shrinks > 0 && statistics_of(cache).pages <= 64);

    /* Nothing is left, nor to be had: the request says so. */
    struct pagemill_list *rest = pagemill_list_create();
    OK(pagemill_file_advise(file, PAGEMILL_ADVICE_RANDOM, 0, 0));
    struct pagemill_lent *lent;
    OK(pagemill_page_cache_set_limit(cache, 1));
    OK(pagemill_file_lend(file, 0, 10, &lent));
    EXPECT(PAGEMILL_ERROR_EXHAUSTED, pagemill_file_read_at(file, page, PAGE, 100 * PAGE, &n));
    CHECK(n == 0);
    OK(pagemill_lent_give_back(lent));
    OK(pagemill_file_read_at(file, page, PAGE, 100 * PAGE, &n));
    CHECK(n == PAGE && is_filled(page, n, 100 * PAGE));
    OK(pagemill_list_destroy(rest));
    OK(pagemill_free_pages_bulk(pages, 64, 0, NULL));
    OK(pagemill_file_close(file));
    OK(pagemill_page_cache_close(cache));
    wait_for_release(&memory, 1);
    free(memory.bytes);
    close_whole(allocator, 128);
}

/* A child closes what it has of its parent's, which writes nothing. */
static void after_fork(struct pagemill_allocator *allocator) {
    struct pagemill_page_cache *cache;
    struct pagemill_file *file;
    struct pagemill_lent *lent;
    FILE *stream = tmpfile();
    CHECK(stream != NULL);
    OK(pagemill_page_cache_create(allocator, NULL, &cache));
    OK(pagemill_page_cache_open(cache, fileno(stream), &file));
    OK(pagemill_file_write_at(file, "parent", 6, 0, NULL));
    OK(pagemill_file_lend(file, 0, 6, &lent));
    pid_t child = fork();
    if (child == 0) {
        OK(pagemill_file_close(file));
        EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_file_close(file));
        OK(pagemill_page_cache_close(cache));
        OK(pagemill_lent_give_back(lent));
        _exit(0);
    }
    int status;
    char back[6];
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(pread(fileno(stream), back, 6, 0) == 0);
    OK(pagemill_lent_give_back(lent));
    OK(pagemill_file_close(file));
    CHECK(pread(fileno(stream), back, 6, 0) == 6 && memcmp(back, "parent", 6) == 0);
    OK(pagemill_page_cache_close(cache));
    fclose(stream);
}

static void misuse(struct pagemill_allocator *allocator) {
    struct pagemill_page_cache *cache = NULL;
    struct pagemill_page_cache_options options = options_of(0);
    struct pagemill_page_cache_statistics statistics;
    struct pagemill_file *file;
    struct pagemill_lent *lent;
    struct memory memory;
    memory_of(&memory, PAGE, PAGE);
    struct pagemill_backing backing = backing_of(&memory);
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_page_cache_create(NULL, NULL, &cache));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_page_cache_create(allocator, NULL, NULL));
    options.flags = 4;
    EXPECT(PAGEMILL_ERROR_INVALID, pagemill_page_cache_create(allocator, &options, &cache));
    options.flags = 0;
    options.size--;
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_page_cache_create(allocator, &options, &cache));
    CHECK(cache == NULL);
    OK(pagemill_page_cache_create(allocator, NULL, &cache));
    backing.read = NULL;
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_page_cache_open_backing(cache, &backing, &file));
    backing = backing_of(&memory);
    backing.size = 8;
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_page_cache_open_backing(cache, &backing, &file));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_page_cache_open_backing(cache, NULL, &file));
    CHECK(memory.released == 0 && file == NULL);
    backing = backing_of(&memory);
    OK(pagemill_page_cache_open_backing(cache, &backing, &file));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_file_read_at(file, NULL, 1, 0, NULL));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_file_write_at(file, NULL, 1, 0, NULL));
    EXPECT(PAGEMILL_ERROR_INVALID, pagemill_file_read_at(file, &memory, SIZE_MAX, 0, NULL));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_file_append(file, NULL, 1, NULL));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_file_write_pages(file, NULL, 1, 0, NULL));
    EXPECT(PAGEMILL_ERROR_IO, pagemill_file_write_at(file, "x", 1, UINT64_MAX, NULL));
    CHECK(errno == EFBIG);
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_file_reopen(file, NULL));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_file_lend(file, 0, 1, NULL));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_page_cache_stats(cache, NULL));

    /* A handle of another type, or of none, or closed. */
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_page_cache_close((struct pagemill_page_cache *)(void *)file));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_file_lend((struct pagemill_file *)(void *)cache, 0, 1, &lent));
    OK(pagemill_file_close(file));
    wait_for_release(&memory, 1);
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_file_sync(file));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_file_refresh(file, NULL));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_file_set_len(file, 0));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_file_invalidate(file, 0, 1, NULL));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_file_advise(file, 0, 0, 1));
    EXPECT(PAGEMILL_ERROR_ARGUMENT, pagemill_file_read_at(NULL, &memory, 1, 0, NULL));
    CHECK(pagemill_file_len(file) == 0 && pagemill_file_write_back(file, 0, 1) == 0);
    CHECK(pagemill_file_next_present(file, 0, 1) == UINT64_MAX && pagemill_file_prev_present(NULL, 0, 1) == UINT64_MAX);
    OK(pagemill_page_cache_close(cache));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_page_cache_close(cache));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_page_cache_stats(cache, &statistics));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_page_cache_set_limit(cache, 1));
    EXPECT(PAGEMILL_ERROR_HANDLE, pagemill_page_cache_open(cache, 0, &file));
    CHECK(pagemill_page_cache_evict(cache, 1) == 0 && pagemill_page_cache_write_back(NULL, 1) == 0);
    free(memory.bytes);
}

int main(void) {
    struct pagemill_allocator *allocator = allocator_of(1024);
    a_file_of_the_system(allocator);
    what_cannot_be_opened(allocator);
    functions_of_the_programs(allocator);
    without_a_copy(allocator);
    several_threads(allocator);
    after_fork(allocator);
    misuse(allocator);
    close_whole(allocator, 1024);
    memory_is_short();
    return 0;
}
