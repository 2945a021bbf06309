/* A count of references in an object. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_KREF_H
#define PAGEMILL_LINUX_KREF_H

#include <linux/refcount.h>

struct kref {
    refcount_t refcount;
};

static inline void kref_init(struct kref *kref) { refcount_set(&kref->refcount, 1); }
static inline unsigned int kref_read(const struct kref *kref) { return refcount_read(&kref->refcount); }
static inline void kref_get(struct kref *kref) { refcount_inc(&kref->refcount); }
static inline bool kref_get_unless_zero(struct kref *kref) { return refcount_inc_not_zero(&kref->refcount); }
/* Whether it was the last one, which `release` was called for. */
static inline int kref_put(struct kref *kref, void (*release)(struct kref *kref)) {
    bool is_last = refcount_dec_and_test(&kref->refcount);
    if (is_last)
        release(kref);
    return is_last;
}

#endif
