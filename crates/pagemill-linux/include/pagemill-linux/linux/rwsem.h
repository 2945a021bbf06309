/* A lock for one writer or several readers, which sleep. A writer that waits goes before new readers. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_RWSEM_H
#define PAGEMILL_LINUX_RWSEM_H

#include <linux/compiler.h>

struct rw_semaphore {
    int readers;            /* -1: a writer. */
    unsigned int writers;   /* That wait. */
};

#define __RWSEM_INITIALIZER(name) {0, 0}
#define DECLARE_RWSEM(name) struct rw_semaphore name = {0, 0}
static inline void init_rwsem(struct rw_semaphore *lock) { *lock = (struct rw_semaphore){0, 0}; }
void down_read(struct rw_semaphore *lock);
int down_read_trylock(struct rw_semaphore *lock);
void up_read(struct rw_semaphore *lock);
void down_write(struct rw_semaphore *lock);
int down_write_trylock(struct rw_semaphore *lock);
void up_write(struct rw_semaphore *lock);

#endif
