/* A count of references that warns of misuse and stays as it is then. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_REFCOUNT_H
#define PAGEMILL_LINUX_REFCOUNT_H

#include <linux/atomic.h>
#include <linux/bug.h>

typedef struct {
    atomic_t refs;
} refcount_t;

#define REFCOUNT_INIT(number) {ATOMIC_INIT(number)}
static inline void refcount_set(refcount_t *count, int to) { atomic_set(&count->refs, to); }
static inline unsigned int refcount_read(const refcount_t *count) { return atomic_read(&count->refs); }
static inline bool refcount_inc_not_zero(refcount_t *count) { return atomic_inc_not_zero(&count->refs); }
static inline void refcount_inc(refcount_t *count) { WARN(!refcount_inc_not_zero(count), "a reference to what is freed"); }
static inline bool refcount_dec_and_test(refcount_t *count) {
    int was = atomic_fetch_add_unless(&count->refs, -1, 0);
    WARN(was == 0, "more references are dropped than there are");
    return was == 1;
}

#endif
