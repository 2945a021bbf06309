/* Waiting for something to be done. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_COMPLETION_H
#define PAGEMILL_LINUX_COMPLETION_H

#include <linux/compiler.h>

struct completion {
    unsigned int done;
};

#define COMPLETION_INITIALIZER(name) {0}
#define DECLARE_COMPLETION(name) struct completion name = {0}
#define DECLARE_COMPLETION_ONSTACK DECLARE_COMPLETION
static inline void init_completion(struct completion *completion) { completion->done = 0; }
static inline void reinit_completion(struct completion *completion) { completion->done = 0; }
/* Lets one waiter go on. */
void complete(struct completion *completion);
/* Lets all go on, also those to come. */
void complete_all(struct completion *completion);
void wait_for_completion(struct completion *completion);
/* Ticks that were left, at least 1; 0 if the time was over. */
unsigned long wait_for_completion_timeout(struct completion *completion, unsigned long ticks);
bool try_wait_for_completion(struct completion *completion);
bool completion_done(struct completion *completion);
static inline int wait_for_completion_interruptible(struct completion *completion) {
    wait_for_completion(completion);
    return 0;
}
#define wait_for_completion_killable wait_for_completion_interruptible
#define wait_for_completion_interruptible_timeout wait_for_completion_timeout

#endif
