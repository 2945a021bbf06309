/* Time in nanoseconds. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_KTIME_H
#define PAGEMILL_LINUX_KTIME_H

#include <linux/jiffies.h>
#include <linux/math.h>
#include <linux/types.h>

typedef s64 ktime_t;

#define NSEC_PER_USEC 1000L
#define NSEC_PER_MSEC 1000000L
#define NSEC_PER_SEC 1000000000L
#define USEC_PER_MSEC 1000L
#define USEC_PER_SEC 1000000L
#define MSEC_PER_SEC 1000L
#define KTIME_MAX ((s64)~((u64)1 << 63))

/* Since the machine started, without the time that it slept. */
u64 ktime_get_ns(void);
static inline ktime_t ktime_get(void) { return ktime_get_ns(); }
/* Since 1970. */
u64 ktime_get_real_ns(void);
static inline ktime_t ktime_get_real(void) { return ktime_get_real_ns(); }
static inline s64 ktime_get_seconds(void) { return ktime_get_ns() / NSEC_PER_SEC; }
static inline s64 ktime_get_real_seconds(void) { return ktime_get_real_ns() / NSEC_PER_SEC; }
#define ktime_get_raw ktime_get
#define ktime_get_raw_ns ktime_get_ns
#define ktime_get_boottime ktime_get
#define ktime_get_boottime_ns ktime_get_ns
#define ktime_get_mono_fast_ns ktime_get_ns
#define local_clock ktime_get_ns
#define sched_clock ktime_get_ns

static inline ktime_t ktime_set(s64 seconds, unsigned long ns) { return seconds * NSEC_PER_SEC + ns; }
static inline ktime_t ns_to_ktime(u64 ns) { return ns; }
static inline ktime_t us_to_ktime(u64 us) { return us * NSEC_PER_USEC; }
static inline ktime_t ms_to_ktime(u64 ms) { return ms * NSEC_PER_MSEC; }
static inline s64 ktime_to_ns(ktime_t time) { return time; }
static inline s64 ktime_to_us(ktime_t time) { return time / NSEC_PER_USEC; }
static inline s64 ktime_to_ms(ktime_t time) { return time / NSEC_PER_MSEC; }
#define ktime_add(a, b) ((a) + (b))
#define ktime_sub(a, b) ((a) - (b))
#define ktime_add_ns(time, ns) ((time) + (ns))
#define ktime_sub_ns(time, ns) ((time) - (ns))
#define ktime_add_us(time, us) ((time) + (us) * NSEC_PER_USEC)
#define ktime_add_ms(time, ms) ((time) + (ms) * NSEC_PER_MSEC)
static inline s64 ktime_us_delta(ktime_t later, ktime_t earlier) { return ktime_to_us(later - earlier); }
static inline s64 ktime_ms_delta(ktime_t later, ktime_t earlier) { return ktime_to_ms(later - earlier); }
static inline int ktime_compare(ktime_t a, ktime_t b) { return a < b ? -1 : a > b; }
#define ktime_before(a, b) (ktime_compare(a, b) < 0)
#define ktime_after(a, b) (ktime_compare(a, b) > 0)

#endif
