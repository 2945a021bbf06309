/* Queues of threads that wait until something is so. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_WAIT_H
#define PAGEMILL_LINUX_WAIT_H

#include <linux/compiler.h>
#include <linux/jiffies.h>
#include <linux/spinlock.h>

typedef struct wait_queue_head {
    spinlock_t lock;
} wait_queue_head_t;

#define __WAIT_QUEUE_HEAD_INITIALIZER(name) {{0}}
#define DECLARE_WAIT_QUEUE_HEAD(name) wait_queue_head_t name = {{0}}
#define init_waitqueue_head(queue) spin_lock_init(&(queue)->lock)

/* All threads that sleep in the process sleep in one place: `pagemill_sleeps` is the number of its wakes so far, and
 * `pagemill_sleep` sleeps until there was another, at most so many ticks. Returns those that are left. */
unsigned int pagemill_sleeps(void);
unsigned long pagemill_sleep(unsigned int since, unsigned long ticks);
void pagemill_wake(void);

#define wake_up(queue) ((void)(queue), pagemill_wake())
#define wake_up_all wake_up
#define wake_up_interruptible wake_up
#define wake_up_interruptible_all wake_up
#define wake_up_nr(queue, number) wake_up(queue)

/* Ticks that were left, at least 1; 0 if the time was over and the condition is not so. */
#define wait_event_timeout(queue, condition, ticks)                          \
    ({                                                                       \
        unsigned long left_ = (ticks);                                       \
        (void)&(queue);                                                      \
        for (;;) {                                                           \
            unsigned int since_ = pagemill_sleeps();                         \
            if (condition) {                                                 \
                left_ = left_ ? left_ : 1;                                   \
                break;                                                       \
            }                                                                \
            if (!left_)                                                      \
                break;                                                       \
            left_ = pagemill_sleep(since_, left_);                           \
        }                                                                    \
        left_;                                                               \
    })
#define wait_event(queue, condition) ((void)wait_event_timeout(queue, condition, MAX_SCHEDULE_TIMEOUT))
#define wait_event_interruptible(queue, condition) ({ wait_event(queue, condition); 0; })
#define wait_event_killable wait_event_interruptible
#define wait_event_interruptible_timeout wait_event_timeout

#endif
