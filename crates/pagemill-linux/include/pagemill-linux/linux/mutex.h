/* A lock that sleeps. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_MUTEX_H
#define PAGEMILL_LINUX_MUTEX_H

#include <linux/compiler.h>

/* 0: free; 1: taken; 2: taken, and threads may sleep. */
struct mutex {
    unsigned int state;
};

#define __MUTEX_INITIALIZER(name) {0}
#define DEFINE_MUTEX(name) struct mutex name = {0}
static inline void mutex_init(struct mutex *mutex) { mutex->state = 0; }
static inline void mutex_destroy(struct mutex *mutex) { (void)mutex; }
int mutex_trylock(struct mutex *mutex);
void mutex_lock(struct mutex *mutex);
void mutex_unlock(struct mutex *mutex);
static inline int mutex_lock_interruptible(struct mutex *mutex) {
    mutex_lock(mutex);
    return 0;
}
#define mutex_lock_killable mutex_lock_interruptible
#define mutex_lock_nested(mutex, class) mutex_lock(mutex)
static inline bool mutex_is_locked(struct mutex *mutex) { return __atomic_load_n(&mutex->state, __ATOMIC_RELAXED) != 0; }

#endif
