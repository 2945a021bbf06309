/* Copies for each CPU.
 *
 * Every CPU has a unit of address space of one size. CPU 0's unit hands out pieces, and a piece's other copies lie at the same place of
 * the other units: so the copy of a CPU follows from an address alone, also one inside a piece. A piece has a power of two of bytes, and
 * is aligned to it. */
#include "internal.h"
#include <linux/kernel.h>
#include <linux/percpu.h>
#include <linux/spinlock.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define UNIT (256UL << 20)
#define LEAST_SHIFT 3
#define CLASSES 13
#define MOST (1UL << (LEAST_SHIFT + CLASSES - 1))

/* The variables of source files, CPU 0's copies. */
extern char __start_pagemill_percpu[] __attribute__((weak));
extern char __stop_pagemill_percpu[] __attribute__((weak));

static char *units;
/* For each place where a piece may begin: one more than the class of the piece that is allocated there. */
static u8 *classes;
static unsigned long used;
static void *unused[CLASSES];
static spinlock_t lock;

static void *reserve(size_t size) {
    void *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        panic("the system refuses address space for variables of each CPU");
    return start;
}

static void begin(void) {
    size_t size = (size_t)(__stop_pagemill_percpu - __start_pagemill_percpu);
    classes = reserve(UNIT >> LEAST_SHIFT);
    units = reserve(UNIT * pagemill_nr_cpus());
    used = ALIGN(size, MOST);
    for (unsigned int cpu = 1; size > 0 && cpu < pagemill_nr_cpus(); cpu++)
        memcpy(units + cpu * UNIT, __start_pagemill_percpu, size);
}

static void make(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, begin);
}

void *pagemill_per_cpu(const volatile void *copies, unsigned int cpu) {
    char *copy = (char *)copies;
    make();
    if (cpu == 0)
        return copy;
    if (copy >= __start_pagemill_percpu && copy < __stop_pagemill_percpu)
        return units + cpu * UNIT + (copy - __start_pagemill_percpu);
    return copy + cpu * UNIT;
}

void __percpu *__alloc_percpu_gfp(size_t size, size_t align, gfp_t gfp) {
    (void)gfp;
    if (WARN_ONCE(size == 0 || max(size, align) > MOST || align > PAGE_SIZE || !is_power_of_2(align),
                  "%zu bytes for each CPU, aligned to %zu", size, align))
        return NULL;
    unsigned int class = (unsigned int)max(order_base_2(max(size, align)), LEAST_SHIFT) - LEAST_SHIFT;
    size_t bytes = 1UL << (class + LEAST_SHIFT);
    make();
    spin_lock(&lock);
    char *piece = unused[class];
    if (piece) {
        memcpy(&unused[class], piece, sizeof(void *));
    } else if (ALIGN(used, bytes) + bytes <= UNIT) {
        piece = units + ALIGN(used, bytes);
        used = ALIGN(used, bytes) + bytes;
    }
    if (piece)
        classes[(piece - units) >> LEAST_SHIFT] = (u8)(class + 1);
    spin_unlock(&lock);
    for (unsigned int cpu = 0; piece && cpu < pagemill_nr_cpus(); cpu++)
        memset(piece + cpu * UNIT, 0, bytes);
    return piece;
}

void free_percpu(void __percpu *copies) {
    unsigned long at = (unsigned long)copies - (unsigned long)units;
    if (!copies)
        return;
    make();
    spin_lock(&lock);
    u8 *class = at < UNIT && at % (1 << LEAST_SHIFT) == 0 ? &classes[at >> LEAST_SHIFT] : NULL;
    bool is_piece = class && *class > 0;
    if (is_piece) {
        memcpy(copies, &unused[*class - 1], sizeof(void *));
        unused[*class - 1] = copies;
        *class = 0;
    }
    spin_unlock(&lock);
    WARN(!is_piece, "free_percpu of %p, which is not allocated", copies);
}
