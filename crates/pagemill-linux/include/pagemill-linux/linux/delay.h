/* Sleeping for a time. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_DELAY_H
#define PAGEMILL_LINUX_DELAY_H

#include <linux/math.h>
#include <linux/types.h>

void pagemill_sleep_ns(u64 ns);
#define ndelay(ns) pagemill_sleep_ns(ns)
#define udelay(us) pagemill_sleep_ns((us) * 1000ULL)
#define mdelay(ms) pagemill_sleep_ns((ms) * 1000000ULL)
#define fsleep udelay
#define usleep_range(least, most) pagemill_sleep_ns((least) * 1000ULL)
#define msleep mdelay
#define ssleep(seconds) pagemill_sleep_ns((seconds) * 1000000000ULL)
static inline unsigned long msleep_interruptible(unsigned int ms) {
    msleep(ms);
    return 0;
}

#endif
