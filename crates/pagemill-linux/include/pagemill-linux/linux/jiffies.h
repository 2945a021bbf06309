/* Time in ticks, 250 a second. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_JIFFIES_H
#define PAGEMILL_LINUX_JIFFIES_H

#include <linux/limits.h>
#include <linux/timex.h>
#include <linux/types.h>

#define HZ 250
#define MAX_SCHEDULE_TIMEOUT LONG_MAX
#define MAX_JIFFY_OFFSET ((LONG_MAX >> 1) - 1)

unsigned long pagemill_jiffies(void);
#define jiffies pagemill_jiffies()
#define jiffies_64 ((u64)jiffies)
#define get_jiffies_64() jiffies_64
#define time_after(a, b) ((long)((b) - (a)) < 0)
#define time_before(a, b) time_after(b, a)
#define time_after_eq(a, b) ((long)((a) - (b)) >= 0)
#define time_before_eq(a, b) time_after_eq(b, a)
static inline unsigned long msecs_to_jiffies(unsigned int ms) { return ((unsigned long)ms * HZ + 999) / 1000; }
static inline unsigned long usecs_to_jiffies(unsigned int us) { return ((unsigned long)us * HZ + 999999) / 1000000; }
static inline unsigned int jiffies_to_msecs(unsigned long ticks) { return ticks * (1000 / HZ); }
static inline unsigned int jiffies_to_usecs(unsigned long ticks) { return ticks * (1000000 / HZ); }

#endif
